"""Candidates, path selector and convolution: against naive loops, known laws and data built to break them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from specnb import candidates, schema
from specnb.acceptance import suffix_decay
from specnb.records import Run, read_run

Runs = Callable[..., Run]
BY = ("arm", "sampling")
FULL = {"selector": True, "convolution": True}
LADDER = {
    "full": {**FULL, "alpha": 0.8},
    "without_selector": {"selector": False, "convolution": True, "alpha": 0.7},
    "without_convolution": {
        "selector": True,
        "convolution": False,
        "conditional_rates": (0.8, 0.7, 0.6, 0.5),
    },
    "plain": {"selector": False, "convolution": False, "conditional_rates": (0.7, 0.6, 0.5, 0.4)},
    "lookup": {"method": "ngram", "alpha": 0.3},
}


@pytest.fixture(scope="module")
def ladder(simulated_run: Runs) -> Run:
    """A full drafter, its three ablations and prompt lookup, greedy and sampled."""
    return simulated_run(
        arms=LADDER,
        prompts_per_cell=40,
        concurrency=(1,),
        repeats=1,
        sampling=("greedy", "sampled"),
        selector_lift=0.25,
        outside_candidates=0.4,
        prompt_concentration=None,
    )


def places(*drafts: dict[str, Any]) -> pl.DataFrame:
    """Positions from drafts: accepted, ranks (None: no candidate) and how many places are answered."""
    rows = []
    for step, draft in enumerate(drafts):
        ranks = draft["ranks"]
        answered = draft.get("answered", len(ranks))
        arm, prompt, repeat = draft.get("arm", "a"), draft.get("prompt", "p"), draft.get("repeat", 0)
        for position, rank in enumerate(ranks):
            rows.append(
                {
                    "arm": arm,
                    "sampling": "greedy",
                    "prompt_id": prompt,
                    "repeat": repeat,
                    "request_id": f"{arm}-{prompt}-{repeat}",
                    "step": step,
                    "position": position,
                    "reached": position <= draft["accepted"],
                    "accepted": position < draft["accepted"],
                    "in_answer": position < answered,
                    "answer_rank": rank if position < answered else None,
                }
            )
    types = {"answer_rank": pl.Int64(), "position": pl.Int64(), "step": pl.Int64(), "repeat": pl.Int64()}
    return pl.DataFrame(rows, schema_overrides=types)


def value(frame: pl.DataFrame, **where: Any) -> Any:
    found = frame.filter(*(pl.col(name) == wanted for name, wanted in where.items()))
    assert found.height == 1, found
    return found.row(0, named=True)


# Recall


def test_recall_counts_answered_places_reached_or_not(rng: np.random.Generator) -> None:
    frame = places(
        {"ranks": [0, 1, None], "accepted": 1},
        {"ranks": [0, 0, 15], "accepted": 2},
        {"ranks": [3, 0, 0], "accepted": 0, "answered": 2},
    )
    found = candidates.recall_by_position(frame, by=BY, rng=rng)
    rows = {
        (row["places"], row["metric"], row["position"]): (row["value"], row["n"])
        for row in found.iter_rows(named=True)
    }
    assert rows["all", "recall_at_1", 0] == (pytest.approx(2 / 3), 3)
    assert rows["all", "recall_at_16", 0] == (1.0, 3)
    assert rows["all", "recall_at_1", 1] == (pytest.approx(2 / 3), 3)
    assert rows["all", "recall_at_1", 2] == (0.0, 2)
    assert rows["all", "recall_at_16", 2] == (0.5, 2)
    assert rows["reached", "recall_at_1", 1] == (0.5, 2)
    assert rows["reached", "conditional_acceptance_rate", 0] == (pytest.approx(2 / 3), 3)
    assert rows["reached", "conditional_acceptance_rate", 1] == (0.5, 2)
    assert rows["reached", "conditional_acceptance_rate", 2] == (0.0, 1)
    assert ("all", "conditional_acceptance_rate", 0) not in rows


def test_rank_16_is_outside_the_best_sixteen(rng: np.random.Generator) -> None:
    found = candidates.recall_by_position(places({"ranks": [16, 15], "accepted": 0}), by=BY, rng=rng)
    assert value(found, places="all", metric="recall_at_16", position=0)["value"] == 0
    assert value(found, places="all", metric="recall_at_16", position=1)["value"] == 1


def test_recall_follows_the_simulated_law(ladder: Run, rng: np.random.Generator) -> None:
    positions = candidates.greedy_positions(ladder).filter(pl.col("arm") == "full")
    found = candidates.recall_by_position(positions, by=BY, rng=rng)
    for position in range(4):
        first = value(found, places="all", metric="recall_at_1", position=position)
        any_of = value(found, places="all", metric="recall_at_16", position=position)
        # 0.8 right, a quarter of them lifted; 0.4 of the 0.2 wrong ones outside. Binomial: prompts are alike.
        assert abs(first["value"] - 0.6) < 4 * np.sqrt(0.6 * 0.4 / first["n"])
        assert abs(any_of["value"] - 0.92) < 4 * np.sqrt(0.92 * 0.08 / any_of["n"])
        assert first["low"] < first["value"] < first["high"]
        assert first["n_clusters"] > 50


def test_an_arm_without_candidates_has_no_recall_and_says_why(ladder: Run, rng: np.random.Generator) -> None:
    positions = candidates.greedy_positions(ladder).filter(pl.col("arm") == "lookup")
    found = candidates.recall_by_position(positions, by=BY, rng=rng)
    recalls = found.filter(pl.col("metric").str.starts_with("recall"))
    assert recalls["value"].null_count() == recalls.height > 0
    assert set(recalls["reason"]) == {candidates.NO_CANDIDATES}
    picked = found.filter(pl.col("metric") == "conditional_acceptance_rate")
    assert picked["value"].null_count() == 0
    lengths = candidates.candidate_acceptance_lengths(positions, by=BY, rng=rng)
    known = lengths.filter(pl.col("value").is_not_null())
    assert known["metric"].to_list() == ["mean_acceptance_length"]


def test_candidates_that_never_hold_the_answer_are_a_recall_of_0(
    simulated_run: Runs, rng: np.random.Generator
) -> None:
    """The drafter's facts say that it keeps candidates, so that no rank at all is a finding, not a gap."""
    useless = {"alpha": 0.0, "outside_candidates": 1.0}
    run = simulated_run(
        arms={"told": {**useless, "num_candidates": 16}, "silent": useless},
        prompts_per_cell=8,
        concurrency=(1,),
        max_tokens=32,
    )
    positions = candidates.greedy_positions(run)
    assert positions["answer_rank"].null_count() == positions.height
    found = candidates.recall_by_position(positions, by=BY, rng=rng).filter(
        pl.col("metric") == "recall_at_16"
    )
    assert found.filter(pl.col("arm") == "told")["value"].unique().to_list() == [0]
    assert found.filter(pl.col("arm") == "silent")["value"].unique().to_list() == [None]
    lengths = candidates.candidate_acceptance_lengths(positions, by=BY, rng=rng)
    assert value(lengths, arm="told", metric="oracle_acceptance_length")["value"] == 1
    assert candidates.missing_positions(run) is None


