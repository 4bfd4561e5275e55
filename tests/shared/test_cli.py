"""The command line: what flags and variables mean, and what a bad one says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forebay_shared import flags, serve
from forebay_shared.commands import GATEWAY, SERVE, WORKER, Command
from forebay_shared.settings import (
    GatewaySettings,
    Secret,
    ServeSettings,
    StartError,
    WorkerSettings,
)
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S

COMMANDS = [SERVE, GATEWAY, WORKER]


def forebay(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forebay_shared.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=variables,
        check=False,
    )


def test_a_flag_wins_over_its_variable_and_the_variable_over_the_default() -> None:
    variables = {"FOREBAY_PORT": "9001", "FOREBAY_SEED": "7"}
    settings: Any = SERVE.parse(["--port", "9002"], variables)
    assert (settings.port, settings.seed, settings.gateways) == (9002, 7, 1)


def test_the_flags_that_people_know_from_vllm_mean_the_same() -> None:
    words = shlex.split(
        "model-dir --host 0.0.0.0 --port=1 --api-key a --api-key b --served-model-name m "
        "--dtype half --max_model_len 4k --max-num-seqs 8 --max-num-batched-tokens 1K "
        "--gpu-memory-utilization 0.5 --no-enable-prefix-caching --block-size 32 --seed 1 "
        "--chat-template t.jinja --kv-cache-memory-bytes 2G "
        "--quantization fp8 --kv-cache-dtype fp8_e4m3"
    )
    assert SERVE.parse(words, {}) == ServeSettings(
        model="model-dir",
        host="0.0.0.0",
        port=1,
        api_key=(Secret("a"), Secret("b")),
        served_model_name=("m",),
        dtype="float16",
        max_model_len=4000,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        block_size=32,
        seed=1,
        chat_template="t.jinja",
        kv_cache_memory_bytes=2 * 2**30,
        quantization="fp8",
        kv_cache_dtype="fp8",
    )


def test_serve_takes_all_that_a_gateway_and_a_worker_take_and_hands_it_on() -> None:
    names = {option.name for option in flags.options(ServeSettings)}
    for kind in (GatewaySettings, WorkerSettings):
        assert {option.name for option in flags.options(kind)} <= names
    words = shlex.split(
        "--max-concurrent-requests 7 --queue-timeout-s 3 --allowed-origins https://a "
        "--trust-request-chat-template --max-num-seqs 5"
    )
    settings: Any = SERVE.parse(words, {})
    gateway = serve._narrowed(settings, GatewaySettings, fd=5)
    assert (gateway.max_concurrent_requests, gateway.queue_timeout_s, gateway.fd) == (7, 3.0, 5)
    assert gateway.allowed_origins == ("https://a",)
    assert gateway.trust_request_chat_template
    assert serve._narrowed(settings, WorkerSettings).max_num_seqs == 5


@pytest.mark.parametrize(
    ("arguments", "variables", "line"),
    [
        (["--port", "70000"], {}, "--port: '70000' is not an integer from 0 to 65535"),
        (["--port", "x"], {}, "--port: 'x' is not an integer from 0 to 65535"),
        (["--port"], {}, "--port needs one argument"),
        (["--prot", "1"], {}, "unknown flag --prot: did you mean --port?"),
        (["--zzz"], {}, "unknown flag --zzz: see --help"),
        (["a", "b"], {}, "unexpected argument 'b': one MODEL at most"),
        (["--dtype", "int8"], {}, "--dtype: 'int8' is not one of auto, float32, bfloat16, float16"),
        (["--max-num-seqs", "0"], {}, "--max-num-seqs: '0' is not an integer at least 1"),
        (
            ["--gpu-memory-utilization", "nan"],
            {},
            "--gpu-memory-utilization: 'nan' is not a number above 0 and at most 1",
        ),
        ([], {"FOREBAY_PORT": ""}, "FOREBAY_PORT: '' is not an integer from 0 to 65535"),
        (
            [],
            {"FOREBAY_ENABLE_PREFIX_CACHING": "maybe"},
            "FOREBAY_ENABLE_PREFIX_CACHING: 'maybe' is not true or false",
        ),
        ([], {"FOREBAY_API_KEY": "[1"}, "FOREBAY_API_KEY: not a JSON list of texts"),
        (
            ["--lora-modules", "sql=/a", "la\nw=/b"],
            {},
            "--lora-modules: 'la\\nw=/b' is not a text without control characters",
        ),
        (
            [],
            {"FOREBAY_SERVED_MODEL_NAME": "tiny\x1b[2J"},
            "FOREBAY_SERVED_MODEL_NAME: 'tiny\\x1b[2J' is not a text without control characters",
        ),
    ],
)
def test_a_bad_flag_or_value_is_one_line_that_says_what_is_right(
    arguments: list[str], variables: dict[str, str], line: str
) -> None:
    with pytest.raises(StartError) as caught:
        SERVE.parse(arguments, variables)
    assert str(caught.value) == line


def test_the_process_says_the_line_on_stderr_and_exits_with_2() -> None:
    ended = forebay("serve", FOREBAY_GATEWAYS="none")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == (
        "forebay serve: FOREBAY_GATEWAYS: 'none' is not an integer from 1 to 64\n"
    )


def test_an_unknown_command_names_those_that_there_are() -> None:
    ended = forebay("sevre")
    assert ended.returncode == 2
    assert ended.stderr == (
        "forebay: unknown command 'sevre': one of serve, gateway, worker, admin, bench\n"
    )


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_shows_every_flag_with_its_default_and_hides_what_only_supervisors_use(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--help"], {})
    shown = capsys.readouterr().out
    for option in flags.options(command.settings):
        if option.name == command.positional:
            assert f"[{option.name.upper()}]" in shown
        else:
            found = re.search(rf"{option.flag}(?![\w-])", shown)
            assert (found is not None) == (option.name not in command.hidden)
    assert "examples:" in shown


def test_every_name_under_a_heading_of_the_help_is_a_flag() -> None:
    known = {option.name for option in flags.options(ServeSettings)}
    headed = [name for each in COMMANDS for names in each.groups.values() for name in names]
    assert set(headed) <= known
    for command in COMMANDS:
        names = [name for group in command.groups.values() for name in group]
        assert len(names) == len(set(names)), "each is under one heading"


def test_help_and_refusals_load_neither_torch_nor_a_web_server() -> None:
    code = (
        "import sys; from forebay_shared.cli import main; main(['--help']); "
        "main(['worker', '--zzz']); print([m for m in ('torch', 'litestar', 'numpy', 'redis') "
        "if m in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert ended.stdout.endswith("\n[]\n")


def test_a_secret_may_stand_in_a_file(tmp_path: Path) -> None:
    keys, url = tmp_path / "keys", tmp_path / "url"
    keys.write_text("sk-one\nsk-two\n")
    url.write_text("redis://:pass@redis:6379/0\n")
    variables = {"FOREBAY_API_KEY_FILE": str(keys), "FOREBAY_REDIS_URL_FILE": str(url)}
    settings: Any = GATEWAY.parse([], variables)
    assert settings.api_key == ("sk-one", "sk-two")
    assert settings.redis_url == "redis://:pass@redis:6379/0"
    flagged: Any = GATEWAY.parse(["--api-key", "sk-flag"], variables)
    assert flagged.api_key == ("sk-flag",)


def test_a_secret_file_that_cannot_be_read_is_named_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"FOREBAY_API_KEY_FILE: cannot read .*No such file"):
        GATEWAY.parse([], {"FOREBAY_API_KEY_FILE": str(tmp_path / "none")})
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(StartError, match="it is no text"):
        GATEWAY.parse([], {"FOREBAY_API_KEY_FILE": str(binary)})


def test_secrets_show_in_no_repr_and_no_message() -> None:
    settings = SERVE.parse(["--api-key", "sk-1", "--redis-url", "redis://:pw@h"], {})
    assert "sk-1" not in repr(settings)
    assert "pw" not in repr(settings)


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=20)


@given(
    st.builds(
        WorkerSettings,
        model=texts,
        served_model_name=st.lists(names).map(tuple),
        redis_url=texts.map(Secret),
        max_num_seqs=st.integers(1, 10**9),
        gpu_memory_utilization=st.floats(0, 1, exclude_min=True),
        enable_prefix_caching=st.booleans(),
        dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
    )
    | st.builds(GatewaySettings, api_key=st.lists(texts.map(Secret)).map(tuple))
)
def test_settings_come_back_from_the_environment_that_hands_them_on(
    settings: WorkerSettings | GatewaySettings,
) -> None:
    command = WORKER if isinstance(settings, WorkerSettings) else GATEWAY
    assert command.parse([], flags.to_environment(settings)) == settings
