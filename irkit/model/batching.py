"""From a stream of texts to representations: steps of a token budget, the next texts tokenised meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from irkit.arguments import is_count, shown
from irkit.encoder import Encoder
from irkit.encoder.lookup import NoEncoder
from irkit.errors import BadValueError
from irkit.formats import AnyEncoder
from irkit.heads import Head, Side
from irkit.ragged import Ragged
from irkit.representation import Dense, MultiVector, Representation, Sparse, concat

__all__ = [
    "Progress",
    "Template",
    "ahead",
    "begin_tokens",
    "behind",
    "chunks",
    "encode_tokens",
    "hidden_states",
    "plan_steps",
    "run_steps",
]

Progress = Callable[[int], object]
"""Called with the number of texts finished since the last call."""

_MOST_WORKERS = 16  # threads that run steps; beyond, Python's lock is in their way

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Template:
    """How texts become tokens, see `Pipeline.template`.

    Attributes:
        side: What the texts are.
        prompt: Written before each of them.
        prompt_length: Leading tokens of each text that come from it.
        max_length: Tokens at which texts are cut; None is where the tokenizer cuts them.
    """

    side: Side = "document"
    prompt: str = ""
    prompt_length: int = 0
    max_length: int | None = None


def encode_tokens(
    encoder: AnyEncoder,
    head: Head,
    tokens: Ragged,
    template: Template,
    *,
    budget: int,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Representation:
    """Encode rows of token ids in steps of similar lengths, see `begin_tokens`.

    Returns:
        A representation of each row, in the order of ``tokens``, float32 on the CPU.
    """
    return begin_tokens(
        encoder, head, tokens, template, budget=budget, batch_size=batch_size, progress=progress
    )()


def begin_tokens(
    encoder: AnyEncoder,
    head: Head,
    tokens: Ragged,
    template: Template,
    *,
    budget: int,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Callable[[], Representation]:
    """Encode rows of token ids in steps of similar lengths, without waiting for a GPU that does it.

    The rows are put back in order where they were made, and then copied to pinned memory of the CPU.

    Args:
        encoder: Gives hidden states.
        head: Makes representations of them.
        tokens: Ragged int64 ids on the CPU.
        template: What made them.
        budget: Most tokens in a step; a longer row is a step of its own.
        batch_size: Most rows in a step.
        progress: Told of finished rows.

    Returns:
        A function that waits for the copy: a representation of each row, in the order of ``tokens``, float32
        on the CPU.
    """
    tokens, attended = head.expand(tokens, template.side)
    steps = plan_steps(tokens.lengths, budget, batch_size)
    parts: list[Representation] = []
    inputs = [(tokens[rows], None if attended is None else attended[rows]) for rows in steps]
    results = run_steps(encoder, head, inputs, template)
    for rows, part in zip(steps, results, strict=True):
        parts.append(part)
        if progress is not None:
            progress(len(rows))
    places = torch.argsort(torch.cat(steps))
    return _fetched(concat(parts).to(dtype=torch.float32)[places])


def _fetched(made: Representation) -> Callable[[], Representation]:
    """A function that waits until it is on the CPU; the copy begins now."""
    if isinstance(made, Dense):
        return _copied([made.values], Dense)
    if isinstance(made, MultiVector):
        lengths = made.tokens.lengths
        return _copied([made.tokens.values], lambda values: MultiVector(Ragged(values, lengths)))
    lengths, dim = made.terms.lengths, made.dim
    tensors = [made.terms.values, made.weights]
    return _copied(tensors, lambda terms, weights: Sparse(Ragged(terms, lengths), weights, dim))


def _copied(tensors: list[Tensor], make: Callable[..., Representation]) -> Callable[[], Representation]:
    device = tensors[0].device
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # torch pins their memory
    if device.type != "cuda":
        return lambda: make(*copies)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))

    def fetch() -> Representation:
        done.synchronize()
        return make(*copies)

    return fetch


def hidden_states(
    encoder: AnyEncoder | NoEncoder, head: Head, tokens: Ragged, attended: Tensor | None, side: Side
) -> Ragged:
    """What an encoder makes of ``tokens`` for a head, which says whether its pooling layers work on ``side``.

    Args:
        encoder: Gives hidden states.
        head: Takes them.
        tokens: Ragged int64 ids, as the head expands them.
        attended: ``(n,)`` leading tokens of each row that are attended to; None is all.
        side: What the texts are.
    """
    if isinstance(encoder, Encoder) and not head.pools(side):
        return encoder(tokens, attended, pooled=False)
    return encoder(tokens, attended)


def plan_steps(lengths: Tensor, budget: int, batch_size: int | None = None) -> list[Tensor]:
    """Cut rows, the longest first, into steps of at most ``budget`` tokens or one row.

    Args:
        lengths: ``(n,)`` tokens of each row.
        budget: Most tokens in a step.
        batch_size: Most rows in a step; None is any number.

    Returns:
        Row numbers of each step; one empty step if there are no rows.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    steps, start, used, most = [], 0, 0, batch_size or len(order)
    for place, length in enumerate(lengths[order].tolist()):
        if place > start and (used + length > budget or place - start == most):
            steps.append(order[start:place])
            start, used = place, 0
        used += length
    return [*steps, order[start:]]


def run_steps(
    encoder: AnyEncoder, head: Head, steps: Sequence[tuple[Ragged, Tensor | None]], template: Template
) -> Iterator[Representation]:
    """Run encoder and head over steps of tokens and how many of each row are attended to.

    Results come in order and stay on the device of the encoder.

    On a CPU every core runs steps of its own: small operations then wait for no other core, which makes
    two cores 1.2 times as fast as two threads on one step.
    """
    device = next(encoder.parameters()).device

    def run(step: tuple[Ragged, Tensor | None]) -> Representation:
        with torch.inference_mode():
            tokens = step[0].to(device)
            hidden = hidden_states(encoder, head, tokens, step[1], template.side)
            return head(hidden, tokens, template.prompt_length, template.side)

    threads = torch.get_num_threads() if device.type == "cpu" else 1
    workers = min(threads, len(steps), _MOST_WORKERS)
    if workers < 2:
        yield from map(run, steps)
        return
    share = (threads // workers,)
    with ThreadPoolExecutor(workers, "irkit-encoder", torch.set_num_threads, share) as pool:
        yield from pool.map(run, steps)


def chunks(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """Lists of ``size`` items; the last may be shorter.

    Raises:
        BadValueError: ``size`` is not positive.
    """
    if not is_count(size):
        raise BadValueError(f"chunk_size must be at least 1, got {shown(size)}")
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def ahead(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """``function`` of each item in order; from the second on, computed in a thread one item ahead."""
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
    """What calls give, in order, each called after ``by`` more were made: on those a GPU works meanwhile."""
    waiting: deque[Callable[[], _Result]] = deque()
    for call in calls:
        waiting.append(call)
        if len(waiting) > by:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()
