"""The Triton kernel agrees with the definition, on CUDA, or interpreted with TRITON_INTERPRET=1."""

from __future__ import annotations

import math

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
from irkit_kernels.splade_pool import ACTIVATIONS, POOLINGS, splade_pool, splade_pool_sparse
from irkit_kernels.splade_pool.reference import pool_forward

pytest.importorskip("triton")
_poison = poison  # a fixture of this module


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


@st.composite
def problems(draw):
    length = st.one_of(st.integers(0, 20), st.sampled_from([0, 1, 33, 70]))
    lengths = draw(st.lists(length, max_size=3 if INTERPRETED else 40))  # groups are of 16
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    v, d = draw(st.sampled_from([1, 7, 64, 131])), draw(st.sampled_from([1, 3, 16, 31, 64, 130]))
    dtype = draw(st.sampled_from(TRITON_DTYPES))
    shapes = (sum(lengths), d), (v, d), (v,)
    hidden, weight, bias = (torch.randint(-3, 4, shape, generator=generator).to(dtype) for shape in shapes)
    return hidden, offsets_of(lengths), weight, bias if draw(st.booleans()) else None


@on_device
@settings(deadline=None, max_examples=12 if INTERPRETED else 25)
@given(problems(), st.sampled_from(ACTIVATIONS), st.sampled_from(POOLINGS), st.booleans())
def test_whole_numbers_are_exact(problem, activation, pooling, with_argmax):
    from irkit_kernels.splade_pool import triton_kernel

    moved = (None if x is None else x.to(DEVICE) for x in problem)
    got, tokens = triton_kernel.forward(*moved, activation, pooling, with_argmax)
    weights, argmax = pool_forward(*problem, activation, pooling)
    if activation == "relu":
        assert torch.equal(got.cpu(), weights)
    else:  # logarithms are rounded
        torch.testing.assert_close(got.cpu(), weights, rtol=1e-5, atol=1e-6)
    assert torch.equal(tokens.cpu(), argmax if with_argmax else argmax[:0])


@on_device
@pytest.mark.parametrize("group", [1, 2, 16])
def test_groups_cover_all_sequences(group):
    from irkit_kernels.splade_pool import triton_kernel

    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randint(-3, 4, (n, 8), generator=generator).float() for n in (20, 200))
    offsets = offsets_of([4, 1, 0, 9, 6])
    tensors = (x.to(DEVICE) for x in (hidden, offsets, weight))
    got, _ = triton_kernel.forward(*tensors, None, "relu", "max", group=group)
    assert torch.equal(got.cpu(), pool_forward(hidden, offsets, weight, None, "relu", "max")[0])


@on_device
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_small_large_and_broken_logits(activation, pooling):
    from irkit_kernels.splade_pool import triton_kernel

    hidden = torch.tensor([1e-30, 1e-10, 1e-4, 0.3, 7.0, 1e6, 1e30, 3e38, math.nan])[:, None]
    ends, weight = torch.arange(10, dtype=torch.int32), torch.ones(1, 1)
    arguments = (hidden, ends, weight, None)
    moved = (None if x is None else x.to(DEVICE) for x in arguments)
    got, _ = triton_kernel.forward(*moved, activation, pooling)
    exact, _ = pool_forward(hidden.double(), ends, weight.double(), None, activation, pooling)
    torch.testing.assert_close(got.cpu().double(), exact, rtol=1e-6, atol=0, equal_nan=True)


@needs_no_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_error_is_at_most_twice_that_of_torch(dtype, pooling):
    generator = torch.Generator().manual_seed(1)
    shapes = (600, 256), (1000, 256), (1000,)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values = [x.to("cuda", dtype).requires_grad_() for x in values]
    lengths = [100, 250, 250]

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden, weight, bias).relu().log1p().split(lengths)
        return torch.stack([part.amax(0) if pooling == "max" else part.sum(0) for part in logits])

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return splade_pool(hidden, offsets_of(lengths).cuda(), weight, bias, pooling=pooling)

    grad = torch.randn(3, 1000, generator=generator).cuda()
    results = []
    for function, inputs in ((plain, [x.double() for x in values]), (ours, values), (plain, values)):
        weights = function(*inputs)
        results.append([weights, *torch.autograd.grad(weights, inputs, grad.to(weights.dtype))])
    for true, mine, naive in zip(*results, strict=True):
        errors = [(x.double() - true).square().mean().sqrt() for x in (mine, naive)]
        assert errors[0] <= 2 * errors[1]


@needs_no_gpu
@pytest.mark.gpu
def test_gradients_and_sparse_rows_are_the_same_every_time():
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 64, generator=generator).cuda().requires_grad_() for n in (900, 3000))
    offsets, grad = offsets_of([300] * 3).cuda(), torch.randn(3, 3000, generator=generator).cuda()
    first, second = (
        torch.autograd.grad(splade_pool(hidden, offsets, weight), (hidden, weight), grad) for _ in range(2)
    )
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    counts, terms, weights = splade_pool_sparse(hidden, offsets, weight, top_k=50)
    assert counts.tolist() == [50] * 3
    rows = torch.repeat_interleave(torch.arange(3, device="cuda"), counts)
    assert torch.equal(splade_pool(hidden, offsets, weight)[rows, terms], weights)


@needs_no_gpu
@pytest.mark.parametrize(("dtype", "capability"), [("fp32", 80), ("bf16", 80), ("bf16", 90), ("fp16", 90)])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_compiles_for_gpus(capability, dtype, pooling):
    from irkit_kernels.splade_pool import triton_kernel

    arguments = dict.fromkeys(("hidden", "weight", "bias"), f"*{dtype}")
    arguments |= {"offsets": "*i32", "out": "*fp32", "argmax": "*i32", "n": "i32", "v": "i32", "size": "i32"}
    arguments |= {"D": 96, "LOGS": 1, "SUM": pooling == "sum", "WITH_BIAS": True, "GROUP": 16}
    arguments |= {"WITH_ARGMAX": pooling == "max", "BLOCK_T": 64, "BLOCK_V": 128, "BLOCK_K": 32}
    assert compiles(triton_kernel.pool, arguments, capability)
