"""The JSON of a text completion's answer: echoes of prompts, and the best of several choices."""

import math
from collections.abc import Sequence

import msgspec

from forebay_gateway.api.openai.shapes import Extras, Identity, Shape
from forebay_gateway.api.transcript import Update, Usage
from forebay_gateway.parts import Collected

_encode = msgspec.json.Encoder().encode


class Best:
    """Of every `candidates` choices of a prompt the `n` with the best log-probability per token."""

    def __init__(self, n: int, candidates: int, prompts: int) -> None:
        self._n = n
        self._candidates = candidates
        self._logprobs: list[list[float]] = [[] for _ in range(candidates * prompts)]

    def collect(self, update: Update) -> None:
        self._logprobs[update.index] += [entry.logprob for entry in update.logprobs]

    def chosen(self) -> list[int]:
        """The choices' indexes, prompt by prompt, the best first."""
        found: list[int] = []
        for first in range(0, len(self._logprobs), self._candidates):
            group = range(first, first + self._candidates)
            found += sorted(group, key=self._mean, reverse=True)[: self._n]
        return found

    def _mean(self, index: int) -> float:
        """An answer without a token is the worst."""
        logprobs = self._logprobs[index]
        return math.fsum(logprobs) / len(logprobs) if logprobs else -math.inf


class CompletionShape(Shape):
    """`echoes` holds the text in front of each choice, its prompt, when that was asked for; it is
    `scored` when its log-probabilities come with it. `best` says which choices are the answer."""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(
        self,
        identity: Identity,
        extras: Extras,
        *,
        echoes: Sequence[str] = (),
        scored: bool = False,
        best: Best | None = None,
    ) -> None:
        super().__init__(identity, extras)
        self._echoes = echoes
        self._scored = scored
        self._best = best

    def _first(self, index: int, usage: Usage | None) -> bytes:
        extra = b"" if self._token_ids is None else self._token_ids.prompt(index)
        text = self._echoes[index] if self._echoes and not self._scored else ""
        if not text and not extra:
            return b""
        return self._event(index, self._delta(text), b"null", b"null", usage, extra)

    def events(self, update: Update, usage: Usage | None) -> bytes:
        if not self._scored or update.prompt_logprobs is None:
            return super().events(update, usage)
        delta = self._delta(self._echoes[update.index])
        logprobs = self._logprobs[update.index].chunk(update)
        return self._event(update.index, delta, logprobs, b"null", usage)

    def _delta(self, text: str) -> bytes:
        return b'"text":%b' % _encode(text)

    def _empty(self) -> bytes:
        return b'"text":""'

    def _message(self, index: int, answer: Collected) -> bytes:
        text = answer.text
        return self._delta(self._echoes[index] + text if self._echoes else text)

    def _extra(self, index: int) -> bytes:
        members = super()._extra(index)
        if self._token_ids is not None:
            members += self._token_ids.prompt(index)
        if self._prompt_scores is not None:
            members += self._prompt_scores.whole(index)
        return members

    def _chosen(self, size: int) -> Sequence[int]:
        return range(size) if self._best is None else self._best.chosen()

    def collect(self, update: Update) -> None:
        super().collect(update)
        if self._best is not None:
            self._best.collect(update)
