"""Which dialect a path speaks, and so in which form its errors are, whoever finds them.

Errors are found outside of a dialect too: by the edge, by the router, by the HTTP parser.
"""

import re

from forebay_shared.errors import ForebayError

from forebay_gateway.api.anthropic import errors as anthropic
from forebay_gateway.api.errors import envelope

_ANTHROPIC = re.compile("/+v1/+messages(/|$)")


def speaks_anthropic(path: str) -> bool:
    return _ANTHROPIC.match(path) is not None


def written(error: ForebayError, path: str, request_id: bytes) -> tuple[int, bytes]:
    """The status and the JSON of an error in the dialect of a path."""
    if speaks_anthropic(path):
        return anthropic.status(error), anthropic.envelope(error, request_id.decode("latin-1"))
    return error.status, envelope(error)
