"""Projections against formulas written out in numpy, their gradients, presets and folding."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from irkit import Model
from irkit.errors import BadValueError, ConfigError
from irkit.heads import Normalize, Projection
from irkit.heads.projection import (
    PRESETS,
    ProjectionConfig,
    merge_projections,
    projection_config,
    projection_layers,
)

HIDDEN = 6
GATES = {
    "identity": lambda u: u,
    "relu": lambda u: np.maximum(u, 0),
    "sigmoid": lambda u: 1 / (1 + np.exp(-u)),
    "silu": lambda u: u / (1 + np.exp(-u)),
    "gelu": lambda u: u * 0.5 * (1 + np.vectorize(math.erf)(u / math.sqrt(2))),
}


def configs() -> st.SearchStrategy[ProjectionConfig]:
    def build(options: dict[str, Any]) -> ProjectionConfig:
        if options["depth"] == 1:
            options["residual"] = "none"
        if not options["glu"] and (options["depth"] == 1 or options["activation"] == "sigmoid"):
            options["activation"] = "identity"
        return ProjectionConfig(**options)

    return st.fixed_dictionaries(
        {
            "depth": st.integers(1, 4),
            "scale": st.sampled_from([0.5, 1, 2]),
            "activation": st.sampled_from(sorted(GATES)),
            "glu": st.booleans(),
            "residual": st.sampled_from(["none", "identity", "learned"]),
            "dim": st.integers(1, 4),
            "bias": st.booleans(),
        }
    ).map(build)


def build(config: ProjectionConfig, hidden_size: int = HIDDEN, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(*projection_layers(config, hidden_size)).double()
    with torch.no_grad():  # far from the initial values, so that every one of them matters
        for weight in layers.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    return layers


def by_hand(config: ProjectionConfig, layers: nn.Sequential, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Sections 4 and 5, one formula after the other."""
    names = {name: weight.detach().numpy() for name, weight in layers.named_parameters()}
    psi = GATES[config.activation]
    for i in range(config.depth):
        u = x @ names[f"{i}.linear.weight"].T + names.get(f"{i}.linear.bias", 0)
        if i == config.depth - 1 and config.depth > 1:
            return u
        if config.glu:
            y = u * psi(x @ names[f"{i}.gate.weight"].T + names.get(f"{i}.gate.bias", 0))
        else:
            y = psi(u)
        skip = x @ names[f"{i}.residual.weight"].T if f"{i}.residual.weight" in names else x
        if config.residual == "identity":
            y = skip + names[f"{i}.alpha"] * y
        elif config.residual == "learned":
            y = skip + y
        x = y
    return x


@settings(max_examples=60, deadline=None)
@given(configs(), st.integers(0, 2**16))
def test_formulas(config: ProjectionConfig, seed: int) -> None:
    layers = build(config, seed=seed)
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    expected = by_hand(config, layers, x.numpy())
    assert expected.shape == (5, config.dim)
    np.testing.assert_allclose(layers(x).detach().numpy(), expected, rtol=1e-10, atol=1e-12)


