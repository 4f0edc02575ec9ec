"""Write a database of LanceDB with one table, ``documents``.

Its columns are ``row``, ``_id``, ``title``, ``text``; ``vector``, one vector or one per token; ``metadata``,
a struct of the keys whose values are all numbers or all strings, or lists of these; ``json``, all metadata;
and ``marks``, see `irkit.exporting.marks`. Title and text have full-text indexes. Vectors have none: LanceDB
scans them, which is exact; `create_index` of LanceDB makes one.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from irkit.errors import require
from irkit.exporting.contents import Contents
from irkit.exporting.marks import MARKS, marks
from irkit.exporting.target import Target

TABLE = "documents"


def _write(contents: Contents, path: Path) -> None:
    lancedb = require("lancedb", "engines", "irkit export --to lancedb")
    arrow = require("pyarrow", "engines", "irkit export --to lancedb")
    lance_index = require("lancedb.index", "engines", "irkit export --to lancedb")
    struct = {
        key: types.in_lists for key, types in contents.keys.items() if types.single in ("number", "string")
    }
    schema = _schema(arrow, contents, struct)

    def batches() -> Iterator[Any]:
        for batch in contents.batches():
            rows = []
            for item in batch:
                document = item.document
                row: dict[str, Any] = {"row": item.row, "_id": document.id, "title": document.title}
                row["text"], row[MARKS] = document.text, marks(document.metadata)
                row["json"] = json.dumps(dict(document.metadata), ensure_ascii=False)
                if struct:
                    row["metadata"] = {
                        key: _values(document.metadata.get(key), in_lists) for key, in_lists in struct.items()
                    }
                if not contents.is_bm25:
                    vector = list(item.vector) if contents.kind == "multi_vector" else item.vector
                    row["vector"] = vector if len(vector) else None
                rows.append(row)
            yield arrow.RecordBatch.from_pylist(rows, schema=schema)

    table = lancedb.connect(str(path)).create_table(TABLE, data=batches(), schema=schema)
    for column in ("title", "text"):
        table.create_index(column, config=lance_index.FTS())


def _schema(arrow: Any, contents: Contents, struct: dict[str, bool]) -> Any:
    """Return the columns; the metadata of the table holds what `irkit.remote.LanceDB` needs to search."""
    texts, lists = arrow.string(), arrow.list_(arrow.string())
    fields = [("row", arrow.int64()), ("_id", texts), ("title", texts), ("text", texts), ("json", texts)]
    fields.append((MARKS, lists))
    if struct:
        types = {"number": arrow.float64(), "string": texts}
        inner = []
        for key, in_lists in struct.items():
            own = types[contents.keys[key].single]
            inner.append((key, arrow.list_(own) if in_lists else own))
        fields.append(("metadata", arrow.struct(inner)))
    if not contents.is_bm25:
        vector = arrow.list_(arrow.float32(), contents.dim)
        fields.append(("vector", arrow.list_(vector) if contents.kind == "multi_vector" else vector))
    return arrow.schema(fields, metadata={"irkit": json.dumps(contents.about)})


def _values(value: Any, in_lists: bool) -> Any:
    """Return a value as its column has it: in a column of lists as a list, from which null is left out.

    Numbers are float64, which holds no large integer exactly; ``json`` has them as they are.
    """
    if in_lists and value is not None:
        items = value if isinstance(value, list) else [value]
        return [_values(item, False) for item in items if item is not None]
    if type(value) is int:
        if abs(value) > sys.float_info.max:
            return math.inf if value > 0 else -math.inf
        return float(value)
    return value


TARGET = Target(_write, ("dense", "multi_vector"), is_folder=True)
