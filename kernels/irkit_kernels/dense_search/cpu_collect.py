"""LLVM IR that collects the best items: those that score more than a threshold, which rises.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

Items are appended in the order in which they are scored. When the collection is full, `_shrink` keeps the
wanted number of best ones, and what comes later has to score more than the worst of them. So the result
equals a stable sort of all items. Scores are kept as keys: integers of the same order.
"""

from __future__ import annotations

from typing import Any

from .._simd import store_lanes
from .._typed import Array, Function, Record, Value
from .cpu_frame import FRAME, INTS, LANES, PANEL, SLACK, Plan

__all__ = ["float_of", "key_of", "make_room", "push", "write_collect"]

_LOWEST = -(2**31)
_FEW = 256  # items that are ordered by comparing all of them


def write_collect(extra: bool) -> list[Function]:
    """Write ``push``, ``shrink``, ``trim``, ``sort`` and ``order``.

    Args:
        extra: Items have a base and a sum, too.
    """
    return [_shrink(extra), _shrink(extra, ties=True), _push(extra), _sort(), _order()]


def key_of(scores: Value) -> Value:
    """Return signed integers in the order of float32 numbers."""
    kind = INTS if scores.lanes else "i32"
    bits = scores.cast(kind)
    return bits ^ (bits.shift_signed(31) & 0x7FFFFFFF)


def float_of(key: Value) -> Value:
    """Return the float32 number of a key."""
    return (key ^ (key.shift_signed(31) & 0x7FFFFFFF)).cast("float")


def push(
    x: Function, plan: Plan, f: Record, scores: Value, first: Value, mask: Value, *others: Value
) -> None:
    """Collect the items of the lanes that a mask holds; what has no base and sum gets anything."""
    if plan.nbits == 1:
        others = ()
    elif not others:
        others = (scores, scores)
    x.call("push", f, scores, first, mask, *others)


def make_room(x: Function, f: Record) -> None:
    """Drop the worst items of the collection if it has no room for another `PANEL`."""
    with x.when(f.count + PANEL > f.n_kept + SLACK):
        x.call("shrink", f)


def _push(extra: bool) -> Function:
    """Append the items ``first + i`` of the lanes i that a mask holds."""
    kinds: dict[str, Any] = {"bases": f"<{LANES} x float>", "sums": f"<{LANES} x float>"} if extra else {}
    x = Function("push", f=FRAME, scores=f"<{LANES} x float>", first="u32", mask="u16", **kinds)
    f, scores, first, mask, *others = x.parameters
    count = f.count
    numbers = x.constants("u32", range(LANES)) + first.broadcast(LANES)
    values = [key_of(scores), numbers, *others]
    arrays = [f.keys, f.items, f.bases, f.sums]
    store_lanes(x, zip(arrays, values, strict=False), count, mask)
    f.count = count + mask.count_ones().to("i64")
    return x


def _shrink(extra: bool, ties: bool = False) -> Function:
    """Keep the wanted best items, in their order, and raise the threshold to the score of the worst.

    With ``ties`` it is ``trim``, which keeps all items that score as the worst of the wanted ones.
    """
    x = Function("trim" if ties else "shrink", f=FRAME)
    (f,) = x.parameters
    keys, count, n_kept = f.keys, f.count, f.n_kept
    low, high, above, exact = (x.local("i64") for _ in range(4))

    with x.when(count > n_kept):
        keys.vectors(LANES)[count] = x.constant(INTS, _LOWEST)

        # Find the lowest key that is kept by bisection between the lowest and the highest.
        first = keys.vectors(LANES)[0]
        with x.range(0, count, LANES, most=first, least=first) as loop:
            here = keys.vectors(LANES)[loop.i]
            loop.most = x.intrinsic("smax", INTS, loop.most, here)
            inside = x.constants("i64", range(LANES)) < (count - loop.i).broadcast(LANES)
            loop.least = x.where(inside, x.intrinsic("smin", INTS, loop.least, here), loop.least)
        low.value = x.intrinsic("vector.reduce.smin", "i32", loop.least).to("i64")
        high.value = x.intrinsic("vector.reduce.smax", "i32", loop.most).to("i64") + 1
        exact.value = 0
        with x.repeat() as bisection:
            middle = (low.value + high.value).shift_signed(1)
            level = middle.to("i32").broadcast(LANES)
            with x.range(0, count, LANES, counts=x.constant(INTS, 0)) as loop:
                loop.counts -= (keys.vectors(LANES)[loop.i] >= level).mask("i32")
            reached = x.intrinsic("vector.reduce.add", "i32", loop.counts).to("i64")
            enough = reached >= n_kept
            exact.value = (reached == n_kept).to("i64")
            low.value = x.where(enough, middle, low.value)
            high.value = x.where(enough, high.value, middle)
            bisection.again_if((exact.value == 0) & (high.value - low.value > 1))
        lowest = low.value.to("i32")
        level = lowest.broadcast(LANES)
        with x.range(0, count, LANES, counts=x.constant(INTS, 0)) as loop:
            loop.counts -= (keys.vectors(LANES)[loop.i] > level).mask("i32")
        above.value = x.intrinsic("vector.reduce.add", "i32", loop.counts).to("i64")

        # Move what is kept together; of the items at the lowest key the first ones.
        arrays = [keys, f.items, *([f.bases, f.sums] if extra else [])]
        with x.range(0, count, LANES, number=0, ties=n_kept - above.value) as loop:
            here = keys.vectors(LANES)[loop.i]
            same = (here == level).cast("u16")
            if not ties:
                over = same.count_ones().to("i64") - loop.ties
                same = _without_last(x, same, over)
            better = (here > level).cast("u16")
            mask = better | same
            parts = [array.vectors(LANES)[loop.i] for array in arrays]
            store_lanes(x, zip(arrays, parts, strict=True), loop.number, mask)
            loop.number += mask.count_ones().to("i64")
            loop.ties -= same.count_ones().to("i64")
        f.count = loop.number
        f.threshold = float_of(lowest)
    return x


