"""The command line of `forebay bench serve`, with the flags of `vllm bench serve`, as a struct."""

import argparse
import os
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from forebay_shared.settings import Secret

from forebay_gateway.bench.datasets import DatasetOptions
from forebay_gateway.bench.metrics import SERIES

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
SAMPLING: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}


class BenchOptions(DatasetOptions, frozen=True, kw_only=True):
    """One run. What each field does is in the help."""

    backend: Literal["openai", "openai-chat"]
    base_url: str
    host: str
    port: int
    endpoint: str
    model: str
    api_key: Secret
    header: dict[str, str]
    ready_check_timeout_sec: float
    timeout: float
    prompt_form: Literal["auto", "ids", "text"]
    max_concurrency: int | None
    request_rate: float | None
    burstiness: float
    num_warmups: int
    ignore_eos: bool
    sampling: dict[str, float]
    extra_body: dict[str, Any]
    percentile_metrics: tuple[str, ...]
    metric_percentiles: tuple[float, ...]
    goodput: dict[str, float]
    save_result: bool
    save_detailed: bool
    result_dir: Path
    result_filename: str
    metadata: dict[str, str]
    disable_tqdm: bool

    @property
    def url(self) -> str:
        """Where the server is, without a trailing /v1 or slash."""
        url = self.base_url or f"http://{self.host}:{self.port}"
        return url.rstrip("/").removesuffix("/v1")

    @property
    def path(self) -> str:
        return self.endpoint or ENDPOINTS[self.backend]


def parse(argv: list[str]) -> BenchOptions:
    """Exits with status 2 and one line for a bad flag or value."""
    parser = build_parser()
    given = vars(parser.parse_args(argv))
    sampling = {name: given.pop(name) for name in SAMPLING}
    given["sampling"] = {name: value for name, value in sampling.items() if value is not None}
    for name in ("header", "metadata", "goodput"):
        given[name] = dict(given[name])
    key = given["api_key"] or os.environ.get("OPENAI_API_KEY") or os.environ.get("FOREBAY_API_KEY")
    given["api_key"] = Secret(key or "")
    return BenchOptions(**given)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forebay bench serve",
        description="Measure an OpenAI-compatible server the way its clients see it.",
    )
    _server_flags(parser.add_argument_group("server"))
    _dataset_flags(parser.add_argument_group("requests"))
    _trace_flags(parser.add_argument_group("trace replay"))
    _load_flags(parser.add_argument_group("load"))
    _sampling_flags(parser.add_argument_group("sampling; what is not given is not sent"))
    _report_flags(parser.add_argument_group("report"))
    return parser


class _Group(Protocol):
    """What argparse calls a group, whose class has no public name."""

    def add_argument(self, *flags: str, **settings: Any) -> argparse.Action: ...


def _server_flags(group: _Group) -> None:
    add = group.add_argument
    add("--backend", choices=ENDPOINTS, default="openai", help="completions or chat")
    add("--base-url", default="", metavar="URL", help="instead of host and port")
    add("--host", default="127.0.0.1", help="default: %(default)s")
    add("--port", type=int, default=8000, help="default: %(default)s")
    add("--endpoint", default="", metavar="PATH", help="default: the backend's")
    add("--model", default="", help="default: the first of /v1/models")
    add("--api-key", default="", help="default: $OPENAI_API_KEY or $FOREBAY_API_KEY")
    add("--header", type=_pair, nargs="*", default=(), metavar="NAME=VALUE")
    add(
        "--ready-check-timeout-sec",
        type=_positive_float,
        default=0.0,
        metavar="S",
        help="wait so long for the server to list a model",
    )
    add("--timeout", type=_positive_float, default=3600.0, metavar="S", help="of one request")


