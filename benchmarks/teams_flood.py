"""What one team's flood does to another team: time to first token, and shares by weight.

    python benchmarks/teams_flood.py [--rounds 3] [--engine native] [--no-save]

    calm      blue asks now and then; red keeps two requests open
    flood     the same, while red keeps sixty-four open: long prompts, long answers
    weights   red (weight 3) and blue (1) both flood: red's share of the tokens that come onto the
              books, from the first answers of both on

One gateway and one worker with eight seats, as `forebay serve` starts them; a CPU, the demo model;
with `--engine echo` an engine without a queue, which leaves what the gateway adds. Goals: p99 of
blue's TTFT in `flood` at most 1.2 times that of `calm`; a share of 0.75, 0.03 more or less.
"""

import argparse
import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles

import common
import httpx
from forebay_gateway.admin.client import AdminClient
from forebay_shared.settings import Secret

SEATS = 8
PROBES = 60
PAUSE_S = 0.25
SHARED_TOKENS = 20_000
"""Enough answers, of some 115 tokens, for a share to be known to 0.03, however slow the machine."""
SHARED_WITHIN_S = 900.0
FEW, MANY = 2, 64
DOCUMENT = {
    "organisations": [
        {
            "id": "o",
            "teams": [
                {"id": "red", "weight": 3.0, "keys": [{"name": "k"}]},
                {"id": "blue", "weight": 1.0, "keys": [{"name": "k"}]},
            ],
        }
    ]
}


class House:
    """A server and the keys of its two teams."""

    def __init__(self, url: str, model: str, tokens: dict[str, str], admin: AdminClient) -> None:
        self.url = url
        self.model = model
        self.tokens = tokens
        self.admin = admin

    async def ask(self, http: httpx.AsyncClient, team: str, words: int, tokens: int) -> float:
        """Seconds to the first token of a streamed answer, which is read to its end."""
        prompt = " ".join(str(random.randrange(10_000)) for _ in range(words))
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        headers = {"authorization": f"Bearer {self.tokens[team]}"}
        began, first = time.perf_counter(), 0.0
        async with http.stream(
            "POST", f"{self.url}/completions", json=body, headers=headers
        ) as got:
            assert got.status_code == 200, await got.aread()
            async for line in got.aiter_lines():
                if line.startswith("data: {") and not first:
                    first = time.perf_counter() - began
        return first

    async def keep_open(self, http: httpx.AsyncClient, team: str, words: int, tokens: int) -> None:
        while True:
            await self.ask(http, team, words, tokens)


@contextlib.contextmanager
def house(engine: str) -> Iterator[House]:
    with tempfile.TemporaryDirectory(prefix="fb-") as data:
        port = common.free_port()
        command = [sys.executable, "-m", "forebay_shared.cli", "serve", "--port", str(port)]
        command += ["--engine", engine, "--data-dir", data]
        command += [
            "--queue-timeout-s",
            "3600",
        ]  # a slow machine refuses none: it would end a flood
        if engine == "echo":
            command += ["--echo-delay-ms", "10"]
        else:
            command += ["--max-num-seqs", str(SEATS)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it is ready when it says so
            url = f"http://127.0.0.1:{port}/v1"
            admin = AdminClient(url, Secret((Path(data) / "admin-key").read_text().strip()))
            made = admin.call("POST", "apply", DOCUMENT)["tokens"]
            tokens = {team: token for team in ("red", "blue")
                      for label, token in made.items() if f"{team}/" in label}  # fmt: skip
            head = {"authorization": f"Bearer {tokens['red']}"}
            models = httpx.get(f"{url}/models", headers=head).json()["data"]
            yield House(url, models[0]["id"], tokens, admin)
        finally:
            process.terminate()
            process.wait()


@contextlib.asynccontextmanager
async def kept_open(
    one: House, counts: Mapping[str, int], words: int, tokens: int
) -> AsyncIterator[httpx.AsyncClient]:
    """Keeps so many requests of each team open. One that fails ends the measurement: a flood that
    is none would be no trouble to anybody."""
    bounds = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=bounds) as http, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(one.keep_open(http, team, words, tokens))
            for team, count in counts.items()
            for _ in range(count)
        ]
        yield http
        for task in tasks:
            task.cancel()


async def waits(one: House, flood: int) -> common.Figures:
    """Blue's TTFT while red keeps so many requests open."""
    async with kept_open(one, {"red": flood}, 100, 100) as http:
        await asyncio.sleep(3)
        found: list[float] = []
        for _ in range(PROBES):
            found.append(await one.ask(http, "blue", 10, 4))
            await asyncio.sleep(PAUSE_S)
    cuts = quantiles(found, n=100)
    return {"TTFT p50 ms": median(found) * 1e3, "TTFT p99 ms": cuts[98] * 1e3}


async def shares(one: House) -> common.Figures:
    """Red's share. Its window is of tokens, not of time: an answer is on the books when it has
    ended, so a short while on a slow machine has none."""
    since = datetime.now(UTC).date().isoformat()
    start = await asyncio.to_thread(used, one, since)
    async with kept_open(one, {"red": MANY // 2, "blue": MANY // 2}, 20, 20):
        before = await booked(one, since, lambda now: all(now[team] > start[team] for team in now))
        enough = sum(before.values()) + SHARED_TOKENS
        after = await booked(one, since, lambda now: sum(now.values()) >= enough)
    made = {team: after[team] - before[team] for team in after}
    return {"red's share": made["red"] / sum(made.values())}


async def booked(
    one: House, since: str, enough: Callable[[dict[str, int]], bool]
) -> dict[str, int]:
    """What is on the books as soon as it is enough. Raises TimeoutError."""
    async with asyncio.timeout(SHARED_WITHIN_S):
        while True:
            now = await asyncio.to_thread(used, one, since)
            if enough(now):
                return now
            await asyncio.sleep(0.25)


def used(one: House, since: str) -> dict[str, int]:
    """Tokens on the books from a day on, by team."""
    rows = one.admin.call("GET", "usage", query={"by": "team", "from": since})["data"]
    found = {row["team"]: row["input_tokens"] + row["output_tokens"] for row in rows}
    return {team: found.get(team, 0) for team in ("red", "blue")}


def main(options: argparse.Namespace) -> None:
    results = common.Results("teams_flood", options)
    with house(options.engine) as one:

        def measure(name: str, _: int) -> common.Figures:
            return asyncio.run(waits(one, FEW if name == "calm" else MANY))

        found = common.in_turns(options.rounds, ["calm", "flood"], measure)
        results.add(options.engine, found, "calm")
        if options.engine != "echo":
            rounds = [asyncio.run(shares(one)) for _ in range(options.rounds)]
            results.add(f"{options.engine} weights", {"forebay": rounds}, "forebay")
    results.write()


if __name__ == "__main__":
    made = common.parser(__doc__)
    made.add_argument("--engine", choices=("native", "echo"), default="native")
    made.set_defaults(rounds=3)
    main(made.parse_args())
