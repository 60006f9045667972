"""A vLLM server of one arm: launched, watched until it is ready, and stopped to the last process.

The server runs in a session and process group of its own and writes its log to a file. It is ready
when `/health` answers, `/v1/models` names the model it was told to serve, a model of another name
is refused, and the port belongs to a process of ours: a server left over from an earlier run
passes the first tests, not the last. After a stop the memory of its GPUs must be back at the level
of before, or the next arm would get a smaller cache without a word.

Knows nothing of requests, cells or tables. vLLM itself is never imported; it may live in another
interpreter (`engine.python`).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from specnb import telemetry
from specnb.config import Arm, Plan
from specnb.engines.support import installed_version, server_options, supports
from specnb.engines.vllm_log import (
    Fault,
    bare_lines,
    effective_settings,
    fault,
    last_lines,
    progress,
)
from specnb.errors import EngineError, PlanError

MODULE: Final = "vllm.entrypoints.openai.api_server"
HOST: Final = "127.0.0.1"

MEMORY_TOLERANCE_BYTES: Final = 512 << 20
"""How far above its level before the launch a GPU's memory may stay after the stop."""

# Below the range from which the system hands out ports to connections, so that none takes ours meanwhile.
_PORTS: Final = range(20_000, 30_000)
_TERM_LIMIT_S: Final = 30.0
_KILL_LIMIT_S: Final = 15.0
_MEMORY_LIMIT_S: Final = 60.0
_POLL_S: Final = 0.2
_ANSWER_LIMIT_S: Final = 10.0
_MARK: Final = "SPECNB_SERVER"
# How vLLM calls its processes: VLLM::EngineCore, VLLM::Worker_TP0, ...
_PARTS: Final = "VLLM::"
_ABSENT_MODEL: Final = "specnb-control-no-such-model"

_PATH_OPTIONS: Final = ("tokenizer", "chat_template", "hf_config_path")


