"""Which FAISS is installed: the packages for CPUs and for GPUs share one folder, and the last one wins it."""

from __future__ import annotations

import importlib
import warnings
from importlib import metadata
from typing import Any

from irkit.errors import MissingDependencyError

__all__ = ["import_faiss", "installed_packages", "need_gpu"]

_PACKAGES = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs", "faiss-gpu-cu12", "faiss-gpu-cu11")


def installed_packages() -> list[str]:
    """Names of the installed packages that bring the module ``faiss``."""
    found = []
    for name in _PACKAGES:
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found.append(name)
    return found


def import_faiss() -> Any:
    """The module, or what is wrong with it and the command that repairs it.

    Two packages at once are told even where the import succeeds: what is left is of both of them, and often
    without the GPU.

    Raises:
        MissingDependencyError: It cannot be imported, or most of it is missing.
    """
    found = installed_packages()
    try:
        faiss: Any = importlib.import_module("faiss")  # its type stubs lack half of it
        faiss.index_factory  # noqa: B018 (a folder that lost its files to an uninstall is imported, too)
    except Exception as error:  # of any type: two packages disagree wherever their files meet
        raise MissingDependencyError(_wrong(found, error)) from error
    if len(found) > 1:
        warnings.warn(_wrong(found, None), stacklevel=1)  # of one place, so that it is shown once
    return faiss


def need_gpu(faiss: Any) -> None:
    """Check that the module can use a GPU.

    Raises:
        MissingDependencyError: It cannot.
    """
    if faiss.get_num_gpus():
        return
    found = installed_packages()
    if len(found) > 1:
        raise MissingDependencyError(f"index: device 'gpu': {_wrong(found, None)}")
    if hasattr(faiss, "StandardGpuResources"):
        raise MissingDependencyError(
            "index: device is 'gpu', but FAISS finds none; set it to 'auto' or 'cpu', or look at nvidia-smi"
        )
    raise MissingDependencyError(
        "index: device 'gpu' needs faiss-gpu in the place of faiss-cpu. Install it with: pip uninstall -y "
        "faiss-cpu && pip install faiss-gpu. Without it, indexes 'flat' and 'plaid' use the GPU by torch"
    )


def _wrong(found: list[str], error: Exception | None) -> str:
    """What is wrong with these packages, and the command that leaves one of them."""
    gpu = [name for name in found if name != "faiss-cpu"]
    keep = gpu[0] if gpu else "faiss-cpu"
    repair = f"pip uninstall -y {' '.join(found or [keep])} && pip install {keep}"
    if len(found) > 1:
        return (
            f"{' and '.join(found)} are installed, whose files replace each other; keep one of them: {repair}"
            + (f" (importing faiss failed: {error})" if error else "")
        )
    return f"importing faiss failed: {error}; install it anew: {repair}"
