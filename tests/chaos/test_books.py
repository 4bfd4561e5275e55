"""The books under chaos: what the engines made is what the records say, whatever is killed.

Two gateways and two workers, as processes, serve three teams while clients leave at random tokens.
A worker and a gateway are killed and Redis is killed and started again, in a random order. The
engines' side of the count is a file to which each worker appends what it hands over, before it
does; so it outlives the worker. CHAOS_ROUNDS makes it longer, CHAOS_SEED repeats a run.
"""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from forebay_gateway.admin.client import AdminClient
from forebay_shared import keys
from forebay_shared.books import UsageRecord, decode_record
from forebay_shared.settings import Secret
from redis_house import RedisServer, WaitUntil

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "1"))
SEED = int(os.environ.get("CHAOS_SEED", random.randrange(2**32)))
CLIENTS = 8
BUDGET = 2_000
LONGEST = 120
SLOTS = 3
LONG_S = 120.0
ADMIN = "sk-admin-of-the-chaos"

DOCUMENT = {
    "models": [{"id": "echo", "price": {"input": 1, "cached_input": 1, "output": 2}}],
    "organisations": [
        {
            "id": "acme",
            "teams": [
                {"id": "rich", "keys": [{"name": "k"}]},
                {"id": "slots", "limits": {"concurrent_requests": SLOTS}, "keys": [{"name": "k"}]},
                {
                    "id": "poor",
                    "budgets": [{"amount": BUDGET, "unit": "tokens", "window": "total"}],
                    "keys": [{"name": "k"}],
                },
            ],
        }
    ],
}

_GATEWAY = "import sys; from forebay_shared.cli import main; sys.exit(main())"
_WORKER = """
import os, sys
from forebay_shared.settings import Secret, WorkerSettings
from forebay_shared.wire import Delta
from forebay_worker.main import run
from forebay_worker.metering import Metering

log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
replied = Metering.replied

def told(self, reply):
    if isinstance(reply, Delta):
        end = reply.offset + len(reply.token_ids)
        os.write(log, f"{os.getpid()} {reply.request_id} {reply.index} {end}\\n".encode())
    replied(self, reply)

Metering.replied = told
sys.exit(run(WorkerSettings(engine="echo", redis_url=Secret(sys.argv[1]), echo_delay_ms=8)))
"""


class Fleet:
    """The processes. A gateway that is started again keeps its port."""

    def __init__(self, redis: RedisServer, made: Path) -> None:
        self._redis = redis
        self._made = made
        self.workers: list[subprocess.Popen[bytes]] = []
        self.gateways: list[subprocess.Popen[bytes]] = []
        self.ports: list[int] = []
        self.killed: set[int] = set()

    def add_worker(self) -> None:
        command = [sys.executable, "-c", _WORKER, self._redis.url, str(self._made)]
        self.workers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    def add_gateway(self, port: int = 0) -> None:
        with socket.create_server(("127.0.0.1", port)) as listener:
            fd = listener.fileno()
            self.gateways.append(
                subprocess.Popen(
                    [sys.executable, "-c", _GATEWAY, "gateway", "--teams", "--fd", str(fd)],
                    env={
                        **os.environ,
                        "FOREBAY_REDIS_URL": self._redis.url,
                        "FOREBAY_ADMIN_KEY": ADMIN,
                    },
                    pass_fds=(fd,),
                    stderr=subprocess.DEVNULL,
                )
            )
            self.ports.append(listener.getsockname()[1])

    def kill_worker(self, number: int) -> None:
        worker = self.workers.pop(number)
        self.killed.add(worker.pid)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        self.add_worker()

    def kill_gateway(self, number: int) -> None:
        gateway, port = self.gateways.pop(number), self.ports.pop(number)
        gateway.send_signal(signal.SIGKILL)
        gateway.wait()
        self.add_gateway(port)

    def ready(self) -> bool:
        """Every gateway takes requests and counts all workers."""
        return all(self._ready(port) for port in self.ports)

    def _ready(self, port: int) -> bool:
        with suppress(httpx.TransportError):
            base = f"http://127.0.0.1:{port}"
            if httpx.get(f"{base}/ready", timeout=5).status_code == 200:
                lines = httpx.get(f"{base}/metrics", timeout=5).text.splitlines()
                live = [line for line in lines if line.startswith("forebay_workers{")]
                return all(float(line.split()[-1]) >= len(self.workers) for line in live)
        return False

    def close(self) -> None:
        for process in [*self.workers, *self.gateways]:
            process.kill()
            process.wait()


