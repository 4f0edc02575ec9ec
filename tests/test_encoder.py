"""The encoder against transformers, the authors' TITE outputs, and itself under other batchings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from irkit.encoder import Encoder
from irkit.encoder.weights import export_weights
from irkit.errors import BadValueError, ConfigError, CorruptError, StorageError
from irkit.ragged import Ragged

SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES = {
    "bert": transformers.BertConfig(vocab_size=99, max_position_embeddings=64, **SIZES, **NO_DROPOUT),
    "bert-relu": transformers.BertConfig(vocab_size=99, hidden_act="relu", layer_norm_eps=1e-3, **SIZES),
    "roberta": transformers.RobertaConfig(
        vocab_size=99, max_position_embeddings=66, type_vocab_size=1, **SIZES
    ),
    "xlm-roberta": transformers.XLMRobertaConfig(vocab_size=99, max_position_embeddings=66, **SIZES),
    "distilbert": transformers.DistilBertConfig(
        vocab_size=99, dim=48, n_layers=3, n_heads=4, hidden_dim=80, max_position_embeddings=64
    ),
    "modernbert": transformers.ModernBertConfig(
        vocab_size=99, pad_token_id=0, local_attention=8, global_attn_every_n_layers=2, **SIZES
    ),
    "modernbert-biased": transformers.ModernBertConfig(
        vocab_size=99,
        pad_token_id=0,
        local_attention=16,
        attention_bias=True,
        mlp_bias=True,
        norm_bias=True,
        **SIZES,
    ),
}
LENGTHS = [1, 64, 17, 2, 33, 17, 9]


def reference(config: transformers.PretrainedConfig, head: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    config = type(config)(**{**config.to_dict(), "initializer_range": 0.3})
    model = (transformers.AutoModelForMaskedLM if head else transformers.AutoModel).from_config(
        config, attn_implementation="eager"
    )
    for parameter in model.parameters():  # no zero bias, no unit norm: every parameter must matter
        torch.nn.init.normal_(parameter, std=0.2, mean=0.5 if parameter.dim() == 1 else 0)
    return model.eval()


def batch(lengths: list[int], seed: int = 0) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return Ragged(torch.randint(5, 99, (sum(lengths),), generator=generator), torch.tensor(lengths))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_every_gradient_equal_transformers(name: str, attention: str, tmp_path: Path) -> None:
    theirs = reference(FAMILIES[name])
    theirs.save_pretrained(tmp_path)
    ours = Encoder.from_pretrained(tmp_path, attention=attention)
    assert type(ours) is Encoder
    tokens = batch(LENGTHS)
    ids, mask = tokens.to_padded(1 if "roberta" in name else 0)
    expected = theirs(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]
    hidden = ours(tokens).values
    assert (hidden - expected).abs().max() <= 1e-5

    upstream = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    hidden.backward(upstream)
    expected.backward(upstream)
    gradients = export_weights({key: value.grad for key, value in ours.named_parameters()}, ours.names())
    wanted = {key: value.grad for key, value in theirs.named_parameters() if not key.startswith("pooler.")}
    assert gradients.keys() == wanted.keys()
    for key, gradient in wanted.items():
        scale = max(1.0, float(gradient.abs().max()))
        assert (gradients[key] - gradient).abs().max() <= 1e-5 * scale, key


@pytest.mark.data
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_tite_without_pooling_equals_its_authors(data_dir: Path, attention: str) -> None:
    golden = data_dir / "golden" / "tite" / "nopool_bertlike"
    expected = load_file(golden / "expected.safetensors")
    encoder = Encoder.from_pretrained(golden, attention=attention)
    mask = expected["attention_mask"].bool()
    hidden = encoder(Ragged.from_padded(expected["input_ids"], mask))
    assert (hidden.values - expected["last_hidden_state"][mask]).abs().max() <= 1e-5
    hidden.values.backward(expected["upstream_grad"][mask])
    parameters = {key: value.grad for key, value in encoder.named_parameters()}
    for key, gradient in export_weights(parameters, encoder.names()).items():
        wanted = expected[f"grad.{key}"]
        # the gradient of a key's bias is zero in theory: what is left of it is rounding
        assert (gradient - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-5, key
