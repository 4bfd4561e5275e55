"""The JSON of a chat's message and of its deltas, from the parts of an answer.

Thinking is sent under both names that clients look for, `reasoning` and `reasoning_content`. It
knows no chunks and no HTTP.
"""

import msgspec

from forebay_gateway.parts import CallArguments, CallStart, Collected, Part, Reasoning, Text

_encode = msgspec.json.Encoder().encode


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    id: str
    function: _Function
    type: str = "function"


class _FirstDelta(_Call, kw_only=True):
    index: int


class _Arguments(msgspec.Struct):
    arguments: str


class _NextDelta(msgspec.Struct):
    index: int
    function: _Arguments


def delta(part: Part) -> bytes:
    """A chunk's delta; empty for a part that says nothing to a client."""
    match part:
        case Text():
            return b'{"content":%b}' % _encode(part.text)
        case Reasoning():
            return b"{%b}" % _reasoning(part.text)
        case CallStart():
            return _calls(_FirstDelta(part.id, _Function(part.name, ""), index=part.index))
        case CallArguments():
            return _calls(_NextDelta(part.index, _Arguments(part.text)))
        case _:
            return b""


def message(answer: Collected, *, hides_reasoning: bool = False) -> bytes:
    """A whole answer. Its content is null when it is empty and there are calls."""
    text, reasoning = answer.text, "" if hides_reasoning else answer.reasoning
    calls = [_Call(call.id, _Function(call.name, call.arguments)) for call in answer.calls]
    content = None if calls and not text else text
    members = [b'"role":"assistant","content":%b,"refusal":null' % _encode(content)]
    if reasoning:
        members.append(_reasoning(reasoning))
    if calls:
        members.append(b'"tool_calls":%b' % _encode(calls))
    return b"{%b}" % b",".join(members)


def _calls(call: msgspec.Struct) -> bytes:
    return b'{"tool_calls":[%b]}' % _encode(call)


def _reasoning(text: str) -> bytes:
    encoded = _encode(text)
    return b'"reasoning":%b,"reasoning_content":%b' % (encoded, encoded)
