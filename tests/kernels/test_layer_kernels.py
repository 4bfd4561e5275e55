"""Norms, SiLU-mul and the fused norm, RoPE and cache write against the reference."""

import pytest
import torch
from forebay_worker.kernels import reference
from forebay_worker.kernels.norm_rope_store import norm_rope_store
from forebay_worker.kernels.reference import KvCache, Step
from forebay_worker.kernels.rms_norm import rms_norm
from forebay_worker.kernels.silu_mul import silu_mul

# Two roundings of bfloat16 apart at most, relative to the largest value.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)


def assert_close(out: torch.Tensor, ref: torch.Tensor) -> None:
    limit = TOLERANCE[out.dtype] * float(ref.abs().max())
    assert float((out.double() - ref.double()).abs().max()) <= limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [576, 1024, 100])
def test_rms_norm_agrees_with_the_reference(
    dtype: torch.dtype, hidden: int, device: torch.device
) -> None:
    x = torch.randn(5, hidden, device=device).to(dtype)
    weight = torch.rand(hidden, device=device).to(dtype)
    assert_close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1536, 100])
def test_silu_mul_agrees_with_the_reference(
    dtype: torch.dtype, columns: int, device: torch.device
) -> None:
    gate_up = torch.randn(3, 2 * columns, device=device).to(dtype)
    assert_close(silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 128), (9, 3, 64)])
def test_norm_rope_store_agrees_with_the_reference(
    dtype: torch.dtype,
    norm: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
) -> None:
    tokens, block_size = 5, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    positions = torch.tensor([0, 3, 40, 41, 7], device=device)
    slots = torch.tensor([17, 0, 62, 63, 30], device=device)
    angles = torch.rand(50, head_dim // 2, device=device)
    # Values that bfloat16 holds exactly, since the reference rounds the table to the storage type.
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).bfloat16().float()
    weights = [torch.rand(head_dim, device=device).to(dtype) for _ in range(2)]
    empty = torch.empty(0, dtype=torch.int64)
    step = Step(0, empty, positions, slots, empty, empty, empty, empty, [], [])
    shape = (4, block_size, kv_heads, head_dim)
    caches = [
        KvCache(*(torch.full(shape, 3.0, dtype=dtype, device=device) for _ in range(2)))
        for _ in range(2)
    ]
    ref = reference.rope_store(
        qkv, step, cos_sin, caches[0], *(weights if norm else (None, None)), 1e-6
    )
    padded = torch.cat((qkv, qkv[:1]))
    q = norm_rope_store(
        padded,
        caches[1].keys,
        caches[1].values,
        torch.cat((positions, positions[:1])),
        torch.cat((slots, torch.full_like(slots[:1], -1))),
        cos_sin,
        heads,
        (weights[0], weights[1], 1e-6) if norm else None,
    )
    assert_close(q[:tokens], ref)
    for side in ("keys", "values"):
        assert_close(getattr(caches[1], side), getattr(caches[0], side))
    untouched = heads * head_dim
    assert torch.equal(padded[:tokens, untouched:], qkv[:, untouched:])
