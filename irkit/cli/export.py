"""``irkit export``: write an index for other tools and engines."""

from __future__ import annotations

from typing import Annotated

import typer

from irkit.cli.options import Directory
from irkit.cli.output import note
from irkit.errors import BadValueError
from irkit.utils.progress import progress_bar


def export(
    directory: Directory,
    *,
    to: Annotated[str, typer.Option("--to")],
    out: Annotated[str, typer.Option("--out")],
    model: str | None = None,
) -> None:
    """Export documents, metadata and vectors of an index; or a model, to ONNX.

    Args:
        directory: Directory of an index; for onnx, directory or hub name of a model.
        to: jsonl, parquet, qdrant, qdrant-edge, lancedb, opensearch, elasticsearch or vespa; or onnx.
        out: File or folder to make; for qdrant also http://HOST:PORT/COLLECTION.

    Examples:
        irkit export notes-index --to jsonl --out notes.jsonl
        irkit export notes-index --to qdrant --out http://127.0.0.1:6333/notes
        irkit export MODEL --to onnx --out model-onnx
    """
    if to == "onnx":
        if model is not None:
            raise BadValueError("irkit export --to onnx: got --model; the first argument is the model")
        from irkit.exporting import export_onnx
        from irkit.model import Model

        export_onnx(Model.from_pretrained(str(directory), device="cpu"), out)
        note(f"exported the model to {out}")
        return
    from irkit.exporting import export as write
    from irkit.retrieval.retriever import Retriever

    with Retriever.load(directory, model) as retriever:
        with progress_bar("exporting", "documents", len(retriever)) as update:
            count = write(retriever, to, out, progress=update)
        note(f"exported {count:,} documents to {out}")
