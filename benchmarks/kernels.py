"""Each Triton kernel on the card: time, bytes/s or flop/s, and the share of the measured peak.

    PYTHONPATH=worker:shared python3 benchmarks/kernels.py --out kernels.csv [--kinds decode,fp8]
    … --sweep: every tile shape worth a try, instead of the defaults, of attention, fp8 and experts

Inputs are random. A measurement is one CUDA graph of many launches over rotating inputs of 256 MB
(64 sets at most), so that neither launches nor 60 MB of L2 colour it; the median of 20 replays.
"""

import argparse
import csv
import itertools
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
import triton
from forebay_worker.kernels.decode_attention import (
    DecodeConfig,
    make_plan,
    paged_decode_attention,
    plan_decode,
)
from forebay_worker.kernels.fp8 import E4M3
from forebay_worker.kernels.norm_rope_store import norm_rope_store
from forebay_worker.kernels.prefill_attention import (
    DEFAULT_E4M3,
    PrefillConfig,
    paged_prefill_attention,
)
from forebay_worker.kernels.rms_norm import rms_norm
from forebay_worker.kernels.row_linear import RowConfig, row_linear
from forebay_worker.kernels.sampling import SamplingRows, make_scratch, sample
from forebay_worker.kernels.silu_mul import silu_mul
from forebay_worker.kernels.small_linear import LinearConfig, small_linear
from forebay_worker.kernels.small_linear import make_scratch as make_linear_scratch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

BF16 = torch.bfloat16
DEVICE = torch.device("cuda")
ROTATE_BYTES = 256e6
Launch = Callable[[], object]


@dataclass
class Row:
    """One measurement; `share` is the larger of the shares of the peak rates."""

    kernel: str
    shape: str
    config: str
    us: float
    tb_s: float
    tflop_s: float
    share: float


@dataclass
class Peak:
    """Measured ceilings of the card: device copy in bytes/s, bf16 product in flop/s."""

    bytes_s: float = 1.0
    flop_s: float = 1.0

    def row(
        self, kernel: str, shape: str, config: object, seconds: float, size: float, flops: float = 0
    ) -> Row:
        byte_rate, flop_rate = size / seconds, flops / seconds
        share = max(byte_rate / self.bytes_s, flop_rate / self.flop_s)
        label = "-".join(str(part) for part in config) if isinstance(config, tuple) else str(config)
        return Row(
            kernel,
            shape,
            label,
            round(seconds * 1e6, 2),
            round(byte_rate / 1e12, 3),
            round(flop_rate / 1e12, 1),
            round(share, 3),
        )


