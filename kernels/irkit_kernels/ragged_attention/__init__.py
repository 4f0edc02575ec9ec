"""Attention within rows of different lengths on the CPU; see README.md."""

from __future__ import annotations

from .op import ragged_attention

__all__ = ["ragged_attention"]
