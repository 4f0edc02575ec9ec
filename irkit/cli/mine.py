"""``irkit mine``: mine hard negatives for the queries of a training set from any index."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irkit.cli.output import note
from irkit.cli.shared_options import (
    Activation,
    Device,
    IndexDir,
    MaxLength,
    OverwriteFile,
    TeacherDtype,
    TrainingFile,
    set_option,
)
from irkit.cli.training_files import check_target, file_states, write_rows
from irkit.errors import BadValueError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from irkit.data import Qrels, Query
    from irkit.training.training_data import TrainingRow


def mine(
    directory: IndexDir,
    queries: Annotated[
        str, typer.Argument(metavar="QUERIES", help="Training queries: BEIR folder, .jsonl, .tsv, ...")
    ],
    out: TrainingFile,
    qrels: Annotated[
        str | None, typer.Option(help="Judgments, a file or a BEIR folder; default: the folder QUERIES.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a BEIR folder.")] = "train",
    negatives: Annotated[int, typer.Option(min=1, help="Maximum number of negatives per query.")] = 7,
    ranks: Annotated[
        str,
        typer.Option(
            "--range", metavar="FROM-TO", help="Take negatives from these ranks; 10-100 skips the best 10."
        ),
    ] = "0-100",
    sampling: Annotated[
        str, typer.Option(help="Take the best documents of the range (top) or random ones (random).")
    ] = "top",
    absolute_margin: Annotated[
        float | None,
        typer.Option(min=0, help="Minimum distance to the score of the worst relevant document."),
    ] = None,
    relative_margin: Annotated[
        float | None, typer.Option(min=0, help="The same margin as a share of that score, such as 0.05.")
    ] = None,
    override: Annotated[
        list[str] | None, set_option("Set max_score, min_score, relevant_grade or seed.")
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="Model, index or cross-encoder:NAME; its scores are stored.")
    ] = None,
    max_length: MaxLength = None,
    activation: Activation = "none",
    dtype: TeacherDtype = "float32",
    device: Device = None,
    overwrite: OverwriteFile = False,
) -> None:
    """Mine hard negatives for queries with judgments.

    Writes one JSON object per query and line, with its relevant documents and then its negatives, for
    irkit train. After an interruption, the same command resumes.
    """
    check_target(out, overwrite)
    low, dash, high = ranks.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal()):
        raise BadValueError(f"--range {ranks}: expected two ranks such as 10-100")
    from irkit.config import with_overrides
    from irkit.retrieval.retriever import Retriever
    from irkit.training.negatives import MiningConfig
    from irkit.training.negatives import mine as mine_negatives
    from irkit.training.teachers import load_teacher

    settings: dict[str, Any] = {
        "num_negatives": negatives,
        "range_min": int(low),
        "range_max": int(high),
        "sampling_strategy": sampling,
        "absolute_margin": absolute_margin,
        "relative_margin": relative_margin,
    }
    config = MiningConfig.parse(with_overrides(settings, override or ()), "irkit mine")
    items, judgments = _read(queries, qrels, split, config.relevant_grade)
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    options |= {"max_length": max_length, "activation": activation}
    n_short = 0  # queries with fewer negatives than asked for

    with Retriever.load(directory, device=device) as retriever:
        scorer = load_teacher(teacher, **options) if teacher else None

        def rows(skip: int) -> Iterator[TrainingRow]:
            nonlocal n_short
            for row in mine_negatives(retriever, items, judgments, config, teacher=scorer, start=skip):
                n_short += len(row) - row.positives < negatives
                yield row

        states = [file_states(directory), file_states(teacher)]
        key = [config.model_dump(), *states, options, repr(items), judgments]
        summary = write_rows("mining", out, rows, len(items), key)
    note(f"mined negatives for {summary}")
    if n_short:
        note(
            f"{n_short:,} queries have fewer than {negatives} negatives; a wider --range or a smaller margin "
            "gives more"
        )


def _read(queries: str, qrels: str | None, split: str, grade: int) -> tuple[list[Query], Qrels]:
    """Read the queries that have a relevant document, and their judgments."""
    from irkit.data import check_documents, read_qrels, read_queries

    if qrels is None and not Path(queries).is_dir():
        raise BadValueError(f"irkit mine: {queries} is no BEIR folder; give its judgments as --qrels")
    source = qrels or queries
    judged = read_qrels(source, split if Path(source).is_dir() else None)
    judged = {query_id: grades for query_id, grades in judged.items() if max(grades.values()) >= grade}
    items = [query for query in read_queries(queries) if query.id in judged]
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
