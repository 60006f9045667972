"""Run directories: what is written is read back, and whatever breaks one is named in one line."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specnb import records, schema
from specnb.config import Cell, Plan, plan_cells, plan_from_dict
from specnb.errors import PlanError, RecordError, SpecnbError, StorageError
from specnb.provenance import file_sha256
from specnb.records import Run, RunWriter, check_resumable, read_manifest, read_run
from specnb.schema import CELL_TABLES, TABLES, Table


def make_plan(**changes: Any) -> Plan:
    """One tier, two concurrencies: four cells."""
    return plan_from_dict(
        {
            "name": "p",
            "target": {"model": "m"},
            "engine": {"kind": "simulated"},
            "arms": [
                {"name": "baseline"},
                {"name": "a", "speculative": {"method": "ngram", "num_speculative_tokens": 3}},
            ],
            "workload": {"set": "builtin-en", "tiers": ["low"]},
            "sampling": [{"name": "greedy", "temperature": 0.0, "max_tokens": 8}],
            "load": {"concurrency": [1, 2]},
            **changes,
        }
    )


PLAN = make_plan()
CELLS = plan_cells(PLAN)
FACTS = {"cell_order": [cell.cell_id for cell in CELLS]}


def labels(cell: Cell, run_id: str) -> dict[str, Any]:
    return {"run_id": run_id, "arm": cell.arm.name, "cell_id": cell.cell_id}


def rows_of(cell: Cell, run_id: str) -> dict[str, list[dict[str, Any]]]:
    """Two rows of each cell table, every column with a value of its own."""
    keys = labels(cell, run_id)
    asked = [{**keys, "request_id": f"{cell.cell_id}.{i:04d}", "prompt_id": f"q{i}"} for i in (0, 1)]
    ok = {
        **asked[0],
        "repeat": cell.repeat,
        "sampling": cell.sampling.name,
        "concurrency": cell.concurrency,
        "prompt_sha256": "5" * 64,
        "task": "sums",
        "entropy_tier": cell.tier,
        "length_tier": "short",
        "scheduled_s": 1.0,
        "sent_s": 1.25,
        "first_token_s": 1.5,
        "first_answer_s": 1.75,
        "last_token_s": 2.5,
        "num_prompt_tokens": 11,
        "num_cached_tokens": 4,
        "num_output_tokens": 3,
        "num_first_chunk_tokens": 1,
        "num_chunks": 2,
        "finish_reason": "stop",
        "status": "ok",
        "error_kind": None,
        "error": None,
        "output_text": 'zwölf \n,"',
        "output_token_ids": [5, 6, 2],
        "grader_score": 0.5,
        "mean_token_entropy_nats": 0.125,
    }
    failed = {
        **dict.fromkeys(schema.REQUESTS.names),
        **{
            key: ok[key]
            for key in ("repeat", "sampling", "concurrency", "prompt_sha256", "task", "entropy_tier")
        },
        **asked[1],
        "length_tier": "long",
        "scheduled_s": 1.5,
        "status": "timeout",
        "error_kind": "deadline",
        "error": "no token in 30 s",
    }
    return {
        "requests": [ok, failed],
        "chunks": [
            {"run_id": run_id, "request_id": ok["request_id"], "chunk": i, "received_s": s, "num_tokens": n}
            for i, s, n in ((0, 1.5, 1), (1, 2.5, None))
        ],
        "steps": [
            {
                **asked[0],
                "step": i,
                "num_draft_tokens": 3 - i,
                "num_accepted_tokens": 1 - i,
                "num_emitted_tokens": 2 - i,
                "engine_step": None if i else 7,
            }
            for i in (0, 1)
        ],
        "engine_steps": [
            {
                **keys,
                "engine_step": i,
                "batch_size": 1 + i,
                "num_query_tokens": 4,
                "prefill_s": 0.5,
                "draft_s": 0.25,
                "verify_s": 0.125,
                "end_s": 2.0 + i,
            }
            for i in (0, 1)
        ],
        "positions": [
            {
                **asked[0],
                "step": 0,
                "position": i,
                "reached": i == 0,
                "accepted": i == 0,
                "target_rank": None if i else 0,
                "in_answer": True,
                "answer_rank": 3 if i else 0,
                "draft_prob": 0.75,
                "target_prob": None if i else 0.5,
            }
            for i in (0, 1)
        ],
        "tokens": [
            {
                **asked[0],
                "index": i,
                "token_id": 5 + i,
                "origin": "accepted" if i else "baseline",
                "logprob": -0.5,
                "entropy_nats": 0.25,
                "top1_top2_margin": 1.5,
                "cdf_low": 0.25 if i else None,
                "cdf_high": 0.75 if i else None,
            }
            for i in (0, 1)
        ],
        "acceptance": [
            {
                **row,
                "source": "vllm",
                "num_drafts": 2,
                "num_draft_tokens": 6,
                "num_accepted_tokens": 3,
                "num_speculative_tokens": 3,
                "acceptance_histogram": [1, 0, 0, 1] if i else None,
            }
            for i, row in enumerate(asked)
        ],
        "log_lines": [{**keys, "line": i, "text": "Engine 000: a line"} for i in (0, 1)],
        "scrapes": [{**keys, "scrape": i, "scraped_s": 0.5 + i, "body": "a 1\n"} for i in (0, 1)],
        "telemetry": [
            {
                **keys,
                "sampled_s": 0.5,
                "device": device,
                "memory_used_bytes": 1 << 30,
                "utilisation": 0.5,
                "power_watts": None if device == "host" else 300.0,
            }
            for device in ("host", "0")
        ],
    }


def split_rows(run_id: str) -> list[dict[str, Any]]:
    return [
        {
            "run_id": run_id,
            "sampling": "greedy",
            "concurrency": 1,
            "prompt_id": f"q{i}",
            "arm": "a",
            "repeat": 0,
            "reference_arm": "baseline",
            "reference_repeat": 0,
            "index": 2,
            "token_id": None if i else 7,
            "reference_token_id": 9,
            "margin_nats": None if i else -0.5,
            "margin_fp64_nats": None if i else 0.25,
        }
        for i in (0, 1)
    ]


def frame_of(table: Table, rows: list[dict[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=table.polars_schema, orient="row")


def tables_of(cell: Cell, run_id: str) -> dict[str, pl.DataFrame]:
    return {name: frame_of(TABLES[name], rows) for name, rows in rows_of(cell, run_id).items()}


def write_cells(writer: RunWriter, cells: tuple[Cell, ...]) -> None:
    for number, cell in enumerate(cells):
        times = {"start_s": float(number), "end_s": number + 0.5, "num_failed": 1}
        writer.write_cell(cell, tables_of(cell, writer.run_id), summary=times)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with every table; copy it before breaking it."""
    with RunWriter.create(tmp_path_factory.mktemp("records"), PLAN, facts=FACTS) as writer:
        write_cells(writer, CELLS)
        writer.finalise(status="finished", splits=frame_of(schema.SPLITS, split_rows(writer.run_id)))
    return writer.path


