"""Charts of tidy, already aggregated frames. They compute nothing.

Each function takes a long frame of an estimator (group columns, `value`, `low`, `high`,
`n`, and where present `level`, `n_clusters`, `method`, `reason`), checks its columns and
returns an altair chart: intervals drawn as given, rates from 0, concurrency on a log2 axis,
n in the tooltip. A null value leaves a gap marked `n/a`, and the subtitle says why. A frame
without rows gives a chart that says so in words. Selecting rows by `metric` and turning wide
columns into rows is all that is done to the data. May import theme and schema names, never
records, engines or estimators: the number in a picture must exist in a frame first.

Common parameters of the functions
----------------------------------
frame
    One row a drawn point. Rows that share a point are refused, naming the column that tells
    them apart: two settings drawn as one would be a lie.
arms
    Every arm of the plan in plan order, which fixes colours across charts.
column, row
    Group columns laid out as panels from left to right and from top to bottom.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import altair as alt
import polars as pl

from specnb import theme
from specnb.schema import ENTROPY_TIERS, LENGTH_TIERS

MAX_ROWS: Final = 5000
MAX_NOTES: Final = 4

Chart = alt.Chart | alt.LayerChart | alt.FacetChart | alt.VConcatChart | alt.HConcatChart

_ESTIMATE: Final = ("value", "low", "high", "n")
_EXTRAS: Final = ("level", "n_clusters", "method", "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """How the value's axis of a chart reads."""

    title: str
    value_title: str
    scale: alt.Scale
    value_format: str
    rule_at: float | None = None
    axis: alt.Axis | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Which arms there are, and which columns become panels."""

    arms: Sequence[str] = ()
    column: str | None = None
    row: str | None = None

    @property
    def panels(self) -> list[str]:
        return [field for field in (self.column, self.row) if field]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """What colours and shapes stand for: a column, its values in order, a colour and a shape each."""

    field: str
    domain: Sequence[str]
    colours: Sequence[str]
    shapes: Sequence[str]
    title: str | None = None

    def present(self, frame: pl.DataFrame) -> list[str]:
        """Values that occur in `frame`, in the domain's order."""
        found = set(frame[self.field].to_list())
        return [name for name in self.domain if name in found]

    def colour(self, frame: pl.DataFrame) -> alt.Color:
        return alt.Color(
            f"{self.field}:N",
            title=self.title,
            sort=list(self.domain),
            scale=alt.Scale(domain=list(self.domain), range=list(self.colours)),
            legend=alt.Legend(values=self.present(frame)),
        )

    def shape(self, frame: pl.DataFrame) -> alt.Shape:
        return alt.Shape(
            f"{self.field}:N",
            title=self.title,
            sort=list(self.domain),
            scale=alt.Scale(domain=list(self.domain), range=list(self.shapes)),
            legend=alt.Legend(values=self.present(frame)),
        )


# Public charts


def survival_by_position_chart(
    frame: pl.DataFrame, *, arms: Sequence[str] = (), column: str | None = None, row: str | None = None
) -> Chart:
    """Survival S_i by draft position: the Kaplan-Meier chance that the first i + 1 drafts are all accepted.

    Parameters
    ----------
    frame
        `acceptance_by_position` with metric `survival`: arm, position, value, low, high, n.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    return _by_position(
        frame,
        name="survival_by_position_chart",
        metric="survival",
        look=("Survival by draft position", "share of blocks still alive"),
        layout=_Layout(arms=arms, column=column, row=row),
    )


def conditional_acceptance_by_position_chart(
    frame: pl.DataFrame, *, arms: Sequence[str] = (), column: str | None = None, row: str | None = None
) -> Chart:
    """Conditional acceptance rate by draft position: accepted at i among those that reached i.

    Parameters
    ----------
    frame
        `acceptance_by_position` with metric `conditional_acceptance_rate`: arm, position, value, low,
        high, n.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    return _by_position(
        frame,
        name="conditional_acceptance_by_position_chart",
        metric="conditional_acceptance_rate",
        look=("Conditional acceptance rate by draft position", "accepted among reached"),
        layout=_Layout(arms=arms, column=column, row=row),
    )


def counterfactual_acceptance_length_chart(
    frame: pl.DataFrame, *, arms: Sequence[str] = (), column: str | None = None, row: str | None = None
) -> Chart:
    """Acceptance length that blocks cut to K' drafts would have had.

    Parameters
    ----------
    frame
        `counterfactual_acceptance_length`: arm, num_speculative_tokens, value, low, high, n.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    name = "counterfactual_acceptance_length_chart"
    frame = _select(
        frame, name, "counterfactual_acceptance_length", ("arm", "num_speculative_tokens"), column, row
    )
    return _curves(
        frame,
        x=alt.X(
            "num_speculative_tokens:O",
            title=theme.COLUMN_TITLES["num_speculative_tokens"],
            axis=alt.Axis(labelAngle=0),
        ),
        x_field="num_speculative_tokens",
        look=_Look(
            title="Acceptance length if blocks were cut to K' drafts",
            value_title="tokens a verification step",
            scale=alt.Scale(domainMin=1, zero=False, nice=True),
            value_format=".2f",
        ),
        layout=_Layout(arms=arms, column=column, row=row),
    )


def suffix_decay_chart(
    frame: pl.DataFrame, *, label: str = "entropy_tier", arms: Sequence[str] = (), row: str | None = None
) -> Chart:
    """Suffix decay: logit slope of the conditional acceptance rate over position; the rule at 0 is no decay.

    Parameters
    ----------
    frame
        `suffix_decay`: arm, the label column, value, low, high, n.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    name = "suffix_decay_chart"
    frame = _select(frame, name, "conditional_logit_slope", ("arm", label), row)
    return _dots(
        frame,
        label=label,
        look=_Look(
            title="Suffix decay by " + theme.column_title(label),
            value_title="logit slope a position (below 0: later drafts fare worse)",
            scale=alt.Scale(zero=True, nice=True),
            value_format="+.3f",
            rule_at=0.0,
        ),
        layout=_Layout(arms=arms, row=row),
    )


