"""The identity of a model: how an index records it, loads it again, and refuses another one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

from irkit.arguments import brief
from irkit.encoder_free import EncoderFreeModel, encoder_free_index, encoder_free_model, is_encoder_free
from irkit.errors import BadValueError, StorageError
from irkit.index import IndexConfig, index_config
from irkit.index.array_files import corrupt
from irkit.model import Device, Model

AnyModel: TypeAlias = Model | EncoderFreeModel
"""A model that encodes queries and documents of an index."""

_LATE_SETTINGS = ("k1", "b")  # settings of BM25 that may change: an index stores counts, not weights


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
        BadValueError: There is no such device or dtype.
    """
    from irkit.model.hardware import DTYPES, find_devices

    find_devices(device)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadValueError(f"dtype {brief(dtype)}: expected one of {', '.join(DTYPES)}")


def load_recorded_model(path: Path, saved: Mapping[str, Any], **options: Any) -> AnyModel:
    """Load the model that the index at ``path`` recorded by `model_manifest`.

    Raises:
        StorageError: The model has no name, or is not where it was.
    """
    if "settings" in saved:
        return load_model(saved["settings"])
    advice = "give it: Retriever.load(path, model), or --model"
    if not saved["name"]:
        raise StorageError(
            f"index {path}: it was built with a model that was not saved and has no name; {advice}"
        )
    try:
        return load_model(saved["name"], **options)
    except StorageError as error:
        raise StorageError(f"index {path}: its model cannot be loaded: {error}; {advice}") from error


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


def check_described(path: Path, saved: Any) -> None:
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


def same_documents(saved: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if two recorded models encode documents in the same way.

    Older indexes have no record of prompts of dense models, or of lengths; they match any.
    """
    if saved["name"] == other["name"] == "bm25":
        first, second = ({**about["settings"], **dict.fromkeys(_LATE_SETTINGS)} for about in (saved, other))
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
    if not same_documents(saved, other):
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


def changed_settings(saved: Mapping[str, Any], changes: Mapping[str, Any]) -> EncoderFreeModel:
    """Return the BM25 model recorded in the index, with other settings.

    Raises:
        BadValueError: The recorded model is not BM25.
        ConfigError: A key or a value is unknown.
    """
    if saved["name"] != "bm25":
        names = ", ".join(map(str, changes))
        raise BadValueError(
            f"opening an index: got settings of BM25 ({names}), but it was built with {format_model(saved)}; "
            "leave them out"
        )
    return encoder_free_model({**saved["settings"], **changes})
