"""Whether a speculating arm answers as the target alone does.

Greedy answers are compared token by token, always beside two controls: the baseline
against itself and the arm against itself. A difference is judged by the target's margin
at the place where the answers part, because rounding can swap two tokens that are
(nearly) equally likely and can't swap others. Sampled answers are compared as
distributions, scores in pairs. Reads runs only; imports no engine, so that a verdict can
be rebuilt on a laptop. What an engine does not tell (drafts of a request, margins, token
ids) is unknown here, never zero.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy import stats as scipy_stats

from specnb import schema
from specnb.config import Arm, Plan
from specnb.prometheus import INACTIVE, METRICS_MISSING
from specnb.reconciliation import IN_PROCESS, SOURCES, cell_windows, reconcile, request_drafts, void_chunks
from specnb.records import Run
from specnb.stats import Estimate, fisher_p_value, mcnemar_p_value, wilson_estimate

OUTCOMES: Final = (
    "equivalent",
    "equivalent up to numerics",
    "not equivalent",
    "inconclusive",
    "vacuous",
    "refused",
)
SPLIT_CLASSES: Final = (
    "identical",
    "eos_only",
    "same_text_different_ids",
    "tie",
    "near_tie",
    "clear",
    "unknown",
)
SAME_TEXT: Final = ("identical", "eos_only", "same_text_different_ids")
LOSSY_METHODS: Final = ("synthetic", "fly")
TIE_NATS: Final = 1e-4
# bfloat16 logits between 16 and 32 lie 0.125 apart, so a few units of rounding are several tenths of a
# nat: on an H200, 64 of 240 greedy pairs of the demo target split in bf16, at margins up to 0.375.
NEAR_TIE_NATS: Final = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.5}
NEAR_TIE_NATS_OTHER: Final = 0.1
SENSITIVITY_NATS: Final = (0.05, 0.1, 0.5)
MINIMUM_TEST_PROMPTS: Final = 8
GUESSED_STEPS: Final = "chunks"
"""`steps_source` of cells whose steps were guessed from chunks; one of a single token may hold no draft."""

# What a server settles on that a drafter changes by itself: a note, and a matched baseline is possible.
_FOLLOWING_SETTINGS: Final = (
    "async_scheduling",
    "model_runner",
    "attention_backend",
    "cudagraph_mode",
    "compilation_mode",
    "enable_chunked_prefill",
    "max_num_batched_tokens",
)
# What two arms of one comparison must share.
_SHARED_SETTINGS: Final = (
    "version",
    "dtype",
    "max_seq_len",
    "load_format",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "quantization",
    "enforce_eager",
    "kv_cache_dtype",
    "seed",
    "enable_prefix_caching",
)

_PAIR_SCHEMA: Final = pl.Schema(
    {
        "sampling": pl.String(),
        "concurrency": pl.Int64(),
        "reference_concurrency": pl.Int64(),
        "prompt_id": pl.String(),
        "entropy_tier": pl.String(),
        "length_tier": pl.String(),
        "arm": pl.String(),
        "repeat": pl.Int64(),
        "reference_arm": pl.String(),
        "reference_repeat": pl.Int64(),
        "request_id": pl.String(),
        "reference_request_id": pl.String(),
        "num_drafts": pl.Int64(),
        "compared": pl.String(),
        "identical": pl.Boolean(),
        "index": pl.Int64(),
        "token_id": pl.Int64(),
        "reference_token_id": pl.Int64(),
        "split_class": pl.String(),
        "margin_nats": pl.Float64(),
        "margin_source": pl.String(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one answer differs from another: `kind` is a split class or `differs`.

    `index` is the first place where the token ids differ (null when identical or without
    ids); `token_id` and `reference_token_id` are null where that answer had ended.
    """

    kind: str
    index: int | None = None
    token_id: int | None = None
    reference_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """A setting on which the servers of an arm and of the baseline settled differently.

    `value` and `baseline_value` are texts, `not logged` where a log does not have it (`on` for asynchronous
    scheduling, which is logged only when it is switched off). `follows`: a drafter changes this by itself;
    False: the arms differ in more than speculation.
    """

    name: str
    value: str
    baseline_value: str
    follows: bool

    def __str__(self) -> str:
        return f"{self.name} {self.value}, baseline {self.baseline_value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The judgement on one arm: one of `OUTCOMES`, and why.

    `num_prompts` counts the distinct prompts whose greedy answers were compared: those with a draft or with
    a difference. `num_mismatched` of them differ in text, `num_clear` at a clear margin, `num_unknown` at
    none that is known (and at no clear one), and `num_clear_excused` of the clear ones only where the
    baseline parts from itself as well; `match` is the
    exact-match rate of each prompt's first pair with its Wilson interval.
    """

    arm: str
    outcome: str
    reasons: tuple[str, ...]
    num_prompts: int
    num_mismatched: int
    num_clear: int
    num_clear_excused: int
    match: Estimate | None
    near_tie_nats: float
    num_unknown: int = 0
    not_measured: tuple[str, ...] = ()


def greedy_settings(plan: Plan) -> tuple[str, ...]:
    """Names of the plan's sampling settings with temperature 0."""
    return tuple(setting.name for setting in plan.sampling if setting.temperature == 0)


def near_tie_threshold(run: Run) -> float:
    """Largest margin, in nats, that rounding is allowed to swap.

    1e-3 in float32 and float64, 0.5 in bfloat16, else 0.1.

    The precision is the one that the engine resolved (manifest), else the plan's.
    """
    target = (run.manifest.get("engine") or {}).get("target") or {}
    dtype = str(target.get("dtype") or run.plan.target.dtype).removeprefix("torch.")
    return NEAR_TIE_NATS.get(dtype, NEAR_TIE_NATS_OTHER)


def compare_answers(
    ids: Sequence[int] | None,
    reference_ids: Sequence[int] | None,
    *,
    text: str | None,
    reference_text: str | None,
    finish_reasons: tuple[str | None, str | None] = (None, None),
) -> Difference:
    """The first difference of two answers, ids first, texts where an engine returns no ids.

    Returns
    -------
    Difference
        `identical`; `eos_only` when one answer has exactly one more token, a stop token that adds no
        text; `same_text_different_ids`; else `differs`.
    """
    same_text = text is not None and text == reference_text
    if ids is None or reference_ids is None:
        return Difference(kind="identical" if same_text else "differs")
    ids, reference_ids = list(ids), list(reference_ids)
    if ids == reference_ids:
        return Difference(kind="identical")
    shorter = min(len(ids), len(reference_ids))
    index = next((i for i in range(shorter) if ids[i] != reference_ids[i]), shorter)
    kind = "differs"
    if same_text:
        both_stopped = finish_reasons == ("stop", "stop")
        one_more = index == shorter and abs(len(ids) - len(reference_ids)) == 1
        kind = "eos_only" if one_more and both_stopped else "same_text_different_ids"
    return Difference(
        kind=kind,
        index=index,
        token_id=ids[index] if index < len(ids) else None,
        reference_token_id=reference_ids[index] if index < len(reference_ids) else None,
    )


def classify_margin(
    margin_nats: float | None,
    margin_fp64_nats: float | None = None,
    *,
    near_tie_nats: float,
    lower_bound: bool = False,
) -> str:
    """Class of a split: `tie`, `near_tie`, `clear` or `unknown`.

    Parameters
    ----------
    margin_nats
        Log probability of the reference's token minus that of the arm's, in the run's precision.
    margin_fp64_nats
        The same in double precision; where known, both must be small.
    near_tie_nats
        Largest margin that rounding may swap.
    lower_bound
        The margin is the top-1/top-2 gap and the arm's token may be of any rank: a large gap is
        clear, a small one proves nothing.
    """
    known = [abs(value) for value in (margin_nats, margin_fp64_nats) if value is not None]
    if not known:
        return "unknown"
    worst = max(known)
    if worst > near_tie_nats:
        return "clear"
    if lower_bound:
        return "unknown"
    return "tie" if worst <= TIE_NATS else "near_tie"


def greedy_pairs(
    run: Run, *, arm: str, reference: str | None = None, across_concurrency: bool = False
) -> pl.DataFrame:
    """Greedy answers of one arm beside a reference's, one row a pair.

    Parameters
    ----------
    run
        A run.
    arm
        Arm under test; the baseline's name gives the baseline's control.
    reference
        Arm to compare with, None for the baseline. Equal to `arm`: the control, repeat r against
        repeat 0; else repeat r against repeat r.
    across_concurrency
        Compare `arm` with itself at the lowest concurrency, same repeat (`reference` must be `arm`).

    Returns
    -------
    polars.DataFrame
        Grain: sampling (temperature 0) x concurrency x prompt x repeat. Columns: the keys,
        `num_drafts` (of the arm's request; null: not known), `compared` (`ids`, or `text` where the
        engine returned no ids), `identical`, `index` of the first difference (null for texts),
        `token_id`, `reference_token_id`, `split_class` (`SPLIT_CLASSES`), `margin_nats` and
        `margin_source`: `judged again` (splits table), `logprobs` (reference token's less arm
        token's, from both arms' tokens), `lower bound` (the reference's top-1/top-2 gap alone).
        Pairs in which a request failed are left out. With `workload.nonce` the cells of one arm hold
        different prompts: there are no pairs of an arm with itself.

    Raises
    ------
    ValueError
        An arm is not in the plan.
    """
    reference = reference or run.plan.baseline.name
    for name in (arm, reference):
        if name not in {known.name for known in run.plan.arms}:
            known_arms = ", ".join(known.name for known in run.plan.arms)
            raise ValueError(f"arm '{name}' is not in the plan; it has {known_arms}")
    if across_concurrency and reference != arm:
        raise ValueError(
            f"across_concurrency compares an arm with itself; reference is '{reference}', arm '{arm}'"
        )
    answers = _answers(run.requests, greedy_settings(run.plan)).filter(pl.col("arm").is_in([arm, reference]))
    if run.plan.workload.nonce and arm == reference:
        answers = answers.clear()
    pairs = _paired_across(answers) if across_concurrency else _paired(answers, arm=arm, reference=reference)
    return _classified(run, pairs)