class ServerStartError(EngineError):
    """A server did not become ready.

    `kind` says why: oom_at_load, kv_cache_too_small, port_in_use, model_missing, bad_arguments,
    wrong_model, timeout or crash.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class OrphanError(EngineError):
    """A stopped server left processes or GPU memory behind; no other may be started beside them."""


def render_command(
    plan: Plan, arm: Arm, *, port: int, model_id: str, version: str, python: str | None = None
) -> list[str]:
    """The command line that serves one arm.

    Parameters
    ----------
    plan, arm
        A validated plan with `engine.kind: vllm`, and one of its arms.
    port
        Where the server listens, on the loopback address.
    model_id
        Name under which the target is served.
    version
        vLLM's, as `support.installed_version` gives it; decides about options that came later.
    python
        Interpreter that has vLLM; by default the one that runs specnb.

    Returns
    -------
    list of str
        `engine.args` (an arm's own over them) with underscores as hyphens: true is `--flag`, false
        `--no-flag`, null leaves an option out, a mapping or a list with one inside is JSON, a list
        of plain values follows its option. Added unless the plan says otherwise: no prefix caching,
        vLLM's neutral sampling defaults, seed 0, no access log, cached prompt tokens in usage, and for
        arms that speculate the acceptance of each request.

    Raises
    ------
    PlanError
        An option's name is not one.
    """
    target = plan.target
    options: dict[str, Any] = {
        "model": plan.located(target.model),
        "served_model_name": model_id,
        "host": HOST,
        "port": port,
    }
    if target.revision is not None:
        options["revision"] = target.revision
    if target.dtype != "auto":
        options["dtype"] = target.dtype
    if target.trust_remote_code:
        options["trust_remote_code"] = True
    options |= {
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "seed": 0,
        "disable_uvicorn_access_log": True,
        "enable_prompt_tokens_details": True,
    }
    if arm.speculative is not None:
        if supports("per_request_metrics", version):
            options["per_request_spec_decode_metrics"] = "detailed"
        drafter = arm.speculative.model_dump(mode="json", exclude_none=True)
        if arm.speculative.model is not None:
            drafter["model"] = plan.located(arm.speculative.model)
        options["speculative_config"] = drafter
    given = server_options(plan, arm)
    if arm.speculative is None:
        given.pop("per_request_spec_decode_metrics", None)  # vLLM refuses it where nothing speculates
    for name in _PATH_OPTIONS:
        if isinstance(given.get(name), str):
            given[name] = plan.located(given[name])
    command = [python or sys.executable, "-m", MODULE]
    for name, value in (options | given).items():
        command += _rendered(name, value)
    return command


def parsed_arguments(command: Sequence[str]) -> dict[str, Any]:
    """Options of a vLLM command line by snake_case name.

    `--flag` is True, `--no-flag` False, JSON is decoded, several values are a list. Words before the
    first option (interpreter, module) are dropped.
    """
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in command:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            current = found.setdefault(name.replace("-", "_"), [])
            current += [value] if equals else []
        elif current is not None:
            current.append(word)
    return {
        name[3:] if not values and name.startswith("no_") else name: _decoded(name, values)
        for name, values in found.items()
    }


class VllmServer:
    """The server of one arm. Made for one start and one stop; both may be called from one thread only.

    Parameters
    ----------
    plan, arm
        A validated plan with `engine.kind: vllm`, and one of its arms.
    python
        Interpreter that has vLLM; by default `engine.python`, else the one that runs specnb.
    env
        Environment variables over the plan's own (`engine.env`).
    port
        By default `engine.port`, else a free one.
    devices
        CUDA devices for this server (CUDA_VISIBLE_DEVICES); by default `engine.devices`, else all.
    """

    def __init__(
        self,
        plan: Plan,
        arm: Arm,
        *,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        devices: str | None = None,
    ) -> None:
        self.arm = arm
        self.model = f"{plan.name}.{arm.name}"
        self._plan = plan
        self._python = _found_from_here(python or plan.server_python or sys.executable)
        self._env = {**plan.engine.env, **(env or {})}
        self._port = port or plan.engine.port
        self._devices = devices or plan.engine.devices
        self._mark = uuid.uuid4().hex
        self._version = ""
        self._command: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._family: dict[int, float] = {}
        self._parts: dict[psutil.Process, str] = {}
        self._memory_before: dict[str, int] = {}
        self._log_path: Path | None = None
        self._start_s: float | None = None
        self._ready_offset = 0
        self._settings: dict[str, Any] = {}
        self._max_model_len: int | None = None

    @property
    def url(self) -> str:
        """Base address of the server, `http://127.0.0.1:PORT`."""
        return f"http://{HOST}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id of the server, which leads its process group; None before the start."""
        return self._process.pid if self._process else None

    def start(self, log_path: Path, on_message: Callable[[str], None] = lambda message: None) -> None:
        """Launches the server and returns when it is ready.

        Parameters
        ----------
        log_path
            File for the server's output; its folder is made, an older file is overwritten.
        on_message
            Called with each stage of the start in a few words, and with the log's last lines if it fails.

        Raises
        ------
        ServerStartError
            The server ended, was not ready within `engine.start_timeout_s`, or another one answers.
            Nothing of it is left running.
        EngineError
            The interpreter has no vLLM, the port is taken, or the server was started before.
        """
        if self._process is not None:
            raise EngineError(f"arm {self.arm.name}: its server was started before; make a new one")
        self._version = installed_version(self._python)
        self._port = _free_port(self._port, self.arm.name)
        self._command = render_command(
            self._plan,
            self.arm,
            port=self._port,
            model_id=self.model,
            version=self._version,
            python=self._python,
        )
        self._memory_before = telemetry.gpu_memory_used()
        self._log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
        atexit.register(self._kill)
        try:
            self._wait_until_ready(began, on_message)
            self._check_identity()
        except BaseException:
            self._end_processes()
            raise
        self._start_s = time.monotonic() - began
        self._family |= self._members()
        self._parts = self._named_parts()
        self._ready_offset = self.log_offset()
        self._settings = effective_settings(self.log_since(0))

    def is_alive(self) -> bool:
        """Whether its first process and all its engine and worker processes run. Cheap: some system calls.

        A server whose engine process dies accepts requests for some seconds more and fails them all.
        """
        return self._process is not None and self._process.poll() is None and self._lost_part() is None

    def death(self) -> str | None:
        """Why a server that was ready is no longer there, in one line; None while it runs or before."""
        if self._process is None or self.is_alive():
            return None
        code, lost = self._process.poll(), self._lost_part()
        ended = f"lost its process {lost}" if code is None else _ended(code)
        found = fault(self.log_since(self._ready_offset), exit_code=code)
        return f"{ended}: {_without_home(found.line)}"

    def log_offset(self) -> int:
        """Bytes in the server's log so far; 0 before the start."""
        try:
            return self._log_path.stat().st_size if self._log_path else 0
        except OSError:
            return 0

    def log_since(self, offset: int) -> str:
        """The server's log from a byte offset on; bytes that are no UTF-8 are replaced."""
        if self._log_path is None:
            return ""
        with self._log_path.open("rb") as stream:
            stream.seek(offset)
            return stream.read().decode("utf-8", errors="replace")

    def facts(self) -> dict[str, Any]:
        """What the manifest keeps of this server; JSON-able, without a path of this machine.

        Returns
        -------
        dict
            pid, port, model (served name), version, start_s (launch until ready), arguments (the
            command line from the module on, models as the plan names them), environment (what the plan
            sets; values of names that look like keys are hidden), devices, settings
            (`vllm_log.effective_settings`), kv_cache_tokens, max_concurrency and max_model_len (None
            where unknown), log (file name), gpu_memory_before_bytes by card.
        """
        return {
            "pid": self.pid,
            "port": self._port,
            "model": self.model,
            "version": self._version,
            "start_s": None if self._start_s is None else round(self._start_s, 3),
            "arguments": self._shown_arguments(),
            "environment": {name: _without_home(value) for name, value in self._env.items()},
            "devices": self._devices,
            "settings": dict(self._settings),
            "kv_cache_tokens": self._settings.get("kv_cache_tokens"),
            "max_concurrency": self._settings.get("max_concurrency"),
            "max_model_len": self._max_model_len,
            "log": self._log_path.name if self._log_path else None,
            "gpu_memory_before_bytes": dict(self._memory_before),
        }

    def stop(self) -> None:
        """Ends the server and everything it started; stopping twice, or before the start, does nothing.

        SIGTERM to its process group, then SIGKILL to whatever is left after 30 s; then waits until
        the memory of its GPUs is back at the level of before the launch.

        Raises
        ------
        OrphanError
            A process or GPU memory stays behind; the message names the processes.
        """
        if self._process is None:
            return
        left = self._end_processes()
        if left:
            raise OrphanError(
                f"arm {self.arm.name}: {_processes(left)} can't be ended; end it by hand before the next arm"
            )
        self._check_memory()

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # -- start -------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        for name in ("VLLM_API_KEY", self._plan.engine.api_key_env):
            environment.pop(name, None)  # a key would lock out the client, and ours is none of the server's
        environment |= {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "PYTHONUNBUFFERED": "1",
            "PYTHONSAFEPATH": "1",  # a folder called vllm where specnb was started must not be imported
            "NO_COLOR": "1",
        }
        if self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices
        return environment | self._env | {_MARK: self._mark}

    def _wait_until_ready(self, began: float, on_message: Callable[[str], None]) -> None:
        limit = self._plan.engine.start_timeout_s
        offset, said = 0, ""
        while True:
            alive = self.is_alive()
            text = self.log_since(offset)
            whole = text[: max(text.rfind("\n"), text.rfind("\r")) + 1]
            offset += len(whole.encode())
            for _, line in bare_lines(whole):
                message = progress(line)
                if message and message != said:
                    said = message
                    on_message(message)
            if not alive:
                self._fail(on_message)
            if _answer(self._port, "GET", "/health")[0] == 200:
                return
            if time.monotonic() - began > limit:
                self._say_last_lines(on_message)
                raise ServerStartError(
                    "timeout",
                    f"arm {self.arm.name}: the server was not ready after {limit:g} s "
                    f"(last stage: {said or 'none'}); raise engine.start_timeout_s or see {self._log_name}",
                )
            time.sleep(_POLL_S)

    def _fail(self, on_message: Callable[[str], None]) -> None:
        assert self._process is not None
        code = self._process.returncode
        self._say_last_lines(on_message)
        found = fault(self.log_since(0), exit_code=code)
        raise ServerStartError(
            found.kind,
            f"arm {self.arm.name}: the server {_ended(code)} at start ({found.kind}): "
            f"{_without_home(found.line)}; {self._advice(found)}",
        )

    def _advice(self, found: Fault) -> str:
        options = server_options(self._plan, self.arm)
        share = options.get("gpu_memory_utilization")
        at = f" (now {share})" if share is not None else ""
        return {
            "oom_at_load": f"lower gpu_memory_utilization{at}, max_model_len or max_num_seqs",
            "kv_cache_too_small": f"raise gpu_memory_utilization{at} or lower max_model_len",
            "port_in_use": "stop what listens there or set engine.port",
            "model_missing": "fetch the weights of target and drafter, or mend their names",
            "bad_arguments": "mend engine.args or the arm's 'speculative'",
        }.get(found.kind, f"see {self._log_name}")

    def _check_identity(self) -> None:
        """Refuses to measure another server: the port's owner, the served name, and a name nobody serves."""
        assert self._port is not None
        members = self._members()
        owners = _listeners(self._port, members)
        if not owners:
            raise ServerStartError(
                "wrong_model",
                f"arm {self.arm.name}: port {self._port} is answered by another process{_owner(self._port)}; "
                "stop it or set engine.port",
            )
        status, body = _answer(self._port, "GET", "/v1/models")
        served = _served_models(body) if status == 200 else {}
        if list(served) != [self.model]:
            raise ServerStartError(
                "wrong_model",
                f"arm {self.arm.name}: the server names {', '.join(served) or 'no model'} in /v1/models, "
                f"{self.model} is expected; see {self._log_name}",
            )
        self._max_model_len = served[self.model]
        status, _ = _answer(self._port, "POST", "/v1/completions", model=_ABSENT_MODEL)
        if not 400 <= status < 500:
            raise ServerStartError(
                "wrong_model",
                f"arm {self.arm.name}: the server answers {status or 'nothing'} to a model that it does not "
                f"serve, so its name proves nothing; see {self._log_name}",
            )
        if not self.is_alive():
            raise ServerStartError(
                "crash", f"arm {self.arm.name}: the server ended as it became ready; see {self._log_name}"
            )

    def _say_last_lines(self, on_message: Callable[[str], None]) -> None:
        for line in last_lines(self.log_since(0), 5):
            on_message(_without_home(line))

    @property
    def _log_name(self) -> str:
        return f"logs/{self._log_path.name}" if self._log_path else "its log"

    def _shown_arguments(self) -> list[str]:
        """The command from the module on, with the plan's own names in place of this machine's folders."""
        shown = list(self._command[1:])
        names = {self._plan.located(self._plan.target.model): self._plan.target.model}
        drafter = self.arm.speculative
        if drafter is not None and drafter.model is not None:
            names[self._plan.located(drafter.model)] = drafter.model
        options = server_options(self._plan, self.arm)
        for option in _PATH_OPTIONS:
            if isinstance(options.get(option), str):
                names[self._plan.located(options[option])] = options[option]
        for path, name in sorted(names.items(), key=lambda pair: -len(pair[0])):
            quoted, plain = json.dumps(path), json.dumps(name)
            shown = [name if word == path else word.replace(quoted, plain) for word in shown]
        return [_without_home(word) for word in shown]

    # -- stop --------------------------------------------------------------------------------------

    def _members(self) -> dict[int, float]:
        """Living processes of this server with their start times, wherever they have moved to."""
        assert self._process is not None
        leader, mark = self._process.pid, f"{_MARK}={self._mark}".encode()
        found: dict[int, float] = {}
        family = {*telemetry.process_ids(leader), *self._family}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                born = process.create_time()
                known = process.pid in family and self._family.get(process.pid, born) == born
                if known or os.getsid(process.pid) == leader or mark in _environ(process.pid):
                    found[process.pid] = born
        found.pop(os.getpid(), None)
        return found

    def _named_parts(self) -> dict[psutil.Process, str]:
        """Engine and worker processes, without which the server is none; empty where vLLM names none."""
        found = {}
        for pid in self._family:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if pid != self.pid and process.name().startswith(_PARTS):
                    found[process] = process.name()
        return found

    def _lost_part(self) -> str | None:
        """The name of an engine or worker process that ran when the server was ready and runs no more."""
        for process, name in self._parts.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    continue
            return name
        return None

    def _end_processes(self) -> dict[int, float]:
        """SIGTERM, then SIGKILL; what is left of the server after both."""
        assert self._process is not None
        left = self._members()
        for sign, limit in ((signal.SIGTERM, _TERM_LIMIT_S), (signal.SIGKILL, _KILL_LIMIT_S)):
            if not left:
                break
            self._signal(sign, left)
            deadline = time.monotonic() + limit
            while left and time.monotonic() < deadline:
                time.sleep(_POLL_S / 4)
                self._process.poll()  # reaps the leader
                left = self._members()
        self._process.poll()
        atexit.unregister(self._kill)
        return left

    def _signal(self, sign: signal.Signals, members: Mapping[int, float]) -> None:
        assert self._process is not None
        group = self._process.pid
        in_group = set()
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) == group:
                    in_group.add(pid)
                else:
                    os.kill(pid, sign)
        if in_group:  # an empty group's id may be someone else's by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, sign)

    def _kill(self) -> None:
        """At the interpreter's exit: nothing of the server may survive it."""
        if self._process is not None:
            self._signal(signal.SIGKILL, self._members())

    def _check_memory(self) -> None:
        deadline = time.monotonic() + _MEMORY_LIMIT_S
        while True:
            above = self._memory_above()
            if not above:
                return
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        holders = telemetry.gpu_processes()
        parts = []
        for card, excess in above.items():
            pids = ", ".join(str(pid) for pid in holders.get(card, ())) or "unknown"
            parts.append(
                f"GPU {card} holds {excess / (1 << 30):.1f} GiB more than before (processes: {pids})"
            )
        raise OrphanError(
            f"arm {self.arm.name}: its server is gone, but {'; '.join(parts)}; end what holds it, then resume"
        )

    def _memory_above(self) -> dict[str, int]:
        """Bytes above the level of before, by card, where they are more than the tolerance."""
        now = telemetry.gpu_memory_used()
        cards = self._cards()
        return {
            card: now[card] - before
            for card, before in self._memory_before.items()
            if (cards is None or card in cards)
            and card in now
            and now[card] - before > MEMORY_TOLERANCE_BYTES
        }

    def _cards(self) -> set[str] | None:
        """Cards of this server by index; None: all of them."""
        if not self._devices:
            return None
        names = self._devices.split(",")
        return {
            gpu.index
            for gpu in telemetry.gpus()
            if gpu.index in names
            or any(name.startswith("GPU-") and gpu.uuid.startswith(name) for name in names)
        }


