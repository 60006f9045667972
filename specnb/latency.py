"""Time: latencies of requests, throughput, speedup against the baseline, break-even, decomposition.

Takes `requests`, `chunks`, `steps` and `engine_steps` in the shape of `schema`, returns
long frames. May import `stats`, `records` and `schema`; knows no engine, file or chart.
Separate from acceptance because a drafter can accept well and still be slow.

Definitions, shared by everything here -------------------------------------- TTFT: send to first
token in any channel. TPOT: (last - first) / (output tokens - tokens of the first chunk), tokens
from the engine's usage; where the first chunk's count is unknown, output tokens - 1, and
`tpot_basis` says so. A chunk gap is the time between chunks; with speculation a chunk holds several
tokens, so it is no time per token. Tokens are never counted as chunks. Only requests of status ok
have latencies; `failure_table` counts the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl

from specnb.config import Published
from specnb.prometheus import Window, parse
from specnb.records import Run
from specnb.stats import (
    NO_INTERVAL,
    Estimate,
    Floats,
    Output,
    check_columns,
    cluster_sums,
    estimate_rows,
    long_frame,
    quantile_estimate,
    ratio_of_sums,
    welch_log_ratio,
    wilson_estimate,
)

QUANTILES: Final = (0.5, 0.95, 0.99)
LATENCY_METRICS: Final = ("ttft_s", "tpot_s", "e2e_s", "dispatch_delay_s", "scheduled_e2e_s")
SPEEDUP_METRICS: Final = (
    "throughput_speedup",
    "paired_tpot_speedup",
    "output_length_ratio",
    "run_to_run_speedup",
)
CELL_LABELS: Final = ("arm", "entropy_tier", "sampling", "concurrency", "repeat", "cell_id")
LENGTH_TOLERANCE: Final = 0.1

_GROUPS: Final = ("arm", "entropy_tier", "sampling", "concurrency")
_SPEEDUP_EXTRA: Final[dict[str, pl.DataType]] = {
    "num_output_tokens": pl.Int64(),
    "wall_s": pl.Float64(),
    "baseline_num_output_tokens": pl.Int64(),
    "baseline_wall_s": pl.Float64(),
    "num_unpaired_prompts": pl.Int64(),
    "note": pl.String(),
}


# Requests


def request_latency(requests: pl.DataFrame) -> pl.DataFrame:
    """Latencies of every request of status ok.

    Parameters
    ----------
    requests
        One row a request (`schema.REQUESTS`).

    Returns
    -------
    pl.DataFrame
        The rows of status ok with all their columns, and

        * ttft_s, ttfa_s: send to first token in any channel, and to the first answer token after a
          reasoning channel (null if there was none);
        * decode_s: first to last token; decode_tokens: output tokens that this time produced;
        * tpot_s: decode_s / decode_tokens, null where decode_tokens is null or below 1;
        * tpot_basis: `first chunk` (its token count is known), `one token` (taken as 1), or null;
        * e2e_s: send to last token; dispatch_delay_s: scheduled to sent; scheduled_e2e_s: scheduled
          to last token (their sum).
    """
    check_columns(
        requests,
        [
            *("status", "scheduled_s", "sent_s", "first_token_s", "first_answer_s", "last_token_s"),
            *("num_output_tokens", "num_first_chunk_tokens"),
        ],
        what="requests",
    )
    decode_tokens = pl.col("num_output_tokens") - pl.col("num_first_chunk_tokens").fill_null(1)
    decode_s = pl.col("last_token_s") - pl.col("first_token_s")
    return requests.filter(pl.col("status") == "ok").with_columns(
        (pl.col("first_token_s") - pl.col("sent_s")).alias("ttft_s"),
        (pl.col("first_answer_s") - pl.col("sent_s")).alias("ttfa_s"),
        decode_s.alias("decode_s"),
        decode_tokens.alias("decode_tokens"),
        pl.when(decode_tokens >= 1).then(decode_s / decode_tokens).alias("tpot_s"),
        pl.when(pl.col("num_output_tokens").is_null())
        .then(None)
        .when(pl.col("num_first_chunk_tokens").is_null())
        .then(pl.lit("one token"))
        .otherwise(pl.lit("first chunk"))
        .alias("tpot_basis"),
        (pl.col("last_token_s") - pl.col("sent_s")).alias("e2e_s"),
        (pl.col("sent_s") - pl.col("scheduled_s")).alias("dispatch_delay_s"),
        (pl.col("last_token_s") - pl.col("scheduled_s")).alias("scheduled_e2e_s"),
    )


def steady_state(requests: pl.DataFrame) -> pl.DataFrame:
    """Requests without the first fill of each cell: those sent while the closed loop was still ramping up.

    The first `concurrency` requests of a cell, by time of sending, start together and queue for
    prefill together. Requests that were never sent are left out too.
    """
    check_columns(requests, ["cell_id", "sent_s", "concurrency"], what="requests")
    order = pl.col("sent_s").rank("ordinal").over("cell_id")
    return requests.filter(pl.col("sent_s").is_not_null() & (order > pl.col("concurrency")))


def failure_table(requests: pl.DataFrame, *, by: Sequence[str], level: float = 0.95) -> pl.DataFrame:
    """Share of requests that failed (status not ok) in every group, with Wilson's interval.

    Parameters
    ----------
    requests
        One row a request, failed ones too.
    by
        Group columns; may be empty.
    level
        Nominal coverage.

    Returns
    -------
    pl.DataFrame
        `by` columns, num_failed, `failures` (count by error kind as text, most frequent first; null
        without any), then `stats.ESTIMATE_SCHEMA`; metric `failure_rate` (n: requests).
    """
    check_columns(requests, [*by, "status", "error_kind", "prompt_id"], what="requests")
    rows = []
    for key, group in _groups(requests, by):
        failed = group.filter(pl.col("status") != "ok")
        kinds = (
            failed.select(pl.coalesce("error_kind", "status").alias("kind"))
            .group_by("kind")
            .len()
            .sort(["len", "kind"], descending=[True, False])
        )
        estimate = wilson_estimate(
            failed.height, group.height, level=level, n_clusters=group["prompt_id"].n_unique()
        )
        failures = ", ".join(f"{count} {kind}" for kind, count in kinds.iter_rows()) or None
        columns = {"metric": "failure_rate", "num_failed": failed.height, "failures": failures}
        rows.append({**key, **columns, **estimate.as_row()})
    extra = {"num_failed": pl.Int64(), "failures": pl.String()}
    return long_frame(rows, by={name: requests.schema[name] for name in by}, extra=extra)


def latency_quantiles(requests: pl.DataFrame, *, by: Sequence[str], level: float = 0.95) -> pl.DataFrame:
    """P50, P95 and P99 of the latencies of ok requests in every group.

    Parameters
    ----------
    requests
        One row a request.
    by
        Group columns; may be empty.
    level
        Nominal coverage.

    Returns
    -------
    pl.DataFrame
        `by` columns, `quantile` (0.5, 0.95, 0.99), then `stats.ESTIMATE_SCHEMA`; metric is ttft_s,
        tpot_s, e2e_s, dispatch_delay_s or scheduled_e2e_s, in seconds (n: requests that have it).
        Null with a reason below `stats.minimum_n`: 5 for P50, 60 for P95, 300 for P99.

    Notes
    -----
    Interval: `stats.quantile_estimate`, over requests.
    """
    latencies = request_latency(requests)
    check_columns(latencies, [*by, "prompt_id"], what="requests")
    rows = []
    for key, group in _groups(latencies, by):
        for metric in LATENCY_METRICS:
            known = group.select(metric, "prompt_id").drop_nulls()
            values, num_prompts = known[metric].to_numpy(), known["prompt_id"].n_unique()
            for q in QUANTILES:
                estimate = quantile_estimate(values, q, level=level, n_clusters=num_prompts)
                rows.append({**key, "metric": metric, "quantile": q, **estimate.as_row()})
    return long_frame(rows, by={name: requests.schema[name] for name in by}, extra={"quantile": pl.Float64()})


# Chunks


def chunk_gaps(chunks: pl.DataFrame) -> pl.DataFrame:
    """Gaps between the chunks of each request: a chunk gap is not a time per token.

    Parameters
    ----------
    chunks
        One row a chunk that carried tokens (`schema.CHUNKS`).

    Returns
    -------
    pl.DataFrame
        One row a chunk after the first: request_id, chunk, chunk_gap_s, num_tokens, token_gap_s
        (chunk_gap_s / num_tokens; null where the count is unknown).
    """
    check_columns(chunks, ["request_id", "chunk", "received_s", "num_tokens"], what="chunks")
    return (
        chunks.sort("request_id", "chunk")
        .with_columns(pl.col("received_s").diff().over("request_id").alias("chunk_gap_s"))
        .filter(pl.col("chunk_gap_s").is_not_null())
        .with_columns((pl.col("chunk_gap_s") / pl.col("num_tokens")).alias("token_gap_s"))
        .select("request_id", "chunk", "chunk_gap_s", "num_tokens", "token_gap_s")
    )


def token_gaps(gaps: pl.DataFrame) -> Floats | None:
    """Each chunk's gap shared out evenly over its tokens, one value a token, in seconds.

    Dividing every gap by the mean number of tokens instead would distort every quantile.

    Parameters
    ----------
    gaps
        From `chunk_gaps`.

    Returns
    -------
    array, shape [num_tokens], or None
        None where any chunk's token count is unknown: only TPOT can be given then.
    """
    check_columns(gaps, ["token_gap_s", "num_tokens"], what="chunk gaps")
    if gaps["num_tokens"].null_count():
        return None
    return np.repeat(gaps["token_gap_s"].to_numpy(), gaps["num_tokens"].to_numpy()).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakThroughput:
    """Tokens a second: the mean over a window, and its busiest bucket.

    Raises
    ------
    ValueError
        The peak is below the mean, which no sound count of tokens gives (chunks were counted).
    """

    mean_tokens_per_s: float
    peak_tokens_per_s: float
    bucket_s: float

    def __post_init__(self) -> None:
        if self.peak_tokens_per_s < self.mean_tokens_per_s * (1 - 1e-9):
            raise ValueError(
                f"peak {self.peak_tokens_per_s:g} tokens/s is below the mean {self.mean_tokens_per_s:g}; "
                "were chunks counted as tokens?"
            )


def peak_throughput(chunks: pl.DataFrame, *, start_s: float, bucket_s: float = 1.0) -> PeakThroughput | None:
    """Mean and peak tokens a second from the start of a cell to its last chunk.

    Parameters
    ----------
    chunks
        One row a chunk of the cell, with num_tokens.
    start_s
        First send of the cell, on the run's clock.
    bucket_s
        Smallest bucket. The window is cut into equal buckets of at least this length, so that the
        peak can't fall below the mean.

    Returns
    -------
    PeakThroughput or None
        None without chunks or where a chunk's token count is unknown.

    Raises
    ------
    ValueError
        A chunk before `start_s`, or a bucket that is not positive.
    """
    check_columns(chunks, ["received_s", "num_tokens"], what="chunks")
    if bucket_s <= 0:
        raise ValueError(f"bucket_s {bucket_s} must be positive")
    if chunks.height == 0 or chunks["num_tokens"].null_count():
        return None
    received, tokens = chunks["received_s"].to_numpy() - start_s, chunks["num_tokens"].to_numpy()
    if received.min() < 0:
        raise ValueError(f"a chunk was received {-received.min():g} s before start_s {start_s:g}")
    window = float(received.max())
    if window == 0:
        return None
    num_buckets = max(1, math.floor(window / bucket_s + 1e-9))
    width = window / num_buckets
    # Right-closed buckets: a chunk that arrives at the end of a second belongs to it.
    index = np.clip(np.ceil(received / width - 1e-9).astype(np.int64) - 1, 0, num_buckets - 1)
    busiest = float(np.bincount(index, weights=tokens).max())
    return PeakThroughput(
        mean_tokens_per_s=float(tokens.sum()) / window, peak_tokens_per_s=busiest / width, bucket_s=width
    )


# Throughput and speedup


def throughput_table(
    requests: pl.DataFrame, *, by: Sequence[str], level: float = 0.95, rng: np.random.Generator
) -> pl.DataFrame:
    """Output tokens a second in every group: tokens of ok requests / wall time, summed over cells.

    Parameters
    ----------
    requests
        One row a request.
    by
        Group columns, of whole cells only: arm, entropy_tier, sampling, concurrency, repeat, cell_id.
    level, rng
        As in `stats.cluster_bootstrap`.

    Returns
    -------
    pl.DataFrame
        `by` columns, num_output_tokens, wall_s, then `stats.ESTIMATE_SCHEMA`; metric
        `output_tokens_per_s` (n: ok requests). Wall time of a cell: first send to last token,
        failed requests included.

    Raises
    ------
    ValueError
        `by` holds a label that varies inside a cell, whose wall time can't be split.

    Notes
    -----
    The wall time of a closed loop is no sum over prompts. For the interval each request is given the
    share e2e x wall / (sum of e2e) of its cell's wall time, that is its service time over the cell's
    effective concurrency, which is held fixed; the estimate itself is exact.
    """
    shares = _shares(requests, by)
    sums = ("num_output_tokens", "share_s", "num_ok")
    groups = cluster_sums(shares, by=by, sums=sums)
    totals = {tuple(group.key.values()): group.totals for group in groups}
    output = Output(columns={"metric": "output_tokens_per_s"}, denominator=2, undefined="no ok request")
    rows = estimate_rows(groups, ratio_of_sums, outputs=[output], level=level, rng=rng)
    uncounted = _uncounted(requests, by)
    for row in rows:
        key = tuple(row[name] for name in by)
        tokens, wall_s, _ = totals[key]
        row.update({"num_output_tokens": round(tokens), "wall_s": float(wall_s)})
        if key in uncounted:
            row.update(_unknown_total(uncounted[key]))
    extra = {"num_output_tokens": pl.Int64(), "wall_s": pl.Float64()}
    return long_frame(rows, by={name: requests.schema[name] for name in by}, extra=extra)


def speedup_table(
    requests: pl.DataFrame,
    *,
    baseline: str,
    by: Sequence[str] = _GROUPS,
    level: float = 0.95,
    rng: np.random.Generator,
) -> pl.DataFrame:
    """Speedups of every arm over the baseline, the headline first.

    Parameters
    ----------
    requests
        One row a request, all arms.
    baseline
        Name of the baseline arm.
    by
        Group columns, `arm` among them, of whole cells only (as in `throughput_table`).
    level, rng
        As in `stats.cluster_bootstrap`.

    Returns
    -------
    pl.DataFrame
        `by` columns, num_output_tokens and wall_s of the arm, baseline_num_output_tokens,
        baseline_wall_s, num_unpaired_prompts (answered by one side only), note, then
        `stats.ESTIMATE_SCHEMA`; four rows an arm's group, `metric` is

        * throughput_speedup, the headline: ratio of totals, tokens a second of the arm over the
          baseline's (n: ok requests of the arm);
        * paired_tpot_speedup: geometric mean over prompts of baseline TPOT / arm TPOT (n: pairs);
        * output_length_ratio: tokens of the arm / of the baseline, over pairs (n: pairs);
        * run_to_run_speedup: geometric mean over repeats, Welch's interval on logs (n: repeats);
          with one repeat its method and reason are "single run".

        `note` flags lengths that differ by more than 10 % (a latency ratio would mislead) or an
        interval wholly below 1. `method` of the first three ends in "prompts only (single run)"
        with one repeat.

    Raises
    ------
    ValueError
        `arm` is not in `by`, the baseline is not among the arms, or a label varies inside a cell.

    Notes
    -----
    Only repeats that both arms have are compared. Prompts are resampled for both arms together, repeats
    as the outer level; wall time is shared out over requests as in `throughput_table`.
    """
    if "arm" not in by:
        raise ValueError(f"by {list(by)} must hold 'arm'")
    if baseline not in requests["arm"].unique().to_list():
        raise ValueError(f"baseline '{baseline}' is not an arm of these requests")
    rest = [name for name in by if name != "arm"]
    shares = _shares(requests, by)
    keys = list(dict.fromkeys([*rest, "repeat", "prompt_id"]))
    quantities = ["num_output_tokens", "share_s", "decode_s", "decode_tokens", "num_ok"]
    per_prompt = shares.group_by(["arm", *keys]).agg(pl.col(name).sum() for name in quantities)
    reference = per_prompt.filter(pl.col("arm") == baseline).select(
        *keys, *(pl.col(name).alias(f"baseline_{name}") for name in quantities)
    )
    rows: list[dict[str, Any]] = []
    uncounted = _uncounted(requests, by)
    for arm in requests["arm"].unique(maintain_order=True):
        if arm != baseline:
            joined = per_prompt.filter(pl.col("arm") == arm).join(
                reference, on=keys, how="full", coalesce=True
            )
            joined = joined.with_columns(
                pl.lit(arm).alias("arm"),
                pl.col(*quantities, *(f"baseline_{name}" for name in quantities)).fill_null(0),
            )
            for key, group in _groups(joined, by):
                found = _speedup_rows(key, group, level=level, rng=rng)
                sides = (tuple(key.values()), tuple((key | {"arm": baseline}).values()))
                missing = next((uncounted[side] for side in sides if side in uncounted), None)
                if missing is not None:
                    totals = ("throughput_speedup", "run_to_run_speedup")
                    found = [
                        row | _unknown_total(missing) if row["metric"] in totals else row for row in found
                    ]
                rows += found
    return long_frame(rows, by={name: requests.schema[name] for name in by}, extra=_SPEEDUP_EXTRA)


def _speedup_rows(
    key: Mapping[str, Any], group: pl.DataFrame, *, level: float, rng: np.random.Generator
) -> list[dict[str, Any]]:
    both = group.group_by("repeat").agg(
        (pl.col("num_ok").sum() > 0).alias("arm"), (pl.col("baseline_num_ok").sum() > 0).alias("baseline")
    )
    repeats = both.filter(pl.col("arm") & pl.col("baseline"))["repeat"]
    if repeats.len() == 0:
        if not both["arm"].any():
            return []
        reason = "no ok request of the baseline in the same repeat"
        missing = Estimate(
            value=None, low=None, high=None, level=level, n=0, n_clusters=0, method=NO_INTERVAL, reason=reason
        )
        return [{**key, "metric": metric, **missing.as_row()} for metric in SPEEDUP_METRICS]
    group = group.filter(pl.col("repeat").is_in(repeats.implode()))
    paired = (pl.col("num_ok") > 0) & (pl.col("baseline_num_ok") > 0)
    timed = paired & (
        pl.min_horizontal("decode_tokens", "baseline_decode_tokens", "decode_s", "baseline_decode_s") > 0
    )
    log_ratio = (
        (pl.col("baseline_decode_s") / pl.col("baseline_decode_tokens"))
        / (pl.col("decode_s") / pl.col("decode_tokens"))
    ).log()
    table = group.with_columns(
        pl.when(timed).then(log_ratio).otherwise(0).alias("log_ratio"),
        timed.cast(pl.Int64).alias("num_timed"),
        paired.cast(pl.Int64).alias("num_pairs"),
        *(
            pl.when(paired).then(pl.col(name)).otherwise(0).alias(f"paired_{name}")
            for name in ("num_output_tokens", "baseline_num_output_tokens")
        ),
    )
    names = (
        *("num_output_tokens", "share_s", "baseline_num_output_tokens", "baseline_share_s"),
        *("log_ratio", "num_timed", "paired_num_output_tokens", "paired_baseline_num_output_tokens"),
        *("num_ok", "num_pairs"),
    )
    sums = cluster_sums(table, by=(), sums=names)

    def statistic(totals: Floats) -> Floats:
        tokens, wall, base_tokens, base_wall, logs, timed, lengths, base_lengths, _, _ = np.moveaxis(
            totals, -1, 0
        )
        return np.stack(
            [(tokens / wall) / (base_tokens / base_wall), np.exp(logs / timed), lengths / base_lengths], -1
        )

    outputs = [
        Output(
            columns={"metric": "throughput_speedup"}, denominator=8, undefined="no output tokens or no time"
        ),
        Output(
            columns={"metric": "paired_tpot_speedup"},
            denominator=5,
            undefined="no prompt has a TPOT on both sides",
        ),
        Output(
            columns={"metric": "output_length_ratio"},
            denominator=9,
            undefined="no prompt answered on both sides",
        ),
    ]
    rows = estimate_rows(sums, statistic, outputs=outputs, level=level, rng=rng)
    by_repeat = group.group_by("repeat").agg(
        (pl.col("num_output_tokens").sum() / pl.col("share_s").sum()).alias("arm"),
        (pl.col("baseline_num_output_tokens").sum() / pl.col("baseline_share_s").sum()).alias("baseline"),
    )
    usable = [(pl.col(side) > 0) & pl.col(side).is_finite() for side in ("arm", "baseline")]
    rates = by_repeat.filter(*usable)
    if rates.height:
        runs = welch_log_ratio(rates["arm"].to_list(), rates["baseline"].to_list(), level=level)
        rows.append({"metric": "run_to_run_speedup", **runs.as_row()})
    totals = sums[0].totals
    num_unpaired = group.group_by("prompt_id").agg(
        pl.col("num_ok").sum() > 0, pl.col("baseline_num_ok").sum() > 0
    )
    shared = {
        "num_output_tokens": round(totals[0]),
        "wall_s": float(totals[1]),
        "baseline_num_output_tokens": round(totals[2]),
        "baseline_wall_s": float(totals[3]),
        "num_unpaired_prompts": num_unpaired.filter(pl.col("num_ok") != pl.col("baseline_num_ok")).height,
    }
    notes = _speedup_notes({row["metric"]: row for row in rows})
    return [{**key, **row, **shared, "note": notes} for row in rows]


def _uncounted(requests: pl.DataFrame, by: Sequence[str]) -> dict[tuple[Any, ...], tuple[int, int]]:
    """(answers without a token count, answers) of each group with such; their time counts all the same."""
    counts = (
        requests.filter(pl.col("status") == "ok")
        .group_by(by)
        .agg(pl.col("num_output_tokens").is_null().sum().cast(pl.Int64).alias("__unknown"), pl.len())
        .filter(pl.col("__unknown") > 0)
    )
    return {tuple(row[:-2]): (row[-2], row[-1]) for row in counts.select(*by, "__unknown", "len").rows()}


def _unknown_total(uncounted: tuple[int, int]) -> dict[str, Any]:
    """What stands in place of a ratio of totals whose tokens are not all known."""
    unknown, answers = uncounted
    return {
        "value": None,
        "low": None,
        "high": None,
        "method": NO_INTERVAL,
        "reason": f"the server gave no token count for {unknown} of {answers} answers",
    }


def _speedup_notes(rows: Mapping[str, Mapping[str, Any]]) -> str | None:
    notes = []
    ratio = rows["output_length_ratio"]["value"]
    if ratio is not None and abs(ratio - 1) > LENGTH_TOLERANCE:
        notes.append(f"output lengths differ: ratio {ratio:.2f}")
    headline = rows["throughput_speedup"]
    if headline["high"] is not None and headline["high"] < 1:
        notes.append("slower than the baseline")
    elif headline["high"] is None and headline["value"] is not None and headline["value"] < 1:
        notes.append("slower than the baseline (no interval)")
    return "; ".join(notes) or None


def _shares(requests: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    """Ok requests with their share of the cell's wall time (`share_s`), decode times and `num_ok` (1)."""
    inside = [name for name in by if name not in CELL_LABELS]
    if inside:
        raise ValueError(
            f"by {', '.join(repr(name) for name in inside)} may vary inside a cell, whose wall time "
            f"can't be split; use {', '.join(CELL_LABELS)}"
        )
    check_columns(requests, [*by, "cell_id", "repeat", "prompt_id"], what="requests")
    wall_s = (pl.col("last_token_s").max() - pl.col("sent_s").min()).alias("cell_wall_s")
    walls = requests.group_by("cell_id").agg(wall_s)
    known = request_latency(requests).filter(
        pl.col("num_output_tokens").is_not_null() & pl.col("e2e_s").is_not_null()
    )
    # A cell whose requests took no time at all can't be shared out by service time.
    total = pl.col("e2e_s").sum().over("cell_id")
    return known.join(walls, on="cell_id", how="left").with_columns(
        pl.when(total > 0)
        .then(pl.col("e2e_s") * pl.col("cell_wall_s") / total)
        .otherwise(0)
        .alias("share_s"),
        pl.when(pl.col("tpot_s").is_not_null()).then(pl.col("decode_s")).otherwise(0).alias("decode_s"),
        pl.when(pl.col("tpot_s").is_not_null())
        .then(pl.col("decode_tokens"))
        .otherwise(0)
        .alias("decode_tokens"),
        pl.lit(1, pl.Int64).alias("num_ok"),
    )


