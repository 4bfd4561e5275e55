"""A real gateway process while its Redis is away: it lives, says what is wrong, ends well."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateway_fakes import wait_until
from patience import PATIENCE_S
from transcripts import check_error

PROGRAM = """
import json, sys
from forebay_gateway.main import run
from forebay_shared.settings import GatewaySettings
sys.exit(run(GatewaySettings(**json.loads(sys.argv[1]))))
"""


def start(**settings: object) -> subprocess.Popen[str]:
    listener = settings.get("fd")
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(settings)],
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[listener] if isinstance(listener, int) else [],
    )


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_gateway_without_redis_lives_is_not_ready_and_ends_with_zero(
    listener: socket.socket, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    process = start(fd=listener.fileno(), redis_url=f"unix://{tmp_path}/none.sock")
    try:
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            assert http.get("/health").status_code == 200
            for answer in (
                http.get("/ready"),
                http.post("/v1/completions", json={"model": "m", "prompt": "x"}),
            ):
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) >= 1
                check_error(answer.content)
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0


def test_a_port_in_use_is_one_line(listener: socket.socket, tmp_path: Path) -> None:
    process = start(port=listener.getsockname()[1], redis_url=f"unix://{tmp_path}/none.sock")
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    (line,) = errors.splitlines()
    assert "cannot listen on 127.0.0.1" in line
    assert "in use" in line


def test_ctrl_c_ends_a_gateway_too(listener: socket.socket, tmp_path: Path) -> None:
    process = start(fd=os.dup(listener.fileno()), redis_url=f"unix://{tmp_path}/none.sock")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/health"
    wait_until(lambda: httpx.get(url, timeout=PATIENCE_S).status_code == 200, "it answers")
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0


def test_a_signal_before_it_serves_is_not_lost(listener: socket.socket, tmp_path: Path) -> None:
    process = start(fd=listener.fileno(), redis_url=f"unix://{tmp_path}/none.sock")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM)


BROKEN = """
from forebay_shared.reader import Reader
async def run(self):
    raise RuntimeError("a bug")
Reader.run = run
"""


def test_a_gateway_whose_reader_has_crashed_ends_so_that_another_can_start(
    listener: socket.socket, tmp_path: Path
) -> None:
    settings = {"fd": listener.fileno(), "redis_url": f"unix://{tmp_path}/none.sock"}
    process = subprocess.Popen(
        [sys.executable, "-c", BROKEN + PROGRAM, json.dumps(settings)],
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[listener.fileno()],
    )
    _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "gateway.reader failed" in log
