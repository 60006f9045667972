"""The streaming client of OpenAI-compatible servers: many requests, one thread, times that can be trusted.

An own event loop over non-blocking sockets. While streams run, the loop only receives, reads the clock and
looks for the end of the body; events are read (`responses`) when nothing is ready, so that one stream's JSON
never delays another stream's time stamp. No request is sent twice, for any reason. Knows no plans and no
tables.

Error kinds of an `Answer`: `connect`, `disconnected` (closed before any token), `truncated` (tokens came, but
no finish reason and no ``[DONE]``), `stalled` (no bytes for the stall limit), `deadline`, `request_timeout`,
`http_NNN`, `server_error` (in the body), `garbage` (not HTTP, not an event stream, not JSON), `empty` (no
token in any channel), `server_down` (not sent: the server is gone).
"""

from __future__ import annotations

import contextlib
import errno
import gc
import heapq
import http.client
import math
import os
import select
import socket
import ssl
import time
import urllib.parse
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from specnb.engines.bodies import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    BodyOptions,
    chat_body,
    completions_body,
    sampling_fields,
)
from specnb.engines.responses import Acceptance, Answer, AnswerReader, Failure, error_text
from specnb.engines.sse import FramingError
from specnb.errors import EngineError, PlanError
from specnb.load import Job, Schedule, ScheduledJob

__all__ = [
    "CHAT_PATH",
    "COMPLETIONS_PATH",
    "LAG_LIMIT_S",
    "Acceptance",
    "Answer",
    "BodyOptions",
    "Client",
    "ClientFacts",
    "Job",
    "ServerAddress",
    "chat_body",
    "completions_body",
    "fetch",
    "sampling_fields",
    "server_address",
]

LAG_LIMIT_S: Final = 0.010
READ_BYTES: Final = 65536
MAX_HEAD_BYTES: Final = 65536
BEAT_S: Final = 0.050  # the loop looks at limits and at its own lateness this often
ALIVE_EVERY_S: Final = 0.25
HOLD_OFF_S: Final = 0.10  # no new request for so long after a lost connection, to learn if the server died
IDLE_S: Final = 0.002  # nothing ready for so long: time to read events
SLICE_S: Final = 0.00025  # reading goes on for so long before the loop looks at its sockets again
LAZY_BYTES: Final = 16_384  # unread bytes that are not worth waking up for
MAX_UNREAD_BYTES: Final = 32 * 2**20
MAX_UNREAD_ANSWERS: Final = 256
GRACE_S: Final = 0.25  # from [DONE] to the end of the body
KEEP_ALIVE_S: Final = (
    1.0  # an idle connection is not used again later than this: servers close them after 5 s
)
STARTS_PER_TURN: Final = 32
SPARE_DESCRIPTORS: Final = 64
DEAD_GRACE_S: Final = 2.0  # from the server's death to giving up connections that did not notice

