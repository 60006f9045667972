"""A real vLLM server on the CPU: measured, compared with the in-process engine, filled, overfed and killed.

Two runs serve all tests. `measured` is a plan with a baseline and n-gram speculation that must be faultless.
`troubled` has one arm's worth of trouble: more requests than the server takes at once, prompts at and over
its limit, its engine process killed, then the whole server. Times are never asserted, but for wide limits on
how long a dead server may hold a run up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil
import pytest
import yaml

from specnb import runner
from specnb.checks import check_run
from specnb.config import Cell, Plan, plan_cells, plan_from_dict, read_plan
from specnb.engines.base import CellContext, Engine
from specnb.engines.transformers import TransformersEngine
from specnb.engines.vllm import MODULE
from specnb.equivalence import classify_margin, greedy_pairs, near_tie_threshold
from specnb.latency import decomposition, failure_table, request_latency, throughput_table
from specnb.prometheus import Window, parse
from specnb.reconciliation import LOOP_LAG_LIMIT_S, cell_windows, headline_source, reconcile, server_tokens
from specnb.records import Run, read_run
from specnb.runner import Progress, greedy_splits, measure, planned_requests
from specnb.workloads import Prompt, load_workload

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("SPECNB_TEST_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
K = 5
SERVER_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# Asynchronous scheduling off: vLLM does without it beside n-gram drafts, and arms may differ in drafts alone.
SERVER_ARGS = {"enforce_eager": True, "enable_prefix_caching": False, "async_scheduling": False}
START_LIMIT_S = 600
ARMS = [
    {"name": "baseline"},
    {
        "name": "ngram",
        "speculative": {
            "method": "ngram",
            "num_speculative_tokens": K,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
    },
]
# Prompt and answer together, and the answer's cap, in tokens, of the server that is overfed.
MAX_MODEL_LEN = 160
SHORT_CAP = 8
# How far the margins of two float32 implementations of one model may lie apart, in nats.
MARGIN_TOLERANCE_NATS = 0.01


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter that has vLLM; without it the tests fail, they are not left out."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: `make test` makes it (SPECNB_TEST_VLLM_PYTHON names another)")
    return str(PYTHON)


@dataclass
class Diary:
    """What a measurement said and when; shown beside a test that fails."""

    began_s: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        self.lines.append(f"{time.monotonic() - self.began_s:6.1f} s  {line}")

    def show(self) -> None:
        sys.stderr.write("\n".join(self.lines) + "\n")


def show(title: str, **facts: Any) -> None:
    """A line of numbers, also in the log of a test that passes."""
    sys.stderr.write(f"{title}: {json.dumps(facts, default=str)}\n")


def specnb(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specnb.cli", *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


# Measured, and compared


@dataclass(frozen=True)
class Measured:
    """The faultless run, and margins that the baseline's server gave for made-up splits."""

    run: Run
    prompts: dict[str, Prompt]
    judged: pl.DataFrame
    diary: Diary


