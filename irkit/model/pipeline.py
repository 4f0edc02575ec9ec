"""From texts of one side to representations, without gradients: tokenizer, encoder and head in one run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from irkit.arguments import brief, is_count
from irkit.core.ragged import Ragged
from irkit.core.representation import Dense, MultiVector, Representation, Several, Sparse, concat
from irkit.encoder import Encoder
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.errors import BadValueError
from irkit.formats import AnyEncoder
from irkit.heads import Head, Side, as_multi_vector_head
from irkit.tokenizer import Tokenizer, TokenSpan, strings
from irkit.utils.forking import one_thread_after_fork

CHUNK = 2048  # texts that are sorted by length together
_TOKENS_PER_STEP = {"cpu": 1024, "cuda": 32768}  # activations stay in the cache, or fill the device
_MOST_WORKERS = 16  # threads that run steps; more of them wait for Python's lock
_MOST_STRIDE = 4  # factor on the tokens per step where layers pool, so that the last of them has enough rows

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Progress = Callable[[int], object]
"""Called with the number of texts finished since the last call."""


@dataclass(frozen=True)
class Pipeline:
    """Encodes texts of one side: tokenizer, encoder, head, prompt and lengths; see `irkit.Model.pipeline`.

    Attributes:
        tokenizer: Text to ids.
        encoder: Ids to hidden states.
        head: Hidden states to representations.
        side: Side of the texts.
        prompt: Written before each text.
        max_length: Number of tokens at which texts are cut; None leaves it to the tokenizer.
        tokens_per_step: Largest number of tokens encoded at once; None is a default for the device.
        batch_size: Largest number of texts encoded at once; None is any number.
    """

    tokenizer: Tokenizer
    encoder: AnyEncoder | InferenceFreeEncoder
    head: Head
    side: Side = "document"
    prompt: str = ""
    max_length: int | None = None
    tokens_per_step: int | None = None
    batch_size: int | None = None

    @cached_property
    def prompt_length(self) -> int:
        """Number of leading tokens per text that come from the prompt."""
        return self.tokenizer.prompt_length(self.prompt)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(chain(self.encoder.parameters(), self.head.parameters())).device

    def to(self, device: torch.device | str) -> Pipeline:
        """Move the weights to a device, in place."""
        self.encoder.to(device)
        self.head.to(device)
        return self

    def tokenize(self, texts: Iterable[str]) -> Ragged:
        """Return the token ids of texts with the prompt, Ragged int64 on the CPU."""
        return self.tokenizer(texts, self.prompt, self.max_length)

    def encode_tokens(self, tokens: Ragged) -> Representation:
        """Encode rows of token ids, and wait for the results; for arguments and errors see `begin`.

        Returns:
            One row per text, in the order of ``tokens``, float32 on the CPU.
        """
        return self.begin(tokens)()

    def stream(
        self, texts: Iterable[str], chunk_size: int = CHUNK, progress: Progress | None = None
    ) -> Iterator[Representation]:
        """Encode any number of texts in chunks; while one chunk is encoded, the next is tokenized.

        Args:
            texts: Read as they are needed.
            chunk_size: Number of texts that are read, tokenized and sorted by length together.
            progress: Called with the number of texts finished since the last call.

        Yields:
            The rows of each chunk, float32 on the CPU; nothing for no texts.
        """
        tokenized = ahead(self.tokenize, chunks(strings(texts), chunk_size))
        copies = (self.begin(tokens, progress) for tokens in tokenized)
        yield from behind(copies, by=self.device.type == "cuda")

    def begin(self, tokens: Ragged, progress: Progress | None = None) -> Callable[[], Representation]:
        """Start to encode rows of token ids, without waiting for a GPU to finish.

        Args:
            tokens: Ragged int64 ids on the CPU, as `tokenize` returns them.
            progress: Called with the number of rows finished since the last call.

        Returns:
            A function that waits for the results and returns one row per text, in the order of ``tokens``,
            float32 on the CPU. The function raises BadValueError if a number is infinite or NaN.
        """
        one_thread_after_fork()
        # without an encoder all rows are looked up at once, in no time
        if isinstance(self.encoder, InferenceFreeEncoder):
            with torch.inference_mode():
                rows = self.head(tokens, tokens, self.prompt_length, self.side).to("cpu", torch.float32)
            if progress is not None:
                progress(len(rows))
            return lambda: rows

        # steps of similar lengths, each of at most so many tokens
        if self.encoder.training or self.head.training:  # to visit all modules takes .1 ms
            self.encoder.eval()
            self.head.eval()
        tokens, attended = self.head.expand(tokens, self.side)
        steps = plan_steps(tokens.lengths, self._step_size(), self.batch_size)
        inputs = [(tokens[step], None if attended is None else attended[step]) for step in steps]
        parts: list[Representation] = []
        for step, part in zip(steps, run_steps(self._run_step, inputs, self.device), strict=True):
            parts.append(part)
            if progress is not None:
                progress(len(step))

        # back in the order of the texts on the device, then to the CPU
        order = torch.argsort(torch.cat(steps))
        finish = copy_to_cpu(concat(parts).to(dtype=torch.float32)[order])
        return lambda: _check_finite(finish())

    def encode_with_token_spans(self, text: str) -> tuple[MultiVector, list[TokenSpan]]:
        """Encode one text without token pooling, and find the token of each vector.

        Returns:
            One row of token vectors on the CPU; and one span per vector. If the encoder pools, a span covers
            a window of tokens.

        Raises:
            BadValueError: The head does not make token vectors.
        """
        encoder, side = self.encoder, self.side
        head = as_multi_vector_head(self.head, "encode_with_token_spans")
        # the tokens of the text, and those that the head appends
        tokens, attended = head.expand(self.tokenize([text]), side)
        spans = self.tokenizer.token_spans(text, self.prompt, self.max_length)
        for token_id in tokens.values[len(spans) :].tolist():
            token = str(self.tokenizer.backend.id_to_token(token_id))
            spans.append(TokenSpan(token, len(text), len(text)))

        # their vectors, and the window of tokens of each
        encoder.eval()
        with torch.inference_mode():
            tokens = tokens.to(self.device)
            hidden = hidden_states(encoder, head, tokens, attended, side)
            vectors = head.token_vectors(hidden, tokens, side).to("cpu")
            windows = head.spans(tokens, side).values[head.has_vector(tokens, side)].tolist()
        return MultiVector(vectors), [_join(spans[start:end]) for start, end in windows]

    def _step_size(self) -> int:
        """Return the largest number of tokens to encode at once."""
        if self.tokens_per_step:
            return self.tokens_per_step
        size, stride = _TOKENS_PER_STEP.get(self.device.type, _TOKENS_PER_STEP["cpu"]), 1
        if isinstance(self.encoder, Encoder) and self.head.pools(self.side):
            _, stride = self.encoder.config.window
        return size * min(stride, _MOST_STRIDE)

    def _run_step(self, step: tuple[Ragged, Tensor | None]) -> Representation:
        with torch.inference_mode():
            tokens = step[0].to(self.device)
            hidden = hidden_states(self.encoder, self.head, tokens, step[1], self.side)
            return self.head(hidden, tokens, self.prompt_length, self.side)


def _check_finite(rows: Representation) -> Representation:
    """Return ``rows`` themselves, or raise BadValueError if a number is infinite or NaN."""
    if isinstance(rows, Several):
        for part in rows.parts.values():
            _check_finite(part)
        return rows
    if isinstance(rows, Dense):
        values = rows.values
    else:
        values = rows.weights if isinstance(rows, Sparse) else rows.tokens.values
    if not math.isfinite(values.sum().item()) and not values.isfinite().all():  # a sum may be too large
        raise BadValueError(
            "encode: the model gives NaN or infinite values; its weights are damaged, or do not fit its dtype"
        )
    return rows


def _join(spans: Sequence[TokenSpan]) -> TokenSpan:
    """Merge the spans of neighbouring tokens into one, from the first to the last character in the text.

    The token of the result is all tokens, separated by spaces. Added tokens cover no characters.
    """
    inside = [span for span in spans if span.start < span.end] or spans[:1]
    return TokenSpan(" ".join(span.token for span in spans), inside[0].start, inside[-1].end)


# ---- steps of a token budget, and iterators that keep tokenizer, encoder and copies at work --------


def hidden_states(
    encoder: AnyEncoder | InferenceFreeEncoder,
    head: Head,
    tokens: Ragged,
    attended: Tensor | None,
    side: Side,
) -> Ragged:
    """Compute the hidden states of tokens, Ragged ``(total, hidden_size)``.

    Args:
        encoder: Encoder to run.
        head: Head that takes the hidden states, and says whether the encoder pools texts of ``side``.
        tokens: Ragged int64 ids, as `Head.expand` gives them.
        attended: ``(n,)`` number of leading tokens per row that are attended to; None is all.
        side: Side of the texts.
    """
    if isinstance(encoder, Encoder) and not head.pools(side):
        return encoder(tokens, attended, pooled=False)
    return encoder(tokens, attended)


def plan_steps(lengths: Tensor, budget: int, batch_size: int | None = None) -> list[Tensor]:
    """Group rows, the longest first, into steps of at most ``budget`` tokens; a longer row is a step alone.

    Args:
        lengths: ``(n,)`` number of tokens of each row.
        budget: Largest number of tokens in a step.
        batch_size: Largest number of rows in a step; None is any number.

    Returns:
        The row numbers of each step, an int64 tensor; one empty step for no rows.
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

    On a CPU each core runs whole steps in a thread of its own, because small operations then wait for no
    other core. Two cores are 1.2 times as fast in this way as with two threads on one step.
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
    """Start to copy rows to the CPU, and return a function that waits for the copy and returns it."""
    if isinstance(rows, Several):
        waits = {name: copy_to_cpu(part) for name, part in rows.parts.items()}
        return lambda: cast(Any, Several({name: wait() for name, wait in waits.items()}))
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
    """Yield ``function(item)`` for each item, in order; a thread computes each result one item ahead.

    The caller's thread computes the first result.
    """
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
    """Call each function that ``calls`` yields, and yield the results in order.

    A function is called after ``by`` further functions were taken from ``calls``. So a GPU can work on ``by``
    steps that were started (see `Pipeline.begin`) while the caller handles an earlier result.
    """
    waiting: deque[Callable[[], _Result]] = deque()
    for call in calls:
        waiting.append(call)
        if len(waiting) > by:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()
