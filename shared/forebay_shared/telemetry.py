"""Every metric, once: names, labels and buckets.

Metrics live in a registry of their process that is passed in, never in a global one. It knows
nothing of Redis, HTTP servers or engines. No label ever carries a team, a key or a text.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from forebay_shared.errors import (
    DeadlineError,
    ForebayError,
    OverloadedError,
    RateLimitError,
)
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
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_HTTP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

FINISHED_REASONS = ("stop", "length", "abort", "error")

ROUTES = (
    "chat_completions", "completions", "embeddings", "score", "rerank", "responses", "messages",
    "models", "files", "batches", "tokenize", "usage", "admin", "health", "ready", "version",
    "metrics", "other",
)  # fmt: skip

DropReason = Literal["unknown", "fenced", "duplicate", "bad"]
PickReason = Literal["only", "prefix", "load", "spread"]
PICK_REASONS: tuple[PickReason, ...] = ("only", "prefix", "load", "spread")
FallbackReason = Literal["missing", "overloaded", "context"]
RefuseReason = Literal["requests", "tokens", "team", "wait"]
TripReason = Literal["unreachable", "timeout", "status", "answer"]
TRIP_REASONS: tuple[TripReason, ...] = ("unreachable", "timeout", "status", "answer")
ProbeResult = Literal["ok", "refused", "failed"]
PROBE_RESULTS: tuple[ProbeResult, ...] = ("ok", "refused", "failed")
ResubmitReason = Literal["worker_lost", "not_accepted", "gap", "bus_reset", "failed", "drained"]


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

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> "_Histogram":
        histogram = _Histogram(f"vllm:{name}", text, self._labels, bounds)
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
        self._refused = Counter(
            "forebay_refused_requests",
            "Requests that might not wait here, by the bound that they met.",
            ["engine", "reason"],
            registry=registry,
        )
        self.step_age = Gauge(
            "forebay_step_age_seconds",
            "Since the engine's loop last came round, while there is work.",
            ["engine"],
            registry=registry,
        ).labels(engine=engine)

    def refused(self, reason: RefuseReason) -> None:
        self._refused.labels(engine=self._engine, reason=reason).inc()

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"forebay_{name}", text, ["engine"], registry=self.registry)
        return family.labels(engine=self._engine)


class Replica(Protocol):
    """What a replica of an upstream keeps of itself: so many trips and probes so far."""

    @property
    def open(self) -> int: ...
    @property
    def up(self) -> bool: ...
    @property
    def trips(self) -> Mapping[TripReason, int]: ...
    @property
    def probes(self) -> Mapping[ProbeResult, int]: ...

    def is_aside(self, now: float) -> bool: ...


class UpstreamMetrics(Collector):
    """The replicas of an upstream as they are when somebody looks, each by its number among the
    flags that name them, from 0: a URL would be a label that tells of hosts."""

    def __init__(
        self, engine: str, replicas: Sequence[Replica], clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._replicas = replicas
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        names = ["engine", "replica"]
        up = GaugeMetricFamily(
            "forebay_upstream_up", "The replica answered the last probe.", labels=names
        )
        calls = GaugeMetricFamily(
            "forebay_upstream_open_calls", "Calls of the replica that are open.", labels=names
        )
        aside = GaugeMetricFamily(
            "forebay_upstream_aside",
            "The replica is set aside: it gets calls only while no other can.",
            labels=names,
        )
        trips = CounterMetricFamily(
            "forebay_upstream_trips",
            "Times that the replica was set aside, by the failure that did it.",
            labels=[*names, "reason"],
        )
        probes = CounterMetricFamily(
            "forebay_upstream_probes",
            "Times that the replica was asked for its models, by what came.",
            labels=[*names, "result"],
        )
        now = self._clock()
        for number, replica in enumerate(self._replicas):
            labels = [self._engine, str(number)]
            up.add_metric(labels, float(replica.up))
            calls.add_metric(labels, replica.open)
            aside.add_metric(labels, float(replica.is_aside(now)))
            for reason, count in replica.trips.items():
                trips.add_metric([*labels, reason], count)
            for result, count in replica.probes.items():
                probes.add_metric([*labels, result], count)
        return [up, calls, aside, trips, probes]


class _Histogram(Collector):
    """A histogram that one thread fills and others may read.

    The library's own takes two locks and walks the buckets: 1.1 us of processor time for each value
    against 0.25 us here (Python 3.11), and there is a value for every token.
    """

    def __init__(
        self, name: str, text: str, labels: dict[str, str], bounds: Sequence[float]
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        names = [*map(str, self._bounds), "+Inf"]
        totals = accumulate(list(self._counts))
        buckets = list(zip(names, map(float, totals), strict=True))
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        return [family]


class GatewayMetrics:
    """One gateway process. Every label has a fixed set of values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._requests = Counter(
            "forebay_http_requests",
            "HTTP requests answered.",
            ["route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "forebay_http_request_seconds",
            "From the request's head to the last byte of its answer.",
            ["route"],
            registry=registry,
            buckets=_HTTP_S,
        )
        self._answers: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self.open_requests = Gauge(
            "forebay_open_requests", "HTTP requests that are open.", registry=registry
        )
        self.open_streams = Gauge(
            "forebay_open_streams", "Event streams that are open.", registry=registry
        )
        self.open_generations = Gauge(
            "forebay_open_generations",
            "Jobs placed or to be placed on a worker.",
            registry=registry,
        )
        self.inbox_tokens = Gauge(
            "forebay_inbox_tokens", "Token ids that wait for their client.", registry=registry
        )
        self.background_responses = Gauge(
            "forebay_background_responses",
            "Responses that this process runs in the background.",
            registry=registry,
        )
        self.responses_evicted = Counter(
            "forebay_responses_evicted",
            "Kept responses that went before their time, for want of room.",
            registry=registry,
        )
        self.workers = Gauge("forebay_workers", "Live workers.", registry=registry)
        self.loop_lag = Histogram(
            "forebay_event_loop_lag_seconds",
            "How late a timer of the event loop fires.",
            registry=registry,
            buckets=_HTTP_S,
        )
        self.reconnects = Counter(
            "forebay_redis_reconnects", "Connections to Redis made again.", registry=registry
        )
        self.streams_lost = Counter(
            "forebay_streams_lost", "Redis streams found gone or rolled back.", registry=registry
        )
        self.slow_clients = Counter(
            "forebay_slow_clients", "Clients cut off since they did not read.", registry=registry
        )
        self.cancelled = Counter(
            "forebay_cancelled", "Jobs left before their end.", registry=registry
        )
        self.workers_lost = Counter(
            "forebay_workers_lost", "Workers whose lease lapsed or that left.", registry=registry
        )
        self._embedded_inputs = Counter(
            "forebay_embedded_inputs", "Inputs that became vectors.", registry=registry
        )
        self._embedded_tokens = Counter(
            "forebay_embedded_tokens", "Tokens of those inputs.", registry=registry
        )
        self._dropped = Counter(
            "forebay_dropped_replies", "Replies dropped.", ["reason"], registry=registry
        )
        picks = Counter(
            "forebay_router_picks", "Workers picked, by reason.", ["reason"], registry=registry
        )
        self._picks = {reason: picks.labels(reason=reason) for reason in PICK_REASONS}
        self.predicted_tokens = Counter(
            "forebay_prefix_predicted_tokens",
            "Prompt tokens that the router took for cached on the worker that it picked.",
            registry=registry,
        )
        self.hit_tokens = Counter(
            "forebay_prefix_hit_tokens",
            "Prompt tokens that were cached there.",
            registry=registry,
        )
        self._index_bytes = Gauge(
            "forebay_prefix_index_bytes", "Memory of the prefix index.", registry=registry
        )
        self._index_blocks = Gauge(
            "forebay_prefix_index_blocks", "Blocks in the prefix index.", registry=registry
        )
        self.index_refused = Counter(
            "forebay_prefix_index_refused",
            "Blocks that the prefix index had no room for.",
            registry=registry,
        )
        self.digest_lag = Histogram(
            "forebay_digest_lag_seconds",
            "From a change in a worker's cache to the index, without the time on the network.",
            registry=registry,
            buckets=_HTTP_S,
        )
        self.digest_gaps = Counter(
            "forebay_digest_gaps", "Times that a worker's digests were missed.", registry=registry
        )
        self.strays_cleared = Counter(
            "forebay_strays_cleared",
            "Dead processes whose keys this gateway cleared away.",
            registry=registry,
        )
        self._fallbacks = Counter(
            "forebay_alias_fallbacks",
            "Requests that went on to the next model of their alias, by reason.",
            ["reason"],
            registry=registry,
        )
        self._shed = Counter(
            "forebay_shed",
            "Requests that were not served though they were sound, by the code of their error.",
            ["reason"],
            registry=registry,
        )
        self._resubmitted = Counter(
            "forebay_resubmitted", "Attempts after a job's first.", ["reason"], registry=registry
        )

    def http_request(self, route: str, status: int, seconds: float) -> None:
        """Counts an answered request. A route outside ROUTES counts as "other"."""
        name = route if route in ROUTES else "other"
        answers = (name, status // 100)
        if answers not in self._answers:  # `labels` costs 3 us for each value that it looks up
            self._answers[answers] = (
                self._requests.labels(route=name, status=f"{status // 100}xx"),
                self._seconds.labels(route=name),
            )
        count, duration = self._answers[answers]
        count.inc()
        duration.observe(seconds)

    def embedded(self, inputs: int, tokens: int) -> None:
        """Counts the vectors of one request and the tokens that they took."""
        self._embedded_inputs.inc(inputs)
        self._embedded_tokens.inc(tokens)

    def picked(self, reason: PickReason) -> None:
        self._picks[reason].inc()

    def prefix_index(self, nbytes: int, blocks: int) -> None:
        self._index_bytes.set(nbytes)
        self._index_blocks.set(blocks)

    def dropped(self, reason: DropReason, count: int = 1) -> None:
        self._dropped.labels(reason=reason).inc(count)

    def fell_back(self, reason: FallbackReason) -> None:
        self._fallbacks.labels(reason=reason).inc()

    def shed(self, error: ForebayError) -> None:
        """Counts what load or a fault has turned away; other errors are the client's own."""
        if isinstance(error, OverloadedError | RateLimitError | DeadlineError):
            self._shed.labels(reason=error.code).inc()

    def resubmitted(self, reason: ResubmitReason) -> None:
        self._resubmitted.labels(reason=reason).inc()


def _one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … up to `limit`."""
    values: list[int] = []
    scale = 1
    while scale <= limit:
        values.extend(step * scale for step in (1, 2, 5) if step * scale <= limit)
        scale *= 10
    return values or [1]