def _rendered(name: str, value: Any) -> list[str]:
    option = name.replace("_", "-")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.\-]*", option):
        raise PlanError(f"engine.args: {name!r} is not the name of an option; write it as in vLLM's help")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    if isinstance(value, dict):
        return [f"--{option}", json.dumps(value, allow_nan=False)]
    if isinstance(value, (list, tuple)):
        if any(isinstance(part, (dict, list, tuple)) for part in value):
            return [f"--{option}", json.dumps(value, allow_nan=False)]
        return [f"--{option}", *(str(part) for part in value)] if value else []
    return [f"--{option}", str(value)]


def _decoded(name: str, values: list[str]) -> Any:
    if not values:
        return not name.startswith("no_")
    decoded = [_json_or_text(value) for value in values]
    return decoded[0] if len(decoded) == 1 else decoded


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _free_port(wanted: int | None, arm: str) -> int:
    """The wanted port if nobody listens there, or any free one."""
    if wanted is not None:
        if _is_free(wanted):
            return wanted
        raise ServerStartError(
            "port_in_use",
            f"arm {arm}: port {wanted} is in use{_owner(wanted)}; stop what listens there or set engine.port",
        )
    # Not the seeded generators of the measurement: two runs on one machine must not agree.
    for port in random.SystemRandom().sample(_PORTS, 50):
        if _is_free(port):
            return port
    raise EngineError(f"arm {arm}: no free port from {_PORTS.start} to {_PORTS.stop - 1}; set engine.port")


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            sock.bind((HOST, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise EngineError(f"port {port} can't be tried ({error.strerror}); set engine.port") from error
    return True


def _owner(port: int) -> str:
    """` by NAME (process N)` for who listens on a port, if the system tells."""
    try:
        found = [entry.pid for entry in psutil.net_connections("tcp") if _listens(entry, port) and entry.pid]
        return f" by {psutil.Process(found[0]).name()} (process {found[0]})" if found else ""
    except (psutil.Error, OSError):
        return ""


def _listeners(port: int, members: Mapping[int, float]) -> set[int]:
    """Those of the processes that listen on a port."""
    found = set()
    for pid in members:
        with contextlib.suppress(psutil.Error, OSError):
            if any(_listens(entry, port) for entry in psutil.Process(pid).net_connections("tcp")):
                found.add(pid)
    return found


def _listens(entry: Any, port: int) -> bool:
    return bool(entry.status == psutil.CONN_LISTEN and entry.laddr and entry.laddr.port == port)


def _answer(port: int | None, method: str, path: str, model: str | None = None) -> tuple[int, bytes]:
    """Status and body of one short request to our own server; status 0 if there is no answer."""
    assert port is not None
    body = None if model is None else json.dumps({"model": model, "prompt": "a", "max_tokens": 1})
    connection = http.client.HTTPConnection(HOST, port, timeout=_ANSWER_LIMIT_S)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        return response.status, response.read(1 << 20)
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def _served_models(body: bytes) -> dict[str, int | None]:
    """Longest context by served name, from /v1/models; empty if it is no such answer."""
    try:
        entries = json.loads(body)["data"]
        return {str(entry["id"]): entry.get("max_model_len") for entry in entries}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _processes(members: Mapping[int, float]) -> str:
    return ", ".join(_named(members))


def _named(members: Mapping[int, float]) -> Iterator[str]:
    for pid in members:
        try:
            yield f"{psutil.Process(pid).name()} (process {pid})"
        except psutil.Error:
            yield f"process {pid}"


def _found_from_here(python: str) -> str:
    """An interpreter's path as a shell would find it; links are kept, since they name the environment."""
    return str(Path(python).absolute()) if "/" in python else python


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _without_home(text: str) -> str:
    """Text without the home folder, which reports must not show."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text
