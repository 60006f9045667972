"""How every chart looks: one altair theme, one colour and one mark shape an arm.

Charts call it; it knows nothing of data beyond arm names. Imports altair only, so that
`import specnb` stays light. Separate from `charts` so that colour means the same arm in
every picture of a run and one place decides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import altair as alt

BASELINE_COLOUR: Final = "#6b6b6b"
# Okabe & Ito, "Color Universal Design" (2008), in an order whose first three also differ in lightness;
# the pale yellow is left out, since it can't be read on white.
ARM_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
BASELINE_SHAPE: Final = "triangle-up"
ARM_SHAPES: Final = ("circle", "square", "diamond", "cross", "triangle-down", "triangle-right")

VERDICT_COLOURS: Final = {
    "good": "#1b7f4d",
    "bad": "#b3261e",
    "open": "#8a5a00",
    "fact": "#3d5a80",
}
EXPLAINING_CLAIMS: Final = frozenset({"suffix decay", "entropy"})
GOOD_VERDICTS: Final = frozenset({"supported", "adopt", "equivalent", "equivalent up to numerics"})
BAD_VERDICTS: Final = frozenset({"not supported", "do not adopt", "not equivalent"})

# Latin faces of the three desktop systems first, then CJK faces: a browser falls back glyph by glyph.
FONT: Final = (
    "'Segoe UI', 'Helvetica Neue', Arial, 'Liberation Sans', 'DejaVu Sans', 'PingFang SC', "
    "'Microsoft YaHei', 'Noto Sans CJK SC', 'Source Han Sans SC', sans-serif"
)
INK: Final = "#1f2328"
MUTED: Final = "#57606a"
GRID: Final = "#e3e6ea"

COLUMN_TITLES: Final[dict[str, str]] = {
    "arm": "arm",
    "entropy_tier": "entropy tier",
    "length_tier": "output-length tier",
    "task": "task",
    "sampling": "sampling",
    "concurrency": "concurrency",
    "position": "draft position (0 = first)",
    "num_speculative_tokens": "K' (drafts kept in a block)",
    "entropy_mean_nats": "entropy of the target's law (nats, mean of the bin)",
    "entropy_low_nats": "bin from (nats)",
    "entropy_high_nats": "bin to (nats)",
    "quantile": "quantile",
    "n": "n",
    "n_clusters": "distinct prompts",
    "level": "interval level",
    "method": "method",
    "reason": "why missing",
    "low": "interval from",
    "high": "interval to",
    "value": "value",
    "min_concurrency": "lowest load",
    "max_concurrency": "highest load",
    "p_value": "p",
    "p_holm": "p (Holm)",
    "near_tie_nats": "near-tie threshold (nats)",
    "margin_nats": "margin (nats)",
    "margin_source": "margin from",
    "index": "first difference at",
    "token_id": "token",
    "reference_token_id": "reference token",
    "split_class": "first divergence",
    "wall_s": "wall (s)",
    "baseline_wall_s": "baseline wall (s)",
}


def verdict_tone(verdict: str, claim: str = "") -> str:
    """`good`, `bad`, `open` or `fact`: which colour a verdict's word gets.

    `adopt up to concurrency N` is good; inconclusive, canary first, vacuous and unknown words are open.
    Claims that only explain (`EXPLAINING_CLAIMS`) are facts whichever way they come out: decay that is
    not supported is no bad news.
    """
    word = verdict.strip().lower()
    if claim in EXPLAINING_CLAIMS and word in ("supported", "not supported"):
        return "fact"
    if word in GOOD_VERDICTS or word.startswith("adopt up to"):
        return "good"
    return "bad" if word in BAD_VERDICTS else "open"


def column_title(name: str) -> str:
    """A column's name for people: its title in `COLUMN_TITLES`, else the name with blanks, without `num_`."""
    return COLUMN_TITLES.get(name, name.removeprefix("num_").replace("_", " "))


def arm_domain(names: Sequence[str], *, arms: Sequence[str] = ()) -> list[str]:
    """Arm names in the order that fixes colours: all arms of the plan first, then names not among them.

    Parameters
    ----------
    names
        Names that occur in a chart's data.
    arms
        Every arm of the plan, in plan order. With it an arm keeps its colour in charts that lack others.
    """
    return [*arms, *(name for name in dict.fromkeys(names) if name not in arms)]


def arm_colours(domain: Sequence[str]) -> list[str]:
    """One colour an arm: grey for `baseline`, then the palette in order, repeating after six arms."""
    return _assign(domain, ARM_COLOURS, BASELINE_COLOUR)


def arm_shapes(domain: Sequence[str]) -> list[str]:
    """One mark shape an arm, so that colour is never the only difference."""
    return _assign(domain, ARM_SHAPES, BASELINE_SHAPE)


def _assign(domain: Sequence[str], values: Sequence[str], baseline: str) -> list[str]:
    assigned = []
    number = 0
    for name in domain:
        if name == "baseline" or name.startswith("baseline "):
            assigned.append(baseline)
        else:
            assigned.append(values[number % len(values)])
            number += 1
    return assigned


@alt.theme.register("specnb", enable=True)
def specnb_theme() -> alt.theme.ThemeConfig:
    """The altair theme: white ground, text of 12 px and more, a quiet grid, horizontal y titles."""
    return alt.theme.ThemeConfig(
        {
            "config": {
                "background": "white",
                "font": FONT,
                "padding": {"left": 8, "right": 16, "top": 8, "bottom": 8},
                "view": {"continuousWidth": 560, "continuousHeight": 280, "stroke": "transparent"},
                "title": {
                    "anchor": "start",
                    "frame": "group",
                    "fontSize": 15,
                    "fontWeight": 600,
                    "color": INK,
                    "offset": 12,
                    "subtitleFontSize": 12,
                    "subtitleColor": MUTED,
                    "subtitlePadding": 4,
                },
                "axis": {
                    "labelFontSize": 12,
                    "titleFontSize": 12,
                    "titleFontWeight": 600,
                    "labelColor": INK,
                    "titleColor": INK,
                    "gridColor": GRID,
                    "domainColor": "#9aa1a9",
                    "tickColor": "#9aa1a9",
                    "labelLimit": 260,
                    "labelOverlap": "greedy",
                    "titlePadding": 8,
                },
                "legend": {
                    "orient": "top",
                    "direction": "horizontal",
                    "labelFontSize": 12,
                    "titleFontSize": 12,
                    "labelColor": INK,
                    "titleColor": INK,
                    "labelLimit": 260,
                    "symbolSize": 90,
                    "columns": 6,
                    "offset": 6,
                },
                "header": {
                    "labelFontSize": 12,
                    "labelFontWeight": 600,
                    "labelColor": INK,
                    "titleColor": MUTED,
                    "titleFontSize": 12,
                    "titleFontWeight": 400,
                    "labelPadding": 6,
                },
                "line": {"strokeWidth": 2},
                "point": {"size": 55, "filled": True, "opacity": 1},
                "rule": {"strokeWidth": 1.5},
                "facet": {"spacing": 18},
            }
        }
    )
