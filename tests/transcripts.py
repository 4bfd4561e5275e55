"""The golden-transcript checker: is this raw answer what the HTTP contract promises?

`check_stream` takes the bytes of an event stream as a client got them, `check_answer` and
`check_error` the bytes of a JSON answer. Each raises AssertionError that names the broken rule, and
returns what the transcript says, so that a test can go on with it. It knows no server.
"""

import json
import re
from dataclasses import dataclass, field

FINISH_REASONS = {"stop", "length", "tool_calls", "function_call", "content_filter"}
MAX_ERROR_BYTES = 4096
_CHUNK_KEYS = {"id", "object", "created", "model", "choices"}
_OBJECTS = {
    "chat.completion.chunk": "chatcmpl-",
    "chat.completion": "chatcmpl-",
    "text_completion": "cmpl-",
}
_MILLISECONDS = 100_000_000_000


@dataclass
class Transcript:
    """What an answer says: per choice its text, thinking, tool calls, finish reason, what of the
    client's ended it, and deltas.

    A call is `{"id", "name", "arguments"}`; a streamed one has its argument `pieces` as well. A
    legacy `function_call` has no id.
    """

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    stops: dict[int, str | int | None] = field(default_factory=dict)
    pieces: dict[int, list[str]] = field(default_factory=dict)
    thoughts: dict[int, str] = field(default_factory=dict)
    calls: dict[int, list[dict]] = field(default_factory=dict)
    logprobs: dict[int, list[dict]] = field(default_factory=dict)
    usage: dict | None = None
    error: dict | None = None
    id: str = ""


def split_events(raw: bytes) -> list[bytes]:
    """The data of each event. Only the one framing that every parser reads is right."""
    assert b"\r" not in raw, "a carriage return in the stream"
    assert raw.endswith(b"\n\n"), "the last event is cut off"
    events = raw[:-2].split(b"\n\n")
    for event in events:
        assert event.startswith(b"data: "), f"an event does not begin with 'data: ': {event[:40]!r}"
        assert b"\n" not in event, "an event has several lines"
    return [event[len(b"data: ") :] for event in events]


def check_stream(
    raw: bytes, *, model: str, n: int = 1, include_usage: bool = False, chat: bool = True
) -> Transcript:
    """Checks a whole event stream of a chat or text completion."""
    events = split_events(raw)
    transcript = Transcript()
    chunks = _chunks(events, transcript)
    identity: tuple | None = None
    for position, chunk in enumerate(chunks):
        assert set(chunk) >= _CHUNK_KEYS, f"chunk lacks {_CHUNK_KEYS - set(chunk)}"
        assert chunk["object"] == ("chat.completion.chunk" if chat else "text_completion")
        _check_identity(chunk, model)
        identity = identity or _identity(chunk)
        assert _identity(chunk) == identity, "id, created, model or object changed"
        _check_chunk_usage(chunk, include_usage, last=position == len(chunks) - 1)
        for choice in chunk["choices"]:
            _take_choice(choice, transcript, n, chat)
    if transcript.error is None:
        assert set(transcript.reasons) == set(range(n)), "a choice has no finish reason"
        assert (transcript.usage is not None) == include_usage, "usage is there iff asked for"
    transcript.texts = {index: "".join(found) for index, found in transcript.pieces.items()}
    for index in range(n if transcript.error is None else 0):
        transcript.texts.setdefault(index, "")
    transcript.id = identity[0] if identity else ""
    return transcript


def _chunks(events: list[bytes], transcript: Transcript) -> list[dict]:
    """The chunks before `[DONE]` or before the error that ends the stream."""
    if events[-1] == b"[DONE]":
        chunks = [json.loads(event) for event in events[:-1]]
    else:
        *chunks, last = [json.loads(event) for event in events]
        assert "error" in last, "the stream ends without [DONE]"
        _check_envelope(last)
        transcript.error = last["error"]
    assert not any("error" in chunk for chunk in chunks), "something follows an error"
    if transcript.error is None and chunks and not chunks[-1]["choices"]:
        transcript.usage = chunks[-1]["usage"]
        _check_usage(transcript.usage)
    return chunks


def _identity(chunk: dict) -> tuple:
    return chunk["id"], chunk["created"], chunk["model"], chunk["object"]


