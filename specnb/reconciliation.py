"""Acceptance from several sources of one run, set beside each other, and which of them is believed.

A server tells about acceptance four times: in its responses, in its counters, in its log and, to a client
that knows the tokens of each chunk, in its stream. Each has its own blind spot (warm-up, other
people's requests, restarts, intervals, merged chunks), so agreement is evidence and disagreement a
finding. What the client asked for is held against what the server saw in the same way. Reads
run directories; imports no engine. Separate from `acceptance`, which holds the definitions, and from
`prometheus`, which knows no run.

Sources: `engine` is the in-process engine's steps, exact. `response` is the acceptance fields of answered
requests (`acceptance` table, else the steps of these requests). `counters` are differences of /metrics over
the cell. `log` is its statistics lines. `chunks` are the tokens a chunk after the first, one chunk taken for
one target step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import polars as pl

from specnb.acceptance import TRUNCATION_TOLERANCE, AcceptanceCounts, committed_acceptance_length
from specnb.config import Arm, Plan
from specnb.errors import RecordError
from specnb.prometheus import INACTIVE, METRICS_MISSING, Window, parse, spec_log_lines
from specnb.records import Run

SOURCES: Final = ("engine", "response", "counters", "log", "chunks")
IN_PROCESS: Final = ("transformers", "simulated")
TOKEN_TOLERANCE: Final = 0.01
LOG_TOLERANCE: Final = 0.05
LOG_COVERAGE: Final = (0.5, 1.5)
LOOP_LAG_LIMIT_S: Final = 0.010
CONTAMINATED_RATE: Final = 0.1
RATE_TOLERANCE: Final = 0.05
PROMPT_TOLERANCE: Final = 16
"""Prompt tokens a request by which a server and its requests may differ."""

WHY: Final = {
    "engine": "the in-process engine recorded every step",
    "response": "response fields of every answered request: no warm-up and no other traffic in them",
    "counters": "the server's counters over each cell",
    "log": "the server's log lines, whose intervals do not begin and end with the cells",
    "chunks": "an estimate from the tokens a chunk",
}
_CELL: Final = ("cell_id", "arm", "entropy_tier", "concurrency", "sampling", "repeat")
_CELL_SCHEMA: Final = {
    "cell_id": pl.String(),
    "arm": pl.String(),
    "entropy_tier": pl.String(),
    "concurrency": pl.Int64(),
    "sampling": pl.String(),
    "repeat": pl.Int64(),
}
# Output tokens that drafts don't account for: below 0 tokens were cut off, above it there were steps without
# a draft.
_GAP: Final = pl.col("num_output_tokens") - 1 - pl.col("num_accepted_tokens") - pl.col("num_drafts")
_RECONCILIATION_SCHEMA: Final = pl.Schema(
    {
        **_CELL_SCHEMA,
        "source": pl.String(),
        "num_requests": pl.Int64(),
        "num_failed": pl.Int64(),
        "num_drafts": pl.Int64(),
        "num_draft_tokens": pl.Int64(),
        "num_accepted_tokens": pl.Int64(),
        "mean_acceptance_length": pl.Float64(),
        "committed_acceptance_length": pl.Float64(),
        "usable": pl.Boolean(),
        "headline": pl.Boolean(),
        "agrees": pl.Boolean(),
        "reason": pl.String(),
    }
)
_TRUNCATION_SCHEMA: Final = pl.Schema(
    {
        **_CELL_SCHEMA,
        "num_requests": pl.Int64(),
        "num_output_tokens": pl.Int64(),
        "num_drafts": pl.Int64(),
        "num_accepted_tokens": pl.Int64(),
        "min_truncated_tokens": pl.Int64(),
        "min_steps_without_draft": pl.Int64(),
        "verifier_acceptance_length": pl.Float64(),
        "committed_low": pl.Float64(),
        "committed_high": pl.Float64(),
        "differs": pl.Boolean(),
        "holds": pl.Boolean(),
        "worst_request_id": pl.String(),
        "reason": pl.String(),
    }
)


class HeadlineSource(NamedTuple):
    """The source that an arm's acceptance is quoted from (None: there is none), and why."""

    source: str | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """What one source says about one cell; `usable` means complete and free of known faults."""

    drafts: int | None = None
    draft_tokens: int | None = None
    accepted: int | None = None
    committed: float | None = None
    usable: bool = False
    reason: str | None = None

    @property
    def length(self) -> float | None:
        return 1 + self.accepted / self.drafts if self.drafts and self.accepted is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _CellFrames:
    """One cell's rows of every table that a source needs."""

    arm: Arm
    cell: Mapping[str, Any]
    requests: pl.DataFrame
    acceptance: pl.DataFrame
    steps: pl.DataFrame
    chunks: pl.DataFrame
    log: Sequence[str]
    scrapes: Sequence[str]
    plan: Plan
    baseline_chunk: float | None = None

    @property
    def guessed(self) -> bool:
        """Whether the steps were guessed from chunks."""
        return self.cell.get("steps_source") == "chunks"

    @property
    def answered(self) -> pl.DataFrame:
        return self.requests.filter(pl.col("status") == "ok")

    @property
    def longest(self) -> int:
        return self.arm.speculative.num_speculative_tokens if self.arm.speculative else 0


