"""A worker is killed while it answers, whatever was asked: clients get the undisturbed answers.

Each round asks everything at once of one worker, kills it when a given client has its k-th event,
and lets another take over. What must not change is compared with the same requests in peace. With
log-probabilities each token is an event of its own, however late they come.
"""

import json
import math
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import torch
import transformers
from adapter_house import make_adapter
from fleet_house import AUTH, Fleet, Gateway, Worker, fleet, stream
from messages import check_message, check_message_stream
from patience import PATIENCE_S, START_S
from redis_house import redis_running
from response_transcripts import check_events, check_response, without_identity
from serve_house import until
from tiny_checkpoint import MAX_LEN, make_directory
from transcripts import check_answer, check_stream

pytestmark = [pytest.mark.system, pytest.mark.chaos]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ASK = [{"role": "user", "content": "What is the capital of France?"}]
NUMBERS = {
    "type": "json_schema",
    "json_schema": {
        "name": "numbers",
        "schema": {
            "type": "object",
            "properties": {
                "names": {
                    "type": "array",
                    "items": {"enum": ["Ann", "Bob", "Cy"]},
                    "minItems": 12,
                    "maxItems": 40,
                },
                "note": {"type": "string", "minLength": 60, "maxLength": 90},
            },
            "required": ["names", "note"],
            "additionalProperties": False,
        },
    },
}
TOOL = {
    "type": "function",
    "function": {
        "name": "note_down",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 80, "maxLength": 120}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}
CALL = json.dumps({"name": "note_down", "arguments": {"text": "so it goes, " * 14}})


@dataclass
class Case:
    """What is asked."""

    name: str
    path: str
    fields: dict = field(default_factory=dict)
    streamed: bool = True
    model: str = "tiny"
    adapter: str = ""

    @property
    def asked_for(self) -> str:
        return self.adapter or self.model

    @property
    def body(self) -> dict:
        asked = {"prompt": "The quick"} if self.path == COMPLETIONS else {"messages": ASK}
        if self.path == RESPONSES:
            asked = {"input": "What is the capital of France?", "store": False}
        usage = {"stream_options": {"include_usage": True}} if self._counts else {}
        return {"model": self.asked_for, **asked, **usage, **self.fields}

    @property
    def _counts(self) -> bool:
        return self.streamed and self.path in (CHAT, COMPLETIONS)

    @property
    def n(self) -> int:
        prompts = self.fields.get("prompt", "")
        return self.fields.get("n", 1) * (len(prompts) if isinstance(prompts, list) else 1)

    def read(self, raw: bytes) -> object:
        """Checks an answer against its contract; what of it must not change."""
        if self.path == RESPONSES:
            return without_identity((check_events if self.streamed else check_response)(raw))
        if self.path == MESSAGES:
            check = check_message_stream if self.streamed else check_message
            return {**check(raw, model=self.asked_for), "id": ""}
        if not self.streamed:
            check_answer(raw, model=self.asked_for, n=self.n, chat=self.path == CHAT)
            return {**json.loads(raw), "id": "", "created": 0}
        chat = self.path == CHAT
        check_stream(raw, model=self.asked_for, n=self.n, include_usage=True, chat=chat)
        return _folded(raw)


