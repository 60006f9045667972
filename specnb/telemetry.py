"""Memory, utilisation and power of host and GPUs, sampled on the run's clock.

Reads the operating system (psutil) and the NVIDIA driver (NVML); knows nothing of
engines. Where there is no driver there are no GPU figures, and that is no error: what is
not known is absent or None, never 0. Separate from the engines, because launching a
server, the doctor and the runner all ask the same questions of a machine.

The sampler is a thread beside the client that measures, so a sample is cheap: a few reads
of /proc and of the driver, all of which let other threads run; the process tree, which is
dearer, is walked every `RESCAN_S` seconds only.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

import polars as pl
import psutil
import pynvml

from specnb import schema

HOST: Final = "host"
PERIOD_S: Final = 1.0
RESCAN_S: Final = 10.0
_STOP_LIMIT_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One card as the driver describes it.

    `index` is NVML's (PCI order, whatever CUDA_VISIBLE_DEVICES says) as text, the name used by every
    function here and by `schema.TELEMETRY.device`. Facts the driver doesn't give are None.
    """

    index: str
    name: str
    uuid: str
    driver: str | None
    memory_bytes: int | None
    power_limit_watts: float | None


def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA cards of this machine in PCI order; none without a driver."""
    with _nvml() as handles:
        return tuple(
            Gpu(
                index=index,
                name=str(_asked(pynvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"),
                uuid=str(_asked(pynvml.nvmlDeviceGetUUID, handle) or f"GPU-{index}"),
                driver=_asked(pynvml.nvmlSystemGetDriverVersion),
                memory_bytes=_memory(handle, "total"),
                power_limit_watts=_watts(_asked(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            )
            for index, handle in handles.items()
        )


def gpu_memory_used() -> dict[str, int]:
    """Bytes in use on each card by index, by anyone, without what the driver reserves for itself.

    Returns
    -------
    dict of str to int
        Empty without a driver. A card whose driver gives no figure (memory shared with the host) is
        left out, so that a missing key means "not known".
    """
    with _nvml() as handles:
        found = {index: _memory(handle, "used") for index, handle in handles.items()}
    return {index: used for index, used in found.items() if used is not None}


def gpu_processes() -> dict[str, tuple[int, ...]]:
    """Ids of the processes that hold a compute context on each card, by index.

    The driver names processes by their host's ids: in a container they may be hidden (an empty
    tuple) or mean nothing here.
    """
    with _nvml() as handles:
        found = {
            index: _asked(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
            for index, handle in handles.items()
        }
    return {index: tuple(sorted({int(process.pid) for process in held})) for index, held in found.items()}


def process_ids(pid: int) -> tuple[int, ...]:
    """A process, its descendants, and its whole process group if it leads one; only those alive.

    A member of the group counts even if the parent between them has died, which is what an orphan of
    a server is. A process that only sits in someone else's group (a run in a shell) adds none of it.
    """
    found = set()
    try:
        process = psutil.Process(pid)
        found |= {pid, *(child.pid for child in process.children(recursive=True))}
    except psutil.NoSuchProcess:
        pass
    found |= {other for other in psutil.pids() if _group(other) == pid}
    return tuple(sorted(other for other in found if _alive(other)))


class Sampler:
    """Samples host and GPUs every `period_s` seconds in a thread of its own until stopped.

    Parameters
    ----------
    clock
        Gives seconds on the run's clock, as in every other table.
    pid
        Process whose memory is the host's figure, with its descendants and the group it leads
        (`process_ids`): the server, or the run itself in process. None: no rows for the host.
    devices
        Indices of the cards to sample; every card by default.
    period_s
        Seconds from one sample to the next, above 0. A sample that is late moves none after it.

    Notes
    -----
    Host memory is the sum of resident sets, so pages that processes share count once each: an upper
    bound, exact for one process. A group whose processes have all ended has a null, not 0.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        pid: int | None = None,
        devices: Sequence[str] | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        if not (period_s > 0 and math.isfinite(period_s)):
            raise ValueError(f"period_s {period_s} is not a positive number of seconds")
        self._clock = clock
        self._pid = pid
        self._devices = None if devices is None else frozenset(devices)
        self._period_s = period_s
        self._rows: list[dict[str, Any]] = []
        self._tree: dict[int, psutil.Process] = {}
        self._scanned_s = -math.inf
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Takes the first sample, then goes on in the background; a sampler starts once."""
        if self._thread is not None:
            raise RuntimeError("the sampler was started before; make a new one")
        self.sample()
        self._thread = threading.Thread(target=self._run, name="specnb-telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Takes the last sample and ends the thread; stopping twice, or before the start, does nothing."""
        if self._thread is None or self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(_STOP_LIMIT_S)
        if not self._thread.is_alive():  # else the driver hangs, and would hang again
            self.sample()

    def sample(self) -> None:
        """Takes one sample now, beside the regular ones: the ends of a cell shorter than a period."""
        with _nvml() as handles:
            self._sample(handles)

    def frame(
        self, *, run_id: str, arm: str, cell_id: str, start_s: float = 0.0, end_s: float = math.inf
    ) -> pl.DataFrame:
        """The samples of one cell, start and end included, as a `schema.TELEMETRY` frame in order of time."""
        with self._lock:
            rows = [row for row in self._rows if start_s <= row["sampled_s"] <= end_s]
        labels = {"run_id": run_id, "arm": arm, "cell_id": cell_id}
        frame = pl.DataFrame([labels | row for row in rows], schema=schema.TELEMETRY.polars_schema)
        return frame.unique(["sampled_s", "device"], keep="first").sort("sampled_s", "device")

    def _run(self) -> None:
        due = self._clock() + self._period_s
        with _nvml() as handles:
            while not self._stopping.wait(max(0.0, due - self._clock())):
                self._sample(handles)
                late = max(0.0, self._clock() - due)
                due += self._period_s * (1 + math.floor(late / self._period_s))

    def _sample(self, handles: dict[str, Any]) -> None:
        with self._lock:
            now = self._clock()
            if self._pid is not None:
                self._rows.append(_row(now, HOST, self._resident(self._pid, now)))
            for index, handle in handles.items():
                if self._devices is None or index in self._devices:
                    load = _asked(pynvml.nvmlDeviceGetUtilizationRates, handle)
                    self._rows.append(
                        _row(
                            now,
                            index,
                            _memory(handle, "used"),
                            None if load is None else min(1.0, load.gpu / 100),
                            _watts(_asked(pynvml.nvmlDeviceGetPowerUsage, handle)),
                        )
                    )

    def _resident(self, pid: int, now: float) -> int | None:
        """Resident bytes of the tree; None once nothing of it is alive."""
        if now - self._scanned_s >= RESCAN_S or not self._tree:
            self._scanned_s = now
            for other in process_ids(pid):
                if other not in self._tree:
                    try:
                        self._tree[other] = psutil.Process(other)
                    except psutil.NoSuchProcess:
                        continue  # it ended since it was listed
        sizes = {other: _resident_bytes(process) for other, process in self._tree.items()}
        self._tree = {other: self._tree[other] for other, size in sizes.items() if size is not None}
        known = [size for size in sizes.values() if size is not None]
        return sum(known) if known else None


