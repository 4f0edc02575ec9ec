"""The CPU kernel: loops over rows, heads and blocks; packing of keys and values; the output.

The LLVM IR is written for one `Plan`: a head size and a way of multiplying. README.md has the maths and the
memory layouts. Blocks bound the scratch memory, so a row may have any length.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from .._jit import Code, Values, compile_ir, cpu_features, splat
from .cpu_packing import load_words, pack_keys, pack_values, prefetch
from .cpu_plan import BLOCK, FAR, LOWEST, Floats, Plan
from .cpu_tile import tile

__all__ = ["FAR", "Plan", "bounds", "compile_plan", "declarations", "laid_out", "plan_for", "scratch_layout"]

MAX_HEAD_DIM = 256


def supported() -> bool:
    """Whether there is code for this CPU."""
    features = cpu_features()
    return "avx512f" in features or {"avx2", "fma"} <= features or "neon" in features


def plan_for(head_dim: int, bfloat16: bool, dropout: bool = False) -> Plan:
    """The fastest plan on this CPU, if it is `supported`, for a multiple of 8 up to `MAX_HEAD_DIM`."""
    features = cpu_features()
    if "avx512f" in features:
        return Plan(head_dim, bfloat16, bfloat16 and "avx512bf16" in features, 16, dropout)
    return Plan(head_dim, bfloat16, False, 8 if "avx2" in features else 4, dropout)


def scratch_layout(plan: Plan) -> tuple[dict[str, int], int]:
    """Offsets of the scratch arrays, and the size of them all, in bytes."""
    keys, queries = BLOCK + plan.lanes, BLOCK + plan.rows
    sizes = {
        "keys": 4 * keys * plan.words,
        "values": plan.packed * keys * plan.width,
        "queries": 4 * plan.rows * plan.words,
        "scores": 4 * keys * plan.rows,
        "weights": plan.packed * keys * plan.rows,
        "maxima": 4 * queries,
        "sums": 4 * queries,
        "outputs": 4 * queries * plan.width,
    }
    return laid_out(sizes)


def laid_out(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Offsets of arrays of so many bytes, a cache line at least, and the size of them all."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name], end = end, end + -(-size // 64) * 64
    return offsets, end


def declarations(plan: Plan, *lanes: int) -> list[str]:
    """What LLVM has to be told of its own functions, multiply-adds of so many lanes among them."""
    vector = f"<{plan.lanes} x float>"
    parts = ["declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"]
    for n in sorted({plan.lanes, *lanes}):
        kind = f"<{n} x float>"
        parts.append(f"declare {kind} @llvm.fmuladd.v{n}f32({kind}, {kind}, {kind})")
    if plan.dot:
        name = "@llvm.x86.avx512bf16.dpbf16ps.512"
        parts.append(f"declare {vector} {name}({vector}, <32 x bfloat>, <32 x bfloat>)")
    return parts


@cache
def compile_plan(plan: Plan, cpu: str | None = None) -> Callable[..., None]:
    """Machine code of ``attend``, whose arguments `_Attend.write` lists; for another CPU by its LLVM name."""
    parts = declarations(plan, plan.rows, plan.rows // 2)
    parts += [tile(plan, plan.rows), tile(plan, plan.rows // 2)]
    parts += [pack_keys(plan), pack_values(plan), _Attend(plan).write()]
    pointers, numbers = [ctypes.c_void_p] * 8, [ctypes.c_int64] * 12
    return compile_ir("\n".join(parts), "attend", [*pointers, *numbers, ctypes.c_float], cpu=cpu)


def bounds(code: Code, offsets: str, row: str) -> tuple[str, str]:
    """First token of a row, and how many it has."""
    ends = [code.load("i32", offsets, code.mul(code.add(row, i), 4)) for i in range(2)]
    start, stop = (code.op(f"sext i32 {end} to i64") for end in ends)
    return start, code.sub(stop, start)


class _Attend:
    """Writes the loops over rows, heads, blocks of queries, blocks of keys and tiles."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.code = plan, Code()
        self.floats = Floats(self.code, plan.lanes)
        self.scratch = {name: self.code.at("%scratch", at) for name, at in scratch_layout(plan)[0].items()}

    def write(self) -> str:
        """The function: pairs of row and head from number ``%item`` up to ``%stop``; strides are in bytes."""
        self.code.loop("%item", "%stop", 1, self._item)
        return self.code.function(
            "define void @attend(ptr %out, ptr %stats, ptr %q, ptr %k, ptr %v, ptr %query_offsets, "
            "ptr %key_offsets, ptr %scratch, i64 %q_token, i64 %q_head, i64 %k_token, i64 %k_head, "
            "i64 %v_token, i64 %v_head, i64 %heads, i64 %window, i64 %item, i64 %stop, i64 %seed, "
            "i64 %threshold, float %grown)"
        )

    def _item(self, index: str, _: Values) -> None:
        code = self.code
        row, head = (code.op(f"{name} i64 {index}, %heads") for name in ("sdiv", "srem"))
        first_query, self.queries = bounds(code, "%query_offsets", row)
        first_key, self.keys = bounds(code, "%key_offsets", row)
        self.start = {}
        for name, token in (("q", first_query), ("k", first_key), ("v", first_key)):
            place = code.add(code.mul(token, f"%{name}_token"), code.mul(head, f"%{name}_head"))
            self.start[name] = code.at(f"%{name}", place)
        self.number = code.add(code.mul(first_query, "%heads"), head)
        code.loop(0, self.queries, BLOCK, self._query_block)

    def _query_block(self, first: str, _: Values) -> None:
        code, plan = self.code, self.plan
        count = code.minimum(BLOCK, code.sub(self.queries, first))
        code.loop(0, count, plan.rows, self._clear)
        low = code.maximum(0, code.sub(first, "%window"))
        high = code.minimum(self.keys, code.add(code.add(first, count), "%window"))

        def key_block(start: str, _: Values) -> None:
            keys = code.minimum(BLOCK, code.sub(high, start))
            for name, x in (("keys", "k"), ("values", "v")):
                source = code.at(self.start[x], code.mul(start, f"%{x}_token"))
                arguments = (
                    f"ptr {self.scratch[name]}, ptr {source}, i64 %{x}_token, i64 %{x}_head, i64 {keys}"
                )
                code.do(f"call void @pack_{name}({arguments})")
            code.loop(0, count, plan.rows, lambda at, _: self._tile(at, first, count, start, keys))

        code.loop(low, high, BLOCK, key_block)
        code.loop(0, count, 1, lambda at, _: self._finish(at, code.add(first, at)))

    def _clear(self, at: str, _: Values) -> None:
        """Begin with no keys."""
        code, plan, floats = self.code, self.plan, self.floats
        each, place = Floats(code, plan.rows), code.mul(at, 4)
        each.store(each.constant(LOWEST), self.scratch["maxima"], place)
        each.store(each.constant(0), self.scratch["sums"], place)
        outputs, end = code.at(self.scratch["outputs"], code.mul(place, plan.width)), plan.rows * plan.width
        code.loop(0, end, plan.lanes, lambda i, _: floats.store(floats.constant(0), outputs, code.mul(i, 4)))

    def _tile(self, at: str, first: str, count: str, start: str, keys: str) -> None:
        """Queries from ``first + at`` on against the packed keys, which begin with key ``start``."""
        code, plan, half = self.code, self.plan, self.plan.rows // 2
        query, left = code.add(first, at), code.sub(count, at)
        low = code.sub(code.sub(query, "%window"), start)
        high = code.sub(code.add(code.add(query, "%window"), 1), start)
        place = code.mul(at, 4)
        pointers = [self.scratch[name] for name in ("queries", "keys", "values", "scores", "weights")]
        pointers += [code.at(self.scratch[name], place) for name in ("maxima", "sums")]
        pointers += [code.at(self.scratch["outputs"], code.mul(place, plan.width))]
        numbers = [keys, low, high]
        if plan.dropout:
            number = code.add(self.number, code.mul(query, "%heads"))
            numbers += [start, number, "%heads", "%seed", "%threshold"]
        arguments = ", ".join([f"ptr {x}" for x in pointers] + [f"i64 {x}" for x in numbers])

        def run() -> None:
            for row in range(plan.rows):  # the last query fills up its tile
                token = code.add(query, code.minimum(row, code.add(left, -1)))
                source = code.at(self.start["q"], code.mul(token, "%q_token"))
                prefetch(code, plan, source, "%q_head")
                for word in range(0, plan.words, plan.lanes):
                    vector = load_words(code, plan, source, word, min(plan.lanes, plan.words - word))
                    code.store(
                        self.floats.integers, vector, self.scratch["queries"], 4 * (row * plan.words + word)
                    )
            many = code.op(f"icmp sgt i64 {left}, {half}")
            code.when(many, lambda: code.do(f"call void @tile{plan.rows}({arguments})"))
            few = code.op(f"xor i1 {many}, true")
            code.when(few, lambda: code.do(f"call void @tile{half}({arguments})"))

        begun, open_ = code.op(f"icmp slt i64 {low}, {keys}"), code.op(f"icmp sgt i64 {high}, {-plan.rows}")
        code.when(code.op(f"and i1 {begun}, {open_}"), run)

    def _finish(self, at: str, query: str) -> None:
        """Divide by the sum of the weights and write the output; without keys it is 0."""
        code, plan, floats = self.code, self.plan, self.floats
        total = code.load("float", self.scratch["sums"], code.mul(at, 4))
        some = code.op(f"fcmp une float {total}, 0.0")
        total = code.op(f"select i1 {some}, float {total}, float 1.0")
        number = code.add(self.number, code.mul(query, "%heads"))

        def keep() -> None:
            place = code.at("%stats", code.mul(number, 8))
            code.store("float", code.load("float", self.scratch["maxima"], code.mul(at, 4)), place)
            code.store("float", code.op(f"fdiv float 1.0, {total}"), place, 4)

        code.when(code.op("icmp ne ptr %stats, null"), keep)
        inverse = code.broadcast(plan.lanes, "float", code.op(f"fdiv float %grown, {total}"))
        source = code.at(self.scratch["outputs"], code.mul(at, 4 * plan.width))
        size = plan.stored * plan.head_dim
        target = code.at("%out", code.mul(number, size))
        prefetch(code, plan, target, size, write=True)
        for column in range(0, plan.head_dim, plan.lanes):
            value = floats.mul(floats.load(source, 4 * column), inverse)
            count = min(plan.lanes, plan.head_dim - column)
            if count < plan.lanes:
                value = code.shuffle("float", plan.lanes, value, "poison", range(count))
            _store_output(Floats(code, count), plan, value, code.at(target, plan.stored * column))


def _store_output(floats: Floats, plan: Plan, value: str, target: str) -> None:
    code, lanes, integers = floats.code, floats.lanes, floats.integers
    if not plan.bfloat16:
        floats.store(value, target)
        return
    if plan.dot:
        half = code.op(f"fptrunc {floats.kind} {value} to <{lanes} x bfloat>")
        code.store(f"<{lanes} x bfloat>", half, target)
        return
    sixteen = splat(lanes, "i32", 16)  # to the nearest, ties to even; a NaN stays one
    bits = code.op(f"bitcast {floats.kind} {value} to {integers}")
    odd = code.op(f"and {integers} {code.op(f'lshr {integers} {bits}, {sixteen}')}, {splat(lanes, 'i32', 1)}")
    more = code.op(f"add {integers} {odd}, {splat(lanes, 'i32', 0x7FFF)}")
    bits = code.op(f"lshr {integers} {code.op(f'add {integers} {bits}, {more}')}, {sixteen}")
    code.store(f"<{lanes} x i16>", code.op(f"trunc {integers} {bits} to <{lanes} x i16>"), target)
