"""An interpreter whose `vllm` is `fake_server` behind vLLM's command line, for runs of launched servers.

`make_streaming_vllm(folder, arm={...})` returns the path of a Python that launched servers can be started
with. What an arm's server does is told by an object for each arm's name, `tell` changes it later:

* `settings`: fields of `fake_server.Settings` over the usual ones (one token a chunk; with a drafter 1, then
  K + 1, 1, K + 1, ... tokens, and detailed acceptance)
* `log`: file printed before it listens
* `starts`: list of such objects, one a start, the last one for all further starts
* `vllm`: starts `fake_vllm` in its place, with this object (crashes, slow starts...)
* `max_words`: a longer prompt kills the process
* `says`: lines logged at each request for its model
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import fake_vllm
from fake_server import Settings, _Connection, _Server


def make_streaming_vllm(folder: Path, **arms: dict[str, Any]) -> str:
    """Path of an interpreter in `folder` with this fake installed as vLLM 0.32.0."""
    python = fake_vllm.make_fake_vllm(folder)
    site = folder / "site"
    shutil.copy(__file__, site / "vllm" / "entrypoints" / "openai" / "api_server.py")
    for name in ("fake_vllm.py", "fake_server.py"):
        shutil.copy(Path(__file__).parent / name, site / name)
    tell(folder, **arms)
    return python


def tell(folder: Path, **arms: dict[str, Any]) -> None:
    """What servers of each arm that start from now on do."""
    (folder / "told.json").write_text(json.dumps(arms))


def num_starts(folder: Path, arm: str) -> int:
    """How often an arm's server was started."""
    file = folder / f"starts.{arm}"
    return len(file.read_text()) if file.exists() else 0


class _VllmServer(_Server):
    """The fake server, which long prompts kill and which logs."""

    max_words: int | None = None
    says: tuple[str, ...] = ()

    def _generate(
        self, connection: _Connection, path: str, headers: dict[str, str], raw: bytes, now: float
    ) -> None:
        body = json.loads(raw)
        if body["model"] == self.settings.model:
            sys.stdout.writelines(f"{line}\n" for line in self.says)
            sys.stdout.flush()
        prompt = body.get("prompt")
        if self.max_words is not None and isinstance(prompt, str) and len(prompt.split()) > self.max_words:
            sys.stdout.write("ERROR 01-01 00:00:00 [core.py:1] AssertionError: prompt over the limit\n")
            sys.stdout.flush()
            os._exit(1)
        super()._generate(connection, path, headers, raw, now)


def _usual(num_speculative_tokens: int, max_tokens: int) -> dict[str, Any]:
    if not num_speculative_tokens:
        return {"tokens_per_chunk": 1, "gap_s": 0.002}
    tokens, left, full = [1], max_tokens - 1, True
    while left:
        tokens.append(min(num_speculative_tokens + 1 if full else 1, left))
        left -= tokens[-1]
        full = not full
    return {
        "tokens": tokens,
        "gap_s": 0.002,
        "num_speculative_tokens": num_speculative_tokens,
        "acceptance": "detailed",
    }


def main() -> None:
    """Serves what the folder above the package says for this arm and start."""
    folder = Path(__file__).parents[4]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--speculative-config", type=json.loads, default={})
    options, _ = parser.parse_known_args()
    arm = options.served_model_name.rpartition(".")[2]
    told: dict[str, Any] = json.loads((folder / "told.json").read_text()).get(arm, {})
    number = num_starts(folder, arm)
    with (folder / f"starts.{arm}").open("a") as stream:
        stream.write("x")
    if "starts" in told:
        told = {**told, **told["starts"][min(number, len(told["starts"]) - 1)]}
    if "vllm" in told:
        os.environ["FAKE_VLLM"] = json.dumps(told["vllm"])
        fake_vllm.main()
        return
    if "log" in told:
        sys.stdout.write(Path(told["log"]).read_text(encoding="utf-8"))
    sys.stdout.write(f"INFO:     Started server process [{os.getpid()}]\n")
    sys.stdout.flush()
    settings = dict(told.get("settings", {}))
    usual = _usual(options.speculative_config.get("num_speculative_tokens", 0), 16)
    settings["defaults"] = {**usual, **settings.get("defaults", {})}
    server = _VllmServer(
        Settings(model=options.served_model_name, **settings), options.port, watch_stdin=False
    )
    server.max_words = told.get("max_words")
    server.says = tuple(told.get("says", ()))
    server.serve()


if __name__ == "__main__":
    main()
