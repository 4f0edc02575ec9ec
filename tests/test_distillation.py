"""Distillation on texts alone, against its definition written out text by text in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from irkit import Ragged
from irkit.errors import BadValueError
from irkit.formats import write_model
from irkit.heads import MultiVectorHead, PooledHead, Projection
from irkit.model import Model
from irkit.model.pipeline import hidden_states
from irkit.training.masking import PretrainCollator
from irkit.training.pretraining.distillation_objectives import Distillation
from irkit.training.pretraining.objectives import MaskedLanguageModeling
from irkit.training.pretraining.pretrain_recipe import PretrainingConfig
from irkit.training.pretraining.pretrain_step import PretrainStep

TEXTS = ["the index of a search model", "a token, in the text!", "model", "on the neural vector " * 9]


def dense(tiny_bert: Path, place: Path, width: int = 32) -> Model:
    """Without Normalize, so that lengths of vectors count."""
    torch.manual_seed(1)
    source = Model.multi_vector(tiny_bert, device="cpu")
    head = PooledHead(32, "mean", [Projection(32, width)])
    parts: Any = {"tokenizer": source.tokenizer, "encoder": source.encoder, "head": head}
    write_model(parts, place)
    return Model.from_pretrained(place, device="cpu")


def multi_vector(tiny_bert: Path, **config: Any) -> Model:
    torch.manual_seed(1)
    return Model.multi_vector(tiny_bert, "linear", {"skiplist_words": [","], **config}, device="cpu")


def spoiled(model: Model) -> Model:
    """After some training: weights are no longer the teacher's."""
    with torch.no_grad():
        for weight in model.encoder.parameters():
            weight += 0.05 * torch.randn(
                weight.shape, generator=torch.Generator().manual_seed(weight.numel())
            )
    return model


def vectors(model: Model) -> Tensor:
    """One text at a time."""
    pipeline = model.pipeline("document")
    return torch.stack([model(pipeline.tokenize([text])).values[0] for text in TEXTS])


def parts_of(step: PretrainStep, batch: Any) -> tuple[float, float]:
    [(_, value)] = step.values(step.encode(batch))
    assert value.count == len(TEXTS)
    return float(value.parts["cosine"]) / value.count, float(value.parts["mse"]) / value.count


def test_one_vector(tiny_bert: Path, tmp_path: Path) -> None:
    model = dense(tiny_bert, tmp_path / "m").double()
    pipeline, encoder = model.pipeline("document"), model.encoder
    rows = [pipeline.tokenize([text]) for text in TEXTS]
    wanted, states = vectors(model).detach(), [encoder(row).values.detach() for row in rows]
    step = PretrainStep(
        model.add_pooling_layers({"factor": 2}), [Distillation(cosine=2.0, mse=0.5, states=3.0)]
    )
    spoiled(model)
    cosines = [1 - F.cosine_similarity(a, b, dim=0) for a, b in zip(vectors(model), wanted, strict=True)]
    squares = [((a - b) ** 2).sum() / (b**2).sum() for a, b in zip(vectors(model), wanted, strict=True)]
    means = [state[start : start + 2].mean(0) for state in states for start in range(0, len(state), 2)]
    made = torch.cat([encoder(row).values for row in rows])
    rest = [1 - F.cosine_similarity(a, b, dim=0) for a, b in zip(made, means, strict=True)]
    cosine, mse, state = (torch.stack(each).mean() for each in (cosines, squares, rest))
    assert min(mse, cosine, state) > 0.01
    expected = 2.0 * cosine + 0.5 * mse + 3.0 * state
    loss = step(PretrainCollator(model.tokenizer)(list(enumerate(TEXTS))))
    torch.testing.assert_close(loss, expected)
    weight = encoder.layers[0].up.weight
    torch.testing.assert_close(*(torch.autograd.grad(each, weight)[0] for each in (loss, expected)))


