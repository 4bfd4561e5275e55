"""`teams.yaml`: the whole directory in one nested document, and the way back.

    models: [{id, price, limits}]
    aliases: [{id, targets, …}]
    organisations: [{id, …, keys: […], teams: [{id, …, users: […], keys: […], aliases: […]}]}]
    keys: [{name, role: owner}]
    issuers: [{id, issuer, audiences, jwks, grants: [{claim, value, team, role}]}]

A key is known by its name within its team: its id and secrets are never in the document. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, cast

import msgspec
from forebay_shared.errors import InvalidRequestError
from msgspec.structs import replace

from forebay_gateway.teams.checks import parse
from forebay_gateway.teams.directory import Directory, parents
from forebay_gateway.teams.records import SINGULARS, Entry, Key, Kind, kind_of, place_of

NEW = "new-"
"""Ids of keys that must still be made begin so: a real one is hex."""
MAX_ENTRIES = 100_000

_INSIDE: Mapping[str, tuple[str, ...]] = {
    "": ("models", "aliases", "organisations", "keys", "issuers"),
    "organisation": ("teams", "keys"),
    "team": ("users", "keys", "aliases"),
}
_HIDDEN = ("secrets", "created")

Tree = dict[str, Any]


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One difference: the record before and after, and the fields that change."""

    action: Literal["create", "update", "delete"]
    place: str
    fields: list[str] = []
    after: Entry | None = None

    @property
    def label(self) -> str:
        """Its place, or for a key its team and name."""
        return self.place if self.after is None else _label(self.after)


def read(document: object, directory: Directory) -> list[Entry]:
    """The records of a document. Raises InvalidRequestError that names the field by its path."""
    if not isinstance(document, dict):
        raise InvalidRequestError("The document must be a mapping.", param="document")
    names = {
        (key.team, key.organisation, key.name): key
        for key in cast("list[Key]", directory.all("key"))
    }
    entries: list[Entry] = []
    seen: set[str] = set()
    for entry, where in _flatten(cast(Tree, document), "", {}, ""):
        if isinstance(entry, Key):
            entry = _known_key(entry, names)
        place = place_of(entry)
        if place in seen:
            raise InvalidRequestError(f"{where} is there twice: {_label(entry)}.", param=where)
        seen.add(place)
        entries.append(entry)
        if len(entries) > MAX_ENTRIES:
            raise InvalidRequestError(f"The document holds more than {MAX_ENTRIES} records.")
    return entries


def difference(entries: Sequence[Entry], directory: Directory, *, prune: bool) -> list[Step]:
    """What would change: parents before children, what is deleted last and children first.

    `prune` deletes what the document does not name. A key without a name cannot be named: it stays
    while what is above it does.
    """
    steps: list[Step] = []
    wanted = {place_of(entry) for entry in entries}
    for entry in entries:
        place = place_of(entry)
        before = directory.get(kind_of(entry), entry.id)
        if before is None:
            steps.append(Step("create", place, after=entry))
        elif before != entry:
            steps.append(Step("update", place, _changed(before, entry), entry))
    if prune:
        gone = [
            each
            for each in directory.everything()
            if place_of(each) not in wanted and not _is_left(each, wanted)
        ]
        steps += [Step("delete", place_of(entry)) for entry in reversed(gone)]
    return steps


def _is_left(entry: Entry, wanted: set[str]) -> bool:
    unnamed = isinstance(entry, Key) and not entry.name
    return unnamed and all(parent in wanted for parent in parents(entry))


def write(directory: Directory) -> Tree:
    """The document that `read` turns into what is there. Keys without a name are left out."""
    tree: Tree = {"models": [_plain(entry) for entry in directory.all("model")]}
    of_teams: dict[str, list[Entry]] = {}
    for entry in directory.everything():
        of_teams.setdefault(directory.team_of(entry), []).append(entry)
    tree["aliases"] = [_plain(e) for e in directory.all("alias") if not directory.team_of(e)]
    tree["organisations"] = [
        {
            **_plain(organisation),
            "keys": [
                _plain(key, "organisation")
                for key in _keys(directory)
                if key.organisation == organisation.id and not key.team
            ],
            "teams": [
                _team(team, of_teams[team.id])
                for team in directory.all("team")
                if directory.organisation_of(team) == organisation.id
            ],
        }
        for organisation in directory.all("organisation")
    ]
    tree["keys"] = [
        _plain(key) for key in _keys(directory) if not key.team and not key.organisation
    ]
    tree["issuers"] = [_plain(entry) for entry in directory.all("issuer")]
    return cast(Tree, _without_empty(tree))


