"""Masked language modelling: what is hidden, what is asked for, and the loss."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM

from irkit import Model
from irkit.core.ragged import Ragged
from irkit.errors import BadValueError, ConfigError, StorageError
from irkit.tokenizer import Tokenizer
from irkit.training import model_step
from irkit.training.masked_lm_step import MaskedLMStep
from irkit.training.masking import MaskedBatch, Masking, MaskingConfig, masking_rates
from irkit.training.pretraining.corpus import TextDataset, check_corpora, read_in_turn, read_texts
from irkit.training.training_data import Batches, Mixture
from irkit.training.training_data.row_sequences import Stream

TEXTS = ["search the index of a vector model", "neural text", "in the token model on an index", "search"]


@pytest.fixture
def tokenizer(tiny_bert: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(tiny_bert)


def numbered(count: int, start: int = 0) -> list[tuple[int, str]]:
    return [(number, TEXTS[number % len(TEXTS)]) for number in range(start, start + count)]


# what is hidden


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, 2.0]), max_size=30), min_size=1, max_size=6),
    st.floats(0.01, 0.5),
)
def test_rates_keep_the_mean_of_each_text_and_the_ratio(rows: list[list[float]], rate: float) -> None:
    weights = Ragged.from_rows(rows, dtype=torch.float64)
    rates = masking_rates(weights, rate)
    for row, found in zip(rows, weights.with_values(rates), strict=True):
        asked = [value for value in row if value]
        assert math.isclose(found.sum(), rate * len(asked), abs_tol=1e-12)
        assert all((p == 0) == (w == 0) for p, w in zip(found.tolist(), row, strict=True))
        ratios = [p / w for p, w in zip(found.tolist(), row, strict=True) if w]
        assert not ratios or max(ratios) - min(ratios) < 1e-12
        assert not ratios or max(found.tolist()) <= 1.0


def test_new_tokens_are_hidden_twice_as_often_and_the_rate_stays(tokenizer: Tokenizer) -> None:
    new = torch.zeros(tokenizer.vocab_size, dtype=torch.bool)
    new[tokenizer.ids(["index", "neural"])] = True
    n = 20_000
    batch = Masking(tokenizer, is_new=new, seed=3)([(number, TEXTS[0]) for number in range(n)])
    ids = tokenizer([TEXTS[0]]).values
    counts = torch.bincount(batch.positions % len(ids), minlength=len(ids)).double() / n
    special = torch.isin(ids, torch.tensor(tokenizer.special_tokens()))
    assert not counts[special].any()
    size = len(ids) - 2
    wanted = torch.where(new[ids], 2.0, 1.0) * 0.3 * size / (size + 1)  # one of seven is new: mean is 8 / 7
    assert (~special).sum() == 7
    deviation = (wanted * (1 - wanted) / n).sqrt()
    assert ((counts - wanted).abs() < 5 * deviation)[~special].all()
    assert len(batch.positions) / (n * size) == pytest.approx(0.3, abs=5 * math.sqrt(0.3 * 0.7 / (n * size)))


def test_hidden_tokens_become_masks_others_or_stay(tokenizer: Tokenizer) -> None:
    texts = numbered(6000)
    batch = Masking(tokenizer, MaskingConfig(emphasis=1.0), seed=1)(texts)
    before = tokenizer([text for _, text in texts]).values
    after, places = batch.tokens.values, batch.positions
    assert torch.equal(batch.labels, before[places])
    untouched = torch.ones(len(before), dtype=torch.bool)
    untouched[places] = False
    assert torch.equal(after[untouched], before[untouched])
    n, masked = len(places), after[places] == tokenizer.special_ids["mask"]
    kept = (after[places] == before[places]).sum()
    ordinary = tokenizer.vocab_size - len(tokenizer.special_tokens())
    for found, share in ((masked.sum(), 0.8), (kept, 0.1 + 0.1 / ordinary)):
        assert float(found) / n == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / n))
    others = after[places][~masked]
    assert not torch.isin(others, torch.tensor(tokenizer.special_tokens())).any()
    assert len(others.unique()) == ordinary


def test_the_number_of_a_text_decides_not_its_batch(tokenizer: Tokenizer) -> None:
    masking = Masking(tokenizer, seed=5)
    whole, parts = masking(numbered(8)), [masking(numbered(3)), masking(numbered(5, 3))]
    assert torch.equal(whole.tokens.values, torch.cat([part.tokens.values for part in parts]))
    assert torch.equal(whole.labels, torch.cat([part.labels for part in parts]))
    other = Masking(tokenizer, seed=6)(numbered(8))
    assert not torch.equal(whole.tokens.values, other.tokens.values)
    assert masking([(0, "")]).labels.tolist() == []


def test_every_word_is_asked_for_where_ids_have_a_gap(gapped_bert: Path) -> None:
    everything = MaskingConfig(rate=1.0, emphasis=1.0, masked=1.0, random=0.0)
    batch = Masking(Tokenizer.from_pretrained(gapped_bert), everything)([(0, "a index")])
    assert batch.labels.tolist() == [5, 9]


def letters(path: Path) -> Tokenizer:
    """A word is a token for each of its letters, but `model` is one."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    pieces = ["[UNK]", "model", *alphabet, *(f"##{letter}" for letter in alphabet)]
    backend = Backend(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(["[UNK]"])
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    return Tokenizer.from_pretrained(path)


def test_answers_of_another_vocabulary_are_asked_for_at_the_first_token(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    answers = letters(tmp_path / "letters")
    everything = MaskingConfig(rate=1.0, emphasis=1.0, masked=1.0, random=0.0)
    batch = Masking(tokenizer, everything, labels=answers)([(0, "the model"), (1, "zx in")])
    # [CLS] the model [SEP] [CLS] z ##x in [SEP]
    assert batch.positions.tolist() == [1, 1, 1, 2, 5, 6, 7, 7]
    assert answers.backend.decode(batch.labels.tolist()).replace(" ##", "") == "the model zx in"
    assert (batch.tokens.values == tokenizer.special_ids["mask"]).sum() == 5
    cut = Masking(tokenizer, everything, labels=answers, max_length=3)([(0, "the model")])
    assert cut.positions.tolist() == [1, 1, 1]  # what was cut off is not asked for


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0.6}, r"hidden with probability 1\.2, rate x emphasis"),
        ({"masked": 0.9, "random": 0.2}, r"masked \+ random is 1\.1"),
        ({"lambda": 2}, "unknown key 'lambda'"),
        ({"emphasis": 0.5}, "emphasis"),
    ],
)
def test_impossible_masking_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MaskingConfig(**settings)


