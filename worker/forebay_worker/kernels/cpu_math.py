"""What the CPU kernels are made of: widened halves, a vectorised exp, small products, barriers.

Compiled by numba on first use and kept on disk. Loops are written so that LLVM turns them into
AVX2; the shapes of the tiles below fill its 16 registers. It knows no model.
"""

# pyright: basic
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# Sums may be reordered and fused, but a NaN stays one. x / 0 is inf or NaN as in numpy: an
# exception in one thread would leave the others waiting for it.
kernel = njit(
    cache=True,
    nogil=True,
    fastmath={"reassoc", "contract", "nsz", "arcp"},
    error_model="numpy",
)
_yield = types.ExternalFunction("sched_yield", types.int32())
_SPINS = 2000  # about 20 us: a barrier of two running threads takes under 1 us


@intrinsic
def widen(typing, value):
    """The float32 of a weight: float32 itself, bfloat16 held as uint16 or float16 held as int16."""

    def generate(context, builder, signature, args):
        if value == types.float32:
            return args[0]
        if value == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        word = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(word, ir.IntType(32)(16)), ir.FloatType())

    return types.float32(value), generate


@intrinsic
def _power_of_two(typing, exponent):
    """2^n of a whole float32 in -126..127: n becomes the exponent's bits, in 32 bits throughout."""

    def generate(context, builder, signature, args):
        word = ir.IntType(32)
        biased = builder.add(builder.fptosi(args[0], word), word(127))
        return builder.bitcast(builder.shl(biased, word(23)), ir.FloatType())

    return types.float32(types.float32), generate


@intrinsic
def _element(typing, array, at):
    """The address of a one-dimensional int64 array's element, as an integer."""

    def generate(context, builder, signature, args):
        base = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(builder.gep(base, [args[1]]), ir.IntType(64))

    return types.int64(array, types.int64), generate


@intrinsic
def _fetch_add(typing, address):
    """Adds 1 to the int64 at an address; returns what it was."""

    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.IntType(64)(1), "seq_cst")

    return types.int64(types.int64), generate


@intrinsic
def _load(typing, address):
    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), generate


@kernel
def take(units, phase):
    """The next unit of a phase: 0, 1, 2, … over all threads. `units` is zero before a step."""
    return _fetch_add(_element(units, phase))


@kernel
def meet(arrivals, phase, threads):
    """Waits until all threads have met at this phase; one that waits long gives its core away."""
    address = _element(arrivals, phase)
    _fetch_add(address)
    spins = 0
    while _load(address) < threads:
        spins += 1
        if spins > _SPINS:
            _yield()


@kernel
def exp(x):
    """e^x of a float32 up to 88, within 2e-7 of its size; 0 below -87.

    2^n * p(r) with n = round(x / ln 2): a polynomial and an addition to the exponent, no call, so
    that a loop over it is vectorised.
    """
    clipped = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(clipped * np.float32(1.4426950408889634) + np.float32(0.5))
    r = clipped - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    value = (p * r * r + r + np.float32(1.0)) * _power_of_two(n)
    return value if x > np.float32(-87.0) else np.float32(0.0)


@kernel
def product(x, w, low, high, out, at, add):
    """x @ w[n] for rows n of w from low to high, to (or, if `add`, added to) out[:, at:].

    x [M, K] float32, w [N, K] as `widen` takes it, out [M, N] float32. Tiles of 4 rows of x by 2 of
    w: 8 sums, each in a vector register; the rest of M goes by tiles of 1 by 4.
    """
    tall = x.shape[0] // 4 * 4
    for m in range(0, tall, 4):
        _tiles_4_by_2(x, m, w, low, high, out, at, add)
    for m in range(tall, x.shape[0]):
        _tiles_1_by_4(x, m, w, low, high, out, at, add)


@kernel
def _tiles_4_by_2(x, m, w, low, high, out, at, add):
    zero = np.float32(0)
    at -= low
    x0, x1, x2, x3 = x[m], x[m + 1], x[m + 2], x[m + 3]
    even = low + (high - low) // 2 * 2
    for n in range(low, even, 2):
        w0, w1 = w[n], w[n + 1]
        a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
        for k in range(x.shape[1]):
            a, b = widen(w0[k]), widen(w1[k])
            a0 += a * x0[k]
            a1 += a * x1[k]
            a2 += a * x2[k]
            a3 += a * x3[k]
            b0 += b * x0[k]
            b1 += b * x1[k]
            b2 += b * x2[k]
            b3 += b * x3[k]
        _put(out, m, at + n, a0, add)
        _put(out, m + 1, at + n, a1, add)
        _put(out, m + 2, at + n, a2, add)
        _put(out, m + 3, at + n, a3, add)
        _put(out, m, at + n + 1, b0, add)
        _put(out, m + 1, at + n + 1, b1, add)
        _put(out, m + 2, at + n + 1, b2, add)
        _put(out, m + 3, at + n + 1, b3, add)
    if even < high:
        for row in range(m, m + 4):
            _put(out, row, at + even, dot(x[row], w[even]), add)


@kernel
def _tiles_1_by_4(x, m, w, low, high, out, at, add):
    x0 = x[m]
    at -= low
    fours = low + (high - low) // 4 * 4
    for n in range(low, fours, 4):
        a, b, c, d = four_dots(x0, w[n], w[n + 1], w[n + 2], w[n + 3])
        _put(out, m, at + n, a, add)
        _put(out, m, at + n + 1, b, add)
        _put(out, m, at + n + 2, c, add)
        _put(out, m, at + n + 3, d, add)
    for n in range(fours, high):
        _put(out, m, at + n, dot(x0, w[n]), add)


@kernel
def four_dots(x, w0, w1, w2, w3):
    """x's products with four rows: each value of x is loaded once, four sums run abreast."""
    zero = np.float32(0)
    a, b, c, d = zero, zero, zero, zero
    for k in range(x.shape[0]):
        value = x[k]
        a += value * widen(w0[k])
        b += value * widen(w1[k])
        c += value * widen(w2[k])
        d += value * widen(w3[k])
    return a, b, c, d


@kernel
def dot(x, w):
    total = np.float32(0)
    for k in range(x.shape[0]):
        total += x[k] * widen(w[k])
    return total


@kernel
def widen_row(row, out):
    for k in range(row.shape[0]):
        out[k] = widen(row[k])


@kernel
def _put(out, m, n, value, add):
    out[m, n] = out[m, n] + value if add else value


@kernel
def rms_norm(x, weight, eps, out):
    """out = x / sqrt(mean(x^2) + eps) * weight, one row."""
    total = np.float32(0)
    for k in range(x.shape[0]):
        total += x[k] * x[k]
    scale = np.float32(1) / np.sqrt(total / np.float32(x.shape[0]) + eps)
    for k in range(x.shape[0]):
        out[k] = x[k] * scale * weight[k]
