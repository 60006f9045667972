"""Verdicts: each comes out either way on runs built for it, and says so in sentences and strict JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import polars as pl
import pytest
from server_runs import ServerCell, ServerRequest, scrape, server_plan, vllm_acceptance, write_server_run

from specnb.equivalence import greedy_pairs
from specnb.errors import PlanError
from specnb.latency import request_latency
from specnb.records import Run, read_run
from specnb.stats import Estimate
from specnb.verdicts import (
    Claim,
    Policy,
    drafter_verdict,
    entropy_verdict,
    equivalence_verdict,
    final_verdict,
    fit_requests,
    gate_exit_code,
    read_policy,
    speedup_verdict,
    suffix_decay_verdict,
    unfit_cells,
    verdict_json,
    verdict_schema,
)

Runs = Callable[..., Run]

FAST: dict[str, Any] = {"alpha": 0.8, "step_token_s": 0.0001, "score": 0.9}
# A cycle costs more with every position computed: the gain at 1 is gone at 16.
CROSSING: dict[str, Any] = {
    "alpha": 0.7,
    "step_base_s": 0.02,
    "step_token_s": 0.002,
    "concurrency": [1, 4, 16],
    "prompts_per_cell": 16,
}


def one(claims: tuple[Claim, ...]) -> Claim:
    (claim,) = claims
    return claim


def strict(text: str) -> Any:
    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is not JSON")

    return json.loads(text, parse_constant=refuse)


# Suffix decay


@pytest.mark.parametrize(
    ("overrides", "verdict", "said"),
    [
        ({"conditional_rates": (0.9, 0.7, 0.5, 0.3)}, "supported", "later drafts are accepted less often"),
        (
            {"conditional_rates": (0.3, 0.5, 0.7, 0.9)},
            "not supported",
            "among blocks that get that far, later drafts are accepted more often (easy text survives longer",
        ),
        ({"alpha": 0.7, "prompts_per_cell": 6}, "inconclusive", "the data do not show"),
    ],
)
def test_suffix_decay_comes_out_each_way(
    simulated_run: Runs, overrides: dict[str, Any], verdict: str, said: str
) -> None:
    claim = one(suffix_decay_verdict(simulated_run(**overrides)))
    assert claim.verdict == verdict
    assert claim.sentence.startswith(f"draft: {said}")
    assert claim.estimate is not None
    assert (
        f"{claim.estimate.value:+.3f} [{claim.estimate.low:+.3f}, {claim.estimate.high:+.3f}]"
        in claim.sentence
    )
    assert (
        f"{claim.n:,} draft positions that were reached, of {claim.estimate.n_clusters} prompts"
        in claim.sentence
    )
    assert "concurrency 1 and 4" in claim.sentence


def test_a_constant_rate_is_no_decay_although_survival_falls(simulated_run: Runs) -> None:
    run = simulated_run(alpha=0.7, prompts_per_cell=60, prompt_concentration=8.0, lengths=["long"])
    claim = one(suffix_decay_verdict(run))
    assert claim.verdict == "not supported"
    # Prompts differ, and the later positions are reached by the easy ones alone.
    assert "so this is no evidence against decay inside a text" in claim.sentence
    alike = simulated_run(alpha=0.7, prompts_per_cell=6)
    flat = one(suffix_decay_verdict(alike, Policy(negligible_slope=0.9)))
    assert flat.verdict == "not supported"
    assert flat.sentence.startswith("draft: no fall was seen in the pooled blocks: ")


# Entropy


@pytest.mark.parametrize(
    ("overrides", "verdict"),
    [
        ({"entropy_slope": 1.5}, "supported"),
        ({"entropy_slope": -1.5}, "not supported"),
        ({"entropy_slope": 0.0, "prompts_per_cell": 6}, "inconclusive"),
    ],
)
def test_entropy_comes_out_each_way(simulated_run: Runs, overrides: dict[str, Any], verdict: str) -> None:
    claim = one(entropy_verdict(simulated_run(**overrides)))
    assert claim.verdict == verdict
    assert "half of tokens with the lowest entropy (up to" in claim.sentence


def test_entropy_gap_is_the_difference_of_pooled_rates(simulated_run: Runs) -> None:
    run = simulated_run(entropy_slope=1.5)
    claim = one(entropy_verdict(run))
    tokens = run.table("tokens").filter(pl.col("origin").is_in(["accepted", "recovered"]))
    low = pl.col("entropy_nats") <= np.median(tokens["entropy_nats"].to_numpy())
    hit = pl.col("origin") == "accepted"
    gap = tokens.select(hit.filter(low).mean() - hit.filter(~low).mean()).item()
    assert claim.estimate is not None
    assert claim.estimate.value == pytest.approx(gap)
    assert claim.n == tokens.height


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [({"low": 0.9, "high": 0.4}, "supported"), ({"low": 0.4, "high": 0.9}, "not supported")],
)
def test_without_tokens_the_tiers_are_compared(
    simulated_run: Runs, rates: dict[str, float], verdict: str
) -> None:
    run = simulated_run(alpha_by_tier=rates)
    run._tables["tokens"] = run.table("tokens").clear()
    claim = one(entropy_verdict(run))
    assert claim.verdict == verdict
    assert "in the low-entropy tier and " in claim.sentence
    assert (
        "in the high-entropy tier (labels of the prompts: no entropy was recorded), a gap of"
        in claim.sentence
    )


def test_one_tier_without_tokens_says_why(simulated_run: Runs) -> None:
    run = simulated_run(tiers=["low"])
    run._tables["tokens"] = run.table("tokens").clear()
    claim = one(entropy_verdict(run))
    assert (claim.verdict, claim.reasons) == (
        "inconclusive",
        ("entropy was not recorded and the prompts are of one tier",),
    )


# Speedup


def test_speedup_is_supported_not_supported_or_inconclusive(simulated_run: Runs) -> None:
    fast = one(speedup_verdict(simulated_run(**FAST)))
    assert (fast.verdict, fast.max_concurrency) == ("supported", 4)
    assert fast.sentence.startswith("draft: faster at every measured concurrency (1 and 4): at worst ")
    assert "the lower end must reach 1.05); " in fast.sentence
    slow = one(speedup_verdict(simulated_run(**FAST, speed_factor=0.3)))
    assert (slow.verdict, slow.max_concurrency) == ("not supported", None)
    assert slow.estimate is not None
    assert slow.estimate.high is not None
    assert slow.estimate.high < 1.05
    # A true ratio near the threshold can't be told from it with these prompts.
    at_1 = one(speedup_verdict(simulated_run(**FAST, concurrency=[1])))
    value = at_1.estimate.value if at_1.estimate else None
    assert value is not None
    near = one(speedup_verdict(simulated_run(**FAST, concurrency=[1]), Policy(minimum_speedup=value)))
    assert (near.verdict, near.max_concurrency) == ("inconclusive", None)
    assert "the data do not show whether it is faster" in near.sentence


def test_speedup_says_up_to_which_concurrency(simulated_run: Runs) -> None:
    claim = one(speedup_verdict(simulated_run(**CROSSING)))
    assert (claim.verdict, claim.max_concurrency) == ("supported", 4)
    assert "faster up to concurrency 4, not shown at 16" in claim.sentence
    at_16 = one(speedup_verdict(simulated_run(**CROSSING), Policy(target_concurrency=16)))
    assert at_16.verdict == "not supported"
    assert "at concurrency 16" in at_16.sentence
    elsewhere = one(speedup_verdict(simulated_run(**CROSSING), Policy(target_concurrency=8)))
    assert (elsewhere.verdict, elsewhere.reasons) == (
        "inconclusive",
        ("concurrency 8 was not measured (1, 4, 16 were)",),
    )


def test_the_worst_lower_end_of_the_certified_range_is_quoted(simulated_run: Runs) -> None:
    run = simulated_run(**CROSSING)
    claim = one(speedup_verdict(run))
    at = {
        level: one(speedup_verdict(run, Policy(target_concurrency=level, minimum_speedup=9))).estimate
        for level in (1, 4)
    }
    assert claim.estimate is not None
    assert claim.estimate == at[4]
    assert claim.estimate.low < at[1].low
    assert f"at worst {at[4].value:.2f} [{at[4].low:.2f}, " in claim.sentence
    assert "tokens a second at concurrency 4 (greedy, " in claim.sentence
    assert claim.sentence.endswith(
        f"; {at[1].value:.2f} [{at[1].low:.2f}, {at[1].high:.2f}] at concurrency 1 (greedy)."
    )
    assert f"adopt it up to concurrency 4: at worst {at[4].value:.2f} [" in one(final_verdict(run)).sentence


def test_loads_are_named_by_setting_where_they_differ(simulated_run: Runs) -> None:
    short = {"name": "sampled", "temperature": 1.0, "max_tokens": 64, "seed": 0, "concurrency": [1]}
    run = simulated_run(**FAST, sampling=["greedy", short])
    where = (
        "where it was measured up to concurrency 4 (greedy at concurrency 1 and 4; sampled at concurrency 1)"
    )
    assert one(speedup_verdict(run)).sentence.startswith(f"draft: faster {where}: at worst ")
    final = one(final_verdict(run))
    assert (final.verdict, "every measured" in final.sentence) == ("adopt", False)
    assert f"adopt it {where}: " in final.sentence
    alone = one(speedup_verdict(simulated_run(**FAST, concurrency=[1])))
    assert alone.sentence.startswith("draft: faster at concurrency 1, the only one measured: ")


def test_few_prompts_never_support_a_speedup(simulated_run: Runs) -> None:
    claim = one(speedup_verdict(simulated_run(**FAST, prompts_per_cell=4)))
    assert (claim.verdict, claim.max_concurrency) == ("inconclusive", None)
    assert claim.reasons[0] == "8 distinct prompts, 20 are needed"


def test_b26_tokens_a_second_are_compared_and_lengths_flagged(simulated_run: Runs) -> None:
    run = simulated_run(tiers=["low"], prompts_per_cell=1, concurrency=[1], repeats=1)
    arm = pl.col("arm") == "draft"
    run._tables["requests"] = run.requests.with_columns(
        sent_s=pl.lit(0.0),
        scheduled_s=pl.lit(0.0),
        first_token_s=pl.lit(0.001),
        last_token_s=pl.when(arm).then(4.0).otherwise(10.0),
        num_output_tokens=pl.when(arm).then(500).otherwise(1000).cast(pl.Int64),
    )
    # Records that agree: all tokens but the first come from the first step.
    first, total = pl.int_range(pl.len()).over("request_id") == 0, run.requests["num_output_tokens"]
    totals = dict(zip(run.requests["request_id"], total, strict=True))
    run._tables["steps"] = run.steps.with_columns(
        num_emitted_tokens=pl.when(first)
        .then(pl.col("request_id").replace_strict(totals, return_dtype=pl.Int64) - 1)
        .otherwise(0)
    )
    run._tables["chunks"] = run.table("chunks").clear()
    claim = one(speedup_verdict(run))
    assert claim.estimate is not None
    assert claim.estimate.value == pytest.approx(1.25)
    assert any("the arm wrote 0.50 times the baseline's tokens" in reason for reason in claim.reasons)


# Final verdict


@pytest.mark.parametrize(
    ("overrides", "verdict", "because"),
    [
        (FAST, "adopt", "at every measured concurrency"),
        (CROSSING, "adopt up to concurrency 4", "up to concurrency 4"),
        ({**FAST, "speed_factor": 0.3}, "do not adopt", "not faster by the margin asked for"),
        (
            {**FAST, "diverge_rate": 0.2},
            "do not adopt",
            "its answers are not equivalent: 5 of 24 distinct prompts",
        ),
        ({**FAST, "error_rate": 0.2}, "do not adopt", "requests failed"),
        ({**FAST, "score_drop": 0.8}, "do not adopt", "scores fall"),
        ({**FAST, "repeats": 1}, "canary first", "run-to-run variation is unknown (single run)"),
        ({**FAST, "no_drafts": True}, "inconclusive", "speculation_inactive"),
        ({**FAST, "modelled": True}, "inconclusive", "because it is modelled: dummy weights or synthetic"),
        ({**FAST, "status": "interrupted"}, "inconclusive", "the run's status is interrupted"),
        ({**FAST, "prompt_token_shift": 16}, "inconclusive", "prompt token counts differ on 96 of 96 rows"),
        ({**FAST, "prompts_per_cell": 4}, "inconclusive", "8 distinct prompts took part, 20 are needed"),
        ({**FAST, "prompts_per_cell": 4, "diverge_rate": 0.5}, "do not adopt", "not equivalent: "),
        (
            {**FAST, "error_rate": 0.3, "baseline_error_rate": 0.3},
            "inconclusive",
            "the baseline fails as well",
        ),
        ({**FAST, "error_rate": 1.0}, "do not adopt", "96 of 96 requests failed"),
        (
            {**FAST, "sampling": ["greedy", "sampled"], "no_drafts": ["greedy"]},
            "inconclusive",
            "no draft was verified in the greedy requests",
        ),
    ],
)
def test_the_final_verdict_comes_out_each_way(
    simulated_run: Runs, overrides: dict[str, Any], verdict: str, because: str
) -> None:
    claim = one(final_verdict(simulated_run(**overrides)))
    assert claim.verdict == verdict
    assert because in claim.sentence
    assert claim.sentence.startswith("draft: ")
    assert (claim.max_concurrency is not None) == (verdict.startswith("adopt") or verdict == "canary first")


def test_an_unproven_equivalence_is_a_canary(simulated_run: Runs) -> None:
    run = simulated_run(**FAST, diverge_rate=0.2)
    run._tables["splits"] = run.table("splits").clear()
    run._tables["tokens"] = run.table("tokens").clear()
    claim = one(final_verdict(run))
    assert claim.verdict == "canary first"
    assert (
        "equivalence is inconclusive: 5 of 24 distinct prompts differ at a margin that is not known"
        in claim.sentence
    )


def test_a_setting_measured_once_is_a_canary(simulated_run: Runs) -> None:
    once = {"name": "sampled", "temperature": 1.0, "max_tokens": 64, "seed": 0, "repeats": 1}
    run = simulated_run(**FAST, sampling=["greedy", once])
    claim = one(final_verdict(run))
    assert (claim.verdict, run.plan.repeats) == ("canary first", 2)
    assert "run-to-run variation is unknown (single run)" in claim.sentence
    assert verdict_json(run)["conditions"]["run_to_run_interval"] == "n/a: single run"


def test_clear_splits_are_told_even_where_the_baseline_has_its_own(simulated_run: Runs) -> None:
    run = simulated_run(**FAST, unstable_rate=0.2, unstable_margin=0.5)
    claim = one(equivalence_verdict(run))
    assert claim.verdict == "inconclusive"
    clear = greedy_pairs(run, arm="draft").filter(pl.col("split_class") == "clear")["prompt_id"].n_unique()
    assert clear > 0
    assert (
        f"{clear} of them with a margin above 0.001 nats ({clear} of these only where the baseline parts "
        "from itself as well)"
    ) in claim.sentence


def test_a_run_without_greedy_answers_says_what_that_leaves_open(simulated_run: Runs) -> None:
    (arm,) = verdict_json(simulated_run(**FAST, sampling=["sampled"]))["arms"]
    assert "that the arm's logits are the target's (needs greedy answers)" in arm["not_measured"]
    (arm,) = verdict_json(simulated_run(**FAST))["arms"]
    assert not any("logits" in item for item in arm["not_measured"])


def test_the_cached_fraction_is_that_of_requests_where_it_is_known(simulated_run: Runs) -> None:
    run = simulated_run(**FAST)
    first = pl.col("repeat") == 0
    run._tables["requests"] = run.requests.with_columns(
        num_cached_tokens=pl.when(first).then(pl.col("num_prompt_tokens"))
    )
    assert verdict_json(run)["conditions"]["cached_fraction"] == 1.0


def test_a_heavy_tail_is_a_canary(simulated_run: Runs) -> None:
    run = simulated_run(**FAST, prompts_per_cell=40, concurrency=[1])
    assert one(final_verdict(run)).verdict == "adopt"
    tail = (pl.col("arm") == "draft") & pl.col("prompt_id").str.contains("low-00")
    run._tables["requests"] = run.requests.with_columns(
        last_token_s=pl.when(tail).then(pl.col("last_token_s") + 9.0).otherwise("last_token_s"),
    )
    claim = one(final_verdict(run, Policy(minimum_speedup=0.01)))
    assert claim.verdict == "canary first"
    assert "P95 end-to-end latency is" in claim.sentence


def test_the_lower_bound_decides_not_the_estimate(simulated_run: Runs) -> None:
    run = simulated_run(**FAST, concurrency=[1])
    estimate = one(speedup_verdict(run)).estimate
    assert estimate is not None
    assert estimate.low is not None
    assert estimate.value is not None
    between = (estimate.low + estimate.value) / 2
    assert one(final_verdict(run, Policy(minimum_speedup=between))).verdict == "inconclusive"
    assert one(final_verdict(run, Policy(minimum_speedup=estimate.low * 0.8))).verdict == "adopt"


def test_each_arm_is_judged_by_itself(simulated_run: Runs) -> None:
    run = simulated_run(**FAST, arms={"good": {}, "bad": {"speed_factor": 0.3}})
    found = {claim.arm: claim.verdict for claim in final_verdict(run)}
    assert found == {"good": "adopt", "bad": "do not adopt"}
    verdict = verdict_json(run)
    assert gate_exit_code(verdict) == 1
    assert gate_exit_code(verdict, Policy(arm="good")) == 0
    assert gate_exit_code(verdict, Policy(arm="bad")) == 1
    with pytest.raises(PlanError, match=r"policy: arm 'best' is not judged in this run; it has good, bad"):
        gate_exit_code(verdict, Policy(arm="best"))


def test_the_order_of_asking_changes_nothing(simulated_run: Runs) -> None:
    run = simulated_run(**FAST)
    first = one(speedup_verdict(run))
    equivalence_verdict(run)
    assert one(speedup_verdict(run)) == first


# JSON and gate


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (FAST, 0),
        (CROSSING, 0),
        ({**FAST, "speed_factor": 0.3}, 1),
        ({**FAST, "no_drafts": True}, 3),
        ({**FAST, "repeats": 1}, 3),
        ({**FAST, "modelled": True}, 3),
        ({**FAST, "error_rate": 1.0}, 1),
    ],
)
def test_json_follows_its_schema_and_the_gate_follows_the_json(
    simulated_run: Runs, overrides: dict[str, Any], code: int
) -> None:
    verdict = verdict_json(simulated_run(**overrides))
    text = json.dumps(verdict, allow_nan=False)
    jsonschema.Draft202012Validator(verdict_schema()).validate(strict(text))
    assert gate_exit_code(verdict) == code
    assert verdict["simulated"] is True


def test_the_gate_asks_for_the_target_concurrency(simulated_run: Runs) -> None:
    verdict = verdict_json(simulated_run(**CROSSING))
    assert verdict["arms"][0]["max_concurrency"] == 4
    assert gate_exit_code(verdict, Policy(target_concurrency=4)) == 0
    assert gate_exit_code(verdict, Policy(target_concurrency=16)) == 3
    policy = Policy(target_concurrency=16)
    assert gate_exit_code(verdict_json(simulated_run(**CROSSING), policy), policy) == 1


def test_the_schema_refuses_what_is_wrong(simulated_run: Runs) -> None:
    validator = jsonschema.Draft202012Validator(verdict_schema())
    jsonschema.Draft202012Validator.check_schema(verdict_schema())
    good = verdict_json(simulated_run(**FAST))
    for change in (
        {"arms": [{**good["arms"][0], "verdict": "adopt maybe"}]},
        {"arms": [{**good["arms"][0], "max_concurrency": 0}]},
        {"schema_version": 2},
        {"further": 1},
        {"conditions": {**good["conditions"], "failures": {"http_500": 0}}},
        {"conditions": {**good["conditions"], "num_unfit_cells": None}},
        {"arms": [{**good["arms"][0], "conditions": {**good["arms"][0]["conditions"], "settings": [{}]}}]},
    ):
        assert not validator.is_valid({**good, **change})
    assert validator.is_valid(good)


def test_a19_no_drafts_leaves_null_and_a_code_that_is_not_0(simulated_run: Runs) -> None:
    verdict = verdict_json(simulated_run(no_drafts=True))
    (arm,) = verdict["arms"]
    claims = {claim["claim"]: claim for claim in arm["claims"]}
    assert claims["suffix decay"]["estimate"] is None
    assert claims["entropy"]["estimate"] is None
    assert "speculation_inactive" in arm["sentence"]
    assert claims["equivalence"]["verdict"] == "vacuous"
    assert gate_exit_code(verdict) == 3


def test_e15_e16_nan_never_reaches_a_verdict(simulated_run: Runs) -> None:
    with pytest.raises(ValueError, match="value is nan; undefined is None with a reason"):
        Estimate(
            value=float("nan"), low=None, high=None, level=0.95, n=1, n_clusters=1, method="none", reason="x"
        )
    verdict = verdict_json(simulated_run(no_drafts=True, error_rate=1.0))
    assert "NaN" not in json.dumps(verdict, allow_nan=False)
    assert verdict["arms"][0]["verdict"] != "adopt"


def test_e20_conditions_travel_with_the_verdict(simulated_run: Runs) -> None:
    single = verdict_json(simulated_run(**FAST, repeats=1))["conditions"]
    assert (single["repeats"], single["run_to_run_interval"]) == (1, "n/a: single run")
    twice = verdict_json(simulated_run(**FAST))
    assert twice["conditions"]["run_to_run_interval"] == "repeats resampled"
    assert twice["conditions"]["num_prompts"] == 24
    assert twice["conditions"]["num_failed"] == 0
    assert twice["conditions"]["concurrency"] == [1, 4]
    assert twice["conditions"]["acceptance_length_convention"] == "bonus token included"
    assert twice["conditions"]["cached_fraction"] == 0.0
    assert twice["conditions"]["dataset"] == "workload.jsonl"
    assert twice["arms"][0]["conditions"]["num_speculative_tokens"] == 4
    assert "memory" in twice["arms"][0]["not_measured"]
    assert "cost (the plan has no price)" in twice["arms"][0]["not_measured"]


def test_no_path_of_the_machine_is_in_the_json(simulated_run: Runs) -> None:
    run = simulated_run(**FAST)
    assert str(run.path.parent) not in json.dumps(verdict_json(run))


def test_claims_render_as_sentences() -> None:
    claim = Claim(
        arm="draft",
        question="Is it?",
        verdict="supported",
        sentence="draft: it is.",
        estimate=None,
        threshold=None,
        n=3,
        chart="speedup",
        reasons=("because",),
    )
    assert claim._repr_markdown_() == "**supported**: draft: it is.\n\n- because"
    with pytest.raises(ValueError, match=r"question 'Is it' does not end in '\?'"):
        Claim(
            arm="a",
            question="Is it",
            verdict="x",
            sentence="y.",
            estimate=None,
            threshold=None,
            n=0,
            chart="c",
        )


# Servers


def with_facts(run: Run, changes: dict[str, dict[str, Any]]) -> Run:
    """The opened run with facts of cells (key: start of the cell id) added in memory."""
    run.cells = tuple(
        {**cell, **next((facts for start, facts in changes.items() if cell["cell_id"].startswith(start)), {})}
        for cell in run.cells
    )
    return run


LATE = {"client": {"max_in_flight": 1, "loop_lag_p99_s": 0.120, "limited": []}}
KEPT_UP = {"client": {"max_in_flight": 4, "loop_lag_p99_s": 0.001, "limited": []}}


def served(
    root: Path, *, concurrency: tuple[int, ...] = (1,), count: int = 24, **cells: dict[str, Any]
) -> Run:
    """A server run of both arms, the drafting one twice as fast; overrides by `baseline` and `draft`."""
    made = []
    for level in concurrency:
        for arm in ("baseline", "draft"):
            request = ServerRequest(
                num_output_tokens=21,
                duration_s=2.0 if arm == "baseline" else 1.0,
                acceptance=vllm_acceptance([4, 3, 2, 1]) if arm == "draft" else None,
            )
            content = {"requests": [request] * count, **cells.get(arm, {}), **cells.get(f"{arm}_{level}", {})}
            made.append(ServerCell(arm=arm, concurrency=level, **content))
    plan = server_plan(concurrency=concurrency, kind="vllm")
    run = read_run(write_server_run(root, made, plan))
    # One request after the other, some longer than others.
    number = pl.int_range(pl.len()).over("cell_id")
    took = (pl.col("last_token_s") - pl.col("sent_s")) * (1 + 0.02 * (number % 5))
    took += pl.when(pl.col("arm") == "draft").then(0.03 * (number % 3)).otherwise(0)
    start = took.cum_sum().over("cell_id") - took
    run._tables["requests"] = run.requests.with_columns(
        sent_s=start, scheduled_s=start, first_token_s=start + 0.1, last_token_s=start + took
    )
    return run


def cached(*pairs: tuple[int, int]) -> dict[str, Any]:
    text = "vllm:prefix_cache_queries_total {}\nvllm:prefix_cache_hits_total {}\n"
    return {"scrapes": [scrape(more=text.format(*pair)) for pair in pairs]}


COLD, WARM = cached((0, 0), (10240, 0)), cached((10240, 0), (20480, 9216))


def test_b18_no_speedup_between_a_cold_and_a_warm_arm(tmp_path: Path) -> None:
    run = served(tmp_path, baseline=COLD, draft=WARM)
    claim = one(speedup_verdict(run))
    assert (claim.verdict, claim.estimate) == ("inconclusive", None)
    assert claim.sentence == (
        "draft: no answer from this run, because no load is fit for timing: prefix_cache in "
        "draft.low.c1.greedy.r0: 90% of its prompt tokens came from an earlier cell's prefix cache."
    )
    final = one(final_verdict(run))
    assert (final.verdict, "no load is fit for timing" in final.sentence) == ("inconclusive", True)
    assert gate_exit_code(verdict_json(run)) == 3
    assert fit_requests(run)["arm"].unique().to_list() == ["baseline"]


def test_b18_a_cell_served_from_an_earlier_ones_cache_is_left_out(tmp_path: Path) -> None:
    cells = {"baseline_1": COLD, "draft_1": COLD, "baseline_2": WARM, "draft_2": WARM}
    run = served(tmp_path, concurrency=(1, 2), **cells)
    assert unfit_cells(run).select("cell_id", "kind").rows() == [
        ("baseline.low.c2.greedy.r0", "prefix_cache"),
        ("draft.low.c2.greedy.r0", "prefix_cache"),
    ]
    claim = one(speedup_verdict(run))
    assert (claim.verdict, claim.max_concurrency) == ("supported", 1)
    assert "faster at concurrency 1, the only one judged: " in claim.sentence
    assert claim.sentence.endswith(
        "; not judged at concurrency 2 (prefix_cache in baseline.low.c2.greedy.r0: 90% of its prompt tokens "
        "came from an earlier cell's prefix cache)."
    )
    assert verdict_json(run)["conditions"]["num_unfit_cells"] == 2


def test_b23_a_load_that_the_client_limited_is_not_judged(simulated_run: Runs) -> None:
    run = with_facts(simulated_run(**FAST), {"baseline.low.c1.": LATE, "draft": KEPT_UP})
    claim = one(speedup_verdict(run))
    assert (claim.verdict, claim.max_concurrency) == ("supported", 4)
    assert (
        "not judged at concurrency 1 (client_limited in baseline.low.c1.greedy.r0: loop lag p99 120 ms is "
        "above 10 ms)"
    ) in claim.sentence
    assert [level for _, level, _ in claim.by_load] == [4]
    final = one(final_verdict(run))
    assert (final.verdict, final.max_concurrency) == ("canary first", 4)
    assert "because not judged at concurrency 1 (client_limited" in final.sentence
    # Every tier of a repeat goes with the late one: the mix of prompts stays that of the other repeats.
    once = with_facts(simulated_run(**FAST), {"draft.low.c1.greedy.r0": LATE})
    kept = fit_requests(once).filter(pl.col("arm") == "draft", pl.col("concurrency") == 1)
    assert kept.select("entropy_tier", "repeat").unique(maintain_order=True).rows() == [
        ("low", 1),
        ("high", 1),
    ]
    claim = one(speedup_verdict(once))
    assert "repeat 0 at concurrency 1 (greedy) is left out: unfit for timing" in claim.reasons
    assert "run-to-run variation is unknown" in one(final_verdict(once)).sentence


def test_i4_foreign_traffic_makes_a_cell_unfit(tmp_path: Path) -> None:
    busy = {"scrapes": [scrape(0, 0, generated=0), scrape(240, 240, generated=2 * 24 * 21)]}
    run = served(tmp_path, draft=busy)
    (row,) = unfit_cells(run).to_dicts()
    assert (row["kind"], row["reason"]) == (
        "foreign_traffic",
        "the server generated 1008 tokens, the requests hold 504",
    )
    assert (
        "because the records contradict themselves: I4 server and client tokens: draft.low.c1.greedy.r0: the "
        "server generated 1008 tokens, the requests hold 504 (foreign_traffic)."
    ) in one(speedup_verdict(run)).sentence


def failing(kind: str, count: int, run: Run, *, where: pl.Expr) -> Run:
    """The run with the first `count` requests at `where` turned into failures of this kind."""
    chosen = run.requests.filter(where)["request_id"][:count].implode()
    bad = pl.col("request_id").is_in(chosen)
    times = ("first_token_s", "last_token_s", "num_output_tokens", "finish_reason")
    run._tables["requests"] = run.requests.with_columns(
        status=pl.when(bad).then(pl.lit("error")).otherwise("status"),
        error_kind=pl.when(bad).then(pl.lit(kind)).otherwise("error_kind"),
        error=pl.when(bad).then(pl.lit("CUDA out of memory")).otherwise("error"),
        **{name: pl.when(bad).then(None).otherwise(name) for name in times},
    )
    return run


def test_b15_zero_token_answers_are_failures_and_the_gate_fails(tmp_path: Path) -> None:
    run = failing("empty", 2, served(tmp_path, count=4), where=pl.col("arm") == "draft")
    first = pl.col("sent_s") + pl.Series([0.1] * 6 + [0.10, 0.30])
    run._tables["requests"] = run.requests.with_columns(
        first_token_s=pl.when(pl.col("status") == "ok").then(first)
    )
    own = run.requests.filter(pl.col("arm") == "draft")
    assert request_latency(own)["ttft_s"].median() == pytest.approx(0.20)
    claim = one(speedup_verdict(run))
    assert claim.n == 2
    assert claim.sentence.endswith(
        "; 2 of 4 requests of draft failed: their time is in the ratio, their tokens are not."
    )
    assert (
        "dirty: 1 of 1 cells of draft have failures, most in draft.low.c1.greedy.r0 (2 of 4 requests failed "
        "(empty 2))"
    ) in claim.reasons
    final = one(final_verdict(run))
    assert final.verdict == "do not adopt"
    assert (
        "because 2 of 4 requests failed (empty 2): 50.0% [15.0%, 85.0%], at most 1.0% may" in final.sentence
    )
    verdict = verdict_json(run)
    assert gate_exit_code(verdict) == 1
    assert verdict["conditions"]["failures"] == {"empty": 2}


def test_no_headline_from_an_arm_without_an_answer(tmp_path: Path) -> None:
    run = failing("http_500", 24, served(tmp_path), where=pl.col("arm") == "draft")
    claim = one(speedup_verdict(run))
    assert (claim.verdict, claim.estimate) == ("inconclusive", None)
    assert "no request of draft was answered (24 of 24 requests failed (http_500 24))" in claim.sentence
    assert one(final_verdict(run)).verdict == "do not adopt"


def test_d06_a_server_that_never_started_is_no_verdict_on_the_drafter(tmp_path: Path) -> None:
    run = failing("server_start", 24, served(tmp_path), where=pl.col("arm") == "draft")
    claim = one(final_verdict(run))
    assert claim.verdict == "inconclusive"
    assert claim.sentence == (
        "draft: this run can't say, because its server was never there: 24 of 24 requests failed "
        "(server_start 24), first: CUDA out of memory."
    )


def test_a_load_at_which_the_arm_fails_is_not_certified(tmp_path: Path) -> None:
    run = served(tmp_path, concurrency=(1, 2))
    run = failing("disconnected", 24, run, where=(pl.col("arm") == "draft") & (pl.col("concurrency") == 2))
    claim = one(speedup_verdict(run))
    assert (claim.verdict, claim.max_concurrency) == ("supported", 1)
    assert "not shown at 2" in claim.sentence
    assert "24 of 24 requests failed (disconnected 24) at concurrency 2" in claim.reasons
    # Nothing is said to hold "at every measured concurrency".
    assert "every" not in claim.sentence


# Records that contradict themselves


LYING = {"requests": [ServerRequest(num_output_tokens=42, acceptance=vllm_acceptance([4, 3, 2, 1]))] * 24}
DRAFTING = {"scrapes": [scrape(0, 0, generated=0), scrape(240, 240, generated=504)]}
RESTARTED = {"scrapes": [scrape(50, 90, start=1000), scrape(120, 240, start=1800)]}
LESS = {"requests": [ServerRequest(num_output_tokens=15, acceptance=vllm_acceptance([4, 3, 2, 1]))] * 24}


@pytest.mark.parametrize(
    ("cells", "finding"),
    [
        ({"baseline": DRAFTING}, "I7 drafts in the judged requests: baseline.low.c1.greedy.r0: the base"),
        ({"draft": RESTARTED}, "I3 counters never fall: draft.low.c1.greedy.r0: "),
        ({"baseline": RESTARTED}, "I3 counters never fall: baseline.low.c1.greedy.r0: "),
        ({"draft": LYING | DRAFTING}, "I4 server and client tokens: draft.low.c1.greedy.r0: the server gen"),
        ({"draft": LESS}, "output tokens and steps: "),
    ],
)
def test_records_that_contradict_themselves_decide_nothing(
    tmp_path: Path, cells: dict[str, dict[str, Any]], finding: str
) -> None:
    run = served(tmp_path, **cells)
    reason = f"the records contradict themselves: {finding}"
    for claims in (speedup_verdict(run), equivalence_verdict(run), final_verdict(run)):
        claim = one(claims)
        assert claim.verdict == "inconclusive"
        assert any(said.startswith(reason) for said in claim.reasons)
    assert one(final_verdict(run)).sentence.startswith(f"draft: this run can't say, because {reason}")
    verdict = verdict_json(run)
    jsonschema.Draft202012Validator(verdict_schema()).validate(verdict)
    assert gate_exit_code(verdict) == 3


def test_a_fault_of_one_arm_leaves_the_other_its_verdict(simulated_run: Runs) -> None:
    run = simulated_run(**FAST, arms={"good": {}, "bad": {"speed_factor": 0.3}})
    assert {claim.arm: claim.verdict for claim in final_verdict(run)} == {
        "good": "adopt",
        "bad": "do not adopt",
    }
    hit = pl.col("request_id") == run.requests.filter(pl.col("arm") == "bad")["request_id"][0]
    run._tables["requests"] = run.requests.with_columns(
        num_output_tokens=pl.when(hit).then(pl.col("num_output_tokens") + 1).otherwise("num_output_tokens")
    )
    found = {claim.arm: claim for claim in final_verdict(run)}
    assert (found["good"].verdict, found["bad"].verdict) == ("adopt", "inconclusive")
    assert "contradict themselves: output tokens and steps" in found["bad"].sentence


# Failures of the baseline, open loops, prompts and repeats


def test_a_load_at_which_the_baseline_fails_is_not_judged(tmp_path: Path) -> None:
    run = failing("timeout", 3, served(tmp_path), where=pl.col("arm") == "baseline")
    claim = one(speedup_verdict(run))
    assert claim.verdict == "inconclusive"
    assert (
        "not judged (3 of 24 requests failed (timeout 3) in the baseline, at most 1.0% may: the time that "
        "they took is in the ratio)"
    ) in claim.sentence
    assert claim.sentence.endswith(
        "; 3 of 24 requests of baseline failed: their time is in the ratio, their tokens are not."
    )
    assert one(final_verdict(run)).verdict == "inconclusive"


def test_one_failure_of_the_baseline_keeps_from_plain_adoption(simulated_run: Runs) -> None:
    run = simulated_run(**FAST)
    assert one(final_verdict(run)).verdict == "adopt"
    run = failing("timeout", 1, run, where=(pl.col("arm") == "baseline") & (pl.col("concurrency") == 4))
    claim = one(final_verdict(run))
    assert claim.verdict == "canary first"
    assert (
        "because baseline failures: 1 of 96 requests failed (timeout 1); the time that they took is in the "
        "ratio."
    ) in claim.sentence


def test_ratios_on_opposite_sides_of_1_are_not_judged(tmp_path: Path) -> None:
    """The arm is the slower one a token; the baseline lost half a minute between two requests."""
    run = served(tmp_path)
    arm, number = pl.col("arm") == "draft", pl.int_range(pl.len()).over("cell_id")
    took = pl.when(arm).then(1.5).otherwise(1.0) * (1 + 0.02 * (number % pl.when(arm).then(5).otherwise(3)))
    lost = pl.when(arm).then(0.1).otherwise(2.5) * (1 + 0.1 * (number % 4))
    start = (took + lost).cum_sum().over("cell_id") - took - lost
    run._tables["requests"] = run.requests.with_columns(
        sent_s=start, scheduled_s=start, first_token_s=start + 0.1, last_token_s=start + took
    )
    claim = one(speedup_verdict(run))
    assert claim.verdict == "inconclusive"
    assert "not judged (tokens a second are 2." in claim.sentence
    assert "times as short: one of the two is not the servers' pace)" in claim.sentence
    assert one(final_verdict(run)).verdict == "inconclusive"


def test_an_open_loop_has_no_throughput_to_judge(simulated_run: Runs) -> None:
    run = simulated_run(**FAST)
    run.__dict__["plan"] = run.plan.model_copy(
        update={"load": run.plan.load.model_copy(update={"mode": "open"})}
    )
    claim = one(speedup_verdict(run))
    assert (claim.verdict, claim.estimate) == ("inconclusive", None)
    assert claim.sentence == (
        "draft: no answer from this run, because an open loop's throughput is its arrival rate; compare "
        "TTFT, TPOT and end-to-end times (its concurrency, 1 and 4, is a cap)."
    )
    assert one(final_verdict(run)).verdict == "inconclusive"
    assert gate_exit_code(verdict_json(run)) == 3


def test_one_prompt_under_many_ids_is_one_prompt(tmp_path: Path) -> None:
    run = served(tmp_path)
    assert one(speedup_verdict(run)).verdict == "supported"
    run._tables["requests"] = run.requests.with_columns(prompt_sha256=pl.lit("0" * 64))
    claim = one(speedup_verdict(run))
    assert "not judged (1 distinct prompts, 20 are needed)" in claim.sentence
    final = one(final_verdict(run))
    assert final.verdict == "inconclusive"
    assert "1 distinct prompts took part, 20 are needed" in final.sentence


def test_b21_repeats_far_apart_are_named_and_a_canary(simulated_run: Runs) -> None:
    run = simulated_run(**FAST, concurrency=[1])
    slow = (pl.col("arm") == "baseline") & (pl.col("repeat") == 0)
    times = ("scheduled_s", "sent_s", "first_token_s", "last_token_s")
    run._tables["requests"] = run.requests.with_columns(
        pl.when(slow).then(pl.col(name) * 3).otherwise(pl.col(name)).alias(name) for name in times
    )
    claim = one(final_verdict(run))
    assert claim.verdict == "canary first"
    (said,) = [reason for reason in claim.reasons if reason.startswith("repeats differ")]
    assert said.startswith("repeats differ by more than a factor of 2 (greedy, concurrency 1): ")
    assert "in repeat 1, " in said
    assert said.endswith(" in repeat 0")


SYNTHETIC: dict[str, Any] = {"draft": {"rejection_sample_method": "synthetic"}}


def test_a_modelled_run_names_its_speedups_as_modelled_and_decides_nothing(simulated_run: Runs) -> None:
    run = simulated_run(**FAST, modelled=True, arms=SYNTHETIC)
    speedup = one(speedup_verdict(run))
    assert speedup.verdict == "supported"
    assert speedup.sentence.startswith("draft: modelled: faster at every measured concurrency")
    for claims in (suffix_decay_verdict(run), entropy_verdict(run)):
        claim = one(claims)
        assert (claim.verdict, claim.estimate) == ("refused", None)
        assert claim.sentence == (
            "draft: not judged, because its acceptance rates were an input of the run, not a property of the "
            "drafter."
        )
    assert one(equivalence_verdict(run)).verdict == "refused"
    final = one(final_verdict(run))
    assert (final.verdict, final.max_concurrency) == ("inconclusive", None)
    ends = {level: estimate for _, level, estimate in speedup.by_load}
    assert f"is {ends[1].value:.2f} [{ends[1].low:.2f}, {ends[1].high:.2f}] at concurrency 1 and " in (
        final.sentence
    )
    assert "because it is modelled: its acceptance rates were an input of the run" in final.sentence
    verdict = verdict_json(run)
    jsonschema.Draft202012Validator(verdict_schema()).validate(verdict)
    assert gate_exit_code(verdict) == 3
    slow = simulated_run(**FAST, modelled=True, arms=SYNTHETIC, speed_factor=0.3)
    assert one(final_verdict(slow)).verdict == "inconclusive"


def test_b39_a_load_without_speculation_is_flagged_beside_its_speedup(tmp_path: Path) -> None:
    silent = {
        "requests": [ServerRequest(num_output_tokens=21, duration_s=7.0)] * 24,
        "scrapes": [scrape(240, 240, generated=0), scrape(240, 240, generated=504)],
    }
    run = served(tmp_path, concurrency=(4, 8), draft_8=silent)
    claim = one(speedup_verdict(run))
    (off,) = [reason for reason in claim.reasons if reason.startswith("speculation was off")]
    assert off.startswith(
        "speculation was off at concurrency 8 (greedy; speculation_inactive: 0 drafts in 24 answered "
    )
    assert off.endswith("times the baseline, slower than without")
    assert (claim.verdict, claim.max_concurrency) == ("supported", 4)


def test_steps_that_are_not_told_are_not_called_inactive(tmp_path: Path) -> None:
    plain = [ServerRequest(num_output_tokens=21)] * 24
    counted = {"requests": plain, "scrapes": [scrape(0, 0, generated=0), scrape(240, 264, generated=504)]}
    told = one(suffix_decay_verdict(served(tmp_path / "a", draft=counted)))
    assert told.reasons[0].startswith(
        "drafts were verified, but the server does not tell what became of each"
    )
    unknown = one(suffix_decay_verdict(served(tmp_path / "b", draft={"requests": plain})))
    assert unknown.reasons[0].startswith("it is not known whether anything was drafted: ")


def test_unlabelled_prompts_carry_no_entropy(simulated_run: Runs) -> None:
    run = simulated_run()
    run._tables["tokens"] = run.table("tokens").clear()
    run._tables["requests"] = run.requests.with_columns(entropy_tier=pl.lit("unlabelled"))
    claim = one(entropy_verdict(run))
    assert claim.reasons == ("entropy was not recorded and the prompts carry no entropy label",)


def test_b36_what_a_drafter_changes_is_noted_and_the_rest_refused(simulated_run: Runs) -> None:
    def settled(**own: Any) -> Run:
        base = {"dtype": "bfloat16", "model_runner": "V1"}
        cells = {
            "baseline": {"server": {"settings": base, "kv_cache_tokens": 100000}},
            "draft": {"server": {"settings": {**base, **own}, "kv_cache_tokens": 70000}},
        }
        return with_facts(simulated_run(**FAST), cells)

    run = settled(async_scheduling=False)
    claim = one(speedup_verdict(run))
    assert (
        "the servers also differ in async_scheduling off, baseline on (a drafter changes this; engine.args "
        "can match the baseline)"
    ) in claim.reasons
    # D07: 100000 -> 70000 tokens.
    assert "the KV cache holds 70,000 tokens beside the drafter and 100,000 in the baseline (-30.0%)" in (
        claim.reasons
    )
    verdict = verdict_json(run)
    assert verdict["arms"][0]["verdict"] == "adopt"
    assert verdict["arms"][0]["conditions"]["settings"] == [
        {"name": "async_scheduling", "arm": "off", "baseline": "on", "follows": True}
    ]
    jsonschema.Draft202012Validator(verdict_schema()).validate(verdict)
    other = one(final_verdict(settled(dtype="float16")))
    assert other.verdict == "inconclusive"
    assert "the servers differ in more than speculation: dtype float16, baseline bfloat16" in other.sentence


# Policy


def test_a_policy_is_read_as_strictly_as_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("minimum_speedup: 1.3\narm: draft\n")
    assert read_policy(file) == Policy(minimum_speedup=1.3, arm="draft")
    file.write_text("")
    assert read_policy(file) == Policy()
    for text, message in (
        ("minimum_sped: 1.3", "unknown key 'minimum_sped'; did you mean 'minimum_speedup'?"),
        ("minimum_speedup: fast", "minimum_speedup: Input should be a valid number"),
        ("minimum_speedup: .nan", "minimum_speedup: Input should be a finite number"),
        ("max_error_rate: 2", "max_error_rate: Input should be less than or equal to 1, got 2"),
        ("- 1", "a policy is a mapping of keys"),
        ("a: [", "not valid YAML"),
    ):
        file.write_text(text)
        with pytest.raises(PlanError) as caught:
            read_policy(file)
        assert message in str(caught.value)
        assert str(caught.value).startswith(f"{file}: ")
        assert "\n" not in str(caught.value)
    with pytest.raises(PlanError, match="can't read the policy"):
        read_policy(tmp_path / "none.yaml")


# Drafters beside each other

LOOKUP = {"method": "ngram", "alpha": 0.3}


@pytest.mark.parametrize(
    ("draft", "lookup", "verdict", "said"),
    [
        ({"alpha": 0.8}, LOOKUP, "supported", "more tokens a target step than lookup in every tier"),
        ({"alpha": 0.2}, {**LOOKUP, "alpha": 0.8}, "not supported", "fewer tokens a target step than lookup"),
        (
            {"alpha": 0.6},
            {**LOOKUP, "alpha_by_tier": {"low": 0.85, "high": 0.2}},
            "not supported",
            "fewer tokens a target step than lookup (low)",
        ),
        ({"alpha": 0.5}, {**LOOKUP, "alpha": 0.5}, "inconclusive", "the data do not show"),
    ],
    ids=["ahead", "behind", "ahead in one tier alone", "alike"],
)
def test_a_drafter_with_weights_has_to_yield_more_than_one_without(
    simulated_run: Runs, draft: Any, lookup: Any, verdict: str, said: str
) -> None:
    run = simulated_run(arms={"draft": draft, "lookup": lookup}, prompts_per_cell=20, concurrency=(1,))
    claim = one(drafter_verdict(run))
    assert (claim.arm, claim.verdict, claim.chart) == ("draft", verdict, "drafters")
    assert said in claim.sentence
    assert "supported above 0 in every tier" in claim.sentence
    assert [reason.split(":")[0] for reason in claim.reasons] == ["low", "high"]
    assert claim.estimate is not None
    assert claim.estimate.n == claim.n > 100


def test_drafters_that_can_t_be_compared_are_inconclusive_with_a_reason(simulated_run: Runs) -> None:
    small = {"prompts_per_cell": 6, "concurrency": (1,), "max_tokens": 16}
    alone = one(drafter_verdict(simulated_run(**small)))
    assert alone.verdict == "inconclusive"
    assert "no drafter without weights to compare with" in alone.sentence
    lookup = one(drafter_verdict(simulated_run(arms={"lookup": {"method": "ngram"}}, **small)))
    assert (lookup.arm, lookup.verdict) == ("lookup", "inconclusive")
    assert "no drafter with weights to judge" in lookup.sentence
    assert drafter_verdict(simulated_run(arms={}, **small)) == ()


def test_a_modelled_drafter_is_not_compared(simulated_run: Runs) -> None:
    run = simulated_run(
        arms={"draft": {}, "lookup": LOOKUP},
        modelled=True,
        prompts_per_cell=6,
        concurrency=(1,),
        max_tokens=16,
    )
    claim = one(drafter_verdict(run))
    assert claim.verdict != "supported"
    assert claim.estimate is None
