"""Compile Triton kernels ahead of time for GPUs that this machine lacks.

Tests use it to check that the code compiles and that its shared memory and registers fit the GPU.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Compiled", "compile_cubin"]


class Compiled(NamedTuple):
    """Machine code of a kernel and its use of resources.

    Attributes:
        cubin: An ELF file.
        shared: Bytes of shared memory per program.
        stack: Bytes of local memory per thread: values that do not fit the registers (spills).
        ptx: The code before NVIDIA's assembler, in text.
    """

    cubin: bytes
    shared: int
    stack: int
    ptx: str


def compile_cubin(kernel: Any, arguments: Mapping[str, Any], capability: int) -> Compiled:
    """Compile a Triton kernel for an NVIDIA GPU; needs no GPU.

    Args:
        kernel: A function decorated with ``triton.jit``, and possibly with ``triton.autotune``.
        arguments: By name either Triton's type, such as ``"*fp32"`` or ``"i32"``, or the value of a
            ``constexpr``. The value 1 is passed as it is, because Triton specialises on it. Names that are
            not parameters of the kernel, such as ``num_warps``, are options of the compiler. Pointers are
            assumed to be aligned to 16 bytes, as the data of tensors is.
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
        (position,): [["tt.divisibility", 16]]
        for position, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(ASTSource(kernel, signature, values, aligned), target=target, options=options)
    cubin: bytes = compiled.asm["cubin"]
    stack = _stack(cubin, Path(triton.__file__).parent)
    return Compiled(cubin, compiled.metadata.shared, stack, compiled.asm["ptx"])


def _stack(cubin: bytes, triton: Path) -> int:
    """Read the size of the stack from NVIDIA's disassembler, which Triton's package contains."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = triton / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [tool, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(report.rpartition("STACK:")[2].split()[0])
