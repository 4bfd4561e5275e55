"""Hosts on one machine: network namespaces with addresses of their own, and links to cut.

Redis' host is in the middle: a link leads from it to each other host, since workers and gateways
speak to nobody else. Clients stay outside; a second link leads from them to each gateway's host.
A cut link drops what is sent and says nothing, as a pulled cable does. It needs root and `ip`.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
REDIS = "redis"


def missing() -> str:
    """Why there can be no hosts here; "" when there can."""
    if shutil.which("ip") is None:
        return "no `ip` (iproute2) on this machine"
    probe = _name("probe")
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


@dataclass(frozen=True)
class Link:
    """Between Redis' host, or the clients, and another one: `near` and `far` are its addresses."""

    near: str
    far: str
    end: tuple[str, str]
    """The far host's namespace and device, which a cut takes down."""

    def cut(self) -> None:
        """Neither side reaches the other, and neither is told."""
        self._set("down")

    def heal(self) -> None:
        self._set("up")

    def _set(self, state: str) -> None:
        namespace, device = self.end
        _ip("-n", namespace, "link", "set", device, state)


class Hosts:
    """Redis' host and others, by name. A context manager."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._number = 0
        self.links: dict[str, Link] = {}
        self.doors: dict[str, Link] = {}
        """To Redis; to the clients."""

    def __enter__(self) -> "Hosts":
        for name in (REDIS, *self._names):
            _ip("netns", "add", _name(name))
            _ip("-n", _name(name), "link", "set", "lo", "up")
        for name in self._names:
            self.links[name] = self._connect(name, near=REDIS)
            self.doors[name] = self._connect(name, near="")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (REDIS, *self._names):
            subprocess.run(["ip", "netns", "del", _name(name)], capture_output=True)

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """What the block opens and starts belongs to the host; this thread alone goes there."""
        with Path("/proc/thread-self/ns/net").open() as home:
            _enter(Path("/var/run/netns") / _name(name))
            try:
                yield
            finally:
                _set(home.fileno())

    @staticmethod
    def sockets_to(port: int) -> set[str]:
        """Addresses of the sockets of the host that this thread is `inside` with such a peer, also
        of those that their process has closed."""
        table = Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]
        ends = (line.split()[1:3] for line in table)
        return {own for own, peer in ends if peer.endswith(f":{port:04X}")}

    def _connect(self, name: str, near: str) -> Link:
        self._number += 1
        net = f"10.77.{self._number}"
        here, there = f"fb{os.getpid() % 10_000}n{self._number}", f"fbf{self._number}"
        _ip("link", "add", here, "type", "veth", "peer", there, "netns", _name(name))
        outside = ["-n", _name(near)] if near else []
        if near:
            _ip("link", "set", here, "netns", _name(near))
        _ip(*outside, "addr", "add", f"{net}.1/30", "dev", here)
        _ip(*outside, "link", "set", here, "up")
        _ip("-n", _name(name), "addr", "add", f"{net}.2/30", "dev", there)
        _ip("-n", _name(name), "link", "set", there, "up")
        return Link(f"{net}.1", f"{net}.2", (_name(name), there))


def _name(host: str) -> str:
    return f"fb-{os.getpid()}-{host}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _enter(path: Path) -> None:
    with path.open() as file:
        _set(file.fileno())


def _set(fd: int) -> None:
    if _LIBC.setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
