"""LLVM IR that keeps the k best hits of a query: few in order, many in a heap.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

Up to 32 hits are kept in order, in the memory of the results. More hits are kept in a binary heap with the
worst on top, in the memory of the rows. A hit of the heap is one 64-bit key: the bits of its score, which
is above 0, then the complement of its row. The higher key is the better hit; among equal scores it is the
lower row. At the end the keys are sorted byte by byte, which takes half of the time of a heapsort or less.
"""

from __future__ import annotations

from .._typed import Array, Function, Record, Value
from .cpu_frame import FRAME

__all__ = ["write_heap", "write_insert_hit"]

_FEW = 32  # hits that are kept in order
_LANES = 8  # keys compared at once
_ROWS = (1 << 32) - 1


def write_heap() -> list[Function]:
    """Write ``push_hit``, and ``order_hits``, which turns the heap into rows and scores."""
    return [_sink_key(), _push_hit(), _sort_by_byte(), _order_hits()]


def _raise_theta(f: Record, theta: Value) -> None:
    """Set theta and the lowest sum that a document of this score can have, rounding errors allowed for."""
    f.theta = theta
    bound = theta * f.margin * f.sum_scale
    f.least_sum = bound.to("i64") - ((f.n_terms >> 7) + 2)


def write_insert_hit() -> Function:
    """Write the function that inserts a hit at its place, unless it is among the hits or below the worst."""
    x = Function("insert_hit", f=FRAME, row="i64", score="float")
    f, row, score = x.parameters
    low, high = x.local("i64"), x.local("i64")
    hits, k = f.n_hits, f.k
    rows, scores = f.out_rows, f.out_scores

    def comes_before(other: Value) -> Value:
        """Return whether the new hit is better than another."""
        old, old_row = scores[other], rows[other]
        tie = (old == score) & (old_row > row)
        return (old < score) | tie

    # Find its place by bisection.
    low.value, high.value = 0, hits
    with x.repeat() as bisection:
        middle = (low.value + high.value) >> 1
        before = (middle < hits) & comes_before(x.minimum(middle, k - 1))
        stay = before | (middle >= hits)
        high.value = x.where(stay, middle, high.value)
        low.value = x.where(stay, low.value, middle + 1)
        bisection.again_if(low.value < high.value)
    position = low.value
    same = rows[x.maximum(position - 1, 0)] == row
    present = (position > 0) & same

    # Move the worse hits up by one, and store the new one.
    with x.when((position < k) & ~present):
        moved = x.minimum(hits, k - 1) - position
        for array in (rows, scores):
            here = array.at(position)
            x.call("llvm.memmove.p0.p0.i64", here.at(1), here, moved * array.step, False)
        rows[position] = row
        scores[position] = score
        number = x.minimum(hits + 1, k)
        f.n_hits = number
        last = k - 1
        with x.when(number == k):
            _raise_theta(f, scores[last])
    return x


def _sink_key() -> Function:
    """Replace the lowest of ``%n`` keys: the new key sinks from the top until the heap is in order."""
    x = Function("sink_key", heap="i64*", n="i64", key="i64")
    heap, n, key = x.parameters
    at = x.local("i64")
    at.value = 0
    with x.repeat() as turn:
        here = at.value
        left = here * 2 + 1
        inside = left < n
        left = x.where(inside, left, 0)
        right = x.minimum(left + 1, n - 1)
        first, second = heap[left], heap[right]
        other = second < first
        lower = x.where(other, second, first)
        more = inside & (lower < key)
        with x.when(more):
            heap[here] = lower
            at.value = x.where(other, right, left)
        turn.again_if(more)
    heap[at.value] = key
    return x


def _push_hit() -> Function:
    """Keep a hit if it is among the k best so far.

    A range may be scored twice (``rescoring``), so a hit is first looked for in the heap.
    """
    x = Function("push_hit", f=FRAME, row="i64", score="float")
    f, row, score = x.parameters
    heap, hits, k, at = f.out_rows, f.n_hits, f.k, x.local("i64")
    bits = score.cast("u32").to("i64")
    key = bits << 32 | _ROWS - row

    def theta_of_the_lowest() -> None:
        lowest = heap.value
        _raise_theta(f, (lowest >> 32).to("u32").cast("float"))

    full = hits >= k
    few = k <= _FEW
    with x.when(few):
        x.call("insert_hit", f, row, score)
    good = (~full | (key > heap.value)) & ~few
    with x.when(good & (f.rescoring != 0), present=False) as look:
        look.present = _contains(x, heap, hits, key)
    new = good & ~look.present

    # If the heap has room, the key rises from its end.
    with x.when(new & ~full):
        at.value = hits
        with x.repeat() as turn:
            here = at.value
            parent = x.maximum(here - 1, 0) >> 1
            value = heap[parent]
            more = (here > 0) & (value > key)
            with x.when(more):
                heap[here] = value
                at.value = parent
            turn.again_if(more)
        heap[at.value] = key
        number = hits + 1
        f.n_hits = number
        with x.when(number == k):
            theta_of_the_lowest()

    # If the heap is full, the key replaces the lowest.
    with x.when(new & full):
        x.call("sink_key", heap, k, key)
        theta_of_the_lowest()
    return x


def _contains(x: Function, heap: Array, hits: Value, key: Value) -> Value:
    """Return whether a key is in the heap."""
    full = hits & -_LANES
    keys = key.broadcast(_LANES)
    with x.range(0, full, _LANES, present=x.constant(f"<{_LANES} x i1>", 0)) as group:
        equal = heap.vectors(_LANES)[group.i] == keys
        group.present = group.present | equal
    with x.range(full, hits, present=group.present.cast("u8") != 0) as one:
        one.present = one.present | (heap[one.i] == key)
    return one.present


def _sort_by_byte() -> Function:
    """Sort keys by one of their bytes, the highest first; keys of the same byte keep their order."""
    x = Function("sort_by_byte", keys="i64*", ordered="i64*", n="i64", shift="i64")
    keys, ordered, n, shift = x.parameters
    places = x.local("i64", 256)  # of the next key of each byte

    def place(key: Value) -> Array:
        return places.at(255 - (key >> shift & 255))

    with x.range(0, 256) as byte:
        places[byte.i] = 0
    with x.range(0, n) as loop:
        place(keys[loop.i]).value += 1
    with x.range(0, 256, before=0) as byte:
        count = places[byte.i]
        places[byte.i] = byte.before
        byte.before += count
    with x.range(0, n) as loop:
        key = keys[loop.i]
        here = place(key)
        ordered[here.value] = key
        here.value += 1
    return x


def _order_hits() -> Function:
    """Sort the heap, if there is one, and split its keys into rows and scores."""
    x = Function("order_hits", f=FRAME)
    (f,) = x.parameters
    heap, scores = f.out_rows, f.out_scores
    hits = x.where(f.k <= _FEW, 0, f.n_hits)
    # Byte by byte, from the lowest on.
    with x.when(hits > 1), x.range(0, 64, 16) as loop:
        x.call("sort_by_byte", heap, f.keys, hits, loop.i)
        x.call("sort_by_byte", f.keys, heap, hits, loop.i + 8)
    with x.range(0, hits) as loop:
        key = heap[loop.i]
        heap[loop.i] = _ROWS - (key & _ROWS)
        scores.cast("u32")[loop.i] = (key >> 32).to("u32")
    return x
