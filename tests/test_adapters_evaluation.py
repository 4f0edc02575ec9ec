"""The adapters of libraries that evaluate: MTEB, BEIR, PyTerrier and ranx give irkit's own numbers."""

from __future__ import annotations

import pytest

from irkit import Model, Retriever, Run, evaluate
from irkit.data import read_documents, read_qrels, read_queries
from irkit.errors import BadTypeError, BadValueError

REASON = "make adapters installs it"


@pytest.fixture(scope="module")
def collection(notes):
    """Documents, queries by id, and judgments; one document has no text, and one the id of a query."""
    documents = [
        *read_documents(notes),
        *({"_id": name, "text": text} for name, text in (("e", ""), ("q1", "index"))),
    ]
    records = [item if isinstance(item, dict) else {"_id": item.id, "text": item.text} for item in documents]
    return records, {query.id: query.text for query in read_queries(notes)}, read_qrels(notes)


@pytest.fixture(scope="module", params=["dense", "bm25"])
def retriever(request, collection, tiny_dense, tmp_path_factory):
    model = Model.from_pretrained(tiny_dense) if request.param == "dense" else "bm25"
    return Retriever.build(model, collection[0], tmp_path_factory.mktemp("built") / "index")


# ---- MTEB ----


@pytest.fixture(scope="module")
def make_task(collection):
    """Make a task of MTEB of the collection; with candidates a task of reranking."""
    pytest.importorskip("mteb", reason=REASON)
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    records, queries, qrels = collection
    settings = {
        "description": "Notes.",
        "dataset": {"path": "local/notes", "revision": "1"},
        "category": "t2t",
        "modalities": ["text"],
        "eval_splits": ["test"],
        "eval_langs": ["eng-Latn"],
        "main_score": "ndcg_at_10",
    }

    def make(top_ranked=None):
        kind = "Retrieval" if top_ranked is None else "Reranking"

        class Notes(AbsTaskRetrieval):
            metadata = TaskMetadata(name=f"Notes{kind}", type=kind, **settings)

            def load_data(self, **_):
                corpus = [{"id": record["_id"], "text": record["text"], "title": ""} for record in records]
                questions = [{"id": key, "text": text} for key, text in queries.items()]
                split = {"relevant_docs": qrels, "top_ranked": top_ranked}
                split |= {"corpus": Dataset.from_list(corpus), "queries": Dataset.from_list(questions)}
                self.dataset = {"default": {"test": split}}
                self.data_loaded = True

        return Notes()

    return make


def mteb_scores(model, task):
    import mteb

    result = mteb.evaluate(model, task, cache=None, show_progress_bar=False, co2_tracker=False)
    return result.task_results[0].scores["test"][0]


def assert_scores(scores, run, qrels):
    own = evaluate(run, qrels, "nDCG@10 R@3").mean
    for name, value in (("ndcg_at_10", own["nDCG@10"]), ("recall_at_3", own["R@3"])):
        assert scores[name] == pytest.approx(round(value, 5), abs=1e-6)  # MTEB rounds so


def test_mteb_search(retriever, collection, make_task):
    from irkit.adapters.mteb import IrkitSearch

    _, queries, qrels = collection
    search = IrkitSearch(retriever.model if retriever.model.kind == "dense" else "bm25")
    assert_scores(mteb_scores(search, make_task()), retriever.run(queries), qrels)
    lists = {query: ["d1", "d4", "d7", "e", "d4"] for query in [*queries][1:]} | {"q0": ["d0"]}
    candidates = Run.from_dict({query: dict.fromkeys(ids, 0.0) for query, ids in lists.items()})
    assert_scores(mteb_scores(search, make_task(lists)), retriever.rerank(queries, candidates), qrels)


def test_mteb_encoder(retriever, collection, make_task, tiny_dense, tiny_bert):
    from irkit.adapters.mteb import IrkitEncoder, IrkitSearch

    if retriever.model.kind != "dense":
        with pytest.raises(BadValueError, match="expected a dense model"):
            IrkitEncoder(Model.multi_vector(tiny_bert))
        return
    _, queries, qrels = collection
    encoder = IrkitEncoder(retriever.model)
    assert_scores(mteb_scores(encoder, make_task()), retriever.run(queries), qrels)
    meta = encoder.mteb_model_meta
    assert (meta.name, meta.revision) == (f"irkit/{tiny_dense.name}", retriever.model.fingerprint)
    with pytest.raises(BadValueError, match="no corpus was indexed"):
        IrkitSearch("bm25").search({}, task_metadata=None, top_k=1)


# ---- BEIR ----


