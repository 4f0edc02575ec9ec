"""Helpers for the tests of kernels: guarded memory, forked children, and Triton on CUDA or interpreted."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import mmap
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ._aot import Compiled, compile_cubin
from ._jit import Target, compiling_for, cpu_features

__all__ = [
    "BYTE_CODE",
    "DEVICE",
    "INTERPRETED",
    "OLD",
    "TRITON_DTYPES",
    "Launches",
    "byte_code",
    "compiles",
    "guarded",
    "guarded_memory",
    "in_child",
    "interpreted",
    "needs_no_gpu",
    "needs_x86",
    "on_device",
    "poison",
]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this setting

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TRITON_DTYPES = [torch.float32, torch.float16]
TRITON_DTYPES += [] if INTERPRETED else [torch.bfloat16]  # the interpreter treats bfloat16 as integers
_PAGE = mmap.PAGESIZE
_GUARD = 256 * _PAGE  # a wrong index may miss an array by many pages
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtypes that numpy has, too
OLD = Target(frozenset({"sse2", "ssse3"}), "x86-64-v2")  # before AVX and F16C
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for a CPU of this kind")
needs_no_gpu = pytest.mark.skipif(INTERPRETED, reason="says nothing about the interpreter")


BYTE_CODE = {  # how bytes are multiplied and looked up, by the features that are left out
    "vnni": set[str](),
    "no permutes": {"avx512vbmi"},
    "no vnni": {"avx512vbmi", "avx512vnni"},
    "portable": {"avx512vbmi", "avx512vnni", "avxvnni", "avx2"},
}


@contextlib.contextmanager
def byte_code(name: str) -> Iterator[str]:
    """Compile as a way of `BYTE_CODE` says, or skip the test on a CPU without AVX512-VNNI that it needs."""
    lacking = BYTE_CODE[name]
    if "avx512vnni" not in lacking and not {"avx512vnni", "avx512bw"} <= cpu_features():
        pytest.skip("this CPU lacks AVX512-VNNI")
    with compiling_for(Target(cpu_features() - lacking)):
        yield name


def on_device(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test that launches Triton kernels: it runs in the interpreter, or else needs a GPU."""
    marked: Callable[..., Any] = test if INTERPRETED else pytest.mark.gpu(test)
    return marked


@pytest.fixture(autouse=True, scope="module")
def poison() -> Iterator[None]:
    """Fill fresh memory with NaN and large integers, and skip the tuning of kernels, which takes minutes."""
    torch.use_deterministic_algorithms(True)
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("triton"):
            from triton.runtime.autotuner import Autotuner

            patch.setattr(Autotuner, "run", _run_first)
        yield
    torch.use_deterministic_algorithms(False)


def _run_first(tuner: Any, *arguments: Any, **named: Any) -> Any:
    return tuner.fn.run(*arguments, **named, **tuner.configs[0].all_kwargs())


def interpreted(files: Sequence[str]) -> dict[str, int]:
    """Run test files in one process with Triton's interpreter and assert that no test fails.

    Returns:
        The number of tests that passed in each file.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:]
    passed = re.findall(r"(\w+\.py)::\S+.* PASSED", result.stdout)
    return {Path(file).name: passed.count(Path(file).name) for file in files}


def compiles(kernel: Any, arguments: Mapping[str, Any], capability: int) -> bool:
    """Return whether Triton compiles a kernel, with 4 warps; for the arguments see `compile_cubin`."""
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return compile_cubin(kernel, {**options, **arguments}, capability).cubin[:4] == b"\x7fELF"


class Launches:
    """Replaces a kernel and records the arguments of its launches, so that exactly those can be compiled."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.recorded = kernel, list[dict[str, Any]]()

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            self.recorded.append({**dict(zip(self.kernel.arg_names, arguments, strict=False)), **named})

        return launch

    def compiled(self, config: Any, capability: int) -> Compiled:
        """Compile the last launch with one of the tuner's configurations, or None for a kernel without."""
        launch, tuned = self.recorded[-1], config is not None
        types = {p.name for p in (self.kernel.fn if tuned else self.kernel).params if not p.is_constexpr}
        arguments = {name: _type(value) if name in types else value for name, value in launch.items()}
        return compile_cubin(self.kernel, arguments | (config.all_kwargs() if tuned else {}), capability)


def _type(value: Any) -> Any:
    """Return Triton's type of an argument."""
    if not isinstance(value, torch.Tensor):
        return "i32" if type(value) is int and value != 1 else value
    name = str(value.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    return "*" + name.replace("uint", "u").replace("int", "i")


def guarded(array: Any, before: bool = False) -> Any:
    """Copy an array to the border of pages without access: a read or write beyond its end crashes.

    Args:
        array: A numpy array or a torch tensor.
        before: Put the pages without access before the copy instead of after it.
    """
    if isinstance(array, torch.Tensor):
        words = array.detach().contiguous().view(_WORDS[array.element_size()]).numpy()
        return torch.from_numpy(guarded(words, before)).view(array.dtype)
    copy = _guarded_zeros(array.shape, array.dtype, before)
    copy[...] = array
    return copy


@contextlib.contextmanager
def guarded_memory(before: bool = False) -> Iterator[None]:
    """Guard also the arrays made by numpy.empty, numpy.zeros, torch.empty and Tensor.new_empty."""

    def array(shape: Any, dtype: Any = float) -> Any:
        return _guarded_zeros(shape if isinstance(shape, tuple) else (shape,), np.dtype(dtype), before)

    def tensor(*shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        sizes = torch.Size(shape if not shape or isinstance(shape[0], int) else shape[0])
        words = _WORDS[dtype.itemsize]
        zeros = array(tuple(sizes), torch.empty_like(torch.zeros(0), dtype=words).numpy().dtype)
        return torch.from_numpy(zeros).view(dtype)

    def like(self: torch.Tensor, *shape: Any, dtype: torch.dtype | None = None, device: Any = None) -> Any:
        return tensor(*shape, dtype=dtype or self.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "empty", array)
        patch.setattr(np, "zeros", array)
        patch.setattr(torch, "empty", tensor)
        patch.setattr(torch.Tensor, "new_empty", like)
        yield


def _guarded_zeros(shape: tuple[int, ...], dtype: Any, before: bool) -> Any:
    """Return an array of zeros at the border of pages without access."""
    size = math.prod(shape) * dtype.itemsize
    inside = -(-size // _PAGE) * _PAGE
    pages = mmap.mmap(-1, inside + 2 * _GUARD)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for guard in (start, start + _GUARD + inside):  # 0: PROT_NONE
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(guard), _GUARD, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = _GUARD if before else _GUARD + inside - size
    return np.frombuffer(pages, np.uint8, size, offset).view(dtype).reshape(shape)


def in_child(run: Callable[[], object]) -> None:
    """Call ``run()`` in a forked child, so that a crash fails the test with the position of the crash."""
    with tempfile.TemporaryFile() as errors:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about forks while threads run; the child uses no threads
            child = os.fork()
        if not child:
            status = 1
            try:
                torch.set_num_threads(1)
                faulthandler.enable(errors)
                run()
                status = 0
            except BaseException:
                os.write(errors.fileno(), traceback.format_exc().encode())
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        reason = signal.Signals(-status).name if status < 0 else f"exit {status}"
        assert not status, f"{reason}\n{errors.read().decode()}"
