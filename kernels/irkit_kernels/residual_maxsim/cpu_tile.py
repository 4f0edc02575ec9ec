"""What the machine code of a search is made of, in LLVM IR: bytes against 16 or 32 tokens of a query.

Vectors (centroids, or the levels of tokens) are unsigned bytes, level + 128; queries are signed, 4 numbers of
a token side by side, then those of the next token. What 128 adds to a sum is known beforehand and taken off
where the sum begins. Tables are laid out [block of 16 or 32 query tokens][centroid][token of the block].
Without the dot product instruction of AVX512-VNNI the same code multiplies plainly: the same numbers, slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._jit import DOT4, Code, Values, splat

__all__ = [
    "BYTES",
    "FLOATS",
    "GROUP",
    "INTS",
    "LANES",
    "LOWEST",
    "TABLE",
    "TILE",
    "Block",
    "Header",
    "Plan",
    "Writer",
    "module",
    "size_of",
]

LANES = 16
TILE = 4  # vectors multiplied together: 4 x 2 sums hide the latency of the dot product
GROUP = 32  # centroids whose maximum `probe` looks at first
LOWEST = -3e38  # below all scores
TABLE = "ptr %query, ptr %header, ptr %scores, ptr %bytes, ptr %maxima"  # first arguments of all functions
INTS, FLOATS, BYTES = f"<{LANES} x i32>", f"<{LANES} x float>", "<64 x i8>"
MASK = f"<{LANES} x i1>"
_HALF = -0x80000000 | 0x0FFFE000  # sign, and the exponent and fraction of a float16 moved up by 13 bits


class Header:
    """Rows of the header of a block of query tokens, a word a token."""

    BIAS = 0  # int32: -128 times the sum of the token's bytes
    SCALE = 1  # float32: what one step of its bytes stands for
    FACTOR = 2  # float32: times a score, plus OFFSET, is the score in a byte
    OFFSET = 3
    FLOOR = 4  # float32: no score that `probe` looks at is lower; infinity for what is no token
    ROWS = 5


@dataclass(frozen=True)
class Plan:
    """What the code is written for.

    Attributes:
        dim: Numbers of a vector, padded to a multiple of 4.
        vectors: Registers of 16 query tokens in a block: 1 or 2.
        vnni: Multiply with AVX512-VNNI, and look up with AVX512-BW.
    """

    dim: int
    vectors: int
    vnni: bool

    @property
    def lanes(self) -> int:
        """Query tokens of a block."""
        return self.vectors * LANES

    def stride(self, nbits: int, width: int) -> int:
        """Bytes between unpacked tokens of ``width`` packed bytes: a whole register after the last level."""
        return -(-(width * 8 // nbits) // 64) * 64 + 64


class Block(NamedTuple):
    """Where the parts of a block of query tokens begin, as in `cpu_kernel.QueryTable`."""

    query: str
    header: str
    scores: str
    bytes: str
    maxima: str


class Writer(Code):
    """Writes a function for a plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.each = plan, range(plan.vectors)

    def floats(self, name: str, a: str, b: str) -> str:
        """``a name b`` of 16 float32, such as fmul."""
        return self.op(f"{name} {FLOATS} {a}, {b}")

    def ints(self, name: str, a: str, value: int) -> str:
        """``a name value`` of 16 int32, such as lshr."""
        return self.op(f"{name} {INTS} {a}, {splat(LANES, 'i32', value)}")

    def fma(self, a: str, b: str, c: str) -> str:
        """``a * b + c`` of 16 float32."""
        return self.op(f"call {FLOATS} @llvm.fmuladd.v16f32({FLOATS} {a}, {FLOATS} {b}, {FLOATS} {c})")

    def fmax(self, a: str, b: str) -> str:
        """The higher of 16 float32 each."""
        return self.select(self.op(f"fcmp ogt {FLOATS} {a}, {b}"), a, b)

    def select(self, mask: str, a: str, b: str) -> str:
        """``a`` where the mask is set, else ``b``, of 16 float32."""
        return self.op(f"select {MASK} {mask}, {FLOATS} {a}, {FLOATS} {b}")

    def total(self, x: str) -> str:
        """The sum of 16 float32."""
        return self.op(f"call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {FLOATS} {x})")

    def words(self, pointer: str, row: int, kind: str = FLOATS) -> list[str]:
        """Row ``row`` of words, one a query token of the block."""
        return [self.load(kind, pointer, 4 * (row * self.plan.lanes + LANES * v)) for v in self.each]

    def store_words(self, values: Sequence[str], pointer: str) -> None:
        """Store a row of float32, one a query token of the block."""
        for v in self.each:
            self.store(FLOATS, values[v], pointer, 4 * LANES * v)

    def block(self, index: str) -> Block:
        """The parts of a block of query tokens."""
        lanes = self.plan.lanes
        sizes: dict[str, str | int] = {
            "query": self.plan.dim * lanes,
            "header": 4 * Header.ROWS * lanes,
            "scores": self.mul("%rows", 4 * lanes),
            "bytes": self.mul("%rows", lanes),
            "maxima": self.mul("%rows", 4 * lanes // GROUP),
        }
        return Block(*(self.at(f"%{name}", self.mul(index, size)) for name, size in sizes.items()))

    def tokens(self, i: str) -> tuple[str, str]:
        """First token of the document ``%documents[i]``, and the one after its last."""
        number = self.op(f"sext i32 {self.load('i32', '%documents', self.mul(i, 4))} to i64")
        place = self.at("%offsets", self.mul(number, 8))
        return self.load("i64", place), self.load("i64", place, 8)

    def prefetch(self, pointer: str, size: int) -> None:
        """Fetch ``size`` bytes that are read soon."""
        for line in range(0, size, 64):
            self.do(f"call void @llvm.prefetch.p0(ptr {self.at(pointer, line)}, i32 0, i32 2, i32 1)")

    def half(self, pointer: str, offset: str | int) -> str:
        """A finite float16 as float32, in all lanes: not every CPU converts, but all move bits."""
        bits = self.op(f"sext i16 {self.load('i16', pointer, offset)} to i32")
        bits = self.op(f"and i32 {self.op(f'shl i32 {bits}, 13')}, {_HALF}")
        value = self.op(f"fmul float {self.op(f'bitcast i32 {bits} to float')}, 0x46F0000000000000")  # 2^112
        return self.broadcast(LANES, "float", value)

    def centroid(self, code: str, pointer: str, offset: str | int = 0) -> str:
        """The centroid of a token, of LLVM type ``code``; that of a damaged file is the last one."""
        number = self.op(f"zext {code} {self.load(code, pointer, offset)} to i64")
        return self.minimum(number, "%last")

    def dots(self, base: str, stride: int, query: str, bias: list[str]) -> list[list[str]]:
        """Sums of 4 vectors, ``stride`` bytes apart from ``base`` on, for the tokens of a block."""
        plan = self.plan

        def step(row: str, place: str, sums: Values, words: int) -> Values:
            result = list(sums)
            for word in range(words):
                q = [self.load(INTS, place, 4 * LANES * (word * plan.vectors + v)) for v in self.each]
                for r in range(TILE):
                    x = self.broadcast(LANES, "i32", self.load("i32", row, r * stride + 4 * word))
                    for v in self.each:
                        i = r * plan.vectors + v
                        result[i] = self.dot4(result[i], x, q[v], plan.vnni)
            return tuple(result)

        def several(at: str, sums: Values) -> Values:
            return step(self.at(base, at), self.at(query, self.mul(at, plan.lanes)), sums, 4)

        whole = plan.dim // 16 * 16
        sums = self.loop(0, whole, 16, several, tuple(bias) * TILE, INTS)
        sums = step(self.at(base, whole), self.at(query, whole * plan.lanes), sums, (plan.dim - whole) // 4)
        return [list(sums[r * plan.vectors : (r + 1) * plan.vectors]) for r in range(TILE)]

    def lookup_table(self, nbits: int) -> list[str]:
        """The bytes ``%levels``, ready for `unpack`."""
        if nbits == 8:
            return []
        if self.plan.vnni:
            table = self.load("<16 x i8>", "%levels")
            return [self.shuffle("i8", 16, table, "poison", [i % 16 for i in range(64)])]
        return [self.broadcast(64, "i8", self.load("i8", "%levels", i)) for i in range(2**nbits)]

    def unpack(self, source: str, target: str, nbits: int, width: int, table: list[str]) -> None:
        """Write the levels of a token of ``width`` bytes, a byte each; what follows in ``target`` is lost."""
        planes = 8 // nbits
        copies = min(planes, 64 // width) if 64 % width == 0 else 1  # planes that fit a register
        for plane in range(0, planes, copies):
            for at in range(0, width, 64):
                count = min(64, width - at)
                x = self.load(f"<{count} x i8>", source, at)
                if count < 64:
                    x = self.shuffle("i8", count, x, "poison", [i % count for i in range(64)])
                if nbits < 8:
                    x = self._select_plane(x, [nbits * (plane + i // width) % 8 for i in range(0, 64, 2)])
                    x = self._look_up(self.op(f"and {BYTES} {x}, {splat(64, 'i8', 2**nbits - 1)}"), table)
                self.store(BYTES, x, target, plane * width + at)

    def _select_plane(self, x: str, shifts: list[int]) -> str:
        if not any(shifts):
            return x
        words = self.op(f"bitcast {BYTES} {x} to <32 x i16>")
        words = self.op(f"lshr <32 x i16> {words}, <{', '.join(f'i16 {shift}' for shift in shifts)}>")
        return self.op(f"bitcast <32 x i16> {words} to {BYTES}")

    def _look_up(self, x: str, table: list[str]) -> str:
        if self.plan.vnni:
            return self.op(f"call {BYTES} @llvm.x86.avx512.pshuf.b.512({BYTES} {table[0]}, {BYTES} {x})")
        result = table[0]
        for level, value in enumerate(table[1:], 1):
            same = self.op(f"icmp eq {BYTES} {x}, {splat(64, 'i8', level)}")
            result = self.op(f"select <64 x i1> {same}, {BYTES} {value}, {BYTES} {result}")
        return result


def module(plan: Plan, *parts: str) -> str:
    """A module of declarations and functions."""
    declared = [
        f"declare {FLOATS} @llvm.fmuladd.v16f32({FLOATS}, {FLOATS}, {FLOATS})",
        f"declare float @llvm.vector.reduce.fadd.v16f32(float, {FLOATS})",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    ]
    if plan.vnni:
        declared += [DOT4, f"declare {BYTES} @llvm.x86.avx512.pshuf.b.512({BYTES}, {BYTES})"]
    return "\n".join([*declared, *parts])


def size_of(code: str) -> int:
    """Bytes of a code of LLVM type i16 or i32."""
    return int(code.removeprefix("i")) // 8
