"""Answers of servers as tables: where steps come from, and what a broken server's claims become."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_runs import server_plan

from specnb import schema
from specnb.config import Plan, plan_cells
from specnb.engines.base import CellContext, PlannedRequest
from specnb.engines.responses import Acceptance, Answer
from specnb.engines.tables import SOURCES, CellTables, Step, steps_of_answer
from specnb.equivalence import GUESSED_STEPS
from specnb.records import RunWriter, read_run
from specnb.workloads import Prompt


def answer(counts: list[int | None], *, tokens: int | None = None, **fields: Any) -> Answer:
    """An answer whose chunks hold these tokens; the first is the prefill's."""
    known = [count for count in counts if count is not None]
    acceptance = fields.pop("acceptance", None)
    return Answer(
        **{
            "request_id": "r0",
            "scheduled_s": 0.0,
            "sent_s": 0.0,
            "status": "ok",
            "finish_reason": "stop",
            "first_token_s": 1.0,
            "first_answer_s": 1.0,
            "last_token_s": float(len(counts)),
            "num_output_tokens": sum(known) if tokens is None else tokens,
            "num_first_chunk_tokens": counts[0],
            "chunks": tuple((float(at), count) for at, count in enumerate(counts, start=1)),
            "acceptance": acceptance,
            **fields,
        }
    )


def detailed(*steps: tuple[int, int]) -> Acceptance:
    """vLLM's detailed figures of (drafted, accepted) steps."""
    return Acceptance(
        source="vllm",
        num_drafts=len(steps),
        num_draft_tokens=sum(drafted for drafted, _ in steps),
        num_accepted_tokens=sum(accepted for _, accepted in steps),
        per_step_drafted=tuple(drafted for drafted, _ in steps),
        per_step_accepted=tuple(accepted for _, accepted in steps),
    )


def histogram(*counts: int, drafted: int | None = None) -> Acceptance:
    """vLLM's summary: entry j counts the drafts of which j tokens were accepted."""
    longest = len(counts) - 1
    return Acceptance(
        source="vllm",
        num_drafts=sum(counts),
        num_draft_tokens=longest * sum(counts) if drafted is None else drafted,
        num_accepted_tokens=sum(accepted * count for accepted, count in enumerate(counts)),
        histogram=counts,
    )


def steps(found: Answer, *, k: int = 3, ragged: bool = False) -> tuple[str | None, list[Step]]:
    return steps_of_answer(found, num_speculative_tokens=k, ragged=ragged)


# -- steps, each listed ----------------------------------------------------------------------------


def test_listed_steps_are_laid_over_the_chunks() -> None:
    found = answer([1, 4, 1, 3], acceptance=detailed((3, 3), (3, 0), (3, 2)))
    assert steps(found) == ("response, each step", [(3, 3, 4), (3, 0, 1), (3, 2, 3)])


def test_a15_steps_of_ngram_without_a_draft_stand_where_the_chunks_show_them() -> None:
    """No response tells of them: 1 + [1] + 4 + [1] + [1] + 3 tokens, two drafts."""
    found = answer([1, 1, 4, 1, 1, 3], acceptance=detailed((5, 3), (2, 2)))
    assert steps(found, k=5, ragged=True) == (
        "response, each step",
        [(0, 0, 1), (5, 3, 4), (0, 0, 1), (0, 0, 1), (2, 2, 3)],
    )


def test_a_draft_of_which_nothing_was_accepted_is_the_first_single_token_that_it_can_be() -> None:
    found = answer([1, 1, 1, 2], acceptance=detailed((5, 0), (5, 1)))
    assert steps(found, k=5, ragged=True)[1] == [(5, 0, 1), (0, 0, 1), (5, 1, 2)]


@pytest.mark.parametrize("emitted", [1, 2, 3, 4])
def test_a13_a_stop_cuts_the_last_step_and_not_what_was_accepted(emitted: int) -> None:
    found = answer([1, 2, emitted], acceptance=detailed((3, 1), (3, 3)))
    assert steps(found) == ("response, each step", [(3, 1, 2), (3, 3, emitted)])


def test_merged_chunks_leave_the_order_of_the_response() -> None:
    """7 tokens came in one chunk, which no step of at most 4 gives."""
    found = answer([1, 7, 1], acceptance=detailed((3, 3), (3, 2), (3, 0)))
    assert steps(found) == ("response, each step", [(3, 3, 4), (3, 2, 3), (3, 0, 1)])


