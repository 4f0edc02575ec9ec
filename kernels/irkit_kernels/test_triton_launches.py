"""Every configuration of the tuner, launched for common shapes, fits the GPU and gives the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from irkit_kernels._testing import INTERPRETED, Launches, poison

pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("says nothing about the interpreter", allow_module_level=True)
_poison = poison  # a fixture of this module

LARGEST = {80: 163 << 10, 90: 227 << 10}  # shared memory of a program on A100 and H100
STACK = 1024  # bytes of spilled values per thread: as many as its registers hold


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def ends(*lengths: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=dtype)


def maxsim(dtype: torch.dtype, d: int, query: int, count: int = 2) -> tuple[str, str, tuple[Any, ...]]:
    from irkit_kernels.maxsim import quantize_rows
    from irkit_kernels.maxsim.reference import Tokens

    sides = []
    for lengths in ([query] * count, (90, 40, 131)):
        values = randn(sum(lengths), d, dtype=torch.float32)
        rows, scales = quantize_rows(values) if dtype == torch.int8 else (values.to(dtype), None)
        sides.append(Tokens(rows, ends(*lengths), scales))
    return "maxsim", "score", (*sides, None, dtype != torch.int8)


def residual(nbits: int, dtype: torch.dtype, query: int) -> tuple[str, str, tuple[Any, ...]]:
    generator, d, n = np.random.default_rng(0), 128, 261
    codes = torch.from_numpy(generator.integers(0, 64, n).astype(np.uint16))
    coefficients = torch.from_numpy(generator.random((n, 2)).astype(np.float16))
    packed = torch.from_numpy(generator.integers(0, 256, (n, d * nbits // 8)).astype(np.uint8))
    codebook = (torch.arange(256) - 128).to(torch.int8).view(-1, 2**nbits)
    queries, table = randn(2 * query, d, dtype=dtype), randn(64, 2 * query, dtype=dtype)
    pairs = torch.cartesian_prod(torch.arange(2), torch.arange(3))
    documents = ends(90, 40, 131, dtype=torch.int64)
    if not nbits:
        return "residual_maxsim", "score", (table, ends(query, query), codes, documents, pairs)
    tokens = codes, coefficients, packed
    parts = (queries, table, ends(query, query), tokens, documents, codebook, pairs)
    return "residual_maxsim", "score", parts


def splade(dtype: torch.dtype, pooling: str, with_argmax: bool) -> tuple[str, str, tuple[Any, ...]]:
    hidden, weight, bias = (randn(*shape, dtype=dtype) for shape in ((410, 768), (700, 768), (700,)))
    return (
        "splade_pool",
        "pool",
        (hidden, ends(200, 7, 203), weight, bias, "log1p_relu", pooling, with_argmax),
    )


def pool(dtype: torch.dtype, transposed: bool) -> tuple[str, str, tuple[Any, ...]]:
    values, rows = randn(25 if transposed else 50, 768, dtype=dtype), 50 if transposed else 25
    return "ragged_pool", "fill", (values, ends(33, 0, 17), ends(17, 0, 8), 3, 2, rows, transposed)


HALF, FULL = torch.bfloat16, torch.float32
CASES: dict[str, Callable[[], tuple[str, str, tuple[Any, ...]]]] = {
    "maxsim": lambda: maxsim(HALF, 128, 32),
    "maxsim of many queries": lambda: maxsim(HALF, 128, 32, 8),
    "maxsim int8 of many queries": lambda: maxsim(torch.int8, 128, 32, 8),
    "maxsim float32": lambda: maxsim(FULL, 128, 64),
    "maxsim wide": lambda: maxsim(HALF, 768, 64),
    "maxsim int8": lambda: maxsim(torch.int8, 128, 32),
    "centroids": lambda: residual(0, FULL, 32),
    "residuals": lambda: residual(4, FULL, 32),
    "residuals of long queries": lambda: residual(4, FULL, 64),
    "residuals in 1 bit": lambda: residual(1, FULL, 32),
    "splade": lambda: splade(HALF, "max", False),
    "splade training": lambda: splade(HALF, "max", True),
    "splade float32": lambda: splade(FULL, "max", True),
    "splade sums": lambda: splade(FULL, "sum", False),
    "pool": lambda: pool(HALF, False),
    "pool gradient": lambda: pool(HALF, True),
}
FUNCTIONS = {"maxsim": "forward", "splade_pool": "forward", "ragged_pool": "pool"}


def function(module: Any, name: str, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    tables = {5: "interaction", 7: "residual_maxsim"}
    launcher: Callable[..., Any] = getattr(module, FUNCTIONS.get(name) or tables[len(arguments)])
    return launcher


def kernel_of(name: str) -> Any:
    from importlib import import_module

    return import_module(f"irkit_kernels.{name}.triton_kernel")


@pytest.mark.slow
@pytest.mark.parametrize("capability", LARGEST)
@pytest.mark.parametrize("case", CASES)
def test_every_configuration_fits_the_gpu(case, capability, monkeypatch):
    check_sizes(case, capability, slice(None), monkeypatch)


@pytest.mark.parametrize(
    "case", [case for case in CASES if any(word in case for word in ("float32", "long", "many"))]
)
def test_the_largest_blocks_fit_the_gpu(case, monkeypatch):
    check_sizes(case, 90, slice(-1, None), monkeypatch)


@pytest.mark.parametrize("dtype", [HALF, torch.float16, FULL])
@pytest.mark.parametrize("capability", LARGEST)
def test_gradients_of_maxsim_fit_the_gpu(capability, dtype, monkeypatch):
    from irkit_kernels.maxsim import triton_gradients as module

    _, _, (queries, documents, _, _) = maxsim(dtype, 128, 32)
    kernels = [Launches(getattr(module, name)) for name in ("query_gradients", "document_gradients")]
    for kernel in kernels:
        monkeypatch.setattr(module, kernel.kernel.__name__, kernel)
    module.backward(torch.zeros(2, 3), queries, documents, torch.zeros(3, 64, dtype=torch.int32))
    for kernel in kernels:
        assert len(kernel.recorded) == 1
        compiled = kernel.compiled(None, capability)
        assert compiled.shared <= LARGEST[capability]
        assert compiled.stack == 0  # no spills
    if capability == 90 and dtype != FULL:
        assert "wgmma" in compiled.ptx


def check_sizes(case: str, capability: int, which: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    name, attribute, arguments = CASES[case]()
    module = kernel_of(name)
    launches = Launches(getattr(module, attribute))
    monkeypatch.setattr(module, attribute, launches)
    function(module, name, arguments)(*arguments)
    for config in launches.kernel.configs[which]:
        compiled = launches.compiled(config, capability)
        assert compiled.shared <= LARGEST[capability], config
        assert compiled.stack <= (0 if "many" in case else STACK), config
        if "many" in case and capability == 90 and config.num_warps >= 4:
            assert "wgmma" in compiled.ptx, config  # the faster products of Hopper


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_every_configuration_gives_the_same(case, monkeypatch):
    name, attribute, arguments = CASES[case]()
    module = kernel_of(name)
    kernel, run = getattr(module, attribute), function(module, name, arguments)
    on_cuda = torch.utils._pytree.tree_map(lambda x: x.cuda() if isinstance(x, Tensor) else x, arguments)
    results = []
    for config in kernel.configs:
        monkeypatch.setattr(kernel, "configs", [config])
        results.append(torch.utils._pytree.tree_leaves(run(*on_cuda)))
        for got, first in zip(results[-1], results[0], strict=True):
            torch.testing.assert_close(got, first, msg=lambda text, config=config: f"{config}: {text}")
