"""RoBERTa and ModernBERT, with their own tokenizers, through a whole vocabulary recipe."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from irkit import Retriever
from irkit.data import read_documents
from irkit.tokenizer import Tokenizer
from irkit.vocabulary.transfer_recipe import VocabularyRecipe
from irkit.vocabulary.transfer_run import run

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
ROBERTA = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "max_position_embeddings": 66}
MODERNBERT = {
    "pad_token_id": 50283,
    "cls_token_id": 50281,
    "sep_token_id": 50282,
    "bos_token_id": 50281,
    "eos_token_id": 50282,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "roberta-base": lambda size: transformers.RobertaConfig(vocab_size=size, **SMALL, **ROBERTA),
    "modernbert-base": lambda size: transformers.ModernBertConfig(vocab_size=size, **SMALL, **MODERNBERT),
}


def make_model(name: str, data: Path, folder: Path) -> Path:
    """A masked language model of random weights."""
    folder.mkdir()
    for file in (data / "tokenizers" / name).iterdir():
        shutil.copyfile(file, folder / file.name)
    torch.manual_seed(0)
    size = Tokenizer.from_pretrained(folder).vocab_size
    model = transformers.AutoModelForMaskedLM.from_config(CONFIGS[name](size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the token ids of a generation that does not happen
        model.save_pretrained(folder)
    return folder


def make_collection(data: Path, folder: Path) -> Path:
    """Some abstracts of SciFact, and their titles as queries."""
    (folder / "qrels").mkdir(parents=True)
    documents = [each for each, _ in zip(read_documents(data / "scifact"), range(48), strict=False)]
    rows = [{"_id": each.id, "text": each.text[:300]} for each in documents]
    queries = [{"_id": f"q{each.id}", "text": each.title} for each in documents[:16]]
    for name, written in (("corpus", rows), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    judged = "".join(f"q{each.id}\t{each.id}\t1\n" for each in documents[:16])
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return folder


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("name", ["roberta-base", "modernbert-base"])
@pytest.mark.parametrize("target", ["bert-base-uncased", "of its own"])
def test_a_model_goes_through_the_whole_recipe(
    name: str, target: str, data_dir: Path, tmp_path: Path, peer: Any
) -> None:
    source = make_model(name, data_dir, tmp_path / "source")
    collection = make_collection(data_dir, tmp_path / "collection")
    quick = {"max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no"}
    own = {"size": 600} if target == "of its own" else str(data_dir / "tokenizers" / target)
    recipe = VocabularyRecipe.resolve(
        {
            "model": {"kind": "sparse", "name": str(source), "max_length": 48},
            "vocabulary": {
                "texts": str(collection),
                "target": own,
                "adaptation": {"train": {**quick, "gradient_accumulation_steps": 1}},
                "calibration": {"texts": 16},
            },
            "data": {"source": str(collection), "split": "test", "documents": 1},
            "losses": {"kind": "infonce"},
            "train": {"seed": 1, **quick},
            "evaluation": {"source": str(collection), "split": "test", "at_end": True},
        }
    )
    model = run(recipe, tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "vocabulary_transfer.json").read_text())
    assert facts["config"]["initialization"] == "subtoken"
    if target == "bert-base-uncased":
        overlap = {"roberta-base": 0.596, "modernbert-base": 0.564}[name]  # of the paper
        assert facts["vocabulary"]["overlap"] == pytest.approx(overlap, abs=0.01)
    assert facts["calibration"]["after"]["rate"] == pytest.approx(0.4, abs=0.02)
    # of the source only the transformer is left: all else is as large as the new vocabulary
    assert model.dim == len(model.encoder.word_embeddings) == model.tokenizer.vocab_size
    assert model.tokenizer.max_length == 48
    documents = list(read_documents(collection))
    texts = [document.full_text for document in documents[:3]]
    theirs = peer.SparseEncoder(str(tmp_path / "out"), device="cpu").encode(
        texts, convert_to_sparse_tensor=False
    )
    assert model.encode_document(texts).to_dense().numpy() == pytest.approx(theirs.numpy(), abs=2e-5)
    retriever = Retriever.build(str(tmp_path / "out"), str(collection), tmp_path / "index")
    hits = retriever.search(documents[0].text, k=3)
    encoded = model.encode_document([document.full_text for document in documents]).to_dense()
    scores = encoded @ model.encode_query([documents[0].text]).to_dense()[0]
    assert [hit.score for hit in hits] == pytest.approx(scores.topk(3).values.tolist(), rel=1e-4)
