"""Whole runs on servers, running and launched: what goes wrong is in the rows, and the run ends in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil
import pytest
from fake_server import FakeServer
from streaming_vllm import make_streaming_vllm, num_starts, tell

from specnb import schema, telemetry
from specnb.checks import check_run
from specnb.config import plan_cells, read_plan
from specnb.engines import vllm
from specnb.engines.vllm import OrphanError
from specnb.equivalence import setting_differences
from specnb.latency import failure_table, latency_quantiles, throughput_table
from specnb.reconciliation import LOOP_LAG_LIMIT_S
from specnb.records import Run, read_run
from specnb.runner import Progress, measure

FIXTURES = Path(__file__).parents[1] / "fixtures"
DFLASH: dict[str, Any] = {"method": "dflash", "num_speculative_tokens": 3}
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
BASELINE_TOKENS: dict[str, Any] = {"tokens_per_chunk": 1, "gap_s": 0.001}
DRAFT_TOKENS: dict[str, Any] = {
    "tokens": [1, 4, 1, 4, 4, 2],
    "gap_s": 0.002,
    "num_speculative_tokens": 3,
    "acceptance": "detailed",
}
SECRET = "sk-specnb-0123456789abcdef"


def write_plan(
    folder: Path, arms: Sequence[dict[str, Any]], prompts: Sequence[str] | int, **overrides: Any
) -> Path:
    """A plan file over these prompts (or so many), all in every cell; overrides: engine and load merge.

    Two prompts of another tier are there for warm-ups, which are off unless the load says otherwise.
    """
    texts = [f"question {n}" for n in range(prompts)] if isinstance(prompts, int) else prompts
    lines = [
        {"id": f"p{n:02d}", "tier": "low", "length": "short", "prompt": text} for n, text in enumerate(texts)
    ]
    lines += [{"id": f"w{n}", "tier": "high", "length": "short", "prompt": f"warm {n}"} for n in range(2)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    content = {
        "name": "served",
        "target": {"model": "fake-model"},
        "engine": {"kind": "openai", "endpoint": "completions", **overrides.pop("engine", {})},
        "arms": list(arms),
        "workload": {"set": "prompts.jsonl", "tiers": ["low"], "prompts_per_cell": None},
        "sampling": [{"name": "greedy", "temperature": 0.0, "max_tokens": 16, "ignore_eos": True}],
        "load": {"concurrency": [1], "warmup_requests": 0, **overrides.pop("load", {})},
        **overrides,
    }
    (folder / "plan.yaml").write_text(json.dumps(content))
    return folder / "plan.yaml"


def on(baseline: FakeServer, draft: FakeServer) -> list[dict[str, Any]]:
    """The arms of a plan on two running servers."""
    return [
        {"name": "baseline", "url": baseline.url},
        {"name": "draft", "url": draft.url, "speculative": DFLASH},
    ]


def baseline_server(**settings: Any) -> FakeServer:
    return FakeServer(defaults=BASELINE_TOKENS, **settings)


def draft_server(**settings: Any) -> FakeServer:
    """A server of drafts. Its request 0 is the preflight's control, so request n + 1 is prompt n at one at
    a time and without a warm-up."""
    return FakeServer(**{"defaults": DRAFT_TOKENS, **settings})


def measured(plan: Path, *, resume: Path | None = None, messages: list[str] | None = None) -> Run:
    say = (messages if messages is not None else []).append
    root = plan.parent / "runs"
    return read_run(measure(read_plan(plan), root=root, resume=resume, progress=Progress(on_message=say)))


def command(plan: Path, *more: str) -> list[str]:
    root = str(plan.parent / "runs")
    return [sys.executable, "-m", "specnb.cli", "run", str(plan), "--root", root, *more]


def cli(plan: Path, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(plan, *more), capture_output=True, text=True, timeout=120, env={**os.environ, **env}
    )


def of_arm(run: Run, arm: str = "draft") -> pl.DataFrame:
    return run.requests.filter(arm=arm).sort("request_id")


def kinds(run: Run, arm: str = "draft") -> list[str | None]:
    return of_arm(run, arm)["error_kind"].to_list()


def failures(run: Run, arm: str = "draft") -> dict[str, Any]:
    return failure_table(run.requests, by=["arm"]).filter(arm=arm).row(0, named=True)


def throughput(run: Run, arm: str = "draft") -> Any:
    """An arm's row of `throughput_table`; None if it has no value."""
    table = throughput_table(run.requests, by=["arm"], rng=np.random.default_rng(0))
    rows = table.filter(pl.col("value").is_not_null(), arm=arm)
    return rows.row(0, named=True) if rows.height else None


