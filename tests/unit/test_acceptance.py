"""Acceptance: hand-worked cases, naive recomputation, properties, and the simulated engine's law."""

from __future__ import annotations

import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from specnb import acceptance, schema
from specnb.acceptance import AcceptanceCounts
from specnb.errors import RecordError, UnsupportedDraftError

BY = ["arm"]


def steps_of(rows, *, arm="draft", repeat=0):
    """Rows (prompt, drafted, accepted[, emitted]); emitted is accepted + 1 unless given."""
    full = [(*row, row[2] + 1) if len(row) == 3 else row for row in rows]
    return pl.DataFrame(
        {
            "run_id": "run",
            "arm": arm,
            "cell_id": f"{arm}.cell",
            "request_id": [f"{row[0]}-{repeat}" for row in full],
            "prompt_id": [row[0] for row in full],
            "step": list(range(len(full))),
            "num_draft_tokens": [row[1] for row in full],
            "num_accepted_tokens": [row[2] for row in full],
            "num_emitted_tokens": [row[3] for row in full],
            "repeat": repeat,
            "concurrency": 1,
            "entropy_tier": "low",
            "task": "t",
            "length_tier": "short",
        },
        schema_overrides=dict.fromkeys(
            ("step", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens"), pl.Int64()
        ),
    )


def random_steps(rng, *, num_prompts=12, num_steps=40, k=5, ragged=False, rate=0.7):
    rows = []
    for prompt in range(num_prompts):
        alpha = rng.beta(8 * rate, 8 * (1 - rate))
        for _ in range(num_steps):
            drafted = int(rng.integers(0, k + 1)) if ragged else k
            rows.append((f"p{prompt}", drafted, min(int(rng.geometric(1 - alpha)) - 1, drafted)))
    return steps_of(rows)


def values(table, metric):
    return table.filter(pl.col("metric") == metric)["value"].to_list()


def counts_of(steps):
    pairs = steps.filter(pl.col("num_draft_tokens") > 0)
    return list(zip(pairs["num_draft_tokens"].to_list(), pairs["num_accepted_tokens"].to_list(), strict=True))


# Scalars and their table


def test_bonus_token_convention():
    """A01: k=3, 100 drafts, 180 of 300 accepted: 2.80 with the bonus token, 1.80 without, rate 0.600."""
    steps = steps_of([(f"p{i % 10}", 3, 2 if i % 5 < 4 else 1) for i in range(100)])
    assert steps["num_accepted_tokens"].sum() == 180
    assert acceptance.mean_acceptance_length(steps) == pytest.approx(2.8, abs=1e-12)
    assert acceptance.draft_acceptance_rate(steps) == pytest.approx(0.6, abs=1e-12)
    counts = AcceptanceCounts(
        num_drafts=100, num_draft_tokens=300, num_accepted_tokens=180, num_speculative_tokens=3
    )
    assert counts.mean_acceptance_length == pytest.approx(2.8)
    assert counts.mean_accepted_drafts == pytest.approx(1.8)
    assert counts.draft_acceptance_rate == pytest.approx(0.6)
    assert not counts.ragged


def test_scalars_on_a_hand_worked_frame():
    """Drafts (3,3) (3,0) (2,1); one step without a draft; the last step is cut to one token."""
    steps = steps_of([("a", 3, 3), ("a", 3, 0), ("b", 0, 0), ("b", 2, 1, 1)])
    assert acceptance.mean_acceptance_length(steps) == 1 + 4 / 3
    assert acceptance.draft_acceptance_rate(steps) == 4 / 8
    # The draft of 2 is not full: it is left out, accepted or not.
    assert acceptance.full_block_hit_rate(steps) == 1 / 2
    assert acceptance.miss_rate(steps) == 1 / 3
    assert acceptance.tokens_per_target_step(steps) == (4 + 1 + 1 + 1) / 4


def test_a_short_draft_accepted_whole_is_no_full_block(rng):
    """K = 4: of two full drafts one is accepted whole; ten drafts of one token, all accepted, don't count."""
    rows = [("a", 4, 4), ("b", 4, 1), *[(f"p{i}", 1, 1) for i in range(10)]]
    steps = steps_of(rows)
    assert acceptance.full_block_hit_rate(steps) == 1 / 2
    tiers = steps.with_columns(
        entropy_tier=pl.when(pl.col("num_draft_tokens") == 4).then(pl.lit("low")).otherwise(pl.lit("high"))
    )
    table = acceptance.acceptance_table(tiers, by=["arm", "entropy_tier"], rng=rng)
    found = table.filter(pl.col("metric") == "full_block_hit_rate").select(
        "entropy_tier", "value", "n", "reason"
    )
    # The longest draft is the arm's: a group that holds only short ones has no full block at all.
    assert sorted(found.rows()) == [
        ("high", None, 0, acceptance.NO_FULL_DRAFT),
        ("low", 0.5, 2, "fewer than 5 prompts"),
    ]
    # Another arm has a K of its own.
    both = pl.concat([steps, steps_of([("a", 2, 2), ("b", 2, 0), ("b", 1, 1)], arm="other")])
    table = acceptance.acceptance_table(both, by=["arm"], rng=rng)
    found = table.filter(pl.col("metric") == "full_block_hit_rate").select("arm", "value", "n")
    assert sorted(found.rows()) == [("draft", 0.5, 2), ("other", 0.5, 2)]


def test_the_table_equals_the_scalars(rng):
    steps = pl.concat([random_steps(rng), steps_of([("p1", 2, 1), ("p2", 2, 0)], arm="other")])
    table = acceptance.acceptance_table(steps, by=BY, rng=rng)
    assert table.columns[:2] == ["arm", "metric"]
    assert table.height == 10
    for arm in ("draft", "other"):
        mine = steps.filter(pl.col("arm") == arm)
        for metric in acceptance.ACCEPTANCE_METRICS:
            row = table.row(by_predicate=(pl.col("arm") == arm) & (pl.col("metric") == metric), named=True)
            assert row["value"] == pytest.approx(getattr(acceptance, metric)(mine), abs=1e-12)
            if arm == "draft":
                assert row["low"] < row["value"] < row["high"]
                assert row["n_clusters"] == 12
                assert row["n"] == (mine["num_draft_tokens"].sum() if "acceptance_rate" in metric else 480)
            else:
                assert (row["low"], row["reason"]) == (None, "fewer than 5 prompts")


def test_acceptance_length_is_pooled_over_requests():
    """A09: three requests of 10 tokens in 10 steps and one of 400 in 100: 430 / 130, not a mean of ratios."""
    rows = [(f"short{i}", 4, 0) for i in range(3) for _ in range(10)] + [("long", 4, 3)] * 100
    assert acceptance.tokens_per_target_step(steps_of(rows)) == pytest.approx(430 / 130)
    assert acceptance.mean_acceptance_length(steps_of(rows)) == pytest.approx(430 / 130)


def test_no_drafts_is_unknown(rng):
    """A19: speculation configured, 0 drafts, 2400 tokens: null with a reason, never 1.0, 0.0 or NaN."""
    steps = steps_of([(f"p{i % 8}", 0, 0) for i in range(2400)])
    for name in ("mean_acceptance_length", "draft_acceptance_rate", "full_block_hit_rate", "miss_rate"):
        assert getattr(acceptance, name)(steps) is None
    assert acceptance.tokens_per_target_step(steps) == 1.0
    table = acceptance.acceptance_table(steps, by=BY, rng=rng)
    for row in table.filter(pl.col("metric") != "tokens_per_target_step").to_dicts():
        assert (row["value"], row["low"], row["n"], row["n_clusters"]) == (None, None, 0, 0)
        full = row["metric"] == "full_block_hit_rate"
        assert row["reason"] == (
            "speculation_inactive or short drafts only: no step carried a full draft"
            if full
            else "speculation_inactive: no step carried a draft"
        )
    assert acceptance.acceptance_by_position(steps, by=BY, rng=rng).height == 0
    assert acceptance.suffix_decay(steps, by=BY, rng=rng).height == 0
    assert acceptance.counterfactual_acceptance_length(steps, by=BY, rng=rng).height == 0
    assert acceptance.positions_from_steps(steps).height == 0
    counts = AcceptanceCounts(
        num_drafts=0,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_speculative_tokens=3,
        accepted_per_position=(0, 0, 0),
    )
    assert counts.mean_acceptance_length is None
    assert counts.draft_acceptance_rate is None
    assert counts.acceptance_rate_by_position is None


def test_speculation_switched_off_at_high_batch(rng):
    """B39: 2.60 at concurrency 4; at 8 no drafts: null and named inactive, and the two are not averaged."""
    busy = steps_of([(f"p{i % 10}", 2, 2 if i % 5 < 3 else 1) for i in range(250)])
    assert busy["num_accepted_tokens"].sum() == 400
    idle = steps_of([(f"p{i % 10}", 0, 0) for i in range(1600)])
    steps = pl.concat([busy.with_columns(concurrency=pl.lit(4)), idle.with_columns(concurrency=pl.lit(8))])
    table = acceptance.acceptance_table(steps, by=["arm", "concurrency"], rng=rng)
    assert values(table, "mean_acceptance_length") == [pytest.approx(2.6), None]
    assert acceptance.speculation_inactive(steps, by=["arm", "concurrency"]).to_dicts() == [
        {
            "arm": "draft",
            "concurrency": 8,
            "num_steps": 1600,
            "num_emitted_tokens": 1600,
            "reason": acceptance.NO_DRAFTS,
        }
    ]


@pytest.mark.parametrize("accepted", [4, -1, None])
def test_impossible_steps_are_refused(accepted):
    steps = steps_of([("a", 3, accepted, 1)])
    with pytest.raises(
        RecordError, match="num_accepted_tokens is null or not between 0 and num_draft_tokens"
    ):
        acceptance.mean_acceptance_length(steps)


def test_a_missing_column_is_named(rng):
    with pytest.raises(ValueError, match="steps: missing column 'prompt_id'"):
        acceptance.acceptance_table(steps_of([("a", 1, 1)]).drop("prompt_id"), by=BY, rng=rng)
    with pytest.raises(ValueError, match="steps: missing column 'num_emitted_tokens'"):
        acceptance.tokens_per_target_step(steps_of([("a", 1, 1)]).drop("num_emitted_tokens"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.integers(0, 6).flatmap(lambda d: st.tuples(st.integers(0, 5), st.just(d), st.integers(0, d))),
        min_size=1,
        max_size=80,
    )
)
def test_bounds_and_duplication(rows):
    """I1, I2: lengths and rates stay in their bounds, and a run counted twice changes nothing."""
    steps = steps_of([(f"p{p}", d, a) for p, d, a in rows])
    length = acceptance.mean_acceptance_length(steps)
    k = steps["num_draft_tokens"].max()
    twice = pl.concat([steps, steps.with_columns(repeat=pl.lit(1, pl.Int32))])
    assert acceptance.mean_acceptance_length(twice) == length
    if length is None:
        assert k == 0
        return
    assert 1 <= length <= k + 1
    assert 0 <= acceptance.draft_acceptance_rate(steps) <= 1
    full = steps.filter(pl.col("num_draft_tokens") == k)
    assert acceptance.miss_rate(full) + acceptance.full_block_hit_rate(steps) <= 1
    table = acceptance.acceptance_by_position(steps, by=BY, rng=np.random.default_rng(0))
    rates = values(table, "acceptance_rate_by_position")
    assert length == pytest.approx(1 + sum(rates), abs=1e-9)
    assert rates == sorted(rates, reverse=True)
    survival = [value for value in values(table, "survival") if value is not None]
    assert survival == sorted(survival, reverse=True)
    again = acceptance.acceptance_by_position(twice, by=BY, rng=np.random.default_rng(0))
    assert values(again, "survival") == pytest.approx(values(table, "survival"), nan_ok=True)


# Positions


def test_survival_of_full_drafts_is_plain(rng):
    """With full drafts Kaplan-Meier is the share of drafts accepted beyond a position, and AL = 1 + sum S."""
    steps = random_steps(rng)
    table = acceptance.acceptance_by_position(steps, by=BY, rng=rng)
    pairs = counts_of(steps)
    plain = [sum(a > i for _, a in pairs) / len(pairs) for i in range(5)]
    assert values(table, "survival") == pytest.approx(plain, abs=1e-9)
    assert values(table, "acceptance_rate_by_position") == pytest.approx(plain, abs=1e-9)
    assert 1 + sum(plain) == pytest.approx(acceptance.mean_acceptance_length(steps), abs=1e-9)
    conditional = [plain[0], *(plain[i] / plain[i - 1] for i in range(1, 5))]
    assert values(table, "conditional_acceptance_rate") == pytest.approx(conditional, abs=1e-9)


def test_ragged_drafts_are_censored_not_rejected(rng):
    """A15: (4,4) (1,1) (1,0) (2,2): vLLM's rate [.75 .5 .25 .25]; given drafted [.75 1 1 1]."""
    steps = steps_of([("a", 4, 4), ("b", 1, 1), ("c", 1, 0), ("d", 2, 2)])
    assert acceptance.mean_acceptance_length(steps) == 2.75
    assert acceptance.draft_acceptance_rate(steps) == 0.875
    table = acceptance.acceptance_by_position(steps, by=BY, rng=rng)
    assert values(table, "acceptance_rate_by_position") == [0.75, 0.5, 0.25, 0.25]
    assert values(table, "conditional_acceptance_rate") == [0.75, 1, 1, 1]
    assert values(table, "survival") == [0.75] * 4
    at_risk = table.filter(pl.col("metric") == "survival")
    assert at_risk["n"].to_list() == [4, 2, 1, 1]
    assert at_risk["position"].to_list() == [0, 1, 2, 3]
    assert table.filter(pl.col("metric") == "acceptance_rate_by_position")["n"].to_list() == [4] * 4
    assert set(table["reason"]) == {"fewer than 5 prompts"}


def test_survival_equals_naive_kaplan_meier(rng):
    steps = random_steps(rng, ragged=True)
    table = acceptance.acceptance_by_position(steps, by=BY, rng=rng)
    survival, expected = 1.0, []
    for i in range(5):
        at_risk = [(d, a) for d, a in counts_of(steps) if a >= i and d > i]
        survival *= sum(a > i for _, a in at_risk) / len(at_risk)
        expected.append(survival)
    assert values(table, "survival") == pytest.approx(expected, abs=1e-9)
    naive = acceptance.positions_from_steps(steps).filter("reached").group_by("position", maintain_order=True)
    rates = naive.agg(pl.col("accepted").mean()).sort("position")["accepted"].to_list()
    assert values(table, "conditional_acceptance_rate") == pytest.approx(rates, abs=1e-9)


def test_positions_that_nothing_reaches(rng):
    """All rejected at position 1: survival stays 0, the conditional rate beyond is unknown."""
    steps = steps_of([("a", 3, 1), ("b", 3, 0)])
    table = acceptance.acceptance_by_position(steps, by=BY, rng=rng)
    assert values(table, "survival") == [0.5, 0, 0]
    assert values(table, "conditional_acceptance_rate") == [0.5, 0, None]
    last = table.row(
        by_predicate=(pl.col("metric") == "conditional_acceptance_rate") & (pl.col("position") == 2),
        named=True,
    )
    assert (last["n"], last["reason"]) == (0, "no draft reached this position")
    # Only a draft that was rejected early is long enough: beyond it nothing is known.
    censored = acceptance.acceptance_by_position(steps_of([("a", 1, 1), ("b", 3, 0)]), by=BY, rng=rng)
    assert values(censored, "survival") == [0.5, None, None]


def test_groups_have_their_own_longest_draft(rng):
    steps = pl.concat([steps_of([("a", 2, 1)]), steps_of([("a", 4, 4)], arm="other")])
    table = acceptance.acceptance_by_position(steps, by=BY, rng=rng)
    found = table.filter(pl.col("metric") == "survival").group_by("arm", maintain_order=True).len()
    assert found.rows() == [("draft", 2), ("other", 4)]


def test_interval_covers_a_known_survival():
    """Constant conditional rate 0.8, 40 prompts, 100 seeds: 95 % intervals of S_3 = 0.8^4 hold it."""
    held = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        accepted = np.minimum(generator.geometric(0.2, size=(40, 20)) - 1, 6)
        steps = steps_of([(f"p{i}", 6, int(a)) for i, row in enumerate(accepted) for a in row])
        table = acceptance.acceptance_by_position(steps, by=[], rng=generator)
        row = table.row(by_predicate=(pl.col("metric") == "survival") & (pl.col("position") == 3), named=True)
        held += row["low"] <= 0.8**4 <= row["high"]
    assert held >= 95 - 3 * math.sqrt(100 * 0.95 * 0.05)


def test_positions_from_steps_by_hand():
    table = acceptance.positions_from_steps(steps_of([("a", 3, 1), ("a", 0, 0), ("b", 1, 1)]))
    assert table.schema == schema.POSITIONS.polars_schema
    assert table.select("prompt_id", "step", "position", "reached", "accepted").rows() == [
        ("a", 0, 0, True, True),
        ("a", 0, 1, True, False),
        ("a", 0, 2, False, False),
        ("b", 2, 0, True, True),
    ]
    assert table["target_rank"].null_count() == table["draft_prob"].null_count() == 4


# Suffix decay


def likelihood_slope(at_risk, accepted):
    position = np.arange(len(at_risk))

    def loss(b):
        logit = b[0] + b[1] * position
        return -np.sum(accepted * logit - at_risk * np.logaddexp(0, logit))

    return optimize.minimize(loss, [0.0, 0.0], method="BFGS", options={"gtol": 1e-10}).x[1]


def test_slope_maximises_the_likelihood():
    at_risk = np.array([[100.0, 80, 50, 20], [1000, 900, 850, 800], [9, 4, 2, 1]])
    accepted = np.array([[80.0, 50, 20, 4], [900, 850, 800, 780], [4, 2, 1, 1]])
    found = acceptance.logistic_slope(at_risk, accepted)
    for row in range(3):
        assert found[row] == pytest.approx(likelihood_slope(at_risk[row], accepted[row]), abs=1e-5)
    assert found[0] < 0 < found[1]


def test_slope_satisfies_the_score_equations(rng):
    """At the maximum observed and fitted successes agree in total and in total position, to 1e-9."""
    at_risk = rng.integers(1, 60, size=(50, 7)).astype(float)
    accepted = rng.binomial(at_risk.astype(int), 0.6).astype(float)
    slopes = acceptance.logistic_slope(at_risk, accepted)
    position = np.arange(7.0)
    assert np.isfinite(slopes).all()
    for n, s, slope in zip(at_risk, accepted, slopes, strict=True):
        intercept = optimize.brentq(
            lambda a, n=n, s=s, slope=slope: s.sum() - (n / (1 + np.exp(-a - slope * position))).sum(),
            -60,
            60,
            xtol=1e-13,
        )
        fitted = n / (1 + np.exp(-intercept - slope * position))
        assert (position * fitted).sum() == pytest.approx((position * s).sum(), abs=1e-7)


@pytest.mark.parametrize(
    ("at_risk", "accepted"),
    [
        ([5.0, 5], [5.0, 0]),  # separated
        ([5.0, 5], [5.0, 3]),  # quasi-separated: the first position never fails
        ([5.0, 4], [4.0, 4]),  # the second never fails
        ([5.0, 0], [3.0, 0]),  # one position
        ([5.0, 5], [5.0, 5]),  # nothing rejected
        ([5.0, 0], [0.0, 0]),  # nothing accepted
        ([5.0], [2.0]),
    ],
)
def test_no_slope_without_overlap(at_risk, accepted):
    assert np.isnan(acceptance.logistic_slope(np.array([at_risk]), np.array([accepted]))).all()


def test_constant_conditional_rate_is_no_decay(rng):
    """Survival falls, the conditional rate does not: the interval of the slope holds 0."""
    accepted = np.minimum(rng.geometric(0.25, size=(40, 60)) - 1, 7)
    steps = steps_of([(f"p{i}", 7, int(a)) for i, row in enumerate(accepted) for a in row])
    row = acceptance.suffix_decay(steps, by=BY, rng=rng).row(0, named=True)
    assert row["metric"] == "conditional_logit_slope"
    assert row["low"] < 0 < row["high"]
    at_risk = sum(min(int(a) + 1, 7) for a in accepted.ravel())
    assert (row["n"], row["n_clusters"]) == (at_risk, 40)


def test_falling_conditional_rate_is_decay(rng):
    rates = [0.9, 0.8, 0.65, 0.5, 0.35]
    rows = []
    for i in range(2000):
        accepted = 0
        while accepted < 5 and rng.random() < rates[accepted]:
            accepted += 1
        rows.append((f"p{i % 40}", 5, accepted))
    row = acceptance.suffix_decay(steps_of(rows), by=BY, rng=rng).row(0, named=True)
    assert row["high"] < 0
    # Logits of the true rates fall by about 0.7 a position.
    assert row["value"] == pytest.approx(-0.7, abs=0.1)


def test_undefined_slope_has_a_reason(rng):
    row = acceptance.suffix_decay(steps_of([(f"p{i}", 2, 2) for i in range(9)]), by=BY, rng=rng).row(
        0, named=True
    )
    assert (row["value"], row["n"]) == (None, 18)
    assert row["reason"] == "accepted and rejected positions do not overlap"


def test_counterfactual_lengths_by_hand(rng):
    """Rates 0.75, 2/3, 1/2: AL(1) = 1.75, AL(2) = 2.25, AL(3) = 2.5, the last the measured one."""
    steps = steps_of([("a", 3, 3), ("b", 3, 2), ("c", 3, 1), ("d", 3, 0)])
    table = acceptance.counterfactual_acceptance_length(steps, by=BY, rng=rng)
    assert table["num_speculative_tokens"].to_list() == [1, 2, 3]
    assert table["value"].to_list() == [1.75, 2.25, 2.5]
    assert table["n"].to_list() == [4, 4, 4]
    assert acceptance.mean_acceptance_length(steps) == 2.5


@pytest.mark.parametrize(
    ("rates", "length"),
    [
        ([0.854, 0.803, 0.794, 0.783, 0.775, 0.759, 0.729], 4.27),
        ([0.995, 0.973, 0.948, 0.926, 0.908, 0.894, 0.878], 6.80),
        ([0.5] * 3, 1 + 0.5 + 0.25 + 0.125),
    ],
)
def test_published_conditional_rates_chain_to_the_published_length(rates, length):
    """Inco's DFlash 2 post (2026): recall@1 gives 4.27; recall@16 gives 6.80, printed as 6.79."""
    assert acceptance.acceptance_length_from_conditional(rates) == pytest.approx(length, abs=6e-3)


def test_lengths_match_the_closed_form():
    """Leviathan et al. (arXiv 2211.17192), equation 1."""
    for alpha in (0.3, 0.8):
        expected = (1 - alpha**8) / (1 - alpha)
        assert acceptance.acceptance_length_from_conditional([alpha] * 7) == pytest.approx(expected, abs=1e-9)
    with pytest.raises(ValueError, match="must lie in"):
        acceptance.acceptance_length_from_conditional([1.2])


# Counters of a server


def test_marginal_and_conditional_rates_are_different_things():
    """A16: marginal [.8 .6 .3] is conditional [.8 .75 .5]; AL sums the marginal: 2.70, not 3.05."""
    counts = AcceptanceCounts(
        num_drafts=100,
        num_draft_tokens=300,
        num_accepted_tokens=170,
        num_speculative_tokens=3,
        accepted_per_position=(80, 60, 30),
    )
    assert counts.acceptance_rate_by_position == (0.8, 0.6, 0.3)
    assert counts.conditional_acceptance_rate_by_position == pytest.approx((0.8, 0.75, 0.5))
    assert counts.draft_acceptance_rate == pytest.approx(0.567, abs=5e-4)
    assert counts.mean_acceptance_length == pytest.approx(2.7)
    assert acceptance.conditional_rates([0.5, 0.0, 0.0]) == (0.5, 0.0, None)
    with pytest.raises(ValueError, match="not rise"):
        acceptance.conditional_rates([0.5, 0.6])


def test_counters_of_ragged_drafts_have_no_conditional_rate():
    """A15: draft_tokens / drafts = 2 is not k = 4, so the counters can't tell rejected from not drafted."""
    counts = AcceptanceCounts(
        num_drafts=4,
        num_draft_tokens=8,
        num_accepted_tokens=7,
        num_speculative_tokens=4,
        accepted_per_position=(3, 2, 1, 1),
    )
    assert counts.ragged
    assert counts.mean_acceptance_length == 2.75
    assert counts.draft_acceptance_rate == 0.875
    assert counts.acceptance_rate_by_position == (0.75, 0.5, 0.25, 0.25)
    assert counts.conditional_acceptance_rate_by_position is None


def test_histograms_are_pooled_by_steps():
    """A27: 15 steps, 25 accepted: 2.667, not the mean 3.00 of the two requests' lengths."""
    counts = acceptance.acceptance_from_histogram([[4, 3, 2, 1], [0, 0, 0, 5]])
    assert (counts.num_drafts, counts.num_accepted_tokens, counts.num_speculative_tokens) == (15, 25, 3)
    assert counts.mean_acceptance_length == pytest.approx(2.667, abs=5e-4)
    assert counts.acceptance_rate_by_position == pytest.approx((0.7333, 0.5333, 0.40), abs=5e-5)
    assert counts.conditional_acceptance_rate_by_position is None, (
        "the histogram does not say what was drafted"
    )
    full = acceptance.acceptance_from_histogram([[4, 3, 2, 1], [0, 0, 0, 5]], num_draft_tokens=45)
    assert full.conditional_acceptance_rate_by_position == pytest.approx((11 / 15, 8 / 11, 6 / 8))
    with pytest.raises(ValueError, match=r"lengths \[3, 4\] can't be pooled"):
        acceptance.acceptance_from_histogram([[1, 2, 3], [1, 2, 3, 4]])


def test_published_histogram():
    """vLLM pull request 48915: [39, 1, 0, 3] gives 1.2326 and rates .093 .070 .070."""
    counts = acceptance.acceptance_from_histogram([[39, 1, 0, 3]])
    assert counts.mean_acceptance_length == pytest.approx(1.2326, abs=5e-5)
    assert counts.acceptance_rate_by_position == pytest.approx((0.093, 0.070, 0.070), abs=5e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_drafts": -1}, "-1 is negative; a counter was reset"),
        ({"num_accepted_tokens": 31}, r"31 accepted in 10 drafts of at most 3: .* leaves \[1, 4\]"),
        ({"num_draft_tokens": 12, "num_accepted_tokens": 13}, "13 accepted exceeds 12 drafted"),
        ({"num_draft_tokens": 31}, "31 drafted is not between 10 and 3 x 10"),
        ({"num_draft_tokens": 9, "num_accepted_tokens": 9}, "9 drafted is not between 10 and 3 x 10"),
        ({"accepted_per_position": (9, 3, 2)}, "positions add up to 14, not to 15 accepted"),
        ({"accepted_per_position": (6, 7, 2)}, r"per-position counts \[6, 7, 2\] rise"),
        ({"accepted_per_position": (11, 2, 2)}, r"per-position counts \[11, 2, 2\] rise"),
    ],
)
def test_counter_invariants(change, message):
    """I1 and I2 are errors, not warnings."""
    good = {"num_drafts": 10, "num_draft_tokens": 30, "num_accepted_tokens": 15, "num_speculative_tokens": 3}
    AcceptanceCounts(**good, accepted_per_position=(8, 4, 3))
    with pytest.raises(RecordError, match=message):
        AcceptanceCounts(**{**good, **change})


