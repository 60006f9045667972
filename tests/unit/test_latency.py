"""Time: hand-worked requests and cells, and the simulated engine against its own clock."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy import stats as scipy_stats

from specnb import latency, schema
from specnb.config import Published
from specnb.records import Run

BY = ["arm", "entropy_tier", "sampling", "concurrency"]


def request(**overrides):
    row = {name: None for name in schema.REQUESTS.names}
    row.update(
        run_id="run",
        arm="baseline",
        cell_id="cell",
        repeat=0,
        sampling="greedy",
        concurrency=1,
        prompt_id="p0",
        prompt_sha256="0",
        task="t",
        entropy_tier="low",
        length_tier="short",
        scheduled_s=0.0,
        sent_s=0.0,
        first_token_s=0.0,
        last_token_s=1.0,
        num_output_tokens=10,
        num_first_chunk_tokens=1,
        finish_reason="stop",
        status="ok",
    )
    unknown = set(overrides) - set(row)
    assert not unknown
    row.update(overrides)
    row.setdefault("request_id", None)
    if row["request_id"] is None:
        row["request_id"] = f"{row['cell_id']}-{row['prompt_id']}-{row['sent_s']}"
    return row


def requests_of(rows):
    return pl.DataFrame(rows, schema=schema.REQUESTS.polars_schema)


def cell(arm, prompts, *, tokens, seconds, tier="low", concurrency=1, repeat=0):
    """One request after another: prompt i emits tokens[i] in seconds[i], no time before the first token."""
    clock, rows = 0.0, []
    for prompt, num_tokens, duration in zip(prompts, tokens, seconds, strict=True):
        rows.append(
            request(
                arm=arm,
                cell_id=f"{arm}.{tier}.c{concurrency}.r{repeat}",
                entropy_tier=tier,
                concurrency=concurrency,
                repeat=repeat,
                prompt_id=prompt,
                scheduled_s=clock,
                sent_s=clock,
                first_token_s=clock,
                last_token_s=clock + duration,
                num_output_tokens=num_tokens,
                num_first_chunk_tokens=0,
            )
        )
        clock += duration
    return rows


def pick(table, **where):
    predicate = pl.all_horizontal(pl.col(name) == value for name, value in where.items())
    return table.row(by_predicate=predicate, named=True)


# Requests


def test_tpot_is_not_the_chunk_gap():
    """B01: chunks at 100, 130, 160, 190 ms with 1, 3, 3, 3 tokens: TPOT 10 ms, chunk gap 30 ms."""
    one = request(first_token_s=0.100, last_token_s=0.190, num_output_tokens=10, num_chunks=4)
    row = latency.request_latency(requests_of([one])).row(0, named=True)
    assert row["tpot_s"] == pytest.approx(0.010, abs=1e-12)
    assert (row["decode_tokens"], row["tpot_basis"]) == (9, "first chunk")
    assert row["ttft_s"] == pytest.approx(0.100)
    assert row["tpot_s"] * row["decode_tokens"] == pytest.approx(row["e2e_s"] - row["ttft_s"], abs=1e-12)
    chunks = pl.DataFrame(
        {
            "request_id": "r",
            "chunk": [0, 1, 2, 3],
            "received_s": [0.1, 0.13, 0.16, 0.19],
            "num_tokens": [1, 3, 3, 3],
        }
    )
    gaps = latency.chunk_gaps(chunks)
    assert gaps["chunk_gap_s"].to_list() == pytest.approx([0.03] * 3)
    assert gaps["token_gap_s"].to_list() == pytest.approx([0.01] * 3)
    assert gaps.columns == ["request_id", "chunk", "chunk_gap_s", "num_tokens", "token_gap_s"]


@pytest.mark.parametrize(
    ("tokens", "first", "tpot", "decode", "basis"),
    [
        (10, 4, 1 / 6, 6, "first chunk"),
        (11, None, 1 / 10, 10, "one token"),
        (4, 4, None, 0, "first chunk"),
        (1, None, None, 0, "one token"),
        (None, 1, None, None, None),
    ],
)
def test_tpot_leaves_out_the_first_chunk(tokens, first, tpot, decode, basis):
    row = latency.request_latency(
        requests_of([request(num_output_tokens=tokens, num_first_chunk_tokens=first)])
    ).row(0, named=True)
    assert row["tpot_s"] == (None if tpot is None else pytest.approx(tpot))
    assert (row["decode_tokens"], row["tpot_basis"]) == (decode, basis)


def test_a_reasoning_channel_has_its_own_first_token():
    rows = [request(first_token_s=0.2, first_answer_s=2.2, last_token_s=3), request(prompt_id="p1")]
    table = latency.request_latency(requests_of(rows))
    assert table["ttft_s"][0] == pytest.approx(0.2)
    assert table["ttfa_s"].to_list() == [pytest.approx(2.2), None]


def test_failed_requests_have_no_latency_but_are_counted():
    """Two of four are no successes: the median TTFT is 0.20, not 0.05, and the rate is 2 of 4."""
    failed = {"status": "error", "error_kind": "no_tokens", "error": "empty", "finish_reason": None}
    rows = [
        request(prompt_id="a", first_token_s=0.1),
        request(prompt_id="b", first_token_s=None, last_token_s=None, **failed),
        request(prompt_id="c", first_token_s=0.3),
        request(prompt_id="d", first_token_s=None, last_token_s=None, **{**failed, "error_kind": "timeout"}),
    ]
    table = requests_of(rows)
    assert latency.request_latency(table)["ttft_s"].median() == pytest.approx(0.2)
    failures = latency.failure_table(table, by=["arm"]).row(0, named=True)
    assert (failures["metric"], failures["value"], failures["n"]) == ("failure_rate", 0.5, 4)
    assert (failures["num_failed"], failures["failures"]) == (2, "1 no_tokens, 1 timeout")
    expected = scipy_stats.binomtest(2, 4).proportion_ci(method="wilson")
    assert (failures["low"], failures["high"]) == pytest.approx((expected.low, expected.high))
    clean = latency.failure_table(table.filter(pl.col("status") == "ok"), by=[]).row(0, named=True)
    assert (clean["value"], clean["num_failed"], clean["failures"]) == (0, 0, None)


def test_the_first_fill_of_a_closed_loop_is_set_apart():
    """B20: 4 in flight; the first four TTFT 1.0 s, the other sixteen 0.1 s."""
    rows = [
        request(
            concurrency=4,
            prompt_id=f"p{i}",
            sent_s=i * 0.01,
            first_token_s=i * 0.01 + (1.0 if i < 4 else 0.1),
            last_token_s=3.0,
        )
        for i in range(20)
    ]
    every = latency.request_latency(requests_of(rows))["ttft_s"]
    steady = latency.request_latency(latency.steady_state(requests_of(rows)))["ttft_s"]
    assert (every.mean(), every.quantile(0.99, "higher")) == (pytest.approx(0.28), pytest.approx(1.0))
    assert (steady.len(), steady.mean()) == (16, pytest.approx(0.10))
    assert steady.quantile(0.99, "higher") == pytest.approx(0.10)


def test_queueing_at_the_client_counts_in_the_scheduled_latency():
    """B24: due every 0.1 s, served one at a time in 0.4 s: scheduled latency 1.15 s, delay 0.75 s."""
    rows = [
        request(
            prompt_id=f"p{i}",
            scheduled_s=0.1 * i,
            sent_s=0.4 * i,
            first_token_s=0.4 * i,
            last_token_s=0.4 * (i + 1),
        )
        for i in range(6)
    ]
    table = latency.request_latency(requests_of(rows))
    assert table["e2e_s"].to_list() == pytest.approx([0.4] * 6)
    assert table["scheduled_e2e_s"].mean() == pytest.approx(1.15)
    assert table["dispatch_delay_s"].mean() == pytest.approx(0.75)
    medians = latency.latency_quantiles(requests_of(rows), by=BY)
    assert pick(medians, metric="scheduled_e2e_s", quantile=0.5)["value"] == pytest.approx(1.15)


def test_latency_quantiles(rng):
    ttft = rng.gamma(2, 0.05, size=320)
    rows = [
        request(prompt_id=f"p{i % 40}", sent_s=float(i), first_token_s=i + float(t), last_token_s=i + 2.0)
        for i, t in enumerate(ttft)
    ]
    table = latency.latency_quantiles(requests_of(rows), by=["arm"])
    assert table.height == len(latency.LATENCY_METRICS) * 3
    assert table.columns[:3] == ["arm", "quantile", "metric"]
    for q in (0.5, 0.95, 0.99):
        row = pick(table, metric="ttft_s", quantile=q)
        assert row["value"] == pytest.approx(np.quantile(ttft, q), abs=1e-9)
        assert (row["n"], row["n_clusters"]) == (320, 40)
    few = latency.latency_quantiles(requests_of(rows[:299]), by=[])
    row = pick(few, metric="ttft_s", quantile=0.99)
    assert (row["value"], row["low"], row["reason"]) == (None, None, "n=299 below the 300 needed for P99")
    unknown = latency.latency_quantiles(requests_of([request(num_output_tokens=None)]), by=[])
    assert pick(unknown, metric="tpot_s", quantile=0.5)["reason"] == "n=0 below the 5 needed for P50"


# Chunks


def test_gaps_are_shared_out_over_their_tokens():
    """B02: gaps 30, 30, 60 ms with 3, 1, 2 tokens: median 20 ms, not 15."""
    chunks = pl.DataFrame(
        {
            "request_id": "r",
            "chunk": range(4),
            "received_s": [0.0, 0.03, 0.06, 0.12],
            "num_tokens": [1, 3, 1, 2],
        }
    )
    series = latency.token_gaps(latency.chunk_gaps(chunks)) * 1000
    assert sorted(series) == pytest.approx([10, 10, 10, 30, 30, 30])
    assert (np.mean(series), np.median(series)) == (pytest.approx(20), pytest.approx(20))
    assert np.quantile(series, 0.99) == pytest.approx(30)
    unknown = chunks.with_columns(num_tokens=pl.Series([1, 3, None, 2]))
    assert latency.token_gaps(latency.chunk_gaps(unknown)) is None


def test_gaps_do_not_cross_requests():
    chunks = pl.DataFrame(
        {
            "request_id": ["b", "a", "b", "a"],
            "chunk": [0, 0, 1, 1],
            "received_s": [9.0, 1, 9.5, 1.25],
            "num_tokens": 1,
        }
    )
    gaps = latency.chunk_gaps(chunks)
    assert gaps.select("request_id", "chunk_gap_s").rows() == [("a", 0.25), ("b", 0.5)]


def test_peak_is_not_below_the_mean():
    """B04: 20 chunks a second of 4 tokens for 2 s: mean 80, peak 80; counting chunks (20) is refused."""
    chunks = pl.DataFrame({"received_s": [7 + 0.05 * (i + 1) for i in range(40)], "num_tokens": 4})
    found = latency.peak_throughput(chunks, start_s=7.0)
    assert (found.mean_tokens_per_s, found.peak_tokens_per_s) == (pytest.approx(80), pytest.approx(80))
    with pytest.raises(ValueError, match="peak 20 tokens/s is below the mean 80; were chunks counted"):
        latency.PeakThroughput(mean_tokens_per_s=80, peak_tokens_per_s=20, bucket_s=1)


def test_peak_holds_for_any_window(rng):
    for _ in range(50):
        received = np.sort(rng.uniform(0.01, rng.uniform(0.1, 5), size=30))
        chunks = pl.DataFrame({"received_s": received, "num_tokens": rng.integers(1, 9, size=30)})
        found = latency.peak_throughput(chunks, start_s=0.0)
        assert found.mean_tokens_per_s == pytest.approx(chunks["num_tokens"].sum() / received[-1])
        assert found.bucket_s >= min(1.0, received[-1]) - 1e-12
        assert found.peak_tokens_per_s >= found.mean_tokens_per_s * (1 - 1e-9)
    assert latency.peak_throughput(chunks.with_columns(num_tokens=None), start_s=0.0) is None
    assert latency.peak_throughput(chunks.clear(), start_s=0.0) is None
    with pytest.raises(ValueError, match="before start_s 9"):
        latency.peak_throughput(chunks, start_s=9.0)


# Throughput


def test_tokens_are_not_chunks(rng):
    """B03: 20 chunks over 2.0 s, usage 80: 40 tokens a second."""
    rows = [request(last_token_s=2.0, num_output_tokens=80, num_chunks=20)]
    row = latency.throughput_table(requests_of(rows), by=BY, rng=rng).row(0, named=True)
    assert (row["metric"], row["value"]) == ("output_tokens_per_s", 40.0)
    assert (row["num_output_tokens"], row["wall_s"], row["n"]) == (80, 2.0, 1)
    assert row["reason"] == "fewer than 5 prompts"


def test_throughput_of_overlapping_requests_uses_the_wall(rng):
    """Two in flight for 4 s, 8 requests of 1 s each: tokens / 4 s, though service times add up to 8 s."""
    rows = [
        request(
            concurrency=2,
            prompt_id=f"p{i}",
            sent_s=10.0 + i // 2,
            first_token_s=10.5 + i // 2,
            last_token_s=11.0 + i // 2,
            num_output_tokens=10 + (i % 3),
        )
        for i in range(8)
    ]
    row = latency.throughput_table(requests_of(rows), by=BY, rng=rng).row(0, named=True)
    assert row["value"] == pytest.approx(sum(10 + (i % 3) for i in range(8)) / 4)
    assert row["wall_s"] == pytest.approx(4.0)
    assert row["low"] < row["value"] < row["high"]


def test_failed_requests_take_wall_time_but_give_no_tokens(rng):
    rows = [
        request(prompt_id="a"),
        request(
            prompt_id="b",
            sent_s=1.0,
            first_token_s=1.0,
            last_token_s=3.0,
            num_output_tokens=5,
            status="error",
            error_kind="server_error",
            error="x",
            finish_reason=None,
        ),
    ]
    row = latency.throughput_table(requests_of(rows), by=BY, rng=rng).row(0, named=True)
    assert (row["value"], row["n"]) == (pytest.approx(10 / 3), 1)


def test_wall_time_can_not_be_split_inside_a_cell(rng):
    with pytest.raises(ValueError, match="by 'length_tier' may vary inside a cell"):
        latency.throughput_table(requests_of([request()]), by=["arm", "length_tier"], rng=rng)


# Speedup


def test_totals_are_the_headline(rng):
    """B34: 100 tokens at 2x and 900 at 1.2x: 20.0 s / 16.0 s = 1.25x; 1.549x under its own name; tiers."""
    rows = [
        *cell("baseline", ["x"], tokens=[100], seconds=[2.0], tier="low"),
        *cell("baseline", ["y"], tokens=[900], seconds=[18.0], tier="high"),
        *cell("spec", ["x"], tokens=[100], seconds=[1.0], tier="low"),
        *cell("spec", ["y"], tokens=[900], seconds=[15.0], tier="high"),
    ]
    table = latency.speedup_table(requests_of(rows), baseline="baseline", by=["arm"], rng=rng)
    headline = pick(table, metric="throughput_speedup")
    assert headline["value"] == pytest.approx(1.25)
    assert (headline["wall_s"], headline["baseline_wall_s"]) == (16.0, 20.0)
    assert (headline["num_output_tokens"], headline["baseline_num_output_tokens"]) == (1000, 1000)
    assert pick(table, metric="paired_tpot_speedup")["value"] == pytest.approx(math.sqrt(2 * 1.2))
    assert pick(table, metric="output_length_ratio")["value"] == 1.0
    tiers = latency.speedup_table(requests_of(rows), baseline="baseline", rng=rng)
    assert pick(tiers, metric="throughput_speedup", entropy_tier="low")["value"] == pytest.approx(2.0)
    assert pick(tiers, metric="throughput_speedup", entropy_tier="high")["value"] == pytest.approx(1.2)
    assert table.columns[0] == "arm"
    assert tuple(table["metric"]) == latency.SPEEDUP_METRICS


def test_different_output_lengths(rng):
    """B26: 1000 tokens in 10 s against 500 in 4 s: 1.25x per token, not 2.5x; the ratio 0.50 is flagged."""
    rows = [
        *cell("baseline", ["p"], tokens=[1000], seconds=[10.0]),
        *cell("spec", ["p"], tokens=[500], seconds=[4.0]),
    ]
    table = latency.speedup_table(requests_of(rows), baseline="baseline", rng=rng)
    assert pick(table, metric="throughput_speedup")["value"] == pytest.approx(1.25)
    assert pick(table, metric="paired_tpot_speedup")["value"] == pytest.approx(1.25)
    assert pick(table, metric="output_length_ratio")["value"] == 0.5
    assert set(table["note"]) == {"output lengths differ: ratio 0.50"}


def test_speculation_off_at_high_batch_is_still_timed(rng):
    """B39: 30 against 210 tokens a second is 0.14x, flagged as slower."""
    prompts = [f"p{i}" for i in range(8)]
    rows = [
        *cell(
            "baseline", prompts, tokens=[210] * 8, seconds=[0.9 + 0.025 * i for i in range(8)], concurrency=8
        ),
        *cell("spec", prompts, tokens=[210] * 8, seconds=[6.3 + 0.175 * i for i in range(8)], concurrency=8),
    ]
    table = latency.speedup_table(requests_of(rows), baseline="baseline", rng=rng)
    headline = pick(table, metric="throughput_speedup")
    assert headline["value"] == pytest.approx(1 / 7)
    assert headline["note"] == "slower than the baseline (no interval)"
    assert headline["reason"] == "no variation between the 8 prompts"


def test_speedup_interval_resamples_prompts_of_both_arms(rng):
    """Durations differ twenty-fold, the arm takes about half of each: pairing keeps the interval narrow."""
    prompts = [f"p{i}" for i in range(30)]
    base = rng.uniform(1, 20, size=30)
    mine = base / rng.normal(2.0, 0.05, size=30)
    rows = [
        *cell("baseline", prompts, tokens=[100] * 30, seconds=base.tolist()),
        *cell("spec", prompts, tokens=[100] * 30, seconds=mine.tolist()),
    ]
    table = latency.speedup_table(requests_of(rows), baseline="baseline", rng=rng)
    headline = pick(table, metric="throughput_speedup")
    assert headline["value"] == pytest.approx(base.sum() / mine.sum())
    assert headline["high"] - headline["low"] < 0.1
    assert headline["low"] < 2 < headline["high"]
    assert headline["method"] == "bca, prompts only (single run)"
    paired = pick(table, metric="paired_tpot_speedup")
    assert paired["value"] == pytest.approx(scipy_stats.gmean(base / mine))
    assert (paired["n"], paired["n_clusters"]) == (30, 30)
    runs = pick(table, metric="run_to_run_speedup")
    assert (runs["low"], runs["method"], runs["reason"]) == (None, "single run", "single run")
    assert runs["value"] == pytest.approx(headline["value"])


def test_repeats_give_a_run_to_run_interval(rng):
    """B35 through records: three runs a side; the resampled interval and Welch's both hold 1."""
    rows = []
    prompts = [f"p{i}" for i in range(10)]
    for repeat, (base, mine) in enumerate(zip((100, 101, 99), (108, 96, 104), strict=True)):
        for arm, rate in (("baseline", base), ("spec", mine)):
            seconds = [(50 + 10 * i) / rate for i in range(10)]
            rows += cell(
                arm, prompts, tokens=[50 + 10 * i for i in range(10)], seconds=seconds, repeat=repeat
            )
    table = latency.speedup_table(requests_of(rows), baseline="baseline", rng=rng)
    runs = pick(table, metric="run_to_run_speedup")
    assert (runs["value"], runs["low"], runs["high"], runs["n"]) == (
        pytest.approx(1.025, abs=1e-3),
        pytest.approx(0.888, abs=1e-3),
        pytest.approx(1.184, abs=1e-3),
        3,
    )
    headline = pick(table, metric="throughput_speedup")
    assert headline["method"] == "percentile, repeats x prompts"
    assert headline["low"] < 1 < headline["high"]


