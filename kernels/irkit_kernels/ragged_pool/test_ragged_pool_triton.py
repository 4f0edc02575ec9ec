"""The Triton kernel agrees with the definition, on CUDA, or interpreted with TRITON_INTERPRET=1."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from irkit_kernels._testing import (
    DEVICE,
    INTERPRETED,
    TRITON_DTYPES,
    compiles,
    needs_no_gpu,
    on_device,
    poison,
)
from irkit_kernels.ragged_pool import pooled_lengths, ragged_pool
from irkit_kernels.ragged_pool.reference import pool_backward, pool_forward

DTYPES = [*TRITON_DTYPES, torch.float64]
WINDOWS = [(2, 2), (3, 2), (5, 3), (4, 1), (1, 1), (9, 9), (64, 64), (8, 6)]
# the division of the published kernel's gradient, which misses windows that start at the token
OFF_BY_ONE = ("window = local // STRIDE - j", "window = (local - (STRIDE - 1)) // STRIDE - j")
pytest.importorskip("triton")
_poison = poison  # a fixture of this module


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def triton_module() -> ModuleType:
    from irkit_kernels.ragged_pool import triton_kernel

    return triton_kernel


def pooled(module: ModuleType, x: Tensor, lengths: list[int], window: tuple[int, int], transposed: bool):
    """Return the kernel's result for tokens or, transposed, for gradients of windows."""
    windows = pooled_lengths(torch.tensor(lengths, dtype=torch.int64), *window).tolist()
    rows = sum(lengths if transposed else windows)
    ends = (offsets_of(part).to(DEVICE) for part in (lengths, windows))
    return module.pool(x.to(DEVICE), *ends, *window, rows, transposed).cpu()


@st.composite
def problems(draw):
    length = st.one_of(st.integers(0, 20), st.sampled_from([0, 1, 33, 66]))
    lengths = draw(st.lists(length, max_size=4 if INTERPRETED else 300))
    d = draw(st.sampled_from([1, 3, 16, 31, 64, 130, 300]))
    return lengths, draw(st.sampled_from(WINDOWS)), d, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))


@on_device
@settings(deadline=None, max_examples=10 if INTERPRETED else 30)
@given(problems())
def test_values_and_gradients_are_the_definition(problem):
    lengths, window, d, dtype, seed = problem
    generator, offsets, module = torch.Generator().manual_seed(seed), offsets_of(lengths), triton_module()
    values = torch.randn(sum(lengths), d, generator=generator).to(dtype)
    expected = pool_forward(values, offsets, *window)
    torch.testing.assert_close(pooled(module, values, lengths, window, False), expected)
    grad = torch.randn(expected.shape, generator=generator).to(dtype)  # random in every axis
    expected = pool_backward(grad, offsets, *window)
    torch.testing.assert_close(pooled(module, grad, lengths, window, True), expected)


@on_device
@pytest.mark.parametrize("window", [(2, 2), (3, 2), (8, 6)], ids=str)
def test_an_index_off_by_one_is_seen(window, tmp_path, monkeypatch):
    """The published kernel adds a window's gradient to the wrong tokens for strides above 1.

    Its own test cannot detect this, because its upstream gradient is the same for all windows.
    """
    right = triton_module()
    source = Path(str(right.__file__)).read_text()
    assert source.count(OFF_BY_ONE[0]) == 1
    (tmp_path / "mutated.py").write_text(source.replace(*OFF_BY_ONE))
    name = "irkit_kernels.ragged_pool.mutated"
    spec = importlib.util.spec_from_file_location(name, tmp_path / "mutated.py")
    wrong = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrong)
    lengths = [20, 1, 13]
    windows = pooled_lengths(torch.tensor(lengths), *window)
    grad = torch.randn(int(windows.sum()), 5, generator=torch.Generator().manual_seed(0))
    expected = pool_backward(grad, offsets_of(lengths), *window)
    torch.testing.assert_close(pooled(right, grad, lengths, window, True), expected)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(pooled(wrong, grad, lengths, window, True), expected)


