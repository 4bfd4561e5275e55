"""Four real workers behind our gateway, and behind smg and vllm-router: hit share and TTFT.

    python benchmarks/router_live.py --traces DIR --peers DIR [--only forebay smg] [--rounds 1]

The workers run the echo engine with a prefix cache of 6,000 blocks of 16 tokens and a prefill of
5,000 tokens/s, so routing alone decides. The peers speak HTTP to their workers, so each of
theirs has a gateway and a Redis of its own. The requests are a slice of a trace, streamed as they
arrive, `--factor` times as fast, each block of 512 tokens cut to 64 bytes of text, which are as
many tokens to the echo engine. Hit share is what the workers report in `usage`.
"""

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import common
from fleet import Request
from fleet_traces import WORKLOADS, faster, load, shared_hits
from forebay_gateway.bench.sse import SseParser
from forebay_shared.embedded import find_server

WORKERS = 4
MODEL = "smollm2"
BLOCK_TEXT = 64
CACHE_BLOCKS = 6_000
ECHO = (
    f"--engine echo --served-model-name {MODEL} --max-num-seqs 64 --echo-delay-ms 5 "
    f"--echo-prefill-rate 5000 --echo-cache-blocks {CACHE_BLOCKS} --max-model-len 100000"
).split()
CLI = [sys.executable, "-m", "forebay_shared.cli"]
OUTPUT = 8


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(rounds=1)
    names = ["forebay", "smg", "vllm-router"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--traces", type=Path, required=True, help="folder with the trace files")
    parser.add_argument("--workload", choices=WORKLOADS, default="azure")
    parser.add_argument("--groups", type=int, default=24, help="of prefixes, for azure")
    parser.add_argument("--requests", type=int, default=400, help="default: %(default)s")
    parser.add_argument("--factor", type=float, default=3.0, help="default: %(default)s")
    options = parser.parse_args()
    requests = load(options.traces, options.workload, options.requests, 0, options.groups)
    requests = faster(requests, options.factor)
    room = WORKERS * CACHE_BLOCKS * 16 // BLOCK_TEXT
    best = shared_hits(requests, room) * BLOCK_TEXT / sum(map(len, map(text, requests)))
    print(f"hit share of one cache as large as all: {best:.3f}", file=sys.stderr)
    results = common.Results("router_live", options)

    def measure(name: str, _: int) -> common.Figures:
        with started(options, name) as url:
            return asyncio.run(replay(url, requests))

    found = common.in_turns(options.rounds, options.only, measure)
    results.add(f"{options.workload} x{options.factor:g}", found, options.only[0])
    results.write()


def text(request: Request) -> str:
    """The prompt: 64 characters of each block, then what follows the last full one."""
    blocks = [random.Random(key).randbytes(BLOCK_TEXT // 2).hex() for key in request.chain]
    rest = (request.prompt % 512) // 8 + 1
    return "".join(blocks) + random.Random(request.prompt).randbytes(rest).hex()[:rest]


@contextlib.contextmanager
def started(options: argparse.Namespace, name: str) -> Iterator[str]:
    """A router with its workers; its URL."""
    port = common.free_port()
    url = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        if name == "forebay":
            command = [*CLI, "gateway", "--port", str(port), "--redis-url"]
            command += [_bus(stack, WORKERS)]
        else:
            command = [common.peer(options), "serve", name, "--port", str(port)]
            for _ in range(WORKERS):
                command += ["--worker", _served(stack)]
        stack.enter_context(common.server(command, url, model=MODEL))
        asyncio.run(_all_there(url))
        yield url


def _bus(stack: contextlib.ExitStack, workers: int) -> str:
    """Redis and workers on it; its URL."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    socket = f"{folder}/redis.sock"
    redis = [str(find_server()), "--port", "0", "--unixsocket", socket, "--save", ""]
    url = f"unix://{socket}"
    for command in (redis, *([[*CLI, "worker", *ECHO, "--redis-url", url]] * workers)):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
    return url


def _served(stack: contextlib.ExitStack) -> str:
    """A worker behind a gateway of its own, open to all, as the peers ask it without a key."""
    port = common.free_port()
    command = [*CLI, "gateway", "--port", str(port), "--redis-url", _bus(stack, 1)]
    url = f"http://127.0.0.1:{port}"
    stack.enter_context(common.server(command, url, model=MODEL))
    return url


async def _all_there(url: str) -> None:
    """Prompts that share nothing, until all workers have been met by everybody."""
    async with aiohttp.ClientSession() as session:
        for at in range(4 * WORKERS):
            await _ask(session, url, random.Random(-at - 1).randbytes(8).hex(), 0.0)
            await asyncio.sleep(0.25)


async def replay(url: str, requests: list[Request]) -> common.Figures:
    """Sends each request when it is due; what came of them."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        began = time.monotonic()
        answers = [_ask(session, url, text(one), began + one.at) for one in requests]
        done = await asyncio.gather(*answers)
    ttft = sorted(seconds for seconds, _, _ in done)
    return {
        "hit share": sum(cached for _, cached, _ in done) / sum(prompt for _, _, prompt in done),
        "TTFT p50 ms": ttft[len(ttft) // 2] * 1000,
        "TTFT p90 ms": ttft[len(ttft) * 9 // 10] * 1000,
        "TTFT p99 ms": ttft[len(ttft) * 99 // 100] * 1000,
    }


async def _ask(
    session: aiohttp.ClientSession, url: str, prompt: str, due: float
) -> tuple[float, int, int]:
    """Seconds to the first token, cached tokens, prompt tokens."""
    await asyncio.sleep(due - time.monotonic())
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    sent, first = time.monotonic(), 0.0
    usage: dict[str, Any] = {}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        parser = SseParser()
        async for part in response.content.iter_any():
            for data in parser.feed(part):
                if data == b"[DONE]":
                    continue
                event = json.loads(data)
                if event.get("choices") and not first:
                    first = time.monotonic()
                usage = event.get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    return first - sent, details.get("cached_tokens", 0), usage["prompt_tokens"]


if __name__ == "__main__":
    main()
