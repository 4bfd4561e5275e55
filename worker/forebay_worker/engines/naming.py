"""What clients call a worker's model: known before the model is loaded. It loads nothing."""

from forebay_shared.settings import WorkerSettings

from forebay_worker.checkpoint import public_name
from forebay_worker.engines.adapters import adapter_paths


def names_of(settings: WorkerSettings) -> tuple[str, ...]:
    """Of a model of files: as the settings say, or as the files are called."""
    return settings.served_model_name or (public_name(settings.model).lower(),)


def expected_names(settings: WorkerSettings) -> tuple[str, ...]:
    """The names that will be served, of model and adapters; () while only the engine can tell.

    Raises StartError for a wrong list of adapters.
    """
    names, adapters = _of_the_model(settings), tuple(adapter_paths(settings))
    return names + adapters if names else ()


def _of_the_model(settings: WorkerSettings) -> tuple[str, ...]:
    if settings.served_model_name:
        return settings.served_model_name
    if settings.engine in ("native", "vllm"):
        return names_of(settings)
    if settings.engine == "http" and settings.upstream_model:
        return (settings.upstream_model,)
    return ()
