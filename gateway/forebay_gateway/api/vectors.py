"""From the inputs of one request to their vectors: split into jobs, run side by side, put together.

It knows no field and no JSON. A client that leaves takes all of its jobs off the workers.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from forebay_shared.errors import InvalidRequestError, UnsupportedError
from forebay_shared.models import CAP_EMBED, EmbeddingCard, ModelCard
from forebay_shared.wire import MAX_ENCODE_INPUTS, MAX_ENCODE_TOKENS, Embedded
from litestar.types import Receive, Scope, Send

from forebay_gateway.api.connection import WhileConnected
from forebay_gateway.api.ports import Services
from forebay_gateway.api.respond import Answer
from forebay_gateway.inputs import Input, InputEncoder, Inputs, TextInputs, input_tokens
from forebay_gateway.jobs import EncodeJob
from forebay_gateway.meter import Toll
from forebay_gateway.renderers import Renderers

MAX_INPUTS = 2_048
MAX_TOKENS = 524_288
"""Of all inputs of one request together."""
INLINE_VECTORS = 16
"""More of them are written in a thread: some 50 us each."""


class Ask(NamedTuple):
    """The inputs of one request, and what is wanted of them. Ids are a job's, up to a number."""

    request_id: str
    card: ModelCard
    inputs: Sequence[Input]
    dimensions: int = 0
    normalize: bool | None = None
    team: str = ""
    weight: float = 1.0
    priority: int = 0
    toll: Toll | None = None


class Made(NamedTuple):
    """The vectors, each packed little-endian float32, and the tokens that they took."""

    vectors: list[bytes]
    tokens: int


Write = Callable[[Made], bytes]


class VectorsAnswer:
    """An answer in one JSON object, which `write` makes of the vectors; an ASGI app."""

    def __init__(
        self, backend: Services, renderers: Renderers, asks: Sequence[Ask], write: Write
    ) -> None:
        self._backend = backend
        self._renderers = renderers
        self._jobs = [job for ask in asks for job in _jobs(ask)]
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with WhileConnected(receive):
            answers = await self._run()
            made = Made(
                [vector for answer in answers for vector in answer.vectors],
                sum(answer.usage.prompt_tokens for answer in answers),
            )
            if len(made.vectors) <= INLINE_VECTORS:
                body = self._write(made)
            else:
                body = await self._renderers.in_thread(lambda: self._write(made))
        self._backend.telemetry.jobs.embedded(len(made.vectors), made.tokens)
        await Answer(body)(scope, receive, send)

    async def _run(self) -> list[Embedded]:
        """All jobs at once; the first that fails ends the others."""
        if len(self._jobs) == 1:
            return [await self._one(self._jobs[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(job)) for job in self._jobs]
        except* Exception as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, job: EncodeJob) -> Embedded:
        async with self._backend.dispatcher.encode(job) as running:
            (answer,) = await running.events()
        return answer


def embedding_of(card: ModelCard, name: str) -> EmbeddingCard:
    """What vectors a model makes, which was asked for by this name. Raises UnsupportedError when
    it makes none."""
    if card.embedding is None or CAP_EMBED not in card.capabilities:
        raise UnsupportedError(
            f"The model '{name}' generates text; it does not make embeddings.", param="model"
        )
    return card.embedding


def check_dimensions(dimensions: int, card: ModelCard, name: str) -> None:
    """Raises InvalidRequestError when the model's vectors cannot be cut to this size."""
    embedding = embedding_of(card, name)
    if dimensions == embedding.size:
        return
    if not embedding.matryoshka:
        raise InvalidRequestError(
            f"dimensions must be {embedding.size}: this model's vectors cannot be cut.",
            param="dimensions",
        )
    if embedding.sizes and dimensions not in embedding.sizes:
        sizes = ", ".join(map(str, embedding.sizes))
        raise InvalidRequestError(f"dimensions must be one of {sizes}.", param="dimensions")
    if dimensions > embedding.size:
        raise InvalidRequestError(
            f"dimensions must be between 1 and {embedding.size}.", param="dimensions"
        )


def check_number(number: int, param: str) -> None:
    if number > MAX_INPUTS:
        raise InvalidRequestError(f"{param} may hold at most {MAX_INPUTS} inputs.", param=param)


def check_tokens(inputs: Sequence[Input], param: str) -> None:
    tokens = sum(map(input_tokens, inputs))
    if tokens > MAX_TOKENS:
        raise InvalidRequestError(
            f"The inputs of one request may have {MAX_TOKENS} tokens together; these have "
            f"{tokens}.",
            param=param,
        )


async def input_encoder(renderers: Renderers, card: ModelCard) -> Inputs:
    if card.speaks_text:
        return TextInputs(card.max_model_len)
    renderer = await renderers.get(card)
    return InputEncoder(renderer.tokenizer, card.vocab_size, card.max_model_len)


def _jobs(ask: Ask) -> list[EncodeJob]:
    """The inputs in parts of which each fits into one message."""
    parts: list[list[Input]] = []
    size = 0
    for each in ask.inputs:
        tokens = input_tokens(each)
        if not parts or len(parts[-1]) == MAX_ENCODE_INPUTS or size + tokens > MAX_ENCODE_TOKENS:
            parts.append([])
            size = 0
        parts[-1].append(each)
        size += tokens
    whole = EncodeJob(
        request_id=ask.request_id,
        card=ask.card,
        inputs=ask.inputs,
        dimensions=ask.dimensions,
        normalize=ask.normalize,
        team=ask.team,
        weight=ask.weight,
        priority=ask.priority,
        toll=ask.toll,
    )
    if len(parts) == 1:
        return [whole]
    replace = msgspec.structs.replace
    return [
        replace(whole, request_id=f"{ask.request_id}-{number}", inputs=part)
        for number, part in enumerate(parts)
    ]
