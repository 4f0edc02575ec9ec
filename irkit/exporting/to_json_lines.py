"""Write lines of JSON that `irkit index` reads: ``_id``, ``title``, ``text``, ``metadata``, ``vector``.

If the model has several heads, each has a field: ``vector_dense`` for the head ``dense``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from irkit.exporting.contents import Contents, Exported
from irkit.exporting.target import Target


def record(contents: Contents, item: Exported) -> dict[str, Any]:
    """Return a document as `irkit.data` reads it; without a vector for BM25, which needs only texts."""
    document = item.document
    fields: dict[str, Any] = {"_id": document.id, "title": document.title, "text": document.text}
    fields["metadata"] = dict(document.metadata)
    if not contents.is_bm25:
        for name, vector in contents.vectors(item).items():
            is_sparse = contents.columns[name].kind == "sparse"
            fields[field_of(contents, name)] = (
                contents.weights(name, vector) if is_sparse else vector.tolist()
            )
    return fields


def field_of(contents: Contents, name: str) -> str:
    """Return the key of a line that holds the representation ``name``."""
    return f"vector_{name}" if contents.kind == "several" else "vector"


def _write(contents: Contents, path: Path) -> None:
    with path.open("w", encoding="utf-8", errors="surrogatepass") as stream:
        for item in contents:
            stream.write(json.dumps(record(contents, item), ensure_ascii=False) + "\n")


TARGET = Target(_write, suffix=".jsonl", several=True, scores=False)
