"""e4m3 weights of a checkpoint, packed, and its scales of keys and values.

It knows how files store them; what they compute is told in `kernels.fp8`.
"""

import torch
from torch import Tensor

from forebay_worker.engine.tensor_files import E4M3, Tensors
from forebay_worker.kernels.fp8 import GROUP, Fp8
from forebay_worker.models.config import ModelConfig, ModelError
from forebay_worker.models.decoder import LAYERS, Parameter, is_product

_KV = ("self_attn.{0}_scale", "self_attn.{0}_proj.output_scale")
"""What a layer's scale of keys (k) or values (v) is called: now, and by older releases."""


def unused(config: ModelConfig) -> tuple[str, ...]:
    """Ends of names of what may be stored beside the parameters: what is read here, and scales of
    inputs, which are measured anew for each token."""
    if config.quantization is None:
        return ()
    scales = f".{config.quantization.scale}", ".input_scale", ".q_scale"
    return (*scales, *(name.format(side) for name in _KV for side in "kv"))


def is_fp8(tensors: Tensors, parameter: Parameter, config: ModelConfig) -> bool:
    """Whether it is a matrix of a layer that is stored in e4m3. Raises ModelError when only some of
    its parts are."""
    is_matrix = parameter.columns is not None
    if not (config.weights_are_fp8 and is_matrix and is_product(parameter.name)):
        return False
    kinds = {part: tensors[part].kind == E4M3 for part in parameter.parts}
    if len(set(kinds.values())) > 1:
        names = " and ".join(sorted(parameter.parts))
        raise ModelError(f"Of tensors {names} only some are e4m3: they must be alike.")
    return all(kinds.values())


def pack(tensors: Tensors, parameter: Parameter, config: ModelConfig, device: torch.device) -> Fp8:
    """The parts of a matrix, one under another, and their scales; of experts [experts, rows,
    columns], with the scales of all rows in one. Raises ModelError."""
    values: list[Tensor] = []
    scales: list[Tensor] = []
    for part, size in zip(parameter.parts, parameter.sizes, strict=True):
        shape = [size, parameter.columns]
        source = tensors[part].read()
        if list(source.shape) != shape:
            raise ModelError(f"Tensor {part} has shape {list(source.shape)}, not {shape}.")
        values.append(source.to(device))
        scales.append(_of_rows(tensors, part, config, *source.shape).to(device))
    if len({len(scale) for scale in scales}) > 1:
        names = " and ".join(sorted(parameter.parts))
        raise ModelError(f"Tensors {names} have scales of different kinds: they must be alike.")
    joined = torch.cat([each.view(torch.uint8) for each in values])
    packed = joined.view(torch.float8_e4m3fn).view(parameter.shape)
    return Fp8(packed, torch.cat(scales, 1).contiguous())


def _of_rows(tensors: Tensors, part: str, config: ModelConfig, rows: int, columns: int) -> Tensor:
    """The scales of one part for each of its rows, as `Fp8` has them: [1 or groups, rows]."""
    assert config.quantization is not None, "a part is e4m3"
    name = f"{part.removesuffix('weight')}{config.quantization.scale}"
    scale = _read(tensors, name)
    groups = -(-columns // GROUP)
    if scale.numel() == 1:
        return scale.view(1, 1).expand(1, rows)
    if scale.shape in ((rows, 1), (rows,)):
        return scale.view(1, rows)
    if scale.shape == (-(-rows // GROUP), groups):
        return scale.repeat_interleave(GROUP, 0)[:rows].t()
    raise ModelError(
        f"Tensor {name} has shape {list(scale.shape)}, which is no scale of {rows}x{columns}."
    )


def kv_scales(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """By `kv_scales_of` each layer that has any: [2, KV heads] float32, of keys and values."""
    found: dict[str, Tensor] = {}
    if config.quantization is None:
        return found
    for layer in range(config.num_layers):
        at = f"{LAYERS}{layer}."
        names = [[at + name.format(side) for name in _KV] for side in "kv"]
        stored = [next((each for each in side if each in tensors), None) for side in names]
        if any(stored):
            sides = [_of_heads(tensors, name, config.num_kv_heads) for name in stored]
            found[kv_scales_of(layer)] = torch.stack(sides)
    return found


def kv_scales_of(layer: int) -> str:
    """The name under which a layer's scales of keys and values are loaded."""
    return f"{LAYERS}{layer}.self_attn.kv_scales"


def _of_heads(tensors: Tensors, name: str | None, heads: int) -> Tensor:
    if name is None:
        return torch.ones(heads)
    scale = _read(tensors, name).flatten()
    if len(scale) not in (1, heads):
        raise ModelError(f"Tensor {name} has {len(scale)} numbers, not 1 or {heads}.")
    if not bool((scale > 0).all()):
        raise ModelError(f"Tensor {name} holds a scale that is not above 0.")
    return scale.expand(heads)


def _read(tensors: Tensors, name: str) -> Tensor:
    """A scale in float32. Raises ModelError when it is missing or cannot be one."""
    if name not in tensors:
        raise ModelError(f"The checkpoint lacks tensor {name}.")
    scale = tensors[name].read().float()
    if not bool(scale.isfinite().all()):
        raise ModelError(f"Tensor {name} holds a scale that is no number.")
    return scale
