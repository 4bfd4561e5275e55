"""`forebay bench serve` as a whole, against a small OpenAI-like server over real HTTP."""

import asyncio
import json
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from forebay_gateway.bench.client import Client
from forebay_gateway.bench.load import play
from forebay_gateway.bench.main import main
from forebay_gateway.bench.metrics import Metrics, Summary
from forebay_gateway.bench.options import parse
from forebay_gateway.bench.report import text_report
from patience import PATIENCE_S


class Upstream:
    """Answers every request with one token per asked max_tokens; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.ids_allowed = True
        self.fail_from: int | None = None
        self.open = self.most_open = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}, {"id": "other"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if isinstance(body.get("prompt"), list) and not self.ids_allowed:
            return web.json_response({"error": {"message": "no ids"}}, status=400)
        if self.fail_from is not None and len(self.asked) > self.fail_from:
            return web.json_response({"error": {"message": "full"}}, status=503)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        choice = {"text": " x"} if "prompt" in body else {"delta": {"content": " x"}}
        for _ in range(body["max_tokens"]):
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        self.open -= 1
        await response.write_eof()
        return response


@pytest.fixture
def upstream() -> Generator[tuple[Upstream, str]]:
    """The server in a thread of its own, as `main` runs its own event loop."""
    server, loop = Upstream(), asyncio.new_event_loop()
    runner = web.AppRunner(server.app())
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    host, port = runner.addresses[0]
    yield server, f"http://{host}:{port}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(runner.cleanup())
    loop.close()


SMALL = [
    "--num-prompts",
    "6",
    "--random-input-len",
    "5",
    "--random-output-len",
    "3",
    "--disable-tqdm",
]


def test_a_run_reports_what_the_server_did(
    upstream: tuple[Upstream, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, url = upstream
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    save = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    extra = ["--temperature", "0", "--ignore-eos", "--extra-body", '{"top_k": 5}']
    assert main(["serve", "--base-url", f"{url}/v1", *SMALL, *save, *extra]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["model_id"], result["completed"], result["failed"]) == ("tiny", 6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 18)
    assert result["request_throughput"] == pytest.approx(6 / result["duration"])
    assert {"mean_ttft_ms", "median_tpot_ms", "std_itl_ms", "p99_itl_ms"} <= set(result)
    assert result["output_lens"] == [3] * 6
    assert result["generated_texts"] == [" x x x"] * 6
    assert "sk-secret" not in (tmp_path / "r.json").read_text()
    out = capsys.readouterr().out
    assert "Successful requests:                     6\n" in out
    assert "Total generated tokens:                  18\n" in out
    runs = server.asked[1:]  # the first asks whether ids are taken
    assert all(len(body["prompt"]) == 5 and body["model"] == "tiny" for body in runs)
    assert all((b["temperature"], b["ignore_eos"], b["top_k"]) == (0, True, 5) for b in runs)
    assert {headers["authorization"] for headers in server.headers} == {"Bearer sk-secret"}
    assert len({headers.get("x-request-id") for headers in server.headers[1:]}) == 6


def test_a_server_that_takes_no_ids_gets_words(upstream: tuple[Upstream, str]) -> None:
    server, url = upstream
    server.ids_allowed = False
    assert main(["serve", "--base-url", url, *SMALL]) == 0
    assert all(len(body["prompt"].split()) == 5 for body in server.asked[2:])
    assert len(server.asked) == 2 + 6


def test_chat_prompts_are_words_and_warmups_are_not_counted(
    upstream: tuple[Upstream, str], capsys: pytest.CaptureFixture[str]
) -> None:
    server, url = upstream
    assert (
        main(["serve", "--base-url", url, "--backend", "openai-chat", *SMALL, "--num-warmups", "2"])
        == 0
    )
    assert len(server.asked) == 1 + 2 + 6
    prompts = [body["messages"][0]["content"] for body in server.asked[1:]]
    assert all(len(prompt.split()) == 5 for prompt in prompts)
    assert not set(prompts[:2]) & set(prompts[2:])
    assert "Successful requests:                     6\n" in capsys.readouterr().out


def test_failures_are_counted_and_shown_by_kind(
    upstream: tuple[Upstream, str], capsys: pytest.CaptureFixture[str]
) -> None:
    server, url = upstream
    server.fail_from = 3
    assert main(["serve", "--base-url", url, *SMALL, "--max-concurrency", "1"]) == 0
    captured = capsys.readouterr()
    assert "Failed requests:                         4\n" in captured.out
    assert "  http 503:                              4\n" in captured.out
    assert "full" in captured.err


def test_a_server_that_refuses_everything_is_one_line(
    upstream: tuple[Upstream, str], capsys: pytest.CaptureFixture[str]
) -> None:
    server, url = upstream
    server.fail_from = 0
    assert main(["serve", "--base-url", url, *SMALL]) == 1
    assert capsys.readouterr().err.startswith("forebay bench: the first request failed: http 503")


async def test_no_more_requests_are_open_than_allowed() -> None:
    server = Upstream()
    runner = web.AppRunner(server.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    body = json.dumps({"prompt": [1], "max_tokens": 20}).encode()
    async with Client(
        f"http://{host}:{port}", "/v1/completions", headers={}, timeout_s=PATIENCE_S
    ) as client:
        outcomes, _ = await play(client, [body] * 12, [0.0] * 12, max_concurrency=3)
    await runner.cleanup()
    assert [outcome.error for outcome in outcomes] == [""] * 12
    assert server.most_open == 3


def test_the_report_has_the_lines_of_vllm_bench_serve() -> None:
    summary = Summary(mean=12.345, median=11.0, std=1.0, percentiles={99.0: 20.5, 99.9: 21.0})
    metrics = Metrics(
        duration=4.0,
        completed=7,
        failures={"http 503": 2, "connect": 1},
        total_input_tokens=700,
        total_output_tokens=140,
        request_throughput=1.75,
        request_goodput=1.5,
        output_throughput=35.0,
        total_token_throughput=210.0,
        max_output_tokens_per_s=48.0,
        max_concurrent_requests=5,
        series={"ttft": summary, "tpot": summary, "itl": summary, "e2el": summary},
    )
    text = text_report(
        metrics, percentile_metrics=("ttft", "tpot"), max_concurrency=8, request_rate=2.5
    )
    assert text == REPORT.strip()


REPORT = """
============ Serving Benchmark Result ============
Successful requests:                     7
Failed requests:                         3
  connect:                               1
  http 503:                              2
