"""Neighbouring releases understand each other: messages of each release, as bytes, in `golden/`.

A release's file is never changed once it is out. `python tests/shared/test_wire_versions.py` writes
that of the version under way, from SAMPLES; it needs that only when a message is new.
"""

import json
import sys
from pathlib import Path
from typing import Any, get_args

import forebay_shared
import msgspec
import pytest
from forebay_shared.asked import AskedCall, AskedFunction, AskedMessage, Chat, Prompt
from forebay_shared.books import UsageRecord
from forebay_shared.models import Adapter, EmbeddingCard, ModelCard
from forebay_shared.packets import CACHE, CHANGES, REPLY, ROSTER, WORK, Codec
from forebay_shared.sampling import Grammar, SamplingParams
from forebay_shared.wire import (
    WIRE_VERSION,
    Accepted,
    Beacon,
    CacheEvent,
    CallDelta,
    Cancel,
    Changed,
    Delta,
    Digest,
    Done,
    Embedded,
    Encode,
    Failed,
    Farewell,
    Load,
    PromptLogprobs,
    Reply,
    RosterEvent,
    SequenceStart,
    Snapshot,
    Started,
    Submit,
    SubmitText,
    Sync,
    TextDelta,
    TextLogprobs,
    TokenLogprobs,
    Usage,
    Work,
)

GOLDEN = Path(__file__).parent / "golden"
CODECS: dict[str, Codec[Any]] = {
    "work": WORK, "reply": REPLY, "roster": ROSTER, "cache": CACHE, "changes": CHANGES,
}  # fmt: skip
SAMPLING = SamplingParams(
    max_tokens=7, min_tokens=1, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=2**63,
    repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, logit_bias={5: -1.0},
    allowed_token_ids=(1, 2), bad_words=((3, 4),), stop_token_ids=(9,), ignore_eos=True, logprobs=2,
    prompt_logprobs=1, grammar=Grammar("regex", "a+", "response_format"),
)  # fmt: skip
SCORES = [TokenLogprobs(-0.5, [(3, -0.5), (4, -1.5)], 1), TokenLogprobs(-2.0)]
USAGE = Usage(10, 4, 6, 1.5, 2.5, 3.5, 2, True)
CHAT = Chat(
    messages=(
        AskedMessage("assistant", "so", "ann", "hm", (AskedCall("c", "look", "{}"),)),
        AskedMessage("tool", "seen", call_id="c"),
    ),
    functions=(AskedFunction("look", '{"type":"object"}', "Looks.", True),), required=True,
    forced="look", parallel=False, reasoning_effort="low", verbosity="high",
    template={"enable_thinking": False}, continues=True,
)  # fmt: skip
LOAD = Load(1, 2, 300, 0.25, 0.5, 1000.0, 50.0)
WHOLE = {"team": "t", "weight": 2.0, "priority": -1, "queue_timeout_ms": 5000, "metered": True}
SAMPLES: dict[str, list[Any]] = {
    "work": [
        Submit(request_id="r", attempt=1, gateway="g", prompt=b"", sampling=SamplingParams()),
        Submit(
            request_id="r", attempt=2, gateway="g", prompt=b"\1\0\0\0", sampling=SAMPLING,
            starts=(SequenceStart(0, b"\2\0\0\0"), SequenceStart(1)), cache_salt="s",
            traceparent="00-1-2-01", **WHOLE,
        ),
        SubmitText(
            request_id="r", attempt=1, gateway="g", asked=Prompt("hello"), sampling=SamplingParams()
        ),
        SubmitText(
            request_id="r", attempt=2, gateway="g", asked=CHAT, sampling=SAMPLING,
            given=("max_tokens", "seed"), indexes=(0, 2), cache_salt="s", traceparent="00-1-2-01",
            **WHOLE,
        ),
        Encode(request_id="e", attempt=1, gateway="g", inputs=(), texts=("a", "b")),
        Encode(request_id="e", attempt=1, gateway="g", inputs=(b"\1\0\0\0",)),
        Encode(request_id="e", attempt=1, gateway="g", inputs=(b"\1\0\0\0", b""), dimensions=64,
               normalize=False, **WHOLE),
        Submit(
            request_id="r", attempt=3, gateway="g", prompt=b"", sampling=SamplingParams(),
            suspect=True,
        ),
        Submit(
            request_id="r", attempt=1, gateway="g", prompt=b"", sampling=SamplingParams(),
            adapter="sql",
        ),
        SubmitText(
            request_id="r", attempt=3, gateway="g", asked=Prompt("hello"),
            sampling=SamplingParams(), suspect=True,
        ),
        Encode(request_id="e", attempt=3, gateway="g", inputs=(), suspect=True),
        Cancel(request_id="r", attempt=1),
        Cancel(request_id="r", attempt=1, index=3),
        Sync(),
    ],
    "reply": [
        Accepted("r", 1),
        Accepted("r", 1, alone=True),
        Started("r", 1, 0, 16, 2.5),
        PromptLogprobs("r", 1, 1, SCORES),
        Delta("r", 1, 0, 0, [1, 2]),
        TextDelta("r", 1, 0, 0, "hello"),
        TextDelta(
            "r", 1, 0, 1, "a", "b", [CallDelta(0, "c", "look", "{}")],
            [TextLogprobs(b"a", -0.5, [(b"a", -0.5)])], USAGE,
        ),
        Delta("r", 1, 1, 5, [7, 300], SCORES),
        Done("r", 1, 0, "stop", 256, USAGE),
        Done("r", 1, 1, "length", None, USAGE),
        Failed("r", 1, "engine_error", "It failed."),
        Failed("r", 1, "worker_draining", "Bye.", True, "prompt"),
        Embedded("e", 1, [b"\0\0\x80\x3f"], USAGE),
    ],
    "roster": [
        Beacon(worker="w", card="c", load=LOAD),
        Beacon(worker="w", card="c", load=LOAD, draining=True, digest=4),
        Beacon(worker="w", card="", load=Load(), draining=True, loading=("m", "alias")),
        Farewell(worker="w"),
    ],
    "cache": [
        Digest("w", 1, b"12345678", b"87654321", LOAD, 1.5),
        Snapshot("w", 2, 0, 1, b"12345678"),
    ],
    "changes": [Changed(3, "teams/red", '{"name":"red"}')],
    "card": [
        ModelCard(
            names=("m", "alias"), revision="v", family="llama", engine="native", tokenizer="t",
            vocab_size=100, max_model_len=2048, block_size=16, created=1, eos_token_ids=(2,),
            bos_token_id=1, chat_template="c", template_tokens={"eos_token": "</s>"},
            generation_defaults={"temperature": 0.6}, capabilities=frozenset({"generate"}),
            embedding=EmbeddingCard(8, "cls", False, True, (4, 8)),
        ),
        ModelCard(
            names=("m",), revision="v", family="llama", engine="native", tokenizer="t",
            vocab_size=100, max_model_len=2048, block_size=16, created=1,
            capabilities=frozenset({"adapters", "generate"}),
            adapters=(Adapter("sql", "1f", "sql-lora"), Adapter("plain", "2f")),
        ),
    ],
    "record": [UsageRecord(id="r", at=1.5, team="t", outcome="cancelled", input_tokens=3, cost=7)],
}  # fmt: skip
SINGLE = {"card": msgspec.msgpack.Decoder(ModelCard), "record": msgspec.json.Decoder(UsageRecord)}
RELEASES = sorted(GOLDEN.glob("*.json"))


