"""The calls of /v1/responses: from a request to an answer that is ready to run.

Everything that can be wrong with a request is found here, before any answer begins. It knows no
Litestar route and no Redis command.
"""

import itertools
import secrets
import time
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec
from forebay_shared.errors import (
    BusError,
    ContextLengthError,
    ForebayError,
    InvalidRequestError,
)
from forebay_shared.settings import GatewaySettings
from litestar.types import ASGIApp

from forebay_gateway.api.openai.logprobs import ChatLogprobs
from forebay_gateway.api.openai.schema import ChatRequest
from forebay_gateway.api.openai.turns import Turn, Turns
from forebay_gateway.api.respond import Answer
from forebay_gateway.api.responses.composer import encode
from forebay_gateway.api.responses.context import Context, Contexts
from forebay_gateway.api.responses.follow import FollowedEvents
from forebay_gateway.api.responses.items import Equipped, chat_messages, with_tools
from forebay_gateway.api.responses.runs import Again, BackgroundRuns, Work
from forebay_gateway.api.responses.schema import ResponsesRequest, decode_request
from forebay_gateway.api.responses.shapes import new_response
from forebay_gateway.api.responses.store import ResponseStore
from forebay_gateway.api.responses.tools import Toolbox
from forebay_gateway.api.responses.translate import chat_request, renamed
from forebay_gateway.api.responses.truncation import fitting
from forebay_gateway.api.responses.writer import ResponseWriter
from forebay_gateway.api.transcript import Transcript, Usage
from forebay_gateway.teams.aliases import warning
from forebay_gateway.teams.caller import Caller

_LEFT_OUT = "The hosted tools of this request were left out: this server runs none."
_NO_ID = "resp_" + "0" * 32
"""Of what is only counted."""