def refused(run: Run) -> dict[str, str]:
    """Checks that do not hold, with what they say."""
    return {found.name: found.detail for found in check_run(run.path) if not found.ok}


def refused_on_any_machine(run: Run) -> dict[str, str]:
    """`refused` without the client's own check, which is up to the machine; that one must tell its lag."""
    found = refused(run)
    said = found.pop("client kept up", None)
    late = {
        cell["cell_id"] for cell in run.cells if (cell["client"]["loop_lag_p99_s"] or 0) > LOOP_LAG_LIMIT_S
    }
    assert (said is not None) == bool(late), said
    assert said is None or said.partition(":")[0] in late
    for cell in run.cells:
        limited = cell["client"]["limited"]
        assert len(limited) == (cell["cell_id"] in late), limited
        assert all(reason.startswith("loop lag P99") for reason in limited)
        assert cell["client"]["max_in_flight"] == cell["concurrency"]
    return found


def facts(run: Run, cell_id: str) -> dict[str, Any]:
    (found,) = [cell for cell in run.cells if cell["cell_id"] == cell_id]
    return found


# -- running servers -------------------------------------------------------------------------------


def test_a_healthy_run_passes_every_check(tmp_path: Path) -> None:
    with baseline_server() as baseline, draft_server() as draft:
        load = {"concurrency": [1, 2], "warmup_requests": 2}
        run = measured(write_plan(tmp_path, on(baseline, draft), 4, load=load, repeats=2))
    assert refused_on_any_machine(run) == {}
    assert run.requests["status"].unique().to_list() == ["ok"]
    assert run.table("scrapes").group_by("cell_id").len()["len"].unique().to_list() == [4]
    steps = run.steps.filter(arm="draft", request_id=of_arm(run)["request_id"][0])
    columns = ("num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")
    assert steps.select(columns).rows() == [(3, 3, 4), (3, 0, 1), (3, 3, 4), (3, 3, 4), (3, 1, 2)]
    assert {cell["server"]["served_model_name"] for cell in run.cells} == {"fake-model"}
    assert {cell["steps_source"] for cell in run.cells if cell["arm"] == "draft"} == {"response, each step"}


