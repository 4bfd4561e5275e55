"""FusedDecoder: the decoder on the CPU as one compiled call per step and thread.

It has the parameters of `decoder.Decoder` and gives its answers; it knows no file and no request.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay_worker.kernels import cpu_step
from forebay_worker.kernels.reference import KvCache, LowRank, Step
from forebay_worker.models.config import ModelConfig
from forebay_worker.models.decoder import EMBEDDING, FINAL_NORM, HEAD, LAYERS, cos_sin_table

Array = npt.NDArray[Any]
Arguments = tuple[
    cpu_step.Weights, cpu_step.Adapters, cpu_step.Inputs, Array, Array, cpu_step.Buffers
]

MANY_TOKENS = 8
_NONE = np.zeros(0, np.int64)


class FusedDecoder:
    """`threads` threads compute each step; one at a time may call it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        max_model_len: int,
        threads: int,
        adapters: dict[str, LowRank],
    ) -> None:
        """Takes the weights and the adapters out of the dicts as it stacks them by layer, so that
        only one of them is there twice at a time."""
        self._run_step: Callable[..., None] = cpu_step.run_step
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="forebay-step")
        self._eps = np.float32(config.norm_eps)
        self._kv_heads = config.num_kv_heads, config.head_dim
        self._vocab_size = config.vocab_size
        self._weights = _stack(config, weights, cos_sin_table(config, max_model_len))
        self._adapters = _stack_adapters(config, adapters)

    def __call__(self, step: Step, cache: KvCache) -> Tensor:
        """As `decoder.Decoder`: writes the step's KV, returns logits [S, vocabulary] float32."""
        starts = step.starts.numpy()
        adapters = _NONE if step.adapters is None else step.adapters.numpy()
        inputs = cpu_step.Inputs(
            token_ids=step.token_ids.numpy(),
            positions=step.positions.numpy(),
            kv_slots=step.kv_slots.numpy(),
            owners=np.repeat(np.arange(len(starts) - 1), np.diff(starts)),
            block_tables=step.block_tables.numpy(),
            logits_at=step.logits_at.numpy(),
            tiles=_tiles(step, *self._kv_heads),
            adapters=adapters,
            adapted=np.flatnonzero(adapters >= 0),
        )
        buffers = cpu_step.make_buffers(
            self._weights,
            cache.keys.numpy(),
            tokens=len(inputs.token_ids),
            samples=len(inputs.logits_at),
            longest=max(step.host_kv_lens),
            threads=self._threads,
        )
        kv = cache.keys.numpy(), cache.values.numpy()
        arguments = (self._weights, self._adapters, inputs, *kv, buffers)
        others = [
            self._pool.submit(self._run, arguments, thread) for thread in range(1, self._threads)
        ]
        self._run(arguments, 0)
        for other in others:
            other.result()
        return torch.from_numpy(buffers.logits)[:, : self._vocab_size]

    def _run(self, arguments: Arguments, thread: int) -> None:
        """One thread's part. If it fails, it has arrived at every meeting: the others end too."""
        try:
            self._run_step(*arguments, self._eps, thread, self._threads)
        except BaseException:
            arguments[-1].arrivals.fill(self._threads)
            raise


def _tiles(step: Step, kv_heads: int, head_dim: int) -> Array:
    """`cpu_step.Inputs.tiles`: a token alone with all KV heads, or with one each when few tokens
    must feed all threads; tokens of a prompt together. The longest come first."""
    heads = kv_heads if step.host_starts[-1] >= MANY_TOKENS else 1
    most = cpu_step.TILE_TOKENS if head_dim % cpu_step.PANEL == 0 else 1
    units: list[tuple[int, int, int, int]] = []
    for start, end in pairwise(step.host_starts):
        for token in range(start, end, most):
            count = min(most, end - token)
            each = heads if count == 1 else 1
            units += [(token, count, at, at + each) for at in range(0, kv_heads, each)]
    return np.array(units[::-1], np.int64)


