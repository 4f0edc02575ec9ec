"""Write representations to files, part by part: .npy, .safetensors or .jsonl."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.lib.format import write_array_header_1_0

from irkit.utils.atomic import replacing

if TYPE_CHECKING:
    from irkit.core.representation import Representation

Parts: TypeAlias = "Iterator[tuple[list[str], Representation]]"
"""Pairs of ids and a representation with as many rows; at least one part."""


def write_vectors(path: Path, parts: Parts, vocabulary: Sequence[str] | None = None) -> int:
    r"""Write representations to a file, which appears whole or not at all.

    Args:
        path: Ends in one of `SUFFIXES`. .npy holds dense vectors; .jsonl holds one object per line with id
            and vector, weights by term for sparse representations, as Anserini reads them; .safetensors
            holds the arrays of any representation, and ``ids``, one JSON string per line.
        parts: In the order of the rows; only one part is held in memory.
        vocabulary: Names of the terms of sparse representations, for .jsonl.

    Returns:
        The number of rows.

    Raises:
        StorageError: The disk is full, or the file cannot be written.

    Examples:
        >>> import tempfile, torch
        >>> from irkit import Sparse
        >>> path = Path(tempfile.mkdtemp(), "impacts.jsonl")
        >>> rows = Sparse.from_dense(torch.tensor([[0.0, 1.5]]))
        >>> write_vectors(path, iter([(["d1"], rows)]), ["cat", "dog"])
        1
        >>> path.read_text()
        '{"id": "d1", "contents": "", "vector": {"dog": 1.5}}\n'
    """
    with replacing(path) as aside:
        if path.suffix == ".jsonl" and vocabulary is not None:
            return _write_impacts(aside, parts, vocabulary)
        return _WRITERS[path.suffix](aside, parts)


def _write_npy(path: Path, parts: Parts) -> int:
    count = 0
    with path.open("wb") as stream:
        for _, part in parts:
            values = part.arrays()["values"]
            if not count:
                write_array_header_1_0(stream, _npy_header(0, part.dim))
            stream.write(values.tobytes())
            count += len(values)
        stream.seek(0)  # the header has room for any number of rows
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


def _write_impacts(path: Path, parts: Parts, vocabulary: Sequence[str]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as stream:
        for ids, part in parts:
            arrays = part.arrays()
            terms = [vocabulary[term] for term in arrays["terms"].tolist()]
            values = arrays["weights"]
            short = values.astype("U32").astype(float)  # the fewest digits that read back as the same float32
            row = zip(terms, np.where(values == np.rint(values), values, short).tolist(), strict=True)
            for name, length in zip(ids, arrays["lengths"].tolist(), strict=True):
                record = {"id": name, "contents": "", "vector": dict(islice(row, length))}
                stream.write(json.dumps(record, ensure_ascii=False) + "\n")
            count += len(ids)
    return count


def _write_safetensors(path: Path, parts: Parts) -> int:
    """Write each array to a temporary file first: the header before them has their lengths."""
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
        order, end = sorted(last, key=lambda name: -last[name].itemsize), 0  # keeps arrays aligned
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
SUFFIXES = tuple(_WRITERS)
