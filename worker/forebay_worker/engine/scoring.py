"""Scoring: log-probabilities of a prompt's own tokens, from the logits of a prefill.

It works on a few rows of logits at a time, so that what it adds to a step's memory is small. It
knows no model and no cache.
"""

from collections.abc import Iterator, Sequence
from typing import cast

from forebay_shared.wire import TokenLogprobs
from torch import Tensor

from forebay_worker.engine.batch import Sampled, ScheduledRow

PIECE = 32


def add_scores(
    rows: Sequence[ScheduledRow], results: Sequence[Sampled | None], logits: Tensor
) -> list[Sampled | None]:
    """The results with the scores that the rows ask for.

    `logits` [scored positions of all rows, vocabulary] are float32. A row whose logits hold a NaN
    is corrupt.
    """
    scored: list[Sampled | None] = []
    at = 0
    for row, result in zip(rows, results, strict=True):
        if row.scored:
            result = result or Sampled(0)
            own = logits[at : at + len(row.scored)]
            result.scores = list(_scores(row, own))
            result.corrupt = result.corrupt or any(one.rank == 0 for one in result.scores)
            at += len(row.scored)
        scored.append(result)
    return scored


def _scores(row: ScheduledRow, logits: Tensor) -> Iterator[TokenLogprobs]:
    """One for each scored position: of the prompt's next token, which has rank 0 after a NaN."""
    token_ids = row.sequence.token_ids[row.scored.start + 1 : row.scored.stop + 1]
    count = min(row.sequence.sampling.prompt_logprobs or 0, logits.shape[-1])
    for start in range(0, len(token_ids), PIECE):
        piece = logits[start : start + PIECE]
        total = piece.logsumexp(-1, keepdim=True)
        own = piece.gather(1, piece.new_tensor(token_ids[start : start + PIECE]).long()[:, None])
        best = piece.topk(count)
        logprobs = cast(list[float], (own - total).squeeze(1).tolist())
        ranks = cast(list[int], (((piece > own).sum(1) + 1) * total.isfinite()[:, 0]).tolist())
        ids = cast(list[list[int]], best.indices.tolist())
        values = cast(list[list[float]], (best.values - total).tolist())
        for at, (logprob, rank) in enumerate(zip(logprobs, ranks, strict=True)):
            yield TokenLogprobs(logprob, list(zip(ids[at], values[at], strict=True)), rank)