# Break-even


def break_even_concurrency(speedups: pl.DataFrame) -> pl.DataFrame:
    """The concurrency at which the headline speedup falls to 1, per arm and whatever else groups it.

    Parameters
    ----------
    speedups
        From `speedup_table`, with `concurrency` among its group columns.

    Returns
    -------
    pl.DataFrame
        The group columns without concurrency, `min_concurrency` and `max_concurrency` measured,
        then `stats.ESTIMATE_SCHEMA`; metric `break_even_concurrency` (n: concurrencies with a
        speedup). Value null with a reason that begins with "not reached in range" where the speedup
        stays above 1, or "below 1 from the lowest concurrency" where it never is (where it is at
        a higher one, the reason begins with "below 1 at the lowest concurrency" and names those). An
        end of the interval is null where it lies outside the range (half open) or has no interval to
        come from; `reason` says which.

    Notes
    -----
    Linear interpolation of the speedup on log2 concurrency, at the first fall through 1; the ends
    are the same for the lower and the upper curve of the speedup's interval. Points without a
    speedup are skipped; if any point lacks an interval, so does the break-even.
    """
    check_columns(speedups, ["concurrency", "metric", "value", "low", "high"], what="speedups")
    headline = speedups.filter(pl.col("metric") == "throughput_speedup")
    known = {"concurrency", *_SPEEDUP_EXTRA, "metric", "value", "low", "high", "level", "n", "n_clusters"}
    by = [name for name in speedups.columns if name not in {*known, "method", "reason"}]
    rows = []
    for key, group in _groups(headline, by):
        points = group.filter(pl.col("value").is_not_null()).sort("concurrency")
        concurrency = points["concurrency"].to_list()
        level = float(group["level"][0])
        row: dict[str, Any] = {
            **key,
            "min_concurrency": min(concurrency, default=None),
            "max_concurrency": max(concurrency, default=None),
            "metric": "break_even_concurrency",
            "level": level,
            "n": len(concurrency),
            "n_clusters": int(points["n_clusters"].min() or 0),  # type: ignore[arg-type]
            "method": NO_INTERVAL,
        }
        row.update(_break_even(points))
        rows.append(row)
    extra = {"min_concurrency": pl.Int64(), "max_concurrency": pl.Int64()}
    return long_frame(rows, by={name: speedups.schema[name] for name in by}, extra=extra)


