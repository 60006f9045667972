"""A run that is killed at any moment resumes to the tables of an uninterrupted one, but for times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tiny_models import save_tiny_target

from specnb import schema
from specnb.checks import check_run
from specnb.records import Run, read_run

TIMES = {
    name: [column.name for column in table.columns if column.name.endswith("_s")]
    for name, table in schema.TABLES.items()
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    save_tiny_target(folder / "target", vocab_size=16, sharpness=4.0)
    lines = [
        {
            "id": f"{tier}{number}",
            "prompt": f"t{number + 1} t3 t4 t{number + 1} t3 t9",
            "tier": tier,
            "length": length,
        }
        for tier in ("low", "high")
        for number, length in enumerate(("short", "medium", "long"))
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    content = {
        "name": "resume",
        "target": {"model": "target"},
        "engine": {"kind": "transformers", "device": "cpu", "endpoint": "completions", "num_threads": 1},
        "arms": [
            {"name": "baseline"},
            {"name": "lookup", "speculative": {"method": "ngram", "num_speculative_tokens": 3}},
        ],
        "workload": {"set": "prompts.jsonl", "tiers": ["low", "high"], "prompts_per_cell": 3},
        "sampling": [
            {"name": "greedy", "temperature": 0, "max_tokens": 120, "ignore_eos": True},
            {"name": "sampled", "temperature": 0.8, "top_p": 0.9, "max_tokens": 120, "ignore_eos": True},
        ],
        "load": {"concurrency": [1, 2]},
        "repeats": 2,
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def start(plan: Path, root: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "specnb.cli", "run", str(plan), "--root", str(root), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_cells(root: Path, number: int) -> Path:
    """The run directory, once it holds so many finished cells."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for folder in root.glob("*/cells"):
            if len(list(folder.glob("[!.]*"))) >= number:
                return folder.parent
        time.sleep(0.005)
    raise AssertionError("the run never got there")


def same_tables(left: Run, right: Run) -> None:
    for name, table in schema.TABLES.items():
        frames = []
        for run in (left, right):
            keys = [key for key in table.key if not key.endswith("_s")]
            frames.append(run.table(name).drop("run_id", *TIMES[name]).sort(keys))
        assert frames[0].equals(frames[1], null_equal=True), name


@pytest.fixture(scope="module")
def uninterrupted(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    process = start(plan, tmp_path_factory.mktemp("whole"))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return read_run(out.strip())


@pytest.mark.parametrize("cells", [1, 4, 9], ids="killed after cell {}".format)
def test_a_killed_run_resumes_to_the_same_tables(
    plan: Path, tmp_path: Path, uninterrupted: Run, cells: int
) -> None:
    process = start(plan, tmp_path)
    run_dir = wait_for_cells(tmp_path, cells)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    killed = read_run(run_dir)
    assert killed.status == "running"
    survived = {cell["cell_id"] for cell in killed.cells}
    assert len(survived) >= cells
    digests = {cell["cell_id"]: cell["files"] for cell in killed.cells}
    process = start(plan, tmp_path, "--resume", str(run_dir))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert Path(out.strip()) == run_dir
    resumed = read_run(run_dir)
    assert resumed.status == "finished"
    # Finished cells were skipped, not measured again.
    assert {
        cell["cell_id"]: cell["files"] for cell in resumed.cells if cell["cell_id"] in survived
    } == digests
    assert not list((run_dir / "cells").glob(".*"))
    same_tables(resumed, uninterrupted)
    assert [finding for finding in check_run(run_dir) if not finding.ok] == []
    times = resumed.requests.select("sent_s", "last_token_s")
    assert times["last_token_s"].max() < 600
    assert (times["last_token_s"] > times["sent_s"]).all()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_run_says_how_to_go_on(plan: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = start(plan, tmp_path)
    run_dir = wait_for_cells(tmp_path, 2)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == (
        f"specnb: interrupted; finished cells are kept: resume with --resume {run_dir}"
    )
    assert read_run(run_dir).status == "interrupted"


def test_a_changed_plan_is_refused_and_a_finished_run_left_alone(
    plan: Path, tmp_path: Path, uninterrupted: Run
) -> None:
    before = (uninterrupted.path / "manifest.json").read_bytes()
    process = start(plan, tmp_path, "--resume", str(uninterrupted.path))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.strip() == f"specnb: {uninterrupted.path}: this run is finished; nothing to resume"
    changed = yaml.safe_load(plan.read_text())
    changed["sampling"][0]["max_tokens"] = 12
    other = plan.parent / "changed.yaml"
    other.write_text(yaml.safe_dump(changed))
    process = start(other, tmp_path, "--resume", str(uninterrupted.path))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "was started with another plan (differs in: sampling)" in err
    assert len(err.strip().splitlines()) == 1
    assert (uninterrupted.path / "manifest.json").read_bytes() == before