def greedy_table(run: Run, *, level: float = 0.95) -> pl.DataFrame:
    """Exact-match rates of greedy answers, arms and controls, by sampling setting and concurrency.

    Returns
    -------
    polars.DataFrame
        Long: sampling, concurrency, arm, comparison (`ARM against BASELINE`, and the controls `ARM against
        itself`, `BASELINE against itself`, `BASELINE against itself at the lowest concurrency`), control,
        metric `exact_match_rate`, value,
        low, high, level, n and n_clusters (distinct prompts), num_mismatched, num_pairs,
        num_mismatched_pairs, p_value (Fisher's exact test against the baseline's control in the
        same setting and concurrency, two-sided), method, reason. Answers without a draft count here.

    Notes
    -----
    The unit is the distinct prompt, judged on its first pair, so that a prompt asked twelve times is
    one prompt and arm and control have had the same number of chances to differ. A trailing stop token
    is no mismatch; different ids of one text are counted as `same_text_different_ids` in the pairs.

    References
    ----------
    Wilson (1927) interval and Fisher's exact test, both from SciPy.
    """
    baseline = run.plan.baseline.name
    control = greedy_pairs(run, arm=baseline, reference=baseline)
    frames: list[tuple[str, str, bool, pl.DataFrame]] = []
    for arm in speculating_arms(run.plan):
        against = greedy_pairs(run, arm=arm.name)
        itself = greedy_pairs(run, arm=arm.name, reference=arm.name)
        frames += [
            (f"{arm.name} against {baseline}", arm.name, False, against),
            (f"{arm.name} against itself", arm.name, True, itself),
        ]
    across = greedy_pairs(run, arm=baseline, reference=baseline, across_concurrency=True)
    frames += [
        (f"{baseline} against itself", baseline, True, control),
        (f"{baseline} against itself at the lowest concurrency", baseline, True, across),
    ]
    control_counts = {
        (row["sampling"], row["concurrency"]): (row["num_mismatched"], row["n"])
        for row in _first_pairs(control).iter_rows(named=True)
    }
    rows = []
    for comparison, arm_name, is_control, pairs in frames:
        for row in _first_pairs(pairs).iter_rows(named=True):
            bad, n = row["num_mismatched"], row["n"]
            match = wilson_estimate(n - bad, n, level=level)
            p_value = None
            other = control_counts.get((row["sampling"], row["concurrency"]))
            if not is_control and other is not None:
                p_value = fisher_p_value(bad, n, *other)
            rows.append(
                {
                    "sampling": row["sampling"],
                    "concurrency": row["concurrency"],
                    "arm": arm_name,
                    "comparison": comparison,
                    "control": is_control,
                    "metric": "exact_match_rate",
                    **match.as_row(),
                    "num_mismatched": bad,
                    "num_pairs": row["num_pairs"],
                    "num_mismatched_pairs": row["num_mismatched_pairs"],
                    "p_value": p_value,
                }
            )
    return pl.DataFrame(
        rows,
        schema={
            "sampling": pl.String,
            "concurrency": pl.Int64,
            "arm": pl.String,
            "comparison": pl.String,
            "control": pl.Boolean,
            "metric": pl.String,
            "value": pl.Float64,
            "low": pl.Float64,
            "high": pl.Float64,
            "level": pl.Float64,
            "n": pl.Int64,
            "n_clusters": pl.Int64,
            "num_mismatched": pl.Int64,
            "num_pairs": pl.Int64,
            "num_mismatched_pairs": pl.Int64,
            "p_value": pl.Float64,
            "method": pl.String,
            "reason": pl.String,
        },
        orient="row",
    )


def split_table(run: Run, *, arm: str) -> pl.DataFrame:
    """How the greedy pairs of an arm and the baseline split, beside the baseline's control.

    Returns
    -------
    polars.DataFrame
        sampling, concurrency, arm, comparison, split_class (every class, zeros too), count (pairs),
        n_clusters (distinct prompts among them), num_pairs (the denominator), near_tie_nats (threshold used).
    """
    baseline = run.plan.baseline.name
    rows = []
    for comparison, pairs in (
        (f"{arm} against {baseline}", greedy_pairs(run, arm=arm)),
        (f"{baseline} against itself", greedy_pairs(run, arm=baseline, reference=baseline)),
    ):
        for (sampling, concurrency), group in pairs.group_by("sampling", "concurrency", maintain_order=True):
            for name in SPLIT_CLASSES:
                found = group.filter(pl.col("split_class") == name)
                rows.append(
                    (
                        sampling,
                        concurrency,
                        arm,
                        comparison,
                        name,
                        found.height,
                        found["prompt_id"].n_unique(),
                        group.height,
                    )
                )
    frame = pl.DataFrame(
        rows,
        schema={
            "sampling": pl.String,
            "concurrency": pl.Int64,
            "arm": pl.String,
            "comparison": pl.String,
            "split_class": pl.String,
            "count": pl.Int64,
            "n_clusters": pl.Int64,
            "num_pairs": pl.Int64,
        },
        orient="row",
    )
    return frame.with_columns(near_tie_nats=pl.lit(near_tie_threshold(run)))


def sensitivity_table(pairs: pl.DataFrame, *, thresholds: Sequence[float] = SENSITIVITY_NATS) -> pl.DataFrame:
    """How many splits would be clear under other near-tie thresholds.

    Returns
    -------
    polars.DataFrame
        near_tie_nats, num_clear, num_near_tie (ties included), num_unknown, num_splits.
    """
    splits = pairs.filter(~pl.col("split_class").is_in(SAME_TEXT))
    rows = []
    for threshold in thresholds:
        classes = Counter(
            classify_margin(
                row["margin_nats"], near_tie_nats=threshold, lower_bound=row["margin_source"] == "lower bound"
            )
            for row in splits.iter_rows(named=True)
        )
        near = classes["tie"] + classes["near_tie"]
        rows.append((float(threshold), classes["clear"], near, classes["unknown"], splits.height))
    names = ("near_tie_nats", "num_clear", "num_near_tie", "num_unknown", "num_splits")
    types = (pl.Float64, pl.Int64, pl.Int64, pl.Int64, pl.Int64)
    return pl.DataFrame(rows, schema=dict(zip(names, types, strict=True)), orient="row")


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjusted p-values; None (a test that could not be made) stays None.

    References
    ----------
    Holm (1979), Scandinavian Journal of Statistics 6, 65-70.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (p, index) in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p))
        adjusted[index] = running
    return adjusted


def quality_table(run: Run, *, arm: str) -> pl.DataFrame:
    """Graded answers of an arm and the baseline in pairs, by sampling setting and concurrency.

    Returns
    -------
    polars.DataFrame
        sampling, concurrency, arm, n (prompts graded in both, first repeat), num_baseline_right,
        num_arm_right, num_only_baseline_right, num_only_arm_right, p_value (exact McNemar; null where no
        prompt is discordant), p_holm. A score is right from 0.5 up. A failed request counts as wrong: it
        gave no valid answer.
    """
    baseline = run.plan.baseline.name
    keys = ["sampling", "concurrency", "prompt_id"]
    first = run.requests.filter(pl.col("repeat") == 0).with_columns(
        score=pl.when(pl.col("status") == "ok").then("grader_score").otherwise(0.0)
    )
    graded = first.filter(pl.col("grader_score").is_not_null())["prompt_id"].unique()
    first = first.filter(pl.col("prompt_id").is_in(graded.implode()), pl.col("score").is_not_null())
    pairs = (
        first.filter(pl.col("arm") == arm)
        .select(*keys, right=pl.col("score") >= 0.5)
        .join(
            first.filter(pl.col("arm") == baseline).select(*keys, reference_right=pl.col("score") >= 0.5),
            on=keys,
            maintain_order="left",
        )
    )
    counts = pairs.group_by("sampling", "concurrency", maintain_order=True).agg(
        n=pl.len(),
        num_baseline_right=pl.col("reference_right").sum(),
        num_arm_right=pl.col("right").sum(),
        num_only_baseline_right=(pl.col("reference_right") & ~pl.col("right")).sum(),
        num_only_arm_right=(pl.col("right") & ~pl.col("reference_right")).sum(),
    )
    p_values = [
        mcnemar_p_value(only_baseline, only_arm)
        for only_baseline, only_arm in counts.select(
            "num_only_baseline_right", "num_only_arm_right"
        ).iter_rows()
    ]
    return counts.with_columns(
        pl.lit(arm).alias("arm"),
        pl.Series("p_value", p_values, dtype=pl.Float64),
        pl.Series("p_holm", holm(p_values), dtype=pl.Float64),
    ).with_columns(pl.col("n", "^num_.*$").cast(pl.Int64))


