"""From the jobs of one request to the text of its choices, as it comes.

One request has one job per prompt and n choices per job; indexes run over prompts times n.
It knows no JSON and no HTTP.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Literal, Self

import msgspec
from forebay_shared.errors import EngineError
from forebay_shared.wire import Delta, Done, PromptLogprobs, Started, TextDelta, TokenLogprobs
from forebay_shared.wire import Usage as Spent
from msgspec.structs import replace

from forebay_gateway.api.ports import Dispatch, Running
from forebay_gateway.bounded import Bounded
from forebay_gateway.jobs import Job, TextJob
from forebay_gateway.ledger import Event
from forebay_gateway.output import Output
from forebay_gateway.parts import Part
from forebay_gateway.relayed import Relayed
from forebay_gateway.speech import Speech

FinishReason = Literal["stop", "length", "tool_calls"]


Voice = Output | Speech | Relayed
"""The text of one choice, from what its engine speaks: ids or text."""

EARLY_S = 0.25
"""How long a stream waits for the engine's first word before its status goes out.

Errors within this time (no worker, queue full, refused) are plain JSON with their own status; after
it the client gets its role chunk, so that no watchdog fires while the request queues.
"""
EARLY_TEXT_S = 5.0
"""The same for an engine that speaks text: what is behind it may be far, and refuse."""
UNTAKEN_S = 8.0
"""The same while a job has no place in a worker's queue, which may be full: longer than a gateway
waits for a worker (6 s), or for one to answer (4 s)."""

_News = tuple[int, list[Event] | Exception]
_NEWS_LIMIT = 256


class Update(msgspec.Struct, gc=False):
    """What one choice got, the tokens behind it, and the reason when it is at its end.

    It got `text`, or `parts` where an answer may hold more than text. `stop` is the stop string
    that ended it, when one did, and `hidden` what of the last token's text belongs to that;
    `stop_token` is the id that ended it, which is not among `token_ids`, and `stop_asked` says that
    it is one of the client's `stop_token_ids`.
    When log-probabilities of the prompt were asked for, the choice's first update has all of them,
    from the prompt's second token on.
    """

    index: int
    text: str
    parts: Sequence[Part] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    reason: FinishReason | None = None
    stop: str | None = None
    hidden: str = ""
    stop_token: int | None = None
    stop_asked: bool = False
    prompt_logprobs: Sequence[TokenLogprobs] | None = None


class Usage(msgspec.Struct, gc=False):
    """Tokens of a whole request. A prompt counts once, whatever n is.

    `reasoning_tokens` is None where no thinking is told from the answer.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None


class _Choice:
    __slots__ = ("_entries", "_ids", "_listed", "completion_tokens", "ended", "output")

    def __init__(self, output: Voice) -> None:
        self.output = output
        self.ended = False
        self.completion_tokens = 0
        self._listed = 0
        self._ids: list[int] = []
        self._entries: list[TokenLogprobs] = []

    def listed(
        self, shown: int, token_ids: Sequence[int] = (), entries: Sequence[TokenLogprobs] = ()
    ) -> tuple[Sequence[int], Sequence[TokenLogprobs]]:
        """Of these tokens and of those that wait the ones that are to be listed now, since `shown`
        are in all."""
        number = shown - self._listed
        if not self._ids and number == len(token_ids):
            self._listed = shown
            return token_ids, entries
        self._ids += token_ids
        self._entries += entries
        ready = self._ids[:number], self._entries[:number]
        del self._ids[:number], self._entries[:number]
        self._listed += len(ready[0])
        return ready


class _Scores:
    """The log-probabilities of one job's prompt. Other sequences than the one that computes them
    may be ahead of it, so what they say waits until all is there."""

    def __init__(self, wanted: int, choices: range) -> None:
        self.entries: list[TokenLogprobs] = []
        self._wanted = wanted
        self._choices = choices
        self._waiting: list[Update] = []

    @classmethod
    def of(cls, job: Job | TextJob, first: int) -> "_Scores | None":
        """None when the job asks for none; `first` is the index of its first choice."""
        if job.sampling.prompt_logprobs is None:
            return None
        return cls(len(job.prompt) - 1, range(first, first + job.n))

    def first(self, updates: list[Update]) -> list[Update]:
        """The updates that may go out, behind those of the prompt."""
        if not self._choices:
            return updates
        self._waiting += updates
        if len(self.entries) < self._wanted:
            return []
        of_prompt = [Update(index, "", prompt_logprobs=self.entries) for index in self._choices]
        self._choices = range(0)
        return of_prompt + self._waiting


