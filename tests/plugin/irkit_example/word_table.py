"""A format of model directories: a vector per token, one per line of a text file, as GloVe writes vectors."""

from __future__ import annotations

from pathlib import Path

import torch

from irkit.config import read_json
from irkit.encoder.static_encoder import StaticEncoder
from irkit.errors import BadValueError, CorruptError, StorageError
from irkit.formats.parts import Format, LoadEncoder, Parts
from irkit.heads import Normalize, PooledHead
from irkit.heads.layer_modules import write_json
from irkit.tokenizer import Tokenizer

__all__ = ["WORD_TABLE"]


def _read(folder: Path, load_encoder: LoadEncoder) -> Parts:
    """Read table.json, vectors.txt and the tokenizer; a text is the mean of the vectors of its tokens."""
    settings = read_json(folder / "table.json")
    if not isinstance(settings, dict):
        raise CorruptError(f"loading {folder}: table.json holds {settings!r:.40}, expected an object")
    if not (folder / "vectors.txt").is_file():
        raise StorageError(f"loading {folder}: expected vectors.txt")
    lines = (folder / "vectors.txt").read_text("utf-8").splitlines()
    rows = [[float(number) for number in line.split(" ")] for line in lines]
    if len({*map(len, rows)}) != 1:
        raise CorruptError(f"loading {folder}: the lines of vectors.txt are not equally long")
    encoder = StaticEncoder(torch.tensor(rows)).eval()
    tokenizer = Tokenizer.from_pretrained(folder).without_special_tokens()
    head = PooledHead(encoder.hidden_size, "mean", [Normalize()] if settings.get("unit") else [])
    return {"tokenizer": tokenizer, "encoder": encoder, "head": head}


def _write(parts: Parts, folder: Path) -> None:
    """Write what `_read` reads."""
    encoder, head, tokenizer = parts["encoder"], parts["head"], parts["tokenizer"]
    is_mean = isinstance(head, PooledHead) and head.pooling == ("mean",) and len(head.layers) == head.unit
    if not isinstance(encoder, StaticEncoder) or not is_mean:
        raise BadValueError("saving a model: a word table holds the mean of one vector per token, no layers")
    folder.mkdir(parents=True)
    tokenizer.save(folder)
    write_json(folder / "table.json", {"unit": head.unit})
    lines = [" ".join(map(repr, row)) + "\n" for row in encoder.word_embeddings.tolist()]
    (folder / "vectors.txt").write_text("".join(lines), "utf-8")


def _fits(folder: Path) -> bool:
    return (folder / "table.json").is_file()


WORD_TABLE = Format(_fits, _read, _write, files=("table.json", "vectors.txt"))
