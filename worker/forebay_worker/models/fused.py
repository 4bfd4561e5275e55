"""FusedDecoder: the decoder on the CPU as one compiled call per step and thread.

It has the parameters of `decoder.Decoder` and gives its answers; it knows no file and no request.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay_worker.kernels import cpu_step
from forebay_worker.kernels.reference import KvCache, Step
from forebay_worker.models.config import ModelConfig
from forebay_worker.models.decoder import EMBEDDING, FINAL_NORM, HEAD, cos_sin_table

Array = npt.NDArray[Any]


class FusedDecoder:
    """`threads` threads compute each step; one at a time may call it."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], max_model_len: int, threads: int
    ) -> None:
        """Takes the weights out of the dict as it stacks them by layer, so that no third copy of
        them ever exists."""
        self._run_step: Callable[..., None] = cpu_step.run_step
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="forebay-step")
        self._eps = np.float32(config.norm_eps)
        self._weights = _stack(config, weights, cos_sin_table(config, max_model_len))

    def __call__(self, step: Step, cache: KvCache) -> Tensor:
        """As `decoder.Decoder`: writes the step's KV, returns logits [S, vocabulary] float32."""
        starts = step.starts.numpy()
        inputs = cpu_step.Inputs(
            token_ids=step.token_ids.numpy(),
            positions=step.positions.numpy(),
            kv_slots=step.kv_slots.numpy(),
            owners=np.repeat(np.arange(len(starts) - 1), np.diff(starts)),
            block_tables=step.block_tables.numpy(),
            logits_at=step.logits_at.numpy(),
        )
        buffers = cpu_step.make_buffers(
            self._weights,
            cache.keys.numpy(),
            tokens=len(inputs.token_ids),
            samples=len(inputs.logits_at),
            longest=max(step.host_kv_lens),
            threads=self._threads,
        )
        arguments = (self._weights, inputs, cache.keys.numpy(), cache.values.numpy(), buffers)
        others = [
            self._pool.submit(self._run_step, *arguments, self._eps, thread, self._threads)
            for thread in range(1, self._threads)
        ]
        self._run_step(*arguments, self._eps, 0, self._threads)
        for other in others:
            other.result()
        return torch.from_numpy(buffers.logits)


def _stack(config: ModelConfig, weights: dict[str, Tensor], cos_sin: Tensor) -> cpu_step.Weights:
    def stacked(name: str) -> Tensor:
        names = [f"model.layers.{layer}.{name}" for layer in range(config.num_layers)]
        return _gather([weights.pop(each) for each in names if each in weights], config.num_layers)

    def vectors(name: str) -> Array:
        return stacked(name).float().numpy()

    def matrices(name: str) -> Array:
        return _bits(stacked(name))

    embedding = _bits(weights[EMBEDDING])
    return cpu_step.Weights(
        embedding=embedding,
        attention_norm=vectors("input_layernorm.weight"),
        qkv=matrices("self_attn.qkv.weight"),
        qkv_bias=vectors("self_attn.qkv.bias"),
        q_norm=vectors("self_attn.q_norm.weight"),
        k_norm=vectors("self_attn.k_norm.weight"),
        output=matrices("self_attn.o_proj.weight"),
        output_bias=vectors("self_attn.o_proj.bias"),
        mlp_norm=vectors("post_attention_layernorm.weight"),
        gate_up=matrices("mlp.gate_up.weight"),
        gate_up_bias=vectors("mlp.gate_up.bias"),
        down=matrices("mlp.down_proj.weight"),
        down_bias=vectors("mlp.down_proj.bias"),
        final_norm=weights[FINAL_NORM].float().numpy(),
        head=embedding if config.tied_embeddings else _bits(weights[HEAD]),
        cos_sin=cos_sin.numpy(),
    )


def _gather(tensors: Sequence[Tensor], layers: int) -> Tensor:
    """[layers, …]; a parameter that the family lacks has no columns."""
    return torch.stack(list(tensors)) if tensors else torch.empty(layers, 0)


def _bits(matrix: Tensor) -> Array:
    """numpy has no bfloat16: its bits travel as uint16, those of float16 as int16."""
    kinds = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
    return matrix.view(kinds.get(matrix.dtype, matrix.dtype)).numpy()