@pytest.fixture
def broken(finished: Path, tmp_path: Path) -> Path:
    """A private copy of that run."""
    return Path(shutil.copytree(finished, tmp_path / finished.name))


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """An interrupted run with two of its four cells."""
    with RunWriter.create(tmp_path / "runs", PLAN, facts=FACTS) as writer:
        write_cells(writer, CELLS[:2])
        writer.finalise(status="interrupted")
    return writer.path


def fault(function: Callable[[], object], kind: type[SpecnbError] = RecordError) -> str:
    """The one line that `function` raises."""
    with pytest.raises(kind) as caught:
        function()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def file_of(run: Path, table: str, cell: int = 1) -> Path:
    return (
        run / "splits.parquet"
        if table == "splits"
        else run / "cells" / CELLS[cell].cell_id / f"{table}.parquet"
    )


def rewrite(file: Path, *columns: pl.Expr | pl.Series) -> None:
    pl.read_parquet(file, hive_partitioning=False).with_columns(*columns).write_parquet(file)


def poke(file: Path, column: str, row: int, value: object) -> None:
    """Puts one value into one row."""
    frame = pl.read_parquet(file, hive_partitioning=False)
    values = frame[column].to_list()
    values[row] = value
    frame.with_columns(pl.Series(column, values, dtype=frame.schema[column])).write_parquet(file)


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    for key, value in changes.items():
        if value is KeyError:
            del content[key]
        else:
            content[key] = value
    file.write_text(json.dumps(content), encoding="utf-8")


# -- what is written is read ---------------------------------------------------------------------


def test_every_column_comes_back_by_value(finished: Path) -> None:
    run = read_run(finished)
    for name in CELL_TABLES:
        expected = [row for cell in CELLS for row in rows_of(cell, run.run_id)[name]]
        assert run.table(name).to_dicts() == expected
        assert run.table(name).schema == TABLES[name].polars_schema
    assert run.table("splits").to_dicts() == split_rows(run.run_id)


def test_run_says_what_it_is(finished: Path) -> None:
    run = read_run(str(finished))
    assert run.path == finished
    assert run.run_id == finished.name
    assert run.run_id.startswith("p-20")
    assert run.run_id.endswith(PLAN.sha256[:8])
    assert (run.status, run.modelled, run.plan) == ("finished", False, PLAN)
    assert [cell["cell_id"] for cell in run.cells] == FACTS["cell_order"]
    assert run.cells[1]["num_failed"] == 1
    assert repr(run) == f"Run('{run.run_id}', finished, 4 cells)"
    assert run.requests is run.table("requests")
    assert run.steps is run.table("steps")


def test_manifest_lists_every_file_with_rows_and_digest(finished: Path) -> None:
    manifest = read_manifest(finished)
    assert [cell["cell_id"] for cell in manifest["cells"]] == FACTS["cell_order"]
    for cell in manifest["cells"]:
        assert list(cell["files"]) == list(CELL_TABLES)
        for name, facts in cell["files"].items():
            file = finished / "cells" / cell["cell_id"] / f"{name}.parquet"
            assert facts == {"rows": 2, "sha256": file_sha256(file)}
    assert manifest["splits"] == {"rows": 2, "sha256": file_sha256(finished / "splits.parquet")}
    assert manifest["plan_sha256"] == PLAN.sha256
    assert manifest["ended_at"] >= manifest["started_at"]


def test_a_finished_run_holds_nothing_else(finished: Path) -> None:
    found = sorted(path.name for path in finished.iterdir())
    assert found == [".lock", "cells", "logs", "manifest.json", "splits.parquet"]
    assert sorted(path.name for path in (finished / "cells").iterdir()) == sorted(FACTS["cell_order"])


def test_labelled_joins_the_requests_labels(finished: Path) -> None:
    run = read_run(finished)
    frame = run.labelled("steps")
    assert frame.columns == [*schema.STEPS.names, *records.LABELS]
    assert frame.select(records.LABELS).row(0) == (0, "greedy", 1, "sums", "low", "short")
    assert frame.drop(records.LABELS).equals(run.steps)
    assert run.labelled("chunks").height == 8
    few = ("repeat", "num_draft_tokens", "request_id", "entropy_tier")
    assert run.labelled("steps", columns=few).equals(frame.select(few))
    with pytest.raises(ValueError, match="table engine_steps has no request_id, so requests' labels"):
        run.labelled("engine_steps")


def test_labelled_refuses_rows_of_unknown_requests(broken: Path) -> None:
    file = file_of(broken, "tokens")
    poke(file, "request_id", 1, "stranger")
    run = read_run(broken)
    assert run.table("tokens").height == 8
    assert fault(lambda: run.labelled("tokens")) == (
        f"{broken}: tokens: column 'request_id' is not in requests: row 3, value 'stranger'"
    )


