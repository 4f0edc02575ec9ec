"""``irkit encode``: texts to a file of vectors."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irkit.bars import bar
from irkit.cli.output import note
from irkit.errors import BadValueError, StorageError

if TYPE_CHECKING:
    import numpy as np

    from irkit.representation import Representation

__all__ = ["encode"]


class Side(StrEnum):
    """What texts are to the model."""

    query = "query"
    document = "document"


def encode(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory or hub name.")],
    texts: Annotated[
        str, typer.Argument(metavar="TEXTS", help="Documents or queries, as for index and search.")
    ],
    out: Annotated[Path, typer.Option(help="File to write: .npy, .safetensors or .jsonl.")],
    side: Annotated[Side, typer.Option(help="Which prompt the texts get.")] = Side.document,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or int8.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
) -> None:
    """Encode texts into a file.

    .npy holds vectors and .safetensors arrays of any model, in the order of the texts; .jsonl holds an
    object with id and vector a line.
    """
    if out.suffix not in _WRITERS:
        raise BadValueError(f"--out {out}: expected the extension {', '.join(_WRITERS)}")
    if not out.resolve().parent.is_dir():
        raise StorageError(f"--out {out}: there is no such directory")
    if out.is_dir():
        raise StorageError(f"--out {out}: it is a directory; name a file")
    from irkit.data import read_documents, read_queries
    from irkit.model import Model

    if side is Side.query:
        pairs = [(query.id, query.text) for query in read_queries(texts)]
    else:
        pairs = [(document.id, document.full_text) for document in read_documents(texts)]
    encoder = Model.from_pretrained(model, device=device, dtype=dtype)
    with bar("encoding", "texts", len(pairs)) as update:
        result = encoder.represent([text for _, text in pairs], side.value, progress=update)
    aside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        _WRITERS[out.suffix](aside, result, [name for name, _ in pairs])
        aside.replace(out)
    except OSError as error:
        raise StorageError(f"writing {out}: {error.strerror or error}") from error
    finally:
        aside.unlink(missing_ok=True)
    note(f"encoded {len(pairs):,} texts into {out}")


def _write_npy(path: Path, result: Representation, ids: list[str]) -> None:
    import numpy as np

    with path.open("wb") as stream:
        np.save(stream, _vectors(result))


def _write_safetensors(path: Path, result: Representation, ids: list[str]) -> None:
    from safetensors.numpy import save_file

    save_file(result.arrays(), path, {"kind": result.kind, "dim": str(result.dim), "ids": json.dumps(ids)})


def _write_jsonl(path: Path, result: Representation, ids: list[str]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        for name, vector in zip(ids, _vectors(result).tolist(), strict=True):
            stream.write(json.dumps({"id": name, "vector": vector}, ensure_ascii=False) + "\n")


def _vectors(result: Representation) -> np.ndarray[Any, Any]:
    if result.kind != "dense":
        raise BadValueError(
            f"the model makes {result.kind}, not one vector a text; give --out FILE.safetensors"
        )
    return result.arrays()["values"]


_WRITERS = {".npy": _write_npy, ".safetensors": _write_safetensors, ".jsonl": _write_jsonl}
