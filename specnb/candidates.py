"""What a block drafter's parts contribute: its candidates, its path selector, its convolution.

Takes positions and steps with labels joined (`Run.labelled`), returns long frames. Knows no
engine, file or chart. Separate from `acceptance`, which needs no candidates and holds for
every drafter.

Definitions, shared by everything here. A *place* is one drafted token. The answer's rank at
a place is the rank, by the drafter's own scores before any path is chosen, of the token that
the answer finally holds there; it is known for places that verification never reached, too.
*Recall at k* is the share of places whose answer is among the k best candidates. A *whole
draft* is one whose every place lies inside the answer. All of this is exact for greedy
answers only: a sampled answer is another draw at each place, not what drafts are held to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any, Final

import numpy as np
import polars as pl

from specnb.acceptance import logistic_slope
from specnb.records import Run
from specnb.stats import Floats, Output, check_columns, cluster_sums, estimate_rows, long_frame

NUM_CANDIDATES: Final = 16
MECHANISMS: Final = ("selector", "convolution")
LENGTH_METRICS: Final = (
    "argmax_acceptance_length",
    "mean_acceptance_length",
    "oracle_acceptance_length",
    "selector_gain",
    "selector_share",
)
GAIN_METRICS: Final = (
    "acceptance_length_gain",
    "acceptance_length_ratio",
    "conditional_logit_slope_difference",
)
NO_CANDIDATES: Final = "the drafter keeps no candidates, or the run did not record them"
NO_PLACE: Final = "no answer holds a token at this place"
BUDGET_TOLERANCE: Final = 0.1

_KEYS: Final = ("arm", "sampling", "prompt_id", "repeat", "request_id", "step", "position")
_KNOWN: Final = (*_KEYS, "reached", "accepted", "in_answer", "answer_rank")


def greedy_positions(run: Run) -> pl.DataFrame:
    """Drafted places of greedy answers where the answer's rank was recorded, with labels.

    Returns
    -------
    pl.DataFrame
        One row a drafted token (`schema.POSITIONS`) of ok requests in greedy settings, with the
        labels of `Run.labelled`, and `keeps_candidates`, from the drafter's facts, or where they don't
        say, from whether any rank of its arm is known. Without rows where the run has no positions,
        no greedy setting, or was recorded before ranks were; `missing_positions` says which.
    """
    positions = run.labelled("positions")
    greedy = [setting.name for setting in run.plan.sampling if setting.temperature == 0]
    ok = run.requests.filter(pl.col("status") == "ok").select("request_id")
    found = positions.filter(pl.col("sampling").is_in(greedy), pl.col("in_answer").is_not_null()).join(
        ok, on="request_id", how="semi", maintain_order="left"
    )
    told = {arm.name: drafter_facts(run, arm.name).get("num_candidates") for arm in run.plan.arms}
    counts = {name: number for name, number in told.items() if isinstance(number, int)}
    stated = pl.col("arm").replace_strict(counts, default=None, return_dtype=pl.Int64) > 0
    return found.with_columns(stated.fill_null(_any_rank()).alias("keeps_candidates"))


def missing_positions(run: Run) -> str | None:
    """Why `greedy_positions` holds no candidate's rank; None if it does."""
    if not any(arm.speculative for arm in run.plan.arms):
        return "the run holds no arm that speculates"
    if not run.has("positions"):
        return "the run has no table of positions: only the in-process engine writes one"
    if all(setting.temperature > 0 for setting in run.plan.sampling):
        return "the run holds no greedy setting, and ranks of sampled answers say nothing of the drafter"
    found = greedy_positions(run)
    if found.is_empty():
        return "the run was recorded before the answer's ranks were, or nothing was drafted"
    if not found["keeps_candidates"].any():
        return "no arm's drafter keeps candidates"
    return None


# Candidates


