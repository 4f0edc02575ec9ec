"""What tests of Triton kernels share: CUDA where there is some, otherwise Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from ._aot import compile_cubin

__all__ = ["DEVICE", "INTERPRETED", "compiles", "interpreted", "needs_no_gpu", "on_device", "poison"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_no_gpu = pytest.mark.skipif(INTERPRETED, reason="says nothing about the interpreter")


def on_device(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test of kernels, which runs in the interpreter or on a GPU."""
    marked: Callable[..., Any] = test if INTERPRETED else pytest.mark.gpu(test)
    return marked


@pytest.fixture(autouse=True, scope="module")
def poison() -> Iterator[None]:
    """Fresh memory is full of NaN and large integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def interpreted(file: str) -> int:
    """Number of tests of a file that pass in the interpreter; the tests fail where one does."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        file,
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:]
    return int(re.findall(r"(\d+) passed", result.stdout)[-1])


def compiles(kernel: Any, arguments: Mapping[str, Any], capability: int) -> bool:
    """Whether Triton makes machine code of a kernel, with 4 warps; arguments as for `compile_cubin`."""
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return compile_cubin(kernel, {**options, **arguments}, capability)[:4] == b"\x7fELF"
