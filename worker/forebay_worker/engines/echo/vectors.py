"""The echo engine's vectors: how often each residue of the ids occurs. Equal ids, equal vector."""

import time
from collections.abc import Sequence

import numpy as np
from forebay_shared.models import EmbeddingCard

from forebay_worker.pooling.ports import TokenIds, Vectors

SIZE = 32
CARD = EmbeddingCard(size=SIZE, matryoshka=True)
TOKEN_BUDGET = 8192


class EchoVectors:
    """A VectorRunner without a model; a step takes `delay_s`."""

    size = SIZE
    token_budget = TOKEN_BUDGET

    def __init__(self, vocab_size: int, max_model_len: int, delay_s: float) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._delay_s = delay_s

    def encode(self, inputs: Sequence[TokenIds]) -> Vectors:
        if self._delay_s:
            time.sleep(self._delay_s)
        counts = [np.bincount(ids % SIZE, minlength=SIZE) for ids in inputs]
        return np.stack(counts).astype(np.float32)
