"""uvicorn (httptools, uvloop) against granian under one Litestar app: which serves the gateway?

    pip install granian && python benchmarks/asgi.py --peers DIR

The app answers POST /v1/chat/completions as the gateway does: msgspec decodes the body, a plain
answer is one JSON object, a stream is 32 small server-sent events, each sent by itself. Both
servers run one process with one loop, and are measured in turns with the peers' load tool. No
model and no Redis is involved. granian is no dependency of ours.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import common
import msgspec
from litestar import Litestar, post
from litestar.response import Response, Stream

TOKENS = 32
CASES = {
    "plain c=1": ("--no-stream", "--concurrency", "1"),
    "plain c=16": ("--no-stream", "--concurrency", "16"),
    "stream c=1": ("--stream", "--concurrency", "1"),
    "stream c=16": ("--stream", "--concurrency", "16"),
}


class Body(msgspec.Struct):
    model: str
    messages: list[dict[str, str]]
    stream: bool = False
    max_tokens: int = TOKENS


def create_app() -> Litestar:
    """The app under both servers; found by them as `asgi:create_app`."""
    return Litestar([complete], openapi_config=None)


@post("/v1/chat/completions", status_code=200)
async def complete(data: Body) -> Response[Any]:
    if data.stream:
        return Stream(_events(), media_type="text/event-stream")
    usage = {"prompt_tokens": 1, "completion_tokens": TOKENS}
    choice = {"index": 0, "message": {"role": "assistant", "content": "tok " * TOKENS}}
    return Response({"id": "x", "choices": [choice], "usage": usage})


async def _events() -> AsyncIterator[bytes]:
    for _ in range(TOKENS):
        await asyncio.sleep(0)
        choice = {"index": 0, "delta": {"content": "tok "}, "finish_reason": None}
        yield b"data: " + msgspec.json.encode({"id": "x", "choices": [choice]}) + b"\n\n"
    usage = {"prompt_tokens": 1, "completion_tokens": TOKENS}
    yield b"data: " + msgspec.json.encode({"choices": [], "usage": usage}) + b"\n\n"
    yield b"data: [DONE]\n\n"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seconds", default="2", help="of one measurement; default: %(default)s")
    options = parser.parse_args()
    results = common.Results("asgi", options)
    commands = {
        "uvicorn": "uvicorn --loop uvloop --http httptools",
        "granian": "granian --interface asgi --loop uvloop --workers 1 --http 1",
    }
    common_flags = "--factory asgi:create_app --no-access-log --log-level warning"
    with contextlib.ExitStack() as stack:
        urls: dict[str, str] = {}
        pids: dict[str, int] = {}
        for name, command in commands.items():
            port = common.free_port()
            urls[name] = f"http://127.0.0.1:{port}"
            flags = f"{command} {common_flags} --port {port}".split()
            pids[name] = stack.enter_context(
                common.server([sys.executable, "-m", *flags], urls[name], cwd=common.HERE)
            )

        for case, flags in CASES.items():

            def measure(name: str, turn: int, flags: tuple[str, ...] = flags) -> common.Figures:
                return _measure(options, urls[name], pids[name], flags)

            found = common.in_turns(options.rounds, list(commands), measure)
            results.add(case, found, "uvicorn")
    results.write()


def _measure(
    options: argparse.Namespace, url: str, pid: int, flags: tuple[str, ...]
) -> common.Figures:
    members = list(common.family(pid))
    before = common.cpu_seconds(members)
    timing = ("--seconds", options.seconds, "--warmup", "0.5", "--max-tokens", str(TOKENS))
    found = common.load(options, url, *flags, *timing)
    cpu_ms = (common.cpu_seconds(members) - before) * 1e3
    return {
        "requests/s": found["rps"],
        "latency p50 ms": found["latency_ms"]["p50"],
        "latency p99 ms": found["latency_ms"]["p99"],
        "cpu ms/request": found["server_cpu_ms"] or cpu_ms / max(1, found["answers"]),
        "rss MiB": common.resident_bytes(members) / 2**20,
    }


if __name__ == "__main__":
    main()
