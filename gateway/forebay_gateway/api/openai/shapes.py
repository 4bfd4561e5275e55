"""What the JSON of all generated answers in the OpenAI dialect has in common, whole and in chunks.

A chunk is a constant head, the new text and a constant tail; only the text is encoded per event.
It knows no bus, no tokenizer and no HTTP.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import ClassVar, Protocol

import msgspec
from forebay_shared.errors import ForebayError

from forebay_gateway.api import sse
from forebay_gateway.api.transcript import FinishReason, Update, Usage
from forebay_gateway.parts import Collected

_encode = msgspec.json.Encoder().encode


class Identity(msgspec.Struct, frozen=True):
    """What every chunk of one answer repeats. `created` is in seconds."""

    id: str
    created: int
    model: str


class UsageFields(Enum):
    """Which events of a stream carry usage: none, one of their own at the end, or every one."""

    NEVER = 0
    LAST = 1
    ALWAYS = 2


class LogprobsWriter(Protocol):
    """The log-probabilities of one choice, in a dialect's form."""

    def chunk(self, update: Update) -> bytes:
        """JSON for the tokens of this update that are complete; null without any."""
        ...

    def collect(self, update: Update) -> None:
        """Keeps the tokens of this update for `whole`; a stream has no use for that."""
        ...

    def whole(self) -> bytes:
        """JSON for all tokens that were collected."""
        ...


class TokenIds:
    """The ids behind the choices of an answer, under vLLM's names, for whoever asks for them."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        """`prompts` has one for each choice."""
        self._prompts = prompts
        self._outputs: list[list[int]] = [[] for _ in prompts]

    def prompt(self, index: int) -> bytes:
        """A member: the prompt's ids."""
        return b',"prompt_token_ids":%b' % _encode(self._prompts[index])

    def chunk(self, update: Update) -> bytes:
        """A member of a chunk's choice: what came, without what ended it."""
        return b',"token_ids":%b' % _encode(update.token_ids)

    def end(self, update: Update) -> bytes:
        """A member of the last chunk's choice: what ended it."""
        ids = [] if update.stop_token is None else [update.stop_token]
        return b',"token_ids":%b' % _encode(ids)

    def collect(self, update: Update) -> None:
        output = self._outputs[update.index]
        output += update.token_ids
        if update.stop_token is not None:
            output.append(update.stop_token)

    def whole(self, index: int) -> bytes:
        """A member of a choice: all that came, with what ended it."""
        return b',"token_ids":%b' % _encode(self._outputs[index])


