"""JSON schemas as libraries write them, without the keywords that ask for nothing.

An engine refuses a keyword that it cannot enforce. Zod says of every record that its keys are
strings, and libraries of all sorts have formats of their own: to leave these out allows no value
that the schema does not. It knows no engine.
"""

import json
import re
from typing import cast

from forebay_shared.template import Json

_FORMATS = frozenset(
    {
        "date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4",
        "ipv6", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer", "time",
        "uri", "uri-reference", "uri-template", "uuid",
    }
)  # fmt: skip
"""Those of JSON Schema 2020-12, section 7.3; any other is a remark, which holds nobody."""
_OF_SCHEMAS = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
"""Keywords that hold schemas by name."""
_SCHEMAS = frozenset(
    {
        "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if",
        "items", "not", "oneOf", "prefixItems", "propertyNames", "then", "unevaluatedItems",
        "unevaluatedProperties",
    }
)  # fmt: skip
"""Keywords that hold a schema or a list of them."""
_COUNTS = frozenset(
    f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties")
)
_REMARKS = frozenset({"$comment", "description", "title"})
_SUSPECT = re.compile(r'"(?:format|propertyNames|uniqueItems|unevaluated\w+|dependent\w+)"|\.0')


def plain_text(schema: str) -> str:
    """The text of a schema without what asks for nothing: as it came, where there is no such thing.

    It is an object in valid JSON, nested no deeper than the stack bears.
    """
    if not _SUSPECT.search(schema):
        return schema
    given = cast("dict[str, Json]", json.loads(schema))
    plainer = json.dumps(plain(given))
    return schema if plainer == json.dumps(given) else plainer


def plain(schema: dict[str, Json]) -> dict[str, Json]:
    """The same of a schema that was read."""
    return {
        name: _value(name, value) for name, value in schema.items() if not _is_idle(name, value)
    }


def _inner(schema: Json) -> Json:
    return plain(schema) if isinstance(schema, dict) else schema


def _value(name: str, value: Json) -> Json:
    if name in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    if name in _OF_SCHEMAS and isinstance(value, dict):
        return {key: _inner(each) for key, each in value.items()}
    if name in _SCHEMAS:
        return [_inner(each) for each in value] if isinstance(value, list) else _inner(value)
    return value


def _is_idle(name: str, value: Json) -> bool:
    match name:
        case "format":
            return isinstance(value, str) and value not in _FORMATS
        case "propertyNames":
            return _is_any_name(value)
        case "uniqueItems":
            return value is False
        case "unevaluatedItems" | "unevaluatedProperties":
            return value is True or value == {}
        case "dependentRequired" | "dependentSchemas":
            return value == {}
        case _:
            return False


def _is_any_name(schema: Json) -> bool:
    """Whether every key is right, as each is a string."""
    if not isinstance(schema, dict):
        return schema is True
    said = {name: value for name, value in schema.items() if name not in _REMARKS}
    return said in ({}, {"type": "string"})
