"""Reads a request's body: JSON only, within a limit, declared or chunked. Knows no schema."""

import asyncio
from collections.abc import Mapping

from forebay_shared.errors import InvalidRequestError, MediaTypeError, PayloadTooLargeError
from litestar.types import Receive

from forebay_gateway.api.errors import ClientGoneError

BODY_TIMEOUT_S = 60.0


async def read_json_body(
    headers: Mapping[bytes, bytes], receive: Receive, limit: int
) -> bytes | bytearray:
    """The raw body.

    Raises MediaTypeError, ClientGoneError and PayloadTooLargeError; a declared length is enough for
    the last.
    """
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        raise MediaTypeError("Content-Type must be application/json.")
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise MediaTypeError("Content-Encoding is not supported; send the JSON as it is.")
    declared = headers.get(b"content-length")
    if declared is not None and (not declared.isdigit() or int(declared[:20]) > limit):
        raise _too_large(limit)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(receive, limit)
    except TimeoutError:
        raise InvalidRequestError("The body did not arrive in time.") from None


async def _read(receive: Receive, limit: int) -> bytes | bytearray:
    whole = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGoneError
        body, more = message["body"], message["more_body"]
        if len(whole) + len(body) > limit:
            raise _too_large(limit)
        if not more and not whole:
            break
        whole += body
        if not more:
            body = whole
            break
    if not body:
        raise InvalidRequestError("The body is empty; send a JSON object.")
    return body


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The body may have at most {limit} bytes.")
