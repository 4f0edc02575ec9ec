"""One trainer of the suite ``training``, in a process of its own, taking a step each time it is asked to.

``python -m benchmarks.training_worker TRAINER KIND PRECISION MODEL STEPS SEED CHARACTERS`` cuts documents to
so many characters, reads a line for each step and answers with JSON: what a step took, from the reading of
its texts to the end of the optimiser's update, its loss, and the most memory the process has held, and had
before the first step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
import transformers

from benchmarks.harness import data_dir, peak_memory

BATCH = 16
FLOPS = {"query": 5e-5, "document": 3e-5}
TEMPERATURE = {"dense": 0.05, "multi_vector": 1.0, "sparse": 1.0}


def pairs(count: int, characters: int | None = None) -> list[tuple[str, str]]:
    """Return claims of SciFact's training split and their abstracts, repeated, no text twice in a batch."""
    from irkit.data import read_documents, read_qrels, read_queries

    folder = data_dir() / "scifact"
    documents = {document.id: document.full_text for document in read_documents(folder)}
    queries = {query.id: query.text for query in read_queries(folder)}
    whole = [
        (queries[query], documents[document][:characters])
        for query, judged in read_qrels(folder, "train").items()
        for document in judged
    ]
    found: list[tuple[str, str]] = []
    rest = whole
    while len(found) < count:
        batch: dict[str, str] = {}
        for query, document in rest:
            if len(batch) < BATCH and query not in batch and document not in batch.values():
                batch[query] = document
        if len(batch) < BATCH:
            rest = whole
            continue
        found += batch.items()
        rest = [pair for pair in rest if pair not in batch.items()]
    return found[:count]


class Gate(transformers.TrainerCallback):
    """Waits to be asked for a step and answers when it is done."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Wait."""
        self.before = peak_memory()
        self._wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Answer, then wait."""
        answer = {
            "seconds": time.perf_counter() - self.start,
            "cpu": time.process_time() - self.used,
            "loss": self.loss,
            "memory": peak_memory(),
            "before": self.before,
        }
        print(json.dumps(answer), file=sys.__stdout__, flush=True)
        self._wait()

    def _wait(self) -> None:
        if not sys.stdin.readline():
            sys.exit(0)
        self.start, self.used = time.perf_counter(), time.process_time()


def settings(steps: int, precision: str, seed: int = 42, **others: Any) -> dict[str, Any]:
    """Return the arguments of either trainer; all not named have their defaults."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": BATCH,
        "max_steps": steps,
        "seed": seed,
        "learning_rate": 2e-5,
        "warmup_steps": 0,
        "lr_scheduler_type": "constant",
        "bf16": precision == "bfloat16",
        "use_cpu": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **others,
    }


def irkit_trainer(kind: str, model: str, arguments: dict[str, Any], data: list[tuple[str, str]]) -> Any:
    """Return irkit's trainer, on the same batches in the same order."""
    from irkit import Model
    from irkit.training.example import Example
    from irkit.training.losses import InfoNCE
    from irkit.training.regularizers import Flops
    from irkit.training.trainer import Trainer
    from irkit.training.training_arguments import TrainingArguments
    from irkit.training.training_data import Collator

    trained = Model.from_pretrained(model, device="cpu" if arguments["use_cpu"] else "cuda")
    batch = arguments["per_device_train_batch_size"]
    examples = [Example(query, (document,)) for query, document in data]
    loader = torch.utils.data.DataLoader(examples, batch_size=batch, collate_fn=Collator(trained))
    regularizers = [Flops(**FLOPS)] if kind == "sparse" else []
    losses = [InfoNCE(temperature=TEMPERATURE[kind])]
    return Trainer(trained, TrainingArguments(**arguments), loader, losses, regularizers)


def peer_trainer(kind: str, model: str, arguments: dict[str, Any], data: list[tuple[str, str]]) -> Any:
    """Return the trainer of sentence-transformers for such models, with its loss for pairs."""
    import datasets

    columns = dict(zip(("anchor", "positive"), map(list, zip(*data, strict=True)), strict=True))
    dataset = datasets.Dataset.from_dict(columns)
    arguments = arguments | {"batch_sampler": in_order}
    scale = 1 / TEMPERATURE[kind]
    device = "cpu" if arguments["use_cpu"] else "cuda"
    if kind == "dense":
        from sentence_transformers import SentenceTransformer as Peer
        from sentence_transformers import SentenceTransformerTrainer as PeerTrainer
        from sentence_transformers import SentenceTransformerTrainingArguments as PeerArguments
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

        trained = Peer(model, device=device)
        loss = MultipleNegativesRankingLoss(trained, scale=scale)
    elif kind == "multi_vector":
        from sentence_transformers import MultiVectorEncoder as Peer
        from sentence_transformers import MultiVectorEncoderTrainer as PeerTrainer
        from sentence_transformers import MultiVectorEncoderTrainingArguments as PeerArguments
        from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss

        trained = Peer(model, device=device)
        loss = MultiVectorMultipleNegativesRankingLoss(trained, scale=scale)
    else:
        from sentence_transformers import SparseEncoder as Peer
        from sentence_transformers import SparseEncoderTrainer as PeerTrainer
        from sentence_transformers import SparseEncoderTrainingArguments as PeerArguments
        from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

        trained = Peer(model, device=device)
        weights = {f"{side}_regularizer_weight": weight for side, weight in FLOPS.items()}
        loss = SpladeLoss(trained, SparseMultipleNegativesRankingLoss(trained, scale=scale), **weights)
    return PeerTrainer(trained, PeerArguments(**arguments), train_dataset=dataset, loss=loss)


def in_order(dataset: Any, batch_size: int, drop_last: bool, **_: Any) -> Any:
    """Return the batches as they stand."""
    from torch.utils.data import BatchSampler, SequentialSampler

    return BatchSampler(SequentialSampler(dataset), batch_size, drop_last)


def main() -> None:
    """Do what the command line says."""
    name, kind, precision, model, steps, seed, characters = sys.argv[1:]
    sys.stdout = sys.stderr  # whatever a trainer prints is no answer
    warnings.simplefilter("ignore")
    make = irkit_trainer if name == "irkit" else peer_trainer
    data = pairs(int(steps) * BATCH, int(characters))
    trainer = make(kind, model, settings(int(steps), precision, int(seed)), data)
    gate, step = Gate(), trainer.training_step

    def training_step(*arguments: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = step(*arguments, **options)
        gate.loss = loss.item()
        return loss

    trainer.training_step = training_step
    trainer.add_callback(gate)
    trainer.train()


if __name__ == "__main__":
    main()
