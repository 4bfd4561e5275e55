"""What servers stream, in the forms in which they were reported to differ: the same is understood.

Each row is a fault that users met with a real server; what it meant to say is clear all the same.
"""

import json

import pytest
from forebay_shared.errors import UpstreamError
from forebay_shared.wire import UNSAID, CallDelta
from forebay_worker.engines.http.chunks import Chunk, Events, chunk_of

EVENTS = (
    b"\xef\xbb\xbfdata: 1\r\n\r\n",
    b": keep-alive\n\ndata:2\n\n",
    b"event: message\nid: 7\ndata: 3\ndata: 4\n\n",
    b"data: 5\r\r",
    b"retry: 3000\n\ndata: 6",
)
CALL = {"id": "c", "type": "function"}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n\r\n"])
def test_events_end_in_any_way_and_are_cut_anywhere(size: int, end: bytes) -> None:
    events, raw = Events(), b"".join(EVENTS) + end
    found = [each for at in range(0, len(raw), size) for each in events.push(raw[at : at + size])]
    assert [*found, *filter(None, [events.rest()])] == [b"1", b"2", b"3\n4", b"5", b"6"]


def delta(**fields: object) -> dict:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def ending(reason: object) -> dict:
    return {"choices": [{"delta": {}, "finish_reason": reason}]}


@pytest.mark.parametrize(
    ("sent", "chunk"),
    [
        ({"choices": None, "usage": None}, Chunk()),
        ({"object": "chat.completion.chunk"}, Chunk()),
        ({"choices": [], "error": None}, Chunk()),
        ({"choices": [{"delta": None}]}, Chunk()),
        (delta(role="", content=None, tool_calls=None, function_call=None), Chunk()),
        (delta(content="", tool_calls=[]), Chunk()),
        (delta(reasoning={"text": "x"}, reasoning_content="hm"), Chunk(reasoning="hm")),
        (
            delta(
                content=[
                    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                    {"type": "text", "text": "so"},
                ]
            ),
            Chunk("so", "hm"),
        ),
        (ending(""), Chunk()),
        (ending("None"), Chunk()),
        (ending("stop"), Chunk(reason="stop")),
    ],
)
def test_nothing_is_said_in_many_ways(sent: dict, chunk: Chunk) -> None:
    assert chunk_of(json.dumps(sent).encode()) == chunk


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({**CALL, "function": {"name": "f"}}, CallDelta(UNSAID, "c", "f")),
        ({"index": None, "function": {"arguments": "{"}}, CallDelta(UNSAID, "", "", "{")),
        ({"index": 2, "id": None, "function": None}, CallDelta(2)),
        ({"index": 0, "function": {"name": None, "arguments": None}}, CallDelta(0)),
        (
            {"index": 0, **CALL, "function": {"name": "f", "arguments": {"a": "é"}}},
            CallDelta(0, "c", "f", '{"a":"é"}'),
        ),
    ],
)
def test_a_call_comes_in_many_forms(call: dict, said: CallDelta) -> None:
    assert chunk_of(json.dumps(delta(tool_calls=[call])).encode()).calls == [said]


def test_numbers_that_are_null_are_none() -> None:
    top = {"token": "a", "logprob": None, "bytes": None}
    choice = {"delta": {"content": "a"}, "logprobs": {"content": [top | {"top_logprobs": [top]}]}}
    usage = {"prompt_tokens": None, "completion_tokens": None, "prompt_tokens_details": None}
    chunk = chunk_of(json.dumps({"choices": [choice], "usage": usage}).encode())
    assert chunk.logprobs[0].logprob == chunk.logprobs[0].top[0][1] == -9999
    assert chunk.usage is not None
    assert (chunk.usage.prompt_tokens, chunk.usage.cached_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r"a\ud83d", "a\ufffd"),
        (r"\ude00b", "\ufffdb"),
        (r"\ud83d\ude00\ud83d", "😀\ufffd"),
        (r"\\ud83d \ud83d", "\\ud83d \ufffd"),
    ],
)
def test_half_a_character_breaks_no_answer(written: str, text: str) -> None:
    assert chunk_of(b'{"choices":[{"delta":{"content":"%b"}}]}' % written.encode()).content == text


@pytest.mark.parametrize("error", [{"message": "x"}, "x", ["x"], 500])
def test_an_error_in_the_stream_is_an_error_in_any_form(error: object) -> None:
    with pytest.raises(UpstreamError, match="broke off"):
        chunk_of(json.dumps({"error": error, "choices": []}).encode())
