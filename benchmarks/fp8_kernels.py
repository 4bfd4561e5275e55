"""The e4m3 kernels on the card, for `kernels.py --kinds fp8`: what each saves beside bfloat16.

Shares are of the measured copy and of the bfloat16 product's rate: e4m3 products may reach 2.
"""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from forebay_worker.kernels import fp8
from forebay_worker.kernels.fp8 import GROUP, Fp8, Numbers
from forebay_worker.kernels.fp8_linear import Fp8Config, fp8_linear, own_fp8_linear
from forebay_worker.kernels.linear_table import _config, _e4m3_config
from forebay_worker.kernels.quantize import quantize, rms_norm_quantize, silu_mul_quantize
from forebay_worker.kernels.small_linear import (
    MOST_E4M3_ROWS,
    MOST_ROWS,
    LinearConfig,
    make_scratch,
    small_linear,
)
from kernels import BF16, DEVICE, LINEARS, Launch, Peak, Row, copies, time_launches
from torch.nn import functional

FEW, MORE, MANY = (1, 8, 16), (32, 64, 128), (128, 1024, 8192)
FEW_SWEEP = [
    LinearConfig(tile_n, tile_k, splits, warps, stages)
    for tile_n, tile_k, warps, stages in [
        (32, 128, 4, 4),
        (32, 128, 4, 6),
        (32, 256, 4, 4),
        (64, 128, 4, 4),
        (64, 128, 4, 6),
        (64, 256, 4, 3),
        (64, 256, 8, 3),
        (128, 128, 8, 4),
    ]
    for splits in (1, 2, 4)
]
MORE_SWEEP = [
    LinearConfig(tile_n, 128, splits, warps, stages)
    for tile_n, warps, stages in [
        (32, 4, 6),
        (32, 4, 8),
        (64, 4, 4),
        (64, 4, 5),
        (64, 4, 7),
        (64, 8, 5),
        (128, 4, 4),
        (128, 8, 4),
    ]
    for splits in (1, 2, 4)
]
MANY_SWEEP = [
    Fp8Config(128, 128, 8, 4),
    Fp8Config(128, 128, 8, 3),
    Fp8Config(128, 128, 4, 4),
    Fp8Config(128, 256, 8, 3),
    Fp8Config(256, 128, 8, 3),
    Fp8Config(64, 128, 4, 4),
    Fp8Config(64, 256, 8, 3),
    Fp8Config(128, 128, 8, 4, 16),
]


