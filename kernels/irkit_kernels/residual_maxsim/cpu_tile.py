"""Parts of the code of a search, in LLVM IR: products of bytes with 16 or 32 query tokens; unpacked levels.

Vectors (centroids, or the levels of tokens) are unsigned bytes, level + 128. Queries are signed bytes: 4
numbers of a token side by side, then 4 of the next token. The amount that 128 adds to a sum is known
beforehand, so each sum starts with its negative. Tables are stored as [block of 16 or 32 query
tokens][centroid][token of the block]. Without the dot product instruction of AVX512-VNNI the same code uses
ordinary multiplications: the same numbers, slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from .._jit import cpu_features
from .._simd import dot_bytes, move_half
from .._typed import Array, Function, Value, vector

__all__ = [
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
    "unsigned",
]

LANES = 16
TILE = 4  # vectors multiplied together: 4 x 2 sums hide the latency of the dot product
GROUP = 32  # centroids per group; `probe` reads the maxima of groups first
LOWEST = -3e38  # below all scores
TABLE = {  # the first parameters of all functions of a search
    **{"query": "u8*", "header": "float*", "scores": "float*", "bytes": "u8*", "maxima": "float*"}
}
INTS, FLOATS = vector(LANES, "i32"), vector(LANES, "float")
_PERMUTE, _SHUFFLE = "llvm.x86.avx512.vpermi2var.qi.512", "llvm.x86.avx2.pshuf.b"


class Header:
    """Rows of the header of a block of query tokens; each has one word per token."""

    BIAS = 0  # int32: -128 times the sum of the token's bytes
    SCALE = 1  # float32: the value of one step of the token's bytes
    FACTOR = 2  # float32: score * FACTOR + OFFSET is the score as a byte
    OFFSET = 3
    FLOOR = 4  # float32: the lowest score that `probe` considers; infinity in lanes without a token
    ROWS = 5


@dataclass(frozen=True)
class Plan:
    """The variant of the code.

    Attributes:
        dim: Numbers per vector, padded to a multiple of 4.
        vectors: Registers of 16 query tokens per block: 1 or 2.
        vnni: Multiply with AVX512-VNNI, and look levels up with AVX512-VBMI if the CPU has it, too.
    """

    dim: int
    vectors: int
    vnni: bool

    @property
    def lanes(self) -> int:
        """Query tokens per block."""
        return self.vectors * LANES

    def stride(self, nbits: int, width: int) -> int:
        """Return the bytes between unpacked tokens of ``width`` packed bytes, with a spare register."""
        return -(-(width * 8 // nbits) // 64) * 64 + 64


class Block(NamedTuple):
    """The parts of the tables that belong to one block of query tokens, see `cpu_kernel.QueryTable`."""

    query: Array
    header: Array
    scores: Array
    bytes: Array
    maxima: Array


class Writer(Function):
    """A public function of the module, with the operations that several functions share.

    Attributes:
        plan: The variant of the code.
        arguments: The parameters, by name.
        vectors: Numbers of the registers of a block of query tokens.
    """

    def __init__(self, name: str, plan: Plan, /, **parameters: Any) -> None:
        super().__init__(name, public=True, align=1, **parameters)
        self.plan, self.vectors = plan, range(plan.vectors)
        self.arguments = SimpleNamespace(**dict(zip(parameters, self.parameters, strict=True)))

    def total(self, x: Value) -> Value:
        """Return the sum of the lanes."""
        zero = self.constant("float", 0)
        return self.intrinsic("vector.reduce.fadd", "float", zero, x, flags="reassoc")

    def words(self, array: Array, row: int = 0) -> list[Value]:
        """Load a row of words, one per query token of the block."""
        return [array.vectors(LANES)[row * self.plan.lanes + LANES * v] for v in self.vectors]

    def store_words(self, array: Array, values: Sequence[Value]) -> None:
        """Store a row of words, one per query token of the block."""
        for v in self.vectors:
            array.vectors(LANES)[LANES * v] = values[v]

    def block(self, index: Value) -> Block:
        """Return the parts of a block of query tokens."""
        lanes, a = self.plan.lanes, self.arguments
        scores, maxima_bytes = a.rows * lanes, a.rows * (4 * lanes // GROUP)
        return Block(
            a.query.at(index * (self.plan.dim * lanes)),
            a.header.at(index * (Header.ROWS * lanes)),
            a.scores.at(index * scores),
            a.bytes.at(index * scores),
            a.maxima.cast("u8", 1).at(index * maxima_bytes).cast("float", 1),
        )

    def token_range(self, i: Value) -> tuple[Value, Value]:
        """Return the first token of the document ``documents[i]``, and the one after its last."""
        offsets = self.offsets_at(i)
        return offsets[0], offsets[1]

    def offsets_at(self, i: Value) -> Array:
        """Return the offsets of the tokens of the document ``documents[i]``."""
        offsets: Array = self.arguments.offsets.at(self.arguments.documents[i].to("i64"))
        return offsets

    def prefetch_bytes(self, array: Array, size: int) -> None:
        """Prefetch ``size`` bytes."""
        for line in range(0, size, 64):
            self.prefetch(array.cast("u8", 1).at(line), locality=2)

    def half(self, number: Value) -> Value:
        """Return a finite float16, given as i16, as float32 in all lanes."""
        return move_half(number).broadcast(LANES)

    def centroid(self, codes: Array, index: Value) -> Value:
        """Return the centroid of a token; a higher code (of a damaged file) is read as the last."""
        return self.minimum(codes[index].to("i64"), self.arguments.last)

    def dots(self, base: Array, stride: int, query: Array, bias: list[Value]) -> list[list[Value]]:
        """Multiply `TILE` byte vectors, ``stride`` bytes apart, with the tokens of a block.

        Returns:
            The sums plus ``bias``, as ``[byte vector][register of query tokens]``.
        """
        plan = self.plan

        def step(row: Array, query_words: Array, sums: list[Value], words: int) -> list[Value]:
            sums, q_words, row_words = list(sums), query_words.cast("i32", 1), row.cast("i32", 1, 1)
            for word in range(words):
                q = [q_words.vectors(LANES)[LANES * (word * plan.vectors + v)] for v in self.vectors]
                for r in range(TILE):
                    x = row_words[r * stride + 4 * word].broadcast(LANES)
                    for v in self.vectors:
                        i = r * plan.vectors + v
                        sums[i] = dot_bytes(sums[i], x, q[v], plan.vnni)
            return sums

        # 16 dimensions at a time, then the last 0 to 12
        whole = plan.dim // 16 * 16
        with self.range(0, whole, 16, sums=bias * TILE) as loop:
            loop.sums = step(base.at(loop.i), query.at(loop.i * plan.lanes), loop.sums, 4)
        sums = step(base.at(whole), query.at(whole * plan.lanes), loop.sums, (plan.dim - whole) // 4)
        return [sums[r * plan.vectors : (r + 1) * plan.vectors] for r in range(TILE)]

    def lookup_table(self) -> list[Value]:
        """Load the 256 ``levels`` into 4 registers for `unpack`; return [] without `has_permutes`."""
        levels = self.arguments.levels.vectors(64)
        return [levels[start] for start in range(0, 256, 64)] if self._permutes else []

    def unpack(self, source: Array, target: Array, nbits: int, width: int, table: list[Value]) -> None:
        """Write the levels of a token of ``width`` packed bytes, one byte each.

        Plane by plane: a shift leaves, in each byte, the 8 bits that choose its level (`reference.windows`).
        Up to 64 bytes after the levels are overwritten.
        """
        parts = [(at, *self._packed(source, at, min(64, width - at))) for at in range(0, width, 64)]
        for plane in range(8 // nbits):
            after = 8 - nbits * (plane + 1)  # bits of the byte after this plane
            for at, windows, before in parts:
                if after:
                    windows = (before << 8 - after) | (windows >> after)
                target.at(plane * width + at).vectors(64)[0] = (
                    self._permuted(windows, table) if table else windows
                )
        if not table:
            self._look_up(target, width * 8 // nbits)

    def _packed(self, source: Array, at: int, count: int) -> tuple[Value, Value]:
        """Return ``count`` bytes from ``at`` on, and the bytes one before; both padded to 64 bytes."""
        pad = [*range(count)] + [0] * (64 - count)
        x = source.vectors(count)[at]
        before = source.vectors(count)[at - 1] if at else self.shuffle(x, 0, [count, *range(count - 1)])
        return self.shuffle(x, None, pad), self.shuffle(before, None, pad)

    def _permuted(self, windows: Value, table: list[Value]) -> Value:
        """Return the levels of 64 windows from registers: two look-ups of 128 levels each."""
        low, high = (self.call(_PERMUTE, a, windows, b, kind=windows.kind) for a, b in (table[:2], table[2:]))
        levels: Value = self.where(windows.compare("slt", 0), high, low)
        return levels

    def _look_up(self, target: Array, count: int) -> None:
        """Replace ``count`` windows by their levels; up to 31 bytes after them are overwritten."""
        if "avx2" in cpu_features():
            with self.range(0, count, 32) as loop:
                target.vectors(32)[loop.i] = self._shuffled(target.vectors(32)[loop.i])
            return
        with self.range(0, count, 4) as loop:
            for k in range(4):
                byte = target.at(loop.i + k)
                window = byte[0].to("i64")
                byte[0] = self.arguments.levels[window]

    def _shuffled(self, windows: Value) -> Value:
        """Return the levels of 32 windows by AVX2, whose instruction looks up 16 bytes.

        The instruction reads bits 0 to 3, and gives 0 where bit 7 is set. Bits 4 to 6 choose among 8 results.
        """
        low, high = windows, windows ^ -128
        levels = [
            self._sixteen(16 * number, low) | self._sixteen(128 + 16 * number, high) for number in range(8)
        ]
        for bit in (4, 5, 6):
            test = (windows << 7 - bit).compare("slt", 0)
            levels = [self.where(test, *levels[at : at + 2][::-1]) for at in range(0, len(levels), 2)]
        return levels[0]

    def _sixteen(self, first: int, windows: Value) -> Value:
        sixteen = self.arguments.levels.vectors(16)[first]
        return self.call(_SHUFFLE, self.shuffle(sixteen, None, [*range(16)] * 2), windows, kind=windows.kind)

    @property
    def _permutes(self) -> bool:
        return self.plan.vnni and has_permutes()


def has_permutes() -> bool:
    """Return whether this CPU looks bytes up in registers."""
    return "avx512vbmi" in cpu_features()


def unsigned(code: str) -> str:
    """Return the unsigned kind of codes of LLVM type i16 or i32."""
    return code.replace("i", "u")
