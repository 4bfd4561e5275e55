"""Structured output with a real model: it obeys, ends, resumes, and fails alone."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from time import monotonic

import pytest
from engine_fakes import Recorded, make_submit
from forebay_shared.sampling import MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.telemetry import GrammarMetrics
from forebay_shared.wire import Delta, Done, Failed, Started, Submit, TokenLogprobs
from forebay_worker.checkpoint import resolve
from forebay_worker.engine import grammar as grammar_module
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.grammar import Grammars
from forebay_worker.engine.intake import Limits
from forebay_worker.engine.loop import EngineLoop
from forebay_worker.engine.runner import Runner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S
from prometheus_client import CollectorRegistry
from registry_house import total
from serve_house import until
from tokenizers import Tokenizer

EOS = 2
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
SLOW = "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(60)) + 'A60: "x"'


class House:
    """The demo model and its grammars, loaded once, and cores over them."""

    def __init__(self, directory: Path) -> None:
        self.runner = Runner(
            directory, WorkerSettings(max_model_len=256, kv_cache_memory_bytes=64 << 20)
        )
        tokenizer = (directory / "tokenizer.json").read_bytes()
        self.tokenizer = Tokenizer.from_buffer(tokenizer)
        self._names = count()
        self.grammars = Grammars(tokenizer, self.runner.vocab_size, (EOS,))

    def core(self, **options: object) -> EngineCore:
        return EngineCore(
            self.runner,
            Limits.of(self.runner, (EOS,)),
            WorkerSettings(**options),
            Recorded(),
            grammars=self.grammars,
        )

    def prompt(self, question: str) -> list[int]:
        return self.tokenizer.encode(CHAT.format(question), add_special_tokens=False).ids

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def ask(
        self, grammar: Grammar | None, core: EngineCore | None = None, **fields: object
    ) -> "Outcome":
        name = f"ask{next(self._names)}"
        submit = make_submit(name, self.prompt("Bob, 42."), sampling=asked(grammar, **fields))
        return self.run(core or self.core(), submit)[name]

    def run(self, core: EngineCore, *submits: Submit) -> "dict[str, Outcome]":
        for submit in submits:
            core.submit(submit, monotonic())
        while not core.idle:
            if core.stalled:
                core.wait_for_grammar(timeout_s=PATIENCE_S)
            core.step()
        return self.outcomes([message for _, message in core.take_events()])

    def outcomes(self, messages: list[object]) -> "dict[str, Outcome]":
        found: dict[str, Outcome] = {}
        for message in messages:
            outcome = found.setdefault(message.request_id, Outcome())
            match message:
                case Delta():
                    outcome.ids += message.token_ids
                    outcome.logprobs += message.logprobs or []
                case Done():
                    outcome.reason, outcome.done = message.finish_reason, message
                case Failed():
                    outcome.failed = message
                case _:
                    pass
        for outcome in found.values():
            outcome.text = self.tokenizer.decode(outcome.ids)
        return found


class Outcome:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.reason: str | None = None
        self.done: Done | None = None
        self.failed: Failed | None = None


def asked(grammar: Grammar | None, **fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "temperature": 0, "grammar": grammar, **fields})


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    house = House(resolve("", progress=False))
    yield house
    house.grammars.close()


def is_person(value: object) -> bool:
    return (
        isinstance(value, dict)
        and list(value) == ["name", "age"]
        and value["name"] in ("Ann", "Bob")
        and isinstance(value["age"], int)
    )


NODE = {
    "type": "object",
    "properties": {"v": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"const": 0}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}


def is_list(value: object) -> bool:
    while isinstance(value, dict):
        if list(value) != ["v", "next"] or value["v"] not in (1, 2):
            return False
        value = value["next"]
    return value == 0


SCHEMAS: dict[str, tuple[object, Callable[[object], bool]]] = {
    "enum": ({"enum": ["red", "green", 3]}, lambda value: value in ("red", "green", 3)),
    "anyOf": (
        {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        lambda value: value in (True, False, None),
    ),
    "nested object": (
        {
            "type": "object",
            "properties": {"zeta": json.loads(PERSON), "alpha": {"type": "boolean"}},
            "required": ["zeta", "alpha"],
            "additionalProperties": False,
        },
        lambda value: list(value) == ["zeta", "alpha"] and is_person(value["zeta"]),
    ),
    "array of numbers": (
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        lambda value: len(value) <= 3 and all(0 <= item <= 9 for item in value),
    ),
    "empty array": ({"type": "array", "maxItems": 0}, lambda value: value == []),
    "two references": (
        {
            "$defs": {"p": json.loads(PERSON)},
            "type": "array",
            "prefixItems": [{"$ref": "#/$defs/p"}, {"$ref": "#/$defs/p"}],
            "minItems": 2,
            "items": False,
        },
        lambda value: len(value) == 2 and all(map(is_person, value)),
    ),
    "recursive reference": ({"$defs": {"n": NODE}, "$ref": "#/$defs/n"}, is_list),
    "pattern": (
        {"type": "string", "pattern": "^[a-c]{2}$"},
        lambda value: re.fullmatch("[a-c]{2}", value) is not None,
    ),
    "number": (
        {"type": "number", "minimum": 1, "maximum": 2, "multipleOf": 0.5},
        lambda value: value in (1, 1.5, 2),
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_output_follows_the_schema(house: House, name: str) -> None:
    """At temperature 2 the model would write noise."""
    schema, holds = SCHEMAS[name]
    grammar = Grammar("json_schema", json.dumps(schema))
    outcome = house.ask(grammar, temperature=2, seed=7, max_tokens=200)
    assert outcome.reason == "stop", outcome.text
    assert holds(json.loads(outcome.text)), outcome.text
    assert outcome.done.usage.completion_tokens == len(outcome.ids)


def test_the_empty_schema_is_any_value_and_bounded_by_the_limit(house: House) -> None:
    outcome = house.ask(Grammar("json_schema", "{}"), max_tokens=12)
    if outcome.reason == "stop":
        json.loads(outcome.text)
    else:
        assert (outcome.reason, len(outcome.ids)) == ("length", 12)


def test_whitespace_is_bounded(house: House) -> None:
    """A model that is pushed to write whitespace for ever may not."""
    bias = dict.fromkeys(house.ids(" ") + house.ids("\n") + house.ids("\t"), 100.0)
    outcome = house.ask(Grammar("json_schema", PERSON), logit_bias=bias, max_tokens=200)
    assert is_person(json.loads(outcome.text))
    assert "\n\n" not in outcome.text


def test_a_json_object_ends_at_its_closing_brace(house: House) -> None:
    favoured = dict.fromkeys(house.ids("}"), 100.0)
    outcome = house.ask(Grammar("json_object"), logit_bias=favoured)
    assert (outcome.text, outcome.reason) == ("{}", "stop")


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", r"[0-9]{3}-[0-9]{2}"), r"[0-9]{3}-[0-9]{2}"),
        (Grammar("regex", r"^(cat|dog)$"), r"cat|dog"),
        (Grammar("regex", r"\d{40}"), r"[0-9]{40}"),
        (Grammar("regex", r"[^\s\W]{40}"), r"[0-9A-Za-z_]{40}"),
        (Grammar("regex", r"[\d-.]{20}\\d"), r"[0-9.-]{20}\\d"),
        (Grammar("choice", '["Paris", "Rome", "a\\nb\\""]'), r'Paris|Rome|a\nb"'),
        (Grammar("lark", 'start: "x" /[ab]/ "y"'), r"x[ab]y"),
        (Grammar("lark", 'root ::= "yes" | "no"'), r"yes|no"),
    ],
)
def test_output_follows_other_kinds(house: House, grammar: Grammar, pattern: str) -> None:
    outcome = house.ask(grammar, ignore_eos=True, min_tokens=0)
    assert outcome.reason == "stop"
    assert re.fullmatch(pattern, outcome.text), outcome.text


def test_an_end_that_the_grammar_allows_is_the_models_to_choose(house: House) -> None:
    outcome = house.ask(Grammar("regex", "(yes )+"), logit_bias={EOS: 100})
    assert (outcome.text, outcome.reason) == ("yes ", "stop")
    assert outcome.done.stop_token == EOS
    assert outcome.done.usage.completion_tokens == len(outcome.ids) + 1


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_moved_request_goes_on_as_it_would_have(house: House, temperature: int) -> None:
    sampling = asked(Grammar("json_schema", PERSON), temperature=temperature, seed=3)
    prompt = house.prompt("Describe Bob.")
    whole = house.run(house.core(), make_submit("r", prompt, sampling=sampling))["r"]
    for cut in (1, len(whole.ids) // 2, len(whole.ids)):
        emitted = {0: whole.ids[:cut]}
        submit = make_submit("r", prompt, sampling=sampling, emitted=emitted, attempt=2)
        rest = house.run(house.core(), submit)["r"]
        assert whole.ids[cut:] == rest.ids
        assert rest.reason == "stop"
        assert rest.done.usage.completion_tokens == len(whole.ids)


class Narrow:
    """A runner of which only the first `num_blocks` blocks may be used."""

    def __init__(self, runner: Runner, num_blocks: int) -> None:
        self.num_blocks, self.block_size = num_blocks, runner.block_size
        self.token_budget = runner.token_budget
        self.prefill_budget = runner.prefill_budget
        self.max_model_len, self.vocab_size = runner.max_model_len, runner.vocab_size
        self.execute = runner.execute


def test_preemption_changes_no_token(house: House) -> None:
    grammar = Grammar("regex", "[a-z ]{40}")
    prompts = {f"r{at}": house.prompt("Say something.") for at in range(2)}
    submits = [
        make_submit(name, prompt, sampling=asked(grammar, seed=at, temperature=1))
        for at, (name, prompt) in enumerate(prompts.items())
    ]
    alone = {}
    for submit in submits:
        alone |= house.run(house.core(), submit)
    recorder = Recorded()
    blocks = -(-len(prompts["r0"]) // house.runner.block_size) + 2
    core = EngineCore(
        Narrow(house.runner, blocks),
        Limits.of(house.runner, (EOS,)),
        WorkerSettings(enable_prefix_caching=False, max_num_seqs=2),
        recorder,
        grammars=house.grammars,
    )
    together = house.run(core, *submits)
    assert recorder.total("preemptions") > 0
    assert {name: each.ids for name, each in together.items()} == {
        name: each.ids for name, each in alone.items()
    }


GRAMMARS = (
    None,
    Grammar("json_schema", PERSON),
    Grammar("json_object"),
    Grammar("regex", "[a-d]+ [0-9]{2}"),
    Grammar("choice", '["left", "right"]'),
)
requests = st.tuples(
    st.sampled_from(GRAMMARS),
    st.sampled_from(["Hello.", "Name a colour.", "What is 2+2? Answer shortly, please."]),
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 2**63),
    st.integers(1, 6),
)


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(requests, min_size=2, max_size=5))
def test_rows_with_and_without_grammars_do_not_touch_each_other(
    house: House, batch: list[tuple[Grammar | None, str, float, int, int]]
) -> None:
    submits = [
        make_submit(
            str(at),
            house.prompt(question),
            sampling=asked(grammar, temperature=temperature, seed=seed, max_tokens=budget),
        )
        for at, (grammar, question, temperature, seed, budget) in enumerate(batch)
    ]
    together = house.run(house.core(enable_prefix_caching=False), *submits)
    for submit in submits:
        alone = house.run(house.core(enable_prefix_caching=False), submit)
        assert together[submit.request_id].ids == alone[submit.request_id].ids


def test_log_probabilities_are_those_before_the_grammar(house: House) -> None:
    free = house.ask(None, logprobs=3, max_tokens=1).logprobs[0]
    bound = house.ask(Grammar("choice", '["zebra"]'), logprobs=3, max_tokens=1).logprobs[0]
    assert [token for token, _ in bound.top] == [token for token, _ in free.top]
    assert bound.logprob < free.logprob


# What goes wrong

BROKEN = {
    "no JSON": Grammar("json_schema", "{"),
    "empty": Grammar("json_schema", ""),
    "false": Grammar("json_schema", "false"),
    "unknown type": Grammar("json_schema", '{"type": "nope"}'),
    "lost reference": Grammar("json_schema", '{"$ref": "#/$defs/x"}'),
    "foreign reference": Grammar("json_schema", '{"$ref": "http://127.0.0.1:1/x"}'),
    "self reference": Grammar("json_schema", '{"$ref": "#"}'),
    "unsatisfiable": Grammar("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'),
    "empty enum": Grammar("json_schema", '{"enum": []}'),
    "bad pattern": Grammar("json_schema", '{"type": "string", "pattern": "("}'),
    "bad format": Grammar("json_schema", '{"type": "string", "format": "nope"}'),
    "nested": Grammar("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000),
    "reference tower": Grammar(
        "json_schema",
        json.dumps(
            {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}}
            | {"$ref": "#/$defs/d0"}
        ),
    ),
    "open group": Grammar("regex", "("),
    "look-ahead": Grammar("regex", "(?=a)a"),
    "back-reference": Grammar("regex", r"(a)\1"),
    "regex nest": Grammar("regex", "(" * 5000 + "a" + ")" * 5000),
    "nothing matches": Grammar("regex", r"[^\s\S]"),
    "no choice": Grammar("choice", "[]"),
    "choice of numbers": Grammar("choice", "[1]"),
    "bad lark": Grammar("lark", "start: ("),
    "no lark": Grammar("lark", ""),
    "lark in circles": Grammar("lark", "start: start"),
    "lark of JSON": Grammar("lark", '{"grammars": []}'),
    "terminal tower": Grammar(
        "lark",
        "start: A0\n"
        + "".join(f'A{i}: "x" (A{i + 1} | "y")\n' for i in range(3000))
        + 'A3000: "x"',
    ),
    "slow": Grammar("lark", SLOW),
    "too long": Grammar("regex", "a" * (MAX_GRAMMAR_BYTES + 1)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_grammar_fails_alone_and_says_which_field(house: House, name: str) -> None:
    grammar = BROKEN[name]
    core = house.core()
    failed = house.ask(Grammar(grammar.kind, grammar.source, field="response_format"), core).failed
    assert (failed.code, failed.param, failed.retryable) == (
        "invalid_value",
        "response_format",
        False,
    )
    assert len(failed.message) < 200
    assert house.ask(Grammar("choice", '["ok"]'), core).text == "ok"


@pytest.mark.parametrize(
    "keyword",
    ["not", "if", "uniqueItems", "contains", "propertyNames", "dependentRequired", "oneOf"],
)
def test_a_keyword_that_cannot_be_enforced_is_refused_by_name(house: House, keyword: str) -> None:
    value = [{"type": "string"}, {"minLength": 3}] if keyword == "oneOf" else {}
    failed = house.ask(Grammar("json_schema", json.dumps({keyword: value}))).failed
    assert keyword in failed.message


def test_a_failure_of_the_matcher_fails_that_request_alone(house: House) -> None:
    """The lexer of the first has too many states after some tokens."""
    wild = Grammar("regex", r"(\p{L}{1,100}\d?){1,100}")
    submits = [
        make_submit("wild", house.prompt("Hi"), sampling=asked(wild, max_tokens=100)),
        make_submit("tame", house.prompt("Hi"), sampling=asked(GRAMMARS[1])),
    ]
    core = house.core()
    outcomes = house.run(core, *submits)
    assert outcomes["wild"].failed.param == "structured_outputs"
    assert is_person(json.loads(outcomes["tame"].text))
    core.blocks.check_integrity()
    again = house.ask(wild, core, max_tokens=1)
    assert again.reason == "length", "one failure spoils no later request"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every compile waits until it is set."""
    event, check = threading.Event(), grammar_module._Checker.check

    def gated(checker: grammar_module._Checker, grammar: Grammar) -> str:
        assert event.wait(PATIENCE_S)
        return check(checker, grammar)

    monkeypatch.setattr(grammar_module._Checker, "check", gated)
    yield event
    event.set()


