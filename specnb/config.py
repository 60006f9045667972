"""Plans: what a run measures, validated before anything is spent.

A plan is YAML (design: target, engine, arms, workload, sampling, load, repeats).
Validation is strict: unknown keys are refused with the nearest known key, and every
fault is one line `FILE:LINE: key: what is wrong`. Knows nothing of engines beyond
their names; imports no torch, so that `specnb doctor` and the analysis can read plans
anywhere.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from specnb.errors import PlanError

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_\-]{0,63}$")]
Tier = Literal["low", "medium", "high", "unlabelled"]
Length = Literal["short", "medium", "long", "unlabelled"]

DEMO_TARGET = "demo"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Target(_Strict):
    """The model whose law must be kept.

    `model` is a hub id, a local directory, or `demo` (SmolLM2-135M-Instruct, fetched once).
    """

    model: str = Field(min_length=1)
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    trust_remote_code: bool = False


class Engine(_Strict):
    """How answers are generated; `device` and `num_threads` concern the in-process engine only."""

    kind: Literal["transformers", "vllm", "openai", "simulated"]
    endpoint: Literal["chat", "completions"] = "chat"
    args: dict[str, Any] = Field(default_factory=dict)
    device: str = "auto"
    num_threads: int | None = Field(default=None, ge=1)


class Speculative(BaseModel):
    """One arm's drafter, in vLLM's words. Further keys of the engine's own are passed on unchanged."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False, protected_namespaces=())

    method: str = Field(min_length=1)
    num_speculative_tokens: int = Field(ge=1, le=64)
    model: str | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] | None = None
    rejection_sample_method: Literal["standard", "synthetic", "block", "fly"] | None = None
    prompt_lookup_max: int | None = Field(default=None, ge=1, le=32)
    prompt_lookup_min: int | None = Field(default=None, ge=1, le=32)

    @model_validator(mode="after")
    def _lookup_order(self) -> Self:
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is not None and high is not None and low > high:
            raise ValueError(f"prompt_lookup_min {low} is above prompt_lookup_max {high}")
        return self


class Arm(_Strict):
    """One configuration under test; `speculative` is null for the baseline."""

    name: Name
    speculative: Speculative | None = None
    url: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)


class LengthCaps(_Strict):
    """Output caps in tokens by length tier; a request's cap is the smaller of this and its sampling's."""

    short: int | None = Field(default=None, ge=1)
    medium: int | None = Field(default=None, ge=1)
    long: int | None = Field(default=None, ge=1)
    unlabelled: int | None = Field(default=None, ge=1)


class WorkloadPlan(_Strict):
    """Which prompts; `set` is `builtin-en`, `builtin-zh` or a JSONL path (relative to the plan's folder)."""

    set: str = Field(min_length=1)
    tiers: tuple[Tier, ...] = Field(default=("low", "medium", "high"), min_length=1)
    lengths: tuple[Length, ...] = Field(default=("short", "medium", "long"), min_length=1)
    prompts_per_cell: int | None = Field(default=32, ge=1)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    max_tokens: LengthCaps = Field(default_factory=LengthCaps)


