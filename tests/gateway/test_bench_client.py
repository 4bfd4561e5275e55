"""The bench client against a scripted server over real HTTP, on a clock that the script sets."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from forebay_gateway.bench.client import Client, Outcome, chat_body, completion_body
from forebay_gateway.bench.metrics import measure
from patience import PATIENCE_S

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


class ScriptClock:
    """Shows the time that the script says; `seen` waits until the client has looked."""

    def __init__(self) -> None:
        self.now = 0.0
        self._looked = asyncio.Event()

    def __call__(self) -> float:
        self._looked.set()
        return self.now

    async def seen(self) -> None:
        await self._looked.wait()
        self._looked.clear()


def sse(*payloads: object) -> bytes:
    texts = [p if isinstance(p, bytes) else msgspec.json.encode(p) for p in payloads]
    return b"".join(b"data: " + text + b"\n\n" for text in texts)


def content(text: str) -> bytes:
    return sse({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


ROLE = sse({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
FINISH = sse({"choices": [{"delta": {}, "finish_reason": "stop"}]})
DONE = sse(b"[DONE]")


def usage(prompt: int, completion: int) -> bytes:
    return sse({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


@asynccontextmanager
async def answering(
    clock: ScriptClock, script: list[tuple[float, bytes]], close: bool = True
) -> AsyncGenerator[str]:
    """A server that answers every request with the pieces of `script`, each at its time."""
    hold = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        await clock.seen()
        for at, piece in script:
            clock.now = at
            writer.write(piece)
            await writer.drain()
            if not piece.startswith(b"HTTP"):
                await clock.seen()
        if not close:
            await hold.wait()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        hold.set()


async def ask(
    script: list[tuple[float, bytes]],
    *,
    sent: float = 0.0,
    timeout_s: float = 30,
    close: bool = True,
) -> Outcome:
    clock = ScriptClock()
    clock.now = sent
    async with (
        answering(clock, script, close) as url,
        Client(url, "/v1/x", headers={}, timeout_s=timeout_s, clock=clock) as client,
    ):
        return await client.stream(chat_body("m", "hello", {}))


async def test_times_are_those_of_chunks_with_content_and_tokens_those_of_usage() -> None:
    outcome = await ask(
        [
            (10.0, HEAD),
            (10.1, ROLE),
            (10.5, content("a")),
            (10.7, content("b") + content("c")),
            (11.2, content("d")),
            (11.5, FINISH + usage(7, 9)),
            (12.0, DONE),
        ],
        sent=10.0,
    )
    assert (outcome.error, outcome.text) == ("", "abcd")
    assert (outcome.prompt_tokens, outcome.output_tokens) == (7, 9)
    assert outcome.ttft == pytest.approx(0.5)
    assert outcome.latency == pytest.approx(1.2)  # up to "d", not to [DONE]
    assert outcome.tpot == pytest.approx((1.2 - 0.5) / (9 - 1))
    assert outcome.itls == pytest.approx([0.2, 0.0, 0.5])


async def test_without_usage_every_chunk_is_one_token() -> None:
    outcome = await ask([(0, HEAD), (1, content("a")), (2, content("b")), (3, DONE)])
    assert (outcome.output_tokens, outcome.tpot) == (2, 1.0)


async def test_reasoning_and_tool_calls_are_content() -> None:
    reasoning = sse({"choices": [{"delta": {"reasoning_content": "hm"}}]})
    call = sse({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]})
    outcome = await ask([(0, HEAD), (1, reasoning), (3, call), (4, DONE)])
    assert outcome.chunks == [1, 3]


@pytest.mark.parametrize("cut", range(1, len(content("한😀"))))
async def test_a_character_cut_by_the_network_stays_whole(cut: int) -> None:
    piece = content("한😀")
    outcome = await ask([(0, HEAD), (1, piece[:cut]), (2, piece[cut:]), (3, DONE)])
    assert (outcome.error, outcome.text) == ("", "한😀")


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([(0, b"HTTP/1.1 429 Slow\r\ncontent-length: 4\r\n\r\nfull")], "http 429"),
        ([(0, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")], "no stream"),
        ([(0, HEAD), (1, content("a"))], "stream cut off"),
        ([(0, HEAD), (1, content("a") + sse({"error": {"message": "x"}}))], "error event"),
        ([(0, HEAD), (1, sse(b"{nonsense"))], "bad chunk"),
        ([(0, HEAD), (1, DONE)], "no content"),
        ([], "connection lost"),
    ],
)
async def test_a_failure_is_told_by_its_kind(script: list[tuple[float, bytes]], kind: str) -> None:
    outcome = await ask(script)
    assert outcome.error == kind


async def test_a_server_that_never_answers_is_a_timeout() -> None:
    assert (await ask([], timeout_s=0.5, close=False)).error == "timeout"


async def test_nobody_listening_is_a_connect_failure() -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()
    async with Client(url, "/v1/x", headers={}, timeout_s=PATIENCE_S) as client:
        assert (await client.stream(b"{}")).error == "connect"


def outcome(sent: float, *chunks: float, tokens: int, prompt: int = 10, error: str = "") -> Outcome:
    return Outcome(
        sent=sent, chunks=list(chunks), prompt_tokens=prompt, output_tokens=tokens, error=error
    )


def test_figures_of_a_run_are_those_computed_by_hand() -> None:
    outcomes = [
        outcome(0.0, 0.5, 0.7, 1.5, tokens=5),  # ttft 500, tpot 250, e2el 1500
        outcome(1.0, 1.1, 1.3, tokens=3),  # ttft 100, tpot 100, e2el 300
        outcome(1.3, 1.6, tokens=1),  # ttft 300, e2el 300; one token: no tpot
        outcome(0.0, tokens=0, error="http 503"),
        outcome(0.0, 0.1, tokens=2, error="stream cut off"),
        outcome(0.0, tokens=0, error="http 503"),
    ]
    metrics = measure(outcomes, 2.0, (50, 90), {"ttft": 400, "tpot": 200})
    assert (metrics.completed, metrics.failed) == (3, 3)
    assert metrics.failures == {"http 503": 2, "stream cut off": 1}
    assert (metrics.total_input_tokens, metrics.total_output_tokens) == (30, 9)
    assert (metrics.request_throughput, metrics.output_throughput) == (1.5, 4.5)
    assert metrics.total_token_throughput == 19.5
    assert metrics.request_goodput == 1.0  # the first is too late and too slow
    assert metrics.max_output_tokens_per_s == 4  # 1.5, 1.1, 1.3 and 1.6
    assert metrics.max_concurrent_requests == 2
    series = metrics.series
    assert series["ttft"].mean == pytest.approx(300)
    assert series["ttft"].percentiles == pytest.approx({50: 300, 90: 460})  # 300 + 0.8 * 200
    assert series["ttft"].std == pytest.approx((80_000 / 3) ** 0.5)
    assert series["tpot"].mean == pytest.approx(175)
    assert series["tpot"].median == pytest.approx(175)
    assert series["itl"].mean == pytest.approx(400)  # 200, 800, 200
    assert series["itl"].median == pytest.approx(200)
    assert series["e2el"].median == pytest.approx(300)


def test_a_run_without_a_success_has_zeros() -> None:
    metrics = measure([outcome(0.0, tokens=0, error="connect")], 1.0, (99,), {"ttft": 1})
    assert (metrics.completed, metrics.request_goodput) == (0, 0.0)
    assert metrics.series["itl"].percentiles == {99: 0.0}


@pytest.mark.parametrize("make", [completion_body, chat_body])
def test_bodies_stream_with_usage_and_later_fields_win(make: Callable[..., bytes]) -> None:
    body = msgspec.json.decode(make("m", "hi", {"max_tokens": 3, "stream_options": {}}))
    assert (body["model"], body["stream"], body["max_tokens"]) == ("m", True, 3)
    assert body["stream_options"] == {}
