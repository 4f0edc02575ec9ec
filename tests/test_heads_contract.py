"""What every head promises, put to each head of the table and to one of another package."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from irkit import Model, score
from irkit.core.ragged import Ragged
from irkit.core.representation import MultiVector, Representation, concat
from irkit.errors import ConfigError, CorruptError
from irkit.heads import HEADS, Head, Side
from irkit.training.model_recipe import ModelRecipe, make_model
from irkit.utils.plugins import Registry

TEXTS = ["the search index", "", "a neural model of text?", "vector " * 30, "token model index search"]

ADDED_HEAD = """
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from irkit.core.representation import Dense
from irkit.heads import Head


class ScaledSum(Head):
    kind = "dense"

    def __init__(self, hidden_size: int, power: float = 1.0) -> None:
        super().__init__()
        self.dim, self.power, self.layers = hidden_size, power, nn.ModuleList()
        self.scale = nn.Parameter(torch.rand(hidden_size))

    def settings(self) -> dict[str, Any]:
        return {"power": self.power}

    def forward(self, hidden, tokens, prompt_length=0, side="document"):
        sums = [row.float().sum(0) / max(1, len(row)) ** self.power for row in hidden]
        return Dense(torch.stack(sums) * self.scale) if sums else Dense(torch.zeros(0, self.dim))

    def extra_repr(self) -> str:
        return f"power={self.power}"
"""

# a model for each head, and the side that goes through it
MODELS: dict[str, tuple[Side, Callable[[Path], Model]]] = {
    "dense": ("document", lambda path: Model.with_head("dense", path, {"pooling": "cls"}, device="cpu")),
    "multi_vector": ("query", lambda path: Model.multi_vector(path, {"dim": 8}, device="cpu")),
    "sparse": ("document", lambda path: Model.sparse(path, {"pooling": "sum"}, device="cpu")),
    "static": ("query", lambda path: Model.sparse(path, queries="static", device="cpu")),
    "token_weight": ("document", lambda path: Model.with_head("token_weight", path, device="cpu")),
    "scaled_sum": (
        "document",
        lambda path: Model.with_head("scaled_sum", path, {"power": 0.5}, device="cpu"),
    ),
}
OWN_HEADS = {name: head for name, head in HEADS.items() if head.__module__.startswith("irkit.")}
for added in HEADS.keys() - MODELS.keys() - OWN_HEADS.keys():  # of installed packages, with their defaults
    MODELS[added] = ("document", lambda path, name=added: Model.with_head(name, path, device="cpu"))


@pytest.fixture(autouse=True)
def _added_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with a head, in a table that has not read the installed packages yet."""
    package = tmp_path / "packages"
    (package / "scaled_sum-1.0.dist-info").mkdir(parents=True)
    (package / "scaled_sum.py").write_text(ADDED_HEAD)
    (package / "scaled_sum-1.0.dist-info/METADATA").write_text("Name: scaled_sum\nVersion: 1.0\n")
    points = "[irkit.heads]\nscaled_sum = scaled_sum:ScaledSum\n"
    (package / "scaled_sum-1.0.dist-info/entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(package)
    for module in ("heads", "model.model", "formats.sentence_transformers"):
        monkeypatch.setattr(f"irkit.{module}.HEADS", Registry("irkit.heads", Head, OWN_HEADS))
    yield
    sys.modules.pop("scaled_sum", None)


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest, tiny_bert: Path) -> tuple[Model, Side]:
    torch.manual_seed(0)
    side, make = MODELS[request.param]
    return make(tiny_bert), side


def close(left: Representation, right: Representation) -> None:
    assert {*left.arrays()} == {*right.arrays()}
    for name, array in left.arrays().items():
        torch.testing.assert_close(torch.as_tensor(array), torch.as_tensor(right.arrays()[name]))


def load(path: Path) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Model.from_pretrained(path, device="cpu")


