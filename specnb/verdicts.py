"""Claims and verdicts: what a run says, as sentences with their evidence and machine-readable.

Each claim is supported, not supported or inconclusive; the final verdict is adopt, adopt up
to concurrency N, canary first, do not adopt, or inconclusive. Every one can come out
either way. Reads runs through the estimators below it; imports no engine, no chart and no
notebook, so that the same code serves the report, the gate and CI.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import polars as pl
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specnb.acceptance import suffix_decay
from specnb.checks import contradictions, once
from specnb.config import Arm
from specnb.cost import WEIGHTLESS, paired_yield
from specnb.equivalence import (
    GUESSED_STEPS,
    LOSSY_METHODS,
    Outcome,
    cached_share,
    draft_activity,
    judge_equivalence,
    near_tie_threshold,
    not_comparable,
    refusal,
    setting_differences,
    speculating_arms,
)
from specnb.errors import PlanError
from specnb.latency import latency_quantiles, speedup_table
from specnb.prometheus import INACTIVE
from specnb.reconciliation import IN_PROCESS, client_limited_cells, prefix_cache_table, server_tokens
from specnb.records import Run
from specnb.schema import ENTROPY_TIERS
from specnb.stats import Estimate, cluster_bootstrap, cluster_sums, wilson_estimate

VERDICT_SCHEMA_VERSION: Final = 1
CLAIM_VERDICTS: Final = ("supported", "not supported", "inconclusive")
FINAL_VERDICTS: Final = (
    "adopt",
    "adopt up to concurrency N",
    "canary first",
    "do not adopt",
    "inconclusive",
)
EXIT_ADOPT: Final = 0
EXIT_DO_NOT_ADOPT: Final = 1
EXIT_UNDECIDED: Final = 3

NEVER_SERVED: Final = ("server_start", "connect")
"""`error_kind` of requests that no server has ever seen."""
SPEEDUP_QUESTION: Final = "Is it faster than the target alone, and up to which concurrency?"
EQUIVALENCE_QUESTION: Final = "Are its answers those of the target alone?"
NO_ANSWER: Final = "no answer from this run, because "
REPEATS_APART: Final = 2.0
"""Factor between the ratios of two repeats from which they are no repeats of one measurement."""

Rate = Annotated[float, Field(ge=0, le=1)]


class Policy(BaseModel):
    """Thresholds of every verdict. Read one from YAML with `read_policy`; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    arm: str | None = Field(default=None, description="arm that the gate judges; null: every arm must pass")
    target_concurrency: int | None = Field(
        default=None, ge=1, description="concurrency that must be reached; null: any that was measured"
    )
    minimum_speedup: float = Field(
        default=1.05, gt=0, description="the lower end of the speedup's interval must reach it"
    )
    minimum_prompts: int = Field(
        default=20, ge=5, description="distinct prompts below which nothing is adopted"
    )
    minimum_repeats: int = Field(default=2, ge=1, description="repeats below which a canary comes first")
    max_error_rate: Rate = Field(default=0.01, description="largest share of failed requests of the arm")
    max_tail_ratio: float = Field(
        default=1.2, gt=0, description="largest P95 of end-to-end latency, arm over baseline"
    )
    max_length_drift: float = Field(
        default=0.1, gt=0, description="largest deviation of the output-length ratio from 1"
    )
    negligible_slope: float = Field(
        default=0.02, ge=0, description="logits per position: a trend above minus this is no decay"
    )
    negligible_hit_rate_gap: float = Field(
        default=0.02, ge=0, description="a fall of the hit rate below this is no fall"
    )
    significance: float = Field(default=0.01, gt=0, lt=1, description="level of the equivalence tests")
    level: float = Field(default=0.95, gt=0, lt=1, description="coverage of every interval")
    seed: int = Field(default=0, ge=0, description="of resampling")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One question about one arm, its answer and the evidence.

    Attributes
    ----------
    arm
        Arm it is about.
    question
        The question, ending in "?".
    verdict
        One of `CLAIM_VERDICTS`, `equivalence.OUTCOMES` or `FINAL_VERDICTS` (with its number).
    sentence
        One sentence that names arm, estimate, interval, n, threshold and concurrency.
    estimate
        The number judged; None where there is none.
    threshold
        What it was compared with; None where no number decides.
    n
        Denominator of the estimate.
    chart
        Short name of the claim in charts: suffix decay, entropy, speedup, equivalence, drafters, verdict.
    reasons
        Further facts that decided, worst first.
    max_concurrency
        Largest concurrency up to which the claim holds; None where that has no meaning.
    not_measured
        What the question would also need and the run does not hold.
    by_load
        The estimate at every sampling setting and concurrency, where the claim has them.
    """

    arm: str
    question: str
    verdict: str
    sentence: str
    estimate: Estimate | None
    threshold: float | None
    n: int
    chart: str
    reasons: tuple[str, ...] = ()
    max_concurrency: int | None = None
    not_measured: tuple[str, ...] = field(default=())
    by_load: tuple[tuple[str, int, Estimate], ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.question.endswith("?"):
            raise ValueError(f"question {self.question!r} does not end in '?'")
        if not self.sentence.endswith("."):
            raise ValueError(f"sentence {self.sentence!r} does not end in '.'")

    def _repr_markdown_(self) -> str:
        reasons = "".join(f"\n- {reason}" for reason in self.reasons)
        return f"**{self.verdict}**: {self.sentence}" + (f"\n{reasons}" if reasons else "")

    def as_dict(self) -> dict[str, Any]:
        """The claim as strict JSON content."""
        return {
            "question": self.question,
            "claim": self.chart,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "estimate": self.estimate.as_row() if self.estimate else None,
            "threshold": self.threshold,
            "n": self.n,
            "reasons": list(self.reasons),
        }


def read_policy(path: Path | str) -> Policy:
    """The policy in a YAML file, validated as strictly as a plan.

    Raises
    ------
    PlanError
        Missing or bad file, unknown key, wrong type or range; one line with file and key.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"{path}: can't read the policy ({error.strerror}); give the path of a YAML file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: not valid YAML ({str(error).splitlines()[0]})") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise PlanError(f"{path}: a policy is a mapping of keys ({', '.join(Policy.model_fields)})")
    try:
        return Policy.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            close = difflib.get_close_matches(key, Policy.model_fields, n=1, cutoff=0.5)
            hint = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(Policy.model_fields)}"
            raise PlanError(f"{path}: unknown key '{key}'; {hint}") from error
        raise PlanError(f"{path}: {key}: {problem['msg']}, got {problem['input']!r}") from error


def suffix_decay_verdict(run: Run, policy: Policy | None = None) -> tuple[Claim, ...]:
    """Whether later drafts in a block are accepted less often, given that they are reached; one claim an arm.

    Supported if the whole interval of the logit slope is below 0; not supported if all of it is above
    `-negligible_slope`; refused if acceptance was an input of a modelled run; else inconclusive. Blocks of
    all texts are pooled, so that a slope above 0 can come from easy texts alone reaching the later
    positions. Judged on the first sampling setting in which the arm drafted.

    Parameters
    ----------
    run
        A run.
    policy
        Thresholds; defaults if None.
    """
    policy = policy or Policy()
    question = "Does the chance of acceptance fall along the draft block?"
    claims = []
    activity = once(run, draft_activity)
    for arm in speculating_arms(run.plan):
        if given := _given_acceptance(run, arm):
            claims.append(_refused(arm.name, question, "suffix decay", given))
            continue
        problem = _unusable(run, arm)
        steps = _drafted_steps(run, arm.name, activity)
        if problem or steps.is_empty():
            reason = problem or _no_steps(run, arm.name, activity)
            claims.append(_without_estimate(arm.name, question, "suffix decay", reason))
            continue
        sampling = steps["sampling"][0]
        steps = steps.filter(pl.col("sampling") == sampling)
        rng = _generator(policy, "suffix decay", arm.name)
        row = suffix_decay(steps, by=(), level=policy.level, rng=rng).row(0, named=True)
        estimate = _estimate(row)
        reached = (
            f"{estimate.n:,} draft positions that were reached, of {estimate.n_clusters} prompts "
            f"({sampling}, {_concurrency(run, steps)}"
        )
        if estimate.value is None:
            reason = f"no slope can be fitted to {reached}): {estimate.reason}"
            claims.append(_without_estimate(arm.name, question, "suffix decay", reason))
            continue
        verdict = _falls(estimate, minimum_gap=policy.negligible_slope)
        said = {
            "supported": "later drafts are accepted less often",
            "not supported": "no fall was seen in the pooled blocks",
            "inconclusive": "the data do not show whether later drafts are accepted less often",
        }[verdict]
        if estimate.low is not None and estimate.low > 0:
            said = (
                "among blocks that get that far, later drafts are accepted more often (easy text survives "
                "longer, so this is no evidence against decay inside a text)"
            )
        claims.append(
            Claim(
                arm=arm.name,
                question=question,
                verdict=verdict,
                sentence=(
                    f"{arm.name}: {said}: the logit of the conditional acceptance rate changes by "
                    f"{_number(estimate, '+.3f')} a position over {reached}; decay is supported below 0 and "
                    f"ruled out above {-policy.negligible_slope:g})."
                ),
                estimate=estimate,
                threshold=0.0,
                n=estimate.n,
                chart="suffix decay",
                reasons=(*_estimate_reasons(estimate), *_guessed(run, steps)),
            )
        )
    return tuple(claims)


