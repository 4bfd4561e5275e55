"""Ops: the kernels that the layers call, as one object that the runner picks for its device.

`kernels.reference` satisfies it as a module. It knows no model.
"""

from typing import Protocol

from torch import Tensor

from forebay_worker.kernels.fp8 import Numbers
from forebay_worker.kernels.reference import ExpertWeights, KvCache, LowRank, Step


class Ops(Protocol):
    """`kernels.reference` has the shapes and formulas."""

    @staticmethod
    def norm_linear(
        x: Tensor,
        gain: Tensor,
        eps: float,
        weight: Numbers,
        bias: Tensor | None = None,
    ) -> Tensor: ...

    @staticmethod
    def logits(
        x: Tensor, gain: Tensor, eps: float, weight: Tensor, out: Tensor | None = None
    ) -> Tensor: ...

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    @staticmethod
    def silu_mul(gate_up: Tensor) -> Tensor: ...

    @staticmethod
    def adapt(out: Tensor, x: Tensor, low: LowRank, adapters: Tensor) -> Tensor: ...

    @staticmethod
    def norm_gate_up(
        x: Tensor,
        gain: Tensor,
        eps: float,
        weight: Numbers,
        bias: Tensor | None = None,
        *,
        for_fp8: bool = False,
    ) -> Numbers: ...

    @staticmethod
    def linear_add(
        x: Numbers, weight: Numbers, bias: Tensor | None, residual: Tensor
    ) -> Tensor: ...

    @staticmethod
    def sparse_mlp(
        residual: Tensor, gain: Tensor, eps: float, experts: ExpertWeights
    ) -> Tensor: ...

    @staticmethod
    def rope_store(
        qkv: Tensor,
        step: Step,
        cos_sin: Tensor,
        cache: KvCache,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor: ...

    @staticmethod
    def paged_attention(q: Tensor, step: Step, cache: KvCache) -> Tensor: ...
