"""Directories of models with several heads on one encoder, in irkit's own layout.

The directory is one of sentence-transformers for the first head, which other readers open as any.
``heads.json`` beside it makes it a model of several heads. It lists all heads in order.
Each has its similarity and, except for the first, the modules after the Transformer, in folders under
``heads``, and the settings that a directory of its own would keep in sentence_bert_config.json
(``transformer``) and config_sentence_transformers.json (``settings``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from irkit.config import read_json
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.formats.parts import SIMILARITIES, Format, LoadEncoder, Parts
from irkit.formats.sentence_transformers import SENTENCE_TRANSFORMERS, read_head, write_modules
from irkit.heads import Head, OpenedModel, SeveralHeads
from irkit.heads.layer_modules import known_modules, write_json

_FILE, _FOLDER = "heads.json", "heads"


def joined(parts: Parts, heads: Mapping[str, Head], similarities: Mapping[str, str]) -> Parts:
    """Return the parts of a model with the encoder and the settings of ``parts``, and with several heads.

    Raises:
        ConfigError: ``parts`` cut vectors.
    """
    if parts.get("truncate_dim"):
        raise ConfigError(
            f"loading a model of several heads: truncate_dim {parts['truncate_dim']!r:.40}, expected none, "
            "because heads keep all dimensions; remove it from config_sentence_transformers.json"
        )
    settings = {
        key: value
        for key, value in parts.items()
        if key in ("tokenizer", "encoder", "prompts", "default_prompt_name")
    }
    return cast(Parts, {**settings, "head": SeveralHeads(heads, similarities)})


def as_several(parts: Parts, format: str) -> Head:
    """Return the head of a model of several heads.

    Raises:
        BadValueError: The model has one head.
    """
    if not parts["head"].parts:
        raise BadValueError(
            f"saving a model: format {format!r} is for models of several heads, this one has one; save it as "
            "'sentence-transformers'"
        )
    return parts["head"]


def _read(folder: Path, load_encoder: LoadEncoder) -> Parts:
    """Read a directory of a model of several heads.

    Raises:
        CorruptError: heads.json does not list heads, or the folder of a head is missing.
    """
    listed = read_json(folder / _FILE).get("heads")
    if not isinstance(listed, dict) or not all(isinstance(about, dict) for about in listed.values()):
        raise CorruptError(f"reading {folder / _FILE}: heads are {listed!r:.60}, expected settings by name")
    assert SENTENCE_TRANSFORMERS.read is not None
    parts = SENTENCE_TRANSFORMERS.read(folder, load_encoder)
    heads, similarities = dict[str, Head](), dict[str, str]()
    for name, about in listed.items():
        heads[name] = _read_one(folder, name, about, parts) if heads else parts["head"]
        similarity = about.get("similarity")
        if similarity is not None and similarity not in SIMILARITIES[heads[name].kind]:
            known = ", ".join(SIMILARITIES[heads[name].kind])
            raise CorruptError(
                f"reading {folder / _FILE}: similarity {similarity!r:.60} of {name}, expected one of {known}"
            )
        if similarity is not None:
            similarities[name] = similarity
    try:
        return joined(parts, heads, similarities)
    except BadValueError as error:
        raise CorruptError(f"loading {folder}: {error}") from error


def _read_one(folder: Path, name: str, about: Mapping[str, Any], parts: Parts) -> Head:
    try:
        entries = [(entry["type"], entry["path"]) for entry in about["modules"]]
        settings, transformer, kind = dict(about["settings"]), dict(about["transformer"]), about["model_type"]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"reading {folder / _FILE}: head {name!r:.60} lacks {error}") from error
    modules = known_modules(folder, entries, _FILE)
    for _, path in modules:
        if not path.is_dir():
            raise CorruptError(f"loading {folder}: {path.relative_to(folder)} of head {name!r} is missing")
    encoder: Any = parts["encoder"]
    opened = OpenedModel(folder, modules, encoder, parts["tokenizer"], settings, transformer)
    return read_head(str(kind), opened)


def _write(parts: Parts, folder: Path) -> None:
    """Write a directory of a model of several heads, see `irkit.formats.write_model`."""
    head = as_several(parts, "several-heads")
    encoder: Any = parts["encoder"]
    (first_name, first), *others = head.parts.items()
    write = SENTENCE_TRANSFORMERS.write
    assert write is not None
    settings = {key: value for key, value in parts.items() if key not in ("head", "similarity_name")}
    similarity = head.similarities.get(first_name)
    write(cast(Parts, {**settings, "head": first, "similarity_name": similarity}), folder)
    for _, other in others:
        if type(other).save_encoder is not Head.save_encoder:  # the encoder is saved with the head
            other.save_encoder(encoder, folder)
    listed: dict[str, Any] = {first_name: {"similarity": similarity}}
    for name, other in others:
        listed[name] = {
            "similarity": head.similarities.get(name),
            "model_type": other.model_type,
            "modules": [
                {"type": kind, "path": path}
                for path, kind in write_modules(other, encoder, folder, f"{_FOLDER}/{name}/")
            ],
            "settings": other.directory_settings(other),
            "transformer": other.transformer_settings(),
        }
    write_json(folder / _FILE, {"heads": listed})


SEVERAL_HEADS = Format(lambda folder: (folder / _FILE).is_file(), _read, _write)