def entropy_verdict(run: Run, policy: Policy | None = None) -> tuple[Claim, ...]:
    """Whether drafts hit less often where the target is less certain; one claim an arm.

    The estimate is the conditional acceptance rate in the lower half of the target's entropies minus that
    in the upper half (halves of the arm's tried tokens; without a tokens table, the lowest entropy tier
    against the highest; tiers are labels of prompts, not measured). Supported if its interval is above 0;
    not supported if it is below `negligible_hit_rate_gap`; refused if acceptance was an input of a
    modelled run; else inconclusive.

    Parameters
    ----------
    run
        A run.
    policy
        Thresholds; defaults if None.
    """
    policy = policy or Policy()
    question = "Do drafts hit less often where the target is less certain?"
    claims = []
    activity = once(run, draft_activity)
    for arm in speculating_arms(run.plan):
        if given := _given_acceptance(run, arm):
            claims.append(_refused(arm.name, question, "entropy", given))
            continue
        problem = _unusable(run, arm)
        tried, certain, rest = _tried_by_certainty(run, arm.name, activity)
        if problem or tried.is_empty():
            reason = problem or certain or _no_steps(run, arm.name, activity)
            claims.append(_without_estimate(arm.name, question, "entropy", reason))
            continue
        estimate = _hit_rate_gap(tried, policy, _generator(policy, "entropy", arm.name))
        verdict = _rises(estimate, minimum_gap=policy.negligible_hit_rate_gap)
        said = {
            "supported": "drafts hit less often where the target is less certain",
            "not supported": "drafts hit as often where the target is less certain",
            "inconclusive": "the data do not show whether certainty of the target matters",
        }[verdict]
        rates = tried.group_by("certain").agg(
            pl.col("num_hits").sum(),
            pl.col("num_tried").sum(),
            rate=pl.col("num_hits").sum() / pl.col("num_tried").sum(),
        )
        rate = dict(rates.select("certain", "rate").iter_rows())
        claims.append(
            Claim(
                arm=arm.name,
                question=question,
                verdict=verdict,
                sentence=(
                    f"{arm.name}: {said}: the hit rate is {_rate(rate.get(True))} in the {certain} "
                    f"and {_rate(rate.get(False))} in the {rest}, a gap of {_number(estimate, '+.3f')} over "
                    f"{estimate.n:,} tried tokens of {estimate.n_clusters} prompts "
                    f"({_concurrency(run, tried)}; supported above 0, ruled out below "
                    f"{policy.negligible_hit_rate_gap:g})."
                ),
                estimate=estimate,
                threshold=0.0,
                n=estimate.n,
                chart="entropy",
                reasons=_estimate_reasons(estimate),
            )
        )
    return tuple(claims)


def speedup_verdict(run: Run, policy: Policy | None = None) -> tuple[Claim, ...]:
    """Whether an arm is faster than the baseline, and up to which concurrency; one claim an arm.

    At each concurrency the headline speedup (ratio of totals, all entropy tiers pooled) is judged in
    every sampling setting measured there, and the worst lower end counts. `max_concurrency` is the
    largest N such that at every measured concurrency up to N that end reaches `minimum_speedup`.
    Supported if the concurrency in question (`target_concurrency`, else the lowest measured) is within
    it; not supported if there the whole interval of some setting is below `minimum_speedup`; else
    inconclusive. The estimate of a supported claim is the one with the worst lower end up to
    `max_concurrency`, whatever the concurrency in question.

    A concurrency is not judged, and named, if no repeat of it is fit for timing (`unfit_cells`), if the
    baseline answered nothing at it or if fewer than `minimum_prompts` prompts took part; then the next one is
    the lowest. Where the arm failed (the interval of its error rate is above `max_error_rate`), nothing is
    certified at it or above. The time of failed requests is in the ratio and their tokens are not, so that
    failures of the baseline raise it: where they are too many (the same rule) the load is not judged. Nor is
    it where tokens a second and paired times per output token lie on opposite sides of 1, interval and all.
    Prompts of the same text count once. In an open loop arrivals set the throughput, so that nothing is
    judged; nor is anything if the records contradict themselves (`checks.contradictions`).

    Parameters
    ----------
    run
        A run.
    policy
        Thresholds; defaults if None.
    """
    policy = policy or Policy()
    claims = []
    activity, unfit = once(run, draft_activity), unfit_cells(run)
    for arm in speculating_arms(run.plan):
        problem = next(iter(_contradictions(run, arm.name)), None) or _unusable(run, arm)
        if problem:
            claims.append(_without_estimate(arm.name, SPEEDUP_QUESTION, "speedup", problem))
            continue
        claims.append(_speedup_claim(run, arm, activity, unfit, policy))
    return tuple(claims)


def drafter_verdict(run: Run, policy: Policy | None = None) -> tuple[Claim, ...]:
    """Whether each drafter with weights yields more than one without, in every entropy tier.

    Tokens per target step of the arm and of the run's first drafter without weights (prompt lookup), on
    the prompts that both answered, in the first sampling setting that both have. Supported if the whole
    interval of the difference is above 0 in every tier; not supported if it is below 0 in one; refused
    if acceptance was an input of a modelled run; else inconclusive.

    Parameters
    ----------
    run
        A run.
    policy
        Thresholds; defaults if None.
    """
    policy = policy or Policy()
    question = "Does it give more tokens a target step than a drafter without weights, in every tier?"
    arms = speculating_arms(run.plan)
    references = [arm.name for arm in arms if arm.speculative and arm.speculative.method in WEIGHTLESS]
    weighted = [arm for arm in arms if arm.name not in references]
    if not weighted:
        reason = "the run holds no drafter with weights to judge"
        return tuple(_without_estimate(name, question, "drafters", reason) for name in references[:1])
    return tuple(_drafter_claim(run, arm, references, question, policy) for arm in weighted)


def unfit_cells(run: Run) -> pl.DataFrame:
    """Cells of a server run whose times measure something else than the server at their load.

    Returns
    -------
    pl.DataFrame
        Grain: cell x kind. Columns: cell_id, arm, concurrency, sampling, repeat, kind: `client_limited` (the
        client set the pace), `prefix_cache` (prompts came from an earlier cell's cache, or another share
        of them than in the baseline), `foreign_traffic` (the server generated more tokens than were
        asked for here) or `lost_tokens` (fewer: another process answered); reason. Empty for in-process
        engines.
    """
    return once(run, _unfit_cells)


def _unfit_cells(run: Run) -> pl.DataFrame:
    found = [
        *((cell, "client_limited", reason) for cell, reason in _reasons(client_limited_cells(run))),
        *(
            (cell, "prefix_cache", reason)
            for cell, reason in _reasons(prefix_cache_table(run).filter("contaminated"))
        ),
        *(
            (cell, reason.partition(":")[0], reason)
            for cell, reason in _reasons(once(run, server_tokens).filter(~pl.col("agrees")))
        ),
    ]
    by_id = {cell["cell_id"]: cell for cell in run.cells}
    names = ("arm", "concurrency", "sampling", "repeat")
    return pl.DataFrame(
        [
            (cell, *(by_id[cell][name] for name in names), kind, reason.partition(": ")[2] or reason)
            if kind != "prefix_cache"
            else (cell, *(by_id[cell][name] for name in names), kind, reason)
            for cell, kind, reason in found
        ],
        schema={
            "cell_id": pl.String,
            "arm": pl.String,
            "concurrency": pl.Int64,
            "sampling": pl.String,
            "repeat": pl.Int64,
            "kind": pl.String,
            "reason": pl.String,
        },
        orient="row",
    )


def fit_requests(run: Run, *, unfit: pl.DataFrame | None = None) -> pl.DataFrame:
    """Requests from which speedups may be taken: all, less those of `unfit_cells` and of their partners.

    A repeat at one sampling setting and concurrency is dropped whole, tiers together, so that arms and
    repeats keep the same mix of prompts; if it is the baseline's, it is dropped in every arm.

    Parameters
    ----------
    run
        A run.
    unfit
        From `unfit_cells`, if it is at hand.
    """
    unfit = unfit_cells(run) if unfit is None else unfit
    place = ["concurrency", "sampling", "repeat"]
    own = unfit.select("arm", *place)
    theirs = unfit.filter(pl.col("arm") == run.plan.baseline.name).select(place)
    return run.requests.join(own, on=["arm", *place], how="anti", maintain_order="left").join(
        theirs, on=place, how="anti", maintain_order="left"
    )


