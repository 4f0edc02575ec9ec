"""Exact and approximate search of sparse vectors by an inverted index; see README.md."""

from .checks import check_lists
from .op import Effort, Searcher, Thresholds, build, effort_of

__all__ = ["Effort", "Searcher", "Thresholds", "build", "check_lists", "effort_of"]
