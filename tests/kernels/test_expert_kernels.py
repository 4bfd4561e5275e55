"""Routing, the products of experts and their sum, against the reference, at odd shapes."""

from dataclasses import replace

import pytest
import torch
from forebay_worker.kernels import expert_linear, fp8, reference
from forebay_worker.kernels.card import CardOps
from forebay_worker.kernels.expert_linear import ExpertConfig, combine
from forebay_worker.kernels.fp8 import Fp8, Numbers
from forebay_worker.kernels.reference import ExpertWeights, Step
from forebay_worker.kernels.routing import Routing, most_tiles, route

ON_CARD = torch.cuda.is_available()
# The interpreter multiplies the bits of bfloat16 tiles as integers.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_CARD else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EPS = 1e-6


def make_experts(
    device: torch.device,
    dtype: torch.dtype,
    *,
    number: int = 6,
    per_token: int = 2,
    hidden: int = 40,
    inner: int = 24,
    renormalise: bool = True,
) -> ExpertWeights:
    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * shape[-1] ** -0.5).to(dtype).to(device)

    return ExpertWeights(
        router=draw(number, hidden),
        gate_up=draw(number, 2 * inner, hidden),
        down=draw(number, hidden, inner),
        per_token=per_token,
        renormalise=renormalise,
    )


def widened(experts: ExpertWeights) -> ExpertWeights:
    return replace(
        experts,
        router=experts.router.float(),
        gate_up=experts.gate_up.float(),
        down=experts.down.float(),
    )


def begin(ops: CardOps, kv_slots: torch.Tensor) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    ops.begin(Step(0, empty, empty, kv_slots, empty, empty, empty, empty, [], []))


def on_card(
    residual: torch.Tensor, experts: ExpertWeights, padding: tuple[int, ...] = ()
) -> torch.Tensor:
    """What the card's op makes of a copy of the residual; rows `padding` have no KV slot."""
    slots = torch.arange(len(residual), device=residual.device)
    slots[list(padding)] = -1
    ops = CardOps(4, 2, 16, residual.device)
    begin(ops, slots)
    gain = torch.ones(residual.shape[1], dtype=residual.dtype, device=residual.device)
    return ops.sparse_mlp(residual.clone(), gain, EPS, experts)


def expected(residual: torch.Tensor, experts: ExpertWeights) -> torch.Tensor:
    gain = torch.ones(residual.shape[1], device=residual.device)
    return reference.sparse_mlp(residual.float(), gain, EPS, widened(experts))


def assert_close(out: torch.Tensor, ref: torch.Tensor) -> None:
    limit = TOLERANCE[out.dtype] * float(ref.abs().max())
    assert float((out.double() - ref.double()).abs().max()) <= limit


def pairs_by_expert(routing: Routing) -> dict[int, list[int]]:
    """What the tiles say: the pairs of each expert, in order."""
    found: dict[int, list[int]] = {}
    for expert, start, end in routing.tiles[: int(routing.count)].tolist():
        found.setdefault(expert, []).extend(routing.order[start:end].tolist())
    return found


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    ("rows", "number", "per_token", "tile"),
    [(1, 128, 8, 16), (5, 6, 1, 16), (9, 6, 6, 4), (40, 3, 2, 16), (120, 20, 3, 32)],
)
def test_routing_agrees_with_the_reference(
    rows: int, number: int, per_token: int, tile: int, renormalise: bool, device: torch.device
) -> None:
    logits = torch.randn(rows, number, device=device)
    weights, chosen = reference.route(logits, per_token, renormalise)
    routing = route(logits, per_token, renormalise, tile)
    assert torch.equal(routing.chosen.long(), chosen)
    assert torch.allclose(routing.weights, weights, atol=1e-6)
    flat = chosen.flatten().tolist()
    wanted = {
        expert: [pair for pair, at in enumerate(flat) if at == expert] for expert in sorted({*flat})
    }
    assert pairs_by_expert(routing) == wanted
    tiles = routing.tiles[: int(routing.count)]
    assert int((tiles[:, 2] - tiles[:, 1]).max()) <= tile
    assert len(routing.tiles) == most_tiles(rows * per_token, number, tile)


def test_of_equally_likely_experts_the_first_are_taken(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0], [2.0] * 5], device=device)
    routing = route(logits, 2, True, 16)
    assert routing.chosen.tolist() == [[1, 2], [0, 1]]
    assert torch.allclose(routing.weights, torch.full((2, 2), 0.5, device=device))


@pytest.mark.parametrize("flaw", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_numbers_takes_experts_by_nan_and_leaves_others_alone(
    flaw: float, device: torch.device
) -> None:
    logits = torch.randn(4, 6, device=device)
    logits[2] = flaw
    whole = route(logits, 3, True, 16)
    assert whole.chosen[2].tolist() == [0, 1, 2]
    assert bool(whole.weights[2].isnan().all())
    others = [0, 1, 3]
    alone = route(logits[others], 3, True, 16)
    assert torch.equal(whole.chosen[others], alone.chosen)
    assert torch.equal(whole.weights[others], alone.weights)


def test_more_pairs_than_a_block_are_sorted_by_expert_and_token(device: torch.device) -> None:
    logits = torch.randn(690, 6, device=device)  # 4,140 pairs
    routing = route(logits, 6, False, 128)
    flat = routing.chosen.flatten()
    assert torch.equal(routing.order.long(), flat.argsort(stable=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1, {}),
        (1, {"number": 1, "per_token": 1}),
        (3, {"number": 40, "per_token": 1}),  # experts that nobody chose
        (50, {"number": 3, "per_token": 3}),  # more than a tile for each
        (7, {"hidden": 100, "inner": 33, "renormalise": False}),
    ],
)
def test_the_op_agrees_with_the_reference(
    dtype: torch.dtype, rows: int, sizes: dict[str, int], device: torch.device
) -> None:
    experts = make_experts(device, dtype, **sizes)
    residual = torch.randn(rows, experts.router.shape[1]).to(dtype).to(device)
    assert_close(on_card(residual, experts), expected(residual, experts))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("rows", [3, 40])
