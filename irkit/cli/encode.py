"""``irkit encode``: texts to a file of vectors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irkit.bars import bar
from irkit.cli.options import Devices
from irkit.cli.output import note
from irkit.cli.runs import check_out
from irkit.errors import BadValueError

if TYPE_CHECKING:
    from irkit.vector_files import Parts

__all__ = ["encode"]

_IMPACTS = ("sparse", ".jsonl")  # weights by term, which irkit index impacts reads, and Anserini


class Side(StrEnum):
    """What texts are to the model."""

    query = "query"
    document = "document"


def encode(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory or hub name.")],
    texts: Annotated[
        str, typer.Argument(metavar="TEXTS", help="Documents or queries, as for index and search.")
    ],
    out: Annotated[Path, typer.Option(help="File to write: .npy, .safetensors or .jsonl.")],
    side: Annotated[Side, typer.Option(help="Which prompt the texts get.")] = Side.document,
    dtype: Annotated[
        str | None,
        typer.Option(help="auto (of documents), float32 (of queries, as in a search), bfloat16 or int8."),
    ] = None,
    device: Devices = None,
) -> None:
    """Encode texts into a file.

    .npy holds vectors and .safetensors arrays of any model, in the order of the texts; .jsonl holds an
    object with id and vector a line, of sparse models weights by term. Texts are streamed: any number of
    them fits in memory.
    """
    from irkit.vector_files import SUFFIXES, write_vectors

    if out.suffix not in SUFFIXES:
        raise BadValueError(f"--out {out}: expected the extension {', '.join(SUFFIXES)}")
    check_out(str(out), None)
    from irkit.data import read_documents, read_queries
    from irkit.lexical.config import is_lexical
    from irkit.model import Model

    if is_lexical(model):
        raise BadValueError(
            f"irkit encode: {model} encodes nothing without an index; see irkit index {model}"
        )

    source = read_queries(texts) if side is Side.query else read_documents(texts)
    total = None
    if not source.once:
        with bar("checking", "texts") as update:
            total = 0
            for _ in source:
                total += 1
                update(1)
    dtype = dtype or ("auto" if side is Side.document else "float32")  # as irkit index and irkit search
    encoder = Model.from_pretrained(model, device=device.split(",") if device else None, dtype=dtype)
    if encoder.kind != "dense" and out.suffix != ".safetensors" and (encoder.kind, out.suffix) != _IMPACTS:
        raise BadValueError(
            f"--out {out}: {model} makes {encoder.kind}, not one vector a text; give --out FILE.safetensors"
            + (" or FILE.jsonl" if encoder.kind == _IMPACTS[0] else "")
        )
    with bar("encoding", "texts", total) as update:
        vocabulary = encoder.vocabulary if encoder.kind == "sparse" else None
        count = write_vectors(out, _encoded(encoder, source, side, update), vocabulary)
    note(f"encoded {count:,} texts into {out}")


def _encoded(model: Any, items: Iterable[Any], side: Side, update: Any) -> Parts:
    waiting: deque[str] = deque()

    def texts() -> Iterator[str]:
        for item in items:
            waiting.append(item.id)
            yield item.text if side is Side.query else item.full_text

    for part in model.represent_stream(texts(), side.value, progress=update):
        yield [waiting.popleft() for _ in range(len(part))], part
