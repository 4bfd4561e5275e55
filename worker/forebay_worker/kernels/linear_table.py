"""Which product a layer takes for how many rows: cuBLAS's or an own one, as measured here.

cuBLAS loses where a weight is narrow and rows are few (2,048 -> 1,024 at one row on an H200: 11.8
against 3.9 us), and wins for most others beyond 64 rows: there an own product is tried only where
its tiles are one wave. The table is filled once at start-up, by a graph over all weights of a
shape, so that no weight is measured out of the cache.

An e4m3 weight is not measured: what its product with more rows rounds, that with few does not, and
a model's answers are not to depend on a measurement. Up to 128 rows it is `small_linear`: cuBLAS
took 36 us for 12,288 -> 4,096 at 64 rows, three times what the bytes do. It knows shapes and times,
not layers.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn import functional

from forebay_worker.kernels.fp8 import FEW_ROWS, Fp8, Numbers
from forebay_worker.kernels.row_linear import RowConfig, row_linear
from forebay_worker.kernels.small_linear import (
    MOST_E4M3_ROWS,
    MOST_ROWS,
    Around,
    LinearConfig,
    LinearScratch,
    make_scratch,
    small_linear,
)

ROWS = (1, 16, 32, 64, 128, 256)  # a size stands for those below it, down to the one before
_PROGRAMS = 128  # about one per multiprocessor
_MULTIPROCESSORS = 132
_LAUNCH_US = 5.0
"""What an own kernel saves beside its own time: some 2.5 us of a launch, the norm, gate or sum on
the way, and that those after it are on the card early. At 32 rows 1,024 -> 6,144 alone is more than
2.5 us slower than cuBLAS's, and a step of 28 layers is 0.06 ms shorter with it."""
_MOST_BYTES = 1e9  # of one shape's weights: twenty times the L2 cache of an H200
_REPLAYS = 5


class Choice(NamedTuple):
    """An own product and how it is launched: `row_linear` has no scratch, `small_linear` has."""

    config: LinearConfig | RowConfig
    scratch: LinearScratch | None = None

    def multiply(
        self,
        x: Numbers,
        weight: Numbers,
        out: Tensor,
        **around: Unpack[Around],
    ) -> Tensor:
        """x @ weight^T into `out`, with what stands before and after it."""
        if isinstance(self.config, RowConfig):
            assert not isinstance(x, Fp8)
            return row_linear(x, weight, out, self.config, **around)
        assert self.scratch is not None
        return small_linear(x, weight, out, self.scratch, self.config, **around)


