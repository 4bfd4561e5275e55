"""The JSON of a response: its fields, the items of its output, its usage. Knows no events.

Every field that a client may set comes back, as OpenAI's does.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
from forebay_shared.errors import ForebayError, InvalidRequestError, RateLimitError
from forebay_shared.sampling import SamplingParams

from forebay_gateway.api.openai.logprobs import TokenEntry
from forebay_gateway.api.responses.schema import ResponsesRequest, TextFormat, ToolChoice
from forebay_gateway.api.responses.tools import Toolbox
from forebay_gateway.api.transcript import Usage

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
ENDED = frozenset({"completed", "incomplete", "failed", "cancelled"})


class OutputText(msgspec.Struct):
    text: str = ""
    annotations: list[object] = []
    logprobs: list[TokenEntry] = []
    type: str = "output_text"


class MessageItem(msgspec.Struct):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: str = "assistant"
    type: str = "message"


class ReasoningText(msgspec.Struct):
    text: str = ""
    type: str = "reasoning_text"


class ReasoningItem(msgspec.Struct):
    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[object] = []
    encrypted_content: str | None = None
    type: str = "reasoning"


class CallItem(msgspec.Struct):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str = ""
    type: str = "function_call"
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomCallItem(msgspec.Struct):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str = ""
    type: str = "custom_tool_call"
    namespace: str | msgspec.UnsetType = msgspec.UNSET


OutputItem: TypeAlias = MessageItem | ReasoningItem | CallItem | CustomCallItem


EchoedTools: TypeAlias = list[dict[str, object]]


class EchoedText(msgspec.Struct):
    format: TextFormat
    verbosity: str


class EchoedReasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str
    param: str | None = None


class IncompleteDetails(msgspec.Struct):
    reason: str = "max_output_tokens"


class Response(msgspec.Struct, kw_only=True):
    """A response as clients see it; times are in seconds."""

    id: str
    object: str = "response"
    created_at: int
    status: Status
    background: bool
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: Sequence[OutputItem] = ()
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: EchoedReasoning
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: EchoedText
    tool_choice: str | ToolChoice
    tools: EchoedTools
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


def new_response(
    request: ResponsesRequest,
    sampling: SamplingParams,
    *,
    response_id: str,
    created_at: int,
    store: bool,
) -> Response:
    """A response that has not begun. What the request left open shows what it is run with."""
    text, reasoning = request.text, request.reasoning
    return Response(
        id=response_id,
        created_at=created_at,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=request.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_retention=request.prompt_cache_retention,
        reasoning=EchoedReasoning(reasoning.effort, reasoning.summary or reasoning.generate_summary)
        if reasoning
        else EchoedReasoning(),
        safety_identifier=request.safety_identifier,
        store=store,
        temperature=sampling.temperature,
        text=EchoedText(
            (text and text.format) or TextFormat("text"), (text and text.verbosity) or "medium"
        ),
        tool_choice=request.tool_choice or "auto",
        tools=Toolbox(request.tools or ()).echoed(),
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling.top_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        truncation=request.truncation or "disabled",
        user=request.user,
        metadata=request.metadata or {},
    )


def response_usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        InputDetails(usage.cached_tokens),
        usage.completion_tokens,
        OutputDetails(usage.reasoning_tokens or 0),
        usage.prompt_tokens + usage.completion_tokens,
    )


def response_error(error: ForebayError) -> ResponseError:
    """An error under one of the few codes that a response may have."""
    code = "server_error"
    if isinstance(error, RateLimitError):
        code = "rate_limit_exceeded"
    elif isinstance(error, InvalidRequestError):
        code = "invalid_prompt"
    return ResponseError(code, error.message, error.param)
