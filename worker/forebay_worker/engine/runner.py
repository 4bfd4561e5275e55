"""Runner: owns the weights and the KV cache on one device and computes a step's rows.

It knows no request, no Redis and no time: rows in, sampled tokens out. Nothing of a sequence is
kept between steps but its KV, at the blocks that the caller names.
"""

import os
from pathlib import Path

import numpy as np
import torch
from forebay_shared.settings import WorkerSettings

from forebay_worker.engine import weights
from forebay_worker.engine.batch import Sampled, ScheduledRow, StepInput, flatten
from forebay_worker.engine.sampler import sample
from forebay_worker.engine.threads import physical_cores
from forebay_worker.kernels import reference
from forebay_worker.kernels.reference import KvCache, Step
from forebay_worker.models.config import ModelConfig, ModelError
from forebay_worker.models.decoder import Decoder
from forebay_worker.models.registry import read_config

GIB = 2**30
CPU_KV_BYTES = 2 * GIB
CPU_KV_SHARE = 0.15
CPU_KV_MOST = 0.5


class Runner:
    """Computes steps of one model. `num_blocks` blocks of `block_size` positions hold the KV."""

    def __init__(self, checkpoint: Path, settings: WorkerSettings) -> None:
        """Loads the model. Raises ModelError when it, or its cache, does not fit the settings."""
        torch.set_num_threads(physical_cores())
        self._device = torch.device("cpu")
        self._dtype = torch.float32 if settings.dtype == "auto" else _dtype(settings.dtype)
        self.config: ModelConfig = read_config(checkpoint)
        self.block_size = settings.block_size
        self.vocab_size = self.config.vocab_size
        self.max_model_len = _max_model_len(self.config, settings)
        self.num_blocks = self._count_blocks(settings)
        self._decoder = Decoder(
            self.config, self._load(checkpoint, settings), reference, self.max_model_len
        )
        self._caches = [self._new_cache() for _ in range(self.config.num_layers)]

    @property
    def dtype(self) -> str:
        """Of weights and activations: float32, bfloat16 or float16."""
        return str(self._dtype).removeprefix("torch.")

    @torch.inference_mode()
    def execute(self, rows: list[ScheduledRow]) -> list[Sampled | None]:
        """One result per row, None where the row does not sample. Decode rows come first."""
        step = _to_device(flatten(rows, self.block_size), self._device)
        hidden = self._decoder.forward(step, self._caches)
        sampling = [row.sequence for row in rows if row.samples]
        if not sampling:
            return [None] * len(rows)
        sampled = iter(sample(self._decoder.logits(hidden[step.logits_at]), sampling))
        return [next(sampled) if row.samples else None for row in rows]

    def _load(self, checkpoint: Path, settings: WorkerSettings) -> dict[str, torch.Tensor]:
        if settings.load_format == "dummy":
            return weights.dummy(self.config, self._dtype, self._device, settings.seed)
        return weights.load(checkpoint, self.config, self._dtype, self._device, progress=True)

    def _count_blocks(self, settings: WorkerSettings) -> int:
        """Blocks of the KV pool; at least those of one sequence of max_model_len."""
        block_bytes = self.config.kv_bytes(self._dtype.itemsize) * self.block_size
        least = -(-self.max_model_len // self.block_size)
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if settings.kv_cache_memory_bytes:
            blocks, limit = settings.kv_cache_memory_bytes // block_bytes, "--kv-cache-memory-bytes"
        else:
            blocks, limit = int(ram * CPU_KV_MOST) // block_bytes, "half of this machine's memory"
        if blocks < least:
            raise ModelError(
                f"One sequence of {self.max_model_len} tokens needs {least * block_bytes / GIB:.2f}"
                f" GiB of KV cache, more than {limit}: lower --max-model-len."
            )
        if settings.kv_cache_memory_bytes:
            return blocks
        return max(least, int(min(CPU_KV_BYTES, ram * CPU_KV_SHARE)) // block_bytes)

    def _new_cache(self) -> KvCache:
        shape = (
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


def _dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _max_model_len(config: ModelConfig, settings: WorkerSettings) -> int:
    if settings.max_model_len > config.max_position:
        raise ModelError(
            f"--max-model-len {settings.max_model_len} is more than the model's "
            f"{config.max_position} positions."
        )
    return settings.max_model_len or config.max_position


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
    )
