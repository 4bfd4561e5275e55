"""/tokenize and /detokenize: text to a model's token ids and back, in vLLM's shapes.

A conversation comes through `turns`, so that its ids are those of a chat with it. It runs nothing.
"""

from typing import Annotated

import msgspec
from forebay_shared.errors import InvalidRequestError, NoWorkerError
from forebay_shared.models import ModelCard
from litestar.types import ASGIApp
from msgspec import Meta

from forebay_gateway.api.calls import posted
from forebay_gateway.api.decoding import decode
from forebay_gateway.api.openai.schema import MAX_MESSAGES, ChatRequest, Message, TokenId
from forebay_gateway.api.openai.tools import ToolDefinition
from forebay_gateway.api.openai.turns import Turns
from forebay_gateway.api.respond import Answer
from forebay_gateway.prompt import Renderer
from forebay_gateway.teams.caller import Caller

MAX_TOKENS = 262_144
"""Ids that one call may send to be made text."""


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A `prompt`, or `messages` with what shapes a conversation's prompt."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    tools: list[ToolDefinition] | None = None


class Tokenized(msgspec.Struct, frozen=True):
    """`token_strs` are the tokens as the tokenizer itself names them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


class TokensService:
    """Text to ids and ids to text."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._renderers = turns.renderers

    async def tokenize(self, body: bytes | bytearray, caller: Caller) -> ASGIApp:
        """The ids, ready to be answered. Raises ForebayError for what is wrong with it."""
        size = len(body)
        request = await self._renderers.run(lambda: decode(_tokenize_decoder, body), size)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequestError("Either prompt or messages is required.", param="prompt")
        card, name = self._model(request.model, caller)
        renderer = await self._renderers.get(card)
        if request.messages is None:
            prompt, special = request.prompt or "", request.add_special_tokens is not False
            ids = await self._renderers.run(
                lambda: renderer.text(prompt, add_special_tokens=special), size
            )
        else:
            chat = _chat(request, request.messages, name)
            ids = (await self._turns.render(chat, caller, size)).token_ids
        answer = await self._renderers.run(lambda: _tokenized(request, card, renderer, ids), size)
        return Answer(answer)

    async def detokenize(self, body: bytes | bytearray, caller: Caller) -> ASGIApp:
        """The text, ready to be answered. Raises ForebayError for what is wrong with it."""
        size = len(body)
        request = await self._renderers.run(lambda: decode(_detokenize_decoder, body), size)
        card, _ = self._model(request.model, caller)
        ids = request.tokens
        if len(ids) > MAX_TOKENS:
            raise InvalidRequestError(f"tokens may hold at most {MAX_TOKENS} ids.", param="tokens")
        if any(token_id >= card.vocab_size for token_id in ids):
            raise InvalidRequestError(
                f"tokens must hold ids between 0 and {card.vocab_size - 1}.", param="tokens"
            )
        renderer = await self._renderers.get(card)
        text = await self._renderers.run(lambda: renderer.decode(ids), size)
        return Answer(msgspec.json.encode(Detokenized(text)))

    def _model(self, name: str | None, caller: Caller) -> tuple[ModelCard, str]:
        """The model of that name, which may be left out where only one is seen; its adapters, which
        share its tokenizer, stand for one that the caller does not see."""
        if name is not None:
            return self._turns.catalog.find(name, caller), name
        if not (cards := self._turns.backend.roster.cards()):
            raise NoWorkerError("No worker is ready.", retry_after_s=1.0)
        seen = [card for card in cards if any(map(caller.sees, card.names))]
        if len({card.parent or card.name for card in seen}) != 1:
            raise InvalidRequestError(
                "model is required: there is not exactly one to be seen here.", param="model"
            )
        card = next((card for card in seen if card.adapter is None), seen[0])
        return card, next(filter(caller.sees, card.names))


def tokens_apps(service: TokensService, max_body_bytes: int) -> dict[str, ASGIApp]:
    """What answers a POST, by path: vLLM's paths, and SGLang's."""
    tokenize = posted(service.tokenize, max_body_bytes)
    detokenize = posted(service.detokenize, max_body_bytes)
    return {
        "/tokenize": tokenize,
        "/detokenize": detokenize,
        "/v1/tokenize": tokenize,
        "/v1/detokenize": detokenize,
    }


def _chat(request: TokenizeRequest, messages: list[Message], model: str) -> ChatRequest:
    return ChatRequest(
        model=model,
        messages=messages,
        tools=request.tools,
        add_special_tokens=request.add_special_tokens,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _tokenized(
    request: TokenizeRequest, card: ModelCard, renderer: Renderer, ids: list[int]
) -> bytes:
    names = renderer.vocabulary.name
    strings = [names(token_id) for token_id in ids] if request.return_token_strs else None
    return msgspec.json.encode(Tokenized(len(ids), card.max_model_len, ids, strings))
