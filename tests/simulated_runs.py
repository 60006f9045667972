"""Runs of the simulated engine made to order, for fixtures and for tests that need the plan itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specnb.config import Plan, plan_from_dict
from specnb.engines.simulated import SimulatedSettings
from specnb.runner import measure

SAMPLING = {
    "greedy": {"name": "greedy", "temperature": 0.0, "max_tokens": 64, "seed": 0},
    "sampled": {"name": "sampled", "temperature": 1.0, "max_tokens": 64, "seed": 0},
}


def write_workload(path: Path, *, tiers: tuple[str, ...], lengths: tuple[str, ...], prompts: int) -> Path:
    """A JSONL workload of `prompts` prompts in each tier, lengths taking turns."""
    rows = [
        {
            "id": f"{tier}-{number:03d}",
            "prompt": f"Question {number} of the {tier} tier.",
            "task": f"task-{tier}",
            "tier": tier,
            "length": lengths[number % len(lengths)],
        }
        for tier in tiers
        for number in range(prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def simulated_plan(root: Path, **overrides: Any) -> Plan:
    """The plan behind `simulated_run`; writes its workload under `root`."""
    args = {key: overrides.pop(key) for key in list(overrides) if key in SimulatedSettings.model_fields}
    tiers = tuple(overrides.pop("tiers", ("low", "high")))
    lengths = tuple(overrides.pop("lengths", ("short", "medium")))
    prompts = overrides.pop("prompts_per_cell", 12)
    k = overrides.pop("num_speculative_tokens", 4)
    arms = overrides.pop("arms", {"draft": {}})
    sampling = [
        dict(SAMPLING[s]) if isinstance(s, str) else s for s in overrides.pop("sampling", ("greedy",))
    ]
    max_tokens = overrides.pop("max_tokens", None)
    if max_tokens is not None:
        sampling = [{**setting, "max_tokens": max_tokens} for setting in sampling]
    content = {
        "name": overrides.pop("name", "sim"),
        "modelled": overrides.pop("modelled", False),
        "target": {"model": "simulated-target", "dtype": overrides.pop("dtype", "float32")},
        "engine": {"kind": "simulated", "args": args},
        "arms": [
            {"name": "baseline"},
            *(
                {"name": name, "speculative": {"method": "draft_model", "num_speculative_tokens": k, **extra}}
                for name, extra in arms.items()
            ),
        ],
        "workload": {
            "set": str(root / "workload.jsonl"),
            "tiers": tiers,
            "lengths": lengths,
            "prompts_per_cell": prompts,
        },
        "sampling": sampling,
        "load": {"concurrency": overrides.pop("concurrency", (1, 4))},
        "repeats": overrides.pop("repeats", 2),
    }
    if overrides:
        raise TypeError(f"unknown override {', '.join(overrides)}")
    write_workload(root / "workload.jsonl", tiers=tiers, lengths=lengths, prompts=prompts)
    return plan_from_dict(json.loads(json.dumps(content)))


def write_simulated_run(root: Path, **overrides: Any) -> Path:
    """Measures with the simulated engine under `root` and returns the run's directory."""
    status = overrides.pop("status", "finished")
    folder = root / f"w{len(list(root.glob('w*')))}"
    folder.mkdir()
    path = measure(simulated_plan(folder, **overrides), root=folder)
    if status != "finished":
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        (path / "manifest.json").write_text(json.dumps({**manifest, "status": status}), encoding="utf-8")
    return path
