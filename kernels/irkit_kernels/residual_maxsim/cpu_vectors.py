"""Vectors of float32 of any width in LLVM IR, and the machine code of ``encode`` and ``decode``."""

from __future__ import annotations

from .._jit import Values, array, number, splat
from .cpu_tile import FLOATS, INTS, LANES, MASK, Plan, Writer, module, size_of
from .cpu_trellis import Trellis
from .reference import NOTHING, TURNS

__all__ = ["Vectors", "write_decode", "write_encode"]

_SMALL = "<16 x i8>"
_AHEAD = 6  # tokens, whose centroids `decode` fetches
_PRODUCTS = [
    ("c", "c"),
    ("c", "u"),
    ("u", "u"),
    ("x", "c"),
    ("x", "u"),
]  # of a vector x, its centroid c and its levels u


class Vectors(Writer):
    """Writes a function on vectors of ``plan.dim`` float32, in chunks of 16."""

    DECLARE = (
        f"declare {FLOATS} @llvm.masked.load.v16f32.p0(ptr, i32, {MASK}, {FLOATS})",
        f"declare void @llvm.masked.store.v16f32.p0({FLOATS}, ptr, i32, {MASK})",
        f"declare {FLOATS} @llvm.fabs.v16f32({FLOATS})",
        f"declare {FLOATS} @llvm.rint.v16f32({FLOATS})",
        f"declare float @llvm.vector.reduce.fmax.v16f32({FLOATS})",
        "declare float @llvm.sqrt.f32(float)",
    )

    @property
    def chunks(self) -> int:
        """Registers of a vector."""
        return -(-self.plan.dim // LANES)

    @property
    def mask(self) -> str:
        """Which numbers of the last chunk there are."""
        return array(LANES, "i1", [i < self.plan.dim - LANES * (self.chunks - 1) for i in range(LANES)])

    def vector(self, pointer: str, row: str) -> list[str]:
        """The chunks of a row of an array, zeros after its end."""
        place, last = self.at(pointer, self.mul(row, 4 * self.plan.dim)), self.chunks - 1
        chunks = [self.load(FLOATS, place, 4 * LANES * i) for i in range(last)]
        load, at = f"call {FLOATS} @llvm.masked.load.v16f32.p0", self.at(place, 4 * LANES * last)
        return [*chunks, self.op(f"{load}(ptr {at}, i32 4, {MASK} {self.mask}, {FLOATS} zeroinitializer)")]

    def rounded(self, x: str) -> str:
        """16 float32 as the nearest int32."""
        return self.op(
            f"fptosi {FLOATS} {self.op(f'call {FLOATS} @llvm.rint.v16f32({FLOATS} {x})')} to {INTS}"
        )

    def levels(self, unpacked: str, chunk: int) -> str:
        """16 levels of a token that `unpack` wrote."""
        level = self.op(f"zext {_SMALL} {self.load(_SMALL, unpacked, LANES * chunk)} to {INTS}")
        return self.op(f"sitofp {INTS} {self.ints('sub', level, 128)} to {FLOATS}")


def write_encode(dim: int, code: str, nbits: int, width: int, vnni: bool) -> str:
    """The module of ``encode``: ``width`` bytes a token, codes of LLVM type ``code``."""
    c = _Encode(Plan(dim, 1, vnni), nbits, width)

    def token(i: str, _: Values) -> None:
        number = c.centroid(code, "%codes", c.mul(i, size_of(code)))
        place = c.at("%packed", c.mul(i, width))
        a, b = c.fit(c.vector("%values", i), c.vector("%centroids", number), place)
        for at, x in ((0, a), (4, b)):
            c.store("float", x, "%coefficients", c.add(c.mul(i, 8), at))

    c.loop(0, "%n", 1, token)
    body = c.function(
        "define void @encode(ptr %values, ptr %centroids, ptr %codes, ptr %levels, ptr %numbers, "
        "ptr %coefficients, ptr %packed, ptr %scratch, float %steps, i64 %n, i64 %last)"
    )
    return module(c.plan, *Vectors.DECLARE, body)


class _Encode(Vectors):
    """Scratch memory is that of `cpu_trellis.Trellis`, then a byte a level."""

    def __init__(self, plan: Plan, nbits: int, width: int) -> None:
        super().__init__(plan)
        self.trellis = Trellis(self, nbits, width)
        self.bytes, self.table = self.at("%scratch", self.trellis.size), self.lookup_table()

    def fit(self, x: list[str], centroid: list[str], packed: str) -> tuple[str, str]:
        """Write the packed levels of a vector; their coefficients."""
        zero = splat(LANES, "float", 0)
        xx, xc, cc, square = [zero] * 4
        for v, c in zip(x, centroid, strict=True):
            xx, xc, cc = self.fma(v, v, xx), self.fma(v, c, xc), self.fma(c, c, cc)
        total, norm = self.total(xx), self.total(cc)
        a = self._ratio(self.total(xc), norm, self.op(f"fcmp ogt float {norm}, 0.0"))  # the least residual
        for v, c in zip(x, centroid, strict=True):
            rest = self._rest(v, c, self.broadcast(LANES, "float", a))
            square = self.fma(rest, rest, square)
        norm = self.total(square)
        some = self.op(f"fcmp ogt float {norm}, {self.op(f'fmul float {total}, {number(NOTHING)}')}")
        factor = self._ratio("%steps", self.op(f"call float @llvm.sqrt.f32(float {norm})"), some)

        def turn(_: str, state: Values) -> Values:
            factor, a, _b = (self.broadcast(LANES, "float", value) for value in state)
            for i, (v, c) in enumerate(zip(x, centroid, strict=True)):
                self.trellis.give(i, self._steps(self.floats("fmul", self._rest(v, c, a), factor)))
            self.trellis.write(packed)
            self.unpack(packed, self.bytes, self.trellis.nbits, self.trellis.width, self.table)
            sums = [zero] * len(_PRODUCTS)
            for i, (v, c) in enumerate(zip(x, centroid, strict=True)):
                u = self.levels(self.bytes, i)
                if i == self.chunks - 1:
                    u = self.select(self.mask, u, zero)
                of = {"x": v, "c": c, "u": u}
                sums = [self.fma(of[p], of[q], sum_) for (p, q), sum_ in zip(_PRODUCTS, sums, strict=True)]
            return self._solve(some, *map(self.total, sums))

        _, a, b = self.loop(0, TURNS, 1, turn, (factor, a, "0.0"), "float")
        return a, b

    def _rest(self, x: str, c: str, a: str) -> str:
        return self.floats("fsub", x, self.floats("fmul", a, c))

    def _steps(self, x: str) -> str:
        """16 numbers as the nearest whole ones from -128 to 127."""
        x, most = self.fmax(x, splat(LANES, "float", -128)), splat(LANES, "float", 127)
        x = self.select(self.op(f"fcmp olt {FLOATS} {x}, {most}"), x, most)
        return self.op(f"call {FLOATS} @llvm.rint.v16f32({FLOATS} {x})")

    def _solve(self, some: str, cc: str, cu: str, uu: str, xc: str, xu: str) -> Values:
        """``1 / b``, a and b of least ``|x - a c - b u|``; one is 0 without residual or without centroid."""

        def minus(a: str, b: str, c: str, d: str) -> str:  # a b - c d
            return self.op(f"fsub float {self.op(f'fmul float {a}, {b}')}, {self.op(f'fmul float {c}, {d}')}")

        det = minus(cc, uu, cu, cu)
        least = self.op(f"fmul float {self.op(f'fmul float {cc}, {uu}')}, {number(NOTHING)}")
        fits = self.op(f"and i1 {some}, {self.op(f'fcmp ogt float {det}, {least}')}")
        only_c = self._ratio(xc, cc, self.op(f"fcmp ogt float {cc}, 0.0"))
        only_u = self._ratio(xu, uu, self.op(f"fcmp ogt float {uu}, 0.0"))
        only_u = self.op(f"select i1 {self.op(f'fcmp oeq float {cc}, 0.0')}, float {only_u}, float 0.0")
        only_u = self.op(f"select i1 {some}, float {only_u}, float 0.0")
        a = self.op(f"fdiv float {minus(xc, uu, xu, cu)}, {det}")
        b = self.op(f"fdiv float {minus(xu, cc, xc, cu)}, {det}")
        a, b = (self.op(f"select i1 {fits}, float {x}, float {y}") for x, y in ((a, only_c), (b, only_u)))
        return self._ratio(number(1), b, self.op(f"fcmp une float {b}, 0.0")), a, b

    def _ratio(self, a: str, b: str, valid: str) -> str:
        return self.op(f"select i1 {valid}, float {self.op(f'fdiv float {a}, {b}')}, float 0.0")


def write_decode(dim: int, code: str, nbits: int, width: int, vnni: bool) -> str:
    """The module of ``decode``, the inverse of ``encode``."""
    c = Vectors(Plan(dim, 1, vnni))
    table, masked_store = c.lookup_table(), "@llvm.masked.store.v16f32.p0"
    final = c.sub("%n", 1)

    def token(i: str, _: Values) -> None:
        later = c.centroid(code, "%codes", c.mul(c.minimum(c.add(i, _AHEAD), final), size_of(code)))
        c.prefetch(c.at("%centroids", c.mul(later, 4 * dim)), 4 * dim)
        c.unpack(c.at("%packed", c.mul(i, width)), "%scratch", nbits, width, table)
        a, b = (c.half("%coefficients", c.add(c.mul(i, 4), at)) for at in (0, 2))
        centroid = c.vector("%centroids", c.centroid(code, "%codes", c.mul(i, size_of(code))))
        out = c.at("%out", c.mul(i, 4 * dim))
        for chunk, x in enumerate(centroid):
            y = c.fma(b, c.levels("%scratch", chunk), c.floats("fmul", a, x))
            place = c.at(out, 4 * LANES * chunk)
            if chunk < c.chunks - 1:
                c.store(FLOATS, y, place)
            else:
                c.do(f"call void {masked_store}({FLOATS} {y}, ptr {place}, i32 4, {MASK} {c.mask})")

    c.loop(0, "%n", 1, token)
    body = c.function(
        "define void @decode(ptr %codes, ptr %coefficients, ptr %packed, ptr %centroids, ptr %levels, "
        "ptr %out, ptr %scratch, i64 %n, i64 %last)"
    )
    return module(c.plan, *Vectors.DECLARE, body)
