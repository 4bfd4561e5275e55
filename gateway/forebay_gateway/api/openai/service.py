"""The OpenAI dialect's generation calls: from a body to an answer that is ready to run.

Everything that can be wrong with a request is found here, before any answer begins. It knows no
Litestar route and no Redis.
"""

import secrets
import time
from collections.abc import Sequence
from typing import NamedTuple

from forebay_shared.errors import InvalidRequestError, ModelNotFoundError
from forebay_shared.models import CAP_GRAMMAR, ModelCard
from forebay_shared.sampling import SamplingParams
from forebay_shared.template import Json
from litestar.types import ASGIApp
from msgspec.structs import replace

from forebay_gateway.api.openai import params
from forebay_gateway.api.openai.answers import EARLY_S, StreamedAnswer, WholeAnswer
from forebay_gateway.api.openai.generate import Transcript
from forebay_gateway.api.openai.logprobs import ChatLogprobs, CompletionLogprobs
from forebay_gateway.api.openai.messages import conversation
from forebay_gateway.api.openai.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    decode_chat,
    decode_completion,
)
from forebay_gateway.api.openai.shapes import (
    ChatShape,
    CompletionShape,
    Identity,
    Shape,
    UsageFields,
)
from forebay_gateway.api.openai.tools import tool_use
from forebay_gateway.api.ports import Models, Services
from forebay_gateway.dispatch import Job
from forebay_gateway.interpret import Interpreter, Reading
from forebay_gateway.prompt import (
    Message,
    Renderer,
    Renderers,
    TemplateOptions,
    context_length_error,
)
from forebay_gateway.tools.base import ToolUse

MAX_PROMPTS = 256
MAX_CHOICES = 1024
MAX_SHOWN_NAME = 100


class _Prompt(NamedTuple):
    """One prompt of a text completion: its ids and its text, which an echo repeats."""

    token_ids: list[int]
    text: str


