"""Load schedules: when requests are wanted, what was wanted but not sent, and traces of arrivals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specnb.errors import PlanError
from specnb.load import (
    ClosedLoop,
    Job,
    OpenLoop,
    Schedule,
    poisson_arrivals,
    trace_arrivals,
)

FORMS = "write seconds, or JSON with timestamp, timestamp_s or timestamp_ms"


def jobs(n: int) -> list[Job]:
    return [Job(request_id=f"r{number}", path="/v1/completions", body=b"{}") for number in range(n)]


def served_alone(schedule: Schedule, service_s: float) -> list[tuple[float, float, float]]:
    """(scheduled, sent, end) of every job on an ideal server that takes `service_s` for each."""
    schedule.start(0.0)
    now_s, ends, rows = 0.0, [], []
    while len(rows) < schedule.num_jobs:
        while (taken := schedule.take(now_s)) is not None:
            rows.append((taken.scheduled_s, now_s, now_s + service_s))
            ends.append(now_s + service_s)
        due_s = schedule.next_due_s()
        now_s = min([*ends, *([] if due_s is None else [due_s])])
        while ends and min(ends) <= now_s:
            ends.remove(min(ends))
            schedule.release(now_s)
    return rows


def test_a_closed_loop_wants_the_next_request_when_a_slot_comes_free() -> None:
    loop = ClosedLoop(jobs(4), 2)
    loop.start(10.0)
    first, second = loop.take(10.001), loop.take(10.002)
    assert first is not None
    assert second is not None
    assert (first.job.request_id, first.scheduled_s) == ("r0", 10.0)
    assert (second.job.request_id, second.scheduled_s) == ("r1", 10.0)
    assert loop.take(10.003) is None
    assert loop.next_due_s() is None
    loop.release(11.5)
    assert loop.next_due_s() == 11.5
    third = loop.take(11.6)
    assert third is not None
    assert (third.job.request_id, third.scheduled_s) == ("r2", 11.5)
    assert [(left.job.request_id, left.scheduled_s) for left in loop.give_up(12.0)] == [("r3", 12.0)]
    assert loop.take(12.0) is None
    assert (loop.mode, loop.num_jobs, loop.max_in_flight, loop.wanted_in_flight) == ("closed", 4, 2, 2)


def test_a_closed_loop_with_fewer_jobs_than_slots_wants_only_its_jobs_in_flight() -> None:
    assert ClosedLoop(jobs(3), 8).wanted_in_flight == 3


def test_b24_waiting_in_the_client_counts_from_when_a_request_was_due() -> None:
    # 6 requests due at 0, 0.1, ... 0.5 s, cap 1, service 0.4 s.
    loop = OpenLoop(jobs(6), [0.0, 0.1, 0.2, 0.3, 0.4, 0.5], max_in_flight=1)
    rows = served_alone(loop, 0.4)
    assert np.mean([end - sent for _, sent, end in rows]) == pytest.approx(0.40)
    assert np.mean([end - scheduled for scheduled, _, end in rows]) == pytest.approx(1.15)
    assert np.mean([sent - scheduled for scheduled, sent, _ in rows]) == pytest.approx(0.75)
    assert loop.mode == "open+cap"
    assert loop.wanted_in_flight is None


def test_an_open_loop_without_a_cap_never_waits_for_the_server() -> None:
    loop = OpenLoop(jobs(6), [0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    rows = served_alone(loop, 0.4)
    assert [sent - scheduled for scheduled, sent, _ in rows] == pytest.approx([0.0] * 6)
    assert loop.mode == "open"
    assert loop.max_in_flight is None


def test_an_open_loop_counts_its_times_from_the_start_and_gives_up_with_them() -> None:
    loop = OpenLoop(jobs(3), [0.5, 1.0, 1.0])
    loop.start(100.0)
    assert loop.next_due_s() == 100.5
    assert loop.take(100.4) is None
    taken = loop.take(100.7)
    assert taken is not None
    assert taken.scheduled_s == 100.5
    assert [(left.job.request_id, left.scheduled_s) for left in loop.give_up(100.8)] == [
        ("r1", 101.0),
        ("r2", 101.0),
    ]
    assert loop.next_due_s() is None


@pytest.mark.parametrize(
    ("due_s", "cap", "message"),
    [
        ([0.0, 0.1], None, "load: 2 arrival times for 3 requests"),
        ([0.0, 0.2, 0.1], None, "load: arrival time 0.1 s after 0.2 s; times must ascend from 0"),
        ([-1.0, 0.2, 0.3], None, "load: arrival time -1.0 s after 0.0 s; times must ascend from 0"),
        ([0.0, 0.2, float("nan")], None, "load: arrival time nan s after 0.2 s; times must ascend from 0"),
        ([0.0, 0.2, 0.3], 0, "load.concurrency: 0 must be at least 1"),
    ],
)
def test_impossible_open_loads_are_refused(due_s: list[float], cap: int | None, message: str) -> None:
    with pytest.raises(PlanError) as refusal:
        OpenLoop(jobs(3), due_s, max_in_flight=cap)
    assert str(refusal.value) == message


def test_a_closed_loop_without_a_slot_is_refused() -> None:
    with pytest.raises(PlanError, match=r"load\.concurrency: 0 must be at least 1"):
        ClosedLoop(jobs(1), 0)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process(
    rng: np.random.Generator,
) -> None:
    times = poisson_arrivals(20_000, 50.0, rng)
    gaps = np.diff([0.0, *times])
    assert len(times) == 20_000
    assert gaps.min() >= 0
    # Exponential gaps of mean 1/50: mean and standard deviation within 5 standard errors.
    assert gaps.mean() == pytest.approx(0.02, abs=5 * 0.02 / np.sqrt(20_000))
    assert gaps.std() == pytest.approx(0.02, abs=5 * 0.02 * np.sqrt(2 / 20_000))
    again = poisson_arrivals(20_000, 50.0, np.random.default_rng(20240817))
    assert times == again
    assert poisson_arrivals(0, 1.0, rng) == []


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float, rng: np.random.Generator) -> None:
    with pytest.raises(PlanError, match=r"load\.request_rate: .* must be a positive number"):
        poisson_arrivals(3, rate, rng)


@pytest.mark.parametrize(
    "text",
    [
        "5.0\n5.25\n7\n",
        '{"timestamp": 5.0}\n# a comment\n\n{"timestamp": 5.25, "prompt": "x"}\n{"timestamp": 7}\n',
        '{"timestamp_ms": 5000}\n{"timestamp_ms": 5250}\n{"timestamp_s": 7}\n',
    ],
)
def test_a_trace_gives_times_after_its_first_arrival(text: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    assert trace_arrivals(file, 3) == [0.0, 0.25, 2.0]
    assert trace_arrivals(file, 2) == [0.0, 0.25]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\n0.5\n3\n", ":2: 0.5 s is before 1.0 s; timestamps must ascend"),
        (
            "1\nsoon\n3\n",
            f":2: no arrival time in 'soon'; {FORMS}",
        ),
        (
            '1\n{"time": 2}\n',
            f":2: no arrival time in '{{\"time\": 2}}'; {FORMS}",
        ),
        (
            "true\n",
            f":1: no arrival time in 'true'; {FORMS}",
        ),
        ("1\n2\n", ":2: 2 arrivals for 3 requests; use a longer trace"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.txt"
    file.write_text(text)
    with pytest.raises(PlanError) as refusal:
        trace_arrivals(file, 3)
    assert str(refusal.value) == f"{file}{message}"


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"load\.trace: .*none can't be read: No such file or directory"):
        trace_arrivals(tmp_path / "none", 1)
