"""Records of a source: of the lines of a file, of a table, of judgments and of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np

from irkit.config import read_json
from irkit.data import Qrels, read_qrels
from irkit.data.files import parse_json, read_lines
from irkit.data.remote import load_hf
from irkit.errors import BadValueError, ConfigError, StorageError
from irkit.run import Run
from irkit.training.data.config import DataConfig
from irkit.training.data.formats import detect
from irkit.training.data.pickles import read_pickle
from irkit.training.data.record import Record
from irkit.training.data.records import Array, LineReader, Lines, Records, Some, Stream, Table, parsed

__all__ = ["judgments", "open_records", "read_records"]


def read_records(source: str | Path | DataConfig) -> Iterator[Record]:
    """Read a training file record by record.

    Args:
        source: A file of any format, or a configured dataset.

    Raises:
        StorageError: It cannot be read.
        BadValueError: A row is malformed; the message names file and line.
    """
    config = source if isinstance(source, DataConfig) else DataConfig(source=str(source))
    if config.sample is not None:
        return _read_rows(config, _drawn(_count(config), config.sample))
    return iter(islice(_reader(config)(), config.limit))


def open_records(config: DataConfig) -> Records | Stream[Record]:
    """The records of a dataset: found by position, but of streams, which are read front to back.

    Raises:
        StorageError: It cannot be read.
        BadValueError: A row is malformed, or the format is not that of the source.
        ConfigError: ``negatives`` or ``sample`` is not for such a source.
    """
    if config.negatives is not None and _whole(config) is not _beir:
        raise ConfigError(
            f"{config.source}: negatives: {config.negatives} needs a BEIR folder as source; to train on the "
            "scores of a run, make it the source"
        )
    if config.streaming:
        path = Path(config.source)
        once = config.source == "-" or (path.exists() and not path.is_file() and not path.is_dir())
        if config.sample is None:
            return Stream(config.source, partial(read_records, config), once)
        if once:
            raise ConfigError(
                f"{config.source}: sample: what can be read only once cannot be counted first; take limit, "
                "or save it to a file"
            )
        return Stream(config.source, partial(_read_rows, config, _drawn(_count(config), config.sample)))
    records = _open_all(config)
    return records if config.sample is None else Some(records, _drawn(len(records), config.sample))


def _open_all(config: DataConfig) -> Records:
    if _whole(config) is not None:
        return list(_reader(config)())
    ids = config.corpus is not None
    if config.source.startswith("hf:"):
        return Table(config.source, load_hf(config.source), config.format, ids)
    if not Path(config.source).is_file():
        hint = "; what is no file needs streaming: true" if config.source == "-" else ""
        raise StorageError(f"reading {config.source}: there is no such file{hint}")
    return Lines(config.source, config.format, ids)


def judgments(config: DataConfig) -> Qrels:
    """The judgments of a dataset; none where nothing names them.

    Raises:
        StorageError: They cannot be read, or there is no such split.
    """
    if config.qrels is not None and config.qrels.endswith(".json"):
        return {query: dict(found) for query, found in read_json(config.qrels).items()}
    if config.qrels is not None:
        return read_qrels(config.qrels, config.split)
    if _whole(config) is _beir:
        if Path(config.source).is_dir() and not Path(config.source, "qrels").is_dir():
            raise StorageError(
                f"reading folder {config.source}: expected qrels/SPLIT.tsv in it, or qrels: FILE; a "
                f"dataset of the library datasets is hf:{config.source}"
            )
        return read_qrels(config.source, config.split or "train")
    if config.split is not None:
        if config.corpus is None or not Path(config.corpus).is_dir():
            raise BadValueError(
                f"{config.source}: split={config.split!r} needs a BEIR folder as source or as corpus, "
                f"got corpus={config.corpus!r}; or give qrels"
            )
        return read_qrels(config.corpus, config.split)
    return {}


def _drawn(count: int, wanted: int) -> Array:
    """Rows of ``count``, always the same, ascending: int64 ``(wanted,)``, or all if there are no more."""
    return np.sort(np.random.default_rng(0).choice(count, min(count, wanted), replace=False))


def _count(config: DataConfig) -> int:
    return sum(1 for _ in _reader(config)())


def _read_rows(config: DataConfig, rows: Array) -> Iterator[Record]:
    """Records at ``rows``, which ascend."""
    records = _reader(config)()
    for skipped in np.diff(rows, prepend=-1) - 1:
        yield from islice(records, int(skipped), int(skipped) + 1)


def _reader(config: DataConfig) -> Callable[[], Iterator[Record]]:
    """What starts reading the records one by one."""
    whole = _whole(config)
    if whole is not None:
        return partial(whole, config)
    return partial(_table_records if config.source.startswith("hf:") else _line_records, config)


def _whole(config: DataConfig) -> Callable[[DataConfig], Iterator[Record]] | None:
    """What reads a source whose records are only known when all of it is read; None of others."""
    name, folder = config.source, Path(config.source)
    if config.format == "beir" or (config.format == "auto" and folder.is_dir()):
        return _beir
    suffix = Path(name.removesuffix(".gz")).suffix
    if config.format == "pickle" or (config.format == "auto" and suffix in (".pkl", ".pickle")):
        return _pickle
    if config.format == "run" or (config.format == "auto" and _is_run(name)):
        return _run
    return None


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


def _line_records(config: DataConfig) -> Iterator[Record]:
    lines = read_lines(config.source)
    first = list(islice(lines, 2))
    if not first:
        return
    read = LineReader.of(config.source, [line for _, line in first], config.format, config.corpus is not None)
    for number, line in chain(first[read.is_header(first[0][1]) :], lines):
        yield read(line, f"{config.source}:{number}")


def _table_records(config: DataConfig) -> Iterator[Record]:
    name, format = config.source, str(config.format)
    for number, row in enumerate(load_hf(name, streaming=True), 1):
        format = detect(row) if format == "auto" else format
        yield parsed(row, format, config.corpus is not None, f"{name}: row {number}")


def _beir(config: DataConfig) -> Iterator[Record]:
    """Relevant documents, then negatives: of a run, else those judged not relevant."""
    run = Run.read(config.negatives) if config.negatives else None
    for query, judged in judgments(config).items():
        relevant = tuple(doc for doc, grade in judged.items() if grade >= config.relevant_grade)
        ranked = [doc for doc, _ in run[query]] if run and query in run else []
        others = ranked if run else list(judged)
        if relevant:
            negatives = (doc for doc in others if doc not in relevant)
            yield Record(query, None, (*relevant, *negatives), positives=len(relevant))


def _run(config: DataConfig) -> Iterator[Record]:
    run = Run.read(config.source)
    return _scored(config, ((query, run[query]) for query in run.query_ids))


def _pickle(config: DataConfig) -> Iterator[Record]:
    found = read_pickle(config.source)
    return _scored(config, ((query, list(scores.items())) for query, scores in found.items()))


def _scored(config: DataConfig, lists: Iterable[tuple[str, list[tuple[str, float]]]]) -> Iterator[Record]:
    """Scored documents of each query, those judged relevant first, each part by descending score."""
    qrels = judgments(config)
    for query, scored in lists:
        if not scored:
            continue
        judged = qrels.get(query, {})
        ranked = sorted(scored, key=lambda item: (judged.get(item[0], 0) < config.relevant_grade, -item[1]))
        names, scores = zip(*ranked, strict=True)
        positives = sum(judged.get(name, 0) >= config.relevant_grade for name in names)
        yield Record(query, None, names, None, scores, positives)