_IN: Final = 1  # EPOLLIN and POLLIN
_OUT: Final = 4  # EPOLLOUT and POLLOUT
_LAST_CHUNK: Final = b"0\r\n\r\n"
_WOULD_BLOCK: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


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
class ClientFacts:
    """How well the client kept up, in one `Client.run`.

    Parameters
    ----------
    loop_lag_p99_s, loop_lag_max_s
        How late the loop was: time from a readiness return to the end of that turn, and lateness of its own
        50 ms beat; the larger of the two. None if the loop never turned.
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


def server_address(url: str) -> ServerAddress:
    """The address in a server's URL: ``http://host:port``, with or without ``/v1`` or a path before it.

    Raises
    ------
    PlanError
        The scheme is not http or https, the host or port is missing or wrong, or the URL holds a user, a
        query or a fragment.
    """
    try:
        parts = urllib.parse.urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise PlanError(f"url: {_without_user(url)!r} is not a URL ({error})") from error
    if parts.scheme not in ("http", "https"):
        raise PlanError(f"url: {_without_user(url)!r} must start with http:// or https://")
    if parts.username is not None or parts.password is not None:
        raise PlanError(f"url: {_without_user(url)!r} must not hold a user or key; set the key's variable")
    if not parts.hostname:
        raise PlanError(f"url: {url!r} names no host")
    if parts.query or parts.fragment:
        raise PlanError(f"url: {url!r} must not hold a query or fragment")
    if port == 0:
        raise PlanError(f"url: {url!r} names port 0; use the port the server listens on")
    return ServerAddress(
        scheme=parts.scheme,
        host=parts.hostname,
        port=port or (443 if parts.scheme == "https" else 80),
        prefix=parts.path.rstrip("/").removesuffix("/v1").rstrip("/"),
    )


def _without_user(url: str) -> str:
    scheme, mark, rest = url.strip().partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


def fetch(
    url: str,
    path: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    timeout_s: float,
    api_key: str | None = None,
) -> tuple[int, bytes]:
    """One plain blocking call, for ``/health``, ``/v1/models`` and ``/metrics``: HTTP status and body.

    Up to three redirects on the same server are followed.

    Raises
    ------
    PlanError
        The URL is malformed.
    EngineError
        The server can't be reached, does not answer in `timeout_s` seconds, or answers no HTTP.
    """
    address = server_address(url)
    headers = {"Accept": "*/*"}
    if api_key:
        headers["Authorization"] = f"Bearer {_checked_key(api_key)}"
    if body is not None:
        headers["Content-Type"] = "application/json"
    for _ in range(4):
        connection = (
            http.client.HTTPSConnection(address.host, address.port, timeout=timeout_s)
            if address.scheme == "https"
            else http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
        )
        with contextlib.closing(connection):
            try:
                connection.request(method, address.prefix + path, body=body, headers=headers)
                response = connection.getresponse()
                content = response.read()
            except TimeoutError as error:
                raise EngineError(
                    f"{address.netloc}{path}: no answer within {timeout_s:g} s; is the server up?"
                ) from error
            except OSError as error:
                raise EngineError(
                    f"{address.netloc}{path}: can't be reached ({_os_reason(error)}); is the server up?"
                ) from error
            except http.client.HTTPException as error:
                raise EngineError(
                    f"{address.netloc}{path}: the answer is not HTTP ({type(error).__name__})"
                ) from error
        target = response.getheader("Location")
        if response.status not in (301, 302, 307, 308) or target is None:
            break
        there = urllib.parse.urlsplit(
            urllib.parse.urljoin(f"{address.scheme}://{address.netloc}{path}", target)
        )
        if there.hostname != address.host or (there.port or address.port) != address.port:
            break
        path = there.path + (f"?{there.query}" if there.query else "")
        address = ServerAddress(scheme=address.scheme, host=address.host, port=address.port)
    return response.status, content


def _checked_key(api_key: str) -> str:
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise PlanError("engine.api_key_env: the key holds spaces, line ends or non-ASCII characters")
    return api_key


def _os_reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message}"
    return error.strerror or str(error) or type(error).__name__


class Client:
    """Sends the jobs of a schedule to one server and times what comes back.

    Parameters
    ----------
    url
        The server's address, see `server_address`.
    api_key
        Sent in the Authorization header and kept out of every message.
    clock
        Seconds, monotonic; all times of all answers are read from it.
    connect_timeout_s
        Limit on connecting and on the TLS handshake.
    stall_timeout_s
        Limit on the time without any byte from the server, queueing included.
    request_timeout_s
        Limit on a whole request from `sent_s`; None for none.
    tls
        TLS settings of https; the system's certificates by default.

    Raises
    ------
    PlanError
        The URL or the key is malformed.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        connect_timeout_s: float = 10.0,
        stall_timeout_s: float = 120.0,
        request_timeout_s: float | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.address = server_address(url)
        self.clock = clock
        self.connect_timeout_s = connect_timeout_s
        self.stall_timeout_s = stall_timeout_s
        self.request_timeout_s = request_timeout_s
        self._key = _checked_key(api_key) if api_key else None
        self._tls = tls

    def __repr__(self) -> str:
        return f"Client({self.address.scheme}://{self.address.netloc}{self.address.prefix})"

    def run(
        self,
        schedule: Schedule,
        *,
        on_done: Callable[[Answer], None] = lambda answer: None,
        deadline_s: float | None = None,
        is_alive: Callable[[], bool] | None = None,
    ) -> tuple[list[Answer], ClientFacts]:
        """Sends every job of the schedule once and waits for all answers.

        Parameters
        ----------
        schedule
            What to send when; it is used up.
        on_done
            Called with each answer, failures too, when it has been read (which may be later than it ended).
        deadline_s
            A time on `clock`: what is unfinished then ends as `cancelled` with error kind `deadline`.
        is_alive
            Whether the server still exists; cheap, asked four times a second and after a lost connection.
            Once false, jobs that were not sent get `server_down`.

        Returns
        -------
        list of Answer, ClientFacts
            One answer a job, in the schedule's order, and how well the client kept up.

        Raises
        ------
        EngineError
            The host's name can't be resolved, or the process may not open enough connections.
        """
        run = _Run(self, schedule, on_done=on_done, deadline_s=deadline_s, is_alive=is_alive)
        was_enabled = gc.isenabled()
        gc.disable()  # a collection of a large heap would delay every time stamp of that turn
        try:
            return run.all()
        finally:
            run.close()
            if was_enabled:
                gc.enable()

    def _context(self) -> ssl.SSLContext | None:
        if self.address.scheme != "https":
            return None
        return self._tls or ssl.create_default_context()

    def _head(self, job: Job) -> bytes:
        address = self.address
        default = 443 if address.scheme == "https" else 80
        host = address.netloc if address.port != default else address.netloc.rpartition(":")[0]
        key = f"Authorization: Bearer {self._key}\r\n" if self._key else ""
        return (
            f"POST {address.prefix}{job.path} HTTP/1.1\r\nHost: {host}\r\n{key}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
            f"Content-Length: {len(job.body)}\r\n\r\n"
        ).encode()

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


