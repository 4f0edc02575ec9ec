"""irkit: train, index and search every kind of neural retriever.

Names are loaded when first used, so that ``import irkit`` takes milliseconds.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from irkit.encoder import Encoder
    from irkit.evaluate import evaluate
    from irkit.model import Model
    from irkit.ragged import Ragged
    from irkit.representation import Dense, MultiVector, Sparse
    from irkit.retriever import Retriever
    from irkit.run import Run
    from irkit.score import score

__version__ = "0.1.0"

__all__ = [
    "Dense",
    "Encoder",
    "Model",
    "MultiVector",
    "Ragged",
    "Retriever",
    "Run",
    "Sparse",
    "evaluate",
    "score",
]

_HOME = {
    "Dense": "representation",
    "Encoder": "encoder",
    "Model": "model",
    "MultiVector": "representation",
    "Ragged": "ragged",
    "Retriever": "retriever",
    "Run": "run",
    "Sparse": "representation",
    "evaluate": "evaluate",
    "score": "score",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'irkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"irkit.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


class _Package(ModuleType):
    """Keeps `irkit.score` the function: importing the module of that name would put the module there."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
