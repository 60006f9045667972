"""A fake OpenAI-compatible server whose true send times are known, for tests and benchmarks.

It runs in a process of its own with one epoll loop, sends every chunk on an absolute schedule, and records
when it did so on CLOCK_MONOTONIC, which `time.perf_counter` and `time.monotonic` read in every process of a
Linux machine: a client's time stamps can be set against the server's. Standard library only; no model.

    with FakeServer(defaults={"num_chunks": 20, "gap_s": 0.01}) as server:
        ...                                  # POST server.url + "/v1/chat/completions"
        server.records()                     # what was received and when each chunk left

What a request gets is a `Behaviour`: the defaults, overridden for the n-th request to arrive by
`requests={n: {...}}`, overridden by the object `fake` in the request's body (`fake.key` names its record).
Command line, the same settings as JSON: `fake_server.py --port 8000 --config '{"defaults": {...}}'`.

Paths: POST /v1/chat/completions and /v1/completions (streamed or not), GET /v1/models, /health, /metrics;
of this server's own: GET /_records (hands the records over and forgets them) and POST /_control.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import heapq
import http.client
import json
import math
import os
import select
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

_ID: Final = b"@@@@ID@@@@"  # stands for the 16 hex digits of a response's id in prepared chunks
_CLIENT_GONE: Final = (BrokenPipeError, ConnectionResetError)
_STARTUP_S: Final = 20.0
_GOLDEN: Final = 0.6180339887498949  # its multiples modulo 1 fill the unit interval evenly


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What one request is answered with. Offsets `_s` are seconds after the request's last byte arrived.

    `fail` is None or one of
    * `http_NNN`: that status with a JSON error; `silent`: never answered; `garbage`: not HTTP;
      `garbage_html`: 200 and an HTML page; `garbage_body`: 200 and noise; `empty`: 200, a role, a
      finish reason and [DONE] but no token; `refuse`: closed without a byte;
    * before chunk `fail_at` (default: the middle one): `cut` (closed), `cut_clean` (the body's proper end,
      nothing said), `reset` (RST), `hang` (nothing more is sent), `die` (the server process exits), `in_band`
      (an error event, then [DONE]), `bad_json` (an event that is not JSON, then the rest).
    """

    num_chunks: int | None = None  # None: as many as max_tokens of the body asks for
    tokens_per_chunk: int = 4
    tokens: tuple[int, ...] | None = None  # tokens of each chunk; overrides the two above
    prefill_s: float = 0.0
    jitter_s: float = 0.0  # every offset is later by up to this, evenly spread over requests
    gap_s: float = 0.01
    send_at_s: tuple[float, ...] | None = None  # offset of each chunk; overrides the two above
    align_s: float = 0.0  # sends wait for a multiple of this on the server's clock, as engine steps do
    text: tuple[str, ...] | None = None  # text of each chunk; default: one short word a token
    num_reasoning_chunks: int = 0
    reasoning_field: str = "reasoning"  # or "reasoning_content"
    role_s: float | None = 0.0  # None: no role-only chunk; chat only
    finish_reason: str | None = "length"
    finish_s: float | None = None  # None: the last chunk carries the finish reason; else an empty chunk does
    done: bool = True
    usage: str = "asked"  # "asked", "never", "always"
    completion_tokens: int | None = None  # what usage claims; None: the truth
    num_prompt_tokens: int = 16
    num_cached_tokens: int | None = None
    token_ids: str = "asked"
    num_speculative_tokens: int = 0
    acceptance: str = "none"  # "none", "summary", "detailed" (vLLM's levels), "sglang", "llamacpp"
    framing: str = "chunked"  # "chunked", "close", "length"
    newline: str = "\n"
    data_space: bool = True
    comments: bool = False  # a comment line before every event
    final_blank: bool = True  # False: the last event ends without its blank line
    bytes_per_send: int | None = None
    fail: str | None = None
    fail_at: int | None = None


_FIELDS: Final = frozenset(f.name for f in dataclasses.fields(Behaviour))


@functools.lru_cache(maxsize=4096)
def _behaviour(*layers: str) -> Behaviour:
    """The defaults overridden by JSON objects, the later ones over the earlier ones."""
    values: dict[str, Any] = {}
    for layer in layers:
        values.update(json.loads(layer))
    unknown = set(values) - _FIELDS
    if unknown:
        raise ValueError(f"unknown field of fake: {sorted(unknown)}")
    frozen: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Behaviour(**frozen)