def variants() -> list[ProjectionConfig]:
    found = [ProjectionConfig(dim=2, bias=True), ProjectionConfig(dim=2, glu=True, activation="sigmoid")]
    for residual in ("none", "identity", "learned"):
        for glu, names in ((False, ["identity", "relu", "gelu", "silu"]), (True, list(GATES))):
            for activation in names:
                options = {"glu": glu, "activation": activation, "residual": residual, "dim": 2, "bias": True}
                found += [
                    ProjectionConfig(depth=depth, scale=scale, **options) for depth, scale in ((2, 2), (3, 1))
                ]
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("config", variants(), ids=str)
def test_gradients_of_every_variant(config: ProjectionConfig) -> None:
    layers = build(config, hidden_size=3)
    names, weights = zip(*layers.named_parameters(), strict=True)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def output(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(layers, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(output, (x, *weights))


def test_residual_starts_as_the_input_widened_by_an_identity() -> None:
    """Section 4.2.1: upcast by an identity; equation 13: plus alpha times the layer."""
    (up, _) = projection_layers(ProjectionConfig(depth=2, residual="identity"), HIDDEN)
    x = torch.randn(3, HIDDEN)
    widened = torch.cat([x, torch.zeros(3, HIDDEN)], dim=1)
    assert torch.equal(up.residual.weight, torch.eye(2 * HIDDEN, HIDDEN))
    assert up.alpha is not None
    assert up.alpha.item() == 1
    torch.testing.assert_close(up(x), widened + up.linear(x), rtol=0, atol=0)
    with torch.no_grad():
        up.alpha.zero_()
    assert torch.equal(up(x), widened)


def test_residual_starts_with_the_input_all_the_way() -> None:
    """Up and down again: what the skips alone carry is the input itself."""
    layers = projection_layers(ProjectionConfig(depth=4, residual="identity", dim=HIDDEN), HIDDEN)
    x = torch.randn(3, HIDDEN)
    with torch.no_grad():
        for layer in layers[:3]:
            assert layer.alpha is not None
            layer.alpha.zero_()
    hidden = nn.Sequential(*layers[:2])(x)
    assert torch.equal(hidden, x)


def test_equal_widths_need_no_matrix_to_add_the_input() -> None:
    layers = projection_layers(ProjectionConfig(depth=2, scale=1, residual="identity"), HIDDEN)
    assert [name for name, _ in layers[0].named_parameters()] == ["alpha", "linear.weight"]


TABLES = {
    1: ["linear"]
    + [f"ffn-identity-depth{depth}-scale2-residual" for depth in (2, 3, 4)]
    + [f"glu-sigmoid-depth{depth}-scale2-residual" for depth in (2, 3, 4)],
    2: ["linear"]
    + [f"ffn-{name}-depth2-scale2-residual" for name in ("identity", "relu", "gelu", "silu")]
    + [f"glu-{name}-depth2-scale2-residual" for name in ("sigmoid", "identity", "relu", "gelu", "silu")],
    3: ["linear"]
    + [
        f"{family}-depth{depth}-scale{scale}-residual"
        for family in ("ffn-identity", "glu-gelu")
        for depth in (2, 3, 4)
        for scale in (1, 2)
    ],
    4: ["linear"]
    + [
        f"{family}-depth{depth}-scale{scale}{end}"
        for family in ("ffn-identity", "glu-gelu")
        for depth in (2, 3)
        for scale in (1, 2)
        for end in ("", "-residual")
    ],
}


def test_presets_are_the_rows_of_the_tables() -> None:
    assert {table: len(rows) for table, rows in TABLES.items()} == {1: 7, 2: 10, 3: 13, 4: 17}
    assert set(PRESETS) == {row for rows in TABLES.values() for row in rows}
    assert PRESETS["linear"] == ProjectionConfig()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_built_stored_and_folded_where_linear(name: str) -> None:
    config = projection_config(name)
    assert ProjectionConfig.parse(json.loads(config.model_dump_json())) == config
    if name != "linear":
        family, activation, depth, scale, *residual = name.split("-")
        assert (config.glu, config.activation) == (family == "glu", activation)
        assert (config.depth, config.scale) == (int(depth[5:]), float(scale[5:]))
        assert config.residual == ("identity" if residual else "none")
    layers = build(config, hidden_size=32).float()
    twin = nn.Sequential(*projection_layers(config, 32))
    twin.load_state_dict(layers.state_dict())
    x = torch.randn(20, 32)
    assert torch.equal(layers(x), twin(x))
    if config.glu or config.activation != "identity":
        with pytest.raises(BadValueError, match=r"layer 0 (is gated|has the activation)"):
            merge_projections(layers)
        return
    folded = merge_projections(layers)
    assert [key for key, _ in folded.named_parameters()] == ["linear.weight"]
    normalize = Normalize()
    torch.testing.assert_close(normalize(folded(x)), normalize(layers(x)), rtol=0, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(configs(), st.integers(0, 2**16))
def test_fold_is_the_same_function(config: ProjectionConfig, seed: int) -> None:
    layers, x = build(config, seed=seed), torch.randn(5, HIDDEN, dtype=torch.float64)
    if config.glu or config.activation != "identity":
        with pytest.raises(BadValueError, match="no matrix"):
            merge_projections(layers)
    else:
        torch.testing.assert_close(merge_projections(layers)(x), layers(x), rtol=1e-10, atol=1e-10)
        assert merge_projections(layers).linear.weight.dtype == torch.float64


@pytest.mark.parametrize("bias", [True, False])
def test_alpha_scales_the_bias_of_a_folded_layer(bias: bool) -> None:
    """The matrix and the bias of ``x + alpha (x W + b)``, worked out by hand."""
    layer = Projection(2, 2, bias=bias, residual="identity").double()
    with torch.no_grad():
        layer.alpha.fill_(0.5)  # type: ignore[union-attr]
        layer.linear.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        if bias:
            layer.linear.bias.copy_(torch.tensor([10.0, 20.0]))
    folded = merge_projections([layer])
    assert folded.linear.weight.tolist() == [[1.5, 1.0], [1.5, 3.0]]
    assert (folded.linear.bias.tolist() if bias else folded.linear.bias) == ([5.0, 10.0] if bias else None)
    x = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    torch.testing.assert_close(folded(x), layer(x), rtol=0, atol=0)


def test_fold_refuses_other_layers() -> None:
    with pytest.raises(BadValueError, match="layer 1 is Normalize"):
        merge_projections([Projection(4, 2), Normalize()])
    with pytest.raises(BadValueError, match="no layers"):
        merge_projections([])


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"depth": 5}, "depth: Input should be less than or equal to 4"),
        ({"depth": 0}, "depth: Input should be greater than or equal to 1"),
        ({"depth": 2, "scale": 0}, "scale: Input should be greater than 0"),
        ({"depth": 2, "scale": float("inf")}, "scale: Input should be a finite number"),
        ({"depth": 2, "activation": "tanh"}, "activation: Input should be 'identity', 'relu'"),
        ({"depth": 2, "activation": "sigmoid"}, "sigmoid is a gate: set glu"),
        ({"activation": "gelu"}, "an activation follows layers before the last: set depth to 2"),
        ({"residual": "identity"}, "a residual skips layers before the last: set depth to 2"),
        ({"depth": 2, "residual": True}, "residual: Input should be 'none', 'identity' or 'learned'"),
        ({"dim": 0}, "dim: Input should be greater than or equal to 1"),
        ({"depht": 2}, "unknown key 'depht'; did you mean 'depth'"),
        ("ffn-identity-depth2-scale3", "did you mean 'ffn-identity-depth2-scale2"),
        ("?", "known: linear, ffn-identity-depth2-scale2-residual"),
    ],
)
def test_impossible_projections(choice: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        projection_config(choice)


# ---- in a model ----------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("name", PRESETS)
def test_models_of_presets_are_saved_loaded_and_folded(name: str, tiny_bert: Path, tmp_path: Path) -> None:
    model = Model.multi_vector(tiny_bert, PRESETS[name].model_copy(update={"dim": 8}))
    texts = ["neural search", "the index of a token", ""]
    expected = model.encode_representation(texts, "document")
    plain = PRESETS[name].residual == "none" and not PRESETS[name].glu
    with nullcontext() if plain else pytest.warns(UserWarning, match="sentence-transformers cannot open it"):
        model.save_pretrained(tmp_path / "model")
    loaded = Model.from_pretrained(tmp_path / "model")
    assert loaded.fingerprint == model.fingerprint
    assert torch.equal(loaded.encode_representation(texts, "document").tokens.values, expected.tokens.values)
    if PRESETS[name].glu or PRESETS[name].activation != "identity":
        with pytest.raises(BadValueError, match="layer 0"):
            loaded.merge_projections()
        assert loaded.fingerprint == model.fingerprint
        return
    loaded.merge_projections().save_pretrained(tmp_path / "folded")
    names = [path.name for path in (tmp_path / "folded").iterdir() if path.is_dir()]
    assert sorted(names)[:2] == ["1_Dense", "2_Normalize"]
    folded = Model.from_pretrained(tmp_path / "folded").encode_representation(texts, "document")
    torch.testing.assert_close(folded.tokens.values, expected.tokens.values, rtol=0, atol=1e-5)


def test_int8_is_not_folded(tiny_bert: Path) -> None:
    with pytest.raises(BadValueError, match="the weights are int8"):
        Model.multi_vector(tiny_bert, "linear", dtype="int8").merge_projections()
