"""Several indexes of the same rows in one store: one for each head of a model with several heads."""

from __future__ import annotations

from typing import Any, cast

from irkit.arguments import brief
from irkit.core.representation import Representation, Several
from irkit.errors import BadTypeError, BadValueError
from irkit.index.array_files import Array
from irkit.index.index_base import Index, StageProgress, row_list
from irkit.index.index_kinds import SeveralConfig
from irkit.index.state import snapshot
from irkit.index.store import Store
from irkit.index.topk import Hits


class SeveralIndex(Index):
    """Rows of several representations, each in an index of its own; all are changed and committed together.

    Each part is searched on its own: ``index.parts["dense"].search(...)``. `irkit.Retriever` searches all of
    them and fuses their hits.

    Attributes:
        parts: Indexes by name.
    """

    config: SeveralConfig

    def __init__(self, store: Store, config: SeveralConfig, parts: dict[str, Index]) -> None:
        """Use `create_index` or `open_index`."""
        super().__init__(store, config)
        self.parts = parts

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of representation that it can hold."""
        return ("several",)

    def add(self, representation: Representation) -> range:
        """Add documents, see `Index.add`.

        Args:
            representation: A `Several` with the names of the parts.
        """
        with self.store.update():
            self._check("adding documents", representation)
            rows = cast(Any, representation).parts
            start, about = len(self), self.store.meta["index"]
            for name, part in self.parts.items():
                part.add(rows[name])
            about |= {
                "representation": "several",
                "dim": sum(part.dim for part in self.parts.values()),
                "rows": start + len(representation),
            }
            return range(start, len(self))

    def copy(self, source: Index, rows: Array) -> None:
        """Add documents ``rows (n,)``, ascending, of an index of the same parts, exactly as stored."""
        assert isinstance(source, SeveralIndex)
        with self.store.update():
            for name, part in self.parts.items():
                part.copy(source.parts[name], rows)
            about = source.store.meta["index"]
            copied = {"representation": about["representation"], "dim": about["dim"]}
            self.store.meta["index"] |= copied | {"rows": len(self) + len(rows)}

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
    def stats(self) -> dict[str, Any]:
        """Return what `Index.stats` returns, and under ``parts`` the same for each part."""
        return super().stats() | {"parts": {name: part.stats() for name, part in self.parts.items()}}

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