def test_sampled_answers_are_left_out(ladder: Run) -> None:
    assert set(candidates.greedy_positions(ladder)["sampling"]) == {"greedy"}


# Acceptance lengths on the same drafts


def naive_lengths(frame: pl.DataFrame) -> tuple[float, float, float, int]:
    totals = np.zeros(3)
    drafts = 0
    for _, draft in frame.group_by("request_id", "step"):
        rows = draft.sort("position").to_dicts()
        if not all(row["in_answer"] for row in rows):
            continue
        drafts += 1
        tests = (
            lambda row: row["answer_rank"] == 0,
            lambda row: row["accepted"],
            lambda row: row["answer_rank"] is not None and row["answer_rank"] < 16,
        )
        for number, held in enumerate(tests):
            for row in rows:
                if not held(row):
                    break
                totals[number] += 1
    argmax, real, oracle = 1 + totals / drafts
    return argmax, real, oracle, drafts


@pytest.mark.parametrize("arm", ["full", "plain"])
def test_lengths_equal_a_naive_loop(ladder: Run, rng: np.random.Generator, arm: str) -> None:
    positions = candidates.greedy_positions(ladder).filter(pl.col("arm") == arm)
    # Rows out of order: the leading run must not depend on the file's order.
    found = candidates.candidate_acceptance_lengths(
        positions.sample(fraction=1, shuffle=True, seed=3), by=BY, rng=rng
    )
    argmax, real, oracle, drafts = naive_lengths(positions)
    rows = {row["metric"]: row for row in found.iter_rows(named=True)}
    assert {row["n"] for row in rows.values()} == {drafts}
    assert rows["argmax_acceptance_length"]["value"] == pytest.approx(argmax)
    assert rows["mean_acceptance_length"]["value"] == pytest.approx(real)
    assert rows["oracle_acceptance_length"]["value"] == pytest.approx(oracle)
    assert rows["selector_gain"]["value"] == pytest.approx(real - argmax)
    assert rows["selector_share"]["value"] == pytest.approx((real - argmax) / (oracle - argmax))
    assert 1 <= argmax <= real <= oracle <= 5
    assert rows["selector_gain"]["low"] > 0


