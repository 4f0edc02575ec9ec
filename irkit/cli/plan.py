"""``irkit plan``: predict what an index costs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from irkit.cli.output import note, show_table


def plan(
    *,
    documents: Annotated[str, typer.Option("--documents")],
    choice: Annotated[str, typer.Option("--index")],
    latency: Annotated[str | None, typer.Option("--latency")] = None,
    memory: Annotated[str, typer.Option("--memory")] = "64GB",
) -> None:
    """Predict machines, memory, bytes, build time and query time of an index.

    The numbers hold for machines like the measured one, which is described on standard error. The time to
    encode texts is not included.

    Args:
        documents: Number of documents, such as 100M.
        choice: bm25, inverted, flat, dense or plaid; muvera and hnsw once they were measured.
        latency: Maximum time of a query while no other query runs, such as 50ms; default: any.
        memory: Memory of a machine, in which its part of the index, the build and the search have to fit.

    Examples:
        irkit plan --documents 100M --index plaid --latency 50ms
    """
    from irkit.planning import plan as make
    from irkit.planning.costs import SHAPES, read_costs
    from irkit.planning.machine_plan import parse_bytes, parse_documents, parse_seconds

    seconds = None if latency is None else parse_seconds(latency)
    machine_plan = make(parse_documents(documents), choice, latency=seconds, memory=parse_bytes(memory))
    origin = "measured" if machine_plan.is_measured else "predicted"
    rows: list[tuple[Any, ...]] = [
        ("documents", f"{machine_plan.documents:,}", "given"),
        ("machines", f"{machine_plan.machines:,}", origin),
        ("documents of a machine", f"{machine_plan.per_machine:,}", origin),
        ("GB of all machines", f"{machine_plan.bytes / 1e9:.3g}", origin),
        ("GB of a machine", f"{machine_plan.bytes / machine_plan.machines / 1e9:.3g}", origin),
        ("GB of memory of a build", f"{machine_plan.build_memory / 1e9:.3g}", origin),
        ("GB of memory of a reader", f"{machine_plan.memory / 1e9:.3g}", origin),
        ("hours of the build", f"{machine_plan.build_hours:.3g}", origin),
        ("ms of a query", f"{machine_plan.query_ms:.3g}", origin),
    ]
    show_table(["cost", "number", "origin"], rows)
    note(f"{machine_plan.index}: {SHAPES[machine_plan.index]}; {read_costs()['measured']}")
    for cost, item in machine_plan.checks.items():
        note(
            f"check of {cost} at {item.documents:,} documents: {item.measured:.3g} measured, "
            f"{item.predicted:.3g} predicted from {', '.join(f'{size:,}' for size in item.fitted)}"
        )
