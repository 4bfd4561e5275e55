"""A GGUF file, read: typed metadata and tensors by name.

A small typed door to the `gguf` package. Knows no family and no Hugging Face name.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray

from forebay_worker.checkpoint.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. `raw` has the rows of the tensor; a row's bytes are still quantised."""

    name: str
    shape: tuple[int, ...]
    kind: str
    raw: NDArray[np.generic]

    def values(self) -> NDArray[np.float32]:
        """Dequantised, shape `shape`, float32. Raises CheckpointError for an unknown kind."""
        try:
            return dequantize(self.raw, GGMLQuantizationType[self.kind]).astype(
                np.float32, copy=False
            )
        except NotImplementedError as error:
            raise CheckpointError(
                f"tensor {self.name} has the type {self.kind}, which cannot be read: "
                "use a file in Q8_0, Q4_K_M or F16"
            ) from error

    def rows(self, order: NDArray[np.intp]) -> "GgufTensor":
        """The same tensor with its rows in another order; quantised blocks lie within a row."""
        return GgufTensor(self.name, self.shape, self.kind, self.raw[order])


class GgufFile:
    """Metadata and tensors of one file. Raises CheckpointError for a file that is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path)
            self.tensors = {tensor.name: _tensor(tensor) for tensor in self._reader.tensors}
        except (ValueError, KeyError, IndexError, OverflowError, struct.error) as error:
            raise CheckpointError(
                f"model file {path} is no GGUF file, or is cut short: fetch it again"
            ) from error
        self.architecture = self.need("general.architecture", str)

    def get(self, key: str, kind: type[T], default: T) -> T:
        """The value of `key`, `default` when the file has none."""
        field = self._reader.get_field(key)
        if field is None:
            return default
        value: object = field.contents()
        if not isinstance(value, kind):
            raise CheckpointError(f"model file {self.path}: {key} is no {kind.__name__}")
        return value

    def need(self, key: str, kind: type[T]) -> T:
        """The value of `key`. Raises CheckpointError when the file has none."""
        if self._reader.get_field(key) is None:
            raise CheckpointError(f"model file {self.path} has no {key} in its metadata")
        return self.get(key, kind, kind())

    def array(self, key: str) -> list[object]:
        """The items of an array. Raises CheckpointError when the file has none under `key`."""
        return cast("list[object]", self.need(key, list))

    def token_id(self, name: str) -> int | None:
        """The id of a special token (`bos`, `eos`, …), None when the file names none."""
        found = self.get(f"tokenizer.ggml.{name}_token_id", int, -1)
        return found if found >= 0 else None


def _tensor(tensor: ReaderTensor) -> GgufTensor:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return GgufTensor(tensor.name, shape, tensor.tensor_type.name, tensor.data)
