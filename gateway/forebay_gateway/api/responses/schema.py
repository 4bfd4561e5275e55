"""The requests of /v1/responses as frozen structs, and what is refused of them by name.

Null means absent for every optional field; unknown fields are ignored, so that newer clients work.
It knows no model, no Litestar and no Redis.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from forebay_shared.errors import InvalidRequestError, UnsupportedError
from forebay_shared.sampling import MAX_LOGPROBS, RepetitionPenalty
from msgspec import Meta

from forebay_gateway.api.decoding import decode
from forebay_gateway.api.openai import refused
from forebay_gateway.api.openai.schema import Count, Effort, Penalty, TokenId
from forebay_gateway.api.openai.structured import StructuredOutputs

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"
_INCLUDABLE = frozenset(
    {
        _LOGPROBS,
        _SEALED,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)

Label = Annotated[str, Meta(max_length=512)]


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[object] | None = None


class Item(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An item of a conversation, of any type: as it is sent, stored and listed."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    namespace: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    tools: "list[Tool] | None" = None


class InputFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the input of a custom tool must be like."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool of any type; `tools` says which fields a type must have."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    format: InputFormat | None = None
    tools: "list[Tool] | None" = None


class ChosenTool(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    name: str | None = None
    namespace: str | None = None


class ToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ChosenTool] | None = None


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """It comes back to the client only if it was given."""
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct, frozen=True):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "all_turns", "current_turn"] | None = None
    mode: str | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    include_obfuscation: bool | None = None


class PromptCacheOptions(msgspec.Struct, frozen=True):
    prewarm: bool | None = None


class Elsewhere(refused.Refused, frozen=True, kw_only=True):
    """Fields that would change the answer and that nothing here honours: null or refused.

    Beside what chat refuses too, there are those of this dialect, and those of chat that have
    another name here.
    """

    access_programs: object = None
    add_generation_prompt: object = None
    add_special_tokens: object = None
    best_of: object = None
    chat_template: object = None
    context_management: object = None
    continue_final_message: object = None
    conversation: object = None
    documents: object = None
    echo: object = None
    enable_response_messages: object = None
    function_call: object = None
    functions: object = None
    include_reasoning: object = None
    logprobs: object = None
    max_completion_tokens: object = None
    max_tokens: object = None
    messages: object = None
    modalities: object = None
    n: object = None
    previous_input_messages: object = None
    prompt: object = None
    prompt_logprobs: object = None
    reasoning_effort: object = None
    response_format: object = None
    return_token_ids: object = None
    return_tokens_as_token_ids: object = None
    truncate_prompt_tokens: object = None
    truncation_side: object = None
    verbosity: object = None


_OWN = refused.own_fields(Elsewhere)
_HINTS = {
    "function_call": "; use tool_choice",
    "functions": "; use tools",
    "logprobs": "; use top_logprobs",
    "max_completion_tokens": "; use max_output_tokens",
    "max_tokens": "; use max_output_tokens",
    "messages": "; use input",
    "reasoning_effort": "; use reasoning.effort",
    "response_format": "; use text.format",
    "previous_input_messages": "; use previous_response_id",
    "truncate_prompt_tokens": "; use truncation",
    "verbosity": "; use text.verbosity",
}


class ResponsesRequest(Elsewhere, frozen=True, kw_only=True):
    """A request for a response: OpenAI's fields, then those that other servers add."""

    model: str
    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: (
        Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None
    ) = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    generate: bool | None = None

    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    enable_thinking: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    @property
    def wants_sealed(self) -> bool:
        """Reasoning comes with what can be sent back in its place."""
        return _SEALED in (self.include or ())


_decoder = msgspec.json.Decoder(ResponsesRequest)


def decode_request(body: bytes | bytearray) -> ResponsesRequest:
    """Raises InvalidRequestError that names the first bad field."""
    request = decode(_decoder, body)
    refused.refuse(request)
    refused.refuse_own(request, _OWN, _HINTS)
    _check_options(request)
    _check_metadata(request.metadata or {})
    if any(name not in _INCLUDABLE for name in request.include or ()):
        raise InvalidRequestError(
            f"include may hold {', '.join(sorted(_INCLUDABLE))}.", param="include"
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "stream_options may be set only when stream is true.", param="stream_options"
        )
    if request.background and request.store is False:
        raise InvalidRequestError(
            "background needs store: only a stored response can be asked for later.",
            param="background",
        )
    return request


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA or any(
        len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE
        for key, value in metadata.items()
    ):
        raise InvalidRequestError(
            f"metadata may hold at most {MAX_METADATA} pairs of a key of up to {MAX_METADATA_KEY} "
            f"and a value of up to {MAX_METADATA_VALUE} characters.",
            param="metadata",
        )


def _check_options(request: ResponsesRequest) -> None:
    """What no engine here can do, deep inside of a field."""
    reasoning, options = request.reasoning, request.prompt_cache_options
    for wanted, param in (
        (request.generate is False, "generate"),
        (options is not None and options.prewarm, "prompt_cache_options.prewarm"),
        (
            request.stream_options is not None and request.stream_options.include_obfuscation,
            "stream_options.include_obfuscation",
        ),
        (reasoning is not None and reasoning.context == "current_turn", "reasoning.context"),
        (reasoning is not None and reasoning.mode not in (None, "standard"), "reasoning.mode"),
    ):
        if wanted:
            raise UnsupportedError(f"This value of {param} is not supported.", param=param)
