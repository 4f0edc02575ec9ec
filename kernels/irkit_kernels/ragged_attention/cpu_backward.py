"""The backward on the CPU: weights are computed again, block of keys by block of keys.

With ``p`` the weights of the forward, ``g`` the gradient of the output and ``m`` 1 / (1 - dropout) where a
weight is kept, else 0: ``dv = (p m)^T g``, ``ds = p (m (g v^T) - <g, out>)``, ``dq = ds k``, ``dk = ds^T q``.

Source: Dao et al. 2022 (FlashAttention), algorithm 4.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial

from .._jit import Code, Values, compile_ir
from .cpu_kernel import bounds, declarations, laid_out
from .cpu_packing import load_words, pack_keys, pack_values, prefetch
from .cpu_plan import Floats, Plan
from .cpu_tile import RANDOM, by_columns, kept, products, states, visible, weighted

__all__ = ["compile_backward", "scratch_layout"]

_BLOCK = 256  # keys worked on together: packed, with their gradients, they fit the L2 cache
_OF_QUERIES = ("maxima", "inverses", "deltas")
_OF_KEYS = ("keys", "values", "key_rows", "weights", "slopes", "d_keys", "d_values")
_OF_TILE = ("queries", "grads", "outputs", *_OF_QUERIES, *_OF_KEYS)


def scratch_layout(plan: Plan) -> tuple[dict[str, int], int]:
    """Offsets of the scratch arrays, and the size of them all, in bytes."""
    keys, queries = 4 * (_BLOCK + plan.lanes), 4 * plan.rows
    sizes = dict.fromkeys(("keys", "values"), keys * plan.words)
    sizes |= dict.fromkeys(("key_rows", "d_keys", "d_values"), keys * plan.width)
    sizes |= dict.fromkeys(("weights", "slopes"), keys * plan.rows)
    sizes |= dict.fromkeys(("queries", "grads"), queries * plan.words + 4 * plan.lanes)
    sizes |= {"outputs": queries * plan.width} | dict.fromkeys(_OF_QUERIES, queries)
    return laid_out(sizes)


@cache
def compile_backward(plan: Plan, cpu: str | None = None) -> Callable[..., None]:
    """Machine code of ``differentiate``, whose arguments `_Differentiate.write` lists."""
    parts = declarations(plan, plan.rows)
    parts += [_tile(plan), pack_keys(plan), pack_values(plan), _Differentiate(plan).write()]
    pointers, numbers = [ctypes.c_void_p] * 12, [ctypes.c_int64] * 12
    return compile_ir("\n".join(parts), "differentiate", [*pointers, *numbers, ctypes.c_float], cpu=cpu)


class _Differentiate:
    """Writes the loops over rows, heads, blocks of keys and tiles of queries."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.code = plan, Code()
        self.floats = Floats(self.code, plan.lanes)
        self.scratch = {name: self.code.at("%scratch", at) for name, at in scratch_layout(plan)[0].items()}

    def write(self) -> str:
        """The function: pairs of row and head from number ``%item`` up to ``%stop``; strides are in bytes.

        ``%d_q`` is zeros before; gradients are float32. ``%deltas`` are products of output and gradient.
        """
        self.code.loop("%item", "%stop", 1, self._item)
        return self.code.function(
            "define void @differentiate(ptr %d_q, ptr %d_k, ptr %d_v, ptr %stats, ptr %deltas, ptr %g, "
            "ptr %q, ptr %k, ptr %v, ptr %query_offsets, ptr %key_offsets, ptr %scratch, i64 %q_token, "
            "i64 %q_head, i64 %k_token, i64 %k_head, i64 %v_token, i64 %v_head, i64 %heads, i64 %window, "
            "i64 %item, i64 %stop, i64 %seed, i64 %threshold, float %grown)"
        )

    def _item(self, index: str, _: Values) -> None:
        code = self.code
        row, self.head = (code.op(f"{name} i64 {index}, %heads") for name in ("sdiv", "srem"))
        self.first_query, self.queries = bounds(code, "%query_offsets", row)
        self.first_key, self.keys = bounds(code, "%key_offsets", row)
        code.loop(0, self.keys, _BLOCK, self._key_block)

    def _key_block(self, start: str, _: Values) -> None:
        code, scratch = self.code, self.scratch
        count, first = code.minimum(_BLOCK, code.sub(self.keys, start)), code.add(self.first_key, start)
        for name, x, pack in (("keys", "k", "keys"), ("values", "v", "keys"), ("key_rows", "k", "values")):
            place = code.add(code.mul(first, f"%{x}_token"), code.mul(self.head, f"%{x}_head"))
            source = f"ptr {code.at(f'%{x}', place)}, i64 %{x}_token, i64 %{x}_head, i64 {count}"
            code.do(f"call void @pack_{pack}(ptr {scratch[name]}, {source})")
        for name in ("d_keys", "d_values"):
            clear = partial(self._clear, scratch[name])
            code.loop(0, code.mul(count, self.plan.width), self.plan.lanes, clear)
        low = code.maximum(0, code.sub(start, "%window"))
        high = code.minimum(self.queries, code.add(code.add(start, count), "%window"))
        code.loop(low, high, self.plan.rows, lambda query, _: self._queries(query, start, count))
        for name, out in (("d_keys", "%d_k"), ("d_values", "%d_v")):
            code.loop(0, count, 1, partial(self._store, scratch[name], out, first))

    def _clear(self, target: str, at: str, _: Values) -> None:
        self.floats.store(self.floats.constant(0), target, self.code.mul(at, 4))

    def _number(self, token: str) -> str:
        return self.code.add(self.code.mul(token, "%heads"), self.head)

    def _queries(self, query: str, start: str, count: str) -> None:
        """A tile of queries against the block of keys: load, call the tile, add to the gradients."""
        code, plan, scratch = self.code, self.plan, self.scratch
        left = code.sub(self.queries, query)
        grown = code.broadcast(plan.lanes, "float", "%grown")
        for row in range(plan.rows):  # the last query fills up its tile, with weights of 0
            place = code.minimum(row, code.add(left, -1))
            token = code.add(code.add(self.first_query, query), place)
            self._load_query(row, token, code.op(f"icmp slt i64 {row}, {left}"), grown)
        distance = code.sub(query, start)
        low, high = code.sub(distance, "%window"), code.add(code.add(distance, "%window"), 1)
        pointers = [scratch[name] for name in _OF_TILE]
        numbers = [count, low, high]
        if plan.dropout:
            numbers += [
                start,
                self._number(code.add(self.first_query, query)),
                "%heads",
                "%seed",
                "%threshold",
            ]
        arguments = ", ".join([*(f"ptr {x}" for x in pointers), *(f"i64 {x}" for x in numbers)])
        code.do(f"call void @tile({arguments})")
        first = code.add(self.first_query, query)
        add = partial(self._store, scratch["outputs"], "%d_q", first, more=True)
        code.loop(0, code.minimum(plan.rows, left), 1, add)

    def _load_query(self, row: int, token: str, exists: str, grown: str) -> None:
        """Query ``token``, its gradient, grown as weights that are kept, and what the forward kept of it."""
        code, plan, floats, scratch = self.code, self.plan, self.floats, self.scratch
        number = self._number(token)
        place = code.add(code.mul(token, "%q_token"), code.mul(self.head, "%q_head"))
        query = code.at("%q", place)
        grad = code.at("%g", code.mul(number, plan.stored * plan.head_dim))
        prefetch(code, plan, query, "%q_head")
        for name, source in (("queries", query), ("grads", grad)):
            for word in range(0, plan.words, plan.lanes):
                size = min(plan.lanes, plan.words - word)
                vector = load_words(code, plan, source, word, size)
                vector = code.op(f"bitcast {floats.integers} {vector} to {floats.kind}")
                vector = floats.mul(vector, grown) if name == "grads" else vector
                floats.store(vector, scratch[name], 4 * (row * plan.words + word))
        stats = code.at("%stats", code.mul(number, 8))
        found = {
            "maxima": code.load("float", stats),
            "inverses": code.op(f"select i1 {exists}, float {code.load('float', stats, 4)}, float 0.0"),
            "deltas": code.load("float", "%deltas", code.mul(number, 4)),
        }
        for name, value in found.items():
            code.store("float", value, scratch[name], 4 * row)

    def _store(self, source: str, out: str, first: str, at: str, _: Values, more: bool = False) -> None:
        """Write row ``at`` of a scratch array as the gradient of token ``first + at``, or add it."""
        code, plan = self.code, self.plan
        target = code.at(out, code.mul(self._number(code.add(first, at)), 4 * plan.head_dim))
        row = code.at(source, code.mul(at, 4 * plan.width))
        for column in range(0, plan.head_dim, plan.lanes):
            floats = Floats(code, min(plan.lanes, plan.head_dim - column))
            value = floats.load(row, 4 * column)
            if more:
                value = floats.add(value, floats.load(target, 4 * column))
            floats.store(value, target, 4 * column)


