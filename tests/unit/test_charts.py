"""Charts through `to_dict()`: fields, types, titles, rows, gaps; each drawn in both Vega-Lite versions."""

from __future__ import annotations

import json
import re

import polars as pl
import pytest
import vl_convert

from specnb import charts

ARMS = ("baseline", "dflash2", "prompt_lookup")


def estimates(rows, **columns):
    """A long frame: value 0.5 in [0.4, 0.6], n 100, unless a row says otherwise."""
    base = {"value": 0.5, "low": 0.4, "high": 0.6, "level": 0.95, "n": 100, "n_clusters": 12}
    filled = [{**base, "method": "bca", "reason": None, **columns, **row} for row in rows]
    return pl.DataFrame(filled, infer_schema_length=None).with_columns(pl.col("reason").cast(pl.String))


POSITIONS = estimates(
    [
        {"arm": arm, "sampling": sampling, "position": position, "metric": metric}
        for arm in ARMS[1:]
        for sampling in ("greedy", "sampled")
        for position in range(3)
        for metric in ("survival", "conditional_acceptance_rate", "acceptance_rate_by_position")
    ]
)
LOADS = estimates(
    [
        {"arm": arm, "sampling": "greedy", "concurrency": load, "metric": metric}
        for arm in ARMS[1:]
        for load in (1, 2, 8)
        for metric in ("throughput_speedup", "paired_tpot_speedup", "output_length_ratio")
    ]
)
QUANTILES = estimates(
    [
        {"arm": arm, "sampling": "greedy", "concurrency": load, "metric": metric, "quantile": quantile}
        for arm in ARMS
        for load in (1, 4)
        for metric in ("ttft_s", "tpot_s", "e2e_s")
        for quantile in (0.5, 0.95, 0.99)
    ]
)
BINS = estimates(
    [
        {
            "arm": arm,
            "metric": "conditional_acceptance_rate",
            "entropy_bin": number,
            "entropy_low_nats": float(number),
            "entropy_high_nats": number + 1.0,
            "entropy_mean_nats": number + 0.5,
        }
        for arm in ARMS[1:]
        for number in range(4)
    ]
)
LABELS = estimates(
    [
        {"arm": arm, "label": label, "label_value": value, "metric": "conditional_acceptance_rate"}
        for arm in ARMS[1:]
        for label, values in (("task", ("code", "翻译")), ("entropy_tier", ("high", "low", "medium")))
        for value in values
    ]
)
SLOPES = estimates(
    [
        {"arm": arm, "entropy_tier": tier, "metric": "conditional_logit_slope", "value": -0.1}
        for arm in ARMS[1:]
        for tier in ("high", "low")
    ],
    low=-0.2,
    high=0.0,
)
SHORTER = estimates(
    [
        {"arm": "dflash2", "num_speculative_tokens": k, "metric": "counterfactual_acceptance_length"}
        for k in (1, 2, 3)
    ],
    value=2.0,
    low=1.9,
    high=2.1,
)
THROUGHPUT = estimates(
    [{"arm": arm, "concurrency": load, "metric": "output_tokens_per_s"} for arm in ARMS for load in (1, 2)],
    value=50.0,
    low=40.0,
    high=60.0,
)
PARTS = pl.DataFrame(
    [
        {
            "arm": arm,
            "concurrency": load,
            "decode_speedup": 2.0,
            "predicted_speedup": 2.1,
            "residual": 2.0 / 2.1 - 1,
            "draft_s": 0.004,
            "verify_s": 0.03,
            "stall_s": 0.001,
            "baseline_step_s": 0.025,
            "reason": None,
        }
        for arm in ARMS[1:]
        for load in (1, 4)
    ],
    schema_overrides={"reason": pl.String},
)
MATCHES = estimates(
    [
        {"comparison": comparison, "control": control, "concurrency": load, "metric": "exact_match_rate"}
        for comparison, control in (("dflash2 against baseline", False), ("baseline against itself", True))
        for load in (1, 4)
    ]
)
SPLITS = pl.DataFrame(
    [
        {"arm": arm, "comparison": comparison, "concurrency": 1, "split_class": kind, "count": count}
        for arm in ARMS[1:]
        for comparison in (f"{arm} against baseline", "baseline against itself")
        for kind, count in (("identical", 9), ("near_tie", 2), ("clear", 0))
    ]
)
PIT = estimates(
    [
        {"arm": arm, "bin_low": number / 4, "bin_high": (number + 1) / 4, "expected": 0.25}
        for arm in ARMS
        for number in range(4)
    ],
    value=0.25,
    low=0.2,
    high=0.3,
)
CLAIMS = pl.DataFrame(
    [
        {"arm": "dflash2", "claim": "speedup", "verdict": "supported"},
        {"arm": "dflash2", "claim": "equivalence", "verdict": "not equivalent"},
    ]
)

