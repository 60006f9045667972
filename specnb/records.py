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
import json
import os
import shutil
import time
from collections.abc import Mapping
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


class RunWriter:
    """Writes one run directory. Make one with `create` or `resume`; use as a context manager.

    The directory is locked while the writer lives, so that two processes can't write one run.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], lock: IO[str]) -> None:
        self.path = path
        self.manifest = manifest
        self._lock = lock
        started = datetime.fromisoformat(manifest["started_at"])
        self._offset_s = max(0.0, (datetime.now(UTC) - started).total_seconds())
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
            number = 1
            while path.exists():
                number += 1
                path = Path(root) / f"{run_id}-{number}"
            (path / "cells").mkdir(parents=True)
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
        writer = cls(path, manifest, lock)
        writer._write_manifest()
        return writer

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
        manifest = read_manifest(path)
        if manifest["plan_sha256"] != plan.sha256:
            changed = ", ".join(_differences(manifest["plan"], plan.model_dump(mode="json"))[:4])
            raise PlanError(
                f"{path}: was started with another plan (differs in: {changed or 'engine version'}); "
                "resume with the plan in its manifest.json or start a new run"
            )
        if manifest["status"] == "finished":
            raise PlanError(f"{path}: this run is finished; nothing to resume")
        try:
            lock = _lock(path)
            for leftover in (path / "cells").glob(".partial-*"):
                shutil.rmtree(leftover)
        except OSError as error:
            raise _storage_error(path, error) from error
        manifest["status"] = "running"
        manifest.setdefault("resumed_at", []).append(utc_now())
        writer = cls(path, manifest, lock)
        writer._write_manifest()
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
        files: dict[str, dict[str, Any]] = {}
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            for name, frame in tables.items():
                table = schema.TABLES[name]
                frame = frame.select(table.names)
                _check_table(frame, table, f"{cell.cell_id}/{name}")
                target = aside / f"{name}.parquet"
                frame.write_parquet(target, compression="zstd", statistics=True)
                _flush(target)
                files[name] = {"rows": frame.height, "sha256": file_sha256(target)}
            content = {
                "cell_id": cell.cell_id,
                "arm": cell.arm.name,
                "entropy_tier": cell.tier,
                "concurrency": cell.concurrency,
                "sampling": cell.sampling.name,
                "repeat": cell.repeat,
                **summary,
                "files": files,
            }
            _write_json(aside / "cell.json", content)
            _flush(aside)
            os.rename(aside, final)
            _flush(final.parent)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise _storage_error(final, error) from error
        except pl.exceptions.ComputeError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise StorageError(
                f"{final}: can't be written ({_one_line(error)}); finished cells are kept"
            ) from error

    def finalise(self, *, status: str, splits: pl.DataFrame | None = None) -> None:
        """Closes the run: writes `splits`, then the manifest with every cell and its files.

        `status` is `finished`, `interrupted` or `failed`; only a finished run can't be resumed.
        """
        if splits is not None:
            _check_table(splits, schema.SPLITS, "splits")
            target = self.path / "splits.parquet"
            try:
                splits.select(schema.SPLITS.names).write_parquet(f"{target}.partial")
                _flush(Path(f"{target}.partial"))
                os.replace(f"{target}.partial", target)
            except OSError as error:
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

    def labelled(self, name: str) -> pl.DataFrame:
        """A per-request table with the request's labels joined.

        Adds repeat, sampling, concurrency, task, entropy_tier and length_tier (those it lacks).
        """
        frame = self.table(name)
        extra = [label for label in LABELS if label not in frame.columns]
        return frame.join(
            self.requests.select("request_id", *extra), on="request_id", how="left", maintain_order="left"
        )

    def _load(self, table: schema.Table) -> pl.DataFrame:
        if table.name == "splits":
            path = self.path / "splits.parquet"
            if not path.exists():
                return schema.empty(table)
            return _read_table(path, table)
        frames = []
        for cell in self.cells:
            if table.name not in cell["files"]:
                if table.required:
                    raise RecordError(
                        f"{self.path / 'cells' / cell['cell_id']}: {table.name}.parquet is not listed"
                    )
                continue
            frames.append(_read_table(self.path / "cells" / cell["cell_id"] / f"{table.name}.parquet", table))
        if not frames:
            return schema.empty(table)
        frame = pl.concat(frames)
        duplicated = frame.select(
            pl.struct(table.key).is_duplicated().arg_max().alias("row"), table_dup(table)
        )
        if duplicated["any"][0]:
            row = frame.row(duplicated["row"][0], named=True)
            key = ", ".join(f"{name}={row[name]}" for name in table.key)
            raise RecordError(
                f"{self.path}: {table.name}: key is not unique ({key}); the run directory was edited"
            )
        return frame


def table_dup(table: schema.Table) -> pl.Expr:
    """Whether any key of `table` occurs twice, as a one-row expression named `any`."""
    return pl.struct(table.key).is_duplicated().any().alias("any")


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
    for key in ("schema_version", "run_id", "status", "plan", "plan_sha256", "modelled", "started_at"):
        if key not in content:
            raise RecordError(
                f"{file}: key '{key}' is missing; the manifest was edited or is of another tool"
            )
    if content["schema_version"] != schema.SCHEMA_VERSION:
        raise RecordError(
            f"{file}: schema_version {content['schema_version']}, this specnb reads {schema.SCHEMA_VERSION}; "
            "use the specnb version named in it"
        )
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
        summary = _read_json(folder / "cell.json")
        for key in ("cell_id", "files"):
            if key not in summary:
                raise RecordError(
                    f"{folder / 'cell.json'}: key '{key}' is missing; remove the cell and resume"
                )
        summaries[str(summary["cell_id"])] = summary
    return summaries


def _read_table(path: Path, table: schema.Table) -> pl.DataFrame:
    if not path.exists():
        raise RecordError(f"{path}: file is missing; the run directory is incomplete")
    try:
        frame = pl.read_parquet(path, hive_partitioning=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise RecordError(
            f"{path}: not a readable Parquet file ({_one_line(error)}); it is corrupt"
        ) from error
    for column in table.columns:
        if column.name not in frame.columns:
            raise RecordError(f"{path}: column '{column.name}' is missing")
        found = frame.schema[column.name]
        if found != column.dtype:
            raise RecordError(f"{path}: column '{column.name}' is {found}, expected {column.dtype}")
    frame = frame.select(table.names)
    _check_table(frame, table, str(path))
    return frame


def _check_table(frame: pl.DataFrame, table: schema.Table, place: str) -> None:
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
    rules += _ROW_INVARIANTS.get(table.name, [])
    verdicts = frame.select(
        bad.fill_null(False).any().alias(str(number)) for number, (_, _, bad) in enumerate(rules)
    ).row(0)
    for (name, problem, bad), broken in zip(rules, verdicts, strict=True):
        if broken:
            row = frame.select(bad.fill_null(False).arg_max()).item()
            value = frame[name][row]
            raise RecordError(f"{place}: column '{name}' {problem}: row {row}, value {value!r}")


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
            "is null though status is not ok",
            (pl.col("status") != "ok") & pl.col("error_kind").is_null(),
        ),
        (
            "num_output_tokens",
            "is 0 though status is ok",
            (pl.col("status") == "ok") & (pl.col("num_output_tokens") == 0),
        ),
        ("first_token_s", "is before sent_s", pl.col("first_token_s") < pl.col("sent_s")),
        ("last_token_s", "is before first_token_s", pl.col("last_token_s") < pl.col("first_token_s")),
        (
            "output_token_ids",
            "has another length than num_output_tokens",
            pl.col("output_token_ids").list.len() != pl.col("num_output_tokens"),
        ),
    ],
    "positions": [
        ("accepted", "is true though the position was not reached", pl.col("accepted") & ~pl.col("reached")),
    ],
    "tokens": [
        ("cdf_high", "is below cdf_low", pl.col("cdf_high") < pl.col("cdf_low")),
    ],
}


def _lock(path: Path) -> IO[str]:
    stream = (path / ".lock").open("w")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.close()
        raise StorageError(f"{path}: another process is writing this run; wait for it or stop it") from error
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
    except ValueError as error:
        raise RecordError(f"{path}: not valid JSON ({_one_line(error)}); the file is corrupt") from error
    if not isinstance(content, dict):
        raise RecordError(f"{path}: not a JSON object; the file is corrupt")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(
        json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )
    _flush(partial)
    os.replace(partial, path)


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
    return StorageError(f"{path}: can't be written ({error.strerror}); choose a writable folder")


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
