"""The JSON of a chat's answer."""

import msgspec

from forebay_gateway.api.openai import chat_parts
from forebay_gateway.api.openai.shapes import Extras, Identity, Shape
from forebay_gateway.api.transcript import FinishReason, Update, Usage
from forebay_gateway.parts import Collected, Reasoning

_encode = msgspec.json.Encoder().encode


class ChatShape(Shape):
    """`hides_reasoning`: the client wants the answer without the thinking before it. `legacy`: it
    sent `functions`, so a call is a `function_call`."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self,
        identity: Identity,
        extras: Extras,
        *,
        hides_reasoning: bool = False,
        legacy: bool = False,
    ) -> None:
        super().__init__(identity, extras)
        self._hides_reasoning = hides_reasoning
        self._legacy = legacy

    def _first(self, index: int, usage: Usage | None) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""}'
        return self._event(index, delta, b"null", b"null", usage, top=self._prompt_ids(index))

    def _delta(self, text: str) -> bytes:
        return b'"delta":{"content":%b}' % _encode(text)

    def _empty(self) -> bytes:
        return b'"delta":{}'

    def _deltas(self, update: Update) -> list[bytes]:
        if not update.parts:
            return super()._deltas(update)
        deltas = [
            chat_parts.delta(part, legacy=self._legacy)
            for part in update.parts
            if not (self._hides_reasoning and isinstance(part, Reasoning))
        ]
        return [b'"delta":%b' % delta for delta in deltas if delta]

    def _message(self, index: int, answer: Collected) -> bytes:
        message = chat_parts.message(
            answer, hides_reasoning=self._hides_reasoning, legacy=self._legacy
        )
        return b'"message":%b' % message

    def _reason(self, reason: FinishReason) -> bytes:
        return b"function_call" if self._legacy and reason == "tool_calls" else reason.encode()

    def _end(self) -> bytes:
        scores = b"" if self._prompt_scores is None else self._prompt_scores.whole(0)
        return scores + self._prompt_ids(0)

    def _prompt_ids(self, index: int) -> bytes:
        return b"" if self._token_ids is None else self._token_ids.prompt(index)
