"""The core: what is refused, how a sequence ends, and that one request's failure stays its own."""

from itertools import pairwise
from time import monotonic

import pytest
from engine_fakes import EOS, FakeRunner, Recorded, expected, make_core, make_submit, run
from forebay_shared.sampling import Grammar, SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import (
    Delta,
    Done,
    Failed,
    SequenceStart,
    Started,
    Submit,
    pack_ids,
)
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.intake import Limits
from forebay_worker.engine.sequence import mix

PROMPT = list(range(2, 12))


def long(max_tokens: int = 40) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


FREE = expected(PROMPT, long(), Limits(64, 128))[0]
"""What PROMPT is continued with when nothing ends it."""


def output(messages: list[object], index: int = 0, request_id: str = "r") -> list[int]:
    return [
        token
        for message in messages
        if isinstance(message, Delta) and (message.request_id, message.index) == (request_id, index)
        for token in message.token_ids
    ]


def only(messages: list[object], kind: type) -> object:
    (message,) = (message for message in messages if isinstance(message, kind))
    return message


def refusal(core: EngineCore, submit: Submit) -> Failed:
    core.submit(submit, monotonic())
    ((gateway, failed),) = core.take_events()
    assert gateway == submit.gateway
    assert isinstance(failed, Failed)
    assert core.idle
    return failed


def free_blocks(core: EngineCore) -> int:
    core.blocks.check_integrity(core.scheduler.running)
    return core.blocks.num_free