def reconcile(run: Run) -> pl.DataFrame:
    """What every source says about the acceptance of every speculating cell, and whether they agree.

    Parameters
    ----------
    run
        A run of any engine; one that is not a server has the source `engine` alone.

    Returns
    -------
    pl.DataFrame
        Grain: speculating cell x source. Columns: cell_id, arm, entropy_tier, concurrency, sampling,
        repeat, source (`SOURCES`), num_requests (answered), num_failed, num_drafts, num_draft_tokens,
        num_accepted_tokens (chunks: chunks after the first, null, their tokens - 1),
        mean_acceptance_length (the verifier's, bonus token included; null without drafts, never 1),
        committed_acceptance_length (what users got, see `truncation_table`; null where a source can't
        say), usable (complete, nothing known against it), headline (`headline_source` of the arm),
        agrees (with the headline's row of the cell; null for that row itself and where there is nothing
        to compare), reason (why a number is null or not usable, or a remark).

    Notes
    -----
    Agreement: counts and length within 1 % (length alone where requests failed); log lines within 5 % where
    they cover half to one and a half of the cell; chunks within 2 % of the tokens a target step.
    """
    frames = _cell_frames(run)
    rows = [row for cell in frames for row in _cell_rows(run, cell)]
    table = pl.DataFrame(rows, schema=_RECONCILIATION_SCHEMA)
    chosen = {arm.name: _chosen(table, arm.name).source for arm in run.plan.arms if arm.speculative}
    expected = {cell.cell["cell_id"]: _tokens_per_step(cell) for cell in frames}
    return pl.DataFrame(
        [_compared(row, rows, chosen[row["arm"]], expected[row["cell_id"]]) for row in rows],
        schema=_RECONCILIATION_SCHEMA,
    )


def headline_source(run: Run, arm: str) -> HeadlineSource:
    """The source that an arm's acceptance is taken from, and why.

    The first of `SOURCES` that is usable in every cell with an answered request; where none is, the one
    that is usable in most. None if no source is usable anywhere; the reason then says what was missing.

    Raises
    ------
    ValueError
        The arm is not in the plan or does not speculate.
    """
    if arm not in {known.name for known in run.plan.arms if known.speculative}:
        raise ValueError(f"arm '{arm}' does not speculate in this plan; it has no acceptance")
    return _chosen(reconcile(run), arm)


def acceptance_sources(run: Run) -> pl.DataFrame:
    """Every source's acceptance pooled over the cells of a request class: the notebook's table.

    Returns
    -------
    pl.DataFrame
        Grain: arm x sampling x source. Columns: the keys, headline, num_cells, num_usable_cells,
        num_agreeing_cells, num_disagreeing_cells, num_requests, num_failed, num_drafts,
        num_accepted_tokens, mean_acceptance_length (sum over sum of the usable cells that drafted),
        num_inactive_cells (0 drafts: left out of the length, never counted as 1), reason (the first
        cell's that has one).
    """
    keys = ["arm", "sampling", "source"]
    usable, drafted = pl.col("usable"), pl.col("num_drafts") > 0
    return (
        reconcile(run)
        .group_by(keys, maintain_order=True)
        .agg(
            pl.col("headline").first(),
            pl.len().cast(pl.Int64).alias("num_cells"),
            usable.sum().cast(pl.Int64).alias("num_usable_cells"),
            pl.col("agrees").fill_null(False).sum().cast(pl.Int64).alias("num_agreeing_cells"),
            (~pl.col("agrees")).fill_null(False).sum().cast(pl.Int64).alias("num_disagreeing_cells"),
            pl.col("num_requests", "num_failed").sum(),
            (usable & ~drafted).fill_null(False).sum().cast(pl.Int64).alias("num_inactive_cells"),
            pl.col("num_drafts").filter(usable).sum(),
            pl.col("num_accepted_tokens").filter(usable).sum(),
            pl.col("reason").drop_nulls().first(),
        )
        .with_columns(
            pl.when(pl.col("num_usable_cells") == 0)
            .then(None)
            .otherwise(pl.col("num_drafts", "num_accepted_tokens"))
            .name.keep()
        )
        .with_columns(
            pl.when(pl.col("num_drafts") > 0)
            .then(1 + pl.col("num_accepted_tokens") / pl.col("num_drafts"))
            .alias("mean_acceptance_length")
        )
        .select(*keys, "headline", pl.exclude(*keys, "headline", "reason"), "reason")
    )


def request_drafts(run: Run) -> pl.DataFrame:
    """Drafts of every request as far as its own steps or response say.

    Returns
    -------
    pl.DataFrame
        request_id, num_drafts (null: unknown, not 0), source (`engine`, `response`, null).
    """
    in_process = run.plan.engine.kind in IN_PROCESS
    steps = run.steps.group_by("request_id").agg(steps=(pl.col("num_draft_tokens") > 0).sum().cast(pl.Int64))
    told = _filled(run.table("acceptance")).select("request_id", told="num_drafts")
    joined = (
        run.requests.select("request_id", "arm")
        .join(steps, on="request_id", how="left", maintain_order="left")
        .join(told, on="request_id", how="left", maintain_order="left")
    )
    if in_process:
        joined = joined.with_columns(pl.col("steps").fill_null(0))
    source = "engine" if in_process else "response"
    drafts = pl.col("steps") if in_process else pl.coalesce("told", "steps")
    return joined.select(
        "request_id",
        drafts.alias("num_drafts"),
        pl.when(drafts.is_not_null()).then(pl.lit(source)).alias("source"),
    )


