"""Linear maps with their activation: by oneDNN in inference on a CPU, else by torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from irkit.encoder.encoder_config import Activation
from irkit.encoder.inference import is_inference

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
_FUSED: dict[Activation | None, tuple[str, list[float], str]] = {  # for oneDNN, whose relu hides NaN
    None: ("none", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_tanh": ("gelu", [], "tanh"),
    "silu": ("swish", [], ""),
}
_MIN_ROWS = 32  # with fewer rows, laying out the weight for oneDNN takes longer than the product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> Tensor:
    """Return ``activation(x @ weight.T + bias)``.

    On a CPU torch multiplies float32 with MKL and adds bias and activation in separate passes. On processors
    that are not Intel's, MKL reaches three quarters of the speed of oneDNN.

    Args:
        x: ``(total, in_features)``.
        weight: ``(out_features, in_features)``; `pack_` may have laid it out for oneDNN.
        bias: ``(out_features,)``.
        activation: Activation function applied to the result; None applies none.
    """
    fused = activation if activation in _FUSED else None
    if weight.is_mkldnn or (fused is activation and _fits_onednn(x, weight)):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, *_FUSED[fused])
    else:
        fused, y = None, F.linear(x, weight, bias)
    return y if activation is None or activation == fused else ACTIVATIONS[activation](y)


def pack_(layer: nn.Module) -> None:
    """Lay out the weight of a plain layer for oneDNN, in place: for inference on a CPU only.

    Otherwise every call lays the weight out again, which takes nearly as long as the product with ten tokens.
    Another layer, and one that oneDNN does not take, stays as it is.
    """
    if not is_plain(layer) or layer.weight.is_mkldnn:
        return
    if layer.weight.is_cpu and layer.weight.dtype in _onednn_dtypes():
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
        layer.weight = nn.Parameter(packed, requires_grad=False)


def apply_linear(layer: nn.Module, x: Tensor, activation: Activation | None = None) -> Tensor:
    """Return ``activation(layer(x))``, by `linear` if the layer is plain; int8, LoRA and hooks still work."""
    if is_plain(layer):
        return linear(x, layer.weight, layer.bias, activation)
    y: Tensor = layer(x)
    return y if activation is None else ACTIVATIONS[activation](y)


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True if calling the layer only multiplies by its weight: no hooks, no subclass."""
    return type(layer) is nn.Linear and not is_hooked(layer)


def is_hooked(layer: nn.Module) -> bool:
    """Return True if calling the layer does more than its class says: hooks, or a ``forward`` of its own."""
    return (
        "forward" in layer.__dict__
        or bool(layer._forward_hooks or layer._forward_pre_hooks)
        or bool(layer._backward_hooks or layer._backward_pre_hooks)
        or _has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def _fits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Tell whether `linear` can use oneDNN for these tensors.

    There must be enough rows on a CPU, in a dtype that oneDNN has, and no gradients, autocast or compilation.
    """
    return (
        x.is_cpu
        and len(x) >= _MIN_ROWS
        and x.dtype == weight.dtype
        and is_inference()
        and not torch.is_autocast_enabled("cpu")
        and x.dtype in _onednn_dtypes()
    )


@cache
def _onednn_dtypes() -> tuple[torch.dtype, ...]:
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not built or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return ()
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if fast else (torch.float32,)