def test_trees_have_a_length_but_no_rank():
    """A11: 20 steps, depth 5, 64 nodes, 60 accepted: AL 4.00, 0.047 a node, 0.60 of the depth; no rank."""
    tree = AcceptanceCounts(
        num_drafts=20,
        num_draft_tokens=20 * 64,
        num_accepted_tokens=60,
        num_speculative_tokens=5,
        draft_shape="tree",
    )
    assert tree.mean_acceptance_length == 4.0
    assert tree.draft_acceptance_rate == pytest.approx(0.047, abs=5e-4)
    assert tree.depth_utilisation == pytest.approx(0.60)
    assert tree.ragged is None
    good = AcceptanceCounts(
        num_drafts=20, num_draft_tokens=60, num_accepted_tokens=40, num_speculative_tokens=3
    )
    poor = AcceptanceCounts(
        num_drafts=20, num_draft_tokens=60, num_accepted_tokens=20, num_speculative_tokens=3
    )
    idle = AcceptanceCounts(num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0, num_speculative_tokens=3)
    ranked = acceptance.rank_by_draft_acceptance_rate({"idle": idle, "poor": poor, "good": good})
    assert ranked == ("good", "poor", "idle")
    with pytest.raises(UnsupportedDraftError, match="eagle: a tree's acceptance rate is per node"):
        acceptance.rank_by_draft_acceptance_rate({"good": good, "eagle": tree})
    with pytest.raises(UnsupportedDraftError, match="tree drafts have no per-position acceptance"):
        AcceptanceCounts(
            num_drafts=1,
            num_draft_tokens=64,
            num_accepted_tokens=1,
            num_speculative_tokens=5,
            accepted_per_position=(1, 0, 0, 0, 0),
            draft_shape="tree",
        )


