"""Shards on Ray: each shard is searched by an actor of its own, in this machine or in a cluster.

`ShardedRetriever` (ray_search.py) is a `irkit.Retriever` whose shards actors search. ray_start.py connects to
Ray. Ray is imported when something here is used.
"""

from __future__ import annotations

from irkit.ray_engine.ray_search import PartialResultWarning, ShardedRetriever

__all__ = ["PartialResultWarning", "ShardedRetriever"]
