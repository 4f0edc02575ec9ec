"""irkit: train, index and search every kind of neural retriever.

Names are loaded when first used, so that ``import irkit`` takes milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from irkit.encoder import Encoder
    from irkit.evaluation import evaluate
    from irkit.model import Model
    from irkit.ragged import Ragged
    from irkit.representation import Dense, MultiVector, Sparse
    from irkit.retriever import Retriever
    from irkit.run import Run
    from irkit.scoring import score

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
    "evaluate": "evaluation",
    "score": "scoring",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'irkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"irkit.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
