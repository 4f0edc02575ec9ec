"""Static embeddings: directories of model2vec and of StaticEmbedding, equal to these libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from irkit import Model, Retriever
from irkit.errors import BadValueError, ConfigError, CorruptError, IrkitError

WORDS = ["[UNK]", "[PAD]", "red", "lamp", "in", "the", "old", "house", "a", "b", "##s"]
TEXTS = ["the red lamp", "a foreign word in the house", "zzz yyy", "", "the old old house " * 200]


def write_tokenizer(folder: Path) -> Backend:
    """Write a tokenizer with an unknown token and return it."""
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return backend


def write_model2vec(folder: Path, *, normalize: bool, quantized: bool, **settings: Any) -> Path:
    """Write a directory as model2vec does, with random weights."""
    random = np.random.default_rng(0)
    write_tokenizer(folder)
    arrays = {"embeddings": random.normal(size=(len(WORDS), 6)).astype(np.float32)}
    if quantized:
        arrays["embeddings"] = arrays["embeddings"][:4]
        arrays["mapping"] = random.integers(0, 4, len(WORDS))
        arrays["weights"] = random.random(len(WORDS)).astype(np.float32)
    save_file(arrays, folder / "model.safetensors")
    config = {"normalize": normalize, "embedding_dtype": "float32", **settings}
    (folder / "config.json").write_text(json.dumps(config))
    modules = [{"idx": 0, "name": "0", "path": ".", "type": "sentence_transformers.models.StaticEmbedding"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def plain(folder: Path, texts: list[str], most: int) -> np.ndarray[Any, Any]:
    """Mean of the known tokens of each text, as model2vec defines it."""
    arrays, backend = (
        load_file(folder / "model.safetensors"),
        Backend.from_file(str(folder / "tokenizer.json")),
    )
    rows = []
    for text in texts:
        ids = [number for number in backend.encode(text, add_special_tokens=False).ids[:most] if number]
        vectors = [
            arrays["embeddings"][arrays["mapping"][number] if "mapping" in arrays else number]
            * (arrays["weights"][number] if "weights" in arrays else 1)
            for number in ids
        ]
        rows.append(np.mean(vectors, axis=0) if vectors else np.zeros(6))
    result = np.array(rows)
    if json.loads((folder / "config.json").read_text())["normalize"]:
        result /= np.linalg.norm(result, axis=1, keepdims=True) + 1e-32
    return result


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("quantized", [True, False])
def test_model2vec(normalize: bool, quantized: bool, tmp_path: Path) -> None:
    """Vectors are those of the definition and of the library, before and after saving."""
    folder = write_model2vec(
        tmp_path / "m", normalize=normalize, quantized=quantized, max_length=40, model_type="model2vec"
    )
    model = Model.from_pretrained(folder)
    expected = plain(folder, TEXTS, 40)
    assert np.abs(model.encode(TEXTS) - expected).max() < 1e-6
    model.save_pretrained(tmp_path / "saved")
    again = Model.from_pretrained(tmp_path / "saved")
    assert np.abs(again.encode(TEXTS) - expected).max() < 1e-6
    assert again.fingerprint == model.fingerprint
    assert again.tokenizer.max_length == 40
    library = pytest.importorskip("model2vec")
    for path in (folder, tmp_path / "saved"):
        theirs = library.StaticModel.from_pretrained(str(path))
        assert np.abs(theirs.encode(TEXTS[:4]) - expected[:4]).max() < 1e-6


def test_found_by_its_keys(tmp_path: Path) -> None:
    """A StaticModel that was saved without a name is known by what model2vec always writes; it reads 512."""
    folder = write_model2vec(tmp_path / "m", normalize=False, quantized=False)
    (folder / "modules.json").unlink()
    model = Model.from_pretrained(folder)
    assert model.tokenizer.max_length == 512
    assert np.abs(model.encode(TEXTS) - plain(folder, TEXTS, 512)).max() < 1e-6


@pytest.fixture
def theirs(tmp_path: Path) -> Any:
    """A model of sentence-transformers: a StaticEmbedding of random weights and a norm."""
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import modules

    torch.manual_seed(0)
    backend = write_tokenizer(tmp_path / "words")
    backend.enable_truncation(30)
    parts = [modules.StaticEmbedding(backend, embedding_dim=6), modules.Dense(6, 4), modules.Normalize()]
    model = library.SentenceTransformer(modules=parts, device="cpu")
    model.save_pretrained(str(tmp_path / "theirs"))
    return library.SentenceTransformer(str(tmp_path / "theirs"), device="cpu")


def test_static_embedding(theirs: Any, tmp_path: Path) -> None:
    """Theirs opens here and ours opens there, equal to 1e-6; unknown tokens count, as they do there."""
    expected = theirs.encode(TEXTS)
    model = Model.from_pretrained(tmp_path / "theirs")
    assert np.abs(model.encode(TEXTS) - expected).max() < 1e-6
    model.save_pretrained(tmp_path / "ours")
    library = pytest.importorskip("sentence_transformers")
    for again in (
        Model.from_pretrained(tmp_path / "ours"),
        library.SentenceTransformer(str(tmp_path / "ours"), device="cpu"),
    ):
        assert np.abs(again.encode(TEXTS) - expected).max() < 1e-6


def test_trains_and_searches(tmp_path: Path) -> None:
    """Gradients reach the rows of the tokens of a text, and only these; an index finds documents."""
    model = Model.from_pretrained(write_model2vec(tmp_path / "m", normalize=True, quantized=False))
    tokens = model.tokenizer(["red lamp zzz", "the house"])
    weights = torch.arange(6.0)
    (model.head(model.encoder(tokens), tokens).values @ weights).sum().backward()
    grown = model.encoder.word_embeddings.grad.abs().sum(1) > 0
    assert [WORDS[i] for i in grown.nonzero()[:, 0].tolist()] == ["red", "lamp", "the", "house"]
    documents = {"a": "the red lamp", "b": "old house"}
    retriever = Retriever.build(model, documents, tmp_path / "i", windows={"length": 2})
    assert [hit.id for hit in retriever.search("lamp", 1)] == ["a"]
    model.encoder.grow_(13)
    assert len(model.encoder.word_embeddings) == 13


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embeddings": None}, "expected one matrix"),
        ({"extra": np.zeros(3, np.float32)}, "extra"),
        ({"embeddings": np.zeros(3, np.float32)}, "expected one matrix"),
        ({"mapping": np.array([9] * len(WORDS))}, "mapping"),
        ({"weights": np.zeros(2, np.float32)}, "one for each token"),
        ({"embeddings": np.full((len(WORDS), 6), np.nan, np.float32)}, "finite"),
        ({"embeddings": np.zeros((3, 6), np.float32)}, "embeds 3 tokens"),
    ],
)
def test_damaged(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_model2vec(tmp_path / "m", normalize=False, quantized=False)
    arrays = load_file(folder / "model.safetensors") | change
    if "mapping" in change:
        arrays["embeddings"] = arrays["embeddings"][:4]
    save_file(
        {name: value for name, value in arrays.items() if value is not None}, folder / "model.safetensors"
    )
    with pytest.raises(CorruptError, match=message):
        Model.from_pretrained(folder)


def test_refused(theirs: Any, tmp_path: Path) -> None:
    """What these formats cannot hold is refused, and says why."""
    folder = write_model2vec(tmp_path / "m", normalize=False, quantized=False, max_length=0)
    with pytest.raises(IrkitError, match="max_length"):
        Model.from_pretrained(folder)
    with pytest.raises(BadValueError, match="int8"):
        Model.from_pretrained(tmp_path / "theirs", dtype="int8")
    model = Model.from_pretrained(tmp_path / "theirs")
    model.head.pooling = ("max",)
    with pytest.raises(ConfigError, match="takes the mean"):
        model.save_pretrained(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    modules = json.loads((tmp_path / "theirs" / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3", "type": "sentence_transformers.models.LSTM"})
    (tmp_path / "theirs" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="LSTM"):
        Model.from_pretrained(tmp_path / "theirs")
