"""e4m3: quantised rows, products and the KV cache, against plain torch on the same bytes."""

from collections.abc import Callable

import pytest
import torch
from forebay_worker.kernels import fp8, reference
from forebay_worker.kernels.decode_attention import (
    DecodeConfig,
    make_plan,
    paged_decode_attention,
    plan_decode,
)
from forebay_worker.kernels.fp8 import E4M3, GROUP, LARGEST, Fp8
from forebay_worker.kernels.fp8_linear import Fp8Config, fp8_linear, own_fp8_linear
from forebay_worker.kernels.norm_rope_store import norm_rope_store
from forebay_worker.kernels.prefill_attention import PrefillConfig, paged_prefill_attention
from forebay_worker.kernels.quantize import quantize, rms_norm_quantize, silu_mul_quantize
from forebay_worker.kernels.reference import KvCache, Step
from forebay_worker.kernels.small_linear import (
    MOST_E4M3_ROWS,
    LinearConfig,
    Norm,
    make_scratch,
    make_squares,
    small_linear,
)
from kernel_house import build_step, fill_cache, relative_error

ON_CARD = torch.cuda.is_available()
# The interpreter multiplies the bits of bfloat16 tiles as integers and cuts them off where a card
# rounds: bfloat16 runs on the card alone.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_CARD
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def weight_of(rows: int, columns: int, device: torch.device, *, grouped: bool) -> Fp8:
    """Random bytes of every size; scales that differ by a factor of 4."""
    values = fp8.encode(torch.randn(rows, columns, device=device) * 100)
    groups = -(-columns // GROUP) if grouped else 1
    scale = torch.rand(groups, rows, device=device) * 3e-3 + 1e-3
    return Fp8(values, scale)


def product(x: torch.Tensor, weight: Fp8) -> torch.Tensor:
    return x.double() @ fp8.dequantize(weight, torch.float64).t()


def test_e4m3_is_the_nearest_and_keeps_what_is_no_number() -> None:
    x = torch.tensor([1.0, 1.97, -1.06, 500.0, -1e9, 2**-9, 2**-11, torch.nan])
    wanted = torch.tensor([1.0, 2.0, -1.0, 448.0, -448.0, 2**-9, 0.0, torch.nan])
    assert torch.equal(fp8.encode(x).float().nan_to_num(-7), wanted.nan_to_num(-7))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_quantised_row_is_within_a_sixteenth_and_its_largest_number_is_whole(rows: int) -> None:
    x = torch.randn(rows, 200) * torch.tensor([[1e-3], [1.0], [1e4]])[:rows]
    x[0, :50] = 0
    back = fp8.dequantize(fp8.quantize(x), torch.float32)
    least = x.abs().amax(-1, keepdim=True) / LARGEST * 2**-10  # half of e4m3's smallest step
    assert ((back - x).abs() <= x.abs() / 16 + least).all()
    top = x.abs().argmax(-1, keepdim=True)
    assert torch.allclose(back.gather(1, top), x.gather(1, top), rtol=1e-6)
    assert torch.equal(fp8.quantize(torch.zeros(2, 16)).values.float(), torch.zeros(2, 16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [576, 100, 1536])
@pytest.mark.parametrize("kind", ["plain", "norm", "gate"])
def test_rows_are_quantised_as_in_torch(
    kind: str, columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(5, columns * (1 + (kind == "gate")), device=device).to(dtype)
    x[3] = 0
    gain = torch.rand(columns, device=device).to(dtype)
    ways: dict[str, tuple[Callable[[], Fp8], Callable[[], torch.Tensor]]] = {
        "plain": (lambda: quantize(x), lambda: x),
        "norm": (
            lambda: rms_norm_quantize(x, gain, 1e-6),
            lambda: reference.rms_norm(x, gain, 1e-6),
        ),
        "gate": (lambda: silu_mul_quantize(x), lambda: reference.silu_mul(x)),
    }
    ours, theirs = ways[kind]
    found, wanted = ours(), fp8.quantize(theirs())
    assert found.values.dtype == E4M3
    assert torch.allclose(found.scale, wanted.scale, rtol=1e-2 if dtype != torch.float32 else 1e-5)
    # One step of e4m3 where a rounding before it went the other way, and seldom.
    apart = (found.values.float() - wanted.values.float()).abs()
    assert (apart <= wanted.values.float().abs() / 7 + 2**-8).all()
    assert float((apart > 0).float().mean()) < 0.02


def test_a_row_that_is_no_number_stays_one_and_alone(device: torch.device) -> None:
    x = torch.randn(3, 64, device=device)
    x[1, 5] = torch.nan
    found = fp8.dequantize(quantize(x), torch.float32)
    assert found[1, 5].isnan()
    assert torch.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (5, 3), (33, 2)])
def test_a_product_of_few_rows_reads_its_input_as_it_is(
    dtype: torch.dtype, grouped: bool, rows: int, splits: int, device: torch.device
) -> None:
    x = torch.randn(rows, 200, device=device).to(dtype)
    weight = weight_of(72, 200, device, grouped=grouped)
    config = LinearConfig(tile_n=32, tile_k=64, splits=splits)
    scratch = make_scratch(72, config, device)
    for _ in range(2):  # the second launch finds the counters as the first left them
        out = torch.full((rows, 72), torch.nan, dtype=dtype, device=device)
        small_linear(x, weight, out, scratch, config)
        assert relative_error(out, product(x, weight)) < TOLERANCE[dtype]
    assert not scratch.arrivals.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (19, 3)])
