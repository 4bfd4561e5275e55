"""What the admin API does, on plain data: every call checks its actor, changes the directory and
leaves a line in the audit log.

It knows no HTTP. A secret leaves it once, in the answer to the call that made it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
from forebay_shared.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)
from msgspec.structs import replace

from forebay_gateway.teams import document, draft, keymaker
from forebay_gateway.teams.checks import parse
from forebay_gateway.teams.conditions import NONE, Conditions
from forebay_gateway.teams.directory import Directory
from forebay_gateway.teams.draft import Pair
from forebay_gateway.teams.guards import Actor, Guard
from forebay_gateway.teams.records import Alias, Entry, Key, Kind, place_of
from forebay_gateway.teams.store import Change, DirectoryStore, StaleError, UnseenError
from forebay_gateway.teams.sync import DirectorySync

MAX_PAGE = 1_000
MAX_GRACE_S = 30 * 86_400.0
MAX_AUDITED = 65_536
"""Characters of one audit line; a longer one names places only."""
MAX_SHOWN = 1_000
"""Changes in one audit line."""

Tree = dict[str, Any]


class Page(msgspec.Struct, frozen=True):
    """Part of a list. `next` is what to ask for `after`; None at the end."""

    data: Sequence[object]
    next: str | None = None


class Admin:
    """The calls of the admin API, all but the books'."""

    def __init__(
        self,
        directory: Directory,
        store: DirectoryStore,
        sync: DirectorySync,
        is_served: Callable[[str], bool],
    ) -> None:
        """`is_served`: whether a worker serves a model of this name."""
        self._directory = directory
        self._is_served = is_served
        self._store = store
        self._sync = sync

    def list(self, actor: Actor, kind: Kind, after: str, limit: int, team: str) -> Page:
        """What the actor may see of a kind, by id; of one team when it is named."""
        self._must_be_fresh()
        guard = Guard(actor, self._directory)
        found = [
            entry
            for entry in self._directory.all(kind)
            if entry.id > after
            and (not team or self._directory.team_of(entry) == team)
            and guard.may_see(entry)
        ]
        shown = found[: max(1, min(limit, MAX_PAGE))]
        more = len(found) > len(shown)
        return Page([view(entry) for entry in shown], shown[-1].id if more else None)

    def get(self, actor: Actor, kind: Kind, name: str) -> tuple[Tree, int]:
        """A record and its revision. Raises NotFoundError, also for what the actor may not see."""
        entry = self._seen(actor, kind, name)
        return view(entry), self._directory.revision_of(place_of(entry))

    async def put(
        self, actor: Actor, kind: Kind, name: str, body: object, given: Conditions
    ) -> tuple[Tree, int]:
        """Writes a record, new or in place of the old one.

        Raises NotFoundError for a key that does not exist: keys are made by `make_key`; and
        PreconditionError where the record is not as the caller says.
        """
        if not isinstance(body, dict):
            raise InvalidRequestError("The body must be a JSON object.")
        self._must_be_fresh()
        before = self._directory.get(kind, name)
        tree = {**cast(Tree, body), "id": name}
        for hidden in ("secrets", "created"):
            if hidden in tree:
                raise InvalidRequestError(f"{hidden} cannot be given.", param=hidden)
        entry = parse(kind, tree, kind)
        if isinstance(entry, Key):
            if not isinstance(before, Key):
                raise NotFoundError("There is no such key. POST makes one.")
            entry = replace(entry, secrets=before.secrets, created=before.created)
        guard = Guard(actor, self._directory)
        guard.must_change(entry)
        if before is not None:
            guard.must_change(before)
        guard.must_not_take_more(before, entry)
        expected = given.expected(self._revision(before))
        await self._commit(actor, "put", [(before, entry)], expected)
        return view(entry), self._directory.revision_of(place_of(entry))

    async def delete(self, actor: Actor, kind: Kind, name: str, given: Conditions) -> None:
        """Deletes a record. Raises ConflictError while others stand below it, and as `put`."""
        entry = self._seen(actor, kind, name)
        Guard(actor, self._directory).must_change(entry)
        expected = given.expected(self._revision(entry))
        await self._commit(actor, "delete", [(entry, None)], expected)

    async def make_key(self, actor: Actor, body: object) -> Tree:
        """A new key: its record, and `token`, which is shown this once."""
        if not isinstance(body, dict):
            raise InvalidRequestError("The body must be a JSON object.")
        tree = cast(Tree, body)
        for hidden in ("id", "secrets", "created"):
            if hidden in tree:
                raise InvalidRequestError(f"{hidden} cannot be given.", param=hidden)
        asked = cast(Key, parse("key", {**tree, "id": "0"}, "key"))
        Guard(actor, self._directory).must_change(asked)
        key, token = keymaker.make(asked, await self._sync.make_pepper(), time.time())
        with contextlib.suppress(UnseenError):  # its token is told now or never
            await self._commit(actor, "make", [(None, key)], 0)
        return {**view(key), "token": token}

    async def rotate_key(
        self, actor: Actor, name: str, grace_s: float, given: Conditions = NONE
    ) -> Tree:
        """A new secret for a key; the one before lives for the grace time."""
        if not 0 <= grace_s <= MAX_GRACE_S:
            raise InvalidRequestError(
                f"grace_s must be from 0 to {MAX_GRACE_S:.0f}.", param="grace_s"
            )
        before = cast(Key, self._seen(actor, "key", name))
        Guard(actor, self._directory).must_change(before)
        at = self._revision(before)
        expected = given.expected(at)
        pepper = await self._sync.make_pepper()
        key, token = keymaker.rotate(before, pepper, time.time(), grace_s)
        with contextlib.suppress(UnseenError):
            await self._commit(
                actor, "rotate", [(before, key)], at if expected is None else expected
            )
        return {**view(key), "token": token}

    async def apply(self, actor: Actor, body: object, *, dry_run: bool, prune: bool) -> Tree:
        """Makes the directory what a document says: the steps, and the tokens of keys it made."""
        Guard(actor, self._directory).must_own_the_fleet()
        self._must_be_fresh()
        directory = self._directory.copy()
        steps = await asyncio.to_thread(draft.steps, body, directory, prune=prune)
        shown = [{"action": s.action, "place": s.label, "fields": s.fields} for s in steps]
        if dry_run:  # it refuses what the apply would refuse
            changes = {step.place: step.after for step in steps}
            self._check_models(changes)
            self._store.check(changes)
            return {"dry_run": True, "changes": shown}
        pepper = await self._sync.make_pepper() if steps else b""
        pairs, changes, tokens = await asyncio.to_thread(draft.drafted, steps, directory, pepper)
        with contextlib.suppress(UnseenError):
            await self._write(actor, "apply", pairs, changes)
        return {"dry_run": False, "changes": shown, "tokens": tokens}

    async def export(self, actor: Actor) -> Tree:
        """The document of all that is there; without secrets."""
        Guard(actor, self._directory).must_own_the_fleet()
        self._must_be_fresh()
        return await asyncio.to_thread(document.write, self._directory.copy())

    def _must_be_fresh(self) -> None:
        """Raises BusError where the mirror is too old: an empty one would be a lie."""
        self._sync.must_be_fresh("The directory")

    def _seen(self, actor: Actor, kind: Kind, name: str) -> Entry:
        self._must_be_fresh()
        entry = self._directory.get(kind, name)
        if entry is None or not Guard(actor, self._directory).may_see(entry):
            raise NotFoundError(f"There is no such {kind}.")
        return entry

    async def _commit(
        self,
        actor: Actor,
        action: str,
        pairs: Sequence[Pair],
        expected: int | None = None,
    ) -> None:
        """`expected` None: what was read a moment ago is what is changed."""
        changes = [
            Change(
                _place(before, after),
                after,
                self._revision(before) if expected is None else expected,
            )
            for before, after in pairs
        ]
        try:
            await self._write(actor, action, pairs, changes)
        except StaleError as error:
            if expected is not None:  # the caller said what it had read
                raise PreconditionError(error.message) from None
            raise

    async def _write(
        self, actor: Actor, action: str, pairs: Sequence[Pair], changes: Sequence[Change]
    ) -> None:
        wanted = {change.place: change.entry for change in changes}

        def check() -> None:
            self._check_rights(actor, pairs)
            self._check_models(wanted)

        what = _audited(action, pairs)
        await self._store.commit(changes, who=actor.name, what=what, check=check)

    def _check_rights(self, actor: Actor, pairs: Sequence[Pair]) -> None:
        """Raises PermissionDeniedError for records, before and after, that are not the actor's."""
        guard = Guard(actor, self._directory)
        for before, after in pairs:
            for entry in (before, after):
                if entry is not None:
                    guard.must_change(entry)
            if after is not None:
                guard.must_not_take_more(before, after)

    def _check_models(self, changes: Mapping[str, Entry | None]) -> None:
        """Raises ConflictError for an alias of a model that is not there. An alias is no model, so
        no alias can lead to another, or round in a circle."""
        missing = self._directory.missing_model(changes, self._is_served)
        if missing is None:
            return
        alias, name = missing
        if any(isinstance(each, Alias) and each.public_name == name for each in changes.values()):
            is_alias = True
        else:
            is_alias = self._directory.alias(name, alias.team) is not None
        why = (
            "is an alias itself: name the models that it stands for"
            if is_alias
            else "is neither served now nor described among the models"
        )
        raise ConflictError(f"alias/{alias.id} names '{name}', which {why}.")

    def _revision(self, entry: Entry | None) -> int:
        """Of the mirror's record; 0 for none."""
        return self._directory.revision_of(place_of(entry)) if entry else 0


def view(entry: Entry) -> Tree:
    """A record for people: without the digests of its secrets."""
    tree = cast(Tree, msgspec.to_builtins(entry))
    if isinstance(entry, Key):
        tree.pop("secrets", None)
        tree["secrets"] = len(entry.secrets)
    return tree


def _place(before: Entry | None, after: Entry | None) -> str:
    entry = after if after is not None else before
    assert entry is not None
    return place_of(entry)


def _audited(action: str, pairs: Sequence[Pair]) -> str:
    if len(pairs) <= MAX_SHOWN:
        changes: list[Mapping[str, object]] = [
            {
                "place": _place(before, after),
                "before": view(before) if before else None,
                "after": view(after) if after else None,
            }
            for before, after in pairs
        ]
        line = msgspec.json.encode({"action": action, "changes": changes}).decode()
        if len(line) <= MAX_AUDITED:
            return line
    places = [_place(before, after) for before, after in pairs[:MAX_SHOWN]]
    return msgspec.json.encode({"action": action, "places": places}).decode()
