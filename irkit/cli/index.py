"""``irkit index``: encode a collection and index it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from irkit.bars import bar, stage_bar
from irkit.cli.options import Devices
from irkit.cli.output import note
from irkit.errors import BadValueError, StorageError
from irkit.files import write_text

if TYPE_CHECKING:
    from irkit.data import Document, Source

__all__ = ["index"]


def index(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Directory or hub name of a model; or bm25, impacts, vectors."),
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Argument(
            metavar="CORPUS",
            help="BEIR folder, .jsonl, .tsv, .txt, <DOC>, also .gz; - (standard input), "
            "ir_datasets:ID, hf:NAME; of vectors .jsonl, .npy or .safetensors.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the index.")] = None,
    choice: Annotated[
        str | None,
        typer.Option(
            "--index",
            help="auto, flat, inverted, hnsw, ivf, pq, ivfpqfs, plaid, muvera, a factory string of FAISS, "
            "or a recipe (.yaml). Default: inverted for sparse models and bm25, else flat.",
        ),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A key of the index, of bm25 or of the recipe, such as ef_search=128.",
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto (default), float32, bfloat16 or int8.")] = None,
    device: Devices = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace the index that is there, once the new one is complete."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, build nothing.")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the whole recipe.")] = False,
) -> None:
    """Encode a collection and index it.

    A build that was interrupted goes on where it stopped when the same command is given again. The recipe
    is kept as DIR/recipe.yaml; irkit index --index DIR/recipe.yaml --out NEW repeats it.
    """
    from irkit.cli.recipe import IndexRecipe

    given = {"model": model, "corpus": corpus, "dtype": dtype, "device": device}
    recipe = IndexRecipe.resolve(choice, given, override or ())
    if print_config:
        typer.echo(recipe.to_yaml(), nl=False)
        return
    if out is None:
        raise BadValueError("irkit index: no --out; give the directory that the index shall have")
    if (out / "irkit.json").exists() and not overwrite:
        raise StorageError(f"{out} holds an index already; choose another directory or give --overwrite")

    from irkit.data import check_documents, read_documents
    from irkit.index import check_index
    from irkit.index.place import check_place
    from irkit.lexical import Vectors, is_lexical
    from irkit.model_choice import default_index, load_model
    from irkit.retriever import Retriever

    check_place(out, overwrite)
    documents = read_documents(recipe.corpus)
    total = None
    if not documents.once:
        with bar("checking", "documents") as update:
            total = check_documents(_watched(documents, update))
        if total == 0:
            note(f"warning: {recipe.corpus} holds no documents")
    devices = recipe.device.split(",") if recipe.device else None
    settings = recipe.bm25.model_dump() if recipe.bm25 else recipe.model
    encoder = load_model(settings, device=devices, dtype=recipe.dtype)
    if isinstance(encoder, Vectors) and not documents.once:
        encoder, _ = encoder.fit(iter(documents))
    config = recipe.index or default_index(encoder)
    recipe = recipe.model_copy(update={"index": config})
    if dry_run:
        check_index(config, encoder.represent([], "document"))
        width = "" if is_lexical(recipe.model) else f" {encoder.dim}"
        count = "documents of unknown number" if total is None else f"{total:,} documents"
        note(f"would index {count} with {recipe.model} ({encoder.kind}{width}) into {out}")
        return
    start = time.monotonic()
    with stage_bar("documents", encoding=total) as update:
        try:
            retriever = Retriever.build(
                encoder,
                documents,
                out,
                index=config,
                chunk_size=recipe.chunk_size,
                overwrite=overwrite,
                progress=update,
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt("- give the same command again to go on with this build") from None
    write_text(out / "recipe.yaml", recipe.to_yaml())
    if total not in (None, len(retriever)):
        note(f"warning: {recipe.corpus} changed meanwhile: it held {total:,} documents when it was checked")
    seconds, size = time.monotonic() - start, retriever.stats()["bytes"] / 1e6
    note(
        f"indexed {len(retriever):,} documents in {seconds:,.1f} s ({size:,.1f} MB). Try: irkit search {out}"
    )


def _watched(documents: Source[Document], update: Callable[[int], object]) -> Source[Document]:
    from irkit.data import Source

    def read() -> Iterator[tuple[int, Document]]:
        for item in documents.numbered():
            update(1)
            yield item

    return Source(documents.name, read, documents.once)
