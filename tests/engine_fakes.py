"""A model without a model: its KV lies in block slots, its tokens are computed from what is there.

A wrong block, a slot read before it was written or a position computed wrongly shows as a wrong
token. `expected` says what any batching, chunking, caching or preemption must give.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from time import monotonic
from typing import cast

from forebay_shared.models import Adapter
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import SequenceStart, Submit, TokenLogprobs, pack_ids
from forebay_worker.engine.batch import Sampled, ScheduledRow
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.intake import Limits
from forebay_worker.engine.sequence import Sequence as EngineSequence
from forebay_worker.engine.sequence import mix
from msgspec import structs

EOS = 1
NAN = -1


class FakeRunner:
    """Deterministic; `corrupt`, `poison` and `failures` make it misbehave."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 128,
        vocab_size: int = 64,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.token_budget = self.prefill_budget = 2048
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.scores_prompts = True
        self.kv: list[int | None] = [None] * (num_blocks * block_size)
        self.corrupt: set[str] = set()
        self.poison: set[str] = set()
        self.failures = 0
        self.misreads = 0
        """Slots read that nobody has written, or that were poisoned since. The engine tries such a
        row again alone, so nothing else may tell."""
        self.batches: list[list[ScheduledRow]] = []
        self.tokens_computed = 0

    def execute(self, rows: list[ScheduledRow]) -> list[Sampled | None]:
        ones = [row.num_new == 1 for row in rows]
        assert ones == sorted(ones, reverse=True), "decodes come first"
        self.batches.append(list(rows))
        self.tokens_computed += sum(row.num_new for row in rows)
        if self.failures or any(row.sequence.request_id in self.poison for row in rows):
            self.failures = max(0, self.failures - 1)
            raise RuntimeError("out of memory")
        return [self._run(row) for row in rows]

    def poison_blocks(self, blocks: list[int]) -> None:
        for block in blocks:
            first = block * self.block_size
            self.kv[first : first + self.block_size] = [None] * self.block_size

    def _run(self, row: ScheduledRow) -> Sampled | None:
        assert row.num_new >= 1
        sequence, size = row.sequence, self.block_size
        slots = [block * size + at for block in sequence.block_table for at in range(size)]
        bad = row.samples and sequence.request_id in self.corrupt
        end = sequence.num_computed + row.num_new
        for position in range(sequence.num_computed, end):
            if bad:
                self.kv[slots[position]] = NAN
                continue
            before = self._read(slots[position - 1]) if position else _root(sequence.adapter)
            self.kv[slots[position]] = _kv(before, sequence.token_ids[position], position)
        if bad:
            return Sampled(0, corrupt=True)
        scores = [score(self._read(slots[position]), position) for position in row.scored]
        if not row.samples:
            return Sampled(0, scores=scores) if scores else None
        assert end == len(sequence.token_ids)
        state = _fold([self._read(slot) for slot in slots[:end]])
        token = _pick(state, sequence.seed, end, sequence.banned_ids(), self.vocab_size)
        return Sampled(token, scores=scores)

    def _read(self, slot: int) -> int:
        kv = self.kv[slot]
        self.misreads += kv is None
        assert kv is not None, "a slot was read before it was written"
        assert kv != NAN, "KV of a corrupt request reached another one"
        return kv


@dataclass
class LateStep:
    """A launched step: its rows as they were then, and who they are of."""

    runner: "LateRunner"
    rows: list[ScheduledRow]
    owners: list[EngineSequence]
    may_wait: bool
    values: list[Sampled | None] | None = None
    freed: list[int] = field(default_factory=list[int])
    """Blocks to poison behind it."""

    def results(self) -> list[Sampled | None]:
        self.runner.compute_until(self)
        assert self.values is not None
        return self.values


class LateRunner(FakeRunner):
    """Overlaps as a card does: launched steps are computed in their order, and not before the host
    waits for one. A token that the host does not know comes from the step before."""

    def __init__(self, *sizes: int, **named: int) -> None:
        super().__init__(*sizes, **named)
        self.launches = 0
        self._queue: list[LateStep] = []
        self._sampled: dict[EngineSequence, int] = {}

    @property
    def in_flight(self) -> int:
        return len(self._queue)

    def launch(self, rows: list[ScheduledRow]) -> LateStep:
        owners = [cast(EngineSequence, row.sequence) for row in rows]
        waits = any(each.sampling.bad_words or each.banned_ids() for each in owners)
        frozen = [
            structs.replace(row, sequence=_frozen(owner))
            for row, owner in zip(rows, owners, strict=True)
        ]
        step = LateStep(self, frozen, owners, may_wait=not waits)
        self._queue.append(step)
        self.launches += 1
        return step

    def poison_blocks(self, blocks: list[int]) -> None:
        if self._queue:
            self._queue[-1].freed += blocks
        else:
            super().poison_blocks(blocks)

    def compute_until(self, last: LateStep) -> None:
        while last.values is None:
            step = self._queue.pop(0)
            for row, owner in zip(step.rows, step.owners, strict=True):
                if row.sequence.num_computed == len(row.sequence.token_ids):
                    row.sequence.token_ids.append(self._sampled[owner])
            try:
                step.values = self.execute(step.rows)
            except Exception:
                for each in (step, *self._queue):  # what was launched behind it is not computed
                    super().poison_blocks(each.freed)
                self._queue.clear()
                raise
            super().poison_blocks(step.freed)
            self._sampled = {
                owner: each.token_id
                for owner, each in zip(step.owners, step.values, strict=True)
                if each is not None
            }