class OpenAIService:
    """Chat and text completions."""

    def __init__(
        self, backend: Services, renderers: Renderers, interpreter: Interpreter | None = None
    ) -> None:
        self._backend = backend
        self._renderers = renderers
        self._interpreter = interpreter or Interpreter()

    async def chat(self, body: bytes | bytearray, team: str) -> ASGIApp:
        """The answer, ready to run. Raises ForebayError for what fails before it begins."""
        size = len(body)
        request = await self._renderers.run(lambda: decode_chat(body), size)
        card = find_model(self._backend.roster, request.model)
        use = tool_use(
            request.tools, request.tool_choice, parallel=request.parallel_tool_calls is not False
        )
        if use is not None and use.forced:
            params.need(card, CAP_GRAMMAR, "tool_choice")
        options = _template_options(request, use)
        logprobs = params.chat_logprobs(request, card)
        renderer = await self._renderers.get(card)
        prompt = await self._renderers.run(
            lambda: renderer.chat(_conversation(request, card), options), size
        )
        room = _room(card, prompt, "messages")
        sampling = params.sampling_params(
            request, card, room=room, limit=params.chat_limit(request), logprobs=logprobs
        )
        thinks = sampling.grammar is None and options.kwargs.get("enable_thinking") is not False
        reading = self._interpreter.reading(renderer, prompt, use, thinks=thinks)
        if reading.grammar is not None:
            sampling = replace(sampling, grammar=reading.grammar)
        job = _job(_new_id("chatcmpl"), request, card, prompt, sampling, team)
        shape = ChatShape(
            _identity(job.request_id, request),
            usage_fields=_usage_fields(request),
            logprobs=[]
            if logprobs is None
            else [ChatLogprobs(renderer.vocabulary, logprobs) for _ in range(job.n)],
        )
        return self._answer(request, [job], reading, shape)

    async def complete(self, body: bytes | bytearray, team: str) -> ASGIApp:
        """The answer, ready to run. Raises ForebayError for what fails before it begins."""
        size = len(body)
        request = await self._renderers.run(lambda: decode_completion(body), size)
        card = find_model(self._backend.roster, request.model)
        logprobs = params.completion_logprobs(request, card)
        renderer = await self._renderers.get(card)
        prompts = await self._prompts(request, card, renderer, size)
        answer_id = _new_id("cmpl")
        jobs = [
            _job(
                answer_id if len(prompts) == 1 else f"{answer_id}-{number}",
                request,
                card,
                prompt.token_ids,
                params.sampling_params(
                    request,
                    card,
                    room=_room(card, prompt.token_ids, "prompt"),
                    limit=request.max_tokens or params.COMPLETION_MAX_TOKENS,
                    logprobs=logprobs,
                ),
                team,
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
        return self._answer(request, jobs, Reading(renderer.vocabulary), shape)

    async def _prompts(
        self, request: CompletionRequest, card: ModelCard, renderer: Renderer, size: int
    ) -> list[_Prompt]:
        return await self._renderers.run(lambda: _encode_all(renderer, request, card), size)

    def _answer(
        self, request: GenerationRequest, jobs: Sequence[Job], reading: Reading, shape: Shape
    ) -> ASGIApp:
        options = params.output_options(request)
        transcript = Transcript(
            self._backend.dispatcher,
            jobs,
            lambda: reading.output(options),
            include_stop=options.include_stop,
        )
        if not request.stream:
            return WholeAnswer(transcript, shape)
        # Without any worker a 503 may be the answer, however late: then no status goes out before.
        early_s = EARLY_S if self._backend.roster.ready else None
        return StreamedAnswer(transcript, shape, self._backend.telemetry.open_streams, early_s)


def find_model(roster: Models, name: str) -> ModelCard:
    """The card that serves `name`. Raises ModelNotFoundError that names it, NoWorkerError."""
    try:
        return roster.find(name)
    except ModelNotFoundError:
        shown = name[:MAX_SHOWN_NAME]
        raise ModelNotFoundError(
            f"The model '{shown}' does not exist or is not served here.", param="model"
        ) from None


def _template_options(request: ChatRequest, use: ToolUse | None) -> TemplateOptions:
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
        )
    kwargs = request.chat_template_kwargs or {}
    if len(kwargs) > 32:
        raise InvalidRequestError(
            "chat_template_kwargs may hold at most 32 values.", param="chat_template_kwargs"
        )
    return TemplateOptions(
        add_generation_prompt=not continues and request.add_generation_prompt is not False,
        continue_final_message=continues,
        kwargs={**_effort(request), **kwargs},
        tools=use.described() if use else [],
    )


def _effort(request: ChatRequest) -> dict[str, Json]:
    """How hard to think, under the names by which templates know it."""
    effort = request.reasoning_effort
    if effort is None:
        return {}
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


def _conversation(request: ChatRequest, card: ModelCard) -> list[Message]:
    """The messages for the template, unless they are too many: each takes a token at least."""
    number = len(request.messages)
    if number >= card.max_model_len:
        raise context_length_error(f"at least {number}", card.max_model_len, "messages")
    return conversation(request.messages)


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
    _room(card, prompt, "prompt")
    if not all(0 <= token_id < card.vocab_size for token_id in prompt):
        raise InvalidRequestError(
            f"prompt must hold token ids between 0 and {card.vocab_size - 1}.", param="prompt"
        )
    return _Prompt(prompt, renderer.decode(prompt) if echo else "")


def _room(card: ModelCard, prompt: Sequence[int], param: str) -> int:
    """How many tokens the context leaves behind the prompt."""
    if not prompt:
        raise InvalidRequestError(f"{param} gives no token.", param=param)
    room = card.max_model_len - len(prompt)
    if room <= 0:
        raise context_length_error(len(prompt), card.max_model_len, param)
    return room


def _job(
    request_id: str,
    request: GenerationRequest,
    card: ModelCard,
    prompt: list[int],
    sampling: SamplingParams,
    team: str,
) -> Job:
    return Job(
        request_id=request_id,
        card=card,
        prompt=prompt,
        sampling=sampling,
        n=request.n or 1,
        cache_salt=params.cache_salt(request),
        team=team,
        priority=request.priority or 0,
    )


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"


def _identity(answer_id: str, request: GenerationRequest) -> Identity:
    return Identity(id=answer_id, created=int(time.time()), model=request.model)


def _usage_fields(request: GenerationRequest) -> UsageFields:
    options = request.stream_options
    if options is None or not options.include_usage:
        return UsageFields.NEVER
    return UsageFields.ALWAYS if options.continuous_usage_stats else UsageFields.LAST
