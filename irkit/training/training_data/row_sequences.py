"""Training rows by position: the lines of a file, a table of the library datasets, an endless stream."""

from __future__ import annotations

import mmap
import os
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from irkit.data.catalogues import load_hf
from irkit.data.collection_files import read_lines
from irkit.errors import BadValueError, ConfigError, StorageError
from irkit.training.training_data.data_config import DataConfig
from irkit.training.training_data.row_formats import TrainingRow, detect
from irkit.training.training_data.row_sources import (
    READERS,
    LineParser,
    detect_source,
    draw_positions,
    parse_at,
    reader_of,
)
from irkit.utils.cache import cached, hash_of
from irkit.utils.progress import progress_bar
from irkit.utils.uris import is_uri, source_key

Array = np.ndarray[Any, Any]
T = TypeVar("T")

_PIECE = 1 << 16  # positions converted to Python numbers at once


class TrainingRows(Protocol):
    """Rows that are found by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> TrainingRow: ...


def open_rows(config: DataConfig) -> TrainingRows | Stream[TrainingRow]:
    """Open the rows of a dataset: found by position, or read front to back if they are streamed.

    Raises:
        StorageError: The source cannot be read.
        BadValueError: A row is malformed, the source has another format, or the source is empty.
        ConfigError: ``negatives`` or ``sample`` is not for such a source.
    """
    name, kind = config.source, detect_source(config)
    if config.negatives is not None and kind != "beir":
        raise ConfigError(
            f"{name}: negatives: {config.negatives} needs a BEIR folder as source; to train on the "
            "scores of a run, make it the source"
        )
    # streamed: read front to back, possibly only once
    if config.streaming:
        path = Path(name)
        once = name == "-" or (path.exists() and not path.is_file() and not path.is_dir())
        if once and config.sample is not None:
            raise ConfigError(
                f"{name}: sample: what can be read only once cannot be counted first; take limit, "
                "or save it to a file"
            )
        return Stream(name, reader_of(config), once)
    # in a table or a file of lines, rows are found by position; small formats are read into memory
    rows: TrainingRows
    if kind == "table":
        rows = Table(config)
    elif kind == "lines":
        if not Path(name).is_file():
            hint = "; what is no file needs streaming: true" if name == "-" else ""
            raise StorageError(f"reading {name}: there is no such file{hint}")
        rows = Lines(config)
    else:
        rows = list(READERS[kind](config))
        if config.sample is not None:
            rows = [rows[position] for position in draw_positions(len(rows), config.sample)]
    if not len(rows):
        raise BadValueError(f"{name}: it has no examples")
    return rows


# Why the library datasets holds only its own tables here (`hf:`), and neither files nor streams. Observed
# with datasets 5.2 on 200,000 triples of text and on 200,000 lists of 32 ids with scores:
# * A stream must resume exactly, but `IterableDataset.shuffle(buffer_size=100)` does not: its `state_dict`
#   leaves the buffer out, and after `load_state_dict` 96 of the next 200 rows were other ones. Here
#   position i of a stream is always the same row, and blocks are shuffled by seed and number, so there is
#   no state to save.
# * `Dataset.from_generator` opens 24,000 triples per second, the offsets below are noted at 150,000. It also
#   copies the file. `load_dataset("json")` refuses lists of ids with scores (nway), `"csv"` cannot name the
#   line of an error, and both leave the parsing and checking of rows to be done.
# * A row of a mapped table takes 57 us; a line is sliced and parsed in 10 us.


class Stream(Generic[T]):
    """Read items front to back, over and over: position ``i`` is the ``i``-th item of an endless sequence.

    The last ``2 * block`` items stay in memory. For an earlier position reading starts again, which is how a
    training that resumes in a new process gets to its position, too. It also starts again in a process that
    was forked, which would share the place in an open file with its parent.

    Args:
        name: Name of the source, for messages.
        read: Starts reading.
        once: Whether the source can be read only once, as standard input.
        block: How many neighbours are shuffled with each other.
    """

    # Why not a stream of the library datasets: the state of one does not include its shuffle buffer. After a
    # resume the buffer is filled anew, so rows are left out and come in another order. Here the order follows
    # from the number of the block, which needs no state.

    def __init__(
        self, name: str, read: Callable[[], Iterator[T]], once: bool = False, block: int = 10_000
    ) -> None:
        self.name, self.read, self.once, self.block = name, read, once, block
        self._restart()

    def __reduce__(self) -> tuple[Any, ...]:
        return Stream, (self.name, self.read, self.once, self.block)

    def _restart(self) -> None:
        self._next, self._window, self._items = 0, dict[int, T](), self._cycle()
        self._process = os.getpid()

    def _cycle(self) -> Iterator[T]:
        while (first := next(items := self.read(), None)) is not None:
            yield first
            yield from items
            if self.once:
                return

    def __getitem__(self, position: int) -> T:
        is_forked = self._process != os.getpid() and not self.once
        if is_forked or (position < self._next and position not in self._window):
            self._restart()
        while self._next <= position:
            item = next(self._items, None)
            if item is None:
                raise StorageError(
                    f"reading {self.name}: it ended after {self._next} examples and cannot be read again; "
                    "train for fewer steps (max_steps) or save it to a file"
                )
            self._window[self._next] = item
            self._window.pop(self._next - 2 * self.block, None)
            self._next += 1
        return self._window[position]


def endless_order(block: int, *seed: int) -> Iterator[int]:
    """Yield 0, 1, 2, ... with each block shuffled, by the seed and the number of the block."""
    for number in count():
        order = np.random.default_rng([*seed, number]).permutation(block)
        for start in range(0, block, _PIECE):
            yield from (order[start : start + _PIECE] + number * block).tolist()


class Table:
    """Training rows of a table of the library datasets, which maps it into memory; or a sample of them."""

    def __init__(self, config: DataConfig) -> None:
        self._name, self._rows, self._ids = config.source, load_hf(config.source), config.corpus is not None
        if not len(self._rows):
            raise BadValueError(f"{self._name}: it has no rows")
        if config.sample is not None:
            chosen = draw_positions(len(self._rows), config.sample)
            self._rows = self._rows.select(chosen, keep_in_memory=True)
        self._format = detect(self._rows[0]) if config.format == "auto" else config.format

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> TrainingRow:
        return parse_at(f"{self._name}: row {index + 1}", self._rows[index], self._format, self._ids)

    def query_keys(self) -> Array:
        """See `query_keys`."""
        key = ("table", self._rows._fingerprint, self._format, self._ids)
        folder = cached(key, lambda aside: np.save(aside / "keys.npy", _read_keys(self)))
        keys: Array = np.load(folder / "keys.npy", mmap_mode="r")
        return keys


class Lines:
    """Training rows of the lines of a file, or a sample of them.

    The file is mapped into memory, and not copied unless it is compressed.

    The first use parses all lines, so that errors come before training, and notes in the cache where each
    line begins and a hash of its query.

    Raises:
        BadValueError: A line is malformed; the message names file and line.
    """

    # Why not a table of the library datasets: it writes a copy of the whole file, and reads no lines that are
    # lists. Here a line is found by 8 bytes, and its row is parsed when it is drawn.

    def __init__(self, config: DataConfig) -> None:
        self._config, name = config, config.source
        first = [line for _, line in islice(read_lines(name), 2)]
        if not first:
            raise BadValueError(f"{name}: it has no examples")
        self._parser = LineParser.detect(config, first)
        folder = cached(("lines", source_key(name), self._parser), self._build)
        path = folder / "lines" if _is_copied(name) else Path(name)
        self._starts = np.load(folder / "starts.npy", mmap_mode="r")
        self._keys: Array = np.load(folder / "keys.npy", mmap_mode="r")
        if config.sample is not None:
            chosen = draw_positions(len(self._keys), config.sample)
            self._starts, self._keys = self._starts[chosen], self._keys[chosen]
        with path.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def __reduce__(self) -> tuple[Any, ...]:
        return Lines, (self._config,)  # a worker process maps the file itself

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> TrainingRow:
        index = range(len(self))[index]  # counts from the end if negative; an error if the row does not exist
        start = int(self._starts[index])
        end = self._map.find(b"\n", start)
        line = self._map[start : end if end >= 0 else len(self._map)]
        return self._parser(line, f"{self._config.source}: example {index + 1}")

    def query_keys(self) -> Array:
        """See `query_keys`."""
        return self._keys

    def _build(self, aside: Path) -> None:
        name = self._config.source
        path = Path(name)
        if _is_copied(name):
            path = aside / "lines"
            with path.open("wb") as target:
                target.writelines(line + b"\n" for _, line in read_lines(name))
        starts, keys, position = array("q"), array("q"), 0
        with (
            path.open("rb") as stream,
            progress_bar(f"reading {name}", "bytes", path.stat().st_size) as report,
        ):
            is_header = self._parser.has_header  # of the first line that is not blank
            for number, line in enumerate(stream, 1):
                report(len(line))
                if line.removeprefix(BOM_UTF8).strip():
                    if not is_header:
                        starts.append(position)
                        keys.append(_query_key(self._parser(line, f"{name}:{number}")))
                    is_header = False
                position += len(line)
        np.save(aside / "starts.npy", np.asarray(starts, np.int64))
        np.save(aside / "keys.npy", np.asarray(keys, np.int64))


def _is_copied(name: str) -> bool:
    return name.endswith(".gz") or is_uri(name)


def query_keys(rows: TrainingRows) -> Array:
    """Return ``(n,)`` int64 hashes of the queries: equal where the queries of two rows are equal."""
    return rows.query_keys() if isinstance(rows, Lines | Table) else _read_keys(rows)


def _read_keys(rows: TrainingRows) -> Array:
    return np.fromiter((_query_key(rows[i]) for i in range(len(rows))), np.int64, len(rows))


def _query_key(row: TrainingRow) -> int:
    return hash_of(row.query_id or row.query or "")
