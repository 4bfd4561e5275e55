"""What crosses between the scheduler and the runner: the rows of a step, their results, and the
flattened form that the model reads.

It knows neither how rows are chosen nor how they are computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import TokenLogprobs
from msgspec import Struct

IntArray = npt.NDArray[np.int64]


class SequenceState(Protocol):
    """What the runner and the sampler read of a sequence, and never change.

    `token_ids` is the prompt and then the output so far; `num_computed` counts the positions whose
    KV the cache holds before the step; `block_table` covers all positions up to the step's last.
    `seed` is already mixed with the sequence's index. Where a step is launched before the last one
    has landed, the token at `num_computed` may not be in `token_ids` yet: the runner has it.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_computed(self) -> int: ...
    @property
    def block_table(self) -> list[int]: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def adapter(self) -> int:
        """The number of its adapter in the runner; -1: none."""
        ...

    def banned_ids(self, pending: int = 0) -> tuple[int, ...]:
        """Ids that must not be sampled in this step (end tokens before `min_tokens`), `pending`
        tokens after those in `token_ids`."""
        ...

    def allowed_ids(self) -> IntArray | None:
        """The only ids that its client allows, the same in every step; None: all."""
        ...

    def allowed_mask(self) -> bytes | None:
        """What its grammar allows now: bit t % 8 of byte t // 8 for token t; None without one."""
        ...


class ScheduledRow(Struct, gc=False):
    """A sequence's part of one step: `num_new` tokens from position `num_computed` on.

    `samples` says that they reach the end of `token_ids`, so a token is to be sampled. `scored` are
    those of their positions after which the prompt's next token is to be scored.
    """

    sequence: SequenceState
    num_new: int
    samples: bool
    scored: range = range(0)


class Sampled(Struct, gc=False):
    """What one row gave: its token, if it samples, and the `scores` of prompt tokens.

    `corrupt`: it has none, for its logits held a NaN or, when it is `starved`, for its own settings
    left none to choose; it must fail.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    corrupt: bool = False
    starved: bool = False
    scores: list[TokenLogprobs] = []


class Launched(Protocol):
    """A step on its way."""

    @property
    def may_wait(self) -> bool:
        """Whether the next step may be launched before these results are taken."""
        ...

    def results(self) -> list[Sampled | None]:
        """Waits for the step; one result per row, None where the row does not sample."""
        ...


@dataclass(slots=True, frozen=True)
class Ready:
    """A step that was computed at once."""

    values: list[Sampled | None]
    may_wait: bool = False

    def results(self) -> list[Sampled | None]:
        return self.values


@dataclass(slots=True)
class StepInput:
    """The rows of a step, flattened: `num_decodes` rows of one token first, then prefill chunks.

    Attributes (T tokens, R rows, all int64):
        token_ids, positions: [T].
        kv_slots: [T], where each token's KV goes: block * block_size + offset.
        starts: [R + 1], row r owns tokens starts[r] to starts[r + 1].
        kv_lens: [R], positions that row r's last token attends to, itself included.
        block_tables: [R, most blocks of a row], padded with 0.
        logits_at: flat index of the last token of each sampling row, then of each scored position.
        adapters: [T], the number of each token's adapter, -1 without; None where no row has any.
    """

    num_decodes: int
    token_ids: IntArray
    positions: IntArray
    kv_slots: IntArray
    starts: IntArray
    kv_lens: IntArray
    block_tables: IntArray
    logits_at: IntArray
    adapters: IntArray | None = None


def flatten(rows: Sequence[ScheduledRow], block_size: int) -> StepInput:
    """The step input of `rows`. Raises ValueError when a row asks for tokens that it lacks."""
    lens = np.array([row.num_new for row in rows], np.int64)
    computed = np.array([row.sequence.num_computed for row in rows], np.int64)
    decode = lens == 1
    num_decodes = int(decode.argmin()) if not decode.all() else len(rows)
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lens, out=starts[1:])
    tokens = [
        token
        for row in rows
        for token in row.sequence.token_ids[
            row.sequence.num_computed : row.sequence.num_computed + row.num_new
        ]
    ]
    if len(tokens) != starts[-1]:
        raise ValueError("a row asks for more tokens than its sequence has")
    owner = np.repeat(np.arange(len(rows)), lens)
    positions = np.arange(len(tokens)) - starts[owner] + computed[owner]
    tables = _block_tables(rows)
    logits_at = starts[1:][np.array([row.samples for row in rows], bool)] - 1
    if any(row.scored for row in rows):
        logits_at = np.concatenate([logits_at, scored_at(rows, starts[:-1])])
    adapters = np.array([row.sequence.adapter for row in rows], np.int64)
    return StepInput(
        num_decodes=num_decodes,
        token_ids=np.array(tokens, np.int64),
        positions=positions,
        kv_slots=tables[owner, positions // block_size] * block_size + positions % block_size,
        starts=starts,
        kv_lens=computed + lens,
        block_tables=tables,
        logits_at=logits_at,
        adapters=adapters[owner] if bool((adapters >= 0).any()) else None,
    )


def scored_at(rows: Sequence[ScheduledRow], starts: IntArray) -> IntArray:
    """Flat indexes of the rows' scored positions; each row's tokens begin at one of `starts`."""
    return np.concatenate(
        [
            np.array(row.scored, np.int64) - row.sequence.num_computed + start
            for row, start in zip(rows, starts, strict=True)
        ]
    )


def _block_tables(rows: Sequence[ScheduledRow]) -> IntArray:
    tables = np.zeros((len(rows), max(len(row.sequence.block_table) for row in rows)), np.int64)
    for at, row in enumerate(rows):
        table = row.sequence.block_table
        tables[at, : len(table)] = table
    return tables
