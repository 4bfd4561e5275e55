"""A worker's metrics: its engine's, under the names that vLLM's dashboards know, and its own."""

from collections.abc import Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

from forebay_shared.telemetry.histogram import FastHistogram
from forebay_shared.wire import Load

_LATENCY_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_ITL_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_HOST_S = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1,
)  # fmt: skip
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

FINISHED_REASONS = ("stop", "length", "abort", "error")

RefuseReason = Literal["requests", "tokens", "team", "wait"]


class EngineMetrics:
    """A worker's engine, under the names, labels and buckets that vLLM's dashboards know.

    Implements the engine's Recorder. Methods are called from the engine's thread.
    """

    def __init__(
        self, registry: CollectorRegistry, *, model_name: str, engine: str, max_model_len: int
    ) -> None:
        self.registry = registry
        self._labels = {"model_name": model_name, "engine": engine}
        self._running = self._gauge("num_requests_running", "Sequences in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Sequences waiting for the batch.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "KV blocks in use, 1 is all of them.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens prefilled or found in cache.")
        self._generation = self._counter("generation_tokens", "Tokens generated.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in cache.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in cache.")
        self._step_failures = Counter(
            "forebay_step_failures",
            "Steps that failed, whose rows were tried one by one.",
            ["engine"],
            registry=registry,
        ).labels(engine=engine)
        self._step_host = FastHistogram(
            "forebay_step_host_seconds",
            "What a step took beside the model: choosing its rows, taking in what they gave.",
            {"engine": engine},
            _HOST_S,
        )
        registry.register(self._step_host)
        self._preemptions = self._counter("num_preemptions", "Sequences preempted.")
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens of one engine step.", _STEP_TOKENS
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From intake to the first token.", _TTFT_S
        )
        self._itl = self._histogram("inter_token_latency_seconds", "Between two tokens.", _ITL_S)
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From intake to the last token.", _LATENCY_S
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From intake to the first step.", _LATENCY_S
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _LATENCY_S
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _LATENCY_S
        )
        sizes = _one_two_five(max_model_len)
        self._prompt_size = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", sizes
        )
        self._generation_size = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", sizes
        )
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "The max_tokens that requests ask for.", sizes
        )
        success = Counter(
            "vllm:request_success",
            "Sequences that ended, by finish reason.",
            [*self._labels, "finished_reason"],
            registry=registry,
        )
        self._success = {
            reason: success.labels(**self._labels, finished_reason=reason)
            for reason in FINISHED_REASONS
        }

    def _gauge(self, name: str, text: str) -> Gauge:
        family = Gauge(f"vllm:{name}", text, [*self._labels], registry=self.registry)
        return family.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"vllm:{name}", text, [*self._labels], registry=self.registry)
        return family.labels(**self._labels)

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> FastHistogram:
        histogram = FastHistogram(f"vllm:{name}", text, self._labels, bounds)
        self.registry.register(histogram)
        return histogram

    def cache_config(self, **fields: str | float) -> None:
        """Publishes the cache's shape as labels of an info gauge, as vLLM does. Call it once."""
        texts = {name: str(value) for name, value in fields.items()}
        engine = self._labels["engine"]
        gauge = Gauge(
            "vllm:cache_config_info",
            "Configuration of the KV cache.",
            [*texts, "engine"],
            registry=self.registry,
        )
        gauge.labels(**texts, engine=engine).set(1)

    def load(self, load: Load) -> None:
        """Brings the gauges in line with the engine's state, also when it has come to rest."""
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._kv_usage.set(load.kv_usage)

    def step(
        self,
        *,
        prompt_tokens: int,
        generation_tokens: int,
        prefix_queries: int,
        prefix_hits: int,
        preemptions: int,
        host_s: float,
    ) -> None:
        if host_s:
            self._step_host.observe(host_s)
        self._step_tokens.observe(prompt_tokens + generation_tokens)
        for counter, value in (
            (self._prompt, prompt_tokens),
            (self._generation, generation_tokens),
            (self._queries, prefix_queries),
            (self._hits, prefix_hits),
            (self._preemptions, preemptions),
        ):
            if value:
                counter.inc(value)

    def step_failed(self) -> None:
        self._step_failures.inc()

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def finished(
        self,
        *,
        reason: str,
        e2e_s: float,
        queued_s: float,
        prefill_s: float,
        decode_s: float,
        prompt_tokens: int,
        generation_tokens: int,
        max_tokens: int,
    ) -> None:
        self._success.get(reason, self._success["error"]).inc()
        self._e2e.observe(e2e_s)
        self._queue.observe(queued_s)
        self._prefill.observe(prefill_s)
        self._decode.observe(decode_s)
        self._prompt_size.observe(prompt_tokens)
        self._generation_size.observe(generation_tokens)
        self._max_tokens.observe(max_tokens)


class WorkerMetrics:
    """A worker as a process: what befell it, beside what its engine does."""

    def __init__(self, registry: CollectorRegistry, *, engine: str) -> None:
        self.registry = registry
        self._engine = engine
        self.dead_letters = self._counter(
            "dead_letters", "Messages that could not be read or taken, each dropped once."
        )
        self.leases_lost = self._counter(
            "leases_lost", "Times that the worker found itself taken for dead."
        )
        self.fenced = self._counter(
            "fenced_requests", "Requests dropped then, since others do their work."
        )
        self.handed_over = self._counter(
            "handed_over_requests", "Requests given back to their gateways on leaving."
        )
        self.duplicates = self._counter(
            "duplicate_requests", "Requests that came again, and were left out."
        )
        self.gateways_lost = self._counter(
            "gateways_lost", "Gateways found gone while they had requests here."
        )
        self.overflows = self._counter(
            "reply_overflows",
            "Times that more waited for a gateway than is kept, so that its requests were ended.",
        )
        self.log_lines_lost = self._counter(
            "log_lines_lost", "Log lines that could not be written."
        )
        self.clock_leaps = self._counter(
            "clock_leaps", "Times that the process's wall clock has leapt."
        )
        self._refused = Counter(
            "forebay_refused_requests",
            "Requests that might not wait here, by the bound that they met.",
            ["engine", "reason"],
            registry=registry,
        )
        self.unsent = self._gauge(
            "unsent_messages", "Messages to other processes that are not delivered yet."
        )
        self.redis_queue = self._gauge("redis_queue", "Commands that wait to be sent to Redis.")
        self.metered = self._gauge(
            "metered_requests", "Requests that this worker settles if their gateway is gone."
        )
        self.step_age = self._gauge(
            "step_age_seconds", "Since the engine's loop last came round, while there is work."
        )

    def refused(self, reason: RefuseReason) -> None:
        self._refused.labels(engine=self._engine, reason=reason).inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        family = Gauge(f"forebay_{name}", text, ["engine"], registry=self.registry)
        return family.labels(engine=self._engine)

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"forebay_{name}", text, ["engine"], registry=self.registry)
        return family.labels(engine=self._engine)


def _one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … up to `limit`."""
    values: list[int] = []
    scale = 1
    while scale <= limit:
        values.extend(step * scale for step in (1, 2, 5) if step * scale <= limit)
        scale *= 10
    return values or [1]
