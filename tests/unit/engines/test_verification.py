"""Verification keeps the target's law: probabilities by hand, and exact laws by enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.drafters import Draft
from specnb.engines import verification
from specnb.engines.verification import SamplingLaw, draw, judge, token_facts


def naive_law(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The law in plain Python: temperature, top-k (ties kept), top-p over (probability, id)."""
    scaled = [value / temperature for value in logits]
    if 0 < top_k < len(scaled):
        border = sorted(scaled, reverse=True)[top_k - 1]
        scaled = [value if value >= border else -math.inf for value in scaled]
    top = max(scaled)
    weights = [math.exp(value - top) for value in scaled]
    probs = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept, mass = set(), 0.0
    for token in order:
        if mass >= top_p and kept:
            break
        kept.add(token)
        mass += probs[token]
    probs = [prob if token in kept else 0.0 for token, prob in enumerate(probs)]
    return [prob / sum(probs) for prob in probs]


@settings(deadline=None)
@given(
    st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=2, max_size=12),
    st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 5]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)
def test_law_equals_the_definition(logits: list[float], temperature: float, top_k: int, top_p: float) -> None:
    law = SamplingLaw(temperature=temperature, top_k=top_k, top_p=top_p)
    computed = law.probabilities(torch.tensor([logits], dtype=torch.float64))[0].tolist()
    assert computed == pytest.approx(naive_law(logits, temperature, top_k, top_p), abs=1e-12)


@pytest.mark.parametrize("shape", ["peaked", "flat", "ties"])
def test_nucleus_of_a_wide_vocabulary_equals_a_full_sort(shape: str) -> None:
    """Both the short way (few tokens hold the mass) and the fallback must give the sorted answer."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 2000, generator=generator, dtype=torch.float64)
    if shape == "peaked":
        logits *= 6
    if shape == "ties":
        logits = (logits * 2).round()
    law = SamplingLaw(temperature=1.0, top_p=0.9).probabilities(logits)
    for row in range(3):
        assert law[row].tolist() == pytest.approx(naive_law(logits[row].tolist(), 1.0, 0, 0.9), abs=1e-12)


def test_greedy_law_is_one_hot_at_the_lowest_id_of_equals() -> None:
    assert SamplingLaw(temperature=0).probabilities(torch.tensor([[1.0, 3.0, 3.0]])).tolist() == [[0, 1, 0]]


def test_draw_inverts_the_cumulative_law_and_never_returns_an_impossible_token() -> None:
    law = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    for uniform, token in [(0.0, 1), (0.2499, 1), (0.25, 3), (0.999999999999, 3)]:
        assert draw(law, [uniform]) == [token]
    # Not normalised weights give the same tokens.
    assert draw(law * 3, [0.2499]) == [1]
    assert draw(torch.tensor([[1e-300, 0.0]], dtype=torch.float64), [1 - 2**-53]) == [0]


def test_greedy_judgement_by_hand() -> None:
    logits = torch.full((2, 4, 6), -5.0)
    for row, picks in enumerate([[1, 2, 3, 4], [5, 0, 0, 0]]):
        for column, token in enumerate(picks):
            logits[row, column, token] = 5.0
    drafts = [Draft(token_ids=(1, 2, 0)), Draft()]
    full, empty = judge(logits, drafts, SamplingLaw(temperature=0), [np.random.default_rng(0)] * 2)
    assert (full.num_accepted, full.tokens) == (2, [1, 2, 3])
    assert full.draft_target_prob == [1.0, 1.0, 0.0]
    assert full.argmax_rank == [0, 0, None]
    assert (empty.num_accepted, empty.tokens, empty.draft_target_prob) == (0, [5], [])


def test_token_facts_by_hand() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.7, 0.3, 0.0, 0.0]])
    facts = token_facts(probs.log(), [1, 0])
    assert facts.logprob == pytest.approx([math.log(0.25), math.log(0.7)], abs=1e-6)
    entropies = [scipy.stats.entropy([0.5, 0.25, 0.125, 0.125]), scipy.stats.entropy([0.7, 0.3])]
    assert facts.entropy_nats == pytest.approx(entropies, abs=1e-6)
    assert facts.margin_nats == pytest.approx([math.log(2), math.log(7 / 3)], abs=1e-6)


VOCABULARY = 5
DEPTH = 3


def _context_logits(prefix: tuple[int, ...]) -> torch.Tensor:
    """Logits of a made-up target that depend on the whole prefix."""
    generator = torch.Generator().manual_seed(
        1000 + sum((token + 1) * 7**place for place, token in enumerate(prefix))
    )
    return torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) * 1.5


def _proposal(prefix: tuple[int, ...], rng: np.random.Generator, *, one_hot: bool) -> Draft:
    """A bad drafter: tokens drawn from laws that have little to do with the target's."""
    tokens: list[int] = []
    ids, probs = [], []
    for _ in range(DEPTH - 1):
        own = np.random.default_rng(len(prefix) + 10 * sum(prefix) + 100 * sum(tokens))
        weights = own.dirichlet(np.ones(3))
        candidates = own.permutation(VOCABULARY)[:3]
        order = np.argsort(-weights)
        candidates, weights = candidates[order], weights[order]
        tokens.append(int(candidates[0] if one_hot else rng.choice(candidates, p=weights)))
        ids.append(candidates)
        probs.append(weights)
    if one_hot:
        return Draft(token_ids=tuple(tokens))
    return Draft(token_ids=tuple(tokens), candidate_ids=np.array(ids), candidate_probs=np.array(probs))


