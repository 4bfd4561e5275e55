"""Looks at a Hugging Face directory before anything is loaded, so that what lacks is said at once.

Knows file names and JSON; does not know tensors or families.
"""

import json
from pathlib import Path
from typing import cast

from forebay_worker.checkpoint.errors import CheckpointError


def check_directory(path: Path, *, weights: bool = True) -> Path:
    """`path`, when it holds what an engine and a gateway need; random weights need no file.

    Raises CheckpointError for what it lacks.
    """
    _read_object(path, "config.json")
    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(f"model {path} has no tokenizer.json: save its fast tokenizer there")
    for name in weight_files(path) if weights else ():
        _check_weights(path, name)
    return path


def weight_files(path: Path) -> list[str]:
    """The names of the safetensors files with the weights; from the index when there is one."""
    if (path / "model.safetensors.index.json").is_file():
        index = _read_object(path, "model.safetensors.index.json").get("weight_map")
        if not isinstance(index, dict) or not index:
            raise CheckpointError(f"model {path}: model.safetensors.index.json has no weight_map")
        return sorted({str(name) for name in cast("dict[str, object]", index).values()})
    names = sorted(file.name for file in path.glob("model*.safetensors"))
    if names:
        return names
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        raise CheckpointError(
            f"model {path} has pickled weights only: save it as safetensors (model.safetensors)"
        )
    raise CheckpointError(f"model {path} has no weights: model.safetensors is expected there")


def _check_weights(path: Path, name: str) -> None:
    """The header's length comes first: a file cut short, or a Git LFS pointer, fails here."""
    file = path / name
    if not file.is_file():
        raise CheckpointError(f"model {path} lacks {name}, which its index names")
    size = file.stat().st_size
    with file.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
        if not 2 <= header <= size - 8:
            raise CheckpointError(f"model file {file} is no safetensors file, or is cut short")
        try:
            tensors = cast("dict[str, dict[str, list[int]]]", json.loads(stream.read(header)))
            ends = [t["data_offsets"][1] for n, t in tensors.items() if n != "__metadata__"]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointError(f"model file {file} has a broken safetensors header") from error
    if size != 8 + header + max(ends, default=0):
        raise CheckpointError(f"model file {file} is cut short: fetch it again")


def _read_object(path: Path, name: str) -> dict[str, object]:
    try:
        value: object = json.loads((path / name).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"model {path} has no {name}: a Hugging Face model directory is expected"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"model {path}: {name} cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"model {path}: {name} is not a JSON object")
    return cast("dict[str, object]", value)
