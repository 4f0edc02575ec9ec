"""Training of every kind of model: examples, losses on score matrices, one trainer.

Read in this order::

    train_recipe.py      a training as one YAML file; its parts: model_recipe.py, training_arguments.py, ...
    train_run.py         run a recipe: check everything, train, measure, save
    run_directory.py     the directory of a run, and how every run resumes
    training_data/       sources of examples, and batches of them; example.py: an example, a batch
    train_step.py        a batch in, the loss out; scores.py: what losses see; gather.py: several processes
    losses/, regularizers.py, interaction.py
    trainer.py           the training loop; checkpoints.py, learning_rates.py, collapse.py
    validation.py        judged collections; measuring.py measures on them; result_files.py: evaluation.jsonl
    text_training.py     training on texts without labels: masking.py, masked_lm_step.py, logit_losses.py
    pretraining/         objectives on texts, and recipes that start from random weights: new_model.py
    negatives.py, labels.py, teachers.py    examples from searches and from other models
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from irkit.utils.lazy import lazy_names

if TYPE_CHECKING:
    from irkit.training.example import Batch as Batch
    from irkit.training.example import Example as Example
    from irkit.training.labels import label as label
    from irkit.training.negatives import mine as mine
    from irkit.training.scores import Scores as Scores
    from irkit.training.train_recipe import TrainRecipe as TrainRecipe
    from irkit.training.train_run import train as train
    from irkit.training.train_step import TrainStep as TrainStep
    from irkit.training.trainer import Trainer as Trainer
    from irkit.training.training_arguments import TrainingArguments as TrainingArguments
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
