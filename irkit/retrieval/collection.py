"""The `Collection`: an index on disk, its documents and its model, which building and searching work on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, cast

from irkit.data import Document, Query
from irkit.encoder_free import BM25, EncoderFreeModel, Impacts, Vectors
from irkit.errors import BadValueError, StorageError
from irkit.index import Documents, Store, StoredRows, open_index
from irkit.model import Device
from irkit.retrieval.model_identity import (
    AnyModel,
    changed_settings,
    check_described,
    check_model,
    check_placement,
    load_model,
    load_recorded_model,
)


class Collection:
    """Documents in an index, and the model that encodes queries and documents for it.

    Attributes:
        store: The files.
        index: Representations of the documents, by row.
        documents: Ids, texts and metadata, by row.
    """

    def __init__(self, store: Store, load_model: Callable[[], AnyModel]) -> None:
        """Open the index and the documents in ``store``; ``load_model`` is called when a model is needed."""
        self.store, self.index, self.documents = store, open_index(store), Documents(store)
        self._load_model, self._build_id = load_model, store.meta["build"]

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: AnyModel | Mapping[str, Any] | str | Path | None = None,
        *,
        device: Device | None = None,
        dtype: str = "float32",
        verify: bool = True,
    ) -> Self:
        """Open an index, see `irkit.Retriever.load`."""
        if device is not None or not isinstance(dtype, str) or dtype != "float32":
            check_placement(device, dtype)
        store = Store.open(path, verify=verify)
        if not {"model", "build"} <= set(store.meta):
            raise StorageError(
                f"opening {path}: no index of a Retriever; expected one with a model and texts"
            )
        manifest = store.meta["model"]
        check_described(store.path, manifest)
        choice = changed_settings(manifest, model) if isinstance(model, Mapping) else model
        if choice is None:
            load = partial(load_recorded_model, store.path, manifest, device=device, dtype=dtype)
        else:
            load = partial(load_model, choice, device=device, dtype=dtype)
        collection = cls(store, load)
        if model is not None:
            collection.model  # noqa: B018 (loads and checks it)
        return collection

    @cached_property
    def model(self) -> AnyModel:
        """The model, loaded at the first use; warns if only its query side differs from the recorded one."""
        manifest, model = self.store.meta["model"], self._load_model()
        check_model(self.store.path, manifest, model)
        if isinstance(model, BM25) and model.fingerprint != manifest["fingerprint"]:
            cast(StoredRows, self.index).formula = model.config.k1, model.config.b
        return model.open(self.store) if isinstance(model, EncoderFreeModel) else model

    def content(self, item: Document | Query) -> Any:
        """Return what the model encodes of a document or a query: its text or its vector."""
        text = item.text if isinstance(item, Query) else item.full_text
        if item.vector is not None and not text and not isinstance(self.model, Impacts | Vectors):
            raise BadValueError(
                f"{type(item).__name__.lower()} {item.id!r}: it has a vector and no text, but this model "
                "takes texts; vectors are indexed with the model 'vectors' and searched by vectors"
            )
        return self.model.content(item) if isinstance(self.model, EncoderFreeModel) else text

    def check_current(self) -> None:
        """Raise StorageError if the directory now holds an index of another model or kind."""
        self.store.check_uncut()
        if self.store.meta.get("build") != self._build_id:
            raise StorageError(
                f"index {self.store.path}: it was replaced by one of another model or kind; load it again"
            )
