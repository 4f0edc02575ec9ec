"""Import FAISS, and explain what is wrong: packages for CPUs and for GPUs overwrite each other's files."""

from __future__ import annotations

import importlib
import warnings
from importlib import metadata
from typing import Any

from irkit.errors import MissingDependencyError

_PACKAGES = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs", "faiss-gpu-cu12", "faiss-gpu-cu11")


def installed_packages() -> list[str]:
    """Return the names of the installed packages that have the module ``faiss``."""
    return [name for name in _PACKAGES if any(metadata.distributions(name=name))]


def import_faiss() -> Any:
    """Import the module, or say what is wrong with it and which command repairs it.

    Two packages at once are a warning even if the import succeeds: the files are a mixture of both, and often
    without support for GPUs.

    Raises:
        MissingDependencyError: It cannot be imported, or most of it is missing.
    """
    packages = installed_packages()
    try:
        faiss: Any = importlib.import_module("faiss")  # its type stubs lack half of it
        faiss.index_factory  # noqa: B018 (the import of a folder without files succeeds, too)
    except Exception as error:  # of any type: files of two packages do not fit together
        raise MissingDependencyError(_wrong(packages, error)) from error
    if len(packages) > 1:
        warnings.warn(_wrong(packages, None), stacklevel=1)  # always from here, so that it is shown once
    return faiss


def need_gpu(faiss: Any) -> None:
    """Check that a module of FAISS can use a GPU.

    Raises:
        MissingDependencyError: It cannot use one.
    """
    if faiss.get_num_gpus():
        return
    packages = installed_packages()
    if len(packages) > 1:
        raise MissingDependencyError(f"index: device 'gpu': {_wrong(packages, None)}")
    if hasattr(faiss, "StandardGpuResources"):
        raise MissingDependencyError(
            "index: device is 'gpu', but FAISS finds none; set it to 'auto' or 'cpu', or look at nvidia-smi"
        )
    raise MissingDependencyError(
        "index: device 'gpu' needs faiss-gpu in the place of faiss-cpu. Install it with: pip uninstall -y "
        "faiss-cpu && pip install faiss-gpu. Without it, indexes 'flat' and 'plaid' use the GPU by torch"
    )


def _wrong(packages: list[str], error: Exception | None) -> str:
    """Say what is wrong with these packages, and which command leaves one of them."""
    gpu = [name for name in packages if name != "faiss-cpu"]
    keep = gpu[0] if gpu else "faiss-cpu"
    repair = f"pip uninstall -y {' '.join(packages or [keep])} && pip install {keep}"
    if len(packages) > 1:
        return (
            f"{' and '.join(packages)} are installed, whose files replace each other; keep one of them: "
            f"{repair}" + (f" (importing faiss failed: {error})" if error else "")
        )
    return f"importing faiss failed: {error}; install it anew: {repair}"
