"""Texts without labels, for pre-training objectives: read front to back, shuffled, over and over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from irkit.data import Source, read_documents
from irkit.data.collection_files import source_name
from irkit.data.source import DOCUMENT_FIELDS, file_source, load_hf
from irkit.errors import BadValueError
from irkit.training.training_data import Batches, DataConfig, Dataset, Mixture
from irkit.training.training_data.row_sequences import Stream, endless_order
from irkit.training.training_data.token_estimate import SAMPLE_SIZE, TokenEstimate


def read_texts(source: str | Path) -> Source[str]:
    """Read the texts of a corpus, each with its title in front, streamed; ids are not needed.

    Args:
        source: See `irkit.data`; a file of JSON lines may hold texts alone: ``{"text": "..."}``.

    Raises:
        StorageError: There is no such file or collection.
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


@dataclass(frozen=True)
class Corpus:
    """Texts that are read more than once: for a check, in each process, and again at their end.

    Attributes:
        name: See `read_texts`.
    """

    name: str

    def __iter__(self) -> Iterator[str]:
        return iter(read_texts(self.name))


def open_corpora(sources: Iterable[str]) -> list[Corpus]:
    """Open corpora that can be read more than once.

    Raises:
        StorageError: A corpus is missing.
        BadValueError: A corpus can be read only once, such as standard input.
    """
    for name in sources:
        if read_texts(name).once:
            raise BadValueError(
                f"reading {name}: a training reads its texts more than once, and this can be read only "
                "once; save it to a file"
            )
    return [Corpus(name) for name in sources]


def read_corpora(sources: Sequence[str]) -> Source[str]:
    """Read the texts of corpora, one after the other, as often as needed; errors as in `open_corpora`."""
    corpora = open_corpora(sources)
    return Source(", ".join(sources), lambda: enumerate(chain.from_iterable(corpora), 1))


def first_texts(texts: Source[str], count: int) -> list[str]:
    """Return the first texts that are not blank.

    Raises:
        BadValueError: There is none.
    """
    first = list(islice((text for text in texts if text.strip()), count))
    if not first:
        raise BadValueError(f"reading {texts.name}: there are no texts in it")
    return first


def text_loader(
    sources: Sequence[Iterable[str]],
    collate: Callable[[Sequence[tuple[int, str]]], Any],
    *,
    batch_size: int | None = None,
    tokens_per_batch: int | None = None,
    seed: int = 0,
    share: tuple[int, int] = (0, 1),
    workers: int = 0,
) -> DataLoader[Any]:
    """Return endless batches of texts for `irkit.training.Trainer`, which then needs ``max_steps``.

    Step ``k`` of all processes together has the texts of step ``k`` of one process with as many times the
    batch. A training that resumes passes over the texts it has had without tokenizing them.

    Args:
        sources: Iterables of texts that can be iterated again. They are read in turn, one text of each,
            without those that have ended; when all have ended, all start again. Blocks of 10,000 texts are
            shuffled.
        collate: Makes a batch of texts and their numbers, which are never the same twice.
        batch_size: Texts in a batch of one process.
        tokens_per_batch: Tokens in a batch of one process, about, instead of ``batch_size``; they are
            estimated from bytes, for which ``collate`` needs a ``tokenizer`` and a ``max_length``.
        seed: Seed of the order.
        share: Number of this process, and the number of processes.
        workers: Processes beside this one that read and tokenize ahead; the batches are the same.

    Raises:
        BadValueError: Both sizes are given or none, or a size is impossible; or workers are asked for and a
            source can be read only once.
    """
    size = batch_size if tokens_per_batch is None else tokens_per_batch
    if (batch_size is None) == (tokens_per_batch is None) or size is None or size < 1:
        raise BadValueError(
            f"texts: got batch_size={batch_size!r} and tokens_per_batch={tokens_per_batch!r}; expected one "
            "of them, at least 1"
        )
    name = ", ".join(str(getattr(source, "name", "texts")) for source in sources)
    once = any(getattr(source, "once", False) or iter(source) is source for source in sources)
    if once and workers:
        raise BadValueError(f"texts: {name} can be read only once, and each of {workers} workers reads it")
    stream = Stream[str](name, partial(_in_turn, sources), once)
    data = Mixture([TextDataset(stream, None if tokens_per_batch is None else _Costs(stream, collate))])
    return DataLoader(
        data,  # type: ignore[arg-type]
        batch_sampler=Batches(
            data,
            batch_size=batch_size,
            tokens_per_batch=tokens_per_batch,
            seed=seed,
            rank=share[0],
            world_size=share[1],
        ),
        collate_fn=collate,
        generator=torch.Generator(),  # or iterating would draw from the generator of the dropout
        num_workers=workers,
    )


def _in_turn(sources: Sequence[Iterable[str]]) -> Iterator[str]:
    """Yield one text of each source in turn, without blank ones."""
    remaining = [iter(source) for source in sources]
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


class TextDataset(Dataset):
    """A stream of texts as a dataset for `Batches`: an example is a text with its position."""

    def __init__(self, stream: Stream[str], costs: Any = None) -> None:
        super().__init__(stream, DataConfig(source=stream.name, streaming=True))  # type: ignore[arg-type]
        self.sizes = costs

    def order(self, seed: int, number: int, cycle: int) -> Iterator[int]:  # noqa: D102
        return endless_order(self.rows.block, seed)  # type: ignore[union-attr]

    def example(self, index: int, seed: Sequence[int] = (0,)) -> Any:  # noqa: D102
        return index, self.rows[index]


class _Costs:
    """Estimate the tokens of the text at a position; the first texts are the sample for the estimate."""

    def __init__(self, stream: Stream[str], collate: Any) -> None:
        self._stream, self._collate = stream, collate
        self._estimate: TokenEstimate | None = None

    def __getitem__(self, position: int) -> int:
        if self._estimate is None:
            tokenizer, texts = self._collate.tokenizer, [self._stream[i] for i in range(SAMPLE_SIZE)]
            max_length = self._collate.max_length or tokenizer.max_length
            self._estimate = TokenEstimate.from_sample(texts, tokenizer, max_length)
        n_bytes = len(self._stream[position].encode(errors="replace"))
        return math.ceil(float(self._estimate(n_bytes)))
