"""What a vLLM server's log says: how far the start is, what it settled on, and why it died.

Reads text, and nothing else. The patterns were read in vLLM 0.30 to 0.32 and in logs of real
servers; a line that another version words differently is missed, and then the setting is absent,
never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

# "(EngineCore pid=7) INFO 11-30 01:49:14 [core.py:133] text"
_PROCESS: Final = re.compile(r"^\((?P<name>[^()]*pid=\d+)\) ?")
_LEVEL: Final = re.compile(
    r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?"
)

_PROGRESS: Final = (
    (re.compile(r"Resolved architecture: (\S+)"), "{} recognised"),
    (re.compile(r"Initializing a V1 LLM engine"), "engine starting"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"Loading safetensors checkpoint shards: +(\d+)% "), "loading weights, {} %"),
    (re.compile(r"Loading weights took ([\d.]+) seconds"), "weights loaded in {} s"),
    (re.compile(r"Loading drafter model"), "loading the drafter"),
    (re.compile(r"torch\.compile took ([\d.]+) s"), "compiled in {} s"),
    (re.compile(r"Capturing CUDA graphs[^:]*: +(\d+)%"), "capturing CUDA graphs, {} %"),
    (re.compile(r"Graph capturing finished in (\d+) secs"), "CUDA graphs captured in {} s"),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), "key-value cache of {} tokens"),
    (re.compile(r"Starting vLLM (?:API )?server"), "listening"),
)

# Settings in the line "Initializing a V1 LLM engine (v...) with config: ...".
_ENGINE: Final = re.compile(
    r"Initializing an? .*?LLM engine \(v(?P<version>[^)\s]+)\) with config: (?P<rest>.*)"
)
_ENGINE_KEYS: Final = (
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
    "enable_chunked_prefill",
    "per_request_spec_decode_metrics",
)
_SPECULATIVE: Final = re.compile(r"\bspeculative_config=SpeculativeConfig\((?P<inner>[^)]*)\)")
_ENUM: Final = re.compile(r"'(?P<key>mode|cudagraph_mode)': <\w+\.(?P<value>\w+):")
_SIZES: Final = re.compile(r"'cudagraph_capture_sizes': \[(?P<sizes>[\d, ]*)\]")

_KV_SIZE: Final = re.compile(
    r"(?P<device>\w+) KV cache size: (?P<tokens>[\d,]+) tokens"
    r"(?:, Maximum concurrency for [\d,]+ tokens per request: (?P<most>[\d.]+)x)?"
)
_ATTENTION: Final = re.compile(r"Using (?P<name>\w+) attention backend\b")
_ASYNC_OFF: Final = re.compile(
    r"[Aa]sync(?:hronous)? scheduling (?:not supported|is not compatible|will be disabled|is disabled)"
)
_GRAPHS_SET: Final = re.compile(
    r"(?:setting cudagraph_mode=|Overriding cudagraph_mode from \w+ to )(?P<mode>\w+)"
)
_BATCH: Final = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(?P<tokens>\d+)")
_LOADED: Final = re.compile(r"Model loading took (?P<gib>[\d.]+) (?:GiB|GB)")
_KV_MEMORY: Final = re.compile(r"Available KV cache memory: (?P<gib>[\d.]+) GiB")
_CAPTURED: Final = re.compile(
    r"Graph capturing finished in (?P<seconds>\d+) secs, took (?P<gib>-?[\d.]+) GiB"
)

_FAULTS: Final = (
    (
        "oom_at_load",
        re.compile(
            r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|HIP out of memory"
            r"|No available memory for the cache blocks|Free memory on device .* is less than"
            r"|DefaultCPUAllocator: (?:can't|not enough)|^MemoryError\b|Cannot allocate memory"
        ),
    ),
    (
        "kv_cache_too_small",
        re.compile(
            r"KV cache is needed, which is larger|cache is needed, which is larger|even a single token"
        ),
    ),
    ("port_in_use", re.compile(r"[Aa]ddress already in use")),
    (
        "model_missing",
        re.compile(
            r"does not appear to have a file named|Repo id must|is not a local folder|LocalEntryNotFoundError"
            r"|Cannot access gated repo|We couldn't connect to|Can't load the configuration"
            r"|Invalid repository ID|Cannot find any model weights"
        ),
    ),
    (
        "bad_arguments",
        re.compile(
            r"error: (?:unrecognized arguments|argument |ambiguous option)|^Value error, |: Value error, "
        ),
    ),
)
_EXCEPTION: Final = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception)(?:: |$)")
_SECOND_HAND: Final = re.compile(
    r"Engine core initialization failed|EngineDeadError|WorkerProc initialization failed"
)
_LOST: Final = re.compile(r"(?:exited|died) unexpectedly")
_NOISE: Final = re.compile(
    r"^Traceback|nanobind|leaked (?:function|type|instance|semaphore|shared)|resource_tracker"
    r"|DeprecationWarning|FutureWarning|skipped remainder|Found ulimit of|non-default args:"
    r"|Triton is installed, but|^usage: |Route: |^INFO: {5}|^\[shutdown\] "
)
_LONGEST_LINE: Final = 300


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a server stopped: `kind` (one of a closed set, or `crash`) and the log line that says so."""

    kind: str
    line: str


def bare_lines(text: str) -> Iterator[tuple[str, str]]:
    """(process, text) of each line without vLLM's prefixes; progress bars are split at carriage returns."""
    for line in re.split(r"[\r\n]+", text):
        process = _PROCESS.match(line)
        rest = line[process.end() :] if process else line
        yield process["name"] if process else "", _LEVEL.sub("", rest, count=1)


