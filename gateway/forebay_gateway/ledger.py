"""What a client has had of a job, and which replies are new to it. Pure: no clock, no bus.

Replies may be repeated (a packet is sent again when a connection broke), overlap or be missing (a
stream was lost). A book passes on each event once and in order, and says when it cannot.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec
from forebay_shared.telemetry import ResubmitReason
from forebay_shared.wire import (
    Accepted,
    Delta,
    Done,
    Embedded,
    Failed,
    PromptLogprobs,
    Reply,
    SequenceStart,
    Started,
    TextDelta,
    pack_ids,
)

Event = Started | PromptLogprobs | Delta | TextDelta | Done
_Piece = Delta | TextDelta | PromptLogprobs
_PIECES = (Delta, TextDelta, PromptLogprobs)

E = TypeVar("E")


class Book(ABC, Generic[E]):
    """What came of a job so far, over all its attempts.

    `begun` once anything ran; `repeated` counts the replies that were dropped as old. Of the
    current attempt: `accepted`; `alone`, nothing runs beside it; `lost`, why it must be made again;
    `failed`, how the worker gave it up.
    """

    __slots__ = ("accepted", "alone", "begun", "failed", "lost", "repeated")

    def __init__(self) -> None:
        self.begun = False
        self.repeated = 0
        self.begin()

    def begin(self) -> None:
        """A new attempt."""
        self.accepted = False
        self.alone = False
        self.lost: ResubmitReason | None = None
        self.failed: Failed | None = None

    @property
    @abstractmethod
    def open(self) -> bool:
        """Its last event has not come."""

    def accept(self, reply: Accepted) -> None:
        self.accepted, self.alone = True, reply.alone

    @abstractmethod
    def fold(self, replies: Sequence[Reply]) -> list[E]:
        """The new events of the current attempt. Nothing passes once something is missing."""

    @abstractmethod
    def clear(self) -> None:
        """Nothing of it is wanted any more."""


class _Track:
    """A sequence that has not ended."""

    __slots__ = ("started",)

    def __init__(self) -> None:
        self.started = False


T = TypeVar("T", bound=_Track)


class Sequences(Book[Event], Generic[T]):
    """The sequences of a job by index, and their beginnings and ends."""

    __slots__ = ("_open",)

    def __init__(self, tracks: Iterable[T]) -> None:
        super().__init__()
        self._open = dict(enumerate(tracks))

    @abstractmethod
    def _take(self, piece: _Piece, events: list[Event]) -> None:
        """Adds what is new of a piece; one of a kind that was not asked for is passed over."""

    @property
    def open(self) -> bool:
        """Some sequence has not ended."""
        return bool(self._open)

    def drop(self, index: int) -> bool:
        """Takes a sequence out; False when it had ended."""
        return self._open.pop(index, None) is not None

    def clear(self) -> None:
        self._open.clear()

    def fold(self, replies: Sequence[Reply]) -> list[Event]:
        events: list[Event] = []
        for reply in replies:
            if self.lost is not None:
                break
            if isinstance(reply, _PIECES):
                self._take(reply, events)
            elif isinstance(reply, Accepted):
                self.accept(reply)
            elif isinstance(reply, Failed):
                self.failed = self.failed or reply  # what comes behind it is its echo
            elif isinstance(reply, Embedded):
                continue  # not asked for
            elif (track := self._open.get(reply.index)) is None:
                continue
            elif isinstance(reply, Done):
                self._done(reply, events)
            elif not track.started:
                self.begun = track.started = True
                events.append(reply)
        return events

    def _done(self, done: Done, events: list[Event]) -> None:
        if done.finish_reason == "abort":
            # Nobody here asked for it: the worker took this gateway for dead.
            self.lost = "failed"
        else:
            del self._open[done.index]
            events.append(done)


class _Tokens(_Track):
    __slots__ = ("emitted",)

    def __init__(self) -> None:
        super().__init__()
        self.emitted: list[int] = []


class Ledger(Sequences[_Tokens]):
    """The `n` sequences of a job in token ids, which another worker can go on with.

    `scored` counts the prompt tokens whose log-probabilities have come.
    """

    __slots__ = ("scored",)

    def __init__(self, n: int) -> None:
        super().__init__(_Tokens() for _ in range(n))
        self.scored = 0

    @property
    def told(self) -> bool:
        """Tokens of what is open have been passed on."""
        return any(track.emitted for track in self._open.values())

    def starts(self) -> tuple[SequenceStart, ...]:
        """The sequences to generate in the next attempt, each with what it has emitted."""
        return tuple(
            SequenceStart(index, pack_ids(track.emitted)) for index, track in self._open.items()
        )

    def _take(self, piece: _Piece, events: list[Event]) -> None:
        if isinstance(piece, Delta):
            self._delta(piece, events)
        elif isinstance(piece, PromptLogprobs):
            self._scores(piece, events)

    def _delta(self, delta: Delta, events: list[Event]) -> None:
        track = self._open.get(delta.index)
        if track is None:
            return
        emitted = track.emitted
        known = len(emitted) - delta.offset
        if known < 0:
            self.lost = "gap"
            return
        if known > 0:
            if known >= len(delta.token_ids):
                self.repeated += 1
                return
            delta = msgspec.structs.replace(
                delta,
                offset=len(emitted),
                token_ids=delta.token_ids[known:],
                logprobs=None if delta.logprobs is None else delta.logprobs[known:],
            )
        emitted.extend(delta.token_ids)
        events.append(delta)

    def _scores(self, scores: PromptLogprobs, events: list[Event]) -> None:
        known = self.scored + 1 - scores.offset
        if known < 0:
            self.lost = "gap"
        elif known < len(scores.entries):
            entries = scores.entries[known:]
            scores = msgspec.structs.replace(scores, offset=self.scored + 1, entries=entries)
            self.scored += len(entries)
            events.append(scores)


class _Text(_Track):
    __slots__ = ("deltas",)

    def __init__(self) -> None:
        super().__init__()
        self.deltas = 0


class TextLedger(Sequences[_Text]):
    """The `n` answers of a job as text, which nobody can go on with.

    `told`: some of the text has been passed on, or an answer's end.
    """

    __slots__ = ("told",)

    def __init__(self, n: int) -> None:
        super().__init__(_Text() for _ in range(n))
        self.told = False

    def indexes(self) -> tuple[int, ...]:
        """The answers that have not ended."""
        return tuple(self._open)

    def fold(self, replies: Sequence[Reply]) -> list[Event]:
        events = super().fold(replies)
        self.told = self.told or not all(isinstance(event, Started) for event in events)
        return events

    def _take(self, piece: _Piece, events: list[Event]) -> None:
        if not isinstance(piece, TextDelta) or (track := self._open.get(piece.index)) is None:
            return
        if piece.offset > track.deltas:
            self.lost = "gap"
        elif piece.offset < track.deltas:
            self.repeated += 1
        else:
            track.deltas += 1
            events.append(piece)
