"""What the code of the CPU is written for, and arithmetic on vectors of float32."""

from __future__ import annotations

from dataclasses import dataclass
from math import e as euler
from math import log2

from .._jit import Code, splat

__all__ = ["BLOCK", "EXP2", "EXP2_ROUGH", "FAR", "LOWEST", "Floats", "Plan"]

BLOCK = 512  # queries, and keys, worked on together: packed they fit the L2 cache
FAR = 2**30  # the window of attention without one
LOWEST = -1e38  # score of a hidden key; unlike minus infinity, the difference of two is 0 and not NaN
_LEAST = -125.0  # 2^x is this at least: no subnormal numbers
_ROUND = 1.5 * 2**23  # adding it rounds a float32 to an integer, found in the low bits of the sum
# Polynomials for 2^x on [-1/2, 1/2] of least relative error: 2e-7, and 8e-5 where weights become bfloat16.
EXP2 = (1.00000007, 0.693146967, 0.240221197, 0.0555071327, 0.00967554133, 0.00132764722)
EXP2_ROUGH = (0.999928074, 0.693260985, 0.242611122, 0.0551716691)


@dataclass(frozen=True)
class Plan:
    """What the code is written for.

    Attributes:
        head_dim: Width of a head, a multiple of 8.
        bfloat16: Inputs and output are bfloat16, else float32.
        dot: Multiply pairs of bfloat16 (AVX512-BF16, 16 lanes), else float32 numbers.
        lanes: float32 numbers in a vector register.
        dropout: Drop weights at random.
    """

    head_dim: int
    bfloat16: bool
    dot: bool
    lanes: int
    dropout: bool = False

    @property
    def words(self) -> int:
        """32-bit words of a packed query or key: float32 numbers, or pairs of bfloat16."""
        return self.head_dim // 2 if self.dot else self.head_dim

    @property
    def width(self) -> int:
        """``head_dim`` rounded up to whole vectors."""
        return -(-self.head_dim // self.lanes) * self.lanes

    @property
    def stored(self) -> int:
        """Bytes of a number in the inputs and the output."""
        return 2 if self.bfloat16 else 4

    @property
    def packed(self) -> int:
        """Bytes of a packed value, and of a weight."""
        return 2 if self.dot else 4

    @property
    def scale(self) -> float:
        """Of scores: weights are powers of 2."""
        return float(self.head_dim**-0.5) * log2(euler)

    @property
    def rows(self) -> int:
        """Queries of a full tile: with two vectors of keys they take half of the registers for sums."""
        return 8 if self.lanes == 16 else 4


class Floats:
    """Arithmetic on vectors of ``lanes`` float32."""

    def __init__(self, code: Code, lanes: int) -> None:
        self.code, self.lanes = code, lanes
        self.kind, self.integers = f"<{lanes} x float>", f"<{lanes} x i32>"

    def constant(self, value: float) -> str:
        """``value`` in every lane."""
        return splat(self.lanes, "float", value)

    def add(self, a: str, b: str) -> str:
        """``a + b``."""
        return self.code.op(f"fadd {self.kind} {a}, {b}")

    def sub(self, a: str, b: str) -> str:
        """``a - b``."""
        return self.code.op(f"fsub {self.kind} {a}, {b}")

    def mul(self, a: str, b: str) -> str:
        """``a * b``."""
        return self.code.op(f"fmul {self.kind} {a}, {b}")

    def mul_add(self, a: str, b: str, c: str) -> str:
        """``a * b + c``."""
        kind = self.kind
        return self.code.op(f"call {kind} @llvm.fmuladd.v{self.lanes}f32({kind} {a}, {kind} {b}, {kind} {c})")

    def maximum(self, a: str, b: str) -> str:
        """The higher of two numbers, ``b`` if one is NaN."""
        return self.select(self.code.op(f"fcmp ogt {self.kind} {a}, {b}"), a, b)

    def select(self, condition: str, a: str, b: str) -> str:
        """``a`` where the condition holds, else ``b``."""
        return self.code.op(f"select <{self.lanes} x i1> {condition}, {self.kind} {a}, {self.kind} {b}")

    def load(self, pointer: str, offset: str | int = 0) -> str:
        """Load from ``offset`` bytes after ``pointer``."""
        return self.code.load(self.kind, pointer, offset)

    def store(self, value: str, pointer: str, offset: str | int = 0) -> None:
        """Store to ``offset`` bytes after ``pointer``."""
        self.code.store(self.kind, value, pointer, offset)

    def spread(self, value: str, lanes: int) -> list[str]:
        """A vector of ``lanes`` for each lane of ``value``."""
        return [
            self.code.shuffle("float", self.lanes, value, "poison", [i] * lanes) for i in range(self.lanes)
        ]

    def exp2(self, x: str, polynomial: tuple[float, ...] = EXP2) -> str:
        """2^x for x <= 0; NaN stays NaN."""
        code = self.code
        x = self.maximum(self.constant(_LEAST), x)
        shifted = self.add(x, self.constant(_ROUND))
        rest = self.sub(x, self.sub(shifted, self.constant(_ROUND)))
        result = self.constant(polynomial[-1])
        for factor in polynomial[-2::-1]:
            result = self.mul_add(result, rest, self.constant(factor))
        bits = code.op(f"bitcast {self.kind} {shifted} to {self.integers}")
        exponent = code.op(f"shl {self.integers} {bits}, {splat(self.lanes, 'i32', 23)}")
        bits = code.op(f"bitcast {self.kind} {result} to {self.integers}")
        bits = code.op(f"add {self.integers} {bits}, {exponent}")
        return code.op(f"bitcast {self.integers} {bits} to {self.kind}")