def save(model: Model, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sentence-transformers does not open every head
        model.save_pretrained(path)
    return path


def test_every_head_of_the_table_is_here() -> None:
    assert {*HEADS} <= {*MODELS}


def test_one_row_of_its_kind_for_each_text(case: tuple[Model, Side]) -> None:
    model, side = case
    head = model.side_model(side).head
    rows = model.encode_representation(TEXTS, side)
    assert (len(rows), rows.kind, rows.dim) == (len(TEXTS), head.kind, head.dim)
    assert all(torch.as_tensor(array).isfinite().all() for array in rows.arrays().values())
    assert len(model.encode_representation([], side)) == 0
    assert score(rows, model.encode_representation(TEXTS, "document")).shape == (len(TEXTS), len(TEXTS))
    if head.unit:  # its layers end in Normalize
        vectors = rows.tokens.values if isinstance(rows, MultiVector) else rows.values
        norms = vectors.norm(dim=1)
        assert bool(((norms - 1).abs().minimum(norms) < 1e-5).all())


def test_its_settings_are_those_of_its_constructor(case: tuple[Model, Side]) -> None:
    model, side = case
    head = model.side_model(side).head
    if type(head) not in OWN_HEADS.values():  # each of irkit's own has files of its own
        _, *settings = inspect.signature(type(head)).parameters
        assert {*settings} <= head.settings().keys()


def test_a_row_does_not_depend_on_its_neighbours(case: tuple[Model, Side]) -> None:
    model, side = case
    together = model.encode_representation(TEXTS, side)
    close(together, concat(model.encode_representation([text], side) for text in TEXTS))
    model.tokens_per_step = 7
    close(together, model.encode_representation(TEXTS, side))


def test_saved_and_loaded_it_is_the_same(case: tuple[Model, Side], tmp_path: Path) -> None:
    model, side = case
    model.set_length(side, 5)
    again = load(save(model, tmp_path / "model"))
    assert type(again.side_model(side).head) is type(model.side_model(side).head)
    assert repr(again.side_model(side).head) == repr(model.side_model(side).head)
    assert (again.fingerprint, again.query_fingerprint) == (model.fingerprint, model.query_fingerprint)
    assert again.max_length(side) == 5
    close(again.encode_representation(TEXTS, side), model.encode_representation(TEXTS, side))
    close(
        load(save(again, tmp_path / "model")).encode_representation(TEXTS, side),
        model.encode_representation(TEXTS, side),
    )  # over itself


def test_copies_are_the_same(case: tuple[Model, Side]) -> None:
    model, side = case
    rows = model.encode_representation(TEXTS, side)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        close(twin.encode_representation(TEXTS, side), rows)


def test_gradients_reach_its_weights(case: tuple[Model, Side]) -> None:
    model, side = case
    rows = model(model.pipeline(side).tokenize(TEXTS), 0, side)
    values: Any = getattr(rows, "weights", getattr(rows, "values", None))
    values = rows.tokens.values if isinstance(rows, MultiVector) else values
    (values.float() * torch.arange(values.numel()).view(values.shape)).sum().backward()
    weights = [weight for weight in model.side_model(side).head.parameters() if weight.requires_grad]
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in weights)


def test_fingerprints_tell_weights_apart(case: tuple[Model, Side]) -> None:
    model, side = case
    before = model.fingerprint, model.query_fingerprint
    with torch.no_grad():
        next(iter(model.side_model(side).parameters())).add_(1.0)
    assert (model.fingerprint, model.query_fingerprint) != before


def test_its_hooks_agree_with_each_other(case: tuple[Model, Side]) -> None:
    model, side = case
    head = model.side_model(side).head
    for name in ("query", "document"):
        assert isinstance(head.pools(name), bool)
        tokens, attended = head.expand(Ragged.from_rows([[5, 6], [7]]), name)
        assert bool((tokens.lengths >= torch.tensor([2, 1])).all())
        assert attended is None or bool((attended <= tokens.lengths).all())
        head.set_length(name, 9)
        assert head.max_length(name) == 9
    twin = copy.copy(head)
    twin.match_width(head.dim)
    assert twin.dim == head.dim


# ---- heads of other packages ----------------------------------------------------------------------


def test_settings_of_an_added_head_are_checked(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"ScaledSum: .*unexpected keyword argument 'speed'"):
        Model.with_head("scaled_sum", tiny_bert, {"speed": 1})
    head = Model.with_head("scaled_sum", tiny_bert).head
    monkeypatch.setattr(type(head), "settings", lambda _: {})
    with pytest.raises(ConfigError, match=r"settings\(\) does not return power, so a saved model"):
        Model.with_head("scaled_sum", tiny_bert, {"power": 2.0})
    for name in ("sum", "static"):
        with pytest.raises(
            ConfigError, match=f"head '{name}', expected one of dense, multi_vector, sparse, tok"
        ):
            Model.with_head(name, tiny_bert)


def test_a_model_of_a_head_that_is_not_installed(tiny_bert: Path, tmp_path: Path) -> None:
    model = Model.with_head("scaled_sum", tiny_bert, device="cpu")
    with pytest.warns(UserWarning, match="where the package that the head comes from"):
        model.save_pretrained(tmp_path / "model")
    folder = tmp_path / "model/1_Head"
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-9])
    with pytest.raises(CorruptError, match=r"model\.safetensors"):
        load(tmp_path / "model")
    settings = (folder / "config.json").read_text()
    (folder / "config.json").write_text(settings.replace("scaled_sum", "summed"))
    with pytest.raises(ConfigError, match="a head named 'summed', which no installed package adds"):
        load(tmp_path / "model")


@pytest.mark.parametrize("keys", [{"kind": "scaled_sum"}, {"kind": "head", "head": "scaled_sum"}])
def test_a_recipe_makes_a_model_with_an_added_head(tiny_bert: Path, keys: dict[str, str]) -> None:
    recipe = TypeAdapter(ModelRecipe).validate_python(
        {**keys, "name": str(tiny_bert), "config": {"power": 2.0}, "query_length": 7}
    )
    model = make_model(recipe)
    assert (model.head.settings(), model.max_length("query")) == ({"power": 2.0}, 7)
