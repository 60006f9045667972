"""The streaming client against scripted servers on the loopback: times, failures, limits, keys."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from specnb.config import Sampling
from specnb.engines.openai import (
    CHAT_PATH,
    LAG_LIMIT_S,
    Answer,
    BodyOptions,
    Client,
    ClientFacts,
    chat_body,
    completions_body,
    fetch,
    server_address,
)
from specnb.errors import EngineError, PlanError
from specnb.load import ClosedLoop, Job, OpenLoop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CLOSING = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
END = b"0\r\n\r\n"

Script = Callable[[socket.socket, bytes], bool | None]


def event(content: str | None = None, *, finish: str | None = None, **top: Any) -> bytes:
    delta = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **top}).encode() + b"\n\n"


def usage(n: int) -> bytes:
    content = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": n}}
    return b"data: " + json.dumps(content).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


def answer_all(connection: socket.socket, request: bytes) -> None:
    """Two tokens, usage and a proper end."""
    connection.sendall(HEAD + chunk(event("a")))
    connection.sendall(chunk(event("b", finish="stop")) + chunk(usage(2) + DONE) + END)


class ScriptedServer:
    """A server whose every answer is a script: `script(connection, request)`, true to close afterwards."""

    def __init__(self, script: Script, *, tls: ssl.SSLContext | None = None, backlog: int = 128) -> None:
        self.script = script
        self.tls = tls
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
        self.port = self.listener.getsockname()[1]
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"
        self.threads = [threading.Thread(target=self.accept)]
        self.open: list[socket.socket] = []
        self.threads[0].start()

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.num_connections += 1
            self.open.append(connection)
            thread = threading.Thread(target=self.serve, args=(connection,))
            self.threads.append(thread)
            thread.start()

    def serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            if self.tls is not None:
                connection = self.tls.wrap_socket(connection, server_side=True)
                stack.callback(connection.close)
            while (request := receive_request(connection)) is not None:
                self.requests.append(request)
                if self.script(connection, request):
                    return

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connection in self.open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(timeout=10)
            assert not thread.is_alive()


def receive_request(connection: socket.socket) -> bytes | None:
    request = b""
    while True:
        head, mark, body = request.partition(b"\r\n\r\n")
        if mark:
            length = next(
                int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
            )
            if len(body) >= length:
                return request
        data = connection.recv(1 << 20)
        if not data:
            return None
        request += data


@pytest.fixture
def serve() -> Iterator[Callable[..., ScriptedServer]]:
    """`serve(script, ...) -> ScriptedServer`, stopped after the test."""
    servers: list[ScriptedServer] = []

    def start(script: Script, **options: Any) -> ScriptedServer:
        servers.append(ScriptedServer(script, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def jobs(n: int, body: bytes = b"{}") -> list[Job]:
    return [Job(request_id=f"r{number}", path=CHAT_PATH, body=body) for number in range(n)]


def assert_limited_by_lag_alone(facts: ClientFacts) -> None:
    """A busy machine may make the client late; it says so if its lag is over the limit, and only then."""
    assert len(facts.limited) == ((facts.loop_lag_p99_s or 0) > LAG_LIMIT_S), facts
    assert all(reason.startswith("loop lag P99 ") for reason in facts.limited)


def ask(server: ScriptedServer, n: int = 1, **options: Any) -> list[Answer]:
    """The answers of n requests, one after another."""
    answers, _ = Client(server.url, **options).run(ClosedLoop(jobs(n), 1))
    assert [answer.request_id for answer in answers] == [f"r{number}" for number in range(n)]
    return answers


# Success


def test_an_answer_has_its_times_in_order_and_its_counts(serve: Callable[..., ScriptedServer]) -> None:
    left: list[float] = []

    def script(connection: socket.socket, request: bytes) -> None:
        connection.sendall(HEAD + chunk(event("", model="m")))
        for text, finish in (("a", None), ("b", None), ("c", "stop")):
            time.sleep(0.12)
            left.append(time.perf_counter())
            connection.sendall(chunk(event(text, finish=finish)))
        time.sleep(0.12)
        left.append(time.perf_counter())
        connection.sendall(chunk(usage(3)) + chunk(DONE) + END)

    server = serve(script)
    before = time.perf_counter()
    (answer,) = ask(server)
    assert answer.status == "ok"
    assert answer.error_kind is None
    assert answer.output_text == "abc"
    assert answer.model == "m"
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (3, 3)
    assert answer.finish_reason == "stop"
    assert answer.http_status == 200
    assert answer.sent_s is not None
    assert before <= answer.scheduled_s <= answer.sent_s <= left[0]
    # Each stamp is from between its own chunk's sending and the next one's, usage being the last.
    assert len(answer.chunks) == 3
    assert all(left[i] <= stamp < left[i + 1] for i, (stamp, _) in enumerate(answer.chunks))
    assert answer.first_token_s == answer.first_answer_s == answer.chunks[0][0]
    assert answer.last_token_s == answer.chunks[2][0]


def test_every_request_is_sent_once_and_connections_are_kept(serve: Callable[..., ScriptedServer]) -> None:
    server = serve(answer_all)
    done: list[str] = []
    answers, facts = Client(server.url).run(
        ClosedLoop(jobs(40), 4), on_done=lambda answer: done.append(answer.request_id)
    )
    assert [answer.status for answer in answers] == ["ok"] * 40
    assert sorted(done) == sorted(f"r{number}" for number in range(40))
    assert len(server.requests) == 40
    assert server.num_connections <= 4
    assert facts.max_in_flight == 4
    assert facts.num_chunks == 80
    assert all(answer.sent_s is not None and answer.sent_s >= answer.scheduled_s for answer in answers)


def test_a_body_that_closes_the_connection_is_read_to_its_end(serve: Callable[..., ScriptedServer]) -> None:
    def script(connection: socket.socket, request: bytes) -> bool:
        connection.sendall(CLOSING + event("a") + event("b", finish="stop") + usage(2) + DONE)
        return True

    server = serve(script)
    answers = ask(server, 3)
    assert [(answer.status, answer.num_output_tokens) for answer in answers] == [("ok", 2)] * 3
    assert server.num_connections == 3


def test_b30_bytes_one_at_a_time_with_crlf_are_the_same_answer(
    serve: Callable[..., ScriptedServer],
) -> None:
    def script(connection: socket.socket, request: bytes) -> None:
        body = (event("é") + b": ping\n\n" + event("✓", finish="stop") + usage(2) + DONE).replace(
            b"\n", b"\r\n"
        )
        wire = b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + chunk(body[:70]) + chunk(body[70:]) + END
        for byte in wire:
            connection.sendall(bytes([byte]))

    server = serve(script)
    answers = ask(server, 2)
    assert [answer.output_text for answer in answers] == ["é✓", "é✓"]
    assert [answer.num_output_tokens for answer in answers] == [2, 2]
    assert server.num_connections == 1


def test_a_json_answer_with_a_length_is_an_answer(serve: Callable[..., ScriptedServer]) -> None:
    body = json.dumps(
        {
            "choices": [{"message": {"content": "Yes"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1},
        }
    ).encode()

    def script(connection: socket.socket, request: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body[:9])
        time.sleep(0.02)
        connection.sendall(body[9:])

    server = serve(script)
    answers = ask(server, 2)
    assert [(answer.status, answer.output_text) for answer in answers] == [("ok", "Yes")] * 2
    assert server.num_connections == 1


def test_an_end_that_comes_late_or_with_trailers_does_not_hold_the_slot_for_long(
    serve: Callable[..., ScriptedServer],
) -> None:
    ends = iter([b"", b"0\r\nX: y\r\n\r\n", END])

    def script(connection: socket.socket, request: bytes) -> None:
        connection.sendall(HEAD + chunk(event("a", finish="stop") + DONE) + next(ends))

    server = serve(script)
    before = time.perf_counter()
    answers = ask(server, 3)
    assert time.perf_counter() - before < 3
    assert [answer.status for answer in answers] == ["ok"] * 3
    assert server.num_connections == 2


def test_a_long_prompt_is_sent_whole(serve: Callable[..., ScriptedServer]) -> None:
    body = json.dumps({"prompt": "x" * (8 << 20)}).encode()
    server = serve(answer_all)
    answers, _ = Client(server.url).run(ClosedLoop(jobs(1, body), 1))
    assert answers[0].status == "ok"
    assert server.requests[0].endswith(body)


# Failures: each is one row, none is retried


def failing(kind: str) -> Script:
    def script(connection: socket.socket, request: bytes) -> bool | None:
        match kind:
            case "http_429":
                body = b'{"error":{"message":"queue full","code":429}}'
                connection.sendall(b"HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            case "http_500":
                connection.sendall(b"HTTP/1.1 500 Oops\r\nConnection: close\r\n\r\n<h1>Oops</h1>")
                return True
            case "http_400":
                body = chunk(b'{"object":"error","message":"too long"}') + END
                connection.sendall(b"HTTP/1.1 400 Bad\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
            case "disconnected":
                return True
            case "disconnected in the head":
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-")
                return True
            case "disconnected before a token":
                connection.sendall(HEAD + chunk(event("")))
                return True
            case "disconnected by a reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return True
            case "truncated":
                connection.sendall(HEAD + chunk(event("a")) + chunk(event("b")))
                return True
            case "truncated by a reset":
                connection.sendall(HEAD + chunk(event("a")) + chunk(event("b")))
                time.sleep(0.1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return True
            case "truncated with a proper end":
                connection.sendall(HEAD + chunk(event("a")) + END)
            case "truncated by closing":
                connection.sendall(CLOSING + event("a") + event("b")[:20])
                return True
            case "garbage":
                connection.sendall(b"\x16\x03\x01 hello")
                return True
            case "garbage page":
                body = b"<html>It works!</html>"
                head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n"
                connection.sendall(head % len(body) + body)
            case "garbage event":
                connection.sendall(HEAD + chunk(event("a")) + chunk(b"data: oops\n\n") + chunk(DONE) + END)
            case "garbage chunk":
                connection.sendall(HEAD + chunk(event("a")) + b"zz\r\n")
            case "server_error":
                error = b'data: {"error":{"message":"x","code":500}}\n\n'
                connection.sendall(HEAD + chunk(event("a")) + chunk(error) + chunk(DONE) + END)
            case "empty":
                connection.sendall(HEAD + chunk(event("", finish="stop") + usage(0) + DONE) + END)
            case "stalled":
                connection.sendall(HEAD + chunk(event("a")))
                connection.recv(1)
                return True
        return None

    return script


@pytest.mark.parametrize(
    ("kind", "error", "text", "http_status"),
    [
        ("http_429", "HTTP 429: queue full", None, 429),
        ("http_500", "HTTP 500: <h1>Oops</h1>", None, 500),
        ("http_400", "HTTP 400: too long", None, 400),
        ("disconnected", "the server closed the connection without an answer", None, None),
        (
            "disconnected in the head",
            "the answer's head was cut: b'HTTP/1.1 200 OK\\r\\nContent-'",
            None,
            None,
        ),
        (
            "disconnected before a token",
            "the server closed the connection before the first token",
            None,
            200,
        ),
        ("disconnected by a reset", "the server closed the connection without an answer", None, None),
        ("truncated", "the stream ended without finish_reason or [DONE]", "ab", 200),
        ("truncated by a reset", "the stream ended without finish_reason or [DONE]", "ab", 200),
        ("truncated with a proper end", "the stream ended without finish_reason or [DONE]", "a", 200),
        ("truncated by closing", "the stream ended without finish_reason or [DONE]", "a", 200),
        ("garbage", "the answer is not HTTP/1: b'\\x16\\x03\\x01 hello'", None, None),
        (
            "garbage page",
            "the body is neither an event stream nor JSON: b'<html>It works!</html>'",
            None,
            200,
        ),
        ("garbage event", "no JSON: b'oops'", "a", 200),
        ("garbage chunk", "b'zz' is not a chunk size", "a", 200),
        ("server_error", "x", "a", 200),
        ("empty", "the answer holds no token in any channel", None, 200),
        ("stalled", "no bytes for 0.3 s", "a", 200),
    ],
)
def test_b14_b15_b17_every_failure_is_a_row_with_its_kind(
    kind: str, error: str, text: str | None, http_status: int | None, serve: Callable[..., ScriptedServer]
) -> None:
    server = serve(failing(kind))
    before = time.perf_counter()
    answers = ask(server, 2, stall_timeout_s=0.3)
    assert time.perf_counter() - before < 5
    for answer in answers:
        assert answer.status == ("timeout" if kind == "stalled" else "error")
        assert answer.error_kind == kind.split(" ")[0]
        assert answer.error == error
        assert (answer.output_text or None) == text
        assert answer.http_status == http_status
        assert answer.sent_s is not None
        assert (answer.first_token_s is None) == (text is None)
        assert answer.num_output_tokens in (None, 0)
    assert len(server.requests) == 2, "a failed request must not be sent again"


def test_b15_two_answers_and_two_empty_200s(serve: Callable[..., ScriptedServer]) -> None:
    number = iter(range(4))

    def script(connection: socket.socket, request: bytes) -> bool | None:
        return (
            answer_all(connection, request)
            if next(number) % 2 == 0
            else failing("empty")(connection, request)
        )

    answers = ask(serve(script), 4)
    assert [answer.status for answer in answers] == ["ok", "error", "ok", "error"]
    assert [answer.error_kind for answer in answers] == [None, "empty", None, "empty"]


def test_a_closed_port_is_a_failed_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    answers, facts = Client(f"http://127.0.0.1:{port}").run(ClosedLoop(jobs(3), 2))
    assert [(answer.status, answer.error_kind) for answer in answers] == [("error", "connect")] * 3
    assert answers[0].error == f"no connection to 127.0.0.1:{port}: Connection refused"
    assert answers[0].sent_s is None
    assert facts.max_in_flight == 0
    assert_limited_by_lag_alone(facts)


def test_a_server_that_says_nothing_is_a_stall_and_holds_nobody_up(
    serve: Callable[..., ScriptedServer],
) -> None:
    number = iter(range(6))

    def script(connection: socket.socket, request: bytes) -> None:
        if next(number) == 0:
            connection.recv(1)
            return
        answer_all(connection, request)

    answers, _ = Client(serve(script).url, stall_timeout_s=1.6).run(ClosedLoop(jobs(6), 2))
    assert sorted(answer.status for answer in answers) == ["ok"] * 5 + ["timeout"]
    stalled = next(answer for answer in answers if answer.status == "timeout")
    assert stalled.error_kind == "stalled"
    others = [answer.last_token_s for answer in answers if answer.last_token_s is not None]
    assert stalled.sent_s is not None
    assert max(others) < stalled.sent_s + 1.6


def test_a_slow_stream_is_no_stall_but_may_be_over_its_own_limit(
    serve: Callable[..., ScriptedServer],
) -> None:
    def script(connection: socket.socket, request: bytes) -> None:
        connection.sendall(HEAD)
        for _ in range(8):
            connection.sendall(chunk(event("a")))
            time.sleep(0.3)
        connection.sendall(chunk(event("z", finish="stop")) + END)

    server = serve(script)
    assert ask(server, stall_timeout_s=1.5)[0].status == "ok"
    (late,) = ask(server, stall_timeout_s=1.5, request_timeout_s=1.05)
    assert (late.status, late.error_kind) == ("timeout", "request_timeout")
    assert late.error == "not finished within 1.05 s"
    assert late.output_text is not None
    assert 3 <= len(late.output_text) <= 5


def test_the_deadline_cancels_what_runs_and_what_was_not_sent(
    serve: Callable[..., ScriptedServer],
) -> None:
    server = serve(failing("stalled"))
    before = time.perf_counter()
    done: list[str] = []
    answers, _ = Client(server.url).run(
        ClosedLoop(jobs(5), 2), deadline_s=before + 1.5, on_done=lambda answer: done.append(answer.request_id)
    )
    assert 1.5 <= time.perf_counter() - before < 10
    assert [(answer.status, answer.error_kind) for answer in answers] == [("cancelled", "deadline")] * 5
    assert [answer.sent_s is None for answer in answers] == [False, False, True, True, True]
    assert [answer.output_text for answer in answers] == ["a", "a", None, None, None]
    assert len(done) == 5
    assert len(server.requests) == 2


def test_when_the_server_is_dead_the_rest_is_not_sent(serve: Callable[..., ScriptedServer]) -> None:
    alive = True

    def script(connection: socket.socket, request: bytes) -> bool | None:
        nonlocal alive
        if len(server.requests) <= 2:
            return answer_all(connection, request)
        alive = False
        server.listener.shutdown(socket.SHUT_RDWR)
        connection.sendall(HEAD + chunk(event("a")))
        return True

    server = serve(script)
    answers, _ = Client(server.url).run(ClosedLoop(jobs(6), 1), is_alive=lambda: alive)
    assert [answer.error_kind for answer in answers] == [None, None, "truncated", *["server_down"] * 3]
    assert [answer.status for answer in answers] == ["ok", "ok", *["error"] * 4]
    assert answers[3].error == "not sent: the server is gone"
    assert answers[3].sent_s is None
    assert len(server.requests) == 3


def test_connections_that_outlive_a_dead_server_are_given_up(serve: Callable[..., ScriptedServer]) -> None:
    server = serve(failing("stalled"))
    before = time.perf_counter()
    dies_s = before + 0.2
    answers, _ = Client(server.url).run(ClosedLoop(jobs(2), 1), is_alive=lambda: time.perf_counter() < dies_s)
    assert time.perf_counter() - before < 6
    assert [answer.error_kind for answer in answers] == ["truncated", "server_down"]


def test_a_refusal_before_the_whole_prompt_was_read_is_heard(serve: Callable[..., ScriptedServer]) -> None:
    class Impatient(ScriptedServer):
        def serve(self, connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
                while connection.recv(1 << 20):
                    pass

    server = Impatient(answer_all)
    try:
        answers, _ = Client(server.url).run(ClosedLoop(jobs(1, b"x" * (16 << 20)), 1))
    finally:
        server.close()
    assert (answers[0].error_kind, answers[0].error) == ("http_413", "HTTP 413: big")


# Load


def test_b24_an_open_loop_with_a_cap_keeps_the_due_times(serve: Callable[..., ScriptedServer]) -> None:
    # 6 requests due every 0.1 s, one at a time, service 0.4 s: mean wait 0.75 s, and never less.
    def script(connection: socket.socket, request: bytes) -> None:
        time.sleep(0.4)
        answer_all(connection, request)

    due_s = [0.1 * number for number in range(6)]
    loop = OpenLoop(jobs(6), due_s, max_in_flight=1)
    answers, facts = Client(serve(script).url).run(loop)
    service = sum(a.last_token_s - a.sent_s for a in answers if a.last_token_s and a.sent_s) / 6
    scheduled = sum(a.last_token_s - a.scheduled_s for a in answers if a.last_token_s) / 6
    wait = sum(a.sent_s - a.scheduled_s for a in answers if a.sent_s) / 6
    assert len([answer for answer in answers if answer.status == "ok"]) == 6
    assert [a.scheduled_s - answers[0].scheduled_s for a in answers] == pytest.approx(due_s)
    assert service >= 0.4
    assert wait >= 0.75
    assert scheduled == pytest.approx(service + wait)
    # A request is sent when the one before is over, and soon.
    idle_s = [
        later.sent_s - a.last_token_s
        for a, later in itertools.pairwise(answers)
        if later.sent_s and a.last_token_s
    ]
    assert len(idle_s) == 5
    assert min(idle_s) >= 0
    assert statistics.median(idle_s) < 0.1
    assert facts.max_in_flight == 1
    assert_limited_by_lag_alone(facts)


def test_an_open_loop_is_sent_when_it_is_due(serve: Callable[..., ScriptedServer]) -> None:
    due_s = [0.0, 0.042, 0.1248, 0.2932, 0.6, 0.6]
    answers, _ = Client(serve(answer_all).url).run(OpenLoop(jobs(6), due_s))
    origin_s = answers[0].scheduled_s
    assert [answer.scheduled_s - origin_s for answer in answers] == pytest.approx(due_s)
    waits = sorted(answer.sent_s - answer.scheduled_s for answer in answers if answer.sent_s is not None)
    assert waits[0] >= 0
    assert waits[2] < 0.02  # the median half is on time even on a busy machine


def test_b22_fewer_requests_in_flight_than_the_load_says_is_said() -> None:
    # A server that takes 4 connections and no more: the others never get through.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(3)
        port = listener.getsockname()[1]
        now_s = time.perf_counter()
        answers, facts = Client(f"http://127.0.0.1:{port}").run(
            ClosedLoop(jobs(64), 64), deadline_s=now_s + 0.5
        )
    assert 1 <= facts.max_in_flight < 64
    assert f"at most {facts.max_in_flight} of 64 requests were in flight" in facts.limited
    assert {answer.error_kind for answer in answers} == {"deadline"}


def test_b22_hundreds_of_streams_are_in_flight_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        now_s = time.perf_counter()
        answers, facts = Client(f"http://127.0.0.1:{port}").run(
            ClosedLoop(jobs(600), 600), deadline_s=now_s + 6
        )
    assert facts.max_in_flight == 600
    assert not any("in flight" in reason for reason in facts.limited)
    assert len(answers) == 600


def test_too_few_descriptors_are_refused_before_anything_is_sent() -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
from specnb.engines.openai import Client
from specnb.errors import EngineError
from specnb.load import ClosedLoop, Job
jobs = [Job(request_id=str(n), path="/", body=b"") for n in range(1000)]
try:
    Client("http://127.0.0.1:1").run(ClosedLoop(jobs, 1000))
except EngineError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    refusal, limits = done.stdout.splitlines()
    assert refusal.startswith("load.concurrency: 1000 connections need 10")
    assert refusal.endswith(
        "open files, the limit is 200; raise the hard limit (ulimit -Hn) or lower the concurrency"
    )
    assert limits == "(200, 200)"


def test_b23_a_client_that_is_held_up_says_so(serve: Callable[..., ScriptedServer]) -> None:
    def script(connection: socket.socket, request: bytes) -> None:
        time.sleep(0.02)
        answer_all(connection, request)

    server = serve(script)
    _, quick = Client(server.url).run(ClosedLoop(jobs(30), 2))
    assert_limited_by_lag_alone(quick)
    answers, facts = Client(server.url).run(ClosedLoop(jobs(30), 2), on_done=lambda answer: time.sleep(0.03))
    assert [answer.status for answer in answers] == ["ok"] * 30
    assert quick.loop_lag_p99_s is not None
    assert facts.loop_lag_p99_s is not None
    assert facts.loop_lag_max_s is not None
    assert quick.loop_lag_p99_s < facts.loop_lag_p99_s
    assert 0.02 < facts.loop_lag_p99_s <= facts.loop_lag_max_s
    assert facts.limited[0].startswith("loop lag P99 ")
    assert facts.limited[0].endswith(" ms is over 10 ms: the client could not keep up")


def test_an_error_in_the_callers_code_closes_every_socket(serve: Callable[..., ScriptedServer]) -> None:
    def on_done(answer: Answer) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Client(serve(answer_all).url).run(ClosedLoop(jobs(8), 4), on_done=on_done)


# Addresses, keys and TLS


@pytest.mark.parametrize(
    ("url", "scheme", "host", "port", "prefix"),
    [
        ("http://127.0.0.1:8000", "http", "127.0.0.1", 8000, ""),
        ("http://127.0.0.1:8000/", "http", "127.0.0.1", 8000, ""),
        ("http://127.0.0.1:8000/v1", "http", "127.0.0.1", 8000, ""),
        ("https://api.example/v1/", "https", "api.example", 443, ""),
        ("http://gateway/proxy/v1", "http", "gateway", 80, "/proxy"),
        ("http://[::1]:9", "http", "::1", 9, ""),
    ],
)
def test_addresses_with_and_without_v1(url: str, scheme: str, host: str, port: int, prefix: str) -> None:
    address = server_address(url)
    assert (address.scheme, address.host, address.port, address.prefix) == (scheme, host, port, prefix)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8000", "url: '127.0.0.1:8000' must start with http:// or https://"),
        ("ftp://host", "url: 'ftp://host' must start with http:// or https://"),
        ("http://", "url: 'http://' names no host"),
        ("http://host:port", "url: 'http://host:port' is not a URL"),
        ("http://host:0", "url: 'http://host:0' names port 0; use the port the server listens on"),
        ("http://host/v1?key=1", "url: 'http://host/v1?key=1' must not hold a query or fragment"),
        (
            "http://sk-secret@host",
            "url: 'http://host' must not hold a user or key; set the key's variable",
        ),
    ],
)
def test_bad_addresses_are_refused(url: str, message: str) -> None:
    with pytest.raises(PlanError) as refusal:
        server_address(url)
    assert str(refusal.value).startswith(message)
    assert "secret" not in str(refusal.value)


def test_the_key_is_in_the_header_and_nowhere_else(serve: Callable[..., ScriptedServer]) -> None:
    def script(connection: socket.socket, request: bytes) -> None:
        body = b'{"error":{"message":"Incorrect API key provided: sk-secret"}}'
        connection.sendall(b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    server = serve(script)
    client = Client(server.url + "/v1", "sk-secret")
    answers, _ = client.run(ClosedLoop(jobs(1), 1))
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"POST /v1/chat/completions HTTP/1.1"
    assert b"Authorization: Bearer sk-secret" in head.split(b"\r\n")
    assert body == b"{}"
    assert answers[0].error == "HTTP 401: Incorrect API key provided: ***"
    assert "secret" not in repr(client) + repr(vars(client)) + repr(answers)


@pytest.mark.parametrize("key", ["sk a", "sk\nX-Header: 1", "schlüssel"])
def test_a_key_that_would_break_the_header_is_refused_unseen(key: str) -> None:
    with pytest.raises(PlanError, match="the key holds spaces, line ends or non-ASCII") as refusal:
        Client("http://127.0.0.1:1", key)
    assert key not in str(refusal.value)


def test_without_a_key_there_is_no_header(serve: Callable[..., ScriptedServer]) -> None:
    server = serve(answer_all)
    ask(server)
    assert b"uthorization" not in server.requests[0]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key, crt = folder / "key.pem", folder / "crt.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(crt)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return crt, key


def test_https_streams_like_http(
    certificate: tuple[Path, Path], serve: Callable[..., ScriptedServer]
) -> None:
    def script(connection: socket.socket, request: bytes) -> None:
        connection.sendall(HEAD)
        for _ in range(50):
            connection.sendall(chunk(event("abc " * 500)))
        connection.sendall(chunk(event("z", finish="stop")) + chunk(usage(51) + DONE) + END)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server = serve(script, tls=context)
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    answers, facts = Client(server.url, tls=trusting).run(ClosedLoop(jobs(6), 2))
    assert [(answer.status, answer.num_output_tokens) for answer in answers] == [("ok", 51)] * 6
    assert [len(answer.chunks) for answer in answers] == [51] * 6
    assert server.num_connections == 2
    assert facts.num_chunks == 306


def test_a_certificate_that_nobody_vouches_for_is_refused(
    certificate: tuple[Path, Path], serve: Callable[..., ScriptedServer]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    (answer,) = ask(serve(answer_all, tls=context))
    assert answer.error_kind == "connect"
    assert answer.error is not None
    assert "TLS failed, certificate refused: self-signed certificate" in answer.error


# Bodies

GREEDY = Sampling(name="greedy", temperature=0.0, max_tokens=512)


def test_b28_every_sampling_parameter_is_sent() -> None:
    body = json.loads(
        chat_body("m", [{"role": "user", "content": "Grüß dich"}], GREEDY, max_tokens=64, seed=7)
    )
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Grüß dich"}],
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": 7,
        "max_tokens": 64,
        "max_completion_tokens": 64,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_b28_a_completion_asks_for_what_its_options_say() -> None:
    sampling = Sampling(
        name="sampled", temperature=1.0, top_p=0.95, top_k=20, max_tokens=512, ignore_eos=True
    )
    options = BodyOptions(return_token_ids=True, continuous_usage=True)
    body = json.loads(completions_body("m", "Once", sampling, max_tokens=9, seed=1, options=options))
    assert body["prompt"] == "Once"
    assert (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) == (1.0, 0.95, 20, 9)
    assert body["ignore_eos"] is True
    assert body["return_token_ids"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["min_p"] == 0.0
    assert "max_completion_tokens" not in body
    ids = json.loads(completions_body("m", [5, 6], GREEDY, max_tokens=9, seed=1))
    assert ids["prompt"] == [5, 6]
    assert "ignore_eos" not in ids
    assert "return_token_ids" not in ids


def test_the_chat_templates_arguments_are_passed_on() -> None:
    options = BodyOptions(chat_template_kwargs={"enable_thinking": False})
    body = json.loads(
        chat_body("m", [{"role": "user", "content": "x"}], GREEDY, max_tokens=1, seed=0, options=options)
    )
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


# Single calls


def replies(*answers: bytes) -> Callable[[socket.socket], None]:
    """A server thread's work: one plain answer a connection."""

    def work(listener: socket.socket) -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

    return work