def truncation_table(run: Run) -> pl.DataFrame:
    """The identity of output tokens and steps, request by request, pooled by cell.

    output tokens = 1 (prefill) + sum over drafts of (accepted + 1) + steps without a draft - truncated ones.
    A server reports output tokens, drafts and accepted tokens; the two other terms can only be bounded:
    the last step alone is cut, by at most K tokens.

    Returns
    -------
    pl.DataFrame
        Grain: speculating cell whose answered requests carry figures. Columns: the cell's keys,
        num_requests, num_output_tokens, num_drafts, num_accepted_tokens, min_truncated_tokens and
        min_steps_without_draft (smallest values that fit each request), verifier_acceptance_length (before
        truncation), committed_high (what users got a step, if only steps that must be had no draft) and
        committed_low (if as many as possible had none), differs (verifier above committed_high by more
        than 2 %), holds (no request needs more than K truncated tokens), worst_request_id, reason.

    References
    ----------
    vLLM counts acceptance before its stop check (`vllm/v1/core/sched/scheduler.py`, issue 56101).
    """
    rows = []
    for cell in _cell_frames(run):
        found = _with_figures(cell).filter(pl.col("num_output_tokens").is_not_null())
        if found.is_empty():
            continue
        found = found.with_columns(gap=_GAP).with_columns(
            without=pl.max_horizontal(pl.col("gap"), 0), cut=pl.max_horizontal(-pl.col("gap"), 0)
        )
        drafts, accepted, tokens = (
            _total(found, name) for name in ("num_drafts", "num_accepted_tokens", "num_output_tokens")
        )
        without = _total(found, "without")
        # A request may lose up to K tokens at its end, each of which hides one more step without a draft.
        most = int(found.select((pl.col("gap") + cell.longest).clip(0).sum()).item())
        verifier = 1 + accepted / drafts if drafts else None
        high = _committed(tokens - without, found.height, drafts)
        low = _committed(max(tokens - most, found.height), found.height, drafts)
        worst = found.sort("gap").row(0, named=True)
        holds = worst["cut"] <= cell.longest
        differs = verifier is not None and high is not None and verifier > (1 + TRUNCATION_TOLERANCE) * high
        reason = None
        if not holds:
            reason = (
                f"request {worst['request_id']}: {worst['num_output_tokens']} output tokens, "
                f"1 + {worst['num_drafts']} drafts + {worst['num_accepted_tokens']} accepted need "
                f"{worst['cut']} truncated tokens, more than K = {cell.longest}"
            )
        elif differs:
            reason = (
                f"the verifier's {verifier:.2f} counts tokens past a stop or limit: {high:.2f} were committed"
            )
        rows.append(
            {
                **{key: cell.cell[key] for key in _CELL},
                "num_requests": found.height,
                "num_output_tokens": tokens,
                "num_drafts": drafts,
                "num_accepted_tokens": accepted,
                "min_truncated_tokens": _total(found, "cut"),
                "min_steps_without_draft": without,
                "verifier_acceptance_length": verifier,
                "committed_low": low,
                "committed_high": high,
                "differs": differs,
                "holds": holds,
                "worst_request_id": worst["request_id"],
                "reason": reason,
            }
        )
    return pl.DataFrame(rows, schema=_TRUNCATION_SCHEMA)


def server_tokens(run: Run) -> pl.DataFrame:
    """Tokens and requests that the server counted in each cell beside those that the run holds.

    Returns
    -------
    pl.DataFrame
        Grain: cell with scrapes. Columns: cell_id, arm, num_server_tokens (generated; null: not counted, or
        reset), num_client_tokens, num_uncertain_tokens (most that requests of unknown length may hold),
        num_server_prompt_tokens, num_client_prompt_tokens (null: some request does not tell),
        num_server_requests (finished), num_client_requests (sent), agrees (null where generated tokens are
        unknown and nothing else disagrees), reason: begins with `foreign_traffic` (the server did more),
        `lost_tokens` (it generated fewer), or says why there is no answer.

    Notes
    -----
    Generated tokens may differ by 1 %, prompt tokens (cached ones included, as vLLM counts them) by 1 % or
    16 a request, requests by 1 %. Only an excess of prompt tokens or requests counts: llama.cpp leaves
    cached tokens out, and servers do not count requests that they reject.
    """
    rows = []
    for cell in _cell_frames(run, speculating=False):
        if not cell.scrapes:
            continue
        rows.append(
            {"cell_id": cell.cell["cell_id"], "arm": cell.arm.name, **_server_and_client(cell)._asdict()}
        )
    return pl.DataFrame(
        rows,
        schema={
            "cell_id": pl.String,
            "arm": pl.String,
            "num_server_tokens": pl.Int64,
            "num_client_tokens": pl.Int64,
            "num_uncertain_tokens": pl.Int64,
            "num_server_prompt_tokens": pl.Int64,
            "num_client_prompt_tokens": pl.Int64,
            "num_server_requests": pl.Int64,
            "num_client_requests": pl.Int64,
            "agrees": pl.Boolean,
            "reason": pl.String,
        },
    )