def time_launches(launches: list[Launch]) -> float:
    """Seconds per launch of `launches` one after another in one graph."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the inputs came from another stream
    with torch.cuda.stream(stream):
        for launch in launches[:2]:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times) / len(launches)


def copies(size: float) -> int:
    """Input sets to rotate among, of `size` bytes each."""
    return max(2, min(64, round(ROTATE_BYTES / size)))


def measure_peak() -> Peak:
    """A copy of 8.6 GB and a product of 8,192 cubed, the best of what torch offers."""
    source = torch.randn(2**31, device=DEVICE, dtype=BF16)
    target = torch.empty_like(source)
    copy = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    a, b = torch.randn(2, 8192, 8192, device=DEVICE, dtype=BF16)
    product = triton.testing.do_bench(lambda: a @ b, return_mode="median")
    return Peak(4 * source.numel() / copy * 1e3, 2 * 8192**3 / product * 1e3)


def make_cache(
    kv_lens: list[int],
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = BF16,
) -> tuple[Tensor, Tensor, Tensor]:
    """K and V caches and shuffled block tables that hold `kv_lens`."""
    counts = [triton.cdiv(length, block_size) for length in kv_lens]
    shape = (sum(counts), block_size, kv_heads, head_dim)
    k, v = (torch.randn(shape, device=DEVICE, dtype=BF16).to(dtype) for _ in range(2))
    blocks = torch.randperm(sum(counts), device=DEVICE, dtype=torch.int32)
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=DEVICE)
    for row, part in enumerate(blocks.split(counts)):
        tables[row, : len(part)] = part
    return k, v, tables


DECODE_SWEEP = [
    DecodeConfig(tile, warps, stages, programs)
    for tile, warps, stages in [
        (32, 2, 5),
        (32, 4, 7),
        (64, 2, 5),
        (64, 4, 3),
        (64, 4, 5),
        (64, 4, 7),
        (64, 8, 5),
        (128, 4, 3),
        (128, 4, 5),
        (128, 8, 3),
        (128, 8, 5),
    ]
    for programs in (264, 528)
]


def scales_of(kv_heads: int, dtype: torch.dtype) -> Tensor | None:
    return torch.ones(2, kv_heads, device=DEVICE) if dtype == E4M3 else None


def bench_decode(
    peak: Peak, configs: list[DecodeConfig], dtype: torch.dtype = BF16
) -> Iterator[Row]:
    batches = [[1024] * rows for rows in (1, 8, 32, 64, 128, 256)]
    batches += [[4096] * 32, [32768] + [1024] * 31]
    for (heads, kv_heads), lens in itertools.product([(16, 8), (32, 8)], batches):
        size = 2 * dtype.itemsize * sum(lens) * kv_heads * 128
        sets = [make_cache(lens, kv_heads, 128, 128, dtype) for _ in range(copies(size))]
        scales = scales_of(kv_heads, dtype)
        q = torch.randn(len(lens), heads, 128, device=DEVICE, dtype=BF16)
        out = torch.empty_like(q)
        kv_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        for config in configs:
            plan = make_plan(len(lens), kv_heads, heads // kv_heads, 128, DEVICE, config)
            plan_decode(plan, kv_lens)
            launches: list[Launch] = [
                partial(
                    paged_decode_attention,
                    *(q, k, v, t, kv_lens, plan, 128**-0.5, out),
                    kv_scales=scales,
                )
                for k, v, t in sets
            ]
            name = f"{len(lens)}x{lens[-1]}" + (f"+{lens[0]}" if lens[0] != lens[-1] else "")
            kind = "decode" if scales is None else "decode e4m3"
            shape = f"{heads}/{kv_heads} {name}"
            yield peak.row(kind, shape, config, time_launches(launches), size)
        del sets


PREFILL_SWEEP = [
    PrefillConfig(128, 64, 8, 3, True),
    PrefillConfig(128, 64, 8, 5, True),
    PrefillConfig(128, 64, 8, 3, False),
    PrefillConfig(128, 64, 8, 5, False),
    PrefillConfig(128, 128, 8, 3, True),
    PrefillConfig(128, 128, 8, 2, False),
    PrefillConfig(128, 64, 4, 5, True),
    PrefillConfig(64, 64, 4, 3, True),
    PrefillConfig(64, 128, 4, 3, True),
    PrefillConfig(64, 128, 4, 5, True),
    PrefillConfig(256, 64, 8, 3, True),
    PrefillConfig(256, 64, 16, 3, True),
]


def bench_prefill(
    peak: Peak, configs: list[PrefillConfig], dtype: torch.dtype = BF16
) -> Iterator[Row]:
    cases = [(1, 8192, 0), (1, 2048, 0), (8, 2048, 0), (1, 2048, 6144), (16, 128, 0)]
    for (heads, kv_heads), (rows, chunk, prefix) in itertools.product([(16, 8), (32, 8)], cases):
        lens = [chunk + prefix] * rows
        k, v, tables = make_cache(lens, kv_heads, 128, 128, dtype)
        scales = scales_of(kv_heads, dtype)
        q = torch.randn(rows * chunk, heads, 128, device=DEVICE, dtype=BF16)
        out = torch.empty_like(q)
        kv_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * chunk
        pairs = rows * (chunk * prefix + chunk * (chunk + 1) / 2)
        flops = 4 * 128 * heads * pairs
        size = 4 * q.numel() + 2 * dtype.itemsize * sum(lens) * kv_heads * 128
        shape = f"{heads}/{kv_heads} {rows}x{chunk}" + (f" after {prefix}" if prefix else "")
        for config in configs:
            launch = partial(
                paged_prefill_attention,
                *(q, k, v, tables, kv_lens, starts, 128**-0.5, out, config, scales),
            )
            kind = "prefill" if scales is None else "prefill e4m3"
            yield peak.row(kind, shape, config, time_launches([launch] * 4), size, flops)
        if not prefix and dtype == BF16:
            yield from bench_sdpa(peak, rows, chunk, heads, kv_heads, shape, size, flops)


def bench_sdpa(
    peak: Peak,
    rows: int,
    chunk: int,
    heads: int,
    kv_heads: int,
    shape: str,
    size: float,
    flops: float,
) -> Iterator[Row]:
    """torch's own attention over contiguous, unpaged K and V, for comparison."""
    q = torch.randn(rows, heads, chunk, 128, device=DEVICE, dtype=BF16)
    k, v = torch.randn(2, rows, kv_heads, chunk, 128, device=DEVICE, dtype=BF16)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            seconds = time_launches(
                [
                    partial(
                        functional.scaled_dot_product_attention,
                        q,
                        k,
                        v,
                        is_causal=True,
                        enable_gqa=True,
                    )
                ]
                * 4
            )
        yield peak.row("sdpa", shape, backend.name, seconds, size, flops)


