"""Rotary positions: the angles of each token, and the rotation of queries and keys by them.

Source: Su et al. 2021 (RoFormer), section 3.2.2.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from irkit_kernels.rotary import fits_rotary, rotary
from pydantic import Field
from torch import Tensor

from irkit.config import Config
from irkit.encoder.inference import is_inference

_ROWS = 128  # rotated together: in float32 they stay in the cache


class RotaryScaling(Config):
    """How rotary frequencies are slowed down for rows longer than the rows of pre-training.

    Attributes:
        kind: ``linear`` divides all frequencies by ``factor``; ``ntk`` slows down the low ones more than the
            high ones (the model ``new``); ``yarn`` and ``llama3`` divide the low ones and keep the high ones.
        factor: By how much rows may be longer.
        length: Longest row of the pre-training, for ``yarn`` and ``llama3``.
        slow: Up to this number of turns within ``length``, a frequency is divided by ``factor``.
        fast: From this number of turns on, a frequency is kept; between the two it is interpolated.
        whole: Whether ``yarn`` rounds both limits to whole frequencies.
        amplitude: Factor of cosines and sines.

    Sources: Peng et al. 2023 (YaRN), section 3; ``modeling_rope_utils.py`` of transformers (llama3).
    """

    kind: Literal["linear", "ntk", "yarn", "llama3"]
    factor: float = Field(ge=1)
    length: int = Field(default=1, ge=1)
    slow: float = Field(default=1, gt=0)
    fast: float = Field(default=32, gt=0)
    whole: bool = True
    amplitude: float = Field(default=1, gt=0)


def frequencies(
    base: float, head_dim: int, scaling: RotaryScaling | None = None, device: torch.device | None = None
) -> Tensor:
    """Return the angles per position ``(head_dim / 2,)`` of the pairs of a head.

    Args:
        base: The slowest rotation is ``1 / base`` radians per position.
        head_dim: Width of a head.
        scaling: How the frequencies are slowed down; None leaves them.
        device: Where they are computed; None is the CPU.
    """
    device = device or torch.device("cpu")
    shares = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    plain: Tensor = 1 / base**shares
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "ntk":
        slower: Tensor = 1 / (base * scaling.factor) ** shares
        return slower / math.pow(scaling.factor, 2 / head_dim)
    if scaling.kind == "llama3":
        turns = scaling.length * plain / (2 * math.pi)
        share = ((turns - scaling.slow) / (scaling.fast - scaling.slow)).clamp(0, 1)
    else:  # the pair, counted as a fraction, that makes so many turns
        first, last = (
            head_dim * math.log(scaling.length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (scaling.fast, scaling.slow)
        )
        if scaling.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        pairs = torch.arange(head_dim // 2, device=device).float()
        share = 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return plain * share + plain / scaling.factor * (1 - share)


def rotary_table(
    positions: Tensor, base: float, head_dim: int, scaling: RotaryScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``(total, 1, head_dim / 2)`` of the rotary angles.

    Args:
        positions: ``(total,)``; may be fractional.
        base: The slowest rotation is ``1 / base`` radians per position.
        head_dim: Width of a head.
        scaling: How the frequencies are slowed down; None leaves them.
    """
    angles = positions.float()[:, None, None] * frequencies(base, head_dim, scaling, positions.device)
    cos, sin = angles.cos(), angles.sin()
    if scaling is None or scaling.amplitude == 1:
        return cos, sin
    return cos * scaling.amplitude, sin * scaling.amplitude


def rotate(x: Tensor, table: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Rotate pairs of ``x (total, heads, head_dim)`` by the angles of `rotary_table`.

    With ``interleaved`` a pair is two neighbouring numbers; otherwise it is a number of the first half of a
    head and the same number of the second half. Without gradients a kernel rotates in one pass, in float32.
    On a CPU it rotates halves of heads only. Allocating memory would cost as much there as the rotation, so
    neighbouring pairs are rotated in ``x`` itself.
    """
    cos, sin = table
    alone = is_inference()
    if alone and x.is_cuda and fits_rotary(x, interleaved):
        return rotary(x, cos, sin, interleaved)
    in_place = alone and x.is_cpu
    if interleaved:  # a pair is a complex number; their product is one pass, in float32 whatever the dtype
        kind, turn = torch.promote_types(x.dtype, cos.dtype), torch.complex(cos, sin)
        if not in_place:
            rotated = torch.view_as_complex(torch.unflatten(x.to(kind), -1, (-1, 2))) * turn
            return torch.view_as_real(rotated).flatten(-2).to(x.dtype)
        for part, by in zip(torch.split(x, _ROWS), torch.split(turn, _ROWS), strict=True):
            wide = part.to(kind)  # the part itself in float32
            torch.view_as_complex(torch.unflatten(wide, -1, (-1, 2))).mul_(by)
            part.copy_(wide)
        return x
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if in_place and fits_rotary(x):
        return rotary(x, cos, sin)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
