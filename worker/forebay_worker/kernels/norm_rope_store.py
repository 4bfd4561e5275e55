"""From packed qkv to attention's inputs in one pass: q/k RMSNorm, RoPE, and K and V into the cache.

    x  = x / sqrt(mean(x^2) + eps) * weight          q and k heads, when the model has such weights
    y1 = x1 * cos[p] - x2 * sin[p]                   x1, x2: the halves of a head (neox style)
    y2 = x2 * cos[p] + x1 * sin[p]                   q and k heads
    cache[slot] = k, v                               divided by their head's scale where it is e4m3

Four kernels' work (norm, rotate, two cache writes) and three round trips through memory less. A
program owns one token and HEADS heads, so that one decode row already spreads over several.
Bound: bytes; qkv is read once and as much is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay_worker.kernels.fp8 import LARGEST
from forebay_worker.kernels.overlap import let_next_in, overlaps, wait_for_inputs

_HEADS = 4  # heads per program: 1 KB of bf16 at D = 128


@triton.jit
def _encode(x, scale, LARGEST: tl.constexpr):
    """x / scale as e4m3, clamped; NaN stays."""
    wide = x.to(tl.float32) / scale
    return tl.clamp(wide, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def _norm_rope_store_kernel(
    qkv, k_cache, v_cache, kv_scales, positions, slots, cos_sin, q_weight, k_weight, eps,
    stride_qkv,
    stride_k_block, stride_k_token, stride_k_head,
    stride_v_block, stride_v_token, stride_v_head,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, HEADS: tl.constexpr, FP8: tl.constexpr, LARGEST: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, D // 2)
    is_q = (head < Q_HEADS)[:, None]
    is_k = ((head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS))[:, None]
    is_v = ((head >= Q_HEADS + KV_HEADS) & (head < Q_HEADS + 2 * KV_HEADS))[:, None]
    source = qkv + token * stride_qkv + head[:, None] * D + half[None, :]
    # What a step begins with, and so is there: only qkv is awaited.
    slot = tl.load(slots + token)
    angle = cos_sin + tl.load(positions + token) * D + half
    cos = tl.load(angle)[None, :]
    sin = tl.load(angle + D // 2)[None, :]
    if NORM:
        q1 = tl.load(q_weight + half).to(tl.float32)
        q2 = tl.load(q_weight + half + D // 2).to(tl.float32)
        k1 = tl.load(k_weight + half).to(tl.float32)
        k2 = tl.load(k_weight + half + D // 2).to(tl.float32)
    let_next_in(OVERLAP)
    wait_for_inputs(OVERLAP)
    raw1 = tl.load(source, mask=is_q | is_k | is_v, other=0.0)
    raw2 = tl.load(source + D // 2, mask=is_q | is_k | is_v, other=0.0)
    x1 = raw1.to(tl.float32)
    x2 = raw2.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        # Rounded to the storage type before the weight, as the models' own code does.
        x1 = (x1 * scale).to(raw1.dtype).to(tl.float32) * tl.where(is_q, q1, k1)
        x2 = (x2 * scale).to(raw2.dtype).to(tl.float32) * tl.where(is_q, q2, k2)
        x1 = x1.to(raw1.dtype).to(tl.float32)
        x2 = x2.to(raw2.dtype).to(tl.float32)
    y1 = tl.where(is_v, raw1, (x1 * cos - x2 * sin).to(raw1.dtype))
    y2 = tl.where(is_v, raw2, (x2 * cos + x1 * sin).to(raw2.dtype))

    tl.store(source, y1, mask=is_q)
    tl.store(source + D // 2, y2, mask=is_q)
    block = slot // BLOCK
    offset = slot % BLOCK
    kv_head = head - Q_HEADS
    if FP8:
        scale = tl.load(kv_scales + kv_head[:, None], mask=is_k | is_v, other=1.0)
        y1 = _encode(y1, scale, LARGEST)
        y2 = _encode(y2, scale, LARGEST)
    k_to = block * stride_k_block + offset * stride_k_token + kv_head * stride_k_head
    v_to = block * stride_v_block + offset * stride_v_token + (kv_head - KV_HEADS) * stride_v_head
    k_to = k_cache + k_to[:, None] + half[None, :]
    v_to = v_cache + v_to[:, None] + half[None, :]
    if slot >= 0:
        tl.store(k_to, y1, mask=is_k)
        tl.store(k_to + D // 2, y2, mask=is_k)
        tl.store(v_to, y1, mask=is_v)
        tl.store(v_to + D // 2, y2, mask=is_v)


def norm_rope_store(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    q_heads: int,
    norm: tuple[Tensor, Tensor, float] | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Normalises and rotates q in place and writes k and v to the cache; returns q's view of `qkv`.

    Args:
        qkv: [T, (q heads + 2 KV heads) * D], last dimension contiguous; afterwards its q part is
            attention's query, its k and v parts are as before.
        k_cache, v_cache: [blocks, block size, KV heads, D], any strides with D contiguous.
        positions: [T] int64, below cos_sin's length.
        slots: [T] int64, block * block size + offset; a negative one writes nothing (padding).
        cos_sin: [positions, D] float32, D / 2 cosines and then D / 2 sines.
        norm: weights [D] of the q and the k norm, and eps.
        kv_scales: [2, KV heads] float32, contiguous, of an e4m3 cache's keys and values.

    Returns:
        [T, q heads, D], a view.
    """
    kv_heads, head_dim = k_cache.shape[2:]
    q_weight, k_weight, eps = norm if norm is not None else (qkv, qkv, 0.0)
    # Many small programs lose by it: 8,192 tokens of 16/8 heads took 83 us with it, 47 without.
    overlap = overlaps(qkv.device) and qkv.shape[0] <= 256
    grid = (qkv.shape[0], triton.cdiv(q_heads + 2 * kv_heads, _HEADS))
    _norm_rope_store_kernel[grid](
        qkv, k_cache, v_cache, qkv if kv_scales is None else kv_scales,
        positions, slots, cos_sin, q_weight, k_weight, eps,
        qkv.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
        Q_HEADS=q_heads, KV_HEADS=kv_heads, D=head_dim, BLOCK=k_cache.shape[1],
        NORM=norm is not None, HEADS=_HEADS,
        FP8=kv_scales is not None, LARGEST=LARGEST, num_warps=1,
        OVERLAP=overlap, launch_pdl=overlap,
    )  # fmt: skip
    return torch.as_strided(
        qkv, (qkv.shape[0], q_heads, head_dim), (qkv.stride(0), head_dim, 1), qkv.storage_offset()
    )