SEEDED = {"temperature": 1, "seed": 11, "max_tokens": 200}
GREEDY = {"temperature": 0, "max_tokens": 200}
FORCED = SEEDED | {"max_tokens": 600, "tools": [TOOL], "tool_choice": "required"}
OWN_CALL = {
    "messages": [{"role": "user", "content": f"<tool_call>\n{CALL}\n</tool_call>"}],
    "tools": [TOOL],
    "max_tokens": 400,
}
STOPPED = {"prompt": "abcdefghij" * 18 + "END", "stop": "END", "max_tokens": 400}
CASES = [
    Case("greedy", CHAT, GREEDY),
    Case("seeded", CHAT, SEEDED),
    Case("an adapter", CHAT, SEEDED, adapter="sql"),
    Case("an adapter in one piece", COMPLETIONS, GREEDY, streamed=False, adapter="sql"),
    Case("logprobs", CHAT, SEEDED | {"logprobs": True, "top_logprobs": 3}),
    Case("three choices", CHAT, SEEDED | {"n": 3}),
    Case("json schema", CHAT, SEEDED | {"max_tokens": 600, "response_format": NUMBERS}),
    Case("regex", CHAT, SEEDED | {"structured_outputs": {"regex": "([ab]c){90}d"}}),
    Case("forced tool", CHAT, FORCED),
    Case("penalties", CHAT, SEEDED | {"frequency_penalty": 0.5, "presence_penalty": 0.3}),
    Case("completion", COMPLETIONS, SEEDED | {"logprobs": 2}),
    Case("echo with logprobs", COMPLETIONS, SEEDED | {"echo": True, "logprobs": 2}),
    Case("several prompts", COMPLETIONS, SEEDED | {"prompt": ["One", "Two and"], "n": 2}),
    Case("responses", RESPONSES, {"temperature": 0, "max_output_tokens": 200}),
    Case("messages", MESSAGES, {"temperature": 0, "max_tokens": 200}),
    Case("chat in one piece", CHAT, SEEDED | {"logprobs": True, "n": 2}, streamed=False),
    Case("tool in one piece", CHAT, FORCED, streamed=False),
    Case("echo in one piece", COMPLETIONS, GREEDY | {"echo": True, "logprobs": 1}, streamed=False),
    Case("responses in one piece", RESPONSES, {"temperature": 0, "max_output_tokens": 200}, False),
    Case("messages in one piece", MESSAGES, {"temperature": 0, "max_tokens": 200}, False),
    Case("own tool call", CHAT, OWN_CALL, model="echo"),
    Case("own tool call in one piece", CHAT, OWN_CALL, streamed=False, model="echo"),
    Case("a stop string", COMPLETIONS, STOPPED, model="echo"),
]


LONG = ("--step-timeout-s", "3600")
"""One that is stopped for longer than a step may take ends when it goes on; a spare waits long."""


@dataclass
class House:
    """One worker of each model serves; another one is stopped, to take over."""

    fleet: Fleet
    gateway: Gateway
    directory: Path
    serving: dict[str, Worker] = field(default_factory=dict)
    spare: dict[str, Worker] = field(default_factory=dict)
    peaceful: dict[str, dict[str, object]] = field(default_factory=dict)

    def start(self, model: str) -> Worker:
        if model == "echo":
            return self.fleet.echo(20.0, *LONG)
        return self.fleet.worker(
            str(self.directory), "--served-model-name", "tiny", "--device", "cpu",
            "--max-model-len", str(MAX_LEN), *LONG, "--enable-lora", "--lora-modules",
            f"sql={self.directory / 'sql'}", TEST_PACE_S="0.03",
        )  # fmt: skip

    def set_apart(self, spare: Worker, left: int) -> None:
        """Stops a worker that has joined; `left` of all are seen then."""
        until(lambda: bool(spare.name), START_S)
        until(lambda: self.gateway.metric("forebay_workers") == left + 1)
        spare.send(signal.SIGSTOP)
        until(lambda: self.gateway.metric("forebay_workers") == left)

    def swap(self, model: str) -> None:
        """Kills the one that serves; the other one takes over at once."""
        self.serving[model].kill()
        self.spare[model].send(signal.SIGCONT)
        self.serving[model] = self.spare[model]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    directory = make_directory(tmp_path_factory.mktemp("tiny"))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    make_adapter(model, directory / "sql")
    with redis_running() as redis, fleet(redis) as processes:
        gateway = processes.gateway("--tool-call-parser", "hermes")
        one = House(processes, gateway, directory)
        for model in ("tiny", "echo"):
            one.serving[model], one.spare[model] = one.start(model), one.start(model)
        processes.ready(gateway, 4)
        for left, (model, spare) in zip((3, 2), one.spare.items(), strict=True):
            one.set_apart(spare, left)
            one.peaceful[model] = _ask_all(one, model)
        yield one


