"""Every error in the one envelope: `{"error":{"message","type","param","code"}}`, 4 KB at most.

It turns our own tree, Litestar's routing errors and the unforeseen into bytes and headers. It knows
no route. What was unforeseen is logged here and told to nobody.
"""

import logging
import math
import random

import msgspec
from forebay_shared.errors import (
    ForebayError,
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
)
from litestar.exceptions import (
    ClientException,
    MethodNotAllowedException,
    NotFoundException,
)

Headers = list[tuple[bytes, bytes]]

MAX_MESSAGE = 1024
MAX_PARAM = 256

_log = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """The client closed the connection: nobody is there to be answered."""


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


_LONGEST_WAIT_S = 60.0
"""What the SDKs wait at most. When they are to wait longer they come back within seconds, twice, in
vain: a budget of a day is none of their business."""


class Envelope(msgspec.Struct, frozen=True):
    error: ErrorBody


def envelope(error: ForebayError) -> bytes:
    """The JSON of an error."""
    param = None if error.param is None else error.param[:MAX_PARAM]
    return msgspec.json.encode(
        Envelope(ErrorBody(error.message[:MAX_MESSAGE], error.type, param, error.code))
    )


def error_headers(error: ForebayError) -> Headers:
    """The headers that go with an error, content type included."""
    headers: Headers = [(b"content-type", b"application/json")]
    if error.retryable:
        seconds = error.retry_after_s or 1.0
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(seconds))))
        # The SDKs of OpenAI and Anthropic take this one first, and to the letter up to a minute:
        # who was refused together is not to come back together.
        spread_ms = seconds * random.uniform(1000, 1500)
        headers.append((b"retry-after-ms", b"%d" % max(seconds * 1000, min(spread_ms, 60_000))))
    if not error.retryable or (error.retry_after_s or 0) > _LONGEST_WAIT_S:
        headers.append((b"x-should-retry", b"false"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == 413:
        headers.append((b"connection", b"close"))
    return headers


def foreseen(error: Exception) -> tuple[ForebayError, Headers]:
    """Any exception as one of our errors, and the headers of its answer."""
    if isinstance(error, ForebayError):
        return error, error_headers(error)
    if isinstance(error, MethodNotAllowedException):
        ours = MethodNotAllowedError("This path does not take this method.")
    elif isinstance(error, NotFoundException):
        ours = NotFoundError("There is nothing at this path. Routes of the API begin with /v1.")
    elif isinstance(error, ClientException):
        ours = InvalidRequestError("The request is malformed.")
    else:
        _log.error("a request failed unexpectedly", exc_info=_without_text(error))
        ours = InternalError("The gateway failed to answer this request.")
    return ours, error_headers(ours)


def _without_text(error: Exception) -> Exception:
    """The error with its place but without its message, which may quote what a client wrote."""
    return RuntimeError(type(error).__name__).with_traceback(error.__traceback__)