def test_only_common_repeats_and_prompts_are_compared(rng):
    rows = [
        *cell("baseline", ["p", "q"], tokens=[10, 10], seconds=[1.0, 1.0]),
        *cell("spec", ["p", "r"], tokens=[10, 10], seconds=[0.5, 0.5]),
        *cell("spec", ["p"], tokens=[10], seconds=[50.0], repeat=1),
    ]
    table = latency.speedup_table(requests_of(rows), baseline="baseline", rng=rng)
    headline = pick(table, metric="throughput_speedup")
    assert headline["value"] == pytest.approx(2.0), "repeat 1 has no baseline"
    assert headline["num_unpaired_prompts"] == 2
    assert pick(table, metric="paired_tpot_speedup")["n"] == 1
    alone = requests_of(rows).filter((pl.col("arm") == "baseline") | (pl.col("repeat") == 1))
    missing = latency.speedup_table(alone, baseline="baseline", rng=rng)
    assert set(missing["reason"]) == {"no ok request of the baseline in the same repeat"}
    assert missing["value"].null_count() == 4


def test_speedup_refuses_what_it_can_not_compare(rng):
    frame = requests_of([request()])
    with pytest.raises(ValueError, match="baseline 'nobody' is not an arm"):
        latency.speedup_table(frame, baseline="nobody", rng=rng)
    with pytest.raises(ValueError, match="must hold 'arm'"):
        latency.speedup_table(frame, baseline="baseline", by=["concurrency"], rng=rng)
    assert latency.speedup_table(frame, baseline="baseline", rng=rng).height == 0