def bench_layers(peak: Peak) -> Iterator[Row]:
    for (hidden, inner, heads), tokens in itertools.product(
        [(1024, 3072, 16), (4096, 12288, 32)], [1, 64, 256, 8192]
    ):
        weight = torch.rand(hidden, device=DEVICE, dtype=BF16)
        size = 4 * tokens * hidden
        each = [torch.randn(tokens, hidden, device=DEVICE, dtype=BF16) for _ in range(copies(size))]
        seconds = time_launches([partial(rms_norm, x, weight, 1e-6, out=x) for x in each])
        yield peak.row("rms_norm", f"{tokens}x{hidden}", "", seconds, size)
        size = 6 * tokens * inner
        both = [
            torch.randn(tokens, 2 * inner, device=DEVICE, dtype=BF16) for _ in range(copies(size))
        ]
        out = torch.empty(tokens, inner, device=DEVICE, dtype=BF16)
        seconds = time_launches([partial(silu_mul, x, out) for x in both])
        yield peak.row("silu_mul", f"{tokens}x{inner}", "", seconds, size)
        yield bench_rope(peak, tokens, heads)


def bench_rope(peak: Peak, tokens: int, heads: int) -> Row:
    k, v, _ = make_cache([max(tokens, 1024)], 8, 128, 128)
    positions = torch.arange(tokens, device=DEVICE)
    slots = torch.randperm(max(tokens, 1024), device=DEVICE)[:tokens]
    cos_sin = torch.rand(8192, 128, device=DEVICE)
    norm = (torch.rand(128, device=DEVICE, dtype=BF16), torch.rand(128, device=DEVICE, dtype=BF16))
    size = 4 * tokens * (heads + 16) * 128 + tokens * 512
    qkv = [
        torch.randn(tokens, (heads + 16) * 128, device=DEVICE, dtype=BF16)
        for _ in range(copies(size))
    ]
    seconds = time_launches(
        [
            partial(norm_rope_store, x, k, v, positions, slots, cos_sin, heads, (*norm, 1e-6))
            for x in qkv
        ]
    )
    return peak.row("norm_rope_store", f"{tokens}x{heads}/8", "", seconds, size)


def bench_sampling(peak: Peak) -> Iterator[Row]:
    vocab = 151_936
    modes = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature": (0.6, 0, 1.0, 0.0),
        "top_p": (0.6, 0, 0.95, 0.0),
        "top_k+top_p": (0.6, 20, 0.95, 0.0),
    }
    for rows in (1, 8, 64, 256):
        size = 2 * rows * vocab
        logits = [
            3 * torch.randn(rows, vocab, device=DEVICE, dtype=BF16) for _ in range(copies(size))
        ]
        tokens = torch.empty(rows, dtype=torch.int64, device=DEVICE)
        corrupt = torch.empty(rows, dtype=torch.int32, device=DEVICE)
        scratch = make_scratch(rows, DEVICE)
        for name, (heat, top_k, top_p, min_p) in modes.items():
            params = SamplingRows(
                torch.full((rows,), heat, device=DEVICE),
                torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE),
                torch.full((rows,), top_p, device=DEVICE),
                torch.full((rows,), min_p, device=DEVICE),
                torch.arange(rows, device=DEVICE),
                torch.arange(rows, device=DEVICE),
            )
            seconds = time_launches(
                [partial(sample, x, params, scratch, tokens, corrupt) for x in logits]
            )
            yield peak.row("sample", f"{rows}x{vocab}", name, seconds, size)


