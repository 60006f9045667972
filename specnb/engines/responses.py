"""What servers answer: one reader for the streamed fields of vLLM, SGLang and llama.cpp.

`AnswerReader` takes the timed pieces of one HTTP body and keeps what the records need: when tokens came,
how many, the text of every channel, usage, and acceptance as one engine-neutral record. Knows no sockets;
separate so that reading can wait until the event loop is idle, and be tested on bytes alone.

Sources: vLLM 0.32 `entrypoints/openai/*/protocol.py` and `entrypoints/generate/base/protocol.py` (PR 48915);
SGLang `tokenizer_manager.py` (`meta_info`); llama.cpp `tools/server` (`timings`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Final

from specnb.engines.sse import Dechunker, EventDecoder

MAX_PLAIN_BYTES: Final = 32 * 2**20  # of a body that is not an event stream
MAX_MESSAGE: Final = 300  # characters of a server's error message that are kept
ABORTED: Final = ("abort", "error")  # finish reasons that say that the answer is not one

_TEXT_FIELDS: Final = ("content", "text", "reasoning_content", "reasoning")

_decode_json = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Acceptance that one response reported, whichever engine it came from; what it did not say is None.

    `source` is `vllm`, `sglang` or `llamacpp`. `num_drafts` counts verification steps that carried a draft,
    `num_draft_tokens` drafted and `num_accepted_tokens` accepted tokens (bonus token excluded),
    `num_speculative_tokens` is K, `histogram[j]` the steps that accepted exactly j drafts (length K + 1),
    `per_step_accepted` and `per_step_drafted` are in step order.

    Notes
    -----
    Pool responses by their counts, never by their mean lengths. SGLang's accepted tokens are exact where the
    response has `spec_accept_token_num`; otherwise they are completion tokens less the prefill's token and
    one bonus token a step, which misses what a stop or limit cut off. llama.cpp does not count steps.
    """

    source: str
    num_drafts: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    num_speculative_tokens: int | None = None
    histogram: tuple[int, ...] | None = None
    per_step_accepted: tuple[int, ...] | None = None
    per_step_drafted: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request and what came of it; failed requests have one too. Times are seconds on the client's clock.

    Parameters
    ----------
    scheduled_s, sent_s
        When the load wanted it sent, and when its first byte was handed to an open connection (connecting and
        TLS come before); None if it never was.
    first_token_s, first_answer_s, last_token_s
        First chunk with a token in any channel; first one with content (the same without a reasoning channel,
        None if only reasoning came); last chunk with tokens.
    num_output_tokens
        `usage.completion_tokens`, never a count of chunks; None, with `usage_reason`, where the server
        did not say.
    num_first_chunk_tokens
        Tokens of the first chunk; None where the server does not say how many a chunk holds.
    status, error_kind, error
        `ok`, `error`, `timeout` or `cancelled`; kind (see `engines.openai`) and one line, None when ok.
    output_text, reasoning_text
        Content, and the reasoning channel; None if no such text came.
    output_token_ids, prompt_token_ids
        As the server returned them; None unless every chunk with tokens had them.
    chunks
        (arrival of the event's last byte, tokens in it or None) of every chunk with tokens.
    """

    request_id: str
    scheduled_s: float
    sent_s: float | None
    status: str
    first_token_s: float | None = None
    first_answer_s: float | None = None
    last_token_s: float | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    num_first_chunk_tokens: int | None = None
    usage_reason: str | None = None
    finish_reason: str | None = None
    error_kind: str | None = None
    error: str | None = None
    output_text: str | None = None
    reasoning_text: str | None = None
    output_token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    chunks: tuple[tuple[float, int | None], ...] = ()
    acceptance: Acceptance | None = None
    http_status: int | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a request failed: `status` (error, timeout or cancelled), `kind` and one line for a person."""

    status: str
    kind: str
    message: str


class AnswerReader:
    """Reads one response body from timed pieces.

    Parameters
    ----------
    chunked
        Whether the body comes in HTTP chunks.
    streamed
        Whether the body is an event stream; if not, it is one JSON document, read by `close`. None: the
        body's first byte tells.

    Attributes
    ----------
    done
        ``[DONE]`` was seen.
    garbage
        One line if the bytes were not what they claim to be, else None.
    server_error
        One line if the server reported an error in the body, else None.
    """

    __slots__ = (
        "_content",
        "_counted",
        "_dechunker",
        "_events",
        "_ids",
        "_ids_missing",
        "_likeness",
        "_meta_info",
        "_metrics",
        "_num_events",
        "_opening",
        "_plain",
        "_reasoning",
        "_sniff",
        "_timings",
        "_uncounted",
        "_usage",
        "chunks",
        "done",
        "finish_reason",
        "first_content_s",
        "first_token_s",
        "garbage",
        "last_token_s",
        "model",
        "prompt_token_ids",
        "server_error",
    )

    def __init__(self, *, chunked: bool, streamed: bool | None) -> None:
        self._dechunker = Dechunker() if chunked else None
        self._events = None if streamed is False else EventDecoder()
        self._sniff = streamed is None
        self._plain = bytearray()
        self._opening = b""
        self._num_events = 0
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._ids: list[int] = []
        self._ids_missing = False
        self._likeness: _Likeness | None = None
        self._counted = 0  # completion tokens that the server had reported at the last chunk with tokens
        self._uncounted = False  # a chunk with tokens came without such a count
        self._usage: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}
        self._meta_info: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}
        self.done = False
        self.garbage: str | None = None
        self.server_error: str | None = None
        self.finish_reason: str | None = None
        self.chunks: list[tuple[float, int | None]] = []
        self.first_token_s: float | None = None
        self.first_content_s: float | None = None
        self.last_token_s: float | None = None
        self.prompt_token_ids: list[int] | None = None
        self.model: str | None = None

    @property
    def complete(self) -> bool:
        """Whether a chunked body ended as it should; false for other bodies."""
        return self._dechunker is not None and self._dechunker.complete

    @property
    def plain(self) -> bytes:
        """What the body holds if it is not an event stream."""
        return bytes(self._plain)

    def feed(self, time_s: float, data: bytes) -> None:
        """Takes one piece of the body that arrived at `time_s`; an event's time is that of its last byte."""
        if self.garbage is not None:
            return
        dechunker, events = self._dechunker, self._events
        if dechunker is not None:
            if dechunker.clean and events is not None and events.clean:
                # One HTTP chunk with one event on one line: what vLLM and SGLang send nearly always.
                head = data.find(b"\r\n", 0, 12)
                if (
                    data[head + 2 : head + 8] == b"data: "
                    and data.find(b"\n", head + 2) == len(data) - 4
                    and data[-4:] == b"\n\n\r\n"
                    and data[:head] == b"%x" % (len(data) - head - 4)
                ):
                    self._sniff = False
                    self._read(time_s, data[head + 8 : -4])
                    return
            data = dechunker.feed(data)
        self._feed_body(time_s, data)
        if dechunker is not None and dechunker.error is not None:
            self.garbage = self.garbage or dechunker.error

    def close(self, time_s: float) -> None:
        """The body is over at `time_s`, cleanly or not: reads what has no blank line behind it."""
        if self.garbage is not None:
            return
        if self._events is None:
            if self._plain.strip():
                self._read(time_s, bytes(self._plain))
            return
        for name, payload in self._events.close():
            # An event that is cut short is no garbage: that the stream was cut is said elsewhere.
            if name == b"error" or payload.strip() == b"[DONE]" or _json(payload) is not None:
                self._read_named(time_s, name, payload)
        opening = self._opening.strip()
        if not self._num_events and opening and not opening.startswith((b":", b"data:", b"event:", b"id:")):
            self.garbage = f"the body is neither an event stream nor JSON: {opening!r}"

    def judge(self, *, ended: bool, failure: Failure | None) -> Failure | None:
        """What went wrong with the request, or None if the answer counts.

        An answer counts if it has no error in the body, a finish reason or ``[DONE]``, and a token in some
        channel. `ended` says whether the body ended as HTTP says it should, `failure` what the connection or
        a limit had to say; an error that the server reported, or bytes that are not an answer, explain more.
        """
        if self.server_error is not None:
            return Failure(status="error", kind="server_error", message=self.server_error)
        if failure is not None:
            return failure
        if self.garbage is not None:
            return Failure(status="error", kind="garbage", message=self.garbage)
        if self.finish_reason in ABORTED:
            message = f"the server gave up the request (finish_reason {self.finish_reason})"
            return Failure(status="error", kind="server_error", message=message)
        terminal = self.done or self.finish_reason is not None
        if self.first_token_s is None:
            if terminal or ended:
                message = "the answer holds no token in any channel"
                return Failure(status="error", kind="empty", message=message)
            message = "the server closed the connection before the first token"
            return Failure(status="error", kind="disconnected", message=message)
        if not terminal:
            message = "the stream ended without finish_reason or [DONE]"
            return Failure(status="error", kind="truncated", message=message)
        return None

    def fields(self) -> dict[str, Any]:
        """What the body says, as fields of `Answer`."""
        usage, timings, meta_info = self._usage, self._timings, self._meta_info
        num_output_tokens = _count(usage.get("completion_tokens"))
        reason = None
        if num_output_tokens is None:
            reason = "the server sent no usage"
        elif num_output_tokens == 0 and self.chunks:
            num_output_tokens = None
            reason = "usage says 0 tokens, yet tokens came"
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        for value in (meta_info.get("cached_tokens"), timings.get("cache_n")):
            cached = value if cached is None else cached
        answer_s = self.first_content_s if self._reasoning else self.first_token_s
        return {
            "first_token_s": self.first_token_s,
            "first_answer_s": answer_s,
            "last_token_s": self.last_token_s,
            "num_prompt_tokens": _count(usage.get("prompt_tokens")),
            "num_cached_tokens": _count(cached),
            "num_output_tokens": num_output_tokens,
            "usage_reason": reason,
            "num_first_chunk_tokens": self.chunks[0][1] if self.chunks else None,
            "finish_reason": self.finish_reason,
            "output_text": "".join(self._content) if self._content else None,
            "reasoning_text": "".join(self._reasoning) if self._reasoning else None,
            "output_token_ids": self._ids if self._ids and not self._ids_missing else None,
            "prompt_token_ids": self.prompt_token_ids,
            "chunks": tuple(self.chunks),
            "acceptance": acceptance(self._metrics, meta_info, timings),
            "model": self.model,
        }

    def _feed_body(self, time_s: float, body: bytes) -> None:
        if self._sniff and body.lstrip():
            self._sniff = False
            if body.lstrip()[:1] in (b"{", b"["):
                self._events = None
        if self._events is None:
            self._plain += body
            if len(self._plain) > MAX_PLAIN_BYTES:
                self.garbage = "the body is over 32 MiB long and no event stream"
            return
        if len(self._opening) < 60:
            self._opening += body[:60]
        for name, payload in self._events.feed(body):
            self._read_named(time_s, name, payload)

    def _read_named(self, time_s: float, name: bytes, payload: bytes) -> None:
        if name == b"error":
            self._num_events += 1
            self.server_error = self.server_error or error_text(payload)
        else:
            self._read(time_s, payload)

    def _read(self, time_s: float, payload: bytes) -> None:
        """One event's data, or the whole body."""
        self._num_events += 1
        try:
            text = payload.decode()
            likeness = self._likeness
            if likeness is not None and text.startswith(likeness.before):
                found = likeness.read(text)
                if found is not None:
                    content, ids = found
                    if likeness.reasoning:
                        self._take(time_s, "", content, ids)
                    else:
                        self._take(time_s, content, "", ids)
                    return
            text = text.strip()
            if text == "[DONE]":
                self.done = True
                return
            event, end = _decode_json(text)
            if end != len(text):
                raise ValueError
        except ValueError:
            self.garbage = self.garbage or f"no JSON: {payload[:60]!r}"
            return
        try:
            plain = self._read_event(time_s, event)
        except (AttributeError, TypeError, ValueError, LookupError):
            self.garbage = self.garbage or f"JSON of an unknown shape: {payload[:60]!r}"
            return
        if plain is not None:
            self._likeness = _likeness(text, *plain)

    def _read_event(self, time_s: float, event: dict[str, Any]) -> tuple[str, bool] | None:
        """Takes an event; the name of its only text field, and whether it has ids, if it has nothing else."""
        if event.get("error") or event.get("object") == "error":
            self.server_error = self.server_error or _error_line(event)
            return None
        content = reasoning = ""
        ids: list[int] | None = None
        other = reason = None
        choices = event.get("choices") or ()
        for choice in choices:
            delta = choice.get("delta")
            if delta is None:
                delta = choice.get("message", choice)
            content += _text(delta.get("content") or delta.get("text"))
            reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
            if delta.get("tool_calls") or delta.get("refusal"):
                other = delta
            new_ids = choice.get("token_ids")
            if new_ids is not None:
                ids = new_ids
            reason = choice.get("finish_reason")
            if reason:  # some servers send an empty one until the end
                self.finish_reason = str(reason)
            if self.model is None and self.prompt_token_ids is None:
                self.prompt_token_ids = choice.get("prompt_token_ids")
        if self.model is None:
            self.model = event.get("model")
            self.prompt_token_ids = event.get("prompt_token_ids") or self.prompt_token_ids
        counted: int | None = None
        meta_info = event.get("meta_info")
        if meta_info:
            self._meta_info = meta_info
            counted = meta_info.get("completion_tokens")
        timings = event.get("timings")
        if timings:
            self._timings = timings
            counted = timings.get("predicted_n")
        usage = event.get("usage")
        if usage:
            self._usage = usage
            counted = usage.get("completion_tokens")
        metrics = event.get("metrics")
        if metrics:
            self._metrics = metrics
        if other is not None and not content:
            # A tool call is an answer without text.
            self._content.append("")
            if self.first_content_s is None:
                self.first_content_s = time_s
        if content or reasoning or other is not None or ids:
            self._take(time_s, content, reasoning, ids, counted)
        if len(choices) != 1 or reason or other is not None or bool(content) == bool(reasoning):
            return None
        if usage or timings or meta_info or metrics or not isinstance(ids, list | None):
            return None
        names = [name for name in _TEXT_FIELDS if delta.get(name)]
        return (names[0], ids is not None) if len(names) == 1 else None

    def _take(
        self,
        time_s: float,
        content: str,
        reasoning: str,
        ids: list[int] | None,
        counted: int | None = None,
    ) -> None:
        """Notes one chunk with tokens: text, and the tokens' ids or the server's running count after it."""
        if content:
            self._content.append(content)
            if self.first_content_s is None:
                self.first_content_s = time_s
        if reasoning:
            self._reasoning.append(reasoning)
        num_tokens: int | None = None
        if ids is not None:
            self._ids.extend(ids)
            num_tokens = len(ids)
        else:
            self._ids_missing = True
            # A count that comes only now and then (a last chunk with usage) says nothing of one chunk.
            if counted is not None and not self._uncounted:
                num_tokens = counted - self._counted
        if counted is None:
            self._uncounted = True
        else:
            self._counted = counted
        if self.first_token_s is None:
            self.first_token_s = time_s
        elif num_tokens == 0:
            return  # text that a parser had held back: its tokens came with an earlier chunk
        self.last_token_s = time_s
        self.chunks.append((time_s, num_tokens if num_tokens is not None and num_tokens > 0 else None))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Likeness:
    """What consecutive events of a stream have in common: all bytes but one text and a list of ids.

    An event with the same bytes around its text has the same JSON around it, so only the text has to be
    parsed; that is a third of the work, and the bulk of a stream. Any other event is parsed whole.
    """

    before: str  # to the text's opening quote, included
    after: str  # from the text's closing quote to the event's end, or to the bracket that opens the ids
    end: str | None  # from the bracket that closes the ids; None without ids
    reasoning: bool

    def read(self, text: str) -> tuple[str, list[int] | None] | None:
        """Text and ids of an event that starts with `before`; None if it is not like the one learnt from."""
        content, at = scanstring(text, len(self.before), True)
        if not content:
            return None
        if self.end is None:
            return (content, None) if text[at:] == self.after else None
        if not text.startswith(self.after, at):
            return None
        at += len(self.after)
        close = text.find("]", at)
        if close < 0 or text[close:] != self.end:
            return None
        numbers = text[at:close].split(",")
        if not all(map(str.isdecimal, numbers)):
            return None
        return content, list(map(int, numbers))


