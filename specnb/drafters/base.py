"""What a drafter is: it proposes a chain of tokens, with the probabilities it drew them from.

A drafter sees tokens (and, where it asks for them, the target's hidden states) and knows
nothing of verification, batches of records or files. One drafter object serves all slots
of an engine; slots are numbered by the engine and reused.
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

    `candidate_ids` and `candidate_probs` (both [draft tokens, candidates]) hold the proposal each
    token was drawn from, most likely candidate first; None means one-hot proposals (probability 1
    at the drafted token), as deterministic drafters make.
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
        """0-based rank of a token among the candidates at `position`; None if it is not one."""
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


class Drafter(Protocol):
    """A drafter as the in-process engine drives it: admit, then propose and observe until release."""

    @property
    def num_speculative_tokens(self) -> int:
        """Longest chain it proposes (K)."""
        ...

    def describe(self) -> dict[str, Any]:
        """Resolved settings for the manifest."""
        ...

    def admit(self, slot: int, token_ids: Sequence[int]) -> None:
        """A new request starts in `slot` with these tokens (prompt, and the first emitted token)."""
        ...

    def observe(self, slot: int, token_ids: Sequence[int]) -> None:
        """The target emitted these tokens for the request in `slot`."""
        ...

    def propose(
        self, slots: Sequence[int], *, temperature: float, rngs: Sequence[np.random.Generator]
    ) -> list[Draft]:
        """One draft a slot; randomness, if any, comes from that request's generator."""
        ...

    def release(self, slot: int) -> None:
        """The request in `slot` has ended."""
        ...
