"""The Lua scripts: each runs in Redis as one atomic step.

A script is called by its hash; a Redis that does not know it (restarted, failed over) gets its text
once. It knows no meaning of keys or arguments.
"""

import asyncio
from functools import cache
from hashlib import sha1
from importlib.resources import files

from forebay_shared.bus import Publisher, ScriptMissingError
from forebay_shared.link import Argument, Command, Value


class Script:
    """One file of `lua/`, by name."""

    def __init__(self, name: str) -> None:
        self.text = _text(name)
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def command(self, keys: list[str], arguments: list[Argument]) -> Command:
        return ("EVALSHA", self.sha, len(keys), *keys, *arguments)

    def send(
        self, publisher: Publisher, keys: list[str], arguments: list[Argument]
    ) -> asyncio.Future[Value]:
        """Sends it at once; the future fails with ScriptMissingError when Redis lacks the text."""
        return publisher.call("EVALSHA", self.sha, len(keys), *keys, *arguments)

    async def call(self, publisher: Publisher, keys: list[str], arguments: list[Argument]) -> Value:
        """Its answer. Raises BusError."""
        try:
            return await self.send(publisher, keys, arguments)
        except ScriptMissingError:
            return await publisher.call("EVAL", self.text, len(keys), *keys, *arguments)


@cache
def _text(name: str) -> str:
    return (files("forebay_shared") / "lua" / f"{name}.lua").read_text()
