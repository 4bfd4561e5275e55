"""The worker's service against a real Redis, with an engine that the test plays itself."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest
from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.errors import DrainingError, EngineError
from forebay_shared.models import ModelCard
from forebay_shared.packets import REPLY, WORK
from forebay_shared.reader import Feed, Reader
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import Secret, WorkerSettings
from forebay_shared.supervise import Supervisor
from forebay_shared.telemetry import WorkerMetrics
from forebay_shared.wire import (
    Accepted,
    Cancel,
    Delta,
    Done,
    Encode,
    Failed,
    Load,
    Reply,
    SequenceStart,
    Started,
    Submit,
    Usage,
    pack_ids,
)
from forebay_worker import main, outbox
from forebay_worker.door import DEFAULT, Bounds
from forebay_worker.engines.base import Emit, Recorder
from forebay_worker.engines.echo.engine import EchoEngine
from forebay_worker.service import Service
from forebay_worker.watchdog import LOOK_S
from patience import PATIENCE_S
from prometheus_client import CollectorRegistry
from redis_house import RedisServer, WaitUntil


class PlayedEngine:
    """Records what it is asked for; the test emits."""

    def __init__(self) -> None:
        self.healthy = True
        self.submits: list[Submit] = []
        self.cancels: list[tuple[str, int, int | None]] = []
        self.lost_gateways: list[str] = []
        self._echo = EchoEngine(WorkerSettings(engine="echo"))
        self.emit: Emit | None = None

    @property
    def card(self) -> ModelCard:
        return self._echo.card

    @property
    def blobs(self) -> dict[str, bytes]:
        return self._echo.blobs

    def start(self, emit: Emit, recorder: Recorder) -> None:
        self.emit = emit

    def submit(self, submit: Submit) -> None:
        self.submits.append(submit)

    def cancel(self, request_id: str, attempt: int, index: int | None = None) -> None:
        self.cancels.append((request_id, attempt, index))

    def cancel_gateway(self, gateway: str) -> None:
        self.lost_gateways.append(gateway)

    def load(self) -> Load:
        return Load()

    def stop(self, timeout_s: float) -> None:
        return


class House:
    """A service with its bus, and the reply stream of gateway "g"."""

    def __init__(self, url: str, bounds: Bounds = DEFAULT) -> None:
        self.engine = PlayedEngine()
        self.publisher = Publisher(url, patience_s=1.0)
        self.metrics = WorkerMetrics(CollectorRegistry(), engine="w")
        self.service = Service("w", self.engine, self.publisher, self.metrics, bounds=bounds)
        self.packets: list[list[Reply]] = []
        self.readers = [
            Reader(url, [self.service.feed()]),
            Reader(
                url,
                [Feed(keys.reply("g"), REPLY, self.packets.append, owned=True, reset=lambda: None)],
            ),
        ]

    @property
    def replies(self) -> list[Reply]:
        return [reply for packet in self.packets for reply in packet]

    @property
    def failures(self) -> list[Failed]:
        return [reply for reply in self.replies if isinstance(reply, Failed)]

    def count(self, name: str) -> float:
        registry = self.metrics.registry
        return registry.get_sample_value(f"forebay_{name}_total", {"engine": "w"}) or 0.0

    def emit(self, replies: Sequence[Reply], gateway: str = "g") -> None:
        """As an engine's thread would."""
        events = [(gateway, reply) for reply in replies]
        thread = threading.Thread(target=self.service.emit, args=(events,))
        thread.start()
        thread.join()

    async def ask(self, *messages: Submit | Cancel) -> None:
        packet = WORK.encode("g", list(messages))
        await self.publisher.publish(keys.work("w"), packet, keys.WORK_MAXLEN)


@asynccontextmanager
async def house(url: str, wait_until: WaitUntil, bounds: Bounds = DEFAULT) -> AsyncIterator[House]:
    one = House(url, bounds)
    async with Supervisor("test") as tasks:
        tasks.start("publisher", one.publisher.run())
        for number, reader in enumerate(one.readers):
            tasks.start(f"reader{number}", reader.run())
        tasks.start("watch", one.service.watch())
        await wait_until(lambda: all(reader.connected for reader in one.readers))
        await one.publisher.call("SET", keys.gateway_lease("g"), "1", "PX", 60_000)
        yield one


def _submit(request_id: str = "r", attempt: int = 1) -> Submit:
    return Submit(
        request_id=request_id,
        attempt=attempt,
        gateway="g",
        prompt=b"\1\0\0\0",
        sampling=SamplingParams(),
    )


