"""One report of all notebooks on a small simulated run, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specnb.records import Run
from specnb.report import ReportResult, build_report

SMALL = {
    "prompts_per_cell": 12,
    "concurrency": (1, 4),
    "sampling": ("greedy", "sampled"),
    "max_tokens": 32,
    "lengths": ("short", "medium", "long"),
    "arms": {
        "draft": {"selector": True, "convolution": True},
        "weak": {"alpha": 0.4, "selector": True, "convolution": False},
    },
    "selector_lift": 0.2,
    "outside_candidates": 0.3,
    "diverge_rate": 0.1,
    "diverge_margin": 0.0005,
}


@pytest.fixture(scope="session")
def small_run(simulated_run: Callable[..., Run]) -> Run:
    """A run of two speculating arms, greedy and sampled, two loads, two repeats."""
    return simulated_run(**SMALL)


@pytest.fixture(scope="session")
def small_report(small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> ReportResult:
    """The report of `small_run`, all notebooks."""
    return build_report(small_run.path, out_dir=tmp_path_factory.mktemp("report"))
