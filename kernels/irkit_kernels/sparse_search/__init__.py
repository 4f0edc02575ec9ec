"""Lists of documents by term, and search in them, exact or approximate; see README.md."""

from .checks import check_lists
from .op import Effort, Searcher, build, effort_of

__all__ = ["Effort", "Searcher", "build", "check_lists", "effort_of"]
