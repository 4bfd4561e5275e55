"""Inputs become vectors in shared steps; what is wrong with one request ends only that."""

from collections.abc import Sequence
from time import monotonic

import numpy as np
import pytest
from engine_fakes import Recorded
from forebay_shared.models import EmbeddingCard
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import Done, Embedded, Encode, Failed, Started, pack_ids
from forebay_worker.pooling.core import EncodeCore
from forebay_worker.pooling.ports import TokenIds, Vectors
from hypothesis import given
from hypothesis import strategies as st

SIZE = 4
POISON = 13


class Runner:
    """The vector of an input is its first id, its length, its sum and 1. It fails on POISON."""

    vocab_size, max_model_len, token_budget, size = 64, 32, 16, SIZE

    def __init__(self) -> None:
        self.steps: list[list[list[int]]] = []
        self.broken = False

    def encode(self, inputs: Sequence[TokenIds]) -> Vectors:
        self.steps.append([ids.tolist() for ids in inputs])
        if self.broken or any(POISON in ids for ids in inputs):
            raise RuntimeError("out of memory")
        return np.array([vector(ids.tolist()) for ids in inputs], np.float32)


def vector(ids: Sequence[int]) -> list[float]:
    return [ids[0], len(ids), sum(ids), float("nan") if ids[0] == 14 else 1.0]


def make(runner: Runner | None = None, **settings: int) -> EncodeCore:
    card = EmbeddingCard(SIZE, matryoshka=True, sizes=(2,))
    return EncodeCore(runner or Runner(), card, WorkerSettings(**settings), Recorded())


def encode(*inputs: Sequence[int], name: str = "r", **fields: object) -> Encode:
    packed = tuple(map(pack_ids, inputs))
    return Encode(**{"request_id": name, "attempt": 1, "gateway": "g", "inputs": packed} | fields)


def run(core: EncodeCore, *encodes: Encode) -> dict[str, list[object]]:
    """Every event by request, once all is done."""
    for one in encodes:
        core.submit(one, monotonic())
    events = core.take_events()
    while not core.idle:
        core.step()
        events += core.take_events()
    core.check()
    found: dict[str, list[object]] = {}
    for gateway, event in events:
        assert gateway == "g"
        found.setdefault(event.request_id, []).append(event)
    return found


def vectors(events: list[object]) -> np.ndarray:
    answer = events[-1]
    assert isinstance(answer, Embedded)
    return np.stack([np.frombuffer(data, "<f4") for data in answer.vectors])


@given(
    st.lists(
        st.lists(st.lists(st.integers(20, 40), min_size=1, max_size=20), min_size=1, max_size=6),
        min_size=1,
        max_size=6,
    )
)
def test_every_input_gets_its_own_vector_whatever_shares_its_steps(
    requests: list[list[list[int]]],
) -> None:
    runner = Runner()
    core = make(runner)
    encodes = [
        encode(*inputs, name=str(at), normalize=False, team=str(at % 2))
        for at, inputs in enumerate(requests)
    ]
    found = run(core, *encodes)
    for at, inputs in enumerate(requests):
        assert vectors(found[str(at)]).tolist() == [vector(ids) for ids in inputs]
        assert found[str(at)][-1].usage.prompt_tokens == sum(map(len, inputs))
    for step in runner.steps:
        assert len(step) == 1 or sum(map(len, step)) <= runner.token_budget


def test_a_small_request_does_not_wait_for_all_of_a_large_one() -> None:
    runner = Runner()
    core = make(runner)
    core.submit(encode(*[[20, 21, 22, 23]] * 60, name="large"), monotonic())
    core.submit(encode([30], name="small"), monotonic())
    core.step()
    assert core.take_events()[0][1].request_id == "large"  # it has begun
    assert [30] in runner.steps[0]


def test_vectors_are_cut_and_have_length_one_unless_asked_otherwise() -> None:
    plain, cut, raw = encode([3, 4]), encode([3, 4], name="c", dimensions=2), encode([3, 4], name="w", normalize=False, dimensions=2)  # noqa: E501  # fmt: skip
    found = run(make(), plain, cut, raw)
    assert np.linalg.norm(vectors(found["r"])) == pytest.approx(1)
    assert vectors(found["c"])[0] == pytest.approx(np.array([3, 2]) / np.sqrt(13))
    assert vectors(found["w"]).tolist() == [[3, 2]]


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"inputs": ()}, "invalid_value", "input"),
        ({"inputs": (b"",)}, "invalid_value", "input"),
        ({"inputs": (b"\1\0\0",)}, "invalid_value", "input"),
        ({"inputs": (pack_ids([64]),)}, "invalid_value", "input"),
        ({"inputs": (pack_ids([2] * 33),)}, "context_length_exceeded", "input"),
        ({"inputs": (pack_ids([2]),) * 65}, "invalid_value", "input"),
        ({"dimensions": 3}, "invalid_value", "dimensions"),
        ({"dimensions": -1}, "invalid_value", "dimensions"),
        ({"weight": float("nan")}, "invalid_value", "weight"),
    ],
)
def test_what_cannot_be_encoded_is_refused_by_name(
    change: dict[str, object], code: str, param: str
) -> None:
    (failed,) = run(make(), encode([2], **change))["r"]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.param, failed.retryable) == (code, param, False)


def test_a_bad_input_fails_alone() -> None:
    found = run(
        make(), encode([POISON], name="bad"), encode([14], name="nan"), encode([2], name="good")
    )
    assert isinstance(found["bad"][0], Failed)
    assert isinstance(found["nan"][0], Failed)
    assert len(vectors(found["good"])) == 1


def test_an_engine_that_only_fails_calls_itself_dead() -> None:
    runner = Runner()
    runner.broken = True
    core = make(runner)
    for at in range(3):
        assert core.healthy
        run(core, encode([2], name=str(at)))
    assert not core.healthy


def test_a_cancelled_request_leaves_and_a_full_queue_refuses() -> None:
    core = make(max_num_queued_reqs=1)
    core.submit(encode(*[[20] * 16] * 3), monotonic())
    core.step()
    (_, begun), *_ = core.take_events()
    assert isinstance(begun, Started)
    core.submit(encode([2], name="late"), monotonic())
    assert core.take_events()[0][1].code == "overloaded"
    core.cancel_gateway("g")
    ((_, done),) = core.take_events()
    assert isinstance(done, Done)
    assert (done.finish_reason, core.idle, core.load().waiting_tokens) == ("abort", True, 0)
    core.check()


def test_what_waits_too_long_is_told_so() -> None:
    core = make()
    core.submit(encode([2], queue_timeout_ms=1), monotonic() - 1)
    core.step()
    assert core.take_events()[0][1].code == "deadline_exceeded"
    assert core.idle
