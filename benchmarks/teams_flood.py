"""What one team's flood does to another team: time to first token, and shares by weight.

    python benchmarks/teams_flood.py [--rounds 3] [--engine native] [--prefill 0] [--no-save]

    alone     blue asks now and then; nobody else does
    calm      the same, while red keeps two requests open: long prompts, long answers
    flood     the same, while red keeps sixty-four open
    weights   gold (weight 3) and red (1) both flood: gold's share of the tokens that come onto the
              books, from the first answers of both on

One gateway and one worker with eight seats, as `forebay serve` starts them; a CPU, the demo model.
Red's clients are a process of their own: what they read would else keep blue's waiting. With
`--engine echo` an engine without a queue, which leaves what the gateway adds. With `--prefill 256`
steps of as many prompt tokens as where no request has a team. Goals: p99 of blue's TTFT in `flood`
at most 1.2 times that of `calm`; a share of 0.75, 0.03 more or less.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from statistics import median, quantiles

import aiohttp
import common
import httpx
from forebay_gateway.admin.client import AdminClient
from forebay_shared.settings import Secret

SEATS = 8
PAUSE_S = (0.2, 0.5)
WARM_S = 12.0
"""The first prompts of a flood come together; afterwards they are as spread as answers end."""
SHARED_TOKENS = 20_000
"""Enough answers, of some 115 tokens, for a share to be known to 0.03, however slow the machine."""
SHARED_WITHIN_S = 900.0
OPEN = {"alone": 0, "calm": 2, "flood": 64}
PROBES = {"alone": 30, "calm": 60, "flood": 60}
WEIGHTS = {"gold": 3.0, "red": 1.0, "blue": 1.0}
DOCUMENT = {
    "organisations": [
        {
            "id": "o",
            "teams": [
                {"id": team, "weight": weight, "keys": [{"name": "k"}]}
                for team, weight in WEIGHTS.items()
            ],
        }
    ]
}


@dataclass(frozen=True)
class Client:
    """One team's way to a server. It travels to other processes."""

    url: str
    model: str
    token: str

    async def ask(
        self,
        http: aiohttp.ClientSession,
        words: int,
        tokens: int,
        came: Callable[[], None] = lambda: None,
    ) -> float:
        """Seconds to the first token of a streamed answer, which is read to its end; `came` is
        called for each."""
        prompt = " ".join(str(random.randrange(10_000)) for _ in range(words))
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        headers = {"authorization": f"Bearer {self.token}"}
        began, first = time.perf_counter(), 0.0
        async with http.post(f"{self.url}/completions", json=body, headers=headers) as got:
            assert got.status == 200, await got.text()
            async for line in got.content:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - began
                    came()
        return first


@dataclass(frozen=True)
class House:
    """A server, and the clients of its teams."""

    clients: dict[str, Client]
    admin: AdminClient


@contextlib.contextmanager
def house(engine: str, prefill: int) -> Iterator[House]:
    with tempfile.TemporaryDirectory(prefix="fb-") as data:
        port = common.free_port()
        command = [sys.executable, "-m", "forebay_shared.cli", "serve", "--port", str(port)]
        command += ["--engine", engine, "--data-dir", data]
        command += ["--queue-timeout-s", "3600"]  # a slow machine refuses none of the flood
        if engine == "echo":
            command += ["--echo-delay-ms", "10"]
        else:
            command += ["--max-num-seqs", str(SEATS), "--max-num-prefill-tokens", str(prefill)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it is ready when it says so
            url = f"http://127.0.0.1:{port}/v1"
            admin = AdminClient(url, Secret((Path(data) / "admin-key").read_text().strip()))
            made = admin.call("POST", "apply", DOCUMENT)["tokens"]
            tokens = {team: token for team in WEIGHTS
                      for label, token in made.items() if f"{team}/" in label}  # fmt: skip
            head = {"authorization": f"Bearer {tokens['red']}"}
            model = httpx.get(f"{url}/models", headers=head).json()["data"][0]["id"]
            yield House({team: Client(url, model, tokens[team]) for team in WEIGHTS}, admin)
        finally:
            process.terminate()
            process.wait()


class Crowd:
    """So many requests kept open by each client, in a process of their own. One that fails ends
    the measurement: a flood that is none would be no trouble to anybody."""

    def __init__(self, counts: list[tuple[Client, int]], words: int, tokens: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._came = spawn.Value("q", 0)
        arguments = (counts, words, tokens, self._came)
        self._process = spawn.Process(target=_crowd, args=arguments, daemon=True)

    def __enter__(self) -> "Crowd":
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        failed = self._process.exitcode is not None
        self._process.terminate()
        self._process.join()
        if failed:
            raise SystemExit("the flood has ended before its time")

    def warm_up(self) -> None:
        while not self.came and self._process.is_alive():
            time.sleep(0.1)
        time.sleep(WARM_S)

    @property
    def came(self) -> int:
        """Tokens that have come so far."""
        return self._came.value


def _crowd(
    counts: list[tuple[Client, int]], words: int, tokens: int, came: "Synchronized[int]"
) -> None:
    asyncio.run(_keep_open(counts, words, tokens, came))


async def _keep_open(
    counts: list[tuple[Client, int]], words: int, tokens: int, came: "Synchronized[int]"
) -> None:
    def one_more() -> None:
        came.value += 1  # nobody else writes

    async def stay(client: Client) -> None:
        while True:
            await client.ask(http, words, tokens, one_more)

    async with _session() as http, asyncio.TaskGroup() as group:
        for client, count in counts:
            for _ in range(count):
                group.create_task(stay(client))
        group.create_task(asyncio.Event().wait())  # also where nothing is kept open


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600))