def _without_last(x: Function, mask: Value, over: Value) -> Value:
    """Return a mask without its ``over`` highest bits."""
    with x.range(0, over, left=mask) as loop:
        high = 15 - x.intrinsic("ctlz", "u16", loop.left, False)
        bit = x.constant("u16", 1) << high
        loop.left = loop.left & (bit ^ 0xFFFF)
    return loop.left


def _order() -> Function:
    """Copy the items to ``sorted_items``, best first, ties to the lower item, and their keys beside them.

    The rank of one of a few items is the number of better ones, which takes a pass over all items.
    """
    x = Function("order", f=FRAME)
    (f,) = x.parameters
    keys, items, count = f.keys, f.items, f.count
    few = count <= _FEW
    with x.when(~few):
        x.call("sort", f)
    with x.when(few):
        keys.vectors(LANES)[count] = x.constant(INTS, _LOWEST)
        items.vectors(LANES)[count] = x.constant(f"<{LANES} x u32>", 0xFFFFFFFF)
        with x.range(0, count) as candidate:
            key, item = keys[candidate.i], items[candidate.i]
            level, number = key.broadcast(LANES), item.broadcast(LANES)
            with x.range(0, count, LANES, counts=x.constant(INTS, 0)) as loop:
                here = keys.vectors(LANES)[loop.i]
                lower = items.vectors(LANES)[loop.i] < number
                before = (here > level) | ((here == level) & lower)
                loop.counts -= before.mask("i32")
            rank = x.intrinsic("vector.reduce.add", "i32", loop.counts).to("i64")
            f.sorted_keys[rank] = key
            f.sorted_items[rank] = item
    return x


def _sort() -> Function:
    """Do the same for many items: sort them byte by byte, from the last of the item to the first of the key.

    Each of the eight passes keeps the order of items whose byte is the same.
    """
    x = Function("sort", f=FRAME)
    (f,) = x.parameters
    count, own, other = f.count, (f.keys, f.items), (f.sorted_keys, f.sorted_items)
    starts = x.local("i64", 8 * 256)

    def slot_of(key: Value, item: Value, byte: int) -> Array:
        """Return where the next item with this byte goes; the largest key is first."""
        word = item if byte < 4 else (key ^ 0x7FFFFFFF).cast("u32")
        return starts.at((word >> 8 * (byte & 3) & 255).to("i64") + 256 * byte)

    # Count the items of each byte, and add up the counts.
    with x.range(0, 8 * 256) as loop:
        starts[loop.i] = 0
    with x.range(0, count) as loop:
        for byte in range(8):
            next_slot = slot_of(own[0][loop.i], own[1][loop.i], byte)
            next_slot[0] = next_slot[0] + 1
    for byte in range(8):
        with x.range(256 * byte, 256 * byte + 256, total=0) as loop:
            number = starts[loop.i]
            starts[loop.i] = loop.total
            loop.total += number

    # Move the items to and fro.
    for byte in range(8):
        source, target = (own, other) if byte % 2 == 0 else (other, own)
        with x.range(0, count) as loop:
            key, item = source[0][loop.i], source[1][loop.i]
            next_slot = slot_of(key, item, byte)
            number = next_slot[0]
            next_slot[0] = number + 1
            target[0][number] = key
            target[1][number] = item
    with x.range(0, count, LANES) as loop:
        for source, target in zip(own, other, strict=True):
            target.vectors(LANES)[loop.i] = source.vectors(LANES)[loop.i]
    return x
