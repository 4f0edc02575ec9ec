"""Linear layers in int8 for inference on the CPU: 8-bit weights and activations, float32 in and out."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from .reference import ACTIVATIONS, quantize_weight

__all__ = [
    "ACTIVATIONS",
    "Int8Linear",
    "has_fast_int8",
    "int8_feed_forward",
    "int8_linear",
    "pack_weight",
]


def has_fast_int8() -> bool:
    """Return whether this CPU multiplies int8 faster than float32 (AVX512-VNNI); if not, the op is slow."""
    from .cpu_kernel import has_vnni

    return has_vnni()


def pack_weight(weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
    """Quantise the weight of a linear layer, one scale per output feature, and pack it for `int8_linear`.

    Args:
        weight: ``(n, k)`` floating point, like the weight of `torch.nn.Linear`.
        bias: ``(n,)``, stored as float32.
        gated: Whether the first half of the features is activated, and multiplied by the second half.

    Returns:
        An opaque uint8 tensor of about ``n * k`` bytes.

    Raises:
        ValueError: The shapes do not fit, a number is not finite, or k is above 66,311.
    """
    from .cpu_kernel import MAX_K, pack

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
    q, scale = quantize_weight(weight)
    return torch.from_numpy(pack(q.numpy(), scale.numpy(), None if bias is None else bias.numpy(), gated))


def int8_linear(
    x: Tensor, packed: Tensor, out_features: int, activation: str = "none", gated: bool = False
) -> Tensor:
    """Compute ``activation(x @ weight.T + bias)`` with each row of x rounded to 8 bits, and sums in int32.

    A ``gated`` layer computes ``2 n`` features, and returns the first n activated times the last n.

    The result of a row depends on this row alone. It is NaN if the row holds NaN or infinity, or if the
    difference of its largest and smallest numbers overflows float32. A row whose difference is below 1e-30
    counts as zeros. The call uses `torch.get_num_threads` threads and releases the interpreter lock.

    Args:
        x: ``(..., k)`` float32.
        packed: What `pack_weight` made of a weight ``(n, k)``, or ``(2 n, k)`` if gated, and a bias.
        out_features: n.
        activation: none, gelu (the one with erf, to an error of 3e-5 + 4e-7 * abs(y)), gelu_tanh or silu
            (both to an error of 2e-6 * (1 + abs(y))).
        gated: As for `pack_weight`.

    Returns:
        ``(..., n)`` float32.

    Raises:
        RuntimeError: An input requires a gradient, which this layer does not compute.
        TypeError: ``x`` is not float32 or ``packed`` not uint8.
        ValueError: The shapes do not fit, the activation is unknown, or a tensor is not on the CPU.

    Examples:
        >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> int8_linear(torch.tensor([[1.0, 0.0]]), pack_weight(weight), 2).round(decimals=1)
        tensor([[1., 3.]])
    """
    _check_gradient("int8_linear", x)
    if torch.compiler.is_compiling():
        return torch.ops.irkit.int8_linear(x, packed, out_features, activation, gated)
    return _cpu(x, packed, out_features, activation, gated)  # 10 us less than through torch's dispatcher


def _cpu(
    x: Tensor, packed: Tensor, out_features: int, activation: str = "none", gated: bool = False
) -> Tensor:
    from .cpu_kernel import linear

    rows = _rows("int8_linear", x, packed, out_features, activation, gated)
    out = x.new_empty(len(rows), out_features)
    linear(rows, packed.contiguous(), out, activation, gated)
    return out.view(*x.shape[:-1], out_features)


def _check_gradient(operation: str, x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(f"{operation}: has no gradient; call it under torch.no_grad() or inference_mode()")


def _rows(
    operation: str, x: Tensor, packed: Tensor, out_features: int, activation: str, gated: bool
) -> Tensor:
    """Check the arguments of a layer, and return ``x`` as rows ``(m, k)`` without gaps."""
    from .cpu_kernel import packed_shape

    if x.dtype != torch.float32 or packed.dtype != torch.uint8:
        raise TypeError(f"{operation}: got x {x.dtype}, packed {packed.dtype}; expected float32 and uint8")
    if not (x.is_cpu and packed.is_cpu):
        raise ValueError(f"{operation}: runs on the CPU, got x on {x.device} and packed on {packed.device}")
    if x.dim() == 0 or tuple(packed.shape) != packed_shape(out_features, x.shape[-1], gated):
        raise ValueError(
            f"{operation}: x {tuple(x.shape)}, out_features {out_features} and gated={gated} do not fit the "
            f"packed weight {tuple(packed.shape)}; pass x (..., k), the n of the weight (n, k) that was "
            "packed, and the gated of its packing"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{operation}: activation {activation!r} is unknown; expected one of {(*ACTIVATIONS,)}"
        )
    return x.reshape(-1, x.shape[-1]).contiguous()


# What torch.library.custom_op does, without its import of torch._dynamo, 2 s, at the first call.
torch.library.define(
    "irkit::int8_linear",
    "(Tensor x, Tensor packed, int out_features, str activation='none', bool gated=False) -> Tensor",
)
torch.library.impl("irkit::int8_linear", "cpu", _cpu)


@torch.library.register_fake("irkit::int8_linear")  # type: ignore[untyped-decorator]
def _(x: Tensor, packed: Tensor, out_features: int, activation: str = "none", gated: bool = False) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


class Int8Linear(nn.Module):
    """`torch.nn.Linear` for inference in int8, optionally followed by an activation and a gate.

    Examples:
        >>> layer = Int8Linear(nn.Linear(8, 3), activation="gelu")
        >>> layer(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 3])
    """

    packed: Tensor

    def __init__(self, linear: nn.Linear, *, activation: str = "none", gated: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features // (2 if gated else 1)
        self.activation, self.gated = activation, gated
        self.register_buffer("packed", pack_weight(linear.weight, linear.bias, gated))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``, both float32."""
        return int8_linear(x, self.packed, self.out_features, self.activation, self.gated)

    def extra_repr(self) -> str:
        """Return the arguments that ``print`` displays."""
        gated = ", gated=True" if self.gated else ""
        return f"{self.in_features}, {self.out_features}, activation={self.activation!r}{gated}"


