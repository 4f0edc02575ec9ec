"""The encoder against transformers, the authors' TITE outputs, and itself under other batchings."""

from __future__ import annotations

import copy
import json
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from irkit.core.ragged import Ragged
from irkit.encoder import Encoder
from irkit.encoder.attention import attend, pick_backend
from irkit.encoder.presets import tite_settings
from irkit.errors import BadValueError, ConfigError, CorruptError, StorageError

SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {**SIZES, "vocab_size": 99, "num_key_value_heads": 2, "head_dim": 16}
LOCAL = {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20}
T5 = {"vocab_size": 99, "d_model": 48, "d_kv": 16, "d_ff": 80, "num_layers": 3, "num_heads": 4}

DEBERTA = {
    **{"vocab_size": 99, "max_position_embeddings": 64, "relative_attention": True, "share_att_key": True},
    **{"pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0},
    **SIZES,
    **NO_DROPOUT,
}


def ropes(kind: str, **values: float) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **values}


GTE = (
    {"gte": transformers.GteConfig(vocab_size=99, **SIZES, **NO_DROPOUT)}
    if hasattr(transformers, "GteConfig")
    else {}  # in transformers 5.17
)
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
    "nomic_bert": transformers.NomicBertConfig(vocab_size=99, **SIZES),
    **GTE,
    "mpnet": transformers.MPNetConfig(vocab_size=99, max_position_embeddings=66, **SIZES),
    "llama": transformers.LlamaConfig(**GROUPED),
    "llama-biased": transformers.LlamaConfig(
        **GROUPED,
        is_causal=False,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=ropes("linear", factor=4.0),
    ),
    "mistral": transformers.MistralConfig(**GROUPED, sliding_window=8),
    "mistral-bidirectional": transformers.MistralConfig(**GROUPED, sliding_window=8, is_causal=False),
    "qwen2": transformers.Qwen2Config(
        vocab_size=99,
        num_key_value_heads=1,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        **SIZES,
    ),
    "qwen3": transformers.Qwen3Config(
        **GROUPED,
        max_position_embeddings=64,
        rope_parameters=ropes("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "gemma2": transformers.Gemma2Config(**GROUPED, sliding_window=8, query_pre_attn_scalar=20),
    "gemma2-bidirectional": transformers.Gemma2Config(
        **GROUPED,
        sliding_window=8,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=5.0,
        is_causal=False,
    ),
    "gemma3": transformers.Gemma3TextConfig(**GROUPED, **LOCAL),
    "embeddinggemma": transformers.Gemma3TextConfig(**GROUPED, **LOCAL, use_bidirectional_attention=True),
    "deberta-v3": transformers.DebertaV2Config(**DEBERTA, position_buckets=8, norm_rel_ebd="layer_norm"),
    "deberta-v2": transformers.DebertaV2Config(
        **{**DEBERTA, "position_biased_input": True, "type_vocab_size": 2}, embedding_size=24
    ),
    "deberta-v2-convolution": transformers.DebertaV2Config(**DEBERTA, conv_kernel_size=3, conv_act="gelu"),
    "deberta-unshared": transformers.DebertaV2Config(**{**DEBERTA, "share_att_key": False}),
    "deberta-c2p": transformers.DebertaV2Config(
        **{**DEBERTA, "pos_att_type": ["c2p"]}, conv_kernel_size=5, conv_groups=2
    ),
    "deberta-p2c": transformers.DebertaV2Config(**{**DEBERTA, "pos_att_type": ["p2c"]}),
    "deberta-c2p-unshared": transformers.DebertaV2Config(
        **{**DEBERTA, "pos_att_type": ["c2p"], "share_att_key": False}, position_buckets=8
    ),
    "deberta-content": transformers.DebertaV2Config(
        vocab_size=99, max_position_embeddings=64, conv_kernel_size=3, **SIZES, **NO_DROPOUT
    ),
    "t5": transformers.T5Config(**T5),
    "mt5": transformers.MT5Config(**T5),
}
OFFSET = ("roberta", "xlm-roberta", "mpnet")  # whose positions follow from the ids
LENGTHS = [1, 64, 17, 2, 33, 17, 9]


def build(config: transformers.PretrainedConfig, kind: str = "AutoModel") -> torch.nn.Module:
    kind = "AutoModelForTextEncoding" if config.model_type in ("t5", "mt5") else kind
    return getattr(transformers, kind).from_config(config, attn_implementation="eager")


def reference(config: transformers.PretrainedConfig, head: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    config = type(config)(**{**config.to_dict(), "initializer_range": 0.3})
    model = build(config, "AutoModelForMaskedLM" if head else "AutoModel")
    for parameter in model.parameters():  # no zero bias, no unit norm: every parameter must matter
        torch.nn.init.normal_(parameter, std=0.2, mean=0.5 if parameter.dim() == 1 else 0)
    return model.eval()


def batch(lengths: list[int], seed: int = 0) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return Ragged(torch.randint(5, 99, (sum(lengths),), generator=generator), torch.tensor(lengths))


def gradients_of(model: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Return the gradients of an encoder by the names that its weights have in files."""
    gradients = copy.deepcopy(model)
    gradients.head_weights = {}
    for ours, theirs in zip(gradients.parameters(), model.parameters(), strict=True):
        ours.data = torch.zeros_like(ours) if theirs.grad is None else theirs.grad
    gradients.save_pretrained(folder / "gradients")
    tensors = load_file(folder / "gradients" / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler.")}


@pytest.mark.sampled
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_every_gradient_equal_transformers(name: str, attention: str, tmp_path: Path) -> None:
    theirs = reference(FAMILIES[name])
    theirs.save_pretrained(tmp_path)
    ours = Encoder.from_pretrained(tmp_path, attention=attention)
    assert type(ours) is Encoder
    tokens = batch(LENGTHS)
    ids, mask = tokens.to_padded(1 if name in OFFSET else 0)
    expected = theirs(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]
    hidden = ours(tokens).values
    assert (hidden - expected).abs().max() <= 1e-5 * max(1, expected.abs().max())
    with torch.no_grad():
        alone = torch.cat([ours(tokens[i : i + 1]).values for i in range(len(tokens))])
    assert (hidden - alone).abs().max() <= 1e-5 * max(1, expected.abs().max())

    upstream = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    hidden.backward(upstream)
    expected.backward(upstream)
    wanted, gradients = gradients_of(theirs, tmp_path), gradients_of(ours, tmp_path)
    assert gradients.keys() == wanted.keys()
    for key, gradient in wanted.items():
        scale = max(1.0, float(gradient.abs().max()))
        assert (gradients[key] - gradient).abs().max() <= 1e-5 * scale, key


@pytest.mark.sampled
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_that_are_not_attended_to(name: str, attention: str, tmp_path: Path) -> None:
    """As under transformers' attention mask; local attention still reaches a token that is seen."""
    theirs = reference(FAMILIES[name])
    theirs.save_pretrained(tmp_path)
    tokens = batch(LENGTHS)
    attended = (tokens.lengths - 3).clamp(min=1)
    ids, mask = tokens.to_padded(1 if name in OFFSET else 0)
    seen = torch.arange(ids.shape[1]) < attended[:, None]
    places = {"position_ids": torch.arange(ids.shape[1]) + 2} if name in OFFSET else {}  # else by padding
    places = {key: value.expand(ids.shape) for key, value in places.items()}
    expected = theirs(input_ids=ids, attention_mask=seen.long(), **places).last_hidden_state[mask]
    ours = Encoder.from_pretrained(tmp_path, attention=attention)
    hidden = ours(tokens, attended).values
    # DeBERTa's tokens that are not attended to see nothing; here they see the others
    same = seen[mask][:, None] if name.startswith("deberta") else torch.ones(len(hidden), 1)
    scale = max(1, expected.abs().max())
    assert ((hidden - expected) * same).abs().max() <= 1e-5 * scale
    upstream = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)) * same
    hidden.backward(upstream)
    expected.backward(upstream)
    wanted, got = gradients_of(theirs, tmp_path), gradients_of(ours, tmp_path)
    for key, gradient in got.items():
        largest = max(1.0, float(wanted[key].abs().max()))
        assert (gradient - wanted[key]).abs().max() <= 1e-5 * largest, key
    with torch.inference_mode():
        assert ((ours(tokens, attended).values - expected) * same).abs().max() <= 1e-5 * scale
        ours.pack_()
        assert ((ours(tokens, attended).values - expected) * same).abs().max() <= 1e-5 * scale


LONG = [
    *(("deberta-v3", [1, 8, 513]), ("t5", [1, 8, 513])),
    *(pytest.param(name, [1, 8, 513, 4096], marks=pytest.mark.slow) for name in FAMILIES),
]


@pytest.mark.parametrize(("name", "lengths"), LONG)
def test_long_rows_equal_transformers(name: str, lengths: list[int], tmp_path: Path) -> None:
    """Outputs and gradients of rows of 1 to 4,096 tokens, without and with the others beside them.

    T5 and DeBERTa are compared with float64, where ours may be as far as theirs in float32: their gradients
    are sums of millions of terms, and rounding turns some units of ReLU on or off.
    """
    config = FAMILIES[name]
    if getattr(config, "max_position_embeddings", 0) == 66:
        config = type(config)(**{**config.to_dict(), "max_position_embeddings": 4200})
    elif isinstance(config, transformers.BertConfig | transformers.DistilBertConfig) or name in (
        "deberta-v2",
        "deberta-content",
    ):
        config = type(config)(**{**config.to_dict(), "max_position_embeddings": 4096})
    theirs = exact = reference(config)
    theirs.save_pretrained(tmp_path)
    if config.model_type in ("t5", "mt5", "deberta-v2"):
        exact = copy.deepcopy(theirs).double()
    ours, tokens = Encoder.from_pretrained(tmp_path), batch(lengths)
    hidden = ours(tokens)
    upstream = hidden.with_values(torch.randn(hidden.values.shape))
    for got, row, grad in zip(hidden, tokens, upstream, strict=True):
        for model in {exact, theirs}:
            expected = model(input_ids=row[None]).last_hidden_state[0]
            assert (got - expected).abs().max() <= 1e-5 * max(1, expected.abs().max())
            expected.backward(grad.to(expected.dtype))
    hidden.values.backward(upstream.values)
    wanted, rounded, got = (
        gradients_of(model, tmp_path / str(i)) for i, model in enumerate((exact, theirs, ours))
    )
    for parts in ours.names().values():  # together: the bias of keys has a gradient of 0, but for rounding
        keys = [key for part in parts for key in got if key.endswith(part)]
        largest = max(1.0, *(float(wanted[key].abs().max()) for key in keys))
        theirs_off = max(float((rounded[key] - wanted[key]).abs().max()) for key in keys)
        for key in keys:
            assert (got[key] - wanted[key]).abs().max() <= max(1e-5 * largest, 1.5 * theirs_off), key


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAMILIES)
def test_precisions(name: str, tmp_path: Path) -> None:
    """bfloat16 and int8 keep the mean vector of a row."""
    build(FAMILIES[name]).save_pretrained(tmp_path)
    tokens = batch(LENGTHS)

    def vectors(encoder: Encoder) -> torch.Tensor:
        return torch.stack([row.float().mean(0) for row in encoder(tokens)])

    exact = Encoder.from_pretrained(tmp_path)
    half = Encoder.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.inference_mode():
        wanted = vectors(exact)
        exact.quantize_()
        for encoder, least in ((half, 0.999), (exact, 0.99)):
            assert torch.nn.functional.cosine_similarity(vectors(encoder), wanted).min() >= least


