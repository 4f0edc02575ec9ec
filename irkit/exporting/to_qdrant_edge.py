"""Write a shard of Qdrant Edge, the engine of Qdrant inside a process, with the points of `to_qdrant`."""

from __future__ import annotations

import json
from pathlib import Path

from irkit.errors import require
from irkit.exporting.contents import Contents
from irkit.exporting.target import Target
from irkit.exporting.to_qdrant import payload, point_batches, point_vectors

ABOUT = "irkit-export.json"
"""File in the folder that says what a search must know."""


def _write(contents: Contents, path: Path) -> None:
    edge = require("qdrant_edge", "engines", "irkit export --to qdrant-edge")
    path.mkdir()
    together = edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim)
    sparse, vectors = {}, {}
    for name, column in contents.columns.items():
        if column.kind == "sparse":
            sparse[name] = edge.EdgeSparseVectorParams()
        else:
            is_multi = column.kind == "multi_vector"
            vectors[name] = edge.EdgeVectorParams(
                column.dim, edge.Distance.Dot, multivector_config=together if is_multi else None
            )
    config = edge.EdgeConfig(vectors=vectors or None, sparse_vectors=sparse or None)
    shard = edge.EdgeShard.create(str(path), config)
    try:
        for batch in point_batches(contents):
            points = []
            for item in batch:
                named = point_vectors(contents, item, edge.SparseVector)
                points.append(edge.Point(item.row, named, payload(item)))
            shard.update(edge.UpdateOperation.upsert_points(points))
        shard.flush()
    finally:
        shard.close()
    (path / ABOUT).write_text(json.dumps(contents.about))


TARGET = Target(_write, several=True, is_folder=True)
