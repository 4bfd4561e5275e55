"""The calls of this dialect: from a body to an answer that is ready to run.

Everything that can be wrong with a request is found before any answer begins. It knows no route.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec
from litestar.types import ASGIApp

from forebay_gateway.api.anthropic.schema import CountRequest, decode_count, decode_messages
from forebay_gateway.api.anthropic.translate import chat_request
from forebay_gateway.api.anthropic.writer import MessageWriter
from forebay_gateway.api.openai.schema import ChatRequest
from forebay_gateway.api.openai.turns import Turns, new_id
from forebay_gateway.api.respond import Answer
from forebay_gateway.teams.caller import Caller

R = TypeVar("R", bound=CountRequest)


class OriginalCount(msgspec.Struct, frozen=True):
    original_input_tokens: int


class TokenCount(msgspec.Struct, frozen=True):
    """`context_management` is there if the request has it."""

    input_tokens: int
    context_management: OriginalCount | msgspec.UnsetType = msgspec.UNSET


class MessagesService:
    """Messages, and the count of their tokens."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def create(self, body: bytes | bytearray, caller: Caller) -> ASGIApp:
        """The answer, ready to run. Raises ForebayError for what fails before it begins."""
        asked, request = await self._read(body, decode_messages)
        turn = await self._turns.prepare(
            request, answer_id=new_id("msg_"), caller=caller, size=len(body)
        )
        writer = MessageWriter(
            turn.job.request_id,
            asked.model,
            shows_thinking=asked.thinking is None or asked.thinking.display != "omitted",
            tells_edits=asked.context_management is not None,
        )
        return self._turns.answer(request, [turn.job], turn.reading, writer)

    async def count(self, body: bytes | bytearray, caller: Caller) -> ASGIApp:
        """The prompt's tokens, ready to be answered."""
        asked, request = await self._read(body, decode_count)
        number = len((await self._turns.render(request, caller, len(body))).token_ids)
        original = OriginalCount(number) if asked.context_management else msgspec.UNSET
        return Answer(msgspec.json.encode(TokenCount(number, original)))

    async def _read(
        self, body: bytes | bytearray, decode: Callable[[bytes | bytearray], R]
    ) -> tuple[R, ChatRequest]:
        """What a body asks for, and the same as a chat request; in a thread where it is long."""

        def read() -> tuple[R, ChatRequest]:
            asked = decode(body)
            return asked, chat_request(asked)

        return await self._turns.renderers.run(read, len(body))