class ResponsesService:
    """Responses: made, streamed, stored, run in the background."""

    def __init__(self, turns: Turns, settings: GatewaySettings) -> None:
        services = turns.backend
        self._turns = turns
        self.store = ResponseStore(services.publisher, settings, services.telemetry)
        self._contexts = Contexts(self.store, turns.renderers)
        self.runs = BackgroundRuns(self.store, services, settings.max_background_responses)

    async def create(self, body: bytes | bytearray, caller: Caller) -> ASGIApp:
        """The answer, ready to run. Raises ForebayError for what fails before it begins."""
        size = len(body)
        request = await self._turns.renderers.run(lambda: decode_request(body), size)
        stores = self._stores(request)
        response_id = f"resp_{secrets.token_hex(16)}"
        team = caller.team
        context = await self._contexts.of(request, response_id, team, size)
        equipped = await self._equipped(request, context)
        if stores:
            self.store.check_size(context.given)
        request = equipped.request
        asked = _Asked(equipped, context, response_id, int(time.time()), stores, caller)
        first = await self._attempt(asked, response_id)
        if Toolbox(request.tools or ()).left_out:
            caller.headers.append(warning(_LEFT_OUT))
        if request.background:
            again = self._followed(asked)
            await self.runs.start(team, first.work, context.given, again, bool(request.stream))
            if request.stream:
                return FollowedEvents(self.store, self.runs, team, response_id, 0)
            return Answer(encode(first.writer.response))

        keeper = _Keeper(self.store, team, first.writer, context.given) if stores else None
        return self._turns.written(first.request, first.transcript, first.writer, keeper)

    async def _equipped(self, request: ResponsesRequest, context: Context) -> Equipped:
        work = partial(with_tools, request, context.items, context.first)
        return await self._turns.renderers.run(work, context.size)

    async def count(self, body: bytes | bytearray, caller: Caller) -> ASGIApp:
        """How many tokens a request's input is."""
        size = len(body)
        request = await self._turns.renderers.run(lambda: decode_request(body), size)
        context = await self._contexts.of(request, _NO_ID, caller.team, size)
        equipped = await self._equipped(request, context)
        request = equipped.request
        try:
            chat = await self._chat(request, context)
            rendered = await self._turns.render(chat, caller, context.size)
        except ForebayError as error:
            raise renamed(error, equipped) from None
        return Answer(encode(_Counted(len(rendered.token_ids))))

    async def _chat(self, request: ResponsesRequest, context: Context) -> ChatRequest:
        """The whole conversation as a chat request: 0.05 s and more for 32,000 items."""

        def work() -> ChatRequest:
            return chat_request(request, chat_messages(context.items, request.instructions))

        return await self._turns.renderers.run(work, context.size)

    async def check_streams(self, team: str, response_id: str) -> None:
        """Raises InvalidRequestError when the events of a response are not kept."""
        if not await self.store.events(team, response_id, 0, 1):
            raise InvalidRequestError(
                "Only a response that was created with background and stream can be streamed "
                "later; retrieve it without stream.",
                param="stream",
            )

    async def _attempt(self, asked: "_Asked", job_id: str) -> "_Attempt":
        """By the model that is to answer now. Raises ForebayError."""
        request = asked.equipped.request
        turn = await self._turn(asked, job_id)
        response = new_response(
            request,
            turn.job.sampling,
            response_id=asked.response_id,
            created_at=asked.created_at,
            store=asked.stores,
        )
        callees = Toolbox(request.tools or ()).callees
        writer = ResponseWriter(response, _logprobs(turn), callees, seals=request.wants_sealed)
        transcript = self._turns.run(
            turn.request, [turn.job], turn.reading, by_token=turn.logprobs is not None
        )
        return _Attempt(turn.request, writer, transcript)

    def _followed(self, asked: "_Asked") -> Again:
        numbers = itertools.count(2)

        async def again(error: ForebayError) -> Work:
            while asked.caller.goes_on(error):
                # A job that was refused is on the books by its id: the next one has its own.
                job_id = f"{asked.response_id}-{next(numbers)}"
                try:
                    return (await self._attempt(asked, job_id)).work
                except ForebayError as failed:
                    error = failed
            raise error

        return again

    def _stores(self, request: ResponsesRequest) -> bool:
        """Whether the response is stored. Raises InvalidRequestError where it cannot be."""
        if self.store.keeps:
            return request.store is not False
        if request.store or request.background:
            param = "store" if request.store else "background"
            raise InvalidRequestError("This server stores no responses.", param=param)
        return False

    async def _turn(self, asked: "_Asked", job_id: str) -> Turn:
        request, caller = asked.equipped.request, asked.caller
        items, size = asked.context.items, asked.context.size

        def prepared(chat: ChatRequest) -> Awaitable[Turn]:
            return self._turns.prepare(chat, answer_id=job_id, caller=caller, size=size)

        try:
            chat = await self._chat(request, asked.context)
            try:
                return await prepared(chat)
            except ContextLengthError as error:
                longer = caller.route is not None and caller.route.leads_on(error)
                if request.truncation != "auto" or longer:
                    raise
                return await prepared(await fitting(self._turns, request, items, caller, size))
        except ForebayError as error:
            raise renamed(error, asked.equipped) from None


class _Asked(NamedTuple):
    """What is asked for, whichever model answers."""

    equipped: Equipped
    context: Context
    response_id: str
    created_at: int
    stores: bool
    caller: Caller


class _Attempt(NamedTuple):
    """The same as one model answers it."""

    request: ChatRequest
    writer: ResponseWriter
    transcript: Transcript

    @property
    def work(self) -> Work:
        return self.writer, self.transcript


class _Keeper:
    """An `answers.Keeper` of one response, and of its input."""

    def __init__(
        self, store: ResponseStore, team: str, writer: ResponseWriter, given: bytes
    ) -> None:
        self._store = store
        self._team = team
        self._writer = writer
        self._given = given

    async def complete(self, usage: Usage) -> None:
        self._writer.settle(usage)
        await self._keep()

    async def broken(self) -> None:
        with suppress(BusError):
            await self._keep()

    async def _keep(self) -> None:
        ended = self._writer.response
        previous = ended.previous_response_id or ""
        await self._store.keep(
            self._team, ended.id, encode(ended), self._given, ended.status, previous
        )


class _Counted(msgspec.Struct):
    input_tokens: int
    object: str = "response.input_tokens"


def _logprobs(turn: Turn) -> ChatLogprobs | None:
    if turn.logprobs is None:
        return None
    return ChatLogprobs(turn.reading.vocabulary, turn.logprobs)
