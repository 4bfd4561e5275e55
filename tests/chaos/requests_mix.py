"""What the clients of a load ask for, and what each answer must be to the last character.

An `Ask` knows its own right answer: the echo engine's is a function of the prompt, the small
model's (greedy or seeded) is what it said when nothing disturbed it.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transcripts import Transcript, check_answer, check_stream

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "nine",
    "quiet",
    "owls",
    "look",
    "on",
]
_TEXTS = [
    " ".join(source.choices(_WORDS, k=3 + number % 18))
    for source in (random.Random(7),)
    for number in range(1_000)
]
"""Not more: a tokenizer remembers what it saw, up to 10,000 texts of 4 kB here, and for as long as
it learns a gateway seems to leak."""
_BEGINNINGS = [" ".join(_WORDS[at:] + _WORDS[:at]) * 6 for at in range(4)]


@dataclass(frozen=True)
class Ask:
    """One request. `texts` by index: what must come; None: not compared. `leave_after`: the client
    goes away after so many events. `refused`: the status that is right. `key`: instead of the
    load's."""

    path: str
    body: Mapping[str, Any]
    texts: Mapping[int, str] | None = None
    leave_after: int | None = None
    refused: int | None = None
    key: str = ""

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    def read(self, raw: bytes) -> Transcript:
        """Checks a whole answer of status 200. Raises AssertionError that says what is wrong."""
        model, n, chat = self.body["model"], self.body.get("n", 1), self.path == CHAT
        if self.path == EMBEDDINGS:
            body = json.loads(raw)
            assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
            return Transcript(usage=body["usage"])
        if not self.streams:
            transcript = check_answer(raw, model=model, n=n, chat=chat)
        else:
            usage = bool(self.body.get("stream_options"))
            transcript = check_stream(raw, model=model, n=n, include_usage=usage, chat=chat)
        self.compare(transcript)
        return transcript

    def read_part(self, raw: bytes) -> Transcript:
        """Checks the whole events of a stream that was cut off; what came must be right so far."""
        whole = raw[: raw.rfind(b"\n\n") + 2]
        transcript = Transcript()
        for line in whole.split(b"\n\n")[:-1]:
            chunk = json.loads(line.removeprefix(b"data: ")) if line != b"data: [DONE]" else {}
            transcript.id = transcript.id or chunk.get("id", "")
            for choice in chunk.get("choices", ()):
                piece = choice["delta"].get("content", "") if self.path == CHAT else choice["text"]
                index = choice["index"]
                transcript.texts[index] = transcript.texts.get(index, "") + (piece or "")
        transcript.error = {"code": "cut"}
        self.compare(transcript)
        return transcript

    def compare(self, transcript: Transcript) -> None:
        for index, wanted in (self.texts or {}).items():
            came = transcript.texts.get(index, "")
            if transcript.error is None:
                assert came == wanted, f"choice {index} is {came!r}, not {wanted!r}"
            else:
                assert wanted.startswith(came), f"choice {index} came as {came!r} of {wanted!r}"


Mix = Callable[[random.Random], Ask]
"""Draws the next request."""


def echo_mix(rng: random.Random) -> Ask:
    """Streams and whole answers, chats and texts, one and several choices, clients that leave,
    vectors, and what must be refused."""
    kind = rng.choices(_KINDS, _WEIGHTS)[0]
    return kind(rng)


def echo_stream(rng: random.Random, tokens: int | None = None) -> Ask:
    prompt = _text(rng)
    count = tokens or rng.randint(20, 160)
    n = 1 if tokens else rng.choice([1, 1, 2, 3])
    body = {"model": "echo", "prompt": prompt, "max_tokens": count, "n": n, "stream": True}
    body["stream_options"] = {"include_usage": True}
    return Ask(COMPLETIONS, body, {index: _echo(prompt, count, index) for index in range(n)})


