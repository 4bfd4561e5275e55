"""/score and /rerank: how near texts are to each other, as the cosine of their vectors.

The fields are those of vLLM, Jina and Cohere, which agree where it matters. It knows no Redis.
"""

from collections.abc import Sequence
from operator import mul
from typing import Annotated

import msgspec
from forebay_shared.errors import InvalidRequestError, UnsupportedError
from forebay_shared.models import ModelCard
from litestar.types import ASGIApp
from msgspec import Meta

from forebay_gateway.api import vectors
from forebay_gateway.api.decoding import decode
from forebay_gateway.api.openai.embeddings import Priority, Truncation, cut_of, floats, usage
from forebay_gateway.api.openai.turns import new_id
from forebay_gateway.api.ports import Services
from forebay_gateway.api.vectors import Ask, Made, VectorsAnswer, Write
from forebay_gateway.inputs import Cut, Input, Inputs, Side
from forebay_gateway.renderers import Renderers
from forebay_gateway.teams.caller import Caller
from forebay_gateway.teams.catalog import Catalog

_encode = msgspec.json.Encoder().encode

Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Document(msgspec.Struct, frozen=True):
    text: str


class Unsupported(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that would change the scores and that nothing here honours: null or refused."""

    chat_template: object = None
    instruction: object = None
    max_tokens_per_query: object = None
    rank_fields: object = None
    use_activation: object = None


class ScoringRequest(Unsupported, frozen=True, kw_only=True):
    model: str
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Side | None = None
    priority: Priority | None = None


class ScoreRequest(ScoringRequest, frozen=True, kw_only=True):
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None


class RerankRequest(ScoringRequest, frozen=True, kw_only=True):
    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Number | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Number | None = None


_score_decoder = msgspec.json.Decoder(ScoreRequest)
_rerank_decoder = msgspec.json.Decoder(RerankRequest)

_PAIRS = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)


class ScoringService:
    """Makes a body an answer that is ready to run."""

    def __init__(self, backend: Services, renderers: Renderers, catalog: Catalog) -> None:
        self._backend = backend
        self._catalog = catalog
        self._renderers = renderers

    async def score(self, body: bytes | bytearray, caller: Caller) -> ASGIApp:
        """Raises ForebayError for everything that is wrong with the request."""
        request = await self._renderers.run(lambda: decode(_score_decoder, body), len(body))
        (left_name, left), (right_name, right) = _sides(request)
        vectors.check_number(len(left) + len(right), right_name)
        number = len(right)
        answer_id = new_id("score-")

        def write(made: Made) -> bytes:
            return _scores(made, answer_id, request.model, number)

        texts = [(left_name, left, None), (right_name, right, None)]
        return await self._answer(request, caller, answer_id, texts, len(body), write)

    async def rerank(self, body: bytes | bytearray, caller: Caller) -> ASGIApp:
        """Raises ForebayError for everything that is wrong with the request."""
        return await self._rerank(body, caller, returns=True)

    async def rerank_2(self, body: bytes | bytearray, caller: Caller) -> ASGIApp:
        """As Cohere's second version has it: documents come back only when they are asked for."""
        return await self._rerank(body, caller, returns=False)

    async def _rerank(self, body: bytes | bytearray, caller: Caller, *, returns: bool) -> ASGIApp:
        request = await self._renderers.run(lambda: decode(_rerank_decoder, body), len(body))
        documents = [
            item.text if isinstance(item, Document) else item for item in request.documents
        ]
        vectors.check_number(len(documents) + 1, "documents")
        answer_id = new_id("rerank-")
        if request.return_documents is not None:
            returns = request.return_documents
        shown = documents if returns else None

        def write(made: Made) -> bytes:
            return _ranking(made, answer_id, request.model, request.top_n or 0, shown)

        texts = [
            ("query", [request.query], None),
            ("documents", documents, request.max_tokens_per_doc),
        ]
        return await self._answer(request, caller, answer_id, texts, len(body), write)

    async def _answer(
        self,
        request: ScoringRequest,
        caller: Caller,
        answer_id: str,
        texts: Sequence[tuple[str, list[str], int | None]],
        size: int,
        write: Write,
    ) -> ASGIApp:
        """`texts` by the name of their field, each with the most tokens of one, or None."""
        for name in Unsupported.__struct_fields__:
            if getattr(request, name) is not None:
                raise UnsupportedError(f"{name} is not supported.", param=name)
        card = self._catalog.find(request.model, caller)
        vectors.embedding_of(card, request.model)
        encoder = await vectors.input_encoder(self._renderers, card)

        def encode() -> list[Input]:
            cut = cut_of(request.truncate_prompt_tokens, request.truncation_side, encoder)
            return [
                ids
                for name, list_, most in texts
                for ids in _ids(encoder, name, list_, _shorter(cut, most, card))
            ]

        inputs = await self._renderers.run(encode, size)
        vectors.check_tokens(inputs, texts[-1][0])
        ask = Ask(
            answer_id,
            card,
            inputs,
            normalize=True,
            team=caller.team,
            weight=caller.weight,
            priority=caller.priority(request.priority or 0),
            toll=caller.toll(request.model, card.name),
        )
        return VectorsAnswer(self._backend, self._renderers, [ask], write)


def _sides(request: ScoreRequest) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
    """The two sides as lists that are equally long, or of which the first holds one text."""
    for names in _PAIRS:
        given = [getattr(request, name) for name in names]
        if all(side is not None for side in given):
            left, right = ([side] if isinstance(side, str) else list(side) for side in given)
            if not left or not right:
                empty = names[bool(left)]
                raise InvalidRequestError(f"{empty} must not be empty.", param=empty)
            if len(left) not in (1, len(right)):
                raise InvalidRequestError(
                    f"{names[0]} must hold one text, or as many as {names[1]}.", param=names[0]
                )
            return (names[0], left), (names[1], right)
    raise InvalidRequestError("text_1 and text_2 are required.", param="text_1")


def _shorter(cut: Cut, most: int | None, card: ModelCard) -> Cut:
    """A cut to `most` tokens, when that is less."""
    if not most:
        return cut
    return Cut(min(most, cut.limit or card.max_model_len, card.max_model_len), cut.side)


def _ids(encoder: Inputs, name: str, texts: Sequence[str], cut: Cut) -> list[Input]:
    if len(texts) == 1 and name == "query":
        return [encoder.text(texts[0], cut, name)]
    if cut.limit is not None:
        encoder.check(cut.limit, "max_tokens_per_doc")
    return [encoder.text(text, cut, f"{name}[{at}]") for at, text in enumerate(texts)]


def _cosines(made: Made, number: int) -> list[float]:
    """Of each of the last `number` vectors with its partner, or with the one before them all.

    The vectors have length 1.
    """
    values = [floats(packed) for packed in made.vectors]
    left, right = values[:-number], values[-number:]
    partners = left * number if len(left) == 1 else left
    found = [sum(map(mul, one, other)) for one, other in zip(partners, right, strict=True)]
    return [max(-1.0, min(cosine, 1.0)) for cosine in found]  # rounding would make 1.00000001


def _scores(made: Made, answer_id: str, model: str, number: int) -> bytes:
    data = b",".join(
        b'{"index":%d,"object":"score","score":%b}' % (at, _encode(cosine))
        for at, cosine in enumerate(_cosines(made, number))
    )
    head = (_encode(answer_id), _encode(model), data, usage(made.tokens))
    return b'{"id":%b,"object":"list","model":%b,"data":[%b],"usage":%b}' % head


def _ranking(
    made: Made, answer_id: str, model: str, top_n: int, documents: Sequence[str] | None
) -> bytes:
    """The nearest first; of equals the one that was sent first."""
    cosines = _cosines(made, len(made.vectors) - 1)
    order = sorted(range(len(cosines)), key=lambda at: -cosines[at])
    results = b",".join(
        b'{"index":%d,%b"relevance_score":%b}'
        % (
            at,
            b'"document":{"text":%b},' % _encode(documents[at]) if documents is not None else b"",
            _encode(cosines[at]),
        )
        for at in order[: top_n or None]
    )
    head = (_encode(answer_id), _encode(model), usage(made.tokens), results)
    return b'{"id":%b,"model":%b,"usage":%b,"results":[%b]}' % head
