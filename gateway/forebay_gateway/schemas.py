"""JSON schemas as libraries write them, without the keywords that ask for nothing, and as hosts of
tools write them, without the mistakes; and whether there is a schema at all.

An engine refuses a keyword that it cannot enforce. Zod says of every record that its keys are
strings, and libraries of all sorts have formats of their own: to leave these out allows no value
that the schema does not. It knows no engine and no tool.
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
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
"""Those of them that hold a list."""
_NUMBERS = _COUNTS | {
    "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf",
}  # fmt: skip
_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_CLASS = re.compile(r"\\[pP]\{(?:[CLMNPSZ]|Lu|Ll|Nd)\}")
"""A class of Unicode, which Python's patterns have not."""
_PLAIN = re.compile(
    r"""\^? (?: [^\\{}\[\]()^$] | \\[dDwWsSnrt.\-/\\+*?()\[\]{}|^$] | \{\d{1,3}(?:,\d{0,3})?\}
    | \((?:\?:)?(?!\?) | \) | \[\^?(?:[^\\\[\]&~-] | \\[dDwWsSnrt.\-/\\+*?()\[\]{}|^$] | -(?!-))+\]
    )* \$?""",
    re.VERBOSE,
)
"""What means the same in every dialect of patterns."""
_LONG = 1_000
"""Characters of a pattern: 1 ms to look at."""
_REMARKS = frozenset({"$comment", "description", "title"})
_VALUES = ("const", "default", "enum", "examples")
"""Keywords that hold values and no schemas."""
_LOOKAROUND = re.compile(r"\(\?<?[=!]|\\[bB]")
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


def bearable(schema: dict[str, Json]) -> dict[str, Json]:
    """Without what is written by mistake and means nothing: null for what is absent, an empty list
    of properties, as PHP writes an empty object, and `required` that says yes or no. Nor with
    patterns that look around, which no grammar can hold a model to."""
    return {
        name: value if name in _VALUES else _within(value)
        for name, value in schema.items()
        if not _is_void(name, value)
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


def _is_void(name: str, value: Json) -> bool:
    match name:
        case "pattern" if isinstance(value, str):
            return _LOOKAROUND.search(value) is not None
        case "properties" | "$defs" | "definitions":
            return value is None or value == []
        case "const":
            return False
        case "required":
            return value is None or isinstance(value, bool)
        case _:
            return value is None


def _within(value: Json) -> Json:
    if isinstance(value, dict):
        return bearable(value)
    return [_within(each) for each in value] if isinstance(value, list) else value


def is_sound(schema: Json) -> bool:
    """Whether this is a schema: each keyword holds what it may, as far as an engine would look.
    Where references lead is not looked at."""
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    return all(_is_right(name, value) for name, value in schema.items())


def _is_right(name: str, value: Json) -> bool:
    if name in _OF_SCHEMAS:
        if not isinstance(value, dict) or not all(map(is_sound, value.values())):
            return False
        return name != "patternProperties" or all(map(_is_pattern, value))
    if name in _SCHEMAS:
        schemas = value if isinstance(value, list) else [value]
        return isinstance(value, list) == (name in _LISTS) and all(map(is_sound, schemas))
    if name in _NUMBERS:
        return _is_number(name, value)
    match name:
        case "type":
            kinds = value if isinstance(value, list) else [value]
            return all(isinstance(each, str) and each in _TYPES for each in kinds)
        case "enum":
            return isinstance(value, list)
        case "required":
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
        case "pattern":
            return isinstance(value, str) and _is_pattern(value)
        case "$ref":
            return isinstance(value, str)
        case _:
            return True


def _is_number(name: str, value: Json) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name in _COUNTS:
        return value >= 0 and value % 1 == 0
    return name != "multipleOf" or value > 0


def _is_pattern(pattern: str) -> bool:
    """Whether this is a pattern for certain, whichever dialect an engine reads."""
    plainer = _CLASS.sub(r"\\w", pattern)
    if len(pattern) > _LONG or _PLAIN.fullmatch(plainer) is None:
        return False
    try:
        re.compile(plainer)
    except (re.error, OverflowError, RecursionError):
        return False
    return True