def test_the_paired_interval_of_the_gain_is_narrower_than_the_difference_of_two(
    simulated_run: Runs, rng: np.random.Generator
) -> None:
    run = simulated_run(prompts_per_cell=40, concurrency=(1,), repeats=1, selector_lift=0.1)
    found = candidates.candidate_acceptance_lengths(candidates.greedy_positions(run), by=BY, rng=rng)
    gain, length = (value(found, metric=metric) for metric in ("selector_gain", "mean_acceptance_length"))
    assert gain["high"] - gain["low"] < length["high"] - length["low"]


def test_drafts_beyond_the_answer_are_left_out(rng: np.random.Generator) -> None:
    frame = places(
        {"ranks": [0, 1, 2], "accepted": 3},
        {"ranks": [0, 0, 0], "accepted": 3, "answered": 1},
    )
    found = candidates.candidate_acceptance_lengths(frame, by=BY, rng=rng)
    assert value(found, metric="argmax_acceptance_length")["value"] == 2
    assert value(found, metric="mean_acceptance_length")["value"] == 4
    assert value(found, metric="mean_acceptance_length")["n"] == 1


def test_no_whole_draft_and_no_room_for_a_gain_say_why(rng: np.random.Generator) -> None:
    cut = candidates.candidate_acceptance_lengths(
        places({"ranks": [0, 0], "accepted": 2, "answered": 1}), by=BY, rng=rng
    )
    assert set(cut["reason"]) == {"no draft lies wholly inside an answer"}
    full = candidates.candidate_acceptance_lengths(places({"ranks": [0, 0], "accepted": 2}), by=BY, rng=rng)
    assert value(full, metric="selector_gain")["value"] == 0
    assert value(full, metric="selector_share")["reason"] == "an oracle would gain nothing over the argmax"


@pytest.mark.parametrize("function", [candidates.recall_by_position, candidates.candidate_acceptance_lengths])
def test_missing_columns_and_a_missing_arm_are_named(function: Any, rng: np.random.Generator) -> None:
    frame = places({"ranks": [0], "accepted": 1})
    with pytest.raises(ValueError, match="'answer_rank'"):
        function(frame.drop("answer_rank"), by=BY, rng=rng)
    with pytest.raises(ValueError, match="must hold 'arm'"):
        function(frame, by=("sampling",), rng=rng)
    empty = function(frame.clear(), by=BY, rng=rng)
    assert empty.is_empty()
    assert {"arm", "sampling", "metric", "value"} <= set(empty.columns)


# Why there is nothing


def edited(run: Run, target: Path, **manifest: Any) -> Run:
    shutil.copytree(run.path, target)
    (target / "manifest.json").write_text(json.dumps({**run.manifest, **manifest}), encoding="utf-8")
    return read_run(target)


def test_a_run_from_before_the_ranks_is_read_and_said_to_be_one(simulated_copy: Callable[..., Path]) -> None:
    path = simulated_copy(prompts_per_cell=6, concurrency=(1,), max_tokens=16)
    for file in path.glob("cells/*/positions.parquet"):
        pl.read_parquet(file).drop("in_answer", "answer_rank").write_parquet(file)
    run = read_run(path)
    assert candidates.greedy_positions(run).is_empty()
    assert "recorded before" in str(candidates.missing_positions(run))