@on_device
@pytest.mark.parametrize("block", [(4, 16), (16, 64), (64, 32)], ids=str)
def test_blocks_cover_everything(block, monkeypatch):
    module, lengths = triton_module(), [4, 1, 0, 19, 6, 0]
    monkeypatch.setattr(
        module.fill, "configs", [module.triton.Config(dict(zip(("BLOCK_R", "BLOCK_D"), block, strict=True)))]
    )
    monkeypatch.setattr(module.fill, "cache", {})
    values = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    offsets = offsets_of(lengths)
    expected = pool_forward(values, offsets, 3, 2)
    torch.testing.assert_close(pooled(module, values, lengths, (3, 2), False), expected)
    torch.testing.assert_close(
        pooled(module, expected, lengths, (3, 2), True), pool_backward(expected, offsets, 3, 2)
    )


@on_device
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens(lengths):
    got = [pooled(triton_module(), torch.empty(0, 5), lengths, (2, 2), way) for way in (False, True)]
    assert all(x.shape == (0, 5) for x in got)


@needs_no_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_error_is_at_most_twice_that_of_torch(dtype, window):
    generator = torch.Generator().manual_seed(1)
    lengths = [200, 1, 333, 64]
    values = torch.randn(sum(lengths), 96, generator=generator).to("cuda", dtype).requires_grad_()
    true = values.detach().double().requires_grad_()

    def plain(x: Tensor) -> Tensor:
        counts = pooled_lengths(torch.tensor(lengths), *window).tolist()
        rows = zip(x.split(lengths), counts, strict=True)
        return torch.stack([r[i * window[1] :][: window[0]].mean(0) for r, n in rows for i in range(n)])

    exact, naive, got = plain(true), plain(values), ragged_pool(values, offsets_of(lengths).cuda(), *window)
    grad = torch.randn(exact.shape, generator=generator).to("cuda", dtype)
    results = [[y, *torch.autograd.grad(y, x, grad.to(y.dtype))] for y, x in ((exact, true), (got, values))]
    results.append([naive, *torch.autograd.grad(naive, values, grad)])
    for truth, mine, theirs in zip(*results, strict=True):
        errors = [(x.double() - truth).square().mean().sqrt() for x in (mine, theirs)]
        assert errors[0] <= 2 * errors[1] + 1e-15  # float64 may be exact there


@needs_no_gpu
@pytest.mark.gpu
def test_compiled_on_cuda_without_waiting():
    lengths, windows = [5, 0, 9], [2, 0, 4]
    values = torch.randn(14, 32, device="cuda", requires_grad=True)
    ends = [offsets_of(part).cuda() for part in (lengths, windows)]

    def loss(values, offsets, pooled_offsets, total):
        return ragged_pool(values, offsets, 3, 2, pooled_offsets=pooled_offsets, total=total).square().sum()

    expected = pool_forward(values.detach().cpu(), ends[0].cpu(), 3, 2).square().sum()
    for function in (loss, torch.compile(loss, fullgraph=True, dynamic=True)):
        function(values, *ends, 6).backward()  # compiled
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = function(values, *ends, 6)
            got.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(got.cpu(), expected)


@needs_no_gpu
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("transposed", [False, True])
def test_compiles_for_gpus(capability, dtype, transposed):
    arguments = {"values": f"*{dtype}", "out": f"*{dtype}", "offsets": "*i32", "pooled": "*i32"}
    arguments |= {
        "rows": "i32",
        "n": "i32",
        "steps": "i32",
        "size": "i32",
        "D": 768,
        "KERNEL": 3,
        "STRIDE": 2,
    }
    arguments |= {"SUMMANDS": 2 if transposed else 3, "TRANSPOSED": transposed, "BLOCK_R": 16, "BLOCK_D": 256}
    assert compiles(triton_module().fill, arguments, capability)