def _plain(data: bytes, kind: str) -> Any:
    """The bytes as lists, maps and scalars: what a reader of any release sees."""
    return msgspec.json.decode(data) if kind == "record" else msgspec.msgpack.decode(data)


def _read(data: bytes, kind: str) -> list[Any]:
    if kind in SINGLE:
        return [SINGLE[kind].decode(data)]
    messages, bad = CODECS[kind].decode(data)
    assert bad == 0
    return messages


def _written(messages: list[Any], kind: str) -> bytes:
    if kind == "record":
        return msgspec.json.encode(messages[0])
    if kind == "card":
        return msgspec.msgpack.encode(messages[0], order="deterministic")
    return CODECS[kind].encode("sender", messages)


def _holds(new: Any, old: Any) -> bool:
    """Everything of `old` is in `new`, at its place; `new` may say more behind it."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(
            key in new and _holds(new[key], value) for key, value in old.items()
        )
    if isinstance(old, list):
        return isinstance(new, list) and len(new) >= len(old) and all(map(_holds, new, old))
    return bool(new == old)


def _more(value: Any) -> Any:
    """The same with a field more in every message, as a later release may write it."""
    if isinstance(value, dict):
        return {**value, "a_later_field": ["new"]}
    return [*value, "a later field"]


def _cases() -> list[Any]:
    return [
        pytest.param(kind, bytes.fromhex(data), id=f"{path.stem} {kind} {at}")
        for path in RELEASES
        for kind, packets in json.loads(path.read_text()).items()
        for at, data in enumerate(packets)
    ]


@pytest.mark.parametrize(("kind", "data"), _cases())
def test_a_release_reads_what_others_wrote_and_they_what_it_writes(kind: str, data: bytes) -> None:
    messages = _read(data, kind)
    assert _holds(_plain(_written(messages, kind), kind), _plain(data, kind))
    plain = _plain(_written(messages, kind), kind)
    if kind in CODECS:
        plain = [plain[0] + 1, plain[1], list(map(_more, plain[2])), "a later field"]
    else:
        plain = _more(plain)
    later = msgspec.json.encode(plain) if kind == "record" else msgspec.msgpack.encode(plain)
    assert _read(later, kind) == messages


def test_every_message_of_this_release_is_golden_and_reads_as_it_was_meant() -> None:
    golden = json.loads((GOLDEN / f"{forebay_shared.__version__}.json").read_text())
    found = {
        type(message)
        for kind, packets in golden.items()
        for data in packets
        for message in _read(bytes.fromhex(data), kind)
    }
    unions = (Work, Reply, RosterEvent, CacheEvent)
    assert found >= {kind for union in unions for kind in get_args(union)} | {Changed, ModelCard}
    for kind, samples in SAMPLES.items():
        read = [_read(bytes.fromhex(data), kind)[0] for data in golden[kind]]
        assert [each for each in samples if each not in read] == []
    assert WIRE_VERSION == 1


def _write() -> None:
    packets = {
        kind: [_written([sample], kind).hex() for sample in samples]
        for kind, samples in SAMPLES.items()
    }
    GOLDEN.mkdir(exist_ok=True)
    path = GOLDEN / f"{forebay_shared.__version__}.json"
    path.write_text(json.dumps(packets, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(_write())