@pytest.fixture(scope="session")
def measured(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    plan = plan_from_dict(
        {
            "name": "measured",
            "target": {"model": "demo", "dtype": "float32"},
            "engine": {
                "kind": "vllm",
                "python": vllm_python,
                "env": SERVER_ENV,
                "args": {**SERVER_ARGS, "max_model_len": 1024, "max_num_seqs": 4},
                "start_timeout_s": START_LIMIT_S,
            },
            "arms": ARMS,
            "workload": {
                "set": "builtin-en",
                "lengths": ["short", "medium"],
                "prompts_per_cell": 4,
                "max_tokens": {"short": 12, "medium": 24},
            },
            "sampling": [{"name": "greedy", "temperature": 0.0, "max_tokens": 24}],
            "load": {"concurrency": [1, 4], "warmup_requests": 1, "stall_timeout_s": 300},
        }
    )
    prompts = {prompt.id: prompt for prompt in load_workload("builtin-en").prompts}
    last = [cell for cell in plan_cells(plan) if cell.arm.speculative is None][-1].cell_id
    root = tmp_path_factory.mktemp("measured")
    diary = Diary()
    engines: list[Engine] = []
    judged: list[pl.DataFrame] = []

    def make_engine(plan: Plan) -> Engine:
        engines.append(runner_make_engine(plan))
        return engines[-1]

    def on_cell_done(cell: Cell) -> None:
        diary.note(f"{cell.cell_id} done")
        if cell.cell_id == last:  # while the baseline's server still runs: a judge of its own starts one more
            (path,) = root.iterdir()
            requests = read_run(path).requests
            judged.append(engines[0].judge_splits(made_up_splits(requests), requests, prompts))
            diary.note("judged")

    runner_make_engine = runner.make_engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "make_engine", make_engine)
        try:
            path = measure(
                plan, root=root, progress=Progress(on_message=diary.note, on_cell_done=on_cell_done)
            )
        finally:
            diary.show()
    return Measured(run=read_run(path), prompts=prompts, judged=judged[0], diary=diary)


def made_up_splits(requests: pl.DataFrame) -> pl.DataFrame:
    """Pretended first divergences of the baseline's answers from themselves, at tokens 0 and 3.

    The other token is one that some other answer has there, so that it is a likely one now and then, or the
    answer's own (margin 0).
    """
    answers = requests.filter(concurrency=1).sort("prompt_id")
    rows = []
    for index in (0, 3):
        longer = answers.filter(pl.col("output_token_ids").list.len() > index)
        tokens = sorted({ids[index] for ids in longer["output_token_ids"].to_list()})
        for row in longer.gather_every(5).iter_rows(named=True):
            keys = {name: row[name] for name in ("run_id", "sampling", "concurrency", "prompt_id")}
            own = row["output_token_ids"][index]
            rows += [
                {
                    **keys,
                    **{"arm": "baseline", "repeat": 0, "reference_arm": "baseline", "reference_repeat": 0},
                    **{"index": index, "token_id": token, "reference_token_id": own},
                    **{"margin_nats": None, "margin_fp64_nats": None},
                }
                for token in [own, *tokens][:6]
            ]
    return pl.DataFrame(rows, schema=greedy_splits(requests.clear(), in_process_plan()).schema)


def in_process_plan() -> Plan:
    """The same target, precision, prompts and caps as in the measured plan, without a server."""
    return plan_from_dict(
        {
            "name": "in-process",
            "target": {"model": "demo", "dtype": "float32"},
            "engine": {"kind": "transformers", "device": "cpu"},
            "arms": [{"name": "baseline"}],
            "workload": {
                "set": "builtin-en",
                "lengths": ["short", "medium"],
                "prompts_per_cell": 4,
                "max_tokens": {"short": 12, "medium": 24},
            },
            "sampling": [{"name": "greedy", "temperature": 0.0, "max_tokens": 24}],
            "load": {"concurrency": [4]},
            "logging": {"positions": False, "tokens": False},
        }
    )


@dataclass(frozen=True)
class InProcess:
    """The same prompts through the in-process engine."""

    engine: TransformersEngine
    requests: pl.DataFrame


@pytest.fixture(scope="session")
def in_process(measured: Measured) -> InProcess:
    engine = TransformersEngine(in_process_plan())
    frames = []
    for cell in plan_cells(engine.plan):
        asked = measured.run.requests.filter(arm="baseline", concurrency=1, entropy_tier=cell.tier)
        prompts = [measured.prompts[name] for name in asked.sort("request_id")["prompt_id"]]
        context = CellContext(run_id="in-process", clock=time.perf_counter)
        tables = engine.run_cell(cell, planned_requests(engine.plan, cell, prompts), context)
        frames.append(tables["requests"])
    return InProcess(engine=engine, requests=pl.concat(frames))


