"""Rows that may be among the best of dense queries, by a scan of 8-bit codes, and the best of chosen rows."""

from .op import find_candidates
from .rank import best_of, matmul_error, products, ranking
from .reference import Codes, encode

__all__ = ["Codes", "best_of", "encode", "find_candidates", "matmul_error", "products", "ranking"]