def chunk_tokens(behaviour: Behaviour, max_tokens: int) -> tuple[int, ...]:
    """Tokens of each chunk that carries tokens."""
    if behaviour.tokens is not None:
        return behaviour.tokens
    size = behaviour.tokens_per_chunk
    if behaviour.num_chunks is not None:
        return (size,) * behaviour.num_chunks
    full, rest = divmod(max_tokens, size)
    return (size,) * full + ((rest,) if rest else ())


def accepted_per_step(behaviour: Behaviour, tokens: tuple[int, ...]) -> list[int]:
    """Accepted drafts of each step: every chunk after the first is one step, its last token the bonus."""
    return [min(n - 1, behaviour.num_speculative_tokens) for n in tokens[1:]]


# --- prepared answers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """One send: its offset, the bytes around the id, the tokens in it, and what follows it.

    `at` is an offset in seconds (float) or the number of the chunk (int) whose offset it shares, so that
    requests which differ in their timing alone share their prepared bytes.
    """

    at: float | int
    pieces: tuple[bytes, ...]
    num_tokens: int = 0
    action: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What of a request's body decides the bytes of its answer."""

    chat: bool
    stream: bool
    usage: bool
    continuous_usage: bool
    token_ids: bool
    max_tokens: int
    model: str


def _usage(behaviour: Behaviour, num_tokens: int) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": behaviour.num_prompt_tokens,
        "total_tokens": behaviour.num_prompt_tokens + num_tokens,
        "completion_tokens": num_tokens,
    }
    if behaviour.num_cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": behaviour.num_cached_tokens}
    return usage


def _acceptance(behaviour: Behaviour, tokens: tuple[int, ...]) -> dict[str, Any]:
    """Top-level keys of the last event that tell acceptance, in the dialect asked for."""
    accepted = accepted_per_step(behaviour, tokens)
    k = behaviour.num_speculative_tokens
    if behaviour.acceptance == "none" or not k:
        return {}
    if behaviour.acceptance == "sglang":
        steps = len(accepted)
        length = sum(tokens) / steps if steps else None
        return {
            "meta_info": {
                "spec_verify_ct": steps,
                "spec_accept_length": length,
                "completion_tokens": sum(tokens),
                "cached_tokens": behaviour.num_cached_tokens or 0,
            }
        }
    if behaviour.acceptance == "llamacpp":
        return {
            "timings": {
                "prompt_n": behaviour.num_prompt_tokens,
                "predicted_n": sum(tokens),
                "draft_n": k * len(accepted),
                "draft_n_accepted": sum(accepted),
            }
        }
    record: dict[str, Any] = {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted) if accepted else None,
        "draft_acceptance_rate": sum(accepted) / (k * len(accepted)) if accepted else None,
        "acceptance_histogram": [accepted.count(j) for j in range(k + 1)],
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": k * len(accepted),
        "num_spec_tokens": k,
    }
    if behaviour.acceptance == "detailed":
        record["per_step_accepted"] = accepted
        record["per_step_drafted"] = [k] * len(accepted)
    return {"metrics": {"speculative_decoding": record}}


def _text(behaviour: Behaviour, chunk: int, num_tokens: int) -> str:
    if behaviour.text is not None:
        return behaviour.text[chunk] if chunk < len(behaviour.text) else ""
    return "".join(f" w{chunk}" for _ in range(num_tokens))


