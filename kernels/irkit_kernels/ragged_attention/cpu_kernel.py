"""The forward of attention on the CPU, in LLVM IR: loops over rows, heads and blocks, and the output.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

For each row and head, a block of up to 512 queries meets blocks of up to 512 keys, which are packed once and
then read by tiles of a few queries (`cpu_tile`). Blocks bound the scratch memory, so a row may have any
length. The code is written for one `Plan`; README.md has the maths and the memory layouts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace

from .._jit import compile_ir, compiled_once, cpu_features
from .._simd import store_floats
from .._typed import Array, Function, Value, module, vector
from .cpu_packing import load_words, pack_keys, pack_values, prefetch
from .cpu_plan import BLOCK, FAR, LOWEST, Plan
from .cpu_tile import RANDOM, tile

__all__ = ["FAR", "Loops", "Plan", "compile_plan", "layout", "plan_for", "scratch_layout", "write_attend"]

MAX_HEAD_DIM = 256
# heads of queries; of them, those that share keys and values; how many keys before and after its own position
# a query sees; and numbers per head of the table of biases
SIZES = ("heads", "group", "before", "after", "biases")


def supported() -> bool:
    """Return whether this CPU can run the compiled code (AVX2 with FMA, AVX-512, or NEON)."""
    features = cpu_features()
    return "avx512f" in features or {"avx2", "fma"} <= features or "neon" in features


def plan_for(head_dim: int, bfloat16: bool, dropout: bool = False, rough: bool = False) -> Plan:
    """Return the fastest plan on this CPU, which must be `supported`; see `Plan` and `ragged_attention`."""
    features = cpu_features()
    if "avx512f" in features:
        dot = (bfloat16 or rough) and "avx512bf16" in features
        return Plan(head_dim, bfloat16, dot, 16, dropout)
    return Plan(head_dim, bfloat16, False, 8 if "avx2" in features else 4, dropout)


def scratch_layout(plan: Plan) -> tuple[dict[str, int], int]:
    """Return the offsets of the scratch arrays, and their total size, in bytes."""
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
    return layout(sizes)


def layout(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Return the offsets of arrays of these sizes, each on a new cache line, and their total size."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name], end = end, end + -(-size // 64) * 64
    return offsets, end


def write_attend(plan: Plan) -> str:
    """Return the LLVM IR module of ``attend``, whose arguments `_Attend` lists."""
    tiles = tile(plan, plan.rows), tile(plan, plan.rows // 2)
    attend = _Attend(plan)
    attend.write()
    return module(*tiles, pack_keys(plan), pack_values(plan), attend)


@compiled_once
def compile_plan(plan: Plan, cpu: str | None = None) -> Callable[..., None]:
    """Compile `write_attend` for this CPU, or for another by its LLVM name."""
    pointers, numbers = [ctypes.c_void_p] * 9, [ctypes.c_int64] * 15
    return compile_ir(write_attend(plan), "attend", [*pointers, *numbers, ctypes.c_float], cpu=cpu)


class Loops(Function):
    """A public function over pairs of row and head, with what forward and backward share.

    It takes some pointers, strides in bytes, and the range of the pairs, ``item`` to ``stop``.

    Attributes:
        plan: The variant of the code.
        arguments: The parameters, by name.
        scratch: The scratch arrays, by name.
        floats: Kind of a vector of float32.
    """

    def __init__(self, name: str, plan: Plan, pointers: dict[str, str], offsets: dict[str, int]) -> None:
        strides = [f"{x}_{unit}" for x in "qkv" for unit in ("token", "head")]
        names = (*strides, *SIZES, "item", "stop", "seed", "threshold")
        numbers = dict.fromkeys(names, "i64")
        parameters = {**pointers, **numbers, "grown": "float"}
        super().__init__(name, public=True, align=1, **parameters)
        self.plan, self.floats = plan, vector(plan.lanes, "float")
        self.arguments = a = SimpleNamespace(**dict(zip(parameters, self.parameters, strict=True)))
        self.scratch = {name: a.scratch.at(offset) for name, offset in offsets.items()}

    def floats_at(self, name: str, index: Value | int = 0) -> Array:
        """Return a scratch array as float32 numbers from an index on."""
        return self.scratch[name].cast("float", 1).at(index)

    def bounds(self, offsets: Array, row: Value) -> tuple[Value, Value]:
        """Return the first token of a row, and the number of its tokens."""
        start, stop = [offsets[row + k] for k in range(2)]
        start, stop = start.to("i64"), stop.to("i64")
        return start, stop - start

    def token_at(self, name: str, token: Value, head: Value) -> Array:
        """Return the address of a token and head in ``q``, ``k`` or ``v``."""
        a = vars(self.arguments)
        head = head if name == "q" else head // a["group"]
        address: Array = a[name].at(token * a[f"{name}_token"] + head * a[f"{name}_head"])
        return address

    def tile_arguments(
        self, tensors: list[Array], keys: Value, query: Value, start: Value, head: Value, number: Value
    ) -> list[Value | Array]:
        """Return the arguments of a tile, see `Tile`.

        Args:
            tensors: Its own pointers.
            keys: Number of keys in the block.
            query: Position of the first query in its row.
            start: Position of the first key in its row.
            head: Number of the head.
            number: ``token * heads + head`` of the first query.
        """
        a = self.arguments
        if self.plan.biased:  # the bias of distance 0 is in the middle
            tensors = [*tensors, a.bias.at(head * a.biases + a.biases // 2 + start - query)]
        limits = [keys, query - a.before - start, query + a.after + 1 - start]
        random = vars(a) | {"key": start, "number": number}
        return [*tensors, *limits, *([random[name] for name in RANDOM] if self.plan.dropout else [])]


class _Attend(Loops):
    """Writes the loops over rows, heads, blocks of queries, blocks of keys and tiles."""

    def __init__(self, plan: Plan) -> None:
        pointers = {"out": "u8*", "stats": "float*", "q": "u8*", "k": "u8*", "v": "u8*"}
        pointers |= {"query_offsets": "i32*", "key_offsets": "i32*", "bias": "float*", "scratch": "u8*"}
        super().__init__("attend", plan, pointers, scratch_layout(plan)[0])

    def write(self) -> None:
        """Write the body of the LLVM function: for each row and head, a loop over blocks of queries."""
        a = self.arguments
        with self.range(a.item, a.stop) as items:
            row, head = items.i // a.heads, items.i % a.heads
            first_query, self.queries = self.bounds(a.query_offsets, row)
            first_key, self.keys = self.bounds(a.key_offsets, row)
            first = {"q": first_query, "k": first_key, "v": first_key}
            self.start = {name: self.token_at(name, token, head) for name, token in first.items()}
            self.head, self.number = head, first_query * a.heads + head
            with self.range(0, self.queries, BLOCK) as blocks:
                self._query_block(blocks.i)

    def _query_block(self, first: Value) -> None:
        """Compute the outputs of a block of queries from all keys within their reach."""
        a, plan = self.arguments, self.plan
        count = self.minimum(BLOCK, self.queries - first)
        with self.range(0, count, plan.rows) as tiles:
            self._clear(tiles.i)
        low = self.maximum(0, first - a.before)
        high = self.minimum(self.keys, first + count + a.after)
        with self.range(low, high, BLOCK) as blocks:
            keys = self.minimum(BLOCK, high - blocks.i)
            for name, x in (("keys", "k"), ("values", "v")):
                stride, head = (vars(a)[f"{x}_{unit}"] for unit in ("token", "head"))
                source = self.start[x].at(blocks.i * stride)
                self.call(f"pack_{name}", self.scratch[name], source, stride, head, keys)
            with self.range(0, count, plan.rows) as tiles:
                self._tile(tiles.i, first, count, blocks.i, keys)
        with self.range(0, count) as loop:
            self._finish(loop.i, first + loop.i)

    def _clear(self, query: Value) -> None:
        """Set maxima, sums and outputs of the queries of a tile to their values before any key."""
        plan = self.plan
        self.floats_at("maxima", query).vectors(plan.rows)[0] = LOWEST
        self.floats_at("sums", query).vectors(plan.rows)[0] = 0.0
        outputs = self.floats_at("outputs", query * plan.width)
        with self.range(0, plan.rows * plan.width, plan.lanes) as loop:
            outputs.vectors(plan.lanes)[loop.i] = 0.0

    def _tile(self, at: Value, first: Value, count: Value, start: Value, keys: Value) -> None:
        """Call the tile of the queries from ``first + at`` on; the packed keys begin with key ``start``."""
        a, plan, half = self.arguments, self.plan, self.plan.rows // 2
        query, left = first + at, count - at
        tensors = [self.scratch[name] for name in ("queries", "keys", "values", "scores", "weights")]
        tensors += [self.floats_at("maxima", at), self.floats_at("sums", at)]
        tensors += [self.floats_at("outputs", at * plan.width)]
        number = self.number + query * a.heads
        arguments = self.tile_arguments(tensors, keys, query, start, self.head, number)
        low, high = query - a.before - start, query + a.after + 1 - start

        with self.when((low < keys) & (high > -plan.rows)):  # some query sees some key of the block
            queries = self.scratch["queries"].cast("i32", 1)
            for row in range(plan.rows):  # the last query fills up its tile
                token = query + self.minimum(row, left - 1)
                source = self.start["q"].at(token * a.q_token)
                prefetch(self, plan, source, a.q_head)
                for word in range(0, plan.words, plan.lanes):
                    words = load_words(self, plan, source, word, min(plan.lanes, plan.words - word))
                    queries.vectors(plan.lanes)[row * plan.words + word] = words
            many = left > half
            with self.when(many):
                self.call(f"tile{plan.rows}", *arguments)
            with self.when(~many):
                self.call(f"tile{half}", *arguments)

    def _finish(self, at: Value, query: Value) -> None:
        """Divide the output of a query by its sum of weights, and write it; without keys it is 0."""
        a, plan = self.arguments, self.plan
        total = self.floats_at("sums")[at]
        total = self.where(total.compare("une", 0.0), total, 1.0)
        number = self.number + query * a.heads
        with self.when(a.stats.exists()):  # what the backward needs
            stats = a.stats.at(number * 2)
            stats[0] = self.floats_at("maxima")[at]
            stats[1] = 1.0 / total
        inverse = (a.grown / total).broadcast(plan.lanes)
        source = self.floats_at("outputs", at * plan.width)
        size = plan.stored * plan.head_dim
        target = a.out.at(number * size)
        prefetch(self, plan, target, size, write=True)
        output = target.cast("u16" if plan.bfloat16 else "float", 1)
        for column in range(0, plan.head_dim, plan.lanes):
            numbers, n = source.vectors(plan.lanes)[column] * inverse, min(plan.lanes, plan.head_dim - column)
            if n < plan.lanes:
                numbers = self.shuffle(numbers, None, range(n))
            store_floats(output.at(column), numbers, rounds=plan.dot)