def test_a_row_of_one_token_is_rounded_as_beside_longer_rows(tmp_path: Path) -> None:
    sizes = SIZES | {"hidden_size": 64}  # heads of 16, for which the kernel has code
    build(transformers.BertConfig(vocab_size=99, max_position_embeddings=64, **sizes)).save_pretrained(
        tmp_path
    )
    encoder, tokens = Encoder.from_pretrained(tmp_path), batch([1, 9, 1])
    encoder.quantize_()
    with torch.inference_mode():
        alone = [encoder(tokens[i : i + 1]).values for i in range(3)]
        assert torch.equal(torch.cat(alone), encoder(tokens).values)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_local_attention_beyond_what_is_attended_to(attention: str, tmp_path: Path) -> None:
    """Tokens out of reach of all that is seen give finite vectors and disturb nobody."""
    reference(FAMILIES["modernbert"]).save_pretrained(tmp_path)
    encoder = Encoder.from_pretrained(tmp_path, attention=attention)
    tokens, attended = batch([30, 5, 12]), torch.tensor([3, 5, 1])
    alone = encoder(Ragged(torch.cat([row[:n] for row, n in zip(tokens, attended, strict=True)]), attended))
    hidden = encoder(tokens, attended)
    for row, short in zip(hidden, alone, strict=True):
        torch.testing.assert_close(row[: len(short)], short, rtol=1e-4, atol=1e-5)
    assert hidden.values.isfinite().all()
    hidden.values.sum().backward()
    assert all(weight.grad.isfinite().all() for weight in encoder.parameters())


