"""Compare norms of rows, and sums with norms, with torch's."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from irkit_kernels.row_norm import row_norm
from irkit_kernels.row_norm.reference import row_norm_reference

__all__ = ["run"]

ROWS = (64, 1024)
WIDTHS = (384, 768, 1024)
EPS = 1e-6


def run(rounds: int = 25) -> list[dict[str, Any]]:
    """Time every shape on ``torch.get_num_threads()`` threads; each round runs both implementations.

    Returns:
        One dict per shape and operation: the best milliseconds of both, and ``x torch``, the median over the
        rounds of torch's time divided by the kernel's.

    Raises:
        RuntimeError: A result is wrong.
    """
    with torch.inference_mode():
        return [row for n in ROWS for width in WIDTHS for row in _measure(n, width, rounds)]


def _measure(n: int, width: int, rounds: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(n + width)
    x, fresh, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((n, width), (n, width), (width,), (width,))
    )
    # check before timing
    for rms in (False, True):
        expected = row_norm_reference(x, weight, eps=EPS, rms=rms)
        if (row_norm(x, weight, eps=EPS, rms=rms) - expected).abs().max() > 1e-5 * expected.abs().max():
            raise RuntimeError(f"row_norm differs from its reference at {n} x {width}, rms={rms}")
    # the same operation by torch and by the kernel
    ways: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "LayerNorm": (
            lambda: F.layer_norm(x, (width,), weight, bias, EPS),
            lambda: row_norm(x, weight, bias, eps=EPS),
        ),
        "sum and LayerNorm": (
            lambda: F.layer_norm(torch.add(x, fresh, out=fresh), (width,), weight, bias, EPS),
            lambda: row_norm(x, weight, bias, eps=EPS, added=fresh),
        ),
        "RMSNorm": (
            lambda: F.rms_norm(x, (width,), weight, EPS),
            lambda: row_norm(x, weight, eps=EPS, rms=True),
        ),
    }
    # in turns
    rows = []
    for name, pair in ways.items():
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for way, spent in zip(pair, times, strict=True):
                start = perf_counter()
                way()
                spent.append((perf_counter() - start) * 1e3)
        rows.append(
            {
                "rows": f"{n} x {width}",
                "operation": name,
                "threads": torch.get_num_threads(),
                "torch ms": round(min(times[0]), 4),
                "row_norm ms": round(min(times[1]), 4),
                "x torch": round(median(a / b for a, b in zip(*times, strict=True)), 2),
            }
        )
    return rows


if __name__ == "__main__":
    for row in run():
        print("  ".join(f"{key} {value}" for key, value in row.items()))
