"""The tools of a call, and the choice among them.

Tools that are to be loaded later are shown to the model once a `tool_reference` in the conversation
names them: whoever searches for tools is the client. Where the server was to search, nobody does,
and all of them are shown. It knows no messages but for such names.
"""

from collections.abc import Iterator, Sequence

from forebay_shared.errors import InvalidRequestError, UnsupportedError

from forebay_gateway.api.anthropic.client_tools import client_tool
from forebay_gateway.api.anthropic.schema import Block, CountRequest, Message, Tool, ToolChoice
from forebay_gateway.api.openai.tools import (
    FunctionDefinition,
    NamedFunction,
    NamedToolChoice,
    ReadTool,
    ToolDefinition,
    read_tool,
)

_SEARCHES = "tool_search_tool_"


def tool_definitions(request: CountRequest) -> list[ToolDefinition] | None:
    """The tools that the model gets. Raises InvalidRequestError that names the tool."""
    tools = [(f"tools[{i}]", tool) for i, tool in enumerate(request.tools or ())]
    own = [(at, tool) for at, tool in tools if not (tool.type or "").startswith(_SEARCHES)]
    loaded = set(_referred(request.messages))
    if len(own) < len(tools):
        loaded.update(tool.name for _, tool in own)
    if request.tool_choice and request.tool_choice.name:
        loaded.add(request.tool_choice.name)
    read = [(tool, _definition(tool, at)) for at, tool in own]
    return [
        definition for tool, definition in read if not tool.defer_loading or tool.name in loaded
    ] or None


def tool_choice(choice: ToolChoice) -> str | NamedToolChoice:
    """Raises InvalidRequestError that names the field."""
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise InvalidRequestError("tool_choice.name is required.", param="tool_choice.name")
            return NamedToolChoice("function", NamedFunction(choice.name))
        case _:
            raise InvalidRequestError(
                "tool_choice.type must be auto, any, tool or none.", param="tool_choice.type"
            )


def _definition(tool: Tool, at: str) -> ReadTool:
    description, schema = tool.description, tool.input_schema
    if tool.type not in (None, "custom"):
        known = client_tool(tool.type)
        if known is None:
            raise UnsupportedError(
                f"{at}.type must be custom, or a bash, text_editor or memory tool: this server "
                "runs no tools itself.",
                param=f"{at}.type",
            )
        description, schema = known
    if schema is None:
        raise InvalidRequestError(f"{at}.input_schema is required.", param=f"{at}.input_schema")
    if tool.allowed_callers not in (None, ["direct"]):
        raise UnsupportedError(
            f"{at}.allowed_callers may only hold direct.", param=f"{at}.allowed_callers"
        )
    examples = {"examples": tool.input_examples} if tool.input_examples else {}
    function = FunctionDefinition(tool.name, description, schema | examples, tool.strict)
    # Read here: its place among those that are shown may be another one.
    read = read_tool(ToolDefinition("function", function), at)
    return ReadTool("function", function, tool=read)


def _referred(messages: Sequence[Message]) -> Iterator[str]:
    """The tools that the conversation refers to, in results or beside them."""
    for message in messages:
        for block in _blocks(message.content):
            for each in (block, *_blocks(block.content)):
                if each.type == "tool_reference" and each.tool_name is not None:
                    yield each.tool_name


def _blocks(content: str | list[Block] | None) -> Sequence[Block]:
    return content if isinstance(content, list) else ()
