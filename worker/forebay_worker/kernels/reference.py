"""Plain torch twins of the kernels: the CPU path runs them, the GPU kernels are tested by them.

Shapes: T tokens of a step, R rows, H query heads, K key-value heads, D head size. A layer's cache
is a pair of [blocks, block_size, K, D] tensors. It knows no model, no request and no settings.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from forebay_worker.kernels import fp8
from forebay_worker.kernels.fp8 import Fp8, Numbers


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values: each [blocks, block_size, K, D] for one layer, [layers, …] for all.

    Where they are e4m3, `scales` [2, K] float32, or [layers, 2, K], multiply what a head's keys and
    values hold.
    """

    keys: Tensor
    values: Tensor
    scales: Tensor | None = None

    @property
    def side_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """[K] of keys and of values, of one layer's cache."""
        return (None, None) if self.scales is None else (self.scales[0], self.scales[1])

    def layer(self, number: int) -> "KvCache":
        """One layer's cache of the whole model's."""
        scales = None if self.scales is None else self.scales[number]
        return KvCache(self.keys[number], self.values[number], scales)

    @torch.inference_mode()
    def poison(self, blocks: list[int]) -> None:
        """Fills blocks of all layers with NaN: all ones, in any type of floating point numbers."""
        at = torch.tensor(blocks, device=self.keys.device)
        for each in (self.keys, self.values):
            each.view(torch.uint8).index_fill_(1, at, 0xFF)


@dataclass(frozen=True, slots=True)
class Step:
    """What the layers read of a step: `num_decodes` rows of one token first, then prefill chunks.

    Attributes:
        token_ids, positions, kv_slots: [T] int64; kv_slots is where each token's KV goes.
        starts: [R + 1] int64, row r owns tokens starts[r] to starts[r + 1].
        kv_lens: [R] int64, positions that row r's last token attends to, itself included.
        block_tables: [R, most blocks of a row] int64, padded with 0.
        logits_at: [S] int64, the last token of each sampling row.
        host_starts, host_kv_lens: the same as host integers, for loops over rows.
        adapters: [T] int64, the number of each token's adapter, -1 without one; None where no token
            has any.
    """

    num_decodes: int
    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    starts: Tensor
    kv_lens: Tensor
    block_tables: Tensor
    logits_at: Tensor
    host_starts: list[int]
    host_kv_lens: list[int]
    adapters: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A layer's experts: router [E, hidden], gate_up [E, 2 I, hidden], down [E, hidden, I], which
    is E gated MLPs of I. Each token takes `per_token` of them; `renormalise`: with weights that add
    up to 1. Of e4m3 a matrix has the scales of the experts' rows one after another: [1 or groups,
    E * rows]; it meets any number of rows as they are."""

    router: Tensor
    gate_up: Numbers
    down: Numbers
    per_token: int
    renormalise: bool


@dataclass(frozen=True, slots=True)
class LowRank:
    """What N adapters add to one product: scale * B (A x), of rank R at most; smaller ones are
    filled up with zeros.

    a: [N, parts, R, K], a matrix for each of the packed product's parts. b: [N, R, rows], each
    transposed and with the scale in it, the rows of the parts one after another, so many as `sizes`
    says.
    """

    a: Tensor
    b: Tensor
    sizes: tuple[int, ...]


class Adjustments(NamedTuple):
    """How the logits of R rows are adjusted, as one tensor each.

    Attributes:
        places: [R] int32, each row among the raw logits.
        newest: [R] int32, where the row's newest token is, which its words leave out; -1: nowhere.
        edges: [R, 5] int32, where the row's words begin: banned ids; biased ones; those asked or
            said; bits of those allowed, which are all where it has none; and where they end.
        repetition, presence, frequency: [R] float32.
        words: [any] int64. An id is in the lower half of its word; in the upper half is a bias as a
            float32, or how many times the id was said. Bit t % 64 of the t // 64th word of bits: t
            is allowed.
    """

    places: Tensor
    newest: Tensor
    edges: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    words: Tensor


def adjust(logits: Tensor, token_ids: Tensor, rows: Adjustments, out: Tensor) -> None:
    """Adjusted logits of each row to `out` [R, V] float32, from raw ones [any, V]; the newest
    tokens are in `token_ids` [any] int64."""
    for row, own in enumerate(out):
        own.copy_(logits[int(rows.places[row])].float())
        _adjust_row(own, token_ids, row, rows)


def _adjust_row(own: Tensor, token_ids: Tensor, row: int, rows: Adjustments) -> None:
    banned_at, biased_at, said_at, bits_at, end = rows.edges[row].tolist()
    if end > bits_at:
        ids = torch.arange(len(own), device=own.device)
        bits = rows.words[bits_at:end][ids // 64] >> (ids % 64) & 1
        own.masked_fill_(bits == 0, -math.inf)
    own[rows.words[banned_at:biased_at]] = -math.inf
    biased, said = rows.words[biased_at:said_at], rows.words[said_at:bits_at]
    own[biased & 0xFFFFFFFF] += (biased >> 32).to(torch.int32).view(torch.float32)
    times = torch.full_like(own, -1)  # -1: neither asked nor said
    times[said & 0xFFFFFFFF] = (said >> 32).to(own.dtype)
    if (newest := int(rows.newest[row])) >= 0:
        token = token_ids[newest]
        times[token] = times[token].clamp(min=0) + 1
    repetition = rows.repetition[row]
    repelled = torch.where(own > 0, own / repetition, own * repetition)
    own.copy_(torch.where(times >= 0, repelled, own))
    punished = own - (rows.presence[row] + rows.frequency[row] * times)
    own.copy_(torch.where(times > 0, punished, own))


def read_logprobs(
    logits: Tensor, tokens: Tensor, places: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows `places` [R] of raw logits [any, V]: the log-probability of the row's chosen token,
    of `tokens` [any], and the `most` likeliest with their ids, [R], [R, most] and [R, most]; of
    equal ones the lowest id first, NaN before all."""
    rows = logits[places].float()
    total = rows.logsumexp(-1, keepdim=True)
    best, ids = rows.sort(dim=-1, descending=True, stable=True)
    own = rows.gather(1, tokens[places][:, None])
    return (own - total)[:, 0], best[:, :most] - total, ids[:, :most]


