"""The routes of the OpenAI dialect: read, one call, answer."""

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.types import ASGIApp, Scope

from forebay_gateway.api.calls import posted
from forebay_gateway.api.edge import caller
from forebay_gateway.api.openai.embeddings import EmbeddingService
from forebay_gateway.api.openai.scoring import ScoringService
from forebay_gateway.api.openai.service import OpenAIService
from forebay_gateway.api.respond import Answer
from forebay_gateway.teams.catalog import Catalog, Listing


class ModelEntry(msgspec.Struct, frozen=True):
    """A model as /v1/models lists it. `created` is in seconds; `capabilities` say what it does,
    among them generate and embed. `deprecation` and `sunset` are the days from which its name is
    deprecated and withdrawn, where that is known."""

    id: str
    created: int
    max_model_len: int
    capabilities: list[str]
    object: str = "model"
    owned_by: str = "forebay"
    deprecation: str | msgspec.UnsetType = msgspec.UNSET
    sunset: str | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelEntry]
    object: str = "list"


def generation_apps(service: OpenAIService, max_body_bytes: int) -> dict[str, ASGIApp]:
    """What answers a POST, by path."""
    return {
        "/v1/chat/completions": posted(service.chat, max_body_bytes),
        "/v1/completions": posted(service.complete, max_body_bytes),
    }


def embedding_apps(
    embeddings: EmbeddingService, scoring: ScoringService, max_body_bytes: int
) -> dict[str, ASGIApp]:
    """What answers a POST, by path."""
    calls = {
        "/v1/embeddings": embeddings.embed,
        "/score": scoring.score,
        "/v1/score": scoring.score,
        "/rerank": scoring.rerank,
        "/v1/rerank": scoring.rerank,
        "/v2/rerank": scoring.rerank_2,
    }
    return {path: posted(call, max_body_bytes) for path, call in calls.items()}


def model_routes(catalog: Catalog) -> list[HTTPRouteHandler]:
    @get("/v1/models")
    async def models(scope: Scope) -> ASGIApp:
        entries = [_entry(listing) for listing in catalog.list(caller(scope))]
        return Answer(msgspec.json.encode(ModelList(entries)))

    @get("/v1/models/{name:path}")
    async def model(name: FromPath[str], scope: Scope) -> ASGIApp:
        # Litestar gives a path parameter its leading slash; a model's name may hold slashes itself.
        name = name.removeprefix("/")
        return Answer(msgspec.json.encode(_entry(catalog.listing(name, caller(scope)))))

    return [models, model]


def _entry(listing: Listing) -> ModelEntry:
    alias = listing.alias
    return ModelEntry(
        id=listing.name,
        created=listing.created,
        max_model_len=listing.max_model_len,
        capabilities=sorted(listing.capabilities),
        deprecation=(alias and alias.deprecated) or msgspec.UNSET,
        sunset=(alias and alias.sunset) or msgspec.UNSET,
    )
