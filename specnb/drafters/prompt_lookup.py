"""Prompt lookup: draft by copying what followed the same n-gram earlier in the request.

Needs no weights. The matching rule is vLLM's `ngram` method: the longest suffix of
prompt and answer, between `prompt_lookup_min` and `prompt_lookup_max` tokens, that also
occurs earlier; its earliest occurrence; up to K tokens that followed it. The proposal is
one-hot, so verification stays lossless at any temperature.

References: Saxena, prompt-lookup-decoding (2023); vLLM `vllm/v1/spec_decode/ngram_proposer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specnb.drafters.base import Draft, Features


class PromptLookup:
    """The n-gram drafter. Keeps, for each slot, the first place at which each n-gram ended."""

    def __init__(
        self, *, num_speculative_tokens: int = 7, prompt_lookup_min: int = 1, prompt_lookup_max: int = 3
    ) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._sizes = range(prompt_lookup_min, prompt_lookup_max + 1)
        self._tokens: dict[int, list[int]] = {}
        self._ends: dict[int, dict[tuple[int, ...], int]] = {}

    @property
    def num_speculative_tokens(self) -> int:
        """Longest chain it proposes (K)."""
        return self._num_speculative_tokens

    @property
    def taps(self) -> tuple[int, ...]:
        """Needs nothing of the target but its tokens."""
        return ()

    def describe(self) -> dict[str, Any]:
        """Resolved settings for the manifest."""
        return {
            "method": "ngram",
            "label": "prompt lookup",
            "num_speculative_tokens": self._num_speculative_tokens,
            "prompt_lookup_min": self._sizes.start,
            "prompt_lookup_max": self._sizes.stop - 1,
            "proposal": "one-hot",
        }

    def begin(self, *, num_slots: int, capacity: int) -> None:
        """Needs no room of a fixed size."""

    def admit(self, slot: int, token_ids: Sequence[int], features: Features | None = None) -> None:
        """Indexes the n-grams of a new request's tokens."""
        self._tokens[slot] = []
        self._ends[slot] = {}
        self.observe(slot, token_ids)

    def observe(self, slot: int, token_ids: Sequence[int], features: Features | None = None) -> None:
        """Indexes the n-grams that end in the new tokens; the first occurrence wins."""
        tokens, ends = self._tokens[slot], self._ends[slot]
        for token in token_ids:
            # An n-gram enters the index when a token follows it, so that a suffix never matches itself.
            for size in self._sizes:
                if len(tokens) >= size:
                    ends.setdefault(tuple(tokens[-size:]), len(tokens))
            tokens.append(token)

    def propose(
        self, slots: Sequence[int], *, temperature: float, rngs: Sequence[np.random.Generator]
    ) -> list[Draft]:
        """One chain a slot, empty where no n-gram recurs; the same at every temperature."""
        return [self._propose(slot) for slot in slots]

    def move(self, source: int, target: int) -> None:
        """Takes the index along to the new slot."""
        self._tokens[target] = self._tokens.pop(source)
        self._ends[target] = self._ends.pop(source)

    def release(self, slot: int) -> None:
        """Forgets the slot's tokens."""
        del self._tokens[slot], self._ends[slot]

    def _propose(self, slot: int) -> Draft:
        tokens, ends = self._tokens[slot], self._ends[slot]
        for size in reversed(self._sizes):
            if len(tokens) >= size:
                start = ends.get(tuple(tokens[-size:]))
                if start is not None:
                    return Draft(token_ids=tuple(tokens[start : start + self._num_speculative_tokens]))
        return Draft()
