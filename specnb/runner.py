"""Measuring: a plan becomes a run directory, cell by cell, through whichever engine it names.

The only place where workload, engine and records meet. Cells are independent: each
request's random seed depends on the plan, its arm, prompt and repeat and on nothing that
ran before, so a resumed run gives the tables of an uninterrupted one but for times.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from types import FrameType
from typing import Any

import polars as pl

from specnb import schema
from specnb.config import Arm, Cell, Plan, plan_cells, read_plan
from specnb.engines.base import CellContext, Engine, PlannedRequest, make_engine, request_seed
from specnb.errors import PlanError, RecordError, SpecnbError
from specnb.provenance import git_sha, host_facts, package_versions
from specnb.records import RunWriter, check_resumable, read_manifest, read_run
from specnb.workloads import Prompt, Workload, load_workload, select_prompts, warmup_prompts

DEFAULT_ROOT = Path("data/runs")
WARMUP_TOKENS = 8
# Long enough for every batch size to be met with drafts in it.
SERVER_WARMUP_TOKENS = 32

Prompts = dict[tuple[str, int], tuple[Prompt, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a progress display shows: one call before each cell, after each request, after each cell."""

    on_start: Callable[[int, int], None] = lambda cells, requests: None
    on_message: Callable[[str], None] = lambda line: None
    on_cell: Callable[[Cell, int], None] = lambda cell, requests: None
    on_request: Callable[[], None] = lambda: None
    on_cell_done: Callable[[Cell], None] = lambda cell: None