BROKEN = {
    "http_500": "http_500",
    "http_429": "http_429",
    "http_400": "http_400",
    "garbage": "garbage",
    "garbage_html": "garbage",
    "garbage_body": "garbage",
    "bad_json": "garbage",
    "refuse": "disconnected",
    "cut": "truncated",
    "cut_clean": "truncated",
    "reset": "truncated",
    "in_band": "server_error",
    "empty": "empty",
    "silent": "stalled",
    "hang": "stalled",
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose drafting server breaks every second request in another way."""
    requests = {2 * number + 1: {"fail": kind} for number, kind in enumerate(BROKEN)}
    plan_folder = tmp_path_factory.mktemp("broken")
    with baseline_server() as baseline, draft_server(requests=requests) as draft:
        load = {"stall_timeout_s": 1.0}
        began = time.monotonic()
        run = measured(write_plan(plan_folder, on(baseline, draft), 2 * len(BROKEN), load=load))
        assert time.monotonic() - began < 15
    return run


def test_every_broken_answer_is_a_row_that_says_what_it_was(broken: Run) -> None:
    assert kinds(broken)[::2] == list(BROKEN.values())
    assert kinds(broken)[1::2] == [None] * len(BROKEN)  # the run goes on after each
    rows = of_arm(broken)
    stalled = rows.filter(error_kind="stalled")
    assert stalled["status"].to_list() == ["timeout", "timeout"]
    assert stalled["error"].to_list() == ["no bytes for 1 s"] * 2
    assert rows.filter(error_kind="http_429")["error"].to_list() == ["HTTP 429: as asked: 429"]
    assert rows.filter(pl.col("status") != "ok")["sent_s"].null_count() == 0
    assert broken.status == "finished"


def test_b17_what_came_before_the_cut_is_kept(broken: Run) -> None:
    cut = of_arm(broken).filter(error_kind="truncated")
    assert cut["num_chunks"].to_list() == [3, 3, 3]
    assert cut["output_text"].str.starts_with(" w0 w1").all()
    assert cut["num_output_tokens"].to_list() == [6, 6, 6]  # by the server's own running count


def test_no_figure_leaves_the_failures_out(broken: Run) -> None:
    row = failures(broken)
    assert (row["num_failed"], row["n"]) == (15, 30)
    assert row["value"] == pytest.approx(0.5)
    assert row["failures"] == (
        "4 garbage, 3 truncated, 2 stalled, 1 disconnected, 1 empty, 1 http_400, 1 http_429, 1 http_500, "
        "1 server_error"
    )
    found = throughput(broken)
    assert found["n"] == 15
    assert found["num_output_tokens"] == 15 * 16
    # Two stalled requests took a second each, and no token came of them. The last one ends the cell.
    assert found["wall_s"] > 1.9
    assert found["value"] == pytest.approx(15 * 16 / found["wall_s"])
    assert failures(broken, "baseline")["num_failed"] == 0
    latencies = latency_quantiles(broken.requests, by=["arm"]).filter(arm="draft", metric="ttft_s")
    assert latencies["n"].unique().to_list() == [15]


def test_the_command_names_the_failures_and_says_1(tmp_path: Path) -> None:
    with baseline_server() as baseline, draft_server(requests={2: {"fail": "http_500"}}) as draft:
        done = cli(write_plan(tmp_path, on(baseline, draft), 3))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "specnb: 1 of 6 requests failed, the first in draft.low.c1.greedy.r0: http_500, HTTP 500: as asked: "
        "500"
    )
    assert read_run(done.stdout.strip()).status == "finished"


def test_a_server_that_refuses_everything_has_no_throughput(tmp_path: Path) -> None:
    broken = {**DRAFT_TOKENS, "fail": "http_429"}
    with baseline_server() as baseline, draft_server(defaults=broken) as draft:
        run = measured(write_plan(tmp_path, on(baseline, draft), 3))
    assert kinds(run) == ["http_429"] * 3
    assert failures(run)["value"] == 1.0
    assert throughput(run) is None
    assert throughput(run, "baseline")["n"] == 3


def test_a_full_queue_is_429_for_those_over_it(tmp_path: Path) -> None:
    with baseline_server() as baseline, draft_server(max_in_flight=2) as draft:
        run = measured(write_plan(tmp_path, on(baseline, draft), 8, load={"concurrency": [4]}))
    assert failures(run, "baseline")["num_failed"] == 0
    found = kinds(run)
    assert set(found) == {None, "http_429"}
    assert failures(run)["failures"] == f"{found.count('http_429')} http_429"


def test_a_server_that_dies_costs_its_requests_and_no_time(tmp_path: Path) -> None:
    """The second cell finds nobody: one request learns that, the rest are not sent."""
    with baseline_server() as baseline, draft_server(requests={3: {"fail": "die"}}) as draft:
        began = time.monotonic()
        run = measured(write_plan(tmp_path, on(baseline, draft), 8, load={"concurrency": [1, 2]}))
        assert time.monotonic() - began < 10
    first, second = (of_arm(run).filter(concurrency=concurrency) for concurrency in (1, 2))
    assert first["error_kind"].to_list() == [None, None, "truncated", *["server_down"] * 5]
    assert first["sent_s"].null_count() == 5
    assert set(second["error_kind"].to_list()) == {"connect", "server_down"}
    assert second["error_kind"].to_list().count("server_down") >= 6
    assert failures(run, "baseline")["num_failed"] == 0
    assert facts(run, "draft.low.c1.greedy.r0")["server"]["alive_at_end"] is False
    assert failures(run)["num_failed"] == 14


def test_a_server_that_hangs_is_given_up(tmp_path: Path) -> None:
    """One at a time: two stalled requests in a row are enough; forty would take twenty seconds a cell."""
    silent = {**DRAFT_TOKENS, "fail": "silent"}
    messages: list[str] = []
    with baseline_server() as baseline, draft_server(defaults=silent) as draft:
        began = time.monotonic()
        plan = write_plan(tmp_path, on(baseline, draft), 40, load={"stall_timeout_s": 0.5})
        run = measured(plan, messages=messages)
        assert time.monotonic() - began < 10
    # The next one was on its way already when the second one was counted.
    assert kinds(run) == ["stalled"] * 3 + ["server_down"] * 37
    hangs = "hangs: requests stalled for 0.5 s, and none was answered"
    assert facts(run, "draft.low.c1.greedy.r0")["server"]["death"] == hangs
    assert messages[-1] == f"draft: the server {hangs}"


def test_on_error_stop_ends_the_run_after_the_cell_and_it_can_be_resumed(tmp_path: Path) -> None:
    with baseline_server() as baseline, draft_server(requests={2: {"fail": "http_500"}}) as draft:
        plan = write_plan(tmp_path, on(baseline, draft), 3, repeats=2, on_error="stop")
        done = cli(plan)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == (
            "specnb: draft.low.c1.greedy.r0: request draft.low.c1.greedy.r0.0001 failed (HTTP 500: as asked: "
            "500); the plan says on_error: stop"
        )
        (path,) = (tmp_path / "runs").iterdir()
        stopped = read_run(path)
        assert stopped.status == "failed"
        assert [cell["cell_id"] for cell in stopped.cells] == [
            "baseline.low.c1.greedy.r0",
            "draft.low.c1.greedy.r0",
        ]
        resumed = measured(plan, resume=path)
    assert resumed.status == "finished"
    assert len(resumed.cells) == 4
    assert failures(resumed)["num_failed"] == 1  # the failure of before is still there


def test_a_cell_over_its_time_is_cut_and_its_requests_are_cancelled(tmp_path: Path) -> None:
    slow = {**DRAFT_TOKENS, "gap_s": 0.2}
    with baseline_server() as baseline, draft_server(defaults=slow) as draft:
        run = measured(
            write_plan(tmp_path, on(baseline, draft), 8, load={"cell_timeout_s": 2.5, "concurrency": [2]})
        )
    rows = of_arm(run)
    assert rows["status"].to_list() == ["ok"] * 4 + ["cancelled"] * 4
    assert rows["error_kind"].to_list() == [None] * 4 + ["deadline"] * 4
    assert rows["error"].to_list()[4:] == ["the cell's time limit was reached"] * 4
    assert rows["sent_s"].null_count() == 2  # two were on their way, two were never sent
    assert failures(run)["failures"] == "4 deadline"
    assert throughput(run)["n"] == 4
    assert failures(run, "baseline")["num_failed"] == 0


def test_a_request_over_its_time_is_a_timeout(tmp_path: Path) -> None:
    with baseline_server() as baseline, draft_server(requests={2: {"gap_s": 0.5}}) as draft:
        run = measured(write_plan(tmp_path, on(baseline, draft), 3, load={"request_timeout_s": 1.25}))
    rows = of_arm(run)
    assert rows["status"].to_list() == ["ok", "timeout", "ok"]
    assert kinds(run) == [None, "request_timeout", None]
    assert rows["error"][1] == "not finished within 1.25 s"
    assert rows["num_chunks"][1] == 3  # what came until then is kept: at 0, 0.5 and 1 s


def test_b24_an_open_loop_keeps_when_a_request_was_due_apart_from_when_it_was_sent(tmp_path: Path) -> None:
    """40 requests a second to a server that takes 0.1 s for each, one at a time: the wait is the load's."""
    slow = {**DRAFT_TOKENS, "gap_s": 0.02}
    with baseline_server() as baseline, draft_server(defaults=slow) as draft:
        load = {"mode": "open", "request_rate": 40.0, "concurrency": [1]}
        run = measured(write_plan(tmp_path, on(baseline, draft), 10, load=load))
    assert run.requests["status"].unique().to_list() == ["ok"]
    due = {arm: of_arm(run, arm)["scheduled_s"].to_numpy() for arm in ("baseline", "draft")}
    assert np.diff(due["draft"]) == pytest.approx(np.diff(due["baseline"]), abs=1e-6)
    late_s = (of_arm(run)["sent_s"] - of_arm(run)["scheduled_s"]).to_numpy()
    assert (late_s >= 0).all()
    assert late_s[-1] > 0.4  # ten of them take 1 s, the last is due after about a quarter of one
    quantiles = latency_quantiles(run.requests, by=["arm"]).filter(arm="draft", quantile=0.5)
    value = dict(quantiles.select("metric", "value").iter_rows())
    assert value["e2e_s"] == pytest.approx(0.1, abs=0.05)
    assert value["scheduled_e2e_s"] > value["e2e_s"] + 0.1


# -- whose server is it, and whose key -------------------------------------------------------------


def test_b38_a_server_of_another_model_ends_the_command_before_anything_is_written(tmp_path: Path) -> None:
    with baseline_server() as baseline, draft_server(model="other", any_model=True) as draft:
        done = cli(write_plan(tmp_path, on(baseline, draft), 2))
        asked = [record["path"] for record in draft.records()]
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"specnb: arms.draft.url: {draft.url}: serves other, not fake-model; correct the url or target.model"
    )
    assert not (tmp_path / "runs").exists()
    assert asked == []