def test_tables_that_the_engine_can_not_fill_are_empty(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, PLAN, facts={}) as writer:
        full = tables_of(CELLS[0], writer.run_id)
        writer.write_cell(CELLS[0], {"requests": full["requests"], "steps": full["steps"]}, summary={})
        writer.finalise(status="interrupted")
    run = read_run(writer.path)
    assert [name for name in TABLES if run.has(name)] == ["requests", "steps"]
    for name in set(TABLES) - {"requests", "steps"}:
        assert run.table(name).equals(schema.empty(TABLES[name]))


def test_a_frame_with_no_rows_is_a_table(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, PLAN, facts={}) as writer:
        tables = {name: schema.empty(TABLES[name]) for name in CELL_TABLES}
        writer.write_cell(CELLS[0], tables, summary={})
    run = read_run(writer.path)
    assert run.has("tokens")
    assert run.table("tokens").equals(schema.empty(schema.TOKENS))


def values_of(column: schema.Column) -> st.SearchStrategy[Any]:
    """Any value that the column's declaration allows."""
    if column.allowed:
        values: st.SearchStrategy[Any] = st.sampled_from(column.allowed)
    elif column.dtype == pl.Int64():
        values = st.integers(int(column.minimum or 0), 2**62)
    elif column.dtype == pl.Float64():
        values = st.floats(
            column.minimum, column.maximum, allow_nan=False, allow_infinity=False, allow_subnormal=True
        )
    elif column.dtype == pl.Boolean():
        values = st.booleans()
    elif column.dtype == pl.String():
        values = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    else:
        values = st.lists(st.integers(-(2**62), 2**62), max_size=4)
    return st.none() | values if column.nullable else values