def _team(team: Entry, mine: Sequence[Entry]) -> Tree:
    parts: Tree = {section: [] for section in _INSIDE["team"]}
    for entry in mine:
        for section in parts:
            named = not isinstance(entry, Key) or entry.name
            if SINGULARS[section] == kind_of(entry) and named:
                plain = _plain(entry, "team")
                if section == "aliases":
                    plain["id"] = entry.id.removeprefix(f"{team.id}/")
                parts[section].append(plain)
    return {**_plain(team, "organisation"), **parts}


def _flatten(
    tree: Tree, kind: str, parents: Mapping[str, str], where: str
) -> Iterator[tuple[Entry, str]]:
    """The records of a level, then those inside each of them."""
    for name in tree:
        if not kind and name not in _INSIDE[""]:
            raise InvalidRequestError(
                f"{name} is not a section: {', '.join(_INSIDE[''])}.", param=str(name)
            )
    for section in _INSIDE.get(kind, ()):
        items: object = tree.get(section) or []
        if not isinstance(items, list):
            raise InvalidRequestError(f"{where}{section} must be a list.", param=section)
        for number, item in enumerate(cast("list[object]", items)):
            at = f"{where}{section}[{number}]"
            if not isinstance(item, dict):
                raise InvalidRequestError(f"{at} must be a mapping.", param=at)
            inner = cast(Tree, item)
            own_kind = SINGULARS[section]
            own = {name: v for name, v in inner.items() if name not in _INSIDE.get(own_kind, ())}
            entry = _entry(own_kind, own, parents, at)
            yield entry, at
            yield from _flatten(inner, own_kind, {own_kind: entry.id}, f"{at}.")


def _entry(kind: Kind, own: Tree, parents: Mapping[str, str], at: str) -> Entry:
    if kind == "key":
        for hidden in ("id", *_HIDDEN):
            if hidden in own:
                raise InvalidRequestError(f"{at}.{hidden} cannot be given.", param=hidden)
        if not own.get("name"):
            raise InvalidRequestError(f"{at}.name is needed: it says which key.", param="name")
        own = {**own, "id": "0"}
    for name, parent in parents.items():
        if name in own and own[name] != parent:
            raise InvalidRequestError(f"{at}.{name} must be {parent}, where it stands.", param=name)
    if kind == "alias" and "team" in parents:
        own = {**own, "id": f"{parents['team']}/{own.get('id', '')}"}
    return parse(kind, {**own, **parents}, at)


def _known_key(key: Key, names: Mapping[tuple[str, str, str], Key]) -> Key:
    known = names.get((key.team, key.organisation, key.name))
    if known is None:
        whole = "\0".join((key.team, key.organisation, key.name)).encode()
        return replace(key, id=NEW + blake2b(whole, digest_size=20).hexdigest())
    return replace(key, id=known.id, secrets=known.secrets, created=known.created)


def _label(entry: Entry) -> str:
    """Its place, or for a key its team and name."""
    if isinstance(entry, Key):
        return f"key/{entry.team or entry.organisation}/{entry.name}"
    return place_of(entry)


def _keys(directory: Directory) -> list[Key]:
    return [key for key in cast("list[Key]", directory.all("key")) if key.name]


def _plain(entry: Entry, parent: str = "") -> Tree:
    tree = cast(Tree, msgspec.to_builtins(entry))
    left_out = {*_HIDDEN, parent, *(("id",) if isinstance(entry, Key) else ())}
    return {name: value for name, value in tree.items() if name not in left_out}


def _without_empty(tree: object) -> object:
    if isinstance(tree, dict):
        branches = cast("dict[str, object]", tree)
        return {name: _without_empty(value) for name, value in branches.items() if value != []}
    if isinstance(tree, list):
        return [_without_empty(value) for value in cast("list[object]", tree)]
    return tree


def _changed(before: Entry, after: Entry) -> list[str]:
    return [
        name
        for name in after.__struct_fields__
        if getattr(before, name, None) != getattr(after, name)
    ]
