"""From a response's request to the chat request that means the same, and errors back again.

What the chat side finds wrong it says in the names of its own fields; here they become the names
that the client wrote. It knows no model and no Redis.
"""

import re

from forebay_shared.errors import ForebayError, InvalidRequestError
from msgspec import UnsetType

from forebay_gateway.api.decoding import null
from forebay_gateway.api.openai.schema import ChatRequest, Message
from forebay_gateway.api.openai.structured import JsonSchemaFormat, ResponseFormat
from forebay_gateway.api.responses.items import Equipped
from forebay_gateway.api.responses.schema import ResponsesRequest
from forebay_gateway.api.responses.tools import Toolbox

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


class _TextFormat(ResponseFormat, frozen=True):
    at = "text.format"
    schema_at = "text.format.schema"


_TOOL = re.compile(r"^tools\[(\d+)\]")
_FUNCTION = re.compile(r"^tools\[(\d+)\]\.function\b")
_NAMES = (
    (re.compile(r"^messages\b.*"), "input"),
    (re.compile(r"^response_format(?:\.json_schema)?\b"), "text.format"),  # as upstreams say it
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
    (re.compile(r"^reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"^max_(?:completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"^(?:top_)?logprobs\b"), "top_logprobs"),
)


def chat_request(request: ResponsesRequest, messages: list[Message]) -> ChatRequest:
    """Raises InvalidRequestError in the names of this dialect."""
    toolbox = Toolbox(request.tools or ())
    definitions, choice = toolbox.choose(request.tool_choice)
    reasoning = request.reasoning
    fields: dict[str, object] = {name: getattr(request, name) for name in _SAME}
    return ChatRequest(
        **fields,  # pyright: ignore[reportArgumentType]  the types are the same in both structs
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        logprobs=request.wants_logprobs,
        top_logprobs=(request.top_logprobs or 0) if request.wants_logprobs else None,
        tools=definitions,
        tool_choice=choice,
        reasoning_effort=reasoning.effort if reasoning else None,
        response_format=_response_format(request),
        chat_template_kwargs=_template_kwargs(request),
    )


def renamed(error: ForebayError, equipped: Equipped) -> ForebayError:
    """The same error in the names of this dialect."""
    if error.param is None:
        return error
    request, brought = equipped
    param = error.param
    if function := _FUNCTION.match(param):
        places = Toolbox(request.tools or ()).places(request.tool_choice)
        param = places[int(function[1])] + param[function.end() :]
    if tool := _TOOL.match(param):
        number = int(tool[1]) - (len(request.tools or ()) - len(brought))
        param = (brought[number] if number >= 0 else tool[0]) + param[tool.end() :]
    for pattern, name in _NAMES:
        param = pattern.sub(name, param)
    if param == error.param:
        return error
    message = error.message.replace(error.param, param)
    return type(error)(message, param=param, retry_after_s=error.retry_after_s)


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    format_ = request.text.format if request.text else None
    if format_ is None or format_.type == "text":
        return None
    if format_.type not in ("json_object", "json_schema"):
        raise InvalidRequestError(
            "text.format.type must be text, json_object or json_schema.", param="text.format.type"
        )
    schema = null() if isinstance(format_.schema, UnsetType) else format_.schema
    if format_.type == "json_object":
        return _TextFormat("json_object", schema=schema)
    if format_.name is None:
        raise _required("text.format.name")
    named = JsonSchemaFormat(format_.name, schema, format_.strict, format_.description)
    return _TextFormat("json_schema", named)


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
