"""The schema's own promises: every column by value, names that carry units, empty frames."""

from __future__ import annotations

import polars as pl
import pytest

from specnb import schema
from specnb.schema import TABLES, Column, Table

INT, REAL, TEXT, FLAG = pl.Int64(), pl.Float64(), pl.String(), pl.Boolean()
NULL = "null allowed"
TIERS = ("low", "medium", "high", "unlabelled")
LENGTHS = ("short", "medium", "long", "unlabelled")
MASS = 1.000001

# table -> key, then column -> type, smallest, largest, closed set, null allowed; in file order
DECLARED: dict[str, tuple[tuple[str, ...], dict[str, tuple[object, ...]]]] = {
    "requests": (
        ("request_id",),
        {
            "run_id": (TEXT,),
            "arm": (TEXT,),
            "cell_id": (TEXT,),
            "repeat": (INT, 0),
            "sampling": (TEXT,),
            "concurrency": (INT, 1),
            "request_id": (TEXT,),
            "prompt_id": (TEXT,),
            "prompt_sha256": (TEXT,),
            "task": (TEXT,),
            "entropy_tier": (TEXT, None, None, TIERS),
            "length_tier": (TEXT, None, None, LENGTHS),
            "scheduled_s": (REAL, 0),
            "sent_s": (REAL, 0, None, None, NULL),
            "first_token_s": (REAL, 0, None, None, NULL),
            "first_answer_s": (REAL, 0, None, None, NULL),
            "last_token_s": (REAL, 0, None, None, NULL),
            "num_prompt_tokens": (INT, 0, None, None, NULL),
            "num_cached_tokens": (INT, 0, None, None, NULL),
            "num_output_tokens": (INT, 0, None, None, NULL),
            "num_first_chunk_tokens": (INT, 0, None, None, NULL),
            "num_chunks": (INT, 0, None, None, NULL),
            "finish_reason": (TEXT, None, None, None, NULL),
            "status": (TEXT, None, None, ("ok", "error", "cancelled", "timeout")),
            "error_kind": (TEXT, None, None, None, NULL),
            "error": (TEXT, None, None, None, NULL),
            "output_text": (TEXT, None, None, None, NULL),
            "output_token_ids": (pl.List(pl.Int64()), None, None, None, NULL),
            "grader_score": (REAL, 0, 1, None, NULL),
            "mean_token_entropy_nats": (REAL, 0, None, None, NULL),
        },
    ),
    "chunks": (
        ("request_id", "chunk"),
        {
            "run_id": (TEXT,),
            "request_id": (TEXT,),
            "chunk": (INT, 0),
            "received_s": (REAL, 0),
            "num_tokens": (INT, 1, None, None, NULL),
        },
    ),
    "steps": (
        ("request_id", "step"),
        {
            "run_id": (TEXT,),
            "arm": (TEXT,),
            "cell_id": (TEXT,),
            "request_id": (TEXT,),
            "prompt_id": (TEXT,),
            "step": (INT, 0),
            "num_draft_tokens": (INT, 0),
            "num_accepted_tokens": (INT, 0),
            "num_emitted_tokens": (INT, 0),
            "engine_step": (INT, 0, None, None, NULL),
        },
    ),
    "engine_steps": (
        ("cell_id", "engine_step"),
        {
            "run_id": (TEXT,),
            "arm": (TEXT,),
            "cell_id": (TEXT,),
            "engine_step": (INT, 0),
            "batch_size": (INT, 1),
            "num_query_tokens": (INT, 1),
            "prefill_s": (REAL, 0),
            "draft_s": (REAL, 0),
            "verify_s": (REAL, 0),
            "end_s": (REAL, 0),
        },
    ),
    "positions": (
        ("request_id", "step", "position"),
        {
            "run_id": (TEXT,),
            "arm": (TEXT,),
            "cell_id": (TEXT,),
            "request_id": (TEXT,),
            "prompt_id": (TEXT,),
            "step": (INT, 0),
            "position": (INT, 0),
            "reached": (FLAG,),
            "accepted": (FLAG,),
            "target_rank": (INT, 0, None, None, NULL),
            "draft_prob": (REAL, 0, MASS, None, NULL),
            "target_prob": (REAL, 0, MASS, None, NULL),
            "in_answer": (FLAG, None, None, None, NULL),
            "answer_rank": (INT, 0, None, None, NULL),
        },
    ),
    "tokens": (
        ("request_id", "index"),
        {
            "run_id": (TEXT,),
            "arm": (TEXT,),
            "cell_id": (TEXT,),
            "request_id": (TEXT,),
            "prompt_id": (TEXT,),
            "index": (INT, 0),
            "token_id": (INT, 0),
            "origin": (TEXT, None, None, ("baseline", "accepted", "recovered", "bonus")),
            "logprob": (REAL, None, 1e-6),
            "entropy_nats": (REAL, 0),
            "top1_top2_margin": (REAL, 0),
            "cdf_low": (REAL, 0, MASS, None, NULL),
            "cdf_high": (REAL, 0, MASS, None, NULL),
        },
    ),
    "splits": (
        ("sampling", "concurrency", "prompt_id", "arm", "repeat", "reference_arm", "reference_repeat"),
        {
            "run_id": (TEXT,),
            "sampling": (TEXT,),
            "concurrency": (INT, 1),
            "prompt_id": (TEXT,),
            "arm": (TEXT,),
            "repeat": (INT, 0),
            "reference_arm": (TEXT,),
            "reference_repeat": (INT, 0),
            "index": (INT, 0),
            "token_id": (INT, 0, None, None, NULL),
            "reference_token_id": (INT, 0, None, None, NULL),
            "margin_nats": (REAL, None, None, None, NULL),
            "margin_fp64_nats": (REAL, None, None, None, NULL),
        },
    ),
    "acceptance": (
        ("request_id",),
        {
            "run_id": (TEXT,),
            "arm": (TEXT,),
            "cell_id": (TEXT,),
            "request_id": (TEXT,),
            "prompt_id": (TEXT,),
            "source": (TEXT, None, None, ("vllm", "sglang", "llamacpp")),
            "num_drafts": (INT, 0, None, None, NULL),
            "num_draft_tokens": (INT, 0, None, None, NULL),
            "num_accepted_tokens": (INT, 0, None, None, NULL),
            "num_speculative_tokens": (INT, 1, None, None, NULL),
            "acceptance_histogram": (pl.List(pl.Int64()), None, None, None, NULL),
        },
    ),
    "log_lines": (
        ("cell_id", "line"),
        {"run_id": (TEXT,), "arm": (TEXT,), "cell_id": (TEXT,), "line": (INT, 0), "text": (TEXT,)},
    ),
    "scrapes": (
        ("cell_id", "scrape"),
        {
            "run_id": (TEXT,),
            "arm": (TEXT,),
            "cell_id": (TEXT,),
            "scrape": (INT, 0),
            "scraped_s": (REAL, 0),
            "body": (TEXT,),
        },
    ),
    "telemetry": (
        ("cell_id", "sampled_s", "device"),
        {
            "run_id": (TEXT,),
            "arm": (TEXT,),
            "cell_id": (TEXT,),
            "sampled_s": (REAL, 0),
            "device": (TEXT,),
            "memory_used_bytes": (INT, 0, None, None, NULL),
            "utilisation": (REAL, 0, 1, None, NULL),
            "power_watts": (REAL, 0, None, None, NULL),
        },
    ),
}
EVERY_COLUMN = [
    pytest.param(table, column, id=f"{table.name}.{column.name}")
    for table in TABLES.values()
    for column in table.columns
]


