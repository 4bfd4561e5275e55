"""The limits of all scopes of a request as the scripts read them; packed once, used often.

Pure: the time is given. It knows no Redis.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

import msgspec
from forebay_shared import keys

from forebay_gateway.teams.access import Scope
from forebay_gateway.teams.records import Budget, Limits, Record, Window

_pack = msgspec.msgpack.Encoder().encode
NANO = 10**9
NEVER = -1


class Plan(NamedTuple):
    """The scopes that bound a request, each with its state's key, its limits and maybe its slots.

    It is right until `until`, when a budget's window ends, in seconds since 1970.
    """

    scopes: list[str]
    states: list[str]
    slots: list[str]
    limits: list[bytes]
    until: float


def make_plan(scopes: Sequence[Scope], now: float) -> Plan:
    """The plan of those scopes that have limits or budgets."""
    bounded = [scope for scope in scopes if _is_bounded(scope.record)]
    packed = [_packed(scope.record, now) for scope in bounded]
    ends = [end for _, end in packed]
    labels = [f"{scope.kind}:{scope.record.id}" for scope in bounded]
    return Plan(
        [scope.name for scope in bounded],
        [keys.usage_state(label) for label in labels],
        [
            keys.slots(label)
            for scope, label in zip(bounded, labels, strict=True)
            if scope.record.limits.concurrent_requests is not None
        ],
        [limits for limits, _ in packed],
        min(ends, default=float("inf")),
    )


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


def _packed(record: Record, now: float) -> tuple[bytes, float]:
    """The limits as `admit.lua` describes them, and until when they are right."""
    limits = record.limits
    numbers = (
        limits.requests_per_minute, limits.input_tokens_per_minute,
        limits.output_tokens_per_minute, limits.tokens_per_minute, limits.tokens_per_day,
        limits.concurrent_requests,
    )  # fmt: skip
    budgets: list[tuple[str, str, float, int, int]] = []
    ends = [0]
    for budget in record.budgets:
        start, end = window(budget, now)
        amount = round(budget.amount * NANO) if budget.unit == "money" else budget.amount
        ends.append(round(end * 1000) if end > 0 else NEVER)
        budgets.append((budget.unit[0], budget.window, amount, round(start * 1000), ends[-1]))
    last = NEVER if NEVER in ends else max(ends)
    plan = [*(NEVER if number is None else number for number in numbers), budgets, last]
    return _pack(plan), min((end / 1000 for end in ends if end > 0), default=float("inf"))
