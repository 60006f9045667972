"""Estimates and intervals: against SciPy, against definitions, and for coverage."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from specnb import stats
from specnb.stats import (
    Estimate,
    cluster_bootstrap,
    cluster_sums,
    geometric_mean_ratio,
    long_frame,
    mean_of_ratios,
    quantile_estimate,
    ratio_of_sums,
    ratio_table,
    welch_log_ratio,
    wilson_estimate,
)

GOOD = Estimate(value=0.5, low=0.4, high=0.6, level=0.95, n=10, n_clusters=10, method="wilson")


def ratios(totals: np.ndarray) -> np.ndarray:
    return ratio_of_sums(totals)


# Estimate


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": math.nan}, "value is nan; undefined is None with a reason"),
        ({"high": math.inf}, "high is inf"),
        ({"low": None}, "an interval has both ends or none"),
        ({"value": None}, "without a value"),
        ({"value": 0.7}, "value 0.7 is outside its interval"),
        ({"low": None, "high": None}, "missing without a reason"),
        ({"level": 1.0}, "1.0 is not between 0 and 1"),
        ({"n": -1}, "can't be negative"),
    ],
)
def test_estimate_refuses_contradictions(change, message):
    with pytest.raises(ValueError, match=message):
        replace(GOOD, **change)


def test_estimate_holds_an_undefined_value_with_its_reason():
    nothing = replace(GOOD, value=None, low=None, high=None, n=0, n_clusters=0, method="none", reason="n=0")
    assert nothing.as_row() == {
        "value": None,
        "low": None,
        "high": None,
        "level": 0.95,
        "n": 0,
        "n_clusters": 0,
        "method": "none",
        "reason": "n=0",
    }
    assert replace(GOOD, value=0.6 + 1e-12).value == 0.6 + 1e-12, "float noise at an end is no contradiction"


# Bootstrap of clusters


@pytest.mark.parametrize("method", ["BCa", "percentile"])
def test_single_run_interval_is_scipys(rng, method):
    """The same resamples through `scipy.stats.bootstrap` on paired samples of prompts."""
    numerator, denominator = rng.gamma(2, size=30), rng.gamma(3, size=30)
    sums = np.stack([numerator, denominator], axis=-1)[None]
    (found,) = cluster_bootstrap(sums, ratios, rng=np.random.default_rng(5), method=method, num_resamples=999)
    expected = scipy_stats.bootstrap(
        (numerator, denominator),
        lambda a, b, axis: a.sum(axis=axis) / b.sum(axis=axis),
        paired=True,
        vectorized=True,
        method=method,
        n_resamples=999,
        rng=np.random.default_rng(5),
    ).confidence_interval
    assert found.value == pytest.approx(numerator.sum() / denominator.sum(), abs=1e-12)
    assert found.low == pytest.approx(expected.low, abs=1e-9)
    assert found.high == pytest.approx(expected.high, abs=1e-9)
    assert found.method == f"{method.lower()}, prompts only (single run)"


def test_closed_form_limits_equal_scipys_on_the_same_resamples(rng):
    """Beyond 512 prompts the jackknife is totals minus one prompt: SciPy's limits on SciPy's resamples."""
    sums = np.stack([rng.lognormal(size=40), rng.gamma(3, size=40)], axis=-1)

    def on_indices(indices, axis=-1):
        return sums[indices, 0].sum(axis=axis) / sums[indices, 1].sum(axis=axis)

    for level in (0.8, 0.95):
        result = scipy_stats.bootstrap(
            (np.arange(40),),
            on_indices,
            vectorized=True,
            n_resamples=2000,
            confidence_level=level,
            rng=np.random.default_rng(3),
        )
        jackknife = ratio_of_sums(sums.sum(axis=0) - sums)[:, 0]
        point = float(sums[:, 0].sum() / sums[:, 1].sum())
        found = stats._limits(result.bootstrap_distribution, point, level=level, jackknife=jackknife)
        assert found == pytest.approx(tuple(result.confidence_interval), abs=1e-9)


def test_many_prompts_give_the_same_interval_as_scipys_path(rng, monkeypatch):
    sums = np.stack([rng.gamma(2, size=60), rng.gamma(3, size=60)], axis=-1)[None]
    (by_scipy,) = cluster_bootstrap(sums, ratios, rng=np.random.default_rng(1), num_resamples=20_000)
    monkeypatch.setattr(stats, "_SCIPY_CLUSTERS", 0)
    monkeypatch.setattr(stats, "_CHUNK_ELEMENTS", 60 * 333)
    (by_products,) = cluster_bootstrap(sums, ratios, rng=np.random.default_rng(2), num_resamples=20_000)
    width = by_scipy.high - by_scipy.low
    assert by_products.value == by_scipy.value
    assert by_products.low == pytest.approx(by_scipy.low, abs=0.03 * width)
    assert by_products.high == pytest.approx(by_scipy.high, abs=0.03 * width)


def test_counts_times_sums_equals_naive_resampling(rng):
    sums = rng.gamma(2, size=(12, 3))
    indices = rng.integers(0, 12, size=(7, 12))
    naive = [[sum(sums[i, column] for i in row) for column in range(3)] for row in indices]
    np.testing.assert_allclose(stats._prompt_counts(indices, 12) @ sums, naive, atol=1e-9)


def test_single_run_coverage_is_nominal_within_binomial_error():
    """400 seeded data sets of 40 prompts with unequal sizes; the ratio of sums is known."""
    generator = np.random.default_rng(11)
    hits = 0
    for _ in range(400):
        size = generator.integers(5, 50, size=40)
        rate = generator.beta(6, 2, size=40)
        sums = np.stack([generator.binomial(size, rate), size], axis=-1)[None].astype(float)
        (found,) = cluster_bootstrap(sums, ratios, rng=generator, num_resamples=500, level=0.9)
        hits += found.low <= 0.75 <= found.high
    # Three standard errors of a binomial share, and what 40 clusters cost a bootstrap.
    assert 0.9 - 3 * math.sqrt(0.09 / 400) - 0.02 <= hits / 400 <= 0.9 + 3 * math.sqrt(0.09 / 400)


def test_repeated_runs_do_not_count_as_more_prompts():
    """Prompts are shared by repeats: with no noise but the prompts', three repeats are worth one."""
    generator = np.random.default_rng(3)
    one = np.stack([generator.gamma(2, size=50), np.ones(50)], axis=-1)[None]
    three = np.repeat(one, 3, axis=0)
    (single,) = cluster_bootstrap(
        one, ratios, rng=np.random.default_rng(1), method="percentile", num_resamples=8000
    )
    (repeated,) = cluster_bootstrap(three, ratios, rng=np.random.default_rng(2), num_resamples=8000)
    assert repeated.high - repeated.low == pytest.approx(single.high - single.low, rel=0.05)
    assert repeated.method == "percentile, repeats x prompts"


