"""Steps that verbs with a recipe share: check the file, print the recipe, resume, show measures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from irkit.cli.output import show_table
from irkit.errors import BadValueError, ConfigError

if TYPE_CHECKING:
    from irkit.config import Config

# the verb of a file, by the first of these keys that the file has
_VERBS = {"pretraining": "pretrain", "vocabulary": "transfer-vocab", "baseline": "study", "losses": "train"}


def check_verb(file: Path, verb: str) -> None:
    """Refuse a file that another verb takes.

    Raises:
        ConfigError: The file belongs to another verb.
        StorageError: The file cannot be read.
    """
    from irkit.config import read_mapping

    keys = read_mapping(file)
    owner = next((owner for key, owner in _VERBS.items() if key in keys), verb)
    if owner != verb:
        raise ConfigError(f"{file}: it is made for irkit {owner}; give it to that, not to irkit {verb}")


def print_recipe(recipe: Config) -> None:
    """Print a resolved recipe as YAML, for ``--print-config``."""
    typer.echo(recipe.to_yaml(), nl=False)


def require_out(out: Path | None, verb: str, kind: str = "model") -> Path:
    """Return ``--out``.

    Raises:
        BadValueError: It is missing.
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


def show_means(out: Path) -> None:
    """Print the measures of a trained model, if it was evaluated."""
    from irkit.training.result_files import read_means

    if (out / "evaluation.jsonl").is_file():
        show_table(["collection", "measure", "value"], read_means(out / "evaluation.jsonl"))
