"""The `Target`: what an index is exported to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from irkit.errors import BadValueError
from irkit.exporting.contents import Contents
from irkit.utils.uris import is_uri


@dataclass(frozen=True)
class Target:
    """A format or an engine.

    Attributes:
        write: Writes the contents of an index to a path that does not exist yet. It is published afterwards.
        kinds: Kinds of representation that the target holds.
        several: Whether it holds several representations of a document.
        scores: Whether what it holds is scored by an engine, by inner products.
        is_folder: Whether the export is a folder rather than a file.
        suffix: Extension that a file must have.
        send: Sends the contents of an index to the address of a server; None if only paths are written.
    """

    write: Callable[[Contents, Path], None]
    kinds: tuple[str, ...] = ("dense", "multi_vector", "sparse")
    several: bool = False
    scores: bool = True
    is_folder: bool = False
    suffix: str = ""
    send: Callable[[Contents, str], None] | None = None


def refuse_uri(out: str | Path) -> None:
    """Refuse a URI, which would become a path on this machine.

    Raises:
        BadValueError: It is one.
    """
    if is_uri(str(out)):
        raise BadValueError(
            f"exporting to {out}: expected a path on this machine; copy the export afterwards"
        )
