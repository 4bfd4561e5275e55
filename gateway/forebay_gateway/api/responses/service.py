"""The calls of /v1/responses: from a request to an answer that is ready to run.

Everything that can be wrong with a request is found here, before any answer begins. It knows no
Litestar route and no Redis command.
"""

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from forebay_shared.errors import (
    ContextLengthError,
    ForebayError,
    InvalidRequestError,
    NotFoundError,
)
from forebay_shared.settings import GatewaySettings
from litestar.types import ASGIApp

from forebay_gateway.api.openai.logprobs import ChatLogprobs
from forebay_gateway.api.openai.turns import Turn, Turns
from forebay_gateway.api.respond import Answer
from forebay_gateway.api.responses.composer import encode
from forebay_gateway.api.responses.follow import FollowedEvents
from forebay_gateway.api.responses.items import chat_messages, check_calls, checked, home_of
from forebay_gateway.api.responses.runs import BackgroundRuns
from forebay_gateway.api.responses.schema import Item, ResponsesRequest, decode_request
from forebay_gateway.api.responses.shapes import new_response
from forebay_gateway.api.responses.store import ResponseStore
from forebay_gateway.api.responses.translate import chat_request, renamed
from forebay_gateway.api.responses.truncation import fitting
from forebay_gateway.api.responses.writer import ResponseWriter
from forebay_gateway.api.transcript import Usage
from forebay_gateway.teams.caller import Caller

MAX_REFERENCES = 64
"""Responses that the item references of one request may lead to."""


class Context(NamedTuple):
    """What a response answers: its own input, and the whole conversation with it.

    `given` holds the input's items with their ids, references resolved; they are the last of
    `items`.
    """

    given: list[Item]
    items: list[Item]


class _Output(msgspec.Struct):
    """Of a stored response only what it said."""

    output: list[Item] = []


