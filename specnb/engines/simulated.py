"""An engine without a model: answers, acceptance and time are drawn from laws that are known.

It exists so that every estimate and every verdict can be tested against the truth and
against data built to break it. Nothing it writes says anything about a model or a
machine, and `describe` says so. Imports numpy and scipy, no torch.

The target's law at each token is geometric over the ranks 0, 1, 2, ... with a success
probability of the token's own, so that entropy, log probabilities, margins and
cumulative masses are exact and agree with each other. A draft at position i is accepted
with a given conditional rate. Steps take a time that is linear in the number of target
positions computed, on a clock of its own: cell number n of the plan starts at 1000 n
seconds, whatever the real clock says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from scipy.stats import beta

from specnb import schema
from specnb.config import Arm, Cell, Plan, plan_cells
from specnb.engines.base import CellContext, PlannedRequest, request_seed
from specnb.errors import PlanError
from specnb.workloads import Prompt

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EOS_TOKEN_ID: Final = 2
_FIRST_TOKEN_ID: Final = 10
_VOCABULARY: Final = 5000
_CELL_GAP_S: Final = 1000.0
_LARGEST_RANK: Final = 4000
_NUM_CANDIDATES: Final = 16

Rate = Annotated[float, Field(ge=0, le=1)]


class SimulatedSettings(BaseModel):
    """Laws and faults of the simulated engine, from `plan.engine.args`; an arm's `speculative` may override.

    Faults concern arms that speculate, unless they say otherwise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    alpha: Rate = Field(default=0.7, description="conditional acceptance rate at every position")
    conditional_rates: tuple[Rate, ...] | None = Field(
        default=None, min_length=1, description="rates by position in place of alpha; the last one is kept"
    )
    alpha_by_tier: dict[str, Rate] = Field(default_factory=dict, description="alpha of an entropy tier")
    prompt_concentration: float | None = Field(
        default=40.0,
        gt=0,
        description="a prompt's alpha is Beta(alpha c, (1 - alpha) c); null: no prompt effect",
    )
    entropy_slope: float = Field(
        default=0.0, description="fall of the logit rate per nat above the tier's mean"
    )
    ragged: Rate = Field(
        default=0.0, description="chance that a draft is shorter than num_speculative_tokens"
    )

    selector_lift: Rate = Field(
        default=0.0, description="share of right drafts that were not the drafter's first candidate"
    )
    outside_candidates: Rate = Field(
        default=0.0, description="share of wrong drafts whose answer is no candidate at all"
    )

    top_probability: dict[str, float] = Field(
        default_factory=lambda: {"low": 0.9, "medium": 0.65, "high": 0.4, "unlabelled": 0.65},
        description="mean mass of the target's most likely token by entropy tier",
    )
    output_tokens: dict[str, float] = Field(
        default_factory=lambda: {"short": 24.0, "medium": 48.0, "long": 96.0, "unlabelled": 48.0},
        description="mean answer length by length tier",
    )
    score: Rate | None = Field(default=None, description="share of right answers; null: no grader")

    step_base_s: float = Field(default=0.020, gt=0, description="target forward, part that does not grow")
    step_token_s: float = Field(
        default=0.0005, ge=0, description="target forward, for each position computed"
    )
    draft_s: float = Field(default=0.004, ge=0, description="proposing one batch of drafts")
    prefill_s: float = Field(default=0.015, ge=0, description="prefill of one request")
    speed_noise: float = Field(default=0.01, ge=0, description="log standard deviation of a cell's speed")

    speed_factor: float = Field(default=1.0, gt=0, description="speculating steps run this much faster")
    no_drafts: bool | tuple[str, ...] = Field(
        default=False, description="nothing is drafted, at all or in the named sampling settings"
    )
    no_drafts_from_concurrency: int | None = Field(
        default=None, description="nothing is drafted from here on"
    )
    diverge_rate: Rate = Field(default=0.0, description="share of prompts whose greedy answer always differs")
    diverge_margin: float = Field(default=2.4, ge=0, description="target's margin there, nats")
    unstable_rate: Rate = Field(
        default=0.0, description="chance that any arm's greedy answer flips at random"
    )
    unstable_margin: float = Field(default=0.01, ge=0, description="target's margin there, nats")
    unstable_from_concurrency: int = Field(default=1, ge=1, description="below it greedy answers are stable")
    wrong_law: float = Field(default=0.0, ge=0, description="sampled tokens: u becomes u ** (1 + wrong_law)")
    truncate: float = Field(default=1.0, gt=0, le=1, description="share of each answer that is produced")
    corrupt_rate: Rate = Field(
        default=0.0, description="share of prompts that end in a loop without acceptance"
    )
    error_rate: Rate = Field(default=0.0, description="chance that a request fails")
    baseline_error_rate: Rate = Field(default=0.0, description="the same in the baseline")
    score_drop: Rate = Field(default=0.0, description="chance that a right answer becomes a wrong one")
    prompt_token_shift: int = Field(default=0, ge=0, description="further prompt tokens counted")
    cached_tokens: int = Field(default=0, ge=0, description="prompt tokens served from a prefix cache")


