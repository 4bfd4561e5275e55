"""The requests of the OpenAI dialect as frozen structs, and their decoding with errors that help.

Null means absent for every optional field; unknown fields are ignored, so that newer clients work.
Fields that are known, not supported and would change the answer are refused by name (`refused`).
It knows no model, no Litestar and no Redis.
"""

from typing import Annotated, Literal

import msgspec
from forebay_shared.errors import InvalidRequestError, UnsupportedError
from forebay_shared.sampling import MAX_LOGPROBS, MAX_N, RepetitionPenalty
from msgspec import Meta

from forebay_gateway.api.decoding import decode
from forebay_gateway.api.openai.refused import Borrowed, own_fields, refuse, refuse_own
from forebay_gateway.api.openai.structured import ResponseFormat, StructuredOutputs
from forebay_gateway.api.openai.tools import (
    FunctionDefinition,
    NamedFunction,
    NamedToolChoice,
    ToolDefinition,
)

_MAX_INT32 = 2**31 - 1

MAX_MESSAGES = 100_000
"""Anthropic's limit too. So many take a second and a half to become a prompt."""

Count = Annotated[int, Meta(ge=1, le=_MAX_INT32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenId = Annotated[int, Meta(ge=0, le=_MAX_INT32)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Borrowed, frozen=True, kw_only=True):
    """What chat and text completions have in common."""

    model: str
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_MAX_INT32)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_MAX_INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=_MAX_INT32)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Meta(ge=-_MAX_INT32, le=_MAX_INT32)] | None = None


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str | None = None


class ToolCall(msgspec.Struct, frozen=True):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    prefix: bool | None = None
    audio: object = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    documents: list[dict[str, object]] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    functions: list[FunctionDefinition] | None = None
    function_call: str | NamedFunction | None = None
    modalities: list[str] | None = None
    prompt: object = None
    """Refused: a chat's is `messages`."""


class _NoChat(GenerationRequest, frozen=True, kw_only=True):
    """What only chats have: null or refused."""

    add_generation_prompt: object = None
    chat_template: object = None
    chat_template_kwargs: object = None
    continue_final_message: object = None
    documents: object = None
    enable_thinking: object = None
    function_call: object = None
    functions: object = None
    include_reasoning: object = None
    max_completion_tokens: object = None
    messages: object = None
    modalities: object = None
    parallel_tool_calls: object = None
    reasoning_effort: object = None
    tool_choice: object = None
    tools: object = None
    top_logprobs: object = None
    verbosity: object = None


class CompletionRequest(_NoChat, frozen=True, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=0, le=_MAX_INT32)] | None = None
    prompt: str | list[str | int | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None


_BORROWED = own_fields(Borrowed)
NOT_OF_CHATS = (*_BORROWED, "prompt")
NOT_OF_TEXTS = (*_BORROWED, *own_fields(_NoChat, GenerationRequest))
_HINTS = {
    "input": "; use messages",
    "instructions": "; use a message of the role system",
    "max_output_tokens": "; use max_completion_tokens",
    "output_config": "; use reasoning_effort and response_format",
    "output_format": "; use response_format",
    "prompt": "; use messages",
    "reasoning": "; use reasoning_effort",
    "stop_sequences": "; use stop",
    "system": "; use a message of the role system",
    "text": "; use response_format and verbosity",
}
_TEXT_HINTS = {
    "chat_template": "; use /v1/chat/completions",
    "function_call": "; use /v1/chat/completions",
    "functions": "; use /v1/chat/completions",
    "input": "; use prompt",
    "max_completion_tokens": "; use max_tokens",
    "max_output_tokens": "; use max_tokens",
    "messages": "; use prompt, or /v1/chat/completions",
    "output_format": "; use response_format",
    "stop_sequences": "; use stop",
    "tool_choice": "; use /v1/chat/completions",
    "tools": "; use /v1/chat/completions",
    "top_logprobs": "; use logprobs",
}

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


def decode_chat(body: bytes | bytearray) -> ChatRequest:
    """Raises InvalidRequestError that names the first bad field."""
    request = decode(_chat_decoder, body)
    _check(request)
    refuse_own(request, NOT_OF_CHATS, _HINTS)
    if request.echo:
        raise UnsupportedError("echo is not supported in chats.", param="echo")
    if request.best_of is not None and request.best_of > (request.n or 1):
        raise UnsupportedError("best_of above n is not supported in chats.", param="best_of")
    if request.include_reasoning is False and (request.logprobs or request.return_token_ids):
        raise InvalidRequestError(
            "include_reasoning false excludes logprobs and return_token_ids, which would show it.",
            param="include_reasoning",
        )
    if any(modality != "text" for modality in request.modalities or ()):
        raise UnsupportedError("modalities other than text are not supported.", param="modalities")
    return request


def decode_completion(body: bytes | bytearray) -> CompletionRequest:
    """Raises InvalidRequestError that names the first bad field."""
    request = decode(_completion_decoder, body)
    _check(request)
    refuse_own(request, NOT_OF_TEXTS, _TEXT_HINTS)
    return request


def _check(request: GenerationRequest) -> None:
    refuse(request)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "stream_options may be set only when stream is true.", param="stream_options"
        )
