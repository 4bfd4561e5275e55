"""What a model's directory says of its vectors: the files of sentence-transformers, or defaults.

It reads JSON; it loads no tensor.
"""

from pathlib import Path
from typing import TypeVar

import msgspec

from forebay_worker.models import bert
from forebay_worker.models.config import ModelError

MODULES = "modules.json"
T = TypeVar("T")


class _Module(msgspec.Struct, frozen=True):
    type: str = ""
    path: str = ""


class _Pooling(msgspec.Struct, frozen=True):
    pooling_mode: str | list[str] | None = None
    pooling_mode_cls_token: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False


class _Sentence(msgspec.Struct, frozen=True):
    max_seq_length: int | None = None
    do_lower_case: bool = False


class _Config(msgspec.Struct, frozen=True):
    model_type: str = ""
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] | None = None


_KINDS = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "lasttoken": "last",
}


class PoolingFiles(msgspec.Struct, frozen=True):
    """`max_seq_length` is in tokens, None when nothing says it."""

    pooling: str
    normalized: bool
    max_seq_length: int | None
    matryoshka: bool
    sizes: tuple[int, ...]


def is_pooled(directory: Path) -> bool:
    """Whether the model was made to give vectors rather than text."""
    family = _read(directory / "config.json", _Config).model_type
    return family in bert.FAMILIES or (directory / MODULES).is_file()


def pooling_files(directory: Path) -> PoolingFiles:
    """Raises ModelError for files that cannot be read or modules that are not supported."""
    config = _read(directory / "config.json", _Config)
    sentence = _read(directory / "sentence_bert_config.json", _Sentence)
    if sentence.do_lower_case:
        raise ModelError("sentence_bert_config.json: do_lower_case is not supported.")
    pooling, normalized = "mean" if config.model_type in bert.FAMILIES else "last", True
    if (directory / MODULES).is_file():
        pooling, normalized = _modules(directory, pooling)
    sizes = tuple(sorted(config.matryoshka_dimensions or ()))
    return PoolingFiles(
        pooling=pooling,
        normalized=normalized,
        max_seq_length=sentence.max_seq_length,
        matryoshka=config.is_matryoshka or bool(sizes),
        sizes=sizes,
    )


def _modules(directory: Path, default: str) -> tuple[str, bool]:
    """The kind of pooling, and whether vectors are normalised."""
    pooling, normalized = default, False
    for module in _read(directory / MODULES, list[_Module]):
        kind = module.type.rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(directory / module.path / "config.json")
        elif kind == "Normalize":
            normalized = True
        elif kind != "Transformer":
            raise ModelError(f"{MODULES}: a module {kind} is not supported.")
    return pooling, normalized


def _pooling(path: Path) -> str:
    found = _read(path, _Pooling)
    modes = [found.pooling_mode] if isinstance(found.pooling_mode, str) else found.pooling_mode
    if modes is None:
        modes = [
            name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
            for name in _Pooling.__struct_fields__
            if name != "pooling_mode" and getattr(found, name)
        ]
    if len(modes) != 1 or modes[0] not in _KINDS:
        known = ", ".join(_KINDS)
        raise ModelError(f"{path}: pooling must be one of {known}; it is {' and '.join(modes)}.")
    return _KINDS[modes[0]]


def _read(path: Path, kind: type[T]) -> T:
    """A JSON file's known fields; their defaults when there is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes() if path.is_file() else b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise ModelError(f"model file {path} cannot be used: {error}") from None