def test_norm_gate_and_residual_of_an_e4m3_weight_are_those_of_the_layers(
    dtype: torch.dtype, grouped: bool, rows: int, splits: int, device: torch.device
) -> None:
    x = torch.randn(rows, 136, device=device).to(dtype)
    residual = (torch.randn(rows, 200, device=device) * 3).to(dtype)
    down = weight_of(200, 136, device, grouped=grouped)
    gate_up = weight_of(144, 200, device, grouped=grouped)
    config = LinearConfig(tile_n=32, tile_k=64, splits=splits)
    scratch, gate_scratch = (make_scratch(each, config, device) for each in (200, 144))
    squares = make_squares(200, config.tile_n, device)
    total = residual.double() + product(x, down)
    added = small_linear(x, down, residual.clone(), scratch, config, add=True, squares=squares)
    assert relative_error(added, total) < TOLERANCE[dtype]
    normed = reference.rms_norm(total, torch.ones_like(total[0]), 1e-6)
    ref = reference.silu_mul(product(normed, gate_up))
    gated = torch.full((rows, 72), torch.nan, dtype=dtype, device=device)
    norm = Norm(squares, len(squares), 1e-6)
    small_linear(added, gate_up, gated, gate_scratch, config, norm=norm, gate=True)
    assert relative_error(gated, ref) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(70, 72, 200), (33, 160, 128), (1, 16, 8)])
def test_a_product_of_two_e4m3_matrices(
    dtype: torch.dtype, grouped: bool, rows: int, columns: int, depth: int, device: torch.device
) -> None:
    x = quantize(torch.randn(rows, depth, device=device))
    weight = weight_of(columns, depth, device, grouped=grouped)
    ref = product(fp8.dequantize(x, torch.float64), weight)
    config = Fp8Config(tile_m=64, tile_n=64, num_warps=4, band=2)
    assert relative_error(own_fp8_linear(x, weight, dtype, config), ref) < max(
        TOLERANCE[dtype],
        2e-3 * ON_CARD,  # the card's sums of 128 have some 14 bits
    )
    bias = torch.randn(columns, device=device).to(dtype)
    found = fp8_linear(x, weight, bias, dtype)
    assert relative_error(found, ref + bias.double()) < max(TOLERANCE[dtype], 2e-3 * ON_CARD)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("rows", "splits"), [(17, 1), (64, 3), (100, 2)])
def test_a_product_of_few_e4m3_rows(
    dtype: torch.dtype, grouped: bool, rows: int, splits: int, device: torch.device
) -> None:
    x = quantize(torch.randn(rows, 200, device=device))
    weight = weight_of(72, 200, device, grouped=grouped)
    ref = product(fp8.dequantize(x, torch.float64), weight)
    config = LinearConfig(tile_n=32, tile_k=64, splits=splits)
    scratch = make_scratch(72, config, device, MOST_E4M3_ROWS)
    near = max(TOLERANCE[dtype], 2e-3 * ON_CARD)
    for _ in range(2):
        out = torch.full((rows, 72), torch.nan, dtype=dtype, device=device)
        small_linear(x, weight, out, scratch, config)
        assert relative_error(out, ref) < near
    residual = torch.randn(rows, 72, device=device).to(dtype)
    total = residual.double() + ref
    added = small_linear(x, weight, residual, scratch, config, add=True)
    assert relative_error(added, total) < near


