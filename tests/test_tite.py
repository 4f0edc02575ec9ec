"""Pooling encoders: the authors' outputs and gradients, a slow padded oracle, and files that load again."""

from __future__ import annotations

import copy
import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from irkit.core.ragged import Ragged
from irkit.encoder import Encoder, Pooling
from irkit.encoder.checkpoint_weights import export_weights
from irkit.encoder.families import encoder_config
from irkit.encoder.presets import PRESETS, pooling_schedule, tite_settings
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.heads import PooledHead
from irkit.model import Model
from irkit.tokenizer import Tokenizer
from irkit.training.model_step import ModelStep

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


def tite(preset: str | int = "2-late", **sizes: Any) -> Encoder:
    """A small one, whose every parameter matters."""
    small = {"layers": 6, "hidden_size": 12, "heads": 3, "intermediate_size": 24, "vocab_size": 40}
    encoder = Encoder(tite_settings(preset, **small | {"max_length": 16} | sizes)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    return encoder


def batch(lengths: list[int], seed: int = 0) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return Ragged(torch.randint(5, 40, (sum(lengths),), generator=generator), torch.tensor(lengths))


# Table 3, and section 3.1 on which layers pool
TABLE_3 = {
    "2-late": (range(4, 13), 2, "intra"),
    "2-staggered": ((2, 3, 4, 6, 7, 8, 10, 11, 12), 2, "intra"),
    "3-late": (range(7, 13), 3, "intra"),
    "3-staggered": ((2, 4, 6, 8, 10, 12), 3, "intra"),
    "2-late-pre": (range(4, 13), 2, "pre"),
    "2-late-post": (range(4, 13), 2, "post"),
    "2-late-upscale": (range(4, 13), 2, "intra"),
    "bert-base": ((), 2, "intra"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_those_of_table_3(name: str) -> None:
    settings = tite_settings(name)
    layers, kernel, location = TABLE_3[name]
    pooled = [kernel if number in layers else None for number in range(1, 13)]
    assert settings["kernel_sizes"] == settings["strides"] == pooled
    assert settings["pooling_location"] == location
    growth = [3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6] if "upscale" in name else [3] * 12
    assert settings["hidden_sizes"] == [256 * thirds for thirds in growth]
    assert settings["num_attention_heads"] == [4 * thirds for thirds in growth]
    assert settings["intermediate_sizes"] == [1024 * thirds for thirds in growth]
    config = encoder_config(settings)
    length = 512
    for pooling in config.schedule:
        length = pooling.shorten(length) if pooling else length
    assert length == (512 if name == "bert-base" else 1)
    assert (config.embedding_size == 1536) == ("upscale" in name)
    number = list(TABLE_3).index(name) + 1
    if number <= 7:
        assert tite_settings(number) == tite_settings(str(number)) == settings
    else:
        with pytest.raises(BadValueError, match="1 to 7"):
            tite_settings(number)


def test_the_released_variant_has_other_positions() -> None:
    paper, released = (encoder_config(tite_settings(1, variant=each)) for each in ("paper", "released"))
    assert (paper.learned_positions, released.learned_positions) == (0, 512)
    assert paper.layers == released.layers
    assert paper.layers[0].rotary_base == 10_000.0
    assert (paper.norm_location, paper.norm) == (released.norm_location, released.norm) == ("post", "layer")


@given(
    layers=st.integers(1, 8),
    kernel=st.integers(2, 5),
    stride=st.integers(1, 5),
    max_length=st.integers(1, 700),
    arrangement=st.sampled_from(["late", "staggered"]),
)
def test_schedules_make_one_row_or_are_refused(
    layers: int, kernel: int, stride: int, max_length: int, arrangement: Any
) -> None:
    if stride > kernel:
        with pytest.raises(ConfigError, match=f"stride {stride} over kernel {kernel} would skip tokens"):
            pooling_schedule(arrangement, layers, kernel, stride, max_length)
        return
    everywhere = pooling_schedule(range(layers), layers, kernel, stride)
    lengths = [max_length]
    for pooling in everywhere:
        assert pooling
        lengths.append(pooling.shorten(lengths[-1]))
    if lengths[-1] > 1:
        with pytest.raises(ConfigError, match="take more layers"):
            pooling_schedule(arrangement, layers, kernel, stride, max_length)
        return
    schedule = pooling_schedule(arrangement, layers, kernel, stride, max_length)
    assert len(schedule) == layers
    needed = sum(pooling is not None for pooling in schedule)
    assert needed == lengths.index(1)  # not one more than it takes
    unpooled = [place for place, pooling in enumerate(schedule) if pooling is None]
    if arrangement == "late":
        assert unpooled == list(range(layers - needed))
    elif unpooled:
        gaps = [b - a for a, b in pairwise([*unpooled, layers])]
        assert unpooled[0] == 0
        assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arrangement": "early"}, "late, staggered or the numbers"),
        ({"arrangement": [-1, 2]}, r"layers \[-1, 2\], expected one or more numbers from 0 to 3"),
        ({"arrangement": [2, 4]}, r"layers \[2, 4\], expected"),
        ({"arrangement": [2, 2]}, "each once"),
        ({"arrangement": []}, "expected one or more"),
        ({"kernel": 1, "stride": 1}, "kernel"),
        ({"stride": 0}, "stride"),
        ({"location": "middle"}, "location"),
        ({"max_length": 17}, "4 layers of kernel 2 and stride 2 do not make one row of 17"),
    ],
)
def test_schedules_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pooling_schedule(**{"arrangement": "late", "layers": 4, "kernel": 2, "stride": 2} | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "2-early"}, "expected one of 2-late"),
        ({"preset": 0}, "from 1 to 7"),
        ({"preset": 1, "variant": "draft"}, "paper, released"),
        ({"preset": 1, "depth": 3}, "unknown key 'depth'"),
        ({"preset": 1, "layers": 4}, "do not make one row of 512"),
        ({"preset": 1, "hidden_size": 100, "heads": 3}, "no multiple of 3 heads"),
        ({"preset": 7, "hidden_size": 256}, "grows by thirds"),
    ],
)
def test_sizes_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((BadValueError, ConfigError), match=message):
        tite_settings(**arguments)


