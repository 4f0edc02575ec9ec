"""CPU kernels as LLVM IR: text is built here, compiled in milliseconds by llvmlite, called through ctypes.

numba brings llvmlite, so no compiler is needed on the machine, and nothing is compiled before first use.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

__all__ = ["DOT4", "Code", "array", "compile_ir", "cpu_features", "number", "splat"]

Values = tuple[str, ...]

_INTS = "<16 x i32>"
_DOT4 = "@llvm.x86.avx512.vpdpbusd.512"
DOT4 = f"declare {_INTS} {_DOT4}({_INTS}, {_INTS}, {_INTS})"  # of `Code.dot4` with AVX512-VNNI


@cache
def cpu_features() -> frozenset[str]:
    """LLVM's names of what this CPU has, such as ``avx512bf16`` or ``avx512vnni``; empty without llvmlite."""
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return frozenset()
    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


def compile_ir(
    ir: str, name: str, arguments: Sequence[Any], *, cpu: str | None = None
) -> Callable[..., None]:
    """Compile LLVM IR to machine code; calls release the GIL.

    Args:
        ir: Module text that defines ``name`` as a function without result.
        name: The function to return.
        arguments: Its ctypes argument types.
        cpu: LLVM name of the CPU to compile for; None is this one, with exactly its features.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(ir)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu or llvm.get_host_cpu_name(),
        features="" if cpu else llvm.get_host_cpu_features().flatten(),
        opt=3,
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, *arguments)(engine.get_function_address(name))
    function.engine = engine  # type: ignore[attr-defined]  # the code lives as long as its engine
    return function


class Code:
    """Writes the body of one LLVM function in SSA form: fresh names, loops and branches with phi nodes.

    Attributes:
        lines: The text so far.
    """

    def __init__(self) -> None:
        self.lines = ["entry:"]
        self._block = "entry"
        self._count = 0

    def op(self, text: str) -> str:
        """Append an instruction with a result and return the name of the result."""
        name = self._name()
        self.lines.append(f"  %{name} = {text}")
        return f"%{name}"

    def do(self, text: str) -> None:
        """Append an instruction without a result."""
        self.lines.append(f"  {text}")

    def add(self, a: str | int, b: str | int) -> str:
        """``a + b`` of 64-bit integers."""
        return self.op(f"add nsw i64 {a}, {b}")

    def sub(self, a: str | int, b: str | int) -> str:
        """``a - b`` of 64-bit integers."""
        return self.op(f"sub nsw i64 {a}, {b}")

    def mul(self, a: str | int, b: str | int) -> str:
        """``a * b`` of 64-bit integers."""
        return self.op(f"mul nsw i64 {a}, {b}")

    def minimum(self, a: str | int, b: str | int) -> str:
        """The lower of two signed 64-bit integers."""
        below = self.op(f"icmp slt i64 {a}, {b}")
        return self.op(f"select i1 {below}, i64 {a}, i64 {b}")

    def maximum(self, a: str | int, b: str | int) -> str:
        """The higher of two signed 64-bit integers."""
        above = self.op(f"icmp sgt i64 {a}, {b}")
        return self.op(f"select i1 {above}, i64 {a}, i64 {b}")

    def at(self, pointer: str, offset: str | int) -> str:
        """``pointer`` moved by ``offset`` bytes."""
        return self.op(f"getelementptr i8, ptr {pointer}, i64 {offset}")

    def load(self, kind: str, pointer: str, offset: str | int = 0, align: int = 1) -> str:
        """Load a ``kind`` from ``offset`` bytes after ``pointer``."""
        return self.op(f"load {kind}, ptr {self.at(pointer, offset)}, align {align}")

    def store(self, kind: str, value: str, pointer: str, offset: str | int = 0, align: int = 1) -> None:
        """Store a ``kind`` to ``offset`` bytes after ``pointer``."""
        self.do(f"store {kind} {value}, ptr {self.at(pointer, offset)}, align {align}")

    def broadcast(self, lanes: int, kind: str, value: str) -> str:
        """A vector with ``value`` in every lane."""
        vector = f"<{lanes} x {kind}>"
        one = self.op(f"insertelement {vector} poison, {kind} {value}, i64 0")
        return self.op(f"shufflevector {vector} {one}, {vector} poison, <{lanes} x i32> zeroinitializer")

    def shuffle(self, kind: str, lanes: int, a: str, b: str, order: Sequence[int]) -> str:
        """Lanes ``order`` of the ``2 * lanes`` lanes of two vectors."""
        picks = array(len(order), "i32", order)
        return self.op(
            f"shufflevector <{lanes} x {kind}> {a}, <{lanes} x {kind}> {b}, <{len(order)} x i32> {picks}"
        )

    def dot4(self, total: str, x: str, w: str, vnni: bool = True) -> str:
        """``total`` + the sum of x * w over the 4 bytes of each of 16 lanes, x unsigned and w signed."""
        if vnni:
            return self.op(f"call {_INTS} {_DOT4}({_INTS} {total}, {_INTS} {x}, {_INTS} {w})")
        for shift in (0, 8, 16, 24):
            shifted = self.op(f"lshr {_INTS} {x}, {splat(16, 'i32', shift)}")
            unsigned = self.op(f"and {_INTS} {shifted}, {splat(16, 'i32', 255)}")
            shifted = self.op(f"shl {_INTS} {w}, {splat(16, 'i32', 24 - shift)}")
            signed = self.op(f"ashr {_INTS} {shifted}, {splat(16, 'i32', 24)}")
            total = self.op(f"add {_INTS} {total}, {self.op(f'mul {_INTS} {unsigned}, {signed}')}")
        return total

    def loop(
        self,
        start: str | int,
        stop: str | int,
        step: str | int,
        body: Callable[[str, Values], Values | None],
        state: Values = (),
        kind: str = "",
    ) -> Values:
        """``for i in range(start, stop, step): state = body(i, state)``.

        Args:
            start: First i64 index.
            stop: End of the indices.
            step: Positive distance between them.
            body: Writes the body and returns the new state.
            state: Values of type ``kind`` carried from one round to the next.
            kind: Their LLVM type.

        Returns:
            The last state.
        """
        before, head, inside, after = self._block, self._name(), self._name(), self._name()
        index, follow = f"%{self._name()}", f"%{self._name()}"
        carried = tuple(f"%{self._name()}" for _ in state)
        self.do(f"br label %{head}")
        self._begin(head)
        phis = len(self.lines)
        more = self.op(f"icmp slt i64 {index}, {stop}")
        self.do(f"br i1 {more}, label %{inside}, label %{after}")
        self._begin(inside)
        result = body(index, carried) or ()
        self.do(f"{follow} = add nsw i64 {index}, {step}")
        self.do(f"br label %{head}")
        self.lines[phis:phis] = [
            f"  {index} = phi i64 [{start}, %{before}], [{follow}, %{self._block}]",
            *(
                f"  {name} = phi {kind} [{first}, %{before}], [{new}, %{self._block}]"
                for name, first, new in zip(carried, state, result, strict=True)
            ),
        ]
        self._begin(after)
        return carried

    def when(
        self, condition: str, body: Callable[[], Values | None], state: Values = (), kind: str = ""
    ) -> Values:
        """``if condition: state = body()``; returns the state of type ``kind`` after it."""
        before, inside, after = self._block, self._name(), self._name()
        self.do(f"br i1 {condition}, label %{inside}, label %{after}")
        self._begin(inside)
        result = body() or ()
        last = self._block
        self.do(f"br label %{after}")
        self._begin(after)
        return tuple(
            self.op(f"phi {kind} [{old}, %{before}], [{new}, %{last}]")
            for old, new in zip(state, result, strict=True)
        )

    def function(self, head: str) -> str:
        """The whole function, ``head`` being everything before its body."""
        return "\n".join([head + " {", *self.lines, "  ret void", "}"])

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _begin(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self._block = label


def array(lanes: int, kind: str, values: Sequence[float]) -> str:
    """A constant vector; floats are rounded to float32."""
    words = [number(value) if kind == "float" else str(int(value)) for value in values]
    if len(words) != lanes:
        raise ValueError(f"array: {lanes} lanes need as many values, got {len(words)}")
    return "<" + ", ".join(f"{kind} {word}" for word in words) + ">"


def splat(lanes: int, kind: str, value: float) -> str:
    """A constant vector with ``value`` in every lane."""
    return array(lanes, kind, [value] * lanes)


def number(value: float) -> str:
    """A constant, rounded to float32 and written as LLVM wants it: the bits of a double."""
    rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016x}"
