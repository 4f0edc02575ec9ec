"""Texts without labels, for pre-training objectives: read front to back, shuffled, over and over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from irkit.data import Source, read_documents
from irkit.data.files import name_of
from irkit.data.remote import load_hf
from irkit.data.source import DOCUMENT_FIELDS, file_source
from irkit.errors import BadValueError
from irkit.training.data.records import Stream

__all__ = ["Corpus", "first_texts", "read_corpora", "read_texts", "text_loader"]

_SAMPLE = 200  # texts of which tokens are counted
_SPECIAL = 2  # tokens of every text
_WHOLE = 1 << 20


def read_texts(source: str | Path) -> Source[str]:
    """Read the texts of a corpus, titles in front, streamed; ids are not needed.

    Args:
        source: See `irkit.data`; a file of JSON lines may hold texts alone: ``{"text": "..."}``.

    Raises:
        StorageError: There is no such file or collection.
        BadValueError: While iterating: a line is malformed; the message names file and line.

    Examples:
        >>> next(iter(read_texts("scifact")))[:60]  # doctest: +SKIP
        'Microstructural development of human newborn cerebral white'
    """
    name = name_of(source)
    if name.startswith("hf:"):
        rows = load_hf(name, streaming=True)
        return Source(name, lambda: ((number, _text(dict(row))) for number, row in enumerate(rows, 1)))
    if name.startswith("ir_datasets:") or Path(name).is_dir():
        documents = read_documents(name)
        return Source(name, lambda: ((number, each.full_text) for number, each in documents.numbered()))
    return file_source(name, DOCUMENT_FIELDS, _text)


@dataclass(frozen=True)
class Corpus:
    """The texts of a corpus that is read more than once: for a check, in each process, again at its end.

    Attributes:
        name: See `read_texts`.
    """

    name: str

    def check(self) -> None:
        """Raise StorageError if it is not there, BadValueError if it can be read only once."""
        if read_texts(self.name).once:
            raise BadValueError(
                f"reading {self.name}: a training reads its texts more than once, and this can be read only "
                "once; save it to a file"
            )

    def __iter__(self) -> Iterator[str]:
        return iter(read_texts(self.name))


def read_corpora(sources: Sequence[str]) -> Source[str]:
    """Read the texts of several corpora, one after the other, as often as needed.

    Raises:
        StorageError: One is not there.
        BadValueError: One can be read only once, as standard input.
    """
    corpora = [Corpus(source) for source in sources]
    for corpus in corpora:
        corpus.check()
    return Source(", ".join(sources), lambda: enumerate(chain.from_iterable(corpora), 1))


def first_texts(texts: Source[str], count: int) -> list[str]:
    """The first texts that are not blank.

    Raises:
        BadValueError: There is none.
    """
    found = list(islice((text for text in texts if text.strip()), count))
    if not found:
        raise BadValueError(f"reading {texts.name}: there are no texts in it")
    return found


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
    """Batches of texts without an end, for `irkit.training.Trainer`, which then needs ``max_steps``.

    Step ``k`` of all processes together has the texts of step ``k`` of one process with as many times the
    batch. Training that goes on passes over the texts it has had without tokenizing them.

    Args:
        sources: Read in turn, a text of each, those that ended left out; all of them again when all ended.
            Each can be iterated again. Neighbours are shuffled: 10,000 texts.
        collate: Makes a batch of texts and their numbers, which are never the same twice.
        batch_size: Texts in a batch of one process.
        tokens_per_batch: Instead: about how many tokens, as many as the bytes of texts make expect;
            ``collate`` then has a ``tokenizer`` and a ``max_length``.
        seed: Of the order.
        share: Number of this process, and how many there are.
        workers: Processes beside this one that read and tokenize ahead; the batches are the same.

    Raises:
        BadValueError: Both sizes are given or none, or one is impossible; or workers shall read what can be
            read only once.
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
    measure = None if tokens_per_batch is None else _Measure(stream, collate)
    order = _Order(stream.block, size, measure, seed, *share)
    start = torch.Generator()  # or iterating would draw from that of the dropout
    return DataLoader(
        _Numbered(stream), batch_sampler=order, collate_fn=collate, generator=start, num_workers=workers
    )


