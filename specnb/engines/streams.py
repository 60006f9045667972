"""What the client's event loop keeps: the server, its sockets, its requests, and its own lateness.

Plain state with no loop in it (`loop` moves it); separate so that each can be read at one go.
"""

from __future__ import annotations

import math
import socket
import ssl
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from specnb.engines.responses import AnswerReader, Failure
from specnb.load import Job, ScheduledJob


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Where a server listens; `prefix` comes before every path (empty, or ``/proxy``)."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @property
    def netloc(self) -> str:
        """Host and port as they stand in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server and how to talk to it: address, key, TLS, limits in seconds, and the clock of all times."""

    address: ServerAddress
    key: str | None = field(default=None, repr=False)
    context: ssl.SSLContext | None = None
    clock: Callable[[], float] = time.perf_counter
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 120.0
    request_timeout_s: float | None = None

    def request_head(self, job: Job) -> bytes:
        """Request line and headers of a job, the empty line included."""
        address = self.address
        default = 443 if address.scheme == "https" else 80
        host = address.netloc if address.port != default else address.netloc.rpartition(":")[0]
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        return (
            f"POST {address.prefix}{job.path} HTTP/1.1\r\nHost: {host}\r\n{key}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
            f"Content-Length: {len(job.body)}\r\n\r\n"
        ).encode()

    def without_key(self, text: str) -> str:
        """The text with the key blotted out: servers repeat it in their messages."""
        return text.replace(self.key, "***") if self.key else text


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFacts:
    """How well the client kept up, in one `Client.run`.

    Parameters
    ----------
    loop_lag_p99_s, loop_lag_max_s
        How late the loop was: time from a readiness return to the end of that turn, and lateness of its own
        10 ms beat; the larger of the two. None if the loop never turned.
    max_in_flight
        Most requests that were sent and not yet over at one time.
    num_chunks
        Chunks with tokens over all answers.
    limited
        Why the figures may be the client's and not the server's; empty if all is well.
    """

    loop_lag_p99_s: float | None
    loop_lag_max_s: float | None
    max_in_flight: int
    num_chunks: int
    limited: tuple[str, ...]


class Exchange:
    """One request on its way: what was wanted, what was received, and how it ended."""

    __slots__ = (
        "chunked",
        "connection",
        "done_s",
        "ended_properly",
        "failure",
        "head",
        "http_status",
        "index",
        "last_s",
        "left",
        "limit_s",
        "over",
        "pieces",
        "reader",
        "scheduled",
        "sent_s",
    )

    def __init__(self, scheduled: ScheduledJob, index: int, now_s: float) -> None:
        self.scheduled = scheduled
        self.index = index
        self.sent_s: float | None = None
        self.limit_s = now_s  # when connecting must be over
        self.last_s = now_s
        self.head: bytearray | None = bytearray()
        self.http_status: int | None = None
        self.chunked = False
        self.left: int | None = None  # bytes of a body with a content length that are still to come
        self.pieces: list[tuple[float, bytes]] = []
        self.reader: AnswerReader | None = None
        self.done_s: float | None = None
        self.failure: Failure | None = None
        self.ended_properly = False
        self.over = False
        self.connection: Connection | None = None


class Connection:
    """One socket. `fast` is the list for pieces of the current body, when nothing else must be done."""

    __slots__ = (
        "address",
        "broken",
        "connected",
        "exchange",
        "fast",
        "fd",
        "idle_s",
        "mask",
        "out",
        "persistent",
        "ready",
        "recv",
        "sock",
        "tls",
    )

    def __init__(self, sock: socket.socket, *, address: int) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.recv = sock.recv
        self.address = address
        self.tls = False
        self.connected = False
        self.broken: OSError | None = None
        self.ready = False  # connected, and the TLS handshake is over
        self.persistent = True
        self.exchange: Exchange | None = None
        self.fast: list[tuple[float, bytes]] | None = None
        self.out = memoryview(b"")
        self.mask = 0
        self.idle_s = 0.0


@dataclass(slots=True)
class Lag:
    """Lateness of the loop: seconds a turn took, and seconds its beats were late."""

    turns_s: array[float] = field(default_factory=lambda: array("d"))
    beats_s: array[float] = field(default_factory=lambda: array("d"))

    def quantiles(self) -> tuple[float | None, float | None]:
        """P99 and maximum, of turns or of beats, whichever is larger; None if there are none.

        Up to two late beats are forgiven: in a short run they would be the P99 by themselves.
        """
        p99: list[float] = []
        for values, forgiven in ((self.turns_s, 0), (self.beats_s, 2)):
            ordered = sorted(values)
            if len(ordered) > forgiven:
                p99.append(ordered[min(math.ceil(0.99 * len(ordered)), len(ordered) - forgiven) - 1])
        every = [*self.turns_s, *self.beats_s]
        return max(p99, default=None), max(every, default=None)