@contextmanager
def fleet(redis: RedisServer) -> Iterator[tuple[Fleet, Path]]:
    with tempfile.TemporaryDirectory(prefix="fb-") as directory:
        made = Path(directory) / "made"
        made.touch()
        house = Fleet(redis, made)
        try:
            for _ in range(2):
                house.add_worker()
                house.add_gateway()
            yield house, made
        finally:
            house.close()


@dataclass
class Seen:
    """What the clients know: tokens that came, by request; those that came whole."""

    tokens: dict[str, int] = field(default_factory=dict[str, int])
    whole: dict[str, int] = field(default_factory=dict[str, int])
    refused: int = 0


async def client(house: Fleet, tokens: list[str], seen: Seen, dice: random.Random) -> None:
    """Asks again and again until it is cancelled; leaves some answers at a random token."""
    while True:
        port = dice.choice(house.ports) if house.ports else 0
        most, n = dice.randrange(5, LONGEST), dice.choice((1, 1, 2))
        body = {
            "model": "echo", "prompt": "to be or not " * dice.randrange(1, 6), "max_tokens": most,
            "n": n, "stream": True, "ignore_eos": True,
        }  # fmt: skip
        leave_at = dice.choice((None, dice.randrange(1, most)))
        headers = {"authorization": f"Bearer {dice.choice(tokens)}"}
        with suppress(httpx.HTTPError, json.JSONDecodeError):
            async with (
                httpx.AsyncClient(timeout=60) as http,
                http.stream(
                    "POST", f"http://127.0.0.1:{port}/v1/completions", json=body, headers=headers
                ) as answer,
            ):
                if answer.status_code == 200:
                    await read(answer, seen, leave_at, most * n)
                else:
                    seen.refused += answer.status_code == 429
        await asyncio.sleep(dice.random() * 0.05)


async def read(answer: httpx.Response, seen: Seen, leave_at: int | None, size: int) -> None:
    count, request_id = 0, ""
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            seen.whole[request_id] = size
        elif line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "choices" not in event:
                return  # an error: what there was counts all the same
            request_id = event["id"]
            count += sum(bool(choice["text"]) for choice in event["choices"])
            seen.tokens[request_id] = count
            if leave_at is not None and count >= leave_at:
                return


def made_tokens(made: Path) -> tuple[dict[str, int], dict[str, set[int]]]:
    """What the engines made of each request, and the processes that did."""
    ends: dict[tuple[str, str], int] = defaultdict(int)
    makers: dict[str, set[int]] = defaultdict(set)
    for line in made.read_text().splitlines():
        pid, request_id, index, end = line.split(" ")
        ends[request_id, index] = max(ends[request_id, index], int(end))
        makers[request_id].add(int(pid))
    totals: dict[str, int] = defaultdict(int)
    for (request_id, _), end in ends.items():
        totals[request_id] += end
    return totals, makers


