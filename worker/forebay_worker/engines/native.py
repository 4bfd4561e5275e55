"""NativeEngine: forebay's own engine behind the Engine protocol.

It puts model, core and loop together; what each does is theirs to know.
"""

import logging

import msgspec
from forebay_shared.models import CAP_DIGESTS, CAP_GRAMMAR, CAP_PROMPT_LOGPROBS, ModelCard
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import Load, Submit

from forebay_worker.checkpoint import resolve
from forebay_worker.engine.cache_log import CacheLog
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.devices import make_runner
from forebay_worker.engine.grammar import Grammars
from forebay_worker.engine.intake import Limits
from forebay_worker.engine.loop import EngineLoop
from forebay_worker.engine.ports import Emit, Recorder
from forebay_worker.engines.base import Engine
from forebay_worker.engines.card import ModelFiles

_log = logging.getLogger(__name__)


def build(settings: WorkerSettings) -> Engine:
    """The engine of a model that generates, or that of one that pools, as `--runner` says; auto: as
    the model's files say. Raises StartError when the model cannot be used as asked."""
    from forebay_worker.engines.pooling import PoolingEngine, is_pooled

    pools = settings.runner == "pooling"
    if settings.runner == "auto":
        pools = is_pooled(resolve(settings.model, weights=settings.load_format != "dummy"))
    return PoolingEngine(settings) if pools else NativeEngine(settings)


class NativeEngine:
    """Loads the model when made. Raises StartError when it cannot be used as asked."""

    def __init__(self, settings: WorkerSettings) -> None:
        directory = resolve(settings.model, weights=settings.load_format != "dummy")
        files = ModelFiles(directory, settings)
        self._runner = make_runner(directory, settings)
        self._settings = settings
        self._limits = Limits.of(self._runner, files.eos_token_ids)
        self._card, self._blobs = files.card(
            engine="native",
            revision=files.revision(self._runner.dtype),
            vocab_size=self._limits.vocab_size,
            max_model_len=self._limits.max_model_len,
            block_size=self._runner.block_size,
        )
        self._grammars = _grammars(self._card, self._blobs)
        able = {
            CAP_GRAMMAR: self._grammars is not None,
            CAP_PROMPT_LOGPROBS: self._runner.scores_prompts,
            CAP_DIGESTS: settings.enable_prefix_caching,
        }
        capabilities = self._card.capabilities | {name for name, can in able.items() if can}
        self._card = msgspec.structs.replace(self._card, capabilities=capabilities)
        self._cache_log = CacheLog() if settings.enable_prefix_caching else None
        self._loop: EngineLoop[Submit] | None = None

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def blobs(self) -> dict[str, bytes]:
        return self._blobs

    @property
    def cache_log(self) -> CacheLog | None:
        return self._cache_log

    @property
    def healthy(self) -> bool:
        """False once the engine's thread has given up; the process should end then."""
        return self._loop is None or self._loop.healthy

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

    def start(self, emit: Emit, recorder: Recorder) -> None:
        self._loop = EngineLoop(
            self.core(recorder, self._cache_log), emit, check=self._settings.log_level == "debug"
        )
        self._loop.start()

    def submit(self, submit: Submit) -> None:
        self._running.submit(submit)

    def cancel(self, request_id: str, attempt: int, index: int | None = None) -> None:
        self._running.cancel(request_id, attempt, index)

    def cancel_gateway(self, gateway: str) -> None:
        self._running.cancel_gateway(gateway)

    def load(self) -> Load:
        return Load() if self._loop is None else self._loop.load()

    def stop(self, timeout_s: float) -> None:
        if self._loop is not None:
            self._loop.stop(timeout_s)
        if self._grammars is not None:
            self._grammars.close()

    @property
    def _running(self) -> EngineLoop[Submit]:
        assert self._loop is not None, "the engine has not been started"
        return self._loop


def _grammars(card: ModelCard, blobs: dict[str, bytes]) -> Grammars | None:
    """None, and no structured output, for a tokenizer that llguidance cannot read."""
    try:
        return Grammars(blobs[card.tokenizer], card.vocab_size, card.eos_token_ids)
    except ValueError as error:
        _log.warning("no structured output with this tokenizer: %s", error)
        return None
