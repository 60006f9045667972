"""Equivalence: every outcome is reached on data made for it, and the field cases come out right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_runs import ServerCell, ServerRequest, scrape, server_plan, vllm_acceptance, write_server_run

from specnb import equivalence, schema
from specnb.equivalence import (
    Outcome,
    classify_margin,
    compare_answers,
    corruption_table,
    degenerate_logprobs,
    draft_activity,
    explain_mismatch,
    greedy_pairs,
    greedy_table,
    holm,
    inactive_classes,
    is_corrupted,
    judge_equivalence,
    known_drafts,
    not_comparable,
    quality_table,
    repeated_4gram_share,
    sampled_tests,
    sensitivity_table,
    setting_differences,
    split_table,
)
from specnb.records import Run, read_run
from specnb.stats import fisher_p_value

Runs = Callable[..., Run]


def judge(run: Run, **options: Any) -> Outcome:
    return judge_equivalence(run, arm="draft", rng=np.random.default_rng(0), **options)


def with_tables(run: Run, **frames: pl.DataFrame) -> Run:
    """The opened run with some tables replaced in memory; the directory stays as it is."""
    run._tables.update(frames)
    return run


def without_margins(run: Run) -> Run:
    return with_tables(run, splits=schema.empty(schema.SPLITS), tokens=schema.empty(schema.TOKENS))


def with_flips(run: Run, flips: dict[tuple[str, int, int], int], *, first: int = 0) -> Run:
    """Changes the first token of answers; (arm, concurrency, repeat) -> number of prompts from `first` on."""
    prompts = sorted(set(run.requests["prompt_id"]))
    changed = {
        (arm, concurrency, repeat, prompt)
        for (arm, concurrency, repeat), count in flips.items()
        for prompt in prompts[first : first + count]
    }
    ids, texts = [], []
    for row in run.requests.iter_rows(named=True):
        flip = (row["arm"], row["concurrency"], row["repeat"], row["prompt_id"]) in changed
        ids.append([1, *row["output_token_ids"][1:]] if flip else row["output_token_ids"])
        texts.append(f"other {row['output_text']}" if flip else row["output_text"])
    requests = run.requests.with_columns(pl.Series("output_token_ids", ids), pl.Series("output_text", texts))
    return with_tables(run, requests=requests)


# Comparing two answers


def test_c01_an_exact_tie_is_no_failure_but_counted() -> None:
    found = compare_answers([4, 8, 15, 16, 42], [4, 8, 15, 16, 23], text="a", reference_text="b")
    assert (found.kind, found.index, found.token_id, found.reference_token_id) == ("differs", 4, 42, 23)
    assert classify_margin(-1.203125 - -1.203125, near_tie_nats=0.1) == "tie"


def test_c02_a_small_margin_is_a_near_tie_and_an_unranked_token_is_not() -> None:
    assert classify_margin(0.03, near_tie_nats=0.1) == "near_tie"
    # The top-1/top-2 gap is small, but the arm's token may be of any rank.
    assert classify_margin(0.03, near_tie_nats=0.1, lower_bound=True) == "unknown"
    assert classify_margin(0.3, near_tie_nats=0.1, lower_bound=True) == "clear"
    pairs = pl.DataFrame(
        {
            "split_class": ["near_tie", "clear", "identical"],
            "margin_nats": [0.07, 0.3, None],
            "margin_source": "x",
        }
    )
    assert sensitivity_table(pairs).rows() == [(0.05, 2, 0, 0, 2), (0.1, 1, 1, 0, 2), (0.5, 0, 2, 0, 2)]


def test_c03_a_clear_margin_is_a_suspected_bug(simulated_run: Runs) -> None:
    assert classify_margin(2.4, near_tie_nats=0.1) == "clear"
    found = judge(simulated_run(dtype="bfloat16", diverge_rate=0.2, diverge_margin=2.4))
    assert found.outcome == "not equivalent"
    assert found.num_clear == 5
    assert found.reasons[0].startswith(
        "5 of 24 distinct prompts part from the baseline where the target is sure"
    )
    assert "largest margin 2.40 nats, threshold 0.5" in found.reasons[0]
    assert "suspect a bug" in found.reasons[0]


@pytest.mark.parametrize(
    ("margin", "fp64", "expected"),
    [
        (0.0, None, "tie"),
        (0.0, 5e-5, "tie"),
        (0.0, 0.02, "near_tie"),
        (0.0, 0.5, "clear"),
        (-0.05, None, "near_tie"),
        (-2.0, None, "clear"),
        (None, None, "unknown"),
        (None, 0.01, "near_tie"),
    ],
)
def test_both_precisions_must_be_small(margin: float | None, fp64: float | None, expected: str) -> None:
    assert classify_margin(margin, fp64, near_tie_nats=0.1) == expected


def test_c08_a_missing_stop_token_and_other_ids_of_one_text_are_named() -> None:
    stop = ("stop", "stop")
    eos = compare_answers([11, 12, 13], [11, 12, 13, 2], text="x", reference_text="x", finish_reasons=stop)
    assert (eos.kind, eos.index, eos.token_id, eos.reference_token_id) == ("eos_only", 3, None, 2)
    other = compare_answers([78], [7, 8], text="x", reference_text="x", finish_reasons=stop)
    assert other.kind == "same_text_different_ids"
    cut = compare_answers([11], [11, 12], text="x", reference_text="xy", finish_reasons=stop)
    assert cut.kind == "differs"
    assert compare_answers(None, [1], text="x", reference_text="x").kind == "identical"
    assert compare_answers(None, [1], text="x", reference_text="y").kind == "differs"


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_the_first_difference_is_the_first(left: list[int], right: list[int]) -> None:
    found = compare_answers(left, right, text=str(left), reference_text=str(right))
    if found.kind == "identical":
        assert left == right
    else:
        assert found.index is not None
        assert left[: found.index] == right[: found.index]
        assert left[found.index : found.index + 1] != right[found.index : found.index + 1]


# Outcomes


def test_equal_answers_are_equivalent(simulated_run: Runs) -> None:
    found = judge(simulated_run(sampling=["greedy", "sampled"]))
    assert (found.outcome, found.num_prompts, found.num_mismatched) == ("equivalent", 24, 0)
    assert found.match is not None
    assert (found.match.value, found.match.n) == (1.0, 24)
    # Wilson with no mismatch: n / (n + z^2).
    assert found.match.low == pytest.approx(24 / (24 + 1.959964**2), abs=1e-6)


@pytest.mark.parametrize(("dtype", "margin"), [("bfloat16", 0.03), ("float32", 5e-4), ("float32", 0.0)])
def test_near_ties_are_equivalent_up_to_numerics(simulated_run: Runs, dtype: str, margin: float) -> None:
    found = judge(simulated_run(dtype=dtype, diverge_rate=0.2, diverge_margin=margin))
    assert (found.outcome, found.num_mismatched, found.num_clear) == ("equivalent up to numerics", 5, 0)


def test_near_ties_beyond_the_control_are_told_and_do_not_decide(simulated_run: Runs) -> None:
    found = judge(simulated_run(dtype="bfloat16", diverge_rate=0.5, diverge_margin=0.03))
    assert found.outcome == "equivalent up to numerics"
    mismatched = found.num_mismatched
    p = fisher_p_value(mismatched, 24, 0, 24)
    assert p < 0.01
    assert (
        f"excess mismatch at concurrency 1: {mismatched} of 24 prompts against 0 of 24 in the control "
        f"(Fisher p {p:.2g}), which rounding in batched verification can cause"
    ) in found.reasons[0]


@pytest.mark.parametrize("name", ["clear", "unknown"])
def test_an_excess_with_a_split_that_is_no_near_tie_is_a_doubt(name: str) -> None:
    def pairs(classes: list[str]) -> pl.DataFrame:
        rows = [("greedy", 1, f"p{i}", 0, found) for i, found in enumerate(classes)]
        columns = ["sampling", "concurrency", "prompt_id", "repeat", "split_class"]
        return pl.DataFrame(rows, schema=columns, orient="row")

    control = pairs(["identical"] * 20)
    text = (
        "excess mismatch at concurrency 1: 10 of 20 prompts against 0 of 20 in the control (Fisher p 0.0004"
    )
    told, doubts = equivalence._excess(pairs(["near_tie"] * 10 + ["identical"] * 10), control, 0.01)
    assert (told[0][: len(text)], doubts) == (text, [])
    told, doubts = equivalence._excess(pairs([name] + ["near_tie"] * 9 + ["identical"] * 10), control, 0.01)
    assert (told, doubts[0][: len(text)]) == ([], text)
    # Fewer differences than in the control are no excess.
    assert equivalence._excess(control, pairs(["clear"] * 20), 0.01) == ([], [])


def test_prompts_without_a_draft_are_no_evidence(simulated_run: Runs) -> None:
    run = simulated_run()
    prompts = sorted(set(run.requests["prompt_id"]))
    request_ids = run.requests.filter(pl.col("prompt_id").is_in(prompts[:2]))["request_id"].implode()
    drafted = pl.col("request_id").is_in(request_ids)
    steps = run.steps.with_columns(
        num_draft_tokens=pl.when(drafted).then("num_draft_tokens").otherwise(0),
        num_accepted_tokens=pl.when(drafted).then("num_accepted_tokens").otherwise(0),
    )
    run = with_tables(run, steps=steps)
    found = judge(run)
    assert (found.outcome, found.num_prompts) == ("inconclusive", 2)
    assert found.reasons == (
        "2 distinct prompts were compared, 20 are needed (drafts in 8 of 96 requests)",
        "22 further prompts had no draft and are not counted",
    )
    # A difference counts whether or not anything was drafted for that prompt.
    flipped = judge(without_margins(with_flips(run, {("draft", 1, 0): 1}, first=5)))
    assert (flipped.num_prompts, flipped.num_mismatched) == (3, 1)


def test_the_threshold_is_that_of_the_precision(simulated_run: Runs) -> None:
    found = judge(simulated_run(dtype="float32", diverge_rate=0.2, diverge_margin=0.03))
    assert (found.outcome, found.near_tie_nats) == ("not equivalent", 1e-3)


def test_margins_come_from_both_arms_tokens_where_nothing_was_judged_again(simulated_run: Runs) -> None:
    run = with_tables(simulated_run(diverge_rate=0.2), splits=schema.empty(schema.SPLITS))
    splits = greedy_pairs(run, arm="draft").filter(~pl.col("identical"))
    assert set(splits["margin_source"]) == {"logprobs"}
    assert splits["margin_nats"].to_numpy() == pytest.approx(2.4)
    assert judge(run).outcome == "not equivalent"


def test_c16_degenerate_logprobs_are_not_used(simulated_run: Runs) -> None:
    run = simulated_run(diverge_rate=0.2)
    tokens = run.table("tokens").with_columns(
        logprob=pl.when(pl.col("arm") == "draft").then(0.0).otherwise("logprob")
    )
    flat = tokens.filter(pl.col("arm") == "draft")
    assert set(degenerate_logprobs(tokens)) == set(flat["request_id"])
    run = with_tables(run, tokens=tokens, splits=schema.empty(schema.SPLITS))
    splits = greedy_pairs(run, arm="draft").filter(~pl.col("identical"))
    # The baseline's own gap is used; above the threshold, the split is clear whatever the arm's rank.
    assert set(splits["margin_source"]) == {"lower bound"}
    assert set(splits["split_class"]) == {"clear"}
    zero = with_tables(run, tokens=tokens.with_columns(logprob=pl.lit(0.0)))
    assert set(greedy_pairs(zero, arm="draft").filter(~pl.col("identical"))["split_class"]) == {"unknown"}
    assert judge(zero).outcome == "inconclusive"
    assert len(degenerate_logprobs(pl.DataFrame({"request_id": ["a"] * 20, "logprob": [0.0] * 20}))) == 1


@pytest.mark.parametrize("overrides", [{"no_drafts": True}, {"no_drafts": True, "diverge_rate": 1.0}])
def test_a19_without_drafts_the_verdict_is_vacuous(simulated_run: Runs, overrides: dict[str, Any]) -> None:
    found = judge(simulated_run(**overrides))
    assert found.outcome == "vacuous"
    assert found.reasons[0].startswith("no draft was verified in any judged request")


def test_a24_drafts_elsewhere_do_not_make_the_judged_requests_speculative(simulated_run: Runs) -> None:
    run = simulated_run(sampling=["greedy", "sampled"], no_drafts=["greedy"])
    assert run.steps["num_draft_tokens"].sum() > 0
    found = judge(run)
    assert found.outcome == "vacuous"
    assert found.reasons[0].startswith("no draft was verified in the greedy requests (greedy)")


def test_a23_arms_that_got_other_prompts_are_not_compared(simulated_run: Runs) -> None:
    found = judge(simulated_run(prompt_token_shift=16))
    assert (found.outcome, found.reasons) == (
        "inconclusive",
        ("prompt token counts differ on 96 of 96 rows",),
    )
    run = simulated_run()
    other = run.requests.with_columns(
        prompt_sha256=pl.when(pl.col("arm") == "draft").then(pl.lit("x")).otherwise("prompt_sha256")
    )
    assert judge(with_tables(run, requests=other)).reasons == ("prompts differ in content on 96 of 96 rows",)
    run = simulated_run()
    fewer = run.requests.filter((pl.col("arm") == "baseline") | (pl.col("prompt_id") != "low-003"))
    assert judge(with_tables(run, requests=fewer)).reasons == (
        "the arms do not share their prompts: 4 of 96 requests have no partner",
    )


def test_an_unfinished_run_is_inconclusive(simulated_run: Runs) -> None:
    found = judge(simulated_run(status="interrupted"))
    assert (found.outcome, found.reasons) == (
        "inconclusive",
        ("the run's status is interrupted, not finished",),
    )


def test_a_warm_cache_on_one_side_is_not_compared(simulated_run: Runs) -> None:
    found = judge(simulated_run(cached_tokens=20))
    assert found.outcome == "inconclusive"
    assert "prefix cache served" in found.reasons[0]


def test_modelled_and_lossy_runs_are_refused(simulated_run: Runs) -> None:
    found = judge(simulated_run(modelled=True))
    assert (found.outcome, found.reasons[0]) == (
        "refused",
        "the run is modelled (dummy weights or synthetic acceptance)",
    )
    lossy = simulated_run(modelled=True, arms={"draft": {"rejection_sample_method": "synthetic"}})
    assert "synthetic acceptance does not keep the target's law" in judge(lossy).reasons[0]


def test_few_prompts_are_inconclusive_and_more_are_not(simulated_run: Runs) -> None:
    few = judge(simulated_run(prompts_per_cell=9))
    assert (few.outcome, few.reasons) == (
        "inconclusive",
        ("18 distinct prompts were compared, 20 are needed",),
    )
    assert judge(simulated_run(prompts_per_cell=10)).outcome == "equivalent"


def test_early_stops_are_not_equivalent(simulated_run: Runs) -> None:
    assert judge(simulated_run(truncate=0.5)).outcome == "not equivalent"


# Controls


def thousand(run: Runs) -> Run:
    return run(prompts_per_cell=60, lengths=["short"], max_tokens=4, concurrency=[1])


def test_c04_mismatch_is_held_against_the_baselines_own(simulated_run: Runs) -> None:
    flips = {("draft", 1, 0): 14, ("draft", 1, 1): 14}
    run = without_margins(with_flips(thousand(simulated_run), flips, first=40))
    run = with_flips(run, {("baseline", 1, 1): 2})
    table = greedy_table(run).filter(pl.col("comparison") == "draft against baseline")
    row = table.row(0, named=True)
    assert (row["num_mismatched"], row["n"], row["control"]) == (14, 120, False)
    assert row["value"] == pytest.approx(106 / 120)
    assert row["p_value"] == pytest.approx(0.0031, abs=5e-5)
    found = judge(run)
    assert found.outcome == "inconclusive"
    assert "14 of 120 distinct prompts differ at a margin that is not known" in found.reasons[0]
    assert any(
        "excess mismatch at concurrency 1: 14 of 120 prompts against 2 of 120 in the control "
        "(Fisher p 0.0031)" in reason
        for reason in found.reasons
    )


def test_c04_variant_an_unstable_baseline_is_inconclusive(simulated_run: Runs) -> None:
    run = without_margins(with_flips(thousand(simulated_run), {("draft", 1, 0): 14, ("draft", 1, 1): 14}))
    run = with_flips(run, {("baseline", 1, 1): 12}, first=60)
    row = greedy_table(run).filter(pl.col("comparison") == "draft against baseline").row(0, named=True)
    assert row["p_value"] == pytest.approx(0.84, abs=5e-3)
    found = judge(run)
    assert found.outcome == "inconclusive"
    assert any("unstable: at concurrency 1 12 of 120 prompts differ" in reason for reason in found.reasons)


def test_c04_prompts_that_are_unstable_in_the_control_are_not_blamed(simulated_run: Runs) -> None:
    run = with_tables(thousand(simulated_run), splits=schema.empty(schema.SPLITS))
    prompts = sorted(set(run.requests["prompt_id"]))
    run = with_flips(run, {("draft", 1, 0): 1, ("baseline", 1, 1): 1})
    repeats = pl.col("cell_id").str.ends_with("r1")

    def unlikely(where: pl.Expr) -> pl.DataFrame:
        # The changed token is one that the target is sure not to want.
        chosen = (pl.col("prompt_id") == prompts[0]) & where
        return run.table("tokens").with_columns(logprob=pl.when(chosen).then(-9.0).otherwise("logprob"))

    tie = with_tables(run, tokens=unlikely((pl.col("arm") == "draft") & ~repeats))
    # The baseline flips at a tie: that does not excuse a clear split.
    assert judge(tie).outcome == "not equivalent"
    clear = with_tables(run, tokens=unlikely((pl.col("arm") == "draft") | repeats))
    assert set(greedy_pairs(clear, arm="baseline").filter(~pl.col("identical"))["split_class"]) == {"clear"}
    found = judge(clear)
    assert (found.outcome, found.num_clear, found.num_clear_excused) == ("inconclusive", 1, 1)
    assert "1 prompts differ where the baseline differs from itself and are not blamed" in found.reasons


def test_c05_concurrency_is_judged_beside_its_own_control(simulated_run: Runs) -> None:
    base = {"prompts_per_cell": 10, "concurrency": [1, 8], "max_tokens": 8}
    run = without_margins(with_flips(simulated_run(**base), {("baseline", 8, 1): 6}))
    run = with_flips(run, {("draft", 8, 0): 6, ("draft", 8, 1): 6}, first=10)
    table = greedy_table(run)
    control = table.filter(pl.col("comparison") == "baseline against itself")
    assert control.select("concurrency", "num_mismatched", "n").rows() == [(1, 0, 20), (8, 6, 20)]
    across = table.filter(pl.col("comparison") == "baseline against itself at the lowest concurrency")
    assert across.select("concurrency", "num_mismatched_pairs").rows() == [(8, 6)]
    found = judge(run)
    assert found.outcome == "equivalent up to numerics"
    assert any(
        reason
        == "at concurrency 8 the baseline differs from itself on 6 of 20 prompts and from the arm on 6 of "
        "20: batching, judged at concurrency 1"
        for reason in found.reasons
    )
    sequential = with_flips(run, {("draft", 1, 0): 3, ("draft", 1, 1): 3})
    assert judge(sequential).outcome == "inconclusive"


def test_c06_one_prompt_asked_often_is_one_prompt(simulated_run: Runs) -> None:
    run = simulated_run(
        tiers=["low"], prompts_per_cell=1, repeats=12, diverge_rate=1.0, concurrency=[1], lengths=["medium"]
    )
    row = greedy_table(run).filter(pl.col("comparison") == "draft against baseline").row(0, named=True)
    assert (row["n"], row["num_mismatched"], row["num_pairs"], row["num_mismatched_pairs"]) == (1, 1, 12, 12)
    found = judge(run)
    assert found.reasons[0].startswith("1 of 1 distinct prompts part from the baseline")


def test_c21_a_precise_rerun_separates_numerics_from_a_bug(simulated_run: Runs) -> None:
    low = simulated_run(dtype="bfloat16", diverge_rate=0.2, diverge_margin=0.03)
    same = simulated_run(dtype="float32")
    different = simulated_run(dtype="float32", diverge_rate=0.2, diverge_margin=2.4)
    assert explain_mismatch(low, same, arm="draft") == "numerics"
    assert explain_mismatch(low, different, arm="draft") == "bug"
    assert explain_mismatch(same, different, arm="draft") == "no mismatch"
    smaller = simulated_run(dtype="float32", prompts_per_cell=2, concurrency=[1])
    assert explain_mismatch(low, smaller, arm="draft") == "inconclusive"


def test_controls_and_classes_are_counted(simulated_run: Runs) -> None:
    run = simulated_run(unstable_rate=0.3, unstable_margin=0.0, unstable_from_concurrency=4)
    table = greedy_table(run)
    by_name = {
        (row["comparison"], row["concurrency"]): row["num_mismatched"] for row in table.iter_rows(named=True)
    }
    assert by_name["baseline against itself", 1] == by_name["draft against itself", 1] == 0
    assert by_name["baseline against itself", 4] > 0
    assert by_name["draft against itself", 4] > 0
    assert table["low"].to_numpy() == pytest.approx(np.clip(table["low"].to_numpy(), 0, 1))
    splits = split_table(run, arm="draft")
    totals = splits.group_by("comparison", "concurrency").agg(
        pl.col("count").sum(), pl.col("num_pairs").first()
    )
    assert totals.filter(pl.col("count") != pl.col("num_pairs")).is_empty()
    assert judge(run).outcome == "equivalent up to numerics"


def test_a_baseline_as_unstable_as_the_arm_is_no_proof_against_the_arm(simulated_run: Runs) -> None:
    found = judge(simulated_run(unstable_rate=0.2, unstable_margin=0.5))
    assert found.outcome == "inconclusive"
    assert found.reasons[0].startswith("the baseline itself is unstable: at concurrency 1 ")
    # The same splits in a baseline that is stable are the arm's fault.
    assert judge(simulated_run(diverge_rate=0.2, diverge_margin=0.5)).outcome == "not equivalent"
    # A baseline whose own splits are all near ties does not excuse clear ones.
    mixed = simulated_run(unstable_rate=0.1, unstable_margin=0.0, diverge_rate=0.2, diverge_margin=0.5)
    assert judge(mixed).outcome == "not equivalent"


def test_unknown_arms_are_named(simulated_run: Runs) -> None:
    with pytest.raises(ValueError, match="arm 'drat' is not in the plan; it has baseline, draft"):
        greedy_pairs(simulated_run(), arm="drat")
    with pytest.raises(ValueError, match="across_concurrency compares an arm with itself"):
        greedy_pairs(simulated_run(), arm="draft", across_concurrency=True)


# Corruption, scores, sampled answers


def test_c10_a_loop_with_collapsed_acceptance_is_corruption() -> None:
    assert is_corrupted(0.92, 0.05, [2.6, 1.05, 1.00])
    assert not is_corrupted(0.92, 0.90, [2.6, 1.05, 1.00])
    assert not is_corrupted(0.92, 0.05, [2.6, 3.5, 4.9])
    assert not is_corrupted(0.05, 0.05, [2.6, 1.05, 1.00])
    assert repeated_4gram_share([1, 2] * 20) == pytest.approx(1 - 2 / 37)
    assert repeated_4gram_share(list(range(40))) == 0.0
    assert repeated_4gram_share([1] * 15) is None


def test_c10_corruption_is_found_at_any_temperature(simulated_run: Runs) -> None:
    options: dict[str, Any] = {"lengths": ["long"], "sampling": ["sampled"]}
    run = simulated_run(corrupt_rate=0.3, **options)
    table = corruption_table(run, arm="draft").filter("corrupted")
    assert table.height > 0
    assert all(windows[0] - windows[-1] >= 0.3 for windows in table["acceptance_windows"])
    found = judge(run)
    assert found.outcome == "not equivalent"
    assert any(reason.startswith("corruption: ") and "request draft." in reason for reason in found.reasons)
    assert corruption_table(simulated_run(**options), arm="draft").filter("corrupted").is_empty()


def test_c15_paired_scores_that_fall_are_not_equivalent(simulated_run: Runs) -> None:
    run = simulated_run(prompts_per_cell=20, concurrency=[1], repeats=1)
    prompts = sorted(set(run.requests["prompt_id"]))
    wrong = {"baseline": set(prompts[:1]), "draft": set(prompts[:12])}
    scores = [
        0.0 if prompt in wrong[arm] else 1.0
        for arm, prompt in run.requests.select("arm", "prompt_id").iter_rows()
    ]
    run = with_tables(run, requests=run.requests.with_columns(grader_score=pl.Series(scores)))
    row = quality_table(run, arm="draft").row(0, named=True)
    assert (row["n"], row["num_baseline_right"], row["num_arm_right"]) == (40, 39, 28)
    assert (row["num_only_baseline_right"], row["num_only_arm_right"]) == (11, 0)
    assert row["p_value"] == pytest.approx(0.00098, abs=5e-6)
    found = judge(run)
    assert found.outcome == "not equivalent"
    assert "discordant 11:0, McNemar p 0.00098" in found.reasons[0]


def test_scores_without_a_discordant_pair_have_no_p_value(simulated_run: Runs) -> None:
    run = simulated_run(concurrency=[1], repeats=1)
    run = with_tables(run, requests=run.requests.with_columns(grader_score=pl.lit(1.0)))
    assert quality_table(run, arm="draft").select("n", "p_value", "p_holm").rows() == [(24, None, None)]
    assert judge(run).outcome == "equivalent"


def test_better_scores_are_no_fault(simulated_run: Runs) -> None:
    assert judge(simulated_run(score=0.8)).outcome == "equivalent"
    worse = judge(simulated_run(score=0.9, score_drop=0.6))
    assert worse.outcome == "not equivalent"
    assert any(reason.startswith("scores fall under greedy") for reason in worse.reasons)


def test_a_wrong_law_of_sampled_tokens_is_found(simulated_run: Runs, rng: np.random.Generator) -> None:
    good = sampled_tests(simulated_run(sampling=["sampled"]), arm="draft", rng=rng)
    assert good.filter(pl.col("p_value") < 0.01).is_empty()
    assert good["test"].to_list() == ["pit_uniform", "pit_uniform_control", "output_length", "mean_logprob"]
    bad = sampled_tests(simulated_run(sampling=["sampled"], wrong_law=0.3), arm="draft", rng=rng)
    p = dict(bad.select("test", "p_holm").iter_rows())
    assert p["pit_uniform"] < 0.01
    assert p["pit_uniform_control"] is None
    found = judge(simulated_run(sampling=["greedy", "sampled"], wrong_law=0.3))
    assert found.outcome == "not equivalent"
    assert "sampled answers under sampled fail the pit_uniform test" in found.reasons[0]


def test_a_baseline_off_its_own_law_makes_the_test_inconclusive(simulated_run: Runs) -> None:
    run = simulated_run(sampling=["sampled"])
    shifted = run.table("tokens").with_columns(
        cdf_low=pl.col("cdf_low") ** 2, cdf_high=pl.col("cdf_high") ** 2
    )
    found = judge(with_tables(run, tokens=shifted))
    assert found.outcome == "inconclusive"
    assert "but so does the baseline" in found.reasons[0]


def test_p_values_of_correlated_tokens_are_not_inflated(rng: np.random.Generator) -> None:
    """Tokens of one prompt that share one u: a pooled test would reject nearly always, this one does not."""
    rejected = 0
    for _ in range(60):
        u = np.repeat(rng.random(16), 50)
        tokens = pl.DataFrame(
            {
                "arm": "draft",
                "sampling": "sampled",
                "prompt_id": np.repeat([f"p{i}" for i in range(16)], 50),
                "cdf_low": u,
                "cdf_high": u,
            }
        )
        found = equivalence._pit_test(tokens, "draft", "sampled", rng, 499)
        rejected += found["p_value"] < 0.05
    # Binomial(60, 0.05) exceeds 9 with a chance below 0.002.
    assert rejected <= 9


def test_pit_histogram_against_a_naive_count(simulated_run: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    values = pl.DataFrame(
        {
            "request_id": [f"r{i}" for i in range(12)],
            "prompt_id": [f"p{i % 6}" for i in range(12)],
            "sampling": ["sampled"] * 12,
            "index": [0] * 12,
            "origin": ["accepted"] * 12,
            "pit": [0.0, 0.1, 0.2, 0.49, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0, 0.3],
        }
    )
    monkeypatch.setattr("specnb.equivalence.pit_values", lambda run, arm, rng: values)
    run = simulated_run()
    found = equivalence.pit_histogram(run, arm="draft", rng=np.random.default_rng(0), num_bins=2)
    assert found["value"].to_list() == [5 / 12, 7 / 12]
    assert found["bin_low"].to_list() == [0.0, 0.5]
    assert found["bin_high"].to_list() == [0.5, 1.0]
    assert found["n"].to_list() == [12, 12]
    assert found["n_clusters"].to_list() == [6, 6]
    residuals = []
    for prompt in range(6):
        mine = values.filter(prompt_id=f"p{prompt}")["pit"].to_list()
        residuals.append(sum(pit < 0.5 for pit in mine) - len(mine) / 2)
    half_width = 2.241402727604947 * sum(r**2 for r in residuals) ** 0.5 / 12
    assert found["high"][0] == pytest.approx(0.5 + half_width)
    assert found["low"][0] == pytest.approx(0.5 - half_width)


def test_pit_band_holds_a_uniform_law_and_not_another(simulated_run: Runs) -> None:
    options: dict[str, Any] = {"sampling": ("sampled",), "prompts_per_cell": 30, "concurrency": (1,)}
    fair = simulated_run(**options)
    rng = np.random.default_rng(1)
    found = equivalence.pit_histogram(fair, arm="draft", rng=rng)
    assert found.filter(~pl.col("value").is_between("low", "high")).height == 0
    broken = simulated_run(**options, wrong_law=0.5)
    found = equivalence.pit_histogram(broken, arm="draft", rng=rng)
    assert found.filter(~pl.col("value").is_between("low", "high")).height > 0


def test_pit_of_a_greedy_run_has_no_rows(simulated_run: Runs) -> None:
    run = simulated_run(prompts_per_cell=6, concurrency=(1,), sampling=("greedy",))
    assert equivalence.pit_histogram(run, arm="draft", rng=np.random.default_rng(0)).is_empty()


def test_tests_without_data_say_why(simulated_run: Runs, rng: np.random.Generator) -> None:
    small = simulated_run(sampling=["sampled"], prompts_per_cell=3, concurrency=[1])
    few = sampled_tests(small, arm="draft", rng=rng)
    assert set(few["reason"]) == {"fewer than 8 prompts"}
    assert few["p_value"].null_count() == 4
    assert sampled_tests(simulated_run(), arm="draft", rng=rng).is_empty()


def test_holm_adjusts_in_order_and_keeps_none() -> None:
    # 0.01 * 3, then 0.02 * 2 = 0.04, then 0.03 * 1 raised to the one before it.
    assert holm([0.03, None, 0.01, 0.02]) == pytest.approx([0.04, None, 0.03, 0.04])
    assert holm([]) == []


# Servers: what they do not tell is unknown


DRAFTED = vllm_acceptance([4, 3, 2, 1])
GREEDY_SENT = {"greedy": {"temperature": 0.0, "top_p": 1.0}}


def served(root: Path, *drafting: ServerCell, sent: dict[str, Any] | None = None) -> Run:
    """A server run: the drafting arm's cells, and the baseline's beside each; `sent`: sampling record."""
    cells = []
    for cell in drafting:
        base = ServerCell(
            arm="baseline",
            concurrency=cell.concurrency,
            requests=[ServerRequest(num_output_tokens=17)] * len(cell.requests),
        )
        cells += [base, cell]
    plan = server_plan(concurrency=sorted({cell.concurrency for cell in drafting}), kind="vllm")
    run = read_run(write_server_run(root, cells, plan))
    if sent is not None:
        run.manifest["arms"] = {arm.name: {"sampling": sent} for arm in run.plan.arms}
    return run


def many(acceptance: dict[str, Any] | None = DRAFTED, count: int = 24) -> list[ServerRequest]:
    return [ServerRequest(num_output_tokens=17, acceptance=acceptance)] * count


def test_texts_are_compared_where_a_server_returns_no_ids_and_it_is_said(tmp_path: Path) -> None:
    run = served(tmp_path, ServerCell(requests=many()), sent=GREEDY_SENT)
    assert set(greedy_pairs(run, arm="draft")["compared"]) == {"text"}
    found = judge(run)
    assert (found.outcome, found.num_prompts) == ("equivalent", 24)
    assert "24 of 24 pairs were compared as text, because the server returned no token ids" in found.reasons
    assert "token ids (different ids of one text are not seen)" in found.not_measured
    assert not any("temperature" in item for item in found.not_measured)
    changed = (pl.col("arm") == "draft") & (pl.col("prompt_id") == "p003")
    text = pl.when(changed).then(pl.lit("else")).otherwise("output_text").alias("output_text")
    found = judge(with_tables(run, requests=run.requests.with_columns(text)))
    assert (found.outcome, found.num_unknown) == ("inconclusive", 1)
    assert found.reasons[0] == (
        "1 of 24 distinct prompts differ at a margin that is not known (only texts were compared: 1 pairs)"
    )


def test_margins_that_the_judge_could_not_ask_for_are_unknown(simulated_run: Runs) -> None:
    run = simulated_run(diverge_rate=0.2)
    unknown = pl.lit(None, dtype=pl.Float64)
    splits = run.table("splits").with_columns(margin_nats=unknown, margin_fp64_nats=unknown)
    found = judge(with_tables(run, splits=splits, tokens=schema.empty(schema.TOKENS)))
    assert (found.outcome, found.num_unknown) == ("inconclusive", 5)
    assert found.reasons[0].startswith("5 of 24 distinct prompts differ at a margin that is not known (")
    assert "no log probabilities were recorded there" in found.reasons[0]


def test_b28_exact_match_needs_temperature_0_in_the_request(tmp_path: Path) -> None:
    cell = ServerCell(requests=many())
    left_out = judge(served(tmp_path / "a", cell, sent={"greedy": {"top_p": 1.0}}))
    assert (left_out.outcome, left_out.num_prompts) == ("refused", 0)
    assert left_out.reasons == (
        "greedy answers of draft were asked for with no temperature under greedy: exact match needs "
        "temperature 0 in every request",
    )
    warm = judge(served(tmp_path / "b", cell, sent={"greedy": {"temperature": 0.7}}))
    assert (warm.outcome, "with temperature 0.7" in warm.reasons[0]) == ("refused", True)
    unrecorded = judge(served(tmp_path / "c", cell))
    assert unrecorded.outcome == "equivalent"
    said = "that temperature 0 was sent (the run has no record of the sampling fields)"
    assert said in unrecorded.not_measured


def test_i8_arms_that_were_sent_other_sampling_are_not_compared(tmp_path: Path) -> None:
    run = served(tmp_path, ServerCell(requests=many()), sent=GREEDY_SENT)
    run.manifest["arms"]["draft"] = {"sampling": {"greedy": {"temperature": 0.0, "top_p": 0.9}}}
    assert not_comparable(run, arm="draft") == (
        "requests of draft were sent top_p 0.9 under greedy, those of the baseline 1.0",
    )


def test_a24_a_probe_that_switched_speculation_off_is_vacuous(tmp_path: Path) -> None:
    idle = scrape(210, 210, generated=0)
    # 10 requests, 640 tokens, and not one draft more than before.
    asked = [ServerRequest(num_output_tokens=64)] * 10
    probe = ServerCell(requests=asked, scrapes=[idle, scrape(210, 210, generated=640)])
    found = judge(served(tmp_path / "probe", probe))
    assert found.outcome == "vacuous"
    assert found.reasons[0].startswith("no draft was verified in any judged request")
    assert found.reasons[1].endswith("may switch speculation off; ask again without them")
    plain = ServerCell(requests=asked, scrapes=[scrape(0, 0, generated=0), scrape(210, 210, generated=640)])
    run = served(tmp_path / "plain", plain)
    own = draft_activity(run).filter(pl.col("arm") == "draft")
    assert own.select("num_drafts", "active").rows() == [(210, True)]
    # Which requests were drafted for is not known, but the class was.
    assert known_drafts(run).filter(pl.col("request_id").str.starts_with("draft"))["num_drafts"].null_count()
    assert judge(run, minimum_prompts=5).outcome == "equivalent"


def test_a24_steps_guessed_from_chunks_prove_no_draft(tmp_path: Path) -> None:
    """A server that does not speculate sends single tokens too; a full draft is read into each."""
    run = served(tmp_path, ServerCell(requests=many(None), facts={"steps_source": "chunks"}))
    keys = ("run_id", "arm", "cell_id", "request_id", "prompt_id")
    counts = {"num_draft_tokens": 3, "num_accepted_tokens": 0, "num_emitted_tokens": 1, "engine_step": None}
    rows = [
        {**row, "step": step, **counts}
        for row in run.requests.filter(pl.col("arm") == "draft").select(keys).iter_rows(named=True)
        for step in range(16)
    ]
    run = with_tables(run, steps=pl.DataFrame(rows, schema=schema.STEPS.polars_schema))
    drafts = known_drafts(run).filter(pl.col("request_id").str.starts_with("draft"))["num_drafts"]
    assert drafts.null_count() == 24
    assert draft_activity(run)["active"].to_list() == [None]
    assert inactive_classes(run).select("arm", "sampling", "active").rows() == [("draft", "greedy", None)]
    found = judge(run)
    assert found.outcome == "inconclusive"
    assert found.reasons[0].startswith("it is not known whether anything was drafted, so equal answers")


def streamed(*chunks: int) -> list[ServerRequest]:
    """24 answers of 17 tokens without figures of their own."""
    return [ServerRequest(num_output_tokens=17, chunks=chunks)] * 24


def beside(root: Path, base: ServerCell, cell: ServerCell) -> Run:
    return read_run(write_server_run(root, [base, cell], server_plan(kind="vllm")))


def test_merged_chunks_are_no_drafts_where_vllm_counts_none(tmp_path: Path) -> None:
    """Both servers plain, both with a stream interval of 4; the arm's hardware may be faster."""
    plain = [scrape(generated=0)] * 2 + [scrape(generated=24 * 17)] * 2
    single = ServerCell(arm="baseline", requests=streamed(*[1] * 17), scrapes=plain)
    merged = streamed(1, 4, 4, 4, 4)
    run = beside(tmp_path / "a", single, ServerCell(requests=merged, scrapes=plain))
    (row,) = draft_activity(run).to_dicts()
    assert (row["active"], row["num_drafts"], row["source"]) == (None, None, None)
    assert row["reason"].startswith("no source tells of drafts (metrics_missing: ")
    found = judge(run)
    assert (found.outcome, "metrics_missing" in found.reasons[0]) == ("inconclusive", True)
    # Nor are the steps read into such chunks.
    guessed = ServerCell(requests=merged, scrapes=plain, facts={"steps_source": "chunks"})
    run = beside(tmp_path / "b", single, guessed)
    keys = ("run_id", "arm", "cell_id", "request_id", "prompt_id")
    counts = {"num_draft_tokens": 3, "num_accepted_tokens": 3, "num_emitted_tokens": 4, "engine_step": None}
    rows = [
        {**row, "step": step, **counts}
        for row in run.requests.filter(pl.col("arm") == "draft").select(keys).iter_rows(named=True)
        for step in range(4)
    ]
    run = with_tables(run, steps=pl.DataFrame(rows, schema=schema.STEPS.polars_schema))
    drafts = known_drafts(run).filter(pl.col("request_id").str.starts_with("draft"))["num_drafts"]
    assert drafts.null_count() == 24
    assert judge(run).outcome == "inconclusive"


