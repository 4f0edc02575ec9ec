"""Vectors of float32 of any width in LLVM IR, and the code of ``encode`` and ``decode``.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

``encode`` approximates a vector x by ``a * centroid + b * levels``. It alternates between choosing the levels
(`cpu_trellis`) of ``(x - a * centroid) / b`` and fitting a and b by least squares, `TURNS` times.
"""

from __future__ import annotations

from typing import Any

from .._typed import Array, Value, module
from .cpu_tile import FLOATS, LANES, Plan, Writer, unsigned
from .cpu_trellis import Trellis
from .reference import NOTHING, TURNS

__all__ = ["Vectors", "write_decode", "write_encode"]

_AHEAD = 6  # tokens between the one being decoded and the one whose centroid is prefetched


class Vectors(Writer):
    """A function on vectors of ``plan.dim`` float32, which it holds in chunks of 16."""

    def __init__(self, name: str, plan: Plan, /, **parameters: Any) -> None:
        super().__init__(name, plan, **parameters)
        self.chunks = -(-plan.dim // LANES)
        last = plan.dim - LANES * (self.chunks - 1)
        self.mask = self.constants("i1", [i < last for i in range(LANES)])  # the numbers of the last chunk

    def vector(self, array: Array, row: Value) -> list[Value]:
        """Load the chunks of a row of an array, with zeros after its end."""
        address, last = array.at(row * self.plan.dim), self.chunks - 1
        chunks = [address.vectors(LANES)[LANES * i] for i in range(last)]
        return [*chunks, self.masked_load(address.at(LANES * last), self.mask, align=4)]

    def rounded(self, numbers: Value) -> Value:
        """Round 16 float32 to the nearest integers."""
        return self.intrinsic("rint", FLOATS, numbers)

    def levels(self, unpacked: Array, chunk: int) -> Value:
        """Load 16 levels of a token that `unpack` wrote, as float32."""
        level = unpacked.vectors(LANES)[LANES * chunk].to("i32")
        return (level - 128).to("float")


def write_encode(dim: int, code: str, nbits: int, width: int, vnni: bool) -> str:
    """Return the LLVM IR module of ``encode``, for tokens of ``width`` bytes and codes of LLVM type ``code``.

    Scratch memory begins with what `cpu_trellis.Trellis` needs; one byte per level follows.
    """
    kinds = {"values": "float*", "centroids": "float*", "codes": f"{unsigned(code)}*", "levels": "u8*"}
    kinds |= {"numbers": "float*", "coefficients": "float*", "packed": "u8*", "scratch": "u8*"}
    x = Vectors("encode", Plan(dim, 1, vnni), **kinds, steps="float", n="i64", last="i64")
    a = x.arguments
    encoder = _Encoder(x, nbits, width)
    with x.range(0, a.n) as loop:
        centroid, packed = x.centroid(a.codes, loop.i), a.packed.at(loop.i * width)
        fit = encoder.encode(x.vector(a.values, loop.i), x.vector(a.centroids, centroid), packed)
        for k, coefficient in enumerate(fit):
            a.coefficients[loop.i * 2 + k] = coefficient
    return module(x)


class _Encoder:
    """Writes the code that encodes one vector."""

    def __init__(self, x: Vectors, nbits: int, width: int) -> None:
        self.x, self.trellis = x, Trellis(x, nbits, width)
        self.bytes, self.table = x.arguments.scratch.at(self.trellis.size), x.lookup_table()

    def encode(self, vector: list[Value], centroid: list[Value], packed: Array) -> tuple[Value, Value]:
        """Write the packed levels of a vector; return the coefficients a and b."""
        x, zero = self.x, self.x.constant(FLOATS, 0)

        # without levels: the best multiple of the centroid, and the size of the residual
        xx = xc = cc = square = zero
        for v, c in zip(vector, centroid, strict=True):
            xx, xc, cc = x.fmuladd(v, v, xx), x.fmuladd(v, c, xc), x.fmuladd(c, c, cc)
        size, c_size = x.total(xx), x.total(cc)
        a = self._ratio(x.total(xc), c_size, c_size > 0.0)
        for v, c in zip(vector, centroid, strict=True):
            residual = v - a.broadcast(LANES) * c
            square = x.fmuladd(residual, residual, square)
        residual_size = x.total(square)
        some = residual_size > size * NOTHING
        root = x.intrinsic("sqrt", "float", residual_size)
        factor = self._ratio(x.arguments.steps, root, some)

        # levels of the residual, then both coefficients, in turns
        with x.range(0, TURNS, factor=factor, a=a, b=0.0) as turns:
            factor, a = (value.broadcast(LANES) for value in (turns.factor, turns.a))
            for i, (v, c) in enumerate(zip(vector, centroid, strict=True)):
                self.trellis.set_numbers(i, self._steps((v - a * c) * factor))
            self.trellis.write(packed)
            x.unpack(packed, self.bytes, self.trellis.nbits, self.trellis.width, self.table)
            turns.factor, turns.a, turns.b = self._fit(vector, centroid, some)
        return turns.a, turns.b

    def _steps(self, numbers: Value) -> Value:
        """Round 16 numbers to integers from -128 to 127."""
        x = self.x
        return x.rounded(x.minimum(x.maximum(numbers, -128.0), 127.0))

    def _fit(self, vector: list[Value], centroid: list[Value], some: Value) -> tuple[Value, Value, Value]:
        """Return ``1 / b``, a and b of the smallest ``|x - a c - b u|``, u being the unpacked levels.

        ``some`` says whether there is a residual; without one b is 0. If the centroid is zero, a is 0.
        """
        x, zero = self.x, self.x.constant(FLOATS, 0)

        # inner products of x, c and u
        cc = cu = uu = xc = xu = zero
        for i, (v, c) in enumerate(zip(vector, centroid, strict=True)):
            u = x.levels(self.bytes, i)
            if i == x.chunks - 1:
                u = x.where(x.mask, u, zero)
            cc, cu, uu = x.fmuladd(c, c, cc), x.fmuladd(c, u, cu), x.fmuladd(u, u, uu)
            xc, xu = x.fmuladd(v, c, xc), x.fmuladd(v, u, xu)
        cc, cu, uu, xc, xu = map(x.total, (cc, cu, uu, xc, xu))

        # normal equations; if c and u are parallel, or one is 0, fit one coefficient alone
        det = cc * uu - cu * cu
        fits = some & (det > cc * uu * NOTHING)
        a_alone = self._ratio(xc, cc, cc > 0.0)
        b_alone = self._ratio(xu, uu, uu > 0.0)
        b_alone = x.where(some, x.where(cc == 0.0, b_alone, 0.0), 0.0)
        a = x.where(fits, (xc * uu - xu * cu) / det, a_alone)
        b = x.where(fits, (xu * cc - xc * cu) / det, b_alone)
        return self._ratio(x.constant("float", 1), b, b.compare("une", 0.0)), a, b

    def _ratio(self, a: Value, b: Value, valid: Value) -> Value:
        ratio: Value = self.x.where(valid, a / b, 0.0)
        return ratio


def write_decode(dim: int, code: str, nbits: int, width: int, vnni: bool) -> str:
    """Return the LLVM IR module of ``decode``, the inverse of ``encode``."""
    kinds = {"codes": f"{unsigned(code)}*", "coefficients": "i16*", "packed": "u8*", "centroids": "float*"}
    kinds |= {"levels": "u8*", "out": "float*", "scratch": "u8*"}
    x = Vectors("decode", Plan(dim, 1, vnni), **kinds, n="i64", last="i64")
    arguments, table = x.arguments, x.lookup_table()
    final = arguments.n - 1
    with x.range(0, arguments.n) as loop:
        later = x.centroid(arguments.codes, x.minimum(loop.i + _AHEAD, final))
        x.prefetch_bytes(arguments.centroids.at(later * dim), 4 * dim)
        x.unpack(arguments.packed.at(loop.i * width), arguments.scratch, nbits, width, table)
        a, b = (x.half(arguments.coefficients[loop.i * 2 + k]) for k in (0, 1))
        centroid = x.vector(arguments.centroids, x.centroid(arguments.codes, loop.i))
        out = arguments.out.at(loop.i * dim)
        for chunk, c in enumerate(centroid):
            numbers = x.fmuladd(b, x.levels(arguments.scratch, chunk), a * c)
            address = out.at(LANES * chunk)
            if chunk < x.chunks - 1:
                address.vectors(LANES)[0] = numbers
            else:
                x.masked_store(address, numbers, x.mask, align=4)
    return module(x)
