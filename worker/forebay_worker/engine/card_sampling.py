"""Sampling on a card: one kernel within the step for the rows that ask for no more than it knows,
and `card_choice` behind the step for the others.

The kernel knows temperature, top_k, top_p and min_p. Log-probabilities are read behind the step,
and the next one is launched meanwhile. Penalties, bias, masks and grammars depend on all tokens
before, which the host knows: such a row's token is chosen once the step has landed, and the next
step waits for it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from forebay_shared.sampling import SamplingParams
from torch import Tensor

from forebay_worker.engine.batch import IntArray, Sampled, ScheduledRow
from forebay_worker.engine.card_choice import PIECE, LogprobsRead, choose
from forebay_worker.engine.scoring import Logits, add_scores
from forebay_worker.engine.staging import Fetched, Fields, Harvest
from forebay_worker.kernels.sampling import (
    SamplingRows,
    SamplingScratch,
    make_scratch,
    sample,
    signed,
)


def fields(rows: int) -> Fields:
    """The kernel's parameters, as arrays of a packet."""
    return {
        "temperature": ("f4", rows),
        "top_k": ("i4", rows),
        "top_p": ("f4", rows),
        "min_p": ("f4", rows),
        "seeds": ("i8", rows),
    }


def fill_row(arrays: Mapping[str, Any], at: int, params: SamplingParams, seed: int) -> None:
    """All of a row's parameters. A row whose token is chosen later is greedy here: cheapest."""
    greedy = params.greedy or is_adjusted(params)
    arrays["temperature"][at] = 0.0 if greedy else params.temperature
    arrays["top_k"][at] = params.top_k
    arrays["top_p"][at] = params.top_p
    arrays["min_p"][at] = params.min_p
    arrays["seeds"][at] = signed(seed)


def fill_padding(arrays: Mapping[str, Any], start: int, end: int) -> None:
    arrays["temperature"][start:end] = 0.0


def is_adjusted(params: SamplingParams) -> bool:
    """Whether every token of such a sequence is chosen from other logits than the model's.
    `banned_ids` may add some while `min_tokens` holds."""
    return bool(
        params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.grammar is not None
    )


class Filled(NamedTuple):
    """places: of each row's result among the step's. adjusted: rows whose token is chosen from
    other logits than the model's. read: others whose log-probabilities are asked for.
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
        self._results = Harvest({"tokens": ("i8", most_rows), "corrupt": ("i4", most_rows)}, device)
        self.tokens = self._results.device["tokens"]
        self._scratch: dict[int, SamplingScratch] = {}
        self._device = device

    def launch(self, rows: int, arrays: Mapping[str, Tensor]) -> None:
        """Samples the first `rows` rows of the logits by the arrays of `fields` and the positions
        that the tokens will have, which are the rows' `kv_lens`."""
        scratch = self._scratch.get(rows)
        if scratch is None:
            scratch = self._scratch[rows] = make_scratch(rows, self._device)
        sample(
            self.logits[:rows],
            SamplingRows(
                **{name: arrays[name] for name in fields(rows)}, positions=arrays["kv_lens"]
            ),
            scratch,
            self.tokens[:rows],
            self._results.device["corrupt"][:rows],
        )

    def fetch(self) -> Fetched:
        """Starts the copy of what the last launch samples."""
        return self._results.fetch()


class CardStep:
    """A launched step. The tokens of its adjusted rows are chosen when it lands, from logits that
    are there until the next launch. `scored` gives the logits of what is to be scored, if any is.
    """

    def __init__(
        self,
        rows: Sequence[ScheduledRow],
        filled: Filled,
        sampler: CardSampler,
        scored: Logits | None = None,
    ) -> None:
        self._rows, self._filled = rows, filled
        self._sampler, self._scored = sampler, scored
        self._reads = [self._start_reading(piece) for piece in _pieces(filled.read)]
        self._fetched = sampler.fetch()

    @property
    def may_wait(self) -> bool:
        return not self._filled.adjusted and self._scored is None

    @torch.inference_mode()
    def results(self) -> list[Sampled | None]:
        """Waits for the step; one result per row, None where it neither samples nor scores."""
        for at in self._filled.adjusted:
            self._rows[at].sequence.allowed_mask()  # kept there; the card computes meanwhile
        arrays, places = self._fetched.arrays(), self._filled.places
        tokens: list[int] = arrays["tokens"][places].tolist()
        corrupt: list[int] = arrays["corrupt"][places].tolist()
        results = [
            Sampled(token, corrupt=bad != 0) if row.samples else None
            for row, token, bad in zip(self._rows, tokens, corrupt, strict=True)
        ]
        read = (each for reading in self._reads for each in reading.results())
        for at, logprobs in zip(self._filled.read, read, strict=True):
            results[at] = Sampled(tokens[at], logprobs, corrupt[at] != 0)
        for piece in _pieces(self._filled.adjusted):
            for at, chosen in zip(piece, self._choose(piece), strict=True):
                results[at] = chosen
        return results if self._scored is None else add_scores(self._rows, results, self._scored)

    def _start_reading(self, read: list[int]) -> LogprobsRead:
        places, sampler = self._places_of(read), self._sampler
        asked = [self._rows[at].sequence.sampling for at in read]
        return LogprobsRead(sampler.logits[places].float(), sampler.tokens[places], asked)

    def _choose(self, adjusted: list[int]) -> list[Sampled]:
        logits = self._sampler.logits[self._places_of(adjusted)].float()
        return choose(logits, [self._rows[at].sequence for at in adjusted])

    def _places_of(self, rows: list[int]) -> Tensor:
        """On the card, without a wait for the step that has just been launched."""
        places = torch.from_numpy(self._filled.places[rows])
        return places.to(self._sampler.logits.device, non_blocking=True)


def _pieces(rows: list[int]) -> list[list[int]]:
    return [rows[start : start + PIECE] for start in range(0, len(rows), PIECE)]