class _Writer:
    """Turns events of one answer into sends; the bytes are those of vLLM's server apart from the id."""

    def __init__(self, behaviour: Behaviour, asked: _Asked) -> None:
        self.behaviour = behaviour
        self.asked = asked
        self.prefix = "chatcmpl-" if asked.chat else "cmpl-"
        self.object = "chat.completion.chunk" if asked.chat else "text_completion"

    def head(self, length: int | None) -> bytes:
        lines = ["HTTP/1.1 200 OK", "content-type: text/event-stream; charset=utf-8"]
        if self.behaviour.framing == "chunked":
            lines.append("transfer-encoding: chunked")
        elif self.behaviour.framing == "length":
            lines.append(f"content-length: {length}")
        else:
            lines.append("connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def frame(self, data: bytes) -> bytes:
        """`data` as one HTTP chunk (or as it is), with the id's length counted right."""
        if self.behaviour.framing != "chunked" or not data:
            return data
        size = len(data) + data.count(_ID) * (16 - len(_ID))
        return b"%x\r\n%b\r\n" % (size, data)

    def event(self, payload: str, *, last: bool = False) -> bytes:
        end = self.behaviour.newline
        comment = f": ping{end}{end}" if self.behaviour.comments else ""
        space = " " if self.behaviour.data_space else ""
        blank = "" if last and not self.behaviour.final_blank else end
        return f"{comment}data:{space}{payload}{end}{blank}".encode()

    def chunk(self, choice: dict[str, Any] | None, **more: Any) -> str:
        value = {
            "id": self.prefix + _ID.decode(),
            "object": self.object,
            "created": 1700000000,
            "model": self.asked.model,
            "choices": [] if choice is None else [choice],
        }
        return json.dumps({**value, **more}, separators=(",", ":"), ensure_ascii=False)

    def choice(self, text: str | None, channel: str, *, finish: str | None, **more: Any) -> dict[str, Any]:
        if self.asked.chat:
            delta: dict[str, Any] = {} if text is None else {channel: text}
            return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
        return {"index": 0, "text": text or "", "logprobs": None, "finish_reason": finish, **more}


def _events(behaviour: Behaviour, asked: _Asked) -> list[tuple[float | int, bytes, int, str | None]]:
    """(at, bytes, tokens, action) of each send of a stream, without HTTP framing."""
    writer = _Writer(behaviour, asked)
    tokens = chunk_tokens(behaviour, asked.max_tokens)
    show_usage = behaviour.usage == "always" or (behaviour.usage == "asked" and asked.usage)
    show_ids = behaviour.token_ids == "always" or (behaviour.token_ids == "asked" and asked.token_ids)
    fail_at = len(tokens) // 2 if behaviour.fail_at is None else behaviour.fail_at
    sends: list[tuple[float | int, bytes, int, str | None]] = []
    if asked.chat and behaviour.role_s is not None:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        sends.append((behaviour.role_s, writer.event(writer.chunk(choice)), 0, None))
    if behaviour.fail == "empty":
        tokens = ()
    sent = 0
    for i, number in enumerate(tokens):
        if behaviour.fail is not None and i == fail_at:
            if behaviour.fail == "in_band":
                error = {
                    "error": {"message": "the engine failed", "type": "InternalServerError", "code": 500}
                }
                done = writer.event("[DONE]", last=True)
                return [*sends, (i, writer.event(json.dumps(error)) + done, 0, "end")]
            if behaviour.fail == "bad_json":
                sends.append((i, writer.event('{"choices": [{"delta": {"content":'), 0, None))
            elif behaviour.fail == "cut_clean":
                return [*sends, (i, b"", 0, "end")]
            else:
                return [*sends, (i, b"", 0, behaviour.fail)]
        last = i == len(tokens) - 1
        finish = behaviour.finish_reason if last and behaviour.finish_s is None else None
        reasoning = asked.chat and i < behaviour.num_reasoning_chunks
        more: dict[str, Any] = {}
        if show_ids:
            more["token_ids"] = list(range(1000 + sent, 1000 + sent + number))
        top: dict[str, Any] = {}
        if show_ids and i == 0:
            (top if asked.chat else more)["prompt_token_ids"] = list(range(behaviour.num_prompt_tokens))
        sent += number
        if asked.continuous_usage:
            top["usage"] = _usage(behaviour, sent)
        choice = writer.choice(
            _text(behaviour, i, number),
            behaviour.reasoning_field if reasoning else "content",
            finish=finish,
            **more,
        )
        sends.append((i, writer.event(writer.chunk(choice, **top)), number, None))
    end_at: float | int = max(len(tokens) - 1, 0)
    tail = b""
    if behaviour.finish_s is not None or not tokens:
        end_at = end_at if behaviour.finish_s is None else behaviour.finish_s
        tail += writer.event(
            writer.chunk(writer.choice(None, "content", finish=behaviour.finish_reason)),
            last=not show_usage and not behaviour.done,
        )
    if show_usage:
        total = sent if behaviour.completion_tokens is None else behaviour.completion_tokens
        payload = writer.chunk(None, usage=_usage(behaviour, total), **_acceptance(behaviour, tokens))
        tail += writer.event(payload, last=not behaviour.done)
    if behaviour.done:
        tail += writer.event("[DONE]", last=True)
    return [*sends, (end_at, tail, 0, "end")]


@functools.lru_cache(maxsize=4096)
def _stream_steps(behaviour: Behaviour, asked: _Asked) -> tuple[_Step, ...]:
    """The sends of one streamed answer, head included."""
    writer = _Writer(behaviour, asked)
    sends = _events(behaviour, asked)
    # The length announced is that of the unbroken answer: a cut one falls short of it.
    ends = sends[-1][3] == "end"
    whole = sends if ends else _events(dataclasses.replace(behaviour, fail=None), asked)
    length = sum(len(data) + data.count(_ID) * (16 - len(_ID)) for _, data, _, _ in whole)
    steps = [_Step(0.0, (writer.head(length),))]
    for at, data, tokens, action in sends:
        framed = writer.frame(data)
        if action == "end":
            if behaviour.framing == "chunked":
                framed += b"0\r\n\r\n"
            elif behaviour.framing == "close":
                action = "close"
        steps.append(_Step(at, tuple(framed.split(_ID)), tokens, action))
    return tuple(steps)


def _response(status: int, body: bytes, kind: str = "application/json", *, close: bool = False) -> bytes:
    reason = http.client.responses.get(status, "Status")
    head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n"
    return (head + ("connection: close\r\n" if close else "") + "\r\n").encode() + body


def _error_body(status: int, message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "Error", "code": status}}).encode()


