"""Training a drafter for a target: corpus, hidden states, training, export."""
