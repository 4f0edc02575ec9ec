"""Skip what this machine cannot run, spare the user's cache, and the garbage collector what lasts."""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Import and collect without garbage collections, and exempt what is there by then from all later ones.

    It is 700,000 objects, which last as long as the session. A full collection looks through them in 0.5 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep nothing in the home of who runs the tests; the workers of pytest-xdist share what they compile."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["IRKIT_CACHE"] = str(shared / "cache")


def pytest_unconfigure() -> None:
    """Let the end of the process release everything; libraries report what is left as leaks."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make two thirds of the variants of ``sampled`` tests slow; skip ``gpu`` tests without a CUDA device."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for variants in tests.values():
        variants.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))  # in no order of their parameters
        for item in variants[-(-len(variants) // 3) :]:
            item.add_marker(pytest.mark.slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
