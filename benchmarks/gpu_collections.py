"""Token vectors and dense vectors that are made on a GPU, and their exact ranking."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.dense_vectors import SPREAD
from benchmarks.gpu_timing import Device
from benchmarks.token_vectors import COPIED, DRAWN, LENGTHS, OFTEN, POPULAR, PROTOTYPES

__all__ = ["CHUNK", "WIDTHS", "Sizes", "Texts", "exact_scores", "make_texts", "make_vectors"]

WIDTHS = 128, 384  # of token vectors and of dense vectors
CHUNK = 5000  # documents that are made, or added, at once


class Sizes(NamedTuple):
    """How much is searched.

    Attributes:
        documents: Documents of token vectors.
        queries: Queries of token vectors.
        exact: The first queries, whose exact ranking is computed.
        vectors: Dense vectors.
        coded: The first of them, for an index that the CPU takes long to build.
        dense_queries: Queries of dense vectors.
        singles: Queries that are searched one by one, at most.
    """

    documents: int
    queries: int
    exact: int
    vectors: int
    coded: int
    dense_queries: int
    singles: int


class Texts(NamedTuple):
    """Token vectors of length 1.

    Attributes:
        values: ``(total, 128)`` float32 of the documents, numbers of float16, on the device.
        lengths: ``(n,)`` int64 on the CPU.
        queries: ``(n_q, 32, 128)`` float32 on the CPU.
    """

    values: Tensor
    lengths: Tensor
    queries: Tensor


def make_texts(device: Device, sizes: Sizes) -> Texts:
    """Make documents and queries by the recipe of `benchmarks.token_vectors.generate` on the device."""
    generator = torch.Generator(device.name).manual_seed(7)
    chance: dict[str, Any] = {"generator": generator, "device": device.name}
    dim, n = WIDTHS[0], sizes.documents

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dim, **chance)

    def noise(size: float, *shape: int) -> Tensor:
        return normal(*shape).mul_(size / dim**0.5)

    # prototypes, topics, and which prototypes belong to a topic
    prototypes = F.normalize(normal(PROTOTYPES))
    topics = F.normalize(normal(max(50, n // 100)))
    popularity = (torch.arange(PROTOTYPES, device=device.name) + OFTEN) ** -0.9
    of_topic = popularity.multinomial(len(topics) * POPULAR, replacement=True, generator=generator)
    of_topic = of_topic.view(len(topics), POPULAR)

    # length, topic and direction of each document
    lengths = torch.randint(*LENGTHS, (n,), generator=torch.Generator().manual_seed(7))
    there = lengths.to(device.name)
    starts = there.cumsum(0) - there
    topic, own = torch.randint(len(topics), (n,), **chance), F.normalize(normal(n))

    # tokens, in blocks of documents
    values = torch.empty(int(lengths.sum()), dim, device=device.name)
    end = 0
    for at in range(0, n, CHUNK):
        begin, end = end, end + int(lengths[at : at + CHUNK].sum())
        rows = torch.arange(at, min(n, at + CHUNK), device=device.name)
        rows = rows.repeat_interleave(there[at : at + CHUNK], output_size=end - begin)
        drawn = of_topic[topic[rows], torch.randint(POPULAR, (len(rows),), **chance)]
        moved = prototypes[drawn] + 0.45 * topics[topic[rows]] + 0.35 * own[rows]
        values[begin:end] = F.normalize(moved + noise(0.75, len(rows))).half()

    # queries: noisy copies of tokens of a document, and other tokens of its topic
    rows = torch.randint(n, (sizes.queries, 1), **chance)
    places = torch.rand(sizes.queries, COPIED, **chance).mul(there[rows]).long()
    copied = values[starts[rows] + places] + noise(0.55, *places.shape)
    drawn = of_topic[topic[rows], torch.randint(POPULAR, (sizes.queries, DRAWN), **chance)]
    moved = prototypes[drawn] + 0.45 * topics[topic[rows]] + 0.15 * own[rows] + noise(0.6, *drawn.shape)
    return Texts(values, lengths, F.normalize(torch.cat([copied, moved], dim=1), dim=2).cpu())


def exact_scores(texts: Texts, count: int, at_once: int = 4) -> Tensor:
    """Return MaxSim ``(count, n)`` float32 of the first queries with all documents."""
    lengths, parts = texts.lengths.to(texts.values.device), []
    for queries in torch.split(texts.queries[:count].to(lengths.device), at_once):
        similarities = texts.values @ queries.flatten(0, 1).T
        best = torch.segment_reduce(similarities, "max", lengths=lengths, axis=0)
        parts.append(best.view(len(lengths), len(queries), -1).sum(2).T)
    return torch.cat(parts)


def make_vectors(device: Device, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Make vectors ``(n, 384)`` by the recipe of `benchmarks.dense_vectors.generate`, and queries on the CPU.

    All queries are noisy copies of vectors that every index has.
    """
    chance: dict[str, Any] = {
        "generator": torch.Generator(device.name).manual_seed(11),
        "device": device.name,
    }
    dim, n, n_q = WIDTHS[1], sizes.vectors, sizes.dense_queries
    centres = torch.randn(50, dim, **chance).repeat_interleave(40, 0)
    centres += 0.8 * torch.randn(len(centres), dim, **chance)
    directions = torch.randn(SPREAD, dim, **chance) / SPREAD**0.5
    values = centres[torch.randint(len(centres), (n,), **chance)]
    values += 1.1 * torch.randn(n, SPREAD, **chance) @ directions
    values += 0.25 * torch.randn(n, dim, **chance)
    queries = values[torch.randint(sizes.coded, (n_q,), **chance)]
    queries += 0.5 * torch.randn(n_q, SPREAD, **chance) @ directions + 0.3 * torch.randn(n_q, dim, **chance)
    return F.normalize(values), F.normalize(queries).cpu()
