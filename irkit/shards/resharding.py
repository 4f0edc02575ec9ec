"""Copy an index into another number of shards, without encoding again."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from irkit.errors import StorageError
from irkit.index import Documents, FaissConfig, StageProgress, Store, compact, create_index, open_index
from irkit.index.array_files import Array
from irkit.index.bm25_index import begin_as
from irkit.index.directory import MANIFEST, directory_of
from irkit.index.index_base import coded_rows
from irkit.index.part_store import index_records
from irkit.index.several_index import index_parts
from irkit.index.term_ids import Vocabulary
from irkit.index.windowed import index_of_rows
from irkit.shards.codecs import CODED, Work, finish_part, many_wait, one_codec, take_codec
from irkit.shards.placement import SEQUENCE, placement, shard_of
from irkit.shards.shard_opening import open_parts
from irkit.shards.sharded_store import ShardedStore, open_store


def reshard(path: str | Path, shards: int, *, progress: StageProgress | None = None) -> None:
    """Rewrite an index as ``shards`` shards without its removed rows, while readers continue to use it.

    Nothing is encoded, trained or compressed again: representations are copied as they are stored, so every
    search finds what it found before. A killed call resumes after its last chunk, if it is repeated with
    the same number and the index has not been changed since.

    Args:
        path: Directory of an index, in one store or in shards.
        shards: Number of shards, from 1 to 1000.
        progress: Called with the stages of the work, see `irkit.index.StageProgress`.

    Raises:
        LockedError: Another process is writing to the index.
        BadValueError: ``shards`` is out of range.
        StorageError: The index cannot be read or written; it is unchanged.
    """
    old = open_store(directory_of(path))  # a copy of an object store cannot be rewritten
    if isinstance(old, ShardedStore):
        with old.update():  # it takes over the terms of an interrupted change
            pass
        index, _ = open_parts(old)
        if not all(
            one_codec(index_of_rows(part)) for part in index_parts(index).values()
        ):  # an interrupted change has left old codes
            index.finish(progress)
    # a killed call resumes only if the index is the same
    stores = old.parts if isinstance(old, ShardedStore) else [old]
    state = 0
    for store in (old, *old.parts):
        state = zlib.crc32((store.path / MANIFEST).read_bytes(), state)
    key = {"reshard": state, "shards": shards}
    with ShardedStore.build(path, shards=shards, key=key, overwrite=True) as new:
        if old.refresh():
            raise StorageError(f"resharding {path}: it was changed meanwhile; run it again")
        index, documents = open_parts(old)
        rows = np.flatnonzero(documents._live())
        with new.update():
            dropped = old.meta.get("dropped", 0) + len(documents) - len(rows)
            new.meta.update({"model": old.meta["model"], "documents": len(rows), "dropped": dropped})
            Vocabulary(new).copy(old)
        # copy the rows of each shard
        owners = np.concatenate(
            [shard_of(documents.ids(part), shards) for part in np.array_split(rows, len(rows) // 65536 + 1)]
        )
        for number, part in enumerate(new.parts):
            own = np.flatnonzero(owners == number)
            _fill(part, [index, documents], rows[own], own, progress, len(rows))
        # what the manifest says of the index and of its heads
        with new.update():
            about, *heads = [_kept(record, len(rows)) for record in index_records(old).values()]
            names = old.meta["index"].get("parts", {})
            new.meta["index"] = about | ({"parts": dict(zip(names, heads, strict=True))} if heads else {})
        # structures of FAISS are not copied: they are trained on the whole, as in a build
        for head in index_parts(open_parts(new)[0]).values():
            if isinstance(head.config, FaissConfig):
                head.finish(progress)
        for store in stores:
            store.check_uncut()
        new.publish()


def rewrite(path: str | Path, *, progress: StageProgress | None = None) -> None:
    """Rewrite an index without its removed rows, with the same number of shards, while readers use it.

    See `irkit.index.compact` and `reshard`, which do it.

    Args:
        path: Directory of an index, in one store or in shards.
        progress: Called with the stages of the work, see `irkit.index.StageProgress`.

    Raises:
        LockedError: Somebody else is writing to it.
        StorageError: It cannot be read or written; the index is unchanged.
    """
    if parts := open_store(directory_of(path)).parts:
        reshard(path, len(parts), progress=progress)
    else:
        compact(path, progress=progress)


_KEPT = ("config", "windows", "representation", "dim", "negative", "bm25")


def _kept(about: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return what the manifest of the whole says of an index without its removed rows."""
    return {key: value for key, value in about.items() if key in _KEPT} | {"rows": rows}


