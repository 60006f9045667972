"""What a drafter costs and when training one pays back: memory, training, tokens to break even.

Reads the facts that engines wrote into a run's manifest and the tables of `acceptance` and
`latency`; knows no model directory, engine or chart. Separate so that money and memory have
one place each, and so that published figures never mix with measured ones.

Units: bytes, seconds, GPU hours (hours x GPUs), tokens, and the plan's currency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import polars as pl

from specnb.candidates import arm_mechanisms, drafter_facts
from specnb.records import Run
from specnb.stats import ESTIMATE_SCHEMA, NO_INTERVAL, Floats, Output, cluster_sums, estimate_rows, long_frame

FACT: Final = "fact"
"""`method` of a value that is a fact of the run's record, not an estimate: it has no interval and no n."""

PUBLISHED: Final = "published"
"""`method` of a value that its authors claim and nothing here measured."""

WEIGHTLESS: Final = ("ngram", "suffix")
_NOT_RECORDED: Final = "the run's record does not say"
_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

RELEASED_SOURCE: Final = "https://huggingface.co/incoai/Qwen3.8-27B-DFlash2#evaluation"
RELEASED_CONDITIONS: Final = (
    "the authors' table for Qwen3.8-27B with the released 1.92 B DFlash 2 drafter: one H200, SGLang, "
    "bfloat16, 7 drafts, temperature 1, top-p 0.95, top-k 20, reasoning answers of at most 4096 tokens; no "
    "repeats and no intervals given"
)
RELEASED_NUM_PARAMETERS: Final = 1_924_404_480
# workload, concurrency, acceptance length, tokens a second of the baseline and with the drafter.
_RELEASED: Final = (
    ("GSM8K", 1, 5.46, 68.9, 236.1),
    ("GSM8K", 8, 5.46, 467.2, 1328.7),
    ("GSM8K", 32, 5.46, 1329.8, 1922.5),
    ("MT-Bench", 1, 4.10, 68.9, 184.0),
    ("MT-Bench", 8, 4.10, 480.5, 1090.2),
    ("MT-Bench", 32, 4.10, 1507.4, 1525.3),
)


def released_pair() -> pl.DataFrame:
    """The published figures of the released pair: claims of its authors, nothing that was measured here.

    Returns
    -------
    pl.DataFrame
        workload, concurrency, published_acceptance_length (bonus token included),
        baseline_tokens_per_s, tokens_per_s (all requests together) and published_speedup, their ratio.

    References
    ----------
    `RELEASED_SOURCE`, measured as `RELEASED_CONDITIONS` says.
    """
    names = (
        "workload",
        "concurrency",
        "published_acceptance_length",
        "baseline_tokens_per_s",
        "tokens_per_s",
    )
    table = pl.DataFrame(list(_RELEASED), schema=list(names), orient="row")
    return table.with_columns(
        (pl.col("tokens_per_s") / pl.col("baseline_tokens_per_s")).alias("published_speedup")
    )


def drafter_table(run: Run) -> pl.DataFrame:
    """What each arm's drafter is, weighs and took to train, from the run's record.

    Returns
    -------
    pl.DataFrame
        One row an arm that speculates: arm, label, method, num_speculative_tokens, selector, convolution,
        num_parameters, weight_bytes (as served), kv_bytes_per_token (the drafter's own keys and values
        of one context token), kv_cache_tokens (room that a server's log states with this drafter
        loaded) and baseline_kv_cache_tokens, training_gpu_hours, training_tokens, training_hardware,
        training_hour_price (of the training's own record), training_cost (at that price, else at the
        plan's) and currency. Unknown is null, and `reason` says which and why. A drafter without weights has
        0 parameters, bytes and hours.

    Notes
    -----
    The record is the mapping `training` among the drafter's facts, with the keys of a checkpoint's
    training.json: gpu_hours (corpus and steps), corpus.training_answer_tokens, hardware.device,
    gpu_hour_price.
    """
    rows = []
    price = run.plan.price
    for mechanism in arm_mechanisms(run).iter_rows(named=True):
        facts = drafter_facts(run, mechanism["arm"])
        memory, unknown = _memory(facts, mechanism["method"])
        hours, training, missing = _training(facts, mechanism["method"])
        reasons = [*unknown, *missing]
        own = _number(_part(training, "gpu_hour_price"), "gpu_hour")
        hour = own if own is not None else price.gpu_hour if price is not None else None
        cost = hours if not hours else None if hour is None else hours * hour
        if hours and hour is None:
            reasons.append("training_cost: neither the training plan nor this plan names a price")
        rows.append(
            {
                **{name: mechanism[name] for name in ("arm", "label", "method", "num_speculative_tokens")},
                "selector": mechanism["selector"],
                "convolution": mechanism["convolution"],
                **memory,
                "kv_cache_tokens": _kv_cache_tokens(run, mechanism["arm"]),
                "baseline_kv_cache_tokens": _kv_cache_tokens(run, run.plan.baseline.name),
                "training_gpu_hours": hours,
                "training_tokens": _whole(_part(training, "corpus"), "training_answer_tokens"),
                "training_hardware": _part(training, "hardware").get("device"),
                "training_hour_price": hour if own is not None else None,
                "training_cost": cost,
                "currency": _part(training, "gpu_hour_price").get("currency")
                if own is not None
                else price.currency
                if price is not None
                else None,
                "reason": "; ".join(reasons) or None,
            }
        )
    types: dict[str, pl.DataType] = {
        "arm": pl.String(),
        "label": pl.String(),
        "method": pl.String(),
        "num_speculative_tokens": pl.Int64(),
        "selector": pl.Boolean(),
        "convolution": pl.Boolean(),
        "num_parameters": pl.Int64(),
        "weight_bytes": pl.Int64(),
        "kv_bytes_per_token": pl.Int64(),
        "kv_cache_tokens": pl.Int64(),
        "baseline_kv_cache_tokens": pl.Int64(),
        "training_gpu_hours": pl.Float64(),
        "training_tokens": pl.Int64(),
        "training_hardware": pl.String(),
        "training_hour_price": pl.Float64(),
        "training_cost": pl.Float64(),
        "currency": pl.String(),
        "reason": pl.String(),
    }
    return pl.DataFrame(rows, schema=types, orient="row")