def client_limited_cells(run: Run) -> pl.DataFrame:
    """Cells in which the client, not the server, set the pace: they are no measurement of their concurrency.

    Returns
    -------
    pl.DataFrame
        Grain: limited cell. Columns: cell_id, arm, concurrency, max_in_flight, max_requests_running (of
        the server, from scrapes; null without), loop_lag_p99_s, reason: begins with `client_limited`, for
        fewer requests in flight than a closed loop with work left keeps, a loop lag (99th percentile)
        above 10 ms, or what else the client noticed itself. Cells without `client` facts have no row.
    """
    windows = cell_windows(run)
    sizes = dict(run.requests.group_by("cell_id").len().iter_rows())
    rows = []
    for cell in run.cells:
        facts = cell.get("client")
        if not facts:
            continue
        running = windows[cell["cell_id"]].max_requests_running if cell["cell_id"] in windows else None
        flight, lag = facts.get("max_in_flight"), facts.get("loop_lag_p99_s")
        wanted = min(cell["concurrency"], sizes.get(cell["cell_id"], 0))
        reasons = []
        if run.plan.load.mode == "closed" and flight is not None and 0 < flight < wanted:
            seen = "" if running is None else f", the server ran at most {running}"
            reasons.append(f"at most {flight} of {wanted} requests in flight{seen}")
        if lag is not None and lag > LOOP_LAG_LIMIT_S:
            reasons.append(f"loop lag p99 {1000 * lag:.0f} ms is above {1000 * LOOP_LAG_LIMIT_S:.0f} ms")
        # The client's own words for what is judged here too are left out.
        noticed = (str(reason) for reason in facts.get("limited") or ())
        reasons += [reason for reason in noticed if not reason.startswith(("loop lag", "at most"))]
        if reasons:
            rows.append(
                {
                    "cell_id": cell["cell_id"],
                    "arm": cell["arm"],
                    "concurrency": cell["concurrency"],
                    "max_in_flight": flight,
                    "max_requests_running": running,
                    "loop_lag_p99_s": lag,
                    "reason": f"client_limited: {'; '.join(dict.fromkeys(reasons))}",
                }
            )
    return pl.DataFrame(
        rows,
        schema={
            "cell_id": pl.String,
            "arm": pl.String,
            "concurrency": pl.Int64,
            "max_in_flight": pl.Int64,
            "max_requests_running": pl.Int64,
            "loop_lag_p99_s": pl.Float64,
            "reason": pl.String,
        },
    )


def prefix_cache_table(run: Run) -> pl.DataFrame:
    """Share of prompt tokens that each cell found in the server's prefix cache, beside the baseline's.

    Returns
    -------
    pl.DataFrame
        Grain: cell with counters or with cached tokens in its usage. Columns: the cell's keys,
        prefix_cache_hit_rate (hits / tokens looked up over the cell, summed over engines; where the
        counters are absent or were reset the share of cached tokens that usage tells of, at least; null
        where neither tells), baseline_hit_rate (of the same tier, concurrency, sampling and repeat),
        contaminated, reason. A cell is contaminated above 10 %, unless the plan turns prefix caching on, or
        if it differs from the baseline by more than 5 points: no speedup is taken between a cold and a warm
        arm.
    """
    windows = cell_windows(run)
    rates = _cached_by_usage(run)
    for cell_id, window in windows.items():
        counted = window.prefix_cache_hit_rate
        rates[cell_id] = rates.get(cell_id) if counted is None else counted
    cells = [cell for cell in run.cells if cell["cell_id"] in rates]
    place = ("entropy_tier", "concurrency", "sampling", "repeat")
    baseline = {
        tuple(cell[key] for key in place): rates[cell["cell_id"]]
        for cell in cells
        if cell["arm"] == run.plan.baseline.name
    }
    args = {arm.name: {**run.plan.engine.args, **arm.args} for arm in run.plan.arms}
    rows = []
    for cell in cells:
        rate = rates[cell["cell_id"]]
        other = baseline.get(tuple(cell[key] for key in place))
        wanted = args[cell["arm"]].get("enable_prefix_caching") is True
        reasons = []
        if rate is not None and rate > CONTAMINATED_RATE and not wanted:
            reasons.append(f"{rate:.0%} of its prompt tokens came from an earlier cell's prefix cache")
        if rate is not None and other is not None and abs(rate - other) > RATE_TOLERANCE:
            reasons.append(f"prefix cache {rate:.0%}, the baseline's {other:.0%}: no speedup between them")
        rows.append(
            {
                **{key: cell[key] for key in _CELL},
                "prefix_cache_hit_rate": rate,
                "baseline_hit_rate": other,
                "contaminated": bool(reasons),
                "reason": "; ".join(reasons) or None,
            }
        )
    return pl.DataFrame(
        rows,
        schema={
            **_CELL_SCHEMA,
            "prefix_cache_hit_rate": pl.Float64(),
            "baseline_hit_rate": pl.Float64(),
            "contaminated": pl.Boolean(),
            "reason": pl.String(),
        },
    )


def _cached_by_usage(run: Run) -> dict[str, float | None]:
    """Least share of prompt tokens that usage calls cached, by cell; cells that tell of none are left out.

    vLLM leaves the field out of answers without a cached token.
    """
    told = (
        run.requests.filter(pl.col("num_prompt_tokens") > 0)
        .group_by("cell_id")
        .agg(
            pl.col("num_cached_tokens", "num_prompt_tokens").sum(),
            told=pl.col("num_cached_tokens").is_not_null().any(),
        )
        .filter("told")
    )
    share = pl.col("num_cached_tokens") / pl.col("num_prompt_tokens")
    return dict(told.select("cell_id", share).iter_rows())


def cell_windows(run: Run) -> dict[str, Window]:
    """The counter window of every cell with two scrapes or more, by cell id."""
    found: dict[str, Window] = {}
    if run.has("scrapes"):
        table = run.table("scrapes").sort("cell_id", "scrape")
        for (cell_id,), scrapes in table.group_by("cell_id", maintain_order=True):
            if scrapes.height >= 2:
                found[str(cell_id)] = Window.over([parse(body) for body in scrapes["body"]])
    return found


# Sources


def _from_steps(cell: _CellFrames) -> _Figures:
    if cell.answered.is_empty():
        return _Figures(reason="no request was answered")
    drafted = cell.steps.filter(pl.col("num_draft_tokens") > 0)
    found = _checked(
        cell,
        drafts=drafted.height,
        draft_tokens=_total(drafted, "num_draft_tokens"),
        accepted=_total(drafted, "num_accepted_tokens"),
        committed=_total(drafted, "num_emitted_tokens") / drafted.height if drafted.height else None,
    )
    return found


