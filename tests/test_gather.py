"""Two processes with half a batch each have the gradients of one process with the whole."""

from __future__ import annotations

import multiprocessing
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from irkit import Model
from irkit.training.checkpoints import put_weights, trained_weights
from irkit.training.example import Batch, Example
from irkit.training.gather import _Gather
from irkit.training.losses import CrossEntropy, EmbeddingDistillation, InfoNCE, KLDivergence
from irkit.training.regularizers import Flops
from irkit.training.train_step import TrainStep
from irkit.training.training_data import Collator

DOCUMENTS = {
    "d0": "a neural search model",
    "d1": "the index of the text",
    "d2": "vector",
    "d3": "token, token and token!",
    "d4": "search in an index of neural vectors",
    "d5": "of",
    "d6": "a text on models",
}
# of the five queries the first process has three; d0, d3 and d4 are in both, and each has a document that is
# known to be relevant to a query of the other
EXAMPLES = [
    ("neural search", ["d0", "d4", "d3"], ["d0", "d6"]),
    ("an index", ["d1", "d2"], ["d1"]),
    ("vector of text", ["d2", "d5", "d0"], ["d2"]),
    ("token model in a neural index", ["d3", "d6"], ["d3", "d1"]),
    ("search in the text", ["d4", "d0"], ["d4"]),
]
SHARES = (slice(0, 3), slice(3, 5))
LOSSES: dict[str, tuple[list[Any], list[Any]]] = {
    "kl": ([KLDivergence()], []),
    "infonce": ([InfoNCE()], []),
    "soft": ([InfoNCE(temperature=20)], []),  # scores of an untrained sparse model are in the hundreds
    "symmetric": ([InfoNCE(symmetric=True), KLDivergence(weight=0.5)], []),
    "flops": ([CrossEntropy(weight=0.1)], [Flops(query=0.3, document=0.2, schedule="constant")]),
    "everything": ([InfoNCE(symmetric=True)], [Flops(query=0.3, document=0.2, schedule="constant")]),
}
CASES = [
    *((kind, losses) for kind in ("dense", "multi_vector") for losses in ("kl", "infonce", "symmetric")),
    *(("sparse", losses) for losses in ("soft", "flops", "everything")),
    ("cached", "infonce"),
    ("guided", "embedding"),
    ("sharded", "infonce"),
]


def test_backward_sends_each_process_the_sums_of_its_own_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    def reduce_scatter(own: torch.Tensor, shares: torch.Tensor) -> None:
        sent.append(shares.clone())
        own.copy_(shares.view(3, -1, 2)[1])

    monkeypatch.setattr(dist, "reduce_scatter_tensor", reduce_scatter)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    gradient = torch.arange(8.0).view(4, 2)
    own, _ = _Gather.backward(SimpleNamespace(sizes=[3, 1, 0]), gradient)
    assert own.tolist() == [[6.0, 7.0]]
    assert sent[0].shape == (9, 2)
    assert torch.equal(sent[0][:4], gradient)


def batch(model: Model, share: slice, texts: bool = False) -> Batch:
    examples = [
        Example(
            query,
            tuple(DOCUMENTS[name] for name in names),
            tuple(float(3 - i) for i in range(len(names))),
            ids=tuple(names),
            relevant=frozenset(relevant),
        )
        for query, names, relevant in EXAMPLES[share]
    ]
    return Collator(model, texts)(examples)


def step_of(folder: Path, kind: str, losses: str) -> TrainStep:
    other = {"cached": "multi_vector", "guided": "dense", "sharded": "multi_vector"}
    model = Model.from_pretrained(folder / other.get(kind, kind))
    if losses == "embedding":
        guide = str(folder / "dense")
        return TrainStep(model, [EmbeddingDistillation(guide=guide), InfoNCE(guide=guide)])
    terms, regularizers = LOSSES[losses]
    size = 2 if kind == "cached" else None
    return TrainStep(model, terms, regularizers=regularizers, gradient_cache_size=size)


def gradients(step: Any, share: slice, texts: bool) -> dict[str, torch.Tensor]:
    plain = getattr(step, "module", step)
    loss = step(batch(plain.model, share, texts), 1.0)
    loss.backward()
    found = {name: whole(p.grad) for name, p in plain.named_parameters() if p.grad is not None}
    return {**found, "loss": loss.detach()}


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.fixture(scope="module")
def of_two(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder with the models, and by process and case the gradients that two processes have."""
    folder = tmp_path_factory.mktemp("gather")
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="does not say"):
        Model.from_pretrained(tiny_bert).save_pretrained(folder / "dense")
    Model.multi_vector(tiny_bert, {"depth": 1, "dim": 16}).save_pretrained(folder / "multi_vector")
    Model.sparse(tiny_bert).save_pretrained(folder / "sparse")
    fork = multiprocessing.get_context("fork")
    running = [fork.Process(target=run, args=(folder, rank)) for rank in (0, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside threads
        for process in running:
            process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0, 0]
    return folder, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "losses"), CASES)
def test_two_processes_have_the_gradients_of_one(of_two: Any, kind: str, losses: str) -> None:
    folder, found = of_two
    one = gradients(step_of(folder, kind, losses), slice(None), kind == "guided")
    first, second = (each[f"{kind} {losses}"] for each in found)
    assert one.keys() == first.keys()
    both = torch.stack([first.pop("loss"), second.pop("loss")]).mean()
    torch.testing.assert_close(both, one.pop("loss"), rtol=1e-6, atol=1e-6)
    for name, expected in one.items():
        assert torch.equal(first[name], second[name])
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(first[name] / scale, expected / scale, rtol=0, atol=1e-6)


def run(folder: Path, rank: int) -> None:
    """One of the two processes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # OpenMP's other threads did not survive the fork
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    found = {}
    for kind, losses in CASES:
        step: Any = step_of(folder, kind, losses)
        if kind == "sharded":  # each process has a part of the weights
            for module in (*step.model.encoder.layers, step):
                fully_shard(module, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
            before = trained_weights(step)
            put_weights(step, {name: value + 1 for name, value in before.items()}, "test")
            assert all(torch.equal(value, before[name] + 1) for name, value in trained_weights(step).items())
            put_weights(step, before, "test")
        else:
            step = torch.nn.parallel.DistributedDataParallel(step)
        found[f"{kind} {losses}"] = gradients(step, SHARES[rank], kind == "guided")
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
