"""A process per device: texts dealt out in chunks, representations back in order."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing

from irkit.errors import IrkitError
from irkit.model.batching import Template
from irkit.representation import Representation, representation_from_arrays

if TYPE_CHECKING:
    from irkit.model.pipeline import Pipeline

__all__ = ["encode_in_processes"]

_IN_FLIGHT = 3  # chunks a process: one at work, the others on their way, so that none waits
_Result = tuple[str, int, dict[str, Any]]  # kind, dim, arrays: numpy travels by copy, without shared memory


def encode_in_processes(
    model: Pipeline,
    devices: Sequence[str | torch.device],
    chunks: Iterable[list[str]],
    template: Template,
    batch_size: int | None = None,
) -> Iterator[Representation]:
    """Encode chunks of texts on several devices at once.

    Processes are spawned: a script that calls this needs the usual ``if __name__ == "__main__":``.

    Args:
        model: Is moved to the CPU while they run; all processes share one copy of its weights there.
        devices: One process each, such as ``["cuda:0", "cuda:1"]`` or ``["cpu", "cpu"]``.
        chunks: Texts; at most a few chunks a process are held at a time.
        template: How texts become tokens.
        batch_size: Most texts encoded at once.

    Yields:
        The representation of each chunk in order, float32 on the CPU.

    Raises:
        IrkitError: A process died.
    """
    home = model.device
    context = torch.multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // len(devices))
    # a queue writes from a thread of its own: as an argument, a model larger than a pipe's buffer would
    # block this process for good when the other dies before it reads it
    starts = context.Queue()
    starts.cancel_join_thread()
    for device in devices:
        starts.put((model.to("cpu"), str(device)))
    pool = ProcessPoolExecutor(len(devices), context, _start, (starts, threads))
    waiting: deque[Future[_Result]] = deque()
    try:
        for chunk in chunks:
            with _interrupts_blocked():  # processes start here and inherit it: Ctrl-C is this one's business
                waiting.append(pool.submit(_encode, chunk, template, batch_size))
            if len(waiting) >= _IN_FLIGHT * len(devices):
                yield representation_from_arrays(*waiting.popleft().result())
        while waiting:
            yield representation_from_arrays(*waiting.popleft().result())
    except BrokenProcessPool as error:
        raise IrkitError(
            "encoding on several devices: a process died, see its message above (out of memory? a script "
            'without `if __name__ == "__main__":`?)'
        ) from error
    except KeyboardInterrupt:  # what is at work is of no use any more
        for process in list(pool._processes.values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        model.to(home)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in the processes --------------------------------------------------------------------------

_models: list[Pipeline] = []  # the one of this process


def _start(starts: Any, threads: int) -> None:
    model, name = starts.get()
    device = torch.device(name)
    if device.type == "cpu":
        torch.set_num_threads(threads)
    _models.append(model.to(device))


def _encode(texts: list[str], template: Template, batch_size: int | None) -> _Result:
    model = _models[0]
    representation = model.encode_tokens(model.tokenize(texts, template), template, batch_size=batch_size)
    return representation.kind, representation.dim, representation.arrays()
