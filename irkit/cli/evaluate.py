"""``irkit evaluate``: measures of runs, and tests between them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from irkit.bars import bar
from irkit.cli.options import IgnoreIdenticalIds, Measures, Split
from irkit.cli.output import show_table
from irkit.errors import BadValueError

__all__ = ["evaluate"]


class Test(StrEnum):
    """Significance tests."""

    ttest = "ttest"


class Correction(StrEnum):
    """Corrections for testing several runs."""

    holm = "holm"
    bonferroni = "bonferroni"
    none = "none"


def evaluate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="TREC or .jsonl, also .gz.")],
    qrels: Annotated[str, typer.Option(help="Judgments: TREC or BEIR file, BEIR folder, ir_datasets:ID.")],
    measures: Measures = "nDCG@10",
    split: Split = None,
    baseline: Annotated[Path | None, typer.Option(help="Run that the others are tested against.")] = None,
    test: Annotated[Test, typer.Option(help="Paired, two-sided, over the queries.")] = Test.ttest,
    correction: Annotated[Correction, typer.Option(help="For testing several runs.")] = Correction.holm,
    per_query: Annotated[bool, typer.Option("--per-query", help="Show every query, too.")] = False,
    ignore_identical_ids: IgnoreIdenticalIds = False,
) -> None:
    """Score runs, and test them against a baseline.

    Judged queries that a run lacks count as 0.
    """
    if baseline is not None and set(runs) <= {baseline}:
        raise BadValueError("irkit evaluate: no run but the baseline; give one to compare it with")
    from irkit.data import read_qrels
    from irkit.evaluation import compare
    from irkit.evaluation import evaluate as score

    judgments = read_qrels(qrels, split)
    results = {}
    paths = dict.fromkeys([*([baseline] if baseline else []), *runs])
    with bar("evaluating", "runs", len(paths)) as update:
        for path in paths:
            results[str(path)] = score(path, judgments, measures, drop_identical_ids=ignore_identical_ids)
            update(1)
    names = list(next(iter(results.values())).mean)
    if per_query:
        rows = [
            [run, query, *(result.per_query[name].get(query, "") for name in names)]
            for run, result in results.items()
            for query in result.per_query[names[0]]
        ]
        show_table(
            ["run", "query", *names],
            rows + [[run, "all", *result.mean.values()] for run, result in results.items()],
        )
    else:
        show_table(["run", *names], [[run, *result.mean.values()] for run, result in results.items()])
    if baseline is not None:
        family: Literal["holm", "bonferroni"] | None = None
        if correction is not Correction.none:
            family = "holm" if correction is Correction.holm else "bonferroni"
        base = results.pop(str(baseline))
        typer.echo()
        show_table(
            ["run", "measure", "value", "difference", "p", f"p ({correction.value})", "significant"],
            [
                [*row[:-1], "yes" if row.significant else "no"]
                for row in compare(base, results, correction=family)
            ],
        )
