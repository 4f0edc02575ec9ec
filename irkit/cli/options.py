"""Options of the verbs: how they are declared, types that several verbs share, and tables below the help."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from irkit.utils.plugins import Registry


def declare_options(verb: Callable[..., None]) -> tuple[str, str]:
    """Declare the options of a verb by its signature and its docstring; return its help and its examples.

    Parameters before ``*`` are arguments and the others are options; a flag has no ``--no`` form. Their help
    is the section ``Args`` of the docstring. A type may name an option otherwise or limit its values
    (`Settings`), and bring its help along (`Device`).
    """
    text, _, examples = str(inspect.getdoc(verb)).partition("\n\nExamples:\n")
    text, _, described = text.partition("\n\nArgs:\n")
    helps = dict(re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", described, re.M))
    types, parameters = get_type_hints(verb, include_extras=True), inspect.signature(verb).parameters
    for name, help in helps.items():
        kind, *given = get_args(types[name]) if get_origin(types[name]) is Annotated else [types[name]]
        if given:
            info = copy(given[0])
        elif parameters[name].kind is inspect.Parameter.KEYWORD_ONLY:
            info = typer.Option(f"--{name.replace('_', '-')}")
        else:
            info = typer.Argument(metavar=name.upper())
        info.help = " ".join(help.split())
        verb.__annotations__[name] = Annotated[kind, info]
    return text, "\b\nFor example:\n" + examples.replace("    irkit", "  irkit")


# verbs that run models, or open an index

Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")]
Count = Annotated[int, typer.Option(min=1)]
OptionalCount = Annotated[int | None, typer.Option(min=1)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: a GPU, if any.")]
Devices = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, ...; default: a GPU, if any. cuda:0,cuda:1 share the work."),
]
IndexDir = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the index.")]
MovedModel = Annotated[str | None, typer.Option(help="Where the model of the index is now, if it was moved.")]

# verbs that make or measure runs

RunOut = Annotated[
    str | None, typer.Option(help="Run to write: TREC or .jsonl, also .gz; or - (standard output).")
]
Judgments = Annotated[
    str | None, typer.Option(help="Print measures against these judgments: a file or a BEIR folder.")
]
Measures = Annotated[str, typer.Option(help="Names of measures as in ir-measures or trec_eval.")]
Split = Annotated[str | None, typer.Option(help="Split of a BEIR folder, such as test.")]
IgnoreIdenticalIds = Annotated[
    bool, typer.Option("--ignore-identical-ids", help="Drop documents that have the id of their query.")
]

# verbs with a recipe

PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the whole recipe, and stop.")]


class IndexCommand(TyperCommand):
    """Command whose help lists the kinds of indexes that other packages add."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write their names, if there are any, below the examples; this imports neither them nor torch."""
        super().format_epilog(ctx, formatter)
        names = ", ".join(Registry[object]("irkit.indexes", object, {}))
        if names:
            with formatter.section("Kinds of indexes of other packages"):
                formatter.write_text(names)


class TrainCommand(TyperCommand):
    """Command whose help lists the tables that its recipe chooses from; they are imported only for that."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the names of the losses and regularizers below the examples."""
        from irkit.training.losses import LOSSES
        from irkit.training.regularizers import REGULARIZERS

        super().format_epilog(ctx, formatter)
        rows = [("losses", ", ".join(LOSSES)), ("regularizers", ", ".join(REGULARIZERS))]
        with formatter.section("Kinds in a recipe"):
            formatter.write_dl(rows)
