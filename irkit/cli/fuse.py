"""``irkit fuse``: fuse several runs into one."""

from __future__ import annotations

from typing import Annotated

import typer

from irkit.cli.runs import check_out, write_judged
from irkit.cli.shared_options import Judgments, Measures, RunOut, Split
from irkit.errors import BadValueError


def fuse(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="TREC or .jsonl, also .gz; or - (standard input).")
    ],
    method: Annotated[
        str, typer.Option(help="Fuse ranks by rrf, or scores by minmax, zscore or sum.")
    ] = "rrf",
    weights: Annotated[
        str | None, typer.Option(help="Weights of the runs, such as 1,0.5; default: 1 each.")
    ] = None,
    k: Annotated[int, typer.Option(min=1, help="Maximum number of results per query.")] = 1000,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Number of results that count in each run; default: all.")
    ] = None,
    rrf_k: Annotated[
        float, typer.Option(help="Constant k of rrf; a higher k gives the first ranks less weight.")
    ] = 60,
    out: RunOut = None,
    qrels: Judgments = None,
    measures: Measures = "nDCG@10",
    split: Split = None,
) -> None:
    """Fuse runs of the same queries into one.

    The result goes to standard output unless --out or --qrels is given.
    """
    if runs.count("-") > 1:
        raise BadValueError("two of the runs would be read from standard input")
    if split is not None and qrels is None:
        raise BadValueError(f"--split {split}: there are no --qrels")
    check_out(out, qrels)
    from irkit.data import read_qrels
    from irkit.evaluation.fusion import fuse as fuse_runs

    judgments = None if qrels is None else read_qrels(qrels, split)
    numbers = None if weights is None else [_number(word) for word in weights.split(",")]
    run = fuse_runs(runs, method, k, weights=numbers, depth=depth, rrf_k=rrf_k)  # type: ignore[arg-type]
    write_judged(run, out, judgments, measures)


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError as error:
        raise BadValueError(f"--weights: got {word!r}, expected numbers such as 1,0.5") from error
