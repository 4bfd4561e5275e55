"""The command `forebay bench serve`: options in, report out; each part has a module of its own."""

import contextlib
import random
import sys
import uuid
from collections.abc import Generator, Sequence
from datetime import datetime
from typing import Any

import aiohttp
import msgspec
import uvloop
from tqdm import tqdm

from forebay_gateway.bench import load
from forebay_gateway.bench.client import Client, Outcome, chat_body, completion_body
from forebay_gateway.bench.datasets import Sample, as_text, make_samples
from forebay_gateway.bench.metrics import Metrics, measure
from forebay_gateway.bench.options import BenchOptions, parse
from forebay_gateway.bench.report import json_result, text_report

USAGE = "usage: forebay bench serve [--help] …"


class Run(msgspec.Struct, frozen=True):
    """What one run gave."""

    model: str
    metrics: Metrics
    outcomes: list[Outcome]


class BenchError(Exception):
    """The run could not be made; the message is for the user."""


def main(argv: list[str]) -> int:
    """Status 0 when at least one request succeeded."""
    if argv[:1] != ["serve"]:
        print(USAGE, file=sys.stderr)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    options = parse(argv[1:])
    try:
        run = uvloop.run(bench(options))
    except (BenchError, ValueError, OSError, aiohttp.ClientError) as exc:
        print(f"forebay bench: {exc or type(exc).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    _show(options, run)
    return 0 if run.metrics.completed else 1


async def bench(options: BenchOptions) -> Run:
    """One run. Raises BenchError, OSError, ValueError or aiohttp.ClientError if it cannot start."""
    samples = make_samples(options)
    offsets = _offsets(options, samples)
    async with Client(
        options.url, options.path, headers=_headers(options), timeout_s=options.timeout
    ) as client:
        await _wait_ready(client, options)
        model = options.model or await client.first_model()
        as_ids = await _takes_ids(client, options, model)
        bodies = [_body(options, model, sample, as_ids) for sample in samples]
        if options.num_warmups:
            warmups = [_body(options, model, sample, as_ids) for sample in _warmup_samples(options)]
            await load.play(
                client, warmups, [0.0] * len(warmups), max_concurrency=options.max_concurrency
            )
        with _progress(options, len(bodies)) as bar:
            outcomes, duration = await load.play(
                client,
                bodies,
                offsets,
                max_concurrency=options.max_concurrency,
                request_ids=f"bench-{uuid.uuid4().hex[:8]}-",
                on_done=lambda outcome: _advance(bar),
            )
    for sample, outcome in zip(samples, outcomes, strict=True):
        outcome.prompt_tokens = outcome.prompt_tokens or len(sample.prompt)
    metrics = measure(outcomes, duration, options.metric_percentiles, options.goodput)
    return Run(model, metrics, outcomes)


async def _wait_ready(client: Client, options: BenchOptions) -> None:
    wait_s = options.ready_check_timeout_sec
    try:
        if wait_s:
            await client.wait_ready(wait_s)
    except TimeoutError:
        raise BenchError(f"{options.url} listed no model within {wait_s:g} s") from None


def _warmup_samples(options: BenchOptions) -> list[Sample]:
    """Of the same kind but with other tokens, so that no prefix cache knows the run's prompts."""
    count = options.num_warmups
    return make_samples(msgspec.structs.replace(options, num_prompts=count, seed=~options.seed))


def _offsets(options: BenchOptions, samples: Sequence[Sample]) -> list[float]:
    """Arrival of each sample; --request-rate wins over the times of a trace."""
    rate = options.request_rate
    if rate is None and samples[0].at_s is not None:
        return [sample.at_s or 0.0 for sample in samples]
    rng = random.Random(f"{options.seed}/arrivals")
    return load.arrivals(len(samples), rate or float("inf"), options.burstiness, rng)


async def _takes_ids(client: Client, options: BenchOptions, model: str) -> bool:
    """Whether prompts go as token ids. One short request finds out."""
    fields = {"max_tokens": 1, **options.extra_body}
    if options.backend == "openai" and options.prompt_form != "text":
        outcome = await client.stream(completion_body(model, [1000, 1001], fields))
        # A first token may have no text: the request was right all the same.
        if outcome.error in ("", "no content"):
            return True
        if options.prompt_form == "ids" or not outcome.error.startswith("http 4"):
            raise BenchError(f"the first request failed: {outcome.error}: {outcome.detail}")
    elif options.prompt_form == "ids":
        raise BenchError("--prompt-form ids needs --backend openai")
    make = completion_body if options.backend == "openai" else chat_body
    outcome = await client.stream(make(model, "hello", fields))
    if outcome.error not in ("", "no content"):
        raise BenchError(f"the first request failed: {outcome.error}: {outcome.detail}")
    return False


def _body(options: BenchOptions, model: str, sample: Sample, as_ids: bool) -> bytes:
    fields: dict[str, Any] = {"max_tokens": sample.output_len, **options.sampling}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    fields |= options.extra_body
    if options.backend == "openai":
        prompt = sample.prompt if as_ids else as_text(sample.prompt)
        return completion_body(model, prompt, fields)
    return chat_body(model, as_text(sample.prompt), fields)


def _headers(options: BenchOptions) -> dict[str, str]:
    auth = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    return auth | options.header


@contextlib.contextmanager
def _progress(options: BenchOptions, total: int) -> Generator["tqdm[Any]"]:
    bar = tqdm(total=total, unit="req", disable=options.disable_tqdm, leave=False)
    with contextlib.closing(bar):
        yield bar


def _advance(bar: "tqdm[Any]") -> None:
    bar.update()


def _show(options: BenchOptions, run: Run) -> None:
    print(
        text_report(
            run.metrics,
            percentile_metrics=options.percentile_metrics,
            max_concurrency=options.max_concurrency,
            request_rate=options.request_rate or float("inf"),
        )
    )
    first = next((outcome for outcome in run.outcomes if outcome.error), None)
    if first:
        print(f"first failure: {first.error}: {first.detail}", file=sys.stderr)
    if options.save_result or options.save_detailed:
        _save(options, run)


def _save(options: BenchOptions, run: Run) -> None:
    rate = options.request_rate or float("inf")
    about: dict[str, Any] = {
        "backend": options.backend,
        "base_url": options.url,
        "model_id": run.model,
        "dataset": options.dataset_name,
        "num_prompts": len(run.outcomes),
        "seed": options.seed,
        "request_rate": str(rate) if rate == float("inf") else rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        **options.metadata,
    }
    result = json_result(
        run.metrics,
        run.outcomes,
        about=about,
        percentile_metrics=options.percentile_metrics,
        detailed=options.save_detailed,
    )
    name = options.result_filename or f"{options.backend}-{datetime.now():%Y%m%d-%H%M%S}.json"
    options.result_dir.mkdir(parents=True, exist_ok=True)
    path = options.result_dir / name
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    print(f"saved {path}", file=sys.stderr)
