"""`assign` and `encode` for torch tensors, block by block on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .reference import NOTHING, STEPS, TURNS, WINDOW, bits_of, packed_width
from .tensor_op import TensorTokens, levels_of

__all__ = ["Blocks", "tensor_assign", "tensor_encode"]


@dataclass(frozen=True)
class Blocks:
    """How much is computed at a time, which bounds the memory.

    Attributes:
        products: Inner products of `tensor_assign`, 4 bytes each.
        stored: Bytes that Viterbi's algorithm stores in `tensor_encode`, one per number and state.
        rows: Vectors of `tensor_encode`.
    """

    products: int = 1 << 27
    stored: int = 1 << 27
    rows: int = 1 << 15


_BLOCKS = Blocks()


def tensor_assign(values: Tensor, centroids: Tensor, *, blocks: Blocks = _BLOCKS) -> Tensor:
    """Find the centroid with the largest inner product for each vector.

    Args:
        values: ``(n, d)`` float32.
        centroids: ``(K, d)`` float32, at least one.
        blocks: How much is computed at a time.

    Returns:
        ``(n,)`` int64.
    """
    _check("tensor_assign", values, centroids)
    rows = max(1, blocks.products // len(centroids))
    starts = range(0, len(values), rows)
    parts = [(values[start : start + rows] @ centroids.T).argmax(1) for start in starts]
    return torch.cat([torch.empty(0, dtype=torch.int64, device=values.device), *parts])


def tensor_encode(
    values: Tensor, centroids: Tensor, codes: Tensor, codebook: Tensor, *, blocks: Blocks = _BLOCKS
) -> TensorTokens:
    """Encode vectors like `encode`.

    Args:
        values: ``(n, d)`` float32.
        centroids: ``(K, d)`` float32.
        codes: ``(n,)`` uint16 or int32 below K, not checked, the centroid of each vector; becomes part of the
            result.
        codebook: ``(2**(8 - nbits), 2**nbits)`` int8 from `train_codebook`.
        blocks: How much is computed at a time.

    Returns:
        ``n`` tokens.
    """
    _check("tensor_encode", values, centroids)
    nbits = bits_of(codebook)
    width = packed_width(values.shape[1], nbits)
    states = WINDOW // nbits * width * 2 ** (WINDOW - nbits)
    coefficients = torch.empty(len(values), 2, dtype=torch.float16, device=values.device)
    packed = torch.empty(len(values), width, dtype=torch.uint8, device=values.device)
    rows = max(1, min(blocks.rows, blocks.stored // states))
    for start in range(0, len(values), rows):
        part = slice(start, start + rows)
        nearest = centroids[codes[part].int()]
        coefficients[part], packed[part] = _encode(values[part].double(), nearest.double(), codebook)
    return TensorTokens(codes, coefficients, packed)


def _encode(x: Tensor, c: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """Compute coefficients and levels of vectors ``(n, d)`` float64 like `reference.encode_reference`."""
    # without levels: the best multiple of the centroid, and the scale of its residual
    most = torch.finfo(torch.float16).max
    xx, cc, xc = (x * x).sum(1), (c * c).sum(1), (x * c).sum(1)
    a, b = _ratio(xc, cc, cc > 0), torch.zeros_like(xx)
    square = (x - a[:, None] * c).square().sum(1)
    has_residual = square > NOTHING * xx
    factor = STEPS * _ratio(torch.full_like(xx, x.shape[1]), square, has_residual).sqrt()
    packed = torch.empty(0)
    for _ in range(TURNS):
        # levels of the residual
        steps = (factor[:, None] * (x - a[:, None] * c)).clamp(-128, 127).round()
        packed = _best_path(steps.float(), codebook)
        u = levels_of(packed, codebook, x.shape[1]).double()
        cu, uu, xu = (c * u).sum(1), (u * u).sum(1), (x * u).sum(1)
        # coefficients: the normal equations, or one coefficient alone where they have no unique solution
        det = cc * uu - cu * cu
        fits = has_residual & (det > NOTHING * cc * uu)
        b_alone = _ratio(xu, uu, has_residual & (cc == 0) & (uu > 0))
        a = torch.where(fits, _ratio(xc * uu - xu * cu, det, fits), _ratio(xc, cc, cc > 0))
        b = torch.where(fits, _ratio(xu * cc - xc * cu, det, fits), b_alone)
        factor = _ratio(torch.ones_like(b), b, b != 0)
    return torch.stack([a, b], dim=1).clamp(-most, most).half(), packed


def _best_path(steps: Tensor, codebook: Tensor) -> Tensor:
    """Return the bytes ``(n, width)`` whose levels are nearest to integer ``steps (n, d)``.

    This is Viterbi's algorithm, see `cpu_trellis`. Sums of squares are integers below 2^24, so they are
    exact in float32; among equal ones the first is taken.
    """
    (n, dim), nbits = steps.shape, bits_of(codebook)
    width, planes, states = packed_width(dim, nbits), WINDOW // nbits, 2 ** (WINDOW - nbits)
    order = [plane * width + i for i in range(width) for plane in range(planes)]  # numbers by their bits
    levels, columns = codebook.flatten().float(), steps.T.contiguous()

    # forward: the cheapest window into each state
    costs = steps.new_full((n, states), torch.inf)
    costs[:, 0] = 0
    first = torch.empty(len(order), n, states, dtype=torch.uint8, device=steps.device)
    for i, number in enumerate(order):
        if number < dim:
            all_costs = (columns[number][:, None] - levels).square_().view(n, states, 2**nbits)
            all_costs.add_(costs[:, :, None])
        else:
            all_costs = costs[:, :, None].expand(n, states, 2**nbits)
        costs, leaving = all_costs.reshape(n, 2**nbits, states).min(1)
        first[i] = leaving

    # backward: from the cheapest state
    state = costs.argmin(1, keepdim=True)
    packed = torch.empty(n, width, dtype=torch.uint8, device=steps.device)
    for i in range(len(order) - 1, -1, -1):
        window = first[i].gather(1, state) * states + state
        if i % planes == planes - 1:
            packed[:, i // planes] = window[:, 0]
        state = window >> nbits
    return packed


def _ratio(a: Tensor, b: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, a / torch.where(valid, b, 1), 0)


def _check(name: str, values: Tensor, centroids: Tensor) -> None:
    shapes = tuple(values.shape), tuple(centroids.shape)
    fits = values.dim() == centroids.dim() == 2 and values.shape[1] == centroids.shape[1] and len(centroids)
    if not fits or {values.dtype, centroids.dtype} != {torch.float32} or values.device != centroids.device:
        raise ValueError(
            f"{name}: expected float32 values (n, d) and centroids (K, d) on one device, got {values.dtype} "
            f"{shapes[0]} on {values.device} and {centroids.dtype} {shapes[1]} on {centroids.device}"
        )
