"""Plans: what a run measures, validated before anything is spent.

A plan is YAML (design: target, engine, arms, workload, sampling, load, repeats).
Validation is strict: unknown keys are refused with the nearest known key, "3" and 3.0 are
not 3, and every fault is one line `FILE:LINE: key: what is wrong`. Knows nothing of
engines beyond their names; imports no torch, so that `specnb doctor` and the analysis can
read plans anywhere.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from specnb.errors import PlanError

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_\-]{0,63}$")]
Tier = Literal["low", "medium", "high", "unlabelled"]
Length = Literal["short", "medium", "long", "unlabelled"]

Concurrency = Annotated[int, Field(ge=1, le=4096)]

DEMO_TARGET = "demo"
BUILTIN_NAMES = (DEMO_TARGET, "builtin-en", "builtin-zh")

# Limits on what a plan file may hold, so that aliases can't blow it up and every number fits a table.
_MAX_NODES = 20_000
_MAX_DEPTH = 40
_LARGEST_INTEGER = 2**63 - 1


PlanModel = TypeVar("PlanModel", bound=BaseModel)


class Strict(BaseModel):
    """A mapping of a plan: no unknown keys, no NaN, nothing changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Target(Strict):
    """The model whose law must be kept.

    `model` is a hub id, a local directory, or `demo` (SmolLM2-135M-Instruct, fetched once).
    """

    model: str = Field(min_length=1)
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    trust_remote_code: bool = False


class Engine(Strict):
    """How answers are generated.

    `device` and `num_threads` concern the in-process engine; `args` (vLLM's options, underscores
    for hyphens), `env`, `python` (the interpreter that has vLLM; a path is relative to the plan's
    file), `port`, `devices` (CUDA_VISIBLE_DEVICES) and `start_timeout_s` concern launched servers;
    `api_key_env` names the environment variable that holds the key of running ones.
    """

    kind: Literal["transformers", "vllm", "openai", "simulated"]
    endpoint: Literal["chat", "completions"] = "chat"
    args: dict[str, Any] = Field(default_factory=dict)
    device: str = Field(default="auto", min_length=1)
    num_threads: int | None = Field(default=None, ge=1)
    python: str | None = Field(default=None, min_length=1)
    env: dict[str, str] = Field(default_factory=dict)
    port: int | None = Field(default=None, ge=1, le=65535)
    devices: str | None = Field(default=None, min_length=1)
    start_timeout_s: float = Field(default=1800, gt=0)
    api_key_env: Name = "SPECNB_API_KEY"

    @model_validator(mode="after")
    def _without_secrets(self) -> Self:
        for name in self.env:
            if re.search(r"TOKEN|KEY|SECRET|PASS|AUTH|CREDENTIAL", name.upper()):
                raise contradiction(
                    "its value would stand in the run's manifest; remove it and set the variable where "
                    "specnb is started",
                    "env",
                    name,
                )
        return self


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
    def _consistent(self) -> Self:
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is not None and high is not None and low > high:
            raise contradiction(f"{low} is above prompt_lookup_max ({high}); swap them", "prompt_lookup_min")
        # Keys of the engine's own are let through, so a typing error in ours would be lost on the way.
        for key in self.model_extra or {}:
            close = difflib.get_close_matches(key, type(self).model_fields, n=1, cutoff=0.85)
            if close:
                raise contradiction(f"unknown key; did you mean '{close[0]}'?", key)
        return self


class Arm(Strict):
    """One configuration under test; `speculative` is null for the baseline."""

    name: Name
    speculative: Speculative | None = None
    url: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)


class LengthCaps(Strict):
    """Output caps in tokens by length tier; a request's cap is the smaller of this and its sampling's."""

    short: int | None = Field(default=None, ge=1)
    medium: int | None = Field(default=None, ge=1)
    long: int | None = Field(default=None, ge=1)
    unlabelled: int | None = Field(default=None, ge=1)


class PromptStep(Strict):
    """From this concurrency on, cells hold this many prompts."""

    from_concurrency: Concurrency
    prompts: int = Field(ge=1)


