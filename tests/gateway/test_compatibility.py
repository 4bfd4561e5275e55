"""docs/compatibility.md is true: what it calls refused is refused, what it calls honoured is taken.

The tables of chat and completions are held against `test_parameters`, which shows the effects.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest
from anthropic.types import message_create_params as messages
from anthropic.types.beta import message_create_params as beta_messages
from forebay_gateway.api.anthropic.schema import MessagesRequest
from forebay_gateway.api.openai.embeddings import EmbeddingRequest
from forebay_gateway.api.openai.schema import ChatRequest, CompletionRequest
from forebay_gateway.api.openai.scoring import RerankRequest, ScoreRequest
from forebay_gateway.api.responses.schema import ResponsesRequest
from forebay_gateway.api.tokens import DetokenizeRequest, TokenizeRequest
from forebay_shared.telemetry import EngineMetrics
from gateway_fakes import MODEL
from openai.types import completion_create_params as completions
from openai.types import embedding_create_params as embeddings
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses
from parameter_decisions import DECISIONS, NOT_OF_TEXTS
from patience import PATIENCE_S
from prometheus_client import CollectorRegistry, generate_latest
from redis_house import RedisServer
from responses_house import TALKING_TEMPLATE, responding
from serve_house import starting

DOCUMENT = (Path(__file__).parents[2] / "docs/compatibility.md").read_text()
VERDICTS = {"honoured", "refused", "ignored"}
EMBEDDER = "echo-embed"

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
ANY = {"a": 1}
OF_HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Of the SDK's fields, those that it sends as headers."""


def table(heading: str) -> list[dict[str, str]]:
    """The rows of the first table under a heading, by the names of its columns."""
    text = DOCUMENT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [dict(zip((name.strip() for name in head), row, strict=True)) for row in rows]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def verdicts(heading: str, column: str) -> dict[str, str]:
    """What a table says of each field, in one of its columns."""
    found: dict[str, str] = {}
    for row in table(heading):
        if (said := row[column].split()[0]) in VERDICTS:
            assert not found.keys() & set(names(row["field"])), row
            found |= dict.fromkeys(names(row["field"]), said)
        else:
            assert said == "-", row
    return found


@dataclass(frozen=True)
class Endpoint:
    """`right` are values that must be taken; `with_` what a field needs beside it, or removes."""

    heading: str
    path: str
    struct: type[msgspec.Struct]
    base: dict[str, object]
    right: dict[str, object]
    column: str = "here"
    with_: dict[str, dict[str, object]] = field(default_factory=dict)
    wrong: dict[str, object] = field(default_factory=dict)