def hit_rate_by_entropy_chart(
    frame: pl.DataFrame, *, arms: Sequence[str] = (), column: str | None = None, row: str | None = None
) -> Chart:
    """Hit rate against the measured entropy of the target's law at the drafted token.

    Parameters
    ----------
    frame
        `hit_rate_by_entropy`: arm, entropy_low_nats, entropy_high_nats, entropy_mean_nats, value, low,
        high, n; one row a bin.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    name = "hit_rate_by_entropy_chart"
    fields = ("arm", "entropy_low_nats", "entropy_high_nats", "entropy_mean_nats")
    frame = _select(
        frame, name, "conditional_acceptance_rate", fields, column, row, key=("arm", "entropy_low_nats")
    )
    return _curves(
        frame,
        x=alt.X(
            "entropy_mean_nats:Q",
            title=theme.COLUMN_TITLES["entropy_mean_nats"],
            scale=alt.Scale(zero=True, nice=True),
            axis=alt.Axis(tickCount=6),
        ),
        x_field="entropy_mean_nats",
        details=("entropy_low_nats", "entropy_high_nats"),
        look=_Look(
            title="Hit rate by measured entropy",
            value_title="drafted tokens accepted",
            scale=alt.Scale(domain=[0, 1]),
            value_format=".3f",
        ),
        layout=_Layout(arms=arms, column=column, row=row),
    )


def hit_rate_by_label_chart(
    frame: pl.DataFrame,
    *,
    label: str,
    metric: str = "conditional_acceptance_rate",
    arms: Sequence[str] = (),
    column: str | None = None,
    row: str | None = None,
) -> Chart:
    """Hit rate by a label of the workload (entropy tier, task, output-length tier), one row a label.

    Parameters
    ----------
    frame
        `hit_rate_by_label`: arm, label, label_value, value, low, high, n; or a frame in which the label
        is a column of its own, as in `acceptance_table`.
    label
        Which label is drawn.
    metric
        Which metric's rows are drawn, where the frame holds several.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    name = "hit_rate_by_label_chart"
    if {"label", "label_value"} <= set(frame.columns):
        frame = frame.filter(pl.col("label") == label).drop("label").rename({"label_value": label})
    frame = _select(frame, name, metric, ("arm", label), column, row)
    return _dots(
        frame,
        label=label,
        look=_Look(
            title="Hit rate by " + theme.column_title(label),
            value_title="drafted tokens accepted",
            scale=alt.Scale(domain=[0, 1]),
            value_format=".3f",
        ),
        layout=_Layout(arms=arms, column=column, row=row),
    )


def speedup_by_concurrency_chart(
    frame: pl.DataFrame,
    *,
    metric: str = "throughput_speedup",
    arms: Sequence[str] = (),
    column: str | None = None,
    row: str | None = None,
) -> Chart:
    """Speedup over the baseline by concurrency, with a rule at 1: below it speculation costs.

    Parameters
    ----------
    frame
        `speedup_table`: arm, concurrency, value, low, high, n.
    metric
        `throughput_speedup` (the headline), `paired_tpot_speedup` or `output_length_ratio`.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    name = "speedup_by_concurrency_chart"
    words = {
        "throughput_speedup": ("Speedup by concurrency", "speedup (arm / baseline)"),
        "paired_tpot_speedup": ("Paired TPOT speedup by concurrency", "TPOT, baseline / arm"),
        "output_length_ratio": ("Output length ratio by concurrency", "output tokens, arm / baseline"),
    }
    title, y_title = words.get(metric, (theme.column_title(metric), theme.column_title(metric)))
    frame = _select(frame, name, metric, ("arm", "concurrency"), column, row)
    return _curves(
        frame,
        x=_log2_concurrency(frame),
        x_field="concurrency",
        look=_Look(
            title=title,
            value_title=y_title,
            scale=alt.Scale(zero=True, nice=True, domainMin=0),
            value_format=".2f",
            rule_at=1.0,
        ),
        layout=_Layout(arms=arms, column=column, row=row),
    )


def throughput_chart(
    frame: pl.DataFrame, *, arms: Sequence[str] = (), column: str | None = None, row: str | None = None
) -> Chart:
    """Output tokens a second by concurrency, baseline included.

    Parameters
    ----------
    frame
        `throughput_table`: arm, concurrency, value, low, high, n.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    name = "throughput_chart"
    frame = _select(frame, name, None, ("arm", "concurrency"), column, row)
    return _curves(
        frame,
        x=_log2_concurrency(frame),
        x_field="concurrency",
        look=_Look(
            title="Throughput by concurrency",
            value_title="output tokens a second",
            scale=alt.Scale(zero=True, nice=True),
            value_format=",.1f",
        ),
        layout=_Layout(arms=arms, column=column, row=row),
    )


