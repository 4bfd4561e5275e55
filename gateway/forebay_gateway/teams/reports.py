"""What may be read of the books and the audit log, by whom.

It knows no HTTP; the bookkeeper knows Redis.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from forebay_shared.errors import InvalidRequestError, PermissionDeniedError

from forebay_gateway.teams import books
from forebay_gateway.teams.admin import MAX_PAGE, Page
from forebay_gateway.teams.bookkeeper import Bookkeeper
from forebay_gateway.teams.directory import Directory
from forebay_gateway.teams.guards import Actor, Guard

_ENTRY = re.compile(r"([0-9]{1,19}-[0-9]{1,19})?")

Tree = dict[str, Any]


class Reports:
    """Usage, records and audit."""

    def __init__(self, directory: Directory, bookkeeper: Bookkeeper) -> None:
        self._directory = directory
        self._bookkeeper = bookkeeper

    async def usage(self, actor: Actor, query: Mapping[str, str]) -> Tree:
        """Sums by what `by` names, between the days `from` and `to`, of what the filters say."""
        only = {name: query[name] for name in books.DIMENSIONS if query.get(name)}
        if actor.owns_organisation:
            only.setdefault("organisation", actor.organisation)
        Guard(actor, self._directory).must_see_usage(
            only.get("organisation", ""), only.get("team", "")
        )
        return await self._summed(query, only)

    async def own_usage(self, actor: Actor, query: Mapping[str, str]) -> Tree:
        """The sums of the actor's own team."""
        if not actor.team:
            raise PermissionDeniedError("This API key belongs to no team.")
        only = {name: query[name] for name in books.DIMENSIONS if query.get(name)}
        return await self._summed(query, {**only, "team": actor.team})

    async def records(self, actor: Actor, after: str, limit: int) -> Page:
        """Usage records of all, behind an entry; for whoever owns the fleet."""
        Guard(actor, self._directory).must_own_the_fleet()
        entries = await self._bookkeeper.records(_entry(after), min(limit, MAX_PAGE))
        data = [
            {**msgspec.to_builtins(record), "entry": entry, "cost": books.money(record.cost)}
            for entry, record in entries
        ]
        return Page(data, entries[-1][0] if entries else None)

    async def audit(self, actor: Actor, after: str, limit: int) -> Page:
        """The audit log, oldest first; for whoever owns the fleet."""
        Guard(actor, self._directory).must_own_the_fleet()
        entries = await self._bookkeeper.audit(_entry(after), min(limit, MAX_PAGE))
        return Page(entries, str(entries[-1]["entry"]) if entries else None)

    async def _summed(self, query: Mapping[str, str], only: Mapping[str, str]) -> Tree:
        today = datetime.now(UTC).date()
        first, last = books.days_between(query.get("from", ""), query.get("to", ""), today)
        by = books.names(query.get("by", "day"))
        rows = await self._bookkeeper.report(books.Query(first=first, last=last, by=by, only=only))
        data = [{**row, "cost": books.money(int(row["cost"]))} for row in rows]
        return {"from": first.isoformat(), "to": last.isoformat(), "data": data}


def _entry(text: str) -> str:
    if not _ENTRY.fullmatch(text):
        raise InvalidRequestError("after must be an entry that a page ended with.", param="after")
    return text
