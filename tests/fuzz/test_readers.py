"""Files and filters that others wrote: an error that says where, or what can be read of them."""

from __future__ import annotations

import functools
import gzip
import io
import json
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from irkit import Dense, MultiVector, Ragged, Retriever, Run, Sparse, evaluate
from irkit.cli.recipe_options import IndexRecipe
from irkit.cli.search import parse_filters
from irkit.config import read_mapping, with_overrides
from irkit.data import Document, check_documents, read_documents, read_qrels, read_queries
from irkit.data.vector_files import write_vectors
from irkit.index.index_kinds import INDEX_KINDS, index_config
from irkit.serve.serve_config import ServeConfig
from irkit.study import StudyConfig
from irkit.training.pretraining.pretrain_recipe import PretrainRecipe
from irkit.training.train_recipe import TrainRecipe
from irkit.training.training_data import read_training_rows
from irkit.vocabulary.transfer_recipe import VocabularyRecipe

EXAMPLES = Path(__file__).parents[2] / "examples"

Fuzz = Callable[..., None]


def _documents(path: Path) -> None:
    """Read them as a build does, which reads them twice."""
    source = read_documents(path)
    count = check_documents(source)
    found = list(source)
    assert count == len(found)
    for document in found:
        assert document.id
        document.full_text.encode()
        json.dumps(document.metadata, allow_nan=False)
        if isinstance(document.vector, np.ndarray):
            assert np.isfinite(document.vector).all()


def _queries(path: Path) -> None:
    for query in read_queries(path):
        query.text.encode()


def _run(path: Path) -> None:
    run = Run.read(path)
    evaluate(
        run, {name: {"d1": 1, "d2": 0} for name in run.query_ids} or {"q": {"d": 1}}, "nDCG@10 map bpref"
    )


def _qrels(path: Path) -> None:
    qrels = read_qrels(path)
    evaluate({name: {"d1": 1.0, "d9": 0.5} for name in qrels}, qrels, "nDCG@10 AP R@5 bpref")


def _recipe(path: Path) -> None:
    IndexRecipe.resolve(str(path), {}, ["chunk_size=5"])


def _training(path: Path) -> None:
    for row in read_training_rows(path):
        json.dumps(row.positives)


def _parquet() -> bytes:
    stream = io.BytesIO()
    columns = {"id": ["d1", "d2"], "text": ["about it", "more"], "n": [1.5, None], "tags": [["a"], []]}
    pq.write_table(pa.table(columns), stream, compression="none")
    return stream.getvalue()


