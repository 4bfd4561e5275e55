"""The golden checker of responses: is this raw answer what /v1/responses promises?

`check_events` takes the bytes of an event stream, `check_response` those of a plain answer. Both
hold it against the SDK's own types, and return the response in the end as a dict. It knows no
server.
"""

import json
import re
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_ITEM_ID = re.compile(r"(msg|fc|ctc|rs)_[0-9a-f]{32}o[0-9a-f]{5}")
_SAID = {"function_call": "arguments", "custom_tool_call": "input"}
"""What deltas spell, where it is no text."""
LAST = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")
_ENDS = {"response.completed", "response.incomplete", "response.failed", "error"}


def split_events(raw: bytes, first: int = 0) -> list[dict]:
    """The events, each named by its `event:` line as in its JSON, numbered without a gap."""
    assert b"\r" not in raw, "a carriage return in the stream"
    assert raw.endswith(b"\n\n"), "the last event is cut off"
    events = []
    for number, text in enumerate(raw[:-2].split(b"\n\n"), first):
        name, data = text.split(b"\n")
        assert name.startswith(b"event: "), f"no event line: {text[:40]!r}"
        assert data.startswith(b"data: "), f"no data line: {text[:40]!r}"
        event = json.loads(data[len(b"data: ") :])
        assert event["type"].encode() == name[len(b"event: ") :], "two names of one event"
        assert event["sequence_number"] == number, "the events are not numbered in order"
        _EVENTS.validate_python(event)
        events.append(event)
    return events


def check_events(raw: bytes, *, background: bool = False) -> dict:
    """Checks a whole stream. Returns the last event's response, or the event `error`."""
    events = split_events(raw)
    kinds = [event["type"] for event in events]
    opening = ["response.created", *(["response.queued"] if background else [])]
    assert kinds[: len(opening)] == opening, f"the stream begins with {kinds[:3]}"
    assert kinds[-1] in _ENDS, f"the stream ends with {kinds[-1]}"
    assert not set(kinds[:-1]) & _ENDS, "something follows the end"
    items = _Items()
    for event in events[len(opening) : -1]:
        items.take(event)
    last = events[-1]
    if last["type"] == "error":
        return last
    response = last["response"]
    _check_fields(response)
    assert last["type"] == f"response.{response['status']}", "type and status differ"
    if response["status"] == "failed":
        assert response["error"]["message"], "a failure without a reason"
    else:
        assert items.open is None, "an item was never done"
        assert response["output"] == items.done, "the items are not those of the events"
    ids = {event["response"]["id"] for event in events if "response" in event}
    assert ids == {response["id"]}, "the id changed"
    return response


class _Items:
    """The items that a stream tells of, put together from its deltas."""

    def __init__(self) -> None:
        self.done: list[dict] = []
        self.open: dict | None = None
        self.text = ""
        self.logprobs: list[dict] = []

    def take(self, event: dict) -> None:
        kind = event["type"]
        if kind == "response.in_progress":
            assert not self.done, "in_progress comes late"
            return
        assert event["output_index"] == len(self.done), "output_index"
        if kind == "response.output_item.added":
            assert self.open is None, "an item begins inside another one"
            self.open, self.text, self.logprobs = event["item"], "", []
            assert self.open["status"] == "in_progress", "status of a new item"
            assert _ITEM_ID.fullmatch(self.open["id"]), f"id of an item: {self.open['id']}"
            return
        assert self.open is not None, f"{kind} outside of an item"
        id_ = event["item"]["id"] if kind == "response.output_item.done" else event["item_id"]
        assert id_ == self.open["id"], "the id of an item changed"
        if kind.endswith(".delta"):
            assert event["delta"], "an empty delta"
            self.text += event["delta"]
            self.logprobs += event.get("logprobs", [])
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == self.text, "arguments"
            assert event["name"] == self.open["name"], "name"
        elif kind == "response.custom_tool_call_input.done":
            assert event["input"] == self.text, "input"
        elif kind in ("response.output_text.done", "response.reasoning_text.done"):
            assert event["text"] == self.text, "text"
            assert event.get("logprobs", []) == self.logprobs, "logprobs"
        elif kind == "response.content_part.done":
            assert event["part"]["text"] == self.text, "text of a part"
        elif kind == "response.output_item.done":
            self._close(event["item"])
        else:
            assert kind == "response.content_part.added", f"unknown event {kind}"

    def _close(self, item: dict) -> None:
        assert item["status"] in ("completed", "incomplete"), "status of an item that is done"
        name = _SAID.get(item["type"])
        said = item["content"][0]["text"] if name is None else item[name]
        assert said == self.text, "an item differs from its deltas"
        self.done.append(item)
        self.open = None


def check_response(raw: bytes) -> dict:
    """Checks a plain answer."""
    response = json.loads(raw)
    assert response["object"] == "response"
    _check_fields(response)
    return response


def _check_fields(response: dict) -> None:
    Response.model_validate(response)
    assert re.fullmatch("resp_[0-9a-f]{32}", response["id"]), f"id {response['id']}"
    assert type(response["created_at"]) is int, "created_at is not in whole seconds"
    for index, item in enumerate(response["output"]):
        assert _ITEM_ID.fullmatch(item["id"]), f"id of an item: {item['id']}"
        assert int(item["id"][-5:], 16) == index, "an item's id does not say its place"
    status, usage = response["status"], response["usage"]
    assert (status == "completed") == (response["completed_at"] is not None), "completed_at"
    assert (status == "incomplete") == (response["incomplete_details"] is not None), "details"
    assert (status == "failed") == (response["error"] is not None), "error"
    if status in ("completed", "incomplete"):
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], "total"
        assert usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]


def without_identity(response: dict) -> dict:
    """The response without what differs from one call to the next: ids and times."""
    text = json.dumps(response).replace(response["id"].removeprefix("resp_"), "ID")
    text = re.sub(r"call_[0-9a-f]{24}", "CALL", text)
    return json.loads(text) | {"created_at": 0, "completed_at": 0}
