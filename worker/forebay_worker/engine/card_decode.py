"""Decode steps on a card: rows of one token each, as one captured graph per batch size.

A batch is padded to the next captured size with rows that read and write no KV. The host sends a
few numbers per row in one copy; block tables stay on the card and go there again only where they
changed. It knows no prompt and no queue.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from forebay_worker.engine import card_sampling
from forebay_worker.engine.batch import Sampled, ScheduledRow, SequenceState
from forebay_worker.engine.card_sampling import CardSampler
from forebay_worker.engine.staging import Staging
from forebay_worker.kernels.card import CardOps
from forebay_worker.kernels.reference import KvCache, Step
from forebay_worker.models.decoder import Decoder

MOST_ROWS = 256


def batch_sizes(most_rows: int) -> list[int]:
    """1, 2, 4, 8 and then every eighth, up to `most_rows` or a little more, at most 256."""
    most = min(most_rows, MOST_ROWS)
    return [size for size in (1, 2, 4) if size < most] + list(range(8, most + 8, 8))


class CardDecode:
    """Runs up to `most_rows` rows. `capture` makes the graphs; without it each step is eager."""

    def __init__(
        self, decoder: Decoder, ops: CardOps, cache: KvCache, sampler: CardSampler, most_blocks: int
    ) -> None:
        """`most_blocks`: of one sequence. The sampler has room for all rows."""
        device = cache.keys.device
        self._decoder, self._ops, self._cache, self._sampler = decoder, ops, cache, sampler
        self._sizes = batch_sizes(len(sampler.logits))
        self.most_rows = self._sizes[-1]
        self._block_size = cache.keys.shape[2]
        self._staging = Staging(
            {
                "token_ids": ("i8", self.most_rows),
                "positions": ("i8", self.most_rows),
                "kv_slots": ("i8", self.most_rows),
                "kv_lens": ("i4", self.most_rows),
                **card_sampling.fields(self.most_rows),
            },
            device,
        )
        shape = (self.most_rows, most_blocks)
        self._tables = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host_tables = self._tables.numpy()
        self._card_tables = self._tables.to(device)
        self._starts = torch.arange(self.most_rows + 1, device=device)
        self._owners: list[SequenceState | None] = [None] * self.most_rows
        self._known: list[list[int]] = [[] for _ in range(self.most_rows)]
        self._asks_host = [False] * self.most_rows
        self._replays: dict[int, Callable[[], None]] = {}

    def capture(self) -> None:
        """One graph per size, the largest first, so that the others fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        self._pad(0)
        self._staging.send()
        for size in reversed(self._sizes):
            self._launch(size)  # compiles what this size needs
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._launch(size)
            self._replays[size] = graph.replay

    def __call__(self, rows: Sequence[ScheduledRow]) -> list[Sampled]:
        """One result per row, also for those that do not sample."""
        count = len(rows)
        sequences = [row.sequence for row in rows]
        self._place(sequences)
        size = next(size for size in self._sizes if size >= count)
        arrays = self._staging.host
        positions = np.array([each.num_computed for each in sequences], np.int64)
        arrays["token_ids"][:count] = [
            each.token_ids[each.num_computed] for each in sequences
        ]  # fmt: skip
        arrays["positions"][:count] = positions
        arrays["kv_lens"][:count] = positions + 1
        arrays["next_positions"][:count] = positions + 1
        blocks = self._host_tables[np.arange(count), positions // self._block_size]
        arrays["kv_slots"][:count] = (
            blocks.astype(np.int64) * self._block_size + positions % self._block_size
        )
        self._pad(count)
        self._staging.send()
        replay = self._replays.get(size)
        if replay is None:
            self._launch(size)
        else:
            replay()
        on_host = [
            at
            for at, (row, asks) in enumerate(zip(rows, self._asks_host, strict=False))
            if row.samples and (asks or row.sequence.banned_ids())
        ]
        return self._sampler.results(sequences, on_host)

    def _pad(self, count: int) -> None:
        """Rows from `count` on become nobody's."""
        arrays = self._staging.host
        arrays["kv_slots"][count:] = -1
        arrays["kv_lens"][count:] = 0
        arrays["token_ids"][count:] = 0
        arrays["positions"][count:] = 0
        card_sampling.fill_padding(arrays, count, self.most_rows)
        for at in range(count, self.most_rows):
            if self._owners[at] is None:
                break
            self._owners[at] = None

    def _place(self, sequences: Sequence[SequenceState]) -> None:
        """Renews the parameters of rows with another owner, and tables that changed."""
        first, last = self.most_rows, -1
        for at, sequence in enumerate(sequences):
            if self._owners[at] is not sequence:
                self._owners[at] = sequence
                params = sequence.sampling
                card_sampling.fill_row(self._staging.host, at, params, sequence.seed)
                self._asks_host[at] = card_sampling.asks_host(params)
            table = sequence.block_table
            if self._known[at] != table:
                self._known[at] = list(table)
                self._host_tables[at, : len(table)] = table
                first, last = min(first, at), at
        if last >= 0:
            changed = slice(first, last + 1)
            self._card_tables[changed].copy_(self._tables[changed], non_blocking=True)

    def _launch(self, size: int) -> None:
        arrays = self._staging.device
        step = Step(
            num_decodes=size,
            token_ids=arrays["token_ids"][:size],
            positions=arrays["positions"][:size],
            kv_slots=arrays["kv_slots"][:size],
            starts=self._starts[: size + 1],
            kv_lens=arrays["kv_lens"][:size],
            block_tables=self._card_tables,
            logits_at=self._starts[:size],
            host_starts=[],
            host_kv_lens=[],
        )
        self._ops.begin(step)
        self._decoder.logits(step, self._cache, self._sampler.logits[:size])
        self._sampler.launch(size, arrays)