def _break_even(points: pl.DataFrame) -> dict[str, Any]:
    if points.height == 0:
        return {"reason": "no speedup measured"}
    concurrency = points["concurrency"].to_list()
    lowest, highest = concurrency[0], concurrency[-1]
    value, where = _first_fall(concurrency, points["value"].to_list())
    reasons = []
    if where == "below":
        above = [level for level, speedup in zip(concurrency, points["value"], strict=True) if speedup >= 1]
        reasons.append(
            f"below 1 at the lowest concurrency {lowest}, but not at {', '.join(map(str, above))}"
            if above
            else f"below 1 from the lowest concurrency {lowest}"
        )
    elif where == "above":
        reasons.append(f"not reached in range {lowest} to {highest}")
    low = high = None
    method = NO_INTERVAL
    if points["low"].null_count():
        reasons.append("a speedup has no interval")
    else:
        low, low_where = _first_fall(concurrency, points["low"].to_list())
        high, high_where = _first_fall(concurrency, points["high"].to_list())
        method = "crossing of the interval's curves"
        if low is None and where != "below":
            edge = f"lower end is below {lowest}" if low_where == "below" else f"lower end is above {highest}"
            reasons.append(edge)
        if high is None and where != "above":
            edge = (
                f"upper end is above {highest}" if high_where == "above" else f"upper end is below {lowest}"
            )
            reasons.append(edge)
    return {"value": value, "low": low, "high": high, "method": method, "reason": "; ".join(reasons) or None}