class Interrupted(SpecnbError):
    """The run was stopped by a signal; finished cells are kept. Holds the run directory's path."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"interrupted; finished cells are kept: resume with --resume {path}")
        self.path = path


def measure(
    plan: Plan, *, root: Path = DEFAULT_ROOT, resume: Path | None = None, progress: Progress | None = None
) -> Path:
    """Measures every cell of a plan that is not finished yet.

    Parameters
    ----------
    plan
        A validated plan.
    root
        Folder for run directories.
    resume
        An unfinished run directory of the same plan.
    progress
        Where progress is shown; nowhere by default.

    Returns
    -------
    Path
        The run directory, status `finished`.

    Raises
    ------
    Interrupted
        SIGINT or SIGTERM came; the run can be resumed.
    SpecnbError
        Bad plan, workload or model (before anything is written), or a failed engine or disk; then
        the run's status is `failed`, finished cells are kept and it can be resumed.
    """
    progress = progress or Progress()
    workload = load_workload(plan.located(plan.workload.set))
    prompts = _prompts(plan, workload)
    if resume is not None:
        # The plan must fit before a model is loaded for it.
        _refuse_changes(check_resumable(resume, plan), {"workload": {"sha256": workload.sha256}}, resume)
    doing = "Loading the target" if plan.engine.kind in ("transformers", "simulated") else "Measuring"
    progress.on_message(f"{doing} ({plan.target.model}, {plan.engine.kind})")
    with _signals():  # until the engine is closed: a second signal must not leave a server behind
        engine = make_engine(plan)
        try:
            facts = _facts(plan, engine, workload)
            if resume is not None:
                _refuse_changes(check_resumable(resume, plan), facts, resume)
                writer = RunWriter.resume(resume, plan)
            else:
                writer = RunWriter.create(root, plan, facts=facts)
            with writer:
                try:
                    _measure_cells(plan, engine, workload, prompts, writer, progress)
                    splits = _judged_splits(plan, engine, prompts, writer)
                except KeyboardInterrupt as interrupt:
                    writer.finalise(status="interrupted")
                    raise Interrupted(writer.path) from interrupt
                except BaseException:
                    writer.finalise(status="failed")
                    raise
                writer.finalise(status="finished", splits=splits)
                return writer.path
        finally:
            engine.close()


def measure_or_reuse(
    plan_path: Path | str, *, root: Path = DEFAULT_ROOT, progress: Progress | None = None
) -> Path:
    """The finished run of a plan file, measured now unless one exists; an unfinished one is resumed.

    Returns
    -------
    Path
        A run directory under `root` of the same plan and workload, measured on a machine with the same
        processor and the same versions of torch and transformers.
    """
    plan = read_plan(plan_path)
    workload_sha256 = load_workload(plan.located(plan.workload.set)).sha256
    unfinished = None
    for file in sorted(Path(root).glob("*/manifest.json"), reverse=True):
        try:
            manifest = read_manifest(file.parent)
        except RecordError:
            continue
        here = {"versions": package_versions(), "host": host_facts(), "workload": {"sha256": workload_sha256}}
        same = all(
            _at(manifest, keys) == _at(here, keys)
            for keys in (
                ("workload", "sha256"),
                ("versions", "torch"),
                ("versions", "transformers"),
                ("host", "processor"),
                ("host", "num_cores"),
            )
        )
        if manifest["plan_sha256"] == plan.sha256 and same:
            if manifest["status"] == "finished":
                if progress is not None:
                    progress.on_message(f"Using the finished run of this plan: {file.parent}")
                return file.parent
            unfinished = unfinished or file.parent
    return measure(plan, root=root, resume=unfinished, progress=progress)


def planned_requests(plan: Plan, cell: Cell, prompts: Sequence[Prompt]) -> list[PlannedRequest]:
    """The requests of one cell, in sending order; the same prompts in the same order in every arm."""
    caps = plan.workload.max_tokens.model_dump()
    return [
        PlannedRequest(
            request_id=f"{cell.cell_id}.{number:04d}",
            prompt=prompt,
            max_tokens=min(caps.get(prompt.length) or cell.sampling.max_tokens, cell.sampling.max_tokens),
            seed=request_seed(
                cell.sampling.seed,
                cell.arm.name,
                cell.sampling.name,
                cell.concurrency,
                prompt.id,
                cell.repeat,
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


def first_divergence(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token at which two answers differ; None if they are equal.

    An answer that is a strict prefix of the other differs at its own length.
    """
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def greedy_splits(requests: pl.DataFrame, plan: Plan) -> pl.DataFrame:
    """First divergences of greedy answers, as `schema.SPLITS` without margins.

    Every arm is compared with the baseline at the same concurrency and repeat, and every arm's
    later repeats with its first (the control).
    """
    greedy = [setting.name for setting in plan.sampling if setting.temperature == 0]
    rows = requests.filter(pl.col("sampling").is_in(greedy), status="ok").select(
        "run_id", "sampling", "concurrency", "prompt_id", "arm", "repeat", "output_token_ids"
    )
    answers = {
        (row["sampling"], row["concurrency"], row["prompt_id"], row["arm"], row["repeat"]): row
        for row in rows.iter_rows(named=True)
    }
    splits: list[dict[str, Any]] = []
    for (sampling, concurrency, prompt_id, arm, repeat), row in answers.items():
        # With a nonce, repeats have different prompts.
        references = [(arm, 0)] if repeat > 0 and not plan.workload.nonce else []
        if arm != plan.baseline.name:
            references.append((plan.baseline.name, repeat))
        for reference_arm, reference_repeat in references:
            reference = answers.get((sampling, concurrency, prompt_id, reference_arm, reference_repeat))
            if reference is None:
                continue
            own, other = row["output_token_ids"], reference["output_token_ids"]
            if own is None or other is None:  # the server returned no ids: only texts can be compared
                continue
            index = first_divergence(own, other)
            if index is not None:
                splits.append(
                    {
                        "run_id": row["run_id"],
                        "sampling": sampling,
                        "concurrency": concurrency,
                        "prompt_id": prompt_id,
                        "arm": arm,
                        "repeat": repeat,
                        "reference_arm": reference_arm,
                        "reference_repeat": reference_repeat,
                        "index": index,
                        "token_id": own[index] if index < len(own) else None,
                        "reference_token_id": other[index] if index < len(other) else None,
                        "margin_nats": None,
                        "margin_fp64_nats": None,
                    }
                )
    return pl.DataFrame(splits, schema=schema.SPLITS.polars_schema)


def _measure_cells(
    plan: Plan,
    engine: Engine,
    workload: Workload,
    prompts: Prompts,
    writer: RunWriter,
    progress: Progress,
) -> None:
    finished = writer.finished_cells()
    cells = [cell for cell in plan_cells(plan) if cell.cell_id not in finished]
    progress.on_start(len(cells), sum(len(prompts[cell.tier, cell.concurrency]) for cell in cells))
    warm: set[tuple[str, int, int]] = set()
    measured = [prompt for chosen in prompts.values() for prompt in chosen]
    context = CellContext(
        run_id=writer.run_id,
        clock=writer.clock,
        on_request_done=progress.on_request,
        on_message=progress.on_message,
        log_dir=writer.path / "logs",
    )
    for cell in cells:
        requests = planned_requests(plan, cell, prompts[cell.tier, cell.concurrency])
        progress.on_cell(cell, len(requests))
        # A launched server is a new one in each repeat.
        served = (cell.arm.name, cell.concurrency, cell.repeat if plan.engine.kind == "vllm" else 0)
        if plan.load.warmup_requests and served not in warm:
            warm.add(served)
            others = _warmup_requests(plan, cell, workload, measured)
            if not others:
                progress.on_message(
                    f"{cell.arm.name}: no warm-up, every prompt of the workload is measured; "
                    "the first requests at each concurrency pay for it"
                )
            engine.warm_up(cell, others, replace(context, on_request_done=lambda: None))
        start_s = writer.clock()
        tables = engine.run_cell(cell, requests, context)
        failed = tables["requests"].filter(pl.col("status") != "ok").height
        summary = {"start_s": start_s, "end_s": writer.clock(), "num_failed": failed, **engine.cell_facts()}
        writer.write_cell(cell, tables, summary=summary)
        progress.on_cell_done(cell)
        if failed and plan.on_error == "stop":
            first = tables["requests"].filter(pl.col("status") != "ok").row(0, named=True)
            raise RecordError(
                f"{cell.cell_id}: request {first['request_id']} failed ({first['error']}); "
                "the plan says on_error: stop"
            )


