"""Compare the speed of pooling and its gradient, on one core, with ``F.embedding_bag`` and with a copy.

Sequences are as long as MS MARCO's passages (75 tokens on average) and have width 768. A copy of as many
bytes is the limit of the hardware: every byte is read once and written once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from irkit_kernels._benching import on_cores, print_rows, take_turns
from irkit_kernels.ragged_pool import pooled_lengths, ragged_pool
from irkit_kernels.ragged_pool.reference import pool_backward, pool_forward

__all__ = ["run"]

WIDTH, ROUNDS = 768, 15
SEQUENCES = (16, 64)
WINDOWS = ((2, 2), (3, 2))

Ways = dict[str, Callable[[], Any]]


def run() -> list[dict[str, Any]]:
    """Time windows of two sizes in float32 and bfloat16 on one core; each round runs all functions in turn.

    Returns:
        One dict per direction: the best milliseconds of the kernel and of ``F.embedding_bag``; bytes read and
        written per second; and the medians over the rounds of the times of ``F.embedding_bag``, and of a
        copy of as many bytes, divided by the kernel's.

    Raises:
        RuntimeError: A result is wrong.
    """
    shapes = product(SEQUENCES, WINDOWS, (torch.float32, torch.bfloat16))
    with on_cores(1):
        return [row for shape in shapes for row in _measure(*shape)]


def _measure(n: int, window: tuple[int, int], dtype: torch.dtype) -> list[dict[str, Any]]:
    # values of texts of log-normal lengths
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(n).log_normal_(4.2, 0.45, generator=generator).clamp(8, 512).long()
    counts = pooled_lengths(lengths, *window)
    offsets, ends = (F.pad(x.cumsum(0), (1, 0)).int() for x in (lengths, counts))
    total = int(counts.sum())
    values = torch.randn(int(lengths.sum()), WIDTH, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(total, WIDTH, generator=generator).to(dtype)
    # the same windows as bags of token numbers
    local = torch.arange(total) - ends[:-1].repeat_interleave(counts)
    starts = local * window[1] + offsets[:-1].repeat_interleave(counts)
    sizes = (offsets[1:].repeat_interleave(counts) - starts).clamp(max=window[0])
    bags = F.pad(sizes.cumsum(0), (1, 0))
    tokens = torch.arange(int(bags[-1])) + (starts - bags[:-1]).repeat_interleave(sizes)
    half = torch.empty((values.nbytes + grad.nbytes) // 2, dtype=torch.uint8)
    other = torch.empty_like(half).fill_(1)  # written, so that its pages are mapped before the timing

    # what is compared
    def ours() -> Tensor:
        return ragged_pool(values, offsets, *window, pooled_offsets=ends, total=total)

    def theirs() -> Tensor:
        return F.embedding_bag(tokens, values, bags[:-1], mode="mean")

    functions = {"ragged_pool": ours, "embedding_bag": theirs}
    few, expected = offsets[:9], {}  # 8 sequences
    expected["forward"] = pool_forward(values[: int(few[-1])].detach(), few, *window)
    expected["backward"] = pool_backward(grad[: len(expected["forward"])], few, *window)
    # results are checked, then timed in turns
    rows = []
    for direction in ("forward", "backward"):
        ways: Ways = {"copy": lambda: half.copy_(other)}
        for name, function in functions.items():
            ways[name] = torch.no_grad()(function)
            if direction == "backward":
                ways[name] = _gradient(function(), values, grad)
            got = ways[name]()[: len(expected[direction])].detach()
            if name == "ragged_pool":  # the gradient of embedding_bag is not that exact in bfloat16
                torch.testing.assert_close(got, expected[direction], msg=lambda m: f"ragged_pool: {m}")
        repeated = {way: _repeat(function, n) for way, function in ways.items()}
        times = take_turns(repeated, ROUNDS, 1)
        best = {way: min(seconds) / _repeats(n) for way, seconds in times.items()}
        rows.append(
            {
                "shape": f"{n} x 75, d {WIDTH}",
                "window": f"{window[0]} every {window[1]}",
                "dtype": str(dtype).removeprefix("torch."),
                "direction": direction,
                "ms": 1e3 * best["ragged_pool"],
                "embedding_bag ms": 1e3 * best["embedding_bag"],
                "GB/s": 2 * half.nbytes / best["ragged_pool"] / 1e9,
                "x embedding_bag": _ratio(times, "embedding_bag"),
                "of copying": _ratio(times, "copy"),
            }
        )
    return rows


def _gradient(out: Tensor, values: Tensor, grad: Tensor) -> Callable[[], Tensor]:
    return lambda: torch.autograd.grad(out, values, grad, retain_graph=True)[0]


def _ratio(times: dict[str, list[float]], way: str) -> float:
    return median(a / b for a, b in zip(times[way], times["ragged_pool"], strict=True))


def _repeats(n: int) -> int:
    return max(4, 256 // n)  # calls timed together, more of them if they are short


def _repeat(function: Callable[[], Any], n: int) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(_repeats(n)):
            function()

    return calls


if __name__ == "__main__":
    print_rows(run())