def _tile(plan: Plan) -> str:
    """The function for a tile of queries, whose gradients it returns in ``%outputs``."""
    code, rows, lanes = Code(), plan.rows, plan.lanes
    floats, each = Floats(code, lanes), Floats(code, rows)
    first = code.mul(code.op(f"sdiv i64 {code.maximum('%low', 0)}, {lanes}"), lanes)
    stop = code.minimum("%count", code.add("%high", rows - 1))
    of_queries = [each.spread(each.load(f"%{name}"), lanes) for name in _OF_QUERIES]
    seeds = states(code, rows, lanes) if plan.dropout else []
    code.loop(first, stop, lanes, lambda at, _: _slopes(floats, plan, at, of_queries, seeds))

    def of_query(column: str | int, vectors: int) -> None:
        keys = code.at("%key_rows", code.mul(column, 4))
        sums = weighted(floats, plan, "%slopes", keys, (rows, vectors), first, stop)
        outputs = code.at("%outputs", code.mul(column, 4))
        for i, total in enumerate(sums):
            row, vector = divmod(i, vectors)
            floats.store(total, outputs, 4 * (plan.width * row + lanes * vector))

    by_columns(code, plan, of_query)
    for names in (("%slopes", "%queries", "%d_keys"), ("%weights", "%grads", "%d_values")):
        by_columns(code, plan, partial(_add_products, floats, plan, names, first, stop))
    random = RANDOM if plan.dropout else ""
    listed = ", ".join(f"ptr %{name}" for name in _OF_TILE)
    return code.function(f"define internal void @tile({listed}, i64 %count, i64 %low, i64 %high{random})")