def payback_table(run: Run, speedups: pl.DataFrame) -> pl.DataFrame:
    """Tokens to serve until a drafter's training is paid for by the hardware time that it saves.

    Parameters
    ----------
    run
        The run: training hours and hardware come from its record.
    speedups
        `latency.speedup_table` of its requests, by arm, concurrency and more.

    Returns
    -------
    pl.DataFrame
        arm, sampling, concurrency (those that `speedups` has), then `stats.ESTIMATE_SCHEMA`; metric
        `payback_tokens`: training hours / (hours a token of the baseline - hours a token of the
        arm), at the throughput measured at that load (n: ok requests); 0 for a drafter without
        weights. Null with a reason where the speedup's interval is missing or includes 1, where the
        training is not recorded, or where the run was measured on other hardware than the drafter
        was trained on and no prices join the two.

    Notes
    -----
    On the same hardware the price cancels. Ends of the interval are those of the speedup's: the
    baseline's own throughput is taken as exact, and hardware that is not busy saves nothing.
    """
    keys = [name for name in ("arm", "sampling", "concurrency", "entropy_tier") if name in speedups.columns]
    table = {row["arm"]: row for row in drafter_table(run).iter_rows(named=True)}
    rows = []
    for row in speedups.filter(pl.col("metric") == "throughput_speedup").iter_rows(named=True):
        found: dict[str, Any] = {
            **{name: row[name] for name in keys},
            **{name: row[name] for name in ("level", "n", "n_clusters")},
            "metric": "payback_tokens",
            "method": NO_INTERVAL,
        }
        drafter = table.get(row["arm"])
        reason = _no_payback(run, drafter, row)
        if reason is None and drafter is not None and drafter["training_gpu_hours"] == 0:
            rows.append({**found, "value": 0.0, "method": FACT})
        elif reason is not None or drafter is None:
            rows.append({**found, "reason": reason})
        else:
            hours = drafter["training_gpu_hours"] * (_price_ratio(run, drafter) or 1.0)
            each = row["baseline_wall_s"] / row["baseline_num_output_tokens"] / 3600
            value, low, high = (hours / each / (1 - 1 / row[name]) for name in ("value", "high", "low"))
            rows.append(
                {
                    **found,
                    "value": value,
                    "low": low,
                    "high": high,
                    "method": f"from the speedup's interval: {row['method']}",
                }
            )
    return long_frame(rows, by={name: speedups.schema[name] for name in keys})


