"""Prompt lookup against a naive search over the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.config import Speculative
from specnb.drafters import PromptLookup, make_drafter
from specnb.errors import PlanError


def propose(drafter: PromptLookup, slot: int = 0) -> tuple[int, ...]:
    return drafter.propose([slot], temperature=0.0, rngs=[np.random.default_rng(0)])[0].token_ids


def naive(tokens: list[int], *, smallest: int, largest: int, width: int) -> tuple[int, ...]:
    """The longest suffix that occurs earlier, its earliest occurrence, and what followed it."""
    for size in range(largest, smallest - 1, -1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                return tuple(tokens[start + size : start + size + width])
    return ()


def test_copies_what_followed_the_longest_earlier_match() -> None:
    drafter = PromptLookup(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
    drafter.admit(0, [5, 1, 2, 3, 9, 7, 2, 3, 4, 8, 1, 2, 3])
    # 1 2 3 occurs first at index 1; 9 7 2 followed it.
    assert propose(drafter) == (9, 7, 2)


def test_prefers_the_earliest_occurrence() -> None:
    drafter = PromptLookup(num_speculative_tokens=2, prompt_lookup_min=1, prompt_lookup_max=1)
    drafter.admit(0, [4, 10, 4, 20, 4])
    assert propose(drafter) == (10, 4)


def test_drafts_fewer_tokens_when_fewer_followed_and_none_without_a_match() -> None:
    drafter = PromptLookup(num_speculative_tokens=7, prompt_lookup_min=1, prompt_lookup_max=3)
    drafter.admit(0, [1, 2, 1])
    assert propose(drafter) == (2, 1)
    drafter.observe(0, [3])
    assert propose(drafter) == ()


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 8),
    st.integers(1, 59),
)
def test_equals_a_naive_search_however_the_tokens_arrive(
    tokens: list[int], smallest: int, extra: int, width: int, cut: int
) -> None:
    drafter = PromptLookup(
        num_speculative_tokens=width, prompt_lookup_min=smallest, prompt_lookup_max=smallest + extra
    )
    drafter.admit(3, tokens[:cut])
    for token in tokens[cut:]:
        drafter.observe(3, [token])
    assert propose(drafter, 3) == naive(tokens, smallest=smallest, largest=smallest + extra, width=width)


def test_make_drafter_resolves_defaults_and_refuses_what_it_can_not_do() -> None:
    assert make_drafter(Speculative(method="ngram", num_speculative_tokens=5)).describe() == {
        "method": "ngram",
        "label": "prompt lookup",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
        "proposal": "one-hot",
    }
    with pytest.raises(
        PlanError, match=r"speculative.method: 'eagle' is not available in the in-process engine"
    ):
        make_drafter(Speculative(method="eagle", num_speculative_tokens=5))
    with pytest.raises(PlanError, match="method ngram takes no key 'lookahead'"):
        make_drafter(Speculative(method="ngram", num_speculative_tokens=5, lookahead=3))
    with pytest.raises(PlanError, match=r"speculative.model: method ngram has no weights; remove the key"):
        make_drafter(Speculative(method="ngram", num_speculative_tokens=5, model="x"))