@functools.lru_cache(maxsize=4096)
def _plain_steps(behaviour: Behaviour, asked: _Asked) -> tuple[_Step, ...]:
    """One send: the whole answer as a JSON body (no streaming asked), or a failure that needs no stream."""
    fail = behaviour.fail
    if fail is not None and fail.startswith("http_"):
        status = int(fail.removeprefix("http_"))
        return (_Step(0.0, (_response(status, _error_body(status, f"as asked: {status}")),), 0, "end"),)
    if fail == "silent":
        return (_Step(0.0, (b"",), 0, "hang"),)
    if fail == "refuse":
        return (_Step(0.0, (b"",), 0, "close"),)
    if fail == "garbage":
        return (_Step(0.0, (b"\x16\x03\x01\x02\x00 SSH-2.0-not-http\r\n\r\n" * 3,), 0, "close"),)
    if fail == "garbage_html":
        page = b"<html><body><h1>It works!</h1></body></html>"
        return (_Step(0.0, (_response(200, page, "text/html", close=True),), 0, "close"),)
    if fail == "garbage_body":
        noise = bytes(range(256)) * 4
        return (_Step(0.0, (_response(200, noise, "text/event-stream", close=True),), 0, "close"),)
    tokens = chunk_tokens(behaviour, asked.max_tokens)
    text = "".join(_text(behaviour, i, n) for i, n in enumerate(tokens))
    writer = _Writer(behaviour, asked)
    choice: dict[str, Any] = {"index": 0, "finish_reason": behaviour.finish_reason}
    if asked.chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    usage = _usage(behaviour, sum(tokens))
    body = writer.chunk(choice, usage=usage, **_acceptance(behaviour, tokens)).replace(_ID.decode(), "0" * 16)
    return (_Step(max(len(tokens) - 1, 0), (_response(200, body.encode()),), sum(tokens), "end"),)


_WHOLE: Final = ("silent", "refuse", "garbage", "garbage_html", "garbage_body")


# --- the server -------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Settings:
    """Settings of the whole server; `POST /_control` changes them while it runs."""

    model: str = "fake-model"
    any_model: bool = False  # answer, and echo, whatever model name is sent
    api_key: str | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)  # by arrival number
    max_in_flight: int | None = None  # more get `overload_status` at once
    overload_status: int = 429
    metrics: str = "vllm"  # "vllm", "llamacpp", "absent" (no engine families), "empty"
    engines: int = 1  # requests are counted for engine (arrival number mod engines)
    workers: int = 1  # > 1: each scrape shows the counters of another API server process
    num_gpu_blocks: int = 6250
    announce: int = 0  # n > 0: print `first` when the first stream begins and `last` when the n-th has ended


class _Counters:
    """What /metrics tells, per (worker, engine)."""

    def __init__(self) -> None:
        self.start_s = time.time()
        self.values: dict[tuple[int, int], dict[str, float]] = {}
        self.positions: dict[tuple[int, int], list[int]] = {}

    def add(self, key: tuple[int, int], **amounts: float) -> None:
        counts = self.values.setdefault(key, {})
        for name, amount in amounts.items():
            counts[name] = counts.get(name, 0) + amount

    def step(self, key: tuple[int, int], drafted: int, accepted: int) -> None:
        self.add(
            key,
            spec_decode_num_drafts=1,
            spec_decode_num_draft_tokens=drafted,
            spec_decode_num_accepted_tokens=accepted,
        )
        positions = self.positions.setdefault(key, [])
        positions.extend([0] * (drafted - len(positions)))
        for i in range(accepted):
            positions[i] += 1


_ENGINE_COUNTERS: Final = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
)
_SPEC_COUNTERS: Final = (
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)


