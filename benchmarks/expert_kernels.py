"""The kernels of a layer with experts on the card, for `kernels.py --kinds experts`.

Sizes of Qwen3-30B-A3B: 128 experts of 768, 8 for each of the rows, which choose at random.

Few rows are bound by the bytes of the experts chosen, many by arithmetic. A launch has choices of
its own, so that it finds other experts in the cache than it needs.
"""

from collections.abc import Iterator
from functools import partial

import torch
from forebay_worker.kernels import fp8
from forebay_worker.kernels.expert_linear import (
    ExpertConfig,
    combine,
    config_for,
    experts_down,
    experts_gate_up,
)
from forebay_worker.kernels.fp8 import Fp8, Numbers
from forebay_worker.kernels.routing import Routing, route
from kernels import BF16, DEVICE, Launch, Peak, Row, time_launches

EXPERTS, PER_TOKEN, HIDDEN, INNER = 128, 8, 2048, 768
ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 8192)
SWEEP = [
    ExpertConfig(16, 32, 128, 4, 5),
    ExpertConfig(16, 64, 128, 4, 3),
    ExpertConfig(16, 64, 128, 4, 4),
    ExpertConfig(16, 64, 256, 4, 3),
    ExpertConfig(16, 64, 256, 8, 3),
    ExpertConfig(16, 128, 64, 4, 4),
    ExpertConfig(16, 128, 128, 4, 3),
    ExpertConfig(16, 128, 128, 8, 4),
    ExpertConfig(32, 64, 128, 4, 4),
    ExpertConfig(32, 128, 64, 4, 4),
    ExpertConfig(32, 128, 128, 4, 3),
    ExpertConfig(32, 128, 128, 8, 3),
    ExpertConfig(64, 64, 64, 4, 4),
    ExpertConfig(64, 64, 128, 4, 3),
    ExpertConfig(64, 128, 64, 4, 3),
    ExpertConfig(64, 128, 64, 4, 4),
    ExpertConfig(64, 128, 64, 8, 4),
    ExpertConfig(64, 128, 128, 8, 3),
    ExpertConfig(64, 256, 64, 8, 3),
    ExpertConfig(128, 64, 64, 4, 4),
    ExpertConfig(128, 128, 64, 4, 3),
    ExpertConfig(128, 128, 64, 8, 3),
    ExpertConfig(128, 128, 64, 8, 4),
    ExpertConfig(128, 256, 64, 8, 3),
    ExpertConfig(128, 256, 64, 8, 4),
]


def bench_experts(peak: Peak, sweep: bool) -> Iterator[Row]:
    gate_up, down = (
        torch.randn(EXPERTS, *shape, device=DEVICE, dtype=BF16) * shape[1] ** -0.5
        for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    for kind, weights in (("", (gate_up, down)), (" e4m3", (e4m3(gate_up), e4m3(down)))):
        yield from bench_kind(peak, kind, *weights, sweep=sweep)


def e4m3(weight: torch.Tensor) -> Fp8:
    values, scale = fp8.quantize(weight.flatten(0, 1))
    return Fp8(values.view(weight.shape), scale)


def bench_kind(
    peak: Peak, kind: str, gate_up: Numbers, down: Numbers, *, sweep: bool
) -> Iterator[Row]:
    for rows in ROWS:
        every = torch.randn(8, rows, EXPERTS, device=DEVICE, dtype=BF16)
        chosen = config_for(rows * PER_TOKEN, EXPERTS, BF16.itemsize)
        for config in _worth_a_try(rows) if sweep else [chosen]:
            routings = [route(logits, PER_TOKEN, True, config.tile_m) for logits in every]
            yield from bench_products(peak, kind, gate_up, down, routings, config)
        if not sweep and not kind:
            yield from bench_rest(peak, rows, list(every), chosen.tile_m)


def _worth_a_try(rows: int) -> list[ExpertConfig]:
    """Tiles from half to four times as tall as an expert has rows."""
    mean = min(128, max(8, rows * PER_TOKEN // EXPERTS))
    return [config for config in SWEEP if mean <= 2 * config.tile_m <= 8 * mean]


def bench_products(
    peak: Peak,
    kind: str,
    gate_up: Numbers,
    down: Numbers,
    routings: list[Routing],
    config: ExpertConfig,
) -> Iterator[Row]:
    """One after the other, each with the routings in turns."""
    rows = len(routings[0].chosen)
    x = torch.randn(rows, HIDDEN, device=DEVICE, dtype=BF16)
    gated = torch.randn(rows * PER_TOKEN, INNER, device=DEVICE, dtype=BF16)
    touched = sum(len(each.chosen.unique()) for each in routings) / len(routings)
    for name, product, inputs, weight in (
        ("experts_gate_up", experts_gate_up, x, gate_up),
        ("experts_down", experts_down, gated, down),
    ):
        launches: list[Launch] = [
            partial(product, inputs, weight, routing, config) for routing in routings
        ]
        values = weight.values if isinstance(weight, Fp8) else weight
        each = values[0].numel()
        size = values.itemsize * touched * each + 2 * rows * PER_TOKEN * (HIDDEN + INNER)
        flops = 2.0 * rows * PER_TOKEN * each
        shape = f"{rows} rows, {touched:.0f} experts"
        yield peak.row(name + kind, shape, config, time_launches(launches), size, flops)


def bench_rest(peak: Peak, rows: int, every: list[torch.Tensor], tile: int) -> Iterator[Row]:
    seconds = time_launches([partial(route, logits, PER_TOKEN, True, tile) for logits in every])
    yield peak.row("route", f"{rows} rows", tile, seconds, 2 * rows * EXPERTS)
    routing = route(every[0], PER_TOKEN, True, tile)
    residual = torch.randn(rows, HIDDEN, device=DEVICE, dtype=BF16)
    parts = torch.randn(rows * PER_TOKEN, HIDDEN, device=DEVICE, dtype=BF16)
    seconds = time_launches([partial(combine, residual, parts, routing, EXPERTS)] * 8)
    size = 2 * (PER_TOKEN + 2) * residual.numel()
    yield peak.row("combine", f"{rows} rows", "", seconds, size)
