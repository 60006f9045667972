"""Benchmark of `specnb report` on a large run: a million steps and twenty thousand requests, simulated.

    .venv/bin/python tests/benchmarks/bench_report.py [FOLDER]

Prints the run's size, the seconds of the whole command, the peak resident memory of its process
tree, and the size of every page. The aim: under 90 s, 2 GB, and 5 MB a page.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console

from specnb.config import plan_from_dict
from specnb.records import read_run
from specnb.runner import measure

TIERS = ("low", "medium", "high")
PROMPTS_A_TIER = 340


def simulated_run(folder: Path) -> Path:
    """A finished simulated run of about a million steps under `folder`."""
    prompts = folder / "prompts.jsonl"
    with prompts.open("w") as stream:
        for tier in TIERS:
            for number in range(PROMPTS_A_TIER):
                length = ("short", "medium", "long")[number % 3]
                row = {"id": f"{tier}-{number}", "prompt": f"{tier} {number}", "tier": tier, "length": length}
                stream.write(json.dumps(row) + "\n")
    plan = plan_from_dict(
        {
            "name": "large",
            "target": {"model": "simulated"},
            "engine": {
                "kind": "simulated",
                "args": {"alpha": 0.7, "output_tokens": {"short": 33, "medium": 66, "long": 132}},
            },
            "arms": [
                {"name": "baseline"},
                {"name": "drafter", "speculative": {"method": "simulated", "num_speculative_tokens": 7}},
            ],
            "workload": {"set": str(prompts), "tiers": list(TIERS), "prompts_per_cell": PROMPTS_A_TIER},
            "sampling": [{"name": "greedy", "temperature": 0, "max_tokens": 512}],
            "load": {"concurrency": [1, 2, 4, 8, 16], "warmup_requests": 0},
            "repeats": 2,
        }
    )
    return measure(plan, root=folder)


def main() -> None:
    """Makes the run, times the report, prints one JSON object."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(folder.glob("large-*"))
        path = found[-1] if found else simulated_run(folder)
        run = read_run(path)
        size = {name: run.table(name).height for name in ("requests", "steps", "positions", "tokens")}
        out = folder / "report"
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "specnb.cli", "report", str(path), "--out", str(out)]
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, _tree_bytes(process.pid))
            time.sleep(0.2)
        result = {
            "rows": size,
            "seconds": round(time.perf_counter() - began, 1),
            "peak_tree_bytes": peak,
            "exit_code": process.returncode,
            "pages_bytes": {page.name: page.stat().st_size for page in sorted(out.glob("*.html"))},
        }
        Console().print_json(data=result)


def _tree_bytes(pid: int) -> int:
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


if __name__ == "__main__":
    main()
