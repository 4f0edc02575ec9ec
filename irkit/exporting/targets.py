"""The table of targets, and the export of an index to one of them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

from irkit.arguments import brief, suggest
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.exporting.contents import Contents
from irkit.exporting.target import Target, refuse_uri
from irkit.index import Index
from irkit.index.several_index import SeveralIndex
from irkit.retrieval.retriever import Retriever
from irkit.utils.atomic import check_folder, explained, publish_folder, replacing, scratch
from irkit.utils.plugins import Registry

TARGETS: Registry[Target] = Registry(
    "irkit.targets",
    Target,
    {
        "jsonl": "irkit.exporting.to_json_lines:TARGET",
        "parquet": "irkit.exporting.to_parquet:TARGET",
        "qdrant": "irkit.exporting.to_qdrant:TARGET",
        "qdrant-edge": "irkit.exporting.to_qdrant_edge:TARGET",
        "lancedb": "irkit.exporting.to_lancedb:TARGET",
        "opensearch": "irkit.exporting.to_opensearch:TARGET",
        "elasticsearch": "irkit.exporting.to_opensearch:ELASTICSEARCH",
        "vespa": "irkit.exporting.to_vespa:TARGET",
    },
)


def export(
    retriever: Retriever, to: str, out: str | Path, *, progress: Callable[[int], object] | None = None
) -> int:
    """Export the documents, metadata and vectors of an index; memory does not grow with the index.

    The local mode of qdrant-client is the exception: ``"qdrant"`` to a folder holds the whole collection in
    memory, and ``"qdrant-edge"`` does not. What is written to a path appears whole or not at all.

    Args:
        retriever: The index. Documents that are removed are left out.
        to: Name of a target, see `TARGETS`.
        out: File or folder to make; for ``"qdrant"`` also an address, ``http://HOST:PORT/COLLECTION``.
        progress: Called with the number of documents exported since its last call.

    Returns:
        The number of documents.

    Raises:
        BadValueError: The name of the target is unknown, the target cannot hold the vectors, or the extension
            of the file is wrong.
        StorageError: There is something at ``out``, the disk is full, or the server does not answer.
        MissingDependencyError: The client of the engine is not installed.
    """
    if not isinstance(retriever, Retriever):
        raise BadTypeError(f"export: got {brief(retriever)}; expected a Retriever, see Retriever.load")
    if to not in TARGETS:
        raise BadValueError(f"export: no target {brief(to)}; {suggest(str(to), list(TARGETS))}")
    target, operation = TARGETS[to], f"exporting to {out}"
    with retriever.store.snapshot():
        contents = Contents(retriever, progress or (lambda count: None))
        _check_contents(contents, to, target)
        # compressed vectors differ from the vectors of the model
        if approximation := _approximation(retriever.index):
            warnings.warn(
                f"export of {retriever.store.path}: {approximation}; the exported vectors are decoded from "
                "them, and differ a little from those that the model made",
                stacklevel=2,
            )
        # to a server
        if re.match(r"https?://", str(out)):
            if target.send is None:
                raise BadValueError(f"export: {to} is written to a path, not to {brief(str(out))}")
            target.send(contents, str(out))
            return len(retriever)
        # to a file or folder, which appears when it is whole
        refuse_uri(out)
        path = Path(out)
        if path.suffix != target.suffix and not target.is_folder:
            raise BadValueError(f"export: {to} is a file; expected the extension {target.suffix}, got {path}")
        check_folder(path.parent, operation)
        if path.exists():
            raise StorageError(f"{operation}: it exists already; choose another path, or delete it")
        path.parent.mkdir(parents=True, exist_ok=True)
        if target.is_folder:
            with explained(operation), scratch(path) as aside:
                target.write(contents, aside / "new")
                publish_folder(aside / "new", path)
        else:
            with replacing(path) as file:
                target.write(contents, file)
        return len(retriever)


def _check_contents(contents: Contents, to: str, target: Target) -> None:
    """Refuse an index that a target cannot hold.

    Raises:
        BadValueError: It holds other kinds of vectors or scores otherwise, or documents have several.
    """
    if contents.kind == "several":
        if not target.several:
            names = ", ".join(contents.columns)
            able = ", ".join(name for name in TARGETS if TARGETS[name].several)
            raise BadValueError(
                f"export: {to} holds one representation of a document, and this index has {names}; export to "
                f"{able}, or build an index of one head: Retriever.build(model.heads[NAME], ...)"
            )
    elif contents.kind not in target.kinds and not contents.is_bm25:
        raise BadValueError(
            f"export: {to} holds {' and '.join(target.kinds)}, and this index is {contents.kind}; "
            "export to another engine, or to jsonl"
        )
    if target.scores and "euclidean" in contents.metrics.values():
        raise BadValueError(
            f"export: {to} scores by inner products, and the metric of this index is 'euclidean'; build it "
            "with the metric 'inner_product' or 'cosine', or export to jsonl or parquet"
        )
    if contents.retriever.index.windows is not None:
        raise BadValueError(
            f"export: the documents of {contents.retriever.store.path} are in windows, and have several "
            "vectors each; export an index that was built without windows"
        )


def _approximation(index: Index) -> str | None:
    """Describe how an index compresses vectors; None if it stores them without loss."""
    if isinstance(index, SeveralIndex):
        return next(filter(None, map(_approximation, index.parts.values())), None)
    config = index.config
    if config.kind == "plaid" and not getattr(config, "keep_tokens", False):
        return "plaid stores a centroid and a residual of a few bits per token"
    if config.kind == "dense" and getattr(config, "keep", "") in ("none", "int8"):
        return f"dense with keep {getattr(config, 'keep', '')} stores codes"
    if getattr(config, "dtype", "") in ("int8", "uint8", "uint16"):
        return f"{config.kind} stores numbers as {getattr(config, 'dtype', '')}"
    return None
