"""VllmEngine: vLLM's AsyncLLM in this process, behind the Engine protocol: ids in, ids out.

vLLM batches, caches and samples; text, templates and limits stay where they are with every engine.
Every sequence is a request of vLLM's own. What its prefix cache holds is told under our hashes
(`vllm_events`). vLLM is imported when the engine is made, and only then.
"""

import asyncio
import logging
import os
import tempfile
from contextlib import aclosing, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from forebay_shared.errors import (
    EngineError,
    ForebayError,
    InvalidRequestError,
    WorkerLostError,
)
from forebay_shared.models import (
    CAP_ADAPTERS,
    CAP_DIGESTS,
    CAP_GENERATE,
    CAP_GRAMMAR,
    CAP_LOGIT_BIAS,
    CAP_LOGPROBS,
    CAP_PENALTIES,
    CAP_RESUME,
    ModelCard,
)
from forebay_shared.settings import StartError, WorkerSettings
from forebay_shared.wire import Delta, FinishReason, Submit, Usage, unpack_ids

from forebay_worker.checkpoint import resolve
from forebay_worker.engine.intake import checked_ids, checked_prompt
from forebay_worker.engines.adapters import adapter_paths, check_names, described
from forebay_worker.engines.base import CacheLog
from forebay_worker.engines.card import ModelFiles
from forebay_worker.engines.lives import Ending, Life
from forebay_worker.engines.naming import names_of
from forebay_worker.engines.tasks import TaskEngine
from forebay_worker.engines.vllm_events import CacheEvents, listen
from forebay_worker.engines.vllm_sampling import (
    ADAPTER,
    Terms,
    logprobs_of,
    sampling_params,
    terms_of,
)

log = logging.getLogger(__name__)

CHECK_S = 0.5
"""How often vLLM is asked whether it lives."""
STOP_S = 4.0
_CAPABILITIES = frozenset(
    {CAP_GENERATE, CAP_LOGPROBS, CAP_PENALTIES, CAP_LOGIT_BIAS, CAP_GRAMMAR, CAP_RESUME}
)


