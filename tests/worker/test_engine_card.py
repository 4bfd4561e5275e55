"""The model card: what a directory says of its model, and what makes two models differ."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from forebay_shared.models import ModelCard, content_hash
from forebay_shared.settings import StartError, WorkerSettings
from forebay_worker.engines.card import ModelFiles

TEMPLATE = "{{ bos_token }}{{ messages[0].content }}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    home = tmp_path / "Tiny-Model"
    home.mkdir()
    write(home / "config.json", {"model_type": "llama", "eos_token_id": 2, "bos_token_id": 1})
    write(
        home / "generation_config.json",
        {"eos_token_id": [7, 2], "temperature": 0.6, "max_new_tokens": 64, "do_sample": True},
    )
    write(
        home / "tokenizer_config.json",
        {
            "bos_token": {"content": "<s>", "special": True},
            "eos_token": "</s>",
            "pad_token": None,
            "chat_template": [
                {"name": "rag", "template": "x"},
                {"name": "default", "template": "y"},
            ],
        },
    )
    (home / "tokenizer.json").write_bytes(b'{"version": "1.0"}')
    write_weights(home, b"w" * 1_000_000)
    return home


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def write_weights(home: Path, data: bytes) -> None:
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    )
    raw = len(header).to_bytes(8, "little") + header.encode() + data
    (home / "model.safetensors").write_bytes(raw)


def describe(home: Path, **settings: object) -> tuple[ModelCard, dict[str, bytes]]:
    files = ModelFiles(home, WorkerSettings(model=str(home), **settings))
    return files.card(
        engine="native",
        revision=files.revision("float32"),
        vocab_size=10,
        max_model_len=128,
        block_size=16,
    )


def test_the_card_says_what_a_gateway_needs(directory: Path) -> None:
    card, blobs = describe(directory)
    assert card.names == ("tiny-model",)
    assert (card.family, card.eos_token_ids, card.bos_token_id) == ("llama", (7, 2), 1)
    assert card.template_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert card.generation_defaults == {"temperature": 0.6, "max_tokens": 64}
    assert blobs[card.tokenizer] == b'{"version": "1.0"}'
    assert card.chat_template is not None
    assert blobs[card.chat_template] == b"y"
    assert all(content_hash(content) == name for name, content in blobs.items())


def test_the_defaults_of_sampling_are_the_models_or_none_or_anothers_with_changes_on_top(
    directory: Path, tmp_path: Path
) -> None:
    def defaults(config: str = "auto", changed: str = "") -> dict[str, float]:
        card, _ = describe(directory, generation_config=config, override_generation_config=changed)
        assert card.eos_token_ids == (7, 2)
        return card.generation_defaults

    other = tmp_path / "other"
    other.mkdir()
    write(other / "generation_config.json", {"top_k": 5, "eos_token_id": 9, "unknown": []})
    assert defaults() == {"temperature": 0.6, "max_tokens": 64}
    assert defaults("none") == defaults("vllm") == {}
    for path in (other, other / "generation_config.json"):
        assert defaults(str(path)) == {"top_k": 5}
    changes = '{"temperature": 0, "top_p": 0.5, "max_new_tokens": null}'
    assert defaults(changed=changes) == {"temperature": 0, "top_p": 0.5}
    assert defaults("none", '{"max_new_tokens": 7}') == {"max_tokens": 7}


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("generation_config", "/nowhere"),
        ("generation_config", ""),
        ("override_generation_config", "{"),
        ("override_generation_config", "[]"),
        ("override_generation_config", '{"temprature": 1}'),
        ("override_generation_config", '{"temperature": 3}'),
        ("override_generation_config", '{"temperature": "hot"}'),
        ("override_generation_config", '{"eos_token_id": 1}'),
    ],
)
def test_defaults_that_cannot_be_used_stop_the_start_and_name_the_flag(
    directory: Path, flag: str, value: str
) -> None:
    with pytest.raises(StartError, match="--" + flag.replace("_", "-")):
        describe(directory, **{flag: value})


def test_names_given_by_the_settings_win(directory: Path) -> None:
    assert describe(directory, served_model_name=("gpt-x", "alias"))[0].names == ("gpt-x", "alias")


def test_the_templates_own_file_wins_and_the_settings_file_wins_over_it(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("own")
    card, blobs = describe(directory)
    assert blobs[card.chat_template or ""] == b"own"
    (directory / "mine.jinja").write_text("mine")
    card, blobs = describe(directory, chat_template=str(directory / "mine.jinja"))
    assert blobs[card.chat_template or ""] == b"mine"


def test_a_bare_directory_makes_a_card_without_a_template(directory: Path) -> None:
    for name in ("generation_config.json", "tokenizer_config.json"):
        (directory / name).unlink()
    card, blobs = describe(directory)
    assert (card.eos_token_ids, card.chat_template, card.generation_defaults) == ((2,), None, {})
    assert list(blobs) == [card.tokenizer]


def finetune(home: Path) -> None:
    """One weight in 25,000 moved: the samples see each stretch of that length."""
    write_weights(home, b"w" * 499_000 + b"x" * 25_000 + b"w" * 476_000)


@pytest.mark.parametrize(
    "change",
    [
        finetune,
        lambda home: write_weights(home, b"w" * 1_000_001),
        lambda home: write(home / "config.json", {"model_type": "llama", "rope_theta": 1.0}),
        lambda home: (home / "model.safetensors").rename(home / "model-1.safetensors"),
    ],
    ids=["weights", "size", "config", "name"],
)
def test_the_revision_changes_with_the_model(
    directory: Path, change: Callable[[Path], None]
) -> None:
    before = describe(directory)[0].revision
    assert describe(directory)[0].revision == before
    change(directory)
    assert describe(directory)[0].revision != before


def test_the_revision_changes_with_the_types_and_the_seed_of_dummy_weights(
    directory: Path,
) -> None:
    others = [
        *(WorkerSettings(load_format="dummy", seed=seed) for seed in (0, 1)),
        WorkerSettings(quantization="fp8"),
        WorkerSettings(kv_cache_dtype="fp8"),
        WorkerSettings(quantization="fp8", kv_cache_dtype="fp8"),
    ]
    revisions = [
        ModelFiles(directory, WorkerSettings()).revision("float32"),
        ModelFiles(directory, WorkerSettings()).revision("bfloat16"),
        *(ModelFiles(directory, settings).revision("float32") for settings in others),
    ]
    assert len(set(revisions)) == 7


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config.json", "{"),
        ("tokenizer_config.json", '{"bos_token": 5}'),
        ("config.json", '{"eos_token_id": "two"}'),
    ],
)
def test_a_broken_file_stops_the_start_with_a_line_that_names_it(
    directory: Path, name: str, content: str
) -> None:
    (directory / name).write_text(content)
    with pytest.raises(StartError, match=name):
        describe(directory)


def test_a_missing_template_file_stops_the_start(directory: Path) -> None:
    with pytest.raises(StartError, match="nowhere"):
        describe(directory, chat_template="nowhere.jinja")
