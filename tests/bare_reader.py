"""The least a streaming client can do: one epoll loop that stamps each read and keeps the bytes.

The yardstick for the real client's time stamps and CPU. It runs as a process of its own, reads one JSON
object from standard input and writes one to standard output, as `client_driver.py` does:

    {"port": 8000, "path": "/v1/chat/completions", "bodies": [...], "concurrency": 32}
    {"requests": [{"key", "sent_s", "chunks": [[received_s, num_tokens], ...]}, ...], "cpu_s": ...}

A closed loop over keep-alive connections; `time.perf_counter` for every stamp. Events are looked into only
after the last answer, so nothing delays a stamp but the reads before it. It trusts the server: an answer ends
with [DONE], every event with a blank line. With "keep_chunks": false it tells `first_token_s` and no chunks
(for CPU figures). Standard library only.
"""

from __future__ import annotations

import gc
import json
import select
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

_READ_BYTES = 1 << 16


class _Stream:
    __slots__ = ("number", "reads", "sent_s", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.number = -1
        self.sent_s = 0.0
        self.reads: list[tuple[float, bytes]] = []


def read_streams(
    port: int, path: str, bodies: list[bytes], concurrency: int
) -> list[tuple[float, list[tuple[float, bytes]]]]:
    """(sent_s, [(received_s, bytes), ...]) of each request, in the order of `bodies`."""
    clock = time.perf_counter
    answers: list[tuple[float, list[tuple[float, bytes]]]] = [(0.0, [])] * len(bodies)
    head = b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n" % path.encode()
    payloads = [head + b"content-length: %d\r\n\r\n%b" % (len(body), body) for body in bodies]
    epoll = select.epoll()
    streams: dict[int, _Stream] = {}
    following = 0
    for _ in range(min(concurrency, len(bodies))):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        streams[sock.fileno()] = _Stream(sock)
        epoll.register(sock.fileno(), select.EPOLLIN)

    def send_next(stream: _Stream) -> None:
        nonlocal following
        stream.number = following
        stream.reads = []
        following += 1
        stream.sent_s = clock()
        stream.sock.sendall(payloads[stream.number])

    for stream in streams.values():
        send_next(stream)
    left = len(bodies)
    while left:
        for fd, _ in epoll.poll():
            stream = streams[fd]
            data = stream.sock.recv(_READ_BYTES)
            now = clock()
            if not data:
                raise ConnectionError("the server closed a stream")
            stream.reads.append((now, data))
            if data.endswith(b"0\r\n\r\n") and b"[DONE]" in data:
                answers[stream.number] = (stream.sent_s, stream.reads)
                left -= 1
                if following < len(bodies):
                    send_next(stream)
    for stream in streams.values():
        stream.sock.close()
    epoll.close()
    return answers


def _chunks(reads: list[tuple[float, bytes]]) -> Iterator[tuple[float, int | None]]:
    """(received_s, tokens) of each event that carries tokens; an event arrives with its last byte."""
    rest = b""
    for received_s, data in reads:
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            start = event.find(b"data: {")
            if start < 0:
                continue
            value = json.loads(event[start + len(b"data: ") :])
            for choice in value["choices"]:
                if choice["delta"].get("content") or choice["delta"].get("reasoning"):
                    ids = choice.get("token_ids")
                    yield received_s, None if ids is None else len(ids)


def main() -> None:
    """Reads the order, runs it, writes the answer."""
    order: dict[str, Any] = json.load(sys.stdin)
    bodies = [json.dumps(body).encode() for body in order["bodies"]]
    gc.freeze()
    gc.disable()
    answers = read_streams(order["port"], order["path"], bodies, order["concurrency"])
    cpu_s = time.process_time()
    requests = []
    for body, (sent_s, reads) in zip(order["bodies"], answers, strict=True):
        row = {"key": body.get("fake", {}).get("key"), "sent_s": sent_s}
        if order.get("keep_chunks", True):
            row["chunks"] = list(_chunks(reads))
        else:
            row["first_token_s"] = next(_chunks(reads))[0]
        requests.append(row)
    json.dump({"requests": requests, "cpu_s": cpu_s}, sys.stdout)


if __name__ == "__main__":
    main()
