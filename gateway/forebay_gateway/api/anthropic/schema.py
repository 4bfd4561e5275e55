"""The requests of the Anthropic dialect as frozen structs.

Null means absent; unknown fields are ignored, so that newer clients work. What is known, not
supported and would change the answer is declared as such and refused by name. It knows no model.
"""

from typing import Annotated, Literal

import msgspec
from forebay_shared.errors import InvalidRequestError, UnsupportedError
from msgspec import Meta

from forebay_gateway.api.anthropic.errors import UnavailableError
from forebay_gateway.api.decoding import decode, null
from forebay_gateway.api.openai import refused
from forebay_gateway.api.openai.schema import MAX_MESSAGES, Count

MIN_BUDGET_TOKENS = 1024


class Unsupported(refused.Foreign, frozen=True, kw_only=True):
    """Fields that ask for what nothing here does: null or refused.

    Beside what other dialects refuse too, there are those of this one, and those of chats.
    """

    add_generation_prompt: object = None
    add_special_tokens: object = None
    allowed_token_ids: object = None
    bad_words: object = None
    best_of: object = None
    chat_template: object = None
    container: object = None
    continue_final_message: object = None
    documents: object = None
    echo: object = None
    enable_thinking: object = None
    frequency_penalty: object = None
    function_call: object = None
    functions: object = None
    ignore_eos: object = None
    include_reasoning: object = None
    include_stop_str_in_output: object = None
    inference_geo: object = None
    logit_bias: object = None
    logprobs: object = None
    max_completion_tokens: object = None
    mcp_servers: object = None
    min_p: object = None
    min_tokens: object = None
    modalities: object = None
    n: object = None
    parallel_tool_calls: object = None
    presence_penalty: object = None
    prompt: object = None
    prompt_logprobs: object = None
    reasoning_effort: object = None
    repetition_penalty: object = None
    response_format: object = None
    return_token_ids: object = None
    return_tokens_as_token_ids: object = None
    seed: object = None
    skip_special_tokens: object = None
    stop: object = None
    stop_token_ids: object = None
    structured_outputs: object = None
    top_logprobs: object = None
    truncate_prompt_tokens: object = None
    truncation_side: object = None
    verbosity: object = None


_OWN = refused.own_fields(Unsupported)
_HINTS = {
    "chat_template": "; use chat_template_kwargs",
    "enable_thinking": "; use thinking",
    "functions": "; use tools",
    "function_call": "; use tool_choice",
    "include_reasoning": "; use thinking.display",
    "max_completion_tokens": "; use max_tokens",
    "parallel_tool_calls": "; use tool_choice.disable_parallel_tool_use",
    "prompt": "; use messages",
    "reasoning_effort": "; use output_config.effort",
    "response_format": "; use output_config.format",
    "stop": "; use stop_sequences",
    "structured_outputs": "; use output_config.format",
}


class Source(msgspec.Struct, frozen=True):
    """Where a document's text is, or a picture's bytes."""

    type: str | None = None
    data: str | None = None
    content: "str | list[Block] | None" = None


class Block(msgspec.Struct, frozen=True):
    """A piece of a message, of any type; `translate` and `reading` say which fields a type must
    have."""

    type: str
    text: str | None = None
    title: str | None = None
    context: str | None = None
    source: str | Source | None = None
    citations: object = None
    tool_name: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.field(default_factory=null)
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[Block]


class Tool(msgspec.Struct, frozen=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, object] | None = None
    input_examples: list[dict[str, object]] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    type: str
    budget_tokens: Annotated[int, Meta(ge=MIN_BUDGET_TOKENS, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    type: str
    schema: msgspec.Raw = msgspec.field(default_factory=null)


class OutputConfig(msgspec.Struct, frozen=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextEdit(msgspec.Struct, frozen=True):
    type: str


class ContextManagement(msgspec.Struct, frozen=True):
    """What may be left out of a conversation to save room. Nothing here does so, and the answer
    says that none of it was applied."""

    edits: list[ContextEdit] | None = None


class CountRequest(Unsupported, frozen=True, kw_only=True):
    """What a prompt is made of. `cache_salt` and `chat_template_kwargs` are vLLM's additions."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None
    compaction: object = None
    thread: object = None


_messages_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)


def decode_messages(body: bytes | bytearray) -> MessagesRequest:
    """Raises InvalidRequestError that names the first bad field."""
    request = decode(_messages_decoder, body)
    _check(request)
    _check_unavailable(request)
    budget = request.thinking.budget_tokens if request.thinking else None
    if budget is not None and budget >= request.max_tokens:
        raise InvalidRequestError(
            "thinking.budget_tokens must be below max_tokens.", param="thinking.budget_tokens"
        )
    return request


def _check_unavailable(request: MessagesRequest) -> None:
    """What would make of the messages another request than they are."""
    if request.thread is not None:
        raise UnavailableError(
            "thread is not supported here; send the whole conversation without it.",
            "thread_unsupported_request",
        )
    if request.compaction is not None:
        raise UnsupportedError("compaction is not supported here; ask for a summary in messages.")


def decode_count(body: bytes | bytearray) -> CountRequest:
    """Raises InvalidRequestError that names the first bad field."""
    request = decode(_count_decoder, body)
    _check(request)
    return request


def _check(request: CountRequest) -> None:
    refused.refuse(request)
    try:
        refused.refuse_own(request, _OWN, _HINTS)
    except UnsupportedError as error:
        raise UnsupportedError(error.message) from None  # it is meant by the name that it has
    thinking = request.thinking
    if thinking is None:
        return
    if thinking.type not in ("enabled", "disabled", "adaptive"):
        raise UnsupportedError(
            "thinking.type must be enabled, disabled or adaptive.", param="thinking.type"
        )
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise InvalidRequestError(
            "thinking.budget_tokens is required.", param="thinking.budget_tokens"
        )
