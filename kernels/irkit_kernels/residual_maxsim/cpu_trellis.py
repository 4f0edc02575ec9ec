"""The best way of levels through a trellis in LLVM IR: Viterbi's algorithm over windows of 8 bits.

16 windows make a register, and 16 registers are all ways to go on at a number: ``window >> nbits`` is the
state (the last bits) before it, ``window % states`` the one after. Of the windows that lead to a state the
cheapest stays; the bits of it that the state does not show are the lowest of what it costs: numbers and
levels are whole and multiplied by ``scale``, so that squares leave room for them, and one minimum finds both.
Costs begin at ``2**23``, from where on the bits of a float32 count whole numbers, up to ``2**24``, which is
far more than they come to.
"""

from __future__ import annotations

from .._jit import Values, array, splat
from .cpu_tile import FLOATS, INTS, LANES, Writer
from .reference import WINDOW

__all__ = ["Trellis", "scale_of", "scratch_size"]

_SMALL = f"<{LANES} x i8>"
_ZERO, _FAR = 2.0**23, 2.0**22  # costs of the state of zeros at first, and more of all others


def scale_of(nbits: int) -> int:
    """What numbers and levels are multiplied with: its square is at least ``2**nbits``."""
    return {1: 2, 2: 2, 4: 4, 8: 1}[nbits]


