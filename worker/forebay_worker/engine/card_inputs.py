"""What a step sends to a card, in numpy: tokens, positions, cache slots, block tables, parameters.

Decode rows keep their place from step to step, so that little changes: when one leaves, the last
one moves into the gap. Then a row's token need not come from the host: the card finds the one that
the last step sampled. Rows of prefill chunks stand behind the decode rows' padding.

It knows numbers and places, no tensor and no kernel.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forebay_worker.engine.batch import IntArray, ScheduledRow, SequenceState, scored_at
from forebay_worker.engine.card_rules import fill_params, is_adjusted, param_fields
from forebay_worker.engine.card_sampling import Filled
from forebay_worker.engine.staging import Array, Fields, Layout


class StepShape(NamedTuple):
    """Sizes of a step, padding included: decode rows, and tokens and rows of prefill chunks;
    `adapted`: some row has an adapter."""

    decodes: int
    tokens: int = 0
    chunks: int = 0
    adapted: bool = False

    @property
    def rows(self) -> int:
        return self.decodes + self.chunks

    @property
    def layout(self) -> Layout:
        """The arrays of a step of this shape. Starts and the logits' places are plain counting
        where every row is a decode."""
        tokens, rows = self.decodes + self.tokens, self.rows
        fields: Fields = {
            "token_ids": ("i8", tokens),
            "positions": ("i8", tokens),
            "kv_slots": ("i8", tokens),
            "kv_lens": ("i4", rows),
            "sources": ("i4", self.decodes),
            **param_fields(rows),
        }
        if self.chunks:
            fields = {**fields, "starts": ("i8", rows + 1), "logits_at": ("i8", rows)}
        if self.adapted:
            fields = {**fields, "adapters": ("i4", tokens)}
        return Layout(fields)


class StepInputs:
    """The arrays of the step that is next, and the cells of the block tables that it changes."""

    def __init__(self, most_rows: int, most_tokens: int, most_blocks: int, block_size: int) -> None:
        sizes = StepShape(most_rows, most_tokens, 1, adapted=True).layout.fields
        self.arrays: dict[str, Array] = {
            name: np.zeros(count, kind) for name, (kind, count) in sizes.items()
        }
        self._counting = np.arange(most_rows + most_tokens)
        self._block_size = block_size
        self._tables = np.zeros((most_rows, most_blocks), np.int64)
        self._asks = np.zeros(most_rows, bool)
        self.clear()

    def clear(self) -> None:
        """Forgets who had which place; after this all tokens must be known."""
        rows = len(self._tables)
        self._cells_at: list[IntArray] = []
        self._cells: list[IntArray] = []
        self._decodes: list[SequenceState] = []
        self._places: IntArray = np.zeros(0, np.int64)
        self._place_of: dict[SequenceState, int] = {}
        self._sampled: dict[SequenceState, int] = {}
        self._known: list[list[int] | None] = [None] * rows
        self._widths = [0] * rows

    def fill(self, rows: Sequence[ScheduledRow], num_decodes: int, shape: StepShape) -> Filled:
        """Writes a step of `rows`, decodes first. Raises ValueError when a row's token is known
        neither here nor by the step before."""
        decodes = [row.sequence for row in rows[:num_decodes]]
        self._seat(decodes)
        self._fill_decodes(decodes, shape.decodes)
        self._fill_chunks(rows[num_decodes:], shape)
        if shape.adapted:
            self._fill_adapters(rows, num_decodes, shape)
        chunks = shape.decodes + self._counting[: len(rows) - num_decodes]
        places = np.concatenate((self._places, chunks))
        return Filled(places, *self._asking(rows, places), self._scored_at(rows, places))

    def _asking(
        self, rows: Sequence[ScheduledRow], places: IntArray
    ) -> tuple[list[int], list[int]]:
        """Rows whose token is chosen from other logits, and rows that want log-probabilities."""
        adjusted: list[int] = []
        read: list[int] = []
        for at in np.flatnonzero(self._asks[places]).tolist():
            row = rows[at]
            if row.samples and _is_adjusted(row):
                adjusted.append(at)
            if row.samples and row.sequence.sampling.logprobs is not None:
                read.append(at)
        return adjusted, read

    def _scored_at(self, rows: Sequence[ScheduledRow], places: IntArray) -> IntArray:
        if not any(row.scored for row in rows):
            return places[:0]
        chunks = [row.num_new > 1 for row in rows]
        return scored_at(rows, np.where(chunks, self.arrays["starts"][places], places))

    def take_cells(self) -> tuple[IntArray, IntArray]:
        """Cells of the flat block tables that have changed, and their blocks."""
        if not self._cells:
            return self._places[:0], self._places[:0]
        at, blocks = np.concatenate(self._cells_at), np.concatenate(self._cells)
        self._cells_at, self._cells = [], []
        return at, blocks

    def _seat(self, decodes: list[SequenceState]) -> None:
        """Gives each decode row its place: the one it had, where that is below their number."""
        count = len(decodes)
        sources = self.arrays["sources"]
        sources[:count] = self._counting[:count]
        if decodes != self._decodes:
            before, self._place_of = self._place_of, {}
            newcomers: list[SequenceState] = []
            for each in decodes:
                at = before.get(each, count)
                if at < count:
                    self._place_of[each] = at
                else:
                    newcomers.append(each)
            free = sorted(set(range(count)).difference(self._place_of.values()))
            for each, at in zip(newcomers, free, strict=True):
                sources[at] = before.get(each, self._sampled.get(each, -1))
                self._place_of[each] = at
                self._known[at] = None
                self._set_params(at, each)
            self._decodes = decodes
            self._places = np.array([self._place_of[each] for each in decodes], np.int64)
        self._sampled = {}

    def _set_params(self, at: int, sequence: SequenceState) -> None:
        params = sequence.sampling
        fill_params(self.arrays, at, params, sequence.seed)
        if adjusted := is_adjusted(params):
            self.arrays["temperature"][at] = 0.0  # its token is chosen again: greedy is cheapest
        self._asks[at] = adjusted or params.min_tokens > 0 or params.logprobs is not None

    def _fill_decodes(self, decodes: list[SequenceState], size: int) -> None:
        arrays, places, count = self.arrays, self._places, len(decodes)
        for at, each in zip(places.tolist(), decodes, strict=True):
            table = each.block_table
            if self._known[at] is not table or self._widths[at] != len(table):
                self._renew_table(at, table)
        tokens = [
            each.token_ids[each.num_computed] if each.num_computed < len(each.token_ids) else -1
            for each in decodes
        ]
        positions = np.array([each.num_computed for each in decodes], np.int64)
        arrays["token_ids"][places] = tokens
        if bool(((arrays["token_ids"][:count] < 0) & (arrays["sources"][:count] < 0)).any()):
            raise ValueError("a row's token is neither known nor sampled by the step before")
        arrays["positions"][places] = positions
        arrays["kv_lens"][places] = positions + 1
        arrays["kv_slots"][places] = self._slots(self._tables[places], positions)
        self._pad_rows(count, size)

    def _pad_rows(self, start: int, end: int) -> None:
        """Rows that read and write no KV."""
        arrays, rest = self.arrays, slice(start, end)
        arrays["token_ids"][rest] = arrays["positions"][rest] = arrays["sources"][rest] = 0
        arrays["kv_slots"][rest] = -1
        arrays["kv_lens"][rest] = 0
        arrays["temperature"][rest] = 0.0

    def _renew_table(self, at: int, table: list[int]) -> None:
        """Of a decode row: all of it, or what has been appended."""
        start = self._widths[at] if self._known[at] is table else 0
        new = np.array(table[start:], np.int64)
        self._tables[at, start : len(table)] = new
        self._write_cells(at, start, new)
        self._known[at], self._widths[at] = table, len(table)

    def _write_cells(self, row: int, start: int, blocks: IntArray) -> None:
        first = row * self._tables.shape[1] + start
        self._cells_at.append(np.arange(first, first + len(blocks)))
        self._cells.append(blocks)

    def _slots(self, tables: IntArray, positions: IntArray) -> IntArray:
        """Where each position's KV goes: by the row of `tables` of its own."""
        size = self._block_size
        own = self._counting[: len(positions)]
        return tables[own, positions // size] * size + positions % size

    def _fill_chunks(self, rows: Sequence[ScheduledRow], shape: StepShape) -> None:
        if not shape.chunks:
            return
        arrays, first = self.arrays, shape.decodes
        arrays["starts"][: first + 1] = self._counting[: first + 1]
        arrays["logits_at"][:first] = self._counting[:first]
        start = first
        for at, row in enumerate(rows, first):
            start = self._fill_chunk(at, start, row)
            if row.samples:
                self._sampled[row.sequence] = at
        end, last = first + len(rows), shape.rows
        arrays["starts"][end : last + 1] = start
        arrays["logits_at"][end:last] = 0
        arrays["kv_lens"][end:last] = 0
        arrays["temperature"][end:last] = 0.0
        rest = slice(start, first + shape.tokens)
        arrays["token_ids"][rest] = arrays["positions"][rest] = 0
        arrays["kv_slots"][rest] = -1

    def _fill_adapters(
        self, rows: Sequence[ScheduledRow], num_decodes: int, shape: StepShape
    ) -> None:
        """The number of each token's adapter; -1 without, and for padding."""
        adapters, starts = self.arrays["adapters"], self.arrays["starts"]
        adapters[: shape.decodes + shape.tokens] = -1
        adapters[self._places] = [row.sequence.adapter for row in rows[:num_decodes]]
        for at, row in enumerate(rows[num_decodes:], shape.decodes):
            adapters[starts[at] : starts[at + 1]] = row.sequence.adapter

    def _fill_chunk(self, at: int, start: int, row: ScheduledRow) -> int:
        """Writes the chunk as row `at`, its tokens from `start` on; where they end."""
        sequence, arrays = row.sequence, self.arrays
        computed, stop = sequence.num_computed, sequence.num_computed + row.num_new
        end = start + row.num_new
        table = np.array(sequence.block_table, np.int64)
        positions = np.arange(computed, stop)
        size = self._block_size
        arrays["token_ids"][start:end] = sequence.token_ids[computed:stop]
        arrays["positions"][start:end] = positions
        arrays["kv_slots"][start:end] = table[positions // size] * size + positions % size
        arrays["starts"][at] = start
        arrays["logits_at"][at] = end - 1
        arrays["kv_lens"][at] = stop
        self._write_cells(at, 0, table)
        self._known[at] = None
        self._set_params(at, sequence)
        return end


def _is_adjusted(row: ScheduledRow) -> bool:
    sequence = row.sequence
    pending = sequence.num_computed + row.num_new - len(sequence.token_ids)
    return is_adjusted(sequence.sampling) or bool(sequence.banned_ids(pending))
