"""Whatever joins, leaves, fails or is preempted: no leak, one end each, the right tokens."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from time import monotonic

import pytest
from engine_fakes import (
    EOS,
    FakeRunner,
    LateRunner,
    expected,
    expected_scores,
    make_core,
    make_submit,
)
from forebay_shared.blocks import chain
from forebay_shared.models import Adapter
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import Delta, Done, Failed, PromptLogprobs, Started, TokenLogprobs
from forebay_worker.engine.intake import Limits
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

_PREFIXES = [[at * 3 % 60 + 2 for at in range(24)], [2, 3] * 12]
"""One without and one with equal blocks at different places."""

prompts = st.builds(
    lambda family, length, tail: _PREFIXES[family][:length] + tail,
    st.integers(0, 1),
    st.sampled_from([0, 1, 4, 7, 12, 15, 20, 24]),
    st.sampled_from([[2], [3], [2, 3], [9, 8, 7], [2, 3, 2, 3]]),
)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([0, 1, 6, 16, 30]),
    min_tokens=st.sampled_from([0, 0, 3]),
    seed=st.integers(0, 3),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (), (), tuple(range(2, 8))]),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
)


ADAPTERS = (Adapter("sql", "1f"), Adapter("law", "2f"))


def colliding_chain(_: bytes, token_ids: list[int], block_size: int) -> Iterator[bytes]:
    """Hashes that know nothing of the prefix and little of the block."""
    for at in range(block_size, len(token_ids) + 1, block_size):
        yield bytes([sum(token_ids[at - block_size : at]) % 7])


class EngineMachine(RuleBasedStateMachine):
    """A core over the fake model, with clients that come, go and are resumed."""

    new_runner: Callable[..., FakeRunner] = FakeRunner

    @initialize(
        pool_tokens=st.integers(30, 100),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 3, 8, 20, 64]),
        caching=st.sampled_from([True, True, False]),
        faults=st.booleans(),
        hashing=st.sampled_from([chain, chain, colliding_chain]),
        poison=st.booleans(),
    )
    def build(
        self,
        pool_tokens: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        caching: bool,
        faults: bool,
        hashing: Callable[[bytes, list[int], int], Iterator[bytes]],
        poison: bool,
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("forebay_worker.engine.block_manager.chain", hashing)
        self.runner = self.new_runner(pool_tokens // block_size, block_size, max_model_len=48)
        self.faults = faults
        self.core = make_core(
            self.runner,
            adapters=ADAPTERS,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            debug_poison_freed_blocks=poison,
        )
        self.limits = Limits.of(self.runner, (EOS,), ADAPTERS)
        self.submits: dict[str, tuple[list[int], SamplingParams, int]] = {}
        """Prompt, sampling and the number of the adapter."""
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.scores: dict[str, list[TokenLogprobs]] = defaultdict(list)
        self.accepted: set[str] = set()
        self.started: set[tuple[str, int]] = set()
        self.ends: dict[tuple[str, int], list[Done | Failed]] = defaultdict(list)
        self.cancelled: set[str] = set()
        self.broken: set[str] = set()

    @rule(
        prompt=prompts,
        sampling=samplings,
        n=st.sampled_from([1, 1, 1, 2, 4]),
        resumed=st.integers(0, 6),
        gateway=st.sampled_from(["gw-a", "gw-b"]),
        team=st.sampled_from(["", "red", "blue"]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "mine"]),
        adapter=st.sampled_from(["", "", "sql", "law"]),
    )
    def submit(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        n: int,
        resumed: int,
        gateway: str,
        team: str,
        priority: int,
        salt: str,
        adapter: str,
    ) -> None:
        number = self.limits.adapter(adapter)[0]
        name = f"r{len(self.submits)}"
        fits = len(prompt) < self.limits.max_model_len
        emitted = {
            index: expected(prompt, sampling, self.limits, index, number)[0][:resumed]
            if fits
            else []
            for index in range(n)
        }
        self.submits[name] = (prompt, sampling, number)
        self.tokens.update({(name, index): list(ids) for index, ids in emitted.items()})
        request = make_submit(
            name,
            prompt,
            sampling=sampling,
            emitted=emitted,
            gateway=gateway,
            team=team,
            priority=priority,
            cache_salt=salt,
            adapter=adapter,
            weight=1.0 + len(team),
        )
        self.core.submit(request, monotonic())
        self.core.submit(request, monotonic())  # a duplicate
        self.read()
        if fits:
            self.accepted.add(name)

    @precondition(lambda self: self.faults and self.submits)
    @rule(data=st.data(), index=st.sampled_from([None, 0, 1]))
    def cancel(self, data: st.DataObject, index: int | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.submits)))
        self.cancelled.add(name)
        self.core.cancel(name, 1, index)
        self.read()
        if index is None and name in self.accepted:
            assert all(self.ends[key] for key in self.tokens if key[0] == name)

    @precondition(lambda self: self.faults)
    @rule(gateway=st.sampled_from(["gw-a", "gw-b"]))
    def lose_gateway(self, gateway: str) -> None:
        self.cancelled.update(self.submits)
        self.core.cancel_gateway(gateway)
        self.read()

    @precondition(lambda self: self.faults and self.submits)
    @rule(data=st.data())
    def corrupt_one(self, data: st.DataObject) -> None:
        self.runner.corrupt.add(data.draw(st.sampled_from(sorted(self.submits))))

    @precondition(lambda self: self.faults and not self.core.idle)
    @rule()
    def break_one_step(self) -> None:
        self.runner.failures = 1
        self.core.step()
        assert self.runner.failures == 0
        self.broken.update(row.sequence.request_id for row in self.runner.batches[-1])
        self.read()

    @rule(steps=st.integers(1, 12))
    def work(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.read()

    def step(self) -> None:
        before, idle = len(self.runner.batches), self.core.idle
        self.core.step()
        assert len(self.runner.batches) == before + (not idle), "a step without progress"

    def read(self) -> None:
        for _, message in self.core.take_events():
            match message:
                case Started():
                    key = (message.request_id, message.index)
                    assert key not in self.started
                    self.started.add(key)
                case PromptLogprobs():
                    scores = self.scores[message.request_id]
                    assert message.offset == len(scores) + 1
                    scores += message.entries
                case Delta():
                    key = (message.request_id, message.index)
                    assert key in self.started
                    assert not self.ends[key]
                    assert message.offset == len(self.tokens[key])
                    self.tokens[key] += message.token_ids
                case Done():
                    self.ends[message.request_id, message.index].append(message)
                case Failed():
                    self.read_failure(message)

    def read_failure(self, failed: Failed) -> None:
        if failed.code == "context_length_exceeded":
            assert len(self.submits[failed.request_id][0]) >= self.limits.max_model_len
        else:
            assert failed.code == "engine_error"
            assert failed.request_id in self.runner.corrupt | self.broken
        for key in self.tokens:
            if key[0] == failed.request_id and not self.ends[key]:
                self.ends[key].append(failed)

    @invariant()
    def pool_is_whole(self) -> None:
        if hasattr(self, "core"):
            self.core.blocks.check_integrity(self.core.scheduler.running)
            assert self.runner.misreads == 0

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.patch.undo()
            self.drain()

    def drain(self) -> None:
        left = 40 * (sum(len(prompt) + 30 for prompt, _, _ in self.submits.values()) + 10)
        while not self.core.idle:
            left -= 1
            assert left > 0, "the engine runs in circles"
            self.step()
            self.core.blocks.check_integrity(self.core.scheduler.running)
        self.read()
        assert self.core.blocks.num_free == self.runner.num_blocks
        for (name, index), tokens in self.tokens.items():
            self.check_end(name, index, tokens)

    def check_end(self, name: str, index: int, tokens: list[int]) -> None:
        prompt, sampling, number = self.submits[name]
        (end,) = self.ends[name, index]
        if name not in self.accepted:
            return
        output, reason, stop = expected(prompt, sampling, self.limits, index, number)
        assert tokens == output[: len(tokens)]
        if isinstance(end, Failed):
            return
        if index == 0 and end.finish_reason != "abort":
            asked = sampling.prompt_logprobs is not None
            assert self.scores[name] == (expected_scores(prompt, number) if asked else [])
        assert end.usage.prompt_tokens == len(prompt)
        assert end.usage.completion_tokens == len(tokens) + (end.stop_token is not None)
        if end.finish_reason == "abort":
            assert name in self.cancelled
        else:
            assert (tokens, end.finish_reason, end.stop_token) == (output, reason, stop)


EngineMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestEngineMachine = EngineMachine.TestCase


class OverlappingMachine(EngineMachine):
    """The same clients of a runner that is one step behind the host."""

    new_runner = LateRunner
    runner: LateRunner

    @precondition(lambda self: self.faults and not self.core.idle)
    @rule()
    def break_one_step(self) -> None:
        self.runner.failures = 1
        while self.runner.failures and not self.core.idle:
            self.core.step()
        self.runner.failures = 0
        self.broken.update(row.sequence.request_id for row in self.runner.batches[-1])
        self.read()

    def step(self) -> None:
        before, idle = len(self.runner.batches) + self.runner.launches, self.core.idle
        self.core.step()
        after = len(self.runner.batches) + self.runner.launches
        assert idle or after > before, "a step without progress"
        assert self.runner.in_flight <= 1, "a third step must not be launched"


OverlappingMachine.TestCase.settings = EngineMachine.TestCase.settings
TestOverlappingMachine = OverlappingMachine.TestCase
