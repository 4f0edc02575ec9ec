"""Rewrite an index without its removed rows."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from irkit.errors import StorageError
from irkit.index.documents import Documents
from irkit.index.index_base import StageProgress
from irkit.index.opening import create_index, open_index
from irkit.index.store import Store
from irkit.index.term_ids import Vocabulary


def compact(path: str | Path, *, progress: StageProgress | None = None) -> None:
    """Write an index anew without its removed rows; it stays in use meanwhile. Rows are renumbered.

    A killed compaction resumes after its last chunk, if the index has not been changed since.

    Args:
        path: Directory of the index.
        progress: Called with the stages of the work, see `StageProgress`.

    Raises:
        LockedError: Somebody else is writing to it.
        StorageError: It cannot be read or written; the index is unchanged.
    """
    old = Store.open(path)
    state = zlib.crc32((Path(path) / "irkit.json").read_bytes())
    with Store.build(path, key={"compact": state}, overwrite=True) as new:
        if old.refresh():
            raise StorageError(f"compacting {path}: it was changed meanwhile; run it again")
        source, texts = open_index(old), Documents(old)
        index, documents = create_index(new, source.config), Documents(new)
        with new.update():
            Vocabulary(new).copy(old)
        rows = np.flatnonzero(source.live)
        size = max(1, new.limits.compact_bytes * max(1, len(source)) // max(1, source.stats()["bytes"]))
        # an index without rows still has a kind and dimensions: its copy adds none, once
        count = max(len(rows), 1) if source.representation else 0
        for start in range(len(index), count, size):
            chosen = rows[start : start + size]
            with new.update():
                index.copy(source, chosen)
                if len(texts):
                    documents.add(texts.fetch(chosen))
            if progress is not None:
                progress("compacting", len(chosen), len(rows))
        index.finish(progress)
        with new.update():
            new.meta.update({key: value for key, value in old.meta.items() if key != "index"})
        new.publish()
