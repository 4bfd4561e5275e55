"""The tools of a response: functions, custom tools that take text, and both in namespaces.

For the model each is a function: one in a namespace has a longer name, a custom one has its input
as its one argument. What a model calls comes back under the client's own names. Hosted tools do not
exist here: beside tools that the client runs they are left out, as an offer that nobody can make;
alone, or demanded, they are refused. It knows no item, no event and no model.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from forebay_shared.errors import InvalidRequestError, UnsupportedError

from forebay_gateway.api.openai.tools import (
    FunctionDefinition,
    NamedFunction,
    NamedToolChoice,
    ToolDefinition,
)
from forebay_gateway.api.responses.custom import NAME
from forebay_gateway.api.responses.schema import ChosenTool, Tool, ToolChoice

_CALLABLE = ("function", "custom")
_CHOICES = "function, custom or allowed_tools"
_SYNTAXES = ("lark", "regex")


class Callee(NamedTuple):
    """A tool by the client's own names."""

    name: str
    namespace: str | None = None
    custom: bool = False


class _Entry(NamedTuple):
    callee: Callee
    place: str
    definition: FunctionDefinition


def flat_name(namespace: str | None, name: str) -> str:
    """The name of the function that a tool is for the model."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


class Toolbox:
    """What a request gives its model to call. `left_out` says how many hosted tools it named."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        """Raises InvalidRequestError that names the tool."""
        own = [(i, tool) for i, tool in enumerate(tools) if tool.type in (*_CALLABLE, "namespace")]
        self.left_out = len(tools) - len(own)
        if self.left_out and not own:
            raise UnsupportedError(
                "tools[0].type must be function, custom or namespace: there are no hosted tools "
                "here.",
                param="tools[0].type",
            )
        self._tools = [tool for _, tool in own]
        self._entries = [entry for i, tool in own for entry in _entries(tool, f"tools[{i}]")]

    @property
    def callees(self) -> dict[str, Callee]:
        """By the names of the functions that the model calls."""
        return {entry.definition.name: entry.callee for entry in self._entries}

    def choose(
        self, choice: str | ToolChoice | None
    ) -> tuple[list[ToolDefinition], str | NamedToolChoice | None]:
        """The functions that the model gets, and what the chat side calls the choice among them.

        Raises InvalidRequestError that names the field.
        """
        definitions = [
            ToolDefinition("function", entry.definition) for entry in self._shown(choice)
        ]
        return definitions, self._choice(choice)

    def places(self, choice: str | ToolChoice | None) -> list[str]:
        """The paths of what became the functions that the model gets, in their order."""
        return [entry.place for entry in self._shown(choice)]

    def _shown(self, choice: str | ToolChoice | None) -> list[_Entry]:
        if isinstance(choice, ToolChoice) and choice.type == "allowed_tools":
            return self._allowed(choice)
        return self._entries

    def _choice(self, choice: str | ToolChoice | None) -> str | NamedToolChoice | None:
        if choice is None or isinstance(choice, str):
            return choice
        if choice.type in _CALLABLE:
            if choice.name is None:
                raise InvalidRequestError("tool_choice.name is required.", param="tool_choice.name")
            chosen = self._find(ChosenTool(choice.type, choice.name, choice.namespace))
            if chosen is None:
                raise _no_tool("tool_choice.name")
            return NamedToolChoice("function", NamedFunction(chosen.definition.name))
        if choice.type == "allowed_tools":
            return choice.mode or "auto"
        raise UnsupportedError(
            f"tool_choice.type must be {_CHOICES}: there are no hosted tools here.",
            param="tool_choice.type",
        )

    def echoed(self) -> list[dict[str, object]]:
        """The tools as the response holds them."""
        return [_echoed(tool) for tool in self._tools]

    def _allowed(self, choice: ToolChoice) -> list[_Entry]:
        found: dict[str, _Entry] = {}
        for index, chosen in enumerate(choice.tools or ()):
            entry = self._find(chosen)
            if entry is None:
                raise _no_tool(f"tool_choice.tools[{index}]")
            found[entry.place] = entry
        if not found:
            raise InvalidRequestError(
                "tool_choice.tools must not be empty.", param="tool_choice.tools"
            )
        return list(found.values())

    def _find(self, chosen: ChosenTool) -> _Entry | None:
        """The one tool that is meant; a namespace may be left out where the name alone says it."""
        fitting = [
            entry
            for entry in self._entries
            if entry.callee.name == chosen.name
            and entry.callee.custom == (chosen.type == "custom")
            and chosen.type in _CALLABLE
            and chosen.namespace in (None, entry.callee.namespace)
        ]
        bare = [entry for entry in fitting if entry.callee.namespace == chosen.namespace]
        best = bare or fitting
        return best[0] if len(best) == 1 else None


def _entries(tool: Tool, at: str, namespace: str | None = None) -> Iterator[_Entry]:
    if tool.name is None:
        raise _required(f"{at}.name")
    if tool.type == "namespace":
        yield from _members(tool, at)
        return
    custom = tool.type == "custom"
    name = flat_name(namespace, tool.name)
    definition = FunctionDefinition(name, tool.description, tool.parameters, tool.strict)
    if custom:
        definition = FunctionDefinition(name, _told(tool, at), _ONE_TEXT)
    yield _Entry(Callee(tool.name, namespace, custom), at, definition)


def _members(tool: Tool, at: str) -> Iterator[_Entry]:
    """The tools of a namespace, of which the first says what it is for."""
    said = tool.description
    for i, member in enumerate(tool.tools or ()):
        place = f"{at}.tools[{i}]"
        if member.type not in _CALLABLE:
            raise UnsupportedError(
                f"{place}.type must be function or custom.", param=f"{place}.type"
            )
        for entry in _entries(member, place, tool.name):
            yield entry._replace(definition=_introduced(entry.definition, said))
        said = None


def _introduced(definition: FunctionDefinition, said: str | None) -> FunctionDefinition:
    texts = [text for text in (said, definition.description) if text]
    return msgspec.structs.replace(definition, description="\n\n".join(texts) or None)


_ONE_TEXT: dict[str, object] = {
    "type": "object",
    "properties": {NAME: {"type": "string", "description": "The whole input, as plain text."}},
    "required": [NAME],
    "additionalProperties": False,
}


def _told(tool: Tool, at: str) -> str | None:
    """A custom tool's description, with the form of its input: models are told of it, not held to
    it."""
    form = tool.format
    if form is None or form.type == "text":
        return tool.description
    if form.type != "grammar":
        raise InvalidRequestError(
            f"{at}.format.type must be text or grammar.", param=f"{at}.format.type"
        )
    if form.syntax not in _SYNTAXES:
        raise InvalidRequestError(
            f"{at}.format.syntax must be {' or '.join(_SYNTAXES)}.", param=f"{at}.format.syntax"
        )
    if form.definition is None:
        raise _required(f"{at}.format.definition")
    told = f"The input must match this {form.syntax} grammar:\n{form.definition}"
    return f"{tool.description}\n\n{told}" if tool.description else told


def _echoed(tool: Tool) -> dict[str, object]:
    shown: dict[str, object] = {
        "type": tool.type, "name": tool.name or "", "description": tool.description
    }  # fmt: skip
    if tool.type == "function":
        return shown | {"parameters": tool.parameters, "strict": tool.strict is not False}
    if tool.type == "custom":
        return shown | {"format": tool.format or {"type": "text"}}
    return shown | {"tools": [_echoed(member) for member in tool.tools or ()]}


def _no_tool(param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} must name one tool that is among the tools.", param=param)


def _required(param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} is required.", param=param)
