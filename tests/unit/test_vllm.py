"""The life of a launched server, against a fake one that crashes, hangs, lies and leaves orphans."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_vllm import make_fake_vllm

from specnb import telemetry
from specnb.config import Plan, plan_from_dict, read_plan
from specnb.engines import vllm
from specnb.engines.vllm import (
    OrphanError,
    ServerStartError,
    VllmServer,
    parsed_arguments,
    render_command,
)
from specnb.errors import EngineError, PlanError

FIXTURES = Path(__file__).parents[1] / "fixtures"
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}


def make_plan(**overrides: Any) -> Plan:
    """A vLLM plan with arms `baseline` and `ngram`; overrides: engine (merged), target, speculative..."""
    return plan_from_dict(
        {
            "name": "plan",
            "target": {"model": "demo", **overrides.pop("target", {})},
            "engine": {"kind": "vllm", **overrides.pop("engine", {})},
            "arms": [
                {"name": "baseline"},
                {
                    "name": "ngram",
                    "speculative": overrides.pop("speculative", NGRAM),
                    "args": overrides.pop("arm_args", {}),
                },
            ],
            "workload": {"set": "builtin-en"},
            "sampling": [{"name": "greedy", "temperature": 0.0, "max_tokens": 64}],
            "load": {"concurrency": [1]},
            **overrides,
        }
    )


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with the fake vLLM 0.32.0."""
    return make_fake_vllm(tmp_path_factory.mktemp("fake"))


Make = Callable[..., VllmServer]


@pytest.fixture
def make_server(python: str, tmp_path: Path) -> Iterator[Make]:
    """`make_server(arm=0, engine={...}, port=None, **told)`: a server of the fake, ended with the test."""
    made: list[VllmServer] = []

    def make(
        arm: int = 0, engine: dict[str, Any] | None = None, port: int | None = None, **told: Any
    ) -> VllmServer:
        plan = make_plan(engine={"start_timeout_s": 20, **(engine or {})})
        server = VllmServer(
            plan, plan.arms[arm], python=python, env={"FAKE_VLLM": json.dumps(told)}, port=port
        )
        made.append(server)
        return server

    yield make
    for server in made:
        server.stop()


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def port_of(server: VllmServer) -> int:
    return int(server.url.rpartition(":")[2])


