"""Attention over rows of different lengths: one function, three implementations that agree.

Rows are packed: queries, keys and values of all rows stand back to back in one tensor, and offsets say where
a row begins. So no computation is spent on padding. `eager` writes the formula out on padded rows; tests
compare the others with `eager`. `sdpa` is torch's fused attention, or on a CPU the kernel
``ragged_attention``. `flash` is the variable-length kernel of Dao et al. 2022, "FlashAttention".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from irkit.core.ragged import Ragged
from irkit.encoder.encoder_config import Pooling
from irkit.errors import BadValueError, MissingDependencyError

_ROWS = 128  # rotated together: in float32 they stay in the cache
_WIDEST = 256  # heads of flash attention, whose widths are multiples of 8
_NEEDS = (
    "attention='flash' needs a torch built with it, or flash-attn: docs/quickstart.md says how to install"
)

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
    """Compute softmax attention within each row, without attention between rows.

    Args:
        query: Ragged ``(total_q, heads, head_dim)``; rows may be shorter than those of ``key`` (pooling).
        key: Ragged ``(total_k, heads, head_dim)``, as many rows as ``query``. A row may lack the last tokens,
            which are then not attended to.
        value: Values, with the shape and the lengths of ``key``.
        backend: ``eager`` writes out the formula on padded rows; ``sdpa`` is fused attention: torch's, or
            on a CPU the kernel ``ragged_attention``; ``flash`` is the unpadded flash attention of CUDA.
        window: Largest distance, in tokens, at which tokens attend to each other; None is any.
        dropout: Probability of dropping an attention weight.
        pooling: Pooling that shortened the queries: ``window`` then counts from the middle of the tokens
            that a query stands for. None if the queries were not pooled.

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


def check_lengths(tokens: Ragged, most: int | None) -> None:
    """Raise BadValueError if a row has more than ``most`` tokens; None allows any length."""
    if most is not None and tokens.max_length > most:
        raise BadValueError(
            f"Encoder: a row of {tokens.max_length} tokens exceeds the {most} positions of the model; "
            "truncate it in the tokenizer"
        )


def leading(tokens: Ragged, lengths: Tensor) -> Ragged:
    """Return, as Ragged, the positions in ``tokens.values`` of the first ``lengths (n,)`` tokens per row."""
    most = torch.minimum(lengths.cpu(), tokens.lengths)
    return tokens.part_positions(torch.zeros_like(most), most)


