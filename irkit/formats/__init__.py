"""Model directories: which format one has, what is read from it, and what is written."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from irkit.encoder.lookup import NoEncoder
from irkit.errors import BadValueError, ConfigError, CorruptError, StorageError, told_as
from irkit.files import scratch, sync, sync_name
from irkit.formats import huggingface, sentence_transformers, stanford
from irkit.formats.parts import SIMILARITIES, AnyEncoder, LoadEncoder, Parts, SideParts
from irkit.tokenizer import Tokenizer

__all__ = [
    "SIMILARITIES",
    "AnyEncoder",
    "LoadEncoder",
    "Parts",
    "SideParts",
    "flush",
    "read_encoder",
    "read_model",
    "write_model",
]

FORMATS = (  # file that marks a directory, reader; the first that fits is taken
    ("modules.json", sentence_transformers.read),
    ("config.json", huggingface.read),
)
WRITERS = {"sentence-transformers": sentence_transformers.write, "stanford": stanford.write}
_ADVICE = "a file holds a value of the wrong kind or size; download or save the model again"
_FOLDERS = re.compile(r"(query_|document_)?\d+_\w+|query")
_FILES = re.compile(  # what this and other libraries write beside each other in a model directory
    r"(modules|config|config_sentence_transformers|sentence_\w+_config|router_config|generation_config"
    r"|data_config|idf|vocab|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocabulary_transfer"
    r"|(model|pytorch_model).*\.index)\.json"
    r"|(model|pytorch_model)[\w-]*\.(safetensors|bin)"
    r"|(vocab|merges)\.txt|\w+(\.bpe)?\.model|artifact\.metadata|README\.md|\.gitattributes"
    r"|\.[\w.]+\.\d+\.part"  # by a kill, see irkit.files.replacing
)


def read_model(directory: str | Path, load_encoder: LoadEncoder) -> Parts:
    """Read a model directory of any known format.

    Args:
        directory: Of sentence-transformers, PyLate or Stanford's ColBERT, or a bare Hugging Face encoder.
        load_encoder: Makes the encoder from the directory with its weights.

    Returns:
        What `irkit.model.Model` is made of.

    Raises:
        StorageError: It is no model directory.
        ConfigError: It is one, of a kind that irkit cannot run.
        CorruptError: Its files do not fit each other.
    """
    folder = Path(directory)
    _refuse_adapter(folder)
    for mark, read in FORMATS:
        if (folder / mark).is_file():
            # on the CPU whatever the default of torch is
            with torch.device("cpu"), told_as(CorruptError, f"loading {folder}", _ADVICE):
                parts = read(folder, load_encoder)
                sides: list[SideParts] = [parts, *([parts["query"]] if "query" in parts else [])]
                for side in sides:
                    _check_ids(side["tokenizer"], side["encoder"], folder)
                return parts
    if next(folder.glob("*.dnn"), None) is not None:
        raise StorageError(
            f"loading {folder}: a checkpoint of ColBERT's first version (.dnn), which only ColBERT itself "
            "opens; convert it there with save_pretrained"
        )
    marks = " nor ".join(mark for mark, _ in FORMATS)
    raise StorageError(f"loading {folder}: not a model directory, it holds neither {marks}")


def read_encoder(directory: str | Path, load_encoder: LoadEncoder) -> tuple[Tokenizer, AnyEncoder]:
    """Read tokenizer and encoder of a model directory of any known format; arguments as for `read_model`."""
    folder = Path(directory)
    _refuse_adapter(folder)
    if (folder / "modules.json").is_file():
        folder = sentence_transformers.text_encoder(folder)
    if not (folder / "config.json").is_file():
        raise StorageError(f"loading {folder}: not a model directory, it holds no config.json")
    with told_as(CorruptError, f"loading {folder}", _ADVICE):
        tokenizer, encoder = Tokenizer.from_pretrained(folder), load_encoder(folder)
        _check_ids(tokenizer, encoder, folder)
        return tokenizer, encoder


def _check_ids(tokenizer: Tokenizer, encoder: AnyEncoder | NoEncoder, folder: Path) -> None:
    """Raise where a text could get an id that the encoder has no vector for."""
    if isinstance(encoder, NoEncoder):
        return
    highest, rows = tokenizer.highest_id(), len(encoder.word_embeddings)
    if highest >= rows:
        raise CorruptError(
            f"loading {folder}: the tokenizer has ids up to {highest}, the encoder embeds {rows} tokens; "
            "they are not of one model, or the embeddings were not resized for added tokens"
        )


def _refuse_adapter(folder: Path) -> None:
    for marks in ("adapter_config.json", "*/adapter_config.json"):  # here or in the folder of a Transformer
        if next(folder.glob(marks), None) is not None:
            raise ConfigError(
                f"loading {folder}: a PEFT adapter without the model it belongs to; merge both "
                "(merge_and_unload) and save that"
            )


def write_model(parts: Parts, directory: str | Path, format: str = "sentence-transformers") -> None:
    """Write a directory that sentence-transformers, or the library of another format, opens alike.

    It appears whole or not at all. A model directory that is there already is replaced, but for its
    README.md.

    Args:
        parts: Of the model.
        directory: Where.
        format: ``"sentence-transformers"`` or ``"stanford"`` (ColBERT).

    Raises:
        BadValueError: There is no such format, or it cannot express the model.
        StorageError: What is there is no model directory, or holds more than a model.
    """
    if format not in WRITERS:
        raise BadValueError(f"saving a model: format {format!r}, expected {' or '.join(WRITERS)}")
    if format != "sentence-transformers" and "query" in parts:
        raise BadValueError(f"saving a model: format {format!r} has no place for a query side of its own")
    target = Path(directory).resolve()
    _check_replaceable(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch(target) as temporary:
            new, old = temporary / "new", temporary / "old"
            WRITERS[format](parts, new)
            if (target / "README.md").is_file():
                shutil.copyfile(target / "README.md", new / "README.md")
            flush(new)
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
    if entries and not any((target / mark).is_file() for mark, _ in FORMATS):
        raise StorageError(f"saving a model to {target}: the directory is neither empty nor a model's")
    foreign = sorted(entry.name for entry in entries if not _is_part(entry))
    if foreign:
        raise StorageError(
            f"saving a model to {target}: replacing the model there would delete {', '.join(foreign[:5])}; "
            "move that away or save elsewhere"
        )


def _is_part(entry: Path) -> bool:
    """Whether a file or folder can belong to a model directory."""
    return (_FOLDERS if entry.is_dir() else _FILES).fullmatch(entry.name) is not None


def flush(folder: Path) -> None:
    """Wait until a folder and all that is in it have reached the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)