def latency_chart(
    frame: pl.DataFrame,
    *,
    metric: str,
    arms: Sequence[str] = (),
    column: str = "quantile",
    row: str | None = None,
    quantile: float | None = None,
) -> Chart:
    """One latency by concurrency, a panel a quantile; quantiles below their minimum n are named, not drawn.

    Parameters
    ----------
    frame
        `latency_quantiles`: arm, concurrency, quantile, value, low, high (seconds), n.
    metric
        `ttft_s`, `tpot_s`, `e2e_s` or another metric of the frame.
    column, quantile
        Another column to lay out, with the one quantile to draw, such as `length_tier` and 0.5.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    name = "latency_chart"
    words = {
        "ttft_s": "TTFT (send to first token)",
        "tpot_s": "TPOT (time per output token after the first chunk)",
        "e2e_s": "E2E (send to last token)",
    }
    _check(frame, name, ["quantile"])
    label = pl.lit("P") + (pl.col("quantile") * 100).round(1).cast(pl.String).str.replace(r"\.0$", "")
    if quantile is not None:
        frame = frame.filter(pl.col("quantile") == quantile)
    frame = _select(
        frame.with_columns(label.alias("quantile")),
        name,
        metric,
        ("arm", "concurrency", "quantile"),
        column,
        row,
    )
    milliseconds = metric == "tpot_s"
    what = f"{words.get(metric, theme.column_title(metric))} by concurrency"
    return _curves(
        frame,
        x=_log2_concurrency(frame),
        x_field="concurrency",
        look=_Look(
            title=what if quantile is None else f"P{quantile * 100:g} {what}",
            value_title="milliseconds" if milliseconds else "seconds",
            scale=alt.Scale(zero=True, nice=True),
            value_format=".4f",
            axis=alt.Axis(labelExpr="format(datum.value * 1000, ',~r')") if milliseconds else None,
        ),
        layout=_Layout(arms=arms, column=column, row=row),
        details=("quantile",),
    )


def decomposition_chart(
    frame: pl.DataFrame, *, arms: Sequence[str] = (), column: str | None = None, row: str | None = None
) -> Chart:
    """Measured decode speedup beside the one predicted from tokens and time a step; the gap is the residual.

    Parameters
    ----------
    frame
        `decomposition`, one row a cell group: arm, concurrency, decode_speedup, predicted_speedup, residual.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    name = "decomposition_chart"
    fields = ("arm", "concurrency", "decode_speedup", "predicted_speedup", "residual")
    layout = _Layout(arms=arms, column=column, row=row)
    groups = layout.panels
    _check(frame, name, [*fields, *groups], numbers=("decode_speedup", "predicted_speedup", "residual"))
    _refuse_shared_points(frame, name, ["arm", "concurrency", *groups])
    if frame.is_empty():
        return _empty("Measured and predicted decode speedup")
    kinds = {"decode_speedup": "measured", "predicted_speedup": "predicted"}
    keep = ["arm", "concurrency", *groups, "residual", *(["reason"] if "reason" in frame.columns else [])]
    long = frame.unpivot(on=list(kinds), index=keep, variable_name="kind", value_name="value").with_columns(
        pl.col("kind").replace_strict(kinds)
    )
    domain = theme.arm_domain(long["arm"].to_list(), arms=arms)
    dash = alt.StrokeDash(
        "kind:N", title=None, scale=alt.Scale(domain=list(kinds.values()), range=[[1, 0], [5, 4]]), sort=None
    )
    shape = alt.Shape(
        "kind:N",
        title=None,
        scale=alt.Scale(domain=list(kinds.values()), range=["circle", "cross"]),
        sort=None,
    )
    colour = _colour(domain, long)
    base = alt.Chart().encode(
        x=_log2_concurrency(long),
        y=alt.Y("value:Q", title="decode speedup", scale=alt.Scale(zero=True, nice=True)),
        color=colour,
    )
    tips = _tips(
        long, ["arm", "concurrency", *groups, "kind"], value_format=".3f", extra=(("residual", "+.1%"),)
    )
    layers = [
        _rule(1.0),
        base.mark_line(clip=True).encode(strokeDash=dash, detail="kind:N"),
        base.mark_point(filled=True, size=60).encode(shape=shape, tooltip=tips),
        *_gaps(long, base, ["arm", "concurrency", *groups], at=_size(long, layout)[1] - 8),
    ]
    return _panels(
        long,
        layers,
        title="Measured and predicted decode speedup",
        notes=_notes(long, ["arm", "concurrency", *groups]),
        layout=layout,
    )


_PART_COLOURS = {
    "verify": "#4c78a8",
    "draft": "#f2a93b",
    "prefill stall": "#b8bec6",
    "whole step": "#7aa6a1",
}


def cycle_time_chart(
    frame: pl.DataFrame, *, arms: Sequence[str] = (), column: str | None = None, row: str | None = None
) -> Chart:
    """Where a speculative step's time goes (draft, verify, stall), beside the baseline's step (black tick).

    Parameters
    ----------
    frame
        `decomposition`: arm, concurrency, draft_s, verify_s, stall_s, baseline_step_s (seconds a step);
        with cycle_s too, a step whose parts are unknown (servers) is drawn whole.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    name = "cycle_time_chart"
    title = "Time of a speculative step (black tick: a baseline step)"
    parts = {"verify_s": "verify", "draft_s": "draft", "stall_s": "prefill stall"}
    if {"cycle_s", *parts} <= set(frame.columns):
        whole = pl.all_horizontal(pl.col(*parts).is_null())
        if frame.select((whole & pl.col("cycle_s").is_not_null()).any()).item():
            parts = {} if frame.select(whole.all()).item() else parts
            parts["whole_s"] = "whole step"
            frame = frame.with_columns(pl.when(whole).then("cycle_s").alias("whole_s"))
    points = list(dict.fromkeys(field for field in ("arm", "concurrency", column, row) if field))
    numbers = [*parts, "baseline_step_s"]
    _check(frame, name, [*points, *numbers], numbers=numbers)
    _refuse_shared_points(frame, name, points)
    if frame.is_empty():
        return _empty(title)
    keep = [*points, "baseline_step_s", *(["reason"] if "reason" in frame.columns else [])]
    order = list(parts.values())
    long = frame.unpivot(on=list(parts), index=keep, variable_name="part", value_name="value").with_columns(
        pl.col("part").replace_strict(parts)
    )
    long = long.with_columns(
        pl.col("part").replace_strict({part: place for place, part in enumerate(order)}).alias("stack_order")
    )
    y_title = "milliseconds a step"
    axis = alt.Axis(labelExpr="format(datum.value * 1000, ',~r')")
    present = [
        arm for arm in theme.arm_domain(long["arm"].to_list(), arms=arms) if arm in set(long["arm"].to_list())
    ]
    base = alt.Chart().encode(
        xOffset=alt.XOffset("arm:N", sort=present),
        x=alt.X(
            "concurrency:O",
            title="concurrency",
            axis=alt.Axis(labelAngle=0),
            scale=alt.Scale(paddingInner=0.35),
        ),
    )
    bars = base.mark_bar(stroke="white", strokeWidth=0.5).encode(
        y=alt.Y("value:Q", title=y_title, stack="zero", axis=axis),
        color=alt.Color(
            "part:N",
            title="part of a step",
            scale=alt.Scale(domain=order, range=[_PART_COLOURS[part] for part in order]),
            sort=order,
        ),
        order=alt.Order("stack_order:Q"),
        tooltip=_tips(long, [*points, "part"], value_format=".5f"),
    )
    tick = base.mark_tick(color=theme.INK, thickness=3, orient="horizontal").encode(
        y=alt.Y("baseline_step_s:Q", title=y_title, axis=axis),
        tooltip=[alt.Tooltip("baseline_step_s:Q", title="baseline step (s)", format=".5f")],
    )
    notes = _notes(long, points)
    if len(present) > 1:
        notes = [f"Bars of one concurrency, from left to right: {', '.join(present)}.", *notes]
    layout = _Layout(arms=arms, column=column, row=row)
    return _panels(long, [bars, tick], title=title, notes=notes, layout=layout)


def match_rate_chart(frame: pl.DataFrame, *, row: str | None = None) -> Chart:
    """Exact-match rate of greedy answers: arms against the baseline in colour, controls in grey.

    Parameters
    ----------
    frame
        `equivalence.greedy_table`: comparison, control (boolean), concurrency, value, low, high, n.
    row
        `sampling`, where the frame holds several greedy settings.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    name = "match_rate_chart"
    title = "Exact match of greedy answers"
    frame = _select(frame, name, "exact_match_rate", ("comparison", "control", "concurrency"), row)
    if frame.is_empty():
        return _empty(title, "the run holds no pair of greedy answers")
    kinds = ["arm against baseline", "control"]
    frame = frame.with_columns(
        pl.when(pl.col("control")).then(pl.lit(kinds[1])).otherwise(pl.lit(kinds[0])).alias("kind")
    )
    by_kind = frame.sort("control", maintain_order=True)
    order = by_kind["comparison"].unique(maintain_order=True).to_list()
    groups = [field for field in (row,) if field]
    base = alt.Chart().encode(
        y=alt.Y(
            "comparison:N", title=None, sort=order, axis=alt.Axis(labelLimit=400, grid=True, gridDash=[2, 3])
        ),
        yOffset=alt.YOffset("concurrency:O", sort="ascending"),
        color=alt.Color(
            "kind:N",
            title=None,
            scale=alt.Scale(domain=kinds, range=[theme.ARM_COLOURS[0], theme.BASELINE_COLOUR]),
        ),
    )
    x_title = "share of prompts with the same answer"
    scale = alt.Scale(domain=[0, 1])
    shapes = alt.Scale(domain=kinds, range=["circle", theme.BASELINE_SHAPE])
    points = base.mark_point(filled=True, size=60).encode(
        x=alt.X("value:Q", title=x_title, scale=scale),
        shape=alt.Shape("kind:N", title=None, scale=shapes),
        tooltip=_tips(frame, ["comparison", "concurrency", *groups], value_format=".3f"),
    )
    bars = base.mark_rule(strokeWidth=2, strokeOpacity=0.6).encode(
        x=alt.X("low:Q", title=x_title, scale=scale), x2="high:Q"
    )
    num_loads = frame["concurrency"].n_unique()
    notes = ["Marks of one row, from top to bottom: rising concurrency."] if num_loads > 1 else []
    return _panels(
        frame,
        [bars, points, *_gaps(frame, base, ["comparison", "concurrency", *groups], along="x", at=14)],
        title=title,
        notes=[*notes, *_notes(frame, ["comparison", "concurrency", *groups])],
        layout=_Layout(row=row),
        size=(480, max(90, len(order) * (18 + 12 * num_loads))),
    )


