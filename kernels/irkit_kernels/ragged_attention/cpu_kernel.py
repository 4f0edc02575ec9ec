"""The CPU kernel: loops over rows, heads and blocks; packing of keys and values; the output.

The LLVM IR is written for one `Plan`: a head size and a way of multiplying. README.md has the maths and the
memory layouts. Blocks bound the scratch memory, so a row may have any length.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from .._jit import Code, Values, compile_ir, cpu_features, splat
from .cpu_tile import BLOCK, FAR, LOWEST, Floats, Plan, tile

__all__ = ["FAR", "Plan", "compile_plan", "plan_for", "scratch_layout"]

_MAX_HEAD_DIM = 256


def plan_for(head_dim: int, bfloat16: bool) -> Plan | None:
    """The fastest plan on this CPU; None where the kernel cannot help."""
    features = cpu_features()
    if head_dim % 8 or not 0 < head_dim <= _MAX_HEAD_DIM:
        return None
    if "avx512f" in features:
        return Plan(head_dim, bfloat16, bfloat16 and "avx512bf16" in features, 16)
    if {"avx2", "fma"} <= features:
        return Plan(head_dim, bfloat16, False, 8)
    return Plan(head_dim, bfloat16, False, 4) if "neon" in features else None


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
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name], end = end, end + -(-size // 64) * 64
    return offsets, end


@cache
def compile_plan(plan: Plan, cpu: str | None = None) -> Callable[..., None]:
    """Machine code of ``attend``, whose arguments `_Attend.write` lists; for another CPU by its LLVM name."""
    vector = f"<{plan.lanes} x float>"
    parts = [
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        *(
            f"declare <{n} x float> @llvm.fmuladd.v{n}f32(<{n} x float>, <{n} x float>, <{n} x float>)"
            for n in sorted({plan.lanes, plan.rows, plan.rows // 2})
        ),
    ]
    if plan.dot:
        name = "@llvm.x86.avx512bf16.dpbf16ps.512"
        parts.append(f"declare {vector} {name}({vector}, <32 x bfloat>, <32 x bfloat>)")
    parts += [tile(plan, plan.rows), tile(plan, plan.rows // 2)]
    parts += [_pack_keys(plan), _pack_values(plan), _Attend(plan).write()]
    pointers, numbers = [ctypes.c_void_p] * 7, [ctypes.c_int64] * 10
    return compile_ir("\n".join(parts), "attend", [*pointers, *numbers], cpu=cpu)


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
            "define void @attend(ptr %out, ptr %q, ptr %k, ptr %v, ptr %query_offsets, ptr %key_offsets, "
            "ptr %scratch, i64 %q_token, i64 %q_head, i64 %k_token, i64 %k_head, i64 %v_token, i64 %v_head, "
            "i64 %heads, i64 %window, i64 %item, i64 %stop)"
        )

    def _item(self, index: str, _: Values) -> None:
        code, plan = self.code, self.plan
        row, head = (code.op(f"{name} i64 {index}, %heads") for name in ("sdiv", "srem"))
        first_query, self.queries = self._bounds("%query_offsets", row)
        first_key, self.keys = self._bounds("%key_offsets", row)
        self.start = {}
        for name, token in (("q", first_query), ("k", first_key), ("v", first_key)):
            place = code.add(code.mul(token, f"%{name}_token"), code.mul(head, f"%{name}_head"))
            self.start[name] = code.at(f"%{name}", place)
        place = code.add(code.mul(first_query, "%heads"), head)
        self.out = code.at("%out", code.mul(place, plan.stored * plan.head_dim))
        code.loop(0, self.queries, BLOCK, self._query_block)

    def _bounds(self, offsets: str, row: str) -> tuple[str, str]:
        ends = [self.code.load("i32", offsets, self.code.mul(self.code.add(row, i), 4)) for i in range(2)]
        start, stop = (self.code.op(f"sext i32 {end} to i64") for end in ends)
        return start, self.code.sub(stop, start)

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
        arguments = ", ".join([f"ptr {x}" for x in pointers] + [f"i64 {x}" for x in (keys, low, high)])

        def run() -> None:
            for row in range(plan.rows):  # the last query fills up its tile
                token = code.add(query, code.minimum(row, code.add(left, -1)))
                source = code.at(self.start["q"], code.mul(token, "%q_token"))
                _prefetch(code, plan, source, "%q_head")
                for word in range(0, plan.words, plan.lanes):
                    vector = _load_words(code, plan, source, word, min(plan.lanes, plan.words - word))
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
        inverse = code.broadcast(plan.lanes, "float", code.op(f"fdiv float 1.0, {total}"))
        source = code.at(self.scratch["outputs"], code.mul(at, 4 * plan.width))
        size = plan.stored * plan.head_dim
        target = code.at(self.out, code.mul(code.mul(query, "%heads"), size))
        _prefetch(code, plan, target, size, write=True)
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


def _pack_keys(plan: Plan) -> str:
    """Transpose keys to [group of keys][word][key of the group]; the last key fills up its group."""
    code, lanes, words = Code(), plan.lanes, plan.words
    last = code.add("%count", -1)

    def group(first: str, _: Values) -> None:
        places = [code.mul(code.minimum(code.add(first, lane), last), "%stride") for lane in range(lanes)]
        rows = [code.at("%keys", place) for place in places]
        for row in rows:
            _prefetch(code, plan, row, "%ahead")
        target = code.at("%packed", code.mul(first, 4 * words))

        def square(word: str | int, count: int) -> None:
            columns = _transpose(code, lanes, [_load_words(code, plan, row, word, count) for row in rows])
            place = code.at(target, code.mul(word, 4 * lanes))
            for i, column in enumerate(columns[:count]):
                code.store(f"<{lanes} x i32>", column, place, 4 * lanes * i)

        whole = words // lanes * lanes
        code.loop(0, whole, lanes, lambda word, _: square(word, lanes))
        if whole < words:
            square(whole, words - whole)

    code.loop(0, "%count", lanes, group)
    return code.function(
        "define internal void @pack_keys(ptr %packed, ptr %keys, i64 %stride, i64 %ahead, i64 %count)"
    )


def _pack_values(plan: Plan) -> str:
    """Copy values to [key][column], or to [pair of keys][column][key of the pair] for `Plan.dot`."""
    code, lanes, keys = Code(), plan.lanes, 4 // plan.packed
    last = code.add("%count", -1)
    mixed = [lane // 2 + lanes * (lane % 2) for lane in range(2 * lanes)]

    def step(first: str, _: Values) -> None:
        places = [code.mul(code.minimum(code.add(first, i), last), "%stride") for i in range(keys)]
        rows = [code.at("%values", place) for place in places]
        for row in rows:
            _prefetch(code, plan, row, "%ahead")
        target = code.at("%packed", code.mul(first, plan.packed * plan.width))
        for column in range(0, plan.head_dim, lanes):
            count = min(lanes, plan.head_dim - column)
            if plan.dot:
                halves = [code.load(f"<{count} x i16>", row, 2 * column) for row in rows]
                a, b = (_widen(code, "i16", half, count, lanes) for half in halves)
                code.store(
                    f"<{2 * lanes} x i16>", code.shuffle("i16", lanes, a, b, mixed), target, 4 * column
                )
            else:
                vector = _load_words(code, plan, rows[0], column, count)
                code.store(f"<{lanes} x i32>", vector, target, 4 * column)

    code.loop(0, "%count", keys, step)
    return code.function(
        "define internal void @pack_values(ptr %packed, ptr %values, i64 %stride, i64 %ahead, i64 %count)"
    )


def _prefetch(code: Code, plan: Plan, row: str, ahead: str | int, write: bool = False) -> None:
    """Fetch the part of a token that the next head needs: the stride between tokens defeats the hardware."""
    place = code.at(row, ahead)
    for line in range(0, plan.stored * plan.head_dim, 64):
        code.do(f"call void @llvm.prefetch.p0(ptr {code.at(place, line)}, i32 {int(write)}, i32 3, i32 1)")


def _load_words(code: Code, plan: Plan, row: str, word: str | int, count: int) -> str:
    """``count`` packed words of a token from ``word`` on; zeros fill up the vector."""
    if plan.bfloat16 and not plan.dot:
        half = code.load(f"<{count} x i16>", row, code.mul(word, 2))
        wide = code.op(f"zext <{count} x i16> {half} to <{count} x i32>")
        value = code.op(f"shl <{count} x i32> {wide}, {splat(count, 'i32', 16)}")
    else:
        value = code.load(f"<{count} x i32>", row, code.mul(word, 4))
    return _widen(code, "i32", value, count, plan.lanes)


def _widen(code: Code, kind: str, vector: str, count: int, lanes: int) -> str:
    if count == lanes:
        return vector
    return code.shuffle(kind, count, vector, "zeroinitializer", [min(lane, count) for lane in range(lanes)])


def _transpose(code: Code, lanes: int, rows: list[str]) -> list[str]:
    """Transpose a square of 32-bit words by swapping its off-diagonal halves, then quarters, ..."""
    step = lanes // 2
    while step:
        low = [lane if not lane & step else lanes + lane - step for lane in range(lanes)]
        high = [lane + step if not lane & step else lanes + lane for lane in range(lanes)]
        for i in (i for i in range(lanes) if not i & step):
            a, b = rows[i], rows[i + step]
            rows[i], rows[i + step] = (code.shuffle("i32", lanes, a, b, order) for order in (low, high))
        step //= 2
    return rows
