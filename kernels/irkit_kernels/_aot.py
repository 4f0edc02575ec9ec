"""Compiles Triton kernels for GPUs that need not be there: a test that the code compiles at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["compile_cubin"]


def compile_cubin(kernel: Any, arguments: Mapping[str, Any], capability: int) -> bytes:
    """Machine code of a Triton kernel for NVIDIA GPUs; needs no GPU.

    Args:
        kernel: A function under ``triton.jit``, or that under ``triton.autotune``.
        arguments: By name Triton's type, such as ``"*fp32"`` or ``"i32"``, or the value of a ``constexpr``;
            what the kernel does not know, such as ``num_warps``, are options of the compiler.
        capability: Compute capability without its dot: 80 (A100), 90 (H100, H200).
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    while not isinstance(kernel, triton.JITFunction):
        kernel = kernel.fn
    options = {name: value for name, value in arguments.items() if name not in kernel.arg_names}
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    signature = {name: "constexpr" if name in constants else arguments[name] for name in kernel.arg_names}
    values = {name: arguments[name] for name in kernel.arg_names if name in constants}
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(ASTSource(kernel, signature, values), target=target, options=options)
    cubin: bytes = compiled.asm["cubin"]
    return cubin
