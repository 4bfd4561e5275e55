"""The OpenAI dialect's generation calls: from a body to an answer that is ready to run.

Everything that can be wrong with a request is found here, before any answer begins. It knows no
Litestar route and no Redis.
"""

import time
from typing import NamedTuple

from forebay_shared.errors import InvalidRequestError
from forebay_shared.models import ModelCard
from litestar.types import ASGIApp

from forebay_gateway.api.openai import params
from forebay_gateway.api.openai.logprobs import ChatLogprobs, CompletionLogprobs
from forebay_gateway.api.openai.schema import (
    CompletionRequest,
    GenerationRequest,
    decode_chat,
    decode_completion,
)
from forebay_gateway.api.openai.shapes import (
    ChatShape,
    CompletionShape,
    Identity,
    UsageFields,
)
from forebay_gateway.api.openai.turns import Turns, find_generator, new_id, new_job, room
from forebay_gateway.interpret import Reading
from forebay_gateway.prompt import Renderer
from forebay_gateway.teams.caller import Caller

MAX_PROMPTS = 256
MAX_CHOICES = 1024


class _Prompt(NamedTuple):
    """One prompt of a text completion: its ids and its text, which an echo repeats."""

    token_ids: list[int]
    text: str


class OpenAIService:
    """Chat and text completions."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._backend = turns.backend
        self._renderers = turns.renderers

    async def chat(self, body: bytes | bytearray, caller: Caller) -> ASGIApp:
        """The answer, ready to run. Raises ForebayError for what fails before it begins."""
        size = len(body)
        request = await self._renderers.run(lambda: decode_chat(body), size)
        turn = await self._turns.prepare(
            request, answer_id=new_id("chatcmpl-"), caller=caller, size=size
        )
        shape = ChatShape(
            _identity(turn.job.request_id, request),
            usage_fields=_usage_fields(request),
            logprobs=[]
            if turn.logprobs is None
            else [ChatLogprobs(turn.renderer.vocabulary, turn.logprobs) for _ in range(turn.job.n)],
        )
        return self._turns.answer(request, [turn.job], turn.reading, shape)

    async def complete(self, body: bytes | bytearray, caller: Caller) -> ASGIApp:
        """The answer, ready to run. Raises ForebayError for what fails before it begins."""
        size = len(body)
        request = await self._renderers.run(lambda: decode_completion(body), size)
        card = find_generator(self._backend.roster, request.model, caller)
        logprobs = params.completion_logprobs(request, card)
        renderer = await self._renderers.get(card)
        prompts = await self._prompts(request, card, renderer, size)
        answer_id = new_id("cmpl-")
        jobs = [
            new_job(
                answer_id if len(prompts) == 1 else f"{answer_id}-{number}",
                request,
                card,
                prompt.token_ids,
                params.sampling_params(
                    request,
                    card,
                    room=room(card, prompt.token_ids, "prompt"),
                    limit=request.max_tokens or params.COMPLETION_MAX_TOKENS,
                    logprobs=logprobs,
                ),
                caller,
            )
            for number, prompt in enumerate(prompts)
        ]
        choices = [prompt for prompt in prompts for _ in range(request.n or 1)]
        shape = CompletionShape(
            _identity(answer_id, request),
            usage_fields=_usage_fields(request),
            logprobs=[]
            if logprobs is None
            else [CompletionLogprobs(renderer.vocabulary, logprobs) for _ in choices],
            echoes=[prompt.text for prompt in choices] if request.echo else (),
        )
        return self._turns.answer(request, jobs, Reading(renderer.vocabulary), shape)

    async def _prompts(
        self, request: CompletionRequest, card: ModelCard, renderer: Renderer, size: int
    ) -> list[_Prompt]:
        return await self._renderers.run(lambda: _encode_all(renderer, request, card), size)


def _split_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """All four forms of `prompt` as a list of texts or ids."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ids]
    texts: list[str | list[int]] = [item for item in prompt if isinstance(item, str)]
    lists: list[str | list[int]] = [item for item in prompt if isinstance(item, list)]
    if len(prompt) not in (len(texts), len(lists)):
        raise InvalidRequestError(
            "prompt must be a string, strings, token ids or lists of token ids, not a mixture.",
            param="prompt",
        )
    return texts or lists


def _encode_all(renderer: Renderer, request: CompletionRequest, card: ModelCard) -> list[_Prompt]:
    """Every prompt of a request. Not on the event loop: a body can hold millions of ids."""
    prompts = _split_prompts(request.prompt)
    if len(prompts) > MAX_PROMPTS or len(prompts) * (request.n or 1) > MAX_CHOICES:
        raise InvalidRequestError(
            f"A request may hold at most {MAX_PROMPTS} prompts and {MAX_CHOICES} choices.",
            param="prompt",
        )
    return [_encode(renderer, prompt, card, echo=bool(request.echo)) for prompt in prompts]


def _encode(renderer: Renderer, prompt: str | list[int], card: ModelCard, *, echo: bool) -> _Prompt:
    if not prompt:
        raise InvalidRequestError("prompt must not be empty.", param="prompt")
    if isinstance(prompt, str):
        return _Prompt(renderer.text(prompt), prompt)
    room(card, prompt, "prompt")
    if not all(0 <= token_id < card.vocab_size for token_id in prompt):
        raise InvalidRequestError(
            f"prompt must hold token ids between 0 and {card.vocab_size - 1}.", param="prompt"
        )
    return _Prompt(prompt, renderer.decode(prompt) if echo else "")


def _identity(answer_id: str, request: GenerationRequest) -> Identity:
    return Identity(id=answer_id, created=int(time.time()), model=request.model)


def _usage_fields(request: GenerationRequest) -> UsageFields:
    options = request.stream_options
    if options is None or not options.include_usage:
        return UsageFields.NEVER
    return UsageFields.ALWAYS if options.continuous_usage_stats else UsageFields.LAST
