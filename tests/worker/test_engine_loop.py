"""The engine's thread: it wakes, survives its receiver, tells when it is dead, and stops."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from engine_fakes import FakeRunner, make_core, make_submit
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import Delta, Done, Failed, Reply
from forebay_worker.engine.loop import EngineLoop
from patience import PATIENCE_S

PROMPT = list(range(2, 12))
LONG = SamplingParams(max_tokens=100, ignore_eos=True)
Events = Sequence[tuple[str, Reply]]


class Receiver:
    """Takes events from the engine's thread; `wait` blocks until a condition on them holds."""

    def __init__(self) -> None:
        self.calls: list[list[Reply]] = []
        self._changed = threading.Condition()
        self.fails = 0

    def __call__(self, events: Events) -> None:
        with self._changed:
            if self.fails:
                self.fails -= 1
                raise ConnectionError("the bus is down")
            self.calls.append([message for _, message in events])
            self._changed.notify_all()

    @property
    def messages(self) -> list[Reply]:
        return [message for call in self.calls for message in call]

    def wait(self, condition: Callable[[list[Reply]], bool]) -> list[Reply]:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.messages), timeout=PATIENCE_S)
            return self.messages


def ended(*request_ids: str) -> Callable[[list[Reply]], bool]:
    return lambda messages: (
        set(request_ids)
        <= {message.request_id for message in messages if isinstance(message, Done | Failed)}
    )


class GatedRunner(FakeRunner):
    """Lets the test decide when a step ends."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.gate = threading.Semaphore(0), threading.Semaphore(0)

    def execute(self, rows: list) -> list:
        self.entered.release()
        assert self.gate.acquire(timeout=PATIENCE_S)
        return super().execute(rows)


@contextmanager
def running(runner: FakeRunner, receiver: Receiver, **settings: object) -> Iterator[EngineLoop]:
    loop = EngineLoop(make_core(runner, **settings), receiver, check=True)
    loop.start()
    try:
        yield loop
    finally:
        loop.stop(30)


def test_an_idle_engine_wakes_for_each_request() -> None:
    receiver = Receiver()
    with running(FakeRunner(), receiver) as loop:
        for name in ("a", "b"):
            loop.submit(make_submit(name, PROMPT))
            receiver.wait(ended(name))
        assert loop.healthy


def test_a_refusal_does_not_wait_for_the_step_that_runs_next() -> None:
    runner, receiver = GatedRunner(), Receiver()
    with running(runner, receiver) as loop:
        loop.submit(make_submit("r", PROMPT))
        assert runner.entered.acquire(timeout=PATIENCE_S)
        loop.submit(make_submit("bad", []))
        runner.gate.release()
        receiver.wait(ended("bad"))
        assert not ended("r")(receiver.messages)
        for _ in range(8):
            runner.gate.release()
        receiver.wait(ended("r"))


def test_the_events_of_a_step_come_in_one_call() -> None:
    runner, receiver = GatedRunner(), Receiver()
    with running(runner, receiver) as loop:
        loop.submit(make_submit("first", PROMPT))
        assert runner.entered.acquire(timeout=PATIENCE_S)
        for name in ("a", "b", "c"):
            loop.submit(make_submit(name, [9, *PROMPT]))
        for _ in range(30):
            runner.gate.release()
        receiver.wait(ended("first", "a", "b", "c"))
    assert max(sum(isinstance(m, Delta) for m in call) for call in receiver.calls) == 4


def test_a_cancel_during_a_step_takes_effect_before_the_next() -> None:
    runner, receiver = GatedRunner(), Receiver()
    with running(runner, receiver) as loop:
        loop.submit(make_submit("r", PROMPT, sampling=LONG))
        assert runner.entered.acquire(timeout=PATIENCE_S)
        loop.cancel("r", 1)
        runner.gate.release()
        receiver.wait(ended("r"))
    assert len(runner.batches) == 1
    assert receiver.messages[-1].finish_reason == "abort"


def test_a_lost_gateway_leaves_the_engine_idle() -> None:
    runner, receiver = GatedRunner(), Receiver()
    with running(runner, receiver) as loop:
        loop.submit(make_submit("r", PROMPT, sampling=LONG, gateway="gone"))
        assert runner.entered.acquire(timeout=PATIENCE_S)
        loop.cancel_gateway("gone")
        runner.gate.release()
        receiver.wait(ended("r"))
        assert loop.load().running == 0


def test_a_receiver_that_raises_loses_events_but_not_the_engine() -> None:
    receiver = Receiver()
    receiver.fails = 2
    with running(FakeRunner(), receiver) as loop:
        loop.submit(make_submit("r", PROMPT))
        receiver.wait(ended("r"))
        loop.submit(make_submit("next", PROMPT))
        receiver.wait(ended("next"))
        assert loop.healthy


def test_a_hanging_step_shows_as_a_growing_age_and_rest_does_not() -> None:
    runner, receiver = GatedRunner(), Receiver()
    with running(runner, receiver, max_num_seqs=1) as loop:
        assert loop.load().step_age_s == 0
        loop.submit(make_submit("r", PROMPT, sampling=SamplingParams(max_tokens=1)))
        assert runner.entered.acquire(timeout=PATIENCE_S)
        first = loop.load().step_age_s
        assert 0 < first < loop.load().step_age_s
        runner.gate.release()
        receiver.wait(ended("r"))


def test_an_engine_whose_steps_all_fail_gives_up_and_says_so() -> None:
    runner, receiver = FakeRunner(), Receiver()
    runner.failures = 99
    with running(runner, receiver, max_num_seqs=1) as loop:
        names = [f"r{at}" for at in range(5)]
        for name in names:
            loop.submit(make_submit(name, PROMPT))
        messages = receiver.wait(ended(*names))
        loop._thread.join(30)
        assert not loop.healthy
        assert loop.load().step_age_s > 0
        retryable = {
            each.request_id for each in messages if isinstance(each, Failed) and each.retryable
        }
        assert retryable == set(names[3:])


def test_stop_gives_up_what_runs_and_what_waits_for_another_worker() -> None:
    runner, receiver = GatedRunner(), Receiver()
    with running(runner, receiver, max_num_seqs=1) as loop:
        loop.submit(make_submit("runs", PROMPT, sampling=LONG))
        assert runner.entered.acquire(timeout=PATIENCE_S)
        loop.submit(make_submit("waits", PROMPT, sampling=LONG))
        runner.gate.release()
        loop.stop(30)
    failed = {
        m.request_id: (m.code, m.retryable) for m in receiver.messages if isinstance(m, Failed)
    }
    assert failed == {"runs": ("worker_lost", True), "waits": ("worker_lost", True)}
    assert loop.healthy


def test_a_fault_of_the_engine_itself_ends_all_requests_and_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver = Receiver()
    with running(FakeRunner(), receiver) as loop:
        monkeypatch.setattr(loop._core.scheduler, "schedule", lambda: 1 / 0)
        loop.submit(make_submit("r", PROMPT))
        receiver.wait(ended("r"))
        loop._thread.join(30)
        assert not loop.healthy
