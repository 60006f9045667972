"""Benchmark of the in-process engine on the demo target: ratios measured in one run on one machine.

    .venv/bin/python tests/benchmarks/bench_engine.py [cpu|cuda] [OUT.json]

1. Baseline decode against `model.generate` at one request: interleaved pairs, ratio of seconds a token.
2. Throughput at four requests over throughput at one, prefill included, 128 new tokens a request.
3. Prompt lookup against baseline on the low-entropy tier at one request, with the decomposition
   (tokens a target step, step and cycle times from engine_steps) and its residual.

Not a test: nothing fails on a slow machine. Read the ratios, not the seconds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import polars as pl
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from specnb.config import Cell, Plan, plan_cells, plan_from_dict
from specnb.demo import ensure_demo_target
from specnb.engines.base import CellContext
from specnb.engines.transformers import TransformersEngine
from specnb.runner import planned_requests
from specnb.workloads import Prompt, load_workload, select_prompts

PAIRS = 10
TOKENS = 48
THROUGHPUT_TOKENS = 128


def bench_plan(device: str, *, max_tokens: int = TOKENS) -> Plan:
    """Baseline and prompt lookup at one and four requests; answers of a fixed length."""
    return plan_from_dict(
        {
            "name": "bench",
            "target": {"model": "demo", "dtype": "float32"},
            "engine": {"kind": "transformers", "device": device},
            "arms": [
                {"name": "baseline"},
                {"name": "lookup", "speculative": {"method": "ngram", "num_speculative_tokens": 7}},
            ],
            "workload": {"set": "builtin-en", "tiers": ["low"]},
            "sampling": [{"name": "greedy", "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}],
            "load": {"concurrency": [1, 4]},
        }
    )


def run_cell(
    engine: TransformersEngine, cell: Cell, prompts: list[Prompt], *, plan: Plan | None = None
) -> dict[str, pl.DataFrame]:
    """Tables of one cell over these prompts; the output cap is that of `plan`, else of the engine's plan."""
    requests = planned_requests(plan or engine.plan, cell, prompts)
    return engine.run_cell(cell, requests, CellContext(run_id="bench", clock=time.perf_counter))


def decode_s_per_token(tables: dict[str, pl.DataFrame]) -> float:
    """Seconds a token after the first one, over all requests."""
    frame = tables["requests"]
    seconds = (frame["last_token_s"] - frame["first_token_s"]).sum()
    return float(seconds / (frame["num_output_tokens"] - 1).sum())


def tokens_per_s(tables: dict[str, pl.DataFrame]) -> float:
    """Output tokens over the cell's wall time, prefill included."""
    frame = tables["requests"]
    return float(frame["num_output_tokens"].sum() / (frame["last_token_s"].max() - frame["sent_s"].min()))


class _Stopwatch:
    """A streamer that keeps the time of every token `generate` emits."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        value.tolist()  # the token is there only when the device has finished
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate_s_per_token(model: object, ids: list[int]) -> float:
    """Seconds a token after the first one in transformers' own `generate`, greedy."""
    watch = _Stopwatch()
    tensor = torch.tensor([ids], device=model.device)  # type: ignore[attr-defined]
    model.generate(  # type: ignore[attr-defined]
        tensor,
        attention_mask=torch.ones_like(tensor),
        min_new_tokens=TOKENS,
        max_new_tokens=TOKENS,
        do_sample=False,
        streamer=watch,
    )
    # The first put is the prompt, the second the first token.
    return (watch.times[-1] - watch.times[1]) / (len(watch.times) - 2)


def decomposition(base: dict[str, pl.DataFrame], arm: dict[str, pl.DataFrame]) -> dict[str, float]:
    """Decode speedup against tokens a step x step time / cycle time, times from engine_steps."""
    steps = arm["steps"]
    step_s = float((base["engine_steps"]["draft_s"] + base["engine_steps"]["verify_s"]).mean())  # type: ignore[arg-type]
    cycle_s = float((arm["engine_steps"]["draft_s"] + arm["engine_steps"]["verify_s"]).mean())  # type: ignore[arg-type]
    tokens = float(steps["num_emitted_tokens"].sum() / steps.height)
    speedup = decode_s_per_token(base) / decode_s_per_token(arm)
    predicted = tokens * step_s / cycle_s
    return {
        "decode_speedup": speedup,
        "tokens_per_target_step": tokens,
        "baseline_step_ms": step_s * 1e3,
        "cycle_ms": cycle_s * 1e3,
        "draft_ms": float(arm["engine_steps"]["draft_s"].mean()) * 1e3,  # type: ignore[arg-type]
        "predicted_speedup": predicted,
        "residual": speedup / predicted - 1,
    }


def main() -> None:
    """Runs the three parts and prints one table."""
    torch.set_grad_enabled(False)
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    engine = TransformersEngine(bench_plan(device))
    cells = {(cell.arm.name, cell.concurrency): cell for cell in plan_cells(engine.plan)}
    model = AutoModelForCausalLM.from_pretrained(ensure_demo_target(), dtype=torch.float32).eval().to(device)
    workload = load_workload("builtin-en")
    prompts = list(
        select_prompts(workload, tier="low", lengths=("short", "medium", "long"), num_prompts=PAIRS + 2)
    )
    warm, prompts = prompts[:2], prompts[2:]
    for prompt in warm:
        generate_s_per_token(model, engine.encode(prompt))
        run_cell(engine, cells["baseline", 1], [prompt])
    ratios, singles = [], []
    for number, prompt in enumerate(prompts):
        # Each pair swaps its order, so that a drift of the machine favours neither side.
        if number % 2:
            own = run_cell(engine, cells["baseline", 1], [prompt])
            theirs = generate_s_per_token(model, engine.encode(prompt))
        else:
            theirs = generate_s_per_token(model, engine.encode(prompt))
            own = run_cell(engine, cells["baseline", 1], [prompt])
        ratios.append(decode_s_per_token(own) / theirs)
        singles.append(own)
    long = bench_plan(device, max_tokens=THROUGHPUT_TOKENS)
    lengthy = {cell.concurrency: cell for cell in plan_cells(long) if cell.arm.speculative is None}
    some = prompts[:8]
    throughput = [
        tokens_per_s(run_cell(engine, lengthy[4], some, plan=long))
        / tokens_per_s(run_cell(engine, lengthy[1], some, plan=long))
        for _ in range(2)
    ]
    one = [run_cell(engine, cells["baseline", 1], prompts) for _ in range(2)]
    lookup = [run_cell(engine, cells["lookup", 1], prompts) for _ in range(2)]
    parts = [decomposition(base, arm) for base, arm in zip(one, lookup, strict=True)]
    result = {
        "baseline_over_generate_s_per_token": {
            "median": statistics.median(ratios),
            "min": min(ratios),
            "max": max(ratios),
        },
        "throughput_4_over_1": throughput,
        "lookup_over_baseline_throughput": [
            tokens_per_s(a) / tokens_per_s(b) for a, b in zip(lookup, one, strict=True)
        ],
        "lookup_decomposition": parts,
        "settings": {
            "pairs": PAIRS,
            "new_tokens": TOKENS,
            "new_tokens_throughput": THROUGHPUT_TOKENS,
            "threads": torch.get_num_threads(),
            "device": device,
        },
    }
    Console().print_json(data=result)
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
