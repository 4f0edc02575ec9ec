"""Token pooling: similar token vectors of a document are averaged into one, so that its index shrinks.

Vectors are clustered by Ward's method on cosine distances, and each cluster becomes its mean. A CPU clusters
row by row with scipy; a GPU clusters all rows at once.

Source: Clavié et al. 2024, "Reducing the Footprint of Multi-Vector Retrieval with Minimal Performance Impact
via Token Pooling".
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from irkit.core.ragged import Ragged, to_device

_LONGEST = 4096  # vectors of a row whose distances are kept on a GPU
_ROUNDS = 4  # of merges before the host looks whether all are done


def pool_rows(
    vectors: Ragged,
    factor: float,
    protected: int = 1,
    distances: int = 1 << 26,
    *,
    most: int | None = None,
) -> Ragged:
    """Apply `pool_tokens` to each row, on the device of the vectors.

    A CPU and a GPU find the same clusters unless two distances are equal by chance.

    Args:
        vectors: Ragged ``(total, dim)`` of length 1; gradients flow through the means.
        factor: As for `pool_tokens`.
        protected: As for `pool_tokens`.
        most: As for `pool_tokens`.
        distances: Number of distances that a GPU holds at once, 8 bytes each.
    """
    if not len(vectors.values):
        return vectors
    if vectors.values.is_cpu or vectors.max_length - protected > _LONGEST:
        rows = [pool_tokens(row, factor, protected, most) for row in vectors]
        return Ragged(torch.cat(rows), torch.tensor([len(row) for row in rows]))
    first = vectors.lengths.clamp(max=protected)
    rest = vectors.part_positions(first, vectors.lengths - first)
    kept = [_kept(length, factor, protected, most) for length in rest.lengths.tolist()]
    clusters = torch.tensor(kept, dtype=torch.int64)
    merges = (rest.lengths - clusters).clamp(min=0)
    if not bool(merges.any()):
        return vectors
    size = max(1, distances // max(1, rest.max_length) ** 2)
    values = rest.with_values(vectors.values[rest.values])
    parts = range(0, len(rest), size)
    heads = [_cluster(values[at : at + size], to_device(merges[at : at + size], rest.device)) for at in parts]
    starts = [F.pad(torch.cumsum(values.lengths, 0), (1, 0))[at] for at in parts]  # of the rows of each part
    head = torch.cat([part + int(start) for part, start in zip(heads, starts, strict=True)])

    # the vectors of a cluster side by side, clusters in the order of their heads
    order = head.argsort(stable=True)
    is_head = head == torch.arange(len(head), device=head.device)
    counts = torch.zeros_like(head).index_add_(0, head, torch.ones_like(head))
    numbers = F.pad(is_head.cumsum(0), (1, 0))[rest.offsets.long()].diff().cpu()  # the clusters of each row
    # the heads in order, without nonzero, which the host would wait for
    leaders = (~is_head).to(torch.uint8).argsort(stable=True)[: int(numbers.sum())]
    bags = (counts.cumsum(0) - counts)[leaders]
    means = F.embedding_bag(order, values.values, bags, mode="mean")

    # what is protected comes first in each row
    none = torch.zeros_like(first)
    pooled = Ragged(torch.empty(int((first + numbers).sum()), 0, device=rest.device), first + numbers)
    spans = pooled.part_positions(none, first), pooled.part_positions(first, numbers)
    positions = torch.cat([span.values for span in spans])
    both = torch.cat([vectors.values[vectors.part_positions(none, first).values], means])
    return pooled.with_values(both[positions.argsort()])


def _cluster(vectors: Ragged, merges: Tensor) -> Tensor:
    """Cluster the vectors of each row by Ward's method.

    Each round merges all pairs of clusters that are each other's nearest. Ward's distances never shrink, so
    the tree is the same as after merging one pair at a time. A cluster occupies the slot of its last vector.

    Args:
        vectors: Ragged ``(total, dim)``.
        merges: ``(n,)`` on the device of the vectors: number of merges per row. Merges at the same distance
            as the last of these are made too.

    Returns:
        ``(total,)``: for each vector, the position in ``vectors.values`` of the last vector of its cluster.
    """
    padded, is_token = vectors.to_padded()
    padded = padded.detach().float()
    n, m = is_token.shape
    if not m:
        return torch.empty(0, dtype=torch.int64, device=vectors.device)
    slots = torch.arange(m, device=is_token.device)
    upper = slots[:, None] < slots
    with torch.autocast(padded.device.type, enabled=False):  # which a training in bfloat16 has on
        distances = (1 - padded @ padded.mT).clamp_(0, 2).double()
    distances = _symmetric(
        distances.masked_fill_(~(is_token[:, :, None] & is_token[:, None, :]), torch.inf), upper
    )
    sizes, parents = is_token.double(), slots.repeat(n, 1)
    heights = torch.full_like(sizes, torch.inf)
    for rounds in range(m):  # each merges a pair at least
        nearest, near = distances.min(2)
        if rounds and rounds % _ROUNDS == 0:
            done = (heights < nearest.amin(1, keepdim=True)).sum(1) >= merges
            if bool(done.all()):  # what is left is farther than all that was asked for
                break
        mutual = (near.gather(1, near) == slots) & nearest.isfinite()
        into, gone = mutual & (near < slots), mutual & (near > slots)
        parents, heights = torch.where(gone, near, parents), torch.where(gone, nearest, heights)
        distances, sizes = _merged(distances, sizes, torch.where(into, near, slots), nearest, into, gone)
        distances = _symmetric(distances, upper)
    last = heights.sort(dim=1).values.gather(1, (merges - 1).clamp(min=0)[:, None])
    heads = torch.where((heights <= last) & (merges > 0)[:, None], parents, slots)
    for _ in range(m.bit_length()):
        heads = heads.gather(1, heads)
    starts = vectors.offsets[:-1, None]
    return (heads + starts).flatten()[vectors.slots(m)]


def _symmetric(distances: Tensor, upper: Tensor) -> Tensor:
    """Return ``distances (n, m, m)`` with the upper triangle mirrored, and infinity on the diagonal.

    ``upper (m, m)`` is True above the diagonal.
    """
    distances = distances.masked_fill(~upper, torch.inf)
    return torch.minimum(distances, distances.mT)


def _merged(
    distances: Tensor, sizes: Tensor, sources: Tensor, nearest: Tensor, into: Tensor, gone: Tensor
) -> tuple[Tensor, Tensor]:
    """Return distances and sizes of clusters after a round of merges.

    Args:
        distances: ``(n, m, m)`` distances between the clusters in the slots.
        sizes: ``(n, m)`` number of vectors of each cluster.
        sources: ``(n, m)`` the slot that each slot absorbs, if ``into`` is True for it.
        nearest: ``(n, m)`` distance of each cluster to its nearest.
        into: ``(n, m)`` True for slots that absorb another.
        gone: ``(n, m)`` True for slots that are absorbed; they get size 0 and infinite distances.

    Source: Lance and Williams 1967. The operations and their order follow scipy.
    """
    taken = sizes.gather(1, sources)
    larger = torch.where(into, sizes + taken, sizes).masked_fill(gone, 0)

    def rows(before: Tensor, of_columns: Tensor) -> Tensor:
        theirs = before.gather(1, sources[:, :, None].expand_as(before))
        x, y, i = taken[:, :, None], sizes[:, :, None], of_columns[:, None, :]
        share, between = 1.0 / (x + y + i), nearest[:, :, None]
        after = (i + x) * share * theirs * theirs + (i + y) * share * before * before
        after = (after - i * share * between * between).clamp_(min=0).sqrt_()
        return torch.where(into[:, :, None], after, before)

    after = rows(rows(distances, sizes).mT, larger)
    return after.masked_fill(gone[:, :, None] | gone[:, None, :], torch.inf), larger


def _kept(length: int, factor: float, protected: int, most: int | None) -> int:
    """Return the number of clusters of ``length`` vectors beside those that are protected."""
    return max(int(length // factor), 1) if most is None else most - protected


def pool_tokens(vectors: Tensor, factor: float, protected: int = 1, most: int | None = None) -> Tensor:
    """Replace clusters of similar vectors by their means.

    Args:
        vectors: ``(n, dim)`` of length 1; gradients flow through the means.
        factor: Number of vectors per cluster on average, at least 1: 2 leaves half of the vectors. At least
            one vector is left.
        protected: Number of leading vectors that stay as they are.
        most: Number of vectors that are left at most, above ``protected``; None lets ``factor`` decide.

    Returns:
        ``(m, dim)``: the protected vectors, then the mean of each cluster in an arbitrary order. The mean of
        different vectors is shorter than 1.

    Examples:
        >>> pool_tokens(torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), 2)
        tensor([[0., 1.],
                [1., 0.]])

    Source: Clavié et al. 2024, "Reducing the Footprint of Multi-Vector Retrieval with Minimal Performance
    Impact via Token Pooling": Ward's method on cosine distances.
    """
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    rest = vectors[protected:]
    clusters = _kept(len(rest), factor, protected, most)
    if clusters >= len(rest):
        return vectors
    with torch.autocast(rest.device.type, enabled=False):  # which a training in bfloat16 has on
        similarity = (rest.detach().float() @ rest.detach().float().T).cpu()
    distances = squareform((1 - similarity).clamp_(0, 2).numpy(), checks=False)
    tree = hierarchy.linkage(distances, method="ward")
    labels = hierarchy.fcluster(tree, t=clusters, criterion="maxclust")
    _, numbers = np.unique(labels, return_inverse=True)  # ties can leave labels out
    chosen = torch.from_numpy(numbers).to(rest.device)
    sums = rest.new_zeros(int(numbers.max()) + 1, rest.shape[1]).index_add(0, chosen, rest)
    return torch.cat([vectors[:protected], sums / torch.bincount(chosen)[:, None]])
