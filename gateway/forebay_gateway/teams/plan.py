"""The limits of all scopes of a request as the scripts read them; packed once, used often.

Pure: the time is given. It knows no Redis.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, get_args
from zoneinfo import ZoneInfo

import msgspec
from forebay_shared import keys

from forebay_gateway.teams.access import Scope
from forebay_gateway.teams.records import Budget, Limits, Record, Window

NANO = 10**9
NEVER = -1
LIMITS = (
    "requests_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "tokens_per_minute",
    "tokens_per_day",
    "concurrent_requests",
)
"""As the scripts number them, from 1 on."""
_WINDOWS: tuple[Window, ...] = get_args(Window)
_UNITS = {"money": 100, "tokens": 200}

_pack = msgspec.msgpack.Encoder().encode
_Cell = int | float | str


class Plan(NamedTuple):
    """The scopes that bound a request, the slots of those that bound concurrency, and their limits
    as `admit.lua` reads them.

    It is right until `until`, when a budget's window ends, in seconds since 1970.
    """

    scopes: list[str]
    slots: list[str]
    packed: msgspec.Raw
    until: float


def make_plan(scopes: Sequence[Scope], now: float) -> Plan:
    """The plan of those scopes that have limits or budgets."""
    bounded = [scope for scope in scopes if _is_bounded(scope.record)]
    cells: list[_Cell] = [len(bounded), *(scope.label for scope in bounded)]
    until = float("inf")
    for scope in bounded:
        limits, end = _cells(scope.record, now)
        cells += limits
        until = min(until, end)
    slots = [
        keys.slots(scope.label)
        for scope in bounded
        if scope.record.limits.concurrent_requests is not None
    ]
    return Plan([scope.name for scope in bounded], slots, msgspec.Raw(_pack(cells)), until)


def limit_name(number: int) -> str:
    """What a script refused for, as a record's field names it; `month_budget` for a budget."""
    if number < min(_UNITS.values()):
        return LIMITS[number - 1]
    return f"{_WINDOWS[number % 100]}_budget"


def window(budget: Budget, now: float) -> tuple[float, float]:
    """When the budget's present window began and when it ends, in seconds since 1970; it begins
    when the clock of its time zone says so. (0, -1) for a budget that is never renewed.
    """
    if budget.window == "total":
        return 0.0, float(NEVER)
    zone = ZoneInfo(budget.time_zone)
    local = datetime.fromtimestamp(now, zone)
    if budget.window == "hour":
        # By elapsed time: a wall clock that is put back has an hour twice.
        start = now - local.minute * 60 - local.second - local.microsecond / 1e6
        return round(start), round(start) + 3600
    first = _first_day(local, budget.window)
    return _midnight(first, zone), _midnight(_next_first(first, budget.window), zone)


def _first_day(local: datetime, window: Window) -> datetime:
    day = datetime(local.year, local.month, local.day)
    if window == "week":
        return day - timedelta(days=day.weekday())
    return day.replace(day=1) if window == "month" else day


def _next_first(first: datetime, window: Window) -> datetime:
    if window == "month":
        return (first + timedelta(days=32)).replace(day=1)
    return first + timedelta(days=7 if window == "week" else 1)


def _midnight(day: datetime, zone: ZoneInfo) -> float:
    return day.replace(tzinfo=zone).timestamp()


def _is_bounded(record: Record) -> bool:
    return bool(record.budgets) or record.limits != Limits()


def _cells(record: Record, now: float) -> tuple[list[_Cell], float]:
    """A scope's part of a plan, and until when it is right."""
    budgets: list[_Cell] = []
    ends = [0]
    for budget in record.budgets:
        start, end = window(budget, now)
        amount = round(budget.amount * NANO) if budget.unit == "money" else budget.amount
        ends.append(round(end * 1000) if end > 0 else NEVER)
        code = _UNITS[budget.unit] + _WINDOWS.index(budget.window)
        budgets += [code, amount, round(start * 1000), ends[-1]]
    limits = [getattr(record.limits, name) for name in LIMITS]
    last = NEVER if NEVER in ends else max(ends)
    cells: list[_Cell] = [NEVER if limit is None else limit for limit in limits]
    until = min((end / 1000 for end in ends if end > 0), default=float("inf"))
    return [*cells, last, len(record.budgets), *budgets], until
