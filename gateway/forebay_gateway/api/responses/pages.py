"""One page of a response's input items. Knows no HTTP."""

from typing import Literal

import msgspec
from forebay_shared.errors import InvalidRequestError

Order = Literal["asc", "desc"]


class _Listed(msgspec.Struct):
    id: str


class ItemPage(msgspec.Struct):
    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def page(items: bytes, order: Order, limit: int, after: str | None) -> bytes:
    """The JSON of up to `limit` items behind the one called `after`, the latest first if `desc`.

    Raises InvalidRequestError when there is no item called so.
    """
    entries = msgspec.json.decode(items, type=list[msgspec.Raw])
    ids = [entry.id for entry in msgspec.json.decode(items, type=list[_Listed])]
    if order == "desc":
        entries.reverse()
        ids.reverse()
    first = 0
    if after is not None:
        if after not in ids:
            raise InvalidRequestError("after must be the id of an input item.", param="after")
        first = ids.index(after) + 1
    shown = slice(first, first + limit)
    ids, more = ids[shown], len(entries) > first + limit
    return msgspec.json.encode(
        ItemPage(entries[shown], ids[0] if ids else None, ids[-1] if ids else None, more)
    )
