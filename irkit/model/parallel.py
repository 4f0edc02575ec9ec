"""A process per device: texts dealt out in chunks, representations back in order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import torch
import torch.multiprocessing

from irkit.core.representation import Representation, representation_from_arrays
from irkit.errors import IrkitError
from irkit.model.pipeline import Pipeline, Progress, behind, chunks
from irkit.tokenizer import strings

_IN_FLIGHT = 3  # chunks a process: one at work, the others on their way, so that none waits
_Result = tuple[str, int, dict[str, Any]]  # kind, dim, arrays: numpy travels by copy, without shared memory


def encode_in_processes(
    pipeline: Pipeline,
    devices: Sequence[str | torch.device],
    texts: Iterable[str],
    chunk_size: int,
    progress: Progress | None = None,
) -> Iterator[Representation]:
    """Encode texts as `Pipeline.stream` does, on several devices at once.

    Processes are spawned: a script that calls this function needs ``if __name__ == "__main__":``.

    Args:
        pipeline: Pipeline to run. It is moved to the CPU while the processes run, which share this one copy
            of its weights.
        devices: Device of each process, such as ``["cuda:0", "cuda:1"]`` or ``["cpu", "cpu"]``.
        texts: Read as they are needed; at most a few chunks per process are held at a time.
        chunk_size: Number of texts that a process gets at a time.
        progress: Called with the number of texts finished since the last call.

    Yields:
        The representation of each chunk in order, float32 on the CPU.

    Raises:
        IrkitError: A process died.
    """
    home = pipeline.device
    context = torch.multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // len(devices))
    # a queue writes from a thread of its own: as an argument, a model larger than a pipe's buffer would
    # block this process for good when the other dies before it reads it
    starts = context.Queue()
    starts.cancel_join_thread()
    for device in devices:
        starts.put((pipeline.to("cpu"), str(device)))
    pool = ProcessPoolExecutor(len(devices), context, _start, (starts, threads))

    def submit(chunk: list[str]) -> Callable[[], _Result]:
        with _interrupts_blocked():  # processes start here and inherit it: Ctrl-C is this one's business
            return pool.submit(_encode, chunk).result

    try:
        submitted = map(submit, chunks(strings(texts), chunk_size))
        for result in behind(submitted, by=_IN_FLIGHT * len(devices) - 1):
            rows = representation_from_arrays(*result)
            yield rows
            if progress is not None:
                progress(len(rows))
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
        pipeline.to(home)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in the processes --------------------------------------------------------------------------

_pipelines: list[Pipeline] = []  # the one of this process


def _start(starts: Any, threads: int) -> None:
    pipeline, name = starts.get()
    device = torch.device(name)
    if device.type == "cpu":
        torch.set_num_threads(threads)
    _pipelines.append(pipeline.to(device))


def _encode(texts: list[str]) -> _Result:
    pipeline = _pipelines[0]
    rows = pipeline.encode_tokens(pipeline.tokenize(texts))
    return rows.kind, rows.dim, rows.arrays()
