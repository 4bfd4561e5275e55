"""The vectors of an upstream's answer, packed as they cross the bus. It knows no HTTP."""

import math
import struct
from collections.abc import Sequence

import msgspec
from forebay_shared.errors import UpstreamError


class _Item(msgspec.Struct):
    """Without an index vectors stand in the order of their inputs."""

    embedding: list[float]
    index: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Answer(msgspec.Struct):
    data: list[_Item]
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Answer).decode


def vectors_of(body: bytes, number: int) -> tuple[list[bytes], int | None]:
    """The vectors in the inputs' order, and the tokens of all; None where nothing tells.

    Raises UpstreamError for what is not `number` vectors of one size.
    """
    try:
        answer = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise UpstreamError("The upstream sent what cannot be read.") from None
    numbered = [
        (at if item.index is None else item.index, item.embedding)
        for at, item in enumerate(answer.data)
    ]
    vectors = dict(numbered)
    sizes = {len(vector) for vector in vectors.values()}
    places = [place for place, _ in numbered]
    if sorted(places) != list(range(number)) or len(sizes) != 1 or 0 in sizes:
        raise UpstreamError("The upstream sent other vectors than it was asked for.")
    tokens = None if answer.usage is None else answer.usage.prompt_tokens
    return [packed(vectors[place]) for place in range(number)], tokens


def packed(values: Sequence[float]) -> bytes:
    """Little-endian float32."""
    return struct.pack(f"<{len(values)}f", *values)


def normalised(vector: bytes) -> bytes:
    """The vector scaled to length 1; one of zeros as it is."""
    values = struct.unpack(f"<{len(vector) // 4}f", vector)
    length = math.hypot(*values)
    return packed([value / length for value in values]) if length else vector
