"""CardRunner: owns the weights and the KV cache on a CUDA card and computes a step's rows.

Steps of decode rows alone are captured graphs; a step with prefill chunks runs kernel by kernel.
It knows no request, no Redis and no time: rows in, sampled tokens out. Nothing of a sequence is
kept between steps but its KV, at the blocks that the caller names.
"""

import logging
from pathlib import Path

import numpy as np
import torch
from forebay_shared.settings import WorkerSettings

from forebay_worker.engine import card_sampling, loading
from forebay_worker.engine.batch import Sampled, ScheduledRow, flatten
from forebay_worker.engine.card_decode import CardDecode, batch_sizes
from forebay_worker.engine.card_sampling import CardSampler
from forebay_worker.engine.loading import GIB, dtype_of
from forebay_worker.engine.staging import Staging
from forebay_worker.kernels.card import CardOps
from forebay_worker.kernels.reference import KvCache, Step
from forebay_worker.models.config import ModelConfig, ModelError
from forebay_worker.models.decoder import Decoder
from forebay_worker.models.registry import read_config

_log = logging.getLogger(__name__)

BLOCK_SIZE = 64  # the prefill kernel's tile, which one copy of the bulk engine brings
TOKEN_BUDGET = 8192
_GRAPH_BYTES = 16 * 2**20  # set aside for each graph, beyond the buffers that they share


