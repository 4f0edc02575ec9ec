"""The machine code that counts how often documents are listed, in LLVM IR."""

from __future__ import annotations

from collections.abc import Callable

from .._jit import Values, splat
from .cpu_tile import FLOATS, GROUP, LANES, LOWEST, MASK, TABLE, Block, Header, Plan, Writer, module

__all__ = ["write_probe"]


def write_probe(plan: Plan) -> str:
    """The module of ``probe``: for each document, how often one of its centroids is a query token's best.

    The ``nprobe``-th best maximum of a group bounds the ``nprobe``-th best score from below, so that few
    groups are looked into, first for that score itself and then for all as good. The columns ``%best`` hold
    the best so far, falling.
    """
    probe = _Probe(plan)
    probe.loop(0, "%blocks", 1, lambda index, _: probe.write(probe.block(index)))
    body = probe.function(
        f"define void @probe({TABLE}, ptr %best, ptr %list_offsets, ptr %lists, ptr %counts, i64 %nprobe, "
        "i64 %count, i64 %listed, i64 %last, i64 %rows, i64 %blocks)"
    )
    declared = "declare i8 @llvm.uadd.sat.i8(i8, i8)", f"declare i{LANES} @llvm.ctpop.i{LANES}(i{LANES})"
    return module(plan, *declared, body)


class _Probe(Writer):
    def write(self, part: Block) -> None:
        self._clear()
        self.loop(
            0, self.op(f"udiv i64 %rows, {GROUP}"), 1, lambda g, _: self._insert(self._at(part.maxima, g))
        )
        bound = self._least(part)
        self._clear()
        self._each(part, bound, lambda _row, scores, _number: self._insert(scores))
        self._each(part, self._least(part), lambda row, _, number: self._list(row, number))

    def _at(self, array: str, row: str) -> list[str]:
        return self.words(self.at(array, self.mul(row, 4 * self.plan.lanes)), 0)

    def _clear(self) -> None:
        lowest, size = splat(LANES, "float", LOWEST), self.mul("%nprobe", 4 * self.plan.lanes)
        self.loop(0, size, 4 * LANES, lambda i, _: self.store(FLOATS, lowest, "%best", i))

    def _insert(self, values: list[str]) -> None:
        """Push a value into each column."""

        def push(i: str, state: Values) -> Values:
            place, lower = self.at("%best", self.mul(i, 4 * self.plan.lanes)), []
            for v, old in enumerate(self.words(place, 0)):
                above = self.op(f"fcmp ogt {FLOATS} {state[v]}, {old}")
                self.store(FLOATS, self.select(above, state[v], old), place, 4 * LANES * v)
                lower.append(self.select(above, old, state[v]))
            return tuple(lower)

        self.loop(0, "%nprobe", 1, push, tuple(values), FLOATS)

    def _least(self, part: Block) -> list[str]:
        last, floor = self._at("%best", self.sub("%nprobe", 1)), self.words(part.header, Header.FLOOR)
        return [self.fmax(x, y) for x, y in zip(last, floor, strict=True)]

    def _each(self, part: Block, bound: list[str], found: Callable[[str, list[str], str], None]) -> None:
        """Call ``found(row, scores, number)`` for each centroid that reaches the bound of a query token.

        ``number``, an i8, is how many tokens of the block have their bound reached.
        """

        def row(k: str, _: Values) -> None:
            scores = self._at(part.scores, k)
            number = self._reached(scores, bound)
            self.when(self.op(f"icmp ne i8 {number}, 0"), lambda: found(k, scores, number))

        def group(first: str, _: Values) -> None:
            top = self._at(part.maxima, self.op(f"udiv i64 {first}, {GROUP}"))
            stop = self.minimum(self.add(first, GROUP), "%count")
            some = self.op(f"icmp ne i8 {self._reached(top, bound)}, 0")
            self.when(some, lambda: self.loop(first, stop, 1, row))

        self.loop(0, "%rows", GROUP, group)

    def _reached(self, values: list[str], bound: list[str]) -> str:
        """How many values reach the bound, up to 255."""
        total = "0"
        for x, y in zip(values, bound, strict=True):
            reached = self.op(f"bitcast {MASK} {self.op(f'fcmp oge {FLOATS} {x}, {y}')} to i{LANES}")
            ones = self.op(f"call i{LANES} @llvm.ctpop.i{LANES}(i{LANES} {reached})")
            total = self.op(f"add i8 {total}, {self.op(f'trunc i{LANES} {ones} to i8')}")
        return total

    def _list(self, row: str, number: str) -> None:
        """Add to the counts of a centroid's documents; a damaged list adds to others, but that is all."""

        def document(i: str, _: Values) -> None:
            at = self.op(f"zext i32 {self.load('i32', '%lists', self.mul(i, 4))} to i64")
            place = self.at("%counts", self.minimum(at, "%last"))
            count = self.op(f"call i8 @llvm.uadd.sat.i8(i8 {self.load('i8', place)}, i8 {number})")
            self.store("i8", count, place)

        place = self.at("%list_offsets", self.mul(row, 8))
        start, stop = self.load("i64", place), self.load("i64", place, 8)
        self.loop(self.maximum(start, 0), self.minimum(stop, "%listed"), 1, document)