# Break-even


def speedups(curve, *, arm="spec"):
    """Rows (concurrency, value, low, high)."""
    return pl.DataFrame(
        [(arm, "low", "greedy", c, "throughput_speedup", v, lo, hi, 0.95, 9, 7) for c, v, lo, hi in curve],
        schema={
            "arm": pl.String,
            "entropy_tier": pl.String,
            "sampling": pl.String,
            "concurrency": pl.Int64,
            "metric": pl.String,
            "value": pl.Float64,
            "low": pl.Float64,
            "high": pl.Float64,
            "level": pl.Float64,
            "n": pl.Int64,
            "n_clusters": pl.Int64,
        },
        orient="row",
    )


def test_one_speedup_does_not_hold_for_all_loads(rng):
    """B37: 2.00x at 1 and 0.90x at 64: on log2 concurrency it crosses 1 at 6 x 1.0 / 1.1, that is 43.9."""
    rows = []
    for concurrency, base, mine in ((1, 50, 100), (64, 1600, 1440)):
        rows += cell("baseline", ["p"], tokens=[base], seconds=[1.0], concurrency=concurrency)
        rows += cell("spec", ["p"], tokens=[mine], seconds=[1.0], concurrency=concurrency)
    table = latency.speedup_table(requests_of(rows), baseline="baseline", rng=rng)
    curve = table.filter(pl.col("metric") == "throughput_speedup")
    assert curve.select("concurrency", "value").rows() == [(1, 2.0), (64, pytest.approx(0.9))]
    row = latency.break_even_concurrency(table).row(0, named=True)
    assert row["value"] == pytest.approx(2 ** (6 / 1.1))
    assert (row["min_concurrency"], row["max_concurrency"], row["n"]) == (1, 64, 2)
    assert (row["low"], row["high"], row["reason"]) == (None, None, "a speedup has no interval")
    assert "concurrency" not in latency.break_even_concurrency(table).columns