RESPONSES = Endpoint(
    "Responses",
    "/v1/responses",
    ResponsesRequest,
    {"model": MODEL, "input": "hi", "store": False},
    {
        "model": MODEL,
        "input": [{"role": "user", "content": "hi"}],
        "instructions": "Be kind.",
        "previous_response_id": None,
        "max_output_tokens": 5,
        "max_tool_calls": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_logprobs": 1,
        "include": ["reasoning.encrypted_content"],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
        "store": True,
        "background": True,
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "truncation": "auto",
        "generate": True,
        "service_tier": "auto",
        "user": "u",
        "safety_identifier": "u",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {},
        "image": {},
        "top_k": 5,
        "min_p": 0.1,
        "seed": 5,
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 1},
        "stop": ["x"],
        "stop_token_ids": [5],
        "ignore_eos": False,
        "structured_outputs": {"regex": "ab"},
        "chat_template_kwargs": {"a": 1},
        "cache_salt": "mine",
        "priority": 1,
        "min_tokens": 1,
        "allowed_token_ids": [5, 6],
        "bad_words": ["x"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "enable_thinking": False,
    },
    with_={"stream_options": {"stream": True}, "background": {"store": True}},
)
MESSAGES = Endpoint(
    "Messages (Anthropic)",
    "/v1/messages",
    MessagesRequest,
    {"model": MODEL, "messages": HI, "max_tokens": 2048},
    {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "system": "Be kind.",
        "max_tokens": 5,
        "stream": True,
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "none"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "output_format": {"type": "json_schema", "schema": SCHEMA},
        "cache_salt": "mine",
        "chat_template_kwargs": {"a": 1},
        "priority": 1,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "speed": "fast",
        "diagnostics": {"previous_message_id": "msg_1"},
        "fallbacks": [{"model": "m"}],
        "fallback_credit_token": "t",
        "billing_policy": {"type": "billing_policy", "bill_to": "self"},
    },
)
EMBEDDINGS = Endpoint(
    "Embeddings",
    "/v1/embeddings",
    EmbeddingRequest,
    {"model": EMBEDDER, "input": "hi"},
    {
        "model": EMBEDDER,
        "input": ["hi", "ho"],
        "encoding_format": "base64",
        "dimensions": 8,
        "use_activation": False,
        "embed_dtype": "float32",
        "endianness": "little",
        "add_special_tokens": False,
        "truncate_prompt_tokens": 5,
        "truncation_side": "left",
        "priority": 1,
        "user": "u",
    },
)
_CUTS = {"truncate_prompt_tokens": 5, "truncation_side": "left", "priority": 1}
SCORE = Endpoint(
    "Score and rerank",
    "/score",
    ScoreRequest,
    {"model": EMBEDDER, "text_1": "a", "text_2": "b"},
    {
        "model": EMBEDDER,
        **dict.fromkeys(("text_1", "text_2", "data_1", "data_2", "queries", "items"), "a"),
        "documents": ["a"],
        **_CUTS,
    },
    "score",
    with_={
        "data_1": {"text_1": None, "text_2": None, "data_2": "b"},
        "data_2": {"text_1": None, "text_2": None, "data_1": "b"},
        "queries": {"text_1": None, "text_2": None, "items": "b"},
        "items": {"text_1": None, "text_2": None, "queries": "b"},
        "documents": {"text_1": None, "text_2": None, "queries": "b"},
    },
)
RERANK = Endpoint(
    "Score and rerank",
    "/rerank",
    RerankRequest,
    {"model": EMBEDDER, "query": "a", "documents": ["a", "b"]},
    {
        "model": EMBEDDER,
        "query": "b",
        "documents": [{"text": "a"}],
        "top_n": 1,
        "return_documents": True,
        "max_tokens_per_doc": 5,
        **_CUTS,
    },
    "rerank",
)
TOKENIZE = Endpoint(
    "Tokenize and detokenize",
    "/tokenize",
    TokenizeRequest,
    {"model": MODEL, "prompt": "hi"},
    {
        "model": MODEL,
        "prompt": "ho",
        "messages": HI,
        "add_special_tokens": False,
        "return_token_strs": True,
        "add_generation_prompt": False,
        "continue_final_message": False,
        "chat_template_kwargs": {"a": 1},
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "tokenize",
    with_={
        name: {"prompt": None, "messages": HI}
        for name in (
            "messages", "add_generation_prompt", "continue_final_message", "chat_template",
            "chat_template_kwargs", "tools",
        )
    },
)  # fmt: skip
DETOKENIZE = Endpoint(
    "Tokenize and detokenize",
    "/detokenize",
    DetokenizeRequest,
    {"model": MODEL, "tokens": [5]},
    {"model": MODEL, "tokens": [6]},
    "detokenize",
)
ENDPOINTS = (RESPONSES, MESSAGES, EMBEDDINGS, SCORE, RERANK, TOKENIZE, DETOKENIZE)
CASES = [
    pytest.param(endpoint, name, verdict, id=f"{endpoint.path}-{name}")
    for endpoint in ENDPOINTS
    for name, verdict in verdicts(endpoint.heading, endpoint.column).items()
]


Send = Callable[[str, dict[str, object]], httpx.Response]


@pytest.fixture(scope="module")
def send(session_redis: RedisServer) -> Iterator[Send]:
    """POSTs to a gateway that chats, or for the embedding model's routes to one that embeds."""
    with (
        responding(session_redis.url, template=TALKING_TEMPLATE) as api,
        starting() as start,
    ):
        house = start("--engine", "echo", "--embedding-model", EMBEDDER).wait_ready()
        headers = {"authorization": f"Bearer {house.key}"}
        with httpx.Client(
            base_url=house.url.removesuffix("/v1"), headers=headers, timeout=PATIENCE_S
        ) as embedding:

            def post(path: str, body: dict[str, object]) -> httpx.Response:
                embeds = body.get("model") == EMBEDDER
                return (embedding if embeds else api.http).post(path, json=body)

            yield post
    session_redis.client.flushall()


@pytest.mark.parametrize(("endpoint", "name", "verdict"), CASES)
def test_a_field_is_what_the_document_says(
    send: Send, endpoint: Endpoint, name: str, verdict: str
) -> None:
    body = endpoint.base | endpoint.with_.get(name, {})
    if verdict == "refused":
        answer = send(endpoint.path, body | {name: endpoint.wrong.get(name, ANY)})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert name in (error.get("param"), error["message"].split()[0]), error
        assert send(endpoint.path, body | {name: None}).status_code == 200
    else:
        answer = send(endpoint.path, body | {name: endpoint.right[name]})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_every_field_of_the_code_is_in_the_document(endpoint: Endpoint) -> None:
    said = verdicts(endpoint.heading, endpoint.column)
    fields = set(endpoint.struct.__struct_fields__)
    assert fields <= said.keys()
    beyond = {name for name, verdict in said.items() if verdict != "ignored"} - fields
    assert not beyond, f"in no struct, and yet not ignored: {beyond}"


@pytest.mark.parametrize(
    ("heading", "column", "sent"),
    [
        ("Chat and completions", "chat", chats.CompletionCreateParamsBase),
        ("Chat and completions", "text", completions.CompletionCreateParamsBase),
        ("Responses", "here", responses.ResponseCreateParamsBase),
        ("Embeddings", "here", embeddings.EmbeddingCreateParams),
        ("Messages (Anthropic)", "here", messages.MessageCreateParamsBase),
        ("Messages (Anthropic)", "here", beta_messages.MessageCreateParamsBase),
    ],
)
def test_every_field_of_the_sdks_is_in_the_document(heading: str, column: str, sent: type) -> None:
    """What nobody decided is ignored: so threads were, whose later turns hold half of what was
    said."""
    assert not sent.__annotations__.keys() - verdicts(heading, column).keys() - OF_HEADERS


@pytest.mark.parametrize(
    ("column", "where", "struct"),
    [("chat", "chat", ChatRequest), ("text", "text", CompletionRequest)],
)
def test_chat_and_completions_are_as_decided(
    column: str, where: str, struct: type[msgspec.Struct]
) -> None:
    said = verdicts("Chat and completions", column)
    decided = {
        name: decision.how
        for name, decision in DECISIONS.items()
        if decision.where in (where, "both")
    }
    if where == "text":
        decided |= {"logprobs": "honoured"} | dict.fromkeys(NOT_OF_TEXTS, "refused")
    else:
        decided["prompt"] = "refused"
    assert said == decided
    assert set(struct.__struct_fields__) <= said.keys()


def test_routes_are_there_or_not_as_the_document_says(send: Send) -> None:
    for row in table("Routes"):
        for path in re.findall(r"(/[a-z0-9_/]+)[`*{/]", row["route"]):
            path = path.rstrip("/")
            if "GET" in row["route"]:
                continue
            answer = send(path, {})
            there = answer.status_code != 404
            assert there == row["here"].startswith("yes"), (path, answer.text)


def test_metrics_are_there_as_the_document_says() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, model_name="m", engine="e", max_model_len=100)
    metrics.cache_config(block_size=16)
    exposition = generate_latest(registry).decode()
    for row in table("Metrics"):
        for name in names(row["name (`vllm:`)"]):
            there = f"# TYPE vllm:{name}" in exposition
            assert there == (row["here"] == "yes"), name
