"""Read and write model directories; find out which format a directory has."""

from __future__ import annotations

import re
import shutil
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError

from irkit.encoder import AnyEncoder
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.errors import BadValueError, CorruptError, StorageError, reraise_as
from irkit.formats.bge_m3 import BGE_M3
from irkit.formats.huggingface import HUGGINGFACE
from irkit.formats.parts import SIMILARITIES, Format, LoadEncoder, Parts, SideParts, static_parts
from irkit.formats.sentence_transformers import SENTENCE_TRANSFORMERS, text_encoder
from irkit.formats.several import SEVERAL_HEADS
from irkit.formats.stanford import STANFORD
from irkit.formats.static import MODEL2VEC
from irkit.tokenizer import Tokenizer
from irkit.utils.atomic import scratch, sync_name, sync_tree
from irkit.utils.plugins import Registry

__all__ = [
    "SIMILARITIES",
    "AnyEncoder",
    "LoadEncoder",
    "Parts",
    "SideParts",
    "read_encoder",
    "read_model",
    "static_parts",
    "write_model",
]

FORMATS: Registry[Format] = Registry(
    "irkit.formats",
    Format,
    {
        "several-heads": SEVERAL_HEADS,
        "bge-m3": BGE_M3,
        "model2vec": MODEL2VEC,
        "sentence-transformers": SENTENCE_TRANSFORMERS,
        "huggingface": HUGGINGFACE,
        "stanford": STANFORD,
    },
)
"""Kinds of model directories by name; other packages add theirs as entry points ``irkit.formats``."""

_ADVICE = "a file holds a value of the wrong kind or size; download or save the model again"
_FOLDERS = re.compile(r"(query_|document_)?\d+_\w+|query|heads")
_FILES = re.compile(  # what this and other libraries write beside each other in a model directory
    r"(modules|config|config_sentence_transformers|sentence_\w+_config|router_config|generation_config"
    r"|data_config|idf|heads|vocab|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocabulary_transfer"
    r"|(model|pytorch_model).*\.index)\.json"
    r"|(model|pytorch_model)[\w-]*\.(safetensors|bin)|(colbert|sparse)_linear\.(pt|safetensors)"
    r"|(vocab|merges)\.txt|\w+(\.bpe)?\.model|artifact\.metadata|README\.md|\.gitattributes"
    r"|\.[\w.]+\.\d+\.part"  # by a kill, see irkit.utils.atomic.replacing
)


def read_model(directory: str | Path, load_encoder: LoadEncoder) -> Parts:
    """Read a model directory of any known format.

    Args:
        directory: Holds a model of sentence-transformers, PyLate, Stanford's ColBERT or Hugging Face.
        load_encoder: Function that makes an encoder from the directory that holds its weights.

    Returns:
        The arguments of `irkit.model.Model`, see `Parts`.

    Raises:
        StorageError: ``directory`` is not a model directory.
        ConfigError: irkit cannot run this kind of model.
        CorruptError: The files of the model do not fit each other.
    """
    folder = Path(directory)
    formats = (FORMATS[name] for name in FORMATS if FORMATS[name] is not HUGGINGFACE)
    # a bare Hugging Face encoder is what no other format takes
    readers = (entry.read for entry in chain(formats, [HUGGINGFACE]) if entry.read and entry.fits(folder))
    if (read := next(readers, None)) is not None:
        # on the CPU whatever the default of torch is
        with torch.device("cpu"), reraise_as(CorruptError, f"loading {folder}", _ADVICE):
            parts = read(folder, load_encoder)
            for side in (parts, parts.get("query", parts)):
                _check_ids(side["tokenizer"], side["encoder"], folder)
            return parts
    if next(folder.glob("*.dnn"), None) is not None:
        raise StorageError(
            f"loading {folder}: a checkpoint of ColBERT's first version (.dnn), which only ColBERT itself "
            "opens; convert it there with save_pretrained"
        )
    raise StorageError(
        f"loading {folder}: not a model directory, it holds neither modules.json nor config.json"
    )


