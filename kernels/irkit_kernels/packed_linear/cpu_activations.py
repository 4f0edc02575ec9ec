"""Activations of the packed linear layer, in LLVM IR: polynomials on vectors of 16 float32.

The functions generate LLVM IR: what a docstring says is computed, the generated code computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .._typed import Function, Value, vector

__all__ = ["ACTIVATIONS", "FLOATS", "INTS", "LANES", "ROUND", "ROUND_BITS"]

LANES = 16
INTS, FLOATS = vector(LANES, "i32"), vector(LANES, "float")
ROUND = 1.5 * 2**23  # adding it rounds a float32 to an integer, which is in the low bits of the sum
ROUND_BITS = 0x4B400000  # the bits of ROUND
# Phi(x) - 1/2 = x P(x^2 - 9.5) for |x| <= 4.375, exactly 1/2 at the edge and beyond. P is the polynomial of
# degree 8 with the smallest maximum error in GELU, 2.7e-5.
_GELU_EDGE, _GELU_CENTRE = 4.375, 9.5
_GELU = (
    1.618856368e-01,
    -8.337188622e-03,
    6.140283337e-04,
    -4.654408068e-05,
    3.239048329e-06,
    -2.000492436e-07,
    1.428165134e-08,
    -1.070439963e-09,
    3.900591874e-11,
)

_EXP_EDGE = 87.0  # beyond it exp overflows or vanishes in float32
# 2^x for |x| <= 1/2, with a relative error of at most 7.5e-08
_EXP2 = (
    1.000000072e00,
    6.931469670e-01,
    2.402211973e-01,
    5.550713317e-02,
    9.675541221e-03,
    1.327645784e-03,
)


def _gelu(f: Function, x: Value) -> Value:
    """Compute GELU, ``x * Phi(x)``, with the polynomial ``_GELU`` for Phi."""

    def constant(value: float) -> Value:
        return f.constant(FLOATS, value)

    inside = f.maximum(f.minimum(x, _GELU_EDGE), -_GELU_EDGE)
    t = f.fmuladd(inside, inside, constant(-_GELU_CENTRE))
    p, *rest = map(constant, reversed(_GELU))
    for coefficient in rest:
        p = f.fmuladd(p, t, coefficient)
    return x * f.fmuladd(p, inside, constant(0.5))


def _silu(f: Function, x: Value) -> Value:
    """Compute SiLU, ``x / (1 + exp(-x))``."""
    return _weighted(f, x, x)


def _gelu_tanh(f: Function, x: Value) -> Value:
    """Compute the GELU with tanh: ``x / (1 + exp(-2 z))`` of ``z = sqrt(2 / pi) (x + 0.044715 x^3)``."""
    twice = 2 * (2 / math.pi) ** 0.5
    cubic, linear = (f.constant(FLOATS, twice * factor) for factor in (0.044715, 1))
    return _weighted(f, x, x * f.fmuladd(x * x, cubic, linear))


def _weighted(f: Function, x: Value, z: Value) -> Value:
    """Compute ``x / (1 + exp(-z))``; the exponential is ``2^whole * 2^part``, the latter a polynomial."""
    inside = f.maximum(f.minimum(z, _EXP_EDGE), -_EXP_EDGE)
    power = inside * -math.log2(math.e)
    rounded = power + ROUND
    part = power - (rounded - ROUND)
    p, *rest = (f.constant(FLOATS, value) for value in reversed(_EXP2))
    for coefficient in rest:
        p = f.fmuladd(p, part, coefficient)
    whole = (rounded.cast(INTS) - (ROUND_BITS - 127)) << 23
    weighted = x / f.fmuladd(p, whole.cast(FLOATS), f.constant(FLOATS, 1))
    return f.where(z < -_EXP_EDGE, 0, weighted)


ACTIVATIONS: dict[str, Callable[[Function, Value], Value]] = {
    "none": lambda f, x: x,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
}