def test_stop_token_inside_an_accepted_prefix():
    """A13: the verifier counts 4.50, the user got 3.00; the gap vanishes over 500 steps."""
    short = steps_of([("a", 5, 2), ("a", 5, 5, 3)])
    gap = acceptance.truncation_gap(short)
    assert (gap.verifier, gap.committed, gap.num_drafts, gap.differs) == (4.5, 3.0, 2, True)
    assert (
        acceptance.committed_acceptance_length(num_output_tokens=7, num_first_tokens=1, num_drafts=2) == 3.0
    )
    long = acceptance.truncation_gap(steps_of([("a", 5, 2)] * 499 + [("a", 5, 5, 3)]))
    assert not long.differs
    assert long.verifier == pytest.approx(1 + (2 * 499 + 5) / 500)
    nothing = acceptance.truncation_gap(steps_of([("a", 0, 0)]))
    assert (nothing.verifier, nothing.committed, nothing.differs) == (None, None, False)
    assert (
        acceptance.committed_acceptance_length(num_output_tokens=7, num_first_tokens=1, num_drafts=0) is None
    )


def test_drafter_that_stops_at_its_context_limit(rng):
    """A18: 2.80 below and 1.00 above; the pooled 1.90 is not the only number, and a line says why."""
    short = steps_of([(f"s{i % 10}", 3, 2 if i % 5 < 4 else 1) for i in range(500)])
    long = steps_of([(f"l{i % 10}", 3, 0) for i in range(500)])
    steps = pl.concat([short, long])
    requests = (
        steps.select("request_id")
        .unique()
        .with_columns(
            num_prompt_tokens=pl.when(pl.col("request_id").str.starts_with("s")).then(1500).otherwise(2100)
        )
    )
    assert acceptance.mean_acceptance_length(steps) == pytest.approx(1.9)
    table = acceptance.acceptance_by_prompt_length(steps, requests, edges=[1800, 2048], by=BY, rng=rng)
    rows = table.filter(pl.col("metric") == "mean_acceptance_length")
    assert rows.select("prompt_low_tokens", "prompt_high_tokens", "value").rows() == [
        (0, 1800, pytest.approx(2.8)),
        (2048, None, 1.0),
    ]
    assert acceptance.drafter_limit_warning(table) == (
        "all positions exactly zero above ~2048 tokens: drafter probably inactive "
        "(check draft max_position_embeddings)"
    )
    assert acceptance.drafter_limit_warning(table.filter(pl.col("prompt_low_tokens") == 0)) is None
    with pytest.raises(ValueError, match=r"edges \[5, 3\] must rise"):
        acceptance.acceptance_by_prompt_length(steps, requests, edges=[5, 3], by=BY, rng=rng)


