"""Read a FAISS structure from a file with limits, and compare it with what its configuration makes."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from irkit.index.array_files import Array
from irkit.index.faiss_package import import_faiss

faiss: Any = import_faiss()

_LIMITS = ("vector_byte", "loop")  # of what FAISS reads, if its version has them
_TABLES = 1 << 31  # bytes of tables that FAISS computes, which the limits concern, too
_limits_lock = threading.Lock()  # FAISS has one limit for the whole process
# what FAISS computes with, does not compare with the sizes of its arrays, and a factory string decides
_SETTLED = [
    *("d", "metric_type", "code_size", "by_residual", "parallel_mode"),
    *("M", "M2", "nbits", "ksub", "bbs", "implem", "skip", "qbs", "qbs2"),
]
_QUANTIZER = ("d", "M", "nbits", "dsub", "ksub", "code_size")


def read_structure(content: Array, copied: bool = False) -> Any:
    """Read the structure in the bytes of a file.

    Args:
        content: The bytes.
        copied: Copy the arrays, so that it may grow; otherwise it keeps reading large arrays from
            ``content``.

    Raises:
        RuntimeError: FAISS cannot read it.
        ValueError: It says that it is larger than the file.
    """
    try:
        with _limited(len(content)):
            if copied:
                return faiss.deserialize_index(content)
            return faiss.read_index(faiss.ZeroCopyIOReader(faiss.swig_ptr(content), len(content)))
    except MemoryError:
        raise ValueError("it says that it is larger than its file") from None


def check_structure(structure: Any, template: Any, rows: int) -> None:
    """Refuse a structure whose search would read outside of its arrays.

    From version 1.15 on, FAISS itself refuses graphs and lists that point outside of their arrays.

    Args:
        structure: The structure that was read.
        template: An empty structure that the configuration makes.
        rows: Number of rows that it covers.

    Raises:
        ValueError: Its kind, dimensions or number of rows differ, or a size contradicts its array.
    """
    inner, made = faiss.downcast_index(structure), faiss.downcast_index(template)
    alike = isinstance(inner, type(made)) or isinstance(made, type(inner))
    _need(alike, f"it is {type(inner).__name__}, expected {type(made).__name__}")
    _need(inner.ntotal == rows and inner.is_trained, f"it has {inner.ntotal} vectors of {rows}")
    for name in _SETTLED:
        _equal(inner, made, name)
    if hasattr(inner, "chain"):
        _need(inner.chain.size() == made.chain.size(), "other transformations")
        for number in range(inner.chain.size()):
            for name in ("d_in", "d_out"):
                _equal(inner.chain.at(number), made.chain.at(number), name)
            _need(inner.chain.at(number).is_trained, "transformations that are not trained")
        check_structure(inner.index, made.index, rows)
    if hasattr(inner, "storage"):
        check_structure(inner.storage, made.storage, rows)
    if hasattr(inner, "invlists"):
        _check_lists(inner, made)
    if hasattr(inner, "pq"):
        for name in _QUANTIZER:
            _equal(inner.pq, made.pq, name)
        _need(inner.pq.centroids.size() == inner.pq.d * inner.pq.ksub, "centroids of codes")
    if hasattr(inner, "ntotal2") and hasattr(inner, "codes"):  # codes in blocks
        _need(inner.ntotal2 == -(-rows // inner.bbs) * inner.bbs, "blocks of codes")
        _need(inner.codes.size() == inner.ntotal2 * inner.M2 // 2, "codes")


def write_structure(structure: Any, path: Path) -> None:
    """Write a structure to a file.

    Raises:
        OSError: The file cannot be written.
    """
    if is_on_gpu(structure):
        structure = faiss.index_gpu_to_cpu(structure)
    try:  # through a file of Python: FAISS closes its own without noticing that the disk is full
        with path.open("wb") as stream:
            faiss.write_index(structure, faiss.PyCallbackIOWriter(stream.write))
    except RuntimeError as error:
        raise OSError(reason_of(error)) from error


def emptied(structure: Any) -> Any:
    """Remove the rows of a structure, in place; it stays trained."""
    structure.reset()
    core = core_of(structure)
    if hasattr(core, "ntotal2"):  # which FAISS 1.15 leaves as it was
        core.ntotal2 = 0
    return structure


def core_of(structure: Any) -> Any:
    """Return the part that searches, without transformations of the vectors before it."""
    structure = faiss.downcast_index(structure)
    return core_of(structure.index) if isinstance(structure, faiss.IndexPreTransform) else structure


def is_on_gpu(structure: Any) -> bool:
    """Return whether a structure is on a GPU."""
    return isinstance(structure, getattr(faiss, "GpuIndex", ()))


def code_bytes(structure: Any) -> int:
    """Return the bytes per vector that the structure stores."""
    core = core_of(structure)
    if is_on_gpu(core):  # which does not say
        return 4 * int(core.d) if "Flat" in type(core).__name__ else 0
    return int((faiss.downcast_index(core.storage) if hasattr(core, "storage") else core).sa_code_size())


def reason_of(error: Exception) -> str:
    """Return FAISS's message without the location in its source."""
    return re.sub(r"^Error in .*? at \S+:\d+: (Error: )?", "", str(error), flags=re.DOTALL).strip()


def _check_lists(inner: Any, made: Any) -> None:
    check_structure(inner.quantizer, made.quantizer, inner.nlist)
    lists, others = (faiss.downcast_InvertedLists(part.invlists) for part in (inner, made))
    _need(type(lists) is type(others) and lists.nlist == inner.nlist, "lists")
    for name in ("block_size", "n_per_block") if hasattr(lists, "block_size") else ("code_size",):
        _equal(lists, others, name)


def _equal(first: Any, second: Any, name: str) -> None:
    actual, expected = getattr(first, name, None), getattr(second, name, None)
    if isinstance(expected, int):  # not a function
        _need(actual == expected, f"{name} is {actual}, expected {expected}")


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


@contextlib.contextmanager
def _limited(size: int) -> Iterator[None]:
    """Limit the arrays that FAISS allocates while it reads a file of ``size`` bytes.

    A damaged file then raises an error instead of asking for more memory than the machine has.
    """
    with _limits_lock:
        known = [name for name in _LIMITS if hasattr(faiss, f"set_deserialization_{name}_limit")]
        before = [getattr(faiss, f"get_deserialization_{name}_limit")() for name in known]
        try:
            for name in known:
                getattr(faiss, f"set_deserialization_{name}_limit")(max(size, _TABLES))
            yield
        finally:
            for name, limit in zip(known, before, strict=True):
                getattr(faiss, f"set_deserialization_{name}_limit")(limit)