def sampled_tests(run: Run, *, arm: str, rng: np.random.Generator, num_resamples: int = 1999) -> pl.DataFrame:
    """Whether sampled answers of an arm follow the target's law and resemble the baseline's.

    Returns
    -------
    polars.DataFrame
        One row a sampling setting (temperature above 0) and test: arm, sampling, test, statistic,
        p_value, p_holm (over the arm's tests; the control has none), n, n_clusters (prompts), method,
        reason. Tests: `pit_uniform` (n tokens) and `pit_uniform_control` (the baseline's own),
        `output_length` and `mean_logprob` (n requests). `p_value` is null, with a reason, where the
        data are missing or fewer than 8 prompts took part.

    Notes
    -----
    `pit_uniform`: u = cdf_low + V (cdf_high - cdf_low) is uniform if the token follows the law. The
    statistic is Kolmogorov's distance of the pooled u; its p-value flips the signs of whole prompts'
    contributions to the empirical process, so that tokens of one prompt need not be independent.
    `output_length`, `mean_logprob`: per-prompt means, arm minus baseline, sign-flip permutation test.

    References
    ----------
    Rosenblatt (1952) and Czado, Gneiting and Held (2009), randomised probability integral transform;
    Davidson and Flachaire (2008), Rademacher wild bootstrap; `scipy.stats.permutation_test`.
    """
    baseline = run.plan.baseline.name
    settings = [setting.name for setting in run.plan.sampling if setting.temperature > 0]
    columns = ("request_id", "arm", "sampling", "prompt_id", "logprob", "cdf_low", "cdf_high")
    tokens = run.labelled("tokens", columns=columns) if settings and run.has("tokens") else None
    rows: list[dict[str, Any]] = []
    for sampling in settings:
        requests = run.requests.filter(pl.col("sampling") == sampling, pl.col("status") == "ok")
        for test, who in (("pit_uniform", arm), ("pit_uniform_control", baseline)):
            rows.append(
                {"sampling": sampling, "test": test, **_pit_test(tokens, who, sampling, rng, num_resamples)}
            )
        lengths = requests.select(
            "arm", "prompt_id", pl.col("num_output_tokens").cast(pl.Float64).alias("value")
        )
        rows.append(
            {
                "sampling": sampling,
                "test": "output_length",
                **_paired_test(lengths.drop_nulls(), arm, baseline, rng, num_resamples, "no output lengths"),
            }
        )
        logprobs = pl.DataFrame(schema={"arm": pl.String, "prompt_id": pl.String, "value": pl.Float64})
        if tokens is not None:
            usable = tokens.filter(pl.col("sampling") == sampling)
            usable = usable.filter(~pl.col("request_id").is_in(degenerate_logprobs(usable)))
            logprobs = usable.group_by("arm", "prompt_id", "request_id", maintain_order=True).agg(
                value=pl.col("logprob").mean()
            )
        rows.append(
            {
                "sampling": sampling,
                "test": "mean_logprob",
                **_paired_test(logprobs, arm, baseline, rng, num_resamples, "no usable log probabilities"),
            }
        )
    frame = pl.DataFrame(
        rows,
        schema={
            "sampling": pl.String,
            "test": pl.String,
            "statistic": pl.Float64,
            "p_value": pl.Float64,
            "n": pl.Int64,
            "n_clusters": pl.Int64,
            "method": pl.String,
            "reason": pl.String,
        },
        orient="row",
    )
    of_arm = [
        None if test == "pit_uniform_control" else p
        for test, p in frame.select("test", "p_value").iter_rows()
    ]
    return frame.with_columns(
        pl.lit(arm).alias("arm"), pl.Series("p_holm", holm(of_arm), dtype=pl.Float64)
    ).select(
        "arm", "sampling", "test", "statistic", "p_value", "p_holm", "n", "n_clusters", "method", "reason"
    )


def pit_values(run: Run, *, arm: str, rng: np.random.Generator) -> pl.DataFrame:
    """Randomised probability integral transform of every sampled token of an arm.

    Returns
    -------
    polars.DataFrame
        request_id, prompt_id, sampling, index, origin, pit in [0, 1]; uniform if the law is kept.
        Empty where the run has no cumulative masses.
    """
    columns = ("request_id", "prompt_id", "arm", "sampling", "index", "origin", "cdf_low", "cdf_high")
    tokens = run.labelled("tokens", columns=columns)
    tokens = tokens.filter(pl.col("arm") == arm, pl.col("cdf_low").is_not_null())
    return tokens.select(
        "request_id", "prompt_id", "sampling", "index", "origin", pl.Series("pit", _pit(tokens, rng))
    )


def pit_histogram(run: Run, *, arm: str, rng: np.random.Generator, num_bins: int = 20) -> pl.DataFrame:
    """Shares of an arm's sampled tokens in equal bins of the randomised PIT, with the band of a uniform law.

    Parameters
    ----------
    run, arm, rng
        As in `pit_values`.
    num_bins
        Equal bins of [0, 1].

    Returns
    -------
    polars.DataFrame
        sampling, bin_low, bin_high, value (share of the tokens), expected (1 / num_bins), low, high
        (band in which all bins of a uniform law stay with 95 % probability; null below 5 prompts),
        n (tokens), n_clusters (prompts), reason. No rows where nothing was sampled.

    Notes
    -----
    Tokens of one prompt are not independent: the standard error of a share sums squared residuals
    of whole prompts (linearised ratio, Cochran 1977, section 6.3) under the uniform law; the band is
    Bonferroni's over bins.
    """
    expected = 1 / num_bins
    edges = pl.DataFrame({"bin": list(range(num_bins))}, schema={"bin": pl.Int64})
    bins = (pl.col("pit") * num_bins).floor().clip(0, num_bins - 1).cast(pl.Int64).alias("bin")
    counts = (
        pit_values(run, arm=arm, rng=rng)
        .with_columns(bins)
        .group_by("sampling", "prompt_id", "bin", maintain_order=True)
        .agg(pl.len().cast(pl.Int64).alias("hits"))
    )
    prompts = counts.group_by("sampling", "prompt_id", maintain_order=True).agg(
        pl.col("hits").sum().alias("tokens")
    )
    grid = prompts.join(edges, how="cross", maintain_order="left_right").join(
        counts, on=["sampling", "prompt_id", "bin"], how="left", maintain_order="left"
    )
    hits, tokens = pl.col("hits").fill_null(0), pl.col("tokens")
    width = float(scipy_stats.norm.ppf(1 - 0.05 / (2 * num_bins)))
    enough = pl.len() >= 5
    error = ((hits - tokens * expected) ** 2).sum().sqrt() / tokens.sum()
    return (
        grid.group_by("sampling", "bin", maintain_order=True)
        .agg(
            (hits.sum() / tokens.sum()).alias("value"),
            pl.when(enough).then((expected - width * error).clip(0)).alias("low"),
            pl.when(enough).then(expected + width * error).alias("high"),
            tokens.sum().alias("n"),
            pl.len().cast(pl.Int64).alias("n_clusters"),
            pl.when(~enough).then(pl.lit("fewer than 5 prompts")).alias("reason"),
        )
        .sort("sampling", "bin")
        .select(
            "sampling",
            (pl.col("bin") / num_bins).alias("bin_low"),
            ((pl.col("bin") + 1) / num_bins).alias("bin_high"),
            "value",
            pl.lit(expected).alias("expected"),
            "low",
            "high",
            "n",
            "n_clusters",
            "reason",
        )
    )


def degenerate_logprobs(tokens: pl.DataFrame) -> list[str]:
    """Requests whose log probabilities are all exactly 0: an engine that does not report them.

    Such values would turn every divergence into a tie; they are not used.
    """
    found = tokens.group_by("request_id", maintain_order=True).agg(
        zero=(pl.col("logprob") == 0).all(), count=pl.len()
    )
    return found.filter(pl.col("zero") & (pl.col("count") >= 5))["request_id"].to_list()


def repeated_4gram_share(token_ids: Sequence[Any]) -> float | None:
    """Share of an answer's 4-grams that occurred before in it, in [0, 1]; None below 16 tokens."""
    if len(token_ids) < 16:
        return None
    grams = list(zip(token_ids, token_ids[1:], token_ids[2:], token_ids[3:], strict=False))
    return 1 - len(set(grams)) / len(grams)


def is_corrupted(share: float | None, reference_share: float | None, windows: Sequence[float | None]) -> bool:
    """Whether an answer loops where the baseline's does not, while its acceptance collapses.

    Parameters
    ----------
    share, reference_share
        Repeated 4-gram shares of the arm's and the baseline's answer.
    windows
        Mean acceptance length in consecutive parts of the answer. A healthy drafter accepts *more* in
        a loop; one whose state is corrupt falls to 1.
    """
    known = [window for window in windows if window is not None]
    if share is None or reference_share is None or len(known) < 2:
        return False
    return share >= 0.5 and reference_share <= 0.2 and known[-1] <= 1.1 and known[0] - known[-1] >= 0.3


def corruption_table(run: Run, *, arm: str, num_windows: int = 3) -> pl.DataFrame:
    """Repetition and acceptance of every answer of an arm, at any temperature.

    Returns
    -------
    polars.DataFrame
        One row a finished request of the arm: sampling, concurrency, repeat, prompt_id, request_id,
        repeated_4gram_share, reference_share (the baseline's answer in the same cell),
        acceptance_windows (mean acceptance length in thirds of its steps), corrupted.
    """
    keys = ["sampling", "concurrency", "repeat", "prompt_id"]
    frame = run.requests.filter(pl.col("status") == "ok").select(
        "arm", *keys, "request_id", "output_token_ids", "output_text"
    )
    shares = frame.with_columns(
        pl.Series(
            "repeated_4gram_share",
            [
                repeated_4gram_share(ids if ids is not None else (text or "").split())
                for ids, text in frame.select("output_token_ids", "output_text").iter_rows()
            ],
            dtype=pl.Float64,
        )
    ).drop("output_token_ids", "output_text")
    joined = shares.filter(pl.col("arm") == arm).join(
        shares.filter(pl.col("arm") == run.plan.baseline.name).select(
            *keys, pl.col("repeated_4gram_share").alias("reference_share")
        ),
        on=keys,
        how="left",
        maintain_order="left",
    )
    drafted = run.steps.filter(pl.col("arm") == arm, pl.col("num_draft_tokens") > 0)
    accepted = {
        key[0]: group["num_accepted_tokens"].to_numpy()
        for key, group in drafted.group_by("request_id", maintain_order=True)
    }
    windows, flags = [], []
    for row in joined.iter_rows(named=True):
        counts = accepted.get(row["request_id"], np.zeros(0))
        parts = np.array_split(counts, num_windows) if len(counts) >= num_windows else []
        means = [1 + float(part.mean()) for part in parts]
        windows.append(means)
        flags.append(is_corrupted(row["repeated_4gram_share"], row["reference_share"], means))
    return joined.drop("arm").with_columns(
        pl.Series("acceptance_windows", windows, dtype=pl.List(pl.Float64)),
        pl.Series("corrupted", flags, dtype=pl.Boolean),
    )


