"""Build, search, rerank and explain: what users hold in their hands.

A `irkit.Retriever` (retriever.py) is a thin front. It has a `Collection` (collection.py): a store, its
index, its documents and the model. Functions that take a collection do the work: building.py, searching.py,
reranking.py and matching.py, which explains scores. scorer.py defines the `Scorer`, which scores documents
for reranking and for training files. hits.py converts between rows and ids, model_identity.py says which
model an index belongs to, and hybrid.py searches several retrievers as one. Begin with collection.py and
searching.py.
"""
