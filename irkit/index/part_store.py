"""The part of a store that belongs to one of several indexes in it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from irkit.index.array_files import Array, part_name
from irkit.index.state import State
from irkit.index.store import Store

T = TypeVar("T")


class PartStore(Store):
    """The arrays and values of one index among several of a store, with the interface of a store.

    The array ``values.bin`` of the part ``dense`` is ``dense__values.bin`` of the whole, and
    ``meta["index"]`` of the part is ``meta["index"]["parts"]["dense"]`` of the whole. Removed rows and
    documents belong to all parts. The whole store makes changes and snapshots, so that all parts are
    committed together.

    Attributes:
        whole: The store.
        name: Name of the part.
        parts: The same part of each shard.
    """

    def __init__(self, whole: Store, name: str) -> None:
        """Show the part ``name`` of a store."""
        self.whole, self.name = whole, name  # the whole store has all state
        self.parts = [PartStore(part, name) for part in whole.parts]  # of an index in shards

    def _own_name(self, name: str) -> str:
        return part_name(self.name, name)

    # ---- values of the whole ----

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the whole, such as ``path``, ``limits`` or ``building``."""
        if name in ("whole", "name"):  # of an object that is being unpickled
            raise AttributeError(name)
        return getattr(self.whole, name)

    @property
    def meta(self) -> dict[str, Any]:
        """Values of the manifest, with the values of this part under ``index``."""
        meta = self.whole.meta
        return {**meta, "index": meta["index"]["parts"][self.name]}

    @property
    def version(self) -> int:
        """See `StoreReader.version`."""
        return self.whole.version

    @property
    def epoch(self) -> int:
        """See `StoreReader.epoch`."""
        return self.whole.epoch

    def snapshot(self, state: State | None = None) -> Any:
        """See `StoreReader.snapshot`."""
        return self.whole.snapshot(state)

    def update(self) -> Any:
        """See `Store.update`."""
        return self.whole.update()

    def refresh(self) -> bool:
        """See `Store.refresh`."""
        return self.whole.refresh()

    # ---- arrays of the part ----

    def rows(self, name: str) -> int:
        """See `StoreReader.rows`."""
        return self.whole.rows(self._own_name(name))

    def file(self, name: str) -> str | None:
        """See `StoreReader.file`."""
        return self.whole.file(self._own_name(name))

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every array of the part by name."""
        start = self._own_name("")
        return {
            name.removeprefix(start): size
            for name, size in self.whole.sizes().items()
            if name.startswith(start)
        }

    def read(self, name: str) -> Array:
        """See `StoreReader.read`."""
        return self.whole.read(self._own_name(name))

    def blocks(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[Array]:
        """See `StoreReader.blocks`."""
        return self.whole.blocks(self._own_name(name), start, stop)

    def take(self, name: str, rows: Array) -> Array:
        """See `StoreReader.take`."""
        return self.whole.take(self._own_name(name), rows)

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """See `StoreReader.derived`."""
        return self.whole.derived((self.name, key), make)

    def extended(self, key: Hashable, names: Sequence[str], extend: Callable[[T | None], T]) -> T:
        """See `StoreReader.extended`."""
        return self.whole.extended((self.name, key), [self._own_name(name) for name in names], extend)

    def once(self, name: str, check: Callable[[], object]) -> None:
        """See `StoreReader.once`."""
        self.whole.once(self._own_name(name), check)

    def append(self, name: str, array: Array) -> None:
        """See `Store.append`."""
        self.whole.append(self._own_name(name), array)

    def recast(self, name: str, dtype: Any) -> None:
        """See `Store.recast`."""
        self.whole.recast(self._own_name(name), dtype)

    def replace(self, name: str, write: Callable[[Path], object]) -> None:
        """See `Store.replace`."""
        self.whole.replace(self._own_name(name), write)

    def drop(self, name: str) -> None:
        """See `Store.drop`."""
        self.whole.drop(self._own_name(name))


def index_records(store: Store) -> dict[str, dict[str, Any]]:
    """Return what the manifest says of an index, under ``""``, and of each of its parts, by name."""
    about = store.meta["index"]
    return {"": about, **about.get("parts", {})}
