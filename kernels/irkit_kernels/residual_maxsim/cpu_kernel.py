"""The steps of a search on the CPU: packs queries and centroids, compiles the code and calls it."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._jit import compile_ir, compiled_once, cpu_features
from .cpu_probe import write_collect, write_probe
from .cpu_search import write_interaction, write_maxsim, write_table
from .cpu_tile import GROUP, LANES, Header, Plan
from .reference import CEILING, FLOOR, STEPS, quantize_signed

__all__ = [
    "Codes",
    "PackedCentroids",
    "QueryTable",
    "addresses",
    "code_type",
    "collect",
    "exact_maxsim",
    "exact_query",
    "has_vnni",
    "interaction",
    "pack_centroids",
    "probe",
    "query_table",
    "residual_maxsim",
    "shifted",
]

Codes = NDArray[np.uint16] | NDArray[np.int32]
_TABLE_ARRAYS = 5
_HUGE = 1 << 21  # bytes of a huge page of Linux
_DEVIATIONS = 6  # of the sum of roundings in a product; it is farther off once in 10^8 products
_LONGEST = 1.5  # times the usual length that the levels of a token may have, see `reference.STEPS`


@dataclass(frozen=True)
class PackedCentroids:
    """Centroids in the layout that `query_table` reads; made by `pack_centroids`.

    Attributes:
        levels: ``(rows, padded dim)`` uint8, the centroids' bytes + 128; rows after the last centroid repeat
            it.
        scales: ``(rows,)`` float32, the value of one step of a centroid's bytes.
        count: Number of centroids.
        dim: Numbers per vector.
        reach: Norm of the longest centroid.
        error: Largest norm of what rounding took from a centroid.
    """

    levels: NDArray[np.uint8]
    scales: NDArray[np.float32]
    count: int
    dim: int
    reach: float
    error: float


@dataclass(frozen=True)
class QueryTable:
    """A packed query and its scores of all centroids; made by `query_table`.

    Attributes:
        query: int8 ``[block][4 dims][token of the block][4]``.
        header: 32-bit words ``[block][row of Header][token of the block]``.
        scores: float32 ``[block][centroid][token of the block]``, in steps of the query token's bytes.
        bytes: uint8 ``[block][centroid][token of the block]``.
        maxima: float32 ``[block][group of centroids][token of the block]``, maxima of ``scores``.
        plan: The variant of the code that reads this.
        count: Number of centroids.
        dim: Numbers per vector.
        step: The difference of score per step of ``bytes``, and so of `interaction`.
        reach: See `PackedCentroids`.
        error: See `PackedCentroids`.
    """

    query: NDArray[np.int8]
    header: NDArray[np.float32]
    scores: NDArray[np.float32]
    bytes: NDArray[np.uint8]
    maxima: NDArray[np.float32]
    plan: Plan
    count: int
    dim: int
    step: float
    reach: float
    error: float

    @cached_property
    def pointers(self) -> list[int]:
        """The first arguments of the compiled code."""
        return addresses(self.query, self.header, self.scores, self.bytes, self.maxima)

    def call(self, kernel: Callable[..., None], arrays: Iterable[NDArray[Any]], *numbers: int) -> None:
        """Call compiled code with the table, ``arrays`` and ``numbers``."""
        blocks, rows, _ = self.scores.shape
        kernel(*self.pointers, *addresses(*arrays), *numbers, rows, blocks)


def has_vnni() -> bool:
    """Return whether this CPU has the instructions that multiply bytes fast."""
    return {"avx512vnni", "avx512bw"} <= cpu_features()


def pack_centroids(centroids: NDArray[np.float32]) -> PackedCentroids:
    """Round float32 centroids ``(K, d)`` to bytes, each centroid on a scale of its own.

    Rows are padded to whole groups of `GROUP` centroids, and dimensions to a multiple of 4.
    """
    count, dim = centroids.shape
    q, scale = quantize_signed(centroids)
    rows = np.minimum(np.arange(-(-count // GROUP) * GROUP), count - 1)
    levels = np.full((len(rows), -(-dim // 4) * 4), 128, np.uint8)
    levels[:, :dim] = (q.view(np.uint8) ^ np.uint8(128))[rows]
    error = _longest(centroids - q * scale[:, None])
    return PackedCentroids(levels, scale[rows], count, dim, _longest(centroids), error)


def query_table(query: NDArray[np.float32], centroids: PackedCentroids) -> QueryTable:
    """Score all centroids for ``query (m, d)``."""
    plan = Plan(centroids.levels.shape[1], 1 if len(query) <= LANES else 2, has_vnni())
    reach = centroids.reach * _longest(query)
    packed, header = _pack_query(query, plan, reach)
    blocks, rows = len(packed), len(centroids.levels)
    shape, groups = (blocks, rows, plan.lanes), (blocks, rows // GROUP, plan.lanes)
    levels, scores, maxima = _in_one_piece((shape, np.uint8), (shape, np.float32), (groups, np.float32))
    step = reach * (CEILING - FLOOR) / 255
    about = centroids.count, centroids.dim, step, centroids.reach, centroids.error
    table = QueryTable(packed, header, scores, levels, maxima, plan, *about)
    table.call(_table(plan), (centroids.levels, centroids.scales))
    return table


def exact_query(query: NDArray[np.float32], table: QueryTable) -> tuple[NDArray[np.float32], ...]:
    """Return what `exact_maxsim` reads of a query ``(m, d)`` beside its table.

    Returns:
        The query in steps of its bytes, ``(blocks * lanes, d in whole registers)`` float32. And how far the
        scores of 8 bits of centroids, and products with levels, may be from the exact ones: by the inequality
        of Cauchy and Schwarz, or by standard deviations if that is less. ``(2, blocks * lanes)`` float32.
    """
    (m, dim), (blocks, _, lanes) = query.shape, table.scores.shape
    q, scale = quantize_signed(query)
    floats = np.zeros((blocks * lanes, -(-dim // LANES) * LANES), np.float32)
    floats[:m, :dim] = query / scale[:, None]
    rest, size = (np.linalg.norm(part.astype(np.float64), axis=1) for part in (floats[:m, :dim] - q, q))
    errors = np.zeros((2, blocks * lanes), np.float32)
    likely = min(1.0, _DEVIATIONS / dim**0.5)
    errors[0, :m] = likely * (table.reach * rest + table.error * size)
    errors[1, :m] = likely * _LONGEST * STEPS * dim**0.5 * rest
    return floats, errors


def _interleaved(values: NDArray[np.int8], lanes: int) -> NDArray[np.int8]:
    """Return query tokens ``(n * lanes, dim)`` as ``[block][4 dims][token of the block][4]``."""
    return np.ascontiguousarray(values.reshape(-1, lanes, values.shape[1] // 4, 4).swapaxes(1, 2))


def _pack_query(
    query: NDArray[np.float32], plan: Plan, reach: float
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Pack a query for `query_table`.

    Args:
        query: ``(m, d)`` float32.
        plan: The variant of the code.
        reach: Bound of the absolute scores: the largest norm of a query token times the largest norm of a
            centroid.

    Returns:
        The arrays ``query`` and ``header`` of `QueryTable`.
    """
    (m, dim), lanes = query.shape, plan.lanes
    blocks, (q, scale) = -(-m // lanes), quantize_signed(query)
    padded = np.zeros((blocks * lanes, plan.dim), np.int8)
    padded[:m, :dim] = q
    packed = _interleaved(padded, lanes)
    steps = 255 / (CEILING - FLOOR)
    rows = np.zeros((Header.ROWS, blocks * lanes), np.float32)
    rows[Header.BIAS].view(np.int32)[:] = -128 * padded.sum(1, dtype=np.int32)
    rows[Header.SCALE, :m] = scale
    rows[Header.FACTOR, :m] = scale * (steps / max(reach, 1e-30))
    rows[Header.OFFSET, :m] = 0.5 - FLOOR * steps  # to be rounded down
    rows[Header.FLOOR] = np.where(padded.any(1), -np.inf, np.inf)
    return packed, np.ascontiguousarray(rows.reshape(Header.ROWS, blocks, lanes).swapaxes(0, 1))


def _in_one_piece(*wanted: tuple[tuple[int, ...], type]) -> list[NDArray[Any]]:
    """Return empty arrays of these shapes and types, side by side.

    A large piece starts at a huge page. NumPy asks Linux for huge pages from 4 MB on, and `interaction` then
    reads a quarter faster from all over a table of 1 MB, which else has 256 pages.
    """
    sizes = [math.prod(shape) * np.dtype(kind).itemsize for shape, kind in wanted]
    total = sum(sizes)
    memory = np.empty(total + (_HUGE if total >= _HUGE else 0), np.uint8)
    start = -memory.ctypes.data % _HUGE if total >= _HUGE else 0
    starts = itertools.accumulate(sizes, initial=start)
    pairs = zip(wanted, sizes, starts, strict=False)
    return [memory[at : at + size].view(kind).reshape(shape) for (shape, kind), size, at in pairs]


def _longest(vectors: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.einsum("ij,ij->i", vectors, vectors).max()))