def recall_by_position(
    positions: pl.DataFrame, *, by: Sequence[str], level: float = 0.95, rng: np.random.Generator
) -> pl.DataFrame:
    """How often the answer is among a drafter's candidates, by draft position, beside what it picked.

    Parameters
    ----------
    positions
        From `greedy_positions`.
    by
        Group columns, `arm` among them.
    level, rng
        As in `stats.cluster_bootstrap`.

    Returns
    -------
    pl.DataFrame
        `by` columns, `places`, `position` (0 is the first draft), then `stats.ESTIMATE_SCHEMA`. Only places
        that the answer fills count. `places` is

        * all: reached or not, with the metrics recall_at_1 and recall_at_16. The candidates of a
          block-parallel drafter don't depend on the path, so this is the drafter's own, free of the
          selection that reaching a place makes;
        * reached: all drafts before were accepted, with both recalls and conditional_acceptance_rate,
          the share of drafts that were picked rightly.

        n: places. Arms without candidates have null with the reason `NO_CANDIDATES`.

    Raises
    ------
    ValueError
        A column is missing (named), or `arm` is not in `by`.
    """
    if "arm" not in by:
        raise ValueError(f"by {list(by)} must hold 'arm'")
    check_columns(positions, [*_KNOWN, *by], what="recall by position")
    counted = positions.filter(pl.col("in_answer")).with_columns(
        _keeps_candidates(positions).alias("__known")
    )
    rank = pl.col("answer_rank")
    hits = {
        "recall_at_1": (rank < 1).fill_null(False),
        "recall_at_16": (rank < NUM_CANDIDATES).fill_null(False),
        "conditional_acceptance_rate": pl.col("accepted"),
    }
    group = [*by, "position", "__known"]
    rows = []
    for places, kept, metrics in (
        ("all", pl.lit(True), ("recall_at_1", "recall_at_16")),
        ("reached", pl.col("reached"), tuple(hits)),
    ):
        table = counted.filter(kept).with_columns(
            *(hits[name].cast(pl.Int64).alias(name) for name in metrics), pl.lit(1).alias("__places")
        )
        for sums in cluster_sums(table, by=group, sums=[*metrics, "__places"]):
            told = np.array(
                [sums.key["__known"] or name == "conditional_acceptance_rate" for name in metrics]
            )
            outputs = [
                Output(
                    columns={"places": places, "metric": name},
                    denominator=len(metrics),
                    undefined=NO_PLACE if known else NO_CANDIDATES,
                )
                for name, known in zip(metrics, told, strict=True)
            ]

            def statistic(totals: Floats, told: Any = told) -> Floats:
                return np.where(told, totals[..., :-1] / totals[..., -1:], np.nan)

            rows += estimate_rows([sums], statistic, outputs=outputs, level=level, rng=rng)
    order = {metric: number for number, metric in enumerate(hits)}
    frame = long_frame(
        rows,
        by={name: positions.schema[name] for name in by},
        extra={"places": pl.String(), "position": pl.Int64()},
    )
    return frame.sort(
        *by, "places", pl.col("metric").replace_strict(order, return_dtype=pl.Int64), "position"
    )


