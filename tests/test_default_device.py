"""Torch may have another default device: what runs on the CPU runs there, and what is found is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from irkit import Model, Retriever

TEXTS = {"1": "search of the index", "2": "a neural model of text", "3": "vector token", "4": ""}
QUERIES = ["a search of text", "token model"]

KINDS: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "dense": (Model.from_pretrained, "flat"),
    "int8": (lambda path: Model.from_pretrained(path, dtype="int8"), "flat"),
    "hnsw": (Model.from_pretrained, "hnsw"),
    "multi_vector": (lambda path: Model.multi_vector(path, "linear"), "flat"),
    "token int8": (lambda path: Model.multi_vector(path, "linear"), {"kind": "flat", "dtype": "int8"}),
    "muvera": (lambda path: Model.multi_vector(path, "linear"), "muvera"),
    "sparse": (lambda path: Model.sparse(path), "inverted"),
    "static": (lambda path: Model.sparse(path, queries="static"), "inverted"),
    "bm25": (lambda path: "bm25", None),
}


@pytest.fixture
def nowhere() -> Iterator[Callable[[], None]]:
    """Sets the default to a device on which nothing can be read, so that whoever takes it fails."""
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(None)


def found(kind: str, path: Path, folder: Path) -> Any:
    make, index = KINDS[kind]
    torch.manual_seed(0)  # of the projection
    model = make(path)
    with Retriever.build(model, dict(list(TEXTS.items())[:3]), folder, index=index) as retriever:
        retriever.add({"4": TEXTS["4"]})
        retriever.remove("2")
        hits = [[(hit.id, hit.score) for hit in some] for some in retriever.search(QUERIES, 3)]
        again = [
            [(hit.id, hit.score) for hit in some] for some in retriever.rerank(QUERIES, [["1", "3"]] * 2)
        ]
    scores = None
    if isinstance(model, Model):
        sides = model.encode_query(QUERIES), model.encode_document(list(TEXTS.values()))
        scores = model.similarity(*sides).tolist()
    return hits, again, scores


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.*taking the mean of its tokens:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_search_does_not_depend_on_the_default_device(
    kind: str, tiny_bert: Path, tmp_path: Path, nowhere: Callable[[], None]
) -> None:
    expected = found(kind, tiny_bert, tmp_path / "usual")
    nowhere()
    assert found(kind, tiny_bert, tmp_path / "other") == expected
