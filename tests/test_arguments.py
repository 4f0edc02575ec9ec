"""Wrong values for every argument of the public interface: irkit's own error, and what is stored stays."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from irkit import Dense, Hybrid, Model, MultiVector, Ragged, Retriever, Run, Sparse, evaluate, fuse, score
from irkit.data import Document, Query, check_documents, read_documents, read_qrels, read_queries
from irkit.encoder_free import BM25, RM3, Vectors, encoder_free_model
from irkit.errors import IrkitError
from irkit.evaluation.significance import compare
from irkit.evaluation.trec import relevance_strings
from irkit.index import Documents, Store, compact, create_index, index_config, open_index
from irkit.model import EncodeOptions
from irkit.retrieval.selection import RankOptions, SearchOptions
from irkit.shards import rewrite

Call = Callable[[SimpleNamespace, Any], object]


def _deep(kind: str) -> Any:
    value: Any = 1
    for _ in range(5000):
        value = [value] if kind == "list" else {"a": value}
    return value


WRONG: dict[str, Any] = {
    "None": None,
    "-1": -1,
    "0": 0,
    "2.5": 2.5,
    "'5'": "5",
    "nan": math.nan,
    "inf": math.inf,
    "True": True,
    "bytes": b"5",
    "surrogate": "\ud800",
    "nul": "a\0b",
    "huge": 10**400,
    "object": object(),
    "[]": [],
    "{}": {},
    "[None]": [None],
    "{None}": {None: None},
    "{str: None}": {"a": None},
    "deep list": _deep("list"),
    "deep dict": _deep("dict"),
    "array": np.ones((2, 2)),
    "ragged list": [[1.0], [1.0, 2.0]],
}

TEXTS = {"a": "neural search", "b": "a token model", "c": "text of the index"}
RUN = {"q": {"a": 1.0, "b": 0.5}}


CALLS: dict[str, Call] = {}


def add(name: str, call: Call) -> None:
    CALLS[name] = call


R = Run.from_dict(RUN)
add("build model", lambda e, x: Retriever.build(x, TEXTS, e.new))
add("build documents", lambda e, x: Retriever.build("bm25", x, e.path, overwrite=True))
add("build path", lambda e, x: Retriever.build("bm25", TEXTS, x))
add("build index", lambda e, x: Retriever.build("bm25", TEXTS, e.path, index=x, overwrite=True))
add("build chunk_size", lambda e, x: Retriever.build("bm25", TEXTS, e.path, chunk_size=x, overwrite=True))
V = {"a": [1.0]}
add(
    "build vectors chunk_size",
    lambda e, x: Retriever.build("vectors", V, e.path, chunk_size=x, overwrite=True),
)
add(
    "build model chunk_size",
    lambda e, x: Retriever.build(e.model, TEXTS, e.path, chunk_size=x, overwrite=True),
)
add("build overwrite", lambda e, x: Retriever.build("bm25", TEXTS, e.path, overwrite=x))
add("build progress", lambda e, x: Retriever.build("bm25", TEXTS, e.path, overwrite=True, progress=x))
add("load path", lambda e, x: Retriever.load(x))
add("load model", lambda e, x: Retriever.load(e.path, x))
add("load device", lambda e, x: Retriever.load(e.path, device=x).model)
add("load dtype", lambda e, x: Retriever.load(e.path, dtype=x).model)
add("load verify", lambda e, x: Retriever.load(e.path, verify=x))
add("save", lambda e, x: e.words.save(x))
for kind in ("words", "vectors", "impacts"):

    def g(e, kind=kind):
        return getattr(e, kind)

    v = {"words": None, "vectors": [1.0, 2.0], "impacts": {"x": 1.0}}[kind]
    q = {"words": "neural", "vectors": [1.0, 0.0], "impacts": {"x": 1.0}}[kind]
    add(f"{kind} search queries", lambda e, x, g=g: g(e).search(x))
    add(f"{kind} search [queries]", lambda e, x, g=g: g(e).search([x]))
    add(f"{kind} search k", lambda e, x, g=g, q=q: g(e).search(q, x))
    add(f"{kind} search filter", lambda e, x, g=g, q=q: g(e).search(q, 1, x))
    add(f"{kind} search filter key", lambda e, x, g=g, q=q: g(e).search(q, 1, {x: 1}))
    add(f"{kind} search filter value", lambda e, x, g=g, q=q: g(e).search(q, 1, {"year": x}))
    add(f"{kind} search filter sign", lambda e, x, g=g, q=q: g(e).search(q, 1, {"year": {x: 1}}))
    add(f"{kind} search filter value 2", lambda e, x, g=g, q=q: g(e).search(q, 1, {"year": {">": x}}))
    add(f"{kind} search filter in", lambda e, x, g=g, q=q: g(e).search(q, 1, {"year": {"in": [x]}}))
    add(f"{kind} search filter ids", lambda e, x, g=g, q=q: g(e).search(q, 1, [x]))
    add(f"{kind} search filter _id", lambda e, x, g=g, q=q: g(e).search(q, 1, {"_id": x}))
    add(f"{kind} search feedback", lambda e, x, g=g, q=q: g(e).search(q, 1, feedback=x))
    for o in SearchOptions.__annotations__ | RankOptions.__annotations__:
        add(f"{kind} search {o}", lambda e, x, g=g, q=q, o=o: g(e).search(q, 1, **{o: x}))
        add(f"{kind} run {o}", lambda e, x, g=g, q=q, o=o: g(e).run({"q": q}, 1, **{o: x}))
    add(f"{kind} run queries", lambda e, x, g=g: g(e).run(x))
    add(f"{kind} run query", lambda e, x, g=g: g(e).run({"q": x}))
    add(f"{kind} run id", lambda e, x, g=g, q=q: g(e).run([(x, q)]))
    add(f"{kind} run [q]", lambda e, x, g=g, q=q: g(e).run([x]))
    add(f"{kind} run k", lambda e, x, g=g, q=q: g(e).run({"q": q}, x))
    add(f"{kind} run filter", lambda e, x, g=g, q=q: g(e).run({"q": q}, 1, x))
    add(f"{kind} run feedback", lambda e, x, g=g, q=q: g(e).run({"q": q}, feedback=x))
    add(f"{kind} run progress", lambda e, x, g=g, q=q: g(e).run({"q": q}, progress=x))
    add(f"{kind} rerank queries", lambda e, x, g=g: g(e).rerank(x, ["a"]))
    add(f"{kind} rerank queries run", lambda e, x, g=g: g(e).rerank(x, Run.from_dict(RUN)))
    add(f"{kind} rerank candidates", lambda e, x, g=g, q=q: g(e).rerank(q, x))
    add(f"{kind} rerank [candidates]", lambda e, x, g=g, q=q: g(e).rerank(q, [x]))
    add(f"{kind} rerank [[candidates]]", lambda e, x, g=g, q=q: g(e).rerank([q], [x]))
    add(f"{kind} rerank k", lambda e, x, g=g, q=q: g(e).rerank(q, ["a"], x))
    add(f"{kind} rerank interaction", lambda e, x, g=g, q=q: g(e).rerank(q, ["a"], interaction=x))
    add(f"{kind} rerank teacher", lambda e, x, g=g, q=q: g(e).rerank(q, ["a"], teacher=x))
    add(f"{kind} rerank progress", lambda e, x, g=g, q=q: g(e).rerank({"q": q}, R, progress=x))
    add(f"{kind} explain query", lambda e, x, g=g: g(e).explain(x, "a"))
    add(f"{kind} explain document", lambda e, x, g=g, q=q: g(e).explain(q, x))
    add(f"{kind} add", lambda e, x, g=g: g(e).add(x))
    add(f"{kind} add [x]", lambda e, x, g=g: g(e).add([x]))
    add(f"{kind} add {{}}", lambda e, x, g=g: g(e).add({"new": x}))
    add(f"{kind} add ()", lambda e, x, g=g: g(e).add([(x, "text")]))
    add(f"{kind} add metadata", lambda e, x, g=g: g(e).add([{"_id": "new", "text": "x", "metadata": x}]))
    add(f"{kind} add metadata value", lambda e, x, g=g: g(e).add([{"_id": "new", "text": "x", "key": x}]))
    add(f"{kind} add vector", lambda e, x, g=g: g(e).add([{"_id": "new", "text": "x", "vector": x}]))
    add(
        f"{kind} add progress",
        lambda e, x, g=g, v=v: g(e).add({"new": {"text": "x", "vector": v}}, progress=x),
    )
    add(f"{kind} update", lambda e, x, g=g: g(e).update(x))
    add(f"{kind} update [x]", lambda e, x, g=g: g(e).update([x]))
    add(f"{kind} remove", lambda e, x, g=g: g(e).remove(x))
    add(f"{kind} remove [x]", lambda e, x, g=g: g(e).remove([x]))
    add(f"{kind} encode_representation items", lambda e, x, g=g: g(e).model.encode_representation(x, "query"))
    add(
        f"{kind} encode_representation [items]",
        lambda e, x, g=g: g(e).model.encode_representation([x], "document"),
    )
    add(f"{kind} encode_representation side", lambda e, x, g=g, q=q: g(e).model.encode_representation([q], x))
add("documents []", lambda e, x: e.words.documents[x])
add("documents in", lambda e, x: x in e.words.documents)
add("documents find", lambda e, x: e.words.documents.find(x))
add("documents find [x]", lambda e, x: e.words.documents.find([x]))
add("documents ids", lambda e, x: e.words.documents.ids(x))
add("documents ids [x]", lambda e, x: e.words.documents.ids([x]))
add("documents fetch", lambda e, x: e.words.documents.fetch(x))
add("documents filter", lambda e, x: e.words.documents.filter(x))
add("documents filter {x}", lambda e, x: e.words.documents.filter({x: 1}))
add("documents add", lambda e, x: e.words.documents.add(x))
add("documents add [x]", lambda e, x: e.words.documents.add([x]))
add("hybrid retrievers", lambda e, x: Hybrid(x))
add("hybrid [x]", lambda e, x: Hybrid([e.words, x]))
add("hybrid method", lambda e, x: Hybrid([e.words, e.words], x))
add("hybrid weights", lambda e, x: Hybrid([e.words, e.words], weights=x))
add("hybrid [weights]", lambda e, x: Hybrid([e.words, e.words], weights=[1, x]))
add("hybrid depth", lambda e, x: Hybrid([e.words, e.words], depth=x))
add("hybrid rrf_k", lambda e, x: Hybrid([e.words, e.words], rrf_k=x))
add("hybrid search", lambda e, x: Hybrid([e.words, e.words]).search(x))
add("hybrid search k", lambda e, x: Hybrid([e.words, e.words]).search("x", x))
add("hybrid search filter", lambda e, x: Hybrid([e.words, e.words]).search("x", 1, x))
for o in SearchOptions.__annotations__ | RankOptions.__annotations__:
    add(f"hybrid search {o}", lambda e, x, o=o: Hybrid([e.words, e.words]).search("token", 1, **{o: x}))
add("hybrid run", lambda e, x: Hybrid([e.words, e.words]).run(x))
add("hybrid run k", lambda e, x: Hybrid([e.words, e.words]).run({"q": "x"}, x))
add("Run", lambda e, x: Run(x))
add("Run [x]", lambda e, x: Run([x]))
add("Run query", lambda e, x: Run([(x, ["a"], [1.0])]))
add("Run docs", lambda e, x: Run([("q", x, [1.0])]))
add("Run [doc]", lambda e, x: Run([("q", [x], [1.0])]))
add("Run scores", lambda e, x: Run([("q", ["a"], x)]))
add("Run [score]", lambda e, x: Run([("q", ["a"], [x])]))
add("Run from_dict", lambda e, x: Run.from_dict(x))
add("Run from_dict {q: x}", lambda e, x: Run.from_dict({"q": x}))
add("Run from_dict {q: {d: x}}", lambda e, x: Run.from_dict({"q": {"d": x}}))
add("Run from_dict {q: {x: 1}}", lambda e, x: Run.from_dict({"q": {x: 1}}))
add("Run from_dict {x: {}}", lambda e, x: Run.from_dict({x: {"d": 1}}))
add("Run read", lambda e, x: Run.read(x))
add("Run write", lambda e, x: Run.from_dict(RUN).write(x))
add("Run write tag", lambda e, x: Run.from_dict(RUN).write(e.tmp / "out.trec", x))
add("Run cut", lambda e, x: Run.from_dict(RUN).cut(x))
add("Run []", lambda e, x: Run.from_dict(RUN)[x])
add("Run in", lambda e, x: x in Run.from_dict(RUN))
add("Run columns", lambda e, x: Run.from_dict(RUN).columns(x))
add("fuse runs", lambda e, x: fuse(x))
add("fuse [x]", lambda e, x: fuse([RUN, x]))
add("fuse method", lambda e, x: fuse([RUN, RUN], x))
add("fuse k", lambda e, x: fuse([RUN, RUN], k=x))
add("fuse weights", lambda e, x: fuse([RUN, RUN], weights=x))
add("fuse [weight]", lambda e, x: fuse([RUN, RUN], weights=[1, x]))
add("fuse depth", lambda e, x: fuse([RUN, RUN], depth=x))
add("fuse rrf_k", lambda e, x: fuse([RUN, RUN], rrf_k=x))
Q = {"q": {"a": 1}}
add("evaluate run", lambda e, x: evaluate(x, Q))
add("evaluate qrels", lambda e, x: evaluate(RUN, x))
add("evaluate qrels {q: x}", lambda e, x: evaluate(RUN, {"q": x}))
add("evaluate qrels {q: {d: x}}", lambda e, x: evaluate(RUN, {"q": {"a": x}}))
add("evaluate qrels {q: {x: 1}}", lambda e, x: evaluate(RUN, {"q": {"a": 1, x: 1}}))
add("evaluate qrels {x: }", lambda e, x: evaluate(RUN, {x: {"a": 1}, "q": {"a": 1}}))
add("evaluate measures", lambda e, x: evaluate(RUN, Q, x))
add("evaluate [measures]", lambda e, x: evaluate(RUN, Q, [x]))
add("evaluate missing", lambda e, x: evaluate(RUN, Q, missing=x))
add("evaluate drop", lambda e, x: evaluate(RUN, Q, drop_identical_ids=x))
E = evaluate({"q": {"a": 1.0}, "r": {"a": 2.0}}, {"q": {"a": 1}, "r": {"a": 1}})
add("compare baseline", lambda e, x: compare(x, {"s": E}))
add("compare systems", lambda e, x: compare(E, x))
add("compare {s: x}", lambda e, x: compare(E, {"s": x}))
add("compare correction", lambda e, x: compare(E, {"s": E}, correction=x))
add("compare alpha", lambda e, x: compare(E, {"s": E}, alpha=x))
add("relevance_strings run", lambda e, x: relevance_strings(x, Q))
add("relevance_strings qrels", lambda e, x: relevance_strings(RUN, x))
add("relevance_strings depth", lambda e, x: relevance_strings(RUN, Q, depth=x))
for f in (read_documents, read_queries):
    add(f.__name__, lambda e, x, f=f: list(f(x)))
add("read_qrels", lambda e, x: read_qrels(x))
add("read_queries split", lambda e, x: list(read_queries(e.beir, x)))
add("read_queries text", lambda e, x: list(read_queries(e.beir, text=x)))
add("read_qrels split", lambda e, x: read_qrels(e.beir, x))
add("check_documents", lambda e, x: check_documents(x))
add("check_documents [x]", lambda e, x: check_documents([x]))
add("Document id", lambda e, x: Document(x, ""))
add("Document text", lambda e, x: Document("a", x))
add("Document title", lambda e, x: Document("a", "", x))
add("Document metadata", lambda e, x: Document("a", "", metadata=x))
add("Document vector", lambda e, x: Document("a", "", vector=x))
add("Document vector {t: x}", lambda e, x: Document("a", "", vector={"t": x}))
add("Document vector {x: 1}", lambda e, x: Document("a", "", vector={x: 1}))
add("Document vector [x]", lambda e, x: Document("a", "", vector=[1.0, x]))
add("Query id", lambda e, x: Query(x, ""))
add("Query text", lambda e, x: Query("a", x))
add("Query vector", lambda e, x: Query("a", "", vector=x))
add("index_config", lambda e, x: index_config(x))
add("index_config kind", lambda e, x: index_config({"kind": x}))
add("index_config key", lambda e, x: index_config({"kind": "flat", x: 1}))
add("index_config factory", lambda e, x: index_config({"kind": "faiss", "factory": x}))
add("index_config ef", lambda e, x: index_config({"kind": "faiss", "ef_search": x}))
add("open_index", lambda e, x: open_index(x))
add("create_index", lambda e, x: create_index(x))
add("create_index config", lambda e, x: create_index(Store.build(e.new), x))
add("Store.open", lambda e, x: Store.open(x))
add("Store.open verify", lambda e, x: Store.open(e.path, verify=x))
add("Store.build", lambda e, x: Store.build(x).close())
add("Store.build key", lambda e, x: Store.build(e.new, key=x).close())
add("Store.build overwrite", lambda e, x: Store.build(e.path, overwrite=x).close())
add("Documents", lambda e, x: Documents(x))
add("compact", lambda e, x: compact(x))
add("rewrite", lambda e, x: rewrite(x))
add("index add", lambda e, x: e.vectors.index.add(x))
add("index remove", lambda e, x: e.vectors.index.remove(x))
add("index remove [x]", lambda e, x: e.vectors.index.remove([x]))
D = Dense(torch.ones(1, 2))
add("index search", lambda e, x: e.vectors.index.search(x, 1))
add("index search k", lambda e, x: e.vectors.index.search(D, x))
add("index search allowed", lambda e, x: e.vectors.index.search(D, 1, x))
add("index rescore", lambda e, x: e.vectors.index.rescore(x, np.zeros((1, 1), int)))
add("index rescore rows", lambda e, x: e.vectors.index.rescore(D, x))
add("index rescore [rows]", lambda e, x: e.vectors.index.rescore(D, [[x]]))
add("BM25 k1", lambda e, x: BM25(x))
add("BM25 b", lambda e, x: BM25(b=x))
add("BM25 language", lambda e, x: BM25(language=x))
add("BM25 stemming", lambda e, x: BM25(stemming=x))
add("BM25 stop_words", lambda e, x: BM25(stop_words=x))
add("BM25 [stop_words]", lambda e, x: BM25(stop_words=[x]))
add("Vectors similarity", lambda e, x: Vectors(x))
add("Vectors representation", lambda e, x: Vectors(representation=x))
add("Vectors dim", lambda e, x: Vectors(dim=x))
add("encoder_free_model", lambda e, x: encoder_free_model(x))
add("encoder_free_model kind", lambda e, x: encoder_free_model({"kind": x}))
add("RM3 documents", lambda e, x: RM3(documents=x))
add("RM3 terms", lambda e, x: RM3(terms=x))
add("RM3 weight", lambda e, x: RM3(weight=x))
for o in ("name_or_path", "revision", "device", "dtype", "attention"):
    add(f"from_pretrained {o}", lambda e, x, o=o: Model.from_pretrained(**{"name_or_path": e.tiny, o: x}))
for o in ("name_or_path", "projection", "config", "markers", "device", "dtype", "attention"):
    add(f"multi_vector {o}", lambda e, x, o=o: Model.multi_vector(**{"name_or_path": e.tiny, o: x}))
for o in ("name_or_path", "config", "vocabulary", "queries", "device", "dtype", "attention"):
    add(f"sparse {o}", lambda e, x, o=o: Model.sparse(**{"name_or_path": e.tiny, o: x}))
for m in ("encode", "encode_query", "encode_document"):
    add(m, lambda e, x, m=m: getattr(e.model, m)(x))
    add(m + " [x]", lambda e, x, m=m: getattr(e.model, m)([x]))
for o in (*EncodeOptions.__annotations__, "nothing"):
    add(f"encode {o}", lambda e, x, o=o: e.model.encode(["x"], **{o: x}))
add("encode_representation", lambda e, x: e.model.encode_representation(x, "query"))
add("encode_representation side", lambda e, x: e.model.encode_representation(["x"], x))
add("encode_representation progress", lambda e, x: e.model.encode_representation(["x"], "query", x))
add(
    "stream_representations chunk_size",
    lambda e, x: list(e.model.stream_representations(["x"], "query", chunk_size=x)),
)
add(
    "stream_representations device",
    lambda e, x: list(e.model.stream_representations(["x"], "query", device=x)),
)
add("similarity", lambda e, x: e.model.similarity(x, np.ones((1, 2))))
add("similarity_pairwise", lambda e, x: e.model.similarity_pairwise(x, np.ones((1, 2))))
add("decode", lambda e, x: e.model.decode(x))
add("sparsity", lambda e, x: e.model.sparsity(x))
add("set_length", lambda e, x: e.copy.set_length("query", x))
add("set_length side", lambda e, x: e.copy.set_length(x, 16))
add("similarity_name", lambda e, x: setattr(e.copy, "similarity_name", x))
add("add_pooling_layers", lambda e, x: e.copy.add_pooling_layers(x))
add("set_queries", lambda e, x: e.copy.set_queries(x))
add("save_pretrained", lambda e, x: e.model.save_pretrained(x))
add("save_pretrained format", lambda e, x: e.model.save_pretrained(e.tmp / "saved", x))
add("Dense", lambda e, x: Dense(x))
add("MultiVector", lambda e, x: MultiVector(x))
add("Sparse terms", lambda e, x: Sparse(x, torch.ones(1), 3))
add("Sparse weights", lambda e, x: Sparse(Ragged.from_rows([[1]]), x, 3))
add("Sparse dim", lambda e, x: Sparse(Ragged.from_rows([[1]]), torch.ones(1), x))
add("Sparse from_dense", lambda e, x: Sparse.from_dense(x))
add("Ragged values", lambda e, x: Ragged(x, [1]))
add("Ragged lengths", lambda e, x: Ragged([1], x))
add("Ragged from_rows", lambda e, x: Ragged.from_rows(x))
add("Ragged from_rows [x]", lambda e, x: Ragged.from_rows([x]))
add("Ragged from_padded", lambda e, x: Ragged.from_padded(x, np.ones((2, 2))))
add("Ragged from_padded mask", lambda e, x: Ragged.from_padded(np.ones((2, 2)), x))
add("Ragged []", lambda e, x: Ragged.from_rows([[1]])[[x]])
add("Ragged to_padded length", lambda e, x: Ragged.from_rows([[1]]).to_padded(0, x))
add("Ragged concat", lambda e, x: Ragged.concat(x))
add("score", lambda e, x: score(x, Dense(torch.ones(1, 2))))
add("score d", lambda e, x: score(Dense(torch.ones(1, 2)), x))

FINE: dict[str, str] = {  # values that make sense, or that may do no harm
    "An attempt has been made to start a new process |": "[None]",
    "BM25 [stop_words]": "'5'; bytes; surrogate; nul",
    "BM25 b": "0; True",
    "BM25 k1": "0; 2.5; '5'; True; bytes",
    "BM25 stemming": "0; True",
    "BM25 stop_words": "None; []",
    "Dense": "array",
    "Document id": "'5'; nul",
    "Document metadata": "{}; {None}; {str: None}; deep dict",
    "Document text": "'5'; nul",
    "Document title": "'5'; nul",
    "Document vector": "None; []; {}; array",
    "Document vector [x]": "-1; 0; 2.5; True",
    "Document vector {t: x}": "-1; 0; 2.5",
    "Document vector {x: 1}": "'5'; nul",
    "Query id": "'5'; nul",
    "Query text": "'5'; nul",
    "Query vector": "None; []; {}; array",
    "RM3 weight": "0",
    "Ragged []": "-1; 0; True",
    "Ragged from_padded": "array",
    "Ragged from_padded mask": "array",
    "Ragged from_rows": "[]; {}; array; ragged list",
    "Ragged from_rows [x]": "[]; array",
    "Ragged to_padded length": "None",
    "Run": "[]; {}",
    "Run [doc]": "'5'; nul",
    "Run [score]": "-1; 0; 2.5; True",
    "Run from_dict": "{}",
    "Run from_dict {q: x}": "{}",
    "Run from_dict {q: {d: x}}": "-1; 0; 2.5; True",
    "Run from_dict {q: {x: 1}}": "'5'; nul",
    "Run from_dict {x: {}}": "'5'; nul",
    "Run in": (
        "None; -1; 0; 2.5; '5'; nan; inf; True; bytes; surrogate; nul; huge; object; []; {}; [None]; "
        "{None}; {str: None}; deep list; deep dict; array; ragged list"
    ),
    "Run query": "'5'; nul",
    "Run write": "'5'",
    "Run write tag": "'5'; nul",
    "Sparse dim": "huge",
    "Sparse from_dense": "array",
    "Store.build": "'5'",
    "Store.build key": (
        "None; -1; 0; 2.5; '5'; nan; inf; True; surrogate; nul; huge; []; {}; [None]; {None}; {str: "
        "None}; ragged list"
    ),
    "Store.build overwrite": "True",
    "Store.open verify": "None; True",
    "Vectors dim": "None; '5'; True; bytes; huge",
    "Vectors representation": "None",
    "build documents": "[]; {}",
    "build index": "None",
    "build overwrite": "True",
    "build path": "'5'",
    "build progress": "None",
    "check_documents": "[]; {}",
    "compare correction": "None",
    "compare systems": "{}",
    "documents add": "[]; {}",
    "documents fetch": "[]",
    "documents filter": "{}",
    "documents find": "[]",
    "documents find [x]": "'5'; surrogate; nul",
    "documents ids": "[]",
    "documents ids [x]": "0",
    "documents in": (
        "None; -1; 0; 2.5; '5'; nan; inf; True; bytes; surrogate; nul; huge; object; []; {}; [None]; "
        "{None}; {str: None}; deep list; deep dict; array; ragged list"
    ),
    "encode": "'5'; surrogate; nul; []",
    "encode [x]": "'5'; surrogate; nul",
    "encode batch_size": "None",
    "encode convert_to_numpy": "None; True",
    "encode convert_to_sparse_tensor": "None",
    "encode convert_to_tensor": "None; True",
    "encode device": "None",
    "encode max_active_dims": "None",
    "encode normalize_embeddings": "None; True",
    "encode prompt": "None; '5'; surrogate; nul",
    "encode prompt_name": "None",
    "encode show_progress_bar": "None; True",
    "encode truncate_dim": "None",
    "encode_document": "'5'; surrogate; nul; []",
    "encode_document [x]": "'5'; surrogate; nul",
    "encode_query": "'5'; surrogate; nul; []",
    "encode_query [x]": "'5'; surrogate; nul",
    "evaluate drop": "True",
    "evaluate qrels {q: x}": "{}",
    "evaluate qrels {q: {d: x}}": "-1; 0; True",
    "evaluate qrels {q: {x: 1}}": "'5'",
    "evaluate qrels {x: }": "'5'",
    "from_pretrained device": "None; [None]",
    "from_pretrained revision": "None",
    "fuse [weight]": "0; 2.5",
    "fuse [x]": "{}",
    "fuse depth": "None",
    "fuse rrf_k": "2.5",
    "fuse weights": "None",
    "hybrid [weights]": "0; 2.5",
    "hybrid rrf_k": "2.5",
    "hybrid run": "[]; {}",
    "hybrid search": "'5'; nul; []",
    "hybrid search filter": "None; []; {}",
    "hybrid weights": "None",
    "impacts add": "[]; {}",
    "impacts add progress": "None",
    "impacts add vector": "{}",
    "impacts explain query": "{}",
    "impacts remove": "[]",
    "impacts encode_representation [items]": "{}",
    "impacts encode_representation items": "[]; {}",
    "impacts rerank [[candidates]]": "[]; {}",
    "impacts rerank candidates": "[]; {}",
    "impacts rerank interaction": "None",
    "impacts rerank k": "None",
    "impacts rerank progress": "None",
    "impacts rerank queries": "{}",
    "impacts rerank teacher": "None",
    "impacts run feedback": "None",
    "impacts run filter": "None; []; {}",
    "impacts run id": "-1; 0; '5'; nul; huge",
    "impacts run progress": "None",
    "impacts run queries": "[]; {}",
    "impacts run query": "{}",
    "impacts search [queries]": "{}",
    "impacts search feedback": "None",
    "impacts search filter": "None; []; {}",
    "impacts search filter _id": "'5'; surrogate; nul; []",
    "impacts search filter ids": "'5'; surrogate; nul",
    "impacts search filter in": "None; -1; 0; 2.5; inf; huge",
    "impacts search filter value": "None; -1; 0; 2.5; inf; huge; []; [None]",
    "impacts search filter value 2": "-1; 0; 2.5; inf; huge",
    "impacts search queries": "[]; {}",
    "impacts update": "[]; {}",
    "index remove": "0; []",
    "index remove [x]": "0; []",
    "index representations": "[]",
    "index rescore [rows]": "-1; 0",
    "index search allowed": "None",
    "index_config ef": "'5'; True; bytes; huge",
    "index_config factory": "'5'; bytes; surrogate; nul",
    "load device": "None; [None]",
    "load model": "None; {}",
    "load verify": "None; True",
    "multi_vector config": "None; {}",
    "multi_vector device": "None; [None]",
    "multi_vector markers": "None",
    "multi_vector projection": "None; {}",
    "add_pooling_layers": "None",
    "read_qrels split": "None",
    "read_queries split": "None",
    "read_queries text": "None",
    "encode_representation": "[]",
    "encode_representation progress": "None",
    "encode_representation side": "None",
    "stream_representations device": "None",
    "save": "'5'",
    "save_pretrained": "'5'",
    "save_pretrained format": "None",
    "set_length": "None; huge",
    "set_queries": "None",
    "similarity": "array",
    "sparse config": "None; {}",
    "sparse device": "None; [None]",
    "sparse queries": "None",
    "sparse vocabulary": "None",
    "sparsity": "array",
    "vectors add progress": "None",
    "vectors add": "[]; {}; array",
    "vectors remove": "[]",
    "vectors encode_representation items": "[]; {}; array",
    "vectors rerank [[candidates]]": "[]; {}",
    "vectors rerank candidates": "[]; {}",
    "vectors rerank interaction": "None",
    "vectors rerank k": "None",
    "vectors rerank progress": "None",
    "vectors rerank teacher": "None",
    "vectors run feedback": "None",
    "vectors run filter": "None; []; {}",
    "vectors run id": "-1; 0; '5'; nul; huge",
    "vectors run progress": "None",
    "vectors run queries": "[]; {}",
    "vectors search feedback": "None",
    "vectors search filter": "None; []; {}",
    "vectors search filter _id": "'5'; surrogate; nul; []",
    "vectors search filter ids": "'5'; surrogate; nul",
    "vectors search filter in": "None; -1; 0; 2.5; inf; huge",
    "vectors search filter value": "None; -1; 0; 2.5; inf; huge; []; [None]",
    "vectors search filter value 2": "-1; 0; 2.5; inf; huge",
    "vectors search queries": "[]; array",
    "vectors update": "[]; {}",
    "words add": "[]; {}",
    "words add ()": "-1; 0; '5'; nul; huge",
    "words add [x]": "'5'; nul",
    "words add metadata": "None; {}; {None}; {str: None}",
    "words add metadata value": (
        "None; -1; 0; 2.5; '5'; True; surrogate; nul; huge; []; {}; [None]; {None}; {str: None}; ragged list"
    ),
    "words add progress": "None",
    "words add vector": "None; -1; 0; 2.5; '5'; True; surrogate; nul; huge; []; {}; [None]; array",
    "words add {}": "'5'; nul",
    "words explain document": "[]; array",
    "words explain query": "'5'; surrogate; nul",
    "words remove": "[]",
    "words encode_representation [items]": "'5'; surrogate; nul",
    "words encode_representation items": "[]",
    "words rerank [[candidates]]": "[]; {}; array; ragged list",
    "words rerank [candidates]": "[]; array",
    "words rerank candidates": "[]; {}; array; ragged list",
    "words rerank interaction": "None",
    "words rerank k": "None",
    "words rerank progress": "None",
    "words rerank queries": "'5'; surrogate; nul",
    "words rerank teacher": "None",
    "words run feedback": "None",
    "words run filter": "None; []; {}",
    "words run id": "-1; 0; '5'; nul; huge",
    "words run progress": "None",
    "words run queries": "[]; {}",
    "words run query": "'5'; nul",
    "words search [queries]": "'5'; surrogate; nul",
    "words search feedback": "None",
    "words search filter": "None; []; {}",
    "words search filter _id": "'5'; surrogate; nul; []",
    "words search filter ids": "'5'; surrogate; nul",
    "words search filter in": "None; -1; 0; 2.5; inf; huge",
    "words search filter value": "None; -1; 0; 2.5; inf; huge; []; [None]",
    "words search filter value 2": "-1; 0; 2.5; inf; huge",
    "words search queries": "'5'; surrogate; nul; []",
    "words update": "[]; {}",
    **{
        f"{kind} {verb} {option}": values
        for kind in ("words", "vectors", "impacts", "hybrid")
        for verb in ("search", "run")
        for option, values in (
            ("offset", "0"),
            ("threshold", "None; -1; 0; 2.5"),
            ("group_by", "None"),
            ("fields", "None; []; {}" if verb == "search" else ""),
        )
    },
}
CHANGING = ("build", "save", "add", "update", "remove", "Store", "create_index", "compact", "index ")
SLOW = (
    *(
        "vectors ",
        "impacts ",
        "from_",
        "multi_vector",
        "sparse ",
        "encode",
        "add_pooling",
        "set_",
        "stream_",
    ),
    "build",
)
KEYS = ("filter key", "filter sign", "{x", "config key")  # where a value that has no hash cannot be given


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of words, of vectors and of weights, and a folder in the layout of BEIR."""
    place = tmp_path_factory.mktemp("built")
    vectors: dict[str, Callable[[int], Any]] = {
        "words": lambda i: None,
        "vectors": lambda i: [1.0, float(i)],
        "impacts": lambda i: {"x": i + 1.0},
    }
    for kind, vector in vectors.items():
        documents = [
            Document(id, text, metadata={"year": 2000 + i}, vector=vector(i))
            for i, (id, text) in enumerate(TEXTS.items())
        ]
        Retriever.build("bm25" if kind == "words" else kind, documents, place / kind)
    (place / "beir" / "qrels").mkdir(parents=True)
    for name in ("corpus.jsonl", "queries.jsonl"):
        (place / "beir" / name).write_text('{"_id": "q", "text": "x"}\n')
    (place / "beir" / "qrels" / "test.tsv").write_text("q\tq\t1\n")
    return place


