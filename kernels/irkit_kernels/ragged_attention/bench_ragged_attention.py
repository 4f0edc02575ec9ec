"""Compare the speed of the kernel, on one core, with torch's attention, one call per run of equal lengths.

Rough attention of float32 is compared with torch's in bfloat16, with the conversions. Training times cover
forward and backward with dropout 0.1. All times are CPU time, the best of interleaved
rounds, so that other processes on a shared machine disturb less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from irkit_kernels.ragged_attention import ragged_attention
from irkit_kernels.ragged_attention.reference import attention_reference

__all__ = ["run"]

HEADS, TOKENS, ROUNDS, DROPOUT = 12, 1024, 10, 0.1
EQUAL = {False: (8, 16, 32, 64, 80, 128, 256, 512, 2048), True: (32, 128, 512)}  # in training: fewer


def run() -> list[dict[str, Any]]:
    """Measure rows of equal lengths, and rows of mixed lengths sorted by length; about 1024 tokens each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            _measure(name, lengths, head_dim, dtype, training)
            for training in (False, True)
            for dtype in ("float32", "bfloat16", *([] if training else ["float32, rough"]))
            for head_dim in (32, 64)
            for name, lengths in _shapes(training)
        ]
    finally:
        torch.set_num_threads(threads)


def _shapes(training: bool) -> list[tuple[str, list[int]]]:
    equal = [(f"{length}", [length] * max(1, TOKENS // length)) for length in EQUAL[training]]
    drawn = np.random.default_rng(0).lognormal(np.log(80) - 0.7**2 / 2, 0.7, size=13)  # mean 80
    return [*equal, ("mixed, mean 80", sorted(int(length) for length in drawn.clip(4, 512)))]


def _measure(name: str, lengths: Sequence[int], head_dim: int, dtype: str, training: bool) -> dict[str, Any]:
    # inputs
    torch.manual_seed(0)
    kind, _, rough = dtype.partition(", ")
    inputs = torch.randn(sum(lengths), 3, HEADS, head_dim).to(getattr(torch, kind)).requires_grad_(training)
    grad = torch.randn(sum(lengths), HEADS, head_dim).to(inputs.dtype)
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)

    # what is compared, each forward or with its gradient
    def ours(dropout: float) -> Tensor:
        return ragged_attention(*inputs.unbind(1), offsets, offsets, None, dropout, rough=bool(rough))

    def theirs(dropout: float) -> Tensor:
        parts = (inputs.bfloat16() if rough else inputs).unbind(1)
        return _torch(*parts, lengths, dropout).to(inputs.dtype)

    def result(attention: Callable[[float], Tensor], dropout: float = 0.0) -> Tensor:
        out = attention(dropout)
        return torch.autograd.grad(out, inputs, grad)[0] if training else out

    contenders = {"kernel": ours, "torch": theirs}
    # errors, against float64
    wide = inputs.detach().double().requires_grad_(training)
    exact = attention_reference(*wide.unbind(1), offsets, offsets)
    if training:
        exact = torch.autograd.grad(exact, wide, grad.double())[0]
    errors = {
        name: float((result(attend).double() - exact).square().mean().sqrt())
        for name, attend in contenders.items()
    }
    if not errors["kernel"] <= 2 * errors["torch"]:
        raise RuntimeError(f"wrong result for {name}, {head_dim}, {dtype}: errors {errors}")
    # time
    work = (14 if training else 4) * HEADS * head_dim * sum(length**2 for length in lengths)
    dropout = DROPOUT if training else 0.0
    functions = {name: partial(result, attend, dropout) for name, attend in contenders.items()}
    seconds = _interleaved(functions, max(1, int(1e8 / work)))
    return {
        "mode": "training" if training else "inference",
        "dtype": dtype,
        "head_dim": head_dim,
        "length": name,
        "tokens": sum(lengths),
        "kernel_gflops": work / seconds["kernel"] / 1e9,
        "torch_gflops": work / seconds["torch"] / 1e9,
        "ratio": seconds["torch"] / seconds["kernel"],
        "error_ratio": errors["kernel"] / errors["torch"],
    }


def _interleaved(functions: dict[str, Callable[[], Tensor]], repeats: int) -> dict[str, float]:
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start = time.thread_time()
            for _ in range(repeats):
                function()
            best[name] = min(best[name], (time.thread_time() - start) / repeats)
    return best


def _torch(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], dropout: float) -> Tensor:
    outputs, at = [], 0
    for length, same in groupby(lengths):
        n = len(list(same))
        q, k, v = (
            x[at : at + n * length].view(n, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)
        )
        outputs.append(
            F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2).flatten(0, 1)
        )
        at += n * length
    return torch.cat(outputs)


if __name__ == "__main__":
    print("| mode | dtype | head_dim | length | kernel GFLOP/s | torch GFLOP/s | ratio | error / torch's |")
    print("|---|---|---|---|---|---|---|---|")
    for row in run():
        print(
            "| {mode} | {dtype} | {head_dim} | {length} | {kernel_gflops:.0f} | {torch_gflops:.0f} "
            "| {ratio:.1f} | {error_ratio:.2f} |".format(**row)
        )
