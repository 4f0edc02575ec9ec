"""Rows that may be among the best of dense queries, found by a scan of 8-bit codes with bounds."""

from .op import find_candidates
from .reference import Codes, encode

__all__ = ["Codes", "encode", "find_candidates"]
