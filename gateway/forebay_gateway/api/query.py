"""The query of a request's URL. It knows no route."""

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl

from forebay_shared.errors import InvalidRequestError
from litestar.types import Scope

_MAX_FIELDS = 64
_NUMBER = re.compile("[0-9]{1,9}")


def query(scope: Scope) -> Mapping[str, str]:
    """The query's values by name, the last of each; lists (`include[]`) say nothing here.

    Raises InvalidRequestError for one of too many fields.
    """
    text = scope["query_string"].decode("latin-1")
    try:
        return dict(parse_qsl(text, max_num_fields=_MAX_FIELDS))
    except ValueError:
        raise InvalidRequestError(
            f"The query may have at most {_MAX_FIELDS} fields.", param="query"
        ) from None


def flag(query: Mapping[str, str], name: str) -> bool:
    """False unless it is there. Raises InvalidRequestError."""
    value = query.get(name, "false").lower()
    if value not in ("true", "false"):
        raise InvalidRequestError(f"{name} must be true or false.", param=name)
    return value == "true"


def number(query: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    """None unless it is there. Raises InvalidRequestError."""
    value = query.get(name)
    if value is None:
        return None
    if not _NUMBER.fullmatch(value) or not least <= int(value) <= most:
        raise InvalidRequestError(f"{name} must be an integer from {least} to {most}.", param=name)
    return int(value)