def addresses(*arrays: NDArray[Any]) -> list[int]:
    """Return the addresses of arrays."""
    return [array.ctypes.data for array in arrays]


def code_type(codes: Codes) -> str:
    """Return the LLVM type of codes."""
    return f"i{8 * codes.itemsize}"


def shifted(codebook: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Return the int8 values of the codebook + 128 as uint8: the lookup table of the machine code."""
    return codebook.view(np.uint8).ravel() ^ np.uint8(128)


def _compile(ir: str, name: str, pointers: int, numbers: int) -> Callable[..., None]:
    return compile_ir(ir, name, [ctypes.c_void_p] * (_TABLE_ARRAYS + pointers) + [ctypes.c_int64] * numbers)


@compiled_once
def _table(plan: Plan) -> Callable[..., None]:
    return _compile(write_table(plan), "query_table", 2, 2)


@compiled_once
def probe(plan: Plan) -> Callable[..., None]:
    """Compile the code of `op.probe`."""
    return _compile(write_probe(plan), "probe", 4, 6)


@compiled_once
def collect() -> Callable[..., None]:
    """Compile the code of `op.collect`."""
    return compile_ir(write_collect(), "collect", [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2)


@compiled_once
def interaction(plan: Plan, code: str) -> Callable[..., None]:
    """Compile the code of `op.interaction`, for codes of LLVM type ``code``."""
    return _compile(write_interaction(plan, code), "interaction", 4, 4)


@compiled_once
def residual_maxsim(plan: Plan, code: str, nbits: int, width: int) -> Callable[..., None]:
    """Compile the code of `op.residual_maxsim`, for ``width`` bytes per token."""
    return _compile(write_maxsim(plan, code, nbits, width), "residual_maxsim", 8, 4)


@compiled_once
def exact_maxsim(plan: Plan, code: str, nbits: int, width: int, dim: int) -> Callable[..., None]:
    """Compile the code of `op.exact_maxsim`, for ``width`` bytes per token of ``dim`` numbers."""
    return _compile(write_maxsim(plan, code, nbits, width, dim), "exact_maxsim", 14, 4)
