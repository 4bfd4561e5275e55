"""The metrics of a gateway process, by what they speak of. Labels have fixed sets of values."""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from forebay_shared.errors import (
    AuthenticationError,
    DeadlineError,
    ForebayError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

ROUTES = (
    "chat_completions", "completions", "embeddings", "score", "rerank", "responses", "messages",
    "models", "files", "batches", "tokenize", "usage", "admin", "health", "ready", "version",
    "metrics", "other",
)  # fmt: skip

DropReason = Literal["unknown", "fenced", "duplicate", "bad"]
PickReason = Literal["only", "prefix", "load", "spread"]
PICK_REASONS: tuple[PickReason, ...] = ("only", "prefix", "load", "spread")
FallbackReason = Literal["missing", "overloaded", "context"]
ResubmitReason = Literal["worker_lost", "not_accepted", "gap", "bus_reset", "failed", "drained"]


class GatewayMetrics:
    """One gateway process: what it serves, and what befalls it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        make = _Maker(registry)
        self.http = HttpMetrics(make)
        self.jobs = JobMetrics(make)
        self.responses = ResponseMetrics(make)
        self.fleet = FleetMetrics(make)
        self.routing = RoutingMetrics(make)
        self.process = ProcessMetrics(make)


class _Maker:
    """Makes metrics in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self._registry)

    def histogram(self, name: str, text: str, *labels: str) -> Histogram:
        """Of seconds."""
        return Histogram(name, text, labels, registry=self._registry, buckets=_SECONDS)


class HttpMetrics:
    """Requests as clients make them, and the clients."""

    def __init__(self, make: _Maker) -> None:
        self._requests = make.counter(
            "forebay_http_requests", "HTTP requests answered.", "route", "status"
        )
        self._seconds = make.histogram(
            "forebay_http_request_seconds",
            "From the request's head to the last byte of its answer.",
            "route",
        )
        self._answers: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self.open_requests = make.gauge("forebay_open_requests", "HTTP requests that are open.")
        self.open_streams = make.gauge("forebay_open_streams", "Event streams that are open.")
        self.slow_clients = make.counter(
            "forebay_slow_clients", "Clients cut off since they did not read."
        )
        self._auth_refused = make.counter(
            "forebay_auth_refused",
            "Requests whose key or token opened nothing here, by the code of their error.",
            "reason",
        )

    def answered(self, route: str, status: int, seconds: float) -> None:
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

    def auth_refused(self, error: AuthenticationError | PermissionDeniedError) -> None:
        self._auth_refused.labels(reason=error.code).inc()


class JobMetrics:
    """Work for the engines, from what is turned away to what had to be made again."""

    def __init__(self, make: _Maker) -> None:
        self.open_generations = make.gauge(
            "forebay_open_generations", "Jobs placed or to be placed on a worker."
        )
        self.inbox_tokens = make.gauge(
            "forebay_inbox_tokens", "Token ids that wait for their client."
        )
        self.cancelled = make.counter("forebay_cancelled", "Jobs left before their end.")
        self.given_up = make.counter(
            "forebay_given_up", "Requests that ended a worker which ran nothing beside them."
        )
        self._embedded_inputs = make.counter(
            "forebay_embedded_inputs", "Inputs that became vectors."
        )
        self._embedded_tokens = make.counter("forebay_embedded_tokens", "Tokens of those inputs.")
        self._dropped = make.counter("forebay_dropped_replies", "Replies dropped.", "reason")
        self._fallbacks = make.counter(
            "forebay_alias_fallbacks",
            "Requests that went on to the next model of their alias, by reason.",
            "reason",
        )
        self._shed = make.counter(
            "forebay_shed",
            "Requests that were not served though they were sound, by the code of their error.",
            "reason",
        )
        self._resubmitted = make.counter(
            "forebay_resubmitted", "Attempts after a job's first.", "reason"
        )

    def embedded(self, inputs: int, tokens: int) -> None:
        """Counts the vectors of one request and the tokens that they took."""
        self._embedded_inputs.inc(inputs)
        self._embedded_tokens.inc(tokens)

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


