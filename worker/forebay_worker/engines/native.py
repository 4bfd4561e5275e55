"""NativeEngine: forebay's own engine behind the Engine protocol.

It puts model, core and loop together; what each does is theirs to know.
"""

import logging

import msgspec
from forebay_shared.models import (
    CAP_ADAPTERS,
    CAP_DIGESTS,
    CAP_GRAMMAR,
    CAP_PROMPT_LOGPROBS,
    ModelCard,
)
from forebay_shared.settings import WorkerSettings
from forebay_shared.telemetry import GrammarMetrics
from forebay_shared.wire import Submit
from prometheus_client import CollectorRegistry

from forebay_worker.checkpoint import resolve
from forebay_worker.engine.cache_log import CacheLog
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.devices import make_runner
from forebay_worker.engine.grammar import Grammars
from forebay_worker.engine.intake import Limits
from forebay_worker.engine.ports import Recorder
from forebay_worker.engines.adapters import adapter_paths, check_names, described
from forebay_worker.engines.base import Engine
from forebay_worker.engines.card import ModelFiles
from forebay_worker.engines.looped import LoopedEngine
from forebay_worker.engines.naming import names_of

_log = logging.getLogger(__name__)


def build(settings: WorkerSettings) -> Engine:
    """The engine of a model that generates, or that of one that pools, as `--runner` says; auto: as
    the model's files say. Raises StartError when the model cannot be used as asked."""
    from forebay_worker.engines.pooling import PoolingEngine, is_pooled

    pools = settings.runner == "pooling"
    if settings.runner == "auto":
        pools = is_pooled(resolve(settings.model, weights=settings.load_format != "dummy"))
    return PoolingEngine(settings) if pools else NativeEngine(settings)


class NativeEngine(LoopedEngine[Submit]):
    """Loads the model when made. Raises StartError when it cannot be used as asked."""

    def __init__(self, settings: WorkerSettings) -> None:
        directory = resolve(settings.model, weights=settings.load_format != "dummy")
        files = ModelFiles(directory, settings)
        paths = adapter_paths(settings)
        check_names(paths, names_of(settings))
        self._runner = make_runner(directory, settings, paths)
        adapters = described(paths)
        self._limits = Limits.of(self._runner, files.eos_token_ids, adapters)
        card, blobs = files.card(
            engine="native",
            revision=files.revision(self._runner.dtype),
            vocab_size=self._limits.vocab_size,
            max_model_len=self._limits.max_model_len,
            block_size=self._runner.block_size,
        )
        self._grammars = _grammars(card, blobs)
        able = {
            CAP_GRAMMAR: self._grammars is not None,
            CAP_PROMPT_LOGPROBS: self._runner.scores_prompts,
            CAP_DIGESTS: settings.enable_prefix_caching,
            CAP_ADAPTERS: bool(adapters),
        }
        capabilities = card.capabilities | {name for name, can in able.items() if can}
        card = msgspec.structs.replace(card, capabilities=capabilities, adapters=adapters)
        self._cache_log = CacheLog() if settings.enable_prefix_caching else None
        super().__init__(settings, card, blobs)

    @property
    def cache_log(self) -> CacheLog | None:
        return self._cache_log

    def measure(self, registry: CollectorRegistry, engine: str) -> None:
        if self._grammars is not None:
            registry.register(GrammarMetrics(engine, self._grammars))

    def core(self, recorder: Recorder, cache_log: CacheLog | None = None) -> EngineCore:
        """A core over the loaded model; there is one KV cache, so one core at a time."""
        return EngineCore(
            self._runner,
            self._limits,
            self._settings,
            recorder,
            revision=self._card.revision,
            grammars=self._grammars,
            cache_log=cache_log,
        )

    def make_core(self, recorder: Recorder) -> EngineCore:
        return self.core(recorder, self._cache_log)

    def submit(self, submit: Submit) -> None:
        self.take(submit)

    def stop(self, timeout_s: float) -> None:
        super().stop(timeout_s)
        if self._grammars is not None:
            self._grammars.close()


def _grammars(card: ModelCard, blobs: dict[str, bytes]) -> Grammars | None:
    """None, and no structured output, for a tokenizer that llguidance cannot read."""
    try:
        return Grammars(blobs[card.tokenizer], card.vocab_size, card.eos_token_ids)
    except ValueError as error:
        _log.warning("no structured output with this tokenizer: %s", error)
        return None
