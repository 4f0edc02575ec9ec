"""LLVM IR that finds the lists whose centroids are best.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

Lists are in groups, which have centroids, too: only the lists of the best groups are scored. So an index can
have many lists, of which few rows are read. Centroids are bytes, in panels of 32 slots side by side. The
query is a byte per dimension. Each group begins with a panel; slots without a list have no number.
"""

from __future__ import annotations

from typing import Any

from .._simd import dot_bytes
from .._typed import Function, Value, vector
from .cpu_collect import float_of, make_room, push
from .cpu_frame import FRAME, INTS, LANES, PANEL, Plan

__all__ = ["NO_LIST", "write_lists"]

NO_LIST = 0xFFFFFFFF
_UNROLLED = {True: 4, False: 2}  # words of the query in a turn of the loop, with AVX512-VNNI and without


def write_lists(plan: Plan) -> list[Function]:
    """Write ``find_lists(f)``, which sets ``probed``, ``probed_scores`` and ``count``."""
    return [_score_panels(plan), _find_lists(plan)]


def _score_panels(plan: Plan) -> Function:
    """Score the slots from ``%start`` to ``%stop`` by their centroids, and collect them."""
    arrays: dict[str, Any] = {"panels": "u8*", "scales": "float*", "biases": "float*", "numbers": "u32*"}
    x = Function("score_panels", f=FRAME, **arrays, start="i64", stop="i64")
    f, panels, scales, biases, numbers, start, stop = x.parameters
    registers, unrolled = range(PANEL // LANES), _UNROLLED[plan.vnni]
    byte_scale, bias_factor = f.byte_scale.broadcast(LANES), f.bias_factor.broadcast(LANES)
    offset = (f.byte_total * 128).to("i32").broadcast(LANES)
    with x.range(start, stop, PANEL) as slots:
        panel = panels.at(slots.i * plan.width).cast("i32", 1).vectors(LANES)
        # products of the query with a panel of centroids, in bytes
        nothing = [x.constant(INTS, 0)] * (unrolled * len(registers))
        with x.range(0, plan.width, 4 * unrolled, sums=nothing) as loop:
            sums = list(loop.sums)
            for part in range(unrolled):
                step = loop.i + 4 * part
                word = f.bytes.at(step).cast("i32", 1)[0].broadcast(LANES)
                for v in registers:
                    i = part * len(registers) + v
                    words = panel[step * (PANEL // 4) + LANES * v]
                    sums[i] = dot_bytes(sums[i], words, word, plan.vnni)
            loop.sums = sums
        # scores, and the slots whose scores are above the threshold
        for v in registers:
            slot = slots.i + LANES * v
            total = loop.sums[v]
            for part in range(1, unrolled):
                total += loop.sums[part * len(registers) + v]
            scale = scales.vectors(LANES)[slot] * byte_scale
            bias = biases.vectors(LANES)[slot] * bias_factor
            scores = (total - offset).to("float") * scale + bias
            exists = numbers.vectors(LANES)[slot] != x.constant(vector(LANES, "u32"), NO_LIST)
            mask = ((scores > f.threshold.broadcast(LANES)) & exists).cast("u16")
            with x.when(mask != 0):
                push(x, plan, f, scores, slot.to("u32"), mask)
        make_room(x, f)
    return x


def _find_lists(plan: Plan) -> Function:
    """Find the lists to search, and order them by their scores."""
    x = Function("find_lists", f=FRAME)
    (f,) = x.parameters

    def collect(n_kept: Value) -> None:
        f.count, f.n_kept, f.threshold = 0, n_kept, float("-inf")

    collect(f.groups)
    group_arrays = f.group_panels, f.group_scales, f.group_biases, f.group_numbers
    x.call("score_panels", f, *group_arrays, 0, f.n_groups)
    x.call("shrink", f)
    groups = f.count
    with x.range(0, groups) as loop:
        f.probed[loop.i] = f.items[loop.i]
    collect(f.probes)
    with x.range(0, groups) as loop:
        slots = f.group_slots.at(f.probed[loop.i].to("i64"))
        arrays = f.panels, f.list_scales, f.list_biases, f.list_numbers
        x.call("score_panels", f, *arrays, slots[0], slots[1])
    x.call("shrink", f)
    x.call("order", f)
    with x.range(0, f.count) as loop:
        slot = f.sorted_items[loop.i].to("i64")
        f.probed[loop.i] = f.list_numbers[slot]
        bias = f.list_biases[slot] * f.bias_factor
        f.probed_scores[loop.i] = float_of(f.sorted_keys[loop.i]) - bias
    return x