def scratch_size(dim: int, nbits: int, width: int) -> int:
    """Bytes of scratch memory, zeros at first: numbers, what was chosen for each, and costs."""
    numbers, states = WINDOW // nbits * width, 1 << WINDOW - nbits
    return 4 * max(numbers, -(-dim // LANES) * LANES) + numbers * states + 4 * max(LANES, states)


class Trellis:
    """Writes ``width`` bytes whose levels are near the numbers given."""

    def __init__(self, writer: Writer, nbits: int, width: int) -> None:
        self.writer, self.nbits, self.width = writer, nbits, width
        self.planes, self.states = WINDOW // nbits, 1 << WINDOW - nbits
        self.size = scratch_size(writer.plan.dim, nbits, width)
        chosen = self.size - 4 * max(LANES, self.states)
        self.costs = writer.at("%scratch", chosen)
        self.chosen = writer.at("%scratch", chosen - self.planes * width * self.states)
        self.groups = self.states // LANES
        self.levels = (
            [writer.load(FLOATS, "%numbers", 4 * LANES * i) for i in range(LANES)] if nbits < 8 else []
        )
        self.first = [  # the bits of a state that leave the window next
            array(LANES, "i32", [state >> WINDOW - 2 * nbits for state in range(first, first + LANES)])
            for first in range(0, self.states // LANES * LANES, LANES)
        ]
        self.mask = scale_of(nbits) ** 2 - 1

    def give(self, chunk: int, numbers: str) -> None:
        """The numbers of 16 dimensions."""
        scale = splat(LANES, "float", scale_of(self.nbits))
        self.writer.store(FLOATS, self.writer.floats("fmul", numbers, scale), "%scratch", 4 * LANES * chunk)

    def write(self, packed: str) -> None:
        """Write the bytes for the numbers given."""
        if self.nbits == WINDOW:
            self.writer.loop(0, self.width, 4, lambda i, _: self._round(packed, i))
            return
        others = splat(LANES, "float", _ZERO + _FAR)
        start = [array(LANES, "float", [_ZERO] + [_ZERO + _FAR] * (LANES - 1)), *[others] * (self.groups - 1)]
        state = tuple(map(self._marked, start, self.first))
        state = self.writer.loop(0, self.width, 1, self._byte, state, FLOATS)
        for g, costs in enumerate(state):
            self.writer.store(FLOATS, self._marked(costs), self.costs, 4 * LANES * g)
        (best,) = self.writer.loop(0, self.states, 1, self._cheapest, (str(2**62),), "i64")
        best = self.writer.op(f"and i64 {best}, {self.states - 1}")
        self.writer.loop(0, self.width, 1, lambda i, s: self._back(packed, i, s[0]), (best,), "i64")

    def _round(self, packed: str, i: str) -> None:
        c = self.writer
        x = c.op(f"fptosi <4 x float> {c.load('<4 x float>', '%scratch', c.mul(i, 4))} to <4 x i32>")
        x = c.op(f"trunc <4 x i32> {x} to <4 x i8>")
        c.store("<4 x i8>", c.op(f"xor <4 x i8> {x}, {splat(4, 'i8', -128)}"), packed, i)

    def _byte(self, i: str, costs: Values) -> Values:
        """Costs of all states after another byte."""
        c = self.writer
        for plane in range(self.planes):
            place = c.mul(c.add(i, plane * self.width), 4)
            x = c.broadcast(LANES, "float", c.load("float", "%scratch", place))
            there = c.plan.dim - plane * self.width  # numbers of the plane; what else its bits say is free
            counts = c.broadcast(LANES, "i1", c.op(f"icmp slt i64 {i}, {there}"))
            ways: list[list[str]] = [[] for _ in range(self.groups)]
            if self.nbits == 4:
                c.store(FLOATS, costs[0], self.costs)
            for v, level in enumerate(self.levels):
                error = c.floats("fsub", x, level)
                if there < self.width:
                    error = c.select(counts, error, splat(LANES, "float", 0))
                ways[v % self.groups].append(c.fma(error, error, self._before(costs, v)))
            number, new = c.add(c.mul(i, self.planes), plane), []
            for g, some in enumerate(ways):
                best = self._least(some)
                low = c.op(f"trunc {INTS} {c.op(f'bitcast {FLOATS} {best} to {INTS}')} to {_SMALL}")
                c.store(_SMALL, low, self.chosen, c.add(c.mul(number, self.states), LANES * g))
                new.append(self._marked(best, self.first[g]))
            costs = tuple(new)
        return costs

    def _before(self, costs: Values, v: int) -> str:
        """Costs of the states before 16 windows; where it is one state, from memory, which is faster."""
        states = [(LANES * v + lane) >> self.nbits for lane in range(LANES)]
        if self.nbits == 4:
            return self.writer.broadcast(LANES, "float", self.writer.load("float", self.costs, 4 * v))
        lanes = [state % LANES for state in states]
        return self.writer.shuffle("float", LANES, costs[states[0] // LANES], "poison", lanes)

    def _marked(self, costs: str, bits: str = "zeroinitializer") -> str:
        """Costs with these lowest bits."""
        kept = self.writer.ints("and", self.writer.op(f"bitcast {FLOATS} {costs} to {INTS}"), ~self.mask)
        marked = self.writer.op(f"or {INTS} {kept}, {bits}")
        return self.writer.op(f"bitcast {INTS} {marked} to {FLOATS}")

    def _least(self, some: list[str]) -> str:
        while len(some) > 1:
            pairs = zip(some[::2], some[1::2], strict=True)
            some = [self.writer.select(self.writer.op(f"fcmp olt {FLOATS} {a}, {b}"), a, b) for a, b in pairs]
        return some[0]

    def _cheapest(self, state: str, best: Values) -> Values:
        """What the cheapest state costs, and in the low bits which it is."""
        c = self.writer
        cost = c.op(f"zext i32 {c.load('i32', self.costs, c.mul(state, 4))} to i64")
        return (c.minimum(c.op(f"or i64 {c.mul(cost, 256)}, {state}"), best[0]),)

    def _back(self, packed: str, i: str, state: str) -> Values:
        """Write a byte, the last one first; the state before it."""
        c = self.writer
        i = c.sub(self.width - 1, i)
        for plane in range(self.planes - 1, -1, -1):
            at = c.mul(c.add(c.mul(i, self.planes), plane), self.states)
            low = c.op(f"zext i8 {c.load('i8', self.chosen, c.add(at, state))} to i64")
            first = c.op(f"and i64 {low}, {self.mask}")
            window = c.add(c.mul(first, self.states), state)
            if plane == self.planes - 1:
                c.store("i8", c.op(f"trunc i64 {window} to i8"), packed, i)
            state = c.op(f"lshr i64 {window}, {self.nbits}")
        return (state,)
