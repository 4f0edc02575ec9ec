"""Attention over rows of different lengths: one function, three implementations that agree."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from irkit.encoder.config import Pooling
from irkit.errors import BadValueError, MissingDependencyError
from irkit.ragged import Ragged

__all__ = ["Backend", "attend", "leading", "pick_backend", "rotary_table", "rotate"]

_ROWS = 128  # rotated together: in float32 they stay in the cache
_WIDEST = 256  # heads of flash attention, whose widths are multiples of 8

Backend = Literal["eager", "sdpa", "flash"]


def attend(
    query: Ragged,
    key: Ragged,
    value: Ragged,
    *,
    backend: Backend,
    window: int | None = None,
    dropout: float = 0.0,
    pooling: Pooling | None = None,
) -> Tensor:
    """Softmax attention within each row, without attention between rows.

    Args:
        query: Ragged ``(total_q, heads, head_dim)``; may be shorter than ``key``.
        key: Ragged ``(total_k, heads, head_dim)``, as many rows as ``query``; where rows are shorter, they
            lack the last tokens.
        value: As ``key``.
        backend: ``eager`` writes out the formula on padded rows; ``sdpa`` is fused attention: torch's, or
            on a CPU the kernel ``ragged_attention``; ``flash`` is the unpadded flash attention of CUDA.
        window: Largest distance at which tokens attend to each other; None is any.
        dropout: Probability of dropping an attention weight.
        pooling: What made the queries from rows like the keys: ``window`` counts from the middle of each.

    Returns:
        ``(total_q, heads, head_dim)``, packed as ``query``; zeros where no key is near enough.
    """
    reach = max(query.max_length, key.max_length) + (pooling.kernel if pooling else 0)
    if window is not None and reach <= window + 1:
        window = None
    if window is not None and (pooling or not torch.equal(query.lengths, key.lengths)):
        return _padded(query, key, value, window, dropout, _eager, pooling)
    if backend == "flash":
        return _flash(query, key, value, window, dropout)
    if backend == "eager":
        return _padded(query, key, value, window, dropout, _eager)
    if query.device.type == "cpu":
        from irkit_kernels.ragged_attention import ragged_attention

        packed = (query.values, key.values, value.values)
        return ragged_attention(*packed, query.offsets, key.offsets, window, dropout)
    return _padded(query, key, value, window, dropout, F.scaled_dot_product_attention)


def leading(tokens: Ragged, lengths: Tensor) -> Ragged:
    """Places in ``tokens.values`` of the first ``lengths (n,)`` of each row."""
    positions, ends = tokens.positions(), lengths.to(tokens.device)[tokens.row_ids()]
    return tokens.with_values(torch.arange(len(positions), device=tokens.device)).where(positions < ends)


def pick_backend(wish: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend for ``wish``, one of auto, eager, sdpa and flash.

    ``auto`` is flash on CUDA in half precision, be it that of autocast, where a kernel is installed and the
    GPU is one that it runs on; sdpa elsewhere.

    Raises:
        BadValueError: The wish is unknown, or flash was wished for where it cannot run.
        MissingDependencyError: flash was wished for and neither torch nor flash-attn has it.
    """
    able = device.type == "cuda" and _cast(dtype) in (torch.float16, torch.bfloat16)
    able = able and torch.cuda.get_device_capability(device) >= (8, 0)
    if wish == "auto":
        return "flash" if able and _flash_kernel() is not None else "sdpa"
    if wish == "flash":
        if not able:
            raise BadValueError(
                f"attention='flash' needs float16 or bfloat16 on CUDA from Ampere on, got {dtype} on {device}"
            )
        if _flash_kernel() is None:
            raise MissingDependencyError(
                "attention='flash' needs torch>=2.11 with CUDA, or: pip install flash-attn"
            )
        return "flash"
    if wish not in ("eager", "sdpa"):
        raise BadValueError(f"attention={wish!r} is unknown; expected auto, eager, sdpa or flash")
    return "eager" if wish == "eager" else "sdpa"


