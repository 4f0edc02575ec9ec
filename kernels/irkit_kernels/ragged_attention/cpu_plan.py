"""The variants of the code of attention on the CPU, and powers of 2 in LLVM IR."""

from __future__ import annotations

from dataclasses import dataclass
from math import e as euler
from math import log2

from .._typed import Function, Value, vector

__all__ = ["BLOCK", "EXP2", "EXP2_ROUGH", "FAR", "LOWEST", "Plan", "exp2", "spread"]

BLOCK = 512  # queries, and keys, processed together: packed they fit the second-level cache
FAR = 2**30  # the window that stands for no window
LOWEST = -1e38  # score of a hidden key; two of these differ by 0, but infinities by NaN
_LEAST = -125.0  # the lowest exponent: smaller powers of 2 would be subnormal
_ROUND = 1.5 * 2**23  # adding it rounds a float32 to an integer, which is in the low bits of the sum
# Polynomials for 2^x on [-1/2, 1/2] with the smallest relative error: 2e-7, and 8e-5 for bfloat16 weights.
EXP2 = (1.00000007, 0.693146967, 0.240221197, 0.0555071327, 0.00967554133, 0.00132764722)
EXP2_ROUGH = (0.999928074, 0.693260985, 0.242611122, 0.0551716691)


@dataclass(frozen=True)
class Plan:
    """A variant of the code.

    Attributes:
        head_dim: Width of a head, a multiple of 8.
        bfloat16: Inputs and output are bfloat16, else float32.
        dot: Multiply pairs of bfloat16 (AVX512-BF16, 16 lanes), else float32 numbers. float32 inputs are
            rounded for it.
        lanes: float32 numbers per vector register.
        dropout: Drop weights at random.
        biased: Add a bias to each score, which depends on head and distance.
    """

    head_dim: int
    bfloat16: bool
    dot: bool
    lanes: int
    dropout: bool = False
    biased: bool = False

    @property
    def words(self) -> int:
        """32-bit words per packed query or key: float32 numbers, or pairs of bfloat16."""
        return self.head_dim // 2 if self.dot else self.head_dim

    @property
    def width(self) -> int:
        """``head_dim`` rounded up to whole vectors."""
        return -(-self.head_dim // self.lanes) * self.lanes

    @property
    def rounds(self) -> bool:
        """Whether inputs are float32 and rounded to bfloat16."""
        return self.dot and not self.bfloat16

    @property
    def stored(self) -> int:
        """Bytes per number of the inputs and the output."""
        return 2 if self.bfloat16 else 4

    @property
    def packed(self) -> int:
        """Bytes per packed value, and per weight."""
        return 2 if self.dot else 4

    @property
    def scale(self) -> float:
        """Factor of the scores; it includes log2(e), because weights are powers of 2."""
        return float(self.head_dim**-0.5) * log2(euler)

    @property
    def rows(self) -> int:
        """Queries per full tile; their sums with two vectors of keys take half of the vector registers."""
        return 8 if self.lanes == 16 else 4


def exp2(x: Function, exponent: Value, polynomial: tuple[float, ...] = EXP2) -> Value:
    """Return 2^e for the lanes e <= 0 of a vector of float32; NaN stays NaN.

    e is split into an integer, which is added to the exponent bits, and a rest in [-1/2, 1/2], for which the
    power is a polynomial.
    """
    floats, ints = exponent.kind, vector(exponent.lanes, "i32")
    exponent = x.maximum(_LEAST, exponent)
    shifted = exponent + _ROUND
    rest = exponent - (shifted - _ROUND)
    power = x.constant(floats, polynomial[-1])
    for factor in polynomial[-2::-1]:
        power = x.fmuladd(power, rest, x.constant(floats, factor))
    integer = shifted.cast(ints) << 23
    return (power.cast(ints) + integer).cast(floats)


def spread(x: Function, numbers: Value, lanes: int) -> list[Value]:
    """Return, for each lane of a vector, a vector of ``lanes`` with its number in every lane."""
    return [x.shuffle(numbers, None, [i] * lanes) for i in range(numbers.lanes)]
