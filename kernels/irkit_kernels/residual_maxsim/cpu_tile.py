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

from .._jit import DOT4, Code, Values, cpu_features, splat

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
    "has_permutes",
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
_PERMUTE = "@llvm.x86.avx512.vpermi2var.qi.512"
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
        vnni: Multiply with AVX512-VNNI, and look up with AVX512-VBMI where there is that, too.
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
        place = self.tokens_at(i)
        return self.load("i64", place), self.load("i64", place, 8)

    def tokens_at(self, i: str) -> str:
        """Where `tokens` finds them."""
        number = self.op(f"sext i32 {self.load('i32', '%documents', self.mul(i, 4))} to i64")
        return self.at("%offsets", self.mul(number, 8))

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

    def lookup_table(self) -> list[str]:
        """The 256 bytes ``%levels``, ready for `unpack`."""
        return [self.load(BYTES, "%levels", at) for at in range(0, 256, 64)] if self._permutes else []

    def unpack(self, source: str, target: str, nbits: int, width: int, table: list[str]) -> None:
        """Write the levels of a token of ``width`` bytes, a byte each; what follows in ``target`` is lost."""
        parts = [(at, *self._packed(source, at, min(64, width - at))) for at in range(0, width, 64)]
        for plane in range(8 // nbits):
            after = 8 - nbits * (plane + 1)  # bits of the byte after those of this plane
            for at, x, before in parts:
                if after:
                    high = self.op(f"shl {BYTES} {before}, {splat(64, 'i8', 8 - after)}")
                    low = self.op(f"lshr {BYTES} {x}, {splat(64, 'i8', after)}")
                    x = self.op(f"or {BYTES} {high}, {low}")
                self._look_up(x, self.at(target, plane * width + at), min(64, width - at), table)

    def _packed(self, source: str, at: int, count: int) -> tuple[str, str]:
        """``count`` bytes, and the one before each."""
        kind, pad = f"<{count} x i8>", [*range(count)] + [0] * (64 - count)
        x = self.load(kind, source, at)
        if at:
            before = self.load(kind, source, at - 1)
        else:
            before = self.shuffle("i8", count, x, "zeroinitializer", [count, *range(count - 1)])
        return self.shuffle("i8", count, x, "poison", pad), self.shuffle("i8", count, before, "poison", pad)

    def _look_up(self, x: str, target: str, count: int, table: list[str]) -> None:
        """Write the levels of 64 windows, ``count`` of which matter."""
        if table:
            halves = [
                self.op(f"call {BYTES} {_PERMUTE}({BYTES} {low}, {BYTES} {x}, {BYTES} {high})")
                for low, high in (table[:2], table[2:])
            ]
            upper = self.op(f"icmp slt {BYTES} {x}, zeroinitializer")
            x = self.op(f"select <64 x i1> {upper}, {BYTES} {halves[1]}, {BYTES} {halves[0]}")
        self.store(BYTES, x, target)

        def four(i: str, _: Values) -> None:
            for at in range(4):
                place = self.at(target, self.add(i, at))
                window = self.op(f"zext i8 {self.load('i8', place)} to i64")
                self.store("i8", self.load("i8", "%levels", window), place)

        if not table:
            self.loop(0, count, 4, four)

    @property
    def _permutes(self) -> bool:
        return self.plan.vnni and has_permutes()


def has_permutes() -> bool:
    """Whether this CPU looks up bytes in registers."""
    return "avx512vbmi" in cpu_features()


def module(plan: Plan, *parts: str) -> str:
    """A module of declarations and functions."""
    declared = [
        f"declare {FLOATS} @llvm.fmuladd.v16f32({FLOATS}, {FLOATS}, {FLOATS})",
        f"declare float @llvm.vector.reduce.fadd.v16f32(float, {FLOATS})",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    ]
    if plan.vnni:
        declared.append(DOT4)
        if has_permutes():
            declared.append(f"declare {BYTES} {_PERMUTE}({BYTES}, {BYTES}, {BYTES})")
    return "\n".join([*declared, *parts])


def size_of(code: str) -> int:
    """Bytes of a code of LLVM type i16 or i32."""
    return int(code.removeprefix("i")) // 8