class _Exchange:
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
        self.connection: _Connection | None = None


class _Connection:
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
        "sock",
        "tls",
    )

    def __init__(self, sock: socket.socket, *, address: int) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.address = address
        self.tls = False
        self.connected = False
        self.broken: OSError | None = None
        self.ready = False  # connected, and the TLS handshake is over
        self.persistent = True
        self.exchange: _Exchange | None = None
        self.fast: list[tuple[float, bytes]] | None = None
        self.out = memoryview(b"")
        self.mask = 0
        self.idle_s = 0.0


@dataclass(slots=True)
class _Lag:
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


class _Run:
    """One `Client.run`: the loop and its state."""

    def __init__(
        self,
        client: Client,
        schedule: Schedule,
        *,
        on_done: Callable[[Answer], None],
        deadline_s: float | None,
        is_alive: Callable[[], bool] | None,
    ) -> None:
        self.client = client
        self.clock = client.clock
        self.schedule = schedule
        self.on_done = on_done
        self.deadline_s = deadline_s
        self.is_alive = is_alive
        self.context = client._context()
        self.connections: dict[int, _Connection] = {}
        self.idle: list[_Connection] = []
        self.active: dict[int, _Exchange] = {}
        self.unread: deque[_Exchange] = deque()  # over, but not read to the end
        self.unread_bytes = 0
        self.answers: dict[int, Answer] = {}
        self.num_taken = 0
        self.num_in_flight = 0
        self.max_in_flight = 0
        self.num_chunks = 0
        self.timers: list[tuple[float, int, _Exchange]] = []
        self.changed = False
        self.dead_s: float | None = None
        self.next_alive_s = 0.0
        self.next_beat_s = 0.0
        self.hold_off_s = -math.inf
        self.out_of_descriptors = False
        self.lag = _Lag()
        self.addresses: Sequence[tuple[Any, ...]] = ()
        self.poller = select.epoll() if hasattr(select, "epoll") else select.poll()

    def close(self) -> None:
        """Closes every socket."""
        for connection in list(self.connections.values()):
            self.drop(connection)
        if hasattr(self.poller, "close"):
            self.poller.close()

    def all(self) -> tuple[list[Answer], ClientFacts]:
        """Runs the loop to its end."""
        self.ask_descriptors()
        self.addresses = self.resolve()
        now_s = self.clock()
        self.schedule.start(now_s)
        self.next_beat_s = now_s + BEAT_S
        self.next_alive_s = now_s
        self.loop(now_s)
        while self.unread:
            self.read_some(math.inf)
        p99_s, max_s = self.lag.quantiles()
        facts = ClientFacts(
            loop_lag_p99_s=p99_s,
            loop_lag_max_s=max_s,
            max_in_flight=self.max_in_flight,
            num_chunks=self.num_chunks,
            limited=self.limits(p99_s),
        )
        return [self.answers[index] for index in sorted(self.answers)], facts

    def limits(self, lag_p99_s: float | None) -> tuple[str, ...]:
        """Why the figures may be the client's own."""
        reasons = []
        if lag_p99_s is not None and lag_p99_s > LAG_LIMIT_S:
            reasons.append(
                f"loop lag P99 {lag_p99_s * 1e3:.1f} ms is over {LAG_LIMIT_S * 1e3:.0f} ms: "
                "the client could not keep up"
            )
        wanted = self.schedule.wanted_in_flight
        if wanted is not None and self.max_in_flight < wanted:
            reasons.append(f"at most {self.max_in_flight} of {wanted} requests were in flight")
        if self.out_of_descriptors:
            reasons.append("the process ran out of file descriptors")
        return tuple(reasons)

    def ask_descriptors(self) -> None:
        """Raises the limit on open files to the hard limit, and EngineError if that is too low."""
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                soft = hard
            except (OSError, ValueError):
                pass  # macOS refuses an infinite soft limit; the check below still holds
        cap = self.schedule.max_in_flight
        wanted = min(cap, self.schedule.num_jobs) if cap is not None else 0
        folder = "/proc/self/fd"
        in_use = len(os.listdir(folder)) if os.path.isdir(folder) else SPARE_DESCRIPTORS
        needed = wanted + in_use + SPARE_DESCRIPTORS
        if soft != resource.RLIM_INFINITY and needed > soft:
            raise EngineError(
                f"load.concurrency: {wanted} connections need {needed} open files, the limit is {soft}; "
                "raise the hard limit (ulimit -Hn) or lower the concurrency"
            )

    def resolve(self) -> list[tuple[Any, ...]]:
        """Socket addresses of the server, best first."""
        address = self.client.address
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise EngineError(
                f"{address.netloc}: the name can't be resolved ({_os_reason(error)})"
            ) from error
        return list(dict.fromkeys(found))

    # The loop

    def loop(self, now_s: float) -> None:
        """Turns until every job is over."""
        clock, connections = self.clock, self.connections
        poll, selectable = self.poller.poll, self.poller
        per_second = 1.0 if hasattr(select, "epoll") else 1e3
        late = self.lag.turns_s.append
        eager = False  # nothing was ready at the last look, and there is more to read
        wake_s = self.turn(now_s)
        while wake_s is not None:
            timeout_s = wake_s - now_s
            if self.unread or self.unread_bytes > LAZY_BYTES:
                if self.unread_bytes > MAX_UNREAD_BYTES or len(self.unread) > MAX_UNREAD_ANSWERS:
                    self.read_some(now_s + SLICE_S)
                    timeout_s = 0.0
                else:
                    timeout_s = min(timeout_s, 0.0 if eager else IDLE_S)
            if timeout_s <= 0.0:
                events = poll(0)
            elif timeout_s < 0.002 and per_second == 1.0 and selectable.fileno() < 1024:
                select.select((selectable,), (), (), timeout_s)  # poll counts in milliseconds
                events = poll(0)
            else:
                events = poll(math.floor(timeout_s * 1e3) * 1e-3 * per_second)
            turn_s = now_s = clock()
            unread_bytes = 0
            for fd, mask in events:
                connection = connections.get(fd)
                if connection is None:
                    continue
                pieces = connection.fast
                if pieces is None:
                    now_s = self.on_ready(connection, mask)
                    continue
                try:
                    data = connection.sock.recv(READ_BYTES)
                except BlockingIOError:
                    continue
                except OSError as error:
                    now_s = clock()
                    self.lost(connection, now_s, error)
                    continue
                now_s = clock()
                if not data:
                    self.lost(connection, now_s, None)
                    continue
                pieces.append((now_s, data))
                size = len(data)
                unread_bytes += size
                if size < 8 or data.endswith(_LAST_CHUNK):
                    self.maybe_over(connection, now_s)
            self.unread_bytes += unread_bytes
            if events:
                eager = False
                late(now_s - turn_s)
            elif self.unread_bytes:
                eager = self.read_some(now_s + SLICE_S)
                now_s = clock()
            if now_s >= wake_s or self.changed:
                wake_s = self.turn(now_s)
                now_s = clock()

    def turn(self, now_s: float) -> float | None:
        """Does what is due now; when to come back, or None if all is over."""
        self.changed = False
        if now_s >= self.next_beat_s:
            self.lag.beats_s.append(now_s - self.next_beat_s)
            self.next_beat_s = now_s + BEAT_S
        if now_s >= self.next_alive_s:
            self.ask_alive(now_s)
        if self.deadline_s is not None and now_s >= self.deadline_s:
            self.stop_all(now_s)
        while self.timers and self.timers[0][0] <= now_s:
            self.expire(heapq.heappop(self.timers)[2], now_s)
        wake_s = self.next_beat_s
        if now_s >= self.hold_off_s:
            for _ in range(STARTS_PER_TURN):
                scheduled = self.schedule.take(now_s)
                if scheduled is None:
                    break
                self.begin(scheduled, now_s)
            due_s = self.schedule.next_due_s()
            if due_s is not None:
                wake_s = min(wake_s, due_s)
        else:
            wake_s = min(wake_s, self.hold_off_s)
        if self.timers:
            wake_s = min(wake_s, self.timers[0][0])
        if self.deadline_s is not None:
            wake_s = min(wake_s, self.deadline_s)
        if not self.active and self.num_taken == self.schedule.num_jobs:
            return None
        return wake_s

    def ask_alive(self, now_s: float) -> None:
        """Asks whether the server lives; once it does not, nothing more is sent."""
        self.next_alive_s = now_s + ALIVE_EVERY_S
        if self.is_alive is None:
            return
        if self.dead_s is None:
            if self.is_alive():
                return
            self.dead_s = now_s
            failure = Failure(status="error", kind="server_down", message="not sent: the server is gone")
            self.give_up(now_s, failure)
        elif now_s >= self.dead_s + DEAD_GRACE_S:
            for exchange in list(self.active.values()):
                self.abandon(exchange, now_s, None if exchange.reader else _NO_ANSWER)

    def stop_all(self, now_s: float) -> None:
        """The deadline: ends what is on its way and what was not sent."""
        failure = Failure(status="cancelled", kind="deadline", message="the cell's time limit was reached")
        self.give_up(now_s, failure)
        for exchange in list(self.active.values()):
            self.abandon(exchange, now_s, failure)

    def give_up(self, now_s: float, failure: Failure) -> None:
        """Ends the jobs that were not sent."""
        for scheduled in self.schedule.give_up(now_s):
            exchange = _Exchange(scheduled, self.num_taken, now_s)
            self.num_taken += 1
            exchange.failure = failure
            self.unread.append(exchange)

    def expire(self, exchange: _Exchange, now_s: float) -> None:
        """Ends a request that is over one of its limits, or looks again later."""
        if exchange.over:
            return
        client = self.client
        if exchange.sent_s is None:
            limit_s = exchange.limit_s
            if now_s >= limit_s:
                message = f"no connection within {client.connect_timeout_s:g} s"
                self.abandon(exchange, now_s, Failure(status="error", kind="connect", message=message))
                self.suspect(now_s)
                return
        else:
            last_s = exchange.pieces[-1][0] if exchange.pieces else exchange.last_s
            limit_s = last_s + client.stall_timeout_s
            if exchange.done_s is not None and now_s >= exchange.done_s + GRACE_S:
                self.abandon(exchange, now_s, None)
                return
            if now_s >= limit_s:
                message = f"no bytes for {client.stall_timeout_s:g} s"
                self.abandon(exchange, now_s, Failure(status="timeout", kind="stalled", message=message))
                return
            if client.request_timeout_s is not None:
                end_s = exchange.sent_s + client.request_timeout_s
                if now_s >= end_s:
                    message = f"not finished within {client.request_timeout_s:g} s"
                    failure = Failure(status="timeout", kind="request_timeout", message=message)
                    self.abandon(exchange, now_s, failure)
                    return
                limit_s = min(limit_s, end_s)
            if exchange.done_s is not None:
                limit_s = min(limit_s, exchange.done_s + GRACE_S)
        heapq.heappush(self.timers, (limit_s, exchange.index, exchange))

    # One request

    def begin(self, scheduled: ScheduledJob, now_s: float) -> None:
        """Starts one request on an idle connection or a new one."""
        exchange = _Exchange(scheduled, self.num_taken, now_s)
        exchange.limit_s = now_s + self.client.connect_timeout_s
        self.num_taken += 1
        self.active[exchange.index] = exchange
        connection = self.reusable(now_s)
        if connection is None:
            self.connect(exchange, 0)
        else:
            self.send(connection, exchange)
        if not exchange.over:
            self.expire(exchange, now_s)  # sets its timer

    def reusable(self, now_s: float) -> _Connection | None:
        """An idle connection that the server has not closed."""
        while self.idle:
            connection = self.idle.pop()
            if connection.fd < 0:
                continue  # closed while idle
            if now_s - connection.idle_s <= KEEP_ALIVE_S:
                if connection.tls:
                    return connection
                try:
                    connection.sock.recv(1, socket.MSG_PEEK)
                except BlockingIOError:
                    return connection
                except OSError:
                    pass  # dropped below, as are closed ones and those with bytes that nobody asked for
            self.drop(connection)
        return None

    def connect(self, exchange: _Exchange, address: int) -> None:
        """Opens a connection to one of the server's addresses."""
        family, kind, protocol, _, where = self.addresses[address]
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            self.out_of_descriptors |= error.errno in (errno.EMFILE, errno.ENFILE)
            self.no_connection(exchange, _os_reason(error))
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(sock, address=address)
        connection.exchange = exchange
        exchange.connection = connection
        code = sock.connect_ex(where)
        self.connections[connection.fd] = connection
        self.watch(connection, _OUT)
        if code not in (0, errno.EINPROGRESS, errno.EAGAIN):
            self.refused(connection, os.strerror(code))

    def refused(self, connection: _Connection, reason: str) -> None:
        """A connection was not made: tries the server's next address, if it has one."""
        exchange = connection.exchange
        self.drop(connection)
        if exchange is None:
            return
        if connection.address + 1 < len(self.addresses):
            self.connect(exchange, connection.address + 1)
        else:
            self.no_connection(exchange, reason)

    def no_connection(self, exchange: _Exchange, reason: str) -> None:
        """Ends a request that found no server."""
        now_s = self.clock()
        message = f"no connection to {self.client.address.netloc}: {reason}"
        self.end(exchange, now_s, Failure(status="error", kind="connect", message=message))
        self.suspect(now_s)

    def suspect(self, now_s: float) -> None:
        """A connection failed: learns whether the server died before more requests are sent to it."""
        if self.is_alive is not None:
            self.hold_off_s = now_s + HOLD_OFF_S
            self.next_alive_s = now_s
            self.changed = True

    def establish(self, connection: _Connection) -> None:
        """Goes on with connecting and the TLS handshake; sends the request when both are over."""
        exchange = connection.exchange
        if exchange is None:
            self.drop(connection)
            return
        if not connection.connected:
            code = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.refused(connection, os.strerror(code))
                return
            connection.connected = True
            if len(self.addresses) > 1:
                self.addresses = [self.addresses[connection.address]]
                for other in self.connections.values():
                    other.address = 0
        if self.context is not None:
            try:
                if not connection.tls:
                    connection.sock = self.context.wrap_socket(
                        connection.sock,
                        server_hostname=self.client.address.host,
                        do_handshake_on_connect=False,
                    )
                    connection.tls = True
                connection.sock.do_handshake()  # type: ignore[attr-defined]
            except ssl.SSLWantReadError:
                self.watch(connection, _IN)
                return
            except ssl.SSLWantWriteError:
                self.watch(connection, _OUT)
                return
            except OSError as error:
                self.refused(connection, f"TLS failed, {_os_reason(error)}")
                return
        connection.ready = True
        self.send(connection, exchange)

    def send(self, connection: _Connection, exchange: _Exchange) -> None:
        """Hands the request to an open connection."""
        job = exchange.scheduled.job
        connection.exchange = exchange
        exchange.connection = connection
        connection.out = memoryview(self.client._head(job) + job.body)
        exchange.sent_s = exchange.last_s = self.clock()
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        if connection.mask == _OUT:
            self.expire_later(exchange)
        self.flush(connection)

    def expire_later(self, exchange: _Exchange) -> None:
        """Sets a timer for a request that has just got its connection."""
        limit_s = exchange.last_s + self.client.stall_timeout_s
        if self.client.request_timeout_s is not None:
            limit_s = min(limit_s, exchange.last_s + self.client.request_timeout_s)
        if limit_s < exchange.limit_s:
            heapq.heappush(self.timers, (limit_s, exchange.index, exchange))

    def flush(self, connection: _Connection) -> None:
        """Sends what is left of the request; watches for room where the socket takes no more."""
        while connection.out:
            try:
                sent = connection.sock.send(connection.out)
            except _WOULD_BLOCK:
                self.watch(connection, _IN | _OUT)
                return
            except OSError as error:
                # An answer may be waiting all the same: servers refuse long bodies before reading them.
                connection.out = memoryview(b"")
                connection.persistent = False
                connection.broken = error
                break
            connection.out = connection.out[sent:]
        self.watch(connection, _IN)

    def on_ready(self, connection: _Connection, mask: int) -> float:
        """A socket is ready and its bytes are not mere pieces of a body; the time after handling it."""
        if not connection.ready:
            self.establish(connection)
            return self.clock()
        if connection.out and mask & _OUT:
            self.flush(connection)
        if mask == _OUT:
            return self.clock()
        while True:
            try:
                data = connection.sock.recv(READ_BYTES)
            except _WOULD_BLOCK:
                return self.clock()
            except OSError as error:
                now_s = self.clock()
                self.lost(connection, now_s, error)
                return now_s
            now_s = self.clock()
            exchange = connection.exchange
            if exchange is None:
                self.drop(connection)  # idle: closed, or bytes that nobody asked for
                return now_s
            if not data:
                self.lost(connection, now_s, connection.broken)
                return now_s
            self.receive(connection, exchange, data, now_s)
            # TLS may hold bytes that the socket no longer announces.
            if not connection.tls or connection.fd < 0 or not connection.sock.pending():  # type: ignore[attr-defined]
                return now_s

    def receive(self, connection: _Connection, exchange: _Exchange, data: bytes, now_s: float) -> None:
        """Takes bytes of a response, its head included."""
        if exchange.head is not None:
            exchange.last_s = now_s
            exchange.head += data
            try:
                head = _read_head(exchange.head)
            except FramingError as error:
                failure = Failure(status="error", kind="garbage", message=str(error))
                self.abandon(exchange, now_s, failure)
                return
            if head is None:
                return
            data = bytes(exchange.head[head.size :])
            exchange.head = None
            exchange.http_status = head.status
            exchange.chunked = head.chunked
            exchange.left = head.length
            exchange.reader = AnswerReader(chunked=head.chunked, streamed=head.streamed)
            connection.persistent &= head.persistent
            if head.chunked and not connection.tls and not connection.out and head.status == 200:
                connection.fast = exchange.pieces
            if not data and exchange.left != 0:
                return
        if data:
            exchange.pieces.append((now_s, data))
            self.unread_bytes += len(data)
        if exchange.left is not None:
            exchange.left -= len(data)
            if exchange.left <= 0:
                self.finish(connection, exchange, now_s)
        elif exchange.chunked:
            if len(data) < 8 or data.endswith(_LAST_CHUNK):
                self.maybe_over(connection, now_s)
        elif data.startswith(b"data: [DONE]") or b"\ndata: [DONE]" in data:
            self.abandon(exchange, now_s, None)

    def maybe_over(self, connection: _Connection, now_s: float) -> None:
        """Ends a chunked response whose last bytes are its last chunk; a body may hold such bytes, too."""
        exchange = connection.exchange
        if exchange is None or exchange.reader is None:
            return
        tail = b""
        for _, data in reversed(exchange.pieces):
            tail = data[-7:] + tail
            if len(tail) >= 7:
                break
        if len(tail) >= 7:
            # A line that holds nothing but 0, then an empty one: no event stream has that before its end.
            over = tail.endswith(b"\r\n0\r\n\r\n")
        else:
            self.read(exchange, math.inf)
            over = exchange.reader.complete
        if over:
            self.finish(connection, exchange, now_s)

    def finish(self, connection: _Connection, exchange: _Exchange, now_s: float) -> None:
        """A response ended as HTTP says it should; its connection may serve again."""
        exchange.ended_properly = True
        self.end(exchange, now_s, None)
        if connection.persistent and not connection.out:
            connection.idle_s = now_s
            self.idle.append(connection)
        else:
            self.drop(connection)

    def lost(self, connection: _Connection, now_s: float, error: OSError | None) -> None:
        """The server closed a connection, or it broke."""
        exchange = connection.exchange
        self.drop(connection)
        if exchange is None:
            return
        failure = None
        if exchange.reader is None:
            failure = _NO_ANSWER
            if exchange.head:
                message = f"the answer's head was cut: {bytes(exchange.head[:60])!r}"
                failure = Failure(status="error", kind="disconnected", message=message)
        self.end(exchange, now_s, failure)
        if error is not None or exchange.reader is None or exchange.chunked or exchange.left is not None:
            self.suspect(now_s)

    def abandon(self, exchange: _Exchange, now_s: float, failure: Failure | None) -> None:
        """Ends a request whose connection can't be used any more."""
        connection = exchange.connection
        self.end(exchange, now_s, failure)
        if connection is not None:
            self.drop(connection)

    def end(self, exchange: _Exchange, now_s: float, failure: Failure | None) -> None:
        """A request is over; its slot is free. Reading its bytes may wait."""
        exchange.over = True
        exchange.failure = failure
        del self.active[exchange.index]
        if exchange.sent_s is not None:
            self.num_in_flight -= 1
        if exchange.connection is not None:
            exchange.connection.exchange = exchange.connection.fast = None
            exchange.connection = None
        self.unread.append(exchange)
        self.schedule.release(now_s)
        self.changed = True

    def watch(self, connection: _Connection, mask: int) -> None:
        """Says what to wait for on a connection."""
        if connection.mask == mask or connection.fd < 0:
            return
        if connection.mask:
            self.poller.modify(connection.fd, mask)
        else:
            self.poller.register(connection.fd, mask)
        connection.mask = mask

    def drop(self, connection: _Connection) -> None:
        """Closes a connection."""
        if connection.fd < 0:
            return
        del self.connections[connection.fd]
        self.poller.unregister(connection.fd)
        connection.fd = -1
        connection.fast = None
        connection.sock.close()

    # Reading what was received

    def read_some(self, until_s: float) -> bool:
        """Reads received bytes until that time, finished answers first; whether there is more to read."""
        clock = self.clock
        while self.unread:
            if not self.read(self.unread[0], until_s):
                return True
            self.answer(self.unread.popleft())
            if clock() >= until_s:
                return True
        for exchange in list(self.active.values()):
            if not exchange.pieces:
                continue
            whole = self.read(exchange, until_s)
            self.notice(exchange)
            if not whole or clock() >= until_s:
                return True
        return False

    def read(self, exchange: _Exchange, until_s: float) -> bool:
        """Reads a request's pieces until that time, at least one; whether none is left."""
        pieces, reader = exchange.pieces, exchange.reader
        if not pieces or reader is None:
            return True
        clock, feed = self.clock, reader.feed
        num_bytes = num_read = 0
        for time_s, data in pieces:
            feed(time_s, data)
            num_bytes += len(data)
            num_read += 1
            if clock() >= until_s:
                break
        exchange.last_s = pieces[num_read - 1][0]
        del pieces[:num_read]
        self.unread_bytes -= num_bytes
        return not pieces

    def notice(self, exchange: _Exchange) -> None:
        """Acts on what was read of a stream that still runs."""
        reader, connection = exchange.reader, exchange.connection
        if reader is None or connection is None or exchange.pieces:
            return
        now_s = self.clock()
        if reader.complete:
            self.finish(connection, exchange, now_s)
        elif reader.garbage is not None:
            self.abandon(exchange, now_s, None)
        elif reader.done and exchange.done_s is None:
            exchange.done_s = now_s
            heapq.heappush(self.timers, (now_s + GRACE_S, exchange.index, exchange))
            self.changed = True

    def answer(self, exchange: _Exchange) -> None:
        """Makes the answer of a request that was read to its end."""
        reader, failure = exchange.reader, exchange.failure
        fields: dict[str, Any] = {}
        if reader is not None:
            reader.close(exchange.last_s)
            status = exchange.http_status or 0
            if not 200 <= status < 300:
                if failure is None:
                    message = f"HTTP {status}: {error_text(reader.plain)}"
                    failure = Failure(status="error", kind=f"http_{status}", message=message)
            else:
                fields = reader.fields()
                failure = reader.judge(ended=exchange.ended_properly, failure=failure)
                self.num_chunks += len(reader.chunks)
        answer = Answer(
            request_id=exchange.scheduled.job.request_id,
            scheduled_s=exchange.scheduled.scheduled_s,
            sent_s=exchange.sent_s,
            http_status=exchange.http_status,
            status="ok" if failure is None else failure.status,
            error_kind=None if failure is None else failure.kind,
            error=None if failure is None else self.client._without_key(failure.message),
            **fields,
        )
        self.answers[exchange.index] = answer
        self.on_done(answer)