def candidate_acceptance_lengths(
    positions: pl.DataFrame, *, by: Sequence[str], level: float = 0.95, rng: np.random.Generator
) -> pl.DataFrame:
    """Acceptance lengths on the same drafts: of an independent argmax, of what was drafted, of an oracle.

    Parameters
    ----------
    positions
        From `greedy_positions`.
    by
        Group columns, `arm` among them.
    level, rng
        As in `stats.cluster_bootstrap`.

    Returns
    -------
    pl.DataFrame
        `by` columns, then `stats.ESTIMATE_SCHEMA`; five rows a group, all over its whole drafts (n),
        so that they differ by paired comparison:

        * argmax_acceptance_length: 1 + leading places whose answer is the first candidate, which is
          what drafting each place by itself would have kept;
        * mean_acceptance_length: 1 + accepted drafts, of what was really drafted;
        * oracle_acceptance_length: 1 + leading places whose answer is any candidate: no path through
          these candidates keeps more;
        * selector_gain: the second minus the first;
        * selector_share: selector_gain over what an oracle would gain, at most 1; null where the two ends
          coincide.

        Arms without candidates have null with the reason `NO_CANDIDATES`.

    Raises
    ------
    ValueError
        A column is missing (named), or `arm` is not in `by`.

    Notes
    -----
    The drafts are those of the run: an argmax drafter would have drafted from other places after a
    difference. Drafts that run past the answer's end are left out, since the rank beyond it is
    unknown, so the mean here leaves out the last steps of each answer.
    """
    if "arm" not in by:
        raise ValueError(f"by {list(by)} must hold 'arm'")
    check_columns(positions, [*_KNOWN, *by], what="candidate acceptance lengths")
    rank = pl.col("answer_rank")
    keys = list(dict.fromkeys([*by, "prompt_id", "repeat", "request_id", "step"]))

    def leading(held: pl.Expr) -> pl.Expr:
        return held.fill_null(False).cast(pl.Int64).sort_by("position").cum_prod().sum()

    drafts = (
        positions.with_columns(_keeps_candidates(positions).alias("__known"))
        .group_by(*keys, "__known")
        .agg(
            pl.col("in_answer").all().alias("__whole"),
            pl.col("accepted").cast(pl.Int64).sum().alias("__accepted"),
            leading(rank == 0).alias("__argmax"),
            leading(rank < NUM_CANDIDATES).alias("__oracle"),
        )
        .with_columns(pl.col("__whole").cast(pl.Int64).alias("__drafts"))
        .with_columns(
            pl.when("__whole").then(name).otherwise(0).alias(name)
            for name in ("__accepted", "__argmax", "__oracle")
        )
    )
    rows = []
    for sums in cluster_sums(
        drafts, by=[*by, "__known"], sums=["__drafts", "__argmax", "__accepted", "__oracle"]
    ):
        known = bool(sums.key["__known"])

        def statistic(totals: Floats, known: bool = known) -> Floats:
            drafts, argmax, accepted, oracle = np.moveaxis(totals, -1, 0)
            lengths = [1 + argmax / drafts, 1 + accepted / drafts, 1 + oracle / drafts]
            share = np.where(oracle > argmax, (accepted - argmax) / (oracle - argmax), np.nan)
            found = np.stack([*lengths, (accepted - argmax) / drafts, share], axis=-1)
            return found if known else np.where(np.arange(5) == 1, found, np.nan)

        undefined = "no draft lies wholly inside an answer" if sums.totals[0] == 0 else NO_CANDIDATES
        outputs = [
            Output(
                columns={"metric": metric},
                denominator=0,
                undefined="an oracle would gain nothing over the argmax"
                if metric == "selector_share" and known and sums.totals[0]
                else undefined,
            )
            for metric in LENGTH_METRICS
        ]
        rows += estimate_rows([sums], statistic, outputs=outputs, level=level, rng=rng)
    return long_frame(rows, by={name: positions.schema[name] for name in by})


# Mechanisms


def arm_mechanisms(run: Run) -> pl.DataFrame:
    """Which of DFlash 2's parts each arm's drafter has, from the facts in the manifest, never from a name.

    Returns
    -------
    pl.DataFrame
        One row an arm that speculates: arm, label, method, num_speculative_tokens, draft_sample_method,
        selector and convolution (boolean; null where the engine does not say), drafter_sha256, training_s
        (seconds of training that the drafter's own record states, null if none).
    """
    rows = []
    for arm in run.plan.arms:
        if arm.speculative is None:
            continue
        facts = drafter_facts(run, arm.name)
        training = facts.get("training")
        seconds = training.get("train_seconds") if isinstance(training, Mapping) else None
        asked = (arm.speculative.model_extra or {}).get("selector")
        selector = _flag(facts, "selector")
        rows.append(
            {
                "arm": arm.name,
                "label": str(facts.get("label") or arm.speculative.method),
                "method": arm.speculative.method,
                "num_speculative_tokens": arm.speculative.num_speculative_tokens,
                "draft_sample_method": arm.speculative.draft_sample_method,
                "selector": False if asked is False else selector,
                "convolution": _flag(facts, "convolution"),
                "drafter_sha256": facts.get("sha256"),
                "training_s": float(seconds) if isinstance(seconds, (int, float)) else None,
            }
        )
    types = {
        "arm": pl.String(),
        "label": pl.String(),
        "method": pl.String(),
        "num_speculative_tokens": pl.Int64(),
        "draft_sample_method": pl.String(),
        "selector": pl.Boolean(),
        "convolution": pl.Boolean(),
        "drafter_sha256": pl.String(),
        "training_s": pl.Float64(),
    }
    return pl.DataFrame(rows, schema=types, orient="row")