def consistent(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """The row with what the invariants tie together."""
    if name == "steps":
        row["num_accepted_tokens"] = min(row["num_accepted_tokens"], row["num_draft_tokens"])
        row["num_emitted_tokens"] = min(row["num_emitted_tokens"], row["num_accepted_tokens"] + 1)
    if name == "positions":
        row["accepted"] &= row["reached"]
        if not row["reached"]:
            row["target_rank"] = row["target_prob"] = None
        if not row["in_answer"]:
            row["answer_rank"] = None
    if name == "tokens" and None in (row["cdf_low"], row["cdf_high"]):
        row["cdf_low"] = row["cdf_high"] = None
    elif name == "tokens":
        row["cdf_low"], row["cdf_high"] = sorted((row["cdf_low"], row["cdf_high"]))
    if name == "requests":
        times = ("sent_s", "first_token_s", "first_answer_s", "last_token_s")
        known = iter(sorted(row[key] for key in times if row[key] is not None))
        row.update({key: next(known) for key in times if row[key] is not None})
        ids = row["output_token_ids"]
        if ids is not None:
            row["num_output_tokens"] = len(ids)
        if row["status"] == "ok":
            row["error"] = row["error_kind"] = None
            row["finish_reason"] = row["finish_reason"] or "stop"
            if row["num_output_tokens"] == 0:
                row["num_output_tokens"], row["output_token_ids"] = 1, [3]
        else:
            row["error_kind"] = row["error_kind"] or "x"
        for part, whole in (
            ("num_cached_tokens", "num_prompt_tokens"),
            ("num_first_chunk_tokens", "num_output_tokens"),
        ):
            if None not in (row[part], row[whole]):
                row[part] = min(row[part], row[whole])
    return row


@st.composite
def rows_for(draw: st.DrawFn, name: str) -> list[dict[str, Any]]:
    table = TABLES[name]
    row = st.fixed_dictionaries({column.name: values_of(column) for column in table.columns})
    drawn = draw(st.lists(row, max_size=4, unique_by=lambda row: tuple(row[key] for key in table.key)))
    return [consistent(name, found) for found in drawn]


@pytest.mark.parametrize("name", TABLES)
def test_any_legal_frame_comes_back_whole(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("legal")
    table, cell = TABLES[name], CELLS[0]
    fixed = {
        **labels(cell, "r"),
        "repeat": cell.repeat,
        "sampling": cell.sampling.name,
        "concurrency": cell.concurrency,
        "entropy_tier": cell.tier,
    }

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(rows=rows_for(name))
    def check(rows: list[dict[str, Any]]) -> None:
        if name != "splits":
            held = {key: value for key, value in fixed.items() if key in table.names}
            keys = [key for key in table.key if key not in held]
            rows = list({tuple(row[key] for key in keys): {**row, **held} for row in rows}.values())
        frame = frame_of(table, rows)
        with RunWriter.create(root, PLAN, facts={}) as writer:
            frame = frame.with_columns(pl.lit(writer.run_id).alias("run_id"))
            if name == "splits":
                writer.write_cell(cell, tables_of(cell, writer.run_id), summary={})
                writer.finalise(status="interrupted", splits=frame)
            else:
                tables = {key: schema.empty(TABLES[key]) for key in ("requests", "steps")}
                writer.write_cell(cell, {**tables, name: frame}, summary={})
        assert read_run(writer.path).table(name).equals(frame)
        shutil.rmtree(writer.path)

    check()


# -- every declaration and invariant has a file that breaks it ---------------------------------------


def declared_faults() -> Iterator[Any]:
    """(table, column, bad value, what the message says) for each rule of the schema's declarations."""
    for table in TABLES.values():
        for column in table.columns:
            cases: list[tuple[object, str]] = []
            if not column.nullable:
                cases.append((None, "is null: row 1, value None"))
            if column.dtype == pl.Float64():
                for value in (math.nan, math.inf, -math.inf):
                    cases.append((value, f"is NaN or infinite; unknown is null: row 1, value {value}"))
            if column.allowed:
                cases.append(("Low", f"is not one of {', '.join(column.allowed)}: row 1, value 'Low'"))
            if column.minimum is not None:
                value = column.minimum - 1
                value = int(value) if column.dtype == pl.Int64() else float(value)
                cases.append((value, f"is below {column.minimum:g}: row 1, value {value!r}"))
            if column.maximum is not None:
                value = column.maximum + 0.5
                cases.append((value, f"is above {column.maximum:g}: row 1, value {value!r}"))
            for value, said in cases:
                yield pytest.param(
                    table.name, column.name, value, said, id=f"{table.name}.{column.name}={value}"
                )


@pytest.mark.parametrize(("table", "column", "value", "said"), list(declared_faults()))
def test_value_that_breaks_its_declaration(
    broken: Path, table: str, column: str, value: object, said: str
) -> None:
    file = file_of(broken, table)
    poke(file, column, 1, value)
    assert fault(lambda: read_run(broken).table(table)) == f"{file}: column '{column}' {said}"


@pytest.mark.parametrize(
    ("table", "column"),
    [pytest.param(t.name, c.name, id=f"{t.name}.{c.name}") for t in TABLES.values() for c in t.columns],
)
def test_column_missing_or_of_another_type(broken: Path, table: str, column: str) -> None:
    file = file_of(broken, table)
    frame = pl.read_parquet(file, hive_partitioning=False)
    if next(declared for declared in TABLES[table].columns if declared.name == column).optional:
        frame.drop("in_answer", "answer_rank").write_parquet(file)
        assert read_run(broken).table(table)[column].null_count() == frame.height
    else:
        frame.drop(column).write_parquet(file)
        assert fault(lambda: read_run(broken).table(table)) == f"{file}: column '{column}' is missing"
    frame.with_columns(pl.lit(3, dtype=pl.Int8).alias(column)).write_parquet(file)
    expected = f"{file}: column '{column}' is Int8, expected {TABLES[table].polars_schema[column]}"
    assert fault(lambda: read_run(broken).table(table)) == expected


INVARIANTS: list[tuple[str, dict[str, object], str]] = [
    (
        "steps",
        {"num_accepted_tokens": 3},
        "column 'num_accepted_tokens' exceeds num_draft_tokens: row 1, value 3",
    ),
    (
        "steps",
        {"num_emitted_tokens": 2},
        "column 'num_emitted_tokens' exceeds num_accepted_tokens + 1: row 1, value 2",
    ),
    (
        "requests",
        {"status": "ok", "error_kind": None, "error": None},
        "column 'finish_reason' is null though status is ok: row 1, value None",
    ),
    (
        "requests",
        {"status": "ok", "finish_reason": "stop", "error_kind": None},
        "column 'error' is set though status is ok: row 1, value 'no token in 30 s'",
    ),
    (
        "requests",
        {"status": "ok", "finish_reason": "stop", "error": None},
        "column 'error_kind' is set though status is ok: row 1, value 'deadline'",
    ),
    (
        "requests",
        {"error_kind": None},
        "column 'error_kind' is null though status is not ok: row 1, value None",
    ),
    (
        "requests",
        {"status": "ok", "finish_reason": "stop", "error": None, "error_kind": None, "num_output_tokens": 0},
        "column 'num_output_tokens' is 0 though status is ok: row 1, value 0",
    ),
    (
        "requests",
        {"sent_s": 3.0, "first_token_s": 2.0},
        "column 'first_token_s' is before sent_s: row 1, value 2.0",
    ),
    (
        "requests",
        {"first_token_s": 3.0, "first_answer_s": 2.0},
        "column 'first_answer_s' is before first_token_s: row 1, value 2.0",
    ),
    (
        "requests",
        {"first_token_s": 3.0, "last_token_s": 2.0},
        "column 'last_token_s' is before first_token_s: row 1, value 2.0",
    ),
    (
        "requests",
        {"first_answer_s": 3.0, "last_token_s": 2.0},
        "column 'last_token_s' is before first_answer_s: row 1, value 2.0",
    ),
    (
        "requests",
        {"num_prompt_tokens": 3, "num_cached_tokens": 4},
        "column 'num_cached_tokens' exceeds num_prompt_tokens: row 1, value 4",
    ),
    (
        "requests",
        {"num_output_tokens": 3, "num_first_chunk_tokens": 4},
        "column 'num_first_chunk_tokens' exceeds num_output_tokens: row 1, value 4",
    ),
    (
        "requests",
        {"num_output_tokens": 3, "output_token_ids": [1, None, 2]},
        "column 'output_token_ids' holds a null: row 1, value [1, None, 2]",
    ),
    (
        "requests",
        {"num_output_tokens": 3, "output_token_ids": [1, 2]},
        "column 'output_token_ids' has another length than num_output_tokens: row 1, value [1, 2]",
    ),
    (
        "positions",
        {"accepted": True},
        "column 'accepted' is true though the position was not reached: row 1, value True",
    ),
    (
        "positions",
        {"target_rank": 2},
        "column 'target_rank' is set though the position was not reached: row 1, value 2",
    ),
    (
        "positions",
        {"in_answer": False},
        "column 'answer_rank' is set though the answer holds no token there: row 1, value 3",
    ),
    (
        "positions",
        {"target_prob": 0.5},
        "column 'target_prob' is set though the position was not reached: row 1, value 0.5",
    ),
    ("tokens", {"cdf_high": 0.125}, "column 'cdf_high' is below cdf_low: row 1, value 0.125"),
    (
        "tokens",
        {"cdf_high": None},
        "column 'cdf_high' is known where cdf_low is not, or the reverse: row 1, value None",
    ),
    (
        "tokens",
        {"cdf_low": None},
        "column 'cdf_high' is known where cdf_low is not, or the reverse: row 1, value 0.75",
    ),
]


@pytest.mark.parametrize(("table", "changes", "said"), INVARIANTS)
def test_row_that_breaks_an_invariant(
    broken: Path, table: str, changes: dict[str, object], said: str
) -> None:
    file = file_of(broken, table)
    for column, value in changes.items():
        poke(file, column, 1, value)
    assert fault(lambda: read_run(broken).table(table)) == f"{file}: {said}"


def test_every_invariant_is_broken_above() -> None:
    rules = {
        (name, f"column '{column}' {problem}")
        for name, found in records._ROW_INVARIANTS.items()
        for column, problem, _ in found
    }
    assert rules == {(table, said.partition(": row")[0]) for table, _, said in INVARIANTS}


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("requests", "run_id", "other"),
        ("requests", "arm", "baseline"),
        ("requests", "cell_id", "other"),
        ("requests", "repeat", 1),
        ("requests", "sampling", "sampled"),
        ("requests", "concurrency", 2),
        ("requests", "entropy_tier", "high"),
        ("chunks", "run_id", "other"),
        ("steps", "arm", "baseline"),
        ("telemetry", "cell_id", "other"),
        ("splits", "run_id", "other"),
    ],
)
def test_row_that_belongs_elsewhere(broken: Path, table: str, column: str, value: object) -> None:
    file = file_of(broken, table)
    right = pl.read_parquet(file, hive_partitioning=False)[column][1]
    poke(file, column, 1, value)
    assert fault(lambda: read_run(broken).table(table)) == (
        f"{file}: column '{column}' is not {right!r}, as this cell's rows say: row 1, value {value!r}"
    )


