"""Provenance: digests of known bytes, versions, and a revision only of specnb's own checkout."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from specnb import provenance


def test_digests(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"abc")
    (tmp_path / "b.safetensors").write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"x")
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-4, example B.1
    nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert provenance.file_sha256(tmp_path / "a.json") == abc
    whole = hashlib.sha256(f"a.json {abc}\nb.safetensors {nothing}\n".encode()).hexdigest()
    assert provenance.directory_sha256(tmp_path) == whole
    (tmp_path / "notes.txt").write_bytes(b"y")
    assert provenance.directory_sha256(tmp_path) == whole
    (tmp_path / "a.json").rename(tmp_path / "c.json")
    assert provenance.directory_sha256(tmp_path) != whole


def test_versions_of_what_is_and_is_not_installed() -> None:
    found = provenance.package_versions(("polars", "no-such-package-at-all"))
    assert found == {"polars": importlib.metadata.version("polars"), "no-such-package-at-all": None}


def test_host_facts_hold_no_names_of_people_or_machines() -> None:
    facts = provenance.host_facts()
    assert set(facts) == {"system", "python", "processor", "num_cores", "memory_bytes"}
    assert facts["num_cores"] >= 1
    assert facts["memory_bytes"] > 1 << 28
    text = json.dumps(facts)
    assert str(Path.home()) not in text
    assert re.search(rf"\b{re.escape(socket.gethostname())}\b", text) is None


@pytest.mark.parametrize(("limit", "expected"), [("max\n", None), ("1073741824\n", 1 << 30), ("", None)])
def test_memory_is_what_the_control_group_leaves(
    monkeypatch: pytest.MonkeyPatch, limit: str, expected: int | None
) -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(Path, "read_text", lambda path, **options: limit)
    assert provenance._memory_bytes() == (expected or physical)


def test_time_is_utc_to_the_second() -> None:
    stamp = datetime.fromisoformat(provenance.utc_now())
    assert stamp.utcoffset() == UTC.utcoffset(None)
    assert stamp.microsecond == 0
    assert abs((datetime.now(UTC) - stamp).total_seconds()) < 5


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_revision_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "specnb"
    package.mkdir()
    own = package / "provenance.py"
    own.write_text("x = 1\n")
    monkeypatch.setattr(provenance, "__file__", str(own))
    assert provenance.git_sha() is None  # no checkout
    git(tmp_path, "init", "--quiet")
    (tmp_path / "other.txt").touch()
    git(tmp_path, "add", "other.txt")
    git(tmp_path, "commit", "--quiet", "-m", "m")
    assert provenance.git_sha() is None  # somebody else's checkout
    assert provenance.git_sha(tmp_path) == git(tmp_path, "rev-parse", "HEAD")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "m")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert provenance.git_sha() == head
    own.write_text("x = 2\n")
    assert provenance.git_sha() == f"{head}-dirty"
    git(tmp_path, "checkout", "--quiet", ".")
    (tmp_path / "untracked").touch()
    assert provenance.git_sha() == head


def test_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert provenance.git_sha() is None
