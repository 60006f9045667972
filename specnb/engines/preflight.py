"""What a plan for a server needs of this machine, checked before any GPU time is spent.

For servers that are launched (vLLM): its version, the GPUs, the port, and memory for target,
drafter, draft logits, keys and values. For servers that are running: whether they answer and
serve the plan's model. Reads headers of models and asks the driver; starts nothing and loads no
torch. Separate from `doctor`, which asks the same of every engine and puts the answers together.

Estimates are rough and say so; they exist to catch plans that are off by a factor.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import math
import os
import re
import resource
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from specnb import telemetry
from specnb.config import Arm, Plan, plan_cells
from specnb.engines import support
from specnb.engines.footprint import DTYPE_BYTES, Model, cache_bytes_per_token
from specnb.errors import EngineError, PlanError, SpecnbError
from specnb.load import trace_arrivals

State = Literal["ok", "warns", "FAILS", "n/a"]

PIN: Final = re.compile(r"([A-Za-z0-9_.\-]+)==([^;\s]+)\s*(?:;\s*(.*))?")
"""A pinned requirement: name, version, marker."""

# Descriptors that a run holds beside its streams: logs, tables, the interpreter's own.
_OTHER_DESCRIPTORS: Final = 64
_SERVER_TIMEOUT_S: Final = 5.0
# vLLM's defaults (vllm/config/cache.py, vllm/engine/arg_utils.py of 0.32).
_GPU_MEMORY_UTILIZATION: Final = 0.92
_LARGE_GPU_BYTES: Final = 70 << 30
_MAX_NUM_SEQS: Final = {"large": 1024, "small": 256}
# Activations, CUDA graphs and the CUDA context of a server; an assumption.
_WORKSPACE_BYTES: Final = 3 << 30
# Memory bandwidth in bytes a second by a part of the card's name, from NVIDIA's data sheets.
_BANDWIDTH: Final = {
    "B200": 8.0e12,
    "H200": 4.8e12,
    "H100": 3.35e12,
    "A100": 2.0e12,
    "L40S": 0.864e12,
    "L40": 0.864e12,
    "L4": 0.3e12,
    "RTX 4090": 1.008e12,
    "RTX 3090": 0.936e12,
}
# Seen in data/samples/h200-27b-modelled: one request decodes 67 tokens a second on an H200, where reading
# 51.4 GB of weights allows 93.
_REACHED_BANDWIDTH: Final = 0.7
_SERVER_START_S: Final = 90.0
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: its name, `ok`, `warns`, `FAILS` or `n/a`, and one line with what was found and the fix."""

    name: str
    state: State
    detail: str


def ok(name: str, detail: str) -> Finding:
    """A check that found nothing wrong."""
    return Finding(name=name, state="ok", detail=detail)


def warns(name: str, detail: str) -> Finding:
    """A run can be measured, with the limit that `detail` states."""
    return Finding(name=name, state="warns", detail=detail)


def fails(name: str, detail: str) -> Finding:
    """A run can't be measured, or can't be trusted, as things are."""
    return Finding(name=name, state="FAILS", detail=detail)


