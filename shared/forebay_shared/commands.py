"""The sub-commands of `forebay` that run processes: what each takes and which function runs it.

They are declared here, beside the settings, so that help and flags are shown without importing
torch or a web server; a distribution offers those that it can run through the entry-point group
`forebay.commands`.
"""

import argparse
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from forebay_shared import flags
from forebay_shared.settings import GatewaySettings, ServeSettings, WorkerSettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Command:
    """One sub-command. `run` is `module:function`, taking the settings and returning a status."""

    name: str
    summary: str
    settings: "type[DataclassInstance]"
    run: str
    positional: str = ""
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    hidden: Sequence[str] = ()
    examples: Sequence[str] = ()

    def __call__(self, arguments: list[str]) -> int:
        """Runs the command. Raises StartError when it cannot start as asked."""
        settings = self.parse(arguments, os.environ)
        return _function(self.run)(settings)

    def parse(
        self, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> "DataclassInstance":
        model = f"[{self.positional.upper()}] " if self.positional else ""
        parser = flags.Parser(
            prog=f"forebay {self.name}",
            usage=f"forebay {self.name} {model}[flags]",
            description=self.summary + ".",
            epilog="\n".join(
                ["examples:", *(f"  {line}" for line in self.examples), "", _VARIABLES]
            ),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        flags.add_flags(
            parser,
            self.settings,
            self.groups,
            positional=self.positional,
            hidden=self.hidden,
        )
        return flags.parse(
            self.settings, arguments, environment, parser=parser, positional=self.positional
        )


@dataclass(frozen=True)
class Tool:
    """A sub-command with flags of its own. `run` is `module:function`, taking the arguments."""

    name: str
    summary: str
    run: str

    def __call__(self, arguments: list[str]) -> int:
        return _function(self.run)(arguments)


def _function(place: str) -> Callable[[Any], int]:
    module, _, name = place.partition(":")
    return cast("Callable[[Any], int]", getattr(importlib.import_module(module), name))


_VARIABLES = "Every flag --some-flag is also the variable FOREBAY_SOME_FLAG; the flag wins."

_MODEL = (
    "runner",
    "matryoshka",
    "served_model_name",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "device",
    "max_model_len",
    "enable_lora",
    "lora_modules",
    "max_lora_rank",
    "chat_template",
    "generation_config",
    "override_generation_config",
    "load_format",
)
_ENGINE = (
    "engine",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_prefill_tokens",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "team_queue_share",
    "enable_prefix_caching",
    "block_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "debug_poison_freed_blocks",
    "seed",
    "engine_args",
    "step_timeout_s",
)
_ECHO = ("echo_delay_ms", "echo_prefill_rate", "echo_cache_blocks")
_UPSTREAM = (
    "upstream_url",
    "upstream_model",
    "upstream_key_file",
    "upstream_kind",
    "upstream_connect_timeout_s",
    "upstream_first_token_timeout_s",
    "upstream_idle_timeout_s",
)
_EMBEDDING = ("embedding_model", "embedding_served_model_name")
_HTTP = (
    "host",
    "port",
    "api_key",
    "gateways",
    "max_body_bytes",
    "max_concurrent_requests",
    "queue_timeout_s",
    "slow_client_timeout_s",
    "stream_keep_alive",
    "protect_metrics",
    "allowed_origins",
    "trusted_proxy",
)
_TEAMS = (
    "teams",
    "admin_key",
    "key_pepper",
    "alias",
    "usage_export",
    "usage_export_format",
)
_ANSWERS = (
    "tool_call_parser",
    "reasoning_parser",
    "trust_request_chat_template",
    "response_ttl_s",
    "response_store_bytes",
    "max_background_responses",
)

SERVE = Command(
    name="serve",
    summary="Serve a model on the OpenAI API: a private Redis, gateways and one worker as one",
    settings=ServeSettings,
    run="forebay_shared.serve:run",
    positional="model",
    groups={
        "HTTP": _HTTP,
        "model": _MODEL,
        "embeddings": _EMBEDDING,
        "engine": _ENGINE,
        "answers": _ANSWERS,
        "teams": _TEAMS,
        "upstream": _UPSTREAM,
        "echo": _ECHO,
    },
    hidden=("fd",),
    examples=(
        "forebay serve                                   the demo model, on port 8000",
        "forebay serve Qwen/Qwen3-0.6B --port 9000       a model of the hub",
        "forebay serve ./my-model --api-key sk-mine --gateways 2",
        "forebay serve model.Q4_K_M.gguf --max-model-len 4k",
        "forebay serve --embedding-model minilm          chat and embeddings, two workers",
        "forebay serve --engine http --upstream-url http://llm:8000/v1    another server's model",
    ),
)
GATEWAY = Command(
    name="gateway",
    summary="Run one gateway process: HTTP on one side, Redis on the other",
    settings=GatewaySettings,
    run="forebay_gateway.main:run",
    groups={"HTTP": _HTTP, "answers": _ANSWERS, "teams": _TEAMS},
    hidden=("fd",),
    examples=("forebay gateway --redis-url redis://redis:6379/0 --host 0.0.0.0 --api-key sk-mine",),
)
WORKER = Command(
    name="worker",
    summary="Run one engine worker, which takes its work from Redis",
    settings=WorkerSettings,
    run="forebay_worker.main:run",
    positional="model",
    groups={"model": _MODEL, "engine": _ENGINE, "upstream": _UPSTREAM, "echo": _ECHO},
    examples=(
        "forebay worker Qwen/Qwen3-0.6B --redis-url redis://redis:6379/0",
        "forebay worker --engine http --upstream-url http://llm:8000/v1",
    ),
)
ADMIN = Tool(
    name="admin",
    summary="Teams, keys, limits, usage: forebay admin --help",
    run="forebay_gateway.admin.main:main",
)
BENCH = Tool(
    name="bench",
    summary="Measure a server: forebay bench serve",
    run="forebay_gateway.bench.main:main",
)