def progress(line: str) -> str | None:
    """A start-up stage in a few words, from one line of the log; None if the line tells of none."""
    for pattern, words in _PROGRESS:
        found = pattern.search(line)
        if found:
            return words.format(*found.groups())
    return None


def effective_settings(text: str) -> dict[str, Any]:
    """What the server settled on, read from the log of its start.

    Parameters
    ----------
    text
        The log from the launch until the server was ready.

    Returns
    -------
    dict
        JSON-able. Keys only where the log has them: version, dtype, max_seq_len, load_format,
        {tensor,pipeline,data}_parallel_size, quantization, enforce_eager, kv_cache_dtype, seed,
        enable_prefix_caching, enable_chunked_prefill, per_request_spec_decode_metrics,
        speculative_method, speculative_num_tokens, compilation_mode, cudagraph_mode,
        cudagraph_capture_sizes, attention_backend (the target's; all in `attention_backends`),
        model_runner (`V1` or `V2`), async_scheduling (False where the log says that it was switched
        off), max_num_batched_tokens, kv_cache_tokens, kv_cache_device, max_concurrency (requests of
        full length), model_loading_gib, kv_cache_gib, cudagraph_gib, cudagraph_capture_s.
    """
    found: dict[str, Any] = {}
    backends: list[str] = []
    for _, line in bare_lines(text):
        engine = _ENGINE.search(line)
        if engine and "version" not in found:
            found |= {"version": engine["version"]} | _engine_settings(engine["rest"])
        backend = _ATTENTION.search(line)
        if backend and backend["name"] not in backends:
            backends.append(backend["name"])
        if _ASYNC_OFF.search(line):
            found["async_scheduling"] = False
        if "Using V2 Model Runner" in line:
            found["model_runner"] = "V2"
        elif "using the V1 model runner" in line:
            found["model_runner"] = "V1"
        graphs = _GRAPHS_SET.search(line)
        if graphs:
            found["cudagraph_mode"] = graphs["mode"]
        found |= _sizes(line)
    if backends:
        found |= {"attention_backend": backends[0], "attention_backends": backends}
    return found


def fault(text: str, *, exit_code: int | None = None) -> Fault:
    """Why the server stopped, from its log and exit code.

    Returns
    -------
    Fault
        `oom_at_load`, `kv_cache_too_small`, `port_in_use`, `model_missing`, `bad_arguments`, or
        `crash` with the exception that ended the first process to fail, else the log's last line that
        means something.
    """
    lines = list(_told(text))
    for kind, pattern in _FAULTS:
        for line in lines:
            if pattern.search(line):
                return Fault(kind, _cut(line))
    if exit_code == -9:
        return Fault("oom_at_load", "killed by SIGKILL; most likely the host ran out of memory")
    # The parent's complaint comes after its child's; what follows it is noise of the shutdown.
    heard = [number for number, line in enumerate(lines) if _SECOND_HAND.search(line)]
    causes = [line for line in lines[: heard[0] if heard else None] if _EXCEPTION.match(line)]
    if causes:
        return Fault("crash", _cut(causes[-1]))
    lost = [line for line in lines if _LOST.search(line)]
    last = lost[:1] or last_lines(text, 1)
    return Fault("crash", _cut(last[0]) if last else "the log says nothing of it")


def last_lines(text: str, count: int) -> list[str]:
    """The last lines that mean something to a person: no frames of a traceback, no shutdown noise."""
    lines = [line for line in _told(text) if not _NOISE.search(line)]
    return [_cut(line) for line in lines[-count:]] if count > 0 else []


def _told(text: str) -> Iterator[str]:
    """Lines without prefixes and source code: what is indented is a frame, but for pydantic's verdicts."""
    for _, line in bare_lines(text):
        verdict = line.lstrip().startswith("Value error, ")
        if line.strip() and (verdict or not line[0].isspace()):
            yield re.sub(r" \[type=\w+, input_value=.*", "", line.strip())


def _engine_settings(rest: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in _ENGINE_KEYS:
        match = re.search(rf"\b(?<!_){key}=(?P<value>'[^']*'|[^,)]*)", rest)
        if match:
            found[key] = _value(match["value"])
    speculative = _SPECULATIVE.search(rest)
    if speculative:
        method = re.search(r"method='(\w+)'", speculative["inner"])
        number = re.search(r"num_spec(?:ulative)?_tokens=(\d+)", speculative["inner"])
        found["speculative_method"] = method[1] if method else None
        found["speculative_num_tokens"] = int(number[1]) if number else None
    for match in _ENUM.finditer(rest):
        name = "compilation_mode" if match["key"] == "mode" else match["key"]
        found.setdefault(name, match["value"])
    sizes = _SIZES.search(rest)
    if sizes:
        found["cudagraph_capture_sizes"] = [int(size) for size in sizes["sizes"].split(",") if size.strip()]
    return found


def _sizes(line: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cache = _KV_SIZE.search(line)
    if cache:
        found["kv_cache_tokens"] = int(cache["tokens"].replace(",", ""))
        found["kv_cache_device"] = cache["device"]
        if cache["most"]:
            found["max_concurrency"] = float(cache["most"])
    for pattern, names in (
        (_BATCH, {"tokens": "max_num_batched_tokens"}),
        (_LOADED, {"gib": "model_loading_gib"}),
        (_KV_MEMORY, {"gib": "kv_cache_gib"}),
        (_CAPTURED, {"gib": "cudagraph_gib", "seconds": "cudagraph_capture_s"}),
    ):
        match = pattern.search(line)
        if match:
            for group, name in names.items():
                text = match[group]
                found[name] = int(text) if group == "tokens" else float(text)
    return found


def _value(text: str) -> Any:
    text = text.strip().strip("'")
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    return int(text) if re.fullmatch(r"-?\d+", text) else text.removeprefix("torch.")


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."
