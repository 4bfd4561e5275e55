"""The echo engine does what every engine must, without a model; and engines are found by name."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forebay_shared.models import content_hash
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import StartError, WorkerSettings
from forebay_shared.telemetry import EngineMetrics
from forebay_shared.wire import Delta, Done, Failed, Reply, SequenceStart, Started, Submit, pack_ids
from forebay_worker.engines.echo.engine import EchoEngine
from forebay_worker.engines.echo.model import CHAT_TEMPLATE, END, SPACE
from forebay_worker.engines.naming import expected_names
from forebay_worker.engines.registry import build
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Template
from patience import PATIENCE_S
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer


class Driven:
    """An engine and what it emitted."""

    def __init__(self, **settings: Any) -> None:
        self.engine = EchoEngine(WorkerSettings(engine="echo", **settings))
        self.replies: list[Reply] = []
        self._arrived = threading.Condition()
        registry = CollectorRegistry()
        self.engine.start(
            self._emit,
            EngineMetrics(registry, model_name="echo", engine="0", max_model_len=100),
        )

    def _emit(self, events: Sequence[tuple[str, Reply]]) -> None:
        with self._arrived:
            self.replies.extend(reply for _, reply in events)
            self._arrived.notify_all()

    def ended(self, count: int) -> list[Reply]:
        """Waits until `count` sequences or requests have ended."""
        with self._arrived:
            assert self._arrived.wait_for(
                lambda: sum(isinstance(reply, Done | Failed) for reply in self.replies) >= count,
                PATIENCE_S,
            )
            return list(self.replies)

    def emitted(self) -> None:
        """Waits for a first token."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: any(map(_is_delta, self.replies)), PATIENCE_S)


def _is_delta(reply: Reply) -> bool:
    return isinstance(reply, Delta)


def _submit(
    prompt: Sequence[int], *starts: SequenceStart, request_id: str = "r", **sampling: object
) -> Submit:
    return Submit(
        request_id=request_id,
        attempt=1,
        gateway="g",
        prompt=pack_ids(prompt),
        sampling=SamplingParams(**sampling),
        starts=starts or (SequenceStart(),),
    )


def _run(submit: Submit) -> tuple[list[int], Done]:
    """Output ids and the end of a request's first sequence."""
    driven = Driven()
    driven.engine.submit(submit)
    replies = driven.ended(1)
    driven.engine.stop(PATIENCE_S)
    tokens = [token for reply in replies if isinstance(reply, Delta) for token in reply.token_ids]
    done = replies[-1]
    assert isinstance(done, Done)
    return tokens, done


@pytest.fixture
def slow() -> Iterator[Driven]:
    driven = Driven(echo_delay_ms=5, max_num_seqs=2, max_num_queued_reqs=3)
    yield driven
    driven.engine.stop(PATIENCE_S)


def test_a_template_that_it_is_given_says_what_it_answers(tmp_path: Path) -> None:
    """So a script plays a model: clients and agents are tried without one."""
    script = tmp_path / "script.jinja"
    script.write_text("Always this.<|end|>")
    engine = EchoEngine(WorkerSettings(engine="echo", chat_template=str(script)))
    assert engine.card.chat_template is not None
    assert engine.blobs[engine.card.chat_template] == script.read_bytes()
    with pytest.raises(StartError, match=r"none\.jinja"):
        EchoEngine(WorkerSettings(engine="echo", chat_template=str(tmp_path / "none.jinja")))


@given(st.integers(0, 12), st.lists(st.integers(0, 255), min_size=1, max_size=5))
def test_a_resumed_answer_equals_an_undisturbed_one(cut: int, prompt: list[int]) -> None:
    whole, _ = _run(_submit(prompt, max_tokens=12))
    start = SequenceStart(0, pack_ids(whole[:cut]))
    rest, done = _run(_submit(prompt, start, max_tokens=12))
    assert whole[:cut] + rest == whole
    assert done.usage.completion_tokens == 12


def test_an_end_or_a_stop_id_ends_the_answer_but_not_before_min_tokens() -> None:
    tokens, done = _run(_submit([5, 6, END, 7], max_tokens=9))
    assert (tokens, done.finish_reason, done.stop_token) == ([5, 6], "stop", END)
    tokens, done = _run(_submit([5, 6, END], max_tokens=9, min_tokens=4))
    assert (tokens, done.finish_reason) == ([5, 6, SPACE, 5, 6], "stop")
    tokens, done = _run(_submit([5, 6, END], max_tokens=4, ignore_eos=True))
    assert (tokens, done.finish_reason) == ([5, 6, END, 5], "length")
    tokens, done = _run(_submit([5, 6, 7], max_tokens=9, stop_token_ids=(7,)))
    assert (tokens, done.stop_token) == ([5, 6], 7)


@pytest.mark.parametrize(
    ("submit", "code"),
    [
        (_submit([1] * 40_000), "context_length_exceeded"),
        (_submit([]), "invalid_value"),
        (_submit([1], temperature=9.0), "invalid_value"),
        (_submit([1], *map(SequenceStart, range(2000))), "overloaded"),
    ],
)
def test_what_cannot_run_is_refused_alone(submit: Submit, code: str) -> None:
    driven = Driven()
    driven.engine.submit(submit)
    (failed,) = driven.ended(1)
    assert isinstance(failed, Failed)
    assert failed.code == code
    assert failed.retryable is (code == "overloaded")
    driven.engine.submit(_submit([1], request_id="next", max_tokens=1))
    assert isinstance(driven.ended(2)[-1], Done)
    driven.engine.stop(PATIENCE_S)


