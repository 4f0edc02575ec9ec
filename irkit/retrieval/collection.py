"""The `Collection`: an index on disk, its documents and its model, which building and searching work on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, cast

from irkit.arguments import brief, check_options
from irkit.data import Document, Query
from irkit.encoder_free import (
    BM25,
    EncoderFreeModel,
    Impacts,
    Vectors,
    encoder_free_index,
    encoder_free_model,
    is_encoder_free,
)
from irkit.errors import BadValueError, StorageError
from irkit.index import IndexConfig, Store, StoredRows, index_config
from irkit.index.array_files import corrupt
from irkit.model import Device, Model
from irkit.shards import open_parts, open_store

AnyModel: TypeAlias = Model | EncoderFreeModel
"""A model that encodes queries and documents of an index."""


class Collection:
    """Documents in an index, and the model that encodes queries and documents for it.

    Attributes:
        store: The files.
        index: Representations of the documents, by row.
        documents: Ids, texts and metadata, by row.
    """

    def __init__(self, store: Store, load_model: Callable[[], AnyModel]) -> None:
        """Open the index and the documents in ``store``; ``load_model`` is called when a model is needed.

        Raises:
            StorageError: ``store`` holds something else.
        """
        if not {"model", "build"} <= set(store.meta):
            raise StorageError(
                f"opening {store.path}: no index of a Retriever; expected one with a model and texts"
            )
        _check_described(store.path, store.meta["model"])
        self.store, (self.index, self.documents) = store, open_parts(store)
        self._load_model, self._build_id = load_model, store.meta["build"]

    @cached_property
    def model(self) -> AnyModel:
        """The model, loaded at the first use; warns if only its query side differs from the recorded one."""
        manifest, model = self.store.meta["model"], self._load_model()
        check_model(self.store.path, manifest, model)
        if isinstance(model, BM25) and model.fingerprint != manifest["fingerprint"]:
            cast(StoredRows, self.index).formula = model.config.k1, model.config.b
        return model.open(self.store) if isinstance(model, EncoderFreeModel) else model

    def content(self, item: Document | Query) -> Any:
        """Return what the model encodes of a document or a query, see `content_of`."""
        return content_of(self.model, item)

    def check_current(self) -> None:
        """Raise StorageError if the directory now holds an index of another model or kind."""
        self.store.check_uncut()
        if self.store.meta.get("build") != self._build_id:
            raise StorageError(
                f"index {self.store.path}: it was replaced by one of another model or kind; load it again"
            )


class LoadOptions(TypedDict, total=False):
    """Options of `irkit.Retriever.load`.

    Attributes:
        device: Device of a model that is loaded here, or several, see `irkit.Model.from_pretrained`.
        dtype: Precision of a model that is loaded here, by default ``"float32"``.
        verify: Verify the checksum of every file, at about 2 GB/s. None, the default, does so for an index
            of up to 64 MB.
    """

    device: Device | None
    dtype: str
    verify: bool | None


def open_collection(
    path: str | Path, choice: AnyModel | Mapping[str, Any] | str | Path | None, options: LoadOptions
) -> Collection:
    """Open an index, see `irkit.Retriever.load`; the model is loaded at its first use.

    Raises:
        BadTypeError: An option is unknown.
    """
    check_options("opening an index", options, LoadOptions.__annotations__)
    device, dtype = options.get("device"), options.get("dtype", "float32")
    if device is not None or not isinstance(dtype, str) or dtype != "float32":
        check_placement(device, dtype)
    store = open_store(path, verify=options.get("verify"))
    return Collection(store, partial(open_model, store, choice, device=device, dtype=dtype))


def content_of(model: AnyModel, item: Document | Query) -> Any:
    """Return the part of a document or query that a model encodes: text, weights by term, or vector.

    Raises:
        BadValueError: The document or query lacks this part.
    """
    text = item.text if isinstance(item, Query) else item.full_text
    if item.vector is not None and not text and not isinstance(model, Impacts | Vectors):
        raise BadValueError(
            f"{type(item).__name__.lower()} {item.id!r}: it has a vector and no text, but this model "
            "takes texts; vectors are indexed with the model 'vectors' and searched by vectors"
        )
    return model.content(item) if isinstance(model, EncoderFreeModel) else text


def default_index(model: AnyModel) -> IndexConfig:
    """Return the configuration of the index that `irkit.Retriever.build` makes by default."""
    if isinstance(model, EncoderFreeModel):
        return index_config(encoder_free_index(model.name))
    return index_config("inverted" if model.kind == "sparse" else "flat")


def load_model(choice: AnyModel | Mapping[str, Any] | str | Path, **options: Any) -> AnyModel:
    """Load a model.

    Args:
        choice: A model, which is returned; name or settings of a model of `irkit.encoder_free`; or an
            argument of `Model.from_pretrained`.
        options: Options of `Model.from_pretrained`.
    """
    if isinstance(choice, AnyModel):
        return choice
    if isinstance(choice, Mapping) or is_encoder_free(choice):
        return encoder_free_model(cast(str, choice))
    return Model.from_pretrained(choice, **options)


def check_placement(device: Device | None, dtype: object) -> None:
    """Check device and precision before a model is loaded.

    Raises:
        BadValueError: The device or the dtype is unknown.
    """
    from irkit.model.hardware import DTYPES, find_devices

    find_devices(device)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadValueError(f"dtype {brief(dtype)}: expected one of {', '.join(DTYPES)}")


def open_model(
    store: Store, choice: AnyModel | Mapping[str, Any] | str | Path | None, **options: Any
) -> AnyModel:
    """Load the model of an index: the recorded one, ``choice``, or BM25 with the settings ``choice``.

    Raises:
        StorageError: The model has no name, or is not where it was.
        BadValueError: ``choice`` has settings, but the recorded model is not BM25.
        ConfigError: A key or a value of ``choice`` is unknown.
    """
    saved = store.meta["model"]
    if isinstance(choice, Mapping):
        if saved["name"] == "bm25":
            return encoder_free_model({**saved["settings"], **choice})
        names = ", ".join(map(str, choice))
        raise BadValueError(
            f"opening an index: got settings of BM25 ({names}), but it was built with {format_model(saved)}; "
            "leave them out"
        )
    if choice is not None:
        return load_model(choice, **options)
    if "settings" in saved:
        return load_model(saved["settings"])
    advice = "give it: Retriever.load(path, model), or --model"
    if not saved["name"]:
        raise StorageError(
            f"index {store.path}: it was built with a model that was not saved and has no name; {advice}"
        )
    try:
        return load_model(saved["name"], **options)
    except StorageError as error:
        raise StorageError(f"index {store.path}: its model cannot be loaded: {error}; {advice}") from error


def model_manifest(model: AnyModel) -> dict[str, Any]:
    """Return the record of a model in the manifest of an index."""
    if isinstance(model, EncoderFreeModel):
        settings = model.config.model_dump(mode="json")
        return {
            "name": model.name,
            "fingerprint": model.fingerprint,
            "kind": model.kind,
            "dim": settings.get("dim"),  # None for terms, whose number grows with the documents
            "similarity": model.similarity_name,
            "settings": settings,
        }
    local = Path(model.name)
    queries = model.query_fingerprint
    return {
        "name": str(local.resolve()) if model.name and local.is_dir() else model.name,
        "fingerprint": model.fingerprint,
        **({"queries": queries} if queries else {}),
        **({"document_prompt": model.prompts["document"]} if model.kind == "dense" else {}),
        "document_length": model.max_length("document"),
        "kind": model.kind,
        "dim": model.dim,
        "similarity": model.similarity_name,
    }


def _check_described(path: Path, saved: Any) -> None:
    """Refuse a record that `model_manifest` cannot have written.

    Raises:
        CorruptError: A key is missing, or a value has another type.
    """
    texts = ("name", "fingerprint", "kind", "similarity")
    if not isinstance(saved, dict) or not {*texts, "dim"} <= set(saved):
        raise corrupt(path, f"its manifest describes no model: {saved!r:.100}")
    wrong = [
        key for key in (*texts, "queries", "document_prompt") if not isinstance(saved.get(key), str | None)
    ]
    wrong += [key for key in ("dim", "document_length") if type(saved.get(key)) not in (int, type(None))]
    settings = saved.get("settings", None if is_encoder_free(saved["name"]) else {})
    if wrong or not isinstance(settings, dict):
        raise corrupt(path, f"its manifest describes no model, see {wrong or ['settings']}")


def format_model(about: Mapping[str, Any]) -> str:
    """Write a recorded model as text, for messages."""
    if "settings" in about:
        settings = [f"{key} {value}" for key, value in about["settings"].items() if key != "kind"]
        return f"{about['name']} ({', '.join(settings)})"
    name = about["name"] or "a model without name"
    prompt = f", documents after {about['document_prompt']!r}" if about.get("document_prompt") else ""
    length = f", {about['document_length']} tokens of a document" if about.get("document_length") else ""
    what = f"{about['kind']} {about['dim']}, {about['similarity']}{length}{prompt}"
    return f"{name} ({what}, fingerprint {about['fingerprint'][:8]})"


def _same_documents(saved: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if two recorded models encode documents in the same way.

    Older indexes have no record of prompts of dense models, or of lengths; they match any.
    """
    if saved["name"] == other["name"] == "bm25":
        # k1 and b may change: an index stores counts, not weights
        first, second = ({**about["settings"], "k1": None, "b": None} for about in (saved, other))
        return first == second
    if saved["name"] == other["name"] == "vectors":  # kind and width may be left out
        return all(value in (None, saved["settings"].get(key)) for key, value in other["settings"].items())
    if any(key in saved and saved[key] != other.get(key) for key in ("document_prompt", "document_length")):
        return False
    if saved["similarity"] != other["similarity"] and "cosine" in (saved["similarity"], other["similarity"]):
        return False
    return all(other[key] == saved[key] for key in ("fingerprint", "kind", "dim"))


def check_model(path: Path, saved: Mapping[str, Any], model: AnyModel) -> None:
    """Refuse another model than the recorded one; warn if only its query side differs.

    Raises:
        BadValueError: The model encodes documents differently.
    """
    other = model_manifest(model)
    if not _same_documents(saved, other):
        raise BadValueError(
            f"index {path}: it was built with {format_model(saved)}, not with {format_model(other)}; use "
            "that model or build the index again"
        )
    if any(other.get(key) != saved.get(key) for key in ("queries", "similarity")):
        warnings.warn(
            f"index {path}: {format_model(other)} makes something else of queries than the model it was "
            "built with, of documents the same; results are those of the model given now",
            stacklevel=5,  # the caller of Retriever.model
        )
