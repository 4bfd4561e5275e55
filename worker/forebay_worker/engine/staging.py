"""Staging: arrays that the host fills and a card reads, sent there in one copy.

It knows bytes and names, not what they mean.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 256  # so that a kernel is compiled for one alignment of each array

Fields = Mapping[str, tuple[str, int]]
"""Name to numpy type and number of elements."""

_TORCH = {"i8": torch.int64, "i4": torch.int32, "f4": torch.float32}


class Staging:
    """`host` and `device` hold the same arrays by name: numpy views and tensors, both lasting.

    The host must not write again before the copy of the last `send` is done.
    """

    def __init__(self, fields: Fields, device: torch.device) -> None:
        ends: dict[str, tuple[int, int]] = {}
        size = 0
        for name, (kind, count) in fields.items():
            used = np.dtype(kind).itemsize * count
            ends[name] = (size, size + used)
            size += -(-used // _ALIGNMENT) * _ALIGNMENT
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._ends = ends
        raw = self._host.numpy()
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.device: dict[str, Tensor] = {}
        for name, (kind, _) in fields.items():
            start, end = ends[name]
            self.host[name] = raw[start:end].view(kind)
            self.device[name] = self._device[start:end].view(_TORCH[kind])

    def send(self, *, last: str | None = None, count: int = 0) -> None:
        """Starts the copy to the device: all of it, or only up to `count` elements of `last`."""
        end = len(self._host)
        if last is not None:
            end = self._ends[last][0] + self.host[last].itemsize * count
        self._device[:end].copy_(self._host[:end], non_blocking=True)

    def fetch(self) -> None:
        """Copies all of the device's arrays to the host and waits for them."""
        self._host.copy_(self._device, non_blocking=True)
        if self._device.is_cuda:
            torch.cuda.current_stream().synchronize()
