"""CardRunner: owns the weights and the KV cache on a CUDA card and computes a step's rows.

A step is launched and its results are taken later, so that the host may prepare the next one
meanwhile. It knows no request, no Redis and no time: rows in, sampled tokens out. What it keeps of
a sequence between steps is its KV, at the blocks that the caller names, and its last token.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from forebay_shared.settings import WorkerSettings

from forebay_worker.engine import fp8_weights, loading
from forebay_worker.engine.adapters import NO_ADAPTERS, load_adapters
from forebay_worker.engine.batch import IntArray, Sampled, ScheduledRow
from forebay_worker.engine.card_inputs import StepInputs, StepShape
from forebay_worker.engine.card_sampling import CardSampler, CardStep
from forebay_worker.engine.card_steps import (
    CHUNK_TOKENS,
    MOST_CHUNKS,
    CardSteps,
    decode_sizes,
    mixed_shapes,
)
from forebay_worker.engine.loading import GIB, dtype_of
from forebay_worker.engine.scoring import Logits
from forebay_worker.kernels.card import CardOps
from forebay_worker.kernels.fp8 import E4M3
from forebay_worker.kernels.low_rank import filled
from forebay_worker.kernels.reference import KvCache
from forebay_worker.models.config import ModelConfig, ModelError
from forebay_worker.models.decoder import Decoder, fold_norm, quantize
from forebay_worker.models.registry import read_config

_log = logging.getLogger(__name__)

BLOCK_SIZE = 64  # the prefill kernel's tile, which one copy of the bulk engine brings
TOKEN_BUDGET = 8192
PREFILL_BUDGET = 2048  # of the largest captured graph
_GRAPH_BYTES = 6 * 2**20  # set aside for each graph, beyond the buffers that they share


class CardRunner:
    """Computes steps of one model. `num_blocks` blocks of `block_size` positions hold the KV."""

    scores_prompts = True

    def __init__(
        self,
        checkpoint: Path,
        settings: WorkerSettings,
        device: torch.device | None = None,
        *,
        graphs: bool = True,
        adapters: Mapping[str, Path] = NO_ADAPTERS,
    ) -> None:
        """Loads the model, and adapters from their directories, by name. Raises ModelError when it,
        its cache or one of them does not fit the settings.

        On a `device` without graphs (Triton's interpreter), `kv_cache_memory_bytes` must be given.
        """
        self._device = device or torch.device("cuda", torch.cuda.current_device())
        self._dtype = torch.bfloat16 if settings.dtype == "auto" else dtype_of(settings.dtype)
        self.config: ModelConfig = read_config(checkpoint)
        _check(self.config)
        self._kv_dtype = _kv_dtype(self.config, settings, self._dtype)
        _check_fp8(self.config, settings, self._kv_dtype, self._device)
        self.block_size = settings.block_size or BLOCK_SIZE
        self.token_budget = settings.max_num_batched_tokens or TOKEN_BUDGET
        self.prefill_budget = PREFILL_BUDGET
        self.vocab_size = self.config.vocab_size
        self.max_model_len = loading.max_model_len(self.config, settings)
        self._most_blocks = -(-self.max_model_len // self.block_size)
        self._most_rows = batch_rows(min(settings.max_num_seqs, self.token_budget))
        self._most_tokens = max(self.token_budget, CHUNK_TOKENS[-1])
        self._adapts = bool(adapters)
        self._load(checkpoint, settings, adapters)
        self._inputs = StepInputs(
            len(self._sampler.logits), self._most_tokens, self._most_blocks, self.block_size
        )
        self.num_blocks = self._count_blocks(settings)
        self._cache = self._new_cache(self.num_blocks)
        self._steps = self._new_steps(self._cache)
        if graphs and self._device.type == "cuda":
            self._sampler.prepare()
            self._capture()

    @property
    def dtype(self) -> str:
        """Of weights and activations: float32, bfloat16 or float16."""
        return str(self._dtype).removeprefix("torch.")

    def execute(self, rows: list[ScheduledRow]) -> list[Sampled | None]:
        """One result per row, None where it neither samples nor scores. Decode rows come first."""
        return self.launch(rows).results()

    @torch.inference_mode()
    def launch(self, rows: list[ScheduledRow]) -> CardStep:
        """Starts a step behind those launched before. At most two may be in flight."""
        decodes = next((at for at, row in enumerate(rows) if row.num_new > 1), len(rows))
        tokens = sum(row.num_new for row in rows[decodes:])
        adapted = self._adapts and any(row.sequence.adapter >= 0 for row in rows)
        shape = self._steps.shape(decodes, tokens, len(rows) - decodes, adapted=adapted)
        try:
            filled = self._inputs.fill(rows, decodes, shape)
            self._steps.set_cells(*self._inputs.take_cells())
            logits = self._run(shape, filled.scored)
            return CardStep(rows, filled, self._sampler, self._steps.token_ids, logits)
        except Exception:
            self._inputs.clear()  # what the card has of it is not known
            raise

    def poison_blocks(self, blocks: list[int]) -> None:
        """Fills blocks with NaN, behind the steps in flight: who reads there gets no number."""
        self._cache.poison(blocks)

    def _run(self, shape: StepShape, scored: IntArray) -> Logits | None:
        """Starts the step; the logits of its scored positions, where there are any."""
        arrays, steps = self._inputs.arrays, self._steps
        if not len(scored):
            steps.run(shape, arrays)
            return None
        hidden = steps.run_scored(shape, arrays, scored)
        return lambda start, stop: steps.logits_of(hidden[start:stop])

    def _load(
        self, checkpoint: Path, settings: WorkerSettings, adapters: Mapping[str, Path]
    ) -> None:
        config, most = self.config, settings.max_lora_rank
        low = load_adapters(adapters, config, most, self._dtype, self._device, filled)
        folded = not config.weights_are_fp8  # into e4m3 a gain cannot be folded

        def prepare(name: str, loaded: dict[str, torch.Tensor]) -> None:
            if folded:
                fold_norm(name, loaded, low)
            if folded and settings.quantization == "fp8":
                quantize(name, loaded)

        weights = loading.load(checkpoint, config, settings, self._dtype, self._device, prepare)
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        self._ops = CardOps(*heads, self._device, folded=folded, e4m3_cache=self._kv_dtype == E4M3)
        self._kv_scales = self._stack_kv_scales(weights)
        self._decoder = Decoder(config, weights, self._ops, self.max_model_len, low)
        rows = self._most_rows + MOST_CHUNKS
        self._sampler = CardSampler(rows, self.vocab_size, self._dtype, self._device)
        if self._device.type == "cuda":
            matrices = [weight for weight in weights.values() if weight.dim() == 2]
            with torch.inference_mode():
                self._ops.products.measure(matrices, self._most_rows)
            _log.info("products by own kernels: %s", self._ops.products)

    def _new_steps(self, cache: KvCache) -> CardSteps:
        return CardSteps(
            self._decoder, self._ops, cache, self._sampler, self._most_blocks, self._most_tokens
        )

    def _new_cache(self, blocks: int) -> KvCache:
        config = self.config
        shape = (config.num_layers, blocks, self.block_size, config.num_kv_heads, config.head_dim)
        keys, values = (
            torch.zeros(shape, dtype=self._kv_dtype, device=self._device) for _ in range(2)
        )
        return KvCache(keys, values, self._kv_scales)

    def _stack_kv_scales(self, weights: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Of an e4m3 cache: [layers, 2, KV heads]; 1 for a layer of which the checkpoint says
        nothing."""
        if self._kv_dtype != E4M3:
            return None
        layers = range(self.config.num_layers)
        one = torch.ones(2, self.config.num_kv_heads)
        found = [weights.get(fp8_weights.kv_scales_of(layer), one) for layer in layers]
        return torch.stack(found).to(self._device)

    def _count_blocks(self, settings: WorkerSettings) -> int:
        """Blocks of the KV pool: what weights, other processes, a full step and the graphs leave of
        the share of the card that we may use."""
        block_bytes = self.config.kv_bytes(self._kv_dtype.itemsize) * self.block_size
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
        graphs = self._graph_bytes(activations)
        room = int(total * share) - (total - free) - activations - graphs
        _log.info(
            "of %.1f GiB: %.2f in use with the weights, %.2f for a step of %d tokens, "
            "%.2f for graphs, %.2f for the KV cache",
            total / GIB, (total - free) / GIB, activations / GIB, self.token_budget,
            graphs / GIB, room / GIB,
        )  # fmt: skip
        return room

    def _graph_bytes(self, activations: int) -> int:
        """What the graphs will take: something each, and the buffers of the largest together."""
        mixed = mixed_shapes(self._most_rows, self.token_budget)
        count = (len(decode_sizes(self._most_rows)) + len(mixed)) * (1 + self._adapts)
        largest = max(shape.decodes + shape.tokens for shape in mixed)
        return count * _GRAPH_BYTES + activations * largest // self.token_budget

    @torch.inference_mode()
    def _profile(self) -> None:
        """A prefill of the most tokens, and the most rows sampled, that store no KV and read one
        block again and again."""
        length = min(self.token_budget, self.max_model_len)
        rows = max(1, min(self.token_budget // length, self._most_rows))
        tokens = rows * length
        shape = StepShape(0, tokens, len(self._sampler.logits), self._adapts)
        arrays = {
            **self._inputs.arrays,
            "positions": np.tile(np.arange(length), rows),
            "kv_slots": np.full(tokens, -1),
            "kv_lens": np.where(np.arange(shape.rows) < rows, length, 0),
            "starts": np.minimum(np.arange(shape.rows + 1), rows) * length,
        }
        self._new_steps(self._new_cache(1)).run(shape, arrays)
        torch.cuda.synchronize()

    @torch.inference_mode()
    def _capture(self) -> None:
        free, _ = torch.cuda.mem_get_info()
        self._steps.capture(self._most_rows, self.token_budget, adapts=self._adapts)
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


def _kv_dtype(config: ModelConfig, settings: WorkerSettings, dtype: torch.dtype) -> torch.dtype:
    """Of keys and values: as the flag says, else as the checkpoint does, else that of all else."""
    return E4M3 if settings.kv_cache_dtype == "fp8" or config.kv_is_fp8 else dtype


def _check_fp8(
    config: ModelConfig, settings: WorkerSettings, kv_dtype: torch.dtype, device: torch.device
) -> None:
    """Raises ModelError when fp8 is needed of a card that has none."""
    needed = settings.quantization == "fp8" or config.weights_are_fp8 or kv_dtype == E4M3
    if not needed or device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise ModelError(
            f"fp8 needs a card of compute capability 8.9 or later; this one has {major}.{minor}."
        )