def _likeness(text: str, name: str, with_ids: bool) -> _Likeness | None:
    """What to expect of the next event after one whose only text is in the field `name`."""
    at = -1
    for mark in (f'"{name}":"', f'"{name}": "'):
        # Quotes inside JSON strings are escaped: only a field of that name looks like this.
        if text.count(mark) == 1:
            at = text.index(mark) + len(mark)
    if at < 0:
        return None
    _, end = scanstring(text, at, True)
    rest = text[end:]
    reasoning = name.startswith("reasoning")
    if not with_ids:
        return _Likeness(before=text[:at], after=rest, end=None, reasoning=reasoning)
    for mark in ('"token_ids":[', '"token_ids": ['):
        if text.count(mark) == 1 and mark in rest:
            start = rest.index(mark) + len(mark)
            close = rest.index("]", start)
            return _Likeness(before=text[:at], after=rest[:start], end=rest[close:], reasoning=reasoning)
    return None


def acceptance(
    metrics: dict[str, Any], meta_info: dict[str, Any], timings: dict[str, Any]
) -> Acceptance | None:
    """The acceptance in a response's `metrics` (vLLM), `meta_info` (SGLang) or `timings` (llama.cpp).

    None if none of them says anything of speculation; counts that are no non-negative whole numbers are None.
    """
    speculative = metrics.get("speculative_decoding")
    if isinstance(speculative, dict):
        return Acceptance(
            source="vllm",
            num_drafts=_count(speculative.get("num_spec_steps")),
            num_draft_tokens=_count(speculative.get("num_draft_tokens")),
            num_accepted_tokens=_count(speculative.get("num_accepted_draft_tokens")),
            num_speculative_tokens=_count(speculative.get("num_spec_tokens")),
            histogram=_counts(speculative.get("acceptance_histogram")),
            per_step_accepted=_counts(speculative.get("per_step_accepted")),
            per_step_drafted=_counts(speculative.get("per_step_drafted")),
        )
    num_drafts = _count(meta_info.get("spec_verify_ct"))
    if num_drafts is not None:
        accepted = _count(meta_info.get("spec_accept_token_num"))
        completion = _count(meta_info.get("completion_tokens"))
        if accepted is None and num_drafts and completion is not None:
            accepted = max(completion - 1 - num_drafts, 0)
        return Acceptance(
            source="sglang",
            num_drafts=num_drafts,
            num_draft_tokens=_count(meta_info.get("spec_draft_token_num")),
            num_accepted_tokens=accepted,
            histogram=_counts(meta_info.get("spec_accept_histogram")),
        )
    num_draft_tokens = _count(timings.get("draft_n"))
    if num_draft_tokens is not None:
        return Acceptance(
            source="llamacpp",
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=_count(timings.get("draft_n_accepted")),
        )
    return None


