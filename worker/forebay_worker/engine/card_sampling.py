"""Sampling on a card: one kernel within the step for the rows that ask for no more than it knows,
and `card_choice` and `card_logprobs` behind the step for the others.

The kernel knows temperature, top_k, top_p and min_p. Rows with penalties, bias and masks have their
tokens chosen again right behind it, from other logits, and log-probabilities are read behind that:
all of it is launched with the step, and the next one meanwhile. Only where bad words or a grammar
must have seen a token before another is chosen, the next step waits for this one.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from forebay_shared.sampling import SamplingParams
from torch import Tensor

from forebay_worker.engine import sequence
from forebay_worker.engine.batch import IntArray, Sampled, ScheduledRow
from forebay_worker.engine.card_choice import CardChoice, Choosing
from forebay_worker.engine.card_logprobs import LogprobsReader, Reading
from forebay_worker.engine.card_rules import needs_host, param_fields
from forebay_worker.engine.scoring import Logits, add_scores
from forebay_worker.engine.staging import Fetched, Harvest
from forebay_worker.kernels.sampling import SamplingRows, SamplingScratch, make_scratch, sample


class Filled(NamedTuple):
    """places: of each row's result among the step's. adjusted: rows whose token is chosen from
    other logits than the model's. read: rows whose log-probabilities are asked for.
    scored: flat indexes of the tokens after which a prompt's next token is to be scored."""

    places: IntArray
    adjusted: list[int]
    read: list[int]
    scored: IntArray


class CardSampler:
    """Tokens of up to `most_rows` rows of logits; its buffers last, so graphs may hold them.

    `logits` [rows, vocabulary] is where the decoder is to leave them, `tokens` [rows] int64 where
    the last step's tokens are.
    """

    def __init__(
        self, most_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.logits = torch.zeros((most_rows, vocab_size), dtype=dtype, device=device)
        self._results = Harvest(
            {
                "tokens": ("i8", most_rows),
                "corrupt": ("i4", most_rows),
                "unchosen": ("i4", most_rows),
            },
            device,
        )
        self.tokens = self._results.device["tokens"]
        self._scratch: dict[int, SamplingScratch] = {}
        self._choice = CardChoice(most_rows, vocab_size, device)
        self._reader = LogprobsReader(most_rows, vocab_size, device)
        self._device = device

    def prepare(self) -> None:
        """Compiles what is launched behind a step, by a row that nobody asked for: no request waits
        for that. The logits stay as they are."""
        params = SamplingParams(logprobs=1)
        row = sequence.Sequence("", 0, "", 0, [0], 1, params, 0, 2, frozenset())
        self.choose([Choosing(row, 0, -1, 1)], self.tokens)
        self.read(np.zeros(1, np.int64), [params])

    def launch(self, rows: int, arrays: Mapping[str, Tensor]) -> None:
        """Samples the first `rows` rows of the logits by the arrays of `param_fields` and the
        positions that the tokens will have, which are the rows' `kv_lens`."""
        scratch = self._scratch.get(rows)
        if scratch is None:
            scratch = self._scratch[rows] = make_scratch(rows, self._device)
        sample(
            self.logits[:rows],
            SamplingRows(
                **{name: arrays[name] for name in param_fields(rows)}, positions=arrays["kv_lens"]
            ),
            scratch,
            self.tokens[:rows],
            self._results.device["corrupt"][:rows],
        )

    def choose(self, rows: Sequence[Choosing], token_ids: Tensor) -> None:
        """Chooses tokens of the last launch again, from adjusted logits. `token_ids` [any] int64
        are those that the step began with."""
        unchosen = self._results.device["unchosen"]
        self._choice.choose(rows, self.logits, token_ids, self.tokens, unchosen)

    def read(self, places: IntArray, asked: Sequence[SamplingParams]) -> Reading:
        """Starts to read log-probabilities of the last launch's rows at `places`."""
        return self._reader.read(self.logits, self.tokens, places, asked)

    def fetch(self) -> Fetched:
        """Starts the copy of what has been chosen."""
        return self._results.fetch()


class CardStep:
    """A launched step. `token_ids` are those that it began with, on the card; `scored` gives the
    logits of what is to be scored, if any is."""

    def __init__(
        self,
        rows: Sequence[ScheduledRow],
        filled: Filled,
        sampler: CardSampler,
        token_ids: Tensor,
        scored: Logits | None = None,
    ) -> None:
        self._rows, self._filled, self._scored = rows, filled, scored
        places = filled.places
        if filled.adjusted:
            choosing = [_choosing(rows[at], int(places[at])) for at in filled.adjusted]
            sampler.choose(choosing, token_ids)
        self._read: Reading | None = None
        if filled.read:
            asked = [rows[at].sequence.sampling for at in filled.read]
            self._read = sampler.read(places[filled.read], asked)
        self._fetched = sampler.fetch()

    @property
    def may_wait(self) -> bool:
        adjusted = (self._rows[at].sequence.sampling for at in self._filled.adjusted)
        return self._scored is None and not any(map(needs_host, adjusted))

    @torch.inference_mode()
    def results(self) -> list[Sampled | None]:
        """Waits for the step; one result per row, None where it neither samples nor scores."""
        arrays, filled = self._fetched.arrays(), self._filled
        tokens: list[int] = arrays["tokens"][filled.places].tolist()
        corrupt: list[int] = arrays["corrupt"][filled.places].tolist()
        results = [
            Sampled(token, corrupt=bad != 0) if row.samples else None
            for row, token, bad in zip(self._rows, tokens, corrupt, strict=True)
        ]
        unchosen: list[int] = arrays["unchosen"][filled.places[filled.adjusted]].tolist()
        for at, bad in zip(filled.adjusted, unchosen, strict=True):
            starved = bad != 0 and corrupt[at] == 0
            results[at] = Sampled(tokens[at], corrupt=bad != 0, starved=starved)
        read = [] if self._read is None else self._read.results()
        for at, logprobs in zip(filled.read, read, strict=True):
            if (result := results[at]) is not None:
                result.logprobs = logprobs
        return results if self._scored is None else add_scores(self._rows, results, self._scored)


def _choosing(row: ScheduledRow, place: int) -> Choosing:
    """Raises ValueError when the host does not know all that it must."""
    own = row.sequence
    position = own.num_computed + row.num_new
    if position == len(own.token_ids):
        return Choosing(own, place, -1, position)
    if needs_host(own.sampling):
        raise ValueError("a row with bad words or a grammar does not know its newest token")
    # A decode row's one token is where the row is; the step before sampled it.
    return Choosing(own, place, place, position)
