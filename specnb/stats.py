"""Estimates with intervals: pooled ratios, cluster bootstrap, quantiles, paired ratios, exact tests.

Knows frames and arrays, nothing of acceptance, latency, engines or charts; imports
polars, numpy and scipy only. Separate so that every number of a report gets its
interval from the same code, tested once against SciPy and against naive loops.

Rules that hold for everything here: steps and tokens of one prompt are not independent,
so intervals resample prompts; ratios are sum over sum and divided last; what is undefined
is None (null in frames) with a reason, never 0, 1 or NaN; randomness comes in as `rng`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy import special
from scipy import stats as scipy_stats

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
Method = Literal["BCa", "percentile"]

MINIMUM_CLUSTERS: Final = 5
TAIL_OBSERVATIONS: Final = 3.0
SINGLE_RUN: Final = "prompts only (single run)"
REPEATED_RUNS: Final = "repeats x prompts"
NO_INTERVAL: Final = "none"
MAXIMUM_UNDEFINED_SHARE: Final = 0.05
_SCIPY_CLUSTERS: Final = 512
_CHUNK_ELEMENTS: Final = 4_000_000
_NOISE: Final = 1e-9

ESTIMATE_SCHEMA: Final[dict[str, pl.DataType]] = {
    "metric": pl.String(),
    "value": pl.Float64(),
    "low": pl.Float64(),
    "high": pl.Float64(),
    "level": pl.Float64(),
    "n": pl.Int64(),
    "n_clusters": pl.Int64(),
    "method": pl.String(),
    "reason": pl.String(),
}
"""Columns that every result frame has, after its group columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One number with its interval, denominator and number of clusters.

    Attributes
    ----------
    value
        The estimate; None where it is undefined, and then `reason` says why.
    low, high
        Ends of the interval at `level`; both None where there is none, and then `reason` says why.
    level
        Nominal coverage, in (0, 1).
    n
        Denominator: drafts, steps, tokens or requests, as the metric's docstring says.
    n_clusters
        Distinct prompts among them.
    method
        How the interval was made (`bca, prompts only (single run)`, `wilson`, ..., or `none`).
    reason
        None unless value or interval is missing.

    Raises
    ------
    ValueError
        NaN or infinite numbers, one end without the other, `low <= value <= high` broken by
        more than rounding, a missing number without a reason, a negative count.
    """

    value: float | None
    low: float | None
    high: float | None
    level: float
    n: int
    n_clusters: int
    method: str
    reason: str | None = None

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{name} is {number}; undefined is None with a reason")
        _check_level(self.level)
        if self.n < 0 or self.n_clusters < 0:
            raise ValueError(f"n {self.n} and n_clusters {self.n_clusters} can't be negative")
        if (self.low is None) != (self.high is None):
            raise ValueError(f"low {self.low} and high {self.high}: an interval has both ends or none")
        if self.value is None and self.low is not None:
            raise ValueError(f"an interval [{self.low}, {self.high}] without a value")
        if self.reason is None and self.low is None:
            raise ValueError("value or interval is missing without a reason")
        if self.value is not None and self.low is not None and self.high is not None:
            slack = _NOISE * max(1.0, abs(self.value))
            if not self.low - slack <= self.value <= self.high + slack:
                raise ValueError(f"value {self.value} is outside its interval [{self.low}, {self.high}]")

    def as_row(self) -> dict[str, Any]:
        """The fields by name, for a row of a result frame (without `metric` and group columns)."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "level": self.level,
            "n": self.n,
            "n_clusters": self.n_clusters,
            "method": self.method,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A point and its interval; None where undefined. `method` and `reason` as in `Estimate`."""

    value: float | None
    low: float | None
    high: float | None
    method: str
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSums:
    """Per-prompt sufficient statistics of one group of a frame.

    Attributes
    ----------
    key
        Values of the group columns, by name.
    sums
        shape: [num_repeats, num_prompts, num_sums]; zeros where a prompt is absent in a repeat.
    """

    key: dict[str, Any]
    sums: Floats

    @property
    def totals(self) -> Floats:
        """Sums over repeats and prompts, shape [num_sums]."""
        return np.asarray(self.sums.sum(axis=(0, 1)), dtype=np.float64)

    @property
    def num_contributing(self) -> NDArray[np.int64]:
        """Prompts with a sum other than 0 in any repeat, for each sum; shape [num_sums]."""
        return np.asarray((self.sums != 0).any(axis=0).sum(axis=0), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One output of a statistic: its columns, which sum is its denominator, why it may be null."""

    columns: Mapping[str, Any]
    denominator: int
    undefined: str


