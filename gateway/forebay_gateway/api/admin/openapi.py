"""The admin API's OpenAPI description, made of its table of routes and the records' types."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import msgspec

from forebay_gateway.teams.books import BY, DIMENSIONS
from forebay_gateway.teams.records import PLURALS, SINGULARS, TYPES

_OF_LISTS = {"after": "the `next` of the page before", "limit": "entries of a page, 1000 at most"}
_OF_USAGE = {
    "by": f"of {', '.join(BY)}; with commas between",
    "from": "the first day, 2026-12-01",
    "to": "the last day, included",
    **{name: f"of this {name} alone" for name in DIMENSIONS},
}
_QUERIES: Mapping[str, Mapping[str, str]] = {
    "/admin/v1/usage": _OF_USAGE,
    "/v1/usage": _OF_USAGE,
    "/admin/v1/records": _OF_LISTS,
    "/admin/v1/audit": _OF_LISTS,
    "/admin/v1/apply": {"dry_run": "1: change nothing", "prune": "1: delete what is not named"},
    **{f"/admin/v1/{name}": {**_OF_LISTS, "team": "of it alone"} for name in PLURALS.values()},
}
_NOT_GIVEN = frozenset({"id", "secrets", "created"})
"""The path says the first, the gateway makes the others."""
_CONDITIONS = {
    "If-Match": "tags, or `*`: the record must be one of them, or be there; else it is a 412",
    "If-None-Match": "`*`: it must not be there; else it is a 412, and for a GET a 304",
}


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
        if parameters := _parameters(row):
            operation["parameters"] = parameters
        if (body := _body(row, schemas)) is not None:
            content = {"application/json": {"schema": body}}
            operation["requestBody"] = {"required": True, "content": content}
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


def _parameters(row: Described) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if "{id}" in row.path:
        found.append(_parameter("id", "path", "") | {"required": True})
        found += [_parameter(name, "header", said) for name, said in _CONDITIONS.items()]
    if (row.method, row.path) != ("POST", "/admin/v1/keys"):
        queries = _QUERIES.get(row.path, {})
        found += [_parameter(name, "query", said) for name, said in queries.items()]
    return found


def _parameter(name: str, place: str, said: str) -> dict[str, Any]:
    about = {"description": said} if said else {}
    return {"name": name, "in": place, **about, "schema": {"type": "string"}}


def _body(row: Described, schemas: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema of what is sent; None where nothing is."""
    if row.path == "/admin/v1/rotate/{id}":
        return {"type": "object", "properties": {"grace_s": {"type": "number", "default": 86_400}}}
    if row.path == "/admin/v1/apply":
        return {"type": "object", "description": "teams.yaml as JSON"}
    if row.method not in ("PUT", "POST"):
        return None
    whole: dict[str, Any] = schemas[TYPES[SINGULARS[row.path.split("/")[3]]].__name__]
    given = {name: each for name, each in whole["properties"].items() if name not in _NOT_GIVEN}
    needed = [name for name in whole["required"] if name not in _NOT_GIVEN]
    return {**whole, "properties": given, "required": needed}
