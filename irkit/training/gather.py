"""What the processes of a training know together: rows of all of them, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from irkit.ragged import Ragged, to_device
from irkit.representation import Dense, MultiVector, Representation
from irkit.training.example import Batch

__all__ = ["Joint", "everywhere", "join", "processes"]

Change = Callable[[Representation], Representation]


def _same(rows: Representation) -> Representation:
    return rows


@dataclass(frozen=True)
class Joint:
    """Representations of a batch and how they belong together, of this process or of all.

    Attributes:
        queries: ``b`` of them.
        documents: ``d`` of them, each once.
        own: ``(b, n)`` int64 rows of ``documents`` that belong to each query; -1 where there is none.
        positives: ``(b,)`` int64, how many of the first ``own`` are known to be relevant.
        relevant: ``(b, d)`` bool, which documents are known to be relevant to a query.
        targets: ``(b, n)`` float32 of a teacher, or None.
        share: Factor of a mean over ``b`` queries, so that the mean over processes is that over all queries.
        of_queries: Turns what this process has of its own queries into what belongs to ``queries``.
        of_documents: The same for ``documents``.
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
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def join(
    batch: Batch,
    queries: Representation,
    documents: Representation,
    *,
    every_document: bool = False,
    every_query: bool = False,
) -> Joint:
    """Put a batch and its representations together, with those of the other processes if asked.

    The gradients of what comes from another process go back to it, summed over all that use it. As
    distributed training then takes the mean over processes, the mean of their losses has the gradients that
    one process would have, had it all queries.

    Args:
        batch: Of this process.
        queries: A row for each of its queries, Dense or MultiVector.
        documents: A row for each of its documents.
        every_document: Whether documents of all processes are wanted.
        every_query: Whether queries of all processes are wanted, and with them their documents.
    """
    joint = Joint(queries, documents, batch.own, batch.positives, batch.relevant, batch.targets)
    if processes() == 1:
        return joint
    if not every_query:
        counts = _numbers(len(batch), batch.own.device)
        joint = replace(joint, share=len(batch) * len(counts) / max(1, sum(counts)))
        if not every_document:
            return joint
    keys, sizes = _all_rows(batch.keys)
    distinct, number = torch.unique(keys, return_inverse=True)
    places = torch.arange(len(keys), device=keys.device)
    first = torch.full_like(distinct, len(keys)).scatter_reduce(0, number, places, "amin")
    kept = first.sort().values  # a document that several processes have counts once, where it came first
    columns = torch.split(torch.searchsorted(kept, first[number]), sizes)[dist.get_rank()]

    def of_documents(rows: Representation) -> Representation:
        return everywhere(rows) if len(kept) == len(keys) else everywhere(rows)[kept]

    joint = replace(
        joint,
        documents=of_documents(documents),
        own=torch.where(batch.own >= 0, columns[batch.own.clamp(min=0)], -1),
        relevant=_known_relevant(batch, kept, columns),
        of_documents=of_documents,
    )
    if not every_query:
        return joint
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
    """Dense or MultiVector rows of all processes, in the order of processes, with gradients."""
    if processes() == 1:
        return rows
    if isinstance(rows, MultiVector):
        there, sizes = _all_rows(to_device(rows.tokens.lengths, rows.tokens.device))
        lengths = there.cpu()  # which say how many tokens each process has, too
        counts = [int(part.sum()) for part in torch.split(lengths, sizes)]
        values: Tensor = _Gather.apply(rows.tokens.values, counts)  # type: ignore[no-untyped-call]
        return MultiVector(Ragged(values, lengths))
    assert isinstance(rows, Dense)  # sparse weights are tensors while they are trained
    return Dense(_all_rows(rows.values)[0])


def _all_rows(values: Tensor) -> tuple[Tensor, list[int]]:
    """``(n, ...)`` of each process to ``(total, ...)``, and ``n`` of each."""
    sizes = _numbers(len(values), values.device)
    rows: Tensor = _Gather.apply(values, sizes)  # type: ignore[no-untyped-call]
    return rows, sizes


class _Gather(torch.autograd.Function):
    """Rows of all processes; backward sums what all processes have for the rows of this one."""

    @staticmethod
    def forward(context: Any, values: Tensor, sizes: list[int]) -> Tensor:
        context.sizes = sizes
        sent = values.to(torch.uint8) if values.dtype == torch.bool else values
        padded = sent.new_zeros(max(sizes), *sent.shape[1:])  # collectives want equal shapes
        padded[: len(sent)] = sent
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        rows = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return rows.to(values.dtype)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # each process is sent the sums of its own rows, in shares of one size
        parts, most = torch.split(gradients[0], context.sizes), max(context.sizes)
        shares = torch.cat([F.pad(part, (0, 0) * (part.dim() - 1) + (0, most - len(part))) for part in parts])
        own = torch.empty_like(shares[:most])
        dist.reduce_scatter_tensor(own, shares.contiguous())
        return own[: context.sizes[dist.get_rank()]], None


def _numbers(number: int, device: torch.device) -> list[int]:
    """``number`` of each process."""
    parts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(processes())]
    dist.all_gather(parts, torch.tensor([number], device=device))
    return torch.cat(parts).tolist()


def _known_relevant(batch: Batch, kept: Tensor, columns: Tensor) -> Tensor:
    """``(b, d)`` bool over the documents of all processes.

    Args:
        batch: Of this process.
        kept: Which of the rows of all processes are these documents.
        columns: Where among them the documents of ``batch`` stand.
    """
    relevant = torch.zeros(len(batch), len(kept), dtype=torch.bool, device=kept.device)
    relevant[:, columns] = batch.relevant
    if batch.names is not None and batch.known is not None:
        names, order = _all_rows(batch.names)[0][kept].sort()
        places = torch.searchsorted(names, batch.known.values).clamp(max=len(names) - 1)
        found = names[places] == batch.known.values
        relevant[batch.known.row_ids()[found], order[places[found]]] = True
    return relevant