def test_what_is_missing_is_told_apart(simulated_run: Runs, ladder: Run, tmp_path: Path) -> None:
    assert candidates.missing_positions(ladder) is None
    sampled = simulated_run(prompts_per_cell=6, concurrency=(1,), max_tokens=16, sampling=("sampled",))
    assert "no greedy setting" in str(candidates.missing_positions(sampled))
    lookup = simulated_run(
        prompts_per_cell=6, concurrency=(1,), max_tokens=16, arms={"lookup": {"method": "ngram"}}
    )
    assert "keeps candidates" in str(candidates.missing_positions(lookup))
    alone = simulated_run(prompts_per_cell=6, concurrency=(1,), max_tokens=16, arms={})
    assert "no arm that speculates" in str(candidates.missing_positions(alone))


# Mechanisms


def test_arms_are_known_by_their_facts_and_not_by_their_names(simulated_run: Runs) -> None:
    run = simulated_run(
        prompts_per_cell=6,
        concurrency=(1,),
        max_tokens=16,
        arms={"plain-dflash": FULL, "dflash2": {"selector": False, "convolution": False}, "full": {}},
    )
    table = candidates.arm_mechanisms(run)
    assert table.select("arm", "selector", "convolution").rows() == [
        ("plain-dflash", True, True),
        ("dflash2", False, False),
        ("full", None, None),
    ]
    pairs = candidates.mechanism_pairs(table)
    assert pairs.select("mechanism", "arm", "without_arm").rows() == [
        ("selector and convolution", "plain-dflash", "dflash2")
    ]


def test_every_pair_of_the_ladder_is_found_once(ladder: Run) -> None:
    pairs = candidates.mechanism_pairs(candidates.arm_mechanisms(ladder))
    assert pairs.select("mechanism", "arm", "without_arm").rows() == [
        ("selector", "full", "without_selector"),
        ("selector", "without_convolution", "plain"),
        ("convolution", "full", "without_convolution"),
        ("convolution", "without_selector", "plain"),
        ("selector and convolution", "full", "plain"),
    ]
    assert set(pairs["note"]) == {"trained apart, budgets not recorded"}


def mechanisms(*arms: dict[str, Any]) -> pl.DataFrame:
    base = {
        "label": "DFlash 2",
        "method": "dflash",
        "num_speculative_tokens": 7,
        "draft_sample_method": None,
        "selector": True,
        "convolution": True,
        "drafter_sha256": None,
        "training_s": None,
    }
    return pl.DataFrame([{"arm": f"arm{n}", **base, **arm} for n, arm in enumerate(arms)])


@pytest.mark.parametrize(
    ("first", "second", "note"),
    [
        ({"drafter_sha256": "aa"}, {"drafter_sha256": "aa"}, "the same weights, switched off"),
        ({"training_s": 300.0}, {"training_s": 305.0}, "trained apart with equal budgets (300 s and 305 s)"),
        (
            {"training_s": 1200.0},
            {"training_s": 300.0},
            "trained with different budgets (1200 s and 300 s), so not this part alone",
        ),
        ({"training_s": 300.0}, {}, "trained apart, budgets not recorded"),
    ],
)
def test_the_note_says_whether_weights_may_be_compared(first: Any, second: Any, note: str) -> None:
    pairs = candidates.mechanism_pairs(mechanisms(first, {**second, "selector": False}))
    assert pairs.row(0) == ("selector", "arm0", "arm1", note)


@pytest.mark.parametrize(
    "other",
    [
        {"selector": False, "num_speculative_tokens": 4},
        {"selector": False, "method": "eagle3"},
        {"selector": False, "draft_sample_method": "greedy"},
        {"selector": False, "convolution": None},
        {},
    ],
)
def test_arms_that_differ_in_more_make_no_pair(other: dict[str, Any]) -> None:
    assert candidates.mechanism_pairs(mechanisms({}, other)).is_empty()


def test_opposite_mechanisms_make_no_pair() -> None:
    assert candidates.mechanism_pairs(mechanisms({"selector": False}, {"convolution": False})).is_empty()


def gains_of(run: Run, rng: np.random.Generator) -> pl.DataFrame:
    pairs = candidates.mechanism_pairs(candidates.arm_mechanisms(run))
    return candidates.mechanism_gains(run.labelled("steps"), pairs, rng=rng)


