"""Pooling encoders: the authors' outputs and gradients, a slow padded oracle, and files that load again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from irkit.encoder import Encoder
from irkit.encoder.weights import export_weights
from irkit.ragged import Ragged

GOLDENS = (
    "nopool_bertlike",
    "intra_late_k2",
    "intra_staggered_k2",
    "intra_upscale",
    "intra_prenorm_rms",
    "pre_late_k2",
    "post_late_k2",
)


@pytest.mark.data
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", GOLDENS)
def test_outputs_and_every_gradient_equal_the_authors(data_dir: Path, name: str, attention: str) -> None:
    """Outputs in float32, and gradients in float64: the smallest are rounding of the largest in float32."""
    golden = data_dir / "golden" / "tite" / name
    expected = load_file(golden / "expected.safetensors")
    mask = expected["attention_mask"].bool()
    tokens = Ragged.from_padded(expected["input_ids"], mask)
    kept = mask[:, : expected["last_hidden_state"].shape[1]]
    outputs = expected["last_hidden_state"][kept]
    encoder = Encoder.from_pretrained(golden, attention=attention)
    rough, largest = gradients(encoder, tokens, expected["upstream_grad"][kept], outputs)
    exact, _ = gradients(encoder.double(), tokens, expected["upstream_grad"][kept].double(), outputs)
    assert {f"grad.{key}" for key in exact} == {key for key in expected if key.startswith("grad.")}
    for key, gradient in exact.items():
        wanted = expected[f"grad.{key}"]
        # without rotary positions that of a key's bias is zero in theory: what is left of it is rounding
        rounding = 1e-5 if name == "nopool_bertlike" and key.endswith("key.bias") else 0.0
        assert (gradient - wanted).abs().max() <= 1e-4 * wanted.abs().max() + rounding, key
        assert (rough[key] - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-6 * largest, key


def gradients(
    encoder: Encoder, tokens: Ragged, upstream: torch.Tensor, outputs: torch.Tensor
) -> tuple[dict[str, torch.Tensor], float]:
    """Of every parameter, by the authors' names, and the largest number in any."""
    encoder.zero_grad()
    hidden = encoder(tokens)
    assert (hidden.values - outputs).abs().max() <= 1e-5
    hidden.values.backward(upstream)
    found = {key: value.grad for key, value in encoder.named_parameters()}
    return export_weights(found, encoder.names()), max(float(grad.abs().max()) for grad in found.values())
