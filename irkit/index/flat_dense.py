"""Dense vectors as `flat` stores them: in float32, float16, bfloat16 or 8 bits, with codes for a first scan.

The kernel ``dense_scan`` makes the codes: 8 bits per dimension, and three numbers per vector that bound how
far the score of the code is from the score of the vector. So a scan of the codes, a quarter of the bytes of
float32, proves for nearly all vectors that they are not among the best.
"""

from __future__ import annotations

import numpy as np
import torch
from irkit_kernels.dense_scan import encode
from torch import Tensor

from irkit.core.representation import Dense
from irkit.errors import BadValueError
from irkit.index.array_files import Array
from irkit.index.stored_rows import to_float16, to_float32

CODES = ("codes", "scales", "margins", "norms")
"""Names of the arrays of codes."""


def encode_dense(values: Tensor, dtype: str) -> dict[str, Array]:
    """Return the arrays to be stored, by name: values in a dtype, and codes of them, which int8 has alone.

    Raises:
        BadValueError: A value is too large for the dtype.
    """
    values = values.detach().to("cpu", torch.float32)
    if dtype == "float16":
        stored = to_float16(Dense(values))
    elif dtype == "bfloat16":
        rounded = values.bfloat16()
        if not rounded.isfinite().all():
            raise BadValueError(
                f"adding documents: got a value of {values.abs().max():g}, which bfloat16 does not hold; "
                "normalise the vectors, or choose the dtype 'float32'"
            )
        stored = {"values": rounded.view(torch.uint16).numpy()}
    else:
        stored = {"values": values.numpy()} if dtype == "float32" else {}
    decoded = decode_dense(stored, dtype, values.shape[1]) if stored else values
    codes = {name: array.numpy() for name, array in zip(CODES, encode(decoded), strict=True)}
    return stored | codes


def decode_dense(arrays: dict[str, Array], dtype: str, dim: int) -> Tensor:
    """Return ``(n, dim)`` float32: what stored arrays stand for."""
    if dtype == "int8":
        numbers = torch.from_numpy(arrays["codes"][:, :dim]).float().sub_(128)
        return numbers.mul_(torch.from_numpy(arrays["scales"])[:, None])
    if dtype == "bfloat16":
        bits = torch.from_numpy(np.ascontiguousarray(arrays["values"]).view(np.int16))
        return bits.view(torch.bfloat16).float()
    return torch.from_numpy(to_float32(arrays["values"]))