class WorkloadPlan(Strict):
    """Which prompts; `set` is `builtin-en`, `builtin-zh` or a JSONL path (relative to the plan's folder).

    `prompts_by_concurrency` overrides `prompts_per_cell` from a concurrency on. `nonce` puts a word at
    the start of every prompt that differs between cells and is the same in every arm, so that no
    prefix cache serves one cell from another; answers of different cells are then not comparable.
    """

    set: str = Field(min_length=1)
    tiers: tuple[Tier, ...] = Field(default=("low", "medium", "high"), min_length=1)
    lengths: tuple[Length, ...] = Field(default=("short", "medium", "long"), min_length=1)
    prompts_per_cell: int | None = Field(default=32, ge=1)
    prompts_by_concurrency: tuple[PromptStep, ...] = ()
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    max_tokens: LengthCaps = Field(default_factory=LengthCaps)
    nonce: bool = False

    def num_prompts(self, concurrency: int) -> int | None:
        """Prompts of a cell at this concurrency; None: all that fit the cell's labels."""
        steps = [step for step in self.prompts_by_concurrency if step.from_concurrency <= concurrency]
        return steps[-1].prompts if steps else self.prompts_per_cell


class Sampling(Strict):
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
    concurrency: tuple[Concurrency, ...] | None = Field(default=None, min_length=1)
    repeats: int | None = Field(default=None, ge=1)


class Load(Strict):
    """How requests arrive.

    `closed` keeps `concurrency` requests in flight. `open` sends them at Poisson times of
    `request_rate` a second, or at the times of `trace` (seconds, one a line), with at most
    `concurrency` in flight. Servers are warmed up by at least `concurrency` requests unless
    `warmup_requests` is 0. A stream without a byte for `stall_timeout_s`, a request longer than
    `request_timeout_s` and what is left after `cell_timeout_s` end with a row of their own.
    """

    mode: Literal["closed", "open"] = "closed"
    concurrency: tuple[Concurrency, ...] = Field(min_length=1)
    request_rate: float | None = Field(default=None, gt=0)
    trace: str | None = Field(default=None, min_length=1)
    warmup_requests: int = Field(default=2, ge=0)
    stall_timeout_s: float = Field(default=120, gt=0)
    request_timeout_s: float | None = Field(default=None, gt=0)
    cell_timeout_s: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [name for name in ("request_rate", "trace") if getattr(self, name) is not None]
        if self.mode == "closed" and given:
            raise contradiction("a closed loop sends when a slot is free; say mode: open", given[0])
        if self.mode == "open" and len(given) != 1:
            found = "both" if given else "neither"
            raise contradiction(f"open needs request_rate or trace, found {found}; give one", "mode")
        return self


class Logging(Strict):
    """Which per-token tables the in-process engine writes."""

    positions: bool = True
    tokens: bool = True


class Price(Strict):
    """What an hour of the hardware costs."""

    gpu_hour: float = Field(gt=0)
    currency: str = "USD"


class Claim(Strict):
    """One published figure, and the arm of this plan that stands for it.

    `acceptance_length` counts the bonus token; rates are output tokens a second of all requests together.
    """

    arm: Name
    workload: str = Field(min_length=1)
    concurrency: Concurrency
    acceptance_length: float | None = Field(default=None, ge=1)
    baseline_tokens_per_s: float = Field(gt=0)
    tokens_per_s: float = Field(gt=0)


class Published(Strict):
    """A published result that this plan is to be set beside.

    `source` says where it stands, `conditions` how it was measured, `differences` what is another in
    this plan.
    """

    source: str = Field(min_length=1)
    conditions: str = Field(min_length=1)
    differences: str | None = Field(default=None, min_length=1)
    claims: tuple[Claim, ...] = Field(min_length=1)


