"""A chat request made ready to run: the way of every dialect that speaks in messages.

The other dialects translate what they get into a ChatRequest and come here, so that a model, its
template, its tools and its limits mean the same in each of them. It knows no answer and no Redis.
"""

import secrets
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeVar, cast

from forebay_shared.errors import InvalidRequestError, UnsupportedError
from forebay_shared.models import CAP_GENERATE, ModelCard
from forebay_shared.sampling import SamplingParams
from forebay_shared.template import Json
from litestar.types import ASGIApp
from msgspec.structs import replace

from forebay_gateway.api.answers import Keeper, StreamedAnswer, WholeAnswer, Writer
from forebay_gateway.api.openai import params
from forebay_gateway.api.openai.bounds import bounded
from forebay_gateway.api.openai.messages import conversation
from forebay_gateway.api.openai.schema import ChatRequest, GenerationRequest
from forebay_gateway.api.openai.texts import TextReading, chat_job
from forebay_gateway.api.openai.tools import is_flat
from forebay_gateway.api.ports import Services
from forebay_gateway.api.transcript import Transcript
from forebay_gateway.interpret import Interpreter, Reading
from forebay_gateway.jobs import Job, TextJob
from forebay_gateway.prompt import (
    Message,
    Renderer,
    TemplateOptions,
    Truncation,
    context_length_error,
)
from forebay_gateway.renderers import Renderers
from forebay_gateway.teams.caller import Caller
from forebay_gateway.teams.catalog import Catalog
from forebay_gateway.tools.base import ToolUse

R = TypeVar("R", bound=GenerationRequest)

MAX_DOCUMENTS = 1024
MAX_DOCUMENT_DEPTH = 8


class Rendered(NamedTuple):
    """A conversation as its model reads it: the prompt's ids, and what they were made with."""

    card: ModelCard
    renderer: Renderer
    token_ids: list[int]
    options: TemplateOptions
    use: ToolUse | None


class Turn(NamedTuple):
    """One chat request, valid as a whole: `job` says what to generate, `reading` how to read it.

    `logprobs` is how many alternatives per token were asked for, None when none.
    """

    request: ChatRequest
    job: Job | TextJob
    reading: Reading | TextReading
    logprobs: int | None


class Turns:
    """From messages to work."""

    def __init__(
        self,
        backend: Services,
        renderers: Renderers,
        catalog: Catalog,
        interpreter: Interpreter | None = None,
        *,
        trusts_templates: bool = False,
        signs_are_events: bool = False,
    ) -> None:
        """`trusts_templates`: a request may bring its own chat template. `signs_are_events`: silent
        streams say so in events."""
        self.backend = backend
        self._trusts_templates = trusts_templates
        self._signs_are_events = signs_are_events
        self.renderers = renderers
        self.catalog = catalog
        self._interpreter = interpreter or Interpreter()

    async def prepare(
        self, request: ChatRequest, *, answer_id: str, caller: Caller, size: int
    ) -> Turn:
        """`size` is the body's, in bytes: large ones are worked on in a thread.

        Raises ForebayError for everything that is wrong with the request.
        """
        card = self.generator(request.model, caller)
        request = allowed(request, card, caller)
        if card.speaks_text:
            told = await self.renderers.run(
                lambda: chat_job(request, card, answer_id, caller), size
            )
            return Turn(request, *told)
        _, renderer, prompt, options, use = await self._render(request, card, size)
        logprobs = params.chat_logprobs(request, card)
        words = params.bad_words(request, card)
        bad_words = await self.renderers.run(lambda: renderer.words(words), size) if words else ()
        sampling = params.sampling_params(
            request,
            card,
            room=room(card, prompt, "messages"),
            limit=params.chat_limit(request),
            logprobs=logprobs,
            bad_words=bad_words,
            prompt_logprobs=params.prompt_logprobs(request, card),
        )
        thinks = options.kwargs.get("enable_thinking") is not False
        read = partial(self._interpreter.reading, renderer, prompt, use, thinks=thinks)
        # A grammar of 7 MB of tools, which is refused or made small, is written in 0.4 s.
        reading = await self.renderers.run(partial(read, answer=sampling.grammar), size)
        if reading.grammar is not None:
            sampling = replace(sampling, grammar=reading.grammar)
        job = new_job(answer_id, request, card, prompt, sampling, caller)
        return Turn(request, job, reading, logprobs)

    async def render(self, request: ChatRequest, caller: Caller, size: int) -> Rendered:
        """The prompt alone, which may be longer than what the model takes.

        Raises ForebayError for what is wrong with the messages, the tools or the template's values.
        """
        card = self.generator(request.model, caller)
        return await self._render(request, card, size)

    async def _render(self, request: ChatRequest, card: ModelCard, size: int) -> Rendered:
        renderer = self._with_own_template(await self.renderers.get(card), request.chat_template)

        def work() -> Rendered:
            use = params.use_of(request, card)  # 0.2 s for 7 MB of tools
            options = _template_options(request, use, params.truncation(request, card))
            prompt = renderer.chat(_conversation(request, card), options)
            return Rendered(card, renderer, prompt, options, use)

        if request.chat_template is None:
            return await self.renderers.run(work, size)
        return await self.renderers.patiently(work)

    def _with_own_template(self, renderer: Renderer, template: str | None) -> Renderer:
        if template is None:
            return renderer
        if not self._trusts_templates:
            raise UnsupportedError(
                "chat_template is not taken from requests: the server would have to be started "
                "with --trust-request-chat-template.",
                param="chat_template",
            )
        return renderer.borrowing(template)

    def generator(self, name: str, caller: Caller) -> ModelCard:
        """The model that is to answer to a name.

        Raises ModelNotFoundError, NoWorkerError, and UnsupportedError for one that generates no
        text.
        """
        card = self.catalog.find(name, caller)
        if CAP_GENERATE not in card.capabilities:
            raise UnsupportedError(
                f"The model '{name}' makes embeddings; it does not generate text. "
                "Use /v1/embeddings.",
                param="model",
            )
        return card

    def run(
        self,
        request: GenerationRequest,
        jobs: Sequence[Job | TextJob],
        reading: Reading | TextReading,
        *,
        by_token: bool = False,
    ) -> Transcript:
        """The jobs' transcript; their work begins when it is entered."""
        options = params.output_options(request)
        return Transcript(
            self.backend.dispatcher,
            jobs,
            lambda: reading.output(options),
            include_stop=options.include_stop,
            by_token=by_token,
        )

    def answer(
        self,
        request: GenerationRequest,
        jobs: Sequence[Job | TextJob],
        reading: Reading | TextReading,
        writer: Writer,
    ) -> ASGIApp:
        """The answer to one HTTP request, whole or streamed, in the writer's dialect."""
        return self.written(request, self.run(request, jobs, reading), writer)

    def written(
        self,
        request: GenerationRequest,
        transcript: Transcript,
        writer: Writer,
        keeper: Keeper | None = None,
    ) -> ASGIApp:
        """A transcript as the answer to one HTTP request; a keeper gets it before the client."""
        if not request.stream:
            return WholeAnswer(transcript, writer, keeper)
        # Without any worker a 503 may be the answer, however late: then no status goes out before.
        early_s = transcript.early_s if self.backend.roster.ready else None
        open_streams = self.backend.telemetry.http.open_streams
        return StreamedAnswer(
            transcript,
            writer,
            open_streams,
            early_s,
            keeper,
            signs_are_events=self._signs_are_events,
        )