def _reasons(frame: pl.DataFrame) -> list[tuple[str, str]]:
    return [(str(cell), str(reason)) for cell, reason in frame.select("cell_id", "reason").iter_rows()]


def equivalence_verdict(run: Run, policy: Policy | None = None) -> tuple[Claim, ...]:
    """Whether an arm's answers are the target's; one claim an arm, its verdict one of `equivalence.OUTCOMES`.

    Parameters
    ----------
    run
        A run.
    policy
        Thresholds; defaults if None.

    See Also
    --------
    specnb.equivalence.judge_equivalence : the rules.
    """
    policy = policy or Policy()
    activity = once(run, draft_activity)
    return tuple(_equivalence_claim(run, arm.name, activity, policy) for arm in speculating_arms(run.plan))


def final_verdict(run: Run, policy: Policy | None = None) -> tuple[Claim, ...]:
    """Whether to put an arm in front of its target; one claim an arm.

    In this order: `inconclusive` if its records contradict themselves (`checks.contradictions`), the run is
    modelled (whatever its speedups: acceptance or weights were inputs), unfinished, its arms can't be
    compared, or no server of the arm was ever there; `do not adopt` if answers are not equivalent or if the
    whole interval of the error rate is above `max_error_rate` and above the baseline's; `inconclusive` if
    nothing was drafted in the judged requests, no load is fit for timing or fewer than `minimum_prompts`
    prompts took part; `do not adopt` if the speedup is not supported; `inconclusive` if the speedup is;
    `canary first` if equivalence is inconclusive, there are fewer than `minimum_repeats` repeats fit for
    timing, errors, the latency tail or answer lengths are outside the policy, the baseline failed at a judged
    load, repeats differ by more than a factor of 2, or a load below the one reached was not judged or did not
    speculate; else `adopt`, or `adopt up to concurrency N` if the speedup was not shown at the highest
    measured concurrency.

    Parameters
    ----------
    run
        A run.
    policy
        Thresholds; defaults if None.
    """
    policy = policy or Policy()
    return _final_claims(run, speedup_verdict(run, policy), equivalence_verdict(run, policy), policy)


def verdict_json(run: Run, policy: Policy | None = None) -> dict[str, Any]:
    """The verdict of every arm as strict JSON content (`verdict_schema` describes it).

    Returns
    -------
    dict
        schema_version, run_id, status, modelled, simulated, policy, conditions, arms: for each arm
        verdict, max_concurrency, sentence, claims, reasons, not_measured. Undefined numbers are null.
    """
    policy = policy or Policy()
    speedups, equivalences = speedup_verdict(run, policy), equivalence_verdict(run, policy)
    final = _final_claims(run, speedups, equivalences, policy)
    explanations = (*suffix_decay_verdict(run, policy), *entropy_verdict(run, policy))
    # Claims come in the order of the questions: speed, equivalence, then what explains them.
    parts: dict[str, list[dict[str, Any]]] = {claim.arm: [] for claim in final}
    for claim in (*speedups, *equivalences, *explanations):
        parts[claim.arm].append(claim.as_dict())
    content = {
        "schema_version": VERDICT_SCHEMA_VERSION,
        "run_id": run.run_id,
        "status": run.status,
        "modelled": run.modelled,
        "simulated": _simulated(run),
        "policy": policy.model_dump(mode="json"),
        "conditions": _conditions(run),
        "arms": [
            {
                "arm": claim.arm,
                "verdict": claim.verdict,
                "max_concurrency": claim.max_concurrency,
                "sentence": claim.sentence,
                "claims": parts[claim.arm],
                "conditions": _arm_conditions(run, claim.arm),
                "reasons": list(claim.reasons),
                "not_measured": list(claim.not_measured),
            }
            for claim in final
        ],
    }
    json.dumps(content, allow_nan=False)
    return content


def verdict_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of `verdict_json`."""
    text = files("specnb").joinpath("verdict.schema.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def gate_exit_code(verdict: Mapping[str, Any], policy: Policy | None = None) -> int:
    """Exit code of the gate: 0 adopt, 1 do not adopt, 3 undecided.

    Parameters
    ----------
    verdict
        From `verdict_json`.
    policy
        `arm` names the arm judged (None: all must pass); `target_concurrency` must be reached by an arm's
        `max_concurrency`.

    Raises
    ------
    PlanError
        The policy names an arm that the verdict does not hold.
    """
    policy = policy or Policy()
    arms = list(verdict["arms"])
    if policy.arm is not None:
        known = ", ".join(arm["arm"] for arm in arms) or "none"
        arms = [arm for arm in arms if arm["arm"] == policy.arm]
        if not arms:
            raise PlanError(f"policy: arm '{policy.arm}' is not judged in this run; it has {known}")
    codes = [_exit_code(arm, policy) for arm in arms]
    if EXIT_DO_NOT_ADOPT in codes:
        return EXIT_DO_NOT_ADOPT
    return EXIT_ADOPT if codes and set(codes) == {EXIT_ADOPT} else EXIT_UNDECIDED


def _exit_code(arm: Mapping[str, Any], policy: Policy) -> int:
    if arm["verdict"] == "do not adopt":
        return EXIT_DO_NOT_ADOPT
    if not arm["verdict"].startswith("adopt"):
        return EXIT_UNDECIDED
    reached = policy.target_concurrency is None or (arm["max_concurrency"] or 0) >= policy.target_concurrency
    return EXIT_ADOPT if reached else EXIT_UNDECIDED


@dataclass(frozen=True, slots=True)
class _Loads:
    """What is known of each concurrency: `gaps` are not judged, at `failed` ones the arm did not hold up."""

    levels: tuple[int, ...]
    gaps: Mapping[int, str]
    failed: Mapping[int, str]

    @property
    def judged(self) -> list[int]:
        return [level for level in self.levels if level not in self.gaps and level not in self.failed]

    def problem(self, level: int) -> str | None:
        return self.gaps.get(level) or self.failed.get(level)

    def told(self, levels: Sequence[int]) -> list[str]:
        """The gaps among `levels`, those of one reason together."""
        reasons: dict[str, list[int]] = {}
        for level in levels:
            if level in self.gaps:
                reasons.setdefault(self.gaps[level], []).append(level)
        return [f"concurrency {_listed(found)} ({reason})" for reason, found in reasons.items()]


def _loads(
    run: Run, arm: str, fit: pl.DataFrame, unfit: pl.DataFrame, table: pl.DataFrame, policy: Policy
) -> _Loads:
    """Which loads are judged, from `speedup_table`'s rows of one arm."""
    baseline = run.plan.baseline.name
    pair = pl.col("arm").is_in([arm, baseline])
    requests = run.requests.filter(pair)
    gaps: dict[int, str] = {}
    failed: dict[int, str] = {}
    for (level, sampling), group in requests.group_by("concurrency", "sampling", maintain_order=True):
        level = int(str(level))
        own, other = (group.filter(pl.col("arm") == name) for name in (arm, baseline))
        if own.is_empty():
            continue
        here = (pl.col("concurrency") == level) & (pl.col("sampling") == sampling)
        share, base_share = (
            wilson_estimate(_num_failed(asked), asked.height, level=policy.level) for asked in (own, other)
        )
        if fit.filter(here, pl.col("arm") == arm).is_empty():
            cell = unfit.filter(here, pair).row(0, named=True)
            gaps[level] = f"{cell['kind']} in {cell['cell_id']}: {cell['reason'].partition(';')[0]}"
        elif share.low is not None and share.low > policy.max_error_rate:
            failed[level] = f"{_failures(own)} at concurrency {level}"
        elif _num_failed(other) == other.height:
            gaps[level] = f"the baseline answered none of its {other.height} requests there"
        elif base_share.low is not None and base_share.low > policy.max_error_rate:
            gaps[level] = (
                f"{_failures(other)} in the baseline, at most {policy.max_error_rate:.1%} may: "
                "the time that they took is in the ratio"
            )
    for level, reason in _opposed(table):
        if level not in failed:
            gaps.setdefault(level, reason)
    few: dict[int, int] = {}
    # A prompt that is asked under several ids is one prompt.
    answered = fit.filter(pl.col("arm") == arm, pl.col("status") == "ok")
    texts = answered.group_by("sampling", "concurrency").agg(pl.col("prompt_sha256").n_unique())
    headline = table.filter(pl.col("metric") == "throughput_speedup")
    headline = headline.join(texts, on=["sampling", "concurrency"], how="left", maintain_order="left")
    for row in headline.iter_rows(named=True):
        level, count = row["concurrency"], min(row["n_clusters"], row["prompt_sha256"] or 0)
        if count < policy.minimum_prompts and level not in gaps and level not in failed:
            few[level] = min(count, few.get(level, count))
    if few:
        counts = sorted({min(few.values()), max(few.values())})
        reason = f"{' to '.join(map(str, counts))} distinct prompts, {policy.minimum_prompts} are needed"
        gaps |= dict.fromkeys(few, reason)
    levels = sorted(set(requests.filter(pl.col("arm") == arm)["concurrency"]))
    return _Loads(levels=tuple(levels), gaps=gaps, failed=failed)