def check_columns(frame: pl.DataFrame, columns: Iterable[str], *, what: str) -> None:
    """Raises ValueError that names every column of `columns` that `frame` lacks."""
    missing = [name for name in dict.fromkeys(columns) if name not in frame.columns]
    if missing:
        raise ValueError(f"{what}: missing column {', '.join(repr(name) for name in missing)}")


def check_finite(frame: pl.DataFrame, columns: Iterable[str], *, what: str) -> None:
    """Raises ValueError on NaN or infinity in a column of floats (polars counts NaN as a number)."""
    names = [name for name in columns if frame.schema[name].is_float()]
    bad = frame.select((~pl.col(names).is_finite()).fill_null(False).any()).row(0) if names else ()
    for name, broken in zip(names, bad, strict=True):
        if broken:
            raise ValueError(f"{what}: column '{name}' holds NaN or infinity; unknown is null")


def long_frame(
    rows: Sequence[Mapping[str, Any]],
    *,
    by: Mapping[str, pl.DataType],
    extra: Mapping[str, pl.DataType] | None = None,
) -> pl.DataFrame:
    """Result rows as a frame with declared types; nothing is inferred from the first rows.

    Parameters
    ----------
    rows
        One mapping a row; keys that are absent become null.
    by
        Group columns and their types, first in the frame.
    extra
        Further columns and types: those of a grid (`position`) go before `metric`, by the caller's order.

    Returns
    -------
    pl.DataFrame
        Columns `by`, `extra`, then `ESTIMATE_SCHEMA`.
    """
    schema = {**by, **(extra or {}), **ESTIMATE_SCHEMA}
    return pl.DataFrame(
        [[row.get(name) for row in rows] for name in schema], schema=schema, orient="col", strict=True
    )


def cluster_sums(
    frame: pl.DataFrame,
    *,
    by: Sequence[str],
    sums: Sequence[str],
    cluster: str = "prompt_id",
    repeat: str | None = "repeat",
) -> list[ClusterSums]:
    """Sums of columns per group, repeat and prompt, as arrays.

    Parameters
    ----------
    frame
        Any grain finer than or equal to group x repeat x prompt.
    by
        Group columns; empty: one group.
    sums
        Columns to add up, finite, null counts as 0.
    cluster
        Column of the prompt.
    repeat
        Column of the repeat; None if there is only one run.

    Returns
    -------
    list of ClusterSums
        Sorted by group. Empty for a frame without rows.

    Raises
    ------
    ValueError
        A column is missing (named) or holds NaN or infinity.
    """
    keys = [*by, *([repeat] if repeat is not None and repeat not in by else []), cluster]
    check_columns(frame, [*keys, *sums], what="cluster sums")
    check_finite(frame, sums, what="cluster sums")
    table = frame.group_by(list(dict.fromkeys(keys))).agg(
        pl.col(name).cast(pl.Float64).sum() for name in sums
    )
    if table.height == 0:
        return []

    def code(name: str) -> pl.Expr:
        ranked = pl.col(name).rank("dense") - 1
        return (ranked.over(list(by)) if by else ranked).cast(pl.Int64)

    outer = code(repeat) if repeat is not None and repeat not in by else pl.lit(0, dtype=pl.Int64)
    table = table.with_columns(outer.alias("__repeat"), code(cluster).alias("__prompt"))
    groups = table.sort(*by).partition_by(list(by), maintain_order=True) if by else [table]
    found = []
    for group in groups:
        repeats, prompts = group["__repeat"].to_numpy(), group["__prompt"].to_numpy()
        array = np.zeros((int(repeats.max()) + 1, int(prompts.max()) + 1, len(sums)))
        array[repeats, prompts] = group.select(sums).to_numpy()
        found.append(ClusterSums(key={name: group[name][0] for name in by}, sums=array))
    return found