def test_break_even_interval_comes_from_the_interval_curves():
    curve = [(1, 2.0, 1.8, 2.2), (2, 1.5, 1.2, 1.6), (4, 0.9, 0.8, 1.1), (8, 0.5, 0.4, 0.6)]
    row = latency.break_even_concurrency(speedups(curve)).row(0, named=True)
    assert row["value"] == pytest.approx(2 ** (1 + 0.5 / 0.6))
    assert row["low"] == pytest.approx(2 ** (1 + 0.2 / 0.4))
    assert row["high"] == pytest.approx(2 ** (2 + 0.1 / 0.5))
    assert (row["n"], row["n_clusters"], row["reason"]) == (4, 7, None)
    assert row["metric"] == "break_even_concurrency"


@pytest.mark.parametrize(
    ("curve", "expected", "reason"),
    [
        (
            [(1, 2.0, 1.9, 2.1), (8, 1.5, 1.4, 1.6)],
            (None, None, None),
            "not reached in range 1 to 8; lower end is above 8",
        ),
        ([(1, 2.0, 1.5, 2.1), (8, 1.5, 0.5, 1.6)], (None, 2**1.5, None), "not reached in range 1 to 8"),
        ([(1, 1.5, 1.2, 2.0), (4, 0.5, 0.2, 1.1)], (2.0, 2**0.4, None), "upper end is above 4"),
        (
            [(1, 0.9, 0.8, 0.95), (4, 0.5, 0.2, 0.7)],
            (None, None, None),
            "below 1 from the lowest concurrency 1; upper end is below 1",
        ),
        (
            [(1, 0.9, 0.8, 1.5), (4, 0.5, 0.2, 0.5)],
            (None, None, 2.0),
            "below 1 from the lowest concurrency 1",
        ),
        ([(1, 1.2, 0.9, 1.5), (4, 0.8, 0.7, 0.5)], (2.0, None, 2.0), "lower end is below 1"),
        (
            [(1, 0.9, 0.8, 0.95), (4, 1.5, 1.2, 1.7), (8, 0.9, 0.8, 0.95)],
            (None, None, None),
            "below 1 at the lowest concurrency 1, but not at 4; upper end is below 1",
        ),
    ],
)
def test_break_even_outside_the_range_is_open(curve, expected, reason):
    row = latency.break_even_concurrency(speedups(curve)).row(0, named=True)
    for found, wanted in zip((row["value"], row["low"], row["high"]), expected, strict=True):
        assert found == (None if wanted is None else pytest.approx(wanted))
    assert row["reason"] == reason