def test_version_tables_and_required_files() -> None:
    assert schema.SCHEMA_VERSION == 1
    assert list(TABLES) == list(DECLARED)
    assert [table.name for table in TABLES.values() if table.required] == ["requests", "steps"]
    assert tuple(name for name in DECLARED if name != "splits") == schema.CELL_TABLES


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_columns_in_file_order_and_keys(table: Table) -> None:
    key, columns = DECLARED[table.name]
    assert table.names == tuple(columns)
    assert table.key == key
    assert table.grain.startswith("one row ")


@pytest.mark.parametrize(("table", "column"), EVERY_COLUMN)
def test_column_by_value(table: Table, column: Column) -> None:
    given = (*DECLARED[table.name][1][column.name], *[None] * 5)[:5]
    nullable = column.nullable and NULL
    found = (column.dtype, column.minimum, column.maximum, column.allowed, nullable or None)
    assert found == given
    assert column.text


@pytest.mark.parametrize(("table", "column"), EVERY_COLUMN)
def test_names_carry_units(table: Table, column: Column) -> None:
    rates = {"grader_score", "draft_prob", "target_prob", "cdf_low", "cdf_high", "utilisation"}
    logs = {"logprob", "top1_top2_margin", "power_watts"}  # the unit is in the text or the name
    if column.dtype == REAL:
        assert column.name.endswith(("_s", "_nats")) or column.name in rates | logs
    if column.name in rates:
        assert column.maximum in (1, MASS)
    if column.name.startswith("num_"):
        assert column.dtype == INT


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_key_columns_exist_and_are_never_null(table: Table) -> None:
    columns = {column.name: column for column in table.columns}
    assert not any(columns[name].nullable for name in table.key)


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_empty_frame_has_the_declared_types(table: Table) -> None:
    frame = schema.empty(table)
    assert frame.height == 0
    assert frame.schema == table.polars_schema
    assert list(frame.schema.items()) == [(column.name, column.dtype) for column in table.columns]


def test_columns_of_one_name_have_one_type() -> None:
    types: dict[str, pl.DataType] = {}
    for table in TABLES.values():
        for column in table.columns:
            assert types.setdefault(column.name, column.dtype) == column.dtype
