"""Every route: what it takes and what it answers. A test holds this list against the app's."""

from typing import Literal, NamedTuple

from forebay_gateway.api.anthropic.schema import CountRequest, MessagesRequest
from forebay_gateway.api.anthropic.service import TokenCount
from forebay_gateway.api.models import ModelEntry, ModelList
from forebay_gateway.api.openai.embeddings import EmbeddingRequest
from forebay_gateway.api.openai.schema import ChatRequest, CompletionRequest
from forebay_gateway.api.openai.scoring import RerankRequest, ScoreRequest
from forebay_gateway.api.openapi import answers
from forebay_gateway.api.responses.pages import ItemPage
from forebay_gateway.api.responses.routes import Deleted
from forebay_gateway.api.responses.schema import ResponsesRequest
from forebay_gateway.api.tokens import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)

Method = Literal["get", "post", "delete"]


class Operation(NamedTuple):
    """`answer` and `event` are structs; None: a text, and no stream."""

    method: Method
    path: str
    summary: str
    body: type | None = None
    answer: type | None = None
    event: type | None = None
    open: bool = False
    """Answered without a key."""


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "An answer to a conversation",
        ChatRequest,
        answers.ChatCompletion,
        answers.ChatCompletionChunk,
    ),
    Operation(
        "post",
        "/v1/completions",
        "What follows a text",
        CompletionRequest,
        answers.TextCompletion,
        answers.TextCompletion,
    ),
    Operation(
        "post",
        "/v1/responses",
        "A response, stored unless told not to",
        ResponsesRequest,
        answers.ResponseObject,
        answers.Event,
    ),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "How many tokens an input is",
        ResponsesRequest,
        answers.InputTokens,
    ),
    Operation(
        "get",
        "/v1/responses/{response_id}",
        "A stored response",
        None,
        answers.ResponseObject,
        answers.Event,
    ),
    Operation("delete", "/v1/responses/{response_id}", "Forgets a response", None, Deleted),
    Operation(
        "post",
        "/v1/responses/{response_id}/cancel",
        "Ends background work",
        None,
        answers.ResponseObject,
    ),
    Operation(
        "get", "/v1/responses/{response_id}/input_items", "A response's input", None, ItemPage
    ),
    Operation(
        "post",
        "/v1/messages",
        "An answer in Anthropic's dialect",
        MessagesRequest,
        answers.AnthropicMessage,
        answers.Event,
    ),
    Operation(
        "post", "/v1/messages/count_tokens", "How many tokens it is", CountRequest, TokenCount
    ),
    Operation("post", "/v1/embeddings", "Vectors", EmbeddingRequest, answers.EmbeddingList),
    *(
        Operation("post", path, "Similarities of pairs", ScoreRequest, answers.ScoreList)
        for path in ("/score", "/v1/score")
    ),
    *(
        Operation("post", path, "Documents by similarity", RerankRequest, answers.Ranking)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    *(
        Operation("post", path, "Text or messages to ids", TokenizeRequest, Tokenized)
        for path in ("/tokenize", "/v1/tokenize")
    ),
    *(
        Operation("post", path, "Ids to text", DetokenizeRequest, Detokenized)
        for path in ("/detokenize", "/v1/detokenize")
    ),
    Operation("get", "/v1/models", "The models that are served", None, ModelList),
    Operation("get", "/v1/models/{name}", "One model, whose id may hold slashes", None, ModelEntry),
    Operation("get", "/health", "The process lives", None, answers.Health, open=True),
    Operation("get", "/ping", "The process lives", None, answers.Health, open=True),
    Operation("get", "/ready", "A worker serves", None, answers.Health, open=True),
    Operation("get", "/version", "The version", None, answers.Version),
    Operation("get", "/load", "The requests of this process", None, answers.ServerLoad),
    Operation("get", "/metrics", "Prometheus text", open=True),
    Operation("get", "/schema", "This document", None, dict),
    Operation("get", "/openapi.json", "This document", None, dict),
)
