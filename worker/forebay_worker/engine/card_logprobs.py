"""Log-probabilities of rows of logits on a card: read behind the step, on their way while the next
one is launched. Nothing of the vocabulary's size is copied.

They are those of the raw logits, whatever the token was chosen from. It knows no model and no step.
"""

from collections.abc import Sequence

import numpy as np
import torch
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import TokenLogprobs
from torch import Tensor

from forebay_worker.engine.batch import IntArray
from forebay_worker.engine.staging import Fetched, Harvest, Layout, Staging
from forebay_worker.kernels.logprobs import MOST, make_logprobs_scratch, read_logprobs


class Reading:
    """Log-probabilities on their way from a card."""

    def __init__(self, fetched: Fetched, counts: list[int]) -> None:
        self._fetched, self._counts = fetched, counts

    def results(self) -> list[TokenLogprobs]:
        """Waits for them; one of each row that asked, in order."""
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
        self._places[:rows] = places
        self._staging.send(self._layout, {"places": self._places})
        read_logprobs(
            logits, tokens, self._sent, max(counts), self._scratch, **self._results.device,
            rows=rows,
        )  # fmt: skip
        return Reading(self._results.fetch(), counts)