# Tokens


def tokens_of(rows):
    """Rows (arm, prompt, origin, entropy)."""
    return pl.DataFrame(
        rows, schema=["arm", "prompt_id", "origin", "entropy_nats"], orient="row"
    ).with_columns(
        repeat=pl.lit(0), entropy_tier=pl.lit("low"), task=pl.col("prompt_id"), length_tier=pl.lit("short")
    )


def test_hit_rate_by_entropy_by_hand(rng):
    """Entropies 1 to 4, two bins at 2.5; bonus and baseline tokens are no tries."""
    rows = [
        ("a", "p", "accepted", 1.0),
        ("a", "p", "recovered", 2.0),
        ("a", "q", "recovered", 3.0),
        ("b", "q", "accepted", 4.0),
        ("a", "q", "bonus", 9.0),
        ("a", "q", "baseline", 9.0),
    ]
    table = acceptance.hit_rate_by_entropy(tokens_of(rows), by=BY, num_bins=2, rng=rng)
    names = ["arm", "entropy_bin", "entropy_low_nats", "entropy_high_nats", "entropy_mean_nats", "metric"]
    assert table.columns[:6] == names
    assert table.select(*names[:5], "value", "n").rows() == [
        ("a", 0, 1.0, 2.5, 1.5, 0.5, 2),
        ("a", 1, 2.5, 4.0, 3.0, 0.0, 1),
        ("b", 1, 2.5, 4.0, 4.0, 1.0, 1),
    ]
    assert set(table["metric"]) == {"conditional_acceptance_rate"}


