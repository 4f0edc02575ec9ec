"""Recipe of a sparse model on a new vocabulary, as one YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from irkit.config import Config, as_list
from irkit.training.domain_vocabulary import DomainConfig
from irkit.training.model_recipe import SparseModel
from irkit.training.train_recipe import StagedRecipe
from irkit.vocabulary.adaptation import AdaptationConfig
from irkit.vocabulary.calibration import CalibrationConfig
from irkit.vocabulary.initialization import TransferConfig


class VocabularyConfig(Config):
    """How a model is moved onto another vocabulary, before it is fine-tuned.

    Attributes:
        texts: One corpus or several. A new vocabulary is trained on them, the frequencies of tokens are
            counted in them, and adaptation and calibration read them; adaptation can name others.
        target: Directory or name of a model or of a tokenizer; or how to train a vocabulary.
        initialization: Embeddings of new tokens.
        head_only: Replace only the output matrix, see `irkit.vocabulary.head_only`: the model reads its own
            tokens, and gives weights to tokens of the target. Adaptation is then EMLM.
        adaptation: Masked language modelling; None leaves it out.
        calibration: Calibration of activations; None leaves it out.
    """

    texts: Annotated[list[str], BeforeValidator(as_list), Field(min_length=1)]
    target: str | DomainConfig
    initialization: TransferConfig = TransferConfig()
    head_only: bool = False
    adaptation: AdaptationConfig | None
    calibration: CalibrationConfig | None = CalibrationConfig()

    @model_validator(mode="before")
    @classmethod
    def _share_texts(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        adaptation = data.get("adaptation", {})
        if isinstance(adaptation, Mapping) and "texts" in data:
            adaptation = {"texts": data["texts"], **adaptation}
        return {**data, "adaptation": adaptation}


class VocabularyRecipe(StagedRecipe):
    """Move of a sparse model to a new vocabulary, adaptation, calibration, and training of a retriever.

    For all other keys see `TrainRecipe`. Without ``data`` the recipe ends with the calibrated model.
    ``train.seed`` is the default seed of all stages.

    Attributes:
        model: The model that is moved, made by `Model.sparse`.
        vocabulary: The new vocabulary and the stages after it; None keeps the vocabulary, for comparison.

    Examples:
        >>> recipe = VocabularyRecipe.resolve(
        ...     {
        ...         "model": {"kind": "sparse", "name": "answerdotai/ModernBERT-base"},
        ...         "vocabulary": {"target": "google-bert/bert-base-uncased", "texts": "wikipedia.jsonl"},
        ...         "train": {"seed": 7},
        ...     }
        ... )
        >>> recipe.vocabulary.adaptation.masking.emphasis, recipe.vocabulary.initialization.seed
        (2.0, 7)
    """

    seeded: ClassVar[tuple[str, ...]] = ("vocabulary.initialization", "vocabulary.adaptation.train")

    model: SparseModel
    vocabulary: VocabularyConfig | None

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if not self.data and self.vocabulary is None:
            raise ValueError("neither 'vocabulary' nor 'data' is given, so there is nothing to do")
        if self.vocabulary is not None and self.model.vocabulary is not None:
            raise ValueError("'model.vocabulary' and 'vocabulary' exclude each other; leave one out")
        return self
