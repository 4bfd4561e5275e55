"""GGUF tensors -> Hugging Face names and row order.

Knows the naming of both sides and llama.cpp's order of the rows of q and k; does not know files.
"""

import re

import numpy as np
from numpy.typing import NDArray

from forebay_worker.checkpoint.errors import CheckpointError
from forebay_worker.checkpoint.gguf_file import GgufFile, GgufTensor

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SKIPPED = {"rope_freqs.weight"}  # in config.json as rope_scaling
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_tensors(file: GgufFile) -> dict[str, GgufTensor]:
    """Every weight by its Hugging Face name. Raises CheckpointError for a tensor that has none."""
    return {
        hf_name(tensor.name): _reordered(file, tensor)
        for tensor in file.tensors.values()
        if tensor.name not in _SKIPPED
    }


def hf_name(name: str) -> str:
    if match := _LAYER.fullmatch(name):
        layer, part, leaf = match.groups()
        if part in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[part]}.{leaf}"
    part, _, leaf = name.rpartition(".")
    if part in _OUTSIDE:
        return f"{_OUTSIDE[part]}.{leaf}"
    raise CheckpointError(f"tensor {name} belongs to no family that forebay runs")


def _reordered(file: GgufFile, tensor: GgufTensor) -> GgufTensor:
    if file.architecture not in {"llama", "mistral"}:
        return tensor
    heads = file.need(f"{file.architecture}.attention.head_count", int)
    if ".attn_k." in tensor.name:
        heads = file.get(f"{file.architecture}.attention.head_count_kv", int, heads)
    elif ".attn_q." not in tensor.name:
        return tensor
    return tensor.rows(unpermuted(tensor.shape[0], heads))


def unpermuted(rows: int, heads: int) -> NDArray[np.intp]:
    """The order that gives Hugging Face's rows; llama.cpp lays i and i + half side by side."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
