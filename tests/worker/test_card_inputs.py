"""What a step sends to a card: rows keep their places, and every change is sent once.

A plain model of the card's memory takes the packets: where it and the sequences disagree, a step
would read another's KV.
"""

import numpy as np
import pytest
from engine_fakes import make_sequence
from forebay_shared.sampling import SamplingParams
from forebay_worker.engine.batch import ScheduledRow
from forebay_worker.engine.card_inputs import StepInputs, StepShape
from forebay_worker.engine.sequence import Sequence
from hypothesis import given
from hypothesis import strategies as st

BLOCK, ROWS, WIDTH = 4, 12, 8


def decode_row(tokens: int, first_block: int, *, pending: bool = False) -> ScheduledRow:
    """A row of one token behind `tokens` computed ones, its token unknown when `pending`."""
    sequence = make_sequence(list(range(100, 100 + tokens + (not pending))))
    sequence.num_computed = tokens
    need = tokens // BLOCK + 1
    sequence.block_table = list(range(first_block, first_block + need))
    return ScheduledRow(sequence, 1, True)


def inputs() -> StepInputs:
    return StepInputs(ROWS, 64, WIDTH, BLOCK)


def test_a_leaver_is_replaced_by_the_last_and_nobody_else_moves() -> None:
    into, rows = inputs(), [decode_row(5, 10 * at) for at in range(4)]
    assert into.fill(rows, 4, StepShape(4)).places.tolist() == [0, 1, 2, 3]
    left = [rows[0], rows[2], rows[3]]
    places = into.fill(left, 3, StepShape(4)).places
    assert places.tolist() == [0, 2, 1]
    assert into.arrays["sources"][:3].tolist() == [0, 3, 2]
    assert into.arrays["kv_lens"][:4].tolist() == [6, 6, 6, 0]
    assert into.arrays["kv_slots"][3] == -1


def test_only_changed_cells_are_sent() -> None:
    into, rows = inputs(), [decode_row(6, 0), decode_row(7, 10)]
    into.fill(rows, 2, StepShape(2))
    at, blocks = into.take_cells()
    assert at.tolist() == [0, 1, WIDTH, WIDTH + 1]
    assert blocks.tolist() == [0, 1, 10, 11]
    for row in rows:
        sequence = row.sequence
        assert isinstance(sequence, Sequence)
        sequence.num_computed += 1
        sequence.token_ids.append(1)
    rows[1].sequence.block_table.append(77)
    into.fill(rows, 2, StepShape(2))
    at, blocks = into.take_cells()
    assert (at.tolist(), blocks.tolist()) == ([WIDTH + 2], [77])
    into.fill(rows, 2, StepShape(2))
    assert len(into.take_cells()[0]) == 0


def test_a_prefill_hands_its_token_to_the_row_that_decodes_next() -> None:
    into = inputs()
    sequence = make_sequence([1, 2, 3, 4, 5])
    sequence.block_table = [3, 4]
    other = decode_row(2, 6)
    shape = StepShape(2, 8, 2)
    places = into.fill([other, ScheduledRow(sequence, 5, True)], 1, shape).places
    assert places.tolist() == [0, 2]
    arrays = into.arrays
    assert arrays["token_ids"][2:7].tolist() == [1, 2, 3, 4, 5]
    assert arrays["kv_slots"][2:10].tolist() == [12, 13, 14, 15, 16, -1, -1, -1]
    assert arrays["starts"][:5].tolist() == [0, 1, 2, 7, 7]
    assert arrays["logits_at"][:4].tolist() == [0, 1, 6, 0]
    sequence.num_computed = 5
    into.fill([ScheduledRow(sequence, 1, True)], 1, StepShape(1))
    assert (arrays["token_ids"][0], arrays["sources"][0]) == (-1, 2)


def test_a_token_that_nobody_knows_is_refused_and_clear_forgets() -> None:
    into, row = inputs(), decode_row(3, 0, pending=True)
    with pytest.raises(ValueError, match="neither known nor sampled"):
        into.fill([row], 1, StepShape(1))
    into.clear()
    assert len(into.take_cells()[0]) == 0


def test_rows_that_ask_for_more_than_the_step_does_are_named() -> None:
    into = inputs()
    rows = [decode_row(3, 5 * at) for at in range(3)]
    for at, sampling in enumerate(
        [SamplingParams(), SamplingParams(logprobs=1), SamplingParams(min_tokens=2)]
    ):
        sequence = rows[at].sequence
        assert isinstance(sequence, Sequence)
        sequence.sampling = sampling
        sequence.stop_ids = frozenset([7])
    filled = into.fill(rows, 3, StepShape(4))
    assert (filled.adjusted, filled.read) == ([2], [1])
    ended = rows[2].sequence
    assert isinstance(ended, Sequence)
    ended.num_prompt -= 2
    filled = into.fill(rows, 3, StepShape(4))
    assert (filled.adjusted, filled.read) == ([], [1])


def test_scored_positions_are_found_where_their_tokens_lie() -> None:
    into = inputs()
    long, short = make_sequence(list(range(9))), make_sequence(list(range(6)))
    long.block_table, short.block_table = [3, 4, 5], [7, 8]
    long.num_computed, short.num_computed = 2, 4
    rows = [
        decode_row(2, 0),
        ScheduledRow(short, 1, False, range(4, 5)),
        ScheduledRow(long, 5, False, range(3, 7)),
    ]
    filled = into.fill(rows, 2, StepShape(4, 8, 2))
    assert filled.scored.tolist() == [1, 5, 6, 7, 8]
    assert into.arrays["token_ids"][filled.scored].tolist() == [4, 3, 4, 5, 6]
    assert len(into.fill(rows[:1], 1, StepShape(1)).scored) == 0


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.integers(0, 5), max_size=3)), max_size=12
    )
)
def test_the_cards_tables_are_the_sequences_whoever_comes_and_goes(
    steps: list[tuple[int, list[int]]],
) -> None:
    into, card = inputs(), np.full(ROWS * WIDTH, -1)
    running: list[ScheduledRow] = []
    block = 0
    for newcomers, leavers in steps:
        for at in leavers:
            if at < len(running):
                running.pop(at)
        while len(running) < min(newcomers, 8):
            running.append(decode_row(3 + block % 9, block))
            block += 10
        places = into.fill(running, len(running), StepShape(8)).places
        at, blocks = into.take_cells()
        assert len(set(at.tolist())) == len(at), "a cell is sent twice"
        card[at] = blocks
        for row, place in zip(running, places.tolist(), strict=True):
            sequence = row.sequence
            assert isinstance(sequence, Sequence)
            table = card[place * WIDTH :][: len(sequence.block_table)].tolist()
            assert table == sequence.block_table
            position = sequence.num_computed
            slot = sequence.block_table[position // BLOCK] * BLOCK + position % BLOCK
            assert into.arrays["kv_slots"][place] == slot
            assert into.arrays["token_ids"][place] == sequence.token_ids[position]
            sequence.num_computed += 1
            sequence.token_ids.append(position)
            if sequence.num_computed // BLOCK == len(sequence.block_table):
                sequence.block_table.append(900 + block)
                block += 1
