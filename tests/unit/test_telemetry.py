"""Telemetry: a driver played by a fake, and real processes of this machine."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from specnb import schema, telemetry
from specnb.telemetry import Sampler

GIB = 1 << 30
LABELS = {"run_id": "r", "arm": "a", "cell_id": "c"}


class NVMLError(Exception):
    """What the driver raises for everything."""


class Driver:
    """Two cards; `missing` names the questions that it has no answer to; counts open sessions."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 2

    def __init__(self, *missing: str, used: tuple[int, int] = (70 * GIB, 1 * GIB)) -> None:
        self.missing = missing
        self.used = used
        self.sessions = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def answer(*arguments: Any) -> Any:
            if name in self.missing:
                raise NVMLError(name)
            return getattr(self, f"_{name}")(*arguments)

        if not name.startswith("nvml"):
            raise AttributeError(name)
        return answer

    def _nvmlInit(self) -> None:
        self.sessions += 1

    def _nvmlShutdown(self) -> None:
        self.sessions -= 1

    def _nvmlDeviceGetCount(self) -> int:
        return 2

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def _nvmlDeviceGetName(self, card: int) -> bytes:
        return b"NVIDIA H200"

    def _nvmlDeviceGetUUID(self, card: int) -> str:
        return f"GPU-{card}{card}"

    def _nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def _nvmlDeviceGetEnforcedPowerLimit(self, card: int) -> int:
        return 700_000

    def _nvmlDeviceGetMemoryInfo(self, card: int, version: int | None = None) -> SimpleNamespace:
        if version is not None and "version 2" in self.missing:
            raise NVMLError("function not found")
        reserve = 0 if version == 2 else GIB
        return SimpleNamespace(total=141 * GIB, used=self.used[card] + reserve)

    def _nvmlDeviceGetUtilizationRates(self, card: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=25 * (card + 1))

    def _nvmlDeviceGetPowerUsage(self, card: int) -> int:
        return 123_456 + card

    def _nvmlDeviceGetComputeRunningProcesses(self, card: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in ((9, 7, 7), ())[card]]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()
    monkeypatch.setattr(telemetry, "pynvml", fake)
    yield fake
    assert fake.sessions == 0


