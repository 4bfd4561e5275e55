"""The bus's own cost over the real path: gateway side, Redis, worker with the echo engine; no HTTP.

    python benchmarks/bus.py [--rounds 3] [--no-save]

    alone     one job of one token at a time: from placing it to its first token, and to its end;
              beside it, one PING through the same publisher, of which a job needs about four
    paced     256 streams at 20 ms a step: processor time per token of gateway, worker and Redis
    flood     256 streams, no pause: tokens per second

Three processes on one machine, Redis on a Unix socket; this one is the gateway side, on uvloop.
The goal is 0.65 ms for the median of `alone`.
"""

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median, quantiles

import uvloop
from common import Figures, Results, cpu_seconds, parser
from forebay_gateway.backend import Backend, connect
from forebay_gateway.jobs import Job
from forebay_shared import collector, keys
from forebay_shared.embedded import find_server
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import GatewaySettings, Secret
from forebay_shared.wire import Delta

STREAMS = 256
ALONE = 1500
PROMPT = list(range(1, 129))


class House:
    """Redis and an echo worker as processes, and this process's backend."""

    def __init__(self, redis: int, worker: int, backend: Backend) -> None:
        self.pids = {"redis": redis, "worker": worker, "gateway": os.getpid()}
        self.backend = backend

    def cpu(self) -> Figures:
        return {name: cpu_seconds([pid]) for name, pid in self.pids.items()}

    async def job(self, tokens: int, on_first: Callable[[], None] = lambda: None) -> int:
        """Runs one job; returns how many tokens came."""
        card = self.backend.roster.find("echo")
        sampling = SamplingParams(max_tokens=tokens)
        one = Job(request_id=keys.incarnation(), card=card, prompt=PROMPT, sampling=sampling)
        count = 0
        async with self.backend.dispatcher.generate(one) as generation:
            while events := await generation.events():
                if not count:
                    on_first()
                count += sum(len(e.token_ids) for e in events if isinstance(e, Delta))
        return count


@asynccontextmanager
async def house(step_ms: float) -> AsyncIterator[House]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fb-")))
        socket = directory / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(socket), "--dir", str(directory)]
        options += ["--save", "", "--appendonly", "yes", "--appendfsync", "everysec"]
        url = f"unix://{socket}"
        redis = _process(stack, [str(find_server()), *options])
        flags = ["--engine", "echo", "--redis-url", url, "--echo-delay-ms", str(step_ms)]
        program = [str(Path(sys.executable).with_name("forebay")), "worker", *flags]
        worker = _process(stack, program)
        async with connect(GatewaySettings(redis_url=Secret(url))) as backend:
            async with asyncio.timeout(30):
                while not backend.roster.ready:
                    await backend.roster.changed()
            collector.calm()  # as the gateway does when it has started
            yield House(redis, worker, backend)


def _process(stack: contextlib.ExitStack, command: list[str]) -> int:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process.pid


async def alone() -> Figures:
    async with house(0) as one:
        firsts: list[float] = []
        totals: list[float] = []
        pings: list[float] = []
        before = one.cpu()
        for _ in range(ALONE):
            began = time.perf_counter()
            await one.job(1, lambda: firsts.append(time.perf_counter() - began))  # noqa: B023
            totals.append(time.perf_counter() - began)
        after = one.cpu()
        for _ in range(ALONE):
            began = time.perf_counter()
            await one.backend.publisher.call("PING")
            pings.append(time.perf_counter() - began)
        return {
            "ping p50 ms": median(pings) * 1e3,
            **{f"{name} us/job": (after[name] - before[name]) / ALONE * 1e6 for name in after},
            "first p10 ms": quantiles(firsts, n=10)[0] * 1e3,
            "first p50 ms": median(firsts) * 1e3,
            "first p99 ms": quantiles(firsts, n=100)[98] * 1e3,
            "whole p50 ms": median(totals) * 1e3,
        }


async def streams(step_ms: float, tokens: int) -> Figures:
    async with house(step_ms) as one:
        before, began = one.cpu(), time.perf_counter()
        count = sum(await asyncio.gather(*(one.job(tokens) for _ in range(STREAMS))))
        elapsed, after = time.perf_counter() - began, one.cpu()
        figures = {f"{n} us/token": (after[n] - before[n]) / count * 1e6 for n in after}
        return figures | {"tokens/s": count / elapsed}


def main(options: argparse.Namespace) -> None:
    results = Results("bus", options)
    cases: dict[str, Callable[[], Figures]] = {
        "alone": lambda: uvloop.run(alone()),
        "paced": lambda: uvloop.run(streams(20, 250)),
        "flood": lambda: uvloop.run(streams(0, 1000)),
    }
    for name in options.only or cases:
        rounds = [cases[name]() for _ in range(options.rounds)]
        results.add(name, {"forebay": rounds}, "forebay")
    results.write()


if __name__ == "__main__":
    flags = parser(__doc__)
    flags.add_argument("--only", nargs="*", help="cases to run")
    main(flags.parse_args())
