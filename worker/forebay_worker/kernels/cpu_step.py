"""A whole step of the dense decoder on the CPU: one compiled call per thread, ids to logits.

Why: 30 layers of torch calls for one token cost more in dispatch than in arithmetic, and weights
that the checkpoint stores in 16 bits are read as such (half the bytes) and widened in registers,
which changes no bit of the model. Every thread runs `run_step`; the work of a phase is cut into
units that the threads take one by one, so a thread that loses its core for a while delays a unit
and not a half; between phases all threads meet. A unit's result does not depend on who computes it.

`reference.py` and `models.decoder` are its twin. It knows no request and no file.
"""

# pyright: basic
from typing import NamedTuple

import numpy as np

from forebay_worker.kernels.cpu_math import (
    dot,
    exp,
    four_dots,
    kernel,
    meet,
    rms_norm,
    take,
)
from forebay_worker.kernels.cpu_tile import PANEL, tiles, widen

TILE_TOKENS = 32  # of a prompt that share one reading of the keys and values
PHASES_PER_LAYER = 10  # of which 4 are for adapters, where any token has one
PHASES_AROUND = 2


class Weights(NamedTuple):
    """Arrays of L layers; matrices lie in panels as `cpu_tile` takes them, the rest float32.

    A matrix [N, K] is [N / PANEL, K, PANEL], its last panel filled up with zeros, as is a bias.
    A bias or head norm that the family lacks has no columns.
    """

    embedding: np.ndarray  # matrix [V, hidden]
    attention_norm: np.ndarray  # [L, hidden]
    qkv: np.ndarray  # L matrices [(H + 2K) * D, hidden]
    qkv_bias: np.ndarray
    q_norm: np.ndarray  # [L, D]
    k_norm: np.ndarray
    output: np.ndarray  # L matrices [hidden, H * D]
    output_bias: np.ndarray
    mlp_norm: np.ndarray  # [L, hidden]
    gate_up: np.ndarray  # 2L matrices [inner, hidden], as [L, panels of both, hidden, PANEL]
    gate_up_bias: np.ndarray
    down: np.ndarray  # L matrices [hidden, inner]
    down_bias: np.ndarray
    final_norm: np.ndarray  # [hidden]
    head: np.ndarray  # matrix [V, hidden]
    cos_sin: np.ndarray  # [positions, D], cosines first


class LowRanks(NamedTuple):
    """What N adapters of rank R, a multiple of 4, add to a product of each layer, as
    `reference.LowRank` has it; part p is of the columns starts[p] to starts[p + 1] of what the
    product gives."""

    a: np.ndarray  # [L, N, parts, R, K] float32
    b: np.ndarray  # [L, N, R, columns]
    starts: np.ndarray  # [parts + 1] int64


class Adapters(NamedTuple):
    """By product; of no adapters, empty."""

    qkv: LowRanks
    output: LowRanks
    gate_up: LowRanks
    down: LowRanks