def _opposed(table: pl.DataFrame) -> list[tuple[int, str]]:
    """Loads at which tokens a second and the time per output token lie on opposite sides of 1."""
    on = ["sampling", "concurrency"]
    rows = table.filter(pl.col("metric") == "throughput_speedup").join(
        table.filter(pl.col("metric") == "paired_tpot_speedup"), on=on, suffix="_tpot", maintain_order="left"
    )
    apart = ((pl.col("low") > 1) & (pl.col("high_tpot") < 1)) | (
        (pl.col("high") < 1) & (pl.col("low_tpot") > 1)
    )
    return [
        (
            row["concurrency"],
            f"tokens a second are {row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}] times the "
            f"baseline's but the time per output token is {row['value_tpot']:.2f} [{row['low_tpot']:.2f}, "
            f"{row['high_tpot']:.2f}] times as short: one of the two is not the servers' pace",
        )
        for row in rows.filter(apart).iter_rows(named=True)
    ]


def _baseline_failures(fit: pl.DataFrame, baseline: str, judged: Sequence[int]) -> list[str]:
    """That the baseline failed at judged loads, which its throughput pays for."""
    own = fit.filter(pl.col("arm") == baseline, pl.col("concurrency").is_in(list(judged)))
    if not _num_failed(own):
        return []
    return [f"baseline failures: {_failures(own)}; the time that they took is in the ratio"]


def _repeats_apart(fit: pl.DataFrame, arm: str, baseline: str) -> list[str]:
    """Loads at which the ratios of two repeats differ by more than `REPEATS_APART`."""
    place = ["sampling", "concurrency", "repeat"]
    rates = (
        fit.filter(pl.col("status") == "ok")
        .group_by("arm", *place, "cell_id", maintain_order=True)
        .agg(
            tokens=pl.col("num_output_tokens").sum(),
            span_s=pl.col("last_token_s").max() - pl.col("sent_s").min(),
        )
        .group_by("arm", *place, maintain_order=True)
        .agg(rate=pl.col("tokens").sum() / pl.col("span_s").sum())
        .filter(pl.col("rate").is_finite() & (pl.col("rate") > 0))
    )
    own, other = (rates.filter(pl.col("arm") == name) for name in (arm, baseline))
    ratios = own.join(other, on=place, suffix="_baseline", maintain_order="left").with_columns(
        ratio=pl.col("rate") / pl.col("rate_baseline")
    )
    found = []
    for (sampling, level), group in ratios.group_by("sampling", "concurrency", maintain_order=True):
        group = group.sort("ratio")
        least, most = group.row(0, named=True), group.row(-1, named=True)
        if most["ratio"] > REPEATS_APART * least["ratio"]:
            found.append(
                f"repeats differ by more than a factor of {REPEATS_APART:g} ({sampling}, concurrency "
                f"{level}): {least['ratio']:.2f} times the baseline in repeat {least['repeat']}, "
                f"{most['ratio']:.2f} in repeat {most['repeat']}"
            )
    return found


def _speedup_claim(run: Run, arm: Arm, activity: pl.DataFrame, unfit: pl.DataFrame, policy: Policy) -> Claim:
    name, baseline = arm.name, run.plan.baseline.name
    pair = pl.col("arm").is_in([name, baseline])
    for who in (name, baseline):
        asked = run.requests.filter(pl.col("arm") == who)
        if _num_failed(asked) == asked.height:
            reason = f"no request of {who} was answered ({_failures(asked)})"
            return _without_estimate(name, SPEEDUP_QUESTION, "speedup", reason)
    if run.plan.load.mode == "open":
        caps = _listed(sorted(set(run.requests.filter(pl.col("arm") == name)["concurrency"])))
        reason = (
            "an open loop's throughput is its arrival rate; compare TTFT, TPOT and end-to-end times "
            f"(its concurrency, {caps}, is a cap)"
        )
        return _without_estimate(name, SPEEDUP_QUESTION, "speedup", reason)
    fit = fit_requests(run, unfit=unfit).filter(pair)
    if fit.filter(pl.col("status") == "ok")["arm"].n_unique() < 2:
        first = unfit.filter(pair)["kind"][0] if unfit.filter(pair).height else "failures"
        cells = unfit.filter(pair)
        reason = f"no load is fit for timing: {first}"
        if cells.height:
            reason += f" in {cells['cell_id'][0]}: {cells['reason'][0].partition(';')[0]}"
        return _without_estimate(name, SPEEDUP_QUESTION, "speedup", reason)
    table = speedup_table(
        fit,
        baseline=baseline,
        by=("arm", "sampling", "concurrency"),
        level=policy.level,
        rng=_generator(policy, "speedup", name),
    )
    headline = table.filter(pl.col("metric") == "throughput_speedup").sort("concurrency", maintain_order=True)
    loads = _loads(run, name, fit, unfit, table, policy)
    judged = policy.target_concurrency or next(
        (level for level in loads.levels if level not in loads.gaps), loads.levels[0]
    )
    if judged not in loads.levels:
        reason = f"concurrency {judged} was not measured ({', '.join(map(str, loads.levels))} were)"
        return _without_estimate(name, SPEEDUP_QUESTION, "speedup", reason)
    rows = headline.filter(pl.col("concurrency") == judged).to_dicts()
    problem = loads.problem(judged)
    if not rows:
        reason = problem or f"no request was answered in both arms at concurrency {judged}"
        return _without_estimate(name, SPEEDUP_QUESTION, "speedup", reason)
    reached = _max_concurrency(headline, loads, policy)
    first = worst = _worst(rows)
    estimate = _estimate(worst)
    if problem or estimate.low is None:
        verdict, reached = "inconclusive", None
    elif reached is not None and judged <= reached:
        verdict = "supported"
        within = pl.col("concurrency").is_in([level for level in loads.judged if level <= reached])
        worst = _worst(headline.filter(within).to_dicts())
        estimate = _estimate(worst)
    elif any(row["high"] is not None and row["high"] < policy.minimum_speedup for row in rows):
        verdict = "not supported"
        worst = min(rows, key=lambda row: math.inf if row["high"] is None else row["high"])
        estimate = _estimate(worst)
    else:
        verdict = "inconclusive"
    also = ""
    if verdict == "supported" and reached is not None:
        shown = headline.filter(pl.col("concurrency").is_in(loads.judged))
        said = f"faster {_where(shown, reached, all_judged=not loads.gaps)}"
        if above := [level for level in loads.levels if level > reached and level not in loads.gaps]:
            said += f", not shown at {_listed(above)}"
        if shown.filter(pl.col("concurrency") <= reached).height > 1:
            said += ": at worst"
        else:
            said += ":"
        if worst != first:
            also = f"; {_number(_estimate(first), '.2f')} at concurrency {judged} ({first['sampling']})"
    elif verdict == "not supported":
        slower = estimate.high is not None and estimate.high < 1
        said = f"not faster by the margin asked for{' but slower' if slower else ''}:"
        last = headline.to_dicts()[-1]
        if last["concurrency"] > worst["concurrency"]:
            also = f"; {_number(_estimate(last), '.2f')} at concurrency {last['concurrency']}"
    elif problem:
        said = f"not judged ({problem}): it showed"
    else:
        said = "the data do not show whether it is faster:"
    below = [level for level in loads.levels if level in loads.gaps and level < (reached or math.inf)]
    above = [level for level in loads.levels if level in loads.gaps and level not in below]
    if not problem and loads.gaps:
        also += f"; not judged at {'; '.join(loads.told(loads.levels))}"
    also += _left_out(run, (name, baseline))
    modelled = "modelled: " if run.modelled else ""
    reasons = [
        *([problem] if problem else []),
        *(
            f"{row['sampling']} at concurrency {row['concurrency']}: {_number(_estimate(row), '.2f')}"
            for row in headline.iter_rows(named=True)
        ),
        *_length_reasons(table, policy),
        *(f"not judged at {text}" for text in loads.told(below) if text and not problem),
        *(f"beyond that, not judged at {text}" for text in loads.told(above) if not problem),
        *(text for text in loads.failed.values() if text != problem),
        *_baseline_failures(fit, baseline, loads.judged),
        *_repeats_apart(fit, name, baseline),
        *_dropped(run, fit, name, loads),
        *_dirty(run, name),
        *_off(activity, name, headline),
        *_setting_notes(run, name),
        *_forced_lengths(run),
    ]
    return Claim(
        arm=name,
        question=SPEEDUP_QUESTION,
        verdict=verdict,
        sentence=(
            f"{name}: {modelled}{said} {_number(estimate, '.2f')} times the baseline's tokens a second at "
            f"concurrency {worst['concurrency']} ({worst['sampling']}, {estimate.n} requests of "
            f"{estimate.n_clusters} prompts, {estimate.method}; the lower end must reach "
            f"{policy.minimum_speedup:g}){also}."
        ),
        estimate=estimate,
        threshold=policy.minimum_speedup,
        n=estimate.n,
        chart="speedup",
        reasons=(*_estimate_reasons(estimate), *reasons),
        max_concurrency=reached,
        by_load=tuple(
            (row["sampling"], row["concurrency"], _estimate(row)) for row in headline.iter_rows(named=True)
        ),
    )