def adapt(out: Tensor, x: Tensor, low: LowRank, adapters: Tensor) -> Tensor:
    """Adds to each row of out [T, rows] what its adapter makes of its row of x [T, K], in place;
    those of -1 stay as they are, to the bit."""
    for number in adapters.unique().tolist():
        if number < 0:
            continue
        at, start = (adapters == number).nonzero()[:, 0], 0
        for part, size in enumerate(low.sizes):
            columns = slice(start, start + size)
            delta = x[at] @ low.a[number, part].T @ low.b[number, :, columns]
            out[at, columns] += delta
            start += size
    return out


def linear(
    x: Tensor, weight: Numbers, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x [T, K] @ weight [N, K]^T + bias [N], written to `out` [T, N] where that is given.

    An e4m3 weight meets more than a few rows as e4m3, too.
    """
    if isinstance(weight, Fp8):
        if len(x) > fp8.FEW_ROWS:
            x = fp8.dequantize(fp8.quantize(x), x.dtype)
        weight = fp8.dequantize(weight, x.dtype)
    product = functional.linear(x, weight, bias)
    return product if out is None else out.copy_(product)


def norm_linear(
    x: Tensor,
    gain: Tensor,
    eps: float,
    weight: Numbers,
    bias: Tensor | None = None,
) -> Tensor:
    """linear(rms_norm(x))."""
    return linear(rms_norm(x, gain, eps), weight, bias)


def logits(
    x: Tensor, gain: Tensor, eps: float, weight: Tensor, out: Tensor | None = None
) -> Tensor:
    """The head: linear(rms_norm(x)), to `out` where that is given."""
    return linear(rms_norm(x, gain, eps), weight, None, out)


def norm_gate_up(
    x: Tensor,
    gain: Tensor,
    eps: float,
    weight: Numbers,
    bias: Tensor | None = None,
    *,
    for_fp8: bool = False,
) -> Tensor:
    """silu_mul(linear(rms_norm(x))): the first half of a gated MLP. `for_fp8`: the weight of the
    second half is e4m3, so that the result may be."""
    return silu_mul(norm_linear(x, gain, eps, weight, bias))


def linear_add(x: Numbers, weight: Numbers, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual + linear(x); may overwrite the residual."""
    x = fp8.dequantize(x, residual.dtype) if isinstance(x, Fp8) else x
    return residual + linear(x, weight, bias)


def route(logits: Tensor, per_token: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The `per_token` likeliest experts of each row of logits [T, E], of equal ones those of the
    lower number, and their weights: both [T, per_token], by weight. The softmax is float32."""
    found = torch.softmax(logits.float(), -1).sort(dim=-1, descending=True, stable=True)
    weights, chosen = found.values[:, :per_token], found.indices[:, :per_token]
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def sparse_mlp(residual: Tensor, gain: Tensor, eps: float, experts: ExpertWeights) -> Tensor:
    """residual + the weighted sum of the chosen experts' gated MLPs of rms_norm(residual). The sum
    is float32."""
    x = rms_norm(residual, gain, eps)
    weights, chosen = route(linear(x, experts.router), experts.per_token, experts.renormalise)
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        row, slot = (chosen == expert).nonzero(as_tuple=True)
        gated = silu_mul(linear(x[row], _of_expert(experts.gate_up, expert, x.dtype)))
        part = linear(gated, _of_expert(experts.down, expert, x.dtype))
        total.index_add_(0, row, part.float() * weights[row, slot, None])
    return residual + total.to(x.dtype)


def _of_expert(weight: Numbers, expert: int, dtype: torch.dtype) -> Tensor:
    """One expert's matrix [rows, columns]."""
    if not isinstance(weight, Fp8):
        return weight[expert]
    values = weight.values[expert]
    rows = slice(expert * len(values), (expert + 1) * len(values))
    return fp8.dequantize(Fp8(values, weight.scale[:, rows]), dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, D], half-split layout; cos and sin are [T, 1, D / 2]."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def rope_store(
    qkv: Tensor,
    step: Step,
    cos_sin: Tensor,
    cache: KvCache,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Splits qkv [T, (H + 2K) * D], norms q and k heads where weights are given, rotates them and
    writes keys and values into the cache. cos_sin is [positions, D] float32, cosines first.

    Returns q [T, H, D].
    """
    kv_heads, head_dim = cache.keys.shape[-2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    cos, sin = cos_sin[step.positions].to(qkv.dtype).unsqueeze(1).chunk(2, dim=-1)
    k_scale, v_scale = cache.side_scales
    _write(cache.keys, step.kv_slots, rotate(k, cos, sin), k_scale)
    _write(cache.values, step.kv_slots, v, v_scale)
    return rotate(q, cos, sin)


def _write(side: Tensor, slots: Tensor, x: Tensor, scale: Tensor | None) -> None:
    """x [T, K, D] into the cache's keys or values."""
    if scale is not None:  # as bytes, since torch does not index e4m3 everywhere
        x = fp8.encode(x.float() / scale[:, None]).view(torch.uint8)
        side = side.view(torch.uint8)
    side.view(-1, *side.shape[-2:])[slots] = x


def _read(side: Tensor, at: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[…, K, D] of the cache's keys or values by their first index."""
    if scale is None:
        return side[at]
    return (side.view(torch.uint8)[at].view(fp8.E4M3).float() * scale[:, None]).to(dtype)


def paged_attention(q: Tensor, step: Step, cache: KvCache) -> Tensor:
    """Causal attention of q [T, H, D] over the rows' cached positions. Returns [T, H * D].

    A row reads no slot but its own filled ones, so what another sequence left in the cache (a NaN,
    say) can never reach it, not even through a masked position.
    """
    out = torch.empty_like(q)
    if step.num_decodes:
        out[: step.num_decodes] = _decode(q[: step.num_decodes], step, cache)
    for row in range(step.num_decodes, len(step.host_kv_lens)):
        start, end = step.host_starts[row : row + 2]
        out[start:end] = _chunk(q[start:end], step.block_tables[row], step.host_kv_lens[row], cache)
    return out.view(len(q), -1)


def _decode(q: Tensor, step: Step, cache: KvCache) -> Tensor:
    """One query token per row: [R, H, D] over a padded gather of each row's positions."""
    block_size, kv_heads, head_dim = cache.keys.shape[1:]
    rows = step.num_decodes
    lens = step.kv_lens[:rows, None]
    columns = torch.arange(max(step.host_kv_lens[:rows]), device=q.device)
    at = torch.minimum(columns, lens - 1)
    slots = step.block_tables.gather(1, at // block_size) * block_size + at % block_size
    k_scale, v_scale = cache.side_scales
    keys = _read(cache.keys.view(-1, kv_heads, head_dim), slots, k_scale, q.dtype).transpose(1, 2)
    values = _read(cache.values.view(-1, kv_heads, head_dim), slots, v_scale, q.dtype)
    values = values.transpose(1, 2)
    scores = q.view(rows, kv_heads, -1, head_dim) @ keys.transpose(2, 3) / math.sqrt(head_dim)
    scores.masked_fill_((columns >= lens)[:, None, None, :], -math.inf)
    return (scores.float().softmax(-1).to(q.dtype) @ values).view(q.shape)


def _chunk(q: Tensor, block_table: Tensor, kv_len: int, cache: KvCache) -> Tensor:
    """The last len(q) of one row's kv_len positions, [t, H, D], each over those up to itself."""
    block_size, kv_heads, head_dim = cache.keys.shape[1:]
    blocks = block_table[: -(-kv_len // block_size)]
    k_scale, v_scale = cache.side_scales
    keys = _read(cache.keys, blocks, k_scale, q.dtype).view(-1, kv_heads, head_dim)[:kv_len]
    values = _read(cache.values, blocks, v_scale, q.dtype).view(-1, kv_heads, head_dim)[:kv_len]
    groups = q.shape[1] // kv_heads
    shape = (kv_heads, groups, kv_len, head_dim)
    mask = None
    if kv_len > len(q):
        mask = torch.ones(len(q), kv_len, dtype=torch.bool, device=q.device).tril(kv_len - len(q))
    out = functional.scaled_dot_product_attention(
        q.view(-1, kv_heads, groups, head_dim).permute(1, 2, 0, 3),
        keys.transpose(0, 1).unsqueeze(1).expand(shape),
        values.transpose(0, 1).unsqueeze(1).expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return out.permute(2, 0, 1, 3).reshape(q.shape)
