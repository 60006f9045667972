"""Acceptance of drafts: lengths, rates, survival by position, suffix decay, hit rate by entropy.

Takes frames in the shape of `schema` with labels joined (`Run.labelled`) or counters
of a server, returns numbers and long frames. May import `stats`, `schema` and `errors`;
knows no engine, file or chart. Separate so that each definition stands in one place.

Definitions, shared by everything here -------------------------------------- A draft is a step with
`num_draft_tokens` > 0. Acceptance counts are the verifier's, before any truncation; the bonus token
is never counted as accepted. Everything is pooled, sum over sum. Accepted tokens are a prefix of
the draft (chains): tree drafts have no positions and are refused (`UnsupportedDraftError`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import polars as pl

from specnb import schema
from specnb.errors import RecordError, UnsupportedDraftError
from specnb.stats import (
    ClusterSums,
    Floats,
    Output,
    check_columns,
    cluster_sums,
    estimate_rows,
    long_frame,
    ratio_table,
)

ACCEPTANCE_METRICS: Final = (
    "mean_acceptance_length",
    "tokens_per_target_step",
    "draft_acceptance_rate",
    "full_block_hit_rate",
    "miss_rate",
)
POSITION_METRICS: Final = ("survival", "conditional_acceptance_rate", "acceptance_rate_by_position")
TRUNCATION_TOLERANCE: Final = 0.02
NO_DRAFTS: Final = "speculation_inactive: no step carried a draft"
NO_FULL_DRAFT: Final = "speculation_inactive or short drafts only: no step carried a full draft"

_STEP_COUNTS: Final = ("num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")
_drafted, _accepted = pl.col("num_draft_tokens"), pl.col("num_accepted_tokens")
_is_draft = _drafted > 0


# Scalars


def mean_acceptance_length(steps: pl.DataFrame) -> float | None:
    """Mean acceptance length, 1 + accepted / drafts: what the verifier yields a step, bonus token included.

    Parameters
    ----------
    steps
        One row a step (`schema.STEPS`); steps without a draft don't count.

    Returns
    -------
    float or None
        In [1, K + 1]; None without drafts.

    Notes
    -----
    Counts are taken before a stop token or length limit cuts the answer off, as vLLM's are; see
    `truncation_gap` for what the user got.

    References ---------- vLLM `vllm/v1/spec_decode/metrics.py`, "Mean acceptance length"; Leviathan
    et al. (arXiv 2211.17192), equation 1.
    """
    accepted, drafts = _totals(steps, _accepted, _is_draft)
    return 1 + accepted / drafts if drafts else None


def draft_acceptance_rate(steps: pl.DataFrame) -> float | None:
    """Accepted / drafted tokens, in [0, 1], bonus token excluded, as vLLM defines it; None without drafts."""
    accepted, drafted = _totals(steps, _accepted, _drafted)
    return accepted / drafted if drafted else None


def full_block_hit_rate(steps: pl.DataFrame) -> float | None:
    """P(all K accepted): share of full drafts that were accepted whole, in [0, 1]; None without drafts.

    Steps carry no K: a draft is full if it is as long as the longest of its arm in `steps` (of all, without
    an `arm` column). Shorter ones are neither hits nor misses of a full block and are left out.
    """
    full = _is_full_draft(steps)
    hits, drafts = _totals(steps, full & (_accepted == _drafted), full)
    return hits / drafts if drafts else None


def miss_rate(steps: pl.DataFrame) -> float | None:
    """Share of drafts of which no token was accepted, in [0, 1]; None without drafts."""
    missed, drafts = _totals(steps, _is_draft & (_accepted == 0), _is_draft)
    return missed / drafts if drafts else None


def tokens_per_target_step(steps: pl.DataFrame) -> float | None:
    """Emitted tokens / all target steps after prefill: what the user gets, drafts or not, after truncation.

    None without steps. The baseline's is 1. Drafters that skip steps (prompt lookup) are compared by this.
    """
    emitted, num_steps = _totals(
        steps, pl.col("num_emitted_tokens"), pl.col("num_emitted_tokens").is_not_null()
    )
    return emitted / num_steps if num_steps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationGap:
    """Acceptance length as the verifier counts it, and as the user got it.

    Attributes
    ----------
    verifier
        Mean acceptance length before truncation.
    committed
        Emitted tokens of steps with a draft / such steps.
    num_drafts
        Steps with a draft.
    """

    verifier: float | None
    committed: float | None
    num_drafts: int

    @property
    def differs(self) -> bool:
        """Whether the verifier's number is more than 2 % above the committed one."""
        if self.verifier is None or self.committed is None:
            return False
        return self.verifier > (1 + TRUNCATION_TOLERANCE) * self.committed


def truncation_gap(steps: pl.DataFrame) -> TruncationGap:
    """The verifier's acceptance length beside the committed one (stop tokens inside an accepted prefix).

    The gap is large for short answers and vanishes for long ones.
    """
    emitted, drafts = _totals(
        steps, pl.when(_is_draft).then(pl.col("num_emitted_tokens")).otherwise(0), _is_draft
    )
    return TruncationGap(
        verifier=mean_acceptance_length(steps),
        committed=emitted / drafts if drafts else None,
        num_drafts=int(drafts),
    )