def _from_response(cell: _CellFrames) -> _Figures:
    answered = cell.answered
    if answered.is_empty():
        return _Figures(reason="no request was answered")
    conflict = _histogram_conflict(cell.acceptance)
    if conflict:
        return _Figures(reason=conflict)
    found = _with_figures(cell)
    if found.is_empty():
        return _Figures(
            reason="no response carried acceptance figures (vLLM gives them with "
            "--per-request-spec-decode-metrics)"
        )
    draft_tokens = None
    if found["num_draft_tokens"].null_count() == 0:
        draft_tokens = _total(found, "num_draft_tokens")
    lengths = found.filter(pl.col("num_output_tokens").is_not_null())
    committed = None
    if lengths.height == found.height:
        without = int(lengths.select(_GAP.clip(0).sum()).item())
        committed = _committed(
            _total(lengths, "num_output_tokens") - without, lengths.height, _total(found, "num_drafts")
        )
    figures = _checked(
        cell,
        drafts=_total(found, "num_drafts"),
        draft_tokens=draft_tokens,
        accepted=_total(found, "num_accepted_tokens"),
        committed=committed,
    )
    if found.height < answered.height:
        return _marked(figures, f"only {found.height} of {answered.height} answers carry figures")
    if figures.length and committed and figures.length > (1 + TRUNCATION_TOLERANCE) * committed:
        note = f"verifier {figures.length:.2f}, committed {committed:.2f}: tokens past a stop or limit count"
        return _noted(figures, note)
    return figures


def _from_counters(cell: _CellFrames) -> _Figures:
    if len(cell.scrapes) < 2:
        return _Figures(reason="no scrapes of /metrics before and after the cell")
    window = Window.over([parse(body) for body in cell.scrapes])
    try:
        found = window.acceptance(cell.longest, model=_model(cell, window))
    except RecordError as error:
        return _Figures(reason=str(error))
    if found.num_drafts is None or (found.reason is not None and found.num_drafts > 0):
        return _Figures(reason=found.reason)
    if found.num_drafts and found.num_accepted_tokens is None:
        return _Figures(drafts=found.num_drafts, reason="the server does not count accepted tokens")
    figures = _checked(
        cell,
        drafts=found.num_drafts,
        draft_tokens=found.num_draft_tokens,
        accepted=found.num_accepted_tokens,
        positions=found.accepted_per_position,
        inactive=found.reason,
    )
    both = _server_and_client(cell)
    if both.agrees is False:
        return _marked(figures, both.reason or "")
    if window.idle_change and both.agrees is None:
        return _marked(figures, window.idle_change)
    remarks = [*found.flags]
    if found.by_engine:
        lengths = ", ".join(
            f"{name}: "
            + ("none" if counts.mean_acceptance_length is None else f"{counts.mean_acceptance_length:.2f}")
            for name, counts in found.by_engine.items()
        )
        remarks.append(f"{len(found.by_engine)} engines, lengths {lengths}")
    if window.idle_change:
        remarks.append(window.idle_change)
    return _noted(figures, "; ".join(remarks)) if remarks else figures


def _from_log(cell: _CellFrames) -> _Figures:
    lines = spec_log_lines("\n".join(cell.log))
    if not lines:
        return _Figures(reason="no SpecDecoding line was logged in the cell")
    drafts = [line.num_drafts for line in lines]
    accepted = sum(line.num_accepted_tokens for line in lines)
    draft_tokens = sum(line.num_draft_tokens for line in lines)
    if any(count is None for count in drafts):
        return _Figures(
            draft_tokens=draft_tokens, accepted=accepted, reason="a line's count of drafts can't be recovered"
        )
    figures = _checked(
        cell,
        drafts=sum(count for count in drafts if count is not None),
        draft_tokens=draft_tokens,
        accepted=accepted,
    )
    rough = "" if all(line.num_drafts_exact for line in lines) else "; drafts recovered from rounded lengths"
    return _noted(figures, f"{len(lines)} lines of the server's own intervals{rough}")


def _from_chunks(cell: _CellFrames) -> _Figures:
    if cell.chunks.is_empty():
        return _Figures(reason="no chunk of an answered request")
    later = cell.chunks.filter(pl.col("chunk") > 0)
    if later["num_tokens"].null_count():
        return _Figures(reason="the tokens a chunk are not known")
    if later.is_empty():
        return _Figures(reason="every answer came in one chunk")
    largest = int(later.select(pl.col("num_tokens").max()).item())
    figures = _Figures(
        drafts=later.height,
        accepted=_total(later, "num_tokens") - later.height,
        usable=True,
        reason="estimate: each chunk after the first is taken for one target step",
    )
    if doubt := _chunk_doubt(cell):
        return _marked(figures, doubt)
    if largest > cell.longest + 1:
        return _marked(
            figures, f"a chunk of {largest} tokens is more than one step of at most {cell.longest + 1}"
        )
    return figures


def _chunk_doubt(cell: _CellFrames) -> str | None:
    """Why several tokens in a chunk show no draft in this cell; None if they do."""
    if len(cell.scrapes) > 1:
        window = Window.over([parse(body) for body in cell.scrapes])
        if not window.reset and window.after.lacks_acceptance:
            return (
                f"{METRICS_MISSING}: the server counts no drafts, so chunks of several tokens are merged "
                "ones (stream_interval?)"
            )
    base = cell.baseline_chunk
    if base is None or base <= 1:
        return None
    later = cell.chunks.filter(pl.col("chunk") > 0)
    own = _total(later, "num_tokens") / later.height if later.height else 1.0
    if base > 1 + TRUNCATION_TOLERANCE or own <= base + TRUNCATION_TOLERANCE:
        return (
            f"the baseline's chunks hold {base:.2f} tokens too: chunks of several tokens are merged ones "
            "(stream_interval?)"
        )
    return None


