"""An upstream's refusal as one of our errors: what a client may learn of it, and what not.

A 400 is the client's, and its message goes on. A 401 or 403 is about our key: the client gets a 502
that says nothing of it. It knows no HTTP library.
"""

import logging
import math
from collections.abc import Mapping

import msgspec
from forebay_shared.errors import (
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


class _Body(msgspec.Struct):
    message: str | None = None
    param: str | None = None
    code: str | int | None = None


class _Envelope(msgspec.Struct):
    error: _Body | str | None = None
    message: str | None = None
    detail: str | None = None


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
    error = envelope.error
    if not isinstance(error, _Body):
        error = _Body(error or envelope.message or envelope.detail)
    message = (error.message or "The upstream refused the request.")[:MAX_MESSAGE]
    if secret:
        message = message.replace(secret, "***")
    ours = from_code(str(error.code), message, param=error.param)
    if isinstance(ours, InvalidRequestError):
        return ours
    return InvalidRequestError(message, param=error.param)


def _retry(headers: Mapping[str, str]) -> float | None:
    """The seconds of Retry-After; None for a date or nothing."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER_S) if math.isfinite(seconds) and seconds >= 0 else None