@pytest.mark.parametrize("table", TABLES)
def test_key_twice_in_one_file(broken: Path, table: str) -> None:
    file = file_of(broken, table)
    frame = pl.read_parquet(file, hive_partitioning=False)
    pl.concat([frame, frame[:1]]).write_parquet(file)
    key = ", ".join(f"{name} {frame[name][0]!r}" for name in TABLES[table].key)
    assert fault(lambda: read_run(broken).table(table)) == f"{file}: key is not unique: row 2, {key}"


@pytest.mark.parametrize("table", ["requests", "chunks", "steps", "positions", "tokens"])
def test_key_twice_across_cells(broken: Path, table: str) -> None:
    first, later = (pl.read_parquet(file_of(broken, table, i), hive_partitioning=False) for i in (0, 2))
    changed = later.with_columns(first["request_id"], *([first["chunk"]] if table == "chunks" else []))
    changed.write_parquet(file_of(broken, table, 2))
    key = ", ".join(f"{name} {first[name][0]!r}" for name in TABLES[table].key)
    assert fault(lambda: read_run(broken).table(table)) == (
        f"{file_of(broken, table, 2)}: key is not unique in the run: row 0, {key}"
    )


# -- files missing, cut, corrupt or edited ---------------------------------------------------------


def test_table_missing(broken: Path) -> None:
    for name in ("steps", "splits"):
        file_of(broken, name).unlink()
        expected = f"{file_of(broken, name)}: file is missing; the run directory is incomplete"
        run = read_run(broken)
        assert fault(lambda run=run, name=name: run.table(name)) == expected  # type: ignore[misc]


def test_required_table_not_listed(broken: Path) -> None:
    folder = broken / "cells" / CELLS[1].cell_id
    files = json.loads((folder / "cell.json").read_text())["files"]
    edit(folder / "cell.json", files={name: facts for name, facts in files.items() if name != "steps"})
    assert fault(lambda: read_run(broken).steps) == f"{folder}: steps.parquet is not listed in cell.json"


@pytest.mark.parametrize("keep", [0, 3, 200, -1])
def test_table_cut(broken: Path, keep: int) -> None:
    file = file_of(broken, "requests")
    file.write_bytes(file.read_bytes()[:keep])
    message = fault(lambda: read_run(broken).requests)
    assert message.startswith(f"{file}: not a readable Parquet file (")
    assert message.endswith("); it is corrupt")


def test_table_that_is_text_or_a_folder(broken: Path) -> None:
    file = file_of(broken, "requests")
    file.write_text("request_id\n1\n")
    assert fault(lambda: read_run(broken).requests).startswith(f"{file}: not a readable Parquet file (")
    file.unlink()
    file.mkdir()
    assert fault(lambda: read_run(broken).requests).startswith(f"{file}: ")


def test_flipped_bytes_never_give_a_traceback(broken: Path) -> None:
    """Bit rot is an error or (in padding, statistics, compressed text) unnoticed here; never a crash."""
    file = file_of(broken, "requests")
    content = file.read_bytes()
    for place in range(4, len(content), 211):
        file.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            assert read_run(broken).requests.height == 2 * len(CELLS)
        except RecordError as error:
            said = str(error)
            assert said.startswith(str(file))


def test_no_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").touch()
        expected = f"{path}: no such run directory; give a folder that holds manifest.json"
        assert fault(lambda path=path: read_run(path)) == expected  # type: ignore[misc]


