"""Build, search, rerank and explain: the interface that users call.

A `irkit.Retriever` (retriever.py) is a thin front. It has a `Collection` (collection.py): a store, its
index, its documents and the model, which the index records. Functions that take a collection do the work:
building.py, searching.py, reranking.py and explanation.py. selection.py has the options of searching and
reranking, scorer.py the `Scorer`, which scores documents for reranking and for training files, and
highlighting.py the coloured texts of an explanation. hybrid.py searches several retrievers as one. Begin with
collection.py and searching.py.
"""
