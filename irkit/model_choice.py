"""Which model a `irkit.Retriever` has: a neural one or a lexical one, its index, and how indexes name it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

from irkit.arguments import shown
from irkit.errors import BadValueError, CorruptError, StorageError
from irkit.index import IndexConfig, index_config
from irkit.index.files import REMEDY
from irkit.lexical import LexicalModel, is_lexical, lexical_index, lexical_model
from irkit.model import Device, Model

__all__ = [
    "AnyModel",
    "changed_settings",
    "check_described",
    "check_model",
    "check_placement",
    "default_index",
    "describe_model",
    "load_model",
    "name_model",
    "named_model",
    "same_documents",
]

AnyModel: TypeAlias = Model | LexicalModel
"""What represents queries and documents of a retriever."""

_WHEN_OPENED = ("k1", "b")  # of BM25: an index keeps counts, which they make weights of


def default_index(model: AnyModel) -> IndexConfig:
    """The index that `Retriever.build` makes unless it is told another one."""
    if isinstance(model, LexicalModel):
        return index_config(lexical_index(model.name))
    return index_config("inverted" if model.kind == "sparse" else "flat")


def load_model(choice: AnyModel | Mapping[str, Any] | str | Path, **options: Any) -> AnyModel:
    """The model that is meant.

    Args:
        choice: A model; the settings of one of `irkit.lexical`, or its name; or what `Model.from_pretrained`
            takes.
        options: Of `Model.from_pretrained`.
    """
    if isinstance(choice, AnyModel):
        return choice
    if isinstance(choice, Mapping) or is_lexical(choice):
        return lexical_model(cast(str, choice))
    return Model.from_pretrained(choice, **options)


def check_placement(device: Device | None, dtype: object) -> None:
    """Refuse devices that are not there, and unknown precisions, before a model is looked for.

    Raises:
        BadValueError: There is no such device or dtype.
    """
    from irkit.model.hardware import DTYPES, find_devices  # imports what runs models

    find_devices(device)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadValueError(f"dtype {shown(dtype)}: expected one of {', '.join(DTYPES)}")


def named_model(path: Path, saved: Mapping[str, Any], **options: Any) -> AnyModel:
    """The model that an index at ``path`` names, from what `describe_model` said of it; options of the above.

    Raises:
        StorageError: It has no name, or is not where it was.
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


def describe_model(model: AnyModel) -> dict[str, Any]:
    """What the manifest says of the model."""
    if isinstance(model, LexicalModel):
        settings = model.config.model_dump(mode="json")
        return {
            "name": model.name,
            "fingerprint": model.fingerprint,
            "kind": model.kind,
            "dim": settings.get("dim"),  # of terms as many as the documents have
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
    """Refuse what `describe_model` cannot have said.

    Raises:
        CorruptError: It is something else.
    """
    wrong, texts = [], ("name", "fingerprint", "kind", "similarity")
    if not isinstance(saved, dict) or not {*texts, "dim"} <= set(saved):
        raise CorruptError(f"index {path}: its manifest describes no model: {saved!r:.100}; {REMEDY}")
    for key in (*texts, "queries", "document_prompt"):
        wrong += [key] * (not isinstance(saved.get(key), str | None))
    for key in ("dim", "document_length"):
        wrong += [key] * (type(saved.get(key)) not in (int, type(None)))
    settings = saved.get("settings", None if is_lexical(saved["name"]) else {})
    if wrong or not isinstance(settings, dict):
        raise CorruptError(
            f"index {path}: its manifest describes no model, see {wrong or ['settings']}; {REMEDY}"
        )


def name_model(about: Mapping[str, Any]) -> str:
    """A model for messages, from what `describe_model` said of it."""
    if "settings" in about:
        settings = [f"{key} {value}" for key, value in about["settings"].items() if key != "kind"]
        return f"{about['name']} ({', '.join(settings)})"
    name = about["name"] or "a model without name"
    prompt = f", documents after {about['document_prompt']!r}" if about.get("document_prompt") else ""
    length = f", {about['document_length']} tokens of a document" if about.get("document_length") else ""
    what = f"{about['kind']} {about['dim']}, {about['similarity']}{length}{prompt}"
    return f"{name} ({what}, fingerprint {about['fingerprint'][:8]})"


def same_documents(saved: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether two models that `describe_model` said this of make the same of documents.

    An index that was built before prompts of dense models, or lengths, were noted goes with any.
    """
    if saved["name"] == given["name"] == "bm25":
        first, second = ({**about["settings"], **dict.fromkeys(_WHEN_OPENED)} for about in (saved, given))
        return first == second
    if saved["name"] == given["name"] == "vectors":  # kind and width may be left out
        return all(value in (None, saved["settings"].get(key)) for key, value in given["settings"].items())
    if any(key in saved and saved[key] != given.get(key) for key in ("document_prompt", "document_length")):
        return False
    if saved["similarity"] != given["similarity"] and "cosine" in (saved["similarity"], given["similarity"]):
        return False
    return all(given[key] == saved[key] for key in ("fingerprint", "kind", "dim"))


def check_model(path: Path, saved: Mapping[str, Any], model: AnyModel) -> None:
    """Refuse another model than `describe_model` said this of; warn if only its query side is another one.

    Raises:
        BadValueError: It makes something else of documents.
    """
    given = describe_model(model)
    if not same_documents(saved, given):
        raise BadValueError(
            f"index {path}: it was built with {name_model(saved)}, not with {name_model(given)}; use that "
            "model or build the index again"
        )
    if any(given.get(key) != saved.get(key) for key in ("queries", "similarity")):
        warnings.warn(
            f"index {path}: {name_model(given)} makes something else of queries than the model it was built "
            "with, of documents the same; results are those of the model given now",
            stacklevel=4,  # whoever needed the model of a Retriever
        )


def changed_settings(saved: Mapping[str, Any], changes: Mapping[str, Any]) -> LexicalModel:
    """The BM25 that `describe_model` said this of, with other settings.

    Raises:
        BadValueError: It was another model.
        ConfigError: A key or a value is unknown.
    """
    if saved["name"] != "bm25":
        some = ", ".join(map(str, changes))
        raise BadValueError(
            f"opening an index: got settings of BM25 ({some}), but it was built with {name_model(saved)}; "
            "leave them out"
        )
    return lexical_model({**saved["settings"], **changes})