def not_applicable(name: str, detail: str) -> Finding:
    """A check that this plan or machine gives no cause for."""
    return Finding(name=name, state="n/a", detail=detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """The vLLM that would serve a plan: its version, or why there is none; both None for other engines."""

    found: str | None = None
    problem: str | None = None

    @classmethod
    def of(cls, plan: Plan | None) -> ServedVersion:
        """Asks the plan's interpreter, in a process of its own."""
        if plan is None or plan.engine.kind != "vllm":
            return cls()
        try:
            return cls(found=support.installed_version(plan.server_python))
        except EngineError as error:
            return cls(problem=str(error))

    @property
    def is_cpu_build(self) -> bool:
        """Whether it is the build for the CPU, which needs no GPU."""
        return self.found is not None and support.is_cpu_build(self.found)


def pinned(name: str) -> str | None:
    """Version that an extra of specnb pins; None if none does."""
    try:
        requirements = importlib.metadata.requires("specnb") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    pins = [PIN.fullmatch(requirement) for requirement in requirements]
    return next((pin[2] for pin in pins if pin is not None and pin[1] == name), None)


def support_findings(plan: Plan, version: ServedVersion) -> list[Finding]:
    """The plan against what its vLLM supports, or, where none is installed, the version that is pinned."""
    if plan.engine.kind != "vllm":
        return []
    judged = version.found or pinned("vllm")
    if judged is None:
        return []
    note = "" if version.found else f" (judged for vLLM {judged})"
    findings = [fails("support", line + note) for line in support.refusals(plan, judged)]
    findings += [warns("support", line + note) for line in support.warnings(plan, judged)]
    return findings or [ok("support", f"vLLM {judged} supports the plan")]


def gpu_finding(plan: Plan, cards: Sequence[tuple[str, int]]) -> Finding:
    """The cards that a launched server would use: there, enough of them, and free.

    Parameters
    ----------
    plan
        A plan with `engine.kind: vllm`.
    cards
        Name and memory in bytes of each GPU of this machine.
    """
    if not cards:
        return fails("gpu", "no NVIDIA GPU found (nvidia-smi); engine.kind vllm needs one")
    shown = "; ".join(f"{name}, {gib(memory)}" for name, memory in cards)
    chosen = _devices(plan, len(cards))
    absent = [device for device in chosen if device.isdigit() and int(device) >= len(cards)]
    if absent:
        last = len(cards) - 1
        return fails("gpu", f"engine.devices names {absent[0]}, the last GPU here is {last}; mend it")
    needed = _num_gpus(plan)
    if needed > len(chosen):
        return fails(
            "gpu", f"the plan's parallelism needs {needed} GPUs of {len(chosen)}; lower it ({shown})"
        )
    share = _number(plan, "gpu_memory_utilization", _GPU_MEMORY_UTILIZATION)
    used = telemetry.gpu_memory_used()
    for device in chosen[:needed]:
        memory = cards[int(device)][1] if device.isdigit() else math.inf
        if used.get(device, 0) > (1 - share) * memory:
            holders = telemetry.gpu_processes().get(device, ())
            who = f" (processes {', '.join(str(pid) for pid in holders)})" if holders else ""
            return fails(
                "gpu",
                f"GPU {device}: {gib(used[device])} of {gib(memory)} in use{who}, and vLLM wants {share:g} "
                "of it free; end what holds it",
            )
    return ok("gpu", shown)


def nvidia_cards() -> list[tuple[str, int]]:
    """Name and memory in bytes of each card that the driver reports, without CUDA."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rpartition(",") for line in lines.splitlines() if "," in line]
    return [(name.strip(), int(mib) << 20) for name, _, mib in rows if mib.strip().isdigit()]


def _devices(plan: Plan, count: int) -> list[str]:
    """Names of the cards a launched server may use, in its order."""
    named = plan.engine.devices or _environment(plan).get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(count)]


def _num_gpus(plan: Plan) -> int:
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return math.prod(int(_number(plan, name, 1)) for name in sizes)


def _number(plan: Plan, name: str, default: float) -> float:
    """A numeric option of the launched server; its default where the plan has none, or no number."""
    value = support.server_options(plan, plan.baseline).get(name)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else default


def port_findings(plan: Plan) -> list[Finding]:
    """Whether the plan's port is free; without one, a free port is chosen at launch."""
    port = plan.engine.port
    if plan.engine.kind != "vllm" or port is None:
        return []
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            why = "in use; stop what listens there" if error.errno == errno.EADDRINUSE else error.strerror
            return [fails("port", f"engine.port {port}: {why}, or leave engine.port out to get a free one")]
    return [ok("port", f"{port} is free")]


def descriptors_finding(plan: Plan) -> Finding:
    """Whether the system lets one process hold as many streams as the plan keeps open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(plan.load.concurrency) + _OTHER_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < needed:
        return fails(
            "descriptors", f"{hard} allowed (ulimit -Hn), {needed} needed; raise it or lower the concurrency"
        )
    shown = "no limit" if hard == resource.RLIM_INFINITY else f"{hard} allowed"
    return ok("descriptors", f"{shown}, {needed} needed")


def arrival_findings(plan: Plan, num_requests: int) -> list[Finding]:
    """Whether the trace of an open loop holds enough arrivals for the largest cell."""
    if plan.load.trace is None:
        return []
    try:
        times = trace_arrivals(plan.located(plan.load.trace), num_requests)
    except PlanError as error:
        return [fails("arrivals", str(error))]
    return [ok("arrivals", f"{num_requests} arrivals over {times[-1]:.1f} s")]


def server_findings(plan: Plan) -> list[Finding]:
    """Running servers that a plan attaches to: the key's variable, and what each arm's server serves."""
    if plan.engine.kind != "openai":
        return []
    name = plan.engine.api_key_env
    key = os.environ.get(name)
    first = ok("api key", f"{name} is set") if key else None
    first = first or not_applicable("api key", f"{name} is not set: requests carry no key")
    return [first, *(server_finding(plan, arm, key) for arm in plan.arms)]


def server_finding(plan: Plan, arm: Arm, key: str | None) -> Finding:
    """One question to an arm's server: is it there, and does it serve the plan's model?"""
    from specnb.engines.openai import fetch

    name, url = f"server {arm.name}", arm.url or ""
    try:
        status, body = fetch(url, "/v1/models", timeout_s=_SERVER_TIMEOUT_S, api_key=key)
    except SpecnbError as error:
        return fails(name, str(error))
    if status in (401, 403):
        return fails(name, f"{url}: refuses the key (HTTP {status}); set {plan.engine.api_key_env}")
    try:
        served = [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        return fails(name, f"{url}: no list of models (HTTP {status}); is it an OpenAI-compatible server?")
    if status != 200 or plan.target.model not in served:
        shown = ", ".join(served[:3]) or "nothing"
        return fails(name, f"{url}: serves {shown}, not target.model {plan.target.model}; mend one of them")
    same = [other.name for other in plan.arms if other.url == arm.url and other.name != arm.name]
    if same:
        return warns(name, f"{url} is the server of {', '.join(same)}, too: the arms can't differ")
    return ok(name, f"{url} serves {plan.target.model}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one arm's server takes on each GPU, in bytes, and for each token of each sequence."""

    arm: str
    weights: int
    drafter: int
    draft_logits: int
    cache_per_token: float

    @property
    def fixed(self) -> int:
        """What is taken before the first token."""
        return self.weights + self.drafter + self.draft_logits

    @property
    def shown(self) -> str:
        """The parts of `fixed` in words."""
        parts = f"weights {gib(self.weights)}"
        parts += f", drafter {gib(self.drafter)}" if self.drafter else ""
        return parts + (f", draft logits {gib(self.draft_logits)}" if self.draft_logits else "")


def footprint(
    plan: Plan, arm: Arm, *, target: Model, drafter: Model | None, max_num_seqs: int
) -> Footprint | None:
    """One arm's needs on each GPU; None where the target's headers don't tell.

    Parameters
    ----------
    plan, arm
        A plan with `engine.kind: vllm`, and one of its arms.
    target, drafter
        Headers of the models; a drafter without a model of its own (n-gram, MTP) is None.
    max_num_seqs
        Sequences that vLLM makes room for.

    Notes
    -----
    Weights are split over tensor and pipeline parallel GPUs, the drafter's over tensor parallel ones
    unless `draft_tensor_parallel_size` is 1. With `draft_sample_method: probabilistic` vLLM keeps the
    draft's logits whole on each GPU, [max_num_seqs, K, vocabulary], taken as 4 bytes each (DFlash 2).
    Keys and values are split over as many GPUs as there are heads.
    """
    dtype = plan.target.dtype
    weights = target.weight_bytes(dtype)
    kind = support.server_options(plan, arm).get("kv_cache_dtype", "auto")
    size = 1 if str(kind).startswith("fp8") else DTYPE_BYTES.get(dtype, 2)
    cache = cache_bytes_per_token(target.config, size=size)
    if weights is None or cache is None:
        return None
    tensor, pipeline = (int(_number(plan, f"{name}_parallel_size", 1)) for name in ("tensor", "pipeline"))
    heads = target.text_config.get("num_key_value_heads") or target.text_config["num_attention_heads"]
    drafter_bytes = logits = 0
    if drafter is not None and arm.speculative is not None:
        alone = (arm.speculative.model_extra or {}).get("draft_tensor_parallel_size") == 1
        drafter_bytes = (drafter.weight_bytes(dtype) or 0) // (1 if alone else tensor)
        cache += cache_bytes_per_token(drafter.config, size=size) or 0
    if arm.speculative is not None and arm.speculative.draft_sample_method == "probabilistic":
        vocabulary = int(target.text_config.get("vocab_size") or 0)
        logits = 4 * max_num_seqs * arm.speculative.num_speculative_tokens * vocabulary
    return Footprint(
        arm=arm.name,
        weights=weights // (tensor * pipeline),
        drafter=drafter_bytes,
        draft_logits=logits,
        cache_per_token=cache / (min(tensor, int(heads)) * pipeline),
    )


def gpu_memory(
    plan: Plan,
    *,
    target: Model,
    drafters: Mapping[str, Model],
    cards: Sequence[tuple[str, int]],
    longest: int,
) -> Finding:
    """A launched server's GPUs: weights, drafter and draft logits, then keys and values in what is left.

    vLLM does not start unless one sequence of `max_model_len` fits; requests that don't fit at once wait.

    Parameters
    ----------
    plan
        A plan with `engine.kind: vllm`.
    target, drafters
        Headers of the target, and of the drafters by arm where they are known.
    cards
        Name and memory in bytes of each GPU of this machine; empty: unknown.
    longest
        Tokens of the longest request, answer included.
    """
    chosen = [int(device) for device in _devices(plan, len(cards)) if device.isdigit()]
    memories = [cards[number][1] for number in chosen[: _num_gpus(plan)] if number < len(cards)]
    memory = min(memories, default=None)
    large = memory is not None and memory >= _LARGE_GPU_BYTES
    seqs = int(_number(plan, "max_num_seqs", _MAX_NUM_SEQS["large" if large else "small"]))
    needs = [
        footprint(plan, arm, target=target, drafter=drafters.get(arm.name), max_num_seqs=seqs)
        for arm in plan.arms
    ]
    known = [need for need in needs if need is not None]
    limit = max_model_len(plan, target)
    if not known or limit is None:
        return not_applicable("memory", "config.json does not tell what the target needs; not estimated")
    most = max(known, key=lambda need: need.fixed + limit * need.cache_per_token)
    shown = f"arm {most.arm}: about {gib(most.fixed)} ({most.shown})"
    if memory is None:
        return warns("memory", f"{shown} on each GPU, and keys and values; the GPU's memory is unknown here")
    share = _number(plan, "gpu_memory_utilization", _GPU_MEMORY_UTILIZATION)
    left = share * memory - most.fixed - _WORKSPACE_BYTES
    shown += f" of {gib(share * memory)} ({share:g} of {gib(memory)}"
    shown += f", {_num_gpus(plan)} GPUs)" if _num_gpus(plan) > 1 else ")"
    if left < limit * most.cache_per_token:
        one = gib(limit * most.cache_per_token)
        lack = f"one sequence of {limit} tokens needs {one}, {gib(max(0, left))} are left"
        fix = "lower max_model_len or max_num_seqs, use more GPUs, or a smaller dtype"
        return fails("memory", f"{shown}; {lack}: the server will not start; {fix}")
    tokens, highest = int(left / most.cache_per_token), max(plan.load.concurrency)
    longest = min(limit, longest)
    shown += f"; {gib(left)} are left for {tokens:,} tokens"
    if tokens < highest * longest:
        fits = f"{tokens // longest} of {highest} requests of at most {longest} fit at once"
        return warns("memory", f"{shown}: {fits}, the others wait in the server; lower the concurrency")
    return ok("memory", f"{shown}, {highest} requests of at most {longest} need {highest * longest:,}")


def cpu_memory(plan: Plan, *, target: Model, memory_bytes: int | None) -> Finding:
    """The host of vLLM's build for the CPU: weights, and the cache it is told to make."""
    need = footprint(plan, plan.baseline, target=target, drafter=None, max_num_seqs=1)
    limit = max_model_len(plan, target)
    if need is None or limit is None or memory_bytes is None:
        return not_applicable("memory", "config.json or the host does not tell; not estimated")
    told = _environment(plan).get("VLLM_CPU_KVCACHE_SPACE", "")
    if not told.isdigit() or not int(told):
        rest = "and most of the rest for keys and values; set VLLM_CPU_KVCACHE_SPACE in engine.env (GiB)"
        return warns("memory", f"about {gib(need.weights)} of {gib(memory_bytes)} for weights, {rest}")
    cache, one = int(told) * _GIB, limit * need.cache_per_token
    shown = f"about {gib(need.weights + cache)} (weights {gib(need.weights)}, keys and values {gib(cache)})"
    if need.weights + cache > memory_bytes:
        return fails("memory", f"{shown} needed, {gib(memory_bytes)} here; lower VLLM_CPU_KVCACHE_SPACE")
    if cache < one:
        lack = f"one sequence of {limit} tokens needs {gib(one)}"
        return fails("memory", f"{shown}; {lack}: the server will not start; lower max_model_len")
    room = int(cache / need.cache_per_token)
    return ok("memory", f"{shown} of {gib(memory_bytes)}; room for {room:,} tokens")


def max_model_len(plan: Plan, target: Model | None) -> int | None:
    """Longest sequence of a launched server: its option, else what the target allows; None: unknown."""
    found = _number(plan, "max_model_len", 0)
    if not found and target is not None:
        found = target.text_config.get("max_position_embeddings") or 0
    return int(found) or None


def length_findings(plan: Plan, *, target: Model | None, longest: int) -> list[Finding]:
    """Requests against the launched server's longest sequence: it refuses those that could exceed it."""
    limit = max_model_len(plan, target)
    if plan.engine.kind != "vllm" or limit is None:
        return []
    caps = plan.workload.max_tokens.model_dump()
    most = max(setting.max_tokens for setting in plan.sampling)
    cap = max(min(caps[length] or most, most) for length in plan.workload.lengths)
    if cap >= limit:
        return [fails("lengths", f"answers of up to {cap} tokens, but max_model_len is {limit}; raise it")]
    shown = f"requests of about {longest} tokens at most, max_model_len is {limit}"
    return [warns("lengths", f"{shown}; raise it") if longest > limit else ok("lengths", shown)]


def time_findings(
    plan: Plan, *, target: Model, cards: Sequence[tuple[str, int]], token_caps: Sequence[int]
) -> list[Finding]:
    """How long a plan takes on a card of known bandwidth: server starts, and steps that read the weights.

    Every arm is taken to be as fast as the baseline, and every answer to run to its cap
    (`token_caps`: output tokens of each cell, in the order of `plan_cells`).
    """
    weights = target.weight_bytes(plan.target.dtype)
    rates = [rate for name, rate in _BANDWIDTH.items() if cards and re.search(rf"\b{name}\b", cards[0][0])]
    if weights is None or not rates:
        return []
    cells = plan_cells(plan)
    step_s = weights / int(_number(plan, "tensor_parallel_size", 1)) / (_REACHED_BANDWIDTH * rates[0])
    steps = sum(tokens / cell.concurrency for tokens, cell in zip(token_caps, cells, strict=True))
    starts = len({(cell.arm.name, cell.repeat) for cell in cells})
    hours = (steps * step_s + starts * _SERVER_START_S) / 3600
    shown = f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min"
    parts = f"{starts} server starts, {steps:,.0f} steps of {1000 * step_s:.1f} ms"
    return [ok("time", f"very roughly {shown}: {parts}; speculating arms need fewer steps")]


def is_dummy(plan: Plan) -> bool:
    """Whether config.json is enough, since the server makes the weights up."""
    options = support.server_options(plan, plan.baseline)
    return plan.engine.kind == "vllm" and plan.modelled and options.get("load_format") == "dummy"


def _environment(plan: Plan) -> dict[str, str]:
    return {**os.environ, **plan.engine.env}


def gib(num_bytes: float) -> str:
    """A size as text, in GiB, or MiB below a tenth of that."""
    gib = num_bytes / _GIB
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{num_bytes / (1 << 20):.0f} MiB"
