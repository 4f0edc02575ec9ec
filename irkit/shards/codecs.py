"""What shards share of their codes: centroids and codebooks, trained on a sample of the whole.

`plaid` and ``dense`` with ``keep="none"`` return what codes stand for, so their scores depend on centroids
and codebooks. Lists of `dense` and `muvera` are probed by centroids, too. So all shards have the same of
these, their *codec*. It is trained when one index of all documents would train it, on the sample that this
index would take, and copied to every shard: at first, and as the index grows. Shards never train their own.
The codec of `faiss` is a trained structure without rows. Its graphs (HNSW, NSG) have none: each shard builds
its own. The projections of `muvera` and the rotations of codes come from the seed alone.

A shard commits a new codec together with the codes of its rows. If a process is killed in the middle of such
a change, some shards have the new codec, and others their old one. Until the next change brings these to the
newest codec, shards are searched one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from irkit.index import FaissConfig, Index, IndexConfig, StageProgress
from irkit.index.array_files import Array
from irkit.index.clustering import sample_positions
from irkit.index.index_base import coded_rows
from irkit.index.plaid import Plaid, lists_due

CODED = frozenset({"plaid", "dense", "muvera"})
"""Kinds whose rows have codes, all but the last ones, which are copied."""


def has_codec(config: IndexConfig) -> bool:
    """Return whether the shards of an index share a codec."""
    return not config.is_graph if isinstance(config, FaissConfig) else config.kind in CODED


class Work(NamedTuple):
    """What shards do with their rows, decided for all of them.

    Attributes:
        code: Code the rows without codes.
        list: Make the lists of `plaid` anew.
    """

    code: bool
    list: bool


def share_codec(index: Any, progress: StageProgress | None) -> Work:
    """Bring all shards to one codec, the one that an index of all documents would have by now.

    Args:
        index: The `ShardedIndex`.
        progress: See `irkit.index.StageProgress`.

    Returns:
        What `finish_part` has to do in every shard.
    """
    if not has_codec(index.config):
        return Work(False, False)
    parts, report = index.parts, progress or (lambda stage, count, total: None)
    newest, is_building = _newest(index), index.store.building
    # if the process that trained the codec was killed, shards without it take it over
    late = [part for part in parts if part.codec_version < newest.codec_version]
    codec, code = newest.codec() if late else None, bool(late) or many_wait(parts, is_building)
    # a build trains once, also one that is resumed
    if code and not late and not (is_building and newest.codec_version):
        if isinstance(newest, Plaid):
            codec = newest.train(*_waiting_tokens(index), report)
        elif newest.outgrown(len(rows := _rows(index))):
            codec = newest.train(len(rows), _reader(index, rows), report)
            code = codec is not None
    for part in late or parts if codec is not None else []:
        part.take_codec(codec, report)
    return Work(code, isinstance(newest, Plaid) and (is_building or _lists_due(parts, code)))


def finish_part(part: Index, work: Work, progress: StageProgress | None = None) -> None:
    """Build or extend the structure of a shard, whose codec is shared.

    Args:
        part: Index of the shard.
        work: What `share_codec` returned.
        progress: See `irkit.index.StageProgress`.
    """
    ours: Any = part
    if not has_codec(part.config):
        part.finish(progress)
    elif part.representation:
        report = progress or (lambda stage, count, total: None)
        with part.store.update():
            if work.code:
                ours.code(report)
            if isinstance(part, Plaid) and work.list and (part.listed < part.covered or part.has_old_lists):
                part.list_rows(report)


def one_codec(index: Any) -> bool:
    """Return whether all codes are of the same codec, so that shards choose candidates together."""
    return (
        not has_codec(index.config) or len({part.codec_version for part in index.parts if _coded(part)}) < 2
    )


def take_codec(source: Any, part: Any) -> None:
    """Give a new shard the codec of an index, which may be in shards, if there is one."""
    if part.config.kind not in CODED:
        return
    newest = _newest(source) if source.store.parts else source
    if newest.codec_version and not part.codec_version:
        part.take_codec(newest.codec(), lambda stage, count, total: None)


def many_wait(parts: Sequence[Any], is_building: bool = False) -> bool:
    """Return whether the rows of shards without codes are so many that one index would code them now.

    A build codes its rows at its end. If it was killed meanwhile, rows that have codes already count, too.
    """
    parts = [part for part in parts if has_codec(part.config) and part.representation]
    if not parts:
        return False
    limits, old = parts[0].store.limits, not is_building
    if isinstance(parts[0], Plaid):
        waiting = sum(part._total() - old * part._first_added() for part in parts)
        return bool(waiting > limits.plaid_uncompressed)
    coded = old * sum(map(_coded, parts))
    most = limits.dense_scan
    if isinstance(parts[0].config, FaissConfig):
        most = max(limits.faiss_scan, coded // 20)
    return bool(sum(map(len, parts)) - coded > most)


def _coded(part: Any) -> int:
    """Return the number of rows of a shard that have codes."""
    return int(part.covered) if isinstance(part.config, FaissConfig) else coded_rows(part)


def _newest(index: Any) -> Any:
    """Return a shard that has the newest codec; all have it, unless a change was interrupted."""
    return max(index.parts, key=lambda part: (part.codec_version, part.representation is not None))


def _lists_due(parts: list[Any], code: bool) -> bool:
    """Return whether an unsharded index would make its lists anew, once rows are coded (``code``)."""
    return lists_due(parts, sum(len(part) if code else part.covered for part in parts))


# ---- samples of the whole ----


def _rows(index: Any) -> Array:
    """Return ``(n,)`` all global rows, ascending; numbers that no document has are left out."""
    return np.sort(np.concatenate(index.numbers))


def _reader(index: Any, rows: Array) -> Callable[[Array], Array]:
    """Return a function of positions in global ``rows (n,)`` that returns their vectors."""
    where, readers = index.placement, [part._reader() for part in index.parts]

    def read(positions: Array) -> Array:
        split = where.split(rows[positions])
        parts = np.concatenate([readers[number](own) for number, _, own in split])
        values = np.empty_like(parts)
        values[np.concatenate([at for _, at, _ in split])] = parts
        return values

    return read


def _waiting_tokens(index: Any) -> tuple[int, int, Callable[[int, int], Array]]:
    """Return the first arguments of `Plaid.train`; tokens are in order of global rows, as in one index."""
    known = [pair for pair in zip(index.parts, index.numbers, strict=True) if pair[0].representation]
    parts: list[Any] = [part for part, _ in known]
    lengths, ends, numbers, shards = (
        np.concatenate(arrays)
        for arrays in zip(
            *(_added_rows(part, own, shard) for shard, (part, own) in enumerate(known)), strict=True
        )
    )
    order = np.argsort(numbers)
    stops = np.cumsum(lengths[order])
    added = int(stops[-1])

    def sample(size: int, seed: int) -> Array:
        positions = sample_positions(added, size, seed)
        places = np.searchsorted(stops, positions, side="right")
        rows = order[places]
        tokens = ends[rows] - stops[places] + positions  # positions in their shards
        values = np.empty((len(tokens), parts[0].dim), np.float32)
        for shard, part in enumerate(parts):
            chosen = shards[rows] == shard
            if chosen.any():  # a shard whose rows are all compressed may have no values
                values[chosen] = part.store.take("values.bin", tokens[chosen] - part._first_stored())
        return values

    return sum(part._total() for part in parts), added, sample


def _added_rows(part: Any, numbers: Array, shard: int) -> tuple[Array, ...]:
    """Return lengths, ends, global rows and shard ``(n,)`` of the rows that are not compressed."""
    rows = np.arange(part.covered, len(part))
    lengths = part.store.read("lengths.bin")[rows]
    return lengths, part._ends()[rows], numbers[rows], np.full(len(rows), shard)