def test_a_run_on_a_real_server_is_faultless(measured: Measured) -> None:
    """Every invariant holds. Whether the client kept up is up to the machine; the check must say which."""
    run = measured.run
    assert run.status == "finished"
    assert run.requests.height == 2 * 3 * 2 * 4
    assert (run.requests["status"] == "ok").all()
    findings = {finding.name: finding for finding in check_run(run.path)}
    client = findings.pop("client kept up")
    assert [str(finding) for finding in findings.values() if not finding.ok] == []
    lags = {cell["cell_id"]: cell["client"]["loop_lag_p99_s"] for cell in run.cells}
    show("loop lag p99 in ms", **{name: round(1e3 * lag, 2) for name, lag in lags.items()})
    # On two cores the server's own threads keep the client waiting; it must then say so, and only then.
    late = [name for name, lag in lags.items() if lag > LOOP_LAG_LIMIT_S]
    assert client.ok == (not late), client.detail
    assert client.ok or late[0].split(".")[0] in client.detail
    assert all(cell["client"]["max_in_flight"] == cell["concurrency"] for cell in run.cells)


def test_what_the_manifest_and_cells_say_of_a_real_server(measured: Measured) -> None:
    run = measured.run
    engine = run.manifest["engine"]
    assert engine["label"] == f"vLLM {engine['version']}"
    assert engine["simulated"] is False
    assert engine["target"]["sha256"]
    assert run.manifest["arms"]["ngram"]["arguments"]["max_model_len"] == 1024
    for cell in run.cells:
        server = cell["server"]
        assert server["version"] == engine["version"]
        assert (server["restarts"], server["alive_at_end"]) == (0, True)
        assert server["max_model_len"] == 1024
        assert server["kv_cache_tokens"] > 1024
        assert server["settings"]["enforce_eager"] is True
        assert server["settings"]["dtype"] == "float32"
        assert server["settings"]["enable_prefix_caching"] is False
        assert (run.path / "logs" / server["log"]).stat().st_size > 0
        assert "error" not in server
    assert len({cell["server"]["pid"] for cell in run.cells}) == 2  # one server an arm
    memory = run.table("telemetry").filter(device="host")
    assert memory["cell_id"].n_unique() == len(run.cells)
    assert (memory["memory_used_bytes"] > 500 << 20).all()  # weights in float32 alone are 500 MiB
    text = json.dumps(run.manifest) + "".join(json.dumps(cell) for cell in run.cells)
    assert str(Path.home()) not in text


def test_responses_and_counters_agree_exactly(measured: Measured) -> None:
    """Counters over a cell hold its requests and nothing else: no warm-up, no neighbour, no rounding."""
    run = measured.run
    assert headline_source(run, "ngram").source == "response"
    counts = ["num_drafts", "num_draft_tokens", "num_accepted_tokens"]
    table = reconcile(run).select("cell_id", "source", "usable", *counts)
    response, counters = (
        table.filter(source=name).sort("cell_id").drop("source") for name in ("response", "counters")
    )
    assert response.height == 6
    assert response.equals(counters)
    assert response["usable"].all()
    assert (response["num_drafts"] > 0).all()
    assert response["num_accepted_tokens"].sum() > 0
    tokens = server_tokens(run)
    assert tokens.height == 12
    assert (tokens["num_server_tokens"] == tokens["num_client_tokens"]).all()
    show("acceptance", **{name: int(response[name].sum()) for name in counts})


