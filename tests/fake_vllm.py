"""An interpreter with a fake vLLM in it, which does what servers do to those who launch them.

`make_fake_vllm(folder)` returns the path of a Python that has a distribution `vllm` of the wanted version and
a module `vllm.entrypoints.openai.api_server`, which is this file. What it does is told by the environment
variable FAKE_VLLM, a JSON object:

* `log`: file printed line by line before anything else; `banner` false: no log of its own
* `delay_s`: sleeps before it listens; `never`: never listens
* `exit_code`: ends with that code instead of listening; `raise_signal`: ends by that signal
* `models`: ids in /v1/models (default: --served-model-name); `any_model`: answers every model name
* `ignore_term`: SIGTERM does nothing; `die_after_s`: exits with code 3 that long after it listens
* `child`: `plain` (in the group), `engine` (the same, called as vLLM calls its engine process), `session` (a
  session of its own), `daemon` (the same, its parent dead, and SIGTERM ignored); its process id goes into the
  file `child_file`
* `elsewhere`: a daemon without this server's environment listens on the port in its place, for 20 s
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_SLEEPER = "import signal, time; {ignore}time.sleep(60)"
_TITLE = "open('/proc/self/comm', 'w').write('VLLM::EngineCore'); "
_IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN); "


def make_fake_vllm(folder: Path, *, version: str = "0.32.0", distribution: str = "vllm") -> str:
    """Path of an interpreter in `folder` with this fake installed as `distribution` of that version."""
    site = folder / "site"
    package = site / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for part in (site / "vllm", site / "vllm" / "entrypoints", package):
        (part / "__init__.py").touch()
    shutil.copy(__file__, package / "api_server.py")
    metadata = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexport PYTHONPATH={site}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


class _Handler(http.server.BaseHTTPRequestHandler):
    models: tuple[str, ...] = ()
    any_model = False
    max_model_len = 1024

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, b"")
        elif self.path == "/v1/models":
            entries = [{"id": name, "max_model_len": self.max_model_len} for name in self.models]
            self._send(200, json.dumps({"object": "list", "data": entries}).encode())
        else:
            self._send(404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.any_model or body["model"] in self.models:
            self._send(200, json.dumps({"model": body["model"], "choices": []}).encode())
        else:
            self._send(404, b'{"error": {"message": "The model does not exist."}}')

    def log_message(self, *arguments: Any) -> None:
        pass

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _start_child(kind: str, file: str) -> None:
    if kind != "daemon":
        code = _SLEEPER.format(ignore="")
        if kind == "engine":
            code = f"{_TITLE}{code}"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=kind == "session")
        Path(file).write_text(str(child.pid))
        if kind == "engine":
            time.sleep(0.5)  # until it has its name
        return
    code = _SLEEPER.format(ignore=_IGNORE)
    starter = (
        "import subprocess, sys; from pathlib import Path; "
        f"child = subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True); "
        f"Path({file!r}).write_text(str(child.pid))"
    )
    subprocess.run([sys.executable, "-c", starter], check=True)


def _serve_elsewhere(port: int, model: str) -> None:
    """A stranger on our port: not our child, not in our session, without our environment."""
    code = (
        "import http.server, sys, threading; from api_server import _Handler; "
        f"_Handler.models = ({model!r},); "
        f"server = http.server.ThreadingHTTPServer(('127.0.0.1', {port}), _Handler); "
        "threading.Timer(20, server.shutdown).start(); server.serve_forever()"
    )
    starter = (
        "import subprocess, sys; "
        f"subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True, "
        f"env={{'PYTHONPATH': {str(Path(__file__).parent)!r}}}, stdout=-3, stderr=-3)"
    )
    subprocess.run([sys.executable, "-c", starter], check=True)


def main() -> None:
    """Behaves as the environment says."""
    told: dict[str, Any] = json.loads(os.environ.get("FAKE_VLLM", "{}"))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    options, _ = parser.parse_known_args()
    if told.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "log" in told:
        sys.stdout.write(Path(told["log"]).read_text(encoding="utf-8"))
    if told.get("banner", True):
        sys.stdout.write(f"INFO:     Started server process [{os.getpid()}]\n")
    sys.stdout.flush()
    if "child" in told:
        _start_child(told["child"], told["child_file"])
    if "exit_code" in told:
        sys.exit(told["exit_code"])
    if "raise_signal" in told:
        os.kill(os.getpid(), told["raise_signal"])
    time.sleep(told.get("delay_s", 0))
    if told.get("elsewhere"):
        _serve_elsewhere(options.port, options.served_model_name)
    if told.get("never") or told.get("elsewhere"):
        time.sleep(60)
    _Handler.models = tuple(told.get("models", [options.served_model_name]))
    _Handler.any_model = told.get("any_model", False)
    if "die_after_s" in told:
        threading.Timer(told["die_after_s"], os._exit, (3,)).start()
    with http.server.ThreadingHTTPServer((options.host, options.port), _Handler) as server:
        server.daemon_threads = True
        server.serve_forever()


if __name__ == "__main__":
    main()