def cluster_bootstrap(
    sums: Floats,
    statistic: Statistic,
    *,
    level: float = 0.95,
    rng: np.random.Generator,
    num_resamples: int = 2000,
    method: Method = "BCa",
    num_clusters: Sequence[int] | None = None,
) -> tuple[Interval, ...]:
    """Intervals of statistics of summed per-prompt quantities, by resampling prompts (and repeats).

    Parameters
    ----------
    sums
        Sufficient statistics, shape: [num_repeats, num_prompts, num_sums]; finite; zeros where a
        prompt is absent in a repeat.
    statistic
        Maps totals of shape [..., num_sums] to values of shape [..., num_outputs]; NaN marks an
        undefined value. It must not depend on the scale of the totals (ratios, products of ratios).
    level
        Nominal coverage, in (0, 1).
    rng
        Source of randomness.
    num_resamples
        Number of resamples.
    method
        Limits for a single run; several repeats always use `percentile`.
    num_clusters
        Prompts that contribute to each output, shape: [num_outputs]; by default all.

    Returns
    -------
    tuple of Interval
        One an output. The interval is None, with a reason, where fewer than 5 prompts contribute,
        where all resamples agree (a width of 0 would read as certainty), or where more than 5 % of
        the resamples are undefined; fewer undefined ones are left out. It is widened to hold the
        estimate in the rare case that it does not.

    Raises
    ------
    ValueError
        Wrong shape, NaN or infinity, or a level outside (0, 1).

    Notes
    -----
    One repeat: nonparametric bootstrap of prompts with BCa limits [1]_, by `scipy.stats.bootstrap`
    on prompt indices up to 512 prompts; beyond that the same formula with the jackknife taken from
    totals minus one prompt, since SciPy's costs the square of the number of prompts.

    Several repeats: prompts are the same in every repeat (crossed, not nested), so one draw of
    prompts is combined with one draw of repeats [2]_ [3]_; percentile limits. Of R repeats R - 1
    are drawn, which makes the variance between repeats unbiased for small R [4]_. The noise of a
    single request is counted up to three times [3]_: these intervals are too wide rather than too
    narrow. Two or three repeats still say little about the run-to-run spread: see `welch_log_ratio`.

    References
    ----------
    .. [1] Efron (1987), Better bootstrap confidence intervals, JASA 82, 171-185.
    .. [2] Davison and Hinkley (1997), Bootstrap Methods and their Application, section 3.8.
    .. [3] Owen (2007), The pigeonhole bootstrap, Annals of Applied Statistics 1, 386-411.
    .. [4] Rao and Wu (1988), Resampling inference with complex survey data, JASA 83, 231-241.
    """
    sums = np.asarray(sums, dtype=np.float64)
    if sums.ndim != 3:
        raise ValueError(f"sums has shape {sums.shape}, expected [num_repeats, num_prompts, num_sums]")
    if not np.isfinite(sums).all():
        raise ValueError("sums holds NaN or infinity; unknown is left out before summing")
    _check_level(level)
    num_repeats, num_prompts, _ = sums.shape

    def quiet(totals: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(statistic(totals), dtype=np.float64)

    point = quiet(sums.sum(axis=(0, 1)))
    clusters = np.full(point.shape, num_prompts) if num_clusters is None else np.asarray(num_clusters)
    if num_repeats > 1:
        method = "percentile"
    label = f"{method.lower()}, {SINGLE_RUN if num_repeats == 1 else REPEATED_RUNS}"
    wanted = np.isfinite(point) & (clusters >= MINIMUM_CLUSTERS)
    limits: Floats = np.full((*point.shape, 2), np.nan)
    distribution: Floats = np.full((*point.shape, 0), np.nan)
    if wanted.any():
        if num_repeats == 1 and num_prompts <= _SCIPY_CLUSTERS:
            distribution, limits = _scipy_bootstrap(sums[0], quiet, level, rng, num_resamples, method)
        else:
            distribution = _resample(sums, quiet, rng, num_resamples)
    jackknife = quiet(sums.sum(axis=(0, 1)) - sums.sum(axis=0)) if method == "BCa" and wanted.any() else None
    found = []
    for index in range(point.size):
        value = float(point[index])
        if not math.isfinite(value):
            found.append(Interval(value=None, low=None, high=None, method=NO_INTERVAL, reason="undefined"))
            continue
        low = high = reason = None
        if clusters[index] < MINIMUM_CLUSTERS:
            reason = f"fewer than {MINIMUM_CLUSTERS} prompts"
        else:
            resampled = distribution[index]
            finite = resampled[np.isfinite(resampled)]
            num_undefined = resampled.size - finite.size
            if num_undefined > MAXIMUM_UNDEFINED_SHARE * resampled.size:
                reason = f"undefined in {num_undefined} of {resampled.size} resamples"
            elif np.ptp(finite) <= 1e-12 * max(1.0, abs(value)):
                reason = f"no variation between the {clusters[index]} prompts"
            else:
                low, high = limits[index]
                if not (math.isfinite(low) and math.isfinite(high)):
                    low, high = _limits(
                        finite,
                        value,
                        level=level,
                        jackknife=None if jackknife is None else jackknife[:, index],
                    )
                low, high = float(min(low, value)), float(max(high, value))
        found.append(
            Interval(
                value=value,
                low=low,
                high=high,
                method=label if reason is None else NO_INTERVAL,
                reason=reason,
            )
        )
    return tuple(found)


def _prompt_counts(indices: NDArray[np.int64], num_prompts: int) -> Floats:
    """How often each prompt occurs in each row of `indices`; shape [num_rows, num_prompts]."""
    offsets = np.arange(indices.shape[0], dtype=np.int64)[:, None] * num_prompts
    counts = np.bincount((indices + offsets).ravel(), minlength=indices.shape[0] * num_prompts)
    return counts.reshape(indices.shape[0], num_prompts).astype(np.float64)


def _scipy_bootstrap(
    sums: Floats,
    statistic: Statistic,
    level: float,
    rng: np.random.Generator,
    num_resamples: int,
    method: Method,
) -> tuple[Floats, Floats]:
    """SciPy's bootstrap of prompt indices: resampled values [num_outputs, num_resamples], limits [.., 2]."""
    num_prompts = sums.shape[0]

    def on_indices(indices: NDArray[np.int64], axis: int = -1) -> Floats:
        flat = indices.reshape(-1, indices.shape[-1])
        values = statistic(_prompt_counts(flat, num_prompts) @ sums)
        return np.moveaxis(values, -1, 0).reshape(values.shape[-1], *indices.shape[:-1])

    with warnings.catch_warnings():
        # Constant or undefined outputs come back as NaN with this warning; they get a reason instead.
        warnings.simplefilter("ignore", scipy_stats.DegenerateDataWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        result = scipy_stats.bootstrap(
            (np.arange(num_prompts),),
            on_indices,
            n_resamples=num_resamples,
            vectorized=True,
            confidence_level=level,
            method=method,
            rng=rng,
        )
    limits = np.stack([result.confidence_interval.low, result.confidence_interval.high], axis=-1)
    return np.asarray(result.bootstrap_distribution), np.asarray(limits)


def _resample(sums: Floats, statistic: Statistic, rng: np.random.Generator, num_resamples: int) -> Floats:
    """Statistics of resampled totals as products of count matrices; shape [num_outputs, num_resamples]."""
    num_repeats, num_prompts, _ = sums.shape
    chunk = max(1, _CHUNK_ELEMENTS // num_prompts)
    parts = []
    for start in range(0, num_resamples, chunk):
        size = min(chunk, num_resamples - start)
        counts = _prompt_counts(rng.integers(0, num_prompts, size=(size, num_prompts)), num_prompts)
        if num_repeats == 1:
            totals = counts @ sums[0]
        else:
            outer = rng.multinomial(num_repeats - 1, np.full(num_repeats, 1 / num_repeats), size=size)
            totals = np.zeros((size, sums.shape[2]))
            for repeat in range(num_repeats):
                totals += outer[:, repeat, None] * (counts @ sums[repeat])
        parts.append(statistic(totals))
    return np.moveaxis(np.concatenate(parts), -1, 0)


def _limits(
    distribution: Floats, point: float, *, level: float, jackknife: Floats | None
) -> tuple[float, float]:
    """BCa limits from finite resamples and leave-one-prompt-out values; percentile limits without the latter.

    Efron (1987), equations 2.3 and 6.6; equal to `scipy.stats.bootstrap` on the same resamples.
    """
    probabilities = np.array([(1 - level) / 2, (1 + level) / 2])
    if jackknife is not None:
        below = (np.sum(distribution < point) + np.sum(distribution <= point)) / (2 * distribution.size)
        if 0 < below < 1:
            bias = special.ndtri(below)
            kept = jackknife[np.isfinite(jackknife)]
            centred = kept.mean() - kept
            spread = float(np.sum(centred**2))
            acceleration = float(np.sum(centred**3)) / (6 * spread**1.5) if spread > 0 else 0.0
            shifted = bias + special.ndtri(probabilities)
            probabilities = special.ndtr(bias + shifted / (1 - acceleration * shifted))
    low, high = np.quantile(distribution, probabilities)
    return float(low), float(high)


def estimate_rows(
    groups: Iterable[ClusterSums],
    statistic: Statistic,
    *,
    outputs: Sequence[Output],
    level: float,
    rng: np.random.Generator,
    num_resamples: int = 2000,
) -> list[dict[str, Any]]:
    """Rows of a result frame: every output of a statistic in every group, with its interval.

    `n` is the total of the output's denominator sum, `n_clusters` the prompts in which it is not 0.

    Parameters
    ----------
    groups
        From `cluster_sums`.
    statistic
        As in `cluster_bootstrap`.
    outputs
        One for each output of the statistic, in order.
    level, rng, num_resamples
        As in `cluster_bootstrap`.
    """
    rows = []
    denominators = [output.denominator for output in outputs]
    for group in groups:
        clusters = group.num_contributing[denominators]
        totals = group.totals[denominators]
        intervals = cluster_bootstrap(
            group.sums,
            statistic,
            level=level,
            rng=rng,
            num_resamples=num_resamples,
            num_clusters=clusters.tolist(),
        )
        for output, interval, total, num_clusters in zip(outputs, intervals, totals, clusters, strict=True):
            estimate = Estimate(
                value=interval.value,
                low=interval.low,
                high=interval.high,
                level=level,
                n=round(total),
                n_clusters=int(num_clusters),
                method=interval.method,
                reason=output.undefined if interval.value is None else interval.reason,
            )
            rows.append({**group.key, **output.columns, **estimate.as_row()})
    return rows


def ratio_of_sums(totals: Floats) -> Floats:
    """First total over second, shape [..., 2] to [..., 1]; NaN where the second is 0."""
    return np.where(totals[..., 1] != 0, totals[..., 0] / totals[..., 1], np.nan)[..., None]


def ratio_table(  # noqa: PLR0913 - two column names and two cluster levels belong to one ratio
    frame: pl.DataFrame,
    *,
    numerator: str,
    denominator: str,
    by: Sequence[str],
    metric: str,
    cluster: str = "prompt_id",
    repeat: str | None = "repeat",
    level: float = 0.95,
    rng: np.random.Generator,
) -> pl.DataFrame:
    """Pooled ratio (sum over sum) of two columns in every group, with prompt-clustered intervals.

    Parameters
    ----------
    frame
        Any grain; rows carry the prompt and the repeat.
    numerator, denominator
        Columns to add up; null counts as 0 in both.
    by
        Group columns; empty: one row.
    metric
        Name of the ratio.
    cluster, repeat
        Columns of the prompt and of the repeat (None: a single run).
    level, rng
        As in `cluster_bootstrap`.

    Returns
    -------
    pl.DataFrame
        `by` columns, then `ESTIMATE_SCHEMA`; `n` is the denominator's total. Value null with the
        reason "<denominator> is 0" where nothing is to divide by.

    Raises
    ------
    ValueError
        A column is missing (named) or holds NaN.
    """
    groups = cluster_sums(frame, by=by, sums=[numerator, denominator], cluster=cluster, repeat=repeat)
    output = Output(columns={"metric": metric}, denominator=1, undefined=f"{denominator} is 0")
    rows = estimate_rows(groups, ratio_of_sums, outputs=[output], level=level, rng=rng)
    return long_frame(rows, by={name: frame.schema[name] for name in by})


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanOfRatios:
    """Mean of per-row ratios, its number of rows, and the rows left out because their denominator is 0."""

    value: float | None
    n: int
    num_undefined: int


def mean_of_ratios(frame: pl.DataFrame, *, numerator: str, denominator: str) -> MeanOfRatios:
    """The unweighted mean of per-row ratios, which is not the pooled ratio and so has its own name.

    Short rows count as much as long ones; rows with denominator 0 have no ratio and are counted apart.
    """
    check_columns(frame, [numerator, denominator], what="mean of ratios")
    defined = frame.filter(pl.col(denominator) != 0)
    value = defined.select((pl.col(numerator) / pl.col(denominator)).mean()).item()
    return MeanOfRatios(value=value, n=defined.height, num_undefined=frame.height - defined.height)


def minimum_n(q: float) -> int:
    """The smallest sample for which a quantile is reported.

    At least 3 observations lie beyond it on its thinner side, n * min(q, 1 - q) >= 3, and n >= 5:
    60 for P95 and 300 for P99 (P50 would allow 6 and needs 5 as the smallest sample at all).
    """
    _check_level(q)
    thin = min(q, 1 - q)
    return (
        MINIMUM_CLUSTERS if thin >= 0.5 else max(MINIMUM_CLUSTERS, math.ceil(TAIL_OBSERVATIONS / thin - 1e-6))
    )


def quantile_estimate(
    values: Sequence[float] | Floats | pl.Series,
    q: float,
    *,
    level: float = 0.95,
    n_clusters: int | None = None,
) -> Estimate:
    """A sample quantile with a distribution-free interval from order statistics.

    Parameters
    ----------
    values
        Observations, shape: [n]; NaN is refused, null must be dropped before.
    q
        Probability, in (0, 1).
    level
        Nominal coverage, in (0, 1); the true one is at least this.
    n_clusters
        Distinct prompts among the observations; by default n.

    Returns
    -------
    Estimate
        Value by linear interpolation (Hyndman and Fan's type 7). None with a reason below
        `minimum_n`. The interval is None with a reason where the sample can't bracket the
        quantile at this level.

    Raises
    ------
    ValueError
        NaN, or q or level outside (0, 1).

    Notes
    -----
    Interval by `scipy.stats.quantile_test` (Conover 1999, section 3.2): ends are order statistics, coverage
    is binomial. Observations are taken as independent; many requests of one prompt make it too narrow.
    """
    observations = np.asarray(values, dtype=np.float64)
    if not np.isfinite(observations).all():
        raise ValueError("values hold NaN or infinity; unknown is left out before")
    needed = minimum_n(q)
    n = observations.size
    clusters = n if n_clusters is None else n_clusters
    if n < needed:
        reason = f"n={n} below the {needed} needed for P{100 * q:g}"
        return Estimate(
            value=None,
            low=None,
            high=None,
            level=level,
            n=n,
            n_clusters=clusters,
            method=NO_INTERVAL,
            reason=reason,
        )
    value = float(np.quantile(observations, q))
    ends = scipy_stats.quantile_test(observations, q=value, p=q).confidence_interval(confidence_level=level)
    low, high = float(ends.low), float(ends.high)
    if not (math.isfinite(low) and math.isfinite(high)):
        reason = f"n={n} can't bracket P{100 * q:g} at level {level:g}"
        return Estimate(
            value=value,
            low=None,
            high=None,
            level=level,
            n=n,
            n_clusters=clusters,
            method=NO_INTERVAL,
            reason=reason,
        )
    return Estimate(
        value=value,
        low=min(low, value),
        high=max(high, value),
        level=level,
        n=n,
        n_clusters=clusters,
        method="binomial order statistics",
    )


def _geometric_mean(totals: Floats) -> Floats:
    return np.exp(ratio_of_sums(totals))


def geometric_mean_ratio(
    frame: pl.DataFrame,
    *,
    numerator: str,
    denominator: str,
    cluster: str = "prompt_id",
    repeat: str | None = "repeat",
    level: float = 0.95,
    rng: np.random.Generator,
) -> Estimate:
    """Geometric mean of paired ratios, one pair a row, with a prompt-clustered interval.

    Parameters
    ----------
    frame
        One row a pair (prompt x repeat); rows where either side is null are left out.
    numerator, denominator
        Columns of positive values.
    cluster, repeat, level, rng
        As in `ratio_table`.

    Returns
    -------
    Estimate
        exp of the mean log ratio; `n` pairs. None with the reason "no pair" without pairs.

    Raises
    ------
    ValueError
        A column is missing, or a value is not positive.
    """
    check_columns(frame, [numerator, denominator, cluster], what="geometric mean ratio")
    pairs = frame.drop_nulls([numerator, denominator])
    if not pairs.select(((pl.col(numerator) > 0) & (pl.col(denominator) > 0)).all()).item():
        raise ValueError(f"geometric mean ratio: '{numerator}' and '{denominator}' must be positive")
    pairs = pairs.with_columns(
        (pl.col(numerator) / pl.col(denominator)).log().alias("__log_ratio"), pl.lit(1).alias("__pairs")
    )
    groups = cluster_sums(pairs, by=(), sums=["__log_ratio", "__pairs"], cluster=cluster, repeat=repeat)
    if not groups:
        return Estimate(
            value=None,
            low=None,
            high=None,
            level=level,
            n=0,
            n_clusters=0,
            method=NO_INTERVAL,
            reason="no pair",
        )
    output = Output(columns={}, denominator=1, undefined="no pair")
    return Estimate(**estimate_rows(groups, _geometric_mean, outputs=[output], level=level, rng=rng)[0])


def welch_log_ratio(values: Sequence[float], baseline: Sequence[float], *, level: float = 0.95) -> Estimate:
    """Ratio of geometric means of repeated runs, with Welch's interval on logarithms.

    Parameters
    ----------
    values, baseline
        One positive number a run (tokens a second of a server start), shape: [num_runs].
    level
        Nominal coverage, in (0, 1).

    Returns
    -------
    Estimate
        `n` and `n_clusters` are the smaller number of runs. With a single run on either side the interval is
        None, method and reason "single run".

    Raises
    ------
    ValueError
        A side without runs, or a value that is not positive and finite.

    Notes
    -----
    `scipy.stats.ttest_ind(equal_var=False)` on logs (Welch 1947); runs are the unit, not tokens.
    """
    arm_runs, baseline_runs = np.asarray(values, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    for name, runs in (("values", arm_runs), ("baseline", baseline_runs)):
        if runs.size == 0:
            raise ValueError(f"{name}: no run")
        if not (np.isfinite(runs).all() and (runs > 0).all()):
            raise ValueError(f"{name}: {runs.tolist()} must be positive and finite")
    logs, baseline_logs = np.log(arm_runs), np.log(baseline_runs)
    value = math.exp(float(logs.mean() - baseline_logs.mean()))
    n = min(logs.size, baseline_logs.size)
    if n < 2:
        return Estimate(
            value=value,
            low=None,
            high=None,
            level=level,
            n=n,
            n_clusters=n,
            method="single run",
            reason="single run",
        )
    if np.ptp(logs) + np.ptp(baseline_logs) < 1e-12:
        reason = f"no variation between the {n} runs"
        return Estimate(
            value=value,
            low=None,
            high=None,
            level=level,
            n=n,
            n_clusters=n,
            method=NO_INTERVAL,
            reason=reason,
        )
    ends = scipy_stats.ttest_ind(logs, baseline_logs, equal_var=False).confidence_interval(
        confidence_level=level
    )
    low, high = float(np.exp(ends.low)), float(np.exp(ends.high))
    return Estimate(value=value, low=low, high=high, level=level, n=n, n_clusters=n, method="welch on logs")


def wilson_estimate(num_hits: int, n: int, *, level: float = 0.95, n_clusters: int | None = None) -> Estimate:
    """A proportion with Wilson's score interval, by `scipy.stats.binomtest`.

    Parameters
    ----------
    num_hits, n
        Hits among n independent trials, 0 <= num_hits <= n.
    level
        Nominal coverage, in (0, 1).
    n_clusters
        Distinct prompts among the trials; by default n.

    Returns
    -------
    Estimate
        None with the reason "n=0" without trials.

    Raises
    ------
    ValueError
        num_hits is negative or above n.

    References
    ----------
    Wilson (1927), JASA 22, 209-212.
    """
    if not 0 <= num_hits <= n:
        raise ValueError(f"num_hits {num_hits} is not between 0 and n {n}")
    clusters = n if n_clusters is None else n_clusters
    if n == 0:
        return Estimate(
            value=None, low=None, high=None, level=level, n=0, n_clusters=0, method=NO_INTERVAL, reason="n=0"
        )
    ends = scipy_stats.binomtest(num_hits, n).proportion_ci(confidence_level=level, method="wilson")
    value = num_hits / n
    low, high = min(float(ends.low), value), max(float(ends.high), value)
    return Estimate(value=value, low=low, high=high, level=level, n=n, n_clusters=clusters, method="wilson")


def fisher_p_value(num_hits: int, n: int, num_hits_control: int, n_control: int) -> float:
    """Two-sided p value of Fisher's exact test that two proportions are equal (`scipy.stats.fisher_exact`).

    Raises
    ------
    ValueError
        A count is negative or above its n.
    """
    for hits, total in ((num_hits, n), (num_hits_control, n_control)):
        if not 0 <= hits <= total:
            raise ValueError(f"{hits} hits is not between 0 and n {total}")
    table = [[num_hits, n - num_hits], [num_hits_control, n_control - num_hits_control]]
    return float(scipy_stats.fisher_exact(table).pvalue)


def mcnemar_p_value(num_only_first: int, num_only_second: int) -> float | None:
    """Two-sided exact McNemar p value from the discordant pairs; None without any.

    The binomial test of one half on the discordant pairs (`scipy.stats.binomtest`).
    """
    if num_only_first < 0 or num_only_second < 0:
        raise ValueError(f"discordant counts {num_only_first} and {num_only_second} can't be negative")
    total = num_only_first + num_only_second
    return float(scipy_stats.binomtest(num_only_first, total, 0.5).pvalue) if total else None


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"{level} is not between 0 and 1")