_NO_ANSWER: Final = Failure(
    status="error", kind="disconnected", message="the server closed the connection without an answer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """A response's head: its length in bytes, and what it says of the body."""

    size: int
    status: int
    chunked: bool
    length: int | None
    streamed: bool | None
    persistent: bool


def _read_head(data: bytearray) -> _Head | None:
    """The head of a response, interim ones skipped; None if it is not all there yet.

    Raises
    ------
    FramingError
        It is not HTTP/1.
    """
    start = 0
    while True:
        opening = bytes(data[start : start + 7])
        if opening != b"HTTP/1."[: len(opening)]:
            raise FramingError(f"the answer is not HTTP/1: {bytes(data[start : start + 40])!r}")
        end = data.find(b"\r\n\r\n", start)
        if end < 0:
            if len(data) - start > MAX_HEAD_BYTES:
                raise FramingError("the answer's head is over 64 KiB long")
            return None
        first, *lines = data[start:end].decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        code = rest[:3]
        if len(code) != 3 or not code.isdecimal():
            raise FramingError(f"the answer has no HTTP status: {first[:40]!r}")
        if code[0] != "1":
            break
        start = end + 4
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    status = int(code)
    chunked = "chunked" in headers.get("transfer-encoding", "")
    length: int | None = None
    if status in (204, 304):
        chunked, length = False, 0
    elif not chunked and "content-length" in headers:
        text = headers["content-length"]
        if not text.isdecimal():
            raise FramingError(f"the answer's content length is {text[:20]!r}")
        length = int(text)
    kind = headers.get("content-type", "")
    streamed: bool | None = None
    if not 200 <= status < 300 or "json" in kind:
        streamed = False
    elif "event-stream" in kind:
        streamed = True
    words = headers.get("connection", "")
    persistent = "close" not in words and (version != "HTTP/1.0" or "keep-alive" in words)
    return _Head(
        size=end + 4,
        status=status,
        chunked=chunked,
        length=length,
        streamed=streamed,
        persistent=persistent and (chunked or length is not None),
    )
