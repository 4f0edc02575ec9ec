"""The machine code of ``assign``, in LLVM IR: a matrix product in bytes of which only the maxima are kept.

A panel is 64 centroids. A vector keeps, for each of 16 lanes, the highest sum and its panel, which leaves 4
centroids a lane. Those of the highest lanes are then compared exactly.
"""

from __future__ import annotations

from .._jit import Values, number, splat
from .cpu_tile import FLOATS, INTS, LANES, Plan, module
from .cpu_vectors import Vectors

__all__ = ["BLOCK", "PANEL", "ROWS", "scratch_size", "write_assign"]

ROWS, VECTORS = 6, 4  # 24 sums, 4 vectors of centroids and one of values fit the 32 registers of AVX-512
PANEL = VECTORS * LANES
BLOCK = 8 * ROWS  # vectors for which a panel is fetched once
_LOWEST = -(2**31)


def scratch_size(dim: int) -> int:
    """Bytes of scratch memory: bytes of a block, highest sums, their panels, margins."""
    return BLOCK * (_width(dim) + 2 * 4 * LANES + 4)


def write_assign(dim: int, vnni: bool) -> str:
    """The module of ``assign``, for vectors of ``dim`` numbers."""
    c = _Assign(Plan(dim, 1, vnni))
    c.loop(0, "%n", BLOCK, c.block_of_values)
    body = c.function(
        "define void @assign(ptr %values, ptr %panels, ptr %centroids, ptr %out, ptr %scratch, "
        "float %square, i64 %n, i64 %count)"
    )
    return module(
        c.plan,
        *Vectors.DECLARE,
        f"declare {INTS} @llvm.smax.v16i32({INTS}, {INTS})",
        f"declare i32 @llvm.vector.reduce.smax.v16i32({INTS})",
        body,
    )