def _first_fall(concurrency: Sequence[int], speedup: Sequence[float]) -> tuple[float | None, str]:
    """Where a curve first falls through 1 with `inside`, or None with the side it stays on."""
    if speedup[0] < 1:
        return None, "below"
    for index in range(1, len(speedup)):
        before, after = speedup[index - 1], speedup[index]
        if after < 1:
            left, right = math.log2(concurrency[index - 1]), math.log2(concurrency[index])
            return 2 ** (left + (before - 1) / (before - after) * (right - left)), "inside"
    return None, "above"


# Published figures


def claims_table(
    speedups: pl.DataFrame, parts: pl.DataFrame, published: Published, *, acceptance: pl.DataFrame
) -> pl.DataFrame:
    """Published speedups beside measured ones at the same concurrency, and where the two part.

    Parameters
    ----------
    speedups
        `speedup_table` by arm and concurrency (and sampling, of one setting).
    parts
        `decomposition` of the same requests.
    published
        The plan's claims.
    acceptance
        Columns arm, concurrency, acceptance_length: measured, bonus token included.

    Returns
    -------
    pl.DataFrame
        One row a claim: arm, workload, concurrency; published_speedup (ratio of the published rates)
        and the measured headline as speedup, low, high; published_acceptance_length and
        acceptance_length; published_cycle_ratio (published acceptance length / published speedup)
        and cycle_ratio (time of a speculative step / of a baseline step, as a request meets it), both
        in baseline steps;
        from_acceptance and from_cycle, the factors by which acceptance and step cost move the
        measured speedup away from the published one (their product and the residual of the
        decomposition make the whole difference); outside (whether the published figure lies outside
        the measured interval). What was not measured is null.

    Notes
    -----
    The published acceptance length and rates come from different averages, so the published cycle
    ratio is an estimate.
    """
    rows = [
        {
            "arm": claim.arm,
            "workload": claim.workload,
            "concurrency": claim.concurrency,
            "published_speedup": claim.tokens_per_s / claim.baseline_tokens_per_s,
            "published_acceptance_length": claim.acceptance_length,
        }
        for claim in published.claims
    ]
    claims = pl.DataFrame(
        rows,
        schema={
            "arm": pl.String(),
            "workload": pl.String(),
            "concurrency": pl.Int64(),
            "published_speedup": pl.Float64(),
            "published_acceptance_length": pl.Float64(),
        },
    )
    measured = speedups.filter(pl.col("metric") == "throughput_speedup").select(
        "arm", "concurrency", pl.col("value").alias("speedup"), "low", "high"
    )
    keys = ["arm", "concurrency"]
    weight = pl.col("num_steps")
    # As a request meets it; tiers weigh by their steps.
    arm_s = pl.coalesce("chunk_gap_s", pl.col("cycle_s") + pl.col("stall_s").fill_null(0.0))
    baseline_s = pl.coalesce(
        "baseline_chunk_gap_s", pl.col("baseline_step_s") + pl.col("baseline_stall_s").fill_null(0.0)
    )
    ratios = (
        parts.filter(arm_s.is_not_null() & baseline_s.is_not_null())
        .group_by(keys)
        .agg(((weight * arm_s).sum() / (weight * baseline_s).sum()).alias("cycle_ratio"))
    )
    table = (
        claims.join(measured, on=keys, how="left", maintain_order="left")
        .join(acceptance.select(*keys, "acceptance_length"), on=keys, how="left", maintain_order="left")
        .join(ratios, on=keys, how="left", maintain_order="left")
        .with_columns(
            (pl.col("published_acceptance_length") / pl.col("published_speedup")).alias(
                "published_cycle_ratio"
            )
        )
    )
    return table.select(
        "arm",
        "workload",
        "concurrency",
        "published_speedup",
        "speedup",
        "low",
        "high",
        "published_acceptance_length",
        "acceptance_length",
        "published_cycle_ratio",
        "cycle_ratio",
        (pl.col("acceptance_length") / pl.col("published_acceptance_length")).alias("from_acceptance"),
        (pl.col("published_cycle_ratio") / pl.col("cycle_ratio")).alias("from_cycle"),
        (~pl.col("published_speedup").is_between(pl.col("low"), pl.col("high"))).alias("outside"),
    )


