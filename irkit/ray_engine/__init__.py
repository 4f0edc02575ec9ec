"""Shards on Ray: each shard is searched by an actor of its own, in this machine or in a cluster.

`ShardedRetriever` (ray_search.py) is a `irkit.Retriever` whose shards actors search. ray_start.py connects to
Ray. Ray is imported when something here is used.
"""

from __future__ import annotations

from irkit.ray_engine.ray_search import ShardedRetriever
from irkit.retrieval.searching import PartialResultWarning

__all__ = ["PartialResultWarning", "ShardedRetriever"]