def void_chunks(run: Run) -> dict[str, str]:
    """Why several tokens in a chunk show no draft, for each cell of a server in which they don't.

    A server of vLLM that speculates has its family of counters, and a baseline sends single tokens.
    """
    if run.plan.engine.kind in IN_PROCESS:
        return {}
    doubts = {cell.cell["cell_id"]: _chunk_doubt(cell) for cell in _cell_frames(run)}
    return {cell_id: doubt for cell_id, doubt in doubts.items() if doubt}


_READERS: Final[Mapping[str, Callable[[_CellFrames], _Figures]]] = {
    "engine": _from_steps,
    "response": _from_response,
    "counters": _from_counters,
    "log": _from_log,
    "chunks": _from_chunks,
}


# Parts


def _checked(
    cell: _CellFrames,
    *,
    drafts: int,
    draft_tokens: int | None,
    accepted: int | None,
    positions: tuple[int, ...] | None = None,
    committed: float | None = None,
    inactive: str | None = None,
) -> _Figures:
    """Counts with every invariant of `AcceptanceCounts` checked; a broken one makes them unusable."""
    figures = _Figures(
        drafts=drafts, draft_tokens=draft_tokens, accepted=accepted, committed=committed, usable=True
    )
    if drafts == 0:
        tokens = cell.answered["num_output_tokens"].sum()
        reason = inactive or f"{INACTIVE}: 0 drafts while {tokens} tokens were generated"
        return _noted(figures, reason)
    try:
        AcceptanceCounts(
            num_drafts=drafts,
            num_draft_tokens=draft_tokens,
            num_accepted_tokens=accepted or 0,
            num_speculative_tokens=cell.longest,
            accepted_per_position=positions,
        )
    except RecordError as error:
        return _marked(figures, str(error))
    return figures


def _marked(figures: _Figures, reason: str) -> _Figures:
    return _Figures(
        drafts=figures.drafts,
        draft_tokens=figures.draft_tokens,
        accepted=figures.accepted,
        committed=figures.committed,
        usable=False,
        reason="; ".join(part for part in (reason, figures.reason) if part),
    )


def _noted(figures: _Figures, remark: str) -> _Figures:
    marked = _marked(figures, remark)
    return _Figures(
        drafts=marked.drafts,
        draft_tokens=marked.draft_tokens,
        accepted=marked.accepted,
        committed=marked.committed,
        usable=figures.usable,
        reason=marked.reason,
    )


def _total(frame: pl.DataFrame, column: str) -> int:
    return int(frame[column].sum() or 0)


def _committed(tokens: int, requests: int, drafts: int) -> float | None:
    """Committed acceptance length; None too where outputs are shorter than their prefill tokens."""
    if tokens < requests:
        return None
    return committed_acceptance_length(num_output_tokens=tokens, num_first_tokens=requests, num_drafts=drafts)


def _filled(acceptance: pl.DataFrame) -> pl.DataFrame:
    """Acceptance rows with the counts that their histogram gives where the fields are null."""
    histogram = pl.col("acceptance_histogram")
    weighted = pl.col("acceptance_histogram").list.eval(pl.element() * pl.int_range(pl.len())).list.sum()
    return acceptance.with_columns(
        pl.coalesce("num_drafts", histogram.list.sum()).alias("num_drafts"),
        pl.coalesce("num_accepted_tokens", weighted).alias("num_accepted_tokens"),
    )


def _histogram_conflict(acceptance: pl.DataFrame) -> str | None:
    """The first request whose histogram and fields contradict each other, as a line; None without one."""
    cleared = acceptance.with_columns(
        pl.lit(None, dtype=pl.Int64).alias(name) for name in ("num_drafts", "num_accepted_tokens")
    )
    both = acceptance.with_columns(
        _filled(cleared)["num_drafts"].alias("__drafts"),
        _filled(cleared)["num_accepted_tokens"].alias("__accepted"),
    ).filter(
        (pl.col("num_drafts") != pl.col("__drafts")) | (pl.col("num_accepted_tokens") != pl.col("__accepted"))
    )
    if both.is_empty():
        return None
    row = both.row(0, named=True)
    return (
        f"request {row['request_id']}: its histogram holds {row['__drafts']} drafts and {row['__accepted']} "
        f"accepted, its fields {row['num_drafts']} and {row['num_accepted_tokens']}"
    )


def _with_figures(cell: _CellFrames) -> pl.DataFrame:
    """Answered requests with drafts and accepted tokens, from their response fields, else their steps."""
    told = _filled(cell.acceptance).select(
        "request_id", "num_drafts", "num_draft_tokens", "num_accepted_tokens"
    )
    if told.is_empty() and not cell.steps.is_empty() and not (cell.guessed and _chunk_doubt(cell)):
        told = (
            cell.steps.filter(pl.col("num_draft_tokens") > 0)
            .group_by("request_id", maintain_order=True)
            .agg(
                pl.len().cast(pl.Int64).alias("num_drafts"),
                pl.col("num_draft_tokens", "num_accepted_tokens").sum(),
            )
        )
    known = pl.col("num_drafts").is_not_null() & pl.col("num_accepted_tokens").is_not_null()
    return (
        cell.answered.select("request_id", "num_output_tokens")
        .join(told, on="request_id", how="inner", maintain_order="left")
        .filter(known)
    )


def _tokens_per_step(cell: _CellFrames) -> float | None:
    """Output tokens after prefill / target steps, fewest steps that fit: what a chunk should hold."""
    found = _with_figures(cell).filter(pl.col("num_output_tokens").is_not_null())
    if found.is_empty():
        return None
    steps = int(found.select((pl.col("num_drafts") + _GAP.clip(0)).sum()).item())
    return (_total(found, "num_output_tokens") - found.height) / steps if steps else None


