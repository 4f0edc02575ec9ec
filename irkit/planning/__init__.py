"""Predict what an index of many documents costs: machines, memory, bytes, hours of the build, ms per query.

costs.json has what `python -m benchmarks scale` measured. costs.py fits a line to each cost, and
machine_plan.py turns the lines into a plan.
"""

from __future__ import annotations

from irkit.planning.machine_plan import MachinePlan, plan

__all__ = ["MachinePlan", "plan"]
