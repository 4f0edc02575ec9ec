"""irkit: train, index and search every kind of neural retriever.

Names are loaded when first used, so that ``import irkit`` takes milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from irkit.lazy import lazy_names

if TYPE_CHECKING:
    from irkit.encoder import Encoder
    from irkit.evaluation import evaluate
    from irkit.fusion import fuse
    from irkit.hybrid import Hybrid
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
    "Hybrid",
    "Model",
    "MultiVector",
    "Ragged",
    "Retriever",
    "Run",
    "Sparse",
    "evaluate",
    "fuse",
    "score",
]

_HOME = {
    "Dense": "representation",
    "Encoder": "encoder",
    "Hybrid": "hybrid",
    "Model": "model",
    "MultiVector": "representation",
    "Ragged": "ragged",
    "Retriever": "retriever",
    "Run": "run",
    "Sparse": "representation",
    "evaluate": "evaluation",
    "fuse": "fusion",
    "score": "scoring",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
