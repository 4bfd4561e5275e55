"""Log-probabilities of rows of logits on a card: read behind the step, on their way while the next
one is launched. Nothing of the vocabulary's size is copied.

They are those of the raw logits, whatever the token was chosen from. It knows no model and no step.
"""

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import torch
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import TokenLogprobs
from torch import Tensor

from forebay_worker.engine.batch import IntArray
from forebay_worker.engine.staging import Fetched, Harvest, Layout, Staging
from forebay_worker.kernels.logprobs import MOST, make_logprobs_scratch, read_logprobs


class Reading(Protocol):
    """Log-probabilities on their way from a card."""

    def results(self) -> list[TokenLogprobs]:
        """Waits for them; one of each row that asked, in order."""
        ...


class LogprobsReader:
    """Reads up to `most_rows` rows at once; its buffers last. A reading lasts until two more have
    been begun."""

    def __init__(self, most_rows: int, vocab: int, device: torch.device) -> None:
        layout = Layout({"places": ("i4", most_rows)})
        self._layout = layout
        self._places = np.zeros(most_rows, np.int32)
        self._staging = Staging(layout.size, device)
        self._sent = self._staging.tensors(layout)["places"]
        self._results = Harvest(
            {
                "own": ("f4", most_rows),
                "values": ("f4", most_rows * MOST),
                "ids": ("i4", most_rows * MOST),
            },
            device,
        )
        self._scratch = make_logprobs_scratch(most_rows, vocab, device)

    def read(
        self, logits: Tensor, tokens: Tensor, places: IntArray, asked: Sequence[SamplingParams]
    ) -> Reading:
        """Of the rows `places`, as many as `asked`, of raw logits [any, vocabulary] and of the
        chosen `tokens` [any] int64; starts a copy behind what has been launched."""
        rows = len(places)
        counts = [min(each.logprobs or 0, logits.shape[-1]) for each in asked]
        most = max(counts)
        if most > MOST:  # more than a client may ask
            at = torch.from_numpy(places).to(logits.device)
            return LogprobsRead(logits[at].float(), tokens[at], asked)
        self._places[:rows] = places
        self._staging.send(self._layout, {"places": self._places})
        read_logprobs(
            logits, tokens, self._sent, most, self._scratch, **self._results.device, rows=rows
        )
        return _Read(self._results.fetch(), counts)


class _Read:
    def __init__(self, fetched: Fetched, counts: list[int]) -> None:
        self._fetched, self._counts = fetched, counts

    def results(self) -> list[TokenLogprobs]:
        arrays = self._fetched.arrays()
        rows, most = len(self._counts), max(self._counts)
        own: list[float] = arrays["own"][:rows].tolist()
        values, ids = (
            arrays[name].reshape(-1, MOST)[:rows, :most].tolist() for name in ("values", "ids")
        )
        return [
            TokenLogprobs(logprob, list(zip(of[:count], best[:count], strict=True)))
            for logprob, of, best, count in zip(own, ids, values, self._counts, strict=True)
        ]


class LogprobsRead:
    """A reading of any number of likeliest tokens, by torch. Its launches take the host 1 ms."""

    def __init__(self, logits: Tensor, tokens: Tensor, asked: Sequence[SamplingParams]) -> None:
        """Of `tokens` [R] by raw logits [R, vocabulary] float32, R from 1 on, as many as `asked`;
        starts a copy behind what has been launched."""
        self._counts = [min(each.logprobs or 0, logits.shape[-1]) for each in asked]
        self._most = max(1, *self._counts)
        total = logits.logsumexp(-1, keepdim=True)
        best = logits.topk(self._most)
        own = logits.gather(1, tokens[:, None])
        # float64 holds each id exactly, and one copy is one wait.
        parts = (own - total).double(), (best.values - total).double(), best.indices.double()
        packed = torch.cat(parts, 1)
        on_card = logits.device.type == "cuda"
        self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=on_card)
        self._packed.copy_(packed, non_blocking=True)
        self._copied = torch.cuda.Event() if on_card else None
        if self._copied is not None:
            self._copied.record()

    def results(self) -> list[TokenLogprobs]:
        """Waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        rows = cast(list[list[float]], self._packed.tolist())
        return [self._parsed(row, count) for row, count in zip(rows, self._counts, strict=True)]

    def _parsed(self, row: list[float], count: int) -> TokenLogprobs:
        values, ids = row[1 : 1 + count], row[1 + self._most : 1 + self._most + count]
        top = [(int(token), value) for token, value in zip(ids, values, strict=True)]
        return TokenLogprobs(logprob=row[0], top=top)