def weight_of(columns: int, depth: int, *, grouped: bool) -> Fp8:
    """Random e4m3 with its scales."""
    whole = fp8.quantize(torch.randn(columns, depth, device=DEVICE))
    if not grouped:
        return whole
    return Fp8(whole.values, whole.scale.expand(-(-depth // GROUP), columns).contiguous())


def _seconds(
    x: Numbers, weights: list[Fp8], out: torch.Tensor, config: LinearConfig, most_rows: int
) -> float:
    scratch = make_scratch(out.shape[1], config, DEVICE, most_rows)
    return time_launches([partial(small_linear, x, w, out, scratch, config) for w in weights])


def bench_few(peak: Peak, sweep: bool) -> Iterator[Row]:
    """Bytes of the weight bound it: half of bfloat16's."""
    for (columns, depth), grouped in itertools.product(LINEARS, (False, True)):
        size = columns * depth
        weights = [weight_of(columns, depth, grouped=grouped) for _ in range(copies(size))]
        kind = "e4m3 by groups" if grouped else "e4m3"
        for rows in FEW:
            x = torch.randn(rows, depth, device=DEVICE, dtype=BF16)
            out = torch.empty(rows, columns, device=DEVICE, dtype=BF16)
            shape = f"{rows}x{depth}->{columns}"
            for config in FEW_SWEEP if sweep else [_config(columns, depth)]:
                if grouped and GROUP % config.tile_k:
                    continue
                seconds = _seconds(x, weights, out, config, MOST_ROWS)
                yield peak.row(f"small_linear {kind}", shape, config, seconds, size)
            if not grouped and not sweep:
                whole = [partial(_both, x, w) for w in weights]
                yield peak.row("quantize + cublas", shape, "", time_launches(whole), size)


def _both(x: torch.Tensor, weight: Fp8) -> torch.Tensor:
    return fp8_linear(quantize(x), weight, None, BF16)


def bench_more(peak: Peak, sweep: bool) -> Iterator[Row]:
    """Rows that are e4m3 too, still bound by the bytes of the weight."""
    for (columns, depth), grouped in itertools.product(LINEARS, (False, True)):
        size = columns * depth
        weights = [weight_of(columns, depth, grouped=grouped) for _ in range(copies(size))]
        kind = "e4m3 both by groups" if grouped else "e4m3 both"
        for rows in MORE:
            x = quantize(torch.randn(rows, depth, device=DEVICE, dtype=BF16))
            out = torch.empty(rows, columns, device=DEVICE, dtype=BF16)
            shape = f"{rows}x{depth}->{columns}"
            for config in MORE_SWEEP if sweep else [_e4m3_config(columns, grouped=grouped)]:
                seconds = _seconds(x, weights, out, config, MOST_E4M3_ROWS)
                yield peak.row(f"small_linear {kind}", shape, config, seconds, size)
            if not grouped and not sweep:
                theirs: list[Launch] = [partial(fp8_linear, x, w, None, BF16) for w in weights]
                yield peak.row("cublas", shape, "e4m3", time_launches(theirs), size)


def bench_many(peak: Peak, sweep: bool) -> Iterator[Row]:
    """Arithmetic bounds it: twice bfloat16's rate."""
    for (columns, depth), rows in itertools.product(LINEARS, MANY):
        shape, flops = f"{rows}x{depth}->{columns}", 2.0 * rows * depth * columns
        size = columns * depth + rows * (depth + 2 * columns)
        sets = copies(size)
        x = quantize(torch.randn(rows, depth, device=DEVICE, dtype=BF16))
        weights = [weight_of(columns, depth, grouped=False) for _ in range(sets)]
        if not sweep:
            plain = torch.randn(rows, depth, device=DEVICE, dtype=BF16)
            wide = [torch.randn(columns, depth, device=DEVICE, dtype=BF16) for _ in range(sets)]
            seconds = time_launches([partial(functional.linear, plain, w) for w in wide])
            yield peak.row("cublas", shape, "bfloat16", seconds, 2 * size, flops)
            del wide
            seconds = time_launches([partial(fp8_linear, x, w, None, BF16) for w in weights])
            yield peak.row("cublas", shape, "e4m3", seconds, size, flops)
        by_groups = [weight_of(columns, depth, grouped=True) for _ in range(sets)]
        for config in MANY_SWEEP if sweep else [Fp8Config()]:
            for name, of in (("own", weights), ("own by groups", by_groups)):
                if sweep and of is weights:
                    continue
                launches: list[Launch] = [partial(own_fp8_linear, x, w, BF16, config) for w in of]
                yield peak.row(name, shape, config, time_launches(launches), size, flops)


def bench_quantize(peak: Peak) -> Iterator[Row]:
    for (hidden, inner), tokens in itertools.product(
        [(1024, 3072), (4096, 12288)], (65, 1024, 8192)
    ):
        gain = torch.rand(hidden, device=DEVICE, dtype=BF16)
        size = 3 * tokens * hidden
        xs = [torch.randn(tokens, hidden, device=DEVICE, dtype=BF16) for _ in range(copies(size))]
        seconds = time_launches([partial(quantize, x) for x in xs])
        yield peak.row("quantize", f"{tokens}x{hidden}", "", seconds, size)
        seconds = time_launches([partial(rms_norm_quantize, x, gain, 1e-6) for x in xs])
        yield peak.row("rms_norm_quantize", f"{tokens}x{hidden}", "", seconds, size)
        size = 5 * tokens * inner
        xs = [
            torch.randn(tokens, 2 * inner, device=DEVICE, dtype=BF16) for _ in range(copies(size))
        ]
        seconds = time_launches([partial(silu_mul_quantize, x) for x in xs])
        yield peak.row("silu_mul_quantize", f"{tokens}x{inner}", "", seconds, size)
