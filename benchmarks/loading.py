"""How fast a checkpoint in the page cache comes onto the card.

    PYTHONPATH=worker:shared python3 benchmarks/loading.py --layers 12 --out loading.csv

Writes a random checkpoint of Qwen3-8B's shape with fewer layers, in files of four layers each, and
loads it three times: bytes of the weights in bfloat16 over the seconds until they are there.
"""

import argparse
import csv
import json
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from forebay_shared.settings import WorkerSettings
from forebay_worker.engine import loading
from forebay_worker.models.decoder import parameters
from forebay_worker.models.registry import read_config
from offline import MODELS
from safetensors.torch import save_file

LAYERS_PER_FILE = 4


def write(directory: Path, layers: int) -> None:
    """A checkpoint with the names and shapes that its family stores."""
    shape = {**MODELS["qwen3-8b"], "num_hidden_layers": layers}
    (directory / "config.json").write_text(json.dumps(shape))
    files: dict[str, dict[str, torch.Tensor]] = {}
    for parameter in parameters(read_config(directory)):
        layer = int(parameter.name.split(".")[2]) if ".layers." in parameter.name else 0
        held = files.setdefault(f"model-{layer // LAYERS_PER_FILE}.safetensors", {})
        for name, size in zip(parameter.parts, parameter.sizes, strict=True):
            columns = () if parameter.columns is None else (parameter.columns,)
            held[name] = torch.empty((size, *columns), dtype=torch.bfloat16).uniform_(-0.1, 0.1)
    index: dict[str, str] = {}
    for file, held in files.items():
        save_file(held, directory / file)
        index |= dict.fromkeys(held, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", help="CSV file to write")
    args = parser.parse_args()
    device = torch.device(args.device)
    rows: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write(directory, args.layers)
        torch.zeros(1, device=device)  # the device's own start is not the loading's
        for _ in range(3):
            began = perf_counter()
            found = loading.load(
                directory, read_config(directory), WorkerSettings(), torch.bfloat16, device
            )
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = perf_counter() - began
            size = sum(each.nbytes for each in found.values()) / 1e9
            rows.append((size, seconds))
            print(f"{size:.2f} GB in {seconds:.2f} s: {size / seconds:.2f} GB/s", flush=True)
            del found
    if args.out:
        from kernels import provenance

        source = provenance()
        with open(args.out, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["gigabytes", "seconds", "gigabytes_per_second", *source])
            writer.writerows(
                [round(size, 3), round(seconds, 3), round(size / seconds, 3), *source.values()]
                for size, seconds in rows
            )


if __name__ == "__main__":
    main()