def _stack(config: ModelConfig, weights: dict[str, Tensor], cos_sin: Tensor) -> cpu_step.Weights:
    def layers(name: str) -> list[Tensor]:
        names = [f"model.layers.{layer}.{name}" for layer in range(config.num_layers)]
        return [weights.pop(each) for each in names if each in weights]

    def vectors(name: str, filled: int = 0) -> Array:
        """[layers, …]; a parameter that the family lacks has no columns."""
        found = [_fill(each.float(), filled) for each in layers(name)]
        return (torch.stack(found) if found else torch.empty(config.num_layers, 0)).numpy()

    def matrices(name: str, joined: int = 1) -> Array:
        return np.stack([_panels(each, joined) for each in layers(name)])

    embedding = _panels(weights.pop(EMBEDDING))
    return cpu_step.Weights(
        embedding=embedding,
        attention_norm=vectors("input_layernorm.weight"),
        qkv=matrices("self_attn.qkv.weight"),
        qkv_bias=vectors("self_attn.qkv.bias", filled=1),
        q_norm=vectors("self_attn.q_norm.weight"),
        k_norm=vectors("self_attn.k_norm.weight"),
        output=matrices("self_attn.o_proj.weight"),
        output_bias=vectors("self_attn.o_proj.bias", filled=1),
        mlp_norm=vectors("post_attention_layernorm.weight"),
        gate_up=matrices("mlp.gate_up.weight", joined=2),
        gate_up_bias=vectors("mlp.gate_up.bias", filled=2),
        down=matrices("mlp.down_proj.weight"),
        down_bias=vectors("mlp.down_proj.bias", filled=1),
        final_norm=weights[FINAL_NORM].float().numpy(),
        head=embedding if config.tied_embeddings else _panels(weights.pop(HEAD)),
        cos_sin=cos_sin.numpy(),
    )


def _stack_adapters(config: ModelConfig, adapters: dict[str, LowRank]) -> cpu_step.Adapters:
    def stack(name: str, parts: int, joined: int = 0) -> cpu_step.LowRanks:
        names = [f"{LAYERS}{layer}.{name}.weight" for layer in range(config.num_layers)]
        found = [adapters.pop(each) for each in names if each in adapters]
        if not found:
            a = np.zeros((0, 0, parts, 0, 0), np.float32)
            return cpu_step.LowRanks(a, a[:, :, 0], np.zeros(parts + 1, np.int64))
        b = [_fill(low.b.permute(2, 0, 1), joined).permute(1, 2, 0) for low in found]
        sizes = [b[0].shape[2] // joined] * joined if joined else found[0].sizes
        return cpu_step.LowRanks(
            a=torch.stack([low.a for low in found]).numpy(),
            b=torch.stack(b).contiguous().numpy(),
            starts=np.cumsum([0, *sizes]),
        )

    return cpu_step.Adapters(
        qkv=stack("self_attn.qkv", 3),
        output=stack("self_attn.o_proj", 1),
        gate_up=stack("mlp.gate_up", 2, joined=2),
        down=stack("mlp.down_proj", 1),
    )


def _fill(tensor: Tensor, joined: int) -> Tensor:
    """`joined` tensors that lie one after the other, each filled up with zeros to whole panels."""
    if not joined:
        return tensor
    parts = tensor.reshape(joined, -1, *tensor.shape[1:])
    missing = -parts.shape[1] % cpu_step.PANEL
    room = parts.new_zeros(joined, missing, *parts.shape[2:])
    return torch.cat([parts, room], 1).flatten(0, 1)


def _panels(matrix: Tensor, joined: int = 1) -> Array:
    """[N, K] as [N / PANEL, K, PANEL]. numpy has no bfloat16: its bits travel as uint16, those of
    float16 as int16."""
    kinds = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
    filled = _fill(matrix, joined).view(-1, cpu_step.PANEL, matrix.shape[1])
    panels = filled.transpose(1, 2).contiguous()
    return panels.view(kinds.get(matrix.dtype, matrix.dtype)).numpy()
