"""How soon a change of the teams holds on every gateway; a part of `teams.py`.

Three gateways and two workers as processes. Each gateway is asked every 2 ms or so whether the
change holds there; the change is made by the first one's admin API. What counts is the time from
the admin call's answer to the first answer of a gateway that follows the change, 0 where that came
before.
"""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bus import _process
from common import Figures, free_port
from forebay_shared.embedded import find_server

GATEWAYS = 3
ADMIN = "sk-benchmark-admin"
ASKED_EVERY_S = 0.002
READY_S = 60.0
LONGEST_S = 10.0
MODELS = {"small": "64", "large": "4096"}
"""Served models and their contexts: a prompt that fits into one says which of them was asked."""
PROMPT = "x" * 256


class Client:
    """One connection to one gateway."""

    def __init__(self, port: int, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body)
        self._connection.request(method, path, data, self._headers)
        answer = self._connection.getresponse()
        read = answer.read()
        return answer.status, json.loads(read) if read else None


class Probe(threading.Thread):
    """Asks a gateway again and again, and notes when its status was first `wanted`."""

    def __init__(self, ask: Callable[[], int], wanted: int) -> None:
        super().__init__(daemon=True)
        self._ask = ask
        self._stopped = False
        self._wanted = wanted
        self._seen = threading.Event()
        self._seen_at = 0.0

    def run(self) -> None:
        while not self._stopped:
            status = self._ask()
            if status == self._wanted and not self._seen.is_set():
                self._seen_at = time.perf_counter()
                self._seen.set()
            time.sleep(ASKED_EVERY_S)

    def arm(self, wanted: int) -> None:
        """Before the change, while the gateway answers otherwise."""
        self._wanted = wanted
        self._seen.clear()

    def seen_at(self) -> float:
        if not self._seen.wait(LONGEST_S):
            raise SystemExit(f"a gateway does not follow a change within {LONGEST_S:.0f} s")
        return self._seen_at

    def stop(self) -> None:
        self._stopped = True
        self.join()


class Fleet:
    """`admin` is of the first gateway, `key` of a team."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.admin = Client(ports[0], ADMIN)
        self._until_ready()
        team = {"id": "t", "keys": [{"name": "k"}, {"name": "revoked"}]}
        tree = {"organisations": [{"id": "o", "teams": [team]}]}
        status, made = self.admin.call("POST", "/admin/v1/apply", tree)
        assert status == 200, made
        self.key, self.revoked = (made["tokens"][f"key/t/{name}"] for name in ("k", "revoked"))

    def _until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        for port in self.ports:
            while not self._ready(port):
                if time.monotonic() > deadline:
                    raise SystemExit("the gateways did not become ready")
                time.sleep(0.1)

    def _ready(self, port: int) -> bool:
        with contextlib.suppress(OSError):
            _, models = Client(port, ADMIN).call("GET", "/v1/models")
            return {model["id"] for model in models["data"]} >= set(MODELS)
        return False


@contextlib.contextmanager
def fleet() -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fb-")))
        url = f"unix://{directory}/redis.sock"
        options = ["--port", "0", "--unixsocket", f"{directory}/redis.sock", "--dir"]
        _process(stack, [str(find_server()), *options, str(directory), "--save", ""])
        environment = {**os.environ, "FOREBAY_REDIS_URL": url, "FOREBAY_ADMIN_KEY": ADMIN}
        cli = [sys.executable, "-m", "forebay_shared.cli"]
        ports = [free_port() for _ in range(GATEWAYS)]
        commands = [[*cli, "gateway", "--port", str(port)] for port in ports]
        for name, length in MODELS.items():
            flags = ["--served-model-name", name, "--max-model-len", length]
            commands.append([*cli, "worker", "--engine", "echo", *flags])
        for command in commands:
            process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield Fleet(ports)


def revocation(changes: int) -> Figures:
    """A key is disabled and enabled again: refused is a 403."""
    with fleet() as house:
        path = f"/admin/v1/keys/{house.revoked.split('-')[2]}"
        clients = [Client(port, house.revoked) for port in house.ports]

        def asks(client: Client) -> Callable[[], int]:
            return lambda: client.call("GET", "/v1/models")[0]

        def change(number: int) -> int:
            disabled = number % 2 == 0
            body = {"team": "t", "name": "revoked", "disabled": disabled}
            status, said = house.admin.call("PUT", path, body)
            assert status == 200, said
            return 403 if disabled else 200

        return measured([asks(client) for client in clients], change, (200, 403), changes)


def alias_change(changes: int) -> Figures:
    """An alias goes from one model to another: the prompt is a 400 where its context is short."""
    with fleet() as house:

        def change(number: int) -> int:
            model = "small" if number % 2 == 0 else "large"
            body = {"targets": [{"model": model}], "fall_back_on": []}
            status, said = house.admin.call("PUT", "/admin/v1/aliases/name", body)
            assert status == 200, said
            return 400 if model == "small" else 200

        change(1)
        clients = [Client(port, house.key) for port in house.ports]
        body = {"model": "name", "prompt": PROMPT, "max_tokens": 1}

        def asks(client: Client) -> Callable[[], int]:
            return lambda: client.call("POST", "/v1/completions", body)[0]

        return measured([asks(client) for client in clients], change, (200, 400), changes)


def measured(
    asks: list[Callable[[], int]],
    change: Callable[[int], int],
    statuses: tuple[int, int],
    changes: int,
) -> Figures:
    """Of so many changes, each on all gateways. `change` makes the next one and says what a gateway
    answers then; `statuses` are those before and after the first."""
    probes = [Probe(ask, statuses[0]) for ask in asks]
    for probe in probes:
        probe.start()
        probe.seen_at()
    waited: list[float] = []
    for number in range(changes):
        for probe in probes:
            probe.arm(statuses[(number + 1) % 2])
        wanted = change(number)
        answered = time.perf_counter()
        assert wanted == statuses[(number + 1) % 2]
        waited += [max(0.0, probe.seen_at() - answered) * 1e3 for probe in probes]
    for probe in probes:
        probe.stop()
    waited.sort()
    return {
        "p50 ms": waited[len(waited) // 2],
        "p99 ms": waited[min(len(waited) - 1, len(waited) * 99 // 100)],
        "max ms": waited[-1],
    }
