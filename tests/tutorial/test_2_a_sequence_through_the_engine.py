"""Lesson 2: what the engine does with a request, step by step and without a model.

`EngineCore` is the engine: requests go in as `Submit`, each `step` schedules, runs the model once
and postprocesses, and what happened comes out as events. It needs something that computes; here
that is a model which counts.
"""

from time import monotonic

from engine_fakes import Recorded
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import Delta, Done, Reply, Started, Submit, pack_ids
from forebay_worker.engine.batch import Sampled, ScheduledRow
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.intake import Limits


class CountingModel:
    """After token t comes t + 1. A real runner has the same shape: rows in, tokens out."""

    num_blocks, block_size, token_budget, prefill_budget = 8, 4, 64, 64
    max_model_len, vocab_size = 32, 100
    scores_prompts = False

    def execute(self, rows: list[ScheduledRow]) -> list[Sampled | None]:
        return [Sampled(row.sequence.token_ids[-1] + 1) if row.samples else None for row in rows]


def counting_engine(**settings: object) -> EngineCore:
    model = CountingModel()
    return EngineCore(model, Limits.of(model), WorkerSettings(**settings), Recorded())


def ask(engine: EngineCore, name: str, *prompt: int, max_tokens: int = 3) -> None:
    sampling = SamplingParams(max_tokens=max_tokens)
    submit = Submit(
        request_id=name, attempt=1, gateway="g", prompt=pack_ids(prompt), sampling=sampling
    )
    engine.submit(submit, monotonic())


def step(engine: EngineCore) -> list[Reply]:
    """One round; its events, without the gateway that each is for."""
    engine.step()
    return [event for _, event in engine.take_events()]


def test_a_sequence_starts_grows_by_a_token_per_step_and_ends() -> None:
    engine = counting_engine()
    ask(engine, "count", 10, 11)
    started, first = step(engine)
    assert isinstance(started, Started)
    assert isinstance(first, Delta)
    assert (first.offset, first.token_ids) == (0, [12])
    (second,) = step(engine)
    assert isinstance(second, Delta)
    assert (second.offset, second.token_ids) == (1, [13])
    third, done = step(engine)
    assert isinstance(third, Delta)
    assert isinstance(done, Done)
    assert (done.finish_reason, done.usage.completion_tokens) == ("length", 3)
    assert engine.idle


def test_all_that_runs_shares_each_step() -> None:
    """Continuous batching: who comes later joins the next step, nobody waits for another's end."""
    engine = counting_engine()
    ask(engine, "early", 10)
    step(engine)
    ask(engine, "late", 50)
    deltas = [event for event in step(engine) if isinstance(event, Delta)]
    assert [(delta.request_id, delta.token_ids) for delta in deltas] == [
        ("early", [12]),
        ("late", [51]),
    ]


def test_a_long_prompt_is_computed_in_chunks_under_the_token_budget() -> None:
    engine = counting_engine(max_num_batched_tokens=4)
    ask(engine, "long", *range(10))
    assert [type(event) for event in step(engine)] == [Started]  # tokens 0 to 3 of the prompt
    assert step(engine) == []  # 4 to 7
    (delta,) = step(engine)  # 8 and 9, and with them the first new token
    assert isinstance(delta, Delta)
    assert delta.token_ids == [10]


def test_a_prompt_that_was_seen_is_found_in_the_cache() -> None:
    """Full blocks of KV (4 tokens here) stay after a sequence's end, until room is needed."""
    engine = counting_engine()
    for name in ("first", "again"):
        ask(engine, name, *range(10), max_tokens=1)
        started = step(engine)[0]
    assert isinstance(started, Started)
    assert started.cached_tokens == 8


def test_a_cancel_gives_the_blocks_back_at_once() -> None:
    engine = counting_engine()
    ask(engine, "given up", *range(10))
    step(engine)
    assert engine.blocks.num_free == 8 - 3
    engine.cancel("given up", attempt=1)
    assert engine.blocks.num_free == 8
    engine.blocks.check_integrity()
