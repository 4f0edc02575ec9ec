"""Compile LLVM IR by llvmlite to functions that are called through ctypes.

numba depends on llvmlite, so the machine needs no compiler. A function is compiled at its first use, which
takes tenths of a second; `_machine_code` keeps the result for later processes. `_typed` writes the IR.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from ._machine_code import keep_code

__all__ = [
    "Target",
    "array",
    "compile_ir",
    "compiled_once",
    "compiling_for",
    "cpu_features",
    "number",
    "splat",
]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """A CPU that code is written and compiled for.

    Attributes:
        features: LLVM's names of the features that the code may use; without any no code is compiled.
        cpu: LLVM's name of the CPU to compile for; None is this CPU, with exactly its features.
    """

    features: frozenset[str]
    cpu: str | None = None


_target: Target | None = None  # another than this CPU, inside of `compiling_for`
_host: frozenset[str] | None = None  # features of this CPU, once they are read


@contextmanager
def compiling_for(target: Target | None) -> Iterator[None]:
    """Within the block, write and compile code for ``target`` instead of this CPU; None means this CPU."""
    global _target
    before, _target = _target, target
    try:
        yield
    finally:
        _target = before


def compiled_once(function: Callable[P, T]) -> Callable[P, T]:
    """Cache the results of a function for each target."""
    results: dict[Any, T] = {}

    @wraps(function)
    def lookup(*args: P.args, **kwargs: P.kwargs) -> T:
        key = (_target, args, *kwargs.items())
        if key not in results:
            results[key] = function(*args, **kwargs)
        return results[key]

    return lookup


def cpu_features() -> frozenset[str]:
    """Return LLVM's names of the CPU's features, such as ``avx512bf16``; none without llvmlite."""
    return _host_features() if _target is None else _target.features


def _host_features() -> frozenset[str]:
    global _host
    if _host is None:  # functools.cache would make torch.compile warn
        _host = _read_host_features()
    return _host


def _read_host_features() -> frozenset[str]:
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
        name: The name of the function.
        arguments: The ctypes types of its arguments.
        cpu: LLVM's name of the CPU to compile for; None is the `Target`, by default this CPU with exactly its
            features.
    """
    import llvmlite.binding as llvm

    cpu = cpu or (_target.cpu if _target is not None else None)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(ir)
    module.verify()
    features = "" if cpu else llvm.get_host_cpu_features().flatten()
    cpu = cpu or llvm.get_host_cpu_name()
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3)
    engine = llvm.create_mcjit_compiler(module, machine)
    keep_code(engine, (ir, machine.triple, cpu, features, llvm.llvm_version_info))
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, *arguments)(engine.get_function_address(name))
    function.engine = engine  # type: ignore[attr-defined]  # keeps the code alive
    return function


def array(lanes: int, kind: str, values: Sequence[float]) -> str:
    """Return the text of a constant vector in LLVM IR; floats are rounded to float32."""
    words = [number(value) if kind == "float" else str(int(value)) for value in values]
    if len(words) != lanes:
        raise ValueError(f"array: {lanes} lanes need as many values, got {len(words)}")
    return "<" + ", ".join(f"{kind} {word}" for word in words) + ">"


def splat(lanes: int, kind: str, value: float) -> str:
    """Return the text of a constant vector in LLVM IR, with ``value`` in every lane."""
    return array(lanes, kind, [value] * lanes)


def number(value: float) -> str:
    """Return the text of a float constant in LLVM IR: the value, rounded to float32, as bits of a double."""
    rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016x}"
