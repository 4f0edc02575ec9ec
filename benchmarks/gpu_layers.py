"""What a layer of an encoder does beside products and attention, as a GPU is timed with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from irkit_kernels.gated_product import gated_product
from irkit_kernels.gated_product.reference import gated_product_reference
from irkit_kernels.rotary import rotary
from irkit_kernels.rotary.reference import rotary_reference
from irkit_kernels.row_norm import row_norm
from irkit_kernels.row_norm.reference import row_norm_reference
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_timing import Case, Device
from benchmarks.harness import Row

__all__ = ["layer_cases"]

WIDTH = 768  # of BERT-base


def layer_cases(device: Device) -> Iterator[Case]:
    """Yield rotary positions, normalisation of a sum, and a gate, which memory alone limits."""
    n = 32_768 if device.name == "cuda" else 16
    yield _rotary(device, n)
    yield _add_norm(device, n)
    yield _gated(device, n)


def _layer(
    device: Device,
    labels: Row,
    shapes: list[tuple[int, ...]],
    ours: Callable[[list[Tensor]], Tensor],
    plain: Callable[[list[Tensor]], Tensor],
    exact: Callable[[list[Tensor]], Tensor],
    nbytes: int,
) -> Case:
    def inputs(seed: int) -> list[Tensor]:
        generator = torch.Generator(device.name).manual_seed(seed)
        draws = [torch.randn(shape, generator=generator, device=device.name) for shape in shapes]
        return [x.to(torch.bfloat16) for x in draws]

    return Case(
        labels | {"dtype": "bfloat16"},
        "bfloat16",
        inputs,
        {"torch": plain, "irkit": ours if device.name == "cuda" else "needs a GPU"},
        lambda x: (exact([part.double() for part in x]),),
        nbytes,
    )


def _rotary(device: Device, n: int) -> Case:
    heads, width = 12, WIDTH // 12
    angles = 100 * torch.rand(n, 1, width // 2, device=device.name)
    cos, sin = angles.cos(), angles.sin()

    def queries(x: list[Tensor]) -> Tensor:  # beside keys and values
        return x[0][:, :WIDTH].unflatten(1, (heads, width))

    return _layer(
        device,
        {"kernel": "rotary", "shape": f"{n} x {heads} x {width}"},
        [(n, 3 * WIDTH)],
        lambda x: rotary(queries(x), cos, sin),
        lambda x: rotary_reference(queries(x), cos.bfloat16(), sin.bfloat16()),
        lambda x: rotary_reference(queries(x), cos.double(), sin.double()),
        n * (4 * WIDTH + 4 * width),
    )


def _add_norm(device: Device, n: int) -> Case:
    return _layer(
        device,
        {"kernel": "row_norm", "shape": f"{n} x {WIDTH}, of a sum that is kept"},
        [(n, WIDTH), (n, WIDTH), (WIDTH,), (WIDTH,)],
        lambda x: row_norm(x[0], x[2], x[3], eps=1e-12, added=x[1], keep_sum=True),  # overwrites x[1]
        lambda x: F.layer_norm(x[0] + x[1], (WIDTH,), x[2], x[3], 1e-12),
        lambda x: row_norm_reference(x[0] + x[1], x[2], x[3], eps=1e-12),
        n * 8 * WIDTH,
    )


def _gated(device: Device, n: int) -> Case:
    inner = 1152  # of ModernBERT-base
    return _layer(
        device,
        {"kernel": "gated_product", "shape": f"{n} x {inner}, gelu"},
        [(n, 2 * inner)],
        lambda x: gated_product(x[0], "gelu"),
        lambda x: gated_product_reference(x[0], "gelu"),
        lambda x: gated_product_reference(x[0], "gelu"),
        n * 6 * inner,
    )
