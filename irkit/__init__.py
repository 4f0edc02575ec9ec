"""irkit: train, index and search every kind of neural retriever.

Names are loaded when first used, so that ``import irkit`` takes milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from irkit.utils.lazy import lazy_names

if TYPE_CHECKING:
    from irkit.core.ragged import Ragged as Ragged
    from irkit.core.representation import Dense as Dense
    from irkit.core.representation import MultiVector as MultiVector
    from irkit.core.representation import Sparse as Sparse
    from irkit.core.scoring import score as score
    from irkit.encoder import Encoder as Encoder
    from irkit.evaluation.fusion import fuse as fuse
    from irkit.evaluation.measures import evaluate as evaluate
    from irkit.evaluation.run import Run as Run
    from irkit.model import Model as Model
    from irkit.retrieval.hybrid import Hybrid as Hybrid
    from irkit.retrieval.retriever import Retriever as Retriever
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)

__version__ = "0.1.0"