_PLAN_KEYS: Final = frozenset(
    (
        "method",
        "num_speculative_tokens",
        "model",
        "draft_sample_method",
        "rejection_sample_method",
        "prompt_lookup_max",
        "prompt_lookup_min",
        # Facts of a drafter: described as given, without any effect on a law.
        "label",
        "selector",
        "convolution",
        "sha256",
        "num_parameters",
        "num_candidates",
        "dtype",
        "training",
    )
)


@dataclass(slots=True, kw_only=True)
class _Answer:
    """One request's answer before time is known; arrays over tokens or over steps."""

    request: PlannedRequest
    token_ids: Ints  # shape: [num_tokens]
    ranks: Ints  # shape: [num_tokens], rank of each token in the target's law
    top_probability: Floats  # shape: [num_tokens], the geometric law's parameter
    margins: Floats  # shape: [num_tokens]
    logprob_shift: Floats  # shape: [num_tokens], not 0 where the answer was made to differ
    finish_reason: str
    error: bool
    score: float | None
    rate_shift: float
    corrupt_from: int | None
    drafted: Ints  # shape: [num_steps]
    accepted: Ints  # shape: [num_steps]
    emitted: Ints  # shape: [num_steps]
    rates: list[Floats]  # one array a step: conditional rate of each drafted position
    first_engine_step: int = -1
    sent_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_steps(self) -> int:
        return len(self.drafted)

    @property
    def entropy(self) -> Floats:
        """Entropy of the geometric law, nats."""
        p = self.top_probability
        return np.asarray(-(np.log(p) + (1 - p) / p * np.log1p(-p)), dtype=np.float64)