def test_break_even_is_the_first_fall_and_skips_gaps():
    curve = [(1, 2.0, 1.9, 2.1), (2, None, None, None), (4, 0.5, 0.4, 0.6), (8, 1.5, 1.4, 1.6)]
    row = latency.break_even_concurrency(speedups(curve)).row(0, named=True)
    assert row["value"] == pytest.approx(2 ** (2 * 1.0 / 1.5))
    nothing = latency.break_even_concurrency(speedups([(1, None, None, None)])).row(0, named=True)
    assert (nothing["value"], nothing["reason"], nothing["n"]) == (None, "no speedup measured", 0)


# Decomposition


def engine_step(arm, number, batch, *, prefill=0.0, draft=0.0, verify=0.0):
    return {
        "run_id": "run",
        "arm": arm,
        "cell_id": f"{arm}.low.c2.r0",
        "engine_step": number,
        "batch_size": batch,
        "num_query_tokens": batch,
        "prefill_s": prefill,
        "draft_s": draft,
        "verify_s": verify,
        "end_s": 0.0,
    }


def step(arm, name, number, engine, *, drafted=0, accepted=0):
    return {
        "run_id": "run",
        "arm": arm,
        "cell_id": f"{arm}.low.c2.r0",
        "request_id": f"{arm}-{name}",
        "prompt_id": name,
        "step": number,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "num_emitted_tokens": accepted + 1,
        "engine_step": engine,
    }


