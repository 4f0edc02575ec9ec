"""Compare the speed of each step of building and searching encoded documents with torch, on one core.

Tokens are noisy copies of 8192 centroids of 128 dimensions; documents have 40 to 100 tokens, queries 32.
Times are CPU time, the best of interleaved rounds, so that other processes on a shared machine disturb less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from irkit_kernels.residual_maxsim import (
    Tokens,
    assign,
    assign_near,
    decode,
    encode,
    interaction,
    pack_centroids,
    probe,
    query_table,
    residual_maxsim,
    train_codebook,
)

__all__ = ["run"]

DOCUMENTS, CENTROIDS, DIM, QUERY, LENGTHS = 5000, 8192, 128, 32, (40, 101)
VECTORS, SCORED, NPROBE, FOUND, ROUNDS = 4000, 256, 2, 1024, 15
HUBS, NEAR = 32, 2048  # a block of a build has about as many tokens per hub; centroids near each
# in which torch assigns fastest: a CPU without instructions for bfloat16 imitates it
LOW = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


class Step(NamedTuple):
    """A step to time: ``kernel`` and ``plain`` compute the same for ``items`` items."""

    name: str
    item: str
    items: int
    kernel: Callable[[], Any]
    plain: Callable[[], Any]
    tolerance: float  # between their results


def run() -> list[dict[str, Any]]:
    """Time each step on one core.

    Returns:
        One dict per step: its item, nanoseconds per item here and in torch, and the ratio of torch to ours.

    Raises:
        RuntimeError: A result is wrong.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        corpora = {nbits: Corpus(nbits) for nbits in (4, 2, 1)}
        steps = [*_common(corpora[4]), *(step for corpus in corpora.values() for step in _coding(corpus))]
        return [_measure(step) for step in steps]
    finally:
        torch.set_num_threads(threads)


