"""Write a collection of Qdrant: to a server, or to a folder for the local mode of qdrant-client.

A point is a document. Its number is the row of the document. Its vector is named after the kind of the
representation; if the model has several heads, each head has a vector of its name. The payload has ``_id``,
``title``, ``text``, ``metadata`` and ``marks``, see `irkit.exporting.marks`. Terms of sparse vectors are
numbers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from irkit.errors import BadValueError, StorageError, require, reraise_as
from irkit.exporting.contents import Contents, Exported
from irkit.exporting.marks import MARKS, marks
from irkit.exporting.target import Target

COLLECTION = "documents"
"""Name of the collection in a folder."""

_NUMBERS = 500_000  # of vectors in one request, which a server limits to 32 MB
_POINTS = 256  # in one request
_DIGITS = 20  # bytes of a number in JSON; so many bytes of a payload count as one


def split_address(address: str) -> tuple[str, str]:
    """Return the address of a server and the name of a collection.

    Raises:
        BadValueError: The address names no collection.

    Examples:
        >>> split_address("http://127.0.0.1:6333/notes")
        ('http://127.0.0.1:6333', 'notes')
    """
    parts = urlsplit(address)
    prefix, _, collection = parts.path.rpartition("/")
    if not parts.hostname or not collection:
        raise BadValueError(f"qdrant: the address is {address!r}; expected http://HOST:PORT/COLLECTION")
    return f"{parts.scheme}://{parts.netloc}{prefix}", collection


def payload(item: Exported) -> dict[str, Any]:
    """Return what a point has besides its vector."""
    document = item.document
    texts = {"_id": document.id, "title": document.title, "text": document.text}
    return {**texts, "metadata": dict(document.metadata), MARKS: marks(document.metadata)}


def point_batches(contents: Contents) -> Iterator[list[Exported]]:
    """Yield documents in batches as large as a request may be; a document without tokens has no vector."""
    batch: list[Exported] = []
    count = 0
    for item in contents:
        vectors = contents.vectors(item).values()
        size = sum(len(vector[0]) if isinstance(vector, tuple) else vector.size for vector in vectors)
        size += len(json.dumps(payload(item))) // _DIGITS
        if batch and (len(batch) == _POINTS or count + size > _NUMBERS):
            yield batch
            batch, count = [], 0
        batch.append(item)
        count += size
    if batch:
        yield batch


def point_vectors(contents: Contents, item: Exported, sparse: Callable[..., Any]) -> dict[str, Any]:
    """Return the vectors of a point by name, without those that have no tokens or terms.

    Args:
        contents: What is exported.
        item: The document.
        sparse: Class of sparse vectors, made of numbers of terms and weights.
    """
    found: dict[str, Any] = {}
    for name, vector in contents.vectors(item).items():
        if isinstance(vector, tuple) and len(vector[0]):
            found[name] = sparse(indices=vector[0].tolist(), values=vector[1].tolist())
        elif not isinstance(vector, tuple) and len(vector):
            found[name] = vector.tolist()
    return found


def _create(client: Any, collection: str, contents: Contents) -> None:
    """Make an empty collection."""
    models = require("qdrant_client", "engines", "Qdrant").models
    together = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    sparse, vectors = {}, {}
    for name, column in contents.columns.items():
        if column.kind == "sparse":
            sparse[name] = models.SparseVectorParams()
        else:
            vectors[name] = models.VectorParams(
                size=column.dim,
                distance=models.Distance.DOT,
                multivector_config=together if column.kind == "multi_vector" else None,
            )
    client.create_collection(collection, vectors_config=vectors, sparse_vectors_config=sparse or None)


def _upload(client: Any, collection: str, contents: Contents) -> None:
    """Fill a collection. Its description is written last and marks the collection as complete."""
    models = require("qdrant_client", "engines", "Qdrant").models
    for batch in point_batches(contents):
        points = []
        for item in batch:
            named = point_vectors(contents, item, models.SparseVector)
            points.append(models.PointStruct(id=item.row, vector=named, payload=payload(item)))
        client.upsert(collection, points, wait=True)
    client.update_collection(collection, metadata={"irkit": contents.about})


def _write(contents: Contents, path: Path) -> None:
    client = require("qdrant_client", "engines", "irkit export --to qdrant").QdrantClient(path=str(path))
    try:
        _create(client, COLLECTION, contents)
        _upload(client, COLLECTION, contents)
    finally:
        client.close()


def _send(contents: Contents, address: str) -> None:
    library = require("qdrant_client", "engines", "irkit export --to qdrant")
    with contextlib.ExitStack() as stack:
        stack.enter_context(reraise_as(StorageError, f"exporting to {address}", "is the server up?"))
        url, collection = split_address(address)
        client = library.QdrantClient(url=url, check_compatibility=False)
        stack.callback(client.close)
        if client.collection_exists(collection):
            raise StorageError(f"exporting to {address}: the collection exists; choose another name")
        _create(client, collection, contents)  # an error if another export has made it meanwhile
        try:
            _upload(client, collection, contents)
            for key in ("_id", MARKS):
                client.create_payload_index(collection, key, "keyword")
        except BaseException:
            client.delete_collection(collection)
            raise


TARGET = Target(_write, several=True, is_folder=True, send=_send)