def explain_mismatch(run: Run, precise: Run, *, arm: str) -> str:
    """What a rerun in float32 says about the greedy mismatches of a run in a lower precision.

    Returns
    -------
    str
        `no mismatch`; `numerics` if every prompt that differs is the same in the precise run (or differs
        at a tie there); `bug` if one still differs; `inconclusive` if the precise run lacks such a prompt.
    """
    different = _mismatched_prompts(greedy_pairs(run, arm=arm))
    if not different:
        return "no mismatch"
    pairs = greedy_pairs(precise, arm=arm)
    still = {
        prompt
        for prompt, name in pairs.select("prompt_id", "split_class").iter_rows()
        if name not in (*SAME_TEXT, "tie", "near_tie")
    }
    if different & still:
        return "bug"
    return "numerics" if different <= set(pairs["prompt_id"]) else "inconclusive"


def speculating_arms(plan: Plan) -> tuple[Arm, ...]:
    """Arms that speculate, in the plan's order."""
    return tuple(arm for arm in plan.arms if arm.speculative is not None)


def not_comparable(run: Run, *, arm: str) -> tuple[str, ...]:
    """Why an arm can't be compared with the baseline in this run; empty if it can.

    Checks that the run is finished and that both arms got, cell by cell, the same prompts (digest), the
    same number of prompt tokens, a prefix cache that served the same share (within 5 points), the same
    sampling fields and servers with the same settings (those that do not follow from a drafter). Cells
    that are no measurement of time are another matter: `verdicts.unfit_cells`.
    """
    reasons: list[str] = []
    if run.status != "finished":
        reasons.append(f"the run's status is {run.status}, not finished")
    keys = ["sampling", "concurrency", "repeat", "entropy_tier", "prompt_id"]
    columns = [*keys, "prompt_sha256", "num_prompt_tokens"]
    left = run.requests.filter(pl.col("arm") == arm)
    right = run.requests.filter(pl.col("arm") == run.plan.baseline.name)
    if left.is_empty() or right.is_empty():
        who = arm if left.is_empty() else run.plan.baseline.name
        return (*reasons, f"arm {who} has no finished cell")
    pairs = left.select(columns).join(right.select(columns), on=keys, how="full", coalesce=True)
    alone = pairs.filter(pl.col("prompt_sha256").is_null() | pl.col("prompt_sha256_right").is_null()).height
    if alone:
        reasons.append(
            f"the arms do not share their prompts: {alone} of {pairs.height} requests have no partner"
        )
    changed = pairs.filter(pl.col("prompt_sha256") != pl.col("prompt_sha256_right")).height
    if changed:
        reasons.append(f"prompts differ in content on {changed} of {pairs.height} rows")
    counts = pairs.filter(pl.col("num_prompt_tokens") != pl.col("num_prompt_tokens_right")).height
    if counts:
        reasons.append(f"prompt token counts differ on {counts} of {pairs.height} rows")
    shares = [cached_share(frame) for frame in (left, right)]
    if (shares[0] is None) != (shares[1] is None) and not _hits_are_counted(run, arm):
        known, unknown = (arm, "the baseline") if shares[1] is None else ("the baseline", arm)
        share = next(share for share in shares if share is not None)
        reasons.append(
            f"the prefix cache served {share:.0%} of prompt tokens in {known} as far as usage tells, and "
            f"nothing tells of {unknown}"
        )
    if shares[0] is not None and shares[1] is not None and abs(shares[0] - shares[1]) > 0.05:
        reasons.append(
            f"the prefix cache served {shares[0]:.0%} of prompt tokens in {arm} "
            f"and {shares[1]:.0%} in the baseline"
        )
    reasons += _sampling_differences(run, arm)
    declared = _declared_differences(run, arm)
    found = [
        difference
        for difference in setting_differences(run, arm=arm)
        if not difference.follows and difference.name not in declared
    ]
    if found:
        reasons.append(f"the servers differ in more than speculation: {'; '.join(map(str, found))}")
    return tuple(reasons)


def _hits_are_counted(run: Run, arm: str) -> bool:
    """Whether the counters of both arms tell what the prefix cache served in every cell with an answer."""
    if not run.has("scrapes"):
        return False
    windows = cell_windows(run)
    answered = run.requests.filter(
        pl.col("arm").is_in([arm, run.plan.baseline.name]), pl.col("status") == "ok"
    )
    names = answered["cell_id"].unique().to_list()
    return all(
        name in windows and windows[name].delta("vllm:prefix_cache_hits") is not None for name in names
    )


def setting_differences(run: Run, *, arm: str) -> tuple[SettingDifference, ...]:
    """Effective settings in which an arm's server differs from the baseline's; empty without servers' logs.

    What follows from the drafter's size (capacity of the KV cache, memory) is left out. A setting that
    one log lacks counts only where a drafter is known to change it.
    """
    own, other = (_settings(run, name) for name in (arm, run.plan.baseline.name))
    if not own or not other:
        return ()
    found = []
    for name in (*_SHARED_SETTINGS, *_FOLLOWING_SETTINGS):
        mine, theirs = own.get(name, set()), other.get(name, set())
        follows = name in _FOLLOWING_SETTINGS
        if mine == theirs or (not follows and not (mine and theirs)):
            continue
        found.append(
            SettingDifference(
                name=name,
                value=_setting_text(name, mine),
                baseline_value=_setting_text(name, theirs),
                follows=follows,
            )
        )
    return tuple(found)


def _settings(run: Run, arm: str) -> dict[str, set[str]]:
    """Every effective setting of an arm's servers with all values that it had over the cells, as JSON."""
    found: dict[str, set[str]] = {}
    for cell in run.cells:
        if cell["arm"] == arm:
            for name, value in ((cell.get("server") or {}).get("settings") or {}).items():
                found.setdefault(name, set()).add(json.dumps(value, sort_keys=True))
    return found


def _setting_text(name: str, values: Collection[str]) -> str:
    if not values:
        return "on" if name == "async_scheduling" else "not logged"
    text = " and ".join(str(json.loads(value)) for value in sorted(values))
    return {"False": "off", "True": "on"}.get(text, text)


def _declared_differences(run: Run, arm: str) -> set[str]:
    """Names of the settings in which the plan itself lets an arm differ (`allow_differences`)."""
    if not run.plan.allow_differences:
        return set()
    args = next(known.args for known in run.plan.arms if known.name == arm)
    renamed = {"max_model_len": "max_seq_len"}
    return {renamed.get(name, name) for name in {*args, *run.plan.baseline.args}}


def sent_sampling(run: Run, *, arm: str) -> Mapping[str, Mapping[str, Any]] | None:
    """Sampling fields that an arm's requests carried, by setting; None where the run has no record of them.

    In-process engines sample by the plan itself and keep none.
    """
    facts = (run.manifest.get("arms") or {}).get(arm) or {}
    found = facts.get("sampling")
    return found if isinstance(found, Mapping) else None


def _sampling_differences(run: Run, arm: str) -> list[str]:
    own, other = (sent_sampling(run, arm=name) for name in (arm, run.plan.baseline.name))
    if own is None or other is None:
        return []
    reasons = []
    for setting in run.plan.sampling:
        mine, theirs = own.get(setting.name) or {}, other.get(setting.name) or {}
        for name in sorted({*mine, *theirs}):
            if mine.get(name) != theirs.get(name):
                reasons.append(
                    f"requests of {arm} were sent {name} {mine.get(name)} under {setting.name}, "
                    f"those of the baseline {theirs.get(name)}"
                )
    return reasons


def _temperature(run: Run, arm: str) -> tuple[str | None, str | None]:
    """Why greedy answers of a server can't be compared, and what is not known about how they were asked."""
    if run.plan.engine.kind in IN_PROCESS:
        return None, None
    for name in (arm, run.plan.baseline.name):
        record = sent_sampling(run, arm=name)
        if record is None:
            return None, "that temperature 0 was sent (the run has no record of the sampling fields)"
        for setting in greedy_settings(run.plan):
            sent = (record.get(setting) or {}).get("temperature")
            if sent != 0:
                said = "no temperature" if sent is None else f"temperature {sent}"
                return (
                    f"greedy answers of {name} were asked for with {said} under {setting}: exact match "
                    "needs temperature 0 in every request"
                ), None
    return None, None


def known_drafts(run: Run) -> pl.DataFrame:
    """Drafts verified for every request: request_id, num_drafts (null: not known, not 0).

    Steps that were guessed from chunks count only where one gave several tokens: a server that speculates
    and one that does not both send single tokens. Several tokens count only where they show a draft
    (`reconciliation.void_chunks`).
    """
    found = request_drafts(run).select("request_id", "num_drafts")
    guessed = _guessed_cells(run)
    if not guessed:
        return found
    void = list(void_chunks(run))
    several = (
        run.steps.filter(pl.col("cell_id").is_in(guessed))
        .filter(~pl.col("cell_id").is_in(void))
        .group_by("request_id")
        .agg(several=(pl.col("num_accepted_tokens") > 0).any())
    )
    own = run.requests.filter(pl.col("cell_id").is_in(guessed))["request_id"].to_list()
    told = run.table("acceptance").select("request_id", told=pl.lit(True))
    joined = found.join(several, on="request_id", how="left", maintain_order="left").join(
        told, on="request_id", how="left", maintain_order="left"
    )
    kept = pl.col("told").fill_null(False) | pl.col("several").fill_null(~pl.col("request_id").is_in(own))
    return joined.select("request_id", pl.when(kept).then("num_drafts").alias("num_drafts"))


