"""Help of verbs whose recipes name parts: the tables of these parts, including parts from other packages."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from irkit.utils.plugins import Registry


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
