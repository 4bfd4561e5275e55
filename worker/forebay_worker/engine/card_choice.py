"""What rows of logits on a card are asked for beyond the sampling kernel: other logits to choose
from, and log-probabilities. Nothing of the vocabulary's size crosses to the host.

`sampler` says what the settings mean and in which order they hold; a row's token is the same there,
but for rounding. It knows no model, no cache and no step.
"""

import math
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import torch
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import TokenLogprobs
from torch import Tensor

from forebay_worker.engine.batch import IntArray, Sampled, SequenceState
from forebay_worker.engine.sampler import MOST_BIAS
from forebay_worker.kernels.sampling import SamplingRows, make_scratch, sample, signed

PIECE = 32
"""Rows at a time: each step over their logits takes 0.6 MB a row of 151,936 ids."""
_SPLITS = 8
"""Programs of a row in the sampling kernel, whatever the number of rows: it is compiled once."""

Cells = list[tuple[int, IntArray]]
"""Rows and some ids of each."""


def choose(logits: Tensor, sequences: Sequence[SequenceState]) -> list[Sampled]:
    """The next token of each sequence by its row of logits [R, vocabulary] float32, which it
    changes. A row with a NaN, or with no finite largest logit once masked, is corrupt."""
    settings = [each.sampling for each in sequences]
    asked = [at for at, each in enumerate(settings) if each.logprobs is not None]
    raw = logits[asked] if asked else None
    broken = ~logits.amax(-1).isfinite()
    adjust(logits, sequences)
    positions = [len(each.token_ids) for each in sequences]
    tokens, corrupt = _draw(logits, settings, [each.seed for each in sequences], positions)
    facts = cast(list[list[int]], torch.stack((tokens, corrupt, broken), 1).tolist())
    results = [
        Sampled(token, corrupt=bad != 0, starved=bad != 0 and not was_broken)
        for token, bad, was_broken in facts
    ]
    if raw is not None:
        read = LogprobsRead(raw, tokens[asked], [settings[at] for at in asked])
        for at, logprobs in zip(asked, read.results(), strict=True):
            results[at].logprobs = logprobs
    return results


def adjust(logits: Tensor, sequences: Sequence[SequenceState]) -> None:
    """In place: what grammars, clients and the engine allow, favour and punish."""
    asked = [each.sampling for each in sequences]
    _allow_by_grammar(logits, [each.allowed_mask() for each in sequences])
    _allow(logits, _cells(each.allowed_ids() for each in sequences))
    banned = _cells(np.array(each.banned_ids(), np.int64) for each in sequences)
    if banned:
        logits.view(-1)[_places(banned, logits)] = -math.inf
    _favour(logits, asked)
    _repel(logits, sequences)
    _punish(logits, sequences)


class LogprobsRead:
    """Log-probabilities on their way from a card: of chosen tokens and of the likeliest."""

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


def prepare(logits: Tensor) -> None:
    """Compiles the kernel that `choose` launches for such logits: no request waits for that."""
    _draw(logits[:1].float(), [SamplingParams()], [0], [0])


def _draw(
    logits: Tensor, asked: Sequence[SamplingParams], seeds: list[int], positions: list[int]
) -> tuple[Tensor, Tensor]:
    """Tokens [R] and whether each is none [R], both int64."""
    rows, device = len(asked), logits.device

    def column(values: list[float] | list[int], kind: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=kind).to(device)

    settings = SamplingRows(
        temperature=column([each.temperature for each in asked], torch.float32),
        top_k=column([each.top_k for each in asked], torch.int32),
        top_p=column([each.top_p for each in asked], torch.float32),
        min_p=column([each.min_p for each in asked], torch.float32),
        seeds=column([signed(seed) for seed in seeds], torch.int64),
        positions=column(positions, torch.int64),
    )
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    corrupt = torch.empty(rows, dtype=torch.int32, device=device)
    sample(logits, settings, make_scratch(rows, device, rows * _SPLITS), tokens, corrupt)
    return tokens, corrupt.long()