def test_repeats_are_an_outer_level():
    """Repeats that differ as wholes widen the interval to hold each; the prompts alone would not."""
    generator = np.random.default_rng(3)
    prompts = 1 + 0.01 * generator.standard_normal(50)
    sums = np.stack([np.stack([prompts * level, np.ones(50)], axis=-1) for level in (0.9, 1.0, 1.1)])
    (found,) = cluster_bootstrap(sums, ratios, rng=generator)
    assert found.low < 0.92
    assert found.high > 1.08


def test_variance_between_repeats_is_unbiased():
    """Means of R - 1 of R drawn repeats vary as s^2 / R: here R = 4 levels and no spread between prompts."""
    levels = np.array([1.0, 2.0, 4.0, 7.0])
    sums = np.ones((4, 6, 2))
    sums[:, :, 0] = levels[:, None]
    resampled = stats._resample(sums, ratios, np.random.default_rng(0), 200_000)[0]
    assert resampled.var() == pytest.approx(levels.var(ddof=1) / 4, rel=0.02)


@pytest.mark.parametrize(
    ("numerator", "reason"),
    [
        ([1.0, 2, 3, 4], "fewer than 5 prompts"),
        ([2.0] * 8, "no variation between the 8 prompts"),
    ],
)
def test_no_interval_where_there_is_no_spread_to_see(rng, numerator, reason):
    sums = np.stack([np.array(numerator), np.ones(len(numerator))], axis=-1)[None]
    (found,) = cluster_bootstrap(sums, ratios, rng=rng)
    assert found.value == pytest.approx(np.mean(numerator))
    assert (found.low, found.high, found.method, found.reason) == (None, None, "none", reason)