def _guessed_cells(run: Run) -> list[str]:
    return [
        cell["cell_id"]
        for cell in run.cells
        if cell.get("steps_source") == GUESSED_STEPS and cell["arm"] != run.plan.baseline.name
    ]


def draft_activity(run: Run) -> pl.DataFrame:
    """Whether drafts were verified in each class of requests: arm x sampling x concurrency.

    Returns
    -------
    pl.DataFrame
        arm, sampling, concurrency, num_requests (answered), num_drafts (of the cells that tell; null if
        none does), source (that tells; `chunks` if nothing else does), active (True; False: every cell tells
        of 0 drafts; null: not known), reason (why it is not True). Classes without an answered request have
        no row.

    Notes
    -----
    Each cell is believed by its first usable source: the engine's steps, response fields, counters, log
    lines. A chunk of several tokens shows that something was drafted, unless the baseline sends such chunks
    too or the server has vLLM's metrics without any of acceptance; chunks of one show nothing.
    """
    guessed = _guessed_cells(run)
    rows = []
    table = reconcile(run).filter(pl.col("num_requests") > 0)
    for (arm, sampling, concurrency), group in table.group_by(
        "arm", "sampling", "concurrency", maintain_order=True
    ):
        counts: list[int | None] = []
        sources: list[str] = []
        reasons: list[str] = []
        for _, cell in group.group_by("cell_id", maintain_order=True):
            told = cell.filter(
                (pl.col("source") != "chunks") & pl.col("usable") & pl.col("num_drafts").is_not_null(),
                (pl.col("source") != "response") | ~pl.col("cell_id").is_in(guessed),
            )
            stream = cell.filter(
                (pl.col("source") == "chunks") & pl.col("usable") & (pl.col("num_accepted_tokens") > 0)
            )
            found = told["num_drafts"].to_list() or stream["num_drafts"].to_list()
            counts.append(found[0] if found else None)
            sources += [*told["source"].to_list()[:1], *stream["source"].to_list()][:1]
            reasons += cell["reason"].drop_nulls().to_list()
        num_requests = int(group.unique("cell_id")["num_requests"].sum())
        known = [count for count in counts if count is not None]
        active = True if any(known) else False if len(known) == len(counts) else None
        reason = None
        if active is False:
            reason = f"{INACTIVE}: 0 drafts in {num_requests} answered requests"
        elif active is None:
            missing = [text for text in reasons if text.startswith(METRICS_MISSING)]
            reason = f"no source tells of drafts ({(missing or reasons or ['no figures'])[0]})"
        source = min(sources, key=SOURCES.index, default=None)
        total = sum(known) if known else None
        rows.append((arm, sampling, concurrency, num_requests, total, source, active, reason))
    return pl.DataFrame(
        rows,
        schema={
            "arm": pl.String,
            "sampling": pl.String,
            "concurrency": pl.Int64,
            "num_requests": pl.Int64,
            "num_drafts": pl.Int64,
            "source": pl.String,
            "active": pl.Boolean,
            "reason": pl.String,
        },
        orient="row",
    )


def inactive_classes(run: Run) -> pl.DataFrame:
    """Request classes (arm x sampling) not known to have drafts at any load: verdicts on them are vacuous.

    Returns
    -------
    pl.DataFrame
        arm, sampling, active (False: every cell with an answered request tells of 0 drafts; null: some cell
        does not tell and none tells of a draft), reason. Classes with drafts have no row. By the rule of
        `draft_activity`.
    """
    silent = pl.col("active").is_null()
    classes = (
        draft_activity(run)
        .group_by("arm", "sampling", maintain_order=True)
        .agg(
            pl.col("active").any(ignore_nulls=False),
            pl.col("num_requests").sum(),
            pl.col("reason").filter(silent).first(),
        )
        .filter(~pl.col("active").fill_null(False))
    )
    off = pl.format(
        f"{INACTIVE}: 0 drafts in {{}} requests; what they ask for "
        "(logprobs, penalties, min_p) may switch speculation off: ask without",
        "num_requests",
    )
    return classes.select(
        "arm",
        "sampling",
        "active",
        pl.when(pl.col("active").is_null()).then("reason").otherwise(off).alias("reason"),
    )


def _active_settings(activity: pl.DataFrame) -> dict[str, bool | None]:
    """`active` of every sampling setting with an answered request, over its concurrencies."""
    return {
        str(sampling): True if group["active"].any() else None if group["active"].null_count() else False
        for (sampling,), group in activity.group_by("sampling", maintain_order=True)
    }


def refusal(run: Run, *, arm: str) -> str | None:
    """Why equivalence is not judged at all: synthetic or lossy acceptance, or a modelled run; else None."""
    speculative = next(known.speculative for known in run.plan.arms if known.name == arm)
    method = speculative.rejection_sample_method if speculative else None
    if method in LOSSY_METHODS:
        return f"{method} acceptance does not keep the target's law, so there is nothing to verify"
    if run.modelled:
        return "the run is modelled (dummy weights or synthetic acceptance)"
    return None


