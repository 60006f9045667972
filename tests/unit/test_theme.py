"""Colours, shapes and names: fixed by the plan's arms, told apart without colour, readable on white."""

from __future__ import annotations

import altair as alt
import pytest

from specnb import theme

ARMS = ("baseline", "dflash2", "prompt_lookup")


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.1)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_an_arm_keeps_its_colour_in_a_chart_that_lacks_the_others():
    whole = dict(zip(ARMS, theme.arm_colours(theme.arm_domain(ARMS, arms=ARMS)), strict=True))
    domain = theme.arm_domain(["prompt_lookup"], arms=ARMS)
    alone = dict(zip(domain, theme.arm_colours(domain), strict=True))
    assert alone["prompt_lookup"] == whole["prompt_lookup"] == "#d55e00"
    assert whole["baseline"] == theme.BASELINE_COLOUR
    assert whole["dflash2"] == "#0072b2"


def test_names_outside_the_plan_come_last():
    assert theme.arm_domain(["x", "dflash2", "x"], arms=ARMS) == [*ARMS, "x"]


def test_shapes_differ_as_colours_do():
    shapes = theme.arm_shapes(ARMS)
    assert shapes == ["triangle-up", "circle", "square"]
    assert len(set(theme.ARM_SHAPES) | {theme.BASELINE_SHAPE}) == len(theme.ARM_SHAPES) + 1


def test_more_arms_than_colours_repeat():
    names = [f"arm{number}" for number in range(7)]
    colours = theme.arm_colours(names)
    assert colours[6] == colours[0]
    assert len(set(colours[:6])) == 6


@pytest.mark.parametrize("colour", [*theme.VERDICT_COLOURS.values(), theme.MUTED, theme.INK])
def test_text_colours_have_a_contrast_of_4_5_on_white(colour):
    assert contrast(colour, "#ffffff") >= 4.5


@pytest.mark.parametrize("colour", theme.ARM_COLOURS)
def test_marks_can_be_seen_on_white(colour):
    assert contrast(colour, "#ffffff") >= 1.9


@pytest.mark.parametrize(
    ("verdict", "tone"),
    [
        ("supported", "good"),
        ("adopt", "good"),
        ("adopt up to concurrency 8", "good"),
        ("equivalent up to numerics", "good"),
        ("not supported", "bad"),
        ("do not adopt", "bad"),
        ("not equivalent", "bad"),
        ("refused", "open"),
        ("inconclusive", "open"),
        ("canary first", "open"),
        ("vacuous", "open"),
        ("something new", "open"),
    ],
)
def test_tone_of_a_verdict(verdict, tone):
    assert theme.verdict_tone(verdict) == tone


def test_claims_that_explain_are_neither_good_nor_bad():
    assert theme.verdict_tone("not supported", "suffix decay") == "fact"
    assert theme.verdict_tone("supported", "entropy") == "fact"
    assert theme.verdict_tone("inconclusive", "entropy") == "open"
    assert theme.verdict_tone("not supported", "speedup") == "bad"


def test_column_titles():
    assert theme.column_title("position") == "draft position (0 = first)"
    assert theme.column_title("num_failed") == "failed"
    assert theme.column_title("draft_acceptance_rate") == "draft acceptance rate"


def test_the_theme_is_enabled_with_cjk_faces_and_readable_sizes():
    assert alt.theme.active == "specnb"
    config = theme.specnb_theme()["config"]
    assert "Noto Sans CJK SC" in config["font"]
    assert config["font"].endswith("sans-serif")
    assert min(config["axis"]["labelFontSize"], config["legend"]["labelFontSize"]) >= 12
