"""Files of vectors: the output of `irkit encode`, and arrays of numpy, which are memory-mapped."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice, pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.lib.format import write_array_header_1_0
from safetensors import SafetensorError, safe_open

from irkit.errors import BadValueError, StorageError
from irkit.utils.atomic import replacing

if TYPE_CHECKING:
    from irkit.core.representation import Representation

READABLE = (".npy", ".safetensors")
_KINDS = {"dense": ["values"], "multi_vector": ["values"], "sparse": ["terms", "weights"]}

# errors of parsing a file of another format
_MALFORMED = (
    *(SafetensorError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError),
    *(EOFError, SyntaxError, tokenize.TokenError),  # errors of a header of numpy
)

Array = np.ndarray[Any, Any]


def read_vectors(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a file of vectors record by record.

    Args:
        path: ``.npy``, an array ``(n, dim)`` or ``(n, tokens, dim)``; or ``.safetensors`` as
            `irkit.data.vector_files` writes it.

    Returns:
        Pairs of the number of a record, counted from 1, and the record. Its ``id`` is, for .npy, the row
        number counted from 0. Its ``vector`` is an array or, if sparse, a dict {term number as a string:
        weight}.

    Raises:
        StorageError: The file cannot be read.
        BadValueError: The file is in none of these formats.
    """
    try:
        rows = _npy_rows(path) if path.lower().endswith(".npy") else _safetensors_rows(path)
        for number, (name, vector) in enumerate(rows, 1):
            yield number, {"id": name, "vector": vector}
    except OSError as error:
        raise StorageError(f"reading {path}: {error.strerror or error}") from error
    except _MALFORMED as error:
        expected = "an array" if path.lower().endswith(".npy") else "what irkit encode writes"
        raise BadValueError(f"reading {path}: expected {expected}, got something else: {error}") from error


def _npy_rows(path: str) -> Iterator[tuple[str, Array]]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.ndim not in (2, 3):
        raise ValueError(
            f"shape {array.shape}, not (n, dim) or, of n texts with as many tokens, (n, tokens, dim)"
        )
    return zip(map(str, range(len(array))), array, strict=True)


def _safetensors_rows(path: str) -> Iterator[tuple[str, Any]]:
    file: Any = safe_open(path, "np")  # maps the file; a slice of an array reads only its own rows
    kind = file.metadata()["kind"]
    ids = [json.loads(line) for line in file.get_tensor("ids").tobytes().splitlines()]
    values, *others = (file.get_slice(name) for name in _KINDS[kind])
    [size, *_] = values.get_shape()
    if kind == "dense":
        _check_rows(size, len(ids))
        return ((name, values[row]) for row, name in enumerate(ids))
    lengths = file.get_tensor("lengths")
    _check_rows(len(lengths), len(ids))
    if lengths.sum() != size or lengths.min(initial=0) < 0:
        raise ValueError(f"lengths that do not add up to {size} {_KINDS[kind][0]}")
    spans = pairwise([0, *np.cumsum(lengths).tolist()])
    if kind == "multi_vector":
        return ((name, _slice(values, start, end)) for name, (start, end) in zip(ids, spans, strict=True))
    _check_rows(others[0].get_shape()[0], size)
    parts = ([_slice(array, *span).tolist() for array in (values, others[0])] for span in spans)
    return (
        (name, dict(zip(map(str, terms), weights, strict=True)))
        for name, (terms, weights) in zip(ids, parts, strict=True)
    )


def _slice(array: Any, start: int, end: int) -> Array:
    """Return rows of a mapped array; safetensors refuses an empty slice at the end."""
    return array[start:end] if start < end else np.empty((0, *array.get_shape()[1:]), np.float32)


def _check_rows(rows: int, expected: int) -> None:
    if rows != expected:
        raise ValueError(f"{rows} rows, but {expected} expected")


Parts: TypeAlias = "Iterator[tuple[list[str], Representation]]"
"""Pairs of ids and a representation with as many rows; at least one part."""


def write_vectors(path: Path, parts: Parts, vocabulary: Sequence[str] | None = None) -> int:
    r"""Write representations to a file, which appears whole or not at all.

    Args:
        path: Ends in one of `WRITABLE`. .npy holds dense vectors; .jsonl holds one object per line with id
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
            return _write_jsonl(aside, parts, vocabulary)
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


def _write_jsonl(path: Path, parts: Parts, vocabulary: Sequence[str] | None = None) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as stream:
        for ids, part in parts:
            vectors = part.arrays()["values"].tolist() if vocabulary is None else _impacts(part, vocabulary)
            contents = {} if vocabulary is None else {"contents": ""}
            for name, vector in zip(ids, vectors, strict=True):
                record = {"id": name, **contents, "vector": vector}
                stream.write(json.dumps(record, ensure_ascii=False) + "\n")
            count += len(ids)
    return count


def _impacts(part: Representation, vocabulary: Sequence[str]) -> Iterator[dict[str, float]]:
    """Yield the weights by term of each row."""
    arrays = part.arrays()
    terms = [vocabulary[term] for term in arrays["terms"].tolist()]
    values = arrays["weights"]
    short = values.astype("U32").astype(float)  # the fewest digits that read back as the same float32
    row = zip(terms, np.where(values == np.rint(values), values, short).tolist(), strict=True)
    return (dict(islice(row, length)) for length in arrays["lengths"].tolist())


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
WRITABLE = tuple(_WRITERS)
