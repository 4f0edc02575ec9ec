"""Recipe of a training: model, data, losses, arguments of the trainer and evaluation, as one YAML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from irkit.config import Config, as_list, read_mapping, with_overrides
from irkit.errors import BadTypeError, ConfigError, StorageError
from irkit.training.interaction import Interaction, MaxSim
from irkit.training.losses import Loss, Matryoshka
from irkit.training.model_recipe import ModelRecipe, trained_model
from irkit.training.regularizers import Regularizer
from irkit.training.several_step import HeadTraining, SelfDistillation
from irkit.training.training_arguments import TrainingArguments, first_evaluating
from irkit.training.training_data import DataConfig
from irkit.training.validation import Collections

_OF_FINE_TUNING = ("losses", "regularizers", "evaluation")


class TrainRecipe(Config):
    """Training of a model on examples.

    Attributes:
        model: Name of a model, or how to make a new one.
        data: One source of examples or several.
        losses: One or several; their weighted sum is minimised.
        regularizers: Penalties that are added to the sum.
        matryoshka: Widths to which vectors are cut, all of which are trained.
        interaction: How token vectors are compared; MaxSim by default.
        train: Arguments by the names of `TrainingArguments`.
        evaluation: Judged collections that the model is measured on. A model with several heads is measured
            by each head, and by the sum of their scores with the weights of ``self_distillation``, which is
            called ``fusion``.
        prepare: For files and folders that the recipe reads, the command that makes each or brings it. An
            error about a missing file names the command; irkit does not run it.
        heads: For a model with several heads: how each is trained, by name. A head without losses of its own
            takes the losses of the recipe.
        self_distillation: For a model with several heads: how they learn from the sum of their scores; None
            if they do not.

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
    data: Annotated[list[DataConfig], BeforeValidator(as_list), Field(min_length=1)]
    losses: Annotated[list[Loss], BeforeValidator(as_list), Field(min_length=1)]
    regularizers: Annotated[list[Regularizer], BeforeValidator(as_list)] = Field(default_factory=list)
    matryoshka: Matryoshka | None = None
    interaction: Interaction = MaxSim()
    train: dict[str, Any] = Field(default_factory=dict)
    evaluation: Collections = Field(default_factory=list)
    prepare: dict[str, str] = Field(default_factory=dict)
    heads: dict[str, HeadTraining] = Field(default_factory=dict)
    self_distillation: SelfDistillation | None = None

    @classmethod
    def resolve(cls, recipe: Self | Mapping[str, Any] | str | Path, overrides: Iterable[str] = ()) -> Self:
        """Make a recipe and check its keys and values.

        Args:
            recipe: A YAML or JSON file, its keys and values, or a recipe.
            overrides: Changes such as ``"train.learning_rate=2e-5"``.

        Raises:
            ConfigError: A key or a value is unknown, or missing.
            StorageError: The file cannot be read.
        """
        source = "recipe"
        data: Any = recipe.model_dump(mode="json") if isinstance(recipe, Config) else recipe
        if isinstance(recipe, str | Path):
            source, data = str(recipe), read_mapping(recipe)
        elif not isinstance(data, Mapping):
            raise BadTypeError(f"recipe: got {recipe!r:.60}, expected a file or keys and values")
        if isinstance(data.get("model"), str | Path):
            data = {**data, "model": {"name": str(data["model"])}}
        resolved = cls.parse(with_overrides(data, overrides), source)
        argument = first_evaluating(TrainingArguments.check(resolved.train, f"{source}: train"))
        if argument and all(config.at_end for config in resolved.evaluation):
            raise ConfigError(
                f"{source}: train.{argument} needs a collection to evaluate on; give `evaluation` one "
                "without at_end, or leave it out"
            )
        return resolved

    def check_files(self) -> None:
        """Raise StorageError if a file of ``prepare`` is missing."""
        for path, command in self.prepare.items():
            if not Path(path).exists():
                raise StorageError(f"recipe: there is no {path} in {Path.cwd()}; it comes from: {command}")

    def arguments(self, output_dir: str | Path) -> TrainingArguments:
        """Make the arguments of the trainer.

        If the recipe has a collection to evaluate on during training, the trainer evaluates on this
        collection. It then also ends with the best model, unless ``train`` says which checkpoints are saved.

        Raises:
            ConfigError: A name is unknown, or a value is impossible.
        """
        defaults: dict[str, Any] = {}
        if during := [config for config in self.evaluation if not config.at_end]:
            defaults["eval_strategy"] = "steps" if self.train.get("eval_steps") else "epoch"
            defaults["metric_for_best_model"] = f"eval_{during[0].measure}"
            if self.train.get("eval_strategy") != "no":
                takes_last = {"save_strategy", "save_steps"} & self.train.keys()
                defaults["load_best_model_at_end"] = (
                    not takes_last or self.train.get("early_stopping_patience") is not None
                )
        return TrainingArguments.parse(defaults | self.train, output_dir)


class StagedRecipe(TrainRecipe):
    """Training of a retriever after other stages; without ``data`` there are only the other stages.

    Attributes:
        seeded: Dotted keys of the mappings that get ``train.seed`` as their ``seed``, unless they have a
            seed.
    """

    seeded: ClassVar[tuple[str, ...]] = ()

    data: Annotated[list[DataConfig], BeforeValidator(as_list)] = Field(default_factory=list)
    losses: Annotated[list[Loss], BeforeValidator(as_list)] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _share_seed(cls, data: Any) -> Any:
        train = data.get("train") if isinstance(data, Mapping) else None
        if isinstance(train, Mapping) and train.get("seed") is not None:
            for path in cls.seeded:
                first, *rest = path.split(".")
                if isinstance(data.get(first), Mapping):
                    data = {**data, first: _with_seed(data[first], rest, train["seed"])}
        return data

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.data and not self.losses:
            raise ValueError("'data' is given, but no 'losses' to train with")
        unused = [name for name in _OF_FINE_TUNING if getattr(self, name) and not self.data]
        if unused:
            raise ValueError(f"{unused[0]!r} is given, but no 'data' to fine-tune on")
        return self

    def fine_tuning(self, model: ModelRecipe, folder: Path | None = None) -> TrainRecipe:
        """Return the recipe of the last stage, the training of the retriever.

        Args:
            model: The model that the recipe names.
            folder: Directory of the model that the earlier stages made from ``model``; None without earlier
                stages.
        """
        parts = {name: getattr(self, name) for name in TrainRecipe.model_fields}
        return TrainRecipe(**parts | {"model": model if folder is None else trained_model(model, folder)})


def _with_seed(node: Any, path: list[str], seed: Any) -> Any:
    """Return ``node`` with a default seed in the mapping at ``path``; other values stay as they are."""
    if not isinstance(node, Mapping):
        return node
    if not path:
        return {"seed": seed, **node}
    return {**node, path[0]: _with_seed(node.get(path[0], {}), path[1:], seed)}