def _speculate(law: SamplingLaw, rng: np.random.Generator, *, one_hot: bool) -> tuple[int, ...]:
    """The first DEPTH tokens of a sequence made by draft and verify steps."""
    prefix: tuple[int, ...] = ()
    while len(prefix) < DEPTH:
        draft = _proposal(prefix, rng, one_hot=one_hot)
        rows = [_context_logits(prefix + draft.token_ids[:place]) for place in range(len(draft) + 1)]
        verdict = judge(torch.stack(rows)[None], [draft], law, [rng])[0]
        prefix += tuple(verdict.tokens)
    return prefix[:DEPTH]


def _exact_law(law: SamplingLaw) -> dict[tuple[int, ...], float]:
    exact = {(): 1.0}
    for _ in range(DEPTH):
        exact = {
            (*prefix, token): mass * prob
            for prefix, mass in exact.items()
            for token, prob in enumerate(law.probabilities(_context_logits(prefix)[None])[0].tolist())
            if prob > 0
        }
    return exact


def _p_value(law: SamplingLaw, *, one_hot: bool, runs: int = 3000) -> float:
    """Chi-square p-value of sampled sequences against the enumerated law (rare ones pooled)."""
    rng = np.random.default_rng(11)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(runs):
        sequence = _speculate(law, rng, one_hot=one_hot)
        counts[sequence] = counts.get(sequence, 0) + 1
    exact = _exact_law(law)
    assert set(counts) <= set(exact), "a sequence of probability 0 was emitted"
    common = [sequence for sequence, mass in exact.items() if mass * runs >= 5]
    observed = [counts.get(sequence, 0) for sequence in common]
    expected = [exact[sequence] * runs for sequence in common]
    if runs - sum(expected) > 1e-6:
        observed.append(runs - sum(observed))
        expected.append(runs - sum(expected))
    return float(scipy.stats.chisquare(observed, expected).pvalue)


# Seeded, so the outcome is fixed; with a fresh seed each case would fail by chance once in 1,000.
FALSE_ALARM = 1e-3


@pytest.mark.parametrize("one_hot", [True, False], ids=["one-hot proposal", "sampled proposal"])
@pytest.mark.parametrize(
    "law",
    [
        SamplingLaw(temperature=1.0),
        SamplingLaw(temperature=0.6, top_p=0.8),
        SamplingLaw(temperature=1.4, top_k=3),
    ],
    ids=str,
)
def test_emitted_sequences_follow_the_enumerated_law(law: SamplingLaw, one_hot: bool) -> None:
    assert _p_value(law, one_hot=one_hot) > FALSE_ALARM


def _keeps_q_out_of_the_ratio(self: Draft, position: int) -> float:
    return 1.0


def _keeps_the_whole_law(self: Draft, target_law: torch.Tensor, position: int) -> None:
    return None


@pytest.mark.parametrize(
    ("method", "fault", "one_hot"),
    [
        ("prob_of", _keeps_q_out_of_the_ratio, False),
        ("subtract_from", _keeps_the_whole_law, True),
        ("subtract_from", _keeps_the_whole_law, False),
    ],
    ids=["accepts with p instead of p/q", "draws from p after a rejection", "draws from p, sampled proposal"],
)
def test_the_same_test_catches_a_wrong_rule(
    monkeypatch: pytest.MonkeyPatch, method: str, fault: object, one_hot: bool
) -> None:
    monkeypatch.setattr(Draft, method, fault)
    assert _p_value(SamplingLaw(temperature=1.0), one_hot=one_hot) < 1e-6


def test_cumulative_law_positions_are_uniform_for_tokens_of_the_law() -> None:
    """cdf_low + u (cdf_high - cdf_low) is uniform; false alarm 1e-3 for a fresh seed."""
    rng = np.random.default_rng(5)
    law = SamplingLaw(temperature=0.8, top_p=0.95)
    places = []
    for _ in range(1500):
        draft = _proposal((), rng, one_hot=False)
        rows = [_context_logits(draft.token_ids[:place]) for place in range(len(draft) + 1)]
        verdict = judge(torch.stack(rows)[None], [draft], law, [rng])[0]
        low, high = verdict.cdf_low[0], verdict.cdf_high[0]
        assert low is not None
        assert high is not None
        assert 0 <= low < high <= 1 + 1e-12
        places.append(low + rng.random() * (high - low))
    assert scipy.stats.kstest(places, "uniform").pvalue > 1e-3


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    """Same logits, draft and generator give the same tokens alone and in a batch."""
    law = SamplingLaw(temperature=1.0, top_p=0.9)
    rng = np.random.default_rng(2)
    drafts = [_proposal((row,), rng, one_hot=False) for row in range(4)]
    logits = torch.stack(
        [
            torch.stack([_context_logits((row, *draft.token_ids[:place])) for place in range(len(draft) + 1)])
            for row, draft in enumerate(drafts)
        ]
    )
    together = judge(logits, drafts, law, [np.random.default_rng(row) for row in range(4)])
    for row in range(4):
        alone = judge(logits[row : row + 1], [drafts[row]], law, [np.random.default_rng(row)])[0]
        assert alone.tokens == together[row].tokens


def test_equal_target_and_proposal_accept_everything() -> None:
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    draft = Draft(
        token_ids=(1, 2),
        candidate_ids=np.tile([0, 1, 2], (2, 1)),
        candidate_probs=np.tile([0.5, 0.3, 0.2], (2, 1)),
    )
    for seed in range(50):
        verdict = judge(
            probs.log().expand(1, 3, 3), [draft], SamplingLaw(temperature=1.0), [np.random.default_rng(seed)]
        )[0]
        assert verdict.num_accepted == 2


def test_nucleus_fallback_width_is_what_the_wide_test_crosses() -> None:
    assert verification._TOP_P_FIRST_TRY < 2000
