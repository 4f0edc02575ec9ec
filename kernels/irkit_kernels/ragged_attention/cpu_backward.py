"""The backward of attention on the CPU, in LLVM IR: it computes the weights again, block by block of keys.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

With ``p`` the weights of the forward, ``g`` the gradient of the output, and ``m`` 0 for a dropped weight and
1 / (1 - dropout) for the others: ``dv = (p m)^T g``, ``ds = p (m (g v^T) - <g, out>) / sqrt(head_dim)``, ``dq
= ds k``, ``dk = ds^T q``. The code calls ``ds`` slopes and ``<g, out>`` deltas. The weights follow from the
scores and two numbers per query and head that the forward has stored: the maximum, and 1 / the sum.

Source: Dao et al. 2022 (FlashAttention), algorithm 4.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from .._jit import compile_ir, compiled_once
from .._typed import Array, Value, module
from .cpu_kernel import Loops, layout
from .cpu_packing import load_words, pack_keys, pack_values, prefetch
from .cpu_plan import Plan, exp2, spread
from .cpu_tile import Tile

__all__ = ["compile_backward", "scratch_layout", "write_differentiate"]

_BLOCK = 256  # keys processed together: packed, with their gradients, they fit the second-level cache
_OF_QUERIES = ("maxima", "inverses", "deltas")
_OF_KEYS = ("keys", "values", "key_rows", "weights", "slopes", "d_keys", "d_values")
_OF_TILE = ("queries", "grads", "outputs", *_OF_QUERIES, *_OF_KEYS)


def scratch_layout(plan: Plan) -> tuple[dict[str, int], int]:
    """Return the offsets of the scratch arrays, and their total size, in bytes."""
    keys, queries = 4 * (_BLOCK + plan.lanes), 4 * plan.rows
    sizes = dict.fromkeys(("keys", "values"), keys * plan.words)
    sizes |= dict.fromkeys(("key_rows", "d_keys", "d_values"), keys * plan.width)
    sizes |= dict.fromkeys(("weights", "slopes"), keys * plan.rows)
    sizes |= dict.fromkeys(("queries", "grads"), queries * plan.words + 4 * plan.lanes)
    sizes |= {"outputs": queries * plan.width} | dict.fromkeys(_OF_QUERIES, queries)
    return layout(sizes)


def write_differentiate(plan: Plan) -> str:
    """Return the LLVM IR module of ``differentiate``, whose arguments `_Differentiate` lists."""
    differentiate = _Differentiate(plan)
    differentiate.write()
    return module(_tile(plan), pack_keys(plan), pack_values(plan), differentiate)


@compiled_once
def compile_backward(plan: Plan, cpu: str | None = None) -> Callable[..., None]:
    """Compile `write_differentiate` for this CPU, or for another by its LLVM name."""
    pointers, numbers = [ctypes.c_void_p] * 13, [ctypes.c_int64] * 15
    return compile_ir(
        write_differentiate(plan), "differentiate", [*pointers, *numbers, ctypes.c_float], cpu=cpu
    )


class _Differentiate(Loops):
    """Writes the loops over rows, heads, blocks of keys and tiles of queries.

    ``g`` is the gradient of the output, ``deltas`` its products with the output. The gradients ``d_q``,
    ``d_k`` and ``d_v`` are float32, with as many heads as the queries; ``d_q`` is zeros before.
    """

    def __init__(self, plan: Plan) -> None:
        pointers = dict.fromkeys(("d_q", "d_k", "d_v", "stats", "deltas"), "float*")
        pointers |= dict.fromkeys(("g", "q", "k", "v"), "u8*")
        pointers |= {"query_offsets": "i32*", "key_offsets": "i32*", "bias": "float*", "scratch": "u8*"}
        super().__init__("differentiate", plan, pointers, scratch_layout(plan)[0])

    def write(self) -> None:
        """Write the body of the LLVM function: the loops that the class names."""
        a = self.arguments
        with self.range(a.item, a.stop) as items:
            row, self.head = items.i // a.heads, items.i % a.heads
            self.first_query, self.queries = self.bounds(a.query_offsets, row)
            self.first_key, self.keys = self.bounds(a.key_offsets, row)
            with self.range(0, self.keys, _BLOCK) as blocks:
                self._key_block(blocks.i)

    def _key_block(self, start: Value) -> None:
        """Compute the gradients of a block of keys and values, and add to the gradients of the queries."""
        a, plan, scratch = self.arguments, self.plan, self.scratch
        count, first = self.minimum(_BLOCK, self.keys - start), self.first_key + start

        # pack keys and values; keys also row by row, for the gradients of the queries
        for name, x, pack in (("keys", "k", "keys"), ("values", "v", "keys"), ("key_rows", "k", "values")):
            stride, head = (vars(a)[f"{x}_{unit}"] for unit in ("token", "head"))
            self.call(f"pack_{pack}", scratch[name], self.token_at(x, first, self.head), stride, head, count)

        # sum up gradients over the queries within reach
        for name in ("d_keys", "d_values"):
            with self.range(0, count * plan.width, plan.lanes) as loop:
                self.floats_at(name).vectors(plan.lanes)[loop.i] = 0.0
        low = self.maximum(0, start - a.after)
        high = self.minimum(self.queries, start + count + a.before)
        with self.range(low, high, plan.rows) as tiles:
            self._queries(tiles.i, start, count)

        for name, out in (("d_keys", a.d_k), ("d_values", a.d_v)):
            with self.range(0, count) as loop:
                self._store(self.floats_at(name), out, first, loop.i)

    def _number(self, token: Value) -> Value:
        """Return the number of a token and the current head: ``token * heads + head``."""
        return token * self.arguments.heads + self.head

    def _queries(self, query: Value, start: Value, count: Value) -> None:
        """Run a tile of queries against the block of keys: load, call the tile, add to the gradients."""
        a, plan = self.arguments, self.plan
        left = self.queries - query
        grown = a.grown.broadcast(plan.lanes)
        for row in range(plan.rows):  # the last query fills up its tile, with weights of 0
            token = self.first_query + query + self.minimum(row, left - 1)
            self._load_query(row, token, left > row, grown)
        tensors = [self.scratch[name] for name in _OF_TILE]
        first = self.first_query + query
        number = self._number(first)
        self.call("tile", *self.tile_arguments(tensors, count, query, start, self.head, number))
        with self.range(0, self.minimum(plan.rows, left)) as loop:
            self._store(self.floats_at("outputs"), a.d_q, first, loop.i, add=True)

    def _load_query(self, row: int, token: Value, exists: Value, grown: Value) -> None:
        """Load a query, its gradient (times 1 / (1 - dropout)), and what the forward has stored of it."""
        a, plan = self.arguments, self.plan
        number = self._number(token)
        query = self.token_at("q", token, self.head)
        grad = a.g.at(number * (plan.stored * plan.head_dim))
        prefetch(self, plan, query, a.q_head)
        for name, source in (("queries", query), ("grads", grad)):
            for word in range(0, plan.words, plan.lanes):
                words = load_words(self, plan, source, word, min(plan.lanes, plan.words - word))
                numbers = words.cast(self.floats)
                numbers = numbers * grown if name == "grads" else numbers
                self.floats_at(name).vectors(plan.lanes)[row * plan.words + word] = numbers
        stats = a.stats.at(number * 2)
        values = {
            "maxima": stats[0],
            "inverses": self.where(exists, stats[1], 0.0),
            "deltas": a.deltas[number],
        }
        for name, value in values.items():
            self.floats_at(name)[row] = value

    def _store(self, source: Array, out: Array, first: Value, at: Value, add: bool = False) -> None:
        """Store row ``at`` of ``source`` as the gradient of token ``first + at``, or ``add`` the row."""
        plan = self.plan
        target, row = out.at(self._number(first + at) * plan.head_dim), source.at(at * plan.width)
        for column in range(0, plan.head_dim, plan.lanes):
            n = min(plan.lanes, plan.head_dim - column)
            numbers = row.vectors(n)[column]
            if add:
                numbers = numbers + target.vectors(n)[column]
            target.vectors(n)[column] = numbers


def _tile(plan: Plan) -> Tile:
    """Write the function for a tile of queries; the function stores their gradients in ``outputs``."""
    x = Tile("tile", plan, plan.rows, dict.fromkeys(_OF_TILE, "u8*"))
    arguments, rows, lanes = vars(x.arguments), plan.rows, plan.lanes
    a = {name: array.cast("float", 1) for name, array in arguments.items() if name in _OF_TILE}
    of_queries = [spread(x, a[name].vectors(rows)[0], lanes) for name in _OF_QUERIES]
    states = x.random_states() if plan.dropout else []
    with x.range(x.first, x.stop, lanes) as groups:
        _slopes(x, groups.i, of_queries, states)

    # gradients of the queries: slopes times keys
    for column, vectors in x.columns():
        sums = x.weighted(x.arguments.slopes, a["key_rows"].at(column).cast("u8"), vectors)
        outputs = a["outputs"].at(column)
        for i, total in enumerate(sums):
            row, v = divmod(i, vectors)
            outputs.vectors(lanes)[plan.width * row + lanes * v] = total

    # gradients of keys and values: slopes times queries, weights times gradients
    for table, queries, out in (("slopes", "queries", "d_keys"), ("weights", "grads", "d_values")):
        for column, vectors in x.columns():
            _add_products(x, a[table], a[queries].at(column), a[out].at(column), vectors)
    return x


def _slopes(x: Tile, first: Value, of_queries: list[list[Value]], states: list[Value]) -> None:
    """Store the weights of a group of keys, and the gradients of their scores."""
    plan, a, lanes, rows = x.plan, x.arguments, x.lanes, x.rows
    scores = x.visible(first, 1, x.products(a.queries, a.keys, first, 1))
    changes = x.products(a.grads, a.values, first, 1)
    retained = x.retained(states, a.key + first) if plan.dropout else []
    weights, slopes = (array.cast("float", 1).at(first * rows) for array in (a.weights, a.slopes))
    for row, (score, change, maximum, inverse, delta) in enumerate(
        zip(scores, changes, *of_queries, strict=True)
    ):
        weight = exp2(x, (score - maximum) * plan.scale) * inverse
        if plan.dropout:
            change = x.where(retained[row], change, 0.0)
        slope = (change - delta) * plan.head_dim**-0.5
        slopes.vectors(lanes)[lanes * row] = weight * slope
        if plan.dropout:
            weight = x.where(retained[row], weight, 0.0)
        weights.vectors(lanes)[lanes * row] = weight


def _add_products(x: Tile, table: Array, queries: Array, out: Array, vectors: int) -> None:
    """Add ``sum over queries of table[key, query] * queries[query]`` to ``out[key]``, for some columns."""
    plan, lanes, rows = x.plan, x.lanes, x.rows
    columns = [
        [queries.vectors(lanes)[plan.words * row + lanes * v] for v in range(vectors)] for row in range(rows)
    ]
    with x.range(x.first, x.stop, lanes) as groups:
        group_weights, group_out = table.at(groups.i * rows), out.at(groups.i * plan.width)
        with x.range(0, x.minimum(lanes, x.stop - groups.i)) as keys:
            key_out, weights = group_out.at(keys.i * plan.width).vectors(lanes), group_weights.at(keys.i)
            sums = [key_out[lanes * v] for v in range(vectors)]
            for row in range(rows):
                factor = weights[lanes * row].broadcast(lanes)
                sums = [x.fmuladd(factor, c, total) for c, total in zip(columns[row], sums, strict=True)]
            for v, total in enumerate(sums):
                key_out[lanes * v] = total
