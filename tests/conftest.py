"""Fixtures for every test: a seeded generator, and runs of the simulated engine made to order."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_runs import write_simulated_run

from specnb.records import Run, read_run


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed; a fresh one for every test."""
    return np.random.default_rng(20240817)


@pytest.fixture(scope="session")
def simulated_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """`simulated_run(**overrides) -> Run`: a finished run of the simulated engine.

    Overrides are fields of `SimulatedSettings` (alpha, diverge_rate, speed_factor, ...) or of the plan:
    num_speculative_tokens, arms (name -> overrides of an arm), tiers, lengths, prompts_per_cell,
    concurrency, sampling (names or dicts), max_tokens, repeats, modelled, status ("finished").
    Equal overrides share one directory; copy it before breaking it (`simulated_copy`).
    """
    root = tmp_path_factory.mktemp("runs")
    made: dict[str, Path] = {}

    def make(**overrides: Any) -> Run:
        key = json.dumps(overrides, sort_keys=True)
        if key not in made:
            made[key] = write_simulated_run(root, **overrides)
        return read_run(made[key])

    return make


@pytest.fixture
def simulated_copy(simulated_run: Callable[..., Run], tmp_path: Path) -> Callable[..., Path]:
    """`simulated_copy(**overrides) -> Path`: a private copy of such a run's directory, free to be broken."""

    def copy(**overrides: Any) -> Path:
        source = simulated_run(**overrides).path
        target = tmp_path / source.name
        shutil.copytree(source, target)
        return target

    return copy