def test_merged_chunks_of_ngram_put_steps_without_a_draft_at_the_end() -> None:
    """1 + 9 tokens, 4 + 3 of them from drafts: 2 from steps without one, wherever they stood."""
    found = answer([1, 8, 1], acceptance=detailed((5, 3), (2, 2)))
    assert steps(found, k=5, ragged=True)[1] == [(5, 3, 4), (2, 2, 3), (0, 0, 1), (0, 0, 1)]


@pytest.mark.parametrize(
    "counts", [[2, 3, 3], [None, None, None], [1, None, 3]], ids=["prefill merged", "no counts", "one lacks"]
)
def test_listed_steps_need_no_chunks(counts: list[int | None]) -> None:
    found = answer(counts, tokens=8, acceptance=detailed((3, 3), (3, 1)))
    assert steps(found) == ("response, each step", [(3, 3, 4), (3, 1, 2), (0, 0, 1)])


def test_a_step_that_was_cut_off_whole_emitted_nothing() -> None:
    found = answer([1, 4], acceptance=detailed((3, 3), (3, 2)))
    assert steps(found)[1] == [(3, 3, 4), (3, 2, 0)]


def test_an_answer_of_the_prefill_alone_has_no_steps() -> None:
    assert steps(answer([1], acceptance=detailed())) == ("response, each step", [])
    assert steps(answer([1])) == ("chunks", [])


@pytest.mark.parametrize(
    "broken",
    [
        replace(detailed((3, 3)), per_step_accepted=(3, 1)),
        replace(detailed((3, 3)), per_step_accepted=(4,)),
    ],
    ids=["lengths differ", "more accepted than drafted"],
)
def test_listed_steps_that_can_not_be_true_are_not_believed(broken: Acceptance) -> None:
    assert steps(answer([1, 4], acceptance=broken)) == ("chunks", [(3, 3, 4)])


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30),
    st.integers(0, 5),
    st.booleans(),
)
def test_steps_emit_the_answer_and_keep_every_draft(
    drawn: list[tuple[int, bool]], cut: int, shown: bool
) -> None:
    """Whatever mixture of drafts and steps without one, chunks or not, cut at the end or not."""
    drafts = [(5, accepted) for accepted, has_draft in drawn if has_draft]
    counts = [accepted + 1 if has_draft else 1 for accepted, has_draft in drawn]
    counts[-1] -= min(cut, counts[-1] - 1)
    found = answer([1, *counts], acceptance=detailed(*drafts))
    if not shown:
        found = replace(found, chunks=((1.0, None),), num_first_chunk_tokens=None)
    source, made = steps(found, k=5, ragged=True)
    assert source == "response, each step"
    assert [(drafted, accepted) for drafted, accepted, _ in made if drafted] == drafts
    assert sum(emitted for _, _, emitted in made) == sum(counts)
    assert all(0 <= emitted <= accepted + 1 for _, accepted, emitted in made)
    if shown:
        assert [emitted for _, _, emitted in made] == counts


# -- steps, from a histogram or from chunks --------------------------------------------------------


def test_a_histograms_steps_take_the_order_of_the_chunks() -> None:
    found = answer([1, 1, 4, 2, 4], acceptance=histogram(1, 1, 0, 2))
    assert steps(found) == ("response, histogram", [(3, 0, 1), (3, 3, 4), (3, 1, 2), (3, 3, 4)])


def test_a_histograms_last_step_may_be_cut() -> None:
    found = answer([1, 1, 4, 2], acceptance=histogram(1, 0, 0, 2))
    assert steps(found)[1] == [(3, 0, 1), (3, 3, 4), (3, 3, 2)]


@pytest.mark.parametrize("counts", [[1, 5, 1], [1, 3, 3], [None, None, None]])
def test_a_histogram_without_matching_chunks_is_filled_in(counts: list[int | None]) -> None:
    found = answer(counts, tokens=7, acceptance=histogram(1, 0, 0, 1))
    assert steps(found) == ("response, histogram", [(3, 0, 1), (3, 3, 4), (0, 0, 1)])


def test_a_histogram_of_drafts_of_all_lengths_says_too_little() -> None:
    """Two drafts of 4 tokens in all: which was how long is not known."""
    found = answer([1, 1, 4], acceptance=histogram(1, 0, 0, 1, drafted=4))
    assert steps(found, ragged=True) == (None, [])


def test_chunks_alone_give_the_steps_of_a_drafter_that_always_proposes_k() -> None:
    assert steps(answer([1, 4, 1, 2])) == ("chunks", [(3, 3, 4), (3, 0, 1), (3, 1, 2)])


def test_chunks_alone_do_not_tell_a_draft_of_nothing_from_no_draft() -> None:
    assert steps(answer([1, 4, 1, 2]), ragged=True) == (None, [])


