"""An engine's metrics, under the names that vLLM's dashboards know."""

from collections.abc import Sequence

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


class EngineMetrics:
    """A worker's engine, under the names, labels and buckets that vLLM's dashboards know.

    Implements the engine's Recorder. Methods are called from the engine's thread.
    """

    def __init__(
        self, registry: CollectorRegistry, *, model_name: str, engine: str, max_model_len: int
    ) -> None:
        self.registry = registry
        self._engine = engine
        make = _Vllm(registry, {"model_name": model_name, "engine": engine})
        self._running = make.gauge("num_requests_running", "Sequences in the running batch.")
        self._waiting = make.gauge("num_requests_waiting", "Sequences waiting for the batch.")
        self._kv_usage = make.gauge("kv_cache_usage_perc", "KV blocks in use, 1 is all of them.")
        self._prompt = make.counter("prompt_tokens", "Prompt tokens prefilled or found in cache.")
        self._generation = make.counter("generation_tokens", "Tokens generated.")
        self._queries = make.counter("prefix_cache_queries", "Prompt tokens looked up in cache.")
        self._hits = make.counter("prefix_cache_hits", "Prompt tokens found in cache.")
        self._preemptions = make.counter("num_preemptions", "Sequences preempted.")
        self._step_tokens = make.histogram(
            "iteration_tokens_total", "Tokens of one engine step.", _STEP_TOKENS
        )
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
        self._sequences = _Sequences(make, max_model_len)

    def cache_config(self, **fields: str | float) -> None:
        """Publishes the cache's shape as labels of an info gauge, as vLLM does. Call it once."""
        texts = {name: str(value) for name, value in fields.items()}
        gauge = Gauge(
            "vllm:cache_config_info",
            "Configuration of the KV cache.",
            [*texts, "engine"],
            registry=self.registry,
        )
        gauge.labels(**texts, engine=self._engine).set(1)

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
        self._sequences.ttft.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        self._sequences.itl.observe(seconds)

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
        took = self._sequences
        took.success.get(reason, took.success["error"]).inc()
        took.e2e.observe(e2e_s)
        took.queue.observe(queued_s)
        took.prefill.observe(prefill_s)
        took.decode.observe(decode_s)
        took.prompt_size.observe(prompt_tokens)
        took.generation_size.observe(generation_tokens)
        took.max_tokens.observe(max_tokens)


class _Vllm:
    """Makes metrics under vLLM's names, each with the labels of one engine."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._registry = registry
        self._labels = labels

    def gauge(self, name: str, text: str) -> Gauge:
        family = Gauge(f"vllm:{name}", text, [*self._labels], registry=self._registry)
        return family.labels(**self._labels)

    def counter(self, name: str, text: str) -> Counter:
        family = Counter(f"vllm:{name}", text, [*self._labels], registry=self._registry)
        return family.labels(**self._labels)

    def counters(
        self, name: str, text: str, label: str, values: Sequence[str]
    ) -> dict[str, Counter]:
        """One for each value of a further label."""
        names = [*self._labels, label]
        family = Counter(f"vllm:{name}", text, names, registry=self._registry)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}

    def histogram(self, name: str, text: str, bounds: Sequence[float]) -> FastHistogram:
        histogram = FastHistogram(f"vllm:{name}", text, self._labels, bounds)
        self._registry.register(histogram)
        return histogram


class _Sequences:
    """What sequences took: the times in seconds, the sizes in tokens."""

    def __init__(self, make: _Vllm, max_model_len: int) -> None:
        self.ttft = make.histogram(
            "time_to_first_token_seconds", "From intake to the first token.", _TTFT_S
        )
        self.itl = make.histogram("inter_token_latency_seconds", "Between two tokens.", _ITL_S)
        self.e2e = make.histogram(
            "e2e_request_latency_seconds", "From intake to the last token.", _LATENCY_S
        )
        self.queue = make.histogram(
            "request_queue_time_seconds", "From intake to the first step.", _LATENCY_S
        )
        self.prefill = make.histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _LATENCY_S
        )
        self.decode = make.histogram(
            "request_decode_time_seconds", "From the first token to the last.", _LATENCY_S
        )
        sizes = _one_two_five(max_model_len)
        self.prompt_size = make.histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", sizes
        )
        self.generation_size = make.histogram(
            "request_generation_tokens", "Tokens generated for a request.", sizes
        )
        self.max_tokens = make.histogram(
            "request_params_max_tokens", "The max_tokens that requests ask for.", sizes
        )
        self.success = make.counters(
            "request_success",
            "Sequences that ended, by finish reason.",
            "finished_reason",
            FINISHED_REASONS,
        )


def _one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … up to `limit`."""
    values: list[int] = []
    scale = 1
    while scale <= limit:
        values.extend(step * scale for step in (1, 2, 5) if step * scale <= limit)
        scale *= 10
    return values or [1]