def run_of(requests, steps, engine_steps):
    run = Run(Path("run"), {"run_id": "run", "status": "finished", "modelled": False}, ())
    run._tables = {
        "requests": requests_of(requests),
        "steps": pl.DataFrame(steps, schema=schema.STEPS.polars_schema),
        "engine_steps": pl.DataFrame(engine_steps, schema=schema.ENGINE_STEPS.polars_schema),
    }
    return run


def decomposed():
    """Two requests; the second is admitted before engine step 1 and its prefill stalls the first by 0.4 s.

    Baseline: steps of 0.1 s; request a takes steps 0 to 3, b steps 1 to 3. Draft arm: one token
    accepted in each step, draft 0.05 s and verify 0.15 s; a takes steps 0 and 1, b step 1.
    """
    base_steps = [step("base", "a", i, i) for i in range(4)] + [step("base", "b", i, i + 1) for i in range(3)]
    base_engine = [engine_step("base", i, 1 if i == 0 else 2, verify=0.1) for i in range(4)]
    base_engine[1]["prefill_s"] = 0.4
    arm_steps = [step("draft", "a", i, i, drafted=1, accepted=1) for i in range(2)]
    arm_steps.append(step("draft", "b", 0, 1, drafted=1, accepted=1))
    arm_engine = [engine_step("draft", 0, 1, draft=0.05, verify=0.15)]
    arm_engine.append(engine_step("draft", 1, 2, prefill=0.4, draft=0.05, verify=0.15))
    requests = [
        request(
            arm=arm,
            cell_id=f"{arm}.low.c2.r0",
            concurrency=2,
            prompt_id=name,
            last_token_s=end,
            num_output_tokens=n,
        )
        for arm, name, end, n in (
            ("base", "a", 0.8, 5),
            ("base", "b", 0.3, 4),
            ("draft", "a", 0.8, 5),
            ("draft", "b", 0.2, 3),
        )
    ]
    return requests, base_steps + arm_steps, base_engine + arm_engine