@pytest.mark.parametrize("sides", [["document"], ["query", "document"]])
def test_many_vectors(tiny_bert: Path, sides: list[str]) -> None:
    model = multi_vector(tiny_bert, pooled_sides=sides, query_length=8).double()
    head = model.head
    assert isinstance(head, MultiVectorHead)
    skipped = {*head.skip_ids.tolist()}

    def token_vectors(ids: Tensor) -> Tensor:  # of all tokens, unpooled
        rows = Ragged(ids, torch.tensor([len(ids)]))
        return F.normalize(head.layers[0](model.encoder(rows, pooled=False).values), dim=1)

    rows = [model.tokenizer([text]).values for text in TEXTS]
    tokens = [token_vectors(row).detach() for row in rows]
    asked = [token_vectors(row[:8]).detach() for row in rows]
    step = PretrainStep(model.add_pooling_layers({"factor": 4}), [Distillation()])
    spoiled(model)

    def means(values: Tensor, ids: Tensor, side: str) -> Tensor:
        if side not in sides:
            return values
        kept = [side == "query" or int(token) not in skipped for token in ids]
        groups = [range(start, min(start + 4, len(ids))) for start in range(0, len(ids), 4)]
        chosen = [[place for place in group if kept[place]] for group in groups]
        return torch.stack([F.normalize(values[group].mean(0), dim=0) for group in chosen if group])

    def made(ids: Tensor, side: Any) -> Tensor:
        ragged = Ragged(ids, torch.tensor([len(ids)]))
        hidden = hidden_states(model.encoder, head, ragged, None, side)
        return head(hidden, ragged, side=side).tokens.values

    queries, documents = [made(row[:8], "query") for row in rows], [made(row, "document") for row in rows]
    cosine = torch.stack(
        [
            1 - F.cosine_similarity(torch.cat(own), torch.cat(other), dim=1).mean()
            for own, other in (
                (queries, [means(a, row[:8], "query") for a, row in zip(asked, rows, strict=True)]),
                (documents, [means(t, row, "document") for t, row in zip(tokens, rows, strict=True)]),
            )
        ]
    ).mean()
    plain = [t[[int(token) not in skipped for token in row]] for t, row in zip(tokens, rows, strict=True)]
    wanted = torch.cat([means(a, row[:8], "query") for a, row in zip(asked, rows, strict=True)])
    found = torch.stack([(torch.cat(queries) @ d.T).max(1).values for d in documents])
    target = torch.stack([(wanted @ d.T).max(1).values for d in plain])
    batch = PretrainCollator(model.tokenizer)(list(enumerate(TEXTS)))
    # MaxSim and the pooling of the teacher's vectors are computed in float32
    assert parts_of(step, batch) == pytest.approx(
        (cosine.item(), (found - target).square().mean().item()), rel=1e-4
    )
    step(batch).backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in head.parameters())


@pytest.mark.parametrize("kind", ["dense", "multi_vector"])
def test_it_is_nothing_at_the_teacher_and_learned(kind: str, tiny_bert: Path, tmp_path: Path) -> None:
    model = dense(tiny_bert, tmp_path / "m") if kind == "dense" else multi_vector(tiny_bert)
    step = PretrainStep(model.add_pooling_layers({"layers": [1]}), [Distillation()])
    assert not [name for name, _ in step.named_parameters() if not name.startswith("model.")]
    batch = PretrainCollator(model.tokenizer)(list(enumerate(TEXTS)))
    spoiled(model)
    step.eval()  # without dropout
    start = step.validate([batch])["loss"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(25):
        loss = step(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert step.validate([batch])["loss"] < 0.5 * start
    unpooled = dense(tiny_bert, tmp_path / "m") if kind == "dense" else multi_vector(tiny_bert)
    step = PretrainStep(unpooled.add_pooling_layers({"layers": [1]}), [Distillation()])
    unpooled.add_pooling_layers(None)
    assert abs(step.validate([batch])["loss"]) < 1e-5


def test_a_named_teacher_and_what_does_not_fit(tiny_bert: Path, tmp_path: Path) -> None:
    model = dense(tiny_bert, tmp_path / "m")
    same = PretrainStep(model, [Distillation(teacher=str(tmp_path / "m"))])
    batch = PretrainCollator(model.tokenizer)(list(enumerate(TEXTS)))
    assert abs(same.validate([batch])["loss"]) < 1e-5
    with pytest.raises(BadValueError, match="it is its own teacher"):
        PretrainStep(model, [Distillation()])
    dense(tiny_bert, tmp_path / "wide", 48)
    with pytest.raises(BadValueError, match=r"dense vectors of width 48; the model makes dense .* width 32"):
        PretrainStep(model, [Distillation(teacher=str(tmp_path / "wide"))])
    dense(tiny_bert, tmp_path / "p").add_pooling_layers({"factor": 2}).save_pretrained(tmp_path / "p")
    with pytest.raises(BadValueError, match="pools; expected one without"):
        PretrainStep(model, [Distillation(teacher=str(tmp_path / "p"))])
    with pytest.raises(BadValueError, match="expected dense or multi_vector"):
        PretrainStep(Model.sparse(tiny_bert, device="cpu"), [Distillation()])
    with pytest.raises(BadValueError, match="pooled_sides of the model lacks 'document'"):
        PretrainStep(
            multi_vector(tiny_bert, pooled_sides=["query"]).add_pooling_layers({"factor": 2}),
            [Distillation()],
        )
    with pytest.raises(BadValueError, match="the encoder pools"):
        PretrainStep(model.add_pooling_layers({"factor": 2}), [MaskedLanguageModeling()])


def test_another_schedule_does_without_the_arguments_of_the_default(tmp_path: Path) -> None:
    config = {"texts": "x", "objectives": {"kind": "distillation"}, "train": {"max_steps": 2}}
    kept = PretrainingConfig.parse(config, "pretraining").arguments(tmp_path)
    assert kept.lr_scheduler_kwargs == {"min_lr_rate": 0.02}
    config["train"] = {"max_steps": 2, "lr_scheduler_type": "linear"}
    assert PretrainingConfig.parse(config, "pretraining").arguments(tmp_path).lr_scheduler_kwargs == {}