ADAPTED = {
    "electra": (
        transformers.ElectraConfig(vocab_size=99, embedding_size=48, max_position_embeddings=64, **SIZES),
        True,
    ),
    "albert": (
        transformers.AlbertConfig(vocab_size=99, embedding_size=24, max_position_embeddings=64, **SIZES),
        True,
    ),
    "umt5": (transformers.UMT5Config(**T5), False),
    "olmo2": (transformers.Olmo2Config(vocab_size=99, max_position_embeddings=64, **SIZES), False),
    "bert-decoder": (
        transformers.BertConfig(vocab_size=99, is_decoder=True, max_position_embeddings=64, **SIZES),
        False,
    ),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_other_architectures_run_through_transformers(name: str, tmp_path: Path) -> None:
    config, packed = ADAPTED[name]
    theirs = reference(config)
    theirs.save_pretrained(tmp_path)
    ours = Encoder.from_pretrained(tmp_path)
    assert type(ours).__name__ == "TransformersEncoder"
    assert ours.packed == packed
    tokens = batch(LENGTHS)
    ids, mask = tokens.to_padded(config.pad_token_id or 0)
    if config.is_encoder_decoder:
        theirs = theirs.get_encoder()
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]
        assert (ours(tokens).values - expected).abs().max() <= 2e-5
        attended = (tokens.lengths - 3).clamp(min=1)
        seen = torch.arange(ids.shape[1]) < attended[:, None]
        expected = theirs(input_ids=ids, attention_mask=seen.long()).last_hidden_state[mask]
        assert (ours(tokens, attended).values - expected).abs().max() <= 2e-5
        assert ours(batch([])).values.shape == (0, 48)
    ours.save_pretrained(tmp_path / "again")
    again = Encoder.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(again(tokens).values, ours(tokens).values)
        before = ours(tokens).values
        ours.grow_(90)  # smaller: nothing happens
        ours.grow_(101)
        assert torch.equal(ours(tokens).values, before)
        row = Ragged.from_rows([[100, 5]])
        words = ours.whole.get_input_embeddings().weight
        torch.testing.assert_close(words[99:], words[:99].mean(0).expand(2, -1))
        assert ours(row).values.isfinite().all()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    reference(FAMILIES["bert"]).save_pretrained(path)
    return path