def _drafter_claim(run: Run, arm: Arm, references: Sequence[str], question: str, policy: Policy) -> Claim:
    """The claim of `drafter_verdict` for one arm; `references`: arms without weights, the first counts."""
    if given := _given_acceptance(run, arm):
        return _refused(arm.name, question, "drafters", given)
    if not references:
        reason = "the run holds no drafter without weights to compare with"
        return _without_estimate(arm.name, question, "drafters", reason)
    reference = references[0]
    steps = run.labelled("steps").filter(pl.col("arm").is_in([arm.name, reference]))
    present = steps.group_by("sampling").agg(pl.col("arm").n_unique() == 2)
    shared = set(present.filter("arm")["sampling"])
    setting = next((setting.name for setting in run.plan.sampling if setting.name in shared), None)
    problem = _unusable(run, arm)
    if problem is None and setting is None:
        problem = f"no sampling setting holds target steps of both {arm.name} and {reference}"
    if problem:
        return _without_estimate(arm.name, question, "drafters", problem)
    steps = steps.filter(pl.col("sampling") == setting)
    tiers = paired_yield(
        steps,
        arm=arm.name,
        reference=reference,
        by=("entropy_tier",),
        level=policy.level,
        rng=_generator(policy, "drafters", arm.name),
    ).to_dicts()
    tiers.sort(key=lambda row: (ENTROPY_TIERS.index(row["entropy_tier"]), row["entropy_tier"]))
    if not tiers:
        reason = f"no prompt was answered by both {arm.name} and {reference}"
        return _without_estimate(arm.name, question, "drafters", reason)
    bounded = [row for row in tiers if row["low"] is not None]
    worst = min(bounded, key=lambda row: row["low"], default=tiers[0])
    worse = [row["entropy_tier"] for row in bounded if row["high"] < 0]
    if worse:
        verdict, said = "not supported", f"fewer tokens a target step than {reference} ({_listed(worse)})"
    elif len(bounded) == len(tiers) and worst["low"] > 0:
        verdict, said = "supported", f"more tokens a target step than {reference} in every tier"
    else:
        verdict = "inconclusive"
        said = f"the data do not show more tokens a target step than {reference} in every tier"
    estimate = _estimate(worst)
    return Claim(
        arm=arm.name,
        question=question,
        verdict=verdict,
        sentence=(
            f"{arm.name}: {said}: the difference in the worst tier ({worst['entropy_tier']}) is "
            f"{_number(estimate, '+.2f')} over {estimate.n:,} target steps of {estimate.n_clusters} prompts "
            f"({setting}, {_concurrency(run, steps)}); supported above 0 in every tier."
        ),
        estimate=estimate,
        threshold=0.0,
        n=estimate.n,
        chart="drafters",
        reasons=tuple(f"{row['entropy_tier']}: {_number(_estimate(row), '+.2f')}" for row in tiers),
    )


def _num_failed(requests: pl.DataFrame) -> int:
    return requests.filter(pl.col("status") != "ok").height


def _failures(requests: pl.DataFrame) -> str:
    """`3 of 48 requests failed (disconnected 2, http_500 1)`."""
    kinds = (
        requests.filter(pl.col("status") != "ok")
        .with_columns(pl.coalesce("error_kind", "status").alias("kind"))
        .group_by("kind")
        .len()
        .sort(["len", "kind"], descending=[True, False])
    )
    named = ", ".join(f"{kind} {count}" for kind, count in kinds.iter_rows())
    return f"{_num_failed(requests)} of {requests.height} requests failed" + (f" ({named})" if named else "")


def _left_out(run: Run, arms: Sequence[str]) -> str:
    """How many requests failed, whose tokens a ratio leaves out; empty without one."""
    parts = []
    for name in arms:
        own = run.requests.filter(pl.col("arm") == name)
        if failed := _num_failed(own):
            parts.append(f"{failed} of {own.height} requests of {name}")
    if not parts:
        return ""
    return f"; {' and '.join(parts)} failed: their time is in the ratio, their tokens are not"


def _dirty(run: Run, arm: str) -> list[str]:
    """Cells of an arm or the baseline with failures, the worst named."""
    found = []
    for name in (arm, run.plan.baseline.name):
        own = run.requests.filter(pl.col("arm") == name)
        cells = own.group_by("cell_id", maintain_order=True).agg(failed=(pl.col("status") != "ok").sum())
        dirty = cells.filter(pl.col("failed") > 0).sort("failed", descending=True, maintain_order=True)
        if dirty.height:
            worst = dirty["cell_id"][0]
            found.append(
                f"dirty: {dirty.height} of {cells.height} cells of {name} have failures, most in {worst} "
                f"({_failures(own.filter(pl.col('cell_id') == worst))})"
            )
    return found


def _dropped(run: Run, fit: pl.DataFrame, arm: str, loads: _Loads) -> list[str]:
    """Repeats that were left out at loads that are judged by their others."""
    place = ["sampling", "concurrency", "repeat"]
    lost = run.requests.filter(pl.col("arm") == arm).select(place).unique(maintain_order=True)
    lost = lost.join(
        fit.filter(pl.col("arm") == arm).select(place).unique(), on=place, how="anti", maintain_order="left"
    )
    lost = lost.filter(~pl.col("concurrency").is_in(list(loads.gaps)))
    return [
        f"repeat {repeat} at concurrency {concurrency} ({sampling}) is left out: unfit for timing"
        for sampling, concurrency, repeat in lost.iter_rows()
    ]


def _off(activity: pl.DataFrame, arm: str, headline: pl.DataFrame) -> list[str]:
    """Loads at which the arm did not speculate, with the speedup that it shows all the same."""
    off = activity.filter(pl.col("arm") == arm, ~pl.col("active"))
    ratios = headline.select("sampling", "concurrency", "value")
    found = off.join(ratios, on=["sampling", "concurrency"], how="inner", maintain_order="left")
    return [
        f"speculation was off at concurrency {row['concurrency']} ({row['sampling']}; {row['reason']}): "
        f"{row['value']:.2f} times the baseline" + (", slower than without" if row["value"] < 1 else "")
        for row in found.filter(pl.col("value").is_not_null()).iter_rows(named=True)
    ]


def _setting_notes(run: Run, arm: str) -> list[str]:
    notes = [
        f"the servers also differ in {difference}"
        + (" (a drafter changes this; engine.args can match the baseline)" if difference.follows else "")
        for difference in setting_differences(run, arm=arm)
    ]
    own, other = (_kv_cache_tokens(run, name) for name in (arm, run.plan.baseline.name))
    if own and other and abs(own / other - 1) > 0.01:
        notes.append(
            f"the KV cache holds {own:,} tokens beside the drafter and {other:,} in the baseline "
            f"({own / other - 1:+.1%})"
        )
    return notes


def _kv_cache_tokens(run: Run, arm: str) -> int | None:
    """Smallest KV cache that an arm's servers had, in tokens."""
    sizes = [(cell.get("server") or {}).get("kv_cache_tokens") for cell in run.cells if cell["arm"] == arm]
    return min((int(size) for size in sizes if size), default=None)


def _forced_lengths(run: Run) -> list[str]:
    forced = [setting.name for setting in run.plan.sampling if setting.ignore_eos]
    if not forced:
        return []
    return [
        f"ignore_eos under {_listed(forced)}: answers run to their caps, past their natural end; acceptance "
        "there is not that of real traffic"
    ]


