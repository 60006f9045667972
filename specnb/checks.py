"""Invariants of a run directory: what must hold before any number of it is believed.

Reads a run directory and nothing else; imports no engine. Each check is a finding with a
name, whether it holds, and one line that names the first place where it does not. A file
that can't be read fails its own check and is named by those that need it. Separate from
the readers, which stop at the first fault: here every fault is listed. Verdicts ask for
those that make numbers wrong (`contradictions`), so that none rests on such records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import polars as pl

from specnb import schema
from specnb.equivalence import (
    GUESSED_STEPS,
    LOSSY_METHODS,
    degenerate_logprobs,
    inactive_classes,
    not_comparable,
    speculating_arms,
)
from specnb.errors import RecordError, SpecnbError
from specnb.prometheus import Scrape, Window, falling_counter, parse
from specnb.provenance import file_sha256
from specnb.reconciliation import (
    IN_PROCESS,
    TOKEN_TOLERANCE,
    cell_windows,
    client_limited_cells,
    headline_source,
    prefix_cache_table,
    reconcile,
    server_tokens,
    truncation_table,
)
from specnb.records import Run, read_run

TIME_TOLERANCE_S: Final = 0.005

T = TypeVar("T")
_ONCE: Final[WeakKeyDictionary[Run, dict[Callable[[Run], Any], tuple[Any, Any, Any]]]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: its name, whether it holds, one line of detail, and the arm where it does not (if one)."""

    name: str
    ok: bool
    detail: str
    arm: str | None = None


class _Broken(Exception):
    """An invariant does not hold; the text says where, `arm` in which arm (None: not in one alone)."""

    def __init__(self, text: str, arm: str | None = None) -> None:
        super().__init__(text)
        self.arm = arm


def check_run(path: Path | str) -> list[Finding]:
    """Checks every invariant of a run directory.

    Parameters
    ----------
    path
        A run directory, finished or not.

    Returns
    -------
    list of Finding
        In a fixed order: directory, files, tables, then the invariants. A check that does not apply to
        this engine holds, and its detail says why it was not needed.

    Raises
    ------
    RecordError
        The manifest can't be read at all, or no cell is finished.
    """
    run = read_run(path)
    findings = [
        _finding("finished", _finished, run),
        _finding("cells as planned", _cells, run),
        _finding("file digests", _files, run),
        _finding("modelled flag", _modelled, run),
    ]
    readable: set[str] = set()
    for name in schema.TABLES:
        try:
            rows = run.table(name).height
        except SpecnbError as error:
            findings.append(Finding(name=f"table {name}", ok=False, detail=str(error)))
            continue
        readable.add(name)
        detail = f"{rows} rows" if run.has(name) else "not written by this engine"
        findings.append(Finding(name=f"table {name}", ok=True, detail=detail))
    for title, needs, check in _INVARIANTS:
        missing = [name for name in needs if name not in readable]
        if missing:
            detail = f"not checked: {', '.join(missing)} can't be read"
            findings.append(Finding(name=title, ok=False, detail=detail))
        else:
            findings.append(_finding(title, check, run))
    return findings


def refuse_altered_files(run: Run) -> None:
    """Raises RecordError if a file of the run is missing, damaged or edited (its sha256 differs).

    Damage inside a data page reads without an error; every command that ends in a verdict asks this first.
    """
    finding = _finding("file digests", _files, run)
    if not finding.ok:
        raise RecordError(f"{run.path}: {finding.detail}; restore the run directory or measure again")


def once(run: Run, make: Callable[[Run], T]) -> T:
    """`make(run)`, worked out once for an opened run; again if its cells or requests were replaced.

    Parameters
    ----------
    run
        A run.
    make
        A function of a run alone, of a module.
    """
    known = _ONCE.setdefault(run, {})
    entry = known.get(make)
    if entry is None or entry[0] is not run.cells or entry[1] is not run.requests:
        entry = known[make] = (run.cells, run.requests, make(run))
    found: T = entry[2]
    return found