def test_decomposition_by_hand():
    row = latency.decomposition(run_of(*decomposed()), baseline="base").row(0, named=True)
    # Seconds a token: baseline (0.8 + 0.3) / (4 + 3), arm (0.8 + 0.2) / (4 + 2).
    assert row["decode_speedup"] == pytest.approx((1.1 / 7) / (1.0 / 6))
    assert row["tokens_per_target_step"] == 2.0
    assert row["baseline_step_s"] == pytest.approx(0.1)
    assert (row["draft_s"], row["verify_s"], row["cycle_s"]) == pytest.approx((0.05, 0.15, 0.2))
    # One of two requests waits 0.4 s, spread over 7 and over 3 request steps.
    assert row["baseline_stall_s"] == pytest.approx(0.4 / 7)
    assert row["stall_s"] == pytest.approx(0.4 / 3)
    assert row["predicted_speedup"] == pytest.approx(2 * (0.1 + 0.4 / 7) / (0.2 + 0.4 / 3))
    assert row["residual"] == pytest.approx(0, abs=1e-12)
    assert (row["num_steps"], row["num_engine_steps"], row["baseline_num_engine_steps"]) == (3, 2, 4)
    assert row["reason"] is None


def test_residual_sees_time_that_the_steps_do_not_explain():
    requests, steps, engine_steps = decomposed()
    for row in requests:
        if row["arm"] == "draft":
            row["last_token_s"] *= 1.25
    found = latency.decomposition(run_of(requests, steps, engine_steps), baseline="base")
    assert found["residual"][0] == pytest.approx(1 / 1.25 - 1)


def test_decomposition_without_step_times_has_a_reason():
    requests, steps, _ = decomposed()
    row = latency.decomposition(run_of(requests, steps, []), baseline="base").row(0, named=True)
    assert (row["predicted_speedup"], row["residual"], row["cycle_s"]) == (None, None, None)
    assert row["reason"] == "no step times"
    assert row["decode_speedup"] == pytest.approx((1.1 / 7) / (1.0 / 6))


def test_simulated_run_decomposes_and_its_intervals_hold_the_truth(simulated_run, rng):
    run = simulated_run(alpha=0.8, concurrency=(1, 4), repeats=2, prompts_per_cell=12, tiers=("low",))
    table = latency.decomposition(run)
    assert table.height == 2
    assert table["residual"].abs().max() < 0.05
    found = latency.speedup_table(run.requests, baseline=run.plan.baseline.name, rng=rng)
    headline = found.filter(pl.col("metric") == "throughput_speedup")
    assert headline["concurrency"].to_list() == [1, 4]
    for row in headline.to_dicts():
        arm, base = (
            run.requests.filter((pl.col("arm") == name) & (pl.col("concurrency") == row["concurrency"]))
            for name in (row["arm"], run.plan.baseline.name)
        )
        rates = [
            side["num_output_tokens"].sum()
            / sum(part["last_token_s"].max() - part["sent_s"].min() for part in side.partition_by("cell_id"))
            for side in (arm, base)
        ]
        assert row["value"] == pytest.approx(rates[0] / rates[1], abs=1e-9)


# Servers and published figures


def served(iterations):
    """Baseline: two requests of 5 tokens, 0.1 s apart; arm: 5 tokens in chunks of 1, 2, 2, 0.15 s apart."""
    requests, chunks, steps = [], [], []
    for arm, counts, gap in (("base", (1, 1, 1, 1, 1), 0.1), ("draft", (1, 2, 2), 0.15)):
        for number, name in enumerate(("a", "b")):
            start = 1.0 + number * 10
            times = [start + 0.5 + gap * chunk for chunk in range(len(counts))]
            requests.append(
                request(
                    arm=arm,
                    cell_id=f"{arm}.low.c1.r0",
                    concurrency=1,
                    request_id=f"{arm}-{name}",
                    prompt_id=name,
                    sent_s=start,
                    first_token_s=times[0],
                    last_token_s=times[-1],
                    num_output_tokens=5,
                )
            )
            chunks += [
                {
                    "run_id": "run",
                    "request_id": f"{arm}-{name}",
                    "chunk": i,
                    "received_s": at,
                    "num_tokens": n,
                }
                for i, (at, n) in enumerate(zip(times, counts, strict=True))
            ]
            drafted = 1 if arm == "draft" else 0
            steps += [
                step(arm, name, i, None, drafted=drafted, accepted=count - 1)
                | {"cell_id": f"{arm}.low.c1.r0"}
                for i, count in enumerate(counts[1:])
            ]
    bodies = {
        arm: [f"vllm:iteration_tokens_total_count {value}\n" for value in (7, 7, 7 + count, 7 + count)]
        for arm, count in iterations.items()
    }
    scrapes = [
        {
            "run_id": "run",
            "arm": arm,
            "cell_id": f"{arm}.low.c1.r0",
            "scrape": number,
            "scraped_s": float(number),
            "body": "# TYPE vllm:iteration_tokens_total histogram\n"
            'vllm:iteration_tokens_total_bucket{le="+Inf"} ' + body.split()[-1] + "\n" + body,
        }
        for arm, found in bodies.items()
        for number, body in enumerate(found)
    ]
    run = run_of(requests, steps, [])
    run._tables["chunks"] = pl.DataFrame(chunks, schema=schema.CHUNKS.polars_schema)
    run._tables["scrapes"] = pl.DataFrame(scrapes, schema=schema.SCRAPES.polars_schema)
    run.cells = ({"files": {"scrapes": {}, "chunks": {}} if scrapes else {"chunks": {}}},)
    return run