def test_a_cancel_ends_running_and_waiting_sequences(slow: Driven) -> None:
    slow.engine.submit(_submit([1], *map(SequenceStart, range(3)), max_tokens=10_000))
    slow.emitted()
    assert (slow.engine.load().running, slow.engine.load().waiting) == (2, 1)
    slow.engine.cancel("r", 1, 1)
    assert {reply.index for reply in slow.ended(1) if isinstance(reply, Done)} == {1}
    slow.engine.cancel("r", 2)
    slow.engine.cancel("unknown", 1)
    slow.engine.cancel_gateway("g")
    dones = [reply for reply in slow.ended(3) if isinstance(reply, Done)]
    assert sorted(done.index for done in dones) == [0, 1, 2]
    assert {done.finish_reason for done in dones} == {"abort"}


def test_what_waits_past_its_deadline_fails_and_the_rest_goes_on(slow: Driven) -> None:
    slow.engine.submit(_submit([1], *map(SequenceStart, range(2)), max_tokens=100))
    late = msgspec.structs.replace(_submit([1], request_id="late"), queue_timeout_ms=50)
    slow.engine.submit(late)
    replies = slow.ended(3)
    failed = next(reply for reply in replies if isinstance(reply, Failed))
    assert (failed.request_id, failed.code) == ("late", "deadline_exceeded")
    assert sum(isinstance(reply, Done) for reply in replies) == 2


def test_a_stop_fails_what_still_runs_so_that_it_goes_elsewhere(slow: Driven) -> None:
    slow.engine.submit(_submit([1], max_tokens=10_000))
    slow.emitted()
    slow.engine.stop(PATIENCE_S)
    failed = slow.ended(1)[-1]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retryable) == ("worker_lost", True)
    assert slow.engine.healthy


def test_the_order_is_started_then_deltas_then_done() -> None:
    driven = Driven()
    driven.engine.submit(_submit([1, 2], max_tokens=3, logprobs=2))
    kinds = [type(reply) for reply in driven.ended(1)]
    assert kinds == [Started, Delta, Delta, Delta, Done]
    driven.engine.stop(PATIENCE_S)


def test_its_tokenizer_and_template_give_any_text_back() -> None:
    engine = EchoEngine(WorkerSettings(engine="echo"))
    blobs = engine.blobs
    assert all(content_hash(content) == name for name, content in blobs.items())
    tokenizer = Tokenizer.from_buffer(blobs[engine.card.tokenizer])
    text = "Ünïcode 😀\n\ttabs"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())
    rendered = Template(CHAT_TEMPLATE).render(
        messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True
    )
    ids = tokenizer.encode(rendered).ids
    assert len(ids) == 5
    assert END in ids
    assert tokenizer.get_vocab_size() == engine.card.vocab_size


def test_with_an_adapter_it_answers_in_capitals() -> None:
    driven = Driven(enable_lora=True, lora_modules=("loud=/srv/loud",))
    tokenizer = Tokenizer.from_buffer(driven.engine.blobs[driven.engine.card.tokenizer])
    prompt = tokenizer.encode("hello, World").ids
    driven.engine.submit(msgspec.structs.replace(_submit(prompt, max_tokens=12), adapter="loud"))
    tokens = [reply.token_ids[0] for reply in driven.ended(1) if isinstance(reply, Delta)]
    assert tokenizer.decode(tokens) == "HELLO, WORLD"
    driven.engine.stop(PATIENCE_S)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"enable_lora": True}, "--enable-lora: name the adapters, as --lora-modules NAME=PATH"),
        ({"lora_modules": ("a=/b",)}, "--lora-modules: needs --enable-lora"),
        ({"enable_lora": True, "lora_modules": ("a",)}, "--lora-modules: 'a' is not NAME=PATH"),
        (
            {"enable_lora": True, "lora_modules": ("a=/b", "a=/c")},
            "--lora-modules: a is there twice",
        ),
        (
            {"enable_lora": True, "lora_modules": ("echo=/b",)},
            "--lora-modules: echo is the model's own name",
        ),
        (
            {"enable_lora": True, "lora_modules": ("a=/b",), "runner": "pooling"},
            "--lora-modules: the engine echo serves no adapters here.",
        ),
        (
            {"enable_lora": True, "lora_modules": ("a=/b",), "engine": "http"},
            "--lora-modules: the engine http serves no adapters here.",
        ),
    ],
)
def test_adapters_that_cannot_be_are_one_line(settings: dict, said: str) -> None:
    with pytest.raises(StartError) as raised:
        build(WorkerSettings(**{"engine": "echo", **settings}))
    assert str(raised.value) == said


def test_names_of_adapters_are_announced_before_the_model_is_loaded() -> None:
    given = WorkerSettings(
        model="org/Tiny", enable_lora=True, lora_modules=("sql=/srv/a", "law=/srv/b")
    )
    assert expected_names(given) == ("org/tiny", "sql", "law")


def test_an_engine_is_found_by_name_and_an_unknown_one_is_named() -> None:
    assert isinstance(build(WorkerSettings(engine="echo")), EchoEngine)
    with pytest.raises(StartError, match=r"'nope'.*echo, http, native, vllm"):
        build(WorkerSettings(engine="nope"))
