"""What the CPU kernels are made of: a vectorised exp, dot products, norms, and barriers.

Compiled by numba on first use and kept on disk. Loops are written so that LLVM turns them into
AVX2. It knows no model.
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
_sleep = types.ExternalFunction("usleep", types.int32(types.uint32))
_SPINS = 2000  # about 20 us: a barrier of two running threads takes under 1 us
_YIELDS = 2200  # with 200 yields after the spins; then it sleeps
_NAP = np.uint32(50)  # microseconds


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
    """Waits until all threads have met at this phase: spins, then yields, then naps, so that a
    thread whose partner has lost its core does not burn its own."""
    address = _element(arrivals, phase)
    _fetch_add(address)
    spins = 0
    while _load(address) < threads:
        spins += 1
        if spins > _YIELDS:
            _sleep(_NAP)
        elif spins > _SPINS:
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
def four_dots(x, w0, w1, w2, w3):
    """x's products with four rows: each value of x is loaded once, four sums run abreast."""
    zero = np.float32(0)
    a, b, c, d = zero, zero, zero, zero
    for k in range(x.shape[0]):
        value = x[k]
        a += value * w0[k]
        b += value * w1[k]
        c += value * w2[k]
        d += value * w3[k]
    return a, b, c, d


@kernel
def dot(x, w):
    total = np.float32(0)
    for k in range(x.shape[0]):
        total += x[k] * w[k]
    return total


@kernel
def rms_norm(x, weight, eps, out):
    """out = x / sqrt(mean(x^2) + eps) * weight, one row of weight's length; more is padding."""
    total = np.float32(0)
    for k in range(weight.shape[0]):
        total += x[k] * x[k]
    scale = np.float32(1) / np.sqrt(total / np.float32(weight.shape[0]) + eps)
    for k in range(weight.shape[0]):
        out[k] = x[k] * scale * weight[k]
