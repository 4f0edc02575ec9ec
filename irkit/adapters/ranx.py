"""Convert runs to and from ranx, for its measures, fusion and comparisons."""

from __future__ import annotations

from irkit.adapters.shared import missing
from irkit.evaluation.run import Run

try:
    import ranx
except ImportError as error:
    raise missing("ranx", error) from error


def to_ranx(run: Run, name: str | None = None) -> ranx.Run:
    """Return a run of ranx with a name for its tables."""
    results = run.to_dict()
    return ranx.Run(results if any(results.values()) else None, name=name)


def from_ranx(run: ranx.Run) -> Run:
    """Return a run of irkit.

    Raises:
        BadValueError: A score is not a finite number.
    """
    return Run.from_dict(run.to_dict())
