"""The card's ops through a whole decoder: the logits of the reference ops, step by step."""

from dataclasses import replace

import pytest
import torch
from forebay_worker.kernels import reference
from forebay_worker.kernels.card import CardOps
from forebay_worker.kernels.linear_table import Choice
from forebay_worker.kernels.reference import KvCache, Step
from forebay_worker.kernels.small_linear import LinearConfig, make_scratch
from forebay_worker.models.config import Experts, ModelConfig
from forebay_worker.models.decoder import Decoder, fold_norm, parameters

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-6,
    max_position=256,
    rope_theta=1e4,
    rope_scaling=None,
    tied_embeddings=True,
    eos_token_ids=(0,),
    dtype="float32",
    qk_norm=True,
)
EXPERTS = Experts(
    layers=frozenset({1}), number=5, per_token=2, intermediate_size=40, renormalise=True
)


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Normal weights of the size that keeps activations near 1; norms near 1."""
    weights = {}
    for each in parameters(config):
        values = torch.randn(each.shape) * (each.columns or 100) ** -0.5
        if each.columns is None:
            values += 1
        weights[each.name] = values.to(dtype).to(device)
    return weights


def step_of(chunks: list[int], kv_lens: list[int], device: torch.device) -> Step:
    """Rows on blocks of 16: row r has blocks 8 r to 8 r + 7."""
    starts = [0]
    positions: list[int] = []
    slots: list[int] = []
    for row, (chunk, length) in enumerate(zip(chunks, kv_lens, strict=True)):
        starts.append(starts[-1] + chunk)
        positions += range(length - chunk, length)
        slots += [row * 128 + at for at in range(length - chunk, length)]
    return Step(
        num_decodes=sum(chunk == 1 for chunk in chunks),
        token_ids=torch.randint(320, (len(positions),)).to(device),
        positions=torch.tensor(positions, device=device),
        kv_slots=torch.tensor(slots, device=device),
        starts=torch.tensor(starts, device=device),
        kv_lens=torch.tensor(kv_lens, device=device),
        block_tables=torch.arange(8 * len(chunks), device=device).view(-1, 8),
        logits_at=torch.tensor(starts[1:], device=device) - 1,
        host_starts=starts,
        host_kv_lens=kv_lens,
    )


@pytest.mark.parametrize(
    ("dtype", "experts"),
    # In bfloat16 a router may choose otherwise.
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, EXPERTS)],
)
def test_a_decoder_on_the_card_gives_the_references_logits(
    dtype: torch.dtype, experts: Experts | None, device: torch.device
) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter multiplies the bits of bfloat16 tiles as integers")
    config = replace(CONFIG, experts=experts)
    weights = random_weights(config, dtype, device)
    wide = {name: weight.float() for name, weight in weights.items()}
    ops = CardOps(4, 2, 16, device)
    decoder = Decoder(config, weights, ops, 256)
    twin = Decoder(config, wide, reference, 256)
    shape = (2, 24, 16, 2, 16)
    cache = KvCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))
    wide_cache = KvCache(*(torch.zeros(shape, device=device) for _ in range(2)))
    # Prefill, then a prefill chunk beside two decodes, then all decode.
    for chunks, lens in [([40, 5], [40, 5]), ([1, 1, 33], [41, 6, 33]), ([1, 1, 1], [42, 7, 34])]:
        step = step_of(chunks, lens, device)
        ops.begin(step)
        out = decoder(step, cache)
        ref = twin(step, wide_cache)
        limit = 1e-5 if dtype == torch.float32 else 3e-2
        assert float((out - ref).norm() / ref.norm()) < limit


def test_own_products_around_experts_give_the_references_logits(device: torch.device) -> None:
    """The norm after experts is applied by the product that follows, from the squares they leave;
    gains are in that product's weight."""
    config = replace(CONFIG, experts=replace(EXPERTS, layers=frozenset({0})))
    weights = random_weights(config, torch.float32, device)
    folded = dict(weights)
    for name in weights:
        folded[name] = weights[name].clone()
        fold_norm(name, folded)
    ops = CardOps(4, 2, 16, device, folded=True)
    small = LinearConfig(tile_n=16, tile_k=32, num_stages=2)
    for weight in folded.values():
        if weight.dim() == 2:
            scratch = make_scratch(len(weight), small, device)
            ops.products._choices[16, weight.shape] = Choice(small, scratch)
    decoder, twin = Decoder(config, folded, ops, 256), Decoder(config, weights, reference, 256)
    shape = (2, 24, 16, 2, 16)
    caches = [KvCache(*(torch.zeros(shape, device=device) for _ in range(2))) for _ in range(2)]
    for chunks, lens in [([3, 4], [3, 4]), ([1, 1], [4, 5])]:
        step = step_of(chunks, lens, device)
        ops.begin(step)
        out, ref = decoder(step, caches[0]), twin(step, caches[1])
        assert float((out - ref).norm() / ref.norm()) < 1e-5
