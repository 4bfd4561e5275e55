"""Tokens that are chosen on a card from other logits than the model's own.

`card_rules` says what a sequence asks, in words that one packet brings over; one kernel adjusts
the logits by them and the sampling kernel draws. Nothing waits for the card, nor need the host know
the newest token. `sampler` says what the settings mean and in which order they hold; a row's token
is the same there, but for rounding. It knows no model, no cache and no step.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forebay_worker.engine.batch import SequenceState
from forebay_worker.engine.card_rules import Rules, Words, fill_params, most_words, param_fields
from forebay_worker.engine.staging import Array, Fields, Layout, Staging
from forebay_worker.kernels.adjust import adjust
from forebay_worker.kernels.reference import Adjustments
from forebay_worker.kernels.sampling import SamplingRows, make_scratch, sample

PIECE = 64
"""Rows at a time: their adjusted logits take 0.6 MB a row of 151,936 ids."""
_SPLITS = 8
"""Programs of a row in the sampling kernel, whatever the number of rows: it is compiled once."""
_FEWEST_WORDS = 4096
"""Of a packet: 32 KB."""
_WORDS = 2**18
"""Of a packet, where a single row may not have more: 4,000 ids that each of 64 rows has said."""


class Choosing(NamedTuple):
    """A row whose token is to be chosen.

    place: of its logits, and of what becomes of them. newest: where the newest of its tokens is on
    the card, while the host does not know it; else -1. position: that the chosen token will have.
    """

    sequence: SequenceState
    place: int
    newest: int
    position: int


class _Wanted(NamedTuple):
    """A row of a packet, its words and how many there are of each kind."""

    row: Choosing
    words: Words
    sizes: tuple[int, ...]


def _layout(rows: int, words: int) -> Layout:
    """The words come last, so that all else lies where it does whatever their number."""
    fields: Fields = {
        "places": ("i4", rows),
        "newest": ("i4", rows),
        "positions": ("i8", rows),
        "edges": ("i4", rows * 5),
        "repetition": ("f4", rows),
        "presence": ("f4", rows),
        "frequency": ("f4", rows),
        **param_fields(rows),
        "words": ("i8", words),
    }
    return Layout(fields)


class CardChoice:
    """Chooses tokens of rows of `vocab` logits, at most `rows` of them at a time."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        rows = min(rows, PIECE)
        most = max(_WORDS, most_words(vocab))
        sizes = [size for at in range(32) if (size := _FEWEST_WORDS << at) < most]
        self._layouts = [_layout(rows, size) for size in (*sizes, most)]
        largest = self._layouts[-1]
        self._arrays: dict[str, Array] = {
            name: np.zeros(count, kind) for name, (kind, count) in largest.fields.items()
        }
        self._staging = Staging(largest.size, device)
        sent = self._staging.tensors(largest)
        self._adjustments = Adjustments(*(sent[name] for name in Adjustments._fields))
        self._settings = SamplingRows(*(sent[name] for name in SamplingRows._fields))
        self._adjusted = torch.empty((rows, vocab), dtype=torch.float32, device=device)
        self._scratch = make_scratch(rows, device, rows * _SPLITS)
        self._rules: dict[SequenceState, Rules] = {}
        self._settled: list[SequenceState] = []
        self._rows, self._vocab, self._most_words = rows, vocab, most

    def choose(
        self,
        rows: Sequence[Choosing],
        logits: Tensor,
        token_ids: Tensor,
        tokens: Tensor,
        corrupt: Tensor,
    ) -> None:
        """Starts to choose a token for each row from its logits, of `logits` [any, vocab], to its
        place in `tokens` [any] int64. A row with a NaN, or with no finite largest logit once
        adjusted, is `corrupt` [any] int32, with a 1 there. The newest tokens are in `token_ids`."""
        self._renew(rows)
        for count in self._send(rows):
            adjusted = self._adjusted[:count]
            adjust(logits, token_ids, self._adjustments, adjusted)
            sample(
                adjusted, self._settings, self._scratch, tokens, corrupt,
                places=self._adjustments.places,
            )  # fmt: skip

    def _renew(self, rows: Sequence[Choosing]) -> None:
        """Keeps the rules of these sequences, which are likely to be here again, and no others."""
        before = self._rules
        self._rules = {
            each: before.get(each) or Rules(each, self._vocab)
            for each in (row.sequence for row in rows)
        }

    def _send(self, rows: Sequence[Choosing]) -> Iterator[int]:
        """Sends packets of as many rows as fit; how many are on the card at each turn."""
        piece: list[_Wanted] = []
        total = 0
        for row in rows:
            words = self._rules[row.sequence].words(row.sequence, 0 if row.newest < 0 else 1)
            sizes = tuple(map(len, words))
            size = sum(sizes)
            if len(piece) == self._rows or total + size > self._most_words:
                yield self._send_piece(piece, total)
                piece, total = [], 0
            piece.append(_Wanted(row, words, sizes))
            total += size
        if piece:
            yield self._send_piece(piece, total)

    def _send_piece(self, piece: list[_Wanted], total: int) -> int:
        arrays, count = self._arrays, len(piece)
        arrays["places"][:count] = [each.row.place for each in piece]
        arrays["newest"][:count] = [each.row.newest for each in piece]
        arrays["positions"][:count] = [each.row.position for each in piece]
        self._fill_settings([each.row.sequence for each in piece])
        parts = [part for each in piece for part in each.words if len(part)]
        if parts:
            np.concatenate(parts, out=arrays["words"][:total])
        edges = arrays["edges"].reshape(-1, 5)[:count]
        sizes = np.array([each.sizes for each in piece])
        edges[:, 1:] = sizes.ravel().cumsum().reshape(sizes.shape)
        edges[:, 0] = edges[:, 1] - sizes[:, 0]
        layout = next(each for each in self._layouts if each.fields["words"][1] >= total)
        self._staging.send(layout, arrays)
        return count

    def _fill_settings(self, sequences: list[SequenceState]) -> None:
        """What stays as it is while the same sequences come in the same order."""
        if sequences == self._settled:
            return
        for at, each in enumerate(sequences):
            params, arrays = each.sampling, self._arrays
            fill_params(arrays, at, params, each.seed)
            arrays["repetition"][at] = params.repetition_penalty
            arrays["presence"][at] = params.presence_penalty
            arrays["frequency"][at] = params.frequency_penalty
        self._settled = sequences
