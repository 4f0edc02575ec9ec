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
        choice: bm25, inverted, flat, dense or plaid.
        latency: Maximum time of a query while no other query runs, such as 50ms; default: any.
        memory: Memory of a machine, which holds its part of the index.

    Examples:
        irkit plan --documents 100M --index plaid --latency 50ms
    """
    from irkit.planning import plan as make
    from irkit.planning.costs import SHAPES, read_costs
    from irkit.planning.machine_plan import parse_bytes, parse_documents, parse_seconds

    seconds = None if latency is None else parse_seconds(latency)
    found = make(parse_documents(documents), choice, latency=seconds, memory=parse_bytes(memory))
    origin = "measured" if found.is_measured else "predicted"
    rows: list[tuple[Any, ...]] = [
        ("documents", f"{found.documents:,}", "given"),
        ("machines", f"{found.machines:,}", origin),
        ("documents of a machine", f"{found.per_machine:,}", origin),
        ("GB of all machines", f"{found.bytes / 1e9:.3g}", origin),
        ("GB of a machine", f"{found.bytes / found.machines / 1e9:.3g}", origin),
        ("GB of memory of a build", f"{found.build_memory / 1e9:.3g}", origin),
        ("hours of the build", f"{found.build_hours:.3g}", origin),
        ("ms of a query", f"{found.query_ms:.3g}", origin),
    ]
    show_table(["cost", "number", "origin"], rows)
    note(f"{found.index}: {SHAPES[found.index]}; {read_costs()['measured']}")
    for cost, item in found.checks.items():
        note(
            f"check of {cost} at {item.documents:,} documents: {item.measured:.3g} measured, "
            f"{item.predicted:.3g} predicted from {', '.join(f'{size:,}' for size in item.fitted)}"
        )
