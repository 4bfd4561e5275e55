"""Launch shapes tried within the step: a kernel's neighbours share the card with it, so the best
alone is often not the best there.

    PYTHONPATH=worker:shared python3 benchmarks/tune_step.py --out tune.csv \
        [--model qwen3-0.6b] [--rows 8,32,64] [--seconds 30] [--jobs 16]

For each number of decode rows it begins with what the engine has, and tries for each product and
for attention one candidate after another in the captured step, keeping what is faster by 0.2 %,
until nothing is or the seconds are over. Random weights and keys, 1,024 positions a row, bfloat16.
The jobs compile all candidates first, in processes beside each other.
"""

import argparse
import csv
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from decode_step import CONTEXT, Rows, make_runner
from forebay_worker.engine.card_inputs import StepShape
from forebay_worker.engine.card_runner import CardRunner
from forebay_worker.kernels import card
from forebay_worker.kernels.decode_attention import DecodeConfig, config_for
from forebay_worker.kernels.linear_table import ROWS, Choice
from forebay_worker.kernels.row_linear import RowConfig
from forebay_worker.kernels.small_linear import LinearConfig, make_scratch
from kernels import provenance
from offline import MODELS, numbers

REPLAYS, TIMES = 24, 3
GAIN = 0.998  # of the time before: less is noise
_TILES = ((64, 2, 3), (64, 2, 5), (64, 2, 7), (64, 4, 7), (32, 2, 5), (32, 2, 7), (128, 4, 5))
ATTENTION = [
    DecodeConfig(tile, warps, stages, programs)
    for tile, warps, stages in _TILES
    for programs in (132, 264, 528)
]
OF_ONE_ROW = [
    RowConfig(tile, deep, warps)
    for tile, deep, warps in ((8, 1024, 4), (8, 1024, 8), (8, 512, 4), (16, 1024, 4), (16, 1024, 8))
]
FEW = [
    LinearConfig(tile, deep, splits, num_warps=4, num_stages=stages)
    for tile, deep, stages in ((16, 64, 6), (16, 128, 6), (16, 256, 3), (32, 128, 4), (32, 128, 6))
    for splits in (1, 2, 4)
] + [
    LinearConfig(tile, deep, splits, num_warps=4, num_stages=stages)
    for tile, deep, stages in ((32, 256, 3), (64, 64, 6), (64, 128, 4), (64, 128, 6), (128, 64, 4))
    for splits in (1, 2, 4)
]
MANY = [
    LinearConfig(32, 64, 1, num_warps=4, num_stages=5),
    LinearConfig(32, 64, 1, num_warps=8, num_stages=4),
    LinearConfig(32, 128, 1, num_warps=4, num_stages=3),
    LinearConfig(64, 64, 1, num_warps=8, num_stages=5),
]

Shapes = dict[str, LinearConfig | RowConfig | DecodeConfig]
"""By product ("4096x1024") or "attention"; what is not there is as the engine has it."""


