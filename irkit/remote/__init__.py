"""Search what an index was exported to: irkit encodes queries, and an engine searches.

`Qdrant` (qdrant.py) and `LanceDB` (lancedb.py) are `RemoteRetriever`s (remote_retriever.py), which have the
methods of `irkit.Retriever` that read. qdrant_filter.py and sql_filter.py translate filters.
"""

from __future__ import annotations

from irkit.remote.lancedb import LanceDB
from irkit.remote.qdrant import Qdrant
from irkit.remote.remote_retriever import RemoteRetriever

__all__ = ["LanceDB", "Qdrant", "RemoteRetriever"]
