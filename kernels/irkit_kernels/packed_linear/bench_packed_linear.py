"""Compare the speed of packed linear layers with torch's float32, bfloat16 and bare int8 products."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from irkit_kernels.packed_linear import pack_weight, packed_linear
from irkit_kernels.packed_linear.reference import bfloat16_reference, int8_reference, quantize_weight

__all__ = ["run"]

ROWS = (64, 256, 1024, 2048)
SHAPES = ((384, 1152), (384, 384), (384, 1536), (1536, 384))  # (k, n) of a layer of MiniLM


def run(rounds: int = 15) -> list[dict[str, Any]]:
    """Time every shape on ``torch.get_num_threads()`` threads; each round runs all implementations in turn.

    Returns:
        One dict per shape: the best milliseconds of each implementation (``int8 product`` is torch's bare
        matrix product, without quantising, scaling and bias); the op's giga-operations per second (2 per
        weight and row); and ``x float32``, the median over the rounds of float32's time divided by the op's.

    Raises:
        RuntimeError: A result is wrong.
    """
    return [_measure(m, k, n, rounds) for m in ROWS for k, n in SHAPES]


def _measure(m: int, k: int, n: int, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(m + k + n)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((m, k), (n, k), (n,)))
    packed, (q, scale) = pack_weight(weight, bias), quantize_weight(weight)
    packed_half = pack_weight(weight, bias, kind="bfloat16")
    exact = int8_reference(x, q, scale, bias), bfloat16_reference(x, weight, bias)
    for weights, expected, error in zip((packed, packed_half), exact, (2**-22, 2**-18), strict=True):
        if (packed_linear(x, weights, n) - expected).abs().max() > error * expected.abs().max():
            raise RuntimeError(f"packed_linear differs from its reference at m={m}, k={k}, n={n}")
    half = [tensor.bfloat16() for tensor in (x, weight, bias)]
    x_int = torch.randint(-127, 128, (m, k), generator=generator, dtype=torch.int8)
    ways: dict[str, Callable[[], Tensor]] = {
        "float32": lambda: F.linear(x, weight, bias),
        "bfloat16": lambda: F.linear(*half),
        "int8 product": lambda: torch._int_mm(x_int, q.T),
        "int8": lambda: packed_linear(x, packed, n),
        "int8 gelu": lambda: packed_linear(x, packed, n, "gelu"),
        "packed bfloat16": lambda: packed_linear(x, packed_half, n),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append((time.perf_counter() - start) * 1e3)
    best = {name: min(values) for name, values in times.items()}
    return {
        "shape": f"{m} x {k} -> {n}",
        "threads": torch.get_num_threads(),
        **{f"{name} ms": round(value, 3) for name, value in best.items()},
        "GOP/s": round(2e-6 * m * n * k / best["int8"]),
        "x float32": round(median(a / b for a, b in zip(times["float32"], times["int8"], strict=True)), 2),
    }


if __name__ == "__main__":
    for threads in (1, torch.get_num_threads()):
        torch.set_num_threads(threads)
        for row in run():
            print("  ".join(f"{key} {value}" for key, value in row.items()))
