"""Our embeddings beside sentence-transformers' on the same model, in one process: all-MiniLM-L6-v2.

    pip install sentence-transformers; python benchmarks/embeddings.py [--device cpu]

Texts of 8 to 200 words, the same for both, in batches of 1, 32 and 256; both tokenise, run in
float32 on as many threads, pool and normalise. Ours goes through the engine's core as a worker's
would.
"""

import random
import time
from collections.abc import Callable, Sequence

import common
import numpy as np
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import MAX_ENCODE_INPUTS, Embedded, Encode, pack_ids
from forebay_worker.checkpoint import resolve
from forebay_worker.engines.pooling import PoolingEngine
from tokenizers import Tokenizer

WORDS = ["the", "of", "water", "power", "river", "station", "light", "engine", "stone", "cloud"]
BATCHES = {1: 32, 32: 4, 256: 1}
"""Texts at once, and how often in a round."""

Texts = Sequence[str]


class _Unrecorded:
    """Nobody counts."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Ours:
    def __init__(self, model: str, device: str) -> None:
        self._engine = PoolingEngine(WorkerSettings(model=model, device=device, dtype="float32"))
        card = self._engine.card
        self._core = self._engine.core(_Unrecorded())
        self.tokenizer = Tokenizer.from_buffer(self._engine.blobs[card.tokenizer])
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(card.max_model_len)

    def encode(self, texts: Texts) -> np.ndarray:
        ids = [pack_ids(each.ids) for each in self.tokenizer.encode_batch_fast(list(texts))]
        for at in range(0, len(ids), MAX_ENCODE_INPUTS):
            part = tuple(ids[at : at + MAX_ENCODE_INPUTS])
            job = Encode(request_id=f"{at:06}", attempt=1, gateway="g", inputs=part)
            self._core.submit(job, time.monotonic())
        while not self._core.idle:
            self._core.step()
        answers = [event for _, event in self._core.take_events() if isinstance(event, Embedded)]
        answers.sort(key=lambda answer: answer.request_id)
        return np.stack([np.frombuffer(v, "<f4") for each in answers for v in each.vectors])


class Theirs:
    def __init__(self, model: str, device: str) -> None:
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(str(resolve(model)), device=device)

    def encode(self, texts: Texts) -> np.ndarray:
        return self._model.encode(list(texts), batch_size=32, show_progress_bar=False)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="minilm", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    results = common.Results("embeddings", options)
    ours = Ours(options.model, options.device)
    targets = {"forebay": ours, "sentence-tf": Theirs(options.model, options.device)}
    _check(targets["forebay"].encode, targets["sentence-tf"].encode)
    for size, times in BATCHES.items():

        def measure(name: str, turn: int, size: int = size, times: int = times) -> common.Figures:
            batches = [_texts(size, turn * 1000 + at) for at in range(times)]
            tokens = sum(len(e.ids) for b in batches for e in ours.tokenizer.encode_batch(b))
            began = time.perf_counter()
            for batch in batches:
                targets[name].encode(batch)
            seconds = time.perf_counter() - began
            return {"inputs_per_s": size * times / seconds, "tokens_per_s": tokens / seconds}

        found = common.in_turns(options.rounds, list(targets), measure)
        results.add(f"batch={size} {options.device}", found, "sentence-tf")
    results.write()


def _texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(8, 200))) for _ in range(count)]


def _check(ours: Callable[[Texts], np.ndarray], theirs: Callable[[Texts], np.ndarray]) -> None:
    """Both warm, and of one mind."""
    texts = _texts(32, 7)
    least = (ours(texts) * theirs(texts)).sum(1).min()
    if least < 1 - 1e-4:
        raise SystemExit(f"the vectors differ: least cosine {least:.6f}")
    print(f"least cosine over {len(texts)} texts: {least:.7f}")


if __name__ == "__main__":
    main()