def split_class_chart(frame: pl.DataFrame, *, row: str | None = None) -> Chart:
    """How greedy answers part from the reference's: pairs by kind of first divergence.

    Parameters
    ----------
    frame
        `equivalence.split_table`: comparison, concurrency, split_class, count (pairs). Rows that only
        differ in `arm` (the control that each arm's table repeats) are drawn once.
    row
        `sampling`, where the frame holds several greedy settings.

    Raises
    ------
    ValueError
        A column is missing or rows share a point.
    """
    name = "split_class_chart"
    title = "First divergences by kind"
    points = ["comparison", "concurrency", "split_class", *([row] if row else [])]
    _check(frame, name, [*points, "count"], numbers=("count",))
    if "arm" in frame.columns:
        frame = frame.drop("arm").unique(maintain_order=True)
    _refuse_shared_points(frame, name, points)
    control = pl.col("comparison").str.contains("itself", literal=True)
    frame = frame.filter(pl.col("count") > 0).sort(control, maintain_order=True)
    if frame.is_empty():
        return _empty(title, "the run holds no pair of greedy answers")
    palette = {
        "identical": "#dde3e9",
        "eos_only": "#b9c6d2",
        "same_text_different_ids": "#8fb3cf",
        "tie": "#56b4e9",
        "near_tie": "#0072b2",
        "unknown": "#e6b34d",
        "clear": "#b3261e",
    }
    found = set(frame["split_class"].to_list())
    kinds = [*(kind for kind in palette if kind in found), *sorted(found - set(palette))]
    places = {kind: place for place, kind in enumerate(kinds)}
    side = pl.col("comparison") + ", concurrency " + pl.col("concurrency").cast(pl.String)
    frame = frame.with_columns(
        pl.col("split_class").replace_strict(places).alias("class_order"),
        pl.col("split_class").str.replace_all("_", " "),
        side.alias("side"),
    )
    order = frame["side"].unique(maintain_order=True).to_list()
    bars = (
        alt.Chart()
        .mark_bar(stroke="white", strokeWidth=0.5)
        .encode(
            y=alt.Y("side:N", title=None, sort=order, axis=alt.Axis(labelLimit=400)),
            x=alt.X(
                "count:Q", title="pairs of answers", stack="zero", axis=alt.Axis(tickMinStep=1, format=",d")
            ),
            color=alt.Color(
                "split_class:N",
                title="first divergence",
                sort=[kind.replace("_", " ") for kind in kinds],
                scale=alt.Scale(
                    domain=[kind.replace("_", " ") for kind in kinds],
                    range=[palette.get(kind, "#cc79a7") for kind in kinds],
                ),
            ),
            order=alt.Order("class_order:Q"),
            tooltip=[
                alt.Tooltip("comparison:N", title="comparison"),
                alt.Tooltip("concurrency:Q", title="concurrency"),
                alt.Tooltip("split_class:N", title="first divergence"),
                alt.Tooltip("count:Q", title="n (pairs)", format=",d"),
            ],
        )
    )
    return _panels(frame, [bars], title=title, layout=_Layout(row=row), size=(480, max(60, 26 * len(order))))


