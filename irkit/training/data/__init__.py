"""Examples to train on: from files of many formats to batches of token ids.

`formats` makes a `Record` of each row of a source, which `records` and `sources` open; `texts` finds what
ids stand for; `dataset` chooses the documents of an `irkit.training.example.Example`; `batches` says which
examples come when, and `collate` makes token ids of them.
"""

from __future__ import annotations

from irkit.training.data.batches import Batches, make_batches
from irkit.training.data.checks import check
from irkit.training.data.collate import Collator
from irkit.training.data.config import DataConfig
from irkit.training.data.dataset import Dataset, Mixture, open_data
from irkit.training.data.record import Record, to_line, write_examples
from irkit.training.data.sources import read_records
from irkit.training.data.texts import Texts, TextStore

__all__ = [
    "Batches",
    "Collator",
    "DataConfig",
    "Dataset",
    "Mixture",
    "Record",
    "TextStore",
    "Texts",
    "check",
    "make_batches",
    "open_data",
    "read_records",
    "to_line",
    "write_examples",
]
