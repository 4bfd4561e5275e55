"""The engine's core on a card without a server: the offline workloads that other engines publish.

    PYTHONPATH=worker:shared python3 benchmarks/offline.py --model qwen3-0.6b --out offline.csv \
        --cases decode,mixed

Random weights of the real shape in bfloat16, or as --quantization and --kv-cache-dtype say, greedy
unless said, end tokens ignored, prefix caching off. decode: time of B prompts of 1,024 random ids
with 129 new tokens less that with 1, over 128; best of two. asked: the same with penalties, a bias
or log-probabilities. prefill: 1 new token. mixed: 256
prompts of 100 to 1,024 ids, 100 to 1,024 new tokens each. many: 1,024 prompts of 1,024 ids, 128 new
tokens each.
"""

import argparse
import csv
import json
import logging
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
from forebay_shared import collector
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import Done, Failed, SequenceStart, Submit, pack_ids
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.devices import make_runner
from forebay_worker.engine.intake import Limits
from forebay_worker.engine.ports import Unrecorded
from kernels import provenance

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000,
    "torch_dtype": "bfloat16",
}
MODELS = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}
BATCHES = [1, 8, 32, 64, 128, 256]
Prompt = list[int]


class Recorder(Unrecorded):
    """Counts steps and the host's time in them, outside the runner."""

    def __init__(self) -> None:
        self.steps, self.host_s = 0, 0.0

    def step(self, *, host_s: float, **facts: int) -> None:
        self.steps += 1
        self.host_s += host_s


ASKED: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "bias": {"logit_bias": dict.fromkeys(range(100, 200), -5.0)},
    "logprobs": {"logprobs": 5},
}
"""What a row may ask beyond the sampling kernel."""


@dataclass
class Measured:
    """`value` in the unit of its case; `host_us` per step: all of the engine but the runner."""

    case: str
    unit: str
    value: float
    seconds: float
    host_us: float


class Bench:
    """One engine and the prompts that it is given."""

    def __init__(self, model: str, settings: WorkerSettings, batches: list[int]) -> None:
        self._batches = batches
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "config.json").write_text(json.dumps(MODELS[model]))
            began = perf_counter()
            self._runner = make_runner(Path(name), settings)
            self.start_s = perf_counter() - began
        self._recorder = Recorder()
        self._core = EngineCore(
            self._runner, Limits.of(self._runner), settings, self._recorder, revision=model
        )
        self._serial = 0

    def run(self, prompts: list[Prompt], new: list[int], **asked: Any) -> float:
        """Seconds until all have their new tokens, greedily or as `asked`."""
        submits = self._submits(prompts, new, **asked)
        self._recorder.steps, self._recorder.host_s = 0, 0.0
        torch.cuda.synchronize()
        began = perf_counter()
        for each in submits:
            self._core.submit(each, monotonic())
        generated = self.drain()
        seconds = perf_counter() - began
        if generated != sum(new):
            raise RuntimeError(f"{generated} tokens instead of {sum(new)}")
        return seconds

    def begin(self, prompts: list[Prompt], new: list[int], **asked: Any) -> None:
        """Takes requests in; `steps` and `drain` go on with them."""
        for each in self._submits(prompts, new, **asked):
            self._core.submit(each, monotonic())

    def _submits(self, prompts: list[Prompt], new: list[int], **asked: Any) -> list[Submit]:
        self._serial += len(prompts)
        return [
            Submit(
                request_id=str(self._serial + at),
                attempt=1,
                gateway="",
                prompt=pack_ids(prompt),
                sampling=SamplingParams(
                    **{"temperature": 0.0, **asked}, max_tokens=count, ignore_eos=True, seed=at
                ),
                starts=(SequenceStart(0),),
            )
            for at, (prompt, count) in enumerate(zip(prompts, new, strict=True))
        ]

    def steps(self, count: int) -> int:
        """So many steps of the engine; the tokens of the requests that ended in them."""
        generated = 0
        for _ in range(count):
            self._core.step()
            for _, event in self._core.take_events():
                if isinstance(event, Failed):
                    raise RuntimeError(event.message)
                if isinstance(event, Done):
                    generated += event.usage.completion_tokens
        return generated

    def drain(self) -> int:
        generated = 0
        while not self._core.idle:
            generated += self.steps(1)
        return generated

    def measured(self, case: str, unit: str, value: float, seconds: float) -> Measured:
        host_us = self._recorder.host_s / max(1, self._recorder.steps) * 1e6
        return Measured(case, unit, round(value, 4), round(seconds, 4), round(host_us, 1))

    def decode(self) -> Iterator[Measured]:
        for rows in self._batches:
            yield self._step(f"decode {rows}", rows)

    def asked(self) -> Iterator[Measured]:
        for rows in (1, 64):
            for name, asked in ASKED.items():
                yield self._step(f"decode {rows}, {name}", rows, **asked)

    def _step(self, case: str, rows: int, **asked: Any) -> Measured:
        prompts = [random_ids(1024) for _ in range(rows)]
        short = min(self.run(prompts, [1] * rows, **asked) for _ in range(2))
        long = min(self.run(prompts, [129] * rows, **asked) for _ in range(2))
        return self.measured(case, "ms/step", (long - short) / 128 * 1e3, long)

    def prefill(self) -> Iterator[Measured]:
        for rows, length in ((1, 128), (1, 2048), (8, 2048), (32, 2048)):
            seconds = min(
                self.run([random_ids(length) for _ in range(rows)], [1] * rows) for _ in range(3)
            )
            yield self.measured(
                f"prefill {rows}x{length}", "tok/s", rows * length / seconds, seconds
            )

    def mixed(self) -> Iterator[Measured]:
        r = random.Random(0)
        prompts = []
        for _ in range(256):
            length = r.randint(100, 1024)
            prompts.append([r.randrange(10, 49_000) for _ in range(length)])
        new = [r.randint(100, 1024) for _ in range(256)]
        for temperature in (0.6, 0.0):
            seconds = self.run(prompts, new, temperature=temperature)
            yield self.measured(f"mixed t={temperature}", "tok/s", sum(new) / seconds, seconds)

    def many(self) -> Iterator[Measured]:
        prompts = [random_ids(1024) for _ in range(1024)]
        seconds = self.run(prompts, [128] * 1024)
        yield self.measured("1024x1024+128", "tok/s", 1024 * 128 / seconds, seconds)


