"""Load a teacher, which is any `irkit.retrieval.scorer.Scorer`, by name."""

from __future__ import annotations

from pathlib import Path

from irkit.errors import BadValueError
from irkit.index.directory import MANIFEST
from irkit.model import Model
from irkit.model.cross_encoder import Activation, CrossEncoder
from irkit.retrieval.retriever import Retriever
from irkit.retrieval.scorer import IndexScorer, ModelScorer, Scorer

_CROSS_ENCODER = "cross-encoder:"


def load_teacher(
    choice: str | Path | Retriever | Model | Scorer,
    *,
    device: str | None = None,
    dtype: str = "float32",
    max_length: int | None = None,
    activation: Activation = "none",
) -> Scorer:
    """Load the teacher that ``choice`` names.

    Args:
        choice: A `Retriever` or the directory of an index; a model, or an argument of
            `Model.from_pretrained`; ``"cross-encoder:NAME"``; or any `Scorer`, which is returned as it is.
        device: Device of a model that is loaded here.
        dtype: Precision of a model that is loaded here.
        max_length: Setting of a `CrossEncoder`.
        activation: Setting of a `CrossEncoder`.

    Raises:
        StorageError: The index or the model does not exist.
        BadValueError: ``max_length`` or ``activation`` is set, but the teacher is not a cross-encoder.
    """
    if isinstance(choice, str) and choice.startswith(_CROSS_ENCODER):
        name = choice.removeprefix(_CROSS_ENCODER)
        return CrossEncoder(name, device=device, dtype=dtype, max_length=max_length, activation=activation)
    if max_length is not None or activation != "none":
        raise BadValueError(
            f"teacher {choice}: max_length and activation are settings of a cross-encoder; leave them out or "
            f"name one as {_CROSS_ENCODER}NAME"
        )
    if isinstance(choice, str | Path):
        folder = Path(choice)
        is_model = any((folder / name).exists() for name in ("config.json", "modules.json"))
        choice = (
            Retriever.load(folder, device=device, dtype=dtype)
            if (folder / MANIFEST).exists() and not is_model
            else Model.from_pretrained(choice, device=device, dtype=dtype)
        )
    if isinstance(choice, Retriever):
        return IndexScorer(choice.collection)
    return ModelScorer(choice) if isinstance(choice, Model) else choice
