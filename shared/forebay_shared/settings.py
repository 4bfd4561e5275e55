"""Settings: one frozen dataclass per process; each field is a flag, a variable and a help text.

A field `max_num_seqs` is `--max-num-seqs` and `FOREBAY_MAX_NUM_SEQS`; the flag wins.
Secrets (`Secret`) are read from the environment or a flag and masked in every repr; a supervisor
hands them to its children through the environment only. A bad value stops the process with one line
that names the flag.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta


class StartError(Exception):
    """A process cannot start as asked: one line that names what is wrong and what would be right.

    The command line prints the line and exits with status 2; nobody restarts such a process.
    """


class Secret(str):
    """A string that never shows itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Secret('***')" if self else "Secret('')"


_NONE = Secret("")
_LOCAL_REDIS = Secret("redis://127.0.0.1:6379/0")


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """One gateway process."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on")] = 8000
    fd: Annotated[int, Meta(description="listen on this inherited socket instead")] = -1
    redis_url: Annotated[
        Secret,
        Meta(description="redis://, rediss://, unix://, redis-sentinel:// or redis-cluster:// URL"),
    ] = _LOCAL_REDIS
    api_key: Annotated[
        tuple[Secret, ...], Meta(description="bearer key that clients must send; repeatable")
    ] = ()
    admin_key: Annotated[
        Secret, Meta(description="bearer key that rules /admin/v1: teams, keys and limits")
    ] = _NONE
    teams: Annotated[
        bool, Meta(description="never be open: without any configured key, ask for a team's")
    ] = False
    key_pepper: Annotated[
        Secret,
        Meta(description="secret that keys of teams are hashed with; default: one kept in Redis"),
    ] = _NONE
    trusted_proxy: Annotated[
        tuple[str, ...],
        Meta(description="address or network whose X-Forwarded-For is believed; repeatable"),
    ] = ()
    alias: Annotated[
        tuple[str, ...],
        Meta(
            description="public name for a served model, as name=model; repeatable",
            extra={"names": True},
        ),
    ] = ()
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body")] = 8_388_608
    max_concurrent_requests: Annotated[
        int, Meta(ge=1, description="requests open at once in this process; more get a 503")
    ] = 4096
    queue_timeout_s: Annotated[
        float,
        Meta(gt=0, description="longest wait for a first step in a worker, in seconds"),
    ] = 120.0
    slow_client_timeout_s: Annotated[
        float, Meta(gt=0, description="a client that does not read for so long is cut off")
    ] = 30.0
    stream_keep_alive: Annotated[
        Literal["comment", "event"],
        Meta(description="what a stream says that is silent for 15 seconds"),
    ] = "comment"
    prefix_index_bytes: Annotated[
        int, Meta(ge=0, description="memory for what the workers' prefix caches hold, in bytes")
    ] = 268_435_456
    drain_timeout_s: Annotated[
        float, Meta(ge=0, description="after SIGTERM, seconds for open streams to finish")
    ] = 30.0
    protect_metrics: Annotated[bool, Meta(description="ask for a key on /metrics too")] = False
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(description="origin that browsers may call from, * for any; repeatable"),
    ] = ()
    usage_export: Annotated[
        tuple[Secret, ...],
        Meta(description="directory or database URL that usage records are copied to; repeatable"),
    ] = ()
    usage_export_format: Annotated[
        Literal["jsonl", "csv"], Meta(description="form of the files in such a directory")
    ] = "jsonl"
    response_ttl_s: Annotated[
        int, Meta(ge=0, description="seconds that a response is kept for later; 0: none is kept")
    ] = 604_800
    response_store_bytes: Annotated[
        int, Meta(ge=65_536, description="bytes of kept responses per team; the oldest go first")
    ] = 67_108_864
    max_background_responses: Annotated[
        int, Meta(ge=1, description="background responses at once, per process and per team")
    ] = 64
    tool_call_parser: Annotated[
        str, Meta(description="form of the model's tool calls; auto: by its chat template")
    ] = "auto"
    reasoning_parser: Annotated[
        str, Meta(description="form of the model's thinking, or none; auto: by its chat template")
    ] = "auto"
    trust_request_chat_template: Annotated[
        bool, Meta(description="let chat requests bring their own chat_template")
    ] = False
    otlp_traces_endpoint: Annotated[
        str, Meta(description="send traces to this OpenTelemetry collector, as http://host:4318")
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least level that is logged")
    ] = "info"


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """One worker process."""

    model: Annotated[
        str, Meta(description="local directory, .gguf file or hub id; default: the demo model")
    ] = ""
    engine: Annotated[
        str, Meta(description="kind of engine: native, http, vllm, echo or a plug-in's name")
    ] = "native"
    redis_url: Annotated[
        Secret,
        Meta(description="redis://, rediss://, unix://, redis-sentinel:// or redis-cluster:// URL"),
    ] = _LOCAL_REDIS
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        Meta(description="generate text or make embeddings; auto: what the model was made for"),
    ] = "auto"
    matryoshka: Annotated[
        bool, Meta(description="let requests cut vectors: for models trained so that do not say it")
    ] = False
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(description="public name of the model; repeatable", extra={"names": True}),
    ] = ()
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="where the model runs")] = (
        "auto"
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="type of weights and activations; auto: bfloat16 on CUDA, float32 on CPU"),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "fp8"],
        Meta(description="type of the layers' weights; auto: as the checkpoint has them"),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(description="type of keys and values; auto: as the checkpoint says, else as --dtype"),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"], Meta(description="dummy: random weights, for benchmarks")
    ] = "auto"
    max_model_len: Annotated[
        int, Meta(ge=0, description="context window in tokens; 0: the model's own")
    ] = 0
    max_num_seqs: Annotated[int, Meta(ge=1, description="sequences in a batch at most")] = 256
    max_num_batched_tokens: Annotated[
        int, Meta(ge=0, description="token budget of one step; 0: 8192 on CUDA, 256 on CPU")
    ] = 0
    max_num_prefill_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="prompt tokens of a step in which others decode or that is for teams, at "
            "most; 0: 2048 on CUDA, 64 on CPU",
        ),
    ] = 0
    max_num_queued_reqs: Annotated[
        int, Meta(ge=1, description="requests waiting in the worker; more are refused with a 503")
    ] = 1024
    max_num_queued_tokens: Annotated[
        int, Meta(ge=1, description="prompt tokens waiting in the worker; more are refused")
    ] = 2_097_152
    team_queue_share: Annotated[
        float,
        Meta(gt=0, le=1, description="a team's share of what others leave of both; else a 429"),
    ] = 0.5
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="share of the card's memory to use")
    ] = 0.92
    kv_cache_memory_bytes: Annotated[
        int, Meta(ge=0, description="size of the KV cache; 0: sized for you")
    ] = 0
    block_size: Annotated[
        int, Meta(ge=0, le=256, description="tokens per KV block; 0: 64 on CUDA, 16 on CPU")
    ] = 0
    enable_prefix_caching: Annotated[
        bool, Meta(description="keep and reuse the KV blocks of earlier prompts")
    ] = True
    debug_poison_freed_blocks: Annotated[
        bool, Meta(description="fill free KV blocks with NaN: what reads there fails its request")
    ] = False
    seed: Annotated[int, Meta(ge=0, description="seed of dummy weights")] = 0
    enable_lora: Annotated[bool, Meta(description="serve LoRA adapters over the model")] = False
    lora_modules: Annotated[
        tuple[str, ...],
        Meta(
            description="adapters, each as name=path: a PEFT directory; several, or repeatable",
            extra={"many": True, "names": True},
        ),
    ] = ()
    max_lora_rank: Annotated[int, Meta(ge=1, le=512, description="rank of an adapter at most")] = 16
    chat_template: Annotated[
        str, Meta(description="file with a Jinja chat template instead of the model's")
    ] = ""
    generation_config: Annotated[
        str,
        Meta(description="defaults of sampling: auto, the model's; none; or a file or directory"),
    ] = "auto"
    override_generation_config: Annotated[
        str, Meta(description='JSON of such defaults, over all others: {"temperature": 0.6}')
    ] = ""
    echo_delay_ms: Annotated[
        float, Meta(ge=0, description="echo engine: time per step in milliseconds")
    ] = 0.0
    echo_prefill_rate: Annotated[
        float, Meta(ge=0, description="echo engine: prompt tokens per second; 0: no time at all")
    ] = 0.0
    echo_cache_blocks: Annotated[
        int, Meta(ge=0, description="echo engine: blocks of its prefix cache; 0: none")
    ] = 0
    engine_args: Annotated[
        str, Meta(description="vllm engine: more of its arguments, as a JSON object by their names")
    ] = ""
    upstream_url: Annotated[
        tuple[str, ...],
        Meta(
            description="http engine: base URL of an OpenAI API, as http://host:8000/v1; "
            "repeatable, for replicas"
        ),
    ] = ()
    upstream_model: Annotated[
        str, Meta(description="http engine: the model's name there; default: the only one it lists")
    ] = ""
    upstream_key_file: Annotated[
        str, Meta(description="http engine: file that holds the upstream's key")
    ] = ""
    upstream_kind: Annotated[
        Literal["auto", "compatible", "openai", "vllm", "sglang", "llama-cpp", "ollama", "forebay"],
        Meta(description="http engine: which parameters it takes; auto: by what it says of itself"),
    ] = "auto"
    upstream_connect_timeout_s: Annotated[
        float, Meta(gt=0, description="http engine: longest wait for a connection, in seconds")
    ] = 5.0
    upstream_first_token_timeout_s: Annotated[
        float, Meta(gt=0, description="http engine: longest wait for a first token, in seconds")
    ] = 120.0
    upstream_idle_timeout_s: Annotated[
        float, Meta(gt=0, description="http engine: longest wait between tokens, in seconds")
    ] = 60.0
    step_timeout_s: Annotated[
        float,
        Meta(gt=0, description="an engine whose step takes longer hangs: its worker ends"),
    ] = 300.0
    drain_timeout_s: Annotated[
        float,
        Meta(ge=0, description="after SIGTERM, seconds for running sequences to finish here"),
    ] = 30.0
    otlp_traces_endpoint: Annotated[
        str, Meta(description="send traces to this OpenTelemetry collector, as http://host:4318")
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least level that is logged")
    ] = "info"


@dataclass(frozen=True, kw_only=True)
class ServeSettings(WorkerSettings, GatewaySettings):
    """The embedded default: Redis, gateways and a worker, or two, supervised as one.

    It has all that a gateway and a worker have; here stands what is its own, or other by default.
    """

    embedding_model: Annotated[
        str,
        Meta(description="serve this model's embeddings too: minilm, a directory or a hub id"),
    ] = ""
    embedding_served_model_name: Annotated[
        tuple[str, ...],
        Meta(description="public name of the embedding model; repeatable", extra={"names": True}),
    ] = ()
    gateways: Annotated[int, Meta(ge=1, le=64, description="gateway processes")] = 1
    redis_url: Annotated[
        Secret, Meta(description="use this Redis; default: start a private one")
    ] = _NONE
    admin_key: Annotated[
        Secret, Meta(description="bearer key that rules /admin/v1; default: one made for you")
    ] = _NONE
    drain_timeout_s: Annotated[
        float, Meta(ge=0, description="after Ctrl-C or SIGTERM, seconds for open streams to finish")
    ] = 1.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least level that is logged")
    ] = "warning"
    data_dir: Annotated[
        str, Meta(description="where Redis and the key live; default: the user's data home")
    ] = ""
