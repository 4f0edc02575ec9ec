"""Losses on logits over a vocabulary that are never all there, against their formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from irkit.core.ragged import Ragged
from irkit.training.logit_losses import CELLS, bag_loss, token_loss


class Parts:
    """Random inputs of both losses."""

    def __init__(self, rows: int, words: int, width: int, seed: int, dtype: torch.dtype, bias: bool) -> None:
        draw = torch.Generator().manual_seed(seed)
        shapes = [(rows, width), (words, width), *([(words,)] if bias else [])]
        given = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]
        self.hidden, self.weight = given[0].requires_grad_(), given[1].requires_grad_()
        self.bias = given[2].requires_grad_() if bias else None
        self.labels = torch.randint(words, (rows,), generator=draw)
        there = torch.rand(rows, words, generator=draw) < 0.3
        self.terms = Ragged(there.nonzero()[:, 1], there.sum(1))
        self.y = there.double()

    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.hidden, self.weight, self.bias

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, [each for each in self.inputs() if each is not None]))

    def wanted(self, kind: str) -> tuple[Tensor, list[Tensor]]:
        """From the formula, in float64."""
        h, w, b = (
            None if each is None else each.detach().double().requires_grad_() for each in self.inputs()
        )
        assert h is not None
        assert w is not None
        x = h @ w.T + (0 if b is None else b)
        if kind == "token":
            loss = -(x.exp() / x.exp().sum(1, keepdim=True)).log()[torch.arange(len(h)), self.labels].sum()
        else:
            p = 1 / (1 + (-x).exp())
            loss = -(self.y * p.log() + (1 - self.y) * (1 - p).log()).sum() / len(w)
        return loss, list(torch.autograd.grad(loss, [each for each in (h, w, b) if each is not None]))


def found(parts: Parts, kind: str, cells: int = CELLS) -> Tensor:
    if kind == "token":
        return token_loss(*parts.inputs(), parts.labels, cells)[0]
    return bag_loss(*parts.inputs(), parts.terms, cells)


@pytest.mark.parametrize("kind", ["token", "bag"])
@settings(deadline=None)
@given(st.integers(0, 9), st.integers(1, 12), st.integers(1, 5), st.integers(1, 60), st.booleans())
def test_values_and_gradients_are_those_of_the_formula(
    kind: str, rows: int, words: int, width: int, cells: int, bias: bool
) -> None:
    parts = Parts(rows, words, width, rows + 10 * words, torch.float64, bias)
    loss = 3 * found(parts, kind, cells)
    wanted, gradients = parts.wanted(kind)
    torch.testing.assert_close(loss, 3 * wanted, rtol=1e-11, atol=1e-11)
    for one, other in zip(parts.gradients(loss), gradients, strict=True):
        torch.testing.assert_close(one, 3 * other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", ["token", "bag"])
def test_gradients_pass_gradcheck_and_may_be_asked_for_twice(kind: str) -> None:
    parts = Parts(4, 7, 3, 5, torch.float64, True)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        parts.hidden, parts.weight, parts.bias = hidden, weight, bias
        return found(parts, kind)

    assert torch.autograd.gradcheck(loss, [each for each in parts.inputs() if each is not None])
    value = found(parts, kind)
    inputs = [each for each in parts.inputs() if each is not None]
    once = torch.autograd.grad(value, inputs, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(once, torch.autograd.grad(value, inputs), strict=True))


@pytest.mark.parametrize("kind", ["token", "bag"])
def test_what_is_frozen_gets_no_gradient(kind: str) -> None:
    parts = Parts(5, 9, 4, 3, torch.float64, True)
    parts.weight.requires_grad_(False)
    loss = found(parts, kind)
    loss.backward()
    _, (of_hidden, _, of_bias) = parts.wanted(kind)
    assert parts.weight.grad is None
    assert parts.hidden.grad is not None
    assert parts.bias is not None
    assert parts.bias.grad is not None
    torch.testing.assert_close(parts.hidden.grad, of_hidden)
    torch.testing.assert_close(parts.bias.grad, of_bias)


@pytest.mark.parametrize("kind", ["token", "bag"])
def test_under_autocast_only_the_products_are_rounded(kind: str) -> None:
    """Gradients are at most twice as far from the formula as with inputs, logits and errors in bfloat16."""
    parts = Parts(64, 600, 32, 1, torch.float32, True)
    with torch.no_grad():
        parts.weight *= 0.2
    gradients = parts.wanted(kind)[1]
    with torch.autocast("cpu", torch.bfloat16):
        loss = found(parts, kind)
    assert loss.dtype == torch.float32

    h, w, b = (each.detach().bfloat16() for each in parts.inputs() if each is not None)
    x = F.linear(h, w, b).double()
    if kind == "token":
        p = x.softmax(1)
        rounded = -p.log()[torch.arange(len(h)), parts.labels].sum()
        p[torch.arange(len(h)), parts.labels] -= 1
    else:
        rounded = F.binary_cross_entropy_with_logits(x, parts.y, reduction="sum") / len(w)
        p = (x.sigmoid() - parts.y) / len(w)
    p = p.bfloat16().double()
    plain = [p @ w.double(), p.T @ h.double(), p.sum(0)]
    assert abs(loss.item() - rounded.item()) < 1e-5 * rounded.item()
    for one, exact, other in zip(parts.gradients(loss), gradients, plain, strict=True):
        assert one.dtype == torch.float32
        assert (one - exact).norm() <= 2 * (other - exact).norm()


class Big(TorchDispatchMode):
    """Notes results of as many numbers as there are logits."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.found = numbers, set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() >= self.numbers:
            self.found.add(result.untyped_storage().data_ptr())
        return result


@pytest.mark.parametrize(("kind", "most"), [("token", 0), ("bag", 1)])
def test_memory_of_the_size_of_all_logits(kind: str, most: int) -> None:
    cells = 4 * 500
    parts = Parts(200, 500, 3, 2, torch.float32, True)
    with Big(200 * 500) as forward:
        loss = found(parts, kind, cells)
    with Big(200 * 500) as backward:
        loss.backward()
    with Big(200 * 500) as inference, torch.no_grad():
        found(parts, kind, cells)
    assert len(forward.found) == most
    assert backward.found <= forward.found
    assert not inference.found


def test_how_many_were_right() -> None:
    parts = Parts(50, 7, 3, 4, torch.float64, True)
    _, right = token_loss(*parts.inputs(), parts.labels)
    logits = F.linear(*parts.inputs())
    assert int(right) == int((logits.argmax(1) == parts.labels).sum()) > 0
