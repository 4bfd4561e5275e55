"""The gateway's own cost, beside the routers smg and vllm-router and the proxy LiteLLM.

    python benchmarks/gateway.py --peers DIR [--quick] [--only forebay smg] [--parts memory]

Ours runs whole: key, template, tokeniser, router, Redis, detokeniser, SSE, on the echo engine, with
one and with two gateway processes. The peers forward to the kit's mock, which answers at once, so
their `added` latency is what is above asking the mock itself (`direct`) in the same round; ours has
no upstream to take off, so all of its latency counts as added. 128 tokens in, 32 out.

    cases     plain and stream at concurrency 1 and 16, with the peers' load tool, all in turns
    cpu       of the processes that speak HTTP to the client, and of all processes of the target
    memory    resident size of those; growth for each of 500 open streams, when all have begun
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import aiohttp
import common
from forebay_gateway.bench.sse import SseParser

PEERS = ("smg", "vllm-router", "litellm")
OURS = {"forebay": 1, "forebay-2": 2}
KEY = "sk-benchmark"
TOKENS, PROMPT, STREAMS = 32, 128, 500
SLOW_MS, LONG = 1_000, 1_000
CASES = {
    "plain c=1": ("--no-stream", "--concurrency", "1"),
    "plain c=16": ("--no-stream", "--concurrency", "16"),
    "stream c=1": ("--stream", "--concurrency", "1"),
    "stream c=16": ("--stream", "--concurrency", "16"),
}


class Target(NamedTuple):
    """A running server: `front` speaks HTTP with the client, `all` is everything that it runs."""

    url: str
    key: str
    pid: int
    front_words: str

    @property
    def all(self) -> list[int]:
        return list(common.family(self.pid))

    @property
    def front(self) -> list[int]:
        return [pid for pid, line in common.family(self.pid).items() if self.front_words in line]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seconds", default="2", help="of one measurement; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 1 s: under 3 minutes")
    names = ["direct", *PEERS, *OURS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="targets")
    parts = ["speed", "memory"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 2, "1"
    results = common.Results("gateway", options)
    if "speed" in options.parts:
        measure_speed(options, results)
        results.write()
    if "memory" in options.parts:
        measure_memory(options, results)
        results.write()


def measure_speed(options: argparse.Namespace, results: common.Results) -> None:
    with running(options, delay_ms=0, tokens=TOKENS) as targets:
        for case, flags in CASES.items():

            def measure(name: str, turn: int, flags: tuple[str, ...] = flags) -> common.Figures:
                return _speed(options, targets[name], flags)

            found = common.in_turns(options.rounds, list(targets), measure)
            _add_latency(found, one_at_a_time=case.endswith("c=1"))
            results.add(case, found, "smg" if "smg" in targets else next(iter(targets)))


def measure_memory(options: argparse.Namespace, results: common.Results) -> None:
    """At 500 streams with a token each second, against the same after 16 streams."""
    with running(options, delay_ms=SLOW_MS, tokens=LONG) as targets:
        found: dict[str, list[common.Figures]] = {}
        for name, target in targets.items():
            if name != "direct":
                asyncio.run(_open_streams(target, 16))
                idle = common.resident_bytes(target.front)
                full = asyncio.run(_open_streams(target, STREAMS))
                found[name] = [
                    {"rss MiB": idle / 2**20, "KiB/stream": (full - idle) / STREAMS / 1024}
                ]
        results.add(f"{STREAMS} streams", found, next(iter(found)))


@contextlib.contextmanager
def running(
    options: argparse.Namespace, *, delay_ms: int, tokens: int
) -> Iterator[dict[str, Target]]:
    """The asked targets and the mock behind the peers, all up at once; idle ones cost nothing."""
    kit = common.peer(options)
    with contextlib.ExitStack() as stack:
        targets: dict[str, Target] = {}

        def start(name: str, command: list[str], key: str, front_words: str, model: str) -> str:
            port = common.free_port()
            url = f"http://127.0.0.1:{port}"
            command = [*command, "--port", str(port)]
            pid = stack.enter_context(common.server(command, url, key=key, model=model))
            targets[name] = Target(url, key, pid, front_words)
            return url

        pace = ["--delay-ms", str(delay_ms), "--tokens", str(tokens)]
        if set(options.only) - set(OURS):
            mock = start("direct", [kit, "serve", "mock", *pace], "", "", "smollm2")
        for name in [name for name in PEERS if name in options.only]:
            key = _peer_key(kit) if name == "litellm" else ""
            start(name, [kit, "serve", name, "--worker", mock], key, "", "smollm2")
        for name in [name for name in OURS if name in options.only]:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            start(name, _ours(OURS[name], delay_ms, folder), KEY, "cli gateway", "smollm2")
        yield targets


def _ours(gateways: int, delay_ms: int, folder: str) -> list[str]:
    flags = f"--engine echo --served-model-name smollm2 --max-num-seqs 512 --api-key {KEY}"
    more = ["--gateways", str(gateways), "--echo-delay-ms", str(delay_ms), "--data-dir", folder]
    return [sys.executable, "-m", "forebay_shared.cli", "serve", *flags.split(), *more]


def _peer_key(kit: str) -> str:
    return subprocess.run(
        [kit, "key"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def _speed(options: argparse.Namespace, target: Target, flags: tuple[str, ...]) -> common.Figures:
    front, everything = target.front, target.all
    before = common.cpu_seconds(front), common.cpu_seconds(everything)
    sizes = ("--prompt-tokens", str(PROMPT), "--max-tokens", str(TOKENS))
    timing = ("--seconds", options.seconds, "--warmup", "0.5")
    extra = ("--extra", '{"ignore_eos": true}')
    found = common.load(options, target.url, *flags, *sizes, *timing, *extra, key=target.key)
    spent = common.cpu_seconds(front) - before[0], common.cpu_seconds(everything) - before[1]
    # The warm-up's answers are in the time, not in the count; at a steady rate they are this many.
    answers = found["answers"] * (1 + 0.5 / found["seconds"])
    figures = {
        "requests/s": found["rps"],
        "latency p50 ms": found["latency_ms"]["p50"],
        "latency p99 ms": found["latency_ms"]["p99"],
        "front cpu ms/request": spent[0] / answers * 1e3,
        "all cpu ms/request": spent[1] / answers * 1e3,
    }
    return figures | ({"ttft p50 ms": found["ttft_ms"]["p50"]} if found["ttft_ms"] else {})


def _add_latency(found: dict[str, list[common.Figures]], *, one_at_a_time: bool) -> None:
    """The latency that a target adds to its upstream's."""
    if not one_at_a_time:
        return
    for name, rounds in found.items():
        for turn, figures in enumerate(rounds):
            upstream = 0.0 if name in OURS else found["direct"][turn]["latency p50 ms"]
            figures["added p50 ms"] = figures["latency p50 ms"] - upstream


async def _open_streams(target: Target, count: int) -> int:
    """Resident bytes of the front processes while `count` streams are open and have begun."""
    body: dict[str, Any] = {
        "model": "smollm2",
        "stream": True,
        "max_tokens": LONG,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "word " * PROMPT}],
    }
    headers = {"authorization": f"Bearer {target.key or 'none'}"}
    url = f"{target.url}/v1/chat/completions"
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=90)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=timeout
    ) as session:

        async def one() -> aiohttp.ClientResponse:
            response = await session.post(url, json=body)
            response.raise_for_status()
            await _first_content(response)
            return response

        responses = await asyncio.gather(*(one() for _ in range(count)))
        size = common.resident_bytes(target.front)
        for response in responses:
            response.close()
    return size


async def _first_content(response: aiohttp.ClientResponse) -> None:
    parser = SseParser()
    async for piece in response.content.iter_any():
        for event in parser.feed(piece):
            if json.loads(event)["choices"][0]["delta"].get("content"):
                return
    raise SystemExit("a stream ended before its first token")


if __name__ == "__main__":
    main()
