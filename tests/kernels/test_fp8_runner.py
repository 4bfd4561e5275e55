"""The card's runner with e4m3 weights and e4m3 keys and values: the plain decoder's distributions
over the same bytes, whether a checkpoint brought them or they were made at the start.

Without a card the same kernels run in Triton's interpreter, in float32.
"""

import statistics
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import TokenLogprobs
from forebay_worker.engine import fp8_weights, loading
from forebay_worker.engine.batch import ScheduledRow, flatten
from forebay_worker.engine.card_runner import CardRunner
from forebay_worker.engine.runner import _to_device
from forebay_worker.kernels import reference
from forebay_worker.kernels.fp8 import E4M3, Fp8
from forebay_worker.kernels.reference import KvCache
from forebay_worker.layers.ops import Ops
from forebay_worker.models.config import ModelError
from forebay_worker.models.decoder import Decoder, fold_norm, quantize
from forebay_worker.models.registry import read_config
from fp8_checkpoints import compress, write_plain
from kernel_house import make_sequence

pytestmark = pytest.mark.usefixtures("few_programs")

ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
BLOCK, BLOCKS, LAYERS, HEAD = 64, 16, 2 if ON_CARD else 1, 16
VOCAB = 20  # so that 20 log-probabilities are the whole distribution
MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 160,  # two groups of 128
    "intermediate_size": 144,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
QWEN2: dict[str, Any] = {**MODEL, "model_type": "qwen2"}  # whose product of qkv has a bias
# Every expert is taken, so that no rounding changes a choice.
EXPERTS: dict[str, Any] = {
    **MODEL,
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 144,
    "norm_topk_prob": True,
}
WHOLE = SamplingParams(temperature=0, logprobs=VOCAB)
# More than few rows; on a card also more than `small_linear` takes.
LENGTHS = (5, 62, 90, 1) if ON_CARD else (5, 62, 1)
# How far a product's numbers are off by the share of them: a card's units sum e4m3 up in some 14
# bits, and bfloat16 has 8. Off by so little an input, a key or a value may round to the next e4m3,
# a sixteenth away. So what is near is measured: how far two plain decoders are, one of them off.
OFF = {"float32": 1e-3 if ON_CARD else 1e-6, "bfloat16": 2**-8}
DTYPES = list(OFF) if ON_CARD else ["float32"]
SCALES = (0.5, 0.25)
CHECKPOINTS = [("channel", None), ("block", SCALES)]
if ON_CARD:
    CHECKPOINTS += [
        ("channel", SCALES),
        ("block", None),
        ("tensor", SCALES),
        ("fine_grained", None),
    ]


def _family(model: dict[str, Any]) -> str:
    return model["model_type"]


def settings(dtype: str, **more: Any) -> WorkerSettings:
    return WorkerSettings(
        dtype=dtype,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=2 * LAYERS * 2 * HEAD * 4 * BLOCK * BLOCKS,
        **more,
    )


class Off:
    """The reference's ops, the results of their products off by a share."""

    def __init__(self, share: float) -> None:
        self._share = share

    def __getattr__(self, name: str) -> Any:
        plain = getattr(reference, name)
        if "linear" not in name and "gate_up" not in name:
            return plain

        def off(*args: Any, **more: Any) -> torch.Tensor:
            found = plain(*args, **more)
            return found * (1 + self._share * torch.randn_like(found))

        return off


class Twin:
    """The same steps by the plain decoder in float32, on the card's device."""

    def __init__(
        self, path: Path, asked: WorkerSettings, *, kv: bool, ops: Ops = reference
    ) -> None:
        config = read_config(path)

        def prepare(name: str, loaded: dict[str, torch.Tensor]) -> None:
            if asked.quantization == "fp8":
                fold_norm(name, loaded)
                quantize(name, loaded)

        dtype = loading.dtype_of(asked.dtype)
        weights = loading.load(path, config, asked, dtype, DEVICE, prepare)
        wide = {
            name: each if each.dtype == E4M3 else each.float() for name, each in weights.items()
        }
        one = torch.ones(2, config.num_kv_heads)
        scales = [weights.get(fp8_weights.kv_scales_of(at), one) for at in range(config.num_layers)]
        shape = (config.num_layers, BLOCKS, BLOCK, config.num_kv_heads, config.head_dim)
        sides = (
            torch.zeros(shape, device=DEVICE).to(E4M3 if kv else torch.float32) for _ in range(2)
        )
        self._cache = KvCache(*sides, torch.stack(scales).to(DEVICE) if kv else None)
        self._decoder = Decoder(config, wide, ops, 128)

    @torch.inference_mode()
    def execute(self, rows: list[ScheduledRow]) -> torch.Tensor:
        """Log-probabilities of each row's next token."""
        step = _to_device(flatten(rows, BLOCK), DEVICE)
        return self._decoder(step, self._cache).log_softmax(-1).cpu()


