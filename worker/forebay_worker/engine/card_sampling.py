"""Sampling on a card: one kernel for the rows that ask for no more than it knows, and the CPU's
sampler, row by row, for the others.

The kernel knows temperature, top_k, top_p and min_p. Penalties, bias, masks, grammars and
log-probabilities take a row's logits to the host: 0.6 MB and some milliseconds each.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from forebay_shared.sampling import SamplingParams
from torch import Tensor

from forebay_worker.engine.batch import Sampled, SequenceState
from forebay_worker.engine.sampler import sample as sample_on_host
from forebay_worker.engine.staging import Fields, Staging
from forebay_worker.kernels.sampling import SamplingRows, SamplingScratch, make_scratch, sample


def fields(rows: int) -> Fields:
    """The kernel's inputs, as arrays of a staging."""
    return {
        "temperature": ("f4", rows),
        "top_k": ("i4", rows),
        "top_p": ("f4", rows),
        "min_p": ("f4", rows),
        "seeds": ("i8", rows),
        "next_positions": ("i8", rows),
    }


def fill_row(arrays: Mapping[str, Any], at: int, params: SamplingParams, seed: int) -> None:
    """All of a row's parameters but its position. A row of the host's is greedy here: cheapest."""
    greedy = params.greedy or asks_host(params)
    arrays["temperature"][at] = 0.0 if greedy else params.temperature
    arrays["top_k"][at] = params.top_k
    arrays["top_p"][at] = params.top_p
    arrays["min_p"][at] = params.min_p
    arrays["seeds"][at] = seed - (seed >> 63 << 64)


def fill_padding(arrays: Mapping[str, Any], start: int, end: int) -> None:
    arrays["temperature"][start:end] = 0.0


def asks_host(params: SamplingParams) -> bool:
    """Whether every token of such a sequence is for the CPU's sampler; `banned_ids` may be too."""
    return bool(
        params.logprobs is not None
        or params.logit_bias
        or params.allowed_token_ids
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.grammar is not None
    )


class CardSampler:
    """Tokens of up to `most_rows` rows of logits; its buffers last, so graphs may hold them.

    `logits` [rows, vocabulary] is where the decoder is to leave them.
    """

    def __init__(
        self, most_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.logits = torch.zeros((most_rows, vocab_size), dtype=dtype, device=device)
        self._results = Staging({"tokens": ("i8", most_rows), "corrupt": ("i4", most_rows)}, device)
        self._scratch: dict[int, SamplingScratch] = {}
        self._device = device

    def launch(self, rows: int, arrays: Mapping[str, Tensor]) -> None:
        """Samples the first `rows` rows of the logits by the arrays of `fields`."""
        scratch = self._scratch.get(rows)
        if scratch is None:
            scratch = self._scratch[rows] = make_scratch(rows, self._device)
        sample(
            self.logits[:rows],
            SamplingRows(*(arrays[name][:rows] for name in fields(rows))),
            scratch,
            self._results.device["tokens"][:rows],
            self._results.device["corrupt"][:rows],
        )

    def results(self, sequences: Sequence[SequenceState], on_host: list[int]) -> list[Sampled]:
        """What the last launch gave its first rows; those in `on_host` are sampled again there."""
        self._results.fetch()
        count = len(sequences)
        tokens: list[int] = self._results.host["tokens"][:count].tolist()
        corrupt: list[int] = self._results.host["corrupt"][:count].tolist()
        sampled = [
            Sampled(token, corrupt=bool(bad)) for token, bad in zip(tokens, corrupt, strict=True)
        ]
        if on_host:
            logits = self.logits[torch.tensor(on_host, device=self._device)].float().cpu()
            again = sample_on_host(logits, [sequences[at] for at in on_host])
            for at, each in zip(on_host, again, strict=True):
                sampled[at] = each
        return sampled
