"""The changes of a store: rows that are appended, and arrays that are replaced or dropped."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from irkit.errors import BadValueError
from irkit.index.array_files import DATA_FILE, Array, Entry, checksum, write_at
from irkit.index.state import StoreReader
from irkit.utils.atomic import explained

UNCHANGED = "the stored index is unchanged"


class StoreWriter(StoreReader):
    """Changes the arrays of a store inside an update; `irkit.index.Store` begins and commits updates."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._numbers = itertools.count(1)  # of versions
        self._dirty: set[str] = set()  # files written since the last commit

    def append(self, name: str, array: Array) -> None:
        """Add rows to an array, inside ``update``; the first call decides on dtype and row shape.

        Args:
            name: Letters and ``_`` in lower case and a suffix, such as ``"values.bin"``.
            array: ``(rows, ...)``.

        Raises:
            StorageError: The rows could not be written; the update is void.
        """
        self._check_updating()
        data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        entry = self.state.arrays.get(name)
        entry = entry or Entry(self._new_file(name), data.dtype.str, data.shape[1:], 0, 0)
        if (data.dtype.str, data.shape[1:]) != (entry.dtype, entry.shape):
            raise BadValueError(
                f"index {self.path}: rows of {name} are {entry.shape} {entry.dtype}, "
                f"got {data.shape[1:]} {data.dtype.str}"
            )
        content = data.reshape(-1).view(np.uint8).data
        with self._writing(entry.file) as path:
            write_at(path, entry.nbytes, content)
        self._change(
            name, replace(entry, rows=entry.rows + len(data), crc32=zlib.crc32(content, entry.crc32))
        )

    def recast(self, name: str, dtype: Any) -> None:
        """Give an array another dtype, inside ``update``; nothing happens if it has that, or is missing."""
        entry = self.state.arrays.get(name)
        if entry is None or entry.dtype == np.dtype(dtype).newbyteorder("<").str:
            return
        blocks = self.blocks(name)
        first = list(itertools.islice(blocks, 1))  # mapped, so that blocks can be read after the drop
        self.drop(name)
        for block in itertools.chain(first, blocks):
            self.append(name, block.astype(dtype))

    def replace(self, name: str, write: Callable[[Path], object]) -> None:
        """Replace an array by a file that ``write(path)`` makes, as bytes, inside ``update``.

        Args:
            name: As for `append`.
            write: Called with the path to write; fails with an OSError.
        """
        self._check_updating()
        file = self._new_file(name)
        with self._writing(file) as path:
            path.unlink(missing_ok=True)  # of a build that was killed
            write(path)
            entry = Entry(file, "|u1", (), path.stat().st_size, 0)
            entry = replace(entry, crc32=checksum(entry.map(self.path)))
        self._change(name, entry)

    def drop(self, name: str) -> None:
        """Forget an array, inside ``update``; nothing happens if the store lacks it."""
        self._check_updating()
        if name in self.state.arrays:
            self._change(name, None)

    def _new_file(self, name: str) -> str:
        state = self.state
        state.generation += 1
        stem, _, suffix = name.partition(".")
        file = f"{stem}.g{state.generation}.{suffix}"
        if not DATA_FILE.fullmatch(file):
            raise BadValueError(f"array name {name!r}: expected letters and _, and a suffix: values.bin")
        return file

    @contextlib.contextmanager
    def _writing(self, file: str) -> Iterator[Path]:
        self._dirty.add(file)
        try:
            with explained(f"writing {self.path / file}", UNCHANGED):
                yield self.path / file
        except BaseException:
            self._own.failed = True
            raise

    def _check_updating(self) -> None:
        if not self.updating:
            raise BadValueError(f"index {self.path}: a change must be inside `with store.update():`")

    def _change(self, name: str, entry: Entry | None) -> None:
        state = self.state
        if entry:
            state.arrays[name] = entry
        else:
            del state.arrays[name]
        state.maps.pop(name, None)
        state.version, state.derived = next(self._numbers), {}
