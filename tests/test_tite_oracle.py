"""Pooling encoders of any shape against a slow definition in float64, row by row and layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from irkit.core.ragged import Ragged
from irkit.encoder import Encoder, Pooling
from irkit.encoder.encoder_config import EncoderConfig, LayerConfig
from irkit.encoder.presets import tite_settings
from irkit.errors import ConfigError

ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}


def oracle(encoder: Encoder, ids: Tensor, seen: int | None = None) -> Tensor:
    """One text, as sections 3.1 and 3.2 of the paper say it; its first ``seen`` tokens are keys."""
    config, parameters = encoder.config, dict(encoder.named_parameters())
    h = parameters["embeddings.word.weight"][ids]
    if config.learned_positions:
        h = h + parameters["embeddings.position.weight"][: len(ids)]
    if config.token_types:
        h = h + parameters["embeddings.token_type.weight"][0]
    if config.embedding_size:
        h = h @ parameters["embeddings.downscale.weight"].T
    h = norm(config, parameters, "embeddings.norm", h)
    keys = len(ids) if seen is None else seen
    for i, layer in enumerate(config.layers):
        part = {
            key.removeprefix(f"layers.{i}."): value
            for key, value in parameters.items()
            if key.startswith(f"layers.{i}.")
        }
        h, keys = oracle_layer(config, layer, part, h, keys)
    return h if config.norm_location == "post" else norm(config, parameters, "final_norm", h)


def oracle_layer(
    config: EncoderConfig, layer: LayerConfig, part: dict[str, Tensor], h: Tensor, keys: int
) -> tuple[Tensor, int]:
    location = layer.pooling.location if layer.pooling else None
    centres = torch.arange(len(h)).double()
    if location == "pre":
        h, keys = pool(h, layer.pooling), count(keys, layer.pooling)
        centres = torch.arange(len(h)).double()
    queries, places = h, centres
    if location == "intra":
        queries = pool(h, layer.pooling)
        kernel = layer.pooling.kernel
        step = {"stride": layer.pooling.stride, "kernel": kernel}[layer.pooling.positions]
        places = torch.arange(len(queries)).double() * step + (kernel - 1) / 2
    before = (
        (lambda x: norm(config, part, "attention_norm", x)) if config.norm_location == "pre" else lambda x: x
    )
    weights, biases = part["qkv.weight"].chunk(3), part.get("qkv.bias", torch.zeros(3)).chunk(3)
    inputs = (before(queries), before(h), before(h))
    projected = [x @ weight.T + bias for x, weight, bias in zip(inputs, weights, biases, strict=True)]
    if config.norm_location == "qkv":
        projected = [norm(config, part, "attention_norm", x) for x in projected]
    q, k, v = (x.view(len(x), layer.num_heads, -1).transpose(0, 1) for x in projected)
    if layer.rotary_base is not None:
        q, k = rotate(config, layer, q, places), rotate(config, layer, k, centres)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    hidden = torch.arange(len(h)) >= keys
    if layer.window is not None:
        hidden = hidden | ((places[:, None] - centres).abs() > layer.window)
    blind = hidden.expand(scores.shape[1:]).all(-1, keepdim=True)
    weights = scores.masked_fill(hidden & ~blind, float("-inf")).softmax(-1).masked_fill(blind, 0.0)
    attended = (weights @ v).transpose(0, 1).flatten(1)
    attended = attended @ part["out.weight"].T + part.get("out.bias", 0.0)
    h = attended + F.pad(queries, (0, attended.shape[1] - queries.shape[1]))
    if location == "post":
        h = pool(h, layer.pooling)
    if location in ("intra", "post"):
        keys = count(keys, layer.pooling)
    if config.norm_location == "post":
        h = norm(config, part, "attention_norm", h)
    x = h if config.norm_location == "post" else norm(config, part, "mlp_norm", h)
    x = x @ part["up.weight"].T + part.get("up.bias", 0.0)
    act = ACTIVATIONS[config.activation]
    x = act(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :] if config.gated else act(x)
    h = h + x @ part["down.weight"].T + part.get("down.bias", 0.0)
    return (norm(config, part, "mlp_norm", h) if config.norm_location == "post" else h), keys


def count(length: int, pooling: Pooling) -> int:
    """Windows until one reaches the end."""
    windows, end = 0, 0
    while end < length:
        end = windows * pooling.stride + pooling.kernel
        windows += 1
    return windows


def pool(h: Tensor, pooling: Pooling) -> Tensor:
    starts = [window * pooling.stride for window in range(count(len(h), pooling))]
    return torch.stack([h[start : start + pooling.kernel].mean(0) for start in starts])


def norm(config: EncoderConfig, parameters: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if f"{name}.weight" not in parameters:  # of the first layer where blocks normalise their input
        return x
    centred = x - x.mean(-1, keepdim=True) if config.norm == "layer" else x
    scale = (centred.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt()
    return centred * scale * parameters[f"{name}.weight"] + parameters.get(f"{name}.bias", 0.0)


def rotate(config: EncoderConfig, layer: LayerConfig, x: Tensor, places: Tensor) -> Tensor:
    """As products of complex numbers."""
    half = x.shape[-1] // 2
    speeds = layer.rotary_base ** -(torch.arange(half).float() / half)
    turns = torch.polar(torch.ones(len(places), half).double(), places[:, None] * speeds.double())
    if config.rotary_interleaved:
        pairs = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)
    turned = torch.complex(x[..., :half], x[..., half:]) * turns
    return torch.cat([turned.real, turned.imag], -1)


def same_as_oracle(encoder: Encoder, lengths: list[int], seed: int, seen: list[int] | None = None) -> None:
    """Outputs, and the gradient of every parameter for a random upstream gradient."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in encoder.parameters():  # no zero bias, no unit norm: every parameter must matter
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    tokens = Ragged(torch.randint(0, 30, (sum(lengths),), generator=generator), torch.tensor(lengths))
    hidden = encoder(tokens, None if seen is None else torch.tensor(seen))
    limits = [None] * len(lengths) if seen is None else seen
    rows = [oracle(encoder, row, limit) for row, limit in zip(tokens, limits, strict=True) if len(row)]
    assert [len(row) for row in hidden if len(row)] == [len(row) for row in rows]
    assert [len(row) > 0 for row in hidden] == [length > 0 for length in lengths]
    if not rows:
        return
    expected = torch.cat(rows)
    torch.testing.assert_close(hidden.values, expected, rtol=1e-6, atol=1e-7)
    upstream = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
    parameters = list(encoder.parameters())
    wanted = torch.autograd.grad(expected, parameters, upstream, allow_unused=True)
    found = torch.autograd.grad(hidden.values, parameters, upstream, allow_unused=True)
    for ours, theirs in zip(found, wanted, strict=True):
        zero = torch.zeros(())
        scale = 1.0 if theirs is None else max(1.0, float(theirs.abs().max()))
        difference = (zero if ours is None else ours) - (zero if theirs is None else theirs)
        assert difference.abs().max() <= 1e-6 * scale


