"""The adapters that a worker is started with: what they are called, and where they lie.

It loads none of them.
"""

from pathlib import Path

from forebay_shared.models import Adapter
from forebay_shared.settings import StartError, WorkerSettings

from forebay_worker.checkpoint.adapters import adapter_revision


def adapter_paths(settings: WorkerSettings) -> dict[str, Path]:
    """Where each adapter of `--lora-modules` lies, by its name, in their order.

    Raises StartError for what is not NAME=PATH, and for a name that is there twice.
    """
    if settings.enable_lora and not settings.lora_modules:
        raise StartError("--enable-lora: name the adapters, as --lora-modules NAME=PATH")
    if settings.lora_modules and not settings.enable_lora:
        raise StartError("--lora-modules: needs --enable-lora")
    paths: dict[str, Path] = {}
    for module in settings.lora_modules:
        name, equals, path = (part.strip() for part in module.partition("="))
        if not (name and equals and path):
            raise StartError(f"--lora-modules: {module!r} is not NAME=PATH")
        if name in paths:
            raise StartError(f"--lora-modules: {name} is there twice")
        paths[name] = Path(path)
    return paths


def described(paths: dict[str, Path]) -> tuple[Adapter, ...]:
    """As a card names them; the revision is a hash over all that is in their files.

    Raises StartError for a file that cannot be read.
    """
    return tuple(
        Adapter(name, _revision(name, path), path.resolve().name) for name, path in paths.items()
    )


def _revision(name: str, path: Path) -> str:
    try:
        return adapter_revision(path)
    except OSError as error:
        said = f"{error.filename} cannot be read ({error.strerror})"
        raise StartError(f"--lora-modules {name}: {said}.") from None


def check_names(paths: dict[str, Path], names: tuple[str, ...]) -> None:
    """Raises StartError for an adapter with one of the `names` of its model."""
    for name in names:
        if name in paths:
            raise StartError(f"--lora-modules: {name} is the model's own name")