class _Both(NamedTuple):
    """A row of `server_tokens`, less its keys."""

    num_server_tokens: int | None
    num_client_tokens: int
    num_uncertain_tokens: int
    num_server_prompt_tokens: int | None
    num_client_prompt_tokens: int | None
    num_server_requests: int | None
    num_client_requests: int
    agrees: bool | None
    reason: str | None


def _server_and_client(cell: _CellFrames) -> _Both:
    """What server and requests count, and whether they agree."""
    sampling = next(known for known in cell.plan.sampling if known.name == cell.cell["sampling"])
    caps = cell.plan.workload.max_tokens
    sent = cell.requests.filter(pl.col("sent_s").is_not_null())
    counted = _total(cell.requests, "num_output_tokens")
    prompts = None if sent["num_prompt_tokens"].null_count() else _total(sent, "num_prompt_tokens")
    slack = 0
    for row in sent.filter((pl.col("status") != "ok") | pl.col("num_output_tokens").is_null()).iter_rows(
        named=True
    ):
        cap = min(sampling.max_tokens, getattr(caps, row["length_tier"]) or sampling.max_tokens)
        slack += max(0, cap - (row["num_output_tokens"] or 0))
    window = Window.over([parse(body) for body in cell.scrapes]) if len(cell.scrapes) > 1 else None
    served = window.generation_tokens if window else None
    served_prompts = window.prompt_tokens if window else None
    served_requests = window.requests_finished if window else None
    agrees: bool | None = None
    reason: str | None = "a single scrape: nothing to subtract"
    said = f"the server generated {served} tokens, the requests hold {counted}"
    if slack:
        said += f" (and failed ones at most {slack} more)"
    if window and served is None:
        reason = window.malformed or window.reset or "the server does not count generated tokens"
    elif served is not None and served > (counted + slack) * (1 + TOKEN_TOLERANCE):
        agrees, reason = False, f"foreign_traffic: {said}"
    elif served_requests is not None and served_requests > sent.height * (1 + TOKEN_TOLERANCE):
        agrees = False
        reason = f"foreign_traffic: the server finished {served_requests} requests, {sent.height} were sent"
    elif (
        served_prompts is not None
        and prompts is not None
        and served_prompts > prompts + max(TOKEN_TOLERANCE * prompts, PROMPT_TOLERANCE * sent.height)
    ):
        agrees = False
        reason = (
            f"foreign_traffic: the server read {served_prompts} prompt tokens, the requests hold {prompts}"
        )
    elif served is not None and served < counted * (1 - TOKEN_TOLERANCE):
        agrees, reason = False, f"lost_tokens: {said}: another server or process was asked"
    elif served is not None:
        agrees, reason = True, None
    return _Both(
        served, counted, slack, served_prompts, prompts, served_requests, sent.height, agrees, reason
    )


def _model(cell: _CellFrames, window: Window) -> str | None:
    """The `model_name` to count where a body holds several: the plan's, or the one the server was given."""
    models = window.after.models
    facts = cell.cell.get("server") or {}
    wanted = (cell.plan.target.model, facts.get("served_model_name"), facts.get("model"))
    return next((name for name in wanted if name in models), None) if len(models) > 1 else None


def _cell_frames(run: Run, *, speculating: bool = True) -> list[_CellFrames]:
    """Rows of every cell, of speculating arms or of all, in measuring order."""
    arms = {arm.name: arm for arm in run.plan.arms}
    server = run.plan.engine.kind not in IN_PROCESS
    tables = {
        "requests": run.requests,
        "steps": run.steps,
        **{name: run.table(name) for name in ("acceptance", "log_lines", "scrapes")},
    }
    parts = {name: frame.partition_by("cell_id", as_dict=True) for name, frame in tables.items()}
    answered = run.requests.filter(pl.col("status") == "ok").select("request_id", "cell_id")
    chunks: dict[tuple[Any, ...], pl.DataFrame] = {}
    if server:
        joined = run.table("chunks").join(answered, on="request_id", how="inner", maintain_order="left")
        chunks = joined.partition_by("cell_id", as_dict=True)
    base = _baseline_chunk(run, chunks) if server else None
    found = []
    for cell in run.cells:
        arm = arms[cell["arm"]]
        if speculating and arm.speculative is None:
            continue
        own = {name: parts[name].get((cell["cell_id"],), tables[name].clear()) for name in tables}
        found.append(
            _CellFrames(
                arm=arm,
                cell=cell,
                requests=own["requests"],
                acceptance=own["acceptance"],
                steps=own["steps"],
                chunks=chunks.get((cell["cell_id"],), run.table("chunks").clear()),
                log=own["log_lines"].sort("line")["text"].to_list(),
                scrapes=own["scrapes"].sort("scrape")["body"].to_list(),
                plan=run.plan,
                baseline_chunk=base,
            )
        )
    return found


def _baseline_chunk(run: Run, chunks: Mapping[tuple[Any, ...], pl.DataFrame]) -> float | None:
    """Tokens a chunk after the first, over the baseline's answered requests; None without such chunks.

    Where chunks do not tell their tokens, all but one of a request's output tokens are in the later ones.
    """
    names = [cell["cell_id"] for cell in run.cells if cell["arm"] == run.plan.baseline.name]
    frames = [chunks[(name,)] for name in names if (name,) in chunks]
    if not frames:
        return None
    known = pl.col("num_tokens").is_not_null().all()
    later = (
        pl.concat(frames)
        .filter(pl.col("chunk") > 0)
        .group_by("request_id")
        .agg(pl.len().alias("later"), pl.when(known).then(pl.col("num_tokens").sum()).alias("tokens"))
        .join(run.requests.select("request_id", "num_output_tokens"), on="request_id", how="left")
        .with_columns(pl.coalesce("tokens", pl.col("num_output_tokens") - 1))
        .filter(pl.col("tokens").is_not_null())
    )
    return _total(later, "tokens") / _total(later, "later") if later.height else None


