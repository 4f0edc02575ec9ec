"""What a training says of its data before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from irkit.training.training_data import DataConfig, Dataset, Mixture, TrainingRow, describe_data, open_data
from irkit.training.training_data.row_formats import ROWS, name_parts
from irkit.training.training_data.row_sequences import Stream


def write(path: Path, *rows: Any) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("rows", "columns", "example"),
    [
        (
            ["query\tgood\tbad", "q one\ta\tb"],
            "tuples: query: query; relevant: good; others: bad",
            "query 'q one'; relevant 'a'; other 'b'",
        ),
        (
            [["q", *"abcdef"]],
            "tuples: query: column 1; relevant: column 2; others: column 3, column 4, column 5, ... column 7",
            "query 'q'; relevant 'a'; other 'b' and 4 more",
        ),
        (
            ["2.5\t1\tq\ta\tb"],
            "vienna: query: column 3; relevant: column 4; others: column 5; scores: column 1, column 2",
            "query 'q'; relevant 'a'; other 'b'; scores 2.5, 1",
        ),
        (
            [{"anchor": "q", "label": 0.25, "text": "a"}],
            "columns: query: anchor; relevant: text; scores: label",
            "query 'q'; relevant 'a'; scores 0.25",
        ),
        (
            [{"query": "q " * 99, "pos": ["a"], "neg": ["", "c"], "extra": 1}],
            "flagembedding: query: query; relevant: pos; others: neg",
            "query '" + "q " * 28 + "...'; relevant 'a'; other '' and 1 more",
        ),
    ],
)
def test_columns_and_the_first_example_are_named(
    tmp_path: Path, rows: list[Any], columns: str, example: str
) -> None:
    for streaming in (False, True):
        suffix = "tsv" if isinstance(rows[0], str) else "jsonl"
        path = write(tmp_path / f"data.{suffix}", *rows)
        said = list(describe_data(open_data([DataConfig(source=path, streaming=streaming)])))
        assert said == [f"{path}, read as {columns}", f"first example: {example}"]


def test_every_part_of_a_row_has_a_name() -> None:
    for name in ROWS.keys() - {"columns", "tuples", "nway", "vienna", "distillation"}:
        keys = {"query": "", "pos": [], "neg": [], "document_ids": [], "positive_passages": [], "scores": []}
        assert {"query", "relevant"} <= name_parts(keys, name).keys(), name
    assert name_parts(["q", ["a", 1], ["b", 0]], "nway")["relevant"] == ["column 2"]


def test_judgments_and_what_is_read_once(notes: Path) -> None:
    said = list(describe_data(open_data([DataConfig(source=str(notes), split="test")])))
    assert said[0] == f"{notes}, read as beir"
    assert said[1].startswith("first example: query '")
    row = TrainingRow("", "q", (), ("a",))
    stream = Stream("-", lambda: iter([row]), once=True)
    assert list(describe_data(Mixture([Dataset(stream, DataConfig(source="-", streaming=True))]))) == []
