"""Log-probabilities in the two forms of the OpenAI dialect.

Chat lists an object per token; text completions keep four parallel arrays. A token that holds a
part of a character shows it through `bytes` (chat) or gives its text to the token that completes it
(completions). It knows no engine and no HTTP.
"""

import codecs
import math
from collections.abc import Iterable

import msgspec
from forebay_shared.wire import TokenLogprobs

from forebay_gateway.api.transcript import Update
from forebay_gateway.output import Vocabulary

FLOOR = -9999.0
"""Stands for a probability of zero, which JSON cannot say as a logarithm."""

_encode = msgspec.json.Encoder().encode


class _Top(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(_Top):
    """A token, its log-probability, and the likeliest alternatives."""

    top_logprobs: list[_Top]


class _Content(msgspec.Struct):
    content: list[TokenEntry]
    refusal: None = None


class _Arrays(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class ChatLogprobs:
    """One choice of a chat. `top` is how many alternatives are listed."""

    def __init__(self, vocabulary: Vocabulary, top: int) -> None:
        self._vocabulary = vocabulary
        self._top = top
        self._all: list[TokenEntry] = []

    def chunk(self, update: Update) -> bytes:
        return _encode(_Content(self.tokens(update)))

    def collect(self, update: Update) -> None:
        self._all += self.tokens(update)

    def whole(self) -> bytes:
        return _encode(_Content(self._all))

    def tokens(self, update: Update) -> list[TokenEntry]:
        """The update's tokens that have a text, with what is listed of each."""
        return [
            self._token(token_id, entry) for token_id, entry in _visible(self._vocabulary, update)
        ]

    def _token(self, token_id: int, entry: TokenLogprobs) -> TokenEntry:
        spelling = self._vocabulary.spelling(token_id)
        return TokenEntry(
            token=_text(spelling),
            logprob=_finite(entry.logprob),
            bytes=list(spelling),
            top_logprobs=[self._alternative(*pair) for pair in entry.top[: self._top]],
        )

    def _alternative(self, token_id: int, logprob: float) -> _Top:
        spelling = self._vocabulary.spelling(token_id)
        return _Top(_text(spelling), _finite(logprob), list(spelling))


class CompletionLogprobs:
    """One choice of a text completion. `offset` is where its text begins (behind an echo)."""

    def __init__(self, vocabulary: Vocabulary, top: int) -> None:
        self._vocabulary = vocabulary
        self._top = top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._all = _Arrays([], [], [], [])

    def chunk(self, update: Update) -> bytes:
        return _encode(self._arrays(update))

    def collect(self, update: Update) -> None:
        arrays = self._arrays(update)
        for name in _Arrays.__struct_fields__:
            getattr(self._all, name).extend(getattr(arrays, name))

    def whole(self) -> bytes:
        return _encode(self._all)

    def _arrays(self, update: Update) -> _Arrays:
        arrays = _Arrays([], [], [], [])
        for token_id, entry in _visible(self._vocabulary, update):
            text = self._decoder.decode(self._vocabulary.spelling(token_id))
            arrays.text_offset.append(self._offset)
            arrays.token_logprobs.append(_finite(entry.logprob))
            arrays.tokens.append(text)
            arrays.top_logprobs.append(self._alternatives(entry))
            self._offset += len(text)
        return arrays

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """Best first; of two tokens with one text the better counts."""
        found: dict[str, float] = {}
        for token_id, logprob in entry.top[: self._top]:
            found.setdefault(_text(self._vocabulary.spelling(token_id)), _finite(logprob))
        return found


def _visible(vocabulary: Vocabulary, update: Update) -> Iterable[tuple[int, TokenLogprobs]]:
    """The tokens that are listed: no control token, nothing that has no text."""
    for token_id, entry in zip(update.token_ids, update.logprobs, strict=False):
        if token_id not in vocabulary.special_ids and vocabulary.spelling(token_id):
            yield token_id, entry


def _text(spelling: bytes) -> str:
    return spelling.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR) if not math.isnan(logprob) else FLOOR
