"""Compare the speed of MaxSim of ragged texts on the CPU with plain torch, numba and maxsim-cpu.

Vectors are random unit vectors of 128 dimensions. Queries have 32 tokens, documents 40 to 250.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any

import numba  # imported before `on_cores`, because it counts the available cores at its import
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from irkit_kernels._benching import on_cores, take_turns
from irkit_kernels.maxsim import maxsim, maxsim_int8, quantize_rows

__all__ = ["run"]

DIM, QUERY, DOCUMENT = 128, 32, (40, 250)
ROUNDS = 15
TOLERANCE = {"float32": 2e-5, "float16": 0.02, "bfloat16": 0.15, "int8": 0.15}  # of scores of about 10

Ways = dict[str, Callable[[], Any]]


def run() -> list[dict[str, Any]]:
    """Time a query against 10 and 1000 documents, and the scores of a training batch with their gradients.

    Each round runs all implementations in turn; first on one core, then on all.

    Returns:
        One dict per implementation: its best milliseconds; multiply-adds of the similarities per second; the
        median over the rounds of the time of torch's float32 divided by its own; and its largest error,
        against float64.

    Raises:
        RuntimeError: A result is wrong.
    """
    rows = []
    for cores in sorted({1, len(os.sched_getaffinity(0))}):
        with on_cores(cores):
            for n in (10, 1000):
                rows += _measure(f"1 query x {n} documents", 1, n, cores, _search_ways)
            rows += _measure("32 x 128 and gradients", 32, 128, cores, _training_ways)
    return rows


class Problem:
    """Random texts: values and offsets as tensors, lengths as a list."""

    def __init__(self, n_q: int, n_d: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(DOCUMENT[0], DOCUMENT[1] + 1, (n_d,), generator=generator).tolist()
        sizes = (n_q * QUERY, sum(self.lengths))
        self.queries, self.documents = (
            F.normalize(torch.randn(size, DIM, generator=generator), dim=1) for size in sizes
        )
        self.query_offsets = torch.arange(n_q + 1, dtype=torch.int32) * QUERY
        self.document_offsets = torch.tensor([0, *np.cumsum(self.lengths)], dtype=torch.int32)
        self.n_q = n_q

    def to(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return queries and documents in a dtype."""
        return self.queries.to(dtype), self.documents.to(dtype)

    def ours(self, queries: Tensor, documents: Tensor) -> Tensor:
        """Score by the kernel."""
        return maxsim(queries, self.query_offsets, documents, self.document_offsets)

    def torch(self, queries: Tensor, documents: Tensor) -> Tensor:
        """Score by torch: all similarities, then maxima in float32 per document; fastest of 6 variants."""
        similarity = documents @ queries.T
        similarity = similarity.to(torch.promote_types(similarity.dtype, torch.float32))
        best = torch.stack([part.amax(0) for part in similarity.split(self.lengths)])
        return best.view(-1, self.n_q, QUERY).sum(2).T


def _search_ways(problem: Problem) -> Ways:
    ways: Ways = {}
    for dtype in (torch.float32, torch.bfloat16):
        values, name = problem.to(dtype), str(dtype).removeprefix("torch.")
        ways[f"torch {name}"] = lambda values=values: problem.torch(*values)
        ways[f"maxsim {name}"] = lambda values=values: problem.ours(*values)
    (q, q_scales), (d, d_scales) = quantize_rows(problem.queries), quantize_rows(problem.documents)
    ends = problem.query_offsets, problem.document_offsets
    ways["maxsim int8"] = lambda: maxsim_int8(q, q_scales, ends[0], d, d_scales, ends[1])
    ways["numba float32"] = _numba(problem)
    if find_spec("maxsim_cpu"):
        import maxsim_cpu

        query = problem.queries.numpy()
        documents = [part.numpy() for part in problem.documents.split(problem.lengths)]
        ways["maxsim-cpu float32"] = lambda: maxsim_cpu.maxsim_scores_variable(query, documents)[None]
    return ways


def _training_ways(problem: Problem) -> Ways:
    grad = torch.randn(problem.n_q, len(problem.lengths), generator=torch.Generator().manual_seed(1))

    def way(score: Callable[..., Tensor], values: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in values]

        def step() -> Tensor:
            scores = score(*leaves)
            torch.autograd.grad(scores, leaves, grad)
            return scores.detach()

        return step

    ways: Ways = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        ways[f"torch {name}"] = way(problem.torch, problem.to(dtype))
        ways[f"maxsim {name}"] = way(problem.ours, problem.to(dtype))
    return ways


def _numba(problem: Problem) -> Callable[[], Tensor]:
    @numba.njit(parallel=True, fastmath=True)
    def kernel(queries: Any, documents: Any, ends: Any, out: Any) -> None:  # queries (d, tokens)
        for j in numba.prange(len(out)):
            best = np.full(queries.shape[1], -np.inf, np.float32)
            sums = np.empty(queries.shape[1], np.float32)
            for token in range(ends[j], ends[j + 1]):
                sums[:] = 0
                for k in range(queries.shape[0]):
                    x = documents[token, k]
                    for i in range(len(sums)):
                        sums[i] += x * queries[k, i]
                for i in range(len(sums)):
                    best[i] = max(best[i], sums[i])
            out[j] = best.sum()

    queries = np.ascontiguousarray(problem.queries.numpy().T)
    arguments = (queries, problem.documents.numpy(), problem.document_offsets.numpy())
    numba.set_num_threads(torch.get_num_threads())

    def way() -> Tensor:
        out = np.empty(len(problem.lengths), np.float32)
        kernel(*arguments, out)
        return torch.from_numpy(out)[None]

    return way


def _measure(
    name: str, n_q: int, n_d: int, cores: int, ways_of: Callable[[Problem], Ways]
) -> list[dict[str, Any]]:
    problem = Problem(n_q, n_d)
    exact = problem.torch(*problem.to(torch.float64))
    ways, errors = ways_of(problem), {}
    for way, function in ways.items():
        function()  # compiles
        scores = torch.as_tensor(function())
        errors[way] = float((scores - exact).abs().max())
        if not errors[way] <= TOLERANCE[way.split()[1]]:
            raise RuntimeError(f"maxsim: {way} differs from float64 by {errors[way]:.2g} on {name}")
    times = take_turns(ways, ROUNDS, cores)
    work = n_q * QUERY * sum(problem.lengths) * DIM
    return [
        {
            "shape": name,
            "cores": cores,
            "way": way,
            "ms": 1e3 * min(seconds),
            "GMAC/s": work / min(seconds) / 1e9,
            "x torch float32": median(a / b for a, b in zip(times["torch float32"], seconds, strict=True)),
            "error": errors[way],
        }
        for way, seconds in times.items()
    ]


if __name__ == "__main__":
    for row in run():
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()
            )
        )
