"""Exact scores of chosen rows of dense vectors, and the best of these rows; see README.md."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Container
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .._jit import compile_ir, compiled_once
from .._threads import share, threads_for
from .cpu_rank import RANK, write_hits, write_keys, write_products

__all__ = ["best_of", "matmul_error", "products", "ranking"]

Array = NDArray[Any]
_WORD = {name: offset // 8 for name, offset in RANK.offsets.items()}
_KINDS = {
    np.dtype(np.float32): "float",
    np.dtype(np.float16): "half",
    np.dtype(np.uint16): "u16",
    np.dtype(np.uint8): "u8",
}
_PER_THREAD = 1 << 16  # numbers that are multiplied by a thread, at least
_ROUNDED = {"none": 0.0, "ieee": 0.0, "tf32": 2.0**-9, "bf16": 2.0**-6}
"""More than two factors that are rounded to 24, 24, 11 and 8 bits take from their product."""


def best_of(values: Array, queries: Array, chosen: Array, k: int) -> tuple[Array, Array]:
    """Return the best of the rows that were chosen for each query.

    Args:
        values: ``(n, dim)`` float32, which may be a mapped file.
        queries: ``(n_q, dim)`` float32.
        chosen: ``(n_q, width)`` int64: rows, each at most once; what is not from 0 to n - 1 is left out.
        k: At most the width.

    Returns:
        Rows int64 and scores float32 ``(n_q, k)``, best first, ties to the lower row; -1 and -inf after them.

    Raises:
        ValueError: An array has another dtype or shape.
    """
    rows, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
    threads = threads_for(chosen.size * values.shape[1], _PER_THREAD)

    def rank(start: int, stop: int) -> None:
        part = slice(start, stop)
        ranking(values, queries[part], chosen[part], rows[part], scores[part])()

    share(rank, len(queries), threads)
    return rows, scores


def products(values: Array, queries: Array, chosen: Array, scales: Array | None = None) -> Array:
    """Return the products of the rows that were chosen for each query, whatever is scored beside them.

    A product of matrices rounds otherwise for other numbers of rows. Here the additions have one order, that
    of `best_of` and of the kept rows of ``dense_search``.

    Args:
        values: ``(n, dim)`` float32, finite float16, the bits of bfloat16 as uint16, or the codes of
            `irkit_kernels.dense_scan.Codes` as uint8, which may be wider; it may be a mapped file. All score
            as the same numbers in float32 do.
        queries: ``(n_q, dim)`` float32.
        chosen: ``(n_q, width)`` int64: rows; what is not from 0 to n - 1 gets minus infinity.
        scales: ``(n,)`` float32: the scales of codes.

    Returns:
        ``(n_q, width)`` float32.

    Raises:
        ValueError: An array has another dtype or shape, or codes have no scales.
    """
    if (scales is None) == (values.dtype == np.uint8):
        raise ValueError(f"dense_scan: values are {values.dtype}; codes in uint8 have scales, and no others")
    scores, scaled = np.empty(chosen.shape, np.float32), {} if scales is None else {"scales": scales}
    threads = threads_for(chosen.size * values.shape[1], _PER_THREAD)

    def score(start: int, stop: int) -> None:
        part = slice(start, stop)
        arrays = {"values": values, "queries": queries[part], "chosen": chosen[part], "scores": scores[part]}
        width, dim = chosen.shape[1], values.shape[1] if scales is None else queries.shape[1]
        frame = _frame(len(values), dim, width, width, arrays | scaled, _KINDS)
        _compiled_products(_KINDS[values.dtype])(frame.__array_interface__["data"][0])

    share(score, len(queries), threads)
    return scores


def matmul_error(dim: int) -> float:
    """Return how far a product of matrices in torch may be from `products`, for vectors of length 1.

    It adds up in another order. If the process lets torch or oneDNN multiply float32 in fewer bits, it may
    also round the numbers first.
    """
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]  # a property
    if os.environ.get("DNNL_DEFAULT_FPMATH_MODE", "STRICT").upper() != "STRICT":
        precision = "bf16"
    return (dim + 8) * 2.0**-23 + _ROUNDED.get(precision, _ROUNDED["bf16"])


def ranking(values: Array, queries: Array, chosen: Array, rows: Array, scores: Array) -> Callable[[], None]:
    """Return a function without arguments that does what `best_of` does, on arrays that the caller refills.

    Args:
        values: As in `best_of`, also for the shapes of the others.
        queries: Read at each call.
        chosen: Read at each call.
        rows: ``(n_q, k)`` int64, written at each call.
        scores: ``(n_q, k)`` float32, written at each call.
    """
    keys = np.empty(chosen.shape, np.int64)
    arrays = {"values": values, "queries": queries, "chosen": chosen, "keys": keys}
    arrays |= {"rows": rows, "scores": scores}
    n, dim = values.shape
    frame = _frame(n, dim, chosen.shape[1], rows.shape[1], arrays)
    frame_address, (score, hits), sort = frame.__array_interface__["data"][0], _compiled(), keys.sort
    held = frame, arrays

    def rank(_held: Any = held) -> None:
        score(frame_address)
        sort(1)
        hits(frame_address)

    return rank


def _frame(
    n: int, dim: int, width: int, k: int, arrays: dict[str, Array], kinds: Container[Any] = (np.float32,)
) -> Array:
    """Return what the compiled code reads: sizes, and addresses of arrays, which are checked.

    Args:
        n: Number of rows.
        dim: Numbers of a row.
        width: Number of rows that are chosen for a query.
        k: Hits of a query.
        arrays: Arrays by name.
        kinds: Dtypes that values may have.
    """
    n_q, stored = len(arrays["chosen"]), arrays["values"].dtype
    stride = max(dim, arrays["values"].shape[1]) if "scales" in arrays else dim
    expected: dict[str, tuple[Any, tuple[int, ...]]] = {
        "values": (stored if stored in kinds else np.float32, (n, stride)),
        "queries": (np.float32, (n_q, dim)),
        "chosen": (np.int64, (n_q, width)),
        "rows": (np.int64, (n_q, min(k, width))),
        "scores": (np.float32, (n_q, k)),
        "scales": (np.float32, (n,)),
    }
    frame = np.zeros(len(_WORD), np.int64)
    for name, array in arrays.items():
        dtype, shape = expected.get(name, (array.dtype, array.shape))
        if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
            title = {"chosen": "chosen rows"}.get(name, name)
            raise ValueError(
                f"dense_scan: {title} are {array.dtype} {array.shape}, expected {np.dtype(dtype)} {shape}"
            )
        frame[_WORD[name]] = array.__array_interface__["data"][0]
    for name, number in {"dim": dim, "n": n, "n_q": n_q, "width": width, "k": k, "stride": stride}.items():
        frame[_WORD[name]] = number
    return frame


@compiled_once
def _compiled_products(kind: str) -> Callable[..., None]:
    return compile_ir(write_products(kind), "products", [ctypes.c_void_p])


@compiled_once
def _compiled() -> tuple[Callable[..., None], Callable[..., None]]:
    return (
        compile_ir(write_keys(), "keys", [ctypes.c_void_p]),
        compile_ir(write_hits(), "hits", [ctypes.c_void_p]),
    )
