"""What one team's flood does to another team: time to first token, and shares by weight.

    python benchmarks/teams_flood.py [--rounds 3] [--engine native] [--no-save]

    calm      blue asks now and then; red keeps two requests open
    flood     the same, while red keeps sixty-four open: long prompts, long answers
    weights   red (weight 3) and blue (1) both flood: red's share of the tokens on the books

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
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

import common
import httpx
from forebay_gateway.admin.client import AdminClient
from forebay_shared.settings import Secret

SEATS = 8
PROBES = 60
PAUSE_S = 0.25
SHARES_S = 20.0
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


async def waits(one: House, flood: int) -> common.Figures:
    """Blue's TTFT while red keeps so many requests open."""
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        reds = [asyncio.create_task(one.keep_open(http, "red", 100, 100)) for _ in range(flood)]
        await asyncio.sleep(3)
        found: list[float] = []
        for _ in range(PROBES):
            found.append(await one.ask(http, "blue", 10, 4))
            await asyncio.sleep(PAUSE_S)
        for task in reds:
            task.cancel()
        await asyncio.gather(*reds, return_exceptions=True)
    cuts = quantiles(found, n=100)
    return {"TTFT p50 ms": median(found) * 1e3, "TTFT p99 ms": cuts[98] * 1e3}


async def shares(one: House) -> common.Figures:
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        both = [
            asyncio.create_task(one.keep_open(http, team, 20, 20))
            for team in ("red", "blue")
            for _ in range(MANY // 2)
        ]
        await asyncio.sleep(3)
        before = await asyncio.to_thread(used, one)
        await asyncio.sleep(SHARES_S)
        after = await asyncio.to_thread(used, one)
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
    made = {team: after.get(team, 0) - before.get(team, 0) for team in ("red", "blue")}
    return {"red's share": made["red"] / max(1, sum(made.values()))}


def used(one: House) -> dict[str, int]:
    """Tokens on the books, by team."""
    rows = one.admin.call("GET", "usage", query={"by": "team"})["data"]
    return {row["team"]: row["input_tokens"] + row["output_tokens"] for row in rows}


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
