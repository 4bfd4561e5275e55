"""A client's messages, checked and in the form that chat templates read.

Roles, null contents, lists of parts, tool calls in the history and the legacy function_call. It
knows no template and no tokenizer.
"""

from collections.abc import Iterator, Sequence

import msgspec
from forebay_shared.errors import InvalidRequestError, UnsupportedError
from forebay_shared.template import Json

from forebay_gateway.api.openai.schema import ContentPart, FunctionCall, ToolCall
from forebay_gateway.api.openai.schema import Message as ClientMessage
from forebay_gateway.api.openai.tools import is_flat
from forebay_gateway.api.unseen import told_of
from forebay_gateway.prompt import Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_RENDERED = {"developer": "system", "function": "tool"}
"""Roles under the name that templates know them by."""
_UNNAMED = "call_0"
"""The id of a legacy function_call, which has none, and of its result."""
_ANY = ""
"""Stands for a call without an id, which answers to every one."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_MAX_DEPTH = 100
"""Of arguments that a template gets as an object. Whoever walks through deeper ones, here or in a
template, runs out of stack at some 350."""


def conversation(messages: list[ClientMessage]) -> list[Message]:
    """Messages as a template reads them. Raises InvalidRequestError that names the message."""
    _check_results(messages)
    return [
        _message(message, f"messages[{i}]", of_tools=_is_of_tools(messages, i))
        for i, message in enumerate(messages)
    ]


def _is_of_tools(messages: Sequence[ClientMessage], i: int) -> bool:
    """A tool's result, or what stands right behind one: results were text alone for long, so agents
    send a picture as the user's next message."""
    role = messages[i].role
    return role == "tool" or (role == "user" and i > 0 and messages[i - 1].role == "tool")


def _check_results(messages: Sequence[ClientMessage]) -> None:
    """Every result answers a call before it; who sends a call without an id may call its result
    anything. Templates would show a result of nothing, or fail."""
    called: set[str] = set()
    for i, message in enumerate(messages):
        called.update(call.id or _ANY for call in message.tool_calls or ())
        if message.function_call is not None:
            called.add(_ANY)
        if message.role == "tool" and called.isdisjoint((message.tool_call_id, _ANY)):
            at = f"messages[{i}].tool_call_id"
            raise InvalidRequestError(
                f"{at} must be the id of a call in an assistant's message before it.", param=at
            )


def _message(message: ClientMessage, at: str, *, of_tools: bool) -> Message:
    role = message.role
    if role not in ROLES:
        raise InvalidRequestError(
            f"{at}.role must be one of {', '.join(ROLES)}.", param=f"{at}.role"
        )
    if message.prefix:
        raise UnsupportedError(
            f"{at}.prefix is not supported; use continue_final_message.", param=f"{at}.prefix"
        )
    if message.audio is not None:
        raise UnsupportedError(f"{at}.audio is not supported.", param=f"{at}.audio")
    calls = bool(message.tool_calls) or message.function_call is not None
    if calls and role != "assistant":
        field = f"{at}.{'tool_calls' if message.tool_calls else 'function_call'}"
        raise InvalidRequestError(f"{field} goes with the role assistant only.", param=field)
    rendered: Message = {
        "role": _RENDERED.get(role, role),
        "content": _content(message, at, optional=role == "assistant" and calls, shown=of_tools),
    }
    if message.name is not None:
        rendered["name"] = message.name
    if role == "function":
        rendered["tool_call_id"] = _UNNAMED
    if role == "tool":
        if message.tool_call_id is None:
            raise InvalidRequestError(
                f"{at}.tool_call_id must be a string.", param=f"{at}.tool_call_id"
            )
        rendered["tool_call_id"] = message.tool_call_id
    if role == "assistant":
        thought = message.reasoning_content or message.reasoning
        if thought is not None:
            rendered["reasoning_content"] = thought
        if calls:
            rendered["tool_calls"] = list(_tool_calls(message))
    return rendered


def _content(message: ClientMessage, at: str, *, optional: bool, shown: bool) -> str:
    """`shown`: by a tool."""
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant" and message.refusal is not None:
            return message.refusal
        if optional:
            return ""
        raise InvalidRequestError(
            f"{at}.content must be a string or a list of parts.", param=f"{at}.content"
        )
    reads = _shown if shown else _part
    return "".join([reads(part, f"{at}.content[{i}]") for i, part in enumerate(content)])


def _shown(part: ContentPart, at: str) -> str:
    """A part of what a tool shows, which may be something that the model is only told of."""
    return told_of(part.type) or _part(part, at)


def _part(part: ContentPart, at: str) -> str:
    if part.type == "refusal":
        text = part.refusal
    elif part.type in _TEXT_PARTS:
        text = part.text
    else:
        raise UnsupportedError(
            f"{at}.type must be text: this model reads nothing else.", param=f"{at}.type"
        )
    if text is None:
        raise InvalidRequestError(f"{at}.text must be a string.", param=f"{at}.text")
    return text


def _tool_calls(message: ClientMessage) -> Iterator[Message]:
    if message.function_call is not None:
        yield _tool_call(ToolCall(function=message.function_call, id=_UNNAMED))
    for call in message.tool_calls or ():
        yield _tool_call(call)


def _tool_call(call: ToolCall) -> Message:
    function: Message = {"name": call.function.name, "arguments": _arguments(call.function)}
    return {"id": call.id or "", "type": "function", "function": function}


def _arguments(function: FunctionCall) -> Json:
    """Templates expect the arguments as an object; what is no JSON, or nested too deep for anybody
    to walk through, stays the text that it is."""
    text = function.arguments or "{}"
    try:
        found: Json = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return found if is_flat(found, _MAX_DEPTH) else text
