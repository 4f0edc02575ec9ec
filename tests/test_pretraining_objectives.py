"""Objectives of pre-training against their formulas, written out token by token in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from irkit import Model
from irkit.encoder import Encoder
from irkit.encoder.layers import ACTIVATIONS
from irkit.encoder.presets import tite_settings
from irkit.heads import PooledHead
from irkit.tokenizer import Tokenizer
from irkit.training.masking import MaskingConfig, PretrainCollator
from irkit.training.pretraining.decoder import visible_tokens
from irkit.training.pretraining.objectives import BagOfWords, MaskedAutoEncoding, MaskedLanguageModeling
from irkit.training.pretraining.pretrain_step import BaseObjective, PretrainStep

WORDS = ["search", "the index", "of", "a vector model", "neural text", "in the token", "on an index", "zebra"]
SMALL = {"layers": 3, "hidden_size": 24, "heads": 3, "intermediate_size": 48, "max_length": 8}
OTHERS = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}


def texts(count: int, start: int = 0) -> list[tuple[int, str]]:
    """Numbered, of 2 to about 20 tokens."""
    return [(i, " ".join(WORDS[(i * k) % 8] for k in range(i % 7))) for i in range(start, start + count)]


@pytest.fixture
def tokenizer(tiny_bert: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(tiny_bert)


def make(tokenizer: Tokenizer, kind: str, pooling: str = "mean") -> Model:
    """A model of random weights that runs in float64, without dropout."""
    settings: dict[str, Any] = {"model_type": kind, "vocab_size": tokenizer.vocab_size, **OTHERS}
    if kind == "modernbert":
        settings |= {"global_attn_every_n_layers": 2, "local_attention": 8}
    elif kind != "bert":
        preset, _, variant = kind.partition(" ")
        sizes = SMALL | {"vocab_size": tokenizer.vocab_size}
        settings = tite_settings(preset, variant=variant or "paper", **sizes)
    torch.manual_seed(5)
    encoder = Encoder(settings | {"initializer_range": 0.3}, attention="eager").double().eval()
    return Model(tokenizer, encoder, PooledHead(encoder.hidden_size, pooling))


def randomised(step: PretrainStep) -> PretrainStep:
    """With biases and norms that are not where they started."""
    draw = torch.Generator().manual_seed(7)
    for parameter in step.modules_of.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return step.eval()


KINDS = ["bert", "modernbert", "2-late", "2-staggered released", "2-late-upscale", "2-late-upscale released"]


# masked auto-encoding


def turned(x: Tensor, position: int, base: float, interleaved: bool) -> Tensor:
    """Rotary position of one token, ``(heads, width)``, as a product of complex numbers."""
    half = x.shape[1] // 2
    pairs = x.unflatten(1, (half, 2)) if interleaved else x.unflatten(1, (2, half)).transpose(1, 2)
    angles = position * base ** -(torch.arange(half).float() / half).double()
    made = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(half).double(), angles)
    )
    return made.flatten(1) if interleaved else made.transpose(1, 2).flatten(1)


def told(step: PretrainStep, ids: Tensor, vector: Tensor, number: int) -> list[Tensor]:
    """Logits of each token of a text."""
    encoder, module = step.model.encoder, step.modules_of["masked_auto_encoding"]
    decoder, config = module.decoder, encoder.config
    layer, embeddings = decoder.layer, encoder.embeddings
    norm = decoder.embedding_norm or embeddings.norm
    heads, size, post = layer.layer.num_heads, config.hidden_size, config.norm_location == "post"
    before = (lambda x: x) if post else layer.attention_norm
    w, b = (
        layer.qkv.weight.split(size),
        (layer.qkv.bias if config.attention_bias else torch.zeros(3 * size)).split(size),
    )
    base = layer.layer.rotary_base

    def projected(x: Tensor, part: int, position: int | None) -> Tensor:
        y = (w[part] @ before(x) + b[part]).view(heads, -1)
        return y if base is None or position is None else turned(y, position, base, config.rotary_interleaved)

    inputs = []
    for j, token in enumerate(ids):
        x = embeddings.word.weight[token]
        if embeddings.position is not None:
            x = x + embeddings.position.weight[j + config.position_offset]
        if embeddings.token_type is not None:
            x = x + embeddings.token_type.weight[0]
        inputs.append(norm(x))
    seen = visible_tokens(torch.tensor([number]), len(ids), decoder.mask_rate, decoder.seed)[0]
    logits = []
    for i in range(len(ids)):
        query = vector
        if embeddings.position is not None:
            query = norm(vector + embeddings.position.weight[i + config.position_offset])
        others = [j for j in range(len(ids)) if seen[i, j]]
        assert i not in others
        keys = [projected(vector, 1, None), *(projected(inputs[j], 1, j) for j in others)]
        values = [projected(vector, 2, None), *(projected(inputs[j], 2, None) for j in others)]
        scores = torch.stack([(projected(query, 0, i) * key).sum(1) for key in keys]) / math.sqrt(
            size / heads
        )
        attended = (scores.softmax(0)[..., None] * torch.stack(values)).sum(0).flatten()
        x = query + layer.out(attended)
        x = layer.attention_norm(x) if post else x
        inner = layer.up(x if post else layer.mlp_norm(x))
        if config.gated:
            inner, gate = inner.chunk(2)
            inner = ACTIVATIONS[config.activation](inner) * gate
        else:
            inner = ACTIVATIONS[config.activation](inner)
        x = x + layer.down(inner)
        x = layer.mlp_norm(x) if post else decoder.final_norm(x)
        logits.append(embeddings.word.weight @ module.head(x) + module.head.bias)
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_masked_auto_encoding_tells_every_token_from_the_vector_and_others(
    tokenizer: Tokenizer, kind: str
) -> None:
    model = make(tokenizer, kind)
    step = randomised(PretrainStep(model, [MaskedAutoEncoding()], seed=3))
    step.modules_of["masked_auto_encoding"].decoder.texts = 3  # several groups of texts
    batch = PretrainCollator(tokenizer)(texts(7, 20))
    loss = step(batch)
    vectors = model(batch.tokens).values
    special = set(tokenizer.special_tokens())
    terms = []
    for ids, vector, number in zip(batch.original, vectors, batch.numbers.tolist(), strict=True):
        for token, logits in zip(ids, told(step, ids, vector, number), strict=True):
            if int(token) not in special:
                terms.append(-logits.log_softmax(0)[token])
    wanted = torch.stack(terms).mean()
    torch.testing.assert_close(loss, wanted, rtol=1e-7, atol=0)
    named = dict(step.named_parameters())
    one, other = (
        torch.autograd.grad(each, list(named.values()), allow_unused=True) for each in (loss, wanted)
    )
    for name, a, b in zip(named, one, other, strict=True):
        assert a is not None, name
        b = torch.zeros_like(a) if b is None else b
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-9, name


def test_masked_auto_encoding_averages_tokens_of_a_text_and_then_texts(tokenizer: Tokenizer) -> None:
    model = make(tokenizer, "2-late")
    batch = PretrainCollator(tokenizer)([*texts(3, 20), (3, "")])
    steps = {
        average: randomised(PretrainStep(model, [MaskedAutoEncoding(average=average)], seed=3))
        for average in ("texts", "tokens")
    }
    whole = steps["texts"](batch)
    each = []
    for row in range(3):  # one text alone has one mean, whatever the reading
        alone = PretrainCollator(tokenizer)([texts(3, 20)[row]])
        each.append(steps["tokens"](alone))
    each = [loss for loss in each if loss > 0]  # texts without tokens do not count
    assert len(each) == 2
    torch.testing.assert_close(whole, torch.stack(each).mean())
    assert not torch.isclose(whole, steps["tokens"](batch))
    parts = [dict(step.parts) for step in (steps["texts"], steps["tokens"]) if step(batch) is not None]
    assert float(parts[0]["masked_auto_encoding_accuracy"]) == pytest.approx(
        float(parts[1]["masked_auto_encoding_accuracy"])
    )
    one, other = (
        torch.autograd.grad(loss, model.encoder.word_embeddings, retain_graph=True)[0]
        for loss in (whole, torch.stack(each).mean())
    )
    torch.testing.assert_close(one, other)


def test_who_sees_whom_is_drawn_for_each_pair_and_nobody_sees_itself() -> None:
    n, length, rate = 400, 24, 0.3
    seen = visible_tokens(torch.arange(n), length, rate, seed=1)
    assert not seen.diagonal(dim1=1, dim2=2).any()
    others = ~torch.eye(length, dtype=torch.bool)
    x = seen[:, others].double()
    for axis in (0, 1):  # of each pair, of each text
        deviation = math.sqrt(rate * (1 - rate) / x.shape[axis])
        assert (x.mean(axis) - (1 - rate)).abs().max() < 6 * deviation
    y = seen.double() - (1 - rate)
    spread = rate * (1 - rate) / math.sqrt(n * length * length)
    other = visible_tokens(torch.arange(n), length, rate, seed=2).double() - (1 - rate)
    together = {
        "both ways": (y * y.transpose(1, 2))[:, others],
        "texts": (y[1:] * y[:-1])[:, others],
        "seeds": (y * other)[:, others],
        "neighbours": (y[:, :, 1:] * y[:, :, :-1])[:, others[:, 1:] & others[:, :-1]],
        "rows": (y[:, 1:] * y[:, :-1])[:, others[1:] & others[:-1]],
    }
    assert {name: abs(float(each.mean())) < 6 * spread for name, each in together.items()} == dict.fromkeys(
        together, True
    )
    assert not visible_tokens(torch.arange(3), 5, 1.0).any()
    assert visible_tokens(torch.arange(3), 5, 0.0).sum() == 3 * 5 * 4


def test_draws_depend_on_the_number_of_the_text_alone() -> None:
    numbers = torch.tensor([5, 2**40, 0])
    whole = visible_tokens(numbers, 9, 0.5, seed=4)
    for number, each in zip(numbers, whole, strict=True):
        assert torch.equal(visible_tokens(number[None], 6, 0.5, seed=4)[0], each[:6, :6])
    assert not torch.equal(whole, visible_tokens(numbers, 9, 0.5, seed=5))


# bag of words, masked language modelling, and their sum


@pytest.mark.parametrize(
    ("kind", "pooling"), [("2-late", "mean"), ("bert", "cls"), ("2-late-upscale", "mean")]
)
def test_bag_of_words_is_binary_cross_entropy_over_the_vocabulary(
    tokenizer: Tokenizer, kind: str, pooling: str
) -> None:
    model = make(tokenizer, kind, pooling)
    step = randomised(PretrainStep(model, [BagOfWords()]))
    batch = PretrainCollator(tokenizer, MaskingConfig(rate=0.4, masked=1.0, random=0.0))(texts(9))
    loss = step(batch)
    losses = []
    for ids, row in zip(batch.original, model.encoder(batch.tokens), strict=True):
        vector = row[0] if pooling == "cls" else row.mean(0)
        logits = model.encoder.word_embeddings @ step.modules_of["bag_of_words"].head(vector)
        p = 1 / (1 + (-logits - step.modules_of["bag_of_words"].head.bias).exp())
        y = torch.zeros_like(p)
        y[[i for i in ids.tolist() if i not in tokenizer.special_tokens()]] = 1
        losses.append(-(y * p.log() + (1 - y) * (1 - p).log()).mean())
    wanted = torch.stack(losses).mean()
    torch.testing.assert_close(loss, wanted, rtol=1e-7, atol=0)
    named = dict(step.named_parameters())
    one, other = (
        torch.autograd.grad(each, list(named.values()), allow_unused=True) for each in (loss, wanted)
    )
    for name, a, b in zip(named, one, other, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or b is None or (a - b).norm() <= 1e-5 * b.norm() + 1e-9, name


def test_bag_of_words_begins_with_few_words_in_a_text(tokenizer: Tokenizer) -> None:
    """As nearly all tokens are not in a text; with even odds vectors would learn just that, all alike."""
    step = PretrainStep(make(tokenizer, "2-late"), [BagOfWords()])
    bias = step.modules_of["bag_of_words"].head.bias
    torch.testing.assert_close(bias.sigmoid(), torch.full_like(bias, 0.01))
    batch = PretrainCollator(tokenizer)(texts(9))
    words = float(batch.terms.lengths.double().mean()) / tokenizer.vocab_size
    step.model.encoder.word_embeddings.data.mul_(0.05)  # logits are about the bias
    wanted = -words * math.log(0.01) - (1 - words) * math.log(0.99)
    assert step(batch).item() == pytest.approx(wanted, rel=0.05)
    assert wanted < 0.5 * math.log(2)


def test_masked_language_modelling_asks_for_what_was_hidden(tokenizer: Tokenizer) -> None:
    model = make(tokenizer, "bert-base")
    step = randomised(PretrainStep(model, [MaskedLanguageModeling()]))
    batch = PretrainCollator(tokenizer, MaskingConfig(rate=0.3))(texts(9))
    loss = step(batch)
    head = step.modules_of["masked_language_modeling"].head
    hidden = model.encoder(batch.tokens).values
    logits = head(hidden) @ model.encoder.word_embeddings.T + head.bias
    asked = torch.full_like(batch.tokens.values, -100).index_put((batch.positions,), batch.labels)
    torch.testing.assert_close(loss, F.cross_entropy(logits, asked), rtol=1e-7, atol=0)
    right = (logits.argmax(1) == asked)[asked >= 0].double().mean()
    assert float(step.parts["masked_language_modeling_accuracy"]) == pytest.approx(float(right))
    nothing = PretrainCollator(tokenizer)(texts(2))
    loss = step(nothing)
    loss.backward()
    assert loss.item() == 0.0


def test_retromae_encodes_what_is_hidden_and_decodes_what_was_there(tokenizer: Tokenizer) -> None:
    """Objectives are weighted and added, and do not see each other."""
    model = make(tokenizer, "bert", "cls")
    batch = PretrainCollator(tokenizer, MaskingConfig(rate=0.15, masked=1.0, random=0.0), seed=2)(texts(9))
    assert (batch.original.values != batch.tokens.values).any()
    several: list[BaseObjective] = [
        MaskedAutoEncoding(weight=0.5),
        MaskedLanguageModeling(weight=2.0),
        BagOfWords(),
    ]
    step = randomised(PretrainStep(model, several))
    loss = step(batch)
    values = {each.kind: float(step.parts[each.kind]) for each in several}
    assert loss.item() == pytest.approx(sum(each.weight * values[each.kind] for each in several), rel=1e-9)
    for each in several:
        alone = PretrainStep(model, [each]).eval()
        alone.modules_of.load_state_dict(
            {k: v for k, v in step.modules_of.state_dict().items() if k.startswith(each.kind)}
        )
        assert alone(batch).item() == pytest.approx(each.weight * values[each.kind], rel=1e-9)
    # the decoder gets the text itself
    seen: list[Tensor] = []
    step.modules_of["masked_auto_encoding"].decoder.register_forward_pre_hook(
        lambda _, given: seen.append(given[2].values)
    )
    step(batch)
    assert torch.equal(seen[0], batch.original.values)