def judge_equivalence(
    run: Run,
    *,
    arm: str,
    rng: np.random.Generator,
    minimum_prompts: int = 20,
    significance: float = 0.01,
    level: float = 0.95,
    activity: pl.DataFrame | None = None,
) -> Outcome:
    """Judges whether an arm's answers are the target's.

    Parameters
    ----------
    run
        A run.
    arm
        A speculating arm.
    minimum_prompts
        Distinct prompts with a draft below which a clean comparison is inconclusive: 0 of 20 mismatches still
        allow a true rate of 16 % (Wilson, 95 %).
    significance
        Level of the tests on sampled answers and scores, after Holm's correction, and of excess mismatch.
    level
        Of the interval of the exact-match rate.
    activity
        From `draft_activity`, if it is at hand.

    Returns
    -------
    Outcome
        In this order: `refused` (modelled, synthetic or lossy acceptance, or greedy answers that were not
        asked for with temperature 0); `inconclusive` if the arms can't be compared or nothing was
        answered; `vacuous` if no draft was verified in the judged requests; `not equivalent` for a
        corrupted answer, for a clear-margin split on a prompt whose baseline is stable, for scores or
        sampled answers that differ; `inconclusive` when margins are unknown, it is not known whether
        anything was drafted, the baseline is unstable itself, prompts are few, or more prompts differ
        than in the control and some split there is not a (near) tie; `equivalent up to numerics` for any
        other difference; `equivalent`.

    Notes
    -----
    More differences than in the control, all of them (near) ties, are numerics: verifying several tokens
    at once changes the shapes of the target's matrix products and so their rounding, which the control
    does not go through. Such an excess does not decide; it stands in the first reason.
    """
    baseline = run.plan.baseline.name
    threshold = near_tie_threshold(run)

    def outcome(name: str, reasons: Iterable[str], **facts: Any) -> Outcome:
        empty: dict[str, Any] = {
            "num_prompts": 0,
            "num_mismatched": 0,
            "num_clear": 0,
            "num_clear_excused": 0,
            "match": None,
        }
        return Outcome(
            arm=arm, outcome=name, reasons=tuple(reasons), near_tie_nats=threshold, **{**empty, **facts}
        )

    refused = refusal(run, arm=arm)
    if refused:
        return outcome("refused", (refused,))
    if problems := not_comparable(run, arm=arm):
        return outcome("inconclusive", problems)

    wrong_temperature, unrecorded = _temperature(run, arm)
    if wrong_temperature:
        return outcome("refused", (wrong_temperature,))

    own = run.requests.filter(pl.col("arm") == arm)
    activity = draft_activity(run) if activity is None else activity
    activity = activity.filter(pl.col("arm") == arm)
    active = _active_settings(activity)
    if not active:
        return outcome("inconclusive", (f"no request of {arm} was answered",))
    greedy = greedy_settings(run.plan)
    judged = [name for name, seen in active.items() if seen is not False]
    silent = [setting.name for setting in run.plan.sampling if setting.name not in judged]
    if not judged or (greedy and not set(judged) & set(greedy)):
        what = "any judged request" if not judged else f"the greedy requests ({', '.join(greedy)})"
        reasons = [f"no draft was verified in {what}: the comparison says nothing about speculation"]
        if run.plan.engine.kind not in IN_PROCESS:
            reasons.append(
                f"{INACTIVE}: logprobs, penalties or min_p in a request may switch speculation off; "
                "ask again without them"
            )
        return outcome("vacuous", reasons, num_prompts=own["prompt_id"].n_unique())

    pairs = greedy_pairs(run, arm=arm)
    pairs = pairs.join(
        activity.filter(pl.col("active").fill_null(True)).select("sampling", "concurrency"),
        on=["sampling", "concurrency"],
        how="semi",
        maintain_order="left",
    )
    took = _took_part(run, arm, activity)
    pairs = pairs.join(
        took.select("request_id", "drafted"), on="request_id", how="left", maintain_order="left"
    )
    all_pairs = pairs
    # Equal answers without a draft say nothing about speculation; a difference counts whatever made it.
    drafted = pl.col("drafted").fill_null(True)
    pairs = pairs.filter(drafted | ~pl.col("split_class").is_in(SAME_TEXT))
    if all_pairs.height and pairs.is_empty() and not all_pairs["num_drafts"].null_count():
        return outcome(
            "vacuous",
            [f"drafts in 0 of {all_pairs.height} requests: the comparison says nothing about speculation"],
            num_prompts=all_pairs["prompt_id"].n_unique(),
        )
    control = greedy_pairs(run, arm=baseline, reference=baseline)
    # A prompt whose baseline flips at a tie excuses no clear split of the arm.
    unstable = {
        (sampling, concurrency, prompt, split_class)
        for sampling, concurrency, prompt, name in control.select(
            "sampling", "concurrency", "prompt_id", "split_class"
        ).iter_rows()
        if name not in SAME_TEXT
        for split_class in SPLIT_CLASSES
        if split_class != "clear" or name in ("clear", "unknown")
    }
    not_measured: list[str] = [unrecorded] if unrecorded and greedy else []
    faults: list[str] = []
    doubts, notes = _activity_findings(activity, silent, greedy)
    facts: dict[str, Any] = {}

    excess: list[str] = []
    mismatched: set[str] = set()
    if greedy and pairs.is_empty():
        doubts.append("no greedy answer was finished in both arms")
    elif greedy:
        first = _first_by_prompt(pairs)
        mismatched = _mismatched_prompts(pairs)
        prompts = pairs["prompt_id"].n_unique()
        bad_first = len(_mismatched_prompts(first))
        match = wilson_estimate(prompts - bad_first, prompts, level=level)
        facts |= {
            "num_prompts": prompts,
            "num_mismatched": len(mismatched),
            "match": match,
        }
        excused, found_doubts, found_notes = _excused(pairs, control, significance)
        doubts += found_doubts
        notes += found_notes
        blamed = [
            row
            for row in pairs.iter_rows(named=True)
            if row["split_class"] not in SAME_TEXT
            and (row["sampling"], row["concurrency"], row["prompt_id"], row["split_class"]) not in unstable
            and row["split_class"] not in excused.get((row["sampling"], row["concurrency"]), ())
        ]
        all_clear = set(pairs.filter(pl.col("split_class") == "clear")["prompt_id"])
        clear = {row["prompt_id"] for row in blamed if row["split_class"] == "clear"}
        unknown = {row["prompt_id"] for row in blamed if row["split_class"] == "unknown"} - clear
        all_unknown = set(pairs.filter(pl.col("split_class") == "unknown")["prompt_id"])
        facts |= {
            "num_clear": len(all_clear),
            "num_clear_excused": len(all_clear - clear),
            "num_unknown": len(all_unknown - all_clear),
        }
        if clear:
            worst = max(
                (row for row in blamed if row["split_class"] == "clear"),
                key=lambda row: abs(row["margin_nats"]),
            )
            faults.append(
                f"{len(clear)} of {prompts} distinct prompts part from the baseline where the target is sure "
                f"(largest margin {abs(worst['margin_nats']):.2f} nats, threshold {threshold:g}, prompt "
                f"{worst['prompt_id']}, index {worst['index']}, concurrency {worst['concurrency']}): "
                "suspect a bug"
            )
        if unknown:
            doubts.insert(
                0,
                f"{len(unknown)} of {prompts} distinct prompts differ at a margin that is not known "
                f"({_why_unknown(run, [row for row in blamed if row['split_class'] == 'unknown'])})",
            )
        texts = pairs.filter(pl.col("compared") == "text").height
        if texts:
            notes.append(
                f"{texts} of {pairs.height} pairs were compared as text, because the server returned no "
                "token ids"
            )
            not_measured.append("token ids (different ids of one text are not seen)")
        if any(setting.ignore_eos for setting in run.plan.sampling if setting.name in greedy):
            not_measured.append("where answers end of themselves (ignore_eos forces every one to its cap)")
        took_part, drafts_in = _prompts_with_drafts(all_pairs, activity)
        if took_part < minimum_prompts and not clear:
            doubts.append(
                f"{took_part} distinct prompts were compared, {minimum_prompts} are needed"
                + (f" ({drafts_in})" if drafts_in else "")
            )
        elif drafts_in:
            notes.append(drafts_in)
        if undrafted := set(all_pairs["prompt_id"]) - set(pairs["prompt_id"]):
            notes.append(f"{len(undrafted)} further prompts had no draft and are not counted")
        excluded = len(mismatched) - len({row["prompt_id"] for row in blamed})
        if excluded:
            notes.append(
                f"{excluded} prompts differ where the baseline differs from itself and are not blamed"
            )
        notes += _control_notes(run, arm, pairs, control)
        excess, found_doubts = _excess(pairs, control, significance)
        doubts += found_doubts
        if control.is_empty():
            needs = (
                "workload.nonce gives each repeat other prompts"
                if run.plan.workload.nonce
                else "needs 2 repeats"
            )
            not_measured.append(f"greedy control of the baseline against itself ({needs})")

    corrupted = corruption_table(run, arm=arm).filter("corrupted")
    if corrupted.height:
        row = corrupted.row(0, named=True)
        faults.append(
            f"corruption: {corrupted['prompt_id'].n_unique()} prompts end in a loop that the baseline does "
            f"not have (repeated 4-grams {row['repeated_4gram_share']:.2f} against "
            f"{row['reference_share']:.2f}) while the mean acceptance length "
            f"falls to {row['acceptance_windows'][-1]:.2f} "
            f"(request {row['request_id']})"
        )
    faults += _quality_faults(run, arm, significance, not_measured)
    found_faults, found_doubts, found_notes = _sampled_findings(
        run, arm, judged, rng, significance, not_measured
    )
    faults, doubts, notes = faults + found_faults, doubts + found_doubts, notes + found_notes
    if not greedy:
        not_measured += [
            "greedy answers (no sampling setting with temperature 0)",
            "that the arm's logits are the target's (needs greedy answers)",
        ]
        asked = own["prompt_id"].n_unique()
        found = took.filter(pl.col("sampling").is_in(judged))
        facts["num_prompts"], drafts_in = _prompts_with_drafts(found, activity)
        notes += [drafts_in] if drafts_in else []
        if facts["num_prompts"] < asked:
            notes.append(f"{asked - facts['num_prompts']} further prompts had no draft and are not counted")
        if facts["num_prompts"] < minimum_prompts:
            doubts.append(
                f"{facts['num_prompts']} distinct prompts were compared, {minimum_prompts} are needed"
            )
        if any(item.startswith("law of sampled answers") for item in not_measured):
            doubts.append("neither greedy answers nor the law of sampled ones could be judged")
    facts["not_measured"] = tuple(not_measured)
    if faults:
        return outcome("not equivalent", faults + doubts + excess + notes, **facts)
    if doubts:
        return outcome("inconclusive", doubts + excess + notes, **facts)
    if mismatched:
        reason = (
            f"{len(mismatched)} of {facts['num_prompts']} distinct prompts differ, all at a margin of at "
            f"most {threshold:g} nats or where the baseline differs from itself"
            + "".join(f"; {text}, which rounding in batched verification can cause" for text in excess)
        )
        return outcome("equivalent up to numerics", [reason, *notes], **facts)
    return outcome("equivalent", notes, **facts)


def _took_part(run: Run, arm: str, activity: pl.DataFrame) -> pl.DataFrame:
    """Answered requests of an arm, and whether a draft was verified in them, as far as anything tells.

    Returns
    -------
    pl.DataFrame
        request_id, prompt_id, sampling, concurrency, drafted (null: not known of any request of the class,
        sampling x concurrency). Beside requests whose figures are known one without figures had no draft;
        where chunks alone tell, one without a chunk of several tokens had none.
    """
    keys = ["sampling", "concurrency"]
    told = request_drafts(run).filter(pl.col("num_drafts").is_not_null())["request_id"]
    figures = run.table("acceptance")["request_id"]
    by_steps = pl.Series(dtype=pl.String) if _guessed_cells(run) else told
    several = run.table("chunks").filter(pl.col("chunk") > 0, pl.col("num_tokens") > 1)["request_id"].unique()
    known = pl.col("num_drafts") > 0
    in_figures = pl.col("request_id").is_in([*figures, *by_steps])
    return (
        run.requests.filter(pl.col("arm") == arm, pl.col("status") == "ok")
        .select("request_id", "prompt_id", *keys)
        .join(known_drafts(run), on="request_id", how="left", maintain_order="left")
        .join(activity.select(*keys, "source"), on=keys, how="left", maintain_order="left")
        .with_columns(
            drafted=pl.when((in_figures & known.is_not_null()).any().over(keys))
            .then((in_figures & known).fill_null(False))
            .when(pl.col("source") == "chunks")
            .then(pl.col("request_id").is_in(several.to_list()))
        )
        .select("request_id", "prompt_id", *keys, "drafted")
    )


def _prompts_with_drafts(rows: pl.DataFrame, activity: pl.DataFrame) -> tuple[int, str | None]:
    """Distinct prompts with a draft, at most, and `drafts in N of M requests` where N is less than M.

    Where it is not known which requests had one, there are at most as many as the class had drafts.
    """
    sure = set(rows.filter("drafted")["prompt_id"])
    unknown = rows.filter(pl.col("drafted").is_null())
    requests, prompts = rows.filter("drafted").height, len(sure)
    drafts = {
        (sampling, concurrency): count or 0
        for sampling, concurrency, count in activity.select(
            "sampling", "concurrency", "num_drafts"
        ).iter_rows()
    }
    possible: set[str] = set()
    most = 0
    for key, group in unknown.group_by("sampling", "concurrency", maintain_order=True):
        most += min(group.height, drafts.get((str(key[0]), int(str(key[1]))), 0))
        possible |= set(group["prompt_id"]) - sure
    requests, prompts = requests + most, prompts + min(len(possible), most)
    if requests >= rows.height:
        return prompts, None
    return prompts, f"drafts in {'at most ' if most else ''}{requests} of {rows.height} requests"