def _cells(ids: Iterable[IntArray | None]) -> Cells:
    return [(row, each) for row, each in enumerate(ids) if each is not None and len(each)]


def _places(cells: Cells, logits: Tensor) -> Tensor:
    """Their places in the flat logits, on the same device."""
    flat = np.concatenate([row * logits.shape[1] + ids for row, ids in cells])
    return torch.from_numpy(flat).to(logits.device)


def _per_cell(cells: Cells, values: Iterable[float], logits: Tensor) -> Tensor:
    """The value of each cell's row, of `values` by row."""
    by_row = np.array(list(values), np.float32)
    repeated = [np.repeat(by_row[row], len(ids)) for row, ids in cells]
    return torch.from_numpy(np.concatenate(repeated)).to(logits.device)


def _allow_by_grammar(logits: Tensor, masks: list[bytes | None]) -> None:
    """Bits become a mask on the card: an eighth of a byte an id goes there."""
    ruled = [row for row, mask in enumerate(masks) if mask is not None]
    if not ruled:
        return
    vocab, device = logits.shape[1], logits.device
    size = -(-vocab // 8)
    packed = [np.frombuffer(mask, np.uint8)[:size] for mask in masks if mask is not None]
    octets = torch.from_numpy(np.stack(packed)).to(device)
    bits = octets[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
    rows = torch.tensor(ruled, device=device)
    forbidden = bits.view(len(ruled), -1)[:, :vocab] == 0
    logits[rows] = logits[rows].masked_fill_(forbidden, -math.inf)


def _allow(logits: Tensor, cells: Cells) -> None:
    if cells:
        flat, places = logits.view(-1), _places(cells, logits)
        kept = flat[places]
        logits[[row for row, _ in cells]] = -math.inf
        flat[places] = kept


def _favour(logits: Tensor, asked: Sequence[SamplingParams]) -> None:
    """By logit_bias."""
    cells = _cells(np.array(list(each.logit_bias), np.int64) for each in asked)
    if cells:
        bias = np.array([value for each in asked for value in each.logit_bias.values()])
        bias = torch.from_numpy(bias.clip(-MOST_BIAS, MOST_BIAS).astype(np.float32))
        flat, places = logits.view(-1), _places(cells, logits)
        flat[places] = flat[places] + bias.to(logits.device)


def _repel(logits: Tensor, sequences: Sequence[SequenceState]) -> None:
    """What has been said or asked, by repetition_penalty. An id that comes twice is written twice,
    the same each time."""
    cells = _cells(
        np.array(each.token_ids, np.int64) if each.sampling.repetition_penalty != 1 else None
        for each in sequences
    )
    if cells:
        flat, places = logits.view(-1), _places(cells, logits)
        penalty = _per_cell(cells, (each.sampling.repetition_penalty for each in sequences), logits)
        old = flat[places]
        flat[places] = torch.where(old > 0, old / penalty, old * penalty)


def _punish(logits: Tensor, sequences: Sequence[SequenceState]) -> None:
    """What has been said, by presence_penalty and frequency_penalty."""
    cells = _cells(
        np.array(each.token_ids[each.num_prompt :], np.int64)
        if each.sampling.presence_penalty or each.sampling.frequency_penalty
        else None
        for each in sequences
    )
    if cells:
        places = _places(cells, logits)
        counts = torch.zeros_like(logits).view(-1)
        counts.index_add_(0, places, torch.ones_like(places, dtype=counts.dtype))
        asked = [each.sampling for each in sequences]
        presence = _per_cell(cells, (each.presence_penalty for each in asked), logits)
        frequency = _per_cell(cells, (each.frequency_penalty for each in asked), logits)
        flat = logits.view(-1)
        flat[places] = flat[places] - (presence + frequency * counts[places])