def test_masking_refuses_what_does_not_fit(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match=r"is_new is torch.bool \(3,\), expected bool for each of the"):
        Masking(tokenizer, is_new=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ConfigError, match="has no mask token"):
        Masking(letters(tmp_path / "letters"))


# the loss


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def checkpoint(request: pytest.FixtureRequest, tiny_bert: Path, tmp_path: Path) -> Path:
    """A masked language model of random weights."""
    path = tmp_path / "mlm"
    shutil.copytree(tiny_bert, path)
    torch.manual_seed(4)
    settings = json.loads((tiny_bert / "config.json").read_text()) | {"tie_word_embeddings": request.param}
    BertForMaskedLM(BertConfig(**settings)).save_pretrained(path)
    return path


def test_the_loss_is_that_of_transformers(checkpoint: Path) -> None:
    model = Model.from_pretrained(checkpoint, device="cpu")
    batch = Masking(model.tokenizer, seed=2)(numbered(6))
    step = MaskedLMStep(model).eval()
    loss = step(batch)
    loss.backward()
    peer = BertForMaskedLM.from_pretrained(checkpoint).eval()
    labels = torch.full_like(batch.tokens.values, -100)
    labels[batch.positions] = batch.labels
    ids, mask = batch.tokens.to_padded()
    asked, _ = batch.tokens.with_values(labels).to_padded(-100)
    output = peer(input_ids=ids, attention_mask=mask.long(), labels=asked)
    output.loss.backward()
    assert loss.item() == pytest.approx(output.loss.item(), rel=1e-5)
    ours, theirs = model.encoder.word_embeddings.grad, peer.get_input_embeddings().weight.grad
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    right = (output.logits[asked >= 0].argmax(1) == asked[asked >= 0]).float().mean()
    assert float(step.parts["accuracy"]) == pytest.approx(float(right))