def _frozen(sequence: EngineSequence) -> EngineSequence:
    copied = copy(sequence)
    copied.token_ids, copied.block_table = list(sequence.token_ids), list(sequence.block_table)
    return copied


def _root(adapter: int) -> int:
    """What stands before the first KV: another one for each adapter."""
    return adapter + 1


def _kv(before: int, token: int, position: int) -> int:
    return mix(before ^ token, position) >> 1


def _fold(kvs: Sequence[int]) -> int:
    state = 0
    for kv in kvs:
        state = (state * 31 + kv) % (2**61 - 1)
    return state


def _pick(state: int, seed: int, position: int, banned: tuple[int, ...], vocab_size: int) -> int:
    token = mix(state ^ seed, position) % vocab_size
    while token in banned:
        token = (token + 1) % vocab_size
    return token


def score(kv: int, position: int) -> TokenLogprobs:
    """Of the token after `position`."""
    return TokenLogprobs(-(kv % 1000) / 100, [(position, 0.0)], rank=1)


def expected_scores(prompt: list[int], adapter: int = -1) -> list[TokenLogprobs]:
    """Of every token of a prompt but the first."""
    kv, scores = _root(adapter), list[TokenLogprobs]()
    for position, token in enumerate(prompt[:-1]):
        kv = _kv(kv, token, position)
        scores.append(score(kv, position))
    return scores


def expected(
    prompt: list[int],
    sampling: SamplingParams,
    limits: Limits,
    index: int = 0,
    adapter: int = -1,
) -> tuple[list[int], str, int | None]:
    """Output ids, finish reason and stop token of a sequence that runs alone to its end."""
    tokens, kvs = list(prompt), list[int]()
    stops = set(sampling.stop_token_ids) | (
        set() if sampling.ignore_eos else set(limits.eos_token_ids)
    )
    limit = min(len(prompt) + sampling.max_tokens, limits.max_model_len)
    while len(tokens) < limit:
        for position in range(len(kvs), len(tokens)):
            before = kvs[-1] if kvs else _root(adapter)
            kvs.append(_kv(before, tokens[position], position))
        early = len(tokens) - len(prompt) < sampling.min_tokens
        banned = tuple(stops) if early else ()
        token = _pick(_fold(kvs), mix(sampling.seed, index), len(tokens), banned, limits.vocab_size)
        if token in stops:
            return tokens[len(prompt) :], "stop", token
        tokens.append(token)
    return tokens[len(prompt) :], "length", None


class Recorded:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.ends: list[dict[str, object]] = []
        self.first_tokens: list[float] = []
        self.inter_tokens: list[float] = []
        self.failures = 0

    def step(self, **facts: float) -> None:
        self.steps.append(facts)

    def step_failed(self) -> None:
        self.failures += 1

    def first_token(self, seconds: float) -> None:
        self.first_tokens.append(seconds)

    def inter_token(self, seconds: float) -> None:
        self.inter_tokens.append(seconds)

    def finished(self, **facts: object) -> None:
        self.ends.append(facts)

    def total(self, name: str) -> float:
        return sum(step[name] for step in self.steps)


def make_core(
    runner: FakeRunner,
    recorder: Recorded | None = None,
    adapters: tuple[Adapter, ...] = (),
    **settings: object,
) -> EngineCore:
    return EngineCore(
        runner,
        Limits.of(runner, (EOS,), adapters),
        WorkerSettings(**settings),
        recorder or Recorded(),
        revision="fake",
    )


def make_submit(
    request_id: str,
    prompt: list[int],
    *,
    attempt: int = 1,
    gateway: str = "gw",
    emitted: dict[int, list[int]] | None = None,
    n: int = 1,
    sampling: SamplingParams | None = None,
    **fields: object,
) -> Submit:
    starts = emitted or {index: list[int]() for index in range(n)}
    return Submit(
        request_id=request_id,
        attempt=attempt,
        gateway=gateway,
        prompt=pack_ids(prompt),
        sampling=sampling or SamplingParams(max_tokens=8, ignore_eos=True),
        starts=tuple(SequenceStart(index, pack_ids(ids)) for index, ids in starts.items()),
        **fields,
    )


def run(core: EngineCore, *submits: Submit) -> list[object]:
    """Submits, steps until idle; the messages of all that happened."""
    for submit in submits:
        core.submit(submit, monotonic())
    while not core.idle:
        core.step()
    return [message for _, message in core.take_events()]


def make_sequence(tokens: list[int], **fields: object) -> EngineSequence:
    """A bare sequence, for parts below the core."""
    return EngineSequence(
        request_id="r",
        attempt=1,
        gateway="gw",
        index=0,
        token_ids=list(tokens),
        num_prompt=len(tokens),
        sampling=SamplingParams(),
        seed=0,
        limit=10**6,
        stop_ids=frozenset(),
        **fields,
    )
