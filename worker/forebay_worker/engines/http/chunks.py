"""What an upstream streams: server-sent events, then chunks, then what they say. Bounded, pure.

Chat and text completions; `reasoning` under both of its names; usage wherever it comes. A chunk
that cannot be read, or an error in the stream, is an UpstreamError. It knows no HTTP.
"""

from collections.abc import Iterator

import msgspec
from forebay_shared.errors import UpstreamError
from forebay_shared.wire import CallDelta, TextLogprobs, Usage

MAX_LINE = 4 * 2**20
"""Bytes of one event; a chunk with 20 alternatives of some tokens takes a hundredth."""


class Events:
    """Server-sent events as they come: the data of each, by lines or by parts of them."""

    def __init__(self) -> None:
        self._held = b""
        self._data: list[bytes] = []

    def push(self, received: bytes) -> Iterator[bytes]:
        """The data of the events that are complete. Raises UpstreamError for one without end."""
        *lines, self._held = (self._held + received).split(b"\n")
        if len(self._held) + sum(map(len, self._data)) > MAX_LINE:
            raise UpstreamError("The upstream sent an event that is too long.")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()

    def rest(self) -> bytes:
        """The data of an event that nothing ended: some servers leave out the last line feed."""
        if self._held.startswith(b"data:"):
            self._data.append(self._held[5:].strip())
        data, self._data, self._held = b"\n".join(self._data), [], b""
        return data


class Chunk(msgspec.Struct):
    """What one event said. `reason` is a finish reason."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []
    logprobs: list[TextLogprobs] = []
    reason: str | None = None
    usage: Usage | None = None

    @property
    def says(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs)


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Delta(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Top(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Token(_Top):
    top_logprobs: list[_Top] | None = None


class _Logprobs(msgspec.Struct):
    """Chat's list, or the arrays of a text completion."""

    content: list[_Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list[_Choice])
    usage: _Usage | None = None
    error: str | dict[str, object] | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


def chunk_of(data: bytes) -> Chunk:
    """Raises UpstreamError for what is no chunk."""
    try:
        read = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise UpstreamError("The upstream sent what cannot be read.") from None
    if read.error is not None:
        raise UpstreamError("The upstream broke off its answer.")
    chunk = Chunk(usage=usage_of(read.usage))
    for choice in read.choices[:1]:
        delta = choice.delta or _Delta()
        chunk.content = delta.content or delta.refusal or choice.text or ""
        chunk.reasoning = delta.reasoning or delta.reasoning_content or ""
        chunk.calls = [_call(call) for call in delta.tool_calls or ()]
        chunk.reason = choice.finish_reason
        if choice.logprobs is not None:
            chunk.logprobs = list(_tokens(choice.logprobs))
    return chunk


def usage_of(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(prompt.cached_tokens if prompt is not None else 0) or 0,
        completion_tokens=usage.completion_tokens or 0,
        reasoning_tokens=completion.reasoning_tokens if completion is not None else None,
    )


def _call(call: _Call) -> CallDelta:
    function = call.function
    return CallDelta(call.index, call.id or "", function.name or "", function.arguments or "")


def _tokens(logprobs: _Logprobs) -> Iterator[TextLogprobs]:
    for token in logprobs.content or ():
        top = [(_spelling(each), each.logprob) for each in token.top_logprobs or ()]
        yield TextLogprobs(_spelling(token), token.logprob, top)
    tops = logprobs.top_logprobs or []
    for at, text in enumerate(logprobs.tokens or ()):
        values = logprobs.token_logprobs or []
        logprob = values[at] if at < len(values) else None
        listed = (tops[at] if at < len(tops) else None) or {}
        top = [(each.encode(), value) for each, value in listed.items()]
        yield TextLogprobs(text.encode(), 0.0 if logprob is None else logprob, top)


def _spelling(token: _Top) -> bytes:
    if token.bytes is None:
        return token.token.encode()
    return bytes(each & 255 for each in token.bytes)
