"""Training of every kind of model: examples, losses on score matrices, one trainer.

In the order in which a reader meets them::

    recipe.py       what is trained on what: one YAML file; model_recipe.py, arguments.py: its parts
    running.py      a recipe carried out, from its checks to the saved model
    data/           sources of examples, and batches of them; example.py: what an example and a batch are
    step.py         a batch in, the loss out; scores.py: what losses see; gather.py: what processes share
    masked_lm.py    the same for texts without labels; masking.py, texts.py: its batches; text_training.py
    pretraining/    other objectives on texts, and the recipe of a model from its beginning: new_model.py
    stages.py       what recipes of several stages leave behind
    pretraining/    objectives that need texts alone; logit_losses.py: losses over a vocabulary, fused
    losses/, regularizers.py, interaction.py
    trainer.py      steps, on transformers' Trainer; checkpoints.py, lora.py
    validation.py   measures of the model of the moment
    negatives.py, labels.py, teachers.py    examples made from searches and from other models
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from irkit.lazy import lazy_names

if TYPE_CHECKING:
    from irkit.training.arguments import TrainingArguments
    from irkit.training.example import Batch, Example
    from irkit.training.labels import label
    from irkit.training.negatives import mine
    from irkit.training.recipe import TrainRecipe
    from irkit.training.running import train
    from irkit.training.scores import Scores
    from irkit.training.step import TrainStep
    from irkit.training.trainer import Trainer

__all__ = [
    "Batch",
    "Example",
    "Scores",
    "TrainRecipe",
    "TrainStep",
    "Trainer",
    "TrainingArguments",
    "label",
    "mine",
    "train",
]

_HOME = {
    "Batch": "example",
    "Example": "example",
    "Scores": "scores",
    "TrainRecipe": "recipe",
    "TrainStep": "step",
    "Trainer": "trainer",
    "TrainingArguments": "arguments",
    "label": "labels",
    "mine": "negatives",
    "train": "running",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