OWN = {
    "jina": {
        **{"model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu"},
        **{"vocab_size": 99, "max_position_embeddings": 64, "type_vocab_size": 2, **SIZES, **NO_DROPOUT},
    },
    "neobert": {"model_type": "neobert", "vocab_size": 99, "norm_eps": 1e-5, "max_length": 64, **SIZES},
    "tite": tite_settings("2-staggered", vocab_size=99, layers=4, hidden_size=48, heads=4, max_length=8),
}


@lru_cache
def random_encoder(name: str) -> Encoder:
    """Return an encoder of a native family, also of those that transformers does not have."""
    if name in OWN:
        torch.manual_seed(0)
        return Encoder(OWN[name]).eval()
    with tempfile.TemporaryDirectory() as folder:
        reference(FAMILIES[name]).save_pretrained(folder)
        return Encoder.from_pretrained(folder)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*FAMILIES, *OWN])
@settings(deadline=None, max_examples=4)
@given(lengths=st.lists(st.integers(0, 60), min_size=2, max_size=6), seed=st.integers(0, 9))
def test_a_row_does_not_depend_on_its_batch_mates(name: str, lengths: list[int], seed: int) -> None:
    encoder, tokens = random_encoder(name), batch(lengths, seed)
    with torch.no_grad():
        together = encoder(tokens)
        for i in range(len(lengths)):
            alone = encoder(tokens[i : i + 1]).values
            scale = max([1.0, *alone.abs().amax(1).tolist()])
            torch.testing.assert_close(together[i], alone, atol=1e-5 * scale, rtol=0)


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 50),
)
def test_attention_backends_agree(lengths: list[tuple[int, int]], window: int | None) -> None:
    len_k = torch.tensor([b for _, b in lengths])
    len_q = torch.tensor([min(a, b) for a, b in lengths]) if window is None else len_k
    assume(len_q.sum() > 0)

    def draw(counts: torch.Tensor) -> Ragged:
        return Ragged(torch.randn(int(counts.sum()), 2, 8, requires_grad=True), counts)

    parts = draw(len_q), draw(len_k), draw(len_k)
    outputs = [attend(*parts, backend=backend, window=window) for backend in ("eager", "sdpa")]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(
            attend(*parts, backend="sdpa", window=window), outputs[0], atol=1e-5, rtol=0
        )
    upstream = torch.randn_like(outputs[0])
    gradients = [
        torch.autograd.grad(output, [part.values for part in parts], upstream, allow_unused=True)
        for output in outputs
    ]
    for one, other in zip(*gradients, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
            assert one.isfinite().all()


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
def test_task_heads_survive_loading_and_saving(name: str, tmp_path: Path) -> None:
    whole = reference(FAMILIES[name], head=True)
    whole.save_pretrained(tmp_path / "a")
    encoder = Encoder.from_pretrained(tmp_path / "a")
    encoder.save_pretrained(tmp_path / "b")
    before, after = (load_file(tmp_path / part / "model.safetensors") for part in "ab")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    again = type(whole).from_pretrained(tmp_path / "b").eval()
    ids = batch([20]).values[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, whole(ids).logits, atol=1e-5, rtol=0)


def test_a_loaded_encoder_does_not_keep_its_file_in_memory(bert: Path) -> None:
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        pytest.skip("this system does not say which files are in memory")
    encoder = Encoder.from_pretrained(bert)
    assert encoder.head_weights
    assert str(bert) not in maps.read_text()


def test_older_weight_files_load(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((bert / "config.json").read_text())
    tensors = load_file(bert / "model.safetensors")
    old = {
        f"bert.{key.replace('LayerNorm.weight', 'LayerNorm.gamma')}": value for key, value in tensors.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(64)
    torch.save(old, tmp_path / "pytorch_model.bin")
    tokens = batch(LENGTHS)
    expected = Encoder.from_pretrained(bert)(tokens).values
    assert torch.equal(Encoder.from_pretrained(tmp_path)(tokens).values, expected)

    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text((bert / "config.json").read_text())
    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, sharded / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(Encoder.from_pretrained(sharded)(tokens).values, expected)


def test_weights_that_do_not_fit_are_refused(bert: Path, tmp_path: Path) -> None:
    config, tensors = json.loads((bert / "config.json").read_text()), load_file(bert / "model.safetensors")

    def load(tensors: dict[str, torch.Tensor], **changes: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        save_file(tensors, tmp_path / "model.safetensors")
        Encoder.from_pretrained(tmp_path)

    load(tensors)
    key = "encoder.layer.1.output.dense.weight"
    with pytest.raises(CorruptError, match=f"missing {key}"):
        load({name: value for name, value in tensors.items() if name != key})
    with pytest.raises(CorruptError, match=r"left over surplus\.weight"):
        load(tensors | {"surplus.weight": torch.zeros(2)})
    with pytest.raises(CorruptError, match=r"encoder\.layer\.1\.output\.dense\.weight gives \(2, 2\)"):
        load(tensors | {key: torch.zeros(2, 2)})
    with pytest.raises(CorruptError, match=r"left over encoder\.layer\.2"):
        load(tensors, num_hidden_layers=2)
    file = tmp_path / "model.safetensors"
    load(tensors)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorruptError, match=r"model\.safetensors"):
        Encoder.from_pretrained(tmp_path)
    file.unlink()
    with pytest.raises(StorageError, match="found neither"):
        Encoder.from_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(
        b"cos\nsystem\n(S'true'\ntR."
    )  # a pickle that runs a command
    with pytest.raises(CorruptError, match=r"pytorch_model\.bin"):
        Encoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(StorageError, match=r"config\.json"):
        Encoder.from_pretrained(tmp_path)


def test_impossible_settings_and_inputs_are_refused(bert: Path) -> None:
    known = json.loads((bert / "config.json").read_text())
    for change, message in [
        ({"model_type": "gpt9"}, "gpt9"),
        ({"hidden_act": "mish"}, "mish"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"model_type": "tite", "hidden_sizes": 8, "strides": 2}, "kernel size None with stride 2"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Encoder(known | change)
    with pytest.raises(ConfigError, match="hidden_size"):
        Encoder({key: value for key, value in known.items() if key != "hidden_size"})
    with pytest.raises(BadValueError, match="65 tokens exceeds the 64 positions"):
        Encoder(known)(batch([65]))
    with pytest.raises(BadValueError, match="auto, eager, sdpa or flash"):
        Encoder(known, attention="fast")
    with pytest.raises(BadValueError, match="CUDA"):
        Encoder(known, attention="flash")(batch([5]))


def test_unpadded_encoding_needs_no_tokens(bert: Path) -> None:
    encoder = Encoder.from_pretrained(bert)
    for lengths in ([], [0], [0, 3, 0]):
        hidden = encoder(batch(lengths))
        assert hidden.values.shape == (sum(lengths), 48)
        assert hidden.values.isfinite().all()


def heads_of(name: str, heads: int) -> transformers.PretrainedConfig:
    config = FAMILIES[name]
    return type(config)(**{**config.to_dict(), "num_attention_heads": heads})


@pytest.mark.gpu
@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
@pytest.mark.parametrize(("attention", "heads"), [("sdpa", 4), ("flash", 3), ("flash", 4)])  # 16 or 12 wide
def test_cuda_backends_agree_with_float32(
    name: str, attention: str, heads: int, partly: bool, tmp_path: Path
) -> None:
    reference(heads_of(name, heads)).save_pretrained(tmp_path)
    tokens = batch(LENGTHS)
    attended = (tokens.lengths - 3).clamp(min=1) if partly else None
    with torch.no_grad():
        exact = Encoder.from_pretrained(tmp_path)(tokens, attended).values
        plain = Encoder.from_pretrained(tmp_path, dtype=torch.bfloat16, attention="eager").cuda()
        fused = Encoder.from_pretrained(tmp_path, dtype=torch.bfloat16, attention=attention).cuda()
        errors = [
            (model(tokens.to("cuda"), attended).values.cpu().float() - exact).abs().max()
            for model in (plain, fused)
        ]
    assert errors[1] <= 2 * errors[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bert", "modernbert"])
@pytest.mark.parametrize(("attention", "heads"), [("sdpa", 4), ("flash", 3), ("flash", 4)])
def test_gradients_under_autocast_on_cuda(name: str, attention: str, heads: int, tmp_path: Path) -> None:
    reference(heads_of(name, heads)).save_pretrained(tmp_path)
    tokens, found = batch(LENGTHS).to("cuda"), []
    for backend, half in (("eager", False), ("eager", True), (attention, True)):
        encoder = Encoder.from_pretrained(tmp_path, attention=backend).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            hidden = encoder(tokens).values
        upstream = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
        weights = [encoder.layers[0].qkv.weight, encoder.embeddings.word.weight]
        found.append(torch.autograd.grad(hidden, weights, upstream.to(hidden)))
    for exact, plain, fused in zip(*found, strict=True):
        errors = [(each - exact).square().mean().sqrt() for each in (plain, fused)]
        assert errors[1] <= 2 * errors[0]


@pytest.mark.filterwarnings("ignore:attention. flash attention has no heads:UserWarning")
@pytest.mark.parametrize("width", [12, 264])
def test_heads_that_flash_attention_does_not_know(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    rows = batch([3, 0, 5]).with_values(torch.randn(8, 2, width))
    expected = attend(rows, rows, rows, backend="eager")
    torch.testing.assert_close(attend(rows, rows, rows, backend="flash"), expected)


def test_backends_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert pick_backend("auto", gpu, torch.bfloat16) == "flash"
    assert pick_backend("auto", gpu, torch.float32) == "sdpa"
    torch.set_autocast_enabled("cuda", True)
    try:
        assert pick_backend("flash", gpu, torch.float32) == "flash"
    finally:
        torch.set_autocast_enabled("cuda", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert pick_backend("auto", gpu, torch.float16) == "sdpa"


@pytest.mark.parametrize("lengths", [(3, 3), (2, 4)])
def test_rows_of_one_length_attend_as_beside_a_longer_one(lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    queries, keys = lengths
    sizes = (queries, keys, keys)
    parts = [torch.randn(2 * size, 2, 4, dtype=torch.float64, requires_grad=True) for size in sizes]
    longer = torch.randn(7, 2, 4, dtype=torch.float64)

    def run(beside: bool) -> tuple[torch.Tensor, ...]:
        rows = [Ragged(part, torch.full((2,), size)) for part, size in zip(parts, sizes, strict=True)]
        if beside:
            rows = [Ragged.concat([row, Ragged(longer, torch.tensor([7]))]) for row in rows]
        out = attend(*rows, backend="eager")[: 2 * queries]
        return out, *torch.autograd.grad(out.square().sum(), parts)

    for alone, together in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(alone, together)


def test_loading_draws_no_weights_that_it_then_reads(tiny_bert: Path) -> None:
    before = torch.get_rng_state()
    encoder = Encoder.from_pretrained(tiny_bert)
    assert torch.equal(before, torch.get_rng_state())
    assert encoder.names().keys() == dict(encoder.named_parameters()).keys()  # none is left as memory was
    Encoder(encoder.settings)
    assert not torch.equal(before, torch.get_rng_state())