def test_undefined_resamples_are_left_out_or_void_the_interval(rng):
    sums = np.zeros((1, 20, 2))
    sums[0, :, 1] = 1
    sums[0, :, 0] = rng.random(20)
    sums[0, 1:, :] = 0  # one prompt alone carries the ratio; 36 % of the resamples miss it
    (found,) = cluster_bootstrap(sums, ratios, rng=rng, num_clusters=[20])
    assert found.value == sums[0, 0, 0]
    assert found.reason is not None
    assert found.reason.startswith("undefined in 7")
    assert found.reason.endswith("of 2000 resamples")
    rare = np.stack([rng.random(20), np.ones(20)], axis=-1)[None]
    rare[0, 4:] = 0  # each resample misses all four with probability 0.8^20 = 1.2 %
    (found,) = cluster_bootstrap(rare, ratios, rng=rng, num_clusters=[20])
    assert found.low < found.value < found.high


def test_bad_arrays_are_refused(rng):
    with pytest.raises(ValueError, match=r"shape \(3, 2\), expected \[num_repeats"):
        cluster_bootstrap(np.ones((3, 2)), ratios, rng=rng)
    with pytest.raises(ValueError, match="sums holds NaN"):
        cluster_bootstrap(np.full((1, 6, 2), np.nan), ratios, rng=rng)
    with pytest.raises(ValueError, match=r"1\.5 is not between 0 and 1"):
        cluster_bootstrap(np.ones((1, 6, 2)), ratios, rng=rng, level=1.5)


# Frames


def frame_of(rows):
    return pl.DataFrame(rows, schema=["arm", "repeat", "prompt_id", "top", "bottom"], orient="row")


def test_cluster_sums_equal_naive_loops(rng):
    rows = [
        (arm, repeat, f"p{prompt}", int(rng.integers(1, 9)), int(rng.integers(1, 9)))
        for arm in ("b", "a")
        for repeat in (0, 2)
        for prompt in (3, 1, 7)
        for _ in range(2)
        if not (arm == "a" and repeat == 2 and prompt == 7)
    ]
    found = cluster_sums(frame_of(rows), by=["arm"], sums=["top", "bottom"])
    assert [group.key for group in found] == [{"arm": "a"}, {"arm": "b"}]
    for group in found:
        for i, repeat in enumerate((0, 2)):
            for j, prompt in enumerate(("p1", "p3", "p7")):
                mine = [row for row in rows if row[:3] == (group.key["arm"], repeat, prompt)]
                expected = [sum(row[3] for row in mine), sum(row[4] for row in mine)]
                assert group.sums[i, j].tolist() == expected
    assert found[0].sums.shape == (2, 3, 2)
    assert found[0].num_contributing.tolist() == [3, 3]


@pytest.mark.parametrize("name", ["prompt_id", "repeat", "arm", "bottom"])
def test_a_missing_column_is_named(rng, name):
    frame = frame_of([("a", 0, "p", 1, 2)]).drop(name)
    with pytest.raises(ValueError, match=f"missing column '{name}'"):
        ratio_table(frame, numerator="top", denominator="bottom", by=["arm"], metric="m", rng=rng)


def test_ratio_table_pools(rng):
    """Sum over sum, not the mean of 1/1 and 1/3; the empty group is null, not 0."""
    rows = [("a", 0, f"p{i}", 1, 1 + 2 * (i % 2)) for i in range(6)] + [("b", 0, "p0", 0, 0)]
    table = ratio_table(
        frame_of(rows), numerator="top", denominator="bottom", by=["arm"], metric="m", rng=rng
    )
    assert table.columns == ["arm", *stats.ESTIMATE_SCHEMA]
    a, b = table.to_dicts()
    assert (a["metric"], a["value"], a["n"], a["n_clusters"]) == ("m", 6 / 12, 12, 6)
    assert a["low"] < 0.5 < a["high"]
    assert (b["value"], b["low"], b["n"], b["n_clusters"], b["reason"]) == (None, None, 0, 0, "bottom is 0")


def test_ratio_table_without_groups_or_rows(rng):
    rows = [("a", 0, f"p{i}", i, 2) for i in range(6)]
    options = {"numerator": "top", "denominator": "bottom", "by": [], "metric": "m", "rng": rng}
    assert ratio_table(frame_of(rows), **options)["value"].to_list() == [15 / 12]
    assert ratio_table(frame_of(rows).clear(), **options).height == 0
    assert ratio_table(frame_of(rows).drop("repeat"), repeat=None, **options)["n"].to_list() == [12]


def test_equal_seeds_give_equal_tables():
    rows = [("a", i % 2, f"p{i // 2}", i % 5, 5) for i in range(40)]

    def table(frame):
        return ratio_table(
            frame,
            numerator="top",
            denominator="bottom",
            by=["arm"],
            metric="m",
            rng=np.random.default_rng(9),
        )

    assert table(frame_of(rows)).equals(table(frame_of(rows[::-1]))), "the order of rows must not matter"


