"""``irkit rerank``: rank the documents of a run by exact scores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from irkit.cli.runs import check_out, read_judged, write_judged
from irkit.cli.shared_options import Device, IndexDir, Judgments, Measures, MovedModel, RunOut, Split
from irkit.errors import BadValueError
from irkit.utils.progress import progress_bar


def rerank(
    directory: IndexDir,
    queries: Annotated[
        str,
        typer.Argument(metavar="QUERIES", help="Queries of the run: BEIR folder, .jsonl, .tsv, ... or -."),
    ],
    run: Annotated[str, typer.Argument(metavar="RUN", help="TREC or .jsonl, also .gz, or -.")],
    k: Annotated[int | None, typer.Option(min=1, help="Results per query; default: all.")] = None,
    out: RunOut = None,
    qrels: Judgments = None,
    measures: Measures = "nDCG@10",
    split: Split = None,
    interaction: Annotated[
        Path | None, typer.Option(help="Score by the attention that the model in this directory learned.")
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="Score by cross-encoder:NAME, or by another model or index.")
    ] = None,
    model: MovedModel = None,
    device: Device = None,
) -> None:
    """Rank the documents of a run by exact scores of a model.

    The model and the documents come from an index; with --teacher, another model scores their texts. The
    result goes to standard output unless --out or --qrels is given.
    """
    if queries == run == "-":
        raise BadValueError("QUERIES and RUN would both be read from standard input")
    check_out(out, qrels)
    from irkit.evaluation.run import Run
    from irkit.retrieval.retriever import Retriever
    from irkit.training.interaction import load_interaction
    from irkit.training.teachers import load_teacher

    items, judgments = read_judged(queries, qrels, split, measures)
    first = Run.read(run)
    attention = None if interaction is None else load_interaction(interaction)
    scorer = None if teacher is None else load_teacher(teacher, device=device)
    with (
        Retriever.load(directory, model, device=device) as retriever,
        progress_bar("reranking", "queries", len(first)) as update,
    ):
        result = retriever.rerank(items, first, k, interaction=attention, teacher=scorer, progress=update)
    write_judged(result, out, judgments, measures)