# Decomposition


def decomposition(run: Run, *, baseline: str | None = None) -> pl.DataFrame:
    """Whether the speedup of decoding is explained by acceptance and step times; one row an arm's group.

    Parameters
    ----------
    run
        A run. Step times come from `engine_steps` (in process), else from the server's count of engine
        iterations (scrapes), else from the gaps between chunks, which then are no independent source.
    baseline
        Name of the baseline arm; by default the plan's.

    Returns
    -------
    pl.DataFrame
        Wide, one row an arm (baseline left out), entropy_tier, sampling and concurrency, all repeats pooled:

        * decode_speedup: pooled baseline TPOT / arm TPOT, from the requests' clock;
        * tokens_per_target_step: of the arm, from steps;
        * baseline_step_s, cycle_s (= draft_s + verify_s), draft_s, verify_s: mean time of an engine
          step as a request meets it (weighted by batch size), from engine_steps;
        * baseline_stall_s, stall_s: time a step that a decoding request waited for the prefill of
          others;
        * predicted_speedup: tokens_per_target_step x (baseline_step_s + baseline_stall_s)
          / (cycle_s + stall_s);
        * residual: decode_speedup / predicted_speedup - 1, near 0 if the sources agree; null where step
          times are chunk gaps, which would agree with themselves;
        * num_steps, num_engine_steps, baseline_num_engine_steps: denominators (gaps, where the times
          come from chunk gaps);
        * step_source: `engine steps`, `engine iterations` or `chunk gaps`. On servers a step's parts
          (draft_s, verify_s, stall_s) are unknown, and cycle_s holds them all, prefill of others too;
        * baseline_chunk_gap_s, chunk_gap_s: on servers, mean time between two chunks of a request, the
          step as a request meets it: busy batches weigh more than in a mean over iterations;
        * reason: null unless predicted_speedup or decode_speedup is null.

    Notes
    -----
    Prefill before a request's own first token is TTFT, not decoding: prefill_s counts for the requests
    of the batch that had taken a step before, not for those that take their first step (step 0) in it.

    On servers both sides of the residual are read from the client's clock; what is independent is the
    server's count of iterations. The residual then checks counts, iterations against steps, and the
    evenness of the load, never the clock: at one request it is 0 exactly if every iteration was a
    step or a prefill of ours.
    """
    baseline = run.plan.baseline.name if baseline is None else baseline
    labels = list(_GROUPS)
    cells = run.requests.group_by("cell_id").agg(pl.col(*labels).first())
    decode = (
        request_latency(run.requests)
        .filter(pl.col("tpot_s").is_not_null())
        .group_by(labels)
        .agg((pl.col("decode_s").sum() / pl.col("decode_tokens").sum()).alias("tpot_s"))
    )
    steps_of_cells = run.steps.group_by("arm", "cell_id").agg(
        pl.col("num_emitted_tokens").sum(), pl.len().cast(pl.Int64).alias("num_steps")
    )
    yields = (
        steps_of_cells.join(cells.drop("arm"), on="cell_id", how="left")
        .group_by(labels)
        .agg(
            (pl.col("num_emitted_tokens").sum() / pl.col("num_steps").sum()).alias("tokens_per_target_step"),
            pl.col("num_steps").sum(),
        )
    )
    times = (
        _engine_step_times(run, cells) if run.table("engine_steps").height else _server_step_times(run, cells)
    )
    table = (
        cells.select(labels)
        .unique()
        .join(decode, on=labels, how="left")
        .join(yields, on=labels, how="left")
        .join(times, on=labels, how="left")
    )
    reference = table.filter(pl.col("arm") == baseline).select(
        *labels[1:],
        pl.col("tpot_s").alias("baseline_tpot_s"),
        pl.col("cycle_s").alias("baseline_step_s"),
        pl.col("stall_s").alias("baseline_stall_s"),
        pl.col("num_engine_steps").alias("baseline_num_engine_steps"),
        pl.col("chunk_gap_s").alias("baseline_chunk_gap_s"),
    )
    baseline_s, arm_s = (
        pl.col("baseline_step_s") + pl.col("baseline_stall_s").fill_null(0.0),
        pl.col("cycle_s") + pl.col("stall_s").fill_null(0.0),
    )
    return (
        table.filter(pl.col("arm") != baseline)
        .join(reference, on=labels[1:], how="left")
        .with_columns(
            pl.when(pl.col("tpot_s") > 0)
            .then(pl.col("baseline_tpot_s") / pl.col("tpot_s"))
            .alias("decode_speedup"),
            pl.when(arm_s > 0)
            .then(pl.col("tokens_per_target_step") * baseline_s / arm_s)
            .alias("predicted_speedup"),
        )
        .with_columns(
            pl.when((pl.col("predicted_speedup") > 0) & (pl.col("step_source") != "chunk gaps"))
            .then(pl.col("decode_speedup") / pl.col("predicted_speedup") - 1)
            .alias("residual"),
            pl.when(pl.col("baseline_step_s").is_null() | pl.col("cycle_s").is_null())
            .then(pl.lit("no step times"))
            .when(pl.col("decode_speedup").is_null())
            .then(pl.lit("no request with a TPOT"))
            .when(pl.col("predicted_speedup").is_null())
            .then(pl.lit("no target step"))
            .alias("reason"),
        )
        .select(
            *labels,
            *(
                "decode_speedup",
                "tokens_per_target_step",
                "baseline_step_s",
                "cycle_s",
                "draft_s",
                "verify_s",
            ),
            *(
                "baseline_stall_s",
                "stall_s",
                "predicted_speedup",
                "residual",
                "num_steps",
                "num_engine_steps",
            ),
            *("baseline_num_engine_steps", "baseline_chunk_gap_s", "chunk_gap_s", "step_source", "reason"),
        )
        .sort(labels)
    )