def _check_identity(body: dict, model: str) -> None:
    prefix = _OBJECTS[body["object"]]
    assert body["id"].startswith(prefix), f"id does not begin with {prefix}"
    assert len(body["id"]) > len(prefix), "id is only a prefix"
    assert type(body["created"]) is int, "created is not an integer"
    assert 0 < body["created"] < _MILLISECONDS, "created is not in seconds"
    assert body["model"] == model, "model is not the name that was asked for"
    assert isinstance(body["choices"], list), "choices is not a list"


def _check_chunk_usage(chunk: dict, include_usage: bool, *, last: bool) -> None:
    if not include_usage:
        assert "usage" not in chunk, "usage was not asked for"
        assert chunk["choices"], "a chunk has no choice"
        return
    assert "usage" in chunk, "usage is missing; it must be null or given"
    if not last:
        assert chunk["usage"] is None, "usage before the last chunk"
        assert chunk["choices"], "an empty chunk before the end"


def _take_choice(choice: dict, transcript: Transcript, n: int, chat: bool) -> None:
    index = choice["index"]
    assert 0 <= index < n, f"index {index} of {n}"
    assert index not in transcript.reasons, f"choice {index} goes on after its finish reason"
    reason = choice["finish_reason"]
    first = index not in transcript.pieces
    pieces = transcript.pieces.setdefault(index, [])
    if chat:
        delta = choice["delta"]
        assert None not in delta.values(), "a null inside a delta"
        if first:
            assert delta == {"role": "assistant", "content": ""}, "the first delta has no role"
        else:
            assert "role" not in delta, "a role after the first delta"
        if reason is not None:
            assert delta == {}, "the finish reason comes with a delta"
            assert "stop_reason" in choice, "the last chunk of a choice does not say what ended it"
            called = bool(transcript.calls.get(index))
            assert called or reason != "tool_calls", "tool_calls without a call"
            assert not called or reason != "stop", "stop although tools were called"
        text = delta.get("content", "")
        _take_parts(index, delta, transcript)
    else:
        text = choice["text"]
        assert reason is None or text == "", "the finish reason comes with text"
    pieces.append(text)
    if choice.get("logprobs") is not None:
        transcript.logprobs.setdefault(index, []).append(choice["logprobs"])
    if reason is not None:
        assert reason in FINISH_REASONS, f"finish reason {reason!r}"
        transcript.reasons[index] = reason
        transcript.stops[index] = choice["stop_reason"]


def _take_parts(index: int, delta: dict, transcript: Transcript) -> None:
    """Thinking and tool calls of a delta."""
    known = {"role", "content", "reasoning", "reasoning_content", "tool_calls", "function_call"}
    assert set(delta) <= known, f"unknown keys in a delta: {set(delta) - known}"
    thought = delta.get("reasoning", "")
    assert delta.get("reasoning_content", "") == thought, "two names, two texts"
    if thought:
        assert not transcript.texts.get(index), "thinking after the answer"
        transcript.thoughts[index] = transcript.thoughts.get(index, "") + thought
    calls = transcript.calls.setdefault(index, [])
    for call in delta.get("tool_calls", ()):
        _take_call(call, calls)
    if function := delta.get("function_call"):
        _take_function(function, calls)


def _take_function(function: dict, calls: list[dict]) -> None:
    if not calls:
        assert set(function) == {"name", "arguments"}, "first delta of a function_call"
        calls.append({"id": None, "name": function["name"], "pieces": [], "arguments": ""})
    else:
        assert set(function) == {"arguments"}, "a later delta of a function_call"
        calls[0]["pieces"].append(function["arguments"])
    calls[0]["arguments"] += function["arguments"]


def _take_call(call: dict, calls: list[dict]) -> None:
    function = call["function"]
    assert isinstance(function["arguments"], str), "arguments is not a string"
    if call["index"] == len(calls):
        assert set(call) == {"index", "id", "type", "function"}, "first delta of a call"
        assert function["arguments"] == "", "the first delta of a call has arguments"
        check_call(call)
        calls.append({"id": call["id"], "name": function["name"], "pieces": [], "arguments": ""})
        return
    assert call["index"] == len(calls) - 1, "a call goes on after the next one began"
    assert set(call) == {"index", "function"}, "a later delta of a call repeats its head"
    assert set(function) == {"arguments"}, "a later delta of a call repeats its name"
    assert function["arguments"], "a delta without any argument text"
    calls[-1]["pieces"].append(function["arguments"])
    calls[-1]["arguments"] += function["arguments"]


