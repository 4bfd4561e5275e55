"""Where Redis is: at one address, wherever its sentinels say, or on the nodes of a cluster.

    redis://host:6379/0, rediss://…, unix:///path     one server, or a proxy before it
    redis-sentinel://host:26379,host:26379/NAME       the primary that the sentinels know as NAME
    redis-cluster://host:7000,host:7001               a Redis Cluster; any of its nodes will do

`rediss-…` is the same over TLS; user, password and options are those of every server behind it.
The address is looked up with each new connection, so a failover costs a reconnect. It sends no
command of ours.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

CONNECT_S = 2.0
ASK_S = 0.7
"""A sentinel or node that does not answer for so long is passed over."""
ASKED_AT_ONCE = 4
"""Sentinels or nodes, at random: one that is gone may take long to say nothing."""
_PORTS = {"sentinel": 26379, "cluster": 6379}


class Place(Protocol):
    """One Redis, whatever it consists of."""

    async def connection(self, key: str) -> AbstractConnection:
        """An unconnected connection to the server that has `key`. Raises ConnectionError."""
        ...


class Server:
    """One address."""

    def __init__(self, url: str) -> None:
        self._connection = _connection(url)

    async def connection(self, key: str) -> AbstractConnection:
        return self._connection


class Sentinels:
    """The primary that sentinels agree on. They are asked without a password."""

    def __init__(self, hosts: Sequence[str], name: str, base: str) -> None:
        self._hosts = hosts
        self._name = name
        self._base = base

    async def connection(self, key: str) -> AbstractConnection:
        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._name)
        _, answer = await _first_answer([f"redis://{host}" for host in self._hosts], *command)
        address = cast("list[bytes] | None", answer)
        if address is None:
            raise RedisConnectionError("the sentinels know no primary of this name")
        return _connection(_at(self._base, address[0].decode(), int(address[1])))


class Cluster:
    """The nodes of a cluster, and which of them has which slots."""

    def __init__(self, hosts: Sequence[str], base: str) -> None:
        self._base = base
        self._seeds = [_with_host(base, host) for host in hosts]
        self._asked = list(self._seeds)
        self._owners: list[str] = []
        """The URL of a slot's node, "" where there is none; empty until it was asked for."""

    @property
    def nodes(self) -> frozenset[str]:
        """URLs of the nodes that have slots."""
        return frozenset(self._owners) - {""}

    async def connection(self, key: str) -> AbstractConnection:
        await self.refresh()
        if not (url := self.owner(key)):
            raise RedisConnectionError("no node of the cluster has this key's slot")
        return _connection(url)

    def owner(self, key: str) -> str:
        """The URL of the node that has `key`; "" when none is known."""
        return self._owners[key_slot(key.encode())] if self._owners else ""

    async def refresh(self) -> None:
        """Asks a node who has what. Raises ConnectionError when none answers."""
        asked, answer = await _first_answer(self._asked, "CLUSTER", "SLOTS")
        owners = [""] * REDIS_CLUSTER_HASH_SLOTS
        known = dict.fromkeys([asked])
        for first, last, *nodes in cast("list[list[Any]]", answer):
            urls = [self._node(asked, host, port) for host, port, *_ in nodes]
            known.update(dict.fromkeys(urls))
            owners[first : last + 1] = [urls[0]] * (last + 1 - first)
        self._owners = owners
        self._asked = [*known, *(url for url in self._seeds if url not in known)]

    def _node(self, asked: str, host: bytes | None, port: int) -> str:
        """A node that does not know its own name is where it was asked."""
        return _at(self._base, (host or b"").decode() or urlsplit(asked).hostname or "", port)


def place_of(url: str) -> Place:
    """The place that a URL names. Raises ValueError."""
    scheme, hosts, name, base = _taken_apart(url)
    if scheme == "cluster":
        return Cluster(hosts, base)
    if scheme == "sentinel":
        return Sentinels(hosts, name, base)
    return Server(url)


def cluster_of(url: str) -> Cluster | None:
    """The cluster that a URL names; None when it names another place."""
    place = place_of(url) if "-cluster://" in url.split("?")[0] else None
    return place if isinstance(place, Cluster) else None


def by_slot(names: Iterable[str]) -> list[list[str]]:
    """Keys that one server must have together."""
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(key_slot(name.encode()), []).append(name)
    return list(groups.values())


def _taken_apart(url: str) -> tuple[str, list[str], str, str]:
    """The kind of place, its hosts, the primary's name, and a plain URL with another host."""
    parts = urlsplit(url)
    tls, dash, kind = parts.scheme.partition("-")
    if not dash:
        return "", [], "", url
    if kind not in _PORTS or tls not in ("redis", "rediss"):
        raise ValueError(f"{parts.scheme}:// is no kind of Redis URL")
    user, at, hosts = parts.netloc.rpartition("@")
    named = [host if _has_port(host) else f"{host}:{_PORTS[kind]}" for host in hosts.split(",")]
    name, _, database = parts.path.strip("/").partition("/")
    if kind == "sentinel" and not name:
        raise ValueError("a redis-sentinel:// URL ends with /NAME, the primary's name")
    if kind == "cluster":
        database = ""  # a cluster has database 0 alone
    path = f"/{database}" if database else ""
    return kind, named, name, urlunsplit((tls, f"{user}{at}host", path, parts.query, ""))


def _has_port(host: str) -> bool:
    return ":" in host.rpartition("]")[2]


def _with_host(base: str, host: str) -> str:
    parts = urlsplit(base)
    user, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}{at}{host}"))


def _at(base: str, host: str, port: int) -> str:
    return _with_host(base, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def _connection(url: str) -> AbstractConnection:
    # RESP2: every reply of XREAD is a plain list, which costs less to take apart than RESP3's
    # maps. No time-outs and no retries inside the library: a link has its own, and a retry must
    # not hide from the caller that a command may have run twice.
    pool = ConnectionPool.from_url(  # pyright: ignore[reportUnknownVariableType]
        url,
        protocol=2,
        decode_responses=False,
        socket_timeout=None,
        socket_connect_timeout=CONNECT_S,
    )
    return pool.make_connection()


async def _first_answer(urls: Sequence[str], *command: str) -> tuple[str, Any]:
    """The first of some servers that answers, and what it says. Raises ConnectionError when none
    does."""
    some = random.sample(urls, min(len(urls), ASKED_AT_ONCE))
    asking = {asyncio.create_task(_ask(url, command), name="redis.place") for url in some}
    try:
        waiting = asking
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (answer := task.result()) is not None:
                    return answer
    finally:
        for task in asking:
            task.cancel()
    raise RedisConnectionError("no node or sentinel of this Redis answers")


async def _ask(url: str, command: Sequence[str]) -> tuple[str, Any] | None:
    """None when it does not answer, or with an error."""
    connection = _connection(url)
    try:
        async with asyncio.timeout(ASK_S):
            await connection.connect()
            await connection.send_command(*command)
            return url, cast(object, await connection.read_response())
    except (OSError, RedisError, TimeoutError):
        return None
    finally:
        await connection.disconnect(nowait=True)
