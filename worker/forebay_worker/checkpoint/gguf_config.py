"""GGUF metadata -> config.json and generation_config.json of the families that forebay runs.

Knows llama.cpp's metadata names and Hugging Face's; does not know tensors' values, but for the
scaling of llama3, which the file holds as a tensor.
"""

import math
from collections.abc import Mapping

import numpy as np

from forebay_worker.checkpoint.errors import CheckpointError
from forebay_worker.checkpoint.gguf_file import GgufFile

Json = Mapping[str, object]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def model_config(file: GgufFile) -> Json:
    """config.json. Raises CheckpointError for a family that forebay does not run."""
    family = file.architecture
    if family not in ARCHITECTURES or file.get(f"{family}.expert_count", int, 0):
        raise CheckpointError(
            f"model file {file.path} is of the family {family!r}"
            f"{' with experts' if family in ARCHITECTURES else ''}, which forebay does not run: "
            f"dense {', '.join(ARCHITECTURES)}"
        )
    hidden = file.need(f"{family}.embedding_length", int)
    heads = file.need(f"{family}.attention.head_count", int)
    rotary = file.get(f"{family}.rope.dimension_count", int, hidden // heads)
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": file.need(f"{family}.feed_forward_length", int),
        "num_hidden_layers": file.need(f"{family}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get(f"{family}.attention.head_count_kv", int, heads),
        "head_dim": file.get(f"{family}.attention.key_length", int, rotary),
        "max_position_embeddings": file.need(f"{family}.context_length", int),
        "rms_norm_eps": _short(file.need(f"{family}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _short(file.get(f"{family}.rope.freq_base", float, 10_000.0)),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_token_ids(file),
    }
    if family != "qwen2":  # qwen2 has its biases always and no such switch
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if scaling := _rope_scaling(file, config):
        config["rope_scaling"] = scaling
    return config


def generation_config(file: GgufFile) -> Json:
    """generation_config.json: the ids that end an answer; a GGUF holds no sampling defaults."""
    ends = [file.token_id(name) for name in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    ids = {**_token_ids(file), "eos_token_id": unique[0] if len(unique) == 1 else unique}
    return ids if unique else _token_ids(file)


def _token_ids(file: GgufFile) -> dict[str, object]:
    named = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {key: file.token_id(name) for key, name in named.items()}
    return {key: value for key, value in ids.items() if value is not None}


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"model file {file.path} has no token_embd.weight: is it a part?")
    return embedding.shape[0]


def _short(value: float) -> float:
    """The shortest decimal of a 32-bit float: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GgufFile, config: Json) -> Json | None:
    """llama3's scaling, found again from the divisors that the file holds in its place.

    llama.cpp keeps one divisor per frequency, not the four numbers they came from. Every published
    llama3 checkpoint uses low 1, high 4 and 8,192 positions, so the largest divisor gives the
    fourth; that the four reproduce the tensor is checked, never assumed.
    """
    kind = file.get(f"{file.architecture}.rope.scaling.type", str, "none")
    if kind != "none":
        raise CheckpointError(f"model file {file.path} scales RoPE by {kind!r}: only llama3's is")
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    divisors = tensor.values()
    scaling: dict[str, object] = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_divisors(float(str(config["rope_theta"])), len(divisors), divisors.max())
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise CheckpointError(f"model file {file.path} has rope_freqs unlike any llama3 model's")
    return scaling


def llama3_divisors(theta: float, count: int, factor: float) -> list[float]:
    """What llama3 divides each of `count` RoPE frequencies by (Llama 3.1 model card's formula)."""
    divisors: list[float] = []
    for index in range(count):
        wavelength = 2 * math.pi * theta ** (index / count)
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        share = min(1.0, max(0.0, smooth))
        divisors.append(1 / ((1 - share) / factor + share))
    return divisors
