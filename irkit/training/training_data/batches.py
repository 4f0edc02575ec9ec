"""Batches of examples.

Seed, epoch and step alone decide which examples make a batch, so that no data is read to decide. The collator
then tokenizes the texts of the examples, every document once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch

from irkit.core.ragged import Ragged
from irkit.errors import BadValueError
from irkit.model import Model
from irkit.training.example import Batch, Example
from irkit.training.training_data.dataset import Key, Mixture
from irkit.utils.cache import hash_of

Array = np.ndarray[Any, Any]

_AHEAD = 10_000  # how many examples of repeated queries are put off to later steps


class Batches:
    """Iterate over the batches of one process, each a list of keys of a `Mixture`.

    **Sampling.** A batch has examples of one dataset. Without weights, the dataset of each step is drawn in
    proportion to the examples it has left, until an epoch has had every example once. With weights, the
    dataset of each step is drawn by weight, and each dataset starts over when it ends. The examples of a
    dataset come in the order of `Dataset.order`. An example whose query is in the batch already is put off to
    the next batch.

    **Token budgets.** A step takes examples in order until the next one would exceed the budget, at least one
    per process. How many tokens an example has is an estimate, see `Dataset.measure`.

    **Processes.** Step ``k`` of all processes together has the examples of step ``k`` of one process with
    ``world_size`` times the batch. A step filled by tokens is shared out from the longest example to the
    shortest, each to the process with the fewest tokens so far.

    **Resume.** Order and draws depend on nothing but seed, epoch and step, and no data but sizes is read to
    decide them. So a training that resumes skips the steps it has taken without making their examples, and
    sees exactly what an uninterrupted one would see.

    Args:
        data: The datasets.
        batch_size: Examples in a batch of one process.
        tokens_per_batch: Tokens in a batch of one process, about, instead of ``batch_size``; call
            `Mixture.measure` first.
        seed: Seed of the order.
        rank: Number of this process.
        world_size: Number of processes.
        drop_last: Whether to leave out an incomplete step at the end of a dataset. One with fewer examples
            than processes is always left out.

    Raises:
        BadValueError: Both sizes are given or none, a number is impossible, or a dataset is too small for one
            batch.
    """

    def __init__(
        self,
        data: Mixture,
        *,
        batch_size: int | None = None,
        tokens_per_batch: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        # check the arguments
        size = batch_size if tokens_per_batch is None else tokens_per_batch
        if (batch_size is None) == (tokens_per_batch is None) or type(size) is not int or size < 1:
            raise BadValueError(
                f"batches: got batch_size={batch_size!r} and tokens_per_batch={tokens_per_batch!r}; expected "
                "one of them, a whole number of at least 1"
            )
        if not 0 <= rank < world_size:
            raise BadValueError(
                f"batches: rank {rank} of {world_size} processes; expected 0 to {world_size - 1}"
            )
        if tokens_per_batch is not None and any(dataset.sizes is None for dataset in data.datasets):
            what = (
                "data that is not streamed" if data.streaming else "the lengths of texts; call measure first"
            )
            raise BadValueError(f"batches: tokens_per_batch needs {what}")
        # settings, and the place in the data
        self._data, self._size, self._tokens = data, size, tokens_per_batch is not None
        self._seed, self._rank, self._world, self._drop_last = seed, rank, world_size, drop_last
        self._epoch, self._start, self._length = 0, 0, 0
        # keys of the queries, where some repeat: a batch holds each query once
        self._keys = [
            _repeated(dataset.query_keys()) if dataset.config.shuffle else None for dataset in data.datasets
        ]
        # every dataset must fill at least one batch
        for number, dataset in enumerate(data.datasets):
            if not dataset.streaming and next(self._pass(number, 0), None) is None:
                raise BadValueError(
                    f"batches: {dataset.config.source} has {len(dataset)} examples, too few for one batch of "
                    f"{size} in each of {world_size} processes; take smaller ones"
                )

    def set_epoch(self, epoch: int) -> None:
        """Iterate over this epoch next; each epoch has its own order and draws."""
        self._epoch = epoch

    def skip(self, steps: int) -> None:
        """Skip the first ``steps`` batches of the next iteration, without reading their data."""
        self._start = steps

    def __len__(self) -> int:
        if self._data.streaming:
            raise TypeError("a stream has no number of batches; give max_steps")
        if not self._length:
            numbers = range(len(self._data.datasets))
            if self._weights is None:
                self._length = sum(1 for number in numbers for _ in self._pass(number, 0))
            else:
                total = sum(
                    int(data.sizes.sum()) if self._tokens and data.sizes is not None else len(data)
                    for data in self._data.datasets
                )
                self._length = -(-total // (self._size * self._world))
        return self._length

    def __iter__(self) -> Iterator[list[Key]]:
        start, self._start = self._start, 0
        stop = None if self._data.streaming else len(self)
        for number, step, cycle in islice(self._steps(self._epoch), start, stop):
            yield [(number, index, cycle) for index in self._share(step, self._costs(number))]

    @property
    def _weights(self) -> Array | None:
        """Shares of the datasets, which sum to 1; None if every epoch has each example once."""
        weights = [dataset.config.weight for dataset in self._data.datasets]
        if weights[0] is None:
            return np.ones(1) if self._data.streaming else None
        return np.asarray(weights) / sum(filter(None, weights))

    def _steps(self, epoch: int) -> Iterator[tuple[int, list[int], int]]:
        """Yield steps without an end, each as (dataset number, example indices of all processes, cycle).

        The cycle is the number of the pass over the data, which decides all random draws of the examples.
        `__iter__` ends every epoch where the first one ends, however well examples fit into batches: resuming
        counts steps.
        """
        numbers, first = range(len(self._data.datasets)), epoch << 20
        rng, weights = np.random.default_rng([self._seed, epoch]), self._weights
        if weights is None:
            for cycle in count(first):
                yield from ((number, step, cycle) for number, step in self._all_once(cycle, rng))
        passes = [self._cycles(number, first) for number in numbers]
        while True:
            number = int(rng.choice(len(numbers), p=weights))
            yield number, *next(passes[number])

    def _all_once(self, cycle: int, rng: np.random.Generator) -> Iterator[tuple[int, list[int]]]:
        """Yield (dataset number, example indices of one step) until every example was used once.

        Datasets are drawn in proportion to the examples they have left. Incomplete steps may be dropped.
        """
        passes = [self._pass(number, cycle) for number in range(len(self._data.datasets))]
        left = np.asarray([len(dataset) for dataset in self._data.datasets])
        while left.any():
            number = int(rng.choice(len(left), p=left / left.sum())) if len(left) > 1 else 0
            step = next(passes[number], None)
            left[number] = 0 if step is None else left[number] - len(step)
            if step is not None:
                yield number, step

    def _cycles(self, number: int, first: int) -> Iterator[tuple[list[int], int]]:
        for cycle in count(first):
            yield from ((step, cycle) for step in self._pass(number, cycle))

    def _pass(self, number: int, cycle: int) -> Iterator[list[int]]:
        """Yield all examples of a dataset, in steps of all processes."""
        waiting, costs = deque[int](), self._costs(number)
        order = self._data.datasets[number].order(self._seed, number, cycle)
        while step := self._fill(waiting, order, self._keys[number], costs):
            incomplete = costs is None and len(step) < self._size * self._world
            if len(step) >= self._world and not (incomplete and self._drop_last):
                yield step

    def _costs(self, number: int) -> Any:
        """Return the tokens of each example of a dataset, as a sequence; None if batches count examples."""
        sizes = self._data.datasets[number].sizes if self._tokens else None
        return sizes.data if isinstance(sizes, np.ndarray) else sizes

    def _fill(
        self, waiting: deque[int], order: Iterator[int], keys: memoryview | None, costs: Any
    ) -> list[int]:
        """Return the example indices of the next step, up to the budget.

        If ``keys`` is given, no key occurs twice. Examples that are put off go to ``waiting``, which the next
        call takes first.
        """
        step, used, budget = list[int](), 0, self._size * self._world
        seen, passed = set[int](), list[int]()
        for index in chain(_drained(waiting), order):
            if keys is not None and keys[index] in seen:
                passed.append(index)
                if len(passed) == _AHEAD:
                    break
                continue
            cost = 1 if costs is None else costs[index]
            if len(step) >= self._world and used + cost > budget:
                passed.append(index)
                break
            step.append(index)
            used += cost
            if keys is not None:
                seen.add(keys[index])
        waiting.extendleft(reversed(passed))
        return step

    def _share(self, step: list[int], costs: Any) -> list[int]:
        """Return the examples of a step that this process takes."""
        if self._world == 1:
            return step
        if costs is None:
            return list(map(int, np.array_split(step, self._world)[self._rank]))
        groups, loads = [list[int]() for _ in range(self._world)], [0] * self._world
        for cost, index in sorted(((costs[index], index) for index in step), reverse=True):
            rank = loads.index(min(loads))
            groups[rank].append(index)
            loads[rank] += cost
        return groups[self._rank]


def _drained(items: deque[int]) -> Iterator[int]:
    while items:
        yield items.popleft()


def _repeated(keys: Array | None) -> memoryview | None:
    """Return the keys if one of them is repeated, else None."""
    if keys is None or len(np.unique(keys)) == len(keys):
        return None
    return keys.data


class Collator:
    """Joins examples to a `Batch`.

    Examples with the same query share the documents that are relevant to it. Documents with the same text are
    one document of the batch.

    Args:
        model: The model whose tokenizers, prompts and lengths are used.
        texts: Whether batches keep the texts.

    Examples:
        >>> batch = Collator(model)([Example("a query", ("relevant", "not"))])  # doctest: +SKIP
    """

    def __init__(self, model: Model, texts: bool = False) -> None:
        self.model, self.texts = model, texts

    def __call__(self, examples: Sequence[Example]) -> Batch:
        """Join examples.

        Raises:
            BadValueError: The batch is empty, or only some examples have scores.
        """
        scored = sum(example.scores is not None for example in examples)
        if not examples or scored not in (0, len(examples)):
            raise BadValueError(
                f"batch: {scored} of {len(examples)} examples have scores; expected all or none"
            )
        # number the documents by their texts
        rows: dict[str, int] = {}
        own = _pad(
            [[rows.setdefault(text, len(rows)) for text in example.documents] for example in examples], -1
        )
        queries, documents = [example.query for example in examples], list(rows)
        # names by which another process knows which documents of this one are relevant
        names, known = torch.zeros(len(rows), dtype=torch.int64), []
        for example, row in zip(examples, own.tolist(), strict=True):
            ids = [hash_of(name) for name in example.ids or example.documents]
            names[row[: len(ids)]] = torch.tensor(ids)
            known.append([*ids[: example.positives], *map(hash_of, example.relevant)])
        model = self.model
        return Batch(
            model.pipeline("query").tokenize(queries),
            model.pipeline("document").tokenize(documents),
            own,
            torch.tensor([example.positives for example in examples]),
            _relevant(examples, own, len(rows)),
            torch.tensor([hash_of(text) for text in documents]),
            _pad([example.scores or () for example in examples], math.nan).float() if scored else None,
            (queries, documents) if self.texts else None,
            names,
            Ragged.from_rows(known, dtype=torch.int64),
        )


def _relevant(examples: Sequence[Example], own: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``(b, d)`` bool: which documents are relevant; equal queries have equal rows."""
    known: dict[str, set[int]] = {example.query: set() for example in examples}
    numbers: dict[str, set[int]] = {}  # of the documents by name; a name may have two texts, and two a text
    for example, row in zip(examples, own.tolist(), strict=True):
        known[example.query].update(row[: example.positives])
        for name, number in zip(example.ids or example.documents, row, strict=False):
            numbers.setdefault(name, set()).add(number)
    for example in examples:
        for name in example.relevant & numbers.keys():
            known[example.query] |= numbers[name]
    relevant = torch.zeros(len(examples), width, dtype=torch.bool)
    for row, example in zip(relevant, examples, strict=True):
        row[list(known[example.query])] = True
    return relevant


def _pad(rows: Sequence[Sequence[float]], filler: float) -> torch.Tensor:
    """Return ``(n, longest)``: float64, or int64 if all numbers are integers."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])
