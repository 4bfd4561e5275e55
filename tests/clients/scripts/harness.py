"""What the Python scripts share: scenarios by name, one JSON line for each, nothing but the SDK.

A script runs in an environment that holds one SDK. It is told the servers in variables, runs every
scenario (or those named as arguments) and prints `{"scenario", "ok", "error", "ms"}` per line.
"""

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

URL = os.environ["CLIENTS_URL"]
KEY = os.environ["CLIENTS_KEY"]
MODEL = os.environ["CLIENTS_MODEL"]
ECHO_URL = os.environ["CLIENTS_ECHO_URL"]
ECHO_KEY = os.environ["CLIENTS_ECHO_KEY"]
SCRIPTED_URL = os.environ["CLIENTS_SCRIPTED_URL"]
SCRIPTED_KEY = os.environ["CLIENTS_SCRIPTED_KEY"]
EMBEDDING_MODEL = os.environ["CLIENTS_EMBEDDING_MODEL"]

PATIENCE_S = 120.0
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
UNICODE = "naïve 한국어 😀"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}

_scenarios: dict[str, Callable[[], object]] = {}


def scenario(function: Callable[[], object]) -> Callable[[], object]:
    """Registers a function, plain or async, under its own name."""
    _scenarios[function.__name__] = function
    return function


def check(truth: object, *said: object) -> None:
    if not truth:
        raise AssertionError(" ".join(repr(each) for each in said) or "it does not hold")


@contextmanager
def raising(*kinds: type[BaseException]) -> Iterator[list[BaseException]]:
    """Holds the exception that was raised; fails when none of `kinds` was."""
    caught: list[BaseException] = []
    try:
        yield caught
    except kinds as error:
        caught.append(error)
    check(caught, "nothing was raised")


def running(url: str = URL) -> float:
    """How many sequences the engines behind `url` work on."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith("vllm:num_requests_running")]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def until_idle(url: str = URL, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while running(url):
        check(time.monotonic() < deadline, "the engine goes on working")
        time.sleep(0.05)


def main() -> None:
    for name in sys.argv[1:] or _scenarios:
        started = time.monotonic()
        error = ""
        try:
            result = _scenarios[name]()
            if inspect.isawaitable(result):
                asyncio.run(asyncio.wait_for(result, 2 * PATIENCE_S))
        except Exception:
            error = traceback.format_exc(limit=-4)
        line = {"scenario": name, "ok": not error, "error": error}
        line["ms"] = round(1000 * (time.monotonic() - started))
        print(json.dumps(line), flush=True)
