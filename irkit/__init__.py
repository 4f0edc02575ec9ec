"""irkit: train, index and search every kind of neural retriever.

Names are loaded when first used, so that ``import irkit`` takes milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from irkit.utils.lazy import lazy_names

if TYPE_CHECKING:
    from irkit.core.ragged import Ragged
    from irkit.core.representation import Dense, MultiVector, Sparse
    from irkit.core.scoring import score
    from irkit.encoder import Encoder
    from irkit.evaluation.fusion import fuse
    from irkit.evaluation.measures import evaluate
    from irkit.evaluation.run import Run
    from irkit.model import Model
    from irkit.retrieval.hybrid import Hybrid
    from irkit.retrieval.retriever import Retriever

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
    "Dense": "core.representation",
    "Encoder": "encoder",
    "Hybrid": "retrieval.hybrid",
    "Model": "model",
    "MultiVector": "core.representation",
    "Ragged": "core.ragged",
    "Retriever": "retrieval.retriever",
    "Run": "evaluation.run",
    "Sparse": "core.representation",
    "evaluate": "evaluation.measures",
    "fuse": "evaluation.fusion",
    "score": "core.scoring",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
