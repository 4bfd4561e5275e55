"""`forebay serve` as a person uses it: the ready line, the SDK, Ctrl-C, and what it refuses."""

import contextlib
import errno
import re
import socket
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from patience import PATIENCE_S, promptly, within
from serve_house import FAILURES, STOP_S, Serve, Starter, gone, until

pytestmark = pytest.mark.system

TEXT = "Grüße, 東京! 👋"
MESSAGES = [{"role": "user", "content": TEXT}]


def test_the_sdk_gets_chats_plain_and_streamed(echo: Serve) -> None:
    with echo.client() as client:
        plain = client.chat.completions.create(model=echo.model, messages=MESSAGES)
        assert plain.choices[0].message.content == TEXT
        assert plain.choices[0].finish_reason == "stop"
        assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
        chunks = list(
            client.chat.completions.create(
                model=echo.model,
                messages=MESSAGES,
                stream=True,
                stream_options={"include_usage": True},
                logprobs=True,  # so that no two tokens share an event, however late they are
            )
        )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert len(chunks) > 10
    assert chunks[-1].usage == plain.usage


def test_the_sdk_gets_completions_and_the_list_of_models(echo: Serve) -> None:
    with echo.client() as client:
        assert [model.id for model in client.models.list()] == [echo.model]
        plain = client.completions.create(model=echo.model, prompt="abc", max_tokens=7)
        parts = client.completions.create(model=echo.model, prompt="abc", max_tokens=7, stream=True)
        assert plain.choices[0].text == "abcabca" == "".join(p.choices[0].text for p in parts)


def test_the_sdk_gets_errors_of_its_own_kinds(echo: Serve) -> None:
    with echo.client() as client:
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nobody", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=echo.model, messages=MESSAGES, temperature=9)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="sk-wrong").models.list()


def test_a_storm_of_cancelled_streams_leaves_the_books_balanced(echo: Serve) -> None:
    def cancelled(number: int) -> None:
        with echo.client() as client:
            stream = client.completions.create(
                model=echo.model, prompt="abc", max_tokens=5000, stream=True
            )
            for _, _ in zip(range(number % 4), stream, strict=False):
                pass
            stream.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cancelled, range(48)))
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "forebay_open_generations",
        "forebay_open_streams",
        "forebay_inbox_tokens",
    ):
        until(lambda name=name: echo.metric(name) == 0)
    with echo.client() as client:
        assert client.completions.create(model=echo.model, prompt="ab", max_tokens=2)


def test_ctrl_c_ends_every_process_within_5_s_although_streams_are_open(start: Starter) -> None:
    within(STOP_S, lambda: _end_by_ctrl_c(start), tries=3)


def test_who_connects_to_a_server_that_ends_is_refused_while_open_streams_go_on(
    start: Starter,
) -> None:
    slow = ("--engine", "echo", "--echo-delay-ms", "50", "--drain-timeout-s", "60")
    server = start(*slow).wait_ready()
    address = server.url.split("/")[2].split(":")

    def refuses() -> bool:
        with contextlib.closing(socket.socket()) as connection:
            return connection.connect_ex((address[0], int(address[1]))) == errno.ECONNREFUSED

    with server.client() as client:
        stream = client.completions.create(
            model=server.model, prompt="abc", max_tokens=5000, stream=True
        )
        next(iter(stream))
        server.interrupt()
        until(refuses)
        for _ in range(20):
            assert next(iter(stream)).choices[0].text
        stream.close()
    assert server.wait_end() == 0


def _end_by_ctrl_c(start: Starter) -> float:
    """Starts a server, opens streams and ends it; how long the end took, in seconds."""
    server = start("--engine", "echo", "--echo-delay-ms", "20", "--gateways", "2").wait_ready()
    with ThreadPoolExecutor(4) as pool:
        ends = [pool.submit(_stream_to_its_end, server) for _ in range(4)]
        until(lambda: server.metric("vllm:num_requests_running") == 4)
        house = server.interrupt()
        began = time.monotonic()
        assert len(house) == 5  # itself, redis, two gateways, the worker
        gone(house)
        took = time.monotonic() - began
        assert server.wait_end() == 0
        for end in ends:
            end.result(timeout=PATIENCE_S)
    assert "".join(server.stdout).count("\n") == 1
    return took


def test_a_killed_server_leaves_no_process_behind_and_starts_again(
    start: Starter, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    servers = [start("--engine", "echo", data=data).wait_ready()]

    def again() -> None:
        house = servers[-1].children()
        assert len(house) == 3
        servers[-1].process.kill()
        gone(house)
        servers.append(start("--engine", "echo", data=data).wait_ready())

    promptly(again, 15.0, tries=3)
    first, *others = servers
    assert all(other.key == first.key for other in others)
    key = data / "api-key"
    assert key.read_text().strip() == first.key
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_key_of_ones_own_is_the_only_one_and_on_no_command_line(start: Starter) -> None:
    server = start("--engine", "echo", FOREBAY_API_KEY="sk-mine").wait_ready()
    assert server.key == "sk-mine"
    told = [word for child in server.children() for word in child.cmdline()]
    assert not any("sk-" in word or "unix:" in word for word in told)
    with server.client() as client:
        assert client.models.list().data


def test_a_busy_port_is_one_line_and_nothing_starts(start: Starter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        server = start("--port", port)
        assert server.wait_end() == 2
    assert server.stderr == [
        f"forebay serve: --port: {port} is in use by another process: "
        "stop it, or give another port\n"
    ]
    assert server.stdout == []


def test_a_second_server_on_one_data_directory_is_told_so_in_one_line(
    start: Starter, tmp_path: Path
) -> None:
    first = start("--engine", "echo", data=tmp_path / "d").wait_ready()
    second = start("--engine", "echo", data=tmp_path / "d")
    assert second.wait_end() == 2
    assert len(second.stderr) == 1
    assert f"in use by another forebay serve (process {first.process.pid})" in second.stderr[0]
    with first.client() as client:
        assert client.models.list().data


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["no-such-model"], r"forebay worker: model 'no-such-model' is neither .*"),
        (["--engine", "warp"], r"forebay worker: .*warp.*"),
        (["--redis-url", "redis://127.0.0.1:1"], r"forebay serve: --redis-url: no Redis .*"),
    ],
)
def test_what_cannot_start_ends_the_server_with_one_line(
    start: Starter, arguments: list[str], line: str
) -> None:
    server = start(*arguments)
    assert server.wait_end() == 2
    said = [text for text in server.stderr if not text.startswith("forebay: ")]
    assert len(said) == 1
    assert re.fullmatch(line, said[0].strip())
    assert server.stdout == []


def _stream_to_its_end(server: Serve) -> None:
    """Reads until the server cuts it off, whichever way a stopping server does."""
    with server.client() as client, contextlib.suppress(*FAILURES):
        stream = client.completions.create(
            model=server.model, prompt="abc", max_tokens=20_000, stream=True
        )
        assert sum(1 for _ in stream) < 20_000