@pytest.mark.parametrize(
    ("model", "leader", "after"),
    [
        ("tiny", "logprobs", 1),
        ("tiny", "logprobs", 20),
        ("tiny", "logprobs", 60),
        ("echo", "a stop string", 2),
        ("echo", "own tool call", 8),
    ],
)
def test_a_killed_worker_changes_no_answer(
    house: House, model: str, leader: str, after: int
) -> None:
    lost = house.gateway.metric("forebay_resubmitted_total", reason="worker_lost")
    answers = _ask_all(house, model, leader, after)
    moved = house.gateway.metric("forebay_resubmitted_total", reason="worker_lost") - lost
    house.spare[model] = house.start(model)
    wrong = {name: text for name in answers if (text := _difference(
        answers[name], house.peaceful[model][name]))}  # fmt: skip
    assert not wrong
    assert moved > len(answers) / 2, "most had ended before the worker was killed"
    house.set_apart(house.spare[model], 2)


def _ask_all(house: House, model: str, leader: str = "", after: int = 0) -> dict[str, object]:
    """What every case of a model is answered; the worker is killed when the leader's client has so
    many events."""

    def seen(count: int) -> None:
        if count == after:
            house.swap(model)

    asked = [case for case in CASES if case.model == model]
    with ThreadPoolExecutor(len(asked)) as pool:
        waits = {
            case.name: pool.submit(_ask, house, case, seen if case.name == leader else _ignore)
            for case in sorted(asked, key=lambda case: case.name == leader)
        }
        return {name: wait.result() for name, wait in waits.items()}


def _ignore(count: int) -> None:
    """Nobody acts on this client's events."""


def _ask(house: House, case: Case, seen: Callable[[int], None]) -> object:
    if case.streamed:
        return case.read(stream(house.gateway, case.path, case.body, seen))
    url = house.gateway.base + case.path
    answer = httpx.post(url, json=case.body, headers=AUTH, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return case.read(answer.content)


def _folded(raw: bytes) -> dict:
    """The choices of a stream put together, and its usage."""
    choices: dict[int, dict] = {}
    usage = None
    for event in raw.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[:-1]:
        chunk = json.loads(event.removeprefix(b"data: "))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            _fold(choices.setdefault(choice["index"], {}), choice)
    return {"choices": choices, "usage": usage}


def _fold(into: dict, new: dict) -> None:
    """Joins texts and lists, and the pieces of one tool call by its index."""
    for key, value in new.items():
        if key == "tool_calls":
            calls = into.setdefault(key, {})
            for call in value:
                _fold(calls.setdefault(call["index"], {}), call)
        elif isinstance(value, dict):
            into[key] = into.get(key) or {}
            _fold(into[key], value)
        elif isinstance(value, str | list) and into.get(key) is not None:
            into[key] = into[key] + value
        elif value is not None or key not in into:
            into[key] = value


_FREE = {"id", "cached_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"}
"""Ids, and what happened to be cached."""


def _difference(got: object, wanted: object, where: str = "") -> str:
    """What differs beyond the last bits of floats; "" when nothing does."""
    if isinstance(got, dict) and isinstance(wanted, dict) and got.keys() == wanted.keys():
        pairs = [(f"{where}.{key}", got[key], wanted[key]) for key in got if key not in _FREE]
    elif isinstance(got, list) and isinstance(wanted, list) and len(got) == len(wanted):
        pairs = [(f"{where}[{at}]", *both) for at, both in enumerate(zip(got, wanted, strict=True))]
    elif isinstance(got, float) and isinstance(wanted, float):
        return (
            ""
            if math.isclose(got, wanted, rel_tol=1e-3, abs_tol=1e-3)
            else _said(where, got, wanted)
        )
    else:
        return "" if got == wanted else _said(where, got, wanted)
    return next((text for each in pairs if (text := _difference(each[1], each[2], each[0]))), "")


def _said(where: str, got: object, wanted: object) -> str:
    return f"{where}: {got!r} instead of {wanted!r}"
