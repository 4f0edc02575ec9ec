"""``irkit rerank``, ``fuse`` and ``evaluate``, and the steps of all verbs that make or measure runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from irkit.cli.options import Count, Directory, Offset, OptionalCount, drop_missing
from irkit.cli.output import note, show_table
from irkit.errors import BadValueError, StorageError
from irkit.utils.progress import progress_bar
from irkit.utils.uris import is_uri

if TYPE_CHECKING:
    from irkit.data import Qrels, Query
    from irkit.evaluation.run import Run


def check_out(out: str | None, qrels: str | None) -> None:
    """Refuse an ``--out`` that cannot be written, before the work.

    Raises:
        StorageError: Its directory does not exist or is not writable, or it is a directory itself.
        BadValueError: The run and the measures would both go to standard output.
    """
    if out == "-" and qrels is not None:
        raise BadValueError("--out - and --qrels would both write to standard output; give --out FILE")
    if out is None or out == "-":
        return
    folder = Path(out).resolve().parent
    if not folder.is_dir():
        raise StorageError(f"--out {out}: there is no such directory")
    if Path(out).exists() and not Path(out).is_file():
        kind = "directory" if Path(out).is_dir() else "device"
        raise StorageError(f"--out {out}: it is a {kind}; name a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"--out {out}: its directory is not writable")


def read_judged(
    queries: str,
    qrels: str | None,
    split: str | None,
    measures: str,
    id_column: str | None = None,
    text_column: list[str] | None = None,
    k: int | None = None,
) -> tuple[list[Query], Qrels | None]:
    """Read queries, and their judgments if ``qrels`` names any; arguments are options of the same names.

    Warn if a measure looks at more documents per query than ``k``.

    Raises:
        BadValueError: There is a split, but no folder with splits; or a measure is unknown.
    """
    from irkit.data import check_documents, is_folder, read_qrels, read_queries
    from irkit.data.catalogues import is_catalogued

    folders = [name for name in (queries, qrels) if name is not None and is_folder(name)]
    if split is not None and not folders:
        if not is_catalogued(queries):
            read_queries(queries)  # raises if the file does not exist
        raise BadValueError(f"--split {split}: neither QUERIES nor --qrels is a BEIR folder")
    of_folder = split if queries in folders else None
    items = list(read_queries(queries, of_folder, id=id_column, text=text_column or None))
    check_documents(items)  # no id may come twice
    if not items:
        note(f"warning: {queries} holds no queries")
    if qrels is None:
        return items, None
    from irkit.evaluation.measures import cutoffs, evaluate

    evaluate({"q": {"d": 1.0}}, {"q": {"d": 1}}, measures)  # a misspelt measure is an error before the work
    for name, cutoff in cutoffs(measures).items():
        if k is not None and cutoff > k:
            note(f"warning: {name} looks at {cutoff} documents per query, but --k is {k}")
    return items, read_qrels(qrels, split if qrels in folders else None)


def write_judged(run: Run, out: str | None, judgments: Qrels | None, measures: str) -> None:
    """Write a run to the file ``out``, and print its measures if there are judgments.

    A run without file and judgments goes to standard output.
    """
    if out is not None or judgments is None:
        run.write(out or "-")
    if judgments is not None:
        from irkit.evaluation.measures import evaluate

        show_table(["measure", "value"], evaluate(run, judgments, measures).mean.items())


def rerank(
    directory: Directory,
    queries: str,
    run: str,
    *,
    k: OptionalCount = None,
    out: str | None = None,
    qrels: str | None = None,
    measures: str = "nDCG@10",
    split: str | None = None,
    id_column: str | None = None,
    text_column: list[str] | None = None,
    offset: Offset = 0,
    threshold: float | None = None,
    group_by: str | None = None,
    per_group: OptionalCount = None,
    interaction: Path | None = None,
    teacher: str | None = None,
    model: str | None = None,
    device: str | None = None,
) -> None:
    """Rank the documents of a run by exact scores of a model.

    The model and the documents come from an index; with --teacher, another model scores their texts. The
    result goes to standard output unless --out or --qrels is given.

    Args:
        queries: Queries of the run: BEIR folder, .jsonl, .tsv, ... or -.
        run: TREC or .jsonl, also .gz, or -.
        k: Results per query; default: all.
        interaction: Score by the attention stored in a model directory.
        teacher: Score by cross-encoder:NAME, or by another model or index.

    Examples:
        irkit rerank tokens-index examples/notes run.trec --k 100 --out reranked.trec
    """
    if queries == run == "-":
        raise BadValueError("QUERIES and RUN would both be read from standard input")
    check_out(out, qrels)
    from irkit.evaluation.run import Run, check_trec_words, is_jsonl
    from irkit.retrieval.retriever import Retriever
    from irkit.retrieval.selection import RankOptions, parse_selection
    from irkit.training.interaction import load_interaction
    from irkit.training.teachers import load_teacher

    options = drop_missing(offset=offset, threshold=threshold, group_by=group_by, per_group=per_group)
    parse_selection("rerank", k or 1, cast(RankOptions, options), RankOptions)  # before anything is read
    # read queries, judgments and run, and what scores the documents
    items, judgments = read_judged(queries, qrels, split, measures, id_column, text_column, k)
    first = Run.read(run)
    if (out or judgments is None) and not is_jsonl(out or "-"):
        kept = [query.id for query in items if query.id in first]
        check_trec_words(name for query in kept for name in (query, *first.columns(query)[0]))
    attention = None if interaction is None else load_interaction(interaction)
    scorer = None if teacher is None else load_teacher(teacher, device=device)
    # rerank all queries
    with (
        Retriever.load(directory, model, device=device) as retriever,
        progress_bar("reranking", "queries", len(first)) as update,
    ):
        options |= {"interaction": attention, "teacher": scorer, "progress": update}
        result = retriever.rerank(items, first, k, **options)
    write_judged(result, out, judgments, measures)


def fuse(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...")],
    *,
    method: str = "rrf",
    weights: str | None = None,
    k: Count = 1000,
    depth: OptionalCount = None,
    rrf_k: float = 60,
    out: str | None = None,
    qrels: str | None = None,
    measures: str = "nDCG@10",
    split: str | None = None,
) -> None:
    """Fuse runs of the same queries into one.

    The result goes to standard output unless --out or --qrels is given.

    Args:
        runs: TREC or .jsonl, also .gz; or - (standard input).
        method: Fuse ranks by rrf, or scores by minmax, zscore or sum.
        weights: Weights of the runs, such as 1,0.5; default: 1 each.
        k: Maximum number of results per query.
        depth: Number of results that count in each run; default: all.
        rrf_k: Constant k of rrf; a higher k gives the first ranks less weight.

    Examples:
        irkit fuse words.trec vectors.trec --method minmax --weights 0.5,1 --out fused.trec
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