def _cell_rows(run: Run, cell: _CellFrames) -> list[dict[str, Any]]:
    in_process = run.plan.engine.kind in IN_PROCESS
    rows = []
    for source in SOURCES[:1] if in_process else SOURCES[1:]:
        figures = _READERS[source](cell)
        rows.append(
            {
                **{key: cell.cell[key] for key in _CELL},
                "source": source,
                "num_requests": cell.answered.height,
                "num_failed": cell.requests.height - cell.answered.height,
                "num_drafts": figures.drafts,
                "num_draft_tokens": figures.draft_tokens,
                "num_accepted_tokens": figures.accepted,
                "mean_acceptance_length": figures.length,
                "committed_acceptance_length": figures.committed,
                "usable": figures.usable,
                "headline": False,
                "agrees": None,
                "reason": figures.reason,
            }
        )
    return rows


def _chosen(table: pl.DataFrame, arm: str) -> HeadlineSource:
    """`headline_source` from the rows of `reconcile`."""
    rows = table.filter((pl.col("arm") == arm) & (pl.col("num_requests") > 0))
    if rows.is_empty():
        return HeadlineSource(None, "no request was answered")
    cells = rows["cell_id"].n_unique()
    counts = {
        source: _total(rows.filter((pl.col("source") == source) & pl.col("usable")), "usable")
        for source in SOURCES
    }
    best = max(SOURCES, key=lambda source: (counts[source], -SOURCES.index(source)))
    if counts[best] == cells:
        better = [source for source in SOURCES[: SOURCES.index(best)] if source in rows["source"].to_list()]
        return HeadlineSource(best, "; ".join([WHY[best], *_faults(rows, better)]))
    if counts[best]:
        why = f"{WHY[best]}; usable in {counts[best]} of {cells} cells"
        return HeadlineSource(best, "; ".join([why, *_faults(rows, [best])]))
    return HeadlineSource(
        None, "; ".join(_faults(rows, [s for s in SOURCES if s in rows["source"].to_list()]))
    )


def _faults(rows: pl.DataFrame, sources: Sequence[str]) -> list[str]:
    """The first reason why each source is not usable, as `source: reason`."""
    found = []
    for source in sources:
        bad = rows.filter((pl.col("source") == source) & ~pl.col("usable"))
        if bad.height:
            found.append(f"{source}: {bad['reason'][0]}")
    return found


def _compared(
    row: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    chosen: str | None,
    tokens_per_step: float | None,
) -> dict[str, Any]:
    """A row with `headline` and `agrees` filled in, and the disagreement told."""
    if row["source"] == chosen:
        return {**row, "headline": True}
    reference = next(
        (other for other in rows if other["cell_id"] == row["cell_id"] and other["source"] == chosen), None
    )
    if reference is None or not reference["usable"]:
        return dict(row)
    agrees, reason = _agreement(row, reference, tokens_per_step)
    told = "; ".join(part for part in (reason, row["reason"]) if part)
    return {**row, "agrees": agrees, "reason": told or None}


def _agreement(
    row: Mapping[str, Any], reference: Mapping[str, Any], tokens_per_step: float | None
) -> tuple[bool | None, str | None]:
    length, expected = row["mean_acceptance_length"], reference["mean_acceptance_length"]
    name = reference["source"]
    if row["source"] == "chunks":
        expected = tokens_per_step if tokens_per_step is not None else expected
        if length is None or expected is None:
            return None, None
        if abs(length - expected) <= TRUNCATION_TOLERANCE * expected:
            return True, None
        return False, f"{length:.3f} tokens a chunk, {expected:.3f} a step ({name})"
    if row["num_drafts"] is not None and 0 in (row["num_drafts"], reference["num_drafts"]):
        if row["num_drafts"] == reference["num_drafts"]:
            return True, None
        return False, f"{row['num_drafts']} drafts, {reference['num_drafts']} ({name})"
    if length is None or expected is None or (row["source"] == "response" and not row["usable"]):
        return None, None
    if row["source"] == "counters" and row["num_failed"]:
        # Requests that failed had drafts too, which no response tells of.
        counts = [(row[name], reference[name]) for name in ("num_drafts", "num_accepted_tokens")]
        if all(mine is not None and other is not None and mine >= other for mine, other in counts):
            return None, "failed requests drafted too"
    tolerance = TOKEN_TOLERANCE
    if row["source"] == "log":
        coverage = row["num_drafts"] / reference["num_drafts"]
        if not LOG_COVERAGE[0] <= coverage <= LOG_COVERAGE[1]:
            return None, f"its intervals cover {coverage:.0%} of the cell's drafts"
        tolerance = LOG_TOLERANCE
    elif not row["num_failed"]:
        for count in ("num_drafts", "num_accepted_tokens", "num_draft_tokens"):
            mine, other = row[count], reference[count]
            if None not in (mine, other) and abs(mine - other) > TOKEN_TOLERANCE * max(mine, other):
                return False, f"{count} {mine}, {other} ({name})"
    if abs(length - expected) > tolerance * expected:
        return False, f"mean acceptance length {length:.3f}, {expected:.3f} ({name})"
    if not row["usable"]:
        return False, None
    return True, None
