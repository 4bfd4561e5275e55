"""Reads a request's body: JSON only, within a limit, declared or chunked. Knows no schema."""

import asyncio
from collections.abc import Mapping

from forebay_shared.errors import InvalidRequestError, MediaTypeError, PayloadTooLargeError
from litestar.types import Receive

from forebay_gateway.api.errors import ClientGoneError

BODY_TIMEOUT_S = 60.0

_CHARSETS = (b"utf-8", b"utf8", b"us-ascii")


async def read_json_body(
    headers: Mapping[bytes, bytes], receive: Receive, limit: int
) -> bytes | bytearray:
    """The raw body.

    Raises MediaTypeError, ClientGoneError and PayloadTooLargeError; a declared length is enough for
    the last.
    """
    content_type = headers.get(b"content-type", b"")
    if content_type != b"application/json":
        _check_type(content_type)
    if headers.get(b"content-encoding", b"").strip().lower() not in (b"", b"identity"):
        raise MediaTypeError("Content-Encoding is not supported; send the JSON as it is.")
    declared = headers.get(b"content-length")
    if declared is not None and (not declared.isdigit() or int(declared[:20]) > limit):
        raise too_large(limit)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(receive, limit)
    except TimeoutError:
        raise InvalidRequestError("The body did not arrive in time.") from None


def _check_type(content_type: bytes) -> None:
    media_type, *parameters = content_type.lower().split(b";")
    if media_type.strip() != b"application/json":
        raise MediaTypeError("Content-Type must be application/json.")
    for parameter in parameters:
        name, _, value = parameter.partition(b"=")
        if name.strip() == b"charset" and value.strip(b' "\t') not in _CHARSETS:
            raise MediaTypeError("The charset of Content-Type must be utf-8, as JSON is.")


async def _read(receive: Receive, limit: int) -> bytes | bytearray:
    whole = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGoneError
        body, more = message["body"], message["more_body"]
        if len(whole) + len(body) > limit:
            raise too_large(limit)
        if not more and not whole:
            break
        whole += body
        if not more:
            body = whole
            break
    if not body:
        raise InvalidRequestError("The body is empty; send a JSON object.")
    return body


def too_large(limit: int) -> PayloadTooLargeError:
    """What is said of a body above the limit, by whoever finds it."""
    return PayloadTooLargeError(f"The body may have at most {limit} bytes.")