@pytest.fixture(scope="module")
def around(built: Path, tiny_bert: Path) -> SimpleNamespace:
    """What calls are made on."""
    with pytest.warns(UserWarning, match="mean"):
        model = Model.from_pretrained(tiny_bert, device="cpu")
    opened = {kind: Retriever.load(built / kind) for kind in ("words", "vectors", "impacts")}
    return SimpleNamespace(model=model, tiny=tiny_bert, beir=built / "beir", path=built / "words", **opened)


def _content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "irkit.lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _refusal(call: Call, around: SimpleNamespace, value: Any) -> str | None:
    try:
        call(around, value)
    except IrkitError as error:
        return str(error)
    return None


def _copy_indexes(around: SimpleNamespace, built: Path, copied: Path) -> SimpleNamespace:
    """Return the namespace with copies of the indexes."""
    shutil.copytree(built, copied)
    opened = {kind: Retriever.load(copied / kind) for kind in ("words", "vectors", "impacts")}
    return SimpleNamespace(**vars(around) | opened | {"path": copied / "words"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name.startswith(SLOW) else ()) for name in CALLS],
)
def test_wrong_values(
    name: str, around: SimpleNamespace, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is an IrkitError that can be shown, and leaves every index as it was."""
    changes, copied = any(word in name for word in CHANGING), None
    for number, (label, value) in enumerate(WRONG.items()):
        if "device" in name and label == "[None]":  # one device, in a process of its own
            continue
        if type(value).__hash__ is None and any(word in name for word in KEYS):
            continue
        place = tmp_path / str(number)
        place.mkdir()
        monkeypatch.chdir(place)
        if not changes:
            e = copy.copy(around)
        elif copied is None:  # values that are refused leave the copy as it was
            copied = tmp_path / f"built {number}"
            e = _copy_indexes(around, built, copied)
        e.tmp, e.new = place, place / "new"
        if name.startswith(("set_", "add_pooling", "similarity_name")):
            e.copy = copy.deepcopy(e.model)
        refusal = _refusal(CALLS[name], e, value)
        fine = label in FINE.get(name, "").split("; ")
        assert (refusal is None) == fine, f"{label}: {refusal}"
        if copied is not None and not fine:
            assert _content(built).items() <= _content(copied).items(), label
        elif fine:
            copied = None


def test_the_index_is_as_it_was(around: SimpleNamespace) -> None:
    """After all that."""
    assert [hit.id for hit in around.words.search("token model")] == ["b"]
