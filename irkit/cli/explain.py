"""``irkit explain``: show what the score of a document is made of."""

from __future__ import annotations

import sys
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from irkit.cli.output import note, show_table
from irkit.cli.shared_options import Device, IndexDir, MovedModel
from irkit.errors import StorageError


def explain(
    directory: IndexDir,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Text of the query.")],
    document: Annotated[str, typer.Argument(metavar="DOCID", help="Id of a document of the index.")],
    html: Annotated[Path | None, typer.Option(help="Write a page (HTML).")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show tokens instead of words.")] = False,
    model: MovedModel = None,
    device: Device = None,
) -> None:
    """Show what the score of a document is made of.

    Prints which words of the document each word of the query matched, and the score of each match. The index
    must be one of a multi-vector model, a sparse model or bm25.
    """
    if html is not None and not html.resolve().parent.is_dir():
        raise StorageError(f"--html {html}: there is no such directory")
    from irkit.retrieval.retriever import Retriever

    with Retriever.load(directory, model, device=device) as retriever:
        explanation = retriever.explain(query, document)
    if not tokens:
        explanation = explanation.words()
    if html is not None:
        explanation.write_html(html)
        note(f"wrote {html}")
    elif not explanation.matches:
        empty = explanation.score == -inf  # the score of a document without token vectors
        reason = "the document has no tokens" if empty else "query and document share no term"
        note(f"nothing matched: {reason}")
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(explanation)
    else:
        header, matches = ["query", "document", "score"], explanation.matches
        if any(match.weights for match in matches):
            header += ["query weight", "document weight"]  # a match of words has none
        blank = [""] * (len(header) - 3)
        show_table(
            header, [(m.query.token, m.document.token, m.score, *(m.weights or blank)) for m in matches]
        )
