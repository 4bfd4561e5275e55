"""Scoring: log-probabilities of a prompt's own tokens, from the logits of a prefill.

It asks for a few rows of logits at a time, so that what it adds to a step's memory is small. It
knows no model and no cache.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from forebay_shared.wire import TokenLogprobs
from torch import Tensor

from forebay_worker.engine.batch import Sampled, ScheduledRow

PIECE = 32

Logits = Callable[[int, int], Tensor]
"""Rows `start` to `stop`, or to the last one, of a step's scored positions: [rows, vocabulary]
float32."""


def add_scores(
    rows: Sequence[ScheduledRow], results: Sequence[Sampled | None], logits: Logits
) -> list[Sampled | None]:
    """The results with the scores that the rows ask for.

    `logits` gives those of the scored positions of all rows, one row after another. A row whose
    logits hold a NaN is corrupt.
    """
    scored: list[Sampled | None] = []
    at = 0
    for row, result in zip(rows, results, strict=True):
        if row.scored:
            result = result or Sampled(0)
            result.scores = list(_scores(row, at, logits))
            result.corrupt = result.corrupt or any(one.rank == 0 for one in result.scores)
            at += len(row.scored)
        scored.append(result)
    return scored


def _scores(row: ScheduledRow, first: int, logits: Logits) -> Iterator[TokenLogprobs]:
    """One for each scored position: of the prompt's next token, which has rank 0 after a NaN. The
    position's own logits are those from `first` on."""
    token_ids = row.sequence.token_ids[row.scored.start + 1 : row.scored.stop + 1]
    for start in range(0, len(token_ids), PIECE):
        wanted = token_ids[start : start + PIECE]
        piece = logits(first + start, first + start + len(wanted))
        count = min(row.sequence.sampling.prompt_logprobs or 0, piece.shape[-1])
        total = piece.logsumexp(-1, keepdim=True)
        own = piece.gather(1, torch.tensor(wanted, device=piece.device)[:, None])
        best = piece.topk(count)
        logprobs = cast(list[float], (own - total).squeeze(1).tolist())
        ranks = cast(list[int], (((piece > own).sum(1) + 1) * total.isfinite()[:, 0]).tolist())
        ids = cast(list[list[int]], best.indices.tolist())
        values = cast(list[list[float]], (best.values - total).tolist())
        for at, (logprob, rank) in enumerate(zip(logprobs, ranks, strict=True)):
            yield TokenLogprobs(logprob, list(zip(ids[at], values[at], strict=True)), rank)