def rotary_table(positions: Tensor, base: float, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``(total, 1, head_dim / 2)`` of the rotary angles.

    Args:
        positions: ``(total,)``; may be fractional.
        base: Slowest rotation is ``1 / base`` radians a position.
        head_dim: Width of a head.

    Source: Su et al. 2021 (RoFormer), section 3.2.2.
    """
    frequencies = base ** -(torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Turn pairs of ``x (total, heads, head_dim)`` by the angles of `rotary_table`.

    Neighbours (``interleaved``) are turned in ``x`` itself in inference on a CPU: new memory would cost as
    much as the work.
    """
    cos, sin = table
    if interleaved:  # a pair is a complex number; their product is one pass, in float32 whatever the dtype
        kind, turn = torch.promote_types(x.dtype, cos.dtype), torch.complex(cos, sin)
        if not x.is_cpu or torch.is_grad_enabled() or torch.compiler.is_compiling():
            turned = torch.view_as_complex(torch.unflatten(x.to(kind), -1, (-1, 2))) * turn
            return torch.view_as_real(turned).flatten(-2).to(x.dtype)
        for part, by in zip(torch.split(x, _ROWS), torch.split(turn, _ROWS), strict=True):
            wide = part.to(kind)  # the part itself in float32
            torch.view_as_complex(torch.unflatten(wide, -1, (-1, 2))).mul_(by)
            part.copy_(wide)
        return x
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _padded(
    query: Ragged,
    key: Ragged,
    value: Ragged,
    window: int | None,
    dropout: float,
    function: Callable[..., Tensor],
    pooling: Pooling | None = None,
) -> Tensor:
    if window is None and _equally_long(query) and _equally_long(key):  # nothing to pad, nothing to mask
        whole = (x.values.view(len(x), -1, *x.values.shape[1:]).transpose(1, 2) for x in (query, key, value))
        return function(*whole, attn_mask=None, dropout_p=dropout).transpose(1, 2).flatten(0, 1)
    q, mask_q = query.to_padded()
    k, mask_k = key.to_padded()
    v, _ = value.to_padded()
    mask = mask_k[:, None, None, :].clone()
    mask[..., :1] = True  # no softmax over nothing in an empty row: its gradient would be NaN
    if window is not None:
        rows, places = (torch.arange(x.shape[1], device=k.device) for x in (q, k))
        if pooling:
            rows = pooling.centres(rows)
        near = (rows[:, None] - places[None, :]).abs() <= window
        mask = mask & near
        blind = ~mask.any(-1, keepdim=True)  # what is out of reach of all keys, and padding
        mask[..., :1] |= blind
    out = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, dropout_p=dropout)
    if window is not None:
        out = out.masked_fill(blind, 0)
    places = mask_q.flatten().nonzero().flatten()  # a fourth of the time that a mask takes on a CPU
    return out.transpose(1, 2).flatten(0, 1).index_select(0, places)


def _equally_long(rows: Ragged) -> bool:
    return len(rows) > 0 and 0 < rows.max_length == int(rows.lengths.min())


def _eager(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, dropout_p: float) -> Tensor:
    weights = q / q.shape[-1] ** 0.5 @ k.transpose(-1, -2)
    if attn_mask is not None:
        weights = weights.masked_fill_(~attn_mask, float("-inf"))
    exact = torch.promote_types(v.dtype, torch.float32)
    return F.dropout(weights.softmax(-1, dtype=exact).to(v.dtype), dropout_p) @ v


def _flash(query: Ragged, key: Ragged, value: Ragged, window: int | None, dropout: float) -> Tensor:
    kernel = _flash_kernel()
    if kernel is None:
        raise MissingDependencyError(
            "attention='flash' needs torch>=2.11 with CUDA, or: pip install flash-attn"
        )
    return kernel(query, key, value, window, dropout)


@cache
def _flash_kernel() -> Callable[..., Tensor] | None:
    """flash-attn where it is installed, else torch's own kernel, which knows no dropout, else None."""
    function: Any
    try:
        from flash_attn import flash_attn_varlen_func

        function, knows_dropout = flash_attn_varlen_func, True
    except ImportError:
        try:
            from torch.nn.attention import varlen
        except ImportError:
            return None
        function, knows_dropout = varlen.varlen_attn, False

    def run(query: Ragged, key: Ragged, value: Ragged, window: int | None, dropout: float) -> Tensor:
        width = query.values.shape[-1]
        if width % 8 or width > _WIDEST or (dropout and not knows_dropout):
            return _padded(query, key, value, window, dropout, F.scaled_dot_product_attention)
        out: Tensor = function(
            *(x.values.to(_cast(x.values.dtype)) for x in (query, key, value)),
            query.offsets,
            key.offsets,
            query.max_length,
            key.max_length,
            window_size=(-1, -1) if window is None else (window, window),
            **({"dropout_p": dropout} if knows_dropout else {}),
        )
        return out

    return run


def _cast(dtype: torch.dtype) -> torch.dtype:
    """To what autocast on CUDA turns numbers; flash attention it does not know."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else dtype