def _plain_path(name: str) -> str:
    """Return one name of a file for all ways to write it, such as ``./a`` for ``a``; a URI as it is."""
    return name if is_uri(name) else str(Path(name))


def evaluate(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...")],
    *,
    qrels: str,
    measures: str = "nDCG@10",
    split: str | None = None,
    baseline: str | None = None,
    test: Literal["ttest"] = "ttest",
    correction: Literal["holm", "bonferroni", "none"] = "holm",
    per_query: bool = False,
    ignore_identical_ids: bool = False,
) -> None:
    """Score runs, and test them against a baseline.

    A judged query that a run lacks counts as 0.

    Args:
        runs: TREC or .jsonl, also .gz.
        qrels: Judgments: TREC or BEIR file, BEIR folder, ir_datasets:ID.
        baseline: Run to test the others against.
        test: Significance test: paired and two-sided, over the queries.
        correction: Correction of p for testing several runs.
        per_query: Show each query, too.

    Examples:
        irkit evaluate new.trec --qrels examples/notes --baseline old.trec
    """
    runs = [_plain_path(run) for run in runs]
    baseline = None if baseline is None else _plain_path(baseline)
    if baseline is not None and set(runs) <= {baseline}:
        raise BadValueError("irkit evaluate: no run but the baseline; give one to compare it with")
    from irkit.data import read_qrels
    from irkit.evaluation.measures import evaluate as score
    from irkit.evaluation.significance import compare

    # measure every run once, the baseline first
    judgments = read_qrels(qrels, split)
    results = {}
    paths = dict.fromkeys([*([baseline] if baseline else []), *runs])
    with progress_bar("evaluating", "runs", len(paths)) as update:
        for path in paths:
            results[path] = score(path, judgments, measures, drop_identical_ids=ignore_identical_ids)
            update(1)
    # show the measures, per query or as means
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
    # test the other runs against the baseline
    if baseline is not None:
        base = results.pop(baseline)
        rows = [
            [*row[:-1], "yes" if row.significant else "no"]
            for row in compare(base, results, correction=None if correction == "none" else correction)
        ]
        typer.echo()
        header = ["run", "measure", "value", "difference", "p", f"p ({correction})", "significant"]
        show_table(header, rows)
