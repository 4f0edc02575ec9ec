"""Training on a GPU: steps of BERT-base with random weights, against trainers of sentence-transformers."""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu_encoders import SHAPES, SIZES, TINY, write_model
from benchmarks.gpu_timing import Device, find_device
from benchmarks.harness import Row

__all__ = ["measure_training"]

KINDS, PEER = ("dense", "multi_vector", "sparse"), "sentence-transformers"
BATCH, STEPS, UNMEASURED = 64, 30, 10
AGREE = 0.05  # losses, relative, in bfloat16

Pairs = list[tuple[str, str]]


def measure_training(device: Device | None = None) -> Iterator[Row]:
    """Yield steps per second in bfloat16, with the dropout of BERT, by kind of model and trainer.

    Both trainers take the same pairs of made-up words in the same batches, and all settings beside the batch
    have their defaults. Before anything is timed, losses without dropout have to agree.
    """
    from benchmarks.training import make_models

    device = device or find_device()
    large = device.name == "cuda"
    steps, unmeasured, batch = (STEPS, UNMEASURED, BATCH) if large else (4, 1, 4)

    # pairs of a query and a document as long as those of MS MARCO
    draw = random.Random(0)
    words = [f"w{number}" for number in range(30_000 if large else 300)]

    def text(mean: float) -> str:
        return " ".join(draw.choices(words, k=min(200, max(4, int(draw.lognormvariate(mean, 0.45))))))

    pairs = [(text(2.1), text(4.2)) for _ in range(steps * batch)]

    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        base.mkdir()
        sizes = dict(zip(SIZES, SHAPES["BERT-base"] if large else TINY, strict=True))
        write_model(base, words, sizes)
        for kind in KINDS:
            plain, fixed = make_models(kind, Path(name), base)
            try:
                yield from _measure(kind, plain, fixed, pairs, (steps, unmeasured, batch), large)
            except Exception as error:
                yield {"what": kind, "error": f"{type(error).__name__}: {error!s:.300}"}


def _measure(
    kind: str,
    plain: Path,
    fixed: Path,
    pairs: Pairs,
    counts: tuple[int, int, int],
    large: bool,
) -> Iterator[Row]:
    # losses without dropout, of the first steps
    found: dict[str, Any] = {}
    for name in ("irkit", PEER):
        try:
            found[name] = _train(name, kind, fixed, pairs, (3, 0, counts[2]), large)[1]
        except ImportError as error:
            yield {"what": f"training, {kind}", "contender": name, "skipped": f"needs {error.name}"}
    first = next(iter(found.values()))
    both = (losses for others in found.values() for losses in zip(first, others, strict=True))
    difference = max(abs(a - b) / abs(a) for a, b in both)
    if not difference <= AGREE:
        raise ValueError(f"losses differ by {difference:.2g}: {found}")

    # times with dropout
    times: dict[str, float] = {}
    for name in [*found][::-1]:
        times[name], _, memory = _train(name, kind, plain, pairs, counts, large)
        yield {
            "what": f"training, {kind}",
            "contender": name,
            "difference": difference,
            "steps/s": 1 / times[name],
            f"x {PEER}": times[PEER] / times[name] if PEER in times else None,
            "MB": memory,
        }


def _train(
    name: str, kind: str, model: Path, pairs: Pairs, counts: tuple[int, int, int], large: bool
) -> tuple[float, list[float], float]:
    """Return the seconds of a step, the losses, and the peak memory of the device in MB.

    ``counts`` are the steps, how many of them are not timed, and the pairs of a batch.
    """
    from benchmarks.training_worker import irkit_trainer, peer_trainer, settings

    make: Callable[..., Any] = irkit_trainer if name == "irkit" else peer_trainer
    steps, unmeasured, batch = counts
    others = {"per_device_train_batch_size": batch, "use_cpu": not large}
    trainer = make(kind, str(model), settings(steps, "bfloat16", **others), pairs[: steps * batch])
    ends, losses, step = list[float](), list[torch.Tensor](), trainer.training_step

    def training_step(*arguments: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = step(*arguments, **options)
        losses.append(loss.detach())
        return loss

    class Clock(transformers.TrainerCallback):
        """Waits for the device where timing begins and ends, and nowhere else."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if len(losses) == unmeasured:
                self.read()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.read()

        def read(self) -> None:
            if large:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    trainer.training_step = training_step
    trainer.add_callback(Clock())
    if large:
        gc.collect()  # of an earlier trainer, which refers to itself
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    seconds = ends[1] - ends[0]
    print(f"training: {name} {kind} took {seconds:.1f} s", file=sys.stderr, flush=True)
    memory = torch.cuda.max_memory_allocated() / 2**20 if large else 0.0
    return seconds / (steps - unmeasured), [float(loss) for loss in losses], memory
