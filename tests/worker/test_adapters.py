"""Adapters in the native engine on a CPU, against a model of transformers into which each of them
is merged by hand; and what is refused, by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_house import ALL, ATTENTION, make_adapter, write
from engine_fakes import Recorded, make_submit, run
from forebay_shared.models import Adapter
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import Delta, Failed, Started
from forebay_worker.checkpoint.adapters import adapter_revision
from forebay_worker.engine import runner
from forebay_worker.engine.batch import ScheduledRow
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.intake import Limits
from forebay_worker.engine.runner import Runner
from forebay_worker.models.config import ModelError
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, make_model, make_sequence

NAMES = ("", "full", "attention", "scaled")
ADAPTERS = tuple(Adapter(name, f"revision of {name}") for name in NAMES[1:])
SIZE = {"kv_cache_memory_bytes": 4 << 20, "block_size": 4}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[(5 * at + 3 * k) % VOCAB for k in range(7 + 6 * at)] for at in range(4)]


class House:
    """A model with three adapters, and each of them merged into it: by name, "" for the model."""

    def __init__(self, variant: str, home: Path, **settings: Any) -> None:
        self.directory = home / "model"
        self.merged = {"": make_model(variant, self.directory)}
        base = self.merged[""]
        self.paths = {name: home / name for name in NAMES[1:]}
        shapes: dict[str, dict[str, Any]] = {
            "full": {"rank": 8},
            "attention": {"rank": 3, "modules": ATTENTION, "dtype": torch.bfloat16},
            "scaled": {"rank": 16, "modules": (*ALL[3:], "q_proj"), "use_rslora": True},
        }
        for seed, (name, shape) in enumerate(shapes.items()):
            merged = make_adapter(base, self.paths[name], seed=seed, **shape)
            self.merged[name] = merged
        self.runner = Runner(self.directory, WorkerSettings(**SIZE, **settings), self.paths)
        self.plain = Runner(self.directory, WorkerSettings(**SIZE, **settings))

    def core(self, **settings: Any) -> EngineCore:
        limits = Limits.of(self.runner, (), ADAPTERS)
        return EngineCore(self.runner, limits, WorkerSettings(**settings), Recorded())

    def expected(self, name: str, prompt: list[int], tokens: int = 12) -> list[int]:
        """Greedy tokens of transformers."""
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(tokens):
                ids.append(int(self.merged[name](torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="module", params=["llama", "llama3_rope", "qwen2", "qwen3", "mistral"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["compiled", "torch"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> House:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(runner, "_fused", lambda: None)
        return House("llama", tmp_path_factory.mktemp(request.param))


def logits(engine: Runner, *asked: tuple[list[int], int]) -> torch.Tensor:
    """Those after each prompt, with the adapter of a number, all in one batch: [R, V]."""
    from forebay_worker.engine.batch import flatten
    from forebay_worker.engine.runner import _to_device

    rows: list[ScheduledRow] = []
    for at, (prompt, number) in enumerate(asked):
        sequence = make_sequence(prompt, list(range(16 * at, 16 * at + 16)), GREEDY)
        sequence.adapter = number
        rows.append(ScheduledRow(sequence, len(prompt), samples=True))
    step = _to_device(flatten(rows, engine.block_size), torch.device("cpu"))
    with torch.inference_mode():
        return engine._decode(step, engine._cache)


def test_logits_are_those_of_the_merged_model(family: House) -> None:
    asked = [(prompt, number) for prompt in PROMPTS for number in range(-1, 3)]
    ours = logits(family.runner, *asked)
    for row, (prompt, number) in zip(ours, asked, strict=True):
        with torch.inference_mode():
            theirs = family.merged[NAMES[number + 1]](torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(row, theirs, rtol=0, atol=1e-4)


def test_rows_without_an_adapter_are_the_same_to_the_bit(house: House) -> None:
    for number in range(-1, 3):
        mixed = [(PROMPTS[0], -1), (PROMPTS[1], number), (PROMPTS[2], -1), (PROMPTS[3], number)]
        plain = logits(house.plain, *((prompt, -1) for prompt, _ in mixed))
        ours = logits(house.runner, *mixed)
        assert torch.equal(ours[::2], plain[::2])
        assert torch.equal(ours, plain) == (number < 0)


def answers(core: EngineCore, *submits: Any) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {submit.request_id: [] for submit in submits}
    for message in run(core, *submits):
        assert not isinstance(message, Failed), message
        if isinstance(message, Delta):
            tokens[message.request_id] += message.token_ids
    core.blocks.check_integrity()
    return tokens


@pytest.mark.parametrize("budget", [0, 5], ids=["whole prompts", "chunks"])
def test_adapters_in_one_batch_give_what_each_merged_model_does(house: House, budget: int) -> None:
    core = house.core(max_num_batched_tokens=budget)
    submits = [
        make_submit(f"{name}/{at}", prompt, sampling=GREEDY, adapter=name)
        for at, prompt in enumerate(PROMPTS)
        for name in NAMES
    ]
    assert answers(core, *submits) == {
        f"{name}/{at}": house.expected(name, prompt)
        for at, prompt in enumerate(PROMPTS)
        for name in NAMES
    }


def test_a_cached_prefix_is_its_own_adapters_alone(house: House) -> None:
    core, prompt = house.core(), PROMPTS[3]
    for again in (False, True):
        for name in NAMES:
            key = f"{name}/{again}"
            messages = run(core, make_submit(key, prompt, sampling=GREEDY, adapter=name))
            [started] = [each for each in messages if isinstance(each, Started)]
            assert started.cached_tokens == (24 if again else 0)
            tokens = [id for each in messages if isinstance(each, Delta) for id in each.token_ids]
            assert tokens == house.expected(name, prompt)


def test_a_sequence_goes_on_where_another_worker_left_off(house: House) -> None:
    for name in NAMES:
        whole = house.expected(name, PROMPTS[1])
        submit = make_submit(
            name or "base", PROMPTS[1], emitted={0: whole[:5]}, sampling=GREEDY, adapter=name
        )
        assert answers(house.core(), submit) == {name or "base": whole[5:]}


def test_an_adapter_that_is_not_here_fails_its_request_alone(house: House) -> None:
    core = house.core()
    messages = run(
        core,
        make_submit("r", PROMPTS[0], adapter="unknown"),
        make_submit("s", PROMPTS[0], sampling=GREEDY),
    )
    [failed] = [message for message in messages if isinstance(message, Failed)]
    assert (failed.request_id, failed.code) == ("r", "model_not_found")
    tokens = [id for each in messages if isinstance(each, Delta) for id in each.token_ids]
    assert tokens == house.expected("", PROMPTS[0])


def test_attention_beside_experts_may_have_adapters_and_experts_may_not(tmp_path: Path) -> None:
    base = make_model("qwen3_moe_mixed", tmp_path / "model")
    merged = make_adapter(base, tmp_path / "a", modules=ATTENTION)
    engine = Runner(tmp_path / "model", WorkerSettings(**SIZE), {"a": tmp_path / "a"})
    [ours] = logits(engine, (PROMPTS[2], 0))
    with torch.inference_mode():
        theirs = merged(torch.tensor([PROMPTS[2]])).logits[0, -1]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_bfloat16_is_near(tmp_path: Path) -> None:
    house = House("llama", tmp_path, dtype="bfloat16")
    for number, name in enumerate(NAMES[1:]):
        [ours] = logits(house.runner, (PROMPTS[2], number))
        with torch.inference_mode():
            theirs = house.merged[name](torch.tensor([PROMPTS[2]])).logits[0, -1]
        assert (ours - theirs).abs().mean() < 0.1 * theirs.abs().mean()


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
WHOLE = {Q + "A.weight": torch.ones(4, 48), Q + "B.weight": torch.ones(48, 4)}


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        (WHOLE, {"use_dora": True}, "adapter_config.json: use_dora is not supported"),
        (
            WHOLE,
            {"init_lora_weights": "pissa"},
            "adapter_config.json: init_lora_weights is not supported",
        ),
        (WHOLE, {"bias": "all"}, "adapter_config.json: bias is not supported"),
        (
            WHOLE,
            {"modules_to_save": ["x"]},
            "adapter_config.json: modules_to_save is not supported",
        ),
        (WHOLE, {"rank_pattern": {"q": 2}}, "adapter_config.json: rank_pattern is not supported"),
        (WHOLE, {"peft_type": "IA3"}, "adapter_config.json: peft_type must be LORA"),
        (WHOLE, {"r": 0}, "adapter_config.json: r must be a positive integer"),
        (WHOLE, {"lora_alpha": 0}, "adapter_config.json: lora_alpha must be a number other than 0"),
        ({}, {}, "adapter_model.safetensors holds no tensors"),
        (WHOLE, {"r": 17}, "its rank 17 is more than --max-lora-rank 16"),
        (
            {Q + "A.weight": torch.ones(4, 48)},
            {},
            "adapter_model.safetensors lacks tensor model.layers.0.self_attn.q_proj.lora_B.weight",
        ),
        (
            WHOLE | {Q + "B.weight": torch.ones(47, 4)},
            {},
            f"tensor {Q}B.weight has shape [47, 4], not [48, 4]",
        ),
        (
            WHOLE | {Q + "A.weight": torch.ones(4, 48, dtype=torch.int8)},
            {},
            f"tensor {Q}A.weight holds torch.int8, not floating point numbers",
        ),
        (
            WHOLE | {Q + "A.weight": torch.ones(4, 48).index_fill(0, torch.tensor([3]), math.nan)},
            {},
            f"tensor {Q}A.weight holds numbers that are not finite in torch.float32",
        ),
        (
            WHOLE | {Q + "B.weight": torch.full((48, 4), 1e38)},
            {"lora_alpha": 64},
            f"tensor {Q}B.weight holds numbers that are not finite in torch.float32",
        ),
        (
            WHOLE | {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 48)},
            {},
            "tensor base_model.model.lm_head.lora_A.weight is of no q, k, v, o, gate, up or down "
            "product of llama",
        ),
        (
            WHOLE | {Q.replace("layers.0", "layers.3") + "A.weight": torch.ones(4, 48)},
            {},
            f"tensor {Q.replace('layers.0', 'layers.3')}A.weight is of no q, k, v, o, gate, up or "
            "down product of llama",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    said: str,
    base: Path,
    tmp_path: Path,
) -> None:
    write(tmp_path / "a", tensors, **{"r": 4, "lora_alpha": 8} | config)
    with pytest.raises(ModelError) as raised:
        Runner(base, WorkerSettings(**SIZE), {"sql": tmp_path / "a"})
    assert str(raised.value) == f"--lora-modules sql: {said}."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    make_model("llama", directory)
    return directory


def test_files_that_are_not_there_or_broken_are_one_line(base: Path, tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(ModelError) as raised:
            Runner(base, WorkerSettings(**SIZE), {"sql": tmp_path})
        return str(raised.value)

    assert refusal() == (
        f"--lora-modules sql: {tmp_path}/adapter_config.json cannot be read "
        "(No such file or directory)."
    )
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": "4"}')
    assert refusal().endswith("Expected `int`, got `str` - at `$.r`.")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    assert refusal().endswith("lora_alpha must be a number other than 0.")
    whole = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(whole))
    assert refusal() == f"--lora-modules sql: {tmp_path} lacks adapter_model.safetensors."
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no file")
    assert "is not a whole safetensors file" in refusal()


def test_the_revision_differs_when_any_number_does(base: Path, tmp_path: Path) -> None:
    write(tmp_path, WHOLE, r=4, lora_alpha=8)
    before = adapter_revision(tmp_path)
    assert adapter_revision(tmp_path) == before
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tensors[Q + "A.weight"][3, 47] += 1e-3
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    between = adapter_revision(tmp_path)
    write(tmp_path, tensors, r=4, lora_alpha=16)
    assert len({before, between, adapter_revision(tmp_path)}) == 3