def contradictions(run: Run) -> tuple[Finding, ...]:
    """The invariants that do not hold and without which the run's numbers are wrong.

    Acceptance in range, positions, counters and restarts, server and client tokens, a baseline that
    drafted, output tokens and steps, chunk sums, and acceptance sources that disagree. Left out are those
    that other rules treat cell by cell (`client kept up`, `prefix cache`), arms that differ and arms that
    never drafted.

    Returns
    -------
    tuple of Finding
        In the order of `check_run`, under its names. `arm` is the arm that a finding spoils; None: all, as
        where it is the baseline's. An invariant that fails in several arms has one finding for each.

    Raises
    ------
    RecordError
        A table can't be read.
    """
    return once(run, _contradictions)


def _contradictions(run: Run) -> tuple[Finding, ...]:
    found = []
    baseline = run.plan.baseline.name
    for title, check in _DECISIVE:
        part, named = run, set[str]()
        while not (finding := _finding(title, check, part)).ok:
            if finding.arm in (None, baseline):
                found.append(Finding(name=title, ok=False, detail=finding.detail))
                break
            if finding.arm in named:
                break
            found.append(finding)
            # The others' faults hide behind the first: look at the run without this arm.
            named.add(str(finding.arm))
            part = Run(run.path, run.manifest, tuple(cell for cell in run.cells if cell["arm"] not in named))
    return tuple(found)


def _finding(name: str, check: Callable[[Run], str], run: Run) -> Finding:
    try:
        return Finding(name=name, ok=True, detail=check(run))
    except _Broken as broken:
        return Finding(name=name, ok=False, detail=str(broken), arm=broken.arm)


def _first(frame: pl.DataFrame, bad: pl.Expr, text: str) -> None:
    """Raises for the first row where `bad` is true; `text` is filled in with that row's columns."""
    found = frame.filter(bad.fill_null(False))
    if found.height:
        row = found.row(0, named=True)
        raise _Broken(f"{text.format(**row)} ({found.height} of {frame.height} rows)", arm=row.get("arm"))


def _finished(run: Run) -> str:
    if run.status != "finished":
        raise _Broken(f"status is {run.status}; resume the run with --resume {run.path.name}")
    return "status is finished"


def _cells(run: Run) -> str:
    found = [str(cell["cell_id"]) for cell in run.cells]
    planned = [str(name) for name in run.manifest.get("cell_order", [])]
    missing = [name for name in planned if name not in found]
    if missing:
        raise _Broken(f"{len(missing)} of {len(planned)} planned cells are missing, first {missing[0]}")
    extra = [name for name in found if planned and name not in planned]
    if extra:
        raise _Broken(f"cell {extra[0]} is not in the plan")
    return f"{len(found)} cells"


def _files(run: Run) -> str:
    count = 0
    listed = {str(cell["cell_id"]): cell for cell in run.manifest.get("cells") or []}
    for cell in run.cells:
        folder = run.path / "cells" / str(cell["cell_id"])
        known = listed.get(str(cell["cell_id"]))
        if known is not None and known["files"] != cell["files"]:
            raise _Broken(f"{folder.name}/cell.json: files differ from those in manifest.json; it was edited")
        for name, facts in cell["files"].items():
            _digest(folder / f"{name}.parquet", facts, f"{folder.name}/{name}.parquet")
            count += 1
        strangers = sorted(file.stem for file in folder.glob("*.parquet") if file.stem not in cell["files"])
        if strangers:
            raise _Broken(f"{folder.name}/{strangers[0]}.parquet is not listed in cell.json")
    splits = run.manifest.get("splits")
    if splits is not None:
        _digest(run.path / "splits.parquet", splits, "splits.parquet")
        count += 1
    return f"{count} files as written"


def _digest(path: Path, facts: dict[str, Any], name: str) -> None:
    if not path.exists():
        raise _Broken(f"{name} is missing")
    if file_sha256(path) != facts["sha256"]:
        raise _Broken(f"{name} differs from its sha256; it was edited or damaged")


