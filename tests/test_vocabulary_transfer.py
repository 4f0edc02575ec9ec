"""Whole models on another vocabulary: what stays, what is new, and what is saved."""

from __future__ import annotations

import json
import pickle
import runpy
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from typer.testing import CliRunner

from irkit.cli import app
from irkit.config import read_json
from irkit.encoder import Encoder
from irkit.errors import BadTypeError, BadValueError, ConfigError, CorruptError, StorageError
from irkit.heads import SparseHead
from irkit.model import Model
from irkit.retrieval.retriever import Retriever
from irkit.tokenizer import Tokenizer
from irkit.vocabulary import Transfer, TransferConfig, read_new_tokens, transfer_vocabulary, write_report

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 70,
}
DISTILBERT = {"dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64}
UNTIED = {"tie_word_embeddings": False}
IDS = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
FAMILIES: dict[str, Callable[[int], Any]] = {
    "bert": lambda size: transformers.BertConfig(vocab_size=size, **SIZES),
    "bert-untied": lambda size: transformers.BertConfig(vocab_size=size, **SIZES, **UNTIED),
    "roberta": lambda size: transformers.RobertaConfig(vocab_size=size, **SIZES, pad_token_id=0),
    "roberta-untied": lambda size: transformers.RobertaConfig(
        vocab_size=size, **SIZES, **UNTIED, pad_token_id=0
    ),
    "mpnet": lambda size: transformers.MPNetConfig(vocab_size=size, **SIZES, pad_token_id=1),
    "distilbert": lambda size: transformers.DistilBertConfig(vocab_size=size, **DISTILBERT),
    "modernbert": lambda size: transformers.ModernBertConfig(vocab_size=size, **SIZES, **IDS, pad_token_id=0),
    "modernbert-untied": lambda size: transformers.ModernBertConfig(
        vocab_size=size, **SIZES, **UNTIED, pad_token_id=0, decoder_bias=False
    ),
    "electra": lambda size: transformers.ElectraConfig(vocab_size=size, **SIZES, embedding_size=32),
}
TEXTS = ["the neural index of a text", "search", "", "x-ray vector " * 40, "[MASK] unsearchable, 7!"]
NEW = ["neurals", "indexing", "##ing", "vectors"]


def rewrite(folder: Path, order: list[str]) -> None:
    """Give a tokenizer.json these tokens in this order."""
    state = json.loads((folder / "tokenizer.json").read_text())
    ids = {token: number for number, token in enumerate(order)}
    state["model"]["vocab"] = ids
    for token in state["added_tokens"]:
        token["id"] = ids[token["content"]]
    for token in state["post_processor"]["special_tokens"].values():
        token["ids"] = [ids[each] for each in token["tokens"]]
    (folder / "tokenizer.json").write_text(json.dumps(state))


@pytest.fixture(scope="module")
def make(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A masked language model of random weights, or a tokenizer alone, with a vocabulary of one's own."""

    def make(family: str | None, change: Callable[[list[str]], list[str]] = lambda tokens: tokens) -> Path:
        folder = tmp_path_factory.mktemp(family or "tokenizer")
        vocabulary = json.loads((tiny_bert / "tokenizer.json").read_text())["model"]["vocab"]
        order = change(sorted(vocabulary, key=vocabulary.__getitem__))
        if family is not None:
            torch.manual_seed(len(order))
            model = transformers.AutoModelForMaskedLM.from_config(FAMILIES[family](len(order)))
            for parameter in model.parameters():  # no zero bias, no unit norm: every parameter must matter
                torch.nn.init.normal_(parameter, std=0.3, mean=0.3 if parameter.dim() == 1 else 0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.save_pretrained(folder)
        shutil.copyfile(tiny_bert / "tokenizer.json", folder / "tokenizer.json")
        rewrite(folder, order)
        return folder

    return make


def head_of(model: Model) -> SparseHead:
    assert isinstance(model.head, SparseHead)
    return model.head


def embeddings(model: Model) -> torch.Tensor:
    rows: torch.Tensor = model.encoder.word_embeddings  # type: ignore[union-attr, assignment]
    return rows.detach()


def reversed_words(tokens: list[str]) -> list[str]:
    return [*tokens[:5], *reversed(tokens[5:])]


def shifted_padding(tokens: list[str]) -> list[str]:
    """[PAD] has the id 3."""
    return ["[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]", *reversed(tokens[5:])]


def test_the_case_study_of_the_paper_shows_pieces_and_neighbours(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Table 4 of "Bridging Vocabulary Gaps"."""
    script = Path(__file__).parents[1] / "examples" / "studies" / "vocabulary_transfer_table4.py"
    show = runpy.run_path(str(script))["main"]
    source, target = make("bert"), make("bert", lambda tokens: [*tokens, *NEW])
    show(str(source), str(target), "indexing")
    word, pieces, neighbours = capsys.readouterr().out.strip().split(": ")
    example = next(
        each
        for each in transfer_vocabulary(source, target, {"initialization": "semantic"}).facts["examples"]
        if each["token"] == "indexing"
    )
    assert (word, pieces.split()) == ("indexing", example["subtokens"])
    assert neighbours == ", ".join(f"{name} {weight:.3f}" for name, weight in example["neighbors"])
    with pytest.raises(SystemExit, match="'neural' is no new token"):
        show(str(source), str(target), "neural")


@pytest.mark.parametrize("change", [reversed_words, shifted_padding])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "electra"])
def test_the_same_words_in_another_order_weigh_the_same(
    make: Callable[..., Path], family: str, change: Callable[[list[str]], list[str]]
) -> None:
    source, target = make(family), make(None, change)
    old = Model.sparse(source)
    moved = transfer_vocabulary(source, target, {"bias": "copied"})
    assert moved.alignment.overlap == 1.0
    assert isinstance(moved.model.encoder, Encoder)
    assert (head_of(moved.model).weight is moved.model.encoder.word_embeddings) == ("untied" not in family)
    texts = [text for text in TEXTS if "MASK" not in text]
    before = old.encode(texts, convert_to_sparse_tensor=False)
    after = moved.model.encode(texts, convert_to_sparse_tensor=False)
    ids = moved.alignment.source_ids
    assert torch.allclose(torch.as_tensor(after), torch.as_tensor(before)[:, ids], atol=1e-5)
    assert torch.equal(embeddings(moved.model), embeddings(old)[ids])
    names = {key: value for key, value in moved.model.encoder.settings.items() if key.endswith("_token_id")}
    special = moved.model.tokenizer.special_ids
    wanted = {"bos_token_id": special["cls"], "eos_token_id": special["sep"], "pad_token_id": special["pad"]}
    assert all(value in (None, wanted.get(key, special.get(key[:3]))) for key, value in names.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_moved_model_is_saved_and_opened_by_sentence_transformers(
    make: Callable[..., Path], family: str, tmp_path: Path, peer: Any
) -> None:
    source = make(family, lambda tokens: [token for token in tokens if token != "neural"])
    target = make("bert", lambda tokens: [*reversed_words(tokens), *NEW])
    moved = transfer_vocabulary(source, target)
    assert moved.facts["config"]["initialization"] == "semantic"
    new = [str(moved.alignment.tokens[i]) for i in moved.alignment.is_new.nonzero()[:, 0]]
    assert sorted(new) == sorted(["neural", *NEW])
    moved.save(tmp_path / "out")
    wanted = torch.as_tensor(moved.model.encode(TEXTS, convert_to_sparse_tensor=False))
    assert bool((wanted[0] > 0).any())
    loaded = Model.from_pretrained(tmp_path / "out")
    assert torch.equal(torch.as_tensor(loaded.encode(TEXTS, convert_to_sparse_tensor=False)), wanted)
    assert loaded.tokenizer.max_length == Model.sparse(source).tokenizer.max_length
    assert torch.equal(read_new_tokens(tmp_path / "out"), moved.alignment.is_new)
    assert float(wanted[:, loaded.tokenizer.special_tokens()].max()) == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        encoder = peer.SparseEncoder(str(tmp_path / "out"), device="cpu")
    theirs = encoder.encode(TEXTS, convert_to_sparse_tensor=False)
    assert torch.allclose(theirs, wanted, atol=1e-5)


def test_untied_outputs_mix_their_own_rows(make: Callable[..., Path]) -> None:
    source, target = make("bert-untied"), make("bert", lambda tokens: [*tokens, *NEW])
    old, moved = Model.sparse(source), transfer_vocabulary(source, target)
    assert not moved.facts["tied"]
    weights = moved.mixture.to_dense().double()
    assert torch.allclose(weights.sum(1), torch.ones(len(NEW)).double(), atol=1e-6)
    new = moved.alignment.is_new
    for before, after in (
        (embeddings(old), embeddings(moved.model)),
        (head_of(old).weight.detach(), head_of(moved.model).weight.detach()),
    ):
        assert torch.allclose(after[new].double(), weights @ before.double(), atol=1e-5)
        assert torch.equal(after[~new], before[moved.alignment.source_ids[~new]])


@pytest.mark.parametrize("family", ["roberta", "modernbert-untied"])
def test_the_bias_gets_the_frequencies_of_the_target_in_the_range_of_the_source(
    make: Callable[..., Path], family: str
) -> None:
    source, target = make(family), make("bert", lambda tokens: [*tokens, *NEW])
    theirs = head_of(Model.sparse(target)).bias
    assert theirs is not None
    moved = transfer_vocabulary(source, target)
    bias, facts = head_of(moved.model).bias, moved.facts["bias"]
    assert bias is not None
    assert bool((bias[moved.alignment.special] == -1e4).all())
    allowed = ~moved.alignment.special
    ours, wanted = bias.detach()[allowed].double(), theirs.detach()[allowed].double()
    if family == "roberta":
        assert facts["source"] == facts["target"] == "model"
        assert float(torch.corrcoef(torch.stack([ours, wanted]))[0, 1]) > 0.9999
        old = head_of(Model.sparse(source)).bias
        assert old is not None
        kept = old.detach()[old > -5000].double()
        assert float(ours.mean()) == pytest.approx(float(kept.mean()), abs=1e-5)
        assert float(ours.std(correction=0)) == pytest.approx(float(kept.std(correction=0)), abs=1e-5)
    else:  # which has no bias: nothing is known of its range
        assert facts["source"] == "none"
        assert bool((ours == 0).all())
        counted = transfer_vocabulary(source, target, texts=["the the the index"] * 50)
        assert counted.facts["bias"]["source"] == "texts"
        assert counted.facts["bias"]["after"]["deviation"] > 0.1
    alone = make(None, lambda tokens: [*tokens, *NEW])
    words = transfer_vocabulary(source, alone, texts=["the the the index"] * 50)
    assert words.facts["bias"]["target"] == "texts"
    found = head_of(words.model).bias
    assert found is not None
    ranked = found.argsort(descending=True)[:2].tolist()
    assert words.model.tokenizer.tokens(found.shape[0])[ranked[0]] == "the"
    assert words.model.tokenizer.tokens(found.shape[0])[ranked[1]] == "index"


def test_initialisations_differ_only_where_they_should(make: Callable[..., Path]) -> None:
    source, target = make("bert"), make("bert", lambda tokens: [*reversed_words(tokens), *NEW])
    old = embeddings(Model.sparse(source))
    rows = {}
    for kind in ("semantic", "subtoken", "mean", "random_new", "random_all"):
        moved = transfer_vocabulary(source, target, {"initialization": kind, "seed": 3})
        rows[kind], new = embeddings(moved.model), moved.alignment.is_new
        kept = torch.equal(rows[kind][~new], old[moved.alignment.source_ids[~new]])
        assert kept == (kind != "random_all")
        again = transfer_vocabulary(source, target, TransferConfig.parse({"initialization": kind, "seed": 3}))
        assert again.model.fingerprint == moved.model.fingerprint
    assert len({tuple(each[new].flatten().tolist()) for each in rows.values()}) == 5
    place = moved.model.tokenizer.ids(["neurals"])[0]
    pieces = Tokenizer.from_pretrained(source).ids(["neural", "##s"])
    assert torch.allclose(rows["subtoken"][place], old[pieces].mean(0), atol=1e-6)


@pytest.mark.parametrize("bias", ["prior", "copied"])
def test_vocabularies_that_share_special_tokens_only(make: Callable[..., Path], bias: str) -> None:
    def others(tokens: list[str]) -> list[str]:
        return [*tokens[:5], "neurals", "日本", "日", "##本"]

    source, target = make("bert"), make("bert", others)
    old = Model.sparse(source, device="cpu")
    for kind in ("mean", "subtoken"):
        moved = transfer_vocabulary(source, target, {"initialization": kind, "bias": bias}, device="cpu")
        assert moved.facts["vocabulary"]["shared"] == 5
        rows = embeddings(moved.model)
        torch.testing.assert_close(rows[7], embeddings(old)[5:].mean(0))
        assert kind == "mean" or not torch.allclose(rows[5], rows[7])  # it is made of pieces
        weights = moved.model.encode_document(["neurals 日本"]).to_dense()
        assert weights.isfinite().all()
        if bias == "copied":
            torch.testing.assert_close(head_of(moved.model).bias[7], head_of(old).bias[5:].mean())
    with pytest.raises(BadValueError, match="share no tokens to compare with; take subtoken"):
        transfer_vocabulary(source, target, {"initialization": "semantic"}, device="cpu")


def test_a_model_in_memory_is_not_changed(make: Callable[..., Path]) -> None:
    model = Model.sparse(make("roberta"))
    model.set_length("query", 9)
    before = model.fingerprint
    moved = transfer_vocabulary(model, make(None, lambda tokens: [*shifted_padding(tokens), *NEW]))
    assert model.fingerprint == before
    assert model.encode(TEXTS).shape[1] == moved.model.dim - len(NEW)
    assert moved.facts["source"] == "a model in memory"
    assert moved.model.max_length("query") == 9


def test_what_was_moved_can_be_copied_and_moved_again(make: Callable[..., Path]) -> None:
    source, target = make("roberta"), make(None, lambda tokens: [*shifted_padding(tokens), *NEW])
    moved = transfer_vocabulary(source, target).model
    for again in (pickle.loads(pickle.dumps(moved)), transfer_vocabulary(moved, target).model):
        one, other = (each.encode_representation(TEXTS, "document").weights for each in (again, moved))
        torch.testing.assert_close(one, other)


def test_an_index_finds_the_moved_model_where_it_was_saved(make: Callable[..., Path], tmp_path: Path) -> None:
    source, target = make("bert"), make(None, lambda tokens: [*tokens, *NEW])
    for number, given in enumerate((source, Model.from_pretrained(source, device="cpu"))):
        moved = transfer_vocabulary(given, target, device="cpu")
        assert moved.facts["source"] == str(source)
        moved.save(tmp_path / f"moved {number}")
        index = tmp_path / f"index {number}"
        with Retriever.build(moved.model, ["the neural index", "a text"], index) as built:
            hits = built.search("neural")
        with Retriever.load(index) as loaded:
            assert loaded.search("neural") == hits


def test_what_cannot_be_moved_says_why(make: Callable[..., Path], minilm: str, tmp_path: Path) -> None:
    source, words = make("bert"), make(None, lambda tokens: [*tokens, *NEW])
    with pytest.raises(BadTypeError, match="expected a name, path or Model"):
        transfer_vocabulary(7, words)  # type: ignore[arg-type]
    with pytest.raises(BadTypeError, match="target 7, expected a name or directory"):
        transfer_vocabulary(source, 7)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="no such directory"):
        transfer_vocabulary(source, tmp_path / "nothing")
    with pytest.raises(StorageError, match=r"neither tokenizer\.json nor a vocabulary"):
        transfer_vocabulary(source, tmp_path)
    with pytest.raises(ConfigError, match="is a tokenizer alone; take subtoken"):
        transfer_vocabulary(source, words, {"initialization": "semantic"})
    with pytest.raises(ConfigError, match="did you mean 'initialization'"):
        transfer_vocabulary(source, words, {"initialisation": "mean"})
    with pytest.raises(BadValueError, match=r"a dense model; expected one of Model\.sparse"):
        transfer_vocabulary(Model.from_pretrained(minilm), words)
    with pytest.raises(BadValueError, match="a vocabulary of its own, which has no place"):
        transfer_vocabulary(Model.sparse(source, vocabulary=["search", "index"]), words)
    with pytest.raises(BadValueError, match="a side of its own for queries, which has no place"):
        transfer_vocabulary(Model.sparse(source, queries="lexical"), words)
    with pytest.raises(ConfigError, match="padding token of a electra has the id 0, in the target 3"):
        transfer_vocabulary(make("electra"), make(None, shifted_padding))
    broken = make("bert")
    rewrite(broken, [*json.loads((broken / "tokenizer.json").read_text())["model"]["vocab"], *NEW])
    for models in ((source, broken), (broken, words)):
        with pytest.raises(CorruptError, match="has ids up to 104, the encoder embeds 101 tokens"):
            transfer_vocabulary(*models)
    with pytest.raises(StorageError, match=r"vocabulary_transfer\.json"):
        read_new_tokens(source)


def test_facts_and_page_show_what_was_done(make: Callable[..., Path], tmp_path: Path) -> None:
    source, target = make("bert"), make("bert", lambda tokens: [*tokens, *NEW])
    moved: Transfer = transfer_vocabulary(source, target)
    moved.save(tmp_path / "out")
    facts = read_json(tmp_path / "out" / "vocabulary_transfer.json")
    assert facts == json.loads(json.dumps(moved.facts))
    sizes = facts["vocabulary"]
    assert (sizes["new"], sizes["shared"], sizes["target"]) == (4, 101, 105)
    assert facts["new_tokens"] == [101, 102, 103, 104]
    example = facts["examples"][0]
    assert example["token"] == "neurals"
    assert example["subtokens"] == ["neural", "##s"]
    row = moved.mixture[0:1]
    order = row.weights.argsort(descending=True, stable=True)[:5]
    names = moved.model.tokenizer.tokens(101)  # the target only adds to the source
    assert [name for name, _ in example["neighbors"]] == [names[i] for i in row.terms.values[order]]
    assert sum(facts["norms"]["target, new"]["counts"]) == 4
    norms = embeddings(moved.model).norm(dim=1)[101:].double()
    assert facts["norms"]["target, new"]["mean"] == pytest.approx(float(norms.mean()), abs=1e-6)
    bars = {"rate": 0.4, "edges": [0.0, 1.0, 2.0], "counts": [3, 1]}
    write_report(
        facts | {"source": "<b>", "calibration": {"before": bars, "after": bars}}, tmp_path / "r.html"
    )
    page = (tmp_path / "r.html").read_text()
    assert "101 of 105 tokens (96.2%)" in page
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert page.count("40.0% above zero") == 2
    assert page.count("<svg") == 5
    with pytest.raises(StorageError, match=r"writing .*r\.html"):
        write_report(facts, tmp_path / "no" / "r.html")


def test_the_verb(make: Callable[..., Path], tmp_path: Path) -> None:
    source, target = make("bert"), make("bert", lambda tokens: [*tokens, *NEW])
    (tmp_path / "texts.txt").write_text("the index\nthe text\n")
    out, runner = tmp_path / "out", CliRunner()
    words = ["transfer-vocab", str(source), "--target", str(target), "--out", str(out)]
    dry = runner.invoke(app, [*words, "--dry-run"])
    assert dry.exit_code == 0
    assert not out.exists()
    more = ["--set", "initialization=subtoken", "--report", str(tmp_path / "page.html")]
    result = runner.invoke(app, [*words, *more, "--texts", str(tmp_path / "texts.txt")])
    assert result.exit_code == 0, result.output
    assert "101 of 105 tokens (96.2%) are shared, 4 are new: subtoken initialisation" in result.output
    assert "neurals\tneural ##s\tneural, ##s" in result.output
    assert "how frequent" not in result.output
    assert Model.from_pretrained(out).kind == "sparse"
    printed = runner.invoke(app, ["transfer-vocab", str(source), "--set", "seed=4", "--print-config"])
    assert yaml.safe_load(printed.output) == TransferConfig(seed=4).model_dump()
    alone = make(None, lambda tokens: [*tokens, *NEW])
    words[3:] = [str(alone), "--out", str(out)]
    uncounted = runner.invoke(app, [*words, "--overwrite"])
    assert "--texts CORPUS counts them" in uncounted.output
    assert (tmp_path / "page.html").is_file()
    for wrong, message in (
        (words, "is not empty; --overwrite replaces a model in it"),
        (words[:2], "expected MODEL --target TOKENIZER --out DIR, or a recipe"),
        (["transfer-vocab", "r.yaml", *words[2:]], "a recipe names target and texts"),
        ([*words, "--overwrite", "--set", "seeds=1"], "did you mean 'seed'"),
    ):
        assert message in str(runner.invoke(app, wrong).exception)


@pytest.mark.slow
def test_hidden_words_of_minilm_are_best_recovered_by_meaning(minilm: str, tmp_path: Path) -> None:
    """40 % of its words are taken away and given back: the table in docs/vocabulary_transfer.md.

    That is the mean over three choices of words with a deviation of at most 0.004, this the first of them.
    """
    table = {  # cosines to the true rows: mean, median, lowest tenth; norm, of the true one
        "semantic": (0.686, 0.677, 0.607, 0.58),
        "subtoken": (0.160, 0.110, -0.027, 0.69),
        "mean": (0.092, 0.089, -0.035, 0.10),
        "random_new": (-0.001, 0.000, -0.066, 0.95),
    }
    state = json.loads((Path(minilm) / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    words = [token for token in vocabulary if token[0] != "[" and len(token.removeprefix("##")) > 1]
    chosen = torch.randperm(len(words), generator=torch.Generator().manual_seed(0))[: 2 * len(words) // 5]
    hidden = {words[i] for i in chosen.tolist()}
    shutil.copyfile(Path(minilm) / "tokenizer.json", tmp_path / "tokenizer.json")
    rewrite(tmp_path, [token for token in sorted(vocabulary, key=vocabulary.get) if token not in hidden])
    source, whole = transfer_vocabulary(minilm, tmp_path).model, embeddings(Model.sparse(minilm))
    for kind, expected in table.items():
        moved = transfer_vocabulary(source, minilm, {"initialization": kind})
        new, rows = moved.alignment.is_new, embeddings(moved.model)
        assert int(new.sum()) == len(hidden)
        assert torch.equal(rows[~new], whole[~new])
        cosines = torch.cosine_similarity(rows[new], whole[new])
        norm = rows[new].norm(dim=1).mean() / whole[new].norm(dim=1).mean()
        found = [cosines.mean(), cosines.median(), cosines.quantile(0.1), norm]
        assert list(map(float, found)) == pytest.approx(expected, abs=0.012), kind
        if kind == "semantic":  # the page shows what this token is made of
            assert moved.mixture.terms.lengths.float().mean() == pytest.approx(24, abs=0.5)
            tokens = [moved.alignment.tokens[number] for number in new.nonzero()[:, 0].tolist()]
            part = moved.mixture[(row := tokens.index("drink")) : row + 1]
            heaviest = part.weights.sort(descending=True).values[:5].tolist()
            assert heaviest == pytest.approx([0.338, 0.291, 0.157, 0.105, 0.077], abs=5e-4)