def _engine_step_times(run: Run, cells: pl.DataFrame) -> pl.DataFrame:
    """Mean times of an engine step as a request meets it, from the engine's own record."""
    labels = list(_GROUPS)
    first_steps = (
        run.steps.filter((pl.col("step") == 0) & pl.col("engine_step").is_not_null())
        .group_by("cell_id", "engine_step")
        .agg(pl.len().cast(pl.Int64).alias("num_admitted"))
    )
    batch = pl.col("batch_size")
    waiting = (batch - pl.col("num_admitted").fill_null(0)).clip(0)
    return (
        run.table("engine_steps")
        .join(first_steps, on=["cell_id", "engine_step"], how="left")
        .join(cells.drop("arm"), on="cell_id", how="left")
        .group_by(labels)
        .agg(
            ((batch * pl.col("draft_s")).sum() / batch.sum()).alias("draft_s"),
            ((batch * pl.col("verify_s")).sum() / batch.sum()).alias("verify_s"),
            ((waiting * pl.col("prefill_s")).sum() / batch.sum()).alias("stall_s"),
            pl.len().cast(pl.Int64).alias("num_engine_steps"),
        )
        .with_columns(
            (pl.col("draft_s") + pl.col("verify_s")).alias("cycle_s"),
            pl.lit("engine steps").alias("step_source"),
            pl.lit(None, pl.Float64()).alias("chunk_gap_s"),
        )
    )