class CardRunner:
    """Computes steps of one model. `num_blocks` blocks of `block_size` positions hold the KV."""

    scores_prompts = False

    def __init__(
        self,
        checkpoint: Path,
        settings: WorkerSettings,
        device: torch.device | None = None,
        *,
        graphs: bool = True,
    ) -> None:
        """Loads the model. Raises ModelError when it, or its cache, does not fit the settings.

        On a `device` without graphs (Triton's interpreter), `kv_cache_memory_bytes` must be given.
        """
        self._device = device or torch.device("cuda", torch.cuda.current_device())
        self._dtype = torch.bfloat16 if settings.dtype == "auto" else dtype_of(settings.dtype)
        self.config: ModelConfig = read_config(checkpoint)
        _check(self.config)
        self.block_size = settings.block_size or BLOCK_SIZE
        self.token_budget = settings.max_num_batched_tokens or TOKEN_BUDGET
        self.vocab_size = self.config.vocab_size
        self.max_model_len = loading.max_model_len(self.config, settings)
        self._most_blocks = -(-self.max_model_len // self.block_size)
        self._most_rows = batch_rows(min(settings.max_num_seqs, self.token_budget))
        self._load(checkpoint, settings)
        self._inputs = self._new_inputs()
        self.num_blocks = self._count_blocks(settings)
        self._cache = self._new_cache(self.num_blocks)
        self._decode = CardDecode(
            self._decoder, self._ops, self._cache, self._sampler, self._most_blocks
        )
        if graphs and self._device.type == "cuda":
            self._capture()

    @property
    def dtype(self) -> str:
        """Of weights and activations: float32, bfloat16 or float16."""
        return str(self._dtype).removeprefix("torch.")

    @torch.inference_mode()
    def execute(self, rows: list[ScheduledRow]) -> list[Sampled | None]:
        """One result per row, None where the row does not sample. Decode rows come first."""
        if rows[-1].num_new == 1 and len(rows) <= self._decode.most_rows:
            results = self._decode(rows)
            return [
                result if row.samples else None for row, result in zip(rows, results, strict=True)
            ]
        sampled = iter(self._mixed(rows))
        return [next(sampled) if row.samples else None for row in rows]

    def _mixed(self, rows: list[ScheduledRow]) -> list[Sampled]:
        """One result per sampling row."""
        sequences = [row.sequence for row in rows if row.samples]
        step = self._send(rows)
        self._ops.begin(step)
        size = len(step.logits_at)
        self._decoder.logits(step, self._cache, self._sampler.logits[:size])
        if not sequences:
            return []
        self._sampler.launch(size, self._inputs.device)
        on_host = [
            at
            for at, each in enumerate(sequences)
            if card_sampling.asks_host(each.sampling) or each.banned_ids()
        ]
        return self._sampler.results(sequences, on_host)

    def _send(self, rows: list[ScheduledRow]) -> Step:
        """The step on the card; sampling rows are padded to one of few sizes."""
        step = flatten(rows, self.block_size)
        arrays = self._inputs.host
        tokens, count, width = len(step.token_ids), *step.block_tables.shape
        sampling = len(step.logits_at)
        size = max(1, sampling) if sampling <= 8 else -(-sampling // 8) * 8
        arrays["token_ids"][:tokens] = step.token_ids
        arrays["positions"][:tokens] = step.positions
        arrays["kv_slots"][:tokens] = step.kv_slots
        arrays["starts"][: count + 1] = step.starts
        arrays["kv_lens"][:count] = step.kv_lens
        arrays["logits_at"][:sampling] = step.logits_at
        arrays["logits_at"][sampling:size] = 0
        arrays["block_tables"][: count * width] = step.block_tables.ravel()
        sequences = [row.sequence for row in rows if row.samples]
        for at, sequence in enumerate(sequences):
            card_sampling.fill_row(arrays, at, sequence.sampling, sequence.seed)
            arrays["next_positions"][at] = len(sequence.token_ids)
        card_sampling.fill_padding(arrays, sampling, size)
        self._inputs.send(last="block_tables", count=count * width)
        return self._step(step.num_decodes, tokens, count, width, size)

    def _step(self, decodes: int, tokens: int, rows: int, width: int, logits: int) -> Step:
        on_card = self._inputs.device
        return Step(
            num_decodes=decodes,
            token_ids=on_card["token_ids"][:tokens],
            positions=on_card["positions"][:tokens],
            kv_slots=on_card["kv_slots"][:tokens],
            starts=on_card["starts"][: rows + 1],
            kv_lens=on_card["kv_lens"][:rows],
            block_tables=on_card["block_tables"][: rows * width].view(rows, width),
            logits_at=on_card["logits_at"][:logits],
            host_starts=[],
            host_kv_lens=[],
        )

    def _load(self, checkpoint: Path, settings: WorkerSettings) -> None:
        config = self.config
        weights = loading.load(checkpoint, config, settings, self._dtype, self._device)
        self._ops = CardOps(config.num_heads, config.num_kv_heads, config.head_dim, self._device)
        self._decoder = Decoder(config, weights, self._ops, self.max_model_len)
        self._sampler = CardSampler(self._most_rows, self.vocab_size, self._dtype, self._device)
        if self._device.type == "cuda":
            matrices = [weight for weight in weights.values() if weight.dim() == 2]
            with torch.inference_mode():
                self._ops.products.measure(matrices, self._most_rows)
            _log.info("products by own kernels: %s", self._ops.products)

    def _new_inputs(self) -> Staging:
        tokens, rows = self.token_budget, self._most_rows
        return Staging(
            {
                "token_ids": ("i8", tokens),
                "positions": ("i8", tokens),
                "kv_slots": ("i8", tokens),
                "starts": ("i8", rows + 1),
                "kv_lens": ("i4", rows),
                "logits_at": ("i8", rows),
                **card_sampling.fields(rows),
                "block_tables": ("i4", rows * self._most_blocks),
            },
            self._device,
        )

    def _new_cache(self, blocks: int) -> KvCache:
        config = self.config
        shape = (config.num_layers, blocks, self.block_size, config.num_kv_heads, config.head_dim)
        return KvCache(
            *(torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in range(2))
        )

    def _count_blocks(self, settings: WorkerSettings) -> int:
        """Blocks of the KV pool: what weights, other processes, a full step and the graphs leave of
        the share of the card that we may use."""
        block_bytes = self.config.kv_bytes(self._dtype.itemsize) * self.block_size
        if settings.kv_cache_memory_bytes:
            bytes_, limit = settings.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
        else:
            bytes_, limit = self._room(settings.gpu_memory_utilization), "the card has left for it"
        blocks = max(0, bytes_) // block_bytes
        loading.check_pool(blocks, self._most_blocks, block_bytes, self.max_model_len, limit)
        return blocks

    def _room(self, share: float) -> int:
        """Bytes that the KV pool may have, after a step of the most tokens has been run."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        self._profile()
        activations = torch.cuda.max_memory_allocated() - held
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        graphs = len(batch_sizes(self._most_rows)) * _GRAPH_BYTES
        room = int(total * share) - (total - free) - activations - graphs
        _log.info(
            "of %.1f GiB: %.2f in use with the weights, %.2f for a step of %d tokens, "
            "%.2f for graphs, %.2f for the KV cache",
            total / GIB, (total - free) / GIB, activations / GIB, self.token_budget,
            graphs / GIB, room / GIB,
        )  # fmt: skip
        return room

    @torch.inference_mode()
    def _profile(self) -> None:
        """A prefill of the most tokens, and the most rows sampled, that store no KV and read one
        block again and again."""
        arrays = self._inputs.host
        length = min(self.token_budget, self.max_model_len)
        rows = max(1, min(self.token_budget // length, self._most_rows))
        tokens = rows * length
        arrays["positions"][:tokens] = np.tile(np.arange(length), rows)
        arrays["kv_slots"][:tokens] = -1
        arrays["starts"][: rows + 1] = np.arange(rows + 1) * length
        arrays["kv_lens"][:rows] = length
        self._inputs.send()
        step = self._step(0, tokens, rows, self._most_blocks, self._most_rows)
        self._decoder.logits(step, self._new_cache(1), self._sampler.logits)
        self._sampler.launch(self._most_rows, self._inputs.device)
        torch.cuda.synchronize()

    @torch.inference_mode()
    def _capture(self) -> None:
        free, _ = torch.cuda.mem_get_info()
        self._decode.capture()
        left, _ = torch.cuda.mem_get_info()
        _log.info("graphs took %.2f GiB, %.2f are left", (free - left) / GIB, left / GIB)


def batch_rows(most: int) -> int:
    """Rows that every buffer has room for: the most of a step, to the next full batch size."""
    return -(-most // 8) * 8


def _check(config: ModelConfig) -> None:
    head = config.head_dim
    if head < 16 or head & (head - 1):
        raise ModelError(
            f"--device cuda takes heads of 16, 32, 64, 128 or 256 elements, not of {head}."
        )
