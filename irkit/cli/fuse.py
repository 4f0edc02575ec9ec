"""``irkit fuse``: several runs in, one out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from irkit.cli.options import Judgments, Measures, RunOut, Split
from irkit.cli.runs import check_out, write_judged
from irkit.errors import BadValueError

if TYPE_CHECKING:
    from irkit.fusion import Method

__all__ = ["fuse"]


def fuse(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="TREC or .jsonl, also .gz, or -.")],
    method: Annotated[
        str, typer.Option(help="By ranks: rrf. By scores: minmax, zscore, or sum of them as they are.")
    ] = "rrf",
    weights: Annotated[str | None, typer.Option(help="Of each run, as in 1,0.5; by default 1.")] = None,
    k: Annotated[int, typer.Option(min=1, help="Results of a query.")] = 1000,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Results of each run that count; by default all.")
    ] = None,
    rrf_k: Annotated[float, typer.Option(help="Of rrf: the higher, the less first ranks stand out.")] = 60,
    out: RunOut = None,
    qrels: Judgments = None,
    measures: Measures = "nDCG@10",
    split: Split = None,
) -> None:
    """Fuse runs of the same queries into one.

    It is written to standard output unless --out or --qrels says otherwise.
    """
    if runs.count("-") > 1:
        raise BadValueError("two of the runs would be read from standard input")
    if split is not None and qrels is None:
        raise BadValueError(f"--split {split}: there are no --qrels")
    check_out(out, qrels)
    from irkit.data import read_qrels
    from irkit.fusion import fuse as fused

    judgments = None if qrels is None else read_qrels(qrels, split)
    shares = None if weights is None else [_number(word) for word in weights.split(",")]
    run = fused(runs, cast("Method", method), k, weights=shares, depth=depth, rrf_k=rrf_k)
    write_judged(run, out, judgments, measures)


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError as error:
        raise BadValueError(f"--weights: got {word!r}, expected numbers such as 1,0.5") from error