class Corpus:
    """Random encoded documents, and the steps in plain torch."""

    def __init__(self, nbits: int) -> None:
        rng = np.random.default_rng(0)
        self.nbits, self.offsets = nbits, np.concatenate([[0], np.cumsum(rng.integers(*LENGTHS, DOCUMENTS))])
        self.centroids = F.normalize(torch.from_numpy(rng.standard_normal((CENTROIDS, DIM), np.float32)))
        self.codes = rng.integers(0, CENTROIDS, self.offsets[-1]).astype(np.uint16)
        noise = torch.from_numpy(rng.standard_normal((len(self.codes), DIM), np.float32))
        self.values = F.normalize(self.centroids[self.codes.astype(np.int64)] + 0.07 * noise)
        self.c, self.v = self.centroids.numpy(), self.values.numpy()
        self.codebook = train_codebook(self.v[:VECTORS] - self.c[self.codes[:VECTORS]], nbits)
        self.tokens = encode(self.v, self.c, self.codes, self.codebook)
        self.query = self.values[torch.from_numpy(rng.integers(0, len(self.codes), QUERY))]
        owners = np.repeat(np.arange(DOCUMENTS), np.diff(self.offsets))
        pairs = np.unique(self.codes.astype(np.int64) << 32 | owners)
        self.lists = np.searchsorted(pairs >> 32, np.arange(CENTROIDS + 1)), pairs.astype(np.int32)
        self.table = query_table(self.query.numpy(), pack_centroids(self.c))
        self.scores = self.centroids @ self.query.T
        self.rows = np.sort(rng.choice(DOCUMENTS, SCORED, replace=False)).astype(np.int32)
        self.hubs = self.centroids[:HUBS]
        self.near = (self.hubs @ self.centroids.T).topk(NEAR).indices.sort().values

    def places(self, rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], Tensor]:
        """Return the tokens of documents, and the document of each."""
        lengths = np.diff(self.offsets)[rows]
        starts = np.repeat(self.offsets[rows] - np.cumsum(lengths) + lengths, lengths)
        owners = torch.from_numpy(np.repeat(np.arange(len(rows)), lengths))
        return starts + np.arange(len(starts)), owners

    def decode(self, tokens: Tokens) -> Tensor:
        """Decode: look the levels up byte by byte, and add both products."""
        packed = torch.from_numpy(tokens.packed).int()
        both = F.pad(packed[:, :-1], (1, 0)) << 8 | packed
        planes = [both >> shift & 255 for shift in range(8 - self.nbits, -1, -self.nbits)]
        levels = torch.from_numpy(self.codebook.ravel().astype(np.float32))[torch.cat(planes, 1)]
        coefficients = torch.from_numpy(tokens.coefficients).float()
        a, b = coefficients[:, :1], coefficients[:, 1:]
        return a * self.centroids[torch.from_numpy(tokens.codes.astype(np.int64))] + b * levels

    def encode(self, values: Tensor, codes: NDArray[np.uint16]) -> Tensor:
        """Find the best levels for residuals of length 1, once and without fitting coefficients."""
        residuals = values - self.centroids[torch.from_numpy(codes.astype(np.int64))]
        steps = residuals * (32 * DIM**0.5 / residuals.norm(dim=1, keepdim=True))
        planes, states = 8 // self.nbits, 2 ** (8 - self.nbits)
        numbers = steps.view(len(values), planes, -1).transpose(1, 2).reshape(len(values), -1)
        levels = torch.from_numpy(self.codebook.ravel().astype(np.float32))
        costs, chosen = torch.full((len(values), states), 1e9), []
        costs[:, 0] = 0
        for number in numbers.T:
            ways = costs.repeat_interleave(2**self.nbits, 1) + (number[:, None] - levels).square()
            costs, first = ways.view(len(values), -1, states).min(1)
            chosen.append(first)
        state, packed = costs.argmin(1, keepdim=True), []
        for i in range(DIM - 1, -1, -1):
            window = chosen[i].gather(1, state) * states + state
            if i % planes == planes - 1:
                packed.append(window)
            state = window >> self.nbits
        return torch.cat(packed[::-1], 1).byte()

    def best(self, scores: Tensor, owners: Tensor, count: int) -> Tensor:
        """Reduce the scores of tokens to MaxSim per document."""
        highest = scores.new_full((count, QUERY), -torch.inf)
        return highest.scatter_reduce(0, owners[:, None].expand_as(scores), scores, "amax").sum(1)

    def maxsim(self) -> Tensor:
        """Score documents: decode, multiply, take the maxima."""
        positions, owners = self.places(self.rows)
        tokens = Tokens(*(x[positions] for x in self.tokens))
        return self.best(self.decode(tokens) @ self.query.T, owners, len(self.rows))

    def assign_near(self, values: Tensor) -> Tensor:
        """Find the hub of each value, then hub by hub the best of the centroids that are near it."""
        values, half = values.to(LOW), self.centroids.to(LOW)
        hubs, codes = (values @ half[:HUBS].T).argmax(1), torch.empty(len(values), dtype=torch.int64)
        for hub in hubs.unique():
            rows, near = (hubs == hub).nonzero()[:, 0], self.near[hub]
            codes[rows] = near[(values[rows] @ half[near].T).argmax(1)]
        return codes

    def probe(self) -> Tensor:
        """Find documents: the best centroids of each token, their lists, counts, and the highest counts."""
        counts = torch.zeros(DOCUMENTS, dtype=torch.int32)
        offsets, documents = self.lists
        centroids, tokens = self.scores.topk(NPROBE, dim=0).indices.unique(return_counts=True)
        for centroid, number in zip(centroids.tolist(), tokens.tolist(), strict=True):
            counts[documents[offsets[centroid] : offsets[centroid + 1]]] += number
        least = counts.kthvalue(DOCUMENTS - FOUND + 1).values
        return ((counts > 0) & (counts >= least)).nonzero()[:, 0]


