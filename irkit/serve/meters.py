"""Count what a server does, for Prometheus; several processes count together."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

PROCESSES = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder in which several processes count together."""
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZES = tuple(4**power for power in range(9))

REQUESTS = Counter(
    "irkit_requests", "Requests by route, model or index, and status", ("route", "name", "status")
)
SECONDS = Histogram("irkit_request_seconds", "Time of a request", ("route", "name"), buckets=_SECONDS)
TOKENS = Counter("irkit_tokens", "Tokens encoded for clients", ("model",))
BATCHES = Histogram(
    "irkit_batch_size",
    "Tokens of a model, or queries of an index, worked on together",
    ("name",),
    buckets=_SIZES,
)
WAITING = Gauge(
    "irkit_waiting", "Tokens, queries or changes that wait", ("name",), multiprocess_mode="livesum"
)
SHARDS = Counter(
    "irkit_shard_questions",
    "Questions to shards on Ray, and what became of them",
    ("name", "outcome"),
)
RUNNING = Gauge("irkit_running_requests", "Requests being answered", multiprocess_mode="livesum")


def exposition() -> tuple[bytes, str]:
    """Return all metrics as text of Prometheus, and its content type."""
    registry = REGISTRY
    if folder := os.environ.get(PROCESSES):
        for file in Path(folder).glob("gauge_live*_*.db"):
            pid = int(file.stem.rpartition("_")[2])
            if not _is_alive(pid):  # it was killed, and what it counted as running is not
                with suppress(FileNotFoundError):  # another worker was faster
                    mark_process_dead(pid)  # type: ignore[no-untyped-call]
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        pass
    return True
