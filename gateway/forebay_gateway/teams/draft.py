"""What `apply` writes, made of a document and a copy of the directory.

20,000 keys take a second and more, so it is made in a thread of its own: it knows the copy only, no
Redis and no event loop.
"""

import time
from typing import NamedTuple, cast

from forebay_gateway.teams import document, keymaker
from forebay_gateway.teams.directory import Directory
from forebay_gateway.teams.document import Step
from forebay_gateway.teams.records import Entry, Key, Kind
from forebay_gateway.teams.store import Change

Pair = tuple[Entry | None, Entry | None]
"""A record before and after."""


class Draft(NamedTuple):
    """The changes, against the revisions of the copy; and the tokens of keys that they make."""

    pairs: list[Pair]
    changes: list[Change]
    tokens: dict[str, str]


def steps(body: object, directory: Directory, *, prune: bool) -> list[Step]:
    """Raises InvalidRequestError that names the field."""
    return document.difference(document.read(body, directory), directory, prune=prune)


def drafted(steps: list[Step], directory: Directory, pepper: bytes) -> Draft:
    draft = Draft([], [], {})
    now = time.time()
    for step in steps:
        kind, _, name = step.place.partition("/")
        before, after = directory.get(cast(Kind, kind), name), step.after
        place, expected = step.place, directory.revision_of(step.place)
        if isinstance(after, Key) and step.action == "create":
            after, draft.tokens[step.label] = keymaker.make(after, pepper, now)
            place = f"key/{after.id}"
        draft.pairs.append((before, after))
        draft.changes.append(Change(place, after, expected))
    return draft
