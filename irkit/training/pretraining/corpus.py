"""Texts without labels, for pre-training objectives: read front to back, shuffled, over and over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from irkit.data import Source, read_documents
from irkit.data.catalogues import load_hf
from irkit.data.collection_files import source_name
from irkit.data.source import DOCUMENT_FIELDS, file_source
from irkit.errors import BadValueError
from irkit.model import Model
from irkit.training.training_data import DataConfig, Dataset, Mixture
from irkit.training.training_data.row_sequences import Stream, endless_order
from irkit.training.training_data.token_estimate import SAMPLE_SIZE, TokenEstimate


def read_texts(source: str | Path) -> Source[str]:
    """Read the texts of a corpus, each with its title in front, streamed; ids are not needed.

    Args:
        source: See `irkit.data`; a file of JSON lines may hold texts alone: ``{"text": "..."}``.

    Raises:
        StorageError: The file or the collection does not exist.
        BadValueError: While iterating: a line is malformed; the message names file and line.

    Examples:
        >>> next(iter(read_texts("scifact")))[:60]  # doctest: +SKIP
        'Microstructural development of human newborn cerebral white'
    """
    name = source_name(source)
    if name.startswith("hf:"):
        rows = load_hf(name, streaming=True)
        return Source(name, lambda: ((number, _text(dict(row))) for number, row in enumerate(rows, 1)))
    if name.startswith("ir_datasets:") or Path(name).is_dir():
        documents = read_documents(name)
        return Source(name, lambda: ((number, item.full_text) for number, item in documents.numbered()))
    return file_source(name, DOCUMENT_FIELDS, _text)


def check_corpora(names: Iterable[str]) -> None:
    """Check that corpora can be read more than once.

    Raises:
        StorageError: A corpus is missing.
        BadValueError: A corpus can be read only once, such as standard input.
    """
    for name in names:
        if read_texts(name).once:
            raise BadValueError(
                f"reading {name}: a training reads its texts more than once, and this can be read only "
                "once; save it to a file"
            )


def read_corpora(names: Sequence[str]) -> Source[str]:
    """Read the texts of corpora, one after the other, as often as needed; errors as in `check_corpora`."""
    check_corpora(names)
    return Source(", ".join(names), lambda: enumerate(chain.from_iterable(map(read_texts, names)), 1))


def first_texts(texts: Source[str], count: int) -> list[str]:
    """Return the first texts that are not blank.

    Raises:
        BadValueError: All texts are blank, or the corpus is empty.
    """
    first = list(islice((text for text in texts if text.strip()), count))
    if not first:
        raise BadValueError(f"reading {texts.name}: there are no texts in it")
    return first


def read_in_turn(names: Sequence[str]) -> Iterator[str]:
    """Read one text of each corpus in turn, without blank ones and without corpora that have ended."""
    remaining = [iter(read_texts(name)) for name in names]
    while remaining:
        texts = [next(source, None) for source in remaining]
        remaining = [source for source, text in zip(remaining, texts, strict=True) if text is not None]
        yield from (text for text in texts if text is not None and text.strip())


def _text(record: dict[str, Any]) -> str:
    text = next((record[name] for name in DOCUMENT_FIELDS.texts if name in record), None)
    title = record.get("title") or ""
    if not isinstance(text, str) or not isinstance(title, str):
        raise BadValueError(
            f"expected a string under {', '.join(DOCUMENT_FIELDS.texts)}, got {text!r:.60}; other keys: "
            f"{', '.join(record)}"
        )
    return f"{title} {text}".strip()


def open_texts(names: Sequence[str], max_length: int | None) -> Mixture:
    """Open corpora as a `TextDataset`, which reads them in turn; errors as in `check_corpora`."""
    check_corpora(names)
    stream = Stream[str](", ".join(names), partial(read_in_turn, names))
    return Mixture([TextDataset(stream, max_length)])


class TextDataset(Dataset):
    """Endless texts for `irkit.training.Trainer`, which needs ``max_steps``; an example is a numbered text.

    Blocks of 10,000 texts are shuffled. No number comes twice, also when the texts are read again.

    Args:
        stream: Texts.
        max_length: Number of tokens to which texts are cut; None cuts them where the tokenizer does.
    """

    def __init__(self, stream: Stream[str], max_length: int | None = None) -> None:
        super().__init__(stream, DataConfig(source=stream.name, streaming=True))  # type: ignore[arg-type]
        self.stream, self.max_length = stream, max_length

    def order(self, seed: int, number: int, cycle: int) -> Iterator[int]:  # noqa: D102
        return endless_order(self.stream.block, seed)

    def example(self, index: int, seed: Sequence[int] = (0,)) -> Any:  # noqa: D102
        return index, self.stream[index]

    def measure(self, model: Model) -> None:
        """Prepare to estimate the tokens of texts from their bytes, by the first texts as a sample."""
        texts = [self.stream[position] for position in range(SAMPLE_SIZE)]
        max_length = self.max_length or model.tokenizer.max_length
        self.sizes = _Costs(self.stream, TokenEstimate.from_sample(texts, model.tokenizer, max_length))


@dataclass(frozen=True)
class _Costs:
    """Estimates the number of tokens of the text at a position."""

    stream: Stream[str]
    estimate: TokenEstimate

    def __getitem__(self, position: int) -> int:
        n_bytes = len(self.stream[position].encode(errors="replace"))
        return math.ceil(float(self.estimate(n_bytes)))
