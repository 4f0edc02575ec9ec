"""The machine code that marks candidates, in LLVM IR."""

from __future__ import annotations

from collections.abc import Callable

from .._jit import Values, splat
from .cpu_tile import FLOATS, GROUP, LANES, LOWEST, MASK, TABLE, Block, Header, Plan, Writer, module

__all__ = ["write_probe"]


def write_probe(plan: Plan) -> str:
    """The module of ``probe``: sets the mark of every document at one of a query token's best centroids.

    The ``nprobe``-th best maximum of a group bounds the ``nprobe``-th best score from below, so that few
    groups are looked into, first for that score itself and then for all as good. The columns ``%best`` hold
    the best so far, falling.
    """
    probe = _Probe(plan)
    probe.loop(0, "%blocks", 1, lambda index, _: probe.write(probe.block(index)))
    body = probe.function(
        f"define void @probe({TABLE}, ptr %best, ptr %list_offsets, ptr %lists, ptr %marks, i64 %nprobe, "
        "i64 %count, i64 %listed, i64 %last, i64 %rows, i64 %blocks)"
    )
    return module(plan, body)


class _Probe(Writer):
    def write(self, part: Block) -> None:
        self._clear()
        self.loop(
            0, self.op(f"udiv i64 %rows, {GROUP}"), 1, lambda g, _: self._insert(self._at(part.maxima, g))
        )
        bound = self._least(part)
        self._clear()
        self._each(part, bound, lambda _, scores: self._insert(scores))
        self._each(part, self._least(part), lambda row, _: self._mark(row))

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

    def _each(self, part: Block, bound: list[str], found: Callable[[str, list[str]], None]) -> None:
        """Call ``found(row, scores)`` for each centroid that reaches the bound of a query token."""

        def row(k: str, _: Values) -> None:
            scores = self._at(part.scores, k)
            self.when(self._any(scores, bound), lambda: found(k, scores))

        def group(first: str, _: Values) -> None:
            top = self._at(part.maxima, self.op(f"udiv i64 {first}, {GROUP}"))
            stop = self.minimum(self.add(first, GROUP), "%count")
            self.when(self._any(top, bound), lambda: self.loop(first, stop, 1, row))

        self.loop(0, "%rows", GROUP, group)

    def _any(self, values: list[str], bound: list[str]) -> str:
        reached = splat(LANES, "i1", 0)
        for x, y in zip(values, bound, strict=True):
            reached = self.op(f"or {MASK} {reached}, {self.op(f'fcmp oge {FLOATS} {x}, {y}')}")
        return self.op(f"icmp ne i{LANES} {self.op(f'bitcast {MASK} {reached} to i{LANES}')}, 0")

    def _mark(self, row: str) -> None:
        """Mark the documents of a centroid; a damaged list marks others, but nothing else."""

        def document(i: str, _: Values) -> None:
            number = self.op(f"zext i32 {self.load('i32', '%lists', self.mul(i, 4))} to i64")
            self.store("i8", "1", "%marks", self.minimum(number, "%last"))

        place = self.at("%list_offsets", self.mul(row, 8))
        start, stop = self.load("i64", place), self.load("i64", place, 8)
        self.loop(self.maximum(start, 0), self.minimum(stop, "%listed"), 1, document)
