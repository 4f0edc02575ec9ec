"""Steps of pre-training: batches, what models are refused, validation, checkpoints, and two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from itertools import chain, islice, tee
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from irkit import Model
from irkit.encoder import Encoder
from irkit.encoder.adapter import TransformersEncoder
from irkit.encoder.presets import tite_settings
from irkit.errors import BadValueError
from irkit.heads import PooledHead
from irkit.tokenizer import Tokenizer
from irkit.training.checkpoints import load_weights
from irkit.training.masking import MaskingConfig, PretrainCollator
from irkit.training.pretraining.corpus import TextDataset
from irkit.training.pretraining.objectives import BagOfWords, MaskedAutoEncoding, MaskedLanguageModeling
from irkit.training.pretraining.pretrain_step import BaseObjective, PretrainStep
from irkit.training.text_training import TextTrainingConfig, text_trainer
from irkit.training.trainer import Trainer
from irkit.training.training_arguments import TrainingArguments
from irkit.training.training_data import Batches, Mixture
from irkit.training.training_data.row_sequences import Stream

WORDS = ["search", "the index", "of", "a vector model", "neural text", "in the token", "on an index", "zebra"]
TEXTS = [" ".join(WORDS[(i * k + i) % 8] for k in range(1 + i % 7)) for i in range(100)]
STEPS = 6


@pytest.fixture
def tokenizer(tiny_bert: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(tiny_bert)


def make(tokenizer: Tokenizer, preset: str = "2-late", dropout: float = 0.0, **changed: Any) -> Model:
    sizes = {"layers": 3, "hidden_size": 16, "heads": 2, "max_length": 8, "vocab_size": tokenizer.vocab_size}
    torch.manual_seed(1)
    settings = tite_settings(preset, **sizes) | {"dropout_prob": dropout} | changed
    encoder = Encoder(settings)
    return Model(tokenizer, encoder, PooledHead(encoder.hidden_size))


def numbered(count: int, start: int = 0) -> list[tuple[int, str]]:
    return [(i, TEXTS[i % len(TEXTS)]) for i in range(start, start + count)]


# batches


def test_a_batch_has_the_texts_as_they_are_and_as_they_are_hidden(tokenizer: Tokenizer) -> None:
    plain = PretrainCollator(tokenizer, max_length=12)(numbered(9))
    hidden = PretrainCollator(tokenizer, MaskingConfig(rate=0.5, masked=1.0, random=0.0), 12, 3)(numbered(9))
    expected = tokenizer([text for _, text in numbered(9)], max_length=12)
    assert torch.equal(plain.tokens.values, expected.values)
    assert len(plain.positions) == 0
    assert torch.equal(hidden.original.values, expected.values)
    assert torch.equal(hidden.labels, expected.values[hidden.positions])
    changed = (hidden.tokens.values != expected.values).nonzero()[:, 0]
    assert torch.equal(changed, hidden.positions)
    assert len(changed) > 10
    assert (hidden.tokens.values[changed] == tokenizer.special_ids["mask"]).all()
    special = set(tokenizer.special_tokens())
    for batch in (plain, hidden):
        assert batch.numbers.tolist() == list(range(9))
        assert [i not in special for i in expected.values.tolist()] == batch.ordinary.tolist()
        for ids, terms in zip(expected, batch.terms, strict=True):
            assert terms.tolist() == sorted(set(ids.tolist()) - special)
    again = PretrainCollator(tokenizer, MaskingConfig(rate=0.5, masked=1.0, random=0.0), 12, 3)
    parts = [again(numbered(4)), again(numbered(5, 4))]
    assert torch.equal(hidden.tokens.values, torch.cat([part.tokens.values for part in parts]))
    assert torch.equal(hidden.terms.values, torch.cat([part.terms.values for part in parts]))


def test_texts_without_words_have_no_loss(tokenizer: Tokenizer) -> None:
    step = PretrainStep(make(tokenizer), [MaskedAutoEncoding(), BagOfWords()])
    batch = PretrainCollator(tokenizer)([(0, ""), (1, " ")])
    assert batch.terms.lengths.tolist() == [0, 0]
    step(batch).backward()
    assert float(step.parts["masked_auto_encoding"]) == 0.0
    assert float(step.parts["bag_of_words"]) > 0.0


@pytest.mark.parametrize("preset", ["2-late", "bert-base"])
@pytest.mark.parametrize("numbers", [[0], [0, 1]])
def test_texts_without_tokens_have_no_loss(tokenizer: Tokenizer, preset: str, numbers: list[int]) -> None:
    """Without special tokens, a text of what is no character to the tokenizer."""
    bare = tokenizer.without_special_tokens()
    step = PretrainStep(make(bare, preset), [MaskedAutoEncoding(), BagOfWords()]).eval()
    batch = PretrainCollator(bare)([(number, ("\u200b", "search")[number]) for number in numbers])
    assert batch.tokens.lengths.tolist() == [0, 1][: len(numbers)]
    step(batch).backward()
    assert all(bool(each.grad.isfinite().all()) for each in step.parameters() if each.grad is not None)
    words = step(PretrainCollator(bare)([(1, "search")]))
    if len(numbers) == 1:
        assert float(step.parts["masked_auto_encoding"]) > 0.0
    else:
        told = float(step.parts["masked_auto_encoding"])
        step(batch)
        assert float(step.parts["masked_auto_encoding"]) == pytest.approx(told, rel=1e-5)
    assert bool(words.isfinite())


def load(collate: PretrainCollator, tokens: int, rank: int = 0, world: int = 1) -> DataLoader[Any]:
    texts = TextDataset(Stream("texts", lambda: iter(TEXTS)), collate.max_length)
    texts.measure(SimpleNamespace(tokenizer=collate.tokenizer))  # type: ignore[arg-type]
    data = Mixture([texts])
    batches = Batches(data, tokens_per_batch=tokens, seed=1, rank=rank, world_size=world)
    return DataLoader(data, batch_sampler=batches, collate_fn=collate)  # type: ignore[arg-type]


def passed(tokens: int, rank: int = 0, world: int = 1, count: int = 12, **given: Any) -> list[list[int]]:
    loader = load(given["collate"], tokens, rank, world)
    return [batch.numbers.tolist() for batch in islice(loader, count)]


def test_a_budget_of_tokens_is_shared_by_processes_as_one_would_have_it(tokenizer: Tokenizer) -> None:
    collate = PretrainCollator(tokenizer, max_length=16)
    whole = passed(120, collate=collate)
    parts = [passed(40, rank, 3, collate=collate) for rank in range(3)]
    for batch, *shares in zip(whole, *parts, strict=True):
        assert sorted(batch) == sorted(chain(*shares))
        assert all(shares)
    numbers = list(chain(*whole))
    assert len(set(numbers)) == len(numbers)
    sizes = [len(collate(numbered(1, number)).tokens.values) for number in numbers]
    assert max(sizes) <= 16
    filled = [sum(len(collate(numbered(1, number)).tokens.values) for number in batch) for batch in whole]
    assert 80 < min(filled) <= max(filled) < 160  # lengths are estimated from bytes
    assert passed(120, collate=collate) == whole
    assert [len(batch) for batch in passed(1, 0, 2, collate=collate)] == [1] * 12  # never none


@given(st.lists(st.integers(2, 30), min_size=1, max_size=20), st.integers(1, 60), st.integers(1, 4))
def test_budgets_hold_and_no_process_has_much_more_than_another(
    sizes: list[int], budget: int, world: int
) -> None:
    class Costs:
        def __getitem__(self, position: int) -> int:
            return sizes[position % len(sizes)]

    costs, stream = Costs(), Stream("texts", lambda: iter(TEXTS), block=50)
    texts = TextDataset(stream)
    texts.sizes = costs
    data = Mixture([texts])
    batches = [
        Batches(data, tokens_per_batch=budget, seed=3, rank=rank, world_size=world) for rank in range(world)
    ]
    positions = chain(
        *np.array([np.random.default_rng([3, i]).permutation(50) + 50 * i for i in range(13)]).tolist()
    )
    for groups in islice(zip(*batches, strict=True), 5):
        shares = [[position for _, position, _ in group] for group in groups]
        step = list(islice(positions, sum(map(len, shares))))  # in order, none left out
        assert sorted(chain(*shares)) == sorted(step)
        total = sum(costs[position] for position in step)
        assert total <= budget * world or len(step) == world
        positions, ahead = tee(positions)
        assert total + costs[next(ahead)] > budget * world  # as full as it gets
        loads = [sum(costs[position] for position in share) for share in shares]
        assert 0 < min(loads) <= max(loads) <= min(loads) + max(costs[position] for position in step)


def test_what_is_passed_over_is_not_tokenized(tokenizer: Tokenizer) -> None:
    collate = PretrainCollator(tokenizer)
    whole = passed(60, collate=collate)
    seen: list[int] = []
    loader = load(collate, 60)
    collator = loader.collate_fn

    def counting(texts: Sequence[tuple[int, str]]) -> Any:
        seen.extend(number for number, _ in texts)
        return collator(texts)

    loader.collate_fn = counting
    from accelerate.data_loader import skip_first_batches  # what transformers resumes with

    rest = [batch.numbers.tolist() for batch in islice(skip_first_batches(loader, 5), 7)]
    assert rest == whole[5:]
    assert seen == list(chain(*rest))


@pytest.mark.parametrize("sizes", [{}, {"batch_size": 2, "tokens_per_batch": 9}, {"tokens_per_batch": 0}])
def test_sizes_of_batches_that_make_no_sense_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(BadValueError, match=r"batches: got batch_size=.*; expected one of them, a whole"):
        Batches(Mixture([TextDataset(Stream("texts", lambda: iter(TEXTS)))]), **sizes)


# models


def test_objectives_refuse_models_that_they_are_not_for(tokenizer: Tokenizer, tiny_bert: Path) -> None:
    def refused(model: Model, *objectives: BaseObjective, match: str) -> None:
        with pytest.raises(BadValueError, match=match):
            PretrainStep(model, objectives)

    model = make(tokenizer)
    refused(model, match=r"got objectives \[\], expected at least one")
    refused(model, BagOfWords(), BagOfWords(weight=2.0), match="none twice")
    refused(model, MaskedLanguageModeling(), match="the encoder pools, so that tokens have no hidden states")
    tokens = Model.multi_vector(tiny_bert, device="cpu")
    for objective in (MaskedAutoEncoding(), BagOfWords()):
        refused(
            tokens, objective, match=f"{objective.kind.split('_')[0]}.*this model makes multi_vector vectors"
        )
    several = Model(tokenizer, model.encoder, PooledHead(16, ["mean", "max"]))
    refused(several, BagOfWords(), match="this model makes dense vectors by 2 ways")
    still = make(tokenizer, absolute_positional_embedding_type=None, relative_positional_embedding_type=None)
    refused(still, MaskedAutoEncoding(), match="neither learned nor rotary positions")
    foreign = TransformersEncoder.from_pretrained(tiny_bert)
    head = PooledHead(foreign.hidden_size)
    refused(Model(tokenizer, foreign, head), BagOfWords(), match="transformers runs the encoder")


def test_what_is_trained_beside_the_model_is_as_random_as_its_seed(tokenizer: Tokenizer) -> None:
    one, same, other = (PretrainStep(make(tokenizer), [BagOfWords()], seed=seed) for seed in (3, 3, 4))
    weights = [each.modules_of["bag_of_words"].head.layers[0].weight for each in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    model = make(tokenizer)
    state = torch.random.get_rng_state()
    PretrainStep(model, [MaskedAutoEncoding()], seed=2**40)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_autocast_keeps_the_losses(tokenizer: Tokenizer) -> None:
    step = PretrainStep(make(tokenizer), [MaskedAutoEncoding(), BagOfWords()])
    batch = PretrainCollator(tokenizer)(numbered(20))
    exact = step(batch).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = step(batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact, rel=2**-8)  # a rounding to bfloat16
    loss.backward()
    assert all(bool(each.grad.isfinite().all()) for each in step.parameters() if each.grad is not None)


def test_activations_computed_again_give_the_same_gradients(tokenizer: Tokenizer) -> None:
    batch = PretrainCollator(tokenizer)(numbered(20))
    gradients = []
    for again in (False, True):
        step = PretrainStep(make(tokenizer, dropout=0.3), [MaskedAutoEncoding(), BagOfWords()])
        if again:
            step.activation_checkpointing_enable()
        torch.manual_seed(4)
        step(batch).backward()
        gradients.append({name: each.grad for name, each in step.named_parameters()})
    assert all(each is not None for each in gradients[0].values())
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value)


# validation


def test_validation_is_the_mean_over_all_and_always_the_same(tokenizer: Tokenizer) -> None:
    step = PretrainStep(make(tokenizer, dropout=0.5), [MaskedAutoEncoding(weight=2.0), BagOfWords()])
    collate = PretrainCollator(tokenizer)
    whole = step.validate([collate(numbered(30))])
    assert step.training
    parts = step.validate([collate(numbered(3)), collate(numbered(20, 3)), collate(numbered(7, 23))])
    assert parts == pytest.approx(whole, rel=1e-5)
    assert step.validate([collate(numbered(30))]) == whole
    assert whole["loss"] == pytest.approx(2 * whole["masked_auto_encoding"] + whole["bag_of_words"])
    assert step(collate(numbered(30))).item() != pytest.approx(whole["loss"], rel=1e-5)  # that has dropout


# checkpoints, and two processes


def trainer(base: Path, out: Path, dropout: float = 0.1, **values: Any) -> Trainer:
    tokenizer = Tokenizer.from_pretrained(base)
    step = PretrainStep(make(tokenizer, dropout=dropout), [MaskedAutoEncoding(), BagOfWords()], seed=2)
    given = {"max_steps": STEPS, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True}
    args = TrainingArguments.parse(given | values, out)
    args.tokens_per_batch = 80 // args.world_size
    collate = PretrainCollator(tokenizer, MaskingConfig(rate=0.3, masked=1.0, random=0.0), seed=2)
    texts = TextDataset(Stream("texts", partial(iter, TEXTS)))
    return Trainer(step, args, Mixture([texts]), data_collator=collate)


def test_texts_are_read_as_far_ahead_as_was_asked_for(tiny_bert: Path, tmp_path: Path) -> None:
    corpus, tokenizer = tmp_path / "texts.txt", Tokenizer.from_pretrained(tiny_bert)
    corpus.write_text("".join(f"{text}\n" for text in TEXTS))
    step = PretrainStep(make(tokenizer), [MaskedAutoEncoding()])
    for wished, more in ((5, {"dataloader_prefetch_factor": 5}), (2, {})):  # which is torch's own
        values = {"max_steps": 1, "use_cpu": True, "dataloader_num_workers": 1, **more}
        args = TrainingArguments.parse(values, tmp_path / "out")
        config, collate = TextTrainingConfig(texts=[str(corpus)]), PretrainCollator(tokenizer)
        loader = text_trainer(step, config, args, collate, collate).get_train_dataloader()
        assert loader.prefetch_factor == wished


def history(trained: Trainer, name: str) -> list[float]:
    return [each[name] for each in trained.state.log_history if name in each]


def test_resumed_it_goes_on_with_the_decoder_it_had(tiny_bert: Path, tmp_path: Path) -> None:
    """And with the same batches, though other processes make them."""
    whole = trainer(tiny_bert, tmp_path / "whole")
    whole.train()
    again = trainer(tiny_bert, tmp_path / "again", dataloader_num_workers=2)
    again.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoint-4")
    assert history(again, "loss") == history(whole, "loss")
    assert history(again, "masked_auto_encoding") == history(whole, "masked_auto_encoding")
    trained, resumed = dict(whole.step.named_parameters()), dict(again.step.named_parameters())
    assert all(torch.equal(value, resumed[name]) for name, value in trained.items())
    last = tmp_path / "whole" / f"checkpoint-{STEPS}"
    saved = load_weights(last / "training")
    assert any("decoder" in name for name in saved)
    model = Model.from_pretrained(last)  # without it
    assert not any("decoder" in name for name, _ in model.named_parameters())
    for name, value in model.named_parameters():
        assert torch.equal(value, saved[f"model.{name}"])


@pytest.mark.slow
def test_two_processes_train_as_one_with_twice_the_batch(tiny_bert: Path, tmp_path: Path) -> None:
    one = trainer(tiny_bert, tmp_path / "one", dropout=0.0, optim="sgd")
    one.train()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run(
        [sys.executable, "-W", "ignore", *command, str(tiny_bert), str(tmp_path)], check=True, env=environment
    )
    found = json.loads((tmp_path / "history.json").read_text())
    assert found == pytest.approx(history(one, "loss"), rel=1e-5)
    assert len(found) == STEPS
    ours = load_weights(tmp_path / "one" / f"checkpoint-{STEPS}" / "training")
    theirs = load_weights(tmp_path / "two" / f"checkpoint-{STEPS}" / "training")
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    made = trainer(Path(sys.argv[1]), Path(sys.argv[2]) / "two", 0.0, optim="sgd", ddp_backend="gloo")
    made.train()
    if made.args.process_index == 0:
        (Path(sys.argv[2]) / "history.json").write_text(json.dumps(history(made, "loss")))
    torch.distributed.destroy_process_group()
