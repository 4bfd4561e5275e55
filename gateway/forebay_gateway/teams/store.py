"""Writes the directory: records in one atomic step, each against the revision it was read at.

What is written is checked here once more as a whole: no record without its parent, no key of
another team's user, no two keys of one name, no two issuers of the same tokens. It is written only
while the directory is the one that was checked, so two who change it at once cannot break this
between them: whoever comes second looks again. It knows no HTTP.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import msgspec
from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.errors import BusError, ConflictError
from forebay_shared.link import Argument
from forebay_shared.scripts import Script
from forebay_shared.wire import WIRE_VERSION

from forebay_gateway.teams.directory import Directory, encode
from forebay_gateway.teams.records import Entry, Issuer, Key, User, place_of
from forebay_gateway.teams.sync import DirectorySync

ANY = -1
"""Whatever revision a record has."""
MIRRORED_S = 2.0
CONTENDED_S = 5.0
"""So long a change is tried again while others change the directory."""
AGAIN_S = 0.01
MAX_ISSUERS = 32

_DONE, _STALE, _MOVED = 1, 2, 3
"""What `commit.lua` answers."""


Check = Callable[[], None]


def _nothing() -> None:
    """No more than the store's own checks."""


class Change(msgspec.Struct, frozen=True):
    """A record at `place` to write (None: delete), which must be at revision `expected`."""

    place: str
    entry: Entry | None
    expected: int = ANY


class StaleError(ConflictError):
    """A record is not at the revision that was expected."""


class UnseenError(BusError):
    """A change was made, and this gateway's mirror does not have it yet."""


class DirectoryStore:
    """The one that changes the directory."""

    def __init__(self, publisher: Publisher, directory: Directory, sync: DirectorySync) -> None:
        self._publisher = publisher
        self._directory = directory
        self._sync = sync
        self._script = Script("commit")

    async def commit(
        self, changes: Sequence[Change], *, who: str, what: str, check: Check = _nothing
    ) -> int:
        """Makes all changes or none; the directory's revision after. The mirror has them then.

        `who` and `what` go into the audit log. `check` raises what speaks against the changes in
        the directory as it is; it is called again when that has changed.

        Raises:
            ConflictError: a record is not at the expected revision, lacks its parent, or its name
                is taken; or others change the directory all the time.
            UnseenError: the changes were made, and the mirror does not have them yet.
            BusError: Redis did not answer, and the changes may have been made or not.
        """
        if not changes:
            return self._directory.revision
        revision = await self.write(changes, who=who, what=what, check=check)
        if not await self._sync.reached(revision, MIRRORED_S):
            raise UnseenError("The change was made, but is not seen here yet.", retry_after_s=1.0)
        return revision

    async def write(
        self, changes: Sequence[Change], *, who: str, what: str, check: Check = _nothing
    ) -> int:
        """As `commit`, without waiting for the mirror."""
        wanted = {change.place: change.entry for change in changes}
        written = await asyncio.to_thread(_written, changes)
        deadline = asyncio.get_running_loop().time() + CONTENDED_S
        while True:
            check()
            self.check(wanted)
            state, number = await self._send(written, who, what, self._directory.revision)
            if state == _DONE:
                return number
            if state == _STALE:
                place = changes[number - 1].place
                raise StaleError(f"{place} is not as it was when you read it: read it again.")
            if asyncio.get_running_loop().time() > deadline:
                raise ConflictError("Others change the directory all the time. Please retry.")
            await self._sync.reached(number, MIRRORED_S)
            await asyncio.sleep(AGAIN_S)

    async def _send(
        self, written: Sequence[Argument], who: str, what: str, checked_at: int
    ) -> tuple[int, int]:
        """What `commit.lua` answers."""
        arguments: list[Argument] = [
            keys.CHANGES_MAXLEN,
            keys.AUDIT_MAXLEN,
            who,
            what,
            WIRE_VERSION,
            checked_at,
            *written,
        ]
        answer = await self._script.send(
            self._publisher,
            [keys.directory(), keys.directory_revision(), keys.changes(), keys.audit()],
            arguments,
        )
        state, number = cast("list[int]", answer)
        return state, number

    def check(self, changes: Mapping[str, Entry | None]) -> None:
        """Raises ConflictError for changes (by place; None: delete) that may not stand together."""
        self._check_issuers(changes)
        lonely = self._directory.missing_parent(changes)
        if lonely is not None:
            raise ConflictError(f"{lonely[0]} needs {lonely[1]}, which would not exist.")
        self._check_users(changes)
        names = {
            (entry.team, entry.organisation, entry.name): f"key/{entry.id}"
            for entry in cast("list[Key]", self._directory.all("key"))
            if entry.name and f"key/{entry.id}" not in changes
        }
        for place, entry in changes.items():
            if not isinstance(entry, Key) or not entry.name:
                continue
            if names.setdefault((entry.team, entry.organisation, entry.name), place) != place:
                raise ConflictError(f"There is a key named '{entry.name}' in this team already.")

    def _check_users(self, changes: Mapping[str, Entry | None]) -> None:
        """A key counts for its user and bears that user's limits: one of its own team."""
        moved = any(isinstance(entry, User) for entry in changes.values())
        stored = self._directory.all("key") if moved else ()
        kept = [entry for entry in stored if place_of(entry) not in changes]
        for key in (*changes.values(), *kept):
            if not isinstance(key, Key) or not key.user:
                continue
            place = f"user/{key.user}"
            user = changes.get(place) or self._directory.user(key.user)
            if isinstance(user, User) and user.team != key.team:
                raise ConflictError(f"{place_of(key)} needs {place} to be of its team, {key.team}.")

    def _check_issuers(self, changes: Mapping[str, Entry | None]) -> None:
        issuers = [entry for entry in changes.values() if isinstance(entry, Issuer)]
        if not issuers:
            return
        kept = [each for each in self._directory.all("issuer") if place_of(each) not in changes]
        named = [each.issuer for each in (*cast("list[Issuer]", kept), *issuers)]
        if len(set(named)) < len(named):
            raise ConflictError("There is an issuer of these tokens already.")
        if len(named) > MAX_ISSUERS:
            raise ConflictError(f"There may be {MAX_ISSUERS} issuers at most.")


def _written(changes: Sequence[Change]) -> list[Argument]:
    """The changes as `commit.lua` reads them."""
    arguments: list[Argument] = []
    for change in changes:
        value = "" if change.entry is None else encode(change.entry)
        arguments += [change.place, change.expected, value]
    return arguments
