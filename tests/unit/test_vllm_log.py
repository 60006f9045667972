"""What the logs of real servers say, and what other lines of vLLM's source would."""

from __future__ import annotations

from pathlib import Path

import pytest

from specnb import equivalence
from specnb.engines.vllm_log import bare_lines, effective_settings, fault, last_lines, progress

FIXTURES = Path(__file__).parents[1] / "fixtures"


def real_log(name: str) -> str:
    """The log of a server of vLLM 0.32.0 on the CPU, shortened."""
    return (FIXTURES / f"vllm-0.32.0-cpu-{name}.log").read_text(encoding="utf-8")


def test_what_a_real_baseline_settled_on() -> None:
    assert effective_settings(real_log("baseline")) == {
        "version": "0.32.0",
        "dtype": "bfloat16",
        "max_seq_len": 1024,
        "load_format": "auto",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "quantization": None,
        "enforce_eager": True,
        "kv_cache_dtype": "auto",
        "seed": 0,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "per_request_spec_decode_metrics": "none",
        "compilation_mode": "NONE",
        "cudagraph_mode": "NONE",
        "cudagraph_capture_sizes": [],
        "model_runner": "V1",
        "kv_cache_tokens": 93_184,
        "kv_cache_device": "CPU",
        "max_concurrency": 91.0,
    }


def test_b36_an_ngram_arm_is_scheduled_otherwise_than_its_baseline() -> None:
    """Both command lines leave async_scheduling alone; the log of one says that it was switched off."""
    baseline, ngram = (effective_settings(real_log(name)) for name in ("baseline", "ngram"))
    assert ngram["async_scheduling"] is False
    assert ngram["speculative_method"] == "ngram"
    assert ngram["speculative_num_tokens"] == 5
    assert ngram["per_request_spec_decode_metrics"] == "detailed"
    assert {name for name in ngram if name not in baseline or ngram[name] != baseline[name]} == {
        "async_scheduling",
        "speculative_method",
        "speculative_num_tokens",
        "per_request_spec_decode_metrics",
    }


GPU_LINES = """\
(EngineCore pid=7) INFO 11-29 01:00:00 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: \
model='m', speculative_config=SpeculativeConfig(method='dflash', model='d', num_spec_tokens=7), \
dtype=torch.bfloat16, max_seq_len=4096, tensor_parallel_size=2, quantization=fp8, seed=3, \
compilation_config={'mode': <CompilationMode.VLLM_COMPILE: 3>, 'cudagraph_mode': \
<CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>, 'cudagraph_capture_sizes': [1, 2, 4]}
(Worker pid=8) INFO 11-29 01:00:01 [gpu_worker.py:518] Using V2 Model Runner
(Worker pid=8) INFO 11-29 01:00:02 [cuda.py:507] Using FLASH_ATTN attention backend out of potential \
backends: ['FLASH_ATTN', 'TRITON_ATTN'].
(Worker pid=8) INFO 11-29 01:00:02 [cuda.py:507] Using TRITON_ATTN attention backend out of potential \
backends: ['TRITON_ATTN'].
(Worker pid=8) INFO 11-29 01:00:03 [model_runner.py:425] Model loading took 51.42 GiB memory and 9.1 seconds
(Worker pid=8) WARNING 11-29 01:00:03 [compilation.py:1435] CUDAGraphMode.FULL_AND_PIECEWISE is not \
supported with FLASH_ATTN backend; setting cudagraph_mode=FULL_DECODE_ONLY
(Worker pid=8) INFO 11-29 01:00:04 [gpu_worker.py:760] Available KV cache memory: 61.03 GiB
(EngineCore pid=7) INFO 11-29 01:00:04 [kv_cache_utils.py:2327] GPU KV cache size: 249,984 tokens, \
Maximum concurrency for 4,096 tokens per request: 61.03x
(Worker pid=8) INFO 11-29 01:00:05 [model_runner.py:1128] Graph capturing finished in 12 secs, took 0.52 GiB
(APIServer pid=1) INFO 11-29 01:00:05 [vllm.py:1] Chunked prefill is enabled with max_num_batched_tokens=8192.
"""


def test_what_a_gpu_server_settles_on() -> None:
    """Lines as vLLM 0.32's source writes them."""
    found = effective_settings(GPU_LINES)
    assert found == {
        "version": "0.32.0",
        "dtype": "bfloat16",
        "max_seq_len": 4096,
        "tensor_parallel_size": 2,
        "quantization": "fp8",
        "seed": 3,
        "speculative_method": "dflash",
        "speculative_num_tokens": 7,
        "compilation_mode": "VLLM_COMPILE",
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4],
        "model_runner": "V2",
        "attention_backend": "FLASH_ATTN",
        "attention_backends": ["FLASH_ATTN", "TRITON_ATTN"],
        "model_loading_gib": 51.42,
        "kv_cache_gib": 61.03,
        "kv_cache_tokens": 249_984,
        "kv_cache_device": "GPU",
        "max_concurrency": 61.03,
        "cudagraph_capture_s": 12.0,
        "cudagraph_gib": 0.52,
        "max_num_batched_tokens": 8192,
    }