def drafter_facts(run: Run, arm: str) -> Mapping[str, Any]:
    """What the engine wrote of an arm's drafter into the manifest; empty where it wrote nothing."""
    arms = run.manifest.get("arms")
    entry = arms.get(arm) if isinstance(arms, Mapping) else None
    facts = entry.get("speculative") if isinstance(entry, Mapping) else None
    return facts if isinstance(facts, Mapping) else {}


def mechanism_pairs(mechanisms: pl.DataFrame) -> pl.DataFrame:
    """Arms that differ in a mechanism alone, the one that has it first.

    Parameters
    ----------
    mechanisms
        From `arm_mechanisms`.

    Returns
    -------
    pl.DataFrame
        mechanism (`selector`, `convolution`, or `selector and convolution`), arm (with it), without_arm,
        and note: whether the weights are the same or were trained apart, and for how long. Arms of
        different methods, lengths of a draft or ways to sample one make no pair, nor do arms of which a
        fact is unknown.
    """
    rows = []
    for first, second in permutations(mechanisms.iter_rows(named=True), 2):
        shared = ("method", "num_speculative_tokens", "draft_sample_method")
        if any(first[name] != second[name] for name in shared):
            continue
        if any(side[name] is None for side in (first, second) for name in MECHANISMS):
            continue
        differing = [name for name in MECHANISMS if first[name] != second[name]]
        if differing and all(first[name] for name in differing):
            rows.append((" and ".join(differing), first["arm"], second["arm"], _budgets(first, second)))
    names = ("mechanism", "arm", "without_arm", "note")
    order = {"selector": 0, "convolution": 1, "selector and convolution": 2}
    rows.sort(key=lambda row: order[row[0]])
    return pl.DataFrame(rows, schema=dict.fromkeys(names, pl.String()), orient="row")


def mechanism_gains(
    steps: pl.DataFrame, pairs: pl.DataFrame, *, level: float = 0.95, rng: np.random.Generator
) -> pl.DataFrame:
    """What a mechanism adds between two arms, on the prompts that both answered.

    Parameters
    ----------
    steps
        One row a step, labelled (`run.labelled("steps")`).
    pairs
        From `mechanism_pairs`.
    level, rng
        As in `stats.cluster_bootstrap`.

    Returns
    -------
    pl.DataFrame
        mechanism, arm, without_arm, note, sampling, then `stats.ESTIMATE_SCHEMA`; three rows a pair and
        sampling:

        * acceptance_length_gain: mean acceptance length with minus without (n: drafts of both);
        * acceptance_length_ratio: the same as a ratio;
        * conditional_logit_slope_difference: slope of the conditional acceptance rate over position
          with minus without, logits a position; above 0, acceptance falls less along the block with
          the mechanism (n: reached and drafted places of both).

        Null with a reason where one side has no draft, or no slope can be fitted.

    Notes
    -----
    Prompts are resampled for both arms together, so what makes a prompt easy for both cancels. Of two
    weights trained apart, the difference holds the luck of two trainings, which no interval over
    prompts sees.
    """
    counts = ("num_draft_tokens", "num_accepted_tokens")
    check_columns(steps, ["arm", "sampling", "prompt_id", "repeat", *counts], what="mechanism gains")
    drafted, accepted = pl.col("num_draft_tokens"), pl.col("num_accepted_tokens")
    drafts = steps.filter(drafted > 0)
    longest = int(drafts.select(drafted.max()).item() or 0)
    rows = []
    for pair in pairs.iter_rows(named=True):
        sides = {"with": pair["arm"], "without": pair["without_arm"]}
        both = drafts.filter(pl.col("arm").is_in(list(sides.values())))
        shared = pl.col("arm").n_unique().over("sampling", "repeat", "prompt_id") == 2
        table = both.filter(shared)
        names = []
        for side, arm in sides.items():
            mine = pl.col("arm") == arm
            parts = {
                f"{side}_drafts": mine,
                f"{side}_accepted": accepted * mine,
                **{f"{side}_risk_{i}": mine & (accepted >= i) & (drafted > i) for i in range(longest)},
                **{f"{side}_hit_{i}": mine & (accepted > i) for i in range(longest)},
            }
            table = table.with_columns(value.cast(pl.Int64).alias(name) for name, value in parts.items())
            names += list(parts)
        total, places = "all_drafts", "all_places"
        risks = [name for name in names if "_risk_" in name]
        table = table.with_columns(
            pl.lit(1).alias(total), pl.sum_horizontal(*risks).cast(pl.Int64).alias(places)
        )
        names += [total, places]
        outputs = [
            Output(
                columns={**pair, "metric": metric},
                denominator=names.index(places if "slope" in metric else total),
                undefined="no slope can be fitted on one side"
                if "slope" in metric
                else "no draft on one side",
            )
            for metric in GAIN_METRICS
        ]

        def statistic(totals: Floats) -> Floats:
            width = 2 + 2 * longest
            lengths, slopes = [], []
            for start in (0, width):
                part = totals[..., start : start + width]
                lengths.append(1 + part[..., 1] / part[..., 0])
                slopes.append(logistic_slope(part[..., 2 : 2 + longest], part[..., 2 + longest :]))
            return np.stack(
                [lengths[0] - lengths[1], lengths[0] / lengths[1], slopes[0] - slopes[1]], axis=-1
            )

        groups = cluster_sums(table, by=["sampling"], sums=names)
        rows += estimate_rows(groups, statistic, outputs=outputs, level=level, rng=rng)
    keys = dict.fromkeys(("mechanism", "arm", "without_arm", "note"), pl.String())
    return long_frame(rows, by={**keys, "sampling": steps.schema["sampling"]})