def render_metrics(settings: Settings, counters: _Counters, worker: int, running: int) -> str:
    """The body of /metrics in the text format of Prometheus, as one worker process would write it."""
    lines = [
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {counters.start_s!r}",
        "# TYPE python_gc_objects_collected_total counter",
        'python_gc_objects_collected_total{generation="0"} 10.0',
    ]
    if settings.metrics == "empty":
        return ""
    if settings.metrics == "absent":
        return "\n".join(lines) + "\n"
    prefix = "llamacpp" if settings.metrics == "llamacpp" else "vllm"
    speculating = bool(settings.defaults.get("num_speculative_tokens"))
    names = (*_ENGINE_COUNTERS, *(_SPEC_COUNTERS if speculating else ()))
    keys = [(worker, engine) for engine in range(settings.engines)]

    def labels(engine: int, more: str = "") -> str:
        return f'{{engine="{engine}",model_name="{settings.model}"{more}}}'

    def position(i: int) -> str:
        return f',position="{i}"'

    for name in names:
        lines.append(f"# TYPE {prefix}:{name}_total counter")
        for key in keys:
            lines.append(
                f"{prefix}:{name}_total{labels(key[1])} {float(counters.values.get(key, {}).get(name, 0))}"
            )
        lines.append(f"# TYPE {prefix}:{name}_created gauge")
        lines.extend(f"{prefix}:{name}_created{labels(key[1])} {counters.start_s!r}" for key in keys)
    if speculating:
        name = f"{prefix}:spec_decode_num_accepted_tokens_per_pos"
        lines.append(f"# TYPE {name}_total counter")
        for key in keys:
            width = int(settings.defaults["num_speculative_tokens"])
            positions = counters.positions.get(key, [0] * width)
            lines.extend(
                f"{name}_total{labels(key[1], position(i))} {float(n)}" for i, n in enumerate(positions)
            )
    lines.append(f"# TYPE {prefix}:num_requests_running gauge")
    lines.extend(
        f"{prefix}:num_requests_running{labels(key[1])} {float(running if key[1] == 0 else 0)}"
        for key in keys
    )
    lines.append(f"# TYPE {prefix}:iteration_tokens_total histogram")
    for key in keys:
        counts = counters.values.get(key, {})
        inf = ',le="+Inf"'
        total, tokens = counts.get("iterations", 0), counts.get("generation_tokens", 0)
        lines.append(f"{prefix}:iteration_tokens_total_bucket{labels(key[1], inf)} {float(total)}")
        lines.append(f"{prefix}:iteration_tokens_total_count{labels(key[1])} {float(total)}")
        lines.append(f"{prefix}:iteration_tokens_total_sum{labels(key[1])} {float(tokens)}")
    lines.append(f"# TYPE {prefix}:cache_config_info gauge")
    info = f'{{block_size="16",engine="0",num_gpu_blocks="{settings.num_gpu_blocks}"}}'
    lines.append(f"{prefix}:cache_config_info{info} 1.0")
    return "\n".join(lines) + "\n"


class _Connection:
    __slots__ = ("close_after", "closed", "fd", "inbox", "outbox", "sock", "stream")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.inbox = bytearray()
        self.outbox = bytearray()  # what the kernel did not take yet
        self.stream: _Stream | None = None
        self.close_after = False
        self.closed = False


class _Stream:
    __slots__ = (
        "behaviour",
        "connection",
        "engine",
        "ident",
        "jitter_s",
        "next",
        "record",
        "start_s",
        "steps",
        "streamed",
    )

    def __init__(
        self, connection: _Connection, steps: tuple[_Step, ...], behaviour: Behaviour, record: dict[str, Any]
    ) -> None:
        self.connection = connection
        self.steps = steps
        self.behaviour = behaviour
        self.record = record
        self.start_s: float = record["received_s"]
        self.ident = b"%016x" % record["index"]
        self.next = 0
        self.engine = (0, 0)
        self.streamed = False
        self.jitter_s: float = behaviour.jitter_s * (record["index"] * _GOLDEN % 1.0)

    def offset_s(self, step: _Step) -> float:
        """When this step is due, in seconds after the request arrived."""
        if isinstance(step.at, float):
            return step.at
        explicit = self.behaviour.send_at_s
        if explicit is not None:
            return self.jitter_s + explicit[min(step.at, len(explicit) - 1)]
        return self.jitter_s + self.behaviour.prefill_s + step.at * self.behaviour.gap_s