def _modelled(run: Run) -> str:
    if bool(run.manifest["modelled"]) != run.plan.modelled:
        raise _Broken(f"manifest says modelled {run.modelled}, its plan {run.plan.modelled}")
    for arm in speculating_arms(run.plan):
        method = arm.speculative.rejection_sample_method if arm.speculative else None
        if method in LOSSY_METHODS and not run.modelled:
            raise _Broken(f"arm {arm.name} uses {method} acceptance but the run is not marked modelled")
    if run.manifest["plan_sha256"] != run.plan.sha256:
        raise _Broken("plan_sha256 is not the digest of the plan in the manifest")
    return f"modelled is {str(run.modelled).lower()}"


def _acceptance_range(run: Run) -> str:
    limits = pl.DataFrame(
        {
            "arm": [arm.name for arm in run.plan.arms],
            "limit": [
                arm.speculative.num_speculative_tokens if arm.speculative else 0 for arm in run.plan.arms
            ],
        },
        schema={"arm": pl.String, "limit": pl.Int64},
    )
    _response_figures(run.table("acceptance").join(limits, on="arm", how="left", maintain_order="left"))
    steps = run.steps.join(limits, on="arm", how="left", maintain_order="left")
    _first(
        steps,
        pl.col("num_draft_tokens") > pl.col("limit"),
        "request {request_id} step {step}: {num_draft_tokens} drafts, arm {arm} allows {limit}",
    )
    pooled = (
        steps.filter(pl.col("num_draft_tokens") > 0)
        .group_by("arm", maintain_order=True)
        .agg(
            drafts=pl.len(),
            drafted=pl.col("num_draft_tokens").sum(),
            accepted=pl.col("num_accepted_tokens").sum(),
            limit=pl.col("limit").first(),
        )
    )
    _first(
        pooled,
        (pl.col("accepted") > pl.col("drafted"))
        | (pl.col("drafted") < pl.col("drafts"))
        | (pl.col("drafted") > pl.col("limit") * pl.col("drafts")),
        "arm {arm}: {accepted} accepted, {drafted} drafted in {drafts} drafts of at most {limit}",
    )
    lengths = [
        f"{arm} {1 + accepted / drafts:.3f} of at most {limit + 1}"
        for arm, drafts, accepted, limit in pooled.select("arm", "drafts", "accepted", "limit").iter_rows()
    ]
    return f"mean acceptance length {', '.join(lengths) or 'undefined: no drafts'}"


def _positions(run: Run) -> str:
    if not run.has("positions"):
        return "no positions table"
    counted = (
        run.table("positions")
        .group_by("request_id", "step")
        .agg(
            drafted=pl.len().cast(pl.Int64),
            accepted=pl.col("accepted").sum().cast(pl.Int64),
            reached=pl.col("reached").sum().cast(pl.Int64),
            prefix=(pl.col("accepted").sort_by("position").cast(pl.Int8).diff().fill_null(0) <= 0).all(),
            last=pl.col("position").max(),
        )
    )
    steps = run.steps.join(
        counted, on=["request_id", "step"], how="full", coalesce=True, maintain_order="left"
    ).with_columns(pl.col("drafted", "accepted", "reached").fill_null(0), pl.col("prefix").fill_null(True))
    place = "request {request_id} step {step}: "
    _first(steps, pl.col("arm").is_null(), place + "positions without a step")
    _first(
        steps,
        pl.col("drafted") != pl.col("num_draft_tokens"),
        place + "{drafted} positions, steps say {num_draft_tokens} drafts",
    )
    _first(
        steps,
        pl.col("accepted") != pl.col("num_accepted_tokens"),
        place + "{accepted} accepted positions, steps say {num_accepted_tokens}",
    )
    _first(steps, ~pl.col("prefix"), place + "an accepted position follows a rejected one")
    _first(steps, (pl.col("last") + 1) != pl.col("drafted"), place + "positions do not count from 0")
    _first(
        steps,
        pl.col("reached") != pl.min_horizontal(pl.col("accepted") + 1, pl.col("drafted")),
        place + "{reached} positions reached with {accepted} accepted of {drafted}",
    )
    return "accepted positions add up to the steps' counts and do not rise"