def pit_chart(
    frame: pl.DataFrame, *, arms: Sequence[str] = (), column: str | None = "arm", row: str | None = None
) -> Chart:
    """Histogram of the probability integral transform of sampled tokens: flat if the target's law is kept.

    Parameters
    ----------
    frame
        arm, bin_low, bin_high (in [0, 1]), value (share of tokens in the bin), expected (share if uniform),
        low, high (band that a uniform law stays in), n.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    name = "pit_chart"
    fields = ("arm", "bin_low", "bin_high", "expected")
    frame = _select(frame, name, None, fields, column, row, key=("arm", "bin_low"))
    if frame.is_empty():
        return _empty(
            "Uniformity of sampled tokens", "the run holds no sampled token with its cumulative mass"
        )
    domain = theme.arm_domain(frame["arm"].to_list(), arms=arms)
    x = alt.X(
        "bin_low:Q",
        title="randomised PIT of the emitted token",
        scale=alt.Scale(domain=[0, 1]),
        axis=alt.Axis(tickCount=5),
    )
    base = alt.Chart().encode(x=x, x2="bin_high:Q")
    y_title = "share of tokens in the bin"
    bars = base.mark_bar(opacity=0.75, binSpacing=1).encode(
        y=alt.Y("value:Q", title=y_title, scale=alt.Scale(zero=True, nice=True)),
        y2=alt.Y2Datum(0),
        color=_colour(domain, frame, legend=column != "arm"),
        tooltip=_tips(
            frame, ["arm", "bin_low", "bin_high"], value_format=".4f", extra=(("expected", ".4f"),)
        ),
    )
    band = base.mark_rect(opacity=0.22, color=theme.INK).encode(y=alt.Y("low:Q", title=y_title), y2="high:Q")
    line = base.mark_rule(color=theme.INK, strokeDash=[4, 3]).encode(y=alt.Y("expected:Q", title=y_title))
    return _panels(
        frame,
        [bars, band, line],
        title="Uniformity of sampled tokens (grey band: a uniform law)",
        notes=_notes(frame, ["arm"]),
        layout=_Layout(arms=arms, column=column, row=row),
    )


_CANDIDATE_SERIES: Final = {
    "recall_at_16": ("among the 16 candidates", "#56b4e9", "diamond"),
    "conditional_acceptance_rate": ("drafted and accepted", theme.INK, "circle"),
    "recall_at_1": ("the first candidate", "#d55e00", "square"),
}
_LENGTH_SERIES: Final = {
    "argmax_acceptance_length": ("first candidate at each place", "#d55e00", "square"),
    "mean_acceptance_length": ("as drafted", theme.INK, "circle"),
    "oracle_acceptance_length": ("best path through the candidates", "#56b4e9", "diamond"),
}


def recall_by_position_chart(
    frame: pl.DataFrame,
    *,
    places: str,
    arms: Sequence[str] = (),
    column: str | None = "arm",
    row: str | None = None,
) -> Chart:
    """How often the answer is among a drafter's candidates, by draft position; a panel an arm.

    Parameters
    ----------
    frame
        `candidates.recall_by_position`: arm, places, position, metric, value, low, high, n.
    places
        `all`, or `reached`, which has what was drafted and accepted, too.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    name = "recall_by_position_chart"
    titles = {
        "all": "Candidates that hold the answer, all places",
        "reached": "Candidates that hold the answer, places that were reached",
    }
    _check(frame, name, ["places", "metric"])
    frame, series = _named_series(frame.filter(pl.col("places") == places), _CANDIDATE_SERIES)
    frame = _select(frame, name, None, ("series", "position"), column, row)
    return _curves(
        frame,
        x=alt.X("position:O", title=theme.COLUMN_TITLES["position"], axis=alt.Axis(labelAngle=0)),
        x_field="position",
        look=_Look(
            title=titles.get(places, f"Candidates that hold the answer, {places}"),
            value_title="share of places",
            scale=alt.Scale(domain=[0, 1]),
            value_format=".3f",
        ),
        layout=_Layout(arms=arms, column=column, row=row),
        series=series,
    )


def candidate_acceptance_length_chart(
    frame: pl.DataFrame, *, arms: Sequence[str] = (), row: str | None = None
) -> Chart:
    """Acceptance lengths on the same drafts: of the first candidates, as drafted, of the best path.

    Parameters
    ----------
    frame
        `candidates.candidate_acceptance_lengths`: arm, metric, value, low, high, n.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    name = "candidate_acceptance_length_chart"
    _check(frame, name, ["arm", "metric"])
    frame, series = _named_series(frame, _LENGTH_SERIES)
    frame = _select(frame, name, None, ("series", "arm"), row)
    present = set(frame["arm"].to_list())
    order = [arm for arm in theme.arm_domain(frame["arm"].to_list(), arms=arms) if arm in present]
    places = {arm: place for place, arm in enumerate(order)}
    return _dots(
        frame.sort(pl.col("arm").replace_strict(places, return_dtype=pl.Int64), maintain_order=True),
        label="arm",
        look=_Look(
            title="Acceptance length on the same drafts",
            value_title="tokens a verification step",
            scale=alt.Scale(domainMin=1, zero=False, nice=True),
            value_format=".3f",
        ),
        layout=_Layout(arms=arms, row=row),
        series=series,
    )


def mechanism_gain_chart(
    frame: pl.DataFrame, *, metric: str = "acceptance_length_gain", row: str | None = None
) -> Chart:
    """What a mechanism adds between two arms; the rule at 0 is no effect.

    Parameters
    ----------
    frame
        `candidates.mechanism_gains`: mechanism, arm, without_arm, metric, value, low, high, n.
    metric
        `acceptance_length_gain` or `conditional_logit_slope_difference`.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    name = "mechanism_gain_chart"
    words = {
        "acceptance_length_gain": ("Acceptance length gained", "tokens a step, with minus without", "+.3f"),
        "conditional_logit_slope_difference": (
            "Decay along the block, with minus without",
            "logits a position (above 0: flatter with it)",
            "+.3f",
        ),
    }
    title, value_title, value_format = words[metric]
    _check(frame, name, ["mechanism", "arm", "without_arm", "metric"])
    frame = frame.filter(pl.col("metric") == metric).with_columns(
        (pl.col("arm") + " against " + pl.col("without_arm")).alias("comparison")
    )
    if frame.is_empty():
        return _empty(title, "no two arms differ in a mechanism alone")
    frame = _select(frame, name, None, ("mechanism", "comparison"), row)
    domain = frame["mechanism"].unique(maintain_order=True).to_list()
    return _dots(
        frame,
        label="comparison",
        look=_Look(
            title=title,
            value_title=value_title,
            scale=alt.Scale(zero=True, nice=True),
            value_format=value_format,
            rule_at=0.0,
        ),
        layout=_Layout(row=row),
        series=_Series(
            field="mechanism",
            domain=domain,
            colours=theme.arm_colours(domain),
            shapes=theme.arm_shapes(domain),
            title="mechanism",
        ),
    )


