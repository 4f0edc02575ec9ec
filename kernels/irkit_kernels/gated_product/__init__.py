"""The activated half of every row times its other half, on CUDA; see README.md."""

from .op import fits_gated_product, gated_product

__all__ = ["fits_gated_product", "gated_product"]
