"""Plan machines for an index: how many shards, and what each costs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from irkit.arguments import brief, is_count, suggest
from irkit.errors import BadValueError
from irkit.planning.costs import (
    BUILD,
    BUILD_MEMORY,
    BYTES,
    MEMORY,
    QUERY,
    Check,
    check,
    fit,
    measured_kinds,
    read_costs,
    rows_of,
)

_COUNTS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"mb": 1e6, "gb": 1e9, "tb": 1e12}
_LEAST = 10_000  # documents of a machine: more machines make a query no faster


@dataclass(frozen=True)
class MachinePlan:
    """What an index costs.

    Attributes:
        index: Kind of the index.
        documents: Documents of all machines.
        machines: Machines, each with one shard.
        per_machine: Documents of a machine.
        bytes: Bytes on the disks of all machines. A search reads no disk if as much fits in memory.
        build_memory: Bytes of memory that the build takes on each machine.
        memory: Bytes of memory that a process takes which opens the index of a machine and searches it once;
            more searches read more of the files, whose bytes should fit, too.
        build_hours: Hours of the build, without the encoding of texts; all machines build at the same time.
        query_ms: Milliseconds of a query on its own.
        is_measured: True if an index of this many documents was measured, False if all numbers are predicted.
        checks: How well the small measurements predict the largest one, by cost.
    """

    index: str
    documents: int
    machines: int
    per_machine: int
    bytes: float
    build_memory: float
    memory: float
    build_hours: float
    query_ms: float
    is_measured: bool
    checks: dict[str, Check]


def parse_amount(text: str | float, units: dict[str, float], expected: str) -> float:
    """Convert a number with a unit, such as ``"50ms"``, to the base unit.

    Raises:
        BadValueError: ``text`` is not a positive number with one of the units.

    Examples:
        >>> parse_amount("8.8M", {"": 1, "m": 1e6}, "documents")
        8800000.0
    """
    match = re.fullmatch(r"\s*((?:\d{1,3}(?:[,_]\d{3})+|\d+)(?:\.\d+)?)\s*([a-z]*)\s*", str(text).lower())
    if match is None or match[2] not in units or not float(match[1].replace(",", "").replace("_", "")):
        raise BadValueError(f"plan: got {brief(text)}; expected {expected}")
    return float(match[1].replace(",", "").replace("_", "")) * units[match[2]]


def parse_documents(text: str) -> int:
    """Convert a number of documents, such as ``"100M"``, to an integer."""
    return round(parse_amount(text, dict(_COUNTS), "a number of documents, such as 100M"))


def parse_seconds(text: str) -> float:
    """Convert a time, such as ``"50ms"``, to seconds."""
    return parse_amount(text, _SECONDS, "a time, such as 50ms")


def parse_bytes(text: str) -> float:
    """Convert a size, such as ``"64GB"``, to bytes."""
    return parse_amount(text, _BYTES, "a size, such as 64GB")


def plan(documents: int, index: str, *, latency: float | None = None, memory: float = 64e9) -> MachinePlan:
    """Plan the fewest machines with memory for the index, its build and its search that answer in time.

    Args:
        documents: Number of documents.
        index: A kind that was measured, see `irkit.planning.costs.measured_kinds`.
        latency: Maximum seconds for one query while no other query runs; None allows any time.
        memory: Bytes of memory of a machine.

    Raises:
        BadValueError: A kind was not measured, a number is out of range, or no number of machines is enough.
    """
    if index not in (kinds := measured_kinds()):
        raise BadValueError(f"plan: index {brief(index)} was not measured; {suggest(str(index), kinds)}")
    if not is_count(documents) or not memory > 0 or (latency is not None and not latency > 0):
        raise BadValueError("plan: expected documents of 1 or more, and latency and memory above 0")
    rows = rows_of(index)
    lines = {cost: fit(rows, cost) for cost in (BUILD, BYTES, QUERY, BUILD_MEMORY, MEMORY)}
    measured = next((row for row in rows if row["documents"] == documents), None)  # on one machine
    overhead = read_costs()["shards"]["overhead ms"]

    def costs(machines: int) -> dict[str, float]:
        """Return what a machine costs: as it was measured, or else as it is predicted."""
        if machines == 1 and measured is not None:
            return {cost: measured[cost] for cost in lines}
        found = {cost: line.at(documents / machines) for cost, line in lines.items()}
        return found | {QUERY: found[QUERY] + (overhead if machines > 1 else 0)}

    def needed(machines: int) -> float:
        """Return the bytes of memory that the files, the build or the search of a machine take at most."""
        own = costs(machines)
        return max(documents / machines * own[BYTES], 1e6 * own[BUILD_MEMORY], 1e6 * own[MEMORY])

    def enough(machines: int) -> bool:
        return needed(machines) <= memory and (latency is None or costs(machines)[QUERY] <= 1000 * latency)

    # the fewest machines: double them until they are enough, then halve the interval
    most = max(1, documents // _LEAST)
    high = 1
    while not enough(high) and high < most:
        high = min(2 * high, most)
    if not enough(high):
        raise BadValueError(
            f"plan: on {high:,} machines a query of {index} takes {costs(high)[QUERY]:.1f} ms, and a machine "
            f"needs {needed(high) / 1e9:.2f} GB; allow more of these"
        )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    own, checks = costs(high), {cost: check(rows, cost) for cost in lines}
    return MachinePlan(
        index=index,
        documents=documents,
        machines=high,
        per_machine=-(-documents // high),
        bytes=documents * own[BYTES],
        build_memory=own[BUILD_MEMORY] * 1e6,
        memory=own[MEMORY] * 1e6,
        build_hours=documents / high * own[BUILD] / 3.6e9,
        query_ms=own[QUERY],
        is_measured=high == 1 and measured is not None,
        checks={cost: item for cost, item in checks.items() if item is not None},
    )
