"""One step of training: what the losses see, and gradients that do not depend on how the work was cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from irkit import Model, MultiVector, score
from irkit.errors import BadValueError
from irkit.training import train_step
from irkit.training.example import Batch
from irkit.training.interaction import MVA, XTR, make_interaction
from irkit.training.losses import CrossEntropy, InfoNCE, KLDivergence, MarginMSE, Matryoshka
from irkit.training.regularizers import Flops
from irkit.training.train_step import TrainStep

QUERIES = ["neural search", "an index", "vector of text", "token model in a neural index"]
DOCUMENTS = [
    "a neural search model",
    "the index of the text",
    "vector",
    "token, token and token!",
    "search in an index of neural vectors",
    "of",
    "a text on models",
    "the search token",
]
OWN = [[0, 4, 3], [1, 2, 7], [2, 5, -1], [3, 6, 0]]


def make_batch(model: Model, chosen: Sequence[int] = range(4)) -> Batch:
    """Some of the queries above with their own documents, those once each."""
    rows = [OWN[i] for i in chosen]
    used = list(dict.fromkeys(d for row in rows for d in row if d >= 0))
    own = torch.tensor([[used.index(d) if d >= 0 else -1 for d in row] for row in rows])
    relevant = torch.zeros(len(rows), len(used), dtype=torch.bool)
    relevant[torch.arange(len(rows)), own[:, 0]] = True
    targets = torch.tensor([[3.0, 1.0, 0.5], [2.0, 2.5, -1.0], [4.0, 0.0, 0.0], [1.0, 0.0, 0.9]])[
        list(chosen)
    ]
    texts = ([QUERIES[i] for i in chosen], [DOCUMENTS[d] for d in used])
    return Batch(
        queries=model.pipeline("query").tokenize(texts[0]),
        documents=model.pipeline("document").tokenize(texts[1]),
        own=own,
        positives=torch.ones(len(rows), dtype=torch.int64),
        relevant=relevant,
        keys=torch.tensor([1000 - 7 * d for d in used]),
        targets=torch.where(own >= 0, targets[list(chosen)], torch.nan),
        texts=texts,
    )


KINDS = ("dense", "multi_vector", "sparse")


def make_model(tiny_bert: Any, kind: str) -> Model:
    torch.manual_seed(3)
    if kind == "multi_vector":
        expansion = {"query_expansion": {"length": 12}}
        return Model.multi_vector(tiny_bert, {"depth": 1, "dim": 16}, expansion, device="cpu")
    if kind == "sparse":
        return Model.sparse(tiny_bert, device="cpu")
    with pytest.warns(UserWarning, match="does not say how"):
        return Model.from_pretrained(tiny_bert, device="cpu")


def gradients(step: TrainStep, batch: Batch, progress: float = 1.0) -> dict[str, torch.Tensor]:
    step.zero_grad()
    step(batch, progress).backward()
    return {name: p.grad.clone() for name, p in step.named_parameters() if p.grad is not None}


ROUNDING = torch.finfo(torch.float32).eps * 1000**0.5  # of sums of a thousand numbers


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    left, right = (torch.cat([found[name].flatten() for name in sorted(found)]) for found in (a, b))
    assert float((left - right).norm()) <= ROUNDING * float(left.norm())


class Seen:
    """A loss that keeps what it is shown."""

    kind, weight, guide, scored_only = "seen", 1.0, None, False

    def __init__(self, *needs: str) -> None:
        self.needs = frozenset(needs)

    def __call__(self, scores: Any) -> torch.Tensor:
        self.scores = scores
        return scores.own.sum() if scores.all is None else scores.all.sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("needs", [(), ("in_batch",)])
def test_the_scores_are_those_that_the_model_gives_texts(tiny_bert: Any, kind: str, needs: Any) -> None:
    model, loss = make_model(tiny_bert, kind), Seen(*needs)
    batch = make_batch(model)
    TrainStep(model, [loss])(batch)  # type: ignore[list-item]
    queries, documents = (
        model.encode_representation(batch.texts[0], "query"),
        model.encode_representation(batch.texts[1], "document"),
    )
    expected = score(queries, documents)
    mask = batch.own >= 0
    own = expected.gather(1, batch.own.clamp(min=0)).masked_fill(~mask, 0)
    torch.testing.assert_close(loss.scores.own, own, rtol=1e-4, atol=1e-4)
    assert torch.equal(loss.scores.mask, mask)
    assert not loss.scores.targets.isnan().any()
    if needs:
        torch.testing.assert_close(loss.scores.all, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(loss.scores.all.gather(1, loss.scores.columns)[mask], loss.scores.own[mask])
    else:
        assert loss.scores.all is None


@pytest.mark.parametrize(
    "loss", [KLDivergence(), MarginMSE(), MarginMSE(pairs="first"), CrossEntropy(), InfoNCE()]
)
@pytest.mark.parametrize("place", [0, 1])
def test_nothing_is_learned_from_a_document_without_token_vectors(
    tiny_bert: Any, loss: Any, place: int
) -> None:
    skipped = {"skiplist_words": ["[CLS]", "[SEP]", "a"]}
    model = Model.multi_vector(tiny_bert, {"depth": 1, "dim": 16}, skipped, device="cpu")
    batch = make_batch(model)
    texts = list(batch.texts[1])
    gone = int(batch.own[1, place])
    texts[gone] = "a a"
    emptied = replace(
        batch, documents=model.pipeline("document").tokenize(texts), texts=(batch.texts[0], texts)
    )
    seen = Seen()
    found = gradients(TrainStep(model, [loss, seen]), emptied)  # type: ignore[list-item]
    assert torch.equal(seen.scores.mask, (batch.own >= 0) & (batch.own != gone))
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_on_a_gpu_are_those_on_the_cpu(tiny_bert: Any, kind: str, size: int | None) -> None:
    model, losses = make_model(tiny_bert, kind), [KLDivergence(), InfoNCE()]
    batch = make_batch(model)
    expected = gradients(TrainStep(model, losses), batch)
    step = TrainStep(model.to("cuda"), losses, gradient_cache_size=size)
    found = gradients(step, batch.to("cuda"))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name].cpu() - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name
    with torch.autocast("cuda", torch.bfloat16):
        assert all(gradient.isfinite().all() for gradient in gradients(step, batch.to("cuda")).values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_makes_its_loss_smaller(tiny_bert: Any, kind: str) -> None:
    model = make_model(tiny_bert, kind)
    step, batch = TrainStep(model, [KLDivergence(), InfoNCE(weight=0.5)]), make_batch(model)
    optimizer = torch.optim.SGD(step.parameters(), 1e-3)
    before = step(batch)
    before.backward()
    optimizer.step()
    assert step(batch).item() < before.item()
    assert set(step.parts) >= {"kl", "infonce"}


def _scores(model: Model, batch: Batch) -> Any:
    loss = Seen("in_batch")
    TrainStep(model, [loss])(batch)  # type: ignore[list-item]
    return loss.scores


def test_losses_are_weighted_and_each_is_reported(tiny_bert: Any) -> None:
    model = make_model(tiny_bert, "dense")
    step, batch = TrainStep(model, [KLDivergence(weight=3.0), MarginMSE(weight=0.25)]), make_batch(model)
    total = step(batch)
    assert total.item() == pytest.approx(3 * float(step.parts["kl"]) + float(step.parts["margin_mse"]) / 4)


def test_losses_for_scored_examples_pass_over_the_others(tiny_bert: Any) -> None:
    model = make_model(tiny_bert, "multi_vector")
    step = TrainStep(model, [InfoNCE(), KLDivergence(scored_only=True)])
    assert step.needs == {"in_batch", "positives", "some_targets"}
    scored = make_batch(model)
    both, pairs = step(scored), step(replace(scored, targets=None))
    assert set(step.parts) == {"infonce"}
    torch.testing.assert_close(pairs, TrainStep(model, [InfoNCE()])(scored))
    torch.testing.assert_close(both, TrainStep(model, [InfoNCE(), KLDivergence()])(scored))
    with pytest.raises(BadValueError, match=r"every loss is scored_only.* leave it out of one"):
        TrainStep(model, [KLDivergence(scored_only=True)])
    with pytest.raises(ValueError, match="'scored_only' is for losses that need the scores"):
        InfoNCE(scored_only=True)
    assert InfoNCE(threshold=1.0, scored_only=True).scored_only


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_gradient_caching_changes_no_gradient(tiny_bert: Any, kind: str, size: int) -> None:
    model = make_model(tiny_bert, kind)
    batch = make_batch(model)
    plain, cached = (TrainStep(model, [InfoNCE()], gradient_cache_size=n) for n in (None, size))
    assert_close(gradients(plain, batch), gradients(cached, batch))


def test_gradient_caching_repeats_the_dropout_of_the_first_pass(
    tiny_bert: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tiny_bert, "dense").train()
    batch, step = make_batch(model), TrainStep(model, [InfoNCE()], gradient_cache_size=2)
    found = []
    for keep, seed in ((False, 5), (True, 5), (False, 6)):
        if keep:  # the same chunks, of which activations are not thrown away
            monkeypatch.setattr(
                "irkit.training.train_step.checkpoint", lambda f, *args, use_reentrant: f(*args)
            )
        torch.manual_seed(seed)
        found.append(gradients(step, batch))
    assert_close(found[0], found[1])
    with pytest.raises(AssertionError):
        assert_close(found[0], found[2])


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_caching_shows_torch_the_device_whose_random_state_counts(
    tiny_bert: Any, kind: str, record_dispatch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def checkpoint(function: Any, *args: Any, use_reentrant: bool) -> Any:
        seen.append([each.device.type for each in args if isinstance(each, torch.Tensor)])
        return function(*args)

    monkeypatch.setattr("irkit.training.train_step.checkpoint", checkpoint)
    model = make_model(tiny_bert, kind).train()
    step = TrainStep(model, [InfoNCE()], gradient_cache_size=3).to(record_dispatch.device)
    step(make_batch(model).to(record_dispatch.device))
    assert seen == [["cuda"]] * 5  # two chunks of queries, three of documents


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_caching_repeats_the_dropout_of_a_gpu(
    tiny_bert: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tiny_bert, kind).to("cuda").train()
    batch, step = make_batch(model).to("cuda"), TrainStep(model, [InfoNCE()], gradient_cache_size=2)
    found = []
    for keep, seed in ((False, 5), (True, 5), (False, 6)):
        if keep:
            monkeypatch.setattr(
                "irkit.training.train_step.checkpoint", lambda f, *args, use_reentrant: f(*args)
            )
        torch.manual_seed(seed)
        found.append(gradients(step, batch))
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name
    with pytest.raises(AssertionError):
        assert_close(found[0], found[2])


@pytest.mark.sampled
@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("kind", ["dense", "multi_vector", "sparse"])
def test_a_step_on_a_gpu_waits_for_nothing(
    tiny_bert: Any, kind: str, size: int | None, record_dispatch: Any
) -> None:
    model = make_model(tiny_bert, kind)
    losses = [KLDivergence(), InfoNCE(), MarginMSE()]
    batch = make_batch(model)
    expected = gradients(TrainStep(model, losses), batch)
    step = TrainStep(model, losses, gradient_cache_size=size).to(record_dispatch.device)
    if kind == "sparse":  # a move to this device, unlike one to CUDA, makes new parameters
        model.head.weight = model.encoder.word_embeddings
    step.zero_grad()
    record_dispatch.clear()
    there = batch.to(record_dispatch.device)
    step(there, 1.0).backward()
    assert not record_dispatch.waits
    assert not record_dispatch.pageable
    found = {name: weight.grad.cpu() for name, weight in step.named_parameters() if weight.grad is not None}
    assert_close(expected, found)


@pytest.mark.parametrize("kind", ["dense", "multi_vector"])
def test_scores_of_own_documents_alone_make_no_device_wait(
    tiny_bert: Any, kind: str, record_dispatch: Any
) -> None:
    model = make_model(tiny_bert, kind)
    batch, loss = make_batch(model), KLDivergence()
    expected = gradients(TrainStep(model, [loss]), batch)
    step = TrainStep(model, [loss]).to(record_dispatch.device)
    step.zero_grad()
    record_dispatch.clear()
    there = batch.to(record_dispatch.device)
    step(there, 1.0).backward()
    assert not record_dispatch.waits
    found = {name: weight.grad.cpu() for name, weight in step.named_parameters() if weight.grad is not None}
    assert_close(expected, found)


def test_gradient_caching_keeps_the_activations_of_one_chunk_only(tiny_bert: Any) -> None:
    model = make_model(tiny_bert, "dense")
    batch = make_batch(model)

    def kept(size: int | None) -> int:
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            TrainStep(model, [InfoNCE()], gradient_cache_size=size)(batch)
        return total

    assert kept(1) < kept(None) / 20


def test_layers_can_be_checkpointed(tiny_bert: Any) -> None:
    model = make_model(tiny_bert, "multi_vector")
    step, batch = TrainStep(model, [InfoNCE()]), make_batch(model)
    plain = gradients(step, batch)
    step.activation_checkpointing_enable()
    assert_close(plain, gradients(step, batch))


@pytest.mark.parametrize("kind", ["dense", "multi_vector"])
def test_matryoshka_sums_the_losses_of_cut_vectors(tiny_bert: Any, kind: str) -> None:
    model, batch = make_model(tiny_bert, kind), None
    batch = make_batch(model)
    step = TrainStep(model, [InfoNCE()], matryoshka=Matryoshka(dims=(16, 4), weights=(1.0, 0.5)))
    total = step(batch)
    expected = 0.0
    for dim, weight in ((16, 1.0), (4, 0.5)):
        model.truncate_dim = dim
        expected += weight * TrainStep(model, [InfoNCE()])(batch).item()
        model.truncate_dim = None
    assert total.item() == pytest.approx(expected, rel=1e-5)
    assert set(step.parts) == {"infonce_16", "infonce_4"}


def test_another_interaction_is_used_and_trained(tiny_bert: Any) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, queries: MultiVector, documents: MultiVector) -> torch.Tensor:
            return self.scale * score(queries, documents)

    model = make_model(tiny_bert, "multi_vector")
    batch = make_batch(model)
    step = TrainStep(model, [MarginMSE()], interaction=Scaled())
    loss = Seen()
    TrainStep(model, [loss], interaction=Scaled())(batch)  # type: ignore[list-item]
    torch.testing.assert_close(loss.scores.own, 2 * _scores(model, batch).own)
    assert "interaction.scale" in gradients(step, batch)


def test_regularizers_see_weights_and_progress(tiny_bert: Any) -> None:
    model = make_model(tiny_bert, "sparse")
    batch = make_batch(model)
    with torch.no_grad():
        sides = zip(batch.texts, ("query", "document"), strict=True)
        rows = [model.encode_representation(texts, side).to_dense() for texts, side in sides]
    flops = [float((row.mean(0) ** 2).sum()) for row in rows]
    regularizer = Flops(query=0.5, document=0.25, schedule="linear", warmup=0.5)
    step = TrainStep(model, [KLDivergence()], regularizers=[regularizer])
    alone = TrainStep(model, [KLDivergence()])(batch).item()
    for progress, factor in ((0.0, 0.0), (0.25, 0.5), (1.0, 1.0)):
        expected = alone + factor * (0.5 * flops[0] + 0.25 * flops[1])
        assert step(batch, progress).item() == pytest.approx(expected, rel=1e-4)
    assert float(step.parts["active_dims_query"]) == pytest.approx(float((rows[0] > 0).sum(1).float().mean()))


@pytest.mark.parametrize("choice", ["lexical", "static"])
def test_queries_without_an_encoder(tiny_bert: Any, choice: str) -> None:
    model = Model.sparse(tiny_bert, queries=choice)
    batch = make_batch(model)
    step = TrainStep(model, [InfoNCE()], regularizers=[Flops(query=1.0, document=1e-3)])
    found = gradients(step, batch)
    assert ("model.query_model.head.weight" in found) == (choice == "static")
    assert step(batch, 1.0).item() > 0


def test_pruned_weights_are_what_is_trained(tiny_bert: Any) -> None:
    model = Model.sparse(tiny_bert, {"document_max_active_dims": 5})
    step, batch = TrainStep(model, [InfoNCE()]), make_batch(model)
    step(batch)
    assert float(step.parts["active_dims_document"]) <= 5


def test_a_guide_of_another_width_is_refused_before_the_first_step(tiny_bert: Any, tmp_path: Any) -> None:
    guide, loss = make_model(tiny_bert, "dense"), Seen("vectors", "guide")
    guide.save_pretrained(tmp_path / "guide")
    loss.guide = str(tmp_path / "guide")
    TrainStep(guide, [loss], matryoshka=Matryoshka(dims=(guide.dim,)))
    with pytest.raises(BadValueError, match="no matryoshka"):
        TrainStep(guide, [loss], matryoshka=Matryoshka(dims=(8, guide.dim)))


def test_a_guide_is_asked_and_not_trained(tiny_bert: Any, tmp_path: Any) -> None:
    guide = make_model(tiny_bert, "dense")
    guide.save_pretrained(tmp_path / "guide")
    model = make_model(tiny_bert, "multi_vector")
    batch = make_batch(model)
    loss = Seen("in_batch", "guide")
    loss.guide = str(tmp_path / "guide")
    step = TrainStep(model, [loss])  # type: ignore[list-item]
    step(batch)
    values, queries, documents = loss.scores.guide()
    own = [guide.encode_representation(texts, "document") for texts in batch.texts]
    torch.testing.assert_close(values, score(*own))
    assert queries.shape == (4, 32)
    assert documents.shape == (len(batch.documents), 32)
    assert not any("guide" in name for name, _ in step.named_parameters())


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("dense", {"losses": []}, "got no loss"),
        ("dense", {"regularizers": [Flops(document=1.0)]}, "flops is for sparse models"),
        ("dense", {"matryoshka": Matryoshka(dims=(64,))}, "64 dimensions of dense vectors of 32"),
        ("sparse", {"matryoshka": Matryoshka(dims=(8,))}, "sparse vectors"),
        ("dense", {"interaction": score}, "for token vectors"),
        ("multi_vector", {"losses": [Seen("vectors")]}, "seen compares a vector a text"),
    ],
)
def test_what_does_not_go_together(tiny_bert: Any, kind: str, arguments: Any, message: str) -> None:
    with pytest.raises(BadValueError, match=message):
        TrainStep(make_model(tiny_bert, kind), **{"losses": [InfoNCE()], **arguments})


def test_attention_does_not_go_with_cut_vectors(tiny_bert: Any) -> None:
    model = make_model(tiny_bert, "multi_vector")
    dims = (model.dim, model.dim // 2)
    with pytest.raises(BadValueError, match=r"matryoshka cuts token vectors, which attention \(mva\)"):
        TrainStep(
            model,
            [InfoNCE()],
            matryoshka=Matryoshka(dims=dims),
            interaction=make_interaction(MVA(), model),  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("kind", ["dense", "multi_vector"])
def test_heads_run_in_float32_in_a_training_in_bfloat16(tiny_bert: Any, kind: str) -> None:
    head = make_model(tiny_bert, kind).head
    hidden = torch.randn(7, head.hidden_size)
    expected = head.apply_layers(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head.apply_layers(hidden), expected)


def test_xtr_compares_the_documents_of_all_processes(tiny_bert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = make_model(tiny_bert, "multi_vector"), []
    real = train_step.join

    def join(*arguments: Any, **options: Any) -> Any:
        asked.append(options["every_document"])
        return real(*arguments, **options)

    monkeypatch.setattr(train_step, "join", join)
    for interaction in (None, make_interaction(XTR(k=3), model)):
        TrainStep(model, [MarginMSE()], interaction=interaction)(make_batch(model))  # type: ignore[arg-type]
    assert asked == [False, True]