@pytest.mark.parametrize(
    ("counts", "tokens"),
    [([1, 5], 6), ([2, 4], 6), ([1, None], 5), ([1, 4], 9)],
    ids=["more than K + 1", "prefill merged", "a count lacks", "another total"],
)
def test_chunks_that_are_no_steps_are_not_taken_for_them(counts: list[int | None], tokens: int) -> None:
    assert steps(answer(counts, tokens=tokens)) == (None, [])


@pytest.mark.parametrize("source", ["sglang", "llamacpp"])
def test_counts_without_steps_leave_the_chunks(source: str) -> None:
    found = answer([1, 4, 2], acceptance=Acceptance(source=source, num_drafts=2, num_accepted_tokens=4))
    assert steps(found) == ("chunks", [(3, 3, 4), (3, 1, 2)])
    assert steps(found, ragged=True) == (None, [])


# -- tables ----------------------------------------------------------------------------------------


def tables_of(plan: Plan, arm: str, answers: list[Answer], **more: Any) -> tuple[CellTables, dict[str, Any]]:
    cell = next(cell for cell in plan_cells(plan) if cell.arm.name == arm)
    requests = [
        PlannedRequest(
            request_id=found.request_id,
            prompt=Prompt(id=f"p{found.request_id}", tier="low", length="short", text="a"),
            max_tokens=16,
            seed=0,
        )
        for found in answers
    ]
    tables = CellTables(plan, cell, requests, CellContext(run_id="run", clock=lambda: 0.0))
    return tables, tables.frames(answers, **more)


def stored(tmp_path: Path, *answers: Answer, arm: str = "draft", plan: Plan | None = None) -> pl.DataFrame:
    """The requests as they are read back from a run directory: the writer refuses what breaks the schema."""
    plan = plan or server_plan()
    cell = next(cell for cell in plan_cells(plan) if cell.arm.name == arm)
    frames = tables_of(plan, arm, list(answers))[1]
    with RunWriter.create(tmp_path, plan, facts={}) as writer:
        frames = {
            name: frame.with_columns(pl.lit(writer.run_id).alias("run_id")) for name, frame in frames.items()
        }
        writer.write_cell(cell, frames, summary={})
        writer.finalise(status="failed")
        return read_run(writer.path).requests


@pytest.mark.parametrize("count", [161, 2**70])
def test_a_count_far_beyond_the_cap_is_no_count(tmp_path: Path, count: int) -> None:
    found = answer([1, 4, 2], tokens=count)
    row = stored(tmp_path, found).row(0, named=True)
    assert (row["status"], row["num_output_tokens"]) == ("ok", None)
    assert tables_of(server_plan(), "baseline", [found])[1]["steps"].is_empty()


def test_a_count_above_the_cap_is_the_servers_word(tmp_path: Path) -> None:
    assert stored(tmp_path, answer([1, 4, 2], tokens=160))["num_output_tokens"].to_list() == [160]


def test_a_baselines_steps_are_single_tokens() -> None:
    tables, frames = tables_of(server_plan(), "baseline", [answer([2, 2, 1])])
    assert tables.steps_source == "one token a step"
    columns = ("num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")
    assert frames["steps"].select(columns).rows() == [(0, 0, 1)] * 4


def test_the_least_sure_source_of_a_cell_is_its_source() -> None:
    sure = answer([1, 4], request_id="r0", acceptance=detailed((3, 3)))
    guessed = answer([1, 4], request_id="r1")
    unknown = answer([None], tokens=5, request_id="r2")
    assert tables_of(server_plan(), "draft", [sure])[0].steps_source == "response, each step"
    tables, frames = tables_of(server_plan(), "draft", [guessed, unknown, sure])
    assert tables.steps_source == "chunks"
    assert frames["steps"]["request_id"].to_list() == ["r0", "r1"]
    assert tables_of(server_plan(), "draft", [unknown])[0].steps_source is None


def test_steps_guessed_from_chunks_have_the_name_that_the_analysis_knows() -> None:
    assert SOURCES[-1] == GUESSED_STEPS


def test_empty_tables_are_left_out_but_for_the_required_ones() -> None:
    failed = Answer(request_id="r0", scheduled_s=1.0, sent_s=None, status="error", error_kind="connect")
    frames = tables_of(server_plan(), "draft", [replace(failed, error="no connection")])[1]
    assert sorted(frames) == ["requests", "steps"]
    assert frames["steps"].is_empty()
    row = frames["requests"].row(0, named=True)
    assert (row["status"], row["error_kind"], row["num_chunks"]) == ("error", "connect", None)
    assert row["num_output_tokens"] is None


