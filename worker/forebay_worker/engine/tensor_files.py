"""The safetensors files of a checkpoint: where each tensor is; every flaw of a file is one line."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from forebay_worker.models.config import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
E4M3 = "F8_E4M3"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor where it is stored, under the name that it has there."""

    name: str
    file: "_File"

    @property
    def kind(self) -> str:
        """As safetensors call it: BF16, F8_E4M3."""
        return self.file.kind(self.name)

    @property
    def is_matrix(self) -> bool:
        return self.file.is_matrix(self.name)

    def read(self) -> Tensor:
        return self.file.read(self.name)


Tensors = dict[str, StoredTensor]


def open_tensors(
    directory: Path, stack: ExitStack, known_as: Callable[[str], str] = str
) -> Tensors:
    """The checkpoint's tensors, under the names that `known_as` gives them; open as long as
    `stack` is."""
    files = _open(directory, stack)
    return {known_as(name): StoredTensor(name, file) for name, file in files.items()}


def open_tensor_file(path: Path, stack: ExitStack, known_as: Callable[[str], str]) -> Tensors:
    """Those of one file, likewise."""
    file = _File(path, stack)
    return {known_as(name): StoredTensor(name, file) for name in file.names()}


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