def _width(dim: int) -> int:
    return -(-dim // LANES) * LANES


class _Assign(Vectors):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.width, self.steps = _width(plan.dim), -(-plan.dim // 4)
        self.sums_at = self.at("%scratch", BLOCK * self.width)
        self.panels_at = self.at(self.sums_at, BLOCK * 4 * LANES)
        self.margins_at = self.at(self.panels_at, BLOCK * 4 * LANES)

    def block_of_values(self, first: str, _: Values) -> None:
        rows = self.minimum(self.sub("%n", first), BLOCK)
        filled = self.mul(self.op(f"sdiv i64 {self.add(rows, ROWS - 1)}, {ROWS}"), ROWS)
        last = self.sub("%n", 1)
        self.loop(0, filled, 1, lambda row, _: self._prepare(row, self.minimum(self.add(first, row), last)))
        panels = self.op(f"sdiv i64 {self.add('%count', PANEL - 1)}, {PANEL}")

        def panel(index: str, _: Values) -> None:
            place = self.at("%panels", self.mul(index, PANEL * 4 * (1 + self.steps)))
            number = self.broadcast(LANES, "i32", self.op(f"trunc i64 {index} to i32"))
            self.loop(0, filled, ROWS, lambda row, _: self._tile(row, place, number))

        self.loop(0, panels, 1, panel)
        self.loop(0, rows, 1, lambda row, _: self._choose(row, self.add(first, row)))

    def _prepare(self, row: str, source: str) -> None:
        """Round a vector to bytes; the margin is two standard deviations of the error of a sum."""
        chunks = self.vector("%values", source)
        highest = total = splat(LANES, "float", 0)
        for x in chunks:
            highest = self.fmax(self.op(f"call {FLOATS} @llvm.fabs.v16f32({FLOATS} {x})"), highest)
            total = self.fma(x, x, total)
        high = self.op(f"call float @llvm.vector.reduce.fmax.v16f32({FLOATS} {highest})")
        factor = self.op(f"fdiv float {number(127)}, {high}")
        factor = self.op(
            f"select i1 {self.op(f'fcmp ogt float {high}, {number(1e-30)}')}, float {factor}, float 0.0"
        )
        each = self.broadcast(LANES, "float", factor)
        for i, x in enumerate(chunks):
            level = self.ints("add", self.rounded(self.floats("fmul", x, each)), 128)
            self.store(
                "<16 x i8>",
                self.op(f"trunc {INTS} {level} to <16 x i8>"),
                "%scratch",
                self.add(self.mul(row, self.width), LANES * i),
            )
        square = self.op(f"fmul float {self.total(total)}, {self.op(f'fmul float {factor}, {factor}')}")
        square = self.op(f"fdiv float {self.op(f'fadd float {square}, %square')}, {number(3)}")
        margin = self.op(f"call float @llvm.sqrt.f32(float {square})")
        place = self.mul(row, 4)
        self.store("float", margin, self.margins_at, place)
        place = self.mul(row, 4 * LANES)
        self.store(INTS, splat(LANES, "i32", _LOWEST), self.sums_at, place)
        self.store(INTS, splat(LANES, "i32", 0), self.panels_at, place)

    def _tile(self, first: str, panel: str, number: str) -> None:
        values = self.at("%scratch", self.mul(first, self.width))
        bias = [self.load(INTS, panel, 4 * LANES * v) for v in range(VECTORS)]
        weights = self.at(panel, 4 * PANEL)

        def multiply(step: str, sums: Values) -> Values:
            place, own, result = (
                self.at(weights, self.mul(step, 4 * PANEL)),
                self.at(values, self.mul(step, 4)),
                [],
            )
            w = [self.load(INTS, place, 4 * LANES * v) for v in range(VECTORS)]
            for r in range(ROWS):
                x = self.broadcast(LANES, "i32", self.load("i32", own, r * self.width))
                result += [self.dot4(sums[r * VECTORS + v], x, w[v], self.plan.vnni) for v in range(VECTORS)]
            return tuple(result)

        sums = self.loop(0, self.steps, 1, multiply, tuple(bias) * ROWS, INTS)
        place = self.mul(first, 4 * LANES)
        for r in range(ROWS):
            a, b, c, d = sums[r * VECTORS : (r + 1) * VECTORS]
            best = self._higher(self._higher(a, b), self._higher(c, d))
            old_sums, old_panels = self.at(self.sums_at, place), self.at(self.panels_at, place)
            old, old_number = (self.load(INTS, x, 4 * LANES * r) for x in (old_sums, old_panels))
            above = self.op(f"icmp sgt {INTS} {best}, {old}")
            for new, before, target in ((best, old, old_sums), (number, old_number, old_panels)):
                kept = self.op(f"select <{LANES} x i1> {above}, {INTS} {new}, {INTS} {before}")
                self.store(INTS, kept, target, 4 * LANES * r)

    def _higher(self, a: str, b: str) -> str:
        return self.op(f"call {INTS} @llvm.smax.v16i32({INTS} {a}, {INTS} {b})")

    def _choose(self, row: str, target: str) -> None:
        """Among the centroids behind all sums within the margin, take the one of largest exact product."""
        values, place, out = (
            self.vector("%values", target),
            self.mul(row, 4 * LANES),
            self.at("%out", self.mul(target, 4)),
        )
        sums = self.at(self.sums_at, place)
        highest = self.op(f"call i32 @llvm.vector.reduce.smax.v16i32({INTS} {self.load(INTS, sums)})")
        margin = self.op(f"fptosi float {self.load('float', self.margins_at, self.mul(row, 4))} to i32")
        bound = self.op(f"sub i32 {highest}, {margin}")
        best = self.at(self.margins_at, self.mul(row, 4))  # no longer needed
        self.store("float", number(-3e38), best)
        self.store("i32", "0", out)

        def lane(i: str, _: Values) -> None:
            offset = self.mul(i, 4)
            near = self.op(f"icmp sge i32 {self.load('i32', sums, offset)}, {bound}")
            self.when(near, lambda: candidates(i, offset))

        def candidates(i: str, offset: str) -> None:
            panel = self.op(f"zext i32 {self.load('i32', self.at(self.panels_at, place), offset)} to i64")
            for v in range(VECTORS):
                number = self.minimum(
                    self.add(self.add(self.mul(panel, PANEL), LANES * v), i), self.sub("%count", 1)
                )
                product = splat(LANES, "float", 0)
                for x, y in zip(values, self.vector("%centroids", number), strict=True):
                    product = self.fma(x, y, product)
                score = self.total(product)
                better = self.op(f"fcmp ogt float {score}, {self.load('float', best)}")
                code = self.op(f"trunc i64 {number} to i32")
                for kind, new, where in (("float", score, best), ("i32", code, out)):
                    self.store(
                        kind,
                        self.op(f"select i1 {better}, {kind} {new}, {kind} {self.load(kind, where)}"),
                        where,
                    )

        self.loop(0, LANES, 1, lane)