def _totals(steps: pl.DataFrame, *expressions: pl.Expr) -> tuple[int, ...]:
    _check_steps(steps)
    row = steps.select(
        value.cast(pl.Int64).sum().alias(str(index)) for index, value in enumerate(expressions)
    ).row(0)
    return tuple(int(value) for value in row)


def _is_full_draft(steps: pl.DataFrame) -> pl.Expr:
    """Whether a row holds a draft as long as its arm's longest."""
    longest = _drafted.max().over("arm") if "arm" in steps.columns else _drafted.max()
    return _is_draft & (_drafted == longest)


def _check_steps(steps: pl.DataFrame, extra: Iterable[str] = ()) -> None:
    check_columns(steps, [*_STEP_COUNTS, *extra], what="steps")
    broken = steps.select(
        ((_accepted > _drafted) | (_accepted < 0) | (_drafted < 0)).fill_null(True).any()
    ).item()
    if broken:
        raise RecordError("steps: num_accepted_tokens is null or not between 0 and num_draft_tokens")


# Tables


def acceptance_table(
    steps: pl.DataFrame, *, by: Sequence[str], level: float = 0.95, rng: np.random.Generator
) -> pl.DataFrame:
    """Acceptance lengths and rates of every group, pooled, with prompt-clustered intervals.

    Parameters
    ----------
    steps
        One row a step, labelled (`run.labelled("steps")`): needs prompt_id, repeat and the `by` columns.
    by
        Group columns, such as ("arm", "entropy_tier", "concurrency"); may be empty.
    level, rng
        As in `stats.cluster_bootstrap`.

    Returns
    -------
    pl.DataFrame
        `by` columns, then `stats.ESTIMATE_SCHEMA`; five rows a group by `metric`:
        mean_acceptance_length (n: drafts), tokens_per_target_step (n: target steps),
        draft_acceptance_rate (n: drafted tokens), full_block_hit_rate (n: full drafts, as long as
        the longest of the arm in `steps`, whatever the group) and miss_rate (n: drafts).
        Null with the reason `NO_DRAFTS`, or `NO_FULL_DRAFT`, where a group has none: not 0, not 1.

    Raises
    ------
    ValueError
        A column is missing (named).
    RecordError
        More accepted than drafted.
    """
    _check_steps(steps)
    patterns = _patterns(steps.with_columns(_is_full_draft(steps).alias("is_full")), [*by, "is_full"])
    weight = pl.col("num_steps")
    table = patterns.with_columns(
        (weight * _is_draft).alias("drafts"),
        (weight * _drafted).alias("drafted"),
        (weight * _accepted).alias("accepted"),
        (weight * pl.col("is_full")).alias("full"),
        (weight * (pl.col("is_full") & (_accepted == _drafted))).alias("hits"),
        (weight * (_is_draft & (_accepted == 0))).alias("missed"),
    )
    names = ("drafts", "drafted", "accepted", "full", "hits", "missed", "num_emitted_tokens", "num_steps")
    groups = cluster_sums(table, by=by, sums=names)

    def statistic(totals: Floats) -> Floats:
        drafts, drafted, accepted, full, hits, missed, emitted, num_steps = np.moveaxis(totals, -1, 0)
        return np.stack(
            [1 + accepted / drafts, emitted / num_steps, accepted / drafted, hits / full, missed / drafts],
            axis=-1,
        )

    denominators = (0, 7, 1, 3, 0)
    undefined = {"tokens_per_target_step": "no target step", "full_block_hit_rate": NO_FULL_DRAFT}
    outputs = [
        Output(
            columns={"metric": metric},
            denominator=denominator,
            undefined=undefined.get(metric, NO_DRAFTS),
        )
        for metric, denominator in zip(ACCEPTANCE_METRICS, denominators, strict=True)
    ]
    rows = estimate_rows(groups, statistic, outputs=outputs, level=level, rng=rng)
    return long_frame(rows, by={name: steps.schema[name] for name in by})