def fetched(answers: Sequence[bytes], path: str, **options: Any) -> tuple[int, bytes]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=replies(*answers), args=(listener,))
        thread.start()
        try:
            return fetch(
                f"http://127.0.0.1:{listener.getsockname()[1]}/v1", path, **{"timeout_s": 5, **options}
            )
        finally:
            thread.join(timeout=10)


def test_fetch_gives_status_and_body() -> None:
    assert fetched([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"], "/health") == (200, b"ok")
    assert fetched([b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"], "/metrics") == (404, b"")


def test_a28_fetch_follows_a_redirect_on_the_same_server() -> None:
    there = b"HTTP/1.1 307 Moved\r\nLocation: /metrics/\r\nContent-Length: 0\r\n\r\n"
    here = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\na 1\n"
    assert fetched([there, here], "/metrics") == (200, b"a 1\n")
    elsewhere = b"HTTP/1.1 302 Moved\r\nLocation: http://other/metrics\r\nContent-Length: 0\r\n\r\n"
    assert fetched([elsewhere], "/metrics") == (302, b"")


def test_fetch_gives_up_after_three_redirects() -> None:
    there = b"HTTP/1.1 307 Moved\r\nLocation: /metrics/\r\nContent-Length: 0\r\n\r\n"
    here = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\na 1\n"
    assert fetched([there] * 3 + [here], "/metrics") == (200, b"a 1\n")
    with pytest.raises(EngineError, match=r":\d+/metrics: more than 3 redirects; correct the url$"):
        fetched([there] * 4, "/metrics")


def test_fetch_says_in_one_line_what_is_wrong() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(EngineError) as silent:
            fetch(f"http://127.0.0.1:{port}", "/health", timeout_s=0.2, api_key="sk-secret")
        assert str(silent.value) == f"127.0.0.1:{port}/health: no answer within 0.2 s; is the server up?"
    with pytest.raises(EngineError) as refused:
        fetch(f"http://127.0.0.1:{port}", "/health", timeout_s=5)
    assert (
        str(refused.value)
        == f"127.0.0.1:{port}/health: can't be reached (Connection refused); is the server up?"
    )
    with pytest.raises(EngineError, match=r"/health: the answer is not HTTP \(BadStatusLine\)"):
        fetched([b"hello\r\n"], "/health")


def test_a_name_that_is_none_is_said() -> None:
    with pytest.raises(EngineError, match=r"no-such-host\.invalid:80: the name can't be resolved"):
        Client("http://no-such-host.invalid").run(ClosedLoop(jobs(1), 1))
