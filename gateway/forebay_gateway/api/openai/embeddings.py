"""/v1/embeddings: its fields, and the vectors as floats or base64. It knows no Redis."""

import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from forebay_shared.errors import InvalidRequestError, UnsupportedError
from litestar.types import ASGIApp
from msgspec import Meta

from forebay_gateway.api import vectors
from forebay_gateway.api.decoding import decode
from forebay_gateway.api.openai.schema import Count, TokenId
from forebay_gateway.api.openai.turns import new_id
from forebay_gateway.api.ports import Services
from forebay_gateway.api.vectors import Ask, Made, VectorsAnswer
from forebay_gateway.inputs import Cut, Input, Inputs, Side
from forebay_gateway.renderers import Renderers
from forebay_gateway.teams.caller import Caller
from forebay_gateway.teams.catalog import Catalog

_MAX_INT32 = 2**31 - 1

Priority = Annotated[int, Meta(ge=-_MAX_INT32, le=_MAX_INT32)]
Truncation = Annotated[int, Meta(ge=-1, le=_MAX_INT32)]

_encode = msgspec.json.Encoder().encode


class Unsupported(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that would change the vectors and that nothing here honours: null or refused."""

    chat_template: object = None
    embed_overrides: object = None
    late_chunking_params: object = None
    lora_path: object = None
    messages: object = None
    normalize: object = None


class EmbeddingRequest(Unsupported, frozen=True, kw_only=True):
    model: str
    input: str | list[str | int | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    use_activation: bool | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Side | None = None
    priority: Priority | None = None


_decoder = msgspec.json.Decoder(EmbeddingRequest)


class EmbeddingService:
    """Makes a body an answer that is ready to run."""

    def __init__(self, backend: Services, renderers: Renderers, catalog: Catalog) -> None:
        self._backend = backend
        self._catalog = catalog
        self._renderers = renderers

    async def embed(self, body: bytes | bytearray, caller: Caller) -> ASGIApp:
        """Raises ForebayError for everything that is wrong with the request."""
        request = await self._renderers.run(lambda: _request(body), len(body))
        card = self._catalog.find(request.model, caller)
        vectors.embedding_of(card, request.model)
        if request.dimensions is not None:
            vectors.check_dimensions(request.dimensions, card, request.model)
        encoder = await vectors.input_encoder(self._renderers, card)
        inputs = await self._renderers.run(lambda: _inputs(request, encoder), len(body))
        ask = Ask(
            new_id("embd-"),
            card,
            inputs,
            dimensions=request.dimensions or 0,
            normalize=request.use_activation,
            team=caller.team,
            weight=caller.weight,
            priority=caller.priority(request.priority or 0),
            toll=caller.toll(request.model, card.name),
        )
        base64 = request.encoding_format == "base64"

        def write(made: Made) -> bytes:
            return _answer(made, request.model, base64=base64)

        return VectorsAnswer(self._backend, self._renderers, [ask], write)


def _request(body: bytes | bytearray) -> EmbeddingRequest:
    request = decode(_decoder, body)
    for name in Unsupported.__struct_fields__:
        if getattr(request, name) is not None:
            instead = "; use use_activation" if name == "normalize" else ""
            instead = "; use input" if name == "messages" else instead
            raise UnsupportedError(f"{name} is not supported{instead}.", param=name)
    return request


def cut_of(limit: int | None, side: Side | None, encoder: Inputs) -> Cut:
    """What truncate_prompt_tokens asks for; -1: all that the model takes."""
    if limit is None:
        return Cut()
    if limit == -1:
        return Cut(encoder.max_model_len, side or "right")
    encoder.check(limit, "truncate_prompt_tokens")
    return Cut(limit, side or "right")


def _inputs(request: EmbeddingRequest, encoder: Inputs) -> list[Input]:
    """Every input in ids. Not on the event loop: a body can hold millions of them."""
    given = request.input
    cut = cut_of(request.truncate_prompt_tokens, request.truncation_side, encoder)
    special = request.add_special_tokens is not False
    if isinstance(given, str):
        return [encoder.text(given, cut, "input", special=special)]
    if not given:
        raise InvalidRequestError("input must not be empty.", param="input")
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given):
        return [encoder.ids(ids, cut, "input")]
    vectors.check_number(len(given), "input")
    if len({type(item) for item in given}) > 1:
        raise InvalidRequestError(
            "input must be a string, strings, token ids or lists of token ids, not a mixture.",
            param="input",
        )
    inputs = [
        encoder.text(item, cut, f"input[{at}]", special=special)
        if isinstance(item, str)
        else encoder.ids(_list(item), cut, f"input[{at}]")
        for at, item in enumerate(given)
    ]
    vectors.check_tokens(inputs, "input")
    return inputs


def _list(item: int | list[int]) -> Sequence[int]:
    return item if isinstance(item, list) else [item]


def _answer(made: Made, model: str, *, base64: bool) -> bytes:
    # Vector by vector: a thread that encoded all at once would hold the interpreter for 100 ms.
    data = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%b}' % (at, _vector(packed, base64=base64))
        for at, packed in enumerate(made.vectors)
    )
    return b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (
        data,
        _encode(model),
        usage(made.tokens),
    )


def usage(tokens: int) -> bytes:
    return b'{"prompt_tokens":%d,"total_tokens":%d}' % (tokens, tokens)


def _vector(packed: bytes, *, base64: bool) -> bytes:
    return b'"%b"' % b64encode(packed) if base64 else _encode(floats(packed).tolist())


def floats(packed: bytes) -> "array[float]":
    """The values of a vector as it comes from a worker."""
    values = array("f")
    values.frombytes(packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values
