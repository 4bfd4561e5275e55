"""The scheduler: who runs next, how prefills are cut, who gives way."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

import pytest
from engine_fakes import make_sequence
from forebay_worker.engine.block_manager import BlockManager
from forebay_worker.engine.scheduler import Plan, Scheduler
from forebay_worker.engine.sequence import Sequence
from forebay_worker.engine.waiting import WaitingQueue
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = 4


class Bench:
    """A scheduler whose steps are computed by hand: every sampling row gets one more token."""

    def __init__(
        self,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        budget: int = 16,
        beside: int | None = None,
    ) -> None:
        self.blocks = BlockManager(num_blocks, SIZE, revision="fake")
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=max_num_seqs, token_budget=budget, prefill_budget=beside
        )
        self._serials = count()

    def add(self, tokens: list[int], **fields: object) -> Sequence:
        sequence = make_sequence(tokens, serial=next(self._serials), **fields)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Plan:
        plan = self.scheduler.schedule()
        for sequence, row in zip(plan.sequences, plan.rows, strict=True):
            sequence.started_at = 0.0
            sequence.num_computed += row.num_new
            self.blocks.publish(sequence, sequence.num_computed)
            if row.samples:
                sequence.token_ids.append(1000 + len(sequence.token_ids))
        self.blocks.check_integrity(self.scheduler.running)
        return plan


def shape(plan: Plan) -> list[tuple[int, int, bool]]:
    return [
        (sequence.serial, row.num_new, row.samples)
        for sequence, row in zip(plan.sequences, plan.rows, strict=True)
    ]


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    bench = Bench(budget=16)
    bench.add(list(range(40)))
    assert [shape(bench.step()) for _ in range(4)] == [
        [(0, 16, False)],
        [(0, 16, False)],
        [(0, 8, True)],
        [(0, 1, True)],
    ]


def test_decodes_come_first_and_never_wait_for_a_prefill() -> None:
    bench = Bench(budget=16)
    bench.add([1, 2, 3])
    bench.step()
    bench.add(list(range(100, 140)), priority=-1)
    assert shape(bench.step()) == [(0, 1, True), (1, 15, False)]
    assert shape(bench.step()) == [(0, 1, True), (1, 15, False)]


def test_a_prefill_takes_less_of_a_step_in_which_others_decode() -> None:
    bench = Bench(budget=16, beside=5)
    bench.add([1, 2, 3])
    bench.step()
    for start in (100, 200):
        bench.add(list(range(start, start + 7)))
    assert shape(bench.step()) == [(0, 1, True), (1, 5, False)]
    assert shape(bench.step()) == [(0, 1, True), (1, 2, True), (2, 3, False)]
    assert shape(bench.step()) == [(0, 1, True), (1, 1, True), (2, 4, True)]


def test_a_prefill_takes_the_whole_step_when_nobody_decodes() -> None:
    bench = Bench(budget=16, beside=5)
    bench.add(list(range(20)))
    bench.add(list(range(100, 120)))
    assert shape(bench.step()) == [(0, 16, False)]
    assert shape(bench.step()) == [(0, 4, True), (1, 12, False)]
    assert shape(bench.step()) == [(0, 1, True), (1, 5, False)]


def test_a_prefill_takes_less_of_a_step_where_teams_share_the_engine() -> None:
    bench = Bench(budget=16, beside=5)
    bench.add(list(range(7)), team="red")
    assert shape(bench.step()) == [(0, 5, False)]
    bench.add(list(range(100, 120)))
    assert shape(bench.step()) == [(0, 2, True), (1, 3, False)]


def test_every_prefill_moves_even_with_a_budget_below_their_number() -> None:
    bench = Bench(num_blocks=512, budget=600, beside=1)
    bench.add([1])
    for at in range(3):  # a step scores 256 tokens of all prompts, and one of each at least
        bench.add([2 + at] * 300, scores_prompt=True)
    assert shape(bench.step())[2:] == [(3, 1, False), (1, 256, False)]
    assert shape(bench.step()) == [(serial, 1, serial == 0) for serial in range(4)]


def test_every_running_sequence_moves_even_with_a_budget_below_max_num_seqs() -> None:
    bench = Bench(budget=3, max_num_seqs=8)
    for at in range(5):
        bench.add([at])
    assert len(bench.step().rows) == 3
    assert [row.num_new for row in bench.step().rows] == [1, 1, 1]


def test_followers_wait_for_a_prefix_that_is_being_computed() -> None:
    bench = Bench(budget=16)
    shared = list(range(24))
    leader = bench.add([*shared, 1])
    followers = [bench.add([*shared, tail]) for tail in (2, 3)]
    stranger = bench.add([7, 8, 9])
    assert shape(bench.step()) == [(leader.serial, 16, False)]
    assert shape(bench.step()) == [(leader.serial, 9, True), (stranger.serial, 3, True)]
    plan = bench.step()
    assert {s.serial: row.num_new for s, row in zip(plan.sequences, plan.rows, strict=True)} == {
        leader.serial: 1,
        stranger.serial: 1,
        followers[0].serial: 1,
        followers[1].serial: 1,
    }
    assert plan.prefix_hits == 48


def test_a_follower_takes_over_when_its_leader_leaves() -> None:
    bench = Bench(budget=8)
    leader, follower = (bench.add(list(range(24))) for _ in range(2))
    assert shape(bench.step()) == [(leader.serial, 8, False)]
    bench.scheduler.remove(leader)
    assert shape(bench.step()) == [(follower.serial, 8, False)]


def test_the_last_of_the_running_gives_way_and_is_first_to_return() -> None:
    bench = Bench(num_blocks=5)
    first = bench.add([1] * 7)
    bench.step()
    second = bench.add([2] * 7)
    third = bench.add([3] * 3)
    bench.step()
    while second in bench.scheduler.running:
        assert bench.scheduler.running[0] is first
        bench.step()
    assert bench.scheduler.waiting.head() is second
    assert len(second.token_ids) > 7
    assert second.block_table == []
    bench.scheduler.remove(first)
    bench.step()
    assert bench.scheduler.running == [second, third]


def test_a_less_urgent_sequence_gives_way_to_a_later_urgent_one() -> None:
    bench = Bench(num_blocks=6)
    batch = bench.add([1] * 7, priority=1)
    bench.step()
    urgent = bench.add([2] * 7, priority=0)
    while batch in bench.scheduler.running:
        bench.step()
    assert bench.scheduler.running == [urgent]


def test_admission_keeps_a_spare_block_for_each_running_sequence() -> None:
    bench = Bench(num_blocks=4)
    bench.add([1] * 8)
    bench.add([2] * 8)
    bench.step()
    assert len(bench.scheduler.running) == 1


def test_priority_then_arrival_decides_within_a_team() -> None:
    bench = Bench(max_num_seqs=1)
    order = [bench.add([at], priority=priority) for at, priority in enumerate((1, 0, 0, -1))]
    served: list[int] = []
    for _ in order:
        (sequence,) = bench.step().sequences
        served.append(sequence.serial)
        bench.scheduler.remove(sequence)
    assert served == [3, 1, 2, 0]


@pytest.mark.parametrize(("weights", "share"), [((1.0, 1.0), 0.5), ((1.0, 3.0), 0.25)])
def test_teams_are_served_by_their_weights_whatever_they_ask_for(
    weights: tuple[float, float], share: float
) -> None:
    """Red floods with long requests, blue with short ones; both always have some waiting."""
    bench = Bench(num_blocks=256, max_num_seqs=4, budget=64)
    served: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    fresh = count(10)
    for _ in range(3000):
        for team, weight, length in (("red", weights[0], 40), ("blue", weights[1], 10)):
            while waiting[team] < 8:
                bench.add([next(fresh)] * length, team=team, weight=weight)
                waiting[team] += 1
        plan = bench.step()
        waiting.subtract(sequence.team for sequence in plan.started)
        for sequence, row in zip(plan.sequences, plan.rows, strict=True):
            served[sequence.team] += row.num_new
            if len(sequence.token_ids) - sequence.num_prompt >= 8:
                bench.scheduler.remove(sequence)
    assert served["red"] / served.total() == pytest.approx(share, abs=0.03)


BOUND = 32
"""Of the prompt tokens of a step where requests are of teams, of 128 in all."""


@dataclass
class Wait:
    """Of a first token, for one that came as a step began: the steps that it was in the queue or
    in its prefill, and the tokens that were computed meanwhile, those of the step before as well.
    """

    steps: int = 0
    tokens: int = 0


def waits(
    flood: int,
    *,
    long: int = 24,
    out: int = 200,
    seats: int = 8,
    blocks: int = 512,
    asked: int = 200,
) -> list[Wait]:
    """Of each of blue's requests, beside red with so many open."""
    bench = Bench(num_blocks=blocks, max_num_seqs=seats, budget=128, beside=BOUND)
    fresh, reds, found = count(10), 0, list[Wait]()
    blue: dict[Sequence, Wait] = {}
    before = 0
    for step in range(15 * asked):
        while reds < flood:
            bench.add([next(fresh)] * long, team="red")
            reds += 1
        if step % 15 == 0:
            blue[bench.add([next(fresh)] * 12, team="blue")] = Wait(tokens=before)
        plan = bench.step()
        before = sum(row.num_new for row in plan.rows)
        assert sum(row.num_new for row in plan.rows if row.num_new > 1) <= BOUND
        for wait in blue.values():
            wait.steps += 1
            wait.tokens += before
        for sequence, row in zip(plan.sequences, plan.rows, strict=True):
            made = len(sequence.token_ids) - sequence.num_prompt
            if sequence in blue and made == 1 and row.samples:
                found.append(blue.pop(sequence))
            if made >= (4 if sequence.team == "blue" else out):
                bench.scheduler.remove(sequence)
                reds -= sequence.team == "red"
    assert len(found) + len(blue) == asked
    assert len(blue) <= 1
    return found


