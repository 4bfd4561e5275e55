"""A real Redis Cluster, and a real Sentinel with its primary and replica, for tests."""

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from patience import PATIENCE_S
from redis import Redis
from redis.exceptions import RedisError
from redis_house import redis_binary
from storm_house import HeldPort

SLOTS = 16_384


class Node:
    """A redis-server on a TCP port of this machine."""

    def __init__(self, *options: str) -> None:
        self._held = HeldPort()
        self.port = self._held.number
        self.directory = Path(tempfile.mkdtemp(prefix="fb-node-"))
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def client(self) -> Redis:
        return Redis(port=self.port)

    def start(self) -> None:
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        command = [redis_binary(), *self.options, *where]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until(self._answers)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        """Ends it, and gives up its port and its files."""
        self.kill()
        self._held.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _answers(self) -> bool:
        return bool(self.client.ping())


class Cluster:
    """`primaries` that share the slots, each with `replicas` of its own."""

    def __init__(self, primaries: int, replicas: int) -> None:
        self._buses: list[HeldPort] = []
        self._timeout_ms = 2_000 if replicas else 15_000
        """Where none takes over, nobody is to be given up: however a machine pauses."""
        self.primaries = [self._node() for _ in range(primaries)]
        self.replicas = [[self._node() for _ in range(replicas)] for _ in range(primaries)]
        self.url = f"redis-cluster://127.0.0.1:{self.primaries[0].port}"

    @property
    def nodes(self) -> list[Node]:
        return [*self.primaries, *(node for nodes in self.replicas for node in nodes)]

    def _node(self) -> Node:
        bus = HeldPort()
        self._buses.append(bus)
        return Node(
            "--cluster-enabled", "yes", "--cluster-node-timeout", str(self._timeout_ms),
            "--cluster-port", str(bus.number), "--save", "",
        )  # fmt: skip

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        share = SLOTS // len(self.primaries)
        first = self.primaries[0].client
        for at, node in enumerate(self.primaries):
            last = SLOTS if node is self.primaries[-1] else (at + 1) * share
            node.client.execute_command("CLUSTER ADDSLOTSRANGE", at * share, last - 1)
        for node in self.nodes[1:]:
            bus = node.client.config_get("cluster-port")["cluster-port"]
            first.execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus)
        until(lambda: all(self._knows(node) == len(self.nodes) for node in self.nodes))
        for primary, replicas in zip(self.primaries, self.replicas, strict=True):
            name = primary.client.execute_command("CLUSTER MYID")
            for node in replicas:
                node.client.execute_command("CLUSTER REPLICATE", name)
                until(
                    lambda node=node: node.client.info("replication")["master_link_status"] == "up"
                )
        until(lambda: all(b"cluster_state:ok" in self._info(node) for node in self.nodes))

    def remove(self) -> None:
        for node in self.nodes:
            node.remove()
        for bus in self._buses:
            bus.close()

    def owner(self, key: str) -> Node:
        """The primary that has a key."""
        slot = self.primaries[0].client.execute_command("CLUSTER KEYSLOT", key)
        return self.primaries[min(slot // (SLOTS // len(self.primaries)), len(self.primaries) - 1)]

    def names(self) -> list[bytes]:
        return [key for node in self.primaries for key in node.client.scan_iter()]

    def _knows(self, node: Node) -> int:
        known = node.client.execute_command("CLUSTER NODES")
        return sum("handshake" not in entry["flags"] for entry in known.values())

    @staticmethod
    def _info(node: Node) -> bytes:
        connection = node.client.connection_pool.get_connection()
        connection.send_command("CLUSTER", "INFO")
        return connection.read_response()


@contextlib.contextmanager
def cluster_running(primaries: int = 3, replicas: int = 0) -> Iterator[Cluster]:
    cluster = Cluster(primaries, replicas)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


class Watched:
    """A primary, its replica, and one sentinel that watches them."""

    def __init__(self) -> None:
        self.primary, self.replica = Node("--save", ""), Node("--save", "")
        self.sentinel = Node()
        self.url = f"redis-sentinel://127.0.0.1:{self.sentinel.port}/forebay"

    def start(self) -> None:
        self.primary.start()
        self.replica.start()
        self.replica.client.execute_command("REPLICAOF", "127.0.0.1", self.primary.port)
        file = self.sentinel.directory / "sentinel.conf"
        self.sentinel.options = (str(file), "--sentinel")
        file.write_text(
            f"sentinel monitor forebay 127.0.0.1 {self.primary.port} 1\n"
            "sentinel down-after-milliseconds forebay 1000\n"
            "sentinel failover-timeout forebay 5000\n"
        )
        self.sentinel.start()
        until(lambda: self.sentinel.client.sentinel_master("forebay")["num-slaves"] == 1)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(RedisError):
            if condition():
                return
        assert time.monotonic() < deadline, "the condition stayed false"
        time.sleep(0.02)


@contextlib.contextmanager
def watched_running() -> Iterator[Watched]:
    watched = Watched()
    try:
        watched.start()
        yield watched
    finally:
        for node in (watched.sentinel, watched.primary, watched.replica):
            node.remove()
