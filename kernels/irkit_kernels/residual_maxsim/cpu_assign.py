"""The code of ``assign``, in LLVM IR: the nearest centroid of each vector.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

A matrix product in bytes finds the candidates, of which float32 products select the best:

* Vectors and centroids are rounded to bytes. 6 vectors are multiplied with a panel of 64 centroids, i.e. 4
  registers. Only the maxima of the sums are kept: for each vector and each of 16 lanes the highest sum and
  the number of its panel. Each lane then stands for 4 centroids.
* Every sum has a rounding error. The margin is two standard deviations of the error of a difference of sums.
  All lanes whose sum is within the margin of the highest are candidates; their centroids are compared
  exactly.
"""

from __future__ import annotations

from .._simd import dot_bytes
from .._typed import Array, Value, module
from .cpu_tile import FLOATS, INTS, LANES, Plan
from .cpu_vectors import Vectors

__all__ = ["BLOCK", "PANEL", "ROWS", "scratch_size", "write_assign"]

ROWS, VECTORS = 6, 4  # 24 sums, 4 vectors of centroids and one of values fit the 32 registers of AVX-512
PANEL = VECTORS * LANES
BLOCK = 8 * ROWS  # vectors per panel that is read
_LOWEST = -(2**31)


def scratch_size(dim: int) -> int:
    """Return the bytes of scratch memory: bytes of a block, highest sums, their panels, margins."""
    return BLOCK * (_width(dim) + 2 * 4 * LANES + 4)


def write_assign(dim: int, vnni: bool) -> str:
    """Return the LLVM IR module of ``assign``, for vectors of ``dim`` numbers."""
    kinds = {"values": "float*", "panels": "u8*", "centroids": "float*", "out": "i32*", "scratch": "u8*"}
    x = Vectors("assign", Plan(dim, 1, vnni), **kinds, square="float", n="i64", count="i64")
    writer = _Assign(x)
    with x.range(0, x.arguments.n, BLOCK) as blocks:
        writer.assign_block(blocks.i)
    return module(x)


def _width(dim: int) -> int:
    return -(-dim // LANES) * LANES


class _Assign:
    """Writes the code for a block of vectors."""

    def __init__(self, x: Vectors) -> None:
        self.x, self.width, self.steps = x, _width(x.plan.dim), -(-x.plan.dim // 4)
        self.bytes = x.arguments.scratch
        self.sums = self.bytes.at(BLOCK * self.width).cast("i32", 1)
        self.panels = self.sums.at(BLOCK * LANES)
        self.margins = self.panels.at(BLOCK * LANES).cast("float", 1)

    def assign_block(self, first: Value) -> None:
        """Assign up to `BLOCK` vectors."""
        x, a = self.x, self.x.arguments
        rows = x.minimum(a.n - first, BLOCK)
        whole_tiles = (rows + (ROWS - 1)) // ROWS * ROWS
        last = a.n - 1
        with x.range(0, whole_tiles) as loop:  # the last vector fills up its tile
            self._prepare(loop.i, x.minimum(first + loop.i, last))
        n_panels = (a.count + (PANEL - 1)) // PANEL
        with x.range(0, n_panels) as panels:
            panel = a.panels.at(panels.i * (PANEL * 4 * (1 + self.steps)))
            number = panels.i.to("i32").broadcast(LANES)
            with x.range(0, whole_tiles, ROWS) as loop:
                self._multiply(loop.i, panel, number)
        with x.range(0, rows) as loop:
            self._choose(loop.i, first + loop.i)

    def _prepare(self, row: Value, source: Value) -> None:
        """Round a vector to bytes, compute its margin, and clear its maxima."""
        x = self.x
        chunks = x.vector(x.arguments.values, source)
        highest = square = x.constant(FLOATS, 0)
        for chunk in chunks:
            highest = x.maximum(x.intrinsic("fabs", FLOATS, chunk), highest)
            square = x.fmuladd(chunk, chunk, square)
        high = x.intrinsic("vector.reduce.fmax", "float", highest)
        factor = 127.0 / high
        factor = x.where(high > 1e-30, factor, 0.0)
        factors = factor.broadcast(LANES)
        for i, chunk in enumerate(chunks):
            level = x.rounded(chunk * factors).to("i32") + 128
            self.bytes.vectors(LANES)[row * self.width + LANES * i] = level.to("u8")
        bytes_square = x.total(square) * (factor * factor)
        self.margins[row] = x.intrinsic("sqrt", "float", (bytes_square + x.arguments.square) / 3.0)
        self.sums.vectors(LANES)[row * LANES] = _LOWEST
        self.panels.vectors(LANES)[row * LANES] = 0

    def _multiply(self, first: Value, panel: Array, number: Value) -> None:
        """Multiply 6 vectors with a panel, and update their maxima."""
        x = self.x
        values = self.bytes.at(first * self.width)
        words = panel.cast("i32", 1)
        bias = [words.vectors(LANES)[LANES * v] for v in range(VECTORS)]
        weights = words.at(PANEL)
        with x.range(0, self.steps, sums=bias * ROWS) as loop:
            step_words = weights.at(loop.i * PANEL).vectors(LANES)
            row_words = values.at(loop.i * 4).cast("i32", 1, 1)
            w, sums = [step_words[LANES * v] for v in range(VECTORS)], []
            for r in range(ROWS):
                u = row_words[r * self.width].broadcast(LANES)
                for v in range(VECTORS):
                    sums.append(dot_bytes(loop.sums[r * VECTORS + v], u, w[v], x.plan.vnni))
            loop.sums = sums
        for r in range(ROWS):
            a, b, c, d = loop.sums[r * VECTORS : (r + 1) * VECTORS]
            best = self._higher(self._higher(a, b), self._higher(c, d))
            old_sums, old_panels = self.sums.at(first * LANES), self.panels.at(first * LANES)
            old_sum, old_panel = (array.vectors(LANES)[LANES * r] for array in (old_sums, old_panels))
            above = best > old_sum
            old_sums.vectors(LANES)[LANES * r] = x.where(above, best, old_sum)
            old_panels.vectors(LANES)[LANES * r] = x.where(above, number, old_panel)

    def _higher(self, a: Value, b: Value) -> Value:
        return self.x.intrinsic("smax", INTS, a, b)

    def _choose(self, row: Value, target: Value) -> None:
        """Compare the centroids of all lanes within the margin exactly; store the best as ``out[target]``."""
        x, a = self.x, self.x.arguments
        values, out = x.vector(a.values, target), a.out.at(target)
        sums, panels = self.sums.at(row * LANES), self.panels.at(row * LANES)
        highest = x.intrinsic("vector.reduce.smax", "i32", sums.vectors(LANES)[0])
        bound = highest - self.margins[row].to("i32")
        best = self.margins.at(row)  # the margin has been read, so its memory holds the best product
        best[0] = -3e38
        out[0] = 0
        with x.range(0, LANES) as lanes, x.when(sums[lanes.i] >= bound):
            panel = panels.cast("u32", 1)[lanes.i].to("i64")
            for v in range(VECTORS):
                number = x.minimum(panel * PANEL + LANES * v + lanes.i, a.count - 1)
                product = x.constant(FLOATS, 0)
                for value, weight in zip(values, x.vector(a.centroids, number), strict=True):
                    product = x.fmuladd(value, weight, product)
                score = x.total(product)
                better = score > best[0]
                code = number.to("i32")
                best[0] = x.where(better, score, best[0])
                out[0] = x.where(better, code, out[0])
