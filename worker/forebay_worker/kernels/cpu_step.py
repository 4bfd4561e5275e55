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
    product,
    rms_norm,
    take,
    widen_row,
)

PANEL = 32  # rows of a weight matrix per unit: 36 KB of 16 bits at 576 columns, half of an L2
MANY_TOKENS = 8
PHASES_PER_LAYER = 6
PHASES_AROUND = 2


class Weights(NamedTuple):
    """Arrays of L layers; matrices are as `cpu_math.widen` takes them, the rest float32.

    A bias or head norm that the family lacks has no columns.
    """

    embedding: np.ndarray  # [V, hidden]
    attention_norm: np.ndarray  # [L, hidden]
    qkv: np.ndarray  # [L, (H + 2K) * D, hidden]
    qkv_bias: np.ndarray
    q_norm: np.ndarray  # [L, D]
    k_norm: np.ndarray
    output: np.ndarray  # [L, hidden, H * D]
    output_bias: np.ndarray
    mlp_norm: np.ndarray  # [L, hidden]
    gate_up: np.ndarray  # [L, 2 * inner, hidden]
    gate_up_bias: np.ndarray
    down: np.ndarray  # [L, hidden, inner]
    down_bias: np.ndarray
    final_norm: np.ndarray  # [hidden]
    head: np.ndarray  # [V, hidden]
    cos_sin: np.ndarray  # [positions, D], cosines first


class Inputs(NamedTuple):
    """The step's T tokens, all int64; `owners` is the row of each, `block_tables` is by row."""

    token_ids: np.ndarray
    positions: np.ndarray
    kv_slots: np.ndarray
    owners: np.ndarray
    block_tables: np.ndarray
    logits_at: np.ndarray


class Buffers(NamedTuple):
    """Scratch of one step, float32; `units` and `arrivals` are int64 zeros, one per phase."""

    hidden: np.ndarray  # [T, hidden]
    normed: np.ndarray  # [threads, T, hidden]
    qkv: np.ndarray  # [T, (H + 2K) * D]
    mixed: np.ndarray  # [T, H * D]
    gate_up: np.ndarray  # [T, 2 * inner]
    inner: np.ndarray  # [T, inner]
    scores: np.ndarray  # [threads, K, H / K, longest row]
    panel: np.ndarray  # [threads, PANEL, widest]
    last: np.ndarray  # [threads, S, hidden]
    logits: np.ndarray  # [S, V]
    units: np.ndarray
    arrivals: np.ndarray