def acceptance_by_position(
    steps: pl.DataFrame, *, by: Sequence[str], level: float = 0.95, rng: np.random.Generator
) -> pl.DataFrame:
    """Survival, conditional rate and vLLM's rate at every draft position, with prompt-clustered intervals.

    Parameters
    ----------
    steps
        One row a step, labelled, as in `acceptance_table`.
    by
        Group columns; may be empty.
    level, rng
        As in `stats.cluster_bootstrap`.

    Returns
    -------
    pl.DataFrame
        `by` columns, `position` (0 is the first draft), then `stats.ESTIMATE_SCHEMA`; positions up
        to the longest draft of the group; `metric` is

        * survival: Kaplan-Meier probability that drafts 0..position are all accepted, as if every
          draft were full (n: drafts at risk, that is reached and drafted);
        * conditional_acceptance_rate: accepted at the position / reached and drafted there (n: the same);
        * acceptance_rate_by_position: accepted beyond the position / all drafts, vLLM's counter
          ratio, in which a draft that was never made counts like a rejected one (n: drafts).

        Null with a reason where nothing is at risk, except that survival stays 0 once all were
        rejected. Groups without drafts have no row.

    Notes
    -----
    A short draft that was accepted whole is censored at its end, not rejected.
    Censoring is taken as independent of acceptance; drafters that stop early when unsure break
    this, and survival is then too high. With full drafts survival equals vLLM's rate and the mean
    acceptance length is 1 + its sum.

    References
    ----------
    Kaplan and Meier (1958), JASA 53, 457-481; vLLM `vllm/v1/spec_decode/metrics.py`.
    """
    groups, longest = _position_sums(steps, by)

    def statistic(totals: Floats) -> Floats:
        drafts, at_risk, accepted = totals[..., :1], totals[..., 1 : longest + 1], totals[..., longest + 1 :]
        survival, conditional = kaplan_meier(at_risk, accepted)
        marginal = np.where(drafts > 0, accepted / drafts, np.nan)
        return np.concatenate([survival, conditional, np.broadcast_to(marginal, conditional.shape)], axis=-1)

    outputs = [
        Output(
            columns={"metric": metric, "position": position},
            denominator=0 if metric == "acceptance_rate_by_position" else 1 + position,
            undefined="no draft reached this position",
        )
        for metric in POSITION_METRICS
        for position in range(longest)
    ]
    rows = estimate_rows([sums for sums, _ in groups], statistic, outputs=outputs, level=level, rng=rng)
    limits = [limit for _, limit in groups for _ in outputs]
    kept = [row for row, limit in zip(rows, limits, strict=True) if row["position"] < limit]
    return long_frame(kept, by={name: steps.schema[name] for name in by}, extra={"position": pl.Int64()})