def _slopes(
    floats: Floats, plan: Plan, at: str, of_queries: Sequence[Sequence[str]], seeds: Sequence[str]
) -> None:
    """Weights of a group of keys, and the gradients of their scores."""
    code, lanes, rows = floats.code, plan.lanes, plan.rows
    scores = visible(floats, at, 1, products(floats, plan, "%queries", "%keys", at, 1, rows))
    changes = products(floats, plan, "%grads", "%values", at, 1, rows)
    keep = kept(code, lanes, seeds, code.add("%key", at)) if plan.dropout else []
    zero, place = floats.constant(0), code.mul(at, 4 * rows)
    weights, slopes = (code.at(name, place) for name in ("%weights", "%slopes"))
    for row, (score, change, maximum, inverse, delta) in enumerate(
        zip(scores, changes, *of_queries, strict=True)
    ):
        x = floats.mul(floats.sub(score, maximum), floats.constant(plan.scale))
        weight = floats.mul(floats.exp2(x), inverse)
        if plan.dropout:
            change = floats.select(keep[row], change, zero)
        slope = floats.mul(floats.sub(change, delta), floats.constant(plan.head_dim**-0.5))
        floats.store(floats.mul(weight, slope), slopes, 4 * lanes * row)
        if plan.dropout:
            weight = floats.select(keep[row], weight, zero)
        floats.store(weight, weights, 4 * lanes * row)


def _add_products(
    floats: Floats,
    plan: Plan,
    names: tuple[str, str, str],
    first: str,
    stop: str,
    column: str | int,
    vectors: int,
) -> None:
    """``out[key] += sum over queries of table[key, query] * queries[query]`` for some columns."""
    code, lanes, rows = floats.code, plan.lanes, plan.rows
    table, queries, out = names
    source, target = (code.at(name, code.mul(column, 4)) for name in (queries, out))
    vectors_of = [
        [floats.load(source, 4 * (plan.words * row + lanes * v)) for v in range(vectors)]
        for row in range(rows)
    ]

    def group(start: str, _: Values) -> None:
        weights = code.at(table, code.mul(start, 4 * rows))
        gradients = code.at(target, code.mul(start, 4 * plan.width))

        def key(lane: str, _: Values) -> None:
            place, weight = (
                code.at(gradients, code.mul(lane, 4 * plan.width)),
                code.at(weights, code.mul(lane, 4)),
            )
            sums = [floats.load(place, 4 * lanes * v) for v in range(vectors)]
            for row in range(rows):
                factor = code.broadcast(lanes, "float", code.load("float", weight, 4 * lanes * row))
                sums = [floats.mul_add(factor, x, y) for x, y in zip(vectors_of[row], sums, strict=True)]
            for v, total in enumerate(sums):
                floats.store(total, place, 4 * lanes * v)

        code.loop(0, code.minimum(lanes, code.sub(stop, start)), 1, key)

    code.loop(first, stop, lanes, group)