def p99(values: Iterable[int]) -> int:
    ordered = sorted(values)
    return ordered[len(ordered) * 99 // 100]


@pytest.mark.parametrize(
    "house", [{}, {"long": 200}, {"blocks": 96}, {"seats": 2}, {"long": 300, "blocks": 200}]
)
def test_a_flood_of_one_team_moves_anothers_first_token_by_a_fifth_at_most(
    house: dict[str, int],
) -> None:
    """Red keeps two requests open, then two hundred: they hold all seats and blocks, for long."""
    calm, flooded = waits(2, **house), waits(200, **house)
    few, many = p99(wait.steps for wait in calm), p99(wait.steps for wait in flooded)
    assert many <= max(1.2 * few, few + 1), (few, many)
    total = [sum(wait.steps for wait in each) for each in (calm, flooded)]
    assert total[1] <= 1.2 * total[0], total


@settings(max_examples=15, deadline=None)
@given(
    flood=st.integers(9, 40),
    long=st.integers(1, 400),
    out=st.integers(1, 60),
    seats=st.integers(2, 12),
)
def test_whatever_a_flood_is_made_of_another_team_waits_for_one_short_step_and_is_in_the_next(
    flood: int, long: int, out: int, seats: int
) -> None:
    """Where blocks are not scarce. The engine's steps cannot be cut short, so no less is possible
    but by shorter steps."""
    found = waits(flood, long=long, out=out, seats=seats, blocks=2048, asked=10)
    assert max(wait.steps for wait in found) == 1
    assert max(wait.tokens for wait in found) <= 2 * (BOUND + seats)


def test_who_holds_its_share_is_left_alone_and_nobody_gives_way_in_turns() -> None:
    bench = Bench(num_blocks=256, max_num_seqs=4, budget=32)
    fresh = count(10)
    for _ in range(3):
        for team, weight in (("red", 3.0), ("blue", 1.0)):
            for _ in range(8):
                bench.add([next(fresh)] * 5, team=team, weight=weight)
    preemptions = 0
    for _ in range(100):
        plan = bench.step()
        preemptions += plan.preemptions
        seats = Counter(sequence.team for sequence in bench.scheduler.running)
        assert sum(seats.values()) == 4
    assert preemptions <= 4
    assert seats == {"red": 3, "blue": 1}


def test_a_team_that_was_away_earns_no_credit() -> None:
    queue = WaitingQueue()
    serials = count()

    def enter(team: str) -> Sequence:
        sequence = make_sequence([1], team=team, serial=next(serials))
        queue.enter(sequence)
        return sequence

    busy = enter("busy")
    queue.pop(busy)
    queue.charge(busy, 1000)
    late = enter("late")
    queue.pop(late)
    queue.charge(late, 10)
    enter("busy")
    assert queue.head() is not None
    assert queue.head().team == "busy"


def test_teams_of_the_past_are_forgotten() -> None:
    queue = WaitingQueue()
    keeper = make_sequence([1], team="keeper", serial=0)
    queue.enter(keeper)
    queue.pop(keeper)
    for serial in range(1, 2000):
        queue.charge(keeper, serial * 10)
        guest = make_sequence([1], team=f"guest-{serial}", serial=serial)
        queue.enter(guest)
        queue.leave(guest)
    assert len(queue._teams) < 300
    queue.leave(keeper)
    assert queue._teams == {}
