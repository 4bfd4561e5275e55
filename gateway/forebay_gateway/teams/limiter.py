"""Asks Redis whether a request may start, over all scopes at once, and says when it is over.

What is open is renewed; what could not be settled, as Redis was away, is tried until it is. It
knows no HTTP.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from typing import cast

from forebay_shared import keys
from forebay_shared.books import (
    SETTLE,
    Hold,
    Outcome,
    Rates,
    UsageRecord,
    admission,
    record_of,
    settlement,
)
from forebay_shared.bus import Publisher
from forebay_shared.errors import BusError, RateLimitError
from forebay_shared.link import Argument, Value
from forebay_shared.mishaps import LEAP_S
from forebay_shared.scripts import Script
from forebay_shared.wire import Usage

from forebay_gateway.teams.access import Access, Scope, Standing
from forebay_gateway.teams.directory import Directory
from forebay_gateway.teams.outage import Allowance
from forebay_gateway.teams.plan import Plan, limit_name, make_plan
from forebay_gateway.teams.records import Model, Price

log = logging.getLogger(__name__)

RENEW_AFTER_S = keys.HOLD_MS / 3000
MAX_UNSETTLED = 65_536
"""Settlements that wait for Redis; the oldest beyond it are left to the ledger."""
ADMIT_S = 2.0
AGAIN_S = 2.0

_SCOPES = ("key", "user", "team", "organisation", "model")
_OUTCOMES = (
    ("admitted", ""),
    ("unchecked", ""),
    ("unavailable", ""),
    *(("refused", scope) for scope in _SCOPES),
)
_SETTLED = ("repeated", "settled", "late")
"""What `settle.lua` answers; late: its hold was given up, or lost with a Redis."""


class Permit:
    """An admitted request: settle it once, when it is over."""

    __slots__ = ("_limiter", "hold", "known", "renewed_at", "standing")

    def __init__(self, limiter: "Limiter", hold: Hold, standing: Standing | None) -> None:
        self._limiter = limiter
        self.hold = hold
        self.standing = standing
        self.renewed_at = time.monotonic()  # a clock that is put back renews nothing for an hour
        self.known = standing is not None
        """Redis knows of it; else it was away when it began."""

    def settle(
        self, usage: Usage, outcome: Outcome, attempts: int, reasoning_tokens: int = 0
    ) -> None:
        """Gives back what it reserved, charges what it used, and writes its record."""
        record = record_of(self.hold, usage, outcome, attempts, reasoning_tokens)
        self._limiter.settle(self, record)


class Limiter:
    """All admitted requests of this gateway."""

    def __init__(self, publisher: Publisher, directory: Directory) -> None:
        self._publisher = publisher
        self._directory = directory
        self._admit = Script("admit")
        self._renew = Script("renew")
        self._beat_script = Script("beat")
        self._beaten_at: float | None = None
        """When the last beat that Redis has confirmed was sent, in monotonic seconds."""
        self._plans: dict[tuple[str, str], Plan] = {}
        self._generation = -1
        self._open: dict[str, Permit] = {}
        self._allowance = Allowance()
        self._unsettled: OrderedDict[str, _Settlement] = OrderedDict()
        self.admissions = dict.fromkeys(_OUTCOMES, 0)
        """By outcome and the kind of scope that refused."""
        self.settlements: dict[str, int] = dict.fromkeys(_SETTLED, 0)
        self.abandoned = 0
        self.leaps = 0
        """Of the clock of Redis, as far as this gateway was the first to find them."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def unsettled(self) -> int:
        """Settlements that Redis has not confirmed yet."""
        return len(self._unsettled)

    async def admit(
        self, access: Access, record: UsageRecord, input_tokens: int, output_tokens: int
    ) -> Permit:
        """Reserves in all scopes. `record` says who asks for what; `output_tokens` is the most.

        Raises:
            RateLimitError: with the scope that refused, and when to come again.
            BusError: Redis does not answer.
        """
        now = time.time()
        plan = self._plan(access, record.model, now)
        rates = self._rates(record.model)
        hold = Hold(
            record=record,
            rates=rates,
            slots=plan.slots,
            plan=plan.packed,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cost=rates.cost(input_tokens, 0, output_tokens),
        )
        if not self._publisher.connected:
            return self._without_redis(access, hold)
        try:
            answer = await self._ask(hold)
        except BaseException as error:  # it may have been admitted all the same
            if isinstance(error, BusError):  # else its client has left
                self.admissions["unavailable", ""] += 1
            given_up = record_of(hold, Usage(), "cancelled")
            self._enqueue(_Settlement(hold, given_up, known=True, only_held=True))
            raise
        requests, tokens = (
            None if limit < 0 else (limit, left, ms / 1000)
            for limit, left, ms in (cast("list[int]", answer[at : at + 3]) for at in (1, 4))
        )
        standing = Standing(requests, tokens, time.monotonic())
        if answer[0] != 1:
            scope, limit, wait_ms = cast("list[int]", answer[7:10])
            self.admissions["refused", plan.scopes[scope - 1].partition(" ")[0]] += 1
            raise _refused(plan.scopes[scope - 1], limit_name(limit), wait_ms / 1000, standing)
        return self._begin("admitted", Permit(self, hold, standing))

    def _without_redis(self, access: Access, hold: Hold) -> Permit:
        """Admits by what is known here, where the team's policy says so; else refuses at once."""
        slots = Counter(slot for permit in self._open.values() for slot in permit.hold.slots)
        scopes, tokens = self._scopes(access, hold.record.model), hold.input_tokens
        if not self._allowance.admits(access, scopes, tokens + hold.output_tokens, slots):
            self.admissions["unavailable", ""] += 1
            raise _away()
        return self._begin("unchecked", Permit(self, hold, None))

    def _begin(self, outcome: str, permit: Permit) -> Permit:
        self.admissions[outcome, ""] += 1
        self._open[permit.hold.record.id] = permit
        return permit

    def settle(self, permit: Permit, record: UsageRecord) -> None:
        """Sends the settlement; what Redis does not confirm is sent again by `upkeep`."""
        self._open.pop(record.id, None)
        self._enqueue(_Settlement(permit.hold, record, permit.known, only_held=False))

    def upkeep(self) -> None:
        """Renews what has been open for long, and sends again what was not confirmed. Call it
        about once a second.
        """
        if not self._publisher.connected:
            return
        now = time.monotonic()
        if len(self._directory):
            self._beat(now)
        self._allowance.end()
        for request_id, permit in self._open.items():
            if not permit.known:
                self._tell(permit)
            elif now - permit.renewed_at > RENEW_AFTER_S:
                permit.renewed_at = now
                names = [keys.fleet_clock(), keys.open_requests(), *permit.hold.slots]
                arguments: list[Argument] = [0, request_id, keys.HOLD_MS, keys.SLOTS_TTL_MS]
                self._renew.send(self._publisher, names, arguments)
        late = [entry for entry in self._unsettled.values() if now - entry.sent_at > AGAIN_S]
        for entry in late[:256]:
            self._send(entry)

    def _beat(self, now: float) -> None:
        """Says how much time has passed, by a clock that never leaps, for the fleet's to follow."""
        before = self._beaten_at
        passed = "first" if before is None else round((now - before) * 1000)

        def answered(future: asyncio.Future[Value]) -> None:
            if future.cancelled() or future.exception() is not None:
                return
            self._beaten_at = now
            _, leap_ms = cast("list[int]", future.result())
            if abs(leap_ms) >= LEAP_S * 1000:
                log.warning("the clock of redis has leapt by %.0f s", leap_ms / 1000)
                self.leaps += 1

        beat = self._beat_script.send(self._publisher, [keys.fleet_clock()], [passed])
        beat.add_done_callback(answered)

    def _tell(self, permit: Permit) -> None:
        """Redis is back: it learns of a request that began without it."""
        permit.known = True

        def answered(future: asyncio.Future[Value]) -> None:
            permit.known = not future.cancelled() and future.exception() is None

        told = self._admit.send(self._publisher, *admission(permit.hold, started=True))
        told.add_done_callback(answered)

    async def drained(self, timeout_s: float) -> bool:
        """Waits until all is settled; False when the time runs out."""
        deadline = time.monotonic() + timeout_s
        while self._unsettled:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    async def _ask(self, hold: Hold) -> list[Value]:
        answer = self._admit.send(self._publisher, *admission(hold))
        timer = asyncio.get_running_loop().call_later(ADMIT_S, _give_up, answer)
        try:
            return cast("list[Value]", await answer)
        finally:
            timer.cancel()

    def _enqueue(self, entry: "_Settlement") -> None:
        self._unsettled[entry.record.id] = entry
        if len(self._unsettled) > MAX_UNSETTLED:
            self._unsettled.popitem(last=False)
            self.abandoned += 1
        self._send(entry)

    def _send(self, entry: "_Settlement") -> None:
        entry.sent_at = time.monotonic()
        # Nobody remembers whether it was settled so long ago; what it holds would still be there.
        forgotten = entry.sent_at - entry.since > keys.SETTLED_KEEP_S - AGAIN_S
        only_held = entry.only_held or (entry.known and forgotten)

        def answered(future: asyncio.Future[Value]) -> None:
            if not future.cancelled() and future.exception() is None:
                self._unsettled.pop(entry.record.id, None)
                self.settlements[_SETTLED[cast(int, future.result())]] += 1

        names, arguments = settlement(entry.hold, entry.record, only_held=only_held)
        SETTLE.send(self._publisher, names, arguments).add_done_callback(answered)

    def _plan(self, access: Access, model: str, now: float) -> Plan:
        if self._generation != self._directory.generation:
            self._generation = self._directory.generation
            self._plans = {}
        place = (access.key.id, model)
        plan = self._plans.get(place)
        if plan is None or now >= plan.until:
            plan = self._plans[place] = make_plan(self._scopes(access, model), now)
        return plan

    def _scopes(self, access: Access, model: str) -> list[Scope]:
        record = self._directory.model(model)
        return [*access.scopes, Scope("model", record)] if record else access.scopes

    def _rates(self, model: str) -> Rates:
        return rates_of(self._directory.model(model))


