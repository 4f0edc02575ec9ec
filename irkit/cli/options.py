"""Options that several verbs share, as the types of their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from irkit.errors import ConfigError

__all__ = [
    "Activation",
    "Device",
    "Devices",
    "DryRun",
    "IgnoreIdenticalIds",
    "IndexDir",
    "Judgments",
    "MaxLength",
    "Measures",
    "ModelOut",
    "MovedModel",
    "Overwrite",
    "OverwriteFile",
    "PrintConfig",
    "Recipe",
    "RunOut",
    "Split",
    "TeacherDtype",
    "TrainingFile",
    "check_verb",
    "goes_on",
]

# of verbs that run models, or open an index

Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
Devices = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; cuda:0,cuda:1 share the work.")]
IndexDir = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the index.")]
MovedModel = Annotated[str | None, typer.Option(help="Where the model is, if it was moved.")]

# of verbs that make or measure runs

RunOut = Annotated[str | None, typer.Option(help="Run to write: TREC or .jsonl, also .gz, or -.")]
Judgments = Annotated[str | None, typer.Option(help="Judgments, a file or BEIR folder: print measures.")]
Measures = Annotated[str, typer.Option(help="As ir-measures names them.")]
Split = Annotated[str | None, typer.Option(help="Split of a BEIR folder, such as test.")]
IgnoreIdenticalIds = Annotated[
    bool, typer.Option("--ignore-identical-ids", help="Drop documents that have the id of their query.")
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


# keys by which files are told apart, the first that is there
_KEYS = {"pretraining": "pretrain", "vocabulary": "transfer-vocab", "baseline": "study", "losses": "train"}


def check_verb(file: Path, verb: str) -> None:
    """Refuse a file that another verb takes, rather than each of its keys.

    Raises:
        ConfigError: It is one of another verb.
        StorageError: It cannot be read.
    """
    from irkit.config import read_mapping

    keys = read_mapping(file)
    taker = next((taker for key, taker in _KEYS.items() if key in keys), verb)
    if taker != verb:
        raise ConfigError(f"{file}: it is made for irkit {taker}; give it to that, not to irkit {verb}")


@contextmanager
def goes_on(what: str = "") -> Iterator[None]:
    """Say who interrupts this that the same command goes on with ``what``."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"- give the same command again to go on{what and f' with this {what}'}"
        ) from None