RECALL = estimates(
    [
        {"arm": arm, "places": places, "position": position, "metric": metric}
        for arm in ARMS[1:]
        for places in ("all", "reached")
        for position in range(3)
        for metric in ("recall_at_1", "recall_at_16", "conditional_acceptance_rate")
        if places == "reached" or metric != "conditional_acceptance_rate"
    ]
)
PATHS = estimates(
    [
        {"arm": arm, "metric": metric}
        for arm in ARMS[1:]
        for metric in ("argmax_acceptance_length", "mean_acceptance_length", "oracle_acceptance_length")
    ],
    value=2.0,
    low=1.9,
    high=2.1,
)
GAINS = estimates(
    [
        {"mechanism": mechanism, "arm": "dflash2", "without_arm": arm, "note": "", "metric": metric}
        for mechanism, arm in (("selector", "flat"), ("convolution", "bare"))
        for metric in ("acceptance_length_gain", "conditional_logit_slope_difference")
    ]
)
LENGTHS = estimates(
    [
        {"arm": arm, "entropy_tier": tier, "metric": metric}
        for arm in ARMS
        for tier in ("high", "low")
        for metric in ("mean_acceptance_length", "tokens_per_target_step")
    ],
    value=2.0,
    low=1.9,
    high=2.1,
)

CASES = {
    "survival": lambda frame=POSITIONS: charts.survival_by_position_chart(
        frame, arms=ARMS, column="sampling"
    ),
    "conditional": lambda frame=POSITIONS: charts.conditional_acceptance_by_position_chart(
        frame, arms=ARMS, column="sampling"
    ),
    "speedup": lambda frame=LOADS: charts.speedup_by_concurrency_chart(frame, arms=ARMS, row="sampling"),
    "latency": lambda frame=QUANTILES: charts.latency_chart(
        frame, metric="tpot_s", arms=ARMS, row="sampling"
    ),
    "entropy": lambda frame=BINS: charts.hit_rate_by_entropy_chart(frame, arms=ARMS),
    "label": lambda frame=LABELS: charts.hit_rate_by_label_chart(frame, label="entropy_tier", arms=ARMS),
    "decay": lambda frame=SLOPES: charts.suffix_decay_chart(frame, arms=ARMS),
    "shorter": lambda frame=SHORTER: charts.counterfactual_acceptance_length_chart(frame, arms=ARMS),
    "throughput": lambda frame=THROUGHPUT: charts.throughput_chart(frame, arms=ARMS),
    "decomposition": lambda frame=PARTS: charts.decomposition_chart(frame, arms=ARMS),
    "cycle": lambda frame=PARTS: charts.cycle_time_chart(frame, arms=ARMS),
    "match": lambda frame=MATCHES: charts.match_rate_chart(frame),
    "split": lambda frame=SPLITS: charts.split_class_chart(frame),
    "pit": lambda frame=PIT: charts.pit_chart(frame, arms=ARMS),
    "recall": lambda frame=RECALL: charts.recall_by_position_chart(frame, places="reached", arms=ARMS),
    "paths": lambda frame=PATHS: charts.candidate_acceptance_length_chart(frame, arms=ARMS),
    "gain": lambda frame=GAINS: charts.mechanism_gain_chart(frame),
    "length": lambda frame=LENGTHS: charts.acceptance_length_chart(
        frame, metric="tokens_per_target_step", label="entropy_tier", arms=ARMS
    ),
    "overview": lambda frame=CLAIMS: charts.verdict_overview_chart(frame),
}
FRAMES = {name: case.__defaults__[0] for name, case in CASES.items()}


def rows_of(chart):
    """The rows inside a chart's specification."""
    spec = chart.to_dict()
    (rows,) = spec["datasets"].values()
    return rows


def layers_of(chart):
    spec = chart.to_dict()
    inner = spec.get("spec", spec)
    return inner.get("layer", [inner])


def encodings(chart, channel):
    return [layer["encoding"][channel] for layer in layers_of(chart) if channel in layer.get("encoding", {})]


