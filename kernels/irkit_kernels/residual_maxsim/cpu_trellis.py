"""Trellis coded quantisation in LLVM IR: the search for the best row of bits, by Viterbi's algorithm.

The bits of a token form one row. The level of each number is chosen by a *window*: the 8 bits that end with
the number's own ``nbits``. So consecutive windows overlap, and every row of bits is a path through a trellis:

* The *state* before a number is the last ``8 - nbits`` bits of the row so far. A number appends its bits,
  which gives a window: ``window >> nbits`` is the state before, ``window % states`` the state after.
* The cost of a path is the sum of the squared errors of its levels. For each number and each state after it,
  Viterbi's algorithm keeps only the cheapest window that leads there: any continuation costs the same from
  there on. What it stores per state is the bits of this window that the state after does not contain.
* At the end the cheapest state is followed back, window by window, which gives the bits.

The 256 windows of a number are 16 registers of 16 lanes. For each window the code computes the cost of the
state before it plus the squared error of its level (a subtraction and a multiply-add), then takes minima.

One minimum finds both the lowest cost and its window, because the lowest bits of a cost hold the bits of the
window that have to be stored. Numbers and levels are integers multiplied by `scale_of`, so that the squares
leave these bits free. Costs start at ``2**23``, where float32 has a precision of exactly 1, and stay below
``2**24``.

Source: Marcellin and Fischer 1990 (Trellis coded quantization of memoryless and Gauss-Markov sources); levels
indexed by windows: Tseng et al., QTIP, arXiv 2406.11235, section 3; the search: Viterbi 1967.
"""

from __future__ import annotations

from .._typed import Array, Value
from .cpu_tile import FLOATS, INTS, LANES, Writer
from .reference import WINDOW

__all__ = ["Trellis", "scale_of", "scratch_size"]

_ZERO, _FAR = 2.0**23, 2.0**22  # initial cost of the state of zeros, and the addition for all other states


def scale_of(nbits: int) -> int:
    """Return the factor of numbers and levels: its square is at least ``2**nbits``."""
    return {1: 2, 2: 2, 4: 4, 8: 1}[nbits]


