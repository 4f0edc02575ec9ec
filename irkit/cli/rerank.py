"""``irkit rerank``: a run in, the same documents by exact scores out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from irkit.bars import bar
from irkit.cli.options import Device, IndexDir, Judgments, Measures, MovedModel, RunOut, Split
from irkit.cli.runs import check_out, read_judged, write_judged
from irkit.errors import BadValueError

__all__ = ["rerank"]


def rerank(
    directory: IndexDir,
    queries: Annotated[
        str, typer.Argument(metavar="QUERIES", help="Those of the run: BEIR folder, .jsonl, .tsv, ..., or -.")
    ],
    run: Annotated[str, typer.Argument(metavar="RUN", help="TREC or .jsonl, also .gz, or -.")],
    k: Annotated[int | None, typer.Option(min=1, help="Results of a query; by default all.")] = None,
    out: RunOut = None,
    qrels: Judgments = None,
    measures: Measures = "nDCG@10",
    split: Split = None,
    interaction: Annotated[
        Path | None, typer.Option(help="Directory of a model trained with attention: score by that.")
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="Score by cross-encoder:NAME, or another model or index.")
    ] = None,
    model: MovedModel = None,
    device: Device = None,
) -> None:
    """Rank the documents of a run by exact scores of a model.

    Model and documents are those of an index, whose texts a cross-encoder may read instead (--teacher). The
    result is written to standard output unless --out or --qrels says otherwise.
    """
    if queries == run == "-":
        raise BadValueError("QUERIES and RUN would both be read from standard input")
    check_out(out, qrels)
    from irkit.retriever import Retriever
    from irkit.run import Run

    items, judgments = read_judged(queries, qrels, split, measures)
    first, compare, judge = Run.read(run), None, None
    if interaction is not None:
        from irkit.training.interaction import load_interaction

        compare = load_interaction(interaction)
    if teacher is not None:
        from irkit.training.teachers import load_teacher

        judge = load_teacher(teacher, device=device)
    with (
        Retriever.load(directory, model, device=device) as retriever,
        bar("reranking", "queries", len(first)) as update,
    ):
        result = retriever.rerank(items, first, k, interaction=compare, teacher=judge, progress=update)
    write_judged(result, out, judgments, measures)
