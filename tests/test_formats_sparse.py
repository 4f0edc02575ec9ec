"""Learned sparse model directories, both ways, against sentence-transformers; masked language models."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from irkit.encoder import Encoder
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.model import Model
from irkit.training.losses import InfoNCE
from irkit.training.train_step import TrainStep

TEXTS = [
    "a neural search index",
    "",
    "vector " * 80,
    "the text of a token model, in a vector?",
    "x",
    "[MASK] of [SEP] text",
]
SIZES = {
    "vocab_size": 104,  # three rows more than tokens
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 70,
}
DISTILBERT = {
    "vocab_size": 104,
    "dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 64,
    "max_position_embeddings": 64,
}
UNTIED = {"tie_word_embeddings": False}
FAMILIES: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertConfig(**SIZES),
    "bert-relu": lambda: transformers.BertConfig(**SIZES, hidden_act="relu", layer_norm_eps=1e-3),
    "bert-untied": lambda: transformers.BertConfig(**SIZES, **UNTIED),
    "roberta": lambda: transformers.RobertaConfig(**SIZES, pad_token_id=0),
    "roberta-untied": lambda: transformers.RobertaConfig(**SIZES, **UNTIED, pad_token_id=0),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**SIZES, pad_token_id=0),
    "distilbert": lambda: transformers.DistilBertConfig(**DISTILBERT),
    "distilbert-untied": lambda: transformers.DistilBertConfig(**DISTILBERT, **UNTIED),
    "modernbert": lambda: transformers.ModernBertConfig(**SIZES, pad_token_id=0),
    "modernbert-biased": lambda: transformers.ModernBertConfig(
        **SIZES, pad_token_id=0, classifier_bias=True, norm_bias=True, decoder_bias=False
    ),
    "modernbert-untied": lambda: transformers.ModernBertConfig(**SIZES, **UNTIED, pad_token_id=0),
    "mpnet": lambda: transformers.MPNetConfig(**SIZES),
    "nomic_bert": lambda: transformers.NomicBertConfig(**SIZES),
    "gte": lambda: transformers.GteConfig(**SIZES),
    "deberta-v2": lambda: transformers.DebertaV2Config(
        **SIZES, relative_attention=True, share_att_key=True, pos_att_type="c2p|p2c"
    ),
    "deberta-projected": lambda: transformers.DebertaV2Config(
        **SIZES, relative_attention=True, share_att_key=True, pos_att_type="c2p|p2c", embedding_size=32
    ),
    "bert-mish": lambda: transformers.BertConfig(**SIZES, hidden_act="mish"),  # from here: in transformers
    "albert": lambda: transformers.AlbertConfig(**SIZES, embedding_size=32),
    "electra": lambda: transformers.ElectraConfig(**SIZES, embedding_size=32),
}
OTHERS = ("bert-mish", "albert", "electra")


@pytest.fixture(scope="module")
def masked_lm(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory, peer: Any) -> Callable[[str], Path]:
    """A masked language model of random weights by the name of its family."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            torch.manual_seed(0)
            model = transformers.AutoModelForMaskedLM.from_config(FAMILIES[name]())
            for parameter in model.parameters():  # no zero bias, no unit norm: every parameter must matter
                torch.nn.init.normal_(parameter, std=0.3, mean=0.3 if parameter.dim() == 1 else 0)
            made[name] = tmp_path_factory.mktemp(name)
            save(model, made[name])
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(tiny_bert / file, made[name] / file)
        return made[name]

    return make