def tooltips(chart):
    return [tip["field"] for tips in encodings(chart, "tooltip") for tip in tips]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("version", ["5.20", "6.4"])
def test_every_chart_is_drawn_with_marks_in_both_versions(name, version):
    svg = vl_convert.vegalite_to_svg(CASES[name]().to_json(), vl_version=version)
    assert len(re.findall(r"<(?:path|rect|text|line)\b", svg)) > 12
    assert "NaN" not in svg
    assert "http" not in svg.replace("http://www.w3.org/", "")


@pytest.mark.parametrize("name", CASES)
def test_every_chart_is_strict_json_with_a_description(name):
    text = CASES[name]().to_json()

    def refuse(literal):
        raise AssertionError(literal)

    spec = json.loads(text, parse_constant=refuse)
    assert spec["description"].startswith(spec["title"]["text"])


@pytest.mark.parametrize("name", [name for name in CASES if name != "overview"])
def test_a_denominator_is_in_the_tooltip(name):
    fields = tooltips(CASES[name]())
    denominator = {"split": "count", "decomposition": "residual", "cycle": "value"}.get(name, "n")
    assert denominator in fields


@pytest.mark.parametrize("name", CASES)
def test_an_empty_frame_gives_a_chart_that_says_why(name):
    chart = CASES[name](FRAMES[name].clear())
    (row,) = rows_of(chart)
    assert row["text"].startswith("Nothing to draw: ")
    assert layers_of(chart)[0]["mark"]["type"] == "text"


@pytest.mark.parametrize("name", CASES)
def test_a_missing_column_is_named(name):
    frame = FRAMES[name]
    column = next(c for c in ("low", "verdict", "count", "residual", "draft_s") if c in frame.columns)
    column = "draft_s" if name == "cycle" else column
    with pytest.raises(ValueError, match=rf"_chart: column '{column}' is missing; the frame has "):
        CASES[name](frame.drop(column))


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("overview", "split")])
def test_nan_is_refused_since_it_is_not_json_and_not_null(name):
    frame = FRAMES[name]
    column = "value" if "value" in frame.columns else "decode_speedup" if name != "cycle" else "draft_s"
    broken = frame.with_columns(pl.lit(float("nan")).alias(column))
    with pytest.raises(ValueError, match=f"column '{column}' holds NaN or infinity; undefined is null"):
        CASES[name](broken)


def test_rows_that_share_a_point_are_refused_naming_what_tells_them_apart():
    with pytest.raises(
        ValueError, match=r"2 rows share the point arm=dflash2, position=0; filter or lay out by"
    ):
        charts.survival_by_position_chart(POSITIONS)
    with pytest.raises(ValueError, match="sampling"):
        charts.survival_by_position_chart(POSITIONS)
    doubled = pl.concat([LOADS, LOADS])
    with pytest.raises(ValueError, match="the rows are duplicates"):
        charts.speedup_by_concurrency_chart(doubled)


def test_e10_more_than_5000_rows_are_refused_before_display():
    rows = [{"arm": "a", "position": number, "metric": "survival"} for number in range(6000)]
    with pytest.raises(ValueError, match="6000 rows; a chart takes 5000 at most: aggregate first"):
        charts.survival_by_position_chart(estimates(rows))


def test_only_rows_of_the_metric_are_drawn():
    rows = rows_of(CASES["survival"]())
    assert len(rows) == 2 * 2 * 3
    assert {row["sampling"] for row in rows} == {"greedy", "sampled"}


def test_positions_are_ordinal_and_rates_start_at_0():
    chart = CASES["survival"]()
    assert all(
        x["type"] == "ordinal" and x["title"] == "draft position (0 = first)" for x in encodings(chart, "x")
    )
    assert all(y["scale"] == {"domain": [0, 1]} for y in encodings(chart, "y") if "field" in y)


def test_intervals_are_drawn_from_low_to_high():
    (rule,) = [layer for layer in layers_of(CASES["survival"]()) if layer["mark"]["type"] == "rule"]
    assert (rule["encoding"]["y"]["field"], rule["encoding"]["y2"]["field"]) == ("low", "high")
    (bar,) = [layer for layer in layers_of(CASES["label"]()) if layer["mark"]["type"] == "rule"]
    assert (bar["encoding"]["x"]["field"], bar["encoding"]["x2"]["field"]) == ("low", "high")


