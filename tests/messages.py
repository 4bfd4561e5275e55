"""The golden checker of the Anthropic dialect: is this raw answer what its clients rely on?

`check_message` takes the bytes of a JSON answer, `check_message_stream` those of an event stream.
Each raises AssertionError that names the broken rule, and returns the message; that of a stream is
put together from its events. It knows no server.
"""

import json
import re

STOP_REASONS = {"end_turn", "max_tokens", "stop_sequence", "tool_use"}
ERROR_TYPES = {
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "api_error",
    "overloaded_error",
}
_USAGE = {
    "input_tokens",
    "output_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "service_tier",
}
_DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}


def check_message(raw: bytes, *, model: str) -> dict:
    """Checks a message that is not streamed."""
    message = json.loads(raw)
    _check_head(message, model)
    for block in message["content"]:
        _check_block(block)
        if block["type"] == "text":
            assert block["text"], "an empty text block"
        if block["type"] == "thinking":
            assert block["signature"], "thinking without a signature"
    _check_end(message, message["content"])
    return message


def check_message_stream(raw: bytes, *, model: str) -> dict:
    """Checks a whole event stream; the message of one that breaks off has a key `error`."""
    events = _events(raw)
    kind, first = events[0]
    assert kind == "message_start", "the first event is not message_start"
    message = first["message"]
    _check_head(message, model)
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == (
        [],
        None,
        None,
    ), "the message is not empty at its start"
    open_block: dict | None = None
    ended = False
    for kind, event in events[1:]:
        assert not ended, f"{kind} after the end"
        if kind == "content_block_start":
            assert open_block is None, "a block begins inside another one"
            assert message["stop_reason"] is None, "a block after message_delta"
            open_block = _start(event, message)
        elif kind == "content_block_delta":
            assert open_block is not None, "a delta outside of a block"
            assert event["index"] == len(message["content"]) - 1, "a delta of another block"
            _take(event["delta"], open_block)
        elif kind == "content_block_stop":
            assert open_block is not None, "the end of a block that is not open"
            assert event["index"] == len(message["content"]) - 1, "the end of another block"
            _finish(open_block)
            open_block = None
        elif kind == "message_delta":
            assert open_block is None, "message_delta inside a block"
            assert set(event["delta"]) == {"stop_reason", "stop_sequence"}
            message |= event["delta"]
            message["usage"] |= event["usage"]
            message |= {key: event[key] for key in {"context_management"} & set(event)}
            _check_end(message, message["content"])
        elif kind == "error":
            check_message_error(json.dumps(event).encode())
            message["error"] = event["error"]
            ended = True
        elif kind == "message_stop":
            assert message["stop_reason"], "message_stop without message_delta"
            ended = True
        else:
            assert kind == "ping", f"unknown event {kind}"
    assert ended, "the stream has no end"
    return message


def check_message_error(raw: bytes) -> dict:
    """Checks an error's envelope; returns what is in it."""
    assert len(raw) <= 4096, f"an error of {len(raw)} bytes"
    body = json.loads(raw)
    assert set(body) == {"type", "error", "request_id"}, f"keys: {set(body)}"
    assert body["type"] == "error"
    keys = set(body["error"]) - {"details"}
    assert keys == {"type", "message"}, f"keys of the error: {set(body['error'])}"
    assert body["error"]["type"] in ERROR_TYPES, body["error"]
    assert body["error"]["message"], "message is empty"
    return body["error"]


def _events(raw: bytes) -> list[tuple[str, dict]]:
    """Each event has its name and the same name as `type` in its one line of data."""
    assert b"\r" not in raw, "a carriage return in the stream"
    assert raw.endswith(b"\n\n"), "the last event is cut off"
    events = []
    for event in raw[:-2].split(b"\n\n"):
        match = re.fullmatch(rb"event: (\w+)\ndata: (\{.*\})", event)
        assert match, f"an event in another form: {event[:60]!r}"
        data = json.loads(match.group(2))
        assert data["type"] == match.group(1).decode(), "the event's name is not its type"
        events.append((data["type"], data))
    return events


def _check_head(message: dict, model: str) -> None:
    assert set(message) - {"context_management"} == {
        "id",
        "type",
        "role",
        "model",
        "content",
        "stop_reason",
        "stop_sequence",
        "usage",
    }
    assert re.fullmatch("msg_[0-9a-f]{32}", message["id"]), f"id {message['id']}"
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["model"] == model, "model is not the name that was asked for"
    usage = message["usage"]
    assert set(usage) - {"output_tokens_details"} == _USAGE, f"usage {usage}"
    counts = [value for name, value in usage.items() if name.endswith("tokens")]
    assert all(type(count) is int and count >= 0 for count in counts), f"usage {usage}"


def _check_block(block: dict) -> None:
    keys = {
        "text": {"type", "text"},
        "thinking": {"type", "thinking", "signature"},
        "tool_use": {"type", "id", "name", "input"},
    }
    assert set(block) == keys[block["type"]], f"keys of a block: {set(block)}"
    if block["type"] == "tool_use":
        assert re.fullmatch("toolu_[0-9a-f]{24}", block["id"]), f"id of a call: {block['id']}"
        assert block["name"], "a call without a name"
        assert isinstance(block["input"], dict), "input is not an object"


def _check_end(message: dict, content: list[dict]) -> None:
    reason = message["stop_reason"]
    assert reason in STOP_REASONS, f"stop reason {reason!r}"
    assert (message["stop_sequence"] is not None) == (reason == "stop_sequence"), "stop sequence"
    called = any(block["type"] == "tool_use" for block in content)
    assert called or reason != "tool_use", "tool_use without a call"
    assert not called or reason in ("tool_use", "max_tokens"), (
        f"{reason} although tools were called"
    )


def _start(event: dict, message: dict) -> dict:
    block = event["content_block"]
    assert event["index"] == len(message["content"]), "blocks are not counted from 0"
    _check_block(block)
    empty = {"text": "", "thinking": "", "signature": "", "input": {}}
    assert all(block[key] == empty[key] for key in empty if key in block), "begins with content"
    message["content"].append(block)
    if block["type"] == "tool_use":
        block["input"] = ""
    return block


def _take(delta: dict, block: dict) -> None:
    known = _DELTAS[block["type"]]
    assert delta["type"] in known, f"{delta['type']} in a block of {block['type']}"
    name = known[delta["type"]]
    assert set(delta) == {"type", name}, f"keys of a delta: {set(delta)}"
    assert isinstance(delta[name], str), "a delta that is no text"
    assert delta[name], "an empty delta"
    assert not block.get("signature"), "something follows the signature"
    block["input" if name == "partial_json" else name] += delta[name]


def _finish(block: dict) -> None:
    if block["type"] == "tool_use":
        try:
            block["input"] = json.loads(block["input"] or "{}")
        except ValueError:
            block["input"] = {}
    elif block["type"] == "thinking":
        assert block["signature"], "thinking without a signature"
    else:
        assert block["text"], "an empty text block"
