"""The memory that machine code works on, a table of 64-bit words, and writers of code that use it."""

from __future__ import annotations

from collections.abc import Callable

from .._jit import Code, splat

__all__ = ["FIELDS", "LANES", "RANGE", "STEP", "SUMS", "Frame", "constant", "size_of"]

RANGE = 16384  # documents: their 16-bit sums fill the first cache
LANES, STEP = 32, 128  # sums in a register, sums looked at in a turn
SUMS = f"<{LANES} x i16>"

FIELDS = (
    # the index
    *("list_offsets", "lists", "postings", "gains", "offsets", "terms", "weights", "row_scales"),
    *("few_lists", "few_rows", "few_weights"),
    *("n", "n_ranges", "dim"),
    # queries, results, scratch memory
    *("n_q", "q_offsets", "q_terms", "q_weights", "k", "keep", "rows", "scores"),
    *("given_terms", "given_weights", "given", "given_kind", "refused"),
    *("sums", "chosen", "slots", "slot_counts", "bounds", "table", "marks"),
    *("own_terms", "own_weights", "own_gains"),
    # variables: of a query, of a range
    *("out_rows", "out_scores", "hits", "theta", "least", "unit", "margin", "m"),
    *("range", "length", "place", "rest", "left", "since"),
    *("want", "above", "high", "low", "top", "number", "again"),
)


class Frame(Code):
    """Code with the frame ``%f``, whose fields are read and set by name."""

    def __init__(self, *held: str) -> None:
        """``held``: arrays whose addresses are read once, not in every turn of a loop."""
        super().__init__()
        self._held = {name: self.get(name, "ptr") for name in held}

    def get(self, name: str, kind: str = "i64") -> str:
        """Read a field."""
        return self.load(kind, "%f", 8 * FIELDS.index(name), 8)

    def set(self, name: str, value: str | int, kind: str = "i64") -> None:
        """Write a field."""
        self.store(kind, str(value), "%f", 8 * FIELDS.index(name), 8)

    def item(self, name: str, index: str | int, kind: str) -> str:
        """Element ``index`` of the array at a field, integers widened to 64 bits."""
        value = self.load(kind, self.place(name, index, kind), align=size_of(kind))
        return value if kind in ("float", "i64") else self.op(f"zext {kind} {value} to i64")

    def place(self, name: str, index: str | int, kind: str) -> str:
        """The address of element ``index`` of the array at a field."""
        base = self._held.get(name) or self.get(name, "ptr")
        return self.at(base, self.mul(index, size_of(kind)))

    def cmp(self, test: str, a: str | int, b: str | int, kind: str = "i64") -> str:
        """An i1: LLVM's comparison ``test`` of two values."""
        return self.op(f"{'fcmp' if kind == 'float' else 'icmp'} {test} {kind} {a}, {b}")

    def both(self, a: str, b: str) -> str:
        """``a and b`` of i1."""
        return self.op(f"and i1 {a}, {b}")

    def either(self, a: str, b: str) -> str:
        """``a or b`` of i1."""
        return self.op(f"or i1 {a}, {b}")

    def flip(self, a: str) -> str:
        """``not a`` of an i1."""
        return self.op(f"xor i1 {a}, true")

    def select(self, test: str, a: str | int, b: str | int, kind: str = "i64") -> str:
        """``a if test else b``."""
        return self.op(f"select i1 {test}, {kind} {a}, {kind} {b}")

    def floats(self, action: str, a: str, b: str) -> str:
        """LLVM's ``action`` of two float32."""
        return self.op(f"{action} float {a}, {b}")

    def whole(self, value: str) -> str:
        """A float32 as an i64, rounded towards 0."""
        return self.op(f"fptosi float {value} to i64")

    def real(self, value: str) -> str:
        """An i64 as a float32."""
        return self.op(f"sitofp i64 {value} to float")

    def repeat(self, body: Callable[[], str]) -> None:
        """``do: body() while`` what it returns, an i1."""
        head, after = self._name(), self._name()
        self.do(f"br label %{head}")
        self._begin(head)
        more = body()
        self.do(f"br i1 {more}, label %{head}, label %{after}")
        self._begin(after)

    def ceiling(self, value: str) -> str:
        """A float32 as an i64, rounded up."""
        return self.whole(self.op(f"call float @llvm.ceil.f32(float {value})"))

    def rest(self) -> str:
        """What the lists that are left may add to a sum, at most."""
        return self.maximum(self.ceiling(self.get("rest", "float")), 0)

    def prefetch(self, place: str) -> None:
        """Bring a line of memory into the cache."""
        self.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 3, i32 1)")


def size_of(kind: str) -> int:
    """Bytes of a value of an LLVM type."""
    return {"float": 4, "half": 2, "ptr": 8}.get(kind) or int(kind[1:]) // 8


def constant(value: float) -> str:
    """A float32 as LLVM wants it."""
    return splat(1, "float", value)[len("<float ") : -1]