@pytest.mark.skipif(not ON_CARD, reason="cuBLAS needs a card")
@pytest.mark.parametrize("rows", [65, 128, 1000])
def test_sums_of_long_rows_stay_exact_on_the_card(rows: int, device: torch.device) -> None:
    """Of 16,384 numbers of one sign, where a sum of 14 bits alone loses what it adds."""
    x = quantize(torch.rand(rows, 16_384, device=device))
    weight = Fp8(
        fp8.encode(torch.rand(256, 16_384, device=device) * 400),
        torch.full((1, 256), 1e-3, device=device),
    )
    ref = product(fp8.dequantize(x, torch.float64), weight)
    for found in (
        fp8_linear(x, weight, None, torch.bfloat16),
        own_fp8_linear(x, weight, torch.bfloat16),
    ):
        assert relative_error(found, ref) < 4e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_are_stored_by_their_heads_scales(
    dtype: torch.dtype, device: torch.device
) -> None:
    heads, kv_heads, head_dim, block = 4, 2, 64, 16
    qkv = torch.randn(5, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    qkv[2] *= 1e4  # beyond 448 at these scales
    qkv[3, -1] = torch.nan
    positions = torch.tensor([0, 3, 40, 41, 7], device=device)
    slots = torch.tensor([17, 0, 62, 63, 30], device=device)
    angles = torch.rand(50, head_dim // 2, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).bfloat16().float()
    empty = torch.empty(0, dtype=torch.int64)
    step = Step(0, empty, positions, slots, empty, empty, empty, empty, [], [])
    scales = torch.tensor([[0.5, 2.0], [0.01, 1.0]], device=device)
    ours, theirs = (
        KvCache(
            *(torch.zeros(4, block, kv_heads, head_dim, device=device).to(E4M3) for _ in "kv"),
            scales,
        )
        for _ in range(2)
    )
    wanted_q = reference.rope_store(qkv.clone(), step, cos_sin, theirs)
    padded = torch.cat((qkv, qkv[:1]))
    q = norm_rope_store(
        padded, ours.keys, ours.values,
        torch.cat((positions, positions[:1])), torch.cat((slots, torch.full_like(slots[:1], -1))),
        cos_sin, heads, kv_scales=scales,
    )  # fmt: skip
    for found, wanted in zip(q[:5], wanted_q, strict=True):  # a sum of large numbers may be small
        assert relative_error(found, wanted) < max(TOLERANCE[dtype], 1e-3)
    for side, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        found, wanted = side.float(), other.float()
        assert torch.equal(found.isnan(), wanted.isnan())
        apart = (found - wanted).nan_to_num(0).abs()
        assert (apart <= wanted.nan_to_num(0).abs() / 7 + 2**-8).all()
        assert float((apart > 0).float().mean()) < 0.02
    assert ours.values.isnan().sum() == 1
    assert ours.keys.float().nan_to_num(0).abs().max() == LARGEST


def fp8_cache(step: Step, blocks: int, block: int, kv_heads: int, head_dim: int) -> KvCache:
    """Random bytes where a row has positions, NaN everywhere else; scales per head."""
    wide = fill_cache(step, blocks, block, kv_heads, head_dim, torch.float32)
    scales = torch.rand(2, kv_heads, device=wide.keys.device) + 0.5
    return KvCache(fp8.encode(wide.keys), fp8.encode(wide.values), scales)


def expected(q: torch.Tensor, step: Step, cache: KvCache) -> torch.Tensor:
    assert cache.scales is not None
    keys, values = (
        side.double() * scale[:, None].double()
        for side, scale in zip((cache.keys, cache.values), cache.scales, strict=True)
    )
    return reference.paged_attention(q.double(), step, KvCache(keys, values)).view(q.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "programs"),
    [(4, 2, 128, 64, 12), (9, 3, 64, 16, 12), (14, 2, 128, 32, 8)],
)
def test_decode_attention_over_an_e4m3_cache(
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
    cache = fp8_cache(step, blocks, block_size, kv_heads, head_dim)
    q = torch.randn(len(lens), heads, head_dim, dtype=dtype, device=device)
    config = DecodeConfig(tile=32, programs=programs)
    plan = make_plan(len(lens), kv_heads, heads // kv_heads, head_dim, device, config)
    out = torch.full_like(q, torch.nan)
    plan_decode(plan, step.kv_lens)
    paged_decode_attention(
        q, cache.keys, cache.values, step.block_tables, step.kv_lens, plan, head_dim**-0.5, out,
        kv_scales=cache.scales,
    )  # fmt: skip
    ref = expected(q, step, cache)
    assert relative_error(out, ref) < TOLERANCE[dtype]
    assert relative_error(reference.paged_attention(q, step, cache).view(q.shape), ref) < max(
        TOLERANCE[dtype], 1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "tile_m", "tile_n", "tma"),
    [
        (4, 2, 128, 64, 64, 32, True),
        (4, 2, 64, 64, 64, 64, False),
        (9, 3, 64, 16, 64, 64, False),
        (2, 2, 16, 128, 16, 64, True),
    ],
)
def test_prefill_attention_over_an_e4m3_cache(
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
    cache = fp8_cache(step, blocks, block_size, kv_heads, head_dim)
    q = torch.randn(sum(chunks), heads, head_dim, dtype=dtype, device=device)
    out = torch.full_like(q, torch.nan)
    paged_prefill_attention(
        q, cache.keys, cache.values,
        step.block_tables[1:], step.kv_lens[1:], step.starts[1:],
        head_dim**-0.5, out, PrefillConfig(tile_m, tile_n, 4, 2, tma), cache.scales,
    )  # fmt: skip
    ref = expected(q, step, cache)
    assert relative_error(out[1:], ref[1:]) < TOLERANCE[dtype]
    assert out[0].isnan().all()  # the first row was not asked for
    assert relative_error(reference.paged_attention(q, step, cache).view(q.shape), ref) < max(
        TOLERANCE[dtype], 1e-5
    )
