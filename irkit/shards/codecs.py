"""What shards share of their codes: centroids and codebooks, trained on a sample of the whole.

`plaid` and ``dense`` with ``keep="none"`` return what codes stand for, so their scores depend on centroids
and codebooks. Lists of `dense` are probed by centroids, too. So these arrays are trained once, on the sample
that one index of all documents would be trained on, and copied to every shard. Shards never train their own.
Other kinds have nothing to share: scores of `faiss` and `muvera` are exact, their structures only choose
candidates, and the projections of `muvera` and the rotations of `dense` come from the seed alone.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from typing import Any

import numpy as np

from irkit.index import DenseConfig, PlaidConfig, StageProgress, Store, create_index
from irkit.index.array_files import Array
from irkit.index.clustering import centroid_count, sample_positions
from irkit.shards.placement import global_rows

_ARRAYS = {
    "plaid": ("centroids.bin", "codebook.bin"),
    "dense": ("centroids.bin", "centroid_scales.bin", "margins.bin"),
}
_VALUES = {"plaid": ("misfit", "length"), "dense": ("trained",)}
CODED = frozenset(_ARRAYS)
"""Kinds whose rows have codes, all but the last ones."""
_POINTS = 32  # documents of a sample per list, as `irkit.index.coded_lists` takes


def waiting(index: Any) -> bool:
    """Return whether so many rows of a `ShardedIndex` have no codes that one index would code them."""
    parts: list[Any] = index.parts
    limits = index.store.limits
    if isinstance(index.config, PlaidConfig):
        total = sum(part._total() - part._first_added() for part in parts if part.representation)
        return bool(total > limits.plaid_uncompressed)
    if isinstance(index.config, DenseConfig):
        return bool(sum(len(part) - part._covered for part in parts) > limits.dense_scan)
    return False


def share_codec(index: Any, many: bool, progress: StageProgress | None) -> None:
    """Train the codec of an index if many rows wait and there is none yet, and copy it to all shards."""
    kind = index.config.kind
    if not many or any(store.meta["index"].get("shared_codec") for store in index.store.parts):
        return
    rows = np.sort(np.concatenate([global_rows(store) for store in index.store.parts]))
    config, chosen = _plan(index, rows)
    with tempfile.TemporaryDirectory() as folder, Store.build(folder) as store:
        store.limits = replace(index.store.limits, dense_points=1)  # the number of lists is decided
        sample: Any = create_index(store, config)
        size = max(1, store.limits.take_rows)
        for start in range(0, len(chosen), size):
            sample.add(index.representations(chosen[start : start + size]))
        if kind == "plaid":
            sample._train(progress or (lambda stage, count, total: None))
        else:
            with store.update():
                if not sample._train(sample._reader()):
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


def _plan(index: Any, rows: Array) -> tuple[Any, Array]:
    """Return the settings of a training on a sample, and the rows of the sample."""
    config, n = index.config, len(rows)
    parts: list[Any] = index.parts
    if isinstance(config, PlaidConfig):
        total = sum(part._total() for part in parts if part.representation)
        centroids = config.centroids or centroid_count(total, config.train_size)
        size = min(n, math.ceil(n * config.train_size / max(1, total)))
        return config.model_copy(update={"centroids": centroids}), rows[
            sample_positions(n, size, config.seed)
        ]
    assert isinstance(config, DenseConfig)
    lists = min(config.lists or round(4 * math.sqrt(n)), max(1, n // parts[0]._list_rows()))
    chosen = rows[sample_positions(n, _POINTS * lists, config.seed)]
    keep = "float32" if config.keep == "none" else config.keep
    return config.model_copy(update={"lists": lists, "keep": keep}), chosen