@contextmanager
def system_calls() -> Iterator[Counter[str]]:
    """Counts the calls of this thread that reach into the operating system, by the function's name.

    Those of C code alone are seen: files, processes, sockets and sleeping. The time they take is left to the
    machine.
    """
    made: Counter[str] = Counter()

    def profile(frame: Any, what: str, function: Any) -> None:
        if what != "c_call":
            return
        owner = function.__module__ or type(function.__self__).__module__
        reaches = owner in ("posix", "_io", "io", "_socket", "select", "_posixsubprocess")
        if reaches or function is time.sleep or owner.startswith("psutil"):
            made[function.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield made
    finally:
        sys.setprofile(before)


def ends(pid: int) -> bool:
    """Whether a process is gone, or is a zombie, within five seconds."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


# -- the command line ------------------------------------------------------------------------------


def rendered(plan: Plan, arm: int, version: str = "0.32.0") -> list[str]:
    return render_command(
        plan, plan.arms[arm], port=8123, model_id="plan.arm", version=version, python="python"
    )


def test_the_command_of_a_baseline() -> None:
    assert rendered(make_plan(target={"model": "org/name"}), 0) == [
        *("python", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", "org/name", "--served-model-name", "plan.arm", "--host", "127.0.0.1", "--port", "8123"),
        *("--no-enable-prefix-caching", "--generation-config", "vllm", "--seed", "0"),
        "--disable-uvicorn-access-log",
        "--enable-prompt-tokens-details",
    ]


def test_the_command_of_an_arm_adds_its_drafter_and_nothing_else() -> None:
    baseline, arm = rendered(make_plan(), 0), rendered(make_plan(), 1)
    assert arm[: len(baseline)] == baseline
    assert arm[len(baseline) :] == [
        *("--per-request-spec-decode-metrics", "detailed"),
        *("--speculative-config", json.dumps(NGRAM)),
    ]


def test_acceptance_by_request_is_asked_for_from_0_29() -> None:
    assert "--per-request-spec-decode-metrics" not in rendered(make_plan(), 1, "0.28.0")
    assert "--per-request-spec-decode-metrics" in rendered(make_plan(), 1, "0.29.0")
    summary = make_plan(engine={"args": {"per_request_spec_decode_metrics": "summary"}})
    command = rendered(summary, 1)
    assert command[command.index("--per-request-spec-decode-metrics") + 1] == "summary"
    assert "--per-request-spec-decode-metrics" not in rendered(summary, 0)  # vLLM refuses it there


def test_options_are_rendered_by_kind() -> None:
    args = {
        "max_model_len": 8192,
        "gpu-memory-utilization": 0.85,
        "enforce_eager": True,
        "async_scheduling": False,
        "quantization": None,
        "compilation_config": {"mode": 0, "cudagraph_capture_sizes": [1, 2]},
        "middleware": ["one", "two"],
        "enable_prefix_caching": True,
        "seed": 7,
    }
    command = rendered(make_plan(engine={"args": args}, target={"dtype": "bfloat16", "revision": "abc"}), 0)
    text = " ".join(command)
    for part in (
        "--max-model-len 8192",
        "--gpu-memory-utilization 0.85",
        "--enforce-eager",
        "--no-async-scheduling",
        '--compilation-config {"mode": 0, "cudagraph_capture_sizes": [1, 2]}',
        "--middleware one two",
        "--seed 7",
        "--dtype bfloat16",
        "--revision abc",
    ):
        assert f" {part}" in text
    assert command.count("--enable-prefix-caching") == 1
    assert command.count("--seed") == 1
    assert "--no-enable-prefix-caching" not in command
    assert "--quantization" not in command


def test_an_arms_own_options_go_over_the_engines() -> None:
    plan = make_plan(
        engine={"args": {"max_num_seqs": 64}}, arm_args={"max-num-seqs": 32}, allow_differences=True
    )
    assert parsed_arguments(rendered(plan, 0))["max_num_seqs"] == 64
    assert parsed_arguments(rendered(plan, 1))["max_num_seqs"] == 32


def test_a_name_that_is_no_option_is_refused() -> None:
    with pytest.raises(PlanError, match=r"engine.args: 'max model len' is not the name of an option"):
        rendered(make_plan(engine={"args": {"max model len": 1}}), 0)


def test_keys_of_the_engines_own_reach_the_drafter() -> None:
    speculative = {
        "method": "dflash",
        "model": "org/drafter",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.9, 0.8, 0.7],
    }
    plan = make_plan(speculative=speculative, modelled=True)
    assert parsed_arguments(rendered(plan, 1))["speculative_config"] == speculative


def test_b36_arms_are_launched_alike_but_for_their_drafter() -> None:
    baseline, ngram = (parsed_arguments(rendered(make_plan(), arm)) for arm in (0, 1))
    assert {name for name in ngram if ngram[name] != baseline.get(name)} == {
        "speculative_config",
        "per_request_spec_decode_metrics",
    }
    assert baseline.keys() < ngram.keys()


# -- start and stop --------------------------------------------------------------------------------


def test_a_server_starts_tells_of_itself_and_stops(make_server: Make, tmp_path: Path) -> None:
    server = make_server(1, log=str(FIXTURES / "vllm-0.32.0-cpu-ngram.log"))
    assert not server.is_alive()
    assert server.log_offset() == 0
    messages: list[str] = []
    server.start(tmp_path / "logs" / "ngram.log", messages.append)
    assert server.is_alive()
    assert messages[0] == "LlamaForCausalLM recognised"
    assert "key-value cache of 93,184 tokens" in messages
    facts = json.loads(json.dumps(server.facts()))
    assert facts["model"] == server.model == "plan.ngram"
    assert facts["version"] == "0.32.0"
    assert facts["pid"] == server.pid
    assert facts["kv_cache_tokens"] == 93_184
    assert facts["max_concurrency"] == 91.0
    assert facts["max_model_len"] == 1024
    assert facts["log"] == "ngram.log"
    assert 0 < facts["start_s"] < 20
    assert facts["settings"]["async_scheduling"] is False
    assert facts["arguments"][:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert server.url == f"http://127.0.0.1:{facts['port']}"
    assert listens(facts["port"])
    server.stop()
    assert not server.is_alive()
    assert not listens(facts["port"])
    assert ends(facts["pid"])
    server.stop()


def test_a_second_start_is_refused(make_server: Make, tmp_path: Path) -> None:
    server = make_server()
    server.start(tmp_path / "server.log")
    with pytest.raises(EngineError, match="arm baseline: its server was started before; make a new one"):
        server.start(tmp_path / "server.log")


def test_stopping_before_the_start_does_nothing(make_server: Make) -> None:
    make_server().stop()


def test_the_log_is_read_from_an_offset(make_server: Make, tmp_path: Path) -> None:
    server = make_server()
    server.start(tmp_path / "server.log")
    offset = server.log_offset()
    assert offset > 0
    with (tmp_path / "server.log").open("ab") as stream:
        stream.write(b"SpecDecoding metrics: \xff\n")
    assert server.log_since(offset) == "SpecDecoding metrics: \ufffd\n"
    assert server.log_since(0).startswith("INFO:     Started server process")


def test_facts_hold_no_path_and_no_key(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    weights = tmp_path / "weights" / "target"
    weights.mkdir(parents=True)
    engine = {
        "env": {"HF_HOME": f"{tmp_path}/cache"},
        "args": {"download_dir": f"{tmp_path}/models"},
    }
    content = make_plan(engine=engine, target={"model": "weights/target"}).model_dump(
        mode="json", exclude_none=True
    )
    (tmp_path / "plan.yaml").write_text(json.dumps(content))
    plan = read_plan(tmp_path / "plan.yaml")
    with VllmServer(plan, plan.arms[0], python=python) as server:
        server.start(tmp_path / "server.log")
        facts = server.facts()
        assert str(weights) in psutil.Process(server.pid).cmdline()
    text = json.dumps(facts)
    assert str(tmp_path) not in text
    assert "hf_secret" not in text
    assert facts["environment"] == {"HF_HOME": "~/cache"}
    arguments = facts["arguments"]
    assert arguments[arguments.index("--model") + 1] == "weights/target"
    assert arguments[arguments.index("--download-dir") + 1] == "~/models"


def test_the_servers_environment(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("SPECNB_API_KEY", "secret")
    plan = make_plan(engine={"env": {"VLLM_CPU_KVCACHE_SPACE": "2"}, "devices": "0"})
    with VllmServer(plan, plan.arms[0], python=python, env={"ONE": "1"}) as server:
        server.start(tmp_path / "server.log")
        environment = psutil.Process(server.pid).environ()
        facts = server.facts()
    assert "VLLM_API_KEY" not in environment
    assert "SPECNB_API_KEY" not in environment
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert environment["ONE"] == "1"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert environment["VLLM_LOGGING_LEVEL"] == "INFO"
    assert facts["devices"] == "0"


def test_a_slow_server_is_waited_for(make_server: Make, tmp_path: Path) -> None:
    server = make_server(delay_s=1.0)
    server.start(tmp_path / "server.log")
    assert server.facts()["start_s"] >= 1.0


def test_a_server_that_never_gets_ready_ends_at_the_limit(make_server: Make, tmp_path: Path) -> None:
    server = make_server(
        engine={"start_timeout_s": 1.5}, never=True, log=str(FIXTURES / "vllm-0.32.0-cpu-baseline.log")
    )
    began = time.monotonic()
    with pytest.raises(
        ServerStartError,
        match=r"arm baseline: the server was not ready after 1.5 s \(last stage: listening\); raise",
    ) as caught:
        server.start(tmp_path / "server.log")
    assert caught.value.kind == "timeout"
    assert 1.5 <= time.monotonic() - began < 8
    assert not server.is_alive()
    assert server.pid is not None
    assert ends(server.pid)


def test_an_interrupted_start_leaves_nothing(make_server: Make, tmp_path: Path) -> None:
    server = make_server(never=True, log=str(FIXTURES / "vllm-0.32.0-cpu-baseline.log"))

    def interrupt(message: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server.start(tmp_path / "server.log", interrupt)
    assert server.pid is not None
    assert ends(server.pid)


OOM = """\
(EngineCore pid=7) INFO 11-30 01:49:26 [gpu_model_runner.py:68] Starting to load model demo...
(EngineCore pid=7) ERROR 11-30 01:49:27 [core.py:1] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-30 01:49:27 [core.py:1] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-30 01:49:27 [core.py:1]   File "core.py", line 1, in run
(EngineCore pid=7) ERROR 11-30 01:49:27 [c.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried 1.20 GiB
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "utils.py", line 3, in wait
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_d06_out_of_memory_at_load_is_named_and_ends_the_wait(make_server: Make, tmp_path: Path) -> None:
    log = tmp_path / "oom.txt"
    log.write_text(OOM)
    args = {"gpu_memory_utilization": 0.85}
    server = make_server(1, engine={"args": args, "start_timeout_s": 60}, log=str(log), exit_code=1)
    messages: list[str] = []
    began = time.monotonic()
    with pytest.raises(ServerStartError) as caught:
        server.start(tmp_path / "server.log", messages.append)
    assert time.monotonic() - began < 10  # not the 60 s of the limit
    assert caught.value.kind == "oom_at_load"
    assert str(caught.value) == (
        "arm ngram: the server ended with exit code 1 at start (oom_at_load): torch.OutOfMemoryError: CUDA "
        "out of memory. Tried 1.20 GiB; lower gpu_memory_utilization (now 0.85), max_model_len or "
        "max_num_seqs"
    )
    assert messages[0] == "loading weights"
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried 1.20 GiB" in messages


def test_a_server_killed_by_the_system_is_out_of_memory(make_server: Make, tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match=r"was ended by SIGKILL at start \(oom_at_load\): killed by"):
        make_server(raise_signal=9).start(tmp_path / "server.log")


def test_a_taken_port_is_named_before_the_launch(make_server: Make, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = make_server(port=port)
        with pytest.raises(ServerStartError, match=f"arm baseline: port {port} is in use by") as caught:
            server.start(tmp_path / "server.log")
    assert caught.value.kind == "port_in_use"
    assert f"(process {os.getpid()})" in str(caught.value)
    assert not (tmp_path / "server.log").exists()


def test_a_given_port_is_used(make_server: Make, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = make_server(port=port)
    server.start(tmp_path / "server.log")
    assert server.url == f"http://127.0.0.1:{port}"


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    plan = make_plan(engine={"python": str(tmp_path / "absent")})
    with pytest.raises(EngineError, match=r"engine.python: .*absent can't be run"):
        VllmServer(plan, plan.arms[0]).start(tmp_path / "server.log")


def test_an_interpreter_beside_the_plan_is_found_from_anywhere_and_run_by_its_link(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment's interpreter is a link; what it points to has none of the environment's packages."""
    for name in ("plans", "env", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "env" / "python").symlink_to(python)
    content = make_plan(engine={"python": "../env/python", "start_timeout_s": 20}).model_dump(mode="json")
    (tmp_path / "plans" / "plan.yaml").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path / "elsewhere")
    plan = read_plan(tmp_path / "plans" / "plan.yaml")
    server = VllmServer(plan, plan.arms[0])
    try:
        server.start(tmp_path / "server.log")
        assert server.pid is not None
        assert server._command[0] == str(tmp_path / "plans" / "../env/python")
    finally:
        server.stop()


# -- whose server is it ----------------------------------------------------------------------------


def test_b38_a_server_of_another_name_is_refused(make_server: Make, tmp_path: Path) -> None:
    server = make_server(models=["other"])
    with pytest.raises(
        ServerStartError, match=r"names other in /v1/models, plan.baseline is expected"
    ) as caught:
        server.start(tmp_path / "server.log")
    assert caught.value.kind == "wrong_model"
    assert server.pid is not None
    assert ends(server.pid)


def test_b38_a_server_that_answers_every_name_is_refused(make_server: Make, tmp_path: Path) -> None:
    server = make_server(any_model=True)
    with pytest.raises(ServerStartError, match="the server answers 200 to a model that it does not serve"):
        server.start(tmp_path / "server.log")


def test_b38_a_stranger_on_the_port_is_refused(make_server: Make, tmp_path: Path) -> None:
    """It says the right name and refuses the wrong one; only who owns the port gives it away."""
    server = make_server(elsewhere=True)
    with pytest.raises(ServerStartError, match=r"port \d+ is answered by another process") as caught:
        server.start(tmp_path / "server.log")
    stranger = re.search(r"\(process (\d+)\)", str(caught.value))
    assert stranger is not None
    pid = int(stranger[1])
    assert psutil.pid_exists(pid)  # not ours, so not ended
    assert listens(port_of(server))
    os.kill(pid, signal.SIGKILL)
    assert ends(pid)


def test_two_servers_side_by_side(make_server: Make, tmp_path: Path) -> None:
    first, second = make_server(0), make_server(1)
    first.start(tmp_path / "first.log")
    second.start(tmp_path / "second.log")
    assert first.url != second.url
    first.stop()
    assert second.is_alive()
    assert listens(port_of(second))


# -- the end ---------------------------------------------------------------------------------------


def test_a_server_that_dies_is_noticed_and_says_why(make_server: Make, tmp_path: Path) -> None:
    server = make_server(die_after_s=0.3)
    server.start(tmp_path / "server.log")
    assert server.death() is None
    deadline = time.monotonic() + 5
    while server.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not server.is_alive()
    assert server.death() == "ended with exit code 3: the log says nothing of it"
    server.stop()


def test_a_server_without_its_engine_process_is_dead_while_it_still_answers(
    make_server: Make, tmp_path: Path
) -> None:
    """As vLLM does: /health and the port are there for seconds after the engine is gone."""
    server = make_server(child="engine", child_file=str(tmp_path / "child"))
    server.start(tmp_path / "server.log")
    assert server.is_alive()
    assert server.death() is None
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    deadline = time.monotonic() + 5
    while server.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not server.is_alive()
    assert listens(port_of(server))
    assert server.death() == "lost its process VLLM::EngineCor: the log says nothing of it"
    server.stop()
    assert not listens(port_of(server))


@pytest.mark.parametrize("child", [None, "engine"])
def test_asking_whether_it_lives_is_cheap(make_server: Make, tmp_path: Path, child: str | None) -> None:
    server = make_server(**({"child": child, "child_file": str(tmp_path / "child")} if child else {}))
    server.start(tmp_path / "server.log")
    assert server.is_alive()  # what only the first call does is not counted
    num_calls = 10
    with system_calls() as made:
        answers = [server.is_alive() for _ in range(num_calls)]
    assert all(answers)
    told = made.most_common()
    assert "waitpid" in made, told
    assert sum(made.values()) <= num_calls * (2 if child is None else 20), told
    assert not {"listdir", "scandir", "fork_exec", "sleep", "connect"} & set(made), told


def test_sigterm_that_is_ignored_is_followed_by_sigkill(
    make_server: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "_TERM_LIMIT_S", 0.5)
    server = make_server(ignore_term=True)
    server.start(tmp_path / "server.log")
    assert server.pid is not None
    began = time.monotonic()
    server.stop()
    assert 0.5 <= time.monotonic() - began < 5
    assert ends(server.pid)


@pytest.mark.parametrize("child", ["plain", "session", "daemon"])
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_d11_no_process_of_a_server_survives_it(
    make_server: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: str, killed: bool
) -> None:
    """Even where the launcher was killed, and the child has left group, session and parent behind."""
    monkeypatch.setattr(vllm, "_TERM_LIMIT_S", 0.5)
    file = tmp_path / "child"
    server = make_server(child=child, child_file=str(file))
    server.start(tmp_path / "server.log")
    assert server.pid is not None
    pid = int(file.read_text())
    assert psutil.pid_exists(pid)
    if killed:
        os.kill(server.pid, signal.SIGKILL)
        assert ends(server.pid)
        assert psutil.pid_exists(pid)
    server.stop()
    assert ends(pid)


def test_d11_a_crash_at_start_takes_its_children_along(make_server: Make, tmp_path: Path) -> None:
    file = tmp_path / "child"
    server = make_server(child="session", child_file=str(file), exit_code=1)
    with pytest.raises(ServerStartError, match=r"ended with exit code 1 at start \(crash\)"):
        server.start(tmp_path / "server.log")
    assert ends(int(file.read_text()))


GIB = 1 << 30


class Cards:
    """GPU memory by card, as a test sets it, in place of the driver's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **used_gib: float) -> None:
        self.used = {name.removeprefix("card"): int(gib * GIB) for name, gib in used_gib.items()}
        monkeypatch.setattr(telemetry, "gpu_memory_used", lambda: dict(self.used))
        monkeypatch.setattr(telemetry, "gpu_processes", lambda: {"0": (4711,), "1": ()})
        monkeypatch.setattr(
            telemetry,
            "gpus",
            lambda: tuple(
                telemetry.Gpu(
                    index=index,
                    name="card",
                    uuid=f"GPU-{index}abc",
                    driver=None,
                    memory_bytes=None,
                    power_limit_watts=None,
                )
                for index in self.used
            ),
        )
        monkeypatch.setattr(vllm, "_MEMORY_LIMIT_S", 0.5)


def test_d11_memory_that_stays_behind_stops_the_run(
    make_server: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = Cards(monkeypatch, card0=0.5, card1=0.5)
    server = make_server()
    server.start(tmp_path / "server.log")
    assert server.facts()["gpu_memory_before_bytes"] == {"0": GIB // 2, "1": GIB // 2}
    cards.used["0"] = 70 * GIB
    with pytest.raises(OrphanError) as caught:
        server.stop()
    assert str(caught.value) == (
        "arm baseline: its server is gone, but GPU 0 holds 69.5 GiB more than before (processes: 4711); "
        "end what holds it, then resume"
    )
    assert not server.is_alive()
    cards.used["0"] = GIB  # within the tolerance
    server.stop()


def test_d11_memory_is_waited_for(make_server: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = Cards(monkeypatch, card0=0.0)
    monkeypatch.setattr(vllm, "_MEMORY_LIMIT_S", 10.0)
    server = make_server()
    server.start(tmp_path / "server.log")
    cards.used["0"] = 60 * GIB
    timer = threading.Timer(0.7, cards.used.update, ({"0": 0},))
    timer.start()
    began = time.monotonic()
    server.stop()
    assert 0.3 < time.monotonic() - began < 5
    timer.join()


@pytest.mark.parametrize("devices", ["1", "GPU-1abc"])
def test_d11_only_the_cards_of_the_server_count(
    make_server: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str
) -> None:
    cards = Cards(monkeypatch, card0=0.0, card1=0.0)
    server = make_server(engine={"devices": devices})
    server.start(tmp_path / "server.log")
    cards.used["0"] = 70 * GIB  # the arm that runs beside it
    server.stop()
    cards.used["1"] = 70 * GIB
    with pytest.raises(OrphanError, match=r"GPU 1 holds 70.0 GiB more than before \(processes: unknown\)"):
        server.stop()
    cards.used["1"] = 0


def test_nothing_outlives_an_interpreter_that_exits(python: str, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from test_vllm import make_plan
from specnb.engines.vllm import VllmServer
plan = make_plan()
server = VllmServer(plan, plan.arms[0], python={python!r})
server.start(Path({str(tmp_path / "server.log")!r}))
print(server.pid)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ends(int(done.stdout))