LINEARS = {
    (4096, 1024): LinearConfig(32, 128, 1, 4, 4),
    (1024, 2048): LinearConfig(32, 128, 4, 4, 4),
    (6144, 1024): LinearConfig(64, 128, 1, 4, 4),
    (1024, 3072): LinearConfig(32, 128, 4, 4, 4),
    (6144, 4096): LinearConfig(32, 128, 2, 4, 4),
    (4096, 4096): LinearConfig(32, 128, 2, 4, 4),
    (24576, 4096): LinearConfig(64, 128, 1, 4, 4),
    (4096, 12288): LinearConfig(64, 128, 4, 4, 4),
}


def bench_linears(peak: Peak) -> Iterator[Row]:
    """The decode step's products with few rows: own kernel and cuBLAS."""
    for (columns, depth), config in LINEARS.items():
        size = 2 * columns * depth
        weights = [
            torch.randn(columns, depth, device=DEVICE, dtype=BF16) for _ in range(copies(size))
        ]
        scratch = make_linear_scratch(columns, config, DEVICE)
        for rows in (1, 8, 32, 64):
            x = torch.randn(rows, depth, device=DEVICE, dtype=BF16)
            out = torch.empty(rows, columns, device=DEVICE, dtype=BF16)
            shape = f"{rows}x{depth}->{columns}"
            seconds = time_launches(
                [partial(small_linear, x, w, out, scratch, config) for w in weights]
            )
            yield peak.row("small_linear", shape, config, seconds, size)
            if rows == 1:
                own = RowConfig()
                seconds = time_launches([partial(row_linear, x, w, out, own) for w in weights])
                yield peak.row("row_linear", shape, own, seconds, size)
            seconds = time_launches([partial(functional.linear, x, w) for w in weights])
            yield peak.row("cublas", shape, "", seconds, size)


def provenance() -> dict[str, str]:
    def ask(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return {
        "card": torch.cuda.get_device_name(),
        "driver": ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": os.environ.get("COMMIT") or ask("git", "rev-parse", "--short", "HEAD"),
    }


def bench_fp8(peak: Peak, sweep: bool) -> Iterator[Row]:
    import fp8_kernels

    yield from fp8_kernels.bench_few(peak, sweep)
    yield from fp8_kernels.bench_more(peak, sweep)
    yield from fp8_kernels.bench_many(peak, sweep)
    if not sweep:
        yield from fp8_kernels.bench_quantize(peak)
    yield from bench_decode(peak, DECODE_SWEEP if sweep else [DecodeConfig()], E4M3)
    yield from bench_prefill(peak, PREFILL_SWEEP if sweep else [DEFAULT_E4M3], E4M3)


def bench_experts(peak: Peak, sweep: bool) -> Iterator[Row]:
    import expert_kernels

    yield from expert_kernels.bench_experts(peak, sweep)


def main() -> None:
    kinds = "layers,linears,sampling,prefill,decode,fp8,experts"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True, help="CSV file to write")
    parser.add_argument("--kinds", default=kinds, help="which, of those of the default")
    parser.add_argument("--sweep", action="store_true", help="try every tile shape")
    args = parser.parse_args()
    torch.manual_seed(0)
    peak = measure_peak()
    print(f"peak: {peak.bytes_s / 1e12:.2f} TB/s, {peak.flop_s / 1e12:.0f} TFLOP/s", flush=True)
    every: dict[str, Callable[[], Iterator[Row]]] = {
        "layers": partial(bench_layers, peak),
        "linears": partial(bench_linears, peak),
        "sampling": partial(bench_sampling, peak),
        "prefill": partial(bench_prefill, peak, PREFILL_SWEEP if args.sweep else [PrefillConfig()]),
        "decode": partial(bench_decode, peak, DECODE_SWEEP if args.sweep else [DecodeConfig()]),
        "fp8": partial(bench_fp8, peak, args.sweep),
        "experts": partial(bench_experts, peak, args.sweep),
    }
    rows = itertools.chain.from_iterable(every[kind]() for kind in args.kinds.split(","))
    source = provenance()
    with open(args.out, "w", newline="") as file:
        writer = csv.DictWriter(file, [*Row.__dataclass_fields__, *source])
        writer.writeheader()
        for row in rows:
            writer.writerow(asdict(row) | source)
            file.flush()
            print(*asdict(row).values(), flush=True)


if __name__ == "__main__":
    main()
