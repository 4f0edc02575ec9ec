"""Read files of vectors record by record: files of `irkit encode` and arrays of numpy, memory-mapped."""

from __future__ import annotations

import json
import math
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from irkit.errors import BadValueError, StorageError

SUFFIXES = (".npy", ".safetensors")
_TYPES = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1"}
_KINDS = {
    "dense": ("values",),
    "multi_vector": ("values", "lengths"),
    "sparse": ("terms", "weights", "lengths"),
}

# errors of parsing a file of another format
_MALFORMED = (
    *(ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError),
    *(EOFError, SyntaxError, tokenize.TokenError),  # errors of a header of numpy
)

Array = np.ndarray[Any, Any]


def read_vectors(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a file of vectors record by record.

    Args:
        path: ``.npy``, an array ``(n, dim)`` or ``(n, tokens, dim)``; or ``.safetensors`` as
            `irkit.data.vector_writer` writes it.

    Returns:
        Pairs of the number of a record, counted from 1, and the record. Its ``id`` is, for .npy, the row
        number counted from 0. Its ``vector`` is an array or, if sparse, a dict {term number as a string:
        weight}.

    Raises:
        StorageError: The file cannot be read.
        BadValueError: The file is in none of these formats.
    """
    try:
        rows = _npy_rows(path) if path.endswith(".npy") else _safetensors_rows(path)
    except OSError as error:
        raise StorageError(f"reading {path}: {error.strerror or error}") from error
    except _MALFORMED as error:
        expected = "an array" if path.endswith(".npy") else "what irkit encode writes"
        raise BadValueError(f"reading {path}: expected {expected}, got something else: {error}") from error
    for number, (name, vector) in enumerate(rows, 1):
        yield number, {"id": name, "vector": vector}


def _npy_rows(path: str) -> Iterator[tuple[str, Array]]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.ndim not in (2, 3):
        raise ValueError(
            f"shape {array.shape}, not (n, dim) or, of n texts with as many tokens, (n, tokens, dim)"
        )
    return zip(map(str, range(len(array))), array, strict=True)


def _safetensors_rows(path: str) -> Iterator[tuple[str, Any]]:
    with Path(path).open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > Path(path).stat().st_size - 8:
            raise ValueError("its header is longer than the file")
        header = json.loads(stream.read(size))
    kind = header["__metadata__"]["kind"]
    arrays = {name: _mapped(path, 8 + size, header[name]) for name in (*_KINDS[kind], "ids")}
    ids = [json.loads(line) for line in arrays["ids"].tobytes().splitlines()]
    if kind == "dense":
        return zip(ids, _same_length(arrays["values"], len(ids)), strict=True)
    ends = np.cumsum(_same_length(arrays["lengths"], len(ids)))
    first = arrays[_KINDS[kind][0]]
    if len(first) != (ends[-1] if len(ends) else 0) or arrays["lengths"].min(initial=0) < 0:
        raise ValueError(f"lengths that do not add up to {len(first)} {_KINDS[kind][0]}")
    spans = zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True) if len(ends) else iter(())
    if kind == "multi_vector":
        return ((name, first[start:end]) for name, (start, end) in zip(ids, spans, strict=True))
    weights = _same_length(arrays["weights"], len(first))
    return (
        (name, dict(zip(map(str, first[start:end].tolist()), weights[start:end].tolist(), strict=True)))
        for name, (start, end) in zip(ids, spans, strict=True)
    )


def _mapped(path: str, start: int, entry: dict[str, Any]) -> Array:
    dtype, shape = np.dtype(_TYPES[entry["dtype"]]), tuple(entry["shape"])
    first, last = entry["data_offsets"]
    if last - first != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{last - first} bytes for shape {shape} of {dtype}")
    if not math.prod(shape):
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", start + first, shape)


def _same_length(array: Array, length: int) -> Array:
    if len(array) != length:
        raise ValueError(f"{len(array)} rows, but {length} expected")
    return array