def test_gains_are_differences_of_the_pooled_estimates(ladder: Run, rng: np.random.Generator) -> None:
    found = gains_of(ladder, rng)
    steps = ladder.labelled("steps").filter(pl.col("sampling") == "greedy", pl.col("num_draft_tokens") > 0)

    def of(arm: str, metric: str) -> float:
        own = steps.filter(pl.col("arm") == arm)
        if metric == "slope":
            return float(suffix_decay(own, by=(), rng=rng)["value"][0])
        return 1 + float(own["num_accepted_tokens"].sum() / own.height)

    row = {"mechanism": "convolution", "arm": "full", "sampling": "greedy"}
    gain = value(found, metric="acceptance_length_gain", **row)
    other = "without_convolution"
    both = steps.filter(pl.col("arm").is_in(["full", other]))
    assert gain["value"] == pytest.approx(of("full", "length") - of(other, "length"))
    assert gain["n"] == both.height
    ratio = value(found, metric="acceptance_length_ratio", **row)
    assert ratio["value"] == pytest.approx(of("full", "length") / of(other, "length"))
    slope = value(found, metric="conditional_logit_slope_difference", **row)
    assert slope["value"] == pytest.approx(of("full", "slope") - of(other, "slope"))
    # The full arm's rate is constant, the other's falls by about half a logit a position.
    assert slope["low"] > 0
    assert slope["n"] == both.select(pl.min_horizontal(pl.col("num_accepted_tokens") + 1, 4).sum()).item()


def test_only_prompts_that_both_arms_answered_count(ladder: Run, rng: np.random.Generator) -> None:
    pairs = candidates.mechanism_pairs(candidates.arm_mechanisms(ladder)).head(1)
    steps = ladder.labelled("steps").filter(pl.col("sampling") == "greedy")
    gone = steps.filter((pl.col("arm") == "full") & (pl.col("entropy_tier") == "low"))["prompt_id"].unique()
    lame = steps.filter(~((pl.col("arm") == "full") & pl.col("prompt_id").is_in(gone.implode())))
    found = candidates.mechanism_gains(lame, pairs, rng=rng)
    same = candidates.mechanism_gains(
        steps.filter(~pl.col("prompt_id").is_in(gone.implode())), pairs, rng=rng
    )
    assert found["value"].to_list() == pytest.approx(same["value"].to_list())
    assert found["n_clusters"].to_list() == same["n_clusters"].to_list()


def test_no_pair_no_rows(ladder: Run, rng: np.random.Generator) -> None:
    pairs = candidates.mechanism_pairs(mechanisms())
    found = candidates.mechanism_gains(ladder.labelled("steps"), pairs, rng=rng)
    assert found.is_empty()
    assert "mechanism" in found.columns


def test_a_mechanism_without_effect_is_said_not_to_be_shown(
    simulated_run: Runs, rng: np.random.Generator
) -> None:
    """The claim turns: equal laws on both sides, so the interval holds 0 and the sentence says so."""
    run = simulated_run(
        arms={"with": FULL, "without": {"selector": True, "convolution": False}},
        prompts_per_cell=40,
        concurrency=(1,),
        repeats=1,
    )
    sentences = candidates.mechanism_sentences(gains_of(run, rng))
    assert len(sentences) == 2
    for sentence in sentences:
        assert "the data does not show that" in sentence
        assert "with against without" in sentence


def test_sentences_follow_the_sign(ladder: Run, rng: np.random.Generator) -> None:
    gains = gains_of(ladder, rng).filter(pl.col("sampling") == "greedy")
    sentences = candidates.mechanism_sentences(gains)
    assert len(sentences) == 10
    slope = next(s for s in sentences if s.startswith("convolution (full") and "decay" in s)
    assert "is flatter with it" in slope
    # The ladder turned over: what helped now hurts.
    turned = gains.with_columns(
        -pl.col("value"), (-pl.col("high")).alias("low"), (-pl.col("low")).alias("high")
    )
    against = candidates.mechanism_sentences(turned)
    assert "is steeper with it" in next(
        s for s in against if s.startswith("convolution (full") and "decay" in s
    )
    assert "is shorter with it" in against[0]


def test_the_simulated_ranks_keep_the_schema(ladder: Run) -> None:
    positions = ladder.table("positions")
    assert positions.schema == schema.POSITIONS.polars_schema
    greedy = candidates.greedy_positions(ladder).filter(pl.col("arm") == "full", "reached", "in_answer")
    assert greedy.height > 1000
    assert greedy.filter(pl.col("target_rank").ne_missing(pl.col("answer_rank"))).is_empty()
