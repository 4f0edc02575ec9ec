"""Options of the verbs: how they are declared, types that several verbs share, and tables below the help."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from copy import copy
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from irkit.errors import BadValueError, require
from irkit.utils.plugins import Registry

Directory = Annotated[str, typer.Argument(metavar="DIR")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")]
Count = Annotated[int, typer.Option(min=1)]
Offset = Annotated[int, typer.Option(min=0)]
OptionalCount = Annotated[int | None, typer.Option(min=1)]

_SHARED = {  # help of parameters that several verbs have
    "directory": "Directory of the index, or its URI in an object store.",
    "model": "Where the model of the index is now, if it was moved.",
    "device": "cpu, cuda, cuda:1, ...; default: a GPU, if any.",
    "out": "Run to write: TREC or .jsonl, also .gz; or - (standard output).",
    "qrels": "Print measures against these judgments: a file or a BEIR folder.",
    "measures": "Names of measures as in ir-measures or trec_eval.",
    "id_column": "Column or key of the id; default: a usual name (id, ...), or the number of the row.",
    "text_column": "Column or key of the text. May be repeated; the texts are joined by spaces.",
    "title_column": "Column or key of the title; default: title.",
    "offset": "Number of best results of each query to skip.",
    "threshold": "Show only results with this score or a higher one.",
    "group_by": "Key of metadata: show at most --per-group results of each of its values.",
    "per_group": "Results of each value; default: 1.",
    "split": "Split of a BEIR folder, such as test.",
    "ignore_identical_ids": "Drop documents that have the id of their query.",
    "overwrite": "Replace the model that is there.",
    "recipe": "YAML or JSON file.",
    "dry_run": "Check everything, write nothing.",
    "print_config": "Print the whole recipe, and stop.",
    "max_length": "Maximum tokens of a query and document for a cross-encoder.",
    "activation": "Activation of a cross-encoder: none or sigmoid.",
    "dtype": "Precision of the teacher: float32, bfloat16, ...",
    "engine": "Divide the work among actors of Ray: ray on this machine, or ray://HOST:PORT.",
}


def check_engine(engine: str | None, verb: str, source: str = "") -> str | None:
    """Return the address in ``--engine``, see `irkit.ray_engine.ray_start.parse_engine`.

    Raises:
        BadValueError: The engine is not known, or the source is standard input.
        MissingDependencyError: Ray is not installed.
    """
    if engine is None:
        return None
    from irkit.ray_engine.ray_start import parse_engine

    address = parse_engine(engine)
    if source == "-":
        raise BadValueError(
            f"{verb} --engine {engine}: standard input can be read only once; give the name of a file"
        )
    require("ray.data", "ray", f"{verb} --engine {engine}")
    return address


def declare_options(verb: Callable[..., None]) -> tuple[str, str]:
    """Declare the options of a verb by its signature and its docstring; return its help and its examples.

    Parameters before ``*`` become arguments, the others options. A flag has no ``--no`` form. The help of a
    parameter is its line in the section ``Args`` of the docstring, or else the help that verbs share for its
    name. The type of a parameter may give the option another name or limit its values, as `Settings` and
    `Count` do.
    """
    text, _, examples = (inspect.getdoc(verb) or "").partition("\n\nExamples:\n")
    text, _, described = text.partition("\n\nArgs:\n")
    helps = _SHARED | dict(re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", described, re.M))
    types = get_type_hints(verb, include_extras=True)
    for name, parameter in inspect.signature(verb).parameters.items():
        kind, *extra = get_args(types[name]) if get_origin(types[name]) is Annotated else [types[name]]
        if extra:
            info = copy(extra[0])
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            info = typer.Option(f"--{name.replace('_', '-')}")
        else:
            info = typer.Argument(metavar=name.upper())
        info.help = " ".join(helps.get(name, "").split())
        verb.__annotations__[name] = Annotated[kind, info]
    return text, "\b\nFor example:\n" + examples.replace("    irkit", "  irkit")


def drop_missing(**options: Any) -> dict[str, Any]:
    """Return the options that were given, those that are not None."""
    return {name: value for name, value in options.items() if value is not None}


class IndexCommand(TyperCommand):
    """Command whose help lists the kinds of indexes that other packages add."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the names of the kinds that other packages add below the examples, without importing them."""
        super().format_epilog(ctx, formatter)
        names = ", ".join(Registry[object]("irkit.indexes", object, {}))
        if names:
            with formatter.section("Kinds of indexes of other packages"):
                formatter.write_text(names)


class TrainCommand(TyperCommand):
    """Command whose help lists the kinds that a recipe chooses from; only the help imports their tables."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the kinds of models, losses and regularizers below the examples."""
        from irkit.training.losses import LOSSES
        from irkit.training.model_recipe import list_kinds
        from irkit.training.regularizers import REGULARIZERS

        super().format_epilog(ctx, formatter)
        tables = {"model": list_kinds(), "losses": LOSSES, "regularizers": REGULARIZERS}
        with formatter.section("Kinds in a recipe"):
            formatter.write_dl([(key, ", ".join(names)) for key, names in tables.items()])