def test_the_key_is_in_no_file_of_the_run(tmp_path: Path) -> None:
    with (
        FakeServer(defaults=BASELINE_TOKENS, api_key=SECRET) as baseline,
        FakeServer(
            defaults=DRAFT_TOKENS, api_key=SECRET, requests={2: {"fail": "http_500"}, 3: {"fail": "cut"}}
        ) as draft,
    ):
        engine = {"api_key_env": "SERVED_KEY"}
        plan = write_plan(tmp_path, on(baseline, draft), 4, engine=engine)
        without = cli(plan)
        assert without.returncode == 2
        assert "refused (401); put the key into the variable of engine.api_key_env" in without.stderr
        done = cli(plan, SERVED_KEY=SECRET)
        assert {record["has_key"] for record in draft.records()} == {False, True} - {False}
    assert done.returncode == 1, done.stderr  # two requests were made to fail
    run = read_run(done.stdout.strip())
    assert kinds(run) == [None, "http_500", "truncated", None]
    files = [file for file in run.path.rglob("*") if file.is_file()]
    assert len(files) > 5
    for file in files:
        assert SECRET.encode() not in file.read_bytes(), file
    for name in schema.TABLES:
        assert SECRET not in run.table(name).write_json()  # files are compressed
    assert SECRET not in done.stdout + done.stderr


