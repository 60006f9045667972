"""The client's event loop: non-blocking sockets on epoll, one thread, no parsing while bytes are waiting.

A turn receives what is ready, stamps it and appends it; the body's end is found by its last bytes alone.
Events are read when nothing is ready, in slices of a tenth of a millisecond, so that one stream's JSON does
not delay another stream's time stamp. No request is sent twice, for any reason.
"""

from __future__ import annotations

import errno
import heapq
import math
import os
import resource
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from specnb.engines.responses import Answer, AnswerReader, Failure, error_text
from specnb.engines.sse import FramingError, read_head
from specnb.engines.streams import ClientFacts, Connection, Exchange, Lag, Server
from specnb.errors import EngineError
from specnb.load import Schedule, ScheduledJob

LAG_LIMIT_S: Final = 0.010
READ_BYTES: Final = 65536
BEAT_S: Final = 0.010  # the loop looks at limits and at its own lateness this often
ALIVE_EVERY_S: Final = 0.25
HOLD_OFF_S: Final = 0.10  # no new request for so long after a lost connection, to learn if the server died
IDLE_S: Final = 0.002  # nothing ready for so long: time to read events
SLICE_S: Final = 0.0001  # reading goes on for so long before the loop looks at its sockets again
LAZY_BYTES: Final = 16_384  # unread bytes that are not worth waking up for
MAX_UNREAD_BYTES: Final = 32 * 2**20
MAX_UNREAD_ANSWERS: Final = 256
GRACE_S: Final = 0.25  # from [DONE] to the end of the body
KEEP_ALIVE_S: Final = 1.0  # an idle connection is not used again after so long: servers close it at 5 s
STARTS_PER_TURN: Final = 32
SPARE_DESCRIPTORS: Final = 64
DEAD_GRACE_S: Final = 2.0  # from the server's death to giving up connections that did not notice

_IN: Final = 1  # EPOLLIN
_OUT: Final = 4  # EPOLLOUT
_LAST_CHUNK: Final = b"0\r\n\r\n"
_WOULD_BLOCK: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_NO_ANSWER: Final = Failure(
    status="error", kind="disconnected", message="the server closed the connection without an answer"
)


