"""Servers that die, hang, refuse, lie or send garbage: every request keeps a row with its kind of error, the
others are not disturbed, and the client is done in bounded time.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from fake_server import FakeServer

from specnb.engines.openai import Answer, Client, ClientFacts
from specnb.load import ClosedLoop, Job, OpenLoop

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


def _body(path: str, **fake: Any) -> bytes:
    prompt = {"messages": [{"role": "user", "content": "count"}]} if path == _CHAT else {"prompt": "count"}
    common = {"model": "fake-model", "max_tokens": 16, "temperature": 0.0, "stream": True}
    options = {"stream_options": {"include_usage": True}, "return_token_ids": True}
    return json.dumps({**prompt, **common, **options, "fake": fake}).encode()


def _jobs(fakes: list[dict[str, Any]], path: str = _CHAT) -> list[Job]:
    return [Job(request_id=f"r{i}", path=path, body=_body(path, **fake)) for i, fake in enumerate(fakes)]


def _run(
    server: FakeServer,
    fakes: list[dict[str, Any]],
    *,
    concurrency: int = 4,
    path: str = _CHAT,
    within_s: float = 20.0,
    deadline_s: float | None = None,
    **limits: Any,
) -> tuple[dict[str, Answer], ClientFacts]:
    """Answers by request id; checks that the run is over `within_s` and answers each request once."""
    told: list[str] = []
    client = Client(server.url, clock=time.perf_counter, **limits)
    start = time.perf_counter()
    answers, facts = client.run(
        ClosedLoop(_jobs(fakes, path), concurrency),
        on_done=lambda answer: told.append(answer.request_id),
        deadline_s=None if deadline_s is None else start + deadline_s,
        is_alive=server.is_alive,
    )
    assert time.perf_counter() - start < within_s
    names = [f"r{i}" for i in range(len(fakes))]
    assert sorted(told) == sorted(answer.request_id for answer in answers) == sorted(names)
    for answer in answers:
        assert (answer.status == "ok") == (answer.error_kind is None) == (answer.error is None)
        assert answer.error is None or "\n" not in answer.error
    return {answer.request_id: answer for answer in answers}, facts


@pytest.mark.parametrize("path", [_CHAT, _COMPLETIONS])
@pytest.mark.parametrize(
    ("fake", "kind", "status"),
    [
        ({"fail": "http_500"}, "http_500", "error"),
        ({"fail": "http_429"}, "http_429", "error"),
        ({"fail": "http_400"}, "http_400", "error"),
        ({"fail": "http_503"}, "http_503", "error"),
        ({"fail": "garbage"}, "garbage", "error"),
        ({"fail": "garbage_html"}, "garbage", "error"),
        ({"fail": "garbage_body"}, "garbage", "error"),
        ({"fail": "bad_json"}, "garbage", "error"),
        ({"fail": "refuse"}, "disconnected", "error"),
        ({"fail": "cut", "fail_at": 0}, "disconnected", "error"),
        ({"fail": "reset", "fail_at": 0}, "disconnected", "error"),
        ({"fail": "cut"}, "truncated", "error"),
        ({"fail": "cut_clean"}, "truncated", "error"),
        ({"fail": "cut", "framing": "close"}, "truncated", "error"),
        ({"fail": "cut", "framing": "length"}, "truncated", "error"),
        ({"fail": "in_band"}, "server_error", "error"),
        ({"fail": "empty"}, "empty", "error"),
        ({"fail": "silent"}, "stalled", "timeout"),
        ({"fail": "hang"}, "stalled", "timeout"),
    ],
)
def test_each_failure_has_its_kind_and_spares_the_others(
    server: FakeServer, fake: dict[str, Any], kind: str, status: str, path: str
) -> None:
    """Nine good requests and three bad ones among them, four at a time."""
    fakes = [dict(fake) if i % 4 == 1 else {"num_chunks": 4, "gap_s": 0.005} for i in range(12)]
    answers, _ = _run(server, fakes, path=path, stall_timeout_s=0.5)
    bad = [answers[f"r{i}"] for i in range(12) if i % 4 == 1]
    good = [answers[f"r{i}"] for i in range(12) if i % 4 != 1]
    assert {(answer.status, answer.error_kind) for answer in bad} == {(status, kind)}
    assert {answer.status for answer in good} == {"ok"}
    assert {answer.num_output_tokens for answer in good} == {16}


def test_b14_an_error_event_after_200_is_a_failure_with_its_text_kept(server: FakeServer) -> None:
    """One chunk of content, then an error event and [DONE]: failed (server_error), none completed."""
    answers, _ = _run(server, [{"fail": "in_band", "fail_at": 1, "text": ["a"], "tokens": [1, 1]}])
    answer = answers["r0"]
    assert (answer.status, answer.error_kind, answer.output_text) == ("error", "server_error", "a")
    assert answer.error is not None
    assert "the engine failed" in answer.error


def test_b15_answers_without_tokens_are_failures_without_a_ttft(server: FakeServer) -> None:
    """TTFT and tokens (0.10, 8), (-, 0), (0.30, 8), (-, 0): two completed, two failed, median TTFT 0.20 s."""
    fakes: list[dict[str, Any]] = [
        {"send_at_s": [0.1], "tokens": [8]},
        {"fail": "empty"},
        {"send_at_s": [0.3], "tokens": [8]},
        {"fail": "empty"},
    ]
    for i, fake in enumerate(fakes):
        fake["key"] = f"r{i}"
    answers, _ = _run(server, fakes)
    kinds = Counter((answer.status, answer.error_kind) for answer in answers.values())
    assert kinds == {("ok", None): 2, ("error", "empty"): 2}
    ttft = {
        name: answer.first_token_s - answer.sent_s
        for name, answer in answers.items()
        if answer.first_token_s is not None and answer.sent_s is not None
    }
    # What the server did is the truth: it is never early, but late on a busy machine.
    truth = {r["key"]: r["sent_s"][0] - r["received_s"] for r in server.records() if r["sent_s"]}
    assert list(ttft) == sorted(truth) == ["r0", "r2"]
    assert ttft["r0"] >= truth["r0"] >= 0.10
    assert ttft["r2"] >= truth["r2"] >= 0.30
    assert sum(ttft.values()) / 2 == pytest.approx(sum(truth.values()) / 2, abs=0.1)


def test_b17_a_cut_stream_fails_and_its_text_is_kept(server: FakeServer) -> None:
    """Two content chunks, then the connection closes, or nothing more comes: truncated, stalled."""
    tokens = {"text": ["one ", "two "], "tokens": [1, 1, 1], "fail_at": 2}
    answers, _ = _run(server, [{"fail": "cut", **tokens}, {"fail": "hang", **tokens}], stall_timeout_s=0.4)
    assert {(a.status, a.error_kind) for a in answers.values()} == {
        ("error", "truncated"),
        ("timeout", "stalled"),
    }
    assert {answer.output_text for answer in answers.values()} == {"one two "}
    assert {answer.finish_reason for answer in answers.values()} == {None}


def test_b10_without_usage_there_is_no_count(server: FakeServer) -> None:
    """Five chunks and [DONE], no usage and no ids: a success whose tokens are unknown, not 5 and not 0."""
    answers, _ = _run(server, [{"num_chunks": 5, "gap_s": 0.002, "usage": "never", "token_ids": "never"}])
    answer = answers["r0"]
    assert (answer.status, answer.num_output_tokens) == ("ok", None)
    assert [tokens for _, tokens in answer.chunks] == [None] * 5
    assert answer.num_first_chunk_tokens is None


def test_b11_usage_is_believed(server: FakeServer) -> None:
    """Usage says 400 where the text has 4 words: 400."""
    answers, _ = _run(server, [{"num_chunks": 1, "completion_tokens": 400}])
    assert answers["r0"].num_output_tokens == 400


@pytest.mark.parametrize("path", [_CHAT, _COMPLETIONS])
@pytest.mark.parametrize(
    "fake",
    [
        {"framing": "close"},
        {"framing": "length"},
        {"framing": "close", "final_blank": False},
        {"newline": "\r\n"},
        {"data_space": False},
        {"comments": True},
        {"bytes_per_send": 1},
        {"bytes_per_send": 3, "newline": "\r\n", "comments": True},
        {"role_s": None},
        {"finish_s": 0.03},
        {"done": False},
        {"finish_reason": None},
    ],
)
def test_b30_every_legal_framing_gives_the_same_answer(
    server: FakeServer, fake: dict[str, Any], path: str
) -> None:
    """Split UTF-8, CRLF, comments, no space, no last blank line, any end of the body; success needs a finish
    reason or [DONE] (I6), not both."""
    plain = {"num_chunks": 3, "gap_s": 0.004, "text": ["né", "✓ 思考 ", "ok"]}
    answers, _ = _run(server, [plain, {**plain, **fake}], path=path)
    first, second = answers["r0"], answers["r1"]
    assert (second.status, second.error) == ("ok", None)
    for name in ("output_text", "output_token_ids", "num_output_tokens", "num_first_chunk_tokens"):
        assert getattr(first, name) == getattr(second, name)
    assert second.output_text == "né✓ 思考 ok"
    assert [tokens for _, tokens in second.chunks] == [4, 4, 4]


def test_a_server_that_dies_ends_the_cell_with_a_row_for_everyone(server: FakeServer) -> None:
    """It dies in the fifth answer: those in flight were cut, the rest are skipped (server_down), not sent."""
    fakes: list[dict[str, Any]] = [{"num_chunks": 8, "gap_s": 0.02} for _ in range(12)]
    fakes[4] = {"num_chunks": 8, "gap_s": 0.02, "fail": "die"}
    answers, _ = _run(server, fakes, concurrency=4, stall_timeout_s=2)
    kinds = Counter(answer.error_kind for answer in answers.values())
    assert [answers[f"r{i}"].status for i in range(4)] == ["ok"] * 4
    assert answers["r4"].error_kind in ("truncated", "disconnected")
    assert set(kinds) <= {None, "truncated", "disconnected", "connect", "server_down"}
    assert kinds["server_down"] >= 3
    skipped = [answer for answer in answers.values() if answer.error_kind == "server_down"]
    assert all(answer.sent_s is None and answer.first_token_s is None for answer in skipped)


def test_a_port_where_nothing_listens_is_a_connect_error() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        client = Client(f"http://127.0.0.1:{held.getsockname()[1]}", clock=time.perf_counter)
        answers, _ = client.run(ClosedLoop(_jobs([{}, {}, {}]), 2), on_done=lambda answer: None)
    assert [(answer.status, answer.error_kind) for answer in answers] == [("error", "connect")] * 3


def test_a_server_restarted_between_requests_only_costs_those_in_flight(server: FakeServer) -> None:
    """A request of 0.4 s every 0.5 s; the server is replaced after 2.2 s: kept connections die with the old
    one, later requests reach the new one."""
    jobs = _jobs([{"num_chunks": 3, "gap_s": 0.2}] * 12)

    def restart() -> None:
        time.sleep(2.2)
        server.start()

    thread = threading.Thread(target=restart)
    client = Client(server.url, clock=time.perf_counter)
    thread.start()
    answers, _ = client.run(OpenLoop(jobs, [0.5 * i for i in range(12)]), on_done=lambda answer: None)
    thread.join()
    rows = {answer.request_id: answer for answer in answers}
    for i in (0, 1, 2, 10, 11):
        assert (rows[f"r{i}"].status, rows[f"r{i}"].error) == ("ok", None)
    failed = {answer.error_kind for answer in answers if answer.status != "ok"}
    assert failed
    assert failed <= {"truncated", "disconnected", "connect"}


def test_a_hang_is_over_after_the_stall_limit(server: FakeServer) -> None:
    """No byte for 1.6 s ends one request; one that goes on slowly, a chunk every 1.2 s, does not stall."""
    fakes: list[dict[str, Any]] = [
        {"key": "hangs", "fail": "hang"},
        {"key": "slow", "send_at_s": [1.2, 2.4, 3.6], "tokens": [1, 1, 1]},
    ]
    answers, _ = _run(server, fakes, stall_timeout_s=1.6)
    assert (answers["r0"].status, answers["r0"].error_kind) == ("timeout", "stalled")
    assert answers["r1"].status == "ok"
    # By the server's stamps: left no sooner than the limit after its last byte, and before the slow one ends.
    records = {record["key"]: record for record in server.records()}
    assert records["hangs"]["ended"] == "client_left"
    assert records["hangs"]["end_s"] - records["hangs"]["sent_s"][-1] >= 1.6
    assert records["hangs"]["end_s"] < records["slow"]["end_s"]


def test_a_request_that_drips_for_ever_meets_the_request_limit(server: FakeServer) -> None:
    fakes = [{"num_chunks": 1000, "gap_s": 0.02}, {"num_chunks": 5, "gap_s": 0.02}]
    answers, _ = _run(server, fakes, request_timeout_s=2.0, within_s=10)
    assert (answers["r0"].status, answers["r0"].error_kind) == ("timeout", "request_timeout")
    assert answers["r0"].chunks
    assert answers["r1"].status == "ok"
    # The server saw the client leave: nothing goes on generating behind the next cell's back.
    deadline = time.monotonic() + 10
    while b'running{engine="0",model_name="fake-model"} 0.0' not in server.call("GET", "/metrics"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert server.records()[0]["ended"] == "client_left"


def test_the_cell_deadline_keeps_cancelled_requests_visible(server: FakeServer) -> None:
    """Ten requests of 1.2 s, two at a time, deadline 2 s: two ok, two cancelled in flight, six not sent."""
    fakes = [{"send_at_s": [0.4, 1.2], "tokens": [1, 1]} for _ in range(10)]
    answers, _ = _run(server, fakes, concurrency=2, deadline_s=2.0, within_s=5.5)  # all ten would take 6 s
    kinds = Counter((answer.status, answer.error_kind) for answer in answers.values())
    assert kinds == {("ok", None): 2, ("cancelled", "deadline"): 8}
    assert sum(answer.sent_s is None for answer in answers.values()) == 6
    assert [record["ended"] for record in server.records()].count("client_left") == 2


def test_a_full_queue_answers_429_and_nobody_tries_again() -> None:
    """Two at a time allowed, eight sent at a time: refusals are rows, the server saw each request once."""
    with FakeServer(max_in_flight=2) as server:
        answers, _ = _run(server, [{"num_chunks": 4, "gap_s": 0.02}] * 16, concurrency=8)
        records = server.records()
    kinds = Counter(answer.error_kind for answer in answers.values())
    assert set(kinds) == {None, "http_429"}
    assert kinds[None] >= 2
    assert len(records) == 16


def test_b38_a_wrong_model_name_is_refused_by_an_honest_server(server: FakeServer) -> None:
    body = json.loads(_body(_CHAT))
    body["model"] = "other"
    job = Job(request_id="r0", path=_CHAT, body=json.dumps(body).encode())
    client = Client(server.url, clock=time.perf_counter)
    (answer,), _ = client.run(ClosedLoop([job], 1), on_done=lambda answer: None)
    assert (answer.status, answer.error_kind) == ("error", "http_404")


def test_the_api_key_is_sent_and_never_told() -> None:
    """Right key: ok. Wrong key: http_401, and neither the error nor any repr shows it."""
    with FakeServer(api_key="right-horse") as server:
        told = []
        for key in ("right-horse", "wrong-staple"):
            client = Client(server.url, api_key=key, clock=time.perf_counter)
            (answer,), facts = client.run(ClosedLoop(_jobs([{}]), 1), on_done=lambda answer: None)
            told.append(f"{answer!r} {facts!r} {client!r}")
            assert answer.error_kind == (None if key == "right-horse" else "http_401")
    assert "horse" not in told[0]
    assert "staple" not in told[1]


@pytest.mark.parametrize("flavour", ["detailed", "sglang", "llamacpp"])
def test_acceptance_is_read_in_every_dialect(server: FakeServer, flavour: str) -> None:
    """First chunk 4 tokens, then 4, 2, 1 with K = 3: 3 steps, accepted 3 + 1 + 0."""
    fake = {"tokens": [4, 4, 2, 1], "gap_s": 0.002, "num_speculative_tokens": 3, "acceptance": flavour}
    answers, _ = _run(server, [fake])
    acceptance = answers["r0"].acceptance
    assert acceptance is not None
    assert acceptance.source == {"detailed": "vllm"}.get(flavour, flavour)
    if flavour == "detailed":
        assert list(acceptance.histogram or []) == [1, 1, 0, 1]
        assert list(acceptance.per_step_accepted or []) == [3, 1, 0]
        assert list(acceptance.per_step_drafted or []) == [3, 3, 3]
    if flavour != "sglang":
        assert (acceptance.num_draft_tokens, acceptance.num_accepted_tokens) == (9, 4)
    if flavour != "llamacpp":
        assert acceptance.num_drafts == 3
