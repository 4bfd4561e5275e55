"""A request's tools: what may be called, what must be, and whether more than once.

It checks the fields of the dialect. It knows no model, no markup and no grammar.
"""

import re
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar, cast

import msgspec
from forebay_shared.errors import InvalidRequestError, UnsupportedError
from forebay_shared.template import Json

from forebay_gateway.tools.base import MAX_NAME, Tool, ToolUse

T = TypeVar("T")

MAX_TOOLS = 1024
"""OpenAI takes 128, but agents with a few hosts of tools send more: 215 have been seen."""
MAX_SCHEMA_DEPTH = 100

_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME}}}")


class FunctionDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, frozen=True):
    type: str
    function: FunctionDefinition | None = None


class ReadTool(ToolDefinition, frozen=True, kw_only=True):
    """One that another dialect has read, at the place where its client wrote it."""

    tool: Tool


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class AllowedTool(msgspec.Struct, frozen=True):
    type: str
    function: NamedFunction | None = None


class AllowedTools(msgspec.Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class NamedToolChoice(msgspec.Struct, frozen=True):
    """A function that must be called, or those of the tools that may be."""

    type: str
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


def tool_use(
    definitions: Sequence[ToolDefinition] | None,
    choice: str | NamedToolChoice | None,
    *,
    parallel: bool,
) -> ToolUse | None:
    """What the request says; None when no tool is to be called.

    An empty list is none at all, and `none` without tools harms nobody.
    Raises InvalidRequestError that names the field.
    """
    tools = _distinct(definitions or (), read_tool, "tools")
    if isinstance(choice, NamedToolChoice) and choice.type == "allowed_tools":
        tools, choice = _allowed(choice, tools)
    if choice in ("none", None, "auto"):
        if not tools or choice == "none":
            return None
        return ToolUse(tools, one_call=not parallel)
    if choice == "required":
        if not tools:
            raise InvalidRequestError("tool_choice needs tools.", param="tool_choice")
        return ToolUse(tools, forced=tools, one_call=not parallel)
    if isinstance(choice, str):
        raise InvalidRequestError(
            "tool_choice must be none, auto, required or a function.", param="tool_choice"
        )
    return ToolUse(tools, forced=(_named(choice, tools),), one_call=True)


def _allowed(choice: NamedToolChoice, tools: Sequence[Tool]) -> tuple[tuple[Tool, ...], str]:
    """The tools that are left, and the choice among them."""
    at = "tool_choice.allowed_tools"
    allowed = choice.allowed_tools
    if allowed is None:
        raise InvalidRequestError(f"{at} is required.", param=at)
    if not allowed.tools:
        raise InvalidRequestError(f"{at}.tools must not be empty.", param=f"{at}.tools")
    if len(allowed.tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"{at}.tools may hold at most {MAX_TOOLS} functions.", param=f"{at}.tools"
        )
    names: set[str] = set()
    for index, tool in enumerate(allowed.tools):
        place = f"{at}.tools[{index}]"
        if tool.type != "function" or tool.function is None:
            raise UnsupportedError(f"{place} must be a function.", param=place)
        names.add(_one_of(tools, tool.function, f"{place}.function.name").name)
    return tuple(tool for tool in tools if tool.name in names), allowed.mode


def _named(choice: NamedToolChoice, tools: Sequence[Tool]) -> Tool:
    if choice.type != "function":
        raise UnsupportedError(
            "tool_choice.type must be function or allowed_tools.", param="tool_choice.type"
        )
    if not tools:
        raise InvalidRequestError("tool_choice needs tools.", param="tool_choice")
    if choice.function is None:
        raise InvalidRequestError("tool_choice.function is required.", param="tool_choice.function")
    return _one_of(tools, choice.function, "tool_choice.function.name")


def function_use(
    functions: Sequence[FunctionDefinition] | None, choice: str | NamedFunction | None
) -> ToolUse | None:
    """The same of OpenAI's older fields `functions` and `function_call`: one call at most.

    Raises InvalidRequestError that names the field.
    """
    tools = _distinct(functions or (), _function, "functions")
    if choice in ("none", None, "auto"):
        return ToolUse(tools, one_call=True) if tools and choice != "none" else None
    if isinstance(choice, str):
        raise InvalidRequestError(
            "function_call must be none, auto or a function's name.", param="function_call"
        )
    if not tools:
        raise InvalidRequestError("function_call needs functions.", param="function_call")
    return ToolUse(tools, forced=(_one_of(tools, choice, "function_call.name"),), one_call=True)


def _one_of(tools: Sequence[Tool], named: NamedFunction, at: str) -> Tool:
    for tool in tools:
        if tool.name == named.name:
            return tool
    raise InvalidRequestError(f"{at} is none of the functions that were given.", param=at)


def _distinct(given: Sequence[T], read: Callable[[T, str], Tool], at: str) -> tuple[Tool, ...]:
    """The functions of a field, each read by its place."""
    if len(given) > MAX_TOOLS:
        raise InvalidRequestError(f"{at} may hold at most {MAX_TOOLS} functions.", param=at)
    tools = tuple(read(each, f"{at}[{i}]") for i, each in enumerate(given))
    if len({tool.name for tool in tools}) < len(tools):
        raise InvalidRequestError(f"{at} must not hold two functions of one name.", param=at)
    return tools


def read_tool(definition: ToolDefinition, at: str) -> Tool:
    """Raises InvalidRequestError that names the field, as one of what is at `at`."""
    if isinstance(definition, ReadTool):
        return definition.tool
    if definition.type != "function":
        raise UnsupportedError(f"{at}.type must be function.", param=f"{at}.type")
    if definition.function is None:
        raise InvalidRequestError(f"{at}.function is required.", param=f"{at}.function")
    return _function(definition.function, f"{at}.function")


def _function(function: FunctionDefinition, at: str) -> Tool:
    if not _NAME.fullmatch(function.name):
        raise InvalidRequestError(
            f"{at}.name must be 1 to {MAX_NAME} letters, digits, underscores or hyphens.",
            param=f"{at}.name",
        )
    parameters = function.parameters or {}
    if parameters.get("type") not in (None, "object"):
        raise InvalidRequestError(
            f"{at}.parameters must be the JSON schema of an object.", param=f"{at}.parameters"
        )
    if not is_flat(parameters, MAX_SCHEMA_DEPTH):
        raise InvalidRequestError(
            f"{at}.parameters must not be nested deeper than {MAX_SCHEMA_DEPTH}.",
            param=f"{at}.parameters",
        )
    return Tool(
        function.name,
        function.description,
        cast("dict[str, Json]", parameters),
        bool(function.strict),
    )


def is_flat(value: object, depth: int) -> bool:
    """Whether objects and lists are nested at most so deep."""
    if isinstance(value, dict):
        inner = list(cast("dict[str, object]", value).values())
    elif isinstance(value, list):
        inner = cast("list[object]", value)
    else:
        return True
    return depth > 0 and all(is_flat(item, depth - 1) for item in inner)
