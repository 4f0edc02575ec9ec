"""Losses: formulas written out again, gradients, groups of different sizes, and extreme scores."""

import itertools
import math
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from irkit.config import Config
from irkit.errors import BadValueError, ConfigError
from irkit.training.losses import LOSSES as TABLE
from irkit.training.losses import (
    ApproxNDCG,
    BaseLoss,
    CosineSimilarity,
    CrossEntropy,
    EmbeddingDistillation,
    InfoNCE,
    KLDivergence,
    LambdaRank,
    ListwiseSoftmax,
    Loss,
    MarginMSE,
    Matryoshka,
    PairwiseCrossEntropy,
    RankNet,
    ScoreMSE,
)
from irkit.training.losses.loss import normalize
from irkit.training.regularizers import REGULARIZERS
from irkit.training.scores import Scores
from irkit.utils.kinds import KindOf
from irkit.utils.plugins import Registry

DIM = 6
LOSSES: dict[str, BaseLoss] = {
    "kl": KLDivergence(temperature=0.7, teacher_temperature=2.0),
    "kl_normalized": KLDivergence(normalize_scores="minmax", normalize_targets="zscore"),
    "margin_mse": MarginMSE(),
    "margin_mse_first": MarginMSE(pairs="first", normalize_scores="zscore"),
    "score_mse": ScoreMSE(normalize_targets="minmax"),
    "infonce": InfoNCE(temperature=0.3),
    "infonce_threshold": InfoNCE(threshold=0.5),
    "infonce_symmetric": InfoNCE(symmetric=True),
    "infonce_guide": InfoNCE(guide="g", margin=0.1, margin_strategy="relative"),
    "cross_entropy": CrossEntropy(temperature=0.5),
    "pairwise": PairwiseCrossEntropy(),
    "ranknet": RankNet(temperature=2.0),
    "softmax": ListwiseSoftmax(),
    "lambdarank": LambdaRank(k=2),
    "approx_ndcg": ApproxNDCG(temperature=0.2),
    "cosine": CosineSimilarity(),
    "embedding": EmbeddingDistillation(guide="g"),
    "embedding_cosine": EmbeddingDistillation(guide="g", distance="cosine"),
}
shapes = st.tuples(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 5))


def vectors(seed: int, b: int, n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(size, DIM, generator=generator, dtype=torch.float64) for size in (b, b * n + 1))
    return tuple(each.requires_grad_() for each in made)  # type: ignore[return-value]


def scores_of(queries: Tensor, documents: Tensor, seed: int, n: int) -> Scores:
    """Ragged groups that share documents, 0 to 2 positives a query, other documents known to be relevant."""
    generator = torch.Generator().manual_seed(seed + 1)
    b, d = len(queries), len(documents)
    own = torch.stack([torch.randperm(d, generator=generator)[:n] for _ in range(b)])
    lengths = torch.randint(1, n + 1, (b,), generator=generator)
    mask = torch.arange(n) < lengths[:, None]
    positives = torch.minimum(torch.randint(0, 3, (b,), generator=generator), lengths)
    relevant = torch.rand(b, d, generator=generator) < 0.1
    for row in range(b):
        relevant[row, own[row, : positives[row]]] = True
    columns = own.masked_fill(~mask, 0)
    matrix = queries @ documents.T
    theirs = [torch.randn(size, DIM, generator=generator, dtype=queries.dtype) for size in (b, d)]
    return Scores(
        own=matrix.gather(1, columns).masked_fill(~mask, 0),
        mask=mask,
        positives=positives,
        targets=torch.randn(b, n, generator=generator, dtype=queries.dtype).masked_fill(~mask, 0),
        all=matrix,
        columns=columns,
        relevant=relevant,
        queries=queries,
        documents=documents,
        guide=lambda: (theirs[0] @ theirs[1].T, theirs[0], theirs[1]),
    )


