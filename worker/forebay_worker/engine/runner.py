"""Runner: owns the weights and the KV cache in a CPU's memory and computes a step's rows.

It knows no request, no Redis and no time: rows in, sampled tokens out. Nothing of a sequence is
kept between steps but its KV, at the blocks that the caller names.
"""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from forebay_shared.settings import WorkerSettings

from forebay_worker.engine import loading, weights
from forebay_worker.engine.adapters import NO_ADAPTERS, load_adapters
from forebay_worker.engine.batch import Sampled, ScheduledRow, StepInput, flatten
from forebay_worker.engine.loading import GIB, dtype_of
from forebay_worker.engine.sampler import sample
from forebay_worker.engine.scoring import add_scores
from forebay_worker.engine.threads import physical_cores
from forebay_worker.kernels import reference
from forebay_worker.kernels.reference import KvCache, Step
from forebay_worker.models.config import ModelConfig
from forebay_worker.models.decoder import Decoder
from forebay_worker.models.registry import read_config

if TYPE_CHECKING:
    from forebay_worker.models.fused import FusedDecoder

_log = logging.getLogger(__name__)

Forward = Callable[[Step, KvCache], torch.Tensor]

BLOCK_SIZE = 16
TOKEN_BUDGET = 256
"""A step cannot be cut short: of 2,048 tokens it takes seconds, in which no other stream gets a
token and no cancel is heard; of 256 it takes half a second (SmolLM2-135M, two cores)."""
PREFILL_BUDGET = 64
"""Some 0.13 s. A prompt of 512 tokens takes 2.34 s of processor time in chunks of 64, 2.19 in those
of 256, 2.64 in those of 32."""
CPU_KV_BYTES = 2 * GIB
CPU_KV_SHARE = 0.15
CPU_KV_MOST = 0.5


