"""When a suspect is begun, what is handed over for it, and what waits until it has been tried."""

from collections.abc import Callable

import pytest
from forebay_shared.asked import Prompt
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import (
    Delta,
    Done,
    Encode,
    Failed,
    SequenceStart,
    Submit,
    SubmitText,
    Task,
    Usage,
)
from forebay_worker import trials
from forebay_worker.trials import TRIAL_TOKENS, Trials
from redis_house import WaitUntil


class Played:
    """The service: it keeps what it is asked for; what is told arrives when the test says so."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.age_s = 0.0
        self._then: list[Callable[[], None]] = []

    def begin(self, work: Task) -> None:
        self.said.append(f"begin {work.request_id}")

    def cancel(self, work: Task, index: int | None) -> None:
        self.said.append(f"cancel {work.request_id} {index}")

    def movable(self, work: Task) -> bool:
        return not isinstance(work, SubmitText)

    def hand_over(self, work: Task) -> None:
        self.said.append(f"hand over {work.request_id}")

    def drop(self, work: Task) -> None:
        self.said.append(f"drop {work.request_id}")

    def tell(self, work: Task, alone: bool | None, then: Callable[[], None]) -> None:
        self.said.append(f"tell {work.request_id} {alone}")
        self._then.append(then)

    def step_age_s(self) -> float:
        return self.age_s

    def arrive(self) -> None:
        """What was told has arrived."""
        due, self._then = self._then, []
        for then in due:
            then()

    def take(self) -> list[str]:
        said, self.said = self.said, []
        return said


def _work(name: str, *, suspect: bool = False, n: int = 1, gateway: str = "g") -> Submit:
    return Submit(
        request_id=name,
        attempt=1,
        gateway=gateway,
        prompt=b"\1\0\0\0",
        sampling=SamplingParams(),
        starts=tuple(SequenceStart(index) for index in range(n)),
        suspect=suspect,
    )


def _text(name: str, *, suspect: bool = False) -> SubmitText:
    return SubmitText(
        request_id=name,
        attempt=1,
        gateway="g",
        asked=Prompt("a"),
        sampling=SamplingParams(),
        suspect=suspect,
    )


def _tokens(name: str, count: int) -> Delta:
    return Delta(name, 1, 0, 0, [1] * count)


def _done(name: str, index: int = 0) -> Done:
    return Done(name, 1, index, "length", None, Usage())


@pytest.fixture
def way() -> Played:
    return Played()


@pytest.fixture
async def one(way: Played) -> Trials:
    return Trials(way)


async def test_without_a_suspect_everything_begins_at_once(way: Played, one: Trials) -> None:
    for name in "ab":
        one.enter(_work(name))
    assert way.take() == ["begin a", "begin b"]
    assert one.heard(_tokens("a", 100))
    assert one.heard(_done("a"))


async def test_a_suspect_begins_when_all_others_are_gone_and_that_is_known(
    way: Played, one: Trials
) -> None:
    one.enter(_work("a", n=2))
    one.enter(Encode(request_id="e", attempt=1, gateway="g", inputs=()))
    one.enter(_work("s", suspect=True))
    one.enter(_work("b"))
    assert way.take() == ["begin a", "begin e", "hand over a", "hand over e"]
    assert not one.heard(_tokens("a", 1)), "another worker has it"
    assert not one.heard(_done("a", 0))
    assert not one.heard(_done("a", 1))
    assert way.take() == []
    assert not one.heard(_done("e"))
    assert way.take() == ["tell s True"]
    way.arrive()
    assert way.take() == ["begin s"]
    assert one.heard(_tokens("s", TRIAL_TOKENS - 1))
    assert way.take() == []
    assert one.heard(_tokens("s", 1))
    assert way.take() == ["tell s False"]
    one.enter(_work("c"))
    assert way.take() == []
    way.arrive()
    assert way.take() == ["begin b", "begin c"]


@pytest.mark.parametrize("end", [_done("s"), Failed("s", 1, "engine_error", "no")])
async def test_a_suspect_that_ends_early_makes_room_once_its_end_is_known(
    way: Played, one: Trials, end: Done | Failed
) -> None:
    one.enter(_work("s", suspect=True))
    one.enter(_work("b"))
    way.arrive()
    assert one.heard(end)
    assert way.take() == ["tell s True", "begin s", "tell s None"]
    way.arrive()
    assert way.take() == ["begin b"]


async def test_suspects_are_tried_one_after_the_other(way: Played, one: Trials) -> None:
    for name in "st":
        one.enter(_work(name, suspect=True))
    way.arrive()
    one.heard(_tokens("s", TRIAL_TOKENS))
    way.arrive()
    assert way.take() == ["tell s True", "begin s", "tell s False", "hand over s"]
    assert not one.heard(_done("s"))
    assert way.take() == ["tell t True"]


async def test_what_cannot_go_elsewhere_is_waited_for_and_not_for_ever(
    way: Played, one: Trials, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.enter(_text("a"))
    one.enter(_text("s", suspect=True))
    assert way.take() == ["begin a"]
    one.heard(_done("a"))
    assert way.take() == ["tell s True"]
    way.arrive()
    one.heard(_done("s"))
    way.arrive()
    monkeypatch.setattr(trials, "WAIT_S", 0.01)
    one.enter(_text("b"))
    one.enter(_text("t", suspect=True))
    one.enter(_text("c"))
    await wait_until(lambda: len(way.said) == 5)
    assert way.take() == ["begin s", "tell s None", "begin b", "begin t", "begin c"]


async def test_a_trial_that_waits_for_others_ends_and_one_whose_step_hangs_does_not(
    way: Played, one: Trials, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "LOOK_S", 0.01)
    looks: list[float] = []

    def step_age_s() -> float:
        looks.append(way.age_s)
        return way.age_s

    monkeypatch.setattr(way, "step_age_s", step_age_s)
    way.age_s = 60.0
    one.enter(_work("s", suspect=True))
    way.arrive()
    await wait_until(lambda: len(looks) > 2)
    assert way.take() == ["tell s True", "begin s"]
    way.age_s = 0.0
    await wait_until(lambda: way.said == ["tell s False"])


async def test_what_is_cancelled_before_its_turn_never_begins(way: Played, one: Trials) -> None:
    one.enter(_work("a"))
    one.enter(_work("s", suspect=True))
    one.enter(_work("b"))
    one.enter(_work("c", n=2))
    assert one.cancel(("b", 1), None)
    assert one.cancel(("c", 1), 1)
    assert not one.cancel(("a", 1), None), "the engine has it"
    assert one.cancel(("s", 1), None)
    assert way.take() == [
        "begin a", "hand over a", "drop b", "drop s", "begin c", "cancel c 1"
    ]  # fmt: skip


async def test_nobody_waits_for_the_trial_of_a_gateway_that_is_gone(
    way: Played, one: Trials
) -> None:
    one.enter(_work("s", suspect=True))
    one.enter(_work("b", gateway="other"))
    one.enter(_work("c"))
    way.arrive()
    one.cancel_gateway("g")
    assert way.take() == ["tell s True", "begin s", "drop c", "begin b"]
    assert one.heard(_done("s"))
    assert way.take() == []