@pytest.fixture
def bert(masked_lm: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the BERT that a test may change."""
    return Path(shutil.copytree(masked_lm("bert"), tmp_path / "bert"))


def save(model: Any, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(path))


def open_peer(peer: Any, path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peer.SparseEncoder(str(path), device="cpu")


def change(file: Path, **keys: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def agree(model: Model, other: Any) -> None:
    """Queries and documents of both have the same vectors."""
    for ours, theirs in (
        (model.encode_query(TEXTS), other.encode_query(TEXTS)),
        (model.encode_document(TEXTS), other.encode_document(TEXTS)),
    ):
        assert ours.is_sparse
        assert theirs.is_sparse
        assert ours.shape == theirs.shape
        wanted = theirs.to_dense()
        assert (wanted.max(1).values > 0.1).all()  # something to compare
        assert (ours.to_dense() - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.max()))


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_both_ways(
    name: str, masked_lm: Callable[[str], Path], both_ways: Callable[..., Any], peer: Any, tmp_path: Path
) -> None:
    folder = masked_lm(name)
    theirs = open_peer(peer, folder)
    plain = Model.from_pretrained(folder, device="cpu")  # without modules.json
    agree(plain, theirs)
    assert isinstance(plain.encoder, Encoder) is (name not in OTHERS)
    assert not plain.encoder.head_weights
    tied = plain.head.weight is plain.encoder.word_embeddings
    assert tied is not name.endswith("untied")
    again = both_ways(theirs, tmp_path, agree)
    assert (again.head.weight is again.encoder.word_embeddings) is tied
    assert again.vocabulary[-3:] == ["[101]", "[102]", "[103]"]


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_of_a_new_model_have_no_weights_in_the_peer_either(
    name: str, masked_lm: Callable[[str], Path], peer: Any, tmp_path: Path
) -> None:
    loaded = Model.from_pretrained(masked_lm(name), device="cpu")
    model = Model.sparse(masked_lm(name), device="cpu")
    weights, wanted = (each.encode(TEXTS).to_dense() for each in (model, loaded))
    assert (wanted[:, :5] > 0).any()
    assert (weights[:, :5] == 0).all()
    assert torch.equal(weights[:, 5:], wanted[:, 5:])  # the head of the checkpoint
    model.save_pretrained(tmp_path / "new")
    agree(model, open_peer(peer, tmp_path / "new"))
    loaded.head.exclude_(loaded.tokenizer.special_tokens())
    assert torch.equal(loaded.encode(TEXTS).to_dense(), weights)


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("name", ["bert", "bert-untied", "distilbert", "modernbert", "electra"])
def test_gradients_of_all_weights_equal_those_of_transformers(
    name: str, pooling: str, masked_lm: Callable[[str], Path]
) -> None:
    model = Model.from_pretrained(masked_lm(name), device="cpu")
    model.head.config = model.head.config.model_copy(update={"pooling": pooling})
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(masked_lm(name))
    tokens = model.tokenizer(TEXTS)
    ids, mask = tokens.to_padded(0)
    weights = theirs(input_ids=ids, attention_mask=mask.long()).logits.relu().log1p() * mask[:, :, None]
    wanted = weights.amax(1) if pooling == "max" else weights.sum(1)
    result = model(tokens).to_dense()
    assert (result - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.detach().max()))
    upstream = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    result.backward(upstream)
    wanted.backward(upstream)
    expected = sorted(each.grad.norm() for each in theirs.parameters() if each.grad is not None)
    got = sorted(
        part.norm()
        for key, each in model.named_parameters()
        if each.grad is not None
        for part in (each.grad.chunk(3) if ".qkv." in key and name != "modernbert" else [each.grad])
    )
    torch.testing.assert_close(torch.stack(got), torch.stack(expected), rtol=1e-3, atol=1e-4)
    embeddings = theirs.get_input_embeddings().weight.grad
    torch.testing.assert_close(model.encoder.word_embeddings.grad, embeddings, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert-biased"])
def test_a_new_head_on_a_bare_encoder_opens_in_the_peer(
    name: str, masked_lm: Callable[[str], Path], peer: Any, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    save(transformers.AutoModel.from_pretrained(masked_lm(name)), bare)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(masked_lm(name) / file, bare / file)
    model = Model.sparse(bare, {"pooling": "sum"}, device="cpu")
    model.save_pretrained(tmp_path / "new")
    agree(model, open_peer(peer, tmp_path / "new"))
    assert json.loads((tmp_path / "new" / "config.json").read_text())["architectures"][0].endswith(
        "ForMaskedLM"
    )


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize(("theirs", "ours"), [("relu", "log1p_relu"), ("log1p_relu", "log1p_log1p_relu")])
def test_poolings_and_activations(
    theirs: str, ours: str, pooling: str, both_ways: Callable[..., Any], bert: Path, peer: Any, tmp_path: Path
) -> None:
    other = open_peer(peer, bert)
    other[1].pooling_strategy, other[1].activation_function = pooling, theirs
    model = both_ways(other, tmp_path, agree)
    assert (model.head.config.pooling, model.head.config.activation) == (pooling, ours)


def test_limits_prompts_and_similarity(
    both_ways: Callable[..., Any], bert: Path, peer: Any, tmp_path: Path
) -> None:
    other = open_peer(peer, bert)
    other.max_active_dims, other.similarity_fn_name = 7, "cosine"
    other.prompts = {"query": "search ", "document": "text of "}
    model = both_ways(other, tmp_path, agree)
    assert model.head.config.query_max_active_dims == model.head.config.document_max_active_dims == 7
    assert model.similarity_name == "cosine"
    a, b = (other.encode(TEXTS, max_active_dims=most) for most in (3, 50))
    assert (model.encode(TEXTS, max_active_dims=3).to_dense() - a.to_dense()).abs().max() <= 1e-5
    assert (model.encode(TEXTS, max_active_dims=50).to_dense() - b.to_dense()).abs().max() <= 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted, pairs = other.similarity(a, b), other.similarity_pairwise(a, b)
    torch.testing.assert_close(model.similarity(a, b), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.similarity_pairwise(a, b), pairs, rtol=1e-4, atol=1e-5)


def test_lengths_of_either_side(both_ways: Callable[..., Any], bert: Path, peer: Any, tmp_path: Path) -> None:
    other = open_peer(peer, bert)
    other[0].query_length, other[0].document_length = 4, 7
    model = both_ways(other, tmp_path, agree)
    assert (model.max_length("query"), model.max_length("document")) == (4, 7)
    before = model.fingerprint, model.query_fingerprint
    model.set_length("query", 5)
    assert (model.fingerprint == before[0], model.query_fingerprint == before[1]) == (True, False)


def test_a_limit_for_either_side_is_kept_here_alone(bert: Path, tmp_path: Path) -> None:
    model = Model.sparse(bert, {"query_max_active_dims": 3}, device="cpu")
    with pytest.warns(UserWarning, match="queries keep 3 weights and documents all"):
        model.save_pretrained(tmp_path / "new")
    again = Model.from_pretrained(tmp_path / "new")
    assert again.head.config == model.head.config
    assert again.encode_query(TEXTS).to_dense().count_nonzero(1).tolist() == [3] * len(TEXTS)


# ---- older files -------------------------------------------------------------------------------


def test_files_of_version_5(bert: Path, peer: Any) -> None:
    """MLMTransformer, word_embedding_dimension, and no word about what the Transformer does."""
    (bert / "1_SpladePooling").mkdir()
    (bert / "1_SpladePooling" / "config.json").write_text(
        json.dumps(
            {
                "pooling_strategy": "max",
                "activation_function": "relu",
                "word_embedding_dimension": None,
            }
        )
    )
    home = "sentence_transformers.sparse_encoder.models"
    modules = [("", "MLMTransformer"), ("1_SpladePooling", "SpladePooling")]
    (bert / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "name": str(i), "path": path, "type": f"{home}.{name}"}
                for i, (path, name) in enumerate(modules)
            ]
        )
    )
    (bert / "sentence_bert_config.json").write_text('{"max_seq_length": 16, "do_lower_case": false}')
    (bert / "config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder", "prompts": {}}')
    theirs = open_peer(peer, bert)
    agree(Model.from_pretrained(bert, device="cpu"), theirs)
    change(bert / "1_SpladePooling" / "config.json", word_embedding_dimension=104)
    (bert / "config_sentence_transformers.json").unlink()
    agree(Model.from_pretrained(bert, device="cpu"), theirs)


def test_pytorch_files_and_old_names_of_norms(bert: Path, tmp_path: Path) -> None:
    wanted = Model.from_pretrained(bert, device="cpu").encode(TEXTS).to_dense()
    weights = load_file(bert / "model.safetensors")
    assert "cls.predictions.decoder.weight" not in weights  # tied
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in weights.items()
    }
    renamed["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"]
    renamed["cls.seq_relationship.weight"] = torch.ones(2, 48)  # another head, which is none of ours
    (bert / "model.safetensors").unlink()
    torch.save(renamed, bert / "pytorch_model.bin")
    model = Model.from_pretrained(bert, device="cpu")
    assert torch.equal(model.encode(TEXTS).to_dense(), wanted)
    assert model.head.weight is model.encoder.word_embeddings
    model.save_pretrained(tmp_path / "new")
    assert load_file(tmp_path / "new" / "model.safetensors").keys() == weights.keys()


# ---- what only irkit opens ---------------------------------------------------------------------


def test_a_new_head_on_a_bare_encoder_that_runs_in_transformers(
    masked_lm: Callable[[str], Path], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    save(transformers.AutoModel.from_pretrained(masked_lm("electra")), bare)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(masked_lm("electra") / file, bare / file)
    model = Model.sparse(bare, device="cpu")
    assert model.head.weight.shape == (104, 32)  # narrower than hidden states
    with pytest.warns(UserWarning, match="cannot open it"):
        model.save_pretrained(tmp_path / "new")
    again = Model.from_pretrained(tmp_path / "new", device="cpu")
    assert again.head.weight is again.encoder.word_embeddings
    assert torch.equal(again.encode(TEXTS).to_dense(), model.encode(TEXTS).to_dense())


def test_a_head_that_is_not_that_of_the_family(bert: Path, tmp_path: Path) -> None:
    model = Model.from_pretrained(bert, device="cpu")
    model.head.layers[2].eps = 0.5  # config.json has one number for all norms
    with pytest.warns(UserWarning, match="cannot open it"):
        model.save_pretrained(tmp_path / "new")
    again = Model.from_pretrained(tmp_path / "new", device="cpu")
    assert torch.equal(again.encode(TEXTS).to_dense(), model.encode(TEXTS).to_dense())


def test_equal_weights_that_are_not_tied_stay_apart(bert: Path, tmp_path: Path) -> None:
    weights = load_file(bert / "model.safetensors")
    copied = weights["bert.embeddings.word_embeddings.weight"].clone()
    save_file(
        weights | {"cls.predictions.decoder.weight": copied},
        bert / "model.safetensors",
        metadata={"format": "pt"},
    )
    change(bert / "config.json", tie_word_embeddings=False)
    model = Model.from_pretrained(bert)
    model.save_pretrained(tmp_path / "new")
    for each in (model, Model.from_pretrained(tmp_path / "new")):
        assert each.head.weight is not each.encoder.word_embeddings
        assert torch.equal(each.head.weight, each.encoder.word_embeddings)


@pytest.mark.parametrize("name", ["bert", "modernbert-biased", "bert-untied", "electra"])
@pytest.mark.parametrize("case", ["activation", "vocabulary"])
def test_heads_that_the_peer_lacks(
    case: str, name: str, masked_lm: Callable[[str], Path], tmp_path: Path
) -> None:
    if case == "activation":
        model = Model.sparse(masked_lm(name), {"activation": "relu"}, device="cpu")
    else:
        model = Model.sparse(masked_lm(name), vocabulary=["neural search", "é\n", "index"], device="cpu")
    with pytest.warns(UserWarning, match="sentence-transformers cannot open it"):
        model.save_pretrained(tmp_path / "new")
    again = Model.from_pretrained(tmp_path / "new", device="cpu")
    assert torch.equal(again.encode(TEXTS).to_dense(), model.encode(TEXTS).to_dense())
    assert again.vocabulary == model.vocabulary
    assert again.fingerprint == model.fingerprint
    with pytest.raises(BadValueError, match="ColBERT has no place for sparse vectors"):
        model.save_pretrained(tmp_path / "stanford", format="stanford")
    on_it = Model.multi_vector(tmp_path / "new", "linear", device="cpu")  # its encoder is still one
    assert on_it.encode("text").shape[1] == 128


def test_a_family_without_a_masked_language_model(data_dir: Path, tiny_bert: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(data_dir / "golden" / "tite" / "nopool_bertlike", tmp_path / "tite")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_bert / file, folder / file)
    model = Model.sparse(folder, device="cpu")
    with pytest.warns(UserWarning, match="cannot open it"):
        model.save_pretrained(tmp_path / "new")
    again = Model.from_pretrained(tmp_path / "new", device="cpu")
    assert again.head.weight is again.encoder.word_embeddings
    texts = [text for text in TEXTS if len(text) < 60]
    assert torch.equal(again.encode(texts).to_dense(), model.encode(texts).to_dense())


# ---- damage ------------------------------------------------------------------------------------


def test_heads_that_are_not_there_or_do_not_fit(bert: Path) -> None:
    weights = load_file(bert / "model.safetensors")
    dense = "cls.predictions.transform.dense.weight"
    cases = [
        ({name: value for name, value in weights.items() if "cls." not in name}, "lack cls.predictions"),
        ({name: value for name, value in weights.items() if name != dense}, f"lack {dense}, left over"),
        (weights | {"cls.predictions.transform.dense.scale": torch.ones(1)}, "left over are .*dense.scale"),
        (weights | {dense: torch.ones(3, 48)}, "size mismatch for 0.weight"),
        (weights | {"cls.predictions.bias": torch.ones(9)}, r"shapes \[\(104, 48\), \(9,\)\]"),
        (weights | {"cls.predictions.decoder.weight": torch.ones(9, 48)}, r"matrix of shape \(104, 48\)"),
    ]
    for changed, message in cases:
        save_file(changed, bert / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CorruptError, match=message):
            Model.from_pretrained(bert)
    save_file(weights, bert / "model.safetensors", metadata={"format": "pt"})
    change(bert / "config.json", tie_word_embeddings=False)
    with pytest.raises(CorruptError, match=r"lack cls\.predictions\.decoder\.weight"):
        Model.from_pretrained(bert)


def test_masked_language_models_that_irkit_cannot_run(tiny_bert: Path, tmp_path: Path) -> None:
    sizes = SIZES | {"embedding_size": 32, "intra_bottleneck_size": 48}
    save(transformers.MobileBertForMaskedLM(transformers.MobileBertConfig(**sizes)), tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_bert / file, tmp_path / file)
    with pytest.raises(ConfigError, match="logits of a mobilebert are more than a product"):
        Model.from_pretrained(tmp_path)


def test_settings_that_make_no_sense(bert: Path, tmp_path: Path) -> None:
    Model.from_pretrained(bert).save_pretrained(tmp_path / "new")
    folder = tmp_path / "new"
    pooling = folder / "1_SpladePooling" / "config.json"
    good = pooling.read_text()
    for key, value, error, message in (
        ("pooling_strategy", "mean", ConfigError, "pooling: Input should be 'max' or 'sum', got 'mean'"),
        ("activation_function", "gelu", ConfigError, "activation: Input should be .*, got 'gelu'"),
        ("word_embedding_dimension", 30522, CorruptError, "expects 30522 dimensions, the vocabulary has 104"),
    ):
        change(pooling, **{key: value})
        with pytest.raises(error, match=message):
            Model.from_pretrained(folder)
        pooling.write_text(good)
    settings = folder / "config_sentence_transformers.json"
    for most in (0, -1, "many"):
        change(settings, max_active_dims=most)
        with pytest.raises(ConfigError, match="max_active_dims: Input should be"):
            Model.from_pretrained(folder)
    change(settings, max_active_dims=None, similarity_fn_name="maxsim")
    with pytest.raises(ConfigError, match="similarity_fn_name 'maxsim', expected one of dot"):
        Model.from_pretrained(folder)
    change(settings, similarity_fn_name=None)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:1]))
    with pytest.raises(ConfigError, match="a SparseEncoder with nothing after its Transformer"):
        Model.from_pretrained(folder)
    modules[1]["type"] = "sentence_transformers.sparse_encoder.models.SparseAutoEncoder"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="with SparseAutoEncoder after its Transformer, expected Splade"):
        Model.from_pretrained(folder)
    change(settings, model_type="SentenceTransformer")
    with pytest.raises(ConfigError, match="its Transformer does fill-mask"):
        Model.from_pretrained(folder)


def test_a_damaged_head_of_its_own(bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with pytest.warns(UserWarning, match="cannot open it"):
        Model.sparse(bert, vocabulary=["neural", "index"]).save_pretrained(folder)
    place = folder / "1_SparseHead"
    weights, settings = load_file(place / "model.safetensors"), (place / "config.json").read_text()
    change(place / "config.json", vocabulary=["neural", "index", "text"])
    with pytest.raises(CorruptError, match=r"matrix of shape \(3, 48\), found \(2, 48\)"):
        Model.from_pretrained(folder)
    change(place / "config.json", vocabulary=["index", "index"])
    with pytest.raises(CorruptError, match="2 terms, 1 of them distinct"):
        Model.from_pretrained(folder)
    change(place / "config.json", vocab=["index", "index"])
    with pytest.raises(ConfigError, match="unknown key 'vocab'; did you mean 'vocabulary'"):
        Model.from_pretrained(folder)
    (place / "config.json").write_text(settings)
    for name, message in (("weight", "found none"), ("layers.0.weight", 'Missing key.* "0.weight"')):
        kept = {key: value for key, value in weights.items() if key != name}
        save_file(kept, place / "model.safetensors")
        with pytest.raises(CorruptError, match=message):
            Model.from_pretrained(folder)
    (place / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CorruptError, match=r"reading .*model\.safetensors"):
        Model.from_pretrained(folder)


def test_a_training_says_once_what_others_cannot_open(bert: Path, tmp_path: Path) -> None:
    model = Model.from_pretrained(bert, device="cpu")
    model.head.layers[2].eps = 0.5
    step = TrainStep(model, [InfoNCE()])
    with pytest.warns(UserWarning, match="cannot open it"):
        step.save_pretrained(tmp_path / "checkpoint-1")
    step.save_pretrained(tmp_path / "checkpoint-2")  # a second warning would be an error