class Runner:
    """Computes steps of one model. `num_blocks` blocks of `block_size` positions hold the KV."""

    scores_prompts = True

    def __init__(
        self,
        checkpoint: Path,
        settings: WorkerSettings,
        adapters: Mapping[str, Path] = NO_ADAPTERS,
    ) -> None:
        """Loads the model, and adapters from their directories, by name. Raises ModelError when it,
        its cache or one of them does not fit the settings."""
        torch.set_num_threads(physical_cores())
        self._device = torch.device("cpu")
        self._dtype = torch.float32 if settings.dtype == "auto" else dtype_of(settings.dtype)
        self.config: ModelConfig = read_config(checkpoint)
        loading.refuse_fp8(settings, self.config)
        self.block_size = settings.block_size or BLOCK_SIZE
        self.token_budget = settings.max_num_batched_tokens or TOKEN_BUDGET
        self.prefill_budget = PREFILL_BUDGET
        self.vocab_size = self.config.vocab_size
        self.max_model_len = loading.max_model_len(self.config, settings)
        self.num_blocks = self._count_blocks(settings)
        self._decode = self._new_decoder(checkpoint, settings, adapters)
        self._cache = self._new_cache()
        self._warm_up()

    @property
    def dtype(self) -> str:
        """Of weights and activations: float32, bfloat16 or float16."""
        return str(self._dtype).removeprefix("torch.")

    @torch.inference_mode()
    def execute(self, rows: list[ScheduledRow]) -> list[Sampled | None]:
        """One result per row, None where it neither samples nor scores. Decode rows come first."""
        step = _to_device(flatten(rows, self.block_size), self._device)
        logits = self._decode(step, self._cache)
        sampling = [row.sequence for row in rows if row.samples]
        count = len(sampling)
        sampled = iter(sample(logits[:count], sampling) if sampling else ())
        results = [next(sampled) if row.samples else None for row in rows]
        if len(logits) == count:
            return results
        scored = logits[count:]
        return add_scores(rows, results, lambda start, stop: scored[start:stop])

    def poison_blocks(self, blocks: list[int]) -> None:
        """Fills blocks with NaN: who reads there gets no number."""
        self._cache.poison(blocks)

    def _warm_up(self) -> None:
        """One token through block 0, which nobody owns yet: what compiles at first use does so now.
        On one Zen 3 core 21 s on a new machine, 2 s from the disk cache later."""
        zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
        step = Step(
            num_decodes=1,
            token_ids=zero,
            positions=zero,
            kv_slots=zero,
            starts=torch.arange(2),
            kv_lens=one,
            block_tables=zero[None],
            logits_at=zero,
            host_starts=[0, 1],
            host_kv_lens=[1],
        )
        with torch.inference_mode():
            self._decode(step, self._cache)

    def _new_decoder(
        self, checkpoint: Path, settings: WorkerSettings, adapters: Mapping[str, Path]
    ) -> Forward:
        """Compiled when numba is there, sums are float32 and no layer has experts; else layer by
        layer in torch."""
        plain = self._dtype != torch.float32 or self.config.experts is not None
        fused = None if plain else _fused()
        dtype = self._dtype
        low = load_adapters(
            adapters, self.config, settings.max_lora_rank, dtype, self._device, _whole_fours
        )
        if fused is not None:
            dtype = self._stored_dtype(checkpoint, settings)
        loaded = loading.load(checkpoint, self.config, settings, dtype, self._device)
        if fused is None:
            return Decoder(self.config, loaded, reference, self.max_model_len, low)
        return fused(self.config, loaded, self.max_model_len, torch.get_num_threads(), low)

    def _stored_dtype(self, checkpoint: Path, settings: WorkerSettings) -> torch.dtype:
        """What the compiled decoder keeps its matrices in: as the checkpoint does."""
        if settings.load_format == "dummy":
            return dtype_of(self.config.dtype)
        return weights.stored_dtype(checkpoint)

    def _count_blocks(self, settings: WorkerSettings) -> int:
        """Blocks of the KV pool; at least those of one sequence of max_model_len."""
        block_bytes = self.config.kv_bytes(self._dtype.itemsize) * self.block_size
        least = -(-self.max_model_len // self.block_size)
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if settings.kv_cache_memory_bytes:
            blocks, limit = settings.kv_cache_memory_bytes // block_bytes, "--kv-cache-memory-bytes"
        else:
            blocks, limit = int(ram * CPU_KV_MOST) // block_bytes, "half of this machine's memory"
        loading.check_pool(blocks, least, block_bytes, self.max_model_len, limit)
        if settings.kv_cache_memory_bytes:
            return blocks
        return max(least, int(min(CPU_KV_BYTES, ram * CPU_KV_SHARE)) // block_bytes)

    def _new_cache(self) -> KvCache:
        shape = (
            self.config.num_layers,
            self.num_blocks,
            self.block_size,
            self.config.num_kv_heads,
            self.config.head_dim,
        )
        return KvCache(self._zeros(shape), self._zeros(shape))

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Zeros by calloc: the system gives the pages when they are first written."""
        raw = np.zeros(int(np.prod(shape)) * self._dtype.itemsize, np.uint8)
        return torch.from_numpy(raw).view(self._dtype).view(shape)


def _whole_fours(rank: int) -> int:
    """As the compiled decoder takes ranks: four at once."""
    return -(-rank // 4) * 4


def _fused() -> "type[FusedDecoder] | None":
    """The compiled decoder, or None where numba is missing or finds no directory to cache in."""
    try:
        from forebay_worker.models.fused import FusedDecoder
    except (ImportError, RuntimeError) as error:
        _log.warning("the CPU path is not compiled and 2 to 3 times slower: %s", error)
        return None
    return FusedDecoder


def _to_device(step: StepInput, device: torch.device) -> Step:
    def move(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Step(
        num_decodes=step.num_decodes,
        token_ids=move(step.token_ids),
        positions=move(step.positions),
        kv_slots=move(step.kv_slots),
        starts=move(step.starts),
        kv_lens=move(step.kv_lens),
        block_tables=move(step.block_tables),
        logits_at=move(step.logits_at),
        host_starts=step.starts.tolist(),
        host_kv_lens=step.kv_lens.tolist(),
        adapters=None if step.adapters is None else move(step.adapters),
    )
