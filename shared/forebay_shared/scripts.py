"""The Lua scripts: each runs in Redis as one atomic step.

A script is called by its hash; a Redis that does not know it (restarted, failed over) gets its text
once. It knows no meaning of keys or arguments.
"""

import asyncio
import re
from functools import cache
from hashlib import sha1
from importlib.resources import files

from forebay_shared.bus import Publisher
from forebay_shared.link import Argument, Value

_WITH = re.compile(r"-- With (\w+)\.lua\.\n")


class Script:
    """One file of `lua/`, by name, behind the one that its first line asks for."""

    def __init__(self, name: str) -> None:
        self.text = _text(name)
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def send(
        self, publisher: Publisher, keys: list[str], arguments: list[Argument]
    ) -> asyncio.Future[Value]:
        """Sends it at once. The future holds its answer, or a BusError."""
        rest = (len(keys), *keys, *arguments)
        return publisher.call("EVALSHA", self.sha, *rest, instead=("EVAL", self.text, *rest))


@cache
def _text(name: str) -> str:
    text = (files("forebay_shared") / "lua" / f"{name}.lua").read_text()
    shared = _WITH.match(text)
    return _text(shared[1]) + text if shared else text
