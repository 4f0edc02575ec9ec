"""Gather rows from all processes of a training, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from irkit.core.ragged import Ragged, to_device
from irkit.core.representation import Dense, MultiVector, Representation
from irkit.training.example import Batch

Change = Callable[[Representation], Representation]


def _same(rows: Representation) -> Representation:
    return rows


@dataclass(frozen=True)
class Joint:
    """Representations of a batch, of this process or of all, and which documents belong to which query.

    Attributes:
        queries: ``b`` queries.
        documents: ``d`` distinct documents.
        own: ``(b, n)`` int64, rows of ``documents`` that belong to each query; -1 at padding.
        positives: ``(b,)`` int64, how many of the first ``own`` are known to be relevant.
        relevant: ``(b, d)`` bool, which documents are known to be relevant to a query.
        targets: ``(b, n)`` float32 scores of a teacher, or None.
        share: Factor for a loss that is a mean over ``b`` queries. The mean over processes of these products
            is the mean over the queries of all processes.
        of_queries: Function that takes a Representation with one row per query of this process, and returns
            one with one row per query of ``queries``.
        of_documents: The same function for documents: from the documents of this process to ``documents``.
    """

    queries: Representation
    documents: Representation
    own: Tensor
    positives: Tensor
    relevant: Tensor
    targets: Tensor | None
    share: float = 1.0
    of_queries: Change = _same
    of_documents: Change = _same


def processes() -> int:
    """Return how many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def join(
    batch: Batch,
    queries: Representation,
    documents: Representation,
    *,
    every_document: bool = False,
    every_query: bool = False,
) -> Joint:
    """Join a batch and its representations, with the batches of the other processes if a loss needs them.

    The gradient of a row goes back to the process that encoded it, summed over all processes that use the
    row. Distributed training then averages gradients over processes. So they are the gradients that a single
    process with all queries would compute.

    Args:
        batch: Batch of this process.
        queries: One row per query of the batch, Dense or MultiVector.
        documents: One row per document of the batch.
        every_document: Gather the documents of all processes.
        every_query: Gather the queries and the documents of all processes.

    Returns:
        The batch with its representations; rows of other processes follow the order of processes.
    """
    joint = Joint(queries, documents, batch.own, batch.positives, batch.relevant, batch.targets)
    if processes() == 1:
        return joint
    if not every_query:
        counts = _numbers(len(batch), batch.own.device)
        joint = replace(joint, share=len(batch) * len(counts) / max(1, sum(counts)))
        if not every_document:
            return joint
    # a document that several processes have counts once, at its first row
    keys, sizes = _all_rows(batch.keys)
    distinct, number = torch.unique(keys, return_inverse=True)
    rows_of_all = torch.arange(len(keys), device=keys.device)
    first = torch.full_like(distinct, len(keys)).scatter_reduce(0, number, rows_of_all, "amin")
    chosen = first.sort().values
    columns = torch.split(torch.searchsorted(chosen, first[number]), sizes)[dist.get_rank()]

    def of_documents(rows: Representation) -> Representation:
        return everywhere(rows) if len(chosen) == len(keys) else everywhere(rows)[chosen]

    joint = replace(
        joint,
        documents=of_documents(documents),
        own=torch.where(batch.own >= 0, columns[batch.own.clamp(min=0)], -1),
        relevant=_known_relevant(batch, chosen, columns),
        of_documents=of_documents,
    )
    if not every_query:
        return joint
    # queries of all processes, whose numbers of documents are padded to the largest
    missing = max(_numbers(joint.own.shape[1], joint.own.device)) - joint.own.shape[1]
    targets = joint.targets
    return replace(
        joint,
        queries=everywhere(queries),
        own=_all_rows(F.pad(joint.own, (0, missing), value=-1))[0],
        positives=_all_rows(joint.positives)[0],
        relevant=_all_rows(joint.relevant)[0],
        targets=None if targets is None else _all_rows(F.pad(targets, (0, missing), value=torch.nan))[0],
        of_queries=everywhere,
    )


def everywhere(rows: Representation) -> Representation:
    """Gather Dense or MultiVector rows from all processes, in the order of processes, with gradients."""
    if processes() == 1:
        return rows
    if isinstance(rows, MultiVector):
        on_device, sizes = _all_rows(to_device(rows.tokens.lengths, rows.tokens.device))
        lengths = on_device.cpu()
        counts = [int(part.sum()) for part in torch.split(lengths, sizes)]
        values: Tensor = _Gather.apply(rows.tokens.values, counts)  # type: ignore[no-untyped-call]
        return MultiVector(Ragged(values, lengths))
    assert isinstance(rows, Dense)  # sparse weights are dense while they are trained
    return Dense(_all_rows(rows.values)[0])


def _all_rows(values: Tensor) -> tuple[Tensor, list[int]]:
    """Gather ``(n, ...)`` of each process to ``(total, ...)``; also return the ``n`` of each process."""
    sizes = _numbers(len(values), values.device)
    rows: Tensor = _Gather.apply(values, sizes)  # type: ignore[no-untyped-call]
    return rows, sizes


class _Gather(torch.autograd.Function):
    """Gather rows of all processes; backward sums the gradients of all processes for the rows of this one."""

    @staticmethod
    def forward(context: Any, values: Tensor, sizes: list[int]) -> Tensor:
        context.sizes = sizes
        sent = values.to(torch.uint8) if values.dtype == torch.bool else values
        padded = sent.new_zeros(max(sizes), *sent.shape[1:])  # collectives need equal shapes
        padded[: len(sent)] = sent
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        rows = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return rows.to(values.dtype)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # each process receives the sums of its own rows, padded to the largest number
        parts, most = torch.split(gradients[0], context.sizes), max(context.sizes)
        shares = torch.cat([F.pad(part, (0, 0) * (part.dim() - 1) + (0, most - len(part))) for part in parts])
        own = torch.empty_like(shares[:most])
        dist.reduce_scatter_tensor(own, shares.contiguous())
        return own[: context.sizes[dist.get_rank()]], None


def _numbers(number: int, device: torch.device) -> list[int]:
    """Return the ``number`` of every process, in the order of processes."""
    parts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(processes())]
    dist.all_gather(parts, torch.tensor([number], device=device))
    return torch.cat(parts).tolist()


def _known_relevant(batch: Batch, chosen: Tensor, columns: Tensor) -> Tensor:
    """Return which of the gathered documents are known to be relevant: ``(b, m)`` bool for ``m`` documents.

    Args:
        batch: Batch of this process.
        chosen: ``(m,)`` int64, the gathered documents as row numbers among the documents of all processes.
        columns: ``(d,)`` int64, the position in ``chosen`` of each document of ``batch``.
    """
    relevant = torch.zeros(len(batch), len(chosen), dtype=torch.bool, device=chosen.device)
    relevant[:, columns] = batch.relevant
    if batch.names is not None and batch.known is not None:
        names, order = _all_rows(batch.names)[0][chosen].sort()
        positions = torch.searchsorted(names, batch.known.values).clamp(max=len(names) - 1)
        present = names[positions] == batch.known.values
        relevant[batch.known.row_ids()[present], order[positions[present]]] = True
    return relevant