def _in_turn(sources: Sequence[Iterable[str]]) -> Iterator[str]:
    """A text of each source and so on; blank ones are left out."""
    left = [iter(source) for source in sources]
    while left:
        found = [(each, next(each, None)) for each in left]
        left = [each for each, text in found if text is not None]
        yield from (text for _, text in found if text is not None and text.strip())


def _text(record: dict[str, Any]) -> str:
    text = next((record[name] for name in DOCUMENT_FIELDS.texts if name in record), None)
    title = record.get("title") or ""
    if not isinstance(text, str) or not isinstance(title, str):
        raise BadValueError(
            f"expected a string under {', '.join(DOCUMENT_FIELDS.texts)}, got {text!r:.60}; other keys: "
            f"{', '.join(record)}"
        )
    return f"{title} {text}".strip()


class _Numbered(Dataset[tuple[int, str]]):
    """Texts with their places in the stream."""

    def __init__(self, stream: Stream[str]) -> None:
        self.stream = stream

    def __getitem__(self, place: int) -> tuple[int, str]:
        return place, self.stream[place]


class _Measure:
    """About how many tokens a text has: its bytes times what the first texts have."""

    def __init__(self, stream: Stream[str], collate: Any) -> None:
        self._stream, self._tokenizer = stream, collate.tokenizer
        self._limit = collate.max_length or self._tokenizer.max_length or math.inf

    def __call__(self, place: int) -> int:
        return math.ceil(min(self._limit, _bytes(self._stream[place]) * self._rate + _SPECIAL))

    @cached_property
    def _rate(self) -> float:
        texts = [self._stream[place] for place in range(_SAMPLE)]
        tokens = self._tokenizer(texts, max_length=_WHOLE).lengths - _SPECIAL
        return float(tokens.sum()) / max(1, sum(map(_bytes, texts)))


def _bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


class _Order:
    """Places of the texts of each batch of one process, without an end."""

    def __init__(
        self,
        block: int,
        size: int,
        measure: Callable[[int], int] | None,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._block, self._size, self._measure = block, size, measure
        self._seed, self._rank, self._world = seed, rank, world_size

    def __len__(self) -> int:
        raise TypeError("a stream has no number of batches; give max_steps")

    def __iter__(self) -> Iterator[list[int]]:
        places = self._places()
        if self._measure is not None:
            yield from self._filled(places, self._measure)
        while True:
            step = list(islice(places, self._size * self._world))
            yield step[self._rank * self._size : (self._rank + 1) * self._size]

    def _places(self) -> Iterator[int]:
        for block in count():
            order = np.random.default_rng([self._seed, block]).permutation(self._block)
            yield from (order + block * self._block).tolist()

    def _filled(self, places: Iterator[int], measure: Callable[[int], int]) -> Iterator[list[int]]:
        """As many texts as fit into all processes, at least one for each."""
        place, budget, world = next(places), self._size * self._world, self._world
        while True:
            step, used = list[tuple[int, int]](), 0
            while len(step) < world or used + measure(place) <= budget:
                step.append((measure(place), place))
                used, place = used + step[-1][0], next(places)
            yield [place for _, place in step] if world == 1 else self._share(step)

    def _share(self, step: list[tuple[int, int]]) -> list[int]:
        """What this process has of sizes and places: the longest first, each to who has the least."""
        shares, loads = [list[int]() for _ in range(self._world)], [0] * self._world
        for size, place in sorted(step, reverse=True):
            rank = loads.index(min(loads))
            shares[rank].append(place)
            loads[rank] += size
        return shares[self._rank]