def acceptance_length_chart(
    frame: pl.DataFrame,
    *,
    metric: str,
    label: str = "sampling",
    arms: Sequence[str] = (),
    column: str | None = None,
    row: str | None = None,
) -> Chart:
    """A length in tokens a step of every arm, by a label.

    Parameters
    ----------
    frame
        `acceptance_table`: arm, the label column, metric, value, low, high, n.
    metric
        `mean_acceptance_length` or `tokens_per_target_step`.

    Raises
    ------
    ValueError
        A column is missing, holds NaN, or rows share a point.
    """
    titles = {
        "mean_acceptance_length": ("Mean acceptance length", "tokens a step that carried a draft"),
        "tokens_per_target_step": ("Tokens per target step", "tokens a step, with steps without a draft"),
    }
    title, value_title = titles[metric]
    frame = _select(frame, "acceptance_length_chart", metric, ("arm", label), column, row)
    return _dots(
        frame,
        label=label,
        look=_Look(
            title=f"{title} by {theme.column_title(label)}",
            value_title=value_title,
            scale=alt.Scale(domainMin=1, zero=False, nice=True),
            value_format=".3f",
        ),
        layout=_Layout(arms=arms, column=column, row=row),
    )


def verdict_overview_chart(frame: pl.DataFrame) -> Chart:
    """Every claim's verdict by arm, as coloured tiles with the word written in them.

    Parameters
    ----------
    frame
        arm, claim (its short name), verdict; one row a tile.

    Raises
    ------
    ValueError
        A column is missing or rows share a tile.
    """
    name = "verdict_overview_chart"
    _check(frame, name, ["arm", "claim", "verdict"])
    _refuse_shared_points(frame, name, ["arm", "claim"])
    if frame.is_empty():
        return _empty("Claims by arm", "no claim was judged")
    frame = frame.with_columns(
        pl.struct("verdict", "claim")
        .map_elements(lambda tile: theme.verdict_tone(**tile), return_dtype=pl.String)
        .alias("tone")
    )
    claims = frame["claim"].unique(maintain_order=True).to_list()
    arms = frame["arm"].unique(maintain_order=True).to_list()
    base = alt.Chart().encode(
        x=alt.X(
            "claim:N", title=None, sort=claims, axis=alt.Axis(orient="top", labelAngle=0, labelLimit=180)
        ),
        y=alt.Y("arm:N", title=None, sort=arms),
        tooltip=[alt.Tooltip("arm:N"), alt.Tooltip("claim:N"), alt.Tooltip("verdict:N")],
    )
    tiles = base.mark_rect(cornerRadius=4, stroke="white", strokeWidth=4).encode(
        color=alt.Color(
            "tone:N",
            legend=None,
            scale=alt.Scale(domain=list(theme.VERDICT_COLOURS), range=list(theme.VERDICT_COLOURS.values())),
        )
    )
    words = base.mark_text(color="white", fontWeight="bold", fontSize=13).encode(text="verdict:N")
    return _panels(
        frame,
        [tiles, words],
        title="Claims by arm",
        layout=_Layout(),
        size=(max(200, 190 * len(claims)), 46 * len(arms)),
    )


# Shared parts


def _by_position(
    frame: pl.DataFrame, *, name: str, metric: str, look: tuple[str, str], layout: _Layout
) -> Chart:
    frame = _select(frame, name, metric, ("arm", "position"), *layout.panels)
    return _curves(
        frame,
        x=alt.X("position:O", title=theme.COLUMN_TITLES["position"], axis=alt.Axis(labelAngle=0)),
        x_field="position",
        look=_Look(title=look[0], value_title=look[1], scale=alt.Scale(domain=[0, 1]), value_format=".3f"),
        layout=layout,
    )


def _curves(
    frame: pl.DataFrame,
    *,
    x: alt.X,
    x_field: str,
    look: _Look,
    layout: _Layout,
    details: Sequence[str] = (),
    series: _Series | None = None,
) -> Chart:
    """Points joined by lines, one an arm (or a value of `series`), with intervals as vertical rules."""
    if frame.is_empty():
        return _empty(look.title)
    series = series or _arm_series(frame, layout)
    keys = list(dict.fromkeys([series.field, x_field, *layout.panels]))
    axis = look.axis or alt.Axis()
    y = alt.Y("value:Q", title=look.value_title, scale=look.scale, axis=axis)
    base = alt.Chart().encode(x=x, color=series.colour(frame))
    interval = base.mark_rule(strokeWidth=2, strokeOpacity=0.55).encode(
        y=alt.Y("low:Q", title=look.value_title, scale=look.scale, axis=axis), y2="high:Q"
    )
    points = base.mark_point(filled=True, size=60).encode(
        y=y,
        shape=series.shape(frame),
        tooltip=_tips(frame, [*keys, *details], value_format=look.value_format),
    )
    layers: list[alt.Chart] = [] if look.rule_at is None else [_rule(look.rule_at)]
    layers += [base.mark_line().encode(y=y), interval, points]
    layers += _gaps(frame, base, keys, at=_size(frame, layout)[1] - 8)
    return _panels(frame, layers, title=look.title, notes=_notes(frame, keys), layout=layout)


