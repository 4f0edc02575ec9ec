"""irkit as a transformer of PyTerrier."""

from __future__ import annotations

from irkit.adapters.shared import missing
from irkit.evaluation.run import Run
from irkit.retrieval.retriever import Retriever

try:
    import pandas as pd
    import pyterrier as pt
except ImportError as error:
    raise missing("python-terrier", error) from error


class IrkitTransformer(pt.Transformer):
    """Retrieves documents for queries; scores documents by their ids where there are some, as a reranker.

    ``IrkitTransformer(retriever)`` retrieves, and ``first_stage >> IrkitTransformer(retriever)`` reranks.

    Args:
        retriever: An index.
        num_results: Maximum number of documents per query that are retrieved.
    """

    def __init__(self, retriever: Retriever, num_results: int = 1000) -> None:
        self.retriever, self.num_results = retriever, num_results

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return the columns of the frame, with ``docno``, ``score`` and ``rank`` added.

        Args:
            inp: Columns ``qid`` and ``query``; with a column ``docno``, these documents are scored.

        Raises:
            BadValueError: The index has no document of a ``docno``.
        """
        with pt.validate.any(inp) as check:
            check.query_frame(extra_columns=["query"], mode="retrieve")
            check.result_frame(extra_columns=["query"], mode="rerank")
        queries = list(zip(inp["qid"], inp["query"], strict=True))
        if check.mode == "retrieve":
            run, keys = self.retriever.run(queries, self.num_results), ["qid"]
        else:
            inp, keys = inp.drop(columns=["score", "rank"], errors="ignore"), ["qid", "docno"]
            lists = inp.groupby("qid", sort=False)["docno"]
            candidates = Run((query, list(ids), [0.0] * len(ids)) for query, ids in lists)
            run = self.retriever.rerank(dict(queries), candidates)
        hits = pd.DataFrame(list(run), columns=["qid", "docno", "score"])
        hits = hits.astype({"qid": "object", "docno": "object", "score": "float64"})
        hits["rank"] = hits.groupby("qid", sort=False).cumcount()
        return hits.merge(inp, on=keys)
