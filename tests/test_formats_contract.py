"""What every format of model directories promises, put to each one of the table."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from irkit import Model
from irkit.errors import BadValueError, IrkitError, StorageError
from irkit.formats import FORMATS
from irkit.formats import Format as ModelFormat
from irkit.tokenizer import Tokenizer

TEXTS = ["the search index", "", "a neural model of text?"]


def write_dense(tiny_bert: Path, path: Path) -> None:
    Model.with_head("dense", tiny_bert, device="cpu").save_pretrained(path)


def write_stanford(tiny_bert: Path, path: Path) -> None:
    markers = ("[Q] ", "[D] ")
    config = {"query_expansion": {"length": 8}, "document_length": 20}
    model = Model.multi_vector(tiny_bert, {"dim": 8}, config, markers=markers, device="cpu")
    model.save_pretrained(path, format="stanford")


def write_bare(tiny_bert: Path, path: Path) -> None:
    shutil.copytree(tiny_bert, path)


def write_several(tiny_bert: Path, path: Path) -> None:
    heads = {"dense": {}, "sparse": "token_weight", "multi_vector": {"projection": {"dim": 8}}}
    Model.several(tiny_bert, heads, device="cpu").save_pretrained(path)


def write_bge_m3(tiny_bert: Path, path: Path) -> None:
    shutil.copytree(tiny_bert, path)
    torch.save(torch.nn.Linear(32, 8).state_dict(), path / "colbert_linear.pt")
    torch.save(torch.nn.Linear(32, 1).state_dict(), path / "sparse_linear.pt")


def write_model2vec(tiny_bert: Path, path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(tiny_bert)
    tokenizer.save(path)
    save_file({"embeddings": torch.randn(tokenizer.vocab_size, 6)}, path / "model.safetensors")
    (path / "config.json").write_text('{"model_type": "model2vec", "normalize": true, "max_length": 30}')


class Layout(NamedTuple):
    """A format under test: a function that writes a directory, and the files that it cannot do without."""

    write: Callable[[Path, Path], None]
    settings: str = "config.json"  # in JSON
    weights: str = "model.safetensors"


LAYOUTS: dict[str, Layout] = {
    "model2vec": Layout(write_model2vec),
    "sentence-transformers": Layout(write_dense),
    "huggingface": Layout(write_bare),
    "stanford": Layout(write_stanford),
    "several-heads": Layout(write_several),
    "bge-m3": Layout(write_bge_m3),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


@pytest.fixture
def case(layout: Layout, tiny_bert: Path, tmp_path: Path) -> tuple[ModelFormat, Path]:
    torch.manual_seed(0)
    layout.write(tiny_bert, tmp_path / "model")
    name = next(name for name, other in LAYOUTS.items() if other is layout)
    return FORMATS[name], tmp_path / "model"


def load(path: Path) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a bare encoder says nothing about pooling
        return Model.from_pretrained(path, device="cpu")


def test_every_format_of_the_table_is_here() -> None:
    own = {name for name, format in FORMATS.items() if format.fits.__module__.startswith("irkit.")}
    assert own == {*LAYOUTS}


def test_it_knows_its_directories_and_no_others(case: tuple[ModelFormat, Path], tmp_path: Path) -> None:
    format, path = case
    assert format.fits(path)
    (tmp_path / "empty").mkdir()
    assert not format.fits(tmp_path / "empty")
    assert not format.fits(tmp_path / "nowhere")


def test_written_and_read_it_is_the_same(case: tuple[ModelFormat, Path], tmp_path: Path) -> None:
    format, path = case
    model = load(path)
    name = next(name for name in FORMATS if FORMATS[name] is format)
    if format.write is None:
        with pytest.raises(
            BadValueError, match=f"format '{name}', expected several-heads or bge-m3 or sentence"
        ):
            model.save_pretrained(tmp_path / "again", format=name)
        return
    for _ in range(2):  # the second time over the first
        model.save_pretrained(tmp_path / "again", format=name)
        again = load(tmp_path / "again")
        assert (again.fingerprint, again.prompts) == (model.fingerprint, model.prompts)
        for side in ("query", "document"):
            ours, theirs = (one.encode_representation(TEXTS, side).arrays() for one in (model, again))
            assert all((ours[key] == theirs[key]).all() for key in ours)


def test_a_query_side_is_kept_or_refused(tiny_bert: Path, tmp_path: Path) -> None:
    model = Model.sparse(tiny_bert, queries="static", device="cpu")
    for name in FORMATS:
        if FORMATS[name].write is not None and not FORMATS[name].query_side:
            with pytest.raises(BadValueError, match="has no place for a query side of its own"):
                model.save_pretrained(tmp_path / name, format=name)
            assert not (tmp_path / name).exists()


def test_a_damaged_configuration_is_an_error(case: tuple[ModelFormat, Path], layout: Layout) -> None:
    _, path = case
    for content in ("", "{", "[]", '{"model_type": 3}', '{"architectures": 7}'):
        if layout.settings == "config.json" or not content.startswith('{"'):  # keys of Hugging Face
            (path / layout.settings).write_text(content)
            with pytest.raises(IrkitError):
                load(path)


def test_missing_weights_are_an_error(case: tuple[ModelFormat, Path], layout: Layout) -> None:
    _, path = case
    (path / layout.weights).unlink()
    with pytest.raises(StorageError, match=re.escape(layout.weights)):
        load(path)


def test_another_head_is_put_on_its_encoder(case: tuple[ModelFormat, Path]) -> None:
    _, path = case
    model = Model.with_head("dense", path, device="cpu")
    assert model.encode_representation(TEXTS, "document").values.isfinite().all()


def test_a_directory_of_a_model_is_replaced_and_nothing_else(case: tuple[ModelFormat, Path]) -> None:
    _, path = case
    model = load(path)
    (path / "notes.doc").write_text("mine")
    with pytest.raises(StorageError, match=r"would delete notes\.doc"):
        model.save_pretrained(path)
    (path / "notes.doc").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model.save_pretrained(path)
    assert load(path).fingerprint == model.fingerprint