def distribution(found: TokenLogprobs) -> torch.Tensor:
    ours = torch.empty(VOCAB)
    ours[[token for token, _ in found.top]] = torch.tensor([value for _, value in found.top])
    return ours


def assert_near(runner: CardRunner, path: Path, asked: WorkerSettings, *, kv: bool) -> None:
    """Over prompts, a prompt beside decodes, and decodes."""
    twin = Twin(path, asked, kv=kv)
    other = Twin(path, asked, kv=kv, ops=cast(Ops, Off(OFF[asked.dtype])))
    texts = [torch.randint(VOCAB, (size,)).tolist() for size in LENGTHS]
    rows = [make_sequence(text, [2 * at, 2 * at + 1], WHOLE) for at, text in enumerate(texts)]
    apart: list[float] = []
    near: list[float] = []
    for step in range(6 if ON_CARD else 2):
        sizes = [len(row.token_ids) - row.num_computed for row in rows]
        if step == 0:
            sizes[-1] = 0  # the last one joins later
        plan = [
            ScheduledRow(row, size, True) for row, size in zip(rows, sizes, strict=True) if size
        ]
        plan.sort(key=lambda row: row.num_new > 1)
        wanted = twin.execute(plan)
        near += (other.execute(plan) - wanted).abs().amax(-1).tolist()
        for row, sampled, expected in zip(plan, runner.execute(plan), wanted, strict=True):
            assert sampled is not None
            assert sampled.logprobs is not None
            apart.append(float((distribution(sampled.logprobs) - expected).abs().max()))
            row.sequence.num_computed += row.num_new
            row.sequence.token_ids.append(sampled.token_id)
    assert statistics.median(apart) < 3 * statistics.median(near)
    assert max(apart) < 4 * max(near)
    assert max(near) < 0.5, "too far off for a fault to show"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("strategy", "kv"), CHECKPOINTS)
def test_a_checkpoint_says_what_its_numbers_say(
    strategy: str, kv: tuple[float, float] | None, dtype: str, tmp_path: Path
) -> None:
    write_plain(tmp_path, **MODEL)
    compress(tmp_path, strategy, kv=kv)
    asked = settings(dtype)
    runner = CardRunner(tmp_path, asked, DEVICE)
    assert (runner._cache.keys.dtype == E4M3) == (kv is not None)
    assert_near(runner, tmp_path, asked, kv=kv is not None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", [QWEN2, EXPERTS, *[MODEL] * ON_CARD], ids=_family)
def test_weights_keys_and_values_become_e4m3_at_the_start(
    model: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    write_plain(tmp_path, **model)
    asked = settings(dtype, quantization="fp8", kv_cache_dtype="fp8")
    runner = CardRunner(tmp_path, asked, DEVICE)
    assert runner.num_blocks == BLOCKS * 4
    assert_near(runner, tmp_path, asked, kv=True)


def test_random_weights_become_e4m3_too(tmp_path: Path) -> None:
    write_plain(tmp_path, **MODEL)
    asked = settings("float32", quantization="fp8", load_format="dummy")
    layer = CardRunner(tmp_path, asked, DEVICE)._decoder._layers[0]
    products = layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down
    assert all(isinstance(each.weight, Fp8) for each in products)


@pytest.mark.skipif(not ON_CARD, reason="it needs a card's graphs")
def test_graphs_change_no_token(tmp_path: Path) -> None:
    write_plain(tmp_path, **MODEL)
    asked = settings("bfloat16", quantization="fp8", kv_cache_dtype="fp8")
    text = torch.randint(VOCAB, (40,)).tolist()
    outputs: list[list[int]] = []
    for graphs in (True, False):
        runner = CardRunner(tmp_path, asked, DEVICE, graphs=graphs)
        row = make_sequence(text, [3, 1], SamplingParams(temperature=0))
        while len(row.token_ids) < 80:
            num_new = len(row.token_ids) - row.num_computed
            [sampled] = runner.execute([ScheduledRow(row, num_new, True)])
            assert sampled is not None
            row.num_computed += num_new
            row.token_ids.append(sampled.token_id)
        outputs.append(row.token_ids)
    assert outputs[0] == outputs[1]


def test_a_card_without_fp8_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plain(tmp_path, **MODEL)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ModelError) as error:
        CardRunner(tmp_path, settings("auto", kv_cache_dtype="fp8"), torch.device("cuda"))
    assert str(error.value) == (
        "fp8 needs a card of compute capability 8.9 or later; this one has 8.0."
    )