def test_settings_that_leave_nothing_to_choose_are_the_clients_error(house: House) -> None:
    core = house.core()
    one = Grammar("choice", '["one"]')
    failed = house.ask(one, core, allowed_token_ids=tuple(house.ids("two"))).failed
    assert failed.code == "invalid_value"
    assert house.ask(one, core, min_tokens=30).text == "one"


def test_a_slow_compile_delays_nobody(house: House, gate: threading.Event) -> None:
    core = house.core()
    for number in range(3):
        grammar = Grammar("regex", f"slow{number}")
        core.submit(make_submit(f"slow{number}", [5], sampling=asked(grammar)), monotonic())
    assert core.stalled
    assert not core.idle
    assert core.load().waiting == 3
    registry, before = CollectorRegistry(), house.grammars.outcomes["compiled"]
    registry.register(GrammarMetrics("w", house.grammars))
    assert total(registry, "forebay_grammars_compiling") == 3
    core.submit(make_submit("quick", [5, 6], sampling=asked(None, max_tokens=2)), monotonic())
    while not core.stalled:
        core.step()
    assert house.outcomes([message for _, message in core.take_events()]).keys() == {"quick"}
    core.cancel("slow2", 1)
    gate.set()
    outcomes = house.run(core)
    assert outcomes["slow0"].text == "slow0"
    assert outcomes["slow1"].text == "slow1"
    assert outcomes["slow2"].reason == "abort"
    until(lambda: total(registry, "forebay_grammars_compiling") == 0)
    compiled = total(registry, "forebay_grammar_compilations_total", outcome="compiled")
    assert compiled - before in (2, 3), "what is cancelled may be under way"
    core.blocks.check_integrity()


def test_the_queue_deadline_holds_while_a_grammar_compiles(
    house: House, gate: threading.Event
) -> None:
    receiver: SimpleQueue[object] = SimpleQueue()
    loop = EngineLoop(house.core(), lambda events: [receiver.put(each) for _, each in events])
    loop.start()
    late = make_submit("late", [5], sampling=asked(Grammar("regex", "late")), queue_timeout_ms=1)
    loop.submit(late)
    assert receiver.get(timeout=PATIENCE_S).code == "deadline_exceeded"
    loop.submit(make_submit("next", [5], sampling=asked(Grammar("regex", "x"))))
    gate.set()
    assert isinstance(receiver.get(timeout=PATIENCE_S), Started)
    loop.stop(30)


def test_the_cache_is_bounded(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "CACHE_ENTRIES", 4)
    core = house.core()
    for at in range(12):
        assert house.ask(Grammar("choice", f'["n{at}"]'), core).text == f"n{at}"
        assert house.grammars.cache_size[0] <= 4
    monkeypatch.setattr(grammar_module, "CACHE_BYTES", 0)
    assert house.ask(Grammar("choice", '["big"]'), core).text == "big"
    assert house.grammars.cache_size == (0, 0)
