"""Decode and prefill attention against the reference at odd shapes, block sizes and lengths."""

import pytest
import torch
from forebay_worker.kernels import reference
from forebay_worker.kernels.decode_attention import (
    DecodeConfig,
    make_plan,
    paged_decode_attention,
    plan_decode,
)
from forebay_worker.kernels.prefill_attention import PrefillConfig, paged_prefill_attention
from forebay_worker.kernels.reference import KvCache, Step
from kernel_house import build_step, fill_cache, relative_error

# Relative error of the whole output, ||out - ref|| / ||ref||, against float64.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# The interpreter multiplies the bits of bfloat16 tiles as integers: those run on the card alone.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def expected(q: torch.Tensor, step: Step, cache: KvCache) -> torch.Tensor:
    wide = KvCache(cache.keys.double(), cache.values.double())
    return reference.paged_attention(q.double(), step, wide).view(q.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "programs"),
    [(4, 2, 128, 64, 12), (9, 3, 64, 16, 12), (4, 4, 64, 128, 1), (14, 2, 128, 32, 8)],
)
def test_decode_attention_agrees_with_the_reference(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    programs: int,
    device: torch.device,
) -> None:
    lens = [1, 200, 64, 65]
    step, blocks = build_step([1] * len(lens), lens, block_size, device)
    cache = fill_cache(step, blocks, block_size, kv_heads, head_dim, dtype)
    q = torch.randn(len(lens), heads, head_dim, dtype=dtype, device=device)
    config = DecodeConfig(tile=32, programs=programs)
    plan = make_plan(len(lens), kv_heads, heads // kv_heads, head_dim, device, config)
    for _ in range(2):  # the second launch finds the counters as the first left them
        out = torch.full_like(q, torch.nan)
        plan_decode(plan, step.kv_lens)
        paged_decode_attention(
            q, cache.keys, cache.values, step.block_tables, step.kv_lens, plan, head_dim**-0.5, out
        )
        assert relative_error(out, expected(q, step, cache)) < TOLERANCE[dtype]
        assert not plan.arrivals.any()


def test_decode_attention_skips_padding_rows_and_follows_table_rows(device: torch.device) -> None:
    step, blocks = build_step([1, 1], [40, 7], 16, device)
    cache = fill_cache(step, blocks, 16, 2, 64, torch.float32)
    q = torch.randn(2, 4, 64, device=device)
    ref = expected(q, step, cache)
    padded = torch.cat((q[1:], q[:1], q))
    kv_lens = torch.tensor([7, 40, 0, 0], dtype=torch.int32, device=device)
    rows = torch.tensor([1, 0, 0, 0], dtype=torch.int32, device=device)
    plan = make_plan(4, 2, 2, 64, device, DecodeConfig(tile=16, programs=8))
    out = torch.full_like(padded, 5.0)
    plan_decode(plan, kv_lens)
    paged_decode_attention(
        padded, cache.keys, cache.values, step.block_tables, kv_lens, plan, 0.125, out, rows
    )
    assert relative_error(out[[1, 0]], ref) < 1e-5
    assert (out[2:] == 5.0).all()


def test_the_decode_plan_covers_every_tile_once(device: torch.device) -> None:
    lens = torch.tensor([0, 5, 4000, 64, 0, 777, 65], dtype=torch.int32, device=device)
    plan = make_plan(7, 8, 2, 128, device, DecodeConfig(tile=64, programs=264))
    plan_decode(plan, lens)
    seen: dict[int, list[int]] = {}
    for row, split, splits, chunk in plan.items.tolist():
        if row >= 0:
            tiles = -(-int(lens[row]) // 64)
            assert splits == -(-tiles // chunk)
            seen.setdefault(row, []).append(split)
    assert sorted(seen) == [1, 2, 3, 5, 6]
    assert all(splits == list(range(len(splits))) for splits in seen.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "tile_m", "tile_n", "tma"),
    [
        (4, 2, 128, 64, 64, 32, True),
        (4, 2, 64, 64, 64, 64, False),
        (9, 3, 64, 16, 64, 64, False),
        (2, 2, 64, 128, 16, 64, True),
    ],
)
def test_prefill_attention_agrees_with_the_reference(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    tile_m: int,
    tile_n: int,
    tma: bool,
    device: torch.device,
) -> None:
    chunks, lens = [1, 1, 70, 33, 2], [9, 50, 70, 120, 131]
    step, blocks = build_step(chunks, lens, block_size, device)
    cache = fill_cache(step, blocks, block_size, kv_heads, head_dim, dtype)
    q = torch.randn(sum(chunks), heads, head_dim, dtype=dtype, device=device)
    out = torch.full_like(q, torch.nan)
    paged_prefill_attention(
        q,
        cache.keys,
        cache.values,
        step.block_tables[1:],
        step.kv_lens[1:],
        step.starts[1:],
        head_dim**-0.5,
        out,
        PrefillConfig(tile_m, tile_n, 4, 2, tma),
    )
    assert relative_error(out[1:], expected(q, step, cache)[1:]) < TOLERANCE[dtype]
    assert out[0].isnan().all()  # the first row was not asked for
