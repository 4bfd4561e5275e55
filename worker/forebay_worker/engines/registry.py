"""Engines by name: built in, or from an installed distribution by the entry point group
forebay.engines.

An entry point names a callable that takes WorkerSettings and returns an Engine. An engine's module
is imported only when it is asked for: the echo engine needs no torch.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from forebay_shared.models import CAP_ADAPTERS
from forebay_shared.settings import StartError, WorkerSettings

from forebay_worker.engines.adapters import adapter_paths
from forebay_worker.engines.base import Engine

GROUP = "forebay.engines"

BUILT_IN = {
    "native": "forebay_worker.engines.native:build",
    "echo": "forebay_worker.engines.echo.engine:EchoEngine",
    "http": "forebay_worker.engines.http.engine:HttpEngine",
    "vllm": "forebay_worker.engines.vllm:VllmEngine",
}
_WITHOUT_ADAPTERS = frozenset({"http"})
"""Known before the engine is made, which would ask its upstream."""

Factory = Callable[[WorkerSettings], Engine]


def build(settings: WorkerSettings) -> Engine:
    """The engine that `settings.engine` names. Raises StartError for an unknown name, and for one
    that has no adapters where some are asked for."""
    wants_adapters = bool(adapter_paths(settings))
    if wants_adapters and settings.engine in _WITHOUT_ADAPTERS:
        raise _no_adapters(settings)
    engine = _factory(settings.engine)(settings)
    if wants_adapters and CAP_ADAPTERS not in engine.card.capabilities:
        raise _no_adapters(settings)
    return engine


def _no_adapters(settings: WorkerSettings) -> StartError:
    return StartError(f"--lora-modules: the engine {settings.engine} serves no adapters here.")


def load_engine(name: str) -> Factory:
    """What makes the engine of that name, or the one at a place like `package.module:Name`.

    Only a developer's own tool may name a place: a server runs engines that were installed as such.
    """
    return _at(name) if ":" in name else _factory(name)


def _at(place: str) -> Factory:
    module, _, attribute = place.partition(":")
    return cast(Factory, getattr(import_module(module), attribute))


def _factory(name: str) -> Factory:
    if name in BUILT_IN:
        return _at(BUILT_IN[name])
    plugins = entry_points(group=GROUP)
    if name in plugins.names:
        return cast(Factory, plugins[name].load())
    known = ", ".join(sorted({*BUILT_IN, *plugins.names}))
    raise StartError(f"--engine: there is no engine {name!r}; known are {known}.")
