"""Search exported indexes in other engines: irkit encodes the queries, and the engine searches.

`Qdrant` (qdrant.py) and `LanceDB` (lancedb.py) derive from `RemoteRetriever` (remote_retriever.py), which has
the read-only methods of `irkit.Retriever`. qdrant_filter.py and sql_filter.py translate filters.
"""

from __future__ import annotations

from irkit.remote.lancedb import LanceDB
from irkit.remote.qdrant import Qdrant
from irkit.remote.remote_retriever import RemoteRetriever

__all__ = ["LanceDB", "Qdrant", "RemoteRetriever"]
