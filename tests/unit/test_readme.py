"""The README's commands, table, links and chart are true.

Run as a script, this file draws the README's chart again from the sample run:
`.venv/bin/python tests/unit/test_readme.py`.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import nbformat
import polars as pl
import pytest
from typer.main import get_command

from specnb import charts, latency, notebook
from specnb.charts import Chart
from specnb.cli import app
from specnb.config import Plan, read_plan
from specnb.records import read_run
from specnb.training import TrainPlan, read_train_plan

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
STUDY = ROOT / "reports" / "demo-study"


def speedup_chart() -> Chart:
    """Greedy speedup by concurrency and entropy tier of the sample run."""
    run = read_run(ROOT / "data" / "samples" / "demo")
    speedups = latency.speedup_table(
        run.requests.filter(pl.col("sampling") == "greedy"),
        baseline=run.plan.baseline.name,
        rng=notebook.generator(run),
    )
    return charts.speedup_by_concurrency_chart(
        speedups, arms=[arm.name for arm in run.plan.arms], column="entropy_tier"
    )


def plotted(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a chart's data, in a fixed order."""
    rows = [row for data in spec["datasets"].values() for row in data if "entropy_tier" in row]
    return sorted(rows, key=lambda row: (row["arm"], row["entropy_tier"], row["concurrency"]))


def test_the_chart_is_that_of_the_sample_run() -> None:
    kept = plotted(json.loads((STUDY / "speedup.json").read_text(encoding="utf-8")))
    fresh = plotted(speedup_chart().to_dict())
    assert len(kept) == len(fresh) == 9
    for old, new in zip(kept, fresh, strict=True):
        for name, value in new.items():
            if isinstance(value, float):
                assert math.isclose(old[name], value, rel_tol=1e-6), name
            else:
                assert old[name] == value
    assert "<svg" in (STUDY / "speedup.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_every_notebook_is_listed_with_its_question() -> None:
    listed = dict(re.findall(r"^\| \[(\d\d_\w+)\]\(notebooks/\1\.ipynb\) \| (.+) \|$", README, re.MULTILINE))
    found = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        first = nbformat.read(path, as_version=4).cells[0].source.splitlines()[0]
        found[path.stem] = first.removeprefix("# ")
    assert listed == found


def test_every_command_is_documented_and_every_documented_command_exists() -> None:
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    shown = set(re.findall(r"^specnb (\w+) ", README, re.MULTILINE)) | {"demo"}
    assert shown == commands
    targets = set(re.findall(r"^(\w+): ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets == {"demo", "test", "lint", "lab"}
    assert set(re.findall(r"(?:^|`)make (\w+)", README, re.MULTILINE)) <= targets


def test_the_plan_lines_of_the_readme_are_a_valid_plan(tmp_path: Path) -> None:
    block = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert block is not None
    lines = (ROOT / "data" / "plans" / "demo.yaml").read_text().splitlines()
    for new in block[1].splitlines():
        key = new.partition(":")[0]
        lines = [new if line.startswith(f"{key}:") else line for line in lines]
    (tmp_path / "plan.yaml").write_text("\n".join(lines))
    plan = read_plan(tmp_path / "plan.yaml")
    assert (plan.target.model, plan.engine.device) == ("/models/my-model", "cuda")
    assert plan.workload.tiers == ("unlabelled",)


@pytest.mark.parametrize("path", sorted((ROOT / "data" / "plans").glob("*.yaml")), ids=lambda path: path.stem)
def test_plans_in_the_repository_are_valid(path: Path) -> None:
    if path.name.startswith("train-"):
        assert isinstance(read_train_plan(path), TrainPlan)
    else:
        assert isinstance(read_plan(path), Plan)


def test_the_modelled_figures_are_those_of_its_run() -> None:
    run = read_run(ROOT / "data" / "samples" / "h200-27b-modelled")
    speedups = latency.speedup_table(
        notebook.timed_requests(run),
        baseline=run.plan.baseline.name,
        by=("arm", "sampling", "concurrency"),
        rng=notebook.generator(run),
    ).filter(pl.col("metric") == "throughput_speedup")
    rows = {(row["arm"], row["concurrency"]): row for row in speedups.iter_rows(named=True)}
    text = README.partition("**A modelled example.**")[2].partition("\n\n")[0]
    told = re.findall(r"([\d.]+) \[([\d.]+), ([\d.]+)\] at (one request|\d+)", text)
    assert len(told) == 3
    for *figures, load in told:
        row = rows["dflash2-al5-46", 1 if load == "one request" else int(load)]
        for figure, name in zip(figures, ("value", "low", "high"), strict=True):
            assert f"{row[name]:.{len(figure.partition('.')[2])}f}" == figure, (load, name)
    nothing = re.search(r"with nothing accepted it is ([\d.]+) and ([\d.]+) at the ends", text)
    assert nothing is not None
    assert nothing.groups() == tuple(f"{rows['dflash2-miss', load]['value']:.2f}" for load in (1, 64))


if __name__ == "__main__":
    STUDY.mkdir(parents=True, exist_ok=True)
    chart = speedup_chart()
    (STUDY / "speedup.json").write_text(json.dumps(chart.to_dict(), indent=1) + "\n", encoding="utf-8")
    chart.save(STUDY / "speedup.svg")
