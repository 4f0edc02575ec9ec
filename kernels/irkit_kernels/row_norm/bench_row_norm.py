"""Compare norms of rows, and sums with norms, with torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from irkit_kernels._benching import against_torch, print_rows
from irkit_kernels.row_norm import row_norm
from irkit_kernels.row_norm.reference import row_norm_reference

__all__ = ["run"]

ROWS = (64, 1024)
WIDTHS = (384, 768, 1024)
EPS = 1e-6


def run(rounds: int = 25) -> list[dict[str, Any]]:
    """Time every shape on ``torch.get_num_threads()`` threads; each round runs both implementations.

    Returns:
        One dict per shape and operation, with the results of `against_torch`.

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
    return [
        {"rows": f"{n} x {width}", "operation": name, **against_torch("row_norm", *pair, rounds)}
        for name, pair in ways.items()
    ]


if __name__ == "__main__":
    print_rows(run())