TEXT = b"""{"_id": "d1", "title": "One", "text": "about it", "metadata": {"year": 2001, "tags": ["a", null]}}
{"id": 7, "contents": "more \\u00fc\\ud83d\\ude00", "lang": "de", "n": -1.5e3}
{"docid": "d3", "text": "x", "vector": {"bear": 2.0, "winter": 0.5}}
{"_id": "d4", "text": "", "vector": [[0.5, 1.0], [2.0, -3.0]]}
"""
TOPICS = b"""<top>
<num> Number: 301
<title> International Organized Crime
<desc> Description: Identify organizations
</top>
<top>
<num> Number: 302 <title> Polio &amp; more <!-- no --> <narr> x </top>
"""
DOCS = b"""<DOC>
<DOCNO> FT911-1 </DOCNO>
<HEADLINE> FT 14 MAY 91 </HEADLINE>
<TEXT>
Some text &lt;here&gt; caf\xe9
</TEXT>
</DOC>
<DOC><DOCNO>2</DOCNO><TEXT>more</DOC>
"""
RECIPE = b"""model: bm25
corpus: corpus.jsonl
index: {kind: inverted, dtype: uint8, effort: 0.3, mode: auto}
bm25: &a {k1: 1.2, b: 0.75, stop_words: [the, of]}
dtype: auto
chunk_size: 1_024
"""
READERS: dict[str, tuple[str, bytes, Callable[[Path], None]]] = {  # file, a good one, what reads it
    "jsonl": ("a.jsonl", TEXT, _documents),
    "jsonl_gz": ("a.jsonl.gz", gzip.compress(TEXT, mtime=0), _documents),
    "tsv": ("a.tsv", b"_id\ttitle\ttext\nd1\tOne\tabout it\nd2\t\tmore\n", _documents),
    "msmarco": ("a.tsv", b"D1\thttps://a\tOne\tabout\nD2\thttps://b\tTwo\tmore\n", _documents),
    "csv": ("a.csv", b'id,text,n,ok\nd1,"a ""b"", c\nd",1.5,true\nd2,more,,x\n', _documents),
    "lines": ("a.txt", "one line\n\nanother ü\r\n".encode(), _documents),
    "queries": ("q.jsonl", b'{"_id": "q1", "text": "what"}\n{"qid": 2, "query": "who"}\n', _queries),
    "topics": ("topics", TOPICS, _queries),
    "markup": ("docs", DOCS, _documents),
    "qrels": ("q.trec", b"q1 0 d1 1\nq1 0 d2 0\nq2 0 d1 2\nq2 0 d9 -1\n", _qrels),
    "qrels_beir": ("q.tsv", b"query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t2\n", _qrels),
    "run": ("r.trec", b"q1 Q0 d1 1 12.5 tag\nq1 Q0 d2 2 1e-3 tag\nq2 Q0 d9 1 -0.5 tag\n", _run),
    "run_jsonl": ("r.jsonl", b'{"query_id": "q", "doc_id": "d1", "score": 1.5}\n' * 1, _run),
    "recipe": ("r.yaml", RECIPE, _recipe),
    "parquet": ("a.parquet", _parquet(), _documents),
    **{
        f"training_{name}": (f"{name}{suffix}", content, _training)
        for name, suffix, content in (
            ("tuples", ".tsv", b"a query\tyes\tno\nanother\tyes\tno\n"),
            ("vienna", ".tsv", b"1.5\t-0.5\tq\td\te\n2\t1\tq\td\te\n"),
            ("columns", ".jsonl", b'{"query": "a", "positive": "yes", "negative": "no"}\n' * 2),
            ("flagembedding", ".jsonl", b'{"query": "a", "pos": ["yes"], "neg": ["no", "never"]}\n' * 2),
            ("nway", ".jsonl", b'["a query", ["yes", 0.5], ["no", -1]]\n' * 2),
            ("pickle", ".pkl", pickle.dumps({1: {2: 0.5, 3: -1.0}, 4: {5: 2.0}})),
        )
    },
}


def _vectors() -> dict[str, bytes]:
    rows = torch.arange(12.0).view(6, 2)
    kinds = {
        "dense": Dense(rows[:3]),
        "multi_vector": MultiVector(Ragged(rows, torch.tensor([3, 1, 2]))),
        "sparse": Sparse.from_dense(rows[:3]),
    }
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, vectors in kinds.items():
            write_vectors(Path(folder, "v.safetensors"), iter([(["a", "b", "ü"], vectors)]))
            found[f"{kind}.safetensors"] = Path(folder, "v.safetensors").read_bytes()
        write_vectors(Path(folder, "v.npy"), iter([(["a", "b", "c"], kinds["dense"])]))
        found["dense.npy"] = Path(folder, "v.npy").read_bytes()
    return found


VECTORS = _vectors()


def _try(fuzz: Fuzz, mutate: SimpleNamespace, name: str, file: str, good: bytes, read: Any) -> None:
    def make(random: Random) -> list[Any]:
        edits = [mutate.choose(random, good) for _ in range(random.randint(1, 3))]
        return edits if random.random() < 0.7 else [_a_word(random, good), *edits[1:]]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, file)

        def run(case: list[Any]) -> str:
            path.write_bytes(functools.reduce(mutate.apply, case, good))
            read(path)
            return "different"

        path.write_bytes(good)
        read(path)  # as it is, and what it imports
        fuzz(f"reader_{name}", make, run)


_WORDS = (
    *(b"\n", b"\t", b" ", b'"', b"\\", b"\x00", b"\xff", b"{", b"[[", b"null", b"true", b"-1", b"9" * 30),
    *(b"NaN", b"1e999", b"\xed\xa0\x80", b"\\ud800", b"\xef\xbb\xbf", b"&#55296;", b"*a", b"!!python/name:x"),
    *(b"<top>", b"<DOC>"),
)


