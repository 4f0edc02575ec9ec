"""``irkit encode``: texts to a file of vectors."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from irkit.bars import bar
from irkit.cli.output import note
from irkit.errors import BadValueError, StorageError

if TYPE_CHECKING:
    from irkit.representation import Representation

    Parts = Iterator[tuple[list[str], Representation]]  # ids, and as many rows; one part or more

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
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... or cuda:0,cuda:1.")] = None,
) -> None:
    """Encode texts into a file.

    .npy holds vectors and .safetensors arrays of any model, in the order of the texts; .jsonl holds an
    object with id and vector a line. Texts are streamed: any number of them fits in memory.
    """
    if out.suffix not in _WRITERS:
        raise BadValueError(f"--out {out}: expected the extension {', '.join(_WRITERS)}")
    if not out.resolve().parent.is_dir():
        raise StorageError(f"--out {out}: there is no such directory")
    if out.is_dir():
        raise StorageError(f"--out {out}: it is a directory; name a file")
    from irkit.data import read_documents, read_queries
    from irkit.model import Model

    source = read_queries(texts) if side is Side.query else read_documents(texts)
    total = None
    if not source.once:
        with bar("checking", "texts") as update:
            total = 0
            for _ in source:
                total += 1
                update(1)
    encoder = Model.from_pretrained(model, device=device.split(",") if device else None, dtype=dtype)
    if encoder.kind != "dense" and out.suffix != ".safetensors":
        raise BadValueError(
            f"--out {out}: {model} makes {encoder.kind}, not one vector a text; give --out FILE.safetensors"
        )
    aside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with bar("encoding", "texts", total) as update:
            count = _WRITERS[out.suffix](aside, _encoded(encoder, source, side, update))
        aside.replace(out)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"writing {out}: {error.strerror or error}") from error
    finally:
        aside.unlink(missing_ok=True)
    note(f"encoded {count:,} texts into {out}")


def _encoded(model: Any, items: Iterable[Any], side: Side, update: Any) -> Parts:
    waiting: deque[str] = deque()

    def texts() -> Iterator[str]:
        for item in items:
            waiting.append(item.id)
            yield item.text if side is Side.query else item.full_text

    for part in model.represent_stream(texts(), side.value, progress=update):
        yield [waiting.popleft() for _ in range(len(part))], part


def _write_npy(path: Path, parts: Parts) -> int:
    from numpy.lib.format import write_array_header_1_0

    count = 0
    with path.open("wb") as stream:
        for _, part in parts:
            values = part.arrays()["values"]
            if not count:
                write_array_header_1_0(stream, _npy_header(0, part.dim))
            stream.write(values.tobytes())
            count += len(values)
        stream.seek(0)  # the header has room for the number of any rows
        write_array_header_1_0(stream, _npy_header(count, part.dim))
    return count


def _npy_header(rows: int, dim: int) -> dict[str, Any]:
    return {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)}


def _write_jsonl(path: Path, parts: Parts) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as stream:
        for ids, part in parts:
            for name, vector in zip(ids, part.arrays()["values"].tolist(), strict=True):
                stream.write(json.dumps({"id": name, "vector": vector}, ensure_ascii=False) + "\n")
            count += len(ids)
    return count


def _write_safetensors(path: Path, parts: Parts) -> int:
    """Every array grows in a file of its own: the header, which knows their lengths, comes before them."""
    import numpy as np

    count, last, files = 0, dict[str, Any](), dict[str, IO[bytes]]()
    with ExitStack() as stack:
        for ids, part in parts:
            lines = "".join(json.dumps(name) + "\n" for name in ids).encode()
            last = part.arrays() | {"ids": np.frombuffer(lines, np.uint8)}
            for name, array in last.items():
                if name not in files:
                    files[name] = stack.enter_context(tempfile.TemporaryFile(dir=path.parent))
                files[name].write(array.tobytes())
            count += len(ids)
        header: dict[str, Any] = {"__metadata__": {"kind": part.kind, "dim": str(part.dim)}}
        order, end = sorted(last, key=lambda name: -last[name].itemsize), 0  # keeps all of them aligned
        for name in order:
            array, start, end = last[name], end, end + files[name].tell()
            rows = (end - start) // array.itemsize // math.prod(array.shape[1:])
            header[name] = {
                "dtype": f"{array.dtype.kind.upper()}{8 * array.itemsize}",
                "shape": [rows, *array.shape[1:]],
                "data_offsets": [start, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                files[name].seek(0)
                shutil.copyfileobj(files[name], stream, 1 << 20)
    return count


_WRITERS = {".npy": _write_npy, ".safetensors": _write_safetensors, ".jsonl": _write_jsonl}
