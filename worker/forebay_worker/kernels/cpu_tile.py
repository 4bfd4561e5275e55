"""Products on the CPU by register tiles: rows of x times a panel of w, sums held in registers.

A panel is PANEL rows of a weight matrix stored column by column, so that one load brings a column's
16 weights and each value of x is spread over a register: 6 rows by 16 sums fill 12 of AVX2's 16
registers. Weights of 16 bits are widened as they are loaded, which changes no bit of them.

Written as LLVM's vector code, since its vectoriser makes dot products of such loops and spills
their sums. It knows no model.
"""

# pyright: basic
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from forebay_worker.kernels.cpu_math import kernel

PANEL = 16
_LANES = 8
_HALVES = range(0, PANEL, _LANES)
_SUMS = 8  # that must run abreast: 2 per cycle, 4 cycles each

_INDEX = ir.IntType(64)
_WORD = ir.IntType(32)
_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, _LANES)
_WORDS = ir.VectorType(_WORD, _LANES)
_ZEROS = ir.Constant(_FLOATS, [0.0] * _LANES)


@intrinsic
def widen(typing, value):
    """The float32 of a weight: float32 itself, bfloat16 held as uint16 or float16 held as int16."""

    def generate(context, builder, signature, args):
        if value == types.float32:
            return args[0]
        if value == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _FLOAT)
        return builder.bitcast(builder.shl(builder.zext(args[0], _WORD), _WORD(16)), _FLOAT)

    return types.float32(value), generate


@intrinsic(prefer_literal=True)
def _tile(typing, rows, x, x_at, x_step, w, w_at, w_step, depth, out, out_at, out_step, add):
    """`tiles` of a literal number of rows."""

    def generate(context, builder, signature, args):
        def address(array, at):
            data = context.make_array(signature.args[array])(context, builder, args[array]).data
            return builder.gep(data, [args[at]])

        def each_row(start, step):
            return [builder.gep(start, [builder.mul(step, _INDEX(row))]) for row in range(count)]

        count = rows.literal_value
        xs, outs = each_row(address(1, 2), args[3]), each_row(address(8, 9), args[10])
        weights = (address(4, 5), args[6], signature.args[4].dtype)
        chains = max(1, _SUMS // (2 * count))
        sums = [_ZEROS] * (2 * count * chains)
        last = builder.sub(args[7], _INDEX(chains - 1))
        at, sums = _loop(builder, _INDEX(0), last, chains, sums, xs, weights)
        if chains > 1:
            sums = [_total(builder, sums[place :: 2 * count]) for place in range(2 * count)]
            _, sums = _loop(builder, at, args[7], 1, sums, xs, weights)
        for row, start in enumerate(outs):
            for half, value in zip(_HALVES, sums[2 * row : 2 * row + 2], strict=True):
                _store(builder, builder.gep(start, [_INDEX(half)]), value, args[11])
        return context.get_dummy_value()

    inputs = (rows, x, x_at, x_step, w, w_at, w_step, depth, out, out_at, out_step, add)
    return types.void(*inputs), generate


def _loop(builder, start, end, step, sums, xs, weights):
    """for at in range(start, end, step): adds `step` columns' products, each to sums of its own."""
    before = builder.block
    head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    at = builder.phi(_INDEX)
    at.add_incoming(start, before)
    held = [builder.phi(_FLOATS) for _ in sums]
    for phi, value in zip(held, sums, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", at, end), body, after)
    builder.position_at_end(body)
    added = [
        value
        for column in range(step)
        for value in _column_products(builder, builder.add(at, _INDEX(column)), xs, weights)
    ]
    for phi, product in zip(held, added, strict=True):
        phi.add_incoming(_plus(builder, phi, product), body)
    at.add_incoming(builder.add(at, _INDEX(step)), body)
    builder.branch(head)
    builder.position_at_end(after)
    return at, held


def _column_products(builder, at, xs, weights):
    """The products of one column of the panel with each row's value there, row by row."""
    start, step, kind = weights
    column = builder.gep(start, [builder.mul(at, step)])
    halves = [_widened(builder, builder.gep(column, [_INDEX(half)]), kind) for half in _HALVES]
    for row in xs:
        value = _spread(builder, builder.load(builder.gep(row, [at])))
        for half in halves:
            yield builder.fmul(value, half, flags=("contract",))


def _plus(builder, left, right):
    return builder.fadd(left, right, flags=("contract",))


def _total(builder, values):
    total = values[0]
    for value in values[1:]:
        total = _plus(builder, total, value)
    return total


def _spread(builder, value):
    nothing = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(nothing, value, _WORD(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(_WORDS, [0] * _LANES))


def _load(builder, pointer, element, align):
    vector = ir.VectorType(element, _LANES)
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=align)


def _widened(builder, pointer, kind):
    if kind == types.float32:
        return _load(builder, pointer, _FLOAT, 4)
    if kind == types.int16:
        return builder.fpext(_load(builder, pointer, ir.HalfType(), 2), _FLOATS)
    words = builder.zext(_load(builder, pointer, ir.IntType(16), 2), _WORDS)
    shift = ir.Constant(_WORDS, [16] * _LANES)
    return builder.bitcast(builder.shl(words, shift), _FLOATS)


def _store(builder, pointer, value, add):
    there = builder.bitcast(pointer, _FLOATS.as_pointer())
    old = builder.load(there, align=4)
    builder.store(builder.select(add, builder.fadd(value, old), value), there, align=4)


@kernel
def tiles(rows, x, x_at, x_step, w, w_at, w_step, depth, out, out_at, out_step, add):
    """out[row, :PANEL] = sum over k < depth of x[row, k] * w[k, :PANEL], or that added to out.

    Each of x, w and out is an array, the place of its first element in it, counted in elements, and
    the step from row to row (of w: from k to k + 1). x and out are float32, w is as `widen` takes
    it and one-dimensional. All PANEL places of out are written.
    """
    while rows >= 6:
        _tile(6, x, x_at, x_step, w, w_at, w_step, depth, out, out_at, out_step, add)
        rows, x_at, out_at = rows - 6, x_at + 6 * x_step, out_at + 6 * out_step
    if rows == 1:
        _tile(1, x, x_at, x_step, w, w_at, w_step, depth, out, out_at, out_step, add)
    elif rows == 2:
        _tile(2, x, x_at, x_step, w, w_at, w_step, depth, out, out_at, out_step, add)
    elif rows == 3:
        _tile(3, x, x_at, x_step, w, w_at, w_step, depth, out, out_at, out_step, add)
    elif rows == 4:
        _tile(4, x, x_at, x_step, w, w_at, w_step, depth, out, out_at, out_step, add)
    elif rows == 5:
        _tile(5, x, x_at, x_step, w, w_at, w_step, depth, out, out_at, out_step, add)
