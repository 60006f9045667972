"""How requests arrive: closed loops, open loops, and the clock times at which they were wanted.

Knows jobs and times, and nothing of sockets, servers or plans; the client (`engines.openai`) asks a
schedule what may be sent now and tells it when a slot came free. Separate so that the load a cell
wanted is recorded apart from what the client managed to send: `scheduled_s` is when a request was due
(open loop) or when its slot came free (closed loop), whatever happened afterwards.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specnb.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request ready to be sent: its id, the path (``/v1/chat/completions``) and the JSON body."""

    request_id: str
    path: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledJob:
    """A job with the time at which the load wanted it sent, in seconds on the client's clock."""

    job: Job
    scheduled_s: float


class Schedule(Protocol):
    """When which job may be sent. All times are seconds on the client's clock; one schedule a cell."""

    @property
    def mode(self) -> str:
        """`closed`, `open`, or `open+cap` (open loop with at most `max_in_flight` requests)."""
        ...

    @property
    def num_jobs(self) -> int:
        """Jobs in all, sent or not."""
        ...

    @property
    def max_in_flight(self) -> int | None:
        """Most requests that the schedule lets be in flight at once; None without a cap."""
        ...

    @property
    def wanted_in_flight(self) -> int | None:
        """Requests that must be in flight at some time for the load to be what it is called; None if open."""
        ...

    def start(self, now_s: float) -> None:
        """Sets the schedule's origin; called once, before anything else."""
        ...

    def take(self, now_s: float) -> ScheduledJob | None:
        """The next job that may be sent now, or None; the job's slot is in use until `release`."""
        ...

    def release(self, now_s: float) -> None:
        """Says that one taken job is over, well or badly."""
        ...

    def next_due_s(self) -> float | None:
        """When the next job falls due; None if nothing is left or only a free slot is missing."""
        ...

    def give_up(self, now_s: float) -> list[ScheduledJob]:
        """All jobs that were not taken, in order; the schedule is empty afterwards."""
        ...


class ClosedLoop:
    """Keeps `concurrency` requests in flight: a job is wanted at the moment a slot comes free.

    Parameters
    ----------
    jobs
        In sending order.
    concurrency
        Requests in flight, at least 1.

    Raises
    ------
    PlanError
        The concurrency is below 1.
    """

    mode = "closed"

    def __init__(self, jobs: Sequence[Job], concurrency: int) -> None:
        if concurrency < 1:
            raise PlanError(f"load.concurrency: {concurrency} must be at least 1")
        self._jobs = deque(jobs)
        self._free_s: deque[float] = deque()
        self.num_jobs = len(jobs)
        self.max_in_flight: int | None = concurrency
        self.wanted_in_flight: int | None = min(concurrency, len(jobs))

    def start(self, now_s: float) -> None:
        """All slots are free from now on."""
        self._free_s.extend([now_s] * (self.max_in_flight or 0))

    def take(self, now_s: float) -> ScheduledJob | None:
        """The next job if a slot is free; its scheduled time is when that slot came free."""
        if not self._jobs or not self._free_s:
            return None
        return ScheduledJob(job=self._jobs.popleft(), scheduled_s=self._free_s.popleft())

    def release(self, now_s: float) -> None:
        """A slot is free again."""
        self._free_s.append(now_s)

    def next_due_s(self) -> float | None:
        """When a slot came free that has a job waiting; None otherwise."""
        return self._free_s[0] if self._jobs and self._free_s else None

    def give_up(self, now_s: float) -> list[ScheduledJob]:
        """The jobs that never got a slot; scheduled now, as no slot came free for them."""
        left = [ScheduledJob(job=job, scheduled_s=now_s) for job in self._jobs]
        self._jobs.clear()
        return left


