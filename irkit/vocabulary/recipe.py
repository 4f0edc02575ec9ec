"""One recipe for a model on a new vocabulary: a training recipe that says first how it gets there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from irkit.config import Config, listed
from irkit.training.model_recipe import SparseModel
from irkit.training.recipe import StagedRecipe
from irkit.vocabulary.adaptation import AdaptationConfig
from irkit.vocabulary.calibration import CalibrationConfig
from irkit.vocabulary.domain import DomainConfig
from irkit.vocabulary.initialization import TransferConfig

__all__ = ["VocabularyConfig", "VocabularyRecipe"]


class VocabularyConfig(Config):
    """How a model gets onto another vocabulary, before it is fine-tuned.

    Attributes:
        texts: Corpora, one or several: those that a vocabulary is trained on, that frequencies of tokens are
            counted on, that adaptation reads if it does not say otherwise, and calibration.
        target: Directory or name of a model or of a tokenizer; or what a vocabulary is trained with.
        initialization: How new tokens begin.
        adaptation: Masked language modelling; None leaves it out.
        calibration: Of activations; None leaves it out.
    """

    texts: Annotated[list[str], BeforeValidator(listed), Field(min_length=1)]
    target: str | DomainConfig
    initialization: TransferConfig = TransferConfig()
    adaptation: AdaptationConfig | None
    calibration: CalibrationConfig | None = CalibrationConfig()

    @model_validator(mode="before")
    @classmethod
    def _read_same_texts(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        adaptation = given.get("adaptation", {})
        if isinstance(adaptation, Mapping) and "texts" in given:
            adaptation = {"texts": given["texts"], **adaptation}
        return {**given, "adaptation": adaptation}


class VocabularyRecipe(StagedRecipe):
    """A training of a sparse model with what comes before: a new vocabulary, adaptation and calibration.

    All other keys are those of `TrainRecipe`. Without ``data`` there is no fine-tuning, and the result is
    what calibration leaves. ``train.seed`` is the seed of all that does not say another.

    Attributes:
        model: The model that is moved, as `Model.sparse` makes it.
        vocabulary: Onto what, and how; None leaves the model as it is, for comparison.

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

    model: SparseModel
    vocabulary: VocabularyConfig | None

    @model_validator(mode="before")
    @classmethod
    def _share_seed(cls, given: Any) -> Any:
        """Put the seed of the training into the other stages, where these are mappings without one."""
        if not isinstance(given, Mapping):
            return given
        train, vocabulary = given.get("train"), given.get("vocabulary")
        seed = train.get("seed") if isinstance(train, Mapping) else None
        if seed is None or not isinstance(vocabulary, Mapping):
            return given
        vocabulary = dict(vocabulary)
        initialization, adaptation = vocabulary.get("initialization", {}), vocabulary.get("adaptation", {})
        if isinstance(initialization, Mapping):
            vocabulary["initialization"] = {"seed": seed, **initialization}
        if isinstance(adaptation, Mapping) and isinstance(adaptation.get("train", {}), Mapping):
            vocabulary["adaptation"] = {**adaptation, "train": {"seed": seed, **adaptation.get("train", {})}}
        return {**given, "vocabulary": vocabulary}

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if not self.data and self.vocabulary is None:
            raise ValueError("neither 'vocabulary' nor 'data' is given, so there is nothing to do")
        if self.vocabulary is not None and self.model.vocabulary is not None:
            raise ValueError("'model.vocabulary' and 'vocabulary' exclude each other; leave one out")
        return self
