"""Sampling on a card: one kernel for the rows that ask for no more than it knows, and the CPU's
sampler, row by row, for the others.

The kernel knows temperature, top_k, top_p and min_p. Penalties, bias, masks, grammars and
log-probabilities take a row's logits to the host: 0.6 MB and some milliseconds each, for which the
next step has to wait.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from forebay_shared.sampling import SamplingParams
from torch import Tensor

from forebay_worker.engine.batch import IntArray, Sampled, ScheduledRow
from forebay_worker.engine.sampler import sample as sample_on_host
from forebay_worker.engine.scoring import Logits, add_scores
from forebay_worker.engine.staging import Fetched, Fields, Harvest
from forebay_worker.kernels.sampling import SamplingRows, SamplingScratch, make_scratch, sample


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
    """All of a row's parameters. A row of the host's is greedy here: cheapest."""
    greedy = params.greedy or asks_host(params)
    arrays["temperature"][at] = 0.0 if greedy else params.temperature
    arrays["top_k"][at] = params.top_k
    arrays["top_p"][at] = params.top_p
    arrays["min_p"][at] = params.min_p
    arrays["seeds"][at] = seed - (seed >> 63 << 64)


def fill_padding(arrays: Mapping[str, Any], start: int, end: int) -> None:
    arrays["temperature"][start:end] = 0.0


def asks_host(params: SamplingParams) -> bool:
    """Whether every token of such a sequence is for the CPU's sampler. `banned_ids` may add some
    while `min_tokens` holds."""
    return bool(
        params.logprobs is not None
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.grammar is not None
    )


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
    """A launched step. `places` of the rows' results; the host samples rows `on_host`, whose logits
    are there until the next launch. `scored` gives the logits of what is to be scored, if any is.
    """

    def __init__(
        self,
        rows: Sequence[ScheduledRow],
        places: IntArray,
        on_host: list[int],
        sampler: CardSampler,
        scored: Logits | None = None,
    ) -> None:
        self._rows, self._places, self._on_host = rows, places, on_host
        self._sampler, self._scored = sampler, scored
        self._fetched = sampler.fetch()

    @property
    def may_wait(self) -> bool:
        return not self._on_host and self._scored is None

    @torch.inference_mode()
    def results(self) -> list[Sampled | None]:
        """Waits for the step; one result per row, None where it neither samples nor scores."""
        arrays = self._fetched.arrays()
        tokens: list[int] = arrays["tokens"][self._places].tolist()
        corrupt: list[int] = arrays["corrupt"][self._places].tolist()
        results = [
            Sampled(token, corrupt=bad != 0) if row.samples else None
            for row, token, bad in zip(self._rows, tokens, corrupt, strict=True)
        ]
        if self._on_host:
            at = torch.from_numpy(self._places[self._on_host])
            logits = self._sampler.logits
            chosen = logits[at.to(logits.device)].float().cpu()
            sequences = [self._rows[each].sequence for each in self._on_host]
            for each, again in zip(self._on_host, sample_on_host(chosen, sequences), strict=True):
                results[each] = again
        return results if self._scored is None else add_scores(self._rows, results, self._scored)
