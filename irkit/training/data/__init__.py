"""Examples to train on: from files of many formats to batches of token ids."""

from __future__ import annotations

from irkit.training.data.config import DataConfig
from irkit.training.data.formats import read_records
from irkit.training.data.record import Record, to_line, write_examples

__all__ = ["DataConfig", "Record", "read_records", "to_line", "write_examples"]