def _response_figures(rows: pl.DataFrame) -> None:
    """Raises for the first response whose acceptance figures are out of range (`limit`: the arm's K)."""
    place = "request {request_id}: its response says "
    drafts, drafted, accepted = (
        pl.col(name) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    said = (
        "{num_accepted_tokens} accepted, {num_draft_tokens} drafted in {num_drafts} drafts of at most {limit}"
    )
    _first(
        rows,
        (accepted > drafted)
        | (accepted > pl.col("limit") * drafts)
        | (drafted > pl.col("limit") * drafts)
        | (drafted < drafts),
        place + said,
    )
    histogram = pl.col("acceptance_histogram")
    _first(
        rows.with_columns(held=histogram.list.sum(), longest=histogram.list.len().cast(pl.Int64) - 1),
        (pl.col("held") != drafts) | (pl.col("longest") > pl.col("limit")),
        place + "{num_drafts} drafts of at most {limit}, its histogram {held} of at most {longest}",
    )


def _counters(run: Run) -> str:
    if not run.has("scrapes"):
        return "no server counters"
    checked = 0
    table = run.table("scrapes").sort("cell_id", "scrape")
    for (cell_id,), rows in table.group_by("cell_id", maintain_order=True):
        scrapes = [parse(body) for body in rows["body"]]
        arm = str(rows["arm"][0])
        for number, scrape in zip(rows["scrape"], scrapes, strict=True):
            if scrape.malformed:
                raise _Broken(f"{cell_id} scrape {number}: {scrape.malformed}", arm)
        for number, before, after in zip(rows["scrape"][1:], scrapes, scrapes[1:], strict=False):
            fallen = falling_counter(before, after)
            if fallen is not None:
                raise _Broken(f"{cell_id} scrape {number}: {_fall(fallen, scrapes)}", arm)
        window = Window.over(scrapes) if len(scrapes) > 1 else None
        if window is not None and window.reset:
            raise _Broken(f"{cell_id}: {window.reset}", arm)
        checked += sum(len(scrapes[-1].samples[name]) for name in scrapes[-1].monotonic)
    return f"{checked} counters never fall"


def _fall(fallen: tuple[str, float, float], scrapes: list[Scrape]) -> str:
    name, high, low = fallen
    return f"counter {name} falls from {high:g} to {low:g} ({Window.over(scrapes).reset})"


def _server_tokens(run: Run) -> str:
    if not run.has("scrapes"):
        return "no server counters"
    table = once(run, server_tokens)
    wrong = table.filter(~pl.col("agrees")).select("cell_id", "arm", "reason")
    for cell_id, arm, reason in wrong.iter_rows():
        kind, _, said = reason.partition(": ")
        raise _Broken(f"{cell_id}: {said} ({kind})", arm)
    checked = table["agrees"].drop_nulls().len()
    unknown = table.filter(pl.col("agrees").is_null())
    rest = f"; unknown in {unknown.height}: {unknown['reason'][0]}" if unknown.height else ""
    return f"server and requests agree within {TOKEN_TOLERANCE:.0%} in {checked} cells{rest}"


def _chunk_times(run: Run) -> str:
    if not run.has("chunks"):
        return "no chunks table"
    spans = (
        run.table("chunks")
        .sort("request_id", "chunk")
        .group_by("request_id", maintain_order=True)
        .agg(
            first=pl.col("received_s").first(),
            last=pl.col("received_s").last(),
            rising=(pl.col("received_s").diff().fill_null(0) >= 0).all(),
            gaps=pl.col("received_s").diff().sum(),
        )
    )
    joined = run.requests.filter(pl.col("status") == "ok").join(
        spans, on="request_id", how="left", maintain_order="left"
    )
    place = "request {request_id}: "
    _first(joined, pl.col("first").is_null(), place + "ok without a chunk")
    _first(joined, ~pl.col("rising"), place + "chunks arrive before their predecessors")
    span = pl.col("last_token_s") - pl.col("first_token_s")
    _first(
        joined.with_columns(span=span),
        (pl.col("gaps") - span).abs() > TIME_TOLERANCE_S + 0.01 * span,
        place + "chunk gaps add up to {gaps:.4f} s, last minus first token is {span:.4f} s",
    )
    return "chunk gaps add up to last minus first token"


def _success(run: Run) -> str:
    ok = run.requests.filter(pl.col("status") == "ok")
    place = "request {request_id}: ok "
    _first(ok, pl.col("first_token_s").is_null(), place + "without a first token")
    _first(ok, pl.col("last_token_s").is_null(), place + "without a last token")
    _first(ok, pl.col("finish_reason").is_null(), place + "without a finish reason")
    _first(
        ok,
        (pl.col("num_output_tokens").fill_null(1) < 1) | (pl.col("num_chunks").fill_null(1) < 1),
        place + "with no token",
    )
    return f"{ok.height} of {run.requests.height} requests are ok, each with tokens and a finish reason"


def _baseline_drafts(run: Run) -> str:
    """That the baseline verified no draft: in its steps, its responses and its server's counters."""
    baseline = run.plan.baseline.name
    own = pl.col("arm") == baseline
    _first(
        run.labelled("steps", columns=("request_id", "arm", "num_draft_tokens")).filter(own),
        pl.col("num_draft_tokens") > 0,
        "request {request_id}: the baseline verified {num_draft_tokens} drafts",
    )
    if run.plan.engine.kind in IN_PROCESS:
        return "the baseline verified no draft"
    _first(
        run.table("acceptance").filter(own),
        pl.col("num_drafts") > 0,
        "request {request_id}: its response says that the baseline verified {num_drafts} drafts",
    )
    windows = once(run, cell_windows)
    for cell in run.cells:
        window = windows.get(cell["cell_id"])
        if cell["arm"] != baseline or window is None:
            continue
        try:
            found = window.acceptance(speculating=False)
        except RecordError as error:
            raise _Broken(f"{cell['cell_id']}: {error}", baseline) from error
        if found.num_drafts:
            text = f"{cell['cell_id']}: the baseline's server verified {found.num_drafts} drafts"
            raise _Broken(text, baseline)
    return "the baseline verified no draft"


def _drafts(run: Run) -> str:
    _baseline_drafts(run)
    if run.plan.engine.kind not in IN_PROCESS:
        return _server_drafts(run)
    steps = run.labelled("steps")
    for arm in speculating_arms(run.plan):
        own = steps.filter(pl.col("arm") == arm.name)
        settings = run.requests.filter(pl.col("arm") == arm.name, pl.col("status") == "ok")["sampling"]
        for sampling in settings.unique(maintain_order=True):
            counts = own.filter(pl.col("sampling") == sampling)["num_draft_tokens"]
            num_steps = len(counts)
            if not (counts > 0).any():
                raise _Broken(
                    f"speculation_inactive: {arm.name} verified no draft in {num_steps} steps under "
                    f"{sampling}; verdicts on those requests are vacuous"
                )
    return "every arm drafted under every sampling setting"


def _server_drafts(run: Run) -> str:
    """That every arm drafted on its server, from whatever source counts drafts."""
    classes = inactive_classes(run)
    for arm, sampling, active, reason in classes.iter_rows():
        if active is False:
            raise _Broken(f"{reason} (arm {arm}, {sampling}); verdicts on those requests are vacuous")
    unknown = classes.filter(pl.col("active").is_null())
    if unknown.height:
        arm, sampling, _, reason = unknown.row(0)
        return f"not known for arm {arm} under {sampling}: {reason}"
    return "every arm drafted under every sampling setting"


def _same_conditions(run: Run) -> str:
    for arm in speculating_arms(run.plan):
        reasons = [reason for reason in not_comparable(run, arm=arm.name) if "status" not in reason]
        if reasons:
            raise _Broken(f"{arm.name}: {reasons[0]}")
    different = [arm.name for arm in run.plan.arms if arm.args]
    if different:
        return f"allowed by the plan: {', '.join(different)} differs in more than speculation"
    return "arms share prompts, prompt tokens and cached share"


def _unknown_is_null(run: Run) -> str:
    failed = run.requests.filter(pl.col("status") != "ok")
    _first(
        failed,
        pl.col("last_token_s").is_null() & (pl.col("num_output_tokens") == 0),
        "request {request_id}: {status} with 0 output tokens; unknown is null",
    )
    if run.has("tokens"):
        zero = degenerate_logprobs(run.table("tokens"))
        if zero:
            raise _Broken(f"logprobs_degenerate: all log probabilities are exactly 0 in request {zero[0]}")
    return "no number stands for an unknown one"


def _pooled(run: Run) -> str:
    if not run.has("tokens"):
        return "no tokens table"
    means = run.table("tokens").group_by("request_id").agg(pooled=pl.col("entropy_nats").mean())
    joined = run.requests.join(means, on="request_id", how="left", maintain_order="left")
    _first(
        joined,
        (pl.col("mean_token_entropy_nats") - pl.col("pooled")).abs() > 1e-6 * (1 + pl.col("pooled")),
        "request {request_id}: mean_token_entropy_nats {mean_token_entropy_nats:.4f}, "
        "its tokens give {pooled:.4f}",
    )
    return "means of requests are those of their tokens"


def _truncation(run: Run) -> str:
    if run.plan.engine.kind not in IN_PROCESS:
        return _server_truncation(run)
    emitted = run.steps.group_by("request_id").agg(emitted=pl.col("num_emitted_tokens").sum())
    joined = run.requests.filter(pl.col("status") == "ok").join(
        emitted, on="request_id", how="left", maintain_order="left"
    )
    joined = joined.with_columns(pl.col("emitted").fill_null(0))
    _first(
        joined,
        pl.col("num_output_tokens") != 1 + pl.col("emitted"),
        "request {request_id}: {num_output_tokens} output tokens, prefill and steps emitted 1 + {emitted}",
    )
    return "output tokens are 1 + those that steps emitted"


def _server_truncation(run: Run) -> str:
    """Output tokens against drafts and accepted tokens of every response that has them, then its steps."""
    table = truncation_table(run)
    for arm, reason in table.filter(~pl.col("holds")).select("arm", "reason").iter_rows():
        raise _Broken(reason, arm)
    told = run.table("acceptance").select("request_id", told="num_drafts", said="num_accepted_tokens")
    stepped = (
        run.steps.group_by("request_id", "arm", maintain_order=True)
        .agg(
            drafts=(pl.col("num_draft_tokens") > 0).sum().cast(pl.Int64),
            accepted=pl.col("num_accepted_tokens").sum(),
            emitted=pl.col("num_emitted_tokens").sum(),
        )
        .join(told, on="request_id", how="left", maintain_order="left")
        .join(
            run.requests.filter(pl.col("status") == "ok").select("request_id", "num_output_tokens"),
            on="request_id",
            how="inner",
            maintain_order="left",
        )
    )
    place = "request {request_id}: "
    _first(
        stepped,
        (pl.col("drafts") != pl.col("told")) | (pl.col("accepted") != pl.col("said")),
        place + "steps hold {drafts} drafts and {accepted} accepted, its response says {told} and {said}",
    )
    _first(
        stepped,
        1 + pl.col("emitted") > pl.col("num_output_tokens"),
        place + "{num_output_tokens} output tokens, prefill and steps emitted 1 + {emitted}",
    )
    if table.is_empty():
        return "no answered request carries acceptance figures"
    overcounted = table.filter("differs").height
    return f"output tokens fit drafts and accepted tokens in {table.height} cells" + (
        f"; in {overcounted} the verifier's length is more than 2 % above the committed one"
        if overcounted
        else ""
    )


def _tokens(run: Run) -> str:
    if not run.has("tokens"):
        return "no tokens table"
    rows = (
        run.table("tokens")
        .sort("request_id", "index")
        .group_by("request_id", maintain_order=True)
        .agg(rows=pl.len().cast(pl.Int64), last=pl.col("index").max(), ids="token_id")
    )
    joined = run.requests.filter(pl.col("status") == "ok").join(
        rows, on="request_id", how="left", maintain_order="left"
    )
    joined = joined.with_columns(pl.col("rows").fill_null(0))
    place = "request {request_id}: "
    _first(
        joined,
        (pl.col("rows") != pl.col("num_output_tokens")) | (pl.col("last") + 1 != pl.col("rows")),
        place + "{rows} token rows, {num_output_tokens} output tokens",
    )
    _first(
        joined, pl.col("ids") != pl.col("output_token_ids"), place + "token rows differ from output_token_ids"
    )
    return "one row a token of every answer"


def _chunk_sums(run: Run) -> str:
    if not run.has("chunks"):
        return "no chunks table"
    sums = (
        run.table("chunks")
        .sort("request_id", "chunk")
        .group_by("request_id", maintain_order=True)
        .agg(
            chunks=pl.len().cast(pl.Int64),
            tokens=pl.col("num_tokens").sum(),
            known=pl.col("num_tokens").is_not_null().all(),
            first_tokens=pl.col("num_tokens").first(),
        )
    )
    joined = run.requests.filter(pl.col("status") == "ok").join(sums, on="request_id", maintain_order="left")
    place = "request {request_id}: "
    _first(
        joined,
        pl.col("chunks") != pl.col("num_chunks"),
        place + "{chunks} chunk rows, num_chunks {num_chunks}",
    )
    _first(
        joined,
        pl.col("known") & (pl.col("tokens") != pl.col("num_output_tokens")),
        place + "chunks hold {tokens} tokens, the answer {num_output_tokens}",
    )
    _first(
        joined,
        pl.col("first_tokens") != pl.col("num_first_chunk_tokens"),
        place + "first chunk holds {first_tokens} tokens, num_first_chunk_tokens {num_first_chunk_tokens}",
    )
    return "chunks add up to the answers"


def _batches(run: Run) -> str:
    if not run.has("engine_steps"):
        return "no engine_steps table"
    counted = (
        run.steps.filter(pl.col("engine_step").is_not_null())
        .group_by("cell_id", "engine_step")
        .agg(requests=pl.len().cast(pl.Int64))
    )
    joined = run.table("engine_steps").join(
        counted, on=["cell_id", "engine_step"], how="left", maintain_order="left"
    )
    joined = joined.with_columns(pl.col("requests").fill_null(0))
    _first(
        joined,
        pl.col("requests") != pl.col("batch_size"),
        "{cell_id} engine step {engine_step}: batch_size {batch_size}, {requests} requests have a step in it",
    )
    orphans = counted.join(run.table("engine_steps"), on=["cell_id", "engine_step"], how="anti")
    _first(orphans, pl.lit(True), "{cell_id} engine step {engine_step}: steps name it but it has no row")
    return "batch sizes are the numbers of requests in them"


def _client(run: Run) -> str:
    limited = client_limited_cells(run)
    for cell_id, reason in limited.select("cell_id", "reason").iter_rows():
        raise _Broken(f"{cell_id}: {reason} ({limited.height} of {len(run.cells)} cells)")
    known = sum(bool(cell.get("client")) for cell in run.cells)
    return f"the client kept up in {known} cells" if known else "no client beside the engine"


def _prefix_cache(run: Run) -> str:
    table = prefix_cache_table(run)
    for cell_id, reason in table.filter("contaminated").select("cell_id", "reason").iter_rows():
        raise _Broken(f"{cell_id}: {reason}; use a nonce, or turn prefix caching off")
    known = table["prefix_cache_hit_rate"].drop_nulls().len()
    return f"no cell was served from another's cache ({known} known)" if known else "no prefix cache counters"


def _sources(run: Run) -> str:
    if run.plan.engine.kind in IN_PROCESS:
        return "one source: the engine's own steps"
    table = once(run, reconcile)
    _no_disagreement(table)
    said = []
    for arm in speculating_arms(run.plan):
        own = table.filter((pl.col("arm") == arm.name) & pl.col("headline") & (pl.col("num_requests") > 0))
        bad = own.filter(~pl.col("usable"))
        if bad.height:
            place = f"{bad['cell_id'][0]}: {bad['source'][0]}"
            raise _Broken(f"{place} is not usable: {bad['reason'][0]}", arm.name)
        # The table names it; only why there is none has to be asked for.
        source, why = (own["source"][0], "") if own.height else headline_source(run, arm.name)
        if source is None and run.plan.engine.kind == "vllm":
            raise _Broken(f"arm {arm.name}: no source of acceptance: {why}")
        said.append(f"{arm.name} from {source or 'nothing'}")
    doubts = table.filter(~pl.col("agrees"))
    rest = f"; {doubts.height} estimates from log or chunks differ" if doubts.height else ""
    return f"acceptance of {', '.join(said) or 'no arm'}{rest}"


def _source_conflicts(run: Run) -> str:
    """That the exact sources agree, but where a cell's responses told nothing: its drafts are guesses."""
    if run.plan.engine.kind in IN_PROCESS:
        return "one source: the engine's own steps"
    told = set(run.table("acceptance")["cell_id"])
    guessed = [cell["cell_id"] for cell in run.cells if cell.get("steps_source") == GUESSED_STEPS]
    guessed = [cell_id for cell_id in guessed if cell_id not in told]
    _no_disagreement(once(run, reconcile).filter(~pl.col("cell_id").is_in(guessed)))
    return "no source contradicts another"


def _no_disagreement(table: pl.DataFrame) -> None:
    """Raises for the first row of `reconcile` where an exact source and the headline disagree."""
    exact = pl.col("source").is_in(["response", "counters"])
    for row in table.filter(exact & ~pl.col("agrees")).iter_rows(named=True):
        raise _Broken(f"{row['cell_id']}: {row['source']} disagrees: {row['reason']}", row["arm"])


_ACCEPTANCE_TABLES: Final = ("requests", "steps", "chunks", "acceptance", "scrapes", "log_lines")

_INVARIANTS: Final[tuple[tuple[str, tuple[str, ...], Callable[[Run], str]], ...]] = (
    ("I1 acceptance in range", ("steps", "acceptance"), _acceptance_range),
    ("I2 positions add up", ("steps", "positions"), _positions),
    ("I3 counters never fall", ("scrapes",), _counters),
    ("I4 server and client tokens", _ACCEPTANCE_TABLES, _server_tokens),
    ("I5 chunk gaps add up", ("requests", "chunks"), _chunk_times),
    ("I6 success has tokens", ("requests",), _success),
    ("I7 drafts in the judged requests", _ACCEPTANCE_TABLES, _drafts),
    ("I8 arms share conditions", ("requests",), _same_conditions),
    ("I9 unknown is null", ("requests", "tokens"), _unknown_is_null),
    ("I10 pooled means", ("requests", "tokens"), _pooled),
    ("output tokens and steps", _ACCEPTANCE_TABLES, _truncation),
    ("token rows", ("requests", "tokens"), _tokens),
    ("chunk sums", ("requests", "chunks"), _chunk_sums),
    ("batch sizes", ("steps", "engine_steps"), _batches),
    ("client kept up", ("requests", "scrapes"), _client),
    ("prefix cache", ("requests", "scrapes"), _prefix_cache),
    ("acceptance sources", _ACCEPTANCE_TABLES, _sources),
)

_DECISIVE: Final[tuple[tuple[str, Callable[[Run], str]], ...]] = (
    ("I1 acceptance in range", _acceptance_range),
    ("I2 positions add up", _positions),
    ("I3 counters never fall", _counters),
    ("I4 server and client tokens", _server_tokens),
    ("I7 drafts in the judged requests", _baseline_drafts),
    ("output tokens and steps", _truncation),
    ("chunk sums", _chunk_sums),
    ("acceptance sources", _source_conflicts),
)