def scratch_size(dim: int, nbits: int, width: int) -> int:
    """Return the bytes of scratch memory, initially zeros: numbers, stored bits of each state, and costs."""
    numbers, states = WINDOW // nbits * width, 1 << WINDOW - nbits
    return 4 * max(numbers, -(-dim // LANES) * LANES) + numbers * states + 4 * max(LANES, states)


class Trellis:
    """Writes the code that finds the ``width`` bytes whose levels are nearest to the numbers of a vector.

    Bytes are written in planes: bits ``plane`` of byte ``i`` belong to number ``plane * width + i``.
    """

    def __init__(self, x: Writer, nbits: int, width: int) -> None:
        self.x, self.nbits, self.width = x, nbits, width
        self.planes, self.states = WINDOW // nbits, 1 << WINDOW - nbits
        self.size = scratch_size(x.plan.dim, nbits, width)
        costs_at = self.size - 4 * max(LANES, self.states)
        scratch = x.arguments.scratch
        self.costs = scratch.at(costs_at).cast("float", 1)
        self.stored = scratch.at(costs_at - self.planes * width * self.states)
        self.numbers = scratch.cast("float", 1)
        self.registers = self.states // LANES
        levels = x.arguments.numbers.vectors(LANES)
        self.levels = [levels[LANES * i] for i in range(LANES)] if nbits < 8 else []
        self.next_bits = [  # the bits of each state that leave the window next, which will have to be stored
            x.constants("i32", [state >> WINDOW - 2 * nbits for state in range(first, first + LANES)])
            for first in range(0, self.states // LANES * LANES, LANES)
        ]
        self.mask = scale_of(nbits) ** 2 - 1  # the lowest bits of a cost

    def set_numbers(self, chunk: int, numbers: Value) -> None:
        """Set the 16 numbers of a chunk of the vector, integers from -128 to 127."""
        self.numbers.vectors(LANES)[LANES * chunk] = numbers * scale_of(self.nbits)

    def write(self, packed: Array) -> None:
        """Write the bytes whose levels are nearest to the numbers."""
        x = self.x
        if self.nbits == WINDOW:  # the level of each number is its own byte
            with x.range(0, self.width, 4) as loop:
                numbers = self.numbers.vectors(4)[loop.i].to("i32").to("u8")
                packed.vectors(4)[loop.i] = numbers ^ 128
            return

        # forward: costs of all states, byte by byte
        others = x.constant(FLOATS, _ZERO + _FAR)
        first = x.constants("float", [_ZERO] + [_ZERO + _FAR] * (LANES - 1))
        start = [first, *[others] * (self.registers - 1)]
        start = [self._with_bits(costs, bits) for costs, bits in zip(start, self.next_bits, strict=True)]
        with x.range(0, self.width, costs=start) as loop:
            for plane in range(self.planes):
                loop.costs = self._number(loop.i, plane, loop.costs)

        # the cheapest state at the end: its number is in the low bits
        for register, costs in enumerate(loop.costs):
            self.costs.vectors(LANES)[LANES * register] = self._with_bits(costs, 0)
        with x.range(0, self.states, best=2**62) as states:
            cost = self.costs.cast("u32", 1)[states.i].to("i64")
            states.best = x.minimum((cost * 256) | states.i, states.best)

        # backward: the window of each number, last to first
        with x.range(0, self.width, state=states.best & (self.states - 1)) as loop:
            i = self.width - 1 - loop.i
            for plane in reversed(range(self.planes)):
                entry = (i * self.planes + plane) * self.states
                stored_bits = self.stored[entry + loop.state].to("i64") & self.mask
                window = stored_bits * self.states + loop.state
                if plane == self.planes - 1:
                    packed[i] = window.to("u8")
                loop.state = window >> self.nbits

    def _number(self, i: Value, plane: int, costs: list[Value]) -> list[Value]:
        """Store the cheapest window into each state after a number; return the costs of the states."""
        x, first = self.x, plane * self.width
        number = self.numbers[i + first].broadcast(LANES)
        n_numbers = x.plan.dim - first  # numbers in the plane; the bits after them cost nothing
        counts = (i < n_numbers).broadcast(LANES)
        if self.nbits == 4:
            self.costs.vectors(LANES)[0] = costs[0]

        # costs of all windows, by register of the state after
        windows: list[list[Value]] = [[] for _ in range(self.registers)]
        for v, level in enumerate(self.levels):
            error = number - level
            if n_numbers < self.width:
                error = x.where(counts, error, x.constant(FLOATS, 0))
            windows[v % self.registers].append(x.fmuladd(error, error, self._cost_before(costs, v)))

        # the cheapest window of each state
        entry, after = i * self.planes + plane, []
        for register, candidates in enumerate(windows):
            best = self._minimum(candidates)
            low_bits = best.cast(INTS).to("u8")
            self.stored.vectors(LANES)[entry * self.states + LANES * register] = low_bits
            after.append(self._with_bits(best, self.next_bits[register]))
        return after

    def _cost_before(self, costs: list[Value], v: int) -> Value:
        """Return the cost of the state before each of the windows ``16 v`` to ``16 v + 15``."""
        x, states = self.x, [(LANES * v + lane) >> self.nbits for lane in range(LANES)]
        if self.nbits == 4:  # all have the same state before; a broadcast from memory is faster
            return self.costs[v].broadcast(LANES)
        return x.shuffle(costs[states[0] // LANES], None, [state % LANES for state in states])

    def _with_bits(self, costs: Value, bits: Value | int) -> Value:
        """Return the costs with ``bits`` in place of their lowest bits."""
        return ((costs.cast(INTS) & ~self.mask) | bits).cast(FLOATS)

    def _minimum(self, candidates: list[Value]) -> Value:
        """Return the lowest cost of each lane."""
        while len(candidates) > 1:
            pairs = zip(candidates[::2], candidates[1::2], strict=True)
            candidates = [self.x.minimum(a, b) for a, b in pairs]
        return candidates[0]