@contextmanager
def process(code: str, *, new_session: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has printed its first line; killed at the end, with its group if it leads one."""
    started = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=new_session
    )
    assert started.stdout is not None
    try:
        started.first_line = started.stdout.readline().strip()  # type: ignore[attr-defined]
        yield started
    finally:
        started.kill()
        started.wait(10)
        started.stdout.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- cards -----------------------------------------------------------------------------------------


def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "pynvml", Driver("nvmlInit"))
    assert telemetry.gpus() == ()
    assert telemetry.gpu_memory_used() == {}
    assert telemetry.gpu_processes() == {}
    with Sampler(clock=time.perf_counter) as sampler:
        pass
    assert sampler.frame(**LABELS).is_empty()


def test_cards(driver: Driver) -> None:
    first, second = telemetry.gpus()
    assert (first.index, first.uuid, second.index, second.uuid) == ("0", "GPU-00", "1", "GPU-11")
    assert (first.name, first.driver, first.memory_bytes) == ("NVIDIA H200", "580.1", 141 * GIB)
    assert first.power_limit_watts == 700.0


def test_what_a_driver_does_not_tell_is_none(driver: Driver) -> None:
    driver.missing = (
        *("nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlSystemGetDriverVersion"),
        *("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetEnforcedPowerLimit"),
    )
    first, _ = telemetry.gpus()
    assert (first.name, first.uuid) == ("NVIDIA GPU", "GPU-0")
    assert (first.driver, first.memory_bytes, first.power_limit_watts) == (None, None, None)
    # Not known is not 0: the key is missing.
    assert telemetry.gpu_memory_used() == {}


def test_memory_used_leaves_the_drivers_reserve_out(driver: Driver) -> None:
    """Case D11: 70 GiB held by an orphan is what the next arm would find."""
    assert telemetry.gpu_memory_used() == {"0": 70 * GIB, "1": GIB}
    driver.missing = ("version 2",)  # an old driver counts its reserve in
    assert telemetry.gpu_memory_used() == {"0": 71 * GIB, "1": 2 * GIB}


def test_d11_processes_that_hold_a_card(driver: Driver) -> None:
    assert telemetry.gpu_processes() == {"0": (7, 9), "1": ()}
    driver.missing = ("nvmlDeviceGetComputeRunningProcesses",)
    assert telemetry.gpu_processes() == {"0": (), "1": ()}


def test_the_session_is_closed_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Driver()
    monkeypatch.setattr(telemetry, "pynvml", fake)
    with pytest.raises(ZeroDivisionError), telemetry._nvml():
        raise ZeroDivisionError
    assert fake.sessions == 0


# -- processes -------------------------------------------------------------------------------------

CHILD = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(child.pid, flush=True)\n"
)


def test_descendants_and_group() -> None:
    with process(CHILD + "time.sleep(60)", new_session=True) as parent:
        child = int(parent.first_line)  # type: ignore[attr-defined]
        assert telemetry.process_ids(parent.pid) == tuple(sorted((parent.pid, child)))
        # Someone else's group is not ours: this test shares one with whatever started it.
        assert parent.pid in telemetry.process_ids(os.getpid())
        assert os.getppid() not in telemetry.process_ids(os.getpid())
        os.killpg(parent.pid, signal.SIGKILL)


def test_d11_an_orphan_of_the_group_is_found() -> None:
    """The launcher is killed; its child lives on in the group and is found through it."""
    with process(CHILD + "time.sleep(60)", new_session=True) as parent:
        child = int(parent.first_line)  # type: ignore[attr-defined]
        parent.kill()
        parent.wait(10)
        assert telemetry.process_ids(parent.pid) == (child,)
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: telemetry.process_ids(parent.pid) == ())


def test_an_ended_process_has_no_ids() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
    assert telemetry.process_ids(ended.pid) == ()
    ended.wait(10)
    assert telemetry.process_ids(ended.pid) == ()


# -- sampling --------------------------------------------------------------------------------------


def test_rows_of_cards_by_value(driver: Driver) -> None:
    times = iter([1.5, 2.5])
    sampler = Sampler(clock=lambda: next(times))
    sampler.sample()
    driver.used = (80 * GIB, GIB)
    driver.missing = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates")
    sampler.sample()
    frame = sampler.frame(**LABELS)
    assert frame.schema == schema.TELEMETRY.polars_schema
    assert frame.rows() == [
        ("r", "a", "c", 1.5, "0", 70 * GIB, 0.25, 123.456),
        ("r", "a", "c", 1.5, "1", 1 * GIB, 0.5, 123.457),
        ("r", "a", "c", 2.5, "0", 80 * GIB, None, None),
        ("r", "a", "c", 2.5, "1", 1 * GIB, None, None),
    ]


def test_chosen_cards_and_a_cells_own_samples(driver: Driver) -> None:
    times = iter([1.0, 2.0, 3.0, 4.0])
    sampler = Sampler(clock=lambda: next(times), devices=["1"])
    for _ in range(4):
        sampler.sample()
    frame = sampler.frame(**LABELS, start_s=2.0, end_s=3.0)
    assert frame["sampled_s"].to_list() == [2.0, 3.0]
    assert frame["device"].to_list() == ["1", "1"]
    assert sampler.frame(**LABELS, start_s=9.0).is_empty()
    assert sampler.frame(**LABELS).height == 4


def test_memory_of_a_process_and_its_child() -> None:
    size = 50 << 20
    code = (
        "import os, time\n"
        f"if os.fork() == 0: held = b'x' * {size}; print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    with process(code, new_session=True) as parent:
        sampler = Sampler(clock=time.perf_counter, pid=parent.pid)
        sampler.sample()
        ids = telemetry.process_ids(parent.pid)
        assert len(ids) == 2
        expected = sum(psutil.Process(pid).memory_info().rss for pid in ids)
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait(10)
    (row,) = sampler.frame(**LABELS).rows(named=True)
    assert row["device"] == "host"
    assert row["memory_used_bytes"] == pytest.approx(expected, rel=0.02)
    assert row["memory_used_bytes"] > size
    assert (row["utilisation"], row["power_watts"]) == (None, None)


def test_a_server_that_vanishes_leaves_null_not_zero() -> None:
    with process("import time; print(1, flush=True); time.sleep(60)") as server:
        sampler = Sampler(clock=time.perf_counter, pid=server.pid)
        sampler.sample()
        server.kill()
        server.wait(10)
        sampler.sample()
    alive, dead = sampler.frame(**LABELS)["memory_used_bytes"].to_list()
    assert alive > 0
    assert dead is None


def test_new_processes_are_seen_at_the_next_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    with process("import time; print(1, flush=True); time.sleep(60)") as server:
        now = [0.0]
        scans: list[int] = []
        real = telemetry.process_ids
        monkeypatch.setattr(telemetry, "process_ids", lambda pid: scans.append(pid) or real(pid))
        sampler = Sampler(clock=lambda: now[0], pid=server.pid)
        for now[0] in (0.0, 1.0, 9.9, 10.0, 11.0):
            sampler.sample()
    assert len(scans) == 2
    assert telemetry.RESCAN_S == 10.0


def test_the_thread_keeps_its_period_and_samples_both_ends(driver: Driver) -> None:
    period_s = 0.2
    began = time.perf_counter()
    with Sampler(clock=time.perf_counter, devices=["0"], period_s=period_s) as sampler:
        started = time.perf_counter()
        wait_until(lambda: sampler.frame(**LABELS).height >= 8)
        stopping = time.perf_counter()
    ended = time.perf_counter()
    first, *regular, last = sampler.frame(**LABELS)["sampled_s"].to_list()
    assert began <= first <= started
    assert stopping <= last <= ended
    # A busy machine makes a sample late, and may make it skip one, now and then; none is early.
    assert len(regular) >= 7
    assert all(time_s >= first + (i + 1) * period_s for i, time_s in enumerate(regular))
    gaps = [later - time_s for time_s, later in itertools.pairwise(regular)]
    assert statistics.median(gaps) == pytest.approx(period_s, rel=0.25)
    sampler.stop()  # twice is once
    assert sampler.frame(**LABELS).height == len(regular) + 2


def test_starting_twice_is_refused(driver: Driver) -> None:
    with Sampler(clock=time.perf_counter) as sampler, pytest.raises(RuntimeError, match="was started before"):
        sampler.start()


def test_stop_before_start_does_nothing() -> None:
    Sampler(clock=time.perf_counter).stop()


@pytest.mark.parametrize("period_s", [0, -1.0, float("nan"), float("inf")])
def test_periods_that_are_none(period_s: float) -> None:
    with pytest.raises(ValueError, match="is not a positive number of seconds"):
        Sampler(clock=time.perf_counter, period_s=period_s)


@pytest.mark.gpu
def test_a_real_card() -> None:
    cards = telemetry.gpus()
    if not cards:
        pytest.skip("no NVIDIA driver")
    used = telemetry.gpu_memory_used()
    for card in cards:
        assert card.memory_bytes is not None
        assert 0 <= used[card.index] <= card.memory_bytes
