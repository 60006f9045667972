"""What an engine is: it turns one cell of a plan into that cell's tables.

Engines alone touch a model or a server. The runner decides which requests a cell holds
and hands them over; the engine returns frames in the shape of `schema` and knows
nothing of files, verdicts or charts. Heavy imports stay inside the engine modules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from specnb.config import Arm, Cell, Plan
from specnb.workloads import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of a cell: what to send, its cap on new tokens, and its own random seed."""

    request_id: str
    prompt: Prompt
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellContext:
    """What the runner lends an engine for one cell.

    `clock` gives seconds since the run began (one clock for every table); `on_request_done`
    is called after each finished request, for the progress line, `on_message` with a line about what
    is going on outside cells. `log_dir` is where an engine may keep logs.
    """

    run_id: str
    clock: Callable[[], float]
    on_request_done: Callable[[], None] = field(default=lambda: None)
    on_message: Callable[[str], None] = field(default=lambda line: None)
    log_dir: Path | None = None


class Engine(Protocol):
    """One way to generate. Built by `make_engine`; used by the runner in this order: describe, then cells."""

    def describe(self) -> dict[str, Any]:
        """Facts for the manifest: target (label, dtype, digest or revision), device, launch arguments."""
        ...

    def describe_arm(self, arm: Arm) -> dict[str, Any]:
        """Resolved settings of one arm, drafter digest included."""
        ...

    def warm_up(self, cell: Cell, requests: Sequence[PlannedRequest], context: CellContext) -> None:
        """Runs requests whose results are thrown away, in the shapes that the cell will use."""
        ...

    def run_cell(
        self, cell: Cell, requests: Sequence[PlannedRequest], context: CellContext
    ) -> dict[str, pl.DataFrame]:
        """Tables of one cell by table name (`schema.CELL_TABLES`); failed requests keep their row."""
        ...

    def cell_facts(self) -> dict[str, Any]:
        """What only the engine knows of the cell just run, for its `cell.json`; keys `client`, `server`."""
        ...

    def judge_splits(
        self, splits: pl.DataFrame, requests: pl.DataFrame, prompts: Mapping[str, Prompt]
    ) -> pl.DataFrame:
        """`schema.SPLITS` with the margins filled in where the engine can evaluate the target again.

        `requests` holds both answers of every split, `prompts` every prompt by its id; both may come
        from an earlier process.
        """
        ...

    def close(self) -> None:
        """Frees the model or stops the server."""
        ...


def request_seed(*parts: object) -> int:
    """A 63-bit seed from the parts' text; equal parts give equal seeds on every machine."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def make_engine(plan: Plan) -> Engine:
    """The engine that `plan.engine.kind` names, with its model loaded; heavy imports happen here.

    Raises
    ------
    PlanError
        The engine that the plan names does not support what the plan asks for.
    EngineError
        The model can't be loaded or is not supported.
    """
    if plan.engine.kind == "transformers":
        from specnb.engines.transformers import TransformersEngine

        return TransformersEngine(plan)
    if plan.engine.kind == "simulated":
        from specnb.engines.simulated import SimulatedEngine

        return SimulatedEngine(plan)
    from specnb.engines.server import ServerEngine

    return ServerEngine(plan)