def waits(one: House, case: str, pool: list[float]) -> common.Figures:
    """Blue's TTFT while red keeps so many requests open, and red's tokens meanwhile."""
    open_at_once = OPEN[case]
    with Crowd([(one.clients["red"], open_at_once)], 100, 100) as crowd:
        if open_at_once:
            crowd.warm_up()
        began, before = time.perf_counter(), crowd.came
        found = asyncio.run(_probe(one.clients["blue"], PROBES[case]))
        rate = (crowd.came - before) / (time.perf_counter() - began)
    pool += found
    figures = {"TTFT p50 ms": median(found) * 1e3, "TTFT p99 ms": p99(found) * 1e3}
    return figures | ({"red's tokens/s": rate} if open_at_once else {})


async def _probe(client: Client, times: int) -> list[float]:
    found: list[float] = []
    async with _session() as http:
        for _ in range(times):
            found.append(await client.ask(http, 10, 4))
            await asyncio.sleep(random.uniform(*PAUSE_S))
    return found


def p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


def share(one: House) -> common.Figures:
    """Gold's share. Its window is of tokens, not of time: an answer is on the books when it has
    ended, so a short while on a slow machine has none."""
    since = datetime.now(UTC).date().isoformat()
    start = used(one, since)
    counts = [(one.clients[team], OPEN["flood"] // 2) for team in start]
    with Crowd(counts, 20, 20):
        before = booked(one, since, lambda now: all(now[team] > start[team] for team in now))
        enough = sum(before.values()) + SHARED_TOKENS
        after = booked(one, since, lambda now: sum(now.values()) >= enough)
    made = {team: after[team] - before[team] for team in after}
    return {"gold's share": made["gold"] / sum(made.values())}


def booked(one: House, since: str, enough: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    """What is on the books as soon as it is enough."""
    until = time.monotonic() + SHARED_WITHIN_S
    while time.monotonic() < until:
        now = used(one, since)
        if enough(now):
            return now
        time.sleep(0.25)
    raise SystemExit("too little comes onto the books")


def used(one: House, since: str) -> dict[str, int]:
    """Tokens on the books from a day on, by team."""
    rows = one.admin.call("GET", "usage", query={"by": "team", "from": since})["data"]
    found = {row["team"]: row["input_tokens"] + row["output_tokens"] for row in rows}
    return {team: found.get(team, 0) for team in ("gold", "red")}


def main(options: argparse.Namespace) -> None:
    results = common.Results("teams_flood", options)
    case = options.engine + (f" prefill {options.prefill}" if options.prefill else "")
    pools: dict[str, list[float]] = {name: [] for name in OPEN}
    with house(options.engine, options.prefill) as one:
        found = common.in_turns(
            options.rounds, list(OPEN), lambda name, _: waits(one, name, pools[name])
        )
        results.add(case, found, "calm")
        pooled = {name: [{"TTFT p99 ms": p99(pool) * 1e3}] for name, pool in pools.items()}
        results.add(f"{case} together", pooled, "calm")
        if options.engine != "echo" and not options.prefill:
            rounds = [share(one) for _ in range(max(1, options.rounds // 3))]
            results.add(f"{case} weights", {"forebay": rounds}, "forebay")
    results.write()


if __name__ == "__main__":
    made = common.parser(__doc__)
    made.add_argument("--engine", choices=("native", "echo"), default="native")
    made.add_argument("--prefill", type=int, default=0, help="--max-num-prefill-tokens; default: 0")
    made.set_defaults(rounds=3)
    main(made.parse_args())
