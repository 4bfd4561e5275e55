"""GET /v1/models, which both dialects have: a client of Anthropic's says that it is one.

It knows no fleet: the catalog says what there is.
"""

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.types import ASGIApp, Scope

from forebay_gateway.api.anthropic.models import model_info, model_page
from forebay_gateway.api.dialects import speaks_anthropic
from forebay_gateway.api.edge import caller
from forebay_gateway.api.query import query
from forebay_gateway.api.respond import Answer
from forebay_gateway.teams.catalog import Catalog, Listing

_ASKED_BY_CODEX = "client_version"


class ModelEntry(msgspec.Struct, frozen=True):
    """A model as /v1/models lists it. `created` is in seconds; `capabilities` say what it does,
    among them generate and embed. `deprecation` and `sunset` are the days from which its name is
    deprecated and withdrawn, where that is known. An adapter has the model that it is over as its
    `parent`, and what its directory is called as its `root`."""

    id: str
    created: int
    max_model_len: int
    capabilities: list[str]
    object: str = "model"
    owned_by: str = "forebay"
    deprecation: str | msgspec.UnsetType = msgspec.UNSET
    sunset: str | msgspec.UnsetType = msgspec.UNSET
    parent: str | msgspec.UnsetType = msgspec.UNSET
    root: str | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct, frozen=True):
    """`models` is there, and empty, for Codex alone: it wants a catalogue of its own form, and goes
    by what it knows itself where that says nothing."""

    data: list[ModelEntry]
    object: str = "list"
    models: tuple[ModelEntry, ...] | msgspec.UnsetType = msgspec.UNSET


def model_routes(catalog: Catalog) -> list[HTTPRouteHandler]:
    @get("/v1/models")
    async def models(scope: Scope) -> ASGIApp:
        listings, asked = catalog.list(caller(scope)), query(scope)
        if _is_anthropic(scope):
            return Answer(model_page(listings, asked))
        entries = [_entry(listing) for listing in listings]
        catalogue = () if _ASKED_BY_CODEX in asked else msgspec.UNSET
        return Answer(msgspec.json.encode(ModelList(entries, models=catalogue)))

    @get("/v1/models/{name:path}")
    async def model(name: FromPath[str], scope: Scope) -> ASGIApp:
        # Litestar gives a path parameter its leading slash; a model's name may hold slashes itself.
        listing = catalog.listing(name.removeprefix("/"), caller(scope))
        written = model_info(listing) if _is_anthropic(scope) else _entry(listing)
        return Answer(msgspec.json.encode(written))

    return [models, model]


def _is_anthropic(scope: Scope) -> bool:
    return speaks_anthropic(scope["path"], scope["headers"])


def _entry(listing: Listing) -> ModelEntry:
    alias = listing.alias
    return ModelEntry(
        id=listing.name,
        created=listing.created,
        max_model_len=listing.max_model_len,
        capabilities=sorted(listing.capabilities),
        deprecation=(alias and alias.deprecated) or msgspec.UNSET,
        sunset=(alias and alias.sunset) or msgspec.UNSET,
        parent=listing.parent or msgspec.UNSET,
        root=listing.root or msgspec.UNSET,
    )
