"""TorchVectors: one model's vectors by torch. Inputs are packed by length, run once and pooled.

It knows no request and no time: ids in, vectors out.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forebay_shared.settings import WorkerSettings
from torch import Tensor

from forebay_worker.engine import loading, weights
from forebay_worker.engine.loading import dtype_of
from forebay_worker.engine.threads import physical_cores
from forebay_worker.kernels import reference
from forebay_worker.kernels.reference import KvCache, Step
from forebay_worker.models import bert
from forebay_worker.models.config import ModelConfig, ModelError
from forebay_worker.models.decoder import HEAD, Decoder, parameters
from forebay_worker.models.registry import read_config
from forebay_worker.pooling.files import PoolingFiles
from forebay_worker.pooling.ports import TokenIds, Vectors

CPU_TOKENS = 1024
CARD_TOKENS = 16_384
BLOCK_SIZE = 16

States = Callable[[Tensor, Sequence[int]], Tensor]
"""Packed ids [T] and the inputs' lengths, sorted -> the tokens' final states [T, hidden]."""


class TorchVectors:
    """Implements VectorRunner. Raises ModelError when the model cannot be used as asked."""

    def __init__(self, checkpoint: Path, files: PoolingFiles, settings: WorkerSettings) -> None:
        torch.set_num_threads(physical_cores())
        self._device = _device(settings.device)
        card = self._device.type == "cuda"
        auto = torch.bfloat16 if card else torch.float32
        self._dtype = auto if settings.dtype == "auto" else dtype_of(settings.dtype)
        self._pool = _POOLS[files.pooling]
        self.token_budget = CARD_TOKENS if card else CPU_TOKENS
        config = _config(checkpoint)
        loading.refuse_fp8(settings, config if isinstance(config, ModelConfig) else None)
        self.size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_model_len = _length(config.max_position, files, settings)
        if isinstance(config, bert.BertConfig):
            self._states = self._bert(checkpoint, config)
        else:
            self._states = self._decoder(checkpoint, config)
        self.encode([np.zeros(1, np.uint32)])  # what is made at first use is made now

    @property
    def dtype(self) -> str:
        """Of weights and activations: float32, bfloat16 or float16."""
        return str(self._dtype).removeprefix("torch.")

    @torch.inference_mode()
    def encode(self, inputs: Sequence[TokenIds]) -> Vectors:
        order = sorted(range(len(inputs)), key=lambda at: len(inputs[at]))
        lengths = [len(inputs[at]) for at in order]
        packed = np.concatenate([inputs[at] for at in order]).astype(np.int64)
        states = self._states(torch.from_numpy(packed).to(self._device), lengths)
        pooled = self._pool(states.float(), torch.tensor(lengths, device=self._device))
        vectors = np.empty((len(inputs), self.size), np.float32)
        vectors[order] = pooled.cpu().numpy()
        return vectors

    def _bert(self, checkpoint: Path, config: bert.BertConfig) -> States:
        loaded = weights.load_parameters(
            checkpoint,
            list(bert.parameters(config)),
            self._dtype,
            self._device,
            progress=True,
            family=config.family,
            unused=bert.UNUSED,
            known_as=bert.known_as,
        )
        return bert.Bert(config, loaded)

    def _decoder(self, checkpoint: Path, config: ModelConfig) -> States:
        """A decoder without its head."""
        config = replace(config, tied_embeddings=True)
        loaded = weights.load_parameters(
            checkpoint,
            list(parameters(config)),
            self._dtype,
            self._device,
            progress=True,
            family=config.family,
            unused=(HEAD,),
            known_as=_known_as,
        )
        decoder = Decoder(config, loaded, reference, self.max_model_len)
        return _DecoderStates(decoder, config, self._dtype)


class _OneLayer(KvCache):
    """Keys and values of the layer that runs: nothing is read again after it."""

    def layer(self, number: int) -> KvCache:
        return self


class _DecoderStates:
    """All of each input in one step, from an empty cache."""

    def __init__(self, decoder: Decoder, config: ModelConfig, dtype: torch.dtype) -> None:
        self._decoder = decoder
        self._shape = (BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self._dtype = dtype

    def __call__(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        device = token_ids.device
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        firsts = [0, *accumulate(blocks)]
        starts = [0, *accumulate(lengths)]
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        offsets = torch.tensor(firsts[:-1], device=device) * BLOCK_SIZE
        sizes = torch.tensor(lengths, device=device)
        tables = torch.tensor(firsts[:-1], device=device)[:, None] + torch.arange(
            max(blocks), device=device
        )
        step = Step(
            num_decodes=0,
            token_ids=token_ids,
            positions=positions,
            kv_slots=positions + offsets.repeat_interleave(sizes),
            starts=torch.tensor(starts, device=device),
            kv_lens=sizes,
            block_tables=tables.clamp_(max=firsts[-1] - 1),
            logits_at=torch.arange(len(token_ids), device=device),
            host_starts=starts,
            host_kv_lens=list(lengths),
        )
        shape = (firsts[-1], *self._shape)
        cache = _OneLayer(*(torch.zeros(shape, dtype=self._dtype, device=device) for _ in "kv"))
        return self._decoder.states(step, cache)


def _known_as(name: str) -> str:
    """Checkpoints of a bare decoder lack the prefix of its place in a model with a head."""
    return name if name.startswith(("model.", HEAD)) else f"model.{name}"


def _device(asked: str) -> torch.device:
    has_card = torch.cuda.is_available()
    if asked == "cuda" and not has_card:
        raise ModelError("--device cuda: torch finds no CUDA card on this machine.")
    return torch.device("cuda" if has_card and asked != "cpu" else "cpu")


def _config(checkpoint: Path) -> bert.BertConfig | ModelConfig:
    try:
        raw: dict[str, Any] = json.loads((checkpoint / "config.json").read_bytes())
    except ValueError:
        raise ModelError(f"{checkpoint / 'config.json'} is not JSON.") from None
    if raw.get("is_causal") is False:
        raise ModelError("config.json: a decoder with is_causal false is not supported.")
    return bert.config(raw) if raw.get("model_type") in bert.FAMILIES else read_config(checkpoint)


def _length(positions: int, files: PoolingFiles, settings: WorkerSettings) -> int:
    """Tokens of an input at most: as asked, else as the model was trained."""
    if settings.max_model_len > positions:
        raise ModelError(
            f"--max-model-len {settings.max_model_len} is more than the model's {positions} "
            "positions."
        )
    return settings.max_model_len or min(files.max_seq_length or positions, positions)


def _cls(states: Tensor, lengths: Tensor) -> Tensor:
    return states[lengths.cumsum(0) - lengths]


def _last(states: Tensor, lengths: Tensor) -> Tensor:
    return states[lengths.cumsum(0) - 1]


def _mean(states: Tensor, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(states, "mean", lengths=lengths)


def _max(states: Tensor, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(states, "max", lengths=lengths)


_POOLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": _cls,
    "last": _last,
    "mean": _mean,
    "max": _max,
}
