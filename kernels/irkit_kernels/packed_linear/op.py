"""Linear layers for inference on the CPU that multiply int8 or bfloat16; float32 goes in and comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from .cpu_tile import Kind
from .reference import ACTIVATIONS, quantize_weight

if TYPE_CHECKING:
    from .cpu_kernel import AddedNorm

__all__ = [
    "ACTIVATIONS",
    "Kind",
    "PackedLinear",
    "has_fast",
    "pack_weight",
    "packed_add_norm",
    "packed_feed_forward",
    "packed_linear",
]


def has_fast(kind: Kind) -> bool:
    """Return whether this CPU multiplies numbers of a kind faster than float32; if not, the op is slow.

    Args:
        kind: ``"int8"``, which needs AVX512-VNNI, or ``"bfloat16"``, which needs AVX512-BF16.
    """
    from .cpu_kernel import has_dot

    return has_dot(kind)


def pack_weight(
    weight: Tensor, bias: Tensor | None = None, gated: bool = False, kind: Kind = "int8"
) -> Tensor:
    """Round the weight of a linear layer, and pack it for `packed_linear`.

    Args:
        weight: ``(n, k)`` floating point, like the weight of `torch.nn.Linear`.
        bias: ``(n,)``, stored as float32.
        gated: Whether the first half of the features is activated, and multiplied by the second half.
        kind: int8, with one scale per output feature, or bfloat16.

    Returns:
        An opaque tensor of integers, of about ``n * k`` bytes, or twice as many for bfloat16.

    Raises:
        ValueError: The shapes do not fit, a number is not finite, k is above 66,311, or the kind is unknown.
    """
    from .cpu_kernel import MAX_K, STORED, pack

    if kind not in STORED:
        raise ValueError(f"pack_weight: kind {kind!r} is unknown; expected one of {(*STORED,)}")
    weight = weight.detach().float().cpu()
    if weight.dim() != 2 or 0 in weight.shape or weight.shape[1] > MAX_K:
        raise ValueError(
            f"pack_weight: got a weight of shape {tuple(weight.shape)}, expected (n, k), k <= {MAX_K}"
        )
    if bias is not None:
        bias = bias.detach().float().cpu()
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"pack_weight: got a bias of shape {tuple(bias.shape)}, expected ({len(weight)},)"
            )
    if not weight.isfinite().all() or not (bias is None or bias.isfinite().all()):
        raise ValueError("pack_weight: the weight or the bias holds NaN or infinity")
    if gated and len(weight) % 2:
        raise ValueError(f"pack_weight: got {len(weight)} features, expected an even number for gated=True")
    biases = None if bias is None else bias.numpy()
    if kind == "bfloat16":
        return torch.from_numpy(pack(weight.bfloat16().view(torch.int16).numpy(), None, biases, gated))
    q, scale = quantize_weight(weight)
    return torch.from_numpy(pack(q.numpy(), scale.numpy(), biases, gated))


def packed_linear(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    activation: str = "none",
    gated: bool = False,
    half: bool = False,
) -> Tensor:
    """Compute ``activation(x @ weight.T + bias)`` with x and weight rounded to int8 or bfloat16.

    A ``gated`` layer computes ``2 n`` features, and returns the first n activated times the last n.

    The result of a row depends on this row alone. In int8 each row of x has a scale of its own, and sums are
    int32. A row is NaN if it holds NaN or infinity, or if the difference of its largest and smallest numbers
    overflows float32. A row whose difference is below 1e-30 counts as zeros. In bfloat16, sums are float32,
    and numbers below 1e-38 count as zeros. The call uses `torch.get_num_threads` threads and releases the
    interpreter lock.

    Args:
        x: ``(..., k)`` float32 or bfloat16.
        packed: What `pack_weight` made of a weight ``(n, k)``, or ``(2 n, k)`` if gated, and a bias; its
            dtype tells the kind.
        out_features: n.
        activation: none, gelu (the one with erf, to an error of 3e-5 + 4e-7 * abs(y)), gelu_tanh or silu
            (both to an error of 2e-6 * (1 + abs(y))).
        gated: As for `pack_weight`.
        half: Return bfloat16; n must be a multiple of 64 then, or of 32 if gated.

    Returns:
        ``(..., n)`` float32, or bfloat16 if ``half``.

    Raises:
        RuntimeError: An input requires a gradient, which this layer does not compute.
        TypeError: ``x`` is neither float32 nor bfloat16, or ``packed`` is no packed weight.
        ValueError: The shapes do not fit, the activation is unknown, or a tensor is not on the CPU.

    Examples:
        >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> packed_linear(torch.tensor([[1.0, 0.0]]), pack_weight(weight), 2).round(decimals=1)
        tensor([[1., 3.]])
    """
    _check_gradient("packed_linear", x)
    if torch.compiler.is_compiling():
        return torch.ops.irkit.packed_linear(x, packed, out_features, activation, gated, half)
    # 10 us less than through torch's dispatcher
    return _cpu(x, packed, out_features, activation, gated, half)


def _cpu(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    activation: str = "none",
    gated: bool = False,
    half: bool = False,
) -> Tensor:
    from .cpu_kernel import linear
    from .cpu_tile import panel_columns

    rows, kind = _checked("packed_linear", x, packed, out_features, activation, gated)
    if half and out_features % panel_columns(gated):
        raise ValueError(
            f"packed_linear: got half=True and out_features {out_features}, expected a multiple of "
            f"{panel_columns(gated)}"
        )
    out = rows.new_empty(len(rows), out_features, dtype=torch.bfloat16 if half else torch.float32)
    linear(rows, packed.contiguous(), out, activation, gated, kind)
    return out.view(*x.shape[:-1], out_features)


def _check_gradient(operation: str, x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(f"{operation}: has no gradient; call it under torch.no_grad() or inference_mode()")


def _checked(
    operation: str, x: Tensor, packed: Tensor, out_features: int, activation: str, gated: bool
) -> tuple[Tensor, Kind]:
    """Check the arguments of a layer; return ``x`` as rows ``(m, k)`` without gaps, and the kind."""
    from .cpu_kernel import kind_of, packed_shape

    kind = kind_of(packed)
    if x.dtype not in (torch.float32, torch.bfloat16) or kind is None:
        raise TypeError(
            f"{operation}: got x {x.dtype}, packed {packed.dtype}; expected float32 or bfloat16, and uint8 "
            "or int16 as pack_weight returns them"
        )
    if not (x.is_cpu and packed.is_cpu):
        raise ValueError(f"{operation}: runs on the CPU, got x on {x.device} and packed on {packed.device}")
    if x.dim() == 0 or tuple(packed.shape) != packed_shape(out_features, x.shape[-1], gated, kind):
        raise ValueError(
            f"{operation}: x {tuple(x.shape)}, out_features {out_features} and gated={gated} do not fit the "
            f"packed weight {tuple(packed.shape)}; pass x (..., k), the n of the weight (n, k) that was "
            "packed, and the gated of its packing"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{operation}: activation {activation!r} is unknown; expected one of {(*ACTIVATIONS,)}"
        )
    return x.reshape(-1, x.shape[-1]).contiguous(), kind


# What torch.library.custom_op does, without its import of torch._dynamo, 2 s, at the first call.
torch.library.define(
    "irkit::packed_linear",
    "(Tensor x, Tensor packed, int out_features, str activation='none', bool gated=False, bool half=False)"
    " -> Tensor",
)
torch.library.impl("irkit::packed_linear", "cpu", _cpu)


@torch.library.register_fake("irkit::packed_linear")  # type: ignore[untyped-decorator]
def _(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    activation: str = "none",
    gated: bool = False,
    half: bool = False,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features, dtype=torch.bfloat16 if half else torch.float32)


class PackedLinear(nn.Module):
    """`torch.nn.Linear` for inference in int8 or bfloat16, optionally followed by an activation and a gate.

    Examples:
        >>> layer = PackedLinear(nn.Linear(8, 3), activation="gelu")
        >>> layer(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 3])
    """

    packed: Tensor

    def __init__(
        self,
        linear: nn.Linear,
        *,
        activation: str = "none",
        gated: bool = False,
        kind: Kind = "int8",
        writes_half: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features // (2 if gated else 1)
        self.activation, self.gated, self.kind = activation, gated, kind
        self.writes_half = writes_half
        self.register_buffer("packed", pack_weight(linear.weight, linear.bias, gated, kind))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``, float32 or, if ``writes_half``, bfloat16."""
        return packed_linear(x, self.packed, self.out_features, self.activation, self.gated, self.writes_half)

    def extra_repr(self) -> str:
        """Return the arguments that ``print`` displays."""
        gated = ", gated=True" if self.gated else ""
        sizes = f"{self.in_features}, {self.out_features}"
        half = ", writes_half=True" if self.writes_half else ""
        return f"{sizes}, activation={self.activation!r}{gated}, kind={self.kind!r}{half}"