@st.composite
def pooled(draw: st.DrawFn, layers: int, *, mixed: bool) -> list[Pooling | None]:
    locations = st.sampled_from(["pre", "intra", "post"])
    one = draw(locations)

    def pooling() -> Pooling:
        kernel = draw(st.integers(2, 5))
        location = draw(locations) if mixed else one
        return Pooling(kernel=kernel, stride=draw(st.integers(1, kernel)), location=location)

    return [pooling() if draw(st.booleans()) else None for _ in range(layers)]


@st.composite
def tites(draw: st.DrawFn) -> dict[str, Any]:
    layers = draw(st.integers(1, 4))
    schedule = draw(pooled(layers, mixed=False))
    heads = sorted(draw(st.lists(st.integers(1, 4), min_size=layers, max_size=layers)))
    return {
        "model_type": "tite",
        "vocab_size": 30,
        "num_hidden_layers": layers,
        "hidden_sizes": [4 * number for number in heads],
        "num_attention_heads": heads,
        "intermediate_sizes": 6,
        "kernel_sizes": [pooling and pooling.kernel for pooling in schedule],
        "strides": [pooling and pooling.stride for pooling in schedule],
        "pooling_location": next((pooling.location for pooling in schedule if pooling), "intra"),
        **draw(st.sampled_from([{}, {"pooled_positions": "stride"}, {"pooled_positions": "kernel"}])),
        "max_position_embeddings": 40,
        "absolute_positional_embedding_type": draw(st.sampled_from([None, "learned"])),
        "relative_positional_embedding_type": draw(st.sampled_from([None, "rotary"])),
        "norm_location": draw(st.sampled_from(["pre", "qkv", "post"])),
        "norm_type": draw(st.sampled_from(["rms", "layer"])),
        "hidden_act": draw(st.sampled_from(["gelu_pytorch_tanh", "swiglu"])),
        "dropout_prob": 0.0,
    }


