"""Exports without an engine: what is read again is the same, the shapes, and what is refused."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from irkit import Retriever
from irkit.data import Document, read_documents
from irkit.encoder_free import Vectors
from irkit.errors import BadTypeError, BadValueError, MissingDependencyError, StorageError
from irkit.exporting import export
from irkit.exporting.contents import Contents, split_rows
from irkit.exporting.marks import marks
from irkit.exporting.to_opensearch import index_body
from irkit.exporting.to_qdrant import payload, point_batches
from irkit.exporting.to_vespa import put, schema
from irkit.index import Limits, use_limits
from irkit.model import Model

KINDS = ("dense", "multi_vector", "sparse", "bm25")


def documents(kind: str) -> list[Document]:
    """Documents with metadata of every type, titles or none, and vectors of a kind."""
    rng, items = np.random.default_rng(0), []
    for number in range(12):
        metadata = {"year": 1990 + number % 7, "lang": ["de", "en"][number % 2], "draft": number % 3 == 0}
        metadata |= {"tags": [["a", "b"], ["b"], []][number % 3], "a.b": number / 4, "mixed": [1, "x"]}
        if number % 5 == 0:
            metadata = {"year": None, "inner": {"deep": True}}
        vector = {
            "dense": rng.standard_normal(4),
            "multi_vector": rng.standard_normal((1 + number % 3, 4)),
            "sparse": {f"t.{term}": float(rng.random() + 0.1) for term in rng.choice(9, 3, False)},
        }.get(kind)
        text = f"sleeping \u2028 bear{'s' * number} {number}"
        items.append(Document(f"d{number}", text, "Title" * (number % 2), metadata, vector))
    return items


@pytest.fixture(scope="module", params=KINDS)
def retriever(request, tmp_path_factory):
    """An index of a kind with a removed document."""
    model = {"sparse": "impacts", "bm25": "bm25"}.get(request.param, "vectors")
    built = Retriever.build(model, documents(request.param), tmp_path_factory.mktemp("kind") / "index")
    built.remove("d4")
    return built


def representations(retriever: Retriever) -> dict[str, object]:
    """What an index holds of each document, with terms by name; of BM25 the texts, which say all."""
    contents = Contents(retriever, lambda count: None)
    found = {}
    for item in contents:
        vector = item.vector
        if contents.kind == "sparse":
            terms, weights = vector
            vector = sorted(
                (contents.terms[term], weight) for term, weight in zip(terms, weights, strict=True)
            )
        else:
            vector = vector.tolist()
        found[item.document.id] = (item.document, None if contents.is_bm25 else vector)
    return found


def json_lines(path: Path) -> list:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_files_are_read_again(retriever: Retriever, to: str, tmp_path: Path) -> None:
    if to == "parquet":
        pytest.importorskip("pyarrow")
    done: list[int] = []
    assert export(retriever, to, tmp_path / f"out.{to}", progress=done.append) == sum(done) == 11
    model = "bm25" if retriever.model.name == "bm25" else "vectors"
    again = Retriever.build(model, read_documents(str(tmp_path / f"out.{to}")), tmp_path / "again")
    assert representations(again) == representations(retriever)


@pytest.fixture(scope="module")
def several(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    """An index of a model with three heads, with a removed document and an empty one."""
    heads = {"dense": {}, "sparse": "token_weight", "tokens": {"head": "multi_vector"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the heads are random
        model = Model.several(tiny_bert, heads, device="cpu")
    texts = ["search index", "a", "", "token text"]
    items = [Document(f"d{number}", text) for number, text in enumerate(texts)]
    built = Retriever.build(model, items, tmp_path_factory.mktemp("several") / "index")
    built.remove("d1")
    return built


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_each_head_has_a_column(several: Retriever, to: str, tmp_path: Path) -> None:
    out = tmp_path / f"out.{to}"
    assert export(several, to, out) == 3
    if to == "parquet":
        rows = pytest.importorskip("pyarrow.parquet").read_table(out).to_pylist()
    else:
        rows = json_lines(out)
    assert [row["_id"] for row in rows] == ["d0", "d2", "d3"]
    stored = several.index.representations(np.array([0, 2, 3])).parts
    terms = several.model.heads["sparse"].vocabulary
    columns = {name: list(split_rows(part)) for name, part in stored.items()}
    for number, row in enumerate(rows):
        assert [name for name in row if "vector" in name] == [f"vector_{name}" for name in columns]
        assert row["vector_dense"] == columns["dense"][number].tolist()
        assert row["vector_tokens"] == columns["tokens"][number].tolist()
        weights = zip(*columns["sparse"][number], strict=True)
        assert dict(row["vector_sparse"]) == {terms[term]: weight for term, weight in weights}
    # metadata that is named leaves the columns out
    assert [item.metadata for item in read_documents(out, metadata=[])] == [{}] * 3


def test_lancedb_takes_integers_that_no_float64_holds(tmp_path: Path) -> None:
    pytest.importorskip("lancedb", reason="needs: pip install 'irkit[engines]'")
    from irkit.remote import LanceDB

    numbers = {"a": 1234567890123456789, "b": [10**400, 2**53 + 1], "c": -(10**400)}
    items = [Document(key, key, "", {"number": numbers[key], "flag": True}, [1.0, 0.5]) for key in numbers]
    with Retriever.build("vectors", items, tmp_path / "index") as retriever:
        export(retriever, "lancedb", tmp_path / "out")
    with LanceDB(tmp_path / "out") as remote:
        found = {hit.id: hit.metadata["number"] for hit in remote.search([1.0, 0.5], k=3)}
        assert found == numbers
        assert not remote.search([1.0, 0.5], k=3, filter={"flag": {"not in": [True]}})


@pytest.mark.parametrize("to", ["opensearch", "elasticsearch", "vespa", "lancedb"])
def test_several_heads_are_refused_where_a_document_has_one_vector(
    several: Retriever, to: str, tmp_path: Path
) -> None:
    expected = f"{to} holds one representation .* dense, sparse, tokens; export to jsonl, parquet, qdrant"
    with pytest.raises(BadValueError, match=expected):
        export(several, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_opensearch_and_elasticsearch(retriever: Retriever, tmp_path: Path) -> None:
    kind = "bm25" if retriever.model.name == "bm25" else retriever.model.kind
    fields = {}
    for to in ("opensearch", "elasticsearch"):
        export(retriever, to, tmp_path / to)
        properties = json.loads((tmp_path / to / "index.json").read_text())["mappings"]["properties"]
        fields[to] = properties.get("terms" if kind == "sparse" else "vector", {}).get("type")
        assert {key: field["type"] for key, field in properties["metadata"]["properties"].items()} == {
            **{"year": "double", "lang": "keyword", "draft": "boolean", "tags": "keyword", "a.b": "double"},
            **{"mixed": "object", "inner": "object"},
        }
        lines = json_lines(tmp_path / to / "bulk-00000.ndjson")
        assert [line["index"]["_id"] for line in lines[::2]] == [item.id for item in retriever.documents]
        assert lines[3]["title"] == "Title"
        assert lines[3]["metadata"] == dict(retriever.documents["d1"].metadata)
        if kind == "sparse":
            [weights] = [vector for name, (_, vector) in representations(retriever).items() if name == "d1"]
            assert lines[3]["terms"] == {name.replace(".", "%2E"): weight for name, weight in weights}
        else:
            assert ("vector" in lines[3]) == (kind != "bm25")
    assert (
        fields
        == {
            "dense": {"opensearch": "knn_vector", "elasticsearch": "dense_vector"},
            "multi_vector": {"opensearch": "object", "elasticsearch": "rank_vectors"},
            "sparse": {"opensearch": "rank_features", "elasticsearch": "sparse_vector"},
            "bm25": {"opensearch": None, "elasticsearch": None},
        }[kind]
    )


def test_bulk_files_are_cut(retriever: Retriever, tmp_path: Path) -> None:
    with use_limits(Limits(bulk_bytes=1500)):
        export(retriever, "opensearch", tmp_path / "cut")
        export(retriever, "opensearch", tmp_path / "cut again")
    parts = [path.read_bytes() for path in sorted((tmp_path / "cut").glob("bulk-*.ndjson"))]
    assert len(parts) > 2
    assert all(len(part) <= 1500 and part.count(b"\n") % 2 == 0 for part in parts)
    again = [path.read_bytes() for path in sorted((tmp_path / "cut again").glob("bulk-*.ndjson"))]
    assert again == parts
    export(retriever, "opensearch", tmp_path / "whole")
    assert b"".join(parts) == (tmp_path / "whole" / "bulk-00000.ndjson").read_bytes()


def test_vespa(retriever: Retriever, tmp_path: Path) -> None:
    export(retriever, "vespa", tmp_path / "app")
    contents = Contents(retriever, lambda count: None)
    assert (tmp_path / "app" / "schemas" / "passage.sd").read_text() == schema(contents)
    assert "metadata_year type double" in schema(contents)
    assert "metadata_tags type array<string>" in schema(contents)
    for name in ("metadata_a.b", "metadata_mixed", "metadata_inner"):
        assert name not in schema(contents)
    lines = json_lines(tmp_path / "app" / "feed.jsonl")
    assert lines == [put(contents, item) for item in contents]
    fields = lines[1]["fields"]
    assert (lines[1]["put"], fields["id"], fields["metadata_lang"]) == ("id:irkit:passage::d1", "d1", "en")
    assert json.loads(lines[0]["fields"]["metadata"]) == {"year": None, "inner": {"deep": True}}
    shape = {"dense": "values", "multi_vector": "blocks", "sparse": "cells"}[contents.kind]
    assert set(fields.get("vector", {})) == (set() if contents.is_bm25 else {shape})


def test_shards_export_the_same_bytes(tmp_path: Path) -> None:
    for shards in (1, 2):
        items = documents("sparse")
        Retriever.build("impacts", items, tmp_path / str(shards), shards=shards).close()
        with Retriever.load(tmp_path / str(shards)) as retriever:
            retriever.remove(["d4"])
            export(retriever, "vespa", tmp_path / f"vespa {shards}")
    one, two = ((tmp_path / f"vespa {shards}" / "feed.jsonl").read_bytes() for shards in (1, 2))
    assert one == two


def test_a_metric_that_engines_do_not_score_is_refused(tmp_path: Path) -> None:
    items = [Document("a", "", vector=[3.0, 4.0]), Document("b", "", vector=[1.0, 0.0])]
    for metric in ("euclidean", "cosine"):
        Retriever.build("vectors", items, tmp_path / metric, index={"kind": "flat", "metric": metric}).close()
    with Retriever.load(tmp_path / "euclidean") as retriever:
        for to in ("qdrant", "qdrant-edge", "lancedb", "opensearch", "elasticsearch", "vespa"):
            with pytest.raises(BadValueError, match=f"{to} scores by inner products.*'euclidean'; build it"):
                export(retriever, to, tmp_path / "out")
            assert not (tmp_path / "out").exists()
        assert export(retriever, "jsonl", tmp_path / "out.jsonl") == 2
    with Retriever.load(tmp_path / "cosine") as retriever:
        assert Contents(retriever, print).about["metric"] == "cosine"
        assert export(retriever, "opensearch", tmp_path / "out") == 2
    assert json_lines(tmp_path / "out" / "bulk-00000.ndjson")[1]["vector"] == pytest.approx([0.6, 0.8])


def test_a_head_whose_metric_engines_do_not_score_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the heads are random
        model = Model.several(tiny_bert, {"dense": {}, "sparse": "token_weight"}, device="cpu")
    index = {"kind": "several", "indexes": {"dense": {"kind": "flat", "metric": "euclidean"}}}
    built = Retriever.build(model, {"a": "search index"}, tmp_path / "index", index=index)
    with built, pytest.raises(BadValueError, match="qdrant-edge scores by inner products"):
        export(built, "qdrant-edge", tmp_path / "out")


def test_vespa_gets_no_character_that_it_refuses(tmp_path: Path) -> None:
    bad = "a\x00b\x1fc\ufdd0d\ufffee\U0001ffff"
    items = [Document("a", bad, bad, {"name": bad, "tags": [bad, "x"], "inner": {bad: bad}, bad: None})]
    with Retriever.build("bm25", items, tmp_path / "index") as retriever:
        export(retriever, "vespa", tmp_path / "app")
        [line] = json_lines(tmp_path / "app" / "feed.jsonl")
        fields, good = line["fields"], "a b c d e "
        assert (fields["title"], fields["text"], fields["metadata_name"]) == (good, good, good)
        assert fields["metadata_tags"] == [good, "x"]
        assert json.loads(fields["metadata"]) == dict(retriever.documents["a"].metadata)
        strings = [fields["metadata"], *fields["marks"], *fields["metadata_tags"]]
        assert not re.search("[\x00-\x1f\ufdd0-\ufdef\ufffe\uffff\U0001ffff]", "".join(strings))


@pytest.mark.parametrize("character", ["\x01", "\ufdd0", "\uffff", "\U0010fffe"])
def test_an_id_that_vespa_refuses(character: str, tmp_path: Path) -> None:
    built = Retriever.build("bm25", {"a": "text", f"b{character}": "text"}, tmp_path / "index")
    message = rf"has the character U\+{ord(character):04X}; expected ids"
    with built, pytest.raises(BadValueError, match=message):
        export(built, "vespa", tmp_path / "app")
    assert not (tmp_path / "app").exists()


def test_an_address_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("qdrant_client", reason="needs: pip install 'irkit[engines]'")
    words = Retriever.build("bm25", {"a": "text"}, tmp_path / "words")
    for address in ("http://127.0.0.1:abc/notes", "http://[::1/notes"):
        with pytest.raises(StorageError, match="exporting to http://"):
            export(words, "qdrant", address)


def test_marks() -> None:
    assert marks({"a": True, "b": None, "c": [False, None, 1], "d": [], "e": "x"}) == [
        *('["a"]', '["a",true]', '["b"]', '["b",null]', '["c"]', '["c",false]', '["c",null]', '["d"]'),
        '["e"]',
    ]


def test_quantised_vectors_are_decoded_and_said_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    items = [Document(str(row), "", vector=rng.standard_normal(32)) for row in range(200)]
    config = {"kind": "dense", "keep": "none"}
    with Retriever.build(Vectors(), items, tmp_path / "index", index=config) as retriever:
        with pytest.warns(UserWarning, match="decoded"):
            export(retriever, "jsonl", tmp_path / "out.jsonl")
        line = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[7])
        stored = retriever.index.representations(np.array([7])).values[0].tolist()
        assert line["vector"] == stored


def test_negative_weights(tmp_path: Path) -> None:
    items = [Document("a", "", vector={"x": -1.0})]
    with Retriever.build("impacts", items, tmp_path / "index") as retriever:
        with pytest.raises(BadValueError, match="'a' has a weight below 0"):
            export(retriever, "opensearch", tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_what_is_refused(retriever: Retriever, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(BadValueError, match=r"no target 'qdrnt'; did you mean 'qdrant'"):
        export(retriever, "qdrnt", tmp_path / "out")
    with pytest.raises(BadValueError, match=r"expected the extension .jsonl"):
        export(retriever, "jsonl", tmp_path / "out.json")
    with pytest.raises(BadValueError, match="written to a path"):
        export(retriever, "vespa", "http://127.0.0.1:1/x")
    with pytest.raises(BadTypeError, match="expected a Retriever"):
        export(str(tmp_path), "jsonl", tmp_path / "out.jsonl")  # type: ignore[arg-type]
    (tmp_path / "there").mkdir()
    with pytest.raises(StorageError, match="exists already"):
        export(retriever, "vespa", tmp_path / "there")
    if os.getuid():
        (tmp_path / "there").chmod(0o500)
        with pytest.raises(StorageError, match="not writable"):
            export(retriever, "vespa", tmp_path / "there" / "app")
    if retriever.model.kind == "sparse" and retriever.model.name != "bm25":
        with pytest.raises(BadValueError, match="lancedb holds dense and multi_vector"):
            export(retriever, "lancedb", tmp_path / "out")
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    with pytest.raises(MissingDependencyError, match=r"irkit\[engines\]"):
        export(retriever, "qdrant", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_mapping_of_an_index_without_documents(tmp_path: Path) -> None:
    with Retriever.build(Vectors(representation="dense", dim=3), [], tmp_path / "index") as retriever:
        body = index_body(Contents(retriever, lambda count: None), elastic=True)
        assert body["mappings"]["properties"]["vector"]["dims"] == 3
        assert export(retriever, "jsonl", tmp_path / "out.jsonl") == 0
        assert (tmp_path / "out.jsonl").read_text() == ""


def test_metadata_of_parquet_must_be_json(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow as arrow
    from pyarrow import parquet

    parquet.write_table(
        arrow.table({"_id": ["a"], "text": ["x"], "metadata": ["[1]"]}), tmp_path / "x.parquet"
    )
    with pytest.raises(BadValueError, match=r"x.parquet:1: metadata is '\[1\]'; expected an object of JSON"):
        list(read_documents(str(tmp_path / "x.parquet")))


def test_command(retriever: Retriever, tmp_path: Path, capsys) -> None:
    from irkit.cli import main

    out = tmp_path / "out.jsonl"
    for code, message in ((0, "exported 11 documents to"), (2, "it exists already")):
        with pytest.raises(SystemExit) as stop:
            main(["export", str(retriever.store.path), "--to", "jsonl", "--out", str(out)])
        assert stop.value.code == code
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_a_document_without_tokens_is_read_again(to: str, tmp_path: Path) -> None:
    vectors = {"a": np.empty((0, 4), np.float32), "b": np.eye(4, dtype=np.float32)[:2], "c": []}
    model = Vectors(representation="multi_vector", dim=4)
    retriever = Retriever.build(model, vectors, tmp_path / "index")
    file = tmp_path / f"out.{to}"
    if to == "parquet":
        pytest.importorskip("pyarrow")
    assert export(retriever, to, file) == 3
    again = Retriever.build("vectors", file, tmp_path / "again")
    query = np.ones((1, 4), np.float32)
    assert again.search(query) == retriever.search(query)
    assert [document.id for document in again.documents] == ["a", "b", "c"]
    assert [document.metadata for document in again.documents] == [{}] * 3
    with pytest.raises(BadValueError, match="'a' has no tokens, and there is no other"):
        Retriever.build("vectors", {"a": []}, tmp_path / "none")
    with pytest.raises(BadValueError, match=r"shape \(0,\), expected \(4,\)"):
        Retriever.build("vectors", {"a": np.ones(4), "b": []}, tmp_path / "none")


def test_requests_to_qdrant_are_below_the_limit_of_a_server(tmp_path: Path) -> None:
    """Long texts count, as vectors do."""
    documents = [Document(f"d{n}", "word " * 500_000, vector=np.ones(4, np.float32)) for n in range(30)]
    contents = Contents(Retriever.build("vectors", documents, tmp_path / "index"), lambda count: None)
    batches = [*point_batches(contents)]
    assert [item.document.id for batch in batches for item in batch] == [f"d{n}" for n in range(30)]
    for batch in batches:
        points = [{"vector": item.vector.tolist(), "payload": payload(item)} for item in batch]
        assert len(json.dumps(points)) < 32 << 20
    assert len(batches) < 15  # several documents in each


def test_an_export_to_a_uri_is_refused(tmp_path: Path) -> None:
    words = Retriever.build("bm25", {"a": "text"}, tmp_path / "words")
    for to in ("jsonl", "vespa"):
        with pytest.raises(BadValueError, match=r"s3://bucket/notes\.jsonl: expected a path on this machine"):
            export(words, to, "s3://bucket/notes.jsonl")
