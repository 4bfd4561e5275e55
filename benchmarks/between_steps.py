"""What a card does in a step of the engine and between two, by the profiler's own clock.

    PYTHONPATH=worker:shared python3 benchmarks/between_steps.py [--model qwen3-0.6b] \
        [--rows 1,8,64] [--asked logprobs]

Prints for a few steps the time from one's first kernel to the next one's, how much of it lies
behind the sampled token, and what happens there.
"""

import argparse
import json
import random
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from forebay_shared import collector
from forebay_shared.settings import WorkerSettings
from offline import ASKED, BATCHES, MODELS, Bench, numbers, random_ids

_WARM, _TRACED, _SHOWN = 30, 12, 4
Event = dict[str, Any]


def trace(bench: Bench, rows: int, **asked: Any) -> list[Event]:
    """The card's events of some steps, in order."""
    bench.begin([random_ids(1024) for _ in range(rows)], [_WARM + _TRACED + 20] * rows, **asked)
    bench.steps(_WARM)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        bench.steps(_TRACED)
        torch.cuda.synchronize()
    bench.drain()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "trace.json"
        profile.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted(
        (each for each in events if each.get("cat") in kinds), key=lambda each: each["ts"]
    )


def show(events: list[Event], rows: int) -> None:
    first = [at for at, each in enumerate(events) if "take_tokens" in each["name"]]
    last: list[Event] = []
    for start, end in list(pairwise(first))[-_SHOWN:]:
        step = events[start : end + 1]
        sampled = max(each["ts"] + each["dur"] for each in step if "_sample_kernel" in each["name"])
        whole, behind = step[-1]["ts"] - step[0]["ts"], step[-1]["ts"] - sampled
        print(f"{rows} rows: {whole:.1f} us, {behind:.1f} of them after the token")
        last = step
    for each in last[-8:]:
        print(f"  {each['ts'] - last[0]['ts']:9.1f} {each['dur']:7.1f} {each['name'][:70]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 64])
    parser.add_argument("--asked", choices=ASKED, help="what each row asks for")
    args = parser.parse_args()
    random.seed(0)
    settings = WorkerSettings(
        device="cuda",
        load_format="dummy",
        max_num_batched_tokens=8192,
        max_num_prefill_tokens=8192,
        enable_prefix_caching=False,
    )
    bench = Bench(args.model, settings, BATCHES)
    collector.calm()
    for rows in args.rows:
        show(trace(bench, rows, **ASKED.get(args.asked, {})), rows)


if __name__ == "__main__":
    main()
