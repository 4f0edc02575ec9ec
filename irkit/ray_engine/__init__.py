"""Work on Ray, in this machine or in a cluster: shards are built and searched, and texts are encoded.

`ShardedRetriever` (ray_search.py) is a `irkit.Retriever` whose shards actors search. shard_actors.py asks
them, and shard_searcher.py is what each does. `build_shards` (ray_build.py) builds them. ray_stream.py lets
actors work on a long sequence. ray_start.py connects to Ray, which is imported when something here is used.
"""

from __future__ import annotations

from irkit.ray_engine.ray_build import build_shards
from irkit.ray_engine.ray_search import ShardedRetriever
from irkit.retrieval.searching import PartialResultWarning

__all__ = ["PartialResultWarning", "ShardedRetriever", "build_shards"]