def _fill(
    part: Store, source: Any, rows: Array, sequence: Array, progress: StageProgress | None, total: int
) -> None:
    """Copy ``rows (n,)`` of an index into a new shard, numbered by ``sequence (n,)``.

    Rows that an earlier call has copied are skipped.
    """
    index, documents = source
    heads, about = index_parts(index), index.store.meta["index"]
    sources: list[tuple[Any, Array, Array]] = [(index, np.arange(len(rows)), rows)]
    has_codes = any(head.config.kind in CODED for head in heads.values())
    if has_codes and about["representation"]:
        sources = _by_codes(index, rows)
    target: Any = create_index(part, index.config, windows=index.windows)
    with part.update():
        part.meta["model"] = index.store.meta["model"]
        Vocabulary(part).copy(index.store)
        begin_as(part, index.store)
        for name, head in index_parts(target).items():
            take_codec(index_of_rows(heads[name]), index_of_rows(head))
    # copy chunks; an index without rows still has a kind and dimensions
    size = max(1, part.limits.compact_bytes * max(1, len(index)) // max(1, index.stats()["bytes"]))
    copied, have = 0, part.rows(SEQUENCE)
    if not len(rows) and about["representation"] and not target.representation:
        with part.update():
            target.copy(sources[0][0], sources[0][2])
            part.append(SEQUENCE, sequence)
    for origin, positions, own in sources:
        for start in range(0, len(own), size):
            chosen = slice(start, start + size)
            copied += len(own[chosen])
            if copied <= have:
                continue
            with part.update():
                target.copy(origin, own[chosen])
                Documents(part).add(documents.fetch(rows[positions[chosen]]))
                part.append(SEQUENCE, sequence[positions[chosen]])
            if progress is not None:
                progress("copying", len(own[chosen]), total)
    # the weights of BM25 stay as they were
    with part.update():
        if (mean := about.get("bm25", {}).get("mean")) is not None:
            part.meta["index"]["bm25"]["shared"] = mean
    for head in map(index_of_rows, index_parts(target).values()):
        finish_part(head, Work(many_wait([head]), list=True), progress)
    Documents(part).finish()


def _by_codes(index: Any, rows: Array) -> list[tuple[Any, Array, Array]]:
    """Divide rows by the store that has them, and by whether they have codes, which go first.

    Rows with codes of more representations come before those with codes of fewer.

    Returns:
        Indexes, positions in ``rows``, and rows of the index there.
    """
    split = [(index, np.arange(len(rows)), rows)]
    if index.store.parts:
        split = [
            (open_index(index.store.parts[number]), positions, own)
            for number, positions, own in placement(index.store).split(rows)
        ]
    groups: dict[int, list[tuple[Any, Array, Array]]] = {}
    for part, positions, own in split:
        level = sum((own < coded_rows(head)).astype(int) for head in index_parts(part).values())
        for number in np.unique(level).tolist():
            groups.setdefault(number, []).append((part, positions[level == number], own[level == number]))
    if not groups:  # no rows
        return [(open_index([*index.store.parts, index.store][0]), rows, rows)]
    return [group for number in sorted(groups, reverse=True) for group in groups[number]]