LENGTHS = st.lists(st.integers(0, 7) | st.integers(0, 40), min_size=0, max_size=4)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@given(described=tites(), lengths=LENGTHS, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_any_tite_equals_the_oracle(
    attention: str, described: dict[str, Any], lengths: list[int], seed: int
) -> None:
    same_as_oracle(Encoder(described, attention=attention).double(), lengths, seed)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("positions", [None, "kernel", "stride"])
def test_positions_of_windows_that_overlap(attention: str, positions: str | None) -> None:
    """The authors turn the query of window w by the angle of w * kernel + (kernel - 1) / 2, strides or not.

    Their layout does not say so; a model of irkit says that its queries stand where their windows do.
    """
    described: dict[str, Any] = {
        "model_type": "tite",
        "vocab_size": 30,
        "num_hidden_layers": 1,
        "hidden_sizes": 8,
        "num_attention_heads": 2,
        "intermediate_sizes": 6,
        "kernel_sizes": 3,
        "strides": 2,
        "norm_location": "post",
        "dropout_prob": 0.0,
        **({} if positions is None else {"pooled_positions": positions}),
    }
    encoder = Encoder(described, attention=attention).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    ids = torch.randint(0, 30, (11,), generator=generator)
    part = {key.removeprefix("layers.0."): value for key, value in encoder.named_parameters()}
    h = encoder.embeddings(Ragged(ids, torch.tensor([11]))).values
    queries = torch.stack([h[start : start + 3].mean(0) for start in range(0, 9, 2)])
    places = torch.arange(5).double() * (2 if positions == "stride" else 3) + 1

    def turned(x: Tensor, at: Tensor) -> Tensor:  # (rows, heads, 4): two pairs of neighbours
        angles = at[:, None, None] * torch.tensor([1.0, 10_000.0**-0.5])
        a, b = x[..., 0::2], x[..., 1::2]
        parts = (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos())
        return torch.stack(parts, -1).flatten(-2)

    w, b = part["qkv.weight"].chunk(3), part["qkv.bias"].chunk(3)
    q, k, v = ((x @ w[i].T + b[i]).unflatten(-1, (2, 4)) for i, x in enumerate((queries, h, h)))
    q, k = turned(q, places), turned(k, torch.arange(11).double())
    weights = (torch.einsum("qhd,khd->hqk", q, k) / 2).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
    wanted = encoder.layers[0].after_attention(queries, attended)
    torch.testing.assert_close(encoder(Ragged(ids, torch.tensor([11]))).values, wanted, rtol=1e-6, atol=1e-7)


def test_models_say_which_positions_they_have(tmp_path: Path) -> None:
    own = Encoder(tite_settings(1, layers=6, hidden_size=12, heads=3, max_length=64, vocab_size=30))
    theirs = {key: value for key, value in own.settings.items() if key != "pooled_positions"}
    theirs |= {"kernel_sizes": 3, "strides": [2, 3, 2, 2, 2, 2]}
    assert {pooling.positions for pooling in own.config.schedule if pooling} == {"stride"}
    kinds = [pooling and pooling.positions for pooling in Encoder(theirs).config.schedule]
    assert kinds == ["kernel", "stride", *["kernel"] * 4]  # where windows do not overlap both are one
    own.set_pooling_([Pooling(kernel=3, stride=2)] * 6)
    for number, encoder in enumerate((own, Encoder(theirs))):
        encoder.save_pretrained(tmp_path / str(number))
        again = Encoder.from_pretrained(tmp_path / str(number))
        assert again.config.schedule == encoder.config.schedule
    with pytest.raises(ConfigError, match="one kind of positions"):
        own.set_pooling_(
            [Pooling(kernel=3, stride=2), Pooling(kernel=3, stride=2, positions="kernel"), *[None] * 4]
        )


BERT = {
    "model_type": "bert",
    "vocab_size": 30,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 6,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
}
LOCAL = [None, Pooling(kernel=4, stride=3), None]
MODERNBERT = BERT | {"model_type": "modernbert", "local_attention": 8, "global_attn_every_n_layers": 2}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("described", [BERT, MODERNBERT], ids=["bert", "modernbert"])
@example(schedule=LOCAL, lengths=[5], seed=0, some=False)  # the middle of the last window is out of reach
@example(schedule=LOCAL, lengths=[20, 5, 1, 0], seed=0, some=False)
@given(schedule=pooled(3, mixed=True), lengths=LENGTHS, seed=st.integers(0, 99), some=st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_schedule_on_other_encoders_equals_the_oracle(
    described: dict[str, Any],
    attention: str,
    schedule: list[Pooling | None],
    lengths: list[int],
    seed: int,
    some: bool,
) -> None:
    """Also with tokens that are not attended to, and with attention to near tokens only."""
    encoder = Encoder(described, attention=attention).double().eval()
    encoder.set_pooling_(schedule)
    seen = [max(1, length - length % 4) for length in lengths] if some and 0 not in lengths else None
    same_as_oracle(encoder, lengths, seed, seen)
