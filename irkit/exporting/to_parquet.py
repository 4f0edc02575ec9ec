"""Write a parquet file, which `irkit index` reads again.

The columns are ``_id``, ``title`` and ``text``, ``metadata``, a string of JSON, and ``vector``: a list of
numbers, a list of such lists per token, or a map from terms to weights. If the model has several heads, each
has a column: ``vector_dense`` for the head ``dense``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from irkit.errors import require
from irkit.exporting.contents import Contents
from irkit.exporting.target import Target
from irkit.exporting.to_json_lines import field_of


def _write(contents: Contents, path: Path) -> None:
    arrow = require("pyarrow", "data", "Writing parquet files")
    parquet = require("pyarrow.parquet", "data", "Writing parquet files")
    texts = [arrow.field(name, arrow.string()) for name in ("_id", "title", "text", "metadata")]
    numbers = arrow.list_(arrow.float32())
    types = {"dense": numbers, "multi_vector": arrow.list_(numbers)}
    types["sparse"] = arrow.map_(arrow.string(), arrow.float32())
    columns = {} if contents.is_bm25 else contents.columns
    schema = arrow.schema(
        [
            *texts,
            *(arrow.field(field_of(contents, name), types[column.kind]) for name, column in columns.items()),
        ]
    )
    with parquet.ParquetWriter(path, schema) as writer:
        for batch in contents.batches():
            rows = []
            for item in batch:
                document = item.document
                row: dict[str, Any] = {"_id": document.id, "title": document.title, "text": document.text}
                row["metadata"] = json.dumps(dict(document.metadata), ensure_ascii=False)
                for name, vector in contents.vectors(item).items() if columns else ():
                    is_sparse = columns[name].kind == "sparse"
                    row[field_of(contents, name)] = contents.weights(name, vector) if is_sparse else [*vector]
                rows.append(row)
            writer.write_batch(arrow.RecordBatch.from_pylist(rows, schema=schema))


TARGET = Target(_write, suffix=".parquet", several=True, scores=False)
