"""A recipe: everything that a training run is made of, as one YAML file says it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from irkit.config import Config, listed, read_mapping, with_overrides
from irkit.errors import BadTypeError, ConfigError
from irkit.training.arguments import TrainingArguments, first_evaluating
from irkit.training.data import DataConfig
from irkit.training.interaction import Interaction, MaxSim
from irkit.training.losses import Loss, Matryoshka
from irkit.training.model_recipe import ModelRecipe
from irkit.training.regularizers import Regularizer
from irkit.training.validation import EvaluationConfig

__all__ = ["StagedRecipe", "TrainRecipe"]

_OF_FINE_TUNING = ("losses", "regularizers", "evaluation")


class TrainRecipe(Config):
    """What is trained on what, and how.

    Attributes:
        model: Its name, or how a new one is made.
        data: Sources of examples, one or several.
        losses: One or several; their sum is minimised.
        regularizers: What else is added to it.
        matryoshka: Dimensions whose leading part shall do as well.
        interaction: How token vectors are compared, where that is not MaxSim.
        train: Arguments by the names of `TrainingArguments`.
        evaluation: Judged collections to measure the model on.

    Examples:
        >>> recipe = TrainRecipe.resolve(
        ...     {
        ...         "model": "sentence-transformers/all-MiniLM-L6-v2",
        ...         "data": {"source": "scifact", "split": "train", "documents": 1},
        ...         "losses": {"kind": "infonce"},
        ...     },
        ...     ["train.learning_rate=1e-5"],
        ... )
        >>> recipe.train
        {'learning_rate': 1e-05}
    """

    model: ModelRecipe
    data: Annotated[list[DataConfig], BeforeValidator(listed), Field(min_length=1)]
    losses: Annotated[list[Loss], BeforeValidator(listed), Field(min_length=1)]
    regularizers: Annotated[list[Regularizer], BeforeValidator(listed)] = Field(default_factory=list)
    matryoshka: Matryoshka | None = None
    interaction: Interaction = MaxSim()
    train: dict[str, Any] = Field(default_factory=dict)
    evaluation: Annotated[list[EvaluationConfig], BeforeValidator(listed)] = Field(default_factory=list)

    @classmethod
    def resolve(cls, recipe: Self | Mapping[str, Any] | str | Path, overrides: Iterable[str] = ()) -> Self:
        """Put a recipe together and check its keys and values.

        Args:
            recipe: A YAML or JSON file, its keys and values, or a recipe.
            overrides: ``"key=value"``, such as ``"train.learning_rate=2e-5"``, that go before.

        Raises:
            ConfigError: A key or a value is unknown, or missing.
            StorageError: The file cannot be read.
        """
        source = str(recipe) if isinstance(recipe, str | Path) else "recipe"
        if isinstance(recipe, str | Path):
            data: Mapping[str, Any] = read_mapping(recipe)
        elif isinstance(recipe, Config):
            data = recipe.model_dump(mode="json")
        elif isinstance(recipe, Mapping):
            data = recipe
        else:
            raise BadTypeError(f"recipe: got {recipe!r:.60}, expected a file or keys and values")
        if isinstance(data.get("model"), str | Path):
            data = {**data, "model": {"name": str(data["model"])}}
        resolved = cls.parse(with_overrides(data, overrides), source)
        asked = first_evaluating(TrainingArguments.check(resolved.train, f"{source}: train"))
        if asked and all(each.at_end for each in resolved.evaluation):
            raise ConfigError(
                f"{source}: train.{asked} needs a collection to evaluate on; give `evaluation` one "
                "without at_end, or leave it out"
            )
        return resolved

    def arguments(self, output_dir: str | Path) -> TrainingArguments:
        """Arguments of the trainer, which evaluates where the recipe has something to evaluate on.

        It then also ends with the best model that it has seen, unless ``train`` says what is saved.

        Raises:
            ConfigError: A name is unknown, or a value is impossible.
        """
        defaults: dict[str, Any] = {}
        if during := [each for each in self.evaluation if not each.at_end]:
            defaults["eval_strategy"] = "steps" if self.train.get("eval_steps") else "epoch"
            defaults["metric_for_best_model"] = f"eval_{during[0].measure}"
            if self.train.get("eval_strategy") != "no":
                defaults["load_best_model_at_end"] = not {"save_strategy", "save_steps"} & self.train.keys()
        return TrainingArguments.parse(defaults | self.train, output_dir)


class StagedRecipe(TrainRecipe):
    """A training of a retriever with other stages before it; without ``data`` there are only these."""

    data: Annotated[list[DataConfig], BeforeValidator(listed)] = Field(default_factory=list)
    losses: Annotated[list[Loss], BeforeValidator(listed)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.data and not self.losses:
            raise ValueError("'data' is given, but no 'losses' to train with")
        unused = [name for name in _OF_FINE_TUNING if getattr(self, name) and not self.data]
        if unused:
            raise ValueError(f"{unused[0]!r} is given, but no 'data' to fine-tune on")
        return self

    def fine_tuning(self, model: ModelRecipe) -> TrainRecipe:
        """The training of the retriever, of the model that the other stages have made."""
        parts = {name: getattr(self, name) for name in TrainRecipe.model_fields}
        return TrainRecipe(**parts | {"model": model})