def read_encoder(directory: str | Path, load_encoder: LoadEncoder) -> tuple[Tokenizer, AnyEncoder]:
    """Read only the tokenizer and the encoder (of documents) of a model directory of any known format.

    For arguments and errors see `read_model`.
    """
    folder = Path(directory)
    if (folder / "modules.json").is_file():
        folder = text_encoder(folder)
    elif MODEL2VEC.fits(folder) or not (folder / "config.json").is_file():  # no encoder of Hugging Face
        parts = read_model(folder, load_encoder)
        return parts["tokenizer"], cast(AnyEncoder, parts["encoder"])
    with reraise_as(CorruptError, f"loading {folder}", _ADVICE):
        tokenizer, encoder = Tokenizer.from_pretrained(folder), load_encoder(folder)
        _check_ids(tokenizer, encoder, folder)
        return tokenizer, encoder


def _check_ids(tokenizer: Tokenizer, encoder: AnyEncoder | InferenceFreeEncoder, folder: Path) -> None:
    """Raise CorruptError if the tokenizer can give an id for which the encoder has no word embedding."""
    if isinstance(encoder, InferenceFreeEncoder):
        return
    highest, rows = tokenizer.highest_id(), len(encoder.word_embeddings)
    if highest >= rows:
        raise CorruptError(
            f"loading {folder}: the tokenizer has ids up to {highest}, the encoder embeds {rows} tokens; "
            "they are not of one model, or the embeddings were not resized for added tokens"
        )


def write_model(parts: Parts, directory: str | Path, format: str = "sentence-transformers") -> None:
    """Write a model directory that the library of the format opens as the same model.

    The directory appears whole or not at all. It replaces a model directory of the same name, but keeps the
    README.md of the old directory.

    Args:
        parts: Arguments of `irkit.model.Model`.
        directory: Directory to write to.
        format: ``"sentence-transformers"``, ``"stanford"`` (ColBERT), or for a model with several heads
            ``"several-heads"`` or ``"bge-m3"``.

    Raises:
        BadValueError: The format is unknown, or cannot express the model.
        StorageError: ``directory`` exists and is not a model directory, or holds other files too.
    """
    write = FORMATS[format].write if format in FORMATS else None
    if write is None:
        names = [name for name in FORMATS if FORMATS[name].write is not None]
        raise BadValueError(f"saving a model: format {format!r}, expected {' or '.join(names)}")
    if "query" in parts and not FORMATS[format].query_side:
        raise BadValueError(f"saving a model: format {format!r} has no place for a query side of its own")
    target = Path(directory).resolve()
    _check_replaceable(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch(target) as temporary:
            new, old = temporary / "new", temporary / "old"
            write(parts, new)
            if (target / "README.md").is_file():
                shutil.copyfile(target / "README.md", new / "README.md")
            sync_tree(new)
            try:
                if target.exists():
                    target.rename(old)
                new.rename(target)
                sync_name(target)
            except BaseException:
                if old.exists() and not target.exists():
                    old.rename(target)
                raise
    except (OSError, SafetensorError) as error:  # the latter where transformers writes weights
        raise StorageError(f"saving a model to {target}: {error}") from error


def _check_replaceable(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise StorageError(f"saving a model to {target}: a file is in the way")
    entries = list(target.iterdir()) if target.exists() else []
    fitting = [FORMATS[name] for name in FORMATS if FORMATS[name].fits(target)] if entries else []
    if entries and not fitting:
        raise StorageError(f"saving a model to {target}: the directory is neither empty nor a model's")
    known = {entry.name: _FOLDERS if entry.is_dir() else _FILES for entry in entries}
    own = {name for format in fitting for name in format.files}
    foreign = sorted(name for name, names in known.items() if name not in own and not names.fullmatch(name))
    if foreign:
        raise StorageError(
            f"saving a model to {target}: replacing the model there would delete {', '.join(foreign[:5])}; "
            "move that away or save elsewhere"
        )
