"""Whether torch only computes: what kernels without gradients, and overwriting, depend on."""

from __future__ import annotations

import torch


def is_inference() -> bool:
    """Tell whether torch neither records gradients nor compiles."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()
