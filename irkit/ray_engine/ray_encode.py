"""Encode documents or queries on Ray, in order, for `irkit encode --engine ray`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from irkit.arguments import check_counts
from irkit.core.representation import Representation, representation_from_arrays
from irkit.data import Document, Query, Source
from irkit.heads import Side
from irkit.model import Model
from irkit.ray_engine.ray_stream import stream

_CHUNK = 2048  # texts encoded together, as `Model.stream_representations` does

_Encoded = tuple[list[str], str, int, dict[str, Any]]  # ids, kind, dim, arrays


def encode_source(
    ray: Any, model: Model, source: Source[Document] | Source[Query], side: Side, chunk_size: int = _CHUNK
) -> Iterator[tuple[list[str], Representation]]:
    """Yield ids and rows of documents or queries in order, as `Model.stream_representations` encodes them.

    Args:
        ray: The module, connected.
        model: Every actor has a copy of it.
        source: Can be read again, on any node.
        side: ``"query"`` or ``"document"``.
        chunk_size: Number of texts encoded together.
    """
    check_counts("encoding on Ray", chunk_size=chunk_size)
    read, begin = partial(_read, source, chunk_size), partial(_begin, model, side)
    count = 0
    for ids, *rows in stream(ray, read, begin, gpu=model.device.type == "cuda"):
        yield ids, representation_from_arrays(*rows)
        count += len(ids)
    if not count:  # no rows, but their kind and width
        yield [], model.encode_representation([], side)


def _read(source: Source[Any], chunk_size: int, skip: int) -> Iterator[list[tuple[str, str]]]:
    items = islice(source, skip * chunk_size, None)
    while chunk := list(islice(items, chunk_size)):
        yield [(item.id, item.text if isinstance(item, Query) else item.full_text) for item in chunk]


def _begin(model: Model, side: Side) -> Callable[[list[tuple[str, str]]], _Encoded]:
    def encode(items: list[tuple[str, str]]) -> _Encoded:
        ids, texts = map(list, zip(*items, strict=True))
        [rows] = model.stream_representations(texts, side, chunk_size=len(texts))
        return ids, rows.kind, rows.dim, rows.arrays()

    return encode