def _common(x: Corpus) -> list[Step]:
    # inputs of the steps, of one query
    keep, packed = np.ones(DOCUMENTS, bool), pack_centroids(x.c)
    candidates = probe(x.table, NPROBE, *x.lists, keep, DOCUMENTS)
    positions, owners = x.places(candidates)
    codes = torch.from_numpy(x.codes[positions].astype(np.int64))
    some, half = x.values[:VECTORS], x.centroids.to(LOW).T
    near = x.near.int().numpy()

    def chosen(codes: Any) -> Tensor:
        return (some * x.centroids[torch.as_tensor(codes).long()]).sum(1)

    def rough() -> NDArray[np.int32]:
        return interaction(x.table, x.codes, x.offsets, candidates)

    # each step by the kernel and by torch, and the largest difference that is allowed
    return [
        Step(
            "assign",
            "vector",
            VECTORS,
            lambda: chosen(assign(some.numpy(), x.c)),
            lambda: chosen(torch.cat([(part.to(LOW) @ half).argmax(1) for part in some.split(1000)])),
            0.01,
        ),
        Step(
            "assign_near",
            "vector",
            VECTORS,
            lambda: chosen(assign_near(some.numpy(), x.c, x.hubs.numpy(), near)).mean(),
            lambda: chosen(x.assign_near(some)).mean(),
            0.01,
        ),
        Step(
            "query_table",
            "query",
            1,
            lambda: query_table(x.query.numpy(), packed).scores[0] * x.table.header[0, 1],
            lambda: x.centroids @ x.query.T,
            0.01,
        ),
        Step(
            "probe",
            "query",
            1,
            lambda: len(probe(x.table, NPROBE, *x.lists, keep, FOUND)),
            lambda: len(x.probe()),
            50,
        ),
        Step(
            "interaction",
            "document token",
            len(positions),
            lambda: torch.from_numpy(rough()) * (1.25 / 255) - 0.25 * QUERY,
            lambda: x.best(x.scores[codes], owners, len(candidates)),
            0.5 * QUERY / 100,
        ),
    ]


def _coding(x: Corpus) -> list[Step]:
    some, codes = x.values[:VECTORS], x.codes[:VECTORS]
    tokens, count = Tokens(*(part[:VECTORS] for part in x.tokens)), len(x.places(x.rows)[0])
    return [
        Step(
            f"encode, {x.nbits} bits",
            "vector",
            VECTORS,
            lambda: encode(some.numpy(), x.c, codes, x.codebook).packed.shape[1],
            lambda: x.encode(some, codes).shape[1],
            0,
        ),
        Step(
            f"decode, {x.nbits} bits",
            "vector",
            VECTORS,
            lambda: decode(tokens, x.c, x.codebook),
            lambda: x.decode(tokens),
            1e-6,
        ),
        Step(
            f"residual_maxsim, {x.nbits} bits",
            "document token",
            count,
            lambda: residual_maxsim(x.table, x.tokens, x.offsets, x.codebook, x.rows),
            x.maxsim,
            0.05,
        ),
    ]


def _measure(step: Step) -> dict[str, Any]:
    results = [torch.as_tensor(way()).double() for way in (step.kernel, step.plain)]
    error = float((results[0] - results[1]).abs().max())
    if not error <= step.tolerance:
        raise RuntimeError(
            f"residual_maxsim: {step.name} is off by {error}, at most {step.tolerance} is right"
        )
    best = [float("inf")] * 2
    for _ in range(ROUNDS):
        for i, way in enumerate((step.kernel, step.plain)):
            for _ in range(3):  # the other implementation has emptied the caches
                start = time.thread_time()
                way()
                best[i] = min(best[i], (time.thread_time() - start) / step.items)
    return {
        "step": step.name,
        "item": step.item,
        "items": step.items,
        "ns": best[0] * 1e9,
        "torch ns": best[1] * 1e9,
        "x torch": best[1] / best[0],
    }


if __name__ == "__main__":
    print("| step | item | ns | torch ns | x torch |")
    print("|---|---|---|---|---|")
    for row in run():
        print("| {step} | {item} | {ns:.3g} | {torch ns:.3g} | {x torch:.1f} |".format(**row))
