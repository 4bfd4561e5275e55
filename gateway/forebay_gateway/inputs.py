"""From the texts of an embedding call to ids that fit the model: cut, or refused. Pure.

Unlike a prompt, an input is often a whole document: what is too long is found, and what is cut away
is left out, without tokenising all of it.
"""

import re
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
from forebay_shared.asked import estimated_tokens
from forebay_shared.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from tokenizers import Tokenizer

Side = Literal["left", "right"]
Input = Sequence[int] | str
"""Ids, or the text itself for an engine that speaks text."""

PIECE_CHARS = 32_768
SLACK_TOKENS = 16
"""A cut inside a text may change the tokens beside it, no more of them than this."""

_SPACE = re.compile(r"\s")


class Cut(msgspec.Struct, frozen=True):
    """How long an input may be: `limit` tokens, of which it loses those at `side`, when there is a
    limit; else the model's own length, beyond which it is refused."""

    limit: int | None = None
    side: Side = "right"


def input_tokens(given: Input) -> int:
    """How many tokens an input has; a text, as estimated."""
    return estimated_tokens(given) if isinstance(given, str) else len(given)


class Inputs(Protocol):
    """What makes inputs of what a client sent."""

    @property
    def max_model_len(self) -> int: ...

    def check(self, limit: int, param: str) -> None:
        """Raises InvalidRequestError when an input cannot be cut to so many tokens."""
        ...

    def text(self, text: str, cut: Cut, param: str, *, special: bool = True) -> Input:
        """A text as an input. Raises InvalidRequestError when it is none."""
        ...

    def ids(self, ids: Sequence[int], cut: Cut, param: str) -> Input:
        """Ids as an input. Raises InvalidRequestError when they are none."""
        ...


class TextInputs:
    """Inputs for an engine that speaks text, as they are: how long they are is its to say."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    def check(self, limit: int, param: str) -> None:
        raise _unknown(param)

    def text(self, text: str, cut: Cut, param: str, *, special: bool = True) -> str:
        if not text:
            raise InvalidRequestError(f"{param} must not be empty.", param=param)
        if cut.limit is not None:
            raise _unknown("truncate_prompt_tokens")
        if not special:
            raise _unknown("add_special_tokens")
        return text

    def ids(self, ids: Sequence[int], cut: Cut, param: str) -> str:
        raise UnsupportedError(
            f"{param} must be text: tokens of this model are not known here.", param=param
        )


class InputEncoder:
    """Inputs of one model, which takes `max_model_len` tokens. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.max_model_len = self._max = max_model_len
        mask = tokenizer.encode("a").special_tokens_mask
        self._before = mask.index(0) if 0 in mask else 0
        self._after = mask[::-1].index(0) if 0 in mask else 0

    def check(self, limit: int, param: str) -> None:
        """Raises InvalidRequestError when nothing of a text would be left, or it would not fit."""
        least = self._before + self._after + 1
        if not least <= limit <= self._max:
            raise InvalidRequestError(
                f"{param} must be between {least} and {self._max}, or -1 for all that fits.",
                param=param,
            )

    def text(self, text: str, cut: Cut, param: str, *, special: bool = True) -> list[int]:
        """The ids of a text. Special tokens around it stay when it is cut.

        Raises InvalidRequestError for an empty text, ContextLengthError for one that is too long.
        """
        if not text:
            raise InvalidRequestError(f"{param} must not be empty.", param=param)
        limit = cut.limit or self._max
        before, after = (self._before, self._after) if special else (0, 0)
        part = self._part(text, limit, cut.side)
        if len(part) < len(text) and cut.limit is None:
            raise _too_long(f"more than {limit}", limit, param)
        ids = self._tokenizer.encode_batch_fast([part], add_special_tokens=special)[0].ids
        if not ids:
            raise InvalidRequestError(f"{param} gives no token.", param=param)
        if len(ids) <= limit:
            return ids
        if cut.limit is None:
            raise _too_long(len(ids), limit, param)
        inner = ids[before : len(ids) - after]
        room = limit - before - after
        kept = inner[:room] if cut.side == "right" else inner[len(inner) - room :]
        return [*ids[:before], *kept, *ids[len(ids) - after :]]

    def ids(self, ids: Sequence[int], cut: Cut, param: str) -> list[int]:
        """The ids of an input that is ids already, taken as they are."""
        if not ids:
            raise InvalidRequestError(f"{param} must not be empty.", param=param)
        if cut.limit is not None:
            ids = ids[: cut.limit] if cut.side == "right" else ids[-cut.limit :]
        if len(ids) > self._max:
            raise _too_long(len(ids), self._max, param)
        if not all(0 <= token_id < self._vocab_size for token_id in ids):
            raise InvalidRequestError(
                f"{param} must hold token ids between 0 and {self._vocab_size - 1}.", param=param
            )
        return list(ids)

    def _part(self, text: str, limit: int, side: Side) -> str:
        """As much of the text, from the end that is kept, as surely has more than `limit` tokens;
        all of it when it has not so many."""
        if len(text) <= PIECE_CHARS:
            return text
        if side == "left":
            return self._part(text[::-1], limit, "right")[::-1]
        at = tokens = 0
        while at < len(text):
            end = _end_of_piece(text, at)
            encoded = self._tokenizer.encode_batch_fast([text[at:end]], add_special_tokens=False)
            tokens += max(0, len(encoded[0].ids) - SLACK_TOKENS)
            at = end
            if tokens > limit + SLACK_TOKENS:
                break
        return text[:at]


def _end_of_piece(text: str, start: int) -> int:
    """Where a piece ends that begins at `start`: before a space, when one is near."""
    end = start + PIECE_CHARS
    if end >= len(text):
        return len(text)
    for at in range(end, end - 256, -1):
        if _SPACE.match(text[at]):
            return at
    return end


def _unknown(param: str) -> UnsupportedError:
    return UnsupportedError(
        f"{param} is not supported: tokens of this model are not known here.", param=param
    )


def _too_long(tokens: int | str, limit: int, param: str) -> ContextLengthError:
    return ContextLengthError(
        f"This model takes {limit} tokens of an input; {param} has {tokens}. Shorten it, or set "
        "truncate_prompt_tokens.",
        param=param,
    )