def of_own(own: Any, targets: Any = None, positives: int = 1) -> Scores:
    own = torch.tensor(own, dtype=torch.float64)
    own = own[None] if own.ndim == 1 else own
    return Scores(
        own=own,
        mask=torch.ones_like(own, dtype=torch.bool),
        positives=torch.full((len(own),), positives),
        targets=None if targets is None else torch.tensor(targets, dtype=own.dtype).view_as(own),
    )


# ------------------------------------------------------------------------------------- formulas written out


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value) for value in values]
    return [power / sum(powers) for power in powers]


def share(positive: float, negatives: list[float]) -> float:
    return -math.log(math.exp(positive) / (math.exp(positive) + sum(map(math.exp, negatives))))


def mean(terms: list[float]) -> float:
    return sum(terms) / max(1, len(terms))


def kl(s: list[float], y: list[float]) -> float:
    teacher, student = softmax([value / 2.0 for value in y]), softmax([value / 0.7 for value in s])
    return 0.7**2 * sum(p * math.log(p / q) for p, q in zip(teacher, student, strict=True))


def margin_mse(s: list[float], y: list[float]) -> float:
    pairs = itertools.combinations(range(len(s)), 2)
    return mean([((y[i] - y[j]) - (s[i] - s[j])) ** 2 for i, j in pairs])


def ranknet(s: list[float], y: list[float]) -> float:
    pairs = itertools.permutations(range(len(s)), 2)
    return mean([math.log(1 + math.exp((s[j] - s[i]) / 2.0)) for i, j in pairs if y[i] > y[j]])


def listwise_softmax(s: list[float], y: list[float]) -> float:
    return -sum(max(0, target) * math.log(share) for target, share in zip(y, softmax(s), strict=True))


def dcg(gains: list[float]) -> float:
    return sum(gain / math.log2(2 + place) for place, gain in enumerate(gains))


def approx_ndcg(s: list[float], y: list[float]) -> float:
    ranks = [0.5 + sum(1 / (1 + math.exp((mine - other) / 0.2)) for other in s) for mine in s]
    gains = [2 ** max(0, value) - 1 for value in y]
    found = sum(gain / math.log2(1 + rank) for gain, rank in zip(gains, ranks, strict=True))
    return 1 - found / max(dcg(sorted(gains, reverse=True)), 1e-12)


def lambdarank(s: list[float], y: list[float]) -> float:
    ranks = [1 + sum(other > mine for other in s) for mine in s]
    gains = [2 ** max(0, value) - 1 for value in y]
    ideal = max(dcg(sorted(gains, reverse=True)[:2]), 1e-12)
    total = 0.0
    for i, j in itertools.permutations(range(len(s)), 2):
        if y[i] > y[j] and min(ranks[i], ranks[j]) <= 2:
            change = (
                (gains[i] - gains[j]) / ideal * (1 / math.log2(1 + ranks[i]) - 1 / math.log2(1 + ranks[j]))
            )
            total += abs(change) * math.log(1 + math.exp(s[j] - s[i]))
    return total


LISTWISE = [kl, margin_mse, ranknet, listwise_softmax, approx_ndcg, lambdarank]
NAMES = {listwise_softmax: "softmax"}


@pytest.mark.parametrize("formula", LISTWISE)
@given(shape=shapes)
@settings(max_examples=25, deadline=None)
def test_values_of_losses_with_targets(formula: Any, shape: tuple[int, int, int]) -> None:
    seed, b, n = shape
    scores = scores_of(*vectors(seed, b, n), seed, n)
    assert scores.targets is not None
    groups = zip(scores.own, scores.targets, scores.mask, strict=True)
    values = [formula(own[mask].tolist(), targets[mask].tolist()) for own, targets, mask in groups]
    value = LOSSES[NAMES.get(formula, formula.__name__)](scores).item()
    assert value == pytest.approx(mean(values), rel=1e-9, abs=1e-12)