def pick_backend(wish: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """Return the backend for ``wish``, one of auto, eager, sdpa and flash.

    ``auto`` is flash on CUDA in half precision, autocast included, if a kernel is installed that runs on the
    GPU; otherwise it is sdpa. If another precision or a further package would make flash possible, a warning
    says so once per process.

    Raises:
        BadValueError: The wish is unknown, or is flash on a device or in a precision that it cannot run in.
        MissingDependencyError: The wish is flash, and neither torch nor flash-attn has a kernel.
    """
    modern = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    able = modern and _cast(dtype) in (torch.float16, torch.bfloat16)
    if wish == "auto":
        if able and _flash_kernel() is not None:
            return "flash"
        if modern:
            _tell(_slow_path(_cast(dtype)))
        return "sdpa"
    if wish == "flash":
        if not able:
            raise BadValueError(
                f"attention='flash' needs float16 or bfloat16 on CUDA from Ampere on, got {dtype} on {device}"
            )
        if _flash_kernel() is None:
            raise MissingDependencyError(_NEEDS)
        return "flash"
    if wish not in ("eager", "sdpa"):
        raise BadValueError(f"attention={wish!r} is unknown; expected auto, eager, sdpa or flash")
    return "eager" if wish == "eager" else "sdpa"


def rotary_table(positions: Tensor, base: float, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``(total, 1, head_dim / 2)`` of the rotary angles.

    Args:
        positions: ``(total,)``; may be fractional.
        base: The slowest rotation is ``1 / base`` radians per position.
        head_dim: Width of a head.

    Source: Su et al. 2021 (RoFormer), section 3.2.2.
    """
    frequencies = base ** -(torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Rotate pairs of ``x (total, heads, head_dim)`` by the angles of `rotary_table`.

    In inference on a CPU neighbouring pairs (``interleaved``) are rotated in ``x`` itself, because allocating
    memory would cost as much as the rotation.
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
    slots_k = key.slots(key.max_length)  # once for all three: no element of a row is looked for by a mask
    slots_q = slots_k if query.offsets is key.offsets else query.slots(query.max_length)
    q, k, v = _spread(query, slots_q), _spread(key, slots_k), _spread(value, slots_k)
    positions = torch.arange(key.max_length, device=key.device)
    mask = (positions < key.offsets.diff()[:, None])[:, None, None, :]
    mask[..., :1] = True  # no softmax over nothing in an empty row: its gradient would be NaN
    if window is not None:
        rows = torch.arange(query.max_length, device=key.device)
        if pooling:
            rows = pooling.centres(rows)
        near = (rows[:, None] - positions[None, :]).abs() <= window
        mask = mask & near
        blind = ~mask.any(-1, keepdim=True)  # what is out of reach of all keys, and padding
        mask[..., :1] |= blind
    out = function(q, k, v, attn_mask=mask, dropout_p=dropout)
    if window is not None:
        out = out.masked_fill(blind, 0)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, slots_q)


def _spread(rows: Ragged, slots: Tensor) -> Tensor:
    """Pad rows ``(total, heads, head_dim)`` with zeros to ``(n, heads, longest, head_dim)``.

    ``slots (total,)`` is the position of each token in the padded rows, ``row * longest + position``.
    """
    padded = rows.values.new_zeros(len(rows) * rows.max_length, *rows.values.shape[1:])
    padded.index_copy_(0, slots, rows.values)
    return padded.view(len(rows), rows.max_length, *padded.shape[1:]).transpose(1, 2)


def _equally_long(rows: Ragged) -> bool:
    return len(rows) > 0 and 0 < rows.max_length == int(rows.lengths.min())


def _eager(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, dropout_p: float) -> Tensor:
    weights = q / q.shape[-1] ** 0.5 @ k.transpose(-1, -2)
    if attn_mask is not None:
        weights = weights.masked_fill_(~attn_mask, float("-inf"))
    exact = torch.promote_types(v.dtype, torch.float32)
    return F.dropout(weights.softmax(-1, dtype=exact).to(v.dtype), dropout_p) @ v


def _flash(query: Ragged, key: Ragged, value: Ragged, window: int | None, dropout: float) -> Tensor:
    kernel, width = _flash_kernel(), query.values.shape[-1]
    if kernel is None:
        raise MissingDependencyError(_NEEDS)
    if not len(query.values):  # which kernels refuse
        return query.values
    if width % 8 or width > _WIDEST:
        _tell(f"attention: flash attention has no heads of width {width}; padded attention runs instead")
        return _padded(query, key, value, window, dropout, F.scaled_dot_product_attention)
    packed = (x.values.to(_cast(x.values.dtype)) for x in (query, key, value))
    lengths = query.offsets, key.offsets, query.max_length, key.max_length
    reach = -1 if window is None else window
    return kernel(*packed, *lengths, dropout_p=dropout, window_size=(reach, reach))


def _flash_kernel() -> Callable[..., Tensor] | None:
    """Return flash-attn's function, else torch's kernel with the same arguments; None if neither is there."""
    return _flash_attn() or (_torch_flash if torch.backends.cuda.is_flash_attention_available() else None)


@cache
def _flash_attn() -> Callable[..., Tensor] | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func  # type: ignore[no-any-return]


def _torch_flash(*rows: Tensor | int, dropout_p: float, window_size: tuple[int, int]) -> Tensor:
    """Call torch's kernel of flash attention with the arguments of flash-attn's function.

    `torch.nn.attention.varlen.varlen_attn` calls the same kernel, but has no dropout. Gradients flow through
    the kernel.
    """
    left, right = window_size
    options = {"return_debug_mask": False, "window_size_left": left, "window_size_right": right}
    out: Tensor = torch.ops.aten._flash_attention_forward(*rows, dropout_p, is_causal=False, **options)[0]
    return out


def _slow_path(dtype: torch.dtype) -> str:
    if dtype in (torch.float16, torch.bfloat16):
        return f"attention: padded attention runs, several times slower on CUDA; {_NEEDS}"
    return (
        f"attention: {str(dtype).removeprefix('torch.')} on CUDA is several times slower than bfloat16, and "
        "its attention is padded; load the model with dtype='auto' or 'bfloat16', or train with bf16: true. "
        "attention='sdpa' keeps it without this warning"
    )


@cache
def _tell(message: str) -> None:
    """Give the warning ``message``, unless this process has given the same warning before."""
    warnings.warn(message, stacklevel=2)


def _cast(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of autocast on CUDA, or ``dtype`` outside autocast.

    Flash attention casts its inputs to this dtype, because autocast does not cover it.
    """
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else dtype