def test_merged_chunks_are_no_drafts_where_the_baseline_has_them_too(tmp_path: Path) -> None:
    arm = ServerCell(requests=streamed(1, 4, 4, 4, 4))
    run = beside(tmp_path / "a", ServerCell(arm="baseline", requests=streamed(1, 2, 2, 4, 4, 4)), arm)
    assert draft_activity(run)["active"].to_list() == [None]
    assert judge(run).outcome == "inconclusive"
    run = beside(tmp_path / "b", ServerCell(arm="baseline", requests=streamed(*[1] * 17)), arm)
    assert draft_activity(run).select("active", "source").rows() == [(True, "chunks")]
    assert judge(run).outcome == "equivalent"
    # Chunks of an unknown number of tokens: 16 tokens in 4 chunks after the first.
    unknown = [ServerRequest(num_output_tokens=17, chunks=[None] * 5)] * 24
    run = beside(tmp_path / "c", ServerCell(arm="baseline", requests=unknown), arm)
    assert draft_activity(run)["active"].to_list() == [None]


def test_requests_without_a_draft_are_not_judged(tmp_path: Path) -> None:
    """4 of 24 requests drafted: the others' equal answers say nothing."""
    some = [*many(count=4), *many(None, count=20)]
    told = "4 distinct prompts were compared, 20 are needed (drafts in 4 of 24 requests)"
    # The class is known to have drafted by its counters, where some answers carry no figures.
    scrapes = [scrape(0, 0, generated=0)] * 2 + [scrape(16, 0, generated=24 * 17)] * 2
    found = judge(served(tmp_path / "counted", ServerCell(requests=some, scrapes=scrapes)))
    assert (found.outcome, found.num_prompts, found.reasons[0]) == ("inconclusive", 4, told)
    # Counters alone: no more requests than drafts.
    scrapes = [scrape(0, 0, generated=0)] * 2 + [scrape(7, 0, generated=24 * 17)] * 2
    found = judge(served(tmp_path / "few", ServerCell(requests=many(None), scrapes=scrapes)))
    assert found.outcome == "inconclusive"
    assert found.reasons[0] == (
        "7 distinct prompts were compared, 20 are needed (drafts in at most 7 of 24 requests)"
    )
    # Chunks alone: a request of single tokens shows none.
    some = [*streamed(1, 4, 4, 4, 4)[:4], *streamed(*[1] * 17)[4:]]
    base = ServerCell(arm="baseline", requests=streamed(*[1] * 17))
    found = judge(beside(tmp_path / "chunks", base, ServerCell(requests=some)))
    assert (found.outcome, found.reasons[0]) == ("inconclusive", told)
    enough = [*many(count=20), *many(vllm_acceptance([0, 0, 0, 0]), count=4)]
    found = judge(served(tmp_path / "enough", ServerCell(requests=enough)))
    assert (found.outcome, found.num_prompts) == ("equivalent", 20)
    assert "drafts in 20 of 24 requests" in found.reasons