def test_every_table_in_the_order_of_its_events() -> None:
    second = answer([1, 4], request_id="r1", acceptance=histogram(0, 0, 0, 1))
    first = answer([1, None], tokens=3, request_id="r0")
    frames = tables_of(
        server_plan(),
        "draft",
        [second, first],
        scrapes=[(0.5, "a 1"), (0.7, "a 1")],
        log_lines=["one", "two"],
    )[1]
    assert sorted(frames) == ["acceptance", "chunks", "log_lines", "requests", "scrapes", "steps"]
    for name, frame in frames.items():
        assert frame.schema == schema.TABLES[name].polars_schema
    assert frames["requests"]["request_id"].to_list() == ["r0", "r1"]
    assert frames["chunks"].select("request_id", "chunk", "num_tokens").rows() == [
        ("r0", 0, 1),
        ("r0", 1, None),
        ("r1", 0, 1),
        ("r1", 1, 4),
    ]
    assert frames["scrapes"].select("scrape", "scraped_s", "body").rows() == [
        (0, 0.5, "a 1"),
        (1, 0.7, "a 1"),
    ]
    assert frames["log_lines"].select("line", "text").rows() == [(0, "one"), (1, "two")]
    assert frames["acceptance"].select("request_id", "source", "acceptance_histogram").rows() == [
        ("r1", "vllm", [0, 0, 0, 1])
    ]


def test_b06_reasoning_is_kept_apart_from_the_answer() -> None:
    found = answer([1], reasoning_text="so", output_text="yes")
    only = answer([1], request_id="r1", reasoning_text="so", output_text=None)
    frames = tables_of(server_plan(), "draft", [found, only])[1]
    assert frames["requests"]["output_text"].to_list() == ["<think>so</think>yes", "<think>so</think>"]


# -- claims that can't be true ---------------------------------------------------------------------


def test_done_without_a_finish_reason_is_an_answer_with_an_unknown_one(tmp_path: Path) -> None:
    assert stored(tmp_path, answer([1, 4], finish_reason=None))["finish_reason"].to_list() == ["unknown"]


def test_d13_a_lone_surrogate_does_not_end_the_run(tmp_path: Path) -> None:
    """JSON may hold \\ud83d alone; no UTF-8 file can."""
    rows = stored(tmp_path, answer([1], output_text="a\ud83db", reasoning_text="\udc00"))
    assert rows["output_text"].to_list() == ["<think>?</think>a?b"]


def test_more_cached_than_prompt_tokens_are_unknown(tmp_path: Path) -> None:
    rows = stored(tmp_path, answer([1], num_prompt_tokens=8, num_cached_tokens=9))
    assert rows.select("num_prompt_tokens", "num_cached_tokens").rows() == [(8, None)]


def test_ids_of_another_number_than_usage_says_are_not_the_answers(tmp_path: Path) -> None:
    assert stored(tmp_path, answer([1, 4], output_token_ids=[1, 2]))["output_token_ids"].to_list() == [None]


def test_ids_that_are_no_numbers_are_not_kept(tmp_path: Path) -> None:
    wrong: Any = ["a", "b", "c", "d", "e"]
    assert stored(tmp_path, answer([1, 4], output_token_ids=wrong))["output_token_ids"].to_list() == [None]


def test_ids_of_a_cut_answer_are_kept(tmp_path: Path) -> None:
    """Usage never came."""
    cut = answer([1, 1], tokens=0, status="error", error_kind="truncated", error="cut")
    cut = replace(cut, num_output_tokens=None, output_token_ids=[7, 8], finish_reason=None)
    rows = stored(tmp_path, cut)
    assert rows.select("output_token_ids", "num_output_tokens").rows() == [([7, 8], None)]


def test_a_first_chunk_above_the_usage_is_unknown(tmp_path: Path) -> None:
    rows = stored(tmp_path, answer([4], tokens=2))
    assert rows.select("num_first_chunk_tokens", "num_output_tokens").rows() == [(None, 2)]


def test_b15_an_empty_answer_has_no_count_of_tokens(tmp_path: Path) -> None:
    """Usage says 0; 0 is no length of an answer."""
    empty = Answer(
        request_id="r0",
        scheduled_s=0.0,
        sent_s=0.0,
        status="error",
        error_kind="empty",
        error="no token",
        num_output_tokens=0,
    )
    assert stored(tmp_path, empty)["num_output_tokens"].to_list() == [None]


def test_a_k_of_zero_is_none(tmp_path: Path) -> None:
    found = answer([1, 1], acceptance=Acceptance(source="vllm", num_drafts=0, num_speculative_tokens=0))
    assert stored(tmp_path, found).height == 1