# Refusals


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"prompt": b""}, "invalid_value", "prompt"),
        ({"prompt": b"\1\0\0"}, "invalid_value", "prompt"),
        ({"prompt": pack_ids([64])}, "invalid_value", "prompt"),
        ({"prompt": pack_ids([2] * 128)}, "context_length_exceeded", "prompt"),
        ({"starts": ()}, "invalid_value", "n"),
        ({"starts": (SequenceStart(), SequenceStart())}, "invalid_value", "n"),
        ({"starts": (SequenceStart(-1),)}, "invalid_value", "n"),
        ({"starts": (SequenceStart(0, pack_ids([64])),)}, "invalid_value", "emitted"),
        ({"weight": 0.0}, "invalid_value", "weight"),
        ({"weight": float("nan")}, "invalid_value", "weight"),
        ({"sampling": SamplingParams(top_p=2)}, "invalid_value", "top_p"),
        ({"sampling": SamplingParams(stop_token_ids=(64,))}, "invalid_value", "stop_token_ids"),
        (
            {"sampling": SamplingParams(allowed_token_ids=(EOS,), min_tokens=1)},
            "invalid_value",
            "allowed_token_ids",
        ),
        (
            {"sampling": SamplingParams(prompt_logprobs=1)},
            "unsupported_parameter",
            "prompt_logprobs",
        ),
        (
            {"sampling": SamplingParams(grammar=Grammar("regex"))},
            "unsupported_parameter",
            "grammar",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_its_code_and_parameter(
    change: dict[str, object], code: str, param: str
) -> None:
    fields = {
        "request_id": "r",
        "attempt": 1,
        "gateway": "gw",
        "prompt": pack_ids(PROMPT),
        "sampling": SamplingParams(),
        **change,
    }
    runner = FakeRunner()
    runner.scores_prompts = False
    core = make_core(runner)
    failed = refusal(core, Submit(**fields))
    assert (failed.code, failed.param, failed.retryable) == (code, param, False)
    assert len(run(core, make_submit("next", PROMPT))) > 2


def test_a_prompt_beyond_the_pool_is_refused_and_one_just_below_runs_to_the_pools_end() -> None:
    core = make_core(FakeRunner(num_blocks=3, block_size=4))
    assert refusal(core, make_submit("wide", [2] * 12)).code == "context_length_exceeded"
    messages = run(core, make_submit("r", [2] * 9, sampling=long()))
    assert len(output(messages)) == 3
    assert only(messages, Done).finish_reason == "length"


def test_a_full_queue_refuses_with_a_retryable_error_and_has_room_again_later() -> None:
    core = make_core(FakeRunner(), max_num_queued_reqs=2)
    for name in "ab":
        core.submit(make_submit(name, PROMPT), monotonic())
    core.take_events()
    core.submit(make_submit("c", PROMPT), monotonic())
    ((_, failed),) = core.take_events()
    assert (failed.code, failed.retryable) == ("overloaded", True)
    core.cancel("a", 1)
    core.take_events()
    core.submit(make_submit("d", PROMPT), monotonic())
    assert core.take_events() == []
    assert core.load().waiting == 2


def test_an_expired_request_fails_before_it_costs_a_step() -> None:
    runner = FakeRunner()
    core = make_core(runner, max_num_seqs=1)
    now = monotonic()
    core.submit(make_submit("busy", PROMPT), now)
    core.step()
    core.submit(make_submit("late", PROMPT, n=2, queue_timeout_ms=1000), now - 2)
    core.submit(make_submit("patient", PROMPT, queue_timeout_ms=60_000), now)
    messages = run(core)
    failed = only(messages, Failed)
    assert (failed.request_id, failed.code) == ("late", "deadline_exceeded")
    assert {m.request_id for m in messages if isinstance(m, Done)} == {"busy", "patient"}
    assert not any(row.sequence.request_id == "late" for rows in runner.batches for row in rows)


def test_deadlines_may_be_equal_and_are_forgotten_once_a_request_is_served() -> None:
    core, now = make_core(FakeRunner()), monotonic()
    for at in range(9):
        core.submit(make_submit(f"r{at}", PROMPT, queue_timeout_ms=60_000), now)
    messages = run(core)
    assert sum(isinstance(message, Done) for message in messages) == 9
    core.step()
    assert core.next_deadline is None


def test_a_request_that_has_started_is_never_dropped_for_its_queue_time() -> None:
    core = make_core(FakeRunner())
    core.submit(make_submit("r", PROMPT, queue_timeout_ms=600_000), monotonic())
    core.step()
    waiting = core._requests._deadlines
    waiting[0] = (0.0, *waiting[0][1:])
    assert isinstance(run(core)[-1], Done)


def test_a_duplicate_is_dropped_even_after_the_end_and_a_new_attempt_is_not() -> None:
    core = make_core(FakeRunner())
    submit = make_submit("r", PROMPT)
    first = run(core, submit, submit)
    assert sum(isinstance(message, Done) for message in first) == 1
    assert run(core, submit) == []
    assert output(run(core, make_submit("r", PROMPT, attempt=2))) == output(first)


# How sequences end


def test_events_come_in_order_with_offsets_and_usage() -> None:
    messages = run(make_core(FakeRunner()), make_submit("r", PROMPT, sampling=long(3)))
    assert [type(message) for message in messages] == [Started, Delta, Delta, Delta, Done]
    assert [message.offset for message in messages[1:4]] == [0, 1, 2]
    done = messages[-1]
    assert (done.finish_reason, done.stop_token) == ("length", None)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (10, 3)


@pytest.mark.parametrize("by", ["eos", "stop_token_ids"])
def test_a_stop_token_is_counted_but_in_no_delta(by: str) -> None:
    stop = FREE[5]
    eos, stops = ((stop,), ()) if by == "eos" else ((), (stop,))
    runner = FakeRunner()
    core = EngineCore(runner, Limits.of(runner, eos), WorkerSettings(), Recorded())
    sampling = SamplingParams(max_tokens=40, stop_token_ids=stops)
    messages = run(core, make_submit("r", PROMPT, sampling=sampling))
    before = FREE[: FREE.index(stop)]
    assert output(messages) == before
    done = only(messages, Done)
    assert (done.finish_reason, done.stop_token) == ("stop", stop)
    assert done.usage.completion_tokens == len(before) + 1


def test_min_tokens_holds_back_every_end() -> None:
    sampling = SamplingParams(
        max_tokens=20, min_tokens=12, stop_token_ids=tuple(range(2, 60)), seed=3
    )
    messages = run(make_core(FakeRunner()), make_submit("r", PROMPT, sampling=sampling))
    assert len(output(messages)) >= 12
    assert not set(output(messages)[:12]) & {EOS, *range(2, 60)}


def test_a_full_context_ends_with_length() -> None:
    core = make_core(FakeRunner(max_model_len=16))
    messages = run(core, make_submit("r", PROMPT, sampling=long(10**9)))
    assert len(output(messages)) == 6
    assert only(messages, Done).finish_reason == "length"


def test_no_tokens_asked_for_is_an_answer_without_a_step() -> None:
    runner = FakeRunner()
    messages = run(make_core(runner), make_submit("r", PROMPT, sampling=long(0)))
    assert [type(message) for message in messages] == [Started, Done]
    assert runner.batches == []


def test_a_bad_word_is_banned_where_it_would_be_completed() -> None:
    sampling = SamplingParams(
        max_tokens=8, ignore_eos=True, bad_words=((FREE[2], FREE[3]), (FREE[6],))
    )
    told = output(run(make_core(FakeRunner()), make_submit("r", PROMPT, sampling=sampling)))
    assert told[:3] == FREE[:3]
    assert (FREE[2], FREE[3]) not in pairwise(told)
    assert FREE[6] not in told


def test_a_resumed_sequence_goes_on_as_if_it_had_never_moved() -> None:
    whole = run(make_core(FakeRunner()), make_submit("r", PROMPT, n=2, sampling=long(12)))
    emitted = {0: output(whole)[:5], 1: output(whole, 1)[:9]}
    core = make_core(FakeRunner(), max_num_batched_tokens=7)
    rest = run(core, make_submit("r", PROMPT, emitted=emitted, attempt=2, sampling=long(12)))
    for index, before in emitted.items():
        assert before + output(rest, index) == output(whole, index)
        first = next(m for m in rest if isinstance(m, Delta) and m.index == index)
        assert first.offset == len(before)
    assert all(m.usage.completion_tokens == 12 for m in rest if isinstance(m, Done))


def test_the_sequences_of_a_request_differ_and_prefill_its_prompt_once() -> None:
    runner, prompt = FakeRunner(block_size=4), [2] * 33
    messages = run(make_core(runner), make_submit("r", prompt, n=4, sampling=long(6)))
    assert len({tuple(output(messages, index)) for index in range(4)}) == 4
    assert runner.tokens_computed == 33 + 3 * 1 + 4 * 5
    cached = {m.index: m.usage.cached_tokens for m in messages if isinstance(m, Done)}
    assert cached == {0: 0, 1: 32, 2: 32, 3: 32}


# Cancel


@pytest.mark.parametrize("steps", [0, 1, 3, 6], ids=["queue", "prefill", "prefill-2", "decode"])
def test_a_cancel_gives_all_blocks_back_at_once(steps: int) -> None:
    core = make_core(FakeRunner(num_blocks=16), max_num_batched_tokens=8)
    core.submit(make_submit("r", list(range(2, 32)), sampling=long()), monotonic())
    for _ in range(steps):
        core.step()
    core.take_events()
    core.cancel("r", 1)
    ((_, done),) = core.take_events()
    assert done.finish_reason == "abort"
    assert free_blocks(core) == 16
    assert core.idle


def test_one_sequence_of_a_request_can_be_cancelled_alone() -> None:
    core = make_core(FakeRunner())
    core.submit(make_submit("r", PROMPT, n=3, sampling=long(6)), monotonic())
    for _ in range(3):
        core.step()
    core.cancel("r", 1, 1)
    core.cancel("r", 1, 1)
    core.cancel("unknown", 1)
    core.cancel("r", 9)
    reasons = {m.index: m.finish_reason for m in run(core) if isinstance(m, Done)}
    assert reasons == {0: "length", 1: "abort", 2: "length"}


def test_a_lost_gateway_takes_only_its_own_requests_along() -> None:
    core = make_core(FakeRunner())
    core.submit(make_submit("lost", PROMPT, gateway="a", sampling=long(6)), monotonic())
    core.submit(make_submit("kept", PROMPT, gateway="b", sampling=long(6)), monotonic())
    core.step()
    core.cancel_gateway("a")
    reasons = {m.request_id: m.finish_reason for m in run(core) if isinstance(m, Done)}
    assert reasons == {"lost": "abort", "kept": "length"}


# Failures


def test_a_corrupt_request_fails_alone_and_leaves_nothing_in_the_cache() -> None:
    runner = FakeRunner()
    core = make_core(runner)
    runner.corrupt = {"bad"}
    messages = run(
        core,
        make_submit("good", PROMPT),
        make_submit("bad", [*PROMPT, 3, 4, 5], n=2),
        make_submit("other", [9] * 9),
    )
    failed = only(messages, Failed)
    assert (failed.request_id, failed.code, failed.retryable) == ("bad", "engine_error", False)
    assert output(messages, request_id="good") == FREE[:8]
    assert {m.request_id for m in messages if isinstance(m, Done)} == {"good", "other"}
    runner.corrupt = set()
    assert run(core, make_submit("again", PROMPT))[-1].usage.cached_tokens == 0
    assert free_blocks(core) == runner.num_blocks


def test_a_passing_fault_of_a_step_harms_nobody() -> None:
    runner = FakeRunner()
    core = make_core(runner)
    runner.failures = 1
    messages = run(core, make_submit("a", PROMPT), make_submit("b", PROMPT))
    assert output(messages, request_id="a") == output(messages, request_id="b") == FREE[:8]
    assert free_blocks(core) == runner.num_blocks


def test_a_request_that_the_runner_cannot_bear_fails_alone_and_for_good() -> None:
    runner = FakeRunner()
    core = make_core(runner)
    runner.poison = {"bad"}
    messages = run(core, make_submit("bad", [9] * 9), make_submit("good", PROMPT))
    failed = only(messages, Failed)
    assert (failed.request_id, failed.retryable) == ("bad", False)
    assert "memory" not in failed.message
    assert output(messages, request_id="good") == FREE[:8]
    assert core.healthy
    assert not only(run(core, make_submit("bad", [9] * 9, attempt=2)), Failed).retryable
    assert free_blocks(core) == runner.num_blocks


def test_a_step_in_which_no_row_can_run_fails_its_batch_for_a_retry() -> None:
    runner = FakeRunner()
    core = make_core(runner)
    runner.failures = 3
    messages = run(core, make_submit("a", PROMPT), make_submit("b", [9] * 9))
    failed = [message for message in messages if isinstance(message, Failed)]
    assert [each.retryable for each in failed] == [True, True]
    assert output(run(core, make_submit("later", PROMPT)), request_id="later") == FREE[:8]
    assert free_blocks(core) == runner.num_blocks


def test_three_failed_steps_in_a_row_make_the_engine_dead() -> None:
    runner = FakeRunner()
    core = make_core(runner)
    for failed_steps, healthy in ((2, True), (3, False)):
        runner.failures = 2 * failed_steps  # a lone row is tried twice
        for at in range(failed_steps):
            core.submit(make_submit(f"{failed_steps}-{at}", PROMPT), monotonic())
            core.step()
        assert core.healthy == healthy
        run(core, make_submit(f"{failed_steps}-fine", PROMPT))


def test_a_result_of_the_wrong_shape_is_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner()
    core = make_core(runner)
    monkeypatch.setattr(runner, "execute", lambda rows: [])
    assert only(run(core, make_submit("r", PROMPT)), Failed).code == "engine_error"
    assert free_blocks(core) == runner.num_blocks


def test_an_unforeseen_fault_at_intake_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(FakeRunner())
    monkeypatch.setattr("forebay_worker.engine.requests.sequences_of", lambda *_: 1 / 0)
    assert refusal(core, make_submit("r", PROMPT)).code == "engine_error"


# Books


def test_what_is_recorded_adds_up() -> None:
    recorder = Recorded()
    core = make_core(FakeRunner(), recorder)
    run(core, *(make_submit(name, PROMPT, sampling=long(5)) for name in "ab"))
    assert recorder.total("prompt_tokens") == 20
    assert recorder.total("generation_tokens") == 10
    assert recorder.total("prefix_queries") == 20
    assert recorder.total("prefix_hits") == 8
    assert len(recorder.first_tokens) == 2
    assert len(recorder.inter_tokens) == 8
    assert [end["reason"] for end in recorder.ends] == ["length", "length"]
    assert all(end["e2e_s"] >= end["prefill_s"] + end["decode_s"] for end in recorder.ends)


def test_the_load_counts_what_is_still_to_prefill() -> None:
    core = make_core(FakeRunner(), max_num_batched_tokens=4)
    core.submit(make_submit("a", PROMPT), monotonic())
    core.submit(make_submit("b", [9] * 20), monotonic())
    assert (core.load().waiting, core.load().waiting_tokens) == (2, 30)
    core.step()
    load = core.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 1, 26)
    assert load.kv_usage > 0
    run(core)
    assert core.load().waiting_tokens == 0
    assert core.load().kv_usage == 0


def test_waiting_siblings_cost_no_more_than_one() -> None:
    core = make_core(FakeRunner(), max_num_seqs=1)
    core.submit(make_submit("r", PROMPT, n=100), monotonic())
    waiting = list(core._requests.get(("r", 1)).sequences.values())
    assert len({id(sequence.token_ids) for sequence in waiting}) == 1
    assert core.load().waiting_tokens == 10 + 99 * 2


def test_seeds_of_neighbours_are_far_apart() -> None:
    seeds = {mix(seed, index) for seed in range(64) for index in range(64)}
    assert len(seeds) == 4096
    assert all(0 <= seed < 2**64 for seed in seeds)
    low_bits = [mix(7, index) & 1 for index in range(1000)]
    assert 400 < sum(low_bits) < 600
