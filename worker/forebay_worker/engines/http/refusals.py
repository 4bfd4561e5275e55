"""An upstream's refusal as one of our errors: what a client may learn of it, and what not.

A 400 is the client's, and its message goes on. A 401 or 403 is about our key: the client gets a 502
that says nothing of it. It knows no HTTP library.
"""

import logging
import math
import re
from collections.abc import Mapping

import msgspec
from forebay_shared.errors import (
    ContextLengthError,
    ForebayError,
    InvalidRequestError,
    OverloadedError,
    PayloadTooLargeError,
    RateLimitError,
    UpstreamError,
    from_code,
)

log = logging.getLogger(__name__)

MAX_MESSAGE = 500
MAX_RETRY_AFTER_S = 3600.0

_TOO_LONG = re.compile(
    r"context (?:length|window|size)|(?:prompt|input) is too long|too many tokens", re.IGNORECASE
)
"""Few servers have a code for it; clients and aliases go by one, to ask for less or elsewhere."""


class _Body(msgspec.Struct):
    message: object = None
    param: object = None
    code: object = None


class _Envelope(msgspec.Struct):
    error: object = None
    message: object = None
    detail: object = None


_decode = msgspec.json.Decoder(_Envelope).decode


def refusal(status: int, headers: Mapping[str, str], body: bytes, secret: str) -> ForebayError:
    """The error for an answer that is no 200; `secret` is taken out of whatever is quoted."""
    if status in (400, 422):
        return _invalid(body, secret)
    if status == 413:
        return PayloadTooLargeError("The upstream takes no request of this size.")
    if status == 429:
        return RateLimitError(
            "The upstream's rate limit is reached. Please retry.", retry_after_s=_retry(headers)
        )
    if status == 503:
        return OverloadedError(
            "The upstream is overloaded. Please retry.", retry_after_s=_retry(headers)
        )
    if status >= 500 or status == 408:
        return UpstreamError(f"The upstream failed with status {status}.")
    log.error("the upstream refuses this worker with status %d", status)
    if status in (401, 403):
        return UpstreamError("The upstream does not let this server in.")
    if status == 404:
        return UpstreamError("The upstream does not know the model or the route.")
    return UpstreamError(f"The upstream answered with status {status}.")


def counts(error: ForebayError) -> bool:
    """Whether an upstream that answers so is to be avoided: it failed by itself."""
    return isinstance(error, UpstreamError | OverloadedError)


def _invalid(body: bytes, secret: str) -> InvalidRequestError:
    try:
        envelope = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return InvalidRequestError("The upstream refused the request.")
    error = _body(envelope)
    message = error.message if isinstance(error.message, str) else ""
    message = (message or "The upstream refused the request.")[:MAX_MESSAGE]
    if secret:
        message = message.replace(secret, "***")
    param = error.param if isinstance(error.param, str) else None
    ours = from_code(str(error.code), message, param=param)
    if isinstance(ours, InvalidRequestError):
        return ours
    kind = ContextLengthError if _TOO_LONG.search(message) else InvalidRequestError
    return kind(message, param=param)


def _body(envelope: _Envelope) -> _Body:
    """What an envelope says, whichever of the usual ones it is."""
    if isinstance(envelope.error, dict):
        return msgspec.convert(envelope.error, _Body)
    return _Body(envelope.error or envelope.message or envelope.detail)


def _retry(headers: Mapping[str, str]) -> float | None:
    """The seconds of Retry-After; None for a date or nothing."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER_S) if math.isfinite(seconds) and seconds >= 0 else None