def _worst(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row with the smallest lower end; one without an interval is worse than any."""
    return min(rows, key=lambda row: -math.inf if row["low"] is None else row["low"])


def _where(measured: pl.DataFrame, reached: int, *, all_judged: bool = True) -> str:
    """The loads up to `reached` in words, by sampling setting where the settings were not measured alike."""
    levels = sorted(set(measured["concurrency"]))
    loads = {
        sampling: sorted(set(group["concurrency"]))
        for (sampling,), group in measured.group_by("sampling", maintain_order=True)
    }
    alike = all(found == levels for found in loads.values())
    what = "measured" if all_judged else "judged"
    if len(levels) == 1:
        return f"at concurrency {reached}, the only one {what}"
    if alike and reached == levels[-1]:
        return f"at every {what} concurrency ({_listed(levels)})"
    if alike:
        return f"up to concurrency {reached}"
    shown = [
        f"{sampling} at concurrency {_listed([level for level in found if level <= reached])}"
        for sampling, found in loads.items()
        if found[0] <= reached
    ]
    return f"where it was {what} up to concurrency {reached} ({'; '.join(shown)})"


def _max_concurrency(headline: pl.DataFrame, loads: _Loads, policy: Policy) -> int | None:
    """Largest judged concurrency such that the worst lower end reaches the minimum at it and all below."""
    reached = None
    for level in loads.levels:
        if level in loads.gaps:
            continue
        low = headline.filter(pl.col("concurrency") == level)["low"]
        found = [-math.inf if value is None else value for value in low]
        if level in loads.failed or not found or min(found) < policy.minimum_speedup:
            break
        reached = level
    return reached


def _length_reasons(table: pl.DataFrame, policy: Policy) -> list[str]:
    return [
        f"output lengths differ: the arm wrote {row['value']:.2f} times the baseline's tokens "
        f"({row['sampling']}, concurrency {row['concurrency']}); a ratio of latencies would mislead"
        for row in table.filter(pl.col("metric") == "output_length_ratio").iter_rows(named=True)
        if row["value"] is not None and abs(row["value"] - 1) > policy.max_length_drift
    ]


def _equivalence_claim(run: Run, arm: str, activity: pl.DataFrame, policy: Policy) -> Claim:
    if wrong := _contradictions(run, arm):
        return _without_estimate(arm, EQUIVALENCE_QUESTION, "equivalence", wrong[0])
    found = judge_equivalence(
        run,
        arm=arm,
        rng=_generator(policy, "equivalence", arm),
        minimum_prompts=policy.minimum_prompts,
        significance=policy.significance,
        level=policy.level,
        activity=activity,
    )
    return Claim(
        arm=arm,
        question=EQUIVALENCE_QUESTION,
        verdict=found.outcome,
        sentence=_equivalence_sentence(run, found),
        estimate=found.match,
        threshold=found.near_tie_nats,
        n=found.num_prompts,
        chart="equivalence",
        reasons=found.reasons,
        not_measured=found.not_measured,
    )


def _equivalence_sentence(run: Run, found: Outcome) -> str:
    levels = _listed(sorted(set(run.requests.filter(pl.col("arm") == found.arm)["concurrency"])))
    load = _load_name(run)
    excused = f" ({found.num_clear_excused} of these only where the baseline parts from itself as well)"
    evidence = (
        f"{found.num_prompts} distinct prompts at {load} {levels}"
        if found.match is None and found.num_prompts
        else ""
        if found.match is None
        else f"{_number(found.match, '.1%')} of {found.num_prompts} distinct prompts give the same greedy "
        f"answer in their first pair at the lowest {load}; {found.num_mismatched} differ in some pair "
        f"at {load} {levels}, {found.num_clear} of them with a margin above "
        f"{found.near_tie_nats:g} nats{excused if found.num_clear_excused else ''}"
        f"{f', {found.num_unknown} at a margin that is not known' if found.num_unknown else ''}"
        if found.num_mismatched
        else f"{_number(found.match, '.1%')} of {found.num_prompts} distinct prompts give the same greedy "
        f"answer in their first pair at the lowest {load}, none differs in any pair at {load} "
        f"{levels}"
    )
    said = {
        "equivalent": "answers are those of the target",
        "equivalent up to numerics": "answers are those of the target up to rounding",
        "not equivalent": "answers are not those of the target",
        "inconclusive": "equivalence is not shown",
        "vacuous": "nothing was speculated in the judged requests, so equivalence was not tested",
        "refused": "equivalence is not judged",
    }[found.outcome]
    reason = f"; {found.reasons[0]}" if found.reasons and found.outcome not in ("equivalent",) else ""
    return f"{found.arm}: {said}{f' ({evidence})' if evidence else ''}{reason}."


def _final_claims(
    run: Run, speedups: Sequence[Claim], equivalences: Sequence[Claim], policy: Policy
) -> tuple[Claim, ...]:
    """The final claim of every speculating arm from its speedup and equivalence claims."""
    activity, fit = once(run, draft_activity), fit_requests(run)
    return tuple(
        _final_claim(
            run,
            arm,
            speedup,
            equivalence,
            activity=activity.filter(pl.col("arm") == arm.name),
            fit=fit,
            policy=policy,
        )
        for arm, speedup, equivalence in zip(speculating_arms(run.plan), speedups, equivalences, strict=True)
    )


def _final_claim(
    run: Run,
    arm: Arm,
    speedup: Claim,
    equivalence: Claim,
    *,
    activity: pl.DataFrame,
    fit: pl.DataFrame,
    policy: Policy,
) -> Claim:
    own = run.requests.filter(pl.col("arm") == arm.name)
    prompts = min(own[name].n_unique() for name in ("prompt_id", "prompt_sha256"))
    levels = sorted(set(own["concurrency"]))
    errors, error_reason = _errors(run, arm.name, policy)
    tail_reasons, tail_missing = _tail(run, arm.name, fit, policy, up_to=speedup.max_concurrency)
    stoppers = list(not_comparable(run, arm=arm.name))
    if run.modelled or refusal(run, arm=arm.name) in equivalence.reasons:
        stoppers.insert(0, _modelled(run, arm, speedup, activity))
    stoppers = [*_contradictions(run, arm.name), *stoppers]
    if absent := _never_served(own):
        stoppers.append(absent)
    rejections = []
    if equivalence.verdict == "not equivalent":
        rejections.append(f"its answers are not equivalent: {equivalence.reasons[0]}")
    if errors.low is not None and errors.low > policy.max_error_rate and not absent:
        others, other_reason = _errors(run, run.plan.baseline.name, policy)
        if others.value and others.high is not None and others.high >= errors.low:
            stoppers.append(f"the baseline fails as well ({other_reason}); {arm.name}: {error_reason}")
        else:
            rejections.append(error_reason)
    if not rejections:
        # A fault that was seen stands, however few the prompts; the lack of one needs enough of them.
        if activity.is_empty() and not absent:
            stoppers.append(f"no request of {arm.name} was answered")
        elif activity.height and not activity["active"].fill_null(True).any():
            stoppers.append(_inactive(run, arm.name))
        elif equivalence.verdict == "vacuous":
            stoppers.append(equivalence.reasons[0])
        elif equivalence.verdict == "refused" and not run.modelled:
            stoppers.append(f"equivalence is not judged: {equivalence.reasons[0]}")
        if speedup.estimate is None and fit.filter(pl.col("arm") == arm.name).is_empty():
            stoppers.append(speedup.reasons[0])
        if prompts < policy.minimum_prompts:
            stoppers.append(f"{prompts} distinct prompts took part, {policy.minimum_prompts} are needed")
    if speedup.verdict == "not supported":
        rejections.append(_clause(speedup))
    cautions = []
    if equivalence.verdict == "inconclusive":
        cautions.append(f"equivalence is inconclusive: {equivalence.reasons[0]}")
    within = pl.col("concurrency") <= (speedup.max_concurrency or levels[-1])
    repeats = _fewest_repeats(fit.filter(pl.col("arm") == arm.name, within), by=("sampling", "concurrency"))
    if 0 < repeats < policy.minimum_repeats:
        cautions.append(f"run-to-run variation is unknown ({_runs(repeats)})")
    if errors.value is not None and errors.value > policy.max_error_rate and not rejections:
        cautions.append(error_reason)
    cautions += tail_reasons
    cautions += [reason for reason in speedup.reasons if reason.startswith("output lengths differ")][:1]
    cautions += [
        reason
        for reason in speedup.reasons
        if reason.startswith(("not judged at", "speculation was", "baseline failures", "repeats differ"))
    ]

    reached = None
    if stoppers:
        verdict, deciding = "inconclusive", [*stoppers, *rejections]
    elif rejections:
        verdict, deciding = "do not adopt", rejections
    elif speedup.verdict != "supported":
        verdict, deciding = "inconclusive", [_clause(speedup), *cautions]
    else:
        reached = speedup.max_concurrency
        deciding = cautions
        if cautions:
            verdict = "canary first"
        elif reached == levels[-1]:
            verdict = "adopt"
        else:
            verdict = f"adopt up to concurrency {reached}"
    notes = [f"equivalence: {equivalence.verdict}"]
    if _clause(speedup) not in deciding:
        notes.insert(0, f"speedup: {_clause(speedup)}")
    return Claim(
        arm=arm.name,
        question="Should this drafter go in front of this target, and up to which concurrency?",
        verdict=verdict,
        sentence=_final_sentence(run, arm.name, verdict, deciding, speedup, equivalence),
        estimate=speedup.estimate,
        threshold=policy.minimum_speedup,
        n=speedup.n,
        chart="verdict",
        reasons=tuple(dict.fromkeys([*deciding, *notes])),
        max_concurrency=reached,
        not_measured=(*equivalence.not_measured, *tail_missing, *_never_measured(run)),
    )


def _modelled(run: Run, arm: Arm, speedup: Claim, activity: pl.DataFrame) -> str:
    """That the run is modelled, and what its speedups are then worth."""
    given = _given_acceptance(run, arm) or refusal(run, arm=arm.name)
    drafted = _drafted_steps(run, arm.name, activity)
    length = (
        f" with a mean acceptance length of {1 + drafted['num_accepted_tokens'].sum() / drafted.height:.2f}"
        if drafted.height
        else ""
    )
    ends = [speedup.by_load[0], speedup.by_load[-1]] if speedup.by_load else []
    shown = " and ".join(
        f"{_number(estimate, '.2f')} at concurrency {concurrency}"
        for _, concurrency, estimate in dict.fromkeys(ends)
    )
    worth = f"; the modelled speedup{length} is {shown}" if shown else ""
    return f"it is modelled: {given}{worth}"


def _never_served(own: pl.DataFrame) -> str | None:
    """That no request ever met a server, which is no fault of the drafter's that was measured; else None."""
    kinds = set(own["error_kind"].drop_nulls())
    if _num_failed(own) < own.height or not kinds or not kinds <= set(NEVER_SERVED):
        return None
    return f"its server was never there: {_failures(own)}, first: {own['error'].drop_nulls()[0]}"


def _final_sentence(
    run: Run, arm: str, verdict: str, deciding: Sequence[str], speedup: Claim, equivalence: Claim
) -> str:
    if verdict.startswith("adopt"):
        where = _where(run.requests.filter(pl.col("arm") == arm), speedup.max_concurrency or 0)
        return (
            f"{arm}: adopt it {where}: {_evidence(speedup)}, and its answers are {equivalence.verdict} "
            f"({equivalence.n} distinct prompts)."
        )
    said = {
        "canary first": f"try it on a canary first, up to concurrency {speedup.max_concurrency}",
        "do not adopt": "do not adopt it",
        "inconclusive": "this run can't say",
    }[verdict]
    return f"{arm}: {said}, because {deciding[0].rstrip('.')}."


def _evidence(speedup: Claim) -> str:
    """The numbers of the speedup claim's sentence, from the estimate on."""
    return _clause(speedup).split(": ", 1)[-1]


def _clause(speedup: Claim) -> str:
    """The speedup claim's sentence without the arm's name and the full stop; without an answer, why."""
    said = speedup.sentence.removeprefix(f"{speedup.arm}: ").removeprefix(NO_ANSWER)
    return said.rstrip(".")


def _errors(run: Run, arm: str, policy: Policy) -> tuple[Estimate, str]:
    own = run.requests.filter(pl.col("arm") == arm)
    failed = _num_failed(own)
    estimate = wilson_estimate(failed, own.height, level=policy.level, n_clusters=own["prompt_id"].n_unique())
    kinds = _failures(own)
    return estimate, f"{kinds}: {_number(estimate, '.1%')}, at most {policy.max_error_rate:.1%} may"


def _tail(
    run: Run, arm: str, fit: pl.DataFrame, policy: Policy, *, up_to: int | None
) -> tuple[list[str], list[str]]:
    """Where the arm's P95 latency is too far above the baseline's, and what could not be compared."""
    requests = fit.filter(pl.col("arm").is_in([arm, run.plan.baseline.name]))
    if up_to is not None:
        requests = requests.filter(pl.col("concurrency") <= up_to)
    if requests.is_empty():
        return [], ["P95 latency (no load is fit for timing)"]
    table = latency_quantiles(requests, by=("arm", "sampling", "concurrency"), level=policy.level)
    table = table.filter(pl.col("metric") == "e2e_s", pl.col("quantile") == 0.95)
    own = table.filter(pl.col("arm") == arm)
    other = table.filter(pl.col("arm") == run.plan.baseline.name)
    pairs = own.join(other, on=["sampling", "concurrency"], suffix="_baseline", maintain_order="left")
    reasons = [
        f"P95 end-to-end latency is {row['value'] / row['value_baseline']:.2f} times the baseline's "
        f"({row['sampling']}, {_load_name(run)} {row['concurrency']}, {row['n']} requests; at most "
        f"{policy.max_tail_ratio:g})"
        for row in pairs.iter_rows(named=True)
        if row["value"] is not None
        and row["value_baseline"]
        and row["value"] > policy.max_tail_ratio * row["value_baseline"]
    ]
    unknown = pairs.filter(pl.col("value").is_null() | pl.col("value_baseline").is_null()).height
    return reasons, [
        f"P95 latency at {unknown} of {pairs.height} loads (too few requests)"
    ] if unknown else []


def _never_measured(run: Run) -> list[str]:
    missing = ["stability over hours", "odd prompts and overload (robustness)"]
    if not run.has("telemetry"):
        missing.append("memory")
    if run.plan.price is None:
        missing.append("cost (the plan has no price)")
    return missing


def _contradictions(run: Run, arm: str) -> list[str]:
    """The invariants whose failure spoils an arm's numbers, as reasons."""
    return [
        f"the records contradict themselves: {found.name}: {found.detail}"
        for found in contradictions(run)
        if found.arm in (None, arm)
    ]


def _unusable(run: Run, arm: Arm) -> str | None:
    problems = not_comparable(run, arm=arm.name)
    return problems[0] if problems else None


def _inactive(run: Run, arm: str) -> str:
    own = pl.col("arm") == arm
    if run.plan.engine.kind in IN_PROCESS:
        return f"no draft was verified in {run.steps.filter(own).height:,} target steps of {arm} ({INACTIVE})"
    answered = run.requests.filter(own, pl.col("status") == "ok").height
    return (
        f"no draft was verified in {answered:,} answered requests of {arm} ({INACTIVE}; logprobs, penalties "
        "or min_p may switch speculation off)"
    )


def _no_steps(run: Run, arm: str, activity: pl.DataFrame) -> str:
    """Why no verified draft of an arm is at hand: none was verified, or the server does not tell."""
    own = activity.filter(pl.col("arm") == arm)
    if own.is_empty():
        return f"no request of {arm} was answered"
    if own["active"].any():
        return (
            "drafts were verified, but the server does not tell what became of each (vLLM does with "
            "--per-request-spec-decode-metrics detailed)"
        )
    if own["active"].null_count():
        reason = own.filter(pl.col("active").is_null())["reason"][0]
        return f"it is not known whether anything was drafted: {reason}"
    return _inactive(run, arm)


def _drafted_steps(run: Run, arm: str, activity: pl.DataFrame) -> pl.DataFrame:
    """Steps of an arm with a draft; those guessed from chunks only where drafts are known to be verified."""
    counts = ("num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")
    labels = ("arm", "cell_id", "prompt_id", "repeat", "sampling", "concurrency", "entropy_tier")
    steps = run.labelled("steps", columns=(*labels, *counts))
    steps = steps.filter(pl.col("arm") == arm, pl.col("num_draft_tokens") > 0)
    guessed = [cell["cell_id"] for cell in run.cells if cell.get("steps_source") == GUESSED_STEPS]
    if not guessed:
        return steps
    known = activity.filter(pl.col("active")).select("arm", "sampling", "concurrency")
    real = steps.filter(~pl.col("cell_id").is_in(guessed))
    taken = steps.filter(pl.col("cell_id").is_in(guessed)).join(
        known, on=["arm", "sampling", "concurrency"], how="semi", maintain_order="left"
    )
    return pl.concat([real, taken])


def _guessed(run: Run, steps: pl.DataFrame) -> tuple[str, ...]:
    cells = {cell["cell_id"] for cell in run.cells if cell.get("steps_source") == GUESSED_STEPS}
    if cells.isdisjoint(steps["cell_id"]):
        return ()
    return ("the server tells of no steps: each chunk was taken for one, with a full draft",)


def _given_acceptance(run: Run, arm: Arm) -> str | None:
    """Why acceptance in this run says nothing about the drafter; None where it was measured."""
    speculative = arm.speculative
    method = speculative.rejection_sample_method if speculative else None
    if speculative is not None and method == "synthetic":
        rates = (speculative.model_extra or {}).get("synthetic_acceptance_rates")
        given = f" ({', '.join(f'{rate:g}' for rate in rates)})" if isinstance(rates, (list, tuple)) else ""
        return f"its acceptance rates were an input of the run{given}, not a property of the drafter"
    if {**run.plan.engine.args, **arm.args}.get("load_format") == "dummy":
        return "the weights are dummies, so what was accepted is noise"
    if run.modelled and method not in LOSSY_METHODS:
        return "dummy weights or synthetic acceptance stand in for the real pair"
    return None


def _refused(arm: str, question: str, chart: str, reason: str) -> Claim:
    return Claim(
        arm=arm,
        question=question,
        verdict="refused",
        sentence=f"{arm}: not judged, because {reason}.",
        estimate=None,
        threshold=None,
        n=0,
        chart=chart,
        reasons=(reason,),
    )


def _tried_by_certainty(run: Run, arm: str, activity: pl.DataFrame) -> tuple[pl.DataFrame, str, str]:
    """Tried drafts of an arm with `certain`, num_hits and num_tried, and how the two parts are named.

    Without a row the first name says why there is none; empty if nothing was drafted.
    """
    keys = ["prompt_id", "repeat", "concurrency"]
    tokens = run.labelled("tokens", columns=("arm", "origin", "entropy_nats", *keys)).filter(
        pl.col("arm") == arm, pl.col("origin").is_in(["accepted", "recovered"])
    )
    if tokens.height:
        middle = float(np.median(tokens["entropy_nats"].to_numpy()))
        tried = tokens.select(
            *keys,
            certain=pl.col("entropy_nats") <= middle,
            num_hits=(pl.col("origin") == "accepted").cast(pl.Int64),
            num_tried=pl.lit(1, dtype=pl.Int64),
        )
        return tried, f"half of tokens with the lowest entropy (up to {middle:.2f} nats)", "rest"
    steps = _drafted_steps(run, arm, activity)
    tiers = [tier for tier in ("low", "medium", "high") if tier in set(steps["entropy_tier"])]
    if steps.is_empty():
        return steps.select(keys), "", ""
    if len(tiers) < 2:
        labels = "are of one tier" if tiers else "carry no entropy label"
        return steps.select(keys).clear(), f"entropy was not recorded and the prompts {labels}", ""
    kept = steps.filter(pl.col("entropy_tier").is_in([tiers[0], tiers[-1]]))
    accepted, drafted = pl.col("num_accepted_tokens"), pl.col("num_draft_tokens")
    tried = kept.select(
        *keys,
        certain=pl.col("entropy_tier") == tiers[0],
        num_hits=accepted,
        num_tried=pl.min_horizontal(accepted + 1, drafted),
    )
    rest = f"{tiers[-1]}-entropy tier (labels of the prompts: no entropy was recorded)"
    return tried, f"{tiers[0]}-entropy tier", rest


def _hit_rate_gap(tried: pl.DataFrame, policy: Policy, rng: np.random.Generator) -> Estimate:
    table = tried.with_columns(
        hits_certain=pl.when("certain").then("num_hits").otherwise(0),
        tried_certain=pl.when("certain").then("num_tried").otherwise(0),
        hits_rest=pl.when("certain").then(0).otherwise("num_hits"),
        tried_rest=pl.when("certain").then(0).otherwise("num_tried"),
    )
    names = ["hits_certain", "tried_certain", "hits_rest", "tried_rest"]
    (group,) = cluster_sums(table, by=(), sums=names)

    def gap(totals: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(
            totals[..., 0] / totals[..., 1] - totals[..., 2] / totals[..., 3], dtype=np.float64
        )[..., None]

    (interval,) = cluster_bootstrap(group.sums, gap, level=policy.level, rng=rng)
    return Estimate(
        value=interval.value,
        low=interval.low,
        high=interval.high,
        level=policy.level,
        n=int(tried["num_tried"].sum()),
        n_clusters=tried["prompt_id"].n_unique(),
        method=interval.method,
        reason="one half has no tried token" if interval.value is None else interval.reason,
    )


def _falls(estimate: Estimate, *, minimum_gap: float) -> str:
    if estimate.low is None or estimate.high is None:
        return "inconclusive"
    if estimate.high < 0:
        return "supported"
    return "not supported" if estimate.low > -minimum_gap else "inconclusive"


def _rises(estimate: Estimate, *, minimum_gap: float) -> str:
    if estimate.low is None or estimate.high is None:
        return "inconclusive"
    if estimate.low > 0:
        return "supported"
    return "not supported" if estimate.high < minimum_gap else "inconclusive"


def _without_estimate(arm: str, question: str, chart: str, reason: str) -> Claim:
    return Claim(
        arm=arm,
        question=question,
        verdict="inconclusive",
        sentence=f"{arm}: {NO_ANSWER}{reason.rstrip('.')}.",
        estimate=None,
        threshold=None,
        n=0,
        chart=chart,
        reasons=(reason,),
    )


def _estimate(row: Mapping[str, Any]) -> Estimate:
    names = ("value", "low", "high", "level", "n", "n_clusters", "method", "reason")
    return Estimate(**{name: row[name] for name in names})


def _estimate_reasons(estimate: Estimate) -> tuple[str, ...]:
    return (f"no interval: {estimate.reason}",) if estimate.low is None and estimate.reason else ()


def _number(estimate: Estimate, spec: str) -> str:
    """Estimate and interval as text; says so where either is missing."""
    if estimate.value is None:
        return f"n/a ({estimate.reason})"
    value = format(estimate.value, spec)
    if estimate.low is None or estimate.high is None:
        return f"{value} (no interval: {estimate.reason})"
    return f"{value} [{format(estimate.low, spec)}, {format(estimate.high, spec)}]"


def _rate(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _listed(values: Sequence[object]) -> str:
    names = [str(value) for value in values]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "none"


def _load_name(run: Run) -> str:
    """How a cell's concurrency is called: what a closed loop keeps up is only a cap in an open one."""
    return "concurrency cap" if run.plan.load.mode == "open" else "concurrency"


def _concurrency(run: Run, frame: pl.DataFrame) -> str:
    return f"{_load_name(run)} {_listed(sorted(set(frame['concurrency'])))}"


def _fewest_repeats(requests: pl.DataFrame, *, by: Sequence[str] = ("sampling",)) -> int:
    """Repeats of the sampling setting (or other group) that was measured least often; 0 without requests."""
    found = requests.group_by(by).agg(pl.col("repeat").n_unique())["repeat"]
    return min(found, default=0)


def _runs(repeats: int) -> str:
    return "single run" if repeats == 1 else f"{repeats} repeats"


def _generator(policy: Policy, *parts: str) -> np.random.Generator:
    """One stream a claim, so that the order in which claims are asked for changes nothing."""
    digest = hashlib.sha256("\x1f".join((str(policy.seed), *parts)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def _simulated(run: Run) -> bool:
    return bool((run.manifest.get("engine") or {}).get("simulated", False))


def _conditions(run: Run) -> dict[str, Any]:
    """What every number depends on; unknown is null with the key kept."""
    requests = run.requests
    engine = run.manifest.get("engine") or {}
    repeats = _fewest_repeats(requests)
    return {
        "target": run.plan.target.model
        if not Path(run.plan.target.model).is_absolute()
        else Path(run.plan.target.model).name,
        "dtype": (engine.get("target") or {}).get("dtype") or run.plan.target.dtype,
        "engine": run.plan.engine.kind,
        "device": engine.get("device") or engine.get("gpu"),
        "versions": run.manifest.get("versions"),
        "dataset": Path(run.plan.workload.set).name,
        "num_prompts": requests["prompt_id"].n_unique(),
        "num_requests": requests.height,
        "num_failed": _num_failed(requests),
        "failures": _failure_kinds(requests),
        "num_cells": len(run.cells),
        "num_unfit_cells": unfit_cells(run)["cell_id"].n_unique(),
        "repeats": repeats,
        "interval_method": "prompts resampled as clusters, repeats as the outer level",
        "run_to_run_interval": "n/a: single run" if repeats < 2 else "repeats resampled",
        "concurrency": sorted(set(requests["concurrency"])),
        "sampling": [setting.name for setting in run.plan.sampling],
        "temperature": [setting.temperature for setting in run.plan.sampling],
        "acceptance_length_convention": "bonus token included",
        "cached_fraction": cached_share(requests),
        "near_tie_nats": near_tie_threshold(run),
        "arms_may_differ": run.plan.allow_differences,
    }


def _failure_kinds(requests: pl.DataFrame) -> dict[str, int]:
    kinds = requests.filter(pl.col("status") != "ok").select(pl.coalesce("error_kind", "status"))
    return dict(sorted(kinds.to_series().value_counts().iter_rows()))


def _arm_conditions(run: Run, name: str) -> dict[str, Any]:
    arm = next(arm for arm in run.plan.arms if arm.name == name)
    speculative = arm.speculative
    return {
        "method": speculative.method if speculative else None,
        "num_speculative_tokens": speculative.num_speculative_tokens if speculative else None,
        "differences": arm.args,
        "settings": [
            {
                "name": difference.name,
                "arm": difference.value,
                "baseline": difference.baseline_value,
                "follows": difference.follows,
            }
            for difference in setting_differences(run, arm=name)
        ],
    }