# -- launched servers ------------------------------------------------------------------------------


def launched(folder: Path, prompts: Sequence[str] | int, told: dict[str, Any], **overrides: Any) -> Path:
    """A plan of a baseline and n-gram drafts on servers that are launched, and do what they are told."""
    python = make_streaming_vllm(folder, **told)
    engine = {"kind": "vllm", "python": python, "start_timeout_s": 30, **overrides.pop("engine", {})}
    arms = [{"name": "baseline"}, {"name": "draft", "speculative": NGRAM}]
    return write_plan(folder, arms, prompts, engine=engine, **overrides)


def test_a_healthy_launched_run_passes_every_check(tmp_path: Path) -> None:
    load = {"concurrency": [1, 2], "warmup_requests": 1}
    run = measured(launched(tmp_path, 4, {}, load=load, repeats=2))
    assert refused_on_any_machine(run) == {}
    assert (num_starts(tmp_path, "baseline"), num_starts(tmp_path, "draft")) == (2, 2)
    for cell in run.cells:
        assert cell["server"]["served_model_name"] == f"served.{cell['arm']}"
        assert (run.path / "logs" / cell["server"]["log"]).exists()
        assert not psutil.pid_exists(cell["server"]["pid"])
    assert of_arm(run)["output_token_ids"].null_count() == 0
    # Arms in order, then the other way round; a server lives for all cells of its arm and repeat.
    order = [cell.cell_id for cell in plan_cells(run.plan)]
    assert [name.partition(".")[0] for name in order] == [
        *("baseline", "baseline", "draft", "draft", "draft", "draft", "baseline", "baseline")
    ]
    pids = [cell["server"]["pid"] for cell in run.cells]
    assert pids[0] == pids[1] != pids[6] == pids[7]


