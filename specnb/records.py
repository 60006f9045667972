"""Run directories: written once, cell by cell, and read back with every claim checked.

A run directory exists from the first second. Each cell is a folder written aside and
renamed, so that whatever kills the process, finished cells survive whole; the manifest
is finalised last and lists each file's rows and sha256. Readers check version, types,
ranges, keys and invariants and raise `RecordError` naming file, column and first bad
row. Knows nothing of engines or metrics.

    RUN_DIR/manifest.json
    RUN_DIR/cells/CELL_ID/{cell.json, requests.parquet, steps.parquet, ...}
    RUN_DIR/splits.parquet      (in-process engine, at the end)
    RUN_DIR/logs/
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Self

import polars as pl

from specnb import schema
from specnb.config import Cell, Plan, plan_from_dict
from specnb.errors import PlanError, RecordError, StorageError
from specnb.provenance import file_sha256, utc_now

LABELS = ("repeat", "sampling", "concurrency", "task", "entropy_tier", "length_tier")
STATUSES = ("running", "finished", "interrupted", "failed")

_MANIFEST_TYPES: dict[str, type] = {
    "run_id": str,
    "status": str,
    "started_at": str,
    "plan_sha256": str,
    "modelled": bool,
    "plan": dict,
}
_SUMMARY_TYPES: dict[str, type] = {
    "cell_id": str,
    "arm": str,
    "entropy_tier": str,
    "concurrency": int,
    "sampling": str,
    "repeat": int,
    "files": dict,
}
_CELL_LABELS = ("cell_id", "arm", "entropy_tier", "concurrency", "sampling", "repeat")


class RunWriter:
    """Writes one run directory. Make one with `create` or `resume`; use as a context manager.

    The directory is locked while the writer lives, so that two processes can't write one run.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], lock: IO[str]) -> None:
        self.path = path
        self.manifest = manifest
        self._lock = lock
        started = datetime.fromisoformat(manifest["started_at"])
        # Not before the cells that exist, whatever happened to the wall clock since.
        ends = [float(cell.get("end_s") or 0.0) for cell in _cell_summaries(path).values()]
        self._offset_s = max(0.0, (datetime.now(UTC) - started).total_seconds(), *ends)
        self._zero_s = time.perf_counter()

    @classmethod
    def create(cls, root: Path, plan: Plan, *, facts: Mapping[str, Any]) -> Self:
        """A new run directory under `root` with status `running`.

        Parameters
        ----------
        root
            Folder that holds runs; made if it is missing.
        plan
            What will be measured; stored whole, with its digest.
        facts
            Further manifest keys (versions, host, engine, arms, workload).

        Raises
        ------
        StorageError
            The folder can't be made or written.
        """
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        run_id = f"{plan.name}-{stamp}-{plan.sha256[:8]}"
        path = Path(root) / run_id
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
            path = _new_folder(Path(root), run_id)
            (path / "cells").mkdir()
            (path / "logs").mkdir()
            lock = _lock(path)
        except OSError as error:
            raise _storage_error(path, error) from error
        manifest = {
            "schema_version": schema.SCHEMA_VERSION,
            "run_id": path.name,
            "status": "running",
            "started_at": utc_now(),
            "ended_at": None,
            "plan_sha256": plan.sha256,
            "modelled": plan.modelled,
            "plan": plan.model_dump(mode="json"),
            **facts,
        }
        return cls._opened(path, manifest, lock)

    @classmethod
    def resume(cls, path: Path, plan: Plan) -> Self:
        """Opens an unfinished run directory of the same plan; half-written cells are removed.

        Raises
        ------
        PlanError
            The plan differs from the one the run was started with, or the run is finished.
        RecordError
            The directory or its manifest is missing or corrupt.
        """
        path = Path(path)
        check_resumable(path, plan)
        try:
            lock = _lock(path)
        except OSError as error:
            raise _storage_error(path, error) from error
        try:
            # Again, now that nobody else can finish it meanwhile.
            manifest = check_resumable(path, plan)
            for leftover in (path / "cells").glob(".partial-*"):
                shutil.rmtree(leftover)
            for leftover in (path / ".manifest.json.partial", path / "splits.parquet.partial"):
                leftover.unlink(missing_ok=True)
        except OSError as error:
            lock.close()
            raise _storage_error(path, error) from error
        except BaseException:
            lock.close()
            raise
        manifest["status"] = "running"
        manifest.setdefault("resumed_at", []).append(utc_now())
        return cls._opened(path, manifest, lock)

    @classmethod
    def _opened(cls, path: Path, manifest: dict[str, Any], lock: IO[str]) -> Self:
        try:
            writer = cls(path, manifest, lock)
            writer._write_manifest()
        except BaseException:
            lock.close()
            raise
        return writer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.close()

    @property
    def run_id(self) -> str:
        """The run's id, which is also its folder's name at the time of writing."""
        return str(self.manifest["run_id"])

    def clock(self) -> float:
        """Seconds since the run began; monotonic within one process, continued on resuming."""
        return self._offset_s + time.perf_counter() - self._zero_s

    def finished_cells(self) -> dict[str, dict[str, Any]]:
        """Summary (`cell.json`) of every finished cell by cell id."""
        return _cell_summaries(self.path)

    def write_cell(
        self, cell: Cell, tables: Mapping[str, pl.DataFrame], *, summary: Mapping[str, Any]
    ) -> None:
        """Writes one finished cell: aside, flushed to disk, then renamed.

        Raises
        ------
        RecordError
            A frame breaks the schema (an engine's fault, found before it is on disk).
        StorageError
            Disk full or not writable; cells finished before are untouched.
        """
        final = self.path / "cells" / cell.cell_id
        aside = self.path / "cells" / f".partial-{cell.cell_id}-{os.getpid()}"
        content = {
            "cell_id": cell.cell_id,
            "arm": cell.arm.name,
            "entropy_tier": cell.tier,
            "concurrency": cell.concurrency,
            "sampling": cell.sampling.name,
            "repeat": cell.repeat,
            **summary,
            "files": {},
        }
        labels = _labels(self.run_id, content)
        for name, table in schema.TABLES.items():
            if table.required and name not in tables:
                raise RecordError(f"{cell.cell_id}: the engine gave no table '{name}'")
        frames = {}
        for name, frame in tables.items():
            if name not in schema.CELL_TABLES:
                raise RecordError(
                    f"{cell.cell_id}: the engine gave a table '{name}', which no schema declares"
                )
            place = f"{cell.cell_id}/{name}"
            extra = [column for column in frame.columns if column not in schema.TABLES[name].names]
            if extra:
                raise RecordError(f"{place}: column '{extra[0]}' is not declared in the schema")
            frames[name] = _checked(frame, schema.TABLES[name], place, labels)
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            for name, frame in frames.items():
                target = aside / f"{name}.parquet"
                _write_parquet(frame, target)
                content["files"][name] = {"rows": frame.height, "sha256": file_sha256(target)}
            _write_json(aside / "cell.json", content)
            _flush(aside)
            os.rename(aside, final)
            _flush(final.parent)
        except OSError as error:
            raise _storage_error(final, error) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def finalise(self, *, status: str, splits: pl.DataFrame | None = None) -> None:
        """Closes the run: writes `splits`, then the manifest with every cell and its files.

        `status` is `finished`, `interrupted` or `failed`; only a finished run can't be resumed.
        """
        if status not in STATUSES[1:]:
            raise ValueError(f"status is {status!r}; use {', '.join(STATUSES[1:])}")
        if splits is not None:
            target = self.path / "splits.parquet"
            partial = self.path / "splits.parquet.partial"
            splits = _checked(splits, schema.SPLITS, "splits", {"run_id": self.run_id})
            try:
                _write_parquet(splits, partial)
                os.replace(partial, target)
            except OSError as error:
                partial.unlink(missing_ok=True)
                raise _storage_error(target, error) from error
            self.manifest["splits"] = {"rows": splits.height, "sha256": file_sha256(target)}
        self.manifest["status"] = status
        self.manifest["ended_at"] = utc_now()
        order = {cell_id: position for position, cell_id in enumerate(self.manifest.get("cell_order", []))}
        cells = self.finished_cells()
        self.manifest["cells"] = [
            cells[key] for key in sorted(cells, key=lambda key: (order.get(key, 1 << 30), key))
        ]
        self._write_manifest()

    def _write_manifest(self) -> None:
        try:
            _write_json(self.path / "manifest.json", self.manifest)
        except OSError as error:
            raise _storage_error(self.path / "manifest.json", error) from error