class _Server:
    """The loop: one epoll, one heap of due sends."""

    def __init__(self, settings: Settings, port: int, *, watch_stdin: bool) -> None:
        self.settings = settings
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", port))
        self.listener.listen(4096)
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.epoll = select.epoll()
        self.epoll.register(self.listener.fileno(), select.EPOLLIN)
        self.watch_stdin = watch_stdin
        if watch_stdin:
            self.epoll.register(0, select.EPOLLIN)
        self.connections: dict[int, _Connection] = {}
        self.due: list[tuple[float, int, _Stream]] = []
        self.order = 0
        self.running = 0
        self.scrapes = 0
        self.last_iteration_s = 0.0
        self.records: list[dict[str, Any]] = []
        self.num_requests = 0
        self.num_begun = 0
        self.num_ended = 0
        self.counters = _Counters()

    def serve(self) -> None:
        """Runs until the process is killed or, if watched, its standard input closes."""
        listener = self.listener.fileno()
        while True:
            timeout = self.due[0][0] - time.perf_counter() if self.due else 3600.0
            if timeout > 0:
                # select waits in microseconds; epoll's own wait is rounded up to milliseconds.
                select.select([self.epoll], [], [], timeout)
            for fd, mask in self.epoll.poll(0):
                if fd == listener:
                    self._accept()
                elif fd == 0 and self.watch_stdin:
                    if not os.read(0, 4096):
                        return
                else:
                    self._on_ready(self.connections[fd], mask)
            now = time.perf_counter()
            while self.due and self.due[0][0] <= now:
                self._send_due(heapq.heappop(self.due)[2])

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(sock)
            self.connections[connection.fd] = connection
            self.epoll.register(connection.fd, select.EPOLLIN)

    def _on_ready(self, connection: _Connection, mask: int) -> None:
        if mask & select.EPOLLOUT and not self._flush(connection):
            return
        if not mask & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            data = connection.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        now = time.perf_counter()
        if not data:
            self._close(connection)
            return
        connection.inbox += data
        self._take_requests(connection, now)

    def _take_requests(self, connection: _Connection, now: float) -> None:
        """Answers the requests that have arrived whole, one at a time."""
        while connection.stream is None and not connection.closed:
            end = connection.inbox.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(connection.inbox[:end]).decode("latin-1").split("\r\n")
            headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
            length = int(headers.get("content-length", "0"))
            if len(connection.inbox) < end + 4 + length:
                return
            body = bytes(connection.inbox[end + 4 : end + 4 + length])
            del connection.inbox[: end + 4 + length]
            method, path, _ = head[0].split(" ", 2)
            connection.close_after = headers.get("connection", "").lower() == "close"
            self._answer(connection, method, path, headers, body, now)

    def _answer(
        self,
        connection: _Connection,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        now: float,
    ) -> None:
        settings = self.settings
        own = path.startswith("/_")
        if settings.api_key and not own and headers.get("authorization") != f"Bearer {settings.api_key}":
            self._reply(connection, 401, _error_body(401, "Unauthorized"))
        elif path in ("/v1/chat/completions", "/v1/completions") and method == "POST":
            self._generate(connection, path, headers, body, now)
        elif path == "/v1/models":
            models = {"object": "list", "data": [{"id": settings.model, "object": "model"}]}
            self._reply(connection, 200, json.dumps(models).encode())
        elif path == "/health":
            self._reply(connection, 200, b"")
        elif path == "/metrics":
            worker = self.scrapes % settings.workers
            self.scrapes += 1
            text = render_metrics(settings, self.counters, worker, self.running)
            self._reply(connection, 200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/_records":
            self._reply(connection, 200, json.dumps(self.records).encode())
            self.records = []
        elif path == "/_control" and method == "POST":
            self._control(json.loads(body))
            self._reply(connection, 200, b"{}")
        else:
            self._reply(connection, 404, _error_body(404, "Not Found"))

    def _control(self, order: dict[str, Any]) -> None:
        if order.pop("restart", False):
            self.counters = _Counters()
        foreign = order.pop("add", None)
        if foreign:
            self.counters.add((0, 0), **foreign)
        for name, value in order.items():
            if not hasattr(self.settings, name):
                raise ValueError(f"unknown setting {name}")
            setattr(self.settings, name, value)

    def _generate(
        self, connection: _Connection, path: str, headers: dict[str, str], raw: bytes, now: float
    ) -> None:
        settings = self.settings
        index = self.num_requests
        self.num_requests += 1
        try:
            body = json.loads(raw)
            own = body.pop("fake", {})
            key = own.pop("key", None)
            behaviour = _behaviour(
                json.dumps(settings.defaults),
                json.dumps(settings.requests.get(str(index), {})),
                json.dumps(own),
            )
        except (ValueError, TypeError, AttributeError) as error:
            self._reply(connection, 400, _error_body(400, str(error)))
            return
        record: dict[str, Any] = {
            "index": index,
            "key": key,
            "path": path,
            "body": body,
            "has_key": "authorization" in headers,
            "received_s": now,
            "sent_s": [],
            "num_tokens": [],
            "end_s": None,
            "ended": None,
        }
        self.records.append(record)
        if not settings.any_model and body.get("model") != settings.model:
            message = f"The model `{body.get('model')}` does not exist."
            self._reply(connection, 404, _error_body(404, message))
            return
        if settings.max_in_flight is not None and self.running >= settings.max_in_flight:
            record["ended"] = "overload"
            self._reply(connection, settings.overload_status, _error_body(settings.overload_status, "full"))
            return
        options = body.get("stream_options") or {}
        asked = _Asked(
            chat=path.endswith("/chat/completions"),
            stream=bool(body.get("stream")),
            usage=bool(options.get("include_usage")),
            continuous_usage=bool(options.get("continuous_usage_stats")),
            token_ids=bool(body.get("return_token_ids")),
            max_tokens=int(body.get("max_completion_tokens") or body.get("max_tokens") or 16),
            model=str(body.get("model")),
        )
        fail = behaviour.fail or ""
        whole = not asked.stream or fail in _WHOLE or fail.startswith("http_")
        timeless = dataclasses.replace(
            behaviour, prefill_s=0.0, jitter_s=0.0, gap_s=0.0, send_at_s=None, align_s=0.0
        )
        steps = (_plain_steps if whole else _stream_steps)(timeless, asked)
        stream = _Stream(connection, steps, behaviour, record)
        stream.streamed = asked.stream
        stream.engine = (index % settings.workers, index % settings.engines)
        self.counters.add(
            stream.engine,
            prompt_tokens=behaviour.num_prompt_tokens,
            prefix_cache_queries=behaviour.num_prompt_tokens,
            prefix_cache_hits=behaviour.num_cached_tokens or 0,
        )
        connection.stream = stream
        self.running += 1
        if asked.stream:
            self.num_begun += 1
            if settings.announce and self.num_begun == 1:
                _say("first")
        self._file(stream)

    def _reply(
        self, connection: _Connection, status: int, body: bytes, kind: str = "application/json"
    ) -> None:
        self._write(connection, _response(status, body, kind))
        if connection.close_after and not connection.closed:
            self._finish(connection)

    def _send_due(self, stream: _Stream) -> None:
        """Sends the step that is due and those at the same offset, then files the next one."""
        connection = stream.connection
        if connection.closed or connection.stream is not stream:
            return
        while True:
            step = stream.steps[stream.next]
            stream.next += 1
            self._send_step(stream, step)
            if connection.closed:
                return
            if step.action is not None:
                self._act(stream, step.action)
                return
            if stream.offset_s(stream.steps[stream.next]) > stream.offset_s(step):
                self._file(stream)
                return

    def _file(self, stream: _Stream) -> None:
        """Puts the stream's next step on the heap."""
        offset_s = stream.offset_s(stream.steps[stream.next])
        due = stream.start_s + offset_s
        align = stream.behaviour.align_s
        if align and offset_s:
            due = math.ceil(due / align) * align
        self.order += 1
        heapq.heappush(self.due, (due, self.order, stream))

    def _send_step(self, stream: _Stream, step: _Step) -> None:
        data = stream.ident.join(step.pieces)
        size = stream.behaviour.bytes_per_send or max(len(data), 1)
        # An event is over before the line end that closes its HTTP chunk.
        last_byte = len(data) - (3 if stream.behaviour.framing == "chunked" else 1)
        now = time.perf_counter()
        for start in range(0, len(data), size):
            if start <= last_byte:
                now = time.perf_counter()
            self._write(stream.connection, data[start : start + size])
            if stream.connection.closed:
                return
        if step.num_tokens:
            self._count(stream, step.num_tokens, now)

    def _count(self, stream: _Stream, num_tokens: int, now: float) -> None:
        record = stream.record
        first = not record["sent_s"]
        record["sent_s"].append(now)
        record["num_tokens"].append(num_tokens)
        self.counters.add(stream.engine, generation_tokens=num_tokens)
        if now - self.last_iteration_s > (stream.behaviour.align_s / 2):
            self.counters.add(stream.engine, iterations=1)
            self.last_iteration_s = now
        drafted = stream.behaviour.num_speculative_tokens
        if drafted and not first:
            self.counters.step(stream.engine, drafted, min(num_tokens - 1, drafted))

    def _act(self, stream: _Stream, action: str) -> None:
        """What follows the last send: the end of the answer, or the failure asked for."""
        connection = stream.connection
        if action == "die":
            os._exit(1)
        if action == "hang":
            return
        stream.record["end_s"] = time.perf_counter()
        stream.record["ended"] = "end" if action == "end" else action
        self.running -= 1
        connection.stream = None
        if stream.streamed:
            self.num_ended += 1
            if self.num_ended == self.settings.announce:
                _say("last")
        if action == "reset":
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._close(connection)
        elif action in ("cut", "close") or connection.close_after:
            self._finish(connection)
        elif connection.inbox:
            self._take_requests(connection, time.perf_counter())

    def _finish(self, connection: _Connection) -> None:
        """Closes once everything written has left."""
        if connection.outbox:
            connection.close_after = True
        else:
            self._close(connection)

    def _write(self, connection: _Connection, data: bytes) -> None:
        if connection.outbox:
            connection.outbox += data
            return
        try:
            sent = connection.sock.send(data)
        except BlockingIOError:
            sent = 0
        except _CLIENT_GONE:
            self._close(connection)
            return
        if sent < len(data):
            connection.outbox += data[sent:]
            self.epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)

    def _flush(self, connection: _Connection) -> bool:
        try:
            sent = connection.sock.send(connection.outbox)
        except BlockingIOError:
            return True
        except _CLIENT_GONE:
            self._close(connection)
            return False
        del connection.outbox[:sent]
        if not connection.outbox:
            self.epoll.modify(connection.fd, select.EPOLLIN)
            if connection.close_after and connection.stream is None:
                self._close(connection)
                return False
        return True

    def _close(self, connection: _Connection) -> None:
        if connection.closed:
            return
        connection.closed = True
        if connection.stream is not None:
            connection.stream.record["ended"] = "client_left"
            connection.stream.record["end_s"] = time.perf_counter()
            connection.stream = None
            self.running -= 1
        self.epoll.unregister(connection.fd)
        del self.connections[connection.fd]
        connection.sock.close()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serves until killed; prints `ready PORT` first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--config", default="{}", help="Settings as JSON")
    parser.add_argument("--watch-stdin", action="store_true", help="end when standard input closes")
    arguments = parser.parse_args()
    server = _Server(
        Settings(**json.loads(arguments.config)), arguments.port, watch_stdin=arguments.watch_stdin
    )
    _behaviour(json.dumps(server.settings.defaults))  # a misspelt field ends the server at once
    _say(f"ready {server.port}")
    gc.freeze()
    gc.disable()
    server.serve()