class ResponseMetrics:
    """Responses that are kept, or run without their client."""

    def __init__(self, make: _Maker) -> None:
        self.background = make.gauge(
            "forebay_background_responses", "Responses that this process runs in the background."
        )
        self.evicted = make.counter(
            "forebay_responses_evicted",
            "Kept responses that went before their time, for want of room.",
        )


class FleetMetrics:
    """The other processes as this one sees them."""

    def __init__(self, make: _Maker) -> None:
        self.workers = make.gauge("forebay_workers", "Live workers.")
        self.loading_workers = make.gauge(
            "forebay_loading_workers", "Workers that say that they load their model."
        )
        self.workers_lost = make.counter(
            "forebay_workers_lost", "Workers whose lease lapsed or that left."
        )
        self.strays_cleared = make.counter(
            "forebay_strays_cleared", "Dead processes whose keys this gateway cleared away."
        )


class RoutingMetrics:
    """Which worker was picked, and what the gateway knows of the workers' caches for that."""

    def __init__(self, make: _Maker) -> None:
        picks = make.counter("forebay_router_picks", "Workers picked, by reason.", "reason")
        self._picks = {reason: picks.labels(reason=reason) for reason in PICK_REASONS}
        self.predicted_tokens = make.counter(
            "forebay_prefix_predicted_tokens",
            "Prompt tokens that the router took for cached on the worker that it picked.",
        )
        self.hit_tokens = make.counter(
            "forebay_prefix_hit_tokens", "Prompt tokens that were cached there."
        )
        self._index_bytes = make.gauge("forebay_prefix_index_bytes", "Memory of the prefix index.")
        self._index_blocks = make.gauge(
            "forebay_prefix_index_blocks", "Blocks in the prefix index."
        )
        self.index_refused = make.counter(
            "forebay_prefix_index_refused", "Blocks that the prefix index had no room for."
        )
        self.digest_queue = make.gauge(
            "forebay_digest_queue_bytes", "Digests that wait to be put into the index."
        )
        self.digest_lag = make.histogram(
            "forebay_digest_lag_seconds",
            "From a change in a worker's cache to the index, without the time on the network.",
        )
        self.digest_gaps = make.counter(
            "forebay_digest_gaps", "Times that a worker's digests were missed."
        )
        self.digest_snapshots = make.counter(
            "forebay_digest_snapshots", "Snapshots of a worker's prefix cache that were asked for."
        )

    def picked(self, reason: PickReason) -> None:
        self._picks[reason].inc()

    def index(self, nbytes: int, blocks: int) -> None:
        """Says how large the prefix index is now."""
        self._index_bytes.set(nbytes)
        self._index_blocks.set(blocks)


class ProcessMetrics:
    """The process itself, its clock and its connections to Redis."""

    def __init__(self, make: _Maker) -> None:
        self.loop_lag = make.histogram(
            "forebay_event_loop_lag_seconds", "How late a timer of the event loop fires."
        )
        self.unsent = make.gauge(
            "forebay_unsent_messages", "Messages to other processes that are not delivered yet."
        )
        self.redis_queue = make.gauge(
            "forebay_redis_queue", "Commands that wait to be sent to Redis."
        )
        self.redis_trip = make.histogram(
            "forebay_redis_round_trip_seconds",
            "How long Redis took to answer, as looked at once a second.",
        )
        self.reconnects = make.counter(
            "forebay_redis_reconnects", "Connections to Redis made again."
        )
        self.streams_lost = make.counter(
            "forebay_streams_lost", "Redis streams found gone or rolled back."
        )
        self.log_lines_lost = make.counter(
            "forebay_log_lines_lost", "Log lines that could not be written."
        )
        self.clock_leaps = make.counter(
            "forebay_clock_leaps", "Times that the process's wall clock has leapt."
        )
