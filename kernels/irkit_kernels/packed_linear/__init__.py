"""Linear layers in int8 or bfloat16 on the CPU; see README.md."""

from .op import (
    ACTIVATIONS,
    Kind,
    PackedLinear,
    has_fast,
    pack_weight,
    packed_add_norm,
    packed_feed_forward,
    packed_linear,
)

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