def test_b36_every_setting_that_arms_are_compared_by_is_one_that_a_log_can_give() -> None:
    given = {name for text in (real_log("ngram"), GPU_LINES) for name in effective_settings(text)}
    compared = (*equivalence._SHARED_SETTINGS, *equivalence._FOLLOWING_SETTINGS)
    assert len(set(compared)) == len(compared)
    assert set(compared) <= given


def test_an_empty_log_settles_nothing() -> None:
    assert effective_settings("") == {}


def test_progress_of_a_real_start() -> None:
    stages = [progress(line) for _, line in bare_lines(real_log("ngram"))]
    assert list(dict.fromkeys(stage for stage in stages if stage)) == [
        "LlamaForCausalLM recognised",
        "engine starting",
        "loading weights",
        "loading weights, 0 %",
        "loading weights, 100 %",
        "weights loaded in 0.52 s",
        "loading the drafter",
        "key-value cache of 93,184 tokens",
        "listening",
    ]


def test_progress_bars_are_split_at_carriage_returns() -> None:
    name = "Capturing CUDA graphs (decode, FULL)"
    bar = f"\r{name}:   0%|  | 0/9\r{name}:  56%|# | 5/9"
    assert [progress(line) for _, line in bare_lines(bar) if line] == [
        "capturing CUDA graphs, 0 %",
        "capturing CUDA graphs, 56 %",
    ]


@pytest.mark.parametrize(
    ("name", "kind", "line"),
    [
        (
            "unknown-option",
            "bad_arguments",
            "api_server.py: error: unrecognized arguments: --no-such-option",
        ),
        (
            "synthetic-without-rates",
            "bad_arguments",
            "Value error, rejection_sample_method='synthetic' requires exactly one of "
            "synthetic_acceptance_rates or synthetic_acceptance_length.",
        ),
        (
            "cache-of-two-blocks",
            "kv_cache_too_small",
            "ValueError: To serve at least one request with the model's max seq len (2048), (0.04 GiB KV "
            "cache is needed, which is larger than the available KV cache memory (0.0 GiB).",
        ),
        ("model-not-cached", "model_missing", "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find"),
        (
            "drafter-of-another-kind",
            "crash",
            "ValueError: There is no module or parameter named 'model' in LlamaModel.",
        ),
    ],
)
def test_why_real_servers_did_not_start(name: str, kind: str, line: str) -> None:
    """The cause, not the parent's 'Engine core initialization failed' that ends the log."""
    found = fault(real_log(name), exit_code=1)
    assert found.kind == kind
    assert found.line.startswith(line)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB", "oom_at_load"),
        ("ValueError: No available memory for the cache blocks. Try increasing", "oom_at_load"),
        (
            "ValueError: Free memory on device cuda:0 (20/139 GiB) on startup is less than desired GPU "
            "memory utilization (0.9, 125 GiB).",
            "oom_at_load",
        ),
        (
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate",
            "oom_at_load",
        ),
        (
            "ValueError: To serve at least one request with the model's max seq len (131072), (16 GiB KV "
            "cache is needed, which is larger than the available KV cache memory (8 GiB).",
            "kv_cache_too_small",
        ),
        ("OSError: [Errno 98] Address already in use", "port_in_use"),
        ("OSError: org/name does not appear to have a file named config.json.", "model_missing"),
        ("RuntimeError: something new", "crash"),
    ],
)
def test_kinds_of_faults(text: str, kind: str) -> None:
    found = fault(f"(EngineCore pid=7) ERROR 11-30 01:49:27 [core.py:1] {text}\n", exit_code=1)
    assert (found.kind, found.line) == (kind, text)


def test_a_fault_in_source_code_that_a_traceback_quotes_is_none() -> None:
    text = "Traceback (most recent call last):\n    raise torch.OutOfMemoryError(reason)\nKeyError: 'x'\n"
    assert fault(text, exit_code=1) == fault("KeyError: 'x'\n", exit_code=1)
    assert fault(text, exit_code=1).kind == "crash"


def test_an_empty_log_says_so() -> None:
    assert fault("", exit_code=1).line == "the log says nothing of it"
    assert fault("", exit_code=-9).kind == "oom_at_load"


def test_why_a_real_server_died_whose_engine_was_killed() -> None:
    """Its front ends in good order, with exit code 0 and a good-bye as the log's last lines."""
    found = fault(real_log("engine-killed"), exit_code=0)
    assert (found.kind, found.line) == (
        "crash",
        "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup",
    )


def test_long_lines_are_cut() -> None:
    assert len(fault(f"ValueError: {'x' * 1000}\n", exit_code=1).line) == 300


def test_last_lines_leave_noise_out() -> None:
    noise = (
        "(APIServer pid=1) INFO 11-30 01:49:40 [launcher.py:195] Route: /metrics, Methods: GET\n"
        'INFO:     127.0.0.1:42102 - "GET /v1/models HTTP/1.1" 200 OK\n'
        'nanobind: leaked 4 instances!\n - leaked instance 0x7f9b83e54ac8 of type "x"\n'
    )
    assert last_lines(f"one\ntwo\nthree\n{noise}", 2) == ["two", "three"]
    assert last_lines(noise, 2) == []
