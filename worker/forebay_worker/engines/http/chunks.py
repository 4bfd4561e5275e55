"""What an upstream streams: server-sent events, then chunks, then what they say. Bounded, pure.

Chat and text completions; `reasoning` under both of its names; usage wherever it comes. Servers
differ in how they say nothing, and in the form of a call: null, an empty text and an absent field
are the same here. A chunk that cannot be read, or an error in the stream, is an UpstreamError. It
knows no HTTP.
"""

import re
from collections.abc import Iterator
from typing import Any, cast

import msgspec
from forebay_shared.errors import UpstreamError
from forebay_shared.wire import UNSAID, CallDelta, TextLogprobs, Usage

MAX_LINE = 4 * 2**20
"""Bytes of one event; a chunk with 20 alternatives of some tokens takes a hundredth."""


class Events:
    """Server-sent events as they come: the data of each, by lines or by parts of them, whose end is
    LF, CR or CRLF."""

    def __init__(self) -> None:
        self._held = b""
        self._data: list[bytes] = []
        self._after_cr = False

    def push(self, received: bytes) -> Iterator[bytes]:
        """The data of the events that are complete. Raises UpstreamError for one without end."""
        if b"\r" in received or self._after_cr:
            received = self._with_line_feeds(received)
        *lines, self._held = (self._held + received).split(b"\n")
        if len(self._held) + sum(map(len, self._data)) > MAX_LINE:
            raise UpstreamError("The upstream sent an event that is too long.")
        for line in lines:
            if line.removeprefix(_BOM).startswith(b"data:"):
                self._data.append(line.removeprefix(_BOM)[5:].strip())
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()

    def rest(self) -> bytes:
        """The data of an event that nothing ended: some servers leave out the last line feed."""
        if self._held.startswith(b"data:"):
            self._data.append(self._held[5:].strip())
        data, self._data, self._held = b"\n".join(self._data), [], b""
        return data

    def _with_line_feeds(self, received: bytes) -> bytes:
        if self._after_cr:
            received = received.removeprefix(b"\n")
        self._after_cr = received.endswith(b"\r")
        return received.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


class Chunk(msgspec.Struct):
    """What one event said. `reason` is a finish reason; `ended`: nothing follows."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []
    logprobs: list[TextLogprobs] = []
    reason: str | None = None
    usage: Usage | None = None
    ended: bool = False

    @property
    def says(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs)


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: object = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | list[dict[str, Any]] | None = None
    refusal: str | None = None
    reasoning: object = None
    reasoning_content: object = None
    tool_calls: list[_Call] | None = None


class _Top(msgspec.Struct):
    token: str
    logprob: float | None
    bytes: list[int] | None = None


class _Token(_Top):
    top_logprobs: list[_Top] | None = None


class _Logprobs(msgspec.Struct):
    """Chat's list, or the arrays of a text completion."""

    content: list[_Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


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
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(_Chunk).decode
_BOM = b"\xef\xbb\xbf"
_HALF = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""Half a surrogate pair, as a group: what a server writes that cuts text at UTF-16 units."""
_NO_REASON = frozenset({"", "None", "null"})
_LOWEST = -9999.0
"""OpenAI's number for what cannot be."""


def chunk_of(data: bytes) -> Chunk:
    """Raises UpstreamError for what is no chunk."""
    read = _read(data)
    if read.error:
        raise UpstreamError("The upstream broke off its answer.")
    chunk = Chunk(usage=usage_of(read.usage))
    for choice in (read.choices or ())[:1]:
        delta = choice.delta or _Delta()
        chunk.reasoning = _text(delta.reasoning) or _text(delta.reasoning_content)
        if isinstance(delta.content, list):
            chunk.content, thought = _parts(delta.content)
            chunk.reasoning += thought
        else:
            chunk.content = delta.content or delta.refusal or choice.text or ""
        chunk.calls = [_call(call) for call in delta.tool_calls or ()]
        chunk.reason = None if choice.finish_reason in _NO_REASON else choice.finish_reason
        if choice.logprobs is not None:
            chunk.logprobs = list(_tokens(choice.logprobs))
    return chunk


def _read(data: bytes) -> _Chunk:
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    try:
        return _decode(_HALF.sub(_without_half, data))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise UpstreamError("The upstream sent what cannot be read.") from None


def _without_half(found: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if found.group(1) else found.group()


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _parts(content: list[dict[str, Any]]) -> tuple[str, str]:
    """The text and the thinking of content that comes in parts, as Mistral's does."""
    said: list[str] = []
    thought: list[str] = []
    for part in content:
        inner = part.get("thinking")
        if isinstance(inner, list):
            thought.append(_parts(cast("list[dict[str, Any]]", inner))[0])
        else:
            thought.append(_text(inner))
        said.append(_text(part.get("text")))
    return "".join(said), "".join(thought)


def usage_of(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    return Usage(
        prompt_tokens=usage.prompt_tokens or 0,
        cached_tokens=(prompt.cached_tokens if prompt is not None else 0) or 0,
        completion_tokens=usage.completion_tokens or 0,
        reasoning_tokens=completion.reasoning_tokens if completion is not None else None,
    )


def _call(call: _Call) -> CallDelta:
    """Arguments are text; some servers send the object that it spells."""
    function = call.function or _Function()
    arguments = function.arguments
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else msgspec.json.encode(arguments).decode()
    index = UNSAID if call.index is None else call.index
    return CallDelta(index, call.id or "", function.name or "", arguments)


def _tokens(logprobs: _Logprobs) -> Iterator[TextLogprobs]:
    for token in logprobs.content or ():
        top = [(_spelling(each), _score(each.logprob)) for each in token.top_logprobs or ()]
        yield TextLogprobs(_spelling(token), _score(token.logprob), top)
    tops = logprobs.top_logprobs or []
    for at, text in enumerate(logprobs.tokens or ()):
        values = logprobs.token_logprobs or []
        logprob = values[at] if at < len(values) else None
        listed = (tops[at] if at < len(tops) else None) or {}
        top = [(each.encode(), _score(value)) for each, value in listed.items()]
        yield TextLogprobs(text.encode(), 0.0 if logprob is None else logprob, top)


def _score(logprob: float | None) -> float:
    return _LOWEST if logprob is None else logprob


def _spelling(token: _Top) -> bytes:
    if token.bytes is None:
        return token.token.encode()
    return bytes(each & 255 for each in token.bytes)
