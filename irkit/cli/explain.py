"""``irkit explain``: why a document has its score."""

from __future__ import annotations

import sys
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from irkit.cli.options import Device, IndexDir, MovedModel
from irkit.cli.output import note, show_table
from irkit.errors import StorageError

__all__ = ["explain"]


def explain(
    directory: IndexDir,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="A text.")],
    document: Annotated[str, typer.Argument(metavar="DOCID", help="Id of a document of the index.")],
    html: Annotated[Path | None, typer.Option(help="Page to write.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show tokens, not whole words.")] = False,
    model: MovedModel = None,
    device: Device = None,
) -> None:
    """Show what the score of a document is made of.

    That is what each word of the query matched in the document, and the score of each match, by an index of
    a multi-vector model, of a sparse one or of bm25.
    """
    if html is not None and not html.resolve().parent.is_dir():
        raise StorageError(f"--html {html}: there is no such directory")
    from irkit.retriever import Retriever

    with Retriever.load(directory, model, device=device) as retriever:
        explanation = retriever.explain(query, document)
    if not tokens:
        explanation = explanation.words()
    if html is not None:
        explanation.write_html(html)
        note(f"wrote {html}")
    elif not explanation.matches:
        empty = explanation.score == -inf  # of token vectors: there is nothing to compare with
        reason = "the document has no tokens" if empty else "query and document share no term"
        note(f"nothing matched: {reason}")
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(explanation)
    else:
        header, matches = ["query", "document", "score"], explanation.matches
        if any(match.weights for match in matches):
            header += ["query weight", "document weight"]  # no single ones for tokens that make up a word
        nothing = [""] * (len(header) - 3)
        show_table(
            header,
            [
                (each.query.token, each.document.token, each.score, *(each.weights or nothing))
                for each in matches
            ],
        )