def test_step_times_of_a_server_come_from_its_iterations():
    # 2 requests: one prefill iteration each, then 4 steps (baseline) or 2 (arm).
    row = latency.decomposition(served({"base": 10, "draft": 6}), baseline="base").row(0, named=True)
    assert row["step_source"] == "engine iterations"
    assert row["baseline_step_s"] == pytest.approx(0.1)
    assert row["cycle_s"] == pytest.approx(0.15)
    assert (row["baseline_num_engine_steps"], row["num_engine_steps"]) == (8, 4)
    assert (row["draft_s"], row["verify_s"], row["stall_s"]) == (None, None, None)
    assert row["tokens_per_target_step"] == 2.0
    assert row["decode_speedup"] == pytest.approx(0.1 / 0.075)
    assert row["residual"] == pytest.approx(0)


def test_iterations_that_no_request_accounts_for_show_in_the_residual():
    row = latency.decomposition(served({"base": 10, "draft": 10}), baseline="base").row(0, named=True)
    assert row["cycle_s"] == pytest.approx(0.6 / 8)
    assert row["residual"] == pytest.approx(-0.5)


def test_without_counters_step_times_are_chunk_gaps():
    row = latency.decomposition(served({}), baseline="base").row(0, named=True)
    assert row["step_source"] == "chunk gaps"
    assert (row["baseline_step_s"], row["cycle_s"]) == pytest.approx((0.1, 0.15))


def test_published_figures_beside_measured_ones():
    published = Published.model_validate(
        {
            "source": "s",
            "conditions": "c",
            "claims": [
                {
                    "arm": "draft",
                    "workload": "GSM8K",
                    "concurrency": 1,
                    "acceptance_length": 5.0,
                    "baseline_tokens_per_s": 50.0,
                    "tokens_per_s": 200.0,
                },
                {
                    "arm": "draft",
                    "workload": "GSM8K",
                    "concurrency": 8,
                    "baseline_tokens_per_s": 50.0,
                    "tokens_per_s": 75.0,
                },
            ],
        }
    )
    speedups = pl.DataFrame(
        {
            "arm": ["draft"],
            "concurrency": [1],
            "metric": ["throughput_speedup"],
            "value": [1.3],
            "low": [1.2],
            "high": [1.4],
        }
    )
    parts = latency.decomposition(served({"base": 10, "draft": 6}), baseline="base")
    acceptance = pl.DataFrame({"arm": ["draft"], "concurrency": [1], "acceptance_length": [2.0]})
    first, second = latency.claims_table(speedups, parts, published, acceptance=acceptance).to_dicts()
    assert first["published_speedup"] == 4.0
    assert (first["speedup"], first["low"], first["high"]) == (1.3, 1.2, 1.4)
    assert first["outside"] is True
    assert first["published_cycle_ratio"] == 1.25
    assert first["cycle_ratio"] == pytest.approx(1.5)
    assert first["from_acceptance"] == pytest.approx(0.4)
    assert first["from_cycle"] == pytest.approx(1.25 / 1.5)
    assert second["published_speedup"] == 1.5
    assert {second[name] for name in ("speedup", "cycle_ratio", "from_acceptance", "outside")} == {None}


@pytest.mark.parametrize(
    ("spans", "covered"),
    [
        ([], (0.0, 0)),
        ([(0.0, 1.0), (2.0, 3.0)], (2.0, 2)),
        ([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0)], (5.0, 1)),
        ([(0.0, 1.0), (1.0, 2.0)], (2.0, 1)),
    ],
)
def test_time_covered_by_spans(spans, covered):
    assert latency._covered(spans) == covered


def test_b10_answers_without_a_token_count_leave_no_ratio_of_totals():
    rows = [
        request(arm=arm, cell_id=f"{arm}.c1", request_id=f"{arm}{i}", prompt_id=f"p{i}", num_output_tokens=n)
        for arm, counts in (("base", (10, None, 10)), ("draft", (10, 10, 10)))
        for i, n in enumerate(counts)
    ]
    requests = requests_of(rows)
    table = latency.throughput_table(requests, by=("arm",), rng=np.random.default_rng(0))
    found = {row["arm"]: row for row in table.to_dicts()}
    assert found["base"]["value"] is None
    assert found["base"]["reason"] == "the server gave no token count for 1 of 3 answers"
    assert found["draft"]["value"] is not None
    speedups = latency.speedup_table(requests, baseline="base", by=("arm",), rng=np.random.default_rng(0))
    by_metric = {row["metric"]: row for row in speedups.to_dicts()}
    assert by_metric["throughput_speedup"]["value"] is None
    assert by_metric["throughput_speedup"]["reason"] == "the server gave no token count for 1 of 3 answers"
    assert by_metric["paired_tpot_speedup"]["value"] is not None