_EACH = ("hidden_sizes", "num_attention_heads", "intermediate_sizes", "strides", "kernel_sizes")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel_sizes": [None, 2]}, "2 kernel_sizes for 6 layers"),
        ({"strides": [2] * 7}, "7 strides for 6 layers"),
        ({"hidden_sizes": [12] * 5}, "5 hidden_sizes for 6 layers"),
        ({"strides": 3}, "stride 3 over kernel 2 would skip tokens"),
        ({"strides": None}, "kernel size 2 with stride None"),
        ({"kernel_sizes": 0, "strides": 0}, "kernel"),
        ({"pooling_location": "outside"}, "outside"),
        ({"norm_location": "last"}, "last"),
        ({"relative_positional_embedding_type": "alibi"}, "alibi"),
        ({"positional_embedding_type": "alibi"}, "alibi"),
        ({"hidden_sizes": [12, 12, 12, 6, 6, 6]}, "must not fall"),
        ({"num_attention_heads": 5}, "no multiple of 5 heads"),
        ({"num_attention_heads": 4}, "heads of width 3 are not made of pairs"),
        ({"num_attention_heads": 0}, "num_heads"),
        ({key: [] for key in _EACH} | {"num_hidden_layers": 0}, "num_hidden_layers 0, expected 1"),
    ],
)
def test_configurations_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Encoder(
            tite_settings(1, layers=6, hidden_size=12, heads=3, max_length=64) | {"kernel_sizes": 2} | change
        )


def test_the_first_checkpoints_named_positions_otherwise() -> None:
    plain = tite_settings(1) | {"positional_embedding_type": "absolute"}
    assert encoder_config(plain).learned_positions == 512
    assert encoder_config(plain).layers[0].rotary_base is None
    turned = tite_settings(1, variant="released") | {"positional_embedding_type": "rotary"}
    assert encoder_config(turned).learned_positions == 0