class LinearTable:
    """Empty, and so always cuBLAS, until `measure`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._choices: dict[tuple[int, torch.Size], Choice] = {}
        self._of_fp8: dict[tuple[torch.Size, bool], Choice] = {}

    def find(self, rows: int, weight: Numbers) -> Choice | None:
        """How to multiply `rows` rows by `weight` [N, K]; None: by cuBLAS."""
        if isinstance(weight, Fp8):
            if rows == 1 and len(weight.scale) == 1:
                return Choice(RowConfig())
            return self._find_fp8(weight, both=False) if rows <= FEW_ROWS else None
        if rows > ROWS[-1]:
            return None
        size = next(size for size in ROWS if rows <= size)
        return self._choices.get((size, weight.shape))

    def find_e4m3(self, rows: int, weight: Fp8) -> Choice | None:
        """The same for rows that are e4m3 themselves."""
        columns, grouped = len(weight), len(weight.scale) > 1
        if not grouped and rows > MOST_ROWS and columns // 64 > _PROGRAMS:
            return None  # 4,096 -> 24,576 at 128 rows: 43 us, and 37 by cuBLAS
        return self._find_fp8(weight, both=True) if rows <= MOST_E4M3_ROWS else None

    def _find_fp8(self, weight: Fp8, *, both: bool) -> Choice:
        """Made when it is first asked for; a graph goes on using its memory."""
        shape, columns = weight.values.shape, len(weight)
        choice = self._of_fp8.get((shape, both))
        if choice is None:
            grouped = len(weight.scale) > 1
            config = _e4m3_config(columns, grouped=grouped) if both else _widened_config(*shape)
            rows = MOST_E4M3_ROWS if both else MOST_ROWS
            choice = Choice(config, make_scratch(columns, config, self._device, rows))
            self._of_fp8[shape, both] = choice
        return choice

    def measure(self, weights: Iterable[Tensor], most_rows: int) -> None:
        """Chooses for each shape of the 16-bit matrices `weights`, which are all of a model's."""
        by_shape: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
        for weight in weights:
            if weight.itemsize == 2:  # tiles of float32 would not fit
                by_shape[weight.shape].append(weight)
        for shape, alike in by_shape.items():
            count = max(1, int(_MOST_BYTES) // alike[0].nbytes)
            for below, rows in pairwise((0, *ROWS)):
                if below < most_rows:
                    self._choose(rows, shape, alike[:count])

    def _choose(self, rows: int, shape: torch.Size, weights: list[Tensor]) -> None:
        choice = self._own(rows, shape)
        if choice is None:
            return
        x = torch.randn((rows, shape[1]), dtype=weights[0].dtype, device=self._device)
        out = torch.empty((rows, shape[0]), dtype=x.dtype, device=self._device)
        own = _seconds(lambda each: choice.multiply(x, each, out), weights)
        theirs = _seconds(lambda each: functional.linear(x, each), weights)
        if own < theirs + _LAUNCH_US * 1e-6:
            self._choices[rows, shape] = choice

    def _own(self, rows: int, shape: torch.Size) -> Choice | None:
        if rows == 1:
            return Choice(RowConfig())
        config = _config(rows, *shape) if rows <= MOST_ROWS else _config_of_many(rows, shape[0])
        return config and Choice(config, make_scratch(shape[0], config, self._device))

    def __str__(self) -> str:
        return ", ".join(f"{rows}x{k}->{n}" for rows, (n, k) in sorted(self._choices))


def _config(rows: int, columns: int, depth: int) -> LinearConfig:
    """For up to 64 rows: the best of nine to eleven for each weight of Qwen3 0.6B and 8B at 8, 32
    and 64 rows, tried one after another within the step on an H200, as a rule.

    A launch counts by how it stands beside its neighbours, which are on the card with it: what was
    the best alone makes a step of 32 rows of the 0.6B 2.17 ms long instead of 1.79.
    """
    if columns <= 2048:
        tile, deep, splits, stages = (32, 256, 4, 3) if depth > 2048 else (16, 64, 4, 6)
    elif columns <= 4096:
        tile, deep, splits, stages = 32, 128, 1, 6
        if depth > 8192 and rows <= 32:
            tile, splits = (64, 4) if rows <= 16 else (32, 2)
        elif depth > 8192:
            tile, splits, stages = 64, 2, 4
    elif depth <= 1024:
        tile, deep, splits, stages = 64, 128, 1, 4
    elif columns <= 8192:
        tile, deep, splits, stages = (64, 128, 4, 4) if rows <= 32 else (32, 128, 1, 4)
    else:
        tile, deep, splits, stages = (64, 64, 1, 6) if rows <= 16 else (64, 128, 1, 4)
        if rows > 32:
            tile, deep = 128, 64
    return LinearConfig(tile, deep, splits, num_warps=4, num_stages=stages)


def _config_of_many(rows: int, columns: int) -> LinearConfig | None:
    """For 65 to 256 rows, where one wave fills the card: the best of eight for 1,024 -> 4,096. With
    it the rotation and attention that follow are on the card in time: 4.72 -> 4.62 ms at 128
    rows, 8.32 -> 8.22 at 256."""
    if not _PROGRAMS <= columns / 32 <= _MULTIPROCESSORS:
        return None
    if rows <= 128:
        return LinearConfig(32, 128, 1, num_warps=4, num_stages=3)
    return LinearConfig(32, 64, 1, num_warps=8, num_stages=4)


def _widened_config(columns: int, depth: int) -> LinearConfig:
    """For a weight of e4m3 and up to 16 rows of 16 bits. Wide tiles where there are enough of them;
    a deep weight takes twice as many programs."""
    tile = 64 if columns >= 6144 or depth > 8192 else 32
    wanted = _PROGRAMS * (2 if depth >= 4096 else 1)
    splits = max(1, min(4, wanted // -(-columns // tile)))
    return LinearConfig(tile_n=tile, tile_k=128, splits=splits, num_warps=4, num_stages=4)


def _e4m3_config(columns: int, *, grouped: bool) -> LinearConfig:
    """For e4m3 on both sides: the best of 24 at 64 and 128 rows of Qwen3-8B on an H200, as a rule.
    Scales by groups cost each program time, so they take twice as many."""
    tiles = -(-columns // 64)
    if tiles > 2 * _PROGRAMS:
        return LinearConfig(tile_n=64, tile_k=128, splits=1, num_warps=4, num_stages=4)
    splits = max(1, min(4, _PROGRAMS * (2 if grouped else 1) // tiles))
    return LinearConfig(tile_n=64, tile_k=128, splits=splits, num_warps=8, num_stages=5)


def _seconds(product: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    """Of one product, in a graph of one per weight; the best of five replays."""
    for weight in weights[:1]:
        product(weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(weight)
    times: list[float] = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times) / len(weights)
