"""What a drafter is: it proposes a chain of tokens, with the probabilities it drew them from.

A drafter sees tokens (and, where it asks for them, the target's hidden states) and knows
nothing of verification or records. One drafter object serves all slots of an engine;
slots are numbered by the engine and reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A chain of drafted tokens for one request in one step; empty when the drafter has nothing to say.

    `candidate_ids` [draft tokens, candidates] holds the tokens considered at each place, ordered by the
    drafter's own score before any path selection, best first; None if the drafter keeps no candidates.
    `candidate_probs`, of the same shape, is the law that each token was drawn from; None means one-hot
    proposals (probability 1 at the drafted token), as deterministic drafters make.
    """

    token_ids: tuple[int, ...] = ()
    candidate_ids: np.ndarray[Any, np.dtype[np.int64]] | None = None
    candidate_probs: np.ndarray[Any, np.dtype[np.float64]] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def prob_of(self, position: int) -> float:
        """Proposal probability of the token drafted at `position`, in (0, 1]."""
        if self.candidate_ids is None or self.candidate_probs is None:
            return 1.0
        match = self.candidate_ids[position] == self.token_ids[position]
        return float(self.candidate_probs[position][match].sum())

    def rank_of(self, position: int, token_id: int) -> int | None:
        """0-based rank of a token among the candidates at `position`; None if it is not one.

        A drafter without candidates counts as one whose only candidate is the drafted token.
        """
        if self.candidate_ids is None:
            return 0 if self.token_ids[position] == token_id else None
        found = np.flatnonzero(self.candidate_ids[position] == token_id)
        return int(found[0]) if len(found) else None

    def subtract_from(self, target_law: torch.Tensor, position: int) -> None:
        """Turns a row of target probabilities into max(0, p - q) in place (not normalised).

        Effects: changes `target_law`.  # shape: [vocabulary]
        """
        if self.candidate_ids is None or self.candidate_probs is None:
            target_law[self.token_ids[position]] = 0.0
            return
        ids = self.candidate_ids[position].tolist()
        for token, prob in zip(ids, self.candidate_probs[position].tolist(), strict=True):
            target_law[token] -= prob
        target_law.clamp_(min=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Hidden states of one request in one target forward.

    `states` has one tensor for each of the drafter's taps, for the whole batch (# shape: [rows, width,
    hidden]); `row` is the request's. Column 0 belongs to the first token fed.
    """

    states: tuple[torch.Tensor, ...]
    row: int


class Drafter(Protocol):
    """A drafter as the in-process engine drives it: begin, then admit, propose and observe until release."""

    @property
    def num_speculative_tokens(self) -> int:
        """Longest chain it proposes (K)."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """0-based target layers whose outputs it wants as `Features`, in this order; empty for none."""
        ...

    def describe(self) -> dict[str, Any]:
        """Resolved settings for the manifest."""
        ...

    def begin(self, *, num_slots: int, capacity: int) -> None:
        """A cell starts with slots 0 to `num_slots` - 1, each of up to `capacity` tokens, drafts included."""
        ...

    def admit(self, slot: int, token_ids: Sequence[int], features: Features | None = None) -> None:
        """A new request starts in `slot` with these tokens (prompt, and the first emitted token).

        `features` cover all tokens but the last, whose own are not known yet.
        """
        ...

    def observe(self, slot: int, token_ids: Sequence[int], features: Features | None = None) -> None:
        """The target emitted these tokens for the request in `slot`.

        `features` begin at the token before them, so that they cover all but the last again.
        """
        ...

    def propose(
        self, slots: Sequence[int], *, temperature: float, rngs: Sequence[np.random.Generator]
    ) -> list[Draft]:
        """One draft a slot; randomness, if any, comes from that request's generator."""
        ...

    def move(self, source: int, target: int) -> None:
        """The request in slot `source` goes on in the free slot `target`."""
        ...

    def release(self, slot: int) -> None:
        """The request in `slot` has ended."""
        ...
