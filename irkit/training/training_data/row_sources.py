"""Read the training rows of a source front to back: lines, a table, judgments, a run or a pickle."""

from __future__ import annotations

import gzip
import json
import pickle
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Never

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from irkit.config import read_json
from irkit.data import Qrels, read_qrels
from irkit.data.catalogues import load_hf
from irkit.data.collection_files import TABLES, decode, parse_json, read_lines
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.evaluation.run import Run
from irkit.training.training_data.data_config import DataConfig
from irkit.training.training_data.row_formats import Row, TrainingRow, detect, parse

Array = np.ndarray[Any, Any]
Reader = Callable[[DataConfig], Iterator[TrainingRow]]

_JSON = (".jsonl", ".json", ".ndjson")
_HEADERS = {"query", "anchor", "qid", "query_id", "query-id"}


def read_training_rows(source: str | Path | DataConfig) -> Iterator[TrainingRow]:
    """Read a training file row by row.

    Args:
        source: A file of any format, or a configured dataset.

    Raises:
        StorageError: The source cannot be read.
        BadValueError: A row is malformed; the message names file and line.
    """
    return reader_of(source if isinstance(source, DataConfig) else DataConfig(source=str(source)))()


def reader_of(config: DataConfig) -> Callable[[], Iterator[TrainingRow]]:
    """Return a function that starts reading the rows of a dataset, no more than its limit or its sample.

    A sample is drawn here, once: that takes a pass over the source to count its rows.
    """
    read, positions = READERS[detect_source(config)], None
    if config.sample is not None:
        positions = draw_positions(sum(1 for _ in read(config)), config.sample)
    return partial(_read_some, read, config, positions)


def detect_source(config: DataConfig) -> str:
    """Return what a source is: ``"beir"``, ``"lines"``, ``"pickle"``, ``"run"`` or ``"table"``."""
    if config.format in ("beir", "pickle", "run"):
        return config.format
    if config.source.startswith("hf:"):
        return "table"
    if config.format != "auto":
        return "lines"
    if Path(config.source).is_dir():
        return "beir"
    if Path(config.source.removesuffix(".gz")).suffix in (".pkl", ".pickle"):
        return "pickle"
    return "run" if _is_run(config.source) else "lines"


def draw_positions(count: int, n: int) -> Array:
    """Draw ``n`` of ``count`` positions, or all if there are fewer: ascending, the same at every call."""
    return np.sort(np.random.default_rng(0).choice(count, min(count, n), replace=False))


def read_judgments(config: DataConfig) -> Qrels:
    """Read the judgments of a dataset; they are empty if the configuration names none.

    Raises:
        StorageError: They cannot be read, or the split does not exist.
    """
    if config.qrels is not None and config.qrels.endswith(".json"):
        try:
            return _JUDGMENTS.validate_python(read_json(config.qrels), strict=True)
        except ValidationError as error:
            raise BadValueError(
                f"reading {config.qrels}: expected {{query: {{document: grade}}}} with whole numbers as "
                f"grades; {error.errors()[0]['msg']} at {error.errors()[0]['loc']}"
            ) from error
    if config.qrels is not None:
        return read_qrels(config.qrels, config.split)
    if detect_source(config) == "beir":
        if Path(config.source).is_dir() and not Path(config.source, "qrels").is_dir():
            raise StorageError(
                f"reading folder {config.source}: expected qrels/SPLIT.tsv in it, or qrels: FILE; a "
                f"dataset of the library datasets is hf:{config.source}"
            )
        return read_qrels(config.source, config.split or "train")
    if config.split is None:
        return {}
    if config.corpus is None or not Path(config.corpus).is_dir():
        raise BadValueError(
            f"{config.source}: split={config.split!r} needs a BEIR folder as source or as corpus, "
            f"got corpus={config.corpus!r}; or give qrels"
        )
    return read_qrels(config.corpus, config.split)


@dataclass(frozen=True)
class LineParser:
    """Parse the lines of a file.

    Attributes:
        format: Name of the row format.
        ids: Whether strings without a name are ids.
        is_json: Whether lines are JSON rather than columns separated by tabs.
        has_header: Whether the first line names the columns.
    """

    format: str
    ids: bool
    is_json: bool
    has_header: bool

    @classmethod
    def detect(cls, config: DataConfig, lines: list[bytes]) -> LineParser:
        """Return the parser of a file that begins with these one or two lines."""
        suffix = Path(config.source.removesuffix(".gz")).suffix
        if suffix in TABLES:
            raise BadValueError(
                f"{config.source}: a table of {suffix}; put it into a folder and name that as hf:FOLDER"
            )
        is_json = suffix in _JSON or (suffix not in (".tsv", ".txt") and lines[0][:1] in (b"{", b"["))
        first_column = lines[0].split(b"\t")[0].decode(errors="replace").lower()
        has_header = not is_json and first_column in _HEADERS
        format: str = config.format
        if format == "auto":
            format = detect(split_line(lines[-1 if has_header else 0], is_json, config.source))
        return cls(format, config.corpus is not None, is_json, has_header)

    def __call__(self, line: bytes, where: str) -> TrainingRow:
        """Return the row of a line; errors begin with ``where``."""
        return parse_at(where, split_line(line, self.is_json, where), self.format, self.ids)