def test_nan_is_not_a_number_to_sum(rng):
    """E16: polars counts NaN as a value, so it could shift a median or pass a gate; it is refused."""
    frame = pl.DataFrame(
        {"prompt_id": ["a", "b", "c"], "repeat": 0, "top": [2.0, math.nan, 4.0], "bottom": 1.0}
    )
    assert frame["top"].median() == 4.0, "what would have happened"
    with pytest.raises(ValueError, match="column 'top' holds NaN or infinity; unknown is null"):
        ratio_table(frame, numerator="top", denominator="bottom", by=[], metric="m", rng=rng)
    with pytest.raises(ValueError, match="NaN"):
        quantile_estimate([2.0, math.nan, 4.0, 1.0, 1.0], 0.5)
    known = frame.with_columns(pl.col("top").fill_nan(None)).drop_nulls()
    table = ratio_table(known, numerator="top", denominator="bottom", by=[], metric="m", rng=rng)
    assert (table["value"][0], table["n"][0]) == (3.0, 2)


def test_late_values_survive_in_result_frames():
    """E17: 100 rows without a value, then 50 with one; nothing is inferred from the first rows."""
    rows = [{"metric": "m", "arm": "a", "n": 0, "note": None} for _ in range(100)]
    rows += [{"metric": "m", "arm": "a", "n": 1, "value": 1.9, "reason": "late"} for _ in range(50)]
    frame = long_frame(rows, by={"arm": pl.String()}, extra={"note": pl.String()})
    assert frame.columns == ["arm", "note", *stats.ESTIMATE_SCHEMA]
    assert frame["value"].drop_nulls().to_list() == [1.9] * 50
    assert frame["reason"].drop_nulls().len() == 50
    assert frame.schema["note"] == pl.String()
    assert long_frame([], by={}).schema == pl.Schema(stats.ESTIMATE_SCHEMA)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=60)
)
def test_pooled_ratio_and_interval_hold_their_order(rows):
    frame = pl.DataFrame(
        [("a", 0, f"p{p}", t, b) for p, t, b in rows],
        schema=["arm", "repeat", "prompt_id", "top", "bottom"],
        orient="row",
    )
    table = ratio_table(
        frame, numerator="top", denominator="bottom", by=[], metric="m", rng=np.random.default_rng(0)
    )
    row = table.row(0, named=True)
    assert row["value"] == pytest.approx(sum(t for _, t, _ in rows) / sum(b for _, _, b in rows), abs=1e-12)
    assert row["n_clusters"] == len({p for p, _, _ in rows})
    assert row["low"] is None or row["low"] <= row["value"] <= row["high"]


def test_pooled_and_mean_of_ratios_are_different_names(rng):
    """A09: 430/130 = 3.308 pooled; 1.75 is the mean of per-request ratios, with the aborted request apart."""
    rows = [(10, 10)] * 3 + [(400, 100), (0, 0)]
    frame = pl.DataFrame(rows, schema=["completion", "verify"], orient="row").with_columns(
        pl.Series("prompt_id", [f"p{i}" for i in range(5)]), pl.lit(0).alias("repeat")
    )
    pooled = ratio_table(
        frame, numerator="completion", denominator="verify", by=[], metric="tokens_per_target_step", rng=rng
    )
    assert pooled["value"][0] == pytest.approx(3.308, abs=5e-4)
    assert (pooled["n"][0], pooled["n_clusters"][0]) == (130, 4)
    mean = mean_of_ratios(frame, numerator="completion", denominator="verify")
    assert (mean.value, mean.n, mean.num_undefined) == (1.75, 4, 1)


# Quantiles


@pytest.mark.parametrize(("q", "needed"), [(0.5, 5), (0.9, 30), (0.95, 60), (0.99, 300), (0.05, 60)])
def test_quantiles_below_their_minimum_n_are_not_reported(q, needed):
    assert stats.minimum_n(q) == needed
    short = quantile_estimate(np.arange(needed - 1.0), q)
    assert (short.value, short.n) == (None, needed - 1)
    assert short.reason == f"n={needed - 1} below the {needed} needed for P{100 * q:g}"
    assert quantile_estimate(np.arange(float(needed)), q).value == pytest.approx(q * (needed - 1))