def test_concurrency_is_on_a_log2_axis_with_the_measured_loads_as_ticks():
    for name in ("speedup", "throughput", "latency", "decomposition"):
        for x in encodings(CASES[name](), "x"):
            assert (x["scale"]["type"], x["scale"]["base"]) == ("log", 2)
    assert encodings(CASES["speedup"](), "x")[0]["axis"]["values"] == [1, 2, 8]


def test_the_speedup_chart_has_a_rule_at_1_and_starts_at_0():
    chart = CASES["speedup"]()
    rules = [y for y in encodings(chart, "y") if y.get("datum") is not None]
    assert [rule["datum"] for rule in rules] == [1.0]
    assert all(
        y["scale"]["zero"] and y["scale"]["domainMin"] == 0 for y in encodings(chart, "y") if "field" in y
    )


def test_the_decay_chart_has_a_rule_at_0():
    assert [x["datum"] for x in encodings(CASES["decay"](), "x") if "datum" in x] == [0.0]


def test_e15_a_null_is_a_gap_marked_and_explained():
    frame = POSITIONS.with_columns(
        pl.when(pl.col("position") == 2).then(None).otherwise(pl.col(name)).alias(name)
        for name in ("value", "low", "high")
    ).with_columns(pl.when(pl.col("position") == 2).then(pl.lit("no drafts")).alias("reason"))
    chart = CASES["survival"](frame)
    spec = chart.to_dict()
    assert spec["title"]["subtitle"] == ["Not shown (4 points, first dflash2, 2, greedy): no drafts."]
    (mark,) = [layer for layer in layers_of(chart) if layer["mark"]["type"] == "text"]
    assert mark["mark"]["text"] == "n/a"
    assert mark["transform"] == [{"filter": "datum.value === null"}]
    assert sum(row["value"] is None for row in rows_of(chart)) == 4


def test_a_missing_interval_is_explained_though_the_point_is_drawn():
    frame = LOADS.with_columns(
        pl.lit(None, pl.Float64).alias("low"),
        pl.lit(None, pl.Float64).alias("high"),
        pl.lit("fewer than 5 prompts").alias("reason"),
    )
    subtitle = CASES["speedup"](frame).to_dict()["title"]["subtitle"]
    assert subtitle == ["No interval (6 points, first dflash2, 1, greedy): fewer than 5 prompts."]


def test_many_reasons_are_counted_and_not_all_written():
    frame = estimates(
        [
            {"arm": "a", "position": number, "metric": "survival", "value": None, "low": None, "high": None}
            | {"reason": f"reason {number}"}
            for number in range(7)
        ]
    )
    frame = frame.with_columns(pl.col("value", "low", "high").cast(pl.Float64))
    subtitle = charts.survival_by_position_chart(frame).to_dict()["title"]["subtitle"]
    assert subtitle[-1] == "... and 3 more reasons; see the table."
    assert len(subtitle) == 5


def test_colours_are_those_of_the_plan_even_where_arms_are_missing():
    frame = POSITIONS.filter(arm="prompt_lookup")
    colour = encodings(charts.survival_by_position_chart(frame, arms=ARMS, column="sampling"), "color")[0]
    assert colour["scale"]["domain"] == list(ARMS)
    assert colour["scale"]["range"][2] == "#d55e00"
    assert colour["legend"]["values"] == ["prompt_lookup"]


def test_tiers_are_in_their_own_order():
    y = encodings(CASES["label"](), "y")[0]
    assert y["sort"] == ["low", "medium", "high"]


def test_labels_are_selected_and_may_be_chinese():
    chart = charts.hit_rate_by_label_chart(LABELS, label="task", arms=ARMS)
    assert {row["task"] for row in rows_of(chart)} == {"code", "翻译"}
    assert "翻译" in vl_convert.vegalite_to_svg(chart.to_json())


def test_quantiles_are_panels_and_seconds_are_shown_as_milliseconds_by_the_axis_only():
    chart = CASES["latency"]()
    assert {row["quantile"] for row in rows_of(chart)} == {"P50", "P95", "P99"}
    assert all(row["value"] == 0.5 for row in rows_of(chart))
    assert chart.to_dict()["facet"]["column"]["field"] == "quantile"
    (y,) = {json.dumps(y["axis"]) for y in encodings(chart, "y")}
    assert "datum.value * 1000" in y


