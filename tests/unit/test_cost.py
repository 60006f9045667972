"""What a drafter weighs, costs and pays back: hand-worked numbers, and every reason for no number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from specnb import acceptance, cost, latency
from specnb.records import Run, read_run

Runs = Callable[..., Run]
TRAINING = {
    "gpu_hours": 0.5,
    "train_seconds": 300.0,
    "corpus": {"training_answer_tokens": 31_000_000},
    "hardware": {"device": "NVIDIA H200"},
    "gpu_hour_price": {"gpu_hour": 3.5, "currency": "USD"},
}
DRAFTER = {"label": "DFlash 2", "num_parameters": 19_000_000, "dtype": "bfloat16", "training": TRAINING}
SMALL = {"prompts_per_cell": 8, "concurrency": (1, 4), "max_tokens": 32}


@pytest.fixture(scope="module")
def run(simulated_run: Runs) -> Run:
    """A trained drafter, one of which nothing is known, and prompt lookup."""
    return simulated_run(
        arms={
            "draft": {**DRAFTER, "alpha": 0.9},
            "stranger": {},
            "lookup": {"method": "ngram", "alpha": 0.2},
        },
        **SMALL,
    )


def edited(run: Run, folder: Path, **changes: Any) -> Run:
    """A copy of a run with other entries in its manifest; `plan` entries are merged."""
    target = folder / "edited"
    shutil.copytree(run.path, target)
    manifest = {**run.manifest, **changes}
    manifest["plan"] = {**run.manifest["plan"], **changes.get("plan", {})}
    (target / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return read_run(target)


def speedups(run: Run, rng: np.random.Generator) -> pl.DataFrame:
    by = ("arm", "sampling", "concurrency")
    return latency.speedup_table(run.requests, baseline="baseline", by=by, rng=rng)


def drafter(run: Run, arm: str) -> dict[str, Any]:
    return cost.drafter_table(run).filter(pl.col("arm") == arm).row(0, named=True)


# Drafters


def test_a_trained_drafter_shows_its_record(run: Run) -> None:
    row = drafter(run, "draft")
    assert row["label"] == "DFlash 2"
    assert (row["num_parameters"], row["weight_bytes"]) == (19_000_000, 38_000_000)
    assert (row["training_gpu_hours"], row["training_tokens"]) == (0.5, 31_000_000)
    assert row["training_hardware"] == "NVIDIA H200"
    assert row["training_cost"] == pytest.approx(1.75)
    assert row["reason"] == "kv_bytes_per_token: the run's record does not say"


def test_what_is_unknown_is_null_with_a_reason(run: Run) -> None:
    row = drafter(run, "stranger")
    unknown = ("num_parameters", "weight_bytes", "kv_bytes_per_token", "training_gpu_hours", "training_cost")
    assert all(row[name] is None for name in unknown)
    assert "num_parameters, weight_bytes, kv_bytes_per_token: the run's record does not say" in row["reason"]
    assert "tells of no training" in row["reason"]


def test_prompt_lookup_weighs_and_costs_nothing(run: Run) -> None:
    row = drafter(run, "lookup")
    free = ("num_parameters", "weight_bytes", "kv_bytes_per_token", "training_gpu_hours", "training_cost")
    assert [row[name] for name in free] == [0] * len(free)
    assert row["reason"] is None


def test_a_training_without_gpu_hours_and_a_cost_without_price_say_so(simulated_run: Runs) -> None:
    unpriced = {key: value for key, value in TRAINING.items() if key != "gpu_hour_price"}
    run = simulated_run(
        arms={
            "cpu": {**DRAFTER, "training": {**TRAINING, "gpu_hours": None}},
            "unpriced": {**DRAFTER, "training": unpriced},
        },
        **SMALL,
    )
    assert "names no hours of a GPU" in drafter(run, "cpu")["reason"]
    assert drafter(run, "unpriced")["training_cost"] is None
    assert "neither the training plan nor this plan names a price" in drafter(run, "unpriced")["reason"]


def test_the_plan_s_price_stands_in(simulated_run: Runs, tmp_path: Path) -> None:
    unpriced = {key: value for key, value in TRAINING.items() if key != "gpu_hour_price"}
    run = simulated_run(arms={"draft": {**DRAFTER, "training": unpriced}}, **SMALL)
    priced = edited(run, tmp_path, plan={"price": {"gpu_hour": 2.0, "currency": "EUR"}})
    row = drafter(priced, "draft")
    assert (row["training_cost"], row["currency"]) == (1.0, "EUR")


def test_room_in_a_server_s_cache_is_the_fewest_tokens_it_said(run: Run, tmp_path: Path) -> None:
    copy = edited(run, tmp_path)
    for number, cell in enumerate(copy.cells):
        cell["server"] = {"kv_cache_tokens": 1000 - number if cell["arm"] == "draft" else 5000}
    row = drafter(copy, "draft")
    last = max(number for number, cell in enumerate(copy.cells) if cell["arm"] == "draft")
    assert (row["kv_cache_tokens"], row["baseline_kv_cache_tokens"]) == (1000 - last, 5000)


def test_a_run_without_drafters_has_no_rows(simulated_run: Runs, rng: np.random.Generator) -> None:
    run = simulated_run(arms={}, **SMALL)
    table = cost.drafter_table(run)
    assert table.is_empty()
    found = speedups(run, rng)
    assert cost.payback_table(run, found).is_empty()
    summary = acceptance.acceptance_table(run.labelled("steps"), by=("arm", "sampling"), rng=rng)
    frame = cost.drafter_frame(summary, found, table, cost.payback_table(run, found))
    assert set(frame["method"]) == {cost.PUBLISHED}


# Payback


def table_of(value: float, low: float | None, high: float | None, *, arm: str = "draft") -> pl.DataFrame:
    """A speedup of an arm whose baseline wrote 3600 tokens in an hour: one token a second."""
    return pl.DataFrame(
        {
            "arm": [arm],
            "sampling": ["greedy"],
            "concurrency": [1],
            "metric": ["throughput_speedup"],
            "value": [value],
            "low": [low],
            "high": [high],
            "level": [0.95],
            "n": [40],
            "n_clusters": [20],
            "method": ["bca" if low is not None else "none"],
            "reason": [None if low is not None else "fewer than 5 prompts"],
            "baseline_wall_s": [3600.0],
            "baseline_num_output_tokens": [3600],
        },
        schema_overrides={"low": pl.Float64(), "high": pl.Float64(), "reason": pl.String()},
    )


H200 = {"gpu": {"name": "NVIDIA H200"}}


def payback(run: Run, speedup: pl.DataFrame) -> dict[str, Any]:
    return cost.payback_table(run, speedup).row(0, named=True)


def test_payback_is_training_over_what_a_token_saves(run: Run, tmp_path: Path) -> None:
    on_gpu = edited(run, tmp_path, engine={**run.manifest["engine"], **H200})
    row = payback(on_gpu, table_of(2.0, 1.5, 4.0))
    # Half an hour of training is 1800 tokens of the baseline; at twice the speed a token saves half of one.
    assert row["value"] == pytest.approx(3600)
    assert row["low"] == pytest.approx(1800 / (1 - 1 / 4))
    assert row["high"] == pytest.approx(1800 / (1 - 1 / 1.5))
    assert (row["metric"], row["n"], row["reason"]) == ("payback_tokens", 40, None)


def test_prices_join_two_kinds_of_hardware(run: Run, tmp_path: Path) -> None:
    cheap = edited(run, tmp_path, plan={"price": {"gpu_hour": 0.35, "currency": "USD"}})
    # Training hours cost ten times as much as serving hours.
    assert payback(cheap, table_of(2.0, 1.5, 4.0))["value"] == pytest.approx(36_000)


@pytest.mark.parametrize(
    ("speedup", "reason"),
    [
        (table_of(1.1, 0.9, 1.3), "the speedup's interval includes 1 at this load"),
        (table_of(1.0, 1.0, 1.0), "the speedup's interval includes 1 at this load"),
        (
            table_of(0.7, 0.6, 0.8),
            "the drafter is slower than the target alone at this load: it never pays back",
        ),
        (table_of(2.0, None, None), "the speedup has no interval: fewer than 5 prompts"),
        (table_of(2.0, 1.5, 4.0, arm="stranger"), "the drafter's record states no training"),
        (
            table_of(2.0, 1.5, 4.0),
            "trained on NVIDIA H200, measured on unknown hardware: needs the price of both",
        ),
    ],
)
def test_no_payback_says_why(run: Run, speedup: pl.DataFrame, reason: str) -> None:
    row = payback(run, speedup)
    assert (row["value"], row["low"], row["reason"]) == (None, None, reason)


def test_a_drafter_that_was_not_trained_has_paid_at_once(run: Run) -> None:
    row = payback(run, table_of(1.1, 0.9, 1.3, arm="lookup"))
    assert (row["value"], row["method"]) == (0, cost.FACT)


# One frame


def test_the_frame_holds_every_drafter_with_the_same_numbers(run: Run, rng: np.random.Generator) -> None:
    summary = acceptance.acceptance_table(run.labelled("steps"), by=("arm", "sampling"), rng=rng)
    found = speedups(run, rng)
    table = cost.drafter_table(run)
    frame = cost.drafter_frame(summary, found, table, cost.payback_table(run, found))
    published = frame.filter(pl.col("method") == cost.PUBLISHED)
    assert set(published["arm"]) == {"released pair, GSM8K", "released pair, MT-Bench"}
    frame = frame.filter(pl.col("method") != cost.PUBLISHED)
    assert frame["arm"].unique(maintain_order=True).to_list() == ["draft", "stranger", "lookup"]
    rows = {(row["arm"], row["metric"]): row for row in frame.iter_rows(named=True)}
    assert len(rows) == frame.height == 3 * 8
    length = summary.filter(pl.col("arm") == "draft", pl.col("metric") == "mean_acceptance_length")
    assert rows["draft", "mean_acceptance_length"]["value"] == length["value"][0]
    at_4 = found.filter(
        pl.col("arm") == "draft", pl.col("metric") == "throughput_speedup", pl.col("concurrency") == 4
    )
    assert rows["draft", "speedup at concurrency 4"]["value"] == at_4["value"][0]
    assert rows["draft", "weight_bytes"]["value"] == 38_000_000
    assert rows["draft", "weight_bytes"]["method"] == cost.FACT
    assert rows["stranger", "weight_bytes"]["value"] is None
    assert rows["stranger", "weight_bytes"]["reason"] == "the run's record does not say"
    assert "needs the price of both" in rows["draft", "payback_tokens at concurrency 1"]["reason"]


# Published


def test_published_figures_are_those_of_the_authors_table() -> None:
    table = cost.released_pair()
    assert table.height == 6
    first = table.row(0, named=True)
    assert first["published_speedup"] == pytest.approx(236.1 / 68.9)
    assert first["published_acceptance_length"] == 5.46
    assert "no repeats and no intervals" in cost.RELEASED_CONDITIONS


# Paired yields


def test_a_paired_yield_is_the_difference_of_pooled_yields(run: Run, rng: np.random.Generator) -> None:
    steps = run.labelled("steps")
    found = cost.paired_yield(steps, arm="draft", reference="lookup", by=("entropy_tier",), rng=rng)
    for row in found.iter_rows(named=True):
        own = steps.filter(pl.col("entropy_tier") == row["entropy_tier"])
        yields = [
            acceptance.tokens_per_target_step(own.filter(pl.col("arm") == arm)) or 0
            for arm in ("draft", "lookup")
        ]
        assert row["value"] == pytest.approx(yields[0] - yields[1])
        assert row["n"] == own.filter(pl.col("arm").is_in(["draft", "lookup"])).height
        assert row["low"] > 0


def test_prompts_of_one_side_alone_are_left_out(run: Run, rng: np.random.Generator) -> None:
    steps = run.labelled("steps")
    lame = steps.filter(~((pl.col("arm") == "draft") & (pl.col("entropy_tier") == "low")))
    found = cost.paired_yield(lame, arm="draft", reference="lookup", by=(), rng=rng)
    high = cost.paired_yield(
        steps.filter(pl.col("entropy_tier") == "high"), arm="draft", reference="lookup", by=(), rng=rng
    )
    assert found["value"][0] == pytest.approx(high["value"][0])
    assert cost.paired_yield(steps, arm="draft", reference="nobody", by=(), rng=rng).is_empty()
