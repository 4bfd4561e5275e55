"""One connection to Redis that belongs to one task: many commands per round trip, never a stray
reply.

A command that is cancelled half-way leaves its reply in the socket for the next caller, who would
read another user's data. So a link is never shared, and whatever interrupts a round trip (time-out,
cancel, error) cuts the connection: what a peer that is away has not taken yet must not reach it
when it is back, behind what was sent since on another connection. It knows nothing of streams or
packets.
"""

import asyncio
import random
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from forebay_shared.places import Server, place_of

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
_NO_LINGER = struct.pack("ii", 1, 0)
"""SO_LINGER. Without it the kernel goes on sending for minutes after the socket was closed: a SET
that was given up over a cut link was done 0.6 s after that was healed. So would an admission be,
behind the settlement that gave it up, and hold its place for 90 s."""
ELSEWHERE = (AskError, TryAgainError, ClusterDownError)
"""A node's answer for a key that it has not, or not now; a MovedError is an AskError."""

_pack = cast(
    "Callable[[Command], bytes]",
    hiredis.pack_command,  # pyright: ignore[reportUnknownMemberType]
)


class Link:
    """A connection to the Redis at `url` (see `places`), made on use and after a failure.

    In a cluster it goes to the node that has `key`, and all commands must be for keys in its slot.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self._place = place_of(url)
        self._key = key
        self._clustered = not isinstance(self._place, Server) and bool(key)
        self._connection: AbstractConnection | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def connected(self) -> bool:
        return self._connection is not None and self._connection.is_connected

    async def run(self, commands: Sequence[Command], timeout_s: float) -> list[Answer]:
        """Sends all commands in one write and returns one answer each, in order.

        Raises one of LINK_ERRORS; then any of the commands may have run or not.
        """
        try:
            async with asyncio.timeout(timeout_s):
                connection = self._connection
                if connection is None or not connection.is_connected:
                    connection = await self._connect()
                # In C: 1 us a command, where the connection's own packing in Python takes 15.
                packed = [_pack(command) for command in commands]
                await connection.send_packed_command(packed, check_health=False)
                answers = [await _answer(connection) for _ in commands]
            if self._clustered and (astray := [a for a in answers if isinstance(a, ELSEWHERE)]):
                raise RedisConnectionError(str(astray[0]))  # the next one asks where the key is
        except BaseException:
            await self.close()
            raise
        return answers

    async def close(self) -> None:
        """Whatever waits to be sent, here or in the kernel, is dropped."""
        if self._transport is not None:
            self._transport.abort()
        if self._connection is not None:
            await self._connection.disconnect(nowait=True)

    async def _connect(self) -> AbstractConnection:
        self._connection = connection = await self._place.connection(self._key)
        await connection.connect()
        self._transport = _unlingering(connection)
        return connection


def _unlingering(connection: AbstractConnection) -> asyncio.Transport:
    """Its transport, whose socket is forgotten with all that it has not sent when it is closed."""
    # The library has no other way to a socket that it has opened, and lets go of it by itself.
    writer = connection._writer  # pyright: ignore[reportPrivateUsage]
    assert writer is not None, "it is connected"
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    return cast(asyncio.Transport, writer.transport)


async def _answer(connection: AbstractConnection) -> Answer:
    try:
        return cast(Value, await connection.read_response())
    except ReadOnlyError as error:  # a demoted primary: the next connection finds the new one
        raise RedisConnectionError(str(error)) from error
    except (RedisConnectionError, RedisTimeoutError):
        raise
    except ResponseError as error:
        return error


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


def order(entry_id: bytes) -> tuple[int, int]:
    """A stream entry's id, to compare with others."""
    milliseconds, _, sequence = entry_id.partition(b"-")
    return int(milliseconds), int(sequence or 0)
