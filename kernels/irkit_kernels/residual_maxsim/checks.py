"""Checks of arrays that the kernels read, most of them from files: compiled code must stay within them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cpu_kernel import Codes
from .reference import NBITS, WINDOW, Tokens, bits_of, packed_width

__all__ = [
    "check_codebook",
    "check_codes",
    "check_documents",
    "check_row",
    "check_tokens",
    "check_vectors",
]


def check_array(operation: str, name: str, x: NDArray[Any], dims: int, *dtypes: Any) -> None:
    """Raise TypeError unless an array is C-contiguous, of one of ``dtypes`` and ``dims`` dimensions."""
    if x.dtype not in dtypes or x.ndim != dims or not x.flags.c_contiguous:
        expected = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise TypeError(
            f"{operation}: {name} must be a C-contiguous array of {expected} with {dims} dimension(s), "
            f"got {x.dtype} of shape {x.shape} and strides {x.strides}"
        )


def check_vectors(operation: str, width: int | None = None, **arrays: NDArray[Any]) -> None:
    """Raise an error unless arrays hold float32 vectors of ``width``; without it, at least one vector."""
    for name, x in arrays.items():
        if x.dtype != np.float32 or x.ndim != 2:
            raise TypeError(
                f"{operation}: {name} must be an array of float32 with 2 dimensions, got {x.dtype} {x.shape}"
            )
        if width is None and 0 in x.shape:
            raise ValueError(f"{operation}: got {name} of shape {x.shape}, expected at least one vector")
        if width not in (None, x.shape[1]):
            raise ValueError(f"{operation}: got {name} of shape {x.shape}, expected vectors of width {width}")


def check_row(operation: str, dtype: Any, **arrays: NDArray[Any]) -> None:
    """Raise TypeError unless arrays are C-contiguous, of ``dtype`` and one dimension."""
    for name, x in arrays.items():
        check_array(operation, name, x, 1, dtype)


def check_codes(operation: str, codes: Codes, count: int | None = None) -> None:
    """Raise an error unless codes are numbers of ``count`` centroids; without it, only types are checked."""
    check_array(operation, "codes", codes, 1, np.uint16, np.int32)
    if count is not None and len(codes) and not 0 <= codes.min() <= codes.max() < count:
        raise ValueError(f"{operation}: got codes {codes.min()} to {codes.max()} of {count} centroids")


def check_codebook(operation: str, codebook: NDArray[np.int8]) -> int:
    """Check a codebook; return its bits per number."""
    check_array(operation, "codebook", codebook, 2, np.int8)
    nbits = bits_of(codebook)
    if nbits not in NBITS or codebook.shape != (2 ** (WINDOW - nbits), 2**nbits):
        raise ValueError(
            f"{operation}: got a codebook of shape {codebook.shape}, expected (128, 2), (64, 4), (16, 16) or "
            "(1, 256), as train_codebook makes it"
        )
    return nbits


def check_tokens(operation: str, tokens: Tokens, dim: int, codebook: NDArray[np.int8]) -> tuple[int, int]:
    """Check tokens; return their bits per number and bytes per token."""
    nbits = check_codebook(operation, codebook)
    check_codes(operation, tokens.codes)
    check_array(operation, "coefficients", tokens.coefficients, 2, np.float16)
    check_array(operation, "packed", tokens.packed, 2, np.uint8)
    n, width = len(tokens.codes), packed_width(dim, nbits)
    if tokens.coefficients.shape != (n, 2) or tokens.packed.shape != (n, width):
        raise ValueError(
            f"{operation}: got coefficients {tokens.coefficients.shape} and packed {tokens.packed.shape}, "
            f"expected ({n}, 2) and ({n}, {width}) for {n} tokens of {dim} levels of {nbits} bits"
        )
    return nbits, width


def check_documents(operation: str, offsets: NDArray[np.int64], documents: NDArray[np.int32]) -> None:
    """Raise an error unless documents are numbers below that of the ``offsets``."""
    check_row(operation, np.int64, offsets=offsets)
    check_row(operation, np.int32, documents=documents)
    if len(documents) and documents.view(np.uint32).max() >= len(offsets) - 1:  # negative ones are large
        raise ValueError(
            f"{operation}: got documents {documents.min()} to {documents.max()} of {len(offsets) - 1}"
        )
