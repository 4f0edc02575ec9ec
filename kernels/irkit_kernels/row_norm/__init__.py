"""LayerNorm and RMSNorm on the CPU, with a sum before; see README.md."""

from .op import fits_row_norm, row_norm

__all__ = ["fits_row_norm", "row_norm"]
