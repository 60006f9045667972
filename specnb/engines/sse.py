"""Framing of streamed HTTP answers: response heads, chunked transfer coding and server-sent events.

Bytes in, payloads out, fed piece by piece; knows no JSON, times or sockets. Separate because framing is
where clients lose or invent tokens: pieces may be split anywhere, inside a UTF-8 sequence, a line end or a
chunk size.
Sources: RFC 9112 (heads; section 7.1, chunked); WHATWG HTML, section 9.2 (event streams).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_HEAD_BYTES: Final = 65536
MAX_LINE_BYTES: Final = 1024  # of a chunk-size or trailer line


class FramingError(Exception):
    """The bytes are not what the framing says; the message is one line."""


class Dechunker:
    """Undoes HTTP's chunked transfer coding.

    `complete` is true once the last chunk and its trailers were read; `clean` is true between two chunks,
    when nothing is held back. `error` is one line once a chunk size is not hexadecimal or a chunk is longer
    than its size; what came before is still given out, and nothing after.
    """

    __slots__ = ("_after", "_held", "_left", "_trailers", "clean", "complete", "error")

    def __init__(self) -> None:
        self._held = b""
        self._left = 0
        self._after = False
        self._trailers = False
        self.clean = True
        self.complete = False
        self.error: str | None = None

    def feed(self, data: bytes) -> bytes:
        """The body's bytes in this piece."""
        if self._held:
            data = self._held + data
            self._held = b""
        parts: list[bytes] = []
        at, size = 0, len(data)
        while at < size and not self.complete and self.error is None:
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                self._after = self._left == 0
                continue
            if self._after:
                if size - at < 2:
                    break
                if data[at : at + 2] != b"\r\n":
                    self.error = f"a chunk is longer than its size: {data[at : at + 20]!r}"
                    break
                at += 2
                self._after = False
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                if size - at > MAX_LINE_BYTES:
                    self.error = f"no chunk size in {data[at : at + 20]!r}"
                break
            line = data[at:end]
            at = end + 2
            if self._trailers:
                self.complete = not line
            else:
                left = _chunk_size(line)
                if left is None:
                    self.error = f"{line[:20]!r} is not a chunk size"
                    break
                self._left = left
                self._trailers = left == 0
        self._held = data[at:]
        self.clean = not (self._held or self._left or self._after or self._trailers)
        return b"".join(parts)


def _chunk_size(line: bytes) -> int | None:
    """The size in a chunk's first line, extensions dropped; None if there is none."""
    digits = line.split(b";", 1)[0].strip()
    if not digits or len(digits) > 15 or digits.strip(b"0123456789abcdefABCDEF"):
        return None
    return int(digits, 16)


class EventDecoder:
    """Splits an event stream into events.

    Line ends may be LF, CRLF or CR; comments and unknown fields are dropped, several data lines are joined
    by LF, and one space after the colon is optional. `clean` is true between two events.
    """

    __slots__ = ("_carriage_return", "_crlf", "_held", "_skip_newline", "_started", "clean")

    def __init__(self) -> None:
        self._held = b""
        self._crlf = False
        self._carriage_return = b""  # the first half of a line end whose second half is yet to come
        self._skip_newline = False
        self._started = False
        self.clean = True

    def feed(self, body: bytes) -> list[tuple[bytes, bytes]]:
        """Events that end in this piece, as (name, data); the name is empty unless the event has one.

        A field called `error`, which llama.cpp's server once used, comes as an event of that name.
        """
        if not body:
            return []
        if self._skip_newline and body[:1] == b"\n":
            body = body[1:]
            self._crlf = True
        self._skip_newline = False
        if self._carriage_return:
            body = self._carriage_return + body
            self._carriage_return = b""
        if b"\r" in body:
            self._crlf = self._crlf or b"\r\n" in body
            if body[-1:] == b"\r":
                if self._crlf:
                    # The event's last byte is the newline: its time must not be that of the byte before.
                    self._carriage_return = b"\r"
                    body = body[:-1]
                else:
                    self._skip_newline = True
            body = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        body = self._held + body
        if not self._started:
            if len(body) < 3 and b"\xef\xbb\xbf".startswith(body):
                self._held = body
                self.clean = False
                return []
            body = body.removeprefix(b"\xef\xbb\xbf")
            self._started = True
        *blocks, self._held = body.split(b"\n\n")
        # A third newline in a row is an empty line of its own, not the start of an event.
        if blocks or self._held[:1] == b"\n":
            self._held = self._held.lstrip(b"\n")
        self.clean = not (self._held or self._carriage_return)
        return [event for event in map(_event, blocks) if event is not None]

    def close(self) -> list[tuple[bytes, bytes]]:
        """The event that the stream's end cut off from its blank line, if it has data."""
        event = _event(self._held)
        self._held = self._carriage_return = b""
        self.clean = True
        return [] if event is None else [event]


def _event(block: bytes) -> tuple[bytes, bytes] | None:
    name = b""
    data: list[bytes] = []
    for line in block.split(b"\n"):
        field, colon, value = line.partition(b":")
        if not field:
            continue
        if colon and value[:1] == b" ":
            value = value[1:]
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.strip()
        elif field == b"error":
            name = b"error"
            data.append(value)
    return (name, b"\n".join(data)) if data else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """A response's head: its length in bytes, and what it says of the body."""

    size: int
    status: int
    chunked: bool
    length: int | None
    streamed: bool | None
    persistent: bool


def read_head(data: bytearray) -> ResponseHead | None:
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
    return ResponseHead(
        size=end + 4,
        status=status,
        chunked=chunked,
        length=length,
        streamed=streamed,
        persistent=persistent and (chunked or length is not None),
    )
