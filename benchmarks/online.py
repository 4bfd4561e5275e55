"""A served model over HTTP on a card: gateways, Redis and a worker as `forebay serve` starts them.

    python3 benchmarks/online.py --model qwen3-0.6b --out online.csv --gateways 4

Random weights of the real shape in bfloat16 and a made-up tokenizer with as many entries as the
real one, since ids drawn by random weights must become text all the same. `forebay bench serve` is
the client: random prompts as token ids, end tokens ignored, streamed, on the same host. Each row is
the median over `--rounds` of the whole case; the first case is run once before, unmeasured.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import Figures, free_port, server
from offline import MODELS

NAME = "bench"
KEY = "sk-bench"


class Case(NamedTuple):
    """Tokens in and out of each request, and how many requests are open at once."""

    input_len: int
    output_len: int
    concurrency: int

    @property
    def requests(self) -> int:
        """Enough for a steady state: four rounds of the batch, and not fewer than eight."""
        return max(8, 4 * self.concurrency)


CASES = {
    "qwen3-0.6b": [
        Case(128, 128, 1),
        Case(128, 128, 16),
        Case(128, 128, 256),
        Case(1024, 128, 1),
        Case(1024, 128, 32),
        Case(1024, 128, 128),
        Case(512, 128, 256),
    ],
    "qwen3-8b": [
        Case(1024, 128, 1),
        Case(1024, 128, 32),
        Case(1024, 128, 128),
        Case(512, 128, 256),
    ],
}
METRICS = {
    "output_throughput": "output tok/s",
    "median_ttft_ms": "TTFT p50 ms",
    "p99_ttft_ms": "TTFT p99 ms",
    "median_tpot_ms": "TPOT p50 ms",
    "p99_itl_ms": "ITL p99 ms",
}


def write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level BPE without merges whose ids above 255 are words of four letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    for word in _words():
        if len(vocabulary) == size:
            break
        vocabulary.setdefault(word, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _words() -> Iterator[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return (f"Ġ{a}{b}{c}{d}" for a in letters for b in letters for c in letters for d in letters)


def measure(url: str, case: Case, seed: int) -> Figures:
    """One run of the load tool; seeds differ, so that no prompt is in a prefix cache."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            *(sys.executable, "-m", "forebay_gateway.bench", "serve", "--base-url", url),
            *(
                "--model",
                NAME,
                "--api-key",
                KEY,
                "--prompt-form",
                "ids",
                "--ignore-eos",
                "--disable-tqdm",
            ),
            *("--random-input-len", str(case.input_len)),
            *("--random-output-len", str(case.output_len)),
            *("--num-prompts", str(case.requests), "--max-concurrency", str(case.concurrency)),
            *("--seed", str(seed)),
            *("--save-result", "--result-filename", str(result)),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(result.read_text())
    if found["completed"] != case.requests:
        raise SystemExit(f"{case.requests - found['completed']} requests of {case} failed")
    return {shown: float(found[name]) for name, shown in METRICS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--gateways", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--cases", default="", help="as 128/128/16,1024/128/1; default: all")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="append rows to this CSV")
    options, more = parser.parse_known_args()
    cases = [Case(*map(int, text.split("/"))) for text in options.cases.split(",") if text]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(MODELS[options.model]))
        write_tokenizer(model, MODELS[options.model]["vocab_size"])
        port = free_port()
        command = [
            *(sys.executable, "-m", "forebay_shared.cli", "serve", str(model)),
            *("--port", str(port), "--api-key", KEY, "--served-model-name", NAME),
            *(
                "--load-format",
                "dummy",
                "--device",
                options.device,
                "--gateways",
                str(options.gateways),
            ),
            *("--data-dir", str(model / "data"), *more),
        ]
        url, began = f"http://127.0.0.1:{port}", time.monotonic()
        with server(command, url, key=KEY, model=NAME):
            print(f"{options.model}: ready after {time.monotonic() - began:.1f} s", flush=True)
            rows = list(_rounds(url, cases or CASES[options.model], options.rounds))
    if options.out:
        _save(options.out, options.model, options.gateways, rows)


def _rounds(url: str, cases: list[Case], rounds: int) -> Iterator[tuple[Case, Figures]]:
    measure(url, cases[0], 0)
    for at, case in enumerate(cases):
        runs = [measure(url, case, 1 + at * rounds + number) for number in range(rounds)]
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        shown = ", ".join(f"{name} {value:,.1f}" for name, value in medians.items())
        print(f"{case.input_len}/{case.output_len} c={case.concurrency}: {shown}", flush=True)
        yield case, medians


def _save(out: Path, model: str, gateways: int, rows: list[tuple[Case, Figures]]) -> None:
    from kernels import provenance

    facts = {**provenance(), "model": model, "gateways": gateways}
    new = not out.exists()
    with out.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow([*facts, "input", "output", "concurrency", *METRICS.values()])
        for case, figures in rows:
            writer.writerow([*facts.values(), *case, *(f"{each:.2f}" for each in figures.values())])


if __name__ == "__main__":
    main()