def _server_step_times(run: Run, cells: pl.DataFrame) -> pl.DataFrame:
    """Mean time of an engine step on servers: from their iteration counters, else from chunk gaps.

    Iterations are set against the time in which some request was decoding; each stretch of that time
    has one iteration before it that only prefilled. The mean counts every iteration alike, those
    of a thinning batch at a cell's end too, and holds the prefill of others.
    """
    labels = list(_GROUPS)
    counted: list[dict[str, Any]] = []
    if run.has("scrapes"):
        decoding = {
            str(cell_id): group.select("first_token_s", "last_token_s").rows()
            for (cell_id,), group in run.requests.filter(
                pl.col("first_token_s").is_not_null() & pl.col("last_token_s").is_not_null()
            ).group_by("cell_id")
        }
        ordered = run.table("scrapes").sort("cell_id", "scrape")
        for (cell_id,), group in ordered.group_by("cell_id", maintain_order=True):
            if group.height < 2 or str(cell_id) not in decoding:
                continue
            iterations = Window.over([parse(body) for body in group["body"]]).engine_iterations
            busy_s, stretches = _covered(decoding[str(cell_id)])
            if iterations is not None and iterations > stretches:
                counted.append(
                    {"cell_id": cell_id, "busy_s": busy_s, "num_engine_steps": iterations - stretches}
                )
    by_counter = (
        pl.DataFrame(
            counted, schema={"cell_id": pl.String(), "busy_s": pl.Float64(), "num_engine_steps": pl.Int64()}
        )
        .join(cells, on="cell_id", how="left")
        .group_by(labels)
        .agg(pl.col("busy_s").sum(), pl.col("num_engine_steps").sum())
    )
    gaps = (
        chunk_gaps(run.table("chunks"))
        .join(run.requests.select("request_id", *labels), on="request_id", how="inner")
        .group_by(labels)
        .agg(pl.col("chunk_gap_s").mean(), pl.len().cast(pl.Int64).alias("num_gaps"))
    )
    unknown = pl.lit(None, pl.Float64())
    by_counter_s = pl.col("busy_s") / pl.col("num_engine_steps")
    return (
        cells.select(labels)
        .unique()
        .join(by_counter, on=labels, how="left")
        .join(gaps, on=labels, how="left")
        .select(
            *labels,
            unknown.alias("draft_s"),
            unknown.alias("verify_s"),
            unknown.alias("stall_s"),
            pl.coalesce("num_engine_steps", "num_gaps").alias("num_engine_steps"),
            pl.coalesce(by_counter_s, "chunk_gap_s").alias("cycle_s"),
            "chunk_gap_s",
            pl.when(by_counter_s.is_not_null())
            .then(pl.lit("engine iterations"))
            .when(pl.col("chunk_gap_s").is_not_null())
            .then(pl.lit("chunk gaps"))
            .alias("step_source"),
        )
    )


def _covered(spans: Sequence[tuple[float, float]]) -> tuple[float, int]:
    """Length of the union of time spans, in seconds, and the number of stretches it is made of."""
    total, stretches, reached = 0.0, 0, -math.inf
    for start_s, end_s in sorted(spans):
        if start_s > reached:
            stretches += 1
            total += end_s - start_s
        else:
            total += max(0.0, end_s - reached)
        reached = max(reached, end_s)
    return total, stretches


def _groups(frame: pl.DataFrame, by: Sequence[str]) -> list[tuple[dict[str, Any], pl.DataFrame]]:
    """Groups of a frame by the values of `by`, sorted; one group, if it has rows, for an empty `by`."""
    if frame.height == 0:
        return []
    if not by:
        return [({}, frame)]
    parts = frame.sort(*by, maintain_order=True).partition_by(list(by), maintain_order=True)
    return [({name: part[name][0] for name in by}, part) for part in parts]