def contrastive(name: str, scores: Scores, i: int) -> float:
    """The loss of query ``i`` by its formula, document by document."""
    size, positives = int(scores.mask[i].sum()), int(scores.positives[i])
    temperature = {"infonce": 0.3, "cross_entropy": 0.5}.get(name, 1.0)
    everything, columns = (scores.all[i] / temperature).tolist(), scores.columns[i, :size].tolist()  # type: ignore
    good, bad = columns[:positives], columns[positives:]
    if name == "infonce_threshold":
        targets = dict(zip(columns, scores.targets[i].tolist(), strict=False))  # type: ignore[index]
        good = [max(columns, key=targets.__getitem__)]
        bad = [column for column in columns if targets[good[0]] - targets[column] > 0.5]
    if name == "pairwise":
        return mean([share(everything[j], [everything[k]]) for j in good for k in bad])
    if name != "cross_entropy":
        others = [column for column in range(len(everything)) if column not in columns]
        bad = [column for column in bad + others if not scores.relevant[i, column]]  # type: ignore[index]
    if name == "infonce_guide":
        guided = scores.guide()[0][i].tolist()  # type: ignore[misc]
        anchor = min((guided[column] for column in good), default=math.inf)
        bad = [column for column in bad if guided[column] <= anchor - 0.1 * abs(anchor)]
    value = mean([share(everything[column], [everything[other] for other in bad]) for column in good])
    if name == "infonce_symmetric":
        first = columns[0]
        others = [j for j in range(len(scores.own)) if j != i and not scores.relevant[j, first]]  # type: ignore[index]
        back = share(everything[first], [scores.all[j, first].item() for j in others])  # type: ignore[index]
        value = (value + (back if good else 0)) / 2
    return value


@pytest.mark.parametrize(
    "name",
    [
        *("infonce", "infonce_threshold", "infonce_guide", "infonce_symmetric", "cross_entropy", "pairwise"),
    ],
)
@given(shape=shapes)
@settings(max_examples=25, deadline=None)
def test_values_of_losses_with_positives(name: str, shape: tuple[int, int, int]) -> None:
    seed, b, n = shape
    with torch.no_grad():
        scores = scores_of(*vectors(seed, b, n), seed, n)
        values = [contrastive(name, scores, i) for i in range(b)]
        assert LOSSES[name](scores).item() == pytest.approx(sum(values) / b, rel=1e-9, abs=1e-12)


def test_values_by_hand() -> None:
    # e = y - r = (1, -1, 0): ((2)^2 + (1)^2 + (1)^2) / 3
    scores = of_own([1.0, 1.0, 0.0], [2.0, 0.0, 0.0])
    assert MarginMSE()(scores).item() == pytest.approx(2.0)
    assert MarginMSE(pairs="first")(scores).item() == pytest.approx(2.5)
    assert ScoreMSE()(scores).item() == pytest.approx(2 / 3)
    assert CrossEntropy()(scores).item() == pytest.approx(math.log((2 * math.e + 1) / math.e))
    assert PairwiseCrossEntropy()(scores).item() == pytest.approx(
        (math.log(2) + math.log(1 + 1 / math.e)) / 2
    )
    # the best document is at rank 1 or 2, a tie: 1.5
    assert ApproxNDCG(temperature=1e-6)(scores).item() == pytest.approx(1 - 1 / math.log2(2.5))


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.sampled
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    for seed in range(3):
        queries, documents = vectors(seed, 3, 4)
        loss = LOSSES[name]
        assert torch.autograd.gradcheck(lambda q, d: loss(scores_of(q, d, seed, 4)), (queries, documents))  # noqa: B023


def gradients(loss: BaseLoss, scores: Scores, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss(scores), leaves, retain_graph=True))


@pytest.mark.parametrize("name", LOSSES)
@given(shape=shapes)
@settings(max_examples=10, deadline=None)
def test_filling_up_changes_nothing(name: str, shape: tuple[int, int, int]) -> None:
    seed, b, n = shape
    leaves = vectors(seed, b, n)
    scores = scores_of(*leaves, seed, n)
    more = torch.zeros(b, 3)
    wider = replace(
        scores,
        own=torch.cat([scores.own, more], 1),
        mask=torch.cat([scores.mask, more.bool()], 1),
        columns=torch.cat([scores.columns, more.long()], 1),  # type: ignore[list-item]
        targets=torch.cat([scores.targets, more], 1),  # type: ignore[list-item]
    )
    loss = LOSSES[name]
    torch.testing.assert_close(loss(wider), loss(scores))
    for one, other in zip(gradients(loss, scores, *leaves), gradients(loss, wider, *leaves), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "infonce_symmetric"])
