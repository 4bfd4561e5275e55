"""From PEFT's directories to the low-rank matrices of all adapters, stacked by product.

An adapter that would be computed otherwise than its makers meant is refused, by the name of what is
not understood. It knows names and shapes, not what a product is of.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor

from forebay_worker.checkpoint.adapters import CONFIG, WEIGHTS
from forebay_worker.engine.tensor_files import StoredTensor, Tensors, open_tensor_file
from forebay_worker.kernels.reference import LowRank
from forebay_worker.models.config import ModelConfig, ModelError
from forebay_worker.models.decoder import LAYERS, Parameter, adaptable

NO_ADAPTERS: Mapping[str, Path] = MappingProxyType({})

_PREFIXES = ("base_model.model.", "model.")
_A, _B = ".lora_A.weight", ".lora_B.weight"
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
"""Values that change nothing. Other ways to begin (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) are meant
for a model whose own weights they have changed."""


class _Config(msgspec.Struct, frozen=True):
    """What of adapter_config.json says how the matrices are meant. The fields from `use_dora` on
    must say nothing."""

    peft_type: str = ""
    r: int = 0
    lora_alpha: float = 0.0
    use_rslora: bool = False
    use_dora: Any = False
    use_qalora: Any = False
    use_bdlora: Any = None
    bias: Any = "none"
    lora_bias: Any = False
    fan_in_fan_out: Any = False
    modules_to_save: Any = None
    trainable_token_indices: Any = None
    target_parameters: Any = None
    layer_replication: Any = None
    rank_pattern: Any = None
    alpha_pattern: Any = None
    alora_invocation_tokens: Any = None
    arrow_config: Any = None
    kasa_config: Any = None
    monteclora_config: Any = None
    init_lora_weights: Any = True

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    @property
    def unsupported(self) -> str:
        """The first field that asks for what is not done here; empty: there is none."""
        names = self.__struct_fields__
        for name in names[names.index("use_dora") :]:
            value = getattr(self, name)
            if value and value not in _PLAIN.get(name, ()):
                return name
        return ""


_decode = msgspec.json.Decoder(_Config).decode


def load_adapters(
    paths: Mapping[str, Path],
    config: ModelConfig,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
    filled: Callable[[int], int],
) -> dict[str, LowRank]:
    """What the adapters add to each of the model's `adaptable` matrices, by its name; nothing
    without adapters. They are numbered in the order of `paths`; `filled` says to which rank the
    largest of theirs, and so all, are filled up.

    Raises ModelError that names the adapter and the first thing that is wrong with it.
    """
    if not paths:
        return {}
    with ExitStack() as stack:
        found = [_Stored.open(*each, max_rank, stack) for each in paths.items()]
        rank = filled(max(each.config.r for each in found))
        loaded: dict[str, LowRank] = {}
        for parameter in adaptable(config):
            low = _blank(len(found), rank, parameter, dtype, device)
            for number, each in enumerate(found):
                each.fill(parameter, low.a[number], low.b[number])
            loaded[parameter.name] = low
        for each in found:
            each.check_all_taken(config.family)
        return loaded


def _blank(
    number: int, rank: int, parameter: Parameter, dtype: torch.dtype, device: torch.device
) -> LowRank:
    assert parameter.columns is not None, "it is a matrix"
    rows = sum(parameter.sizes)
    a = torch.zeros((number, len(parameter.parts), rank, parameter.columns), dtype=dtype)
    b = torch.zeros((number, rank, rows), dtype=dtype)
    return LowRank(a.to(device), b.to(device), parameter.sizes)


@dataclass(frozen=True, slots=True)
class _Stored:
    """One adapter's files. `tensors` by the names of the model's own modules, less those that were
    taken."""

    name: str
    config: _Config
    tensors: Tensors

    @classmethod
    def open(cls, name: str, path: Path, max_rank: int, stack: ExitStack) -> "_Stored":
        config = _read_config(name, path)
        if config.r > max_rank:
            raise _error(name, f"its rank {config.r} is more than --max-lora-rank {max_rank}")
        try:
            tensors = open_tensor_file(path / WEIGHTS, stack, _known_as)
        except ModelError as error:
            raise ModelError(f"--lora-modules {name}: {error}") from None
        if not tensors:
            raise _error(name, f"{WEIGHTS} holds no tensors")
        return cls(name, config, tensors)

    def fill(self, parameter: Parameter, a: Tensor, b: Tensor) -> None:
        """Writes what it adds to a parameter into a [parts, R, K] and b [R, rows]."""
        start = 0
        for part, size, into in zip(parameter.parts, parameter.sizes, a, strict=True):
            module = part.removesuffix(".weight")
            if module + _A in self.tensors or module + _B in self.tensors:
                rank = self.config.r
                self._take(module + _A, into[:rank])
                self._take(module + _B, b[:rank, start : start + size].T, self.config.scale)
            start += size

    def _take(self, name: str, into: Tensor, scale: float = 1.0) -> None:
        """Moves a tensor, times `scale`, `into` its place. One that is not finite there is refused
        by name: it would end every request for the adapter, and look like a fault of the engine."""
        stored, shape = self.tensors.pop(name, None), into.shape
        if stored is None:
            raise _error(self.name, f"{WEIGHTS} lacks tensor {name}")
        tensor = _read(self.name, stored)
        if tensor.shape != shape:
            said = f"tensor {stored.name} has shape {list(tensor.shape)}, not {list(shape)}"
            raise _error(self.name, said)
        if not tensor.is_floating_point():
            said = f"tensor {stored.name} holds {tensor.dtype}, not floating point numbers"
            raise _error(self.name, said)
        into.copy_(tensor.float() * scale)
        if not torch.isfinite(into).all():
            said = f"tensor {stored.name} holds numbers that are not finite in {into.dtype}"
            raise _error(self.name, said)

    def check_all_taken(self, family: str) -> None:
        for stored in self.tensors.values():
            said = f"tensor {stored.name} is of no q, k, v, o, gate, up or down product of {family}"
            raise _error(self.name, said)


def _read_config(name: str, path: Path) -> _Config:
    try:
        config = _decode((path / CONFIG).read_bytes())
    except OSError as error:
        raise _error(name, f"{path / CONFIG} cannot be read ({error.strerror})") from None
    except msgspec.DecodeError as error:
        raise _error(name, f"{path / CONFIG}: {error}") from None
    if config.peft_type.upper() != "LORA":
        raise _error(name, f"{CONFIG}: peft_type must be LORA")
    if config.r < 1:
        raise _error(name, f"{CONFIG}: r must be a positive integer")
    if not config.lora_alpha:
        raise _error(name, f"{CONFIG}: lora_alpha must be a number other than 0")
    if config.unsupported:
        raise _error(name, f"{CONFIG}: {config.unsupported} is not supported")
    return config


def _read(name: str, stored: StoredTensor) -> Tensor:
    try:
        return stored.read()
    except ModelError as error:
        raise ModelError(f"--lora-modules {name}: {error}") from None


def _known_as(stored: str) -> str:
    """PEFT's name as the model's own: `model.layers.0.self_attn.q_proj.lora_A.weight`."""
    for prefix in _PREFIXES:
        stored = stored.removeprefix(prefix)
    return LAYERS + stored.removeprefix("layers.") if stored.startswith("layers.") else stored


def _error(name: str, said: str) -> ModelError:
    return ModelError(f"--lora-modules {name}: {said}.")