class Inputs(NamedTuple):
    """The step's T tokens, all int64; `owners` is the row of each, `block_tables` is by row.
    `adapters` is the number of each token's adapter, `adapted` the tokens that have one.

    A tile is a unit of attention: its first token, its count of adjacent tokens of one row, the
    first of its KV heads and the one after its last; that of several tokens has one head.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    kv_slots: np.ndarray
    owners: np.ndarray
    block_tables: np.ndarray
    logits_at: np.ndarray
    tiles: np.ndarray  # [units, 4]
    adapters: np.ndarray
    adapted: np.ndarray


class Buffers(NamedTuple):
    """Scratch of one step, float32; `units` and `arrivals` are int64 zeros, one per phase.

    The widths of what a matrix gives are filled up to whole panels.
    """

    hidden: np.ndarray  # [T, hidden]
    normed: np.ndarray  # [threads, T, hidden]
    qkv: np.ndarray  # [T, (H + 2K) * D]
    mixed: np.ndarray  # [T, H * D]
    gate_up: np.ndarray  # [T, 2 * inner]
    inner: np.ndarray  # [T, inner]
    scores: np.ndarray  # [threads, K, H / K, longest row]
    tile_scores: np.ndarray  # [threads, H / K * TILE_TOKENS, longest row]
    tile_keys: np.ndarray  # [threads, D * PANEL]
    last: np.ndarray  # [threads, S, hidden]
    logits: np.ndarray  # [S, V]
    units: np.ndarray
    arrivals: np.ndarray


def make_buffers(
    weights: Weights, keys: np.ndarray, tokens: int, samples: int, longest: int, threads: int
) -> Buffers:
    """Scratch for a step of these sizes over a cache like `keys`."""
    layers = weights.qkv.shape[0]
    heads, head_dim = keys.shape[3:]
    mixed = weights.output.shape[2]
    hidden, inner = _width(weights.output), _width(weights.gate_up) // 2
    group = mixed // (heads * head_dim)
    longest = -(-longest // PANEL) * PANEL
    phases = layers * PHASES_PER_LAYER + PHASES_AROUND

    def room(*shape: int) -> np.ndarray:
        return np.empty(shape, np.float32)

    return Buffers(
        hidden=room(tokens, hidden),
        normed=room(threads, tokens, hidden),
        qkv=room(tokens, _width(weights.qkv)),
        mixed=room(tokens, mixed),
        gate_up=room(tokens, 2 * inner),
        inner=room(tokens, inner),
        scores=room(threads, heads, group, longest),
        tile_scores=room(threads, group * TILE_TOKENS, longest),
        tile_keys=room(threads, head_dim * PANEL),
        last=room(threads, samples, hidden),
        logits=room(samples, _width(weights.head)),
        units=np.zeros(phases, np.int64),
        arrivals=np.zeros(phases, np.int64),
    )


def _width(matrices: np.ndarray) -> int:
    return matrices.shape[-3] * PANEL


@kernel
def run_step(weights, adapters, inputs, keys, values, buffers, eps, thread, threads):
    """One thread's part of a step. keys and values are [L, blocks, block_size, K, D] float32.

    Returns when all threads are done: `buffers.logits` is complete then. Where no token has an
    adapter, no phase is there for them.
    """
    w, units, arrivals, hidden = weights, buffers.units, buffers.arrivals, buffers.hidden
    normed, qkv, mixed = buffers.normed[thread], buffers.qkv, buffers.mixed
    inner, low, adapts = buffers.inner, adapters, inputs.adapted.shape[0] > 0
    phase = 0
    _embed(inputs.token_ids, w.embedding, hidden, units, phase)
    meet(arrivals, phase, threads)
    for at in range(w.qkv.shape[0]):
        _norm_rows(hidden, w.attention_norm[at], eps, normed)
        phase += 1
        _linear(normed, w.qkv[at], w.qkv_bias[at], qkv, False, units, phase)
        meet(arrivals, phase, threads)
        if adapts:
            phase += 1
            _adapt(normed, low.qkv, at, inputs, qkv, inner, False, units, phase)
            meet(arrivals, phase, threads)
        phase += 1
        _rope_store(w, at, inputs, keys[at], values[at], qkv, eps, units, phase)
        meet(arrivals, phase, threads)
        phase += 1
        _attention(inputs, keys[at], values[at], buffers, thread, phase)
        meet(arrivals, phase, threads)
        phase += 1
        _linear(mixed, w.output[at], w.output_bias[at], hidden, True, units, phase)
        meet(arrivals, phase, threads)
        if adapts:
            phase += 1
            _adapt(mixed, low.output, at, inputs, hidden, inner, False, units, phase)
            meet(arrivals, phase, threads)
        _norm_rows(hidden, w.mlp_norm[at], eps, normed)
        phase += 1
        _gated(normed, w.gate_up[at], w.gate_up_bias[at], buffers, units, phase)
        meet(arrivals, phase, threads)
        if adapts:
            phase += 1
            _adapt(normed, low.gate_up, at, inputs, buffers.gate_up, inner, True, units, phase)
            meet(arrivals, phase, threads)
        phase += 1
        _linear(inner, w.down[at], w.down_bias[at], hidden, True, units, phase)
        meet(arrivals, phase, threads)
        if adapts:
            phase += 1
            _adapt(inner, low.down, at, inputs, hidden, inner, False, units, phase)
            meet(arrivals, phase, threads)
    last = buffers.last[thread]
    for row in range(last.shape[0]):
        rms_norm(hidden[inputs.logits_at[row]], w.final_norm, eps, last[row])
    phase += 1
    _linear(last, w.head, w.final_norm[:0], buffers.logits, False, units, phase)
    meet(arrivals, phase, threads)


@kernel
def _embed(token_ids, embedding, hidden, units, phase):
    while True:
        token = take(units, phase)
        if token >= token_ids.shape[0]:
            return
        panel, row = token_ids[token] // PANEL, token_ids[token] % PANEL
        for k in range(embedding.shape[1]):
            hidden[token, k] = widen(embedding[panel, k, row])


@kernel
def _norm_rows(x, weight, eps, out):
    """Every thread norms all rows for itself: 16 rows of 576 take 2 us, as a meeting would."""
    for row in range(x.shape[0]):
        rms_norm(x[row], weight, eps, out[row])


@kernel
def _linear(x, w, bias, out, add, units, phase):
    """out = x @ w.T + bias, or added to out. A unit is a panel."""
    while True:
        panel = take(units, phase)
        if panel >= w.shape[0]:
            return
        _panel_product(x, w, bias, panel, out, add)


@kernel
def _panel_product(x, w, bias, panel, out, add):
    depth, low, width = w.shape[1], panel * PANEL, out.shape[1]
    start = panel * depth * PANEL
    step = x.shape[1]
    tiles(x.shape[0], x, 0, step, w.reshape(-1), start, PANEL, depth, out, low, width, add)
    if bias.shape[0] > 0:
        for row in range(out.shape[0]):
            for at in range(low, low + PANEL):
                out[row, at] += bias[at]


@kernel
def _gated(x, w, bias, buffers, units, phase):
    """inner = silu(gate) * up: a unit is a panel of the gate and the same of the up."""
    gate_up, inner = buffers.gate_up, buffers.inner
    size = inner.shape[1]
    while True:
        panel = take(units, phase)
        low = panel * PANEL
        if low >= size:
            return
        _panel_product(x, w, bias, panel, gate_up, False)
        _panel_product(x, w, bias, size // PANEL + panel, gate_up, False)
        high = low + PANEL
        for row in range(inner.shape[0]):
            gate = gate_up[row, low:high]
            _silu_mul(gate, gate_up[row, size + low : size + high], inner[row, low:high])


@kernel
def _adapt(x, low, layer, inputs, out, inner, gated, units, phase):
    """out += B (A x) of the tokens that have an adapter; `gated`: out is the gate and the up, and
    their product into inner is made again. A unit is a token."""
    size = inner.shape[1]
    while True:
        unit = take(units, phase)
        if unit >= inputs.adapted.shape[0]:
            return
        token = inputs.adapted[unit]
        adapter, row = inputs.adapters[token], out[token]
        _add_low_rank(x[token], low.a[layer, adapter], low.b[layer, adapter], low.starts, row)
        if gated:
            _silu_mul(row[:size], row[size:], inner[token])


@kernel
def _add_low_rank(x, a, b, starts, out):
    """out += (x A^T) B by part, four ranks at a time: a is [parts, R, K], b [R, columns]."""
    known = x[: a.shape[2]]
    for part in range(a.shape[0]):
        first, end = starts[part], starts[part + 1]
        for r in range(0, a.shape[1], 4):
            rows, columns = a[part, r : r + 4], b[r : r + 4, first:end]
            share = four_dots(known, rows[0], rows[1], rows[2], rows[3])
            _add_four(out[first:end], share, columns[0], columns[1], columns[2], columns[3])


@kernel
def _silu_mul(gate, up, out):
    for at in range(out.shape[0]):
        out[at] = gate[at] / (np.float32(1) + exp(-gate[at])) * up[at]


@kernel
def _rope_store(weights, layer, inputs, keys, values, qkv, eps, units, phase):
    """Norms and rotates q and k in place, and puts k and v into the cache. A unit is a token."""
    block_size, kv_heads, head_dim = keys.shape[1:]
    k_start = weights.output.shape[2]
    v_start = k_start + kv_heads * head_dim
    q_norm, k_norm = weights.q_norm[layer], weights.k_norm[layer]
    while True:
        token = take(units, phase)
        if token >= qkv.shape[0]:
            return
        row = qkv[token]
        angles = weights.cos_sin[inputs.positions[token]]
        for at in range(0, v_start, head_dim):
            head = row[at : at + head_dim]
            if q_norm.shape[0] > 0:
                rms_norm(head, q_norm if at < k_start else k_norm, eps, head)
            _rotate(head, angles)
        slot = inputs.kv_slots[token]
        k_slot = keys[slot // block_size, slot % block_size]
        v_slot = values[slot // block_size, slot % block_size]
        for head in range(kv_heads):
            for at in range(head_dim):
                k_slot[head, at] = row[k_start + head * head_dim + at]
                v_slot[head, at] = row[v_start + head * head_dim + at]


@kernel
def _rotate(head, angles):
    half = head.shape[0] // 2
    for at in range(half):
        left, right = head[at], head[half + at]
        cos, sin = angles[at], angles[half + at]
        head[at] = left * cos - right * sin
        head[half + at] = right * cos + left * sin


@kernel
def _attention(inputs, keys, values, buffers, thread, phase):
    """A unit is a tile. All heads of a position lie together in the cache, so one token with all
    of them reads it as one stream. No slot is read but those up to the last token's own position,
    so nothing that another sequence left in the cache can reach a token.
    """
    while True:
        unit = take(buffers.units, phase)
        if unit >= inputs.tiles.shape[0]:
            return
        token, count = inputs.tiles[unit, 0], inputs.tiles[unit, 1]
        first, last = inputs.tiles[unit, 2], inputs.tiles[unit, 3]
        table = inputs.block_tables[inputs.owners[token]]
        length = inputs.positions[token] + 1
        if count > 1:
            _attend_many(token, count, first, length, table, keys, values, buffers, thread)
        else:
            _attend_one(token, first, last, length, table, keys, values, buffers, thread)


@kernel
def _attend_many(token, count, head, length, table, keys, values, buffers, thread):
    """Adjacent tokens with one KV head; the first of them sees `length` positions.

    Row query * TILE_TOKENS + t of the scores is that of token t. Scores past a token's own position
    become zeros, so that all tokens of the tile take the values in one product.
    """
    qkv, mixed = buffers.qkv, buffers.mixed
    scores, packed = buffers.tile_scores[thread], buffers.tile_keys[thread]
    block_size, kv_heads, head_dim = keys.shape[1:]
    group, longest = scores.shape[0] // TILE_TOKENS, scores.shape[1]
    end, width, step = length + count - 1, mixed.shape[1], qkv.shape[1]
    for start in range(0, end, PANEL):
        for at in range(start, min(start + PANEL, end)):
            key = keys[table[at // block_size], at % block_size, head]
            for k in range(head_dim):
                packed[k * PANEL + at - start] = key[k]
        for query in range(group):
            x_at = token * step + (head * group + query) * head_dim
            at = query * TILE_TOKENS * longest + start
            tiles(count, qkv, x_at, step, packed, 0, PANEL, head_dim, scores, at, longest, False)
    for query in range(group):
        for t in range(count):
            row = scores[query * TILE_TOKENS + t]
            _softmax(row, length + t, head_dim)
            row[length + t : end] = 0
    flat, slot = values.reshape(-1), kv_heads * head_dim
    for start in range(0, end, block_size):
        depth = min(block_size, end - start)
        w_at = table[start // block_size] * block_size * slot + head * head_dim
        for query in range(group):
            x_at = query * TILE_TOKENS * longest + start
            for column in range(0, head_dim, PANEL):
                w, at = w_at + column, token * width + (head * group + query) * head_dim + column
                add = start > 0
                tiles(count, scores, x_at, longest, flat, w, slot, depth, mixed, at, width, add)


@kernel
def _attend_one(token, first, last, length, table, keys, values, buffers, thread):
    kv_heads, head_dim = keys.shape[2:]
    scores, mixed = buffers.scores[thread], buffers.mixed
    queries = buffers.qkv[token, : mixed.shape[1]].reshape(kv_heads, -1, head_dim)
    out = mixed[token].reshape(kv_heads, -1, head_dim)
    _score(queries, keys, table, first, last, length, scores)
    for head in range(first, last):
        for query in range(scores.shape[1]):
            _softmax(scores[head, query], length, head_dim)
    _mix(scores, values, table, first, last, length, out)


@kernel
def _score(queries, keys, table, first, last, length, scores):
    """scores[head, query] of the heads first..last over `length` positions, four at a time."""
    block_size = keys.shape[1]
    for start in range(0, length, block_size):
        block = keys[table[start // block_size]]
        count = min(block_size, length - start)
        fours = count // 4 * 4
        for at in range(0, fours, 4):
            r0, r1, r2, r3 = block[at], block[at + 1], block[at + 2], block[at + 3]
            for head in range(first, last):
                for query in range(queries.shape[1]):
                    row = scores[head, query]
                    a, b, c, d = four_dots(
                        queries[head, query], r0[head], r1[head], r2[head], r3[head]
                    )
                    row[start + at] = a
                    row[start + at + 1] = b
                    row[start + at + 2] = c
                    row[start + at + 3] = d
        for at in range(fours, count):
            for head in range(first, last):
                for query in range(queries.shape[1]):
                    scores[head, query, start + at] = dot(queries[head, query], block[at, head])


@kernel
def _softmax(row, length, head_dim):
    """Of the first `length` scores of a row, divided by the root of head_dim first."""
    scale = np.float32(1 / np.sqrt(head_dim))
    top = row[0]
    for at in range(length):
        top = max(top, row[at])
    total = np.float32(0)
    for at in range(length):
        row[at] = exp((row[at] - top) * scale)
        total += row[at]
    share = np.float32(1) / total
    for at in range(length):
        row[at] *= share


@kernel
def _mix(scores, values, table, first, last, length, out):
    """out[head, query] = the sum of the values by their scores."""
    block_size = values.shape[1]
    out[first:last] = 0
    for start in range(0, length, block_size):
        block = values[table[start // block_size]]
        count = min(block_size, length - start)
        fours = count // 4 * 4
        for at in range(0, fours, 4):
            r0, r1, r2, r3 = block[at], block[at + 1], block[at + 2], block[at + 3]
            for head in range(first, last):
                for query in range(out.shape[1]):
                    share = scores[head, query, start + at : start + at + 4]
                    _add_four(out[head, query], share, r0[head], r1[head], r2[head], r3[head])
        for at in range(fours, count):
            for head in range(first, last):
                for query in range(out.shape[1]):
                    _add(out[head, query], scores[head, query, start + at], block[at, head])


@kernel
def _add(out, share, value):
    for k in range(out.shape[0]):
        out[k] += share * value[k]


@kernel
def _add_four(out, share, v0, v1, v2, v3):
    a, b, c, d = share[0], share[1], share[2], share[3]
    for k in range(out.shape[0]):
        out[k] += a * v0[k] + b * v1[k] + c * v2[k] + d * v3[k]
