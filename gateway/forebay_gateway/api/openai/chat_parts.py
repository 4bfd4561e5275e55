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


def delta(part: Part, *, legacy: bool = False) -> bytes:
    """A chunk's delta; empty for a part that says nothing to a client.

    `legacy`: a call is told as `function_call`, as those who sent `functions` look for it.
    """
    match part:
        case Text():
            return b'{"content":%b}' % _encode(part.text)
        case Reasoning():
            return b"{%b}" % _reasoning(part.text)
        case CallStart() if legacy:
            return _function_call(_Function(part.name, ""))
        case CallArguments() if legacy:
            return _function_call(_Arguments(part.text))
        case CallStart():
            return _calls(_FirstDelta(part.id, _Function(part.name, ""), index=part.index))
        case CallArguments():
            return _calls(_NextDelta(part.index, _Arguments(part.text)))
        case _:
            return b""


def message(answer: Collected, *, hides_reasoning: bool = False, legacy: bool = False) -> bytes:
    """A whole answer. Its content is null when it is empty and there are calls."""
    text, reasoning = answer.text, "" if hides_reasoning else answer.reasoning
    functions = [_Function(call.name, call.arguments) for call in answer.calls]
    content = None if functions and not text else text
    members = [b'"role":"assistant","content":%b,"refusal":null' % _encode(content)]
    if reasoning:
        members.append(_reasoning(reasoning))
    if functions and legacy:
        members.append(b'"function_call":%b' % _encode(functions[0]))
    elif functions:
        calls = [_Call(call.id, of) for call, of in zip(answer.calls, functions, strict=True)]
        members.append(b'"tool_calls":%b' % _encode(calls))
    return b"{%b}" % b",".join(members)


def _calls(call: msgspec.Struct) -> bytes:
    return b'{"tool_calls":[%b]}' % _encode(call)


def _function_call(function: msgspec.Struct) -> bytes:
    return b'{"function_call":%b}' % _encode(function)


def _reasoning(text: str) -> bytes:
    encoded = _encode(text)
    return b'"reasoning":%b,"reasoning_content":%b' % (encoded, encoded)
