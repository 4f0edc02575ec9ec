"""The command line. Verbs import slow modules when they run."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, NoReturn

import typer

from irkit import __version__
from irkit.cli.export import export
from irkit.cli.index import compact, encode, index, reshard
from irkit.cli.info import info
from irkit.cli.options import IndexCommand, TrainCommand, declare_options
from irkit.cli.output import drop_output, keep_streams, note
from irkit.cli.plan import plan
from irkit.cli.recipe_verbs import pretrain, study, train, transfer_vocab
from irkit.cli.runs import evaluate, fuse, rerank
from irkit.cli.search import explain, search
from irkit.cli.serve import serve
from irkit.cli.training_files import label, mine
from irkit.errors import BadValueError, ConfigError, IrkitError, StorageError
from irkit.utils.signals import how_ended, interruptible

__all__ = ["app", "main"]

app = typer.Typer(
    name="irkit",
    help="Train, index and search every kind of neural retriever.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_SEARCHING = (index, search, rerank, explain, evaluate, fuse, serve, export)
_TRAINING = (train, pretrain, mine, label, study, transfer_vocab)
_VERBS: tuple[Callable[..., None], ...] = (*_SEARCHING, *_TRAINING, encode, reshard, compact, info, plan)
_TABLES = {index: IndexCommand, train: TrainCommand}  # listed by --help
for _verb in _VERBS:
    _help, _epilog = declare_options(_verb)
    app.command(help=_help, epilog=_epilog, cls=_TABLES.get(_verb))(_verb)


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"irkit {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error came from; works anywhere on the line.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 for success, 1 for a bug, 2 for bad input, 128 + n for signal n.

    Args:
        arguments: Words after ``irkit``; by default the arguments of this process.
    """
    keep_streams()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads must not occupy cores
    warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
    words = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = "--traceback" in words
    words = [word for word in words if word != "--traceback"] or ["--help"]
    try:
        if "" in words:
            raise BadValueError(
                f"word {words.index('') + 1} of the command is empty; is a variable in it not set?"
            )
        with interruptible():
            _invoke(words)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        sys.exit(141)
    except KeyboardInterrupt as stop:
        word, code = how_ended()
        note(" ".join([word, *map(str, stop.args)]))
        sys.exit(code)
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
        sys.exit(_report(error))
    sys.exit(0)


def _invoke(words: list[str]) -> None:
    command = typer.main.get_command(app)
    try:
        try:
            with command.make_context("irkit", words) as context:
                command.invoke(context)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if isinstance(error, IrkitError) or error.filename is not None:
            raise
        drop_output(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise
        raise StorageError(f"writing to standard output: {error.strerror or error}") from error


def _report(error: Exception) -> int:
    if hasattr(error, "format_message"):  # an error of the parser
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "irkit"
        note(f"error: {error.format_message().rstrip('.')}; see {command} --help")
        return 2
    if isinstance(error, IrkitError | OSError):
        if not isinstance(error, ConfigError) or os.environ.get("LOCAL_RANK", "0") == "0":
            note(f"error: {error}")  # of several processes only the first reports a bad recipe
        return 2
    note(
        f"internal error: {type(error).__name__}: {error}. This is a bug of irkit; "
        "please report it together with what --traceback shows"
    )
    return 1
