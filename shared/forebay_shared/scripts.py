"""The Lua scripts: each runs in Redis as one atomic step.

A script is called by its hash; a Redis that does not know it (restarted, failed over) gets its text
once. It knows no meaning of keys or arguments.
"""

import asyncio
from functools import cache
from hashlib import sha1
from importlib.resources import files

from forebay_shared.bus import Publisher, ScriptMissingError
from forebay_shared.link import Argument, Value


class Script:
    """One file of `lua/`, by name."""

    def __init__(self, name: str) -> None:
        self.text = _text(name)
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def send(
        self, publisher: Publisher, keys: list[str], arguments: list[Argument]
    ) -> asyncio.Future[Value]:
        """Sends it at once, for whoever does not wait: the future is like `call`."""
        answer = asyncio.get_running_loop().create_future()

        def answered(future: asyncio.Future[Value]) -> None:
            if answer.done():
                return
            error = None if future.cancelled() else future.exception()
            if isinstance(error, ScriptMissingError):
                whole = publisher.call("EVAL", self.text, len(keys), *keys, *arguments)
                whole.add_done_callback(answered)
            elif error is not None:
                answer.set_exception(error)
                answer.exception()  # retrieved: nobody has to wait for it
            elif future.cancelled():
                answer.cancel()
            else:
                answer.set_result(future.result())

        command = publisher.call("EVALSHA", self.sha, len(keys), *keys, *arguments)
        command.add_done_callback(answered)
        return answer

    async def call(self, publisher: Publisher, keys: list[str], arguments: list[Argument]) -> Value:
        """Its answer. Raises BusError."""
        try:
            return await publisher.call("EVALSHA", self.sha, len(keys), *keys, *arguments)
        except ScriptMissingError:
            return await publisher.call("EVAL", self.text, len(keys), *keys, *arguments)


@cache
def _text(name: str) -> str:
    return (files("forebay_shared") / "lua" / f"{name}.lua").read_text()
