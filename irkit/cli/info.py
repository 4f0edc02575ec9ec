"""``irkit info``: describe an index or a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irkit.cli.options import Directory
from irkit.cli.output import show_table
from irkit.errors import StorageError
from irkit.utils.atomic import explained
from irkit.utils.progress import progress_bar
from irkit.utils.uris import is_uri

if TYPE_CHECKING:
    from irkit.model import Model


def info(
    directory: Directory,
    *,
    verify: Annotated[bool, typer.Option("--verify/--no-verify")] = True,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Describe an index or a model: its kind, size and settings.

    Args:
        directory: Directory of an index or of a model.
        verify: Verify the checksum of every file.
        as_json: Print JSON.

    Examples:
        irkit info notes-index
    """
    folder = Path(directory)
    with explained(f"reading {directory}"):
        empty = folder.is_dir() and not any(folder.iterdir())
    if empty or not (folder.exists() or is_uri(directory)):
        problem = "it is empty" if empty else "no such directory"
        raise StorageError(
            f"irkit info {directory}: {problem}; expected the directory of an index or of a model"
        )
    is_model = any((folder / name).exists() for name in ("modules.json", "config.json"))
    facts = _model(folder) if is_model else _index(directory, verify)
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        show_table([], _flatten(facts))


def _index(directory: str, verify: bool) -> dict[str, Any]:
    from irkit.retrieval.retriever import Retriever

    with progress_bar("checking", "files"):
        retriever = Retriever.load(directory, verify=verify)
    with retriever:
        return {
            "index": directory,
            **retriever.stats(),
            "config": retriever.index.config.model_dump(mode="json"),
            "files": retriever.store.sizes(),
            "checksums": "verified" if verify else "not compared",
        }


def _model(directory: Path) -> dict[str, Any]:
    from irkit.encoder import Encoder
    from irkit.encoder.inference_free import InferenceFreeEncoder
    from irkit.model import Model

    model = Model.from_pretrained(directory, device="cpu")
    head = model.head
    config = None if isinstance(model.encoder, InferenceFreeEncoder) else head.config
    # layers that pool, and settings of the head: its pooled sides only if layers pool
    schedule = model.encoder.config.schedule if isinstance(model.encoder, Encoder) else ()
    pooling = {
        f"layer_{number}": f"kernel {layer.kernel}, stride {layer.stride}, {layer.location}"
        for number, layer in enumerate(schedule)
        if layer
    }
    hidden = set() if pooling else {"pooled_sides"}
    # facts in the order in which they are printed
    return {
        "model": str(directory),
        "kind": model.kind,
        "dim": model.dim,
        "similarity": model.similarity_name,
        **(
            {"heads": {name: _head(part) for name, part in model.heads.items()}}
            if len(model.heads) > 1
            else {}
        ),
        "encoder": model.encoder.family,
        **({"pooling": pooling} if pooling else {}),
        **({} if model.query_model is None else {"query_encoder": model.query_model.encoder.family}),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "max_length": model.tokenizer.max_length,
        **({} if config is None else config.model_dump(mode="json", exclude=hidden)),
        "prompts": dict(model.prompts),
        "fingerprint": model.fingerprint,
    }


def _head(model: Model) -> dict[str, Any]:
    return {"kind": model.kind, "dim": model.dim, "similarity": model.similarity_name}


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