class VllmEngine(TaskEngine):
    """Loads the model when made. Raises StartError when it cannot be used as asked."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        try:
            self._library: Any = import_module("vllm")
        except ImportError as error:
            raise StartError(
                "--engine vllm: the package vllm cannot be imported here: "
                f"pip install 'forebay-worker[vllm]' ({error.name})"
            ) from None
        self._paths = adapter_paths(settings)
        check_names(self._paths, names_of(settings))
        self._adapters = described(self._paths)
        self._requests: dict[str, Any] = {}
        """What vLLM is told of each adapter, by its name."""
        self._refused = ""
        """Why an adapter cannot be served."""
        directory = resolve(settings.model)
        self._files = ModelFiles(directory, settings)
        self._directory = tempfile.TemporaryDirectory(prefix="fb-vllm-", ignore_cleanup_errors=True)
        self._endpoint = f"ipc://{Path(self._directory.name) / 'events'}"
        self._cache_log = CacheLog() if settings.enable_prefix_caching else None
        try:
            self._config: Any = self._arguments(str(directory)).create_engine_config()
        except (ValueError, RuntimeError) as error:
            raise StartError(f"--engine vllm: {_one_line(error)}") from None
        self._llm: Any = None
        self._card, self._blobs = self._make_card()
        self._limit = self._card.max_model_len
        try:
            self.launch()
        finally:
            if self._refused:
                raise StartError(self._refused) from None

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def blobs(self) -> dict[str, bytes]:
        return self._blobs

    @property
    def cache_log(self) -> CacheLog | None:
        return self._cache_log

    def submit(self, submit: Submit) -> None:
        try:
            terms = self._terms(submit)
        except ForebayError as error:
            self.refuse(submit, error)
            return
        counts = {start.index: len(unpack_ids(start.emitted)) for start in submit.starts}
        self.open(submit, counts, partial(self._generate, terms))

    async def serve(self, stopping: asyncio.Event) -> None:
        """Loads the model, then watches it. Raises EngineError when vLLM is lost."""
        events: asyncio.Task[None] | None = None
        if self._cache_log is not None:
            revisions = {adapter.name: adapter.revision for adapter in self._adapters}
            cache = CacheEvents(self._cache_log, self._card.revision, revisions)
            events = asyncio.create_task(listen(self._endpoint, cache), name="vllm.events")
            await asyncio.sleep(0)  # it listens before anything is said
        try:
            self._llm = self._library.AsyncLLMEngine.from_vllm_config(self._config)
            await self._load_adapters()
            if self._refused:
                return
            self.ready()
            while not stopping.is_set():
                if self._llm.errored:
                    raise EngineError("vLLM has stopped.")
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_S):
                        await stopping.wait()
        finally:
            await self.emptied()
            if events is not None:
                events.cancel()
                await asyncio.wait([events])
            if self._llm is not None:
                self._llm.shutdown(timeout=STOP_S)
            self._directory.cleanup()

    async def _load_adapters(self) -> None:
        """All of them, before anybody asks for one; stops at the first that vLLM does not take."""
        for number, (name, path) in enumerate(self._paths.items(), 1):
            request = import_module("vllm.lora.request").LoRARequest(
                lora_name=ADAPTER + name, lora_int_id=number, lora_path=str(path.resolve())
            )
            try:
                await self._llm.add_lora(request)
            except Exception as error:
                self._refused = f"--lora-modules {name}: {_one_line(error)}"
                return
            self._requests[name] = request

    def _arguments(self, directory: str) -> Any:
        """vLLM's own settings from ours; what we leave at 0 is vLLM's to choose."""
        settings = self._settings
        if settings.device == "cpu":
            os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
        events = import_module("vllm.config").KVEventsConfig(
            enable_kv_cache_events=settings.enable_prefix_caching, endpoint=self._endpoint
        )
        optional = {
            "max_model_len": settings.max_model_len,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "block_size": settings.block_size,
            "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
            "quantization": settings.quantization if settings.quantization != "auto" else None,
            "enable_lora": settings.enable_lora,
            "max_loras": len(self._paths),
            "max_lora_rank": settings.max_lora_rank if self._paths else 0,
        }
        arguments: dict[str, Any] = {
            "model": directory,
            "tokenizer": directory,
            "dtype": settings.dtype,
            "kv_cache_dtype": settings.kv_cache_dtype,
            "load_format": settings.load_format,
            "seed": settings.seed,
            "max_num_seqs": settings.max_num_seqs,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "enable_prefix_caching": settings.enable_prefix_caching,
            "scheduling_policy": "priority",
            "generation_config": "vllm",
            "structured_outputs_config": {"backend": "guidance"},
            "kv_events_config": events,
            "disable_log_stats": True,
            **{name: value for name, value in optional.items() if value},
            **_more(settings.engine_args),
        }
        try:
            return self._library.AsyncEngineArgs(**arguments)
        except TypeError as error:
            raise StartError(f"--engine-args: {_one_line(error)}") from None

    def _make_card(self) -> tuple[ModelCard, dict[str, bytes]]:
        model = self._config.model_config
        card, blobs = self._files.card(
            engine="vllm",
            revision=self._files.revision(f"vllm {model.dtype}"),
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            block_size=self._config.cache_config.block_size,
        )
        able = {CAP_DIGESTS: self._cache_log is not None, CAP_ADAPTERS: bool(self._adapters)}
        capabilities = _CAPABILITIES | {name for name, can in able.items() if can}
        adapters = self._adapters
        return msgspec.structs.replace(card, capabilities=capabilities, adapters=adapters), blobs

    def _terms(self, submit: Submit) -> Terms:
        """The request, checked. Raises ForebayError for what the client is to see."""
        card = self._card
        submit.sampling.validate(card.vocab_size)
        prompt = checked_prompt(submit.prompt, card.vocab_size, card.max_model_len)
        for start in submit.starts:
            checked_ids(start.emitted, "emitted", card.vocab_size)
        return terms_of(submit, prompt, card.eos_token_ids)

    async def _generate(self, terms: Terms, life: Life) -> Ending:
        """One sequence: a request of vLLM's."""
        emitted = terms.emitted[life.index]
        prompt_tokens = len(terms.prompt)
        limit = min(terms.sampling.max_tokens, self._limit - prompt_tokens)
        life.usage = Usage(prompt_tokens, completion_tokens=life.tokens)
        if life.tokens >= limit:
            life.begin()
            return Ending("length", life.usage)
        stream = self._llm.generate(
            {"prompt_token_ids": [*terms.prompt, *emitted], **terms.cache_salt},
            sampling_params(self._library, terms, life.index, limit),
            f"{life.work.request_id}.{life.work.attempt}.{life.index}",
            priority=life.work.priority,
            lora_request=self._requests[terms.adapter] if terms.adapter else None,
        )
        try:
            async with aclosing(stream):
                return await self._told(terms, life, stream)
        except (ForebayError, asyncio.CancelledError):
            raise
        except ValueError as error:
            grammar = terms.sampling.grammar
            param = None if grammar is None else grammar.field
            raise InvalidRequestError(_one_line(error), param=param) from None
        except Exception as error:
            if self._llm.errored:
                raise WorkerLostError("The worker was lost. Please retry.") from error
            raise

    async def _told(self, terms: Terms, life: Life, stream: Any) -> Ending:
        prompt_tokens = len(terms.prompt)
        async for output in stream:
            cached = min(output.num_cached_tokens or 0, prompt_tokens - 1)
            life.begin(cached)
            (said,) = output.outputs
            ids, stop_token = list(said.token_ids), None
            if said.finish_reason == "stop" and ids and ids[-1] in terms.enders:
                stop_token = ids.pop()
            if ids:
                logprobs = logprobs_of(said.logprobs, ids, terms.sampling.logprobs)
                life.tokens += len(ids)
                life.say(Delta(*life.key, life.index, life.tokens - len(ids), ids, logprobs))
            life.usage = Usage(prompt_tokens, cached, life.tokens)
            if said.finish_reason is not None:
                return Ending(_reason(said.finish_reason), life.usage, stop_token)
        raise EngineError("The engine ended the request before its answer was complete.")


def _more(arguments: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except msgspec.MsgspecError:
        raise StartError("--engine-args: not a JSON object") from None


def _reason(reason: str) -> FinishReason:
    if reason in ("stop", "length"):
        return "stop" if reason == "stop" else "length"
    raise WorkerLostError("The worker gave the request up. Please retry.")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
