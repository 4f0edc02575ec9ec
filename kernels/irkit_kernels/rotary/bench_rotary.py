"""Compare rotations of queries with torch's."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch

from irkit_kernels.rotary import rotary
from irkit_kernels.rotary.reference import rotary_reference

__all__ = ["run"]

SHAPES = ((64, 12, 64), (1024, 12, 64), (1024, 16, 128), (1024, 3, 256))  # tokens, heads, width


def run(rounds: int = 25) -> list[dict[str, Any]]:
    """Time every shape on ``torch.get_num_threads()`` threads; each round runs both implementations.

    Returns:
        One dict per shape: the best milliseconds of both, and ``x torch``, the median over the rounds of
        torch's time divided by the kernel's.

    Raises:
        RuntimeError: A result is wrong.
    """
    rows = []
    for n, heads, width in SHAPES:
        generator = torch.Generator().manual_seed(n + width)
        x = torch.randn(n, 3 * heads * width, generator=generator)[:, : heads * width]
        x, (cos, sin) = x.unflatten(1, (heads, width)), torch.randn(2, n, 1, width // 2, generator=generator)
        if (rotary(x, cos, sin) - rotary_reference(x, cos, sin)).abs().max() > 1e-5:
            raise RuntimeError(f"rotary differs from its reference at {n} x {heads} x {width}")
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for way, spent in zip((rotary_reference, rotary), times, strict=True):
                start = perf_counter()
                way(x, cos, sin)
                spent.append((perf_counter() - start) * 1e3)
        rows.append(
            {
                "queries": f"{n} x {heads} x {width}",
                "threads": torch.get_num_threads(),
                "torch ms": round(min(times[0]), 4),
                "rotary ms": round(min(times[1]), 4),
                "x torch": round(median(a / b for a, b in zip(*times, strict=True)), 2),
            }
        )
    return rows


if __name__ == "__main__":
    for row in run():
        print("  ".join(f"{key} {value}" for key, value in row.items()))