def _dots(
    frame: pl.DataFrame, *, label: str, look: _Look, layout: _Layout, series: _Series | None = None
) -> Chart:
    """One row a label, one dot an arm (or a value of `series`), intervals as horizontal rules."""
    if frame.is_empty():
        return _empty(look.title)
    series = series or _arm_series(frame, layout)
    keys = list(dict.fromkeys([series.field, label, *layout.panels]))
    present = series.present(frame)
    labels = frame[label].unique(maintain_order=True).to_list()
    base = alt.Chart().encode(
        y=alt.Y(
            f"{label}:N",
            title=theme.column_title(label),
            sort=_order(label, labels),
            axis=alt.Axis(grid=True, gridDash=[2, 3], labelLimit=240),
        ),
        color=series.colour(frame),
    )
    # Where a label has one mark only, the mark stands on the label's line.
    crowded = frame.select(label, series.field).unique().height > len(labels)
    if crowded:
        base = base.encode(yOffset=alt.YOffset(f"{series.field}:N", sort=present))
    interval = base.mark_rule(strokeWidth=2, strokeOpacity=0.55).encode(
        x=alt.X("low:Q", title=look.value_title, scale=look.scale), x2="high:Q"
    )
    points = base.mark_point(filled=True, size=60).encode(
        x=alt.X("value:Q", title=look.value_title, scale=look.scale),
        shape=series.shape(frame),
        tooltip=_tips(frame, keys, value_format=look.value_format),
    )
    layers: list[alt.Chart] = [] if look.rule_at is None else [_rule(look.rule_at, vertical=True)]
    layers += [interval, points, *_gaps(frame, base, keys, along="x", at=14)]
    height = max(80, len(labels) * (16 + 14 * (len(present) if crowded else 1)))
    width = 480 if layout.column is None or frame[layout.column].n_unique() == 1 else 230
    return _panels(
        frame, layers, title=look.title, notes=_notes(frame, keys), layout=layout, size=(width, height)
    )


def _panels(
    frame: pl.DataFrame,
    layers: Sequence[alt.Chart],
    *,
    title: str,
    layout: _Layout,
    notes: Sequence[str] = (),
    size: tuple[int, int] | None = None,
) -> Chart:
    """Layers with data, title and notes, laid out in panels."""
    heading = alt.TitleParams(text=title, subtitle=list(notes)) if notes else alt.TitleParams(text=title)
    width, height = size or _size(frame, layout)
    layered: Any = alt.layer(*layers).properties(width=width, height=height)
    described = f"{title}. {' '.join(notes)}".strip()
    words: dict[str, Any] = {"title": heading, "description": described}
    if not layout.panels:
        single: Chart = layered.properties(data=frame, **words)
        return single
    facets: dict[str, Any] = {}
    for channel, field in ((alt.Column, layout.column), (alt.Row, layout.row)):
        if field is None:
            continue
        found = frame[field].unique(maintain_order=True).to_list()
        order = [arm for arm in theme.arm_domain(found, arms=layout.arms) if arm in found]
        facets[channel._encoding_name] = channel(
            f"{field}:N",
            title=theme.column_title(field),
            sort=order if field == "arm" else _order(field, found),
            header=alt.Header(labelOrient="top" if channel is alt.Column else "left"),
        )
    faceted: Chart = layered.facet(**facets, data=frame).properties(**words)
    return faceted


def _size(frame: pl.DataFrame, layout: _Layout) -> tuple[int, int]:
    """Width and height in pixels of one panel: four panels fit a page, more are as narrow as can be read."""
    num_columns = frame[layout.column].n_unique() if layout.column else 1
    sizes = {1: (560, 280), 2: (330, 240), 3: (235, 215), 4: (176, 215)}
    width, height = sizes.get(num_columns, (150, 215))
    return width, min(height, 200) if layout.row and frame[layout.row].n_unique() > 1 else height


def _empty(title: str, reason: str = "the run holds no rows for this question") -> Chart:
    """A chart that says in words why there is nothing to draw."""
    lines = textwrap.wrap(f"Nothing to draw: {reason}.", 70)
    data = pl.DataFrame({"text": ["\n".join(lines)]})
    chart: alt.Chart = (
        alt.Chart(data, title=alt.TitleParams(text=title))
        .mark_text(align="left", baseline="middle", fontSize=13, color=theme.MUTED, lineBreak="\n")
        .encode(text="text:N", x=alt.value(8), y=alt.value(20 + 8 * len(lines)))
        .properties(
            width=560, height=40 + 16 * len(lines), description=f"{title}. Nothing to draw: {reason}."
        )
    )
    return chart


def _select(
    frame: pl.DataFrame,
    name: str,
    metric: str | None,
    fields: Sequence[str],
    *panels: str | None,
    key: Sequence[str] | None = None,
) -> pl.DataFrame:
    """The rows of `metric` (all rows where the frame has no such column), checked."""
    groups = [field for field in panels if field]
    needed = list(dict.fromkeys([*fields, *groups, *_ESTIMATE]))
    _check(frame, name, needed, numbers=("value", "low", "high"))
    if metric is not None and "metric" in frame.columns:
        frame = frame.filter(pl.col("metric") == metric)
    points = list(dict.fromkeys([*(key or fields), *groups]))
    _refuse_shared_points(frame, name, points)
    if frame.height > MAX_ROWS:
        raise ValueError(f"{name}: {frame.height} rows; a chart takes {MAX_ROWS} at most: aggregate first")
    extras = [field for field in _EXTRAS if field in frame.columns]
    return frame.select([*needed, *extras])


def _check(frame: pl.DataFrame, name: str, needed: Sequence[str], *, numbers: Sequence[str] = ()) -> None:
    for field in needed:
        if field not in frame.columns:
            raise ValueError(
                f"{name}: column '{field}' is missing; the frame has {', '.join(frame.columns) or 'none'}"
            )
    for field in numbers:
        if frame.schema[field].is_float() and not frame[field].is_finite().all():
            raise ValueError(
                f"{name}: column '{field}' holds NaN or infinity; undefined is null with a reason"
            )


def _refuse_shared_points(frame: pl.DataFrame, name: str, points: Sequence[str]) -> None:
    shared = frame.filter(pl.struct(points).is_duplicated())
    if shared.is_empty():
        return
    first = shared.select(points).row(0, named=True)
    group = shared.filter(
        pl.all_horizontal(pl.col(field).eq_missing(value) for field, value in first.items())
    )
    told_apart = [
        field
        for field in group.columns
        if field not in (*points, *_ESTIMATE, *_EXTRAS) and group[field].n_unique() > 1
    ]
    place = ", ".join(f"{field}={value}" for field, value in first.items())
    fix = f"filter or lay out by {', '.join(told_apart)}" if told_apart else "the rows are duplicates"
    raise ValueError(f"{name}: {group.height} rows share the point {place}; {fix}")


