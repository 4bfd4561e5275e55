"""The public names that a caller may ask for, and what serves each of them now.

Every dialect finds its model here, once for a request. It knows no HTTP and no Redis.
"""

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from forebay_shared.errors import ModelNotFoundError
from forebay_shared.models import ModelCard

from forebay_gateway.teams.aliases import (
    Cards,
    FellBack,
    Route,
    is_withdrawn,
    known_cards,
    notices,
)
from forebay_gateway.teams.caller import Caller, unknown_model
from forebay_gateway.teams.directory import Directory
from forebay_gateway.teams.records import Alias

log = logging.getLogger(__name__)


class Fleet(Cards, Protocol):
    def cards(self) -> list[ModelCard]: ...


class Listing(NamedTuple):
    """A public name as a caller sees it. Of an alias: what holds for each of its targets. Of an
    adapter: its model's main name as `parent`, and what its directory is called as `root`."""

    name: str
    created: int
    max_model_len: int
    capabilities: frozenset[str]
    alias: Alias | None = None
    parent: str = ""
    root: str = ""


class Catalog:
    """The aliases of the directory over the models of the fleet."""

    def __init__(self, fleet: Fleet, directory: Directory, fell_back: FellBack) -> None:
        self._fleet = fleet
        self._directory = directory
        self._fell_back = fell_back

    def meet(self, card: ModelCard) -> None:
        """Warns of each model or adapter of a new card that cannot be had by its name, since an
        alias of that name leads elsewhere. One that is disabled is there to close the name."""
        for name in (name for each in card.served() for name in each.names):
            alias = self._directory.alias(name)
            if alias is not None and name not in alias.models and not alias.disabled:
                log.warning("the alias %s hides the served model of that name", name)

    def find(self, name: str, caller: Caller) -> ModelCard:
        """The card of the model that is to answer to a name; the caller keeps the way to it.

        Raises:
            ModelNotFoundError: nothing of this name is there for the caller.
            NoWorkerError: nobody serves it now.
        """
        route = caller.route
        if route is None or route.name != name:
            alias = self._alias(name, caller)
            route = Route(self._fleet, name, alias, caller.lot, self._fell_back)
            caller.route = route
        try:
            return route.card()
        except ModelNotFoundError:
            raise unknown_model(name) from None

    def list(self, caller: Caller) -> Sequence[Listing]:
        """What the caller sees: served models by each of their names, unless an alias shadows it,
        then aliases."""
        aliases = self._directory.aliases(caller.team_id)
        found = [
            _of_card(card, name, caller)
            for card in self._fleet.cards()
            for name in card.names
            if name not in aliases and caller.sees(name)
        ]
        now = time.time()
        return found + [
            listing
            for name, alias in sorted(aliases.items())
            if caller.sees(name) and not _is_closed(alias, now)
            if (listing := self._of_alias(alias, name)) is not None
        ]

    def listing(self, name: str, caller: Caller) -> Listing:
        """One entry of the list. Raises as `find`."""
        card = self.find(name, caller)
        alias = caller.route.alias if caller.route is not None else None
        shown = self._of_alias(alias, name) if alias is not None else None
        return shown or _of_card(card, name, caller)

    def _alias(self, name: str, caller: Caller) -> Alias | None:
        """The alias of that name, if any; its headers go out with the answer."""
        caller.check_model(name)
        alias = self._directory.alias(name, caller.team_id)
        if alias is None:
            return None
        now = time.time()
        if _is_closed(alias, now):
            raise unknown_model(name)
        caller.headers[:] = notices(alias, now)
        return alias

    def _of_alias(self, alias: Alias, name: str) -> Listing | None:
        """None while none of its models is known."""
        cards = list(known_cards(alias, self._fleet))
        if not cards:
            return None
        return Listing(
            name,
            min(card.created for card in cards),
            min(card.max_model_len for card in cards),
            frozenset.intersection(*(card.capabilities for card in cards)),
            alias,
        )


def _is_closed(alias: Alias, now: float) -> bool:
    return alias.disabled or is_withdrawn(alias, now)


def _of_card(card: ModelCard, name: str, caller: Caller) -> Listing:
    listing = Listing(name, card.created, card.max_model_len, card.capabilities)
    if card.adapter is None:
        return listing
    parent = card.parent if caller.sees(card.parent) else ""
    return listing._replace(parent=parent, root=card.adapter.root)
