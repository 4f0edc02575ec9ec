"""Compiles Triton kernels for GPUs that need not be there: a test that the code compiles, and fits them."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Compiled", "compile_cubin"]


class Compiled(NamedTuple):
    """Machine code.

    Attributes:
        cubin: An ELF file.
        shared: Bytes of shared memory that a program takes.
        stack: Bytes a thread keeps in memory because registers do not hold them.
    """

    cubin: bytes
    shared: int
    stack: int


def compile_cubin(kernel: Any, arguments: Mapping[str, Any], capability: int) -> Compiled:
    """Machine code of a Triton kernel for NVIDIA GPUs; needs no GPU.

    Args:
        kernel: A function under ``triton.jit``, or that under ``triton.autotune``.
        arguments: By name Triton's type, such as ``"*fp32"`` or ``"i32"``, or the value of a ``constexpr``,
            or 1, which Triton takes for a constant; what the kernel does not know, such as ``num_warps``, are
            options of the compiler. Pointers are taken to be aligned, as those of tensors are.
        capability: Compute capability without its dot: 80 (A100), 90 (H100, H200).
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    while not isinstance(kernel, triton.JITFunction):
        kernel = kernel.fn
    options = {name: value for name, value in arguments.items() if name not in kernel.arg_names}
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    constants |= {name for name in kernel.arg_names if arguments[name] == 1}
    signature = {name: "constexpr" if name in constants else arguments[name] for name in kernel.arg_names}
    values = {name: arguments[name] for name in kernel.arg_names if name in constants}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(ASTSource(kernel, signature, values, aligned), target=target, options=options)
    cubin: bytes = compiled.asm["cubin"]
    return Compiled(cubin, compiled.metadata.shared, _stack(cubin, Path(triton.__file__).parent))


def _stack(cubin: bytes, triton: Path) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = triton / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [tool, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(report.rpartition("STACK:")[2].split()[0])
