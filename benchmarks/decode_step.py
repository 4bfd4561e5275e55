"""A whole decode step as one CUDA graph: preparation, layers, head, sampling and feedback.

    PYTHONPATH=worker:shared python3 benchmarks/decode_step.py --out decode_step.csv [--profile]

Random weights of the real shape in bfloat16, greedy, 1,024 random positions per row, 128 steps that
feed themselves: milliseconds per step, best of three, with no host work between replays.
"""

import argparse
import csv
from dataclasses import replace

import torch
from forebay_worker.kernels.card import CardOps
from forebay_worker.kernels.reference import KvCache, Step
from forebay_worker.kernels.sampling import SamplingRows, make_scratch, sample
from forebay_worker.kernels.slots import DecodeInputs, SlotTable, feed_back, prepare_decode
from forebay_worker.models.config import ModelConfig
from forebay_worker.models.decoder import Decoder, parameters
from kernels import provenance

DEVICE = torch.device("cuda")
BLOCK, CONTEXT, STEPS = 64, 1024, 128
SMALL = ModelConfig(
    family="qwen3",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-6,
    max_position=4096,
    rope_theta=1e6,
    rope_scaling=None,
    tied_embeddings=True,
    eos_token_ids=(),
    dtype="bfloat16",
    qk_norm=True,
)
LARGE = replace(
    SMALL,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    tied_embeddings=False,
)
MODELS = {"qwen3-0.6b": SMALL, "qwen3-8b": LARGE}


def random_decoder(config: ModelConfig, ops: CardOps) -> Decoder:
    weights = {}
    for each in parameters(config):
        values = torch.empty(each.shape, dtype=torch.bfloat16, device=DEVICE)
        weights[each.name] = values.normal_(1.0 if each.columns is None else 0.0, 0.02)
    return Decoder(config, weights, ops, CONTEXT + 4 * STEPS)


class Loop:
    """`rows` sequences that decode on the device; `step` is what a graph captures."""

    def __init__(self, config: ModelConfig, rows: int, decoder: Decoder, ops: CardOps) -> None:
        blocks = -(-(CONTEXT + 4 * STEPS) // BLOCK)
        shape = (config.num_layers, rows * blocks, BLOCK, config.num_kv_heads, config.head_dim)
        self.cache = KvCache(
            *(torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        )
        tables = torch.zeros(rows + 1, blocks, dtype=torch.int32, device=DEVICE)
        tables[1:] = torch.randperm(rows * blocks, device=DEVICE).view(rows, blocks)
        long = torch.zeros(rows + 1, dtype=torch.int64, device=DEVICE)
        self.table = SlotTable(long, long.clone(), tables)
        self.slots = torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE)
        self.inputs = DecodeInputs(
            *(torch.zeros(rows, dtype=torch.int64, device=DEVICE) for _ in range(3)),
            torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        )
        self.sampling = SamplingRows(
            torch.zeros(rows, device=DEVICE),
            torch.zeros(rows, dtype=torch.int32, device=DEVICE),
            torch.ones(rows, device=DEVICE),
            torch.zeros(rows, device=DEVICE),
            torch.arange(rows, device=DEVICE),
            self.inputs.positions,
        )
        self.scratch = make_scratch(rows, DEVICE)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        self.corrupt = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self.ring = torch.zeros(8, rows, dtype=torch.int64, device=DEVICE)
        self.count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.starts = torch.arange(rows + 1, device=DEVICE)
        self.decoder, self.ops, self.rows = decoder, ops, rows

    def reset(self) -> None:
        self.table.length[1:] = CONTEXT
        self.table.last_token[1:] = torch.arange(self.rows, device=DEVICE) + 1000

    def step(self) -> None:
        prepare_decode(self.table, self.slots, self.inputs, BLOCK)
        step = Step(
            num_decodes=self.rows,
            token_ids=self.inputs.token_ids,
            positions=self.inputs.positions,
            kv_slots=self.inputs.kv_slots,
            starts=self.starts,
            kv_lens=self.inputs.kv_lens,
            block_tables=self.table.block_tables[1:],
            logits_at=self.starts[:-1],
            host_starts=[],
            host_kv_lens=[],
        )
        self.ops.begin(step)
        logits = self.decoder(step, self.cache)
        sample(logits, self.sampling, self.scratch, self.tokens, self.corrupt)
        feed_back(self.table, self.slots, self.tokens, self.ring, self.count)


@torch.inference_mode()
def measure(config: ModelConfig, rows: int, decoder: Decoder, ops: CardOps) -> float:
    """Milliseconds per step."""
    loop = Loop(config, rows, decoder, ops)
    loop.reset()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the inputs came from another stream
    with torch.cuda.stream(stream):
        loop.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.step()
    times = []
    for _ in range(3):
        loop.reset()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(STEPS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / STEPS)
    if int(loop.table.length[1]) != CONTEXT + STEPS or bool(loop.corrupt.any()):
        raise RuntimeError("the loop did not feed itself")
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True, help="CSV file to write")
    parser.add_argument("--profile", action="store_true", help="print time by kernel at 8 rows")
    args = parser.parse_args()
    torch.manual_seed(0)
    source = provenance()
    with open(args.out, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "rows", "context", "ms_per_step", "tokens_s", *source])
        for name, config in MODELS.items():
            ops = CardOps(config.num_heads, config.num_kv_heads, config.head_dim, DEVICE)
            decoder = random_decoder(config, ops)
            for rows in (1, 8, 32, 64, 128, 256):
                ms = measure(config, rows, decoder, ops)
                row = [name, rows, CONTEXT, round(ms, 3), round(rows / ms * 1e3)]
                writer.writerow([*row, *source.values()])
                file.flush()
                print(*row, flush=True)
            if args.profile:
                profile(config, decoder, ops)
            del decoder


@torch.inference_mode()
def profile(config: ModelConfig, decoder: Decoder, ops: CardOps) -> None:
    """Time by kernel of eager steps: what the graph holds, without its order."""
    loop = Loop(config, 8, decoder, ops)
    loop.reset()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(10):
            loop.step()
        torch.cuda.synchronize()
    print(
        trace.key_averages().table(
            sort_by="cuda_time_total", row_limit=16, max_name_column_width=60
        )
    )


if __name__ == "__main__":
    main()
