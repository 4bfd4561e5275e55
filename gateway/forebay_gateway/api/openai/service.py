"""The OpenAI dialect's generation calls: from a body to an answer that is ready to run.

Everything that can be wrong with a request is found here, before any answer begins. It knows no
Litestar route and no Redis.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from forebay_shared.asked import Prompt
from forebay_shared.errors import InvalidRequestError
from forebay_shared.models import ModelCard
from litestar.types import ASGIApp

from forebay_gateway.api.openai import params, texts
from forebay_gateway.api.openai.chat_shape import ChatShape
from forebay_gateway.api.openai.completion_shape import Best, CompletionShape
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
from forebay_gateway.api.openai.turns import Turn, Turns, allowed, new_id, new_job, room
from forebay_gateway.interpret import Reading
from forebay_gateway.jobs import Job, TextJob
from forebay_gateway.output import Spelling
from forebay_gateway.prompt import Renderer, Truncation
from forebay_gateway.relayed import Words
from forebay_gateway.teams.caller import Caller

MAX_PROMPTS = 256
MAX_CHOICES = 1024


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
                lambda: _text_work(request, card, answer_id, caller), size
            )
        else:
            work = await self._token_work(request, card, answer_id, caller, size)
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

    async def _token_work(
        self,
        request: CompletionRequest,
        card: ModelCard,
        answer_id: str,
        caller: Caller,
        size: int,
    ) -> "_Work":
        plan = _plan(request, card)
        renderer = await self._renderers.get(card)
        prompts, bad_words = await self._renderers.run(
            lambda: (_encode_all(renderer, request, card, plan), renderer.words(plan.words)), size
        )
        jobs = [
            new_job(
                _numbered(answer_id, number, len(prompts)),
                request,
                card,
                prompt.token_ids,
                params.sampling_params(
                    request,
                    card,
                    room=room(card, prompt.token_ids, "prompt"),
                    limit=plan.limit,
                    logprobs=plan.sampled_logprobs,
                    bad_words=bad_words,
                    prompt_logprobs=plan.prompt_logprobs,
                ),
                caller,
                n=plan.candidates,
            )
            for number, prompt in enumerate(prompts)
        ]
        return _Work(plan, prompts, jobs, Reading(renderer.vocabulary))


class _Plan(NamedTuple):
    """What a text completion asks for, as far as the model's card can say."""

    limit: int
    candidates: int
    is_contest: bool
    logprobs: int | None
    scores_echo: bool
    prompt_logprobs: int | None
    words: list[str]
    truncation: Truncation | None

    @property
    def sampled_logprobs(self) -> int | None:
        """Alternatives per generated token; the best of several are told by their own alone."""
        return 0 if self.logprobs is None and self.is_contest else self.logprobs


def _plan(request: CompletionRequest, card: ModelCard) -> _Plan:
    logprobs = params.completion_logprobs(request, card)
    candidates = params.candidates(request, card)
    scores_echo = bool(request.echo) and logprobs is not None
    asked = [params.prompt_logprobs(request, card), logprobs if scores_echo else None]
    return _Plan(
        limit=params.completion_limit(request),
        candidates=candidates,
        is_contest=candidates > (request.n or 1),
        logprobs=logprobs,
        scores_echo=scores_echo,
        prompt_logprobs=max((each for each in asked if each is not None), default=None),
        words=params.bad_words(request, card),
        truncation=params.truncation(request, card),
    )


class _Work(NamedTuple):
    """A text completion made ready: its jobs, one for each prompt, and how they are read."""

    plan: _Plan
    prompts: list[EchoedPrompt]
    jobs: list[Job] | list[TextJob]
    reading: Reading | texts.TextReading


def _text_work(
    request: CompletionRequest, card: ModelCard, answer_id: str, caller: Caller
) -> _Work:
    """The work for an engine that speaks text."""
    given = texts.prompts_of(request, card)
    plan = _plan(request, card)
    _check_number(len(given), plan)
    if not all(given):
        raise InvalidRequestError("prompt must not be empty.", param="prompt")
    sampling = params.sampling_params(
        request, card, room=texts.ROOM, limit=plan.limit, logprobs=plan.sampled_logprobs
    )
    jobs = [
        texts.text_job(
            _numbered(answer_id, number, len(given)),
            request,
            card,
            Prompt(text),
            sampling,
            caller,
            limited=True,
            n=plan.candidates,
        )
        for number, text in enumerate(given)
    ]
    prompts = [EchoedPrompt([], (text,)) for text in given]
    return _Work(plan, prompts, jobs, texts.TextReading(Words()))


def _numbered(answer_id: str, number: int, of: int) -> str:
    """The id of one of several jobs."""
    return answer_id if of == 1 else f"{answer_id}-{number}"


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


def _check_number(prompts: int, plan: _Plan) -> None:
    if prompts > MAX_PROMPTS or prompts * plan.candidates > MAX_CHOICES:
        raise InvalidRequestError(
            f"A request may hold at most {MAX_PROMPTS} prompts and {MAX_CHOICES} choices.",
            param="prompt",
        )


def _encode_all(
    renderer: Renderer, request: CompletionRequest, card: ModelCard, plan: _Plan
) -> list[EchoedPrompt]:
    """Every prompt of a request. Not on the event loop: a body can hold millions of ids."""
    prompts = _split_prompts(request.prompt)
    _check_number(len(prompts), plan)
    return [_encode(renderer, prompt, card, request, plan) for prompt in prompts]


def _encode(
    renderer: Renderer,
    prompt: str | list[int],
    card: ModelCard,
    request: CompletionRequest,
    plan: _Plan,
) -> EchoedPrompt:
    """The prompt's ids, and its text when that is echoed: cut into tokens when they are scored."""
    if not prompt:
        raise InvalidRequestError("prompt must not be empty.", param="prompt")
    own = 0
    if isinstance(prompt, str):
        special = request.add_special_tokens is not False
        ids = renderer.text(prompt, add_special_tokens=special, truncation=plan.truncation)
        own = renderer.own_tokens(ids) if special else 0
    else:
        ids = prompt if plan.truncation is None else plan.truncation.cut(prompt, 0)
    room(card, ids, "prompt")
    if not isinstance(prompt, str) and not all(0 <= each < card.vocab_size for each in ids):
        raise InvalidRequestError(
            f"prompt must hold token ids between 0 and {card.vocab_size - 1}.", param="prompt"
        )
    if not request.echo:
        return EchoedPrompt(ids, ())
    if isinstance(prompt, str) and plan.truncation is None and not plan.scores_echo:
        return EchoedPrompt(ids, (prompt,))
    return EchoedPrompt(ids, [*[""] * own, *renderer.pieces(ids[own:])])


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