def test_the_mean_over_parts_of_a_batch_is_that_of_the_batch(name: str) -> None:
    # what makes gradients of several processes those of one; the documents are those of all
    leaves = vectors(3, 4, 3)
    scores = scores_of(*leaves, 3, 3)
    parts = []
    for rows in (slice(0, 2), slice(2, 4)):
        theirs = scores.guide()  # type: ignore[misc]
        cut = {key: getattr(scores, key)[rows] for key in ("own", "mask", "positives", "targets", "queries")}
        cut |= {key: getattr(scores, key)[rows] for key in ("all", "columns", "relevant")}
        guide = (theirs[0][rows], theirs[1][rows], theirs[2])
        parts.append(LOSSES[name](Scores(**cut, documents=scores.documents, guide=lambda guide=guide: guide)))
    torch.testing.assert_close((parts[0] + parts[1]) / 2, LOSSES[name](scores))


# -------------------------------------------------------------------------------- left out, and extremes


def test_known_and_repeated_positives_are_no_negatives() -> None:
    everything = torch.tensor([[1.0, 5.0, 2.0], [0.0, 5.0, 3.0]])
    scores = Scores(
        own=torch.tensor([[1.0], [5.0]]),
        mask=torch.ones(2, 1, dtype=torch.bool),
        positives=torch.ones(2, dtype=torch.int64),
        all=everything,
        columns=torch.tensor([[0], [1]]),
        relevant=torch.tensor([[True, True, False], [False, True, False]]),
    )
    first = math.log(1 + math.exp(2 - 1))  # not against document 1
    second = math.log(1 + math.exp(0 - 5) + math.exp(3 - 5))
    assert InfoNCE()(scores).item() == pytest.approx((first + second) / 2)
    # as the documents see it: document 0 against query 1; document 1 is relevant to both queries
    back = (math.log(1 + math.exp(0 - 1)) + 0) / 2
    assert InfoNCE(symmetric=True)(scores).item() == pytest.approx(((first + second) / 2 + back) / 2)


def test_positives_do_not_compete() -> None:
    apart, together = of_own([[3.0, 0.0], [1.0, 0.0]]), of_own([3.0, 1.0, 0.0], positives=2)
    assert CrossEntropy()(together).item() == pytest.approx(CrossEntropy()(apart).item())


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_to_compare_has_no_gradient(name: str) -> None:
    queries, documents = (torch.randn(1, DIM, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scores = scores_of(queries, documents, 0, 1)
    scores = replace(scores, positives=torch.zeros(1, dtype=torch.int64), relevant=torch.zeros(1, 1).bool())
    value, found = LOSSES[name](scores), gradients(LOSSES[name], scores, queries, documents)
    assert value.isfinite()
    if name not in ("score_mse", "cosine", "embedding", "embedding_cosine"):
        assert all(gradient.abs().max() < 1e-12 for gradient in found)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e4, 1e12])
def test_extreme_scores_stay_numbers(name: str, size: float) -> None:
    for seed in range(3):
        queries, documents = (each.detach().float().requires_grad_() for each in vectors(seed, 3, 4))
        scores = scores_of(queries * size, documents, seed, 4)
        scores = replace(scores, targets=scores.targets * size)  # type: ignore[operator]
        value = LOSSES[name](scores)
        assert value.isfinite(), (name, value)
        assert all(each.isfinite().all() for each in gradients(LOSSES[name], scores, queries, documents))


def test_an_empty_document_is_a_negative_of_no_weight() -> None:
    own = torch.tensor([[1.0, -math.inf, 0.0]], requires_grad=True)
    scores = Scores(own, torch.ones(1, 3, dtype=torch.bool), torch.ones(1, dtype=torch.int64))
    for loss in (CrossEntropy(), PairwiseCrossEntropy()):
        value = loss(scores)
        (gradient,) = torch.autograd.grad(value, own)
        assert value.isfinite()
        assert gradient[0, 1] == 0
        assert gradient.isfinite().all()