def test_a_known_cached_share_beside_an_unknown_one_is_not_compared(tmp_path: Path) -> None:
    def cached(run: Run, arm: str) -> Run:
        own = pl.when(pl.col("arm") == arm).then(pl.lit(15, dtype=pl.Int64))
        return with_tables(run, requests=run.requests.with_columns(num_cached_tokens=own))

    run = cached(served(tmp_path / "a", ServerCell(requests=many())), "draft")
    assert not_comparable(run, arm="draft") == (
        "the prefix cache served 75% of prompt tokens in draft as far as usage tells, and nothing tells of "
        "the baseline",
    )
    assert judge(run).outcome == "inconclusive"
    run = cached(served(tmp_path / "b", ServerCell(requests=many())), "baseline")
    assert not_comparable(run, arm="draft")[0].endswith("nothing tells of draft")
    # vLLM leaves the field out of answers without a hit; its counters tell.
    counted = [scrape(0, 0, generated=0, more="vllm:prefix_cache_hits_total 0\n")] * 2
    cells = [ServerCell(arm=arm, requests=many(), scrapes=counted) for arm in ("baseline", "draft")]
    assert not_comparable(cached(beside(tmp_path / "c", *cells), "draft"), arm="draft") == ()


def test_unknown_drafts_are_not_called_vacuous(tmp_path: Path) -> None:
    found = judge(served(tmp_path, ServerCell(requests=many(None))))
    assert found.outcome == "inconclusive"
    assert found.reasons[0].startswith(
        "it is not known whether anything was drafted, so equal answers may be the target's alone: "
    )


