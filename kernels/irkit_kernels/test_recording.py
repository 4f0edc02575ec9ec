"""The simulated CUDA device records what a real device would do, and computes the results of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from irkit_kernels._recording import Record, recording
from irkit_kernels.maxsim import maxsim
from irkit_kernels.ragged_pool import ragged_pool
from irkit_kernels.splade_pool import splade_pool
from irkit_kernels.splade_pool.reference import pool_backward, pool_forward


def step(values: Tensor, offsets: Tensor, weight: Tensor) -> Tensor:
    """Call every kernel that has a gradient."""
    pooled = ragged_pool(values, offsets, 2, 2, total=4)
    ends = torch.tensor([0, 2, 4], dtype=torch.int32, device=values.device)
    weights = splade_pool(pooled, ends, weight, None)
    return maxsim(pooled, ends, weight, ends).sum() + F.gelu(weights).sum()


def gradients(device: torch.device | str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator).to(device) for shape in ((7, 3), (4, 3))]
    values, weight = (tensor.requires_grad_() for tensor in tensors)
    step(values, torch.tensor([0, 4, 7], dtype=torch.int32, device=device), weight).backward()
    return [tensor.grad.cpu() for tensor in (values, weight) if tensor.grad is not None]


def test_results_and_gradients_are_those_of_the_cpu() -> None:
    expected = gradients("cpu")
    with recording() as record:
        actual = gradients(record.device)
    torch.testing.assert_close(actual, expected)
    assert {"triton:ragged_pool", "triton:maxsim", "triton:splade_pool"} <= set(record.operations)


def recorded(call: str) -> Record:
    with recording() as record:
        names = {"x": torch.tensor([0.0, 1.0, 2.0], device="cuda"), "cpu": torch.ones(3), "torch": torch}
        names["rows"] = torch.tensor([0, 2, 0], device="cuda")
        record.clear()
        exec(call, names)
    return record


@pytest.mark.parametrize(
    "call",
    [
        "x.sum().item()",
        "bool(x.isfinite().all())",
        "x.tolist()",
        "x.nonzero()",
        "x[x > 0]",
        "x[x > 0] = rows[1:].float()",
        "torch.repeat_interleave(x, rows)",
        "torch.unique(x)",
        "torch.equal(x, x)",
        "torch.cuda.synchronize()",
        "torch.cuda.Event().synchronize()",
        "cpu.pin_memory().to('cuda')",
    ],
)
def test_what_waits(call: str) -> None:
    record = recorded(call)
    assert len(record.waits) == 1
    assert not record.pageable or "tolist" in call


@pytest.mark.parametrize("call", ["cpu.cuda()", "x.cpu()", "x[[0, 1]]", "x.copy_(cpu)", "cpu.copy_(x)"])
def test_what_waits_for_a_pageable_copy(call: str) -> None:
    record = recorded(call)
    assert len(record.waits) == len(record.pageable) == 1


@pytest.mark.parametrize(
    "call",
    [
        "(x * 2).cumsum(0).clamp_(min=0)[rows].softmax(0)",
        "x[x > 0] = 1",
        "torch.repeat_interleave(x, rows, output_size=2)",
        "torch.arange(9, device=x.device) + 1",
        "cpu.pin_memory().to('cuda', non_blocking=True)",
        "x.to('cpu', non_blocking=True)",
        "torch.empty(3, pin_memory=True).copy_(x, non_blocking=True)",
    ],
)
def test_what_does_not_wait(call: str) -> None:
    record = recorded(call)
    assert record.operations
    assert not record.waits
    assert not record.pageable


def test_tensors_of_two_devices_do_not_meet() -> None:
    with pytest.raises(RuntimeError, match="of the device and of the CPU"):
        recorded("x + cpu")


def test_gradients_of_sums_do_not_lose_the_sign_of_a_logit():
    generator = torch.Generator().manual_seed(1)
    values = [
        torch.randn(shape, generator=generator).bfloat16() for shape in ((300, 128), (400, 128), (400,))
    ]
    ends, grad = torch.tensor([0, 100, 300], dtype=torch.int32), torch.randn(2, 400, generator=generator)
    doubles = values[0].double(), ends, values[1].double(), values[2].double(), "log1p_relu", "sum"
    exact = pool_backward(grad.double(), *doubles[:4], *pool_forward(*doubles), *doubles[4:])
    with recording() as record:
        hidden, weight, bias = (x.to(record.device).requires_grad_() for x in values)
        weights = splade_pool(hidden, ends.to(record.device), weight, bias, pooling="sum")
        found = torch.autograd.grad(weights, (hidden, weight, bias), grad.to(record.device))
        found = [x.cpu() for x in found]
    for mine, true in zip(found, exact, strict=True):
        assert (mine.double() - true).norm() < 0.005 * true.norm()  # bfloat16 rounds by up to 0.004
