"""A step on the card alone: the captured graphs' time without any host work, and time by kernel.

    PYTHONPATH=worker:shared python3 benchmarks/decode_step.py --out decode_step.csv \
        [--model qwen3-0.6b] [--rows 1,8,32] [--prefill 128,2048] [--profile 1,256]
        [--quantization fp8] [--kv-cache-dtype fp8] [--adapters 4] [--rank 16]

Random weights of the real shape in bfloat16 unless said, greedy, 1,024 positions per decode row:
milliseconds per replay, the best of three times 64. With `--adapters` every row has one, in turns.
"""

import argparse
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_worker.engine.batch import ScheduledRow
from forebay_worker.engine.card_runner import CardRunner
from forebay_worker.engine.sequence import Sequence
from forebay_worker.models.config import ModelConfig
from forebay_worker.models.decoder import adaptable
from forebay_worker.models.registry import read_config
from kernels import provenance
from offline import MODELS, numbers
from safetensors.torch import save_file

CONTEXT, REPLAYS = 1024, 64


def make_runner(
    model: str, graphs: bool = True, adapters: int = 0, rank: int = 16, **kinds: Any
) -> CardRunner:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        (home / "config.json").write_text(json.dumps(MODELS[model]))
        paths = {str(number): home / str(number) for number in range(adapters)}
        for path in paths.values():
            make_adapter(read_config(home), path, rank)
        settings = WorkerSettings(
            device="cuda",
            load_format="dummy",
            max_num_batched_tokens=8192,
            max_lora_rank=rank,
            **kinds,
        )
        return CardRunner(home, settings, graphs=graphs, adapters=paths)


def make_adapter(config: ModelConfig, directory: Path, rank: int) -> None:
    """A random adapter of all products, as PEFT writes it."""
    tensors: dict[str, torch.Tensor] = {}
    for each in adaptable(config):
        for part, size in zip(each.parts, each.sizes, strict=True):
            module = "base_model.model." + part.removesuffix(".weight")
            a, b = torch.randn(rank, each.columns), torch.randn(size, rank)
            tensors[f"{module}.lora_A.weight"] = (a / each.columns**0.5).bfloat16()
            tensors[f"{module}.lora_B.weight"] = (b / rank**0.5 / 8).bfloat16()
    directory.mkdir()
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(said))
    save_file(tensors, directory / "adapter_model.safetensors")


class Rows:
    """Sequences on blocks of their own."""

    def __init__(self, runner: CardRunner, adapters: int = 0) -> None:
        self._runner = runner
        self._adapters = adapters
        self._made = 0
        self._blocks = torch.randperm(runner.num_blocks).tolist()
        self._used = 0

    def make(self, computed: int, new: int) -> ScheduledRow:
        tokens = torch.randint(10, 49_000, (computed + new,)).tolist()
        need = -(-len(tokens) // self._runner.block_size)
        blocks = self._blocks[self._used : self._used + need]
        self._used += need
        sequence = Sequence(
            request_id=str(self._used), attempt=1, gateway="", index=0, token_ids=tokens,
            num_prompt=len(tokens), sampling=SamplingParams(temperature=0), seed=self._used,
            limit=10**6, stop_ids=frozenset(), block_table=blocks, num_computed=computed,
            adapter=self._made % self._adapters if self._adapters else -1,
        )  # fmt: skip
        self._made += 1
        return ScheduledRow(sequence, new, True)


def measure(runner: CardRunner, decodes: int, prefill: int, adapters: int = 0) -> float:
    """Milliseconds per step of `decodes` rows and one prompt of `prefill` tokens."""
    rows = Rows(runner, adapters)
    plan = [rows.make(CONTEXT - 1, 1) for _ in range(decodes)]
    plan += [rows.make(0, prefill)] if prefill else []
    runner.execute(plan)
    chunks, adapted = 1 if prefill else 0, adapters > 0
    shape = runner._steps.shape(decodes, prefill, chunks, adapted=adapted)
    arrays = runner._inputs.arrays
    run = runner._steps.run
    if shape in runner._steps._graphs:
        _, replay = runner._steps._graphs[shape]
    else:
        replay = lambda: run(shape, arrays)  # noqa: E731
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / REPLAYS)
    return min(times)


@torch.inference_mode()
def profile(runner: CardRunner, decodes: int) -> None:
    """Time by kernel of one replay, over eight of them."""
    runner.execute([Rows(runner).make(CONTEXT - 1, 1) for _ in range(1)])
    rows = Rows(runner)
    runner.execute([rows.make(CONTEXT - 1, 1) for _ in range(decodes)])
    _, replay = runner._steps._graphs[runner._steps.shape(decodes, 0, 0)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(8):
            replay()
        torch.cuda.synchronize()
    total = sum(each.self_device_time_total for each in trace.key_averages())
    print(f"-- {decodes} rows, us of kernels: {total / 8:.0f}")
    table = sorted(trace.key_averages(), key=lambda each: -each.self_device_time_total)
    for each in table[:14]:
        us, count = each.self_device_time_total, each.count
        print(f"{us / 8:9.1f} {count // 8:4d} {us / count:8.2f} {each.key[:80]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True, help="CSV file to write")
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--prefill", type=numbers, default=[128, 512, 2048])
    parser.add_argument("--profile", type=numbers, default=[], help="print time by kernel")
    parser.add_argument("--quantization", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    args = parser.parse_args()
    torch.manual_seed(0)
    kinds = {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    source = kinds | {"adapters": args.adapters, "rank": args.rank} | provenance()
    runner = make_runner(args.model, adapters=args.adapters, rank=args.rank, **kinds)
    with open(args.out, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "rows", "prefill", "context", "ms_per_step", *source])
        cases = [(rows, 0) for rows in args.rows] + [(0, each) for each in args.prefill]
        cases += [(rows, 128) for rows in (32, 256) if args.prefill]
        for rows, prefill in cases:
            ms = measure(runner, rows, prefill, args.adapters)
            writer.writerow([args.model, rows, prefill, CONTEXT, round(ms, 3), *source.values()])
            print(args.model, rows, prefill, round(ms, 3), flush=True)
    for rows in args.profile:
        profile(runner, rows)


if __name__ == "__main__":
    main()