def test_b39_a_load_without_drafts_is_left_out_and_named(tmp_path: Path) -> None:
    four = ServerCell(concurrency=4, requests=many())
    scrapes = [scrape(240, 240, generated=0), scrape(240, 240, generated=24 * 17)]
    eight = ServerCell(concurrency=8, requests=many(None), scrapes=scrapes)
    run = served(tmp_path, four, eight)
    assert inactive_classes(run).is_empty(), "the class drafted at another load"
    found = judge(run)
    assert (found.outcome, found.num_prompts) == ("equivalent", 24)
    assert "no draft was verified at concurrency 8 (greedy), which is left out" in found.reasons


def settled(run: Run, **settings: dict[str, Any]) -> Run:
    """The run with what each arm's server settled on, added in memory."""
    run.cells = tuple({**cell, "server": {"settings": settings[cell["arm"]]}} for cell in run.cells)
    return run


def test_b36_what_servers_settled_on_is_compared(simulated_run: Runs) -> None:
    """The size of the cache follows from the drafter, and a baseline does not log what is on."""
    run = settled(
        simulated_run(),
        baseline={"attention_backend": "FLASH_ATTN", "kv_cache_tokens": 100_000, "cudagraph_mode": "FULL"},
        draft={"attention_backend": "FLASH_ATTN", "kv_cache_tokens": 70_000, "cudagraph_mode": "NONE"},
    )
    assert [str(found) for found in setting_differences(run, arm="draft")] == [
        "cudagraph_mode NONE, baseline FULL"
    ]
    run = settled(run, baseline={"seed": 0}, draft={"seed": 0, "async_scheduling": False})
    (found,) = setting_differences(run, arm="draft")
    assert (str(found), found.follows) == ("async_scheduling off, baseline on", True)
    run = settled(run, baseline={"seed": 0}, draft={"seed": 1, "max_seq_len": 4096})
    (found,) = setting_differences(run, arm="draft")
    assert (str(found), found.follows) == ("seed 1, baseline 0", False)
    assert not_comparable(run, arm="draft") == (
        "the servers differ in more than speculation: seed 1, baseline 0",
    )


def test_an_arm_without_an_answer_is_inconclusive_not_vacuous(tmp_path: Path) -> None:
    dead = [ServerRequest(num_output_tokens=None, status="error")] * 4
    found = judge(served(tmp_path, ServerCell(requests=dead)))
    assert (found.outcome, found.reasons) == ("inconclusive", ("no request of draft was answered",))


def test_with_a_nonce_repeats_are_other_prompts_and_no_control(simulated_run: Runs) -> None:
    run = simulated_run(diverge_rate=0.2)
    workload = run.plan.workload.model_copy(update={"nonce": True})
    run.__dict__["plan"] = run.plan.model_copy(update={"workload": workload})
    assert greedy_pairs(run, arm="baseline", reference="baseline").is_empty()
    said = "greedy control of the baseline against itself (workload.nonce gives each repeat other prompts)"
    assert said in judge(run).not_measured
