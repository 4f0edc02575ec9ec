"""``irkit explain``: show what the score of a document is made of."""

from __future__ import annotations

import sys
from math import inf
from pathlib import Path

from irkit.cli.options import Device, IndexDir, MovedModel
from irkit.cli.output import note, show_table
from irkit.errors import StorageError


def explain(
    directory: IndexDir,
    query: str,
    docid: str,
    *,
    html: Path | None = None,
    tokens: bool = False,
    model: MovedModel = None,
    device: Device = None,
) -> None:
    """Show what the score of a document is made of.

    Prints which words of the document each word of the query matched, and the score of each match. The index
    must be one of a multi-vector model, a sparse model or bm25.

    Args:
        query: Text of the query.
        docid: Id of a document of the index.
        html: Write a page (HTML).
        tokens: Show tokens instead of words.

    Examples:
        irkit explain tokens-index "which animals hibernate" bears --html bears.html
    """
    if html is not None and not html.resolve().parent.is_dir():
        raise StorageError(f"--html {html}: there is no such directory")
    from irkit.retrieval.retriever import Retriever

    with Retriever.load(directory, model, device=device) as retriever:
        explanation = retriever.explain(query, docid)
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