# --- for tests --------------------------------------------------------------------------------------------


class FakeServer:
    """The server as a child process; a context manager. It ends with its parent, whatever happens to that.

    Parameters
    ----------
    port
        0 takes a free one.
    settings
        Fields of `Settings`; `requests` may have integer keys.
    """

    def __init__(self, *, port: int = 0, **settings: Any) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""  # what it printed and nobody read yet
        self.port = port

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> FakeServer:
        """Starts it and waits until it listens; again after `stop`, `kill` or a death, on the same port."""
        self.stop()
        command = [sys.executable, __file__, "--watch-stdin", "--port", str(self.port)]
        self._process = subprocess.Popen(
            [*command, "--config", json.dumps(self._settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._said = b""
        line = self.wait_for("ready", _STARTUP_S)
        if line is None:
            self.stop()
            raise RuntimeError("the fake server did not start; its standard error says why")
        self.port = int(line.split()[1])
        return self

    def wait_for(self, word: str, timeout_s: float) -> str | None:
        """The next line the server prints that starts with this word; None if it does not come in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while True:
            line, mark, rest = self._said.partition(b"\n")
            if mark:
                self._said = rest
                if line.startswith(word.encode()):
                    return line.decode()
                continue
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                return None
            data = os.read(pipe, 4096)
            if not data:
                return None
            self._said += data

    def stop(self) -> None:
        """Kills the process, if it runs, and collects it."""
        process = self._process
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        self._process = None

    def call(self, method: str, path: str, body: object = None) -> bytes:
        """One plain request; returns the body, raises RuntimeError unless the status is 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {data[:200]!r}")
        return data

    def records(self) -> list[dict[str, Any]]:
        """One dict a generation request since the last call, in order of arrival.

        Keys: index, key (`fake.key` of the body), path, body, has_key, received_s (its last byte),
        sent_s and num_tokens (one entry a chunk with tokens, `sent_s` taken just before the send), end_s,
        ended (None while running or hung, "end", "client_left", or how it was made to fail).
        """
        records: list[dict[str, Any]] = json.loads(self.call("GET", "/_records"))
        return records

    def control(self, **order: Any) -> None:
        """Changes settings while it runs; also restart=True (counters begin anew, with a new process start
        time) and add={"generation_tokens": n, ...} (foreign traffic)."""
        self.call("POST", "/_control", order)

    def __enter__(self) -> FakeServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


if __name__ == "__main__":
    main()