def allowed(request: R, card: ModelCard, caller: Caller) -> R:
    """The request as the name that it asks for lets it be, answered by the model of this card."""
    alias = caller.route.alias if caller.route is not None else None
    return request if alias is None else bounded(request, alias, card, caller.headers)


def room(card: ModelCard, prompt: Sequence[int], param: str) -> int:
    """How many tokens the context leaves behind the prompt."""
    if not prompt:
        raise InvalidRequestError(f"{param} gives no token.", param=param)
    room = card.max_model_len - len(prompt)
    if room <= 0:
        raise context_length_error(len(prompt), card.max_model_len, param)
    return room


def new_job(
    request_id: str,
    request: GenerationRequest,
    card: ModelCard,
    prompt: list[int],
    sampling: SamplingParams,
    caller: Caller,
    *,
    n: int | None = None,
) -> Job:
    """`n` sequences, or as many as the request asks for."""
    return Job(
        request_id=request_id,
        card=card,
        prompt=prompt,
        sampling=sampling,
        n=n or request.n or 1,
        cache_salt=caller.cache_salt + params.cache_salt(request),
        team=caller.team,
        weight=caller.weight,
        priority=caller.priority(request.priority or 0),
        toll=caller.toll(request.model, card.name),
    )


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(16)}"


def _template_options(
    request: ChatRequest, use: ToolUse | None, truncation: Truncation | None
) -> TemplateOptions:
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
        kwargs={**_manner(request), **kwargs},
        tools=use.described() if use else [],
        documents=_documents(request),
        add_special_tokens=bool(request.add_special_tokens),
        truncation=truncation,
    )


def _manner(request: ChatRequest) -> dict[str, Json]:
    """How long to answer and how hard to think, by the names that templates know."""
    manner: dict[str, Json] = {}
    if request.verbosity is not None:
        manner["verbosity"] = request.verbosity
    effort, thinks = request.reasoning_effort, request.enable_thinking
    if effort is not None:
        manner["reasoning_effort"] = effort
        thinks = effort != "none" if thinks is None else thinks
    return manner if thinks is None else manner | {"enable_thinking": thinks, "thinking": thinks}


def _documents(request: ChatRequest) -> list[Json]:
    documents = request.documents or []
    if len(documents) > MAX_DOCUMENTS:
        raise InvalidRequestError(
            f"documents may hold at most {MAX_DOCUMENTS} documents.", param="documents"
        )
    if not is_flat(documents, MAX_DOCUMENT_DEPTH):
        raise InvalidRequestError(
            f"documents must not be nested deeper than {MAX_DOCUMENT_DEPTH}.", param="documents"
        )
    return cast("list[Json]", documents)


def _conversation(request: ChatRequest, card: ModelCard) -> list[Message]:
    """The messages for the template, unless they are too many: each takes a token at least."""
    number = len(request.messages)
    if number >= card.max_model_len:
        raise context_length_error(number, card.max_model_len, "messages", counted=False)
    return conversation(request.messages)