def test_steps_and_chunks_add_up_to_every_answer(measured: Measured) -> None:
    """Prefill gives one token, which is the first chunk's; the steps emit the rest, request by request."""
    run = measured.run
    sources = {(cell["arm"], cell["steps_source"]) for cell in run.cells}
    assert sources == {("baseline", "one token a step"), ("ngram", "response, each step")}
    assert (run.requests["num_first_chunk_tokens"] == 1).all()
    steps = run.steps.group_by("request_id").agg(
        emitted=pl.col("num_emitted_tokens").sum(),
        drafts=(pl.col("num_draft_tokens") > 0).sum().cast(pl.Int64),
        drafted=pl.col("num_draft_tokens").sum(),
        accepted=pl.col("num_accepted_tokens").sum(),
    )
    chunks = run.table("chunks").group_by("request_id").agg(in_chunks=pl.col("num_tokens").sum())
    told = run.table("acceptance").select(
        "request_id", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "acceptance_histogram"
    )
    rows = (
        run.requests.join(steps, on="request_id", how="left")
        .join(chunks, on="request_id", how="left")
        .join(told, on="request_id", how="left")
        .with_columns(pl.col("emitted", "drafts", "drafted", "accepted").fill_null(0))
    )
    for row in rows.iter_rows(named=True):
        assert row["num_output_tokens"] == len(row["output_token_ids"]) == row["in_chunks"]
        assert row["num_output_tokens"] == 1 + row["emitted"]
        if row["arm"] == "baseline":
            assert (row["drafts"], row["num_drafts"]) == (0, None)
        else:
            assert row["num_drafts"] == row["drafts"] == sum(row["acceptance_histogram"])
            assert row["num_draft_tokens"] == row["drafted"] <= K * row["drafts"]
            assert row["num_accepted_tokens"] == row["accepted"]
    # The order of steps is the stream's: several tokens in a chunk are one step's.
    together = run.table("chunks").filter(pl.col("chunk") > 0, pl.col("num_tokens") > K + 1)
    assert together.is_empty()


def test_decomposition_counts_the_servers_own_iterations(measured: Measured) -> None:
    run = measured.run
    table = decomposition(run)
    assert table.height == 6
    assert table["step_source"].to_list() == ["engine iterations"] * 6
    assert table["reason"].to_list() == [None] * 6
    # One request at a time: each iteration is a prefill or one step of that request. Two sources, one count.
    windows = cell_windows(run)
    alone = [cell for cell in run.cells if cell["concurrency"] == 1]
    assert len(alone) == 6
    for cell in alone:
        requests = run.requests.filter(cell_id=cell["cell_id"])
        steps = run.steps.filter(cell_id=cell["cell_id"])
        assert windows[cell["cell_id"]].engine_iterations == requests.height + steps.height
    shared = table.filter(concurrency=4)
    assert (shared["num_engine_steps"] < shared["num_steps"]).all()
    show("residuals at concurrency 4", values=[round(value, 3) for value in shared["residual"]])


def test_greedy_answers_with_speculation_are_the_baselines(measured: Measured) -> None:
    run = measured.run
    pairs = greedy_pairs(run, arm="ngram")
    assert pairs.height == 24
    show("ngram against baseline", **dict(pairs["split_class"].value_counts().iter_rows()))
    assert set(pairs["split_class"]) <= {"identical", "tie", "near_tie"}
    across = greedy_pairs(run, arm="baseline", reference="baseline", across_concurrency=True)
    assert set(across["split_class"]) <= {"identical", "tie", "near_tie", "unknown"}  # not judged again


def test_greedy_answers_are_the_in_process_engines(measured: Measured, in_process: InProcess) -> None:
    """Both arms at each concurrency against the in-process baseline; any split is a near tie of its law."""
    keys = ["run_id", "sampling", "concurrency", "prompt_id", "arm", "repeat", "status", "output_token_ids"]
    served = measured.run.requests.with_columns(
        arm=pl.format("{} c{}", "arm", "concurrency"), concurrency=pl.lit(4, pl.Int64)
    )
    plan, engine = in_process.engine.plan, in_process.engine
    requests = pl.concat([in_process.requests.select(keys), served.select(keys)])
    splits = engine.judge_splits(greedy_splits(requests, plan), requests, measured.prompts)
    classes = [
        classify_margin(margin, precise, near_tie_nats=near_tie_threshold(measured.run))
        for margin, precise in splits.select("margin_nats", "margin_fp64_nats").iter_rows()
    ]
    show("server against in-process", answers=served.height, splits=splits.height, classes=classes)
    assert set(classes) <= {"tie", "near_tie"}
    lengths = in_process.requests.select("prompt_id", own="num_prompt_tokens")
    joined = measured.run.requests.join(lengths, on="prompt_id")
    assert joined.height == 48
    assert (joined["own"] == joined["num_prompt_tokens"]).all()


