"""What servers answer, byte by byte: framing, channels, counts, acceptance, and what is no answer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.engines.responses import Acceptance, AnswerReader, Failure, acceptance, error_text
from specnb.engines.sse import Dechunker, EventDecoder, FramingError, read_head


def event(content: Any = None, **fields: Any) -> bytes:
    """One chat event; fields: reasoning, reasoning_content, ids, finish, usage, and any of the top level."""
    delta = {name: fields.pop(name) for name in ("role", "reasoning", "reasoning_content") if name in fields}
    if content is not None:
        delta["content"] = content
    choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": fields.pop("finish", None)}
    if "ids" in fields:
        choice["token_ids"] = fields.pop("ids")
    return b"data: " + json.dumps({"choices": [choice], "model": "m", **fields}).encode() + b"\n\n"


def usage(completion_tokens: int, **fields: Any) -> bytes:
    """The last chunk of vLLM: no choices, but usage."""
    content = {
        "choices": [],
        "usage": {"prompt_tokens": 7, "completion_tokens": completion_tokens},
        **fields,
    }
    return b"data: " + json.dumps(content).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def in_chunks(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


def read(*pieces: tuple[float, bytes], chunked: bool = True, streamed: bool | None = True) -> AnswerReader:
    """A reader that got these timed bodies, each in an HTTP chunk of its own, and was closed."""
    reader = AnswerReader(chunked=chunked, streamed=streamed)
    for time_s, body in pieces:
        reader.feed(time_s, in_chunks(body) if chunked else body)
    reader.close(pieces[-1][0])
    return reader


def verdict(reader: AnswerReader, *, ended: bool = True) -> tuple[str, str] | None:
    failure = reader.judge(ended=ended, failure=None)
    return None if failure is None else (failure.kind, failure.message)


# Times and counts


def test_b01_chunks_keep_their_times_and_token_counts_and_tpot_is_10_ms() -> None:
    reader = read(
        (0.100, event("a", ids=[1])),
        (0.130, event("bcd", ids=[2, 3, 4])),
        (0.160, event("efg", ids=[5, 6, 7])),
        (0.190, event("hij", ids=[8, 9, 10], finish="length")),
        (0.191, usage(10) + DONE),
    )
    answer = reader.fields()
    assert answer["chunks"] == ((0.100, 1), (0.130, 3), (0.160, 3), (0.190, 3))
    assert answer["num_output_tokens"] == 10
    assert answer["num_first_chunk_tokens"] == 1
    later = answer["num_output_tokens"] - answer["num_first_chunk_tokens"]
    assert (answer["last_token_s"] - answer["first_token_s"]) / later == pytest.approx(0.010)
    assert answer["output_token_ids"] == list(range(1, 11))
    assert verdict(reader) is None


def test_b02_the_tokens_of_each_chunk_are_known_not_averaged() -> None:
    # Gaps 30, 30, 60 ms with 3, 1, 2 tokens after the first chunk.
    reader = read(
        (0.00, event("a", ids=[0])),
        (0.03, event("bcd", ids=[1, 2, 3])),
        (0.06, event("e", ids=[4])),
        (0.12, event("fg", ids=[5, 6], finish="stop")),
    )
    times, tokens = zip(*reader.chunks, strict=True)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert tokens[1:] == (3, 1, 2)
    series = [gap / n for gap, n in zip(gaps, tokens[1:], strict=True) for _ in range(n)]
    assert series == pytest.approx([0.01, 0.01, 0.01, 0.03, 0.03, 0.03])


def test_b02_without_ids_or_counts_the_tokens_of_a_chunk_are_unknown() -> None:
    reader = read(
        (0.0, event("a")), (0.03, event("bcd")), (0.06, event("e", finish="stop")), (0.06, usage(5))
    )
    assert [tokens for _, tokens in reader.chunks] == [None, None, None]
    assert reader.fields()["num_first_chunk_tokens"] is None
    assert reader.fields()["num_output_tokens"] == 5


def test_b03_20_chunks_of_80_tokens_are_80_tokens() -> None:
    pieces = [(0.1 * number, event("four words in here ")) for number in range(1, 20)]
    reader = read(*pieces, (2.0, event("the end", finish="stop")), (2.0, usage(80) + DONE))
    answer = reader.fields()
    assert len(answer["chunks"]) == 20
    assert answer["num_output_tokens"] == 80
    assert answer["num_output_tokens"] / 2.0 == 40.0


@pytest.mark.parametrize("channel", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("empty", ["", None])
def test_b06_reasoning_starts_the_clock_and_the_role_chunk_does_not(channel: str, empty: str | None) -> None:
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":%s}}]}\n\n' % json.dumps(empty).encode()
    reader = read(
        (0.05, role),
        (0.20, event(empty, **{channel: "Hm"})),
        (2.20, event("Yes", **{channel: None})),
        (2.21, event("", finish="stop")),
        (2.22, usage(2) + DONE),
    )
    answer = reader.fields()
    assert answer["first_token_s"] == 0.20
    assert answer["first_answer_s"] == 2.20
    assert answer["last_token_s"] == 2.20
    assert (answer["reasoning_text"], answer["output_text"]) == ("Hm", "Yes")
    assert len(answer["chunks"]) == 2
    assert verdict(reader) is None


def test_b07_a_cap_that_is_reached_while_reasoning_is_a_success_without_an_answer_time() -> None:
    reader = read(
        (0.1, event(reasoning="Let me")), (0.2, event(reasoning=" see", finish="length")), (0.2, usage(64))
    )
    answer = reader.fields()
    assert verdict(reader) is None
    assert answer["first_token_s"] == 0.1
    assert answer["first_answer_s"] is None
    assert answer["output_text"] is None
    assert answer["num_output_tokens"] == 64
    assert answer["finish_reason"] == "length"


def test_b10_without_usage_the_count_is_unknown_and_not_5() -> None:
    pieces = [(0.1 * number, event("x")) for number in range(5)]
    reader = read(*pieces, (0.5, DONE))
    answer = reader.fields()
    assert verdict(reader) is None
    assert answer["num_output_tokens"] is None
    assert answer["usage_reason"] == "the server sent no usage"
    cut = read(*pieces)
    assert cut.fields()["num_output_tokens"] is None


def test_b11_usage_counts_however_short_the_text_is() -> None:
    reader = read((0.1, event("one two", finish="stop")), (0.1, usage(400)))
    assert reader.fields()["num_output_tokens"] == 400


def test_usage_of_no_token_beside_text_is_not_believed() -> None:
    answer = read((0.1, event("text", finish="stop")), (0.1, usage(0))).fields()
    assert answer["num_output_tokens"] is None
    assert answer["usage_reason"] == "usage says 0 tokens, yet tokens came"


def test_running_usage_gives_the_tokens_of_each_chunk() -> None:
    def counted(n: int) -> dict[str, Any]:
        return {"usage": {"prompt_tokens": 7, "completion_tokens": n}}

    reader = read(
        (0.0, event("", role="assistant", **counted(0))),
        (0.1, event("a", **counted(1))),
        (0.2, event("bcde", **counted(5))),
        (0.3, event("", **counted(6))),  # half a character: no text yet
        (0.4, event("f", finish="stop", **counted(8))),
        (0.4, usage(8)),
    )
    assert reader.chunks == [(0.1, 1), (0.2, 4), (0.4, 3)]
    assert reader.fields()["num_output_tokens"] == 8


def test_usage_in_the_last_chunk_alone_says_nothing_of_that_chunk() -> None:
    totals = {"usage": {"prompt_tokens": 7, "completion_tokens": 9}}
    reader = read((0.1, event("a")), (0.2, event("b", finish="stop", **totals)))
    assert reader.chunks == [(0.1, None), (0.2, None)]
    assert read((0.1, event("all of it", finish="stop", **totals))).chunks == [(0.1, 9)]


def test_ids_without_text_are_tokens_and_text_without_new_ids_is_not_a_chunk() -> None:
    reader = read(
        (0.1, event("", ids=[5])),
        (0.2, event("é", ids=[6])),
        (0.3, event("held back", ids=[], finish="stop")),
    )
    assert reader.chunks == [(0.1, 1), (0.2, 1)]
    assert reader.first_token_s == 0.1
    assert reader.last_token_s == 0.2
    answer = reader.fields()
    assert answer["first_answer_s"] == answer["first_token_s"]
    assert answer["output_text"] == "éheld back"
    assert answer["output_token_ids"] == [5, 6]


def test_ids_that_some_chunks_lack_are_not_given_as_the_answers_ids() -> None:
    assert read((0.1, event("a", ids=[1])), (0.2, event("b"))).fields()["output_token_ids"] is None


def test_prompt_ids_come_from_the_first_chunk_of_chat_and_of_completions() -> None:
    chat = read((0.1, event("", role="assistant", prompt_token_ids=[3, 4])), (0.2, event("a", ids=[1])))
    assert chat.fields()["prompt_token_ids"] == [3, 4]
    choice = {"text": "a", "token_ids": [1], "prompt_token_ids": [3, 4]}
    body = b"data: " + json.dumps({"model": "m", "choices": [choice]}).encode() + b"\n\n"
    completions = read((0.1, body))
    assert completions.fields()["prompt_token_ids"] == [3, 4]
    assert completions.fields()["output_text"] == "a"
    assert completions.fields()["model"] == "m"


def test_cached_prompt_tokens_come_from_whichever_field_a_server_has() -> None:
    details = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    assert read((0.1, event("a", usage=details))).fields()["num_cached_tokens"] == 4
    assert read((0.1, event("a", meta_info={"cached_tokens": 5}))).fields()["num_cached_tokens"] == 5
    assert read((0.1, event("a", timings={"cache_n": 6}))).fields()["num_cached_tokens"] == 6
    assert read((0.1, event("a"))).fields()["num_cached_tokens"] is None


def test_tool_calls_are_tokens_of_the_answer() -> None:
    call = {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{"}}]}}]}
    reader = read((0.1, event(reasoning="hm")), (0.4, b"data: " + json.dumps(call).encode() + b"\n\n"))
    assert reader.fields()["first_answer_s"] == 0.4
    assert reader.fields()["output_text"] == ""


def test_a_document_in_place_of_a_stream_is_one_chunk() -> None:
    content = {
        "model": "m",
        "choices": [{"message": {"content": "Yes", "reasoning": "Hm"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    for streamed in (False, None):
        reader = read((0.5, json.dumps(content).encode()), chunked=False, streamed=streamed)
        answer = reader.fields()
        assert verdict(reader) is None
        assert answer["chunks"] == ((0.5, 2),)
        assert (answer["output_text"], answer["reasoning_text"]) == ("Yes", "Hm")


# What counts as an answer


def test_b14_an_error_in_the_body_fails_the_request_and_keeps_its_text() -> None:
    reader = read(
        (0.1, b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'),
        (0.2, b'data: {"error":{"message":"x","code":500}}\n\n'),
        (0.2, DONE),
    )
    assert verdict(reader) == ("server_error", "x")
    assert reader.fields()["output_text"] == "a"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'data: {"error":"out of memory"}\n\n', "out of memory"),
        (b'data: {"object":"error","message":"too\\nlong","code":400}\n\n', "too long"),
        (b'event: error\ndata: {"message":"boom"}\n\n', "boom"),
        (b'error: {"code":500,"message":"slot lost"}\n\n', "slot lost"),
        (b'data: {"error":{"code":7}}\n\n', '{"error": {"code": 7}}'),
    ],
)
def test_b14_every_way_to_say_error_is_heard(body: bytes, message: str) -> None:
    reader = read((0.1, event("a", finish="stop")), (0.2, body + DONE))
    assert verdict(reader) == ("server_error", message)


def test_an_error_field_of_null_is_no_error() -> None:
    assert verdict(read((0.1, event("a", finish="stop", error=None)))) is None


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_request_that_the_server_gave_up_is_not_an_answer(reason: str) -> None:
    message = f"the server gave up the request (finish_reason {reason})"
    assert verdict(read((0.1, event("a", finish=reason)), (0.2, DONE))) == ("server_error", message)


def test_b15_four_200s_with_two_answers_are_two_answers() -> None:
    readers = [
        read((0.10, event("a", ids=list(range(8)))), (0.2, event("", finish="stop")), (0.2, usage(8) + DONE)),
        read((0.01, event("", role="assistant")), (0.02, event("", finish="stop")), (0.02, usage(0) + DONE)),
        read((0.30, event("a", ids=list(range(8)))), (0.4, event("", finish="stop")), (0.4, usage(8) + DONE)),
        read((0.01, DONE)),
    ]
    assert [None if failed is None else failed[0] for failed in map(verdict, readers)] == [
        None,
        "empty",
        None,
        "empty",
    ]
    assert [reader.first_token_s for reader in readers] == [0.10, None, 0.30, None]


def test_b17_text_without_an_end_is_truncated_and_kept() -> None:
    reader = read((0.1, event("two")), (0.2, event(" chunks")))
    assert verdict(reader, ended=False) == (
        "truncated",
        "the stream ended without finish_reason or [DONE]",
    )
    assert verdict(reader, ended=True) == verdict(reader, ended=False)
    assert reader.fields()["output_text"] == "two chunks"
    stalled = Failure(status="timeout", kind="stalled", message="no bytes for 5 s")
    assert reader.judge(ended=False, failure=stalled) == stalled


def test_a_connection_that_closes_before_any_token_is_disconnected() -> None:
    reader = read((0.1, event("", role="assistant")))
    assert verdict(reader, ended=False) == (
        "disconnected",
        "the server closed the connection before the first token",
    )


def test_an_event_that_the_end_cut_in_two_is_truncation_and_not_garbage() -> None:
    reader = read((0.1, event("a")), (0.2, b'data: {"choices":[{"del'))
    assert verdict(reader, ended=False) == (
        "truncated",
        "the stream ended without finish_reason or [DONE]",
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"data: hello\n\n", "no JSON: b'hello'"),
        (b'data: {"a":1} {"b":2}\n\n', 'no JSON: b\'{"a":1} {"b":2}\''),
        (b'data: "text"\n\n', "JSON of an unknown shape: b'\"text\"'"),
        (b'data: {"choices":[3]}\n\n', "JSON of an unknown shape: b'{\"choices\":[3]}'"),
        (b'data: {"t":"\xff"}\n\n', 'no JSON: b\'{"t":"\\xff"}\''),
        (
            b"<html>Bad gateway</html>",
            "the body is neither an event stream nor JSON: b'<html>Bad gateway</html>'",
        ),
    ],
)
def test_bytes_that_are_no_answer_are_garbage(body: bytes, message: str) -> None:
    reader = read((0.1, body), streamed=None)
    assert verdict(reader) == ("garbage", message)


def test_broken_chunked_coding_is_garbage() -> None:
    reader = AnswerReader(chunked=True, streamed=True)
    reader.feed(0.1, b"xyz\r\ndata: {}\n\n\r\n")
    assert verdict(reader) == ("garbage", "b'xyz' is not a chunk size")


# Framing

B30 = (
    b'data: {"t":"\xc3',
    b'\xa9"}\r\n\r\n: ping\n\ndata:{"t":"\xe2\x9c\x93"}\n\ndata: {"t":"ok"}\n\ndata: [DONE]\n\n',
)


def test_b30_events_are_found_whatever_the_line_ends_and_splits() -> None:
    for pieces in (B30, [bytes([byte]) for byte in b"".join(B30)]):
        decoder = EventDecoder()
        payloads = [payload for piece in pieces for _, payload in decoder.feed(piece)]
        assert decoder.clean
        assert decoder.close() == []
        assert payloads[-1] == b"[DONE]"
        assert len(payloads) == 4
        assert "".join(json.loads(payload)["t"] for payload in payloads[:-1]) == "é✓ok"


def test_b30_an_event_has_the_time_of_its_last_byte_and_a_comment_has_none() -> None:
    body = b"".join(B30).replace(b'{"t":', b'{"choices":[{"delta":{"content":').replace(b'"}', b'"}}]}')
    reader = AnswerReader(chunked=False, streamed=True)
    for index in range(len(body)):
        reader.feed(float(index), body[index : index + 1])
    ends = [body.index(b"\r\n\r\n") + 3]
    for marker in ("✓".encode(), b"ok"):
        ends.append(body.index(b"\n\n", body.index(marker)) + 1)
    assert [time_s for time_s, _ in reader.chunks] == [float(end) for end in ends]
    assert reader.fields()["output_text"] == "é✓ok"
    assert reader.first_token_s == float(ends[0])
    assert reader.done


@pytest.mark.parametrize(
    ("body", "events"),
    [
        (b"data: a\ndata: b\n\n", [(b"", b"a\nb")]),
        (b"\xef\xbb\xbfdata: a\n\n", [(b"", b"a")]),
        (b"data: a\r\rdata: b\r\r", [(b"", b"a"), (b"", b"b")]),
        (b"\n\n\ndata: a\n\n\n\n\ndata:  b\n\n", [(b"", b"a"), (b"", b" b")]),
        (b"id: 3\nretry: 5\nevent: delta\ndata: a\nunknown\n\n", [(b"delta", b"a")]),
        (b"event: ping\n\n: nothing\n\ndata\n\n", [(b"", b"")]),
    ],
)
def test_event_streams_as_the_standard_has_them(body: bytes, events: list[tuple[bytes, bytes]]) -> None:
    whole = EventDecoder()
    assert whole.feed(body) == events
    single = EventDecoder()
    assert [found for byte in body for found in single.feed(bytes([byte]))] == events


def test_an_event_without_its_blank_line_counts_when_the_stream_ends() -> None:
    reader = read((0.1, event("a")), (0.2, event("b", finish="stop")[:-2]), chunked=False)
    assert reader.fields()["output_text"] == "ab"
    assert reader.last_token_s == 0.2
    assert verdict(reader, ended=False) is None
    last = read((0.1, event("a")), (0.2, DONE.strip()), chunked=False)
    assert last.done


@given(
    cuts=st.lists(st.integers(min_value=1, max_value=60), min_size=1, max_size=80),
    line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    chunk_size=st.integers(min_value=1, max_value=200),
)
def test_no_split_of_the_bytes_changes_what_is_read(
    cuts: list[int], line_end: bytes, chunk_size: int
) -> None:
    body = b"".join(
        [
            event("", role="assistant"),
            b": keep-alive\n\n",
            event("Größe ", ids=[1, 2]),
            event("✓ 0\r\n\r\n", ids=[3]),
            event("end", ids=[4, 5, 6], finish="stop"),
            usage(6),
            DONE,
        ]
    ).replace(b"\n", line_end)
    wire = b"".join(in_chunks(body[at : at + chunk_size]) for at in range(0, len(body), chunk_size))
    wire += b"0\r\nTrailer: x\r\n\r\n"
    reader = AnswerReader(chunked=True, streamed=True)
    at, number = 0, 0
    while at < len(wire):
        size = cuts[number % len(cuts)]
        reader.feed(float(number), wire[at : at + size])
        at, number = at + size, number + 1
    assert reader.complete
    assert reader.done
    answer = reader.fields()
    assert answer["output_text"] == "Größe ✓ 0\r\n\r\nend"
    assert [tokens for _, tokens in answer["chunks"]] == [2, 1, 3]
    assert answer["output_token_ids"] == [1, 2, 3, 4, 5, 6]
    assert answer["num_output_tokens"] == 6
    assert verdict(reader) is None


KINDS = ("content", "reasoning", "reasoning_content", "ids", "no ids", "usage", "finish", "spaced", "extra")


@given(kinds=st.lists(st.sampled_from(KINDS), max_size=30), texts=st.lists(st.text(), min_size=1, max_size=5))
def test_events_that_look_alike_are_read_as_if_each_were_parsed_whole(
    kinds: list[str], texts: list[str]
) -> None:
    content: list[str] = []
    reasoning: list[str] = []
    chunks: list[tuple[float, int | None]] = []
    ids: list[int] = []
    finish = None
    reader = AnswerReader(chunked=False, streamed=True)
    uncounted = False
    for number, kind in enumerate(kinds):
        text = texts[number % len(texts)]
        name = kind if kind.startswith("reasoning") else "content"
        choice: dict[str, Any] = {"index": 0, "delta": {name: text}, "finish_reason": None}
        whole: dict[str, Any] = {"id": "x", "choices": [choice]}
        own: list[int] | None = None
        if kind in ("ids", "spaced"):
            own = choice["token_ids"] = list(range(number % 4))
        if kind == "finish":
            finish = choice["finish_reason"] = "stop"
        if kind == "usage":
            whole["usage"] = {"completion_tokens": 3}
        if kind == "extra":
            choice["delta"]["other"] = {"content": "not this", "token_ids": [9]}
        separators = (", ", ": ") if kind == "spaced" else (",", ":")
        body = json.dumps(whole, ensure_ascii=number % 2 == 0, separators=separators)
        reader.feed(float(number), b"data: " + body.encode() + b"\n\n")
        if text or own:
            (reasoning if name != "content" else content).append(text)
            ids += own or []
            num_tokens: int | None = len(own) if own is not None else None
            if kind == "usage" and not uncounted:
                num_tokens = 3
            uncounted = uncounted or kind != "usage"
            if num_tokens != 0 or not chunks:
                chunks.append((float(number), num_tokens or None))
            if kind == "usage":
                break
    assert reader.garbage is None
    answer = reader.fields()
    assert answer["output_text"] == ("".join(content) if any(content) else None)
    assert answer["reasoning_text"] == ("".join(reasoning) if any(reasoning) else None)
    assert list(answer["chunks"]) == chunks
    assert answer["finish_reason"] == finish
    assert answer["output_token_ids"] in (None, ids)


def test_a_stream_of_like_events_keeps_every_text_and_id() -> None:
    texts = [f'{number} "quoted" \\ \n é ✓ token_ids":[1]' for number in range(50)]
    pieces = [
        (float(number), event(text, ids=[number, number + 1], finish=None))
        for number, text in enumerate(texts)
    ]
    reader = read(*pieces, (50.0, event("!", ids=[7], finish="stop")), (50.0, usage(101) + DONE))
    answer = reader.fields()
    assert answer["output_text"] == "".join(texts) + "!"
    assert answer["output_token_ids"] == [i for number in range(50) for i in (number, number + 1)] + [7]
    assert answer["chunks"] == (*((float(number), 2) for number in range(50)), (50.0, 1))
    assert verdict(reader) is None


def test_an_unlike_event_after_like_ones_is_heard() -> None:
    like = [(0.1 * number, event("a", ids=[1])) for number in range(5)]
    broken = event("a", ids=[1]).replace(b"[1]", b"[1}")
    assert verdict(read(*like, (1.0, broken)))[0] == "garbage"  # type: ignore[index]
    failed = event("a", ids=[1], error="lost")
    assert verdict(read(*like, (1.0, failed))) == ("server_error", "lost")
    empty = read(*like, (1.0, event("", ids=[])), (1.1, event("", ids=[4])))
    assert empty.chunks[-1] == (1.1, 1)
    assert len(empty.chunks) == 6


def test_an_empty_finish_reason_is_no_end() -> None:
    reader = read((0.1, event("a", finish="")), (0.2, event("b", finish="")))
    assert verdict(reader) == ("truncated", "the stream ended without finish_reason or [DONE]")


def test_a_chunk_that_is_longer_than_its_size_breaks_the_framing() -> None:
    dechunker = Dechunker()
    assert dechunker.feed(b"3\r\nabc\r\n5;name=x\r\nde") == b"abcde"
    assert not dechunker.clean
    assert dechunker.feed(b"fghxx") == b"fgh"
    assert dechunker.error == "a chunk is longer than its size: b'xx'"
    assert dechunker.feed(b"\r\n0\r\n\r\n") == b""


def test_a_chunk_size_that_never_ends_breaks_the_framing() -> None:
    dechunker = Dechunker()
    assert dechunker.feed(b"1" * 2000) == b""
    assert dechunker.error == "no chunk size in b'11111111111111111111'"


def test_heads_say_how_the_body_comes() -> None:
    assert read_head(bytearray(b"HT")) is None
    assert read_head(bytearray(b"HTTP/1.1 200 OK\r\nA: b\r\n")) is None
    head = read_head(
        bytearray(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
            b"Content-Type: text/event-stream; charset=utf-8\r\n\r\nrest"
        )
    )
    assert head is not None
    assert (head.status, head.chunked, head.length, head.streamed, head.persistent) == (
        200,
        True,
        None,
        True,
        True,
    )
    closing = read_head(bytearray(b"HTTP/1.0 500 Oops\r\ncontent-length: 3\r\n\r\nabc"))
    assert closing is not None
    assert (closing.status, closing.length, closing.streamed, closing.persistent) == (500, 3, False, False)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SSH-2.0-OpenSSH", "the answer is not HTTP/1: b'SSH-2.0-OpenSSH'"),
        (b"HTTP/1.1 soon\r\n\r\n", "the answer has no HTTP status: 'HTTP/1.1 soon'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "the answer's content length is 'many'"),
        (b"HTTP/1.1 200 OK\r\n" + b"x" * 70_000, "the answer's head is over 64 KiB long"),
    ],
)
def test_heads_that_are_not_http_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(FramingError) as refusal:
        read_head(bytearray(data))
    assert str(refusal.value) == message


# Acceptance


def vllm_metrics(histogram: list[int], **more: Any) -> dict[str, Any]:
    steps = sum(histogram)
    accepted = sum(j * n for j, n in enumerate(histogram))
    k = len(histogram) - 1
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / steps,
            "draft_acceptance_rate": accepted / (k * steps),
            "acceptance_histogram": histogram,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": k * steps,
            "num_spec_tokens": k,
            **more,
        }
    }


def test_a27_acceptance_of_two_responses_pools_by_steps() -> None:
    records = []
    for histogram in ([4, 3, 2, 1], [0, 0, 0, 5]):
        reader = read(
            (0.1, event("a", finish="stop")), (0.2, usage(9, metrics=vllm_metrics(histogram)) + DONE)
        )
        record = reader.fields()["acceptance"]
        assert record.source == "vllm"
        assert record.histogram == tuple(histogram)
        records.append(record)
    steps = sum(record.num_drafts for record in records)
    accepted = sum(record.num_accepted_tokens for record in records)
    assert (steps, accepted) == (15, 25)
    assert 1 + accepted / steps == pytest.approx(2.667, abs=5e-4)
    survival = [sum(sum(r.histogram[i + 1 :]) for r in records) / steps for i in range(3)]
    assert survival == pytest.approx([0.7333, 0.5333, 0.40], abs=5e-5)
    assert records[0].num_speculative_tokens == 3


def test_a27_detailed_steps_are_kept_and_an_absent_object_is_none() -> None:
    detailed = vllm_metrics([1, 0, 1], per_step_accepted=[2, 0], per_step_drafted=[2, 2])
    body = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "metrics": detailed}
    record = read((0.1, json.dumps(body).encode()), chunked=False, streamed=False).fields()["acceptance"]
    assert record == Acceptance(
        source="vllm",
        num_drafts=2,
        num_draft_tokens=4,
        num_accepted_tokens=2,
        num_speculative_tokens=2,
        histogram=(1, 0, 1),
        per_step_accepted=(2, 0),
        per_step_drafted=(2, 2),
    )
    assert read((0.1, event("a"))).fields()["acceptance"] is None
    timing_only = {"time_to_first_token_ms": 3.0, "speculative_decoding": None}
    assert read((0.1, event("a", metrics=timing_only))).fields()["acceptance"] is None


def test_sglang_reports_verification_steps() -> None:
    meta = {"spec_verify_ct": 20, "spec_accept_length": 2.55, "completion_tokens": 51, "cached_tokens": 0}
    assert acceptance({}, meta, {}) == Acceptance(source="sglang", num_drafts=20, num_accepted_tokens=30)
    exact = {**meta, "spec_accept_token_num": 32, "spec_draft_token_num": 140}
    assert acceptance({}, exact, {}) == Acceptance(
        source="sglang", num_drafts=20, num_draft_tokens=140, num_accepted_tokens=32
    )
    assert acceptance({}, {"completion_tokens": 51}, {}) is None


def test_llamacpp_reports_drafted_and_accepted_tokens_but_no_steps() -> None:
    timings = {"predicted_n": 50, "draft_n": 48, "draft_n_accepted": 40}
    assert acceptance({}, {}, timings) == Acceptance(
        source="llamacpp", num_draft_tokens=48, num_accepted_tokens=40
    )
    assert acceptance({}, {}, {"predicted_n": 50}) is None


def test_llamacpp_timings_in_every_chunk_give_its_tokens() -> None:
    reader = read(
        (0.1, event("a", timings={"predicted_n": 1})), (0.2, event("bcd", timings={"predicted_n": 4}))
    )
    assert reader.chunks == [(0.1, 1), (0.2, 3)]


def test_counts_that_are_none_are_none() -> None:
    broken = {"speculative_decoding": {"num_spec_steps": -1, "acceptance_histogram": [1, "x"]}}
    assert acceptance(broken, {}, {}) == Acceptance(source="vllm")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            b'{"error":{"message":"The model `x` does not exist.","code":404}}',
            "The model `x` does not exist.",
        ),
        (b'{"object":"error","message":"too long"}', "too long"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b"<h1>502\n Bad  Gateway</h1>", "<h1>502 Bad Gateway</h1>"),
        (b"", "the server gave no message"),
        (b"x" * 1000, "x" * 300),
    ],
)
def test_error_bodies_become_one_line(body: bytes, text: str) -> None:
    assert error_text(body) == text