class _Settlement:
    """A settlement that Redis has not confirmed. `known`: Redis has had its hold. `since`: when the
    request was over, in monotonic seconds."""

    __slots__ = ("hold", "known", "only_held", "record", "sent_at", "since")

    def __init__(self, hold: Hold, record: UsageRecord, known: bool, only_held: bool) -> None:
        self.hold = hold
        self.record = record
        self.known = known
        self.only_held = only_held
        self.since = self.sent_at = time.monotonic()


def rates_of(model: Model | None) -> Rates:
    """Prices per million, which are millionths per token, in billionths per token."""
    price = model.price if model is not None else Price()
    cached = price.input if price.cached_input is None else price.cached_input
    return Rates(price.input * 1000, cached * 1000, price.output * 1000)


class RefusedError(RateLimitError):
    """A limit is reached; `standing` is what the answer's headers say."""

    def __init__(self, message: str, retry_after_s: float, standing: Standing) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.standing = standing


def _refused(scope: str, limit: str, wait_s: float, standing: Standing) -> RefusedError:
    what = limit.replace("_", " ")
    if limit.endswith("_budget"):
        window = limit.removesuffix("_budget")
        what = "budget" if window == "total" else f"budget for this {window}"
    return RefusedError(
        f"The {scope} has reached its limit: {what}. Please wait and retry.", wait_s, standing
    )


def _give_up(answer: asyncio.Future[Value]) -> None:
    if not answer.done():
        answer.set_exception(_away())


def _away() -> BusError:
    return BusError("Limits cannot be checked now. Please retry.", retry_after_s=1.0)