def test_the_servers_margins_are_the_in_process_engines(measured: Measured, in_process: InProcess) -> None:
    """Within its first 20 tokens the server gives a margin, beyond them a lower bound of it."""
    judged = measured.judged.with_columns(concurrency=pl.lit(4, pl.Int64))
    requests = in_process.requests
    own = in_process.engine.judge_splits(judged, requests, measured.prompts)
    answers = dict(requests.select("prompt_id", "output_token_ids").iter_rows())
    equal = {0: 0, 3: 0}
    bounds = 0
    for found, expected in zip(judged.iter_rows(named=True), own.iter_rows(named=True), strict=True):
        index = found["index"]
        if answers[found["prompt_id"]][index] != found["reference_token_id"]:
            continue  # a tie has taken the two engines apart
        assert found["margin_nats"] is not None
        if found["token_id"] == found["reference_token_id"]:
            assert found["margin_nats"] == 0
            continue
        distance = expected["margin_nats"] - found["margin_nats"]
        assert distance > -MARGIN_TOLERANCE_NATS
        if distance < MARGIN_TOLERANCE_NATS:
            equal[index] += 1
        else:
            bounds += 1
    show("margins", equal=equal, lower_bounds=bounds)
    assert sum(equal.values()) >= 3


def test_reports_and_gate_take_a_servers_run(measured: Measured, tmp_path: Path) -> None:
    done = specnb("report", measured.run.path, "--out", tmp_path / "report")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "FAILED" not in done.stderr
    pages = sorted(page.name[:2] for page in (tmp_path / "report").glob("0*.html"))
    assert pages == ["00", "02", "03", "04", "05", "09"]
    verdict = json.loads((tmp_path / "report" / "verdict.json").read_text())
    assert [arm["arm"] for arm in verdict["arms"]] == ["ngram"]
    assert (verdict["modelled"], verdict["simulated"]) == (False, False)
    gate = specnb("gate", measured.run.path)
    assert gate.returncode in (0, 1, 3), gate.stderr
    assert gate.stdout.strip() == verdict["arms"][0]["sentence"]
    show("gate", code=gate.returncode, sentence=gate.stdout.strip())


# In trouble


def server_process() -> psutil.Process:
    """The API server that this process has launched."""
    found = []
    for child in psutil.Process().children():
        try:
            if MODULE in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue
    (process,) = found
    return process


def kill_engine_core() -> int:
    """SIGKILL to the engine's process alone, as a crash of its worker looks from outside."""
    names = {child: child.name() for child in server_process().children(recursive=True)}
    (core,) = [child for child, name in names.items() if "EngineCor" in name]
    core.kill()
    return core.pid


def kill_server() -> int:
    """SIGKILL to the server's whole process group."""
    group = server_process().pid
    os.killpg(group, signal.SIGKILL)
    return group


@dataclass
class Troubled:
    """The troubled run: its records, how long each cell took, what was killed, and the diary."""

    run: Run
    cells: dict[str, str]
    seconds: dict[str, float]
    killed: dict[str, int]
    diary: Diary

    def requests(self, name: str) -> pl.DataFrame:
        """Requests of a cell, called as in the fixture, in the order in which they were sent."""
        return self.run.requests.filter(cell_id=self.cells[name]).sort("request_id")

    def facts(self, name: str) -> dict[str, Any]:
        """What `cell.json` says of a cell."""
        (found,) = [cell for cell in self.run.cells if cell["cell_id"] == self.cells[name]]
        return found

    def scrapes(self, name: str) -> list[str]:
        table = self.run.table("scrapes").filter(cell_id=self.cells[name]).sort("scrape")
        return table["body"].to_list()


