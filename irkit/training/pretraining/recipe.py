"""One recipe for a retriever from its pre-training on: what on which texts, then a training recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from irkit.config import Config, listed
from irkit.training.arguments import TrainingArguments, check_text_arguments
from irkit.training.masking import MaskingConfig
from irkit.training.new_model import NewModel
from irkit.training.pretraining.objectives import Objective
from irkit.training.recipe import StagedRecipe
from irkit.vocabulary.domain import DomainConfig

__all__ = ["PretrainRecipe", "PretrainingConfig"]

_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-4,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.02},
    "warmup_steps": 0.015,  # 3,000 of 200,000
    "weight_decay": 0.01,
}


class PretrainingConfig(Config):
    """What a model is trained on before it is trained to retrieve: texts, and nothing else.

    Attributes:
        texts: Corpora, one or several, see `irkit.training.texts.read_texts`; also those that a vocabulary is
            trained on.
        objectives: One or several; their weighted sum is minimised.
        masking: Which tokens of the input are hidden; None is none, as in the paper.
        max_length: Tokens at which texts are cut.
        validation: Corpus whose loss is measured during training; None measures nothing.
        validation_texts: So many of it, the first.
        train: Arguments by the names of `irkit.training.TrainingArguments`; the schedule of the paper is the
            default of what is not given, ``max_steps`` must be.

    Source: TITE, sections 3.3 and 4.1.
    """

    texts: Annotated[list[str], BeforeValidator(listed), Field(min_length=1)]
    objectives: Annotated[list[Objective], BeforeValidator(listed), Field(min_length=1)]
    masking: MaskingConfig | None = None
    max_length: PositiveInt = 512
    validation: str | None = None
    validation_texts: PositiveInt = 500
    train: dict[str, Any]

    @model_validator(mode="after")
    def _check_train(self) -> Self:
        if check_text_arguments(self.train, self.validation).get("max_steps", -1) == -1:
            raise ValueError("train.max_steps: texts have no end, they are read again; say how many to take")
        return self

    @model_validator(mode="after")
    def _check_objectives(self) -> Self:
        kinds = [each.kind for each in self.objectives]
        if twice := [kind for kind in kinds if kinds.count(kind) > 1]:
            raise ValueError(f"objective {twice[0]!r} is there twice; expected different ones")
        if "masked_language_modeling" in kinds and self.masking is None:
            raise ValueError(
                "masked_language_modeling asks for the tokens that 'masking' hides, which is left out; "
                "expected it, such as {rate: 0.3}"
            )
        return self

    def arguments(self, output_dir: str | Path) -> TrainingArguments:
        """Arguments of the trainer.

        Args:
            output_dir: Where checkpoints go.

        Raises:
            ConfigError: Values do not fit each other or the machine.
        """
        values = _DEFAULTS | self.train
        if "lr_scheduler_type" in self.train:
            values["lr_scheduler_kwargs"] = self.train.get("lr_scheduler_kwargs", {})  # not those of another
        if self.validation is not None:
            values = {"eval_steps": 0.1, "eval_on_start": True} | values
        return TrainingArguments.parse(values, output_dir, "pretraining: train")


class PretrainRecipe(StagedRecipe):
    """A training of a model with what comes before: its pre-training on texts.

    All other keys are those of `irkit.training.TrainRecipe`. Without ``data`` there is no fine-tuning, and
    the result is the pre-trained model. ``train.seed`` is the seed of all that does not say another.

    Attributes:
        pretraining: On what, and how; None leaves it out, for comparison.

    Examples:
        >>> recipe = PretrainRecipe.resolve(
        ...     {
        ...         "model": {"kind": "new", "preset": "2-late", "tokenizer": "bert-base-uncased"},
        ...         "pretraining": {
        ...             "texts": "hf:HuggingFaceFW/fineweb-edu",
        ...             "objectives": [{"kind": "masked_auto_encoding"}, {"kind": "bag_of_words"}],
        ...             "train": {"max_steps": 200000},
        ...         },
        ...         "train": {"seed": 7},
        ...     }
        ... )
        >>> recipe.pretraining.train["seed"], recipe.pretraining.max_length
        (7, 512)
    """

    pretraining: PretrainingConfig | None

    @model_validator(mode="before")
    @classmethod
    def _share_seed(cls, given: Any) -> Any:
        """Put the seed of the training into the pre-training, where that is a mapping without one."""
        if not isinstance(given, Mapping):
            return given
        train, pretraining = given.get("train"), given.get("pretraining")
        seed = train.get("seed") if isinstance(train, Mapping) else None
        if seed is None or not isinstance(pretraining, Mapping):
            return given
        if not isinstance(before := pretraining.get("train", {}), Mapping):
            return given
        return {**given, "pretraining": {**pretraining, "train": {"seed": seed, **before}}}

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if self.pretraining is None and not self.data:
            raise ValueError("neither 'pretraining' nor 'data' is given, so there is nothing to do")
        if self.pretraining is None and isinstance(self.trained_vocabulary, DomainConfig):
            raise ValueError("'model.tokenizer' is trained on the texts of 'pretraining', which is left out")
        return self

    @property
    def trained_vocabulary(self) -> DomainConfig | None:
        """How the vocabulary is trained, if it is."""
        if isinstance(self.model, NewModel) and isinstance(self.model.tokenizer, DomainConfig):
            return self.model.tokenizer
        return None