def _whole(rng: random.Random) -> Ask:
    ask = echo_stream(rng, rng.randint(10, 80))
    body = {k: v for k, v in ask.body.items() if not k.startswith("stream")}
    return replace(ask, body=body)


def _chat(rng: random.Random) -> Ask:
    text = _text(rng)
    body = {"model": "echo", "messages": [{"role": "user", "content": text}]}
    if rng.random() < 0.6:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Ask(CHAT, body, {0: text})


def echo_leaver(rng: random.Random) -> Ask:
    """A client that goes away: before anything came, or after some events."""
    return replace(echo_stream(rng, 400), leave_after=rng.choice([0, 1, 2, 10, 40]))


def _vectors(rng: random.Random) -> Ask:
    texts = [_text(rng) for _ in range(rng.randint(1, 4))]
    return Ask(EMBEDDINGS, {"model": "echo", "input": texts})


def _bad(rng: random.Random) -> Ask:
    fields = rng.choice([{"temperature": 9}, {"n": -1}, {"model": "nobody"}, {"max_tokens": "x"}])
    body = {"model": "echo", "prompt": "a", "max_tokens": 3} | fields
    return Ask(COMPLETIONS, body, refused=404 if "model" in fields else 400)


def shared_mix(rng: random.Random) -> Ask:
    """Streams whose prompts share one of a few long beginnings: there is something to cache."""
    prompt = rng.choice(_BEGINNINGS) + _text(rng)
    body = {"model": "echo", "prompt": prompt, "max_tokens": 40, "stream": True}
    return Ask(COMPLETIONS, body, {0: _echo(prompt, 40, 0)})


_KINDS: Sequence[Mix] = (echo_stream, _whole, _chat, echo_leaver, _vectors, _bad)
_WEIGHTS = (40, 15, 20, 12, 8, 5)


def _text(rng: random.Random) -> str:
    return rng.choice(_TEXTS)


def _echo(prompt: str, tokens: int, index: int) -> str:
    return "".join(prompt[(position + index) % len(prompt)] for position in range(tokens))


_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks a word up.", "parameters": _SCHEMA},
}
_JSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
_MESSAGES = [{"role": "user", "content": "Who is there?"}]

TINY: Sequence[Mapping[str, Any]] = (
    {"prompt": "The quick brown", "max_tokens": 60, "temperature": 0},
    {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 1, "seed": 5, "n": 2},
    {"prompt": "It was a dark night", "max_tokens": 40, "temperature": 0, "logprobs": 2},
    {"messages": _MESSAGES, "max_tokens": 50, "temperature": 0.8, "seed": 11},
    {"messages": _MESSAGES, "max_tokens": 60, "temperature": 0, "response_format": _JSON},
    {"messages": _MESSAGES, "max_tokens": 60, "seed": 3, "response_format": _JSON},
    {"messages": _MESSAGES, "max_tokens": 60, "temperature": 0, "tools": [_TOOL],
     "tool_choice": "required"},
)  # fmt: skip
"""The kinds of request to the small model: greedy, seeded, several, scored, structured, tools."""


@dataclass
class TinyMix:
    """Draws from TINY; `learn` sets what is right, from answers that nothing disturbed."""

    model: str
    known: dict[tuple[int, bool], Transcript] = field(default_factory=dict)

    def ask(self, number: int, *, stream: bool) -> Ask:
        body = dict(TINY[number]) | {"model": self.model, "min_tokens": 8}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        path = CHAT if "messages" in body else COMPLETIONS
        known = self.known.get((number, stream))
        return Ask(path, body, known and known.texts)

    def learn(self, number: int, *, stream: bool, transcript: Transcript) -> None:
        self.known[number, stream] = transcript

    def __call__(self, rng: random.Random) -> Ask:
        ask = self.ask(rng.randrange(len(TINY)), stream=rng.random() < 0.7)
        leaves = ask.streams and rng.random() < 0.1
        return replace(ask, leave_after=rng.randint(0, 20)) if leaves else ask
