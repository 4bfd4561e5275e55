"""What is served when more is asked for than can be: goodput, and how fast the rest is refused.

    python benchmarks/overload.py [--quick] [--rate 50] [--seconds 20]

One gateway and the echo engine at a fixed speed: `--rate` requests/s of TOKENS tokens, no more. The
load is open: Poisson arrivals at a multiple of that rate, whatever comes back. An answer is good
when it ended while the load lasted and its first token came within SLO_S; the queue's deadline is
half of that. Beside it somebody asks /health five times a second.

    x0.8 … x4   clients that take a refusal for an answer
    sdk x2      clients with the openai SDK and its default of two retries

Per case: goodput/s, its ratio to the best below the limit (`x1` or less), the share refused, the
time to a refusal, the time of the first token, attempts per request, and /health. The reference
is x0.8 of the same round.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import common
import openai
from forebay_gateway.bench.metrics import percentile

KEY = "sk-benchmark"
TOKENS, SEATS = 16, 8
SLO_S = 4.0
REFUSED = (429, 503)
FACTORS = (0.8, 1.0, 1.5, 2.0, 4.0)


@dataclass
class Seen:
    """What the clients of one case saw; times in seconds. `end` is when the load ends."""

    end: float
    asked: int = 0
    good: int = 0
    failed: int = 0
    attempts: int = 0
    first: list[float] = field(default_factory=list[float])
    refused: list[float] = field(default_factory=list[float])
    health: list[float] = field(default_factory=list[float])
    unhealthy: int = 0

    def figures(self, seconds: float) -> common.Figures:
        found = {
            "goodput /s": self.good / seconds,
            "refused share": len(self.refused) / self.asked,
            "failed share": self.failed / self.asked,
            "attempts": self.attempts / self.asked,
            "health p99 ms": 1e3 * percentile(sorted(self.health), 99),
            "health failures": float(self.unhealthy),
        }
        for name, times in (("first token", self.first), ("refusal", self.refused)):
            if times:
                found |= {
                    f"{name} p{at} ms": 1e3 * percentile(sorted(times), at) for at in (50, 99)
                }
        return found


Ask = Callable[[Seen], Awaitable[None]]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rate", type=float, default=50.0, help="requests/s that can be served")
    parser.add_argument("--seconds", type=float, default=20.0, help="of one case")
    parser.add_argument("--quick", action="store_true", help="one round of 6 s")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 6.0
    results = common.Results("overload", options)
    cases = [f"x{factor:g}" for factor in FACTORS] + ["sdk x2"]
    with tempfile.TemporaryDirectory() as home:
        port = common.free_port()
        url = f"http://127.0.0.1:{port}"
        with common.server(_serve(options, port, home), url, key=KEY, model="echo"):

            def measure(case: str, turn: int) -> common.Figures:
                return asyncio.run(_case(options, url, case, turn))

            found = common.in_turns(options.rounds, cases, measure)
    for turn in range(options.rounds):
        peak = max(found[case][turn]["goodput /s"] for case in ("x0.8", "x1"))
        for case in cases:
            found[case][turn]["of peak"] = found[case][turn]["goodput /s"] / peak
    results.add(f"{options.rate:g}/s", found, reference=cases[0])
    results.write()


def _serve(options: argparse.Namespace, port: int, home: str) -> list[str]:
    """A server whose engine takes 1/rate s per request: SEATS at once, TOKENS steps each."""
    step_ms = 1e3 * SEATS / options.rate / TOKENS
    return [
        sys.executable, "-m", "forebay_shared.cli", "serve", "--engine", "echo",
        "--echo-delay-ms", f"{step_ms:.3f}", "--max-num-seqs", str(SEATS), "--api-key", KEY,
        "--queue-timeout-s", str(SLO_S / 2), "--port", str(port), "--data-dir", home,
    ]  # fmt: skip


async def _case(options: argparse.Namespace, url: str, case: str, turn: int) -> common.Figures:
    kind, _, factor = case.rpartition("x")
    seen = Seen(time.perf_counter() + options.seconds)
    rng = random.Random(f"{case} {turn}")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=60)
        ask = _by_sdk(client, seen) if kind else _plainly(session, url)
        watch = asyncio.create_task(_watch_health(session, url, seen))
        asking: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        due, end = loop.time(), loop.time() + options.seconds
        while due < end:
            await asyncio.sleep(due - loop.time())
            seen.asked += 1
            asking.append(asyncio.create_task(ask(seen)))
            due += rng.expovariate(options.rate * float(factor))
        await asyncio.gather(*asking)
        watch.cancel()
        await client.close()
    return seen.figures(options.seconds)


def _plainly(session: aiohttp.ClientSession, url: str) -> Ask:
    async def ask(seen: Seen) -> None:
        began = time.perf_counter()
        body = {"model": "echo", "prompt": "abcd" * 4, "max_tokens": TOKENS, "stream": True}
        headers = {"authorization": f"Bearer {KEY}"}
        seen.attempts += 1
        try:
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                if answer.status in REFUSED:
                    await answer.read()
                    seen.refused.append(time.perf_counter() - began)
                    return
                first = await answer.content.readline()
                first_s = time.perf_counter() - began
                rest = await answer.read()
        except aiohttp.ClientError:
            seen.failed += 1
            return
        _judge(seen, first_s, whole=b'"error"' not in first and rest.endswith(b"[DONE]\n\n"))

    return ask


def _by_sdk(client: openai.AsyncOpenAI, seen: Seen) -> Ask:
    async def count(_: object) -> None:
        seen.attempts += 1

    client._client.event_hooks["request"].append(count)

    async def ask(seen: Seen) -> None:
        began = time.perf_counter()
        first_s = 0.0
        try:
            stream = await client.completions.create(
                model="echo", prompt="abcd" * 4, max_tokens=TOKENS, stream=True
            )
            async for _ in stream:
                first_s = first_s or time.perf_counter() - began
        except openai.APIStatusError as error:
            if error.status_code in REFUSED:
                seen.refused.append(time.perf_counter() - began)
            else:
                seen.failed += 1
            return
        except openai.APIError:
            seen.failed += 1
            return
        _judge(seen, first_s, whole=True)

    return ask


def _judge(seen: Seen, first_s: float, *, whole: bool) -> None:
    if not whole:
        seen.failed += 1
        return
    seen.first.append(first_s)
    seen.good += first_s <= SLO_S and time.perf_counter() <= seen.end


async def _watch_health(session: aiohttp.ClientSession, url: str, seen: Seen) -> None:
    while True:
        began = time.perf_counter()
        async with session.get(f"{url}/health") as answer:
            seen.unhealthy += answer.status != 200
        seen.health.append(time.perf_counter() - began)
        await asyncio.sleep(0.2)


if __name__ == "__main__":
    main()
