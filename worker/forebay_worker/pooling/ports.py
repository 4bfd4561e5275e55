"""Ports: what computes the vectors of a step, whatever the model. Protocols and types only."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.uint32]
Vectors = npt.NDArray[np.float32]
Array = npt.NDArray[Any]


class VectorRunner(Protocol):
    """One model. Sizes are in tokens, but for `size`: values of a vector."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def token_budget(self) -> int:
        """Tokens of a step at most, where the settings name none."""
        ...

    @property
    def size(self) -> int: ...

    def encode(self, inputs: Sequence[TokenIds]) -> Vectors:
        """The pooled vector of each input, neither cut nor normalised: [inputs, size] float32."""
        ...
