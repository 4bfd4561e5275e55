"""Log-probabilities in the two forms of the OpenAI dialect.

Chat lists an object per token; text completions keep four parallel arrays. A token that holds a
part of a character shows it through `bytes` (chat) or gives its text to the token that completes it
(completions). Those of a prompt have vLLM's form, an object per token. It knows no engine and no
HTTP.
"""

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from forebay_shared.wire import TokenLogprobs

from forebay_gateway.api.transcript import Update
from forebay_gateway.output import Spelling

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
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class _PromptToken(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


class EchoedPrompt(NamedTuple):
    """A prompt in front of its answer: its ids, and the part of its text that each one gives."""

    token_ids: list[int]
    pieces: Sequence[str]


class ChatLogprobs:
    """One choice of a chat. `top` is how many alternatives are listed, `as_ids` whether tokens are
    named by their ids."""

    def __init__(self, vocabulary: Spelling, top: int, *, as_ids: bool = False) -> None:
        self._vocabulary = vocabulary
        self._top = top
        self._as_ids = as_ids
        self._all: list[TokenEntry] = []

    def chunk(self, update: Update) -> bytes:
        tokens = self.tokens(update)
        return _encode(_Content(tokens)) if tokens else b"null"

    def collect(self, update: Update) -> None:
        self._all += self.tokens(update)

    def whole(self) -> bytes:
        return _encode(_Content(self._all))

    def tokens(self, update: Update) -> list[TokenEntry]:
        """The update's tokens that have a text, with what is listed of each."""
        return [self._token(*listed) for listed in _visible(self._vocabulary, update)]

    def _token(self, token_id: int, spelling: bytes, entry: TokenLogprobs) -> TokenEntry:
        return TokenEntry(
            token=f"token_id:{token_id}" if self._as_ids else _text(spelling),
            logprob=_finite(entry.logprob),
            bytes=list(spelling),
            top_logprobs=[self._alternative(*pair) for pair in entry.top[: self._top]],
        )

    def _alternative(self, token_id: int, logprob: float) -> _Top:
        spelling = self._vocabulary.spelling(token_id)
        token = f"token_id:{token_id}" if self._as_ids else _text(spelling)
        return _Top(token, _finite(logprob), list(spelling))


class CompletionLogprobs:
    """One choice of a text completion, behind its prompt where that is `echoed`."""

    def __init__(
        self,
        vocabulary: Spelling,
        top: int,
        *,
        as_ids: bool = False,
        echoed: EchoedPrompt | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._top = top
        self._as_ids = as_ids
        self._echoed = echoed
        self._offset = 0
        self._held: tuple[int, str, TokenLogprobs] | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._all = _Arrays([], [], [], [])

    def chunk(self, update: Update) -> bytes:
        arrays = self._arrays(update)
        return _encode(arrays) if arrays.tokens else b"null"

    def collect(self, update: Update) -> None:
        arrays = self._arrays(update)
        for name in _Arrays.__struct_fields__:
            getattr(self._all, name).extend(getattr(arrays, name))

    def whole(self) -> bytes:
        return _encode(self._all)

    def _arrays(self, update: Update) -> _Arrays:
        arrays = _Arrays([], [], [], [])
        if self._echoed is not None and update.prompt_logprobs is not None:
            entries = (None, *update.prompt_logprobs)
            for token_id, piece, entry in zip(*self._echoed, entries, strict=True):
                self._add(arrays, token_id, piece, entry)
        for token_id, spelling, entry in _visible(self._vocabulary, update):
            self._let_go(arrays)
            text = self._decoder.decode(spelling)
            if self._decoder.getstate()[0]:
                self._held = token_id, text, entry
            else:
                self._add(arrays, token_id, text, entry)
        if update.reason is not None:
            self._let_go(arrays, self._decoder.decode(b"", True))
        return arrays

    def _let_go(self, arrays: _Arrays, rest: str = "") -> None:
        """The token whose last character was not complete, now that it is known what follows."""
        if self._held is not None:
            token_id, text, entry = self._held
            self._held = None
            self._add(arrays, token_id, text + rest, entry)

    def _add(self, arrays: _Arrays, token_id: int, text: str, entry: TokenLogprobs | None) -> None:
        """One token. The first of a prompt has no entry: nothing comes before it."""
        arrays.text_offset.append(self._offset)
        arrays.tokens.append(f"token_id:{token_id}" if self._as_ids else text)
        arrays.token_logprobs.append(None if entry is None else _finite(entry.logprob))
        arrays.top_logprobs.append(None if entry is None else self._alternatives(token_id, entry))
        self._offset += len(text)

    def _alternatives(self, chosen: int, entry: TokenLogprobs) -> dict[str, float]:
        """Best first, and at the end the chosen token where it is none of them: one more than was
        asked for, as OpenAI has it. Of two tokens with one text the better counts."""
        found: dict[str, float] = {}
        for token_id, logprob in (*entry.top[: self._top], (chosen, entry.logprob)):
            text = _text(self._vocabulary.spelling(token_id))
            found.setdefault(f"token_id:{token_id}" if self._as_ids else text, _finite(logprob))
        return found


class PromptScores:
    """The log-probabilities of the prompts themselves, for whoever asks for those of `top`."""

    def __init__(self, vocabulary: Spelling, prompts: Sequence[Sequence[int]], top: int) -> None:
        """`prompts` has one for each choice."""
        self._vocabulary = vocabulary
        self._prompts = prompts
        self._top = top
        self._entries: list[Sequence[TokenLogprobs]] = [()] * len(prompts)

    def collect(self, update: Update) -> None:
        if update.prompt_logprobs is not None:
            self._entries[update.index] = update.prompt_logprobs

    def whole(self, index: int) -> bytes:
        """A member: null for the prompt's first token, then per token an object by id, of the most
        likely ones and the token itself, wherever it stands."""
        listed: list[dict[int, _PromptToken] | None] = [None]
        following = zip(self._prompts[index][1:], self._entries[index], strict=True)
        listed += [self._ranked(token_id, entry) for token_id, entry in following]
        return b',"prompt_logprobs":%b' % _encode(listed)

    def _ranked(self, token_id: int, entry: TokenLogprobs) -> dict[int, _PromptToken]:
        best = enumerate(entry.top[: self._top], 1)
        found = {other: self._scored(other, logprob, rank) for rank, (other, logprob) in best}
        found.setdefault(token_id, self._scored(token_id, entry.logprob, entry.rank))
        return found

    def _scored(self, token_id: int, logprob: float, rank: int) -> _PromptToken:
        return _PromptToken(_finite(logprob), rank, _text(self._vocabulary.spelling(token_id)))


def _visible(vocabulary: Spelling, update: Update) -> Iterable[tuple[int, bytes, TokenLogprobs]]:
    """The tokens that are listed, with their spelling: no control token, nothing that has no text.
    What of the last one belongs to a stop string is left out."""
    last = len(update.token_ids) - 1
    for place, (token_id, entry) in enumerate(zip(update.token_ids, update.logprobs, strict=False)):
        spelling = vocabulary.spelling(token_id)
        if update.hidden and place == last:
            spelling = spelling.rpartition(update.hidden.encode())[0]
        if token_id not in vocabulary.special_ids and spelling:
            yield token_id, spelling, entry


def _text(spelling: bytes) -> str:
    return spelling.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR) if not math.isnan(logprob) else FLOOR
