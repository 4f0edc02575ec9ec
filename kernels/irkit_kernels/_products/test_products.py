"""Gradients of selected products equal those of autograd, on the CPU and in Triton's interpreter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from irkit_kernels import _products
from irkit_kernels._jit import Target, compiling_for, cpu_features
from irkit_kernels._testing import DEVICE, Launches, compiles, needs_no_gpu, on_device, poison
from irkit_kernels._threads import forced_threads

_poison = poison  # a fixture of this module


@st.composite
def problems(draw, dtypes=(torch.float32, torch.float16)):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    entries, d = draw(st.integers(0, 60)), draw(st.sampled_from([1, 3, 16, 31, 64, 130]))
    tables = [
        torch.randint(-3, 4, (n, d), generator=generator).to(draw(st.sampled_from(dtypes))) for n in sizes
    ]
    rows = [
        torch.randint(low, n, (entries,), generator=generator).int()
        for low, n in zip((0, -1), sizes, strict=True)
    ]
    return *tables, *rows, torch.randint(-3, 4, (entries,), generator=generator).float()


def expected(left, right, left_rows, right_rows, grads):
    valid = right_rows >= 0
    tables = [x.double().requires_grad_() for x in (left, right)]
    products = (tables[0][left_rows[valid].long()] * tables[1][right_rows[valid].long()]).sum(1)
    gradients = torch.autograd.grad((products * grads[valid].double()).sum(), tables)
    return [x.to(table.dtype) for x, table in zip(gradients, (left, right), strict=True)]


@needs_no_gpu
@pytest.mark.parametrize("features", [None, {"avx2", "fma"}, {"sse2"}, set()])
@settings(deadline=None, max_examples=30)
@given(problem=problems(dtypes=(torch.float32, torch.float16, torch.bfloat16)))
def test_whole_numbers_are_exact(features, problem):
    usable = features is not None and cpu_features() >= features
    with compiling_for(Target(frozenset(features)) if usable else None):
        got = _products.product_gradients(*problem)
    for ours, theirs in zip(got, expected(*problem), strict=True):
        assert torch.equal(ours, theirs)


@needs_no_gpu
def test_threads_change_nothing():
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(n, 77, generator=generator) for n in (30, 50)]
    rows = [torch.randint(n, (999,), generator=generator).int() for n in (30, 50)]
    arguments = (*tables, *rows, torch.randn(999, generator=generator))
    first = _products.product_gradients(*arguments)
    with forced_threads(4), ThreadPoolExecutor(3) as pool:
        for again in pool.map(lambda _: _products.product_gradients(*arguments), range(6)):
            assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))


@on_device
@settings(deadline=None, max_examples=20)
@given(problems())
def test_kernel(problem):
    from irkit_kernels._products.triton_kernel import product_gradients

    got = product_gradients(*(x.to(DEVICE) for x in problem))
    for ours, theirs in zip(got, expected(*problem), strict=True):
        assert torch.equal(ours.cpu(), theirs)


@st.composite
def grids(draw):
    """Draw two tables, the rows of the right table that each row of the grid may use, and products."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    lengths = draw(st.lists(st.integers(0, 7), max_size=6))
    width, d = draw(st.integers(0, 40)), draw(st.sampled_from([1, 3, 16, 31, 64, 130]))
    offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]).int()
    left, right = (
        torch.randint(-3, 4, (n, d), generator=generator).to(
            draw(st.sampled_from([torch.float32, torch.float16]))
        )
        for n in (width, sum(lengths))
    )
    rows = [
        torch.randint(start, start + n, (width,), generator=generator) if n else torch.full((width,), -1)
        for start, n in zip(offsets.tolist(), lengths, strict=False)
    ]
    columns = torch.stack(rows).int() if rows else torch.empty(0, width, dtype=torch.int32)
    columns[torch.rand(columns.shape, generator=generator) < draw(st.sampled_from([0, 0.5, 1]))] = -1
    return left, right, offsets, columns, torch.randint(-3, 4, columns.shape, generator=generator).float()


@on_device
@settings(deadline=None, max_examples=10)
@given(grids())
def test_kernel_of_grids(grid):
    from irkit_kernels._products.triton_kernel import grid_gradients

    left, right, _, columns, grads = grid
    left_rows = torch.arange(len(left)).repeat(len(columns))
    true_gradients = expected(left, right, left_rows, columns.view(-1), grads.view(-1))
    got = grid_gradients(*(x.to(DEVICE) for x in grid))
    for ours, theirs in zip(got, true_gradients, strict=True):
        assert torch.equal(ours.cpu(), theirs)


@needs_no_gpu
def test_no_sort_of_a_grid_is_larger_than_torch_sorts(monkeypatch):
    """The grid of this test has more than the 2^31 - 1 numbers that CUDA sorts; it is on the meta device."""
    triton_kernel = pytest.importorskip("irkit_kernels._products.triton_kernel", reason="needs triton")
    seen = []

    class Sorts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.sort.stable:
                seen.append(args[0].shape[(kwargs or {}).get("dim", -1)])
            return out

    launches = Launches(triton_kernel.gather_sum)
    monkeypatch.setattr(triton_kernel, "gather_sum", launches)
    n, width, length, d = 2**17, 2**15, 4, 8
    shapes = (width, d), (n * length, d), (n + 1,), (n, width), (n, width)
    kinds = torch.float32, torch.float32, torch.int32, torch.int32, torch.float32
    tensors = [
        torch.empty(*shape, dtype=kind, device="meta") for shape, kind in zip(shapes, kinds, strict=True)
    ]
    with Sorts():
        gradients = triton_kernel.grid_gradients(*tensors)
    assert [x.shape for x in gradients] == [x.shape for x in tensors[:2]]
    assert seen == [width]  # and one sort only
    assert [launch["KIND"] for launch in launches.recorded] == [1, 2]


@needs_no_gpu
@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_compiles_for_gpus(capability, dtype, kind):
    triton_kernel = pytest.importorskip("irkit_kernels._products.triton_kernel", reason="needs triton")
    arguments = dict.fromkeys(("out", "table"), f"*{dtype}") | dict.fromkeys(("order", "ranges"), "*i64")
    arguments |= {"indices": "*i32", "weights": "*fp32", "D": 96, "BLOCK_E": 16, "BLOCK_K": 128}
    arguments |= {"count": "i32", "width": "i32", "KIND": kind}
    assert compiles(triton_kernel.gather_sum, arguments, capability)
