"""What a client has had of each sequence, and which replies are new to it. Pure: no clock, no bus.

Replies may be repeated (a packet is sent again when a connection broke), overlap or be missing (a
stream was lost). The ledger passes on each token once and in order, and says when it cannot.
"""

from collections.abc import Sequence

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


class _Track:
    __slots__ = ("emitted", "started")

    def __init__(self) -> None:
        self.emitted: list[int] = []
        self.started = False


class Ledger:
    """The `n` sequences of a job over all its attempts.

    `begun` once anything ran. Of the current attempt: `accepted`; `lost`, why it must be made
    again; `failed`, how the worker gave it up. `repeated` counts the deltas that were dropped as
    old, `scored` the prompt tokens whose log-probabilities have come.
    """

    __slots__ = ("_open", "accepted", "begun", "failed", "lost", "repeated", "scored")

    def __init__(self, n: int) -> None:
        self._open = {index: _Track() for index in range(n)}
        self.begun = False
        self.repeated = self.scored = 0
        self.begin()

    def begin(self) -> None:
        """A new attempt."""
        self.accepted = False
        self.lost: ResubmitReason | None = None
        self.failed: Failed | None = None

    @property
    def told(self) -> bool:
        """Tokens of what is open have been passed on."""
        return any(track.emitted for track in self._open.values())

    @property
    def open(self) -> bool:
        """Some sequence has not ended."""
        return bool(self._open)

    def starts(self) -> tuple[SequenceStart, ...]:
        """The sequences to generate in the next attempt, each with what it has emitted."""
        return tuple(
            SequenceStart(index, pack_ids(track.emitted)) for index, track in self._open.items()
        )

    def drop(self, index: int) -> bool:
        """Takes a sequence out; False when it had ended."""
        return self._open.pop(index, None) is not None

    def clear(self) -> None:
        self._open.clear()

    def fold(self, replies: Sequence[Reply]) -> list[Event]:
        """The new events of the current attempt. Nothing passes once something is missing."""
        events: list[Event] = []
        for reply in replies:
            if self.lost is not None:
                break
            if isinstance(reply, Delta):
                self._delta(reply, events)
            elif isinstance(reply, Accepted):
                self.accepted = True
            elif isinstance(reply, Failed):
                self.failed = self.failed or reply  # what comes behind it is its echo
            elif isinstance(reply, PromptLogprobs):
                self._scores(reply, events)
            elif isinstance(reply, Embedded | TextDelta):
                continue  # not asked for
            elif (track := self._open.get(reply.index)) is None:
                continue
            elif isinstance(reply, Done):
                self._done(reply, events)
            elif not track.started:
                self.begun = track.started = True
                events.append(reply)
        return events

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

    def _done(self, done: Done, events: list[Event]) -> None:
        if done.finish_reason == "abort":
            # Nobody here asked for it: the worker took this gateway for dead.
            self.lost = "failed"
        else:
            del self._open[done.index]
            events.append(done)
