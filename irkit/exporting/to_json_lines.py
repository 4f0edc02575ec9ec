"""Write lines of JSON that `irkit index` reads: ``_id``, ``title``, ``text``, ``metadata``, ``vector``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from irkit.exporting.contents import Contents, Exported
from irkit.exporting.target import Target


def record(contents: Contents, item: Exported) -> dict[str, Any]:
    """Return a document as `irkit.data` reads it; one of BM25 has no vector, because its text says all."""
    document = item.document
    fields: dict[str, Any] = {"_id": document.id, "title": document.title, "text": document.text}
    fields["metadata"] = dict(document.metadata)
    if not contents.is_bm25:
        fields["vector"] = named(contents, item) if contents.kind == "sparse" else item.vector.tolist()
    return fields


def named(contents: Contents, item: Exported) -> dict[str, float]:
    """Return the weights of a sparse vector by the names of their terms."""
    terms, weights = item.vector
    names = [contents.terms[term] for term in terms.tolist()]
    return dict(zip(names, weights.tolist(), strict=True))


def _write(contents: Contents, path: Path) -> None:
    with path.open("w", encoding="utf-8", errors="surrogatepass") as stream:
        for item in contents:
            stream.write(json.dumps(record(contents, item), ensure_ascii=False) + "\n")


TARGET = Target(_write, suffix=".jsonl")
