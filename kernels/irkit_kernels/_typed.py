"""Typed values, arrays, records and blocks: code that reads like Python and writes LLVM IR.

A `Function` collects the text of one LLVM function. Each operation on its values appends an instruction, in
the order in which Python evaluates the operations.

Examples:
    Sum the numbers of an array that are above a limit, and count them::

        x = Function("add_high", public=True, numbers="float*", n="i64", limit="float", out="float*")
        numbers, n, limit, out = x.parameters

        with x.range(0, n, total=0.0, count=0) as loop:  # carries two variables from turn to turn
            number = numbers[loop.i]
            high = number > limit
            with x.when(high, total=loop.total) as branch:
                branch.total += number
            loop.total = branch.total
            loop.count += high.to("i64")

        out[0] = loop.total
        out[1] = loop.count.to("float")
        add_high = compile_ir(module(x), "add_high", [c_void_p, c_int64, c_float, c_void_p])

**Kinds** are LLVM's types: ``i64``, ``float``, ``<16 x i32>`` (see `vector`). ``u8`` to ``u64`` are unsigned
integers: they widen with zeros, and compare and divide as unsigned numbers. ``float*`` is an `Array` of
floats, a `Struct` a `Record` of its fields, ``[Struct]`` an array of such records. A Python number takes the
kind of the value beside it. Values of different sizes do not mix: `Value.to` converts.

**Blocks** are ``x.range`` (for), ``x.count`` (for, while a condition holds), ``x.repeat`` (do while) and
``x.when`` (if; ``x.when(~test)`` serves as else). Python's own ``if`` and ``for`` run while the text is
written: they choose between variants, and unroll.

**Variables.** A block names the variables that it changes and their first values, such as ``total=0.0``
above. They can be assigned in this block, not in a block inside it: the inner one carries them itself, as
``branch`` does. A variable that many blocks change is memory on the stack (`Function.local`) or a field of a
record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import copysign
from typing import Any

from ._jit import array, number, splat
from ._values import (
    Array,
    Operand,
    Record,
    Struct,
    Value,
    is_value,
    llvm_type,
    parts,
    size_of,
    suffix,
    vector,
)

__all__ = ["Array", "Carried", "Function", "Record", "Struct", "Value", "module", "size_of", "vector"]


def module(*functions: Function) -> str:
    """Return the LLVM module of some functions, with their tables and what they call of LLVM."""
    declared = dict.fromkeys(line for function in functions for line in function.declared)
    return "\n".join([*declared, *(function.text() for function in functions)])


class Carried:
    """Variables that a block changes, read and assigned as attributes; each is a value or a list of values.

    Within the block a variable is what was assigned last. After the block it is what it was at the end.

    Attributes:
        i: The index, in a loop that has one.
    """

    def __init__(self, code: Function, depth: int, values: dict[str, Any], i: Value | None = None) -> None:
        self.__dict__.update(i=i, _code=code, _depth=depth, _values=values)

    def __getattr__(self, name: str) -> Any:
        if name not in self._values:
            raise AttributeError(f"{name} is not carried through this block")
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        old = getattr(self, name)
        if self._depth != self._code.depth:
            raise TypeError(f"{name} is assigned in another block than carries it")
        many = isinstance(old, list)
        self._values[name] = [a.like(b) for a, b in zip(old, value, strict=True)] if many else old.like(value)


class Function:
    """One LLVM function without a result; see the example of the module.

    Args:
        name: The name of the function.
        public: Make the function visible outside of its module.
        align: Alignment of arrays among the parameters; None means the size of their elements.
        parameters: The kind of each parameter.

    Attributes:
        parameters: The values, arrays and records of the parameters.
        declared: Declarations of LLVM's own functions that are called, and constants of `table`.
        lines: The text so far.
        depth: Number of blocks around the next instruction.
    """

    def __init__(
        self, name: str, /, *, public: bool = False, align: int | None = None, **parameters: Any
    ) -> None:
        types = (f"{llvm_type(kind) if is_value(kind) else 'ptr'} %{key}" for key, kind in parameters.items())
        self._head = f"define {'' if public else 'internal '}void @{name}({', '.join(types)})"
        self._align, self._block, self._count = align, "entry", 0
        self.lines, self.depth, self.declared = ["entry:"], 0, dict[str, None]()
        self.parameters = [self.typed(kind, f"%{key}") for key, kind in parameters.items()]

    def text(self) -> str:
        """Return the whole function."""
        return "\n".join([self._head + " {", *self.lines, "  ret void", "}"])

    def value(self, kind: str, text: str) -> Value:
        """Append an instruction, and return its result."""
        name = f"%{self._name()}"
        self.lines.append(f"  {name} = {text}")
        return Value(self, kind, name)

    def do(self, text: str) -> None:
        """Append an instruction without a result."""
        self.lines.append(f"  {text}")

    def typed(self, spec: Any, name: str) -> Any:
        """Wrap the LLVM variable ``name`` in a Value, Array or Record, as its kind ``spec`` says."""
        if isinstance(spec, Struct):
            return Record(spec, Array(self, "u8", name))
        if isinstance(spec, list):
            return Array(self, spec[0], name)
        return Value(self, spec, name) if spec[-1] != "*" else Array(self, spec[:-1], name, self._align)

    def constant(self, kind: str, value: float) -> Value:
        """Return a constant, in every lane of a vector."""
        lanes, element = parts(kind)
        if element != "float" and not isinstance(value, int):
            raise TypeError(f"{value} is no constant of kind {kind}")
        zero = value == 0 and copysign(1, value) > 0  # which -0.0 is not
        if lanes:
            return Value(self, kind, "zeroinitializer" if zero else splat(lanes, llvm_type(element), value))
        if kind == "float":
            return Value(self, kind, "0.0" if zero else number(value))
        return Value(self, kind, str(bool(value)).lower() if kind == "i1" else str(int(value)))

    def constants(self, element: str, values: Sequence[float]) -> Value:
        """Return a constant vector of ``values``, one per lane; ``element`` is the kind of a lane."""
        return Value(self, vector(len(values), element), array(len(values), llvm_type(element), values))

    def local(self, kind: str, count: int = 1) -> Array:
        """Return memory on the stack for one element or several."""
        room = llvm_type(kind) if count == 1 else f"[{count} x {llvm_type(kind)}]"
        return Array(self, kind, str(self.value("ptr", f"alloca {room}, align {size_of(kind)}")))

    def table(self, name: str, kind: str, values: Sequence[int]) -> Array:
        """Return constant memory of integers, which functions of a module share under its name."""
        llvm = llvm_type(kind)
        numbers = ", ".join(f"{llvm} {value}" for value in values)
        self.declared[f"@{name} = internal constant [{len(values)} x {llvm}] [{numbers}]"] = None
        return Array(self, kind, f"@{name}")

    def where(self, test: Value, a: Operand, b: Operand) -> Any:
        """Return ``a if test else b``, lane by lane if the test is a vector; both sides are evaluated."""
        if isinstance(a, Array):
            name = self.value("ptr", f"select {test.typed}, ptr {a}, ptr {b}")
            return Array(self, a.kind, str(name), a.align, a.step)
        either = a if isinstance(a, Value) else b if isinstance(b, Value) else Value(self, "i64", "")
        a, b = either.like(a), either.like(b)
        return self.value(either.kind, f"select {test.typed}, {a.typed}, {b.typed}")

    def minimum(self, a: Operand, b: Operand) -> Value:
        """Return the lower of two values, of which one may be a number."""
        a, b = self._pair(a, b)
        return self.where(a < b, a, b)

    def maximum(self, a: Operand, b: Operand) -> Value:
        """Return the higher of two values, of which one may be a number; ``b`` if one is NaN."""
        a, b = self._pair(a, b)
        return self.where(a > b, a, b)

    def shuffle(self, a: Value, b: Value | int | None, lanes: Sequence[int]) -> Value:
        """Return lanes of two vectors; lanes of the second are numbered after the first's."""
        second = a.like(b) if b is not None else "poison"
        picks = array(len(lanes), "i32", lanes)
        kind = vector(len(lanes), a.element)
        return self.value(
            kind, f"shufflevector {a.typed}, {llvm_type(a.kind)} {second}, <{len(lanes)} x i32> {picks}"
        )

    def call(self, name: str, *given: Any, kind: str = "", flags: str = "") -> Value:
        """Call a function.

        Args:
            name: Without ``@``.
            given: Values, arrays and records, bool for i1 and int for i64.
            kind: The kind of the result; empty for functions without one.
            flags: LLVM's flags of the call, such as ``reassoc``.
        """
        arguments = [_argument(self, argument) for argument in given]
        result = llvm_type(kind) if kind else "void"
        if name.startswith("llvm."):
            self.declared[f"declare {result} @{name}({', '.join(kind for kind, _ in arguments)})"] = None
        typed = ", ".join(f"{kind} {name}" for kind, name in arguments)
        text = f"call {flags + ' ' if flags else ''}{result} @{name}({typed})"
        if kind:
            return self.value(kind, text)
        self.do(text)
        return Value(self, "void", "")

    def intrinsic(self, name: str, kind: str, *given: Any, flags: str = "") -> Value:
        """Call one of LLVM's own functions; its name ends in the kind of the last of the given values."""
        last = [x for x in given if isinstance(x, Value)][-1]
        return self.call(f"llvm.{name}.{suffix(last.kind)}", *given, kind=kind, flags=flags)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Return ``a * b + c``, rounded once."""
        return self.intrinsic("fma", a.kind, a, b, c)

    def fmuladd(self, a: Value, b: Value, c: Value) -> Value:
        """Return ``a * b + c``, rounded once where that is as fast."""
        return self.intrinsic("fmuladd", a.kind, a, b, c)

    def masked_load(self, array: Array, mask: Value, align: int = 1) -> Value:
        """Load a vector; lanes that the mask leaves out are 0, and their memory is not read."""
        kind = vector(mask.lanes, array.kind)
        arguments = array, self.constant("i32", align), mask, self.constant(kind, 0)
        return self.call(f"llvm.masked.load.{suffix(kind)}.p0", *arguments, kind=kind)

    def masked_store(self, array: Array, value: Value, mask: Value, align: int = 1) -> None:
        """Store the lanes of a vector that the mask holds; the memory of the others is not written."""
        name = f"llvm.masked.store.{suffix(value.kind)}.p0"
        self.call(name, value, array, self.constant("i32", align), mask)

    def prefetch(self, address: Array | Record, *, write: bool = False, locality: int = 3) -> None:
        """Bring a line of memory into the cache; ``locality`` is from 0 (used once) to 3 (used often)."""
        self.call("llvm.prefetch.p0", address, *(self.constant("i32", word) for word in (write, locality, 1)))

    @contextmanager
    def range(self, start: Operand, stop: Operand, step: Operand = 1, **carried: Any) -> Iterator[Carried]:
        """Write a loop over the integers from a start to a stop, as Python's ``range`` has them."""
        end = Value(self, "i64", "").like(stop)
        with self.count(start, lambda i: i < end, step, **carried) as loop:
            yield loop

    @contextmanager
    def count(
        self, start: Operand, go: Callable[[Value], Value], step: Operand = 1, **carried: Any
    ) -> Iterator[Carried]:
        """Write ``i = start; while go(i): ...; i += step``.

        After the loop ``i`` is the first index for which ``go`` fails.
        """
        before, head, inside, after = self._block, self._name(), self._name(), self._name()
        index, follow = (Value(self, "i64", f"%{self._name()}") for _ in range(2))
        first = {name: self._state(value) for name, value in carried.items()}
        state = {name: self._again(value) for name, value in first.items()}
        self.do(f"br label %{head}")
        self._begin(head)
        phis = len(self.lines)
        self.do(f"br {go(index).typed}, label %{inside}, label %{after}")
        self._begin(inside)
        self.depth += 1
        loop = Carried(self, self.depth, {name: _copy(value) for name, value in state.items()}, index)
        yield loop
        self.depth -= 1
        self.do(f"{follow} = add nsw i64 {index}, {step}")
        self.do(f"br label %{head}")
        lines = [f"  {index} = phi i64 [{index.like(start)}, %{before}], [{follow}, %{self._block}]"]
        for name, value in state.items():
            for at, old, new in zip(*map(_list, (value, first[name], loop._values[name])), strict=True):
                kind = llvm_type(at.kind)
                lines.append(f"  {at} = phi {kind} [{old}, %{before}], [{new}, %{self._block}]")
        self.lines[phis:phis] = lines
        self._begin(after)
        loop.__dict__.update(_values=state, _depth=-1)

    @contextmanager
    def repeat(self) -> Iterator[Repeat]:
        """Write a block that runs once, and again as long as the test given to `Repeat.again_if` holds."""
        head, after = self._name(), self._name()
        self.do(f"br label %{head}")
        self._begin(head)
        self.depth += 1
        loop = Repeat()
        yield loop
        self.depth -= 1
        if loop.test is None:
            raise TypeError("a repeated block needs its again_if")
        self.do(f"br {loop.test.typed}, label %{head}, label %{after}")
        self._begin(after)

    @contextmanager
    def when(self, test: Value, **carried: Any) -> Iterator[Carried]:
        """Write a block that runs if a test holds; else the carried variables stay as they are."""
        before, inside, after = self._block, self._name(), self._name()
        first = {name: self._state(value) for name, value in carried.items()}
        self.do(f"br {test.typed}, label %{inside}, label %{after}")
        self._begin(inside)
        self.depth += 1
        branch = Carried(self, self.depth, {name: _copy(value) for name, value in first.items()})
        yield branch
        self.depth -= 1
        last = self._block
        self.do(f"br label %{after}")
        self._begin(after)

        def joined(old: Value, new: Value) -> Value:
            return self.value(old.kind, f"phi {llvm_type(old.kind)} [{old}, %{before}], [{new}, %{last}]")

        for name, old in first.items():
            new = branch._values[name]
            many = isinstance(old, list)
            branch._values[name] = [*map(joined, old, new)] if many else joined(old, new)
        branch.__dict__["_depth"] = -1

    def _pair(self, a: Operand, b: Operand) -> tuple[Value, Value]:
        either = a if isinstance(a, Value) else b
        return either.like(a), either.like(b)

    def _state(self, value: Any) -> Any:
        """Return the first value of a carried variable as a Value; numbers become constants."""
        if isinstance(value, list | tuple):
            return [self._state(item) for item in value]
        if isinstance(value, Value):
            return value
        kind = {bool: "i1", int: "i64", float: "float"}[type(value)]
        return self.constant(kind, value)

    def _again(self, value: Any) -> Any:
        """Return a Value, or a list of Values, of the same kind and with a new name."""
        many = isinstance(value, list)
        return [*map(self._again, value)] if many else Value(self, value.kind, f"%{self._name()}")

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _begin(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self._block = label


class Repeat:
    """A block of `Function.repeat`."""

    test: Value | None = None

    def again_if(self, test: Value) -> None:
        """Run the block again if a test, made at its end, holds."""
        self.test = test


def _argument(code: Function, value: Any) -> tuple[str, str]:
    """Return LLVM's type and the name of an argument, as the text of a call needs them."""
    if isinstance(value, Array | Record):
        return "ptr", str(value)
    if not isinstance(value, Value):
        value = code.constant("i1" if isinstance(value, bool) else "i64", value)
    return llvm_type(value.kind), str(value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _copy(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value