class Plan(Strict):
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
    published: Published | None = None
    _folder: Path = PrivateAttr(default_factory=Path)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse_duplicates([arm.name for arm in self.arms], "arms", inner="name")
        refuse_duplicates([setting.name for setting in self.sampling], "sampling", inner="name")
        refuse_duplicates(self.load.concurrency, "load", "concurrency")
        refuse_duplicates(self.workload.tiers, "workload", "tiers")
        refuse_duplicates(self.workload.lengths, "workload", "lengths")
        self._check_arms()
        names = [arm.name for arm in self.arms if arm.speculative is not None]
        for number, claim in enumerate(self.published.claims if self.published else ()):
            if claim.arm not in names:
                raise contradiction(
                    f"'{claim.arm}' is no arm that speculates ({_listed(names)}); name one",
                    *("published", "claims", number, "arm"),
                )
        steps = [step.from_concurrency for step in self.workload.prompts_by_concurrency]
        if steps != sorted(set(steps)):
            raise contradiction(
                f"from_concurrency {_listed(steps)} must rise; sort them",
                "workload",
                "prompts_by_concurrency",
            )
        if self.load.mode == "open" and self.engine.kind in ("transformers", "simulated"):
            raise contradiction("only servers take an open loop; say closed", "load", "mode")
        for number, setting in enumerate(self.sampling):
            place = ("sampling", number)
            refuse_duplicates(setting.concurrency or (), *place, "concurrency")
            extra = sorted(set(setting.concurrency or ()) - set(self.load.concurrency))
            if extra:
                raise contradiction(
                    f"{extra[0]} is not in load.concurrency ({_listed(self.load.concurrency)}); add it there",
                    *place,
                    "concurrency",
                )
            if setting.repeats is not None and setting.repeats > self.repeats:
                raise contradiction(
                    f"{setting.repeats} is more than the plan's repeats ({self.repeats}); raise those",
                    *place,
                    "repeats",
                )
        return self

    def _check_arms(self) -> None:
        baselines = [arm.name for arm in self.arms if arm.speculative is None]
        if len(baselines) != 1:
            found = _listed(baselines) or "none"
            raise contradiction(
                f"exactly one arm has no 'speculative', the baseline; found {found}; "
                + ("keep one" if baselines else "add {name: baseline}"),
                "arms",
            )
        for number, arm in enumerate(self.arms):
            place = ("arms", number)
            if self.engine.kind == "transformers" and arm.args:
                raise contradiction("the in-process engine takes no args; remove them", *place, "args")
            if arm.args and not self.allow_differences:
                raise contradiction(
                    f"{arm.name} differs in more than 'speculative'; move this to engine.args "
                    "or say allow_differences: true",
                    *place,
                    "args",
                )
            if arm.url is not None and self.engine.kind != "openai":
                raise contradiction(
                    f"only engine.kind openai takes a url, not {self.engine.kind}; remove it", *place, "url"
                )
            if arm.url is None and self.engine.kind == "openai":
                raise contradiction("engine.kind openai needs a url for each arm; add it", *place, "url")
            method = arm.speculative.rejection_sample_method if arm.speculative else None
            if method in ("synthetic", "fly") and not self.modelled:
                raise contradiction(
                    f"with {method} acceptance the text is not the target's; use standard "
                    "or say modelled: true",
                    *place,
                    "speculative",
                    "rejection_sample_method",
                )
        if self.engine.kind == "transformers" and self.engine.args:
            raise contradiction("the in-process engine takes no args; remove them", "engine", "args")

    def located(self, name: str) -> str:
        """A model or workload name of the plan, as a path if there is such a file beside the plan's file.

        The plan keeps the name as it was written: a manifest holds no folder of this machine, and
        the same plan has the same digest in every checkout.
        """
        if name in BUILTIN_NAMES or Path(name).is_absolute():
            return name
        try:
            found = (self._folder / name).exists()
        except (OSError, ValueError):  # too long for a path, or a NUL in it: no path
            found = False
        return str((self._folder / name).resolve()) if found else name

    @property
    def server_python(self) -> str | None:
        """`engine.python`, one with a slash as an absolute path from the folder of the plan's file.

        Links are kept, unlike in `located`: an environment's interpreter is a link, and its place names the
        environment. A name without a slash is left to the search path; None: the plan names none.
        """
        python = self.engine.python
        return str(self._folder.resolve() / python) if python is not None and "/" in python else python

    @property
    def baseline(self) -> Arm:
        """The arm without speculation."""
        return next(arm for arm in self.arms if arm.speculative is None)

    @property
    def sha256(self) -> str:
        """Digest of everything in the plan that can change what is measured (price and claims can't)."""
        content = self.model_dump(mode="json", exclude={"price", "published"})
        for section, (model, keys) in _ADDED_KEYS.items():
            for key in keys:
                if content[section][key] == _plain_default(model, key):
                    del content[section][key]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# Keys that plans of version 0.1.0 did not have: left out of the digest where they hold their default,
