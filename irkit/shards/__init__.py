"""Indexes in several shards, which are searched and changed as one index.

The directory of such an index holds a small manifest and one sub-directory per shard, each the directory of
an index of its own (see `irkit.index`)::

    irkit.json            the manifest: names of the shards, model, kind, number of documents ever added
    vocabulary.g2.txt     BM25, impacts: the terms of all shards, in the order in which they appeared
    shard-1-000/          the first shard: 1 counts builds in this directory, so that a new one gets new names
        irkit.json ...
        sequence.g3.bin   the number of each row in order of addition to the whole: its *global row*

A document belongs to the shard that the hash of its id names, so that updates and removals find it. Global
rows decide ties as rows do in one index. `ShardedStore` (sharded_store.py) joins the stores, `ShardedIndex`
and `ShardedDocuments` have the interfaces of `irkit.index.Index` and `irkit.index.Documents` over global
rows. joint_plaid.py, joint_lists.py and joint_faiss.py search shards together where codes choose candidates;
plaid_answers.py has what shards of `plaid` send that other processes search, and codecs.py says which codes
shards share. resharding.py copies an index into another number of shards, and placement.py says which row is
where. Everything above works on these three as on one index.

If documents are in windows, these are numbered document by document, by the global rows of documents, and a
`ShardedIndex` finds them. `ShardedWindows` (sharded_windows.py) makes documents of them, as
`irkit.index.WindowedIndex` does in one index.

With a model of several heads, each shard is a directory with an index for each head. The whole is then an
`irkit.index.SeveralIndex`, whose parts are a `ShardedIndex` for each head. Begin with sharded_store.py.
"""

from __future__ import annotations

from irkit.shards.resharding import reshard, rewrite
from irkit.shards.shard_opening import open_parts
from irkit.shards.sharded_documents import ShardedDocuments
from irkit.shards.sharded_index import ShardedIndex
from irkit.shards.sharded_store import ShardedStore, open_store
from irkit.shards.sharded_windows import ShardedWindows

__all__ = [
    "ShardedDocuments",
    "ShardedIndex",
    "ShardedStore",
    "ShardedWindows",
    "open_parts",
    "open_store",
    "reshard",
    "rewrite",
]
