"""The JSON of the OpenAI dialect's answers, whole and in chunks.

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
from forebay_gateway.api.openai import chat_parts
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
        """JSON for the tokens of this update."""
        ...

    def collect(self, update: Update) -> None:
        """Keeps the tokens of this update for `whole`; a stream has no use for that."""
        ...

    def whole(self) -> bytes:
        """JSON for all tokens that were collected."""
        ...


class Shape(ABC):
    """What chat and text completions have in common: an `answers.Writer` of one answer.

    `echoes` holds the text that goes in front of each choice: its prompt, when that was asked for.
    """

    chunk_object: ClassVar[str]
    whole_object: ClassVar[str]

    def __init__(
        self,
        identity: Identity,
        *,
        usage_fields: UsageFields = UsageFields.NEVER,
        logprobs: Sequence[LogprobsWriter] = (),
        echoes: Sequence[str] = (),
    ) -> None:
        self._identity = identity
        self._logprobs = logprobs
        self._echoes = echoes
        self._usage_fields = usage_fields
        self._head = b"data: " + self._opening(self.chunk_object) + b',"choices":['
        self._tail = b"]}\n\n" if usage_fields is UsageFields.NEVER else b'],"usage":null}\n\n'

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

    def opening(self, size: int, usage: Usage) -> bytes:
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

        The first one has the log-probabilities of all of the update's tokens.
        """
        events = b""
        deltas = self._deltas(update)
        logprobs = b"null"
        if self._logprobs and update.token_ids:
            logprobs = self._logprobs[update.index].chunk(update)
            deltas = deltas or [self._delta("")]
        for delta in deltas:
            events += self._event(update.index, delta, logprobs, b"null", usage)
            logprobs = b"null"
        if update.reason is not None:
            reason = b'"%b"' % update.reason.encode()
            events += self._event(update.index, self._empty(), b"null", reason, usage)
        return events

    def _event(
        self, index: int, delta: bytes, logprobs: bytes, reason: bytes, usage: Usage | None
    ) -> bytes:
        tail = self._tail if usage is None else b'],"usage":%b}\n\n' % _usage(usage)
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._head,
            index,
            delta,
            logprobs,
            reason,
            tail,
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
            b'{"index":%d,%b,"logprobs":%b,"finish_reason":"%b"}'
            % (
                index,
                self._message(index, answer),
                self._logprobs[index].whole() if self._logprobs else b"null",
                reason.encode(),
            )
            for index, (answer, reason) in enumerate(zip(answers, reasons, strict=True))
        )
        return b'%b,"choices":[%b],"usage":%b}' % (
            self._opening(self.whole_object),
            choices,
            _usage(usage),
        )

    def collect(self, update: Update) -> None:
        """Keeps an update's log-probabilities for `whole`."""
        if self._logprobs and update.token_ids:
            self._logprobs[update.index].collect(update)


class ChatShape(Shape):
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def _first(self, index: int, usage: Usage | None) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""}'
        return self._event(index, delta, b"null", b"null", usage)

    def _delta(self, text: str) -> bytes:
        return b'"delta":{"content":%b}' % _encode(text)

    def _empty(self) -> bytes:
        return b'"delta":{}'

    def _deltas(self, update: Update) -> list[bytes]:
        if not update.parts:
            return super()._deltas(update)
        deltas = [chat_parts.delta(part) for part in update.parts]
        return [b'"delta":%b' % delta for delta in deltas if delta]

    def _message(self, index: int, answer: Collected) -> bytes:
        return b'"message":%b' % chat_parts.message(answer)


class CompletionShape(Shape):
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def _first(self, index: int, usage: Usage | None) -> bytes:
        if not self._echoes:
            return b""
        return self._event(index, self._delta(self._echoes[index]), b"null", b"null", usage)

    def _delta(self, text: str) -> bytes:
        return b'"text":%b' % _encode(text)

    def _empty(self) -> bytes:
        return b'"text":""'

    def _message(self, index: int, answer: Collected) -> bytes:
        text = answer.text
        return self._delta(self._echoes[index] + text if self._echoes else text)


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
