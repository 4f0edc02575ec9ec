"""Encoding: heads, batches, order, precision, processes; the real MiniLM against sentence-transformers."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit.core.ragged import Ragged
from irkit.core.representation import Dense, concat
from irkit.core.scoring import score
from irkit.errors import BadTypeError, BadValueError, IrkitError, StorageError
from irkit.heads import Normalize, PooledHead, Projection
from irkit.model import Model, hardware, pipeline
from irkit.model.parallel import encode_in_processes

WORDS = ["search", "the index", "a model of text", "", "vector " * 30, "neural?", "on the token"]


@pytest.fixture
def model(tiny_bert: Path) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a bare encoder
        return Model.from_pretrained(tiny_bert, device="cpu")


# ---- heads -------------------------------------------------------------------------------------

POOLING = {
    "cls": lambda rows, skip: rows[0],
    "lasttoken": lambda rows, skip: rows[-1],
    "max": lambda rows, skip: rows.max(0).values,
    "mean": lambda rows, skip: rows.mean(0),
    "mean_sqrt_len_tokens": lambda rows, skip: rows.sum(0) / len(rows) ** 0.5,
    "weightedmean": lambda rows, skip: (
        torch.stack([row * (i + 1 + skip) for i, row in enumerate(rows)]).sum(0)
        / sum(i + 1 + skip for i in range(len(rows)))
    ),
}
lengths = st.lists(st.integers(0, 7), min_size=0, max_size=6)


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from(sorted(POOLING)), st.integers(0, 3), st.booleans(), st.integers(0, 2**31))
def test_pooling_is_what_its_name_says(sizes, mode, prompt, include_prompt, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = Ragged(torch.randn(sum(sizes), 5, generator=generator), torch.tensor(sizes, dtype=torch.int64))
    head = PooledHead(5, mode, include_prompt=include_prompt)
    got = head(hidden, hidden, prompt).values
    skip = 0 if include_prompt else prompt
    rows = [row[skip:] for row in hidden]
    wanted = [POOLING[mode](row, skip) if len(row) else torch.zeros(5) for row in rows]
    assert got.shape == (len(sizes), 5)
    if wanted:
        torch.testing.assert_close(got, torch.stack(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", sorted(POOLING))
def test_gradients_of_heads(mode):
    torch.manual_seed(0)
    head = PooledHead(
        3, [mode, "mean"], [Projection(6, 4, activation=torch.nn.Tanh(), residual="learned"), Normalize()]
    ).double()
    rows = Ragged(torch.zeros(9), torch.tensor([4, 0, 5]))
    values = torch.randn(9, 3, dtype=torch.double, requires_grad=True)
    # the empty row is a point where normalisation has no derivative
    assert torch.autograd.gradcheck(lambda v: head(rows.with_values(v), rows).values[[0, 2]], values)


def test_heads_work_in_float32_on_lower_precision():
    rows = Ragged(torch.randn(300, 4).bfloat16(), torch.tensor([300]))
    exact = rows.values.double().mean(0)
    got = PooledHead(4)(rows, rows).values
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[0].double(), exact, rtol=1e-5, atol=1e-6)


def test_heads_that_cannot_be():
    with pytest.raises(BadValueError, match="unknown pooling median, expected cls"):
        PooledHead(4, "median")
    with pytest.raises(BadValueError, match=r"unknown pooling eos.*lasttoken is the end token if"):
        PooledHead(4, "eos")
    with pytest.raises(BadValueError, match="takes vectors of width 5, but what precedes it gives 8"):
        PooledHead(4, ["cls", "mean"], [Projection(5, 2)])


# ---- batches -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 64))
def test_steps_hold_every_row_once_within_the_budget(sizes, budget):
    rows = torch.tensor(sizes, dtype=torch.int64)
    steps = pipeline.plan_steps(rows, budget)
    assert sorted(torch.cat(steps).tolist()) == list(range(len(sizes)))
    for step in steps:
        assert len(step) == 1 or int(rows[step].sum()) <= budget
    flat = rows[torch.cat(steps)].tolist()
    assert flat == sorted(sizes, reverse=True)
    for one, two in pairwise(steps):  # no step could have taken the next row
        assert int(rows[one].sum() + rows[two[0]]) > budget


def test_ahead_keeps_order_and_stays_one_ahead():
    log: list[str] = []

    def items() -> Iterator[int]:
        for number in range(5):
            log.append(f"read {number}")
            yield number

    results = pipeline.ahead(lambda number: number * number, items())
    assert next(results) == 0
    assert log == ["read 0", "read 1"]
    assert list(results) == [1, 4, 9, 16]
    with pytest.raises(ZeroDivisionError):
        list(pipeline.ahead(lambda number: 1 // number, [1, 0, 2]))


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.sampled_from(WORDS), max_size=12), budget=st.integers(1, 80), size=st.integers(1, 5))
def test_a_vector_does_not_depend_on_its_batch(tiny_model, texts, budget, size):
    tiny_model.tokens_per_step = budget
    together = concat(tiny_model.stream_representations(texts, "query", chunk_size=size))
    tiny_model.tokens_per_step = None
    assert len(together) == len(texts)
    for text, row in zip(texts, together.values, strict=True):
        alone = tiny_model.encode_representation([text], "query").values[0]
        torch.testing.assert_close(row, alone, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def tiny_model(tiny_bert: Path) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return Model.from_pretrained(tiny_bert, device="cpu")


# ---- encode ------------------------------------------------------------------------------------


def test_one_text_several_texts_no_text(model):
    many = model.encode(WORDS)
    assert isinstance(many, np.ndarray)
    assert (many.shape, many.dtype) == ((7, 32), np.float32)
    one = model.encode(WORDS[1])
    assert one.shape == (32,)
    np.testing.assert_allclose(one, many[1], atol=1e-6)
    assert model.encode([]).shape == (0, 32)
    np.testing.assert_array_equal(model.encode(text for text in WORDS), many)
    tensor = model.encode(WORDS, convert_to_tensor=True)
    assert isinstance(tensor, torch.Tensor)
    assert not tensor.is_inference()
    np.testing.assert_array_equal(tensor.numpy(), many)


def test_prompts(model):
    model.prompts |= {"query": "search ", "odd": "vector "}
    model.default_prompt_name = "odd"

    def with_text(prefix: str) -> Any:
        return pytest.approx(model.encode([prefix + word for word in WORDS], prompt=""), abs=1e-6)

    assert model.encode(WORDS) == with_text("vector ")
    assert model.encode_query(WORDS) == with_text("search ")
    assert model.encode_document(WORDS) == with_text("")
    assert model.encode_document(WORDS, prompt_name="query") == with_text("search ")
    assert model.encode_query(WORDS, prompt="a ") == with_text("a ")
    assert model.encode_query(WORDS, prompt="a ", prompt_name="odd") == with_text("a ")
    assert model.encode_representation(WORDS, "query").values.numpy() == pytest.approx(
        model.encode_query(WORDS, normalize_embeddings=True), abs=1e-6
    )
    with pytest.raises(BadValueError, match="no prompt is named 'passage', there are query, document, odd"):
        model.encode(WORDS, prompt_name="passage")


def test_truncation_and_normalisation(model):
    whole = model.encode(WORDS)
    np.testing.assert_array_equal(model.encode(WORDS, truncate_dim=5), whole[:, :5])
    short = model.encode(WORDS, truncate_dim=5, normalize_embeddings=True)
    np.testing.assert_allclose(short, whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1)[:, None], atol=1e-6)
    model.truncate_dim = 4
    assert model.dim == 4
    np.testing.assert_array_equal(model.encode(WORDS), whole[:, :4])
    np.testing.assert_array_equal(model.encode(WORDS, truncate_dim=9), whole[:, :9])
    assert model.encode_representation(WORDS, "document").values.norm(dim=1).numpy() == pytest.approx(
        np.ones(7)
    )
    with pytest.raises(BadValueError, match="encode: truncate_dim is 0; expected a whole number from 1 to"):
        model.encode(WORDS, truncate_dim=0)


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        ([*["fine"] * 3000, None], "text 3000 is NoneType"),
        (["fine", 7], "text 1 is int"),
        (7, "several strings, got int"),
        (None, "several strings, got NoneType"),
    ],
)
def test_what_is_not_text(model, texts, problem, monkeypatch):
    rows = lambda self, tokens, *_: lambda: Dense(torch.zeros(len(tokens), 32))  # noqa: E731
    monkeypatch.setattr("irkit.model.pipeline.Pipeline.begin", rows)
    with pytest.raises(BadTypeError, match=problem):
        model.encode(texts)
    with pytest.raises(BadTypeError, match="one string"):
        model.encode_representation("one string", "query")


def test_representations_score_as_the_model_compares(model):
    queries, documents = WORDS[:3], WORDS[3:]
    for name in ("cosine", "dot"):
        model.similarity_name = name
        scores = score(
            model.encode_representation(queries, "query"), model.encode_representation(documents, "document")
        )
        wanted = model.similarity(model.encode_query(queries), model.encode_document(documents))
        torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-5)
    for name in ("euclidean", "manhattan"):
        model.similarity_name = name
        with pytest.raises(BadValueError, match=f"similarity of the model is {name}, no inner product"):
            model.encode_representation(queries, "query")


def test_streams(model):
    read: list[str] = []

    def texts() -> Iterator[str]:
        for word in WORDS:
            read.append(word)
            yield word

    done: list[int] = []
    stream = model.stream_representations(texts(), "document", chunk_size=2, progress=done.append)
    first = next(stream)
    assert len(read) == 4  # the chunk in hand and the next
    parts = [first, *stream]
    assert [len(part) for part in parts] == [2, 2, 2, 1]
    assert sum(done) == 7
    whole = model.encode_representation(WORDS, "document")
    torch.testing.assert_close(concat(parts).values, whole.values, rtol=0, atol=1e-6)
    assert [len(part) for part in model.stream_representations([], "query")] == [0]
    with pytest.raises(BadValueError, match="chunk_size must be at least 1"):
        list(model.stream_representations(WORDS, "query", chunk_size=0))
    with pytest.raises(BadValueError, match="no prompt is named 'side'"):
        model.encode_representation(WORDS, "side")


def test_positions_of_the_encoder_limit_the_text(model):
    longer = Model(model.tokenizer, model.encoder, model.head)
    longer.tokenizer.max_length = None
    assert Model(model.tokenizer, model.encoder, model.head).tokenizer.max_length == 64
    assert model.encode("the " * 999).shape == (32,)


def test_training_sees_gradients(model):
    model(model.tokenizer(WORDS)).values.sum().backward()
    assert all(parameter.grad is not None for parameter in model.encoder.parameters())


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities(model, name):
    a, b = np.random.default_rng(0).normal(size=(2, 4, 6)).astype(np.float32)
    model.similarity_name = name
    wanted = np.array(
        [
            [
                {
                    "cosine": x @ y / np.linalg.norm(x) / np.linalg.norm(y),
                    "dot": x @ y,
                    "euclidean": -np.linalg.norm(x - y),
                    "manhattan": -np.abs(x - y).sum(),
                }[name]
                for y in b
            ]
            for x in a
        ]
    )
    matrix = model.similarity(a, torch.from_numpy(b))
    assert isinstance(matrix, torch.Tensor)
    np.testing.assert_allclose(matrix.numpy(), wanted, atol=1e-5)
    np.testing.assert_allclose(model.similarity_pairwise(list(a), b).numpy(), wanted.diagonal(), atol=1e-5)
    np.testing.assert_allclose(
        model.similarity(a[0], list(torch.from_numpy(b))).numpy(), wanted[:1], atol=1e-5
    )
    with pytest.raises(BadValueError, match="widths 6 and 5"):
        model.similarity(a, b[:, :5])
    with pytest.raises(BadValueError, match="got 4 and 3 vectors"):
        model.similarity_pairwise(a, b[:3])
    with pytest.raises(BadValueError, match="expected vectors"):
        model.similarity(a[None], b)


def test_parts_that_do_not_exist(model):
    parts = (model.tokenizer, model.encoder, model.head)
    with pytest.raises(BadValueError, match="similarity 'maxsim', expected one of cosine"):
        Model(*parts, similarity_name="maxsim")
    with pytest.raises(BadValueError, match="similarity 'maxsim', expected one of cosine"):
        model.similarity_name = "maxsim"
    assert model.similarity_name == "cosine"
    with pytest.raises(BadValueError, match="no prompt is named 'odd'"):
        Model(*parts, default_prompt_name="odd")
    with pytest.raises(BadValueError, match="device 'tpu9': expected cpu"):
        model.encode(WORDS, device="tpu9")


# ---- identity and precision --------------------------------------------------------------------


def test_fingerprint_follows_weights_head_and_tokenizer(model, tiny_bert):
    first = model.fingerprint
    assert len(first) == 32
    model.tokenizer.max_length = 9
    model.prompts["query"] = "search "
    assert model.fingerprint == first  # these change texts, not what the vectors mean
    model.head = PooledHead(32, "cls")
    assert model.fingerprint != first
    model.head = PooledHead(32, "mean", [Normalize()])
    assert model.fingerprint != first
    model.head = PooledHead(32, "mean")
    model.tokenizer.backend.add_tokens(["ultramarine"])
    assert model.fingerprint != first
    with torch.no_grad():
        other = Model(model.tokenizer, model.encoder, model.head)
        before = other.fingerprint
        next(other.encoder.parameters())[0, 0] += 1
    assert other.fingerprint != before


@pytest.mark.filterwarnings("ignore:.*taking the mean:UserWarning")
@pytest.mark.filterwarnings("ignore:bfloat16 on cpu:UserWarning")
def test_bfloat16_is_near_and_the_same_model(model, tiny_bert):
    half = Model.from_pretrained(tiny_bert, device="cpu", dtype="bfloat16")
    kinds = {("norm" in name, weight.dtype) for name, weight in half.encoder.named_parameters()}
    assert kinds == {(False, torch.bfloat16), (True, torch.float32)}
    assert half.fingerprint == model.fingerprint
    got, exact = half.encode(WORDS), model.encode(WORDS)
    assert got.dtype == np.float32
    assert half.similarity_pairwise(got, exact).min() > 0.99
    assert not np.array_equal(got, exact)


@pytest.mark.filterwarnings("ignore:.*taking the mean:UserWarning")
def test_auto_takes_bfloat16_only_where_it_is_faster_and_harmless(tiny_bert, monkeypatch):
    def chosen() -> torch.dtype:
        return next(Model.from_pretrained(tiny_bert, device="cpu", dtype="auto").encoder.parameters()).dtype

    monkeypatch.setattr(hardware, "prefers_bfloat16", lambda _: True)
    assert chosen() == torch.bfloat16
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "cosine_similarity", lambda *_: torch.tensor([1, 0.9989]))
        assert chosen() == torch.float32
    monkeypatch.setattr(hardware, "prefers_bfloat16", lambda _: False)
    assert chosen() == torch.float32
    with pytest.warns(UserWarning, match="bfloat16 on cpu: it multiplies float32 faster"):
        Model.from_pretrained(tiny_bert, device="cpu", dtype="bfloat16")


def test_a_cpu_without_instructions_for_bfloat16_prefers_float32(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": True, "avx512_bf16": False})
    assert not hardware.prefers_bfloat16(torch.device("cpu"))


@pytest.mark.filterwarnings("ignore:.*taking the mean:UserWarning")
def test_int8_is_near_and_the_same_model_but_cannot_be_saved(model, tiny_bert, tmp_path):
    small = Model.from_pretrained(tiny_bert, device="cpu", dtype="int8")
    assert small.fingerprint == model.fingerprint
    got, exact = small.encode(WORDS), model.encode(WORDS)
    assert small.similarity_pairwise(got, exact).min() > 0.98
    assert np.array_equal(small.encode(WORDS[:1]), got[:1])  # not rounded by what is beside it
    assert not np.array_equal(got, exact)
    with pytest.raises(BadValueError, match="the weights are int8"):
        small.save_pretrained(tmp_path / "small")
    assert not (tmp_path / "small").exists()


@pytest.mark.filterwarnings("ignore:.*taking the mean:UserWarning")
def test_dtypes_that_cannot_be(tiny_bert):
    with pytest.raises(BadValueError, match="dtype 'float16': expected one of float32, bfloat16, int8, auto"):
        Model.from_pretrained(tiny_bert, device="cpu", dtype="float16")


# ---- several devices ---------------------------------------------------------------------------


def test_a_process_a_device(model):
    texts = [f"{word} {number}" for number in range(5) for word in WORDS]
    sizes, done = [len(texts[i : i + 4]) for i in range(0, len(texts), 4)], list[int]()
    pipeline = model.pipeline("document", "the ")
    parts = list(encode_in_processes(pipeline, ["cpu", "cpu"], iter(texts), 4, progress=done.append))
    assert [len(part) for part in parts] == done == sizes
    np.testing.assert_allclose(concat(parts).values.numpy(), model.encode(texts, prompt="the "), atol=1e-6)
    assert multiprocessing.active_children() == []


def test_errors_of_processes_surface(model):
    model.tokenizer.max_length = None
    with pytest.raises(BadValueError, match="exceeds the 64 positions of the model"):
        model.encode(["fine", "the " * 99], device=["cpu"])
    assert multiprocessing.active_children() == []
    with pytest.raises(BadTypeError, match="text 1 is int"):
        model.encode(["fine", 1], device=["cpu"])
    with pytest.raises(IrkitError, match="a process died"):
        list(encode_in_processes(model.pipeline("document"), ["no such device"], ["text"], 1))
    assert multiprocessing.active_children() == []


# ---- the real thing ----------------------------------------------------------------------------


def read_real_texts(data_dir: Path, number: int) -> list[str]:
    """Texts of all lengths, and some that nobody expects."""

    def take(path: str, number: int) -> list[str]:
        with (data_dir / path).open(encoding="utf-8") as lines:
            read = (json.loads(line) for line, _ in zip(lines, range(number), strict=False))
            return [f"{document.get('title', '')} {document['text']}".strip() for document in read]

    odd = ["", " ", "👩‍👩‍👧 emoji 👍🏽 ✨", "the quick brown fox " * 2500, "x" * 50_000]
    texts = take("msmarco-dl19-pool/queries.jsonl", 40) + take("scifact/corpus.jsonl", 15)
    texts += take("msmarco-dl19-pool/corpus.jsonl", number - len(texts) - len(odd)) + odd
    assert (len(texts), max(map(len, texts))) == (number, 50_000)
    return texts


@pytest.mark.data
@pytest.mark.parametrize("number", [70, pytest.param(200, marks=pytest.mark.slow)])
def test_minilm_is_what_sentence_transformers_computes(minilm, data_dir, number, tmp_path):
    real_texts = read_real_texts(data_dir, number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = pytest.importorskip("sentence_transformers")
        theirs = peer.SentenceTransformer(minilm, device="cpu")
    model = Model.from_pretrained(minilm, device="cpu")
    got = model.encode_document(real_texts)
    wanted = theirs.encode_document(real_texts)
    assert np.abs(got - wanted).max() <= 1e-5
    assert np.abs(model.encode_query(real_texts[:60]) - theirs.encode_query(real_texts[:60])).max() <= 1e-5
    assert int(model.tokenizer(real_texts).lengths.max()) == 256  # some texts were cut
    for place in (0, 40, 60, number - 5, number - 2):  # a vector does not depend on its batch
        assert np.abs(model.encode(real_texts[place]) - got[place]).max() <= 1e-6

    model.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(str(tmp_path / "theirs"), create_model_card=False)
    some = real_texts[:20]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opened = peer.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    np.testing.assert_array_equal(opened.encode(some), theirs.encode(some))
    assert opened.max_seq_length == theirs.max_seq_length == 256
    again = Model.from_pretrained(tmp_path / "theirs", device="cpu")
    np.testing.assert_array_equal(again.encode(some), model.encode(some))
    assert again.fingerprint == model.fingerprint


@pytest.mark.data
def test_minilm_in_lower_precision(minilm, data_dir):
    some = read_real_texts(data_dir, 200)[::8]
    model = Model.from_pretrained(minilm, device="cpu")
    exact = model.encode(some)
    auto = Model.from_pretrained(minilm, device="cpu", dtype="auto")
    expected = torch.bfloat16 if hardware.prefers_bfloat16(torch.device("cpu")) else torch.float32
    assert next(auto.encoder.parameters()).dtype == expected
    assert model.similarity_pairwise(auto.encode(some), exact).min() >= 0.999
    assert auto.fingerprint == model.fingerprint


def test_minilm_makes_sense(minilm):
    model = Model.from_pretrained(minilm, device="cpu")
    passages = [
        "Bears sleep through the winter.",
        "Copper conducts electricity.",
        "Bread needs yeast to rise.",
    ]
    for query, best in [("hibernation", 0), ("which metal carries current", 1), ("baking", 2)]:
        assert (
            int(model.similarity(model.encode_query(query), model.encode_document(passages)).argmax()) == best
        )


def test_missing_model_is_a_storage_error():
    with pytest.raises(StorageError):
        Model.from_pretrained("/nonexistent/model")


@pytest.mark.slow
def test_other_architectures_travel_to_processes(tiny_bert, tmp_path):
    from transformers import ElectraConfig, ElectraModel

    path = tmp_path / "electra"
    shutil.copytree(tiny_bert, path)
    (path / "model.safetensors").unlink()
    size = json.loads((tiny_bert / "config.json").read_text())["vocab_size"]
    shape = {"embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ElectraModel(ElectraConfig(vocab_size=size, intermediate_size=64, **shape)).save_pretrained(path)
    with pytest.warns(UserWarning, match="taking the mean"):
        model = Model.from_pretrained(path, device="cpu")
    np.testing.assert_allclose(model.encode(WORDS, device=["cpu"]), model.encode(WORDS), atol=1e-6)
    with pytest.raises(BadValueError, match="int8: not for an encoder of type electra"):
        hardware.with_dtype(model.encoder, model.head, model.tokenizer, "int8")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", sorted(POOLING))
def test_a_gpu_gives_the_vectors_of_the_cpu(model, mode):
    model.head = PooledHead(32, mode, [Projection(32, 8), Normalize()], include_prompt=False)
    wanted = model.encode(WORDS, prompt="the ")
    got = model.encode(WORDS, prompt="the ", device="cuda", convert_to_tensor=True)
    assert got.device.type == "cuda"
    np.testing.assert_allclose(got.cpu().numpy(), wanted, atol=1e-4)


@pytest.mark.slow
def test_a_script_that_cannot_be_imported_gets_an_error_rather_than_hang(minilm: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # without `if __name__ == "__main__":`; the tokenizer outgrows a pipe
    script.write_text(
        f"from irkit import Model\nModel.from_pretrained({minilm!r}).encode(['a'], device=['cpu', 'cpu'])\n"
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert "a process died" in result.stderr.splitlines()[-1]


def test_devices_that_are_none(tiny_bert: Path) -> None:
    for name in ("mps", "meta", "cuda:99", "gpu", 1.5):
        with pytest.raises(BadValueError, match="device"):
            Model.from_pretrained(tiny_bert, device=name)
    with pytest.warns(UserWarning, match="mean"):
        model = Model.from_pretrained(tiny_bert)
    with pytest.raises(BadValueError, match="empty list"):
        model.encode(["a"], device=[])
    for names in ([None], ["cpu", None], [1.5], [["cpu"]], [True], ("cpu", ""), b"cpu"):
        with pytest.raises(BadValueError, match="device"):
            model.encode(["a"], device=names)
        for make in (Model.from_pretrained, Model.multi_vector, Model.sparse):
            with pytest.raises(BadValueError, match="device"):  # before anything is loaded
                make("no such model", device=names)
        with pytest.raises(BadValueError, match="device"):
            Model.with_head("dense", "no such model", device=names)
    lexical = Model.sparse(tiny_bert, queries="lexical", device="cpu")
    with pytest.raises(BadValueError, match="device None"):
        lexical.encode_query(["a"], device=[None])
    assert model.similarity([], []).shape == (0, 0)
