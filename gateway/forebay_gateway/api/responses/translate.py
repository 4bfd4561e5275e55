"""From a response's request to the chat request that means the same, and errors back again.

What the chat side finds wrong it says in the names of its own fields; here they become the names
that the client wrote. It knows no model and no Redis.
"""

import re
from collections.abc import Sequence

from forebay_shared.errors import ForebayError, InvalidRequestError, UnsupportedError
from msgspec import UnsetType

from forebay_gateway.api.decoding import null
from forebay_gateway.api.openai.schema import ChatRequest, Message
from forebay_gateway.api.openai.structured import JsonSchemaFormat, ResponseFormat
from forebay_gateway.api.openai.tools import (
    FunctionDefinition,
    NamedFunction,
    NamedToolChoice,
    ToolDefinition,
)
from forebay_gateway.api.responses.schema import (
    FunctionTool,
    ResponsesRequest,
    TextFormat,
    ToolChoice,
)

_SAME = (
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "enable_thinking",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "model",
    "parallel_tool_calls",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "stream",
    "structured_outputs",
    "temperature",
    "top_k",
    "top_p",
)
"""Fields that mean the same under the same name."""

_NAMES = (
    (re.compile(r"^messages\b.*"), "input"),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
    (re.compile(r"^reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"^max_(?:completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"^(?:top_)?logprobs\b"), "top_logprobs"),
)


def chat_request(request: ResponsesRequest, messages: list[Message]) -> ChatRequest:
    """Raises InvalidRequestError in the names of this dialect."""
    allowed, choice = _tool_choice(request)
    reasoning = request.reasoning
    fields: dict[str, object] = {name: getattr(request, name) for name in _SAME}
    return ChatRequest(
        **fields,  # pyright: ignore[reportArgumentType]  the types are the same in both structs
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        logprobs=request.wants_logprobs,
        top_logprobs=(request.top_logprobs or 0) if request.wants_logprobs else None,
        tools=[_definition(tool) for tool in allowed],
        tool_choice=choice,
        reasoning_effort=reasoning.effort if reasoning else None,
        response_format=_response_format(request),
        chat_template_kwargs=_template_kwargs(request),
    )


def renamed(error: ForebayError) -> ForebayError:
    """The same error in the names of this dialect."""
    if error.param is None:
        return error
    for pattern, name in _NAMES:
        param = pattern.sub(name, error.param)
        if param != error.param:
            message = error.message.replace(error.param, param)
            return type(error)(message, param=param, retry_after_s=error.retry_after_s)
    return error


def _tool_choice(
    request: ResponsesRequest,
) -> tuple[Sequence[FunctionTool], str | NamedToolChoice | None]:
    """The tools that the model gets, and what the chat side calls the choice among them."""
    tools = request.tools or ()
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return tools, choice
    if choice.type == "function":
        if choice.name is None:
            raise _required("tool_choice.name")
        return tools, NamedToolChoice("function", NamedFunction(choice.name))
    if choice.type == "allowed_tools":
        return _allowed(tools, choice), choice.mode or "auto"
    raise UnsupportedError(
        "tool_choice.type must be function or allowed_tools: there are no hosted tools here.",
        param="tool_choice.type",
    )


def _check_tool(tool: FunctionTool, at: str) -> None:
    if tool.type != "function":
        raise UnsupportedError(
            f"{at}.type must be function: hosted and custom tools are not supported.",
            param=f"{at}.type",
        )
    if tool.name is None:
        raise _required(f"{at}.name")
    if tool.defer_loading:
        raise UnsupportedError(f"{at}.defer_loading is not supported.", param=f"{at}.defer_loading")


def _allowed(tools: Sequence[FunctionTool], choice: ToolChoice) -> list[FunctionTool]:
    by_name = {tool.name: tool for tool in tools}
    found: list[FunctionTool] = []
    for index, chosen in enumerate(choice.tools or ()):
        if chosen.type != "function" or chosen.name not in by_name:
            param = f"tool_choice.tools[{index}]"
            raise InvalidRequestError(
                f"{param} must name a function that is among the tools.", param=param
            )
        found.append(by_name[chosen.name])
    if not found:
        raise InvalidRequestError("tool_choice.tools must not be empty.", param="tool_choice.tools")
    return list({tool.name: tool for tool in found}.values())


def _definition(tool: FunctionTool) -> ToolDefinition:
    function = FunctionDefinition(tool.name or "", tool.description, tool.parameters, tool.strict)
    return ToolDefinition("function", function)


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    format_ = request.text.format if request.text else None
    if format_ is None or format_.type == "text":
        return None
    if format_.type not in ("json_object", "json_schema"):
        raise InvalidRequestError(
            "text.format.type must be text, json_object or json_schema.", param="text.format.type"
        )
    if request.structured_outputs is not None:
        raise InvalidRequestError(
            "text.format and structured_outputs exclude each other.", param="structured_outputs"
        )
    return ResponseFormat(format_.type, _schema(format_))


def _schema(format_: TextFormat) -> JsonSchemaFormat | None:
    if format_.type != "json_schema":
        return None
    if format_.name is None:
        raise _required("text.format.name")
    schema = null() if isinstance(format_.schema, UnsetType) else format_.schema
    return JsonSchemaFormat(format_.name, schema, format_.strict, format_.description)


def _template_kwargs(
    request: ResponsesRequest,
) -> dict[str, str | int | float | bool | None] | None:
    """Verbosity reaches the model as far as its template knows it."""
    kwargs = request.chat_template_kwargs
    if request.text is None or request.text.verbosity is None:
        return kwargs
    return {"verbosity": request.text.verbosity, **(kwargs or {})}


def _required(param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} is required.", param=param)
