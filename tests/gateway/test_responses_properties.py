"""What holds for every response: events agree with items, the books with what is stored."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from forebay_gateway.api.responses.schema import decode_request
from forebay_gateway.api.responses.shapes import new_response
from forebay_gateway.api.responses.store import ResponseStore
from forebay_gateway.api.responses.writer import ResponseWriter
from forebay_gateway.api.transcript import Update, Usage
from forebay_gateway.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text
from forebay_shared.bus import Publisher
from forebay_shared.errors import NotFoundError, RateLimitError
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import GatewaySettings
from forebay_shared.supervise import Supervisor
from forebay_shared.telemetry import GatewayMetrics
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from redis_house import RedisServer
from response_transcripts import check_events, check_response

ID = "resp_" + "ab" * 16

pieces = st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4)
calls = st.tuples(st.sampled_from(["f", "g"]), pieces, st.booleans())
segments = st.lists(
    st.one_of(
        st.tuples(st.just("text"), pieces),
        st.tuples(st.just("reasoning"), pieces),
        st.tuples(st.just("call"), calls),
    ),
    max_size=6,
)


def parts_of(spoken: list) -> list[Part]:
    """An answer as a parser hands it over; a call may lack its end, as at the end of a cut one."""
    parts: list[Part] = []
    called = 0
    for kind, what in spoken:
        if kind == "call":
            name, arguments, ended = what
            parts.append(CallStart(called, f"call_{called:024x}", name))
            parts += [CallArguments(called, piece) for piece in arguments]
            parts += [CallEnd(called)] if ended else []
            called += 1
        else:
            parts += [(Text if kind == "text" else Reasoning)(piece) for piece in what]
    return parts


def new_writer() -> ResponseWriter:
    request = decode_request(b'{"model": "m", "input": "x"}')
    sampling = SamplingParams(max_tokens=5)
    return ResponseWriter(new_response(request, sampling, response_id=ID, created_at=7, store=True))


@settings(deadline=None, max_examples=60)
@given(
    spoken=segments,
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    reason=st.sampled_from(["stop", "length", "tool_calls"]),
)
def test_any_grouping_of_any_parts_is_one_response(
    spoken: list, cuts: list[int], reason: str
) -> None:
    usage = Usage(3, 4, 1, 2)
    parts = parts_of(spoken)
    plain, stream = new_writer(), new_writer()
    plain.collect(Update(0, "", parts, reason=reason))
    raw, at, turn = stream.opening(1, usage), 0, 0
    while at < len(parts):
        size = cuts[turn % len(cuts)]
        raw += stream.events(Update(0, "", parts[at : at + size]), None)
        at, turn = at + size, turn + 1
    raw += stream.events(Update(0, "", reason=reason), None)
    raw += stream.closing(usage)
    whole = check_response(plain.whole([], [], usage))
    assert check_events(raw) | {"completed_at": 0} == whole | {"completed_at": 0}
    said = [item for item in whole["output"] if item["type"] == "message"]
    expected = "".join("".join(what) for kind, what in spoken if kind == "text")
    assert "".join(item["content"][0]["text"] for item in said) == expected


SHARE = 65_536
ids = st.integers(0, 5).map(lambda n: f"resp_{n:032x}")
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["delete", "cancel", "read", "beat"]), ids),
        st.tuples(st.sampled_from(["keep", "begin", "settle"]), ids, st.integers(1, 24_000)),
    ),
    max_size=25,
)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[ResponseStore]:
    publisher = Publisher(url)
    options = GatewaySettings(response_store_bytes=SHARE, max_background_responses=3)
    async with Supervisor("test") as tasks:
        tasks.start("publisher", publisher.run())
        yield ResponseStore(publisher, options, GatewayMetrics(CollectorRegistry()))


def response(size: int) -> bytes:
    return json.dumps({"status": "queued", "error": None, "filler": "x" * size}).encode()


class Model:
    """What the store must hold, said plainly: id -> [status, bytes], the oldest first."""

    def __init__(self) -> None:
        self.kept: dict[str, list] = {}

    def live(self) -> set[str]:
        return {id_ for id_, (status, _) in self.kept.items() if status == "queued"}

    def put(self, id_: str, status: str, size: int) -> None:
        self.kept.pop(id_, None)
        self.kept[id_] = [status, size]
        while sum(size for _, size in self.kept.values()) > SHARE:
            del self.kept[next(iter(self.kept))]


async def take(store: ResponseStore, model: Model, step: tuple) -> None:
    kind, id_, *rest = step
    data = response(rest[0]) if rest else b""
    if kind == "keep" and id_ not in model.kept:
        await store.keep("t", id_, data, b"[]", "completed", "")
        model.put(id_, "completed", len(data) + 2)
    elif kind == "begin" and id_ not in model.kept:
        if len(model.live()) >= 3:
            with pytest.raises(RateLimitError):
                await store.begin("t", id_, data, b"[]", "", "me")
            return
        await store.begin("t", id_, data, b"[]", "", "me")
        model.put(id_, "queued", len(data) + 2)
    elif kind == "settle":
        done = await store.settle("t", id_, data, "completed", "me", 2)
        assert done == (id_ in model.live())
        if done:
            model.put(id_, "completed", len(data) + 2)
    elif kind == "beat":
        assert await store.beat("t", id_, "me", "queued") == (id_ in model.live())
    elif id_ not in model.kept:
        if kind in ("delete", "cancel", "read"):
            with pytest.raises(NotFoundError):
                await getattr(store, kind)("t", id_)
    elif kind == "delete":
        await store.delete("t", id_)
        del model.kept[id_]
    elif kind == "cancel":
        stored = await store.cancel("t", id_)
        if id_ in model.live():
            model.kept[id_][0] = "cancelled"
        assert stored.status == model.kept[id_][0]


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plan=steps)
def test_the_books_agree_with_what_is_stored(
    redis_url: str, session_redis: RedisServer, plan: list
) -> None:
    redis = session_redis.client
    redis.flushall()

    async def run() -> None:
        model = Model()
        async with opened(redis_url) as store:
            for step in plan:
                await take(store, model, step)
            for id_, (status, _) in model.kept.items():
                assert (await store.read("t", id_)).status == status
        sizes = {k.decode(): int(v) for k, v in redis.hgetall("fb:{r:t}:sizes").items()}
        assert sizes.pop("", 0) == sum(sizes.values())
        assert sizes == {id_: size for id_, (_, size) in model.kept.items()}
        assert {k.decode() for k in redis.zrange("fb:{r:t}:index", 0, -1)} == set(model.kept)
        assert {k.decode() for k in redis.zrange("fb:{r:t}:running", 0, -1)} == model.live()

    asyncio.run(run())
