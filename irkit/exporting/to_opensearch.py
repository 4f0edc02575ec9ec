"""Write files for OpenSearch and Elasticsearch: an index with its mapping, and documents for the bulk API.

A folder gets ``index.json``, the body of ``PUT /INDEX``, and ``bulk-00000.ndjson`` and so on, bodies of
``POST /INDEX/_bulk`` of about 32 MB each. Fields are ``title``, ``text``, ``metadata``, ``marks`` (see
`irkit.exporting.marks`), and ``vector`` or ``terms``.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from irkit.errors import BadValueError
from irkit.exporting.contents import Contents, Exported
from irkit.exporting.marks import MARKS, marks
from irkit.exporting.target import Target
from irkit.index.limits import current_limits

_KEYWORD = {"type": "keyword", "ignore_above": 8191}  # 32,766 bytes is the longest term of Lucene
_METADATA = {"number": {"type": "double"}, "string": _KEYWORD, "boolean": {"type": "boolean"}}


def index_body(contents: Contents, elastic: bool) -> dict[str, Any]:
    """Return settings and mapping of an index.

    OpenSearch scores the tokens of a multi-vector by ``lateInteractionScore``, Elasticsearch by
    ``maxSimDotProduct``.
    """
    properties: dict[str, Any] = {"title": {"type": "text"}, "text": {"type": "text"}}
    other = {"type": "object", "enabled": False}
    inner = {key: _METADATA.get(types.single, other) for key, types in contents.keys.items()}
    properties |= {"metadata": {"type": "object", "properties": inner}, MARKS: {"type": "keyword"}}
    dense: dict[str, Any]
    if elastic:
        dense = {"type": "dense_vector", "dims": contents.dim, "index": True}
        dense["similarity"] = "max_inner_product"
        multi: dict[str, Any] = {"type": "rank_vectors", "element_type": "float", "dims": contents.dim}
        sparse = {"type": "sparse_vector"}
    else:
        method = {"name": "hnsw", "engine": "lucene", "space_type": "innerproduct"}
        dense = {"type": "knn_vector", "dimension": contents.dim, "method": method}
        multi, sparse = other, {"type": "rank_features"}
    if not contents.is_bm25:
        vectors = {"dense": ("vector", dense), "multi_vector": ("vector", multi), "sparse": ("terms", sparse)}
        name, field = vectors[contents.kind]
        properties[name] = field
    knn = not elastic and contents.kind == "dense"
    return {
        **({"settings": {"index": {"knn": True}}} if knn else {}),
        "mappings": {"dynamic": False, "properties": properties},
    }


def feature(term: str) -> str:
    """Return a term as the name of a rank feature; dots are escaped, because they would nest fields.

    Examples:
        >>> feature("bear"), feature("."), feature("5%")
        ('bear', '%2E', '5%25')
    """
    return term.replace("%", "%25").replace(".", "%2E")


def source(contents: Contents, item: Exported) -> dict[str, Any]:
    """Return a document of the engine.

    Raises:
        BadValueError: A weight is below 0.
    """
    document = item.document
    fields: dict[str, Any] = {"title": document.title, "text": document.text}
    fields |= {"metadata": dict(document.metadata), MARKS: marks(document.metadata)}
    if contents.is_bm25:
        return fields
    if contents.kind != "sparse":
        return fields | ({"vector": item.vector.tolist()} if len(item.vector) else {})
    weights = {
        feature(term): weight for term, weight in contents.weights("sparse", item.vector).items() if weight
    }
    if any(weight < 0 for weight in weights.values()):
        raise BadValueError(
            f"export: document {document.id!r} has a weight below 0; expected positive ones, because these "
            "engines take no others"
        )
    return fields | {"terms": weights}


def _write(contents: Contents, path: Path, elastic: bool) -> None:
    path.mkdir()
    (path / "index.json").write_text(json.dumps(index_body(contents, elastic), indent=2))
    stream, number, most = (path / "bulk-00000.ndjson").open("wb"), 0, current_limits().bulk_bytes
    try:
        for item in contents:
            lines = [{"index": {"_id": item.document.id}}, source(contents, item)]
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            content = text.encode("utf-8", "surrogatepass")
            if stream.tell() and stream.tell() + len(content) > most:
                stream.close()
                number += 1
                stream = (path / f"bulk-{number:05}.ndjson").open("wb")
            stream.write(content)
    finally:
        stream.close()


TARGET = Target(partial(_write, elastic=False), is_folder=True)
ELASTICSEARCH = Target(partial(_write, elastic=True), is_folder=True)
