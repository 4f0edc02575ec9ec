"""``irkit evaluate``: measure runs, and test the differences between them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from irkit.cli.output import show_table
from irkit.cli.shared_options import IgnoreIdenticalIds, Measures, Split
from irkit.errors import BadValueError
from irkit.utils.progress import progress_bar


def evaluate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="TREC or .jsonl, also .gz.")],
    qrels: Annotated[str, typer.Option(help="Judgments: TREC or BEIR file, BEIR folder, ir_datasets:ID.")],
    measures: Measures = "nDCG@10",
    split: Split = None,
    baseline: Annotated[Path | None, typer.Option(help="Run to test the others against.")] = None,
    test: Annotated[
        Literal["ttest"], typer.Option(help="Significance test: paired and two-sided, over the queries.")
    ] = "ttest",
    correction: Annotated[
        Literal["holm", "bonferroni", "none"], typer.Option(help="Correction of p for testing several runs.")
    ] = "holm",
    per_query: Annotated[bool, typer.Option("--per-query", help="Show each query, too.")] = False,
    ignore_identical_ids: IgnoreIdenticalIds = False,
) -> None:
    """Score runs, and test them against a baseline.

    A judged query that a run lacks counts as 0.
    """
    if baseline is not None and set(runs) <= {baseline}:
        raise BadValueError("irkit evaluate: no run but the baseline; give one to compare it with")
    from irkit.data import read_qrels
    from irkit.evaluation.measures import evaluate as score
    from irkit.evaluation.significance import compare

    judgments = read_qrels(qrels, split)
    results = {}
    paths = dict.fromkeys([*([baseline] if baseline else []), *runs])
    with progress_bar("evaluating", "runs", len(paths)) as update:
        for path in paths:
            results[str(path)] = score(path, judgments, measures, drop_identical_ids=ignore_identical_ids)
            update(1)
    names = list(next(iter(results.values())).mean)
    rows: list[list[object]]
    if per_query:
        rows = [
            [run, query, *(result.per_query[name].get(query, "") for name in names)]
            for run, result in results.items()
            for query in result.per_query[names[0]]
        ]
        rows += [[run, "all", *result.mean.values()] for run, result in results.items()]
        show_table(["run", "query", *names], rows)
    else:
        show_table(["run", *names], [[run, *result.mean.values()] for run, result in results.items()])
    if baseline is not None:
        base = results.pop(str(baseline))
        rows = [
            [*row[:-1], "yes" if row.significant else "no"]
            for row in compare(base, results, correction=None if correction == "none" else correction)
        ]
        typer.echo()
        header = ["run", "measure", "value", "difference", "p", f"p ({correction})", "significant"]
        show_table(header, rows)
