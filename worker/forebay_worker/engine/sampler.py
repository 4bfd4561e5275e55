"""The sampler: one token per row of logits, each row by its own sequence's settings.

A row is read and changed through its sequence alone, so that its token is the same, bit for bit,
in any batch. What only needs an argmax is done for the batch at once: 16 greedy rows of 49,152 ids
take 0.7 ms on one Zen 3 core. It knows no model and no cache.

Order, as in vLLM: log-probabilities of the raw logits; then grammar, allowed ids, banned ids, bias,
penalties; greedy stops here; temperature, min_p, top_k, top_p, noise.
"""

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import TokenLogprobs
from torch import Tensor

from forebay_worker.engine.batch import Sampled, SequenceState
from forebay_worker.engine.noise import Words, gumbel

# Where most top_p sets end: 1,024 of 49,152 cost 0.6 ms to select, all of them 4 ms to sort.
NUCLEUS = 1024
MOST_BIAS = 1e30


def sample(logits: Tensor, sequences: Sequence[SequenceState]) -> list[Sampled]:
    """The next token of each sequence by its row of logits [S, vocabulary] float32; changes them.

    A row with a NaN, or with no finite largest logit once masked, is corrupt.
    """
    raw: dict[int, Tensor] = {}
    for row, sequence in enumerate(sequences):
        if (mask := sequence.allowed_mask()) is not None:
            if sequence.sampling.logprobs is not None:
                raw[row] = logits[row].log_softmax(dim=-1)
            _allow(logits[row], mask)
    tops, argmaxes = logits.max(dim=-1)
    tokens = cast(list[int], argmaxes.tolist())
    best = cast(list[float], tops.tolist())
    return [
        Sampled(0, corrupt=True, starved=best[row] < 0 and sequence.sampling.grammar is not None)
        if not math.isfinite(best[row])
        else Sampled(tokens[row])
        if _is_plain_greedy(sequence)
        else _sample_row(logits[row], sequence, raw.get(row))
        for row, sequence in enumerate(sequences)
    ]


def _is_plain_greedy(sequence: SequenceState) -> bool:
    params = sequence.sampling
    return params.greedy and params.logprobs is None and not _is_masked(sequence)


def _is_masked(sequence: SequenceState) -> bool:
    params = sequence.sampling
    return bool(
        params.logit_bias
        or params.allowed_token_ids
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or sequence.banned_ids()
    )


def _allow(logits: Tensor, mask: bytes) -> None:
    """In place: only what a grammar allows. 0.1 ms a row of 49,152 ids on one Zen 3 core."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: len(logits)]
    logits.masked_fill_(torch.from_numpy(bits) == 0, -math.inf)


def _sample_row(logits: Tensor, sequence: SequenceState, logprobs: Tensor | None) -> Sampled:
    """`logprobs` are those of the raw logits, where a grammar has changed these already."""
    params = sequence.sampling
    if logprobs is None and params.logprobs is not None:
        logprobs = logits.log_softmax(dim=-1)
    if _is_masked(sequence):
        _mask(logits, sequence)
        if not logits.max().isfinite():
            return Sampled(0, corrupt=True, starved=True)
    token = int(logits.argmax()) if params.greedy else _draw(logits, sequence)
    if logprobs is None:
        return Sampled(token)
    return Sampled(token, _token_logprobs(logprobs, token, params.logprobs or 0))


def _token_logprobs(logprobs: Tensor, token: int, count: int) -> TokenLogprobs:
    best = logprobs.topk(min(count, len(logprobs)))
    ids = cast(list[int], best.indices.tolist())
    values = cast(list[float], best.values.tolist())
    top = list(zip(ids, values, strict=True))
    return TokenLogprobs(logprob=float(logprobs[token]), top=top)


def _mask(logits: Tensor, sequence: SequenceState) -> None:
    """In place: what the client and the engine allow, favour and punish."""
    params = sequence.sampling
    if (ids := sequence.allowed_ids()) is not None:
        allowed = torch.from_numpy(ids)
        kept = logits[allowed]
        logits.fill_(-math.inf)
        logits[allowed] = kept
    if banned := sequence.banned_ids():
        logits[torch.tensor(banned)] = -math.inf
    if params.logit_bias:
        bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float64)
        logits[torch.tensor(list(params.logit_bias))] += bias.clamp(-MOST_BIAS, MOST_BIAS).float()
    if params.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(np.array(sequence.token_ids, np.int64)))
        old = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if params.presence_penalty or params.frequency_penalty:
        output = np.array(sequence.token_ids[sequence.num_prompt :], np.int64)
        ids, counts = (torch.from_numpy(each) for each in np.unique(output, return_counts=True))
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts.float()


def _draw(logits: Tensor, sequence: SequenceState) -> int:
    """A draw from softmax(logits / temperature) over the kept ids, by Gumbel-max."""
    params = sequence.sampling
    scores = logits / params.temperature
    ids: Words = np.arange(len(scores), dtype=np.uint32)
    floor = _floor(scores, params)
    if floor > -math.inf:
        kept = (scores >= floor).nonzero().squeeze(1)
        scores, ids = scores[kept], ids[kept.numpy()]
    noise = gumbel(sequence.seed, len(sequence.token_ids), ids)
    return int(ids[int((scores + noise).argmax())])


def _floor(scores: Tensor, params: SamplingParams) -> float:
    """The least score that min_p, top_k and top_p keep; equal scores stay or go together.

    top_p's mass is counted among what top_k keeps.
    """
    floor = -math.inf
    if params.min_p > 0:
        floor = float(scores.max()) + math.log(params.min_p)
    least = -math.inf
    if 0 < params.top_k < len(scores):
        least = float(scores.topk(params.top_k).values[-1])
    if params.top_p < 1:
        least = _nucleus(scores, least, params.top_p)
    return max(floor, least)


def _nucleus(scores: Tensor, least: float, top_p: float) -> float:
    """The least score whose ids have less than top_p of the probability above them, of those from
    `least` on."""
    weights = (scores - scores.max()).exp_()
    budget = top_p * float(torch.where(scores >= least, weights, 0.0).sum())
    for count in (min(NUCLEUS, len(scores)), len(scores)):
        best = scores.topk(count).values
        mass = (best - best[0]).exp_()
        inside = int((mass.cumsum(0) - mass < budget).sum())
        if inside < count:
            break
    return max(least, float(best[max(inside, 1) - 1]))
