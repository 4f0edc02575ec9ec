"""Exports in real engines give irkit's own results, and clients of other engines accept what is written."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irkit import Hybrid, Retriever, evaluate
from irkit.data import Document, Query
from irkit.encoder_free import Vectors
from irkit.errors import BadValueError, CorruptError, StorageError
from irkit.exporting import export
from irkit.exporting.contents import Contents, split_rows
from irkit.exporting.to_opensearch import index_body, source
from irkit.exporting.to_qdrant import COLLECTION
from irkit.exporting.to_vespa import schema
from irkit.index.filters import parse_filter
from irkit.model import Model
from irkit.remote import LanceDB, Qdrant
from irkit.remote.sql_filter import sql_filter

REASON = "make adapters installs it"
ENGINES = {"qdrant": "qdrant_client", "qdrant-edge": "qdrant_edge", "lancedb": "lancedb"}
COUNT, DIM = 60, 8

FILTERS = [
    *(None, {}, {"draft": True}, {"draft": False}, {"draft": {"!=": True}}, {"draft": [True, None]}),
    *({"year": {">=": 1993}}, {"year": {"<": 1995, ">": 1990}}, {"year": 1995.0}, {"year": None}),
    *({"year": {"!=": 1993}}, {"year": {"in": [1991, None]}}, {"price": 0.5}, {"price": {"<=": 3.25}}),
    *({"lang": "de"}, {"lang": ["de", "en"]}, {"lang": {"not in": ["de"]}}, {"lang": {"exists": False}}),
    *({"lang": {"prefix": "d"}}, {"lang": []}, {"tags": "b"}, {"tags": {"all": ["a", "b"]}}),
    *({"tags": {"!=": "a"}}, {"tags": {"exists": True}}, {"tags": {"all": []}}, {"a.b c's": 2}),
    *({"$or": [{"draft": True}, {"year": {"<": 1992}}]}, {"$not": {"lang": "de"}}),
    *({"$not": {"$or": [{"draft": False}, {"tags": "a"}]}, "year": {">": 1990}}, ["d1", "d2", "zz"]),
    *({"_id": {"not in": ["d1"]}}, {"_id": []}),
]


def metadata(number: int) -> dict:
    found = {"year": 1990 + number % 7, "lang": ["de", "en", "fr"][number % 3], "draft": number % 3 == 0}
    found |= {"tags": [["a", "b"], ["b"], []][number % 3], "a.b c's": number % 4, "price": number / 4}
    if number % 5 == 0:
        found["year"] = None
    if number % 7 == 0:
        del found["draft"], found["lang"]
    return found


def vectors(kind: str, rng: np.random.Generator, tokens: int) -> object:
    if kind == "sparse":
        terms = rng.choice(30, 5, replace=False)
        return {
            f"t{term}": weight for term, weight in zip(terms, (rng.random(5) + 0.1).tolist(), strict=True)
        }
    return rng.standard_normal({"dense": (DIM,), "multi_vector": (tokens, DIM)}[kind])


@pytest.fixture(scope="module", params=["dense", "multi_vector", "sparse", "bm25"])
def exported(request, tmp_path_factory):
    """An index of a kind, queries, and where its exports are."""
    kind, place = request.param, tmp_path_factory.mktemp(request.param)
    rng = np.random.default_rng(0)
    items = []
    for number in range(COUNT):
        text = " ".join(["bear"] * (1 + number % 3) + ["winter"] * number)  # scores without ties
        vector = None if kind == "bm25" else vectors(kind, rng, 1 + number % 4)
        items.append(Document(f"d{number}", text, "A title" * (number % 2), metadata(number), vector))
    texts = ["bears in winter", "a winter"]
    queries = texts if kind == "bm25" else [vectors(kind, rng, 3) for _ in range(5)]
    model = {"sparse": "impacts", "bm25": "bm25"}.get(kind, "vectors")
    retriever = Retriever.build(model, items, place / "index")
    retriever.remove("d3")
    return retriever, queries, place


def names(lists) -> list:
    return [[hit.id for hit in line] for line in lists]


def open_remote(exported, engine: str):
    """Export an index once, and open the export."""
    pytest.importorskip(ENGINES[engine], reason=REASON)
    retriever, _, place = exported
    kind = retriever.model.name if retriever.model.name == "bm25" else retriever.model.kind
    if engine == "lancedb" and kind in ("sparse", "bm25"):
        pytest.skip("LanceDB has no sparse vectors")
    if not (place / engine).exists():
        assert export(retriever, engine, place / engine) == COUNT - 1
    has_terms = kind in ("sparse", "bm25")
    return (LanceDB if engine == "lancedb" else Qdrant)(
        place / engine, place / "index" if has_terms else None
    )


@pytest.mark.parametrize("engine", ["qdrant", "qdrant-edge"])
def test_qdrant_has_a_named_vector_for_each_head(engine: str, tiny_bert: Path, tmp_path: Path) -> None:
    library = pytest.importorskip(ENGINES[engine], reason=REASON)
    heads = {"dense": {}, "sparse": "token_weight", "tokens": {"head": "multi_vector"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the heads are random
        model = Model.several(tiny_bert, heads, device="cpu")
    texts = ["search index", "a", "", "token text"]
    items = [Document(f"d{number}", text) for number, text in enumerate(texts)]
    retriever = Retriever.build(model, items, tmp_path / "index")
    assert export(retriever, engine, tmp_path / "out") == 4
    with pytest.raises(BadValueError, match="several representations"):
        Qdrant(tmp_path / "out")
    if engine == "qdrant-edge":
        return
    client = library.QdrantClient(path=str(tmp_path / "out"))
    query: Any = model.encode_representation(["search text"], side="query")
    for name, part in retriever.index.parts.items():
        rows, scores = part.search(query.parts[name], 3)
        [vector] = split_rows(query.parts[name])
        if name == "sparse":
            terms, weights = vector
            vector = library.models.SparseVector(indices=terms.tolist(), values=weights.tolist())
        else:
            vector = vector.tolist()
        points = client.query_points(COLLECTION, query=vector, using=name, limit=3).points
        # Qdrant leaves out documents without a common term, which irkit ranks with a score of 0
        assert [point.id for point in points] == rows[0, : len(points)].tolist()
        assert not scores[0, len(points) :].clip(0).any()
        wanted = scores[0, : len(points)].tolist()
        assert [point.score for point in points] == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    client.close()


@pytest.mark.parametrize("engine", list(ENGINES))
def test_same_hits_for_every_filter(exported, engine: str) -> None:
    retriever, queries, _ = exported
    with open_remote(exported, engine) as remote:
        assert len(remote) == len(retriever)
        for where in FILTERS:
            ours, theirs = retriever.search(queries, 10, where), remote.search(queries, 10, where)
            assert names(theirs) == names(ours)
            for line, other in zip(ours, theirs, strict=True):
                scores = [hit.score for hit in line]
                assert [hit.score for hit in other] == pytest.approx(scores, rel=1e-5, abs=1e-6)
                for hit, same in zip(line, other, strict=True):
                    assert (same.text, same.title, same.metadata) == (hit.text, hit.title, hit.metadata)


@pytest.mark.parametrize("engine", list(ENGINES))
def test_runs_fusion_and_reranking(exported, engine: str) -> None:
    retriever, queries, place = exported
    is_text = retriever.model.name == "bm25"
    items = [
        Query(f"q{number}", query) if is_text else Query(f"q{number}", "", query)
        for number, query in enumerate(queries)
    ]
    with open_remote(exported, engine) as remote:
        run, other = retriever.run(items, 20), remote.run(items, 20)
        assert {name: list(other.columns(name)[0]) for name in other.query_ids} == {
            name: list(run.columns(name)[0]) for name in run.query_ids
        }
        qrels = {name: {run.columns(name)[0][2]: 1} for name in run.query_ids}
        assert evaluate(other, qrels, ["nDCG@10"]) == evaluate(run, qrels, ["nDCG@10"])
        ids = [hit.id for hit in retriever.search(queries[0], 30)][5:]
        assert [hit.id for hit in remote.rerank(queries[0], ids, 7)] == ids[:7]
        again = remote.rerank(items, other, 3)
        assert [list(again.columns(name)[0]) for name in again.query_ids] == [
            list(run.columns(name)[0])[:3] for name in run.query_ids
        ]

        def longest(queries, lists):
            return [np.array([len(document.text) for document in line], float) for line in lists]

        for options in (
            {"group_by": "lang", "offset": 1},
            {"threshold": 0.5, "fields": ["id", "metadata.lang"]},
        ):
            ours, theirs = retriever.search(queries, 4, **options), remote.search(queries, 4, **options)
            assert names(theirs) == names(ours)
        if is_text:
            best = remote.rerank(queries[0], ids, 2, teacher=longest)
            assert [hit.id for hit in best] == sorted(ids, key=lambda name: -int(name[1:]))[:2]
            hybrid = [
                Hybrid([one, Retriever.load(place / "index")]).search("bears in winter", 5, {"draft": True})
                for one in (remote, retriever)
            ]
            assert [(hit.id, hit.text) for hit in hybrid[0]] == [(hit.id, hit.text) for hit in hybrid[1]]


@pytest.mark.parametrize("engine", list(ENGINES))
def test_what_a_search_refuses(exported, engine: str) -> None:
    retriever, queries, _ = exported
    with open_remote(exported, engine) as remote:
        with pytest.raises(BadValueError, match="no document has the key 'yaer'; did you mean 'year'"):
            remote.search(queries, filter={"yaer": 2000})
        with pytest.raises(BadValueError, match="k is 0"):
            remote.search(queries, 0)
        for large in (1 << 60, 1 << 53, -(1 << 53)):  # 2**53 + 1 is rounded to 2**53
            with pytest.raises(BadValueError, match=r"whole numbers below 2\*\*53"):
                remote.search(queries, filter={"year": large})
        assert remote.search(queries[0], filter={"year": {"<": (1 << 53) - 1}})
        with pytest.raises(BadValueError, match="has no document 'no'; give ids"):
            remote.rerank(queries[0], ["d1", "no"])
        types = r"is (a string|a number|true or false); documents have"
        for wrong in ({"year": "1993"}, {"lang": {"in": ["de", 1]}}, {"draft": {"!=": 1}}, {"tags": True}):
            for searched in (retriever, remote):
                with pytest.raises(BadValueError, match=types):
                    searched.search(queries[0], filter=wrong)
        if engine != "lancedb":
            with pytest.raises(BadValueError, match="Qdrant has no order of strings"):
                remote.search(queries, filter={"lang": {">": "de"}})
        remote_without = type(remote).__new__(type(remote))
        super(type(remote), remote_without).__init__("here", remote.about, None)
        if retriever.model.kind == "sparse":
            with pytest.raises(BadValueError, match="queries need the terms of the index"):
                remote_without.model  # noqa: B018
        other = Vectors("cosine", representation="dense", dim=3)
        super(type(remote), remote_without).__init__("here", remote.about, other)
        with pytest.raises(BadValueError, match="index here: it was built with"):
            remote_without.model  # noqa: B018


def test_full_text_search_of_lancedb(tmp_path: Path) -> None:
    pytest.importorskip("lancedb", reason=REASON)
    texts = {"a": "Bears sleep in winter.", "b": "Copper conducts.", "c": "The cub's bear"}
    with Retriever.build("bm25", texts, tmp_path / "index") as retriever:
        export(retriever, "lancedb", tmp_path / "lance")
    remote = LanceDB(tmp_path / "lance")
    assert {hit.id for hit in remote.search("a bear")} == {"a", "c"}
    assert [hit.id for hit in remote.search("copper bear", filter=["b"])] == ["b"]
    assert remote.search("nothing") == []
    assert list(remote.run({"q": "copper"}).columns("q")[0]) == ["b"]


def test_places_without_an_export(tmp_path: Path) -> None:
    client = pytest.importorskip("qdrant_client", reason=REASON)
    lancedb = pytest.importorskip("lancedb", reason=REASON)
    for engine in (Qdrant, LanceDB):
        with pytest.raises(StorageError, match=r"opening .*missing"):
            engine(tmp_path / "missing")
    with pytest.raises(BadValueError, match="expected http://HOST:PORT/COLLECTION"):
        Qdrant("http://127.0.0.1:1")
    with pytest.raises(StorageError, match=r"opening http://127.0.0.1:1/notes"):
        Qdrant("http://127.0.0.1:1/notes")
    local = client.QdrantClient(path=str(tmp_path / "other"))
    local.create_collection("documents", vectors_config={})
    local.close()
    lancedb.connect(str(tmp_path / "lance")).create_table("documents", [{"a": 1}])
    for remote, name in ((Qdrant, "other"), (LanceDB, "lance")):
        with pytest.raises(CorruptError, match="no finished export of irkit"):
            remote(tmp_path / name)


@pytest.mark.parametrize("engine", list(ENGINES))
def test_cosines(engine: str, tmp_path: Path) -> None:
    pytest.importorskip(ENGINES[engine], reason=REASON)
    rng = np.random.default_rng(0)
    items = [Document(f"d{n}", "", vector=rng.standard_normal(DIM) * (1 + n)) for n in range(20)]
    index = {"kind": "flat", "metric": "cosine"}
    with Retriever.build("vectors", items, tmp_path / "index", index=index) as retriever:
        export(retriever, engine, tmp_path / engine)
        queries = [rng.standard_normal(DIM) * 9 for _ in range(3)]
        with (LanceDB if engine == "lancedb" else Qdrant)(tmp_path / engine) as remote:
            for ours, theirs in zip(retriever.search(queries, 5), remote.search(queries, 5), strict=True):
                assert [hit.id for hit in theirs] == [hit.id for hit in ours]
                assert [hit.score for hit in theirs] == pytest.approx([hit.score for hit in ours], abs=1e-6)


def test_sql_of_filters() -> None:
    types = {"lang": ("string", False), "tags": ("string", True), "mixed": ("other", True)}
    where = parse_filter({"lang": "d'e", "$not": {"tags": "a"}})
    assert sql_filter(where, types) == (
        "((coalesce(metadata.`lang` = 'd''e', false)) AND "
        "(NOT ((coalesce(array_has(metadata.`tags`, 'a'), false)))))"
    )
    for gone in ({"draft": "x"}, {"draft": {">": 1}}):  # of removed documents only
        assert sql_filter(parse_filter(gone), types).strip("()") == "false"
    assert "CAST('inf' AS DOUBLE)" in sql_filter(
        parse_filter({"n": {"<": math.inf}}), {"n": ("number", False)}
    )
    for wrong in ({"tags": {">": "a"}}, {"tags": {"prefix": "a"}}, {"mixed": 1}):
        with pytest.raises(BadValueError, match="LanceDB"):
            sql_filter(parse_filter(wrong), types)


def test_clients_read_the_mappings_and_bulk_files(exported, tmp_path: Path) -> None:
    search = pytest.importorskip("opensearchpy", reason=REASON)
    elastic = pytest.importorskip("elasticsearch", reason=REASON)
    from elasticsearch import dsl
    from opensearchpy.helpers.actions import expand_action
    from opensearchpy.helpers.mapping import Mapping

    retriever = exported[0]
    contents = Contents(retriever, lambda count: None)
    for is_elastic, mapping in ((False, Mapping()), (True, dsl.Mapping())):
        body = index_body(contents, is_elastic)["mappings"]
        mapping._update_from_dict(json.loads(json.dumps(body)))  # knows all types of fields
        assert mapping.to_dict()["properties"] == body["properties"]
    export(retriever, "opensearch", tmp_path / "os")
    serializers = (search.serializer.JSONSerializer(), elastic.serializer.JsonSerializer())
    actions = [{"_id": item.document.id, **source(contents, item)} for item in contents]
    lines = (tmp_path / "os" / "bulk-00000.ndjson").read_text().split("\n")[:-1]
    for serializer in serializers:
        expected = [part for action in actions for part in expand_action(dict(action))]
        assert [serializer.loads(line) for line in lines] == expected


def test_pyvespa_writes_the_same_schema(exported) -> None:
    package = pytest.importorskip("vespa.package", reason=REASON)
    contents = Contents(exported[0], lambda count: None)
    field, kind = package.Field, contents.kind
    text = {"indexing": ["index", "summary"], "index": "enable-bm25"}
    fields = [
        field("id", "string", indexing=["summary", "attribute"]),
        *(field(name, "string", **text) for name in ("title", "text")),
        field("metadata", "string", indexing=["summary"]),
        field("marks", "array<string>", indexing=["attribute"]),
    ]
    types = {"draft": "bool", "lang": "string", "price": "double", "tags": "array<string>", "year": "double"}
    for key, own in types.items():
        fields.append(field(f"metadata_{key}", own, indexing=["summary", "attribute"]))
    axes, expression = {
        "dense": (f"x[{DIM}]", "sum(query(q) * attribute(vector))"),
        "multi_vector": (
            f"word{{}}, x[{DIM}]",
            "sum(reduce(sum(query(q) * attribute(vector), x), max, token), word)",
        ),
        "sparse": ("term{}", "sum(query(q) * attribute(vector))"),
    }[kind]
    profiles = [package.RankProfile("bm25", first_phase="bm25(title) + bm25(text)")]
    if not contents.is_bm25:
        dense = {"indexing": ["attribute", "index"], "attribute": ["distance-metric: dotproduct"]}
        more = dense if kind == "dense" else {"indexing": ["attribute"]}
        fields.append(field("vector", f"tensor<float>({axes.replace('word', 'token')})", **more))
        inputs = [("query(q)", f"tensor<float>({axes})")]
        profiles.append(package.RankProfile("vectors", inputs=inputs, first_phase=expression))
    theirs = package.Schema(
        "passage", package.Document(fields), [package.FieldSet("default", ["title", "text"])], profiles
    )
    assert _words(schema(contents)) == _words(theirs.schema_to_text)
    from irkit.exporting.to_vespa import _SERVICES

    assert _words(package.ApplicationPackage("irkit", [theirs]).services_to_text) == _words(_SERVICES)


def _words(text: str) -> list[str]:
    return re.findall(r"\S+", text)
