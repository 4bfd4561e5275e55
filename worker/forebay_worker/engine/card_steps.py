"""Steps on a card, captured as one graph for each of a few shapes, or launched kernel by kernel.

A graph holds everything from the packet of inputs to the sampled tokens: the tokens that the last
step left, the layers, the head, the sampling. There is one for each of many numbers of decode rows,
and for fewer of them beside each of some numbers of prefill tokens. A step is padded to the next
shape, with rows that read and write no KV. It knows shapes and tensors, no sequence.
"""

from collections.abc import Callable

import torch
from forebay_shared import collector
from torch import Tensor

from forebay_worker.engine.batch import IntArray
from forebay_worker.engine.card_inputs import StepShape
from forebay_worker.engine.card_sampling import CardSampler
from forebay_worker.engine.staging import Array, Layout, Staging
from forebay_worker.kernels.card import CardOps
from forebay_worker.kernels.feedback import take_tokens
from forebay_worker.kernels.reference import KvCache, Step
from forebay_worker.models.decoder import Decoder

MOST_DECODES = 256
"""Decode rows of the largest graph."""
MOST_CHUNKS = 32
"""Prefill rows of a graph; those that are not used cost their part of the head."""
CHUNK_TOKENS = (64, 128, 256, 512, 768, 1024, 1536, 2048)
"""Prefill tokens of the graphs. Beyond the last, launching 340 kernels takes the host no longer
than the card computes (8 ms, 0.6B on an H200)."""
_DECODES_BESIDE = (0, 8, 32, 64, 128, 192, 256)
_CELLS = (64, 4096)


def decode_sizes(most_rows: int) -> list[int]:
    """1, 2, 4, 8 and then every eighth, up to `most_rows` or a little more, at most 256."""
    most = min(most_rows, MOST_DECODES)
    return [size for size in (1, 2, 4) if size < most] + list(range(8, most + 8, 8))