class Run:
    """A run directory opened for reading. Tables load on first use, checked and cached."""

    def __init__(self, path: Path, manifest: dict[str, Any], cells: tuple[dict[str, Any], ...]) -> None:
        self.path = path
        self.manifest = manifest
        self.cells = cells
        self._tables: dict[str, pl.DataFrame] = {}

    def __repr__(self) -> str:
        return f"Run({self.run_id!r}, {self.status}, {len(self.cells)} cells)"

    @property
    def run_id(self) -> str:
        """The run's id."""
        return str(self.manifest["run_id"])

    @property
    def status(self) -> str:
        """`finished`, `interrupted`, `failed` or `running` (unfinished, or killed)."""
        return str(self.manifest["status"])

    @property
    def modelled(self) -> bool:
        """Whether weights or acceptance were synthetic; every report of such a run is watermarked."""
        return bool(self.manifest["modelled"])

    @cached_property
    def plan(self) -> Plan:
        """The plan, from the manifest."""
        return plan_from_dict(self.manifest["plan"], source=f"{self.path / 'manifest.json'}: plan")

    def has(self, table: str) -> bool:
        """Whether any cell holds the table (`splits`: whether the file exists)."""
        if table == "splits":
            return (self.path / "splits.parquet").exists()
        return any(table in cell["files"] for cell in self.cells)

    def table(self, name: str) -> pl.DataFrame:
        """One table over all finished cells, in measuring order; empty where the engine can't fill it.

        Raises
        ------
        RecordError
            A file is missing or corrupt, a column is missing, of the wrong type, out of
            range, null or NaN where it may not be, or a key is not unique.
        """
        if name not in self._tables:
            self._tables[name] = self._load(schema.TABLES[name])
        return self._tables[name]

    @property
    def requests(self) -> pl.DataFrame:
        """One row a request (`schema.REQUESTS`)."""
        return self.table("requests")

    @property
    def steps(self) -> pl.DataFrame:
        """One row a target forward of a request after prefill (`schema.STEPS`)."""
        return self.table("steps")

    def labelled(self, name: str, *, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """A per-request table with the request's labels joined.

        Adds repeat, sampling, concurrency, task, entropy_tier and length_tier (those it lacks).

        Parameters
        ----------
        name
            A table that has a request_id.
        columns
            Columns wanted, of the table or of `requests`; the table's and all labels if None. Naming
            few saves memory.

        Raises
        ------
        RecordError
            A row's request is not in `requests`.
        ValueError
            The table has no request_id.
        """
        frame = self.table(name)
        if "request_id" not in frame.columns:
            raise ValueError(f"table {name} has no request_id, so requests' labels can't be joined")
        known = self.requests["request_id"]
        strangers = frame.with_row_index("row").filter(~pl.col("request_id").is_in(known.implode()))
        if not strangers.is_empty():
            first = strangers.row(0, named=True)
            raise RecordError(
                f"{self.path}: {name}: column 'request_id' is not in requests: "
                f"row {first['row']}, value {first['request_id']!r}"
            )
        if columns is None:
            columns = [*frame.columns, *(label for label in LABELS if label not in frame.columns)]
        own = [name for name in columns if name in frame.columns and name != "request_id"]
        labels = [name for name in columns if name not in frame.columns]
        joined = frame.select("request_id", *own).join(
            self.requests.select("request_id", *labels), on="request_id", how="left", maintain_order="left"
        )
        return joined.select(columns)

    def _load(self, table: schema.Table) -> pl.DataFrame:
        if table.name == "splits":
            path = self.path / "splits.parquet"
            if not path.exists():
                if self.manifest.get("splits") is not None:
                    raise RecordError(f"{path}: file is missing; the run directory is incomplete")
                return schema.empty(table)
            return _read_table(path, table, {"run_id": self.run_id})
        frames = []
        paths = []
        for cell in self.cells:
            folder = self.path / "cells" / cell["cell_id"]
            if table.name not in cell["files"]:
                if table.required:
                    raise RecordError(f"{folder}: {table.name}.parquet is not listed in cell.json")
                continue
            paths.append(folder / f"{table.name}.parquet")
            frames.append(_read_table(paths[-1], table, _labels(self.run_id, cell)))
        if not frames:
            return schema.empty(table)
        frame = pl.concat(frames)
        # Keys are unique in each file, so a repeated one has its first column in two files.
        first_columns = pl.concat([part.select(pl.col(table.key[0]).unique()) for part in frames])
        row = _first_repeated(frame, table) if first_columns.is_duplicated().any() else None
        if row is not None:
            number = 0
            while row >= frames[number].height:
                row -= frames[number].height
                number += 1
            raise RecordError(
                f"{paths[number]}: key is not unique in the run: row {row}, "
                f"{_key(frames[number], table, row)}"
            )
        return frame


def check_resumable(path: Path, plan: Plan) -> dict[str, Any]:
    """The manifest of a run directory that `plan` may continue; touches nothing.

    Raises
    ------
    PlanError
        The plan differs from the one the run was started with, or the run is finished.
    RecordError
        The directory, its manifest or a finished cell is missing or corrupt.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if manifest["plan_sha256"] != plan.sha256:
        remarks = {"price", "published"}
        old = {key: value for key, value in manifest["plan"].items() if key not in remarks}
        changed = _differences(old, plan.model_dump(mode="json", exclude=remarks))
        shown = ", ".join(changed[:4]) or "the version of specnb"
        raise PlanError(
            f"{path}: was started with another plan (differs in: {shown}); "
            "resume with the plan in its manifest.json or start a new run"
        )
    if manifest["status"] == "finished":
        raise PlanError(f"{path}: this run is finished; nothing to resume")
    _cell_summaries(path)
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """A run directory's manifest, version checked.

    Raises
    ------
    RecordError
        No such directory, no manifest, not JSON, or another schema version.
    """
    path = Path(path)
    file = path / "manifest.json"
    if not path.is_dir():
        raise RecordError(f"{path}: no such run directory; give a folder that holds manifest.json")
    content = _read_json(file)
    for key in ("schema_version", *_MANIFEST_TYPES):
        if key not in content:
            raise RecordError(
                f"{file}: key '{key}' is missing; the manifest was edited or is of another tool"
            )
    if content["schema_version"] != schema.SCHEMA_VERSION:
        raise RecordError(
            f"{file}: schema_version {content['schema_version']!r}, this specnb reads "
            f"{schema.SCHEMA_VERSION}; use the specnb version named in it"
        )
    _check_types(file, content, _MANIFEST_TYPES)
    if content["status"] not in STATUSES:
        raise RecordError(
            f"{file}: status is {content['status']!r}, not one of {', '.join(STATUSES)}; it was edited"
        )
    try:
        if datetime.fromisoformat(content["started_at"]).tzinfo is None:
            raise ValueError
    except ValueError as error:
        raise RecordError(
            f"{file}: started_at {content['started_at']!r} is no time with a zone; it was edited"
        ) from error
    listed = content.get("cells", [])
    if not isinstance(listed, list) or not all(
        isinstance(cell, dict) and isinstance(cell.get("cell_id"), str) for cell in listed
    ):
        raise RecordError(f"{file}: 'cells' is not a list of cells; it was edited")
    return content


def read_run(path: Path | str) -> Run:
    """Opens a run directory; tables are read and checked on first use.

    Parameters
    ----------
    path
        Folder that holds `manifest.json`. Unfinished runs open too: `Run.status` says so and
        `Run.cells` holds what was finished.

    Raises
    ------
    RecordError
        Missing or corrupt manifest or cell; a finished run that lacks a cell it lists.
    """
    path = Path(path)
    manifest = read_manifest(path)
    found = _cell_summaries(path)
    if manifest["status"] == "finished":
        for cell in manifest.get("cells", []):
            if cell["cell_id"] not in found:
                raise RecordError(f"{path / 'cells' / cell['cell_id']}: listed in the manifest but missing")
    order = {cell_id: position for position, cell_id in enumerate(manifest.get("cell_order", []))}
    cells = tuple(found[key] for key in sorted(found, key=lambda key: (order.get(key, 1 << 30), key)))
    if not cells:
        raise RecordError(f"{path}: no cell is finished yet; resume the run with --resume")
    return Run(path, manifest, cells)


def _cell_summaries(path: Path) -> dict[str, dict[str, Any]]:
    summaries = {}
    for folder in sorted((path / "cells").glob("[!.]*")):
        file = folder / "cell.json"
        summary = _read_json(file)
        for key in _SUMMARY_TYPES:
            if key not in summary:
                raise RecordError(f"{file}: key '{key}' is missing; remove the cell's folder and resume")
        _check_types(file, summary, _SUMMARY_TYPES)
        if summary["cell_id"] != folder.name:
            raise RecordError(
                f"{file}: cell_id {summary['cell_id']!r} is not the folder's name; it was copied or renamed"
            )
        summaries[folder.name] = summary
    return summaries


def _check_types(file: Path, content: Mapping[str, Any], types: Mapping[str, type]) -> None:
    names = {str: "text", bool: "true or false", dict: "an object", int: "a whole number"}
    for key, kind in types.items():
        value = content[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise RecordError(f"{file}: '{key}' is {value!r}, not {names[kind]}; it was edited")


def _labels(run_id: str, cell: Mapping[str, Any]) -> dict[str, Any]:
    """What every row of a cell's tables must say, where it has the column."""
    return {"run_id": run_id, **{name: cell[name] for name in _CELL_LABELS}}


def _read_table(path: Path, table: schema.Table, labels: Mapping[str, Any]) -> pl.DataFrame:
    if not path.exists():
        raise RecordError(f"{path}: file is missing; the run directory is incomplete")
    try:
        frame = pl.read_parquet(path.read_bytes(), hive_partitioning=False)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        # Polars panics on some damaged files, and a panic is no ordinary exception.
        raise RecordError(
            f"{path}: not a readable Parquet file ({_one_line(error)}); it is corrupt"
        ) from error
    return _checked(frame, table, str(path), labels)


def _checked(frame: pl.DataFrame, table: schema.Table, place: str, labels: Mapping[str, Any]) -> pl.DataFrame:
    """The declared columns of a frame whose types, values, labels and keys are right."""
    for column in table.columns:
        if column.name not in frame.columns:
            if column.optional:
                frame = frame.with_columns(pl.lit(None, dtype=column.dtype).alias(column.name))
                continue
            raise RecordError(f"{place}: column '{column.name}' is missing")
        found = frame.schema[column.name]
        if found != column.dtype:
            raise RecordError(f"{place}: column '{column.name}' is {found}, expected {column.dtype}")
    frame = frame.select(table.names)
    _check_table(frame, table, place, labels)
    row = _first_repeated(frame, table)
    if row is not None:
        raise RecordError(f"{place}: key is not unique: row {row}, {_key(frame, table, row)}")
    return frame


def _first_repeated(frame: pl.DataFrame, table: schema.Table) -> int | None:
    """First row whose key an earlier row has; None if keys are unique."""
    repeated = ~frame.select(pl.struct(table.key).is_first_distinct()).to_series()
    return int(repeated.arg_max() or 0) if repeated.any() else None


def _key(frame: pl.DataFrame, table: schema.Table, row: int) -> str:
    values = frame.row(row, named=True)
    return ", ".join(f"{name} {_short(values[name])}" for name in table.key)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_table(frame: pl.DataFrame, table: schema.Table, place: str, labels: Mapping[str, Any]) -> None:
    """Raises RecordError on the first value that breaks a column's declaration or a row's invariant."""
    rules: list[tuple[str, str, pl.Expr]] = []
    for column in table.columns:
        value = pl.col(column.name)
        if not column.nullable:
            rules.append((column.name, "is null", value.is_null()))
        if column.dtype == pl.Float64():
            rules.append((column.name, "is NaN or infinite; unknown is null", ~value.is_finite()))
        if column.allowed is not None:
            rules.append(
                (column.name, f"is not one of {', '.join(column.allowed)}", ~value.is_in(column.allowed))
            )
        if column.minimum is not None:
            rules.append((column.name, f"is below {column.minimum:g}", value < column.minimum))
        if column.maximum is not None:
            rules.append((column.name, f"is above {column.maximum:g}", value > column.maximum))
    rules += [
        (name, f"is not {value!r}, as this cell's rows say", pl.col(name) != value)
        for name, value in labels.items()
        if name in table.names
    ]
    rules += _ROW_INVARIANTS.get(table.name, [])
    verdicts = frame.select(
        bad.fill_null(False).any().alias(str(number)) for number, (_, _, bad) in enumerate(rules)
    ).row(0)
    for (name, problem, bad), broken in zip(rules, verdicts, strict=True):
        if broken:
            row = frame.select(bad.fill_null(False).arg_max()).item()
            value = frame[name][row]
            shown = _short(value.to_list() if isinstance(value, pl.Series) else value)
            raise RecordError(f"{place}: column '{name}' {problem}: row {row}, value {shown}")


_ROW_INVARIANTS: dict[str, list[tuple[str, str, pl.Expr]]] = {
    "steps": [
        (
            "num_accepted_tokens",
            "exceeds num_draft_tokens",
            pl.col("num_accepted_tokens") > pl.col("num_draft_tokens"),
        ),
        (
            "num_emitted_tokens",
            "exceeds num_accepted_tokens + 1",
            pl.col("num_emitted_tokens") > pl.col("num_accepted_tokens") + 1,
        ),
    ],
    "requests": [
        (
            "finish_reason",
            "is null though status is ok",
            (pl.col("status") == "ok") & pl.col("finish_reason").is_null(),
        ),
        ("error", "is set though status is ok", (pl.col("status") == "ok") & pl.col("error").is_not_null()),
        (
            "error_kind",
            "is set though status is ok",
            (pl.col("status") == "ok") & pl.col("error_kind").is_not_null(),
        ),
        (
            "error_kind",
            "is null though status is not ok",
            (pl.col("status") != "ok") & pl.col("error_kind").is_null(),
        ),
        (
            "num_output_tokens",
            "is 0 though status is ok",
            (pl.col("status") == "ok") & (pl.col("num_output_tokens") == 0),
        ),
        ("first_token_s", "is before sent_s", pl.col("first_token_s") < pl.col("sent_s")),
        ("first_answer_s", "is before first_token_s", pl.col("first_answer_s") < pl.col("first_token_s")),
        ("last_token_s", "is before first_token_s", pl.col("last_token_s") < pl.col("first_token_s")),
        ("last_token_s", "is before first_answer_s", pl.col("last_token_s") < pl.col("first_answer_s")),
        (
            "num_cached_tokens",
            "exceeds num_prompt_tokens",
            pl.col("num_cached_tokens") > pl.col("num_prompt_tokens"),
        ),
        (
            "num_first_chunk_tokens",
            "exceeds num_output_tokens",
            pl.col("num_first_chunk_tokens") > pl.col("num_output_tokens"),
        ),
        (
            "output_token_ids",
            "holds a null",
            pl.col("output_token_ids").list.drop_nulls().list.len() < pl.col("output_token_ids").list.len(),
        ),
        (
            "output_token_ids",
            "has another length than num_output_tokens",
            pl.col("output_token_ids").list.len() != pl.col("num_output_tokens"),
        ),
    ],
    "positions": [
        ("accepted", "is true though the position was not reached", pl.col("accepted") & ~pl.col("reached")),
        (
            "target_rank",
            "is set though the position was not reached",
            ~pl.col("reached") & pl.col("target_rank").is_not_null(),
        ),
        (
            "answer_rank",
            "is set though the answer holds no token there",
            ~pl.col("in_answer").fill_null(False) & pl.col("answer_rank").is_not_null(),
        ),
        (
            "target_prob",
            "is set though the position was not reached",
            ~pl.col("reached") & pl.col("target_prob").is_not_null(),
        ),
    ],
    "tokens": [
        ("cdf_high", "is below cdf_low", pl.col("cdf_high") < pl.col("cdf_low")),
        (
            "cdf_high",
            "is known where cdf_low is not, or the reverse",
            pl.col("cdf_high").is_null() != pl.col("cdf_low").is_null(),
        ),
    ],
}


def _new_folder(root: Path, name: str) -> Path:
    """A folder that did not exist before, even if another process asks for the same name now."""
    number = 1
    while True:
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def _lock(path: Path) -> IO[str]:
    stream = (path / ".lock").open("w")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.close()
        raise StorageError(f"{path}: another process is writing this run; wait for it or stop it") from error
    except OSError:
        stream.close()
        raise
    return stream


def _read_json(path: Path) -> dict[str, Any]:
    def refuse(literal: str) -> None:
        raise ValueError(f"{literal} is not JSON")

    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except OSError as error:
        raise RecordError(
            f"{path}: can't be read ({error.strerror}); the run directory is incomplete"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not valid JSON ({_one_line(error)}); the file is corrupt") from error
    if not isinstance(content, dict):
        raise RecordError(f"{path}: not a JSON object; the file is corrupt")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        _flush(partial)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _write_parquet(frame: pl.DataFrame, path: Path) -> None:
    """Writes and flushes one file. Polars gets no path: it takes UTF-8 alone and hides the disk's error."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="zstd", statistics=True)
    path.write_bytes(buffer.getbuffer())
    _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storage_error(path: Path, error: OSError) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"{path}: disk full; free space and resume with --resume (finished cells are kept)"
        )
    return StorageError(f"{path}: can't be written ({error.strerror or error}); choose a writable folder")


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            found
            for key in sorted({*old, *new})
            for found in _differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
        ]
    return [] if old == new else [prefix]