class Transcript:
    """A request in work. Use it as an async context manager; leaving it cancels what still runs.

    `done` is true when every choice has its finish reason.
    """

    def __init__(
        self,
        dispatcher: Dispatch,
        jobs: Sequence[Job | TextJob],
        new_output: Callable[[], Voice],
        *,
        include_stop: bool = False,
        by_token: bool = False,
    ) -> None:
        self._jobs = jobs
        self._n = jobs[0].n
        self._include_stop = include_stop
        self._by_token = by_token
        self._generations = [dispatcher.generate(job) for job in jobs]
        self._choices = [_Choice(new_output()) for _ in range(self._n * len(jobs))]
        self._prompts = [job.prompt_tokens for job in jobs]
        self._cached = [0] * len(jobs)
        self._scores = [_Scores.of(job, number * self._n) for number, job in enumerate(jobs)]
        self._open = len(self._choices)
        self._news: asyncio.Queue[_News] = asyncio.Queue(_NEWS_LIMIT)
        self._pumps: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            for generation in self._generations:
                await self._stack.enter_async_context(generation)
        except BaseException:
            await self._stack.aclose()
            raise
        if len(self._generations) > 1:
            self._pumps = [
                asyncio.create_task(self._pump(number), name=f"prompt-{number}")
                for number in range(len(self._generations))
            ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pump in self._pumps:
            pump.cancel()
        self._tell_thinking()
        await self._stack.__aexit__(kind, error, trace)

    @property
    def early_s(self) -> float:
        """How long a stream may wait for a first word, or a refusal."""
        return EARLY_TEXT_S if isinstance(self._jobs[0], TextJob) else EARLY_S

    @property
    def taken(self) -> bool:
        """Every job has its place in a worker's queue."""
        return all(generation.taken for generation in self._generations)

    @property
    def size(self) -> int:
        """How many choices there are."""
        return len(self._choices)

    @property
    def done(self) -> bool:
        return self._open == 0

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(self._prompts),
            completion_tokens=sum(choice.completion_tokens for choice in self._choices),
            cached_tokens=sum(self._cached),
            reasoning_tokens=self._reasoning_tokens,
        )

    @property
    def _reasoning_tokens(self) -> int | None:
        counts = [
            output.reasoning_tokens
            for output in (choice.output for choice in self._choices)
            if isinstance(output, Bounded) and output.reasoning_tokens is not None
        ]
        return sum(counts) if counts else None

    async def advance(self) -> list[Update]:
        """Waits, then returns all that is ready together; may be empty. Raises ForebayError."""
        if not self._pumps:
            return self._updates(0, await self._generations[0].events())
        news = [await self._news.get()]
        while not self._news.empty():
            news.append(self._news.get_nowait())
        updates: list[Update] = []
        for number, events in news:
            if isinstance(events, Exception):
                raise events
            updates += self._updates(number, events)
        return updates

    async def _pump(self, number: int) -> None:
        """Carries what one of several jobs says, and how it fails, to the common queue."""
        generation = self._generations[number]
        try:
            while self._is_open(number):
                await self._news.put((number, await generation.events()))
        except Exception as error:
            await self._news.put((number, error))

    def _is_open(self, number: int) -> bool:
        first = number * self._n
        return not all(choice.ended for choice in self._choices[first : first + self._n])

    def _updates(self, number: int, events: list[Event]) -> list[Update]:
        if not events and self._is_open(number):
            raise EngineError("The engine ended the request before its answer was complete.")
        generation, scores = self._generations[number], self._scores[number]
        updates: list[Update] = []
        for event in events:
            if isinstance(event, Started):
                if event.index == 0:
                    self._cached[number] = event.cached_tokens
                continue
            if isinstance(event, PromptLogprobs):
                if scores is not None:
                    scores.entries += event.entries
                continue
            index = number * self._n + event.index
            choice = self._choices[index]
            if choice.ended:
                continue
            if isinstance(event, Delta):
                updates.extend(
                    self._delta(index, choice, delta, generation)
                    for delta in (_singles(event) if self._by_token else (event,))
                    if not choice.ended
                )
            elif isinstance(event, TextDelta):
                updates.append(self._told(index, choice, event, generation))
            else:
                updates.append(self._end(index, choice, event))
        return updates if scores is None else scores.first(updates)

    def _delta(self, index: int, choice: _Choice, event: Delta, generation: Running) -> Update:
        output = choice.output
        assert not isinstance(output, Relayed)
        before = output.tokens
        update = _heard(index, output.push(event.token_ids))
        choice.completion_tokens = output.tokens
        consumed = output.tokens - before
        update.token_ids, update.logprobs = choice.listed(
            output.shown, event.token_ids[:consumed], (event.logprobs or ())[:consumed]
        )
        if output.stopped:
            update.hidden = output.hidden
            generation.stop(event.index)
            self._close(choice, update, "stop")
        return update

    def _told(self, index: int, choice: _Choice, event: TextDelta, generation: Running) -> Update:
        """Text from an engine that speaks text; what it cost only the engine can tell."""
        output = choice.output
        assert isinstance(output, Relayed)
        update = _heard(index, output.hear(event))
        update.token_ids, update.logprobs = output.words.numbered(event)
        if event.usage is None:
            choice.completion_tokens = output.tokens
        else:
            self._spend(index, choice, output, event.usage)
        if output.stopped:
            generation.stop(event.index)
            self._close(choice, update, "stop")
        return update

    def _spend(self, index: int, choice: _Choice, output: Relayed, usage: Spent) -> None:
        """Takes what a text cost, as its engine tells it."""
        number = index // self._n
        self._prompts[number] = usage.prompt_tokens
        self._cached[number] = usage.cached_tokens
        choice.completion_tokens = usage.completion_tokens
        output.reasoning_tokens = usage.reasoning_tokens

    def _end(self, index: int, choice: _Choice, event: Done) -> Update:
        if event.finish_reason == "abort":
            raise EngineError("The engine aborted the request.")
        output = choice.output
        sampling = self._jobs[index // self._n].sampling
        asked = event.stop_token in sampling.stop_token_ids
        last: list[int] = []
        if self._include_stop and asked and event.stop_token is not None:
            last.append(event.stop_token)
        if isinstance(output, Relayed):
            update = _heard(index, output.finish())
            self._spend(index, choice, output, event.usage)
        else:
            update = _heard(index, output.push(last), output.finish())
            update.token_ids, update.logprobs = choice.listed(output.shown)
            update.hidden = output.hidden
            choice.completion_tokens = max(event.usage.completion_tokens, output.tokens)
        update.stop_token, update.stop_asked = event.stop_token, asked
        # A call that ends because nothing follows may be cut off: that is no stop of its own.
        stopped = output.stopped and output.stop is not None
        self._close(choice, update, "stop" if stopped else event.finish_reason)
        return update

    def _close(self, choice: _Choice, update: Update, reason: FinishReason) -> None:
        update.stop = choice.output.stop
        called = isinstance(choice.output, Bounded) and choice.output.calls > 0
        update.reason = "tool_calls" if called and reason == "stop" else reason
        choice.ended = True
        self._open -= 1
        self._tell_thinking()

    def _tell_thinking(self) -> None:
        """Thinking is told from the answer only where there is one prompt."""
        tokens = self._reasoning_tokens
        if tokens is not None and len(self._generations) == 1:
            self._generations[0].reasoned(tokens)


def _singles(event: Delta) -> Iterator[Delta]:
    """The same tokens, one at a time."""
    for position, token_id in enumerate(event.token_ids):
        logprobs = event.logprobs[position : position + 1] if event.logprobs else None
        yield replace(event, token_ids=[token_id], logprobs=logprobs)


def _heard(index: int, *said: str | list[Part]) -> Update:
    texts = [each for each in said if isinstance(each, str)]
    parts = [part for each in said if isinstance(each, list) for part in each]
    return Update(index, "".join(texts), parts)
