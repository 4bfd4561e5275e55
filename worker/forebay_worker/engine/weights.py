"""From safetensors to a model's packed parameters; every flaw of a file is one line.

It knows files and lists of parameters, not what the parameters compute.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from forebay_worker.models.config import ModelConfig, ModelError
from forebay_worker.models.decoder import Parameter, parameters

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What older checkpoints store though it follows from the config.
DERIVED = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


def load(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: bool
) -> dict[str, Tensor]:
    """The decoder's packed parameters by name. Raises ModelError that names the first bad file or
    tensor."""
    # A tied head may be stored all the same.
    optional = ("lm_head.weight",) if config.tied_embeddings else ()
    wanted = list(parameters(config))
    return load_parameters(
        directory, wanted, dtype, device, progress, family=config.family, unused=optional
    )


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
        tensors = {
            known_as(name): _Tensor(name, file) for name, file in _open(directory, stack).items()
        }
        _check_names(tensors, wanted, family, (*unused, *DERIVED))
        with tqdm(
            total=sum(_numel(parameter.shape) for parameter in wanted) * dtype.itemsize,
            desc="loading weights",
            unit="B",
            unit_scale=True,
            disable=None if progress else True,
        ) as bar:
            packed: dict[str, Tensor] = {}
            for parameter in wanted:
                packed[parameter.name] = _pack(tensors, parameter, dtype, device)
                bar.update(packed[parameter.name].nbytes)
    return packed


def dummy(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, Tensor]:
    """Random parameters of the right shapes, the same for one seed and device: matrices of
    1 / sqrt(columns), so that activations keep their size; norms are 1."""
    noise = torch.Generator(device).manual_seed(seed)

    def draw(parameter: Parameter) -> Tensor:
        tensor = torch.ones(parameter.shape, dtype=dtype, device=device)
        if parameter.columns is not None:
            tensor.normal_(0, 1 / math.sqrt(parameter.columns), generator=noise)
        return tensor

    return {parameter.name: draw(parameter) for parameter in parameters(config)}


def stored_dtype(directory: Path) -> torch.dtype:
    """The 16-bit type that every matrix of the checkpoint is stored in, or float32."""
    with ExitStack() as stack:
        kinds = {
            file.kind(name)
            for name, file in _open(directory, stack).items()
            if file.is_matrix(name)
        }
    if len(kinds) != 1:
        return torch.float32
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(kinds.pop(), torch.float32)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor where it is stored, under the name that it has there."""

    name: str
    file: "_File"

    def read(self) -> Tensor:
        return self.file.read(self.name)


class _File:
    """One open safetensors file: mapped, so a tensor's pages are read when it is copied."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        try:
            self._handle: Any = stack.enter_context(safe_open(path, framework="pt"))
        except FileNotFoundError:
            raise ModelError(f"{path.parent} lacks {path.name}.") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a whole safetensors file ({error}).") from None

    def names(self) -> list[str]:
        return list(self._handle.keys())

    def kind(self, name: str) -> str:
        return str(self._handle.get_slice(name).get_dtype())

    def is_matrix(self, name: str) -> bool:
        return len(self._handle.get_slice(name).get_shape()) > 1

    def read(self, name: str) -> Tensor:
        try:
            return self._handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.path}: tensor {name} cannot be read ({error}).") from None


def _open(directory: Path, stack: ExitStack) -> dict[str, _File]:
    """Which file holds each tensor of the checkpoint."""
    index = directory / INDEX
    if not index.exists():
        single = _File(directory / SINGLE, stack)
        return dict.fromkeys(single.names(), single)
    try:
        names: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise ModelError(f"{index} is not a safetensors index.") from None
    shards = {name: _File(directory / name, stack) for name in sorted(set(names.values()))}
    held = {name: shard for shard in shards.values() for name in shard.names()}
    for name, shard in names.items():
        if name not in held:
            raise ModelError(f"{directory / shard} lacks tensor {name}, which {INDEX} names.")
    return held


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
    tensors: dict[str, _Tensor], parameter: Parameter, dtype: torch.dtype, device: torch.device
) -> Tensor:
    packed = torch.empty(parameter.shape, dtype=dtype, device=device)
    for name, target in zip(parameter.parts, _split(packed, parameter), strict=True):
        source = tensors[name].read()
        if source.shape != target.shape:
            raise ModelError(
                f"Tensor {name} has shape {list(source.shape)}, not {list(target.shape)}."
            )
        if not source.is_floating_point():
            raise ModelError(f"Tensor {name} holds {source.dtype}, not floating point numbers.")
        target.copy_(source)
    return packed


def _split(packed: Tensor, parameter: Parameter) -> Iterator[Tensor]:
    start = 0
    for size in parameter.sizes:
        yield packed[start : start + size]
        start += size


def _numel(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
