"""The books: cells of figures per hour and per day, from records to sums and from sums to reports.

Pure: records and cells go in, cells and rows come out. It knows no Redis.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from operator import attrgetter
from typing import Literal, get_args

import msgspec
from forebay_shared import keys
from forebay_shared.books import UsageRecord
from forebay_shared.errors import InvalidRequestError

DIMENSIONS = ("organisation", "team", "user", "key", "model", "alias")
FIGURES = (
    "requests",
    "failed",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "cost",
    "reasoning_tokens",
)
"""In the order of their numbers in the books, from 1 on: new ones come last."""
HOURS_LIFE_S, DAYS_LIFE_S = 40 * 86_400, 800 * 86_400
"""How long the books of hours and those of days are kept."""
MAX_DAYS = 800
_SEPARATOR = "\x1f"

Period = Literal["hour", "day", "month"]
PERIODS: tuple[Period, ...] = get_args(Period)
BY = (*PERIODS, *DIMENSIONS)
"""What sums may be by."""

Figures = list[int]
Place = tuple[str, ...]
_place_of: Callable[[UsageRecord], Place] = attrgetter(*DIMENSIONS)


class Cell(msgspec.Struct, frozen=True):
    """Where figures belong: a book, which is a hash in Redis, and a name in it."""

    book: str
    name: str
    life_s: int


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """What a report is of: days from `first` to `last`, both included, in UTC."""

    first: date
    last: date
    by: tuple[str, ...] = ("day",)
    only: Mapping[str, str] = {}
    """Values that dimensions must have."""

    def check(self) -> None:
        """Raises InvalidRequestError that names the field."""
        for name in self.by:
            if name not in BY:
                raise InvalidRequestError(f"by must be of {', '.join(BY)}.", param="by")
        if not 0 <= (self.last - self.first).days < MAX_DAYS:
            raise InvalidRequestError(f"to must follow from within {MAX_DAYS} days.", param="to")

    @property
    def by_hour(self) -> bool:
        return "hour" in self.by

    def books(self) -> list[str]:
        """The books that hold its figures."""
        days = [self.first + timedelta(days=n) for n in range((self.last - self.first).days + 1)]
        if self.by_hour:
            return [keys.book_of_hours(day.isoformat()) for day in days]
        return sorted({keys.book_of_days(day.isoformat()[:7]) for day in days})


def cells_of(hour: int, place: Iterable[str]) -> tuple[Cell, Cell]:
    """The cells of an hour, counted from 1970 on, and of its day, for values of DIMENSIONS."""
    when = datetime.fromtimestamp(hour * 3600, UTC).isoformat()
    day, hour_name = when[:10], when[:13]
    names = [value.replace(_SEPARATOR, " ").replace("\t", " ") for value in place]
    return (
        Cell(keys.book_of_hours(day), _SEPARATOR.join([hour_name, *names]), HOURS_LIFE_S),
        Cell(keys.book_of_days(day[:7]), _SEPARATOR.join([day, *names]), DAYS_LIFE_S),
    )


def figures_of(record: UsageRecord) -> Figures:
    failed = record.outcome in ("error", "lost")
    return [
        1, int(failed), record.input_tokens, record.cached_tokens, record.output_tokens,
        record.cost, record.reasoning_tokens,
    ]  # fmt: skip


def fold(records: Iterable[UsageRecord]) -> dict[Cell, Figures]:
    """Records as sums by cell."""
    places: dict[tuple[int, Place], Figures] = {}
    for record in records:
        at = (int(record.at) // 3600, _place_of(record))
        places[at] = _sum(places.get(at), figures_of(record))
    sums: dict[Cell, Figures] = {}
    for (hour, place), figures in places.items():
        for cell in cells_of(hour, place):
            sums[cell] = _sum(sums.get(cell), figures)
    return sums


def _sum(so_far: Figures | None, figures: Figures) -> Figures:
    return figures if so_far is None else [a + b for a, b in zip(so_far, figures, strict=True)]


class Report:
    """The sums of a query, as its books are added. 137,000 figures take a quarter of a second: no
    work for an event loop."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._sums: dict[Place, Figures] = defaultdict(lambda: [0] * len(FIGURES))

    def add(self, book: Iterable[tuple[str, int]]) -> None:
        """The fields of a book: a cell's figures, one by one."""
        known: dict[str, Figures | None] = {}
        for field, amount in book:
            name, _, figure = field.rpartition("\t")
            if name not in known:
                known[name] = self._row(name)
            if (sums := known[name]) is not None:
                sums[int(figure) - 1] += amount

    def rows(self) -> list[dict[str, str | int]]:
        """Sorted: the values of `by`, then the figures. `cost` is in billionths."""
        by = self._query.by
        return [
            {**dict(zip(by, place, strict=True)), **dict(zip(FIGURES, sums, strict=True))}
            for place, sums in sorted(self._sums.items())
        ]

    def _row(self, name: str) -> Figures | None:
        """Where a cell's figures go; None for one that was not asked for."""
        values = _values(name)
        if not _wanted(self._query, values):
            return None
        return self._sums[tuple(values[each] for each in self._query.by)]


def _values(name: str) -> dict[str, str]:
    when, *place = name.split(_SEPARATOR)
    values = dict(zip(DIMENSIONS, place, strict=True))
    return {"hour": when, "day": when[:10], "month": when[:7], **values}


def _wanted(query: Query, values: Mapping[str, str]) -> bool:
    if not query.first.isoformat() <= values["day"] <= query.last.isoformat():
        return False
    return all(values.get(name) == value for name, value in query.only.items())


def money(nanos: int) -> str:
    """Billionths as an exact decimal."""
    sign, nanos = ("-", -nanos) if nanos < 0 else ("", nanos)
    whole, part = divmod(nanos, 10**9)
    return f"{sign}{whole}.{part:09d}".rstrip("0").rstrip(".")


def days_between(first: str, last: str, today: date) -> tuple[date, date]:
    """Dates as text, each inclusive; empty: the first of this month, and today.

    Raises InvalidRequestError that names the field.
    """
    return _date(first, "from") or today.replace(day=1), _date(last, "to") or today


def _date(text: str, param: str) -> date | None:
    if not text:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InvalidRequestError(f"{param} must be a date, 2026-12-31.", param=param) from None


def names(by: str) -> tuple[str, ...]:
    """Those of `day,model`."""
    return tuple(part.strip() for part in by.split(",") if part.strip())
