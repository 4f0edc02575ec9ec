"""Options that several verbs have, as types of their parameters; and help that lists the parts of recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from irkit.utils.plugins import Registry


def set_option(help: str) -> Any:
    """Return the option ``--set KEY=VALUE`` of a verb."""
    return typer.Option("--set", metavar="KEY=VALUE", help=f"{help} May be repeated.")


# verbs that run models, or open an index

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

# verbs that train

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML or JSON file.")]
ModelOut = Annotated[Path | None, typer.Option("--out", help="Directory to write the model to.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the model that is there.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, write nothing.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the whole recipe, and stop.")]

# verbs that write training files

TrainingFile = Annotated[Path, typer.Option(help="Training file to write, .jsonl.")]
OverwriteFile = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing file, once the new one is complete.")
]
MaxLength = Annotated[
    int | None, typer.Option(min=8, help="Maximum tokens of a query and document for a cross-encoder.")
]
Activation = Annotated[str, typer.Option(help="Activation of a cross-encoder: none or sigmoid.")]
TeacherDtype = Annotated[str, typer.Option(help="Precision of the teacher: float32, bfloat16, ...")]


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