def test_empty_directory(tmp_path: Path) -> None:
    assert fault(lambda: read_run(tmp_path)) == (
        f"{tmp_path}/manifest.json: can't be read (No such file or directory); "
        "the run directory is incomplete"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not valid JSON (Expecting value: line 1 column 1 (char 0)); the file is corrupt"),
        (b'{"a": ', "not valid JSON (Expecting value: line 1 column 7 (char 6)); the file is corrupt"),
        (b"[]", "not a JSON object; the file is corrupt"),
        (b'{"a": NaN}', "not valid JSON (NaN is not JSON); the file is corrupt"),
        (b'{"a": -Infinity}', "not valid JSON (-Infinity is not JSON); the file is corrupt"),
        (
            b"\xff",
            "not valid JSON ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte); ",
        ),
        (b"[" * 100_000, "not valid JSON (maximum recursion depth exceeded"),
    ],
)
@pytest.mark.parametrize("name", ["manifest.json", f"cells/{CELLS[1].cell_id}/cell.json"])
def test_json_that_is_not(broken: Path, name: str, content: bytes, said: str) -> None:
    (broken / name).write_bytes(content)
    assert fault(lambda: read_run(broken)).startswith(f"{broken / name}: {said}")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"plan": KeyError}, "key 'plan' is missing; the manifest was edited or is of another tool"),
        (
            {"schema_version": KeyError},
            "key 'schema_version' is missing; the manifest was edited or is of another",
        ),
        ({"schema_version": 2}, "schema_version 2, this specnb reads 1; use the specnb version named in it"),
        (
            {"schema_version": "1"},
            "schema_version '1', this specnb reads 1; use the specnb version named in it",
        ),
        ({"run_id": 3}, "'run_id' is 3, not text; it was edited"),
        ({"modelled": "false"}, "'modelled' is 'false', not true or false; it was edited"),
        ({"modelled": 0}, "'modelled' is 0, not true or false; it was edited"),
        ({"plan": []}, "'plan' is [], not an object; it was edited"),
        (
            {"status": "done"},
            "status is 'done', not one of running, finished, interrupted, failed; it was edited",
        ),
        ({"started_at": "today"}, "started_at 'today' is no time with a zone; it was edited"),
        (
            {"started_at": "2024-01-01T00:00:00"},
            "started_at '2024-01-01T00:00:00' is no time with a zone; it ",
        ),
        ({"cells": {}}, "'cells' is not a list of cells; it was edited"),
        ({"cells": [3]}, "'cells' is not a list of cells; it was edited"),
    ],
)
def test_manifest_edited(broken: Path, changes: dict[str, Any], said: str) -> None:
    edit(broken / "manifest.json", **changes)
    assert fault(lambda: read_run(broken)).startswith(f"{broken}/manifest.json: {said}")


def test_plan_in_the_manifest_edited(broken: Path) -> None:
    plan = json.loads((broken / "manifest.json").read_text())["plan"]
    edit(broken / "manifest.json", plan={**plan, "repeats": 0})
    assert fault(lambda: read_run(broken).plan, PlanError) == (
        f"{broken}/manifest.json: plan: repeats: must be at least 1, got 0"
    )


def test_cell_listed_but_missing(broken: Path) -> None:
    folder = broken / "cells" / CELLS[2].cell_id
    shutil.rmtree(folder)
    assert fault(lambda: read_run(broken)) == f"{folder}: listed in the manifest but missing"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"files": KeyError}, "key 'files' is missing; remove the cell's folder and resume"),
        ({"arm": KeyError}, "key 'arm' is missing; remove the cell's folder and resume"),
        ({"files": 3}, "'files' is 3, not an object; it was edited"),
        ({"repeat": "0"}, "'repeat' is '0', not a whole number; it was edited"),
        ({"repeat": True}, "'repeat' is True, not a whole number; it was edited"),
        ({"cell_id": "../../x"}, "cell_id '../../x' is not the folder's name; it was copied or renamed"),
    ],
)
def test_cell_summary_edited(broken: Path, changes: dict[str, Any], said: str) -> None:
    file = broken / "cells" / CELLS[1].cell_id / "cell.json"
    edit(file, **changes)
    assert fault(lambda: read_run(broken)) == f"{file}: {said}"


def test_cell_folder_copied(broken: Path) -> None:
    shutil.copytree(broken / "cells" / CELLS[1].cell_id, broken / "cells" / "copy")
    assert fault(lambda: read_run(broken)).startswith(
        f"{broken}/cells/copy/cell.json: cell_id '{CELLS[1].cell_id}'"
    )


def test_no_cell_yet(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, PLAN, facts={}) as writer:
        message = fault(lambda: read_run(writer.path))
    assert message == f"{writer.path}: no cell is finished yet; resume the run with --resume"


# -- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: {"requests": t["requests"]}, ": the engine gave no table 'steps'"),
        (lambda t: {**t, "extra": t["steps"]}, ": the engine gave a table 'extra', which no schema declares"),
        (
            lambda t: {**t, "splits": t["steps"]},
            ": the engine gave a table 'splits', which no schema declares",
        ),
        (lambda t: {**t, "steps": t["steps"].drop("step")}, "/steps: column 'step' is missing"),
        (
            lambda t: {**t, "steps": t["steps"].with_columns(x=1)},
            "/steps: column 'x' is not declared in the schema",
        ),
        (
            lambda t: {**t, "steps": t["steps"].with_columns(pl.col("step").cast(pl.Int32))},
            "/steps: column 'step' is Int32, expected Int64",
        ),
        (
            lambda t: {**t, "steps": t["steps"].with_columns(step=pl.lit(0, dtype=pl.Int64))},
            "/steps: key is not unique: row 1, request_id 'baseline.low.c1.greedy.r0.0000', step 0",
        ),
        (
            lambda t: {**t, "steps": t["steps"].with_columns(arm=pl.lit("a"))},
            "/steps: column 'arm' is not 'baseline', as this cell's rows say: row 0, value 'a'",
        ),
        (
            lambda t: {**t, "tokens": t["tokens"].with_columns(entropy_nats=pl.lit(math.nan))},
            "/tokens: column 'entropy_nats' is NaN or infinite; unknown is null: row 0, value nan",
        ),
    ],
)
def test_frame_that_breaks_the_schema_is_not_written(
    tmp_path: Path, change: Callable[[dict[str, pl.DataFrame]], dict[str, pl.DataFrame]], said: str
) -> None:
    with RunWriter.create(tmp_path, PLAN, facts={}) as writer:
        tables = change(tables_of(CELLS[0], writer.run_id))
        message = fault(lambda: writer.write_cell(CELLS[0], tables, summary={}))
        assert message == f"{CELLS[0].cell_id}{said}"
        assert list((writer.path / "cells").iterdir()) == []


