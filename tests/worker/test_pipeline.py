"""Steps that overlap: the same tokens as one after another, and what is known one step late."""

from time import monotonic

import pytest
from engine_fakes import EOS, FakeRunner, LateRunner, Recorded, expected, make_core, make_submit
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import Delta, Done, Failed, Submit
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.intake import Limits

PROMPTS = ([2, 3, 4] * 5, [9] * 3, [7, 8] * 20)


def answers(core: EngineCore, *submits: Submit) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {each.request_id: [] for each in submits}
    for each in submits:
        core.submit(each, monotonic())
    while not core.idle:
        core.step()
    for _, message in core.take_events():
        assert not isinstance(message, Failed)
        if isinstance(message, Delta):
            tokens[message.request_id] += message.token_ids
    return tokens


def submits(**sampling: object) -> list[Submit]:
    params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **sampling})
    return [make_submit(str(at), each, sampling=params) for at, each in enumerate(PROMPTS)]


def test_a_step_is_launched_before_the_last_one_has_landed() -> None:
    runner = LateRunner()
    core = make_core(runner)
    core.submit(make_submit("r", PROMPTS[0]), monotonic())
    core.step()
    assert (runner.launches, len(runner.batches)) == (1, 0)
    core.step()
    assert (runner.launches, len(runner.batches)) == (2, 1)
    assert not core.idle


@pytest.mark.parametrize("sampling", [{}, {"min_tokens": 5, "ignore_eos": False}])
def test_tokens_and_steps_are_those_of_one_step_after_another(sampling: dict) -> None:
    late, plain = LateRunner(), FakeRunner()
    asked = submits(**sampling)
    assert answers(make_core(late), *asked) == answers(make_core(plain), *asked)
    if not sampling:  # a length is foreseen: no row is computed in vain
        assert late.tokens_computed == plain.tokens_computed


def test_a_stop_token_costs_one_row_that_nobody_sees() -> None:
    prompt, limits = PROMPTS[1], Limits.of(FakeRunner(), (EOS,))
    free = SamplingParams(max_tokens=30, ignore_eos=True)
    output, _, _ = expected(prompt, free, limits)
    stop = next(token for at, token in enumerate(output) if at > 3 and token not in output[:at])
    late, plain = LateRunner(), FakeRunner()
    ends = []
    for runner in (late, plain):
        core = make_core(runner)
        sampling = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
        core.submit(make_submit("r", prompt, sampling=sampling), monotonic())
        while not core.idle:
            core.step()
        ends.append([each for _, each in core.take_events() if isinstance(each, Delta | Done)])
        core.blocks.check_integrity()
    assert [each.token_ids for each in ends[0][:-1]] == [each.token_ids for each in ends[1][:-1]]
    assert ends[0][-1].stop_token == ends[1][-1].stop_token == stop
    assert late.tokens_computed == plain.tokens_computed + 1


def test_a_tight_pool_preempts_only_what_has_landed() -> None:
    recorder = Recorded()
    core = make_core(LateRunner(num_blocks=18), recorder, enable_prefix_caching=False)
    asked = submits(max_tokens=8)
    assert answers(core, *asked) == answers(make_core(FakeRunner()), *asked)
    assert recorder.total("preemptions") > 0


def test_a_fault_in_flight_is_made_good_with_what_was_launched_behind_it() -> None:
    late = LateRunner()
    core = make_core(late)
    asked = submits()
    for each in asked:
        core.submit(each, monotonic())
    for _ in range(4):
        core.step()
    late.failures = 1
    core.step()
    assert (late.failures, late.in_flight) == (0, 0)
    while not core.idle:
        core.step()
    tokens: dict[str, list[int]] = {each.request_id: [] for each in asked}
    for _, message in core.take_events():
        if isinstance(message, Delta):
            tokens[message.request_id] += message.token_ids
    assert tokens == answers(make_core(FakeRunner()), *asked)


def test_a_cancel_in_flight_gives_all_blocks_back() -> None:
    runner = LateRunner()
    core = make_core(runner)
    core.submit(make_submit("r", PROMPTS[2]), monotonic())
    for _ in range(3):
        core.step()
    core.cancel("r", 1)
    assert core.blocks.num_free == runner.num_blocks
    while not core.idle:
        core.step()
    assert runner.in_flight == 0
    core.blocks.check_integrity()
