"""What tests of Triton kernels share: CUDA where there is some, otherwise Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ._aot import Compiled, compile_cubin

__all__ = [
    "DEVICE",
    "INTERPRETED",
    "Launches",
    "compiles",
    "interpreted",
    "needs_no_gpu",
    "on_device",
    "poison",
]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses what has to be deterministic

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_no_gpu = pytest.mark.skipif(INTERPRETED, reason="says nothing about the interpreter")


def on_device(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test of kernels, which runs in the interpreter or on a GPU."""
    marked: Callable[..., Any] = test if INTERPRETED else pytest.mark.gpu(test)
    return marked


@pytest.fixture(autouse=True, scope="module")
def poison() -> Iterator[None]:
    """Fresh memory is full of NaN and large integers; kernels run untuned, or tuning would take minutes."""
    torch.use_deterministic_algorithms(True)
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("triton"):
            from triton.runtime.autotuner import Autotuner

            patch.setattr(Autotuner, "run", _run_first)
        yield
    torch.use_deterministic_algorithms(False)


def _run_first(tuner: Any, *arguments: Any, **named: Any) -> Any:
    return tuner.fn.run(*arguments, **named, **tuner.configs[0].all_kwargs())


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
    return compile_cubin(kernel, {**options, **arguments}, capability).cubin[:4] == b"\x7fELF"


class Launches:
    """Stands where a kernel does and notes what it is launched with, so that just that can be compiled."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.seen = kernel, list[dict[str, Any]]()

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            self.seen.append({**dict(zip(self.kernel.arg_names, arguments, strict=False)), **named})

        return launch

    def compiled(self, config: Any, capability: int) -> Compiled:
        """The last launch with a configuration of the tuner's."""
        given = {name: _type(value) for name, value in self.seen[-1].items()}
        constants = {p.name for p in self.kernel.fn.params if p.is_constexpr}
        given |= {name: value for name, value in self.seen[-1].items() if name in constants}
        return compile_cubin(self.kernel, given | config.all_kwargs(), capability)


def _type(value: Any) -> Any:
    """Triton's type of an argument; other options of a launch are themselves."""
    if not isinstance(value, torch.Tensor):
        return "i32" if type(value) is int and value != 1 else value
    name = str(value.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    return "*" + name.replace("uint", "u").replace("int", "i")