async def test_a_step_is_one_packet_and_accepted_comes_first(
    redis_url: str, wait_until: WaitUntil
) -> None:
    async with house(redis_url, wait_until) as one:
        await one.ask(_submit("a"), _submit("b"), _submit("a"), Cancel(request_id="a", attempt=1))
        await wait_until(lambda: len(one.replies) == 2)
        assert one.replies == [Accepted("a", 1), Accepted("b", 1)]
        assert [submit.request_id for submit in one.engine.submits] == ["a", "b"]
        assert one.engine.cancels == [("a", 1, None)]
        step = [Delta(name, 1, 0, 0, [1]) for name in "ab"]
        one.emit(step)
        await wait_until(lambda: len(one.packets) > 1 and len(one.replies) == 4)
        assert one.packets[-1] == step
        assert one.service.open_requests == 2
        one.emit([Done("a", 1, 0, "abort", None, Usage()), Failed("b", 1, "engine_error", "x")])
        assert await one.service.drained(PATIENCE_S)


async def test_an_engine_without_embeddings_is_spared_them(
    redis_url: str, wait_until: WaitUntil
) -> None:
    async with house(redis_url, wait_until) as one:
        await one.ask(Encode(request_id="e", attempt=1, gateway="g", inputs=(b"\1\0\0\0",)))
        await wait_until(lambda: len(one.replies) == 2)
        assert isinstance(failed := one.replies[1], Failed)
        assert (failed.code, failed.retryable) == ("unsupported_parameter", False)
        assert one.service.open_requests == 0


async def test_who_may_not_wait_learns_it_although_the_engine_is_silent(
    redis_url: str, wait_until: WaitUntil
) -> None:
    async with house(redis_url, wait_until, Bounds(requests=1)) as one:
        for name in ("waits", "too many"):
            one.service.receive([_submit(name)])
        await wait_until(lambda: len(one.failures) == 1)
        assert one.failures[0].request_id == "too many"
        assert one.failures[0].code == "overloaded"
        assert one.failures[0].retryable
        assert one.failures[0].retry_after_s == 1.0
        goes_on = _submit("goes on")
        goes_on = msgspec.structs.replace(goes_on, starts=(SequenceStart(0, pack_ids([1, 2])),))
        one.service.receive([goes_on])
        one.emit([Started("waits", 1, 0, 0, 0.0)])
        one.emit([Started("goes on", 1, 0, 0, 0.0)])
        await wait_until(lambda: sum(isinstance(each, Started) for each in one.replies) == 2)
        one.service.receive([_submit("has room")])
        assert [each.request_id for each in one.engine.submits] == ["waits", "goes on", "has room"]
        labels = {"engine": "w", "reason": "requests"}
        value = one.metrics.registry.get_sample_value
        assert value("forebay_refused_requests_total", labels) == 1


async def test_steps_faster_than_redis_travel_merged_and_whole(
    redis_url: str, wait_until: WaitUntil
) -> None:
    async with house(redis_url, wait_until) as one:
        await one.ask(_submit())
        for place in range(2000):
            one.service.emit([("g", Delta("r", 1, 0, place, [place]))])
        await wait_until(
            lambda: any(isinstance(r, Delta) and r.token_ids[-1] == 1999 for r in one.replies)
        )
        deltas = [reply for reply in one.replies if isinstance(reply, Delta)]
        assert [token for delta in deltas for token in delta.token_ids] == list(range(2000))
        assert len(deltas) < 200