Maximum request concurrency:             8
Request rate configured (RPS):           2.50
Benchmark duration (s):                  4.00
Total input tokens:                      700
Total generated tokens:                  140
Request throughput (req/s):              1.75
Request goodput (req/s):                 1.50
Output token throughput (tok/s):         35.00
Peak output token throughput (tok/s):    48.00
Peak concurrent requests:                5.00
Total token throughput (tok/s):          210.00
---------------Time to First Token----------------
Mean TTFT (ms):                          12.35
Median TTFT (ms):                        11.00
P99 TTFT (ms):                           20.50
P99.9 TTFT (ms):                         21.00
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          12.35
Median TPOT (ms):                        11.00
P99 TPOT (ms):                           20.50
P99.9 TPOT (ms):                         21.00
==================================================
"""


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--num-prompts", "0"], "--num-prompts"),
        (["--request-rate", "-1"], "--request-rate"),
        (["--random-range-ratio", "1"], "--random-range-ratio"),
        (["--goodput", "itl:5"], "--goodput"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--percentile-metrics", "ttft,x"], "--percentile-metrics"),
        (["--metadata", "noequals"], "--metadata"),
    ],
)
def test_a_bad_flag_is_named(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(argv)
    assert stop.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_a_server_that_does_not_come_up_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    nobody = ["--base-url", "http://127.0.0.1:1", "--ready-check-timeout-sec", "0.01"]
    assert main(["serve", *nobody]) == 1
    expected = "forebay bench: http://127.0.0.1:1 listed no model within 0.01 s\n"
    assert capsys.readouterr().err == expected


def test_a_trace_without_a_path_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dataset-name", "trace"]) == 1
    assert "--dataset-path" in capsys.readouterr().err