def make_buffers(
    weights: Weights, keys: np.ndarray, tokens: int, samples: int, longest: int, threads: int
) -> Buffers:
    """Scratch for a step of these sizes over a cache like `keys`."""
    layers, qkv, hidden = weights.qkv.shape
    heads, head_dim = keys.shape[3:]
    inner = weights.down.shape[2]
    phases = layers * PHASES_PER_LAYER + PHASES_AROUND

    def room(*shape: int) -> np.ndarray:
        return np.empty(shape, np.float32)

    return Buffers(
        hidden=room(tokens, hidden),
        normed=room(threads, tokens, hidden),
        qkv=room(tokens, qkv),
        mixed=room(tokens, weights.output.shape[2]),
        gate_up=room(tokens, 2 * inner),
        inner=room(tokens, inner),
        scores=room(threads, heads, weights.output.shape[2] // (heads * head_dim), longest),
        panel=room(threads, PANEL, max(hidden, inner, weights.output.shape[2])),
        last=room(threads, samples, hidden),
        logits=room(samples, weights.head.shape[0]),
        units=np.zeros(phases, np.int64),
        arrivals=np.zeros(phases, np.int64),
    )


@kernel
def run_step(weights, inputs, keys, values, buffers, eps, thread, threads):
    """One thread's part of a step. keys and values are [L, blocks, block_size, K, D] float32.

    Returns when all threads are done: `buffers.logits` is complete then.
    """
    w, units, arrivals, hidden = weights, buffers.units, buffers.arrivals, buffers.hidden
    normed, panel, scores = buffers.normed[thread], buffers.panel[thread], buffers.scores[thread]
    qkv, mixed = buffers.qkv, buffers.mixed
    phase = 0
    _embed(inputs.token_ids, w.embedding, hidden, units, phase)
    meet(arrivals, phase, threads)
    for at in range(w.qkv.shape[0]):
        _norm_rows(hidden, w.attention_norm[at], eps, normed)
        phase += 1
        _linear(normed, w.qkv[at], w.qkv_bias[at], qkv, False, panel, units, phase)
        meet(arrivals, phase, threads)
        phase += 1
        _rope_store(w, at, inputs, keys[at], values[at], qkv, eps, units, phase)
        meet(arrivals, phase, threads)
        phase += 1
        _attention(inputs, keys[at], values[at], qkv, scores, mixed, units, phase)
        meet(arrivals, phase, threads)
        phase += 1
        _linear(mixed, w.output[at], w.output_bias[at], hidden, True, panel, units, phase)
        meet(arrivals, phase, threads)
        _norm_rows(hidden, w.mlp_norm[at], eps, normed)
        phase += 1
        _gated(normed, w.gate_up[at], w.gate_up_bias[at], buffers, panel, units, phase)
        meet(arrivals, phase, threads)
        phase += 1
        _linear(buffers.inner, w.down[at], w.down_bias[at], hidden, True, panel, units, phase)
        meet(arrivals, phase, threads)
    last = buffers.last[thread]
    for row in range(last.shape[0]):
        rms_norm(hidden[inputs.logits_at[row]], w.final_norm, eps, last[row])
    phase += 1
    _linear(last, w.head, w.final_norm[:0], buffers.logits, False, panel, units, phase)
    meet(arrivals, phase, threads)


@kernel
def _embed(token_ids, embedding, hidden, units, phase):
    while True:
        token = take(units, phase)
        if token >= token_ids.shape[0]:
            return
        widen_row(embedding[token_ids[token]], hidden[token])


@kernel
def _norm_rows(x, weight, eps, out):
    """Every thread norms all rows for itself: 16 rows of 576 take 2 us, as a meeting would."""
    for row in range(x.shape[0]):
        rms_norm(x[row], weight, eps, out[row])


@kernel
def _linear(x, w, bias, out, add, panel, units, phase):
    """out = x @ w.T + bias, or added to out."""
    while True:
        low = take(units, phase) * PANEL
        if low >= w.shape[0]:
            return
        high = min(low + PANEL, w.shape[0])
        _panel_product(x, w, low, high, out, add, panel)
        _add_bias(bias, low, high, out)


@kernel
def _panel_product(x, w, low, high, out, add, panel):
    """out[:, low:high] = x @ w[low:high].T. Many tokens share one widening of the panel: 128 by 576
    by 3,072 runs at 71 GF/s on one Zen 3 core, 64 when each tile of 4 tokens widens for itself."""
    if x.shape[0] < MANY_TOKENS:
        product(x, w, low, high, out, low, add)
        return
    for row in range(low, high):
        widen_row(w[row], panel[row - low])
    product(x, panel, 0, high - low, out, low, add)


@kernel
def _add_bias(bias, low, high, out):
    if bias.shape[0] > 0:
        for row in range(out.shape[0]):
            for at in range(low, high):
                out[row, at] += bias[at]


@kernel
def _gated(x, w, bias, buffers, panel, units, phase):
    """inner = silu(gate) * up: a unit is a panel of the gate's rows and the same of the up's."""
    gate_up, inner = buffers.gate_up, buffers.inner
    size = inner.shape[1]
    while True:
        low = take(units, phase) * PANEL
        if low >= size:
            return
        high = min(low + PANEL, size)
        _panel_product(x, w, low, high, gate_up, False, panel)
        _panel_product(x, w, size + low, size + high, gate_up, False, panel)
        _add_bias(bias, low, high, gate_up)
        _add_bias(bias, size + low, size + high, gate_up)
        for row in range(inner.shape[0]):
            gate = gate_up[row, low:high]
            _silu_mul(gate, gate_up[row, size + low : size + high], inner[row, low:high])


@kernel
def _silu_mul(gate, up, out):
    for at in range(out.shape[0]):
        out[at] = gate[at] / (np.float32(1) + exp(-gate[at])) * up[at]


@kernel
def _rope_store(weights, layer, inputs, keys, values, qkv, eps, units, phase):
    """Norms and rotates q and k in place, and puts k and v into the cache. A unit is a token."""
    block_size, kv_heads, head_dim = keys.shape[1:]
    k_start = qkv.shape[1] - 2 * kv_heads * head_dim
    v_start = qkv.shape[1] - kv_heads * head_dim
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
def _attention(inputs, keys, values, qkv, scores, mixed, units, phase):
    """A unit is a token with all KV heads, or with one when few tokens must feed all threads.

    All heads of a position lie together in the cache, so the first way reads it as one stream. No
    slot is read but those up to the token's own position, so nothing that another sequence left in
    the cache can reach it.
    """
    kv_heads, head_dim = keys.shape[2:]
    heads = kv_heads if qkv.shape[0] >= MANY_TOKENS else 1
    while True:
        unit = take(units, phase)
        token, first = unit * heads // kv_heads, unit * heads % kv_heads
        if token >= qkv.shape[0]:
            return
        table = inputs.block_tables[inputs.owners[token]]
        length = inputs.positions[token] + 1
        queries = qkv[token, : mixed.shape[1]].reshape(kv_heads, -1, head_dim)
        out = mixed[token].reshape(kv_heads, -1, head_dim)
        _score(queries, keys, table, first, first + heads, length, scores)
        for head in range(first, first + heads):
            _softmax(scores[head], length)
        _mix(scores, values, table, first, first + heads, length, out)


@kernel
def _score(queries, keys, table, first, last, length, scores):
    """scores[head, query] of the heads first..last over `length` positions, four at a time."""
    block_size = keys.shape[1]
    scale = np.float32(1 / np.sqrt(queries.shape[2]))
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
                    row[start + at] = a * scale
                    row[start + at + 1] = b * scale
                    row[start + at + 2] = c * scale
                    row[start + at + 3] = d * scale
        for at in range(fours, count):
            for head in range(first, last):
                for query in range(queries.shape[1]):
                    value = dot(queries[head, query], block[at, head])
                    scores[head, query, start + at] = value * scale


@kernel
def _softmax(scores, length):
    for query in range(scores.shape[0]):
        row = scores[query, :length]
        top = row[0]
        for at in range(row.shape[0]):
            top = max(top, row[at])
        total = np.float32(0)
        for at in range(row.shape[0]):
            row[at] = exp(row[at] - top)
            total += row[at]
        share = np.float32(1) / total
        for at in range(row.shape[0]):
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
