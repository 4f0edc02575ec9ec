"""``irkit index`` and ``irkit encode``, which encode a collection."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from irkit.cli.options import Directory, OptionalCount, Settings, check_engine
from irkit.cli.output import hint_resume, note, require_out
from irkit.cli.runs import check_out
from irkit.errors import BadValueError, StorageError
from irkit.utils.atomic import write_text
from irkit.utils.progress import progress_bar, stage_progress_bar
from irkit.utils.uris import is_uri

if TYPE_CHECKING:
    from irkit.data.vector_files import Parts
    from irkit.retrieval.retriever import Retriever


def index(
    model: str | None = None,
    corpus: str | None = None,
    *,
    out: str | None = None,
    choice: Annotated[str | None, typer.Option("--index")] = None,
    override: Settings = None,
    id_column: str | None = None,
    text_column: list[str] | None = None,
    title_column: str | None = None,
    metadata_columns: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    shards: OptionalCount = None,
    windows: OptionalCount = None,
    engine: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    print_config: bool = False,
) -> None:
    """Encode a collection and index it.

    After an interruption, the same command resumes the build. The recipe is written to recipe.yaml in
    the --out directory; irkit index --index OUT/recipe.yaml --out NEW repeats it.

    Args:
        model: Directory or hub name of a model; or bm25, impacts or vectors.
        corpus: BEIR folder, .jsonl, .csv, .tsv, .txt, <DOC>, also .gz; .parquet; - (standard input),
            ir_datasets:ID, hf:NAME; for the model vectors: .jsonl, .npy or .safetensors.
        out: Directory to write the index to; or a URI, such as s3://bucket/notes.
        choice: auto, flat, inverted, dense, hnsw, ivf, pq, ivfpqfs, plaid, muvera, a factory string of FAISS,
            or a recipe (.yaml). Default: inverted for sparse models and bm25, else flat.
        override: Set a key of the index, of bm25 or of the recipe, such as ef_search=128. May be repeated.
        metadata_columns: Columns or keys to keep as metadata, such as year,lang; default: all others.
        dtype: auto (default), float32, bfloat16 or int8.
        device: cpu, cuda, cuda:1, ...; default: a GPU, if any. cuda:0,cuda:1 share the work.
        shards: Number of directories inside --out to divide the documents among; searched as one index.
        windows: Encode long documents in windows of this many tokens. --set windows.stride=128 makes windows
            overlap; --set windows.pool=mean (or first) scores a document by that instead of its best window.
        engine: Build the shards by actors of Ray: ray on this machine, or ray://HOST:PORT.
        overwrite: Replace an existing index, once the new one is complete.
        dry_run: Check everything, build nothing.

    Examples:
        irkit index sentence-transformers/all-MiniLM-L6-v2 examples/notes --out notes-index
        irkit index bm25 corpus.jsonl --out words-index --shards 16 --engine ray
    """
    from irkit.cli.recipe_options import IndexRecipe

    settings: dict[str, Any] = {"model": model, "corpus": corpus, "dtype": dtype, "device": device}
    settings |= {"id_column": id_column, "text_column": text_column or None, "title_column": title_column}
    settings["shards"] = shards
    settings["windows"] = {"length": windows} if windows else None
    columns = [name.strip() for name in (metadata_columns or "").split(",")]
    settings["metadata_columns"] = columns if metadata_columns else None
    recipe = IndexRecipe.resolve(choice, settings, override or ())
    if print_config:
        typer.echo(recipe.to_yaml(), nl=False)
        return
    out = require_out(out, "index", "index")
    if engine and recipe.shards is None:
        raise BadValueError(f"irkit index --engine {engine}: it builds shards; give their number as --shards")
    address = check_engine(engine, "irkit index", recipe.corpus)
    if not is_uri(out) and (Path(out) / "irkit.json").exists() and not overwrite:
        raise StorageError(f"{out} holds an index already; choose another directory or give --overwrite")

    from irkit.data import check_documents, read_documents
    from irkit.encoder_free import Vectors, is_encoder_free
    from irkit.index import check_index
    from irkit.index.directory import check_target
    from irkit.index.object_store import check_uri, staged
    from irkit.retrieval.building import index_of
    from irkit.retrieval.collection import load_model
    from irkit.retrieval.retriever import Retriever
    from irkit.retrieval.windows import parse_windows

    # read everything once, so that a malformed line is an error before the encoding
    if is_uri(out):
        check_uri(out, overwrite)
    else:
        check_target(Path(out), overwrite)
    documents = read_documents(
        recipe.corpus,
        id=recipe.id_column,
        text=recipe.text_column,
        title=recipe.title_column,
        metadata=recipe.metadata_columns,
    )
    total = None
    if not documents.once:
        with progress_bar("checking", "documents") as update:
            total = check_documents(documents, update)
        if total == 0:
            note(f"warning: {recipe.corpus} holds no documents")
    # load the model, and check that index and windows suit it
    devices = recipe.device.split(",") if recipe.device else None
    encoder = load_model(
        recipe.bm25.model_dump() if recipe.bm25 else recipe.model, device=devices, dtype=recipe.dtype
    )
    if isinstance(encoder, Vectors) and not documents.once:
        encoder, _ = encoder.fit(iter(documents))
    config = index_of(encoder, recipe.index)
    parse_windows(recipe.windows, encoder)
    recipe = recipe.model_copy(update={"index": config})
    if dry_run:
        check_index(config, encoder.encode_representation([], "document"))
        width = "" if is_encoder_free(recipe.model) else f" {encoder.dim}"
        count = "documents of unknown number" if total is None else f"{total:,} documents"
        note(f"would index {count} with {recipe.model} ({encoder.kind}{width}) into {out}")
        return
    # encode and index
    start = time.monotonic()
    options: dict[str, Any] = {"chunk_size": recipe.chunk_size, "overwrite": overwrite or is_uri(out)}
    options |= {"shards": recipe.shards, "windows": recipe.windows}
    build = _build_on_ray(address) if engine else Retriever.build
    with (
        staged(out, overwrite) if is_uri(out) else nullcontext(Path(out)) as folder,
        stage_progress_bar("documents", encoding=total) as update,
        hint_resume(" to go on with this build"),
    ):
        retriever = build(encoder, documents, folder, index=config, progress=update, **options)
        write_text(folder / "recipe.yaml", recipe.to_yaml())
    if total not in (None, len(retriever)):
        note(f"warning: {recipe.corpus} changed meanwhile: it held {total:,} documents when it was checked")
    seconds, size = time.monotonic() - start, retriever.stats()["bytes"] / 1e6
    note(
        f"indexed {len(retriever):,} documents in {seconds:,.1f} s ({size:,.1f} MB). Try: irkit search {out}"
    )


def _build_on_ray(address: str | None) -> Callable[..., Retriever]:
    from irkit.ray_engine import build_shards

    return partial(build_shards, address=address)


def reshard(directory: Directory, *, shards: Annotated[int, typer.Option(min=1)]) -> None:
    """Divide an index among another number of directories, without encoding again.

    Searches can use the index meanwhile. Removed documents are left out. After an interruption, the same
    command resumes.

    Args:
        shards: Number of directories.

    Examples:
        irkit reshard words-index --shards 4
    """
    from irkit.shards import reshard as copy_shards

    with stage_progress_bar("documents") as update, hint_resume(" to go on"):
        copy_shards(directory, shards, progress=update)
    note(f"{directory} has {shards} shards now")


def compact(directory: Directory) -> None:
    """Rewrite an index without its removed documents.

    Searches and a server can use the index meanwhile. The disk needs as much free space as the index has.
    Nothing is encoded again. After an interruption, the same command resumes, unless the index was changed.

    Examples:
        irkit compact words-index
    """
    from irkit.retrieval.retriever import Retriever
    from irkit.shards import rewrite

    with Retriever.load(directory) as retriever:
        before = retriever.stats()
    with stage_progress_bar("documents") as update, hint_resume(" to go on"):
        rewrite(directory, progress=update)
    with Retriever.load(directory) as retriever:
        after = retriever.stats()
    note(
        f"{directory} has {after['documents']:,} documents; {before['removed']:,} removed ones are gone "
        f"({before['bytes'] / 1e6:,.1f} to {after['bytes'] / 1e6:,.1f} MB)"
    )


_IMPACTS = ("sparse", ".jsonl")  # weights by term, which irkit index impacts and Anserini read


def encode(
    model: str,
    texts: str,
    *,
    out: Path,
    side: Literal["query", "document"] = "document",
    head: str | None = None,
    id_column: str | None = None,
    text_column: list[str] | None = None,
    title_column: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    engine: str | None = None,
) -> None:
    """Encode texts into a file.

    .npy holds one vector per text; .safetensors holds the arrays of any model, in the order of the texts;
    .jsonl holds one object per line, with id and vector, or with weights by term for a sparse model. Texts
    are streamed, so that any number of them fits in memory.

    Args:
        model: Directory or hub name.
        texts: Documents or queries, as for irkit index and search.
        title_column: Column or key of the title of documents; default: title.
        out: File to write: .npy, .safetensors or .jsonl.
        side: Encode the texts as queries or as documents.
        head: Head of a model that has several.
        dtype: auto (default for documents), float32 (default for queries, as in a search), bfloat16 or int8.
        device: cpu, cuda, cuda:1, ...; default: a GPU, if any. cuda:0,cuda:1 share the work.

    Examples:
        irkit encode sentence-transformers/all-MiniLM-L6-v2 examples/notes --out vectors.npy
    """
    from irkit.data.vector_files import WRITABLE, write_vectors

    if out.suffix not in WRITABLE:
        raise BadValueError(f"--out {out}: expected the extension {', '.join(WRITABLE)}")
    if side == "query" and title_column is not None:
        raise BadValueError("irkit encode: got --title-column, but a query has no title; leave it out")
    address = check_engine(engine, "irkit encode", texts)
    check_out(str(out), None)
    from irkit.data import Source, read_documents, read_queries
    from irkit.encoder_free.settings import is_encoder_free
    from irkit.model import Model

    if is_encoder_free(model):
        raise BadValueError(
            f"irkit encode: {model} encodes nothing without an index; see irkit index {model}"
        )

    # read everything once, so that a malformed line is an error before the encoding
    columns: dict[str, Any] = {"id": id_column, "text": text_column or None}
    source: Source[Any] = (
        read_queries(texts, **columns)
        if side == "query"
        else read_documents(texts, **columns, title=title_column)
    )
    total = None
    if not source.once:
        with progress_bar("checking", "texts") as update:
            total = 0
            for _ in source:
                total += 1
                update(1)

    # load the model, and check that the file can hold what it makes
    dtype = dtype or ("auto" if side == "document" else "float32")  # as irkit index and irkit search
    encoder = Model.from_pretrained(model, device=device.split(",") if device else None, dtype=dtype)
    if head is not None or encoder.kind == "several":
        if encoder.kind != "several" or head is None or head not in encoder.heads:
            available = ", ".join(encoder.heads) if encoder.kind == "several" else "one head; leave it out"
            raise BadValueError(
                f"encoding: --head is {head}, and {model} has {available}; a file holds one representation"
            )
        encoder = encoder.heads[head]
    if encoder.kind != "dense" and out.suffix != ".safetensors" and (encoder.kind, out.suffix) != _IMPACTS:
        raise BadValueError(
            f"--out {out}: {model} makes {encoder.kind}, not one vector a text; give --out FILE.safetensors"
            + (" or FILE.jsonl" if encoder.kind == _IMPACTS[0] else "")
        )
    # encode
    with progress_bar("encoding", "texts", total) as update:
        vocabulary = encoder.vocabulary if encoder.kind == "sparse" else None
        encode_parts = _encode_on_ray(address) if engine else _encode
        count = write_vectors(out, encode_parts(encoder, source, side, update), vocabulary)
    note(f"encoded {count:,} texts into {out}")


def _encode(model: Any, items: Iterable[Any], side: str, update: Any) -> Parts:
    waiting: deque[str] = deque()  # ids of texts that are read, but not encoded yet

    def texts() -> Iterator[str]:
        for item in items:
            waiting.append(item.id)
            yield item.text if side == "query" else item.full_text

    for part in model.stream_representations(texts(), side, progress=update):
        yield [waiting.popleft() for _ in range(len(part))], part


def _encode_on_ray(address: str | None) -> Callable[[Any, Any, Any, Any], Parts]:
    from irkit.ray_engine.ray_encode import encode_source
    from irkit.ray_engine.ray_start import start_ray

    def encode_parts(model: Any, source: Any, side: Any, update: Any) -> Parts:
        for ids, part in encode_source(start_ray(address), model, source, side):
            yield ids, part
            update(len(ids))

    return encode_parts
