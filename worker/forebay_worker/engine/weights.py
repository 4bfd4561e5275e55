"""From safetensors to a model's packed parameters; every flaw of a tensor is one line.

It knows names and lists of parameters, not what the parameters compute.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from forebay_worker.engine import fp8_weights
from forebay_worker.engine.tensor_files import E4M3, Tensors, open_tensors
from forebay_worker.models.config import ModelConfig, ModelError
from forebay_worker.models.decoder import Parameter, parameters, scale_of

# What older checkpoints store though it follows from the config.
DERIVED = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


Prepare = Callable[[str, dict[str, Tensor]], None]
"""Called with the name of each parameter, as soon as it is among those that are there: may change
it, or those before it."""


def as_it_is(name: str, loaded: dict[str, Tensor]) -> None:
    """Prepares nothing."""


def load(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    prepare: Prepare = as_it_is,
) -> dict[str, Tensor]:
    """The decoder's packed parameters by name; where the checkpoint has e4m3, its scales too, by
    `scale_of` and `kv_scales_of`. Raises ModelError that names the first bad file or tensor."""
    # A tied head may be stored all the same.
    optional = ("lm_head.weight",) if config.tied_embeddings else ()
    optional = (*optional, *fp8_weights.unused(config), *DERIVED)
    with ExitStack() as stack:
        tensors = open_tensors(directory, stack)
        wanted = [_as_stored(each, tensors) for each in parameters(config)]
        _check_names(tensors, wanted, config.family, optional)
        packed: dict[str, Tensor] = {}
        for parameter in _shown(wanted, dtype, progress):
            if fp8_weights.is_fp8(tensors, parameter, config):
                found = fp8_weights.pack(tensors, parameter, config, device)
                packed[parameter.name], packed[scale_of(parameter.name)] = found
            else:
                packed[parameter.name] = _pack(tensors, parameter, dtype, device)
            prepare(parameter.name, packed)
        return packed | fp8_weights.kv_scales(tensors, config)


def load_parameters(
    directory: Path,
    wanted: list[Parameter],
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    *,
    family: str,
    unused: Iterable[str] = (),
    known_as: Callable[[str], str] = str,
) -> dict[str, Tensor]:
    """The packed parameters `wanted`, by name. `unused` are names, or ends of names, that may be
    stored beside them; `known_as` gives a stored tensor the name that it has in `wanted`.

    Raises ModelError that names the first bad file or tensor.
    """
    with ExitStack() as stack:
        tensors = open_tensors(directory, stack, known_as)
        wanted = [_as_stored(each, tensors) for each in wanted]
        _check_names(tensors, wanted, family, (*unused, *DERIVED))
        return {
            parameter.name: _pack(tensors, parameter, dtype, device)
            for parameter in _shown(wanted, dtype, progress)
        }


def _shown(wanted: list[Parameter], dtype: torch.dtype, progress: bool) -> Iterator[Parameter]:
    """One after another; on a terminal with a bar of their bytes in `dtype`."""
    sizes = [math.prod(parameter.shape) * dtype.itemsize for parameter in wanted]
    with tqdm(
        total=sum(sizes),
        desc="loading weights",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,
    ) as bar:
        for parameter, size in zip(wanted, sizes, strict=True):
            yield parameter
            bar.update(size)


def dummy(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    prepare: Prepare = as_it_is,
) -> dict[str, Tensor]:
    """Random parameters of the right shapes, the same for one seed and device: matrices of
    1 / sqrt(columns), so that activations keep their size; norms are 1."""
    noise = torch.Generator(device).manual_seed(seed)

    def draw(parameter: Parameter) -> Tensor:
        tensor = torch.ones(parameter.shape, dtype=dtype, device=device)
        if parameter.columns is not None:
            tensor.normal_(0, 1 / math.sqrt(parameter.columns), generator=noise)
        return tensor

    drawn: dict[str, Tensor] = {}
    for parameter in parameters(config):
        drawn[parameter.name] = draw(parameter)
        prepare(parameter.name, drawn)
    return drawn


def stored_dtype(directory: Path) -> torch.dtype:
    """The 16-bit type that every matrix of the checkpoint is stored in, or float32."""
    with ExitStack() as stack:
        tensors = open_tensors(directory, stack).values()
        kinds = {tensor.kind for tensor in tensors if tensor.is_matrix}
    if len(kinds) != 1:
        return torch.float32
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(kinds.pop(), torch.float32)


def _check_names(
    held: Iterable[str], wanted: list[Parameter], family: str, unused: tuple[str, ...]
) -> None:
    have = set(held)
    need = [part for parameter in wanted for part in parameter.parts]
    for name in need:
        if name not in have:
            raise ModelError(f"The checkpoint lacks tensor {name}.")
    for name in sorted(have - set(need)):
        if not name.endswith(unused):
            raise ModelError(f"The checkpoint holds tensor {name}, which {family} lacks.")


def _pack(
    tensors: Tensors, parameter: Parameter, dtype: torch.dtype, device: torch.device
) -> Tensor:
    packed = torch.empty(parameter.shape, dtype=dtype, device=device)
    for name, target in zip(parameter.parts, _split(packed, parameter), strict=True):
        if tensors[name].kind == E4M3:
            raise ModelError(
                f"Tensor {name} is e4m3: only matrices of layers may be, and config.json says so."
            )
        source = tensors[name].read()
        if source.shape != target.shape:
            raise ModelError(
                f"Tensor {name} has shape {list(source.shape)}, not {list(target.shape)}."
            )
        if not source.is_floating_point():
            raise ModelError(f"Tensor {name} holds {source.dtype}, not floating point numbers.")
        target.copy_(source)
    return packed


def _as_stored(parameter: Parameter, tensors: Tensors) -> Parameter:
    """With the one tensor that holds it all in place of its parts, where that is stored."""
    if parameter.whole not in tensors:
        return parameter
    return replace(parameter, parts=(parameter.whole,), sizes=(sum(parameter.sizes),))


def _split(packed: Tensor, parameter: Parameter) -> Iterator[Tensor]:
    if parameter.parts == (parameter.whole,):
        yield packed
        return
    rows = packed if parameter.experts is None else packed.flatten(0, 1)
    start = 0
    for size in parameter.sizes:
        yield rows[start : start + size]
        start += size