class ResponsesService:
    """Responses: made, streamed, stored, run in the background."""

    def __init__(self, turns: Turns, settings: GatewaySettings) -> None:
        services = turns.backend
        self._turns = turns
        self.store = ResponseStore(services.publisher, settings, services.telemetry)
        self.runs = BackgroundRuns(self.store, services, settings.max_background_responses)

    async def create(self, body: bytes | bytearray, caller: Caller) -> ASGIApp:
        """The answer, ready to run. Raises ForebayError for what fails before it begins."""
        size = len(body)
        request = await self._turns.renderers.run(lambda: decode_request(body), size)
        stores = self._stores(request)
        response_id = f"resp_{secrets.token_hex(16)}"
        team = caller.team
        context = await self._context(request, response_id, team)
        input_ = encode(context.given) if stores else b""
        self.store.check_size(input_)
        turn = await self._turn(request, context.items, response_id, caller, size)
        response = new_response(
            request,
            turn.job.sampling,
            response_id=response_id,
            created_at=int(time.time()),
            store=stores,
        )
        writer = ResponseWriter(response, _logprobs(turn))
        transcript = self._turns.run(
            turn.request, [turn.job], turn.reading, by_token=turn.logprobs is not None
        )
        if request.background:
            streams = bool(request.stream)
            await self.runs.start(team, writer, input_, transcript, streams)
            if streams:
                return FollowedEvents(self.store, self.runs, team, response_id, 0)
            return Answer(encode(response))

        async def keep(usage: Usage) -> None:
            writer.settle(usage)
            ended = writer.response
            previous = ended.previous_response_id or ""
            await self.store.keep(team, ended.id, encode(ended), input_, ended.status, previous)

        return self._turns.written(turn.request, transcript, writer, keep if stores else None)

    async def count(self, body: bytes | bytearray, caller: Caller) -> ASGIApp:
        """How many tokens a request's input is."""
        size = len(body)
        request = await self._turns.renderers.run(lambda: decode_request(body), size)
        context = await self._context(request, "resp_" + "0" * 32, caller.team)
        try:
            chat = chat_request(request, chat_messages(context.items, request.instructions))
            rendered = await self._turns.render(chat, caller, size)
        except ForebayError as error:
            raise renamed(error) from None
        return Answer(encode(_Counted(len(rendered.token_ids))))

    async def check_streams(self, team: str, response_id: str) -> None:
        """Raises InvalidRequestError when the events of a response are not kept."""
        if not await self.store.events(team, response_id, 0, 1):
            raise InvalidRequestError(
                "Only a response that was created with background and stream can be streamed "
                "later; retrieve it without stream.",
                param="stream",
            )

    def _stores(self, request: ResponsesRequest) -> bool:
        """Whether the response is stored. Raises InvalidRequestError where it cannot be."""
        if self.store.keeps:
            return request.store is not False
        if request.store or request.background:
            param = "store" if request.store else "background"
            raise InvalidRequestError("This server stores no responses.", param=param)
        return False

    async def _context(self, request: ResponsesRequest, response_id: str, team: str) -> Context:
        given = await self._resolved(checked(request.input, response_id), team)
        before: list[Item] = []
        if request.previous_response_id is not None:
            for link in await self.store.chain(team, request.previous_response_id):
                before += _items(link.input)
                before += _output(link.response)
        items = before + given
        check_calls(items, len(before))
        return Context(given, items)

    async def _resolved(self, items: list[Item], team: str) -> list[Item]:
        """The items with each reference replaced by what it refers to."""
        wanted = {
            item.id: home_of(item.id)
            for item in items
            if item.type == "item_reference" and item.id is not None
        }
        if not wanted:
            return items
        known = await self._known(wanted.values(), team)
        resolved = list(items)
        for index, item in enumerate(items):
            if item.type == "item_reference":
                if item.id not in known:
                    raise NotFoundError(
                        f"input[{index}].id is no item that is stored.", param=f"input[{index}].id"
                    )
                resolved[index] = known[item.id]
        return resolved

    async def _known(self, homes: Iterable[str | None], team: str) -> dict[str | None, Item]:
        """All items of some responses, by id; what is not stored is not there."""
        ids = sorted({home for home in homes if home is not None})
        if len(ids) > MAX_REFERENCES:
            raise InvalidRequestError(
                f"input may refer to items of at most {MAX_REFERENCES} responses.", param="input"
            )
        found = await asyncio.gather(
            *(self.store.read(team, id_) for id_ in ids), return_exceptions=True
        )
        known: dict[str | None, Item] = {}
        for stored in found:
            if isinstance(stored, NotFoundError):
                continue
            if isinstance(stored, BaseException):
                raise stored
            for item in (*_items(stored.input), *_output(stored.response)):
                known[item.id] = item
        return known

    async def _turn(
        self,
        request: ResponsesRequest,
        items: Sequence[Item],
        response_id: str,
        caller: Caller,
        size: int,
    ) -> Turn:
        try:
            chat = chat_request(request, chat_messages(items, request.instructions))
            try:
                turn = await self._turns.prepare(
                    chat, answer_id=response_id, caller=caller, size=size
                )
            except ContextLengthError:
                if request.truncation != "auto":
                    raise
                chat = await fitting(self._turns, request, items, caller, size)
                turn = await self._turns.prepare(
                    chat, answer_id=response_id, caller=caller, size=size
                )
        except ForebayError as error:
            raise renamed(error) from None
        return _with_own_names(turn)


class _Counted(msgspec.Struct):
    input_tokens: int
    object: str = "response.input_tokens"


def _items(input_: bytes) -> list[Item]:
    return msgspec.json.decode(input_, type=list[Item])


def _output(response: bytes) -> list[Item]:
    return msgspec.json.decode(response, type=_Output).output


def _logprobs(turn: Turn) -> ChatLogprobs | None:
    if turn.logprobs is None:
        return None
    return ChatLogprobs(turn.renderer.vocabulary, turn.logprobs)


def _with_own_names(turn: Turn) -> Turn:
    """A grammar that the engine refuses is refused in this dialect's name of its field."""
    job = turn.job
    grammar = job.sampling.grammar
    if grammar is None or grammar.field != "response_format":
        return turn
    grammar = msgspec.structs.replace(grammar, field="text.format")
    sampling = msgspec.structs.replace(job.sampling, grammar=grammar)
    return turn._replace(job=msgspec.structs.replace(job, sampling=sampling))
