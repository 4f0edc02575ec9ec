"""Write a shard of Qdrant Edge, the engine of Qdrant inside a process, with the points of `to_qdrant`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from irkit.errors import require
from irkit.exporting.contents import Contents
from irkit.exporting.target import Target
from irkit.exporting.to_qdrant import is_empty, payload, point_batches

ABOUT = "irkit-export.json"
"""File in the folder that says what a search must know."""


def _write(contents: Contents, path: Path) -> None:
    edge, name = require("qdrant_edge", "engines", "irkit export --to qdrant-edge"), contents.kind
    path.mkdir()
    if name == "sparse":
        config = edge.EdgeConfig(sparse_vectors={name: edge.EdgeSparseVectorParams()})
    else:
        together = edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim)
        params = edge.EdgeVectorParams(
            contents.dim,
            edge.Distance.Dot,
            multivector_config=together if name == "multi_vector" else None,
        )
        config = edge.EdgeConfig(vectors={name: params})
    shard = edge.EdgeShard.create(str(path), config)
    try:
        for batch in point_batches(contents):
            points = []
            for item in batch:
                vector: Any
                if name == "sparse":
                    terms, weights = item.vector
                    vector = edge.SparseVector(terms.tolist(), weights.tolist())
                else:
                    vector = item.vector.tolist()
                named = {} if is_empty(contents, item) else {name: vector}
                points.append(edge.Point(item.row, named, payload(item)))
            shard.update(edge.UpdateOperation.upsert_points(points))
        shard.flush()
    finally:
        shard.close()
    (path / ABOUT).write_text(json.dumps(contents.about))


TARGET = Target(_write, is_folder=True)
