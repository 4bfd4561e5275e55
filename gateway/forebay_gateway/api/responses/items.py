"""The items of a conversation: checked, given ids, and turned into the messages of a chat.

An item's id holds the id of its response, so that a reference finds it without any index. It knows
no model and no Redis.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn

import msgspec
from forebay_shared.errors import InvalidRequestError, UnsupportedError
from msgspec.structs import replace

from forebay_gateway.api.openai.schema import FunctionCall, Message, ToolCall
from forebay_gateway.api.openai.tools import MAX_TOOLS
from forebay_gateway.api.responses.custom import as_arguments
from forebay_gateway.api.responses.schema import Item, Part, ResponsesRequest, Tool
from forebay_gateway.api.responses.sealed import unseal
from forebay_gateway.api.responses.tools import flat_name
from forebay_gateway.api.unseen import told_of

MAX_ITEMS = 65_536
TYPES = (
    "message", "function_call", "function_call_output", "custom_tool_call",
    "custom_tool_call_output", "reasoning", "item_reference", "additional_tools",
)  # fmt: skip
CALLS = frozenset({"function_call", "custom_tool_call"})
OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
ROLES = ("user", "assistant", "system", "developer")

_PREFIX = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "additional_tools": "at",
}
_ITEM_ID = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})[io][0-9a-f]{5}")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_MAX_ID = 256


def item_id(response_id: str, kind: str, index: int, *, given: bool = False) -> str:
    """The id of the index-th item that a response gave out, or was given."""
    side = "i" if given else "o"
    return f"{_PREFIX[kind]}_{response_id.removeprefix('resp_')}{side}{index:05x}"


def home_of(reference: str) -> str | None:
    """The id of the response that an item belongs to, by the item's id."""
    found = _ITEM_ID.fullmatch(reference)
    return f"resp_{found.group(1)}" if found else None


def checked(given: str | Sequence[Item], response_id: str) -> list[Item]:
    """A request's input with types and ids, in one form. References stay as they are.

    Raises InvalidRequestError that names the item.
    """
    if isinstance(given, str):
        given = [Item(role="user", content=given)]
    if len(given) > MAX_ITEMS:
        raise InvalidRequestError(f"input may hold at most {MAX_ITEMS} items.", param="input")
    shown = [_shown(item, given[index - 1] if index else None) for index, item in enumerate(given)]
    return [_checked(item, index, response_id) for index, item in enumerate(shown)]


def _shown(item: Item, before: Item | None) -> Item:
    """What a user's message right behind an output holds is a tool's as well: agents send a picture
    there."""
    if isinstance(item.content, list) and item.role == "user" and before and before.type in OUTPUTS:
        return replace(item, content=[_told(part) for part in item.content])
    return item


def _checked(item: Item, index: int, response_id: str) -> Item:
    at = f"input[{index}]"
    kind = item.type or _implied_type(item)
    if kind not in _CHECKS:
        raise UnsupportedError(
            f"{at}.type must be one of {', '.join(TYPES)}: no other kind of item can be read here.",
            param=f"{at}.type",
        )
    if item.id is not None and len(item.id) > _MAX_ID:
        raise InvalidRequestError(
            f"{at}.id may have at most {_MAX_ID} characters.", param=f"{at}.id"
        )
    known = replace(item, type=kind)
    if kind == "item_reference":
        return _reference(known, at)
    id_ = item.id or item_id(response_id, kind, index, given=True)
    return replace(_CHECKS[kind](known, at), id=id_, status=item.status or "completed")


def _implied_type(item: Item) -> str:
    """Messages and references may come without a type."""
    if item.role is not None:
        return "message"
    return "" if item.id is None else "item_reference"


def _reference(item: Item, at: str) -> Item:
    if item.id is None:
        raise _missing(f"{at}.id")
    return Item(type="item_reference", id=item.id)