def test_the_mean_over_processes_is_that_over_their_tokens(
    tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = MaskedLMStep(Model.sparse(tiny_bert, device="cpu")).eval()
    masking = Masking(step.model.tokenizer)
    parts = [masking(numbered(2)), masking(numbered(6, 2))]
    total = sum(len(part.labels) for part in parts)
    assert len({len(part.labels) for part in parts}) == 2
    whole = step(masking(numbered(8))).item()
    monkeypatch.setattr(model_step.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(model_step.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(model_step.dist, "all_reduce", lambda count: count.fill_(total))
    step.training = True  # without its dropout
    losses = [step(part).item() for part in parts]
    assert sum(losses) / 2 == pytest.approx(whole, rel=1e-6)


def test_a_batch_that_asks_for_nothing_has_no_loss(tiny_bert: Path) -> None:
    step = MaskedLMStep(Model.sparse(tiny_bert, device="cpu"))
    tokens = Ragged.from_rows([[2, 3]])
    loss = step(MaskedBatch(tokens, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)))
    loss.backward()
    assert loss.item() == 0.0


def test_models_that_cannot_say_what_was_hidden_are_refused(tiny_bert: Path) -> None:
    with pytest.raises(BadValueError, match="the model makes multi_vector vectors, expected a sparse one"):
        MaskedLMStep(Model.multi_vector(tiny_bert, device="cpu"))


# texts


def test_texts_of_every_kind_of_source(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "plain.txt").write_text("one\n\ntwo\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"title": "A", "text": "two"}\n')
    (tmp_path / "pairs.tsv").write_text("d1\tone\nd2\ttwo\n")
    folder = tmp_path / "beir"
    folder.mkdir()
    (folder / "corpus.jsonl").write_text('{"_id": "1", "title": "T", "text": "one"}\n')
    assert list(read_texts(tmp_path / "plain.txt")) == ["one", "two"]
    assert list(read_texts(tmp_path / "rows.jsonl")) == ["one", "A two"]
    assert list(read_texts(tmp_path / "pairs.tsv")) == ["one", "two"]
    assert list(read_texts(folder)) == ["T one"]
    remote = tmp_path / "remote"
    remote.mkdir()
    shutil.copyfile(tmp_path / "rows.jsonl", remote / "train.jsonl")
    source = read_texts(f"hf:{remote}::train")
    assert list(source) == list(source) == ["one", "A two"]
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"body_text": 3}\n')
    with pytest.raises(BadValueError, match=r"bad\.jsonl:2: expected a string under text, .*body_text"):
        list(read_texts(tmp_path / "bad.jsonl"))
    with pytest.raises(StorageError, match=r"missing\.txt"):
        read_texts(tmp_path / "missing.txt")


def load(folder: Path, sources: list[list[str]], count: int, **options: Any) -> list[list[tuple[int, str]]]:
    files = [folder / f"{number}.txt" for number in range(len(sources))]
    for file, texts in zip(files, sources, strict=True):
        file.write_text("".join(f"{text}\n" for text in texts))
    data = Mixture([TextDataset(Stream("texts", partial(read_in_turn, list(map(str, files)))))])
    batches = islice(Batches(data, **options), count)
    return [[data[key] for key in batch] for batch in batches]  # type: ignore[misc]


def test_processes_share_the_batches_of_one(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(37)]

    def batches(size: int, rank: int = 0, world: int = 1) -> list[list[tuple[int, str]]]:
        return load(tmp_path, [texts], 6, batch_size=size, seed=1, rank=rank, world_size=world)

    whole, parts = batches(8), [batches(4, rank, 2) for rank in (0, 1)]
    assert whole == [one + other for one, other in zip(*parts, strict=True)]
    numbers = [number for batch in whole for number, _ in batch]
    assert len(set(numbers)) == len(numbers)
    assert all(text == texts[number % 37] for batch in whole for number, text in batch)
    assert whole != load(tmp_path, [texts], 6, batch_size=8, seed=2)


def test_sources_are_read_in_turn_and_blank_texts_left_out(tmp_path: Path) -> None:
    batch = sorted(load(tmp_path, [["a", " ", "b"], ["x"]], 1, batch_size=10_000)[0])
    assert [text for _, text in batch[:6]] == ["a", "x", "b", "a", "x", "b"]
    assert [number for number, _ in batch] == list(range(10_000))
    stream = Stream("texts", partial(next, iter([iter(["a", "b"])])), once=True)
    with pytest.raises(StorageError, match=r"texts: it ended after 2 examples .* fewer steps"):
        TextDataset(stream).example(2)
    with pytest.raises(BadValueError, match=r"-: a training reads its texts more than once, .* only once"):
        check_corpora(["-"])