def test_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/runs\xff"))
    with RunWriter.create(root, PLAN, facts={}) as writer:
        write_cells(writer, CELLS[:1])
    assert read_run(writer.path).requests.height == 2


def test_columns_may_come_in_any_order(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, PLAN, facts={}) as writer:
        tables = tables_of(CELLS[0], writer.run_id)
        shuffled = {name: frame.select(reversed(frame.columns)) for name, frame in tables.items()}
        writer.write_cell(CELLS[0], shuffled, summary={})
    assert read_run(writer.path).steps.equals(tables["steps"])


def test_splits_that_break_the_schema_are_not_written(unfinished: Path) -> None:
    with RunWriter.resume(unfinished, PLAN) as writer:
        frame = frame_of(schema.SPLITS, split_rows("other"))
        assert fault(lambda: writer.finalise(status="finished", splits=frame)).startswith(
            "splits: column 'run_id'"
        )
    assert not (unfinished / "splits.parquet").exists()
    assert read_run(unfinished).status == "running"


def test_finalise_knows_three_ends(unfinished: Path) -> None:
    with (
        RunWriter.resume(unfinished, PLAN) as writer,
        pytest.raises(ValueError, match="status is 'done'; use finished, interrupted, failed"),
    ):
        writer.finalise(status="done")


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    with (
        RunWriter.create(tmp_path, PLAN, facts={}) as one,
        RunWriter.create(tmp_path, PLAN, facts={}) as two,
        RunWriter.create(tmp_path, PLAN, facts={}) as three,
    ):
        assert len({one.run_id, two.run_id, three.run_id}) == 3
        for writer in (one, two, three):
            assert read_manifest(writer.path)["run_id"] == writer.path.name


def test_clock_goes_on_after_resuming_whatever_the_wall_clock_says(unfinished: Path) -> None:
    edit(unfinished / "cells" / CELLS[1].cell_id / "cell.json", end_s=5000.0)
    with RunWriter.resume(unfinished, PLAN) as writer:
        first = writer.clock()
        assert 5000.0 <= first <= writer.clock() < 5060.0


# -- resuming ------------------------------------------------------------------------------------


def test_resume_completes_a_run(unfinished: Path) -> None:
    with RunWriter.resume(unfinished, PLAN) as writer:
        assert list(writer.finished_cells()) == sorted(cell.cell_id for cell in CELLS[:2])
        assert read_run(unfinished).status == "running"
        write_cells(writer, CELLS[2:])
        writer.finalise(status="finished")
    run = read_run(unfinished)
    assert run.status == "finished"
    assert [cell["cell_id"] for cell in run.cells] == FACTS["cell_order"]
    assert len(run.manifest["resumed_at"]) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"repeats": 2}, "repeats"),
        ({"name": "q", "order": "sequential"}, "name, order"),
        ({"target": {"model": "n"}, "price": {"gpu_hour": 3.0}}, "target.model"),
        ({"load": {"concurrency": [1]}}, "load.concurrency"),
    ],
)
def test_resume_with_a_changed_plan(unfinished: Path, changes: dict[str, Any], said: str) -> None:
    before = (unfinished / "manifest.json").read_bytes()
    assert fault(lambda: RunWriter.resume(unfinished, make_plan(**changes)), PlanError) == (
        f"{unfinished}: was started with another plan (differs in: {said}); "
        "resume with the plan in its manifest.json or start a new run"
    )
    assert (unfinished / "manifest.json").read_bytes() == before


def test_resume_with_another_price_is_the_same_plan(unfinished: Path) -> None:
    with RunWriter.resume(unfinished, make_plan(price={"gpu_hour": 9.0})) as writer:
        assert writer.path == unfinished


def test_resume_of_a_finished_run(broken: Path) -> None:
    message = fault(lambda: RunWriter.resume(broken, PLAN), PlanError)
    assert message == f"{broken}: this run is finished; nothing to resume"


def test_resume_of_nothing(tmp_path: Path) -> None:
    message = fault(lambda: RunWriter.resume(tmp_path / "none", PLAN))
    assert message == f"{tmp_path}/none: no such run directory; give a folder that holds manifest.json"


def test_resume_with_a_corrupt_cell(unfinished: Path) -> None:
    file = unfinished / "cells" / CELLS[0].cell_id / "cell.json"
    file.unlink()
    assert fault(lambda: RunWriter.resume(unfinished, PLAN)).startswith(
        f"{file}: can't be read (No such file"
    )


def test_check_resumable_touches_nothing(unfinished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in unfinished.rglob("*")}
    assert check_resumable(unfinished, PLAN)["status"] == "interrupted"
    assert {path: path.stat().st_mtime_ns for path in unfinished.rglob("*")} == before


def test_leftovers_are_ignored_and_removed(unfinished: Path) -> None:
    partial = unfinished / "cells" / f".partial-{CELLS[2].cell_id}-99"
    shutil.copytree(unfinished / "cells" / CELLS[1].cell_id, partial)
    for name in (".manifest.json.partial", "splits.parquet.partial"):
        (unfinished / name).write_text("{")
    run = read_run(unfinished)
    assert len(run.cells) == 2
    assert not run.has("splits")
    with RunWriter.resume(unfinished, PLAN):
        left = sorted(path.name for path in unfinished.iterdir())
        assert left == [".lock", "cells", "logs", "manifest.json"]
        assert not partial.exists()


# -- interruptions, locks and disks ----------------------------------------------------------------


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, MemoryError])
def test_stop_between_writing_and_renaming_leaves_no_cell(
    unfinished: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    def interrupted(source: object, target: object) -> None:
        raise stop

    with RunWriter.resume(unfinished, PLAN) as writer:
        monkeypatch.setattr(os, "rename", interrupted)
        with pytest.raises(stop):
            write_cells(writer, CELLS[2:3])
    assert sorted(path.name for path in (unfinished / "cells").iterdir()) == sorted(
        cell.cell_id for cell in CELLS[:2]
    )


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=120,
    )


