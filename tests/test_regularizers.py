"""Regularisers of sparse models: formulas, schedules, and weights that are all zero."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit.config import Config
from irkit.errors import ConfigError
from irkit.training.regularizers import L1, AntiZero, BaseRegularizer, DFFlops, Flops, Regularizer

ALL: dict[str, BaseRegularizer] = {
    "flops": Flops(query=0.5, document=2.0),
    "l0": Flops(document=1.0, threshold=2),
    "l1": L1(query=1.0, document=1.0),
    "anti_zero": AntiZero(query=1.0, document=1.0),
    "df_flops": DFFlops(document=1.0),
}
WEIGHTS = torch.tensor([[1.0, 0.0, 3.0], [1.0, 2.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)


def test_values_by_hand() -> None:
    def value(regularizer: BaseRegularizer) -> float:
        return regularizer.penalty(WEIGHTS).item()

    assert value(Flops(document=1)) == pytest.approx(1 + 1 + (4 / 3) ** 2)
    assert value(Flops(document=1, threshold=2)) == pytest.approx(
        3 * (1 / 3) ** 2
    )  # only the last text counts
    assert value(Flops(document=1, threshold=3)) == 0
    assert value(L1(document=1)) == pytest.approx(10 / 3)
    assert value(AntiZero(document=1)) == pytest.approx(1 / 100)


@given(st.floats(0.01, 0.9), st.floats(1, 20))
@settings(max_examples=30, deadline=None)
def test_df_flops_weighs_terms_by_their_share_of_documents(alpha: float, beta: float) -> None:
    shares = torch.tensor([0, 1, 5, 10, 19, 20])
    weights = (torch.arange(20)[:, None] < shares).double()
    regularizer = DFFlops(document=1, alpha=alpha, beta=beta)
    one_by_one = torch.stack([regularizer.penalty(weights[:, [term]]) for term in range(6)])
    assert regularizer.penalty(weights).item() == pytest.approx(one_by_one.sum().item())
    importance = (one_by_one.sqrt() / weights.mean(0)).nan_to_num(0)  # both are squared together
    assert importance[0] == 0
    assert importance[-1] == pytest.approx(1)
    assert (importance.diff() >= 0).all()
    for share, found in zip(shares[1:].tolist(), importance[1:].tolist(), strict=True):
        logit = (share / 20) ** (math.log(2) / math.log(alpha)) - 1
        assert found == pytest.approx(1 / (1 + logit**beta), rel=1e-6)
    at_alpha = DFFlops(document=1, alpha=0.25, beta=beta).penalty(weights[:, [2]])
    assert at_alpha.sqrt().item() == pytest.approx(0.5 * 0.25)  # 5 of 20 texts have it


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    texts = [
        torch.rand(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (2, 3)
    ]
    leaves = [each.requires_grad_() for each in texts]
    assert torch.autograd.gradcheck(lambda q, d: ALL[name](q, d, 1.0), leaves)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e6])
def test_extreme_weights_stay_numbers(name: str, size: float) -> None:
    leaf = (torch.rand(3, 5) * size).requires_grad_()
    value = ALL[name](leaf, leaf, 0.5)
    value.backward()
    assert leaf.grad is not None
    assert value.isfinite()
    assert leaf.grad.isfinite().all()


@given(st.floats(0, 1), st.floats(0.01, 1))
def test_schedules(progress: float, warmup: float) -> None:
    factors = {
        schedule: Flops(document=1, schedule=schedule, warmup=warmup).factor(progress)
        for schedule in ("constant", "linear", "quadratic")
    }
    assert factors["constant"] == 1
    assert factors["linear"] == pytest.approx(min(1, progress / warmup))
    assert factors["quadratic"] == pytest.approx(factors["linear"] ** 2)


def test_each_side_has_its_own_factor() -> None:
    queries, documents = WEIGHTS, 2 * WEIGHTS
    flops = Flops(query=1).penalty(WEIGHTS)
    both = Flops(query=3.0, document=0.5, schedule="linear", warmup=1.0)
    assert both(queries, documents, 0.25).item() == pytest.approx(0.25 * (3 + 0.5 * 4) * flops.item())
    assert both(None, documents, 1.0).item() == pytest.approx(2 * flops.item())
    assert Flops(query=3.0)(None, documents, 1.0).item() == 0


class Recipe(Config):
    regularizers: list[Regularizer]


def test_they_are_read_by_kind() -> None:
    made = list(ALL.values())
    assert Recipe.parse({"regularizers": [each.model_dump() for each in made]}).regularizers == made
    for values, message in (
        ({"kind": "flops"}, "both 0"),
        ({"kind": "flops", "document": -1}, "greater than or equal to 0"),
        ({"kind": "flops", "document": 1, "warmup": 0}, "greater than 0"),
        ({"kind": "flops", "document": 1, "treshold": 3}, "did you mean 'threshold'"),
        ({"kind": "df_flops", "document": 1, "alpha": 1}, "less than 1"),
        ({"kind": "l2", "document": 1}, "known: anti_zero, df_flops, flops, l1"),
    ):
        with pytest.raises(ConfigError, match=message):
            Recipe.parse({"regularizers": [values]})
