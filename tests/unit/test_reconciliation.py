"""Four sources of acceptance side by side: which agree, which is believed, and what each fault does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from server_runs import ServerCell, ServerRequest, scrape, server_plan, vllm_acceptance, write_server_run

from specnb import reconciliation
from specnb.config import Plan
from specnb.equivalence import inactive_classes
from specnb.reconciliation import (
    acceptance_sources,
    headline_source,
    prefix_cache_table,
    reconcile,
    request_drafts,
    server_tokens,
    truncation_table,
)
from specnb.records import Run, read_run

Runs = Callable[..., Run]

# Two requests of 15 drafts and 25 accepted in all (A27): 1 + 16 and 1 + 4 x 5 = 21 tokens.
TWO = (
    ServerRequest(
        num_output_tokens=21,
        acceptance=vllm_acceptance([4, 3, 2, 1]),
        chunks=(1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4),
    ),
    ServerRequest(num_output_tokens=21, acceptance=vllm_acceptance([0, 0, 0, 5]), chunks=(1, 4, 4, 4, 4, 4)),
)
IDLE = scrape(100, 250, generated=1000)
DONE = scrape(115, 275, generated=1042)


def run_of(root: Path, *cells: ServerCell, plan: Plan | None = None) -> Run:
    return read_run(write_server_run(root, cells, plan))


def by_source(table: pl.DataFrame) -> dict[str, dict[str, Any]]:
    return {row["source"]: row for row in table.iter_rows(named=True)}


def log_line(length: str, accepted: int, drafted: int) -> str:
    return (
        f"INFO [metrics.py:118] SpecDecoding metrics: Mean acceptance length: {length}, Accepted throughput: "
        f"1.00 tokens/s, Drafted throughput: 1.00 tokens/s, Accepted: {accepted} tokens, Drafted: {drafted} "
        "tokens, Per-position acceptance rate: 0.733, 0.533, 0.400, Avg Draft acceptance rate: 55.6%"
    )


def test_a27_four_sources_that_agree(tmp_path: Path) -> None:
    cell = ServerCell(
        requests=TWO, scrapes=[IDLE, IDLE, DONE, DONE], log=["no figures", log_line("2.67", 25, 45)]
    )
    run = run_of(tmp_path, cell)
    table = reconcile(run)
    rows = by_source(table)
    assert list(rows) == ["response", "counters", "log", "chunks"]
    for source in ("response", "counters", "log"):
        row = rows[source]
        assert (row["num_drafts"], row["num_draft_tokens"], row["num_accepted_tokens"]) == (15, 45, 25)
        assert row["mean_acceptance_length"] == pytest.approx(2.667, abs=5e-4), "not the mean of two, 3.00"
        assert row["usable"]
    assert [rows[source]["agrees"] for source in rows] == [None, True, True, True]
    assert rows["response"]["committed_acceptance_length"] == pytest.approx(40 / 15)
    assert rows["chunks"]["mean_acceptance_length"] == pytest.approx(40 / 15)
    assert [row["source"] for row in table.filter("headline").iter_rows(named=True)] == ["response"]
    source, why = headline_source(run, "draft")
    assert source == "response"
    assert why == "response fields of every answered request: no warm-up and no other traffic in them"
    assert dict(request_drafts(run).select("request_id", "num_drafts").iter_rows()) == {
        "draft.low.c1.greedy.r0.0000": 10,
        "draft.low.c1.greedy.r0.0001": 5,
    }


def test_a27_without_response_fields_the_counters_are_quoted(tmp_path: Path) -> None:
    silent = ServerRequest(num_output_tokens=21)
    cell = ServerCell(requests=[TWO[0], silent], scrapes=[IDLE, IDLE, DONE, DONE])
    run = run_of(tmp_path, cell)
    row = by_source(reconcile(run))["response"]
    assert (row["usable"], row["reason"]) == (False, "only 1 of 2 answers carry figures")
    source, why = headline_source(run, "draft")
    assert source == "counters"
    assert why == ("the server's counters over each cell; response: only 1 of 2 answers carry figures")
    assert request_drafts(run)["num_drafts"].to_list() == [10, None], "unknown, not 0"


def test_a27_histograms_fill_missing_fields_and_must_not_contradict_them(tmp_path: Path) -> None:
    bare = {"source": "vllm", "acceptance_histogram": [4, 3, 2, 1]}
    run = run_of(tmp_path / "a", ServerCell(requests=[ServerRequest(num_output_tokens=21, acceptance=bare)]))
    row = by_source(reconcile(run))["response"]
    assert (row["num_drafts"], row["num_accepted_tokens"], row["num_draft_tokens"]) == (10, 10, None)
    wrong = {**vllm_acceptance([4, 3, 2, 1]), "num_accepted_tokens": 11}
    run = run_of(tmp_path / "b", ServerCell(requests=[ServerRequest(num_output_tokens=21, acceptance=wrong)]))
    row = by_source(reconcile(run))["response"]
    assert (row["usable"], row["mean_acceptance_length"]) == (False, None)
    assert row["reason"] == (
        "request draft.low.c1.greedy.r0.0000: its histogram holds 10 drafts and 10 accepted, "
        "its fields 10 and 11"
    )


def test_a09_requests_are_pooled_by_steps_and_aborted_ones_set_apart(tmp_path: Path) -> None:
    def sglang(completion: int, verify: int) -> dict[str, Any]:
        return {"source": "sglang", "num_drafts": verify, "num_accepted_tokens": completion - verify}

    requests = [
        *(ServerRequest(num_output_tokens=11, acceptance=sglang(10, 10)) for _ in range(3)),
        ServerRequest(num_output_tokens=401, acceptance=sglang(400, 100)),
        ServerRequest(num_output_tokens=None, status="cancelled", acceptance=sglang(0, 0)),
    ]
    run = run_of(tmp_path, ServerCell(requests=requests), plan=server_plan(k=7))
    row = by_source(reconcile(run))["response"]
    assert row["mean_acceptance_length"] == pytest.approx(430 / 130)
    assert (row["num_drafts"], row["num_requests"], row["num_failed"]) == (130, 4, 1)
    pooled = acceptance_sources(run).row(0, named=True)
    assert pooled["mean_acceptance_length"] == pytest.approx(3.308, abs=5e-4)
    assert (pooled["source"], pooled["num_failed"]) == ("response", 1)


# What the counters suffer


def counters_of(root: Path, *scrapes: str, requests: Sequence[ServerRequest] = TWO) -> dict[str, Any]:
    return by_source(reconcile(run_of(root, ServerCell(requests=requests, scrapes=scrapes))))["counters"]


def test_a05_the_window_is_the_cell(tmp_path: Path) -> None:
    before, after = scrape(1000, 2500), scrape(1200, 2900)
    row = counters_of(tmp_path, before, before, after, after, requests=[ServerRequest()])
    assert (row["mean_acceptance_length"], row["num_drafts"]) == (3.0, 200)


def test_a06_a_restart_makes_the_counters_unusable(tmp_path: Path) -> None:
    row = counters_of(
        tmp_path, scrape(5000, 9000, start=1000), scrape(120, 240, start=1800), requests=[ServerRequest()]
    )
    assert (row["mean_acceptance_length"], row["num_drafts"], row["usable"]) == (None, None, False)
    assert row["reason"].startswith("counter_reset: the server restarted in the window")


def test_a07_two_idle_scrapes_that_fall_are_several_processes(tmp_path: Path) -> None:
    row = counters_of(tmp_path, scrape(120, 0), scrape(80, 0), scrape(120, 0), scrape(120, 0))
    assert row["reason"].startswith("per_process_metrics")
    assert row["mean_acceptance_length"] is None


def test_an_idle_rise_counts_unless_the_tokens_agree(tmp_path: Path) -> None:
    """Figures of the last step may come late; if the tokens agree, nothing else was counted."""
    early = scrape(115, 275, generated=1040)
    row = counters_of(tmp_path / "a", IDLE, IDLE, early, DONE)
    assert row["usable"]
    assert "not_idle: vllm:generation_tokens rose by 2" in row["reason"]
    untold = [ServerRequest(num_output_tokens=None, acceptance=TWO[0].acceptance)]
    plan = server_plan(max_tokens=10)
    run = run_of(tmp_path / "b", ServerCell(requests=untold, scrapes=[IDLE, IDLE, early, DONE]), plan=plan)
    assert not by_source(reconcile(run))["counters"]["usable"]


def test_foreign_traffic_is_found_by_its_tokens(tmp_path: Path) -> None:
    busy = scrape(130, 290, generated=1142)
    run = run_of(tmp_path, ServerCell(requests=TWO, scrapes=[IDLE, IDLE, busy, busy]))
    row = by_source(reconcile(run))["counters"]
    assert (row["usable"], row["agrees"]) == (False, False)
    assert row["reason"].startswith("num_drafts 30, 15 (response); foreign_traffic: the server generated 142")
    found = server_tokens(run).row(0, named=True)
    assert (found["num_server_tokens"], found["num_client_tokens"], found["agrees"]) == (142, 42, False)
    assert headline_source(run, "draft").source == "response"


def test_foreign_prompts_and_requests_are_found(tmp_path: Path) -> None:
    """A client that asks for a token a request makes few tokens and much work."""

    def found(name: str, prompts: int, requests: int, **known: Any) -> dict[str, Any]:
        counted = (
            'vllm:prompt_tokens_total{{engine="0"}} {}\n'
            'vllm:request_success_total{{engine="0",finished_reason="stop"}} {}\n'
        )
        before = scrape(100, 250, generated=1000, more=counted.format(500, 9))
        after = scrape(115, 275, generated=1042, more=counted.format(500 + prompts, 9 + requests))
        cell = ServerCell(requests=TWO, scrapes=[before, before, after, after])
        run = run_of(tmp_path / name, cell)
        run._tables["requests"] = run.requests.with_columns(
            **{column: pl.lit(value, dtype=pl.Int64) for column, value in known.items()}
        )
        return server_tokens(run).row(0, named=True)

    row = found("same", 40, 2)
    assert (row["agrees"], row["reason"]) == (True, None)
    assert (row["num_server_prompt_tokens"], row["num_client_prompt_tokens"]) == (40, 40)
    assert (row["num_server_requests"], row["num_client_requests"]) == (2, 2)
    assert found("template", 72, 2)["agrees"], "16 tokens a request"
    row = found("prompts", 73, 2)
    assert (row["agrees"], row["reason"]) == (
        False,
        "foreign_traffic: the server read 73 prompt tokens, the requests hold 40",
    )
    row = found("requests", 42, 3)
    assert (row["agrees"], row["reason"]) == (
        False,
        "foreign_traffic: the server finished 3 requests, 2 were sent",
    )
    row = found("unknown", 90_000, 2, num_prompt_tokens=None)
    assert (row["agrees"], row["num_client_prompt_tokens"]) == (True, None)
    assert found("uncounted", 10, 1)["agrees"], "cached prompts and rejected requests may be left out"


def test_cached_tokens_of_usage_stand_in_for_absent_counters(tmp_path: Path) -> None:
    def table(name: str, kind: str, cached: list[int | None]) -> pl.DataFrame:
        plan = server_plan(kind=kind, args={"enable_prefix_caching": True} if name == "wanted" else None)
        run = run_of(tmp_path / (name + kind), ServerCell(requests=TWO), plan=plan)
        run._tables["requests"] = run.requests.with_columns(
            num_cached_tokens=pl.Series(cached, dtype=pl.Int64)
        )
        return prefix_cache_table(run)

    assert table("silent", "openai", [None, None]).is_empty()
    row = table("warm", "openai", [15, 15]).row(0, named=True)
    assert (row["prefix_cache_hit_rate"], row["contaminated"]) == (0.75, True)
    # vLLM names no cached tokens in answers without any: 3 of 40 tokens.
    row = table("rare", "openai", [3, None]).row(0, named=True)
    assert (row["prefix_cache_hit_rate"], row["contaminated"]) == (0.075, False)
    assert table("wanted", "vllm", [15, 15])["contaminated"].to_list() == [False]


def test_tokens_of_failed_requests_are_a_margin_and_lost_ones_a_fault(tmp_path: Path) -> None:
    failed = ServerRequest(num_output_tokens=None, status="error")
    plan = server_plan(max_tokens=100)
    cell = ServerCell(requests=[*TWO, failed], scrapes=[IDLE, IDLE, scrape(130, 290, generated=1142)] * 2)
    cell = ServerCell(requests=cell.requests, scrapes=[IDLE, IDLE, cell.scrapes[2], cell.scrapes[2]])
    found = server_tokens(run_of(tmp_path / "a", cell, plan=plan)).row(0, named=True)
    assert (found["num_uncertain_tokens"], found["agrees"]) == (100, True)
    less = scrape(110, 260, generated=1020)
    run = run_of(tmp_path / "b", ServerCell(requests=TWO, scrapes=[IDLE, IDLE, less, less]), plan=plan)
    found = server_tokens(run).row(0, named=True)
    assert (found["agrees"], found["reason"]) == (
        False,
        "lost_tokens: the server generated 20 tokens, the requests hold 42: "
        "another server or process was asked",
    )


def test_several_engines_and_models(tmp_path: Path) -> None:
    def both(scale: int, model: str = "m") -> str:
        return "".join(
            f'vllm:spec_decode_num_{name}_total{{engine="{engine}",model_name="{model}"}} {scale * value}\n'
            for engine, values in enumerate(((40, 80, 50), (60, 120, 63)))
            for name, value in zip(("drafts", "draft_tokens", "accepted_tokens"), values, strict=True)
        )

    plan = server_plan(k=2)
    cell = ServerCell(scrapes=[both(0), both(1)])
    row = by_source(reconcile(run_of(tmp_path / "a", cell, plan=plan)))["counters"]
    assert row["mean_acceptance_length"] == pytest.approx(2.13)
    assert row["reason"] == "2 engines, lengths 0: 2.25, 1: 2.05"
    cell = ServerCell(scrapes=[both(0) + both(0, "lora"), both(1) + both(7, "lora")])
    row = by_source(reconcile(run_of(tmp_path / "b", cell, plan=plan)))["counters"]
    assert row["num_drafts"] == 100, "the plan's model, not both"


def test_a20_c_a_speculating_server_without_the_family_is_missing_its_metrics(tmp_path: Path) -> None:
    row = counters_of(tmp_path, scrape(generated=0), scrape(generated=42))
    assert (row["usable"], row["num_drafts"]) == (False, None)
    assert row["reason"].startswith("metrics_missing: ")


def test_a28_an_empty_body_leaves_the_other_sources(tmp_path: Path) -> None:
    cell = ServerCell(requests=TWO, scrapes=["", ""])
    run = run_of(tmp_path, cell)
    assert by_source(reconcile(run))["counters"]["reason"].startswith("engine metrics absent: looked for ")
    assert headline_source(run, "draft").source == "response"


def test_a_server_that_says_nothing_has_its_chunks_or_no_source(tmp_path: Path) -> None:
    plain = [ServerRequest(num_output_tokens=21, chunks=request.chunks) for request in TWO]
    source, why = headline_source(run_of(tmp_path / "a", ServerCell(requests=plain)), "draft")
    assert source == "chunks"
    assert why.startswith("an estimate from the tokens a chunk; response: no response carried acceptance")
    run = run_of(tmp_path / "b", ServerCell(requests=[ServerRequest(chunks=(1, None))]))
    source, why = headline_source(run, "draft")
    assert source is None
    assert "chunks: the tokens a chunk are not known" in why
    (row,) = inactive_classes(run).iter_rows(named=True)
    assert row["active"] is None, "unknown is not inactive"
    with pytest.raises(ValueError, match="arm 'baseline' does not speculate"):
        headline_source(run, "baseline")


def test_merged_chunks_and_a_log_of_other_times_do_not_pass_for_evidence(tmp_path: Path) -> None:
    merged = ServerRequest(num_output_tokens=21, acceptance=TWO[0].acceptance, chunks=(1, 10, 10))
    cell = ServerCell(requests=[merged], log=[log_line("2.67", 25, 45), log_line("2.67", 25, 45)])
    rows = by_source(reconcile(run_of(tmp_path, cell)))
    assert (rows["chunks"]["usable"], rows["chunks"]["agrees"]) == (False, False)
    assert "a chunk of 10 tokens is more than one step of at most 4" in rows["chunks"]["reason"]
    assert rows["log"]["agrees"] is None
    assert rows["log"]["reason"].startswith("its intervals cover 300% of the cell's drafts")


# Truncation


def test_a13_a_stop_token_inside_an_accepted_prefix(tmp_path: Path) -> None:
    """K = 5: step 1 accepts 2, step 2 accepts 5 but its third token is the stop: 7 tokens in all."""
    short = ServerRequest(num_output_tokens=7, acceptance=vllm_acceptance([0, 0, 1, 0, 0, 1]))
    # The control: 500 steps of 2 accepted, the last of 5, cut in the same way.
    long = ServerRequest(num_output_tokens=1 + 499 * 3 + 3, acceptance=vllm_acceptance([0, 0, 499, 0, 0, 1]))
    plan = server_plan(k=5)
    run = run_of(tmp_path / "short", ServerCell(requests=[short]), plan=plan)
    found = truncation_table(run).row(0, named=True)
    assert (found["verifier_acceptance_length"], found["committed_high"]) == (4.5, 3.0)
    assert (found["differs"], found["holds"], found["min_truncated_tokens"]) == (True, True, 3)
    assert found["reason"] == "the verifier's 4.50 counts tokens past a stop or limit: 3.00 were committed"
    row = by_source(reconcile(run))["response"]
    assert (row["mean_acceptance_length"], row["committed_acceptance_length"]) == (4.5, 3.0)
    assert row["reason"] == "verifier 4.50, committed 3.00: tokens past a stop or limit count"
    run = run_of(tmp_path / "long", ServerCell(requests=[long]), plan=plan)
    found = truncation_table(run).row(0, named=True)
    assert (found["differs"], found["reason"]) == (False, None)
    assert found["verifier_acceptance_length"] == pytest.approx(3.006)
    assert found["committed_high"] == pytest.approx(3.0)


def test_steps_without_a_draft_only_bound_the_committed_length(tmp_path: Path) -> None:
    """10 drafts and 10 accepted give 21 tokens; 25 need at least 4 steps without a draft, 7 with 3 cut."""
    request = ServerRequest(num_output_tokens=25, acceptance=vllm_acceptance([4, 3, 2, 1]))
    found = truncation_table(run_of(tmp_path, ServerCell(requests=[request]))).row(0, named=True)
    assert (found["min_steps_without_draft"], found["min_truncated_tokens"]) == (4, 0)
    assert (found["committed_high"], found["committed_low"]) == (2.0, pytest.approx((24 - 7) / 10))


def test_a_request_that_lost_more_than_a_block_breaks_the_identity(tmp_path: Path) -> None:
    request = ServerRequest(num_output_tokens=17, acceptance=vllm_acceptance([4, 3, 2, 1]))
    found = truncation_table(run_of(tmp_path, ServerCell(requests=[request]))).row(0, named=True)
    assert not found["holds"]
    assert found["reason"] == (
        "request draft.low.c1.greedy.r0.0000: 17 output tokens, 1 + 10 drafts + 10 accepted need "
        "4 truncated tokens, more than K = 3"
    )


# Classes of requests, and sweeps


def test_a15_short_drafts_are_flagged_in_the_counters(tmp_path: Path) -> None:
    drafted = {"drafts": 4, "draft_tokens": 8, "accepted_tokens": 7}
    text = "".join(f"vllm:spec_decode_num_{name}_total {value}\n" for name, value in drafted.items())
    before = "".join(f"vllm:spec_decode_num_{name}_total 0\n" for name in drafted)
    run = run_of(tmp_path, ServerCell(scrapes=[before, text]), plan=server_plan(k=4))
    row = by_source(reconcile(run))["counters"]
    assert (row["mean_acceptance_length"], row["usable"]) == (2.75, True)
    assert row["reason"] == "ragged: draft tokens / drafts = 2, not 4"


def test_a19_no_drafts_is_a_true_zero_and_no_length(tmp_path: Path) -> None:
    cell = ServerCell(scrapes=[scrape(0, 0, generated=0), scrape(0, 0, generated=10)])
    row = by_source(reconcile(run_of(tmp_path, cell)))["counters"]
    assert (row["num_drafts"], row["mean_acceptance_length"]) == (0, None)
    assert row["reason"] == "speculation_inactive: 0 drafts while 10 tokens were generated"


def test_a24_a_class_of_requests_that_never_speculated_is_vacuous(tmp_path: Path) -> None:
    ten = [ServerRequest(num_output_tokens=64)] * 10
    probe = ServerCell(
        sampling="probe", requests=ten, scrapes=[scrape(0, 0, generated=0), scrape(0, 0, generated=640)]
    )
    plain = ServerCell(
        sampling="plain", requests=ten, scrapes=[scrape(0, 0, generated=0), scrape(210, 420, generated=640)]
    )
    run = run_of(tmp_path, probe, plain)
    (row,) = inactive_classes(run).iter_rows(named=True)
    assert (row["arm"], row["sampling"], row["active"]) == ("draft", "probe", False)
    assert row["reason"] == (
        "speculation_inactive: 0 drafts in 10 requests; what they ask for (logprobs, penalties, min_p) "
        "may switch speculation off: ask without"
    )
    table = acceptance_sources(run).filter(pl.col("source") == "counters")
    assert dict(table.select("sampling", "num_drafts").iter_rows()) == {"probe": 0, "plain": 210}
    assert dict(table.select("sampling", "mean_acceptance_length").iter_rows()) == {
        "probe": None,
        "plain": 3.0,
    }


def test_b39_a_sweep_does_not_average_inactive_cells(tmp_path: Path) -> None:
    four = ServerCell(
        concurrency=4,
        requests=[ServerRequest(num_output_tokens=650)],
        scrapes=[scrape(0, 0, k=2, generated=0), scrape(250, 400, k=2, generated=650)],
    )
    eight = ServerCell(
        concurrency=8,
        requests=[ServerRequest(num_output_tokens=1600)],
        scrapes=[scrape(250, 400, k=2, generated=650), scrape(250, 400, k=2, generated=2250)],
    )
    run = run_of(tmp_path, four, eight, plan=server_plan(k=2, concurrency=(4, 8)))
    rows = reconcile(run).filter(pl.col("source") == "counters").sort("concurrency")
    assert rows["mean_acceptance_length"].to_list() == [2.6, None]
    assert rows["reason"][1] == "speculation_inactive: 0 drafts while 1600 tokens were generated"
    pooled = acceptance_sources(run).filter(pl.col("source") == "counters").row(0, named=True)
    assert (pooled["mean_acceptance_length"], pooled["num_inactive_cells"]) == (2.6, 1)
    assert headline_source(run, "draft").source == "counters"


def test_the_in_process_engine_has_its_steps(simulated_run: Runs) -> None:
    run = simulated_run()
    table = reconcile(run)
    assert set(table["source"]) == {"engine"}
    assert table["usable"].all()
    assert table["headline"].all()
    steps = run.steps.filter((pl.col("arm") == "draft") & (pl.col("num_draft_tokens") > 0))
    pooled = acceptance_sources(run).row(0, named=True)
    assert pooled["mean_acceptance_length"] == pytest.approx(
        1 + steps["num_accepted_tokens"].sum() / steps.height
    )
    assert headline_source(run, "draft") == ("engine", "the in-process engine recorded every step")
    assert request_drafts(run)["num_drafts"].null_count() == 0
    assert inactive_classes(simulated_run(no_drafts=True))["active"].to_list() == [False]
    assert inactive_classes(run).is_empty()


def test_cells_without_an_answer_decide_nothing(tmp_path: Path) -> None:
    dead = ServerCell(repeat=1, requests=[ServerRequest(num_output_tokens=None, status="error")])
    run = run_of(tmp_path, ServerCell(requests=TWO), dead)
    assert headline_source(run, "draft").source == "response"
    row = by_source(reconcile(run).filter(pl.col("repeat") == 1))["response"]
    assert (row["usable"], row["reason"], row["num_failed"]) == (False, "no request was answered", 1)
    run = run_of(tmp_path / "all", ServerCell(requests=dead.requests))
    assert headline_source(run, "draft") == (None, "no request was answered")


def test_counters_above_the_responses_are_no_disagreement_where_requests_failed() -> None:
    row = {
        "source": "counters",
        "mean_acceptance_length": 3.842,
        "num_drafts": 40,
        "num_accepted_tokens": 114,
        "num_draft_tokens": 200,
        "num_failed": 3,
        "usable": True,
    }
    reference = row | {
        "source": "response",
        "mean_acceptance_length": 4.846,
        "num_drafts": 13,
        "num_accepted_tokens": 50,
    }
    assert reconciliation._agreement(row, reference, None) == (None, "failed requests drafted too")
    fewer = row | {"num_drafts": 12, "num_accepted_tokens": 34}
    assert reconciliation._agreement(fewer, reference, None)[0] is False
    assert reconciliation._agreement(row | {"num_failed": 0}, reference, None)[0] is False
