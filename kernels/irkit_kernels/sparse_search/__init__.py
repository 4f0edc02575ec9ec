"""Lists of documents by term, and search in them, exact or approximate; see README.md."""

from .op import Effort, Searcher, build, effort_of

__all__ = ["Effort", "Searcher", "build", "effort_of"]
