"""Examples to train on: from files of many formats to batches of token ids.

`row_sources` and `row_sequences` open a source, and `row_formats` makes a `TrainingRow` of each of its rows.
`text_store` looks up the texts of ids. `dataset` chooses the documents of an
`irkit.training.example.Example`. `batches` decides which examples come when, and tokenizes them.
"""

from __future__ import annotations

from irkit.training.training_data.batches import Batches, Collator
from irkit.training.training_data.data_config import DataConfig
from irkit.training.training_data.dataset import Dataset, Mixture, check, open_data
from irkit.training.training_data.first_example import describe_data
from irkit.training.training_data.row_formats import TrainingRow, to_line, write_examples
from irkit.training.training_data.row_sources import read_training_rows

__all__ = [
    "Batches",
    "Collator",
    "DataConfig",
    "Dataset",
    "Mixture",
    "TrainingRow",
    "check",
    "describe_data",
    "open_data",
    "read_training_rows",
    "to_line",
    "write_examples",
]