def kaplan_meier(at_risk: Floats, accepted: Floats) -> tuple[Floats, Floats]:
    """Survival and conditional rates by position from counts.

    Parameters
    ----------
    at_risk
        Drafts that reached and drafted each position, shape: [..., num_positions].
    accepted
        Those accepted there, same shape.

    Returns
    -------
    tuple of arrays
        Survival S_i = product of c_j for j <= i, and c_i = accepted / at_risk; NaN where nothing is
        at risk, except that S stays 0 after a position where all were rejected.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        conditional = np.where(at_risk > 0, accepted / at_risk, np.nan)
    extinct = np.logical_or.accumulate(conditional == 0, axis=-1)
    return np.where(extinct, 0.0, np.cumprod(conditional, axis=-1)), conditional


def suffix_decay(
    steps: pl.DataFrame, *, by: Sequence[str], level: float = 0.95, rng: np.random.Generator
) -> pl.DataFrame:
    """Trend of the conditional acceptance rate over positions, as a slope on the logit scale.

    Parameters
    ----------
    steps
        One row a step, labelled, as in `acceptance_table`.
    by
        Group columns; may be empty.
    level, rng
        As in `stats.cluster_bootstrap`.

    Returns
    -------
    pl.DataFrame
        `by` columns, then `stats.ESTIMATE_SCHEMA`; one row a group, metric `conditional_logit_slope`
        in logits per position: below 0, later drafts are accepted less often given that they are
        reached (n: reached and drafted positions). Null with a reason where fewer than two
        positions are reached or accepted and rejected positions do not overlap.

    Notes
    -----
    Logistic regression of accepted on position over the reached drafted positions, maximum
    likelihood [1]_; it exists if and only if accepted and rejected positions overlap [2]_. The fall
    of survival is no evidence of decay: it falls even when the conditional rate is constant. Easy
    text survives longer, so a mixture of easy and hard prompts pulls the slope up: a negative slope
    is evidence of decay, a slope of 0 not of its absence.

    References
    ----------
    .. [1] McCullagh and Nelder (1989), Generalized Linear Models, chapter 4.
    .. [2] Albert and Anderson (1984), Biometrika 71, 1-10.
    """
    groups, longest = _position_sums(steps, by)
    with_total = [
        ClusterSums(
            key=sums.key,
            sums=np.concatenate(
                [sums.sums, sums.sums[..., 1 : longest + 1].sum(axis=-1, keepdims=True)], axis=-1
            ),
        )
        for sums, _ in groups
    ]

    def statistic(totals: Floats) -> Floats:
        return logistic_slope(totals[..., 1 : longest + 1], totals[..., longest + 1 : -1])[..., None]

    output = Output(
        columns={"metric": "conditional_logit_slope"},
        denominator=2 * longest + 1,
        undefined="accepted and rejected positions do not overlap",
    )
    rows = estimate_rows(with_total, statistic, outputs=[output], level=level, rng=rng)
    return long_frame(rows, by={name: steps.schema[name] for name in by})


def logistic_slope(at_risk: Floats, accepted: Floats) -> Floats:
    """Maximum-likelihood slope of a logistic regression of accepted on position, from counts.

    Parameters
    ----------
    at_risk, accepted
        Trials and successes at positions 0, 1, ..., shape: [..., num_positions].

    Returns
    -------
    array, shape [...]
        Logits per position; NaN where the estimate does not exist. Newton's method on all rows at once.
    """
    shape = at_risk.shape[:-1]
    num_positions = at_risk.shape[-1]
    trials, successes = at_risk.reshape(-1, num_positions), accepted.reshape(-1, num_positions)
    slope = np.full(trials.shape[0], np.nan)
    if num_positions < 2:
        return slope.reshape(shape)
    hit, missed = successes > 0, trials - successes > 0

    def first(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Any:
        return mask.argmax(axis=-1)

    def last(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Any:
        return num_positions - 1 - mask[:, ::-1].argmax(axis=-1)

    exists = hit.any(axis=-1) & missed.any(axis=-1)
    exists &= (last(hit) > first(missed)) & (last(missed) > first(hit))
    trials, successes = trials[exists], successes[exists]
    if trials.shape[0] == 0:
        return slope.reshape(shape)
    position = np.arange(num_positions) - (num_positions - 1) / 2
    total, total_hits = trials.sum(axis=-1), successes.sum(axis=-1)
    intercept = np.log(total_hits) - np.log(total - total_hits)
    gradient = np.zeros_like(intercept)

    def log_likelihood(a: Floats, b: Floats) -> Floats:
        logit = a[:, None] + b[:, None] * position
        return np.asarray((successes * logit - trials * np.logaddexp(0, logit)).sum(axis=-1))

    current = log_likelihood(intercept, gradient)
    for _ in range(100):
        logit = intercept[:, None] + gradient[:, None] * position
        rate = np.exp(-np.logaddexp(0, -logit))
        weight = trials * rate * (1 - rate)
        residual = successes - trials * rate
        h00, h01, h11 = weight.sum(-1), (weight * position).sum(-1), (weight * position**2).sum(-1)
        g0, g1 = residual.sum(-1), (residual * position).sum(-1)
        determinant = h00 * h11 - h01**2
        safe = np.where(determinant > 0, determinant, 1.0)
        step_0 = np.where(determinant > 0, (h11 * g0 - h01 * g1) / safe, 0.0)
        step_1 = np.where(determinant > 0, (h00 * g1 - h01 * g0) / safe, 0.0)
        scale = np.ones_like(step_0)
        for _ in range(30):
            proposed = log_likelihood(intercept + scale * step_0, gradient + scale * step_1)
            worse = proposed < current - 1e-9 * np.abs(current)
            if not worse.any():
                break
            scale = np.where(worse, scale / 2, scale)
        intercept, gradient = intercept + scale * step_0, gradient + scale * step_1
        current = log_likelihood(intercept, gradient)
        if np.abs(scale * step_1).max() < 1e-12 and np.abs(scale * step_0).max() < 1e-12:
            break
    slope[exists] = gradient
    return slope.reshape(shape)


def counterfactual_acceptance_length(
    steps: pl.DataFrame, *, by: Sequence[str], level: float = 0.95, rng: np.random.Generator
) -> pl.DataFrame:
    """Mean acceptance length of shorter drafts of the same drafter: 1 + sum of S_i for i < K'.

    Parameters
    ----------
    steps
        One row a step, labelled, as in `acceptance_table`.
    by
        Group columns; may be empty.
    level, rng
        As in `stats.cluster_bootstrap`.

    Returns
    -------
    pl.DataFrame
        `by` columns, `num_speculative_tokens` (K', 1 to the longest draft of the group), then
        `stats.ESTIMATE_SCHEMA`; metric `counterfactual_acceptance_length` (n: drafts). Null with a
        reason from the first position that no draft reached.

    Notes
    -----
    S is Kaplan-Meier survival (`acceptance_by_position`). Assumes that position i is
    drafted the same way whatever the block's length: true for autoregressive drafters, an
    approximation for block-parallel ones.
    """
    groups, longest = _position_sums(steps, by)

    def statistic(totals: Floats) -> Floats:
        survival, _ = kaplan_meier(totals[..., 1 : longest + 1], totals[..., longest + 1 :])
        return 1 + np.cumsum(survival, axis=-1)

    outputs = [
        Output(
            columns={"metric": "counterfactual_acceptance_length", "num_speculative_tokens": position + 1},
            denominator=0,
            undefined="no draft reached the last of these positions",
        )
        for position in range(longest)
    ]
    rows = estimate_rows([sums for sums, _ in groups], statistic, outputs=outputs, level=level, rng=rng)
    limits = [limit for _, limit in groups for _ in outputs]
    kept = [row for row, limit in zip(rows, limits, strict=True) if row["num_speculative_tokens"] <= limit]
    extra = {"num_speculative_tokens": pl.Int64()}
    return long_frame(kept, by={name: steps.schema[name] for name in by}, extra=extra)


def hit_rate_by_entropy(
    tokens: pl.DataFrame,
    *,
    by: Sequence[str],
    num_bins: int = 8,
    level: float = 0.95,
    rng: np.random.Generator,
) -> pl.DataFrame:
    """Share of draft tokens that were accepted, by the entropy of the target's law at that token.

    Parameters
    ----------
    tokens
        One row an emitted token, labelled (`run.labelled("tokens")`). Rows of origin accepted or
        recovered count: a draft was tried there, and hit means accepted. Others are left out.
    by
        Group columns; may be empty.
    num_bins
        Quantile bins of entropy over all counted rows, the same bins in every group; fewer where
        quantiles coincide.
    level, rng
        As in `stats.cluster_bootstrap`.

    Returns
    -------
    pl.DataFrame
        `by` columns, `entropy_bin` (0-based), `entropy_low_nats` and `entropy_high_nats` (edges; a
        bin holds low < entropy <= high, the first its low edge too), `entropy_mean_nats` (of the
        group's tokens in the bin), then `stats.ESTIMATE_SCHEMA`; metric
        `conditional_acceptance_rate` (n: tokens at which a draft was tried). Empty where no draft
        was tried.
    """
    check_columns(tokens, ["origin", "entropy_nats", "prompt_id", "repeat", *by], what="tokens")
    if num_bins < 1:
        raise ValueError(f"num_bins {num_bins} must be at least 1")
    tried = tokens.filter(pl.col("origin").is_in(["accepted", "recovered"]))
    extra: dict[str, pl.DataType] = {
        "entropy_bin": pl.Int64(),
        "entropy_low_nats": pl.Float64(),
        "entropy_high_nats": pl.Float64(),
        "entropy_mean_nats": pl.Float64(),
    }
    group_types = {name: tokens.schema[name] for name in by}
    if tried.height == 0:
        return long_frame([], by=group_types, extra=extra)
    entropy = tried["entropy_nats"].to_numpy()
    edges = np.unique(np.quantile(entropy, np.linspace(0, 1, num_bins + 1)))
    if edges.size == 1:
        edges = np.repeat(edges, 2)
    # Right-closed bins; only values at or below the lowest edge would fall before the first.
    bins = np.clip(np.searchsorted(edges, entropy, side="left") - 1, 0, edges.size - 2)
    table = (
        tried.with_columns(pl.Series("entropy_bin", bins, dtype=pl.Int64))
        .group_by(*by, "entropy_bin", "repeat", "prompt_id")
        .agg(
            (pl.col("origin") == "accepted").sum().cast(pl.Int64).alias("num_hits"),
            pl.len().cast(pl.Int64).alias("num_tried"),
            pl.col("entropy_nats").sum().alias("entropy_sum"),
        )
    )
    keys = [*by, "entropy_bin"]
    rates = ratio_table(
        table,
        numerator="num_hits",
        denominator="num_tried",
        by=keys,
        metric="conditional_acceptance_rate",
        level=level,
        rng=rng,
    )
    means = table.group_by(keys).agg(
        (pl.col("entropy_sum").sum() / pl.col("num_tried").sum()).alias("entropy_mean_nats")
    )
    low, high = pl.Series(edges[:-1]), pl.Series(edges[1:])
    bounds = pl.DataFrame(
        {"entropy_bin": np.arange(edges.size - 1), "entropy_low_nats": low, "entropy_high_nats": high}
    )
    joined = rates.join(bounds, on="entropy_bin", how="left").join(
        means, on=keys, how="left", nulls_equal=True
    )
    return joined.select(*by, *extra, pl.exclude(*by, *extra)).sort(keys)


def hit_rate_by_label(
    frame: pl.DataFrame,
    *,
    by: Sequence[str],
    labels: Sequence[str] = ("entropy_tier", "task", "length_tier"),
    level: float = 0.95,
    rng: np.random.Generator,
) -> pl.DataFrame:
    """Share of tried draft tokens that were accepted, by label of the prompt.

    Parameters
    ----------
    frame
        Labelled tokens (as in `hit_rate_by_entropy`), or labelled steps where an engine gives no
        tokens: a step tries its accepted drafts and the one after them, if it was drafted.
    by
        Group columns; may be empty.
    labels
        Label columns, each reported by itself.
    level, rng
        As in `stats.cluster_bootstrap`.

    Returns
    -------
    pl.DataFrame
        `by` columns, `label` (name of the label column), `label_value`, then `stats.ESTIMATE_SCHEMA`; metric
        `conditional_acceptance_rate` (n: tokens at which a draft was tried).

    Notes
    -----
    Tokens cut off by a stop count in steps and not in tokens, so the two sources differ
    slightly for short answers.
    """
    check_columns(frame, ["prompt_id", "repeat", *labels, *by], what="hit rate by label")
    if "origin" in frame.columns:
        tried = frame.filter(pl.col("origin").is_in(["accepted", "recovered"])).with_columns(
            (pl.col("origin") == "accepted").cast(pl.Int64).alias("num_hits"),
            pl.lit(1, pl.Int64).alias("num_tried"),
        )
    else:
        _check_steps(frame)
        tried = frame.filter(_is_draft).with_columns(
            _accepted.alias("num_hits"), pl.min_horizontal(_accepted + 1, _drafted).alias("num_tried")
        )
    table = tried.group_by(list(dict.fromkeys([*by, *labels, "repeat", "prompt_id"]))).agg(
        pl.col("num_hits", "num_tried").sum()
    )
    parts = []
    for label in labels:
        rates = ratio_table(
            table.with_columns(pl.lit(label).alias("label"), pl.col(label).alias("label_value")),
            numerator="num_hits",
            denominator="num_tried",
            by=[*by, "label", "label_value"],
            metric="conditional_acceptance_rate",
            level=level,
            rng=rng,
        )
        parts.append(rates)
    return pl.concat(parts)


def acceptance_by_prompt_length(
    steps: pl.DataFrame,
    requests: pl.DataFrame,
    *,
    edges: Sequence[int],
    by: Sequence[str],
    level: float = 0.95,
    rng: np.random.Generator,
) -> pl.DataFrame:
    """`acceptance_table` by bucket of prompt length: a drafter that stops at its context limit shows here.

    Parameters
    ----------
    steps
        One row a step, labelled.
    requests
        One row a request, with num_prompt_tokens; requests where it is null are left out.
    edges
        Rising inner edges in tokens; n edges make n + 1 buckets, each low <= length < high.
    by
        Further group columns; may be empty.
    level, rng
        As in `stats.cluster_bootstrap`.

    Returns
    -------
    pl.DataFrame
        `by` columns, `prompt_low_tokens`, `prompt_high_tokens` (null: open), then the columns and metrics of
        `acceptance_table`.
    """
    if list(edges) != sorted(set(edges)):
        raise ValueError(f"edges {list(edges)} must rise")
    check_columns(requests, ["request_id", "num_prompt_tokens"], what="requests")
    lengths = requests.select("request_id", "num_prompt_tokens").drop_nulls()
    joined = steps.drop("num_prompt_tokens", strict=False).join(lengths, on="request_id", how="inner")
    bucket = pl.lit(0)
    for edge in edges:
        bucket = bucket + (pl.col("num_prompt_tokens") >= edge).cast(pl.Int64)
    table = acceptance_table(
        joined.with_columns(bucket.cast(pl.Int64).alias("bucket")), by=[*by, "bucket"], level=level, rng=rng
    )
    bounds = pl.DataFrame(
        {
            "bucket": list(range(len(edges) + 1)),
            "prompt_low_tokens": [0, *edges],
            "prompt_high_tokens": [*edges, None],
        },
        schema={"bucket": pl.Int64(), "prompt_low_tokens": pl.Int64(), "prompt_high_tokens": pl.Int64()},
    )
    keys = [*by, "prompt_low_tokens", "prompt_high_tokens"]
    return table.join(bounds, on="bucket", how="left", maintain_order="left").select(
        *keys, pl.exclude("bucket", *keys)
    )


def drafter_limit_warning(by_prompt_length: pl.DataFrame) -> str | None:
    """A line for a reader if acceptance is exactly zero from some prompt length on, else None.

    Parameters
    ----------
    by_prompt_length
        From `acceptance_by_prompt_length`, of one group.
    """
    rates = by_prompt_length.filter(
        (pl.col("metric") == "draft_acceptance_rate") & pl.col("value").is_not_null()
    ).sort("prompt_low_tokens")
    alive = [row["prompt_low_tokens"] for row in rates.to_dicts() if row["value"] > 0]
    dead = [row["prompt_low_tokens"] for row in rates.to_dicts() if row["value"] == 0]
    if not alive or not dead or min(dead) < max(alive):
        return None
    return (
        f"all positions exactly zero above ~{min(dead)} tokens: drafter probably inactive "
        "(check draft max_position_embeddings)"
    )


def speculation_inactive(steps: pl.DataFrame, *, by: Sequence[str]) -> pl.DataFrame:
    """Groups that ran target steps without a single draft: their acceptance is unknown, not 0.

    Parameters
    ----------
    steps
        One row a step, labelled; leave out the baseline, which never drafts.
    by
        Group columns.

    Returns
    -------
    pl.DataFrame
        `by` columns, num_steps, num_emitted_tokens, reason; one row a group without drafts.
    """
    _check_steps(steps, by)
    return (
        steps.group_by(by, maintain_order=True)
        .agg(
            pl.len().cast(pl.Int64).alias("num_steps"),
            pl.col("num_emitted_tokens").sum(),
            _drafted.sum().alias("__drafted"),
        )
        .filter(pl.col("__drafted") == 0)
        .drop("__drafted")
        .with_columns(pl.lit(NO_DRAFTS).alias("reason"))
    )


def positions_from_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """The positions table derived from steps: exact for chains, because accepted tokens are a prefix.

    Returns
    -------
    pl.DataFrame
        Columns of `schema.POSITIONS`, one row a drafted token; what steps can't tell (target_rank,
        draft_prob, target_prob) is null.
    """
    names = [column.name for column in schema.POSITIONS.columns]
    unknown = ("target_rank", "draft_prob", "target_prob", "in_answer", "answer_rank")
    derived = ("position", "reached", "accepted", *unknown)
    _check_steps(steps, [name for name in names if name not in derived])
    return (
        steps.filter(_is_draft)
        .with_columns(pl.int_ranges(0, _drafted).alias("position"))
        .explode("position")
        .with_columns(
            (pl.col("position") <= _accepted).alias("reached"),
            (pl.col("position") < _accepted).alias("accepted"),
            *(pl.lit(None).cast(schema.POSITIONS.polars_schema[name]).alias(name) for name in unknown),
        )
        .select(names)
        .cast(dict(schema.POSITIONS.polars_schema))  # type: ignore[arg-type]
    )


def _patterns(steps: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    """Steps counted by group, repeat, prompt, drafted and accepted: num_steps and num_emitted_tokens."""
    _check_steps(steps, ["prompt_id", "repeat", *by])
    keys = list(dict.fromkeys([*by, "repeat", "prompt_id", "num_draft_tokens", "num_accepted_tokens"]))
    return steps.group_by(keys).agg(
        pl.len().cast(pl.Int64).alias("num_steps"), pl.col("num_emitted_tokens").sum()
    )


def _position_sums(steps: pl.DataFrame, by: Sequence[str]) -> tuple[list[tuple[ClusterSums, int]], int]:
    """Per-prompt sums [drafts, at risk by position, accepted by position], with each group's longest draft.

    Also the longest draft of all. Steps without a draft are left out.
    """
    patterns = _patterns(steps, by).filter(_is_draft)
    longest = int(patterns.select(_drafted.max()).item() or 0)
    weight = pl.col("num_steps")
    at_risk = [(weight * ((_accepted >= i) & (_drafted > i))).alias(f"risk_{i}") for i in range(longest)]
    accepted = [(weight * (_accepted > i)).alias(f"accepted_{i}") for i in range(longest)]
    drafted = [(weight * (_drafted > i)).alias(f"drafted_{i}") for i in range(longest)]
    table = patterns.with_columns(*at_risk, *accepted, *drafted)
    names = [
        "num_steps",
        *(f"{kind}_{i}" for kind in ("risk", "accepted", "drafted") for i in range(longest)),
    ]
    found = []
    for group in cluster_sums(table, by=by, sums=names):
        limit = int(np.count_nonzero(group.totals[2 * longest + 1 :]))
        found.append((ClusterSums(key=group.key, sums=group.sums[..., : 2 * longest + 1]), limit))
    return found, longest


# Counters of a server


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCounts:
    """Acceptance counters of one engine over one window, with every invariant checked.

    Attributes
    ----------
    num_drafts
        Verification steps that carried a draft.
    num_draft_tokens
        Drafted tokens (nodes, for a tree); None where the source does not say.
    num_accepted_tokens
        Accepted drafts, bonus tokens excluded.
    num_speculative_tokens
        Longest draft: K of a chain, depth of a tree.
    accepted_per_position
        Drafts accepted beyond each position; None where unknown. Only for chains.
    draft_shape
        `chain` or `tree`.

    Raises
    ------
    RecordError
        A negative count, accepted above drafted, an acceptance length outside [1, K + 1],
        drafted tokens outside [drafts, K * drafts], or positions that rise or do not add up to accepted.
    """

    num_drafts: int
    num_draft_tokens: int | None
    num_accepted_tokens: int
    num_speculative_tokens: int
    accepted_per_position: tuple[int, ...] | None = None
    draft_shape: Literal["chain", "tree"] = "chain"

    def __post_init__(self) -> None:
        drafts, drafted, accepted = self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens
        longest, positions = self.num_speculative_tokens, self.accepted_per_position
        counts = (drafts, drafted or 0, accepted, *(positions or ()))
        if min(counts) < 0:
            raise RecordError(
                f"acceptance counters: {min(counts)} is negative; a counter was reset in the window"
            )
        if accepted > longest * drafts:
            raise RecordError(
                f"acceptance counters: {accepted} accepted in {drafts} drafts of at most {longest}: the mean "
                f"acceptance length leaves [1, {longest + 1}]"
            )
        if drafted is not None:
            if accepted > drafted:
                raise RecordError(f"acceptance counters: {accepted} accepted exceeds {drafted} drafted")
            if self.draft_shape == "chain" and not drafts <= drafted <= longest * drafts:
                raise RecordError(
                    f"acceptance counters: {drafted} drafted is not between {drafts} and {longest} x {drafts}"
                )
        if positions is not None:
            if self.draft_shape == "tree":
                raise UnsupportedDraftError("tree drafts have no per-position acceptance; leave it out")
            if sum(positions) != accepted:
                raise RecordError(
                    f"acceptance counters: positions add up to {sum(positions)}, not to {accepted} accepted"
                )
            if any(later > earlier for earlier, later in zip((drafts, *positions), positions, strict=False)):
                raise RecordError(f"acceptance counters: per-position counts {list(positions)} rise")

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts, bonus token included; None without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def mean_accepted_drafts(self) -> float | None:
        """accepted / drafts, bonus token excluded (some tools' acceptance length); None without drafts."""
        return self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens (nodes, for a tree); None without drafts or where drafted is unknown."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def depth_utilisation(self) -> float | None:
        """accepted / (drafts x K): the accepted share of the longest possible draft; None without drafts."""
        return (
            self.num_accepted_tokens / (self.num_drafts * self.num_speculative_tokens)
            if self.num_drafts
            else None
        )

    @property
    def ragged(self) -> bool | None:
        """Whether some drafts were shorter than K; None where drafted is unknown or for trees."""
        if self.num_draft_tokens is None or self.draft_shape == "tree":
            return None
        return self.num_draft_tokens < self.num_speculative_tokens * self.num_drafts

    @property
    def acceptance_rate_by_position(self) -> tuple[float, ...] | None:
        """Accepted beyond each position / drafts (vLLM's, unconditional); None without drafts or counts."""
        if self.accepted_per_position is None or not self.num_drafts:
            return None
        return tuple(count / self.num_drafts for count in self.accepted_per_position)

    @property
    def conditional_acceptance_rate_by_position(self) -> tuple[float | None, ...] | None:
        """Accepted at each position / reached; None with ragged drafts, which need per-step data."""
        rates = self.acceptance_rate_by_position
        return None if rates is None or self.ragged is not False else conditional_rates(rates)


def conditional_rates(survival: Sequence[float]) -> tuple[float | None, ...]:
    """Conditional rates c_i = S_i / S_(i-1) from survival (full drafts); None after survival reached 0.

    Parameters
    ----------
    survival
        In [0, 1], not rising, shape: [num_positions].

    Raises
    ------
    ValueError
        Values outside [0, 1] or rising.
    """
    before = (1.0, *survival[:-1])
    if any(not 0 <= later <= earlier for earlier, later in zip(before, survival, strict=True)):
        raise ValueError(f"survival {list(survival)} must lie in [0, 1] and not rise")
    return tuple(
        later / earlier if earlier > 0 else None for earlier, later in zip(before, survival, strict=True)
    )


def acceptance_length_from_conditional(rates: Sequence[float]) -> float:
    """Mean acceptance length of full drafts with these conditional rates: 1 + c_0 + c_0 c_1 + ...

    With a constant rate a and K positions this is (1 - a^(K+1)) / (1 - a), Leviathan et al. (arXiv
    2211.17192), equation 1.

    Raises
    ------
    ValueError
        A rate outside [0, 1].
    """
    if any(not 0 <= rate <= 1 for rate in rates):
        raise ValueError(f"rates {list(rates)} must lie in [0, 1]")
    return 1 + math.fsum(np.cumprod(np.asarray(rates, dtype=np.float64)).tolist())


def committed_acceptance_length(
    *, num_output_tokens: int, num_first_tokens: int, num_drafts: int
) -> float | None:
    """Tokens that the user got per step, from a request's usage: (output - tokens that prefill gave) / steps.

    Parameters
    ----------
    num_output_tokens
        Emitted tokens, from the engine's usage.
    num_first_tokens
        Tokens that came from prefill, not from a verification step: 1 a request on most engines.
    num_drafts
        Verification steps; all of them carried a draft.

    Returns
    -------
    float or None
        None without drafts.
    """
    if num_output_tokens < num_first_tokens:
        raise ValueError(
            f"num_output_tokens {num_output_tokens} is below num_first_tokens {num_first_tokens}"
        )
    return (num_output_tokens - num_first_tokens) / num_drafts if num_drafts else None


def acceptance_from_histogram(
    histograms: Sequence[Sequence[int]], *, num_draft_tokens: int | None = None
) -> AcceptanceCounts:
    """Counters from per-request acceptance histograms, pooled over steps.

    Parameters
    ----------
    histograms
        One a request (vLLM's `acceptance_histogram`): entry j is the number of steps with exactly j
        accepted drafts, shape: [num_requests][K + 1], the same K.
    num_draft_tokens
        Drafted tokens of all of them, if the engine says; None: unknown (drafts may be ragged).

    Raises
    ------
    ValueError
        No histogram, or different lengths.

    References
    ----------
    vLLM "Per-Request Acceptance Metrics" (pull request 48915).
    """
    lengths = {len(histogram) for histogram in histograms}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"histograms of lengths {sorted(lengths)} can't be pooled; they need the same K + 1 entries"
        )
    pooled = [sum(column) for column in zip(*histograms, strict=True)]
    longest = len(pooled) - 1
    return AcceptanceCounts(
        num_drafts=sum(pooled),
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=sum(accepted * count for accepted, count in enumerate(pooled)),
        num_speculative_tokens=longest,
        accepted_per_position=tuple(sum(pooled[position + 1 :]) for position in range(longest)),
    )


def rank_by_draft_acceptance_rate(arms: Mapping[str, AcceptanceCounts]) -> tuple[str, ...]:
    """Arms by falling draft acceptance rate; arms without one are last, in the order given.

    Raises
    ------
    UnsupportedDraftError
        A tree is among them: its rate is per node, most of which lie off the accepted path, and is
        not comparable.
    """
    trees = [name for name, counts in arms.items() if counts.draft_shape == "tree"]
    if trees:
        raise UnsupportedDraftError(
            f"{', '.join(trees)}: a tree's acceptance rate is per node and can't be ranked against others; "
            "compare mean_acceptance_length"
        )

    def order(name: str) -> float:
        rate = arms[name].draft_acceptance_rate
        return math.inf if rate is None else -rate

    return tuple(sorted(arms, key=order))
