"""What fp8 costs in accuracy: log-probabilities of a text, beside the same model's without it.

    python benchmarks/quantization.py                     the demo model, in plain torch on the CPU
    PYTHONPATH=worker:shared python3 benchmarks/quantization.py --device cuda --model DIR --out FILE

On the CPU the reference of the kernels computes it, all else in float32, which is what it is held
against; on a card the engine does, all else in bfloat16. nll: mean of -log p of the text's tokens,
in nats; top 1: share of positions whose likeliest token is the other's; moved: mean change of a
token's log p. Of fp8, `few rows` is a prefill in steps of 16 tokens, whose inputs are not rounded;
the others go in steps of 512.
"""

import argparse
import csv
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_worker.checkpoint import resolve
from forebay_worker.engine import loading
from forebay_worker.kernels import reference
from forebay_worker.kernels.fp8 import E4M3
from forebay_worker.kernels.reference import KvCache, Step
from forebay_worker.models.decoder import Decoder, fold_norm, quantize
from forebay_worker.models.registry import read_config
from tokenizers import Tokenizer
from torch import Tensor

DOCS = Path(__file__).parent.parent / "docs"
WINDOW, BLOCK = 512, 64
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Variant:
    """`chunk`: tokens of a step. `weights` and `kv`: whether they are e4m3."""

    name: str
    weights: bool = False
    kv: bool = False
    chunk: int = WINDOW
    dtype: str = "float32"


VARIANTS = (
    Variant("float32"),
    Variant("bfloat16", dtype="bfloat16"),
    Variant("fp8 weights, few rows", weights=True, chunk=16),
    Variant("fp8 weights", weights=True),
    Variant("fp8 kv", kv=True),
    Variant("fp8 weights and kv", weights=True, kv=True),
)


@dataclass
class Scores:
    """Of each token but the windows' first: its log p, and the likeliest token in its place."""

    logprobs: Tensor
    likeliest: Tensor


@dataclass
class Row:
    variant: str
    nll: float
    top1: float
    moved: float


class OnCpu:
    """The plain decoder, layer by layer in torch."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._config = read_config(directory)

    def scores(self, variant: Variant, windows: list[list[int]]) -> Scores:
        def prepare(name: str, loaded: dict[str, Tensor]) -> None:
            if variant.weights:
                fold_norm(name, loaded)
                quantize(name, loaded)

        config, dtype = self._config, loading.dtype_of(variant.dtype)
        weights = loading.load(self._directory, config, WorkerSettings(), dtype, CPU, prepare)
        decoder = Decoder(config, weights, reference, WINDOW)
        shape = (config.num_layers, WINDOW // BLOCK, BLOCK, config.num_kv_heads, config.head_dim)
        kind = E4M3 if variant.kv else dtype
        scales = torch.ones(config.num_layers, 2, config.num_kv_heads) if variant.kv else None
        cache = KvCache(*(torch.zeros(shape).to(kind) for _ in "kv"), scales)
        found = []
        for window in windows:
            logits = torch.cat(list(_logits(decoder, cache, window, variant.chunk)))
            logprobs = logits[:-1].log_softmax(-1)
            chosen = logprobs.gather(1, torch.tensor(window[1:])[:, None])[:, 0]
            found.append(Scores(chosen, logprobs.argmax(-1)))
        return _joined(found)


@torch.inference_mode()
def _logits(decoder: Decoder, cache: KvCache, window: list[int], chunk: int) -> Iterator[Tensor]:
    for start in range(0, len(window), chunk):
        stop = min(start + chunk, len(window))
        at = torch.arange(start, stop)
        step = Step(
            num_decodes=0,
            token_ids=torch.tensor(window[start:stop]),
            positions=at,
            kv_slots=at,
            starts=torch.tensor([0, stop - start]),
            kv_lens=torch.tensor([stop]),
            block_tables=torch.arange(WINDOW // BLOCK)[None],
            logits_at=at - start,
            host_starts=[0, stop - start],
            host_kv_lens=[stop],
        )
        yield decoder(step, cache)


class OnCard:
    """The engine itself."""

    def __init__(self, model: str) -> None:
        self._model = model

    def scores(self, variant: Variant, windows: list[list[int]]) -> Scores:
        from forebay_worker.llm import LLM

        llm = LLM(
            self._model,
            device="cuda",
            dtype=variant.dtype,
            quantization="fp8" if variant.weights else "auto",
            kv_cache_dtype="fp8" if variant.kv else "auto",
            max_model_len=WINDOW + BLOCK,
            max_num_batched_tokens=variant.chunk,
            max_num_seqs=8,
            kv_cache_memory_bytes=2 << 30,
            enable_prefix_caching=False,
        )
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        found = []
        for window in windows:  # one after another, so that a step has `chunk` tokens
            [result] = llm.generate([window], asked, progress=False)
            assert result.prompt_logprobs is not None
            entries = [each for each in result.prompt_logprobs if each is not None]
            found.append(
                Scores(
                    torch.tensor([each.logprob for each in entries]),
                    torch.tensor([each.top[0][0] for each in entries]),
                )
            )
        return _joined(found)


def _joined(found: list[Scores]) -> Scores:
    return Scores(
        torch.cat([each.logprobs for each in found]), torch.cat([each.likeliest for each in found])
    )


def text_windows(directory: Path, count: int) -> list[list[int]]:
    """Token ids of this repository's documentation, in windows."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return [ids[at * WINDOW : (at + 1) * WINDOW] for at in range(min(count, len(ids) // WINDOW))]


def compare(
    scores: Callable[[Variant, list[list[int]]], Scores],
    variants: tuple[Variant, ...],
    windows: list[list[int]],
) -> Iterator[Row]:
    """The first variant is the reference of the others."""
    first: Scores | None = None
    for variant in variants:
        found = scores(variant, windows)
        first = first or found
        yield Row(
            variant.name,
            round(-float(found.logprobs.mean()), 4),
            round(float((found.likeliest == first.likeliest).float().mean()), 4),
            round(float((found.logprobs - first.logprobs).abs().mean()), 4),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="", help="default: the demo model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--windows", type=int, default=8, help=f"of {WINDOW} tokens each")
    parser.add_argument("--out", help="CSV file to write")
    args = parser.parse_args()
    directory = resolve(args.model)
    on_card = args.device == "cuda"
    runner = OnCard(args.model) if on_card else OnCpu(directory)
    rows: list[Row] = []
    windows = text_windows(directory, args.windows)
    variants = VARIANTS
    if on_card:  # which computes 64 tokens of a prefill at least, so never few rows
        variants = tuple(
            replace(each, dtype="bfloat16") for each in VARIANTS[1:] if each.chunk == WINDOW
        )
    for row in compare(runner.scores, variants, windows):
        rows.append(row)
        print(*asdict(row).values(), sep="\t", flush=True)
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
            writer.writeheader()
            writer.writerows(map(asdict, rows))


if __name__ == "__main__":
    main()
