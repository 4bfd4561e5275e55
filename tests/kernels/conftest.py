"""Kernel tests run on the card when there is one, else under Triton's interpreter on the CPU."""

import os
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel module is imported


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after another, so a runner starts a few; a card, all."""
    if torch.cuda.is_available():
        return
    from forebay_worker.engine import card_sampling
    from forebay_worker.kernels import card, decode_attention, sampling

    config = decode_attention.DEFAULT._replace(programs=6)
    monkeypatch.setattr(card, "config_for", lambda rows, *, e4m3: config)
    few = partial(sampling.make_scratch, programs=8)
    monkeypatch.setattr(card_sampling, "make_scratch", few)


@pytest.fixture(autouse=True, scope="session")
def _true_e4m3() -> None:
    """The interpreter carries no bit from mantissa to exponent when it rounds to e4m3 (1.97 becomes
    1), and reads its NaN as 480: torch converts in its place."""
    if torch.cuda.is_available() or not find_spec("triton"):
        return
    import triton.language as tl
    from triton.runtime import interpreter

    kinds = {
        tl.float8e4nv: torch.float8_e4m3fn, tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16, tl.float32: torch.float32,
    }  # fmt: skip
    plain = interpreter._convert_float

    def convert(source: Any, old: Any, new: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (old, new):
            return plain(source, old, new, rounding)
        raw = torch.frombuffer(bytearray(source.tobytes()), dtype=kinds[old])
        bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[kinds[new].itemsize]
        return raw.to(kinds[new]).view(bits).numpy().reshape(source.shape)

    interpreter._convert_float = convert
