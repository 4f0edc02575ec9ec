"""Recipe of a retriever that is first pre-trained on texts, as one YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from irkit.config import as_list
from irkit.training.domain_vocabulary import DomainConfig
from irkit.training.new_model import NewModel
from irkit.training.pretraining.objectives import Objective
from irkit.training.text_training import TextTrainingConfig
from irkit.training.train_recipe import StagedRecipe
from irkit.training.training_arguments import TrainingArguments

_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-4,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.02},
    "warmup_steps": 0.015,  # 3,000 of 200,000
    "weight_decay": 0.01,
}


class PretrainingConfig(TextTrainingConfig):
    """Training of a model on texts without labels, before it is trained to retrieve.

    Attributes:
        texts: One corpus or several, see `irkit.training.pretraining.corpus.read_texts`; a new vocabulary is
            trained on them, too.
        objectives: One or several; their weighted sum is minimised.
        masking: Which tokens of the input are hidden; None hides none, as in the paper.
        max_length: Texts are cut to this number of tokens.
        validation: Corpus whose loss is measured during training; None measures nothing.
        validation_texts: Number of texts of ``validation`` that are used, the first ones.
        train: Arguments by the names of `irkit.training.TrainingArguments`. ``max_steps`` is required; the
            defaults of the others are the schedule of the paper.

    Source: TITE, sections 3.3 and 4.1.
    """

    objectives: Annotated[list[Objective], BeforeValidator(as_list), Field(min_length=1)]
    train: dict[str, Any]

    @model_validator(mode="after")
    def _check_pretraining(self) -> Self:
        if TrainingArguments.check(self.train).get("max_steps", -1) == -1:
            raise ValueError("train.max_steps: texts have no end, they are read again; say how many to take")
        kinds = [objective.kind for objective in self.objectives]
        if twice := [kind for kind in kinds if kinds.count(kind) > 1]:
            raise ValueError(f"objective {twice[0]!r} is there twice; expected different ones")
        if "masked_language_modeling" in kinds and self.masking is None:
            raise ValueError(
                "masked_language_modeling asks for the tokens that 'masking' hides, which is left out; "
                "expected it, such as {rate: 0.3}"
            )
        return self

    def arguments(self, output_dir: str | Path) -> TrainingArguments:
        """Make the arguments of the trainer.

        Args:
            output_dir: Directory of the checkpoints.

        Raises:
            ConfigError: Values do not fit each other or the machine.
        """
        values = self.evaluation_defaults() | _DEFAULTS | self.train
        if "lr_scheduler_type" in self.train:  # the default arguments belong to the default schedule
            values["lr_scheduler_kwargs"] = self.train.get("lr_scheduler_kwargs", {})
        return TrainingArguments.parse(values, output_dir, "pretraining: train")


class PretrainRecipe(StagedRecipe):
    """Pre-training of a model on texts, then the training of a retriever.

    For all other keys see `irkit.training.TrainRecipe`. Without ``data`` the recipe ends with the pre-trained
    model. ``train.seed`` is the default seed of all stages.

    Attributes:
        pretraining: The pre-training; None leaves it out, for comparison.

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

    seeded: ClassVar[tuple[str, ...]] = ("pretraining.train",)

    pretraining: PretrainingConfig | None

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if self.pretraining is None and not self.data:
            raise ValueError("neither 'pretraining' nor 'data' is given, so there is nothing to do")
        if self.pretraining is None and isinstance(self.trained_vocabulary, DomainConfig):
            raise ValueError("'model.tokenizer' is trained on the texts of 'pretraining', which is left out")
        return self

    @property
    def trained_vocabulary(self) -> DomainConfig | None:
        """Vocabulary that is trained before the model is made, or None."""
        tokenizer = self.model.tokenizer if isinstance(self.model, NewModel) else None
        return tokenizer if isinstance(tokenizer, DomainConfig) else None