def medians(case: Callable[[], Iterator[Measured]], rounds: int) -> Iterator[Measured]:
    """Of each of the case's figures; one round after another."""
    runs = [list(case()) for _ in range(rounds)]
    for same in zip(*runs, strict=True):
        yield sorted(same, key=lambda each: each.value)[rounds // 2]


def random_ids(count: int) -> Prompt:
    return [random.randrange(10, 49_000) for _ in range(count)]


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--cases", default="decode,prefill,mixed,many", help="or none: only start")
    parser.add_argument(
        "--batches", type=numbers, default=BATCHES, help="rows of the decode case: 1,8,32"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of each case; medians are written")
    parser.add_argument("--out", required=True, help="CSV file to write")
    parser.add_argument("--quantization", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    random.seed(0)
    settings = WorkerSettings(
        device="cuda",
        load_format="dummy",
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_prefill_tokens=args.max_num_batched_tokens,  # as `LLM` has it
        max_num_queued_reqs=4096,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enable_prefix_caching=False,
    )
    bench = Bench(args.model, settings, args.batches)
    collector.calm()  # as the worker does
    print("start", round(bench.start_s, 1), "s", flush=True)
    cases: dict[str, Callable[[], Iterator[Measured]]] = {
        "decode": bench.decode,
        "asked": bench.asked,
        "prefill": bench.prefill,
        "mixed": bench.mixed,
        "many": bench.many,
    }
    kinds = {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    source = kinds | provenance()
    with open(args.out, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "case", "unit", "value", "seconds", "host_us", "rounds", *source])
        for name in [] if args.cases == "none" else args.cases.split(","):
            for each in medians(cases[name], args.rounds):
                row = [args.model, each.case, each.unit, each.value, each.seconds, each.host_us]
                row.append(args.rounds)
                writer.writerow([*row, *source.values()])
                file.flush()
                print(*row, flush=True)


if __name__ == "__main__":
    main()