@pytest.mark.parametrize("prefix", ["", "tite."])
def test_what_is_loaded_is_saved_with_the_same_names(prefix: str, tmp_path: Path) -> None:
    """Composed embeddings, and the heads of pre-training, which are kept as they are."""
    encoder = tite("2-late-upscale")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps(encoder.settings))
    weights = export_weights(dict(encoder.named_parameters()), encoder.names(), prefix)
    heads = {
        "lm_decoder.weight": torch.randn(40, 24),
        "heads.bow_auto_encoding.lm_head.bias": torch.randn(40),
    }
    save_file(
        {key: value.detach().contiguous() for key, value in weights.items()} | (heads if prefix else {}),
        tmp_path / "a" / "model.safetensors",
    )
    assert weights[f"{prefix}embeddings.downscale.weight"].shape == (12, 24)
    assert weights[f"{prefix}embeddings.word_embeddings.weight"].shape == (40, 24)
    loaded = Encoder.from_pretrained(tmp_path / "a")
    loaded.save_pretrained(tmp_path / "b")
    first, second = (load_file(tmp_path / each / "model.safetensors") for each in "ab")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    settings = json.loads((tmp_path / "b" / "config.json").read_text())
    assert settings == encoder.settings | {"dtype": "float32"}
    tokens = batch([16, 1, 9])
    assert torch.equal(loaded(tokens).values, encoder(tokens).values)
    assert loaded.word_embeddings.shape == (40, 24)  # what an output of this width is tied to


