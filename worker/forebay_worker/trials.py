"""Trials: a request under which workers were lost is begun alone, so that nobody is lost with it.

It stands between the service and the engine. A suspect waits until the engine has nothing else:
what can go on elsewhere is handed over, the rest ends by itself. Its gateway is told that it runs
alone before it does, and that it does no longer before anybody else may run: so when this worker is
lost, its gateway knows whether it can be another's fault. What comes meanwhile is held.

It knows tasks and replies; it knows no engine, no Redis and no clock but the loop's.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from forebay_shared.wire import Delta, Done, Embedded, Failed, Reply, Task, TextDelta

TRIAL_TOKENS = 8
"""With so many, or its end, a suspect has been tried."""
WAIT_S = 10.0
"""So long a suspect waits for what cannot go on elsewhere; then it is begun beside it."""
LOOK_S = 60.0
"""A trial that takes longer goes on only while its step does: some wait for others' servers."""

Key = tuple[str, int]
_ENDS = (Done, Failed, Embedded)


class Way(Protocol):
    """What a trial asks of the service."""

    def begin(self, work: Task) -> None:
        """Gives it to the engine."""
        ...

    def cancel(self, work: Task, index: int | None) -> None:
        """Has the engine abort a sequence or all of it."""
        ...

    def movable(self, work: Task) -> bool:
        """Another worker can go on with it."""
        ...

    def hand_over(self, work: Task) -> None:
        """Has another worker go on with it; the engine aborts it."""
        ...

    def drop(self, work: Task) -> None:
        """Answers the cancel of what the engine has never had."""
        ...

    def tell(self, work: Task, alone: bool | None, then: Callable[[], None]) -> None:
        """Calls `then` when its gateway has all that was said, and this; None: nothing."""
        ...

    def step_age_s(self) -> float: ...


@dataclass(slots=True)
class _Inside:
    """What the engine has. `left`: sequences that have not ended."""

    work: Task
    left: int
    moved: bool = False


class Trials:
    """One worker's. All of it belongs to one event loop."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._inside: dict[Key, _Inside] = {}
        self._held: OrderedDict[Key, Task] = OrderedDict()
        self._cancels: defaultdict[Key, list[int]] = defaultdict(list)
        """Sequences of what is held that nobody wants any more."""
        self._suspect: Task | None = None
        self._stage: Literal["waits", "told", "runs", "over"] = "waits"
        self._tokens = 0
        self._moved = 0
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, work: Task) -> None:
        """Gives it to the engine, now or when its turn has come."""
        if self._suspect is None and not work.suspect:
            self._begin(work)
        else:
            self._held[_key(work)] = work
            self._advance()

    def heard(self, reply: Reply) -> bool:
        """Takes a reply of the engine, in order; False for what is nobody's any more."""
        ends = isinstance(reply, _ENDS)
        if not ends and not self._moved and self._suspect is None:
            return True
        inside = self._inside.get((reply.request_id, reply.attempt))
        if inside is None:
            return True
        if ends:
            inside.left = inside.left - 1 if isinstance(reply, Done) else 0
            if inside.left <= 0:
                self._ended(inside)
        elif inside.work is self._suspect and self._stage == "runs":
            self._count(reply)
        return not inside.moved

    def cancel(self, key: Key, index: int | None) -> bool:
        """False when the engine has it."""
        work = self._held.get(key) or self._waiting_suspect(key)
        if work is None:
            return False
        if index is not None:
            self._cancels[key].append(index)
            return True
        self._held.pop(key, None)
        self._cancels.pop(key, None)
        self._way.drop(work)
        if work is self._suspect:
            self._close(work)
        return True

    def cancel_gateway(self, gateway: str) -> None:
        """Drops what the engine has not had of a gateway that is gone or has given it up. There is
        nobody to be told of a trial of its, so nobody is waited for."""
        for key in [key for key, work in self._held.items() if work.gateway == gateway]:
            self.cancel(key, None)
        suspect = self._suspect
        if suspect is None or suspect.gateway != gateway:
            return
        if not self.cancel(_key(suspect), None):
            self._close(suspect)

    def _waiting_suspect(self, key: Key) -> Task | None:
        waits = self._stage in ("waits", "told")
        if self._suspect is None or not waits or _key(self._suspect) != key:
            return None
        return self._suspect

    def _begin(self, work: Task) -> None:
        key = _key(work)
        self._inside[key] = _Inside(work, work.num_sequences)
        self._way.begin(work)
        for index in self._cancels.pop(key, ()):
            self._way.cancel(work, index)

    def _advance(self) -> None:
        """Lets in what is held, up to the next suspect; that one when nothing else is inside."""
        while self._held and self._suspect is None:
            _, work = self._held.popitem(last=False)
            if not work.suspect:
                self._begin(work)
                continue
            self._suspect, self._stage, self._tokens = work, "waits", 0
            self._make_room()
            self._after(WAIT_S, partial(self._waited, work))
        if self._suspect is not None and self._stage == "waits" and not self._inside:
            self._stage = "told"
            self._way.tell(self._suspect, True, partial(self._run, self._suspect))

    def _make_room(self) -> None:
        for inside in list(self._inside.values()):
            if not inside.moved and self._way.movable(inside.work):
                inside.moved = True
                self._moved += 1
                self._way.hand_over(inside.work)

    def _waited(self, suspect: Task) -> None:
        """What is still there cannot go elsewhere, and takes long: it is no trial then."""
        if suspect is not self._suspect or self._stage != "waits":
            return
        if all(inside.moved for inside in self._inside.values()):  # they go when the step ends
            self._after(WAIT_S, partial(self._waited, suspect))
        else:
            self._begin(suspect)
            self._close(suspect)

    def _run(self, suspect: Task) -> None:
        if suspect is self._suspect and self._stage == "told":
            self._stage = "runs"
            self._after(LOOK_S, partial(self._look, suspect))
            self._begin(suspect)

    def _look(self, suspect: Task) -> None:
        if suspect is not self._suspect or self._stage != "runs":
            return
        if self._way.step_age_s() > LOOK_S / 2:
            self._after(LOOK_S, partial(self._look, suspect))
        else:
            self._over(suspect, False)

    def _count(self, reply: Reply) -> None:
        if isinstance(reply, Delta):
            self._tokens += len(reply.token_ids)
        elif isinstance(reply, TextDelta):
            self._tokens += 1
        if self._tokens >= TRIAL_TOKENS and self._suspect is not None:
            self._over(self._suspect, False)

    def _ended(self, inside: _Inside) -> None:
        del self._inside[_key(inside.work)]
        self._moved -= inside.moved
        if inside.work is self._suspect and self._stage == "runs":
            self._over(inside.work, None)
        elif self._suspect is not None:
            self._advance()

    def _over(self, suspect: Task, alone: bool | None) -> None:
        self._stage = "over"
        self._way.tell(suspect, alone, partial(self._close, suspect))

    def _close(self, suspect: Task) -> None:
        if suspect is not self._suspect:
            return
        self._suspect = None
        if self._timer is not None:
            self._timer.cancel()
        self._advance()

    def _after(self, seconds: float, function: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, function)


def _key(work: Task) -> Key:
    return work.request_id, work.attempt
