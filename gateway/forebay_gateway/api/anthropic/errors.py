"""Errors as Anthropic's clients read them: `{"type":"error","error":{"type","message"},…}`.

A message speaks of the fields of this dialect, although what it complains of may have been found in
the chat request that a call was translated into. It knows no route.
"""

import re

import msgspec
from forebay_shared.errors import (
    ContextLengthError,
    ForebayError,
    OverloadedError,
    UnsupportedError,
)

from forebay_gateway.api.errors import MAX_MESSAGE

OVERLOADED = 529

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
# What the fields of a chat request are called here; the first, where an upstream says it.
_NAMES = [
    (re.compile(r"^response_format(\.json_schema)?"), "output_config.format"),
    (re.compile(r"^stop$"), "stop_sequences"),
    (re.compile(r"^(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\]|tool_choice)\.function"), r"\1"),
    (re.compile(r"^parallel_tool_calls"), "tool_choice.disable_parallel_tool_use"),
]


class UnavailableError(UnsupportedError):
    """A service of Anthropic's that is not here. By the code the SDKs know it, and what to do
    instead: without threads their tool runners send the whole conversation."""

    def __init__(self, message: str, error_code: str) -> None:
        super().__init__(message)
        self.error_code = error_code


class Details(msgspec.Struct, frozen=True):
    error_code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """`details` are there where a client is to go by them."""

    type: str
    message: str
    details: Details | msgspec.UnsetType = msgspec.UNSET


class Envelope(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: ErrorBody
    request_id: str | None = None


def status(error: ForebayError) -> int:
    """The HTTP status: whatever comes of too much load is a 529 here."""
    return OVERLOADED if isinstance(error, OverloadedError) else error.status


def envelope(error: ForebayError, request_id: str | None) -> bytes:
    """The JSON of an error."""
    message = _renamed(error)[:MAX_MESSAGE]
    told = isinstance(error, UnavailableError)
    details = Details(error.error_code) if told else msgspec.UNSET
    return msgspec.json.encode(Envelope(ErrorBody(_type(error), message, details), request_id))


def _type(error: ForebayError) -> str:
    if isinstance(error, OverloadedError):
        return "overloaded_error"
    otherwise = "invalid_request_error" if error.status < 500 else "api_error"
    return _TYPES.get(error.status, otherwise)


def _renamed(error: ForebayError) -> str:
    """The message, with the field under the name that the client knows."""
    if isinstance(error, ContextLengthError):
        return _too_long(error)
    param = error.param
    if param is None:
        return error.message
    renamed = param
    for pattern, name in _NAMES:
        renamed = pattern.sub(name, renamed)
    return error.message if renamed == param else error.message.replace(param, renamed)


def _too_long(error: ContextLengthError) -> str:
    """In Anthropic's own words: agents look for them, to make their conversation shorter."""
    if not error.limit:
        return f"prompt is too long: {error.message}"
    return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
