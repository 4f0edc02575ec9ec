"""Losses and regularisers have the values and gradients of sentence-transformers' classes and of PyLate's."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from irkit.training.losses import (
    BaseLoss,
    CosineSimilarity,
    EmbeddingDistillation,
    InfoNCE,
    KLDivergence,
    LambdaRank,
    MarginMSE,
    RankNet,
)
from irkit.training.regularizers import Flops
from irkit.training.scores import Scores

DIM = 7
shapes = st.tuples(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5))
each_shape = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def theirs(peer: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers.cross_encoder import losses as of_lists
        from sentence_transformers.sentence_transformer import losses
        from sentence_transformers.sparse_encoder import losses as of_sparse
    return {
        name: getattr(module, name) for module in (of_lists, losses, of_sparse) for name in module.__all__
    }


class Group:
    """Queries and columns of documents as they take them, and the same as `Scores`."""

    def __init__(
        self, shape: tuple[int, int, int], *, unit: bool = False, dtype: torch.dtype = torch.float64
    ) -> None:
        seed, b, n = shape
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(b, DIM, generator=generator, dtype=dtype).requires_grad_() for _ in range(1 + n)]
        self.leaves = made
        queries, *columns = [F.normalize(each, dim=1) for each in made] if unit else made
        self.embeddings = [queries, *columns]
        self.labels = torch.randn(b, n, generator=generator, dtype=dtype)
        self.guides = [torch.randn(b, DIM, generator=generator, dtype=dtype) for _ in range(1 + n)]
        documents = torch.cat(columns)  # column j of query i is row j * b + i
        rows = torch.arange(n) * b + torch.arange(b)[:, None]
        matrix, guided = queries @ documents.T, torch.cat(self.guides[1:])
        relevant = torch.zeros(b, b * n, dtype=torch.bool)
        relevant[torch.arange(b), torch.arange(b)] = True
        unit_guides = F.normalize(self.guides[0], dim=1) @ F.normalize(guided, dim=1).T
        self.scores = Scores(
            own=matrix.gather(1, rows),
            mask=torch.ones(b, n, dtype=torch.bool),
            positives=torch.ones(b, dtype=torch.int64),
            targets=self.labels,
            all=matrix,
            columns=rows,
            relevant=relevant,
            queries=queries,
            documents=documents,
            guide=lambda: (unit_guides, self.guides[0], guided),
        )

    def agree(self, ours: BaseLoss, value: Tensor, factor: float = 1.0, **tolerance: float) -> None:
        """Values and gradients of both, ours times ``factor``."""
        mine = ours(self.scores) * factor
        torch.testing.assert_close(mine, value, **tolerance)
        found = torch.autograd.grad(mine, self.leaves, retain_graph=True, allow_unused=True)
        expected = torch.autograd.grad(value, self.leaves, retain_graph=True, allow_unused=True)
        for one, other, leaf in zip(found, expected, self.leaves, strict=True):
            none = torch.zeros_like(leaf)
            torch.testing.assert_close(
                none if one is None else one, none if other is None else other, **tolerance
            )


@given(shape=shapes, scale=st.sampled_from([1.0, 20.0]))
@each_shape
def test_infonce_is_multiple_negatives_ranking(theirs: Any, shape: Any, scale: float) -> None:
    group = Group(shape, unit=True)
    peer = theirs["MultipleNegativesRankingLoss"](None, scale=scale)
    value = peer.compute_loss_from_embeddings(group.embeddings, None)
    group.agree(InfoNCE(temperature=1 / scale), value)


@given(shape=shapes)
@each_shape
def test_symmetric_infonce(theirs: Any, shape: Any) -> None:
    group = Group(shape, unit=True)
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    peer = theirs["MultipleNegativesRankingLoss"](None, scale=5.0, **both)
    value = peer.compute_loss_from_embeddings(group.embeddings, None)
    group.agree(InfoNCE(temperature=0.2, symmetric=True), value)


@given(
    shape=st.tuples(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 2)),
    strategy=st.sampled_from(["absolute", "relative"]),
    margin=st.floats(-0.2, 0.4),
)
@each_shape
def test_a_guide_filters_as_gist_embed(
    theirs: Any, shape: Any, strategy: Any, margin: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(shape, unit=True)
    peer = object.__new__(theirs["GISTEmbedLoss"])  # its constructor wants two models with tokenizers
    nn.Module.__init__(peer)
    peer.temperature, peer.margin, peer.margin_strategy = 0.1, margin, strategy
    peer.contrast_anchors = peer.contrast_positives = peer.must_retokenize = peer.gather_across_devices = (
        False
    )
    peer.similarity_fct, peer.cross_entropy_loss = nn.CosineSimilarity(dim=-1), nn.CrossEntropyLoss()
    peer.model, peer.guide = None, nn.Identity()
    columns = {None: group.embeddings, peer.guide: group.guides}
    module = type(peer).forward.__globals__
    with monkeypatch.context() as patch:
        patch.setitem(module, "embed_columns", lambda model, features: columns[model])
        value = peer([{}] * len(group.guides), None)
    ours = InfoNCE(temperature=0.1, guide="g", margin=margin, margin_strategy=strategy)
    group.agree(ours, value)


@given(shape=st.tuples(st.integers(0, 10**6), st.integers(1, 6), st.integers(2, 5)))
@each_shape
def test_margin_mse_of_the_first_document(theirs: Any, shape: Any) -> None:
    group = Group(shape)
    value = theirs["MarginMSELoss"](None).compute_loss_from_embeddings(group.embeddings, group.labels)
    group.agree(MarginMSE(pairs="first"), value)
    if shape[2] == 2:
        value = theirs["MarginMSELoss"](None).compute_loss_from_embeddings(group.embeddings, group.labels)
        group.agree(MarginMSE(), value)


@given(
    shape=st.tuples(st.integers(0, 10**6), st.integers(1, 6), st.integers(2, 5)),
    temperatures=st.tuples(st.floats(0.1, 4), st.none() | st.floats(0.1, 4)),
)
@each_shape
def test_kl_divergence(theirs: Any, shape: Any, temperatures: tuple[float, float | None]) -> None:
    group, (student, teacher) = Group(shape), temperatures
    peer = theirs["DistillKLDivLoss"](None, temperature=student, teacher_temperature=teacher)
    peer._checked_teacher_scale = True  # it warns of teachers that are all but certain
    value = peer.compute_loss_from_embeddings(group.embeddings, group.labels)
    group.agree(KLDivergence(temperature=student, teacher_temperature=teacher), value)


@given(shape=st.tuples(st.integers(0, 10**6), st.integers(1, 6), st.integers(2, 5)))
@each_shape
def test_kl_divergence_of_pylate(shape: Any) -> None:
    group = Group(shape)
    low, high = (f(group.scores.own, dim=1, keepdim=True).values for f in (torch.min, torch.max))
    # PyLate adds 1e-8 to the range, which is another gradient where scores are nearly equal
    student = F.log_softmax((group.scores.own - low) / (high - low), dim=-1)
    value = F.kl_div(student, F.log_softmax(group.labels, dim=-1), reduction="batchmean", log_target=True)
    group.agree(KLDivergence(normalize_scores="minmax"), value)


@given(shape=st.tuples(st.integers(0, 10**6), st.integers(1, 6), st.just(1)), dtype=st.just(torch.float32))
@each_shape
def test_losses_on_vectors(theirs: Any, shape: Any, dtype: torch.dtype) -> None:
    group = Group(shape, dtype=dtype)
    value = theirs["CosineSimilarityLoss"](None).compute_loss_from_embeddings(group.embeddings, group.labels)
    group.agree(CosineSimilarity(), value)
    for distance in ("mse", "cosine"):
        peer = theirs["EmbedDistillLoss"](None, distance_metric=distance)
        value = peer.compute_loss_from_embeddings(group.embeddings, group.guides)
        group.agree(EmbeddingDistillation(guide="g", distance=distance), value)


class Ranker(nn.Module):
    """A cross-encoder whose scores are given: text ``"3"`` has the fourth."""

    num_labels, device = 1, "cpu"

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.given = scores

    def preprocess(self, pairs: list[tuple[str, str]], **_: Any) -> dict[str, Tensor]:
        return {"rows": torch.tensor([int(document) for _, document in pairs])}

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"scores": self.given[features["rows"]]}


@given(shape=st.tuples(st.integers(0, 10**6), st.just(1), st.integers(2, 6)), k=st.none() | st.integers(1, 4))
@each_shape
def test_ranknet_lambdarank_and_listnet(theirs: Any, shape: Any, k: int | None) -> None:
    # one query a batch: they average over all pairs of it, we over those of each query (LambdaRank: we sum)
    group, n = Group(shape, dtype=torch.float32), shape[2]
    ranker, loose = Ranker(group.scores.own[0]), {"rtol": 1e-4, "atol": 1e-5}
    batch = [["q"], [[str(i) for i in range(n)]]], [group.labels[0]]
    group.agree(RankNet(), theirs["RankNetLoss"](ranker, reduction_log="natural")(*batch), **loose)
    if k is not None and k > n:
        k = None
    scheme = theirs["LambdaRankScheme"]()
    value = theirs["LambdaLoss"](ranker, weighting_scheme=scheme, k=k, reduction_log="natural")(*batch)
    order = group.scores.own[0].argsort(descending=True).argsort() + 1
    counted = min(k or n, n)
    pairs = sum(
        bool(group.labels[0, i] > group.labels[0, j] and min(order[i], order[j]) <= counted)
        for i in range(n)
        for j in range(n)
    )
    group.agree(LambdaRank(k=k), value, factor=1 / max(1, pairs), **loose)
    # cross-entropy from the softmax of targets is the KL divergence and the entropy of the targets
    entropy = torch.distributions.Categorical(logits=group.labels[0]).entropy()
    group.agree(KLDivergence(), theirs["ListNetLoss"](ranker)(*batch) - entropy, **loose)


@given(shape=shapes, threshold=st.none() | st.integers(1, DIM))
@each_shape
def test_flops(theirs: Any, shape: Any, threshold: int | None) -> None:
    group = Group(shape)
    queries, documents = (each.relu() for each in (group.embeddings[0], group.scores.documents))  # type: ignore[union-attr]
    peer = theirs["FlopsLoss"](None, threshold=threshold)
    value = 2.0 * peer.compute_loss_from_embeddings(queries) + 3.0 * peer.compute_loss_from_embeddings(
        documents
    )
    ours = Flops(query=2.0, document=3.0, threshold=threshold)(queries, documents, 1.0)
    torch.testing.assert_close(ours, value)
    for one, other in zip(
        *(torch.autograd.grad(each, group.leaves, retain_graph=True) for each in (ours, value)), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("schedule", ["linear", "quadratic"])
def test_schedules_of_regularizers(peer: Any, schedule: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers.sparse_encoder.callbacks import SchedulerType
        from sentence_transformers.sparse_encoder.callbacks import (
            SpladeRegularizerWeightSchedulerCallback as Peer,
        )
    callback = object.__new__(Peer)
    callback.scheduler_type, callback.warmup_steps = SchedulerType(schedule), 30
    ours = Flops(document=4.0, schedule=schedule, warmup=0.3)
    for step in (0, 1, 10, 29, 30, 31, 100):
        assert 4.0 * ours.factor(step / 100) == pytest.approx(callback._calculate_weight_value(step, 4.0))