def _warmup_requests(
    plan: Plan, cell: Cell, workload: Workload, measured: Sequence[Prompt]
) -> list[PlannedRequest]:
    """Requests with prompts that are not measured; for a server at least as many as run at once."""
    on_server = plan.engine.kind in ("vllm", "openai")
    wanted = max(plan.load.warmup_requests, cell.concurrency if on_server else 0)
    others = warmup_prompts(workload, exclude=measured, num_prompts=wanted)
    if on_server and others:  # too few of them come round again
        others = tuple(islice(cycle(others), wanted))
    tokens = SERVER_WARMUP_TOKENS if on_server else WARMUP_TOKENS
    return [
        PlannedRequest(request_id=f"warmup.{number}", prompt=prompt, max_tokens=tokens, seed=number)
        for number, prompt in enumerate(others)
    ]


def _refuse_changes(manifest: dict[str, Any], facts: dict[str, Any], path: Path) -> None:
    """Raises PlanError if what the plan names is no longer what the run was started with."""
    for what, keys in (
        ("workload", ("workload", "sha256")),
        ("target's weights", ("engine", "target", "sha256")),
        ("target's dtype", ("engine", "target", "dtype")),
        ("device", ("engine", "device")),
        ("version of torch", ("versions", "torch")),
        ("version of transformers", ("versions", "transformers")),
        ("drafters", ("arms",)),
    ):
        old, new = _at(manifest, keys), _at(facts, keys)
        if keys[0] in facts and old != new:
            raise PlanError(f"{path}: the {what} changed since the run was started; start a new run")


def _at(content: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def _judged_splits(plan: Plan, engine: Engine, prompts: Prompts, writer: RunWriter) -> pl.DataFrame:
    requests = read_run(writer.path).requests
    by_id = {prompt.id: prompt for chosen in prompts.values() for prompt in chosen}
    return engine.judge_splits(greedy_splits(requests, plan), requests, by_id)


def _prompts(plan: Plan, workload: Workload) -> Prompts:
    """Prompts of every cell by tier and concurrency."""
    found: Prompts = {}
    for tier in plan.workload.tiers:
        for concurrency in plan.load.concurrency:
            chosen = select_prompts(
                workload,
                tier=tier,
                lengths=plan.workload.lengths,
                num_prompts=plan.workload.num_prompts(concurrency),
            )
            if plan.load.mode == "closed" and len(chosen) < concurrency:
                raise PlanError(
                    f"load.concurrency: {concurrency} requests can't be in flight with {len(chosen)} prompts "
                    f"in a cell (tier {tier}); raise workload.prompts_per_cell or lower the concurrency"
                )
            found[tier, concurrency] = chosen
    return found


def _facts(plan: Plan, engine: Engine, workload: Workload) -> dict[str, Any]:
    return {
        "versions": package_versions(),
        "git_sha": git_sha(),
        "host": host_facts(),
        "engine": engine.describe(),
        "arms": {arm.name: _arm_facts(engine, arm) for arm in plan.arms},
        "workload": {"name": workload.name, "sha256": workload.sha256, "num_prompts": len(workload.prompts)},
        "cell_order": [cell.cell_id for cell in plan_cells(plan)],
    }


def _arm_facts(engine: Engine, arm: Arm) -> dict[str, Any]:
    return {"is_baseline": arm.speculative is None, **engine.describe_arm(arm)}


@contextmanager
def _signals() -> Iterator[None]:
    """Turns SIGTERM into KeyboardInterrupt while a run is written, so that batch systems stop it cleanly."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
