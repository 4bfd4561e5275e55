"""Text deltas to the parts of an answer: what comes from an engine that speaks text itself.

It has the place of `output.Output` and `speech.Speech`. The tokens that an upstream names become
ids as they come, so that whoever writes log-probabilities needs to know no other form. It knows no
dialect.
"""

import secrets

from forebay_shared.wire import UNSAID, CallDelta, TextDelta, TokenLogprobs

from forebay_gateway.bounded import Bounded
from forebay_gateway.output import OutputOptions
from forebay_gateway.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text, merged


class Words:
    """The tokens of one request, numbered as they come: a `output.Spelling`."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._spellings: list[bytes] = []

    def spelling(self, token_id: int) -> bytes:
        return self._spellings[token_id] if token_id < len(self._spellings) else b""

    def id_of(self, token: bytes) -> int:
        """The token's number, the next one when it is new."""
        found = self._ids.get(token)
        if found is None:
            found = self._ids[token] = len(self._spellings)
            self._spellings.append(token)
        return found

    def numbered(self, delta: TextDelta) -> tuple[list[int], list[TokenLogprobs]]:
        """The tokens of a delta and their log-probabilities, by numbers."""
        ids = [self.id_of(each.token) for each in delta.logprobs]
        entries = [
            TokenLogprobs(
                each.logprob, [(self.id_of(token), logprob) for token, logprob in each.top]
            )
            for each in delta.logprobs
        ]
        return ids, entries


class Relayed(Bounded):
    """The parts of one sequence's answer. `tokens` counts the deltas: about as many as tokens."""

    __slots__ = ("_begun", "_open_as", "_open_call", "words")

    def __init__(self, words: Words, options: OutputOptions, *, one_call: bool = False) -> None:
        super().__init__(options, one_call=one_call)
        self.words = words
        self._open_call: int | None = None
        self._open_as = "", ""
        self._begun = 0

    def hear(self, delta: TextDelta) -> list[Part]:
        """What may go out now. Sets `stopped` when nothing may follow."""
        self.tokens += 1
        parts: list[Part] = [Reasoning(delta.reasoning)] if delta.reasoning else []
        if delta.content:
            parts += [*self._end_call(), Text(delta.content)]
        for call in delta.calls:
            parts += self._call(call)
        return merged(self.visible(parts))

    def finish(self) -> list[Part]:
        """The rest, once nothing follows. May set `stopped` as well."""
        parts = self.visible(self._end_call())
        return parts if self.stopped else parts + self.let_go()

    def _call(self, call: CallDelta) -> list[Part]:
        """Calls come one after the other: a piece of one that is over is no part of the answer."""
        parts: list[Part] = []
        if self._begins(call):
            parts += self._end_call()
            self._open_call = call.index
            self._open_as = call.id, call.name
            self._begun += 1
            call_id = call.id or f"call_{secrets.token_hex(12)}"
            parts.append(CallStart(self._begun - 1, call_id, call.name))
        if call.arguments and self._open_call is not None and self._is_open(call.index):
            parts.append(CallArguments(self._begun - 1, call.arguments))
        return parts

    def _begins(self, call: CallDelta) -> bool:
        """Some servers give every call the number 0, or none: then its id or its name says that it
        is another one. Some say both again with each piece."""
        if not call.name:
            return False
        if self._open_call is None or not self._is_open(call.index):
            return True
        id_, name = self._open_as
        return call.name != name or (call.id != "" and call.id != id_)

    def _is_open(self, index: int) -> bool:
        return UNSAID in (index, self._open_call) or index == self._open_call

    def _end_call(self) -> list[Part]:
        index, self._open_call = self._open_call, None
        return [] if index is None else [CallEnd(self._begun - 1)]
