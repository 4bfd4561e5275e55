"""The OpenAI dialect's generation calls: from a body to an answer that is ready to run.

Everything that can be wrong with a request is found here, before any answer begins. It knows no
Litestar route and no Redis.
"""

import time
from collections.abc import Sequence

from litestar.types import ASGIApp

from forebay_gateway.api.openai.chat_shape import ChatShape
from forebay_gateway.api.openai.completion_shape import Best, CompletionShape
from forebay_gateway.api.openai.completions import text_work, token_work
from forebay_gateway.api.openai.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    EchoedPrompt,
    PromptScores,
)
from forebay_gateway.api.openai.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    decode_chat,
    decode_completion,
)
from forebay_gateway.api.openai.shapes import (
    Extras,
    Identity,
    LogprobsWriter,
    TokenIds,
    UsageFields,
)
from forebay_gateway.api.openai.turns import Turn, Turns, allowed, new_id
from forebay_gateway.output import Spelling
from forebay_gateway.teams.caller import Caller


class OpenAIService:
    """Chat and text completions."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
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
            _extras(
                request,
                turn.reading.vocabulary,
                [turn.job.prompt] * turn.job.n,
                _chat_logprobs(request, turn),
            ),
            hides_reasoning=request.include_reasoning is False,
            legacy=bool(request.functions),
        )
        return self._turns.answer(request, [turn.job], turn.reading, shape)

    async def complete(self, body: bytes | bytearray, caller: Caller) -> ASGIApp:
        """The answer, ready to run. Raises ForebayError for what fails before it begins."""
        size = len(body)
        request = await self._renderers.run(lambda: decode_completion(body), size)
        card = self._turns.generator(request.model, caller)
        request = allowed(request, card, caller)
        answer_id = new_id("cmpl-")
        if card.speaks_text:
            work = await self._renderers.run(
                lambda: text_work(request, card, answer_id, caller), size
            )
        else:
            work = await token_work(self._renderers, request, card, answer_id, caller, size)
        plan, prompts, jobs, reading = work
        choices = [prompt for prompt in prompts for _ in range(plan.candidates)]
        shape = CompletionShape(
            _identity(answer_id, request),
            _extras(
                request,
                reading.vocabulary,
                [prompt.token_ids for prompt in choices],
                _completion_logprobs(request, reading.vocabulary, choices),
            ),
            echoes=["".join(prompt.pieces) for prompt in choices] if request.echo else (),
            scored=plan.scores_echo,
            best=Best(request.n or 1, plan.candidates, len(prompts)) if plan.is_contest else None,
        )
        return self._turns.answer(request, jobs, reading, shape)


def _identity(answer_id: str, request: GenerationRequest) -> Identity:
    return Identity(id=answer_id, created=int(time.time()), model=request.model)


def _extras(
    request: GenerationRequest,
    vocabulary: Spelling,
    prompts: Sequence[list[int]],
    logprobs: Sequence[LogprobsWriter],
) -> Extras:
    """What the request wants to know beside the text; `prompts` has one for each choice."""
    top = request.prompt_logprobs
    return Extras(
        usage_fields=_usage_fields(request),
        logprobs=logprobs,
        prompt_scores=None if top is None else PromptScores(vocabulary, prompts, top),
        token_ids=TokenIds(prompts) if request.return_token_ids else None,
    )


def _chat_logprobs(request: ChatRequest, turn: Turn) -> list[ChatLogprobs]:
    """One writer for each choice, when they are asked for."""
    top = turn.logprobs
    if top is None:
        return []
    as_ids = bool(request.return_tokens_as_token_ids)
    vocabulary = turn.reading.vocabulary
    return [ChatLogprobs(vocabulary, top, as_ids=as_ids) for _ in range(turn.job.n)]


def _completion_logprobs(
    request: CompletionRequest, vocabulary: Spelling, choices: Sequence[EchoedPrompt]
) -> list[CompletionLogprobs]:
    """One writer for each choice, when they are asked for."""
    top = request.logprobs
    if top is None:
        return []
    as_ids = bool(request.return_tokens_as_token_ids)
    return [
        CompletionLogprobs(vocabulary, top, as_ids=as_ids, echoed=choice if request.echo else None)
        for choice in choices
    ]


def _usage_fields(request: GenerationRequest) -> UsageFields:
    options = request.stream_options
    if options is None or not options.include_usage:
        return UsageFields.NEVER
    return UsageFields.ALWAYS if options.continuous_usage_stats else UsageFields.LAST
