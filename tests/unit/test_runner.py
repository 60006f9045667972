"""The runner on simulated runs: what it refuses, reuses and records."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
import yaml
from simulated_runs import simulated_plan

from specnb.config import plan_cells
from specnb.errors import PlanError, RecordError
from specnb.records import read_run
from specnb.runner import (
    Progress,
    first_divergence,
    greedy_splits,
    measure,
    measure_or_reuse,
    planned_requests,
)
from specnb.workloads import load_workload


@pytest.mark.parametrize(
    ("left", "right", "index"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([], [], None),
        ([], [4], 0),
    ],
)
def test_first_divergence(left: list[int], right: list[int], index: int | None) -> None:
    assert first_divergence(left, right) == index


def test_a_cell_that_can_not_hold_the_load_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    plan = simulated_plan(tmp_path, prompts_per_cell=6, concurrency=(1, 8))
    with pytest.raises(PlanError) as refusal:
        measure(plan, root=tmp_path / "runs")
    assert str(refusal.value) == (
        "load.concurrency: 8 requests can't be in flight with 6 prompts in a cell (tier low); "
        "raise workload.prompts_per_cell or lower the concurrency"
    )
    assert not (tmp_path / "runs").exists()


def test_requests_are_seeded_by_what_they_are_and_not_by_what_ran_before(tmp_path: Path) -> None:
    plan = simulated_plan(tmp_path)
    workload = load_workload(plan.workload.set)
    cells = plan_cells(plan)
    seeds = [
        request.seed
        for cell in cells
        for request in planned_requests(plan, cell, [p for p in workload.prompts if p.tier == cell.tier])
    ]
    assert len(set(seeds)) == len(seeds)
    prompts = workload.prompts
    again = [request.seed for request in planned_requests(plan, cells[-1], prompts[:3])]
    assert again == [request.seed for request in planned_requests(plan, cells[-1], prompts)][:3]


def test_greedy_splits_are_those_of_a_naive_comparison(tmp_path: Path) -> None:
    plan = simulated_plan(tmp_path, diverge_rate=0.3, concurrency=(1,))
    run = read_run(measure(plan, root=tmp_path / "runs"))
    splits = greedy_splits(run.requests, plan)
    expected = 0
    for row in run.requests.filter(pl.col("arm") != "baseline").iter_rows(named=True):
        reference = run.requests.filter(
            arm="baseline", prompt_id=row["prompt_id"], concurrency=row["concurrency"], repeat=row["repeat"]
        ).row(0, named=True)
        expected += row["output_token_ids"] != reference["output_token_ids"]
    against_baseline = splits.filter((pl.col("arm") != "baseline") & (pl.col("reference_arm") == "baseline"))
    assert against_baseline.height == expected > 0
    assert run.table("splits").height == splits.height
    assert run.table("splits")["margin_nats"].null_count() == 0


def test_a_finished_run_is_reused_unless_its_workload_or_machine_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = simulated_plan(tmp_path, prompts_per_cell=4, concurrency=(1,), repeats=1)
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(plan.model_dump(mode="json")))
    root = tmp_path / "runs"
    said: list[str] = []
    first = measure_or_reuse(file, root=root)
    assert measure_or_reuse(file, root=root, progress=Progress(on_message=said.append)) == first
    assert said == [f"Using the finished run of this plan: {first}"]
    monkeypatch.setattr("specnb.runner.host_facts", lambda: {"processor": "another", "num_cores": 64})
    elsewhere = measure_or_reuse(file, root=root)
    assert elsewhere != first
    workload = Path(plan.workload.set)
    workload.write_text(workload.read_text().replace("Question 0", "Another question"))
    assert measure_or_reuse(file, root=root) not in (first, elsewhere)


def test_a_failed_request_stops_the_run_if_the_plan_says_so(tmp_path: Path) -> None:
    plan = simulated_plan(tmp_path, prompts_per_cell=6, concurrency=(1,), error_rate=1.0)
    plan = plan.model_copy(update={"on_error": "stop"})
    with pytest.raises(RecordError, match=r"the plan says on_error: stop$"):
        measure(plan, root=tmp_path / "runs")
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_run(folder).status == "failed"


def test_resuming_with_an_edited_workload_is_refused(tmp_path: Path) -> None:
    plan = simulated_plan(tmp_path, prompts_per_cell=4, concurrency=(1,), error_rate=1.0)
    plan = plan.model_copy(update={"on_error": "stop"})
    with pytest.raises(RecordError):
        measure(plan, root=tmp_path / "runs")
    (folder,) = (tmp_path / "runs").iterdir()
    before = (folder / "manifest.json").read_bytes()
    workload = Path(plan.workload.set)
    workload.write_text(workload.read_text().replace("Question 1", "Another question"))
    with pytest.raises(PlanError, match=r"the workload changed since the run was started; start a new run$"):
        measure(plan, root=tmp_path / "runs", resume=folder)
    assert (folder / "manifest.json").read_bytes() == before