def test_entropy_bins_are_shared_and_right_closed(rng):
    entropy = np.round(rng.gamma(1, 1, 500), 1)
    rows = [
        (("a", "b")[i % 2], f"p{i % 11}", ("accepted", "recovered")[int(e > 1)], float(e))
        for i, e in enumerate(entropy)
    ]
    table = acceptance.hit_rate_by_entropy(tokens_of(rows), by=BY, num_bins=4, rng=rng)
    assert table["n"].sum() == 500
    for row in table.to_dicts():
        first = row["entropy_bin"] == 0
        mine = [
            (origin, e)
            for arm, _, origin, e in rows
            if arm == row["arm"]
            and (row["entropy_low_nats"] < e or (first and e == row["entropy_low_nats"]))
            and e <= row["entropy_high_nats"]
        ]
        assert row["n"] == len(mine)
        assert row["value"] == sum(origin == "accepted" for origin, _ in mine) / len(mine)
        assert row["entropy_mean_nats"] == pytest.approx(np.mean([e for _, e in mine]), abs=1e-9)


def test_entropy_corner_cases(rng):
    same = tokens_of([("a", f"p{i}", "accepted", 0.0) for i in range(9)])
    table = acceptance.hit_rate_by_entropy(same, by=BY, rng=rng)
    assert table.select("entropy_low_nats", "entropy_high_nats", "value", "n").rows() == [(0.0, 0.0, 1.0, 9)]
    assert table["reason"][0] == "no variation between the 9 prompts"
    nothing = acceptance.hit_rate_by_entropy(tokens_of([("a", "p", "bonus", 1.0)]), by=BY, rng=rng)
    assert (nothing.height, nothing.columns) == (0, table.columns)
    with pytest.raises(ValueError, match="num_bins 0 must be at least 1"):
        acceptance.hit_rate_by_entropy(same, by=BY, num_bins=0, rng=rng)