def _message(item: Item, at: str) -> Item:
    if item.role not in ROLES:
        raise InvalidRequestError(
            f"{at}.role must be one of {', '.join(ROLES)}.", param=f"{at}.role"
        )
    form = "output_text" if item.role == "assistant" else "input_text"
    if item.content is None:
        raise _missing(f"{at}.content")
    content = _parts(item.content, form, f"{at}.content")
    return Item(type="message", role=item.role, content=content)


def _function_call(item: Item, at: str) -> Item:
    _check_members(item, at, "call_id", "name", "arguments")
    return Item(
        type=item.type,
        call_id=item.call_id,
        name=item.name,
        namespace=item.namespace,
        arguments=item.arguments,
    )


def _custom_tool_call(item: Item, at: str) -> Item:
    _check_members(item, at, "call_id", "name", "input")
    return Item(
        type=item.type,
        call_id=item.call_id,
        name=item.name,
        namespace=item.namespace,
        input=item.input,
    )


def _check_members(item: Item, at: str, *names: str) -> None:
    for name in names:
        if getattr(item, name) is None:
            raise _missing(f"{at}.{name}")


def _output(item: Item, at: str) -> Item:
    _check_members(item, at, "call_id", "output")
    output = item.output or ""
    if not isinstance(output, str):
        output = _parts([_told(part) for part in output], "input_text", f"{at}.output")
    return Item(type=item.type, call_id=item.call_id, output=output)


def _told(part: Part) -> Part:
    """What the model cannot see is text that says so, as it is stored as well."""
    told = told_of(part.type)
    return part if told is None else Part("input_text", told)


def _reasoning(item: Item, at: str) -> Item:
    content = _parts(item.content or [], "reasoning_text", f"{at}.content")
    summary = _parts(item.summary or [], "summary_text", f"{at}.summary")
    if item.encrypted_content is not None and not content:
        text = unseal(item.encrypted_content)
        if text is None:
            raise UnsupportedError(
                f"{at}.encrypted_content cannot be read here; send the content of the item.",
                param=f"{at}.encrypted_content",
            )
        content = [Part("reasoning_text", text)]
    return Item(type=item.type, content=content, summary=summary)


def _additional_tools(item: Item, at: str) -> Item:
    _check_members(item, at, "tools")
    return Item(type=item.type, role=item.role, tools=item.tools)


_CHECKS: dict[str, Callable[[Item, str], Item]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _output,
    "custom_tool_call": _custom_tool_call,
    "custom_tool_call_output": _output,
    "reasoning": _reasoning,
    "item_reference": _reference,
    "additional_tools": _additional_tools,
}


def _parts(content: str | Sequence[Part], form: str, at: str) -> list[Part]:
    """Content as a list of parts of one form; refusals stay refusals."""
    if isinstance(content, str):
        content = [Part(form, content)]
    return [_part(part, form, f"{at}[{index}]") for index, part in enumerate(content)]


def _part(part: Part, form: str, at: str) -> Part:
    if part.type == "refusal" and form == "output_text":
        if part.refusal is None:
            raise _missing(f"{at}.refusal")
        return Part("refusal", refusal=part.refusal)
    if part.type not in _TEXTS:
        raise UnsupportedError(
            f"{at}.type must be {form}: this model reads nothing else.", param=f"{at}.type"
        )
    if part.text is None:
        raise _missing(f"{at}.text")
    return Part(form, part.text, annotations=[] if form == "output_text" else None)


def _missing(param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} is required.", param=param)


def check_calls(items: Sequence[Item], first: int) -> None:
    """Every output answers a call before it. `items` from `first` on are the request's own input.

    Raises InvalidRequestError that names the item.
    """
    called: set[str | None] = set()
    for position, item in enumerate(items):
        if item.type in CALLS:
            called.add(item.call_id)
        elif item.type in OUTPUTS and item.call_id not in called:
            _refuse_call(position - first)