def padded(rows: int) -> int:
    """To one of few sizes, so that little has to be compiled and kept."""
    return rows if rows in (0, 1, 2, 4) else -(-rows // 8) * 8


def mixed_shapes(most_rows: int, most_tokens: int) -> list[StepShape]:
    """The shapes with prefill tokens that are captured."""
    beside = [size for size in _DECODES_BESIDE if size < most_rows + 8]
    tokens = [size for size in CHUNK_TOKENS if size <= max(most_tokens, CHUNK_TOKENS[0])]
    return [
        StepShape(decodes, size, min(MOST_CHUNKS, padded(size // 16)))
        for size in tokens
        for decodes in beside
    ]


class CardSteps:
    """Computes steps from packets. `capture` makes the graphs; without it each step is eager."""

    def __init__(
        self,
        decoder: Decoder,
        ops: CardOps,
        cache: KvCache,
        sampler: CardSampler,
        most_blocks: int,
        most_tokens: int,
    ) -> None:
        """`most_blocks`: of one sequence. `most_tokens`: of a step. The sampler has room for all
        rows, padding included."""
        device = cache.keys.device
        rows = len(sampler.logits)
        self._decoder, self._ops, self._cache, self._sampler = decoder, ops, cache, sampler
        largest = StepShape(rows, most_tokens, 1, adapted=True).layout
        self._staging = Staging(largest.size, device)
        self.token_ids = self._staging.tensors(largest)["token_ids"]
        """The last step's, with those that the step before it sampled: they come first in every
        packet, so they are here whatever the step's shape."""
        self._tables = torch.zeros((rows, most_blocks), dtype=torch.int32, device=device)
        self._cells = [
            Layout({"at": ("i8", size), "blocks": ("i4", size)}) for size in _CELLS
        ]  # fmt: skip
        self._cell_staging = Staging(self._cells[-1].size, device)
        self._counting = torch.arange(rows + 1, device=device)
        self._graphs: dict[StepShape, tuple[Layout, Callable[[], None]]] = {}
        self._decode_shapes: list[StepShape] = []
        self._mixed_shapes: list[StepShape] = []

    def capture(self, most_rows: int, most_tokens: int, *, adapts: bool = False) -> None:
        """Graphs for steps of up to so many sequences and tokens, the largest first, so that the
        others fit into its memory; where it `adapts`, others for steps with adapters besides."""
        pool = torch.cuda.graph_pool_handle()
        kinds = (False, True) if adapts else (False,)
        decodes = [
            StepShape(size, adapted=kind) for size in decode_sizes(most_rows) for kind in kinds
        ]
        mixed = [
            shape._replace(adapted=kind)
            for shape in mixed_shapes(most_rows, most_tokens)
            for kind in kinds
        ]
        with collector.held():  # what is freed on the card while a graph is captured spoils it
            for shape in sorted((*decodes, *mixed), key=lambda each: -sum(each[:2])):
                layout = shape.layout
                arrays = self._staging.tensors(layout)
                self._compute(shape, arrays)  # compiles what this shape needs
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self._compute(shape, arrays)
                self._graphs[shape] = layout, graph.replay
        self._decode_shapes, self._mixed_shapes = decodes, mixed

    def shape(self, decodes: int, tokens: int, chunks: int, *, adapted: bool = False) -> StepShape:
        """The shape for so many rows: the smallest captured one, or barely padded."""
        captured = self._mixed_shapes if chunks else self._decode_shapes
        for shape in captured:
            if shape.adapted != adapted:
                continue
            if decodes <= shape.decodes and tokens <= shape.tokens and chunks <= shape.chunks:
                return shape
        return StepShape(padded(decodes), tokens, padded(chunks), adapted)

    def run(self, shape: StepShape, arrays: dict[str, Array]) -> None:
        """Sends the step's packet and starts it; what it samples is the sampler's then."""
        layout, replay = self._graphs.get(shape, (None, None))
        layout = layout or shape.layout
        self._staging.send(layout, arrays)
        if replay is None:
            self._compute(shape, self._staging.tensors(layout))
        else:
            replay()

    def run_scored(self, shape: StepShape, arrays: dict[str, Array], scored: IntArray) -> Tensor:
        """The same, kernel by kernel, for a step whose hidden states are wanted, of the tokens at
        the flat indexes `scored`: [scored, hidden]. A graph keeps its own to itself."""
        layout = shape.layout
        self._staging.send(layout, arrays)
        hidden = self._compute(shape, self._staging.tensors(layout))
        return hidden[torch.from_numpy(scored).to(hidden.device)]

    def logits_of(self, hidden: Tensor) -> Tensor:
        """float32 logits of some hidden states."""
        return self._decoder.head(hidden).float()

    def set_cells(self, at: IntArray, blocks: IntArray) -> None:
        """Sets cells of the flat block tables, before the next step reads them."""
        size = _CELLS[-1]
        for start in range(0, len(at), size):
            self._set_piece(at[start : start + size], blocks[start : start + size])

    def _set_piece(self, at: IntArray, blocks: IntArray) -> None:
        count = len(at)
        layout = next(each for each in self._cells if each.fields["at"][1] >= count)
        size = layout.fields["at"][1]
        arrays = {"at": at, "blocks": blocks}
        if count < size:  # the first cell again and again
            arrays = {name: _stretched(each, size) for name, each in arrays.items()}
        self._cell_staging.send(layout, arrays)
        sent = self._cell_staging.tensors(layout)
        self._tables.view(-1).scatter_(0, sent["at"], sent["blocks"])

    def _compute(self, shape: StepShape, arrays: dict[str, Tensor]) -> Tensor:
        """The hidden states of all tokens; what is sampled of them is the sampler's."""
        if shape.decodes:
            take_tokens(arrays["token_ids"], self._sampler.tokens, arrays["sources"])
        step = Step(
            num_decodes=shape.decodes,
            token_ids=arrays["token_ids"],
            positions=arrays["positions"],
            kv_slots=arrays["kv_slots"],
            starts=arrays.get("starts", self._counting[: shape.rows + 1]),
            kv_lens=arrays["kv_lens"],
            block_tables=self._tables[: shape.rows],
            logits_at=arrays.get("logits_at", self._counting[: shape.rows]),
            host_starts=[],
            host_kv_lens=[],
            adapters=arrays.get("adapters"),
        )
        self._ops.begin(step)
        hidden = self._decoder.hidden(step, self._cache)
        last = hidden[step.logits_at] if shape.chunks else hidden  # decode rows are one token each
        self._decoder.head(last, self._sampler.logits[: shape.rows])
        self._sampler.launch(shape.rows, arrays)
        return hidden


def _stretched(array: IntArray, size: int) -> IntArray:
    whole = array[:1].repeat(size)
    whole[: len(array)] = array
    return whole