def _dataset_flags(group: _Group) -> None:
    add = group.add_argument
    add(
        "--dataset-name",
        choices=("random", "lognormal", "prefix_repetition", "trace"),
        default="random",
        help="lognormal: lengths like ShareGPT's; default: %(default)s",
    )
    add("--num-prompts", type=_count, default=1000, help="default: %(default)s")
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    add(
        "--prompt-form",
        choices=("auto", "ids", "text"),
        default="auto",
        help="auto: token ids (exact lengths) on completions if the server takes them, else words",
    )
    add("--random-input-len", type=_size, default=1024, metavar="N", help="default: %(default)s")
    add("--random-output-len", type=_count, default=128, metavar="N", help="default: %(default)s")
    add(
        "--random-range-ratio",
        type=_ratio,
        default=0.0,
        metavar="R",
        help="lengths vary by this share up and down",
    )
    add("--random-prefix-len", type=_size, default=0, metavar="N", help="a prefix all share")
    for name, default in (("prefix-len", 256), ("suffix-len", 256), ("output-len", 128)):
        add(f"--prefix-repetition-{name}", type=_count, default=default, metavar="N")
    add("--prefix-repetition-num-prefixes", type=_count, default=10, metavar="N")
    add("--max-input-len", type=_size, default=0, metavar="N", help="cut longer prompts")
    add("--max-output-len", type=_size, default=0, metavar="N", help="cut longer outputs")


def _trace_flags(group: _Group) -> None:
    add = group.add_argument
    add(
        "--dataset-path",
        type=Path,
        default=None,
        metavar="FILE",
        help="Azure LLM CSV or Mooncake JSON lines, also gzipped; --num-prompts limits the rows",
    )
    add(
        "--time-scale",
        type=_positive_float,
        default=1.0,
        metavar="F",
        help="factor on arrival times: 0.5 is twice as fast",
    )
    add(
        "--length-scale",
        type=_positive_float,
        default=1.0,
        metavar="F",
        help="factor on lengths, and on the size of shared blocks",
    )


def _load_flags(group: _Group) -> None:
    add = group.add_argument
    add("--max-concurrency", type=_count, default=None, metavar="N", help="requests open at once")
    add(
        "--request-rate",
        type=_positive_float,
        default=None,
        metavar="RPS",
        help="Poisson arrivals; default: inf, of a trace its own times",
    )
    add(
        "--burstiness",
        type=_positive_float,
        default=1.0,
        metavar="K",
        help="shape of the gamma-distributed gaps: 1 is Poisson, less is burstier",
    )
    add(
        "--num-warmups", type=_size, default=0, metavar="N", help="requests before the clock starts"
    )


def _sampling_flags(group: _Group) -> None:
    add = group.add_argument
    for name, kind in SAMPLING.items():
        add(f"--{name.replace('_', '-')}", type=kind, default=None, metavar="X")
    add("--ignore-eos", action="store_true", help="every answer has its full length")
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help="added to each body")


def _report_flags(group: _Group) -> None:
    add = group.add_argument
    add(
        "--percentile-metrics",
        type=_series,
        default=("ttft", "tpot", "itl"),
        metavar="A,B",
        help=f"of {','.join(SERIES)}; default: ttft,tpot,itl",
    )
    add(
        "--metric-percentiles",
        type=_percentiles,
        default=(99.0,),
        metavar="P,Q",
        help="default: 99",
    )
    add(
        "--goodput",
        type=_limit,
        nargs="+",
        default=(),
        metavar="NAME:MS",
        help="limits that count a request as good: ttft:500 tpot:50 e2el:5000",
    )
    add("--save-result", action="store_true", help="write the figures as JSON")
    add("--save-detailed", action="store_true", help="with an entry for each request")
    add("--result-dir", type=Path, default=Path(), metavar="DIR")
    add("--result-filename", default="", metavar="FILE")
    add("--metadata", type=_pair, nargs="*", default=(), metavar="NAME=VALUE")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _size(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in ("ttft", "tpot", "e2el"):
        raise argparse.ArgumentTypeError(f"{text!r} is not ttft:MS, tpot:MS or e2el:MS")
    return name, _positive_float(value)


def _series(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in SERIES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SERIES)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    points = tuple(float(part) for part in text.split(","))
    if any(not 0 <= point <= 100 for point in points):
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 100")
    return points


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None
