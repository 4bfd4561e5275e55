"""The admin API's OpenAPI description, made of its table of routes and the records' types."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Protocol

import msgspec

from forebay_gateway.teams.records import TYPES


class Described(Protocol):
    """A row of the table of routes."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def summary(self) -> str: ...


def describe(table: Sequence[Described]) -> dict[str, Any]:
    """OpenAPI 3.1. Raises nothing: the records' schemas are msgspec's own."""
    _, schemas = msgspec.json.schema_components(
        TYPES.values(), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for row in table:
        operation: dict[str, Any] = {
            "summary": row.summary,
            "responses": {"200": {"description": "done"}, "default": {"description": "an error"}},
        }
        if "{id}" in row.path:
            operation["parameters"] = [
                {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        paths.setdefault(row.path, {})[row.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "forebay admin", "version": version("forebay-gateway")},
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
