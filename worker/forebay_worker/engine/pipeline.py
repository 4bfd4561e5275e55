"""Pipeline: steps that the runner has been given and whose results are not in yet.

With a runner that overlaps, the host plans a step while the one before it runs: a launch moves its
sequences on by arithmetic, and the tokens follow when the step lands. So a sequence that ends
with a token nobody foresaw has one row too many in the next step, whose result is dropped. Its
blocks may be given away at once all the same: steps run in the order of their launch, so whoever
writes there next does so after that row has been computed.

A failed step is tried again row by row; it knows what the rows are, not what becomes of the tokens.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from forebay_worker.engine.batch import Launched, Ready, Sampled, ScheduledRow
from forebay_worker.engine.ports import OverlappingRunner, Runner
from forebay_worker.engine.scheduler import Plan

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Flight:
    """One launched step. `ends[i]`: the positions of row i whose KV it leaves in the cache.

    `seconds` is its own time, once it has landed: from its launch or the landing before it.
    """

    plan: Plan
    ends: list[int]
    launched: Launched | None
    """None: the launch failed."""
    launched_at: float
    seconds: float = 0.0


class Pipeline:
    """Launches steps and lands them in the same order. `failed` is called of each that fails."""

    def __init__(self, runner: Runner, failed: Callable[[], None]) -> None:
        self._failed = failed
        self._execute = runner.execute
        self._launch: Callable[[list[ScheduledRow]], Launched] = (
            runner.launch
            if isinstance(runner, OverlappingRunner)
            else lambda rows: Ready(runner.execute(rows))
        )
        self._flights: deque[Flight] = deque()
        self._landed_at = 0.0
        self.runner_s = 0.0
        """Seconds spent in the runner, launching and waiting."""

    def __bool__(self) -> bool:
        return bool(self._flights)

    @property
    def due(self) -> bool:
        """Whether a step must land before another one is launched: two are in flight, or the last
        one's tokens have a say in what comes next."""
        if not self._flights:
            return False
        last = self._flights[-1].launched
        return len(self._flights) > 1 or last is None or not last.may_wait

    def launch(self, plan: Plan) -> None:
        """Starts a step and moves its sequences on. What the runner raises shows as it lands."""
        began = monotonic()
        try:
            launched = self._launch(plan.rows)
        except Exception:
            _log.exception("a step of %d rows could not be launched", len(plan.rows))
            launched = None
        ends: list[int] = []
        for sequence, row in plan.pairs():
            sequence.num_computed += row.num_new
            sequence.num_pending += row.samples
            ends.append(sequence.num_computed)
        self._flights.append(Flight(plan, ends, launched, began))
        self.runner_s += monotonic() - began

    def land(self) -> tuple[Flight, list[Sampled | None]]:
        """Waits for the oldest step. A failed one's rows are tried one by one, so that a bad row
        fails alone and a passing fault harms nobody.

        Raises what the last row raised when not one succeeds. The rows of one that has ended
        meanwhile have no result.
        """
        began = monotonic()
        flight = self._flights.popleft()
        try:
            results = self._results(flight)
        finally:
            for sequence, row in flight.plan.pairs():
                sequence.num_pending -= row.samples
            now = monotonic()
            self.runner_s += now - began
            flight.seconds = now - max(flight.launched_at, self._landed_at)
            self._landed_at = now
        return flight, results

    def oldest(self) -> Plan:
        """The plan that lands next."""
        return self._flights[0].plan

    def _results(self, flight: Flight) -> list[Sampled | None]:
        if flight.launched is not None:
            try:
                return flight.launched.results()
            except Exception:
                _log.exception("a step of %d rows failed", len(flight.plan.rows))
        self._failed()
        _log.warning("each of %d rows is tried alone", len(flight.plan.rows))
        self._recall()
        return self._one_by_one(flight)

    def _recall(self) -> None:
        """Takes back the steps launched after a failed one, which built on it."""
        while self._flights:
            flight = self._flights.pop()
            for sequence, row in flight.plan.pairs():
                sequence.num_pending -= row.samples
                if not sequence.ended:
                    sequence.num_computed -= row.num_new

    def _one_by_one(self, flight: Flight) -> list[Sampled | None]:
        results: list[Sampled | None] = []
        failed = tried = 0
        last: Exception | None = None
        for sequence, row in flight.plan.pairs():
            if sequence.ended:
                results.append(None)
                continue
            tried += 1
            sequence.num_computed -= row.num_new
            try:
                results += self._execute([row])
            except Exception as error:
                failed, last = failed + 1, error
                results.append(Sampled(0, corrupt=True))
            sequence.num_computed += row.num_new
        if last is not None and failed == tried:
            raise last
        return results
