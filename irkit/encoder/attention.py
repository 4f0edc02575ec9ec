"""Attention over rows of different lengths: one function, three implementations that agree.

Rows are packed: queries, keys and values of all rows stand back to back in one tensor, and offsets say where
a row begins. So no computation is spent on padding. `eager` writes the formula out on padded rows; tests
compare the others with `eager`. `sdpa` is torch's fused attention, or on a CPU the kernel
``ragged_attention``. `flash` is the variable-length kernel of Dao et al. 2022, "FlashAttention".
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from irkit.core.ragged import Ragged
from irkit.encoder.encoder_config import Disentangled, Pooling
from irkit.errors import BadValueError, MissingDependencyError

_SCORES = 1 << 26  # padded scores with relative positions that are computed at once
_WIDEST = 256  # heads of flash attention, whose widths are multiples of 8
_NEEDS = (
    "attention='flash' needs a torch built with it, or flash-attn: docs/quickstart.md says how to install"
)

Backend = Literal["eager", "sdpa", "flash"]


class PositionTerms(NamedTuple):
    """Keys and queries of relative positions, whose products with queries and keys are added to the scores.

    Attributes:
        keys: ``(rows, heads, head_dim)``, multiplied by the queries of tokens; None has none.
        queries: ``(rows, heads, head_dim)``, multiplied by the keys of tokens; None has none.
        rows: ``(2 * n - 1,)`` rows of both by distance: number ``n - 1 + d`` for a key ``d`` tokens before
            its query. Further distances are as the furthest.
    """

    keys: Tensor | None
    queries: Tensor | None
    rows: Tensor


def attend(
    query: Ragged,
    key: Ragged,
    value: Ragged,
    *,
    backend: Backend,
    window: int | None = None,
    causal: bool = False,
    bias: Tensor | None = None,
    positions: PositionTerms | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    pooling: Pooling | None = None,
    rough: bool = False,
) -> Tensor:
    """Compute softmax attention within each row, without attention between rows.

    Args:
        query: Ragged ``(total_q, heads, head_dim)``; rows may be shorter than rows of ``key`` (pooling).
        key: Ragged ``(total_k, key_heads, head_dim)``, as many rows as ``query``. A row may lack the last
            tokens, which are then not attended to. Each head serves ``heads / key_heads`` heads of queries.
        value: Values, with the shape and the lengths of ``key``.
        backend: ``eager`` writes out the formula on padded rows; ``sdpa`` is fused attention: torch's, or
            on a CPU the kernel ``ragged_attention``; ``flash`` is the unpadded flash attention of CUDA.
        window: Largest distance, in tokens, at which tokens attend to each other; None is any.
        causal: Whether no token attends to tokens after it.
        bias: ``(heads, 2 * n - 1)``, added to the scores: number ``n - 1 + d`` for a key ``d`` tokens after
            its query. No row is longer than ``n``. None adds no bias.
        positions: Products with relative positions that are added to the products of queries and keys.
        softcap: Scores are bent to this limit, ``softcap * tanh(score / softcap)``; None leaves them.
        dropout: Probability of dropping an attention weight.
        pooling: Pooling that shortened the queries: ``window`` then counts from the middle of the tokens
            that a query stands for. None if the queries were not pooled.
        rough: Whether `ragged_attention` may round float32 numbers to bfloat16 before it multiplies them.

    Returns:
        ``(total_q, heads, head_dim)``, packed as ``query``; zeros where no key is near enough.
    """
    reach = max(query.max_length, key.max_length) + (pooling.kernel if pooling else 0)
    if window is not None and reach <= window + 1:
        window = None
    rules = _Rules(window, causal, bias, softcap, pooling, positions)
    if positions is not None:  # a few rows at a time: their padded scores take memory
        function = _eager if backend == "eager" or softcap is not None else F.scaled_dot_product_attention
        size = max(1, _SCORES // (query.values.shape[1] * max(reach, 1) ** 2))
        rows = [slice(i, i + size) for i in range(0, len(query), size)]
        done = [_padded(query[row], key[row], value[row], rules, dropout, function) for row in rows]
        return torch.cat(done) if len(done) > 1 else done[0] if done else query.values
    # what only the written-out formula can do; then what only a padded function can
    alike = query.lengths is key.lengths or torch.equal(query.lengths, key.lengths)
    apart = pooling is not None or not alike
    if softcap is not None or (apart and (window is not None or causal or bias is not None)):
        return _padded(query, key, value, rules, dropout, _eager)
    learns = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    if backend == "flash" and bias is None:
        return _flash(query, key, value, rules, dropout)
    if backend == "eager":
        return _padded(query, key, value, rules, dropout, _eager)
    if query.device.type == "cpu" and not learns:
        from irkit_kernels.ragged_attention import ragged_attention

        packed = (query.values, key.values, value.values, query.offsets, key.offsets)
        return ragged_attention(*packed, window, dropout, causal=causal, bias=bias, rough=rough)
    if query.device.type == "cpu":  # a row at a time: padded biases of all rows would take far more memory
        lone = [slice(i, i + 1) for i, length in enumerate(query.lengths.tolist()) if length]
        parts = ((query[row], key[row], value[row]) for row in lone)
        fused = F.scaled_dot_product_attention
        return torch.cat([query.values[:0], *(_padded(*part, rules, dropout, fused) for part in parts)])
    return _padded(query, key, value, rules, dropout, F.scaled_dot_product_attention)


class _Rules(NamedTuple):
    """What decides the score of a query and a key beside their product, see `attend`."""

    window: int | None
    causal: bool
    bias: Tensor | None
    softcap: float | None
    pooling: Pooling | None
    positions: PositionTerms | None


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


def relative_bias(table: Tensor, furthest: int, longest: int) -> Tensor:
    """Return the biases ``(heads, 2 * longest - 1)`` of distances from ``1 - longest`` to ``longest - 1``.

    Args:
        table: ``(buckets, heads)`` learned biases, see `RelativeBias`.
        furthest: Distances from here on share the last bucket.
        longest: Length of the longest row.
    """
    half = len(table) // 2
    near = half // 2  # so many distances have a bucket each; the others are spaced by their logarithm
    distances = torch.arange(1 - longest, longest, device=table.device)
    apart = distances.abs()
    far = near + (torch.log(apart.float() / near) / math.log(furthest / near) * (half - near)).long()
    buckets = torch.where(apart < near, apart, far.clamp(max=half - 1)) + half * (distances > 0)
    return table[buckets].T


def alibi_bias(heads: int, longest: int, device: torch.device | None = None) -> Tensor:
    """Return the biases ``(heads, 2 * longest - 1)`` of ALiBi in both directions: a slope times the distance.

    The slopes of ``2^k`` heads are the powers 1, 2, ... of ``2^(-8 / 2^k)``. For other numbers, the slopes
    for the power of two below come first, then every other slope for twice that power.

    Examples:
        >>> alibi_bias(8, 3)[:2].tolist()
        [[-1.0, -0.5, -0.0, -0.5, -1.0], [-0.5, -0.25, -0.0, -0.25, -0.5]]

    Source: Press et al. 2022 (ALiBi), section 3; Günther et al. 2023 (Jina 2, arXiv 2310.19923), section 3.
    """
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    slopes += [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
    distances = torch.arange(1 - longest, longest, device=device).abs()
    return -torch.tensor(slopes, device=device)[:, None] * distances


def distance_rows(settings: Disentangled, longest: int, device: torch.device | None = None) -> Tensor:
    """Return the rows ``(2 * longest - 1,)`` of relative positions from ``1 - longest`` to ``longest - 1``.

    There are ``2 * settings.span`` rows; a distance is positive if the key is before its query.

    Source: DeBERTa-v2, whose buckets grow with the logarithm of the distance.
    """
    distances = torch.arange(1 - longest, longest, device=device)
    if settings.buckets:
        near = settings.buckets // 2
        apart = distances.abs().clamp(min=near)
        whole = torch.tensor((settings.furthest - 1) / near, device=device)  # float32, as the source has it
        grown = torch.log(apart / near) / torch.log(whole) * (near - 1)
        far = grown.ceil().long() + near
        distances = torch.where(apart <= near, distances, far * distances.sign())
    return (distances + settings.span).clamp(0, 2 * settings.span - 1)


def _position_scores(q: Tensor, k: Tensor, terms: PositionTerms) -> Tensor:
    """Return the products ``(n, heads, queries, keys)`` of tokens and positions, over ``sqrt(d)``."""
    positions = [torch.arange(x.shape[2], device=x.device) for x in (q, k)]
    furthest = len(terms.rows) // 2
    apart = (positions[0][:, None] - positions[1]).clamp(-furthest, furthest)
    rows = terms.rows[apart + furthest].expand(*q.shape[:2], -1, -1)
    scores = []
    if terms.keys is not None:
        scores.append((q @ terms.keys.permute(1, 2, 0)).gather(-1, rows))
    if terms.queries is not None:
        scores.append((k @ terms.queries.permute(1, 2, 0)).gather(-1, rows.mT).mT)
    return (scores[0] if len(scores) == 1 else scores[0] + scores[1]) / float(q.shape[-1] ** 0.5)


def _padded(
    query: Ragged, key: Ragged, value: Ragged, rules: _Rules, dropout: float, function: Callable[..., Tensor]
) -> Tensor:
    options = {"dropout_p": dropout} | ({"softcap": rules.softcap} if rules.softcap is not None else {})
    if key.values.shape[1] != query.values.shape[1]:  # a copy of each head for each head of queries
        times = query.values.shape[1] // key.values.shape[1]
        key, value = (x.with_values(x.values.repeat_interleave(times, dim=1)) for x in (key, value))
    biased = rules.bias is not None or rules.positions is not None
    positioned = rules.window is not None or rules.causal or biased
    if not positioned and _equally_long(query) and _equally_long(key):  # nothing to pad, nothing to mask
        whole = (x.values.view(len(x), -1, *x.values.shape[1:]).transpose(1, 2) for x in (query, key, value))
        return function(*whole, attn_mask=None, **options).transpose(1, 2).flatten(0, 1)

    # pad; slots are computed once for all three: no element of a row is looked for by a mask
    slots_k = key.slots(key.max_length)
    slots_q = slots_k if query.offsets is key.offsets else query.slots(query.max_length)
    q, k, v = _spread(query, slots_q), _spread(key, slots_k), _spread(value, slots_k)

    # which keys each query sees
    positions = torch.arange(key.max_length, device=key.device)
    mask = (positions < key.offsets.diff()[:, None])[:, None, None, :]
    mask[..., :1] = True  # no softmax over nothing in an empty row: its gradient would be NaN
    if positioned:
        rows = torch.arange(query.max_length, device=key.device)
        distance = positions[None, :] - (rules.pooling.centres(rows) if rules.pooling else rows)[:, None]
        if rules.window is not None:
            mask = mask & (distance.abs() <= rules.window)
        if rules.causal:
            mask = mask & (distance <= 0)
        blind = ~mask.any(-1, keepdim=True)  # what is out of reach of all keys, and padding
        mask[..., :1] |= blind
        if rules.bias is not None:
            biases = rules.bias[:, distance + rules.bias.shape[1] // 2].to(q.dtype)[None]
        if rules.positions is not None:
            biases = _position_scores(q, k, rules.positions)
        if biased:
            mask = biases.masked_fill(~mask, float("-inf"))
    out = function(q, k, v, attn_mask=mask, **options)
    if positioned:
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


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    dropout_p: float,
    softcap: float | None = None,
) -> Tensor:
    weights = q / q.shape[-1] ** 0.5 @ k.transpose(-1, -2)
    if softcap is not None:
        weights = (weights / softcap).tanh() * softcap
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        weights = weights + attn_mask
    elif attn_mask is not None:
        weights = weights.masked_fill_(~attn_mask, float("-inf"))
    exact = torch.promote_types(v.dtype, torch.float32)
    return F.dropout(weights.softmax(-1, dtype=exact).to(v.dtype), dropout_p) @ v


def _flash(query: Ragged, key: Ragged, value: Ragged, rules: _Rules, dropout: float) -> Tensor:
    kernel, width = _flash_kernel(), query.values.shape[-1]
    if kernel is None:
        raise MissingDependencyError(_NEEDS)
    if not len(query.values):  # which kernels refuse
        return query.values
    if width % 8 or width > _WIDEST:
        _tell(f"attention: flash attention has no heads of width {width}; padded attention runs instead")
        return _padded(query, key, value, rules, dropout, F.scaled_dot_product_attention)
    packed = (x.values.to(_cast(x.values.dtype)) for x in (query, key, value))
    lengths = query.offsets, key.offsets, query.max_length, key.max_length
    reach = -1 if rules.window is None else rules.window
    return kernel(*packed, *lengths, dropout_p=dropout, window_size=(reach, 0 if rules.causal else reach))


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
