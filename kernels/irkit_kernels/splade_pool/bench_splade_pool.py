"""Compare speed and memory of pooled vocabulary weights on the CPU with plain torch.

Vectors are random; the vocabulary has the size of BERT's. All sequences of a batch have the same length, so
plain torch needs no padding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from irkit_kernels._benching import on_cores, peak_memory, print_rows, take_turns
from irkit_kernels.splade_pool import splade_pool, splade_pool_reference, splade_pool_sparse

__all__ = ["run"]

TERMS, TOP_K = 30_522, 256
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}  # of weights of 1 or 2

Ways = dict[str, Callable[[], Any]]


class Shape(NamedTuple):
    """A batch.

    Attributes:
        name: Its name in the results.
        n: Sequences.
        tokens: Tokens per sequence.
        d: Width of a token.
        gradients: Whether to time the gradients, too.
        rounds: Rounds of the timing.
    """

    name: str
    n: int
    tokens: int
    d: int
    gradients: bool = False
    rounds: int = 2


SHAPES = (
    Shape("1 x 8, d 384", 1, 8, 384, rounds=15),
    Shape("1 x 32, d 768", 1, 32, 768, rounds=15),
    Shape("32 x 8, d 384", 32, 8, 384, rounds=9),
    Shape("8 x 128, d 384, and gradients", 8, 128, 384, gradients=True, rounds=3),
    Shape("32 x 256, d 384", 32, 256, 384),
    Shape("32 x 256, d 768", 32, 256, 768),
)


def run(shapes: tuple[Shape, ...] | None = None) -> list[dict[str, Any]]:
    """Time every shape in float32 and bfloat16, on one core and on all; rounds run all functions in turn.

    Returns:
        One dict per function: its best milliseconds; multiply-adds of the logits per second; the median over
        the rounds of the time of plain torch, in the same dtype, divided by its own; and the peak of memory,
        excluding the inputs, in MB and relative to plain torch.

    Raises:
        RuntimeError: A result is wrong.
    """
    rows = []
    for cores in sorted({1, len(os.sched_getaffinity(0))}):
        with on_cores(cores):
            for shape in shapes or SHAPES:
                for dtype in (torch.float32, torch.bfloat16):
                    rows += _measure(shape, dtype, cores)
    return rows


def _measure(shape: Shape, dtype: torch.dtype, cores: int) -> list[dict[str, Any]]:
    # inputs, of whose weights half are 0
    generator = torch.Generator().manual_seed(0)
    sizes = (shape.n * shape.tokens, shape.d), (TERMS, shape.d), (TERMS,)
    parts = [torch.randn(size, generator=generator) for size in sizes]
    parts[1] /= shape.d**0.5
    parts[2] -= 2.5  # half of the weights are 0
    hidden, weight, bias = (x.to(dtype).requires_grad_(shape.gradients) for x in parts)
    offsets = torch.arange(shape.n + 1, dtype=torch.int32) * shape.tokens
    grad = torch.randn(shape.n, TERMS, generator=generator)

    # what is compared, forward or with gradients
    def plain() -> Tensor:
        logits = F.linear(hidden, weight, bias).view(shape.n, shape.tokens, TERMS)
        return logits.relu().log1p().amax(1)

    def first() -> Tensor:
        logits = F.linear(hidden, weight, bias).view(shape.n, shape.tokens, TERMS)
        return logits.amax(1).relu().log1p()

    def fused() -> Tensor:
        return splade_pool(hidden, offsets, weight, bias)

    functions: Ways = {"torch": plain, "torch, maxima first": first, "splade_pool": fused}
    ways: Ways = dict(functions)
    if shape.gradients:
        ways = {name: _step(function, (hidden, weight, bias), grad) for name, function in functions.items()}
    else:
        arguments = (hidden, offsets, weight, bias)
        ways[f"splade_pool_sparse, top {TOP_K}"] = lambda: splade_pool_sparse(*arguments, top_k=TOP_K)
    name = str(dtype).removeprefix("torch.")
    # results are checked against float64; peak memory
    few = min(2, shape.n)
    exact_parts = [x.detach().double() for x in (hidden[: few * shape.tokens], weight, bias)]
    exact = splade_pool_reference(exact_parts[0], offsets[: few + 1], *exact_parts[1:])
    memory = {}
    for way, function in ways.items():
        result = function()  # compiles
        memory[way] = peak_memory(function, "cpu")
        if isinstance(result, tuple):
            continue
        error = float((result[:few].detach() - exact).abs().max())
        if not error <= TOLERANCE[name]:
            raise RuntimeError(f"splade_pool: {way} differs from float64 by {error:.2g} on {shape.name}")
    # time, in turns
    times = take_turns(ways, shape.rounds, cores)
    work = shape.n * shape.tokens * TERMS * shape.d
    return [
        {
            "shape": shape.name,
            "dtype": name,
            "cores": cores,
            "way": way,
            "ms": 1e3 * min(seconds),
            "GMAC/s": work / min(seconds) / 1e9,
            "x torch": median(a / b for a, b in zip(times["torch"], seconds, strict=True)),
            "MB": memory[way],
            "of torch's MB": memory[way] / max(memory["torch"], 1e-9),
        }
        for way, seconds in times.items()
    ]


def _step(function: Callable[[], Tensor], leaves: tuple[Tensor, ...], grad: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        weights = function()
        torch.autograd.grad(weights, leaves, grad.to(weights.dtype))
        return weights

    return step


if __name__ == "__main__":
    print_rows(run())
