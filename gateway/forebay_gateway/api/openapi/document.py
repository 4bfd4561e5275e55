"""The OpenAPI document: made of the structs that requests are decoded into, and of `operations`.

Fields that a struct declares only to refuse them are left out of its schema. It knows no app.
"""

from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from forebay_gateway.api.anthropic.errors import Envelope as AnthropicEnvelope
from forebay_gateway.api.anthropic.schema import Unsupported as RefusedInMessages
from forebay_gateway.api.dialects import speaks_anthropic
from forebay_gateway.api.errors import Envelope
from forebay_gateway.api.openai.embeddings import Unsupported as RefusedInEmbeddings
from forebay_gateway.api.openai.refused import Refused as RefusedInChats
from forebay_gateway.api.openai.schema import (
    NOT_OF_CHATS,
    NOT_OF_TEXTS,
    ChatRequest,
    CompletionRequest,
)
from forebay_gateway.api.openai.scoring import Unsupported as RefusedInScores
from forebay_gateway.api.openapi.operations import OPERATIONS, Operation
from forebay_gateway.api.respond import Answer
from forebay_gateway.api.responses.schema import Elsewhere as RefusedInResponses

Schema = dict[str, Any]

_REFUSED = (
    RefusedInChats,
    RefusedInResponses,
    RefusedInMessages,
    RefusedInEmbeddings,
    RefusedInScores,
)
_REFUSED_BESIDE: dict[type, tuple[str, ...]] = {
    ChatRequest: NOT_OF_CHATS,
    CompletionRequest: NOT_OF_TEXTS,
}
_PACKAGE = b"forebay_gateway.api."
"""Structs of one name are told apart by their modules, which need not say where they all are."""
_ERRORS = {"openai": Envelope, "anthropic": AnthropicEnvelope}


def document_routes() -> list[HTTPRouteHandler]:
    @get(["/schema", "/openapi.json"])
    async def schema() -> ASGIApp:
        return Answer(document())

    return [schema]


@cache
def document() -> bytes:
    """The document in JSON, made once when somebody asks for it."""
    structs = {part for op in OPERATIONS for part in (op.body, op.answer, op.event)}
    types = [*(each for each in structs if each not in (None, dict)), *_ERRORS.values()]
    types.sort(key=lambda each: (each.__module__, each.__qualname__))
    schemas, components = msgspec.json.schema_components(
        types, schema_hook=_anything, ref_template="#/components/schemas/{name}"
    )
    references = dict(zip(types, schemas, strict=True))
    for type_ in types:
        _leave_out_refused(type_, references[type_], components)
    whole = msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "forebay",
                "version": version("forebay-gateway"),
                "description": "The admin API describes itself at /admin/v1/openapi.json.",
            },
            "paths": _paths(references),
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
                },
            },
            "security": [{"bearer": []}, {"x-api-key": []}, {"api-key": []}],
        }
    )
    return whole.replace(_PACKAGE, b"")


def _anything(type_: type) -> Schema:
    """The schema of a field that may hold any JSON; msgspec takes an empty one for none."""
    return {"description": "Any JSON."}


def _leave_out_refused(type_: type, reference: Schema, components: Schema) -> None:
    schema = components[reference["$ref"].rpartition("/")[2]]
    refused = set(_REFUSED_BESIDE.get(type_, ()))
    refused.update(*(each.__struct_fields__ for each in _REFUSED if issubclass(type_, each)))
    names = refused & schema["properties"].keys()
    for name in names:
        del schema["properties"][name]
    if names:
        schema["description"] = f"Refused by name: {', '.join(sorted(names))}."


def _paths(references: dict[type, Schema]) -> Schema:
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, references)
    return paths


def _operation(operation: Operation, references: dict[type, Schema]) -> Schema:
    dialect = "anthropic" if speaks_anthropic(operation.path) else "openai"
    answered: Schema = {}
    if operation.answer is None:
        answered["text/plain"] = {"schema": {"type": "string"}}
    else:
        schema = references.get(operation.answer, {"type": "object"})
        answered["application/json"] = {"schema": schema}
    if operation.event is not None:
        answered["text/event-stream"] = {"schema": references[operation.event]}
    error = {"application/json": {"schema": references[_ERRORS[dialect]]}}
    described: Schema = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": operation.summary, "content": answered},
            "default": {"description": "An error", "content": error},
        },
    }
    if operation.body is not None:
        content = {"application/json": {"schema": references[operation.body]}}
        described["requestBody"] = {"required": True, "content": content}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if operation.open:
        described["security"] = []
    return described