def _notes(frame: pl.DataFrame, keys: Sequence[str]) -> list[str]:
    """Why points or intervals are missing, for the subtitle: `MAX_NOTES` reasons and a count of the rest."""
    if "reason" not in frame.columns:
        gone = frame.filter(pl.col("value").is_null()).height
        return [f"Not shown: {gone} {'point' if gone == 1 else 'points'} without a value."] if gone else []
    lacking = frame.filter(pl.col("reason").is_not_null())
    has_low = "low" in frame.columns
    notes: list[str] = []
    for (reason, no_value), group in lacking.group_by(
        ["reason", pl.col("value").is_null().alias("no_value")], maintain_order=True
    ):
        what = "Not shown" if no_value else "No interval"
        if not no_value and not has_low:
            continue
        first = group.select(key for key in keys if key in group.columns).row(0)
        place = ", ".join(f"{part:.3g}" if isinstance(part, float) else str(part) for part in first)
        where = place if group.height == 1 else f"{group.height} points, first {place}"
        notes.append(f"{what} ({where}): {reason}.".replace("..", "."))
    shown = notes[:MAX_NOTES]
    if len(notes) > MAX_NOTES:
        shown.append(f"... and {len(notes) - MAX_NOTES} more reasons; see the table.")
    return [line for note in shown for line in textwrap.wrap(note, 100)]


def _gaps(
    frame: pl.DataFrame, base: alt.Chart, keys: Sequence[str], *, at: float, along: str = "y"
) -> list[alt.Chart]:
    """`n/a` at pixel `at` of the panel where a value is null; empty when none is."""
    if frame["value"].null_count() == 0:
        return []
    tips = [alt.Tooltip(f"{key}:N", title=theme.column_title(key)) for key in keys if key in frame.columns]
    tips += (
        [alt.Tooltip("reason:N", title=theme.COLUMN_TITLES["reason"])] if "reason" in frame.columns else []
    )
    text = base.transform_filter("datum.value === null").mark_text(text="n/a", fontSize=11, fontWeight="bold")
    placed = text.encode(x=alt.value(at)) if along == "x" else text.encode(y=alt.value(at))
    return [placed.encode(tooltip=tips)]


def _tips(
    frame: pl.DataFrame, keys: Sequence[str], *, value_format: str, extra: Sequence[tuple[str, str]] = ()
) -> list[alt.Tooltip]:
    tips = [
        alt.Tooltip(f"{key}:{_kind(frame, key)}", title=theme.column_title(key))
        for key in dict.fromkeys(keys)
    ]
    tips.append(alt.Tooltip("value:Q", title="value", format=value_format))
    for field in ("low", "high"):
        if field in frame.columns:
            tips.append(alt.Tooltip(f"{field}:Q", title=theme.COLUMN_TITLES[field], format=value_format))
    if "n" in frame.columns:
        tips.append(alt.Tooltip("n:Q", title="n", format=",d"))
    for field in _EXTRAS:
        if field in frame.columns:
            tips.append(alt.Tooltip(f"{field}:{_kind(frame, field)}", title=theme.COLUMN_TITLES[field]))
    tips += [
        alt.Tooltip(f"{field}:Q", title=theme.column_title(field), format=shape) for field, shape in extra
    ]
    return tips


def _kind(frame: pl.DataFrame, field: str) -> str:
    return "Q" if frame.schema[field].is_numeric() else "N"


def _colour(domain: Sequence[str], frame: pl.DataFrame, *, legend: bool = True) -> alt.Color:
    present = set(frame["arm"].to_list())
    shown = [name for name in domain if name in present]
    return alt.Color(
        "arm:N",
        title="arm",
        scale=alt.Scale(domain=list(domain), range=theme.arm_colours(domain)),
        legend=alt.Legend(values=shown) if legend else None,
    )


def _named_series(
    frame: pl.DataFrame, words: dict[str, tuple[str, str, str]]
) -> tuple[pl.DataFrame, _Series]:
    """The rows whose metric has a name in `words`, with a column `series` that holds it."""
    names = {metric: name for metric, (name, _, _) in words.items()}
    kept = frame.filter(pl.col("metric").is_in(list(words))).with_columns(
        pl.col("metric").replace_strict(names, return_dtype=pl.String).alias("series")
    )
    domain, colours, shapes = zip(*words.values(), strict=True)
    return kept, _Series(field="series", domain=domain, colours=colours, shapes=shapes)


def _arm_series(frame: pl.DataFrame, layout: _Layout) -> _Series:
    domain = theme.arm_domain(frame["arm"].to_list(), arms=layout.arms)
    return _Series(
        field="arm",
        domain=domain,
        colours=theme.arm_colours(domain),
        shapes=theme.arm_shapes(domain),
        title="arm",
    )


def _rule(at: float, *, vertical: bool = False) -> alt.Chart:
    rule = alt.Chart().mark_rule(color=theme.INK, strokeDash=[6, 4], strokeWidth=1.2)
    placed: alt.Chart = rule.encode(x=alt.XDatum(at)) if vertical else rule.encode(y=alt.YDatum(at))
    return placed


def _log2_concurrency(frame: pl.DataFrame) -> alt.X:
    values = sorted(set(frame["concurrency"].to_list()))
    scale = alt.Scale(type="log", base=2, nice=False, padding=18)
    if len(values) == 1:
        scale = alt.Scale(type="log", base=2, nice=False, domain=[values[0] / 2, values[0] * 2])
    return alt.X(
        "concurrency:Q",
        title="concurrency (requests in flight, log2)",
        scale=scale,
        axis=alt.Axis(values=values, format="d", grid=True),
    )


def _order(field: str, found: Sequence[str]) -> list[str]:
    known = {"entropy_tier": ENTROPY_TIERS, "length_tier": LENGTH_TIERS}.get(field)
    if known is None:
        return list(found)
    return [*(name for name in known if name in found), *(name for name in found if name not in known)]
