"""The conversation that a response answers: its own input, references resolved, behind what came
before. It knows no model and no HTTP.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from forebay_shared.errors import InvalidRequestError, NotFoundError

from forebay_gateway.api.responses.composer import encode
from forebay_gateway.api.responses.items import check_calls, checked, home_of
from forebay_gateway.api.responses.schema import Item, ResponsesRequest
from forebay_gateway.api.responses.store import Link, ResponseStore, Stored
from forebay_gateway.renderers import Renderers

MAX_REFERENCES = 64
"""Responses that the item references of one request may lead to."""


class Context(NamedTuple):
    """`items` is the whole conversation, `size` about its length in bytes; `given` is the JSON of
    the request's own items, with their ids, references resolved: those of `items` from `first` on.
    """

    items: list[Item]
    first: int
    given: bytes
    size: int


class _Output(msgspec.Struct):
    """Of a stored response only what it said."""

    output: list[Item] = []


class Contexts:
    """What is long is worked on in a thread of the renderers'."""

    def __init__(self, store: ResponseStore, renderers: Renderers) -> None:
        self._store = store
        self._renderers = renderers

    async def of(
        self, request: ResponsesRequest, response_id: str, team: str, size: int
    ) -> Context:
        """`size` is the body's. Raises ForebayError for what is wrong with the input."""
        run = self._renderers.run
        items = await run(lambda: checked(request.input, response_id), size)
        wanted = _references(items)
        stored = await self._stored(wanted, team) if wanted else []
        links = (
            await self._store.chain(team, request.previous_response_id)
            if request.previous_response_id is not None
            else []
        )
        size += sum(len(one.input) + len(one.response) for one in [*stored, *links])
        return await run(lambda: _joined(items, stored, links, size), size)

    async def _stored(self, wanted: Sequence[str], team: str) -> list[Stored]:
        """The responses that some items belong to; what is not stored is left out."""
        homes = {home_of(id_) for id_ in wanted}
        ids = sorted(home for home in homes if home is not None)
        if len(ids) > MAX_REFERENCES:
            raise InvalidRequestError(
                f"input may refer to items of at most {MAX_REFERENCES} responses.", param="input"
            )
        found = await asyncio.gather(*(self._known(team, id_) for id_ in ids))
        return [stored for stored in found if stored is not None]

    async def _known(self, team: str, id_: str) -> Stored | None:
        try:
            return await self._store.read(team, id_)
        except NotFoundError:
            return None


def _references(items: Sequence[Item]) -> list[str]:
    return [item.id for item in items if item.type == "item_reference" and item.id is not None]


def _joined(
    given: list[Item], stored: Sequence[Stored], links: Sequence[Link], size: int
) -> Context:
    given = _resolved(given, stored)
    before = [item for link in links for item in _items(link.input, link.response)]
    items = before + given
    check_calls(items, len(before))
    return Context(items, len(before), encode(given), size)


def _resolved(items: list[Item], stored: Sequence[Stored]) -> list[Item]:
    """The items with each reference replaced by what it refers to."""
    known = {item.id: item for one in stored for item in _items(one.input, one.response)}
    resolved = list(items)
    for index, item in enumerate(items):
        if item.type == "item_reference":
            if item.id not in known:
                param = f"input[{index}].id"
                raise NotFoundError(f"{param} is no item that is stored.", param=param)
            resolved[index] = known[item.id]
    return resolved


def _items(input_: bytes, response: bytes) -> list[Item]:
    """What a stored response was given, then what it said."""
    given = msgspec.json.decode(input_, type=list[Item])
    return given + msgspec.json.decode(response, type=_Output).output
