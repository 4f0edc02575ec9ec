"""Rotary positions of queries and keys on the CPU; see README.md."""

from .op import fits_rotary, rotary

__all__ = ["fits_rotary", "rotary"]