def test_weights_of_another_schedule_fit_and_of_other_widths_do_not(tmp_path: Path) -> None:
    tite().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"hidden_sizes": [12, 12, 12, 12, 12, 18]}))
    with pytest.raises(CorruptError, match=r"missing embeddings\.downscale\.weight"):
        Encoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings | {"kernel_sizes": None, "strides": None}))
    encoder = Encoder.from_pretrained(tmp_path)
    assert encoder(batch([9])).lengths.tolist() == [9]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5), preset=st.sampled_from(list(PRESETS)[:7])
)
@settings(max_examples=20, deadline=None)
def test_a_text_does_not_depend_on_its_neighbours(attention: str, lengths: list[int], preset: str) -> None:
    encoder = tite(preset)
    encoder.attention = attention
    tokens = batch(lengths)
    with torch.inference_mode():
        together = encoder(tokens)
        for place, row in enumerate(tokens):
            alone = encoder(Ragged.from_rows([row]))
            torch.testing.assert_close(together[place], alone.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("location", ["pre", "intra", "post"])
def test_any_encoder_takes_a_schedule_and_gives_it_back(
    location: Any, tiny_bert: Path, tmp_path: Path
) -> None:
    encoder = Encoder.from_pretrained(tiny_bert)
    tokens = batch([9, 1, 4])
    before = encoder(tokens)
    encoder.set_pooling_([None, Pooling(kernel=3, stride=2, location=location)])
    pooled = encoder(tokens)
    assert pooled.lengths.tolist() == [4, 1, 2]
    encoder.save_pretrained(tmp_path)
    again = Encoder.from_pretrained(tmp_path)
    assert again.config == encoder.config
    assert torch.equal(again(tokens).values, pooled.values)
    encoder.grow_(len(encoder.word_embeddings) + 3)
    assert torch.equal(encoder(tokens).values, pooled.values)
    encoder.set_pooling_([None, None])
    assert torch.equal(encoder(tokens).values, before.values)
    for schedule in ([None], [None] * 3, [None, 2], [None, {"kernel": 2, "stride": 2}]):
        with pytest.raises(ConfigError, match="pooling"):
            encoder.set_pooling_(schedule)
    assert torch.equal(encoder(tokens).values, before.values)


def test_a_tite_takes_another_schedule_in_its_own_keys(tmp_path: Path) -> None:
    encoder = tite()
    encoder.set_pooling_([None, None, None, None, Pooling(kernel=4, stride=4, location="post"), None])
    encoder.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["strides"] == [None, None, None, None, 4, None]
    assert settings["pooling_location"] == "post"
    assert "pooling" not in settings
    tokens = batch([16, 5])
    assert Encoder.from_pretrained(tmp_path)(tokens).lengths.tolist() == [4, 2]
    mixed = [Pooling(kernel=2, stride=2), Pooling(kernel=2, stride=2, location="pre"), None, None, None, None]
    with pytest.raises(ConfigError, match="one location in all layers, got intra, pre"):
        encoder.set_pooling_(mixed)


@pytest.mark.parametrize("preset", list(PRESETS)[:7])
def test_low_precision_stays_close(preset: str) -> None:
    sizes = {"hidden_size": 96, "heads": 6, "intermediate_size": 192}
    encoder, tokens = tite(preset, **sizes), batch([16, 3, 1, 0, 40])
    for parameter in encoder.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.05)
    with torch.inference_mode():
        exact = encoder(tokens).values
        rough = copy.deepcopy(encoder).bfloat16()(tokens).values
        encoder.quantize_()
        small, apart = encoder(tokens), encoder(batch([2]))
    assert rough.dtype == torch.bfloat16
    assert small.lengths.tolist() == [1, 1, 1, 0, 3 if preset not in ("3-late", "3-staggered") else 2]
    assert apart.lengths.tolist() == [1]
    for other in (rough.float(), small.values):
        assert torch.cosine_similarity(other, exact).min() > 0.99


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch hides it where it makes it
def test_checkpointing_and_compiled_layers_change_no_gradient(tiny_bert: Path) -> None:
    class Step(ModelStep):
        def forward(self, tokens: Ragged) -> torch.Tensor:
            return self.model.encoder(tokens).values.sin().sum()

    def gradients_of(step: Step) -> list[torch.Tensor]:
        step.zero_grad()
        step(batch([16, 5, 1])).backward()
        return [parameter.grad.clone() for parameter in step.parameters()]

    model = Model(Tokenizer.from_pretrained(tiny_bert), tite("2-late-upscale"), PooledHead(24))
    step = Step(model)
    plain = gradients_of(step)
    step.compile_layers(backend="eager")
    step.activation_checkpointing_enable()
    for ours, wanted in zip(gradients_of(step), plain, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def test_every_text_is_one_vector_however_long(tiny_bert: Path, tmp_path: Path) -> None:
    """Texts longer than the schedule was made for leave several rows, of which the vector is the mean."""
    encoder = tite(vocab_size=200, max_length=8)
    encoder.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_bert / name, tmp_path)
    model = Model.from_pretrained(tmp_path)  # without a warning that nothing says how texts are pooled
    assert model.tokenizer.max_length == 8  # what it was trained on; more is possible
    model.tokenizer.max_length = None
    texts = ["search " * 40, "a neural index", ""]
    vectors = torch.as_tensor(model.encode_document(texts))
    assert vectors.shape == (3, 12)
    hidden = model.encoder(model.tokenizer(texts))
    assert hidden.lengths.tolist() == [6, 1, 1]
    torch.testing.assert_close(vectors, torch.stack([row.mean(0) for row in hidden]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("location", ["pre", "intra", "post"])
def test_windows_that_overlap_give_the_outputs_of_the_authors(
    location: str, attention: str, tmp_path: Path
) -> None:
    """A checkpoint of kernel 3, stride 2 and rotary positions, whose weights follow a formula."""
    golden = json.loads((Path(__file__).parent / "golden" / "tite_overlap.json").read_text())
    weights = {
        name: (torch.sin(torch.arange(math.prod(shape)).double() * 1.7 + number) * 0.6).view(shape).float()
        for number, (name, shape) in enumerate(sorted(golden["shapes"].items()))
    }
    (tmp_path / "config.json").write_text(json.dumps({**golden["settings"], "pooling_location": location}))
    save_file(weights, tmp_path / "model.safetensors")
    encoder = Encoder.from_pretrained(tmp_path, attention=attention).double()
    with torch.no_grad():
        found = encoder(Ragged.from_rows(golden["ids"], dtype=torch.int64)).values
    wanted = torch.tensor(golden["outputs"][location], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