def parse_at(where: str, row: Row, format: str, ids: bool) -> TrainingRow:
    """Parse a row; errors begin with ``where``.

    Raises:
        BadValueError: The row is not in the format.
    """
    try:
        return parse(row, format, ids)
    except (BadValueError, BadTypeError) as error:
        raise BadValueError(f"{where}: {error}") from error


def split_line(line: bytes, is_json: bool, where: str) -> Row:
    """Return the values of a line; errors begin with ``where``.

    Raises:
        BadValueError: The line is not UTF-8, or not the JSON of a row.
    """
    text = decode(line.removeprefix(BOM_UTF8).rstrip(b"\r\n"), where)
    if not is_json:
        return text.split("\t")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadValueError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(row, dict | list):
        raise BadValueError(f"{where}: expected an object or a list, got {text[:60]!r}")
    return row


def _read_some(read: Reader, config: DataConfig, positions: Array | None) -> Iterator[TrainingRow]:
    """Read the first rows, up to the limit, or the rows at ascending positions."""
    rows = read(config)
    if positions is None:
        yield from islice(rows, config.limit)
    else:
        for skipped in (np.diff(positions, prepend=-1) - 1).tolist():
            yield from islice(rows, skipped, skipped + 1)


def _is_run(name: str) -> bool:
    if Path(name.removesuffix(".gz")).suffix in (".trec", ".run"):
        return True
    if not Path(name).is_file():
        return False
    _, first = next(read_lines(name), (0, b""))
    if first.startswith(b"{"):
        return {"query_id", "doc_id", "score"} <= parse_json(first, f"{name}:1").keys()
    columns = first.split()
    return len(columns) == 6 and columns[1] == b"Q0"


def _read_lines(config: DataConfig) -> Iterator[TrainingRow]:
    lines = read_lines(config.source)
    if first := list(islice(lines, 2)):
        parser = LineParser.detect(config, [line for _, line in first])
        for number, line in chain(first[parser.has_header :], lines):
            yield parser(line, f"{config.source}:{number}")


def _read_table(config: DataConfig) -> Iterator[TrainingRow]:
    format: str = config.format
    for number, row in enumerate(load_hf(config.source, streaming=True), 1):
        format = detect(row) if format == "auto" else format
        yield parse_at(f"{config.source}: row {number}", row, format, config.corpus is not None)


def _read_beir(config: DataConfig) -> Iterator[TrainingRow]:
    """Read the relevant documents of each query, then negatives: of a run, or judged not relevant."""
    run = Run.read(config.negatives) if config.negatives else None
    for query, judged in read_judgments(config).items():
        relevant = tuple(doc for doc, grade in judged.items() if grade >= config.relevant_grade)
        ranked = [doc for doc, _ in run[query]] if run and query in run else []
        if relevant:
            negatives = (doc for doc in (ranked if run else judged) if doc not in relevant)
            yield TrainingRow(query, None, (*relevant, *negatives), positives=len(relevant))


def _read_scored(config: DataConfig) -> Iterator[TrainingRow]:
    """Read a run or a pickle: documents judged relevant first, then the others, both best first."""
    lists: Iterable[tuple[str, dict[str, float]]]
    if detect_source(config) == "pickle":
        lists = read_pickle(config.source).items()
    else:
        run = Run.read(config.source)
        lists = ((query, dict(run[query])) for query in run.query_ids)
    qrels = read_judgments(config)
    for query, scored in lists:
        grades = qrels.get(query, {})
        relevant = {name for name in scored if grades.get(name, 0) >= config.relevant_grade}
        if scored:
            names = sorted(scored, key=lambda name: (name not in relevant, -scored[name]))
            scores = tuple(scored[name] for name in names)
            yield TrainingRow(query, None, tuple(names), None, scores, len(relevant))


class _PlainUnpickler(pickle.Unpickler):
    """Unpickle numbers, strings and containers; refuse every name of a class or a function."""

    def find_class(self, module: str, name: str) -> Never:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only numbers and strings are read")

    def persistent_load(self, pid: Any) -> Never:
        raise pickle.UnpicklingError("it refers to objects outside of the file")


def read_pickle(path: str | Path) -> dict[str, dict[str, float]]:
    """Read ``{query id: {document id: score}}``, the form of SPLADE's hard negatives, also with ``.gz``.

    Pickle files can hold programs. A file that holds anything but dicts, strings and numbers is an error
    before any of it is made.

    Raises:
        StorageError: The file cannot be read.
        BadValueError: The file holds something else.
    """
    name = str(path)
    try:
        with gzip.open(name) if name.endswith(".gz") else Path(name).open("rb") as stream:
            content = _SCORES.validate_python(_PlainUnpickler(stream).load())
    except (OSError, EOFError, zlib.error) as error:
        raise StorageError(f"reading {name}: {getattr(error, 'strerror', None) or error}") from error
    except Exception as error:  # pickle raises nearly anything when the bytes make no sense
        raise BadValueError(
            f"reading {name}: expected a pickle of {{query id: {{document id: score}}}} only; {error}"
        ) from error
    return {str(query): {str(name): score for name, score in row.items()} for query, row in content.items()}


_JUDGMENTS = TypeAdapter(dict[str, dict[str, int]])
_SCORES = TypeAdapter(dict[int | str, dict[int | str, float]], config=ConfigDict(strict=True))


READERS: dict[str, Reader] = {
    "beir": _read_beir,
    "lines": _read_lines,
    "pickle": _read_scored,
    "run": _read_scored,
    "table": _read_table,
}
"""Functions that read all rows of a source, by what it is."""
