"""Steps of a token budget, and iterators that keep tokenizer, encoder and copies at work at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from irkit.arguments import brief, is_count
from irkit.core.ragged import Ragged
from irkit.core.representation import Dense, MultiVector, Representation, Sparse
from irkit.encoder import Encoder
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.errors import BadValueError
from irkit.formats import AnyEncoder
from irkit.heads import Head, Side

_MOST_WORKERS = 16  # threads that run steps; more of them wait for Python's lock

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def hidden_states(
    encoder: AnyEncoder | InferenceFreeEncoder,
    head: Head,
    tokens: Ragged,
    attended: Tensor | None,
    side: Side,
) -> Ragged:
    """Encode ``tokens`` for a head, which decides whether the encoder's pooling layers work on ``side``.

    Args:
        encoder: Gives hidden states.
        head: Takes them.
        tokens: Ragged int64 ids, as the head expands them.
        attended: ``(n,)`` number of leading tokens per row that are attended to; None is all.
        side: Side of the texts.
    """
    if isinstance(encoder, Encoder) and not head.pools(side):
        return encoder(tokens, attended, pooled=False)
    return encoder(tokens, attended)


def plan_steps(lengths: Tensor, budget: int, batch_size: int | None = None) -> list[Tensor]:
    """Cut rows, the longest first, into steps of at most ``budget`` tokens or one row.

    Args:
        lengths: ``(n,)`` tokens per row.
        budget: Largest number of tokens in a step.
        batch_size: Largest number of rows in a step; None is any number.

    Returns:
        Row numbers per step; one empty step if there are no rows.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    steps, start, used, most = [], 0, 0, batch_size or len(order)
    for position, length in enumerate(lengths[order].tolist()):
        if position > start and (used + length > budget or position - start == most):
            steps.append(order[start:position])
            start, used = position, 0
        used += length
    return [*steps, order[start:]]


def run_steps(
    run: Callable[[_Item], _Result], steps: Sequence[_Item], device: torch.device
) -> Iterator[_Result]:
    """Yield ``run(step)`` for each step, in order.

    On a CPU every core runs whole steps by itself: small operations then wait for no other core, which makes
    two cores 1.2 times as fast as two threads on one step.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    workers = min(threads, len(steps), _MOST_WORKERS)
    if workers < 2:
        yield from map(run, steps)
        return
    share = (threads // workers,)
    with ThreadPoolExecutor(workers, "irkit-encoder", torch.set_num_threads, share) as pool:
        yield from pool.map(run, steps)


def copy_to_cpu(rows: Representation) -> Callable[[], Representation]:
    """Start to copy rows to the CPU, and return a function that waits for the copy."""
    make: Callable[..., Representation]
    if isinstance(rows, Dense):
        tensors, make = [rows.values], Dense
    elif isinstance(rows, MultiVector):
        lengths = rows.tokens.lengths
        tensors, make = [rows.tokens.values], lambda values: MultiVector(Ragged(values, lengths))
    else:
        lengths, dim = rows.terms.lengths, rows.dim
        tensors = [rows.terms.values, rows.weights]
        make = lambda terms, weights: Sparse(Ragged(terms, lengths), weights, dim)  # noqa: E731
    device = tensors[0].device
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # torch pins their memory
    if device.type != "cuda":
        return lambda: make(*copies)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(device))

    def wait() -> Representation:
        copied.synchronize()
        return make(*copies)

    return wait


def chunks(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """Yield lists of ``size`` items; the last may be shorter.

    Raises:
        BadValueError: ``size`` is not positive.
    """
    if not is_count(size):
        raise BadValueError(f"chunk_size must be at least 1, got {brief(size)}")
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def ahead(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """Yield ``function(item)`` in order; a thread computes the second and later ones one item ahead."""
    iterator = iter(items)
    with ThreadPoolExecutor(1, "irkit-tokenizer") as pool:  # starts its thread when first used
        for first in iterator:
            result = function(first)
            for item in iterator:
                following = pool.submit(function, item)
                yield result
                result = following.result()
            yield result


def behind(calls: Iterable[Callable[[], _Result]], by: int) -> Iterator[_Result]:
    """Yield the results of calls in order; each is called after ``by`` more were made.

    Meanwhile a GPU works on those that were made and not yet called.
    """
    waiting: deque[Callable[[], _Result]] = deque()
    for call in calls:
        waiting.append(call)
        if len(waiting) > by:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()
