"""Rows that may be among the best of dense queries, by a scan of 8-bit codes; see README.md."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .._jit import compile_ir, compiled_once, cpu_features
from .._threads import share, threads_for
from .cpu_scan import FRAME, LANES, QUERY, write_scan
from .reference import CHUNK, Codes, candidates, round_queries

__all__ = ["find_candidates"]

Array = NDArray[Any]

_WORD = {name: offset // 8 for name, offset in FRAME.offsets.items()}
_TYPES = {"float": np.float32, "i64": np.int64}
_QUERY = np.dtype(
    {
        "names": list(QUERY.fields),
        "formats": [_TYPES.get(kind, np.int64) for kind in QUERY.fields.values()],
        "offsets": list(QUERY.offsets.values()),
        "itemsize": QUERY.size,
    }
)
_PER_THREAD = 1 << 21  # bytes that are multiplied by a thread, at least
_ROOM = 2048  # rows that a query can keep, beside 8 for each hit


def find_candidates(
    codes: Codes, queries: torch.Tensor, k: int, keep: Array | None = None
) -> list[Array | None]:
    """Find the rows that may be among the best of each query: all others score less than ``k`` of them.

    Args:
        codes: Codes of ``n`` rows, by `encode`; tensors on the CPU, which may be mapped files.
        queries: ``(n_q, dim)`` float32, finite.
        k: At least 1, at most the number of rows that may be found.
        keep: ``(n,)`` bool: rows that may be found; None means all.

    Returns:
        For each query the rows, ascending; or None if they are too many, or its numbers too large to tell.

    Raises:
        ValueError: An array has another dtype or shape.
    """
    _check(codes, queries, keep)
    n, n_q = len(codes.codes), len(queries)
    # without the compiled code, or where its 32 bits do not hold the products: the same rule in torch
    if n < LANES or not cpu_features() or codes.codes.shape[1] * 128 * 127 >= 1 << 31:
        kept = None if keep is None else torch.from_numpy(keep)
        return [rows.numpy() for rows in candidates(codes, queries, k, kept)]
    # queries in bytes, and the range of rows of each thread
    rounded = round_queries(queries)
    total = rounded.bytes.sum(1, dtype=torch.int64) * 128
    room = _ROOM + 8 * k
    threads = min(max(1, threads_for(n * n_q * codes.codes.shape[1], _PER_THREAD)), n // LANES)
    step = -(-n // (threads * LANES)) * LANES
    parts: list[tuple[Array, list[Array]]] = []

    def scan(begin: int, end: int) -> None:
        """Scan the blocks of rows with numbers ``begin`` to ``end``, each for all queries."""
        for part in range(begin, end):
            table = np.zeros(n_q, _QUERY)
            memory = [np.empty((n_q, room + 2 * LANES), dtype) for dtype in (np.uint32, np.float32, np.int32)]
            scratch = np.empty((codes.codes.shape[1], LANES), np.uint8)
            for name, array in zip(("rows", "most", "least"), memory, strict=True):
                table[name] = _addresses(array)
            table["bytes"], table["total"] = _addresses(rounded.bytes.numpy()), total
            table["scale"], table["length"], table["error"] = rounded[1:]
            table["threshold"] = -np.inf
            frame = np.zeros(len(_WORD), np.int64)
            names = "codes", "scales", "margins", "norms"
            numbers = {name: _address(array.numpy()) for name, array in zip(names, codes, strict=True)}
            numbers |= {"allowed": 0 if keep is None else _address(keep), "queries": _address(table)}
            numbers["scratch"] = _address(scratch)
            numbers |= {"width": codes.codes.shape[1], "n": n, "n_q": n_q, "k": k, "room": room}
            numbers |= {"start": part * step, "stop": min((part + 1) * step, n)}
            for name, number in numbers.items():
                frame[_WORD[name]] = number
            _compiled("avx512vnni" in cpu_features())(_address(frame))
            parts.append((table, memory))

    # rows of all ranges, cut by the threshold of each query
    share(scan, -(-n // step), threads, parts=1)
    return [_join(parts, query, k) for query in range(n_q)]


def _check(codes: Codes, queries: torch.Tensor, keep: Array | None) -> None:
    """Raise ValueError if the scan would leave an array."""
    n, width = codes.codes.shape
    expected = queries.shape[1] + -queries.shape[1] % CHUNK
    if codes.codes.dtype != torch.uint8 or width != expected or queries.dtype != torch.float32:
        raise ValueError(
            f"dense_scan: codes are {codes.codes.dtype} {(n, width)} and queries {queries.dtype} "
            f"{tuple(queries.shape)}; expected uint8 (n, {expected}) and float32"
        )
    for name, array in zip(codes._fields[1:], codes[1:], strict=True):
        if array.dtype != torch.float32 or array.shape != (n,):
            raise ValueError(f"dense_scan: {name} are {array.dtype} {tuple(array.shape)}, expected ({n},)")
    if not all(array.is_contiguous() for array in codes):
        raise ValueError("dense_scan: an array of codes is not contiguous")
    if keep is not None and (keep.dtype != np.bool_ or keep.shape != (n,) or not keep.flags.c_contiguous):
        raise ValueError(
            f"dense_scan: the filter is {keep.dtype} {keep.shape}, expected bool ({n},), contiguous"
        )
    if n >= 1 << 32:
        raise ValueError(f"dense_scan: got {n} rows, expected fewer than 2**32")


def _join(parts: list[tuple[Array, list[Array]]], query: int, k: int) -> Array | None:
    """Merge the candidates of a query from all parts, less those below the k-th bound; None on overflow."""
    if any(table["overflow"][query] for table, _ in parts):
        return None
    kept = [[array[query, : table["count"][query]] for array in memory] for table, memory in parts]
    rows, most, least = (np.concatenate(arrays) for arrays in zip(*kept, strict=True))
    if len(least) > k:
        key = np.partition(least, len(least) - k)[len(least) - k]
        threshold = (key ^ ((key >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)
        rows = rows[~(most < threshold)]
    return np.sort(rows.astype(np.int64))


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _addresses(array: Array) -> Array:
    """Return where each row of an array begins in memory."""
    return np.arange(len(array), dtype=np.int64) * array.strides[0] + _address(array)


@compiled_once
def _compiled(vnni: bool) -> Callable[..., None]:
    return compile_ir(write_scan(vnni), "scan", [ctypes.c_void_p])
