"""Linear layers in int8 on the CPU; see README.md."""

from .op import ACTIVATIONS, Int8Linear, has_fast_int8, int8_feed_forward, int8_linear, pack_weight

__all__ = [
    "ACTIVATIONS",
    "Int8Linear",
    "has_fast_int8",
    "int8_feed_forward",
    "int8_linear",
    "pack_weight",
]