# -------------------------------------------------------------------------------------------- normalisation


@given(
    shape=shapes,
    how=st.sampled_from(["minmax", "zscore"]),
    scale=st.floats(0.01, 100),
    shift=st.floats(-50, 50),
)
@settings(deadline=None, max_examples=50)
def test_normalization_forgets_scale_and_shift(
    shape: tuple[int, int, int], how: Any, scale: float, shift: float
) -> None:
    seed, b, n = shape
    scores = scores_of(*vectors(seed, b, n), seed, n)
    scores = replace(scores, own=scores.own.detach())
    made = normalize(scores.own, scores.mask, how)
    torch.testing.assert_close(
        normalize(scores.own * scale + shift, scores.mask, how), made, rtol=1e-6, atol=1e-6
    )
    assert not made[~scores.mask].any()
    for row, mask in zip(made, scores.mask, strict=True):
        if how == "minmax" and mask.sum() > 1:
            assert row[mask].min() == 0
            assert row[mask].max().item() == pytest.approx(1)
        elif mask.sum() > 1:
            assert row[mask].mean().item() == pytest.approx(0, abs=1e-9)
            assert row[mask].std(correction=0).item() == pytest.approx(1)


@pytest.mark.parametrize("how", ["minmax", "zscore"])
def test_equal_scores_have_no_scale(how: Any) -> None:
    scores = torch.tensor([[0.1 + 0.2, 0.3, 0.3], [4.0, 0.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    made = normalize(scores, mask, how)
    made.square().sum().backward()
    assert not made.any()
    assert scores.grad is not None
    assert not scores.grad.any()


# ----------------------------------------------------------------------------------------- configuration


class Recipe(Config):
    losses: list[Loss]


@pytest.mark.parametrize(("difference", "negative"), [(2.75, False), (3.0, False), (3.25, True)])
def test_a_negative_of_the_threshold_is_worse_by_more_than_it(difference: float, negative: bool) -> None:
    """TITE, section 3.4: in-sample negatives are those with ``y+ - y > theta``."""
    own, mask = torch.tensor([[1.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    scores = Scores(
        own=own,
        mask=mask,
        positives=torch.ones(1, dtype=torch.int64),
        targets=torch.tensor([[difference, 0.0]]),
        all=own,
        columns=torch.tensor([[0, 1]]),
        relevant=torch.zeros(1, 2, dtype=torch.bool),
    )
    loss = InfoNCE(threshold=3.0)(scores).item()
    assert loss == pytest.approx(math.log(1 + math.exp(-1.0)) if negative else 0.0, abs=1e-6)


def test_what_losses_need() -> None:
    assert InfoNCE().needs == {"in_batch", "positives"}
    assert InfoNCE(threshold=0.0).needs == {"in_batch", "targets"}
    assert InfoNCE(symmetric=True).needs == {"in_batch", "positives", "queries"}
    assert InfoNCE(guide="g").needs == {"in_batch", "positives", "guide"}
    # and nothing else: without it, a message names what is missing
    for name, loss in LOSSES.items():
        scores = scores_of(*vectors(0, 2, 3), 0, 3)
        fields = {"targets": ["targets"], "in_batch": ["all", "columns", "relevant"], "guide": ["guide"]}
        fields["vectors"] = ["queries", "documents"]
        spared = [field for need, each in fields.items() if need not in loss.needs for field in each]
        assert loss(replace(scores, **dict.fromkeys(spared))).isfinite(), name
        for need in loss.needs & fields.keys() - {"in_batch"}:
            with pytest.raises(BadValueError, match=f"'{loss.kind}'.* no {fields[need][0]}"):
                loss(replace(scores, **dict.fromkeys(fields[need])))


def test_losses_are_read_by_kind() -> None:
    recipe = Recipe.parse({"losses": [{"kind": "infonce", "threshold": 1.0, "weight": 0.5}, {"kind": "kl"}]})
    assert recipe.losses == [InfoNCE(threshold=1.0, weight=0.5), KLDivergence()]
    assert Recipe.parse(recipe.model_dump()) == recipe
    kinds = {loss.kind for loss in LOSSES.values()}
    assert kinds == set(TABLE)
    assert all(
        type(Recipe.parse({"losses": [loss.model_dump()]}).losses[0]) is type(loss)
        for loss in LOSSES.values()
    )
    with pytest.raises(ConfigError, match=r"unknown kind .mse.; known: ") as raised:
        Recipe.parse({"losses": [{"kind": "mse"}]})
    assert all(kind in str(raised.value) for kind in kinds)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "kl", "temprature": 2}, "did you mean 'temperature'"),
        ({"kind": "kl", "temperature": 0}, "greater than 0"),
        ({"kind": "kl", "weight": -1}, "greater than 0"),
        ({"kind": "infonce", "margin": 0.1}, "'guide'"),
        ({"kind": "infonce", "symmetric": True, "threshold": 0.1}, "list two losses"),
        ({"kind": "embedding"}, "missing key"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe.parse({"losses": [values]})


def test_a_loss_of_another_package_is_read_by_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lost.py").write_text(
        "from typing import Literal\n"
        "from irkit.training.losses import BaseLoss\n"
        "class Spread(BaseLoss):\n"
        "    kind: Literal['spread'] = 'spread'\n"
        "    power: float = 2.0\n"
        "    def __call__(self, scores):\n"
        "        return scores.own.abs().pow(self.power).mean()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint("spread", "lost:Spread", "irkit.losses")]
    monkeypatch.setattr("irkit.utils.plugins.entry_points", lambda group: points)
    table: Registry[type[BaseLoss]] = Registry("irkit.losses", BaseLoss, dict(TABLE))

    class Open(Config):
        losses: list[Annotated[BaseLoss, KindOf(table)]]

    assert Open.parse({"losses": [{"kind": "kl"}]}).losses == [KLDivergence()]
    assert "lost" not in sys.modules  # it is imported when a recipe names it
    recipe = Open.parse({"losses": [{"kind": "spread", "power": 1.0}]})
    assert recipe.losses[0](of_own([1.0, -3.0])).item() == 2.0
    assert Open.parse(recipe.model_dump(mode="json")) == recipe
    for values, message in (
        ({"kind": "sprad"}, "losses.0: unknown kind 'sprad'; did you mean 'spread'"),
        ({"kind": "spread", "powr": 1}, "unknown key 'losses.0.powr'; did you mean 'power'"),
        ({"kind": "spread", "power": "x"}, "losses.0.power: .*valid number"),
        ({"power": 1}, "losses.0: .*discriminator 'kind'"),
        ("spread", "losses.0: expected keys and values such as {kind: spread}"),
    ):
        with pytest.raises(ConfigError, match=message):
            Open.parse({"losses": [values]})


def test_the_page_of_losses_has_each_of_them() -> None:
    page = (Path(__file__).parents[1] / "docs" / "training_losses.md").read_text()
    for kind in (*TABLE, *REGULARIZERS):
        assert f"`{kind}`" in page, kind


def test_matryoshka() -> None:
    assert Matryoshka(dims=(64, 32)).weights == (1, 1)
    assert Matryoshka(dims=(64, 32), weights=(1, 0.5)).weights == (1, 0.5)
    for bad in ({"dims": ()}, {"dims": (8, 8)}, {"dims": (0,)}, {"dims": (8,), "weights": (1, 2)}):
        with pytest.raises(ConfigError, match="dims"):
            Matryoshka.parse(bad)


def test_a_guide_of_another_width_is_refused() -> None:
    scores = scores_of(*vectors(0, 2, 2), 0, 2)
    narrow = (torch.zeros(2, 5), torch.zeros(2, 3), torch.zeros(5, 3))
    with pytest.raises(BadValueError, match="3 dimensions, ours 6"):
        EmbeddingDistillation(guide="g")(replace(scores, guide=lambda: narrow))