class SimulatedEngine:
    """Implements `engines.base.Engine` with known laws; equal plans give equal tables on every machine.

    Parameters
    ----------
    plan
        `engine.args` are the fields of `SimulatedSettings`; further keys of an arm's
        `speculative` override them for that arm.

    Raises
    ------
    PlanError
        An unknown setting or a value out of range.

    References
    ----------
    With a constant rate alpha, no prompt effect and full drafts of k tokens, a step emits
    (1 - alpha^(k + 1)) / (1 - alpha) tokens on average: Leviathan et al., arXiv 2211.17192, eq. 1.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._settings = {arm.name: _settings(plan, arm) for arm in plan.arms}
        self._cell_number = {cell.cell_id: number for number, cell in enumerate(plan_cells(plan))}

    def describe(self) -> dict[str, Any]:
        """Facts for the manifest; `simulated` is true and `label` says so in words."""
        dtype = "float64" if self.plan.target.dtype == "auto" else self.plan.target.dtype
        return {
            "kind": "simulated",
            "simulated": True,
            "label": "simulated engine",
            "clock": "simulated: cell n starts at 1000 n seconds; not time of any machine",
            "target": {"label": "simulated target", "dtype": dtype, "sha256": None},
            "device": "none",
            "args": self._settings[self.plan.baseline.name].model_dump(mode="json"),
        }

    def describe_arm(self, arm: Arm) -> dict[str, Any]:
        """Resolved settings of one arm."""
        return {
            "speculative": arm.speculative.model_dump(mode="json") if arm.speculative else None,
            "settings": self._settings[arm.name].model_dump(mode="json"),
            "drafter_sha256": None,
        }

    def warm_up(self, cell: Cell, requests: Sequence[PlannedRequest], context: CellContext) -> None:
        """Does nothing: there is nothing to warm."""

    def run_cell(
        self, cell: Cell, requests: Sequence[PlannedRequest], context: CellContext
    ) -> dict[str, pl.DataFrame]:
        """Tables of one cell: all of `schema.CELL_TABLES` but scrapes and telemetry."""
        settings = self._settings[cell.arm.name]
        answers = [self._answer(cell, request, settings) for request in requests]
        engine_steps = self._schedule(cell, answers, settings)
        for _ in answers:
            context.on_request_done()
        tables = {
            "requests": _requests_table(cell, answers, engine_steps, context.run_id, settings),
            "chunks": _chunks_table(answers, engine_steps, context.run_id),
            "steps": _steps_table(cell, answers, context.run_id),
            "engine_steps": _engine_steps_table(cell, engine_steps, context.run_id),
        }
        if self.plan.logging.positions:
            tables["positions"] = _positions_table(cell, answers, context.run_id, settings)
        if self.plan.logging.tokens:
            tables["tokens"] = _tokens_table(cell, answers, context.run_id)
        return tables

    def cell_facts(self) -> dict[str, Any]:
        """Nothing beyond the tables."""
        return {}

    def judge_splits(
        self, splits: pl.DataFrame, requests: pl.DataFrame, prompts: Mapping[str, Prompt]
    ) -> pl.DataFrame:
        """`splits` with the margins that the settings gave those places, in both precisions."""
        digests = dict(zip(requests["prompt_id"], requests["prompt_sha256"], strict=True))
        margins = []
        for row in splits.iter_rows(named=True):
            settings = self._settings[row["arm"]]
            planned = _diverge_fraction(digests[row["prompt_id"]], settings)
            lengths = requests.filter(
                pl.col("prompt_id") == row["prompt_id"],
                pl.col("sampling") == row["sampling"],
                pl.col("arm") == self.plan.baseline.name,
            )["num_output_tokens"]
            place = _diverge_index(planned, lengths[0]) if planned is not None and len(lengths) else None
            deterministic = row["arm"] != row["reference_arm"] and row["index"] == place
            margins.append(settings.diverge_margin if deterministic else settings.unstable_margin)
        values = pl.Series("margin_nats", margins, dtype=pl.Float64)
        return splits.with_columns(values, values.alias("margin_fp64_nats")).select(schema.SPLITS.names)

    def close(self) -> None:
        """Does nothing: there is nothing to free."""

    def _answer(self, cell: Cell, request: PlannedRequest, settings: SimulatedSettings) -> _Answer:
        greedy = cell.sampling.temperature == 0
        speculates = cell.arm.speculative is not None
        sha256 = request.prompt.sha256
        # Texts must not depend on an arm's settings, so effects and answers have streams of their own.
        of_effects = np.random.default_rng(request_seed("simulated effects", sha256))
        of_prompt = np.random.default_rng(request_seed("simulated prompt", sha256))
        of_request = np.random.default_rng(
            request_seed("simulated request", request.seed, cell.cell_id, sha256)
        )
        effect, right, drop, spoiled = of_effects.random(4)
        corrupt = speculates and spoiled < settings.corrupt_rate
        prompt_length = settings.output_tokens[request.prompt.length] * of_prompt.gamma(12.0, 1 / 12.0)
        alpha = _alpha(cell.tier, settings)
        rate_shift = 0.0
        if settings.prompt_concentration is not None and 0 < alpha < 1:
            c = settings.prompt_concentration
            drawn = float(np.clip(beta.ppf(effect, alpha * c, (1 - alpha) * c), 1e-6, 1 - 1e-6))
            rate_shift = _logit(drawn) - _logit(alpha)
        law_rng = of_prompt if greedy else of_request

        wanted = max(1, round(prompt_length if greedy else prompt_length * of_request.gamma(12.0, 1 / 12.0)))
        capped = cell.sampling.ignore_eos or wanted >= request.max_tokens
        length = request.max_tokens if capped else wanted
        mean_top = settings.top_probability[cell.tier]
        top = np.clip(law_rng.beta(mean_top * 6, (1 - mean_top) * 6, size=length), 1e-3, 1 - 1e-6)
        base_ids = of_prompt.integers(_FIRST_TOKEN_ID, _VOCABULARY, size=length)
        if greedy:
            ranks = np.zeros(length, dtype=np.int64)
        else:
            u = law_rng.random(length)
            if speculates and settings.wrong_law:
                u = u ** (1 + settings.wrong_law)
            ranks = np.minimum(np.floor(np.log1p(-u) / np.log1p(-top)), _LARGEST_RANK).astype(np.int64)
        token_ids = _FIRST_TOKEN_ID + (base_ids - _FIRST_TOKEN_ID + ranks) % (_VOCABULARY - _FIRST_TOKEN_ID)
        margins = -np.log1p(-top)
        logprob_shift = np.zeros(length)

        fraction = _diverge_fraction(sha256, settings)
        if greedy and fraction is not None and length > 1:
            place = _diverge_index(fraction, length)
            margins[place] = settings.diverge_margin
            if speculates:
                token_ids[place:] = _other(token_ids[place:])
                logprob_shift[place] -= settings.diverge_margin
        if (
            greedy
            and length > 1
            and cell.concurrency >= settings.unstable_from_concurrency
            and of_request.random() < settings.unstable_rate
        ):
            place = int(of_request.integers(1, length))
            margins[place] = settings.unstable_margin
            logprob_shift[place] -= settings.unstable_margin
            token_ids[place:] = _other(token_ids[place:])
        corrupt_from = None
        if corrupt and length > 8:
            corrupt_from = length // 5
            loop = np.resize(token_ids[corrupt_from : corrupt_from + 2], length - corrupt_from)
            token_ids[corrupt_from:] = loop
        if not capped:
            token_ids[-1] = EOS_TOKEN_ID
        if speculates and settings.truncate < 1:
            length = max(1, math.floor(length * settings.truncate))
            token_ids, ranks, top, margins, logprob_shift = (
                token_ids[:length],
                ranks[:length],
                top[:length],
                margins[:length],
                logprob_shift[:length],
            )

        error_rate = settings.error_rate if speculates else settings.baseline_error_rate
        score = None
        if settings.score is not None:
            score = float(right < settings.score and not (speculates and drop < settings.score_drop))
        answer = _Answer(
            request=request,
            token_ids=token_ids,
            ranks=ranks,
            top_probability=top,
            margins=margins,
            logprob_shift=logprob_shift,
            finish_reason="length" if capped else "stop",
            error=bool(of_request.random() < error_rate),
            score=score,
            rate_shift=rate_shift,
            corrupt_from=corrupt_from,
            drafted=np.zeros(0, dtype=np.int64),
            accepted=np.zeros(0, dtype=np.int64),
            emitted=np.zeros(0, dtype=np.int64),
            rates=[],
        )
        if answer.error:
            answer.token_ids = np.zeros(0, dtype=np.int64)
        else:
            self._draw_steps(cell, answer, settings, of_request)
        return answer

    def _draw_steps(
        self, cell: Cell, answer: _Answer, settings: SimulatedSettings, rng: np.random.Generator
    ) -> None:
        """Effects: fills the step arrays of `answer`; the prefill has emitted token 0 already."""
        length = answer.num_tokens
        num_drafts = _drafts(cell, settings)
        if num_drafts == 0:
            answer.drafted = np.zeros(length - 1, dtype=np.int64)
            answer.accepted = np.zeros(length - 1, dtype=np.int64)
            answer.emitted = np.ones(length - 1, dtype=np.int64)
            answer.rates = [np.zeros(0)] * (length - 1)
            return
        base = _conditional_rates(cell.tier, num_drafts, settings)
        entropy = answer.entropy
        centre = entropy.mean() if settings.entropy_slope else 0.0
        if settings.entropy_slope:
            p = settings.top_probability[cell.tier]
            centre = -(math.log(p) + (1 - p) / p * math.log1p(-p))
        uniforms = rng.random((length, num_drafts))
        sizes = np.full(length, num_drafts)
        if settings.ragged:
            short = rng.random(length) < settings.ragged
            sizes = np.where(short, rng.integers(0, num_drafts, size=length), sizes)
        with np.errstate(divide="ignore"):
            logits = np.log(base) - np.log1p(-base) + answer.rate_shift
        drafted: list[int] = []
        accepted: list[int] = []
        emitted: list[int] = []
        index = 1
        while index < length:
            size = int(sizes[len(drafted)])
            shifted = logits[:size]
            if settings.entropy_slope:
                ahead = np.minimum(np.arange(index, index + size), length - 1)
                shifted = shifted - settings.entropy_slope * (entropy[ahead] - centre)
            rates = 1 / (1 + np.exp(-shifted))
            if answer.corrupt_from is not None and index >= answer.corrupt_from:
                rates = np.zeros(size)
            missed = np.flatnonzero(uniforms[len(drafted), :size] >= rates)
            num_accepted = int(missed[0]) if len(missed) else size
            drafted.append(size)
            accepted.append(num_accepted)
            emitted.append(min(num_accepted + 1, length - index))
            answer.rates.append(rates)
            index += num_accepted + 1
        answer.drafted = np.array(drafted, dtype=np.int64)
        answer.accepted = np.array(accepted, dtype=np.int64)
        answer.emitted = np.array(emitted, dtype=np.int64)

    def _schedule(
        self, cell: Cell, answers: list[_Answer], settings: SimulatedSettings
    ) -> list[dict[str, Any]]:
        """Continuous batching of a closed loop.

        Effects: sets the times of `answers`. Returns one dict an engine step.
        """
        rng = np.random.default_rng(request_seed("simulated speed", self.plan.name, cell.cell_id))
        speed = float(np.exp(rng.normal(0.0, settings.speed_noise)))
        if cell.arm.speculative is not None:
            speed *= settings.speed_factor
        now = _CELL_GAP_S * self._cell_number[cell.cell_id]
        waiting = list(reversed(answers))
        active: list[_Answer] = []
        rows: list[dict[str, Any]] = []
        prefill = 0.0
        while waiting or active:
            admitted: list[_Answer] = []
            while waiting and len(active) + len(admitted) < cell.concurrency:
                answer = waiting.pop()
                answer.sent_s = now
                if answer.error:
                    continue
                now += settings.prefill_s / speed
                prefill += settings.prefill_s / speed
                answer.first_token_s = now
                answer.first_engine_step = len(rows)
                if answer.num_steps:
                    admitted.append(answer)
            active += admitted
            if not active:
                continue
            sizes = [int(answer.drafted[len(rows) - answer.first_engine_step]) for answer in active]
            longest = max(sizes)
            num_query_tokens = len(active) * (longest + 1)
            draft = settings.draft_s / speed if longest else 0.0
            verify = (settings.step_base_s + settings.step_token_s * num_query_tokens) / speed
            now += draft + verify
            rows.append(
                {
                    "engine_step": len(rows),
                    "batch_size": len(active),
                    "num_query_tokens": num_query_tokens,
                    "prefill_s": prefill,
                    "draft_s": draft,
                    "verify_s": verify,
                    "end_s": now,
                }
            )
            prefill = 0.0
            active = [answer for answer in active if answer.first_engine_step + answer.num_steps > len(rows)]
        return rows


def _settings(plan: Plan, arm: Arm) -> SimulatedSettings:
    content = dict(plan.engine.args)
    if arm.speculative is not None:
        content.update({k: v for k, v in (arm.speculative.model_extra or {}).items() if k not in _PLAN_KEYS})
    defaults = SimulatedSettings()
    for name in ("top_probability", "output_tokens"):
        if isinstance(content.get(name), dict):
            content[name] = {**getattr(defaults, name), **content[name]}
    try:
        return SimulatedSettings.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        known = (
            f"; known: {', '.join(SimulatedSettings.model_fields)}"
            if problem["type"] == "extra_forbidden"
            else ""
        )
        raise PlanError(f"engine.args ({arm.name}): {key}: {problem['msg']}{known}") from error


def _alpha(tier: str, settings: SimulatedSettings) -> float:
    if settings.conditional_rates is not None:
        return float(np.mean(settings.conditional_rates))
    return settings.alpha_by_tier.get(tier, settings.alpha)


def _conditional_rates(tier: str, num_drafts: int, settings: SimulatedSettings) -> Floats:
    if settings.conditional_rates is None:
        return np.full(num_drafts, _alpha(tier, settings))
    given = settings.conditional_rates
    return np.array([given[min(position, len(given) - 1)] for position in range(num_drafts)])


def _drafts(cell: Cell, settings: SimulatedSettings) -> int:
    if cell.arm.speculative is None:
        return 0
    off = (
        settings.no_drafts
        if isinstance(settings.no_drafts, bool)
        else cell.sampling.name in settings.no_drafts
    )
    limit = settings.no_drafts_from_concurrency
    if off or (limit is not None and cell.concurrency >= limit):
        return 0
    return cell.arm.speculative.num_speculative_tokens


def _diverge_fraction(sha256: str, settings: SimulatedSettings) -> float | None:
    """Where in a prompt's answer the arms part, as a share of its length; None if they don't."""
    rng = np.random.default_rng(request_seed("simulated divergence", sha256))
    chance, fraction = rng.random(2)
    return float(fraction) if chance < settings.diverge_rate else None


def _diverge_index(fraction: float, length: int) -> int:
    return min(length - 1, 1 + int(fraction * (length - 1))) if length > 1 else 0


def _other(token_ids: Ints) -> Ints:
    return np.asarray(
        _FIRST_TOKEN_ID + (token_ids - _FIRST_TOKEN_ID + 7) % (_VOCABULARY - _FIRST_TOKEN_ID), dtype=np.int64
    )


def _logit(rate: float) -> float:
    return math.log(rate) - math.log1p(-rate)


def _frame(table: schema.Table, columns: dict[str, Any], height: int) -> pl.DataFrame:
    """A frame of `table`: scalars are repeated, arrays must have `height` rows."""
    types = table.polars_schema
    return pl.DataFrame(
        [
            pl.Series(name, columns[name], dtype=types[name])
            if isinstance(columns[name], (list, np.ndarray))
            else pl.repeat(columns[name], height, dtype=types[name], eager=True).alias(name)
            for name in table.names
        ]
    )


def _keys(cell: Cell, run_id: str) -> dict[str, Any]:
    return {"run_id": run_id, "arm": cell.arm.name, "cell_id": cell.cell_id}


def _per_request(answers: Sequence[_Answer], counts: Sequence[int]) -> dict[str, Any]:
    """request_id and prompt_id repeated `counts` times each."""
    return {
        "request_id": np.repeat([answer.request.request_id for answer in answers], counts).tolist(),
        "prompt_id": np.repeat([answer.request.prompt.id for answer in answers], counts).tolist(),
    }


def _end_times(answer: _Answer, engine_steps: Sequence[dict[str, Any]]) -> list[float]:
    first = answer.first_engine_step
    return (
        [row["end_s"] for row in engine_steps[first : first + answer.num_steps]] if answer.num_steps else []
    )


def _joined(arrays: Sequence[Any], dtype: Any) -> NDArray[Any]:
    return (
        np.concatenate([np.asarray(array, dtype=dtype) for array in arrays]) if arrays else np.zeros(0, dtype)
    )


def _requests_table(
    cell: Cell,
    answers: Sequence[_Answer],
    engine_steps: Sequence[dict[str, Any]],
    run_id: str,
    settings: SimulatedSettings,
) -> pl.DataFrame:
    rows = []
    speculates = cell.arm.speculative is not None
    for answer in answers:
        ok = not answer.error
        ends = [answer.first_token_s, *_end_times(answer, engine_steps)]
        prompt_tokens = 8 + len(answer.request.prompt.sha256 + str(answer.request.prompt.to_dict())) // 4
        words = [f"w{token}" for token in answer.token_ids if token != EOS_TOKEN_ID]
        rows.append(
            {
                **_keys(cell, run_id),
                "repeat": cell.repeat,
                "sampling": cell.sampling.name,
                "concurrency": cell.concurrency,
                "request_id": answer.request.request_id,
                "prompt_id": answer.request.prompt.id,
                "prompt_sha256": answer.request.prompt.sha256,
                "task": answer.request.prompt.task,
                "entropy_tier": cell.tier,
                "length_tier": answer.request.prompt.length,
                "scheduled_s": answer.sent_s,
                "sent_s": answer.sent_s,
                "first_token_s": ends[0] if ok else None,
                "first_answer_s": ends[0] if ok else None,
                "last_token_s": ends[-1] if ok else None,
                "num_prompt_tokens": prompt_tokens + (settings.prompt_token_shift if speculates else 0),
                "num_cached_tokens": min(settings.cached_tokens, prompt_tokens) if speculates else 0,
                "num_output_tokens": answer.num_tokens if ok else None,
                "num_first_chunk_tokens": 1 if ok else None,
                "num_chunks": 1 + answer.num_steps if ok else None,
                "finish_reason": answer.finish_reason if ok else None,
                "status": "ok" if ok else "error",
                "error_kind": None if ok else "simulated",
                "error": None if ok else "simulated failure",
                "output_text": " ".join(words) if ok else None,
                "output_token_ids": answer.token_ids.tolist() if ok else None,
                "grader_score": answer.score if ok else None,
                "mean_token_entropy_nats": float(answer.entropy.mean()) if ok else None,
            }
        )
    return pl.DataFrame(rows, schema=schema.REQUESTS.polars_schema, orient="row")


def _chunks_table(
    answers: Sequence[_Answer], engine_steps: Sequence[dict[str, Any]], run_id: str
) -> pl.DataFrame:
    done = [answer for answer in answers if not answer.error]
    counts = [1 + answer.num_steps for answer in done]
    return _frame(
        schema.CHUNKS,
        {
            "run_id": run_id,
            "request_id": _per_request(done, counts)["request_id"],
            "chunk": _joined([np.arange(count) for count in counts], np.int64),
            "received_s": _joined(
                [[answer.first_token_s, *_end_times(answer, engine_steps)] for answer in done], np.float64
            ),
            "num_tokens": _joined([np.append(1, answer.emitted) for answer in done], np.int64),
        },
        sum(counts),
    )


def _steps_table(cell: Cell, answers: Sequence[_Answer], run_id: str) -> pl.DataFrame:
    counts = [answer.num_steps for answer in answers]
    return _frame(
        schema.STEPS,
        {
            **_keys(cell, run_id),
            **_per_request(answers, counts),
            "step": _joined([np.arange(count) for count in counts], np.int64),
            "num_draft_tokens": _joined([answer.drafted for answer in answers], np.int64),
            "num_accepted_tokens": _joined([answer.accepted for answer in answers], np.int64),
            "num_emitted_tokens": _joined([answer.emitted for answer in answers], np.int64),
            "engine_step": _joined(
                [answer.first_engine_step + np.arange(answer.num_steps) for answer in answers], np.int64
            ),
        },
        sum(counts),
    )


def _engine_steps_table(cell: Cell, engine_steps: Sequence[dict[str, Any]], run_id: str) -> pl.DataFrame:
    keys = _keys(cell, run_id)
    return pl.DataFrame([{**keys, **row} for row in engine_steps], schema=schema.ENGINE_STEPS.polars_schema)


def _positions_table(
    cell: Cell, answers: Sequence[_Answer], run_id: str, settings: SimulatedSettings
) -> pl.DataFrame:
    counts = [int(answer.drafted.sum()) for answer in answers]
    height = sum(counts)
    rng = np.random.default_rng(request_seed("simulated positions", cell.cell_id))
    drafted = _joined([answer.drafted for answer in answers], np.int64)
    num_accepted = np.repeat(_joined([answer.accepted for answer in answers], np.int64), drafted)
    position = _joined([np.arange(size) for size in drafted], np.int64)
    rates = _joined([array for answer in answers for array in answer.rates], np.float64)
    reached = position <= num_accepted
    accepted = position < num_accepted
    greedy = cell.sampling.temperature == 0
    draft_prob = rng.beta(6.0, 2.0, size=height)
    target_prob = np.where(accepted, 1.0, 0.0) if greedy else draft_prob * rates
    # The drafter's best candidate is the draft; a refused one leaves the target's pick further down or out.
    rank = np.where(accepted, 0, rng.geometric(0.4, size=height))
    # Unreached places have an answer, too: its draft is right at the same rate.
    right = np.where(reached, accepted, rng.random(height) < rates)
    rank = np.where(right & ~reached, 0, rank)
    rank = np.where(
        right & (rng.random(height) < settings.selector_lift), rng.geometric(0.4, size=height), rank
    )
    outside = ~right & (rng.random(height) < settings.outside_candidates)
    # A lifted draft is a candidate whatever the draw.
    rank = np.where(right, np.minimum(rank, _NUM_CANDIDATES - 1), rank)
    candidate = (rank < _NUM_CANDIDATES) & ~outside
    keeps_candidates = cell.arm.speculative is not None and cell.arm.speculative.method != "ngram"
    first = [1 + np.cumsum(answer.emitted) - answer.emitted for answer in answers]
    index = np.repeat(_joined(first, np.int64), drafted) + position
    in_answer = index < np.repeat([answer.num_tokens for answer in answers], counts)
    frame = _frame(
        schema.POSITIONS,
        {
            **_keys(cell, run_id),
            **_per_request(answers, counts),
            "step": _joined([np.repeat(np.arange(a.num_steps), a.drafted) for a in answers], np.int64),
            "position": position,
            "reached": reached,
            "accepted": accepted,
            "target_rank": rank.astype(np.int64),
            "draft_prob": draft_prob,
            "target_prob": target_prob,
            "in_answer": in_answer,
            "answer_rank": rank.astype(np.int64),
        },
        height,
    )
    return frame.with_columns(
        pl.when(pl.Series(reached & candidate)).then("target_rank").alias("target_rank"),
        pl.when("reached").then("target_prob").alias("target_prob"),
        pl.when(pl.Series(in_answer & candidate & keeps_candidates)).then("answer_rank").alias("answer_rank"),
    )


def _tokens_table(cell: Cell, answers: Sequence[_Answer], run_id: str) -> pl.DataFrame:
    done = [answer for answer in answers if not answer.error]
    counts = [answer.num_tokens for answer in done]
    height = sum(counts)
    top = _joined([answer.top_probability for answer in done], np.float64)
    ranks = _joined([answer.ranks for answer in done], np.int64)
    shift = _joined([answer.logprob_shift for answer in done], np.float64)
    greedy = cell.sampling.temperature == 0
    survivor = np.exp(ranks * np.log1p(-top))
    low = 1 - survivor
    return _frame(
        schema.TOKENS,
        {
            **_keys(cell, run_id),
            **_per_request(done, counts),
            "index": _joined([np.arange(count) for count in counts], np.int64),
            "token_id": _joined([answer.token_ids for answer in done], np.int64),
            "origin": [name for answer in done for name in _origins(answer)],
            "logprob": np.log(top) + ranks * np.log1p(-top) + shift,
            "entropy_nats": _joined([answer.entropy for answer in done], np.float64),
            "top1_top2_margin": _joined([answer.margins for answer in done], np.float64),
            "cdf_low": None if greedy else low,
            "cdf_high": None if greedy else np.minimum(low + survivor * top, 1.0),
        },
        height,
    )


def _origins(answer: _Answer) -> list[str]:
    """Origin of each token; the prefill's token and those of steps without a draft are the target's own."""
    names = ["baseline"]
    for drafted, accepted, emitted in zip(answer.drafted, answer.accepted, answer.emitted, strict=True):
        last = "baseline" if drafted == 0 else "bonus" if accepted == drafted else "recovered"
        names += (["accepted"] * int(accepted) + [last])[: int(emitted)]
    return names