class PromptWriter(Protocol):
    """The log-probabilities of the prompts themselves."""

    def collect(self, update: Update) -> None:
        """Keeps what an update says of its choice's prompt."""
        ...

    def whole(self, index: int) -> bytes:
        """A member: those of one choice's prompt."""
        ...


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer holds beside its text, as the request asked."""

    usage_fields: UsageFields = UsageFields.NEVER
    logprobs: Sequence[LogprobsWriter] = ()
    """One writer for each choice, or none."""
    prompt_scores: PromptWriter | None = None
    token_ids: TokenIds | None = None


class Shape(ABC):
    """What chat and text completions have in common: an `answers.Writer` of one answer."""

    chunk_object: ClassVar[str]
    whole_object: ClassVar[str]

    def __init__(self, identity: Identity, extras: Extras) -> None:
        self._identity = identity
        self._logprobs = extras.logprobs
        self._prompt_scores = extras.prompt_scores
        self._token_ids = extras.token_ids
        self._usage_fields = extras.usage_fields
        self._stops: dict[int, bytes] = {}
        self._open: set[int] = set()
        """The choices of a stream that have not ended."""
        self._head = b"data: " + self._opening(self.chunk_object) + b',"choices":['
        plain = extras.usage_fields is UsageFields.NEVER
        self._no_usage = b"" if plain else b',"usage":null'

    def _opening(self, object_: str) -> bytes:
        identity = self._identity
        return b'{"id":%b,"object":"%b","created":%d,"model":%b' % (
            _encode(identity.id),
            object_.encode(),
            identity.created,
            _encode(identity.model),
        )

    @property
    def running_usage(self) -> bool:
        return self._usage_fields is UsageFields.ALWAYS

    def sign_of_life(self, *, as_event: bool) -> bytes:
        """As an event: no text for a choice that has not ended."""
        if not (as_event and self._open):
            return sse.COMMENT
        return self._event(min(self._open), self._empty(), b"null", b"null", None)

    def opening(self, size: int, usage: Usage) -> bytes:
        self._open.update(range(size))
        shown = usage if self.running_usage else None
        return b"".join([self._first(index, shown) for index in range(size)])

    @abstractmethod
    def _first(self, index: int, usage: Usage | None) -> bytes:
        """The event that comes before any token of a choice, if there is one."""

    @abstractmethod
    def _delta(self, text: str) -> bytes:
        """A member of a chunk's choice: new text."""

    @abstractmethod
    def _empty(self) -> bytes:
        """A member of a chunk's choice: no text, for the last one."""

    @abstractmethod
    def _message(self, index: int, answer: Collected) -> bytes:
        """A member of a whole answer's choice: all of it."""

    def _deltas(self, update: Update) -> list[bytes]:
        """Members of chunks' choices: what came."""
        return [self._delta(update.text)] if update.text else []

    def events(self, update: Update, usage: Usage | None) -> bytes:
        """The events of one update: what came, then its end; each with `usage` when it is given.

        The first one has the log-probabilities, and the ids, of all of the update's tokens.
        """
        events = b""
        deltas = self._deltas(update)
        logprobs, extra = b"null", b""
        if self._logprobs:
            logprobs = self._logprobs[update.index].chunk(update)
        if self._token_ids is not None and update.token_ids:
            extra = self._token_ids.chunk(update)
        if not deltas and (extra or logprobs != b"null"):
            deltas = [self._delta("")]
        for delta in deltas:
            events += self._event(update.index, delta, logprobs, b"null", usage, extra)
            logprobs, extra = b"null", b""
        if update.reason is not None:
            reason = b'"%b"' % self._reason(update.reason)
            extra = b',"stop_reason":%b' % _stop_reason(update)
            if self._token_ids is not None:
                extra += self._token_ids.end(update)
            self._open.discard(update.index)
            events += self._event(update.index, self._empty(), b"null", reason, usage, extra)
        return events

    def _reason(self, reason: FinishReason) -> bytes:
        return reason.encode()

    def _event(
        self,
        index: int,
        delta: bytes,
        logprobs: bytes,
        reason: bytes,
        usage: Usage | None,
        extra: bytes = b"",
        top: bytes = b"",
    ) -> bytes:
        """`extra` are further members of the choice, `top` of the chunk."""
        tail = self._no_usage if usage is None else b',"usage":%b' % _usage(usage)
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b}]%b%b}\n\n' % (
            self._head,
            index,
            delta,
            logprobs,
            reason,
            extra,
            tail,
            top,
        )

    def closing(self, usage: Usage) -> bytes:
        if self._usage_fields is UsageFields.NEVER:
            return sse.DONE
        return self._head + b'],"usage":' + _usage(usage) + b"}\n\n" + sse.DONE

    def failure(self, error: ForebayError) -> bytes:
        return sse.failure(error)

    def whole(
        self, answers: Sequence[Collected], reasons: Sequence[FinishReason], usage: Usage
    ) -> bytes:
        """The answer of a request that is not streamed."""
        choices = b",".join(
            b'{"index":%d,%b,"logprobs":%b,"finish_reason":"%b","stop_reason":%b%b}'
            % (
                place,
                self._message(index, answers[index]),
                self._logprobs[index].whole() if self._logprobs else b"null",
                self._reason(reasons[index]),
                self._stops[index],
                self._extra(index),
            )
            for place, index in enumerate(self._chosen(len(answers)))
        )
        return b'%b,"choices":[%b],"usage":%b%b}' % (
            self._opening(self.whole_object),
            choices,
            _usage(usage),
            self._end(),
        )

    def _chosen(self, size: int) -> Sequence[int]:
        """Which choices the client gets, of `size`."""
        return range(size)

    def _extra(self, index: int) -> bytes:
        """Further members of a whole answer's choice."""
        return b"" if self._token_ids is None else self._token_ids.whole(index)

    def _end(self) -> bytes:
        """Further members of a whole answer."""
        return b""

    def collect(self, update: Update) -> None:
        """Keeps an update's log-probabilities, its ids and what ended it, for `whole`."""
        if update.reason is not None:
            self._stops[update.index] = _stop_reason(update)
        if self._logprobs:
            self._logprobs[update.index].collect(update)
        if self._prompt_scores is not None:
            self._prompt_scores.collect(update)
        if self._token_ids is not None:
            self._token_ids.collect(update)


def _stop_reason(update: Update) -> bytes:
    """JSON of what the client named and what ended the answer: a stop string or an id, or null."""
    return _encode(update.stop_token if update.stop is None and update.stop_asked else update.stop)


def _usage(usage: Usage) -> bytes:
    details = b""
    if usage.reasoning_tokens is not None:
        details = b',"completion_tokens_details":{"reasoning_tokens":%d}' % usage.reasoning_tokens
    return (
        b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":%d}%b}'
        % (
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.prompt_tokens + usage.completion_tokens,
            usage.cached_tokens,
            details,
        )
    )