# so that a run measured then keeps the digest of its plan.
_ADDED_KEYS: dict[str, tuple[type[BaseModel], tuple[str, ...]]] = {
    "engine": (Engine, ("python", "env", "port", "devices", "start_timeout_s", "api_key_env")),
    "workload": (WorkloadPlan, ("prompts_by_concurrency", "nonce")),
    "load": (
        Load,
        ("request_rate", "trace", "stall_timeout_s", "request_timeout_s", "cell_timeout_s"),
    ),
}


def _plain_default(model: type[BaseModel], key: str) -> Any:
    """A field's default as it stands in a JSON dump."""
    default = model.model_fields[key].get_default(call_default_factory=True)
    return list(default) if isinstance(default, tuple) else default


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
        In measuring order. Where a server is launched for each arm, an arm's cells of one repeat are
        neighbours instead.
    """
    cells: list[Cell] = []
    by_arm = plan.engine.kind == "vllm"
    for repeat in range(plan.repeats):
        arms = plan.arms if plan.order == "sequential" or repeat % 2 == 0 else plan.arms[::-1]
        found: list[Cell] = []
        for setting in plan.sampling:
            if repeat >= (setting.repeats or plan.repeats):
                continue
            found += [
                Cell(arm=arm, tier=tier, concurrency=concurrency, sampling=setting, repeat=repeat)
                for concurrency in setting.concurrency or plan.load.concurrency
                for tier in plan.workload.tiers
                for arm in arms
            ]
        # A launched server serves all cells of its arm and repeat before the next one starts.
        cells += sorted(found, key=lambda cell: arms.index(cell.arm)) if by_arm else found
    return tuple(cells)


def read_plan(path: Path | str) -> Plan:
    """The plan in a YAML file, validated.

    Parameters
    ----------
    path
        YAML file. Paths in it are relative to its folder (`Plan.located`).

    Raises
    ------
    PlanError
        One line with file, line, key and fix: missing file, bad YAML, unknown key (the
        nearest known one is named), wrong type or range, a contradiction.
    """
    path = Path(path)
    node, content = parsed_plan(path)
    plan = validated_plan(Plan, content, source=str(path), node=node)
    plan._folder = path.parent
    return plan


def plan_from_dict(content: dict[str, Any], *, source: str = "plan") -> Plan:
    """The plan in a dict (a manifest's copy, a test); errors as in `read_plan`, without lines."""
    return validated_plan(Plan, content, source=source)


def parsed_plan(path: Path) -> tuple[yaml.Node, dict[str, Any]]:
    """A plan file's node tree and content, which is plain: what JSON can hold, keys unique."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise PlanError(
            f"{path}: can't read the plan ({error.strerror}); give the path of a YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not UTF-8 text (byte {error.start}); save the plan as UTF-8") from error
    except ValueError as error:  # a NUL in the path
        raise PlanError(f"{str(path)!r}: not a path ({error}); give the path of a YAML file") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if isinstance(node, yaml.MappingNode):
            _refuse_unplain(path, node)
        content = yaml.safe_load(text)
    except RecursionError as error:
        raise PlanError(f"{path}: nested too deeply; a plan has {_MAX_DEPTH} levels at most") from error
    except yaml.reader.ReaderError as error:
        place = f"{path}:{text.count(chr(10), 0, error.position) + 1}"
        shown = f"#x{ord(text[error.position]):02x}"
        raise PlanError(f"{place}: character {shown} is not text; remove it") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        if "'\\t'" in problem:
            problem = "a tab; indent with spaces"
        elif problem == "but found another document":
            problem = "a second document; keep one"
        raise PlanError(f"{path}{line}: not valid YAML ({problem})") from error
    if not isinstance(node, yaml.MappingNode) or not isinstance(content, dict):
        raise PlanError(
            f"{path}: a plan is a mapping of keys (name, target, engine, arms, ...), not {_kind(content)}"
        )
    return node, content


def _refuse_unplain(path: Path, root: yaml.Node) -> None:
    """Refuses what a plan can't hold: duplicate keys, keys that aren't text, dates, huge numbers, loops."""
    pending: list[tuple[yaml.Node, int]] = [(root, 0)]
    num_nodes = 0
    while pending:
        node, depth = pending.pop()
        num_nodes += 1
        place = f"{path}:{node.start_mark.line + 1}"
        if depth > _MAX_DEPTH:
            raise PlanError(
                f"{place}: nested too deeply, or an alias of itself; a plan has {_MAX_DEPTH} levels at most"
            )
        if num_nodes > _MAX_NODES:
            raise PlanError(
                f"{place}: more than {_MAX_NODES} values with aliases written out; shorten the plan"
            )
        if isinstance(node, yaml.MappingNode):
            _refuse_bad_keys(path, node)
            pending += [(value, depth + 1) for _, value in reversed(node.value)]
        elif isinstance(node, yaml.SequenceNode):
            pending += [(value, depth + 1) for value in reversed(node.value)]
        problem = _unplain(node)
        if problem:
            raise PlanError(f"{place}: {problem}")


def _refuse_bad_keys(path: Path, node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        place = f"{path}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode) or key.tag.rpartition(":")[2] not in ("str", "merge"):
            shown = f" {key.value}" if isinstance(key, yaml.ScalarNode) else ""
            raise PlanError(f"{place}: key{shown} is not text; put it in quotes")
        if key.value in seen:
            raise PlanError(f"{place}: key {key.value!r} is given twice; keep one")
        seen.add(key.value)


def _unplain(node: yaml.Node) -> str | None:
    """What is wrong with one node; None if JSON could hold it."""
    prefix, _, kind = node.tag.rpartition(":")
    if prefix != "tag:yaml.org,2002" or kind not in ("str", "int", "float", "bool", "null", "seq", "map"):
        shown = f" {node.value}" if kind == "timestamp" else ""
        name = "date" if kind == "timestamp" else f"YAML tag {kind}"
        return f"a {name}{shown}, which a plan can't hold; write text in quotes"
    if kind == "str" and "\0" in node.value:
        return "a NUL character; remove it"
    if kind == "str" and any("\ud800" <= char <= "\udfff" for char in node.value):
        return "a lone surrogate (\\ud800 to \\udfff); write the whole character"
    if kind not in ("int", "float", "bool"):
        return None
    if len(node.value) > 80:
        return f"number {_short(node.value)} is out of range; the largest is 2**63 - 1"
    try:
        value = yaml.SafeLoader("").construct_object(node)
    except (ValueError, KeyError):
        return f"{_short(node.value)} is not {'true or false' if kind == 'bool' else 'a number'}; quote text"
    if kind == "int" and abs(value) > _LARGEST_INTEGER:
        return f"number {node.value} is out of range; the largest is 2**63 - 1"
    if kind == "float" and not math.isfinite(value):
        return f"{node.value} is not a finite number; write a number"
    return None


def validated_plan(
    model: type[PlanModel], content: dict[str, Any], *, source: str, node: yaml.Node | None = None
) -> PlanModel:
    """A plan's content as `model`; `node` is the file's node tree, for line numbers.

    Raises
    ------
    PlanError
        One line with source, line, key and fix.
    """
    try:
        # Through JSON, so that strictness is about types in the file and lists can become tuples.
        text = json.dumps(content, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(
            f"{source}: holds a value that JSON can't hold ({error}); use plain values"
        ) from error
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise PlanError(_first_problem(model, source, node, error)) from error


def contradiction(message: str, *location: int | str) -> PydanticCustomError:
    """A fault that a validator found at `location`, seen from the validated model."""
    return PydanticCustomError("contradiction", "{message}", {"message": message, "location": location})


def refuse_duplicates(values: Sequence[object], *location: int | str, inner: str | None = None) -> None:
    """Raises a fault at the first value that stood before, seen from the validated model."""
    for number, value in enumerate(values):
        if value in values[:number]:
            place = (*location, number, inner) if inner else (*location, number)
            raise contradiction(f"{value!r} is given twice; keep one", *place)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)


def _kind(value: object) -> str:
    return {
        "NoneType": "an empty file",
        "list": "a list",
        "str": "a text",
        "bool": "true or false",
        "date": "a date",
        "datetime": "a date",
    }.get(type(value).__name__, "a number")


def _line_of(node: yaml.Node | None, location: Sequence[int | str]) -> int | None:
    """Line of the deepest part of `location` that the file holds; the first line for the whole plan."""
    line = node.start_mark.line + 1 if node else None
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


def _known_keys(plan: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Keys of the mapping at `location`; empty where the plan leaves them to the engine."""
    model: Any = plan
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


def _dotted(location: Sequence[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_NAME_RULE = "must be 1 to 64 letters, digits, '_' or '-', beginning with a letter or digit"


def _first_problem(
    model: type[BaseModel], source: str, node: yaml.Node | None, error: ValidationError
) -> str:
    """The fault to mend first as one line: an unknown key explains a missing one, so it goes first."""
    problems = error.errors()
    problem = problems[0]
    if problem["type"] == "missing":
        parent = problem["loc"][:-1]
        typos = [p for p in problems if p["type"] == "extra_forbidden" and p["loc"][:-1] == parent]
        problem = typos[0] if typos else problem
    location = problem["loc"]
    context = problem.get("ctx", {})
    kind = problem["type"]
    if kind == "contradiction":
        location = (*location, *context["location"])
    line = _line_of(node, location)
    place = f"{source}:{line}" if line else source
    if kind == "extra_forbidden":
        return f"{place}: {_unknown_key(model, location)}"
    if kind == "missing":
        hint = _lookalike(model, location, problem["input"])
        return f"{place}: key '{_dotted(location)}' is missing; add it{hint}"
    return f"{place}: {_dotted(location)}: {_explained(kind, context, problem)}"


def _unknown_key(model: type[BaseModel], location: Sequence[int | str]) -> str:
    known = _known_keys(model, location[:-1])
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(known)}"
    parent = _dotted(location[:-1])
    shown = _short(repr(location[-1]))
    return f"unknown key {shown}{f' in {parent}' if parent else ''}; {hint}"


def _lookalike(model: type[BaseModel], location: Sequence[int | str], given: Any) -> str:
    """A key that may be the missing one misspelt, where unknown keys are let through."""
    known = _known_keys(model, location[:-1])
    others = [key for key in given if key not in known] if isinstance(given, dict) else []
    close = difflib.get_close_matches(str(location[-1]), others, n=1, cutoff=0.6)
    return f", or is '{close[0]}' meant for it?" if close else ""


def _explained(kind: str, context: dict[str, Any], problem: Any) -> str:
    """What is wrong with a value, in the plan's words, and the value."""
    value = problem["input"]
    rules = {
        "greater_than": "must be above {gt:g}",
        "greater_than_equal": "must be at least {ge:g}",
        "less_than_equal": "must be at most {le:g}",
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "string_type": "must be text, in quotes if need be",
        "bool_type": "must be true or false",
        "tuple_type": "must be a list, such as [1, 2]",
        "dict_type": "must be a mapping of keys",
        "model_type": "must be a mapping of keys",
        "literal_error": "must be {expected}",
        "string_pattern_mismatch": _NAME_RULE,
    }
    if kind == "contradiction":
        return str(context["message"])
    if kind in ("too_short", "string_too_short"):
        return "is empty; give at least one" if kind == "too_short" else "is empty; give a text"
    rule = rules[kind].format(**context) if kind in rules else str(problem["msg"])
    if isinstance(value, (list, dict)):
        return f"{rule}, not a {'list' if isinstance(value, list) else 'mapping'}"
    shown = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return f"{rule}, got {_short(shown)}{_as_number(value) if kind in ('int_type', 'float_type') else ''}"


def _as_number(value: object) -> str:
    """A hint where a number was written as text; YAML takes 1e-3 for text too."""
    try:
        return f"; write {float(value):g}" if isinstance(value, str) else ""
    except ValueError:
        return ""
