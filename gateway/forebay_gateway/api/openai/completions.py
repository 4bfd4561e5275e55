"""A text completion made ready to run: its prompts, one job for each, and how they are read.

It knows no answer's form, no route and no Redis.
"""

from typing import NamedTuple, Self

from forebay_shared.asked import Prompt
from forebay_shared.errors import InvalidRequestError
from forebay_shared.models import ModelCard

from forebay_gateway.api.openai import params, texts
from forebay_gateway.api.openai.logprobs import EchoedPrompt
from forebay_gateway.api.openai.schema import CompletionRequest
from forebay_gateway.api.openai.turns import new_job, room
from forebay_gateway.interpret import Reading
from forebay_gateway.jobs import Job, TextJob
from forebay_gateway.prompt import Renderer, Truncation
from forebay_gateway.relayed import Words
from forebay_gateway.renderers import Renderers
from forebay_gateway.teams.caller import Caller

MAX_PROMPTS = 256
MAX_CHOICES = 1024


class Plan(NamedTuple):
    """What a text completion asks for, as far as the model's card can say."""

    limit: int
    candidates: int
    is_contest: bool
    logprobs: int | None
    scores_echo: bool
    prompt_logprobs: int | None
    words: list[str]
    truncation: Truncation | None

    @classmethod
    def of(cls, request: CompletionRequest, card: ModelCard) -> Self:
        logprobs = params.completion_logprobs(request, card)
        candidates = params.candidates(request, card)
        scores_echo = bool(request.echo) and logprobs is not None
        asked = [params.prompt_logprobs(request, card), logprobs if scores_echo else None]
        return cls(
            limit=params.completion_limit(request),
            candidates=candidates,
            is_contest=candidates > (request.n or 1),
            logprobs=logprobs,
            scores_echo=scores_echo,
            prompt_logprobs=max((each for each in asked if each is not None), default=None),
            words=params.bad_words(request, card),
            truncation=params.truncation(request, card),
        )

    @property
    def sampled_logprobs(self) -> int | None:
        """Alternatives per generated token; the best of several are told by their own alone."""
        return 0 if self.logprobs is None and self.is_contest else self.logprobs


class Work(NamedTuple):
    """A text completion made ready: its jobs, one for each prompt, and how they are read."""

    plan: Plan
    prompts: list[EchoedPrompt]
    jobs: list[Job] | list[TextJob]
    reading: Reading | texts.TextReading


async def token_work(
    renderers: Renderers,
    request: CompletionRequest,
    card: ModelCard,
    answer_id: str,
    caller: Caller,
    size: int,
) -> Work:
    """The work for an engine that speaks token ids."""
    plan = Plan.of(request, card)
    renderer = await renderers.get(card)
    prompts, bad_words = await renderers.run(
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
    return Work(plan, prompts, jobs, Reading(renderer.vocabulary))


def text_work(request: CompletionRequest, card: ModelCard, answer_id: str, caller: Caller) -> Work:
    """The work for an engine that speaks text."""
    given = texts.prompts_of(request, card)
    plan = Plan.of(request, card)
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
    return Work(plan, prompts, jobs, texts.TextReading(Words()))


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


def _check_number(prompts: int, plan: Plan) -> None:
    if prompts > MAX_PROMPTS or prompts * plan.candidates > MAX_CHOICES:
        raise InvalidRequestError(
            f"A request may hold at most {MAX_PROMPTS} prompts and {MAX_CHOICES} choices.",
            param="prompt",
        )


def _encode_all(
    renderer: Renderer, request: CompletionRequest, card: ModelCard, plan: Plan
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
    plan: Plan,
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
