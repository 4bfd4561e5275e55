"""What is answered, as structs, for the OpenAPI document alone.

The answers themselves are written by hand, piece by piece; a test holds real ones against these. It
knows no route.
"""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from forebay_gateway.api.openai.logprobs import TokenEntry
from forebay_gateway.api.responses.shapes import Response


class PromptTokens(Struct):
    cached_tokens: int


class CompletionTokens(Struct):
    reasoning_tokens: int


class ChatUsage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens | UnsetType = UNSET


class CalledFunction(Struct):
    name: str
    arguments: str


class MadeCall(Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MadeCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ChatLogprobs(Struct):
    content: list[TokenEntry]
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatCompletionChunk(Struct):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: ChatUsage | UnsetType | None = UNSET


class TextLogprobs(Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET


class TextCompletion(Struct):
    """Whole, and as each chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: ChatUsage | UnsetType | None = UNSET


class VectorUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: VectorUsage


class Score(Struct):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(Struct):
    id: str
    object: Literal["list"]
    model: str
    data: list[Score]
    usage: VectorUsage


class Ranked(Struct):
    index: int
    relevance_score: float


class Ranking(Struct):
    id: str
    results: list[Ranked]


class MessageUsage(Struct):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class TextContent(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingContent(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseContent(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, object]


class AnthropicMessage(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class Event(Struct):
    """A named event of a stream; the rest of its fields follow from its type."""

    type: str


class ResponseObject(Response, kw_only=True):
    """A response. The items of its output are of several types, told apart by their `type`."""

    output: Sequence[Any] = ()


class InputTokens(Struct):
    input_tokens: int
    object: str


class Health(Struct):
    status: Literal["ok", "ready"]


class Version(Struct):
    version: str


class ServerLoad(Struct):
    server_load: int