def _row(
    sampled_s: float,
    device: str,
    memory_used_bytes: int | None,
    utilisation: float | None = None,
    power_watts: float | None = None,
) -> dict[str, Any]:
    return {
        "sampled_s": sampled_s,
        "device": device,
        "memory_used_bytes": memory_used_bytes,
        "utilisation": utilisation,
        "power_watts": power_watts,
    }


def _resident_bytes(process: psutil.Process) -> int | None:
    """None if the process has ended, or its id is another's by now."""
    try:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return None
        return int(process.memory_info().rss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None


@contextmanager
def _nvml() -> Iterator[dict[str, Any]]:
    """Handles of the cards by index while the driver's library is open; none without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield {}
        return
    try:
        count = _asked(pynvml.nvmlDeviceGetCount) or 0
        found = {str(index): _asked(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)}
        yield {index: handle for index, handle in found.items() if handle is not None}
    finally:
        _asked(pynvml.nvmlShutdown)


def _asked(question: Callable[..., Any], *arguments: Any) -> Any:
    """The driver's answer; None where this card or driver doesn't have one."""
    try:
        answer = question(*arguments)
    except pynvml.NVMLError:
        return None
    return answer.decode() if isinstance(answer, bytes) else answer


def _memory(handle: Any, part: str) -> int | None:
    """`total` or `used` bytes; version 2 of the call keeps the driver's own reserve out of `used`."""
    found = _asked(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    found = found or _asked(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return None if found is None else int(getattr(found, part))


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