class Trial:
    """Steps of so many rows, with other launch shapes."""

    def __init__(self, runner: CardRunner, rows: int, context: int = CONTEXT) -> None:
        torch.manual_seed(1)
        made = Rows(runner)
        self._runner, self._rows = runner, rows
        self._plan = [made.make(context - 1, 1) for _ in range(rows)]
        self._products = runner._ops.products
        self._table = dict(self._products._choices)
        runner._inputs.clear()

    def candidates(self) -> Iterator[tuple[str, list[LinearConfig | RowConfig | DecodeConfig]]]:
        known = OF_ONE_ROW if self._rows == 1 else FEW if self._rows <= 64 else MANY
        for rows, k in self._shapes():
            yield f"{rows}x{k}", list(known)
        yield "attention", list(ATTENTION)

    def run(self, shapes: Shapes) -> None:
        """One step, launched kernel by kernel: compiles what it needs."""
        self._use(shapes)
        self._runner._inputs.clear()
        self._runner.execute(self._plan)

    def time(self, shapes: Shapes) -> float:
        """Milliseconds of a captured step."""
        self.run(shapes)
        steps, shape = self._runner._steps, StepShape(self._rows)
        arrays = steps._staging.tensors(shape.layout)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            steps._compute(shape, arrays)
        times: list[float] = []
        for _ in range(TIMES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / REPLAYS)
        return min(times)

    def _shapes(self) -> list[tuple[int, int]]:
        """Of the layers' products, [rows, columns] of the weight."""
        head = self._runner.vocab_size
        return sorted({shape for _, shape in self._table if shape[0] != head})

    def _use(self, shapes: Shapes) -> None:
        size = next(size for size in ROWS if self._rows <= size)
        self._products._choices = dict(self._table)
        for weight in self._shapes():
            config = shapes.get(f"{weight[0]}x{weight[1]}")
            if isinstance(config, LinearConfig):
                scratch = make_scratch(weight[0], config, self._runner._device)
                self._products._choices[size, torch.Size(weight)] = Choice(config, scratch)
            elif isinstance(config, RowConfig):
                self._products._choices[size, torch.Size(weight)] = Choice(config)
        attention = shapes.get("attention")
        own = attention if isinstance(attention, DecodeConfig) else None
        card.config_for = lambda rows, *, e4m3=False: own or config_for(rows, e4m3=e4m3)
        self._runner._ops._plans.clear()


def descend(trial: Trial, seconds: float) -> Iterator[tuple[Shapes, float]]:
    """Each better choice of shapes with its milliseconds, the first with what the engine has."""
    best: Shapes = {}
    least = trial.time(best)
    yield dict(best), least
    end, before = time.monotonic() + seconds, float("inf")
    while least < before * GAIN:
        before = least
        for name, candidates in trial.candidates():
            for each in candidates:
                if time.monotonic() > end:
                    return
                shapes = {**best, name: each}
                ms = _or_never(trial, shapes)
                if ms < least * GAIN:
                    best, least = shapes, ms
                    yield dict(best), least


def _or_never(trial: Trial, shapes: Shapes) -> float:
    try:
        return trial.time(shapes)
    except Exception as error:  # more shared memory than there is
        print("  not", shapes, str(error)[:80], flush=True)
        return float("inf")


def compile_all(model: str, rows: list[int], job: int, jobs: int) -> None:
    """This job's share of the candidates, of short contexts."""
    runner = make_runner(model, graphs=False, kv_cache_memory_bytes=2**31, max_model_len=4096)
    for count in rows:
        trial = Trial(runner, count, 16)
        todo = [(name, each) for name, known in trial.candidates() for each in known]
        for name, each in todo[job::jobs]:
            try:
                trial.run({name: each})
            except Exception as error:
                print("  not", name, each, str(error)[:80], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", required=True, help="CSV file to write")
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32, 64, 128])
    parser.add_argument("--seconds", type=float, default=30, help="for each number of rows")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile first")
    parser.add_argument("--job", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job >= 0:
        compile_all(args.model, args.rows, args.job, args.jobs)
        return
    started = [
        subprocess.Popen([sys.executable, *sys.argv, "--job", str(job)]) for job in range(args.jobs)
    ]
    for each in started:
        each.wait()
    runner = make_runner(args.model, graphs=False, kv_cache_memory_bytes=33 * 10**9)
    for cached in (runner._cache.keys, runner._cache.values):
        cached.normal_()
    source = provenance()
    with open(args.out, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "rows", "context", "ms_per_step", "shapes", *source])
        for rows in args.rows:
            for shapes, ms in descend(Trial(runner, rows), args.seconds):
                named = "; ".join(f"{name} {tuple(each)}" for name, each in shapes.items())
                row = [args.model, rows, CONTEXT, round(ms, 4), named]
                writer.writerow([*row, *source.values()])
                file.flush()
                print(args.model, rows, round(ms, 4), named or "as it is", flush=True)


if __name__ == "__main__":
    main()
