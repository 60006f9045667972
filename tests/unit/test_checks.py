"""Invariants: each has a run directory that breaks it, and `check_run` names it and the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from server_runs import ServerCell, ServerRequest, scrape, server_plan, vllm_acceptance, write_server_run

from specnb import schema
from specnb.checks import check_run, contradictions
from specnb.errors import RecordError
from specnb.provenance import file_sha256
from specnb.records import read_run

Copies = Callable[..., Path]
FIRST = "draft.low.c1.greedy.r0"


def failures(path: Path) -> dict[str, str]:
    return {finding.name: finding.detail for finding in check_run(path) if not finding.ok}


def rewrite(
    path: Path, table: str, change: Callable[[pl.DataFrame], pl.DataFrame], *, cell: str = FIRST
) -> None:
    """Changes one file of a run and makes its digests agree, as a careful forger or a faulty engine would."""
    file = path / "cells" / cell / f"{table}.parquet"
    frame = change(pl.read_parquet(file))
    frame.write_parquet(file)
    reseal(path, cell, table, rows=frame.height)


def reseal(path: Path, cell: str, table: str, *, rows: int) -> None:
    facts = {"rows": rows, "sha256": file_sha256(path / "cells" / cell / f"{table}.parquet")}
    edit_json(path / "cells" / cell / "cell.json", lambda content: content["files"].update({table: facts}))

    def in_manifest(content: dict[str, Any]) -> None:
        entry = next(entry for entry in content["cells"] if entry["cell_id"] == cell)
        entry["files"][table] = facts

    edit_json(path / "manifest.json", in_manifest)


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def at(row: int, value: object, column: str) -> Callable[[pl.DataFrame], pl.DataFrame]:
    """A change of one value of a column."""

    def change(frame: pl.DataFrame) -> pl.DataFrame:
        values = frame[column].to_list()
        values[row] = value
        return frame.with_columns(pl.Series(column, values, dtype=frame.schema[column]))

    return change


def add(amount: int, column: str, *, where: pl.Expr | None = None) -> Callable[[pl.DataFrame], pl.DataFrame]:
    def change(frame: pl.DataFrame) -> pl.DataFrame:
        chosen = pl.lit(True) if where is None else where
        return frame.with_columns(
            pl.when(chosen).then(pl.col(column) + amount).otherwise(column).alias(column)
        )

    return change


def with_scrapes(path: Path, *bodies: str) -> None:
    rows = [
        {
            "run_id": path.name,
            "arm": "draft",
            "cell_id": FIRST,
            "scrape": number,
            "scraped_s": float(number),
            "body": body,
        }
        for number, body in enumerate(bodies)
    ]
    frame = pl.DataFrame(rows, schema=schema.SCRAPES.polars_schema)
    frame.write_parquet(path / "cells" / FIRST / "scrapes.parquet")
    reseal(path, FIRST, "scrapes", rows=frame.height)


def test_a_good_run_passes_every_check(simulated_copy: Copies) -> None:
    findings = check_run(simulated_copy())
    assert [finding for finding in findings if not finding.ok] == []
    names = [finding.name for finding in findings]
    assert names[:4] == ["finished", "cells as planned", "file digests", "modelled flag"]
    assert [name.split()[0] for name in names if name.startswith("I")] == [f"I{n}" for n in range(1, 11)]
    assert len(set(names)) == len(names)
    assert all("\n" not in finding.detail for finding in findings)


# The directory


def test_an_unfinished_run_is_named(simulated_copy: Copies) -> None:
    assert failures(simulated_copy(status="interrupted"))["finished"].startswith("status is interrupted")


def test_an_edited_file_is_named(simulated_copy: Copies) -> None:
    path = simulated_copy()
    file = path / "cells" / FIRST / "steps.parquet"
    add(0, "step")(pl.read_parquet(file)).write_parquet(file, compression="uncompressed")
    assert failures(path) == {
        "file digests": f"{FIRST}/steps.parquet differs from its sha256; it was edited or damaged"
    }


def test_an_edited_cell_summary_and_a_strange_file_are_named(simulated_copy: Copies) -> None:
    path = simulated_copy()
    extra = path / "cells" / FIRST / "telemetry.parquet"
    schema.empty(schema.TELEMETRY).write_parquet(extra)
    assert failures(path)["file digests"] == f"{FIRST}/telemetry.parquet is not listed in cell.json"
    extra.unlink()
    edit_json(path / "cells" / FIRST / "cell.json", lambda content: content["files"].pop("tokens"))
    assert "files differ from those in manifest.json" in failures(path)["file digests"]


def test_a_missing_cell_is_named(simulated_copy: Copies) -> None:
    path = simulated_copy()
    edit_json(path / "manifest.json", lambda content: content["cell_order"].append("draft.low.c9.greedy.r0"))
    assert failures(path) == {
        "cells as planned": "1 of 17 planned cells are missing, first draft.low.c9.greedy.r0"
    }


def test_edited_splits_are_named(simulated_copy: Copies) -> None:
    path = simulated_copy(diverge_rate=0.2)
    file = path / "splits.parquet"
    pl.read_parquet(file).with_columns(margin_nats=pl.lit(0.0)).write_parquet(file)
    assert failures(path)["file digests"].startswith("splits.parquet differs from its sha256")


def test_a_hidden_modelled_run_is_named(simulated_copy: Copies) -> None:
    path = simulated_copy(modelled=True)
    edit_json(path / "manifest.json", lambda content: content.update(modelled=False))
    assert failures(path)["modelled flag"] == "manifest says modelled False, its plan True"


def test_a_plan_that_was_changed_afterwards_is_named(simulated_copy: Copies) -> None:
    path = simulated_copy()
    edit_json(path / "manifest.json", lambda content: content["plan"].update(repeats=9))
    assert "plan_sha256 is not the digest" in failures(path)["modelled flag"]


def test_a_manifest_that_is_no_json_is_an_error(simulated_copy: Copies) -> None:
    path = simulated_copy()
    (path / "manifest.json").write_text('{"status": NaN}', encoding="utf-8")
    with pytest.raises(RecordError, match="not valid JSON"):
        check_run(path)


def test_what_needs_a_broken_table_says_so(simulated_copy: Copies) -> None:
    path = simulated_copy()
    file = path / "cells" / FIRST / "steps.parquet"
    file.write_bytes(b"no parquet")
    reseal(path, FIRST, "steps", rows=0)
    found = failures(path)
    assert "not a readable Parquet file" in found["table steps"]
    assert found["I1 acceptance in range"] == "not checked: steps can't be read"


# I1 to I10


def test_i1_a_draft_longer_than_the_arm_allows(simulated_copy: Copies) -> None:
    path = simulated_copy()
    rewrite(path, "steps", at(0, 9, "num_draft_tokens"))
    detail = failures(path)["I1 acceptance in range"]
    assert f"request {FIRST}.0000 step 0: 9 drafts, arm draft allows 4" in detail


def test_i1_more_accepted_than_drafted(simulated_copy: Copies) -> None:
    path = simulated_copy()
    rewrite(path, "steps", at(0, 5, "num_accepted_tokens"))
    found = failures(path)
    assert "column 'num_accepted_tokens' exceeds num_draft_tokens" in found["table steps"]
    assert found["I1 acceptance in range"] == "not checked: steps can't be read"


def test_i2_positions_that_do_not_add_up(simulated_copy: Copies) -> None:
    path = simulated_copy()

    def flip(frame: pl.DataFrame) -> pl.DataFrame:
        # Of a step with one accepted draft, the second position becomes the accepted one.
        step = frame.filter("accepted").group_by("request_id", "step").len().filter(pl.col("len") == 1).row(0)
        here = (pl.col("request_id") == step[0]) & (pl.col("step") == step[1])
        return frame.with_columns(
            accepted=pl.when(here).then(pl.col("position") == 1).otherwise("accepted"),
        )

    rewrite(path, "positions", flip)
    assert "an accepted position follows a rejected one" in failures(path)["I2 positions add up"]
    rewrite(path, "positions", lambda frame: frame.slice(1))
    assert "3 positions, steps say 4 drafts" in failures(path)["I2 positions add up"]


def test_i2_steps_that_disagree_with_positions(simulated_copy: Copies) -> None:
    path = simulated_copy()
    more = (pl.col("step") == 0) & (pl.col("num_accepted_tokens") == 0)
    rewrite(path, "steps", add(1, "num_accepted_tokens", where=more))
    assert "0 accepted positions, steps say 1" in failures(path)["I2 positions add up"]


def test_i3_a_counter_that_falls(simulated_copy: Copies) -> None:
    path = simulated_copy()
    text = 'vllm:spec_decode_num_drafts_total{{engine="0"}} {}\nvllm:kv_cache_usage_perc {}\n'
    with_scrapes(path, text.format(120, 0.9), text.format(80, 0.1))
    detail = failures(path)["I3 counters never fall"]
    assert (
        f'{FIRST} scrape 1: counter vllm:spec_decode_num_drafts_total{{engine="0"}} falls from 120 to 80'
        in detail
    )
    assert "counter_reset" in detail
    with_scrapes(path, text.format(80, 0.9), text.format(120, 0.1))
    assert failures(path) == {}


def test_i4_tokens_that_no_request_holds(simulated_copy: Copies) -> None:
    path = simulated_copy()
    counted = pl.read_parquet(path / "cells" / FIRST / "requests.parquet")["num_output_tokens"].sum()
    text = 'vllm:generation_tokens_total{{engine="0"}} {}\nvllm:generation_tokens_total{{engine="1"}} {}\n'
    with_scrapes(path, text.format(100, 0), text.format(100 + counted, 0))
    assert failures(path) == {}
    with_scrapes(path, text.format(100, 0), text.format(100 + counted, 50))
    expected = f"{FIRST}: the server generated {counted + 50} tokens, the requests hold {counted}"
    assert failures(path)["I4 server and client tokens"].startswith(expected)


def test_i5_chunk_gaps_that_miss_time(simulated_copy: Copies) -> None:
    path = simulated_copy()
    rewrite(path, "requests", lambda frame: frame.with_columns(pl.col("last_token_s") + 1.0))
    assert "chunk gaps add up to" in failures(path)["I5 chunk gaps add up"]


def test_i6_a_success_without_tokens(simulated_copy: Copies) -> None:
    path = simulated_copy()
    rewrite(path, "requests", at(0, None, "first_token_s"))
    assert "ok without a first token" in failures(path)["I6 success has tokens"]


def test_i6_a_success_without_a_chunk(simulated_copy: Copies) -> None:
    path = simulated_copy()
    rewrite(path, "requests", at(0, 0, "num_chunks"))
    assert "ok with no token (1 of " in failures(path)["I6 success has tokens"]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("finish_reason", None, "column 'finish_reason' is null though status is ok"),
        ("num_output_tokens", 0, "column 'num_output_tokens' is 0 though status is ok"),
        ("error", "late", "column 'error' is set though status is ok"),
    ],
)
def test_i6_a_success_that_contradicts_itself(
    simulated_copy: Copies, column: str, value: object, message: str
) -> None:
    path = simulated_copy()
    rewrite(path, "requests", at(0, value, column))
    assert message in failures(path)["table requests"]


@pytest.mark.parametrize(
    "overrides", [{"no_drafts": True}, {"no_drafts": ["greedy"], "sampling": ["sampled", "greedy"]}]
)
def test_i7_judged_requests_without_drafts(simulated_copy: Copies, overrides: dict[str, Any]) -> None:
    detail = failures(simulated_copy(**overrides))["I7 drafts in the judged requests"]
    assert detail.startswith("speculation_inactive: draft verified no draft in ")
    assert "steps under greedy; verdicts on those requests are vacuous" in detail


def test_i7_a_baseline_that_drafts(simulated_copy: Copies) -> None:
    path = simulated_copy()
    cell = "baseline.low.c1.greedy.r0"
    rewrite(path, "steps", at(0, 1, "num_draft_tokens"), cell=cell)
    assert "the baseline verified 1 drafts" in failures(path)["I7 drafts in the judged requests"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"prompt_token_shift": 16}, "draft: prompt token counts differ on 96 of 96 rows"),
        ({"cached_tokens": 20}, "draft: the prefix cache served"),
    ],
)
def test_i8_arms_that_got_different_requests(
    simulated_copy: Copies, overrides: dict[str, Any], message: str
) -> None:
    assert failures(simulated_copy(**overrides))["I8 arms share conditions"].startswith(message)


def test_i8_arms_that_got_different_prompts(simulated_copy: Copies) -> None:
    path = simulated_copy()
    rewrite(path, "requests", at(0, "0" * 64, "prompt_sha256"))
    assert failures(path)["I8 arms share conditions"] == "draft: prompts differ in content on 1 of 96 rows"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_i9_e16_nan_is_refused_at_the_boundary(simulated_copy: Copies, value: float) -> None:
    path = simulated_copy()
    rewrite(path, "tokens", at(0, value, "entropy_nats"))
    found = failures(path)
    assert "column 'entropy_nats' is NaN or infinite; unknown is null" in found["table tokens"]
    assert found["I9 unknown is null"] == "not checked: tokens can't be read"


def test_i9_c16_logprobs_that_are_all_zero(simulated_copy: Copies) -> None:
    path = simulated_copy()
    rewrite(path, "tokens", lambda frame: frame.with_columns(logprob=pl.lit(0.0)))
    detail = failures(path)["I9 unknown is null"]
    assert detail == f"logprobs_degenerate: all log probabilities are exactly 0 in request {FIRST}.0000"


def test_i9_zero_for_unknown(simulated_copy: Copies) -> None:
    path = simulated_copy(error_rate=0.4)
    rewrite(
        path,
        "requests",
        lambda frame: frame.with_columns(
            num_output_tokens=pl.when(pl.col("status") == "error").then(0).otherwise("num_output_tokens")
        ),
    )
    assert "error with 0 output tokens; unknown is null" in failures(path)["I9 unknown is null"]


def test_i10_a_mean_that_is_not_pooled(simulated_copy: Copies) -> None:
    path = simulated_copy()
    rewrite(path, "requests", at(0, 7.5, "mean_token_entropy_nats"))
    detail = failures(path)["I10 pooled means"]
    assert detail.startswith(f"request {FIRST}.0000: mean_token_entropy_nats 7.5000, its tokens give ")


# Identities between tables


def test_a_step_that_emitted_other_tokens(simulated_copy: Copies) -> None:
    path = simulated_copy()
    rewrite(path, "steps", at(0, 0, "num_emitted_tokens"))
    assert "prefill and steps emitted 1 + " in failures(path)["output tokens and steps"]


def test_a_lost_token_row_and_a_changed_id(simulated_copy: Copies) -> None:
    path = simulated_copy()
    rewrite(path, "tokens", at(0, 3, "token_id"))
    assert "token rows differ from output_token_ids" in failures(path)["token rows"]
    rewrite(path, "tokens", lambda frame: frame.slice(1))
    assert "token rows, " in failures(path)["token rows"]


@pytest.mark.parametrize(
    ("table", "column", "message"),
    [
        ("requests", "num_chunks", "chunk rows, num_chunks"),
        ("chunks", "num_tokens", "chunks hold"),
        ("requests", "num_first_chunk_tokens", "first chunk holds 1 tokens, num_first_chunk_tokens 2"),
    ],
)
def test_chunks_that_do_not_add_up(simulated_copy: Copies, table: str, column: str, message: str) -> None:
    path = simulated_copy()
    rewrite(path, table, add(1, column))
    assert message in failures(path)["chunk sums"]


def test_batches_that_do_not_add_up(simulated_copy: Copies) -> None:
    path = simulated_copy()
    rewrite(path, "engine_steps", add(1, "batch_size"))
    assert "batch_size 2, 1 requests have a step in it" in failures(path)["batch sizes"]
    rewrite(path, "engine_steps", lambda frame: add(-1, "batch_size")(frame).slice(1))
    assert "engine step 0: steps name it but it has no row" in failures(path)["batch sizes"]


# Servers

ANSWER = ServerRequest(num_output_tokens=21, acceptance=vllm_acceptance([4, 3, 2, 1]))
SCRAPES = (scrape(7, 7, generated=9), scrape(7, 7, generated=9), scrape(17, 17, generated=30))
SERVED = (*SCRAPES, SCRAPES[-1])
BASE = ServerCell(
    arm="baseline",
    requests=[ServerRequest(num_output_tokens=21)],
    scrapes=[scrape(generated=tokens) for tokens in (9, 9, 30, 30)],
)
DRAFT = ServerCell(requests=[ANSWER], scrapes=SERVED)


def server_failures(root: Path, *cells: ServerCell, **plan: Any) -> dict[str, str]:
    """Failed checks of a run of these cells, but for those that the small run lacks on purpose."""
    found = failures(write_server_run(root, cells, server_plan(**plan) if plan else None))
    return {name: detail for name, detail in found.items() if name != "modelled flag"}


def detail_of(root: Path, name: str, *cells: ServerCell) -> str:
    return next(found.detail for found in check_run(write_server_run(root, cells)) if found.name == name)


def test_a_good_server_run_passes_every_check(tmp_path: Path) -> None:
    assert server_failures(tmp_path / "a", BASE, DRAFT) == {}
    assert server_failures(tmp_path / "b", BASE, DRAFT, kind="vllm") == {}
    assert detail_of(tmp_path / "c", "acceptance sources", BASE, DRAFT) == "acceptance of draft from response"
    assert detail_of(tmp_path / "d", "output tokens and steps", BASE, DRAFT) == (
        "output tokens fit drafts and accepted tokens in 1 cells"
    )


def test_i1_a_response_out_of_range(tmp_path: Path) -> None:
    wrong = {**vllm_acceptance([4, 3, 2, 1]), "num_draft_tokens": 31}
    cell = ServerCell(requests=[ServerRequest(num_output_tokens=21, acceptance=wrong)])
    assert server_failures(tmp_path / "a", BASE, cell)["I1 acceptance in range"] == (
        "request draft.low.c1.greedy.r0.0000: its response says 10 accepted, 31 drafted in 10 drafts "
        "of at most 3 (1 of 1 rows)"
    )
    wrong = {**vllm_acceptance([4, 3, 2, 1]), "acceptance_histogram": [4, 3, 2, 2]}
    cell = ServerCell(requests=[ServerRequest(num_output_tokens=21, acceptance=wrong)])
    assert (
        "its histogram 11 of at most 3"
        in (server_failures(tmp_path / "b", BASE, cell)["I1 acceptance in range"])
    )


def test_i3_a06_a_restart_between_scrapes(tmp_path: Path) -> None:
    fallen = [scrape(5000, 9000, start=1000), scrape(120, 240, start=1800)]
    found = server_failures(tmp_path / "a", BASE, ServerCell(requests=[ANSWER], scrapes=fallen))
    assert found["I3 counters never fall"].startswith(
        'draft.low.c1.greedy.r0 scrape 1: counter vllm:spec_decode_num_drafts_total{engine="0",'
        'model_name="m"} falls from 5000 to 120 (counter_reset: '
    )
    beyond = [scrape(50, 90, start=1000), scrape(120, 240, start=1800)]
    found = server_failures(tmp_path / "b", BASE, ServerCell(requests=[ANSWER], scrapes=beyond))
    assert "counter_reset" in found["I3 counters never fall"], "no counter fell, but it is another process"


def test_i3_what_is_no_scrape_is_named(tmp_path: Path) -> None:
    found = server_failures(tmp_path, BASE, ServerCell(requests=[ANSWER], scrapes=["<html>", "<html>"]))
    assert found["I3 counters never fall"].startswith("draft.low.c1.greedy.r0 scrape 0: not Prometheus text")


def test_i4_foreign_traffic_on_a_server(tmp_path: Path) -> None:
    busy = (*SERVED[:2], scrape(27, 27, generated=70), scrape(27, 27, generated=70))
    found = server_failures(tmp_path, BASE, ServerCell(requests=[ANSWER], scrapes=busy))
    assert found["I4 server and client tokens"] == (
        "draft.low.c1.greedy.r0: the server generated 61 tokens, the requests hold 21 (foreign_traffic)"
    )
    assert found["acceptance sources"].startswith(
        "draft.low.c1.greedy.r0: counters disagrees: num_drafts 20, 10 (response); foreign_traffic"
    )


def test_i7_a24_drafts_under_one_setting_do_not_excuse_another(tmp_path: Path) -> None:
    silent = ServerRequest(num_output_tokens=21)
    probe = ServerCell(
        sampling="probe",
        requests=[silent],
        scrapes=[scrape(7, 7, generated=9), scrape(7, 7, generated=30)],
    )
    base = ServerCell(arm="baseline", sampling="probe", requests=[silent])
    found = server_failures(tmp_path, BASE, DRAFT, base, probe)
    assert found["I7 drafts in the judged requests"] == (
        "speculation_inactive: 0 drafts in 1 requests; what they ask for (logprobs, penalties, min_p) may "
        "switch speculation off: ask without (arm draft, probe); verdicts on those requests are vacuous"
    )


def test_i7_a_server_that_says_nothing_is_unknown_and_a_drafting_baseline_a_fault(tmp_path: Path) -> None:
    silent = ServerCell(requests=[ServerRequest(num_output_tokens=21)])
    assert server_failures(tmp_path / "a", BASE, silent) == {}
    assert detail_of(tmp_path / "b", "I7 drafts in the judged requests", BASE, silent).startswith(
        "not known for arm draft under greedy: no source tells of drafts (no response carried acceptance"
    )
    found = server_failures(tmp_path / "c", BASE, silent, kind="vllm")
    assert found["acceptance sources"].startswith("arm draft: no source of acceptance: response: no response")
    drafting = ServerCell(arm="baseline", requests=BASE.requests, scrapes=SERVED)
    assert server_failures(tmp_path / "d", drafting, DRAFT)["I7 drafts in the judged requests"] == (
        "baseline.low.c1.greedy.r0: the baseline's server verified 10 drafts"
    )


def test_a20_a_launched_server_without_its_metrics_is_an_error(tmp_path: Path) -> None:
    bare = ServerCell(
        requests=[ServerRequest(num_output_tokens=21)],
        scrapes=[scrape(generated=9), scrape(generated=30)],
    )
    found = server_failures(tmp_path, BASE, bare, kind="vllm")
    assert (
        "counters: metrics_missing: the server has metrics but none of acceptance"
        in (found["acceptance sources"])
    )


def test_a13_truncation_beyond_a_block_is_a_fault_and_within_it_is_told(tmp_path: Path) -> None:
    lost = ServerCell(
        requests=[ServerRequest(num_output_tokens=17, acceptance=vllm_acceptance([4, 3, 2, 1]))]
    )
    found = server_failures(tmp_path / "a", BASE, lost)
    assert found["output tokens and steps"].endswith("need 4 truncated tokens, more than K = 3")
    cut = ServerCell(requests=[ServerRequest(num_output_tokens=18, acceptance=ANSWER.acceptance)])
    assert detail_of(tmp_path / "b", "output tokens and steps", BASE, cut).endswith(
        "; in 1 the verifier's length is more than 2 % above the committed one"
    )


def test_b18_an_earlier_cells_prefix_cache(tmp_path: Path) -> None:
    def cell(concurrency: int, arm: str, *pairs: tuple[int, int]) -> ServerCell:
        text = "vllm:prefix_cache_queries_total {}\nvllm:prefix_cache_hits_total {}\n"
        return ServerCell(
            arm=arm,
            concurrency=concurrency,
            requests=[ANSWER] if arm == "draft" else BASE.requests,
            scrapes=[scrape(more=text.format(*pair)) for pair in pairs],
        )

    warm = [cell(2, arm, (10240, 0), (20480, 9216)) for arm in ("baseline", "draft")]
    cold = [cell(1, arm, (0, 0), (10240, 0)) for arm in ("baseline", "draft")]
    found = server_failures(tmp_path / "a", *cold, *warm)
    assert found["prefix cache"] == (
        "baseline.low.c2.greedy.r0: 90% of its prompt tokens came from an earlier cell's prefix cache; "
        "use a nonce, or turn prefix caching off"
    )
    wanted = {"kind": "vllm", "args": {"enable_prefix_caching": True}, "concurrency": (1, 2)}
    assert "prefix cache" not in server_failures(tmp_path / "b", *cold, *warm, **wanted)
    mixed = (cold[0], cell(1, "draft", (10240, 0), (20480, 9216)))
    found = server_failures(tmp_path / "c", *mixed, **wanted)
    assert found["prefix cache"].startswith(
        "draft.low.c1.greedy.r0: prefix cache 90%, the baseline's 0%: no speedup between them"
    )


def test_b22_a_client_that_holds_fewer_requests_than_asked(tmp_path: Path) -> None:
    busy = scrape(7, 7, generated=9).replace(
        'num_requests_running{engine="0",model_name="m"} 0', "num_requests_running 100"
    )
    many = [ANSWER] * 256
    cell = ServerCell(
        concurrency=256,
        requests=many,
        scrapes=[SERVED[0], SERVED[0], busy, *[scrape(7 + 2560, 7 + 2560, generated=9 + 21 * 256)] * 2],
        facts={"client": {"max_in_flight": 100, "loop_lag_p99_s": 0.001, "limited": []}},
    )
    base = ServerCell(arm="baseline", concurrency=256, requests=[ServerRequest(num_output_tokens=21)] * 256)
    assert server_failures(tmp_path, base, cell) == {
        "client kept up": "draft.low.c256.greedy.r0: client_limited: at most 100 of 256 requests in flight, "
        "the server ran at most 100 (1 of 2 cells)"
    }


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"max_in_flight": 1, "loop_lag_p99_s": 0.120, "limited": []}, "loop lag p99 120 ms is above 10 ms"),
        ({"max_in_flight": 1, "limited": ["too few descriptors"]}, "too few descriptors"),
    ],
)
def test_b23_a_client_that_was_late_says_so(tmp_path: Path, facts: dict[str, Any], reason: str) -> None:
    cell = ServerCell(requests=[ANSWER], scrapes=SERVED, facts={"client": facts})
    found = server_failures(tmp_path, BASE, cell)
    assert found == {"client kept up": f"draft.low.c1.greedy.r0: client_limited: {reason} (1 of 2 cells)"}


def test_i8_a23_arms_whose_prompts_were_rendered_differently(tmp_path: Path) -> None:
    base = ServerCell(arm="baseline", requests=[ServerRequest(num_output_tokens=21, num_prompt_tokens=58)])
    other = ServerCell(
        requests=[ServerRequest(num_output_tokens=21, num_prompt_tokens=74, acceptance=ANSWER.acceptance)]
    )
    assert server_failures(tmp_path, base, other) == {
        "I8 arms share conditions": "draft: prompt token counts differ on 1 of 1 rows"
    }


# What makes numbers wrong


def test_contradictions_name_the_arm_that_they_spoil(simulated_copy: Copies) -> None:
    path = simulated_copy(arms={"one": {}, "two": {}, "three": {}})
    assert contradictions(read_run(path)) == ()
    for arm in ("one", "two"):
        rewrite(path, "steps", at(0, 0, "num_emitted_tokens"), cell=f"{arm}.low.c1.greedy.r0")
    run = read_run(path)
    found = contradictions(run)
    named = [(finding.name, finding.arm) for finding in found]
    assert named.count(("output tokens and steps", "one")) == 1
    assert named.count(("output tokens and steps", "two")) == 1
    assert {arm for _, arm in named} == {"one", "two"}
    assert all(finding.arm in finding.detail for finding in found if finding.arm)
    assert contradictions(run) is found, "worked out once for an opened run"
    rewrite(path, "steps", at(0, 0, "num_emitted_tokens"), cell="baseline.low.c1.greedy.r0")
    assert None in {finding.arm for finding in contradictions(read_run(path))}


def test_what_other_rules_treat_is_no_contradiction(simulated_copy: Copies, tmp_path: Path) -> None:
    assert contradictions(read_run(simulated_copy(no_drafts=True))) == ()
    assert contradictions(read_run(simulated_copy(status="interrupted"))) == ()
    silent = ServerCell(requests=[ServerRequest(num_output_tokens=21)])
    plan = server_plan(kind="vllm")
    assert contradictions(read_run(write_server_run(tmp_path, [BASE, silent], plan))) == ()


def test_a_baseline_whose_responses_tell_of_drafts_is_a_contradiction(tmp_path: Path) -> None:
    drafting = ServerCell(arm="baseline", requests=[ANSWER])
    found = {f.name: f for f in contradictions(read_run(write_server_run(tmp_path, [drafting, DRAFT])))}
    assert found["I7 drafts in the judged requests"].arm is None
    assert found["I7 drafts in the judged requests"].detail.startswith(
        "request baseline.low.c1.greedy.r0.0000: its response says that the baseline verified 10 drafts"
    )
