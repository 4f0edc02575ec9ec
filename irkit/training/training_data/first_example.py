"""Describe the data of a training for its user: which column became what, and the first example."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from textwrap import shorten

from irkit.data.catalogues import load_hf
from irkit.data.collection_files import read_lines
from irkit.training.training_data.data_config import DataConfig
from irkit.training.training_data.dataset import Dataset, Mixture
from irkit.training.training_data.row_formats import detect, name_parts
from irkit.training.training_data.row_sequences import Stream
from irkit.training.training_data.row_sources import LineParser, detect_source, split_line

_WIDTH = 60  # characters of a text that are shown
_COLUMNS = 4  # columns of a part that are shown
_SCORES = 4  # scores that are shown


def describe_data(data: Mixture) -> Iterator[str]:
    """Yield two lines for each dataset: which column holds which part, and the first example.

    A dataset that can be read only once is left out.
    """
    for dataset in data.datasets:
        if not (isinstance(dataset.rows, Stream) and dataset.rows.once):
            yield f"{dataset.config.source}, read as {_describe_columns(dataset.config)}"
            yield f"first example: {_describe_example(dataset)}"


def _describe_columns(config: DataConfig) -> str:
    """Return the format of a source, and for rows the columns or keys of each part."""
    kind, names = detect_source(config), None
    if kind == "lines":
        first = [line for _, line in islice(read_lines(config.source), 2)]
        parser = LineParser.detect(config, first)
        split = [split_line(line, parser.is_json, config.source) for line in first]
        row, kind = split[-1 if parser.has_header else 0], parser.format
        names = [str(name) for name in split[0]] if parser.has_header else None
    elif kind == "table":
        row = dict(next(iter(load_hf(config.source, streaming=True))))
        kind = detect(row) if config.format == "auto" else config.format
    else:  # judgments and runs have fixed columns
        return kind
    parts = name_parts(row, kind, names).items()
    return f"{kind}: " + "; ".join(f"{part}: {_list(columns)}" for part, columns in parts)


def _list(columns: list[str]) -> str:
    listed = columns if len(columns) <= _COLUMNS else [*columns[: _COLUMNS - 1], f"... {columns[-1]}"]
    return ", ".join(listed)


def _describe_example(dataset: Dataset) -> str:
    """Return the texts and scores of the first example of a dataset, shortened."""
    example = dataset.example(0)
    relevant, others = example.documents[: example.positives], example.documents[example.positives :]
    lines = [f"query {_quote(example.query)}"]
    for name, texts in (("relevant", relevant), ("other", others)):
        more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
        lines += [f"{name} {_quote(texts[0])}{more}"] if texts else []
    if example.scores is not None:
        more = " ..." if len(example.scores) > _SCORES else ""
        lines.append(f"scores {', '.join(f'{score:.4g}' for score in example.scores[:_SCORES])}{more}")
    return "; ".join(lines)


def _quote(text: str) -> str:
    return repr(shorten(text, _WIDTH, placeholder=" ...")) if text.strip() else repr(text)