def test_one_quantile_by_length_tier():
    frame = estimates(
        [
            {"arm": "a", "length_tier": tier, "concurrency": 1, "metric": "tpot_s", "quantile": quantile}
            for tier in ("long", "short")
            for quantile in (0.5, 0.95)
        ]
    )
    chart = charts.latency_chart(frame, metric="tpot_s", quantile=0.5, column="length_tier")
    assert {row["quantile"] for row in rows_of(chart)} == {"P50"}
    assert chart.to_dict()["facet"]["column"]["sort"] == ["short", "long"]
    assert chart.to_dict()["title"]["text"].startswith("P50 TPOT")


def test_decomposition_rows_are_the_two_speedups_unchanged():
    rows = rows_of(CASES["decomposition"]())
    assert {(row["kind"], row["value"]) for row in rows} == {("measured", 2.0), ("predicted", 2.1)}


def test_parts_of_a_step_are_unchanged_and_the_bars_are_named():
    chart = CASES["cycle"]()
    found = {(row["part"], row["value"]) for row in rows_of(chart)}
    assert found == {("verify", 0.03), ("draft", 0.004), ("prefill stall", 0.001)}
    assert chart.to_dict()["title"]["subtitle"] == [
        "Bars of one concurrency, from left to right: dflash2, prompt_lookup."
    ]


def test_controls_are_grey_and_last():
    chart = CASES["match"]()
    y = encodings(chart, "y")[0]
    assert y["sort"] == ["dflash2 against baseline", "baseline against itself"]
    assert encodings(chart, "color")[0]["scale"]["range"][1] == "#6b6b6b"


def test_the_control_that_every_arm_repeats_is_drawn_once():
    rows = rows_of(CASES["split"]())
    assert sum(row["comparison"] == "baseline against itself" for row in rows) == 2
    assert {row["split_class"] for row in rows} == {"identical", "near tie"}


def test_tiles_carry_the_word_and_a_tone():
    rows = rows_of(CASES["overview"]())
    assert [(row["verdict"], row["tone"]) for row in rows] == [
        ("supported", "good"),
        ("not equivalent", "bad"),
    ]
    assert any(layer["mark"]["type"] == "text" for layer in layers_of(CASES["overview"]()))


def test_charts_compute_nothing():
    """No aggregate, bin, regression or calculation in any specification; the only filter marks gaps."""
    for name, case in CASES.items():
        text = case().to_json()
        for word in (
            '"aggregate"',
            '"bin"',
            '"calculate"',
            '"regression"',
            '"errorband"',
            '"density"',
            '"window"',
        ):
            assert word not in text, (name, word)


def test_recall_draws_the_places_asked_for_with_one_line_a_kind():
    reached, every = CASES["recall"](), charts.recall_by_position_chart(RECALL, places="all", arms=ARMS)
    assert {row["series"] for row in rows_of(reached)} == {
        "among the 16 candidates",
        "drafted and accepted",
        "the first candidate",
    }
    assert {row["series"] for row in rows_of(every)} == {"among the 16 candidates", "the first candidate"}
    assert len(rows_of(every)) == 2 * 2 * 3
    (colour,) = {json.dumps(c["scale"]) for c in encodings(every, "color")}
    assert json.loads(colour) == json.loads(json.dumps(encodings(reached, "color")[0]["scale"]))


def test_marks_that_stand_alone_on_their_line_are_not_shifted():
    assert encodings(CASES["gain"](), "yOffset") == []
    assert encodings(CASES["paths"](), "yOffset") != []


def test_a_gain_has_its_rule_at_0_and_a_slope_its_own_words():
    slope = charts.mechanism_gain_chart(GAINS, metric="conditional_logit_slope_difference")
    for chart in (CASES["gain"](), slope):
        (rule,) = [layer for layer in layers_of(chart) if layer["mark"].get("strokeDash") == [6, 4]]
        assert rule["encoding"]["x"]["datum"] == 0
    assert "flatter with it" in encodings(slope, "x")[1]["title"]
    assert {row["comparison"] for row in rows_of(slope)} == {"dflash2 against flat", "dflash2 against bare"}


def test_gains_of_two_settings_need_a_row_each():
    doubled = pl.concat(
        [GAINS.with_columns(pl.lit(name).alias("sampling")) for name in ("greedy", "sampled")]
    )
    with pytest.raises(ValueError, match="filter or lay out by sampling"):
        charts.mechanism_gain_chart(doubled)
    assert len(rows_of(charts.mechanism_gain_chart(doubled, row="sampling"))) == 4
