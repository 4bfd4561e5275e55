"""Deploys that nobody notices: workers and gateways end on SIGTERM and are replaced under load."""

import asyncio
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx
import openai
import pytest
from fleet_house import AUTH, KEY, LONG_LEASE_S, Fleet, Gateway, Worker, fleet, stream
from patience import PATIENCE_S
from redis_house import redis_running
from serve_house import until
from transcripts import check_stream

pytestmark = [pytest.mark.system, pytest.mark.chaos]

COMPLETIONS = "/v1/completions"
SEATS = 8
"""Sequences that one worker runs at once."""


@pytest.fixture
def house() -> Iterator[Fleet]:
    with redis_running() as redis, fleet(redis, LONG_LEASE_S) as processes:
        yield processes


def _body(prompt: str, tokens: int) -> dict:
    usage = {"include_usage": True}
    body = {"model": "echo", "prompt": prompt, "max_tokens": tokens, "stream_options": usage}
    return {**body, "temperature": 0}


def _said(prompt: str, tokens: int) -> str:
    return (prompt * (tokens // len(prompt) + 1))[:tokens]


def _check(raw: bytes, prompt: str, tokens: int) -> None:
    heard = check_stream(raw, model="echo", include_usage=True, chat=False)
    assert heard.texts[0] == _said(prompt, tokens)
    usage = heard.usage
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), tokens)


def test_a_worker_that_is_stopped_hands_over_what_it_cannot_finish(house: Fleet) -> None:
    gateway = house.gateway()
    for _ in range(2):
        house.echo(10.0, "--drain-timeout-s", "0.5")
    house.ready(gateway, 2)
    prompts = [f"stream {number} " for number in range(6)]
    under_way = threading.Semaphore(0)

    def ask(prompt: str) -> bytes:
        def seen(count: int) -> None:
            if count == 5:
                under_way.release()

        return stream(gateway, COMPLETIONS, _body(prompt, 1000), seen)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(ask, prompt) for prompt in prompts]
        for _ in prompts:
            under_way.acquire()
        until(lambda: len(house.placements) == len(prompts))
        old = house.holder(0)
        held = house.placements.count(old.name)
        old.send(signal.SIGTERM)
        assert old.process.wait(PATIENCE_S) == 0
        for prompt, answer in zip(prompts, answers, strict=True):
            _check(answer.result(), prompt, 1000)
    moved = gateway.metric("forebay_resubmitted_total", reason="drained")
    assert moved == gateway.metric("forebay_resubmitted_total") == held
    assert f"handed over {held} requests" in old.log


def test_a_worker_that_is_stopped_finishes_what_it_can_and_takes_nothing_new(house: Fleet) -> None:
    gateway = house.gateway()
    for _ in range(2):
        house.echo(10.0, "--drain-timeout-s", "300")  # the long stream alone takes 30 s
    house.ready(gateway, 2)
    under_way = threading.Semaphore(0)

    def seen(count: int) -> None:
        if count == 5:
            under_way.release()

    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(stream, gateway, COMPLETIONS, _body("long", 3000), seen)
        under_way.acquire()
        old = house.holder(0)
        old.send(signal.SIGTERM)
        until(lambda: "draining 1 requests" in old.log)
        asked = 1

        def passes_by() -> bool:
            """A new request does not come to the old worker; one before the news may."""
            nonlocal asked
            before = len(house.placements)
            _check(stream(gateway, COMPLETIONS, _body("new", 10)), "new", 10)
            asked += 1
            until(lambda: len(house.placements) == asked + _resubmitted(gateway))
            return house.placements[before] != old.name

        until(passes_by)
        assert all(passes_by() for _ in range(3))
        _check(long.result(), "long", 3000)
    assert old.process.wait(PATIENCE_S) == 0
    assert _resubmitted(gateway) == house.placements.count(old.name) - 1, "all but the long one"


def _resubmitted(gateway: Gateway) -> float:
    return gateway.metric("forebay_resubmitted_total")


