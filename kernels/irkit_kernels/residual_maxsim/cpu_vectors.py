"""Vectors of float32 of any width in LLVM IR, and the machine code of ``encode`` and ``decode``."""

from __future__ import annotations

from .._jit import Values, array, number, splat
from .cpu_tile import FLOATS, INTS, LANES, MASK, Plan, Writer, module, size_of
from .reference import NOTHING, TURNS

__all__ = ["Vectors", "write_decode", "write_encode"]

_SMALL = "<16 x i8>"
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


def write_encode(dim: int, code: str, nbits: int, width: int, vnni: bool) -> str:
    """The module of ``encode``: ``width`` bytes a token, codes of LLVM type ``code``.

    Scratch memory holds a level a byte, in planes of ``width``, and zeros after them.
    """
    c = _Encode(Plan(dim, 1, vnni))
    steps = [
        (
            c.broadcast(LANES, "float", c.load("float", "%levels", 4 * i)),
            c.broadcast(LANES, "i32", c.load("i32", "%middles", 4 * i)),
        )
        for i in range(2**nbits if nbits < 8 else 0)
    ]

    def token(i: str, _: Values) -> None:
        number = c.centroid(code, "%codes", c.mul(i, size_of(code)))
        a, b = c.fit(c.vector("%values", i), c.vector("%centroids", number), steps)
        for at, x in ((0, a), (4, b)):
            c.store("float", x, "%coefficients", c.add(c.mul(i, 8), at))
        c.pack(c.at("%packed", c.mul(i, width)), nbits, width)

    c.loop(0, "%n", 1, token)
    body = c.function(
        "define void @encode(ptr %values, ptr %centroids, ptr %codes, ptr %levels, ptr %middles, "
        "ptr %coefficients, ptr %packed, ptr %scratch, float %steps, i64 %n, i64 %last)"
    )
    return module(c.plan, *Vectors.DECLARE, body)


class _Encode(Vectors):
    def fit(self, x: list[str], centroid: list[str], steps: list[tuple[str, str]]) -> tuple[str, str]:
        """Write the levels of a vector to scratch memory; their coefficients."""
        zero, square, total = splat(LANES, "float", 0), splat(LANES, "float", 0), splat(LANES, "float", 0)
        for v, c in zip(x, centroid, strict=True):
            residual = self.floats("fsub", v, c)
            square, total = self.fma(residual, residual, square), self.fma(v, v, total)
        norm = self.total(square)
        least = self.op(f"fmul float {self.total(total)}, {number(NOTHING)}")
        some = self.op(f"fcmp ogt float {norm}, {least}")
        factor = self._ratio("%steps", self.op(f"call float @llvm.sqrt.f32(float {norm})"), some)

        def turn(_: str, state: Values) -> Values:
            factor, a, _b = (self.broadcast(LANES, "float", value) for value in state)
            sums = [zero] * len(_PRODUCTS)
            for i, (v, c) in enumerate(zip(x, centroid, strict=True)):
                rest = self.floats("fsub", v, self.floats("fmul", a, c))
                level, u = self._level(self.floats("fmul", rest, factor), steps)
                if i == self.chunks - 1:
                    u = self.select(self.mask, u, zero)
                    level = self.op(f"select {MASK} {self.mask}, {INTS} {level}, {INTS} zeroinitializer")
                self.store(_SMALL, self.op(f"trunc {INTS} {level} to {_SMALL}"), "%scratch", LANES * i)
                of = {"x": v, "c": c, "u": u}
                sums = [self.fma(of[p], of[q], sum_) for (p, q), sum_ in zip(_PRODUCTS, sums, strict=True)]
            return self._solve(some, *map(self.total, sums))

        _, a, b = self.loop(0, TURNS, 1, turn, (factor, number(1), "0.0"), "float")
        return a, b

    def _level(self, x: str, steps: list[tuple[str, str]]) -> tuple[str, str]:
        """The level next to 16 numbers, and what it stands for."""
        x = self.fmax(x, splat(LANES, "float", -128))
        x = self.select(
            self.op(f"fcmp olt {FLOATS} {x}, {splat(LANES, 'float', 127)}"), x, splat(LANES, "float", 127)
        )
        step = self.rounded(x)
        if not steps:
            return self.ints("add", step, 128), self.op(f"sitofp {INTS} {step} to {FLOATS}")
        level, value = splat(LANES, "i32", 0), steps[0][0]
        for i, (stands, middle) in enumerate(steps[1:], 1):
            above = self.op(f"icmp sgt {INTS} {step}, {middle}")
            value = self.select(above, stands, value)
            level = self.op(f"select {MASK} {above}, {INTS} {splat(LANES, 'i32', i)}, {INTS} {level}")
        return level, value

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

    def pack(self, target: str, nbits: int, width: int) -> None:
        """Join the planes of levels."""
        for at in range(0, width, 64):
            kind = f"<{min(64, width - at)} x i8>"
            result = self.load(kind, "%scratch", at)
            for plane in range(1, 8 // nbits):
                x = self.load(kind, "%scratch", plane * width + at)
                x = self.op(f"shl {kind} {x}, {splat(min(64, width - at), 'i8', plane * nbits)}")
                result = self.op(f"or {kind} {result}, {x}")
            self.store(kind, result, target, at)


def write_decode(dim: int, code: str, nbits: int, width: int, vnni: bool) -> str:
    """The module of ``decode``, the inverse of ``encode``."""
    c = Vectors(Plan(dim, 1, vnni))
    table, masked_store = c.lookup_table(nbits), "@llvm.masked.store.v16f32.p0"

    def token(i: str, _: Values) -> None:
        c.unpack(c.at("%packed", c.mul(i, width)), "%scratch", nbits, width, table)
        a, b = (c.half("%coefficients", c.add(c.mul(i, 4), at)) for at in (0, 2))
        centroid = c.vector("%centroids", c.centroid(code, "%codes", c.mul(i, size_of(code))))
        out = c.at("%out", c.mul(i, 4 * dim))
        for chunk, x in enumerate(centroid):
            level = c.op(f"zext {_SMALL} {c.load(_SMALL, '%scratch', LANES * chunk)} to {INTS}")
            level = c.op(f"sitofp {INTS} {c.ints('sub', level, 128)} to {FLOATS}")
            y, place = c.fma(b, level, c.floats("fmul", a, x)), c.at(out, 4 * LANES * chunk)
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
