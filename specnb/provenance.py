"""Where a run came from: versions, hardware, digests, git revision.

Collected once per run into the manifest. Reads package metadata and the operating
system; imports no torch (engines add what only they know). Holds no host name, user
name or home path, since reports are mailed around.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("specnb", "torch", "transformers", "vllm", "polars", "altair", "scipy", "numpy")


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Installed version by distribution name; None where it is not installed."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def host_facts() -> dict[str, Any]:
    """Operating system, Python, processor name, usable cores and usable memory in bytes."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "processor": _processor_name(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
    }


def git_sha(folder: Path | None = None) -> str | None:
    """Revision of the checkout that holds specnb, with `-dirty` if tracked files differ; None outside git.

    None, too, where specnb only lies inside somebody else's checkout (an ignored environment, say).

    Parameters
    ----------
    folder
        A folder of the checkout; the package's own by default.
    """
    own = Path(__file__).resolve()
    try:
        if folder is None:
            folder = own.parent
            subprocess.run(
                ["git", "ls-files", "--error-unmatch", own.name],
                cwd=folder,
                capture_output=True,
                timeout=10,
                check=True,
            )
        sha = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{sha}-dirty" if status else sha


def utc_now() -> str:
    """Current time in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def directory_sha256(folder: Path, *, patterns: tuple[str, ...] = ("*.safetensors", "*.json")) -> str:
    """Hex digest over the names and digests of a model directory's files."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    """Physical memory, or the control group's limit where that is less."""
    try:
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError, AttributeError):
        return None
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        limits += [int(text)] if text.isdigit() else []
    except OSError:
        pass
    return min(limits)