def _refuse_call(index: int) -> NoReturn:
    param = f"input[{index}].call_id" if index >= 0 else "previous_response_id"
    raise InvalidRequestError(
        f"{param}: there is no call with this call_id before its output.", param=param
    )


class Equipped(NamedTuple):
    """A request with the tools that its conversation brings behind its own, and where in the input
    each of those stands."""

    request: ResponsesRequest
    places: Sequence[str]


def with_tools(request: ResponsesRequest, items: Sequence[Item], first: int) -> Equipped:
    """Codex sends tools in its conversation. `items` from `first` on are the request's own input.

    Whoever repeats the conversation repeats them; more than there may be are left to be refused.
    They are told apart by their JSON: 8 MB of them, each beside all others, take seconds."""
    tools = list(request.tools or ())
    known = {_written(tool) for tool in tools}
    places: list[str] = []
    for place, tool in _brought(items, first):
        if len(tools) > MAX_TOOLS:
            break
        written = _written(tool)
        if written not in known:
            known.add(written)
            tools.append(tool)
            places.append(place)
    return Equipped(replace(request, tools=tools) if tools else request, places)


def _brought(items: Sequence[Item], first: int) -> Iterator[tuple[str, Tool]]:
    for position, item in enumerate(items, -first):
        for number, tool in enumerate(item.tools or ()):
            own = f"input[{position}].tools[{number}]"
            yield (own if position >= 0 else "previous_response_id"), tool


def _written(tool: Tool) -> bytes:
    return msgspec.json.encode(tool, order="deterministic")


def chat_messages(items: Sequence[Item], instructions: str | None) -> list[Message]:
    """Items as the messages of a chat.

    What an assistant thought, said and called in a row is one message, as templates expect it.
    Raises InvalidRequestError when there is none at all.
    """
    messages = [] if instructions is None else [Message("system", instructions)]
    messages += _messages(items)
    if not messages:
        raise InvalidRequestError("input must hold a message.", param="input")
    return messages


class _Assistant:
    """An assistant's message in the making."""

    def __init__(self) -> None:
        self.thoughts: list[str] = []
        self.texts: list[str] = []
        self.calls: list[ToolCall] = []

    def __bool__(self) -> bool:
        return bool(self.thoughts or self.texts or self.calls)

    def message(self) -> Message:
        return Message(
            "assistant",
            "".join(self.texts),
            reasoning_content="".join(self.thoughts) or None,
            tool_calls=self.calls or None,
        )


def _messages(items: Sequence[Item]) -> Iterator[Message]:
    turn = _Assistant()
    for item in items:
        if item.type == "additional_tools":
            continue
        if _begins_anew(item, turn):
            yield turn.message()
            turn = _Assistant()
        if item.type == "reasoning":
            turn.thoughts.append(_text(item.content) or _text(item.summary))
        elif item.type in CALLS:
            turn.calls.append(_call(item))
        elif item.type in OUTPUTS:
            yield Message("tool", _text(item.output), tool_call_id=item.call_id)
        elif item.role == "assistant":
            turn.texts.append(_text(item.content))
        else:
            yield Message(item.role or "user", _text(item.content))
    if turn:
        yield turn.message()


def _call(item: Item) -> ToolCall:
    """A call as the model made it: of the one function that a tool in a namespace is for it."""
    arguments = item.arguments if item.type == "function_call" else as_arguments(item.input or "")
    name = flat_name(item.namespace, item.name or "")
    return ToolCall(FunctionCall(name, arguments), item.call_id, "function")


def _begins_anew(item: Item, turn: _Assistant) -> bool:
    """Whether the assistant's message ends before this item.

    What an assistant says between its calls and their results is part of the same message: for
    templates a result must stand right behind its call.
    """
    if not turn or item.type in CALLS:
        return False
    if item.type == "reasoning":
        return bool(turn.texts or turn.calls)
    if item.role == "assistant":
        return bool(turn.texts) and not turn.calls
    return True


def _text(content: str | Sequence[Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join([part.text or part.refusal or "" for part in content])
