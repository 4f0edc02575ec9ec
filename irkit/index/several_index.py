"""Several indexes of the same rows in one store: one for each head of a model with several heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from irkit.arguments import brief
from irkit.core.representation import Representation, Several
from irkit.errors import BadTypeError, BadValueError
from irkit.index.array_files import Array
from irkit.index.index_base import Index, StageProgress, as_rows, copy_rows, row_list
from irkit.index.index_kinds import SeveralConfig
from irkit.index.part_store import index_records
from irkit.index.state import snapshot
from irkit.index.store import Store
from irkit.index.topk import Hits
from irkit.index.windowed import WindowedIndex

_COMMON = ("removed", "removed_share", "windows", "shards")  # facts of all parts


class SeveralIndex(Index):
    """Rows of several representations, each in an index of its own; all are changed and committed together.

    Each part is searched on its own: ``index.parts["dense"].search(...)``. `irkit.Retriever` searches all of
    them and fuses their hits. Parts of documents in windows are `WindowedIndex`, of the same windows each;
    parts of an index in shards are `irkit.shards.ShardedIndex` or `irkit.shards.ShardedWindows`.

    Attributes:
        parts: Indexes by name.
    """

    config: SeveralConfig

    def __init__(self, store: Store, config: SeveralConfig, parts: dict[str, Index]) -> None:
        """Use `create_index` or `open_index`."""
        super().__init__(store, config)
        self.parts = parts
        self._first = next(iter(parts.values()))
        self.windows = self._first.windows

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of representation that it can hold."""
        return ("several",)

    def __len__(self) -> int:
        """Documents ever added, removed ones included."""
        return len(self._first)

    @property
    def live(self) -> Array:
        """``(len(self),)`` bool: documents that are not removed."""
        return self._first.live

    def add(self, representation: Representation) -> range:
        """Add documents, see `Index.add`.

        Args:
            representation: A `Several` with the names of the parts.
        """
        return self._add(representation, lambda part, rows: part.add(rows))

    def add_windows(self, representation: Representation, spans: Sequence[Array]) -> range:
        """Add documents in windows, see `WindowedIndex.add_windows`."""
        return self._add(representation, lambda part, rows: cast(Any, part).add_windows(rows, spans))

    def _add(self, representation: Representation, add: Callable[[Index, Representation], object]) -> range:
        with self.store.update():
            self._check("adding documents", representation)
            rows, start = cast(Any, representation).parts, len(self)
            for name, part in self.parts.items():
                add(part, rows[name])
            self._note_rows()
            return range(start, len(self))

    def _note_rows(self) -> None:
        """Write what parts have in common into the manifest, and into those of shards."""
        for store in (self.store, *self.store.parts):
            about, *parts = index_records(store).values()
            dim, rows = sum(part["dim"] for part in parts), parts[0]["rows"]
            about |= {"representation": "several", "dim": dim, "rows": rows}

    def remove(self, rows: Sequence[int] | Array) -> int:
        """Exclude documents from all later searches, in all parts."""
        return self._first.remove(rows)

    def copy(self, source: Index, rows: Array) -> None:
        """Add documents ``rows (n,)``, ascending, of an index of the same parts, exactly as stored."""
        assert isinstance(source, SeveralIndex)
        with self.store.update():
            for name, part in self.parts.items():
                copy = WindowedIndex.copy if isinstance(part, WindowedIndex) else copy_rows
                copy(cast(Any, part), source.parts[name], rows)
            self._note_rows()

    def finish(self, progress: StageProgress | None = None) -> None:
        """Build or extend the structures of all parts."""
        for part in self.parts.values():
            part.finish(progress)

    @snapshot
    def representations(self, rows: Array) -> Any:
        """Return a `Several` of the stored documents of ``rows (n,)``, in this order."""
        chosen = row_list("representations", rows, len(self))
        return Several({name: part.representations(chosen) for name, part in self.parts.items()})

    @snapshot
    def passages(self, queries: Several, rows: Array, weights: Mapping[str, float]) -> Array:
        """Return where the best window of each document starts and ends in its text.

        The best window has the highest weighted sum of the scores of parts.

        Args:
            queries: ``n_q`` representations of each part.
            rows: ``(n_q, k)`` documents; -1 stands for none.
            weights: Weights by part.

        Returns:
            ``(n_q, k, 2)`` integers; 0 where the row is -1.
        """
        rows = as_rows("finding passages", rows, len(self), least=-1)
        total: Any = 0.0
        for name, weight in weights.items():
            where, scores, counts = cast(Any, self.parts[name]).window_scores(queries.parts[name], rows)
            total = total + weight * np.where(np.isneginf(scores), 0.0, scores)
        return cast(WindowedIndex, self._first).best_spans(rows, where, total, counts)

    @snapshot
    def stats(self) -> dict[str, Any]:
        """Return what `Index.stats` returns, and under ``parts`` the same for each part."""
        parts = {name: part.stats() for name, part in self.parts.items()}
        first = next(iter(parts.values()))
        common = {key: first[key] for key in _COMMON if key in first}
        return super().stats() | common | {"parts": parts}

    def search(self, queries: Representation, k: int, allowed: Array | None = None) -> Hits:
        """Raise BadValueError: a part is searched, or a `irkit.Retriever`, which fuses the hits of all."""
        raise BadValueError(self._advice("search"))

    def rescore(self, queries: Representation, rows: Array) -> Array:
        """Raise BadValueError: parts score rows, see `search`."""
        raise BadValueError(self._advice("rescore"))

    def _advice(self, operation: str) -> str:
        name = next(iter(self.parts))
        return (
            f"{operation}: the index has the parts {', '.join(self.parts)}; {operation} one of them, as in "
            f"index.parts[{name!r}].{operation}, or search all by the Retriever"
        )

    def _append(self, representation: Representation) -> None:
        raise AssertionError("unreachable: `add` adds to the parts")

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        raise AssertionError("unreachable: `search` refuses")

    def _check(self, operation: str, representation: Any) -> None:
        """Raise an error if the parts cannot hold the representations; the parts check the rest."""
        self._check_same()
        if not isinstance(representation, Several):
            raise BadTypeError(
                f"{operation}: got {type(representation).__name__}, expected Several with the parts "
                + ", ".join(self.parts)
            )
        if {*representation.parts} != {*self.parts}:
            raise BadValueError(
                f"{operation}: got parts {brief([*representation.parts])}, the index has "
                f"{', '.join(self.parts)}; use the model it was built with"
            )
        for name, part in self.parts.items():
            part._check(f"{operation} (part {name})", representation.parts[name])


def index_parts(index: Index) -> Mapping[str, Index]:
    """Return the index of each representation by name; an index of one alone has the name ``""``."""
    return index.parts if isinstance(index, SeveralIndex) else {"": index}
