"""An answer as a message of this dialect, whole or as its named events. It knows no HTTP."""

from collections.abc import Sequence

import msgspec
from forebay_shared.errors import ForebayError

from forebay_gateway.api.anthropic.blocks import Block, Blocks, Move
from forebay_gateway.api.anthropic.errors import envelope
from forebay_gateway.api.transcript import FinishReason, Update, Usage
from forebay_gateway.parts import Collected

_encode = msgspec.json.Encoder().encode

_STOP_REASONS = {"stop": b"end_turn", "length": b"max_tokens", "tool_calls": b"tool_use"}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_NO_EDITS = b',"context_management":{"applied_edits":[]}'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class MessageWriter:
    """An `answers.Writer` of one message. `tells_edits`: the client asked for edits of its context,
    of which none is ever applied."""

    running_usage = False

    def __init__(
        self, answer_id: str, model: str, *, shows_thinking: bool = True, tells_edits: bool = False
    ) -> None:
        self._head = b'{"id":%b,"type":"message","role":"assistant","model":%b' % (
            _encode(answer_id),
            _encode(model),
        )
        self._blocks = Blocks(shows_thinking=shows_thinking)
        self._kept: list[Block] = []
        self._ending = b'"stop_reason":null,"stop_sequence":null'
        self._edits = _NO_EDITS if tells_edits else b""

    def sign_of_life(self, *, as_event: bool) -> bytes:
        return _PING

    def opening(self, size: int, usage: Usage) -> bytes:
        message = b'%b,"content":[],%b,"usage":%b}' % (
            self._head,
            self._ending,
            _usage(msgspec.structs.replace(usage, completion_tokens=0)),
        )
        return b'event: message_start\ndata: {"type":"message_start","message":%b}\n\n%b' % (
            message,
            _PING,
        )

    def events(self, update: Update, usage: Usage | None) -> bytes:
        self._note_ending(update)
        return b"".join([_events(move) for move in self._blocks.moves(update)])

    def closing(self, usage: Usage) -> bytes:
        return (
            b'event: message_delta\ndata: {"type":"message_delta","delta":{%b},"usage":%b%b}\n\n%b'
            % (self._ending, _usage(usage), self._edits, _STOP)
        )

    def failure(self, error: ForebayError) -> bytes:
        return b"event: error\ndata: %b\n\n" % envelope(error, None)

    def collect(self, update: Update) -> None:
        self._note_ending(update)
        for move in self._blocks.moves(update):
            if move.begins:
                self._kept.append(move.block)
            elif move.text:
                move.block.pieces.append(move.text)

    def whole(
        self, answers: Sequence[Collected], reasons: Sequence[FinishReason], usage: Usage
    ) -> bytes:
        content = b",".join([block.whole() for block in self._kept])
        return b'%b,"content":[%b],%b,"usage":%b%b}' % (
            self._head,
            content,
            self._ending,
            _usage(usage),
            self._edits,
        )

    def _note_ending(self, update: Update) -> None:
        if update.reason is None:
            return
        if update.reason == "stop" and update.stop is not None:
            self._ending = b'"stop_reason":"stop_sequence","stop_sequence":%b' % _encode(
                update.stop
            )
        else:
            reason = _STOP_REASONS[update.reason]
            self._ending = b'"stop_reason":"%b","stop_sequence":null' % reason


def _events(move: Move) -> bytes:
    block, number = move.block, move.number
    if move.begins:
        return _event(b"content_block_start", number, b',"content_block":' + block.start())
    if not move.ends:
        return _delta(number, block.delta(move.text))
    return _delta(number, block.last()) + _event(b"content_block_stop", number, b"")


def _delta(number: int, delta: bytes) -> bytes:
    return _event(b"content_block_delta", number, b',"delta":' + delta) if delta else b""


def _event(type_: bytes, number: int, rest: bytes) -> bytes:
    return b'event: %b\ndata: {"type":"%b","index":%d%b}\n\n' % (type_, type_, number, rest)


def _usage(usage: Usage) -> bytes:
    """Tokens found in the cache are no input tokens here; all together are the prompt."""
    details = b""
    if usage.reasoning_tokens is not None:
        details = b',"output_tokens_details":{"thinking_tokens":%d}' % usage.reasoning_tokens
    return (
        b'{"input_tokens":%d,"cache_creation_input_tokens":0,"cache_read_input_tokens":%d,'
        b'"output_tokens":%d,"service_tier":"standard"%b}'
        % (
            usage.prompt_tokens - usage.cached_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            details,
        )
    )