def mechanism_sentences(gains: pl.DataFrame) -> tuple[str, ...]:
    """What `mechanism_gains` shows, in words: one sentence a row of gain or slope, shown or not shown.

    A gain or a slope is shown only if its whole interval lies on one side of 0; else the sentence
    says that the data does not show it.
    """
    said = []
    for row in gains.iter_rows(named=True):
        if row["metric"] == "acceptance_length_ratio":
            continue
        slope = row["metric"] == "conditional_logit_slope_difference"
        quantity = "the decay along the block" if slope else "the acceptance length"
        where = f"{row['mechanism']} ({row['arm']} against {row['without_arm']}, {row['sampling']})"
        if row["value"] is None:
            said.append(f"{where}: the data does not show what it does to {quantity}: {row['reason']}.")
            continue
        unit = " logits a position" if slope else " tokens a step"
        number = f"{row['value']:+.3f}" if slope else f"{row['value']:+.2f}"
        if row["low"] is None:
            said.append(f"{where}: {number}{unit} in {quantity}, without an interval ({row['reason']}).")
            continue
        ends = (
            f"[{row['low']:+.3f}, {row['high']:+.3f}]"
            if slope
            else f"[{row['low']:+.2f}, {row['high']:+.2f}]"
        )
        better, worse = ("flatter", "steeper") if slope else ("longer", "shorter")
        if row["low"] > 0:
            verb = f"{quantity} is {better} with it"
        elif row["high"] < 0:
            verb = f"{quantity} is {worse} with it"
        else:
            verb = f"the data does not show that {quantity} is {better} with it"
        said.append(f"{where}: {verb}, {number} {ends}{unit}; {row['note']}.")
    return tuple(said)


def _budgets(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Whether two arms' weights may be compared as one mechanism."""
    if first["drafter_sha256"] is not None and first["drafter_sha256"] == second["drafter_sha256"]:
        return "the same weights, switched off"
    seconds = [side["training_s"] for side in (first, second)]
    if None in seconds:
        return "trained apart, budgets not recorded"
    if abs(seconds[0] - seconds[1]) <= BUDGET_TOLERANCE * max(seconds):
        return f"trained apart with equal budgets ({seconds[0]:.0f} s and {seconds[1]:.0f} s)"
    return (
        f"trained with different budgets ({seconds[0]:.0f} s and {seconds[1]:.0f} s), so not this part alone"
    )


def _any_rank() -> pl.Expr:
    return pl.col("answer_rank").is_not_null().any().over("arm")


def _keeps_candidates(positions: pl.DataFrame) -> pl.Expr:
    """Whether a row's drafter keeps candidates: as `greedy_positions` found it, else from the ranks."""
    return pl.col("keeps_candidates") if "keeps_candidates" in positions.columns else _any_rank()


def _flag(facts: Mapping[str, Any], name: str) -> bool | None:
    value = facts.get(name)
    return value if isinstance(value, bool) else None