class Sampling(_Strict):
    """One sampling setting. Temperature 0 is greedy; `top_p` 1 and `top_k` 0 switch truncation off.

    `concurrency` and `repeats` narrow this setting to a part of the plan's grid.
    """

    name: Name
    temperature: float = Field(ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_tokens: int = Field(ge=1)
    seed: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    concurrency: tuple[int, ...] | None = None
    repeats: int | None = Field(default=None, ge=1)


class Load(_Strict):
    """How requests arrive: `closed` keeps `concurrency` requests in flight."""

    mode: Literal["closed"] = "closed"
    concurrency: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(min_length=1)
    warmup_requests: int = Field(default=2, ge=0)


class Logging(_Strict):
    """Which per-token tables the in-process engine writes."""

    positions: bool = True
    tokens: bool = True


class Price(_Strict):
    """What an hour of the hardware costs."""

    gpu_hour: float = Field(gt=0)
    currency: str = "USD"


class Plan(_Strict):
    """A validated plan. Read one with `read_plan`; `sha256` identifies what it measures."""

    name: Name
    modelled: bool = False
    target: Target
    engine: Engine
    arms: tuple[Arm, ...] = Field(min_length=1)
    workload: WorkloadPlan
    sampling: tuple[Sampling, ...] = Field(min_length=1)
    load: Load
    repeats: int = Field(default=1, ge=1, le=100)
    order: Literal["abba", "sequential"] = "abba"
    on_error: Literal["continue", "stop"] = "continue"
    allow_differences: bool = False
    logging: Logging = Field(default_factory=Logging)
    price: Price | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _refuse_duplicates("arms", [arm.name for arm in self.arms])
        _refuse_duplicates("sampling", [setting.name for setting in self.sampling])
        for key, values in (
            ("load.concurrency", self.load.concurrency),
            ("workload.tiers", self.workload.tiers),
            ("workload.lengths", self.workload.lengths),
        ):
            _refuse_duplicates(key, [str(value) for value in values])
        baselines = [arm.name for arm in self.arms if arm.speculative is None]
        if len(baselines) != 1:
            found = ", ".join(baselines) or "none"
            raise ValueError(f"arms: exactly one arm has no 'speculative' (the baseline); found {found}")
        different = [arm.name for arm in self.arms if arm.args]
        if different and not self.allow_differences:
            raise ValueError(
                f"arms: {', '.join(different)} differs in more than 'speculative' (args); "
                "move it to engine.args or say allow_differences: true"
            )
        for arm in self.arms:
            method = arm.speculative.rejection_sample_method if arm.speculative else None
            if method in ("synthetic", "fly") and not self.modelled:
                raise ValueError(
                    f"arms: {arm.name} uses {method} acceptance, whose text is not the target's; "
                    "say modelled: true or use standard"
                )
        for setting in self.sampling:
            extra = set(setting.concurrency or ()) - set(self.load.concurrency)
            if extra:
                raise ValueError(
                    f"sampling: {setting.name} asks for concurrency {sorted(extra)} "
                    f"outside load.concurrency {sorted(self.load.concurrency)}"
                )
            if setting.repeats is not None and setting.repeats > self.repeats:
                raise ValueError(
                    f"sampling: {setting.name} wants {setting.repeats} repeats; the plan has {self.repeats}"
                )
        return self

    @property
    def baseline(self) -> Arm:
        """The arm without speculation."""
        return next(arm for arm in self.arms if arm.speculative is None)

    @property
    def sha256(self) -> str:
        """Digest of everything in the plan that can change what is measured (the price can't)."""
        content = self.model_dump(mode="json", exclude={"price"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measured unit: arm x entropy tier x concurrency x sampling x repeat."""

    arm: Arm
    tier: str
    concurrency: int
    sampling: Sampling
    repeat: int

    @property
    def cell_id(self) -> str:
        """Identifier that is also a folder name."""
        return f"{self.arm.name}.{self.tier}.c{self.concurrency}.{self.sampling.name}.r{self.repeat}"


def plan_cells(plan: Plan) -> tuple[Cell, ...]:
    """Every cell of a plan in the order it is measured.

    Cells of one comparison are neighbours; with `order: abba` the arms swap places in every
    other repeat, so that a drift of the machine does not favour one arm.

    Parameters
    ----------
    plan
        A validated plan.

    Returns
    -------
    tuple of Cell
        In measuring order; engines that start a server for each arm may regroup by arm.
    """
    cells: list[Cell] = []
    for repeat in range(plan.repeats):
        arms = plan.arms if plan.order == "sequential" or repeat % 2 == 0 else plan.arms[::-1]
        for setting in plan.sampling:
            if repeat >= (setting.repeats or plan.repeats):
                continue
            cells += [
                Cell(arm=arm, tier=tier, concurrency=concurrency, sampling=setting, repeat=repeat)
                for concurrency in setting.concurrency or plan.load.concurrency
                for tier in plan.workload.tiers
                for arm in arms
            ]
    return tuple(cells)


def read_plan(path: Path | str) -> Plan:
    """The plan in a YAML file, validated.

    Parameters
    ----------
    path
        YAML file. A `workload.set` or model that is an existing path relative to the file's
        folder is resolved to that path.

    Raises
    ------
    PlanError
        One line with file, line, key and fix: missing file, bad YAML, unknown key (the
        nearest known one is named), wrong type or range, a contradiction.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"{path}: can't read the plan ({error.strerror}); give the path of a YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not UTF-8 text (byte {error.start}); save the plan as UTF-8") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise PlanError(f"{path}{line}: not valid YAML ({problem})") from error
    if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
        raise PlanError(
            f"{path}: a plan is a mapping of keys (name, target, engine, arms, ...), not {_kind(content)}"
        )
    for key, line in _duplicate_keys(node):
        raise PlanError(f"{path}:{line}: key '{key}' is given twice; keep one")
    try:
        plan = Plan.model_validate(content)
    except ValidationError as error:
        raise PlanError(_first_problem(path, node, content, error)) from error
    return _resolve_paths(plan, path.parent)


def plan_from_dict(content: dict[str, Any], *, source: str = "plan") -> Plan:
    """The plan in a dict (a manifest's copy, a test); errors as in `read_plan`, without lines."""
    try:
        return Plan.model_validate(content)
    except ValidationError as error:
        raise PlanError(_first_problem(Path(source), None, content, error)) from error


def _resolve_paths(plan: Plan, folder: Path) -> Plan:
    def resolve(value: str) -> str:
        candidate = folder / value
        return str(candidate.resolve()) if candidate.exists() and not Path(value).is_absolute() else value

    update: dict[str, Any] = {}
    if plan.workload.set not in ("builtin-en", "builtin-zh"):
        update["workload"] = plan.workload.model_copy(update={"set": resolve(plan.workload.set)})
    if plan.target.model != DEMO_TARGET:
        update["target"] = plan.target.model_copy(update={"model": resolve(plan.target.model)})
    update["arms"] = tuple(
        arm.model_copy(
            update={
                "speculative": arm.speculative.model_copy(update={"model": resolve(arm.speculative.model)})
            }
        )
        if arm.speculative and arm.speculative.model
        else arm
        for arm in plan.arms
    )
    return plan.model_copy(update=update)


def _refuse_duplicates(key: str, values: Sequence[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{key}: '{value}' is given twice; keep one")


def _kind(value: object) -> str:
    return {"NoneType": "an empty file", "list": "a list", "str": "a text"}.get(
        type(value).__name__, "a number"
    )


def _duplicate_keys(node: yaml.Node) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                yield key.value, key.start_mark.line + 1
            seen.add(key.value)
            yield from _duplicate_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _duplicate_keys(value)


def _line_of(node: yaml.Node | None, location: Sequence[int | str]) -> int | None:
    line = None
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == part]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _known_keys(location: Sequence[int | str]) -> list[str]:
    model: Any = Plan
    for part in location:
        if isinstance(part, int):
            continue
        if part not in model.model_fields:
            return []
        model = _model_of(model.model_fields[part].annotation)
        if model is None:
            return []
    return list(model.model_fields)


def _model_of(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_of(argument)
        if found is not None:
            return found
    return None


def _first_problem(path: Path, node: yaml.Node | None, content: Any, error: ValidationError) -> str:
    problem = error.errors()[0]
    location = problem["loc"]
    line = _line_of(node, location)
    place = f"{path}:{line}" if line else str(path)
    dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    kind = problem["type"]
    if kind == "extra_forbidden":
        parent = ".".join(str(part) for part in location[:-1] if not isinstance(part, int))
        close = difflib.get_close_matches(str(location[-1]), _known_keys(location[:-1]), n=1, cutoff=0.5)
        hint = (
            f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(_known_keys(location[:-1]))}"
        )
        return f"{place}: unknown key '{location[-1]}'{f' in {parent}' if parent else ''}; {hint}"
    if kind == "missing":
        return f"{place}: key '{dotted}' is missing"
    message = problem["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:] if message.startswith("Input should") else message
    value = problem.get("input")
    shown = f", got {value!r}" if isinstance(value, (int, float, str, bool)) or value is None else ""
    if not dotted:
        return f"{place}: {message}"
    return f"{place}: {dotted}: {message}{shown}"
