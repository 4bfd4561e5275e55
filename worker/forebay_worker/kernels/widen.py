"""e4m3 numbers in a type that the matrix units multiply; each is held exactly.

float16 takes one instruction for two numbers. From there to bfloat16 at once is the job of a slow
unit (F2F, 16 a cycle and multiprocessor, where memory brings 18); by way of float32 it is not.
"""

import triton
import triton.language as tl


@triton.jit
def widen(x, kind: tl.constexpr):
    """x as float16, bfloat16 or float32."""
    half = x.to(tl.float16)
    return half if kind == tl.float16 else half.to(tl.float32).to(kind)
