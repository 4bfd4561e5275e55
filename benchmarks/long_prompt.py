"""Does a prompt of 128,000 tokens hold up the other clients of a gateway?

    python benchmarks/long_prompt.py [--prompts 8] [--tokens 128000]

A client asks one gateway process for /health without pause; each time its latency is taken. First
it is `alone`, then another sends long chat prompts, one after the other. Goal: a p99 under 100 ms.

    chat       the echo engine, a token a character: hashing, the bus, the engine, the answer
    tokenize   the demo model's tokenizer, 5 characters a token: what of it holds the loop up
"""

import argparse
import json
import sys
import tempfile
import threading
import time
import urllib.request
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import common
from forebay_worker.checkpoint import resolve

KEY = "sk-benchmark"
SENTENCE = "The river rises slowly above the old stone bridge and nobody hurries. "
CASES = {
    "chat": ("--engine echo --served-model-name smollm2 --max-model-len 200000", 1.0),
    "tokenize": ("--served-model-name smollm2", len(SENTENCE) / 13),
}
"""Flags of the server, and the characters of a token."""


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=128_000, help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=8, help="a round; default: %(default)s")
    options = parser.parse_args()
    results = common.Results("long_prompt", options)
    for case, (flags, size) in CASES.items():
        port = common.free_port()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "forebay_shared.cli", "serve", *flags.split()]
            command += [] if case == "chat" else [_long_model(Path(folder) / "model")]
            command += ["--api-key", KEY, "--port", str(port), "--data-dir", folder]
            with common.server(command, f"http://127.0.0.1:{port}", key=KEY):
                round_ = partial(_round, Asks(options, port, case, size))
                found = common.in_turns(options.rounds, ["alone", "beside"], round_)
        results.add(f"{case}, {options.tokens} tokens", found, "alone")
    results.write()


class Asks(NamedTuple):
    """Requests with long prompts for one server."""

    options: argparse.Namespace
    port: int
    case: str
    size: float


def _long_model(folder: Path) -> str:
    """The demo model, said to have positions for long prompts: none is ever run on it."""
    folder.mkdir()
    for file in resolve("").iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 200_000}))
    return str(folder)


def _round(asks: Asks, target: str, _: int) -> common.Figures:
    """Latencies of /health while long prompts are served, or for two seconds while none is."""
    done = threading.Event()
    taken: list[float] = []
    probe = threading.Thread(target=_probe, args=(asks.port, done, taken))
    probe.start()
    figures: common.Figures = {}
    try:
        if target == "alone":
            done.wait(2.0)
        else:
            took = sorted(_ask(asks, number) for number in range(asks.options.prompts))
            figures = {"request s": took[len(took) // 2]}
    finally:
        done.set()
        probe.join()
    taken.sort()
    return {
        "health p50 ms": taken[len(taken) // 2] * 1e3,
        "health p99 ms": taken[len(taken) * 99 // 100] * 1e3,
        "health max ms": taken[-1] * 1e3,
        **figures,
    }


def _probe(port: int, done: threading.Event, taken: list[float]) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    while not done.is_set():
        began = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        taken.append(time.perf_counter() - began)
        done.wait(0.002)
    connection.close()


def _ask(asks: Asks, number: int) -> float:
    """Seconds to the end of the answer to a long prompt, new to every cache."""
    repeats = int(asks.options.tokens * asks.size / len(SENTENCE))
    text = f"Prompt {number}. " + SENTENCE * repeats
    path = "/tokenize"
    body: dict[str, Any] = {"model": "smollm2", "prompt": text}
    if asks.case == "chat":
        messages = [{"role": "user", "content": text}]
        path = "/v1/chat/completions"
        body = {"model": "smollm2", "max_tokens": 4, "messages": messages}
    request = urllib.request.Request(
        f"http://127.0.0.1:{asks.port}{path}",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
