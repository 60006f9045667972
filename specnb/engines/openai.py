"""The streaming client of OpenAI-compatible servers: many requests, one thread, times that can be trusted.

The client's front: addresses, `fetch` for single calls, and `Client` for a schedule of requests (`loop` moves
the sockets, `responses` reads what came, `bodies` writes what is sent). Knows no plans and no tables.

Error kinds of an `Answer`: `connect`, `disconnected` (closed before any token), `truncated` (tokens came, but
no finish reason and no ``[DONE]``), `stalled` (no bytes for the stall limit), `deadline`, `request_timeout`,
`http_NNN`, `server_error` (in the body), `garbage` (not HTTP, not an event stream, not JSON), `empty` (no
token in any channel), `server_down` (not sent: the server is gone).
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import ssl
import time
import urllib.parse
from collections.abc import Callable

from specnb.engines.bodies import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    BodyOptions,
    chat_body,
    completions_body,
    sampling_fields,
)
from specnb.engines.loop import LAG_LIMIT_S, Run, os_reason
from specnb.engines.responses import Acceptance, Answer
from specnb.engines.streams import ClientFacts, Server, ServerAddress
from specnb.errors import EngineError, PlanError
from specnb.load import Job, Schedule

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

_MOST_REDIRECTS = 3


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

    Up to three redirects on the same server are followed; one to another server is the answer.

    Raises
    ------
    PlanError
        The URL is malformed.
    EngineError
        The server can't be reached, does not answer in `timeout_s` seconds, answers no HTTP, or redirects
        more than three times.
    """
    address = server_address(url)
    headers = {"Accept": "*/*"}
    if api_key:
        headers["Authorization"] = f"Bearer {_checked_key(api_key)}"
    if body is not None:
        headers["Content-Type"] = "application/json"
    asked = path
    for _ in range(1 + _MOST_REDIRECTS):
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
                    f"{address.netloc}{path}: can't be reached ({os_reason(error)}); is the server up?"
                ) from error
            except http.client.HTTPException as error:
                raise EngineError(
                    f"{address.netloc}{path}: the answer is not HTTP ({type(error).__name__})"
                ) from error
        target = response.getheader("Location")
        if response.status not in (301, 302, 307, 308) or target is None:
            return response.status, content
        there = urllib.parse.urlsplit(
            urllib.parse.urljoin(f"{address.scheme}://{address.netloc}{path}", target)
        )
        if there.hostname != address.host or (there.port or address.port) != address.port:
            return response.status, content
        path = there.path + (f"?{there.query}" if there.query else "")
        address = ServerAddress(scheme=address.scheme, host=address.host, port=address.port)
    raise EngineError(f"{address.netloc}{asked}: more than {_MOST_REDIRECTS} redirects; correct the url")


def _checked_key(api_key: str) -> str:
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise PlanError("engine.api_key_env: the key holds spaces, line ends or non-ASCII characters")
    return api_key


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
        address = server_address(url)
        if address.scheme == "https" and tls is None:
            tls = ssl.create_default_context()
        self._server = Server(
            address=address,
            key=_checked_key(api_key) if api_key else None,
            context=tls if address.scheme == "https" else None,
            clock=clock,
            connect_timeout_s=connect_timeout_s,
            stall_timeout_s=stall_timeout_s,
            request_timeout_s=request_timeout_s,
        )

    def __repr__(self) -> str:
        address = self._server.address
        return f"Client({address.scheme}://{address.netloc}{address.prefix})"

    @property
    def address(self) -> ServerAddress:
        """Where the server listens."""
        return self._server.address

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
        run = Run(self._server, schedule, on_done=on_done, deadline_s=deadline_s, is_alive=is_alive)
        was_enabled = gc.isenabled()
        gc.disable()  # a collection of a large heap would delay every time stamp of that turn
        try:
            return run.all()
        finally:
            run.close()
            if was_enabled:
                gc.enable()