def _activity_findings(
    activity: pl.DataFrame, silent: Sequence[str], greedy: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Doubts and notes on where drafts were verified: which settings and loads are left out, and why."""
    doubts, notes = [], []
    unknown = activity.filter(pl.col("active").is_null())
    deciding = activity.filter(pl.col("sampling").is_in(list(greedy))) if greedy else activity
    if unknown.height and not deciding["active"].any():
        doubts.append(
            "it is not known whether anything was drafted, so equal answers may be the target's alone: "
            f"{unknown['reason'][0]}"
        )
    elif unknown.height:
        notes.append(f"it is not known whether anything was drafted at {_loads(unknown)}")
    if silent:
        notes.append(f"no draft was verified under {', '.join(silent)}, which is left out")
    off = activity.filter(~pl.col("active"), ~pl.col("sampling").is_in(list(silent)))
    if off.height:
        notes.append(f"no draft was verified at {_loads(off)}, which is left out")
    return doubts, notes


def _loads(activity: pl.DataFrame) -> str:
    return ", ".join(
        f"concurrency {concurrency} ({sampling})"
        for sampling, concurrency in activity.select("sampling", "concurrency").iter_rows()
    )


def _why_unknown(run: Run, rows: Sequence[Mapping[str, Any]]) -> str:
    """Why the margins of these pairs are not known, most frequent reason first."""
    on_server = run.plan.engine.kind not in IN_PROCESS
    reasons: Counter[str] = Counter()
    for row in rows:
        if row["compared"] == "text":
            reasons["only texts were compared"] += 1
        elif row["margin_source"] == "lower bound":
            reasons["the arm's token may be of any rank"] += 1
        elif row["token_id"] is None or row["reference_token_id"] is None:
            reasons["one of the two answers had ended"] += 1
        elif run.plan.workload.nonce:
            reasons["workload.nonce changes the prompt, so the target can't be asked again"] += 1
        elif on_server:
            reasons["the baseline's server gave no log probabilities there"] += 1
        else:
            reasons["no log probabilities were recorded there"] += 1
    return "; ".join(f"{text}: {count} pairs" for text, count in reasons.most_common())


def _control_notes(run: Run, arm: str, pairs: pl.DataFrame, control: pl.DataFrame) -> list[str]:
    notes = []
    own = _mismatched_prompts(greedy_pairs(run, arm=arm, reference=arm))
    base = _mismatched_prompts(control)
    if own:
        total = pairs["prompt_id"].n_unique()
        notes.append(f"{arm} differs from itself on {len(own)} of {total} distinct prompts")
    if base:
        notes.append(f"the baseline differs from itself on {len(base)} of {control['prompt_id'].n_unique()}")
    return notes


def _beside_control(
    pairs: pl.DataFrame, control: pl.DataFrame
) -> list[tuple[tuple[str, int], tuple[int, int, int, int], float | None]]:
    """By sampling setting and concurrency that has a control: mismatches and prompts of arm and control, and
    Fisher's p where the arm has the larger share of mismatches (else None).
    """
    controls = {
        (row["sampling"], row["concurrency"]): row for row in _first_pairs(control).iter_rows(named=True)
    }
    found = []
    for row in _first_pairs(pairs).iter_rows(named=True):
        key = (row["sampling"], row["concurrency"])
        if key not in controls:
            continue
        other = controls[key]
        counts = (row["num_mismatched"], row["n"], other["num_mismatched"], other["n"])
        more = counts[0] / counts[1] > counts[2] / counts[3]
        found.append((key, counts, fisher_p_value(*counts) if more else None))
    return found


def _excess(pairs: pl.DataFrame, control: pl.DataFrame, significance: float) -> tuple[list[str], list[str]]:
    """Where more prompts differ than in the control: told where all splits are near ties, else doubted."""
    told: list[str] = []
    doubts: list[str] = []
    for (sampling, concurrency), counts, p in _beside_control(pairs, control):
        if p is None or p >= significance:
            continue
        here = pairs.filter(pl.col("sampling") == sampling, pl.col("concurrency") == concurrency)
        open_question = {"clear", "unknown"} & set(here["split_class"])
        (doubts if open_question else told).append(
            f"excess mismatch at concurrency {concurrency}: {counts[0]} of {counts[1]} "
            f"prompts against {counts[2]} of {counts[3]} in the control (Fisher p {p:.2g})"
        )
    return told, doubts


def _excused(
    pairs: pl.DataFrame, control: pl.DataFrame, significance: float
) -> tuple[dict[tuple[str, int], tuple[str, ...]], list[str], list[str]]:
    """Split classes that prove nothing, by sampling setting and concurrency; doubts and notes on them.

    Where the baseline differs from itself as often as from the arm, splits of unknown margin are no
    evidence against the arm, and clear ones are none unless the baseline's own are all known to be near
    ties. Above the lowest concurrency batching explains that, and the lowest one judges; at the lowest
    nothing is left to judge by.
    """
    excused: dict[tuple[str, int], tuple[str, ...]] = {}
    doubts: list[str] = []
    notes: list[str] = []
    lowest = dict(pairs.group_by("sampling").agg(pl.col("concurrency").min()).iter_rows())
    for key, counts, p in _beside_control(pairs, control):
        if not counts[2] or (p is not None and p < significance):
            continue
        here = (pl.col("sampling") == key[0]) & (pl.col("concurrency") == key[1])
        unsettled = bool({"clear", "unknown"} & set(control.filter(here)["split_class"]))
        if key[1] > lowest[key[0]]:
            excused[key] = ("clear", "unknown") if unsettled else ("unknown",)
            notes.append(
                f"at concurrency {key[1]} the baseline differs from itself on {counts[2]} of {counts[3]} "
                f"prompts and from the arm on {counts[0]} of {counts[1]}: batching, judged at "
                f"concurrency {lowest[key[0]]}"
            )
        elif unsettled:
            excused[key] = ("clear", "unknown")
            doubts.append(
                f"the baseline itself is unstable: at concurrency {key[1]} {counts[2]} of {counts[3]} "
                f"prompts differ in the control, {counts[0]} of {counts[1]} against the arm"
            )
    return excused, doubts, notes


def _quality_faults(run: Run, arm: str, significance: float, not_measured: list[str]) -> list[str]:
    """Effects: adds to `not_measured` where nothing is graded."""
    table = quality_table(run, arm=arm)
    if table.is_empty():
        not_measured.append("scores (no graded prompts)")
    return [
        f"scores fall under {row['sampling']} at concurrency {row['concurrency']}: "
        f"{row['num_arm_right']} of {row['n']} right against {row['num_baseline_right']} "
        f"(discordant {row['num_only_baseline_right']}:{row['num_only_arm_right']}, "
        f"McNemar p {row['p_value']:.2g})"
        for row in table.iter_rows(named=True)
        if row["p_holm"] is not None
        and row["p_holm"] < significance
        and row["num_only_baseline_right"] > row["num_only_arm_right"]
    ]


def _sampled_findings(
    run: Run,
    arm: str,
    judged: Sequence[str],
    rng: np.random.Generator,
    significance: float,
    not_measured: list[str],
) -> tuple[list[str], list[str], list[str]]:
    """Faults, doubts and notes of the tests on sampled answers.

    Effects: adds to `not_measured` where the law could not be tested.
    """
    faults: list[str] = []
    doubts: list[str] = []
    notes: list[str] = []
    tests = sampled_tests(run, arm=arm, rng=rng).filter(pl.col("sampling").is_in(judged))
    law = tests.filter(pl.col("test") == "pit_uniform")
    if law["p_value"].null_count() == law.height:
        why = "nothing was sampled" if law.is_empty() else law["reason"][0]
        not_measured.append(f"law of sampled answers ({why})")
    control = {
        row["sampling"]: row["p_value"]
        for row in tests.filter(pl.col("test") == "pit_uniform_control").iter_rows(named=True)
    }
    for row in tests.filter(pl.col("test") != "pit_uniform_control").iter_rows(named=True):
        if row["p_holm"] is None:
            notes.append(f"{row['test']} under {row['sampling']} was not tested: {row['reason']}")
            continue
        if row["p_holm"] >= significance:
            continue
        text = (
            f"sampled answers under {row['sampling']} fail the {row['test']} test "
            f"(statistic {row['statistic']:.3g}, p {row['p_holm']:.2g} after Holm, "
            f"{row['n_clusters']} prompts)"
        )
        base = control.get(row["sampling"])
        if row["test"] == "pit_uniform" and base is not None and base < significance:
            doubts.append(
                f"{text}, but so does the baseline (p {base:.2g}): the recorded law is not the one used"
            )
        else:
            faults.append(text)
    return faults, doubts, notes


def cached_share(requests: pl.DataFrame) -> float | None:
    """Share of prompt tokens that a prefix cache served, in [0, 1], over requests for which it is known."""
    known = requests.filter(pl.col("num_cached_tokens").is_not_null(), pl.col("num_prompt_tokens") > 0)
    if known.is_empty():
        return None
    cached, total = known.select(pl.col("num_cached_tokens", "num_prompt_tokens").sum()).row(0)
    return float(cached / total)


def _answers(requests: pl.DataFrame, greedy: Collection[str] | None) -> pl.DataFrame:
    frame = requests.filter(pl.col("status") == "ok")
    return frame if greedy is None else frame.filter(pl.col("sampling").is_in(list(greedy)))


_SHARED: Final = ("output_token_ids", "output_text", "finish_reason", "request_id", "repeat", "arm")


def _paired(answers: pl.DataFrame, *, arm: str, reference: str) -> list[dict[str, Any]]:
    """Pairs of answers: two arms in the same repeat, or one arm's later repeats against its first."""
    keys = ["sampling", "concurrency", "prompt_id"]
    left = answers.filter(pl.col("arm") == arm)
    right = answers.filter(pl.col("arm") == reference).select(
        *keys, *(pl.col(name).alias(f"reference_{name}") for name in _SHARED)
    )
    wanted = pl.col("repeat") == pl.col("reference_repeat")
    if arm == reference:
        right = right.filter(pl.col("reference_repeat") == pl.col("reference_repeat").min().over(keys))
        wanted = pl.col("repeat") > pl.col("reference_repeat")
    pairs = left.join(right, on=keys, maintain_order="left_right").filter(wanted)
    return pairs.with_columns(reference_concurrency=pl.col("concurrency")).to_dicts()


def _paired_across(answers: pl.DataFrame) -> list[dict[str, Any]]:
    keys = ["sampling", "prompt_id", "repeat"]
    lowest = answers.filter(pl.col("concurrency") == pl.col("concurrency").min().over("sampling"))
    right = lowest.select(
        *keys,
        pl.col("concurrency").alias("reference_concurrency"),
        pl.col("repeat").alias("reference_repeat"),
        *(pl.col(name).alias(f"reference_{name}") for name in _SHARED if name != "repeat"),
    )
    pairs = answers.join(right, on=keys, maintain_order="left_right")
    return pairs.filter(pl.col("concurrency") > pl.col("reference_concurrency")).to_dicts()


def _difference(pair: dict[str, Any]) -> Difference:
    return compare_answers(
        pair["output_token_ids"],
        pair["reference_output_token_ids"],
        text=pair["output_text"],
        reference_text=pair["reference_output_text"],
        finish_reasons=(pair["finish_reason"], pair["reference_finish_reason"]),
    )


def _classified(run: Run, pairs: list[dict[str, Any]]) -> pl.DataFrame:
    threshold = near_tie_threshold(run)
    differences = [_difference(pair) for pair in pairs]
    places = {
        (pair[name], difference.index)
        for pair, difference in zip(pairs, differences, strict=True)
        for name in ("request_id", "reference_request_id")
        if difference.kind == "differs" and difference.index is not None
    }
    # A nonce is not kept with the answers, so the target was asked about another prompt.
    judged = {} if run.plan.workload.nonce else _judged_margins(run)
    tokens = _token_facts(run, places)
    drafts = dict(known_drafts(run).iter_rows())
    rows = []
    for pair, difference in zip(pairs, differences, strict=True):
        margin: float | None = None
        source: str | None = None
        name = difference.kind
        if difference.kind == "differs":
            fp64 = None
            if pair["concurrency"] == pair["reference_concurrency"]:
                margin, fp64 = judged.get(tuple(pair[key] for key in schema.SPLITS.key), (None, None))
                source = "judged again" if margin is not None or fp64 is not None else None
            if source is None:
                margin, source = _margin_from_tokens(
                    tokens.get((pair["reference_request_id"], difference.index)),
                    tokens.get((pair["request_id"], difference.index))
                    if difference.token_id is not None
                    else None,
                )
            name = classify_margin(margin, fp64, near_tie_nats=threshold, lower_bound=source == "lower bound")
            known = [value for value in (margin, fp64) if value is not None]
            margin = max(known, key=abs) if known else None
        rows.append(
            {
                **{key: pair[key] for key in _PAIR_SCHEMA if key in pair},
                "num_drafts": drafts.get(pair["request_id"]),
                "compared": "text"
                if pair["output_token_ids"] is None or pair["reference_output_token_ids"] is None
                else "ids",
                "identical": difference.kind == "identical",
                "index": difference.index,
                "token_id": difference.token_id,
                "reference_token_id": difference.reference_token_id,
                "split_class": name,
                "margin_nats": margin,
                "margin_source": source,
            }
        )
    return pl.DataFrame(rows, schema=_PAIR_SCHEMA, orient="row")


def _judged_margins(run: Run) -> dict[tuple[Any, ...], tuple[float | None, float | None]]:
    splits = run.table("splits")
    return {
        tuple(row[key] for key in schema.SPLITS.key): (row["margin_nats"], row["margin_fp64_nats"])
        for row in splits.iter_rows(named=True)
    }


def _token_facts(
    run: Run, places: Collection[tuple[str, int]]
) -> dict[tuple[str, int | None], tuple[float, float]]:
    """(log probability, top-1/top-2 margin) at the given (request, index); degenerate requests left out."""
    if not places or not run.has("tokens"):
        return {}
    requests = sorted({request for request, _ in places})
    tokens = run.table("tokens").filter(pl.col("request_id").is_in(requests))
    tokens = tokens.filter(~pl.col("request_id").is_in(degenerate_logprobs(tokens)))
    return {
        (request, index): (logprob, margin)
        for request, index, logprob, margin in tokens.select(
            "request_id", "index", "logprob", "top1_top2_margin"
        ).iter_rows()
        if (request, index) in places
    }


def _margin_from_tokens(
    reference: tuple[float, float] | None, own: tuple[float, float] | None
) -> tuple[float | None, str | None]:
    if reference is None:
        return None, None
    if own is not None:
        return reference[0] - own[0], "logprobs"
    return reference[1], "lower bound"


def _mismatched_prompts(pairs: pl.DataFrame) -> set[str]:
    return set(pairs.filter(~pl.col("split_class").is_in(SAME_TEXT))["prompt_id"])


def _first_by_prompt(pairs: pl.DataFrame) -> pl.DataFrame:
    """One pair a prompt: lowest concurrency, then lowest repeat."""
    return pairs.sort("concurrency", "repeat", maintain_order=True).unique(
        "prompt_id", keep="first", maintain_order=True
    )


def _first_pairs(pairs: pl.DataFrame) -> pl.DataFrame:
    """Per sampling and concurrency: distinct prompts, mismatches on their first pair, and all pairs."""
    keys = ["sampling", "concurrency"]
    differs = ~pl.col("split_class").is_in(SAME_TEXT)
    first = pairs.sort("repeat", maintain_order=True).unique(
        [*keys, "prompt_id"], keep="first", maintain_order=True
    )
    per_prompt = first.group_by(keys, maintain_order=True).agg(
        n=pl.len().cast(pl.Int64), num_mismatched=differs.sum().cast(pl.Int64)
    )
    per_pair = pairs.group_by(keys, maintain_order=True).agg(
        num_pairs=pl.len().cast(pl.Int64), num_mismatched_pairs=differs.sum().cast(pl.Int64)
    )
    return per_prompt.join(per_pair, on=keys, maintain_order="left").sort(keys)


def _pit(tokens: pl.DataFrame, rng: np.random.Generator) -> NDArray[np.float64]:
    low, high = tokens["cdf_low"].to_numpy(), tokens["cdf_high"].to_numpy()
    return np.asarray(np.clip(low + rng.random(len(low)) * (high - low), 0.0, 1.0), dtype=np.float64)


def _pit_test(
    tokens: pl.DataFrame | None, arm: str, sampling: str, rng: np.random.Generator, num_resamples: int
) -> dict[str, Any]:
    method = "Kolmogorov distance, sign flips of prompts"
    empty = {"statistic": None, "p_value": None, "n": 0, "n_clusters": 0, "method": method}
    if tokens is None:
        return {**empty, "reason": "the engine does not tell the law of its tokens"}
    own = tokens.filter(pl.col("arm") == arm, pl.col("sampling") == sampling, pl.col("cdf_low").is_not_null())
    if own.is_empty():
        return {**empty, "reason": "no cumulative masses were recorded"}
    values = _pit(own, rng)
    prompts, cluster = np.unique(own["prompt_id"].to_numpy(), return_inverse=True)
    facts = {
        "statistic": float(scipy_stats.kstest(values, "uniform").statistic),
        "n": len(values),
        "n_clusters": len(prompts),
        "method": method,
    }
    if len(prompts) < MINIMUM_TEST_PROMPTS:
        return {**facts, "p_value": None, "reason": f"fewer than {MINIMUM_TEST_PROMPTS} prompts"}
    grid = np.linspace(0.01, 0.99, 99)
    # One column at a time: all at once would need a number for every token and grid point.
    columns = [np.bincount(cluster, weights=(values <= point) - point) for point in grid]
    process = np.stack(columns, axis=-1)  # shape: [num_prompts, num_grid]
    observed = np.abs(process.sum(axis=0)).max()
    signs = rng.choice(np.array([-1.0, 1.0]), size=(num_resamples, len(prompts)))
    flipped = np.abs(signs @ process).max(axis=1)
    p_value = (1 + int((flipped >= observed * (1 - 1e-12)).sum())) / (1 + num_resamples)
    return {**facts, "p_value": p_value, "reason": None}


def _paired_test(
    values: pl.DataFrame,
    arm: str,
    baseline: str,
    rng: np.random.Generator,
    num_resamples: int,
    missing: str,
) -> dict[str, Any]:
    method = "per-prompt means, sign-flip permutation"
    means = values.group_by("arm", "prompt_id", maintain_order=True).agg(pl.col("value").mean())
    pairs = (
        means.filter(pl.col("arm") == arm)
        .join(means.filter(pl.col("arm") == baseline), on="prompt_id", suffix="_reference")
        .sort("prompt_id")
    )
    n = values.filter(pl.col("arm") == arm).height
    if pairs.is_empty():
        return {
            "statistic": None,
            "p_value": None,
            "n": n,
            "n_clusters": 0,
            "method": method,
            "reason": missing,
        }
    difference = (pairs["value"] - pairs["value_reference"]).to_numpy()
    facts = {"statistic": float(difference.mean()), "n": n, "n_clusters": len(difference), "method": method}
    if len(difference) < MINIMUM_TEST_PROMPTS:
        return {**facts, "p_value": None, "reason": f"fewer than {MINIMUM_TEST_PROMPTS} prompts"}
    if not difference.any():
        return {**facts, "p_value": 1.0, "reason": None}
    found = scipy_stats.permutation_test(
        (difference,),
        lambda sample, axis: sample.mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=num_resamples,
        rng=rng,
    )
    return {**facts, "p_value": float(found.pvalue), "reason": None}
