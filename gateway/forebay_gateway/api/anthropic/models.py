"""Models as Anthropic's clients list them. It knows no route."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec
from forebay_shared.errors import InvalidRequestError
from forebay_shared.models import CAP_GENERATE

from forebay_gateway.api.query import number
from forebay_gateway.teams.catalog import Listing

PAGE, MAX_PAGE = 20, 1000


class ModelInfo(msgspec.Struct, frozen=True):
    """`max_input_tokens` is the context, of which an answer may have all that the prompt leaves."""

    id: str
    display_name: str
    created_at: datetime
    lifecycle: Literal["active", "deprecated"]
    max_input_tokens: int
    max_tokens: int
    type: str = "model"


class ModelPage(msgspec.Struct, frozen=True):
    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool


def model_info(listing: Listing) -> ModelInfo:
    today = datetime.now(UTC).date().isoformat()
    from_ = listing.alias.deprecated if listing.alias else ""
    return ModelInfo(
        id=listing.name,
        display_name=listing.name,
        created_at=datetime.fromtimestamp(listing.created, UTC),
        lifecycle="deprecated" if "" < from_ <= today else "active",
        max_input_tokens=listing.max_model_len,
        max_tokens=listing.max_model_len,
    )


def model_page(listings: Sequence[Listing], query: Mapping[str, str]) -> bytes:
    """The JSON of one page of the models that generate: `limit`, `after_id`, `before_id`.

    Raises InvalidRequestError.
    """
    found = [listing for listing in listings if CAP_GENERATE in listing.capabilities]
    limit = number(query, "limit", 1, MAX_PAGE) or PAGE
    first, end = 0, len(found)
    if "after_id" in query:
        first = _place(found, query, "after_id") + 1
    if "before_id" in query:
        end = _place(found, query, "before_id")
        first = max(first, end - limit)
    shown = [model_info(listing) for listing in found[first : min(end, first + limit)]]
    more = first > 0 if "before_id" in query else end - first > limit
    ends = (shown[0].id, shown[-1].id) if shown else (None, None)
    return msgspec.json.encode(ModelPage(shown, *ends, more))


def _place(listings: Sequence[Listing], query: Mapping[str, str], name: str) -> int:
    for place, listing in enumerate(listings):
        if listing.name == query[name]:
            return place
    raise InvalidRequestError(f"{name} must be the id of a model.", param=name)