def packed_feed_forward(x: Tensor, up: PackedLinear, down: PackedLinear) -> Tensor:
    """Compute ``down(up(x))``, with the same numbers, while the hidden features are in the cache.

    Args:
        x: ``(..., up.in_features)`` float32.
        up: The first layer.
        down: The second layer, of the same kind, with neither activation nor gate.

    Returns:
        ``(..., down.out_features)`` float32.

    Raises:
        RuntimeError: An input requires a gradient, which these layers do not compute.
        TypeError: ``x`` is not float32.
        ValueError: The shapes or kinds do not fit, the second layer has an activation or a gate, or a tensor
            is not on the CPU.

    Examples:
        >>> up, down = PackedLinear(nn.Linear(8, 32), activation="gelu"), PackedLinear(nn.Linear(32, 8))
        >>> packed_feed_forward(torch.randn(2, 8), up, down).shape
        torch.Size([2, 8])
    """
    _check_pair("packed_feed_forward", x, up, down)
    if torch.compiler.is_compiling():
        return cast(Tensor, down(up(x)))
    return _two_layers("packed_feed_forward", x, up, down, None)


def packed_add_norm(x: Tensor, layers: Sequence[PackedLinear], added: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Compute ``norm(added + y)``, with y what one layer, or two, make of ``x``, with the same numbers.

    Args:
        x: ``(..., k)`` float32; for one layer also bfloat16.
        layers: One layer, or two as `packed_feed_forward` takes them.
        added: ``(..., n)`` float32.
        norm: A norm over n features with weight and bias in float32.

    Returns:
        ``(..., n)`` float32.

    Raises:
        RuntimeError: An input requires a gradient, which this operation does not compute.
        TypeError: A tensor has another dtype.
        ValueError: The shapes do not fit, the norm lacks weight or bias, or a tensor is not on the CPU.

    Examples:
        >>> layers, norm = [PackedLinear(nn.Linear(8, 3))], nn.LayerNorm(3)
        >>> with torch.no_grad():
        ...     packed_add_norm(torch.randn(2, 8), layers, torch.ones(2, 3), norm).shape
        torch.Size([2, 3])
    """
    from .cpu_kernel import AddedNorm, linear

    if len(layers) not in (1, 2):
        raise ValueError(f"packed_add_norm: got {len(layers)} layers, expected one or two")
    first, last = layers[0], layers[-1]
    if len(layers) == 2:
        _check_pair("packed_add_norm", x, first, last)
    n, weights = last.out_features, (norm.weight, norm.bias)
    if any(part is None or part.shape != (n,) for part in weights) or added.shape != (*x.shape[:-1], n):
        raise ValueError(
            f"packed_add_norm: got {norm} and added {tuple(added.shape)} for {n} features; expected a "
            f"LayerNorm over them with weight and bias, and added {(*x.shape[:-1], n)}"
        )
    if any(part.dtype != torch.float32 for part in (added, *weights)) or last.writes_half:
        raise TypeError("packed_add_norm: expected added, norm and the result of the layers in float32")
    if torch.compiler.is_compiling():
        return cast(Tensor, norm(added + (last(first(x)) if len(layers) == 2 else last(x))))
    _check_gradient("packed_add_norm", added)
    sums = AddedNorm(added.reshape(-1, n).contiguous(), norm.weight.detach(), norm.bias.detach(), norm.eps)
    if len(layers) == 2:
        return _two_layers("packed_add_norm", x, first, last, sums)
    _check_gradient("packed_add_norm", x)
    rows, kind = _checked("packed_add_norm", x, last.packed, n, last.activation, last.gated)
    out = rows.new_empty(len(rows), n, dtype=torch.float32)
    linear(rows, last.packed, out, last.activation, last.gated, kind, sums)
    return out.view(added.shape)


def _check_pair(operation: str, x: Tensor, up: PackedLinear, down: PackedLinear) -> None:
    wanted = up.out_features, "none", False, up.kind
    if (down.in_features, down.activation, down.gated, down.kind) != wanted:
        raise ValueError(
            f"{operation}: the second layer is PackedLinear({down.extra_repr()}); expected in_features "
            f"{up.out_features}, no activation, no gate, and kind={up.kind!r}"
        )
    if x.dtype != torch.float32:
        raise TypeError(f"{operation}: got x {x.dtype}, expected float32")


def _two_layers(
    operation: str, x: Tensor, up: PackedLinear, down: PackedLinear, norm: AddedNorm | None
) -> Tensor:
    from .cpu_kernel import feed_forward

    _check_gradient(operation, x)
    rows, kind = _checked(operation, x, up.packed, up.out_features, up.activation, up.gated)
    out = x.new_empty(len(rows), down.out_features)
    packed = up.packed, down.packed, up.out_features
    feed_forward(rows, *packed, out, up.activation, up.gated, kind, norm)
    return out.view(*x.shape[:-1], down.out_features)
