"""The requests of the OpenAI dialect as frozen structs, and their decoding with errors that help.

Null means absent for every optional field; unknown fields are ignored, so that newer clients work.
Fields that are known, not supported and would change the answer are declared as such and refused by
name. It knows no model, no Litestar and no Redis.
"""

from typing import Annotated, Literal

import msgspec
from forebay_shared.errors import InvalidRequestError, UnsupportedError
from forebay_shared.sampling import MAX_LOGPROBS, MAX_N
from msgspec import Meta

from forebay_gateway.api.decoding import decode
from forebay_gateway.api.openai.structured import REMOVED, ResponseFormat, StructuredOutputs
from forebay_gateway.api.openai.tools import NamedToolChoice, ToolDefinition

_MAX_INT32 = 2**31 - 1

Count = Annotated[int, Meta(ge=1, le=_MAX_INT32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenId = Annotated[int, Meta(ge=0, le=_MAX_INT32)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Unsupported(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that would change the answer and that nothing here honours: null or refused."""

    allowed_token_ids: object = None
    bad_words: object = None
    chat_template: object = None
    documents: object = None
    ebnf: object = None
    guided_choice: object = None
    guided_grammar: object = None
    guided_json: object = None
    guided_regex: object = None
    guided_whitespace_pattern: object = None
    json_schema: object = None
    lora_path: object = None
    prompt_embeds: object = None
    prompt_logprobs: object = None
    regex: object = None
    stop_regex: object = None
    thinking_token_budget: object = None
    truncate_prompt_tokens: object = None


class GenerationRequest(Unsupported, frozen=True, kw_only=True):
    """What chat and text completions have in common."""

    model: str
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_MAX_INT32)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_MAX_INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    best_of: Count | None = None
    use_beam_search: bool | None = None
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


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    functions: list[object] | None = None
    function_call: object = None
    modalities: list[str] | None = None
    audio: object = None
    web_search_options: object = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None


_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


def decode_chat(body: bytes | bytearray) -> ChatRequest:
    """Raises InvalidRequestError that names the first bad field."""
    request = decode(_chat_decoder, body)
    _refuse_common(request)
    if request.functions:
        raise UnsupportedError("functions is not supported; use tools.", param="functions")
    if request.function_call not in (None, "none", "auto"):
        raise UnsupportedError(
            "function_call is not supported; use tool_choice.", param="function_call"
        )
    if any(modality != "text" for modality in request.modalities or ()):
        raise UnsupportedError("modalities other than text are not supported.", param="modalities")
    for name in ("audio", "web_search_options"):
        if getattr(request, name) is not None:
            raise _unsupported(name)
    return request


def decode_completion(body: bytes | bytearray) -> CompletionRequest:
    """Raises InvalidRequestError that names the first bad field."""
    request = decode(_completion_decoder, body)
    _refuse_common(request)
    if request.suffix:
        raise _unsupported("suffix")
    return request


def _refuse_common(request: GenerationRequest) -> None:
    for name in Unsupported.__struct_fields__:
        if getattr(request, name) is not None:
            raise _unsupported(name)
    if request.best_of is not None and request.best_of > (request.n or 1):
        raise UnsupportedError("best_of above n is not supported.", param="best_of")
    if request.use_beam_search:
        raise _unsupported("use_beam_search")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "stream_options may be set only when stream is true.", param="stream_options"
        )


def _unsupported(name: str) -> UnsupportedError:
    if name in REMOVED:
        return UnsupportedError(f"{name} is now {REMOVED[name]}.", param=name)
    return UnsupportedError(f"{name} is not supported.", param=name)
