"""The id of a request: the client's own when it is sound, else a new one. It knows no route."""

import random
import re
from collections.abc import Mapping

from litestar.types import Scope

_STATE = "forebay_request_id"
_SOUND = re.compile(rb"[\x21-\x7e]{1,128}")


def new_request_id() -> bytes:
    return b"req_" + b"%024x" % random.getrandbits(96)


def take_request_id(scope: Scope, headers: Mapping[bytes, bytes]) -> bytes:
    """Gives the request its id, which `request_id` tells from then on."""
    sent = headers.get(b"x-request-id", b"")
    taken = sent if _SOUND.fullmatch(sent) else new_request_id()
    scope["state"][_STATE] = taken
    return taken


def request_id(scope: Scope) -> bytes:
    """The id of a request that has passed the edge."""
    return scope["state"][_STATE]