def test_kill_between_writing_and_renaming_leaves_no_cell(unfinished: Path) -> None:
    code = (
        "import os, sys, pathlib, test_records as t\n"
        "writer = t.RunWriter.resume(pathlib.Path(sys.argv[1]), t.PLAN)\n"
        "os.rename = lambda *paths: os._exit(9)\n"
        "t.write_cells(writer, t.CELLS[2:3])\n"
    )
    assert run_python(code, unfinished).returncode == 9
    assert len(list((unfinished / "cells").glob(".partial-*"))) == 1
    assert len(read_run(unfinished).cells) == 2
    # The lock died with the process.
    with RunWriter.resume(unfinished, PLAN) as writer:
        assert list((unfinished / "cells").glob(".partial-*")) == []
        write_cells(writer, CELLS[2:])
        writer.finalise(status="finished")
    assert len(read_run(unfinished).cells) == 4


def test_two_writers_are_refused(unfinished: Path) -> None:
    expected = f"{unfinished}: another process is writing this run; wait for it or stop it"
    with RunWriter.resume(unfinished, PLAN):
        assert fault(lambda: RunWriter.resume(unfinished, PLAN), StorageError) == expected
        code = "import sys, pathlib, test_records as t\nt.RunWriter.resume(pathlib.Path(sys.argv[1]), t.PLAN)"
        done = run_python(code, unfinished)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == f"specnb.errors.StorageError: {expected}"
        # Reading needs no lock.
        assert len(read_run(unfinished).cells) == 2
    with RunWriter.resume(unfinished, PLAN):
        pass


def test_a_refused_resume_frees_the_lock(unfinished: Path) -> None:
    assert fault(lambda: RunWriter.resume(unfinished, make_plan(repeats=2)), PlanError)
    with RunWriter.resume(unfinished, PLAN):
        pass


@pytest.mark.parametrize("root", ["file/runs", "file"])
def test_target_that_can_not_be_made(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").touch()
    message = fault(lambda: RunWriter.create(tmp_path / root, PLAN, facts={}), StorageError)
    assert message.startswith(f"{tmp_path}/{root}/p-")
    assert message.endswith(
        " can't be written (Not a directory); choose a writable folder"
    ) or message.endswith(" can't be written (File exists); choose a writable folder")


def no_space(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir", "replace"])
def test_full_disk_keeps_finished_cells(unfinished: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with RunWriter.resume(unfinished, PLAN) as writer:
        monkeypatch.setattr(os, call, no_space)
        message = fault(lambda: write_cells(writer, CELLS[2:3]), StorageError)
        monkeypatch.undo()
        assert message == (
            f"{unfinished}/cells/{CELLS[2].cell_id}: disk full; free space and resume with --resume "
            "(finished cells are kept)"
        )
        assert len(list((unfinished / "cells").iterdir())) == 2
        write_cells(writer, CELLS[2:3])
    assert len(read_run(unfinished).cells) == 3


def test_full_disk_at_the_manifest_keeps_the_old_one(
    unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunWriter.resume(unfinished, PLAN) as writer:
        before = (unfinished / "manifest.json").read_bytes()
        monkeypatch.setattr(os, "fsync", no_space)
        message = fault(lambda: writer.finalise(status="finished"), StorageError)
        assert message.startswith(f"{unfinished}/manifest.json: disk full; free space and resume")
        splits = frame_of(schema.SPLITS, split_rows(writer.run_id))
        message = fault(lambda: writer.finalise(status="finished", splits=splits), StorageError)
        assert message.startswith(f"{unfinished}/splits.parquet: disk full; ")
    assert (unfinished / "manifest.json").read_bytes() == before
    assert sorted(path.name for path in unfinished.iterdir()) == [".lock", "cells", "logs", "manifest.json"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command; the full disk is simulated in test_full_disk_keeps_finished_cells")
    if done.returncode:
        pytest.skip("mounting is not permitted; the full disk is simulated in test_full_disk_keeps_...")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_really_fills(small_disk: Path) -> None:
    with RunWriter.create(small_disk, PLAN, facts=FACTS) as writer:
        write_cells(writer, CELLS[:1])
        tables = tables_of(CELLS[1], writer.run_id)
        noise = os.urandom(2_000_000).hex()
        tables["scrapes"] = tables["scrapes"].with_columns(
            body=pl.lit(noise) + pl.col("scrape").cast(pl.String)
        )
        message = fault(lambda: writer.write_cell(CELLS[1], tables, summary={}), StorageError)
        assert message == (
            f"{writer.path}/cells/{CELLS[1].cell_id}: disk full; free space and resume with --resume "
            "(finished cells are kept)"
        )
        assert [path.name for path in (writer.path / "cells").iterdir()] == [CELLS[0].cell_id]
        write_cells(writer, CELLS[1:])
        writer.finalise(status="finished")
    assert read_run(writer.path).requests.height == 8


def test_a_disk_that_is_read_only(small_disk: Path) -> None:
    with RunWriter.create(small_disk, PLAN, facts=FACTS) as writer:
        write_cells(writer, CELLS[:1])
        writer.finalise(status="interrupted")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    said = "can't be written (Read-only file system); choose a writable folder"
    assert fault(lambda: RunWriter.create(small_disk, PLAN, facts={}), StorageError).endswith(said)
    assert fault(lambda: RunWriter.resume(writer.path, PLAN), StorageError) == f"{writer.path}: {said}"
    assert read_run(writer.path).requests.height == 2


def test_run_is_not_made_from_a_folder_name_alone(finished: Path) -> None:
    assert isinstance(read_run(finished), Run)