def os_reason(error: OSError) -> str:
    """Why a call failed, in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message}"
    return error.strerror or str(error) or type(error).__name__


class Run:
    """One `Client.run`: the loop and its state."""

    def __init__(
        self,
        server: Server,
        schedule: Schedule,
        *,
        on_done: Callable[[Answer], None],
        deadline_s: float | None,
        is_alive: Callable[[], bool] | None,
    ) -> None:
        self.server = server
        self.clock = server.clock
        self.schedule = schedule
        self.on_done = on_done
        self.deadline_s = deadline_s
        self.is_alive = is_alive
        self.context = server.context
        self.connections: dict[int, Connection] = {}
        self.idle: list[Connection] = []
        self.active: dict[int, Exchange] = {}
        self.unread: deque[Exchange] = deque()  # over, but not read to the end
        self.unread_bytes = 0
        self.answers: dict[int, Answer] = {}
        self.num_taken = 0
        self.num_in_flight = 0
        self.max_in_flight = 0
        self.num_chunks = 0
        self.timers: list[tuple[float, int, Exchange]] = []
        self.changed = False
        self.dead_s: float | None = None
        self.next_alive_s = 0.0
        self.next_beat_s = 0.0
        self.hold_off_s: float | None = None
        self.out_of_descriptors = False
        self.lag = Lag()
        self.addresses: Sequence[tuple[Any, ...]] = ()
        if not hasattr(select, "epoll"):
            raise EngineError("engine: the streaming client needs Linux (epoll); run specnb there")
        self.poller = select.epoll()

    def close(self) -> None:
        """Closes every socket."""
        for connection in list(self.connections.values()):
            self.drop(connection)
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
        if wanted is not None and 0 < self.max_in_flight < wanted:  # 0: the server took no connection
            reasons.append(f"at most {self.max_in_flight} of {wanted} requests were in flight")
        if self.out_of_descriptors:
            reasons.append("the process ran out of file descriptors")
        return tuple(reasons)

    def ask_descriptors(self) -> None:
        """Raises the limit on open files to the hard limit, and EngineError if that is too low."""
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
        address = self.server.address
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise EngineError(f"{address.netloc}: the name can't be resolved ({os_reason(error)})") from error
        return list(dict.fromkeys(found))

    # The loop

    def loop(self, now_s: float) -> None:
        """Turns until every job is over."""
        clock, connections, late = self.clock, self.connections, self.lag.turns_s.append
        poller, poll = self.poller, self.poller.poll
        eager = False  # nothing was ready at the last look, and there is more to read
        wake_s = self.turn(now_s)
        while wake_s is not None:
            timeout_s = wake_s - now_s
            full = self.unread_bytes > MAX_UNREAD_BYTES or len(self.unread) > MAX_UNREAD_ANSWERS
            if full or eager:
                timeout_s = 0.0
            elif self.unread or self.unread_bytes > LAZY_BYTES:
                timeout_s = min(timeout_s, IDLE_S)
            if timeout_s <= 0.0:
                events = poll(0)
            elif timeout_s < 0.002 and poller.fileno() < 1024:
                select.select((poller,), (), (), timeout_s)  # epoll counts in milliseconds
                events = poll(0)
            else:
                events = poll(math.floor(timeout_s * 1e3) * 1e-3)
            turn_s = now_s = clock()
            num_bytes = 0
            for fd, mask in events:
                connection = connections.get(fd)
                if connection is None:
                    continue
                pieces = connection.fast
                if pieces is None:
                    now_s = self.on_ready(connection, mask)
                    continue
                try:
                    data = connection.recv(READ_BYTES)
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
                num_bytes += size
                if size < 8 or data.endswith(_LAST_CHUNK):
                    self.unread_bytes += num_bytes
                    num_bytes = 0
                    self.maybe_over(connection, now_s)
            self.unread_bytes += num_bytes
            eager = False
            if full or (not events and (self.unread_bytes or self.unread)):
                eager = self.read_some(now_s + SLICE_S) and not events
                now_s = clock()
                late(now_s - turn_s)
            elif events:
                late(now_s - turn_s)
            if now_s >= wake_s or self.changed:
                wake_s = self.turn(now_s)
                now_s = clock()

    def turn(self, now_s: float) -> float | None:
        """Does what is due now; when to come back, or None if all is over."""
        self.changed = False
        if now_s >= self.next_beat_s:
            self.lag.beats_s.append(now_s - self.next_beat_s)
            self.next_beat_s = now_s + BEAT_S
        held = self.hold_off_s is not None and now_s >= self.hold_off_s
        if held or now_s >= self.next_alive_s:
            self.ask_alive(now_s)
        if held:
            self.hold_off_s = None
        if self.deadline_s is not None and now_s >= self.deadline_s:
            self.stop_all(now_s)
        while self.timers and self.timers[0][0] <= now_s:
            self.expire(heapq.heappop(self.timers)[2], now_s)
        wake_s = self.next_beat_s
        if self.hold_off_s is None:
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
            exchange = Exchange(scheduled, self.num_taken, now_s)
            self.num_taken += 1
            exchange.failure = failure
            self.unread.append(exchange)

    def expire(self, exchange: Exchange, now_s: float) -> None:
        """Ends a request that is over one of its limits, or looks again later."""
        if exchange.over:
            return
        server = self.server
        if exchange.sent_s is None:
            limit_s = exchange.limit_s
            if now_s >= limit_s:
                message = f"no connection within {server.connect_timeout_s:g} s"
                self.abandon(exchange, now_s, Failure(status="error", kind="connect", message=message))
                self.suspect(now_s)
                return
        else:
            last_s = exchange.pieces[-1][0] if exchange.pieces else exchange.last_s
            limit_s = last_s + server.stall_timeout_s
            if exchange.done_s is not None and now_s >= exchange.done_s + GRACE_S:
                self.abandon(exchange, now_s, None)
                return
            if now_s >= limit_s:
                message = f"no bytes for {server.stall_timeout_s:g} s"
                self.abandon(exchange, now_s, Failure(status="timeout", kind="stalled", message=message))
                return
            if server.request_timeout_s is not None:
                end_s = exchange.sent_s + server.request_timeout_s
                if now_s >= end_s:
                    message = f"not finished within {server.request_timeout_s:g} s"
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
        exchange = Exchange(scheduled, self.num_taken, now_s)
        exchange.limit_s = now_s + self.server.connect_timeout_s
        self.num_taken += 1
        self.active[exchange.index] = exchange
        connection = self.reusable(now_s)
        if connection is None:
            self.connect(exchange, 0)
        else:
            self.send(connection, exchange)
        if not exchange.over:
            self.expire(exchange, now_s)  # sets its timer

    def reusable(self, now_s: float) -> Connection | None:
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

    def connect(self, exchange: Exchange, address: int) -> None:
        """Opens a connection to one of the server's addresses."""
        family, kind, protocol, _, where = self.addresses[address]
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            self.out_of_descriptors |= error.errno in (errno.EMFILE, errno.ENFILE)
            self.no_connection(exchange, os_reason(error))
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock, address=address)
        connection.exchange = exchange
        exchange.connection = connection
        code = sock.connect_ex(where)
        self.connections[connection.fd] = connection
        self.watch(connection, _OUT)
        if code not in (0, errno.EINPROGRESS, errno.EAGAIN):
            self.refused(connection, os.strerror(code))

    def refused(self, connection: Connection, reason: str) -> None:
        """A connection was not made: tries the server's next address, if it has one."""
        exchange = connection.exchange
        self.drop(connection)
        if exchange is None:
            return
        if connection.address + 1 < len(self.addresses):
            self.connect(exchange, connection.address + 1)
        else:
            self.no_connection(exchange, reason)

    def no_connection(self, exchange: Exchange, reason: str) -> None:
        """Ends a request that found no server."""
        now_s = self.clock()
        message = f"no connection to {self.server.address.netloc}: {reason}"
        self.end(exchange, now_s, Failure(status="error", kind="connect", message=message))
        self.suspect(now_s)

    def suspect(self, now_s: float) -> None:
        """A connection failed: learns whether the server died before more requests are sent to it."""
        if self.is_alive is not None:
            self.hold_off_s = now_s + HOLD_OFF_S
            self.next_alive_s = now_s
            self.changed = True

    def establish(self, connection: Connection) -> None:
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
                        server_hostname=self.server.address.host,
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
                self.refused(connection, f"TLS failed, {os_reason(error)}")
                return
        connection.ready = True
        self.send(connection, exchange)

    def send(self, connection: Connection, exchange: Exchange) -> None:
        """Hands the request to an open connection."""
        job = exchange.scheduled.job
        connection.exchange = exchange
        exchange.connection = connection
        connection.out = memoryview(self.server.request_head(job) + job.body)
        exchange.sent_s = exchange.last_s = self.clock()
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        self.expire_later(exchange)
        self.flush(connection)

    def expire_later(self, exchange: Exchange) -> None:
        """Sets a timer for a request that has just got its connection."""
        limit_s = exchange.last_s + self.server.stall_timeout_s
        if self.server.request_timeout_s is not None:
            limit_s = min(limit_s, exchange.last_s + self.server.request_timeout_s)
        if limit_s < exchange.limit_s:
            heapq.heappush(self.timers, (limit_s, exchange.index, exchange))

    def flush(self, connection: Connection) -> None:
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

    def on_ready(self, connection: Connection, mask: int) -> float:
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

    def receive(self, connection: Connection, exchange: Exchange, data: bytes, now_s: float) -> None:
        """Takes bytes of a response, its head included."""
        if exchange.head is not None:
            exchange.last_s = now_s
            exchange.head += data
            try:
                head = read_head(exchange.head)
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

    def maybe_over(self, connection: Connection, now_s: float) -> None:
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

    def finish(self, connection: Connection, exchange: Exchange, now_s: float) -> None:
        """A response ended as HTTP says it should; its connection may serve again."""
        exchange.ended_properly = True
        self.end(exchange, now_s, None)
        if connection.persistent and not connection.out:
            connection.idle_s = now_s
            self.idle.append(connection)
        else:
            self.drop(connection)

    def lost(self, connection: Connection, now_s: float, error: OSError | None) -> None:
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

    def abandon(self, exchange: Exchange, now_s: float, failure: Failure | None) -> None:
        """Ends a request whose connection can't be used any more."""
        connection = exchange.connection
        self.end(exchange, now_s, failure)
        if connection is not None:
            self.drop(connection)

    def end(self, exchange: Exchange, now_s: float, failure: Failure | None) -> None:
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

    def watch(self, connection: Connection, mask: int) -> None:
        """Says what to wait for on a connection."""
        if connection.mask == mask or connection.fd < 0:
            return
        if connection.mask:
            self.poller.modify(connection.fd, mask)
        else:
            self.poller.register(connection.fd, mask)
        connection.mask = mask

    def drop(self, connection: Connection) -> None:
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

    def read(self, exchange: Exchange, until_s: float) -> bool:
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

    def notice(self, exchange: Exchange) -> None:
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

    def answer(self, exchange: Exchange) -> None:
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
            error=None if failure is None else self.server.without_key(failure.message),
            **fields,
        )
        self.answers[exchange.index] = answer
        self.on_done(answer)