def test_quantile_interval_is_the_binomial_one():
    """Values 1 to 100: the 95 % interval of the median is the order statistics 40 and 61 (Conover 1999)."""
    found = quantile_estimate(np.arange(1.0, 101), 0.5, n_clusters=20)
    assert (found.value, found.low, found.high) == (50.5, 40, 61)
    assert (found.n, found.n_clusters, found.method) == (100, 20, "binomial order statistics")
    # P(40 <= Binomial(100, 1/2) <= 60) is at least 0.95, and one rank less on each side is not.
    assert scipy_stats.binom.cdf(60, 100, 0.5) - scipy_stats.binom.cdf(39, 100, 0.5) >= 0.95
    assert scipy_stats.binom.cdf(59, 100, 0.5) - scipy_stats.binom.cdf(40, 100, 0.5) < 0.95


def test_a_small_sample_can_not_bracket_its_median_at_a_high_level():
    found = quantile_estimate([5.0, 1, 4, 2, 3], 0.5, level=0.95)
    assert (found.value, found.low, found.reason) == (3.0, None, "n=5 can't bracket P50 at level 0.95")


# Paired ratios, repeated runs, exact tests


def test_geometric_mean_ratio(rng):
    frame = pl.DataFrame(
        {"prompt_id": [f"p{i}" for i in range(7)], "repeat": 0, "a": [1.0, 4, 2, 8, 1, 1, None], "b": 2.0}
    )
    found = geometric_mean_ratio(frame, numerator="a", denominator="b", rng=rng)
    assert found.value == pytest.approx(scipy_stats.gmean([0.5, 2, 1, 4, 0.5, 0.5]), abs=1e-12)
    assert (found.n, found.n_clusters) == (6, 6)
    with pytest.raises(ValueError, match="must be positive"):
        geometric_mean_ratio(frame.with_columns(b=pl.lit(0.0)), numerator="a", denominator="b", rng=rng)
    nothing = geometric_mean_ratio(frame.tail(1), numerator="a", denominator="b", rng=rng)
    assert (nothing.value, nothing.n, nothing.reason) == (None, 0, "no pair")


def test_difference_inside_run_to_run_noise():
    """B35: three server starts a side; 1.025x with [0.888, 1.184] is no detectable difference."""
    found = welch_log_ratio([108, 96, 104], [100, 101, 99])
    assert found.value == pytest.approx(1.025, abs=1e-3)
    assert (found.low, found.high) == (pytest.approx(0.888, abs=1e-3), pytest.approx(1.184, abs=1e-3))
    assert (found.n, found.method) == (3, "welch on logs")


def test_single_runs_have_no_run_to_run_interval():
    found = welch_log_ratio([110], [100, 101])
    assert found.value == pytest.approx(110 / math.sqrt(100 * 101))
    assert (found.low, found.method, found.reason, found.n) == (None, "single run", "single run", 1)
    assert welch_log_ratio([2, 2], [1, 1]).reason == "no variation between the 2 runs"
    with pytest.raises(ValueError, match="baseline: no run"):
        welch_log_ratio([1], [])
    with pytest.raises(ValueError, match=r"values: \[0.0\] must be positive"):
        welch_log_ratio([0], [1])


def test_wilson_against_published_values():
    """Newcombe (1998), Statistics in Medicine 17, 857-872, table I: 81/263 and 0/20."""
    found = wilson_estimate(81, 263)
    assert (round(found.low, 4), round(found.high, 4)) == (0.2553, 0.3662)
    zero = wilson_estimate(0, 20)
    assert (zero.value, zero.low, round(zero.high, 4)) == (0, 0, 0.1611)
    assert (wilson_estimate(0, 0).value, wilson_estimate(0, 0).reason) == (None, "n=0")
    with pytest.raises(ValueError, match="num_hits 3 is not between 0 and n 2"):
        wilson_estimate(3, 2)


def test_exact_tests():
    """C04: 14/120 against 2/120 and against 12/120; C15: discordant pairs 11 to 0."""
    assert stats.fisher_p_value(14, 120, 2, 120) == pytest.approx(0.0031, abs=5e-5)
    assert stats.fisher_p_value(14, 120, 12, 120) == pytest.approx(0.84, abs=5e-3)
    assert stats.mcnemar_p_value(11, 0) == pytest.approx(0.00098, abs=5e-6)
    assert stats.mcnemar_p_value(0, 0) is None
    with pytest.raises(ValueError, match="5 hits is not between 0 and n 4"):
        stats.fisher_p_value(5, 4, 0, 4)