def int8_feed_forward(x: Tensor, up: Int8Linear, down: Int8Linear) -> Tensor:
    """Compute ``down(up(x))``, with the same numbers, while the hidden features are in the cache.

    Args:
        x: ``(..., up.in_features)`` float32.
        up: The first layer.
        down: The second layer, with neither activation nor gate.

    Returns:
        ``(..., down.out_features)`` float32.

    Raises:
        RuntimeError: An input requires a gradient, which these layers do not compute.
        TypeError: ``x`` is not float32.
        ValueError: The shapes do not fit, the second layer has an activation or a gate, or a tensor is not on
            the CPU.

    Examples:
        >>> up, down = Int8Linear(nn.Linear(8, 32), activation="gelu"), Int8Linear(nn.Linear(32, 8))
        >>> int8_feed_forward(torch.randn(2, 8), up, down).shape
        torch.Size([2, 8])
    """
    if (down.activation, down.gated, down.in_features) != ("none", False, up.out_features):
        raise ValueError(
            f"int8_feed_forward: the second layer is Int8Linear({down.extra_repr()}); expected in_features "
            f"{up.out_features}, no activation and no gate"
        )
    if torch.compiler.is_compiling():
        return cast(Tensor, down(up(x)))
    from .cpu_kernel import feed_forward

    _check_gradient("int8_feed_forward", x)
    rows = _rows("int8_feed_forward", x, up.packed, up.out_features, up.activation, up.gated)
    out = x.new_empty(len(rows), down.out_features)
    feed_forward(rows, up.packed, down.packed, up.out_features, out, up.activation, up.gated)
    return out.view(*x.shape[:-1], down.out_features)