def error_text(body: bytes) -> str:
    """One line for a person from an error body: the JSON's message, else the text's start."""
    content = _json(body)
    if isinstance(content, dict):
        return _error_line(content)
    text = " ".join(body.decode(errors="replace").split())
    return text[:MAX_MESSAGE] or "the server gave no message"


def _error_line(content: dict[str, Any]) -> str:
    error = content.get("error")
    message: Any = None
    for holder in (error, content):
        if isinstance(holder, dict) and message is None:
            message = next((holder[key] for key in ("message", "detail") if holder.get(key)), None)
    if message is None:
        message = error if isinstance(error, str) else json.dumps(content)
    return " ".join(str(message).split())[:MAX_MESSAGE]


def _json(payload: bytes) -> Any:
    """The JSON value, or None if it is not JSON."""
    try:
        return json.loads(payload)
    except ValueError:
        return None


def _text(content: Any) -> str:
    """Text of a `content` field: a string, or a list of parts with text."""
    if isinstance(content, str):
        return content
    if not content:
        return ""
    return "".join(part.get("text") or "" for part in content)


def _count(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return value


def _counts(values: Any) -> tuple[int, ...] | None:
    if not isinstance(values, list):
        return None
    counts = tuple(_count(value) for value in values)
    return None if None in counts else counts  # type: ignore[return-value]
