"""The conformance suite, run as an engine's author runs it: in a process of its own, by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from adapter_house import make_adapter
from tiny_models import VOCAB, make_model
from tokenizers import Tokenizer, models, pre_tokenizers

EXAMPLE = Path(__file__).parents[2] / "examples/dice-engine"


def conformance(*arguments: str) -> subprocess.CompletedProcess[str]:
    suite = ["--pyargs", "forebay_worker.conformance"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suite, *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"PYTHONPATH": str(EXAMPLE)},
        check=False,
    )


def test_the_echo_engine_keeps_every_rule() -> None:
    run = conformance("--engine", "echo", "--engine-setting", "echo_delay_ms=2")
    assert run.returncode == 0, run.stdout


def test_the_echo_engine_keeps_the_rules_of_adapters() -> None:
    settings = ["enable_lora=true", "lora_modules=loud=/srv/loud", "echo_cache_blocks=64"]
    words = [word for setting in settings for word in ("--engine-setting", setting)]
    run = conformance("--engine", "echo", *words, "-k", "adapter", "-rs")
    assert run.returncode == 0, run.stdout
    assert "SKIPPED" not in run.stdout


def test_the_native_engine_keeps_every_rule(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path, max_position_embeddings=4096)  # room for seconds of steps
    make_adapter(model, tmp_path / "sql")
    tokenizer = Tokenizer(models.WordLevel({f"w{at}": at for at in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = [f"model={tmp_path}", "block_size=4", "kv_cache_memory_bytes=16000000"]
    settings += ["enable_lora=true", f"lora_modules=sql={tmp_path / 'sql'}"]
    words = [word for setting in settings for word in ("--engine-setting", setting)]
    run = conformance("--engine", "native", *words)
    assert run.returncode == 0, run.stdout


def test_the_example_keeps_every_rule_before_it_is_even_installed() -> None:
    run = conformance("--engine", "forebay_dice:DiceEngine", "-rs")
    assert run.returncode == 0, run.stdout
    assert "SKIPPED" in run.stdout, "it declares neither log-probabilities nor embeddings"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--engine names the engine to test"),
        (("--engine", "nothing"), "there is no engine 'nothing'"),
        (("--engine", "echo", "--engine-setting", "colour=red"), "has no field 'colour'"),
    ],
)
def test_what_is_asked_wrongly_is_told(arguments: tuple[str, ...], said: str) -> None:
    assert said in conformance(*arguments, "-rs", "-k", "healthy").stdout
