"""One connection to Redis that belongs to one task: many commands per round trip, never a stray
reply.

A command that is cancelled half-way leaves its reply in the socket for the next caller, who would
read another user's data. So a link is never shared, and whatever interrupts a round trip (time-out,
cancel, error) closes the connection. It knows nothing of streams or packets.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
from redis.asyncio.connection import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

Value = bytes | int | None | list["Value"]
Answer = Value | ResponseError
Argument = bytes | str | int | float
Command = tuple[Argument, ...]

LINK_ERRORS = (OSError, RedisError, TimeoutError)
"""What a round trip raises when the link is of no use any more."""

ROUND_TRIP_S = 3.0
"""Redis has this long to answer before the connection counts as lost."""
PACKET_FIELD = b"p"
"""The field of a stream's entry that holds the packet."""
_CONNECT_TIMEOUT_S = 2.0

_pack = cast(
    "Callable[[Command], bytes]",
    hiredis.pack_command,  # pyright: ignore[reportUnknownMemberType]
)


class Link:
    """A connection to `url` (redis://, rediss://, unix://), made on use and after a failure."""

    def __init__(self, url: str) -> None:
        # RESP2: every reply of XREAD is a plain list, which costs less to take apart than RESP3's
        # maps. No time-outs and no retries inside the library: `run` has its own, and a retry must
        # not hide from the caller that a command may have run twice.
        pool = ConnectionPool.from_url(  # pyright: ignore[reportUnknownVariableType]
            url,
            protocol=2,
            decode_responses=False,
            socket_timeout=None,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
        )
        self._connection = pool.make_connection()

    @property
    def connected(self) -> bool:
        return self._connection.is_connected

    async def run(self, commands: Sequence[Command], timeout_s: float) -> list[Answer]:
        """Sends all commands in one write and returns one answer each, in order.

        Raises one of LINK_ERRORS; then any of the commands may have run or not.
        """
        connection = self._connection
        try:
            async with asyncio.timeout(timeout_s):
                if not connection.is_connected:
                    await connection.connect()
                # In C: 1 us a command, where the connection's own packing in Python takes 15.
                packed = [_pack(command) for command in commands]
                await connection.send_packed_command(packed, check_health=False)
                return [await self._answer() for _ in commands]
        except BaseException:
            await self.close()
            raise

    async def _answer(self) -> Answer:
        try:
            return cast(Value, await self._connection.read_response())
        except ReadOnlyError as error:  # a demoted primary: the next connection finds the new one
            raise RedisConnectionError(str(error)) from error
        except (RedisConnectionError, RedisTimeoutError):
            raise
        except ResponseError as error:
            return error

    async def close(self) -> None:
        await self._connection.disconnect(nowait=True)


class Backoff:
    """Waits between attempts: 0.2 s, doubling to 0.5 s, plus jitter: less than 5 a second."""

    FIRST_S = 0.2
    LAST_S = 0.5

    def __init__(self) -> None:
        self._next_s = self.FIRST_S

    def reset(self) -> None:
        self._next_s = self.FIRST_S

    async def wait(self) -> None:
        delay_s = self._next_s * random.uniform(1.0, 1.5)
        self._next_s = min(self._next_s * 2, self.LAST_S)
        await asyncio.sleep(delay_s)


def field(values: list[Any], name: bytes) -> Value:
    """The value that follows `name` in a flat list of pairs; None when it is not there."""
    for position in range(0, len(values) - 1, 2):
        if values[position] == name:
            return values[position + 1]
    return None
