"""What shards share of their codes: centroids and codebooks, trained on a sample of the whole.

`plaid` and ``dense`` with ``keep="none"`` return what codes stand for, so their scores depend on centroids
and codebooks. Lists of `dense` and `muvera` are probed by centroids, too. So these arrays are trained once,
on the sample that one index of all documents would be trained on, and copied to every shard. Shards never
train their own. Other kinds have nothing to share: scores of `faiss` are exact, and its structures only
choose candidates. The projections of `muvera` and the rotations of codes come from the seed alone.
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch

from irkit.core.ragged import Ragged
from irkit.core.representation import MultiVector
from irkit.index import DenseConfig, PlaidConfig, StageProgress, Store, create_index
from irkit.index.array_files import Array
from irkit.index.clustering import centroid_count, sample_positions
from irkit.index.plaid import POINTS
from irkit.shards.placement import global_rows

_LISTS = ("centroids.bin", "centroid_scales.bin", "margins.bin")
_ARRAYS = {"plaid": ("centroids.bin", "codebook.bin"), "dense": _LISTS, "muvera": _LISTS}
_VALUES = {"plaid": ("misfit", "length"), "dense": ("trained",), "muvera": ("trained",)}
CODED = frozenset(_ARRAYS)
"""Kinds whose rows have codes, all but the last ones."""


def waiting(index: Any) -> bool:
    """Return whether the rows without codes are so many that an unsharded index would code them now.

    A build codes its rows at its end. If it was killed meanwhile, rows that have codes already count, too.
    """
    parts: list[Any] = [part for part in index.parts if part.representation]
    limits, old = index.store.limits, not index.store.building
    if isinstance(index.config, PlaidConfig):
        return bool(
            sum(part._total() - old * part._first_added() for part in parts) > limits.plaid_uncompressed
        )
    if index.config.kind in CODED:
        return bool(sum(len(part) - old * part._covered for part in parts) > limits.dense_scan)
    return False


def share_codec(index: Any, many: bool, progress: StageProgress | None) -> None:
    """Train the codec of an index and copy it to all shards, if many rows wait and no codec was trained."""
    kind, parts = index.config.kind, index.store.parts
    have = [bool(store.meta["index"].get("shared_codec")) for store in parts]
    if any(have):  # but not all, if the process that copied it was killed
        lack = [store for store, has in zip(parts, have, strict=True) if not has]
        _copy_codec(parts[have.index(True)], kind, lack)
    if any(have) or not many:
        return
    rows = np.sort(np.concatenate([global_rows(store) for store in index.store.parts]))
    config, lists, chosen, positions = _plan(index, rows)
    with tempfile.TemporaryDirectory() as folder, Store.build(folder) as store:
        store.limits = index.store.limits
        sample: Any = create_index(store, config)
        size = max(1, store.limits.take_rows)
        for start in range(0, len(chosen), size):
            part = index.representations(chosen[start : start + size])
            sample.add(part if positions is None else _tokens(part, positions[start : start + size]))
        if kind == "plaid":
            sample._train(progress or (lambda stage, count, total: None))
        else:
            with store.update():
                if not sample._train(sample._reader(), lists):
                    return
                store.meta["index"]["trained"] = len(rows)
        if store.rows("centroids.bin"):
            _copy_codec(store, kind, index.store.parts)


def take_codec(source: Store, kind: str, target: Store) -> None:
    """Give a new shard the codec of an index or of another shard, if there is one."""
    if source.rows("centroids.bin") and not target.rows("centroids.bin"):
        _copy_codec(source, kind, [target])


def _copy_codec(source: Store, kind: str, targets: list[Store]) -> None:
    about = source.meta["index"]
    for target in targets:
        with target.update():
            for name in _ARRAYS[kind]:
                target.drop(name)
                if source.rows(name):
                    target.append(name, source.read(name))
            target.meta["index"] |= {name: about[name] for name in _VALUES[kind]} | {"shared_codec": True}


def _plan(index: Any, rows: Array) -> tuple[Any, int, Array, list[Array] | None]:
    """Plan the training that one index of all documents would do.

    Args:
        index: The index.
        rows: ``(n,)`` all global rows, ascending.

    Returns:
        Settings of the training, number of centroids, rows of the sample, and for token vectors the positions
        of the sampled tokens in each of these rows.
    """
    config, n = index.config, len(rows)
    parts: list[Any] = index.parts
    if isinstance(config, PlaidConfig):
        lengths = np.zeros(rows[-1] + 1, np.int64)
        for part in parts:
            if part.representation:
                lengths[global_rows(part.store)] = part.store.read("lengths.bin")
        ends = np.cumsum(lengths[rows])
        total = int(ends[-1])
        count = config.centroids or centroid_count(total, config.train_size)
        size = max(count, min(config.train_size, POINTS * count))
        tokens = sample_positions(total, size, config.seed)
        owners = np.searchsorted(ends, tokens, side="right")
        chosen, starts = np.unique(owners, return_index=True)
        positions = np.split(tokens - (ends - lengths[rows])[owners], starts[1:])
        return config.model_copy(update={"centroids": count}), count, rows[chosen], positions
    count = parts[0]._list_count(n)
    size = parts[0]._sample_size(count)
    if isinstance(config, DenseConfig):  # train on the vectors as they are stored, not on codes of them
        config = config.model_copy(update={"keep": "float32", "metric": "inner_product"})
    return config, count, rows[sample_positions(n, size, config.seed)], None


def _tokens(documents: MultiVector, positions: list[Array]) -> MultiVector:
    """Return the tokens at some positions of each document."""
    pairs = zip(documents.tokens, positions, strict=True)
    return MultiVector(Ragged.from_rows([row[torch.from_numpy(chosen)] for row, chosen in pairs]))