def test_b36_what_servers_settle_on_is_read_from_their_logs(tmp_path: Path) -> None:
    """Both arms are launched alike; n-gram drafts switch asynchronous scheduling off."""
    told = {
        "baseline": {"log": str(FIXTURES / "vllm-0.32.0-cpu-baseline.log")},
        "draft": {"log": str(FIXTURES / "vllm-0.32.0-cpu-ngram.log")},
    }
    run = measured(launched(tmp_path, 2, told))
    for cell in run.cells:
        assert cell["server"]["settings"]
        assert cell["server"]["kv_cache_tokens"] is not None
    arguments = [facts["arguments"] for facts in run.manifest["arms"].values()]
    assert {name for name in arguments[1] if arguments[0].get(name) != arguments[1][name]} == {
        "speculative_config",
        "per_request_spec_decode_metrics",
    }
    names = [found.name for found in setting_differences(run, arm="draft")]
    assert "async_scheduling" in names


def test_what_a_server_logs_while_a_cell_runs_is_kept(tmp_path: Path) -> None:
    """Its statistics lines alone, and not those of before the first request."""
    statistics = [
        line
        for line in (FIXTURES / "vllm-0.32.0-cpu-ngram.log").read_text().splitlines()
        if "Avg prompt throughput" in line or "SpecDecoding metrics" in line
    ]
    assert len(statistics) >= 2
    told = {
        "draft": {"log": str(FIXTURES / "vllm-0.32.0-cpu-ngram.log"), "says": [*statistics, "INFO: more"]}
    }
    run = measured(launched(tmp_path, 2, told))
    lines = run.table("log_lines")
    assert lines["arm"].unique().to_list() == ["draft"]
    assert lines["text"].to_list() == statistics * 2


def test_d09_a_prompt_over_the_limit_kills_the_engine(tmp_path: Path) -> None:
    """1900 tokens pass, 2100 kill it, ten more follow: one failure of the server's, not eleven."""
    prompts = [" ".join(["word"] * count) for count in (1900, 2100, *[20] * 10)]
    told = {"draft": {"max_words": 2048}}
    messages: list[str] = []
    run = measured(launched(tmp_path, prompts, told, load={"concurrency": [1, 2]}), messages=messages)
    assert run.status == "finished"
    first, second = (of_arm(run).filter(concurrency=concurrency) for concurrency in (1, 2))
    assert first["error_kind"].to_list() == [None, "disconnected", *["server_down"] * 10]
    assert first["prompt_id"][1] == "p01"
    assert first["sent_s"].null_count() == 10
    # The next cell has a server again, which lives until it meets the prompt.
    assert num_starts(tmp_path, "draft") == 2
    assert "disconnected" in second["error_kind"].to_list()
    assert facts(run, "draft.low.c2.greedy.r0")["server"]["restarts"] == 1
    death = facts(run, "draft.low.c1.greedy.r0")["server"]["death"]
    assert death.startswith("ended with exit code 1: ")
    assert "prompt over the limit" in death
    assert f"draft: the server {death}" in messages
    logs = sorted(file.name for file in (run.path / "logs").iterdir())
    assert logs == ["baseline.r0.log", "draft.r0.log", "draft.r0.start2.log"]
    assert "prompt over the limit" in (run.path / "logs" / "draft.r0.log").read_text()
    assert failures(run, "baseline")["num_failed"] == 0
    assert failures(run)["num_failed"] >= 12


def test_a_server_that_died_is_started_again_and_warmed_up_once(tmp_path: Path) -> None:
    told = {"draft": {"starts": [{"settings": {"requests": {"3": {"fail": "die"}}}}, {}]}}
    load = {"concurrency": [1, 2], "warmup_requests": 1}
    messages: list[str] = []
    run = measured(launched(tmp_path, 4, told, load=load, repeats=1), messages=messages)
    # Requests 0 and 1 were the control at launch and the warm-up, so the second prompt was fatal.
    first, second = (of_arm(run).filter(concurrency=concurrency) for concurrency in (1, 2))
    assert first["error_kind"].to_list() == [None, "truncated", "server_down", "server_down"]
    assert second["error_kind"].to_list() == [None] * 4
    assert messages.count("draft: starting the server again") == 1
    assert not [line for line in messages if "warm-up" in line]
    # After the restart: a control, two warm-up requests at once, and the cell's four; all idle in between.
    scrapes = run.table("scrapes").filter(cell_id="draft.low.c2.greedy.r0")
    generated = [
        [line for line in body.splitlines() if line.startswith("vllm:generation_tokens_total")]
        for body in scrapes["body"]
    ]
    assert [line.rpartition(" ")[2] for (line,) in generated] == ["32.0", "32.0", "96.0", "96.0"]