async def test_the_records_are_what_the_engines_made_whatever_is_killed(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    print(f"CHAOS_SEED={SEED}")
    dice, seen = random.Random(SEED), Seen()
    with fleet(redis_server) as (house, made):
        await wait_until(house.ready, LONG_S)
        admin = AdminClient(f"http://127.0.0.1:{house.ports[0]}", Secret(ADMIN))
        answer = await asyncio.to_thread(admin.call, "POST", "apply", DOCUMENT)
        tokens = list(answer["tokens"].values())
        assert len(tokens) == 3

        async def kill_redis() -> None:
            redis_server.kill()
            await asyncio.sleep(dice.random())  # how long it is away
            await asyncio.to_thread(redis_server.start)

        async def kill_worker() -> None:
            house.kill_worker(dice.randrange(2))

        async def kill_gateway() -> None:
            house.kill_gateway(dice.randrange(2))

        clients = [
            asyncio.create_task(client(house, tokens, seen, random.Random(dice.random())))
            for _ in range(CLIENTS)
        ]
        try:
            for _ in range(ROUNDS):
                blows = [kill_worker, kill_gateway, kill_redis]
                dice.shuffle(blows)
                for blow in blows:
                    await progress(wait_until, made, dice.randrange(200, 1_000))
                    await blow()
                    await wait_until(house.ready, LONG_S)
                    await settled_since(redis_server, wait_until)
            await progress(wait_until, made, 200)
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        client_of_redis = redis_server.client
        await wait_until(lambda: not client_of_redis.hlen(keys.holds()), LONG_S)
        check(redis_server, seen, house.killed, made)
        await check_ledger(redis_server, house, wait_until)


async def progress(wait_until: WaitUntil, made: Path, tokens: int) -> None:
    """Waits until the engines have made so many more."""
    target = size_of(made) + tokens * 30
    await wait_until(lambda: size_of(made) >= target, LONG_S)


def size_of(file: Path) -> int:
    return file.stat().st_size


async def settled_since(redis: RedisServer, wait_until: WaitUntil) -> None:
    """Waits until all that is open now is over, so that no request is struck twice: what loses its
    gateway and its worker has nobody left who knows what it used, and is a case of its own.
    """
    client = redis.client
    now = set(client.hkeys(keys.holds()))
    await wait_until(lambda: not now & set(client.hkeys(keys.holds())), LONG_S)


def check(redis: RedisServer, seen: Seen, killed: set[int], made: Path) -> None:
    client = redis.client
    assert client.zcard(keys.open_requests()) == 0
    assert [name for name in client.scan_iter("fb:{teams}:slots:*") if client.zcard(name)] == []
    entries = [decode_record(fields[b"p"]) for _, fields in client.xrange(keys.records())]
    records = {record.id: record for record in entries}
    assert len(records) == len(entries), "no record is there twice"
    assert not [record for record in entries if record.outcome == "lost"]
    engines, makers = made_tokens(made)
    assert engines.keys() <= records.keys(), "none is missing"
    for record in entries:
        there = engines.get(record.id, 0)
        if record.id in seen.whole:
            assert record.output_tokens == there == seen.whole[record.id], record
        elif makers[record.id] & killed:
            # What a killed worker made and had not sent yet, nobody can know.
            assert seen.tokens.get(record.id, 0) <= record.output_tokens <= there, record
        else:
            assert record.output_tokens == there, record
    assert seen.whole
    assert len(seen.tokens) > len(seen.whole)
    poor = [record for record in entries if record.team == "poor"]
    assert seen.refused
    assert used(poor) >= BUDGET
    assert used(poor) <= BUDGET + 2 * LONGEST + max(record.input_tokens for record in poor)
    print(f"{len(entries)} records, {sum(engines.values())} tokens, {len(seen.whole)} whole")


def used(records: list[UsageRecord]) -> int:
    return sum(record.input_tokens + record.output_tokens for record in records)


async def check_ledger(redis: RedisServer, house: Fleet, wait_until: WaitUntil) -> None:
    """The sums of the books are those of the records."""
    last = redis.client.xrevrange(keys.records(), count=1)[0][0]
    await wait_until(lambda: redis.client.get(keys.ledger_cursor()) == last, LONG_S)
    admin = AdminClient(f"http://127.0.0.1:{house.ports[0]}", Secret(ADMIN))
    rows = await asyncio.to_thread(admin.call, "GET", "usage", None, {"by": "team"})
    entries = [decode_record(fields[b"p"]) for _, fields in redis.client.xrange(keys.records())]
    for row in rows["data"]:
        ours = [record for record in entries if record.team == row["team"]]
        assert row["requests"] == len(ours)
        assert row["input_tokens"] + row["output_tokens"] == used(ours)
        assert round(float(row["cost"]) * 10**9) == sum(record.cost for record in ours)
