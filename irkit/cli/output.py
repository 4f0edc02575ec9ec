"""Output of the command line: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO, TypeVar

import typer

from irkit.errors import BadValueError

T = TypeVar("T")

if TYPE_CHECKING:
    from irkit.data import JSON
    from irkit.retrieval.searching import Hit


def keep_streams() -> None:
    """Replace closed standard streams: using stdin or stdout fails, writing to stderr does nothing.

    Otherwise the next file that is opened would get the descriptor of a closed stream, and what libraries
    print would go to that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_WRONLY), number)
            setattr(sys, name, open(number, mode))  # noqa: PTH123, SIM115 (until the process ends)


def note(message: str) -> None:
    """Write one line to stderr; do nothing if stderr cannot be written."""
    try:
        typer.echo(f"irkit: {clean(message)}", err=True)
    except OSError:
        drop_output(sys.stderr)


def drop_output(stream: TextIO) -> None:
    """Discard what a stream could not write. Python would try to write it again at exit, and fail."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def clean(text: object) -> str:
    """Return text as one line without tabs and control characters, for terminals and tab-separated files."""
    return "".join(c if c.isprintable() else " " for c in " ".join(str(text).split()))


def show_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table: aligned on a terminal, tab-separated in a pipe.

    Args:
        header: Names of the columns; empty for no header.
        rows: Values of each row; floats are written with 4 decimals.
    """
    lines = [[f"{value:.4f}" if isinstance(value, float) else clean(value) for value in row] for row in rows]
    if not sys.stdout.isatty():
        for line in [header, *lines] if header else lines:
            typer.echo("\t".join(line))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", show_header=bool(header))
    for name in header or [""] * len(lines[0]):  # long values are folded, not cut
        table.add_column(Text(name), overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    Console().print(table)


DEFAULT_FIELDS = ["title", "text"]
"""What is shown of a document besides rank, score and id."""


def show_hits(hits: Iterable[Hit], fields: Sequence[str], offset: int = 0) -> None:
    """Write ranked documents: a paragraph each on a terminal; in a pipe a line of columns.

    Args:
        hits: The documents.
        fields: Names as in `SearchOptions`, the columns of a pipe after rank, score and id.
        offset: Number of documents ranked before the first one.
    """
    width = shutil.get_terminal_size().columns
    names = [name for name in fields if name != "id"]
    for rank, hit in enumerate(hits, offset + 1):
        title, text = clean(hit.title), clean(_field(hit, "text"))
        values = [clean(_field(hit, name)) for name in names]
        if not sys.stdout.isatty():
            typer.echo("\t".join([str(rank), f"{hit.score:.6g}", clean(hit.id), *values]))
            continue
        first = f"{rank:>3}  {hit.score:7.4f}  {clean(hit.id)}  {title}"
        typer.secho(first if len(first) <= width else first[: width - 3] + "...", bold=True)
        for line in textwrap.wrap(text, max(20, width - 5), max_lines=3, placeholder=" ..."):
            typer.echo("     " + line)
        for name, value in zip(names, values, strict=True):
            if name not in DEFAULT_FIELDS:
                typer.echo(f"     {name}: {value}")


def _field(hit: Hit, name: str) -> str:
    """Return a field of a hit: metadata in JSON, unless it is a string; empty if the document has none.

    The field ``text`` of a document in windows is the text of its best window.
    """
    if name == "text" and hit.passage is not None:
        return hit.text[slice(*hit.passage)]
    if name in DEFAULT_FIELDS:
        return str(getattr(hit, name))
    key = name.partition(".")[2]
    value = hit.metadata.get(key) if key else dict(hit.metadata)
    return "" if value is None else format_value(value)


def format_value(value: JSON) -> str:
    """Write a value of metadata: a string as it is, anything else in JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def require_out(out: T | None, verb: str, kind: str = "model") -> T:
    """Return ``--out``, which the verb needs.

    Raises:
        BadValueError: ``--out`` is missing.
    """
    if out is None:
        raise BadValueError(f"irkit {verb}: no --out; give the directory that the {kind} shall have")
    return out


@contextmanager
def hint_resume(ending: str = " to go on") -> Iterator[None]:
    """After Ctrl-C, tell the user that the same command resumes the work."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"- give the same command again{ending}") from None