def test_a_gateway_that_is_stopped_finishes_its_streams_and_sends_new_clients_away(
    house: Fleet,
) -> None:
    gateway = house.gateway("--drain-timeout-s", "300")
    house.echo(10.0)
    house.ready(gateway, 1)
    kept = httpx.Client(headers=AUTH, timeout=PATIENCE_S)
    assert kept.get(gateway.base + "/version").headers.get("connection") != "close"

    def seen(count: int) -> None:
        if count == 5:
            gateway.send(signal.SIGTERM)
            until(lambda: not gateway.ready)
            with suppress(httpx.TransportError):  # its second of grace may be over by now
                answer = kept.get(gateway.base + "/ready")
                assert (answer.status_code, answer.headers["connection"]) == (503, "close")
            until(lambda: gateway.get("/ready") is None)
            assert gateway.alive

    _check(stream(gateway, COMPLETIONS, _body("long", 1500), seen), "long", 1500)
    assert gateway.process.wait(PATIENCE_S) == 0


def test_a_rolling_restart_of_everything_under_load_costs_no_client_an_error(house: Fleet) -> None:
    """Clients hold 70 % of all seats, on the SDK's defaults, through a balancer that knows only
    whether a connection is refused."""
    gateways = [house.gateway(), house.gateway()]
    for _ in range(2):
        _start_worker(house)
    for gateway in gateways:
        house.ready(gateway, 2)
    with (
        _balancer([gateway.port for gateway in gateways]) as port,
        ThreadPoolExecutor(2 * SEATS * 7 // 10) as pool,
    ):
        over, answered = threading.Event(), threading.Semaphore(0)
        clients = [
            pool.submit(_client, port, number, over, answered)
            for number in range(pool._max_workers)
        ]
        try:
            for old in list(house.workers.values()):
                _wait_for(answered, 20, clients)
                _replace_worker(house, old, gateways)
            for at, old in enumerate(gateways):
                _wait_for(answered, 20, clients)
                gateways[at] = _replace_gateway(house, old)
            _wait_for(answered, 20, clients)
        finally:
            over.set()
        assert sum(client.result() for client in clients) >= 100
    for gateway in gateways:
        assert gateway.metric("forebay_resubmitted_total", reason="worker_lost") == 0


def _start_worker(house: Fleet) -> None:
    house.echo(10.0, "--max-num-seqs", str(SEATS), "--drain-timeout-s", "0.3")


def _replace_worker(house: Fleet, old: Worker, gateways: list[Gateway]) -> None:
    _start_worker(house)
    for gateway in gateways:
        house.ready(gateway, 3)
    old.send(signal.SIGTERM)
    assert old.process.wait(PATIENCE_S) == 0


def _replace_gateway(house: Fleet, old: Gateway) -> Gateway:
    old.send(signal.SIGTERM)
    assert old.process.wait(PATIENCE_S) == 0
    new = house.gateway(port=old.port)
    house.ready(new, 2)
    return new


def _wait_for(answered: threading.Semaphore, count: int, clients: list) -> None:
    """Waits for so many answers more; a client that fails ends the wait."""
    for _ in range(count):
        while not answered.acquire(timeout=0.2):
            for client in clients:
                if client.done():
                    client.result()


def _client(port: int, number: int, over: threading.Event, answered: threading.Semaphore) -> int:
    """Asks one thing after the other, plain and streamed, until it is over; returns how many."""
    random.seed(number)
    asked = 0
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, timeout=PATIENCE_S) as client:
        while not over.is_set():
            prompt, tokens = f"client {number} asks {asked} ", random.randint(10, 120)
            ask = {"model": "echo", "prompt": prompt, "max_tokens": tokens}
            if asked % 2:
                text = client.completions.create(**ask).choices[0].text
            else:
                parts = client.completions.create(**ask, stream=True)
                text = "".join(part.choices[0].text for part in parts)
            assert text == _said(prompt, tokens)
            asked += 1
            answered.release()
    return asked


@contextmanager
def _balancer(ports: list[int]) -> Iterator[int]:
    """Passes connections on to the ports in turn, to the next when one refuses."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    turns = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal turns
        turns += 1
        for at in range(len(ports)):
            with suppress(OSError):
                port = ports[(turns + at) % len(ports)]
                back_reader, back_writer = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(_copy(reader, back_writer), _copy(back_reader, writer))
                return
        writer.close()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(serve, "127.0.0.1", 0)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()
