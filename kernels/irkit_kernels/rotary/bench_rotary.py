"""Compare rotations of queries with torch's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from irkit_kernels._benching import against_torch, print_rows
from irkit_kernels.rotary import rotary
from irkit_kernels.rotary.reference import rotary_reference

__all__ = ["run"]

SHAPES = ((64, 12, 64), (1024, 12, 64), (1024, 16, 128), (1024, 3, 256))  # tokens, heads, width


def run(rounds: int = 25) -> list[dict[str, Any]]:
    """Time every shape on ``torch.get_num_threads()`` threads; each round runs both implementations.

    Returns:
        One dict per shape, with the results of `against_torch`.

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
        ways = (partial(way, x, cos, sin) for way in (rotary_reference, rotary))
        rows.append({"queries": f"{n} x {heads} x {width}", **against_torch("rotary", *ways, rounds)})
    return rows


if __name__ == "__main__":
    print_rows(run())
