"""``irkit mine`` and ``irkit label``, which write training files and can resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from irkit.cli.options import Count, Directory, Settings, check_engine
from irkit.cli.output import hint_resume, note
from irkit.cli.runs import check_out
from irkit.errors import BadValueError, StorageError
from irkit.utils.progress import progress_bar

if TYPE_CHECKING:
    from irkit.data import Qrels, Query
    from irkit.training.training_data import TrainingRow

MaxLength = Annotated[int | None, typer.Option(min=8)]
Margin = Annotated[float | None, typer.Option(min=0)]


def _check_target(out: Path, overwrite: bool) -> None:
    """Check ``--out`` before the work.

    Raises:
        StorageError: Its directory does not exist, or the file exists.
        BadValueError: It is not a .jsonl file.
    """
    if out.suffix != ".jsonl":
        raise BadValueError(f"--out {out}: expected the extension .jsonl")
    check_out(str(out), None)
    if out.exists() and not overwrite:
        raise StorageError(f"--out {out}: it exists; choose another file or give --overwrite")


def _file_states(source: str | Path | None) -> list[Any]:
    """Return ``[path, [[name, size, modification time in ns], ...]]`` of a file or the files in a directory.

    A source that is not a path on this disk, such as None, gives ``[source]`` as text.
    """
    if source is None or not (path := Path(str(source).removeprefix("cross-encoder:"))).exists():
        return [str(source)]
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    states = [[str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return [str(path.resolve()), states]


def _write_rows(
    action: str, out: Path, rows: Callable[[int], Iterator[TrainingRow]], total: int, key: Any
) -> str:
    """Write rows with a progress bar, see `irkit.training.resumable`; return a summary in words."""
    from irkit.training.resumable import write_resumable

    start = time.monotonic()
    with progress_bar(action, "queries", total) as update:

        def count_rows(skip: int) -> Iterator[TrainingRow]:
            update(skip)
            for row in rows(skip):
                update(1)
                yield row

        with hint_resume():
            count, before = write_resumable(out, count_rows, key)
    resumed = f" ({before:,} of them before)" if before else ""
    return f"{count:,} queries{resumed} in {time.monotonic() - start:,.1f} s into {out}"


def mine(
    directory: Directory,
    queries: str,
    *,
    out: Path,
    qrels: str | None = None,
    split: str = "train",
    id_column: str | None = None,
    text_column: list[str] | None = None,
    negatives: Count = 7,
    ranks: Annotated[str, typer.Option("--range", metavar="FROM-TO")] = "0-100",
    sampling: str = "top",
    absolute_margin: Margin = None,
    relative_margin: Margin = None,
    override: Settings = None,
    teacher: str | None = None,
    max_length: MaxLength = None,
    activation: str = "none",
    dtype: str = "float32",
    device: str | None = None,
    engine: str | None = None,
    overwrite: bool = False,
) -> None:
    """Mine hard negatives for queries with judgments.

    Writes one JSON object per query and line, with its relevant documents and then its negatives, for
    irkit train. After an interruption, the same command resumes.

    Args:
        queries: Training queries: BEIR folder, .jsonl, .tsv, ...
        out: Training file to write, .jsonl.
        qrels: Judgments, a file or a BEIR folder; default: the folder QUERIES.
        split: Split of a BEIR folder.
        negatives: Maximum number of negatives per query.
        ranks: Take negatives from these ranks; 10-100 skips the best 10.
        sampling: Take the best documents of the range (top) or random ones (random).
        absolute_margin: Minimum distance to the score of the worst relevant document.
        relative_margin: The same margin as a share of that score, such as 0.05.
        override: Set max_score, min_score, relevant_grade or seed. May be repeated.
        teacher: Model, index or cross-encoder:NAME; its scores are stored.
        overwrite: Replace an existing file, once the new one is complete.

    Examples:
        irkit mine words-index scifact --negatives 7 --teacher cross-encoder:NAME --out train.jsonl
    """
    _check_target(out, overwrite)
    low, dash, high = ranks.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal()):
        raise BadValueError(f"--range {ranks}: expected two ranks such as 10-100")
    address = check_engine(engine, "irkit mine")
    from irkit.config import with_overrides
    from irkit.retrieval.retriever import Retriever
    from irkit.training.negatives import MiningConfig
    from irkit.training.negatives import mine as mine_negatives
    from irkit.training.teachers import load_teacher

    # settings, queries and judgments are checked before a model is loaded
    settings: dict[str, Any] = {
        "num_negatives": negatives,
        "range_min": int(low),
        "range_max": int(high),
        "sampling_strategy": sampling,
        "absolute_margin": absolute_margin,
        "relative_margin": relative_margin,
    }
    config = MiningConfig.parse(with_overrides(settings, override or ()), "irkit mine")
    columns: dict[str, Any] = {"id": id_column, "text": text_column or None}
    items, judgments = _read(queries, qrels, split, config.relevant_grade, columns)
    options: dict[str, Any] = {"device": device, "dtype": dtype, "max_length": max_length}
    options["activation"] = activation
    n_short = 0  # queries with fewer negatives than asked for

    # search, and write the rows; the key says what a killed call may resume
    with Retriever.load(directory, device=device) as retriever:
        scorer = load_teacher(teacher, **options) if teacher else None

        def rows(skip: int) -> Iterator[TrainingRow]:
            nonlocal n_short
            mined = mine_negatives(retriever, items, judgments, config, teacher=scorer, start=skip)
            if engine:
                from irkit.ray_engine.ray_start import start_ray
                from irkit.training.ray_work import mine_on_ray

                mined = mine_on_ray(
                    start_ray(address),
                    directory,
                    items,
                    judgments,
                    config,
                    teacher=teacher,
                    options=options,
                    start=skip,
                )
            for row in mined:
                n_short += len(row) - row.positives < negatives
                yield row

        states = [_file_states(directory), _file_states(teacher)]
        key = [config.model_dump(), *states, options, repr(items), judgments]
        summary = _write_rows("mining", out, rows, len(items), key)
    note(f"mined negatives for {summary}")
    if n_short:
        note(
            f"{n_short:,} queries have fewer than {negatives} negatives; a wider --range or a smaller margin "
            "gives more"
        )


def _read(
    queries: str, qrels: str | None, split: str, grade: int, columns: dict[str, Any]
) -> tuple[list[Query], Qrels]:
    """Read the queries that have a relevant document, and their judgments."""
    from irkit.data import check_documents, is_folder, read_qrels, read_queries

    if qrels is None and not is_folder(queries):
        raise BadValueError(f"irkit mine: {queries} is no BEIR folder; give its judgments as --qrels")
    source = qrels or queries
    judged = read_qrels(source, split if is_folder(source) else None)
    judged = {query_id: grades for query_id, grades in judged.items() if max(grades.values()) >= grade}
    items = [query for query in read_queries(queries, **columns) if query.id in judged]
    check_documents(items)
    if not items:
        raise BadValueError(
            f"irkit mine: {source} has no document judged {grade} or more for a query of {queries}; are "
            "these the queries it judges?"
        )
    if len(items) < len(judged):
        n_missing = len(judged) - len(items)
        note(f"{n_missing:,} queries with relevant documents are not in {queries} and left out")
    return items, judged


def label(
    train: str,
    *,
    teacher: str,
    out: Path,
    queries: str | None = None,
    corpus: str | None = None,
    split: str | None = None,
    override: Settings = None,
    normalization: str = "none",
    max_length: MaxLength = None,
    activation: str = "none",
    dtype: str = "float32",
    device: str | None = None,
    engine: str | None = None,
    overwrite: bool = False,
) -> None:
    """Add scores of a teacher to examples.

    The new scores replace existing ones. After an interruption, the same command resumes.

    Args:
        train: Examples in any format that irkit train reads.
        teacher: Model, index or cross-encoder:NAME.
        out: Training file to write, .jsonl.
        queries: Source of the queries that TRAIN names by id; default: CORPUS or TRAIN, if it is a folder.
        corpus: Source of the documents that TRAIN names by id.
        split: Split of a BEIR folder.
        override: Set a key of the data, such as corpus_columns.text=body. May be repeated.
        normalization: Normalize the scores of each query: none, minmax or zscore.
        overwrite: Replace an existing file, once the new one is complete.

    Examples:
        irkit label run.trec --corpus scifact --split train --teacher vectors-index --out train.jsonl
    """
    _check_target(out, overwrite)
    address = check_engine(engine, "irkit label", train)
    from irkit.config import with_overrides
    from irkit.data import is_folder
    from irkit.retrieval.scorer import IndexScorer
    from irkit.training.labels import label as label_rows
    from irkit.training.labels import resolve
    from irkit.training.losses.loss import Normalization
    from irkit.training.teachers import load_teacher
    from irkit.training.training_data import DataConfig, read_training_rows
    from irkit.training.training_data.text_store import TextStore

    # options, the teacher, and the texts of ids
    if normalization not in get_args(Normalization):
        raise BadValueError(f"--normalization {normalization}: expected {', '.join(get_args(Normalization))}")
    settings = {"source": train, "queries": queries, "corpus": corpus, "split": split}
    config = DataConfig.parse(with_overrides(settings, override or ()), "irkit label")
    options: dict[str, Any] = {"device": device, "dtype": dtype, "max_length": max_length}
    options["activation"] = activation
    scorer = load_teacher(teacher, **options)
    folder = next((name for name in (config.corpus, train) if name and is_folder(name)), None)
    query_source = config.queries or folder
    corpus_source = None if isinstance(scorer, IndexScorer) else config.corpus or folder
    query_texts = TextStore(query_source, "queries", config.query_columns) if query_source else None
    corpus_texts = TextStore(corpus_source, columns=config.corpus_columns) if corpus_source else None

    # look every text up, and then score
    with progress_bar("checking", "queries") as update:
        total = 0
        for row in read_training_rows(config):
            resolve(row, scorer, query_texts, corpus_texts)  # a missing text is an error now, not after hours
            total += 1
            update(1)

    def rows(skip: int) -> Iterator[TrainingRow]:
        if engine:
            from irkit.ray_engine.ray_start import start_ray
            from irkit.training.ray_work import label_on_ray

            return label_on_ray(
                start_ray(address),
                config,
                teacher,
                queries=query_source,
                corpus=corpus_source,
                options=options,
                normalization=cast(Normalization, normalization),
                start=skip,
            )
        remaining = islice(read_training_rows(config), skip, None)
        return label_rows(
            remaining,
            scorer,
            queries=query_texts,
            corpus=corpus_texts,
            normalization=cast(Normalization, normalization),
        )

    states = map(_file_states, (train, teacher, config.queries, config.corpus))
    key = [*states, config.model_dump(), options, normalization]
    summary = _write_rows("labelling", out, rows, total, key)
    note(f"labelled the documents of {summary}")