def test_a_server_that_keeps_dying_is_given_up_in_this_repeat(tmp_path: Path) -> None:
    told = {"draft": {"settings": {"requests": {"1": {"fail": "die"}}}}}
    load = {"concurrency": [1, 2, 3, 4, 5, 6]}
    messages: list[str] = []
    run = measured(launched(tmp_path, 6, told, load=load), messages=messages)
    assert num_starts(tmp_path, "draft") == 4
    last = of_arm(run).filter(pl.col("concurrency") >= 5)
    assert last["error_kind"].unique().to_list() == ["server_start"]
    assert last["error"].unique().to_list() == ["the server of draft died 4 times"]
    assert failures(run, "baseline")["num_failed"] == 0
    assert messages.count("the server of draft died 4 times; its cells of this repeat are given up") == 1


def test_a_launched_server_that_hangs_is_replaced(tmp_path: Path) -> None:
    told = {"draft": {"starts": [{"settings": {"defaults": {"fail": "silent"}}}, {}]}}
    load = {"concurrency": [1, 2], "stall_timeout_s": 1.0}
    run = measured(launched(tmp_path, 6, told, load=load))
    first, second = (of_arm(run).filter(concurrency=concurrency) for concurrency in (1, 2))
    assert first["error_kind"].to_list() == ["stalled"] * 3 + ["server_down"] * 3
    assert second["error_kind"].to_list() == [None] * 6
    assert num_starts(tmp_path, "draft") == 2


OOM = (
    "(EngineCore pid=7) ERROR 01-01 00:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. "
    "Tried to allocate 1.20 GiB\n"
)


def out_of_memory(folder: Path) -> dict[str, Any]:
    (folder / "oom.txt").write_text(OOM)
    return {"vllm": {"log": str(folder / "oom.txt"), "exit_code": 1}}


def test_d06_an_arm_that_can_not_start_has_rows_and_the_others_go_on(tmp_path: Path) -> None:
    args = {"gpu_memory_utilization": 0.85}
    plan = launched(
        tmp_path,
        3,
        {"draft": out_of_memory(tmp_path)},
        engine={"args": args},
        load={"concurrency": [1, 2]},
        repeats=2,
    )
    done = cli(plan)
    assert done.returncode == 1
    run = read_run(done.stdout.strip())
    assert run.status == "finished"
    assert run.requests.filter(arm="baseline")["status"].unique().to_list() == ["ok"]
    rows = of_arm(run)
    assert rows.height == 12
    assert rows["error_kind"].unique().to_list() == ["server_start"]
    (reason,) = rows["error"].unique().to_list()
    assert reason == (
        "arm draft: the server ended with exit code 1 at start (oom_at_load): torch.OutOfMemoryError: CUDA "
        "out of memory. Tried to allocate 1.20 GiB; lower gpu_memory_utilization (now 0.85), max_model_len "
        "or max_num_seqs"
    )
    assert num_starts(tmp_path, "draft") == 2  # once a repeat, not once a cell
    assert facts(run, "draft.low.c2.greedy.r1")["server"] == {"error": reason}
    assert done.stderr.splitlines()[-1] == (
        "specnb: 12 of 24 requests failed, the first in draft.low.c1.greedy.r0: server_start, " + reason
    )
    assert failures(run)["failures"] == "12 server_start"
    assert throughput(run) is None


