"""compose.yaml as processes: the same commands, variables and secrets, without a container engine.

Each container becomes a process with a loopback address of its own (so every gateway may listen on
port 8000, beside those of another run), `redis` in a URL becomes that address, and what is mounted
or written lives in a temporary folder. What this cannot show: images, users, capabilities and
networks.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from redis_house import redis_binary

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose.yaml"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def read_compose(variables: Mapping[str, str]) -> dict[str, Any]:
    """The file as compose reads it: variables and merge keys resolved, extensions left out."""
    text = _VARIABLE.sub(lambda m: variables.get(m[1]) or m[2] or "", COMPOSE.read_text())
    document: dict[str, Any] = yaml.safe_load(text)
    for service in document["services"].values():
        deploy = service.get("deploy", {})
        if "replicas" in deploy:
            deploy["replicas"] = int(deploy["replicas"])
    return {key: value for key, value in document.items() if not key.startswith("x-")}


class Topology:
    """The services of some profiles, running. A context manager."""

    def __init__(self, profiles: Iterable[str], **variables: str) -> None:
        self._compose = read_compose(variables)
        self._profiles = set(profiles)
        self._folder = Path(tempfile.mkdtemp(prefix="fb-topology-"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._number = 0
        self._network = f"127.{64 + os.getpid() // 256 % 128}.{os.getpid() % 256}"
        self.addresses: dict[str, str] = {}

    def __enter__(self) -> "Topology":
        self._make_secrets()
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def secret(self, name: str) -> str:
        return (self._folder / "deploy/secrets" / name).read_text().strip()

    def services(self) -> list[str]:
        """Those of the chosen profiles."""
        return [
            name
            for name, service in self._compose["services"].items()
            if not service.get("profiles") or self._profiles & set(service["profiles"])
        ]

    def start(self, name: str, **more: str) -> str:
        """One container of a service, `more` in its environment. Returns its own name."""
        service = self._compose["services"][name]
        self._number += 1
        own = f"{name}-{self._number}"
        address = self.addresses[own] = f"{self._network}.{self._number + 1}"
        self.addresses.setdefault(name, address)
        environment = {
            key: self._here("" if value is None else str(value), address)
            for key, value in (service.get("environment", {}) | more).items()
        }
        command = [self._here(word, address) for word in service["command"]]
        self._processes[own] = subprocess.Popen(
            self._program(command, address),
            env={"PATH": os.environ["PATH"], "HOME": str(self._folder)} | environment,
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=(self._folder / f"{own}.log").open("wb"),
        )
        return own

    def process(self, own: str) -> subprocess.Popen[bytes]:
        return self._processes[own]

    def log(self, own: str) -> str:
        return (self._folder / f"{own}.log").read_text()

    def _program(self, command: list[str], address: str) -> list[str]:
        if command[0] == "redis-server":
            return [redis_binary(), *command[1:], "--bind", address]
        assert command[0] == "forebay", command
        return [sys.executable, "-m", "forebay_shared.cli", *command[1:]]

    def _here(self, text: str, address: str) -> str:
        """A word of a command or a variable, for this machine."""
        if text == "0.0.0.0":
            return address
        text = text.replace("/run/secrets/", f"{self._folder}/deploy/secrets/")
        return str(self._folder) if text == "/data" else text

    def _make_secrets(self) -> None:
        """By the very script; only the host's name in Redis' URL becomes an address."""
        deploy = self._folder / "deploy"
        deploy.mkdir()
        shutil.copy(ROOT / "deploy/make-secrets", deploy)
        subprocess.run([deploy / "make-secrets"], check=True, stdout=subprocess.DEVNULL)
        url = deploy / "secrets/redis_url"
        text = url.read_text().replace("@redis:", f"@{self._network}.2:")
        url.chmod(0o600)
        url.write_text(text)
