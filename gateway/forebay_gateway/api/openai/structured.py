"""Structured output: `response_format` and `structured_outputs` become the grammar for an engine.

A schema travels as the client's own text, so that its properties keep their order; what asks for
nothing is left out. Here is decided what is well-formed and of bearable size; what the schema means
is the engine's to say. It knows no model and no Litestar.
"""

import re
from typing import Annotated, ClassVar

import msgspec
from forebay_shared.errors import InvalidRequestError, UnsupportedError
from forebay_shared.sampling import MAX_GRAMMAR_BYTES, Grammar
from msgspec import Meta

from forebay_gateway.api.decoding import null
from forebay_gateway.schemas import plain_text

MAX_SCHEMA_DEPTH = 100

REMOVED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
}
"""The old names of vLLM, and what took their place."""

_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|([\[{])|([\]}])')


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: msgspec.Raw = msgspec.field(default_factory=null)
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """`schema` beside json_object is the older form of llama.cpp, Together and others.

    Other dialects have it under other names: `at` is what errors call it, `schema_at` its schema.
    """

    at: ClassVar[str] = "response_format"
    schema_at: ClassVar[str] = "response_format.json_schema.schema"

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=null)


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's extension: exactly one constraint."""

    json: msgspec.Raw = msgspec.field(default_factory=null)
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: object = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


def grammar_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> Grammar | None:
    """The constraint that a request asks for. Raises InvalidRequestError that names the field."""
    grammar = None if response_format is None else _of_format(response_format)
    if structured_outputs is None:
        return grammar
    if grammar is not None:
        at = response_format.at if response_format else ""
        raise InvalidRequestError(
            f"{at} and structured_outputs exclude each other.", param="structured_outputs"
        )
    return _of_outputs(structured_outputs)


def _of_format(format_: ResponseFormat) -> Grammar | None:
    match format_.type:
        case "text":
            return None
        case "json_object":
            if _is_given(format_.schema):
                source = _schema(format_.schema, f"{format_.at}.schema")
                return Grammar("json_schema", source, field=format_.at)
            return Grammar("json_object", field=format_.at)
        case "json_schema":
            if format_.json_schema is None:
                raise _required(f"{format_.at}.json_schema")
            source = _schema(format_.json_schema.schema, format_.schema_at)
            return Grammar("json_schema", source, field=format_.at)
        case _:
            raise InvalidRequestError(
                f"{format_.at}.type must be text, json_object or json_schema.",
                param=f"{format_.at}.type",
            )


def _of_outputs(outputs: StructuredOutputs) -> Grammar:
    for name in _REFUSED:
        if getattr(outputs, name):
            param = f"structured_outputs.{name}"
            raise UnsupportedError(f"{param} is not supported.", param=param)
    given = [name for name in _KINDS if _is_given(getattr(outputs, name))]
    if len(given) != 1:
        raise InvalidRequestError(
            f"structured_outputs must hold exactly one of {', '.join(_KINDS)}.",
            param="structured_outputs",
        )
    param = f"structured_outputs.{given[0]}"
    match given[0]:
        case "json":
            return Grammar("json_schema", _schema(outputs.json, param))
        case "json_object":
            return Grammar("json_object")
        case "choice":
            choices = msgspec.json.encode(outputs.choice).decode()
            return Grammar("choice", _text(choices if outputs.choice else "", param))
        case "regex":
            return Grammar("regex", _text(outputs.regex or "", param))
        case _:
            return Grammar("lark", _text(outputs.grammar or "", param))


_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_REFUSED = (
    "structural_tag",
    "whitespace_pattern",
    "disable_any_whitespace",
    "disable_additional_properties",
)


def _is_given(value: object) -> bool:
    if isinstance(value, msgspec.Raw):
        return bytes(value) != b"null"
    return value is not None and value is not False


def _schema(raw: msgspec.Raw, param: str) -> str:
    """The text of a schema, which may come as an object or as a string that holds one."""
    text = bytes(raw).strip()
    if text == b"null":
        raise _required(param)
    if text.startswith(b'"'):
        text = msgspec.json.decode(text, type=str).strip().encode()
        _check_json(text, param)
    if not text.startswith(b"{"):
        raise InvalidRequestError(f"{param} must be a JSON schema, an object.", param=param)
    source = _text(text.decode(), param)
    if _depth(text) > MAX_SCHEMA_DEPTH:
        raise InvalidRequestError(
            f"{param} must not be nested deeper than {MAX_SCHEMA_DEPTH}.", param=param
        )
    return _text(plain_text(source), param)


def _check_json(text: bytes, param: str) -> None:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequestError(f"{param} must hold valid JSON.", param=param) from None


def _text(text: str, param: str) -> str:
    if not text:
        raise InvalidRequestError(f"{param} must not be empty.", param=param)
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"{param} may have at most {MAX_GRAMMAR_BYTES} bytes.", param=param
        )
    return text


def _depth(text: bytes) -> int:
    """How deep objects and lists are nested in valid JSON."""
    depth = deepest = 0
    for bracket in _BRACKETS.finditer(text):
        if bracket.group(1):
            depth += 1
            deepest = max(deepest, depth)
        elif bracket.group(2):
            depth -= 1
    return deepest


def _required(param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} is required.", param=param)