def test_beir(retriever, collection):
    pytest.importorskip("beir", reason=REASON)
    from beir.retrieval.evaluation import EvaluateRetrieval
    from beir.retrieval.search.dense import DenseRetrievalExactSearch

    from irkit.adapters.beir import IrkitEncoder, IrkitSearch

    records, queries, qrels = collection
    corpus = {record["_id"]: {"title": "", "text": record["text"]} for record in records}
    own = evaluate(retriever.run(queries), qrels, "nDCG@10 AP@3", drop_identical_ids=True).mean
    models = [IrkitSearch(retriever.model if retriever.model.kind == "dense" else "bm25")]
    if retriever.model.kind == "dense":
        models.append(DenseRetrievalExactSearch(IrkitEncoder(retriever.model), show_progress_bar=False))
    for model in models:
        evaluation = EvaluateRetrieval(model, k_values=[3, 10], score_function="cos_sim")
        results = evaluation.retrieve(corpus, queries)
        assert "q1" not in results["q1"]
        ndcg, average_precision, _, _ = evaluation.evaluate(qrels, results, [3, 10])
        for value, name in ((ndcg["NDCG@10"], "nDCG@10"), (average_precision["MAP@3"], "AP@3")):
            assert value == pytest.approx(round(own[name], 5), abs=1e-6)  # BEIR rounds so


def test_beir_refuses_bad_input(tiny_bert):
    from irkit.adapters.beir import IrkitEncoder, IrkitSearch

    search = IrkitSearch("bm25")
    assert search.search({"a": {"text": "bears", "title": None}}, {"q": "bears"}, 100)["q"].keys() == {"a"}
    with pytest.raises(BadTypeError, match="text"):
        search.search({"a": {"text": 3}}, {"q": "bears"}, 1)
    with pytest.raises(BadValueError, match="expected a dense model"):
        IrkitEncoder(Model.sparse(tiny_bert))


# ---- PyTerrier ----


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # of pandas, in PyTerrier
def test_pyterrier(retriever, collection):
    pt = pytest.importorskip("pyterrier", reason=REASON)
    import pandas as pd

    from irkit.adapters.pyterrier import IrkitTransformer

    _, queries, qrels = collection
    own = IrkitTransformer(retriever)
    topics = pd.DataFrame({"qid": list(queries), "query": list(queries.values()), "lang": "en"})
    judged = [(query, name, grade) for query, row in qrels.items() for name, grade in row.items()]
    frame = pd.DataFrame(judged, columns=["qid", "docno", "label"])
    run = retriever.run(queries, k=1000)
    found = own(topics)
    assert list(zip(found["qid"], found["docno"], found["score"], strict=True)) == [tuple(row) for row in run]
    assert set(found.columns) == {"qid", "query", "lang", "docno", "score", "rank"}
    assert found.groupby("qid")["rank"].apply(list).map(lambda ranks: ranks == list(range(len(ranks)))).all()

    # pipelines: cut, rerank, fuse, experiment
    reranked = (own % 3 >> own)(topics)
    assert Run(_rankings(reranked)).to_dict() == retriever.rerank(queries, run.cut(3)).to_dict()
    table = pt.Experiment([own, own % 3 >> own], topics, frame, ["ndcg_cut_10", "recall_1"], plan="tree")
    values = evaluate(run, qrels, "nDCG@10 R@1").mean
    assert table["ndcg_cut_10"][0] == pytest.approx(values["nDCG@10"], abs=1e-9)
    assert table["recall_1"].tolist() == pytest.approx([values["R@1"]] * 2, abs=1e-9)
    assert (own + own)(topics)["score"].max() == pytest.approx(2 * found["score"].max())

    # bad input
    assert len(own(topics.head(0))) == len(own(found.head(0))) == 0
    assert len(own.search("index")) == len(retriever.search("index", k=1000))
    assert len(IrkitTransformer(retriever, num_results=2).search("index")) == 2
    with pytest.raises(KeyError, match="query"):
        own(pd.DataFrame({"qid": ["1"]}))
    with pytest.raises(BadValueError, match="no document 'x'"):
        own(pd.DataFrame({"qid": ["1"], "query": ["a"], "docno": ["x"]}))
    with pytest.raises(BadValueError, match="twice"):
        own(pd.DataFrame({"qid": ["1", "1"], "query": ["a", "b"]}))
    with pytest.raises(BadTypeError, match="string"):
        own(pd.DataFrame({"qid": ["1"], "query": [None]}))


def _rankings(frame):
    for query, rows in frame.groupby("qid", sort=False):
        yield query, rows["docno"].tolist(), rows["score"].tolist()


# ---- ranx ----


@pytest.mark.slow  # numba compiles ranx
@pytest.mark.filterwarnings("ignore:.*unsafe cast")
def test_ranx():
    ranx = pytest.importorskip("ranx", reason=REASON)
    from irkit.adapters.ranx import from_ranx, to_ranx

    run = Run.from_dict({"q2": {"d1": 1.5, "d2": 2.5}, "q1": {"d3": -1.0, "d10": 0.1 + 0.2}, "none": {}})
    qrels = {"q1": {"d3": 1}, "q2": {"d2": 2, "d1": 1}, "none": {"d1": 1}}
    made = to_ranx(run, "mine")
    assert made.name == "mine"
    assert from_ranx(made).to_dict() == run.to_dict()
    assert ranx.evaluate(ranx.Qrels(qrels), made, "ndcg@10") == pytest.approx(
        evaluate(run, qrels, "nDCG@10").mean["nDCG@10"], abs=1e-9
    )
    assert from_ranx(to_ranx(Run())).to_dict() == {}
    with pytest.raises(BadValueError, match="finite"):
        from_ranx(ranx.Run({"q": {"d": float("nan")}}))