def drafter_frame(
    summary: pl.DataFrame, speedups: pl.DataFrame, drafters: pl.DataFrame, payback: pl.DataFrame
) -> pl.DataFrame:
    """Everything about each drafter in one long frame: what it yields, gains, weighs and costs.

    Parameters
    ----------
    summary
        `acceptance.acceptance_table` by arm and sampling.
    speedups
        `latency.speedup_table` by arm, sampling and concurrency.
    drafters
        `drafter_table` of the same run.
    payback
        `payback_table` of the same run and speedups.

    Returns
    -------
    pl.DataFrame
        arm, sampling, then `stats.ESTIMATE_SCHEMA`, by `metric`: mean_acceptance_length,
        tokens_per_target_step, "speedup at concurrency N" for each N, num_parameters, weight_bytes,
        training_gpu_hours (the last three are facts, the same in every sampling setting), and
        "payback_tokens at concurrency N" for the lowest N. Arms that do not speculate have no row. Last
        come the released pair's figures (`released_pair`), with the method `PUBLISHED`.
    """
    arms = drafters["arm"].to_list()
    kept = pl.col("arm").is_in(arms)
    columns = ["arm", "sampling", *ESTIMATE_SCHEMA]
    lengths = summary.filter(
        kept, pl.col("metric").is_in(["mean_acceptance_length", "tokens_per_target_step"])
    ).select(columns)
    at = pl.lit(" at concurrency ") + pl.col("concurrency").cast(pl.String)
    headline = (
        speedups.filter(kept, pl.col("metric") == "throughput_speedup")
        .sort("concurrency", maintain_order=True)
        .with_columns((pl.lit("speedup") + at).alias("metric"))
        .select(columns)
    )
    lowest = payback.filter(kept, pl.col("concurrency") == pl.col("concurrency").min())
    paid = lowest.with_columns((pl.col("metric") + at).alias("metric")).select(columns)
    facts: list[dict[str, Any]] = []
    for arm, sampling in lengths.select("arm", "sampling").unique(maintain_order=True).iter_rows():
        (drafter,) = drafters.filter(pl.col("arm") == arm).to_dicts()
        for name in ("num_parameters", "weight_bytes", "training_gpu_hours"):
            value = drafter[name]
            facts.append(
                {
                    "arm": arm,
                    "sampling": sampling,
                    "metric": name,
                    "value": None if value is None else float(value),
                    "n": 0,
                    "n_clusters": 0,
                    "level": 0.95,
                    "method": FACT,
                    "reason": _NOT_RECORDED if value is None else None,
                }
            )
    by: dict[str, pl.DataType] = {"arm": pl.String(), "sampling": pl.String()}
    stacked = pl.concat([lengths, headline, long_frame(facts, by=by), paid])
    places = {arm: place for place, arm in enumerate(arms)}
    measured = stacked.sort(
        pl.col("arm").replace_strict(places, return_dtype=pl.Int64), "sampling", maintain_order=True
    )
    return pl.concat([measured, _released_rows(by)])