class OpenLoop:
    """Sends every job at its own time, whatever the server does.

    Parameters
    ----------
    jobs
        In sending order.
    due_s
        Seconds after the start at which each job is due, ascending.  # shape: [num_jobs]
    max_in_flight
        Cap on requests in flight; a job over the cap keeps its scheduled time and is sent late, so that the
        wait is in `sent_s - scheduled_s`. None: no cap.

    Raises
    ------
    PlanError
        Times are missing, negative, not finite or not ascending, or the cap is below 1.
    """

    def __init__(self, jobs: Sequence[Job], due_s: Sequence[float], max_in_flight: int | None = None) -> None:
        if len(due_s) != len(jobs):
            raise PlanError(f"load: {len(due_s)} arrival times for {len(jobs)} requests")
        if max_in_flight is not None and max_in_flight < 1:
            raise PlanError(f"load.concurrency: {max_in_flight} must be at least 1")
        times = [float(due) for due in due_s]
        for before, after in zip([0.0, *times], times, strict=False):
            if not (math.isfinite(after) and after >= before):
                raise PlanError(f"load: arrival time {after} s after {before} s; times must ascend from 0")
        self._waiting = deque(zip(times, jobs, strict=True))
        self._origin_s = 0.0
        self._in_flight = 0
        self.num_jobs = len(jobs)
        self.max_in_flight = max_in_flight
        self.wanted_in_flight: int | None = None

    @property
    def mode(self) -> str:
        """`open`, or `open+cap` where requests in flight are capped."""
        return "open" if self.max_in_flight is None else "open+cap"

    def start(self, now_s: float) -> None:
        """Due times count from now."""
        self._origin_s = now_s

    def take(self, now_s: float) -> ScheduledJob | None:
        """The next job if it is due and the cap allows it."""
        due_s = self.next_due_s()
        if due_s is None or due_s > now_s:
            return None
        self._in_flight += 1
        return ScheduledJob(job=self._waiting.popleft()[1], scheduled_s=due_s)

    def release(self, now_s: float) -> None:
        """One request less in flight."""
        self._in_flight -= 1

    def next_due_s(self) -> float | None:
        """When the next job is due; None if none is left or the cap is reached."""
        if not self._waiting or (self.max_in_flight is not None and self._in_flight >= self.max_in_flight):
            return None
        return self._origin_s + self._waiting[0][0]

    def give_up(self, now_s: float) -> list[ScheduledJob]:
        """The jobs that were not sent, each with its due time."""
        left = [ScheduledJob(job=job, scheduled_s=self._origin_s + due) for due, job in self._waiting]
        self._waiting.clear()
        return left


def poisson_arrivals(n: int, rate: float, rng: np.random.Generator) -> list[float]:
    """Arrival times of a Poisson process, in seconds from the start, ascending.  # shape: [n]

    Parameters
    ----------
    n
        Arrivals, at least 0.
    rate
        Mean arrivals a second, over 0 and finite.
    rng
        Source of the exponential gaps; equal generators give equal times.

    Raises
    ------
    PlanError
        The rate is not a positive number, or n is negative.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise PlanError(f"load.request_rate: {rate} must be a positive number of requests a second")
    if n < 0:
        raise PlanError(f"load: {n} arrivals; the number must be at least 0")
    times: list[float] = np.cumsum(rng.exponential(1.0 / rate, size=n)).tolist()
    return times


def trace_arrivals(path: Path | str, n: int) -> list[float]:
    """The first n arrival times of a trace, in seconds after its first one.  # shape: [n]

    Parameters
    ----------
    path
        A text file with one arrival a line: a number of seconds, or a JSON object with `timestamp` or
        `timestamp_s` (seconds) or `timestamp_ms`. Empty lines and lines that start with ``#`` are skipped.
    n
        Arrivals wanted, at least 1.

    Raises
    ------
    PlanError
        The file can't be read, a line holds no time, times fall, or there are fewer than n;
        the message names file and line.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise PlanError(f"load.trace: {file} can't be read: {reason}") from error
    times: list[float] = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if len(times) == n:
            break
        time_s = _arrival(text)
        if time_s is None:
            raise PlanError(
                f"{file}:{number}: no arrival time in {text[:60]!r}; "
                "write seconds, or JSON with timestamp, timestamp_s or timestamp_ms"
            )
        if times and time_s < times[-1]:
            raise PlanError(f"{file}:{number}: {time_s} s is before {times[-1]} s; timestamps must ascend")
        times.append(time_s)
    if len(times) < n:
        raise PlanError(f"{file}:{len(lines)}: {len(times)} arrivals for {n} requests; use a longer trace")
    return [time_s - times[0] for time_s in times]


def _arrival(text: str) -> float | None:
    """Seconds in one line of a trace; None if there is no finite time in it."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return None
    scale = 1.0
    if isinstance(value, dict):
        if "timestamp_ms" in value:
            value, scale = value["timestamp_ms"], 1e-3
        else:
            value = value.get("timestamp_s", value.get("timestamp"))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) * scale
