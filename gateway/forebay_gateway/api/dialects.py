"""Which dialect a request speaks, and so in which form its errors are, whoever finds them.

Its path says it; where both dialects have the path, a header that only Anthropic's clients send.

Errors are found outside of a dialect too: by the edge, by the router, by the HTTP parser.
"""

import re
from collections.abc import Iterable

from forebay_shared.errors import ForebayError

from forebay_gateway.api.anthropic import errors as anthropic
from forebay_gateway.api.errors import envelope

_ANTHROPIC = re.compile("/+v1/+messages(/|$)")
_OF_BOTH = re.compile("/+v1/+(models|files)(/|$)")
_VERSION = b"anthropic-version"

RawHeaders = Iterable[tuple[bytes, bytes]]
"""As ASGI has them, with lower-case names."""


def speaks_anthropic(path: str, headers: RawHeaders = ()) -> bool:
    if _ANTHROPIC.match(path):
        return True
    return _OF_BOTH.match(path) is not None and any(name == _VERSION for name, _ in headers)


def written(
    error: ForebayError, path: str, headers: RawHeaders, request_id: bytes
) -> tuple[int, bytes]:
    """The status and the JSON of an error in the dialect of a request."""
    if speaks_anthropic(path, headers):
        return anthropic.status(error), anthropic.envelope(error, request_id.decode("latin-1"))
    return error.status, envelope(error)