def _released_rows(by: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """The released pair in the shape of `drafter_frame`, each value with the method `PUBLISHED`."""
    rows = []
    for (workload,), group in released_pair().group_by(["workload"], maintain_order=True):
        values = {"mean_acceptance_length": group["published_acceptance_length"][0]}
        for concurrency, speedup in group.select("concurrency", "published_speedup").iter_rows():
            values[f"speedup at concurrency {concurrency}"] = speedup
        values["num_parameters"] = float(RELEASED_NUM_PARAMETERS)
        values["weight_bytes"] = 2.0 * RELEASED_NUM_PARAMETERS
        rows += [
            {
                "arm": f"released pair, {workload}",
                "sampling": "temperature 1",
                "metric": metric,
                "value": value,
                "n": 0,
                "n_clusters": 0,
                "level": 0.95,
                "method": PUBLISHED,
            }
            for metric, value in values.items()
        ]
    return long_frame(rows, by=by)


def paired_yield(
    steps: pl.DataFrame,
    *,
    arm: str,
    reference: str,
    by: Sequence[str],
    level: float = 0.95,
    rng: np.random.Generator,
) -> pl.DataFrame:
    """Tokens per target step of an arm minus those of another, on the prompts that both answered.

    Parameters
    ----------
    steps
        One row a step, labelled.
    arm, reference
        The two arms.
    by
        Group columns, such as entropy_tier; may be empty.
    level, rng
        As in `stats.cluster_bootstrap`; prompts are resampled for both arms together.

    Returns
    -------
    pl.DataFrame
        `by` columns, then `stats.ESTIMATE_SCHEMA`; metric `tokens_per_target_step_difference` (n: target
        steps of both arms).
    """
    mine, theirs = pl.col("arm") == arm, pl.col("arm") == reference
    keys = list(dict.fromkeys([*by, "repeat", "prompt_id"]))
    table = (
        steps.filter(mine | theirs)
        .group_by(keys)
        .agg(
            (pl.col("num_emitted_tokens") * mine).sum().alias("tokens"),
            mine.sum().cast(pl.Int64).alias("steps"),
            (pl.col("num_emitted_tokens") * theirs).sum().alias("reference_tokens"),
            theirs.sum().cast(pl.Int64).alias("reference_steps"),
        )
        .filter(pl.col("steps") > 0, pl.col("reference_steps") > 0)
        .with_columns((pl.col("steps") + pl.col("reference_steps")).alias("all_steps"))
    )

    def statistic(totals: Floats) -> Floats:
        tokens, number, reference_tokens, reference_number, _ = np.moveaxis(totals, -1, 0)
        return np.asarray(tokens / number - reference_tokens / reference_number)[..., None]

    sums = ["tokens", "steps", "reference_tokens", "reference_steps", "all_steps"]
    output = Output(
        columns={"metric": "tokens_per_target_step_difference"},
        denominator=4,
        undefined="no prompt was answered by both",
    )
    rows = estimate_rows(
        cluster_sums(table, by=by, sums=sums), statistic, outputs=[output], level=level, rng=rng
    )
    return long_frame(rows, by={name: steps.schema[name] for name in by})


def _memory(facts: Mapping[str, Any], method: str) -> tuple[dict[str, int | None], list[str]]:
    """Parameters and bytes of a drafter, and why some are unknown."""
    names = ("num_parameters", "weight_bytes", "kv_bytes_per_token")
    if method in WEIGHTLESS:
        return dict.fromkeys(names, 0), []
    found = {name: _whole(facts, name) for name in names}
    size = _DTYPE_BYTES.get(str(facts.get("dtype")))
    if size is not None and found["num_parameters"] is not None:
        # As served: a checkpoint stored in another type is converted when it is loaded.
        found["weight_bytes"] = found["num_parameters"] * size
    unknown = [name for name, value in found.items() if value is None]
    return found, [f"{', '.join(unknown)}: {_NOT_RECORDED}"] if unknown else []


def _training(facts: Mapping[str, Any], method: str) -> tuple[float | None, Mapping[str, Any], list[str]]:
    """GPU hours of a drafter's training, its record, and why the hours are unknown."""
    training = facts.get("training")
    training = training if isinstance(training, Mapping) else {}
    if method in WEIGHTLESS:
        return 0.0, training, []
    hours = _number(training, "gpu_hours")
    if hours is not None:
        return hours, training, []
    said = "names no hours of a GPU" if training else "tells of no training"
    return None, training, [f"training_gpu_hours: the drafter's record {said}"]


def _no_payback(run: Run, drafter: Mapping[str, Any] | None, row: Mapping[str, Any]) -> str | None:
    if drafter is None:
        return "the arm does not speculate"
    if drafter["training_gpu_hours"] is None:
        return "the drafter's record states no training"
    if row["value"] is None:
        return f"no speedup: {row['reason']}"
    if drafter["training_gpu_hours"] == 0:
        return None
    if row["low"] is None:
        return f"the speedup has no interval: {row['reason']}"
    if row["high"] < 1:
        return "the drafter is slower than the target alone at this load: it never pays back"
    if row["low"] <= 1:
        return "the speedup's interval includes 1 at this load"
    if _price_ratio(run, drafter) is None:
        return (
            f"trained on {drafter['training_hardware'] or 'unknown hardware'}, measured on {_hardware(run)}: "
            "needs the price of both"
        )
    return None


def _price_ratio(run: Run, drafter: Mapping[str, Any]) -> float | None:
    """Price of an hour of training over one of serving; 1 on the same hardware, None if nothing tells."""
    if drafter["training_hour_price"] is not None and run.plan.price is not None:
        return float(drafter["training_hour_price"]) / run.plan.price.gpu_hour
    trained, served = str(drafter["training_hardware"] or "").lower(), _hardware(run).lower()
    return 1.0 if trained and (trained in served or served in trained) else None


def _hardware(run: Run) -> str:
    """What the run was measured on: the GPU's name, or CPU."""
    engine = run.manifest.get("engine") or {}
    gpu = engine.get("gpu") or run.manifest.get("gpu") or engine.get("gpus")
    gpu = gpu[0] if isinstance(gpu, (list, tuple)) and gpu else gpu
    if isinstance(gpu, Mapping):
        gpu = gpu.get("name")
    return (
        str(gpu)
        if gpu
        else "a CPU"
        if str(engine.get("device", "")).startswith("cpu")
        else "unknown hardware"
    )


def _kv_cache_tokens(run: Run, arm: str) -> int | None:
    """Fewest tokens that an arm's servers had room for, from their logs."""
    sizes = [(cell.get("server") or {}).get("kv_cache_tokens") for cell in run.cells if cell["arm"] == arm]
    return min((int(size) for size in sizes if size), default=None)


def _part(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = facts.get(name)
    return value if isinstance(value, Mapping) else {}


def _number(facts: Mapping[str, Any], name: str) -> float | None:
    value = facts.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _whole(facts: Mapping[str, Any], name: str) -> int | None:
    value = _number(facts, name)
    return None if value is None else round(value)