def check_call(call: dict) -> None:
    """Checks what a call's first delta and a whole call have in common."""
    assert re.fullmatch("call_[0-9a-f]{24}", call["id"]), f"id of a call: {call['id']}"
    assert call["type"] == "function", "type of a call"
    assert isinstance(call["function"]["name"], str), "name of a call"
    assert call["function"]["name"], "name of a call"


def check_answer(raw: bytes, *, model: str, n: int = 1, chat: bool = True) -> Transcript:
    """Checks the JSON of an answer that is not streamed."""
    body = json.loads(raw)
    assert "error" not in body, "an error with status 200"
    assert body["object"] == ("chat.completion" if chat else "text_completion")
    _check_identity(body, model)
    assert [choice["index"] for choice in body["choices"]] == list(range(n)), "indexes"
    transcript = Transcript(usage=body["usage"], id=body["id"])
    _check_usage(body["usage"])
    for choice in body["choices"]:
        index = choice["index"]
        assert choice["finish_reason"] in FINISH_REASONS, "finish reason"
        transcript.reasons[index] = choice["finish_reason"]
        transcript.stops[index] = choice["stop_reason"]
        if chat:
            assert choice["message"]["role"] == "assistant", "role"
            _take_message(index, choice, transcript)
        else:
            transcript.texts[index] = choice["text"]
        assert isinstance(transcript.texts[index], str), "text is not a string"
        if choice.get("logprobs") is not None:
            transcript.logprobs[index] = [choice["logprobs"]]
    return transcript


def _take_message(index: int, choice: dict, transcript: Transcript) -> None:
    message = choice["message"]
    calls = message.get("tool_calls")
    assert calls is None or calls, "an empty list of calls"
    for call in calls or ():
        check_call(call)
        assert set(call) == {"id", "type", "function"}, f"keys of a call: {set(call)}"
    transcript.calls[index] = [{"id": call["id"], **call["function"]} for call in calls or ()]
    if function := message.get("function_call"):
        assert not calls, "both forms of a call"
        transcript.calls[index] = calls = [{"id": None, **function}]
        assert choice["finish_reason"] != "tool_calls", "the reason of the other form"
    assert calls or choice["finish_reason"] != "tool_calls", "tool_calls without a call"
    assert not calls or choice["finish_reason"] != "stop", "stop although tools were called"
    assert not calls or message["content"] != "", "content is empty where it should be null"
    assert calls or message["content"] is not None, "content is null without a call"
    transcript.texts[index] = message["content"] or ""
    if "reasoning" in message or "reasoning_content" in message:
        assert message["reasoning"] == message["reasoning_content"], "two names, two texts"
        transcript.thoughts[index] = message["reasoning"]


def check_error(raw: bytes, *, status: int | None = None, content_type: str = "") -> dict:
    """Checks an error's envelope; returns what is in it."""
    assert len(raw) <= MAX_ERROR_BYTES, f"an error of {len(raw)} bytes"
    if content_type:
        assert content_type.startswith("application/json"), f"an error as {content_type}"
    assert status is None or status >= 400, f"an error with status {status}"
    body = json.loads(raw)
    _check_envelope(body)
    return body["error"]


def _check_envelope(body: dict) -> None:
    assert set(body) == {"error"}, f"keys beside error: {set(body)}"
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, f"keys of the error: {set(error)}"
    assert isinstance(error["message"], str), "message is not a string"
    assert error["message"], "message is empty"
    assert isinstance(error["type"], str), "type is not a string"
    assert isinstance(error["code"], str), "code is not a string"
    assert error["param"] is None or isinstance(error["param"], str), "param"


def _check_usage(usage: dict) -> None:
    counts = [usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]]
    assert all(type(count) is int and count >= 0 for count in counts), f"usage {usage}"
    assert counts[2] == counts[0] + counts[1], "total is not the sum"
    details = usage.get("prompt_tokens_details")
    if details:
        assert 0 <= details["cached_tokens"] <= counts[0], "more cached than prompted"
    if thinking := usage.get("completion_tokens_details"):
        assert 0 <= thinking["reasoning_tokens"] <= counts[1], "more thought than completed"
