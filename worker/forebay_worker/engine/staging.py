"""Staging: packets of arrays between the host and a card, one copy each, several on their way.

It knows bytes and names, not what they mean.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 256  # so that a kernel is compiled for one alignment of each array
_DEPTH = 3  # packets on their way: two steps in flight, and the one that is being filled

Array = npt.NDArray[Any]
Fields = Mapping[str, tuple[str, int]]
"""Name to numpy type and number of elements."""

_TORCH = {"i8": torch.int64, "i4": torch.int32, "f4": torch.float32}


class Layout:
    """Where each array lies in a packet: `places` by name as (start, end) in bytes."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.places: dict[str, tuple[int, int]] = {}
        self.size = 0
        for name, (kind, count) in fields.items():
            end = self.size + np.dtype(kind).itemsize * count
            self.places[name] = (self.size, end)
            self.size = -(-end // _ALIGNMENT) * _ALIGNMENT

    def arrays(self, raw: npt.NDArray[np.uint8]) -> dict[str, Array]:
        """The packet's arrays in the bytes `raw`."""
        return {
            name: raw[slice(*self.places[name])].view(kind)
            for name, (kind, _) in self.fields.items()
        }

    def tensors(self, raw: Tensor) -> dict[str, Tensor]:
        return {
            name: raw[slice(*self.places[name])].view(_TORCH[kind])
            for name, (kind, _) in self.fields.items()
        }


class _Packet:
    """Bytes on the host that a copy may still be reading or writing."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_card = device.type == "cuda"
        self.bytes = torch.zeros(size, dtype=torch.uint8, pin_memory=on_card)
        self.raw: npt.NDArray[np.uint8] = self.bytes.numpy()
        self._copied = torch.cuda.Event() if on_card else None

    def mark(self) -> None:
        """A copy has just been queued."""
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Until the last copy is done."""
        if self._copied is not None:
            self._copied.synchronize()


class _Ring:
    def __init__(self, size: int, device: torch.device) -> None:
        self._packets = [_Packet(size, device) for _ in range(_DEPTH)]
        self._at = 0

    def next(self) -> _Packet:
        """The packet that was used longest ago."""
        self._at = (self._at + 1) % _DEPTH
        return self._packets[self._at]


class Staging:
    """Sends packets of at most `size` bytes to one place on the card, in the stream's order."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._ring = _Ring(size, device)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)

    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        """The arrays of the last packet of this layout, on the card."""
        return layout.tensors(self._device)

    def send(self, layout: Layout, arrays: Mapping[str, Array]) -> None:
        """Starts a copy of the beginnings of `arrays`, which may change once this returns."""
        packet = self._ring.next()
        packet.wait()
        for name, to in layout.arrays(packet.raw).items():
            to[:] = arrays[name][: len(to)]
        self._device[: layout.size].copy_(packet.bytes[: layout.size], non_blocking=True)
        packet.mark()


class Fetched:
    """A packet on its way from the card; it lasts until two more have been fetched."""

    def __init__(self, layout: Layout, packet: _Packet) -> None:
        self._layout, self._packet = layout, packet

    def arrays(self) -> dict[str, Array]:
        """Waits for the packet."""
        self._packet.wait()
        return self._layout.arrays(self._packet.raw)


class Harvest:
    """Arrays on a card, `device` by name, that the host fetches after each step."""

    def __init__(self, fields: Fields, device: torch.device) -> None:
        self._layout = Layout(fields)
        self._ring = _Ring(self._layout.size, device)
        self._raw = torch.zeros(self._layout.size, dtype=torch.uint8, device=device)
        self.device = self._layout.tensors(self._raw)

    def fetch(self) -> Fetched:
        """Starts a copy of what the stream will have left here."""
        packet = self._ring.next()
        packet.wait()
        packet.bytes.copy_(self._raw, non_blocking=True)
        packet.mark()
        return Fetched(self._layout, packet)