async def test_replies_wait_for_a_redis_that_comes_back(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with house(redis_server.url, wait_until) as one:
        await one.ask(_submit())
        await wait_until(lambda: one.replies == [Accepted("r", 1)])
        redis_server.kill()
        one.emit([Delta("r", 1, 0, 0, [1, 2])])
        await wait_until(lambda: not one.publisher.connected)
        one.emit([Delta("r", 1, 0, 2, [3]), Done("r", 1, 0, "length", None, Usage())])
        redis_server.start()
        await wait_until(lambda: any(isinstance(reply, Done) for reply in one.replies))
        assert [type(reply) for reply in one.replies[:2]] == [Accepted, Delta]
        assert one.engine.lost_gateways == []


async def test_too_much_for_an_absent_redis_ends_the_requests_and_says_so(
    redis_server: RedisServer, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "LANE_LIMIT", 100)
    async with house(redis_server.url, wait_until) as one:
        await one.ask(_submit("a"), _submit("b"))
        await wait_until(lambda: len(one.replies) == 2)
        redis_server.kill()
        one.emit([Delta("a", 1, 0, 0, [1])])
        await wait_until(lambda: not one.publisher.connected)
        one.emit([Delta("a", 1, 0, 2 * place, [1]) for place in range(1, 200)])
        await wait_until(lambda: one.engine.lost_gateways == ["g"])
        assert one.service.open_requests == 0
        redis_server.start()
        await wait_until(lambda: sum(isinstance(reply, Failed) for reply in one.replies) == 2)
        failures = [reply for reply in one.replies if isinstance(reply, Failed)]
        assert {failed.request_id for failed in failures} == {"a", "b"}
        assert all(failed.retryable for failed in failures)


async def test_a_gateway_without_a_lease_loses_its_requests_but_not_at_once(
    redis_url: str, wait_until: WaitUntil
) -> None:
    async with house(redis_url, wait_until) as one:
        await one.ask(_submit())
        await wait_until(lambda: one.service.open_requests == 1)
        await one.publisher.call("DEL", keys.gateway_lease("g"))
        loop = asyncio.get_running_loop()
        gone = loop.time()
        await wait_until(lambda: one.engine.lost_gateways == ["g"])
        assert loop.time() - gone > outbox.GONE_S
        assert one.service.open_requests == 0


async def test_a_dead_engine_ends_the_process(redis_url: str) -> None:
    engine = PlayedEngine()
    settings = WorkerSettings(engine="echo", redis_url=Secret(redis_url))
    engine.healthy = False
    with pytest.raises(EngineError):
        await main.serve(settings, engine, stop=asyncio.Event())


async def test_what_cannot_be_read_or_taken_ends_its_own_request_once(
    redis_url: str, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(redis_url, wait_until) as one:

        def stumble(submit: Submit) -> None:
            raise RuntimeError("poison")

        monkeypatch.setattr(one.engine, "submit", stumble)
        foreign = {"type": "submit", "request_id": "odd", "attempt": 2, "gateway": "g", "prompt": 7}
        nameless = {"type": "submit", "prompt": b""}
        sound = msgspec.to_builtins(_submit("poison"), builtin_types=(bytes,))
        packet = msgspec.msgpack.encode([1, "g", [foreign, nameless, sound]])
        await one.publisher.publish(keys.work("w"), packet, keys.WORK_MAXLEN)
        await one.publisher.publish(keys.work("w"), b"\xc1 no packet", keys.WORK_MAXLEN)
        await wait_until(lambda: one.count("dead_letters") == 4)
        await wait_until(lambda: len(one.failures) == 2)
        assert {(f.request_id, f.attempt, f.retryable) for f in one.failures} == {
            ("odd", 2, False),
            ("poison", 1, False),
        }
        assert one.service.open_requests == 0


async def test_a_lost_work_stream_drops_what_was_asked_before_and_nothing_after(
    redis_url: str, wait_until: WaitUntil
) -> None:
    async with house(redis_url, wait_until) as one:
        await one.ask(_submit("before"))
        await wait_until(lambda: one.service.open_requests == 1)
        await one.publisher.call("DEL", keys.work("w"))
        await wait_until(lambda: one.engine.lost_gateways == ["g"])
        assert one.count("fenced_requests") == 1
        one.emit([Done("before", 1, 0, "abort", None, Usage())])
        await one.ask(_submit("after"))
        await wait_until(lambda: len(one.engine.submits) == 2)
        assert one.engine.lost_gateways == ["g"]


async def test_who_leaves_takes_nothing_and_gives_back_what_runs_behind_its_last_token(
    redis_url: str, wait_until: WaitUntil
) -> None:
    async with house(redis_url, wait_until) as one:
        await one.ask(_submit("runs"))
        await wait_until(lambda: one.service.open_requests == 1)
        one.service.refuse(DrainingError("bye"))
        await one.ask(_submit("late"))
        await wait_until(lambda: len(one.failures) == 1)
        one.service.emit([("g", Delta("runs", 1, 0, 0, [1, 2]))])
        assert one.service.give_back() == 1
        assert await one.service.drained(PATIENCE_S)
        await wait_until(lambda: len(one.failures) == 2)
        assert [submit.request_id for submit in one.engine.submits] == ["runs"]
        assert all(f.code == "worker_draining" and f.retryable for f in one.failures)
        assert one.replies.index(Delta("runs", 1, 0, 0, [1, 2])) < one.replies.index(
            one.failures[-1]
        )


class Hanging(PlayedEngine):
    """Its step began long ago."""

    age_s = 0.0

    def load(self) -> Load:
        return Load(step_age_s=self.age_s)


async def test_a_step_may_be_long_but_one_that_hangs_ends_the_worker(redis_url: str) -> None:
    engine = Hanging()
    settings = WorkerSettings(engine="echo", redis_url=Secret(redis_url), step_timeout_s=5.0)
    engine.age_s = 4.9
    serving = asyncio.create_task(main.serve(settings, engine, stop=asyncio.Event()))
    await asyncio.wait({serving}, timeout=2 * LOOK_S)
    assert not serving.done()
    engine.age_s = 5.1
    with pytest.raises(EngineError, match="hangs"):
        await serving