def troubled_prompts() -> list[dict[str, Any]]:
    """The workload: enough prompts to fill the queue, prompts about the limit, prompts for long answers."""
    lines = [
        {"id": f"queue{n}", "tier": "low", "length": "short", "prompt": f"one two three four {n} {n} {n}"}
        for n in range(8)
    ]
    limit = MAX_MODEL_LEN
    sizes = {
        **{"plain0": 12, "full": limit - SHORT_CAP, "cut": limit - SHORT_CAP + 1, "below": limit - 1},
        **{"at": limit, "above": limit + 1, "far above": 4 * limit, "plain1": 12, "plain2": 12},
    }
    lines += [
        {"id": name, "tier": "medium", "length": "short", "prompt": "the" + " the" * (size - 1)}
        for name, size in sizes.items()
    ]
    lines += [
        {"id": f"{tier}{n}", "tier": tier, "length": "long", "prompt": f"Count: {n} {n + 1} {n + 2} {n}"}
        for tier in ("high", "unlabelled")
        for n in range(10)
    ]
    return lines


@pytest.fixture(scope="session")
def troubled(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Troubled:
    folder = tmp_path_factory.mktemp("troubled")
    lines = troubled_prompts()
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    content = {
        "name": "troubled",
        "target": {"model": "demo", "dtype": "float32"},
        "engine": {
            "kind": "vllm",
            "endpoint": "completions",
            "python": vllm_python,
            "env": SERVER_ENV,
            "args": {**SERVER_ARGS, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 2},
            "start_timeout_s": START_LIMIT_S,
        },
        "arms": ARMS,
        "workload": {
            "set": "prompts.jsonl",
            "tiers": ["low", "medium", "high", "unlabelled"],
            "lengths": ["short", "long"],
            "prompts_per_cell": None,
            "max_tokens": {"short": SHORT_CAP, "long": 64},
        },
        "sampling": [
            {"name": "greedy", "temperature": 0.0, "max_tokens": 64, "ignore_eos": True},
            {"name": "again", "temperature": 0.0, "max_tokens": 64, "ignore_eos": True},
        ],
        "load": {"concurrency": [6], "warmup_requests": 1, "stall_timeout_s": 240},
    }
    (folder / "plan.yaml").write_text(yaml.safe_dump(content))
    plan = read_plan(folder / "plan.yaml")
    found = {(cell.tier, cell.sampling.name): cell for cell in plan_cells(plan) if cell.arm.speculative}
    cells = {
        "queue": found["low", "greedy"],
        "limit": found["medium", "greedy"],
        "core killed": found["high", "greedy"],
        "group killed": found["unlabelled", "greedy"],
        "after": found["low", "again"],
    }
    names = {cell.cell_id: name for name, cell in cells.items()}
    kills: dict[str, Callable[[], int]] = {"core killed": kill_engine_core, "group killed": kill_server}
    killed: dict[str, int] = {}
    seconds: dict[str, float] = {}
    diary = Diary()
    current = ""

    def on_cell(cell: Cell, requests: int) -> None:
        nonlocal current
        current = names[cell.cell_id]
        seconds[current] = time.monotonic()
        diary.note(f"cell '{current}' ({requests} requests)")

    def on_request() -> None:
        if current in kills and current not in killed:
            killed[current] = kills[current]()
            seconds[current] = time.monotonic()  # of these cells the time from the kill on counts
            diary.note(f"killed {killed[current]}")

    def on_cell_done(cell: Cell) -> None:
        seconds[current] = time.monotonic() - seconds[current]
        diary.note(f"cell '{current}' over")

    hooks = Progress(on_message=diary.note, on_cell=on_cell, on_request=on_request, on_cell_done=on_cell_done)
    with pytest.MonkeyPatch.context() as patch:
        # Only these cells: the baseline has no part in this and every start takes most of a minute.
        patch.setattr(runner, "plan_cells", lambda plan: tuple(cells.values()))
        try:
            path = measure(plan, root=folder / "runs", progress=hooks)
        finally:
            diary.show()
    identities = {name: cell.cell_id for name, cell in cells.items()}
    return Troubled(run=read_run(path), cells=identities, seconds=seconds, killed=killed, diary=diary)


def test_more_requests_than_sequences_wait_in_the_servers_queue(troubled: Troubled) -> None:
    """Six requests in flight, two sequences at most: four wait, their TTFT shows it, and all are answered."""
    requests = troubled.requests("queue")
    assert requests["status"].to_list() == ["ok"] * 8
    assert troubled.facts("queue")["client"]["max_in_flight"] == 6
    moments = [(at, 1) for at in requests["first_token_s"]] + [(at, -1) for at in requests["last_token_s"]]
    running = np.cumsum([change for _, change in sorted(moments)])
    assert running.max() == 2
    times = request_latency(requests).sort("request_id")["ttft_s"].to_list()
    # The third to sixth were sent with the first two and had to wait until one of these was over.
    first_end_s = requests["last_token_s"][:2].min()
    for sent_s, first_token_s in requests.select("sent_s", "first_token_s").rows()[2:6]:
        assert sent_s < requests["first_token_s"][0]
        assert first_token_s >= first_end_s
    assert min(times[2:6]) > max(times[:2])
    show("time to the first token in s", values=[round(value, 3) for value in times])


def test_d09_prompts_at_and_over_the_limit_spare_the_others(troubled: Troubled) -> None:
    """Limit 160 tokens: 159 get one token, 160 and more are refused with the server's words, and the drafter,
    which would look past the limit, brings nothing down."""
    found = {row["prompt_id"]: row for row in troubled.requests("limit").iter_rows(named=True)}
    ok = {name: row["num_output_tokens"] for name, row in found.items() if row["status"] == "ok"}
    plain = {f"plain{number}": SHORT_CAP for number in range(3)}
    # vLLM shortens what would not fit instead of refusing it.
    assert ok == {**plain, "full": SHORT_CAP, "cut": SHORT_CAP - 1, "below": 1}
    assert found["below"]["num_prompt_tokens"] == MAX_MODEL_LEN - 1
    refused = {name: row for name, row in found.items() if row["status"] != "ok"}
    assert sorted(refused) == ["above", "at", "far above"]
    for row in refused.values():
        assert (row["status"], row["error_kind"]) == ("error", "http_400")
        assert row["error"].startswith("HTTP 400: ")
        assert (row["num_output_tokens"], row["first_token_s"]) == (None, None)
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in refused["above"]["error"]
    server = troubled.facts("limit")["server"]
    assert (server["alive_at_end"], server["restarts"]) == (True, 0)
    table = failure_table(troubled.requests("limit"), by=["arm"])
    assert table["failures"].to_list() == ["3 http_400"]


def test_a_lost_engine_process_ends_its_cell_and_no_other(troubled: Troubled) -> None:
    """The port is served for seconds after the engine is gone: the next cell must not be sent there."""
    requests = troubled.requests("core killed")
    kinds = set(requests["error_kind"].drop_nulls())
    assert kinds <= {"server_error", "http_500", "truncated", "disconnected", "connect", "server_down"}
    assert "server_error" in kinds or "truncated" in kinds
    assert 1 <= requests.filter(status="ok").height < 10
    assert requests["error"].drop_nulls().len() == requests.filter(pl.col("status") != "ok").height
    assert troubled.seconds["core killed"] < 120
    killed = troubled.facts("core killed")["server"]
    assert killed["alive_at_end"] is False
    assert killed["death"].startswith(("lost its process VLLM::", "ended with exit code"))
    following = troubled.facts("group killed")["server"]
    assert following["restarts"] == 1
    assert following["pid"] != killed["pid"]
    assert troubled.requests("group killed").filter(status="ok").height >= 1


def test_a_killed_server_ends_its_cell_and_is_started_again(troubled: Troubled) -> None:
    requests = troubled.requests("group killed")
    kinds = set(requests["error_kind"].drop_nulls())
    assert kinds <= {"truncated", "disconnected", "connect", "server_down"}
    assert "truncated" in kinds
    assert requests["error_kind"][-1] in ("server_down", "connect")  # nothing was answered after the death
    cut = requests.filter(error_kind="truncated").row(0, named=True)
    assert cut["num_chunks"] > 0
    assert cut["num_output_tokens"] is None  # unknown, not what the chunks hold
    assert troubled.seconds["group killed"] < 120
    assert troubled.facts("group killed")["server"]["death"].startswith("was ended by SIGKILL: ")
    assert troubled.facts("after")["server"]["restarts"] == 2
    assert troubled.facts("after")["server"]["death"] is None
    assert troubled.facts("after")["server"]["log"] == "ngram.r0.start3.log"
    assert troubled.requests("after")["status"].to_list() == ["ok"] * 8
    # A new server gives the same greedy answers as the first one did.
    ids = [troubled.requests(name)["output_token_ids"].to_list() for name in ("queue", "after")]
    assert ids[0] == ids[1]
    logs = sorted(path.name for path in (troubled.run.path / "logs").iterdir())
    assert logs == ["ngram.r0.log", "ngram.r0.start2.log", "ngram.r0.start3.log"]
    for pid in (cell["server"]["pid"] for cell in troubled.run.cells):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_tables_show_what_failed(troubled: Troubled, rng: np.random.Generator) -> None:
    requests = troubled.run.requests
    failures = {row["cell_id"]: row for row in failure_table(requests, by=["cell_id"]).iter_rows(named=True)}
    table = throughput_table(requests, by=["cell_id"], rng=rng)
    rates = {row["cell_id"]: row for row in table.iter_rows(named=True)}
    for name, cell_id in troubled.cells.items():
        failed = troubled.requests(name).filter(pl.col("status") != "ok").height
        assert troubled.facts(name)["num_failed"] == failures[cell_id]["num_failed"] == failed
        assert rates[cell_id]["n"] == troubled.requests(name).height - failed
        show(
            name,
            failures=failures[cell_id]["failures"],
            tokens_per_s=round(rates[cell_id]["value"], 1),
            seconds=round(troubled.seconds[name], 1),
        )
    for name in ("core killed", "group killed"):
        assert failures[troubled.cells[name]]["value"] > 0.3
    counted = dict(
        requests.filter(status="ok").group_by("cell_id").agg(pl.col("num_output_tokens").sum()).rows()
    )
    assert {name: row["num_output_tokens"] for name, row in rates.items()} == counted


def test_a06_a_restart_between_two_scrapes_leaves_acceptance_unknown(troubled: Troubled) -> None:
    """The drafts of both servers are there and their difference looks like a number; it is none."""
    before, after = troubled.scrapes("limit")[-1], troubled.scrapes("after")[-1]
    window = Window.over([parse(before), parse(after)])
    found = window.acceptance(K)
    assert found.reason is not None
    assert found.reason.startswith("counter_reset")
    assert found.mean_acceptance_length is None
    assert (found.num_drafts, found.num_accepted_tokens) == (None, None)
    assert window.engine_iterations is None
    for name in ("queue", "limit", "after"):  # in the cells themselves nothing was reset
        own = Window.over([parse(body) for body in troubled.scrapes(name)])
        assert own.reset is None
        assert own.acceptance(K).mean_acceptance_length is not None
    findings = {found.name: found for found in check_run(troubled.run.path)}
    assert findings["I3 counters never fall"].ok
    assert findings["I4 server and client tokens"].ok
    shown = reconcile(troubled.run).filter(cell_id=troubled.cells["after"], source="counters")
    assert shown["agrees"].to_list() == [True]
