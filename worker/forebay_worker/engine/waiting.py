"""WaitingQueue: which sequence is next: by priority, then teams by what they have been served, then
by arrival; what has been preempted is the first of its team. Of teams served alike the one with
less here comes first: a newcomer starts level, and must not queue behind a flood.

It knows tokens served and weights; it knows nothing of blocks, budgets or why a sequence waits.
The counters are the virtual token counters of Sheng et al. (OSDI 2024): tokens over weight.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Standing = tuple[float, int]
"""Tokens over weight that a team has been charged for, and its sequences in the engine."""

_FORGET_ABOVE = 256
"""Idle teams remembered beside the present ones, before the settled ones are forgotten."""


class Waiter(Protocol):
    """What the queue reads of a sequence, or of another thing that waits for tokens."""

    num_served: int
    """Tokens that its team has been charged for."""

    @property
    def serial(self) -> int: ...
    @property
    def team(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def priority(self) -> int: ...
    @property
    def queued_tokens(self) -> int:
        """Tokens that it waits for; they change only while it is out of the queue."""
        ...


W = TypeVar("W", bound=Waiter)


@dataclass(slots=True)
class _Team:
    served: float
    present: int = 0
    """Its sequences in the engine, waiting or running."""


@dataclass(slots=True)
class _Lane(Generic[W]):
    """The waiting sequences of one priority and team."""

    priority: int
    team: str
    sequences: OrderedDict[int, W]


class WaitingQueue(Generic[W]):
    """Enter and leave frame a sequence's life; push and pop its waits. Cost: O(teams that wait)."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, str], _Lane[W]] = {}
        self._teams: dict[str, _Team] = {}
        self._length = 0
        self.tokens = 0
        """Uncached tokens to prefill, over all that wait."""

    def __len__(self) -> int:
        return self._length

    def enter(self, sequence: W) -> None:
        """Counts a new sequence as present and appends it. A team that was away gets no credit."""
        team = self._teams.get(sequence.team)
        if team is None or team.present == 0:
            floor = self._floor()
            served = floor if team is None else max(team.served, floor)
            team = self._teams[sequence.team] = _Team(served)
        team.present += 1
        self.push(sequence)

    def leave(self, sequence: W) -> None:
        """Forgets a sequence that has ended, wherever it was."""
        self.pop(sequence)
        team = self._teams[sequence.team]
        team.present -= 1
        if team.present == 0:
            self._forget()

    def push(self, sequence: W) -> None:
        """Appends a sequence that is present to its lane."""
        self._lane(sequence).sequences[sequence.serial] = sequence
        self._count(sequence, +1)

    def push_back(self, sequence: W) -> None:
        """Returns a preempted or passed-over sequence to the head of its lane."""
        lane = self._lane(sequence).sequences
        lane[sequence.serial] = sequence
        lane.move_to_end(sequence.serial, last=False)
        self._count(sequence, +1)

    def pop(self, sequence: W) -> bool:
        """Takes a sequence out; False when it was not waiting."""
        key = (sequence.priority, sequence.team)
        lane = self._lanes.get(key)
        if lane is None or lane.sequences.pop(sequence.serial, None) is None:
            return False
        if not lane.sequences:
            del self._lanes[key]
        self._count(sequence, -1)
        return True

    def head(self) -> W | None:
        """The next sequence, which stays in the queue."""
        if not self._lanes:
            return None
        lane = min(self._lanes.values(), key=self._order)
        return next(iter(lane.sequences.values()))

    @property
    def is_contended(self) -> bool:
        """Several teams are present."""
        return len(self._teams) > 1 and sum(team.present > 0 for team in self._teams.values()) > 1

    def waits(self, team: str) -> bool:
        """Whether a sequence of this team waits."""
        return any(lane.team == team for lane in self._lanes.values())

    @property
    def is_shared(self) -> bool:
        """Somebody present has a team, so others may come. Whether they have is not asked: how long
        a step is would tell it to who is here."""
        return any(team.present for name, team in self._teams.items() if name)

    def standing(self, team: str) -> Standing:
        """What a present team is ordered by, the smallest first."""
        known = self._teams[team]
        return known.served, known.present

    def charge(self, sequence: W, position: int) -> None:
        """Charges its team for the positions up to `position` that it has not paid for yet."""
        tokens = position - sequence.num_served
        if tokens > 0:
            self._teams[sequence.team].served += tokens / sequence.weight
            sequence.num_served = position

    def _lane(self, sequence: W) -> _Lane[W]:
        key = (sequence.priority, sequence.team)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(*key, OrderedDict())
        return lane

    def _order(self, lane: _Lane[W]) -> tuple[int, Standing, int]:
        return (lane.priority, self.standing(lane.team), next(iter(lane.sequences)))

    def _count(self, sequence: W, sign: int) -> None:
        self._length += sign
        self.tokens += sign * sequence.queued_tokens

    def _floor(self) -> float:
        """The least served of the present teams."""
        return min((team.served for team in self._teams.values() if team.present), default=0.0)

    def _forget(self) -> None:
        """Drops idle teams that would start at the floor anyway; all when nobody is left."""
        present = sum(team.present > 0 for team in self._teams.values())
        if present == 0:
            self._teams.clear()
        elif len(self._teams) > present + _FORGET_ABOVE:
            floor = self._floor()
            self._teams = {
                name: team
                for name, team in self._teams.items()
                if team.present or team.served > floor
            }