def _a_word(random: Random, good: bytes) -> list[Any]:
    """Write a word that means something in one of the formats."""
    return ["write", random.randrange(len(good)), random.choice(_WORDS).hex()]


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:evaluate. no judged")
@pytest.mark.parametrize("name", READERS)
def test_readers(fuzz: Fuzz, mutate: SimpleNamespace, name: str) -> None:
    _try(fuzz, mutate, name, *READERS[name])


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(fuzz: Fuzz, mutate: SimpleNamespace, name: str) -> None:
    _try(fuzz, mutate, name.replace(".", "_"), name, VECTORS[name], _documents)


def test_filters(fuzz: Fuzz, mutate: SimpleNamespace, tmp_path: Path) -> None:
    """In Python, and on the command line."""
    metadata = [
        {"year": 2001, "lang": "de"},
        {"year": 1.5, "tags": ["a", None]},
        {"lang": None, "open": True},
    ]
    documents = [Document(f"d{i}", "word", metadata=some) for i, some in enumerate(metadata)]
    retriever = Retriever.build("bm25", documents, tmp_path / "index")
    good = {"year": {">=": 2000, "<": 2010}, "lang": ["de", "en"], "tags": {"!=": "a"}, "_id": ["d1", "d2"]}

    def run(case: list[Any]) -> str:
        given = functools.reduce(mutate.apply, case, good)
        line = parse_filters([json.dumps(given)] if isinstance(given, dict) else [str(given)])
        for condition in (given, line):
            found = {hit.id for hit in retriever.search("word", filter=condition)}
            assert found <= {"d0", "d1", "d2"}
        return "different"

    run([["set", ["tags"], None]])
    fuzz("filters", lambda random: [mutate.choose(random, good) for _ in range(random.randint(1, 2))], run)


SERVED = {"paths": ["a=b"], "port": 80, "keys": [["read", "0" * 64]], "limits": {"k": 10, "seconds": 1.5}}
TRAINED: Any = {
    "model": {"kind": "dense", "name": "x"},
    "data": {"sources": [{"queries": "q", "documents": "d", "weight": 1.0}]},
    "losses": [{"kind": "contrastive", "temperature": 0.05}],
    "train": {"epochs": 1, "learning_rate": 1e-5},
}


def _written(path: str) -> Any:
    return read_mapping(EXAMPLES / path)


CONFIGURATIONS: dict[str, tuple[Any, Callable[[Any], object]]] = {  # a good one, and what reads it
    "index": ({"kind": "faiss", "factory": "hnsw", "ef_search": 64, "refine": 2, "seed": None}, index_config),
    **{
        f"index_{kind}": (INDEX_KINDS[kind].config().model_dump(mode="json"), index_config)
        for kind in ("flat", "dense", "inverted", "plaid", "muvera")
    },
    "training": (TRAINED, partial(TrainRecipe.parse, source="recipe")),
    "serve": (SERVED, partial(ServeConfig.parse, source="serve")),
    "train": (_written("recipes/tite_finetuning.yaml"), TrainRecipe.resolve),
    "pretrain": (_written("recipes/tite_pretraining.yaml"), PretrainRecipe.resolve),
    "transfer": (_written("recipes/vocabulary_transfer.yaml"), VocabularyRecipe.resolve),
    "study": (
        _written("studies/tite_table2.yaml") | {"recipe": _written("recipes/tite_pretraining.yaml")},
        lambda study: [*StudyConfig.resolve(study, ["train.seed=1"]).recipes()],
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations(fuzz: Fuzz, mutate: SimpleNamespace, name: str) -> None:
    """Keys and values of recipes, and the settings that are given with them."""
    good, read = CONFIGURATIONS[name]

    def run(case: list[Any]) -> str:
        given = functools.reduce(mutate.apply, case, good)
        read(given)
        read(with_overrides(given, ["seed=1", "train.epochs=2"]))
        return "different"

    if name not in ("index", "training"):
        read(good)
    fuzz(f"configuration_{name}", lambda random: [mutate.choose(random, good)], run)
