"""What a model samples with unless a request says otherwise: its generation_config, and overrides.

It reads JSON and knows no engine. Which ids end an answer is always the model's own affair.
"""

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from forebay_shared.sampling import RepetitionPenalty
from forebay_shared.settings import StartError, WorkerSettings
from msgspec import Meta

from forebay_worker.checkpoint import CheckpointError

FILE = "generation_config.json"

OneOrMore = int | list[int] | None
_T = TypeVar("_T")


class GenerationConfig(msgspec.Struct, frozen=True):
    """The file, as far as it is of use here."""

    eos_token_id: OneOrMore = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


class Overrides(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values of `--override-generation-config`; null takes the model's own away."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | msgspec.UnsetType | None = msgspec.UNSET
    top_p: Annotated[float, Meta(gt=0, le=1)] | msgspec.UnsetType | None = msgspec.UNSET
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | msgspec.UnsetType | None = msgspec.UNSET
    min_p: Annotated[float, Meta(ge=0, le=1)] | msgspec.UnsetType | None = msgspec.UNSET
    repetition_penalty: RepetitionPenalty | msgspec.UnsetType | None = msgspec.UNSET
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | msgspec.UnsetType | None = (
        msgspec.UNSET
    )


def generation_defaults(own: GenerationConfig, settings: WorkerSettings) -> dict[str, int | float]:
    """Sampling values by the names of SamplingParams, as the settings say; `own` are the model's.

    Raises StartError that names the flag.
    """
    config = _chosen(own, settings.generation_config)
    changed = _overrides(settings.override_generation_config)
    values = {name: getattr(config, name) for name in Overrides.__struct_fields__} | changed
    return {
        "max_tokens" if name == "max_new_tokens" else name: value
        for name, value in values.items()
        if value is not None
    }


def read_json(path: Path, kind: type[_T]) -> _T:
    """A JSON file's known fields; their defaults when there is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes() if path.is_file() else b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"model file {path} cannot be used: {error}") from error


def _chosen(own: GenerationConfig, choice: str) -> GenerationConfig:
    if choice == "auto":
        return own
    if choice in ("none", "vllm"):
        return GenerationConfig()
    path = Path(choice)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise StartError(
            f"--generation-config: there is no {path}: give auto, none, or a directory with {FILE}"
        )
    return read_json(path, GenerationConfig)


def _overrides(text: str) -> dict[str, int | float | None]:
    try:
        overrides = msgspec.json.decode(text or "{}", type=Overrides)
    except msgspec.DecodeError as error:
        names = ", ".join(Overrides.__struct_fields__)
        raise StartError(
            f"--override-generation-config: {error}: give a JSON object of {names}"
        ) from None
    return msgspec.to_builtins(overrides)