def test_d06_a_baseline_that_can_not_start_stops_the_run(tmp_path: Path) -> None:
    plan = launched(tmp_path, 3, {"baseline": out_of_memory(tmp_path)}, repeats=2)
    done = cli(plan)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "specnb: arm baseline: the server ended with exit code 1 at start (oom_at_load): "
    )
    assert num_starts(tmp_path, "baseline") == 1
    assert num_starts(tmp_path, "draft") == 0
    (path,) = (tmp_path / "runs").iterdir()
    assert json.loads((path / "manifest.json").read_text())["status"] == "failed"
    assert "OutOfMemoryError" in (path / "logs" / "baseline.r0.log").read_text()
    tell(tmp_path)
    run = measured(plan, resume=path)
    assert run.status == "finished"
    assert failures(run, "baseline")["num_failed"] == 0


def test_d11_memory_that_stays_on_a_gpu_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = {"0": 1 << 30}
    monkeypatch.setattr(telemetry, "gpu_memory_used", lambda: dict(used))
    monkeypatch.setattr(telemetry, "gpu_processes", lambda: {"0": (4711,)})
    monkeypatch.setattr(vllm, "_MEMORY_LIMIT_S", 0.3)
    plan = launched(tmp_path, 2, {})
    hooks = Progress(on_cell_done=lambda cell: used.update({"0": 70 << 30}))
    with pytest.raises(OrphanError) as caught:
        measure(read_plan(plan), root=tmp_path / "runs", progress=hooks)
    assert str(caught.value) == (
        "arm baseline: its server is gone, but GPU 0 holds 69.0 GiB more than before (processes: 4711); "
        "end what holds it, then resume"
    )
    assert num_starts(tmp_path, "draft") == 0
    (path,) = (tmp_path / "runs").iterdir()
    stopped = read_run(path)
    assert stopped.status == "failed"
    assert [cell["arm"] for cell in stopped.cells] == ["baseline"]
    used["0"] = 1 << 30
    assert measured(plan, resume=path).status == "finished"


def test_d11_memory_that_stays_after_the_last_cell_is_said_and_the_run_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = {"0": 1 << 30}
    monkeypatch.setattr(telemetry, "gpu_memory_used", lambda: dict(used))
    monkeypatch.setattr(telemetry, "gpu_processes", lambda: {"0": (4711,)})
    monkeypatch.setattr(vllm, "_MEMORY_LIMIT_S", 0.3)
    messages: list[str] = []
    hooks = Progress(
        on_message=messages.append,
        on_cell_done=lambda cell: used.update({"0": (70 if cell.arm.speculative else 1) << 30}),
    )
    path = measure(read_plan(launched(tmp_path, 2, {})), root=tmp_path / "runs", progress=hooks)
    assert read_run(path).status == "finished"
    assert messages[-1].startswith("arm draft: its server is gone, but GPU 0 holds 69.0 GiB more than before")


def wait_for_cells(folder: Path, cells: int) -> Path:
    """The run directory, once it holds so many finished cells."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for found in (folder / "runs").glob("*/cells"):
            if len(list(found.glob("[!.]*"))) >= cells:
                return found.parent
        time.sleep(0.01)
    raise AssertionError("the run never got there")


def servers_in(folder: Path) -> list[int]:
    """Living processes that were started from the interpreter in this folder."""
    found = []
    for process in psutil.process_iter(["pid", "environ", "status"]):
        environ = process.info["environ"] or {}
        if environ.get("PYTHONPATH") == str(folder / "site") and process.info["status"] != "zombie":
            found.append(process.info["pid"])
    return found


def test_a_terminated_run_stops_its_server_and_resumes(tmp_path: Path) -> None:
    told = {"draft": {"settings": {"defaults": {"gap_s": 0.2}}}}
    plan = launched(tmp_path, 4, told, repeats=2)
    process = subprocess.Popen(command(plan), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        path = wait_for_cells(tmp_path, 1)
        deadline = time.monotonic() + 30
        while num_starts(tmp_path, "draft") == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1.0)
        assert servers_in(tmp_path)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert err.splitlines()[-1] == (
        f"specnb: interrupted; finished cells are kept: resume with --resume {path}"
    )
    assert servers_in(tmp_path) == []
    assert read_run(path).status == "interrupted"
    tell(tmp_path)
    done = cli(plan, "--resume", str(path))
    assert done.returncode == 0, done.stderr
    run = read_run(path)
    assert run.status == "finished"
    assert refused_on_any_machine(run) == {}
    assert servers_in(tmp_path) == []