def test_hit_rate_by_label_from_tokens_and_from_steps(rng):
    tokens = tokens_of(
        [("a", "p", "accepted", 1.0), ("a", "p", "recovered", 1.0), ("a", "q", "accepted", 1.0)]
    )
    table = acceptance.hit_rate_by_label(tokens, by=BY, rng=rng)
    assert table.select("arm", "label", "label_value", "value", "n").rows() == [
        ("a", "entropy_tier", "low", 2 / 3, 3),
        ("a", "task", "p", 0.5, 2),
        ("a", "task", "q", 1.0, 1),
        ("a", "length_tier", "short", 2 / 3, 3),
    ]
    # (3,1): one hit of two tried; (2,2): two of two; (0,0): nothing tried.
    steps = steps_of([("p", 3, 1), ("q", 2, 2), ("q", 0, 0)])
    by_steps = acceptance.hit_rate_by_label(steps, by=BY, labels=("task",), rng=rng)
    assert by_steps.select("label_value", "value", "n").rows() == [("t", 3 / 4, 4)]


# The simulated engine's law


def test_simulated_run_has_the_law_it_was_built_with(simulated_run, rng):
    """Tokens a step average (1 - a^(k+1)) / (1 - a), and the conditional rate is flat (arXiv 2211.17192)."""
    run = simulated_run(alpha=0.7, num_speculative_tokens=4, prompts_per_cell=40, tiers=("low",))
    steps = run.labelled("steps").filter(pl.col("arm") != run.plan.baseline.name)
    table = acceptance.acceptance_table(steps, by=BY, level=0.999, rng=rng)
    row = table.row(by_predicate=pl.col("metric") == "mean_acceptance_length", named=True)
    assert row["low"] <= (1 - 0.7**5) / (1 - 0.7) <= row["high"]
    positions = run.table("positions")
    derived = acceptance.positions_from_steps(run.steps)
    keys = ["request_id", "step", "position"]
    stored = positions.select(*keys, "reached", "accepted").sort(keys)
    assert derived.select(*keys, "reached", "accepted").sort(keys).equals(stored)