def test_e4m3_weights_count_as_the_numbers_that_they_stand_for(
    rows: int, grouped: bool, device: torch.device
) -> None:
    experts = make_experts(device, torch.float32, number=3, hidden=160, inner=144)
    both = replace(
        experts,
        gate_up=e4m3(experts.gate_up, grouped=grouped),
        down=e4m3(experts.down, grouped=grouped),
    )
    residual = torch.randn(rows, 160, device=device)
    gain = torch.ones(160, device=device)
    wanted = reference.sparse_mlp(residual, gain, EPS, both)
    assert_close(on_card(residual, both), wanted)
    plain = expected(residual, experts) - residual
    assert float((wanted - residual - plain).norm() / plain.norm()) < 0.1


def e4m3(weight: Numbers, *, grouped: bool) -> Fp8:
    """Stacked matrices with a scale per row, or per 128 numbers of one, each of its own."""
    assert isinstance(weight, torch.Tensor)
    values, scale = fp8.quantize(weight.flatten(0, 1))
    if grouped:
        factors = torch.tensor([1.0, 2.0], device=weight.device)[:, None]
        wide = factors.repeat_interleave(fp8.GROUP, 0)[: weight.shape[-1]].t()
        values, scale = fp8.encode(values.float() / wide), scale * factors
    return Fp8(values.view(weight.shape), scale.contiguous())


def test_all_tokens_may_take_one_expert(device: torch.device) -> None:
    experts = make_experts(device, torch.float32, per_token=1)
    experts.router.zero_()
    experts.router[4] = 1.0
    residual = torch.rand(37, 40, device=device)
    assert_close(on_card(residual, experts), expected(residual, experts))


@pytest.mark.parametrize(
    "config", [found for _, found in expert_linear._BY_ROWS] + [expert_linear._MANY]
)
def test_tiles_of_every_size_agree_with_the_reference(
    config: ExpertConfig, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay_worker.kernels import card

    monkeypatch.setattr(card, "config_for_experts", lambda *_: config)
    experts = make_experts(device, torch.float16, number=2, hidden=136, inner=72)
    residual = torch.randn(140, 136).to(torch.float16).to(device)
    assert_close(on_card(residual, experts), expected(residual, experts))


def test_many_rows_take_tall_tiles_and_float32_small_ones() -> None:
    heights = [expert_linear.config_for(rows * 8, 128, 2).tile_m for rows in (1, 160, 256, 512)]
    assert heights == [16, 16, 32, 64]
    assert expert_linear.config_for(8192 * 8, 128, 2).tile_m == 128
    assert expert_linear.config_for(8192 * 8, 128, 4).tile_m == 16


def test_a_token_has_what_it_has_alone(device: torch.device) -> None:
    experts = make_experts(device, torch.float32)
    residual = torch.randn(24, 40, device=device)
    whole = on_card(residual, experts)
    for row in (0, 11, 23):
        alone = on_card(residual[row : row + 1], experts)
        assert torch.allclose(whole[row], alone[0], rtol=0, atol=1e-6)


def test_a_nan_fails_its_own_row_alone(device: torch.device) -> None:
    experts = make_experts(device, torch.float32)
    residual = torch.randn(9, 40, device=device)
    clean = on_card(residual, experts)
    residual[4, 3] = torch.nan
    out = on_card(residual, experts)
    assert bool(out[4].isnan().all())
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(out[others], clean[others])


def test_padding_takes_no_expert_and_stays_as_it_is(device: torch.device) -> None:
    experts = make_experts(device, torch.float32)
    residual = torch.randn(12, 40, device=device)
    padding = (0, 7, 10, 11)
    real = [at for at in range(12) if at not in padding]
    residual[list(padding)] = torch.nan
    out = on_card(residual, experts, padding)
    assert bool(out[list(padding)].isnan().all())
    assert_close(out[real], expected(residual[real], experts))
    slots = torch.zeros(12, dtype=torch.int64, device=device)
    slots[list(padding)] = -1
    routing = route(torch.randn(12, 6, device=device), 2, True, 16, slots)
    held = sorted(pair for pairs in pairs_by_expert(routing).values() for pair in pairs)
    assert held == [2 * row + slot for row in real for slot in (0, 1)]


def test_a_step_of_padding_alone_computes_nothing(device: torch.device) -> None:
    experts = make_experts(device, torch.float32)
    for rows in (1, 3):
        residual = torch.randn(rows, 40, device=device)
        assert torch.equal(on_card(residual, experts, tuple(range(rows))), residual)


def test_the_sum_is_in_place_and_has_its_squares(device: torch.device) -> None:
    residual = torch.randn(5, 40, device=device)
    parts = torch.randn(10, 40, device=device)
    routing = route(torch.randn(5, 6, device=device), 2, True, 16)
    weighted = parts.view(5, 2, 40) * routing.weights[:, :, None]
    wanted = residual + weighted.sum(1)
    squares = torch.zeros(1, 64, device=device)
    assert combine(residual, parts, routing, 6, squares) is residual
    assert torch.allclose(residual, wanted, atol=1e-5)
    assert torch.allclose(squares[0, :5], wanted.square().sum(1), rtol=1e-5)
