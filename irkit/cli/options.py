"""Options that several verbs share, as the types of their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Activation",
    "Device",
    "DryRun",
    "MaxLength",
    "ModelOut",
    "Overwrite",
    "OverwriteFile",
    "PrintConfig",
    "Recipe",
    "TeacherDtype",
    "TrainingFile",
    "goes_on",
]

# of verbs that train

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML or JSON file.")]
ModelOut = Annotated[Path | None, typer.Option("--out", help="Directory of the model.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a model that was trained there before.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the whole recipe.")]

# of verbs that write training files

TrainingFile = Annotated[Path, typer.Option(help="Training file to write, .jsonl.")]
OverwriteFile = Annotated[bool, typer.Option("--overwrite", help="Replace the file, in the end.")]
MaxLength = Annotated[int | None, typer.Option(min=8, help="Tokens a pair of a cross-encoder.")]
Activation = Annotated[str, typer.Option(help="Of a cross-encoder: none or sigmoid.")]
TeacherDtype = Annotated[str, typer.Option(help="Of the teacher: float32, bfloat16, ...")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]


@contextmanager
def goes_on(what: str = "") -> Iterator[None]:
    """Say who interrupts this that the same command goes on with ``what``."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"- give the same command again to go on{what and f' with this {what}'}"
        ) from None
