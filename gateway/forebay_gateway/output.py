"""Token ids to text, as they come: incremental detokeniser and stop strings.

For any grouping of the tokens the joined text is the same, no piece holds a U+FFFD that the whole
does not hold, and no character of a stop string goes out. It knows no HTTP dialect and no engine.
"""

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec
from tokenizers import Tokenizer

from forebay_gateway.shown import Shown

_REPLACEMENT = "\ufffd"
# A character has at most 4 bytes: when so many tokens give no whole character, none will come.
_MAX_WINDOW = 32


class Detokeniser(Protocol):
    """The text of one sequence."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these tokens."""
        ...

    def flush(self) -> str:
        """The rest, once no token follows."""
        ...


class Spelling(Protocol):
    """What is written of tokens by their ids."""

    @property
    def special_ids(self) -> Collection[int]: ...

    def spelling(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id that is none."""
        ...


class Vocabulary:
    """What each token id stands for, in bytes.

    Byte-level tokenizers (most of today's) decode by a table: 0.3 us a token. All others
    (sentencepiece with byte fallback) go through the tokenizer's own decoder on a short window.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.special_texts = tuple(added[index].content for index in sorted(self.special_ids))
        self._special = {added[index].content: index for index in self.special_ids}
        self.byte_level = _is_byte_level(tokenizer)
        spell = _byte_level_bytes if self.byte_level else _sentencepiece_bytes
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self._kept: dict[frozenset[int], list[bytes]] = {}
        self._table = [b""] * max(size, 1 + max(vocab.values(), default=0))
        for text, index in vocab.items():
            self._table[index] = added[index].content.encode() if index in added else spell(text)
        self.longest = max(map(len, vocab), default=1)
        """Characters of the longest token: m characters make at least m / longest tokens."""

    def _visible(self, kept: frozenset[int]) -> list[bytes]:
        """The table without the special tokens, but for those that are kept."""
        if kept not in self._kept:
            hidden = self.special_ids - kept
            self._kept[kept] = [b"" if i in hidden else text for i, text in enumerate(self._table)]
        return self._kept[kept]

    def special_id(self, text: str) -> int | None:
        """The id of a special token by its text."""
        return self._special.get(text)

    def spelling(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id that the tokenizer does not know."""
        return self._table[token_id] if token_id < len(self._table) else b""

    def name(self, token_id: int) -> str:
        """A token as the tokenizer names it; empty for an id that it does not know."""
        return self._tokenizer.id_to_token(token_id) or ""

    def detokeniser(self, *, skip_special: bool = True, keep: Collection[str] = ()) -> Detokeniser:
        """`keep` names special tokens whose text is needed although the others are skipped."""
        if not skip_special:
            kept = self.special_ids
        else:
            kept = frozenset(i for i in map(self.special_id, keep) if i is not None)
        if self.byte_level:
            return _TableDetokeniser(self._visible(kept) if skip_special else self._table)
        return _WindowDetokeniser(self._tokenizer, self.special_ids - kept)


class _TableDetokeniser:
    __slots__ = ("_decoder", "_table")

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._table
        size = len(table)
        return self._decoder.decode(b"".join([table[i] for i in token_ids if i < size]))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _WindowDetokeniser:
    """Decodes the last emitted tokens with and without the new ones: the difference is new.

    The window gives the decoder the context it needs (leading space, a run of byte tokens).
    """

    __slots__ = ("_emitted", "_hidden", "_ids", "_text", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids: list[int] = []
        self._emitted = 0
        self._text = ""

    def push(self, token_ids: Sequence[int]) -> str:
        hidden = self._hidden
        return "".join([self._step(token_id) for token_id in token_ids if token_id not in hidden])

    def flush(self) -> str:
        return self._take(self._decode(self._ids))

    def _step(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        held = len(self._ids) - self._emitted
        if text.endswith(_REPLACEMENT) and held < _MAX_WINDOW:
            return ""
        return self._take(text) if len(text) > len(self._text) else ""

    def _take(self, text: str) -> str:
        piece = text[len(self._text) :]
        self._ids = self._ids[self._emitted :]
        self._emitted = len(self._ids)
        self._text = self._decode(self._ids)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class StopMatcher:
    """Finds the stop string that is complete first; holds back only what may still become one.

    One Knuth-Morris-Pratt automaton per stop string: constant work per character.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = list(stops)
        self._include = include
        self._failures = [_failure(stop) for stop in stops]
        self._states = [0] * len(self._stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that is complete, once there is one."""

    def push(self, text: str) -> tuple[str, bool]:
        """What may go out now, and whether a stop string is complete; then nothing may follow."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, False
        whole = self._held + text
        for position, char in enumerate(text, len(self._held) + 1):
            matched = self._advance(char)
            if matched:
                self._held = ""
                self.matched = whole[position - matched : position]
                return whole[: position if self._include else position - matched], True
        keep = max(self._states)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], False

    def flush(self) -> str:
        """What was held back, once the sequence ended."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Moves all automata by one character; the length of the longest stop completed by it."""
        longest = 0
        for i, stop in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != char:
                state = self._failures[i][state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                longest = max(longest, state)
                state = 0
            self._states[i] = state
        return longest


class OutputOptions(msgspec.Struct, frozen=True):
    """How the text of a request's sequences is made."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0
    """Stop strings do not act before so many tokens."""


class Output:
    """The text of one sequence as it grows. `tokens` counts the tokens that the answer consumed."""

    __slots__ = ("_detokeniser", "_matcher", "_min_tokens", "_shown", "stopped", "tokens")

    def __init__(self, vocabulary: Vocabulary, options: OutputOptions) -> None:
        self._detokeniser = vocabulary.detokeniser(skip_special=options.skip_special)
        self._matcher = (
            StopMatcher(options.stops, include=options.include_stop) if options.stops else None
        )
        self._min_tokens = options.min_tokens
        self._shown = Shown()
        self.tokens = 0
        self.stopped = False

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.matched if self._matcher else None

    @property
    def shown(self) -> int:
        """How many of the tokens may be listed: none of held text, none of a stop string."""
        return self._shown.count if self._matcher else self.tokens

    @property
    def hidden(self) -> str:
        """What of the last shown token's text is a stop string's."""
        return self._shown.hidden

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that may go out now. Sets `stopped` when a stop string is complete."""
        if self._matcher is None:
            self.tokens += len(token_ids)
            return self._detokeniser.push(token_ids)
        pieces: list[str] = []
        for token_id in token_ids:
            self.tokens += 1
            heard = piece = self._detokeniser.push((token_id,))
            if self.tokens > self._min_tokens:
                piece, self.stopped = self._matcher.push(heard)
            self._shown.add(heard)
            self._shown.hear(heard, piece)
            pieces.append(piece)
            if self.stopped:
                self._shown.settle_last()
                break
            self._shown.settle()
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text, once no token follows. May set `stopped` as well."""
        heard = self._detokeniser.flush()
        if self._matcher is None:
            return heard
        piece, self.stopped = self._matcher.push(heard)
        if self.stopped:
            self._shown.hear(heard, piece)
            self._shown.settle_last()
            return piece
        self._shown.settle_all()
        return piece + self._matcher.flush()


def _failure(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest border."""
    table = [0] * len(stop)
    border = 0
    for i in range(1, len(stop)):
        while border and stop[i] != stop[border]:
            border = table[border - 1]
        if stop[i] == stop[border]:
            border += 1
        table[i] = border
    return table


class _DecoderKind(msgspec.Struct):
    type: str = ""
    decoders: list["_DecoderKind"] = []


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = tokenizer.decoder
    if decoder is None:
        return False
    kind = msgspec.json.decode(decoder.__getstate__(), type=_DecoderKind)
    parts = kind.decoders if kind.type == "Sequence" else [kind]
    return [part.type for part in parts] == ["ByteLevel"]


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte, as byte-level tokenizers spell it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes([_BYTES[char] for char in text])
    except KeyError:
        return text.encode()


def _sentencepiece_bytes(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace("\u2581", " ").encode()
